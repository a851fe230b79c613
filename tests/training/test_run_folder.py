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
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from scripts.training import files
from scripts.training.checkpoints import HASHES, Checkpoints
from scripts.training.messages import UserError
from scripts.training.run_folder import RunFolder
from scripts.training.settings import TrainConfig

STEPS, EVERY = 8, 3


@pytest.fixture
def config(tmp_path):
    return TrainConfig(
        out_dir=str(tmp_path / "run"), steps=STEPS, warmup_steps=1, keep_checkpoints=2
    )


def state_at(step, run=1.0):
    return {"step": jnp.int32(step), "weights": jnp.full((40, 50), run) * step}


def line_at(step, run=1.0):
    return {"step": step, "loss": run / step, "val_loss": None, "lr": 0.1}


def go(folder, until=STEPS, run=1.0):
    """Goes on with a run; returns the state it began with."""
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
    path = tmp_path_factory.mktemp("whole") / "run"
    return a_run(TrainConfig(out_dir=str(path), steps=STEPS, warmup_steps=1, keep_checkpoints=2))


@pytest.fixture
def run(whole_run, config):
    shutil.copytree(whole_run, config.out_dir)
    return Path(config.out_dir)


def tree(path):
    """Every file with its bytes, and every folder; the lock says who had it last."""
    return {
        p.relative_to(path).as_posix(): p.read_bytes() if p.is_file() else None
        for p in path.rglob("*")
        if p.name != "train_gpt.lock"
    }


def steps_in(path):
    return Checkpoints(path / "checkpoints").steps()


def refused(config, **kwargs):
    """The sentence by which a folder is refused."""
    with pytest.raises(UserError) as caught, RunFolder(config, "text", **kwargs):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ----------------------------------------------------------------------------- damaged checkpoints


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def garble(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = [truncate, empty, garble, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_of_a_checkpoint_is_seen(run, damage):
    """Every single file in turn, a single bit at the least."""
    checkpoints = Checkpoints(run / "checkpoints")
    newest = checkpoints.path / str(STEPS)
    names = [p for p in newest.rglob("*") if p.is_file() and p.stat().st_size]
    assert len(names) > 8
    for path in names:
        before = path.read_bytes()
        damage(path)
        reason = checkpoints._damage(newest)
        assert reason
        # A bit of the hashes may be one of another file's.
        assert path.name in reason or path.name == HASHES
        path.write_bytes(before)
    assert checkpoints._damage(newest) is None


def test_a_checkpoint_by_the_name_of_another_step_is_damaged(run, config, capsys):
    (run / "checkpoints" / "8").rename(run / "checkpoints" / "9")
    with RunFolder(config, "text") as folder:
        assert folder.last_step == 6
    assert "step 9 is damaged (hashes.json is that of another step)" in capsys.readouterr().err


def emptied(path):
    shutil.rmtree(path)
    path.mkdir()


def garbled(path):
    inside = [p for p in (path / "state").rglob("*") if p.is_file()]
    garble(max(inside, key=lambda p: p.stat().st_size))


@pytest.mark.parametrize("damage", [emptied, garbled])
def test_a_damaged_checkpoint_is_skipped_for_the_newest_whole_one(
    run, config, whole_run, capsys, damage
):
    damage(run / "checkpoints" / str(STEPS))
    with RunFolder(config, "text") as folder:
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "warning: the checkpoint of step 8 is damaged (" in error
        assert folder.last_step == 6
        begin = go(folder)
        np.testing.assert_array_equal(begin["weights"], 6.0)
    # Kept under another name, which no later run takes for a checkpoint.
    assert (run / "checkpoints" / "8.damaged").is_dir()
    assert steps_in(run) == [6, 8]
    assert (run / "metrics.jsonl").read_bytes() == (whole_run / "metrics.jsonl").read_bytes()
    with RunFolder(config, "text") as folder:
        assert folder.last_step == STEPS
    assert not capsys.readouterr().err


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_as_it_is(run, config):
    for step in (6, 8):
        garbled(run / "checkpoints" / str(step))
    before = tree(run)
    message = refused(config)
    assert "`out_dir` must have a whole checkpoint to be resumed; got" in message
    assert "8 (state/" in message
    assert "6 (state/" in message
    assert tree(run) == before


def test_what_orbax_cannot_read_is_one_sentence(run, config):
    with RunFolder(config, "text") as folder, pytest.raises(UserError) as caught:
        folder.resume(lambda: {"other": jnp.zeros(3)})
    assert "\n" not in str(caught.value)
    assert "`out_dir` must have checkpoints that this version of orbax reads" in str(caught.value)


def test_what_a_kill_left_unfinished_is_removed(run, config):
    (run / "checkpoints" / "unfinished" / "7" / "state").mkdir(parents=True)
    with RunFolder(config, "text"):
        assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["6", "8"]


# ------------------------------------------------------------------------------------------ metrics


def without(number, *more):
    """The lines without one of them, and with others at the end."""
    return lambda lines: [*lines[:number], *lines[number + 1 :], *more]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (None, 0),
        (lambda lines: [], 0),
        (lambda lines: [b"\xff\x00\xfe" * 50], 0),
        (lambda lines: [b"5", *lines[1:]], 7),
        (lambda lines: [*lines[:3], b'{"loss": 1.0}', *lines[4:]], 7),
        (lambda lines: [*lines[:2], lines[1], *lines[3:]], 7),
        (lambda lines: [*lines[:-1], lines[-1][:9]], 7),
        (lambda lines: lines[::-1], 8),
    ],
    ids=["lost", "empty", "binary", "number", "stepless", "doubled", "cut", "backwards"],
)
def test_metrics_are_rebuilt_from_the_checkpoint(run, config, whole_run, capsys, change, kept):
    path = run / "metrics.jsonl"
    if change is None:
        path.unlink()
    else:
        path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())) + b"\n")
    with RunFolder(config, "text") as folder:
        go(folder)
        assert [line["step"] for line in folder.metrics()] == list(range(1, STEPS + 1))
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"metrics.jsonl had {kept} of its first 8 lines as they were written" in error
    assert path.read_bytes() == (whole_run / "metrics.jsonl").read_bytes()


