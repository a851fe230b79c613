"""o and lse, query tile by query tile, keys and values streamed past it.

    s    = q @ k.T    where there is more than a scale, see _scores     [64, block_kv]
    m'   = max(m, c * rowmax(s))    c = scale * log2(e), so base 2      [64]
    p    = exp2(c * s - m')         alpha = exp2(m - m')
    l    = alpha * l + rowsum(p)
    acc  = alpha * acc + dropout(p) @ v                                 [64, V]

    at the end    o = acc / l    lse_log2 = m + log2(l)    with a sink in both, if there is one

Where scores may be large, m is the natural maximum of s, and stays apart from log2(l); see
`LogSum`.

A program has two or three computing warpgroups, with 64 rows of the query tile each, and one that
loads. It stays on its core and takes query tiles from a list, its own one or, where only the GPU
knows how much each has to do, that of all programs; where all have as much, it counts
(`work.worklists`). Rows of a query tile need not be neighbours (`work.Parts`). The key tiles that
any row sees come one by one, the last one first. Each warpgroup passes by those that its own rows
do not see, and applies the mask to those of which they do not see all (`work.Seen`).

A computing warpgroup keeps the matrix units busy while it computes a softmax: p of one key tile is
multiplied by v only after the product of q and the next keys has been started.

    matrix units   | q k1      | q k2   p1 v1      | q k3   p2 v2      |
    softmax                    | ...    of q k1    | ...    of q k2    |

Two programs may share what they load (`ForwardTile.programs`), for neighbouring query tiles that
are one item: each copies one half of a tile of keys or values to the shared memory of both, and a
slot is free when both have used it. So keys and values leave the L2 cache half as often.

A bias that has queries and keys for its axes is copied to shared memory, where there is room: by
the warp that loads a warpgroup's queries, those tiles that its rows see. The warpgroup reads one
while the product of that tile runs, and the slot is free before the softmax begins. Mask arrays
come by tiles, too: as bits, beside the keys that they are of, and read where they are applied.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._dropout import rescaled
from pallas_flash._masks import Tiling
from pallas_flash._mosaic import common, ptx, work
from pallas_flash._mosaic.forward_common import (
    Refs,
    beside_one_another,
    copy,
    copy_keys_and_values,
    finish,
    last_tile,
    nothing,
    softmax,
)
from pallas_flash._mosaic.options import Options, left_out, shared_arrays
from pallas_flash._mosaic.pairs import (
    Masks,
    Owners,
    rows_of_one_axis,
    without_bias,
    without_masks,
    words_of,
)
from pallas_flash._mosaic.tiles import ForwardTile, bias_slots, mask_slots
from pallas_flash._mosaic.work import ROWS
from pallas_flash._problem import Problem
from pallas_flash._scores import LogSum

plgpu = common.plgpu

# Registers of a thread that computes, and of one that loads, by the number of computing warpgroups:
# together they must be no more than 64 Ki.
REGISTERS = {2: (240, 24), 3: (160, 32)}

# Where the warps of each computing warpgroup meet, see `ptx.meet`.
AT_TILE = (5, 6)


@dataclasses.dataclass(frozen=True)
class Static(common.Static):
    """What the kernel knows when it is compiled.

    Attributes:
        q: the tiles of queries.
        head_dim: of queries and keys.
        value_dim: of values.
        ends: whether it is told how many keys of each example are seen.
        two_edges: whether tiles may need the mask before and behind those that do not.
        bias: how tiles of the bias are found; None if it is read in device memory, or there is
            none.
        masks: those of which tiles are copied.
        mask_slots: for these tiles.
        alike: the items, if no list of them is needed.
        parts: the queries of an item.
    """

    q: Tiling
    head_dim: int
    value_dim: int
    ends: bool
    two_edges: bool
    bias: "BiasTiles | None"
    masks: Masks
    mask_slots: int
    alike: work.Alike | None
    parts: work.Parts

    @property
    def large(self) -> bool:
        """Whether m is natural, and apart from l in the end."""
        return self.options.large


class BiasTiles(NamedTuple):
    """How tiles of a bias are found, in device memory and in shared memory.

    Attributes:
        slots: of each warpgroup, in which it has tiles one after the other.
        owners: of the array.
    """

    slots: int
    owners: Owners

    def slot(self, warpgroup, i):
        """That of the i-th tile that a warpgroup has had."""
        return warpgroup * self.slots + common.remainder(i, self.slots)


def part_of(warpgroup, i, tile: ForwardTile):
    """Which part of the i-th item's queries is a warpgroup's.

    All of a program have each of its parts in turn: under a causal mask the last one sees most, and
    of a last tile it may not exist.
    """
    part = common.remainder(i + warpgroup, tile.warpgroups)
    if tile.programs == 1:
        return part
    return part + tile.warpgroups * lax.axis_index(common.MEMBER)


def items_of(warpgroup, items: work.Items, tile: ForwardTile):
    """The items with what all parts have of them, and this warpgroup's."""

    def columns(i):
        common = len(work.WHERE) + work.COMMON
        own = common + work.OWN * part_of(warpgroup, i, tile)
        return [*range(common), *(own + n for n in range(work.OWN))]

    return items._replace(columns=columns)


