"""Attention as Pallas kernels for Hopper's own instructions; the surface is `forward`, `backward`.

Copies and products run beside the threads there (TMA, wgmma), and warpgroups of a program share the
work by kind: one loads, the others compute. Pallas calls this way of writing kernels Mosaic GPU.
"""

import dataclasses

import jax.numpy as jnp

from pallas_flash import _key_center
from pallas_flash._dropout import rescaled
from pallas_flash._mosaic import tiles
from pallas_flash._mosaic.backward_dbias import dbias as _dbias
from pallas_flash._mosaic.backward_dq import dq as _dq
from pallas_flash._mosaic.backward_kernel import backward as _backward
from pallas_flash._mosaic.backward_memory import Grads
from pallas_flash._mosaic.backward_preprocess import preprocess
from pallas_flash._mosaic.decode_kernel import decode as _decode
from pallas_flash._mosaic.forward_kernel import forward as _forward
from pallas_flash._problem import Gradients, Problem
from pallas_flash._scores import LogSum, sinks_gradient
from pallas_flash._tiling.sizes import TileSizes

# What is None is the table's.
TABLE = TileSizes()


def forward(problem: Problem, sizes: TileSizes = TABLE):
    """The output [B, T, N, V] and a `LogSum` of float32 [B, N, T]."""
    sizes = sizes.used(problem.few_queries).or_else(tiles.default(problem))
    if sizes.decode is not None:
        return _decode(problem, sizes.tile("decode"), problem.visible_keys())
    tile, seen = sizes.tile("forward"), _seen(problem)
    if seen is not None:
        return _forward(problem, tile, seen[1])
    p = dataclasses.replace(problem, value=_cleaned(problem.value, problem.visible_keys()))
    return _forward(p, tile)


def backward(
    problem: Problem,
    o,
    log_sum: LogSum,
    do,
    dlse,
    sizes: TileSizes = TABLE,
    *,
    want_scale: bool,
    want_bias: bool,
    want_sinks: bool,
    in_order: bool,
) -> Gradients:
    """Gradients for the cotangents do [B, T, N, V] and dlse (float32 [B, T, N] or None).

    `in_order`: whether every sum must have an order, so that all runs give the same bits.
    """
    p = problem
    head_dim, value_dim = tiles.padded(p.head_dim, p.value_dim)
    sizes, dscale = sizes.or_else(tiles.default(p)), None
    in_order = in_order or sizes.backward is None
    # The pass for the bias streams examples, and takes no ends of theirs.
    seen = None if want_bias else _seen(p)
    center = _key_center.for_shift(p, log_sum)
    delta, centered_log_sum, *zeros = preprocess(
        *(p, o, do, log_sum),
        head_dim=0 if in_order else head_dim,
        # For the gradient of the scale all sums of dq are read.
        valid=None if seen is None or want_scale else seen[0],
        center=center,
    )
    if dlse is not None:
        dlse = jnp.moveaxis(dlse, 2, 1)
        padded = jnp.pad(dlse, ((0, 0), (0, 0), (0, delta.shape[2] - p.q_len)))
        # `dlse` of a query that sees nothing may be NaN.
        delta = jnp.where(centered_log_sum.l_log2 == jnp.inf, 0, delta - padded)
    delta_of_rows = delta[:, :, : p.q_len]
    sinks = sinks_gradient(p.sinks, log_sum, delta_of_rows) if want_sinks else None
    row_sums = None
    if center is not None:
        row_sums = _key_center.row_sums(p, log_sum, delta_of_rows, dlse)

    q, k, v, do = _clean(p, do) if seen is None else (p.query, p.key, p.value, do)
    cleaned = dataclasses.replace(p, query=q, key=k, value=v)
    centered, center_of_kernel = cleaned, center
    if in_order and center is not None:
        # Where keys are streamed, no program could center them once.
        centered = dataclasses.replace(cleaned, key=_key_center.centered(k, center[:, None]))
        center_of_kernel = None
    tile, found = sizes.tile("dkv" if in_order else "backward"), {}
    for grads in Grads.launches(head_dim, value_dim, deterministic=in_order):
        found |= _backward(
            *(centered, do, centered_log_sum, delta, tile, grads, seen),
            zeros=zeros[0] if grads.dq else None,
            center=center_of_kernel,
            row_sums=row_sums,
            want_scale=want_scale,
            deterministic=in_order,
        )
    if in_order:
        rows = do, centered_log_sum, delta
        dq, dscale = _dq(
            *(centered, *rows, sizes.tile("dq"), seen),
            center=center,
            row_sums=row_sums,
            want_scale=want_scale,
        )
        dscale = None if dscale is None else dscale.sum()
    else:
        dq = found["dq"]
        if want_scale:
            # These sums are float32, and have not their factor yet.
            dq = rescaled(p.dropout, dq)
            if row_sums is not None:
                dq = dq + _key_center.known_part(p, center, row_sums)
            seeing = p.rows_with_keys()
            dscale = (_cleaned(q, seeing).astype(jnp.float32) * dq).sum()
            dq = (dq * p.scale.astype(jnp.float32)).astype(p.dtype)
    dbias = None
    if want_bias:
        l_log2 = jnp.where(log_sum.l_log2 == -jnp.inf, jnp.inf, log_sum.l_log2)
        rows = do, log_sum._replace(l_log2=l_log2), delta
        dbias = _dbias(cleaned, *rows, tiles.dbias_tile(p))
    return Gradients(dq, found["dk"], found["dv"], dscale, dbias, sinks)


def _seen(p: Problem):
    """Int32 [B] twice: how many queries of each example see a key, and how many keys are seen.

    None where these are not the first ones, or where no arrays tell.
    """
    return p.valid_lengths()


def _clean(p: Problem, do):
    """q, k, v and do, with zeros for keys that no query sees and queries that see no key.

    They may hold NaN, and 0 * NaN is NaN. Here, because copies to shared memory take whole tiles.
    """
    keys, queries = p.visible_keys(), p.rows_with_keys()
    seen = queries, keys, keys, queries
    return map(_cleaned, (p.query, p.key, p.value, do), seen)


def _cleaned(x, seen):
    """[B, T, N, H] with zeros where nothing is `seen`, [1 or B, 1 or N, T]; None is everything."""
    return x if seen is None else jnp.where(jnp.swapaxes(seen, 1, 2)[..., None], x, 0)
