"""`generate.py` in a terminal: a chat, of which each turn reads the new words alone."""

import argparse
import sys
from collections.abc import Callable

from models.engine import Engine, Sampling
from models.tokens import FromFolder
from scripts.command import UserError
from scripts.generation.requests import TOO_LARGE, make_engine
from scripts.generation.source import Source, explained

# Most tokens of a chat: the longest contexts would take memory that few chats need.
MOST = 16384


def converse(
    flags: argparse.Namespace, source: Source, sampling: Sampling, say: Callable[[str], None]
) -> None:
    """Answer each line of a terminal, until its end.

    Ctrl-C ends an answer, of which the chat keeps what is written.

    Raises:
        UserError: The model does not fit the memory, or the chat no longer fits the context.
    """
    say("a chat: Ctrl-C ends an answer, Ctrl-D the chat")
    assert isinstance(source.tokens, FromFolder)  # Others have no template.
    messages = [] if flags.system is None else [{"role": "system", "content": flags.system}]
    with explained(TOO_LARGE):
        engine = make_engine(flags, source, [MOST], slots=1)
        while True:
            print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                return
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line.rstrip("\r\n")})
            tokens = source.tokens.encode_messages(messages)
            if len(tokens) > engine.max_length:
                raise UserError(
                    f"a chat must have at most {engine.max_length} tokens; got {len(tokens)}: "
                    "begin a new one."
                )
            # The engine still has the pages of the turns before.
            id = engine.submit(tokens, sampling)
            messages.append({"role": "assistant", "content": _write(engine, id)})


def _write(engine: Engine, id: int) -> str:
    """Write an answer as it grows, and return it."""
    text = ""
    while engine.busy:
        try:
            changed = engine.step()
        except KeyboardInterrupt:
            engine.cancel(id)
            continue
        for answer in changed:
            sys.stdout.write(answer.text[len(text) :])
            sys.stdout.flush()
            text = answer.text
    sys.stdout.write("\n")
    return text
