"""Which blocks of keys a query tile visits, and in which order.

A mask divides the K/V blocks of a query tile into three kinds: *full* blocks, whose pairs are all
allowed, *partial* blocks, to which the mask must be applied, and *empty* ones, which are skipped.
Masks give them as ranges `start, full_start, full_stop, stop`, or as lists where they are
block-sparse (`Mask.scattered`).

The warpgroups of a CTA have query tiles of their own and share K/V blocks. So a work tile of the
forward has two descriptions:

    KvBlocks        which blocks stream past the CTA: all that any of its warpgroups visits, from
                    the last one down; or the blocks of a list, partial ones first
    VisitedBlocks   which places of this stream one warpgroup visits

Take three warpgroups under a causal mask, and blocks as long as a query tile. The first warpgroup
visits blocks 0 to 4, the second 0 to 5, the third 0 to 6, each with a partial last one:

    stream          block 6    5    4    3    2    1    0          KvBlocks(first=6, count=7)
    warpgroup 0     skip  skip  partial  full full full full       VisitedBlocks(2, 3, 7, 7)
    warpgroup 1     skip  partial  full  full full full full       VisitedBlocks(1, 2, 7, 7)
    warpgroup 2     partial  full  full  full full full full       VisitedBlocks(0, 1, 7, 7)

The last block comes first because under a causal mask it is the one that rows see in part: masks
are applied while the pipeline fills.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash._jax import compat
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.masks import FAR, Mask
from pallas_flash._problem.traversal import edges_first, listed_edges_first

plgpu = compat.mosaic_gpu()


# ------------------------------------------------------------------------------------------------
# Blocks of a mask
# ------------------------------------------------------------------------------------------------


def block_table(
    mask: Mask,
    q: Tiling,
    kv: Tiling,
    inner: str,
    elements: int,
    batch: int,
    groups: int = 1,
    *,
    sums_keys: bool = False,
):
    """Return the inner tiles of each outer tile: ranges, or lists if `mask.scattered`.

    Args:
        mask: the mask, with an axis of instances before all others of its arrays.
        q: the tiles of queries.
        kv: the blocks of keys.
        inner: the inner side, "q" or "kv".
        elements: batch elements of all instances.
        batch: batch elements of one instance.
        groups: neighbouring heads that share a list.
        sums_keys: see `Mask.q_ranges`, where queries are the inner side.

    Returns:
        int32 [1 or elements, 1 or heads, outer tiles, 4 or 2 + inner tiles]; NumPy where it
        depends on no array.
    """

    def of_one(mask: Mask):
        if mask.scattered:
            return (mask.kv_lists if inner == "kv" else mask.q_lists)(q, kv, groups)
        if inner == "kv":
            return mask.kv_ranges(q, kv)[:, None]
        return mask.q_ranges(q, kv, sums_keys=sums_keys)[:, None]

    rows = map_instances(of_one, mask, elements // batch)
    if rows.shape[:2] not in ((1, 1), (elements // batch, batch)):
        rows = jnp.broadcast_to(rows, (elements // batch, batch, *rows.shape[2:]))
    return rows.reshape(-1, *rows.shape[2:])


def map_instances(function, mask: Mask, instances: int):
    """Return `function(mask)` of each instance, [1 or instances, ...].

    The mask has an axis of instances before all others of its arrays.
    """
    if all(len(x) == 1 for x in jax.tree.leaves(mask)):
        return function(jax.tree.map(lambda x: x[0], mask))[None]
    mask = jax.tree.map(lambda x: jnp.broadcast_to(x, (instances, *x.shape[1:])), mask)
    return jax.vmap(function)(mask)


# ------------------------------------------------------------------------------------------------
# Streams of the forward
# ------------------------------------------------------------------------------------------------


class KvBlocks(NamedTuple):
    """The K/V blocks that stream past the warpgroups of a CTA, int32 each.

    Attributes:
        first: number of the first block, after which they descend; the row of the table for lists.
        count: number of blocks.
        full: number of full blocks of a list, which come last; 0 for ranges.
    """

    first: Any
    count: Any
    full: Any

    def block_at(self, place, table_ref):
        """Return the number of the block at a place of the stream.

        `table_ref` is `block_table` with all rows on one axis if it holds lists, else None.
        """
        if table_ref is None:
            return self.first - place
        *_, block_at = listed_edges_first(
            self.full, self.count, lambda i: plgpu.load(table_ref.at[self.first, 2 + i])
        )
        return block_at(place)


class VisitedBlocks(NamedTuple):
    """The places of a stream that one warpgroup visits, int32 each; it skips all others.

    Attributes:
        start: place of the first block that it visits. Blocks are partial up to `full`, and
            under a mask the first one counts as partial whatever it is.
        full: place of the first full block.
        tail: place of the first partial block after the full ones.
        stop: place after the last block that it visits.
    """

    start: Any
    full: Any
    tail: Any
    stop: Any


KV_BLOCKS, VISITED = len(KvBlocks._fields), len(VisitedBlocks._fields)


def pack(blocks: KvBlocks, visited: VisitedBlocks):
    """Return int32 [..., KV_BLOCKS + warpgroups * VISITED] of [...] and [..., warpgroups]."""
    known = isinstance(blocks.count, np.ndarray)
    xp: Any = np if known else jnp
    shared = xp.stack(xp.broadcast_arrays(*blocks), axis=-1)
    own = xp.stack(xp.broadcast_arrays(*visited), axis=-1)
    own = own.reshape(*own.shape[:-2], -1)
    return xp.concatenate([shared, own], axis=-1).astype(np.int32)


def unpack(numbers) -> tuple[KvBlocks, VisitedBlocks]:
    """Return what `pack` was given."""
    shared, own = numbers[..., :KV_BLOCKS], numbers[..., KV_BLOCKS:]
    own = own.reshape(*own.shape[:-1], -1, VISITED)
    return (
        KvBlocks(*(shared[..., i] for i in range(KV_BLOCKS))),
        VisitedBlocks(*(own[..., i] for i in range(VISITED))),
    )


def streams_of_ranges(ranges, warpgroups: int):
    """Return `pack` of ranges [..., query tiles, 4], of which a work tile has `warpgroups`."""
    xp: Any = np if isinstance(ranges, np.ndarray) else jnp
    ranges = xp.pad(ranges, ((0, 0), (0, 0), (0, -ranges.shape[2] % warpgroups), (0, 0)))
    ranges = ranges.reshape(*ranges.shape[:2], -1, warpgroups, 4)
    start, full_start, full_stop, stop = (ranges[..., i] for i in range(4))
    some = start < stop
    last = xp.where(some, stop, 0).max(axis=-1)
    first = xp.minimum(xp.where(some, start, np.int32(FAR)).min(axis=-1), last)
    count = last - first
    # Query tiles that visit nothing skip the whole stream.
    places = (last[..., None] - x for x in (stop, full_stop, full_start, start))
    visited = VisitedBlocks(*(xp.where(some, x, count[..., None]) for x in places))
    return pack(KvBlocks(last - 1, count, 0 * count), visited)


def streams_of_lists(lists, query_tiles: int, warpgroups: int):
    """Return `pack` of lists, of which a CTA has one for `warpgroups` neighbouring query tiles.

    A block that is partial for one of them counts as partial for all.
    """
    full, count = lists[..., 0], lists[..., 1]
    row = np.arange(full.size, dtype=np.int32).reshape(full.shape)
    tile = np.arange(lists.shape[2] * warpgroups).reshape(1, 1, -1, warpgroups)
    # Query tiles beyond the last one skip all blocks.
    count_ = count[..., None]
    start = jnp.where(tile < query_tiles, 0, count_)
    visited = VisitedBlocks(start, jnp.maximum(start, count_ - full[..., None]), count_, count_)
    return pack(KvBlocks(row, jnp.asarray(count), full), visited)


def streams(mask: Mask, query_tiles, q: Tiling, rows: Tiling, kv: Tiling, batch: int, problem):
    """Return the `block_table` of a forward, and `pack` of all work tiles.

    Args:
        mask: the mask, as of `block_table`.
        query_tiles: `scheduler.QueryTiles`.
        q: the queries of a work tile.
        rows: the queries of a query tile.
        kv: the blocks of keys.
        batch: batch elements of all instances.
        problem: the call.
    """
    of_lists = q if mask.scattered else rows
    table = block_table(mask, of_lists, kv, "kv", batch, problem.batch)
    if mask.scattered:
        return table, streams_of_lists(table, rows.count, query_tiles.count)
    return table, streams_of_ranges(query_tiles.in_work_tile_order(table), query_tiles.count)


def have_partial_tail(streams) -> bool:
    """Return whether a warpgroup may visit partial blocks after full ones."""
    if not isinstance(streams, np.ndarray):
        return True
    _, visited = unpack(streams)
    return bool((visited.tail < visited.stop).any())


# ------------------------------------------------------------------------------------------------
# Streams of decoding: partial blocks, then full ones
# ------------------------------------------------------------------------------------------------


class PartialFirst(NamedTuple):
    """The K/V blocks of one query tile, partial ones first.

    Attributes:
        partial: number of partial blocks.
        count: number of all blocks.
        block_at: function from a place to the number of the block there.
    """

    partial: Any
    count: Any
    block_at: Any


def entries(rows, scattered: bool):
    """Return what `partial_first` takes for each row of `block_table`: int32 [..., 4].

    That is the row itself; or of a list the number of the row, the number of full blocks, of all,
    and the place in the list where they begin.
    """
    if not scattered:
        return rows
    full, count = rows[..., 0], rows[..., 1]
    number = np.arange(full.size, dtype=np.int32).reshape(full.shape)
    return jnp.stack([number, full, count, 0 * count], axis=-1)


def partial_first(entry, table_ref) -> PartialFirst:
    """Return the blocks of an entry; `table_ref` as of `KvBlocks.block_at`."""
    if table_ref is None:
        return PartialFirst(*edges_first(*entry))
    row, full, count, first = entry
    first = first + 2

    def block_at(i):
        return plgpu.load(table_ref.at[row, first + i])

    return PartialFirst(*listed_edges_first(full, count, block_at))
