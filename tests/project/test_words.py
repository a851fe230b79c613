"""Comments and docstrings outside of the tests use the words of docs/glossary.md."""

import ast
import io
import re
import tokenize

from support.repository import MODULES, assert_none, nodes, read

# Beginnings of a sentence that has no subject.
BEGINNINGS = re.compile(r"(?:^|[.?!] +)(That of|Those|What|Who|Of|So many|Likewise)\b")
# Words that the glossary replaces: here stands what not to write, there what to write.
REPLACED = re.compile(
    r"in place of|for want of|by turns|None takes|head size|few queries|few programs|likewise"
    r"|(?<!for )\bexamples?\b(?!:)|\b(?:un)?seen\b|\bcores?\b"
    r"|\b(?:alive|reflexive|zigzag|worklists?|those of|that of|so many)\b"
)


def texts(path):
    """Yield (line, text) of each docstring, and of each run of comments."""
    for node in nodes(path):
        kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
            prose = docstring.split("Example:\n")
            code = re.compile(r"^ *(?:>>>|\.\.\.).*$|`[^`]*`", re.M)
            yield getattr(node, "lineno", 1), code.sub("x", "Example:\n".join(prose))
    run, last = [], 0
    for token in tokenize.generate_tokens(io.StringIO(read(path)).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if run and line != last + 1:
                yield last, " ".join(run)
                run = []
            run.append(re.sub(r"`[^`]*`", "x", token.string.lstrip("# ")))
            last = line
    if run:
        yield last, " ".join(run)


def test_words_of_comments_and_docstrings():
    assert_none(
        f"{name}:{line}: {match[0].strip()}"
        for name, path in MODULES.items()
        if not name.startswith("tests")
        for line, prose in texts(path)
        for paragraph in re.split(r"\n *\n", prose)
        for pattern in (BEGINNINGS, REPLACED)
        for match in pattern.finditer(" ".join(paragraph.split()))
    )
