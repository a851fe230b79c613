"""The run folder of the trainer: nothing whole is lost, and nothing of others is touched.

A run here is a few numbers that stand for a model's state, so that it takes no training.
"""

import contextlib
import dataclasses
import errno
import os
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from models.training import files, folder
from models.training.folder import RunFolder, damage_of
from models.training.processes import UserError
from models.training.settings import TrainConfig

STEPS, EVERY = 8, 3


@pytest.fixture
def config(tmp_path):
    return config_in(tmp_path)


def config_in(path):
    return TrainConfig(out_dir=str(path / "run"), steps=STEPS, warmup_steps=1, keep_checkpoints=2)


def state_at(step, run=1.0):
    return {"step": jnp.int32(step), "weights": jnp.full((40, 50), run) * step}


def restore(opened, step=None):
    places = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    step = step or opened.last_step

    def shardings(shapes):
        return jax.tree.map(lambda x: places, shapes)

    return opened.restore(step, lambda: state_at(0), shardings) if step else state_at(0)


def line_at(step, run=1.0):
    return {"step": step, "loss": run / step, "val_loss": None, "lr": 0.1}


def go(opened, until=STEPS, run=1.0):
    """Go on with a run; return the state it began with."""
    begin = restore(opened)
    for step in range(opened.last_step + 1, until + 1):
        opened.append([line_at(step, run)])
        if step % EVERY == 0 or step == STEPS:
            opened.save(step, state_at(step, run))
    return begin


def a_run(config, until=STEPS, **kwargs):
    with RunFolder(config, "text") as opened:
        go(opened, until, **kwargs)
        opened.plot()
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
        if p.name != "train.lock"
    }


def steps_in(path):
    names = [p.parent.name for p in path.glob("checkpoints/*/checksums.json")]
    return sorted(int(name) for name in names if name.isdecimal())


def metrics_in(path):
    return (path / "metrics.jsonl").read_bytes()


def refused(config):
    """Return the sentence by which a folder is refused."""
    with pytest.raises(UserError) as caught, RunFolder(config, "text"):
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
    newest = run / "checkpoints" / str(STEPS)
    names = [p for p in newest.rglob("*") if p.is_file() and p.stat().st_size]
    assert len(names) > 8
    for path in names:
        before = path.read_bytes()
        damage(path)
        assert damage_of(newest), path
        path.write_bytes(before)
    assert damage_of(newest) is None


def test_checkpoint_of_another_step_is_damaged(run, config, capsys):
    (run / "checkpoints" / "8").rename(run / "checkpoints" / "9")
    with RunFolder(config, "text") as opened:
        assert opened.last_step == 6
    assert "step 9 is damaged (checksums.json is damaged or of" in capsys.readouterr().err


def test_damaged_checkpoint_is_skipped(run, config, whole_run, capsys):
    garble_state(run, STEPS)
    with RunFolder(config, "text") as opened:
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "warning: the checkpoint of step 8 is damaged (state/" in error
        assert opened.last_step == 6
        np.testing.assert_array_equal(go(opened)["weights"], 6.0)
    # It is kept under another name, which no later run takes for a checkpoint.
    assert len(list((run / "checkpoints").glob("8.damaged-*"))) == 1
    assert steps_in(run) == [6, 8]
    assert metrics_in(run) == metrics_in(whole_run)
    with RunFolder(config, "text") as opened:
        assert opened.last_step == STEPS
    assert not capsys.readouterr().err


def test_all_checkpoints_damaged_is_refused(run, config):
    for step in (6, 8):
        garble_state(run, step)
    before = tree(run)
    message = refused(config)
    assert "`out_dir` must have a whole checkpoint to be resumed; got" in message
    assert "8 (state/" in message and "6 (state/" in message
    assert tree(run) == before


def test_checkpoints_without_checksums_are_put_aside(run, config, capsys):
    """One may be what a kill left, if it is the newest of several; nothing else is deleted."""
    (run / "checkpoints" / "6" / "checksums.json").unlink()
    with RunFolder(config, "text") as opened:
        assert opened.last_step == 8
    assert "the checkpoint of step 6 has no checksums.json" in capsys.readouterr().err
    (run / "checkpoints" / "8" / "checksums.json").unlink()
    with RunFolder(config, "text") as opened:
        assert opened.last_step == 0
    names = sorted(p.name.partition("-")[0] for p in (run / "checkpoints").iterdir())
    assert names == ["6.unfinished", "8.unfinished"]


