"""Turn a text into token files, which `train_gpt.py --data` maps into memory.

    python scripts/prepare_tokens.py my_texts/ --tokenizer Qwen2.5-0.5B --out-dir tokens/
    python scripts/prepare_tokens.py my_texts/ --vocab-size 8192 --out-dir tokens/
    python scripts/train_gpt.py --data tokens/ --out-dir runs/tokens

The text is a file, or a folder as `train_gpt.py` reads it. A document is a file, or in a .jsonl
file the field "text" of a line; each gets the tokens that the tokenizer begins one with, and then
the end token. About a tenth of the documents is held out.

The tokenizer is a tokenizer.json, or the folder of weights that has one. Without one, byte-level
BPE of --vocab-size tokens is trained on the text that is not held out.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

try:
    import numpy as np

    from scripts.command import Parser, UserError, command, parse_path, parse_size
    from scripts.generation.tokens import FromFolder, open_tokenizer
    from scripts.training.checkpoints import MARK, write_file
    from scripts.training.run_folder import END, TOKENIZER
    from scripts.training.settings import TrainConfig, by_flags
    from scripts.training.text import SIDES, TOKENS, read_files, split_files
except ModuleNotFoundError as error:
    raise SystemExit(
        f"error: this script needs a checkout installed with extras; got no module named "
        f"{error.name!r}: run pip install -e '.[train,models]'."
    ) from None

# The end token of tokenizers that are trained here, and of many others.
END_TOKEN = "<|endoftext|>"
# Letters that are tokenized at once, in parallel.
BATCH = 2**24


def documents_of(files: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Return (name, UTF-8) of every document.

    Raises:
        UserError: A file is not UTF-8, or a line of a .jsonl file has no text.
    """
    documents = []
    for name, content in files:
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
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(
                    f'`data` must have lines like {{"text": "..."}} in .jsonl files; got another '
                    f"in line {number} of {name!r}."
                ) from None
    return documents


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


def end_of(tokenizer, path: Path | None, asked: str | None) -> int:
    """Return the token that ends a document: the one asked for, or that of the folder.

    Raises:
        UserError: The tokenizer has no such token.
    """
    if asked is None and path is not None and path.is_dir():
        found = FromFolder(path).stop_tokens
        if found:
            return found[0]
    end = tokenizer.token_to_id(asked or END_TOKEN)
    if end is None:
        raise UserError(
            f"--end-token must be a token that ends a document; got {asked or END_TOKEN!r}, which "
            "the tokenizer does not have."
        )
    return end


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of texts of about `BATCH` letters."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_side(path: Path, texts: Iterator[str], tokenizer, end: int, dtype: str) -> int:
    """Write the tokens of documents, an end token after each; return their number."""
    count = 0
    with open(path, "wb") as file:
        for batch in batches(texts):
            for found in tokenizer.encode_batch(batch):
                ids = found.ids if found.ids[-1:] == [end] else [*found.ids, end]
                count += len(ids)
                file.write(np.asarray(ids, dtype).tobytes())
    return count


def text_of(side: Sequence[tuple[str, bytes]]) -> Iterator[str]:
    """Yield the texts of documents."""
    # Where a single document is cut, the cut may be inside of a letter.
    return (content.decode(errors="ignore") for _, content in side)


def prepare(data: Path, out_dir: Path, tokenizer: Path | None, vocab_size: int, end: str | None):
    """Write the folder, and return the content of its tokens.json.

    Raises:
        UserError: The text, the tokenizer or the folder does not serve.
    """
    if out_dir.exists() and not (out_dir / TOKENS).exists() and any(out_dir.iterdir()):
        raise UserError(
            f"`out_dir` must be new, empty, or a folder of this script; got {str(out_dir)!r}."
        )
    # The folder of results is no text.
    files, _ = read_files(TrainConfig(data=str(data), out_dir=str(out_dir)))
    sides = dict(zip(SIDES, split_files(documents_of(files)), strict=True))
    if tokenizer is None:
        used = train_tokenizer(text_of(sides["train"]), vocab_size)
    else:
        used = open_tokenizer(tokenizer / TOKENIZER if tokenizer.is_dir() else tokenizer)
    end_token, size = end_of(used, tokenizer, end), max(used.get_vocab().values()) + 1
    dtype = "<u2" if size <= 2**16 else "<u4"

    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / TOKENS).unlink(missing_ok=True)
    if tokenizer is not None and tokenizer.is_dir():
        shutil.copy(tokenizer / TOKENIZER, out_dir)
    else:
        used.save(str(out_dir / TOKENIZER))
    write_file(out_dir / END, json.dumps({"eos_token_id": end_token}))
    counts, digest = {}, hashlib.sha256()
    for side, documents in sides.items():
        path = out_dir / f"{side}.bin"
        counts[side] = write_side(path, text_of(documents), used, end_token, dtype)
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    content = {
        **MARK,
        "vocab_size": size,
        "end": end_token,
        "dtype": dtype,
        "tokens": counts,
        "documents": {side: len(x) for side, x in sides.items()},
        "bytes": {side: sum(len(x) for _, x in documents) for side, documents in sides.items()},
        "sha256": digest.hexdigest(),
    }
    write_file(out_dir / TOKENS, json.dumps(content, indent=2) + "\n")
    return content


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
        help="size of the tokenizer that is trained without --tokenizer, at least 257",
    )
    add(
        "--end-token",
        metavar="TEXT",
        help=f"the token that ends a document (default: that of the weights, or {END_TOKEN})",
    )
    flags = parser.parse_args(argv)
    if flags.vocab_size < 257:
        raise UserError(
            f"--vocab-size must be at least 257, all bytes and the end token; got "
            f"{flags.vocab_size}."
        )
    try:
        done = prepare(
            flags.data, flags.out_dir, flags.tokenizer, flags.vocab_size, flags.end_token
        )
    except UserError as error:
        raise UserError(by_flags(error).replace("--data", "DATA")) from None
    for side in SIDES:
        size, tokens, count = (done[name][side] for name in ("bytes", "tokens", "documents"))
        print(
            f"{side}: {tokens:,} tokens of {count:,} documents, {size / max(tokens, 1):.2f} bytes "
            "a token"
        )
    print(f"in {flags.out_dir}, of a vocabulary of {done['vocab_size']:,}")


if __name__ == "__main__":
    sys.exit(main())
