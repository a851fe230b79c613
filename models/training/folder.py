"""The folder of a run: settings, metrics, curves, checkpoints, weights.

    run.json         the settings, with the mark by which the folder is one of this code
    metrics.jsonl    one line for each step
    loss.png         their curves
    checkpoints/     by orbax's manager: one folder for each step, with the state (step, parameters,
                     optimizer), and checksums.json, the SHA-256 of every other file
    adapter/         the adapter of a run with lora_rank, as peft reads it
    weights/         the model in the layout of published weights, written when a session ends
    train.lock       kept; locked while a process works here

Any process may be killed at any moment, because files are replaced or appended, and orbax names a
checkpoint when it is complete. Orbax does not read back: it restores numbers from a file with a
flipped bit without an error. So a checkpoint counts only with its checksums, which come last.

Process 0 opens the folder and writes to it; all processes write the arrays of a checkpoint.
"""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import absl.logging
import jax
import orbax.checkpoint as ocp
from matplotlib.figure import Figure

from models.errors import UserError, naming
from models.training.files import MARK, RUN, lock, read_marked, sha256_of, write_file
from models.training.processes import first_line, is_writer, result_of_writer, several, warn
from models.training.settings import FREE, TrainConfig, settings_alike
from models.training.weights import hashes_of

METRICS, CURVES, CHECKPOINTS, LOCK = "metrics.jsonl", "loss.png", "checkpoints", "train.lock"
CHECKSUMS, STATE, DELETED = "checksums.json", "state", ".deleted"
# Settings that are hashes, in words.
HASHED = {"text": "the text of `data` or `conversations`", "weights": "the files in `init_from`"}
# Seconds until every process can read a file that process 0 has written.
VISIBLE_WITHIN = 60