def compute(refs, o_ref, statistic_refs, memory, warpgroup, static: Static):
    """One computing warpgroup."""
    tile, block_kv = static.tile, static.kv.block
    registers, _ = REGISTERS[tile.warpgroups]
    # At first there are no queries that could be in use.
    plgpu.barrier_arrive(memory["q_free"].at[warpgroup])
    plgpu.set_max_registers(registers, action="increase")
    q_sm, k_sm, v_sm, o_sm = (memory[x] for x in ("q_sm", "k_sm", "v_sm", "o_sm"))
    statistics_sm = memory["statistics_sm"]
    ring = common.Ring(tile.stages)
    dtype, my_q = k_sm.dtype, q_sm.at[warpgroup]

    def item(i, item, had):
        # Tiles of keys that this program, and of the bias that this warpgroup, had before.
        used, read = had
        b, h, q_tile, *entry = item
        tiles = work.stream(entry[: work.COMMON], refs.table)
        seen = work.Seen(*entry[work.COMMON :])
        part = part_of(warpgroup, i, tile)
        first_row = static.parts.first_row(q_tile, part)
        options = static.options.of_example(refs.shared, b)
        acc, m, l = nothing(static.value_dim, large=static.large)

        def scores(j):
            """Starts the product of the queries and the j-th keys."""
            slot = ring(used + j)
            plgpu.barrier_wait(memory["k_full"].at[slot])
            return ptx.product_t(my_q, k_sm.at[slot], static.head_dim)

        def weighted(acc, p, slot):
            """Starts the product of p and the values in `slot`."""
            return ptx.accumulate(acc, p, v_sm.at[slot])

        def read_ahead(kv_tile, masked):
            """The positions of a tile, and the options with what is read there."""
            here = common.positions((ROWS, block_kv), first_row, kv_tile * block_kv)
            return here, options.read_ahead(h, *here, masked=masked)

        def with_bias(j, here, options):
            """With the bias of the j-th keys, if there are tiles of it."""
            if static.bias is None:
                return here, options
            slot = static.bias.slot(warpgroup, read - seen.first + j)
            plgpu.barrier_wait(memory["bias_full"].at[slot])
            bias = ptx.load_strips(memory["bias_sm"].at[slot])
            ptx.fence()
            plgpu.barrier_arrive(memory["bias_free"].at[slot])
            return here, options.with_bias(bias)

        def ready(j, s, products, ahead, masked):
            """With its bias what was read ahead, and s when no more than so many products run."""
            if not masked:
                ahead = with_bias(j, *ahead)
            wait_for_bits(j)
            s = ptx.wait(products, s)
            plgpu.barrier_arrive(memory["k_free"].at[ring(used + j)])
            # Before, there are no registers for it beside what the mask reads.
            return with_bias(j, *ahead) if masked else ahead, s

        def bits_slot(j):
            return common.remainder(used + j, static.mask_slots)

        def wait_for_bits(j):
            if static.mask_slots:
                plgpu.barrier_wait(memory["bits_full"].at[bits_slot(j)])

        def read_bits(j):
            """Those of the j-th keys, for each array of the mask that is copied."""
            if not static.mask_slots:
                return ()
            return static.masks.read(memory["bits_sm"], bits_slot(j), part * ROWS)

        def leave_bits(j, l=None):
            """Reports that they were read, to a barrier whose number waits for the new l."""
            if static.mask_slots:
                after = 0 if l is None else ptx.uniform_zero(l)
                plgpu.barrier_arrive(memory["bits_free"].at[bits_slot(j) + after])

        def weights(here, options, j, kv_tile, s, m, l, masked):
            """As `softmax`; p after dropout, in the dtype of the operands."""
            s, c = options.logits(s, h, *here, masked=masked)
            if masked:
                s = options.hide(s, h, *here, bits=read_bits(j))
            p, m, l, alpha = softmax(s, c, m, l, large=static.large)
            if options.extras.dropout is not None:
                kept = options.kept(s.shape, h, first_row, kv_tile * block_kv)
                p = ptx.where(kept, p, 0.0)
            return p.astype(dtype), m, l, alpha

        def step(j, carry, *, masked):
            acc, p, m, l = carry
            slot, before = ring(used + j), ring(used + j - 1)
            kv_tile = tiles.at(j)
            ahead, s = read_ahead(kv_tile, masked), scores(j)
            acc = weighted(acc, p, before)
            ahead, s = ready(j, s, 1, ahead, masked)
            p_new, m, l, alpha = weights(*ahead, j, kv_tile, s, m, l, masked)
            plgpu.barrier_wait(memory["v_full"].at[slot + ptx.uniform_zero(l)])
            leave_bits(j, l)
            acc = ptx.waited(0, acc, p)
            plgpu.barrier_arrive(memory["v_free"].at[before])
            return ptx.rescale(acc, alpha), p_new, m, l

        def some(acc, m, l):
            kv_tile, first = tiles.at(seen.first), ring(used + seen.first)
            ahead, s = read_ahead(kv_tile, static.masked), scores(seen.first)
            ahead, s = ready(seen.first, s, 0, ahead, static.masked)
            p, m, l, _ = weights(*ahead, seen.first, kv_tile, s, m, l, static.masked)
            plgpu.barrier_wait(memory["v_full"].at[first])
            leave_bits(seen.first, l)
            inside = functools.partial(step, masked=False)
            on_edge = functools.partial(step, masked=True)

            def edges_and_full(carry, first, full, end):
                full = jnp.maximum(full, first)
                carry = lax.fori_loop(first, full, on_edge, carry)
                return lax.fori_loop(full, end, inside, carry)

            def turn(n, carry):
                """Edges and what is full behind them; then the edges behind that."""
                again = n > 0
                first = jnp.maximum(jnp.where(again, seen.edges, start), start)
                full, end = (jnp.where(again, seen.end, x) for x in (seen.full, seen.edges))
                return edges_and_full(carry, first, full, end)

            carry, start = (acc, p, m, l), seen.first + 1
            if static.two_edges:
                turns = 1 + (seen.edges < seen.end).astype(jnp.int32)
                carry = lax.fori_loop(jnp.int32(0), turns, turn, carry)
            elif static.masked:
                carry = edges_and_full(carry, start, seen.full, seen.end)
            else:
                carry = lax.fori_loop(start, seen.end, inside, carry)
            acc, p, m, l = carry
            if o_sm is not None:
                plgpu.barrier_arrive(memory["q_free"].at[warpgroup])
            last = ring(used + seen.end - 1)
            acc = ptx.waited(0, weighted(acc, p, last), p)
            plgpu.barrier_arrive(memory["v_free"].at[last])
            return acc, m, l

        def none(*carry):
            if o_sm is not None:
                plgpu.barrier_arrive(memory["q_free"].at[warpgroup])
            return carry

        def pass_by(j, _):
            """Leaves a tile that these rows do not see to the other warpgroups."""
            for x in ("k", "v"):
                plgpu.barrier_wait(memory[f"{x}_full"].at[ring(used + j)])
                if tile.programs > 1:
                    # To other programs one thread reports: no warp may still have to wait.
                    for n, barrier in enumerate(AT_TILE):
                        pl.when(warpgroup == n)(functools.partial(ptx.meet, barrier, 128))
                plgpu.barrier_arrive(memory[f"{x}_free"].at[ring(used + j)])
            wait_for_bits(j)
            leave_bits(j)

        plgpu.barrier_wait(memory["q_full"].at[warpgroup])
        lax.fori_loop(jnp.int32(0), seen.first, pass_by, None)
        # A query tile that sees nothing has no tiles.
        acc, m, l = lax.cond(seen.first < seen.end, some, none, acc, m, l)
        lax.fori_loop(seen.end, tiles.count, pass_by, None)
        sinks, dropout = options.extras.sinks, options.extras.dropout
        sink = None if sinks is None else sinks[h]
        shift = left_out(options.extras.scores)
        statistics, weight = finish(m + shift if shift else m, l, sink, large=static.large)
        acc = plgpu.layout_cast(acc, ptx.WGMMA)
        o = (acc * common.along_rows(rescaled(dropout, weight), acc.shape)).astype(dtype)
        rows = pl.ds(first_row, ROWS)
        # What was stored last must have left shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for n, x in enumerate(statistics):
            statistics_sm[warpgroup, n] = x
        staging, slots = (my_q, None) if o_sm is None else (o_sm.at[warpgroup], tile.output_slots)
        for n, column in enumerate(range(0, static.value_dim, ptx.COLUMNS)):
            if slots and n >= slots:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged = staging.at[n % slots if slots else n]
            staged[...] = ptx.columns(o, column)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, o_ref.at[b, rows, h, common.block_of_columns(n, b)])
        # Copies of numbers do not end with the array, as those of tiles do.
        for n, ref in enumerate(statistic_refs):
            start = functools.partial(
                plgpu.copy_smem_to_gmem, statistics_sm.at[warpgroup, n], ref.at[b, h, rows]
            )
            pl.when(first_row < ref.shape[2])(start)
        if o_sm is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(memory["q_free"].at[warpgroup])
        return used + tiles.count, read + seen.end - seen.first

    work.for_each_item(items_of(warpgroup, refs.items, tile), item, (jnp.int32(0), jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if memory["ended"] is not None:
        # Who has ended has no barriers to which others could report.
        plgpu.barrier_arrive(memory["ended"].at[0])
        plgpu.barrier_wait(memory["ended"].at[0])


def copy_bias(refs, memory, bias: BiasTiles, w: int, first_row, item, read):
    """The tiles of the bias that the part of warpgroup w sees of an item, each to its slot.

    Args:
        refs: with `bias`.
        memory: with bias_sm, bias_full and bias_free.
        bias: how they are found.
        w: the warpgroup.
        first_row: of its part.
        item: with the numbers of that.
        read: tiles that it had before.

    Returns:
        Tiles that it has had then.
    """
    b, h, _, *entry = item
    tiles, seen = work.stream(entry[: work.COMMON], refs.table), work.Seen(*entry[work.COMMON :])
    sm, full, free = (memory[f"bias_{x}"] for x in ("sm", "full", "free"))
    _, strips, rows, width = sm.shape

    def one(j, read):
        slot, first = bias.slot(w, read), tiles.at(j) * (strips * width)
        # At first all slots are free.
        pl.when(read >= bias.slots)(lambda: plgpu.barrier_wait(free.at[slot]))
        for n in range(strips):
            at = *bias.owners.at(b, h), pl.ds(first_row, rows), pl.ds(first + n * width, width)
            plgpu.copy_gmem_to_smem(refs.bias.at[at], sm.at[slot, n], full.at[slot])
        return read + 1

    return lax.fori_loop(seen.first, seen.end, one, read)


def load(refs, memory, static: Static):
    """The loading warpgroup: one warp for keys and values, one for each warpgroup's rows."""
    tile = static.tile
    _, registers = REGISTERS[tile.warpgroups]
    plgpu.set_max_registers(registers, action="decrease")

    def keys_and_values(i, item, used):
        del i
        b, h, q_tile, *entry = item
        tiles, at = work.stream(entry, refs.table), (b, common.quotient(h, static.groups))

        def masks(i, first_key):
            if static.mask_slots:
                ring, place = common.Ring(static.mask_slots), (first_key, q_tile * static.q.block)
                ring.refill(i, memory["bits_free"])
                sm, full = memory["bits_sm"], memory["bits_full"].at[ring(i)]
                static.masks.copy(refs.bits, sm, ring(i), b, h, *place, full)

        copy_keys_and_values(refs, memory, tiles, at, used, tile.programs, masks)
        return used + tiles.count

    def queries(w, i, item, read):
        b, h, q_tile, *_ = item
        plgpu.barrier_wait(memory["q_free"].at[w])
        first_row = static.parts.first_row(q_tile, part_of(w, i, tile))
        at = b, pl.ds(first_row, ROWS), h
        copy(refs.q, at, memory["q_sm"].at[w], memory["q_full"].at[w])
        if static.bias is None:
            return read
        return copy_bias(refs, memory, static.bias, w, first_row, item, read)

    def of_warpgroup(w):
        items = refs.items if static.bias is None else items_of(w, refs.items, tile)
        return items, functools.partial(queries, w)

    beside_one_another(refs.items, keys_and_values, *map(of_warpgroup, range(tile.warpgroups)))


def pallas_flash_forward(*refs, static: Static, **memory):
    """The query tiles of one program."""
    q_ref, k_ref, v_ref, *rest = refs
    table_ref = rest.pop(0) if static.listed else None
    shared = [rest.pop(0) for _ in static.options.leaves]
    bias_ref = None if static.bias is None else rest.pop(0)
    bits = [rest.pop(0) for _ in static.masks.owners]
    ends = [rest.pop(0) for _ in range(2 if static.ends else 0)]
    list_ref = rest.pop(0) if static.alike is None else static.alike
    o_ref, *statistic_refs = rest
    columns = range(len(work.WHERE) + work.COMMON)
    items = work.Items(list_ref, lax.axis_index("program"), lambda _: columns, memory)
    refs = Refs(items, q_ref, k_ref, v_ref, table_ref, shared, ends=ends, bias=bias_ref, bits=bits)
    warpgroup = lax.axis_index("warpgroup")
    computes = warpgroup < static.tile.warpgroups

    @pl.when(computes)
    def _():
        compute(refs, o_ref, statistic_refs, memory, warpgroup, static)

    @pl.when(jnp.logical_not(computes))
    def _():
        load(refs, memory, static)


def forward(problem: Problem, tile: ForwardTile, seen=None):
    """The output [B, T, N, V] and a `LogSum` of float32 [B, N, T].

    Args:
        problem: the call; values that no query sees are finite, if `seen` is None.
        tile: block sizes.
        seen: int32 [B], how many keys of each example are seen, where these are the first ones.
    """
    p = problem
    w, stages, slots = tile.warpgroups, tile.stages, tile.output_slots
    members = tile.programs
    q, kv = Tiling(p.q_len, w * members * ROWS), Tiling(p.kv_len, tile.block_kv)
    mask = p.mask.within(kv=kv)
    statistics = 2 if p.large else 1
    of_bias, of_masks = bias_slots(p, tile), mask_slots(p, tile)

    blocks, barriers = functools.partial(common.blocks, p.dtype), common.barriers

    def run(shared, query, key, value, *seen):
        batch = len(query)
        _, extras = shared
        rows = Tiling(p.q_len, ROWS)
        parts = work.Parts.of(p, batch, w, members)
        if mask.scattered:
            table = work.table(extras.mask, q, kv, "kv", batch, p.batch)
            entries = work.lists_for_warpgroups(table, rows.count, parts.count)
        else:
            table = work.table(extras.mask, rows, kv, "kv", batch, p.batch)
            entries = work.for_warpgroups(parts.side_by_side(table), parts.count)
        lists = work.worklists(p, batch, mask, entries, members)
        # In a list of all programs they count what has been taken.
        alike = lists if isinstance(lists, work.Alike) else None
        known = [lists] if isinstance(lists, np.ndarray) else []
        counted = [] if known or alike else [lists]
        listed = [table.reshape(-1, table.shape[-1])] if mask.scattered else []
        bias, bias_tiles, bias_sm = [], None, None
        if of_bias:
            shared, x = without_bias(shared)
            bias_tiles = BiasTiles(of_bias, Owners.of(x, p.batch))
            bias = [rows_of_one_axis(x)]
            bias_sm = common.strips(x.dtype, w * of_bias, rows=ROWS, columns=kv.block)
        shared, bools = without_masks(shared) if of_masks else (shared, [])
        bits, masks = [words_of(x, 3, kv) for x in bools], Masks.of(bools, p.batch)
        options = Options.of(p, shared, q, kv)
        ends = [x for seen in seen for x in (seen, last_tile(value, seen, kv.block))]
        q_sm = blocks(w, rows=ROWS, columns=p.head_dim)
        v_sm = blocks(stages, rows=kv.block, columns=p.value_dim)
        # Each block of columns is a copy, and arrives.
        copies_of_k, copies_of_v = q_sm.shape[1], v_sm.shape[1]
        results = common.launch(
            pallas_flash_forward,
            (query, key, value, *listed, *options.operands(shared), *bias, *bits, *ends, *known),
            sums=counted,
            outputs=[
                ((*query.shape[:3], p.value_dim), p.dtype),
                # What the warpgroups copy, in whole.
                *[((batch, p.num_heads, p.q_len + -p.q_len % ROWS), jnp.float32)] * statistics,
            ],
            memory=dict(
                q_sm=q_sm,
                k_sm=blocks(stages, rows=kv.block, columns=p.head_dim),
                v_sm=v_sm,
                o_sm=blocks(w, rows=ROWS, columns=slots * ptx.COLUMNS) if slots else None,
                statistics_sm=plgpu.SMEM((w, statistics, ROWS), jnp.float32),
                bias_sm=bias_sm,
                bias_full=barriers(w * of_bias, bias_sm.shape[1]) if bias_sm else None,
                bias_free=barriers(w * of_bias) if bias_sm else None,
                bits_sm=masks.memory(of_masks, kv.block, q.block),
                bits_full=barriers(of_masks, len(bits)) if bits else None,
                bits_free=barriers(of_masks, w) if bits else None,
                q_full=barriers(w, copies_of_k),
                q_free=barriers(w),
                k_full=barriers(stages, copies_of_k),
                k_free=barriers(stages, w, members),
                v_full=barriers(stages, copies_of_v),
                v_free=barriers(stages, w, members),
                ended=barriers(1, w, members) if members > 1 else None,
                # Computing warpgroups, the warps for their rows, and that for keys and values.
                **work.memory(lists, 2 * w + 1),
            ),
            grid=dict(program=work.programs_of(lists)),
            members=members,
            warpgroups=w + 1,
            static=Static(
                options=options,
                masked=bool(mask),
                listed=mask.scattered,
                q=q,
                kv=kv,
                groups=p.groups,
                head_dim=p.head_dim,
                value_dim=p.value_dim,
                ends=bool(seen),
                two_edges=not mask.scattered and work.have_two_edges(entries),
                bias=bias_tiles,
                masks=masks,
                mask_slots=of_masks,
                alike=alike,
                parts=parts,
                tile=tile,
            ),
            approx_math=options.approximate,
        )
        return results[len(counted) :]

    run = common.by_instance(run, p.batch)
    arrays = p.query, p.key, p.value, *([] if seen is None else [seen])
    o, *log_sum = run(shared_arrays(p, mask), *arrays)
    log_sum = [x[:, :, : p.q_len] for x in log_sum]
    return o, LogSum(log_sum[0] if p.large else None, log_sum[-1])
