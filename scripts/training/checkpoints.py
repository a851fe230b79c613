"""Checkpoints of a run, by orbax's checkpoint manager, with hashes that show damage.

    checkpoints/
        400/                one folder for each step
            state/          (step, parameters, optimizer), by orbax
            metrics.jsonl   all lines up to this step
            run.json        the settings
            hashes.json     SHA-256 of every other file; it is written last
        unfinished/         names the step that is being written

The manager writes arrays from all processes, names a folder when it is complete, removes folders
that a killed process has left, and restores arrays onto any mesh. It does not wait for the disk and
does not read back. So one process then flushes and hashes every file, and only hashes.json makes a
folder a checkpoint. A process that is killed before that leaves a name in `unfinished/`, by which
the next process removes the folder.
"""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import absl.logging
import jax
import orbax.checkpoint as ocp

from scripts.training.processes import UserError, first_line, is_writer, several, warn

HASHES, STATE, UNFINISHED = "hashes.json", "state", "unfinished"
# The field by which a JSON file says that this script has written it.
MARK = {"made_by": "scripts/train_gpt.py of pallas_flash"}


def read_marked(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file of this script, None if it is not one."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    ours = isinstance(content, dict) and MARK.items() <= content.items()
    return content if ours else None


def write_file(path: Path, content: str | bytes):
    """Replace a file such that a kill or a full disk leaves the old content or the new."""
    temporary = path.with_name(f".{path.name}.train_gpt")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        sha256_of(temporary, flush=True)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256_of(path: Path, *, flush: bool = False) -> str:
    """Return the hash of a file; with `flush` the disk has its bytes when this returns."""
    with open(path, "rb+" if flush else "rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        path: The folder; it need not exist.
        keep: Most checkpoints in the folder. From two on, the oldest is removed before the next is
            written, so that a disk for as many is enough.
    """

    def __init__(self, path: Path, keep: int = 1):
        self.path, self._keep = path, keep
        self._manager: ocp.CheckpointManager | None = None

    def folders(self) -> list[int]:
        """Return the steps in names of folders, whole checkpoints or not, in ascending order."""
        names = [p.name for p in self.path.glob("*") if p.is_dir()]
        return sorted(int(x) for x in names if x.isascii() and x.isdigit() and str(int(x)) == x)

    def steps(self) -> list[int]:
        """Return the steps of finished checkpoints, which are not verified here."""
        return [step for step in self.folders() if (self.path / str(step) / HASHES).is_file()]

    def remove_unfinished(self):
        """Remove the checkpoint that a killed process has left unfinished."""
        unfinished = self.path / UNFINISHED
        if unfinished.exists():
            for mark in unfinished.iterdir():
                shutil.rmtree(self.path / mark.name, ignore_errors=True)
            shutil.rmtree(unfinished)

    def newest(self) -> int:
        """Return the step of the newest whole checkpoint, 0 if the folder has none at all.

        Newer checkpoints, which are damaged, are renamed with a warning, and not deleted.

        Raises:
            UserError: There are checkpoints, and every one is damaged.
        """
        damaged = {}
        for step in reversed(self.folders()):
            damage = self.damage(step)
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
            # A folder of this name is no checkpoint for later runs.
            name = self.path / f"{other}.damaged-{time.strftime('%Y%m%dT%H%M%S')}"
            (self.path / str(other)).rename(name)
            warn(
                f"the checkpoint of step {other} is damaged ({damage}) and was skipped; it is "
                f"{str(name)!r} now, and you may delete it."
            )
        return step

    def open(self):
        """Start orbax's manager; every process calls this before it saves or restores."""
        # Its threads would print pages about an error that is also raised.
        absl.logging.set_verbosity(absl.logging.FATAL)
        options = ocp.CheckpointManagerOptions(
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
            save_root_metadata=False,
            single_host_load_and_broadcast=several(),
        )
        self._manager = ocp.CheckpointManager(self.path, item_names=(STATE,), options=options)

    def close(self):
        """Stop orbax's manager."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def save(self, step: int, state, files: dict[str, str]):
        """Write a checkpoint, with further text files beside the state; every process calls this.

        Raises:
            UserError: It could not be written; the one before is whole.
        """
        mark = self.path / UNFINISHED / str(step)
        try:
            self._keep_newest(max(self._keep - 1, 1))
            if is_writer():
                mark.mkdir(parents=True)
            saved = ocp.args.Composite(**{STATE: ocp.args.StandardSave(state)})
            self._manager.save(step, args=saved, force=True)
            if is_writer():
                self._finish(step, files)
                shutil.rmtree(mark.parent)
            self._keep_newest(self._keep)
        except Exception as error:  # Orbax and TensorStore raise many types when a write fails.
            if is_writer():
                self.remove_unfinished()
            raise UserError(
                f"`out_dir` must take the run's checkpoints; got {first_line(error)!r} at "
                f"step {step} in {str(self.path)!r}: the one before is whole, so repair this, "
                "then run the same command again."
            ) from error

    def restore(self, step: int, init_state, shardings_of=None):
        """Return the state of a checkpoint; every process calls this.

        Args:
            step: The step of the checkpoint.
            init_state: Returns a state of the same structure; it is only traced.
            shardings_of: Maps the state's shapes to the sharding of each array, which may differ
                from the sharding that was written; None puts all arrays on one device.
        """
        shapes = jax.eval_shape(init_state)
        if shardings_of is not None:
            shapes = jax.tree.map(
                lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                shapes,
                shardings_of(shapes),
            )
        wanted = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(shapes)})
        try:
            return self._manager.restore(step, args=wanted)[STATE]
        except Exception as error:  # Orbax raises many types, and no type for another version.
            raise UserError(
                "`out_dir` must have checkpoints that this version of orbax reads; got "
                f"{first_line(error)!r} at step {step} in {str(self.path)!r}, though its bytes are "
                "as they were written."
            ) from error

    def newest_whole(self) -> int:
        """Return the step of the newest whole checkpoint, 0 without one; nothing is changed."""
        for step in reversed(self.steps()):
            damage = self.damage(step)
            if damage is None:
                return step
            warn(f"the checkpoint of step {step} is damaged ({damage}) and was skipped.")
        return 0

    def parameters(self, step: int, shapes, shardings=None):
        """Return the parameters of a checkpoint, without the optimizer's state; all processes call.

        Args:
            step: The step of the checkpoint.
            shapes: The tree of their shapes.
            shardings: The tree of their shardings; None puts all on one device.

        Raises:
            UserError: The checkpoint has no such parameters.
        """
        absl.logging.set_verbosity(absl.logging.FATAL)
        if shardings is None:
            place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            shardings = jax.tree.map(lambda x: place, shapes)
        wanted = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            {"params": shapes},
            {"params": shardings},
        )
        options = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        try:
            with ocp.PyTreeCheckpointer() as reader:
                return reader.restore(self.path / str(step) / STATE, options)["params"]
        except Exception as error:  # Orbax documents no type for files that it cannot read.
            raise UserError(
                f"{str(self.path)!r} must have checkpoints that this version of orbax reads; got "
                f"{first_line(error)!r} at step {step}."
            ) from error

    def read(self, step: int, name: str) -> str:
        """Return one of the text files beside the state."""
        return (self.path / str(step) / name).read_text(encoding="utf-8")

    def damage(self, step: int) -> str | None:
        """Return the damage to a checkpoint in a few words, None if it is whole."""
        folder = self.path / str(step)
        content = read_marked(folder / HASHES)
        if content is None or not content.get("sha256") or content.get("step") != step:
            return f"{HASHES} is missing, damaged or of another step"
        try:
            for name, expected in content["sha256"].items():
                if sha256_of(folder / name) != expected:
                    return f"{name} has other bytes than were written"
        except OSError as error:
            return f"{name}: {error.strerror}"
        return None

    def _finish(self, step: int, files: dict[str, str]):
        """Write the text files and the hashes of a checkpoint whose state is written."""
        folder = self.path / str(step)
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")
        paths = sorted(p for p in folder.rglob("*") if p.is_file())
        hashes = {p.relative_to(folder).as_posix(): sha256_of(p, flush=True) for p in paths}
        write_file(folder / HASHES, json.dumps({**MARK, "step": step, "sha256": hashes}, indent=1))

    def _keep_newest(self, count: int):
        for step in sorted(self._manager.all_steps())[:-count]:
            self._manager.delete(step)
