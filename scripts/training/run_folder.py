"""The folder of a run of `train_gpt.py`: settings, metrics, curves and checkpoints.

    run.json         the settings, with the mark by which the folder is one of this script
    metrics.jsonl    one line for each step
    loss.png         the curves of the metrics
    compare.png      the same beside the curves of a run by another attention
    tensorboard/     the metrics for TensorBoard, if asked for
    checkpoints/     see checkpoints.py
    tokenizer.json, generation_config.json
                     of the text, where its tokens are no bytes
    weights/         the tuned copy of published weights; see weights.py
    train_gpt.lock   kept; locked while a process works here
    checkpoints.restart/
                     the first checkpoint of a run that `--restart` began, while it is written

The script touches no other file in the folder. It refuses a folder that has one of these files but
no run.json with the mark. In `checkpoints/`, every folder whose name is a number is a checkpoint.

Process 0 opens the folder and writes to it; all processes write the arrays of a checkpoint. Any
process may be killed at any moment, because files are replaced or appended such that the disk
always has a run to resume.
"""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from models.gpt import GPTConfig
from scripts.training.checkpoints import MARK, Checkpoints, read_marked, write_file
from scripts.training.processes import UserError, is_writer, result_of_writer, say, warn
from scripts.training.settings import TrainConfig, config_of_run, flat_config
from scripts.training.weights import WEIGHTS

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

RUN, METRICS, CURVES, CHECKPOINTS = "run.json", "metrics.jsonl", "loss.png", "checkpoints"
LOCK, RESTART, COMPARISON = "train_gpt.lock", "checkpoints.restart", "compare.png"
TOKENIZER, END, BOARD = "tokenizer.json", "generation_config.json", "tensorboard"
# Seconds until every process can read a file that process 0 has written.
VISIBLE_WITHIN = 60


@contextlib.contextmanager
def lock(path: Path):
    """Hold the lock of a folder; the file stays, and names the last process that held it.

    The operating system releases the lock when the process ends, by a kill, too. A file system
    without locks is used with a warning.

    Raises:
        UserError: Another process holds the lock.
    """
    with open(path, "a+", encoding="utf-8") as file:
        try:
            if fcntl is None:
                raise OSError(0, "no locks on this system")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"`out_dir` must be in no other run's use; got {str(path.parent)!r}, where "
                f"{file.read().strip() or 'one'} works: wait for its end, stop it, or pass "
                "another --out-dir."
            ) from None
        except OSError as error:
            said = f"{str(path)!r} cannot be locked ({error}): start no second run in this folder."
            print(f"warning: {said}", file=sys.stderr, flush=True)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


