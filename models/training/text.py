"""The text of a run: its files, the split of them, and batches.

Tokens are bytes, or come from a folder that `prepare_tokens.py` has written:

    train.bin, held_out.bin              the tokens, little-endian, mapped into memory
    train_ends.bin, held_out_ends.bin    for each document, the tokens up to its end, in 64 bits
    tokenizer.json                       their tokenizer, by the package tokenizers
    generation_config.json               the token that ends a document
    tokens.json                          counts and a hash; written last
    .prepare_tokens/                     new files, until all are whole
    .prepare_tokens.lock                 kept; locked while a process prepares tokens here

About a tenth of the text is held out by whole files, chosen by a hash of their names, so that no
file is on both sides. Run folders are no text and are left out.
"""

import hashlib
import math
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, AnyStr, NamedTuple

import jax
import numpy as np

from models.checkpoint import weights_folder
from models.errors import UserError
from models.sharding import BATCH, Layout
from models.training.files import TOKENIZER, is_run_folder, read_marked
from models.training.settings import TrainConfig

# Share of the text that is never trained on.
HELD_OUT = 0.1
# The byte between two files; text does not have it.
FILE_SEPARATOR = b"\0"
# Folders of the standard library with installed packages, tests, or generated tables.
NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
NOT_SOURCE |= {"encodings", "pydoc_data"}
TOKENS, NEW, LOCK = "tokens.json", ".prepare_tokens", ".prepare_tokens.lock"
SIDES = ("train", "held_out")
# Type of the numbers that say where documents end.
ENDS = "<i8"


class Text(NamedTuple):
    """The text of a run.

    Attributes:
        train: The tokens to train on.
        held_out: The tokens that are held out.
        train_files: Names of the files to train on, or numbers of documents.
        held_out_files: The same of those that are held out.
        left_out: Names of what is no text among the files.
        prepared: The content of tokens.json; None where tokens are bytes.
        train_ends: For each document to train on, the number of tokens up to its end; None where
            tokens are bytes.
        held_out_ends: The same of those that are held out.
    """

    train: np.ndarray
    held_out: np.ndarray
    train_files: Sequence
    held_out_files: Sequence
    left_out: list[str]
    prepared: dict[str, Any] | None = None
    train_ends: np.ndarray | None = None
    held_out_ends: np.ndarray | None = None

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        return 256 if self.prepared is None else self.prepared["vocab_size"]

    def bits_per_byte(self, loss: float) -> float:
        """Return the bits of a byte of the held-out text, from nats of its tokens."""
        size = len(self.held_out) if self.prepared is None else self.prepared["bytes"]["held_out"]
        return loss / math.log(2) * len(self.held_out) / size

    def __str__(self) -> str:
        unit, item = ("bytes", "files") if self.prepared is None else ("tokens", "documents")
        return (
            f"{len(self.train):,} {unit} of {len(self.train_files):,} {item} to train on, "
            f"{len(self.held_out):,} {unit} of {len(self.held_out_files):,} {item} held out"
        )

    @property
    def sha256(self) -> str:
        """A hash of both sides, by which a resumed run knows its text."""
        if self.prepared is not None:
            return self.prepared["sha256"]
        digest = hashlib.sha256(self.train.data)
        digest.update(b"|")
        digest.update(self.held_out.data)
        return digest.hexdigest()


def read_files(data: str | None, out_dir: str) -> tuple[list[tuple[str, bytes]], list[str]]:
    """Return (name, bytes) of every text file, sorted by name, and the names of what is left out.

    All files below a folder are text, but for hidden files, and for what is left out: folders of
    runs, and files with a zero byte near their start.
    """
    default = data is None
    root = Path(sysconfig.get_path("stdlib") if data is None else data)
    paths, left_out = find_files(root, Path(out_dir).resolve(), default)
    files = []
    for path in paths:
        content = path.read_bytes()
        name = path.relative_to(root).as_posix() if path != root else path.name
        if FILE_SEPARATOR in content[:8192]:
            left_out.append(name)
        elif content:
            files.append((name, content))
    if not files:
        raise UserError(f"`data` must have text in it; found none in {str(root)!r}: pass --data.")
    return sorted(files), sorted(left_out)


