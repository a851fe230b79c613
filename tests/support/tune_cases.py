"""Shared calls, tiles and winners of the tests of tuning. Fixtures are in tune_fixtures.py."""

import contextlib
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash
from pallas_flash import __main__
from pallas_flash._autodiff import vjp
from pallas_flash._call import tune
from pallas_flash._execution import tile_choice
from pallas_flash._jax import compat, device
from pallas_flash._problem.features import features_of
from pallas_flash._problem.tile_sizes import KERNELS, tile_of
from pallas_flash._selection import tuned
from pallas_flash.tuning import BackwardTile, DqTile, ForwardTile, Tile, TileSizes

# None of them is in the table.
FAST, FASTER, OTHER = Tile(32, 32, 1, 1), Tile(32, 16, 1, 1), Tile(16, 32, 1, 1)
MOSAIC = TileSizes(
    forward=ForwardTile(3, 96), backward=BackwardTile(128), dkv=BackwardTile(64), dq=DqTile(2, 64)
)
TRITON = TileSizes(forward=FAST, dkv=FAST, dq=FAST)

newer = pytest.mark.skipif(
    not compat.has_mosaic_gpu(), reason='JAX is too old for "mosaic"; see test_select_hopper'
)


def gpu_here(monkeypatch, kind):
    monkeypatch.setattr(device, "target", lambda: device.Target(kind, True, (9, 0)))


def zeros_for_random_numbers(monkeypatch):
    """Replace random inputs as large as a model's, which take seconds: only their shapes count."""
    monkeypatch.setattr(jax.random, "normal", lambda key, shape: jnp.zeros(shape))


def array(length=24, heads=2, size=16, dtype=jnp.float32, batch=1):
    # Made by NumPy: `jnp.ones` compiles a program for each shape.
    return jax.device_put(np.ones((batch, length, heads, size), dtype))


def arguments(q_len=24, kv_len=40, kv_heads=2, value_dim=16, **changed):
    """Return arguments of `attention`; the sizes are those of `array`, or themselves arguments."""
    sizes = {
        name: changed.pop(name) for name in ("heads", "size", "dtype", "batch") & changed.keys()
    }
    shared = {name: x for name, x in sizes.items() if name != "heads"}
    key = array(kv_len, kv_heads, **shared)
    value = array(kv_len, kv_heads, **(shared | {"size": value_dim}))
    return dict(query=array(q_len, **sizes), key=key, value=value) | changed


def problem(**changed):
    changed = arguments(**changed)
    return tune._problem([changed.pop(name) for name in ("query", "key", "value")], changed)


def tiles_of(monkeypatch, **changed) -> TileSizes:
    """Return the tiles that a call of `attention` computes with."""
    used = []
    with monkeypatch.context() as patch:
        patch.setattr(vjp, "attend", lambda plan, *_: used.append(plan) or (jnp.zeros(()), None))
        pallas_flash.attention(**arguments(**changed))
    [plan] = used
    forward, backward = plan.forward.tiles, plan.backward.tiles
    return TileSizes(
        **{kernel: tile_of(forward, kernel) or tile_of(backward, kernel) for kernel in KERNELS}
    )


def features(**changed):
    return features_of(problem(**changed))


def table(**changed) -> TileSizes:
    return tile_choice.tiles_of_call(problem(**changed), "triton", None)


@contextlib.contextmanager
def warned(count, text=""):
    """Everything inside gives this many warnings in all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert len(caught) == count, [str(warning.message) for warning in caught]
    assert all(text in str(warning.message) for warning in caught)


def store(tiles=TRITON, gpu="NVIDIA H200", **changed):
    return tuned.store(features(**changed), gpu, tiles)


def command(monkeypatch, *words):
    """The exit code of `python -m pallas_flash tune`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["pallas_flash", "tune", *words])
    try:
        return __main__.main()
    except SystemExit as end:  # Of argparse.
        return end.code


def mistake(capsys):
    """The last line on stderr, which is all but for argparse's usage."""
    *usage, line = capsys.readouterr().err.splitlines()
    assert not usage or usage[0].startswith("usage: ")
    # The command does not know which flags the others have.
    assert re.match(r"python -m pallas_flash( tune)?: error: ", line)
    return line
