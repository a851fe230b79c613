"""The text that `train_gpt.py` trains on: which files, which of them are held out, and batches.

Tokens are bytes. About a tenth of the text is held out by whole files, chosen by a hash of their
names, so that no file is on both sides.
"""

import hashlib
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scripts.training.settings import TrainConfig, UserError

# Share of the text that is never trained on.
HELD_OUT = 0.1
# What lies between two files: a byte that text does not have.
FILE_SEPARATOR = b"\0"
# Folders of the standard library that are installed packages, tests, or generated tables.
NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
NOT_SOURCE |= {"encodings", "pydoc_data"}


class Text(NamedTuple):
    """The bytes to train on and those held out, with the names of the files they came from."""

    train: np.ndarray
    held_out: np.ndarray
    train_files: list[str]
    held_out_files: list[str]

    @property
    def sha256(self) -> str:
        """A hash of both sides, which tells whether a resumed run reads the same text."""
        digest = hashlib.sha256(self.train)
        digest.update(b"|")
        digest.update(self.held_out)
        return digest.hexdigest()


def read_files(config: TrainConfig) -> list[tuple[str, bytes]]:
    """Returns (name, bytes) of every text file, sorted by name.

    In a folder, these are all files below it but the hidden ones, this run's own, and those with
    a zero byte near their start, which are no text.
    """
    default = config.data is None
    root = Path(sysconfig.get_path("stdlib") if default else config.data)
    if not root.exists():
        raise UserError(f"`data` must be a file or a folder; got {config.data!r}: no such file.")
    left_out, own = NOT_SOURCE if default else set(), Path(config.out_dir).resolve()
    paths = [root] if root.is_file() else []
    for folder, subfolders, names in os.walk(root):
        # Assigned in place, which is how os.walk learns where not to go.
        subfolders[:] = [
            name
            for name in subfolders
            if not (name.startswith(".") or name in left_out or Path(folder, name).resolve() == own)
        ]
        paths += [
            Path(folder, name)
            for name in names
            if not name.startswith(".") and (name.endswith(".py") or not default)
        ]
    files = []
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"`data` must be readable; got {error}.") from error
        if content and FILE_SEPARATOR not in content[:8192]:
            files.append(
                (path.relative_to(root).as_posix() if path != root else path.name, content)
            )
    if not files:
        raise UserError(f"`data` must have text in it; found none in {str(root)!r}: pass --data.")
    return sorted(files)


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
    sides = split_files(read_files(config))
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
    return Text(train, held_out, *([name for name, _ in side] for side in sides))


def windows(text: np.ndarray, starts: np.ndarray, config: TrainConfig) -> np.ndarray:
    """Cuts windows one longer than the context, `[parts, microbatch, context + 1]`."""
    length = config.model.context + 1
    return text[starts[:, None] + np.arange(length)].reshape(-1, config.microbatch, length)


def training_batch(text: np.ndarray, step: int, config: TrainConfig) -> np.ndarray:
    """The batch of one update: random windows, a function of (seed, step) and nothing else."""
    rng = np.random.default_rng([config.seed, step])
    starts = rng.integers(0, len(text) - config.model.context, config.batch_size)
    return windows(text, starts, config)


def held_out_batches(text: np.ndarray, config: TrainConfig) -> np.ndarray:
    """Windows spread evenly over the held-out text, the same at every look."""
    last = len(text) - config.model.context - 1
    starts = np.linspace(0, last, config.eval_batches * config.batch_size).astype(int)
    return windows(text, starts, config)
