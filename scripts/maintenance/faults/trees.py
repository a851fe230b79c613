"""Copies of the working tree, in which tests run while one fault at a time is there."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scripts.maintenance.faults.listed import ROOT, Fault, paths

EXTENDED = "-m", "extended or not extended"
ARGUMENTS = "-q", "-p", "no:cacheprovider"
# Exit statuses of pytest.
GREEN, NOTHING_SELECTED = 0, 5
# Outcomes of a fault.
CAUGHT, LIVES, TIMEOUT, UNCLEAR = "caught", "lives", "timeout", "unclear"
# Folders that are no part of a tree without git.
LEFT_OUT = ".git", ".cache", ".venv*", "__pycache__", ".hypothesis", "build", "dist", "runs", "site"


class Outcome(NamedTuple):
    """The outcome of a fault.

    Attributes:
        kind: `CAUGHT` if a test is red because of the fault, and green without it; `UNCLEAR` if it
            is red without it, too; `LIVES` if all are green; `TIMEOUT` if a run was too long.
        by: the test, or what else tells how it ended.
        test: the first test that is red, or "".
        seconds: what that test takes when it is green, with its fixtures.
    """

    kind: str
    by: str
    test: str = ""
    seconds: float = 0.0


class Red(NamedTuple):
    """Why a run of pytest was not green.

    Attributes:
        by: the first test that failed, or how the run ended without one.
        test: that test, or "".
        ended: whether the run ended within its limit.
    """

    by: str
    test: str = ""
    ended: bool = True


class Tree:
    """A copy of the working tree, in which one fault at a time is made.

    Args:
        path: the copy.
        python: the interpreter that runs pytest there.
        cache: a folder for programs that JAX has compiled, which copies share.
        limit: seconds after which a run of pytest is ended.
        green: seconds of each test that is known to be green without a fault, which copies share.
    """

    def __init__(
        self,
        path: pathlib.Path,
        python: str,
        cache: pathlib.Path,
        limit: float,
        green: dict[str, float] | None = None,
    ):
        self.path, self._python, self._limit = path, python, limit
        compiled = {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        # The package of the copy comes before an installed one.
        here = {"PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu"}
        self._environment = {**os.environ, **compiled, **here}
        self._environment.pop("PYTHONPYCACHEPREFIX", None)
        self._green = {} if green is None else green

    def attempt(self, fault: Fault, first: Sequence[str] = ()) -> Outcome:
        """Make a fault, run its test files until a test is red, and take the fault back.

        Args:
            fault: the fault.
            first: tests that run before the files.
        """
        files = [path for name in fault.tests for path in paths(name, self.path)]
        tries = [[*EXTENDED, *first]] if first else []
        if fault.keyword:
            tries.append(["-k", fault.keyword, *files])
        return self.attempt_with(fault, [*tries, files])

    def attempt_with(self, fault: Fault, tries: Iterable[Sequence[str]]) -> Outcome:
        """Make a fault, and run pytest with each of `tries` until a test is red."""
        outcome = Outcome(LIVES, "it lives")
        for arguments in tries:
            with self._broken(fault):
                red = self._first_red(arguments)
            if red is None:
                continue
            if red.test:
                return self._confirmed(red)
            if not red.ended:
                # A mutant's loop may be as good, and only longer.
                ends = fault.at is None and self._ends(arguments)
                return Outcome(CAUGHT if ends else TIMEOUT, red.by)
            # A name of a test may be gone with the fault, so the next run tells which test sees it.
            outcome = Outcome(CAUGHT, red.by)
        return outcome

    def tests(self) -> list[str]:
        """Return the default selection of all tests."""
        _, output = self._run(["--collect-only", "tests"])
        if not (items := re.findall(r"^tests/\S+::.+$", output or "", re.MULTILINE)):
            raise OSError(f"pytest finds no tests: {output}")
        return items

    @contextlib.contextmanager
    def _broken(self, fault: Fault):
        path = self.path / fault.file
        whole = path.read_text(encoding="utf-8")
        try:
            self._write(path, fault.broken(whole))
            yield
        finally:
            self._write(path, whole)

    @staticmethod
    def _write(path: pathlib.Path, text: str):
        path.write_text(text, encoding="utf-8")
        # Python takes bytecode for fresh if the text has the same size and second.
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            stale.unlink()

    def _run(self, arguments: Sequence[str]) -> tuple[int, str | None]:
        """Return the exit status and the output of pytest; None if it took too long."""
        with subprocess.Popen(
            [self._python, "-m", "pytest", *ARGUMENTS, *arguments],
            cwd=self.path,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=self._limit)
            except subprocess.TimeoutExpired:
                return -1, None
            finally:
                # Tests start processes of their own, which a red one may leave.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output

    def _first_red(self, arguments: Sequence[str]) -> Red | None:
        """Return the first test that fails; None if all are green."""
        status, output = self._run(["-x", *arguments])
        if output is None:
            return Red(f"no end after {self._limit:g} s: pytest {_shortly(arguments)}", ended=False)
        if status in (GREEN, NOTHING_SELECTED):
            return None
        if match := re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", output, re.MULTILINE):
            return Red(match[1], match[1])
        return Red(f"exit status {status}: pytest {_shortly(arguments)}")

    def _ends(self, arguments: Sequence[str]) -> bool:
        """Whether a run without a fault is green within the limit."""
        key = " ".join(arguments)
        if key not in self._green and self._first_red(arguments) is None:
            self._green[key] = 0.0
        return key in self._green

    def _confirmed(self, red: Red) -> Outcome:
        """Return the outcome of a fault that makes a test red."""
        test = red.test
        if test not in self._green:
            collects = [] if "::" in test else ["--collect-only"]
            times = ["--durations=0", "--durations-min=0"]
            status, output = self._run(["-x", *EXTENDED, *collects, *times, test])
            if output is None or status not in (GREEN, NOTHING_SELECTED):
                return Outcome(UNCLEAR, f"{red.by} is red without the fault, too")
            seconds = re.findall(r"^([\d.]+)s (?:setup|call)", output, re.MULTILINE)
            self._green[test] = sum(map(float, seconds))
        return Outcome(CAUGHT, red.by, test, self._green[test])


def _shortly(arguments: Sequence[str]) -> str:
    text = " ".join(arguments)
    return text if len(text) < 200 else f"{text[:200]}..."


def copy_tree(to: pathlib.Path) -> None:
    """Copy the working tree as it is now, without what git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        # A copy of the files alone.
        shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
        return
    for name in sorted(set(names.decode().split("\0")) - {""}):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