def test_lines_after_the_checkpoint_go_without_a_word(config, whole_run, capsys):
    run = a_run(config, until=7)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')
    with RunFolder(config, "text") as folder:
        go(folder)
    assert (run / "metrics.jsonl").read_bytes() == (whole_run / "metrics.jsonl").read_bytes()
    assert not capsys.readouterr().err


# ------------------------------------------------------------------------------- whose files it is


def write(name, content):
    def arrange(path):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content)

    return arrange


def folder_named(name):
    return lambda path: (path / name).mkdir(parents=True)


OURS = json.dumps(files.MARK)


def checkpoints_are_a_file(path):
    write("run.json", OURS)(path)
    write("checkpoints", "")(path)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("arrange", "fragment"),
    [
        (write("run.json", '{"my": "run"}'), 'run.json has no field "made_by" that names this'),
        (write("run.json", '["a", "list"]'), 'run.json has no field "made_by"'),
        (write("run.json", "7"), 'run.json has no field "made_by"'),
        (write("run.json", '{"made_by": "scr'), "run.json is no JSON"),
        (write("run.json", "[" * 100_000), "run.json is no JSON"),
        (write("run.json", ""), "run.json is no JSON"),
        (folder_named("run.json"), "run.json is no file"),
        (write("metrics.jsonl", "precious"), "with metrics.jsonl but no run.json"),
        (write("loss.png", "precious"), "with loss.png but no run.json"),
        (write("checkpoints/model.pt", "precious"), "with checkpoints but no run.json"),
        (write("before-restart/run.json", "{}"), "before-restart/run.json has no field"),
        (checkpoints_are_a_file, "must have no file 'checkpoints', where a folder belongs"),
    ],
)
def test_what_is_not_ours_is_refused_and_left(config, arrange, fragment, restart):
    arrange(Path(config.out_dir))
    write("checkpoints.txt", "theirs")(Path(config.out_dir))
    before = tree(Path(config.out_dir))
    message = refused(config, restart=restart)
    assert message.startswith("`out_dir` must ")
    assert fragment in message
    assert "pass another --out-dir" in message
    assert tree(Path(config.out_dir)) == before


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]"])
def test_a_damaged_run_json_is_mended_by_its_copy(run, config, content):
    before = json.loads((run / "run.json").read_bytes())
    (run / "run.json").unlink()
    if content is not None:
        (run / "run.json").write_bytes(content)
    message = refused(config)
    copy = run / "checkpoints" / str(STEPS) / "run.json"
    assert f"or copy {str(copy)!r} to that place" in message
    shutil.copy(copy, run)
    # The settings are the other folder's, but for where they are.
    assert json.loads((run / "run.json").read_bytes()) == before
    with RunFolder(config, "text") as folder:
        assert folder.last_step == STEPS


