"""Chat templates, which get the names and options that transformers gives them."""

import datetime
import functools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from models.errors import UserError, why

FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"
# The day that a template writes where the text must be the same at any time.
DAY = datetime.datetime(2024, 7, 26)
Message = Mapping[str, Any]


def find_templates(folder: pathlib.Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a folder by name.

    Files come before `settings`, the content of tokenizer_config.json.

    Raises:
        UserError: A template is no text.
    """
    paths = {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))}
    if (folder / FILE).exists():
        paths["default"] = folder / FILE
    try:
        if paths:
            return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    except (OSError, UnicodeError) as error:
        raise UserError(f"the chat templates of {folder} must be text; got {why(error)}.") from None
    given = settings.get("chat_template") or []
    given = [{"name": "default", "template": given}] if isinstance(given, str) else given
    try:
        templates = {entry["name"]: entry["template"] for entry in given}
        if all(isinstance(x, str) for pair in templates.items() for x in pair):
            return templates
    except (KeyError, TypeError):
        pass
    raise UserError(
        f"`chat_template` in tokenizer_config.json of {folder} must be text, or a list of names "
        f"and templates; got {given!r:.60}."
    )


class Chat:
    """The chat template of a folder.

    Args:
        templates: The templates by name, of which the default is rendered.
        settings: The content of tokenizer_config.json, with the names of the special tokens.
    """

    def __init__(self, templates: Mapping[str, str], settings: Mapping[str, Any]):
        self._templates = templates
        named = {
            name: x.get("content") if isinstance(x, dict) else x
            for name, x in settings.items()
            if name.endswith("_token")
        }
        # A token that is not there is no variable; add_bos_token is no token.
        self._special = {name: x for name, x in named.items() if isinstance(x, str)}

    def __call__(self, messages: Sequence[Message], prompt: bool = True, **variables) -> str:
        """Return the text of messages.

        Args:
            messages: The messages.
            prompt: Whether an answer is to follow.
            **variables: Other variables of the template.

        Raises:
            UserError: There is no default, or the template refuses the messages, or fails.
        """
        if "default" not in self._templates:
            raise UserError(
                "the folder must have a chat template named default; got "
                f"{', '.join(self._templates)}."
            )
        given = {"tools": None, "documents": None} | self._special | variables
        try:
            template = compile_template(self._templates["default"])
            return template.render(messages=messages, add_generation_prompt=prompt, **given)
        except UserError:
            raise
        # A template is a program: it may fail in any way.
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"the chat template must be one that jinja2 renders; got {said}."
            ) from None

    def answers(
        self, messages: Sequence[Message], marks: tuple[str, str], **variables
    ) -> tuple[str, list[tuple[int, int]], bool]:
        """Return the text of a conversation, and where its answers begin and end in it.

        The last result is whether the template changes the words of an answer.

        An answer is what `{% generation %}` marks, in a template that has it. Else it is what the
        text has more, up to the answer, than the prompt for it. An answer of "weight" 0 is left
        out.

        Args:
            messages: The messages.
            marks: Two characters that are in no message.
            **variables: Other variables of the template.

        Raises:
            UserError: As by a call; or the text of an answer is ambiguous.
        """
        numbers = [n for n, x in enumerate(messages) if x["role"] == "assistant"]
        carry = [n for n in numbers if messages[n].get("weight", 1)]
        variables["strftime_now"] = DAY.strftime
        text = self(messages, False, answer_marks=marks, **variables)
        text, *marked = re.split(f"[{''.join(marks)}]", text)
        spans = []
        for answer, between in zip(marked[::2], marked[1::2], strict=True):
            spans.append((len(text), len(text) + len(answer)))
            text += answer + between
        if len(spans) == len(numbers):
            spans = [span for span, n in zip(spans, numbers, strict=True) if n in carry]
        elif spans and carry != numbers:
            raise UserError(
                f'the chat template must mark each answer where one has the "weight" 0; got '
                f"{len(spans)} marks for {len(numbers)} answers."
            )
        for n in [] if marked else carry:
            before = self(messages[:n], **variables)
            with_answer = self(messages[: n + 1], False, **variables)
            if not with_answer.startswith(before):
                raise UserError(
                    f"the chat template must begin messages[{n}] with the prompt for it; got one "
                    "that begins otherwise: mark answers by {% generation %} in the template."
                )
            if not text.startswith(with_answer):
                raise UserError(
                    f"the chat template must leave messages[{n}] as it is when others follow; got "
                    'one that changes it, as if it left thinking out: put "weight": 0 into this '
                    "answer, and add a line that ends with it."
                )
            spans.append((len(before), len(with_answer)))
        changed = len(spans) == len(carry) and any(
            (messages[n].get(field) or "").strip() not in text[begin:end]
            for n, (begin, end) in zip(carry, spans, strict=True)
            for field in ("content", "reasoning_content")
        )
        return text, spans, changed


@functools.lru_cache
def compile_template(template: str):
    """Return the compiled template.

    Raises:
        UserError: The package jinja2 is missing.
    """
    try:
        import jinja2.ext
        import jinja2.sandbox
        from jinja2 import nodes
    except ModuleNotFoundError:
        raise UserError(
            "a chat template needs the package jinja2: run pip install -e '.[models]'."
        ) from None

    class Answer(jinja2.ext.Extension):
        """`{% generation %}`, around what the model has written: in a prompt, its own content."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a variable of instances

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_content", [nodes.ContextReference()])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _content(self, context, caller):
            begin, end = context.get("answer_marks", ("", ""))
            return begin + caller() + end

    def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def refuse(message):
        said = " ".join(str(message).split())
        raise UserError(f"the chat template must take the messages; got {said!r}.")

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Answer, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)
