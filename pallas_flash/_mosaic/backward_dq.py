"""dq alone: a query tile stays, keys and values are streamed past it.

    s   = q @ k.T                       dp = do @ v.T                   [64, block_kv] a warpgroup
    p   = exp2(c * s - lse_log2)        see `backward_common`
    ds  = p * (dropout(dp) - delta)
    acc = acc + ds @ k                                                  [64, H]

    at the end    acc = acc + r c     for the sums r of ds and the center c, see `_key_center`
                  dq = scale * acc    and, where it is asked for, dscale = rowsum(q * acc)

With `backward` without dq it is the backward whose sums have an order, so that every run gives the
same bits: seven products in place of five. A program has computing warpgroups with 64 queries each,
which never wait for each other, and one that loads.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._blocks import Tiling
from pallas_flash._dropout import rescaled
from pallas_flash._mosaic import backward_common as shared
from pallas_flash._mosaic import common, ptx, work
from pallas_flash._mosaic.options import shared_arrays
from pallas_flash._mosaic.tiles import padded
from pallas_flash._mosaic.tiles import value_slots as value_slots_of
from pallas_flash._problem import Problem
from pallas_flash._scores import LogSum
from pallas_flash._tiling.sizes import DqTile

plgpu = common.plgpu

ROWS = 64
# The names of the sums of ds and of the center of keys.
OF_CENTER = "row_sums", "center"
# Registers of a thread that computes, and of one that loads, by the number of computing warpgroups.
REGISTERS = {2: (240, 24), 3: (160, 24)}


@dataclasses.dataclass(frozen=True)
class Static(shared.Static):
    """What the kernel knows when it is compiled; its programs are those of query heads.

    Attributes:
        grows: whether the last queries have the most work.
        want_scale: whether the gradient of the scale is wanted.
        value_slots: slots of values.
        adds_center: whether keys have a center and rows have sums of ds.
    """

    grows: bool
    want_scale: bool
    value_slots: int
    adds_center: bool

    def steps(self, refs, b, h, q_tile) -> shared.Steps:
        """Those of a program."""
        return shared.Steps(self, refs["table"], (b, h, q_tile), self.kv)


def compute(refs, memory, b, h, q_tile, warpgroup, static: Static):
    """One computing warpgroup."""
    plgpu.set_max_registers(REGISTERS[static.tile.warpgroups][0], action="increase")
    steps = static.steps(refs, b, h, q_tile)
    where = b, h, q_tile, warpgroup
    steps.if_any(
        lambda: sum_of(refs, memory, *where, steps, static),
        lambda: store(refs, memory, *where, *zeros(memory, static), static),
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def sum_of(refs, memory, b, h, q_tile, warpgroup, steps: shared.Steps, static: Static):
    """The sum of a warpgroup's queries over all steps, from the first copy to the last."""
    m = memory
    ring, value_ring = common.Ring(static.tile.stages), common.Ring(static.value_slots)
    options = static.options.of_example(refs["shared"], b)
    q_sm, do_sm, k_sm, v_sm = (m[x] for x in ("q_sm", "do_sm", "k_sm", "v_sm"))
    dtype = q_sm.dtype
    first_query = q_tile * static.q.block + warpgroup * ROWS
    rows = pl.ds(first_query, ROWS)
    full = m["rows_full"].at[warpgroup]
    mine = {name: static.numbers(m, name, warpgroup) for name in ("delta", *static.statistics)}
    copy_rows = static.copies(refs, memory, b, "q", warpgroup)
    for name in ("q", "do"):
        copy_rows(name, h, first_query, m[f"{name}_sm"].at[warpgroup], full)
    for name, place in mine.items():
        plgpu.copy_gmem_to_smem(refs[name].at[b, h, rows], place, full)
    plgpu.barrier_wait(full)
    numbers = {name: plgpu.load(place, layout=ptx.ROW) for name, place in mine.items()}

    def gradients_of_scores(j):
        slot, value_slot, (_, first_key) = ring(j), value_ring(j), steps.at(j)
        mine = ptx.anew(warpgroup)
        plgpu.barrier_wait(m["k_full"].at[slot])
        s = ptx.product_t(q_sm.at[mine], k_sm.at[slot])
        plgpu.barrier_wait(m["v_full"].at[value_slot])
        dp = ptx.product_t(do_sm.at[mine], v_sm.at[value_slot])
        s = ptx.wait(1, s)
        pairs = shared.Tile(
            options, static, h, first_query, first_key, steps.masked(j), transposed=False
        )
        p = pairs.weights(s, numbers.get)
        dp = ptx.wait(0, dp)
        plgpu.barrier_arrive(m["v_free"].at[value_slot])
        return pairs.gradient(p, dp, numbers["delta"]).astype(dtype)

    def step(j, dq):
        ds = gradients_of_scores(j)
        dq = ptx.accumulate(dq, ds, k_sm.at[ring(j)])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(m["k_free"].at[ring(j)])
        return dq

    nothing, _ = zeros(memory, static)
    dq = lax.fori_loop(jnp.int32(0), steps.count, step, plgpu.layout_cast(nothing, ptx.ACC))
    dq = plgpu.layout_cast(dq, ptx.WGMMA)
    dq, dscale = rescaled(options.extras.dropout, dq), None
    if static.adds_center:
        c = refs["center"].at[b, common.quotient(h, static.groups)]
        r = plgpu.load(refs["row_sums"].at[b, h, rows], layout=ptx.ROW, optimized=False)
        c = plgpu.load(c, layout=ptx.COLUMN, optimized=False)
        dq = dq + common.along_rows(r, dq.shape) * common.along_columns(c, dq.shape)
    if static.want_scale:
        terms = ptx.load_strips(q_sm.at[warpgroup]).astype(jnp.float32) * dq
        dscale = jnp.sum(terms, axis=1)
    store(refs, memory, b, h, q_tile, warpgroup, dq * options.scale, dscale, static)


