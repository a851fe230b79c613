"""Which tiles a mask leaves, and which program computes them when."""

import functools
import heapq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash._masks import FAR, Mask, Tiling, edges_first, listed_edges_first
from pallas_flash._mosaic import common, ptx
from pallas_flash._problem import Problem

plgpu = common.plgpu

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

# Columns of a list: where an item's query tile is. What follows is its entry.
WHERE = ("b", "h", "q_tile")


def worklists(problem: Problem, batch: int, mask: Mask, entries):
    """The query tiles of a launch as items, whose programs stay on their core; long ones first.

    Where lengths are known, NumPy int32 [programs, 1 + items, columns]: the items of each program,
    behind their number, as a dynamic scheduler would have it: who is free takes the next item. They
    are sorted for as many heads at a time as share the L2 cache. An order that does not look at the
    lengths can resonate with them: measured with a prototype on an H200, causal, one lost 40 %, and
    this one gains 6 to 18 % against a program for each tile.

    Where only the GPU knows lengths, it is what `longest_first` returns, and programs take the next
    item indeed.

    Args:
        problem: the call.
        batch: examples, of all instances.
        mask: that of the call.
        entries: [1 or B, 1 or N, query tiles, columns], begins with what `tiles_of` takes.
    """
    p = problem
    if not isinstance(entries, np.ndarray):
        return longest_first(batch, p.num_heads, entries, mask.scattered)
    streamed = p.kv_len * (p.head_dim + p.value_dim) * p.dtype.itemsize
    heads = max(1, int(L2_SHARE // streamed)) * p.groups if mask else 1
    heads = min(heads, batch * p.num_heads)
    return _worklists(batch, p.num_heads, heads, entries.tobytes(), entries.shape)


def programs_of(lists) -> int:
    """How many programs `worklists` are for."""
    return len(lists) if lists.ndim == 3 else _programs(len(lists) - 2)


def _programs(items: int) -> int:
    """Those of so many items."""
    return min(CORES, items)


@functools.lru_cache(maxsize=64)
def _worklists(batch: int, num_heads: int, heads: int, ranges: bytes, shape) -> np.ndarray:
    table: Any = np.frombuffer(ranges, np.int32).reshape(shape[2:])
    rows = batch * num_heads
    lengths = table[:, 3] - table[:, 0]
    order = np.argsort(-lengths, kind="stable")
    programs = _programs(rows * len(order))
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


# Items that are sorted by length together, at least, and columns of their list: copies have 128
# bytes or more.
SORTED, NUMBERS = 1024, 32


def longest_first(batch: int, num_heads: int, entries, listed: bool):
    """int32 [1 + items + 1, NUMBERS]: the items of all programs, of which each takes the next.

    A program begins with row 1 + its number. Row 0 begins with the number of the row to be taken
    after that; the last row, with a negative example, is the end.

    Heads with the same mask have items of the same lengths, and are sorted as one. Simulated for
    causal documents, 1 to 40 in 16384 to 65536 tokens, of 16 heads, the last program is done no
    more than 2 % after the mean.

    Args:
        batch: examples, of all instances.
        num_heads: query heads.
        entries: see `worklists`.
        listed: whether they are those of lists.
    """
    own, tiles = entries.shape[1:3]
    rows, alike = batch * own, num_heads // own
    # So many are sorted together: heads that are alike, and rows of tiles.
    heads = _divisor(alike, -(-SORTED // tiles))
    together = _divisor(rows, -(-SORTED // (tiles * alike)))
    entries = jnp.broadcast_to(jnp.asarray(entries), (batch, *entries.shape[1:]))
    entries = entries.reshape(rows // together, together * tiles, -1)
    if listed:
        _, full, count = (entries[..., i] for i in range(3))
        edges = count - full
    else:
        start, full_start, full_stop, stop = (entries[..., i] for i in range(4))
        count, edges = stop - start, full_start - start + stop - full_stop
    # A tile at an edge takes twice as long.
    order = jnp.argsort(-count - edges, axis=1, stable=True).astype(jnp.int32)
    shape = len(order), alike // heads, order.shape[1], heads

    def for_heads(x):
        return jnp.broadcast_to(x[:, None, :, None], (*shape, *x.shape[2:]))

    first = together * np.arange(shape[0], dtype=np.int32)[:, None]
    row, tile = first + order // np.int32(tiles), order % np.int32(tiles)
    head = np.arange(alike, dtype=np.int32).reshape(1, shape[1], 1, heads)
    b, h = row // np.int32(own), row % np.int32(own) * np.int32(alike)
    where = jnp.stack([for_heads(b), for_heads(h) + head, for_heads(tile)], axis=-1)
    entries = for_heads(jnp.take_along_axis(entries, order[..., None], axis=1))
    items = jnp.concatenate([where, entries], axis=-1)
    items = items.reshape(-1, items.shape[-1])
    items = jnp.pad(items, ((0, 0), (0, NUMBERS - items.shape[1])))
    before, behind = np.zeros((2, 1, NUMBERS), np.int32)
    before[0, 0], behind[0, 0] = 1 + _programs(len(items)), -1
    return jnp.concatenate([before, items, behind])


def _divisor(of: int, least: int) -> int:
    """The smallest that is no less, or all."""
    return next((n for n in range(1, of) if of % n == 0 and n >= least), of)


# ------------------------------------------------------------------------------------------------
# Items in a kernel
# ------------------------------------------------------------------------------------------------

# Slots for items that a program has taken: keys of short ones are loaded several items ahead.
SLOTS = 4


def memory(lists, readers: int):
    """Shared memory for items that a program takes; None where it has a list of its own.

    Memory is laid out in the order of names, and tiles, whose addresses loops compute, come first.

    Args:
        lists: `worklists`.
        readers: warpgroups and warps that run `for_each_item`.
    """
    if lists.ndim == 3:
        return dict(work_sm=None, work_full=None, work_free=None)
    return dict(
        work_sm=plgpu.SMEM((SLOTS, NUMBERS), jnp.int32),
        work_full=common.barriers(SLOTS),
        work_free=common.barriers(SLOTS, readers),
    )


class Items(NamedTuple):
    """Where a program has its items from.

    Attributes:
        list: a reference to `worklists`.
        program: its number.
        columns: of the list that are an item.
        memory: with that of `memory`, if there is one list for all programs.
    """

    list: Any
    program: Any
    columns: int
    memory: Any


def for_each_item(items: Items, body, carry, *, takes: bool = False):
    """Runs `carry = body(i, item, carry)` over a program's items, each of which is loaded ahead.

    Args:
        items: where they are.
        body: takes how many items came before, an item, and what it returned for the last one.
        carry: what it takes first.
        takes: whether this is the warp that takes the program's items from the list of all.
    """
    run = _for_each_listed if len(items.list.shape) == 3 else _for_each_taken
    return run(items, body, carry, takes)


def _for_each_listed(items: Items, body, carry, takes: bool):
    """Over the program's own list."""
    del takes

    def load(i):
        at = items.list.at
        return [plgpu.load(at[items.program, i, column]) for column in range(items.columns)]

    count = plgpu.load(items.list.at[items.program, 0, 0])

    def step(i, state):
        item, carry = state
        # Past the last one it loads the last row that there is.
        following = load(jnp.minimum(i + 2, items.list.shape[1] - 1))
        return following, body(i, item, carry)

    return lax.fori_loop(jnp.int32(0), count, step, (load(jnp.int32(1)), carry))[1]


def _for_each_taken(items: Items, body, carry, takes: bool):
    """Over what one warp takes from the list of all, and the others find in shared memory."""
    sm, full, free = (items.memory[f"work_{x}"] for x in ("sm", "full", "free"))
    ring, last = common.Ring(SLOTS), items.list.shape[0] - 1

    def take(i, row):
        ring.refill(i, free)
        slot = ring(i)
        plgpu.copy_gmem_to_smem(items.list.at[row], sm.at[slot], full.at[slot])

    def read(i):
        slot = ring(i)
        plgpu.barrier_wait(full.at[slot])
        item = [plgpu.load(sm.at[slot, column]) for column in range(items.columns)]
        plgpu.barrier_arrive(free.at[slot])
        return item

    def next_row():
        """One that no other program has, or the end."""
        return jnp.minimum(ptx.count_up(items.list.at[0, 0]), last) if takes else None

    def exists(state):
        _, _, (b, *_), _ = state
        return b >= 0

    def step(state):
        i, row, item, carry = state
        if takes:
            take(i + 1, row)
        carry = body(i, item, carry)
        # Counting takes time: here there are tiles on the way.
        row = next_row()
        return i + 1, row, read(i + 1), carry

    first = jnp.int32(0)
    if takes:
        take(first, 1 + items.program)
    row = next_row()
    return lax.while_loop(exists, step, (first, row, read(first), carry))[-1]
