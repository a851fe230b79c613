"""Texts to tokens and back: bytes, tokenizer.json, chat templates, and text that is streamed."""

import contextlib
import datetime
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from scripts.command import UserError, why

# A character that is not complete yet; tokens of a model may end inside of one.
INCOMPLETE = "\ufffd"
# Most tokens that wait for the end of a character, and tokens before them that they are decoded
# with, because a tokenizer may write a token otherwise at the start of a text.
WAITING, BEFORE = 8, 5


class Bytes:
    """The tokens of runs of `train_gpt.py`: the bytes of a text."""

    stop_tokens: Sequence[int] = ()
    chat: Callable[[str, str | None], str] | None = None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(text.encode(errors="surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return bytes(tokens).decode(errors="replace")


def open_tokenizer(path: pathlib.Path):
    """Return the `tokenizers.Tokenizer` of a file.

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
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself, not a subclass.
        raise UserError(
            f"{path.parent} must have a {path.name} that the package tokenizers reads; got "
            f"{str(error).splitlines()[0]!r}."
        ) from None


class FromFolder:
    """The tokens of a folder with tokenizer.json, and its chat template.

    Args:
        folder: The folder.

    Attributes:
        stop_tokens: The tokens that end a text, by generation_config.json or config.json.
        chat: Returns the text of a chat from the user's words and the system's; None if the folder
            has no template.

    Raises:
        UserError: There is no tokenizer.json, it is damaged, or a package is missing.
    """

    def __init__(self, folder: pathlib.Path):
        self._tokenizer = open_tokenizer(folder / "tokenizer.json")
        self._settings = read_json(folder / "tokenizer_config.json")
        generation = read_json(folder / "generation_config.json")
        end = generation.get("eos_token_id", read_json(folder / "config.json").get("eos_token_id"))
        self.stop_tokens = [end] if isinstance(end, int) else list(end or ())
        template = self._template(folder)
        self.chat = None if template is None else self._chat(template)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text, with the special ones that begin one if asked for."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"--prompt must be UTF-8; got {text[:40]!r}.") from None
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _template(self, folder: pathlib.Path) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return (folder / "chat_template.jinja").read_text()
        found = self._settings.get("chat_template")
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}.get("default")
        return found

    def _chat(self, template: str) -> Callable[[str, str | None], str]:
        try:
            import jinja2.sandbox
        except ModuleNotFoundError:
            raise UserError(
                "a chat template needs the package jinja2: run pip install -e '.[models]', or pass "
                "--no-chat."
            ) from None

        def refuse(message):
            raise UserError(f"the chat template must take the prompt; got {message!r}.")

        # The options and names that templates of the hub are written for.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda x, **options: json.dumps(
            x, ensure_ascii=False, **options
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

        def text_of(token: Any) -> str:
            return token.get("content", "") if isinstance(token, dict) else token or ""

        special = {
            name: text_of(x) for name, x in self._settings.items() if name.endswith("_token")
        }

        def render(prompt: str, system: str | None) -> str:
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": prompt})
            try:
                return environment.from_string(template).render(
                    messages=messages, add_generation_prompt=True, **special
                )
            except jinja2.TemplateError as error:
                raise UserError(
                    f"the chat template must be one that jinja2 renders; got {error}: pass "
                    "--no-chat."
                ) from None

        return render


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Return the fields of a JSON file; an absent file has none.

    Raises:
        UserError: The file is no JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeError) as error:
        raise UserError(f"{path} must be readable; got {why(error)}.") from None
    except ValueError:
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
        self._tokens = list(prompt[-BEFORE:])
        self._first, self._read = 0, len(self._tokens)
        self._held = self.text = ""
        self.stopped = False

    def add(self, token: int) -> None:
        """Add a token."""
        self._tokens.append(token)
        new = self._new()
        if not new.endswith(INCOMPLETE) or len(self._tokens) - self._read >= WAITING:
            self._take(new)

    def finish(self) -> None:
        """Add what was held back."""
        if not self.stopped:
            self._take(self._new())
            self.text, self._held = self.text + self._held, ""

    def _new(self) -> str:
        before = self._decode(self._tokens[self._first : self._read])
        return self._decode(self._tokens[self._first :])[len(before) :]

    def _take(self, new: str) -> None:
        self._first, self._read = self._read, len(self._tokens)
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
