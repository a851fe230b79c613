"""Shared sizes, arrays, comparisons and layers of the tests of `pallas_flash.flax`."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from support.compare import assert_close  # noqa: F401  For the tests of the layers.

from pallas_flash.flax import SelfAttention, apply_rope, attention_fn

# No two sizes agree, so a swapped axis cannot pass unseen.
Q_LEN, KV_LEN, NUM_HEADS, HEAD_DIM, V_DIM = 5, 7, 4, 8, 6
FEATURES = NUM_HEADS * HEAD_DIM

# The same on every machine; what the automatic choice takes is tested with SelfAttention.
OURS = functools.partial(attention_fn, implementation="xla")


def normal(seed: int, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """Rounded by NumPy: `jnp.asarray` compiles a program for each shape."""
    x = np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(x.astype(jnp.dtype(dtype)))


def qkv(batch=(2,), dtype=jnp.float32, num_kv_heads=NUM_HEADS, v_dim=HEAD_DIM):
    return (
        normal(1, (*batch, Q_LEN, NUM_HEADS, HEAD_DIM), dtype),
        normal(2, (*batch, KV_LEN, num_kv_heads, HEAD_DIM), dtype),
        normal(3, (*batch, KV_LEN, num_kv_heads, v_dim), dtype),
    )


def random_mask(shape: tuple[int, ...], dtype=jnp.bool_) -> jax.Array:
    mask = np.random.default_rng(4).random(shape) < 0.5
    # Every query sees key 0, because a query that sees nothing is where Flax differs.
    mask[..., 0] = True
    return jax.device_put(mask.astype(jnp.dtype(dtype)))


def causal_mask(q_len: int = Q_LEN, kv_len: int = KV_LEN) -> jax.Array:
    return jnp.tril(jnp.ones((q_len, kv_len), bool))


def distance(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def assert_as_exact_as(got, want, exact) -> None:
    """Same shapes and dtypes as `want`, and at most twice its error (or two roundings)."""
    for a, b, c in zip(*map(jax.tree.leaves, (got, want, exact)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert distance(a, c) <= 2 * max(distance(b, c), float(jnp.finfo(b.dtype).eps))


def output_and_gradients(fn: Callable, arrays: tuple, cotangent: jax.Array):
    @jax.jit
    def run(arrays, cotangent):
        out, pull = jax.vjp(fn, *arrays)
        return out, pull(cotangent.astype(out.dtype))

    return run(arrays, cotangent)


class Sower:
    """Stands for a module of linen or nnx: keeps what is sown."""

    def __init__(self):
        self.sown = {}

    def sow(self, collection, name, value):
        self.sown[name] = value


def rope_by_hand(x, positions=None):
    """A rotary module in Flax's layout: x [..., T, H], positions [T]."""
    positions = jnp.arange(x.shape[-2]) if positions is None else positions
    return apply_rope(x[..., None, :], positions)[..., 0, :]


POSITIONS = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
DROPOUT = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}


def nnx_layers(**kwargs):
    """One nnx layer with our attention and one with Flax's, parameters the same."""
    make = functools.partial(
        nnx.MultiHeadAttention, NUM_HEADS, FEATURES, **{"decode": False} | kwargs
    )
    return make(attention_fn=OURS, rngs=nnx.Rngs(0)), make(rngs=nnx.Rngs(0))


def linen_layers(x, **kwargs):
    """One linen layer with our attention and one with Flax's, and parameters for both."""
    make = functools.partial(linen.MultiHeadDotProductAttention, NUM_HEADS, **kwargs)
    ours, flaxs = make(attention_fn=OURS), make()
    return ours, flaxs, flaxs.init(jax.random.key(0), x)


def self_attention(**kwargs) -> SelfAttention:
    """The layer of a language model."""
    if "rope" not in kwargs:
        kwargs = {"rope_theta": 10_000.0} | kwargs
    kwargs = {"is_causal": True, "rngs": nnx.Rngs(0)} | kwargs
    return SelfAttention(**{"features": FEATURES, "num_heads": NUM_HEADS} | kwargs)


def with_cache(batch=2, length=9, **kwargs) -> SelfAttention:
    layer = self_attention(**kwargs)
    layer.init_cache((batch, length, FEATURES))
    return layer
