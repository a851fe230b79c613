"""Which tiles a mask leaves, and which program computes them when."""

import dataclasses
import functools
import heapq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash._masks import FAR, Mask, Tiling
from pallas_flash._mosaic import common, ptx
from pallas_flash._problem import Problem
from pallas_flash._visits import edges_first, listed_edges_first

plgpu = common.plgpu

# Bytes of keys and values that programs of different heads stream at the same time, where only the
# GPU knows how many each does: so many stay in the L2 cache of an H100 (50 MB) beside all else.
L2_SHARE = 24 * 10**6

# Where it is known before, fewer are faster, but at head size 64 not one by one.
KNOWN_SHARE = 4 * 10**6

ROWS = 64  # Queries of a warpgroup: what one matrix instruction takes.

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
    """The tiles that stream past one that stays.

    Attributes:
        count: how many there are.
        at: takes a place in the stream to the number of the tile there.
        edges: how many need the mask, and come first; None where `Seen` tells.
    """

    count: Any
    at: Any
    edges: Any = None


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


# Numbers of an entry of the forward that are all warpgroups', and those that each has of its own.
# Of the former, the place of how many key tiles there are.
COMMON, OWN, COUNT = 4, 4, 2


class Seen(NamedTuple):
    """What one of a query tile's parts sees of the key tiles that stream past all, as places there.

    Attributes:
        first: that of the first one that it sees; it passes by those before.
        full: of the first one that needs no mask.
        edges: of the first one behind these that needs it.
        end: behind the last one that it sees; it passes by the others.
    """

    first: Any
    full: Any
    edges: Any
    end: Any


def for_warpgroups(rows, warpgroups: int):
    """Ranges of so many neighbouring query tiles, [..., tiles, 4], as entries for `stream`.

    Returns:
        [..., entries, COMMON + warpgroups * OWN]: how the key tiles that any of them sees stream
        past, and `Seen` of each.
    """
    xp: Any = np if isinstance(rows, np.ndarray) else jnp
    rows = xp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % warpgroups), (0, 0)))
    rows = rows.reshape(*rows.shape[:2], -1, warpgroups, 4)
    start, full_start, full_stop, stop = (rows[..., i] for i in range(4))
    some, far = start < stop, np.int32(FAR)

    def least(x):
        return xp.where(some, x, far).min(axis=-1, keepdims=True)

    def most(x):
        return xp.where(some, x, 0).max(axis=-1, keepdims=True)

    last = most(stop)
    first = xp.minimum(least(start), last)
    count = last - first
    # The tiles come from the last one down. But where all begin with the same one, those from there
    # to the end of what is full for all rise, as those of other query tiles at the same time do.
    low, high = most(full_start), least(full_stop)
    seen = [last - x for x in (stop, full_stop, full_start, start)]
    rises = (low < high) & (most(start) == first) & ((low == first) | (most(full_stop) == high))
    behind = xp.where(rises, last - high, count)
    up = first - behind
    # There the full ones come behind both edges.
    full = xp.where(low == first, seen[1], behind + low - first)
    risen = seen[0], full, count, count
    seen = [xp.where(rises, x, y) for x, y in zip(risen, seen, strict=True)]
    seen = xp.where(some[..., None], xp.stack(seen, axis=-1), count[..., None])
    common = xp.concatenate([last - 1, behind, count, up], axis=-1)
    seen = seen.reshape(*common.shape[:-1], -1)
    return xp.concatenate([common, seen], axis=-1).astype(np.int32)


def have_two_edges(entries) -> bool:
    """Whether a warpgroup may see edges behind full tiles."""
    if not isinstance(entries, np.ndarray):
        return True
    edges, end = (entries[..., COMMON + i :: OWN] for i in (2, 3))
    return bool((edges < end).any())


def lists_for_warpgroups(lists, query_tiles: int, warpgroups: int):
    """The same for `table` of lists, one for so many neighbouring query tiles of `query_tiles`.

    What is not full for one of them counts as an edge for all.
    """
    common = entries(lists, True)
    _, full, count, _ = (common[..., i : i + 1] for i in range(COMMON))
    tile = np.arange(lists.shape[2] * warpgroups).reshape(1, 1, -1, warpgroups)
    # Those without rows pass by all tiles.
    first = jnp.where(tile < query_tiles, 0, count)
    seen = jnp.broadcast_arrays(first, jnp.maximum(first, count - full), count, count)
    seen = jnp.stack(seen, axis=-1).reshape(*lists.shape[:3], -1)
    return jnp.concatenate([common, seen], axis=-1)


