"""Deliberate faults: mutants by rules, red told from green, a record, and the choice by it."""

import sys

import pytest
from support import cases, children

from scripts.maintenance import deliberate_faults
from scripts.maintenance.deliberate_faults import Fault, Outcome, Tree, UserError
from scripts.maintenance.faults import listed, mutation, records


def test_the_list_is_short_and_has_the_form():
    """Whether each text is still there is asked when faults are made: no change need edit it."""
    faults = listed.read()
    assert 100 < len(faults) <= 200
    assert not [x.name for x in faults if x.old == x.new or not x.tests or ":" in x.name]


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
    assert listed.problems(ENTRY, tree) == []
    [problem] = listed.problems(ENTRY._replace(**changes), tree)
    assert sentence in problem


RIGHT = "not wrong"
NUMBER, TWO = (f"tests/deep/test_{name}.py" for name in ("number", "two"))
SEES_TWO = dict(old="TWO = 2", new="TWO = 3")
WAITS = dict(old="WAIT = 0", new="WAIT = 60", keyword=RIGHT)


# Each runs pytest, by a keyword first where there is one.
ATTEMPTS = [
    # A keyword that finds nothing costs a run.
    (dict(keyword="none"), "caught", f"{NUMBER}::test_one"),
    (dict(keyword=RIGHT), "caught", f"{NUMBER}::test_one"),
    (SEES_TWO | dict(keyword=RIGHT), "unclear", "without the fault"),
    (SEES_TWO | dict(tests=("test_two.py",)), "caught", f"{TWO}::test_two"),
    (dict(tests=("test_two.py",)), "lives", "it lives"),
    # The broken number can't even be imported.
    (dict(new="ONE"), "caught", NUMBER),
    (WAITS, "caught", "no end after 3 s"),
    (WAITS | dict(at=len("ONE = 1\nTWO = 2\n")), "timeout", "no end after 3 s"),
]


@pytest.mark.parametrize(("changes", "kind", "by"), cases.default(ATTEMPTS[:1], ATTEMPTS))
def test_red_test_catches_a_fault(tree, changes, kind, by):
    # Some rows wait for the limit; on a busy machine the others take several seconds.
    limit = 3 if "no end" in by else 120
    copy = Tree(tree, sys.executable, tree / "compiled", limit)
    before = (tree / "number.py").read_text()
    outcome = copy.attempt(ENTRY._replace(**changes))
    assert (outcome.kind, by in outcome.by) == (kind, True), outcome
    assert (tree / "number.py").read_text() == before


@pytest.mark.extended
def test_known_tests_run_first_and_tell_their_seconds(tree):
    (tree / "tests" / "deep" / "test_two.py").write_text(
        "import time\nfrom number import TWO\n"
        "def test_two():\n    time.sleep(.3)\n    assert TWO == 2\n"
    )
    copy = Tree(tree, sys.executable, tree / "compiled", 120, green := {})
    fault = ENTRY._replace(**SEES_TWO, tests=("test_number.py",))
    gone = [f"{TWO}::test_gone"]
    outcome = copy.attempt(fault, [f"{TWO}::test_two"])
    assert (outcome.kind, outcome.test) == ("caught", f"{TWO}::test_two")
    assert 0.3 <= outcome.seconds < 5 and green == {outcome.test: outcome.seconds}
    # A test that no longer exists catches nothing.
    assert copy.attempt(fault._replace(tests=("test_two.py",)), gone).test == outcome.test
    assert copy.tests() == [f"{NUMBER}::test_one", f"{NUMBER}::test_wrong", f"{TWO}::test_two"]


# ------------------------------------------------------------------------------------------------
# Mutants.

# A statement of a function, and what becomes of it.
MUTANTS = [
    ("return a < b", ["a <= b"]),
    ("return a not in b", ["a in b"]),
    ("return (a + b) * c", ["(a + b)", "c", "(a) * c", "(b) * c", "(a - b) * c"]),
    ("return a // b", ["a"]),
    ("return a and b", ["(b)", "(a)", "a or b"]),
    (
        "return a or (b == c) or d",
        ["((b == c) or d)", "(a or d)", "(a or (b == c))", "a or (b != c) or d"],
    ),
    ("return f(a, -b)", ["f(-b, a)", "f(a, b)"]),
    ("return 3", ["4"]),
    ("return f(x=True)", ["f(x=False)"]),
    ("return jnp.minimum(a, b)", ["jnp.maximum(a, b)"]),
    ("return a if f(b) else c", ["a if (not f(b)) else c"]),
    ("return 'é', a[1]  # é", ["'é', a[2]  # é"]),
    # Nothing that only a person reads, nothing that is the same.
    ("return 'a' + b", []),
    ("return f'{a + 1:3}'", []),
    ("return a is b is c", ["a is not b is c", "a is b is not c"]),
    ("return f(a, a)", []),
    ("return ValueError(a + 1)", []),
]


