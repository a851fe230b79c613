"""Chat templates, which get the names and options that transformers gives them."""

import datetime
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from models.errors import UserError, why

FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"


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


def render(
    templates: Mapping[str, str], settings: Mapping[str, Any], prompt: str, system: str | None
) -> str:
    """Return the text of a chat, up to where the model's answer begins.

    Args:
        templates: The templates by name, of which the default is rendered.
        settings: The content of tokenizer_config.json, with the names of the special tokens.
        prompt: The user's words.
        system: The system's words; None for none.

    Raises:
        UserError: There is no default, or the template refuses the prompt, or fails.
    """
    if "default" not in templates:
        raise UserError(
            f"the folder must have a chat template named default; got {', '.join(templates)}: pass "
            "--no-chat."
        )
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
        return compile_template(templates["default"]).render(
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

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a variable of instances

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