def zeros(memory, static: Static):
    """The results of queries that see no key."""
    dq = jnp.zeros((ROWS, ptx.columns_of(memory["q_sm"])), jnp.float32)
    dscale = jnp.zeros((ROWS,), jnp.float32)
    return plgpu.layout_cast(dq, ptx.WGMMA), plgpu.layout_cast(dscale, ptx.ROW)


def store(refs, memory, b, h, q_tile, warpgroup, dq, dscale, static: Static):
    """Starts the copies of a warpgroup's results to device memory, through where queries were."""
    rows = pl.ds(q_tile * static.q.block + warpgroup * ROWS, ROWS)
    my_q = memory["q_sm"].at[warpgroup]
    ptx.put_strips(dq.astype(my_q.dtype), my_q)
    my_delta = static.numbers(memory, "delta", warpgroup)
    if static.want_scale:
        my_delta[...] = dscale
    plgpu.commit_smem()
    shared.store(my_q, refs["dq"], (b, rows, h))
    if static.want_scale:
        plgpu.copy_smem_to_gmem(my_delta, refs["dscale"].at[b, h, rows])


def load(refs, memory, b, h, q_tile, static: Static):
    """The loading warpgroup."""
    plgpu.set_max_registers(REGISTERS[static.tile.warpgroups][1], action="decrease")
    rings = dict(k=common.Ring(static.tile.stages), v=common.Ring(static.value_slots))
    steps = static.steps(refs, b, h, q_tile)
    kv_head = common.quotient(h, static.groups)
    copy = static.copies(refs, memory, b, "kv", static.tile.warpgroups)

    def step(j):
        _, first_key = steps.at(j)
        for x, ring in rings.items():
            ring.refill(j, memory[f"{x}_free"])
            slot = ring(j)
            place, full = (memory[f"{x}_{what}"].at[slot] for what in ("sm", "full"))
            copy(x, kv_head, first_key, place, full)

    steps.if_any(lambda: pl.loop(jnp.int32(0), steps.count)(step))


