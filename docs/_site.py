"""What mkdocs must be told so that the pages read well in the repository and on the site.

The first page of the site is the README. Pages link to files outside of docs/, which on the site
are pages that show them, below `source/`; no address of a repository is needed.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")


def linked(page: str, link: str) -> Path | None:
    """The file outside of docs/ that a page of docs/ links to, or None."""
    path = Path(os.path.normpath(DOCS / posixpath.dirname(page) / link))
    if path.is_dir():
        path /= "__init__.py"
    return path if path.is_file() and not path.is_relative_to(DOCS) else None


def uri(path: Path) -> str:
    """Of the page that shows a file."""
    return f"source/{path.relative_to(ROOT).as_posix()}.md"


def shown(path: Path) -> str:
    """That page: the file as it is, left out of the search."""
    name, language = path.relative_to(ROOT).as_posix(), path.suffix.removeprefix(".")
    fence = "`" * 5
    head = f"---\nsearch:\n  exclude: true\n---\n# {name}\n"
    return f"{head}\n{fence}{language}\n{path.read_text()}\n{fence}\n"


def on_files(files, config):
    """Adds the README, and the files that pages link to."""
    readme = LINK.sub(
        lambda link: posixpath.relpath(link[1], "docs"), (ROOT / "README.md").read_text()
    )
    files.append(File.generated(config, "index.md", content=readme))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    found = {
        linked(file.src_uri, link) for file in pages for link in LINK.findall(file.content_string)
    }
    for path in sorted(found - {None}):
        files.append(File.generated(config, uri(path), content=shown(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turns links to files outside of docs/ to the pages that show them."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown

    def turned(link):
        path = linked(here, link[1])
        return posixpath.relpath(uri(path), posixpath.dirname(here)) if path else link[1]

    return LINK.sub(turned, markdown)
