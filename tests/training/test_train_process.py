"""The training script as a process: signals, pipes, packages that are missing."""

import os
import runpy
import signal
import sys
import types

import pytest
from support.tiny_run import flags

from scripts import train_gpt
from scripts.training.process import as_a_process

pytestmark = pytest.mark.usefixtures("compile_once")


def run_script(monkeypatch, argv):
    """The script from its first line, in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *argv])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(train_gpt.__file__, run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, before)
    return caught.value.code


def test_sigterm_before_the_loop_says_so(config, monkeypatch, capsys):
    monkeypatch.setattr(
        "scripts.training.text.load_text", lambda config: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert run_script(monkeypatch, flags(config)) == 130
    assert "stopped    at once, without a new checkpoint" in capsys.readouterr().out


def test_sigterm_among_the_imports_says_so(config, monkeypatch, capsys):
    class Slow(types.ModuleType):
        def __getattr__(self, name):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setitem(sys.modules, "tqdm", Slow("tqdm"))
    assert run_script(monkeypatch, flags(config)) == 130
    assert capsys.readouterr().out == "stopped    before anything ran\n"


def test_a_reader_that_goes_away_ends_the_script_quietly(config, monkeypatch, capfd):
    """As `| head` does."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert run_script(monkeypatch, flags(config)) == 141
        # What Python does at its end.
        stdout.flush()
    assert capfd.readouterr().err == ""


def test_an_output_that_cannot_be_written_is_one_sentence(config, monkeypatch, capfd):
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert run_script(monkeypatch, flags(config)) == 2
        stdout.flush()
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "error: reading or writing failed: [Errno 28] No space left on device" in error


def test_a_terminal_that_does_not_know_a_character_is_no_error(monkeypatch, tmp_path):
    with open(tmp_path / "out", "w", encoding="ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert as_a_process(lambda: print("\ufffd")) is None
    assert (tmp_path / "out").read_text() == "\\ufffd\n"


@pytest.mark.parametrize(
    "missing", ["jax", "flax", "optax", "numpy", "tqdm", "orbax", "matplotlib", "models"]
)
def test_a_missing_package_is_one_sentence(monkeypatch, missing):
    for name in [n for n in sys.modules if n.partition(".")[0] in (missing, "scripts")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(train_gpt.__file__)
    assert "\n" not in caught.value.code
    assert "this script needs a checkout installed with its `train` extra; got no module" in (
        caught.value.code
    )
    assert missing in caught.value.code
    assert "pip install -e '.[train]'" in caught.value.code