class RunFolder:
    """The files of one run, which is new, or a run of the same settings that goes on.

    As a context, it keeps other processes from opening the folder.

    Args:
        config: The settings, complete.
        text_hash: The hash of the text that the run reads.
        restart: Whether to begin a new run. A run in the folder stays untouched until the new run
            has its first checkpoint, which then replaces it.
        tokens: The folder of the text's tokens, with the tokenizer to copy; None for bytes.

    Attributes:
        last_step: The step of the newest checkpoint, 0 if there is none.

    Raises:
        UserError: The folder holds another run or other files, is in use, or cannot be written.
    """

    def __init__(
        self,
        config: TrainConfig,
        text_hash: str,
        *,
        restart: bool = False,
        tokens: Path | None = None,
    ):
        self.path = Path(config.out_dir).absolute()
        self.last_step = 0
        self._settings = {**MARK, **flat_config(config), "text": text_hash}
        self._keep = config.keep_checkpoints
        self._restart = restart
        self._tokens, self._has_tokenizer = tokens, False
        self._checkpoints = Checkpoints(self.path / CHECKPOINTS, self._keep)
        self._lines: list[dict[str, Any]] = []
        self._board = event_writer() if config.tensorboard and is_writer() else None
        self._exit = contextlib.ExitStack()

    def __enter__(self):
        self.last_step = result_of_writer(self._open)
        self._restart = bool(result_of_writer(lambda: self._restart))
        self._refuse_separate_folders()
        self._exit.callback(lambda: self._checkpoints.close())
        if self._restart:
            self._checkpoints = Checkpoints(self.path / RESTART)
        self._checkpoints.open()
        if self._board is not None:
            # Steps after the checkpoint come again.
            step = self.last_step + 1
            self._board = self._board(str(self.path / BOARD), purge_step=step)
            self._exit.callback(self._board.close)
        return self

    def __exit__(self, *error):
        self._exit.close()

    def _open(self) -> int:
        """Lock and repair the folder; return the step of the checkpoint to resume, 0 for none."""
        with contextlib.ExitStack() as stack:
            self._refuse_foreign()
            self.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock(self.path / LOCK))
            self._checkpoints.remove_unfinished()
            self._end_restart()
            stack.callback(self._end_restart)
            last_step = 0
            # The settings of a run without a checkpoint may be replaced.
            self._restart = self._restart and bool(self._checkpoints.folders())
            if not self._restart:
                if self._checkpoints.folders():
                    self._refuse_other_settings()
                    last_step = self._checkpoints.newest()
                write_file(self.path / RUN, self._run_json())
            self._exit = stack.pop_all()
        return last_step

    def _end_restart(self):
        """Put the first checkpoint of a restarted run into place, or remove a run without one.

        After a kill between any two lines the next call goes on, because only the last rename takes
        the new checkpoint out of its folder.
        """
        new, old = Checkpoints(self.path / RESTART), Checkpoints(self.path / CHECKPOINTS)
        if not new.path.exists():
            return
        new.remove_unfinished()
        for step in new.steps():
            # The new run writes its own at its end.
            shutil.rmtree(self.path / WEIGHTS, ignore_errors=True)
            for replaced in old.folders():
                (old.path / str(replaced)).rename(new.path / f"{replaced}.old")
            for name in (METRICS, RUN):
                write_file(self.path / name, new.read(step, name))
            for name in (CURVES, COMPARISON):
                (self.path / name).unlink(missing_ok=True)
            (new.path / str(step)).rename(old.path / str(step))
        shutil.rmtree(new.path)

    def _refuse_foreign(self):
        if self.path.is_file():
            raise UserError(f"`out_dir` must be a folder; got the file {str(self.path)!r}.")
        names = (RUN, METRICS, CURVES, CHECKPOINTS, RESTART)
        names += (COMPARISON, BOARD, TOKENIZER, END, WEIGHTS)
        ours = [name for name in names if os.path.lexists(self.path / name)]
        if ours and not is_run_folder(self.path):
            raise UserError(
                f"`out_dir` must be new, or a folder of this script; got {str(self.path)!r} with "
                f"{', '.join(ours)} but no {RUN} that this script has written: pass another "
                f"--out-dir (each of this script's checkpoints has a copy of its {RUN})."
            )

    def _refuse_other_settings(self):
        saved = read_marked(self.path / RUN)
        fields = (*dataclasses.fields(GPTConfig), *dataclasses.fields(TrainConfig))
        fixed = [field.name for field in fields if field.compare]
        changed = [
            f"`{name}` (there {saved.get(name)!r}, now {self._settings[name]!r})"
            for name in [*fixed, "text"]
            if name in self._settings and saved.get(name) != self._settings[name]
        ]
        if changed:
            raise UserError(
                f"`out_dir` must hold a run of the same settings to be resumed; got "
                f"{str(self.path)!r}, which differs in {', '.join(changed)}: go back to those "
                "settings, pass another --out-dir, or replace that run by --restart."
            )

    def _refuse_separate_folders(self):
        """Raise if this process cannot read the file that process 0 has written."""
        written = result_of_writer(self._hash_of_settings)
        # Network file systems may show files of other hosts late.
        for _ in range(VISIBLE_WITHIN):
            with contextlib.suppress(OSError):
                if self._hash_of_settings() == written:
                    return
            time.sleep(1)
        raise UserError(
            f"`out_dir` must be one folder for all processes; got {str(self.path)!r}, where this "
            f"one cannot read the {RUN} of process 0: put it on a shared file system."
        )

    def _hash_of_settings(self) -> int:
        return zlib.crc32((self.path / RUN).read_bytes()) >> 1

    def _run_json(self) -> str:
        return json.dumps(self._settings, indent=2) + "\n"

    def resume(self, init_state, shardings_of=None):
        """Return the state of the newest checkpoint, or `init_state()`; rebuild the metrics.

        See `Checkpoints.restore` for `shardings_of`.
        """
        content = ""
        if self.last_step:
            content = self._checkpoints.read(self.last_step, METRICS)
        self._lines = parse_lines(content)
        if is_writer() and not self._restart:
            path = self.path / METRICS
            there = path.read_bytes() if path.exists() else b""
            # Lines after the checkpoint are normal: a kill came before the next checkpoint.
            if not there.startswith(content.encode()):
                warn(f"{METRICS} was damaged; it has its first {self.last_step} lines again.")
            write_file(path, content)
        if not self.last_step:
            return init_state()
        return self._checkpoints.restore(self.last_step, init_state, shardings_of)

    def append(self, lines: list[dict[str, Any]]):
        """Add lines to the metrics; they are on the disk when this returns.

        Lines of a restarted run reach the disk with its first checkpoint.
        """
        if is_writer() and not self._restart:
            with open(self.path / METRICS, "a", encoding="utf-8") as file:
                file.write(json_lines(lines))
                file.flush()
                os.fsync(file.fileno())
        self._lines += lines
        if self._board is not None:
            for line in lines:
                for name in line.keys() - {"step"}:
                    if line[name] is not None:
                        self._board.add_scalar(name, line[name], line["step"])

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of all steps."""
        return self._lines

    def save(self, step: int, state):
        """Write a checkpoint; a restarted run's first one replaces the old run."""
        files = {METRICS: json_lines(self._lines), RUN: self._run_json()}
        self._checkpoints.save(step, state, files)
        if self._restart:
            self._checkpoints.close()
            self._checkpoints = Checkpoints(self.path / CHECKPOINTS, self._keep)
            self._restart = bool(result_of_writer(lambda: self._end_restart() or 0))
            self._checkpoints.open()
        if is_writer() and not self._has_tokenizer:
            self._copy_tokenizer()
            self._has_tokenizer = True
        self.last_step = step

    def _copy_tokenizer(self):
        """Copy the files of the text's tokenizer, or remove a replaced run's."""
        for name in (TOKENIZER, END):
            if self._tokens is None:
                (self.path / name).unlink(missing_ok=True)
            else:
                shutil.copy(self._tokens / name, self.path)

    def plot(self):
        """Draw the loss curves."""
        plot(self.path / CURVES, {"": self._lines})


