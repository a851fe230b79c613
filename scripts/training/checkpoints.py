"""Checkpoints of a run: written whole or not at all, and verified before they are used.

    checkpoints/
        400/                one folder per step
            state/          (step, parameters, optimizer), by orbax
            metrics.jsonl   all lines up to this step
            run.json        the settings
            hashes.json     SHA-256 of each of these files: what makes the folder a checkpoint
        unfinished/         what is being written or removed, there for moments

A checkpoint gets its name when all of it is on the disk, hashes included, so a kill at any moment
leaves the ones before as they were. What happens to it later (a disk that loses bits, a copy that
was cut short) is seen by the hashes.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from scripts.training.distributed import barrier, is_of_a_death, is_writer
from scripts.training.files import MARK, cause, read_marked, sync_folder
from scripts.training.messages import UserError, warn

STATE, HASHES, UNFINISHED = "state", "hashes.json", "unfinished"


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        path: The folder; it need not exist.
        keep: How many the folder holds at most. From two on, the oldest makes room before the next
            is written, so that a disk for as many is enough.
    """

    def __init__(self, path: Path, keep: int = 1):
        self.path, self._keep = path, keep

    @functools.cached_property
    def _orbax(self):
        return ocp.Checkpointer(ocp.StandardCheckpointHandler())

    def named(self) -> list[int]:
        """The steps that folders are named by, whole or not."""
        names = [p.name for p in self.path.glob("*") if p.is_dir()]
        return sorted(int(x) for x in names if x.isascii() and x.isdigit() and str(int(x)) == x)

    def steps(self) -> list[int]:
        """The steps of our checkpoints: those with hashes, which are not verified here."""
        return [step for step in self.named() if (self.path / str(step) / HASHES).is_file()]

    def clean(self):
        """Removes what a kill has left in the middle of its work."""
        if (self.path / UNFINISHED).exists():
            shutil.rmtree(self.path / UNFINISHED)

    def newest(self) -> int:
        """The step of the newest whole checkpoint, 0 if there is none at all.

        Newer ones that are damaged are renamed, with a warning, and not deleted.

        Raises:
            UserError: There are checkpoints, and none is whole.
        """
        damaged = {}
        for step in reversed(self.named()):
            damage = self._damage(self.path / str(step))
            if damage is None:
                break
            damaged[step] = damage
        else:
            if damaged:
                reasons = ", ".join(f"{step} ({damage})" for step, damage in damaged.items())
                raise UserError(
                    f"`out_dir` must have a whole checkpoint to be resumed; got {str(self.path)!r} "
                    f"where every one is damaged: {reasons}: pass another --out-dir, or replace "
                    "that run by --restart."
                )
            return 0
        for other, damage in damaged.items():
            name = self._put_out_of_the_way(other)
            warn(
                f"the checkpoint of step {other} is damaged ({damage}) and was skipped; it is "
                f"{str(name)!r} now, and you may delete it."
            )
        return step

    def save(self, step: int, state, files: dict[str, str]):
        """Writes a checkpoint, with further files beside the state.

        Called by all processes: each writes its parts of the state, one of them all the rest.

        Raises:
            UserError: It could not be written; the one before is whole.
        """
        unfinished = self.path / UNFINISHED
        folder = unfinished / str(step)
        try:
            if is_writer():
                self.remove(self.steps()[: -max(self._keep - 1, 1)])
                folder.mkdir(parents=True)
            barrier("folder of a checkpoint")
            with _quiet_orbax():
                self._orbax.save(folder / STATE, args=ocp.args.StandardSave(state))
            if not is_writer():
                return
            for name, content in files.items():
                (folder / name).write_text(content)
            hashes = {name: _sha256(folder / name, sync=True) for name in _files(folder)}
            content = {**MARK, "step": step, "sha256": hashes}
            (folder / HASHES).write_text(json.dumps(content, indent=1) + "\n")
            _sha256(folder / HASHES, sync=True)
            for path, _, _ in os.walk(folder):
                sync_folder(Path(path))
            if (self.path / str(step)).exists():
                self._put_out_of_the_way(step)
            folder.rename(self.path / str(step))
            sync_folder(self.path)
            unfinished.rmdir()
            self.remove(self.steps()[: -self._keep])
        # Orbax and TensorStore raise what they like when a write fails.
        except Exception as error:
            if is_of_a_death(error):
                raise
            with contextlib.suppress(OSError):
                self.clean()
            last = max(self.steps(), default=None)
            kept = "there is none before" if last is None else f"that of step {last} is whole"
            raise UserError(
                f"`out_dir` must take the run's checkpoints; got {cause(error)!r} at that of "
                f"step {step} in {str(self.path)!r}: {kept}; mend this, then run the same again."
            ) from error

    def restore(self, step: int, init_state, lie=None):
        """The state of a checkpoint, read by all processes.

        Args:
            step: That of the checkpoint.
            init_state: Says what the state is made of.
            lie: From that to the sharding of each array, which need not be the one that was
                written; None is one device.
        """
        shapes = jax.eval_shape(init_state)
        if lie is not None:
            shapes = jax.tree.map(
                lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                shapes,
                lie(shapes),
            )
        try:
            with _quiet_orbax():
                return self._orbax.restore(
                    self.path / str(step) / STATE, args=ocp.args.StandardRestore(shapes)
                )
        # Orbax raises what it likes here, too.
        except Exception as error:
            if is_of_a_death(error):
                raise
            raise UserError(
                f"`out_dir` must have checkpoints that this version of orbax reads; got "
                f"{cause(error)!r} at step {step} in {str(self.path)!r}, though its bytes are as "
                "they were written."
            ) from error

    def read(self, step: int, name: str) -> str:
        """One of the files beside the state."""
        return (self.path / str(step) / name).read_text()

    def remove(self, steps: list[int]):
        """Deletes checkpoints of ours."""
        for step in steps:
            # Half a checkpoint must not have a checkpoint's name.
            (self.path / UNFINISHED).mkdir(exist_ok=True)
            (self.path / str(step)).rename(self.path / UNFINISHED / str(step))
            self.clean()

    def close(self):
        """Releases what orbax holds."""
        if "_orbax" in vars(self):
            self._orbax.close()

    def _put_out_of_the_way(self, step: int) -> Path:
        """Renames what has the name of a checkpoint and is not whole; returns its new name."""
        name, number = f"{step}.damaged", 1
        while (self.path / name).exists():
            number += 1
            name = f"{step}.damaged-{number}"
        return (self.path / str(step)).rename(self.path / name)

    @staticmethod
    def _damage(folder: Path) -> str | None:
        """What is wrong with a checkpoint; None if it is whole."""
        try:
            content = read_marked(folder / HASHES)
            hashes = content["sha256"]
            if not hashes or content["step"] != int(folder.name):
                return f"{HASHES} is that of another step"
            for name, expected in hashes.items():
                if _sha256(folder / name) != expected:
                    return f"{name} has other bytes than were written"
        except FileNotFoundError as error:
            return f"{Path(error.filename).relative_to(folder)} is missing"
        except OSError as error:
            return cause(error)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{HASHES} {error if isinstance(error, ValueError) else 'is garbled'}"
        return None


def _files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _sha256(path: Path, *, sync: bool = False) -> str:
    """The hash of a file, which with `sync` is on the disk when this returns."""
    with open(path, "rb+" if sync else "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _quiet_orbax():
    """Without what the threads of orbax and TensorStore print when a write fails.

    The error is raised as well. After it they go on to print for a while, so they stay quiet.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    before, hook = [logger.disabled for logger in loggers], sys.unraisablehook

    def quiet_hook(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = quiet_hook
    for logger in loggers:
        logger.disabled = True
    yield
    sys.unraisablehook = hook
    for logger, disabled in zip(loggers, before, strict=True):
        logger.disabled = disabled
