"""Conversations to tune on: a file of lines with messages, of which answers alone carry loss.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}

The chat template of the weights writes each; see `models/chat.py` for what an answer is. A line may
have "tools", too, which the template gets. An answer of "weight" 0 carries no loss.

Several conversations are packed into a row of one token more than the context. They do not see each
other, and positions start again in each. A conversation that is longer than a row is cut at its
end. About a tenth of the conversations is held out, chosen by a hash.
"""

import bisect
import collections
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from models.errors import UserError, why
from models.tokens import FromFolder
from models.training.settings import TrainConfig
from models.training.text import Batch, Text, split_files

ROLES = ("system", "user", "assistant", "tool")
# Fields of a message that are read here, or that templates are known to read.
KNOWN = {"role", "content", "weight", "name", "tool_calls", "tool_call_id"}
# Where packed documents may begin in batch-invariant attention.
ALIGNED = 128


class Rows(NamedTuple):
    """Packed conversations; the last row is empty, and its number is -1.

    Attributes:
        tokens: The tokens, [rows, context + 1].
        documents: The number of each token's conversation in its row; padding has one, too.
        answers: Whether each carries loss.
    """

    tokens: np.ndarray
    documents: np.ndarray
    answers: np.ndarray

    def draw(self, step: int, config: TrainConfig) -> np.ndarray:
        """Return the next rows; every row comes once before any comes again, in another order."""
        numbers = np.arange(config.batch_size) + (step - 1) * config.batch_size
        rounds, places = np.divmod(numbers, len(self.tokens) - 1)
        orders = {
            n: np.random.default_rng([config.seed, n]).permutation(len(self.tokens) - 1)
            for n in set(rounds.tolist())
        }
        return np.array([orders[n][i] for n, i in zip(rounds.tolist(), places, strict=True)])

    def spread(self, config: TrainConfig) -> np.ndarray:
        """Return all rows, and empty ones up to whole batches; or rows spread evenly over them."""
        count = len(self.tokens) - 1
        batches = min(-(-count // config.batch_size), config.eval_batches)
        numbers = np.full(batches * config.batch_size, -1)
        numbers[:count] = np.linspace(0, count - 1, min(count, len(numbers))).astype(int)
        return numbers

    def readers(self, context: int) -> Batch:
        """Read the first tokens of rows."""

        def read(array):
            return lambda rows: array[rows, : context + 1]

        return Batch(*map(read, self))


def pack(conversations: Sequence[np.ndarray], length: int, aligned: int = 1) -> Rows:
    """Pack conversations, [tokens, 2], into rows, the longest first, each where it just fits.

    Each begins at a multiple of `aligned`, and padding has the number of the one before it.
    """
    rows, free = [], []
    padding = [min(-len(x) % aligned, length - len(x)) for x in conversations]
    padded = (np.pad(x, ((0, n), (0, 0))) for x, n in zip(conversations, padding, strict=True))
    for conversation in sorted(padded, key=len, reverse=True):
        at = bisect.bisect_left(free, (len(conversation), -1))
        room, row = free.pop(at) if at < len(free) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(conversation)
        bisect.insort(free, (room - len(conversation), row))
    tokens, documents, answers = (
        np.zeros((len(rows) + 1, length), dtype) for dtype in (np.int32, np.int32, bool)
    )
    for row, parts in enumerate(rows):
        whole = np.concatenate(parts)
        tokens[row, : len(whole)], answers[row, : len(whole)] = whole.T
        documents[row] = len(parts)
        documents[row, : len(whole)] = np.repeat(np.arange(len(parts)), [len(x) for x in parts])
    return Rows(tokens, documents, answers)


def read_line(line: bytes) -> tuple[list[dict[str, Any]], Any, list[str]]:
    """Return the messages and the tools of a line, and the names of fields that others may read.

    Raises:
        UserError: It is no conversation; the message says what it is, in a few words.
    """
    try:
        content = json.loads(line.decode("utf-8-sig"))
        json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise UserError("no JSON in UTF-8") from None
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UserError("no list of messages")
    tools, others = content.get("tools"), content.keys() - {"messages", "tools"}
    if not (tools is None or isinstance(tools, list)):
        raise UserError(f"a {type(tools).__name__} as tools")
    for n, message in enumerate(messages):
        where = f"messages[{n}]"
        if not isinstance(message, dict):
            raise UserError(f"a {type(message).__name__} as {where}")
        if (role := message.get("role")) not in ROLES:
            raise UserError(f"{role!r:.40} as the role of {where}, which is none of {ROLES}")
        text, calls = message.get("content"), message.get("tool_calls")
        if not (isinstance(text, str) or (text is None and calls)):
            raise UserError(f"a {type(text).__name__} as the content of {where}")
        weight = message.get("weight", 1)
        if weight not in (0, 1) or ("weight" in message and role != "assistant"):
            raise UserError(
                f"{weight!r:.40} as the weight of {where}, which is 0 or 1 of an answer"
            )
        others |= {f"{name} of a message" for name in message.keys() - KNOWN}
        if role == "assistant" and weight and not calls and not (text or "").strip():
            raise UserError(f"an empty answer as {where}")
    if not any(x["role"] == "assistant" and x.get("weight", 1) for x in messages):
        raise UserError("no answer that carries loss")
    return messages, tools, sorted(others)


def load_conversations(config: TrainConfig) -> Text:
    """Return the conversations of a file in tokens of the weights, packed.

    Raises:
        UserError: The file, a line of it, the tokenizer or the template does not serve.
    """
    path, words = Path(config.conversations or ""), FromFolder(config.weights)
    if words.chat is None:
        raise UserError(
            f"`init_from` must have a chat template for `conversations`; got {config.init_from!r} "
            "without one: take weights that were tuned on chats."
        )
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(
            f"`conversations` must be a file; got {str(path)!r}: {why(error)}."
        ) from None
    length = config.context + 1
    conversations: dict[bytes, list[np.ndarray]] = {}
    notes, other = collections.defaultdict(list), set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            messages, tools, names = read_line(line)
        except UserError as error:
            raise UserError(
                '`conversations` must have lines like {"messages": [{"role": "user", "content": '
                f'"..."}}, ...]}}; got {error} in line {number} of {str(path)!r}.'
            ) from None
        try:
            tokens, answers, odd = words.encode_answers(messages, tools)
        except UserError as error:
            raise UserError(f"line {number} of {str(path)!r}: {error}") from None
        conversation = np.stack([tokens, answers], 1).astype(np.int32)
        conversation[0, 1] = 0  # nothing predicts the first token
        if len(conversation) > length:
            odd.append(f"are longer than {length:,} tokens, and were cut there")
        if conversation[:length, 1].any():
            conversations.setdefault(line, []).append(conversation[:length])
        else:
            odd.append("were left out, because no answer begins in these tokens")
        for note in odd:
            notes[note].append(number)
        other.update(names)
    if len(conversations) < 2:
        raise UserError(
            "`conversations` must be at least two, not equal, with an answer in their first "
            f"{length} tokens, of which one is held out; got {len(conversations)} in {str(path)!r}."
        )
    # Equal lines are on one side.
    split = split_files([(x, np.concatenate(y)) for x, y in conversations.items()])
    sides = [[x for line, _ in side for x in conversations[line]] for side in split]
    aligned = ALIGNED if config.batch_invariant else 1
    train, held_out = (pack(side, length, aligned) for side in sides)
    passes = config.steps * config.batch_size / (len(train.tokens) - 1)
    said = [
        counts_of(sides[0], train, "to train on"),
        counts_of(sides[1], held_out, "held out"),
        f"{config.steps:,} updates of {config.batch_size:,} rows are {passes:,.1f} passes",
    ]
    said += [f"{len(x):,} {note} (the first is line {x[0]})" for note, x in notes.items()]
    if other:
        said.append(f"fields that only the template may read: {', '.join(sorted(other))}")
    arrays = [x for side in (train, held_out) for x in side]
    largest = max(int(x.max()) for x in arrays)
    digest = hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()
    return Text(train, held_out, largest + 1, digest, said)


def counts_of(conversations: Sequence[np.ndarray], rows: Rows, purpose: str) -> str:
    """Return how many conversations and tokens there are, and how many carry loss."""
    size, carry = sum(map(len, conversations)), int(rows.answers.sum())
    return (
        f"{len(conversations):,} conversations {purpose}: {size:,} tokens, of which {carry:,} "
        f"({carry / size:.1%}) carry loss, in {len(rows.tokens) - 1:,} rows"
    )
