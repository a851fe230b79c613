"""The list of faults that are written by hand, `scripts/maintenance/deliberate_faults.toml`."""

from __future__ import annotations

import pathlib
import tomllib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[3]
LIST = ROOT / "scripts" / "maintenance" / "deliberate_faults.toml"


class Fault(NamedTuple):
    """One change of a source file.

    Attributes:
        name: its name.
        file: what it changes, a path from the root.
        old: a text that is there exactly once, or at `at`.
        new: what takes its place.
        tests: names of the test files that are expected to see it.
        keyword: an expression for `pytest -k` that finds the tests which see it soonest; or "".
        at: for a mutant, where `old` is in the file, in characters; None for a fault of the list.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    keyword: str = ""
    at: int | None = None

    def broken(self, text: str) -> str:
        """Return the text of the file with the fault."""
        if self.at is None:
            return text.replace(self.old, self.new)
        return text[: self.at] + self.new + text[self.at + len(self.old) :]


def read(path: pathlib.Path = LIST) -> list[Fault]:
    """Return the faults of a list."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Fault(name, **entry | {"tests": (*entry["tests"],)}) for name, entry in entries.items()]


def problems(fault: Fault, root: pathlib.Path = ROOT) -> list[str]:
    """Return what is wrong with an entry, in sentences; nothing for one that can be made."""
    errors = []
    if not (root / fault.file).is_file():
        return [f"{fault.name}: there is no file {fault.file}."]
    count = (root / fault.file).read_text(encoding="utf-8").count(fault.old)
    if fault.at is None and count != 1:
        errors.append(f"{fault.name}: `old` must be in {fault.file} exactly once; found {count}.")
    if fault.old == fault.new:
        errors.append(f"{fault.name}: `new` must be another text than `old`.")
    if not fault.tests:
        errors.append(f"{fault.name}: `tests` must name a file.")
    for name in fault.tests:
        if (count := len(paths(name, root))) != 1:
            errors.append(f"{fault.name}: there must be one test file {name}; found {count}.")
    return errors


def paths(name: str, root: pathlib.Path = ROOT) -> list[str]:
    """Return the test files of a name, in whatever folder."""
    return sorted(str(x.relative_to(root)) for x in (root / "tests").rglob(name))
