"""What the tests of transformations share: sizes, small tiles, arguments, comparisons."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases

from pallas_flash import _xla, attention
from pallas_flash.tuning import Tile, TileSizes

# No two of B, T, S, N, K, N / K, H and V agree, so a swapped axis cannot pass unseen.
BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 21, 35, 6, 2, 8, 5

TILE_SIZES = TileSizes(forward=Tile(16, 16), dkv=Tile(16, 16), dq=Tile(16, 16))


def make_tiles_small(set_attribute):
    """Several tiles along both axes, the last ones ragged."""
    set_attribute(_xla, "BLOCK_Q", 8)
    set_attribute(_xla, "BLOCK_KV", 16)


BLOCKED = ("xla", "interpret")
# Both take the same way through a transformation: by default one of them goes it.
by_xla = pytest.mark.parametrize("implementation", cases.default(["xla"], BLOCKED))
by_kernels = pytest.mark.parametrize("implementation", cases.default(["interpret"], BLOCKED))

# Some rows see nothing: those past a length, and all of the example without keys.
MASKED = ("key_value_seq_lengths", "query_seq_lengths")
# Everything that computes positions.
POSITIONS = (*MASKED, "segment_ids", "query_offset")

FLOATS = ("query", "key", "value", "bias", "scale")


def by(implementation: str) -> Callable:
    """`attention`, in several tiles."""
    kernels = implementation in ("interpret", "triton")
    tiles = {"tile_sizes": TILE_SIZES} if kernels else {}
    return functools.partial(attention, implementation=implementation, **tiles)


def draw(name: str, rng: np.random.Generator) -> Any:
    """One argument of `attention`."""
    if name in ("query", "key", "value"):
        rows = {"query": (Q_LEN, HEADS, HEAD_DIM), "key": (KV_LEN, KV_HEADS, HEAD_DIM)}
        shape = (BATCH, *rows.get(name, (KV_LEN, KV_HEADS, VALUE_DIM)))
        return jnp.asarray(rng.normal(size=shape), jnp.float32)
    if name == "scale":
        return jnp.asarray(rng.uniform(0.2, 0.6), jnp.float32)
    if name == "bias":
        return jnp.asarray(rng.normal(size=(HEADS, 1, KV_LEN)), jnp.float32)
    if name == "mask":
        return jnp.asarray(rng.random((BATCH, 1, Q_LEN, KV_LEN)) < 0.8)
    if name == "segment_ids":
        ids = (rng.integers(0, 3, size=(BATCH, length)) for length in (Q_LEN, KV_LEN))
        return tuple(jnp.asarray(np.sort(x), jnp.int32) for x in ids)
    if name in ("query_positions", "key_value_positions"):
        shape = (BATCH, Q_LEN) if name == "query_positions" else (1, KV_LEN)
        return jnp.asarray(rng.integers(-5, KV_LEN, shape), jnp.int32)
    # Lengths, among them one that is zero, and offsets.
    limit = Q_LEN if name == "query_seq_lengths" else KV_LEN
    numbers = rng.permutation([0, limit, *rng.integers(1, limit, size=BATCH - 2)])
    return jnp.asarray(numbers, jnp.int32)


def draw_all(*names: str, seed: int = 0) -> dict[str, Any]:
    """Arguments by name, query, key and value among them."""
    rng = np.random.default_rng(seed)
    return {name: draw(name, rng) for name in ("query", "key", "value", *names)}


def normal_like(tree, seed: int = 1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)


def masked(implementation: str, **options) -> Callable:
    """Causal attention of a dictionary of arguments."""
    return lambda arguments: by(implementation)(**arguments, is_causal=True, **options)


def output_and_gradients(fn: Callable, floats=FLOATS) -> Callable:
    """fn(arguments) to its output and the gradients by those named in `floats`."""

    def run(arguments):
        inputs = {name: arguments[name] for name in floats if name in arguments}
        out, pull = jax.vjp(lambda inputs: fn(arguments | inputs), inputs)
        [gradients] = pull(normal_like(out))
        return out, gradients

    return run


def assert_close(got, want):
    """The same structure, shapes and dtypes, and half of the digits agree."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        tolerance = float(jnp.finfo(y.dtype).eps) ** 0.5
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        infinite = np.isinf(y)
        np.testing.assert_array_equal(x[infinite], y[infinite])
        x, y = x[~infinite], y[~infinite]
        assert np.linalg.norm(x - y) <= tolerance * (np.linalg.norm(y) or 1.0)


def assert_same_bits(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)
