"""dbias: a tile of the bias is the outer tile, all that it is broadcast over the inner ones.

    s   = q @ k.T                       dp = do @ v.T                   [64, block_kv] a warpgroup
    p   = exp2(c * s - lse_log2)        see `backward_common`
    ds  = p * (dropout(dp) - delta)     through the derivative of the scores
    acc = acc + ds

A pass of its own: in the others the batch elements and heads that share a number of the bias belong
to different CTAs. Here the tile of the sum stays in registers, and is stored once. A step has a
batch element, a head, a query tile and a key tile; the axes that the bias has are the CTA's. Where
queries or keys share a number, tiles are added up as they are, and XLA adds the rows or columns of
the sum. Tiles that the mask leaves out whole are not in a CTA's list of steps.

**Roles.** A CTA has two consumer warpgroups with 64 queries each, which never wait for each other,
and one producer warpgroup. The tile of the bias is the same in all steps: each consumer reads its
half once, to shared memory.

**Shared memory.** Two pipelines: `s` holds q [128, H], k [block_kv, H] and the statistics, `dp`
holds do [128, V], v [block_kv, V] and delta. Beside them the tile of the bias, [128, block_kv].

**Barriers**, of each pipeline and stage: `full` has one arrival of each copy, and both consumers
wait for it; `empty` has one arrival of each consumer (2), when its product has been computed, and
the producer waits for it.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common, ptx, scheduler
from pallas_flash._backends.mosaic.backward_common import (
    BackwardConfig,
    Operands,
    ScoreTile,
    mask_for,
    statistics,
)
from pallas_flash._backends.mosaic.pipeline import Pipeline
from pallas_flash._backends.mosaic.score_mask import shared_arrays
from pallas_flash._problem.blocks import BlockClasses, Tiling, lists
from pallas_flash._problem.dropout import rescaled
from pallas_flash._problem.masks import Mask
from pallas_flash._problem.operands import Pairs
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.scores import LogSum
from pallas_flash._problem.tile_sizes import padded

plgpu = common.plgpu

CONSUMERS = 2  # Warpgroups.
PRODUCER = CONSUMERS  # Its number.
BLOCK_Q = CONSUMERS * ptx.ROWS
# Registers of a thread of a consumer, and of the producer.
REGISTERS = 240, 24


class DbiasTile(NamedTuple):
    """The tile of this kernel, which has 128 queries.

    Attributes:
        block_kv: keys of a tile.
        stages: pipeline stages of queries and keys, and of cotangents and values.
    """

    block_kv: int
    stages: int


def default_tile(p: Problem) -> DbiasTile:
    """Return the tile of this kernel: with 128 keys, if they fit."""
    itemsize, width = min(4, p.bias.dtype.itemsize), sum(padded(p.head_dim, p.value_dim))

    def stages(block_kv: int) -> int:
        room, each = common.ROOM - 64 * block_kv * itemsize, (128 + block_kv) * width
        # The float32 rows of 128 queries may take 2 KB, in two stages 3 KB, and barriers one more.
        return 2 if room - 1024 // 2 >= 2 * each else min(1, room // each)

    block_kv = 128 if stages(128) else 64
    return DbiasTile(block_kv, stages(block_kv))


@dataclasses.dataclass(frozen=True)
class DbiasConfig(BackwardConfig):
    """The configuration of the kernel, known at compile time.

    Attributes:
        own: of batch elements, heads, query tiles and key tiles, how many the bias has of its own.
        inner: how many of each it is broadcast over; 1 where it has its own.
        splits: CTAs that share the steps of a tile.
    """

    own: tuple[int, ...]
    inner: tuple[int, ...]
    splits: int


class Scratch(NamedTuple):
    """Shared memory of a CTA, see above."""

    s: Any
    dp: Any
    bias: Any


class Steps:
    """The steps of a CTA.

    Args:
        config: of the kernel.
        table_ref: of `_table`, with all its rows on one axis, if there is a mask.
        number: the CTA's.

    Attributes:
        count: the number of steps.
        outer: the instance and the split, counted together.
        place: the outer tile: batch element, head, query tile and key tile, 0 where it has none.
    """

    def __init__(self, config: DbiasConfig, table_ref, number):
        self._config, self._table_ref = config, table_ref
        self.outer, self.place = common.digits(number, config.own)
        self._instance, [split] = common.digits(self.outer, (config.splits,))
        if config.masked:
            at = jnp.int32(0)
            for i, n in zip((self._instance, *self.place), config.table_shape, strict=False):
                at = at if n == 1 else at * n + i
            self._row = at
            self._full, count = (plgpu.load(table_ref.at[at, i]) for i in range(2))
        else:
            count = jnp.int32(math.prod(config.inner))
        self._first, stop = (common.quotient(count * i, config.splits) for i in (split, split + 1))
        self.count = stop - self._first

    def place_of(self, j):
        """Return the batch element, over all instances, head, query tile and key tile of step j."""
        j = self._first + j
        if self._config.masked:
            j = plgpu.load(self._table_ref.at[self._row, 2 + j])
        _, inner = common.digits(j, self._config.inner)
        b, *others = (
            i if n > 1 else x for i, x, n in zip(inner, self.place, self._config.inner, strict=True)
        )
        return self.batch_element(b), *others

    def batch_element(self, b):
        """Return element b of the CTA's instance, counted over all instances."""
        return self._instance * self._config.options.batch + b

    def masked(self, j):
        """Return whether the tile of step j is a partial block, to which the mask is applied."""
        return self._first + j >= self._full if self._config.masked else False


