"""Attention as Pallas kernels for Hopper's own instructions; the surface is `forward`, `backward`.

Copies and products run beside the threads there (TMA, wgmma), and warpgroups of a program share the
work by kind: one loads, the others compute. Pallas calls this way of writing kernels Mosaic GPU.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_flash._masks import Tiling
from pallas_flash._mosaic import tiles
from pallas_flash._mosaic.backward import backward as _backward
from pallas_flash._mosaic.backward_dq import dq as _dq
from pallas_flash._mosaic.forward import forward as _forward
from pallas_flash._problem import Gradients, Problem
from pallas_flash._scores import LogSum


def forward(problem: Problem):
    """The output [B, T, N, V] and a `LogSum` of float32 [B, N, T]."""
    p = dataclasses.replace(problem, value=_clean_values(problem))
    return _forward(p, tiles.forward_tile(p))


def backward(
    problem: Problem,
    o,
    log_sum: LogSum,
    do,
    dlse,
    *,
    want_scale: bool,
    want_bias: bool,
    want_sinks: bool,
    in_order: bool,
) -> Gradients:
    """Gradients for the cotangents do [B, T, N, V] and dlse (float32 [B, T, N] or None).

    `in_order`: whether every sum must have an order, so that all runs give the same bits.
    """
    del want_scale, want_bias, want_sinks  # Calls that have them to differentiate go elsewhere.
    delta = jnp.einsum("btnv,btnv->bnt", o, do, preferred_element_type=jnp.float32)
    if dlse is not None:
        delta = delta - jnp.moveaxis(dlse, 2, 1)
    # Cotangents of a row that sees nothing may hold NaN.
    delta = jnp.where(log_sum.l_log2 == -jnp.inf, 0, delta)
    tile = tiles.backward_tile(problem.head_dim)
    problem, do = _clean(problem, do)
    rows = problem, do, log_sum.l_log2, delta
    if in_order:
        dk, dv = _backward(*rows, tile, with_dq=False)
        dq = _dq(*rows, tiles.dq_tile(problem.head_dim, bool(problem.mask)))
    else:
        dq, dk, dv = _backward(*rows, tile, with_dq=True)
    return Gradients(dq, dk, dv, scale=None, bias=None)


def _clean_values(p: Problem):
    """The values, with zeros where no query sees them: they may hold NaN, and 0 * NaN is NaN.

    Here, because copies to shared memory take whole tiles.
    """
    seen = p.mask.seen_keys(p.batch, p.num_heads, p.q_len, p.kv_len)
    if seen is None:
        return p.value
    if seen.shape[1] > 1:
        seen = seen.reshape(len(seen), p.num_kv_heads, p.groups, -1).any(axis=2)
    return jnp.where(jnp.swapaxes(seen, 1, 2)[..., None], p.value, 0)


def _clean(problem: Problem, do=None):
    """The problem, and do, with zeros for keys that no query sees and queries that see no key.

    They may hold NaN, and 0 * NaN is NaN. Here, because copies to shared memory take whole tiles.
    """
    p = problem
    whole_q, each_q = Tiling(p.q_len, p.q_len), Tiling(p.q_len, 1)
    whole_kv, each_kv = Tiling(p.kv_len, p.kv_len), Tiling(p.kv_len, 1)
    [[keys]], [[queries]] = (
        p.mask.kv_ranges(whole_q, each_kv),
        p.mask.q_ranges(each_q, whole_kv),
    )

    def clean(x, seen):
        start, _, _, stop = seen
        if x is None or (start == 0 and stop == x.shape[1]):
            return x
        position = np.arange(x.shape[1])[:, None, None]
        return jnp.where((start <= position) & (position < stop), x, 0)

    p = dataclasses.replace(
        p, query=clean(p.query, queries), key=clean(p.key, keys), value=clean(p.value, keys)
    )
    return p, clean(do, queries)
