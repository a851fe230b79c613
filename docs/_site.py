"""What mkdocs must be told so that the pages read well in the repository and on the site.

The README is not on the site. Pages link to files outside of docs/, which on the site
are pages that show them, below `source/`; no address of a repository is needed.

Formulas stand between dollar signs, as repositories show them. On the site they are MathML, which
browsers draw without a script.
"""

import html
import os
import posixpath
import re
from pathlib import Path

from griffe import Extension
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
# The HTML that pymdownx.arithmatex makes of dollar signs.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def linked(page: str, link: str) -> Path | None:
    """Return the file outside of docs/ that a link of a page leads to; None if it leads to none."""
    path = Path(os.path.normpath(DOCS / posixpath.dirname(page) / link))
    if path.is_dir():
        path /= "__init__.py"
    return path if path.is_file() and not path.is_relative_to(DOCS) else None


def uri(path: Path) -> str:
    """Return the path, on the site, of the page that shows a file."""
    return f"source/{path.relative_to(ROOT).as_posix()}.md"


def shown(path: Path) -> str:
    """Return the page that shows a file as it is; the search leaves it out."""
    name, language = path.relative_to(ROOT).as_posix(), path.suffix.removeprefix(".")
    fence = "`" * 5
    head = f"---\nsearch:\n  exclude: true\n---\n# {name}\n"
    text = path.read_text(encoding="utf-8")
    return f"{head}\n{fence}{language}\n{text}\n{fence}\n"


def on_files(files, config):
    """Add a page for each file that the pages link to."""
    pages = [file for file in files if file.src_uri.endswith(".md")]
    found = {
        linked(file.src_uri, link) for file in pages for link in LINK.findall(file.content_string)
    }
    for path in sorted(found - {None}):
        files.append(File.generated(config, uri(path), content=shown(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links to files outside of docs/ to the pages that show them."""
    here = page.file.src_uri
    if here.startswith("notes/"):  # The search answers with what is, not with what was.
        page.meta["search"] = {"exclude": True}
    if here.startswith("source/"):
        return markdown

    def turned(link):
        path = linked(here, link[1])
        return posixpath.relpath(uri(path), posixpath.dirname(here)) if path else link[1]

    return LINK.sub(turned, markdown)


def mathml(latex: str, display: str) -> str:
    """Return a formula as MathML; raise where a part of it is not known."""
    # The converter has the environment, but under the name that it has inside of an equation.
    found = convert(latex.replace("{aligned}", "{split}"), display=display)
    if "\\" in found or "<mi>&</mi>" in found:
        raise PluginError(f"latex2mathml does not know all of this formula: {latex}")
    return found


def on_page_content(content, page, config, files):
    """Turn formulas to MathML."""

    def turned(formula):
        display = "block" if formula[1] == "div" else "inline"
        return mathml(html.unescape(formula[2]).strip(), display)

    return FORMULA.sub(turned, content)


# Attributes that users do not set, in a docstring.
INTERNAL = re.compile(r"^ +\w+: set by `attention`.*\n?(?:^ {8}.*\n?)*", re.M)


class Docstrings(Extension):
    """Show sections "Example:" of docstrings as code, and no attributes that users do not set."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            text = INTERNAL.sub("", obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.M)
