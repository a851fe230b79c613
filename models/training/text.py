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
file is on both sides. Run folders are no text and are left out. `conversations.py` has another
kind of text.
"""

import hashlib
import math
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

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
Content = TypeVar("Content", bytes, str, np.ndarray)


class Batch(NamedTuple):
    """Sequences one longer than the context, or functions that read them; `[..., context + 1]`.

    Attributes:
        tokens: The tokens.
        documents: The document of each; None if a sequence is one document.
        answers: Whether each carries loss; None if all do.
    """

    tokens: Any
    documents: Any = None
    answers: Any = None


class Stream(NamedTuple):
    """One stream of tokens; a sequence is a window of it, and its number is where it starts.

    Attributes:
        tokens: The tokens.
        names: The names of the files, or the numbers of documents.
        ends: For each document, the number of tokens up to its end; None for bytes, all of which
            are one document.
    """

    tokens: np.ndarray
    names: Sequence = ()
    ends: np.ndarray | None = None

    def draw(self, step: int, config: TrainConfig) -> np.ndarray:
        """Return the windows of an update: random ones, a function of (seed, step) alone."""
        random = np.random.default_rng([config.seed, step])
        return random.integers(0, len(self.tokens) - config.context, config.batch_size)

    def spread(self, config: TrainConfig) -> np.ndarray:
        """Return the windows of a look at the text, spread evenly over it."""
        last, count = len(self.tokens) - config.context - 1, config.eval_batches * config.batch_size
        return np.linspace(0, last, count).astype(int)

    def readers(self, context: int) -> Batch:
        """Return functions from windows to arrays; documents are counted from the first."""
        ends = self.ends

        def documents(starts):
            assert ends is not None  # it is not returned without them
            numbers = np.searchsorted(ends, places(starts), side="right")
            return (numbers - numbers[..., :1]).astype(np.int32)

        def places(starts):
            return starts[..., None] + np.arange(context + 1)

        return Batch(
            lambda starts: self.tokens[places(starts)],
            None if ends is None else documents,
        )


class Text(NamedTuple):
    """The text of a run.

    Attributes:
        train: The side to train on, a `Stream`, or `Rows` of conversations.
        held_out: The side that is held out.
        vocab_size: Number of different tokens.
        sha256: A hash of both sides, by which a resumed run knows its text.
        said: What it has, in a few lines.
        bytes: The size of the held-out side; None if that is not all predicted.
        tokens: The folder of prepare_tokens.py that has it; None without one.
    """

    train: Any
    held_out: Any
    vocab_size: int
    sha256: str
    said: list[str]
    bytes: int | None = None
    tokens: Path | None = None

    def bits_per_byte(self, loss: float) -> float | None:
        """Return the bits of a byte of the held-out text, from nats of its tokens."""
        return self.bytes and loss / math.log(2) * len(self.held_out.tokens) / self.bytes


def read_files(data: str | None, out_dir: str) -> tuple[list[tuple[str, bytes]], list[str]]:
    """Return (name, bytes) of every text file, sorted by name, and the names of what is left out.

    All files below a folder are text, but for hidden files, and for what is left out: folders of
    runs, and files with a zero byte near their start.
    """
    root, own = Path(data or sysconfig.get_path("stdlib")), Path(out_dir).resolve()
    if not (root.is_file() or root.is_dir()):
        raise UserError(f"`data` must be a file or a folder; got {str(root)!r}, which is neither.")
    if root.resolve() == own or is_run_folder(root):
        raise UserError(
            f"`data` must be text, not the folder of a run; got {str(root)!r}: pass another --data "
            "or --out-dir."
        )
    files, left_out = [], []

    def fail(error):
        raise error

    walked = [(root.parent, [], [root.name])] if root.is_file() else os.walk(root, onerror=fail)
    for folder, subfolders, names in walked:
        # os.walk enters the folders that this loop leaves in the list.
        for path in [Path(folder, name) for name in subfolders]:
            # A new run's folder may be there before its mark is.
            if a_run := is_run_folder(path) or path.resolve() == own:
                left_out.append(path.relative_to(root).as_posix())
            if a_run or path.name.startswith(".") or (data is None and path.name in NOT_SOURCE):
                subfolders.remove(path.name)
        for path in [Path(folder, name) for name in names]:
            # Pipes and sockets have no end.
            hidden = path.name.startswith(".") and path != root
            if hidden or not path.is_file() or (data is None and path.suffix != ".py"):
                continue
            content = path.read_bytes()
            name = path.name if path == root else path.relative_to(root).as_posix()
            if FILE_SEPARATOR in content[:8192]:
                left_out.append(name)
            elif content:
                files.append((name, content))
    if not files:
        but = f" ({why_left_out(left_out)})" if left_out else ""
        raise UserError(
            f"`data` must have text in it; found none in {str(root)!r}{but}: pass another --data."
        )
    return sorted(files), sorted(left_out)


def why_left_out(names: Sequence[str]) -> str:
    """Return a line that names what `read_files` has left out."""
    more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return (
        "left out, because they are folders of runs, or have zero bytes and are no UTF-8: "
        f"{', '.join(names[:10])}{more}"
    )


def split_files(
    files: list[tuple[Any, Content]],
) -> tuple[list[tuple[Any, Content]], list[tuple[Any, Content]]]:
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
    prepared = config.data is not None and any(
        (x / TOKENS).exists() for x in (folder, folder / NEW)
    )
    if prepared and config.batch_invariant:
        raise UserError(
            "`batch_invariant` must be False with tokens by prepare_tokens.py, whose documents "
            "begin anywhere in a row; got True: give `data` as text, or `conversations`."
        )
    text = map_tokens(folder) if prepared else text_of_bytes(config)
    sizes = [len(side.tokens) for side in (text.train, text.held_out)]
    if min(sizes) <= config.context:
        raise UserError(
            "`context` must be below the length of both sides of the text; got a context of "
            f"{config.context}, {sizes[0]} tokens to train on and {sizes[1]} held out: give more "
            "text or a smaller --context."
        )
    return text


def counts_of(sides: Sequence[Stream], unit: str, item: str) -> str:
    """Return the sizes of both sides."""
    purposes = "to train on", "held out"
    return ", ".join(
        f"{len(side.tokens):,} {unit} of {len(side.names):,} {item} {purpose}"
        for side, purpose in zip(sides, purposes, strict=True)
    )


def text_of_bytes(config: TrainConfig) -> Text:
    """Return the text of files, whose tokens are bytes."""
    files, left_out = read_files(config.data, config.out_dir)
    train, held_out = (
        Stream(
            np.frombuffer(FILE_SEPARATOR.join(content for _, content in side), np.uint8),
            [name for name, _ in side],
        )
        for side in split_files(files)
    )
    digest = hashlib.sha256(train.tokens.data)
    digest.update(b"|")
    digest.update(held_out.tokens.data)
    said = [counts_of((train, held_out), "bytes", "files")]
    said += [why_left_out(left_out)] if left_out else []
    return Text(train, held_out, 256, digest.hexdigest(), said, bytes=len(held_out.tokens))


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

    def mapped(name, dtype, count, unit):
        size = (folder / name).stat().st_size if (folder / name).exists() else 0
        if size != count * np.dtype(dtype).itemsize:
            raise UserError(
                f"`data` must have the {count:,} {unit} of {folder / name}; got a file of {size:,} "
                "bytes: prepare them again."
            )
        return np.memmap(folder / name, dtype, mode="r")

    def stream(side):
        count, (tokens, ends) = prepared["documents"][side], files_of(side)
        tokens = mapped(tokens, prepared["dtype"], prepared["tokens"][side], "tokens")
        return Stream(tokens, range(count), mapped(ends, ENDS, count, "documents"))

    train, held_out = map(stream, SIDES)
    said, size = counts_of((train, held_out), "tokens", "documents"), prepared["bytes"]["held_out"]
    vocabulary, digest = prepared["vocab_size"], prepared["sha256"]
    return Text(train, held_out, vocabulary, digest, [said], bytes=size, tokens=folder)


def check_tokens(config: TrainConfig, text: Text, vocab_size: int):
    """Refuse a text in tokens that the weights, with which a run begins, do not have.

    Raises:
        UserError: It is such a text.
    """
    if config.init_from is None:
        return
    there, here = config.weights / TOKENIZER, (text.tokens or Path()) / TOKENIZER
    got = ""
    if text.vocab_size > vocab_size:
        got = f"{text.vocab_size:,} different tokens for {vocab_size:,} of the weights"
    elif there.exists() and not config.conversations:
        if text.tokens is None:
            got = "text"
        elif there.read_bytes() != here.read_bytes():
            got = f"other ones in {here} than in {there}"
    if got:
        raise UserError(
            f"`data` must be tokens of the folder in `init_from`; got {got}: run python "
            f"scripts/prepare_tokens.py TEXT --tokenizer {config.weights} --out-dir TOKENS."
        )


def read_batch(side: Any, numbers: np.ndarray, config: TrainConfig, layout: Layout) -> Batch:
    """Return sequences, each array `[parts, microbatch, context + 1]`.

    Each process reads only the sequences that its devices compute.
    """
    numbers = numbers.reshape(-1, config.microbatch)
    shape, places = (*numbers.shape, config.context + 1), layout.sharding(None, BATCH)

    def made(read):
        def part(index):
            return read(numbers[index[:2]])

        return jax.make_array_from_callback(shape, places, part)

    return jax.tree.map(made, side.readers(config.context))


def training_batch(text: Text, step: int, config: TrainConfig, layout: Layout) -> Batch:
    """Return the batch of one update, a function of (seed, step) alone."""
    return read_batch(text.train, text.train.draw(step, config), config, layout)


def held_out_batches(text: Text, config: TrainConfig, layout: Layout) -> Batch:
    """Return the batches of a look at the held-out text, the same at every look."""
    return read_batch(text.held_out, text.held_out.spread(config), config, layout)
