"""The default selection has every value of every parameter; the gate has what its list names."""

import itertools
import pathlib
import re
import shutil
import sys
import types

import pytest
from support import cases, children, selection

from scripts.maintenance.faults.listed import Fault


class Item:
    """A test called with `values`, by one `parametrize` for each of `names`."""

    def __init__(self, names, values):
        self._names = names
        self.callspec = types.SimpleNamespace(params=dict(values))

    def iter_markers(self, _):
        return iter([pytest.mark.parametrize(names, []).mark for names in self._names])


def kept(names, rows):
    items = [Item(names, row) for row in rows]
    needless = selection.needless(items)
    return [tuple(item.callspec.params.values()) for item in items if item not in needless]


def test_of_two_by_four_combinations_four_remain_with_all_six_values():
    rows = [dict(a=a, b=b) for a, b in itertools.product("xy", range(4))]
    found = kept(["a", "b"], rows)
    assert sorted(b for _, b in found) == [0, 1, 2, 3]
    assert sorted(a for a, _ in found) == ["x", "x", "y", "y"]


@pytest.mark.parametrize("names", ["a, b", ("a", "b")])
def test_a_row_of_a_table_is_one_value(names):
    rows = [dict(a=a, b=b) for a, b in [(1, 1), (1, 2), (2, 2), (2, 1)]]
    assert len(kept([names], rows)) == 4


def test_what_has_no_parameters_is_needed():
    assert kept([], [{}]) == [()]


def test_a_value_that_is_there_twice_is_one():
    x = object()
    assert len(kept(["a"], [dict(a=x), dict(a=x)])) == 1


def test_the_tests_of_a_case_stand_together():
    """In the order of the first of each, file by file."""

    def item(path, **params):
        return types.SimpleNamespace(path=path, callspec=types.SimpleNamespace(params=params))

    one, two, plain = object(), object(), types.SimpleNamespace(path="a")
    items = [item("a", case=one), plain, item("a", case=two), item("a", case=one, x=1)]
    other = item("b", case=one)
    assert selection.by_case([*items, other]) == [items[0], items[3], plain, items[2], other]


@pytest.mark.parametrize("command", ["run", "nightly"])
def test_test_files_that_ci_names_exist(command):
    tests = pathlib.Path(__file__).parents[1]
    names = re.findall(r"\btest_[\w*]+", (tests.parent / ".ci" / command).read_text())
    assert names
    assert [name for name in names if not [*tests.glob(f"*/{name}.py")]] == []


# ------------------------------------------------------------------------------------------------
# The gate.

T, P, S, M = "tests", "pallas_flash", "scripts", "models"
LISTED = f"""# A comment.
{T}/a/test_a.py::x
{T}/a/test_a.py::gone
{T}/a/test_old.py::y
{T}/masks/test_masks.py::skipped_on_this_jax
"""
NAMES = [f"{T}/a/test_a.py::x", f"{T}/a/test_a.py::z", f"{T}/a/test_new.py::n"]


def test_the_gate_has_listed_items_and_new_files():
    items = [types.SimpleNamespace(nodeid=name) for name in NAMES]
    # Three are not there; the file of one may be skipped.
    assert selection.of_gate(items, LISTED) == ([items[0], items[2]], 2)


