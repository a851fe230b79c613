"""The folder of a run of `train_gpt.py`: settings, metrics, curves and checkpoints.

    run.json         the settings, with the mark by which the folder is one of this script
    metrics.jsonl    one line a step
    loss.png         its curves
    checkpoints/     see checkpoints.py
    train_gpt.lock   kept; locked while a process works here
    before-restart/  the run that `--restart` replaces, until the new one has a checkpoint

What is not in this list is not touched, and a folder that has one of these without the mark is
refused.

Of several processes one opens the folder and writes to it; only the arrays of a checkpoint are
written by all. Any may be killed at any moment: files are replaced or appended such that what is
then on the disk is a run to resume.
"""

import contextlib
import dataclasses
import io
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from models.gpt import GPTConfig
from scripts.training.checkpoints import Checkpoints
from scripts.training.distributed import from_writer, is_writer
from scripts.training.files import (
    CHECKPOINTS,
    CURVES,
    MARK,
    METRICS,
    RUN,
    cause,
    lock,
    read_marked,
    replace_file,
    told,
)
from scripts.training.messages import UserError, warn
from scripts.training.restart import BEFORE_RESTART, Aside
from scripts.training.settings import TrainConfig, flat_config

LOCK = "train_gpt.lock"
# Seconds until every process sees what one has written.
SEEN_WITHIN = 60


