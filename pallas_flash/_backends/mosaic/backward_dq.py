"""dq alone: queries are the outer tile, keys and values the inner ones.

    s   = q @ k.T                       dp = do @ v.T                   [64, block_kv] a warpgroup
    p   = exp2(c * s - lse_log2)        see `backward_common`
    ds  = p * (dropout(dp) - delta)
    acc = acc + ds @ k                                                  [64, H]

    at the end    acc = acc + r c     for the sums r of ds and the center c, see `key_center`
                  dq = scale * acc    (times the factor of dropout)
                  dscale = rowsum(q * acc)    where it is asked for

This kernel and `backward_kernel` without dq are a backward in two passes, whose sums have a fixed
order. It serves calls for which one pass is slower, though it computes five products and two passes
seven, or eight where H + V is above 256: where threads read a bias, and heads are wide.

**Roles.** A CTA has two or three consumer warpgroups with 64 queries each. They never wait for each
other, and each copies its own rows of q, do, delta and the LSE. The last warpgroup is the producer,
which copies inner tiles.

**Shared memory.** q and do [consumers, strips, 64, width], delta and the statistics of each
consumer's rows; pipelines of k and of v, [stages, strips, block_kv, width]. In the end dq and
dscale leave through q and delta.

**Barriers.** A copy and a warpgroup are one arrival each.

| barrier | arrivals | who arrives | who waits | what it says |
|---|---|---|---|---|
| rows_full[consumer] | copies of q, do, delta, LSE | these copies | consumer | its rows are there |
| k.full, v.full [stage] | copies of the tile | these copies | consumers | the tile is there |
| k.empty, v.empty [stage] | consumers | consumers | producer | ds @ k, or dp, has been computed |
| landed[warpgroup] | 1 | a copy | who started it | rows behind a valid length can be zeroed |

**A step.** s and dp are in flight together; v leaves as soon as dp is there, k at the
end of the step, when ds @ k is done.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common, ptx, scheduler
from pallas_flash._backends.mosaic.backward_common import (
    BackwardConfig,
    InnerTiles,
    Operands,
    ScoreTile,
    TileCopies,
    copies_in_strips,
    in_strips,
    mask_for,
    neighbours,
    num_statistics,
    statistics,
    store_tile,
)
from pallas_flash._backends.mosaic.pipeline import Pipeline
from pallas_flash._backends.mosaic.score_mask import shared_arrays
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.dropout import rescaled
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.scores import LogSum
from pallas_flash._problem.tile_sizes import DqTile, padded

plgpu = common.plgpu

# Registers of a thread of a consumer and of the producer, by the number of consumers.
REGISTERS = {2: (240, 24), 3: (160, 24)}


class QueriesScratch(NamedTuple):
    """Shared memory of a CTA of `backward_dq`; None where there is nothing."""

    q: Any
    do: Any
    delta: Any
    statistics: Any
    k: Pipeline
    v: Pipeline
    rows_full: Any
    landed: Any


def queries_scratch(p: Problem, tile: DqTile, *, has_lengths: bool = False) -> QueriesScratch:
    """Return its specification; arguments as of `backward_launch.scratch`."""
    consumers = tile.warpgroups
    head_dim, value_dim = padded(p.head_dim, p.value_dim)

    def tiles(columns, stages, rows):
        return common.strips(p.dtype, stages, rows=rows, columns=columns)

    def pipeline(dim, columns, stages):
        smem = tiles(columns, stages, tile.block_kv)
        copies = copies_in_strips(dim, smem)
        return Pipeline.spec(smem, stages, copies=copies, consumers=consumers)

    q_sm, do_sm = (tiles(columns, consumers, ptx.ROWS) for columns in (head_dim, value_dim))
    copies = copies_in_strips(p.head_dim, q_sm) + copies_in_strips(p.value_dim, do_sm)
    return QueriesScratch(
        q=q_sm,
        do=do_sm,
        delta=plgpu.SMEM((consumers, ptx.ROWS), jnp.float32),
        statistics=statistics(p, consumers, ptx.ROWS),
        k=pipeline(p.head_dim, head_dim, tile.stages),
        v=pipeline(p.value_dim, value_dim, _value_stages(tile, head_dim, value_dim)),
        rows_full=common.barriers(consumers, copies + num_statistics(p) + 1),
        landed=common.barriers(consumers + 1) if has_lengths else None,
    )


def _value_stages(tile: DqTile, head_dim: int, value_dim: int) -> int:
    """Return the stages of values: as many as of keys, which are in use longer, or fewer."""
    outer = ptx.ROWS * tile.warpgroups * (head_dim + value_dim)
    room = common.ROOM - outer - tile.stages * tile.block_kv * head_dim
    return max(1, min(tile.stages, room // (tile.block_kv * value_dim)))


def default_tile(p: Problem) -> DqTile:
    """Return the tile of a call.

    At head dim 128 it is the largest one that the compiler keeps in registers. At head dim 64, on
    an H100 without a mask, 2 warpgroups take 4 % longer with 128 keys, and 7 % with 64 keys.
    """
    head_dim, value_dim = padded(p.head_dim, p.value_dim)
    if max(head_dim, value_dim) <= 64:
        return DqTile(3, 64, 2)
    width = head_dim + value_dim
    if head_dim > 128 or width > 256:
        return DqTile(2, 64, min(3, max(2, (common.ROOM - 128 * width) // (64 * width))))
    # A mask and a bias take registers.
    return DqTile(2, 64, 3) if p.mask or p.bias is not None else DqTile(2, 128, 2)


def check_tile(tile: DqTile, p: Problem) -> None:
    """Raise ValueError if a tile does not fit on the GPU."""
    head_dim, _ = padded(p.head_dim, p.value_dim)
    registers, _ = REGISTERS[tile.warpgroups]
    taken = head_dim // 2 + tile.block_kv
    common.check_fits("dq", tile, p, queries_scratch(p, tile), taken, registers)


@dataclasses.dataclass(frozen=True)
class DqConfig(BackwardConfig):
    """The configuration of the kernel; its grid counts query heads.

    Attributes:
        grows: whether the last queries have the most work.
        want_scale: whether the gradient of the scale is wanted.
    """

    grows: bool
    want_scale: bool

    @property
    def row_scalars(self) -> tuple[str, ...]:
        """Names of the numbers that each query has, as in `Operands`."""
        return "delta", *self.statistics


class Cta(NamedTuple):
    """The work of a CTA: the batch element, counted over all instances, head and outer tile."""

    b: Any
    h: Any
    q_tile: Any


class DqConsumer:
    """One of the warpgroups that compute, with 64 queries of the outer tile.

    Args:
        config: of the kernel.
        operands: references to the arrays that are read.
        outputs: references to dq and, if it is wanted, dscale.
        scratch: shared memory.
        cta: the work.
        warpgroup: its number.
    """

    def __init__(
        self,
        config: DqConfig,
        operands: Operands,
        outputs,
        scratch: QueriesScratch,
        cta: Cta,
        warpgroup,
    ):
        self.config, self.operands, self.outputs = config, operands, outputs
        self.scratch, self.cta, self.warpgroup = scratch, cta, warpgroup
        self.dtype, self.head_dim = scratch.q.dtype, ptx.columns_of(scratch.q)

    def run(self):
        """Compute the gradients of the warpgroup's queries, from the first copy to the last."""
        plgpu.set_max_registers(REGISTERS[self.config.tile.warpgroups][0], action="increase")
        self.inner = InnerTiles(self.config, self.operands.table, self.cta, self.config.kv)

        def some():
            self.prologue()
            self.epilogue(self.mainloop())

        self.inner.if_any(some, lambda: self.store(*self.zeros()))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def scalar_memory(self, name: str):
        """Return the shared memory for one number of each of the warpgroup's queries."""
        if name == "delta":
            return self.scratch.delta.at[self.warpgroup]
        return self.config.statistic(self.scratch.statistics, name, self.warpgroup)

    def prologue(self):
        """Copy the warpgroup's rows, and wait for them."""
        config, operands, scratch = self.config, self.operands, self.scratch
        b, h, q_tile = self.cta
        self.options = config.options.element_options(operands.options, b)
        self.first_query = q_tile * config.q.block + self.warpgroup * ptx.ROWS
        rows, full = pl.ds(self.first_query, ptx.ROWS), scratch.rows_full.at[self.warpgroup]
        landed = scratch.landed.at[self.warpgroup] if config.has_lengths else None
        copies = TileCopies(operands.valid_q, landed, b)
        for source, tiles in ((operands.q, scratch.q), (operands.do, scratch.do)):
            copies.start(source, h, self.first_query, tiles.at[self.warpgroup], full)
        scalars = {name: self.scalar_memory(name) for name in config.row_scalars}
        for name, place in scalars.items():
            plgpu.copy_gmem_to_smem(getattr(operands, name).at[b, h, rows], place, full)
        plgpu.barrier_wait(full)
        self.scalars = {name: plgpu.load(x, layout=ptx.ROW) for name, x in scalars.items()}

    def zeros(self):
        """Return dq and dscale of queries that see no key."""
        dq = jnp.zeros((ptx.ROWS, self.head_dim), jnp.float32)
        dscale = jnp.zeros((ptx.ROWS,), jnp.float32)
        return plgpu.layout_cast(dq, ptx.WGMMA), plgpu.layout_cast(dscale, ptx.ROW)

    def mainloop(self):
        """Return the sum over all inner tiles."""
        nothing, _ = self.zeros()
        return lax.fori_loop(jnp.int32(0), self.inner.count, self.step, nothing)

    def step(self, j, dq):
        """Add one inner tile."""
        k = self.scratch.k
        ds = self.ds(j)
        dq = ptx.wait(0, ptx.accumulate(dq, ds, k.smem_of(j)))
        k.consumer_release(j)
        return dq

    def ds(self, j):
        """Return ds of an inner tile, in the dtype of the operands."""
        k, v, (_, first_key) = self.scratch.k, self.scratch.v, self.inner.place_of(j)
        mine = ptx.anew(self.warpgroup)
        k.consumer_wait(j)
        s = ptx.product_t(self.scratch.q.at[mine], k.smem_of(j))
        v.consumer_wait(j)
        dp = ptx.product_t(self.scratch.do.at[mine], v.smem_of(j))
        s = ptx.wait(1, s)
        tile = ScoreTile(
            *(self.options, self.config, self.cta.h, self.first_query, first_key),
            self.inner.masked(j),
            transposed=False,
        )
        p = tile.weights(s, self.scalars.get)
        dp = ptx.wait(0, dp)
        v.consumer_release(j)
        return tile.gradient(p, dp, self.scalars["delta"]).astype(self.dtype)

    def epilogue(self, dq):
        """Scale dq, compute dscale, and store both."""
        options, operands = self.options, self.operands
        dq, dscale = rescaled(options.extras.dropout, dq), None
        if operands.row_sums is not None:
            b, h, _ = self.cta
            r = operands.row_sums.at[b, h, pl.ds(self.first_query, ptx.ROWS)]
            c = operands.center.at[b, common.quotient(h, self.config.groups)]
            r = plgpu.load(r, layout=ptx.ROW, optimized=False)
            c = plgpu.load(c, layout=ptx.COLUMN, optimized=False)
            dq = dq + common.along_rows(r, dq.shape) * common.along_columns(c, dq.shape)
        if self.config.want_scale:
            q = ptx.load_strips(self.scratch.q.at[self.warpgroup]).astype(jnp.float32)
            dscale = jnp.sum(q * dq, axis=1)
        self.store(dq * options.scale, dscale)

    def store(self, dq, dscale):
        """Start the copies of the results to device memory, through where q and delta were."""
        b, h, q_tile = self.cta
        rows = pl.ds(q_tile * self.config.q.block + self.warpgroup * ptx.ROWS, ptx.ROWS)
        my_q, my_delta = self.scratch.q.at[self.warpgroup], self.scalar_memory("delta")
        ptx.put_strips(dq.astype(my_q.dtype), my_q)
        if self.config.want_scale:
            my_delta[...] = dscale
        plgpu.commit_smem()
        store_tile(my_q, self.outputs[0], (b, rows, h))
        if self.config.want_scale:
            plgpu.copy_smem_to_gmem(my_delta, self.outputs[1].at[b, h, rows])


