"""Parts of both kernels of the forward: the online softmax, and the producer's copies.

Equations are in forward_kernel.py. The maximum m moves only when it would grow by more than
THRESHOLD. That is exact: acc, l and the LSE share the shift, whatever it is, and p is at most
2^THRESHOLD.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._mosaic import common, ptx, work_loop
from pallas_flash._mosaic.pipeline import Pipeline
from pallas_flash._mosaic.scheduler import QUERY_ROWS
from pallas_flash._problem import Problem
from pallas_flash._scores import LN2, LOG2E, LogSum, with_sink

plgpu = common.plgpu

THRESHOLD = 8.0  # In base 2.
# Less than every score, and finite, because -inf - -inf would be NaN.
LOWEST = -3e38


# ------------------------------------------------------------------------------------------------
# Softmax
# ------------------------------------------------------------------------------------------------


class RowMax(NamedTuple):
    """The maximum of each row, in base 2, or in base e if scores may be large.

    Attributes:
        m: what weights are relative to: the maximum, or up to THRESHOLD less.
        exact: the maximum; None unless the call asks for the largest scores.
    """

    m: Any
    exact: Any = None

    def shifted(self, shift: float) -> "RowMax":
        """Return the maximum of scores that are larger by `shift`."""
        return jax.tree.map(lambda x: x + shift, self)


def initial_rows(*, large: bool, max_logits: bool):
    """Return the `RowMax` and l before the first K/V block."""
    m = jnp.full((QUERY_ROWS,), -jnp.inf if large else LOWEST, jnp.float32)
    l = jnp.zeros((QUERY_ROWS,), jnp.float32)
    exact = jnp.full((QUERY_ROWS,), -jnp.inf, jnp.float32) if max_logits else None
    return jax.tree.map(lambda x: plgpu.layout_cast(x, ptx.ROW), (RowMax(m, exact), l))


def initial_state(value_dim: int, **rows):
    """Return acc, the `RowMax` and l before the first K/V block; `rows` are for `initial_rows`."""
    acc = plgpu.layout_cast(jnp.zeros((QUERY_ROWS, value_dim), jnp.float32), ptx.ACC)
    return acc, *initial_rows(**rows)


def softmax(s, c, row_max: RowMax, l, *, large: bool):
    """Return p, float32, the new maximum and l, and alpha, for scores s that c takes to base 2."""
    m, exact = row_max
    highest = jnp.max(s, axis=1) if large else jnp.max(s, axis=1) * c
    grown = jnp.maximum(m, highest)
    exact = None if exact is None else jnp.maximum(exact, highest)
    if large:
        m_new = jnp.where(grown - m > THRESHOLD / LOG2E, grown, m)
        # A row without visible keys so far: -inf - -inf would be NaN, -inf - 0 gives weight 0.
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        alpha = jnp.exp2((m - m_safe) * LOG2E)
        # Scores are rounded before m is subtracted, so that the weight of a score m is exactly 1.
        p = jnp.exp2(ptx.difference(s, common.along_rows(m_safe, s.shape)) * LOG2E)
    else:
        m_new = jnp.where(grown - m > THRESHOLD, grown, m)
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s * c - common.along_rows(m_new, s.shape))
    return p, RowMax(m_new, exact), alpha * l + jnp.sum(p, axis=1), alpha


def finish(row_max: RowMax, l, sink, *, large: bool):
    """Return the arrays of `LogSum`, and the factor of the sums of weighted values."""
    m, exact = row_max
    has_keys = l > 0.0
    l, factor = jnp.where(has_keys, l, 1.0), 1.0
    if large or sink is not None:
        m = jnp.where(has_keys, m, 0.0)
    if sink is not None and large:
        m, l, factor = with_sink(m, l, sink)
    elif sink is not None:
        m, l, factor = with_sink(m, l, sink * LOG2E, jnp.exp2)
    l_log2 = jnp.log2(l) if large else m + jnp.log2(l)
    l_log2 = jnp.where(has_keys, l_log2, -jnp.inf)
    statistics = [m, l_log2] if large else [l_log2]
    if exact is not None:
        statistics.append(exact if large else exact * LN2)
    return statistics, factor / l


def log_sum_of(statistics, *, large: bool) -> LogSum:
    """Return the `LogSum` of the arrays of `finish`."""
    m, (l_log2, *max_logits) = (statistics[0], statistics[1:]) if large else (None, statistics)
    return LogSum(m, l_log2, *max_logits)


def num_statistics(p: Problem) -> int:
    """Return how many arrays `finish` returns."""
    return 1 + p.large + p.max_logits


# ------------------------------------------------------------------------------------------------
# Values of sequences with a valid length
# ------------------------------------------------------------------------------------------------


def last_block(x, length, block: int):
    """Return the block [B, block, N, H] of x in which sequences end, with zeros after the end.

    The padding may hold NaN, and 0 * NaN is NaN.

    Args:
        x: [B, T, N, H].
        length: int32 [B], the valid length of each batch element.
        block: rows of a block.
    """
    first = length // block * block
    rows = first[:, None] + jnp.arange(block, dtype=jnp.int32)[None]
    tile = jax.vmap(lambda x, rows: jnp.take(x, rows, 0, mode="clip"))(x, rows)
    # Places in the whole block: with those of its rows XLA has one more kernel.
    place = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
    return jnp.where(place < (length - first)[:, None, None, None], tile, 0)


def from_last_block_or(ref, last_ref, start, first, length, block: int):
    """Run `start(ref, first)`, or for the block that `last_block` replaces `start` from there.

    Args:
        ref: reference to all rows.
        last_ref: reference to `last_block`.
        start: function of a reference and a row of it.
        first: first row of the block.
        length: valid length of the batch element.
        block: rows of a block.
    """
    end = length - common.remainder(length, block)
    inside = (first >= end) & (first < end + block)
    # A warp cannot have the switch of `common.when`.
    pl.when(inside)(lambda: start(last_ref, first - end))
    pl.when(jnp.logical_not(inside))(lambda: start(ref, first))


# ------------------------------------------------------------------------------------------------
# The producer's copies
# ------------------------------------------------------------------------------------------------


def kv_pipelines(p: Problem, tile, **shared) -> tuple[Pipeline, Pipeline]:
    """Return the specifications of the pipelines of keys and of values.

    `shared` are arguments of `Pipeline.spec` beside the copies, a copy for 64 columns.
    """

    def pipeline(columns: int) -> Pipeline:
        smem = common.blocks(p.dtype, tile.stages, rows=tile.block_kv, columns=columns)
        return Pipeline.spec(smem, tile.stages, copies=smem.shape[1], **shared)

    return pipeline(p.head_dim), pipeline(p.value_dim)


def copy(ref, index, destination, barrier, cluster_size: int = 1, first_block: Any = 0):
    """Copy a tile to shared memory, 64 columns at a time, from this block of columns on.

    In a cluster each CTA copies a part of the rows to the shared memory of all (TMA multicast).
    """
    axes = None if cluster_size == 1 else common.RANK
    for n in range(destination.shape[0]):
        columns = common.block_of_columns(first_block + n, index[0])
        tile = ref.at[(*index, columns)]
        plgpu.copy_gmem_to_smem(tile, destination.at[n], barrier, collective_axes=axes)


def copy_keys_and_values(
    inputs,
    k: Pipeline,
    v: Pipeline,
    stream,
    where,
    base,
    cluster_size: int = 1,
    beside=lambda i, first_key: None,
):
    """Copy the K/V blocks of a work tile, each to its stage as soon as that is empty.

    Args:
        inputs: with k, v and `lengths`.
        k: the pipeline of keys.
        v: the pipeline of values.
        stream: the number of blocks, and a function from a place to the number of the block.
        where: the batch element and the key/value head.
        base: blocks that this CTA had before.
        cluster_size: CTAs that share the copies.
        beside: starts what else is copied for a block, the i-th one of this CTA.
    """
    (count, at), (b, h) = stream, where
    block = k.smem.shape[2]
    lengths, last_v_ref = inputs.lengths or (None, None)
    length = None if lengths is None else plgpu.load(lengths.at[b])

    def one(j, _):
        i, first = base + j, at(j) * block

        def start(pipeline, ref, first):
            index = b, pl.ds(first, block), h
            copy(ref, index, pipeline.smem_of(i), pipeline.filled(i), cluster_size)

        beside(i, first)
        k.producer_acquire(i)
        start(k, inputs.k, first)
        v.producer_acquire(i)
        start_v = functools.partial(start, v)
        if length is None:
            start_v(inputs.v, first)
        else:
            from_last_block_or(inputs.v, last_v_ref, start_v, first, length, block)

    lax.fori_loop(jnp.int32(0), count, one, None)


def run_producer_warps(tiles: work_loop.WorkTiles, keys_and_values: Any, *queries):
    """Run each function over a CTA's work tiles, in a warp of its own; the first warp takes them.

    Args:
        tiles: the work tiles of the first warp.
        keys_and_values: its body for `work_loop.for_each`, whose carry begins with 0, as the
            others' does.
        *queries: for each of the other warps its work tiles, and its body.
    """

    @plgpu.warp_map
    def _(warp):
        @pl.when(warp == 0)
        def _():
            work_loop.for_each(tiles, keys_and_values, jnp.int32(0), takes=True)

        for n, (tiles_of_warp, body) in enumerate(queries, 1):

            @pl.when(warp == n)
            def _(tiles=tiles_of_warp, body=body):
                work_loop.for_each(tiles, body, jnp.int32(0))