def pallas_flash_dq(*refs, static: Static, **memory):
    """One query tile of one head."""
    names = [*(OF_CENTER if static.adds_center else ()), "dq", *["dscale"] * static.want_scale]
    refs = static.refs(names, refs)
    head, q_tile, outer, warpgroup = map(lax.axis_index, ("head", "q_tile", "outer", "warpgroup"))
    if static.later_rows_see_more:
        # Tiles with much work start first.
        q_tile = static.q.count - 1 - q_tile
    b, h = static.program(head, outer)

    @pl.when(static.exists(h, warpgroup < static.tile.warpgroups))
    def _():
        compute(refs, memory, b, h, q_tile, warpgroup, static)

    @pl.when(static.exists(h, warpgroup == static.tile.warpgroups))
    def _():
        load(refs, memory, b, h, q_tile, static)


def dq(
    problem: Problem,
    do,
    log_sum: LogSum,
    delta,
    tile: DqTile,
    seen=None,
    *,
    center: Any = None,
    row_sums=None,
    want_scale: bool,
):
    """Dq, and float32 [B, N, T], whose sum is the gradient of the scale, or None.

    The arguments are those of `backward`, but keys are centered.
    """
    p = problem
    q, kv = Tiling(p.q_len, tile.warpgroups * ROWS), Tiling(p.kv_len, tile.block_kv)
    mask = shared.mask_for(p, q, kv, seen)
    w, stages = tile.warpgroups, tile.stages
    head_dim, value_dim = padded(p.head_dim, p.value_dim)
    value_slots = value_slots_of(tile, head_dim, value_dim)

    def tiles(columns, slots, rows):
        return common.strips(p.dtype, slots, rows=rows, columns=columns)

    tiles_of_rows = dict(
        q_sm=tiles(head_dim, w, ROWS),
        do_sm=tiles(value_dim, w, ROWS),
        k_sm=tiles(head_dim, stages, kv.block),
        v_sm=tiles(value_dim, value_slots, kv.block),
    )
    barriers = common.barriers

    def run(arrays, *rows):
        query, *_ = rows
        copies = shared.count_copies(rows, tiles_of_rows)
        _, extras = arrays
        table = work.table(extras.mask, q, kv, "kv", len(query), p.batch)
        static = shared.call_static(
            *(Static, p, mask, arrays, table, q, kv),
            num_heads=p.num_heads,
            side_by_side=shared.side_by_side(p.num_kv_heads) * p.groups,
            tile=tile,
            grows=mask.later_rows_see_more,
            want_scale=want_scale,
            value_slots=value_slots,
            adds_center=adds_center,
            ends=seen is not None,
        )
        return common.launch(
            pallas_flash_dq,
            shared.operands(static, arrays, table, rows),
            outputs=[
                (query.shape, query.dtype),
                *[((len(query), p.num_heads, q.count * q.block), jnp.float32)] * want_scale,
            ],
            memory=dict(
                **tiles_of_rows,
                **static.numbers_memory(w, ROWS),
                landed=barriers(w + 1) if static.ends else None,
                rows_full=barriers(w, copies["q"] + copies["do"] + 1 + len(static.statistics)),
                k_full=barriers(stages, copies["k"]),
                k_free=barriers(stages, w),
                v_full=barriers(value_slots, copies["v"]),
                v_free=barriers(value_slots, w),
            ),
            grid=static.grid(len(query), q_tile=q.count),
            warpgroups=w + 1,
            static=static,
            approx_math=static.options.approximate,
        )

    rows = shared.rows(p, do, log_sum, delta, seen, q.count * q.block)
    arrays = shared_arrays(dataclasses.replace(p, sinks=None), mask)
    columns = head_dim, head_dim, value_dim, value_dim
    rows = (*map(shared.in_strips, rows[:4], columns), *rows[4:])
    adds_center = center is not None and row_sums is not None
    if adds_center:
        missing = q.count * q.block - p.q_len, head_dim - p.head_dim
        of_center = zip((row_sums, center), missing, strict=True)
        rows += tuple(jnp.pad(x, ((0, 0), (0, 0), (0, n))) for x, n in of_center)
    dq, *dscale = common.by_instance(run, p.batch)(arrays, *rows)
    return dq.reshape(p.query.shape), dscale[0][:, :, : p.q_len] if want_scale else None
