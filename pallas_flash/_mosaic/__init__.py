"""Attention as Pallas kernels for Hopper's own instructions; the surface is `forward`, `backward`.

Copies and products run beside the threads there (TMA, wgmma), and warpgroups of a program share the
work by kind: one loads, the others compute. Pallas calls this way of writing kernels Mosaic GPU.
"""

import dataclasses
import functools

import jax.numpy as jnp

from pallas_flash import _key_center
from pallas_flash._dropout import rescaled
from pallas_flash._mosaic import tiles
from pallas_flash._mosaic.backward import backward as _backward
from pallas_flash._mosaic.backward_dbias import dbias as _dbias
from pallas_flash._mosaic.backward_delta import delta as _delta
from pallas_flash._mosaic.backward_dq import dq as _dq
from pallas_flash._mosaic.decode import decode as _decode
from pallas_flash._mosaic.forward import forward as _forward
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
    delta, l_log2, *zeros = _delta(
        *(o, do, log_sum.l_log2),
        head_dim=0 if in_order else head_dim,
        # For the gradient of the scale all sums of dq are read.
        seen=None if seen is None or want_scale else seen[0],
    )
    if dlse is not None:
        dlse = jnp.moveaxis(dlse, 2, 1)
        dlse = jnp.pad(dlse, ((0, 0), (0, 0), (0, delta.shape[2] - p.q_len)))
        # That of a query that sees nothing may be NaN.
        delta = jnp.where(l_log2 == jnp.inf, 0, delta - dlse)
    sinks = sinks_gradient(p.sinks, log_sum, delta[:, :, : p.q_len]) if want_sinks else None
    log_sum = log_sum._replace(l_log2=l_log2)

    center = _key_center.of(p)
    of_rows = LogSum(log_sum.m, l_log2[:, :, : p.q_len]), *map(_cut(p.q_len), (delta, dlse))
    q, k, v, do = _clean(p, do) if seen is None else (p.query, p.key, p.value, do)
    cleaned = dataclasses.replace(p, query=q, key=k, value=v)
    rows = cleaned, do, log_sum, delta
    # Whose sums of dq have registers beside them centers keys in shared memory.
    shifted = functools.partial(_shifted, *rows, center)
    tile, found = sizes.tile("dkv" if in_order else "backward"), {}
    for sums in tiles.launches(head_dim, value_dim, in_order):
        inside = sums == ("dq", "dk", "dv")
        found |= _backward(
            *(shifted() if "dq" in sums and not inside else rows),
            *(tiles.of_launch(tile, sums), sums, seen),
            zeros=zeros[0] if "dq" in sums else None,
            center=center if inside else None,
            want_scale=want_scale,
            in_order=in_order,
        )
    if in_order:
        dq, dscale = _dq(*shifted(), sizes.tile("dq"), seen, want_scale=want_scale)
        dq, dscale = _key_center.whole_sums(cleaned, center, *of_rows, dq, dscale)
    elif want_scale:
        dq = rescaled(p.dropout, found["dq"])
        r = None if center is None else _key_center.row_sums(p, *of_rows)
        dq = dq if r is None else dq + _key_center.known_part(p, center, r)
        dscale = _cleaned(q, p.mask.seeing_queries(_shape(p))).astype(jnp.float32) * dq
        dq = (dq * p.scale.astype(jnp.float32)).astype(p.dtype)
    else:
        dq, _ = _key_center.whole_sums(p, center, *of_rows, found["dq"], None)
    return Gradients(
        dq,
        found["dk"],
        found["dv"],
        scale=None if dscale is None else dscale.sum(),
        bias=_dbias(*rows, tiles.dbias_tile(p)) if want_bias else None,
        sinks=sinks,
    )


def _shifted(problem: Problem, do, log_sum: LogSum, delta, center):
    """The arguments of a kernel with centered keys."""
    problem, log_sum = _key_center.shifted(problem, log_sum, center)
    return problem, do, log_sum, delta


def _cut(length: int):
    return lambda x: None if x is None else x[:, :, :length]


def _seen(p: Problem):
    """Int32 [B] twice: how many queries of each example see a key, and how many keys are seen.

    None where these are not the first ones, or where no arrays tell.
    """
    if not p.mask.ends_by_lengths:
        return None

    ends = p.mask.ends(p.q_len, p.kv_len)
    return tuple(jnp.broadcast_to(x, (p.batch,)).astype(jnp.int32) for x in ends)


def _clean(p: Problem, do):
    """q, k, v and do, with zeros for keys that no query sees and queries that see no key.

    They may hold NaN, and 0 * NaN is NaN. Here, because copies to shared memory take whole tiles.
    """
    keys, queries = p.visible_keys(), p.mask.seeing_queries(_shape(p))
    seen = queries, keys, keys, queries
    return map(_cleaned, (p.query, p.key, p.value, do), seen)


def _cleaned(x, seen):
    """[B, T, N, H] with zeros where nothing is `seen`, [1 or B, 1 or N, T]; None is everything."""
    return x if seen is None else jnp.where(jnp.swapaxes(seen, 1, 2)[..., None], x, 0)


def _shape(p: Problem) -> tuple[int, int, int, int]:
    return p.batch, p.num_heads, p.q_len, p.kv_len