def test_files_of_others_in_our_folder_stay(run, config):
    theirs = {
        "notes.txt": b"mine",
        "checkpoints/model.pt": b"mine",
        "checkpoints/best/weights": b"mine",
        "checkpoints/08/weights": b"mine",
        "before-restart/notes.txt": b"mine",
    }
    for name, content in theirs.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(content)
    with RunFolder(config, "text", restart=True) as folder:
        go(folder)
    assert steps_in(run) == [6, 8]
    assert theirs.items() <= tree(run).items()


@pytest.mark.parametrize("name", ["x" * 300, "file/run"])
def test_a_folder_that_cannot_be_made_is_one_sentence(config, tmp_path, name):
    (tmp_path / "file").touch()
    config = dataclasses.replace(config, out_dir=str(tmp_path / name))
    assert "`out_dir` must be a folder that can be read and written; got '" in refused(config)


def test_a_folder_that_cannot_be_written_is_one_sentence(config, monkeypatch):
    real = os.open

    def read_only(path, flags, *args, **kwargs):
        if flags & os.O_CREAT and str(path).startswith(config.out_dir):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    assert "got 'Read-only file system' at '" in refused(config)


# --------------------------------------------------------------------------------------------- lock


@pytest.mark.parametrize("restart", [False, True])
def test_a_folder_in_use_is_refused(run, config, restart):
    """`test_train_resume.py` has the same with processes."""
    with RunFolder(config, "text"):
        before = tree(run)
        message = refused(config, restart=restart)
        assert f"where process {os.getpid()} on " in message
        assert tree(run) == before
    with RunFolder(config, "text") as folder:
        assert folder.last_step == STEPS
    assert (run / "train_gpt.lock").exists()


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


# ------------------------------------------------------------------------------------------ restart


def test_a_restart_that_fails_before_its_first_checkpoint_gives_the_old_run_back(
    run, config, capsys
):
    # As of a run that was killed before its end, so that the new one's is nothing to replace.
    (run / "loss.png").unlink()
    before = tree(run)
    with (
        pytest.raises(ZeroDivisionError),
        RunFolder(dataclasses.replace(config, seed=1), "text", restart=True) as folder,
    ):
        assert folder.last_step == 0
        assert steps_in(run / "before-restart") == [6, 8]
        go(folder, until=2, run=2.0)
        folder.plot()
        raise ZeroDivisionError
    assert tree(run) == before
    assert "restored   the run that --restart had moved aside" in capsys.readouterr().out


def test_the_old_run_comes_back_where_nobody_reads_that_it_does(run, config, monkeypatch):
    before = tree(run)
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError), RunFolder(config, "text", restart=True):
            raise ZeroDivisionError
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
    with RunFolder(config, "text") as folder:
        assert folder.last_step == STEPS
    assert {**tree(run), "run.json": None} == {**before, "run.json": None}


def test_a_restart_deletes_the_old_run_after_its_first_checkpoint(run, config):
    old = tree(run)
    with RunFolder(dataclasses.replace(config, seed=1), "text", restart=True) as folder:
        go(folder, until=2, run=2.0)
        aside = tree(run / "before-restart")
        assert {k: v for k, v in old.items() if v is not None}.items() <= aside.items()
        folder.append([line_at(3, 2.0)])
        folder.save(3, state_at(3, 2.0))
        assert not (run / "before-restart").exists()
    assert steps_in(run) == [3]


class Killed(BaseException):
    """Stands for a process that ends here."""


