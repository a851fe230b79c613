"""Markers, cheap compilation, and a count of kernel cases: skipping all kernels shows a zero."""

import os
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))

# What somebody tuned on this machine must not change what is tested.
os.environ["PALLAS_FLASH_TUNED"] = "0"

# pytest-xdist runs one process a core; JAX's own threads would fight over them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Here programs compile for seconds and run once, for milliseconds. Up to 0.10 XLA can emit a CPU's
# fusions without MLIR, which takes a third of the time; later versions refuse the flag.
if jax.__version_info__ < (0, 11):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"--xla_cpu_use_fusion_emitters=false {flags}"


@pytest.fixture(scope="session", autouse=True)
def compile_cheaply():
    """Without LLVM's optimizations, which GPUs need; `oracle.optimized` asks for them."""
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")


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
