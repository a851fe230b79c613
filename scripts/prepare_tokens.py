"""Turn a text into token files, which `python -m models.train --data` maps into memory.

    python scripts/prepare_tokens.py my_texts/ --tokenizer Qwen2.5-0.5B --out-dir tokens/
    python scripts/prepare_tokens.py my_texts/ --vocab-size 8192 --out-dir tokens/
    python -m models.train --data tokens/ --out-dir runs/tokens

The text is a file, or a folder as the trainer reads it. A document is a file, or in a .jsonl file
the field "text" of a line; each gets the tokens that the tokenizer begins one with, and then the
end token. About a tenth of the documents is held out. The name of a special token in a document
is text; with --special-tokens it is the token, as in chats that a template has written.

The tokenizer is a tokenizer.json, or the folder of weights that has one. Without one, byte-level
BPE of --vocab-size tokens is trained on the text that is not held out.
"""

import codecs
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    import numpy as np

    from models.tokens import FromFolder
    from models.train import with_flags
    from models.training.files import END, MARK, TOKENIZER, lock, read_marked, sha256_of, write_file
    from models.training.text import (
        ENDS,
        LOCK,
        NEW,
        SIDES,
        TOKENS,
        files_of,
        read_files,
        split_files,
        why_left_out,
    )
    from scripts.command import Parser, UserError, command, naming, parse_path, parse_size
except ModuleNotFoundError as error:
    raise SystemExit(
        f"error: this script needs a checkout installed with extras; got no module named "
        f"{error.name!r}: run pip install -e '.[train,models]'."
    ) from None

# The end token of tokenizers that are trained here, and of many others.
END_TOKEN = "<|endoftext|>"
# The largest vocabulary of a tokenizer that is trained here.
MOST = 2**20
# Bytes that are tokenized at once, in parallel.
BATCH = 2**24


