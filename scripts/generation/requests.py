"""`generate.py --requests`: a file of requests, whose answers are written as they end."""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import jax

from models.config import DecoderConfig
from models.engine import Engine, Sampling
from models.engine.engine import progress_bar
from models.engine.pages import bytes_of_token, default_step, pages_for
from scripts.command import UserError, naming, why
from scripts.generation.source import Source, explained, open_source

# Tokens of a page; most texts that are continued at once.
PAGE_SIZE, MAX_REQUESTS = 64, 64
# The share of the device's free memory that pages may take.
SHARE = 0.8
TOO_LARGE = (
    "the weights and the pages must fit the device's memory; got too many: share them by "
    "--devices, or let --cache be int8."
)
FIELDS = {x.name for x in dataclasses.fields(Sampling)}


@dataclasses.dataclass(frozen=True)
class Line:
    """A request of a file.

    Attributes:
        id: What the file calls it.
        tokens: Its prompt.
        sampling: How it is continued.
    """

    id: Any
    tokens: Sequence[int]
    sampling: Sampling


def read_text(flag: str, path: pathlib.Path) -> str:
    """Return the text of a flag's file, or for - of the standard input, without a byte order mark.

    Raises:
        UserError: It cannot be read, or is no text.
    """
    try:
        if str(path) == "-":
            text = sys.stdin.read()
        else:
            with open(path, encoding="utf-8", newline="") as file:
                text = file.read()
    except (OSError, UnicodeError) as error:
        raise UserError(f"{flag} must be text; got {path}: {why(error)}.") from None
    return text.removeprefix("\ufeff")


def read_requests(
    path: pathlib.Path,
    source: Source,
    encode: Callable[[str], Sequence[int]],
    defaults: dict[str, Any],
) -> list[Line]:
    """Return the requests of a file with a JSON object in each line.

    Args:
        path: The file; - is the standard input.
        source: The model and its tokenizer.
        encode: Returns the tokens of a prompt.
        defaults: The fields of `Sampling` of a line that does not have them.

    Raises:
        UserError: The file cannot be read, or a line is no request.
    """
    lines = enumerate(read_text("--requests", path).split("\n"), 1)
    lines = [(n, line) for n, line in lines if line.strip()]
    if not lines:
        raise UserError(f"--requests must have a request; got none in {path}.")
    requests = []
    for number, line in lines:
        try:
            requests.append(_request(number, line, source, encode, defaults))
        except ValueError as error:
            said = str(error).splitlines()[0]
            raise UserError(f"line {number} of {path}: {said}") from None
    return requests


def _request(number: int, line: str, source: Source, encode, defaults) -> Line:
    """Return the request of a line."""
    try:
        fields = json.loads(line)
        json.dumps(fields, ensure_ascii=False).encode()  # an escape may be half of a letter
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise UserError(
            'a request must be JSON in UTF-8, like {"prompt": "text"} or {"messages": [..]}.'
        )
    given = {name: x for name, x in fields.items() if name in FIELDS}
    if unknown := fields.keys() - FIELDS - {"prompt", "messages", "id"}:
        known = ", ".join(sorted(FIELDS))
        raise UserError(f"`{min(unknown)}` must be one of id, prompt, messages, {known}.")
    if "prompt" in fields:
        if not isinstance(fields["prompt"], str) or not fields["prompt"]:
            raise UserError("`prompt` must be a text with a character.")
        tokens = encode(fields["prompt"])
    elif source.tokens.chat is None:
        raise UserError("`messages` must come with a chat template.")
    else:
        tokens = source.tokens.encode_messages(fields["messages"])
    return Line(fields.get("id", number), tokens, Sampling(**(defaults | given)))


def count_pages(
    configs: Sequence[DecoderConfig],
    lengths: Sequence[int],
    most: int,
    cache_dtype: str | None,
    devices: int,
) -> int:
    """Return the pages for the longest texts that may be there at once, if they fit.

    Args:
        configs: The model's and a draft model's.
        lengths: The most tokens of each text.
        most: Most tokens of a step.
        cache_dtype: Type of the cache.
        devices: Devices that share the heads.
    """
    each = sorted((min(n, configs[0].context) for n in lengths), reverse=True)
    needed = pages_for(configs, each[:MAX_REQUESTS], PAGE_SIZE, most)
    memory = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in memory:
        return needed
    page = PAGE_SIZE * bytes_of_token(configs[0], cache_dtype) // devices
    free = memory["bytes_limit"] - memory.get("bytes_in_use", 0)
    least = pages_for(configs, each[:1], PAGE_SIZE, most)
    return max(min(needed, int(SHARE * free) // page), least)


def make_engine(
    flags: argparse.Namespace, source: Source, lengths: Sequence[int], slots: int
) -> Engine:
    """Return the engine of the flags, for texts of at most these tokens each."""
    draft, configs = None, [source.model.config]
    if flags.draft is not None:
        dtype = None if flags.dtype == "auto" else flags.dtype
        attention = source.model.config.implementation
        draft = open_source(flags.draft, dtype, attention, flags.devices, "--draft")
        configs.append(draft.model.config)
    most = default_step(slots, flags.drafts, flags.batch_invariant)
    return Engine(
        source.model,
        source.tokens,
        pages=count_pages(configs, lengths, most, flags.cache, flags.devices),
        page_size=PAGE_SIZE,
        cache_dtype=flags.cache,
        max_requests=slots,
        drafts=flags.drafts,
        draft=draft and draft.model,
        batch_invariant=flags.batch_invariant,
    )


def write_answers(
    flags: argparse.Namespace, source: Source, lines: Sequence[Line], say: Callable[[str], None]
) -> None:
    """Write a line for each answer, in the order in which they end.

    Raises:
        UserError: A request does not fit the model or the memory, or the file cannot be written.
    """
    lengths, context = [], source.model.config.context
    for line in lines:
        length = len(line.tokens) + (line.sampling.max_tokens or context)
        lengths += [length] * line.sampling.samples
    count = len(lengths)
    with explained(TOO_LARGE):
        engine = make_engine(flags, source, lengths, slots=min(MAX_REQUESTS, count))
        names = {engine.submit(line.tokens, line.sampling): line.id for line in lines}
        start, tokens = time.perf_counter(), 0
        with _opened(flags.out) as file:
            shown = file is not sys.stdout and sys.stderr.isatty()
            with progress_bar(count, shown) as bar:
                while engine.busy:
                    ended = [answer for answer in engine.step() if answer.end is not None]
                    for answer in ended:
                        fields = {"id": names[answer.id], "sample": answer.sample}
                        fields |= {"text": answer.text, "end": answer.end}
                        fields["tokens"] = len(answer.tokens)
                        fields["log_probability"] = round(sum(answer.log_probabilities), 4)
                        tokens += len(answer.tokens)
                        file.write(json.dumps(fields, ensure_ascii=False) + "\n")
                    file.flush()
                    bar.update(len(ended))
    seconds = time.perf_counter() - start
    say(
        f"wrote {count} answers of {tokens} tokens in {seconds:.1f} s ({tokens / seconds:,.0f} a "
        "second), compiling included"
    )
    if engine.preemptions:
        say(f"{engine.preemptions} texts were read again, because the memory had no more pages")


@contextlib.contextmanager
def _opened(path: pathlib.Path | None) -> Iterator[TextIO]:
    """Give the file to write; - is the standard output, as without a path."""
    if path is None or str(path) == "-":
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out must be a file to write; got {path}: {why(error)}.") from None
    with naming(path), file:
        yield file