def stream(entry, table_ref) -> Tiles:
    """Those of the first `COMMON` numbers of an entry of `for_warpgroups`."""
    if table_ref is not None:
        return tiles_of(entry, table_ref)
    last, behind, count, up = entry
    return Tiles(count, lambda i: jnp.where(i < behind, last - i, up + i))


def tiles_of(entry, table_ref) -> Tiles:
    """Those of an entry.

    Args:
        entry: four numbers, see `entries`.
        table_ref: `table` with all its rows on one axis if it holds lists, else None.
    """
    if table_ref is None:
        edges, count, at = edges_first(*entry)
    else:
        row, full, count, first = entry
        first = first + 2
        edges, count, at = listed_edges_first(
            full, count, lambda i: plgpu.load(table_ref.at[row, first + i])
        )
    return Tiles(count, at, edges)


# ------------------------------------------------------------------------------------------------
# Who does what
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parts:
    """Which tiles of `ROWS` queries are an item, of which each computing warpgroup has a part.

    They are neighbours, or `zigzag`: of as many stretches as there are parts one of each, from the
    front and from the back in turn. Under a causal mask later queries see more, and where programs
    have one item, one with the last tiles alone would be at work when others are done. So the last
    tile is beside the first one, and has the matrix units for itself most of the time.

    Attributes:
        count: parts of an item.
        items: of one head.
        zigzag: as above.
    """

    count: int
    items: int
    zigzag: bool

    @classmethod
    def of(cls, problem: Problem, batch: int, warpgroups: int, programs: int = 1):
        """Those of a call, for so many examples of all instances.

        `warpgroups` are those that compute of a program, `programs` those that share an item.
        """
        count = warpgroups * programs
        items = -(-problem.q_len // (count * ROWS))
        one_each = batch * problem.num_heads * items <= CORES
        causal = problem.mask.known_kind == "causal"
        return cls(count, items, causal and one_each and programs == 1)

    def first_row(self, item, part):
        """The first query of a part."""
        if not self.zigzag:
            return item * (self.count * ROWS) + part * ROWS
        odd = part & 1
        return (part * self.items + odd * (self.items - 1) + (1 - 2 * odd) * item) * ROWS

    def side_by_side(self, rows):
        """Numbers of tiles of `ROWS` queries, [1 or B, 1 or N, tiles, ...], item by item."""
        if not self.zigzag:
            return rows
        missing = self.items * self.count - rows.shape[2]
        rows = np.pad(rows, ((0, 0), (0, 0), (0, missing), (0, 0)))
        item, part = np.ogrid[: self.items, : self.count]
        return rows[:, :, self.first_row(item, part).reshape(-1) // ROWS]


# Columns of a list: which item of which head it is. What follows is its entry.
WHERE = ("b", "h", "q_tile")


def worklists(problem: Problem, batch: int, mask: Mask, entries, members: int = 1):
    """The query tiles of a launch as items, whose programs stay on their core; long ones first.

    Where lengths are known, NumPy int32 [programs, 1 + items, columns]: the items of each program,
    behind their number, as a dynamic scheduler would have it: who is free takes the next item. An
    order that does not look at the lengths can resonate with them: measured with a prototype on an
    H200, causal, one lost 40 %. They are sorted for few heads at a time, so that all programs read
    little at the same time, and in the end for more of them, so that no program is late: times are
    in docs/notes/kernels.md. If each is like another, `Alike` says how many they are.

    Where only the GPU knows lengths, it is what `longest_first` returns, and programs take the next
    item indeed.

    Args:
        problem: the call.
        batch: examples, of all instances.
        mask: that of the call.
        entries: [1 or B, 1 or N, query tiles, columns], see `for_warpgroups`.
        members: programs that have a list together; where lengths are known.
    """
    p = problem
    streamed = p.kv_len * (p.head_dim + p.value_dim) * p.dtype.itemsize
    known = isinstance(entries, np.ndarray)
    share = KNOWN_SHARE if known else L2_SHARE
    heads = max(1, share // streamed) * p.groups if mask else 1
    heads = min(heads, batch * p.num_heads)
    if not known:
        # Each takes items for itself: members would have different ones, and wait for ever.
        assert members == 1, members
        return longest_first(batch, p.num_heads, heads, entries)
    if members == 1 and are_alike(entries):
        entry = tuple(entries[0, 0, 0, : COMMON + OWN].tolist())
        return Alike(batch, p.num_heads, entries.shape[2], entry)
    table = entries.tobytes(), entries.shape
    return _worklists(batch, p.num_heads, heads, CORES // members, *table)


@dataclasses.dataclass(frozen=True)
class Alike:
    """Items that are alike, for which no program has to read a list, which takes short calls time.

    Where two programs share keys a list is faster, for a reason that was not found.

    Attributes:
        batch: examples, of all instances.
        num_heads: query heads.
        tiles: query tiles of each.
        entry: of each of these, and of each warpgroup, see `for_warpgroups`.
    """

    batch: int
    num_heads: int
    tiles: int
    entry: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many items there are."""
        return self.batch * self.num_heads * self.tiles

    @property
    def programs(self) -> int:
        """How many have them in turn."""
        return min(CORES, self.count)

    def of_program(self, program):
        """How many items a program has."""
        return common.quotient(self.count - 1 - program, self.programs) + 1

    def item(self, program, i, columns: int):
        """So many columns of a program's i-th item."""
        shape = self.batch, self.num_heads, self.tiles
        _, where = common.digits(program + i * self.programs, shape)
        return [*where, *map(jnp.int32, self.entry)][:columns]


def are_alike(entries: np.ndarray) -> bool:
    """Whether there is as much to do in each query tile, and for each warpgroup."""
    own = entries[..., COMMON:].reshape(*entries.shape[:3], -1, OWN)
    same = (entries == entries[:1, :1, :1]).all() and (own == own[..., :1, :]).all()
    return bool(same)


def programs_of(lists) -> int:
    """How many programs `worklists` are for."""
    if isinstance(lists, Alike):
        return lists.programs
    return len(lists) if lists.ndim == 3 else min(CORES, len(lists) - 2)


# Items of each program that are sorted together in the end. In a simulation of causal calls with
# many heads the last program is done 0.4 to 2.7 % after the mean.
AT_END = 2


@functools.lru_cache(maxsize=64)
def _worklists(
    batch: int, num_heads: int, heads: int, most: int, ranges: bytes, shape
) -> np.ndarray:
    table: Any = np.frombuffer(ranges, np.int32).reshape(shape[2:])
    rows = batch * num_heads
    lengths = table[:, COUNT]
    order = np.argsort(-lengths, kind="stable")
    programs = min(most, rows * len(order))
    # Where the heads begin that are sorted together.
    at_end = -(-AT_END * programs // len(order)) if lengths.min() < lengths.max() else heads
    last = max(0, rows - at_end) // heads * heads
    firsts = [*range(0, last, heads), last]
    items: list[list[tuple]] = [[] for _ in range(programs)]
    # When each program is free, counted in key tiles.
    free = [(0.0, i) for i in range(programs)]
    for first, behind in zip(firsts, [*firsts[1:], rows], strict=True):
        for tile in order:
            for row in range(first, behind):
                time, program = heapq.heappop(free)
                items[program].append((*divmod(row, num_heads), tile, *table[tile]))
                # Starting an item and storing its output take as long as about 1.5 key tiles.
                heapq.heappush(free, (time + lengths[tile] + 1.5, program))
    lists = np.zeros((programs, 1 + max(map(len, items)), len(WHERE) + shape[-1]), np.int32)
    for program, mine in enumerate(items):
        lists[program, 0, 0] = len(mine)
        lists[program, 1 : 1 + len(mine)] = mine
    return lists


# Items that are sorted by length together at the end, at least, and columns of their list: copies
# have 128 bytes or more.
TOGETHER, NUMBERS = 768, 32


def longest_first(batch: int, num_heads: int, heads: int, entries):
    """int32 [1 + items + 1, NUMBERS]: the items of all programs, of which each takes the next.

    A program begins with row 1 + its number. Row 0 begins with the number of the row to be taken
    after that; the last row, with a negative example, is the end.

    Those of as many heads as share the L2 cache come together, and at the end those of more heads,
    so that no program is late. Simulated for causal documents, 1 to 40 in 16384 to 65536 tokens, of
    16 heads: the last program is done no more than 2.1 % after the mean, and, with a cache of 20
    MB, 0.3 to 0.6 of the bytes come from device memory that do if 1024 items are always together.

    Args:
        batch: examples, of all instances.
        num_heads: query heads.
        heads: those whose keys and values share the L2 cache.
        entries: see `worklists`.
    """
    own, tiles = entries.shape[1:3]
    rows, alike = batch * own, num_heads // own
    # Rows of tiles that are sorted together: more than one where those of a head are few.
    least = min(rows, -(-TOGETHER // (tiles * alike)))
    together = next(n for n in range(least, rows + 1) if rows % n == 0)
    # Heads that are alike and come together, and those that do at the end.
    most = min(alike, max(1, heads // together))
    heads = next(n for n in range(most, 0, -1) if alike % n == 0)
    at_end = min(alike, -(-TOGETHER // (tiles * together * heads)) * heads)
    entries = jnp.broadcast_to(jnp.asarray(entries), (batch, *entries.shape[1:]))
    entries = entries.reshape(rows // together, together * tiles, -1)
    seen = Seen(*(entries[..., i::OWN] for i in range(COMMON, COMMON + OWN)))
    # A tile at an edge takes twice as long.
    work = 2 * (seen.end - seen.first) - (seen.edges - seen.full)
    order = jnp.argsort(-work.sum(axis=2), axis=1, stable=True).astype(jnp.int32)
    first = together * np.arange(len(order), dtype=np.int32)[:, None]
    row, tile = first + order // np.int32(tiles), order % np.int32(tiles)
    b, h = row // np.int32(own), row % np.int32(own) * np.int32(alike)
    numbers = jnp.stack([b, h, tile], axis=-1), jnp.take_along_axis(entries, order[..., None], 1)
    items = jnp.concatenate(numbers, axis=-1)
    items = jnp.pad(items, ((0, 0), (0, 0), (0, NUMBERS - items.shape[2])))
    # [rows, heads, items of a head, NUMBERS]
    items = jnp.broadcast_to(items[:, None], (len(order), alike, *items.shape[1:]))
    head = np.arange(alike, dtype=np.int32).reshape(1, alike, 1, 1)
    items += head * (np.arange(NUMBERS, dtype=np.int32) == WHERE.index("h"))

    def side_by_side(items, heads: int):
        items = items.reshape(-1, heads, *items.shape[-2:])
        return items.swapaxes(1, 2).reshape(-1, NUMBERS)

    last = side_by_side(items[-1, alike - at_end :], at_end)
    items = side_by_side(items, heads)
    items = jnp.concatenate([items[: len(items) - len(last)], last])
    before, behind = np.zeros((2, 1, NUMBERS), np.int32)
    before[0, 0], behind[0, 0] = 1 + min(CORES, len(items)), -1
    return jnp.concatenate([before, items, behind])


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
    if isinstance(lists, Alike) or lists.ndim == 3:
        return dict(work_sm=None, work_full=None, work_free=None)
    return dict(
        work_sm=plgpu.SMEM((SLOTS, NUMBERS), jnp.int32),
        work_full=common.barriers(SLOTS),
        work_free=common.barriers(SLOTS, readers),
    )


class Items(NamedTuple):
    """Where a program has its items from.

    Attributes:
        list: a reference to `worklists`, or how they are `Alike`.
        program: its number.
        columns: takes the number of a program's item to the columns of it that are wanted.
        memory: with that of `memory`, if there is one list for all programs.
    """

    list: Any
    program: Any
    columns: Any
    memory: Any


def for_each_item(items: Items, body, carry, *, takes: bool = False):
    """Runs `carry = body(i, item, carry)` over a program's items, each of which is loaded ahead.

    Args:
        items: where they are.
        body: takes how many items came before, an item, and what it returned for the last one.
        carry: what it takes first.
        takes: whether this is the warp that takes the program's items from the list of all.
    """
    if isinstance(items.list, Alike):
        return _for_each_alike(items, body, carry)
    run = _for_each_listed if len(items.list.shape) == 3 else _for_each_taken
    return run(items, body, carry, takes)


def _for_each_alike(items: Items, body, carry):
    """Over those that come after each other by the number of programs."""

    def step(i, carry):
        return body(i, items.list.item(items.program, i, len(items.columns(i))), carry)

    return lax.fori_loop(jnp.int32(0), items.list.of_program(items.program), step, carry)


def _for_each_listed(items: Items, body, carry, takes: bool):
    """Over the program's own list."""
    del takes
    last = items.list.shape[1] - 1

    def load(i):
        # Past the last one it loads the last row that there is.
        row = jnp.minimum(i + 1, last)
        return [plgpu.load(items.list.at[items.program, row, x]) for x in items.columns(i)]

    count = plgpu.load(items.list.at[items.program, 0, 0])

    def step(i, state):
        item, carry = state
        following = load(i + 1)
        return following, body(i, item, carry)

    first = jnp.int32(0)
    return lax.fori_loop(first, count, step, (load(first), carry))[1]


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
        item = [plgpu.load(sm.at[slot, column]) for column in items.columns(i)]
        ptx.fence()
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
