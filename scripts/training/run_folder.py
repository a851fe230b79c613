"""The folder of a run of `train_gpt.py`: settings, metrics, curves and checkpoints.

The process may be killed at any moment: files are replaced or appended such that what is then on
the disk is a run to resume. `stop_signals` serves those who ask it to stop.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from matplotlib.figure import Figure

from models.gpt import GPTConfig
from scripts.training.settings import TrainConfig, UserError, flat_config

METRICS, CURVES, CHECKPOINTS, RUN = "metrics.jsonl", "loss.png", "checkpoints", "run.json"


class RunFolder:
    """The files of one run: opened fresh, or as a run of the same settings left them.

    Args:
        config: The settings, complete.
        text_hash: What the run reads.
        restart: Whether to delete a run found there first.

    Raises:
        UserError: The folder holds another run, or files that this script would overwrite.
    """

    def __init__(self, config: TrainConfig, text_hash: str, *, restart: bool = False):
        self.path = Path(config.out_dir).absolute()
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"`out_dir` must be a folder; got the file {config.out_dir!r}.")
        found = [n for n in (METRICS, CURVES, CHECKPOINTS) if (self.path / n).exists()]
        if found and not (self.path / RUN).exists():
            raise UserError(
                f"`out_dir` must be new, or a folder of this script; got {config.out_dir!r} with "
                f"{' and '.join(found)} but no {RUN}: pass another --out-dir."
            )
        if restart:
            for name in (METRICS, CURVES):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
        settings = {**flat_config(config), "text": text_hash}
        # A run without a checkpoint has nothing to lose, so its settings may be replaced.
        if any(p.name.isdigit() for p in (self.path / CHECKPOINTS).glob("*")):
            self._refuse_other_settings(settings, config.out_dir)
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self.path / RUN, json.dumps(settings, indent=2) + "\n")

        # Orbax writes a checkpoint under another name, renames it when it is whole, and only then
        # deletes the oldest: a kill at any moment leaves the previous one as it was. What the kill
        # cut short is cleaned up here.
        self._manager = ocp.CheckpointManager(
            self.path / CHECKPOINTS,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=config.keep_checkpoints,
                enable_async_checkpointing=False,
                cleanup_tmp_directories=True,
            ),
        )

    def _refuse_other_settings(self, settings, out_dir):
        saved = json.loads((self.path / RUN).read_text())
        classes = (GPTConfig, TrainConfig)
        fixed = [f.name for c in classes for f in dataclasses.fields(c) if f.compare]
        changed = [
            f"{name} (there {saved.get(name)!r}, now {settings[name]!r})"
            for name in [*fixed, "text"]
            if name in settings and saved.get(name) != settings[name]
        ]
        if changed:
            raise UserError(
                f"`out_dir` must hold a run of the same settings to be resumed; got {out_dir!r}, "
                f"which differs in {', '.join(changed)}: go back to those settings, pass another "
                "--out-dir, or delete that run by --restart."
            )

    @property
    def last_step(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        return self._manager.latest_step() or 0

    def resume(self, init_state):
        """Returns the newest checkpoint, or `init_state()`, and drops the metrics after it."""
        step = self.last_step
        kept = [line for line in self.metrics() if line["step"] <= step]
        if len(kept) != step:
            raise UserError(
                f"`out_dir` must have the metrics of all {step} steps before its checkpoint; got "
                f"{len(kept)} lines in {self.path / METRICS}: --restart deletes the run."
            )
        replace_file(self.path / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        if not step:
            return init_state()
        shapes = jax.eval_shape(init_state)
        return self._manager.restore(step, args=ocp.args.StandardRestore(shapes))

    def append(self, lines: list[dict[str, Any]]):
        """Adds lines to metrics.jsonl, on the disk when this returns."""
        with open(self.path / METRICS, "a") as file:
            file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """All whole lines of metrics.jsonl; a kill may have cut the last one."""
        lines = []
        if (self.path / METRICS).exists():
            for line in (self.path / METRICS).read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    lines.append(json.loads(line))
        return lines

    def plot(self):
        """Draws the loss curves of metrics.jsonl, without a display."""
        figure, lines = Figure(figsize=(7, 4), layout="constrained"), self.metrics()
        axes = figure.subplots()
        steps, losses = [x["step"] for x in lines], [x["loss"] for x in lines]
        looks = [(x["step"], x["val_loss"]) for x in lines if x["val_loss"] is not None]
        axes.plot(steps, losses, linewidth=0.8, alpha=0.6, label="training batch")
        if looks:
            axes.plot(*zip(*looks, strict=True), "o-", label="held-out text")
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.path / CURVES, dpi=150)

    def save(self, step: int, state):
        """Writes a checkpoint."""
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def close(self):
        """Releases what orbax holds."""
        self._manager.close()


def replace_file(path: Path, content: str):
    """Writes a file such that a kill leaves the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content)
    os.replace(temporary, path)


@contextlib.contextmanager
def stop_signals():
    """Turns the first Ctrl-C or SIGTERM into an entry of the list it yields.

    An exception could strike when the old state is already donated and the new one not yet there;
    a list that is read between two steps cannot. A second Ctrl-C interrupts at once.
    """
    received = []
    # Python hands signals to the main thread alone, and lets no other ask for them.
    main = threading.current_thread() is threading.main_thread()
    previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM) if main}

    def receive(number, frame):
        received.append(number)
        signal.signal(number, previous[number])

    for number in previous:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