@contextlib.contextmanager
def killed_at(monkeypatch, number):
    """Lets so many changes of names happen on the disk, and none from then on.

    Yields a list that is empty if the end came before.
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
        for owner, name in [
            *((Path, name) for name in ("rename", "unlink", "mkdir", "rmdir")),
            (os, "replace"),
            (shutil, "rmtree"),
        ]:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        with contextlib.suppress(Killed):
            yield killed


def test_a_restart_killed_before_its_first_checkpoint_loses_nothing(
    run, config, monkeypatch, tmp_path
):
    """At any moment: on its way aside, with nothing yet, on its way back."""
    with RunFolder(config, "text"):
        pass
    old, template = tree(run), shutil.copytree(run, tmp_path / "template")
    for number in range(99):
        shutil.rmtree(run)
        shutil.copytree(template, run)
        with killed_at(monkeypatch, number) as killed, RunFolder(config, "text", restart=True):
            raise Killed
        with RunFolder(config, "text") as folder:
            assert folder.last_step == STEPS
        assert tree(run) == old
        if not killed:
            break
    assert 15 < number < 98


def test_a_restart_killed_after_its_first_checkpoint_keeps_that(run, config, monkeypatch, tmp_path):
    """At any moment of deleting the old run."""
    folder = RunFolder(config, "text", restart=True)
    monkeypatch.setattr(folder._aside, "settle", lambda: None)
    with folder:
        go(folder, until=3, run=2.0)
    assert steps_in(run / "before-restart") == [6, 8]
    new = {k: v for k, v in tree(run).items() if not k.startswith("before-restart")}
    template = shutil.copytree(run, tmp_path / "template")
    for number in range(99):
        shutil.rmtree(run)
        shutil.copytree(template, run)
        with killed_at(monkeypatch, number) as killed, RunFolder(config, "text"):
            pass
        with RunFolder(config, "text") as folder:
            assert folder.last_step == 3
        assert tree(run) == new
        if not killed:
            break
    assert 8 < number < 98


# ---------------------------------------------------------------------------------------- disk full


@contextlib.contextmanager
def room_for(size):
    """No file may grow beyond `size`: an error of the system's own at whoever writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_without_room_for_a_checkpoint_is_one_sentence(config, whole_run, capfd, caplog):
    run = a_run(config, until=5)
    with RunFolder(config, "text") as folder:
        folder.resume(lambda: state_at(0))
        for step in (4, 5, 6):
            folder.append([line_at(step)])
        state = state_at(6) | {"weights": jnp.asarray(np.random.rand(40, 50))}
        for size in (1, 50, 500, 2000, 5000):
            with room_for(size), pytest.raises(UserError) as caught:
                folder.save(6, state)
    assert str(caught.value).startswith("`out_dir` must take the run's checkpoints; got 'File too")
    assert "that of step 3 is whole; mend this, then run the same again." in str(caught.value)
    assert "\n" not in str(caught.value)
    out, err = capfd.readouterr()
    assert not out + err
    assert not caplog.records
    assert steps_in(run) == [3]
    with RunFolder(config, "text") as folder:
        assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["3"]
        go(folder)
    assert (run / "metrics.jsonl").read_bytes() == (whole_run / "metrics.jsonl").read_bytes()


def test_a_disk_without_room_for_a_line_is_one_sentence(config, whole_run):
    run = a_run(config, until=5)
    size = (run / "metrics.jsonl").stat().st_size
    with RunFolder(config, "text") as folder:
        folder.resume(lambda: state_at(0))
        with room_for(size - 20), pytest.raises(UserError) as caught:
            folder.append([line_at(step) for step in (4, 5, 6)])
    assert "got 'File too large' at " in str(caught.value)
    assert "the checkpoint of step 3 is whole" in str(caught.value)
    with RunFolder(config, "text") as folder:
        go(folder)
    assert (run / "metrics.jsonl").read_bytes() == (whole_run / "metrics.jsonl").read_bytes()


def test_a_disk_without_room_for_the_curves_is_a_warning(run, config, capsys):
    (run / "loss.png").write_bytes(b"old")
    with RunFolder(config, "text") as folder:
        folder.resume(lambda: state_at(0))
        with room_for(1000):
            folder.plot()
    assert "warning: loss.png was not written: File too large." in capsys.readouterr().err
    assert (run / "loss.png").read_bytes() == b"old"


def test_a_disk_without_room_at_the_start_leaves_what_was_there(run, config):
    before = tree(run)
    with room_for(100):
        assert "must be a folder that can be read and written" in refused(config)
    assert tree(run) == before


@pytest.mark.parametrize(("keep", "while_written"), [(1, 1), (2, 1), (3, 2)])
def test_old_checkpoints_make_room_before_the_next_is_written(
    config, monkeypatch, keep, while_written
):
    config = dataclasses.replace(config, keep_checkpoints=keep, steps=20)
    counts, real = [], ocp.Checkpointer.save

    def save(self, *args, **kwargs):
        counts.append(len(steps_in(Path(config.out_dir))))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(ocp.Checkpointer, "save", save)
    run = a_run(config, until=15)
    assert max(counts) == while_written
    assert len(steps_in(run)) == keep
    assert steps_in(run)[-1] == 15


def test_every_file_of_a_checkpoint_has_a_hash(run):
    folder = run / "checkpoints" / str(STEPS)
    hashes = json.loads((folder / HASHES).read_bytes())["sha256"]
    inside = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert inside - {HASHES} == set(hashes)
