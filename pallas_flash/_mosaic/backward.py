"""dk, dv, and in the same pass dq: a key/value tile stays, queries are streamed past it.

    s_t  = k @ q.T                      dp_t = v @ do.T                 [64, block_q] a warpgroup
    p_t  = exp2(c * s_t - lse_log2)     see `backward_common`
    dv  += dropout(p_t) @ do                                            [64, V]
    ds_t = p_t * (dropout(dp_t) - delta)
    dk  += ds_t @ q                     times scale once, after the loop [64, H]
    dq  += ds_t.T @ k                   times scale once, in the end     [block_q, H]

Five products for each pair of tiles, where two passes take seven. dk and dv stay in registers. dq
is added to float32 numbers in device memory, tile by tile and in no order: two runs differ by the
rounding of sums.

A program has 128 keys: two computing warpgroups with 64 each, and one that loads. For dq they need
each other's ds_t, which they exchange through shared memory: each then computes half of the tile of
dq, 64 x 64 numbers, over all 128 keys. With grouped heads a program runs over all query heads that
share its key/value head.

The same kernel without dq is one of two passes whose sums have an order; see `backward_dq`.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._dropout import rescaled
from pallas_flash._masks import Tiling
from pallas_flash._mosaic import backward_common as shared
from pallas_flash._mosaic import common, ptx
from pallas_flash._mosaic.tiles import BackwardTile
from pallas_flash._problem import Problem
from pallas_flash._scores import LogSum

plgpu = common.plgpu

WARPGROUPS, ROWS = 2, 64
BLOCK_KV = WARPGROUPS * ROWS
# Registers of a thread that computes, and of one that loads.
REGISTERS = 240, 24
# Slots for ds_t: one is written while the other is read.
EXCHANGE = 2
# The barriers at which the computing warpgroups meet: for ds_t, and when the loop is over.
AT_DS, AT_END = 5, 6


@dataclasses.dataclass(frozen=True)
class Static(shared.Static):
    """What the kernel knows when it is compiled; its programs are those of key/value heads.

    Attributes:
        shares: into how many the query heads of a key/value head are shared out.
        with_dq: whether it computes dq, too.
    """

    shares: int
    with_dq: bool

    @property
    def num_q_heads(self) -> int:
        """Query heads."""
        return self.num_heads // self.shares * self.groups

    @property
    def dq_tiles(self) -> int:
        """Tiles of 64 queries that the sums of dq have for a head: of 128 whole ones."""
        return -(-self.q.count * self.q.block // 128) * 2

    def heads(self, share):
        """The key/value head of a share, its first query head, and how many it has."""
        if self.shares == 1:
            return share, share * self.groups, self.groups
        kv_head = common.quotient(share, self.shares)
        small, rest = divmod(self.groups, self.shares)
        part = common.remainder(share, self.shares)
        first, stop = (i * small + jnp.minimum(i, rest) for i in (part, part + 1))
        return kv_head, kv_head * self.groups + first, stop - first

    def steps(self, refs, b, share, kv_tile) -> shared.Steps:
        """Those of a program."""
        kv_head, _, heads = self.heads(share)
        return shared.Steps(self, refs["table"], (b, kv_head, kv_tile), self.q, heads)


def compute(refs, memory, b, share, kv_tile, warpgroup, static: Static):
    """One computing warpgroup."""
    plgpu.set_max_registers(REGISTERS[0], action="increase")
    m, block_q = memory, static.q.block
    k_sm, v_sm, q_sm, do_sm = (m[x] for x in ("k_sm", "v_sm", "q_sm", "do_sm"))
    dtype, head_dim, value_dim = k_sm.dtype, k_sm.shape[-1], v_sm.shape[-1]
    ring, exchange = common.Ring(static.tile.stages), common.Ring(EXCHANGE)
    steps = static.steps(refs, b, share, kv_tile)
    kv_head, first_head, _ = static.heads(share)
    options = static.options.of_example(refs["shared"], b)

    mine = pl.ds(warpgroup * ROWS, ROWS)
    first_key = kv_tile * BLOCK_KV + warpgroup * ROWS
    here = b, pl.ds(first_key, ROWS), kv_head
    plgpu.copy_gmem_to_smem(refs["k"].at[here], k_sm.at[mine], m["kv_full"])
    plgpu.copy_gmem_to_smem(refs["v"].at[here], v_sm.at[mine], m["kv_full"])
    plgpu.barrier_wait(m["kv_full"])

    def gradients_of_scores(j, dv, s_acc, dp_acc):
        """ds_t in the dtype of the operands; dv's product is left running."""
        slot, (head, first_query) = ring(j), steps.at(j)

        def column(name):
            return plgpu.load(m[f"{name}_sm"].at[slot], layout=ptx.COLUMN)

        plgpu.barrier_wait(m["q_full"].at[slot])
        plgpu.wgmma(s_acc, k_sm.at[mine], q_sm.at[slot].T)
        plgpu.barrier_wait(m["do_full"].at[slot])
        plgpu.wgmma(dp_acc, v_sm.at[mine], do_sm.at[slot].T)
        # A barrier of its own: the wait ends a basic block here, and without it registers spill.
        plgpu.barrier_wait(m["delta_full"].at[slot])
        s_t = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        tile = shared.Tile(
            options,
            static,
            first_head + head,
            first_query,
            first_key,
            steps.masked(j),
            transposed=True,
        )
        p_t = tile.weights(s_t, column)
        dp_t = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        ds_t = tile.gradient(p_t, dp_t, column("delta")).astype(dtype)
        plgpu.wgmma(dv, tile.dropped(p_t).astype(dtype), do_sm.at[slot])
        return ds_t

    def half_of_dq(j, ds_t, dk, dq_acc):
        """Its half of the tile of dq; dk's product is left running."""
        slot, ds_sm = ring(j), m["ds_sm"].at[exchange(j)]
        if block_q == ROWS:
            # All queries, half of the columns.
            plgpu.wgmma(dq_acc, ds_sm.T, k_sm.at[:, mine])
        else:
            # Half of the queries, all columns.
            plgpu.wgmma(dq_acc, ds_sm.T.at[mine], k_sm)
        plgpu.wgmma(dk, ds_t, q_sm.at[slot])
        plgpu.wgmma_wait(2)  # For dv's product, which is the oldest.
        plgpu.barrier_arrive(m["do_free"].at[slot])
        return plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)

    def add_dq(j, ds_t, dk):
        """Adds its half of the tile of dq; dk's product is left running."""
        m["ds_sm"].at[exchange(j)].at[mine][...] = ds_t
        ptx.publish()
        ptx.meet(AT_DS, 128 * WARPGROUPS)
        part = plgpu.ACC((64, 64), jnp.float32)
        dq = pl.run_scoped(lambda x: half_of_dq(j, ds_t, dk, x), part)
        head, first_query = steps.at(j)
        row = b * static.num_q_heads + first_head + head
        row = row * static.dq_tiles + common.quotient(first_query, 64)
        # The next tile beside it, or, of one column of tiles, the next below. One index needs fewer
        # registers than four.
        ptx.add_fragments(dq, refs["dq"].at[row * (head_dim // 64) + warpgroup])

    def loop(dk, dv):
        def step(j):
            scores = plgpu.ACC((ROWS, block_q), jnp.float32)
            ds_t = pl.run_scoped(lambda *x: gradients_of_scores(j, dv, *x), scores, scores)
            if static.with_dq:
                add_dq(j, ds_t, dk)
            else:
                plgpu.wgmma(dk, ds_t, q_sm.at[ring(j)])
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(m["do_free"].at[ring(j)])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(m["q_free"].at[ring(j)])

        pl.loop(jnp.int32(0), steps.count)(step)
        return dk[...], dv[...]

    dk, dv = pl.run_scoped(
        loop, plgpu.ACC((ROWS, head_dim), jnp.float32), plgpu.ACC((ROWS, value_dim), jnp.float32)
    )
    if static.with_dq:
        # Both are done with k.
        ptx.meet(AT_END, 128 * WARPGROUPS)
    options = static.options.of_example(refs["shared"], b)
    dropout = options.extras.dropout
    dk, dv = dk * rescaled(dropout, options.scale), rescaled(dropout, dv)
    if static.shares > 1:
        row = (b * static.num_heads + share) * static.kv.count + kv_tile
        for x, ref in ((dk, refs["dk"]), (dv, refs["dv"])):
            columns = x.shape[1] // 64
            for column in range(columns):
                part = x[:, 64 * column : 64 * column + 64]
                # Nothing else is added there.
                place = (row * WARPGROUPS + warpgroup) * columns + column
                ptx.add_fragments(part, ref.at[place])
        return
    k_sm[mine], v_sm[mine] = dk.astype(dtype), dv.astype(dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(k_sm.at[mine], refs["dk"].at[here])
    plgpu.copy_smem_to_gmem(v_sm.at[mine], refs["dv"].at[here])
    plgpu.wait_smem_to_gmem(0)


def load(refs, memory, b, share, kv_tile, static: Static):
    """The loading warpgroup."""
    plgpu.set_max_registers(REGISTERS[1], action="decrease")
    ring = common.Ring(static.tile.stages)
    steps = static.steps(refs, b, share, kv_tile)
    _, first_head, _ = static.heads(share)

    def step(j):
        slot, (head, first_query) = ring(j), steps.at(j)
        h = first_head + head
        rows = pl.ds(first_query, static.q.block)

        def copy(name, index, full):
            plgpu.copy_gmem_to_smem(
                refs[name].at[index], memory[f"{name}_sm"].at[slot], memory[full].at[slot]
            )

        ring.refill(j, memory["q_free"])
        copy("q", (b, rows, h), "q_full")
        for name in static.statistics:
            copy(name, (b, h, rows), "q_full")
        ring.refill(j, memory["do_free"])
        copy("do", (b, rows, h), "do_full")
        copy("delta", (b, h, rows), "delta_full")

    pl.loop(jnp.int32(0), steps.count)(step)


def pallas_flash_backward(*refs, static: Static, **memory):
    """One tile of one key/value head."""
    results = ["dq", "dk", "dv"] if static.with_dq else ["dk", "dv"]
    names = ["q", "k", "v", "do", "delta", *static.statistics, *results]
    refs = static.refs(names, refs)
    head, kv_tile, outer, warpgroup = map(lax.axis_index, ("head", "kv_tile", "outer", "warpgroup"))
    b, share = static.program(head, outer)

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        compute(refs, memory, b, share, kv_tile, warpgroup, static)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        load(refs, memory, b, share, kv_tile, static)


def pallas_flash_dkv(*refs, **options):
    """The same without dq."""
    pallas_flash_backward(*refs, **options)


def backward(problem: Problem, do, log_sum: LogSum, delta, tile: BackwardTile, *, with_dq: bool):
    """dk, dv, and where it is wanted dq without its factor, the scale, in float32.

    Args:
        problem: the call.
        do: [B, T, N, V].
        log_sum: of float32 [B, N, T].
        delta: likewise.
        tile: block sizes.
        with_dq: whether dq is wanted, a sum in no order.
    """
    p = problem
    q, kv = Tiling(p.q_len, tile.block_q), Tiling(p.kv_len, BLOCK_KV)
    # Queries past the end need no mask: by their LSE they have no weights.
    mask = p.mask.within(kv=kv)
    shares = _shares(p, kv.count)
    heads = shared.side_by_side(p.num_kv_heads * shares)

    def tiles(*shape):
        return plgpu.SMEM(shape, p.dtype, transforms=ptx.TILED)

    def barriers(arrivals):
        return plgpu.Barrier(num_barriers=tile.stages, num_arrivals=arrivals)

    def run(arrays, *rows):
        query, key, value, *_ = rows
        _, extras = arrays
        table = common.table(extras.mask, q, kv, "q", len(query) // p.batch, p.groups)
        static = shared.call_static(
            *(Static, p, mask, arrays, table, q, kv),
            num_heads=p.num_kv_heads * shares,
            side_by_side=heads,
            tile=tile,
            shares=shares,
            with_dq=with_dq,
        )
        # Sums of 64 x 64 numbers.
        sums = [(len(query), p.num_heads, static.dq_tiles, p.head_dim // 64)] if with_dq else []
        if shares > 1:
            of_keys = len(query), static.num_heads, kv.count * WARPGROUPS
            sums += [(*of_keys, p.head_dim // 64), (*of_keys, p.value_dim // 64)]
        whole = [] if shares > 1 else [(key.shape, key.dtype), (value.shape, value.dtype)]
        statistic = plgpu.SMEM((tile.stages, q.block), jnp.float32)
        results = common.launch(
            pallas_flash_backward if with_dq else pallas_flash_dkv,
            (*shared.first_operands(static, arrays, table), *rows),
            sums=[(math.prod(tiles), 32, 128) for tiles in sums],
            outputs=whole,
            memory=dict(
                k_sm=tiles(BLOCK_KV, p.head_dim),
                v_sm=tiles(BLOCK_KV, p.value_dim),
                q_sm=tiles(tile.stages, q.block, p.head_dim),
                do_sm=tiles(tile.stages, q.block, p.value_dim),
                **{f"{name}_sm": statistic for name in ("delta", *static.statistics)},
                ds_sm=tiles(EXCHANGE, BLOCK_KV, q.block) if with_dq else None,
                kv_full=plgpu.Barrier(num_arrivals=2 * WARPGROUPS),
                q_full=barriers(1 + len(static.statistics)),
                do_full=barriers(1),
                delta_full=barriers(1),
                q_free=barriers(WARPGROUPS),
                do_free=barriers(WARPGROUPS),
            ),
            grid=dict(head=heads, kv_tile=kv.count, outer=static.num_heads // heads * len(query)),
            warpgroups=WARPGROUPS + 1,
            static=static,
            approx_math=static.options.approximate,
            # Where threads must wait for each other says this file: `ptx.meet`, `ptx.publish`.
            unsafe_no_auto_barriers=True,
        )
        unfolded = [
            ptx.unfold(x.reshape(*tiles, 32, 128)) for x, tiles in zip(results, sums, strict=False)
        ]
        return *unfolded, *results[len(sums) :]

    # Two whole tiles of 64 queries, for dq.
    rows = shared.rows(p, do, log_sum, delta, -(-p.q_len // 128) * 128)
    arrays = common.shared_arrays(dataclasses.replace(p, sinks=None), mask)
    *dq, dk, dv = common.by_instance(run, p.batch)(arrays, *rows)
    if shares > 1:
        dk, dv = (
            x.reshape(*x.shape[:2], p.num_kv_heads, shares, -1).sum(axis=3).astype(p.dtype)
            for x in (dk, dv)
        )
    return dk[:, : p.kv_len], dv[:, : p.kv_len], *(x[:, : p.q_len] for x in dq)


def _shares(p: Problem, tiles: int) -> int:
    """Into how many the query heads of a key/value head are shared out.

    As many as give each core two programs, where there are fewer programs than cores. Timed on an
    H100, 71 heads on one of 64, causal, two examples of 2048 tokens: not shared out, 5.2 times as
    long as "triton".
    """
    programs = p.batch * p.num_kv_heads * tiles
    return 1 if programs >= common.CORES else min(p.groups, -(-2 * common.CORES // programs))
