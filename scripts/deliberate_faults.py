"""Break the code on purpose and ask whether a test catches it.

`deliberate_faults.toml` lists small faults: a mask moved by one key, a sign, a dropped scale. This
script makes each of them in a copy of the working tree and runs tests there. A fault that no test
catches *lives*: a test is missing.

    python scripts/deliberate_faults.py
    python scripts/deliberate_faults.py --only 'band-*' ring-sends-backwards
    python scripts/deliberate_faults.py --selection all --jobs 8

An entry of the list:

    [band-sees-one-key-more]
    file = "pallas_flash/_problem/masks.py"
    old = "k <= q + self.high"
    new = "k <= q + self.high + 1"
    tests = ["test_masks.py"]
    keyword = "allowed"

`old` must be in the file exactly once; a test of the default selection checks that for every entry,
so the list stays with the code. `tests` are the names of files that should catch the fault, in
any folder. They run first and stop at the first failure; `keyword`, if there is one,
is pytest's `-k` for a first try, and only saves time. If the files stay green, the rest of the
selection runs:

    named    nothing more
    gate     what `pytest` runs by default
    all      everything that needs no GPU, with `-m extended`

A failure counts only if the same test passes without the fault. The exit status is 0 if every fault
is caught, else 1.
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
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from typing import NamedTuple

from scripts.command import Parser, UserError, command, parse_size

ROOT = pathlib.Path(__file__).parents[1]
LIST = pathlib.Path(__file__).with_suffix(".toml")

SELECTIONS = "named", "gate", "all"
EXTENDED = "-m", "extended or not extended"
# The test of this list is red wherever a text of it is replaced.
ARGUMENTS = "-q", "-x", "-p", "no:cacheprovider", "--ignore-glob=*test_deliberate_faults.py"
# Exit statuses of pytest.
GREEN, NOTHING_SELECTED = 0, 5
# Seconds after which a run counts as one without an end.
NO_END = 3600


class Fault(NamedTuple):
    """An entry of the list.

    Attributes:
        name: its name.
        file: what it changes, a path from the root.
        old: a text that is there exactly once.
        new: what takes its place.
        tests: names of the test files that are expected to see it.
        keyword: an expression for `pytest -k` that finds the tests which see it soonest; or "".
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    keyword: str = ""


class Outcome(NamedTuple):
    """The outcome of a fault.

    Attributes:
        caught: whether a test is red because of the fault, and green without it.
        by: the name of that test, or why there is none.
    """

    caught: bool
    by: str


class Red(NamedTuple):
    """Why a run of pytest was red.

    Attributes:
        by: the first test that failed, or how the run ended without one.
        test: that test, or "".
    """

    by: str
    test: str = ""


