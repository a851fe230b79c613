"""o and lse for head dims above 256: two consumer warpgroups share a query tile.

Equations are those of forward_kernel.py. Its consumer keeps 64 queries with all columns of their
output in registers. With 512 columns these are 256 registers of a thread, which has 240. So here
both consumer warpgroups of a CTA have the same 64 queries, and divide the work of a block twice:

    scores     warpgroup w computes p of every second K/V block: s = q @ k.T, softmax
    output     warpgroup w has one half of the columns, of v too: acc = alpha * acc + p @ v

A warpgroup needs p of all blocks, and publishes p of its own ones in shared memory. The maximum m
and the sum l of the softmax go with p from block to block, from one warpgroup to the other. A step
of a warpgroup is one of its own blocks, j, and the one before, whose p the other has published:

    s                     = q @ k(j).T
    m, l, alpha(j - 1)    of block j - 1                    as soon as they are published
    p(j), m, l, alpha(j)  = softmax(s, m, l)                published
    acc                   = alpha(j - 1) * acc + p(j - 1) @ v(j - 1)    p from shared memory
    acc                   = alpha(j) * acc + p(j) @ v(j)                p from registers

A warpgroup waits for its products at once. The matrix units are busy nevertheless: one warpgroup
computes a softmax while products of the other run. The wait for block j - 1 keeps them half a step
apart.

Why so. Two other divisions were weighed, for a block of 64 keys at head dim 512. Minimum cycles are
those of the matrix units (2048) and of shared memory, at 128 bytes a cycle:

    division of s = q @ k.T                        shared memory        besides
    every second block (this kernel)               2700
    each block by keys, 32 for each warpgroup      3200                 both wait for each softmax
    each block by columns of q and k               3200                 sums exchanged in float32

An operand q of 64 rows is read again for each product, so products of few keys read more of q than
of k. With 64 queries in a CTA keys and values would come from the L2 cache at 64 bytes a cycle,
more than it delivers to all SMs. So two CTAs of neighbouring query tiles share their copies
(`cluster_size` 2), wherever the schedule is static.

Buffers in shared memory (`scratch`). A column block has 64 columns; n(x) are those of x columns. A
warpgroup's half of v are n(V) / 2 column blocks, rounded up, in pieces of up to three.

    buffer        shape                                       holds
    q             [1, n(H), 64, 64]                           queries of the CTA
    k             [2 * stages, 1, block_kv, 64]               column blocks of keys, by warpgroup
    v             [2 * stages, piece, block_kv, 64]           pieces of values, by warpgroup
    weights p     [2, 64, block_kv]                           p of the last block of a warpgroup
    weights rows  [2, 3 or 4, 64]                             its m, max logits, l and alpha
    o_sm          [2, 64, 64]                                 column blocks of o on their way out
    statistics_sm [1 to 3, 64]                                lse, or m and log2(l); max logits
    work          [4, DYNAMIC_COLUMNS]                        rows of a dynamic schedule

Barriers, as in forward_kernel.py; each warpgroup w has pipelines of its own for k, v and weights.

    barrier       number       arrivals          who arrives          who waits
    q.full        1            n(H)              copies of warp 2     both consumers
    q.empty       1            2                 both consumers       producer warp 2
    k.full        2 * stages   1                 copy of warp w       consumer w
    k.empty       2 * stages   1; cluster: 2     consumer w           producer warp w
    v.full        2 * stages   piece             copies of warp 2 + w consumer w
    v.empty       2 * stages   1; cluster: 2     consumer w           producer warp 2 + w
    weights.full  2            1                 consumer w           the other consumer
    weights.empty 2            1                 the other consumer   consumer w
    work.full     4            1                 copy of warp 0       the 6 readers
    work.empty    4            6                 consumers and warps  producer warp 0
    ended         1, if cluster  2 of both CTAs  all consumers        all consumers

Which blocks are a warpgroup's own is counted over all blocks that stream past the CTA, so that its
keys come in the same stages in both CTAs of a cluster. Biases and mask arrays are read in device
memory. A mask is applied in a branch of the step, not in a second loop: the loop is long.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._blocks import Tiling
from pallas_flash._dropout import rescaled
from pallas_flash._mosaic import block_ranges, common, ptx, scheduler, work_loop
from pallas_flash._mosaic.forward_common import (
    RowMax,
    copy,
    finish,
    from_last_block_or,
    initial_rows,
    last_block,
    log_sum_of,
    num_statistics,
    run_producer_warps,
    softmax,
)
from pallas_flash._mosaic.pipeline import Pipeline
from pallas_flash._mosaic.scheduler import QUERY_ROWS
from pallas_flash._mosaic.score_mask import ElementOptions, Options, left_out, shared_arrays
from pallas_flash._problem import Problem
from pallas_flash._tiling.sizes import ForwardTile

plgpu = common.plgpu

CONSUMERS = 2
# Registers of a consumer's thread and of a producer's.
REGISTERS = 240, 24
# Keys of a block: p of a block is one operand of 64 columns.
BLOCK_KV = 64
# Stages of a warpgroup's values.
VALUE_STAGES = 2
# Column blocks of values in a stage, at most: a product of wgmma has up to 256 columns.
MAX_PIECE = 3
# Named barriers, one for each consumer warpgroup of a CTA in a cluster: see `skip`.
SKIPPED = (5, 6)


# ------------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------------


def column_blocks(columns: int) -> int:
    """Return the number of column blocks of a tile."""
    return -(-columns // ptx.COLUMNS)


@dataclasses.dataclass(frozen=True)
class ValuePieces:
    """How a warpgroup's half of the columns of v is cut: `count` pieces of `blocks` column blocks.

    The halves of both together may be wider than v; copies fill what does not exist with zeros.
    """

    count: int
    blocks: int

    @classmethod
    def of(cls, value_dim: int) -> "ValuePieces":
        """Return those of a head dim."""
        half = -(-column_blocks(value_dim) // CONSUMERS)
        count = next(n for n in range(1, half + 1) if half % n == 0 and half // n <= MAX_PIECE)
        return cls(count, half // count)

    @property
    def columns(self) -> int:
        """Columns of a piece."""
        return self.blocks * ptx.COLUMNS


class Smem(NamedTuple):
    """Shared memory and barriers: specifications outside of the kernel, references inside.

    None stands for what a call does not need.
    """

    q: Pipeline
    k: Pipeline
    v: Pipeline
    weights: Pipeline
    o_sm: Any
    statistics_sm: Any
    work: Pipeline | None
    ended: Any


def scratch(p: Problem, tile: ForwardTile, *, dynamic: bool | None = None) -> Smem:
    """Return the specification of a CTA's shared memory and barriers.

    Args:
        p: the call.
        tile: block sizes.
        dynamic: whether the schedule is; by default, whether the mask has arrays or a predicate.
    """
    if dynamic is None:
        dynamic = bool(jax.tree.leaves(p.mask)) or p.mask.scattered
    blocks = functools.partial(common.blocks, p.dtype)
    q_sm = blocks(1, rows=QUERY_ROWS, columns=p.head_dim)

    def streamed(columns: int, stages: int) -> Pipeline:
        smem = blocks(CONSUMERS * stages, rows=tile.block_kv, columns=columns)
        return Pipeline.spec(
            *(smem, stages),
            copies=smem.shape[1],
            cluster_size=tile.cluster_size,
            pipelines=CONSUMERS,
        )

    weights = dict(
        p=plgpu.SMEM((CONSUMERS, QUERY_ROWS, tile.block_kv), p.dtype, transforms=ptx.TILED),
        rows=plgpu.SMEM((CONSUMERS, 3 + p.max_logits, QUERY_ROWS), jnp.float32),
    )
    return Smem(
        q=Pipeline.spec(q_sm, 1, copies=q_sm.shape[1], consumers=CONSUMERS),
        k=streamed(ptx.COLUMNS, tile.stages),
        v=streamed(ValuePieces.of(p.value_dim).columns, VALUE_STAGES),
        weights=Pipeline.spec(weights, 1, copies=1, pipelines=CONSUMERS),
        o_sm=plgpu.SMEM((CONSUMERS, QUERY_ROWS, ptx.COLUMNS), p.dtype, transforms=ptx.BLOCKS),
        statistics_sm=plgpu.SMEM((num_statistics(p), QUERY_ROWS), jnp.float32),
        # The consumers, and four warps of the producer.
        work=work_loop.pipeline(dynamic, CONSUMERS + 4),
        ended=(common.barriers(1, CONSUMERS, tile.cluster_size) if tile.cluster_size > 1 else None),
    )


class Inputs(NamedTuple):
    """The operands of the kernel: arrays outside, references inside.

    Attributes:
        q: [B, T, N, H].
        k: [B, S, K, H].
        v: [B, S, K, V].
        table: `block_table` with all rows on one axis, if it holds lists; else None.
        options: the arrays of `Options.operands`.
        lengths: int32 [B], valid lengths of keys, and `last_block` of the values; or None.
        schedule: a static schedule, or None.
    """

    q: Any
    k: Any
    v: Any
    table: Any
    options: Any
    lengths: Any
    schedule: Any


@dataclasses.dataclass(frozen=True)
class WideConfig(common.KernelConfig):
    """The configuration of the kernel, known at compile time.

    Attributes:
        head_dim: head dim of queries and keys.
        value_dim: head dim of values.
        query_tiles: which query tiles make up a work tile: one for each CTA of a cluster.
    """

    head_dim: int
    value_dim: int
    query_tiles: scheduler.QueryTiles

    @property
    def pieces(self) -> ValuePieces:
        """The pieces of a warpgroup's half of the values."""
        return ValuePieces.of(self.value_dim)

    def query_tile(self):
        """Return which of a work tile's query tiles this CTA computes."""
        return 0 if self.tile.cluster_size == 1 else lax.axis_index(common.RANK)

    def with_visits(self, tiles: work_loop.WorkTiles) -> work_loop.WorkTiles:
        """Return the work tiles with the blocks that this CTA visits."""
        return tiles._replace(query_tile=lambda i: self.query_tile())


