"""Texts to tokens and back: bytes, tokenizer.json, chats, and text that is streamed."""

import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from models.chat import Chat, Message, find_templates
from models.errors import UserError, why

# A character that is not complete yet; tokens of a model may end inside of one.
INCOMPLETE = "\ufffd"
# Most tokens that wait for the end of a character.
WAITING = 64
# Tokens before the new ones that they are decoded with, because a tokenizer may write a token
# otherwise at the start of a text; and most tokens of a character.
BEFORE, LETTER = 5, 4
# Characters that no text has, by Unicode's rules.
NONCHARACTERS = [chr(n) for n in range(0xFDD0, 0xFDF0)]


class Bytes:
    """The tokens of models without a tokenizer: the bytes of a text."""

    stop_tokens: Sequence[int] = ()
    chat: None = None

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the tokens of a text, which has no special ones."""
        del special
        return list(text.encode(errors="surrogateescape"))

    def special_name(self, text: str) -> str | None:
        """Return None: there are no special tokens."""
        del text

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return bytes(tokens).decode(errors="replace")


def open_tokenizer(path: pathlib.Path):
    """Return the `tokenizers.Tokenizer` of a file, which neither cuts nor fills texts.

    Raises:
        UserError: There is no such file, it is damaged, or the package is missing.
    """
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise UserError(
            f"{path} needs the package tokenizers: run pip install -e '.[models]'."
        ) from None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself, not a subclass.
        raise UserError(
            f"{path} must be a tokenizer.json that the package tokenizers reads; got "
            f"{str(error).splitlines()[0]!r}."
        ) from None
    # A tokenizer that was saved while it made batches has their length in its file.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class FromFolder:
    """The tokens of a folder with tokenizer.json, and its chat template.

    The name of a special token in a text is text, unless the caller or a chat template says that it
    is the token.

    Args:
        path: The folder; or a tokenizer.json alone.

    Attributes:
        path: The tokenizer.json.
        stop_tokens: The tokens that end a text, by generation_config.json or config.json.
        chat: The chat template; None if the folder has none.
        vocab_size: One more than the largest token.

    Raises:
        UserError: There is no tokenizer.json, it is damaged, or a package is missing.
    """

    def __init__(self, path: pathlib.Path):
        folder = path if path.is_dir() else None
        self.path = path if folder is None else folder / "tokenizer.json"
        self._tokenizer = open_tokenizer(self.path)
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        tokens = self._tokenizer.get_added_tokens_decoder()
        self._special = {x.content: number for number, x in tokens.items() if x.special}
        names = sorted(filter(None, self._special), key=len, reverse=True)
        # Without a name it matches nothing.
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._cleaning: dict[str, Any] = {}
        generation, self.chat = {}, None
        if folder is not None:
            settings = read_json(folder / "tokenizer_config.json")
            generation = read_json(folder / "config.json")
            generation |= read_json(folder / "generation_config.json")
            if templates := find_templates(folder, settings):
                self.chat = Chat(templates, settings)
        end = generation.get("eos_token_id")
        self.stop_tokens = [end] if isinstance(end, int) else list(end or ())

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the tokens of a text to continue, with those that the tokenizer begins one with.

        Args:
            text: The text.
            special: Whether names of special tokens in the text are these tokens.
        """
        [(tokens, added)] = self._encoded([utf8(text)], special)
        # A tokenizer may end texts, too.
        while len(added) > 1 and added[-1]:
            del tokens[-1], added[-1]
        return tokens

    def documents(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Return the tokens of whole texts, with those that the tokenizer begins and ends one with.

        See `encode`.
        """
        return [tokens for tokens, _ in self._encoded(texts, special)]

    def encode_chat(self, prompt: str, system: str | None) -> list[int]:
        """Return the tokens of a chat, up to where the answer to the user's words begins."""
        assert self.chat is not None  # without a template nobody asks for a chat
        messages = [] if system is None else [{"role": "system", "content": utf8(system)}]
        messages.append({"role": "user", "content": utf8(prompt)})
        try:
            return self.encode_messages(messages)
        except UserError as error:
            raise UserError(f"{str(error).removesuffix('.')}, or pass --no-chat.") from None

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a chat, up to where the answer to its last message begins."""
        assert self.chat is not None
        if not isinstance(messages, list | tuple):
            raise UserError(f"`messages` must be a list of messages; got {messages!r:.60}.")
        for n, message in enumerate(messages):
            known = isinstance(message, Mapping)
            fields = [message.get(x) if known else None for x in ("role", "content")]
            if not all(isinstance(x, str) for x in fields):
                raise UserError(f"messages[{n}] must have a role and a text; got {message!r:.60}.")
        tokenizer, messages, _ = self._names_as_text(_map_texts(utf8, messages))
        # The template has the tokens that begin a text.
        return tokenizer.encode(self.chat(messages), add_special_tokens=False).ids

    def encode_answers(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], np.ndarray, list[str]]:
        """Return the tokens of a conversation, whether each is of an answer, and what is odd.

        See `Chat.answers`.
        """
        assert self.chat is not None
        tokenizer, (messages, tools), marks = self._names_as_text((messages, tools))
        text, spans, changed = self.chat.answers(messages, marks, tools=tools)
        encoded = tokenizer.encode(text, add_special_tokens=False)
        first, last = np.array(encoded.offsets, int).reshape(-1, 2).T
        answers, inside = np.zeros(len(first), bool), False
        for begin, end in spans:
            answers |= (begin < last) & (first < end)
            inside |= bool(((first < begin) & (begin < last) & (begin < end)).any())
        odd = {
            "have an answer whose words the template changes, as if it left thinking out": changed,
            "have an answer that begins inside of a token, which carries loss": inside,
            "have no stop token that carries loss, so that answers may not end": self.stop_tokens
            and not np.isin(np.array(encoded.ids)[answers], self.stop_tokens).any(),
        }
        return encoded.ids, answers, [what for what, there in odd.items() if there]

    def special_name(self, text: str) -> str | None:
        """Return the name of a special token that a text has as letters; None without one."""
        match = self._names.search(text)
        return match and match[0]

    def token(self, name: str) -> int | None:
        """Return the token of a name; None if there is none."""
        return self._tokenizer.token_to_id(name)

    @property
    def unknown(self) -> int | None:
        """The token of letters that the tokenizer does not know; None if it knows all."""
        return self._unknown and self.token(self._unknown)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _encoded(self, texts: Sequence[str], special: bool) -> list[tuple[list[int], list[int]]]:
        """Return the tokens of texts, and for each token whether the tokenizer has added it."""
        self._tokenizer.encode_special_tokens = not special
        encodings = self._tokenizer.encode_batch(list(texts))
        pairs = [(x.ids, x.special_tokens_mask) for x in encodings]
        for text, (tokens, added) in zip(texts, pairs, strict=True):
            if special:
                # A text of a chat template begins with these tokens by itself.
                begins = added.index(0) if 0 in added else 0
                if tokens[:begins] == tokens[begins : 2 * begins]:
                    del tokens[:begins], added[:begins]
                continue
            if not (names := self._names.findall(text)):
                continue
            letters = {token for token, mine in zip(tokens, added, strict=True) if not mine}
            # The token of unknown letters may come from other letters.
            names = {*names} - {self._unknown}
            if wrong := [name for name in names if self._special[name] in letters]:
                raise UserError(
                    f"the tokenizer must write a name as text; got {wrong[0]!r}, which is always "
                    "its special token: leave that name out."
                )
        return pairs

    def _names_as_text(self, messages):
        """Return what makes tokens of a chat, in which only the template writes special ones.

        Returns:
            The tokenizer, the messages for it, and two characters that are not in them.
        """
        texts = [*_texts(messages)]
        mark, begin, end = [x for x in NONCHARACTERS if not any(x in text for text in texts)][:3]
        tokenizer = self._tokenizer
        if any(map(self._names.search, texts)):
            # Refuses what `documents` refuses.
            self.documents(texts)
            messages = _map_texts(lambda text: self._break_names(text, mark), messages)
            tokenizer = self._without(mark)
        tokenizer.encode_special_tokens = False
        return tokenizer, messages, (begin, end)

    def _break_names(self, text: str, mark: str) -> str:
        """Return a text with a mark inside of each name of a special token."""
        while match := self._names.search(text):
            if len(match[0]) == 1:
                raise UserError(
                    f"a chat must not have {match[0]!r} in a message, which is a special token."
                )
            text = text[: match.start() + 1] + mark + text[match.start() + 1 :]
        return text

    def _without(self, mark: str):
        """Return the tokenizer that leaves a mark out, after it has found the special tokens."""
        if mark in self._cleaning:
            return self._cleaning[mark]
        fields = json.loads(self._tokenizer.to_str())
        for token in fields["added_tokens"]:
            token["normalized"] &= not token["special"]
        removed = {"type": "Replace", "pattern": {"String": mark}, "content": ""}
        steps = [removed, *filter(None, [fields["normalizer"]])]
        fields["normalizer"] = {"type": "Sequence", "normalizers": steps}
        self._cleaning[mark] = type(self._tokenizer).from_str(json.dumps(fields))
        return self._cleaning[mark]


def _map_texts(change: Callable[[str], str], x: Any) -> Any:
    """Return messages with other texts; roles and names of fields stay."""
    if isinstance(x, str):
        return change(x)
    if isinstance(x, Mapping):
        return {k: v if k == "role" else _map_texts(change, v) for k, v in x.items()}
    return [_map_texts(change, v) for v in x] if isinstance(x, list | tuple) else x


def _texts(x: Any) -> list[str]:
    """Return the texts of messages."""
    texts = []
    _map_texts(lambda text: texts.append(text) or text, x)
    return texts


def utf8(text: str) -> str:
    """Return a text with the letters of its bytes, which the locale may have kept from Python.

    Raises:
        UserError: The bytes are no letters.
    """
    try:
        return text.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise UserError(f"a text must be UTF-8; got {text[:40]!r}.") from None


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Return the fields of a JSON file; an absent file has none.

    Raises:
        UserError: The file is no JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path} must be readable; got {why(error)}.") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a JSON object; got other text.")
    return content


class TextStream:
    """The text of tokens that come one at a time, up to the first of several strings.

    Args:
        decode: Returns the text of tokens.
        prompt: The tokens before.
        stops: Strings that end the text.

    Attributes:
        text: The text so far, without what may yet become a character or a stop string.
        stopped: Whether a stop string has come.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str]
    ):
        self._decode, self._stops = decode, stops

        def damage(part):
            text = decode(prompt[slice(*part)])
            return text.endswith(INCOMPLETE), text.count(INCOMPLETE)

        # Some decoders show no letter of a run of bytes that begins or ends inside of one.
        size = len(prompt)
        parts = [
            (max(read - BEFORE - more, 0), read)
            for read in range(size, max(size - LETTER, -1), -1)
            for more in range(LETTER)
        ]
        first, read = min(parts, key=damage)
        self._tokens, self._read = list(prompt[first:]), read - first
        self._whole = decode(self._tokens[: self._read])
        # The part of the text of `_tokens` that has been shown: at first, the prompt.
        self._shown = self._text()
        self._held = self.text = ""
        self._waiting, self.stopped = 0, False

    def add(self, token: int) -> None:
        """Add a token."""
        self._tokens.append(token)
        text = self._text()
        whole = text.rstrip(INCOMPLETE)
        self._waiting = 0 if self._show(whole) else self._waiting + 1
        if whole != text and self._waiting < WAITING:
            return
        self._show(text)
        # The tokens to decode the next ones with have a text of their own.
        first = self._read if self._decode(self._tokens[self._read :]) else 0
        self._tokens, self._waiting = self._tokens[first:], 0
        self._read = len(self._tokens)
        self._whole = self._shown = self._decode(self._tokens)

    def finish(self) -> None:
        """Add what was held back."""
        if not self.stopped:
            self._show(self._text())
            self.text, self._held = self.text + self._held, ""

    def _text(self) -> str:
        """Return the text of the tokens, of which those that were read are whole characters."""
        text = self._decode(self._tokens)
        if text.startswith(self._whole.rstrip(INCOMPLETE)):
            return text
        # A run of bytes that ends inside of a character, or that is damaged.
        return self._whole + self._decode(self._tokens[self._read :])

    def _show(self, text: str) -> bool:
        """Show what is new in a text of the tokens; return whether there is something."""
        pairs = enumerate(zip(text, self._shown, strict=False))
        known = next((n for n, (a, b) in pairs if a != b), min(len(text), len(self._shown)))
        if new := text[known:]:
            self._shown = text
            self._take(new)
        return bool(new)

    def _take(self, new: str) -> None:
        self._held += new
        ends = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.text, self._held, self.stopped = self.text + self._held[: min(ends)], "", True
            return
        held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - held
        self.text, self._held = self.text + self._held[:cut], self._held[cut:]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that begins a stop string."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
