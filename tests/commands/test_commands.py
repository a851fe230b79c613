"""Every mistake that the commands of scripts/ can meet: one table, one sentence each.

Tests of `python -m pallas_flash tune` are in test_tune_command.py, and tests of the trainers in
test_train_*.py.
"""

import json
import os
import pathlib
import sys

import jax
import pytest
from support import children
from support.repository import assert_none

from scripts.benchmarks import bench_attention, bench_pages, run
from scripts.command import command
from scripts.maintenance import inspect_kernels

ROOT = pathlib.Path(__file__).parents[2]
MEASURED = json.dumps(
    {
        "shape": "a-1k",
        "case": "a",
        "T": 1024,
        "S": 1024,
        **dict.fromkeys("BNKD", 1),
        "causal": False,
        "dtype": "bfloat16",
        "pass": "backward",
        "implementation": "ours",
        "config": {},
        "device": "a card",
        "versions": {"jax": "1.2.3"},
        "date": "2001-02-03T04:05:06",
        "ms": {"median": 1.0, "min": 1.0, "n": 1},
        "tflops": 1.0,
    }
)
REFUSED = MEASURED.replace('"ms"', '"red"').replace('"tflops"', '"n"').replace("a-1k", "b-1k")


# The files of the folder that the commands are called in, each named after its command.
FILES = {
    "measured": f"{MEASURED}\n{REFUSED}\n",
    "refused": f"{REFUSED}\n",
    "inspected": '{"jax": "1.2.3", "kernels": {}}\n',
    "empty": "",
    "half": f"{MEASURED}\n{MEASURED[:100]}",
    "bytes": b"\xff\xfe\x00",
    "number": "5\n",
    "deep": "[" * 100_000,
    "null": "null\n",
    "metrics": '{"step": 1, "loss": 2.0}\n',
    "no-kernels": '{"jax": "1.2.3"}',
    "no-record": '{"jax": "1.2.3", "kernels": {"a": 3}}',
}
INT = "must be an int from 1 to 2**31 - 1; got"
SECONDS = "must be a positive number of seconds; got"
NOT_READ = "A file that --json wrote must be named; got {}: {}."
RUN = "--shapes small-256 --peers ours_reference --passes forward"
TILES = "must look like forward=128,64,8,3"

# (words, a fragment of the sentence), by command.
BENCH = {
    "--table missing": NOT_READ.format("missing", "no such file or directory"),
    "--plot folder": NOT_READ.format("folder", "is a directory"),
    "--table bytes": NOT_READ.format("bytes", "no text"),
    **{
        f"--table {name}": f"{name} must have a record that --json wrote in each line"
        for name in ("number", "deep", "null")
    },
    "--plot half": "in line 2: it is no object. Remove the line, if it is one cut short",
    "--table empty": "must have measurements of these --peers; got none",
    "--plot empty": "must have measurements of these --peers; got none",
    "--plot refused": "must have measurements of these --peers; got none",
    "--plot measured --out-dir empty": "--out-dir must be a folder, or a new one; got empty",
    "--plot measured --out-dir=": "--out-dir: must be a path; got ''",
    "--table=": "--table: must be a path; got ''",
    "--table measured --plot measured": "not allowed with argument --table",
    **{f"--rounds {x}": f"--rounds: {INT} '{x}'" for x in ("0", "1.5", "2147483648")},
    "--iterations 0": f"--iterations: {INT} '0'",
    "--lenght 64": "unrecognized arguments: --lenght 64; did you mean --length?",
    "--colour red": "unrecognized arguments: --colour red",
    "--heads 3 --kv-heads 2": "--heads must be a multiple of --kv-heads; got 3 and 2.",
    "--key-length 9 --window 2": "--window, --segments and --lengths must come without --key",
    "--length 4 --segments 5": "--segments must be at most --length; got 5 and 4.",
    "--soft-cap 0": "--soft-cap: must be a positive number; got '0'",
    "--dropout 1": "--dropout: must be a number between 0 and 1; got '1'",
    "--soft-cap 5 --bias": "argument --bias: not allowed with argument --soft-cap",
    **{f"--budget {x}": f"--budget: {SECONDS} '{x}'" for x in ("nan", "0", "soon")},
    "--sustained inf": f"--sustained: {SECONDS} 'inf'",
    "--shapes huge": "--shapes must be names that --list prints; got 'huge'",
    "--peers nobody": "invalid choice: 'nobody'",
    "--passes sideways": "invalid choice: 'sideways'",
    f"{RUN} --json folder": "--json must be a file that can be written; got folder",
    f"{RUN} --json missing/new": "--json must be a file that can be written; got missing/new",
    f"{RUN} --json /dev/full": "--json must be a file that can be written; got /dev/full",
    f"{RUN} --json metrics": "metrics must have a record that --json wrote in each line",
    f"{RUN} --json=": "--json: must be a path; got ''",
}
INSPECT = {
    **{
        f"--tiles {x}": TILES
        for x in (
            *("forward", "forward=64,64,4,-3", "=64,64,4,3", "forward=64,64,4,3,2"),
            "forward=a,b,c,d",
        )
    },
    "--tiles forward=17,64,4,3": "`block_q` must be one of (16, 32, 64, 128, 256); got 17",
    "--tiles forward=64,64,4,99": "`num_stages` must be one of",
    "--tiles sideways=64,64,4,3": "--tiles must be for kernels among forward, decode, dkv",
    "--tiles dq=64,64,4,3 dq=64,64,4,2": "once each; got 'dq'",
    "--tiles dk=64,64,4,3": "`dk` and `dv` must be given together",
    "--dtypes int7": "invalid choice: 'int7'",
    "--groups 3": "invalid choice: 3",
    **{f"--{name} 0": INT for name in ("length", "queries", "head-dims")},
    "--length 33 --masks ragged": "--length must be at least --queries, and 33 more",
    "--length 64 --queries 65": "--length must be at least --queries",
    "--target h300": "invalid choice: 'h300'",
    "--masks huge": "invalid choice: 'huge'",
    "--features hair": "invalid choice: 'hair'",
    "--against missing": NOT_READ.format("missing", "no such file or directory"),
    "--against bytes": NOT_READ.format("bytes", "no text"),
    **{
        f"--against {name}": f"{name} must be a file that --json wrote; got another."
        for name in ("empty", "half", "number", "deep", "null", "measured", "no-kernels")
    },
    "--against no-record": "no-record must be a file that --json wrote; got another.",
    "--json measured": "measured must be a file that --json wrote; got another.",
    "--json folder": "--json must be a file that can be written; got folder.",
    "--json missing/new": "--json must be a file that can be written; got missing/new.",
    "--json=": "--json: must be a path; got ''",
    "--dump empty": "--dump must be a folder, or a new one; got the file empty.",
}
PAGES = {
    "--peers nobody": "--peers must be among triton, mosaic, invariant, xla, cudnn and mosaic=W,",
    "--peers triton=2,64,2": "got 'triton=2,64,2'.",
    "--heads 3 --kv-heads 2": "--heads must be a multiple of --kv-heads; got 3 and 2.",
    "--cases huge": "invalid choice: 'huge'",
}
OF_MODULES = (bench_attention, BENCH), (bench_pages, PAGES), (inspect_kernels, INSPECT)
TABLE = [
    (module.main, words, fragment)
    for module, rows in OF_MODULES
    for words, fragment in rows.items()
]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "folder").mkdir()
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def is_one_sentence(end, out, err, fragment):
    """Whether a command that ended so said one sentence, with this fragment, and nothing else."""
    if isinstance(end, str):  # Python prints it, and the exit status is 1.
        return end.startswith("error: ") and fragment in end and "\n" not in end + out + err
    return end == 2 and err.startswith("usage: ") and fragment in err.splitlines()[-1] and not out