def first_own(base, place, warpgroup):
    """Return the first place from `place` on whose block is a warpgroup's own."""
    return place + ((base + place + warpgroup) & 1)


# ------------------------------------------------------------------------------------------------
# Consumers
# ------------------------------------------------------------------------------------------------


class Softmax(NamedTuple):
    """The state of the softmax after a block, float32 [64] each.

    Attributes:
        m: the `RowMax`.
        l: the sum.
        alpha: the factor of acc before the block is added.
    """

    m: RowMax
    l: Any
    alpha: Any


class Block(NamedTuple):
    """A K/V block whose scores a warpgroup computes.

    Attributes:
        first_key: its first key.
        partial: whether the mask must be applied.
        positions: of queries and of keys, int32 [64, block_kv].
        options: with what was read of the block ahead of the product.
    """

    first_key: Any
    partial: Any
    positions: Any
    options: ElementOptions


@dataclasses.dataclass(frozen=True)
class ConsumerWarpgroup:
    """A consumer warpgroup at one work tile.

    Attributes:
        inputs: operands in device memory.
        o_ref: the output.
        statistic_refs: the statistics of `LogSum`.
        smem: shared memory and barriers.
        config: what is known at compile time.
        warpgroup: its number in the CTA.
        work_tile: the work tile.
        first_row: the first query.
        options: the options of its batch element.
        kv_base: K/V blocks that the CTA had before this work tile.
    """

    inputs: Inputs
    o_ref: Any
    statistic_refs: Any
    smem: Smem
    config: WideConfig
    warpgroup: Any
    work_tile: work_loop.WorkTile
    first_row: Any
    options: ElementOptions
    kv_base: Any

    @property
    def visited(self) -> block_ranges.VisitedBlocks:
        """The places of the stream that the CTA visits."""
        assert self.work_tile.visited is not None
        return self.work_tile.visited

    @property
    def keys(self) -> Pipeline:
        """Column blocks of the keys of its own blocks."""
        return self.smem.k.of_warpgroup(self.warpgroup)

    @property
    def values(self) -> Pipeline:
        """Pieces of its half of the values of all blocks."""
        return self.smem.v.of_warpgroup(self.warpgroup)

    @property
    def published(self) -> Pipeline:
        """The weights that it publishes."""
        return self.smem.weights.of_warpgroup(self.warpgroup)

    @property
    def received(self) -> Pipeline:
        """The weights that the other warpgroup publishes."""
        return self.smem.weights.of_warpgroup(1 - self.warpgroup)

    def run(self):
        """Compute the output of the query tile, and store the warpgroup's half of its columns."""
        visited, blocks = self.visited, self.work_tile.kv_blocks
        self.smem.q.consumer_wait(0)
        self.skip(jnp.int32(0), visited.start)
        state = self.mainloop()
        self.smem.q.consumer_release(0)
        acc, m, l = self.last_block(*state)
        self.skip(visited.stop, blocks.count)
        self.epilogue(acc, m, l)

    # ---------------------------------------------------------------------------------- one block

    def scores(self, j):
        """Return q @ k.T of the j-th block, an own one, and release its keys."""
        q, count = self.smem.q.smem_of(0), column_blocks(self.config.head_dim)
        s, first = None, common.quotient(self.kv_base + j, 2) * count
        # The compiler is not to keep the places of all column blocks over the loop.
        start = ptx.anew(jnp.int32(0))
        for n in range(count):
            self.keys.consumer_wait(first + n)
            inner = min(ptx.COLUMNS, self.config.head_dim - n * ptx.COLUMNS)
            k = self.keys.smem_of(first + n)
            s = ptx.product_t(q.at[pl.ds(start + n, 1)], k, inner, s)
            if n:
                plgpu.wgmma_wait(1)
                self.keys.consumer_release(first + n - 1)
        s = ptx.wait(0, s)
        self.keys.consumer_release(first + count - 1)
        return s

    def block(self, j) -> Block:
        """Return the j-th block; what must be read of a bias in device memory is, from here."""
        first_key = self.work_tile.kv_blocks.at(j, self.inputs.table) * self.config.kv.block
        shape, visited = (QUERY_ROWS, self.config.kv.block), self.visited
        positions = common.positions(shape, self.first_row, first_key)
        options = self.options.read_ahead(self.work_tile.h, *positions, masked=False)
        partial = (j < visited.full) | (j >= visited.tail)
        return Block(first_key, partial, positions, options)

    def weights(self, block: Block, s, before: Softmax):
        """Return p of a block after dropout, in the dtype of the operands, and `Softmax`."""
        config, options, h = self.config, block.options, self.work_tile.h
        s, c = options.logits(s, h, *block.positions, masked=config.masked)
        if config.masked:
            hidden = functools.partial(self.hidden, block)
            s = common.cond(block.partial, hidden, lambda s: s, s)
        p, m, l, alpha = softmax(s, c, before.m, before.l, large=options.options.large)
        if options.extras.dropout is not None:
            kept = options.kept(s.shape, h, self.first_row, block.first_key)
            p = ptx.where(kept, p, 0.0)
        return p.astype(self.smem.o_sm.dtype), Softmax(m, l, alpha)

    def hidden(self, block: Block, s):
        """Return the scores of a partial block, -inf where the mask does not allow them."""
        return block.options.hide(s, self.work_tile.h, *block.positions)

    def publish(self, p, after: Softmax):
        """Hand p of an own block and the state of the softmax to the other warpgroup."""
        pipeline, mine = self.published, self.published.stage(0)
        pipeline.producer_wait(0)
        pipeline.smem["p"].at[mine][...] = p
        for n, x in enumerate(jax.tree.leaves(after)):
            pipeline.smem["rows"][mine, n] = x
        ptx.fence()
        plgpu.barrier_arrive(pipeline.filled(0))

    def receive(self) -> Softmax:
        """Return the state of the softmax that the other warpgroup publishes."""
        pipeline = self.received
        pipeline.consumer_wait(0)
        rows = pipeline.smem["rows"].at[pipeline.stage(0)]
        count = 3 + self.config.options.max_logits
        m, *exact, l, alpha = (plgpu.load(rows.at[n], layout=ptx.ROW) for n in range(count))
        return Softmax(RowMax(m, *exact), l, alpha)

    def add(self, j, acc, alpha, p):
        """Return alpha * acc + p @ v of the j-th block, and release its values.

        `acc` is a tuple of an array for each piece; p is in registers or in shared memory.
        """
        first, added = (self.kv_base + j) * len(acc), []
        for n, piece in enumerate(acc):
            self.values.consumer_wait(first + n)
            v = self.values.smem_of(first + n)
            added.append(ptx.accumulate(ptx.rescale(piece, alpha), p, v))
        # Registers of p are in use until the last product is done.
        done, registers = [], p if isinstance(p, jax.Array) else None
        for n, piece in enumerate(added):
            done.append(ptx.waited(len(acc) - 1 - n, piece, registers))
            self.values.consumer_release(first + n)
        return tuple(done)

    def add_received(self, j, acc, alpha):
        """Return acc with the j-th block, whose p the other warpgroup has published."""
        pipeline = self.received
        acc = self.add(j, acc, alpha, pipeline.smem["p"].at[pipeline.stage(0)])
        pipeline.consumer_release(0)
        return acc

    def step(self, t, state, *, first):
        """Compute p of an own block; add the block before, if there is one, and the own one."""
        acc, m, l = state
        j = first + 2 * t
        block, s = self.block(j), self.scores(j)
        one = Softmax(m, l, plgpu.layout_cast(jnp.ones_like(l), ptx.ROW))
        follows = j > self.visited.start
        before = common.cond(follows, lambda _: self.receive(), lambda x: x, one)
        p, after = self.weights(block, s, before)
        self.publish(p, after)
        acc = common.cond(
            follows,
            lambda acc, alpha: self.add_received(j - 1, acc, alpha),
            lambda acc, _: acc,
            *(acc, before.alpha),
        )
        return self.add(j, acc, after.alpha, p), after.m, after.l

    # -------------------------------------------------------------------------------- all of them

    def mainloop(self):
        """Return acc, m and l after the last of the warpgroup's own blocks."""
        config, visited = self.config, self.visited
        large, max_logits = config.options.large, config.options.max_logits
        m, l = initial_rows(large=large, max_logits=max_logits)
        pieces = config.pieces
        zeros = jnp.zeros((QUERY_ROWS, pieces.columns), jnp.float32)
        acc = (plgpu.layout_cast(zeros, ptx.ACC),) * pieces.count
        first = first_own(self.kv_base, visited.start, self.warpgroup)
        steps = common.quotient(jnp.maximum(visited.stop - first, 0) + 1, 2)
        step = functools.partial(self.step, first=first)
        return lax.fori_loop(jnp.int32(0), steps, step, (acc, m, l))

    def last_block(self, acc, m, l):
        """Return acc, m and l with the last visited block, if it is the other warpgroup's."""
        visited = self.visited
        last = visited.stop - 1
        others = first_own(self.kv_base, last, self.warpgroup) != last

        def received(acc, m, l):
            del m, l
            state = self.receive()
            return self.add_received(last, acc, state.alpha), state.m, state.l

        some = (visited.start < visited.stop) & others
        return common.cond(some, received, lambda *state: state, acc, m, l)

    def skip(self, start, stop):
        """Wait for the blocks at these places, which the queries do not see, and release them."""
        count, pieces = column_blocks(self.config.head_dim), self.config.pieces.count

        def skip(pipeline, i):
            pipeline.consumer_wait(i)
            if self.config.tile.cluster_size > 1:
                # One thread arrives at the barriers of a cluster: all warps must have waited.
                for n, barrier in enumerate(SKIPPED):
                    meet = functools.partial(ptx.meet, barrier, 128)
                    common.when(self.warpgroup == n)(meet)
            pipeline.consumer_release(i)

        def block(j, _):
            i = self.kv_base + j

            @common.when((i & 1) == self.warpgroup)
            def _():
                first = common.quotient(i, 2) * count
                lax.fori_loop(first, first + count, lambda n, _: skip(self.keys, n), None)

            lax.fori_loop(i * pieces, (i + 1) * pieces, lambda n, _: skip(self.values, n), None)

        lax.fori_loop(start, stop, block, None)

    # ------------------------------------------------------------------------------------ the end

    def epilogue(self, acc, m, l):
        """Store the warpgroup's columns of the output, and one warpgroup the statistics."""
        options, smem = self.options, self.smem
        b, h, pieces = self.work_tile.b, self.work_tile.h, self.config.pieces
        sinks, dropout = options.extras.sinks, options.extras.dropout
        sink = None if sinks is None else sinks[h]
        shift, large = left_out(options.extras.scores), options.options.large
        statistics, weight = finish(m.shifted(shift) if shift else m, l, sink, large=large)
        rows, staged = pl.ds(self.first_row, QUERY_ROWS), smem.o_sm.at[self.warpgroup]
        # The copies of the last work tile must have left shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @common.when(self.warpgroup == 0)
        def _():
            for n, x in enumerate(statistics):
                smem.statistics_sm[n] = x
            plgpu.commit_smem()
            # Copies of one axis do not end with the array, as those of tiles do.
            for n, ref in enumerate(self.statistic_refs):
                source = smem.statistics_sm.at[n]
                start = functools.partial(plgpu.copy_smem_to_gmem, source, ref.at[b, h, rows])
                common.when(self.first_row < ref.shape[2])(start)

        first = self.warpgroup * pieces.count * pieces.blocks
        for piece in acc:
            piece = plgpu.layout_cast(piece, ptx.WGMMA)
            o = piece * common.along_rows(rescaled(dropout, weight), piece.shape)
            o = o.astype(staged.dtype)
            for column in range(0, pieces.columns, ptx.COLUMNS):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                staged[...] = ptx.columns(o, column)
                plgpu.commit_smem()
                columns = common.block_of_columns(first, b)
                plgpu.copy_smem_to_gmem(staged, self.o_ref.at[b, rows, h, columns])
                first += 1


