"""The tile scheduler: which CTA computes which query tiles, and in which order.

The kernels are persistent: at most one CTA for each SM, which computes work tiles until none is
left. A work tile is a head's query tiles, one for each consumer warpgroup of a CTA or of a cluster
(`QueryTiles`), with the blocks that these visit (`block_ranges`). In `forward_wide` both consumer
warpgroups of a CTA have one query tile. The longest work tiles come first
(LPT order), so that no CTA is late at the end; but only few heads come at a time, because the L2
cache holds their keys and values.

    static schedule     masks known at tracing: NumPy counts the blocks before the launch. It
                        simulates a dynamic scheduler, and each CTA reads a list of its own.
    dynamic schedule    masks with arrays or predicates: XLA sorts the work tiles on the GPU. All
                        CTAs share one list, and who is free takes the next work tile by an atomic
                        increment.

A row of a schedule, all int32:

    b, h, index  | first, count, full | start, full, tail, stop | start, full, tail, stop | ...
    `WHERE`        `KvBlocks`           `VisitedBlocks` of the first query tile, the second, ...

where index is the number of the work tile in its head.

`work_loop` is the other half: how a CTA reads its work tiles.
"""

import dataclasses
import functools
import heapq
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_flash._backends.mosaic import block_ranges
from pallas_flash._problem.features import CallFeatures, features_of
from pallas_flash._problem.masks import Mask
from pallas_flash._problem.problem import Problem

# SMs of an H100 and of an H200. On a GPU with fewer, some CTAs start late.
NUM_SMS = 132

QUERY_ROWS = 64  # Queries of a warpgroup: the rows of one wgmma instruction.

# Bytes of keys and values of the heads that are in work at a time: for a dynamic schedule half of
# the L2 cache of an H100 (50 MB), beside all else.
DYNAMIC_L2_BYTES = 24 * 10**6
# Fewer are faster with a static schedule, but one head at a time is slower at head dim 64.
STATIC_L2_BYTES = 4 * 10**6

# Work tiles of each CTA that are sorted together at the end of a static schedule. In a simulation
# of causal calls with many heads the last CTA is done 0.4 to 2.7 % after the mean.
WORK_TILES_AT_END = 2
# K/V blocks that take as long as to start a work tile and to store its output.
BLOCKS_OF_A_START = 1.5

# Work tiles that are sorted together at the end of a dynamic schedule, at least.
SORTED_TOGETHER = 768
# int32 numbers of a work tile in a dynamic schedule: its copies have 128 bytes or more.
DYNAMIC_COLUMNS = 32

# Columns of a schedule before `block_ranges.pack`: batch element, query head, work tile.
WHERE = ("b", "h", "index")


