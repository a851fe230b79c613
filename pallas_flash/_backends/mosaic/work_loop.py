"""How a persistent CTA goes through its work tiles; see `scheduler` for which these are.

Each warpgroup, and each warp of the producer, runs the same loop for itself. The next work tile is
loaded while the present one is computed. With a dynamic schedule one warp takes work tiles for the
whole CTA and copies them to the stages of a `Pipeline`, where all others read them.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_flash._backends.mosaic import common, ptx, scheduler
from pallas_flash._backends.mosaic.block_ranges import KV_BLOCKS, VISITED, KvBlocks, VisitedBlocks
from pallas_flash._backends.mosaic.pipeline import Pipeline

plgpu = common.plgpu

# Stages for work tiles: the keys of short ones are loaded several work tiles ahead.
STAGES = 4


def pipeline(work_tiles_are_dynamic: bool, readers: int) -> Pipeline | None:
    """Return the stages of work tiles that a CTA takes; None with a static schedule.

    `readers` are the warpgroups and warps that run `for_each`.
    """
    if not work_tiles_are_dynamic:
        return None
    smem = plgpu.SMEM((STAGES, scheduler.DYNAMIC_COLUMNS), jnp.int32)
    return Pipeline.spec(smem, STAGES, copies=1, consumers=readers)


class WorkTile(NamedTuple):
    """A work tile, int32 each.

    Attributes:
        b: batch element, counted over all instances.
        h: query head.
        index: number of the work tile within its head.
        kv_blocks: the K/V blocks that stream past the CTA.
        visited: those that one warpgroup visits; None for who does not ask.
    """

    b: Any
    h: Any
    index: Any
    kv_blocks: KvBlocks
    visited: VisitedBlocks | None

    @staticmethod
    def columns(query_tile=None) -> list:
        """Return the columns of the schedule that `unpack` takes, for one of the query tiles."""
        shared = len(scheduler.WHERE) + KV_BLOCKS
        if query_tile is None:
            return list(range(shared))
        return [*range(shared), *(shared + VISITED * query_tile + n for n in range(VISITED))]

    @classmethod
    def unpack(cls, numbers) -> "WorkTile":
        """Return the work tile that these columns describe."""
        b, h, index, *numbers = numbers
        shared, own = numbers[:KV_BLOCKS], numbers[KV_BLOCKS:]
        visited = VisitedBlocks(*own) if own else None
        return cls(b, h, index, KvBlocks(*shared), visited)


class WorkTiles(NamedTuple):
    """Where a CTA has its work tiles from.

    Attributes:
        schedule: reference to a schedule.
        cta: the number of the CTA, or of its cluster.
        pipeline: see `pipeline`.
        query_tile: function from the number of a CTA's work tile to which of its query tiles the
            `visited` blocks are wanted of, or to None.
        kind: what describes a work tile: a class with `columns` and `unpack`.
    """

    schedule: Any
    cta: Any
    pipeline: Pipeline | None
    query_tile: Any = lambda i: None
    kind: Any = WorkTile


def for_each(tiles: WorkTiles, body, carry, *, takes: bool = False):
    """Run `carry = body(i, work_tile, carry)` over a CTA's work tiles.

    Args:
        tiles: where they are.
        body: takes how many work tiles came before, a work tile, and the carry.
        carry: what it takes first.
        takes: whether this is the warp that takes work tiles of a dynamic schedule.
    """
    if scheduler.is_dynamic(tiles.schedule):
        return _for_each_dynamic(tiles, body, carry, takes)
    return _for_each_static(tiles, body, carry)


def _for_each_static(tiles: WorkTiles, body, carry):
    last = tiles.schedule.shape[1] - 1

    def load(i):
        # Past the last one it loads the last row that there is.
        row = jnp.minimum(i + 1, last)
        columns = tiles.kind.columns(tiles.query_tile(i))
        return [plgpu.load(tiles.schedule.at[tiles.cta, row, x]) for x in columns]

    count = plgpu.load(tiles.schedule.at[tiles.cta, 0, 0])

    def step(i, state):
        numbers, carry = state
        following = load(i + 1)
        return following, body(i, tiles.kind.unpack(numbers), carry)

    first = jnp.int32(0)
    return lax.fori_loop(first, count, step, (load(first), carry))[1]


def _for_each_dynamic(tiles: WorkTiles, body, carry, takes: bool):
    assert tiles.pipeline is not None
    work, last = tiles.pipeline, tiles.schedule.shape[0] - 1

    def take(i, row):
        work.producer_acquire(i)
        plgpu.copy_gmem_to_smem(tiles.schedule.at[row], work.smem_of(i), work.filled(i))

    def read(i):
        work.consumer_wait(i)
        sm = work.smem_of(i)
        numbers = [plgpu.load(sm.at[x]) for x in tiles.kind.columns(tiles.query_tile(i))]
        ptx.fence()
        work.consumer_release(i)
        return numbers

    def next_row():
        """Return a row that no other CTA has, or the end."""
        return jnp.minimum(ptx.count_up(tiles.schedule.at[0, 0]), last) if takes else None

    def exists(state):
        _, _, (b, *_), _ = state
        return b >= 0

    def step(state):
        i, row, numbers, carry = state
        if takes:
            take(i + 1, row)
        carry = body(i, tiles.kind.unpack(numbers), carry)
        # The increment takes time: here there are copies on the way.
        row = next_row()
        return i + 1, row, read(i + 1), carry

    first = jnp.int32(0)
    if takes:
        take(first, 1 + tiles.cta)
    row = next_row()
    return lax.while_loop(exists, step, (first, row, read(first), carry))[-1]