def test_checkpoint_orbax_cannot_read(run, config):
    with RunFolder(config, "text") as opened, pytest.raises(UserError, match="version of orbax"):
        opened.restore(8, lambda: {"other": jnp.zeros(3)}, lambda shapes: {"other": None})


class Killed(BaseException):
    """The end of a process."""


MOMENTS = {
    "while orbax writes": (ocp.CheckpointManager, "save"),
    "before the checksums": (folder, "write_checksums"),
    "at their end": (Path, "replace"),
    "before the oldest goes": (ocp.CheckpointManager, "delete"),
    "while the oldest goes": (shutil, "rmtree"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_while_saving_leaves_nothing(run, config, monkeypatch, capsys, moment):
    def kill(*args, **kwargs):
        if moment == "while the oldest goes":
            next(args[0].rglob("checksums.json")).unlink()
        raise Killed

    with pytest.raises(Killed), RunFolder(config, "text") as opened, monkeypatch.context() as patch:
        restore(opened)
        patch.setattr(*MOMENTS[moment], kill)
        opened.append([line_at(9)])
        opened.save(9, state_at(9))
    (run / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir()
    with RunFolder(config, "text") as opened:
        assert opened.last_step == STEPS + moment.endswith("the oldest goes")
        opened.save(10, restore(opened))
        names = {p.name for p in (run / "checkpoints").iterdir()}
        assert names == ({"9", "10"} if moment.endswith("the oldest goes") else {"8", "10"})
    assert not capsys.readouterr().err


@pytest.mark.parametrize("keep", [1, 2])
def test_last_checkpoint_stays_until_next_whole(config, monkeypatch, keep):
    config, present = dataclasses.replace(config, keep_checkpoints=keep), []
    real = folder.write_checksums

    def write(path):
        present.append(steps_in(Path(config.out_dir)))
        real(path)

    monkeypatch.setattr(folder, "write_checksums", write)
    run = a_run(config)
    assert present == [[], [3], [3, 6][-keep:]]
    assert steps_in(run) == [3, 6, 8][-keep:]


# ------------------------------------------------------------------------------------------ metrics


def test_lowest_held_out_loss_is_kept(config, capsys):
    """Beside the newest; its damage is named, and the newest takes its place."""
    with RunFolder(config, "text") as opened:
        for step, loss in enumerate([5.0, 2.0, 4.0, 3.0, 2.0], 1):
            opened.append([line_at(step) | {"val_loss": loss}])
            opened.save(step, state_at(step))
            assert opened.best_step() == opened.best_whole_step() == min(step, 2)
    run = Path(config.out_dir)
    assert steps_in(run) == [2, 4, 5]
    garble_state(run, 2)
    with RunFolder(config, "text") as opened:
        assert not capsys.readouterr().err
        assert (opened.best_step(), opened.best_whole_step()) == (2, 5)
    assert "step 2, of the lowest held-out loss, is damaged (state/" in capsys.readouterr().err


def test_damaged_metrics_are_named(run, config, capsys):
    lines = metrics_in(run).splitlines()
    (run / "metrics.jsonl").write_bytes(b"\n".join([*lines[:4], lines[4][:9], *lines[5:]]))
    with RunFolder(config, "text") as opened:
        assert [line["step"] for line in opened.metrics] == [1, 2, 3, 4, 6, 7, 8]
    assert "metrics.jsonl was damaged: it has no line for step 5." in capsys.readouterr().err


def test_lines_after_the_checkpoint_go(config, whole_run, capsys):
    run = a_run(config, until=7)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')
    with RunFolder(config, "text") as opened:
        go(opened)
    assert metrics_in(run) == metrics_in(whole_run)
    assert not capsys.readouterr().err


# ------------------------------------------------------------------------------ owners of the files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", '{"my": "run"}'),
        ("run.json", "[" * 100_000),
        ("metrics.jsonl", "precious"),
        ("checkpoints/model.pt", "precious"),
        ("weights/model.safetensors", "precious"),
    ],
    ids=["other run.json", "no JSON", "metrics", "checkpoints", "weights"],
)
def test_folder_of_others_is_refused(config, name, content):
    path = Path(config.out_dir, name)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    before = tree(Path(config.out_dir))
    message = refused(config)
    assert f"with {name.split('/')[0]}, which is no run of this trainer" in message
    assert "pass another --out-dir" in message
    assert tree(Path(config.out_dir)) == before


def test_files_of_others_in_our_folder_stay(run, config):
    names = ("notes.txt", "checkpoints/model.pt", "checkpoints/best/weights")
    for name in names:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(b"mine")
    with RunFolder(config, "text") as opened:
        opened.save(9, restore(opened))
    assert steps_in(run) == [8, 9]
    assert all((run / name).read_bytes() == b"mine" for name in names)


SPELLINGS = {
    "the same": {},
    "defaults": dict(num_kv_heads=4, lora_alpha=4.0, lora_targets=None),
    "order": dict(lora_targets="up_proj,q_proj,up_proj"),
    "slash": dict(init_from="tuned/"),
    "run": dict(init_from="../weights/tuned"),
    "weights": dict(init_from="tuned/weights"),
    "absolute": dict(init_from=lambda path: str(path / "weights" / "tuned")),
    "another alpha": dict(lora_alpha=5.0),
    "other targets": dict(lora_targets="q_proj"),
    "another folder": dict(init_from="copy"),
}


def test_run_of_another_spelling_goes_on(config, tmp_path, monkeypatch):
    """A value is written in several ways, and a folder has several paths."""
    weights = tmp_path / "weights" / "tuned" / "weights"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    shutil.copytree(weights, tmp_path / "weights" / "copy")
    monkeypatch.chdir(tmp_path / "weights")
    first = dict(init_from="tuned", lora_rank=2, lora_targets="q_proj,up_proj")
    config, matrices = dataclasses.replace(config, **first), ("q_proj", "up_proj")
    with RunFolder(config, "text", matrices) as opened:
        go(opened)
    for name, changes in SPELLINGS.items():
        changes = {x: y(tmp_path) if callable(y) else y for x, y in changes.items()}
        other = dataclasses.replace(config, **changes)
        if name.startswith(("another", "other targets")):
            with pytest.raises(UserError, match=f"differs in `{next(iter(changes))}` "):
                RunFolder(other, "text", matrices).__enter__()
        else:
            with RunFolder(other, "text", matrices) as opened:
                assert opened.last_step == STEPS, name


# --------------------------------------------------------------------------------------------- lock


def test_folder_in_use_is_refused(run, config):
    """`test_train_resume.py` has the same with processes."""
    with RunFolder(config, "text"):
        before = tree(run)
        assert f"where process {os.getpid()} on " in refused(config)
        assert tree(run) == before
    with RunFolder(config, "text") as opened:
        assert opened.last_step == STEPS


@pytest.mark.parametrize("missing", ["module", "lock"])
def test_without_locks_there_is_a_warning(config, monkeypatch, capsys, missing):
    def no_lock(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if missing == "module":
        monkeypatch.setattr(files, "fcntl", None)
    else:
        monkeypatch.setattr(files.fcntl, "flock", no_lock)
    a_run(config, until=3)
    assert "cannot be locked (" in capsys.readouterr().err


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
    with RunFolder(config, "text") as opened:
        restore(opened)
        for step in (4, 5, 6):
            opened.append([line_at(step)])
        state = state_at(6) | {"weights": jnp.asarray(np.random.rand(40, 50))}
        for size in (1, 500, 5000):
            with room_for(size), pytest.raises(UserError) as caught:
                opened.save(6, state)
            assert "`out_dir` must take the run's checkpoints; got " in str(caught.value)
            assert "the one before is whole, so repair this" in str(caught.value)
            assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err
    assert steps_in(run) == [3]
    with RunFolder(config, "text") as opened:
        go(opened)
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"6", "8"}
    assert metrics_in(run) == metrics_in(whole_run)


def test_disk_full_at_a_line_keeps_the_run(config, whole_run):
    run = a_run(config, until=5)
    size = len(metrics_in(run))
    with RunFolder(config, "text") as opened:
        restore(opened)
        with room_for(size - 20), pytest.raises(OSError, match=r"large: .*metrics.jsonl"):
            opened.append([line_at(step) for step in (4, 5, 6)])
    with RunFolder(config, "text") as opened:
        go(opened)
    assert metrics_in(run) == metrics_in(whole_run)


def test_disk_full_at_the_curves_is_a_warning(run, config, capsys):
    (run / "loss.png").write_bytes(b"old")
    with RunFolder(config, "text") as opened:
        restore(opened)
        with room_for(1000):
            opened.plot()
    error = capsys.readouterr().err
    said = "warning: the curves were not written: [Errno 27] File too large: "
    assert f"{said}'{run}/loss.png'" in error
    assert (run / "loss.png").read_bytes() == b"old"