def produce(config: DqConfig, operands: Operands, scratch: QueriesScratch, cta: Cta):
    """Copy the inner tiles: what the producer warpgroup does."""
    consumers = config.tile.warpgroups
    plgpu.set_max_registers(REGISTERS[consumers][1], action="decrease")
    inner = InnerTiles(config, operands.table, cta, config.kv)
    kv_head = common.quotient(cta.h, config.groups)
    landed = scratch.landed.at[consumers] if config.has_lengths else None
    copies = TileCopies(operands.valid_kv, landed, cta.b)

    def step(j):
        _, first_key = inner.place_of(j)
        for source, pipeline in ((operands.k, scratch.k), (operands.v, scratch.v)):
            pipeline.producer_acquire(j)
            copies.start(source, kv_head, first_key, pipeline.smem_of(j), pipeline.filled(j))

    inner.if_any(lambda: pl.loop(jnp.int32(0), inner.count)(step))


def pallas_flash_dq(operands: Operands, *outputs, static: DqConfig, **memory):
    """Compute dq of one query tile of one head."""
    config, scratch = static, QueriesScratch(**memory)
    head, q_tile, outer, warpgroup = map(lax.axis_index, ("head", "q_tile", "outer", "warpgroup"))
    if config.grows:
        # Tiles with much work start first.
        q_tile = config.q.count - 1 - q_tile
    cta = Cta(*config.place(head, outer), q_tile)

    @common.when(config.exists(cta.h, warpgroup < config.tile.warpgroups))
    def _():
        DqConsumer(config, operands, outputs, scratch, cta, warpgroup).run()

    @common.when(config.exists(cta.h, warpgroup == config.tile.warpgroups))
    def _():
        produce(config, operands, scratch, cta)