class DbiasConsumer:
    """One of the two warpgroups that compute, with 64 queries of the outer tile."""

    def __init__(
        self, config: DbiasConfig, operands: Operands, dbias_ref, scratch: Scratch, steps, warpgroup
    ):
        self.config, self.operands, self.dbias_ref = config, operands, dbias_ref
        self.s, self.dp, self.steps, self.warpgroup = scratch.s, scratch.dp, steps, warpgroup
        self.shape, self.mine = (ptx.ROWS, config.kv.block), pl.ds(warpgroup * ptx.ROWS, ptx.ROWS)
        self.bias: Any = None if scratch.bias is None else scratch.bias.at[self.mine]

    def run(self):
        """Compute half of the tile of dbias."""
        if self.bias is not None:
            self.load_bias()
        acc = plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), ptx.WGMMA)
        acc = lax.fori_loop(jnp.int32(0), self.steps.count, self.step, acc)
        self.epilogue(acc)

    def options_of(self, b):
        """Return the options of a batch element."""
        return self.config.options.element_options(self.operands.options, b)

    def first_of(self, q_tile, kv_tile):
        """Return the first query and the first key of the warpgroup's tile."""
        return q_tile * BLOCK_Q + self.warpgroup * ptx.ROWS, kv_tile * self.config.kv.block

    def load_bias(self):
        """Read the warpgroup's half of the bias, to shared memory."""
        b, h, *tiles = self.steps.place
        options = self.options_of(self.steps.batch_element(b))
        q_pos, k_pos = common.positions(self.shape, *self.first_of(*tiles))
        bias: Any = options.extras.scores.bias
        bias = Pairs(bias.array.placed(columns=k_pos))
        self.bias[...] = bias.read(options.b, h, q_pos, k_pos)

    def score_tile(self, j, place) -> ScoreTile:
        """Return the tile of scores of step j."""
        b, h, *tiles = place
        options = self.options_of(b)
        if self.bias is not None:
            options = options.with_bias(plgpu.load(self.bias, layout=ptx.WGMMA))
        at = h, *self.first_of(*tiles), self.steps.masked(j)
        return ScoreTile(options, self.config, *at, transposed=False)

    def step(self, j, acc):
        """Add one inner tile."""
        scores = plgpu.ACC(self.shape, jnp.float32)
        return acc + pl.run_scoped(lambda *x: self.ds(j, *x), scores, scores)

    def ds(self, j, s_acc, dp_acc):
        """Return ds of step j; the products are computed in these accumulators."""
        config, s_stage, dp_stage = self.config, self.s.stage(j), self.dp.stage(j)
        # Opaque: the compiler would compute places that all steps share before the loop, and spill.
        place = tuple(map(ptx.anew, self.steps.place_of(j)))
        rows = pl.ds(ptx.anew(self.warpgroup) * ptx.ROWS, ptx.ROWS)
        # A running product holds the registers of its result.
        busy = config.masked or config.options.drops

        def start(acc, pipeline, of_queries, of_keys, stage):
            pipeline.consumer_wait(j)
            left, right = (pipeline.smem[x].at[stage] for x in (of_queries, of_keys))
            plgpu.wgmma(acc, left.at[rows], right.T)

        def release(pipeline):
            ptx.fence()
            pipeline.consumer_release(j)

        def statistic(name):
            place = config.statistic(self.s.smem["statistics"], name, s_stage)
            return plgpu.load(place.at[self.mine], layout=ptx.ROW)

        start(s_acc, self.s, "q", "k", s_stage)
        if not busy:
            start(dp_acc, self.dp, "do", "v", dp_stage)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0 if busy else 1)
        tile = self.score_tile(j, place)
        p = tile.weights(s, statistic)
        release(self.s)
        if busy:
            start(dp_acc, self.dp, "do", "v", dp_stage)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        delta = self.dp.smem["delta"].at[dp_stage].at[self.mine]
        ds = tile.gradient(p, dp, plgpu.load(delta, layout=ptx.ROW))
        release(self.dp)
        return ds

    def epilogue(self, acc):
        """Store the sum."""
        b, h, *tiles = self.steps.place
        acc = rescaled(self.options_of(self.steps.batch_element(b)).extras.dropout, acc)
        b = self.steps.outer * self.config.own[0] + b
        firsts = self.first_of(*tiles)
        rows, columns = (pl.ds(first, n) for first, n in zip(firsts, self.shape, strict=True))
        common.store(self.dbias_ref, (b, h, rows, columns), acc.astype(self.dbias_ref.dtype))


