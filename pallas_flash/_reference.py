"""Dense attention, the definition of the op in the order of its equations; memory grows with T * S.

    s_ij = scale * q_i . k_j + bias_ij   where visible(i, j), else -inf
    lse_i = log sum_j exp(s_ij)
    o_i = sum_j exp(s_ij - lse_i) v_j    zero where nothing is visible

Differentiated by JAX itself, in both modes and to any order. Computed in float32 or float64 at full
precision whatever the inputs are, so that other implementations can be judged by it.
"""

import jax.numpy as jnp
from jax import lax

from pallas_flash._problem import Problem


def attention(problem: Problem):
    """The output [B, T, N, V] in the inputs' dtype and the LSE [B, T, N] in float32 or float64."""
    p = problem
    grouped = (p.batch, p.q_len, p.num_kv_heads, p.groups)
    visible = _visible(p)
    # 0 * NaN is NaN, so what nothing looks at is replaced before it meets a zero probability.
    q = jnp.where(_by_query(visible), p.query.reshape(*grouped, p.head_dim), 0)
    k, v = (jnp.where(_by_key(visible), x, 0) for x in (p.key, p.value))
    q, k, v = (x.astype(p.accumulator_dtype) for x in (q, k, v))

    s = p.scale * jnp.einsum("btkgh,bskh->bkgts", q, k, precision=lax.Precision.HIGHEST)
    if p.bias is not None:
        s = s + _by_group(p, p.bias).astype(s.dtype)
    s = jnp.where(visible, s, -jnp.inf)
    m = lax.stop_gradient(s.max(axis=-1, keepdims=True, initial=-jnp.inf))
    m = jnp.where(m == -jnp.inf, 0, m)
    weight = jnp.exp(s - m)
    total = weight.sum(axis=-1, keepdims=True)
    alive = total > 0
    total = jnp.where(alive, total, 1)
    o = jnp.einsum("bkgts,bskv->btkgv", weight / total, v, precision=lax.Precision.HIGHEST)
    # Zero already; this keeps the cotangent of such a row, which may be anything, from v.
    o = jnp.where(jnp.moveaxis(alive, 3, 1), o, 0)
    lse = jnp.where(alive, m + jnp.log(total), -jnp.inf)[..., 0]
    return (
        o.reshape(*p.query.shape[:3], p.value_dim).astype(p.dtype),
        jnp.moveaxis(lse, -1, 1).reshape(p.query.shape[:3]),
    )


def _visible(p: Problem):
    """Bool [B | 1, K | 1, G | 1, T, S]."""
    visible = jnp.ones((1, 1, 1, p.q_len, p.kv_len), bool)
    if p.mask:
        b = jnp.arange(p.batch)[:, None, None]
        q, k = jnp.arange(p.q_len)[:, None], jnp.arange(p.kv_len)
        allowed = jnp.broadcast_to(p.mask.allowed(b, q, k), (p.batch, p.q_len, p.kv_len))
        visible &= allowed[:, None, None]
    if p.mask_array is not None:
        visible &= _by_group(p, p.mask_array)
    return visible


def _by_group(p: Problem, x):
    """[B | 1, N | 1, T | 1, S | 1] with the head axis split into key/value heads and groups."""
    heads = (p.num_kv_heads, p.groups) if x.shape[1] > 1 else (1, 1)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def _by_query(visible):
    """Whether a query sees anything: [B | 1, T, K | 1, G | 1, 1]."""
    return jnp.moveaxis(visible.any(axis=-1), -1, 1)[..., None]


def _by_key(visible):
    """Whether a key is seen by anything: [B | 1, S, K | 1, 1]."""
    return jnp.moveaxis(visible.any(axis=(2, 3)), -1, 1)[..., None]
