"""dk, dv, and in the same pass dq: a key/value tile stays, queries are streamed past it.

    s_t  = k @ q.T                      dp_t = v @ do.T                 [64, block_q] a warpgroup
    p_t  = exp2(c * s_t - lse_log2)     see `backward_common`
    dv  += dropout(p_t) @ do                                            [64, V]
    ds_t = p_t * (dropout(dp_t) - delta)
    dk  += ds_t @ q                     times scale once, after the loop [64, H]
    dq  += ds_t.T @ k                   times scale once, in the end     [block_q, H]

Five products for each pair of tiles, where two passes take seven. dk and dv stay in registers. dq
is added to float32 numbers in device memory, tile by tile and in no order: two runs differ by the
rounding of sums. So are dk and dv, where the query heads of a group, or the queries of a head, are
shared out among programs.

A program has 128 keys: two computing warpgroups with 64 each, and one that loads. For dq they need
each other's ds_t, which they exchange through shared memory: each then computes half of the tile of
dq, over all 128 keys. They meet for that in each step, and what one waits for both wait for: so a
bias and mask arrays come by tiles, as queries do, where there is room (`pairs`). With grouped heads
a program runs over the query heads that share its key/value head, or a share of them.

Keys are centered first, see `_key_center`: where the center c of a head is not zero, each warpgroup
subtracts it from its 64 keys in shared memory, once, and the LSE is that of the scores of k - c.

The registers of a program hold 128 x 256 sums and what a step needs. So where H + V is larger there
are two launches of this kernel, one for dv and one for dk with dq, with six products. The same
kernel without dq is one of the passes whose sums have an order; see `backward_dq`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._blocks import Tiling
from pallas_flash._dropout import rescaled
from pallas_flash._mosaic import backward_common as shared
from pallas_flash._mosaic import common, pairs, ptx, work
from pallas_flash._mosaic.backward_postprocess import postprocess
from pallas_flash._mosaic.options import shared_arrays
from pallas_flash._mosaic.tiles import BLOCK_KV, EXCHANGE, padded, stream_room
from pallas_flash._problem import Problem
from pallas_flash._scores import LogSum
from pallas_flash._tiling.sizes import BackwardTile

plgpu = common.plgpu

WARPGROUPS, ROWS = 2, 64
# Registers of a thread that computes, and of one that loads.
REGISTERS = 240, 24
# The barriers at which the computing warpgroups meet: for ds_t, and when the loop is over.
AT_DS, AT_END = 5, 6
# And when keys have been centered.
AT_CENTER = 7
# The names of c and of whether it is not zero.
CENTER = "center", "is_centered"


@dataclasses.dataclass(frozen=True)
class Static(shared.Static):
    """What the kernel knows when it is compiled; its programs are those of key/value heads.

    Attributes:
        shares: into how many the query heads of a key/value head are shared out; if they are more
            than these, into how many all of their queries are.
        adds: whether the shares of dk and dv are added in device memory, in no order.
        sums: what it computes of "dq", "dk" and "dv"; dq with dk alone.
        centers: whether keys have a center, which may be zero.
    """

    shares: int
    adds: bool
    sums: tuple[str, ...]
    centers: bool

    @property
    def num_q_heads(self) -> int:
        """Query heads."""
        return self.num_heads // self.shares * self.groups

    @property
    def dq_tiles(self) -> int:
        """Tiles of 64 queries that the sums of dq have for a head: of 128 whole ones."""
        return -(-self.q.count * self.q.block // 128) * 2

    def dq_columns(self, head_dim: int) -> int:
        """The columns of dq that a warpgroup computes: all of its queries, or half of all or more.

        More where the halves are no tiles, and then both have those in the middle.
        """
        if self.q.block > ROWS:
            return head_dim
        tile = ptx.tile_columns(head_dim)
        return -(-head_dim // (2 * tile)) * tile

    @property
    def stay(self) -> tuple[str, ...]:
        """What stays of "k" and "v"."""
        return ("k", "v") if "dk" in self.sums else ("k",)

    def in_turn(self, queries, cotangents) -> tuple:
        """What is done first, and then: of one slot, cotangents are out of use earlier."""
        return (queries, cotangents) if self.tile.stages > 1 else (cotangents, queries)

    @property
    def parts(self) -> int:
        """Into how many the queries of a head are shared out."""
        return max(1, self.shares // self.groups)

    def heads(self, share):
        """The key/value head of a share, its first query head, and how many it has."""
        if self.shares == 1:
            return share, share * self.groups, self.groups
        kv_head = common.quotient(share, self.shares)
        if self.parts > 1:
            return kv_head, common.quotient(share, self.parts), 1
        small, rest = divmod(self.groups, self.shares)
        part = common.remainder(share, self.shares)
        first, stop = (i * small + jnp.minimum(i, rest) for i in (part, part + 1))
        return kv_head, kv_head * self.groups + first, stop - first

    def steps(self, refs, b, share, kv_tile) -> shared.Steps:
        """Those of a program."""
        kv_head, _, heads = self.heads(share)
        part = common.remainder(share, self.parts), self.parts
        return shared.Steps(self, refs["table"], (b, kv_head, kv_tile), self.q, heads, part)


def compute(refs, memory, b, share, kv_tile, warpgroup, static: Static):
    """One computing warpgroup."""
    plgpu.set_max_registers(REGISTERS[0], action="increase")
    steps = static.steps(refs, b, share, kv_tile)
    where = b, share, kv_tile, warpgroup

    def nothing():
        # With ends, `load` does that; to sums there is nothing to add.
        if not (static.ends or static.adds):
            store(refs, memory, *where, zeros(memory, static), static)

    steps.if_any(lambda: sums_of(refs, memory, *where, steps, static), nothing)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def sums_of(refs, memory, b, share, kv_tile, warpgroup, steps: shared.Steps, static: Static):
    """The sums of a warpgroup's keys over all steps, from the first copy to the last."""
    m, block_q, sums = memory, static.q.block, static.sums
    k_sm, q_sm, do_sm = (m[x] for x in ("k_sm", "q_sm", "do_sm"))
    dtype, head_dim = k_sm.dtype, ptx.columns_of(q_sm)
    ring, exchange = common.Ring(static.tile.stages), common.Ring(EXCHANGE)
    dq_columns = static.dq_columns(head_dim)
    kv_head, first_head, _ = static.heads(share)
    options = static.options.of_example(refs["shared"], b)

    mine = pl.ds(warpgroup * ROWS, ROWS)
    first_key = kv_tile * BLOCK_KV + warpgroup * ROWS
    # With ends `load` copies them: their branches would cost registers here. Without, that would.
    if not static.ends:
        copy = static.copies(refs, memory, b, "kv")
        for name in static.stay:
            copy(name, kv_head, first_key, m[f"{name}_sm"].at[:, mine], m["kv_full"])
    is_centered = plgpu.load(refs["is_centered"].at[b, kv_head]) != 0 if static.centers else False
    plgpu.barrier_wait(m["kv_full"])

    def center_keys():
        center = refs["center"].at[b, kv_head]
        center = plgpu.load(center, layout=ptx.COLUMN, optimized=False)
        my_k = k_sm.at[:, mine]
        k = ptx.load_strips(my_k).astype(jnp.float32)
        ptx.put_strips((k - common.along_columns(center, k.shape)).astype(dtype), my_k)

    if static.centers:
        pl.when(is_centered)(center_keys)
        # Products of both warpgroups read these keys, apart from the threads that stored them. They
        # meet without a center, too: a branch right before the loop costs it 22 instructions.
        ptx.fence()
        ptx.meet(AT_CENTER, 128 * WARPGROUPS)

    def tile_of(j, where):
        head, first_query = where
        return shared.Tile(
            options,
            static,
            first_head + head,
            first_query,
            first_key,
            steps.masked(j),
            transposed=True,
            in_slot=pairs.InSlot(static.streams, m, j, warpgroup),
        )

    def of_queries(name, j):
        return plgpu.load(static.numbers(m, name, ring(j)), layout=ptx.COLUMN)

    def my_rows():
        # Who needs the registers of what would be computed before the loop.
        others = options.extras.scores or options.extras.dropout is not None or static.listed
        busy = others or (static.masked and block_q > ROWS)
        return pl.ds((ptx.anew(warpgroup) if busy else warpgroup) * ROWS, ROWS)

    def start(j, stays, x):
        """Starts the product of what stays of "k" or "v" and of the j-th queries' x."""
        plgpu.barrier_wait(m[f"{x}_full"].at[ring(j)])
        return ptx.product_t(m[f"{stays}_sm"].at[:, my_rows()], m[f"{x}_sm"].at[ring(j)])

    def gradients_of_scores(j, where, dv):
        """ds_t in the dtype of the operands, and dv, if any, whose product is left running."""
        operands = static.in_turn(("k", "q"), ("v", "do"))
        started = {x: start(j, stays, x) for stays, x in operands}
        # A barrier of its own: the wait ends a basic block here, and without it registers spill.
        plgpu.barrier_wait(m["delta_full"].at[ring(j)])
        s_t = ptx.wait(1 if static.tile.stages > 1 else 0, started["q"])
        tile = tile_of(j, where)
        p_t = tile.weights(s_t, lambda name: of_queries(name, j))
        dp_t = ptx.wait(0, started["do"])
        ds_t = tile.gradient(p_t, dp_t, of_queries("delta", j)).astype(dtype)
        if "dv" in sums:
            dv = ptx.accumulate(dv, tile.dropped(p_t).astype(dtype), do_sm.at[ring(j)])
        else:
            ptx.fence()
            plgpu.barrier_arrive(m["do_free"].at[ring(j)])
        return ds_t, dv

    def dq_part(j, ds_t, dk):
        """Its part of the tile of dq, and dk, whose product is left running."""
        ds_sm = m["ds_sm"].at[exchange(j)]
        if block_q == ROWS:
            # All queries, half of the columns.
            width = k_sm.shape[-1]
            part = pl.ds(warpgroup * ((head_dim - dq_columns) // width), dq_columns // width)
            dq = ptx.product_of_transposed(ds_sm, k_sm.at[part])
        else:
            # Half of the queries, all columns.
            dq = ptx.product_of_transposed(ds_sm.at[:, mine], k_sm)
        # The registers of a thread have no room for 256 columns and for ds_t.
        dk = ptx.accumulate(dk, ds_sm.at[mine] if head_dim > 192 else ds_t, q_sm.at[ring(j)])
        if "dv" in sums:
            plgpu.wgmma_wait(2)  # For dv's product, which is the oldest.
            plgpu.barrier_arrive(m["do_free"].at[ring(j)])
        return ptx.wait(1, dq), dk

    def add_dq(j, where, ds_t, dk):
        """Adds its part of the tile of dq; returns dk, whose product is left running."""
        m["ds_sm"].at[exchange(j)].at[mine][...] = ds_t
        ptx.fence()
        ptx.meet(AT_DS, 128 * WARPGROUPS)
        dq, dk = dq_part(j, ds_t, dk)
        head, first_query = where
        tile = b * static.num_q_heads + first_head + head
        tile = tile * static.dq_tiles + common.quotient(first_query, 64)
        # Its part of the columns, or the next tile. One index needs fewer registers than several.
        apart = head_dim if block_q > ROWS else head_dim - dq_columns
        place = refs["dq"].at[tile * ptx.groups(head_dim) + warpgroup * ptx.groups(apart)]
        # What both have computed one adds.
        twice = ptx.groups(dq_columns - apart) if block_q == ROWS else 0
        if twice:
            first = functools.partial(ptx.add_fragments, dq, place, slice(twice))
            pl.when(warpgroup == 0)(first)
        if apart:
            ptx.add_fragments(dq, place, slice(twice, None))
        return dk

    def step_of_dv(j, where, dv):
        s_t = ptx.wait(0, start(j, "k", "q"))
        tile = tile_of(j, where)
        p_t = tile.weights(s_t, lambda name: of_queries(name, j))
        ptx.fence()
        plgpu.barrier_arrive(m["q_free"].at[ring(j)])
        plgpu.barrier_wait(m["do_full"].at[ring(j)])
        dv = ptx.accumulate(dv, tile.dropped(p_t).astype(dtype), do_sm.at[ring(j)])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(m["do_free"].at[ring(j)])
        return dv

    def step(j, results):
        # Read here, where tiles are listed: later all would wait for it.
        where, dk, dv = steps.at(j), results.get("dk"), results.get("dv")
        if dk is None:
            return dict(dv=step_of_dv(j, where, dv))
        ds_t, dv = gradients_of_scores(j, where, dv)
        if "dq" in sums:
            dk = add_dq(j, where, ds_t, dk)
        else:
            dk = ptx.accumulate(dk, ds_t, q_sm.at[ring(j)])
            if "dv" in sums:
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(m["do_free"].at[ring(j)])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(m["q_free"].at[ring(j)])
        return {name: x for name, x in (("dk", dk), ("dv", dv)) if name in sums}

    nothing = {name: plgpu.layout_cast(x, ptx.ACC) for name, x in zeros(memory, static).items()}
    results = lax.fori_loop(jnp.int32(0), steps.count, step, nothing)
    results = {name: plgpu.layout_cast(x, ptx.WGMMA) for name, x in results.items()}
    if "dq" in sums or "dk" not in sums:
        # Both are done with k, or with do.
        ptx.meet(AT_END, 128 * WARPGROUPS)
    options = static.options.of_example(refs["shared"], b)
    dropout = options.extras.dropout
    for name, x in results.items():
        dk = name == "dk"
        results[name] = x * rescaled(dropout, options.scale) if dk else rescaled(dropout, x)
    store(refs, memory, b, share, kv_tile, warpgroup, results, static)


def zeros(memory, static: Static) -> dict:
    """The sums of keys that no query sees."""
    sizes = {x: ptx.columns_of(memory[y]) for x, y in (("dk", "q_sm"), ("dv", "do_sm"))}
    return {
        name: plgpu.layout_cast(jnp.zeros((ROWS, n), jnp.float32), ptx.WGMMA)
        for name, n in sizes.items()
        if name in static.sums
    }


def store(refs, memory, b, share, kv_tile, warpgroup, results, static: Static):
    """Starts the copies of a warpgroup's results to device memory, through where keys were."""
    mine = pl.ds(warpgroup * ROWS, ROWS)
    rows = pl.ds(kv_tile * BLOCK_KV + warpgroup * ROWS, ROWS)
    k_sm, v_sm, do_sm = (memory[x] for x in ("k_sm", "v_sm", "do_sm"))
    places = dict(
        dk=k_sm.at[:, mine], dv=v_sm.at[:, mine] if "dk" in static.sums else do_sm.at[warpgroup]
    )
    kv_head, *_ = static.heads(share)
    for name, x in results.items():
        if static.shares == 1:
            place = places[name]
            ptx.put_strips(x.astype(k_sm.dtype), place)
            plgpu.commit_smem()
            shared.store(place, refs[name], (b, rows, kv_head))
            continue
        heads, h = static.num_heads, share
        if static.adds:
            heads, h = heads // static.shares, kv_head
        row = (b * heads + h) * static.kv.count + kv_tile
        place = (row * WARPGROUPS + warpgroup) * ptx.groups(x.shape[1])
        put = ptx.add_fragments if static.adds else ptx.store_fragments
        put(x, refs[name].at[place])


def load(refs, memory, b, share, kv_tile, static: Static):
    """The loading warpgroup."""
    plgpu.set_max_registers(REGISTERS[1], action="decrease")
    ring = common.Ring(static.tile.stages)
    steps = static.steps(refs, b, share, kv_tile)
    kv_head, first_head, _ = static.heads(share)
    copy_keys, copy_queries = (static.copies(refs, memory, b, side) for side in ("kv", "q"))

    def step(j):
        slot, (head, first_query) = ring(j), steps.at(j)
        h = first_head + head
        rows = pl.ds(first_query, static.q.block)

        def copy(name, full):
            place, full = memory[f"{name}_sm"].at[slot], memory[full].at[slot]
            copy_queries(name, h, first_query, place, full)

        def copy_numbers(name, full):
            place, full = static.numbers(memory, name, slot), memory[full].at[slot]
            plgpu.copy_gmem_to_smem(refs[name].at[b, h, rows], place, full)

        def queries():
            ring.refill(j, memory["q_free"])
            copy("q", "q_full")
            for name in static.statistics:
                copy_numbers(name, "q_full")

        def cotangents():
            ring.refill(j, memory["do_free"])
            copy("do", "do_full")
            if "dk" in static.sums:
                copy_numbers("delta", "delta_full")

        for fill in static.in_turn(queries, cotangents):
            fill()
        static.streams.copy(refs["streams"], memory, j, b, h, first_query, kv_tile * BLOCK_KV)

    def work():
        for name in static.stay if static.ends else ():
            place = memory[f"{name}_sm"]
            copy_keys(name, kv_head, kv_tile * BLOCK_KV, place, memory["kv_full"])
        # Those that wait for no slot come apart. LLVM does that to short loops by itself, and where
        # it does not, ptxas spills registers in the other loop, of those that compute.
        for n in range(static.tile.stages):
            pl.when(n < steps.count)(functools.partial(step, jnp.int32(n)))
        pl.loop(jnp.int32(static.tile.stages), steps.count)(step)

    steps.if_any(work)
    if static.ends and static.shares == 1:
        store_zeros(refs, b, share, kv_tile, static)


def store_zeros(refs, b, kv_head, kv_tile, static: Static):
    """Stores zeros for keys behind the ones that are seen, while others compute.

    The programs of tiles in which keys are seen share out the other tiles of their head. (Those
    programs would all write at a time, and write as long as memory needs.) Without such programs
    each is left with its own tile. Of sums in shares nobody reads those of these keys.
    """
    count = jnp.int32(static.kv.count)
    some = common.quotient(plgpu.load(refs["seen_kv"].at[b]) + BLOCK_KV - 1, BLOCK_KV)
    step = jnp.where(some > 0, some, count)
    mine = jnp.where(kv_tile < step, lax.div(count - kv_tile - some + step - 1, step), 0)

    @pl.loop(jnp.int32(0), mine)
    def _(i):
        first = (kv_tile + some + i * step) * BLOCK_KV
        for name in static.sums:
            if name != "dq":
                ptx.store_zeros(refs[name].at[b], first, kv_head, BLOCK_KV)


def pallas_flash_backward(*refs, static: Static, **memory):
    """One tile of one key/value head."""
    refs = static.refs((*(CENTER if static.centers else ()), *static.sums), refs)
    head, kv_tile, outer, warpgroup = map(lax.axis_index, ("head", "kv_tile", "outer", "warpgroup"))
    b, share = static.program(head, outer)

    @pl.when(static.exists(share, warpgroup < WARPGROUPS))
    def _():
        compute(refs, memory, b, share, kv_tile, warpgroup, static)

    @pl.when(static.exists(share, warpgroup == WARPGROUPS))
    def _():
        load(refs, memory, b, share, kv_tile, static)


def _named(name: str):
    """The same kernel with another name, for what it computes."""

    def kernel(*refs, **options):
        pallas_flash_backward(*refs, **options)

    kernel.__name__ = f"pallas_flash_{name}"
    return kernel


# By what they compute.
KERNELS = {
    ("dq", "dk", "dv"): pallas_flash_backward,
    ("dq", "dk"): _named("dkq"),
    ("dk", "dv"): _named("dkv"),
    ("dk",): _named("dk"),
    ("dv",): _named("dv"),
}


def backward(
    problem: Problem,
    do,
    log_sum: LogSum,
    delta,
    tile: BackwardTile,
    sums: tuple[str, ...],
    seen=None,
    *,
    zeros=None,
    center: Any = None,
    row_sums=None,
    want_scale: bool,
    in_order: bool,
) -> dict:
    """Of "dq", "dk" and "dv" those in `sums`.

    Args:
        problem: the call.
        do: [B, T, N, V].
        log_sum: of float32 [B, N, T], for keys less `center`.
        delta: likewise.
        tile: block sizes.
        sums: names in this order; dq, whose sum has no order, with dk alone.
        seen: see `shared.rows`.
        zeros: for the sums of dq, see `backward_preprocess`; where nothing is seen, anything.
        center: float32 [B, K, H], subtracted from keys; None if it is zero.
        row_sums: float32 [B, N, T], the sums of ds over a row; None if they are zero. With a center
            and without `want_scale`, dq receives its term of them.
        want_scale: whether dq is to be in float32 and without its factor.
        in_order: whether dk and dv are to be sums that have an order.
    """
    p = problem
    q, kv = Tiling(p.q_len, tile.block_q), Tiling(p.kv_len, BLOCK_KV)
    mask = shared.mask_for(p, q, kv, seen)
    shares = _shares(p, q, kv, in_order)
    adds = shares > 1 and not in_order
    shares_apart = 1 if adds else shares
    with_dk = "dk" in sums
    lengths = dict(dq=p.q_len, dk=p.kv_len, dv=p.kv_len)
    widths = dict(dq=p.head_dim, dk=p.head_dim, dv=p.value_dim)
    head_dim, value_dim = padded(p.head_dim, p.value_dim)

    tiles = functools.partial(common.strips, p.dtype)
    tiles_of_rows = dict(
        k_sm=tiles(rows=BLOCK_KV, columns=head_dim),
        v_sm=tiles(rows=BLOCK_KV, columns=value_dim) if with_dk else None,
        q_sm=tiles(tile.stages, rows=q.block, columns=head_dim),
        do_sm=tiles(tile.stages, rows=q.block, columns=value_dim),
    )

    def barriers(arrivals):
        return common.barriers(tile.stages, arrivals)

    def run(arrays, *rows):
        of_dq, rows = rows[: len(only_dq)], rows[len(only_dq) :]
        dq_sums, weights = of_dq[:1], of_dq[1:]
        query, key, value, *_ = rows
        last = dict(zip(last_rows, rows[len(rows) - len(last_rows) :], strict=True))
        copies = shared.count_copies(rows, tiles_of_rows)
        scale, extras = arrays
        table = work.table(
            *(extras.mask, q, kv, "q", len(query), p.batch, p.groups), sums_keys="dq" in sums
        )
        room = stream_room(p, (head_dim, value_dim), tile, sums)
        streams, arrays, streamed = pairs.Streams.of(p, arrays, room, q)
        static = shared.call_static(
            *(Static, p, mask, arrays, table, q, kv),
            transposed=True,
            num_heads=p.num_kv_heads * shares,
            side_by_side=shared.side_by_side(p.num_kv_heads * shares),
            tile=tile,
            shares=shares,
            adds=adds,
            sums=sums,
            centers=center is not None,
            ends=seen is not None,
            streams=streams,
        )
        # How many groups of 64 rows and 8 columns.
        of_keys = len(query), p.num_kv_heads * shares_apart, kv.count * WARPGROUPS
        of_rows = dict(dq=(len(query), p.num_heads, static.dq_tiles), dk=of_keys, dv=of_keys)
        fragments = {
            name: (*of_rows[name], ptx.groups(value_dim if name == "dv" else head_dim))
            for name in sums
            if name == "dq" or shares > 1
        }
        shape = {name: (math.prod(count), *ptx.OF_GROUP) for name, count in fragments.items()}
        outputs = [
            (shape[name], jnp.float32) if name in shape else (like.shape, like.dtype)
            for name, like in (("dk", key), ("dv", value))
            if name in sums
        ]
        added_to = [x.reshape(-1, *ptx.OF_GROUP) for x in dq_sums]
        if adds:
            added_to, outputs = [*added_to, *(jnp.zeros(*x) for x in outputs)], []
        # With k it is an operand of dq's product, whose operands are to lie alike.
        exchange = plgpu.SMEM(
            (EXCHANGE, BLOCK_KV, q.block), p.dtype, transforms=ptx.tiled(head_dim)
        )
        results = common.launch(
            KERNELS[sums],
            shared.operands(static, arrays, table, rows, streamed),
            sums=added_to,
            outputs=outputs,
            memory=dict(
                **tiles_of_rows,
                **static.numbers_memory(tile.stages, q.block),
                ds_sm=exchange if "dq" in sums else None,
                **streams.memory(None if p.bias is None else p.bias.dtype, q, WARPGROUPS),
                kv_full=common.barriers(
                    1, sum(copies[x] for x in static.stay) * (1 if static.ends else WARPGROUPS)
                ),
                landed=common.barriers(1) if static.ends else None,
                q_full=barriers(copies["q"] + len(static.statistics)),
                do_full=barriers(copies["do"]),
                delta_full=barriers(1) if with_dk else None,
                q_free=barriers(WARPGROUPS),
                do_free=barriers(WARPGROUPS),
            ),
            grid=static.grid(len(query), kv_tile=kv.count),
            warpgroups=WARPGROUPS + 1,
            static=static,
            approx_math=static.options.approximate,
            # Where threads must wait for each other says this file: `ptx.meet`, `ptx.fence`.
            unsafe_no_auto_barriers=True,
        )
        results = dict(zip(sums, results, strict=True))
        for name, count in fragments.items():
            groups = (p.num_heads, 1) if name == "dq" else (p.num_kv_heads, shares_apart)
            x = results[name].reshape(len(query), *groups, *count[2:], *ptx.OF_GROUP)
            if name == "dq" and want_scale:
                results[name] = ptx.unfold(x[:, :, 0])[:, : p.q_len, :, : p.head_dim]
                continue
            results[name] = postprocess(
                x,
                rescaled(extras.dropout, scale) if name == "dq" else np.ones(1, np.float32),
                (len(query), lengths[name], groups[0], widths[name]),
                p.dtype,
                batch=p.batch,
                seen=last.get("seen_q" if name == "dq" else "seen_kv"),
                weighted_center=(*weights, last["center"]) if name == "dq" and weights else (),
            )
        return tuple(results.values())

    # As many queries as delta has: whole tiles of 128, for dq.
    rows = shared.rows(p, do, log_sum, delta, seen, delta.shape[2])
    # Of q and do: a warpgroup's half of the keys is no one piece of memory.
    query, key, value, do, *others = rows
    query, do = shared.in_strips(query, head_dim), shared.in_strips(do, value_dim)
    last_rows = ["seen_q", "seen_kv"] if seen is not None else []
    if center is not None:
        last_rows += CENTER
        center = jnp.pad(center, ((0, 0), (0, 0), (0, head_dim - p.head_dim)))
        others += [center, (center != 0).any(axis=2).astype(jnp.int32)]
    only_dq = [zeros] if "dq" in sums else []
    if "dq" in sums and center is not None and row_sums is not None and not want_scale:
        missing = -p.q_len % ROWS
        weights = p.scale.astype(jnp.float32) * row_sums
        only_dq.append(jnp.pad(weights, ((0, 0), (0, 0), (0, missing))))
    rows = (*only_dq, query, key, value, do, *others)
    arrays = shared_arrays(dataclasses.replace(p, sinks=None), mask)
    return dict(zip(sums, common.by_instance(run, p.batch)(arrays, *rows), strict=True))


# Queries of a program are no more, but for those of one head, under a causal mask; and bytes of
# what shares of heads take, where they are added up afterwards.
QUERIES, BYTES = 8192, 2**31
# What a program costs besides its steps; what the sums of shares cost, for each program there would
# be without them and in all. In steps of 128 queries.
OF_PROGRAM, OF_SUM, OF_SUMS = 2, 0.015, 2
# So many programs have a head's queries at most, where the longest would have so many steps of 128;
# or fewer, if head sizes are so large that there are two launches.
PARTS, WORTH_SUMS, WORTH_SUMS_TWICE = 4, 8, 4


def _shares(p: Problem, q: Tiling, kv: Tiling, in_order: bool) -> int:
    """Into how many the query heads of a key/value head are shared out, or the queries of a head.

    As many as take the fewest steps, as counted here: equal programs go in waves, one for each
    core; unequal ones fill all cores until the last half of the longest. Of 40 calls timed on an
    H200, with 1 to 71 shares, the choice took at most 1.06 times as long as the best, and in one
    of 256 tokens 1.1 times.

    Under a causal mask programs of other keys are done with a head at other times, and soon each
    reads and adds somewhere else, in more memory than the L2 cache has: 64 heads on 8, 4096 tokens,
    took 1.3 times as long with 8 heads in a program as with 2. So there `QUERIES` limits them.

    The queries of a head are shared out where it has keys of its own, and half of the cores or more
    would have no program. Timed on an H200, both halves in place of the whole, microseconds: 4
    heads of 2048 tokens at 128 57 and 74, 8 of 1024 41 and 43, but 16 of 512 33 and 27.
    """
    fewest, most = 1, p.groups
    if p.mask.kind == "causal":
        fewest = -(-p.groups // -(-QUERIES // p.q_len))
    if in_order:
        of_one = 4 * p.batch * p.kv_len * p.num_kv_heads * (p.head_dim + p.value_dim)
        most = min(most, max(1, BYTES // of_one))
    ranges = p.mask.q_ranges(q, kv)
    known = isinstance(ranges, np.ndarray) and not p.mask.scattered
    steps = ranges[..., 3] - ranges[..., 0] if known else np.int32(q.count)
    steps = np.minimum(steps * q.block, p.q_len) / 128
    equal = known and steps.min() == steps.max()
    programs = p.batch * p.num_kv_heads * kv.count
    worth_sums = WORTH_SUMS if p.head_dim + p.value_dim <= 256 else WORTH_SUMS_TWICE
    if p.groups == 1 and not in_order and steps.max() >= worth_sums:
        return max(1, min(PARTS, work.CORES // programs))

    def cost(shares):
        heads, waves = -(-p.groups // shares), programs * shares / work.CORES
        mean, longest = (heads * x + OF_PROGRAM for x in (steps.mean(), steps.max()))
        sums = OF_SUM * programs * (shares if in_order else 1) + OF_SUMS if shares > 1 else 0
        return (math.ceil(waves) * longest if equal else waves * mean + longest / 2) + sums

    return min(range(min(fewest, most), most + 1), key=cost)