def test_a_mistake_ends_in_one_sentence(capsys, folder):
    """Nothing is begun, and nobody's file touched."""
    before, offenders = contents(folder), []
    for main, words, fragment in TABLE:
        try:
            code = main(words.split())
        except SystemExit as end:
            code = end.code
        said = code, *capsys.readouterr()
        if not is_one_sentence(*said, fragment) or contents(folder) != before:
            offenders.append(f"{main.__module__} {words}: {said}")
    assert_none(offenders)


def test_a_machine_without_devices(monkeypatch, folder):
    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(SystemExit, match=r"JAX must find a device; got AssertionError\(\)"):
        bench_attention.main([*RUN.split(), "--json", "new"])
    assert not (folder / "new").exists()


def test_a_last_line_without_an_end_gets_one(monkeypatch, folder):
    (folder / "measured").write_text(MEASURED)
    monkeypatch.setattr(run.Bench, "run", lambda self, *_: self.emit(json.loads(REFUSED)))
    monkeypatch.setattr(bench_attention, "line", str)
    bench_attention.main([*RUN.split(), "--json", "measured"])
    first, second = (folder / "measured").read_text().splitlines()
    assert first == MEASURED
    assert json.loads(second)["red"]


def test_a_full_disk_ends_in_one_sentence(monkeypatch, folder):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.Bench, "run", full)
    with pytest.raises(SystemExit, match=r"error: .*No space left on device"):
        bench_attention.main([*RUN.split(), "--json", "new"])


def test_a_stop_is_quiet(monkeypatch, folder):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.Bench, "run", stopped)
    with pytest.raises(SystemExit, match="interrupted"):
        bench_attention.main(RUN.split())


def test_closed_streams_are_empty(monkeypatch):
    """By the shell, as in `<&-`: Python has none then."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)

    @command
    def main():
        print("lost", file=sys.stderr)
        return sys.stdin.isatty(), sys.stdin.read()

    assert main() == (False, "")
    for name in ("stdin", "stdout", "stderr"):
        getattr(sys, name).close()


def test_closed_pipe_ends_quietly():
    """As under `| head`: standard output is a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    done = children.run(
        [sys.executable, ROOT / "scripts" / "benchmarks" / "bench_attention.py", "--list"],
        stdout=write,
        stderr=children.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
