"""The run folder of the training script: nothing whole is lost, and nothing of others is touched.

A run here is a few numbers that stand for a model's state, so that it takes no training.
"""

import contextlib
import dataclasses
import errno
import json
import os
import resource
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from scripts.training import run_folder
from scripts.training.checkpoints import Checkpoints
from scripts.training.processes import UserError
from scripts.training.run_folder import RESTART, RunFolder
from scripts.training.settings import TrainConfig

STEPS, EVERY = 8, 3


@pytest.fixture
def config(tmp_path):
    return config_in(tmp_path)


def config_in(path):
    return TrainConfig(out_dir=str(path / "run"), steps=STEPS, warmup_steps=1, keep_checkpoints=2)


def state_at(step, run=1.0):
    return {"step": jnp.int32(step), "weights": jnp.full((40, 50), run) * step}


def line_at(step, run=1.0):
    return {"step": step, "loss": run / step, "val_loss": None, "lr": 0.1}


def go(folder, until=STEPS, run=1.0):
    """Go on with a run; return the state it began with."""
    begin = folder.resume(lambda: state_at(0))
    for step in range(folder.last_step + 1, until + 1):
        folder.append([line_at(step, run)])
        if step % EVERY == 0 or step == STEPS:
            folder.save(step, state_at(step, run))
    return begin


