"""Which of the collected tests run.

    pytest               -m gate: the tests of .ci/gate-items.txt, which see deliberate faults; of
                         a file that has none there, the default selection
    pytest --changed     what else the default selection has of folders that a change touches
    pytest tests/masks   the default selection of what is named, also by -k
    pytest -m default    the default selection: each test with every value of every parameter once
    pytest -m extended   the other combinations
    pytest -m gpu        all combinations of the tests marked `gpu`, on a GPU

Every value once: of three implementations and ten cases, ten pairs in which all thirteen occur. So
a new test needs no mark; what must always run together is one parameter,
`parametrize(("case", "dtype"), [...])`. Where values are many and each takes seconds,
`cases.default(chosen, values)` and `cases.parametrize(names=..., more=...)` leave the others to
`-m extended`, too.
"""

import collections
import itertools
import os
import pathlib

import pytest
from support import children

ROOT = pathlib.Path(__file__).parents[2]
GATE = ROOT / ".ci" / "gate-items.txt"
MARKS = {
    "gate": "sees a deliberate fault, or stands for a file; what runs by default",
    "gpu": "needs an NVIDIA GPU; select with -m gpu",
    "extended": "further values and combinations; select with -m extended",
    "default": "every value of every parameter once; select with -m default",
}
# Files whose change only documents and the tests of the project can see: beginnings of paths.
PROJECT = "docs/", ".ci/", ".github/", "README", "CHANGELOG", "CONTRIBUTING", "CITATION", "mkdocs"
# A page and its kernels, and their tests.
STEPS = "docs/hopper_steps/", "docs/hopper-steps.md"
STEPS_TESTS = "tests/mosaic/test_hopper_steps.py"


def add_options(parser):
    parser.addoption(
        "--changed",
        nargs="?",
        const="",
        metavar="BASE",
        help="the default tests, but for the gate's, of what has changed since a commit: "
        "$GATE_BASE, else where the branch left origin/main, else HEAD~1",
    )


def configure(config):
    """Choose the gate's tests if nothing else is asked for, and look for what has changed."""
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.changed, config.missing_gate_items = None, 0
    if hasattr(config, "workerinput"):
        config.option.markexpr, config.changed = config.workerinput["selection"]
        return
    option = config.option
    named = config.args_source == config.ArgsSource.ARGS or option.keyword or option.markexpr
    if option.changed is None:
        option.markexpr = option.markexpr if named else "gate"
    elif named:
        raise pytest.UsageError("--changed must be without names of tests, -k and -m.")
    else:
        config.changed = touched(changed_files(option.changed))


# ------------------------------------------------------------------------------------------------
# The default selection.


def values(item):
    """Yield the names of each `parametrize`, and which objects an item has for them."""
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield tuple((name.strip(), id(item.callspec.params[name.strip()])) for name in names)


def needless(items):
    """Return the items of one test without which every value of every parameter still occurs.

    Kept is in turn the one with the most values that are new, of equals that whose values were kept
    the least, of equals the first.
    """
    left, kept = {item: list(values(item)) for item in items}, collections.Counter()

    def gain(item):
        return sum(not kept[x] for x in left[item]), -sum(kept[x] for x in left[item])

    # All values of a single parameter are needed, and there may be hundreds.
    if {len(taken) for taken in left.values()} == {1}:
        firsts = {taken[0]: item for item, taken in reversed(left.items())}
        return [item for item, taken in left.items() if firsts[taken[0]] is not item]
    while left and gain(best := max(left, key=gain))[0]:
        kept.update(left.pop(best))
    return [item for item in left if left[item]]


def by_case(items):
    """A file's tests of one case in a row: mostly one worker gets them, and what they share."""
    places = {}

    def place(item):
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        return [places.setdefault(x, len(places)) for x in (item.path, (item.path, id(case)))]

    return sorted(items, key=place)


def with_long_ones_between(items):
    """For a GPU: those that take the longest by far must not come at once, nor last.

    And one process gets the first tests, so these are those that need much of its memory. Tests
    without a case take longer than the others, and come before them.
    """

    def case_of(item):
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        return getattr(case, "name", None)

    def is_tuning(item):
        return item.name == "test_on_a_gpu"

    def is_long(item):
        return is_tuning(item) or case_of(item) == "all features"

    def place(item):
        needs_memory = "sizes_beyond" in item.name
        on_a_gpu = item.get_closest_marker("gpu") is not None
        return not on_a_gpu, not is_tuning(item), not needs_memory, case_of(item) is not None

    items = sorted(items, key=place)
    long, others = ([item for item in items if is_long(item) == wanted] for wanted in (True, False))
    every = len(others) * 3 // 4 // (len(long) or 1) + 1
    for n, item in enumerate(others):
        if n % every == 0 and long:
            yield long.pop(0)
        yield item
    yield from long


