"""The processor time of each test file, against a budget.

    pytest -n auto --budget=.ci/budget.json "--unit=$(python .ci/calibrate.py)"

A budget is in units, so that it holds on every machine: .ci/calibrate.py says what a unit is. The
file has a table for each version of JAX: units by test file, and of what a process takes apart from
tests. Only `--write-budget` changes it.
"""

import collections
import importlib.metadata
import json
import os
import pathlib

import pytest

# The run is red when the files together take this many times their budgets: on a machine in the
# cloud the unit itself varies by a tenth up and down, and so does the time of the same tests.
RED = 1.5
# A file is named when it takes this many times its budget, and this many units more: what a small
# file takes depends on which files ran before it in its process.
NAMED, NAMED_UNITS = 1.5, 1
# Each process of a run imports JAX and collects all tests.
COLLECTION = "start and collection, each process"


def pytest_addoption(parser):
    group = parser.getgroup("budget", "the processor time of each test file")
    group.addoption("--budget", help="a file; fail when the tests take more than its budgets")
    group.addoption("--write-budget", action="store_true", help="write the file of --budget anew")
    group.addoption("--unit", help="what .ci/calibrate.py printed on this machine")


def pytest_configure(config):
    if config.option.budget:
        config.pluginmanager.register(Meter(config))
    elif config.option.unit or config.option.write_budget:
        raise pytest.UsageError("`--unit` and `--write-budget` need `--budget`.")


def used():
    """Processor seconds of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def compare(took, budget, exists):
    """Return lines that name files, what the budget allows together, and whether that is exceeded.

    Args:
        took: units by test file.
        budget: likewise; without an entry a file has no units of its own.
        exists: whether there is a file of a name. A file without an entry may be one that was
            moved, so such files may take what the entries of files that are gone have left over.
    """
    new = {name: units for name, units in took.items() if name not in budget}
    gone = sum(units for name, units in budget.items() if not exists(name))
    allowed = sum(budget[name] for name in took.keys() - new) + min(sum(new.values()), gone)
    lines = [f"new, without a budget: {name}, {units:.1f} units" for name, units in new.items()]
    lines += [
        f"over its budget: {name}, {took[name]:.1f} units of {budget[name]:.1f}"
        for name in sorted(took.keys() - new)
        if took[name] > max(NAMED * budget[name], budget[name] + NAMED_UNITS)
    ]
    return lines, allowed, sum(took.values()) > RED * allowed > 0


class Meter:
    """Measures a run of pytest, in each of its processes, and tells of it in the one that ends it.

    Args:
        config: pytest's.
    """

    def __init__(self, config):
        self.path = pathlib.Path(config.option.budget)
        self.writes = config.option.write_budget
        self.root = config.rootpath
        self.jax = "jax " + ".".join(importlib.metadata.version("jax").split(".")[:2])
        try:
            self.version, unit = config.option.unit.split()
            self.unit = float(unit)
        except (AttributeError, ValueError):
            raise pytest.UsageError(
                "`--unit` must be the line that .ci/calibrate.py prints on this machine; "
                f"got {config.option.unit!r}."
            ) from None
        try:
            self.budgets = json.loads(self.path.read_text())
        except FileNotFoundError:
            if not self.writes:
                raise pytest.UsageError(f"`--budget` must be a file; got {self.path}.") from None
            self.budgets = {}
        if self.budgets.get("calibration") != self.version:
            if not self.writes:
                raise pytest.UsageError(
                    f"`--unit` must be of calibration {self.budgets.get('calibration')}, like "
                    f"{self.path}; got {self.version}. Rewrite that file with `--write-budget`."
                )
            self.budgets = {"calibration": self.version}
        self.seconds = collections.Counter()
        self.last = 0.0
        self.lines, self.red = [], ""

    def pytest_runtestloop(self):
        self.last = used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        # Time between two reports counts for the second, so that none is lost.
        report = yield
        now = used()
        report.processor_seconds, self.last = now - self.last, now
        return report

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.split("::")[0]] += getattr(report, "processor_seconds", 0)

    # The last of the wrappers: workers have ended, and pytest has not printed its summary.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session):
        yield
        if not hasattr(session.config, "workerinput"):
            workers = getattr(session.config.option, "tx", None) or []
            self.finish(1 + len(workers), session.exitstatus == pytest.ExitCode.OK)
            if self.red and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def finish(self, processes, passed):
        """Fill `lines` and `red`, or write the budget of tests that passed."""
        total = used() / self.unit
        took = {name: seconds / self.unit for name, seconds in self.seconds.items()}
        start = total - sum(took.values())
        self.lines = [
            f"processor time: {total * self.unit:.0f} s, which are {total:.1f} units; "
            f"{start:.1f} of them for start and collection in {processes} processes"
        ]
        took[COLLECTION] = start / processes
        table = self.budgets.get(self.jax, {})

        def exists(name):
            return name == COLLECTION or (self.root / name).exists()

        if self.writes and not passed:
            self.lines.append(f"{self.path} is as it was, because the run failed")
        elif self.writes:
            table = {name: units for name, units in (table | took).items() if exists(name)}
            self.budgets[self.jax] = {name: round(table[name], 2) for name in sorted(table)}
            self.path.write_text(json.dumps(self.budgets, indent=1, sort_keys=True) + "\n")
        elif not table:
            self.lines.append(f"{self.path} has no budget for {self.jax}")
        else:
            lines, allowed, over = compare(took, table, exists)
            self.lines += lines
            sentence = f"{sum(took.values()):.1f} units, of a budget of {allowed:.1f} ({self.path})"
            if over:
                self.red = (
                    f"The tests took {sentence}: make them cheaper, or commit the budget that "
                    "the nightly run writes, and say why they take more."
                )
            else:
                self.lines.append(f"the tests took {sentence}")

    def pytest_terminal_summary(self, terminalreporter):
        for line in self.lines:
            terminalreporter.write_line(line)
        if self.red:
            terminalreporter.write_line(self.red, red=True)
