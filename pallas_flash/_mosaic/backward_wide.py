"""dk, dv and dq for head dims above 256: a cluster of two CTAs divides the columns of the heads.

Equations are those of backward_kernel.py: keys and values are the outer tile, queries the inner
ones, and dq is added to float32 in device memory by atomic adds. But dk and dv of 64 keys with 512
columns each would fill all registers of an SM. So the two CTAs of a cluster have the same 64 keys,
and rank r has one half of the columns of q, k, v and do, and of all results:

    s_t  = k @ q.T     over its columns, then the sum of both CTAs      [64, 64]
    dp_t = v @ do.T    over its columns, then the sum of both CTAs      [64, 64]
    dv  += dropout(p_t) @ do         its columns                        [64, V / 2]
    dk  += ds_t @ q                  its columns                        [64, H / 2]
    dq  += ds_t.T @ k                its columns                        [64, H / 2]

Each operand is copied to one CTA alone. The CTAs exchange s_t and dp_t, 16 KB each for a step,
through distributed shared memory: each stores its part into the other's shared memory, and adds
what it received to its own. Sums of two numbers do not depend on the order, so both CTAs have the
same bits.

Why so. Counted for a step of 64 queries and 64 keys at head dim 512, of one CTA: 2560 cycles of the
matrix units, about 2900 of shared memory (at 128 bytes a cycle), and 51 bytes a cycle to and from
the L2 cache. Without a cluster, dk, dv and dq would need three launches with eight products instead
of five. Fewer keys in a CTA would add as much more to dq, in device memory.

**Roles.** A CTA has three warpgroups. Consumer 0 has dv, consumer 1 has dk (240 registers). Both
compute p_t from the same s_t, and each adds half of the CTA's columns of dq. Warpgroup 2 is the
producer (24 registers). A CTA computes one query head: where query heads share a key head, dk and
dv are added to float32 in device memory, too.

    consumer 0    s_t, sent; received; handed to consumer 1; p_t; dv; half of dq
    consumer 1    dp_t, sent; received; s_t from consumer 0; p_t; ds_t, handed over; dk; half of dq

**Shared memory.** Tiles lie in strips, [columns / width, 64, width], of one CTA's columns.

| buffer | shape | what |
|---|---|---|
| k, v | strips | outer tile; dk and dv leave through them |
| queries | stages x (strips, float32 [statistics * 64]) | q, and the LSE |
| cotangents | stages x (strips, float32 [64]) | do, and delta |
| received | float32 [2, fragments] | the other CTA's part of s_t, then s_t; its part of dp_t |
| ds | [64, 64] | ds_t |

**Barriers.** A copy arrives once, a warpgroup of 128 threads once. At `sent` and `read` of a
cluster one thread arrives for its warpgroup, at the barriers of both CTAs.

| barrier | arrivals | who arrives | who waits | what it says |
|---|---|---|---|---|
| kv_full, one | copies of k and v | these copies | consumers | the outer tile is there |
| queries.full, cotangents.full [stage] | copies | these copies | consumers | the tile is there |
| queries.empty, cotangents.empty [stage] | 2 | consumers | producer | it has been read |
| sent[0], sent[1] | 1 of each CTA | consumer 0, 1 | the same | both parts were sent |
| read[0], read[1] | 1 of each CTA | consumer 1 | consumer 0, 1 | both CTAs have read them |
| s_full, one | 1 | consumer 0 | consumer 1 | s_t is in `received` |
| ds_full, one | 1 | consumer 1 | consumers | ds_t has been written |
| ds_empty, one | 2 | consumers | consumer 1 | dq has been computed from it |
| ended, one | 2 of each CTA | consumers | consumers | no CTA will send any more |
| named 5, 6 | 128 threads | consumer 0, 1 | the same | all its threads have sent, or read |
| named 7 | 256 threads | consumers | consumers | both have read k: dk may go there |
"""