def produce(config: DbiasConfig, operands: Operands, scratch: Scratch, steps: Steps):
    """Copy the tiles of all steps: what the producer warpgroup does."""
    products = (
        (scratch.s, "q", "k", config.statistics),
        (scratch.dp, "do", "v", ("delta",)),
    )

    def scalars(pipeline, name, stage):
        if name == "delta":
            return pipeline.smem["delta"].at[stage]
        return config.statistic(pipeline.smem["statistics"], name, stage)

    def step(j):
        b, h, q_tile, kv_tile = steps.place_of(j)
        rows = pl.ds(q_tile * BLOCK_Q, BLOCK_Q)
        keys = pl.ds(kv_tile * config.kv.block, config.kv.block)
        for pipeline, of_queries, of_keys, names in products:
            pipeline.producer_acquire(j)
            stage, full = pipeline.stage(j), pipeline.filled(j)
            at = (b, rows, h), (b, keys, common.quotient(h, config.groups))
            for name, index in zip((of_queries, of_keys), at, strict=True):
                source, place = getattr(operands, name).at[index], pipeline.smem[name].at[stage]
                plgpu.copy_gmem_to_smem(source, place, full)
            for name in names:
                source = getattr(operands, name).at[b, h, rows]
                plgpu.copy_gmem_to_smem(source, scalars(pipeline, name, stage), full)

    pl.loop(jnp.int32(0), steps.count)(step)


def pallas_flash_dbias(operands: Operands, dbias_ref, *, static: DbiasConfig, **memory):
    """Compute one tile of dbias, or a split of its steps."""
    config, scratch = static, Scratch(**memory)
    number, warpgroup = map(lax.axis_index, ("cta", "warpgroup"))

    @common.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        steps = Steps(config, operands.table, number)
        DbiasConsumer(config, operands, dbias_ref, scratch, steps, warpgroup).run()

    @common.when(warpgroup == PRODUCER)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        produce(config, operands, scratch, Steps(config, operands.table, number))


def scratch_of(config: DbiasConfig, p: Problem, bias_dtype) -> Scratch:
    """Return the specification of a CTA's shared memory; without `bias_dtype`, without a bias."""
    stages, (block_q, block_kv) = config.tile.stages, (config.q.block, config.kv.block)
    head_dim, value_dim = padded(p.head_dim, p.value_dim)

    def tiles(rows, columns):
        return plgpu.SMEM((stages, rows, columns), p.dtype, transforms=ptx.tiled(columns))

    def pipeline(copies, **smem):
        return Pipeline.spec(smem, stages, copies=copies, consumers=CONSUMERS)

    bias = None
    if bias_dtype is not None:
        transforms = ptx.TILED if bias_dtype.itemsize == 2 else ptx.TILED_32
        bias = plgpu.SMEM((block_q, block_kv), bias_dtype, transforms=transforms)
    return Scratch(
        s=pipeline(
            2 + len(config.statistics),
            q=tiles(block_q, head_dim),
            k=tiles(block_kv, head_dim),
            statistics=statistics(p, stages, block_q),
        ),
        dp=pipeline(
            3,
            do=tiles(block_q, value_dim),
            v=tiles(block_kv, value_dim),
            delta=plgpu.SMEM((stages, block_q), jnp.float32),
        ),
        bias=bias,
    )