def why_left_out(names: Sequence[str]) -> str:
    """Return a line that names what `read_files` has left out."""
    more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return (
        "left out, because they are folders of runs, or have zero bytes and are no UTF-8: "
        f"{', '.join(names[:10])}{more}"
    )


def find_files(root: Path, own: Path, default: bool) -> tuple[list[Path], list[str]]:
    """Return the files below `root` that may be text, and the run folders; `own` is one of them."""
    if not root.exists():
        raise UserError(f"`data` must be a file or a folder; got {str(root)!r}: no such file.")
    if root.resolve() == own or is_run_folder(root):
        raise UserError(
            f"`data` must be text, not the folder of a run; got {str(root)!r}: pass another --data "
            "or --out-dir."
        )
    if root.is_file():
        return [root], []
    paths, left_out = [], []

    def fail(error):
        raise error

    for folder, subfolders, names in os.walk(root, onerror=fail):
        # os.walk enters the folders that this loop leaves in the list.
        for path in [Path(folder, name) for name in subfolders]:
            # A new run's folder may be there before its mark is.
            a_run = is_run_folder(path) or path.resolve() == own
            if a_run or path.name.startswith(".") or (default and path.name in NOT_SOURCE):
                subfolders.remove(path.name)
            if a_run:
                left_out.append(path.relative_to(root).as_posix())
        paths += [
            Path(folder, name)
            for name in names
            if not name.startswith(".") and (name.endswith(".py") or not default)
        ]
    # Pipes and sockets have no end.
    return [path for path in paths if path.is_file()], left_out


def split_files(
    files: list[tuple[str, AnyStr]],
) -> tuple[list[tuple[str, AnyStr]], list[tuple[str, AnyStr]]]:
    """Split files into a side to train on, and a side held out, of about a tenth of the bytes.

    The choice follows a hash of the name, so a file mostly keeps its side when others come or go.
    A single file is cut, and its end is held out.
    """
    if len(files) == 1:
        [(name, content)] = files
        cut = int(len(content) * (1 - HELD_OUT))
        return [(name, content[:cut])], [(f"{name} (end)", content[cut:])]
    total = sum(len(content) for _, content in files)
    train, held_out, size = [], [], 0
    for name, content in sorted(files, key=lambda f: hashlib.sha256(os.fsencode(f[0])).digest()):
        # The held-out side is never more than half: it gets the note, and not the book.
        if size < HELD_OUT * total and size + len(content) <= total / 2:
            held_out.append((name, content))
            size += len(content)
        else:
            train.append((name, content))
    return train, held_out


def load_text(config: TrainConfig) -> Text:
    """Read and split the text, and check that both sides are longer than the context."""
    folder = Path(config.data or "")
    if config.data is not None and any((x / TOKENS).exists() for x in (folder, folder / NEW)):
        text = map_tokens(folder)
    else:
        files, left_out = read_files(config.data, config.out_dir)
        sides = split_files(files)
        train, held_out = (
            np.frombuffer(FILE_SEPARATOR.join(content for _, content in side), np.uint8)
            for side in sides
        )
        train_files, held_out_files = ([name for name, _ in side] for side in sides)
        text = Text(train, held_out, train_files, held_out_files, left_out)
    if min(len(text.train), len(text.held_out)) <= config.context:
        raise UserError(
            "`context` must be below the length of both sides of the text; got a context of "
            f"{config.context}, {len(text.train)} tokens to train on and "
            f"{len(text.held_out)} held out: give more text or a smaller --context."
        )
    return text


def files_of(side: str) -> tuple[str, str]:
    """Return the names of the files of a side: its tokens, and the ends of its documents."""
    return f"{side}.bin", f"{side}_ends.bin"


