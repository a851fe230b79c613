"""The text that `train_gpt.py` trains on: which files, which of them are held out, and batches.

Tokens are bytes. About a tenth of the text is held out by whole files, chosen by a hash of their
names, so that no file is on both sides. Run folders are left out, which are no text.
"""

import hashlib
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from models.sharding import EXAMPLES, Layout
from scripts.training.files import cause, is_run_folder
from scripts.training.messages import UserError
from scripts.training.settings import TrainConfig

# Share of the text that is never trained on.
HELD_OUT = 0.1
# What lies between two files: a byte that text does not have.
FILE_SEPARATOR = b"\0"
# Folders of the standard library that are installed packages, tests, or generated tables.
NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
NOT_SOURCE |= {"encodings", "pydoc_data"}


class Text(NamedTuple):
    """The bytes to train on and those held out, with the names of the files they came from.

    `left_out` are the run folders that were found among them.
    """

    train: np.ndarray
    held_out: np.ndarray
    train_files: list[str]
    held_out_files: list[str]
    left_out: list[str]

    @property
    def sha256(self) -> str:
        """A hash of both sides, which tells whether a resumed run reads the same text."""
        digest = hashlib.sha256(self.train)
        digest.update(b"|")
        digest.update(self.held_out)
        return digest.hexdigest()


def read_files(config: TrainConfig) -> tuple[list[tuple[str, bytes]], list[str]]:
    """Returns (name, bytes) of every text file, sorted by name, and the run folders left out.

    In a folder, the text files are all files below it but the hidden ones, those of runs, and those
    with a zero byte near their start, which are no text.
    """
    default = config.data is None
    root = Path(sysconfig.get_path("stdlib") if default else config.data)
    try:
        paths, left_out = find_files(root, Path(config.out_dir).resolve(), default)
        files = []
        for path in paths:
            content = path.read_bytes()
            if content and FILE_SEPARATOR not in content[:8192]:
                name = path.relative_to(root).as_posix() if path != root else path.name
                files.append((name, content))
    except OSError as error:
        raise UserError(
            f"`data` must be readable; got {cause(error)!r} at {str(error.filename)!r}."
        ) from error
    if not files:
        raise UserError(f"`data` must have text in it; found none in {str(root)!r}: pass --data.")
    return sorted(files), sorted(left_out)


def find_files(root: Path, own: Path, default: bool) -> tuple[list[Path], list[str]]:
    """The files below `root` that may be text, and the run folders among them; `own` is one."""
    if not root.exists():
        raise UserError(f"`data` must be a file or a folder; got {str(root)!r}: no such file.")
    if root.resolve() == own or is_run_folder(root):
        raise UserError(
            f"`data` must be text, not the folder of a run; got {str(root)!r}: pass another --data "
            "or --out-dir."
        )
    if root.is_file():
        return [root], []
    skipped, paths, left_out = NOT_SOURCE if default else set(), [], []

    def fail(error):
        raise error

    for folder, subfolders, names in os.walk(root, onerror=fail):
        inside = [name for name in subfolders if not (name.startswith(".") or name in skipped)]
        runs = [name for name in inside if is_run_folder(Path(folder, name))]
        left_out += [Path(folder, name).relative_to(root).as_posix() for name in runs]
        # Assigned in place, which is how os.walk learns where not to go. A new run's folder may be
        # there before its mark is.
        subfolders[:] = [
            name for name in inside if name not in runs and Path(folder, name).resolve() != own
        ]
        paths += [
            Path(folder, name)
            for name in names
            if not name.startswith(".") and (name.endswith(".py") or not default)
        ]
    # Pipes and sockets have no end.
    return [path for path in paths if path.is_file()], left_out


def split_files(files: list[tuple[str, bytes]]) -> tuple[list, list]:
    """Splits files into those to train on and those held out, about a tenth of the bytes.

    The choice follows a hash of the name, so a file mostly keeps its side when others come or go.
    A single file is cut instead, and its end is held out.
    """
    if len(files) == 1:
        [(name, content)] = files
        cut = int(len(content) * (1 - HELD_OUT))
        return [(name, content[:cut])], [(f"{name} (end)", content[cut:])]
    total = sum(len(content) for _, content in files)
    train, held_out, size = [], [], 0
    for name, content in sorted(files, key=lambda f: hashlib.sha256(os.fsencode(f[0])).digest()):
        # Never more than half: of a book and a note, it is the note that is held out.
        if size < HELD_OUT * total and size + len(content) <= total / 2:
            held_out.append((name, content))
            size += len(content)
        else:
            train.append((name, content))
    return train, held_out


def load_text(config: TrainConfig) -> Text:
    """Reads and splits the text, and checks that both sides are longer than the context."""
    files, left_out = read_files(config)
    sides = split_files(files)
    train, held_out = (
        np.frombuffer(FILE_SEPARATOR.join(content for _, content in side), np.uint8)
        for side in sides
    )
    if min(len(train), len(held_out)) <= config.model.context:
        raise UserError(
            "`context` must be below the length of both sides of the text; got a context of "
            f"{config.model.context}, {len(train)} bytes to train on and {len(held_out)} held out: "
            "give more text or a smaller --context."
        )
    names = ([name for name, _ in side] for side in sides)
    return Text(train, held_out, *names, left_out)


def windows(text: np.ndarray, starts: np.ndarray, config: TrainConfig, layout: Layout) -> jax.Array:
    """Cuts windows one longer than the context, `[parts, microbatch, context + 1]`.

    Each process cuts those that its devices compute, and no others.
    """
    starts = starts.reshape(-1, config.microbatch)
    positions = np.arange(config.model.context + 1)

    def cut(index):
        return text[starts[index[:2]][..., None] + positions]

    return jax.make_array_from_callback(
        (*starts.shape, len(positions)), layout.sharding(None, EXAMPLES), cut
    )


def training_batch(text: np.ndarray, step: int, config: TrainConfig, layout: Layout) -> jax.Array:
    """The batch of one update: random windows, a function of (seed, step) and nothing else."""
    rng = np.random.default_rng([config.seed, step])
    starts = rng.integers(0, len(text) - config.model.context, config.batch_size)
    return windows(text, starts, config, layout)


def held_out_batches(text: np.ndarray, config: TrainConfig, layout: Layout) -> jax.Array:
    """Windows spread evenly over the held-out text, the same at every look."""
    last = len(text) - config.model.context - 1
    starts = np.linspace(0, last, config.eval_batches * config.batch_size).astype(int)
    return windows(text, starts, config, layout)