def event_writer():
    """Return the class that writes events for TensorBoard.

    Raises:
        UserError: The package is missing.
    """
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        raise UserError(
            "`tensorboard` needs the package tensorboardX: run pip install tensorboardX."
        ) from None
    return SummaryWriter


def params_of(path: Path, model: GPTConfig, shapes, shardings) -> Callable[[], Any]:
    """Return a function that reads the parameters of a run's newest whole checkpoint.

    Args:
        path: The folder of the run.
        model: The model that gets the parameters; the run's may differ in what has none.
        shapes: See `Checkpoints.parameters`.
        shardings: See there.

    Raises:
        UserError: It is no such folder, its model has other parameters, or no checkpoint is whole.
    """
    if not is_run_folder(path):
        raise UserError(f"`init_from` must be the folder of a run or weights; got {str(path)!r}.")
    other = config_of_run(path / RUN).model
    names = "vocab_size", "num_layers", "num_heads", "kv_heads", "embed_dim", "mlp_dim"
    differ = [
        f"{name} (there {getattr(other, name)}, here {getattr(model, name)})"
        for name in (*names, "rope_theta")
        if getattr(other, name, None) != getattr(model, name)
    ]
    if differ:
        raise UserError(
            f"`init_from` must have a model of the same shape; got {str(path)!r}, which differs in "
            f"{', '.join(differ)}: take its settings by --config."
        )
    checkpoints = Checkpoints(path.absolute() / CHECKPOINTS)
    step = result_of_writer(checkpoints.newest_whole)
    if not step:
        raise UserError(f"`init_from` must have a whole checkpoint; got {str(path)!r} without one.")

    def read():
        params = checkpoints.parameters(step, shapes, shardings)
        say("parameters", f"of step {step} of {path}")
        return params

    return read


def is_run_folder(path: Path) -> bool:
    """Whether a folder belongs to a run of this script."""
    return read_marked(path / RUN) is not None


def json_lines(lines: list[dict[str, Any]]) -> str:
    """Return the text of metrics.jsonl."""
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def parse_lines(text: str) -> list[dict[str, Any]]:
    """Return the lines of the text of metrics.jsonl."""
    return [json.loads(line) for line in text.split("\n") if line]


def draw_curves(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """Draw the losses in the lines of metrics.jsonl of some runs, by name, without a display."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for n, (name, lines) in enumerate(runs.items()):
        steps, losses = [x["step"] for x in lines], [x["loss"] for x in lines]
        looks = [(x["step"], x["val_loss"]) for x in lines if x["val_loss"] is not None]
        label = f"{name}, " if name else ""
        # Dashes show what lies below.
        look = {"linestyle": (0, (4, 3 * n))}
        axes.plot(steps, losses, linewidth=0.8, alpha=0.6, label=f"{label}training batch", **look)
        if looks:
            axes.plot(*zip(*looks, strict=True), marker="o", label=f"{label}held-out text", **look)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def plot(path: Path, runs: dict[str, list[dict[str, Any]]]):
    """Draw the curves into a file; a failure is a warning, so that the run ends as it should."""
    if is_writer():
        picture = io.BytesIO()
        draw_curves(runs).savefig(picture, dpi=150, format="png")
        try:
            write_file(path, picture.getvalue())
        except OSError as error:
            warn(f"{path.name} was not written: {error}.")


def plot_comparison(folders: dict[str, str]):
    """Draw the losses of runs, by name, into the first one's folder."""
    paths = {name: Path(folder) for name, folder in folders.items()}
    runs = {
        name: parse_lines((path / METRICS).read_text(encoding="utf-8"))
        for name, path in paths.items()
    }
    [first, *_] = paths.values()
    plot(first / COMPARISON, runs)
    say("compared", f"the losses of {' and '.join(runs)} are in {first / COMPARISON}")