class RunFolder:
    """The files of one run: opened fresh, or as a run of the same settings left them.

    A context, in which no other process can open the folder. The lock is `flock`'s: the kernel
    takes it back when the process ends, however it ends. On NFS, Linux passes it on to the server
    as a lock of bytes, which other machines see unless one of them has mounted it with `nolock` or
    `local_lock`; a file system without locks is used with a warning.

    Args:
        config: The settings, complete.
        text_hash: What the run reads.
        restart: Whether to begin anew. A run found there is moved aside; it is deleted when this
            one has its first checkpoint, and put back if it ends before. (If it is killed before,
            the next process to open the folder puts it back.)

    Raises:
        UserError: The folder holds another run, is in use, is not ours, or cannot be written.
    """

    def __init__(self, config: TrainConfig, text_hash: str, *, restart: bool = False):
        self.path = Path(config.out_dir).absolute()
        self._name, self._restart = config.out_dir, restart
        self._settings = {**MARK, **flat_config(config), "text": text_hash}
        self._checkpoints = Checkpoints(self.path / CHECKPOINTS, config.keep_checkpoints)
        self._aside = Aside(self.path)
        self._lines: list[dict[str, Any]] = []
        self._exit = contextlib.ExitStack()
        # That of the newest checkpoint, 0 if there is none.
        self.last_step = 0

    def __enter__(self):
        self.last_step = from_writer(self._open)
        if not is_writer():
            self._exit.callback(self._checkpoints.close)
        self._refuse_a_folder_of_our_own()
        return self

    def _open(self) -> int:
        """Locks and mends the folder; returns the step of the checkpoint to resume, 0 for none."""
        last_step = 0
        with contextlib.ExitStack() as stack, told(self.path):
            self._refuse_what_is_not_ours()
            self.path.mkdir(parents=True, exist_ok=True)
            stack.callback(self._checkpoints.close)
            stack.enter_context(lock(self.path / LOCK, self._name))
            self._checkpoints.clean()
            self._aside.settle()
            if self._restart:
                stack.callback(self._aside.settle)
                self._aside.move()
            # A run without a checkpoint has nothing to lose, so its settings may be replaced.
            elif self._checkpoints.named():
                self._refuse_other_settings()
                last_step = self._checkpoints.newest()
            replace_file(self.path / RUN, self._run_json())
            self._exit = stack.pop_all()
        return last_step

    def __exit__(self, *error):
        with told(self.path, "see before-restart/ there for the run that was to be replaced"):
            self._exit.close()

    def _refuse_a_folder_of_our_own(self):
        """Raises where this process does not see what the writer has written."""
        written = from_writer(lambda: zlib.crc32((self.path / RUN).read_bytes()) >> 1)
        # File systems of networks may take a while to show what others write.
        for _ in range(SEEN_WITHIN):
            with contextlib.suppress(OSError):
                if zlib.crc32((self.path / RUN).read_bytes()) >> 1 == written:
                    return
            time.sleep(1)
        raise UserError(
            f"`out_dir` must be one folder for all processes; got {self._name!r}, where this one "
            f"does not see the {RUN} that process 0 has written: put it on a shared file system."
        )

    def _run_json(self) -> str:
        return json.dumps(self._settings, indent=2) + "\n"

    def _refuse_what_is_not_ours(self):
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UserError(f"`out_dir` must be a folder; got the file {self._name!r}.")
        aside = self.path / BEFORE_RESTART
        for path in (self.path / RUN, aside / RUN):
            if os.path.lexists(path):
                try:
                    read_marked(path)
                except ValueError as error:
                    raise UserError(
                        f"`out_dir` must be new, or a folder of this script; got {self._name!r}, "
                        f"where {path.relative_to(self.path)} {error}: pass another --out-dir"
                        f"{self._copy_of_settings()}."
                    ) from error
        found = [n for n in (METRICS, CURVES, CHECKPOINTS) if os.path.lexists(self.path / n)]
        # A restart that was killed may not have come to its run.json.
        if found and not any(os.path.lexists(path / RUN) for path in (self.path, aside)):
            raise UserError(
                f"`out_dir` must be new, or a folder of this script; got {self._name!r} with "
                f"{' and '.join(found)} but no {RUN}: pass another --out-dir"
                f"{self._copy_of_settings()}."
            )
        if CHECKPOINTS in found and not (self.path / CHECKPOINTS).is_dir():
            raise UserError(
                f"`out_dir` must have no file {CHECKPOINTS!r}, where a folder belongs; got "
                f"{self._name!r}: move it away, or pass another --out-dir."
            )

    def _copy_of_settings(self) -> str:
        """How to mend a run.json, where a checkpoint has a copy."""
        for step in reversed(self._checkpoints.steps()):
            path = self._checkpoints.path / str(step) / RUN
            with contextlib.suppress(ValueError, OSError):
                read_marked(path)
                return f", or copy {str(path)!r} to that place"
        return ""

    def _refuse_other_settings(self):
        saved = read_marked(self.path / RUN)
        classes = (GPTConfig, TrainConfig)
        fixed = [f.name for c in classes for f in dataclasses.fields(c) if f.compare]
        changed = [
            f"{name} (there {saved.get(name)!r}, now {self._settings[name]!r})"
            for name in [*fixed, "text"]
            if name in self._settings and saved.get(name) != self._settings[name]
        ]
        if changed:
            raise UserError(
                f"`out_dir` must hold a run of the same settings to be resumed; got "
                f"{self._name!r}, which differs in {', '.join(changed)}: go back to those "
                "settings, pass another --out-dir, or replace that run by --restart."
            )

    def resume(self, init_state, lie=None):
        """Returns the newest checkpoint, or `init_state()`; the metrics are those up to it.

        `lie` says where the state's arrays belong; see `Checkpoints.restore`.
        """
        content = ""
        if self.last_step:
            content = self._checkpoints.read(self.last_step, METRICS)
        self._lines = [json.loads(line) for line in content.splitlines()]
        if is_writer():
            with told(self.path):
                self._compare_metrics(content)
                replace_file(self.path / METRICS, content)
        if not self.last_step:
            return init_state()
        return self._checkpoints.restore(self.last_step, init_state, lie)

    def _compare_metrics(self, content: str):
        """Says so if metrics.jsonl is not what was written up to the checkpoint."""
        try:
            there = (self.path / METRICS).read_bytes()
        except FileNotFoundError:
            there = b""
        expected = content.encode()
        # Lines after the checkpoint are normal: a kill came before the next one.
        if not there.startswith(expected):
            lines = set(there.split(b"\n"))
            same = sum(line in lines for line in expected.splitlines())
            warn(
                f"{METRICS} had {same} of its first {self.last_step} lines as they were written; "
                f"all of them are there again, from the checkpoint of step {self.last_step}."
            )

    def append(self, lines: list[dict[str, Any]]):
        """Adds lines to metrics.jsonl, on the disk when this returns."""
        if is_writer():
            with (
                told(self.path, f"{self._whole()}; mend this, then run the same again"),
                open(self.path / METRICS, "a") as file,
            ):
                file.writelines(_json_lines(lines))
                file.flush()
                os.fsync(file.fileno())
        self._lines += lines

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of all steps."""
        return self._lines

    def plot(self):
        """Draws the loss curves, without a display."""
        if not is_writer():
            return
        figure, lines = Figure(figsize=(7, 4), layout="constrained"), self._lines
        axes = figure.subplots()
        steps, losses = [x["step"] for x in lines], [x["loss"] for x in lines]
        looks = [(x["step"], x["val_loss"]) for x in lines if x["val_loss"] is not None]
        axes.plot(steps, losses, linewidth=0.8, alpha=0.6, label="training batch")
        if looks:
            axes.plot(*zip(*looks, strict=True), "o-", label="held-out text")
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        axes.grid(alpha=0.3)
        axes.legend()
        picture = io.BytesIO()
        figure.savefig(picture, dpi=150, format="png")
        try:
            replace_file(self.path / CURVES, picture.getvalue())
        except OSError as error:
            # A picture is not worth a run's last lines.
            warn(f"{CURVES} was not written: {cause(error)}.")

    def save(self, step: int, state):
        """Writes a checkpoint. The first one after a restart decides that the old run goes."""
        files = {METRICS: "".join(_json_lines(self._lines)), RUN: self._run_json()}
        self._checkpoints.save(step, state, files)
        self.last_step = step
        if is_writer():
            with told(self.path, f"{self._whole()}; mend this, then run the same again"):
                self._aside.settle()

    def _whole(self) -> str:
        if not self.last_step:
            return "there is no checkpoint yet"
        return f"the checkpoint of step {self.last_step} is whole"


def _json_lines(lines: list[dict[str, Any]]) -> list[str]:
    return [json.dumps(line, allow_nan=False) + "\n" for line in lines]
