"""Break the code on purpose and ask whether a test catches it.

`deliberate_faults.toml` lists small faults: a mask moved by one key, a sign, a dropped scale. This
script makes each of them in a copy of the working tree and runs tests there. A fault that no test
catches *lives*: a test is missing. `--mutants` adds faults that are made by rules: a comparison, a
sign, a term, a constant, two arguments. A mutant that lives is only told, because it may be right.

    python scripts/maintenance/deliberate_faults.py
    python scripts/maintenance/deliberate_faults.py --only 'band-*' ring-sends-backwards
    python scripts/maintenance/deliberate_faults.py --only 'pallas_flash/_problem/masks.py:Band.*'
    python scripts/maintenance/deliberate_faults.py --mutants 500 --jobs 8 --record faults.jsonl
    python -m pytest -m default --junitxml=times.xml
    python scripts/maintenance/deliberate_faults.py --choose --times times.xml faults.jsonl
    python scripts/maintenance/deliberate_faults.py --validate 0.2 --times times.xml faults.jsonl

An entry of the list:

    [band-sees-one-key-more]
    file = "pallas_flash/_problem/masks.py"
    old = "k <= q + self.high"
    new = "k <= q + self.high + 1"
    tests = ["test_masks.py"]
    keyword = "allowed"

`old` must be in the file exactly once; an entry without is *stale*, is named, and makes nothing.
`tests` are the names of files that should catch the fault, in any folder. They stop at the first
failure; `keyword`, if there is one, is pytest's `-k` for a first try, and only saves time. A mutant
runs the files that faults of the same source file name, or else of the same folder.

A failure counts only if the same test passes without the fault. A record keeps what became of each
fault; what it has already is left out, so that runs of limited time add up. `--choose` makes
`.ci/gate-items.txt` of records, the tests that `pytest` runs by default: all that take no time by
`--times`, and those that see the other faults. `--validate` chooses by some of the faults, and runs
these tests with the others.

The exit status is 1 if a fault of the list lives or is stale, else 0.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fnmatch
import functools
import os
import pathlib
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from scripts.command import (
    Parser,
    UserError,
    command,
    parse_path,
    parse_rate,
    parse_seconds,
    parse_size,
)
from scripts.maintenance.faults import mutation, records
from scripts.maintenance.faults.listed import LIST, ROOT, Fault, paths, problems, read
from scripts.maintenance.faults.records import CHEAP, Record
from scripts.maintenance.faults.trees import (
    CAUGHT,
    EXTENDED,
    LIVES,
    TIMEOUT,
    Outcome,
    Tree,
    copy_tree,
)

Attempt = Callable[[Tree, Fault], Outcome]


def matching(faults: list[Fault], patterns: Sequence[str]) -> list[Fault]:
    """Return the faults whose names match a pattern; all if there are none."""
    for pattern in patterns:
        if not any(fnmatch.fnmatch(fault.name, pattern) for fault in faults):
            raise UserError(
                f"--only must be names of faults, or patterns of them; got {pattern!r}, which is "
                f"none. They are in {LIST.name}; a mutant is file:function:line:kind."
            )
    return [x for x in faults if not patterns or any(fnmatch.fnmatch(x.name, y) for y in patterns)]


def wanted(only: Sequence[str], mutants: int | None, seed: int) -> list[Fault]:
    """Return the faults that the flags ask for."""
    listed = read()
    if mutants:
        return matching([*listed, *mutation.draw(mutants, seed, listed)], only)
    made = mutation.every(listed) if any(":" in pattern for pattern in only) else []
    return [x for x in matching([*listed, *made], only) if x.at is None or mutation.real(x)]


@contextlib.contextmanager
def copies(count: int, python: str, limit: float, green: dict[str, float]) -> Iterator[list[Tree]]:
    """Copies of the working tree, which share compiled programs."""
    if shutil.which(python) is None:
        raise UserError(f"--python must be a program; got {python!r}. Give its path.")
    with tempfile.TemporaryDirectory(prefix="deliberate-faults-") as folder:
        cache = pathlib.Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled"))
        trees = []
        for n in range(count):
            copy_tree(path := pathlib.Path(folder, f"tree-{n}"))
            trees.append(Tree(path, python, cache, limit, green))
        yield trees


def attempt_all(
    faults: Sequence[Fault], trees: Sequence[Tree], attempt: Attempt, record: Record, stop: float
) -> None:
    """Print and record what becomes of each fault; start none after a time."""
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)
    printing = threading.Lock()

    def one(fault: Fault):
        tree, start = free.get(), time.monotonic()
        try:
            if start > stop:
                return
            outcome = attempt(tree, fault)
        finally:
            free.put(tree)
        record.add(fault, outcome)
        with printing:
            mark = "LIVES" if outcome.kind == LIVES else outcome.kind
            seconds = time.monotonic() - start
            print(f"{mark} {fault.name}: {outcome.by} ({seconds:.0f} s)", flush=True)

    with concurrent.futures.ThreadPoolExecutor(len(trees)) as pool:
        list(pool.map(one, faults))


def summary(faults: Sequence[Fault], record: Record) -> int:
    """Print what became of some faults, and return the exit status."""
    names = {fault.name: fault for fault in faults}
    lines = [line for line in record.lines if line["fault"] in names]
    count = {kind: sum(x["outcome"] == kind for x in lines) for kind in (CAUGHT, LIVES, TIMEOUT)}
    print(
        f"{count[CAUGHT]} of {len(names)} faults are caught, {count[LIVES]} live, "
        f"{count[TIMEOUT]} took too long, {len(names) - len(lines)} are left."
    )
    living = [x for x in lines if x["outcome"] == LIVES and names[x["fault"]].at is None]
    return 1 if living else 0


def attempt_known(record: Record) -> Attempt:
    """Return what runs the named tests: first tests that saw other faults of the same file."""

    def attempt(tree: Tree, fault: Fault) -> Outcome:
        return tree.attempt(fault, record.known(fault.file))

    return attempt


def attempt_chosen(chosen: Sequence[str], times: Mapping[str, float]) -> Attempt:
    """Return what runs the chosen tests: of the fault's own files, then the cheap, then others."""

    def attempt(tree: Tree, fault: Fault) -> Outcome:
        own = {path for name in fault.tests for path in paths(name, tree.path)}
        tries: list[list[str]] = [[], [], []]
        for test in chosen:
            cheap = times.get(test, CHEAP) < CHEAP
            tries[0 if test.split("::")[0] in own else 1 if cheap else 2].append(test)
        return tree.attempt_with(fault, [[*EXTENDED, *tests] for tests in tries if tests])

    return attempt


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    flags = Parser(
        prog="deliberate_faults.py",
        description="Break the code on purpose and ask whether a test catches it.",
        allow_abbrev=False,
    )
    add = flags.add_argument
    add("records", nargs="*", type=parse_path, metavar="RECORD", help="for --choose, --validate")
    add("--only", nargs="+", default=[], metavar="NAME", help="these faults; patterns like ring-*")
    add("--mutants", type=parse_size, metavar="N", help="also N faults made by rules")
    add("--seed", type=int, default=0, help="which mutants, or which faults --validate holds back")
    add("--record", type=parse_path, metavar="FILE", help="add what becomes of each to a file")
    add("--choose", action="store_true", help="make .ci/gate-items.txt of records")
    add("--times", type=parse_path, metavar="FILE", help="pytest's --junitxml of the default tests")
    add("--validate", type=parse_rate, metavar="SHARE", help="hold back this share of the faults")
    add("--jobs", type=parse_size, default=1, metavar="N", help="copies of the tree at work")
    add("--limit", type=parse_seconds, default=120.0, help="seconds of each run of pytest")
    add("--budget", type=parse_seconds, metavar="SECONDS", help="start no fault after that")
    add("--python", default=sys.executable, metavar="FILE", help="the Python with pytest and JAX")
    return flags


