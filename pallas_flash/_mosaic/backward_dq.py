"""dq alone: a query tile stays, keys and values are streamed past it.

    s   = q @ k.T                       dp = do @ v.T                   [64, block_kv] a warpgroup
    p   = exp2(c * s - lse_log2)        c = scale * log2(e)
    ds  = p * (dp - delta)
    acc = acc + ds @ k                                                  [64, H]

    at the end    dq = scale * acc

With `backward` without dq it is the backward whose sums have an order, so that every run gives the
same bits: seven products in place of five. A program has computing warpgroups with 64 queries each,
which never wait for each other, and one that loads.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._masks import Mask, Tiling, hidden
from pallas_flash._mosaic import backward_common as shared
from pallas_flash._mosaic import common, ptx
from pallas_flash._mosaic.tiles import DqTile
from pallas_flash._problem import Problem

plgpu = common.plgpu

ROWS = 64
# Registers of a thread that computes, and of one that loads, by the number of computing warpgroups.
REGISTERS = {2: (240, 24), 3: (160, 24)}


@dataclasses.dataclass(frozen=True)
class Static:
    """What the kernel knows when it is compiled."""

    mask: Mask
    q: Tiling
    kv: Tiling
    groups: int
    heads: int  # Query heads that have their programs side by side.
    num_heads: int
    tile: DqTile

    def steps(self, ranges_ref, q_tile) -> shared.Steps:
        """Those of a program."""
        return shared.Steps(ranges_ref, q_tile, self.kv, masked=bool(self.mask))


def compute(refs, memory, b, h, q_tile, warpgroup, static: Static):
    """One computing warpgroup."""
    tile, block_kv, m = static.tile, static.kv.block, memory
    plgpu.set_max_registers(REGISTERS[tile.warpgroups][0], action="increase")
    ring = common.Ring(tile.stages)
    steps = static.steps(refs["ranges"], q_tile)
    q_sm, do_sm, k_sm, v_sm = (m[x] for x in ("q_sm", "do_sm", "k_sm", "v_sm"))
    dtype, head_dim = q_sm.dtype, q_sm.shape[-1]
    first_query = q_tile * static.q.block + warpgroup * ROWS
    rows = pl.ds(first_query, ROWS)
    for name, place in (("q", (b, rows, h)), ("do", (b, rows, h))):
        plgpu.copy_gmem_to_smem(
            refs[name].at[place], m[f"{name}_sm"].at[warpgroup], m["rows_full"].at[warpgroup]
        )
    for name in ("lse", "delta"):
        plgpu.copy_gmem_to_smem(
            refs[name].at[b, h, rows], m[f"{name}_sm"].at[warpgroup], m["rows_full"].at[warpgroup]
        )
    c = plgpu.load(refs["c"].at[b])
    plgpu.barrier_wait(m["rows_full"].at[warpgroup])
    my_q, my_do = q_sm.at[warpgroup], do_sm.at[warpgroup]
    lse_log2, delta = (
        plgpu.load(m[x].at[warpgroup], layout=ptx.ROW) for x in ("lse_sm", "delta_sm")
    )

    def gradients_of_scores(j, s_acc, dp_acc):
        slot, (_, first_key) = ring(j), steps.at(j)
        plgpu.barrier_wait(m["k_full"].at[slot])
        plgpu.wgmma(s_acc, my_q, k_sm.at[slot].T)
        plgpu.barrier_wait(m["v_full"].at[slot])
        plgpu.wgmma(dp_acc, my_do, v_sm.at[slot].T)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

        def hide(s):
            q_pos, k_pos = common.positions(s.shape, first_query, first_key)
            return common.hide(static.mask, b, h, q_pos, k_pos, s)

        s = hidden(steps.masked(j), hide, s)
        p = jnp.exp2(s * c - common.along_rows(lse_log2, s.shape))
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        plgpu.barrier_arrive(m["v_free"].at[slot])
        return (p * (dp - common.along_rows(delta, s.shape))).astype(dtype)

    def loop(acc):
        def step(j):
            scores = plgpu.ACC((ROWS, block_kv), jnp.float32)
            ds = pl.run_scoped(lambda *x: gradients_of_scores(j, *x), scores, scores)
            plgpu.wgmma(acc, ds, k_sm.at[ring(j)])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(m["k_free"].at[ring(j)])

        pl.loop(jnp.int32(0), steps.count)(step)
        return acc[...]

    dq = pl.run_scoped(loop, plgpu.ACC((ROWS, head_dim), jnp.float32))
    my_q[...] = (dq * plgpu.load(refs["scale"].at[b])).astype(dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(my_q, refs["dq"].at[b, rows, h])
    plgpu.wait_smem_to_gmem(0)


def load(refs, memory, b, h, q_tile, static: Static):
    """The loading warpgroup."""
    plgpu.set_max_registers(REGISTERS[static.tile.warpgroups][1], action="decrease")
    ring = common.Ring(static.tile.stages)
    steps = static.steps(refs["ranges"], q_tile)
    kv_head = common.quotient(h, static.groups)

    def step(j):
        _, first_key = steps.at(j)
        at = b, pl.ds(first_key, static.kv.block), kv_head
        for x in "kv":
            ring.refill(j, memory[f"{x}_free"])
            slot = ring(j)
            plgpu.copy_gmem_to_smem(
                refs[x].at[at], memory[f"{x}_sm"].at[slot], memory[f"{x}_full"].at[slot]
            )

    pl.loop(jnp.int32(0), steps.count)(step)


def pallas_flash_dq(*refs, static: Static, **memory):
    """One query tile of one head."""
    names = ["ranges", "c", "scale", "q", "k", "v", "do", "lse", "delta", "dq"]
    refs = dict(zip(names, refs, strict=True))
    head, q_tile, outer, warpgroup = map(lax.axis_index, ("head", "q_tile", "outer", "warpgroup"))
    if static.mask.grows:
        # The last tiles have the most work, and start first.
        q_tile = static.q.count - 1 - q_tile
    blocks = static.num_heads // static.heads
    b = common.quotient(outer, blocks)
    h = common.remainder(outer, blocks) * static.heads + head
    computes = warpgroup < static.tile.warpgroups

    @pl.when(computes)
    def _():
        compute(refs, memory, b, h, q_tile, warpgroup, static)

    @pl.when(jnp.logical_not(computes))
    def _():
        load(refs, memory, b, h, q_tile, static)


def dq(problem: Problem, do, lse_log2, delta, tile: DqTile):
    """Dq; the arguments are those of `backward`."""
    p = problem
    q, kv = Tiling(p.q_len, tile.warpgroups * ROWS), Tiling(p.kv_len, tile.block_kv)
    mask = p.mask.within(kv=kv)
    ranges = np.asarray(mask.kv_ranges(q, kv))[0]
    heads = shared.side_by_side(p.num_kv_heads) * p.groups
    static = Static(mask, q, kv, p.groups, heads, p.num_heads, tile)
    w, stages = tile.warpgroups, tile.stages

    def tiles(*shape):
        return plgpu.SMEM(shape, p.dtype, transforms=ptx.TILED)

    def barriers(count, arrivals=1):
        return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)

    def run(_, *arrays):
        _, _, query, *_ = arrays
        [dq] = common.launch(
            pallas_flash_dq,
            (jnp.asarray(ranges), *arrays),
            outputs=[(query.shape, query.dtype)],
            memory=dict(
                q_sm=tiles(w, ROWS, p.head_dim),
                do_sm=tiles(w, ROWS, p.value_dim),
                lse_sm=plgpu.SMEM((w, ROWS), jnp.float32),
                delta_sm=plgpu.SMEM((w, ROWS), jnp.float32),
                k_sm=tiles(stages, kv.block, p.head_dim),
                v_sm=tiles(stages, kv.block, p.value_dim),
                rows_full=barriers(w, 4),
                k_full=barriers(stages),
                k_free=barriers(stages, w),
                v_full=barriers(stages),
                v_free=barriers(stages, w),
            ),
            grid=dict(head=heads, q_tile=q.count, outer=p.num_heads // heads * len(query)),
            warpgroups=w + 1,
            static=static,
        )
        return dq

    arrays = shared.operands(p, do, lse_log2, delta, q.count * q.block)
    return common.by_instance(run, p.batch)((), *arrays)[:, : p.q_len]