FAULTS = [
    Fault("1", f"{P}/a/x.py", "", "", ("test_masks.py", "test_paged.py")),
    Fault("2", f"{P}/b/y.py", "", "", ("test_xla.py",)),
    Fault("3", f"{S}/y.py", "", "", ("test_bench.py",)),
]
TOUCHED = [
    (None, ["tests/"]),
    ([], []),
    ([f"{T}/a/test_a.py", ".ci/gate-items.txt"], [f"{T}/a/test_a.py"]),
    (["docs/code.md", "README.md", ".ci/run"], ["tests/project/"]),
    (["docs/hopper_steps/step1_plain.py"], ["tests/mosaic/test_hopper_steps.py", "tests/project/"]),
    ([f"{P}/a/new.py"], ["tests/masks/", "tests/paged/"]),
    ([f"{P}/b/y.py", f"{S}/new/z.py"], ["tests/commands/", "tests/xla/"]),
    ([f"{P}/new.py"], ["tests/masks/", "tests/paged/", "tests/xla/"]),
    # Unsure.
    ([f"{M}/x.py"], ["tests/"]),
    (["pyproject.toml"], ["tests/"]),
    ([f"{T}/conftest.py", f"{P}/b/y.py"], ["tests/"]),
    ([f"{T}/support/cases.py"], ["tests/"]),
]


@pytest.mark.parametrize(("files", "expected"), TOUCHED)
def test_tests_of_changed_files(files, expected):
    assert selection.touched(files, FAULTS) == expected


@pytest.mark.parametrize(
    ("base", "variable", "head", "expected"),
    [
        ("", "", "a", "m...HEAD"),
        ("", "", "m", "HEAD~1...HEAD"),
        ("", "v", "a", "v...HEAD"),
        ("b", "v", "a", "b...HEAD"),
    ],
)
def test_changes_are_those_since_the_branch_began(monkeypatch, base, variable, head, expected):
    answers = {"rev-parse": [head], "merge-base": ["m"], "diff": ["x"], "ls-files": ["u"]}
    asked = []
    monkeypatch.setenv("GATE_BASE", variable)
    monkeypatch.setattr(selection, "_git", lambda *x: asked.append(x[-1]) or answers[x[0]])
    assert selection.changed_files(base) == ["u", "x"]
    assert expected in asked and "HEAD" in asked
    answers["diff"] = None
    assert selection.changed_files(base) is None


# Arguments, and which of three tests run: one listed, one not listed, one extended.
SELECTED = [
    (["-n", "1", "-p", "xdist"], ["listed"]),
    ([], ["listed"]),
    (["tests"], ["listed", "other"]),
    (["-k", "test"], ["listed", "other"]),
    (["-m", "default"], ["listed", "other"]),
    (["-m", "gate", "tests"], ["listed"]),
    (["-m", "extended"], ["extended"]),
    # There is no git, so all may have changed.
    (["--changed"], ["other"]),
    (["-n", "1", "-p", "xdist", "--changed"], ["other"]),
    (["--changed=x", "tests"], []),
]


@pytest.mark.parametrize(("arguments", "expected"), cases.default(SELECTED[:1], SELECTED))
def test_what_pytest_runs(tmp_path, monkeypatch, arguments, expected):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntestpaths = ['tests']\n")
    tests, here = tmp_path / "tests", pathlib.Path(__file__).parents[1]
    (tests / "support").mkdir(parents=True)
    for name in ("conftest.py", *(f"support/{x}.py" for x in ("selection", "budget", "children"))):
        shutil.copy(here / name, tests / name)
    (tmp_path / ".ci").mkdir()
    listed = [f"{T}/test_a.py::test_listed", f"{T}/test_a.py::test_gone"]
    (tmp_path / ".ci" / "gate-items.txt").write_text("\n".join(listed))
    (tests / "test_a.py").write_text(
        "import pytest\ndef test_listed(): pass\ndef test_other(): pass\n"
        "@pytest.mark.extended\ndef test_extended(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
    ran = children.run(
        command, cwd=tmp_path, stdout=children.PIPE, stderr=children.STDOUT, encoding="utf-8"
    )
    found = re.findall(r"PASSED.*?::test_(\w+)|::test_(\w+) PASSED", ran.stdout)
    assert sorted(filter(None, itertools.chain(*found))) == sorted(expected), ran.stdout
    of_gate = expected == ["listed"]
    assert ("1 gate items no longer exist" in ran.stdout) == of_gate, ran.stdout
    assert ("--changed must be" in ran.stdout) == (not expected)
