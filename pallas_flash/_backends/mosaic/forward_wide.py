"""o and lse for head dims above 256: two consumer warpgroups share a query tile.

Equations are as in forward_kernel.py. Its consumer keeps 64 queries with all columns of their
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

Why so. Two other divisions were weighed, for a block of 64 keys at head dim 512. The matrix
units take at least 2048 cycles. A number is the least of shared memory, at 128 bytes a cycle:

    division of s = q @ k.T                        shared memory        besides
    every second block (this kernel)               2700
    each block by keys, 32 for each warpgroup      3200                 both wait for each softmax
    each block by columns of q and k               3200                 sums exchanged in float32

An operand q of 64 rows is read again for each product, so products of few keys read more of q than
of k. With 64 queries in a CTA keys and values would come from the L2 cache at 64 bytes a cycle,
more than it delivers to all SMs. So two CTAs of neighbouring query tiles share their copies
(`cluster_size` 2), wherever the schedule is static.

Buffers in shared memory (`scratch`). A column block has 64 columns; n(x) of them hold x columns. A
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

from pallas_flash._backends.mosaic import common, ptx, scheduler
from pallas_flash._backends.mosaic.forward_common import (
    Consumer,
    Cta,
    ForwardConfig,
    Inputs,
    RowMax,
    check_fits,
    copy,
    copy_statistics,
    initial_rows,
    launch,
    leave,
    meet_to_skip,
    num_statistics,
    parts_of_output,
    results_of_rows,
    run_cta,
    run_producer_warps,
    softmax,
    valid_length,
    zero_values,
)
from pallas_flash._backends.mosaic.pipeline import Pipeline
from pallas_flash._backends.mosaic.score_mask import ElementOptions
from pallas_flash._jax import hardware
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import ForwardTile

plgpu = common.plgpu

CONSUMERS = 2
# Registers of a consumer's thread and of a producer's.
REGISTERS = 240, 24
# Keys of a block: p of a block is one operand of 64 columns.
BLOCK_KV = 64
WIDE = 256  # Calls with a larger head dim take this kernel.
# Stages of a warpgroup's values.
VALUE_STAGES = 2
# Column blocks of values in a stage, at most: a product of wgmma has up to 256 columns.
MAX_PIECE = 3


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
    def from_value_dim(cls, value_dim: int) -> "ValuePieces":
        """Return the pieces of a head dim."""
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


def scratch(p: Problem, tile: ForwardTile) -> Smem:
    """Return the specification of a CTA's shared memory and barriers."""
    blocks = functools.partial(common.blocks, p.dtype)
    q_sm = blocks(1, rows=ptx.ROWS, columns=p.head_dim)

    def streamed(columns: int, stages: int) -> Pipeline:
        smem = blocks(CONSUMERS * stages, rows=tile.block_kv, columns=columns)
        return Pipeline.spec(
            *(smem, stages),
            copies=smem.shape[1],
            cluster_size=tile.cluster_size,
            pipelines=CONSUMERS,
        )

    weights = dict(
        p=plgpu.SMEM((CONSUMERS, ptx.ROWS, tile.block_kv), p.dtype, transforms=ptx.TILED),
        rows=plgpu.SMEM((CONSUMERS, 3 + p.max_logits, ptx.ROWS), jnp.float32),
    )
    return Smem(
        q=Pipeline.spec(q_sm, 1, copies=q_sm.shape[1], consumers=CONSUMERS),
        k=streamed(ptx.COLUMNS, tile.stages),
        v=streamed(ValuePieces.from_value_dim(p.value_dim).columns, VALUE_STAGES),
        weights=Pipeline.spec(weights, 1, copies=1, pipelines=CONSUMERS),
        o_sm=plgpu.SMEM((CONSUMERS, ptx.ROWS, ptx.COLUMNS), p.dtype, transforms=ptx.BLOCKS),
        statistics_sm=plgpu.SMEM((num_statistics(p), ptx.ROWS), jnp.float32),
        # The consumers, and four warps of the producer.
        work=None if p.mask.known_on_host else scheduler.work_pipeline(CONSUMERS + 4),
        ended=(common.barriers(1, CONSUMERS, tile.cluster_size) if tile.cluster_size > 1 else None),
    )


def serves(p: Problem) -> bool:
    """Return whether a call has heads that are too wide for `forward_kernel`."""
    return max(p.head_dim, p.value_dim) > WIDE


def default_tile(p: Problem) -> ForwardTile:
    """Return the tile of a call, with as many stages of keys as fit.

    Two CTAs share keys and values wherever the schedule is static and both have queries.
    """
    cluster_size = 2 if p.mask.known_on_host and p.q_len > ptx.ROWS else 1
    limit = hardware.shared_memory_limit(common.HOPPER)
    tried = (ForwardTile(CONSUMERS, BLOCK_KV, 1, stages, cluster_size) for stages in (4, 3, 2))
    return next(x for x in tried if common.smem_bytes(scratch(p, x)) <= limit)


