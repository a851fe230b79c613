"""A process with eight CPUs: their number is fixed when JAX starts, and it has started here.

One such process takes the checks of a file one after the other: to start it anew for each, with
nothing compiled, takes a fifth of their time.
"""

import concurrent.futures.process
import functools
import importlib
import os
import traceback

import pytest
from support import children

DEVICES = 8


def _started():
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    assert len(jax.devices()) == DEVICES


def _called(module, function, arguments):
    """Runs there; what is raised comes back as text, which every process understands."""
    try:
        getattr(importlib.import_module(module), function)(*arguments)
    except BaseException:
        return traceback.format_exc()


def _process():
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES}"
    pool = children.pool(_started)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", flags)
        patch.setenv("JAX_PLATFORMS", "cpu")
        pool.submit(os.getpid).result()
    return pool


@functools.cache
def _process_of(module):
    return _process()


def run(module, function, *arguments, alone=False):
    """Calls `module.function(*arguments)`, which raises nothing.

    `alone`: in a process that ends with it, for what leaves JAX or the package changed behind it.
    """
    pool = _process() if alone else _process_of(module)
    try:
        error = pool.submit(_called, module, function, arguments).result()
    except concurrent.futures.process.BrokenProcessPool:
        _process_of.cache_clear()
        raise
    finally:
        if alone:
            pool.shutdown()
    assert error is None, error
