"""Records: a line of JSON for each fault that was made, and the choice of tests by them.

A line has the names of the fault and of its file, the outcome, the first test that was red and the
seconds that this test takes when it is green.
"""

from __future__ import annotations

import json
import pathlib
import random
import threading
import xml.etree.ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts.command import UserError
from scripts.maintenance.faults.listed import ROOT, Fault
from scripts.maintenance.faults.trees import CAUGHT, Outcome

GATE = ROOT / ".ci" / "gate-items.txt"
HEADER = """\
# The tests that `pytest` runs by default: the cheap ones, those that see deliberate faults, and one
# of each other file. .ci/nightly makes this list by `deliberate_faults.py --choose`.
"""
# A test of fewer seconds is chosen whatever it sees. Half of the tests are so cheap, and take a
# hundredth of the time of all.
CHEAP = 0.1
# Seconds that each test takes besides its own: to be collected, set up and reported.
OVERHEAD = 0.05
# Most tests that run first because they saw other faults of the same source file.
MOST_KNOWN = 8


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the lines of a record; the last may be cut off."""
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            lines.append(json.loads(text))
        except ValueError as error:
            raise UserError(
                f"{path} must have a line of JSON for each fault; line {number} is {text[:80]!r}. "
                "Remove that line."
            ) from error
    return lines


def read_times(path: pathlib.Path) -> dict[str, float]:
    """Return the seconds of each test that passed, of a report that pytest's `--junitxml` wrote."""
    try:
        cases = xml.etree.ElementTree.parse(path).iter("testcase")
    except xml.etree.ElementTree.ParseError as error:
        raise UserError(
            f"--times must be a report of pytest --junitxml; {path} is none: {error}."
        ) from error
    return {
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": float(
            case.attrib["time"]
        )
        for case in cases
        if not [mark for mark in case if mark.tag in ("failure", "error", "skipped")]
    }


class Record:
    """A record that grows.

    Args:
        path: its file, which may be there already; None keeps no file.
    """

    def __init__(self, path: pathlib.Path | None):
        self._path, self._lock = path, threading.Lock()
        self.lines = read_lines(path) if path and path.exists() else []

    @property
    def faults(self) -> set[str]:
        """The names of the faults that it has."""
        return {line["fault"] for line in self.lines}

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each test that saw a fault."""
        return {line["test"]: line["seconds"] for line in self.lines if line["test"]}

    def known(self, file: str) -> list[str]:
        """Return the tests that saw most faults of a source file."""
        with self._lock:
            tests = [x["test"] for x in self.lines if x["file"] == file and "::" in x["test"]]
        return [test for test, _ in Counter(tests).most_common(MOST_KNOWN)]

    def add(self, fault: Fault, outcome: Outcome) -> None:
        """Add what became of a fault."""
        line = dict(
            fault=fault.name,
            file=fault.file,
            outcome=outcome.kind,
            by=outcome.by,
            test=outcome.test,
            seconds=round(outcome.seconds, 3),
        )
        with self._lock:
            self.lines.append(line)
            if self._path:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


def usable(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of faults that a test sees."""
    return [line for line in lines if line["outcome"] == CAUGHT and line["test"]]


def choose(
    lines: Iterable[dict[str, Any]], default: Sequence[str], times: Mapping[str, float]
) -> list[str]:
    """Return the cheap tests, tests that see all other faults of a record, one of each other file.

    Args:
        lines: lines of one or more records.
        default: the default selection; tests that are no more in it are left out.
        times: the seconds of tests that are green.
    """
    there, sees, seconds = set(default), defaultdict(set), {}
    for line in usable(lines):
        seconds[line["test"]] = line["seconds"] + OVERHEAD
        # Each test of a file tells that the file cannot be imported.
        if line["test"] in there:
            sees[line["test"]].add(line["fault"])
    chosen = {test: None for test in default if times.get(test, CHEAP) < CHEAP}
    seen = set().union(*(sees[test] for test in chosen))
    sees = {test: left for test, faults in sees.items() if (left := faults - seen)}
    while sees:
        best = max(sees, key=lambda test: (len(sees[test]) / seconds[test], test))
        chosen[best], seen = None, sees.pop(best)
        sees = {test: left for test, faults in sees.items() if (left := faults - seen)}
    files = {test.split("::")[0] for test in chosen}
    for test in default:
        if (file := test.split("::")[0]) not in files:
            files.add(file)
            chosen[test] = None
    return sorted(chosen)


def split(
    lines: Iterable[dict[str, Any]], share: float, seed: int
) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the lines to choose by, and the names of the faults that are held back."""
    lines = usable(lines)
    names = sorted({line["fault"] for line in lines})
    held = set(random.Random(seed).sample(names, round(share * len(names))))
    return [line for line in lines if line["fault"] not in held], held


def write(chosen: Sequence[str]) -> None:
    """Write the list of tests that `pytest` runs by default."""
    GATE.write_text(HEADER + "".join(f"{test}\n" for test in chosen), encoding="utf-8")