def map_tokens(folder: Path) -> Text:
    """Return the text of a folder of prepare_tokens.py, mapped into memory.

    Raises:
        UserError: The folder is of something else, or a file is missing or cut short.
    """
    prepared, unfinished = read_marked(folder / TOKENS), (folder / NEW / TOKENS).exists()
    if unfinished or prepared is None:
        got = "unfinished ones" if unfinished else f"another {TOKENS}"
        raise UserError(
            f"`data` must be text, or tokens by prepare_tokens.py; got {got} in {str(folder)!r}: "
            "prepare them again."
        )
    tokens, ends = {}, {}
    for side in SIDES:
        mapped = zip((tokens, ends), files_of(side), ("tokens", "documents"), strict=True)
        for arrays, name, unit in mapped:
            path, count = folder / name, prepared[unit][side]
            dtype = np.dtype(prepared["dtype"] if arrays is tokens else ENDS)
            size = path.stat().st_size if path.exists() else 0
            if size != count * dtype.itemsize:
                raise UserError(
                    f"`data` must have the {count:,} {unit} of {path}; got a file of {size:,} "
                    "bytes: prepare them again."
                )
            arrays[side] = np.memmap(path, dtype, mode="r")
    train, held_out = SIDES
    return Text(
        tokens[train],
        tokens[held_out],
        train_files=range(len(ends[train])),
        held_out_files=range(len(ends[held_out])),
        left_out=[],
        prepared=prepared,
        train_ends=ends[train],
        held_out_ends=ends[held_out],
    )


def check_tokens(config: TrainConfig, text: Text, vocab_size: int):
    """Refuse a text in tokens that the weights, with which a run begins, do not have.

    Raises:
        UserError: It is such a text.
    """
    folder = weights_folder(Path(config.init_from or ""))
    if folder is None:
        return
    there, here = folder / TOKENIZER, Path(config.data or "", TOKENIZER)
    got = ""
    if text.prepared is None and there.exists():
        got = "text"
    elif text.vocab_size > vocab_size:
        got = f"{text.vocab_size:,} different tokens"
    elif there.exists() and there.read_bytes() != here.read_bytes():
        got = f"other ones in {here} than in {there}"
    if got:
        raise UserError(
            f"`data` must be tokens of the folder in `init_from`; got {got}: run python "
            f"scripts/prepare_tokens.py TEXT --tokenizer {folder} --out-dir TOKENS."
        )


def windows(
    text: np.ndarray, starts: np.ndarray, config: TrainConfig, layout: Layout, ends
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Cut windows one longer than the context, `[parts, microbatch, context + 1]`.

    Each process cuts only the windows that its devices compute.

    Returns:
        The tokens. If the text has documents, also the document of each, counted from the first in
        its window.
    """
    starts = starts.reshape(-1, config.microbatch)
    offsets = np.arange(config.context + 1)

    def cut(read):
        def part(index):
            return read(starts[index[:2]][..., None] + offsets)

        shape = (*starts.shape, len(offsets))
        return jax.make_array_from_callback(shape, layout.sharding(None, BATCH), part)

    def documents(positions):
        numbers = np.searchsorted(ends, positions, side="right")
        return (numbers - numbers[..., :1]).astype(np.int32)

    tokens = cut(lambda positions: text[positions])
    if ends is None:
        return tokens
    return tokens, cut(documents)


def training_batch(
    text: np.ndarray, step: int, config: TrainConfig, layout: Layout, ends: np.ndarray | None = None
):
    """Return the batch of one update: random windows, a function of (seed, step) alone.

    See `windows`.
    """
    rng = np.random.default_rng([config.seed, step])
    starts = rng.integers(0, len(text) - config.context, config.batch_size)
    return windows(text, starts, config, layout, ends)


def held_out_batches(
    text: np.ndarray, config: TrainConfig, layout: Layout, ends: np.ndarray | None = None
):
    """Return windows spread evenly over the held-out text, the same at every look."""
    last = len(text) - config.context - 1
    starts = np.linspace(0, last, config.eval_batches * config.batch_size).astype(int)
    return windows(text, starts, config, layout, ends)