def write_checksums(folder: Path):
    """Write the SHA-256 of every file of a checkpoint, which then counts."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {path.relative_to(folder).as_posix(): sha256_of(path, flush=True) for path in paths}
    write_file(folder / CHECKSUMS, json.dumps({**MARK, "step": folder.name, "sha256": sums}))


def damage_of(folder: Path) -> str | None:
    """Return the damage to a checkpoint in a few words, None if it is whole."""
    content = read_marked(folder / CHECKSUMS)
    if content is None or content.get("step") != folder.name or not content.get("sha256"):
        return f"{CHECKSUMS} is damaged or of another step"
    for name, expected in content["sha256"].items():
        try:
            if sha256_of(folder / name) != expected:
                return f"{name} has other bytes than were written"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


class RunFolder:
    """The files of one run, which is new, or a run of the same settings that goes on.

    As a context, it keeps other processes from opening the folder.

    Args:
        config: The settings, complete.
        text_hash: The hash of the text that the run reads.
        matrices: The names in `lora_targets` that stand for all.

    Attributes:
        last_step: The step of the newest whole checkpoint, 0 if there is none.
        metrics: The lines of all steps, in process 0.

    Raises:
        UserError: The folder holds another run or other files, is in use, or has damaged
            checkpoints alone.
    """

    def __init__(self, config: TrainConfig, text_hash: str, matrices: Sequence[str] = ()):
        self.path, self.last_step = Path(config.out_dir).absolute(), 0
        self.metrics: list[dict[str, Any]] = []
        self._checkpoints = self.path / CHECKPOINTS
        self._config, self._matrices = config, matrices
        self._settings = {**MARK, **dataclasses.asdict(config), "text": text_hash, "weights": None}
        self._exit = contextlib.ExitStack()

    def __enter__(self):
        self.last_step = result_of_writer(self._open)
        self._refuse_separate_folders()
        # Its threads would print pages about an error that is also raised.
        absl.logging.set_verbosity(absl.logging.FATAL)
        options = ocp.CheckpointManagerOptions(
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
            # By a rename, because a kill leaves a part of what is removed file by file.
            todelete_subdir=DELETED,
            save_root_metadata=False,
            single_host_load_and_broadcast=several(),
        )
        self._manager = ocp.CheckpointManager(self._checkpoints, options=options)
        self._exit.callback(self._manager.close)
        return self

    def __exit__(self, *error):
        self._exit.close()

    def _open(self) -> int:
        """Lock the folder and read its metrics; return the step to resume, 0 for none."""
        ours = read_marked(self.path / RUN) is not None
        names = (RUN, METRICS, CHECKPOINTS, "adapter", "weights", "tokens.json")
        there = [x for x in names if (self.path / x).exists()]
        if self.path.is_file() or (there and not ours):
            raise UserError(
                f"`out_dir` must be new, or the folder of a run; got {str(self.path)!r} with "
                f"{', '.join(there) or 'a file there'}, which is no run of this trainer: pass "
                "another --out-dir."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock(self.path / LOCK))
            shutil.rmtree(self._checkpoints / DELETED, ignore_errors=True)
            folders = [p for p in self._checkpoints.glob("*") if p.name.isdecimal()]
            folders.sort(key=lambda p: int(p.name))
            whole = [p for p in folders if (p / CHECKSUMS).exists()]
            for folder in [p for p in folders if p not in whole]:
                if folder is folders[-1] and whole:
                    # A process was killed before it wrote them, and the same steps come again.
                    shutil.rmtree(folder)
                else:
                    self._put_aside(folder, "unfinished", f"has no {CHECKSUMS}")
            last_step = 0
            self._settings["weights"] = hashes_of(self._config)
            if whole:
                self._refuse_other_settings()
                last_step = self._newest(whole)
            write_file(self.path / RUN, json.dumps(self._settings, indent=2) + "\n")
            self._read_metrics(last_step)
            self._exit = stack.pop_all()
        return last_step

    def _newest(self, folders: list[Path]) -> int:
        """Return the step of the newest whole checkpoint, and rename those after it."""
        damaged = {}
        while folders and (damage := damage_of(folders[-1])):
            damaged[folders.pop()] = damage
        if not folders:
            reasons = ", ".join(f"{path.name} ({damage})" for path, damage in damaged.items())
            raise UserError(
                f"`out_dir` must have a whole checkpoint to be resumed; got {str(self.path)!r} "
                f"where every one is damaged: {reasons}: pass another --out-dir."
            )
        for path, damage in damaged.items():
            self._put_aside(path, "damaged", f"is damaged ({damage})")
        return int(folders[-1].name)

    def _put_aside(self, checkpoint: Path, mark: str, why: str):
        name = checkpoint.with_name(f"{checkpoint.name}.{mark}-{time.strftime('%Y%m%dT%H%M%S')}")
        checkpoint.rename(name)
        warn(
            f"the checkpoint of step {checkpoint.name} {why} and was skipped; it is {str(name)!r} "
            "now, and you may delete it."
        )

    def _read_metrics(self, last_step: int):
        """Read the whole lines up to a step; the file then has no others."""
        path, steps = self.path / METRICS, [0]
        for line in path.read_bytes().split(b"\n") if path.exists() else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                if steps[-1] < (step := json.loads(line)["step"]) <= last_step:
                    self.metrics.append(json.loads(line))
                    steps.append(step)
        if missing := {*range(1, last_step + 1)} - {*steps}:
            warn(f"{METRICS} was damaged: it has no line for step {min(missing)}.")
        write_file(path, json_lines(self.metrics))

    def _refuse_other_settings(self):
        # A run of an earlier version may lack settings.
        saved = dataclasses.asdict(TrainConfig()) | (read_marked(self.path / RUN) or {})
        there, here = (settings_alike(x, self._matrices) for x in (saved, self._settings))
        changed = [
            HASHED.get(name) or f"`{name}` (there {saved.get(name)!r}, now {now!r})"
            for name, now in self._settings.items()
            if name not in FREE and saved.get(name) != now and there.get(name) != here[name]
        ]
        if changed:
            raise UserError(
                f"`out_dir` must hold a run of the same settings to be resumed; got "
                f"{str(self.path)!r}, which differs in {', '.join(changed)}: go back to those "
                "settings, or pass another --out-dir."
            )

    def _refuse_separate_folders(self):
        """Raise if this process cannot read the file that process 0 has written."""
        # Network file systems may show files of other hosts late.
        for _ in range(VISIBLE_WITHIN):
            if (read_marked(self.path / RUN) or {}).get("text") == self._settings["text"]:
                return
            time.sleep(1)
        raise UserError(
            f"`out_dir` must be one folder for all processes; got {str(self.path)!r}, where this "
            f"one cannot read the {RUN} of process 0: put it on a shared file system."
        )

    def restore(self, step: int, init_state, shardings_of):
        """Return the state of a checkpoint; every process calls this.

        Args:
            step: The step of the checkpoint.
            init_state: Returns a state like it; it is only traced.
            shardings_of: Maps the state's shapes to the sharding of each array, which may differ
                from the sharding that was written.
        """
        shapes = jax.eval_shape(init_state)
        wanted = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            shapes,
            shardings_of(shapes),
        )
        wanted = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(wanted)})
        try:
            return self._manager.restore(step, args=wanted)[STATE]
        except Exception as error:  # Orbax raises many types, and no type for another version.
            raise UserError(
                "`out_dir` must have checkpoints that this version of orbax reads; got "
                f"{first_line(error)!r} at step {step} in {str(self.path)!r}, though its "
                "bytes are as they were written."
            ) from error

    def append(self, lines: list[dict[str, Any]]):
        """Add lines to the metrics; they are on the disk when this returns."""
        if is_writer():
            path = self.path / METRICS
            with naming(path), open(path, "a", encoding="utf-8") as file:
                file.write(json_lines(lines))
                file.flush()
                os.fsync(file.fileno())
            self.metrics += lines

    def save(self, step: int, state):
        """Write a checkpoint; every process calls this.

        Raises:
            UserError: It could not be written; the one before is whole.
        """
        try:
            saved = ocp.args.Composite(**{STATE: ocp.args.StandardSave(state)})
            self._manager.save(step, args=saved, force=True)
            if is_writer():
                write_checksums(self._checkpoints / str(step))
            # Not by orbax, which would remove the one before too early.
            best = self.best_step()
            for old in sorted(self._manager.all_steps())[: -self._config.keep_checkpoints]:
                if old != best:
                    self._manager.delete(old)
            if is_writer():
                shutil.rmtree(self._checkpoints / DELETED, ignore_errors=True)
        except Exception as error:  # Orbax and TensorStore raise many types when a write fails.
            raise UserError(
                f"`out_dir` must take the run's checkpoints; got {first_line(error)!r} at "
                f"step {step} in {str(self.path)!r}: the one before is whole, so repair this, "
                "then run the same command again."
            ) from error
        self.last_step = step

    def best_step(self) -> int:
        """Return the step of the lowest held-out loss, 0 without any; every process calls this."""
        looks = [(x["val_loss"], x["step"]) for x in self.metrics if x["val_loss"] is not None]
        return result_of_writer(lambda: min(looks, default=(0, 0))[1])

    def best_whole_step(self) -> int:
        """Return `best_step`, or the last if that is damaged; every process calls this."""
        best = self.best_step() or self.last_step

        def choose():
            if best == self.last_step or not (damage := damage_of(self._checkpoints / str(best))):
                return best
            warn(
                f"the checkpoint of step {best}, of the lowest held-out loss, is damaged ({damage})"
            )
            return self.last_step

        return result_of_writer(choose)

    def plot(self):
        """Draw the curves into a file; a failure is a warning, and the run goes on."""
        if not is_writer():
            return
        figure, picture = Figure(figsize=(7, 4), layout="constrained"), io.BytesIO()
        axes = figure.subplots()
        for label, name, marker in (
            ("training batch", "loss", None),
            ("held-out text", "val_loss", "o"),
        ):
            points = [(x["step"], x[name]) for x in self.metrics if x[name] is not None]
            axes.plot(*zip(*points, strict=True), label=label, marker=marker)
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(picture, dpi=150, format="png")
        try:
            write_file(self.path / CURVES, picture.getvalue())
        except OSError as error:
            warn(f"the curves were not written: {error}.")


def json_lines(lines: list[dict[str, Any]]) -> str:
    """Return the text of metrics.jsonl."""
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
