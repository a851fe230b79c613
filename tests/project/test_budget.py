"""The processor time of a run against its budget, on a small tree with a run of pytest each."""

import json
import os
import re
import runpy
import sys
import types

import pytest
from support import budget, children
from support.repository import ROOT

BURN = """
import os, subprocess, sys

def burn(seconds):
    end = sum(os.times()[:2]) + seconds
    while sum(os.times()[:2]) < end:
        pass
"""
TESTS = {
    "test_own.py": "from burn import burn\ndef test_one(): burn(0.3)\ndef test_two(): burn(0.1)\n",
    "test_child.py": "import subprocess, sys\ndef test_child():\n"
    "    code = 'from burn import burn; burn(0.4)'\n"
    "    assert not subprocess.run([sys.executable, '-c', code]).returncode\n",
    "test_fixture.py": "import pytest\nfrom burn import burn\n@pytest.fixture(scope='module')\n"
    "def costly():\n    burn(0.2)\n    yield\n    burn(0.2)\ndef test_one(costly): pass\n",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    (folder / "tests").mkdir()
    # As here: conftest.py is where pytest looks only if nothing on the command line is a file.
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (folder / "tests" / "conftest.py").write_text('pytest_plugins = ["support.budget"]\n')
    for name, text in ({"burn.py": BURN} | TESTS).items():
        (folder / "tests" / name).write_text(text)
    return folder


def run(tree, *arguments):
    """Return the exit status of pytest, what it printed, and the budget's table afterwards."""
    path = f"{ROOT / 'tests'}{os.pathsep}{tree / 'tests'}"
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    ran = children.run(
        command,
        cwd=tree,
        # Plugins take a while to be imported.
        env=os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=children.PIPE,
        stderr=children.STDOUT,
        text=True,
    )
    file = tree / "budget.json"
    tables = json.loads(file.read_text()) if file.exists() else {}
    return ran.returncode, ran.stdout, tables


BUDGETED = "--budget=budget.json", "--unit=1 0.1"


@pytest.mark.parametrize("processes", [[], ["-p", "xdist", "-n", "2"]], ids=["one", "workers"])
def test_written_budget_has_what_children_and_fixtures_take(tree, processes):
    (tree / "budget.json").unlink(missing_ok=True)
    status, out, tables = run(tree, *BUDGETED, "--write-budget", *processes)
    assert status == 0, out
    assert tables.pop("calibration") == "1"
    [(_, table)] = tables.items()
    names = [f"tests/{name}" for name in TESTS]
    assert {*table} == {*names, budget.COLLECTION}
    # Units of a tenth of a second; the child's Python takes some time to start.
    assert [table[name] >= 4 for name in names] == [True] * 3, table
    assert table[budget.COLLECTION] > 0.5
    # A unit of half the length doubles the number of units.
    status, out, _ = run(tree, "--budget=budget.json", "--unit=1 0.05", *processes)
    assert (status, "make them cheaper" in out) == (1, True), out
    assert f"over its budget: {names[0]}" in out


def test_failed_run_writes_no_budget(tree, tmp_path):
    (tmp_path / "test_red.py").write_text("def test_red(): assert False\n")
    (tmp_path / "conftest.py").write_text((tree / "tests/conftest.py").read_text())
    status, out, tables = run(tmp_path, *BUDGETED, "--write-budget")
    assert (status, tables, "because the run failed" in out) == (1, {}, True), out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(budget="none.json"), "`--budget` must be a file"),
        (dict(unit=None), "`--unit` must be the line"),
        (dict(unit="fast"), "`--unit` must be the line"),
        (dict(), "must be of calibration 7"),
        (dict(budget=None), "need `--budget`"),
        (dict(budget=None, unit=None, write_budget=True), "need `--budget`"),
    ],
)
def test_wrong_options_are_a_sentence(tmp_path, monkeypatch, options, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text('{"calibration": "7"}')
    options = dict(budget="other.json", unit="1 0.1", write_budget=False) | options
    config = types.SimpleNamespace(
        option=types.SimpleNamespace(**options),
        pluginmanager=types.SimpleNamespace(register=None),
        rootpath=tmp_path,
    )
    with pytest.raises(pytest.UsageError, match=re.escape(sentence)):
        budget.pytest_configure(config)


@pytest.mark.parametrize(
    ("took", "lines", "allowed", "red"),
    [
        (dict(a=10, b=10), [], 20, False),
        (dict(a=14.9, b=14.9), [], 20, False),
        (dict(a=14.9, b=15.2), ["over its budget: b, 15.2 units of 10.0"], 20, True),
        (dict(a=16), ["over its budget: a, 16.0 units of 10.0"], 10, True),
        (dict(a=16, b=5), ["over its budget: a, 16.0 units of 10.0"], 20, False),
        (dict(small=1.9), [], 1, True),  # Not named: less than a unit more.
        (dict(a=10, new=1), ["new, without a budget: new, 1.0 units"], 11, False),
        (dict(a=10, new=13), ["new, without a budget: new, 13.0 units"], 15, True),
        (dict(new=9), ["new, without a budget: new, 9.0 units"], 5, True),
    ],
)
def test_files_together_may_take_1_5_times_their_budget(took, lines, allowed, red):
    """New files may take the five units of `gone`, a file that has moved."""
    table = dict(a=10.0, b=10.0, small=1.0, gone=5.0)
    assert budget.compare(took, table, lambda name: name != "gone") == (lines, allowed, red)


def test_new_files_without_any_budget_are_not_red():
    assert budget.compare(dict(new=9), {}, bool)[1:] == (0, False)


def test_budget_is_of_this_calibration():
    version = runpy.run_path(str(ROOT / ".ci/calibrate.py"))["VERSION"]
    assert json.loads((ROOT / ".ci/budget.json").read_text())["calibration"] == str(version)
