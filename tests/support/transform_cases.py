"""Shared sizes, small tiles, arguments and comparisons of the tests of transformations."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases

from pallas_flash import attention
from pallas_flash._backends import xla
from pallas_flash.tuning import Tile, TileSizes


class Sizes(NamedTuple):
    B: int = 4
    T: int = 21
    S: int = 35
    N: int = 6
    K: int = 2
    H: int = 8
    V: int = 5


# No two of B, T, S, N, K, N / K, H and V agree, so a swapped axis cannot pass unseen.
SIZES = Sizes()
BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = SIZES

TILE_SIZES = TileSizes(forward=Tile(16, 16), dkv=Tile(16, 16), dq=Tile(16, 16))


def make_tiles_small(set_attribute):
    """Several tiles along both axes, the last ones ragged."""
    set_attribute(xla, "BLOCK_Q", 8)
    set_attribute(xla, "BLOCK_KV", 16)


BLOCKED = ("xla", "interpret")
# Both take the same way through a transformation: by default one of them goes it.
by_xla = pytest.mark.parametrize("implementation", cases.default(["xla"], BLOCKED))

# Some rows see nothing: those past a length, and all of the example without keys.
MASKED = ("key_value_seq_lengths", "query_seq_lengths")
# Everything that computes positions.
POSITIONS = (*MASKED, "segment_ids", "query_offset")

FLOATS = ("query", "key", "value", "bias", "scale")


def attention_by(implementation: str) -> Callable:
    """`attention`, in several tiles."""
    kernels = implementation in ("interpret", "triton")
    tiles = {"config": TILE_SIZES} if kernels else {}
    return functools.partial(attention, implementation=implementation, **tiles)


def draw(name: str, rng: np.random.Generator, sizes: Sizes = SIZES) -> Any:
    """One argument of `attention`, or the cotangent `do`."""
    B, T, S, N, K, H, V = sizes
    floats = {
        "query": (B, T, N, H),
        "key": (B, S, K, H),
        "value": (B, S, K, V),
        "do": (B, T, N, V),
        "bias": (N, 1, S),
    }
    if name in floats:
        return jnp.asarray(rng.normal(size=floats[name]), jnp.float32)
    if name == "scale":
        return jnp.asarray(rng.uniform(0.2, 0.6), jnp.float32)
    if name == "mask":
        return jnp.asarray(rng.random((B, 1, T, S)) < 0.8)
    if name == "segment_ids":
        ids = (rng.integers(0, 3, size=(B, length)) for length in (T, S))
        return tuple(jnp.asarray(np.sort(x), jnp.int32) for x in ids)
    if name in ("query_positions", "key_value_positions"):
        shape = (B, T) if name == "query_positions" else (1, S)
        return jnp.asarray(rng.integers(-5, S, shape), jnp.int32)
    # Lengths, among them one that is zero, and offsets.
    limit = T if name == "query_seq_lengths" else S
    numbers = rng.permutation([0, limit, *rng.integers(1, limit, size=B - 2)])
    return jnp.asarray(numbers, jnp.int32)


def draw_all(*names: str, seed: int = 0, sizes: Sizes = SIZES) -> dict[str, Any]:
    """Arguments by name, query, key and value among them."""
    rng = np.random.default_rng(seed)
    return {name: draw(name, rng, sizes) for name in ("query", "key", "value", *names)}


def normal_like(tree, seed: int = 1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)


def masked(implementation: str, **options) -> Callable:
    """Causal attention of a dictionary of arguments."""
    return lambda arguments: attention_by(implementation)(**arguments, is_causal=True, **options)


def output_and_gradients(fn: Callable, floats=FLOATS) -> Callable:
    """fn(arguments) to its output and the gradients by those named in `floats`."""

    def run(arguments):
        inputs = {name: arguments[name] for name in floats if name in arguments}
        out, pull = jax.vjp(lambda inputs: fn(arguments | inputs), inputs)
        [gradients] = pull(normal_like(out))
        return out, gradients

    return run
