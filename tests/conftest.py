"""Markers, and a count of kernel cases: a suite that silently skips its kernels shows a zero."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# What somebody tuned on this machine must not change what is tested.
os.environ["PALLAS_FLASH_TUNED"] = "0"

# pytest-xdist runs one process a core; JAX's own threads would fight over them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

_KERNEL_CASES = "kernel_cases"


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; select with -m gpu")
    config.addinivalue_line(
        "markers", "extended: many more random problems; select with -m extended"
    )


def pytest_collection_modifyitems(config, items):
    expression = config.option.markexpr
    chosen = {name for name in ("gpu", "extended") if name in expression}
    kept, dropped = [], []
    for item in items:
        wanted = all(
            item.get_closest_marker(name) is None or name in chosen for name in ("gpu", "extended")
        )
        (kept if wanted else dropped).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


@pytest.fixture
def kernel_case(record_property):
    """Counts a test as one that ran the kernels."""
    record_property(_KERNEL_CASES, 1)


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", [])
    ran = sum(name == _KERNEL_CASES for report in reports for name, _ in report.user_properties)
    terminalreporter.write_line(f"kernel cases that ran: {ran}")