def _table(mask: Mask, q: Tiling, kv: Tiling, inner: tuple[int, ...], instances: int):
    """Return the steps of each tile of the bias, full tiles first, as `Mask.kv_lists` has them.

    Args:
        mask: with an axis of instances before all others of its arrays.
        q: the tiles of queries.
        kv: the tiles of keys.
        inner: as `DbiasConfig.inner`.
        instances: how many there are.

    Returns:
        int32 [1 or instances, 1 or B, 1 or N, 1 or query tiles, 1 or key tiles, 2 + steps].
    """

    def of_one(classes):
        # Steps count all inner tiles, whether the mask tells them apart or not.
        shape = (max(count, n) for count, n in zip(classes.shape, inner, strict=True))
        classes = jnp.broadcast_to(classes, tuple(shape))
        axes = [axis for axis, n in enumerate(inner) if n > 1]
        outer = tuple(1 if n > 1 else size for size, n in zip(classes.shape, inner, strict=True))
        classes = jnp.moveaxis(classes, axes, range(4 - len(axes), 4))
        return classes.reshape(*outer, -1)

    def classes_of(mask: Mask):
        return lists(BlockClasses(*map(of_one, mask.block_classes(q, kv))))

    return scheduler.map_instances(classes_of, mask, instances)


def _copyable(x, columns: int):
    """Return [B, T, N, H] with zeros behind: whole tiles of 8 rows, and `columns` columns."""
    missing = -x.shape[1] % 8, columns - x.shape[3]
    return jnp.pad(x, ((0, 0), (0, missing[0]), (0, 0), (0, missing[1]))) if any(missing) else x


def _splits(ctas: int, steps: int) -> int:
    """Return among how many CTAs the steps of a tile are split: two or more for each SM."""
    return 1 if ctas >= scheduler.NUM_SMS else min(steps, -(-2 * scheduler.NUM_SMS // ctas))


def dbias(problem: Problem, do, log_sum: LogSum, delta, tile: DbiasTile):
    """Return the gradient of the bias, in its shape and dtype.

    Arguments are as in `backward_launch.backward`; their rows must hold nothing but numbers.
    """
    p = problem
    q, kv = Tiling(p.q_len, BLOCK_Q), Tiling(p.kv_len, tile.block_kv)
    mask = mask_for(p, q, kv, None)
    counts = p.batch, p.num_heads, q.count, kv.count
    broadcast = [n == 1 for n in p.bias.shape]
    own, inner = (
        tuple(n if one == x else 1 for n, one in zip(counts, broadcast, strict=True))
        for x in (False, True)
    )
    splits = _splits(math.prod(own), math.prod(inner))
    # Numbers of 64 bits are read as float32.
    bias_dtype = p.bias.dtype if p.bias.dtype.itemsize <= 4 else jnp.dtype(jnp.float32)
    summed = [axis for axis in (2, 3) if broadcast[axis]]
    dtype = jnp.float32 if summed or splits > 1 else bias_dtype

    def run(arrays, operands: Operands):
        _, extras = arrays
        instances = len(operands.q) // p.batch
        table = _table(extras.mask, q, kv, inner, instances)
        config = DbiasConfig.from_call(
            *(p, mask, arrays, table, q, kv),
            num_heads=own[1],
            neighbours=own[1],
            has_lengths=False,
            tile=tile,
            own=own,
            inner=inner,
            splits=splits,
        )
        shape = instances * splits * own[0], own[1], own[2] * q.block, own[3] * kv.block
        [sums] = common.launch(
            pallas_flash_dbias,
            (operands.launched(config, arrays, table),),
            outputs=[(shape, dtype)],
            memory=scratch_of(config, p, bias_dtype if len(summed) < 2 else None)._asdict(),
            grid=dict(cta=instances * splits * math.prod(own)),
            warpgroups=CONSUMERS + 1,
            static=config,
            approx_math=config.options.approximate,
        )
        if splits > 1:
            sums = sums.reshape(instances, splits, own[0], *shape[1:]).sum(axis=1)
            sums = sums.reshape(-1, *shape[1:])
        return sums.sum(axis=summed, keepdims=True) if summed else sums

    head_dim, value_dim = padded(p.head_dim, p.value_dim)
    x = Operands.from_call(p, do, log_sum, delta, None, q.count * q.block)
    x = x._replace(
        q=_copyable(x.q, head_dim),
        k=_copyable(x.k, head_dim),
        v=_copyable(x.v, value_dim),
        do=_copyable(x.do, value_dim),
    )
    arrays = shared_arrays(dataclasses.replace(p, sinks=None), mask)
    gradient = common.batch_instances(run, p.batch)(arrays, x)
    _, _, q_len, kv_len = p.bias.shape
    return gradient[:, :, :q_len, :kv_len].astype(p.bias.dtype)