def dq(
    problem: Problem,
    do,
    log_sum: LogSum,
    delta,
    tile: DqTile,
    valid=None,
    *,
    center: Any = None,
    row_sums=None,
    want_scale: bool,
):
    """Return dq, and float32 [B, N, T] that sum to the gradient of the scale, or None.

    Arguments are as in `backward_launch.backward`, but keys are centered already.
    """
    p = problem
    q, kv = Tiling(p.q_len, tile.warpgroups * ptx.ROWS), Tiling(p.kv_len, tile.block_kv)
    mask = mask_for(p, q, kv, valid)
    head_dim, value_dim = padded(p.head_dim, p.value_dim)

    def run(arrays, operands: Operands):
        batch = len(operands.q)
        _, extras = arrays
        table = scheduler.block_table(extras.mask, q, kv, "kv", batch, p.batch)
        config = DqConfig.from_call(
            *(p, mask, arrays, table, q, kv),
            num_heads=p.num_heads,
            neighbours=neighbours(p.num_kv_heads) * p.groups,
            tile=tile,
            grows=mask.later_rows_see_more,
            want_scale=want_scale,
            has_lengths=valid is not None,
        )
        dscale = (batch, p.num_heads, q.count * q.block), jnp.float32
        return common.launch(
            pallas_flash_dq,
            (operands.launched(config, arrays, table),),
            outputs=[(operands.q.shape, operands.q.dtype), *[dscale] * want_scale],
            memory=queries_scratch(p, tile, has_lengths=config.has_lengths)._asdict(),
            grid=config.grid(batch, q_tile=q.count),
            warpgroups=tile.warpgroups + 1,
            static=config,
            approx_math=config.options.approximate,
        )

    x = Operands.from_call(p, do, log_sum, delta, valid, q.count * q.block)
    x = x._replace(
        q=in_strips(x.q, head_dim),
        k=in_strips(x.k, head_dim),
        v=in_strips(x.v, value_dim),
        do=in_strips(x.do, value_dim),
    )
    if center is not None and row_sums is not None:
        missing = q.count * q.block - p.q_len, head_dim - p.head_dim
        row_sums, center = (
            jnp.pad(x, ((0, 0), (0, 0), (0, n)))
            for x, n in zip((row_sums, center), missing, strict=True)
        )
        x = x._replace(row_sums=row_sums, center=center)
    arrays = shared_arrays(dataclasses.replace(p, sinks=None), mask)
    dq, *dscale = common.batch_instances(run, p.batch)(arrays, x)
    return dq.reshape(p.query.shape), dscale[0][:, :, : p.q_len] if want_scale else None
