"""What the kernels of the forward share: the online softmax of a tile, and how tiles are loaded.

Equations are in forward.py. m moves only when it would grow by more than THRESHOLD. That is exact:
acc, l and the LSE share the shift, whatever it is, and p stays below 2^THRESHOLD.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._mosaic import common, ptx, work
from pallas_flash._mosaic.work import ROWS
from pallas_flash._scores import LOG2E, with_sink

plgpu = common.plgpu

THRESHOLD = 8.0
# Less than every score, and a finite number: -inf - -inf would be NaN.
LOWEST = -3e38


class Refs(NamedTuple):
    """What a kernel of the forward reads."""

    items: work.Items
    q: Any
    k: Any
    v: Any
    table: Any  # None if tiles are not listed.
    shared: Any
    seen: Any = None  # For few queries; None if all keys are.
    ends: Any = ()  # How many keys of each example are seen, and `last_tile` of the values.
    bias: Any = None  # If tiles of it are copied.
    bits: Any = ()  # Likewise of masks.


def nothing(value_dim: int, *, large: bool):
    """Where acc, m and l begin."""
    m = jnp.full((ROWS,), -jnp.inf if large else LOWEST, jnp.float32)
    l = jnp.zeros((ROWS,), jnp.float32)
    acc = plgpu.layout_cast(jnp.zeros((ROWS, value_dim), jnp.float32), ptx.ACC)
    return acc, plgpu.layout_cast(m, ptx.ROW), plgpu.layout_cast(l, ptx.ROW)


def softmax(s, c, m, l, *, large: bool):
    """p, float32, and the new m and l, and alpha, for scores s that c takes to base 2."""
    if large:
        grown = jnp.maximum(m, jnp.max(s, axis=1))
        m_new = jnp.where(grown - m > THRESHOLD / LOG2E, grown, m)
        # A row that has seen nothing yet: -inf - -inf would be NaN, -inf - 0 gives weight 0.
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        alpha = jnp.exp2((m - m_safe) * LOG2E)
        # Scores are rounded before m is subtracted, so that the largest weight is exact.
        p = jnp.exp2(ptx.difference(s, common.along_rows(m_safe, s.shape)) * LOG2E)
    else:
        grown = jnp.maximum(m, jnp.max(s, axis=1) * c)
        m_new = jnp.where(grown - m > THRESHOLD, grown, m)
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s * c - common.along_rows(m_new, s.shape))
    return p, m_new, alpha * l + jnp.sum(p, axis=1), alpha


def finish(m, l, sink, *, large: bool):
    """The statistics of `LogSum`, and what the sums of weighted values are multiplied with."""
    alive = l > 0.0
    l, factor = jnp.where(alive, l, 1.0), 1.0
    if large or sink is not None:
        m = jnp.where(alive, m, 0.0)
    if sink is not None and large:
        m, l, factor = with_sink(m, l, sink)
    elif sink is not None:
        m, l, factor = with_sink(m, l, sink * LOG2E, jnp.exp2)
    l_log2 = jnp.log2(l) if large else m + jnp.log2(l)
    l_log2 = jnp.where(alive, l_log2, -jnp.inf)
    return ([m, l_log2] if large else [l_log2]), factor / l


def last_tile(x, seen, block: int):
    """The tile [B, block, N, H] of x in which what is seen ends, with zeros behind that.

    What stands there may be NaN, and 0 * NaN is NaN.

    Args:
        x: [B, T, N, H].
        seen: int32 [B], how many of the first rows are seen.
        block: rows of a tile.
    """
    first = seen // block * block
    rows = first[:, None] + jnp.arange(block, dtype=jnp.int32)[None]
    tile = jax.vmap(lambda x, rows: jnp.take(x, rows, 0, mode="clip"))(x, rows)
    # Places in the whole tile: with those of its rows XLA has a kernel more.
    place = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
    return jnp.where(place < (seen - first)[:, None, None, None], tile, 0)


def from_last_tile_or(ref, last_ref, start, first, seen, block: int):
    """Runs `start(ref, first)`; in that tile, of which `last_ref` is, `start` from there.

    Args:
        ref: all rows.
        last_ref: see `last_tile`.
        start: takes a reference and a row of it.
        first: the row to begin with.
        seen: how many of the example's first rows are seen.
        block: rows of a tile.
    """
    end = seen - common.remainder(seen, block)
    inside = (first >= end) & (first < end + block)
    pl.when(inside)(lambda: start(last_ref, first - end))
    pl.when(jnp.logical_not(inside))(lambda: start(ref, first))


def copy(ref, index, destination, barrier, members: int = 1):
    """A tile to shared memory, 64 columns at a time; to that of all members, each a part."""
    axes = None if members == 1 else common.MEMBER
    for n in range(destination.shape[0]):
        columns = common.block_of_columns(n, index[0])
        tile = ref.at[(*index, columns)]
        plgpu.copy_gmem_to_smem(tile, destination.at[n], barrier, collective_axes=axes)


def copy_keys_and_values(
    refs, memory, tiles: work.Tiles, at, used, members: int = 1, beside=lambda i, first_key: None
):
    """The tiles of an item, each to its slot as soon as that is free.

    Args:
        refs: with `k` and `v`.
        memory: with k_sm, k_full and k_free, and those of v.
        tiles: which.
        at: the example and the key/value head.
        used: tiles that this program had before.
        members: programs that share them.
        beside: starts what else is copied for a tile, the i-th one of this program.
    """
    b, h = at
    stages, block = memory["k_sm"].shape[0], memory["k_sm"].shape[2]
    ring = common.Ring(stages)
    seen_ref, last_v_ref = refs.ends or (None, None)
    seen = None if seen_ref is None else plgpu.load(seen_ref.at[b])

    def one(j, _):
        slot, first = ring(used + j), tiles.at(j) * block

        def start(x, ref, first):
            at = b, pl.ds(first, block), h
            copy(ref, at, memory[f"{x}_sm"].at[slot], memory[f"{x}_full"].at[slot], members)

        beside(used + j, first)
        ring.refill(used + j, memory["k_free"])
        start("k", refs.k, first)
        ring.refill(used + j, memory["v_free"])
        start_v = functools.partial(start, "v")
        if seen is None:
            start_v(refs.v, first)
        else:
            from_last_tile_or(refs.v, last_v_ref, start_v, first, seen, block)

    lax.fori_loop(jnp.int32(0), tiles.count, one, None)


def beside_one_another(items: work.Items, keys_and_values, *queries):
    """Runs each over a program's items, in a warp of its own; the first one takes them.

    Args:
        items: those of the first one.
        keys_and_values: its body for `work.for_each_item`, which counts from 0, as the others do.
        *queries: for each of the others its items, and its body.
    """

    @plgpu.warp_map
    def _(warp):
        @pl.when(warp == 0)
        def _():
            work.for_each_item(items, keys_and_values, jnp.int32(0), takes=True)

        for n, (items_of_warp, body) in enumerate(queries, 1):

            @pl.when(warp == n)
            def _(items=items_of_warp, body=body):
                work.for_each_item(items, body, jnp.int32(0))