def consume(inputs, o_ref, statistic_refs, smem: Smem, tiles, warpgroup, config: WideConfig):
    """Run a consumer warpgroup over all work tiles of its CTA."""
    # At first the buffers of queries and of p are empty: so who fills them waits without a branch.
    smem.q.consumer_release(0)
    smem.weights.of_warpgroup(1 - warpgroup).consumer_release(0)
    plgpu.set_max_registers(REGISTERS[0], action="increase")

    def compute(i, work_tile, kv_base):
        del i
        consumer = ConsumerWarpgroup(
            inputs=inputs,
            o_ref=o_ref,
            statistic_refs=statistic_refs,
            smem=smem,
            config=config,
            warpgroup=warpgroup,
            work_tile=work_tile,
            first_row=config.query_tiles.first_row(work_tile.index, config.query_tile()),
            options=config.options.of_element(inputs.options, work_tile.b),
            kv_base=kv_base,
        )
        consumer.run()
        return kv_base + work_tile.kv_blocks.count

    work_loop.for_each(config.with_visits(tiles), compute, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if smem.ended is not None:
        # A CTA must not exit while its peer may still arrive at its barriers.
        plgpu.barrier_arrive(smem.ended.at[0])
        plgpu.barrier_wait(smem.ended.at[0])


# ------------------------------------------------------------------------------------------------
# The producer
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ProducerWarpgroup:
    """The producer warpgroup; its methods are bodies for `work_loop.for_each`, of one warp each.

    Attributes:
        inputs: operands in device memory.
        smem: shared memory and barriers.
        config: what is known at compile time.
    """

    inputs: Inputs
    smem: Smem
    config: WideConfig

    def run(self, tiles: work_loop.WorkTiles):
        """Copy all that the consumers of this CTA need: a warp for each stream."""
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        bodies = [
            functools.partial(load, warpgroup)
            for load in (self.load_keys, self.load_values)
            for warpgroup in range(CONSUMERS)
        ]
        first, *others = bodies
        run_producer_warps(tiles, first, *((tiles, body) for body in others))

    def load_keys(self, warpgroup: int, i, work_tile: work_loop.WorkTile, kv_base):
        """Copy the keys of a warpgroup's own blocks; return how many blocks the CTA has had."""
        del i
        pipeline, count = self.smem.k.of_warpgroup(warpgroup), column_blocks(self.config.head_dim)
        first = first_own(kv_base, jnp.int32(0), warpgroup)

        def block(t, _):
            j = first + 2 * t
            rows = self.rows(work_tile, j)

            def columns(n, i):
                pipeline.producer_acquire(i)
                index = work_tile.b, rows, self.kv_head(work_tile)
                self.copy(self.inputs.k, index, pipeline, i, n)
                return i + 1

            start = common.quotient(kv_base + j, 2) * count
            lax.fori_loop(jnp.int32(0), jnp.int32(count), columns, start)

        blocks = work_tile.kv_blocks.count
        steps = common.quotient(jnp.maximum(blocks - first, 0) + 1, 2)
        lax.fori_loop(jnp.int32(0), steps, block, None)
        return kv_base + blocks

    def load_values(self, warpgroup: int, i, work_tile: work_loop.WorkTile, kv_base):
        """Copy a warpgroup's half of all values, and warp 2 the queries; return as `load_keys`."""
        del i
        config, inputs, pieces = self.config, self.inputs, self.config.pieces
        if warpgroup == 0:
            self.load_queries(work_tile)
        pipeline = self.smem.v.of_warpgroup(warpgroup)
        lengths, last_v_ref = inputs.lengths or (None, None)
        length = None if lengths is None else plgpu.load(lengths.at[work_tile.b])
        block = config.kv.block

        def one(j, _):
            first_key = work_tile.kv_blocks.at(j, inputs.table) * block

            def piece(n, i):
                pipeline.producer_acquire(i)

                def start(ref, first):
                    index = work_tile.b, pl.ds(first, block), self.kv_head(work_tile)
                    first_block = (warpgroup * pieces.count + n) * pieces.blocks
                    self.copy(ref, index, pipeline, i, first_block)

                if length is None:
                    start(inputs.v, first_key)
                else:
                    from_last_block_or(inputs.v, last_v_ref, start, first_key, length, block)
                return i + 1

            start = (kv_base + j) * pieces.count
            lax.fori_loop(jnp.int32(0), jnp.int32(pieces.count), piece, start)

        lax.fori_loop(jnp.int32(0), work_tile.kv_blocks.count, one, None)
        return kv_base + work_tile.kv_blocks.count

    def load_queries(self, work_tile: work_loop.WorkTile):
        """Copy the queries of the CTA."""
        config, pipeline = self.config, self.smem.q
        pipeline.producer_wait(0)
        first_row = config.query_tiles.first_row(work_tile.index, config.query_tile())
        index = work_tile.b, pl.ds(first_row, QUERY_ROWS), work_tile.h
        copy(self.inputs.q, index, pipeline.smem_of(0), pipeline.filled(0))

    def rows(self, work_tile: work_loop.WorkTile, j):
        """Return the slice of the keys of the j-th block."""
        block = self.config.kv.block
        return pl.ds(work_tile.kv_blocks.at(j, self.inputs.table) * block, block)

    def kv_head(self, work_tile: work_loop.WorkTile):
        """Return the key/value head."""
        return common.quotient(work_tile.h, self.config.groups)

    def copy(self, ref, index, pipeline: Pipeline, i, first_block):
        """Copy column blocks from `first_block` on to the stage of tile i."""
        to, cluster_size = pipeline.smem_of(i), self.config.tile.cluster_size
        copy(ref, index, to, pipeline.filled(i), cluster_size, first_block)


# ------------------------------------------------------------------------------------------------
# The kernel and its launch
# ------------------------------------------------------------------------------------------------


def pallas_flash_forward_wide(
    inputs: Inputs, counted, o_ref, *statistic_refs, static: WideConfig, **memory
):
    """Compute the work tiles of one CTA; `counted` is a dynamic schedule, or None."""
    smem, config = Smem(**memory), static
    schedule = inputs.schedule if counted is None else counted
    tiles = work_loop.WorkTiles(schedule, lax.axis_index("cta"), smem.work)
    warpgroup = lax.axis_index("warpgroup")
    consumes = warpgroup < CONSUMERS

    @common.when(consumes)
    def _():
        consume(inputs, o_ref, statistic_refs, smem, tiles, warpgroup, config)

    @common.when(jnp.logical_not(consumes))
    def _():
        ProducerWarpgroup(inputs, smem, config).run(tiles)


def forward(problem: Problem, tile: ForwardTile, lengths=None):
    """Return the output [B, T, N, V] and a `LogSum` of float32 [B, N, T].

    Args:
        problem: the call; values that no query sees are finite, if `lengths` is None.
        tile: block sizes.
        lengths: int32 [B], how many of the first keys of each batch element are visible.
    """
    p, cluster_size = problem, tile.cluster_size
    q = Tiling(p.q_len, cluster_size * QUERY_ROWS)
    rows, kv = Tiling(p.q_len, QUERY_ROWS), Tiling(p.kv_len, tile.block_kv)
    mask = p.mask.within(kv=kv)

    def run(shared, query, key, value, *lengths):
        batch = len(query)
        # A CTA has one query tile, as if it had one warpgroup.
        query_tiles = scheduler.QueryTiles.of(p, batch, 1, cluster_size)
        table, blocks = block_ranges.streams(shared[1].mask, query_tiles, q, rows, kv, batch, p)
        schedule = scheduler.schedule(p, batch, mask, blocks, cluster_size)
        dynamic = scheduler.is_dynamic(schedule)
        options = Options.of(p, shared, q, kv)
        config = WideConfig(
            options=options,
            masked=bool(mask),
            scattered=mask.scattered,
            kv=kv,
            groups=p.groups,
            tile=tile,
            head_dim=p.head_dim,
            value_dim=p.value_dim,
            query_tiles=query_tiles,
        )
        inputs = Inputs(
            q=query,
            k=key,
            v=value,
            table=table.reshape(-1, table.shape[-1]) if mask.scattered else None,
            options=options.operands(shared),
            lengths=(lengths[0], last_block(value, lengths[0], kv.block)) if lengths else None,
            schedule=None if dynamic else schedule,
        )
        statistic = batch, p.num_heads, rows.count * QUERY_ROWS
        results = common.launch(
            pallas_flash_forward_wide,
            (inputs,),
            # A dynamic schedule has a counter.
            sums=(schedule if dynamic else None,),
            outputs=[
                ((*query.shape[:3], p.value_dim), p.dtype),
                *[(statistic, jnp.float32)] * num_statistics(p),
            ],
            memory=scratch(p, tile, dynamic=dynamic)._asdict(),
            grid=dict(cta=scheduler.num_ctas(schedule)),
            cluster_size=cluster_size,
            warpgroups=CONSUMERS + 1,
            static=config,
            approx_math=options.approximate,
            unsafe_no_auto_barriers=True,
        )
        return results[1:] if dynamic else results

    run = common.by_instance(run, p.batch)
    arrays = p.query, p.key, p.value, *([] if lengths is None else [lengths])
    o, *statistics = run(shared_arrays(p, mask), *arrays)
    return o, log_sum_of([x[:, :, : p.q_len] for x in statistics], large=p.large)