@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """Which query tiles of `QUERY_ROWS` make up a work tile.

    There is one for each consumer warpgroup, but in `forward_wide` one for each CTA. In a cluster
    these are the warpgroups of both CTAs.

    They are neighbours, or `folded`: the sequence is cut into as many stretches as a work tile has
    query tiles, and it has one from each, from the front and from the back in turn. Under a causal
    mask later queries see more keys. Where no CTA has a second work tile, the CTA with the last
    neighbours would work long after the others; folded, all have as much to do, and the warpgroup
    with the last query tile has the matrix units for itself most of the time.

    Attributes:
        count: query tiles of a work tile, over all CTAs of a cluster.
        per_head: work tiles of a head.
        folded: as above.
    """

    count: int
    per_head: int
    folded: bool

    @classmethod
    def from_problem(cls, problem: Problem, batch: int, warpgroups: int, cluster_size: int = 1):
        """Return the query tiles of a call.

        Args:
            problem: the call.
            batch: batch elements of all instances.
            warpgroups: consumer warpgroups of a CTA that have query tiles of their own.
            cluster_size: CTAs that share a work tile.
        """
        count = warpgroups * cluster_size
        per_head = -(-problem.q_len // (count * QUERY_ROWS))
        features = dataclasses.replace(features_of(problem), batch=batch)
        return cls(count, per_head, cluster_size == 1 and folded(features, warpgroups))

    def first_row(self, index, query_tile):
        """Return the first query of one of a work tile's query tiles."""
        if not self.folded:
            return index * (self.count * QUERY_ROWS) + query_tile * QUERY_ROWS
        odd = query_tile & 1
        tile = query_tile * self.per_head + odd * (self.per_head - 1) + (1 - 2 * odd) * index
        return tile * QUERY_ROWS

    def in_work_tile_order(self, rows):
        """Return rows [1 or B, 1 or N, query tiles, ...] in the order of work tiles."""
        if not self.folded:
            return rows
        missing = self.per_head * self.count - rows.shape[2]
        rows = np.pad(rows, ((0, 0), (0, 0), (0, missing), (0, 0)))
        index, query_tile = np.ogrid[: self.per_head, : self.count]
        return rows[:, :, self.first_row(index, query_tile).reshape(-1) // QUERY_ROWS]


def num_work_tiles(f: CallFeatures, warpgroups: int) -> int:
    """Return the number of work tiles of a forward, of which each has a query tile a warpgroup."""
    return f.batch * f.num_heads * -(-f.q_len // (warpgroups * QUERY_ROWS))


def folded(f: CallFeatures, warpgroups: int) -> bool:
    """Return whether work tiles are folded: causal ones, where no CTA has a second one."""
    return f.causal and num_work_tiles(f, warpgroups) <= NUM_SMS


def most_rows(f: CallFeatures, warpgroups: int) -> int:
    """Return the queries of the CTA that has most, where all queries see as many keys."""
    return -(-num_work_tiles(f, warpgroups) // NUM_SMS) * warpgroups * QUERY_ROWS


def schedule(problem: Problem, batch: int, mask: Mask, streams, cluster_size: int = 1):
    """Return the work tiles of a launch: `static_schedule` or `dynamic_schedule`.

    Args:
        problem: the call.
        batch: batch elements of all instances.
        mask: the mask of the call, and what hides the padding of a ragged K/V tile.
        streams: `block_ranges.pack` of all work tiles, [1 or B, 1 or N, work tiles, columns].
        cluster_size: CTAs that have a list together; 1 with a dynamic schedule.
    """
    p = problem
    kv_bytes = p.kv_len * (p.head_dim + p.value_dim) * p.dtype.itemsize
    static = isinstance(streams, np.ndarray)
    l2_bytes = STATIC_L2_BYTES if static else DYNAMIC_L2_BYTES
    heads = max(1, l2_bytes // kv_bytes) * p.groups if mask else 1
    heads = min(heads, batch * p.num_heads)
    if static:
        table = streams.tobytes(), streams.shape
        return static_schedule(batch, p.num_heads, heads, NUM_SMS // cluster_size, *table)
    # CTAs of a cluster would take different work tiles, and wait for each other for ever.
    assert cluster_size == 1, cluster_size
    return dynamic_schedule(batch, p.num_heads, heads, streams)


def is_dynamic(work_tiles) -> bool:
    """Return whether a schedule, or a reference to it, is dynamic."""
    return len(work_tiles.shape) == 2


def num_ctas(work_tiles) -> int:
    """Return the number of CTAs, or clusters, that a schedule is for."""
    return min(NUM_SMS, len(work_tiles) - 2) if is_dynamic(work_tiles) else len(work_tiles)


@functools.lru_cache(maxsize=64)
def static_schedule(
    batch: int, num_heads: int, heads: int, most: int, streams: bytes, shape
) -> np.ndarray:
    """Return int32 [CTAs, 1 + work tiles, columns]: the number of a CTA's work tiles, then these.

    A fixed order that does not look at lengths can resonate with them: in a causal call on an H200
    a prototype lost 40 % by it.

    Args:
        batch: batch elements of all instances.
        num_heads: query heads.
        heads: heads that are sorted together.
        most: CTAs at most.
        streams: the bytes of `schedule`'s.
        shape: their shape.
    """
    table: Any = np.frombuffer(streams, np.int32).reshape(shape[2:])
    blocks, _ = block_ranges.unpack(table)
    rows, lengths = batch * num_heads, blocks.count
    order = np.argsort(-lengths, kind="stable")
    ctas = min(most, rows * len(order))
    # Where the heads begin that are sorted together.
    at_end = -(-WORK_TILES_AT_END * ctas // len(order)) if lengths.min() < lengths.max() else heads
    last = max(0, rows - at_end) // heads * heads
    firsts = [*range(0, last, heads), last]
    lists: list[list[tuple]] = [[] for _ in range(ctas)]
    # When each CTA is free, counted in K/V blocks.
    free = [(0.0, i) for i in range(ctas)]
    for first, after in zip(firsts, [*firsts[1:], rows], strict=True):
        for tile in order:
            for row in range(first, after):
                time, cta = heapq.heappop(free)
                lists[cta].append((*divmod(row, num_heads), tile, *table[tile]))
                heapq.heappush(free, (time + lengths[tile] + BLOCKS_OF_A_START, cta))
    schedule = np.zeros((ctas, 1 + max(map(len, lists)), len(WHERE) + shape[-1]), np.int32)
    for cta, mine in enumerate(lists):
        schedule[cta, 0, 0] = len(mine)
        schedule[cta, 1 : 1 + len(mine)] = mine
    return schedule


def dynamic_schedule(batch: int, num_heads: int, heads: int, streams):
    """Return int32 [1 + work tiles + 1, DYNAMIC_COLUMNS], of which each CTA takes the next row.

    A CTA begins with row 1 + its number. Row 0 begins with the number of the row to be taken next;
    the last row, with a negative batch element, is the end.

    Simulated for causal documents, 1 to 40 in 16384 to 65536 tokens, of 16 heads: the last CTA is
    done no more than 2.1 % after the mean, and with a cache of 20 MB device memory delivers 0.3 to
    0.6 of the bytes that it does if 1024 work tiles are always sorted together.

    Args:
        batch: batch elements of all instances.
        num_heads: query heads.
        heads: heads whose keys and values share the L2 cache.
        streams: see `schedule`.
    """
    own, tiles = streams.shape[1:3]
    rows, alike = batch * own, num_heads // own
    # Rows of tiles that are sorted together: more than one where a head has few.
    least = min(rows, -(-SORTED_TOGETHER // (tiles * alike)))
    together = next(n for n in range(least, rows + 1) if rows % n == 0)
    # Heads that are alike and come together, and those that do at the end.
    most = min(alike, max(1, heads // together))
    heads = next(n for n in range(most, 0, -1) if alike % n == 0)
    at_end = min(alike, -(-SORTED_TOGETHER // (tiles * together * heads)) * heads)
    streams = jnp.broadcast_to(jnp.asarray(streams), (batch, *streams.shape[1:]))
    streams = streams.reshape(rows // together, together * tiles, -1)
    _, visited = block_ranges.unpack(streams)
    # A partial block takes twice as long.
    work = 2 * (visited.stop - visited.start) - (visited.tail - visited.full)
    order = jnp.argsort(-work.sum(axis=2), axis=1, stable=True).astype(jnp.int32)
    first = together * np.arange(len(order), dtype=np.int32)[:, None]
    row, tile = first + order // np.int32(tiles), order % np.int32(tiles)
    b, h = row // np.int32(own), row % np.int32(own) * np.int32(alike)
    numbers = jnp.stack([b, h, tile], axis=-1), jnp.take_along_axis(streams, order[..., None], 1)
    table = jnp.concatenate(numbers, axis=-1)
    table = jnp.pad(table, ((0, 0), (0, 0), (0, DYNAMIC_COLUMNS - table.shape[2])))
    # [rows, heads, work tiles of a head, DYNAMIC_COLUMNS]
    table = jnp.broadcast_to(table[:, None], (len(order), alike, *table.shape[1:]))
    head = np.arange(alike, dtype=np.int32).reshape(1, alike, 1, 1)
    table += head * (np.arange(DYNAMIC_COLUMNS, dtype=np.int32) == WHERE.index("h"))

    def side_by_side(entries, heads: int):
        entries = entries.reshape(-1, heads, *entries.shape[-2:])
        return entries.swapaxes(1, 2).reshape(-1, DYNAMIC_COLUMNS)

    last = side_by_side(table[-1, alike - at_end :], at_end)
    table = side_by_side(table, heads)
    table = jnp.concatenate([table[: len(table) - len(last)], last])
    before, after = np.zeros((2, 1, DYNAMIC_COLUMNS), np.int32)
    before[0, 0], after[0, 0] = 1 + min(NUM_SMS, len(table)), -1
    return jnp.concatenate([before, table, after])