def a_run(config, until=STEPS, **kwargs):
    with RunFolder(config, "text") as folder:
        go(folder, until, **kwargs)
        folder.plot()
    return Path(config.out_dir)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run with checkpoints at steps 6 and 8, to be copied."""
    return a_run(config_in(tmp_path_factory.mktemp("whole")))


@pytest.fixture
def run(whole_run, config):
    return Path(shutil.copytree(whole_run, config.out_dir))


def tree(path):
    """Return every file with its bytes, and every folder; the lock names who had it last."""
    return {
        p.relative_to(path).as_posix(): p.read_bytes() if p.is_file() else None
        for p in path.rglob("*")
        if p.name != "train_gpt.lock"
    }


def steps_in(path):
    return Checkpoints(path / "checkpoints").steps()


def metrics_in(path):
    return (path / "metrics.jsonl").read_bytes()


def refused(config, **kwargs):
    """Return the sentence by which a folder is refused."""
    with pytest.raises(UserError) as caught, RunFolder(config, "text", **kwargs):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ----------------------------------------------------------------------------- damaged checkpoints


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def garble_state(run, step):
    files = [p for p in (run / "checkpoints" / str(step) / "state").rglob("*") if p.is_file()]
    garble(max(files, key=lambda p: p.stat().st_size))


@pytest.mark.parametrize("damage", [truncate, garble, Path.unlink])
def test_checkpoint_damage_to_any_file_is_seen(run, damage):
    """Every single file in turn, by a single bit at the least."""
    checkpoints = Checkpoints(run / "checkpoints")
    newest = checkpoints.path / str(STEPS)
    names = [p for p in newest.rglob("*") if p.is_file() and p.stat().st_size]
    assert len(names) > 8
    for path in names:
        before = path.read_bytes()
        damage(path)
        assert checkpoints.damage(STEPS), path
        path.write_bytes(before)
    assert checkpoints.damage(STEPS) is None


def test_checkpoint_of_another_step_is_damaged(run, config, capsys):
    (run / "checkpoints" / "8").rename(run / "checkpoints" / "9")
    with RunFolder(config, "text") as folder:
        assert folder.last_step == 6
    assert "step 9 is damaged (hashes.json is missing, damaged or of" in capsys.readouterr().err


def test_damaged_checkpoint_is_skipped(run, config, whole_run, capsys):
    garble_state(run, STEPS)
    with RunFolder(config, "text") as folder:
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "warning: the checkpoint of step 8 is damaged (state/" in error
        assert folder.last_step == 6
        np.testing.assert_array_equal(go(folder)["weights"], 6.0)
    # It is kept under another name, which no later run takes for a checkpoint.
    assert len(list((run / "checkpoints").glob("8.damaged-*"))) == 1
    assert steps_in(run) == [6, 8]
    assert metrics_in(run) == metrics_in(whole_run)
    with RunFolder(config, "text") as folder:
        assert folder.last_step == STEPS
    assert not capsys.readouterr().err


def test_all_checkpoints_damaged_is_refused(run, config):
    for step in (6, 8):
        garble_state(run, step)
    before = tree(run)
    message = refused(config)
    assert "`out_dir` must have a whole checkpoint to be resumed; got" in message
    assert "8 (state/" in message and "6 (state/" in message
    assert tree(run) == before


def test_checkpoint_orbax_cannot_read(run, config):
    with RunFolder(config, "text") as folder, pytest.raises(UserError, match="version of orbax"):
        folder.resume(lambda: {"other": jnp.zeros(3)})


@pytest.mark.parametrize("moment", ["while orbax writes", "before the hashes", "at their end"])
def test_kill_while_saving_leaves_nothing(run, config, monkeypatch, capsys, moment):
    class Killed(BaseException):
        pass

    def kill(*args, **kwargs):
        raise Killed

    owner, name = {
        "while orbax writes": (ocp.CheckpointManager, "save"),
        "before the hashes": (Checkpoints, "_finish"),
        "at their end": (Path, "replace"),
    }[moment]
    with pytest.raises(Killed), RunFolder(config, "text") as folder, monkeypatch.context() as patch:
        folder.resume(lambda: state_at(0))
        patch.setattr(owner, name, kill)
        folder.save(9, state_at(9))
    (run / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir()
    with RunFolder(config, "text") as folder:
        assert folder.last_step == STEPS
        folder.save(9, folder.resume(lambda: state_at(0)))
        assert {p.name for p in (run / "checkpoints").iterdir()} == {"8", "9"}
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("keep", "while_written"), [(1, 1), (2, 1), (3, 2)])
def test_old_checkpoints_make_room(config, monkeypatch, keep, while_written):
    config = dataclasses.replace(config, keep_checkpoints=keep, steps=20)
    counts, real = [], ocp.CheckpointManager.save

    def save(self, *args, **kwargs):
        counts.append(len(steps_in(Path(config.out_dir))))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    run = a_run(config, until=15)
    assert max(counts) == while_written
    assert len(steps_in(run)) == keep
    assert steps_in(run)[-1] == 15


def test_last_checkpoint_stays_until_next_whole(config, monkeypatch):
    config = dataclasses.replace(config, keep_checkpoints=1)
    present, real = [], Checkpoints._finish

    def finish(self, *args):
        present.append(steps_in(Path(config.out_dir)))
        real(self, *args)

    monkeypatch.setattr(Checkpoints, "_finish", finish)
    a_run(config)
    assert present == [[], [3], [6]]


# ------------------------------------------------------------------------------------------ metrics


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [],
        lambda lines: [b"5", *lines[1:]],
        lambda lines: [*lines[:-1], lines[-1][:9]],
    ],
    ids=["empty", "number", "cut"],
)
def test_metrics_come_back_from_the_checkpoint(run, config, whole_run, capsys, change):
    (run / "metrics.jsonl").write_bytes(b"\n".join(change(metrics_in(run).splitlines())))
    with RunFolder(config, "text") as folder:
        go(folder)
        assert [line["step"] for line in folder.metrics()] == list(range(1, STEPS + 1))
    assert "metrics.jsonl was damaged; it has its first 8 lines again" in capsys.readouterr().err
    assert metrics_in(run) == metrics_in(whole_run)


def test_lines_after_the_checkpoint_go(config, whole_run, capsys):
    run = a_run(config, until=7)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')
    with RunFolder(config, "text") as folder:
        go(folder)
    assert metrics_in(run) == metrics_in(whole_run)
    assert not capsys.readouterr().err


# ------------------------------------------------------------------------------ owners of the files


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", '{"my": "run"}'),
        ("run.json", "[" * 100_000),
        ("metrics.jsonl", "precious"),
        ("checkpoints/model.pt", "precious"),
        (f"{RESTART}/notes.txt", "precious"),
        ("weights/model.safetensors", "precious"),
    ],
    ids=["other run.json", "no JSON", "metrics", "checkpoints", "restart", "weights"],
)
def test_folder_of_others_is_refused(config, name, content, restart):
    path = Path(config.out_dir, name)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    before = tree(Path(config.out_dir))
    message = refused(config, restart=restart)
    assert f"with {name.split('/')[0]} but no run.json that this script has written" in message
    assert "pass another --out-dir" in message
    assert tree(Path(config.out_dir)) == before


def test_lost_run_json_comes_back_from_its_copy(run, config):
    (run / "run.json").unlink()
    assert "each of this script's checkpoints has a copy of its run.json" in refused(config)
    shutil.copy(run / "checkpoints" / str(STEPS) / "run.json", run)
    with RunFolder(config, "text") as folder:
        assert folder.last_step == STEPS


def test_files_of_others_in_our_folder_stay(run, config):
    theirs = {
        "notes.txt": b"mine",
        "checkpoints/model.pt": b"mine",
        "checkpoints/best/weights": b"mine",
        "checkpoints/08/weights": b"mine",
    }
    for name, content in theirs.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(content)
    with RunFolder(config, "text", restart=True) as folder:
        go(folder)
    assert steps_in(run) == [6, 8]
    assert theirs.items() <= tree(run).items()


# --------------------------------------------------------------------------------------------- lock


@pytest.mark.parametrize("restart", [False, True])
def test_folder_in_use_is_refused(run, config, restart):
    """`test_train_resume.py` has the same with processes."""
    with RunFolder(config, "text"):
        before = tree(run)
        assert f"where process {os.getpid()} on " in refused(config, restart=restart)
        assert tree(run) == before
    with RunFolder(config, "text") as folder:
        assert folder.last_step == STEPS


@pytest.mark.parametrize("missing", ["module", "lock"])
def test_without_locks_there_is_a_warning(config, monkeypatch, capsys, missing):
    def no_lock(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if missing == "module":
        monkeypatch.setattr(run_folder, "fcntl", None)
    else:
        monkeypatch.setattr(run_folder.fcntl, "flock", no_lock)
    a_run(config, until=3)
    assert "cannot be locked (" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ restart


def test_restart_that_fails_leaves_the_old_run(run, config):
    before = tree(run)
    changed = dataclasses.replace(config, seed=1)
    with pytest.raises(ZeroDivisionError), RunFolder(changed, "text", restart=True) as folder:
        assert folder.last_step == 0
        go(folder, until=2, run=2.0)
        raise ZeroDivisionError
    assert tree(run) == before


def test_restart_replaces_at_its_first_checkpoint(run, config):
    changed, others = dataclasses.replace(config, seed=1), ("weights", "tokenizer.json")
    for name in others:
        (run / name).mkdir() if name == "weights" else (run / name).touch()
    with RunFolder(changed, "text", restart=True) as folder:
        go(folder, until=2, run=2.0)
        assert all((run / name).exists() for name in others)
    with RunFolder(changed, "text", restart=True) as folder:
        go(folder, until=5, run=2.0)
        assert not any((run / name).exists() for name in others)
        assert steps_in(run) == [3]
        go_on = [json.loads(line) for line in metrics_in(run).splitlines()]
        assert go_on == [line_at(step, 2.0) for step in range(1, 6)]
        assert json.loads((run / "run.json").read_bytes())["seed"] == 1
        assert not (run / "loss.png").exists()
    assert not (run / RESTART).exists()


class Killed(BaseException):
    """The end of a process."""


@contextlib.contextmanager
def killed_at(monkeypatch, number):
    """Let so many changes of names happen on the disk, and none from then on.

    Gives a list that is empty if the end came before.
    """
    done, killed = [], []

    def counted(real):
        def change(*args, **kwargs):
            if len(done) >= number:
                killed.append(real)
                raise Killed
            done.append(real)
            return real(*args, **kwargs)

        return change

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "unlink", "mkdir"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        with contextlib.suppress(Killed):
            yield killed


def test_restart_killed_anywhere_keeps_a_run(run, config, monkeypatch, tmp_path, capsys):
    template, found = shutil.copytree(run, tmp_path / "template"), []
    for number in range(99):
        shutil.rmtree(run)
        shutil.copytree(template, run)
        with (
            killed_at(monkeypatch, number) as killed,
            RunFolder(config, "text", restart=True) as folder,
        ):
            go(folder, until=3, run=2.0)
        with RunFolder(config, "text") as folder:
            begin = folder.resume(lambda: state_at(0))
            scale = float(begin["weights"][0, 0]) / folder.last_step
            assert folder.metrics() == [line_at(i + 1, scale) for i in range(folder.last_step)]
            assert steps_in(run) == ([6, 8] if scale == 1.0 else [3])
        assert not (run / RESTART).exists()
        found.append((folder.last_step, scale))
        if not killed:
            break
    assert set(found) == {(8, 1.0), (3, 2.0)}
    assert found == sorted(found, reverse=True)
    assert 8 < number < 98
    assert "damaged" not in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- disk full


@contextlib.contextmanager
def room_for(size):
    """Let no file grow beyond `size`: an error of the system's own at whoever writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# After a failed write, TensorStore may call back into an event loop that orbax has closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_disk_full_at_a_checkpoint_is_a_sentence(config, whole_run, capfd):
    run = a_run(config, until=5)
    with RunFolder(config, "text") as folder:
        folder.resume(lambda: state_at(0))
        for step in (4, 5, 6):
            folder.append([line_at(step)])
        state = state_at(6) | {"weights": jnp.asarray(np.random.rand(40, 50))}
        for size in (1, 500, 5000):
            with room_for(size), pytest.raises(UserError) as caught:
                folder.save(6, state)
            assert "`out_dir` must take the run's checkpoints; got " in str(caught.value)
            assert "the one before is whole, so repair this" in str(caught.value)
            assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err
    assert steps_in(run) == [3]
    with RunFolder(config, "text") as folder:
        go(folder)
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"6", "8"}
    assert metrics_in(run) == metrics_in(whole_run)


def test_disk_full_at_a_line_keeps_the_run(config, whole_run):
    run = a_run(config, until=5)
    size = len(metrics_in(run))
    with RunFolder(config, "text") as folder:
        folder.resume(lambda: state_at(0))
        with room_for(size - 20), pytest.raises(OSError, match="File too large"):
            folder.append([line_at(step) for step in (4, 5, 6)])
    with RunFolder(config, "text") as folder:
        go(folder)
    assert metrics_in(run) == metrics_in(whole_run)


def test_disk_full_at_the_curves_is_a_warning(run, config, capsys):
    (run / "loss.png").write_bytes(b"old")
    with RunFolder(config, "text") as folder:
        folder.resume(lambda: state_at(0))
        with room_for(1000):
            folder.plot()
    assert "warning: loss.png was not written: [Errno 27]" in capsys.readouterr().err
    assert (run / "loss.png").read_bytes() == b"old"
