"""Which tiles a mask leaves, and which program computes them when."""

import functools
import heapq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash import _compat
from pallas_flash._masks import FAR, Mask, Tiling, edges_first, listed_edges_first
from pallas_flash._problem import Problem

plgpu = _compat.mosaic_gpu()

# Bytes of keys and values that programs of different heads stream at the same time: so many stay in
# the L2 cache of an H100 (50 MB) beside all else.
L2_SHARE = 24 * 10**6

# The cores (SMs) of an H100 and of an H200. On a GPU with fewer, some programs start late.
CORES = 132


# ------------------------------------------------------------------------------------------------
# Tiles that a mask leaves
# ------------------------------------------------------------------------------------------------


def table(
    mask: Mask,
    q: Tiling,
    kv: Tiling,
    flow: str,
    examples: int,
    batch: int,
    groups: int = 1,
    *,
    sums_keys: bool = False,
):
    """The tiles that stream past each one that stays: ranges, or lists if `mask.scattered`.

    Args:
        mask: with an axis of instances before all others of its arrays.
        q: the tiles of queries.
        kv: the tiles of keys.
        flow: the side that streams past, "q" or "kv".
        examples: those of all instances.
        batch: those of one.
        groups: heads after each other that share a list.
        sums_keys: as of `Mask.q_ranges`, where queries stream past.

    Returns:
        int32 [1 or examples, 1 or heads, tiles that stay, 4 or 2 + tiles that stream], examples
        counted over all instances; NumPy where it depends on no array.
    """

    def of_one(mask: Mask):
        if mask.scattered:
            return (mask.kv_lists if flow == "kv" else mask.q_lists)(q, kv, groups)
        if flow == "kv":
            return mask.kv_ranges(q, kv)[:, None]
        return mask.q_ranges(q, kv, sums_keys=sums_keys)[:, None]

    rows = of_instances(of_one, mask, examples // batch)
    if rows.shape[:2] not in ((1, 1), (examples // batch, batch)):
        rows = jnp.broadcast_to(rows, (examples // batch, batch, *rows.shape[2:]))
    return rows.reshape(-1, *rows.shape[2:])


def of_instances(function, mask: Mask, instances: int):
    """`function(mask)` of each instance, [1 or instances, ...].

    The mask has an axis of instances before all others of its arrays.
    """
    if all(len(x) == 1 for x in jax.tree.leaves(mask)):
        return function(jax.tree.map(lambda x: x[0], mask))[None]
    mask = jax.tree.map(lambda x: jnp.broadcast_to(x, (instances, *x.shape[1:])), mask)
    return jax.vmap(function)(mask)


class Tiles(NamedTuple):
    """The tiles that stream past one, those that need the mask first.

    Attributes:
        edges: how many need it.
        count: how many there are.
        at: takes a place in the list to the number of the tile there.
    """

    edges: Any
    count: Any
    at: Any


def entries(rows, listed: bool):
    """What `tiles_of` takes for each row of `table`: int32 [..., 4].

    The row itself; or of a list the number of the row, that of full tiles, that of all, and where
    in the list they begin.
    """
    if not listed:
        return rows
    full, count = rows[..., 0], rows[..., 1]
    number = np.arange(full.size, dtype=np.int32).reshape(full.shape)
    return jnp.stack([number, full, count, 0 * count], axis=-1)


def for_warpgroups(rows, warpgroups: int):
    """Ranges of so many neighbouring query tiles, [..., tiles, 4], in one, [..., 4 + warpgroups].

    Behind the range of all is how many tiles come first in it that each of them does not see.
    """
    xp: Any = np if isinstance(rows, np.ndarray) else jnp
    rows = xp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % warpgroups), (0, 0)))
    rows = rows.reshape(*rows.shape[:2], -1, warpgroups, 4)
    start, full_start, full_stop, stop = (rows[..., i] for i in range(4))
    some, far = start < stop, np.int32(FAR)
    first, last = xp.where(some, start, far).min(axis=-1), stop.max(axis=-1)
    first = xp.minimum(first, last)
    # What is full for all that see something.
    full_start = xp.where(some, full_start, 0).max(axis=-1)
    full_stop = xp.where(some, full_stop, far).min(axis=-1)
    # Where none sees anything, neither bound has been met.
    none_full = (full_stop <= full_start) | ~some.any(axis=-1)
    full_start, full_stop = (xp.where(none_full, first, x) for x in (full_start, full_stop))
    nothing = xp.where(some, last[..., None] - stop, (last - first)[..., None])
    full_stop = xp.minimum(full_stop, last)
    columns = xp.stack([first, full_start, full_stop, last], axis=-1)
    return xp.concatenate([columns, nothing], axis=-1).astype(np.int32)


def tiles_of(entry, table_ref) -> Tiles:
    """Those of an entry.

    Args:
        entry: four numbers, see `entries`, and possibly more.
        table_ref: `table` with all its rows on one axis if it holds lists, else None.
    """
    if table_ref is None:
        return Tiles(*edges_first(*entry[:4]))
    row, full, count, first, *_ = entry
    first = first + 2
    return Tiles(
        *listed_edges_first(full, count, lambda i: plgpu.load(table_ref.at[row, first + i])),
    )


# ------------------------------------------------------------------------------------------------
# Who does what
# ------------------------------------------------------------------------------------------------

# Columns of a program's list: where an item's query tile is. What follows is its entry.
WHERE = ("b", "h", "q_tile")


def worklists(problem: Problem, batch: int, mask: Mask, entries):
    """int32 [programs, 1 + items, columns]: the items of each program, behind their number.

    Programs stay on their core, as a dynamic scheduler would have it: who is free takes the next
    item. Long ones come first, of as many heads at a time as share the L2 cache. An order that
    does not look at the lengths can resonate with them: measured with a prototype on an H200,
    causal, one lost 40 %, and this one gains 6 to 18 % against a program for each tile.

    Args:
        problem: the call.
        batch: examples, of all instances.
        mask: that of the call.
        entries: [1 or B, 1 or N, query tiles, columns], begins with what `tiles_of` takes.
    """
    p = problem
    streamed = p.kv_len * (p.head_dim + p.value_dim) * p.dtype.itemsize
    heads = max(1, int(L2_SHARE // streamed)) * p.groups if mask else 1
    heads = min(heads, batch * p.num_heads)
    if isinstance(entries, np.ndarray):
        return _worklists(batch, p.num_heads, heads, entries.tobytes(), entries.shape)
    return _worklists_of_arrays(batch, p.num_heads, entries, mask.scattered)


@functools.lru_cache(maxsize=64)
def _worklists(batch: int, num_heads: int, heads: int, ranges: bytes, shape) -> np.ndarray:
    table: Any = np.frombuffer(ranges, np.int32).reshape(shape[2:])
    rows = batch * num_heads
    lengths = table[:, 3] - table[:, 0]
    order = np.argsort(-lengths, kind="stable")
    programs = min(CORES, rows * len(order))
    items: list[list[tuple]] = [[] for _ in range(programs)]
    # When each program is free, counted in key tiles.
    free = [(0.0, i) for i in range(programs)]
    for first in range(0, rows, heads):
        for tile in order:
            for row in range(first, min(first + heads, rows)):
                time, program = heapq.heappop(free)
                items[program].append((*divmod(row, num_heads), tile, *table[tile]))
                # Starting an item and storing its output take as long as about 1.5 key tiles.
                heapq.heappush(free, (time + lengths[tile] + 1.5, program))
    lists = np.zeros((programs, 1 + max(map(len, items)), len(WHERE) + shape[-1]), np.int32)
    for program, mine in enumerate(items):
        lists[program, 0, 0] = len(mine)
        lists[program, 1 : 1 + len(mine)] = mine
    return lists


def _worklists_of_arrays(batch: int, num_heads: int, entries, listed: bool):
    """The same for lengths that only the GPU knows, which deals the items out without counting.

    Two for each program at a time, of neighbouring heads: the longest to the first one, and so on,
    then to the last one, and so back. Each time another program is first, and every other time the
    order is reversed, for lengths of one head are much like those of the next, and who is first has
    more than others. Simulated for documents, the last program is done 2 to 7 % after the mean.
    """
    tiles, rows = entries.shape[2], batch * num_heads
    number = np.arange(rows * tiles)
    row, tile = number // tiles, number % tiles
    mine = [
        x if n > 1 else 0 * x for x, n in zip(divmod(row, num_heads), entries.shape, strict=False)
    ]
    entry = jnp.asarray(entries)[(*mine, tile)]
    if listed:
        _, full, count = (entry[:, i] for i in range(3))
        edges = count - full
    else:
        start, full_start, full_stop, stop = (entry[:, i] for i in range(4))
        count, edges = stop - start, full_start - start + stop - full_stop
    where = np.stack([*divmod(row, num_heads), tile], axis=-1).astype(np.int32)
    items = jnp.concatenate([where, entry], axis=-1).astype(jnp.int32)

    programs = min(CORES, len(number))
    deals = -(-len(number) // (2 * programs))
    deal = np.arange(deals)[:, None]
    # What is missing in the last deal comes last in it. A tile at an edge takes twice as long.
    missing = deals * 2 * programs - len(number)
    length = jnp.pad(count + edges, (0, missing), constant_values=-1).reshape(deals, 2 * programs)
    order = jnp.argsort(-length, axis=1, stable=True)
    place = (np.arange(programs) + deal // 2 * programs // -(-deals // 2)) % programs
    place = np.where(deal % 2, programs - 1 - place, place)
    place = np.concatenate([place, 2 * programs - 1 - place], axis=1)
    chosen = jnp.take_along_axis(order, place, axis=1) + 2 * programs * deal
    chosen = jnp.minimum(chosen, len(number) - 1).reshape(2 * deals, programs)
    exists = place + 2 * programs * deal < len(number)
    heading = np.zeros((programs, 1, items.shape[1]), np.int32)
    heading[:, 0, 0] = exists.reshape(2 * deals, programs).sum(axis=0)
    return jnp.concatenate([heading, items[chosen.T]], axis=1)


def for_each_item(list_ref, program, body, carry):
    """Runs `carry = body(i, item, carry)` over a program's list; an item is loaded one ahead."""

    def load(i):
        return [plgpu.load(list_ref.at[program, i, column]) for column in range(list_ref.shape[2])]

    count = plgpu.load(list_ref.at[program, 0, 0])

    def step(i, state):
        item, carry = state
        # Past the last one it loads the last row that there is.
        following = load(jnp.minimum(i + 2, list_ref.shape[1] - 1))
        return following, body(i, item, carry)

    return lax.fori_loop(jnp.int32(0), count, step, (load(jnp.int32(1)), carry))[1]
