"""Deliberate faults: each entry of the list can be made, and the script tells red from green."""

import sys

import pytest
from support import cases

from scripts import deliberate_faults
from scripts.deliberate_faults import Fault, Tree, UserError


def test_every_entry_can_be_made():
    faults = deliberate_faults.read()
    assert len(faults) > 250
    assert [problem for fault in faults for problem in deliberate_faults.problems(fault)] == []


ENTRY = Fault("one", "number.py", "ONE = 1", "ONE = 2", ("test_number.py",))


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A module of three numbers, and tests of two of them, in a folder."""
    # Plugins take a while to be imported.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    folder = tmp_path / "tests" / "deep"
    folder.mkdir(parents=True)
    (tmp_path / "number.py").write_text("ONE = 1\nTWO = 2\nWAIT = 0\n")
    (folder / "test_number.py").write_text(
        "import time\n"
        "from number import ONE, WAIT\n"
        "def test_one():\n    time.sleep(WAIT)\n    assert ONE == 1\n"
        "def test_wrong():\n    assert ONE == 2\n"
    )
    (folder / "test_two.py").write_text(
        "from number import TWO\ndef test_two():\n    assert TWO == 2\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(file="none.py"), "there is no file none.py"),
        (dict(old="ONE = 3"), "exactly once; found 0"),
        (dict(old=" = "), "exactly once; found 3"),
        (dict(new="ONE = 1"), "another text"),
        (dict(tests=()), "must name a file"),
        (dict(tests=("test_none.py",)), "one test file test_none.py; found 0"),
    ],
)
def test_a_wrong_entry_is_told(tree, changes, sentence):
    assert deliberate_faults.problems(ENTRY, tree) == []
    [problem] = deliberate_faults.problems(ENTRY._replace(**changes), tree)
    assert sentence in problem


RIGHT = "not wrong"
NUMBER, TWO = (f"tests/deep/test_{name}.py" for name in ("number", "two"))


# Each runs pytest, by a keyword first where there is one.
ATTEMPTS = [
    # A keyword that finds nothing costs a run.
    (dict(keyword="none"), True, f"{NUMBER}::test_one"),
    (dict(keyword=RIGHT), True, f"{NUMBER}::test_one"),
    (dict(old="TWO = 2", new="TWO = 3", keyword=RIGHT), False, "without the fault"),
    (dict(old="TWO = 2", new="TWO = 3", tests=("test_two.py",)), True, f"{TWO}::test_two"),
    # The broken number can't even be imported.
    (dict(new="ONE"), True, NUMBER),
    (dict(old="WAIT = 0", new="WAIT = 60", keyword=RIGHT), True, "no end after 1 s"),
]


@pytest.mark.parametrize(("changes", "caught", "by"), cases.default(ATTEMPTS[:1], ATTEMPTS))
def test_red_test_catches_a_fault(tree, changes, caught, by):
    # One row waits for the limit; on a busy machine the others take several seconds.
    copy = Tree(tree, sys.executable, tree / "compiled", no_end=1 if "no end" in by else 120)
    before = (tree / "number.py").read_text()
    outcome = copy.attempt(ENTRY._replace(**changes), "named")
    assert (outcome.caught, by in outcome.by) == (caught, True), outcome
    assert (tree / "number.py").read_text() == before


@pytest.mark.extended
@pytest.mark.parametrize(("selection", "caught"), [("named", False), ("gate", True)])
def test_other_tests_run_if_named_ones_are_green(tree, selection, caught):
    (tree / "tests" / "deep" / "test_number.py").write_text("def test_nothing():\n    pass\n")
    copy = Tree(tree, sys.executable, tree / "compiled")
    fault = ENTRY._replace(old="TWO = 2", new="TWO = 3")
    outcome = copy.attempt(fault, selection)
    assert (outcome.caught, "lives" in outcome.by) == (caught, not caught)


def test_faults_are_chosen_by_patterns():
    faults = [ENTRY, ENTRY._replace(name="other"), ENTRY._replace(name="only")]
    assert deliberate_faults.choose(faults, []) == faults
    assert [x.name for x in deliberate_faults.choose(faults, ["on*", "one"])] == ["one", "only"]
    with pytest.raises(UserError, match=r"--only must be names of faults.*'none'"):
        deliberate_faults.choose(faults, ["one", "none"])


def test_the_exit_status_says_whether_one_lives(monkeypatch, capsys):
    """And the copies are of the working tree, at work one fault at a time each."""
    made = []

    def attempt(tree, fault, selection):
        made.append((tree.path / fault.file).is_file())
        return deliberate_faults.Outcome("more" not in fault.name, selection)

    monkeypatch.setattr(Tree, "attempt", attempt)
    names = ["band-sees-one-key-more", "band-sees-one-key-less"]
    assert deliberate_faults.main(["--only", *names, "--jobs", "2"]) == 1
    assert deliberate_faults.main(["--only", names[1], "--selection", "named"]) == 0
    assert made == [True] * 3
    out = capsys.readouterr().out
    assert "LIVES band-sees-one-key-more: gate" in out
    assert "1 of 2 faults are caught." in out and "1 of 1 faults are caught." in out


@pytest.mark.parametrize(
    "arguments", [["--only", "none"], ["--python", "no-such-python", "--only", "band-*"]]
)
def test_a_mistake_ends_in_one_sentence(arguments):
    with pytest.raises(SystemExit, match=f"error: {arguments[0]} must be"):
        deliberate_faults.main(arguments)
