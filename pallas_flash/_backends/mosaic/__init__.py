"""Attention as Pallas kernels for Hopper: `forward` and `backward`.

Copies (TMA) and matrix products (wgmma) run beside the threads there, and the warpgroups of a CTA
are specialised: one is the producer, which copies the tiles that stream, the others are consumers,
which compute. Most consumers of the backward copy what is their own. Pallas calls this way of
writing kernels Mosaic GPU.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_flash._backends.mosaic import (
    backward_dbias,
    backward_dq,
    backward_launch,
    decode,
    decode_wide,
    forward_kernel,
    forward_wide,
)
from pallas_flash._backends.mosaic.backward_keys import Grads
from pallas_flash._backends.mosaic.backward_preprocess import preprocess
from pallas_flash._problem import key_center
from pallas_flash._problem.dropout import rescaled
from pallas_flash._problem.masks import LeafKind
from pallas_flash._problem.problem import Gradients, Problem
from pallas_flash._problem.scores import LogSum, sinks_gradient
from pallas_flash._problem.tile_sizes import TileSizes, padded, tile_of


def forward(problem: Problem, sizes: TileSizes):
    """Return the output [B, T, N, V] and a `LogSum` of float32 [B, N, T]."""
    tile, valid = tile_of(sizes, "forward"), problem.valid_lengths()
    wide = forward_wide.serves(problem)
    if wide and problem.decodes_prefix:
        return decode_wide.decode(problem, tile)
    if decode.serves(problem, tile):
        return decode.forward(problem, tile)
    run = forward_wide.forward if wide else forward_kernel.forward
    if valid is not None:
        return run(_ending_with_keys(problem, valid), tile, valid[1])
    p = dataclasses.replace(problem, value=_zeroed(problem.value, problem.visible_keys()))
    return run(p, tile)


def _ending_with_keys(problem: Problem, valid) -> Problem:
    """Return the problem with a mask whose ranges of keys end with the valid ones.

    The band of a row that sees nothing, behind the valid queries, may go on behind them. But the
    first block that a query tile visits must be the one in which they end, if it visits that.
    """
    mask = problem.mask
    if not mask.windows:
        return problem
    queries, keys = valid
    ends = [leaf.lengths for leaf in mask.leaves if leaf.kind is LeafKind.LENGTHS]
    if all(x is None or x[0] is None for x in ends):
        queries = None
    return dataclasses.replace(problem, mask=mask.with_lengths(queries, keys))


def backward(
    problem: Problem,
    o,
    log_sum: LogSum,
    do,
    dlse,
    sizes: TileSizes,
    *,
    want_scale: bool,
    want_bias: bool,
    want_sinks: bool,
    in_order: bool,
) -> Gradients:
    """Return the gradients for the cotangents do [B, T, N, V] and dlse.

    Args:
        problem: the call.
        o: the output, or a `SplitOutput`.
        log_sum: as `forward` returned it.
        do: [B, T, N, V].
        dlse: float32 [B, T, N] or None.
        sizes: the tiles; without one of "backward", in two passes.
        want_scale: whether the gradient of the scale is wanted.
        want_bias: whether the gradient of the bias is wanted.
        want_sinks: whether the gradient of the sinks is wanted.
        in_order: whether every sum must have a fixed order, so that all runs give the same bits.
    """
    p = problem
    head_dim, _ = padded(p.head_dim, p.value_dim)
    tile = tile_of(sizes, "backward")
    two_passes = tile is None
    dscale = None
    # The dbias kernel ignores valid lengths, so the rows behind them are zeroed first.
    valid = None if want_bias else p.valid_lengths()
    center = key_center.center_for_shift(p, log_sum)
    delta, centered_log_sum, *dq_sums = preprocess(
        *(p, o, do, log_sum),
        dq_columns=0 if two_passes else head_dim,
        # For the gradient of the scale all sums of dq are read.
        valid=None if valid is None or want_scale else valid[0],
        center=center,
    )
    if dlse is not None:
        dlse = jnp.moveaxis(dlse, 2, 1)
        dlse_of_tiles = jnp.pad(dlse, ((0, 0), (0, 0), (0, delta.shape[2] - p.q_len)))
        # `dlse` may be NaN in rows without visible keys, which must not reach delta.
        delta = jnp.where(centered_log_sum.l_log2 == jnp.inf, 0, delta - dlse_of_tiles)
    delta_of_rows = delta[:, :, : p.q_len]
    sinks = sinks_gradient(p.sinks, log_sum, delta_of_rows) if want_sinks else None
    row_sums = None
    if center is not None:
        row_sums = key_center.row_sums(p, log_sum, delta_of_rows, dlse)

    if valid is None:
        q, k, v, do = _zeroed_operands(p, do)
    else:
        q, k, v = p.query, p.key, p.value
    clean = dataclasses.replace(p, query=q, key=k, value=v)
    options: dict[str, Any] = dict(row_sums=row_sums, want_scale=want_scale)
    rows = do, centered_log_sum, delta
    if two_passes:
        # dq's kernel streams the keys, so no CTA could center them once.
        centered = clean
        if center is not None:
            centered = dataclasses.replace(clean, key=key_center.centered(k, center[:, None]))
        of_keys = centered, rows, tile_of(sizes, "dkv"), valid
        grads = _grads(*of_keys, two_passes=True, deterministic=True, **options)
        dq, dscale = backward_dq.dq(
            centered, *rows, tile_of(sizes, "dq"), valid, center=center, **options
        )
        dscale = None if dscale is None else dscale.sum()
    else:
        options |= dict(dq_sums=dq_sums[0], center=center, deterministic=in_order)
        grads = _grads(clean, rows, tile, valid, two_passes=False, **options)
        dq = grads["dq"]
        if want_scale:
            # These sums are float32, and have not their factor yet.
            dq = rescaled(p.dropout, dq)
            if row_sums is not None:
                dq = dq + key_center.known_part(p, center, row_sums)
            seeing = p.rows_with_keys()
            dscale = (_zeroed(q, seeing).astype(jnp.float32) * dq).sum()
            dq = (dq * p.scale.astype(jnp.float32)).astype(p.dtype)
    dbias = None
    if want_bias:
        l_log2 = jnp.where(log_sum.l_log2 == -jnp.inf, jnp.inf, log_sum.l_log2)
        dbias = backward_dbias.dbias(
            clean, do, log_sum._replace(l_log2=l_log2), delta, backward_dbias.default_tile(p)
        )
    return Gradients(dq, grads["dk"], grads["dv"], dscale, dbias, sinks)


def _grads(p: Problem, rows, tile, valid, *, two_passes: bool, dq_sums=None, **options) -> dict:
    """Return what the launches of `backward_launch` compute, by name."""
    (do, log_sum, delta), results = rows, {}
    sizes = padded(p.head_dim, p.value_dim)
    for grads in Grads.launches(*sizes, two_passes=two_passes):
        options |= dict(dq_sums=dq_sums if grads.dq else None)
        results |= backward_launch.backward(p, do, log_sum, delta, tile, grads, valid, **options)
    return results


def _zeroed_operands(p: Problem, do):
    """Return q, k, v and do, with zeros for keys that are not visible and queries that see no key.

    They may hold NaN, and 0 * NaN is NaN. Here, because copies to shared memory take whole tiles.
    """
    keys, queries = p.visible_keys(), p.rows_with_keys()
    used = queries, keys, keys, queries
    return map(_zeroed, (p.query, p.key, p.value, do), used)


def _zeroed(x, used):
    """Return [B, T, N, H] with zeros where `used`, [1 or B, 1 or N, T] or None, is false."""
    return x if used is None else jnp.where(jnp.swapaxes(used, 1, 2)[..., None], x, 0)