def check_tile(tile: ForwardTile, p: Problem) -> None:
    """Raise ValueError if this kernel has no such tile, or if it does not fit on the GPU."""
    wanted, cluster = ForwardTile(CONSUMERS, BLOCK_KV, 1, tile.stages, tile.cluster_size), ""
    # Keys of one query are cut into parts, whose lengths are arrays.
    if p.q_len == 1:
        wanted = dataclasses.replace(wanted, cluster_size=1)
        cluster = ", and no cluster for one query,"
    if tile != wanted:
        raise ValueError(
            f"`config.forward` must have {CONSUMERS} warpgroups, {BLOCK_KV} keys and 1 "
            f"output slot{cluster} at head dims above {WIDE}; got {tile} at head dim "
            f"{max(p.head_dim, p.value_dim)}. Use {wanted}."
        )
    check_fits(tile, p, scratch(p, tile), p.value_dim // CONSUMERS, REGISTERS[0])


class WideConfig(ForwardConfig):
    """The configuration of the kernel: a work tile has one query tile for each CTA of a cluster."""

    @property
    def pieces(self) -> ValuePieces:
        """The pieces of a warpgroup's half of the values."""
        return ValuePieces.from_value_dim(self.value_dim)

    def query_tile(self):
        """Return which of a work tile's query tiles this CTA computes."""
        return 0 if self.tile.cluster_size == 1 else lax.axis_index(common.RANK)

    def work_tiles(self, tiles: scheduler.WorkTiles) -> scheduler.WorkTiles:
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


class WideConsumer(Consumer):
    """A consumer warpgroup at one work tile."""

    @property
    def keys(self) -> Pipeline:
        """Column blocks of the keys of its own blocks."""
        return self.smem.k.pipeline_of_warpgroup(self.warpgroup)

    @property
    def values(self) -> Pipeline:
        """Pieces of its half of the values of all blocks."""
        return self.smem.v.pipeline_of_warpgroup(self.warpgroup)

    @property
    def published(self) -> Pipeline:
        """The weights that it publishes."""
        return self.smem.weights.pipeline_of_warpgroup(self.warpgroup)

    @property
    def received(self) -> Pipeline:
        """The weights that the other warpgroup publishes."""
        return self.smem.weights.pipeline_of_warpgroup(1 - self.warpgroup)

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
        first_key, visited = self.first_key(j), self.visited
        shape = ptx.ROWS, self.config.kv.block
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
            if self.length is not None:
                zero_values(v, self.length - self.first_key(j))
            added.append(ptx.accumulate(ptx.rescale(piece, alpha), p, v))
        # Registers of p are in use until the last product is done.
        done, registers = [], p if isinstance(p, jax.Array) else None
        for n, piece in enumerate(added):
            done.append(ptx.wait(len(acc) - 1 - n, piece, registers))
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
        zeros = jnp.zeros((ptx.ROWS, pieces.columns), jnp.float32)
        acc = (plgpu.layout_cast(zeros, ptx.WGMMA),) * pieces.count
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
                meet_to_skip(self.warpgroup)
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
        smem, large = self.smem, self.config.options.large
        b, h, pieces = self.work_tile.b, self.work_tile.h, self.config.pieces
        statistics, weight = results_of_rows(self.options, h, m, l, large=large)
        rows, staged = pl.ds(self.first_row, ptx.ROWS), smem.o_sm.at[self.warpgroup]
        # The copies of the last work tile must have left shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @common.when(self.warpgroup == 0)
        def _():
            for n, x in enumerate(statistics):
                smem.statistics_sm[n] = x
            plgpu.commit_smem()
            copy_statistics(self.statistic_refs, smem.statistics_sm, b, h, self.first_row)

        first = self.warpgroup * pieces.count * pieces.blocks
        for piece in acc:
            o = piece * common.along_rows(weight, piece.shape)
            parts = parts_of_output(o, staged.dtype, self.o_refs)
            for column in range(0, pieces.columns, ptx.COLUMNS):
                for part, ref in parts:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    staged[...] = ptx.columns(part, column)
                    plgpu.commit_smem()
                    columns = common.block_of_columns(first, b)
                    plgpu.copy_smem_to_gmem(staged, ref.at[b, rows, h, columns])
                first += 1


def consume(cta: Cta, tiles: scheduler.WorkTiles, warpgroup):
    """Run a consumer warpgroup over all work tiles of its CTA."""
    config = cta.config
    cta.smem.q.consumer_start()
    cta.smem.weights.pipeline_of_warpgroup(1 - warpgroup).consumer_start()
    plgpu.set_max_registers(REGISTERS[0], action="increase")

    def compute(i, work_tile, kv_base):
        del i
        consumer = WideConsumer(
            **vars(cta),
            warpgroup=warpgroup,
            work_tile=work_tile,
            first_row=config.query_tiles.first_row(work_tile.index, config.query_tile()),
            options=config.options.element_options(cta.inputs.options, work_tile.b),
            kv_base=kv_base,
            length=valid_length(cta.inputs, work_tile.b),
        )
        consumer.run()
        return kv_base + work_tile.kv_blocks.count

    scheduler.for_each(config.work_tiles(tiles), compute, jnp.int32(0))
    leave(cta.smem.ended)


# ------------------------------------------------------------------------------------------------
# The producer
# ------------------------------------------------------------------------------------------------


class WideProducer(Cta):
    """The producer warpgroup of a CTA; its methods are a warp's bodies for `scheduler.for_each`."""

    def run(self, tiles: scheduler.WorkTiles):
        """Copy all that the consumers of this CTA need: a warp for each stream."""
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        bodies = [
            functools.partial(load, warpgroup)
            for load in (self.load_keys, self.load_values)
            for warpgroup in range(CONSUMERS)
        ]
        first, *others = bodies
        run_producer_warps(tiles, first, *((tiles, body) for body in others))

    def load_keys(self, warpgroup: int, i, work_tile: scheduler.WorkTile, kv_base):
        """Copy the keys of a warpgroup's own blocks; return how many blocks the CTA has had."""
        del i
        pipeline, count = (
            self.smem.k.pipeline_of_warpgroup(warpgroup),
            column_blocks(self.config.head_dim),
        )
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

    def load_values(self, warpgroup: int, i, work_tile: scheduler.WorkTile, kv_base):
        """Copy a warpgroup's half of all values, and warp 2 the queries; return as `load_keys`."""
        del i
        pieces = self.config.pieces
        if warpgroup == 0:
            self.load_queries(work_tile)
        pipeline = self.smem.v.pipeline_of_warpgroup(warpgroup)

        def one(j, _):
            index = work_tile.b, self.rows(work_tile, j), self.kv_head(work_tile)

            def piece(n, i):
                pipeline.producer_acquire(i)
                first_block = (warpgroup * pieces.count + n) * pieces.blocks
                self.copy(self.inputs.v, index, pipeline, i, first_block)
                return i + 1

            start = (kv_base + j) * pieces.count
            lax.fori_loop(jnp.int32(0), jnp.int32(pieces.count), piece, start)

        lax.fori_loop(jnp.int32(0), work_tile.kv_blocks.count, one, None)
        return kv_base + work_tile.kv_blocks.count

    def load_queries(self, work_tile: scheduler.WorkTile):
        """Copy the queries of the CTA."""
        config, pipeline = self.config, self.smem.q
        pipeline.producer_wait(0)
        first_row = config.query_tiles.first_row(work_tile.index, config.query_tile())
        index = work_tile.b, pl.ds(first_row, ptx.ROWS), work_tile.h
        copy(self.inputs.q, index, pipeline.smem_of(0), pipeline.filled(0))

    def rows(self, work_tile: scheduler.WorkTile, j):
        """Return the slice of the keys of the j-th block."""
        block = self.config.kv.block
        return pl.ds(work_tile.kv_blocks.block_at(j, self.inputs.table) * block, block)

    def kv_head(self, work_tile: scheduler.WorkTile):
        """Return the key/value head."""
        return common.quotient(work_tile.h, self.config.groups)

    def copy(self, ref, index, pipeline: Pipeline, i, first_block):
        """Copy column blocks from `first_block` on to the stage of tile i."""
        to, cluster_size = pipeline.smem_of(i), self.config.tile.cluster_size
        copy(ref, index, to, pipeline.filled(i), cluster_size, first_block)


# ------------------------------------------------------------------------------------------------
# The kernel and its launch
# ------------------------------------------------------------------------------------------------


def pallas_flash_forward_wide(inputs: Inputs, dynamic_schedule, *outputs, static, **memory):
    """Compute the work tiles of one CTA; a static schedule is in the inputs."""
    n = static.num_parts
    cta = Cta(inputs, outputs[:n], outputs[n:], Smem(**memory), static)
    run_cta(cta, dynamic_schedule, CONSUMERS, consume, WideProducer)


def forward(problem: Problem, tile: ForwardTile, lengths=None):
    """Return the results of `forward_common.launch`, which takes these arguments."""
    return launch(
        *(pallas_flash_forward_wide, WideConfig, problem, tile, lengths, scratch(problem, tile)),
        # Both consumer warpgroups have the same one.
        query_tiles=1,
        consumers=CONSUMERS,
        unsafe_no_auto_barriers=True,
    )