import abc
import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash import _hardware
from pallas_flash._blocks import Tiling
from pallas_flash._dropout import rescaled
from pallas_flash._mosaic import block_ranges, common, ptx
from pallas_flash._mosaic.backward_common import (
    BackwardConfig,
    InnerTiles,
    Operands,
    ScoreTile,
    mask_for,
)
from pallas_flash._mosaic.backward_memory import num_statistics, statistics
from pallas_flash._mosaic.backward_postprocess import postprocess
from pallas_flash._mosaic.pipeline import Pipeline
from pallas_flash._mosaic.score_mask import shared_arrays
from pallas_flash._problem import Problem
from pallas_flash._scores import LogSum
from pallas_flash._tiling.sizes import BackwardTile

plgpu = common.plgpu

ROWS = 64  # Keys of a CTA, and queries of a step.
CONSUMERS, CLUSTER = 2, 2
# Registers of a thread of a consumer, and of the producer.
REGISTERS = 240, 24
# Named barriers, see above.
OF_CONSUMER, LOOP_ENDED = (5, 6), 7
# Which of the exchanged tiles.
S, DP = 0, 1
# Columns of a product of wgmma, at most.
MAX_COLUMNS = 256


def rank_columns(dim: int) -> int:
    """Return the columns of a CTA: half of a head dim, in whole strips of 32."""
    return -(-dim // (CLUSTER * 32)) * 32


def sum_columns(dim: int) -> int:
    """Return the columns of the sums of both CTAs."""
    return CLUSTER * rank_columns(dim)


def slices(strips: int, most: int) -> list[slice]:
    """Return consecutive slices of up to `most` strips, nearly equal ones."""
    count = -(-strips // most)
    ends = [-(-strips * i // count) for i in range(count + 1)]
    return [slice(*x) for x in itertools.pairwise(ends)]


# ------------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------------


class Smem(NamedTuple):
    """Shared memory and barriers: specifications outside of the kernel, references inside."""

    k: Any
    v: Any
    queries: Pipeline
    cotangents: Pipeline
    received: Any
    ds: Any
    kv_full: Any
    sent: Any
    read: Any
    s_full: Any
    ds_full: Any
    ds_empty: Any
    ended: Any


def scratch(p: Problem, tile: BackwardTile) -> Smem:
    """Return the specification of a CTA's shared memory.

    Cotangents have as many stages as queries, or as fit: one at least.
    """
    limit = _hardware.shared_memory_limit(common.HOPPER)
    found = [_scratch(p, tile.stages, n) for n in range(tile.stages, 0, -1)]
    return next((x for x in found if common.smem_bytes(x) <= limit), found[-1])


def _scratch(p: Problem, query_stages: int, cotangent_stages: int) -> Smem:
    of_q, of_v = rank_columns(p.head_dim), rank_columns(p.value_dim)

    def strips(columns: int, *outer: int):
        return common.strips(p.dtype, *outer, rows=ROWS, columns=columns)

    def pipeline(columns: int, stages: int, numbers: int, **scalars):
        tiles = strips(columns, stages)
        smem = dict(tiles=tiles, **scalars)
        copies = tiles.shape[1] + numbers
        return Pipeline.spec(smem, stages, copies=copies, consumers=CONSUMERS)

    k, v = strips(of_q), strips(of_v)
    return Smem(
        k=k,
        v=v,
        queries=pipeline(
            *(of_q, query_stages, num_statistics(p)), statistics=statistics(p, query_stages, ROWS)
        ),
        cotangents=pipeline(
            *(of_v, cotangent_stages, 1),
            delta=plgpu.SMEM((cotangent_stages, ROWS), jnp.float32),
        ),
        received=plgpu.SMEM((2, ptx.groups(ROWS), math.prod(ptx.OF_GROUP)), jnp.float32),
        ds=plgpu.SMEM((ROWS, ROWS), p.dtype, transforms=ptx.tiled(k.shape[-1])),
        kv_full=common.barriers(1, k.shape[0] + v.shape[0]),
        sent=common.barriers(2, 1, CLUSTER),
        read=common.barriers(2, 1, CLUSTER),
        s_full=common.barriers(1),
        ds_full=common.barriers(1),
        ds_empty=common.barriers(1, CONSUMERS),
        ended=common.barriers(1, CONSUMERS, CLUSTER),
    )


@dataclasses.dataclass(frozen=True)
class WideBackwardConfig(BackwardConfig):
    """The configuration of the kernel, whose grid counts query heads, known at compile time.

    Attributes:
        head_dim: head dim of queries and keys.
        value_dim: head dim of values.
        adds: whether dk and dv are added in device memory, because query heads share a key head.
    """

    head_dim: int
    value_dim: int
    adds: bool

    @property
    def dq_tiles(self) -> int:
        """Tiles of 64 queries that the sums of dq have for a head: of 128 whole ones."""
        return -(-self.q.count // 2) * 2


class Cta(NamedTuple):
    """The work of a CTA.

    Attributes:
        b: the batch element, counted over all instances.
        h: the query head.
        kv_tile: the outer tile.
        rank: which half of the columns.
    """

    b: Any
    h: Any
    kv_tile: Any
    rank: Any


# ------------------------------------------------------------------------------------------------
# Consumers
# ------------------------------------------------------------------------------------------------


class Consumer(abc.ABC):
    """Parts of both consumers; each has a step of its own.

    Args:
        config: of the kernel.
        operands: references to the arrays that are read.
        grads: references to the gradients, by name.
        smem: shared memory.
        cta: the work.
    """

    number: int

    def __init__(self, config: WideBackwardConfig, operands: Operands, grads, smem: Smem, cta: Cta):
        self.config, self.operands, self.grads, self.smem = config, operands, grads, smem
        self.cta, self.dtype = cta, smem.k.dtype
        self.q_sm, self.do_sm = smem.queries.smem["tiles"], smem.cotangents.smem["tiles"]
        # The strips of dq's columns that this consumer adds; a single one is consumer 0's.
        parts = slices(smem.k.shape[0], -(-smem.k.shape[0] // CONSUMERS))
        self.dq_strips = parts[self.number] if self.number < len(parts) else None

    def run(self):
        """Compute the sums of the CTA's keys, and store them."""
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        config, cta = self.config, self.cta
        self.options = config.options.of_element(self.operands.options, cta.b)
        self.first_key = cta.kv_tile * ROWS
        self.inner = inner_tiles(config, self.operands, cta)

        def some():
            self.start()
            plgpu.barrier_wait(self.smem.kv_full)
            sums = lax.fori_loop(jnp.int32(0), self.inner.count, self.step, self.zeros(ptx.ACC))
            sums = [plgpu.layout_cast(x, ptx.WGMMA) for x in sums]
            ptx.meet(LOOP_ENDED, 128 * CONSUMERS)
            self.store([x * self.factor() for x in sums])

        def none():
            if not config.adds:
                self.store(self.zeros(ptx.WGMMA))

        self.inner.if_any(some, none)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # A CTA must not exit while the other one may still send, or arrive at its barriers.
        plgpu.barrier_arrive(self.smem.ended.at[0])
        plgpu.barrier_wait(self.smem.ended.at[0])

    @abc.abstractmethod
    def start(self):
        """Report that buffers which this consumer reads are empty at first."""

    @abc.abstractmethod
    def step(self, j, sums) -> Any:
        """Compute one inner tile."""

    @abc.abstractmethod
    def factor(self) -> Any:
        """Return what the sums are multiplied by in the end."""

    def zeros(self, layout):
        """Return the sums of keys that no query sees: a list of arrays, see `pieces`."""
        tile = self.result_tile
        return [
            plgpu.layout_cast(
                jnp.zeros((ROWS, (x.stop - x.start) * tile.shape[-1]), jnp.float32), layout
            )
            for x in pieces(tile)
        ]

    @property
    def result_tile(self):
        """The shared memory through which the sums leave."""
        return self.smem.v if self.number == S else self.smem.k

    def exchanged(self, x):
        """Return x plus what the other CTA of the cluster computed, by the same consumer."""
        n, mine = self.number, self.smem.received.at[self.number]
        plgpu.barrier_wait(self.smem.read.at[n])
        ptx.send_fragments(x, mine, 1 - self.cta.rank)
        self.report(self.smem.sent)
        plgpu.barrier_wait(self.smem.sent.at[n])
        ptx.cluster_fence()
        return x + ptx.take_fragments(mine)

    def report(self, barrier, n=None):
        """Arrive at a barrier of both CTAs, when all threads of this consumer are here."""
        ptx.cluster_fence()
        ptx.meet(OF_CONSUMER[self.number], 128)
        plgpu.barrier_arrive(barrier.at[self.number if n is None else n])

    def score_tile(self, j) -> ScoreTile:
        """Return the tile of scores of step j."""
        _, first_query = self.inner.at(j)
        return ScoreTile(
            *(self.options, self.config, self.cta.h, first_query, self.first_key),
            self.inner.masked(j),
            transposed=True,
        )

    def weights(self, j, scores: ScoreTile, s_t):
        """Return p_t; its signs say what dropout keeps."""
        stage, memory = self.smem.queries.stage(j), self.smem.queries.smem["statistics"]

        def statistic(name):
            return plgpu.load(self.config.statistic(memory, name, stage), layout=ptx.COLUMN)

        return scores.weights(s_t, statistic)

    def accumulate(self, sums, a, tile):
        """Return sums + a @ tile, for a in registers."""
        started = [
            ptx.accumulate(x, a, tile.at[pl.ds(part.start, part.stop - part.start)])
            for x, part in zip(sums, pieces(tile), strict=True)
        ]
        return [ptx.waited(0, x, a) for x in started]

    def add_dq(self, j):
        """Add this consumer's part of dq to device memory, and report that ds_t was read."""
        smem, config, part = self.smem, self.config, self.dq_strips
        if part is None:
            plgpu.barrier_arrive(smem.ds_empty.at[0])
            return
        plgpu.barrier_wait(smem.ds_full.at[0])
        width, count = smem.k.shape[-1], part.stop - part.start
        dq = ptx.product_of_transposed(smem.ds, smem.k.at[pl.ds(part.start, count)])
        dq = ptx.wait(0, dq)
        plgpu.barrier_arrive(smem.ds_empty.at[0])
        _, first_query = self.inner.at(j)
        tile = (self.cta.b * config.num_heads + self.cta.h) * config.dq_tiles
        tile = tile + common.quotient(first_query, ROWS)
        columns = rank_columns(config.head_dim)
        group = (tile * CLUSTER + self.cta.rank) * ptx.groups(columns)
        ptx.add_fragments(dq, self.grads["dq"].at[group + ptx.groups(part.start * width)])

    def store(self, sums):
        """Store the sums as rows, or add them to those of other query heads."""
        name = "dv" if self.number == S else "dk"
        ref, tile, (b, h, kv_tile, rank) = self.grads[name], self.result_tile, self.cta
        strips, _, width = tile.shape
        kv_head = common.quotient(h, self.config.groups)
        for x, part in zip(sums, pieces(tile), strict=True):
            count = part.stop - part.start
            if self.config.adds:
                kv_heads = self.config.num_heads // self.config.groups
                row = ((b * kv_heads + kv_head) * self.config.kv.count + kv_tile) * CLUSTER + rank
                group = row * ptx.groups(strips * width) + ptx.groups(part.start * width)
                ptx.add_fragments(x, ref.at[group])
                continue
            ptx.put_strips(x.astype(self.dtype), tile.at[pl.ds(part.start, count)])
        if self.config.adds:
            return
        plgpu.commit_smem()
        for i in range(strips):
            columns = common.block_of_columns(rank * strips + i, b, width)
            plgpu.copy_smem_to_gmem(
                tile.at[i], ref.at[b, pl.ds(kv_tile * ROWS, ROWS), kv_head, columns]
            )


class ConsumerOfScores(Consumer):
    """Consumer 0: s_t and dv."""

    number = S

    def start(self):
        """Report nothing: consumer 1 reads all that is exchanged."""

    def factor(self):
        """Return what dv is multiplied by."""
        return rescaled(self.options.extras.dropout, 1.0)

    def step(self, j, sums):
        """Compute s_t, dv and half of dq of one inner tile."""
        smem = self.smem
        smem.queries.consumer_wait(j)
        s_t = ptx.product_t(smem.k, self.q_sm.at[smem.queries.stage(j)])
        s_t = self.exchanged(ptx.wait(0, s_t))
        ptx.put_fragments(s_t, smem.received.at[S])
        plgpu.barrier_arrive(smem.s_full.at[0])
        scores = self.score_tile(j)
        p_t = self.weights(j, scores, s_t)
        p_t = scores.dropped(p_t).astype(self.dtype)
        # Threads have read the LSE.
        ptx.fence()
        smem.queries.consumer_release(j)
        smem.cotangents.consumer_wait(j)
        sums = self.accumulate(sums, p_t, self.do_sm.at[smem.cotangents.stage(j)])
        smem.cotangents.consumer_release(j)
        self.add_dq(j)
        return sums


class ConsumerOfGradients(Consumer):
    """Consumer 1: dp_t, ds_t and dk."""

    number = DP

    def start(self):
        """Report that the buffers of exchanged tiles, and of ds_t, are empty at first."""
        for n in (S, DP):
            plgpu.barrier_arrive(self.smem.read.at[n])

    def factor(self):
        """Return what dk is multiplied by."""
        return rescaled(self.options.extras.dropout, self.options.scale)

    def step(self, j, sums):
        """Compute dp_t, ds_t, dk and half of dq of one inner tile."""
        smem = self.smem
        smem.cotangents.consumer_wait(j)
        dp_t = ptx.product_t(smem.v, self.do_sm.at[smem.cotangents.stage(j)])
        dp_t = self.exchanged(ptx.wait(0, dp_t))
        plgpu.barrier_wait(smem.s_full.at[0])
        s_t = ptx.take_fragments(smem.received.at[S])
        # All threads have read both tiles.
        self.report(smem.read, DP)
        plgpu.barrier_arrive(smem.read.at[S])
        smem.queries.consumer_wait(j)
        scores = self.score_tile(j)
        p_t = self.weights(j, scores, s_t)
        delta = smem.cotangents.smem["delta"].at[smem.cotangents.stage(j)]
        delta = plgpu.load(delta, layout=ptx.COLUMN)
        ds_t = scores.gradient(p_t, dp_t, delta).astype(self.dtype)
        # Threads have read delta.
        ptx.fence()
        smem.cotangents.consumer_release(j)
        common.when(j > 0)(lambda: plgpu.barrier_wait(smem.ds_empty.at[0]))
        smem.ds[...] = ds_t
        ptx.fence()
        plgpu.barrier_arrive(smem.ds_full.at[0])
        # p_t, which ds_t is computed from, has needed the LSE.
        sums = self.accumulate(sums, ds_t, self.q_sm.at[smem.queries.stage(j)])
        smem.queries.consumer_release(j)
        self.add_dq(j)
        return sums


def pieces(tile) -> list[slice]:
    """Return the strips of a result's arrays, each with no more columns than a product has."""
    return slices(tile.shape[0], MAX_COLUMNS // tile.shape[-1])


def inner_tiles(config: WideBackwardConfig, operands: Operands, cta: Cta) -> InnerTiles:
    """Return the tiles of queries that a CTA walks over."""
    outer = cta.b, common.quotient(cta.h, config.groups), cta.kv_tile
    return InnerTiles(config, operands.table, outer, config.q)


# ------------------------------------------------------------------------------------------------
# Producer
# ------------------------------------------------------------------------------------------------


def produce(config: WideBackwardConfig, operands: Operands, smem: Smem, cta: Cta):
    """Copy the outer tile and all inner ones: the CTA's columns of them."""
    plgpu.set_max_registers(REGISTERS[1], action="decrease")
    inner = inner_tiles(config, operands, cta)
    kv_head = common.quotient(cta.h, config.groups)

    def copy(source, head, first, tile, full):
        strips, rows, width = tile.shape
        for i in range(strips):
            columns = common.block_of_columns(cta.rank * strips + i, cta.b, width)
            at = cta.b, pl.ds(first, rows), head, columns
            plgpu.copy_gmem_to_smem(source.at[at], tile.at[i], full)

    def step(j):
        _, first_query = inner.at(j)
        rows = pl.ds(first_query, ROWS)
        queries, cotangents = smem.queries, smem.cotangents
        queries.producer_acquire(j)
        stage, full = queries.stage(j), queries.filled(j)
        copy(operands.q, cta.h, first_query, queries.smem["tiles"].at[stage], full)
        for name in config.statistics:
            place = config.statistic(queries.smem["statistics"], name, stage)
            plgpu.copy_gmem_to_smem(getattr(operands, name).at[cta.b, cta.h, rows], place, full)
        cotangents.producer_acquire(j)
        stage, full = cotangents.stage(j), cotangents.filled(j)
        copy(operands.do, cta.h, first_query, cotangents.smem["tiles"].at[stage], full)
        place = cotangents.smem["delta"].at[stage]
        plgpu.copy_gmem_to_smem(operands.delta.at[cta.b, cta.h, rows], place, full)

    def load():
        first_key = cta.kv_tile * ROWS
        copy(operands.k, kv_head, first_key, smem.k, smem.kv_full)
        copy(operands.v, kv_head, first_key, smem.v, smem.kv_full)
        pl.loop(jnp.int32(0), inner.count)(step)

    inner.if_any(load)


# ------------------------------------------------------------------------------------------------
# Launch
# ------------------------------------------------------------------------------------------------


def pallas_flash_backward_wide(
    operands: Operands, added, *outputs, static: WideBackwardConfig, **memory
):
    """Compute the gradients of one K/V tile for a query head; `added` are those added to."""
    config, smem = static, Smem(**memory)
    stored = [] if config.adds else ["dk", "dv"]
    grads = added | dict(zip(stored, outputs, strict=True))
    # Neighbouring CTAs have the heads of a batch element, and the first keys come first: under a
    # causal mask most queries see them.
    b, (kv_tile, h) = common.digits(lax.axis_index("cta"), (config.kv.count, config.num_heads))
    cta, warpgroup = Cta(b, h, kv_tile, lax.axis_index(common.RANK)), lax.axis_index("warpgroup")
    for consumer in (ConsumerOfScores, ConsumerOfGradients):

        @common.when(warpgroup == consumer.number)
        def _(consumer=consumer):
            consumer(config, operands, grads, smem, cta).run()

    @common.when(warpgroup == CONSUMERS)
    def _():
        produce(config, operands, smem, cta)


def backward(
    problem: Problem,
    do,
    log_sum: LogSum,
    delta,
    tile: BackwardTile,
    *,
    zeros,
    center: Any = None,
    row_sums=None,
    want_scale: bool,
) -> dict:
    """Return dq, dk and dv by name; arguments are those of `backward_kernel.backward`.

    Keys are centered already, and keys and rows that nobody sees hold zeros.
    """
    p = problem
    q, kv = Tiling(p.q_len, ROWS), Tiling(p.kv_len, ROWS)
    mask = mask_for(p, q, kv, None)
    operands = Operands.of(p, do, log_sum, delta, None, delta.shape[2])
    weighted_center = None
    if center is not None and row_sums is not None and not want_scale:
        weights = p.scale.astype(jnp.float32) * row_sums
        weights = jnp.pad(weights, ((0, 0), (0, 0), (0, -p.q_len % (2 * ROWS))))
        missing = sum_columns(p.head_dim) - p.head_dim
        weighted_center = weights, jnp.pad(center, ((0, 0), (0, 0), (0, missing)))

    def run(arrays, x):
        operands: Operands = x["operands"]
        scale, extras = arrays
        batch = len(operands.q)
        table = block_ranges.block_table(
            extras.mask, q, kv, "q", batch, p.batch, p.groups, sums_keys=True
        )
        config = WideBackwardConfig.of(
            *(p, mask, arrays, table, q, kv),
            transposed=True,
            num_heads=p.num_heads,
            neighbours=1,
            tile=tile,
            has_lengths=False,
            head_dim=p.head_dim,
            value_dim=p.value_dim,
            adds=p.groups > 1,
        )
        operands = operands.for_launch(config, arrays, table)
        results = _launch(config, p, operands, x["zeros"])
        factor = rescaled(extras.dropout, scale)
        return _rows(config, p, batch, results, factor, x["weighted_center"], want_scale)

    x = dict(operands=operands, zeros=zeros, weighted_center=weighted_center)
    arrays = shared_arrays(dataclasses.replace(p, sinks=None), mask)
    return common.by_instance(run, p.batch)(arrays, x)


def _launch(config: WideBackwardConfig, p: Problem, operands: Operands, zeros) -> dict:
    """Launch the kernel; return the gradients by name, some of them in fragments."""
    batch = len(operands.q)
    added, outputs = dict(dq=zeros.reshape(-1, *ptx.OF_GROUP)), {}
    if config.adds:
        for name, dim in (("dk", p.head_dim), ("dv", p.value_dim)):
            count = math.prod(_fragments(config, p, batch, dim)[:5])
            added[name] = jnp.zeros((count, *ptx.OF_GROUP), jnp.float32)
    else:
        outputs = {name: (x.shape, x.dtype) for name, x in (("dk", operands.k), ("dv", operands.v))}
    results = common.launch(
        pallas_flash_backward_wide,
        (operands,),
        sums=(added,),
        outputs=list(outputs.values()),
        memory=scratch(p, config.tile)._asdict(),
        grid=dict(cta=batch * config.num_heads * config.kv.count),
        cluster_size=CLUSTER,
        warpgroups=CONSUMERS + 1,
        static=config,
        approx_math=config.options.approximate,
        # This file says where threads wait for each other: `ptx.meet`, `ptx.fence`.
        unsafe_no_auto_barriers=True,
    )
    return dict(zip([*sorted(added), *outputs], results, strict=True))


def _rows(
    config: WideBackwardConfig, p: Problem, batch: int, results, factor, weighted_center, want_scale
) -> dict:
    """Return results of `_launch` with rows instead of fragments."""
    one, results = np.ones(1, np.float32), dict(results)
    groups = ptx.groups(sum_columns(p.head_dim))
    shape = batch, p.num_heads, 1, config.dq_tiles, groups, *ptx.OF_GROUP
    dq = results["dq"].reshape(shape)
    if want_scale:
        results["dq"] = ptx.unfold(dq[:, :, 0])[:, : p.q_len, :, : p.head_dim]
    else:
        like = batch, *p.query.shape[1:]
        results["dq"] = postprocess(
            *(dq, factor, like, p.dtype), batch=p.batch, weighted_center=weighted_center
        )
    if config.adds:
        for name, like in (("dk", p.key), ("dv", p.value)):
            shape = _fragments(config, p, batch, like.shape[3])
            like = batch, *like.shape[1:]
            results[name] = postprocess(
                *(results[name].reshape(shape), one, like, p.dtype), batch=p.batch
            )
    return results


def _fragments(config: WideBackwardConfig, p: Problem, batch: int, dim: int) -> tuple[int, ...]:
    """Return the shape of sums of keys in fragments, see `postprocess`."""
    groups = ptx.groups(sum_columns(dim))
    return batch, p.num_kv_heads, 1, config.kv.count, groups, *ptx.OF_GROUP
