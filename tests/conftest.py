"""Cheap compilation, fixtures, and a count of kernel cases: skipping all shows a zero."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

# NumPy's threads spin while they wait for work: in one process they took two thirds of an emulated
# kernel's CPU time, and the workers of pytest-xdist, one a core, would fight over the cores. NumPy
# reads this when it is imported; pyproject.toml turns off the plugin that imports it earlier.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import pytest
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

sys.path.insert(0, str(Path(__file__).parent))

from support import selection

pytest_plugins = ["support.budget"]

# Programs compile for seconds and run once, for milliseconds, so those that have not changed are
# taken from an earlier run. JAX's key of a program has its text, its options and its compiler.
COMPILED = Path(__file__).parents[1] / ".cache" / "jax"
KEEP_DAYS = 7
CACHE = {
    "jax_compilation_cache_dir": str(COMPILED),
    "jax_persistent_cache_min_compile_time_secs": 0.05,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
# A compiled program has a few, see `mappings`.
MOST_MAPPINGS = 20_000
ended_tests = itertools.count(1)

# Processes share a GPU: none may keep memory that it does not use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

# Tiles that were tuned on this machine must not change the tests.
os.environ["PALLAS_FLASH_TUNED"] = "0"

# Here programs compile for seconds and run once, for milliseconds. So they are not cut into parts
# that are compiled side by side. Up to 0.11 XLA can emit a CPU's fusions without MLIR, which takes
# a third to a half of the time: a flag up to 0.10, and then an option of the backend. Since 0.11
# it loads MLIR's dialects once for several programs by itself.
cheap = "--xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    cheap += " --xla_cpu_use_fusion_emitters=false"
    new_context, shared_context = mlir.make_ir_context, functools.cache(mlir.make_ir_context)
    # A program that is lowered within another one's lowering would become a part of its module.
    mlir.make_ir_context = lambda: new_context() if ir.Context.current else shared_context()
elif jax.__version_info__ < (0, 12):
    cheap += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
os.environ["XLA_FLAGS"] = f"{cheap} {os.environ.get('XLA_FLAGS', '')}"


@pytest.fixture(scope="session", autouse=True)
def compile_cheaply():
    """Without LLVM's optimizations, which GPUs need; `oracle.optimized` asks for them."""
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")


@pytest.fixture
def ieee_products():
    """TF32 on a GPU would hide in its own error what some tests look for."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def small_tiles(monkeypatch):
    """See `transform_cases.make_tiles_small`."""
    from support.transform_cases import make_tiles_small

    make_tiles_small(monkeypatch.setattr)


# Fixtures for a run of the trainer; tiny_run.py takes a while to import.


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of a few texts that repeat themselves, which even a tiny model can learn."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "sub").mkdir()
    for i, word in enumerate(["apple", "banana", "cherry", "damson", "elder", "fig", "grape"]):
        (folder / ("sub" if i % 2 else ".") / f"{word}.txt").write_text(f"a {word} a day, " * 40)
    return folder


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """A folder for compiled programs."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compile_once(compiled):
    from support.tiny_run import compiling_into

    with compiling_into(compiled):
        yield


@pytest.fixture
def config(corpus, tmp_path):
    from support.tiny_run import TINY

    return dataclasses.replace(TINY, data=str(corpus), out_dir=str(tmp_path / "run"))


@pytest.fixture(scope="session")
def finished(corpus, compiled, tmp_path_factory):
    """An uninterrupted run: its settings and its result."""
    from support.tiny_run import TINY, compiling_into

    from models.training.loop import train

    out_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    config = dataclasses.replace(TINY, data=str(corpus), out_dir=str(out_dir))
    with compiling_into(compiled):
        return config, train(config)


_KERNEL_CASES = "kernel_cases"


def forget_old_programs():
    """Removes those of a week ago, or the folder would grow with every change."""
    for path in COMPILED.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # Another process may remove it, too.
            if path.stat().st_mtime < time.time() - KEEP_DAYS * 86400:
                path.unlink()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # A GPU's programs are compiled once for all processes, which get that from this one.
    if config.option.markexpr.startswith("gpu") and not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        # Freed memory stays with a process. To map that of the oracle and the compiler anew each
        # time took a tenth of the time of ten programs. glibc reads this when a worker is started.
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**32))
        os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**32))
    elif "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        forget_old_programs()
        for name, value in CACHE.items():
            jax.config.update(name, value)
            # For the processes that tests start.
            os.environ[name.upper()] = str(value)
    selection.configure(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A worker gets its share of the tests in a row, one that is idle half of what another has.

    So most files run in one worker, which compiles what their tests share once, and all workers end
    together: chunks, which are pytest-xdist's default, are tests by number, of unlike length.
    """
    if config.option.dist == "load" and not config.option.markexpr.startswith("gpu"):
        from xdist.scheduler import WorkStealingScheduling

        return WorkStealingScheduling(config, log)


def pytest_ignore_collect(collection_path, config):
    """Ignore files without tests of `-m gpu ...`: importing them takes each worker a while."""
    python = collection_path.suffix == ".py" and config.option.markexpr.startswith("gpu")
    return True if python and "mark.gpu" not in collection_path.read_text() else None


def pytest_addoption(parser):
    selection.add_options(parser)


def pytest_collection_modifyitems(config, items):
    # The workers of pytest-xdist must find the same names, and an address is another in each.
    if addresses := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(
            f"Ids must be the same in each process; got {addresses}. Add `ids`."
        )
    selection.select(config, items)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["selection"] = node.config.option.markexpr, node.config.changed


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    selection.remember(node.config, getattr(node, "workeroutput", {}))


def pytest_collection_finish():
    """Keep imports out of garbage collection: looking through them takes a twelfth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_runtest_teardown():
    """Give back what programs keep, before there is too much of it."""
    if jax.__version_info__ < (0, 11):
        shared_context.cache_clear()  # A context of MLIR's keeps every constant of its programs.
    if next(ended_tests) % 20 == 0 and mappings() > MOST_MAPPINGS:
        jax.clear_caches()


def mappings() -> int:
    """Return how many mappings of memory this process has. Beyond 65530 of Linux LLVM crashes."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


@pytest.fixture
def kernel_case(record_property):
    """Counts a test as one that ran the kernels."""
    record_property(_KERNEL_CASES, 1)


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", [])
    ran = sum(name == _KERNEL_CASES for report in reports for name, _ in report.user_properties)
    terminalreporter.write_line(f"kernel cases that ran: {ran}")
    selection.report(terminalreporter)
