"""Write text with a trained model: a run of the trainers, or a folder of weights.

    python scripts/generate.py runs/gpt --prompt "def "
    python scripts/generate.py Qwen2.5-0.5B-Instruct --prompt "Why is the sky blue?"
    python scripts/generate.py Llama-3.2-1B --prompts prompts.txt --tokens 100 --temperature 0
    git diff | python scripts/generate.py Qwen2.5-0.5B-Instruct --system "Summarise this change."
    python scripts/generate.py Qwen2.5-0.5B-Instruct --requests in.jsonl --out out.jsonl
    python scripts/generate.py Qwen2.5-0.5B-Instruct

A folder of weights has config.json, model.safetensors (or shards of it) and tokenizer.json; see
`models/families.py` for the families. If it has a chat template, a prompt is what the user says.
Nothing is downloaded.

The standard output has the new text alone, as it is written; all else goes to the standard error.
Several prompts are one batch. Their texts come in order, each below a line with its prompt.
Thousands of them are a file of --requests: lines of JSON with `prompt` or `messages`, maybe `id`,
and fields of `models.engine.Sampling` that differ from the flags. Without a prompt, a terminal is a
chat. The engine serves both, and no prompts.
"""

import argparse
import dataclasses
import itertools
import os
import pathlib
import sys
import typing
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

try:
    from flax import nnx

    from models import engine
    from models.config import Implementation
    from models.engine.engine import CACHE_DTYPES
    from models.generation import Generation, Sampling
    from models.tokens import TextStream, utf8
    from scripts.command import Parser, UserError, command, parse_path, parse_size
    from scripts.generation.conversation import converse
    from scripts.generation.requests import read_requests, read_text, write_answers
    from scripts.generation.source import Source, explained, open_source
except ModuleNotFoundError as error:
    raise SystemExit(
        f"generate.py: error: no module named {error.name!r}: run pip install -e '.[models]' in a "
        "checkout."
    ) from None


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="generate.py",
        usage="%(prog)s RUN_OR_FOLDER [--prompt TEXT ...] [--tokens N] ...",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        metavar="RUN_OR_FOLDER",
        type=parse_path,
        help="folder of weights, or of a run (--out-dir) that has some",
    )
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", metavar="TEXT", help="a text to continue; may be repeated")
    add(
        "--prompts",
        type=parse_path,
        metavar="FILE",
        help="a file with a prompt in each line, - for the standard input; without this and "
        "--prompt, all of the standard input is one prompt",
    )
    add("--requests", type=parse_path, metavar="FILE", help="lines of JSON, - for the input")
    add("--out", type=parse_path, metavar="FILE", help="for their answers (default: the output)")
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="whether prompts go through the folder's chat template (default: if it has one)",
    )
    add("--system", metavar="TEXT", help="the system's words in a chat")
    add(
        "--special-tokens",
        action="store_true",
        help="names of special tokens in a prompt without a chat are tokens, and not text",
    )
    add = parser.add_argument_group("text").add_argument
    add("--tokens", type=parse_size, default=200, metavar="N", help="most tokens of each text")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a text; may be repeated")
    add(
        "--when-full",
        choices=("stop", "slide"),
        default="stop",
        help="whether a text that fills the model's context ends, or goes on from its beginning "
        "(what is before the prompt) and the newer half of its other tokens",
    )
    drawn = parser.add_argument_group(
        "sampling", "Defaults are in the folder's generation_config.json, else as told here."
    )
    add = drawn.add_argument
    add("--temperature", type=float, metavar="T", help="0 takes the most likely token (else: 1)")
    add("--top-k", type=parse_size, metavar="N", help="only the N most likely tokens (else: all)")
    add("--top-p", type=float, metavar="P", help="only the likeliest, up to this sum (else: all)")
    add("--min-p", type=float, metavar="P", help="only those at least P times the likeliest")
    add("--seed", type=int, default=0, metavar="N", help="the same seed writes the same text")
    add = parser.add_argument_group("computation").add_argument
    add("--cache", choices=CACHE_DTYPES, help="type of the engine's cache")
    add("--drafts", type=int, default=0, metavar="N", help="tokens that the engine guesses")
    add("--draft", type=parse_path, metavar="FOLDER", help="a smaller model that guesses them")
    add("--batch-invariant", action="store_true", help="answers alike in whatever batch; Hopper")
    add("--devices", type=parse_size, default=1, metavar="N", help="GPUs that share the weights")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="type of the activations; auto is the type of the weights",
    )
    add(
        "--attention",
        choices=("auto", *typing.get_args(Implementation)),
        default="auto",
        help="implementation of pallas_flash.attention",
    )
    return parser