@pytest.mark.parametrize(("line", "expected"), MUTANTS, ids=lambda x: x if type(x) is str else "")
def test_mutants_of_a_statement(tmp_path, line, expected):
    text = f"X = 1 + 1\n\n\ndef g(a: X[1], b, c) -> X[2]:\n    '''1'''\n    {line}\n"
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    made = [x for x in mutation.mutants("a.py", (), tmp_path) if mutation.real(x, tmp_path)]
    assert len({x.name for x in made}) == len(made)
    head = text.rpartition("return")[0]
    assert sorted(x.broken(text) for x in made) == sorted(f"{head}return {x}\n" for x in expected)


def test_other_mutants(tmp_path):
    """Statements, signs of sums in place, methods; not `repr`, errors and assertions."""
    (tmp_path / "a.py").write_text(
        "class A:\n"
        "    def f(self, x: int = 1):\n        x += y\n        f(x)\n        print(x + 1)\n"
        "    def __repr__(self):\n        return 1\n"
        "    def g(self):\n        assert x < 1\n        raise E(x + 1)\n"
    )
    made = mutation.mutants("a.py", (), tmp_path)
    assert [(x.name, x.new) for x in made] == [
        ("a.py:A.f:2:shift", "2"),
        ("a.py:A.f:3:sign", "-"),
        ("a.py:A.f:4:statement", "pass"),
    ]


@pytest.fixture
def few_files(monkeypatch):
    """Only mutants of models: to make mutants of all files takes seconds."""
    monkeypatch.setattr(mutation, "FOLDERS", ("models",))


def test_mutants_are_drawn_by_a_seed(few_files):
    faults = listed.read()
    few, more = ([*mutation.draw(n, 1, faults)] for n in (20, 30))
    assert more[:20] == few != [*mutation.draw(20, 2, faults)]
    functions = {x.name.rsplit(":", 2)[0] for x in more}
    assert [x.file for x in more] != sorted(x.file for x in more)
    assert len(functions) == 30 and all(x.tests for x in more)
    # Its name makes it again.
    [again] = deliberate_faults.wanted([few[0].name], None, 0)
    assert again == few[0]


def test_tests_of_a_mutant():
    faults = [
        ENTRY._replace(file="a/x.py", tests=("1", "2")),
        ENTRY._replace(file="a/y.py", tests=("2",)),
        ENTRY._replace(file="b/c/z.py", tests=("3",)),
    ]
    files = ["a/x.py", "a/new.py", "b/new.py", "b/masks.py"]
    expected = [("1", "2"), ("2", "1"), ("3",), ("test_masks.py", "3")]
    assert [mutation.tests_of(x, faults) for x in files] == expected


# ------------------------------------------------------------------------------------------------
# Records and the choice.


def line(fault, test, seconds=1.0, outcome="caught"):
    return dict(fault=fault, file="a.py", outcome=outcome, by=test, test=test, seconds=seconds)


def test_a_record_goes_on(tmp_path):
    path = tmp_path / "record.jsonl"
    record = records.Record(path)
    record.add(ENTRY, Outcome("caught", "x::a", "x::a", 0.25))
    record.add(ENTRY._replace(name="two"), Outcome("lives", "it lives"))
    again = records.Record(path)
    assert again.lines == record.lines and again.faults == {"one", "two"}
    assert again.seconds == {"x::a": 0.25}
    assert again.known("number.py") == ["x::a"] and again.known("other.py") == []
    path.write_text('{"fault": "o')
    with pytest.raises(UserError, match="line 1 is"):
        records.Record(path)


def test_the_choice_sees_all_at_the_least_cost():
    default = ["x::a", "x::b", "x::c", "x::p", "x::q", "x::r", "y::d", "z::e", "z::f", "u::g"]
    lines = [
        # A fault that a cheap test sees needs no other.
        *(line("a", "u::g"), line("a", "u::h")),
        # The cheap one sees both faults; c alone sees three.
        *(line("1", "x::a", 9.0), line("1", "x::b"), line("2", "x::b")),
        *(line("3", "x::c", 50.0), line("4", "y::gone")),
        # Two cheap ones are better than one that is not.
        *(line("8", "x::p"), line("9", "x::q"), *(line(n, "x::r", 99.0) for n in "89")),
        # Neither a file that cannot be imported nor a fault without an end names a test.
        *(line("5", "y"), line("6", "", outcome="timeout"), line("7", "", outcome="lives")),
    ]
    chosen = records.choose(lines, [*default, "u::h"], {"u::g": 0.01, "x::a": 5.0})
    assert chosen == ["u::g", "x::b", "x::c", "x::p", "x::q", "y::d", "z::e"]


