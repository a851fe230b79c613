"""o and lse in decoding, where reading keys and values takes nearly all the time.

This is the kernel of `paged`, with its packed query heads and its KV splits, for keys and values in
arrays [B, S, K, H] as they are: batch elements stand for requests, and there are no pages.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_flash._backends.mosaic import (
    common,
    forward_kernel,
    forward_wide,
    paged,
    ptx,
    scheduler,
)
from pallas_flash._backends.mosaic.forward_common import check_fits, log_sum_of
from pallas_flash._backends.mosaic.score_mask import shared_arrays
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.features import Option, features_of
from pallas_flash._problem.problem import Problem, SplitOutput
from pallas_flash._problem.tile_sizes import ForwardTile

OPTIONS = {Option.SLOPES, Option.SOFT_CAP, Option.SINKS, Option.SCALE}


def packs(p: Problem) -> bool:
    """Return whether query heads are packed by default.

    They are where each query sees a range of keys, which no array of pairs says.
    """
    f = features_of(p)
    ranges = all(leaf.exact_ranges for leaf in p.mask.leaves)
    few, narrow = f.decodes and f.groups <= ptx.ROWS, f.width <= forward_wide.WIDE
    return few and narrow and ranges and f.options <= OPTIONS


def serves(p: Problem, tile: ForwardTile) -> bool:
    """Return whether query heads are packed with a tile: its output takes no shared memory."""
    return not tile.output_slots and tile.cluster_size == 1 and packs(p)


def check_tile(tile: ForwardTile, p: Problem) -> None:
    """Raise ValueError if a tile does not fit on the GPU."""
    registers, _ = forward_kernel.REGISTERS[tile.warpgroups]
    check_fits(tile, p, paged.scratch(p, tile), p.value_dim, registers)


def pallas_flash_decode(*refs, **static):
    """Compute the work tiles of one CTA."""
    paged.pallas_flash_paged(*refs, **static)


def forward(problem: Problem, tile: ForwardTile):
    """Return the output [B, T, N, V] and a `LogSum` of float32 [B, N, T]."""
    p = problem
    kv, q = paged.tilings(p, tile)
    mask = p.mask.within(kv=kv)
    tail = any(window.low is not None for window in mask.windows)

    def run(shared, query, key, value):
        work_tiles = len(query) * q.count * p.num_kv_heads
        splits = paged.splits_of(p, work_tiles, kv.count)
        table = schedule(p, shared[1].mask, len(query), kv, q, tile.warpgroups, splits)
        rows = query.reshape(-1, *query.shape[2:])
        operands = rows, key, value, table, splits
        results = paged.launch(pallas_flash_decode, p, tile, shared, *operands, partial_tail=tail)
        return [
            jnp.moveaxis(x.reshape(splits, *query.shape[:3], *x.shape[3:]), 0, 1) for x in results
        ]

    run = common.batch_instances(run, p.batch)
    results = run(shared_arrays(p, mask), p.query, p.key, p.value)
    o, *statistics = paged.combined(p, results)
    statistics = [x.swapaxes(1, 2) for x in statistics]
    o = SplitOutput.from_float32(o, p.dtype, split=p.split_output)
    return o, log_sum_of(statistics, large=p.large)


def schedule(p: Problem, mask, batch: int, kv: Tiling, q: Tiling, warpgroups: int, splits: int):
    """Return `paged.rows_of_schedule` of a call.

    Args:
        p: the call.
        mask: its mask, with an axis of instances before all others of its arrays.
        batch: batch elements of all instances.
        kv: the K/V blocks.
        q: the queries of each work tile.
        warpgroups: consumer warpgroups of a CTA.
        splits: KV splits.
    """

    def ranges(count: int, queries: int, kv: Tiling):
        """Return the blocks that parts of each work tile visit, [work tiles, `count`, 4]."""
        table = scheduler.block_table(mask, Tiling(p.q_len, queries), kv, "kv", batch, p.batch)
        xp: Any = np if isinstance(table, np.ndarray) else jnp
        missing = q.count * count - table.shape[2]
        table = xp.pad(table[:, 0], ((0, 0), (0, missing), (0, 0)))
        return xp, xp.broadcast_to(table, (batch, *table.shape[1:])).reshape(-1, count, 4)

    _, slices = ranges(warpgroups, q.block // warpgroups, kv)
    # The ranges of several queries may hold keys that none of them sees, each query's do not.
    xp, table = ranges(min(q.block, p.q_len), 1, Tiling(p.kv_len, 1))
    start, stop = table[..., 0], table[..., 3]
    some = start < stop
    stop_key = xp.where(some, stop, 0).max(axis=1)
    first_key = xp.minimum(xp.where(some, start, np.int32(p.kv_len)).min(axis=1), stop_key)
    request, number = np.divmod(np.arange(batch * q.count, dtype=np.int32), np.int32(q.count))
    queries = np.full_like(request, p.q_len)
    of_tile = request, number * np.int32(q.block), request * queries, queries, first_key, stop_key
    start, stop = first_key // kv.block, -(-stop_key // kv.block)
    return paged.rows_of_schedule(p, of_tile, start, stop, slices, splits)