def documents_of(files: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Return (name, UTF-8) of every document.

    Raises:
        UserError: A file is not UTF-8, a line of a .jsonl file has no text, or all texts are empty.
    """
    documents = []
    for name, content in files:
        # Some editors put it before a text.
        content = content.removeprefix(codecs.BOM_UTF8)
        try:
            content.decode()
        except UnicodeDecodeError:
            raise UserError(
                f"`data` must be UTF-8; got other bytes in {name!r}: leave that file out."
            ) from None
        if not name.endswith(".jsonl"):
            documents.append((name, content))
            continue
        for number, line in enumerate(content.split(b"\n"), 1):
            try:
                if line.strip():
                    documents.append((f"{name}:{number}", json.loads(line)["text"].encode()))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise UserError(
                    f'`data` must have lines like {{"text": "..."}} in .jsonl files; got another '
                    f"in line {number} of {name!r}."
                ) from None
    if not any(content for _, content in documents):
        raise UserError(f"`data` must have text in it; got {len(documents)} empty documents.")
    return documents


def split_documents(documents: list[tuple[str, bytes]]) -> dict[str, list[bytes]]:
    """Return the documents to train on and those held out; a single one is cut between letters."""
    if len(documents) > 1:
        sides = split_files(documents)
    else:
        [(name, content)] = documents
        letters = split_files([(name, content.decode())])
        sides = [[(name, text.encode()) for name, text in side] for side in letters]
    return {x: [content for _, content in side] for x, side in zip(SIDES, sides, strict=True)}


def train_tokenizer(texts: Iterator[str], vocab_size: int):
    """Return byte-level BPE with the most frequent pairs of the texts."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError:
        raise UserError(
            "`vocab_size` needs the package tokenizers: run pip install -e '.[models]'."
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=alphabet,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_of(words: FromFolder, asked: str | None) -> int:
    """Return the token that ends a document: the one asked for, or the folder's.

    Raises:
        UserError: The tokenizer has no such token.
    """
    name = END_TOKEN if asked is None else asked
    name, end = repr(name), words.token(name)
    if asked is None and words.stop_tokens:
        name = end = words.stop_tokens[0]
    if end is None or end not in range(words.vocab_size):
        raise UserError(
            f"--end-token must be a token that ends a document; got {name}, which the tokenizer "
            "does not have."
        )
    return end


def batches(documents: Sequence[bytes]) -> Iterator[list[str]]:
    """Yield lists of texts of about `BATCH` bytes."""
    batch, size = [], 0
    for content in documents:
        batch.append(content.decode())
        size += len(content)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_side(
    files: Sequence[Path], documents: Sequence[bytes], words: FromFolder, end: int, special: bool
) -> int:
    """Write the tokens of documents, an end token after each, and where each ends.

    Returns:
        The number of tokens.

    Raises:
        UserError: The tokenizer gives a token that it does not have.
    """
    sizes, named, unknown, unknown_token = [], [], 0, words.unknown
    with naming(files[0]), open(files[0], "wb") as file:
        for batch in batches(documents):
            named += filter(None, map(words.special_name, batch))
            for ids in words.documents(batch, special):
                ids = ids if ids[-1:] == [end] else [*ids, end]
                if max(ids) >= words.vocab_size:
                    raise UserError(
                        f"the tokenizer must have tokens below {words.vocab_size:,}; got "
                        f"{max(ids):,} in a document."
                    )
                sizes.append(len(ids))
                unknown += 0 if unknown_token is None else ids.count(unknown_token)
                file.write(np.asarray(ids, type_of(words)).tobytes())
    if named and not special:
        count = f"{len(named):,} of {len(documents):,} documents"
        print(f"{count} name a special token, as {named[0]}: it is text without --special-tokens")
    if unknown:
        print(f"{unknown:,} tokens are for letters or words that the tokenizer does not know")
    ends = np.cumsum(sizes, dtype=ENDS)
    with naming(files[1]):
        files[1].write_bytes(ends.tobytes())
    return int(ends[-1])


def type_of(words: FromFolder) -> str:
    """Return the dtype that has room for all tokens."""
    return "<u2" if words.vocab_size <= 2**16 else "<u4"


def put_into_place(folder: Path):
    """Move the new files of a folder into place, if they are whole; remove them if not.

    After a kill between any two lines, the next call goes on, because tokens.json is the last.
    """
    new = folder / NEW
    if (new / TOKENS).exists():
        for path in sorted(new.iterdir(), key=lambda path: path.name == TOKENS):
            path.replace(folder / path.name)
    shutil.rmtree(new, ignore_errors=True)


def prepare(
    data: Path,
    out_dir: Path,
    tokenizer: Path | None,
    vocab_size: int,
    end: str | None,
    *,
    special: bool = False,
    replace: bool = False,
):
    """Write the folder, and return the content of its tokens.json.

    Args:
        data: The text.
        out_dir: The folder; the tokens in it stay until the new ones are whole.
        tokenizer: A tokenizer.json, or a folder that has one; None to train one.
        vocab_size: The size of a tokenizer that is trained.
        end: The token that ends a document; None for the folder's.
        special: Whether names of special tokens in the text are these tokens.
        replace: Whether other tokens in `out_dir` may be replaced.

    Raises:
        UserError: The text, the tokenizer or the folder does not serve, the folder is in use, or it
            has other tokens.
    """
    new = out_dir / NEW
    # A first run that was killed has no tokens but new ones.
    ours = read_marked(out_dir / TOKENS) or (
        not (out_dir / TOKENS).exists() and read_marked(new / TOKENS)
    )
    known = new, out_dir / LOCK
    if out_dir.exists() and not ours and any(path not in known for path in out_dir.iterdir()):
        raise UserError(
            f"`out_dir` must be new, empty, or a folder of this script; got {str(out_dir)!r}."
        )
    out_dir.mkdir(parents=True, exist_ok=True)
    with lock(out_dir / LOCK):
        # The folder of results is no text.
        files, left_out = read_files(str(data), str(out_dir))
        if left_out:
            print(why_left_out(left_out))
        sides = split_documents(documents_of(files))
        words = None if tokenizer is None else FromFolder(tokenizer)
        put_into_place(out_dir)
        kept = None if replace else read_marked(out_dir / TOKENS)
        if kept and not sizes_of(sides).items() <= kept.items():
            raise other_tokens("another text", out_dir)
        new.mkdir()
        try:
            if words is None:
                texts = (content.decode() for content in sides["train"])
                train_tokenizer(texts, vocab_size).save(str(new / TOKENIZER))
                words = FromFolder(new / TOKENIZER)
            else:
                shutil.copyfile(words.path, new / TOKENIZER)
            old = out_dir / TOKENIZER
            same = old.exists() and old.read_bytes() == (new / TOKENIZER).read_bytes()
            if kept and not same:
                raise other_tokens("another tokenizer", out_dir)
            content = write_tokens(new, sides, words, end_of(words, end), special)
            if kept and kept != content:
                raise other_tokens("another text or of other flags", out_dir)
            write_file(new / TOKENS, json.dumps(content, indent=2) + "\n")
        except BaseException:
            shutil.rmtree(new)
            raise
        put_into_place(out_dir)
    return content


def other_tokens(of: str, folder: Path) -> UserError:
    """Return the error of a folder whose tokens would be lost."""
    return UserError(
        f"`out_dir` must have no tokens of {of}; got {str(folder)!r}: pass another --out-dir, or "
        "--replace."
    )


def sizes_of(sides: dict[str, list[bytes]]) -> dict[str, dict[str, int]]:
    """Return the fields of tokens.json that the text alone decides."""
    return {
        "documents": {side: len(documents) for side, documents in sides.items()},
        "bytes": {side: sum(map(len, documents)) for side, documents in sides.items()},
    }


def write_tokens(
    folder: Path, sides: dict[str, list[bytes]], words: FromFolder, end: int, special: bool
) -> dict[str, Any]:
    """Write the files beside tokenizer.json, and return the content of tokens.json."""
    counts, digest = {}, hashlib.sha256()
    for side, documents in sides.items():
        files = [folder / name for name in files_of(side)]
        counts[side] = write_side(files, documents, words, end, special)
        for path in files:
            digest.update(sha256_of(path, flush=True).encode())
    write_file(folder / END, json.dumps({"eos_token_id": end}))
    return {
        **MARK,
        "vocab_size": words.vocab_size,
        "end": end,
        "dtype": type_of(words),
        "tokens": counts,
        **sizes_of(sides),
        "sha256": digest.hexdigest(),
    }


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = Parser(
        prog="prepare_tokens.py",
        usage="%(prog)s DATA --out-dir FOLDER [--tokenizer PATH] ...",
        description=__doc__,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("data", metavar="DATA", type=parse_path, help="text file, or folder of text files")
    add("--out-dir", type=parse_path, required=True, metavar="FOLDER", help="folder to write")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--tokenizer",
        type=parse_path,
        metavar="PATH",
        help="a tokenizer.json, or a folder of weights that has one",
    )
    which.add_argument(
        "--vocab-size",
        type=parse_size,
        default=8192,
        metavar="INT",
        help="size of the tokenizer that is trained without --tokenizer, from 257",
    )
    add(
        "--end-token",
        metavar="TEXT",
        help=f"the token that ends a document (default: the weights' own, or {END_TOKEN})",
    )
    add(
        "--special-tokens",
        action="store_true",
        help="names of special tokens in the text are tokens, and not text",
    )
    add(
        "--replace",
        action="store_true",
        help="other tokens in the folder, of another text, tokenizer or flags, are replaced",
    )
    flags = parser.parse_args(argv)
    # The package tokenizers ends the process if it has no memory for them.
    if not 257 <= flags.vocab_size <= MOST:
        raise UserError(
            "--vocab-size must be at least 257, all bytes and the end token, and at most "
            f"{MOST:,}; got {flags.vocab_size}."
        )
    try:
        done = prepare(
            flags.data,
            flags.out_dir,
            flags.tokenizer,
            flags.vocab_size,
            flags.end_token,
            special=flags.special_tokens,
            replace=flags.replace,
        )
    except UserError as error:
        raise UserError(with_flags(error).replace("--data", "DATA")) from None
    for side in SIDES:
        size, tokens, count = (done[name][side] for name in ("bytes", "tokens", "documents"))
        print(
            f"{side}: {tokens:,} tokens of {count:,} documents, {size / max(tokens, 1):.2f} bytes "
            "a token"
        )
    print(f"in {flags.out_dir}, of a vocabulary of {done['vocab_size']:,}")


if __name__ == "__main__":
    sys.exit(main())