def test_times_are_those_of_green_tests(tmp_path):
    """They are read from what pytest itself writes."""
    (tmp_path / "test_kinds.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', ['a-b', 'c d'])\n"
        "def test_green(n): pass\n"
        "def test_red(): assert False\n"
        "def test_skipped(): pytest.skip('no')\n"
    )
    children.run(
        [sys.executable, "-m", "pytest", "-q", "--junitxml=times.xml"],
        cwd=tmp_path,
        capture_output=True,
    )
    times = records.read_times(tmp_path / "times.xml")
    assert list(times) == [f"test_kinds.py::test_green[{n}]" for n in ("a-b", "c d")]
    assert all(0 <= seconds < 1 for seconds in times.values())
    (tmp_path / "times.xml").write_text("no report")
    with pytest.raises(UserError, match="--times must be a report"):
        records.read_times(tmp_path / "times.xml")


def test_held_back_faults_are_not_chosen_by():
    lines = [line(f"{n}", "x::a") for n in range(10)] + [line("0", "x::b"), line("n", "")]
    by, held = records.split(lines, 0.2, 1)
    assert len(held) == 2 and {x["fault"] for x in by} == {*map(str, range(10))} - held
    assert held != records.split(lines, 0.2, 2)[1]


# ------------------------------------------------------------------------------------------------
# The command.


@pytest.fixture
def attempts(monkeypatch):
    """The names of faults that are tried: those with "more" live; there is one that is stale."""
    tried = []

    def attempt(tree, fault, first=()):
        assert (tree.path / fault.file).is_file()
        tried.append(fault.name)
        return Outcome("lives" if "more" in fault.name else "caught", "x::y", "x::y", 0.5)

    monkeypatch.setattr(Tree, "attempt", attempt)
    entry = Fault("less", "pyproject.toml", "[project]", "[]", ("test_docs.py",))
    faults = [entry, entry._replace(name="more"), entry._replace(name="stale", old="?!")]
    monkeypatch.setattr(deliberate_faults, "read", lambda: faults)
    return tried


@pytest.mark.parametrize(
    ("names", "status", "told"),
    [
        (["less"], 0, ["caught less: x::y", "1 of 1 faults are caught"]),
        (["less", "more"], 1, ["LIVES more", "1 of 2 faults are caught, 1 live"]),
        (["less", "stale"], 1, ["STALE stale: `old` must be", "1 of 1 faults are caught"]),
    ],
)
def test_exit_status_says_whether_one_lives(attempts, capsys, names, status, told):
    assert deliberate_faults.main(["--only", *names, "--jobs", "2"]) == status
    out = capsys.readouterr().out
    assert [x for x in told if x not in out] == []
    assert sorted(attempts) == [x for x in names if x != "stale"]


def test_runs_of_limited_time_add_up(attempts, tmp_path, capsys):
    flags = ["--only", "less", "more", "--record", str(tmp_path / "r")]
    assert deliberate_faults.main([*flags, "--budget", "1e-9"]) == 0
    assert "2 are left" in capsys.readouterr().out and attempts == []
    assert deliberate_faults.main(flags) == 1
    # Nothing is tried again, and what lives still counts.
    assert deliberate_faults.main(flags) == 1
    assert sorted(attempts) == ["less", "more"]


def test_choosing_and_validating(attempts, few_files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Tree, "tests", lambda _: ["a/test_docs.py::x", "b.py::y", "b.py::z"])
    monkeypatch.setattr(records, "GATE", records.ROOT / "gate")
    written, tries = [], []
    monkeypatch.setattr(records, "write", written.extend)
    monkeypatch.setattr(
        Tree,
        "attempt_with",
        lambda _, fault, runs: tries.append((fault.name, *runs)) or Outcome("caught", "b.py::z"),
    )
    record = records.Record(tmp_path / "r")
    for name in ("less", "more"):
        record.add(ENTRY._replace(name=name), Outcome("caught", "", "b.py::z"))
    record.add(ENTRY._replace(name="gone"), Outcome("caught", "", "b.py::w"))
    times = tmp_path / "times.xml"
    case = '<testcase classname="b" name="{}" time="{}"/>'
    times.write_text(f"<a>{case.format('y', 0.01)}{case.format('z', 9)}</a>")
    flags = ["--times", str(times), str(tmp_path / "r")]
    assert deliberate_faults.main(["--choose", *flags]) == 0
    assert written == ["a/test_docs.py::x", "b.py::y", "b.py::z"]
    assert deliberate_faults.main(["--validate", "0.5", *flags]) == 0
    [(name, *runs)] = tries
    assert "1 faults are held back, 1 choose" in capsys.readouterr().out
    assert name in ("less", "more") and [x[-1] for x in runs] == ["b.py::y", "b.py::z"]


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--only", "none"], "--only must be"),
        (["--python", "no-such-python", "--only", "band-*"], "--python must be"),
        (["--choose"], "RECORD must be"),
        (["--choose", "x"], "--times must be"),
        (["--times", "x"], "--times must be"),
        (["--choose", "--validate", "0.1", "x"], "RECORD must be"),
    ],
)
def test_a_mistake_ends_in_one_sentence(arguments, start):
    with pytest.raises(SystemExit, match=f"error: {start}"):
        deliberate_faults.main(arguments)