def select(config, items):
    """Keep the items that run, in the order in which they run."""
    for _, group in itertools.groupby(items, key=lambda item: item.nodeid.split("[")[0]):
        group = [x for x in group if not any(map(x.get_closest_marker, ("gpu", "extended")))]
        left_out = {*map(id, needless(group))}
        for item in group:
            item.add_marker("extended" if id(item) in left_out else "default")
    expression = config.option.markexpr
    chosen = {name for name in ("gpu", "extended") if name in expression}
    kept = [
        item
        for item in items
        if all(
            item.get_closest_marker(name) is None or name in chosen for name in ("gpu", "extended")
        )
    ]
    listed = GATE.read_text(encoding="utf-8") if GATE.exists() else ""
    gate, missing = of_gate([x for x in kept if x.get_closest_marker("default")], listed)
    for item in gate:
        item.add_marker("gate")
    if expression == "gate":
        config.missing_gate_items = missing
        if hasattr(config, "workeroutput"):
            config.workeroutput["missing_gate_items"] = missing
    if config.changed is not None:
        kept = [
            item
            for item in kept
            if item.nodeid.startswith((*config.changed,)) and not item.get_closest_marker("gate")
        ]
    wanted = {*map(id, kept)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in wanted])
    items[:] = by_case(kept)
    if "gpu" in chosen:
        items[:] = with_long_ones_between(items)


# ------------------------------------------------------------------------------------------------
# The gate.


def of_gate(items, listed):
    """Return the items of the gate, and how many tests of the list no longer exist.

    Args:
        items: the default selection.
        listed: the text of the list.
    """
    names = {line for line in listed.splitlines() if line and not line.startswith("#")}
    files = {name.split("::")[0] for name in names}
    kept = [
        item for item in items if item.nodeid in names or item.nodeid.split("::")[0] not in files
    ]
    # A file without items is skipped as a whole on this version of JAX.
    collected = {item.nodeid.split("::")[0] for item in items}
    there = {name for name in names if name.split("::")[0] in collected}
    gone = {name for name in names - there if not (ROOT / name.split("::")[0]).exists()}
    return kept, len(gone | there - {item.nodeid for item in kept})


def _git(*arguments):
    """Return the lines that git prints; None if it cannot say."""
    try:
        ran = children.run(["git", *arguments], cwd=ROOT, capture_output=True, encoding="utf-8")
    except OSError:
        return None
    return ran.stdout.split("\n")[:-1] if ran.returncode == 0 else None


def changed_files(base=""):
    """Return the files that differ from a commit; None if git cannot say."""
    base = base or os.environ.get("GATE_BASE", "")
    if not base:
        head, main = _git("rev-parse", "HEAD"), _git("merge-base", "HEAD", "origin/main")
        base = main[0] if main and main != head else "HEAD~1"
    kinds = [
        _git("diff", "--name-only", "--no-renames", f"{base}...HEAD"),
        _git("diff", "--name-only", "--no-renames", "HEAD"),
        _git("ls-files", "--others", "--exclude-standard"),
    ]
    return None if None in kinds else sorted({*itertools.chain(*kinds)})


def touched(files, faults=None):
    """Return the folders and files of tests that changed files need; `tests/` if that is unsure.

    A source file needs the folders of the tests that deliberate faults of its folder name.
    """
    if files is None:
        return ["tests/"]
    from scripts.maintenance.faults import listed

    faults = listed.read() if faults is None else faults
    needed = set()
    for file in files:
        path = pathlib.PurePath(file)
        if file == ".ci/gate-items.txt":
            continue
        if path.match("tests/*/test_*.py"):
            needed.add(file)
        elif file.startswith(PROJECT):
            needed.add("tests/project/")
            needed |= {STEPS_TESTS} if file.startswith(STEPS) else set()
        else:
            folders = (f"{x}/" for x in path.parents if path.parts[0] != "tests" and x.name)
            near = next((x for x in folders if any(y.file.startswith(x) for y in faults)), None)
            tests = {x for y in faults if near and y.file.startswith(near) for x in y.tests}
            found = {f"{pathlib.PurePath(x).parent}/" for y in tests for x in listed.paths(y)}
            needed |= found or {"tests/"}
    return ["tests/"] if "tests/" in needed else sorted(needed)


def remember(config, output):
    """Take from a worker what the report says."""
    config.missing_gate_items = output.get("missing_gate_items", config.missing_gate_items)


def report(terminalreporter):
    """Write what has changed, and which tests of the gate's list are gone."""
    config = terminalreporter.config
    if config.changed is not None:
        terminalreporter.write_line(f"what changed: {' '.join(config.changed) or 'nothing'}")
    if config.missing_gate_items:
        terminalreporter.write_line(
            f"{config.missing_gate_items} gate items no longer exist; the nightly run rewrites the "
            "list"
        )
