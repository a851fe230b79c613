"""o and lse where there are few queries, as in decoding: limited by reading keys and values.

    rows    the queries of all heads that share keys and values, 64 in a tile: keys are read once
            for all of them, and not once a head
    parts   shares of the key tiles, for programs of their own: a few heads alone would leave most
            of a GPU idle

A program takes parts from a list (`dealt`). Its warpgroups take the key tiles by turns,
and each keeps sums of its own, so that a part has as many results as there are warpgroups. There is
time enough for each product to be waited for: with every row in use, the two of a tile and its
softmax take about as long as its copy, and two warpgroups are at work. What counts is that copies
go on, of as many tiles as there are slots.

A result is acc, m and l of an online softmax as they are, see forward.py. XLA joins them, exactly:

    m = max_i m_i         w_i = exp2(m_i - m)
    l = sum_i w_i l_i     o = sum_i w_i acc_i / l     lse_log2 = m + log2(l), or both apart

Values that no query sees may hold NaN, and 0 * NaN is NaN. Copies of them without, which would take
longer than all else, are made in shared memory, of tiles that need the mask.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._dropout import kept, rescaled
from pallas_flash._masks import Tiling
from pallas_flash._mosaic import common, ptx, work
from pallas_flash._mosaic.forward_common import (
    Refs,
    beside_one_another,
    copy,
    copy_keys_and_values,
    finish,
    nothing,
    softmax,
)
from pallas_flash._mosaic.options import DeviceOperand, Options, Place, left_out, shared_arrays
from pallas_flash._mosaic.tiles import DecodeTile
from pallas_flash._mosaic.work import ROWS
from pallas_flash._problem import Problem
from pallas_flash._scores import LOG2E, LogSum

plgpu = common.plgpu

# As of the forward; with 24 of them the warp that loads listed tiles spills.
REGISTERS = {2: (232, 40), 3: (160, 32)}

# Fewer key tiles are not worth a part's results.
TILES_OF_A_PART = 4


@dataclasses.dataclass(frozen=True)
class Static(common.Static):
    """What the kernel knows when it is compiled.

    Attributes:
        seen: the shape of an array that tells which keys any query sees; None if all are seen.
        num_rows: queries of such heads.
        parts: of the keys.
        head_dim: of queries and keys.
        value_dim: of values.
    """

    seen: tuple[int, int, int] | None
    num_rows: int
    parts: int
    head_dim: int
    value_dim: int

    @property
    def results(self) -> int:
        """Of a row."""
        return self.parts * self.tile.warpgroups

    def row_tile_and_part(self, place):
        """What the place of an item among those of its head stands for."""
        return common.quotient(place, self.parts), common.remainder(place, self.parts)


def compute(refs, result_refs, memory, warpgroup, static: Static):
    """One computing warpgroup."""
    w, large = static.tile.warpgroups, static.options.large
    registers, _ = REGISTERS[w]
    # At first there are no queries that could be in use.
    plgpu.barrier_arrive(memory["q_free"])
    plgpu.set_max_registers(registers, action="increase")
    q_sm, k_sm, v_sm = (memory[x] for x in ("q_sm", "k_sm", "v_sm"))
    ring, shape = common.Ring(static.tile.stages), (ROWS, static.kv.block)
    seen = None
    if static.seen is not None:
        place = Place(static.seen, 0, ragged=True)
        seen = DeviceOperand(refs.seen, jnp.bool_, place)

    def item(i, item, used):
        b, h, place, *entry = item
        tiles = work.tiles_of(entry, refs.table)
        row_tile, part = static.row_tile_and_part(place)
        options = static.options.of_example(refs.shared, b)
        first_row = row_tile * ROWS
        # Which of the tiles are this warpgroup's: by the slots, each of which is always the same
        # one's.
        first = common.remainder(warpgroup + w - common.remainder(used, w), w)

        def step(i, carry, *, masked):
            acc, m, l = carry
            j = first + i * w
            slot, first_key = ring(used + j), tiles.at(j) * static.kv.block
            at = heads_and_positions(h, first_row, first_key, shape, static)
            ahead = options.read_ahead(*at, masked=masked)
            plgpu.barrier_wait(memory["k_full"].at[slot])
            s = ptx.wait(0, ptx.product_t(q_sm, k_sm.at[slot], static.head_dim))
            plgpu.barrier_arrive(memory["k_free"].at[slot])
            s, c = ahead.logits(s, *at, masked=masked)
            s = ahead.hide(s, *at) if masked else s
            p, m, l, alpha = softmax(s, c, m, l, large=large)
            if (dropout := ahead.extras.dropout) is not None:
                drawn = kept(dropout, (ahead.b, *at), multiply=ptx.multiply_wide)
                p = ptx.where(drawn, p, 0.0)
            p = p.astype(v_sm.dtype)
            plgpu.barrier_wait(memory["v_full"].at[slot])
            if masked and seen is not None:
                clean(v_sm.at[slot], seen, (b, h if seen.shape[1] > 1 else 0, first_key))
            acc = ptx.rescale(acc, alpha)
            acc = ptx.waited(0, ptx.accumulate(acc, p, v_sm.at[slot]), p)
            plgpu.barrier_arrive(memory["v_free"].at[slot])
            return acc, m, l

        def mine(count):
            return common.quotient(count - first + w - 1, w)

        plgpu.barrier_wait(memory["q_full"])
        carry, edges = nothing(static.value_dim, large=large), jnp.int32(0)
        if static.masked:
            edges = mine(tiles.edges)
            on_edge = functools.partial(step, masked=True)
            carry = lax.fori_loop(jnp.int32(0), edges, on_edge, carry)
        inside = functools.partial(step, masked=False)
        acc, m, l = lax.fori_loop(edges, mine(tiles.count), inside, carry)
        plgpu.barrier_arrive(memory["q_free"])
        result = part * w + warpgroup
        for x, ref in zip((plgpu.layout_cast(acc, ptx.WGMMA), m, l), result_refs, strict=True):
            ptx.store_rows(x, ref.at[b, result, h], first_row)
        return used + tiles.count

    work.for_each_item(refs.items, item, jnp.int32(0))


def heads_and_positions(kv_head, first_row, first_key, shape, static: Static):
    """The head, the query and the key of each element of a tile, int32."""
    # Rows beyond the last one see what it sees, so that every index is inside.
    row = jnp.minimum(ptx.positions(shape, 0, first_row), static.num_rows - 1)
    groups = jnp.full(shape, static.groups, jnp.int32)
    head = kv_head * static.groups + lax.rem(row, groups) if static.groups > 1 else kv_head
    return head, lax.div(row, groups), ptx.positions(shape, 1, first_key)


def clean(v_sm, seen, at):
    """Puts zeros in place of values that no query sees into a tile of them.

    Args:
        v_sm: the tile, in blocks of 64 columns.
        seen: which keys are seen, an operand.
        at: where they begin there.
    """
    *which, first_key = at
    for row in range(0, v_sm.shape[1], ROWS):
        key = ptx.positions((ROWS, ptx.COLUMNS), 0, first_key + row)
        is_seen = seen[(*which, key)]
        for n in range(v_sm.shape[0]):
            block = v_sm.at[n, pl.ds(row, ROWS)]
            block[...] = jnp.where(is_seen, plgpu.load(block, layout=ptx.WGMMA), 0)
    plgpu.commit_smem()


def load(refs, memory, static: Static):
    """The loading warpgroup: one warp for keys and values, one for queries."""
    _, registers = REGISTERS[static.tile.warpgroups]
    plgpu.set_max_registers(registers, action="decrease")

    def keys_and_values(i, item, used):
        del i
        b, h, _, *entry = item
        tiles = work.tiles_of(entry, refs.table)
        copy_keys_and_values(refs, memory, tiles, (b, h), used)
        return used + tiles.count

    def queries(i, item, none):
        del i
        b, h, place, *_ = item
        row_tile, _ = static.row_tile_and_part(place)
        plgpu.barrier_wait(memory["q_free"])
        copy(refs.q, (b, h, pl.ds(row_tile * ROWS, ROWS)), memory["q_sm"], memory["q_full"])
        return none

    beside_one_another(refs.items, keys_and_values, (refs.items, queries))


def pallas_flash_decode(*refs, static: Static, **memory):
    """The parts of one program."""
    list_ref, q_ref, k_ref, v_ref, *rest = refs
    table_ref = rest.pop(0) if static.listed else None
    seen_ref = rest.pop(0) if static.seen else None
    shared = [rest.pop(0) for _ in static.options.leaves]
    columns = range(list_ref.shape[2])
    items = work.Items(list_ref, lax.axis_index("program"), lambda _: columns, memory)
    refs = Refs(items, q_ref, k_ref, v_ref, table_ref, shared, seen_ref)
    warpgroup = lax.axis_index("warpgroup")
    computes = warpgroup < static.tile.warpgroups

    @pl.when(computes)
    def _():
        compute(refs, rest, memory, warpgroup, static)

    @pl.when(jnp.logical_not(computes))
    def _():
        load(refs, memory, static)


def number_of_parts(p: Problem, batch: int, kv: Tiling, tile: DecodeTile, *, known: bool) -> int:
    """Into how many parts the keys are split.

    That the cores are done together takes as many parts as fill them. A part's results are written
    and read, beside its keys and values.

    Args:
        p: the call.
        batch: examples, of all instances.
        kv: the tiles of keys.
        tile: how a program is made.
        known: whether tiles are known; else examples may differ.
    """
    rows = p.q_len * p.groups
    items = batch * p.num_kv_heads * -(-rows // ROWS)
    tile_bytes = kv.block * (p.head_dim + p.value_dim) * p.dtype.itemsize
    result_bytes = 4 * min(rows, ROWS) * (p.value_dim + 2) * tile.warpgroups
    # To start a part takes about as long as a tile.
    extra = 1 + 2 * result_bytes / tile_bytes

    def time(parts: int) -> float:
        """In tiles, of the program that has the most."""
        return -(-items * parts // work.CORES) * (kv.count / parts + extra)

    most = max(1, min(kv.count // TILES_OF_A_PART, 4 * work.CORES))
    # Then every core has parts of every example, whatever its length.
    least = 1 if known else min(most, -(-work.CORES * batch // items))
    return min(range(least, most + 1), key=time)


def in_parts(entries, parts: int, listed: bool):
    """Each of `work.entries` cut into nearly equal shares, [..., entries * parts, 4]."""
    xp: Any = np if isinstance(entries, np.ndarray) else jnp
    a, b, c, d = (entries[..., None, i] for i in range(4))
    count, part = c if listed else d - a, np.arange(parts, dtype=np.int32).reshape(1, 1, 1, -1)
    first, last = (
        i * (count // parts) + xp.minimum(i, count % parts) for i in (part, part + np.int32(1))
    )
    if listed:
        cut = a, xp.clip(b - first, 0, last - first), last - first, first
    else:
        first, last = a + first, a + last
        cut = first, xp.clip(b, first, last), xp.clip(c, first, last), last
    cut = xp.stack(xp.broadcast_arrays(*cut), axis=-1).astype(np.int32)
    return cut.reshape(*entries.shape[:2], -1, 4)


def dealt(entries, batch: int, heads: int):
    """`work.worklists` of parts, [1 or batch, 1 or heads, parts, 4]: each core takes the next.

    Parts of a head are equal, and those of all its example's heads, if they are many enough, fall
    to all cores alike. To sort them by their length would take XLA longer than it can gain.
    """
    xp: Any = np if isinstance(entries, np.ndarray) else jnp
    shape = batch, heads, entries.shape[2]
    count = math.prod(shape)
    where = np.stack(np.unravel_index(np.arange(count), shape), axis=-1).astype(np.int32)
    entries = xp.broadcast_to(entries, (*shape, 4)).reshape(count, 4)
    programs = min(work.CORES, count)
    most = -(-count // programs)
    items = xp.concatenate([where, entries], axis=1)
    items = xp.pad(items, ((0, programs * most - count), (0, 0)))
    items = items.reshape(most, programs, -1).swapaxes(0, 1)
    heading = np.zeros((programs, 1, items.shape[2]), np.int32)
    heading[:, 0, 0] = most - (np.arange(programs) >= count - programs * (most - 1))
    return xp.concatenate([heading, items], axis=1)


def decode(problem: Problem, tile: DecodeTile, seen):
    """The output [B, T, N, V] and a `LogSum` of float32 [B, N, T].

    Args:
        problem: the call.
        tile: how programs are made.
        seen: which keys any query sees, bool [1 or B, 1 or K, S]; None if all of them.
    """
    p = problem
    num_rows = p.q_len * p.groups
    kv = Tiling(p.kv_len, tile.block_kv)
    # A query tile has the rows of `groups` row tiles, or all rows.
    q, row_tiles = Tiling(p.q_len, ROWS), np.arange(-(-num_rows // ROWS))
    mask = p.mask.within(kv=kv)
    w, stages = tile.warpgroups, tile.stages
    known = not jax.tree.leaves(mask)

    blocks, barriers = functools.partial(common.blocks, p.dtype), common.barriers

    def run(shared, rows, key, value, *seen):
        batch = len(rows)
        _, extras = shared
        parts = number_of_parts(p, batch, kv, tile, known=known)
        table = work.table(extras.mask, q, kv, "kv", batch, p.batch, p.groups)
        entries = work.entries(table, mask.scattered)[:, :, row_tiles // p.groups]
        entries = in_parts(entries, parts, mask.scattered)
        lists = jnp.asarray(dealt(entries, batch, p.num_kv_heads))
        listed = [table.reshape(-1, table.shape[-1])] if mask.scattered else []
        options = Options.of(p, shared, q, kv)
        q_sm = blocks(rows=ROWS, columns=p.head_dim)
        v_sm = blocks(stages, rows=kv.block, columns=p.value_dim)
        # Each block of columns is a copy, and arrives.
        copies_of_k, copies_of_v = q_sm.shape[0], v_sm.shape[1]
        statistic = batch, parts * w, p.num_kv_heads, num_rows
        return common.launch(
            pallas_flash_decode,
            (
                *(lists, rows, key, value, *listed),
                *(x.astype(jnp.int8).reshape(-1) for x in seen),
                *options.operands(shared),
            ),
            outputs=[
                ((*statistic, p.value_dim), jnp.float32),
                *[(statistic, jnp.float32)] * 2,
            ],
            memory=dict(
                q_sm=q_sm,
                k_sm=blocks(stages, rows=kv.block, columns=p.head_dim),
                v_sm=v_sm,
                q_full=barriers(1, copies_of_k),
                q_free=barriers(1, w),
                k_full=barriers(stages, copies_of_k),
                k_free=barriers(stages),
                v_full=barriers(stages, copies_of_v),
                v_free=barriers(stages),
            ),
            grid=dict(program=lists.shape[0]),
            warpgroups=w + 1,
            static=Static(
                options=options,
                masked=bool(mask),
                listed=mask.scattered,
                seen=seen[0].shape if seen else None,
                kv=kv,
                groups=p.groups,
                num_rows=num_rows,
                parts=parts,
                head_dim=p.head_dim,
                value_dim=p.value_dim,
                tile=tile,
            ),
            approx_math=options.approximate,
        )

    run = common.by_instance(run, p.batch)
    # [B, T, N, H] to [B, K, rows, H]: no copy with one query.
    rows = p.query.reshape(p.batch, p.q_len, p.num_kv_heads, p.groups, p.head_dim).swapaxes(1, 2)
    rows = rows.reshape(p.batch, p.num_kv_heads, num_rows, p.head_dim)
    seen = [] if seen is None else [jnp.broadcast_to(seen, (p.batch, *seen.shape[1:]))]
    results = run(shared_arrays(p, mask), rows, p.key, p.value, *seen)
    return join(p, *results)


def join(p: Problem, acc, m, l):
    """What `decode` returns, from acc [B, results, K, rows, V], m and l [B, results, K, rows]."""
    top = m.max(axis=1)
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp2((m - top[:, None]) * (LOG2E if p.large else 1.0))
    sinks = p.sinks
    if sinks is not None:
        sinks = jnp.tile(sinks.reshape(p.num_kv_heads, p.groups), (1, p.q_len))[None]
    top = top + left_out(p.scores)
    statistics, factor = finish(top, (weights * l).sum(axis=1), sinks, large=p.large)
    o = (weights[..., None] * acc).sum(axis=1) * rescaled(p.dropout, factor)[..., None]
    apart = p.batch, p.num_kv_heads, p.q_len, p.groups
    o = o.reshape(*apart, p.value_dim).swapaxes(1, 2).reshape(*p.query.shape[:3], p.value_dim)
    statistics = [
        x.reshape(apart).swapaxes(2, 3).reshape(p.batch, p.num_heads, p.q_len) for x in statistics
    ]
    return o.astype(p.dtype), LogSum(statistics[0] if p.large else None, statistics[-1])