def read_prompts(flags: argparse.Namespace) -> list[str]:
    """Return the prompts of flags, file or standard input, in this order.

    Raises:
        UserError: There is none.
    """
    prompts: list[str] = list(flags.prompt or ())
    if flags.prompts is not None:
        # Other characters that end a line for Python are text.
        text = read_text("--prompts", flags.prompts)
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        prompts += filter(None, lines)
    elif not prompts and not sys.stdin.isatty():
        text = read_text("--prompt", pathlib.Path("-")).rstrip("\r\n")
        prompts = [text] if text else []
    if not all(prompts) or not prompts:
        raise UserError("--prompt must have a character; got none in flags, file or input.")
    return prompts


def encode(flags: argparse.Namespace, source: Source, prompts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of prompts, as chats if asked for.

    Raises:
        UserError: There is no chat template, or the system's words come without a chat.
    """
    words = source.tokens
    if flags.chat and words.chat is None:
        raise UserError(f"--chat must come with a chat template; got {flags.source} without one.")
    if words.chat is not None and flags.chat is not False:
        if flags.special_tokens:
            raise UserError("--special-tokens must come without a chat; got one: pass --no-chat.")
        return [words.encode_chat(prompt, flags.system) for prompt in prompts]
    if flags.system is not None:
        raise UserError("--system must come with a chat; got none.")
    if not flags.special_tokens and (name := words.special_name("\0".join(prompts))):
        say(f"{name} in a prompt is text: --special-tokens makes it a token")
    return [words.encode(prompt, flags.special_tokens) for prompt in prompts]


def count_before_prompt(flags: argparse.Namespace, source: Source, tokens) -> int:
    """Return the number of tokens that any text begins with, such as the system's words."""
    columns = zip(*tokens, *encode(flags, source, ["0", "a"]), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def make_sampling(flags: argparse.Namespace, source: Source) -> Sampling:
    """Return how tokens are drawn, by flags, or else by the folder."""
    given = {name: getattr(flags, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    values: dict[str, Any] = {
        name: source.defaults.get(name) if x is None else x for name, x in given.items()
    }
    if values["temperature"] is None:
        values["temperature"] = 1.0
    return Sampling(**values, seed=flags.seed % 2**32)


def engine_sampling(flags: argparse.Namespace, source: Source) -> dict[str, Any]:
    """Return the fields of the engine's `Sampling`, by flags, or else by the folder."""
    defaults = dataclasses.asdict(make_sampling(flags, source))
    return defaults | dict(max_tokens=flags.tokens, stop=[utf8(stop) for stop in flags.stop])


def chats(flags: argparse.Namespace, source: Source) -> bool:
    """Return whether the terminal is a chat."""
    given = flags.prompt or flags.prompts or not sys.stdin.isatty()
    return not given and source.tokens.chat is not None and flags.chat is not False


def answer_requests(flags: argparse.Namespace, source: Source) -> None:
    """Answer the requests of a file."""
    if flags.prompt or flags.prompts or flags.when_full != "stop":
        raise UserError("--requests must come without --prompt, --prompts and --when-full.")
    files = [x for x in (flags.requests, flags.out) if x is not None and str(x) != "-"]
    if len({*map(os.path.realpath, files)}) < len(files):
        raise UserError(f"--out must be another file than --requests; got {flags.out} for both.")
    defaults = engine_sampling(flags, source)

    def tokens_of(prompt: str) -> list[int]:
        return encode(flags, source, [prompt])[0]

    write_answers(flags, source, read_requests(flags.requests, source, tokens_of, defaults), say)


class Output:
    """Writes texts in order: the first that has not ended as it grows, the others after it."""

    def __init__(self, prompts: Sequence[str], streams: Sequence[TextStream]):
        self._prompts, self._streams = prompts, streams
        self._row = self._written = 0
        self._begun = len(prompts) == 1

    def show(self, ended: Sequence[bool]) -> None:
        """Write what is new."""
        while self._row < len(self._streams):
            text = self._streams[self._row].text
            if not self._begun:
                shown = repr(self._prompts[self._row][:60])
                sys.stdout.write(f"# {self._row + 1} of {len(self._prompts)}: {shown}\n")
                self._begun = True
            sys.stdout.write(text[self._written :])
            self._written = len(text)
            if not ended[self._row]:
                break
            sys.stdout.write("\n")
            self._row, self._written, self._begun = self._row + 1, 0, False
        sys.stdout.flush()


def write(generation: Generation, streams: Sequence[TextStream], output: Output) -> None:
    """Write the texts while they are generated."""
    for tokens in generation:
        for row, token in enumerate(tokens):
            if token is not None:
                streams[row].add(token)
                if streams[row].stopped:
                    generation.end(row)
                if generation.ended[row]:
                    streams[row].finish()
        output.show(generation.ended)
    for stream in streams:
        stream.finish()
    output.show([True] * len(streams))


def say(text: str) -> None:
    """Print a line to the standard error."""
    print(text, file=sys.stderr, flush=True)


def rate(name: str, tokens: int, seconds: float) -> str:
    """Return tokens, seconds and their ratio in words."""
    return (
        f"{name} {tokens} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):,.0f} a second)"
    )


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    flags = make_parser().parse_args(argv)
    if "" in flags.stop:  # Every text has it, at its start.
        raise UserError("--stop must have a character; got ''.")
    auto = {"auto": None}
    source = open_source(
        pathlib.Path(flags.source),
        auto.get(flags.dtype, flags.dtype),
        auto.get(flags.attention, flags.attention),
        flags.devices,
    )
    config = source.model.config
    size = sum(np.prod(x.shape) for x in jax.tree.leaves(nnx.state(source.model, nnx.Param)))
    device = jax.devices()[0].device_kind
    say(f"{source.name}: {size / 1e6:,.1f} M parameters, {config.compute_dtype}, {device}")
    if flags.requests is not None:
        answer_requests(flags, source)
        return
    if flags.out is not None:
        raise UserError("--out must come with --requests; got it alone.")
    if chats(flags, source):
        if flags.when_full != "stop" or flags.special_tokens:
            raise UserError("--when-full and --special-tokens must come with a prompt; got a chat.")
        converse(flags, source, engine.Sampling(**engine_sampling(flags, source)), say)
        return
    if flags.cache or flags.drafts or flags.draft or flags.batch_invariant:
        raise UserError(
            "--cache, --drafts, --draft and --batch-invariant must come with --requests, or with a "
            "chat."
        )
    prompts = read_prompts(flags)
    tokens = encode(flags, source, prompts)
    slides, longest = flags.when_full == "slide", max(map(len, tokens)) + flags.tokens - 1
    keep = count_before_prompt(flags, source, tokens) if slides else 0
    if slides and longest > config.context:
        say(
            f"beyond {config.context} tokens, a text goes on from its first {keep} and the newer "
            "half of the others"
        )
    too_large = (
        f"--tokens and the prompts must fit the device's memory; got {len(prompts)} texts of up to "
        f"{max(map(len, tokens))} + {flags.tokens} tokens: give fewer, or shorter ones."
    )
    with explained(too_large):
        generation = Generation(
            source.model,
            tokens,
            flags.tokens,
            make_sampling(flags, source),
            stop_tokens=source.tokens.stop_tokens,
            when_full=flags.when_full,
            keep=keep,
        )
        stops = [utf8(stop) for stop in flags.stop]
        streams = [TextStream(source.tokens.decode, x, stops) for x in tokens]
        write(generation, streams, Output(prompts, streams))
    for row in np.flatnonzero(generation.full):
        say(
            f"text {row + 1} of {len(tokens)} ended because it filled the context of "
            f"{config.context} tokens; --when-full slide lets it go on"
        )
    say(
        f"compiled in {generation.compile_seconds:.1f} s; {rate('read', *generation.prefill)}; "
        f"{rate('wrote', *generation.decode)}"
    )


if __name__ == "__main__":
    if sys.stdin is not None:
        # As it comes: no end of a line is translated.
        sys.stdin.reconfigure(encoding="utf-8", newline="")  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(main())