def check(flags: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    reads = flags.choose or flags.validate is not None
    if reads != bool(flags.records) or (flags.choose and flags.validate is not None):
        raise UserError(
            "RECORD must be given with one of --choose and --validate, and with nothing else; got "
            f"{len(flags.records)} records. Write them last: --choose a.jsonl b.jsonl."
        )
    if reads != (flags.times is not None):
        raise UserError(
            "--times must be given with --choose and --validate, and only with them; got "
            f"{flags.times}. Write it by pytest -m default --junitxml=FILE."
        )


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    flags = parser().parse_args(arguments)
    check(flags)
    stop = time.monotonic() + (flags.budget or float("inf"))
    lines = [line for path in flags.records for line in records.read_lines(path)]
    make = functools.partial(copies, python=flags.python, limit=flags.limit)
    times = records.read_times(flags.times) if flags.times else {}
    default = []
    if flags.records:
        with make(1, green={}) as [tree]:
            default = tree.tests()
    if flags.choose:
        chosen = records.choose(lines, default, times)
        records.write(chosen)
        print(f"{len(chosen)} of {len(default)} tests are in {records.GATE.relative_to(ROOT)}.")
        return 0
    record = Record(flags.record)
    if flags.validate is None:
        faults = wanted(flags.only, flags.mutants, flags.seed)
        attempt = attempt_known(record)
    else:
        listed = read()
        every = {x.name: x for x in [*listed, *mutation.every(listed)]}
        there = [x for x in lines if x["fault"] in every]
        by, held = records.split(there, flags.validate, flags.seed)
        faults = [x for name, x in every.items() if name in held]
        print(f"{len(held)} faults are held back, {len(by)} choose.")
        # A test that is red without a fault would say nothing.
        chosen = records.choose(by, [x for x in default if x in times], times)
        attempt = attempt_chosen(chosen, times)
    stale = [problem for fault in faults for problem in problems(fault)]
    for problem in stale:
        print(f"STALE {problem}")
    faults = [x for x in faults if not problems(x)]
    left = [x for x in faults if x.name not in record.faults]
    if left:
        with make(min(flags.jobs, len(left)), green=record.seconds) as trees:
            attempt_all(left, trees, attempt, record, stop)
    return summary(faults, record) or (1 if stale else 0)


if __name__ == "__main__":
    sys.exit(main())
