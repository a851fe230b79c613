"""The benchmark's tables and figures, from lines of results."""

import json

import pytest

from scripts.benchmarks.bench_attention import main


def a_record(case, S, peer, tflops=None, ratio=None, direction="forward", T=None, ms=1.0, **more):
    record = {
        "shape": f"{case}-{S}",
        "case": case,
        "S": S,
        "T": T or S,
        **dict.fromkeys("BNKD", 1),
        "causal": False,
        "dtype": "bfloat16",
        "pass": direction,
        "implementation": peer,
        "config": {},
        "device": "a card",
        "versions": {"jax": "1.2.3"},
        "date": "2001-02-03T04:05:06",
        **more,
    }
    if tflops is None:
        return {**record, "red": {}}
    record |= {"ms": {"median": ms, "min": ms, "n": 1}, "tflops": tflops}
    if direction == "forward":
        record["tb_per_s"] = tflops / 100
    if ratio is not None:
        record["ratio"] = {"median": ratio, "min": ratio, "max": ratio, "n": 1}
    return record


RECORDS = [
    a_record("128 full", 16384, "ours", 400.4, 1.0),
    a_record("128 full", 2048, "ours", 100.0, 1.0),
    a_record("128 full", 2048, "jax_cudnn", 200.0, 0.5),
    a_record("128 full", 16384, "jax_cudnn", 200.0, 2.0),
    a_record("128 full", 16384, "jax_mha", 100.0, 4.0),
    a_record("128 full", 2048, "jax_mha", 100.0),  # In a run without ours.
    a_record("128 full with bias", 2048, "ours", 80.0, 1.0, ms=1.25),
    a_record("decode", 8192, "ours", 250.0, 1.0, T=1),
    a_record("128 full", 2048, "ours", 300.0, 1.0, "backward"),
    a_record("128 full", 4096, "jax_mha"),
    a_record("decode", 8192, "jax_xla", T=1),
]


@pytest.fixture
def results(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return file


TABLE = [
    "| | T | ours, TFLOP/s at the longest | / jax_cudnn | / jax_mha |",
    "|---|---|---|---|---|",
    "| forward 128 full | 2k, 16k | 400 | 1.00 (0.50 at 2k) | 4.00 |",
    "| forward 128 full with bias | 2k | 80, 1.25x the time without | | |",
    "| forward decode | 8k | 2.50 TB/s | | |",
    "| backward 128 full | 2k | 300 | | |",
]
SUSTAINED = a_record("128 causal", 2048, "ours", 90.0, 1.0, sustained={})


def test_table(results, capsys):
    main(["--table", str(results)])
    assert capsys.readouterr().out.splitlines() == TABLE


def test_each_way_of_timing_has_its_table(results, capsys):
    with results.open("a") as file:
        file.write(json.dumps(SUSTAINED) + "\n")
    main(["--table", str(results)])
    assert capsys.readouterr().out.splitlines() == [
        *("in bursts", "", *TABLE),
        *("", "sustained", ""),
        "| | T | ours, TFLOP/s at the longest |",
        "|---|---|---|",
        "| forward 128 causal | 2k | 90 |",
    ]
    results.write_text(json.dumps(SUSTAINED))
    main(["--table", str(results)])
    assert capsys.readouterr().out.splitlines()[-1] == "| forward 128 causal | 2k | 90 |"


def test_plots(results, tmp_path, capsys):
    with results.open("a") as file:
        file.write(json.dumps(SUSTAINED) + "\n")
    main(["--plot", str(results), "--out-dir", str(tmp_path / "plots")])
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {
        "forward-128-full.png",
        "sustained-forward-128-causal.png",
        "sustained-overview.png",
        "forward-128-full-with-bias.png",
        "forward-decode.png",
        "backward-128-full.png",
        "forward-scaling.png",
    }
    out = capsys.readouterr().out
    for name in names:
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")
        assert name in out
