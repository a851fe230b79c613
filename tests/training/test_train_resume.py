"""The trainer resumes to the same bits, and refuses runs of other settings."""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import jax
import pytest
from support import cases, children
from support.repository import ROOT
from support.tiny_run import STEPS, checkpoint_steps, flags, metrics

from models.train import main
from models.training import loop
from models.training.folder import RunFolder
from models.training.loop import train

pytestmark = pytest.mark.usefixtures("compile_once")


class Killed(BaseException):
    """The end of a process: nothing in the script may catch it."""


def die_at_batch(monkeypatch, step):
    real = loop.training_batch

    def training_batch(text, at, *args):
        # The first batch of a session is also made for compiling.
        if at == step and dies.pop("waits", None) is None:
            raise Killed
        return real(text, at, *args)

    dies = {"waits": True} if step == 1 else {}
    monkeypatch.setattr(loop, "training_batch", training_batch)


def die_in(name):
    """Kill right after the folder has appended the lines of a step, or saved it."""

    def arrange(monkeypatch, step):
        real = getattr(RunFolder, name)

        def work(self, *args):
            result = real(self, *args)
            last = args[0][-1]["step"] if name == "append" else args[0]
            if last >= step:
                raise Killed
            return result

        monkeypatch.setattr(RunFolder, name, work)

    return arrange


DEATHS = [
    (die_at_batch, 6, 5),
    # The lines of a checkpoint are there, the checkpoint is not.
    (die_in("append"), 12, 10),
    (die_in("save"), 10, 10),
    (die_at_batch, 1, 0),
    (die_in("append"), 5, 0),
    (die_in("save"), 12, 12),
]


@pytest.mark.parametrize(("arrange", "step", "resumed_from"), cases.default(DEATHS[:2], DEATHS))
def test_killed_run_resumes_to_the_same_bits(
    finished, config, monkeypatch, capsys, arrange, step, resumed_from
):
    with monkeypatch.context() as patch:
        arrange(patch, step)
        with pytest.raises(Killed):
            train(config)
    capsys.readouterr()
    result = train(config)
    out = capsys.readouterr().out
    assert (f"resuming   after step {resumed_from}," in out) == (0 < resumed_from < STEPS)
    assert metrics(config) == metrics(finished[0])
    assert result.val_loss == finished[1].val_loss
    assert checkpoint_steps(config) == [10, 12]


@pytest.mark.extended
def test_sigkill_while_saving_resumes(config, tmp_path, capsys):
    """By SIGKILL, with a checkpoint after every step: most of the time goes into writing them."""
    long = dataclasses.replace(config, steps=40, checkpoint_every=1, log_every=1)
    command = [sys.executable, "-m", "models.train", *flags(long)]
    environment = {
        **os.environ,
        # The same programs, or the bits may differ.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    path = Path(long.out_dir, "metrics.jsonl")
    process = children.start(
        command,
        env=environment,
        cwd=ROOT,
        stdout=children.PIPE,
        stderr=children.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < 17:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    # A second one in the same folder, while the first holds its breath and its lock.
    process.send_signal(signal.SIGSTOP)
    assert main(flags(long)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"where process {process.pid} on " in error
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    # Its lock ended with it, and nothing before that touched its files.
    assert 17 <= len(path.read_text().splitlines()) < 40
    train(long)
    whole = dataclasses.replace(long, out_dir=str(tmp_path / "whole"), checkpoint_every=40)
    train(whole)
    assert metrics(long) == metrics(whole)
    held_out = {x["step"]: x["val_loss"] for x in metrics(long) if x["val_loss"] is not None}
    assert checkpoint_steps(long) == [min(held_out, key=held_out.get), 39, 40]


@pytest.mark.parametrize("number", cases.default([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]))
def test_interrupt_saves_and_says_how_to_resume(finished, config, monkeypatch, capsys, number):
    real = loop.training_batch

    def training_batch(text, step, *args):
        if step == 7:
            os.kill(os.getpid(), number)
        return real(text, step, *args)

    before = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "training_batch", training_batch)
        assert main(flags(config)) == 130
    assert [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)] == before
    out = capsys.readouterr().out
    assert "stopped    after step 7, checkpoint saved; resume with: python -m models.tr" in out
    assert f"--out-dir {config.out_dir}" in out
    # The lowest held-out loss so far was at step 4.
    assert checkpoint_steps(config) == [4, 5, 7]
    # What there is so far leaves as weights, too.
    assert {p.name for p in Path(config.out_dir).iterdir()} >= {"loss.png", "weights"}
    assert main(flags(config)) == 0
    assert metrics(config) == metrics(finished[0])


def test_interrupt_before_training_says_so(config, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "load_text", interrupt)
    assert main(flags(config)) == 130
    assert "stopped    at once, without a new checkpoint" in capsys.readouterr().out


def test_reader_of_the_output_that_ends(config):
    """As `| head -1` does."""
    command = [sys.executable, "-m", "models.train", *flags(config)]
    pipes = dict(stdout=children.PIPE, stderr=children.PIPE, text=True)
    with children.start(command, cwd=ROOT, **pipes) as run:
        run.stdout.readline()
        run.stdout.close()
        errors = run.stderr.read()
    assert run.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in errors and "Exception ignored" not in errors
    assert errors.splitlines()[-1].startswith("train: error: what reads the output has ended, and")


def test_finished_run_is_left_alone(finished, capsys):
    config, first = finished
    before = Path(config.out_dir, "metrics.jsonl").read_text()
    assert main(flags(config)) == 0
    out = capsys.readouterr().out
    assert f"holds this run with all its {STEPS} steps: nothing to train" in out
    assert Path(config.out_dir, "metrics.jsonl").read_text() == before
    again = train(config)
    assert (again.val_loss, again.speed) == (first.val_loss, None)


def test_other_settings_are_refused_by_name(finished, tmp_path, capsys):
    config, _ = finished
    before = Path(config.out_dir, "run.json").read_text()
    (tmp_path / "book").write_text("another text " * 100)
    changes = {"steps": 13, "num_kv_heads": 2, "learning_rate": 1e-3, "data": tmp_path / "book"}
    assert main(flags(config, **changes)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in (
        "--num-kv-heads (there 1, now 2)",
        "--steps (there 12, now 13)",
        "the text of --data or --conversations",
    ):
        assert part in error
    assert "batch-size" not in error
    assert Path(config.out_dir, "run.json").read_text() == before


def test_settings_without_effect_may_change(finished, config, corpus, monkeypatch):
    with monkeypatch.context() as patch:
        die_at_batch(patch, 7)
        with pytest.raises(Killed):
            train(config)
    moved = Path(config.out_dir).with_name("moved")
    Path(config.out_dir).rename(moved)
    config = dataclasses.replace(
        config, out_dir=str(moved), data=f"{corpus}/.", log_every=1, checkpoint_every=1
    )
    train(config)
    assert metrics(config) == metrics(finished[0])


def test_run_begins_with_the_weights_of_another(finished, config):
    other, result = finished
    # A rate of almost zero keeps the parameters, and so the loss on held-out text.
    more = dataclasses.replace(config, init_from=other.out_dir, learning_rate=1e-12, seed=3)
    assert train(more).val_loss == pytest.approx(result.val_loss, rel=1e-5)
    assert metrics(other) != metrics(more)
