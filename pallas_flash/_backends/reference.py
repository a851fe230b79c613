"""Dense attention: the definition of the op, as its equations. Memory grows with T * S.

    s_ij = scores(scale * q_i . k_j)            where visible(i, j), else -inf
    lse_i = log (sum_j exp(s_ij) + exp(sink))   -inf where nothing is visible
    o_i = sum_j dropout(exp(s_ij - lse_i)) v_j  zero where nothing is visible

JAX differentiates it, in both modes and to any order. It computes in float32 or float64 at full
precision for all input dtypes, so that tests can judge the other implementations by it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash._problem.dropout import drop, kept, rescaled
from pallas_flash._problem.operands import Pairs, TileView, is_pairs
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.scores import differentiated


def attention(problem: Problem, first_query=0):
    """Return the output [B, T, N, V] in the inputs' dtype and the LSE [B, T, N].

    The LSE is float32 or float64, as is the largest score of each row [B, T, N], which comes third
    if the problem asks for it. `first_query`, an int or int32 scalar, is the number of query 0.
    """
    p = problem
    grouped = (p.batch, p.q_len, p.num_kv_heads, p.groups)
    visible = _visible(p, first_query)
    # 0 * NaN is NaN, so queries without keys and invisible keys are replaced by 0 first.
    q = jnp.where(_queries_with_keys(visible), p.query.reshape(*grouped, p.head_dim), 0)
    k, v = (jnp.where(_visible_keys(visible), x, 0) for x in (p.key, p.value))
    q, k, v = (x.astype(p.accumulator_dtype) for x in (q, k, v))

    s = p.scale * jnp.einsum("btkgh,bskh->bkgts", q, k, precision=lax.Precision.HIGHEST)
    if p.scores:
        # Hidden products and biases are replaced by 0, because they may be NaN, and the derivative
        # of the scores would be NaN too.
        scores = _whole(p, p.scores, visible)
        with differentiated():
            s = scores.logits(jnp.where(visible, s, 0), *_indices(p, first_query))
    s = jnp.where(visible, s, -jnp.inf)
    m = lax.stop_gradient(s.max(axis=-1, keepdims=True, initial=-jnp.inf))
    # A maximum of NaN comes from keys that the query sees, and makes its output NaN.
    row_max, has_keys, has_lse = m[..., 0], m != -jnp.inf, jnp.isfinite(m)
    sinks = None if p.sinks is None else p.sinks.reshape(1, p.num_kv_heads, p.groups, 1, 1)
    if sinks is not None:
        m = jnp.maximum(m, lax.stop_gradient(sinks))
    m = jnp.where(m == -jnp.inf, 0, m)
    weight = jnp.exp(_at_most(s, m) - m)
    total = weight.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - m)
    total = jnp.where(has_keys, total, 1)
    weight = weight / total
    weight = drop(kept(p.dropout, _indices(p, first_query)), rescaled(p.dropout, weight))
    o = jnp.einsum("bkgts,bskv->btkgv", weight, v, precision=lax.Precision.HIGHEST)
    # o is zero in rows without keys already. This keeps their cotangents, which may be NaN, from v.
    o = jnp.where(jnp.moveaxis(has_keys, 3, 1), o, 0)
    lse = jnp.where(has_lse, m + jnp.log(total), -jnp.inf)[..., 0]
    rows = (lse, row_max) if p.max_logits else (lse,)
    return (
        o.reshape(*p.query.shape[:3], p.value_dim).astype(p.dtype),
        *(jnp.moveaxis(x, -1, 1).reshape(p.query.shape[:3]) for x in rows),
    )


@jax.custom_jvp
def _at_most(s, m):
    """Return min(s, m) with the derivative of `s`, where `m` is the maximum of `s`.

    A compiler for CPUs may compute s again where m is subtracted, fused with the product before it.
    Then m alone is rounded, and s may be larger.
    """
    # JAX before 0.12 loses the rule below in a scan. There jnp.minimum would halve the derivative
    # of ties.
    return jnp.where(s <= m, s, m)


@_at_most.defjvp
def _(primals, tangents):
    return _at_most(*primals), tangents[0]


def _visible(p: Problem, first_query):
    """Return which scores are visible, bool [B | 1, K | 1, G | 1, T, S]."""
    visible = jnp.ones((1, 1, 1, p.q_len, p.kv_len), bool)
    return visible & _whole(p, p.mask).allowed(*_indices(p, first_query)) if p.mask else visible


def _indices(p: Problem, first_query):
    """Return the indices b, h, q and k of all scores [B, K, G, T, S]."""
    b, h, q, k = (jnp.arange(n, dtype=jnp.int32) for n in (p.batch, p.num_heads, p.q_len, p.kv_len))
    return (
        b.reshape(-1, 1, 1, 1, 1),
        h.reshape(1, p.num_kv_heads, p.groups, 1, 1),
        (first_query + q).reshape(1, 1, 1, -1, 1),
        k.reshape(1, 1, 1, 1, -1),
    )


def _whole(p: Problem, tree, visible=None):
    """Return a mask or scores whose (q, k) arrays are read whole, with heads split into groups.

    Their numbers are zero where not `visible`.
    """

    def cut(x):
        if not is_pairs(x):
            return x
        heads = (p.num_kv_heads, p.groups) if x.shape[1] > 1 else (1, 1)
        array = x.array.reshape(x.shape[0], *heads, *x.shape[2:])
        if visible is not None:
            # Widen first, because the gradient is summed over the axes that broadcast here.
            array = jnp.where(visible, array.astype(p.accumulator_dtype), 0)
        return Pairs(TileView(array, x.shape))

    return jax.tree.map(cut, tree, is_leaf=is_pairs)


def _queries_with_keys(visible):
    """Return whether a query sees a key, bool [B | 1, T, K | 1, G | 1, 1]."""
    return jnp.moveaxis(visible.any(axis=-1), -1, 1)[..., None]


def _visible_keys(visible):
    """Return whether a query sees the key, bool [B | 1, S, K | 1, 1]."""
    return jnp.moveaxis(visible.any(axis=(2, 3)), -1, 1)[..., None]