def read(path: pathlib.Path = LIST) -> list[Fault]:
    """Return the faults of a list."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Fault(name, **entry | {"tests": (*entry["tests"],)}) for name, entry in entries.items()]


def problems(fault: Fault, root: pathlib.Path = ROOT) -> list[str]:
    """Return what is wrong with an entry, in sentences; nothing for one that can be made."""
    found = []
    if not (root / fault.file).is_file():
        return [f"{fault.name}: there is no file {fault.file}."]
    count = (root / fault.file).read_text(encoding="utf-8").count(fault.old)
    if count != 1:
        found.append(f"{fault.name}: `old` must be in {fault.file} exactly once; found {count}.")
    if fault.old == fault.new:
        found.append(f"{fault.name}: `new` must be another text than `old`.")
    if not fault.tests:
        found.append(f"{fault.name}: `tests` must name a file.")
    for name in fault.tests:
        if len(files := paths(name, root)) != 1:
            found.append(f"{fault.name}: there must be one test file {name}; found {len(files)}.")
    return found


def paths(name: str, root: pathlib.Path) -> list[str]:
    """Return the test files of a name, in whatever folder."""
    return sorted(str(x.relative_to(root)) for x in (root / "tests").rglob(name))


class Tree:
    """A copy of the working tree, in which one fault at a time is made.

    Args:
        path: the copy.
        python: the interpreter that runs pytest there.
        cache: a folder for programs that JAX has compiled, which copies share.
        no_end: seconds after which a run of pytest is ended.
    """

    def __init__(
        self, path: pathlib.Path, python: str, cache: pathlib.Path, no_end: float = NO_END
    ):
        self.path, self._python, self._no_end = path, python, no_end
        compiled = {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        # The package of the copy comes before an installed one.
        here = {"PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu"}
        self._environment = {**os.environ, **compiled, **here}
        self._environment.pop("PYTHONPYCACHEPREFIX", None)
        self._green: dict[str, bool] = {}

    def attempt(self, fault: Fault, selection: str) -> Outcome:
        """Make a fault, run tests until one is red, and take the fault back."""
        files = [path for name in fault.tests for path in paths(name, self.path)]
        marks = EXTENDED if selection == "all" else ()
        runs = [[*marks, *files]]
        if fault.keyword:
            runs.insert(0, [*marks, "-k", fault.keyword, *files])
        if selection != "named":
            runs.append([*marks])
        for arguments in runs:
            with self._broken(fault):
                red = self._first_red(arguments)
            if red is not None:
                if red.test and not self._is_green(red.test):
                    return Outcome(False, f"{red.by} is red without the fault, too")
                return Outcome(True, red.by)
        return Outcome(False, "it lives")

    @contextlib.contextmanager
    def _broken(self, fault: Fault):
        path = self.path / fault.file
        whole = path.read_text(encoding="utf-8")
        try:
            self._write(path, whole.replace(fault.old, fault.new))
            yield
        finally:
            self._write(path, whole)

    @staticmethod
    def _write(path: pathlib.Path, text: str):
        path.write_text(text, encoding="utf-8")
        # Python takes bytecode for fresh if the text has the same size and second.
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            stale.unlink()

    def _first_red(self, arguments: Sequence[str]) -> Red | None:
        """Return the first test that fails; None if all are green."""
        run = [self._python, "-m", "pytest", *ARGUMENTS, *arguments]
        with subprocess.Popen(
            run,
            cwd=self.path,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=self._no_end)
            except subprocess.TimeoutExpired:
                return Red(f"no end after {self._no_end:g} s: pytest {' '.join(arguments)}")
            finally:
                # Tests start processes of their own, which a red one may leave.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode in (GREEN, NOTHING_SELECTED):
            return None
        if found := re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", output, re.MULTILINE):
            return Red(found[1], found[1])
        return Red(f"exit status {process.returncode}: pytest {' '.join(arguments)}")

    def _is_green(self, test: str) -> bool:
        """Whether a test passes without a fault."""
        if test not in self._green:
            collects = [] if "::" in test else ["--collect-only"]
            self._green[test] = self._first_red([*EXTENDED, *collects, test]) is None
        return self._green[test]


def copy_tree(to: pathlib.Path) -> None:
    """Copy the working tree as it is now, without what git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            f"`{ROOT}` must be a checkout that git can list; got {error}. Clone the repository."
        ) from error
    for name in sorted(set(names.decode().split("\0")) - {""}):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def choose(faults: list[Fault], patterns: Sequence[str]) -> list[Fault]:
    """Return the faults whose names match a pattern; all if there are none."""
    for pattern in patterns:
        if not any(fnmatch.fnmatch(fault.name, pattern) for fault in faults):
            raise UserError(
                f"--only must be names of faults, or patterns of them; got {pattern!r}, which is "
                f"none. They are in {LIST.name}."
            )
    return [x for x in faults if not patterns or any(fnmatch.fnmatch(x.name, y) for y in patterns)]


def attempt_all(faults: list[Fault], trees: Sequence[Tree], selection: str) -> list[Fault]:
    """Print what becomes of each fault, and return the faults that no test catches."""
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)
    living, printing = [], threading.Lock()

    def one(fault: Fault):
        tree, start = free.get(), time.perf_counter()
        try:
            outcome = tree.attempt(fault, selection)
        finally:
            free.put(tree)
        with printing:
            mark = "caught" if outcome.caught else "LIVES"
            seconds = time.perf_counter() - start
            print(f"{mark} {fault.name}: {outcome.by} ({seconds:.0f} s)", flush=True)
            if not outcome.caught:
                living.append(fault)

    with concurrent.futures.ThreadPoolExecutor(len(trees)) as pool:
        list(pool.map(one, faults))
    return living


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    flags = Parser(
        prog="deliberate_faults.py",
        description="Break the code on purpose and ask whether a test catches it.",
        allow_abbrev=False,
    )
    add = flags.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="these faults; patterns like ring-*")
    add(
        "--selection",
        choices=SELECTIONS,
        default="gate",
        help="what runs if the named tests stay green: nothing, pytest's default, or all tests",
    )
    add("--jobs", type=parse_size, default=1, metavar="N", help="copies of the tree at work")
    add("--python", default=sys.executable, metavar="FILE", help="the Python with pytest and JAX")
    return flags


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    flags = parser().parse_args(arguments)
    faults = choose(read(), flags.only)
    if wrong := [problem for fault in faults for problem in problems(fault)]:
        raise UserError(" ".join(wrong))
    if shutil.which(flags.python) is None:
        raise UserError(f"--python must be a program; got {flags.python!r}. Give its path.")
    with tempfile.TemporaryDirectory(prefix="deliberate-faults-") as folder:
        cache = pathlib.Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled"))
        make = functools.partial(Tree, python=flags.python, cache=cache)
        trees = []
        for n in range(min(flags.jobs, len(faults))):
            copy_tree(path := pathlib.Path(folder, f"tree-{n}"))
            trees.append(make(path))
        living = attempt_all(faults, trees, flags.selection)
    print(f"{len(faults) - len(living)} of {len(faults)} faults are caught.")
    return 1 if living else 0


if __name__ == "__main__":
    sys.exit(main())
