"""Chat templates, which get the names and options that transformers gives them."""

import datetime
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from scripts.command import UserError, why

FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"


def find_template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    """Return the default chat template of a folder; None if it has no template.

    Files come before `settings`, the content of tokenizer_config.json.

    Raises:
        UserError: None of several templates is the default, or a file is no text.
    """
    paths = {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))}
    if (folder / FILE).exists():
        paths["default"] = folder / FILE
    templates = settings.get("chat_template")
    if isinstance(templates, list):
        templates = {entry["name"]: entry["template"] for entry in templates}
    try:
        if paths:
            templates = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    except (OSError, UnicodeError) as error:
        raise UserError(f"the chat templates of {folder} must be text; got {why(error)}.") from None
    if not templates or isinstance(templates, str):
        return templates or None
    if "default" not in templates:
        raise UserError(
            f"{folder} must have a chat template named default; got {', '.join(templates)}."
        )
    return templates["default"]


def render(template: str, settings: Mapping[str, Any], prompt: str, system: str | None) -> str:
    """Return the text of a chat, up to where the model's answer begins.

    Args:
        template: The template.
        settings: The content of tokenizer_config.json, with the names of the special tokens.
        prompt: The user's words.
        system: The system's words; None for none.

    Raises:
        UserError: The template refuses the prompt, or fails.
    """
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    named = {
        name: x.get("content") if isinstance(x, dict) else x
        for name, x in settings.items()
        if name.endswith("_token")
    }
    # A token that is not there is no variable; add_bos_token is no token.
    special = {name: x for name, x in named.items() if isinstance(x, str)}
    try:
        return compile_template(template).render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **special
        )
    except UserError:
        raise
    # A template is a program: it may fail in any way.
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"the chat template must be one that jinja2 renders; got {said}: pass --no-chat."
        ) from None


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
            "a chat template needs the package jinja2: run pip install -e '.[models]', or pass "
            "--no-chat."
        ) from None

    class Answer(jinja2.ext.Extension):
        """`{% generation %}`, around what the model has written: in a prompt, its own content."""

        tags = frozenset({"generation"})

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller):
            return caller()

    def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def refuse(message):
        said = " ".join(str(message).split())
        raise UserError(f"the chat template must take the prompt; got {said!r}.")

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Answer, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)
