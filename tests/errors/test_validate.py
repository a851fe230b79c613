"""Every error that a call of `attention` can meet is in a table: no `raise` without a row.

The tables are those of test_validate_*.py.
"""

import ast
import importlib
import pathlib
import re

import jax
from support.calls import NEWER, refusal
from support.repository import assert_none, nodes

import pallas_flash

FILES = sorted(pathlib.Path(__file__).parent.glob("test_validate_*.py"))
TABLES = [importlib.import_module(file.stem) for file in FILES]
# One file has calls that are served, and no table.
ROWS = [row for table in TABLES for row in getattr(table, "ROWS", ())]


def test_ids_are_unique():
    ids = [row.id for row in ROWS]
    assert sorted(set(ids)) == sorted(ids)


# These have public calls of their own, and tests of their own.
OTHERS = {"_call/tune.py", "_call/tune_command.py", "_selection/tuned.py", "_call/plot.py"}
PACKAGE = pathlib.Path(pallas_flash.__file__).parent
MODULES = [
    path
    for path in PACKAGE.rglob("*.py")
    if str(path.relative_to(PACKAGE)) not in OTHERS
    and path.parent.name not in ("flax", "partition")
    and (NEWER or path.parent.name != "mosaic")
    # Before 0.12 JAX transposes the largest scores.
    and (jax.__version_info__ >= (0, 12) or path.name != "linear_map.py")
]


def is_sentence(node):
    """Whether a statement raises a sentence for users: not a caught error, nor a private one."""
    return isinstance(node, ast.Raise) and not re.match(r"(_\w+\(.*|error)$", ast.unparse(node.exc))


def test_every_raise_has_a_row():
    written = {
        (path, node.lineno): range(node.lineno, node.end_lineno + 1)
        for path in MODULES
        for node in nodes(path)
        if is_sentence(node)
    }
    reached = set()
    for row in ROWS:
        error = refusal(row)
        while error:
            traceback = error.__traceback__
            while traceback.tb_next:
                traceback = traceback.tb_next
            file = pathlib.Path(traceback.tb_frame.f_code.co_filename)
            reached.add((file, traceback.tb_lineno))
            error = error.__cause__
    assert len(written) > 20
    assert_none(
        f"{file}:{line}"
        for (file, line), lines in written.items()
        if not any((file, hit) in reached for hit in lines)
    )
