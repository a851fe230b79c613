"""o and lse: each query tile stays, and blocks of keys and values stream past it.

    s    = q @ k.T    with options, s and c come from `logits`          [64, block_kv]
    m'   = max(m, c * rowmax(s))    c = scale * log2(e), so base 2      [64] (1)
    p    = exp2(c * s - m')         alpha = exp2(m - m')
    l    = alpha * l + rowsum(p)
    acc  = alpha * acc + dropout(p) @ v                                 [64, V]

    at the end    o = acc / l    lse_log2 = m + log2(l)    with a sink in both, if there is one

(1) m stays as it is while the maximum grows by no more than `THRESHOLD`: p may be up to 2^8 then,
and acc is rescaled less often. `RowMax` has the maximum itself beside it, if a call asks for the
largest scores. Where scores may be large (`Problem.large`), s has its scale already, and m is in
base e (2):

    m'   = max(m, rowmax(s))            as (1), but by THRESHOLD / log2(e)
    p    = exp2((s - m') * log2(e))     alpha = exp2((m - m') * log2(e))

(2) In the end m and log2(l) are saved apart, see `LogSum`.

Roles. The kernel is persistent: a CTA computes work tiles until none is left (`scheduler`), and
there are at most 132 CTAs, one for each SM of an H200. A CTA has w = 2 to 4 *consumer warpgroups*,
each with 64 queries, and one *producer warpgroup*, whose warps start copies (TMA): warp 0 takes
work tiles and copies keys, values and masks; warp 1 + n copies the queries of consumer warpgroup n,
and its tiles of a bias; warp 1 also the queries of a fourth one. All consumer warpgroups of a CTA
share the K/V blocks that stream past; each skips those that its own queries do not see. The
producer hands registers to the consumers (`REGISTERS`).

Buffers in shared memory (`scratch`); a column block has 64 columns, H and V are head dims.

    buffer        shape                                       holds
    q             [w, ceil(H / 64), 64, 64]                   queries; also o, if o_sm is None
    k, v          [stages, ceil(H or V / 64), block_kv, 64]   blocks of keys, of values
    o_sm          [w, output_slots, 64, 64]                   column blocks of o on their way out
    statistics_sm [w, 1 to 3, 64]                             lse, or m and log2(l); max logits
    bias          [w * its stages, strips, 64, columns]       tiles of the bias for query tiles
    bits          [arrays, 4, block_kv / 32, 64 w]            tiles of mask arrays, a bit for a pair
    work          [4, DYNAMIC_COLUMNS]                        rows of a dynamic schedule

Barriers. Each buffer that is filled again and again is a `Pipeline` with a full and an empty
barrier for each stage. Arrivals are counted in Pallas's unit: a copy, a warp or a warpgroup is one.
An `mbarrier` of PTX counts 128 for each: all threads of a warpgroup arrive once, a warp's four
times, also for a copy of that warp. Only k.empty, v.empty and ended count otherwise in a
cluster: there each CTA's barrier has one arrival for a warpgroup, each by a thread of its own.

    barrier       number         arrivals            who arrives            who waits
    q.full        w              column blocks       copies of its warp     consumer n
    q.empty       w              1                   consumer n             its producer warp
    k.full        stages         column blocks       copies of warp 0       all consumers
    k.empty       stages         w; cluster: 2 w     all consumers          producer warp 0
    v.full        stages         column blocks       copies of warp 0       all consumers
    v.empty       stages         w; cluster: 2 w     all consumers          producer warp 0
    bias.full     w * its stages strips              copies of warp 1 + n   consumer n
    bias.empty    w * its stages 1                   consumer n             producer warp 1 + n
    bits.full     4              arrays              copies of warp 0       all consumers
    bits.empty    4              w                   all consumers          producer warp 0
    work.full     4              1                   copy of warp 0         the readers (3)
    work.empty    4              1 for each reader   these readers          producer warp 0
    ended         1, if cluster  2 w, of both CTAs   all consumers          all consumers
    SKIPPED       named, 5 + n   128 threads         warps of consumer n    the same; if cluster

(3) The consumers, the producer warps that copy queries, and warp 0, which reads the work tiles that
it copied. They are 2 w + 1, and 8 where w is 4.

A thread that waits at a barrier knows its phase by one bit. So it waits for every phase, also for
phases of K/V blocks that its queries do not see (`skip`): after a wait that it left out, the phase
that is over would answer its next wait.

o_sm, statistics_sm and q as output have no barrier: a consumer waits until the TMA stores that it
has started itself have read, before it writes there again or releases q.

Pallas does the rest: a copy tells its full barrier how many bytes to expect, one elected thread
starts it, and waits keep the phase bits.

Overlap. A consumer warpgroup starts s = q @ k.T of block j before p @ v of block j - 1. It computes
the softmax of block j while the matrix units still work on the latter. Time runs to the right, `|`
is a wait:

    producer       copy k(j+1) ...................     copy v(j+1) .....................
                   into the stage that k(j-1) left     into the stage that v(j-1) left
    matrix units   q k(j) ...... p(j-1) v(j-1) ........      q k(j+1) ... p(j) v(j) ......
    consumer       |             max, exp2, sum: p(j)  | acc *= alpha  |  max, exp2, sum: p(j+1)
                   q k(j) is done                      p(j-1) v(j-1) is done

The warpgroups do not take turns at the matrix units (no ping-pong): they drift apart to other
places of the same step by themselves. In prototypes turns gained in some calls and lost in others.

Clusters. Two CTAs of neighbouring query tiles may share K/V blocks (`cluster_size` 2): each
copies one half of a block's rows, by its cluster rank, to the shared memory of both (TMA
multicast). So the L2 cache delivers keys and values half as often. At k.full and v.full of a CTA
only its own copies arrive, but they expect the bytes of the whole block: the other half comes
from the peer. A stage is empty when the consumers of both have released it. A consumer arrives
at `ended` after it has waited for all blocks, so the copies of both producers have landed by then.

Biases and masks. A bias over queries and keys is copied to shared memory, where there is room. A
warpgroup reads its tile while q @ k.T of a full block runs; in a partial block it does so
afterwards, because what it reads of the mask ahead of the product takes the registers. A tile is
copied only for blocks that its warpgroup visits. Mask arrays are copied as bits, beside the keys
that they mask. Arrays that find no room, or that TMA cannot copy (broadcast axes, unaligned rows),
are read in device memory, ahead of the product.

Lengths. Values behind a valid length may be NaN. The first block that a warpgroup visits is the
one in which the valid keys end, or lies before it. There the warpgroup stores zeros to v behind
them, before its own product. Others that visit the block store the same zeros.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common, ptx, scheduler
from pallas_flash._backends.mosaic.forward_common import (
    Consumer,
    Cta,
    ForwardConfig,
    Inputs,
    check_fits,
    copy,
    copy_keys_and_values,
    copy_statistics,
    initial_state,
    kv_pipelines,
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
from pallas_flash._backends.mosaic.operands import stored_dtype
from pallas_flash._backends.mosaic.pairs import has_pairs
from pallas_flash._backends.mosaic.pipeline import Pipeline
from pallas_flash._backends.mosaic.score_mask import ElementOptions
from pallas_flash._problem.paged import AnyProblem
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import ForwardTile

plgpu = common.plgpu

# Registers of a consumer's thread and of a producer's, by the number of consumer warpgroups: all
# together at most as many as the CTA is launched with.
REGISTERS = {2: (240, 24), 3: (160, 32), 4: (112, 24)}

# Warps of a producer warpgroup that copy queries; one more copies keys and values.
WARPS_FOR_QUERIES = 3

MASK_STAGES = 4


# ------------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------------


class Smem(NamedTuple):
    """Shared memory and barriers: specifications outside of the kernel, references inside.

    None stands for what a call does not need. JAX lays memory out in the order of names.
    """

    q: Pipeline
    k: Pipeline
    v: Pipeline
    o_sm: Any
    statistics_sm: Any
    bias: Pipeline | None
    bits: Pipeline | None
    work: Pipeline | None
    ended: Any


def scratch(p: AnyProblem, tile: ForwardTile) -> Smem:
    """Return the specification of a CTA's shared memory and barriers.

    Tiles of masks and of a bias are in it where there is room beside all else.
    """
    w, slots, cluster = tile.warpgroups, tile.output_slots, tile.cluster_size
    blocks = functools.partial(common.blocks, p.dtype, w, rows=ptx.ROWS)
    q_sm = blocks(columns=p.head_dim)
    k, v = kv_pipelines(p, tile, consumers=w, cluster_size=cluster)
    smem = Smem(
        q=Pipeline.spec(q_sm, 1, copies=q_sm.shape[1], pipelines=w),
        k=k,
        v=v,
        o_sm=blocks(columns=slots * ptx.COLUMNS) if slots else None,
        statistics_sm=plgpu.SMEM((w, num_statistics(p), ptx.ROWS), jnp.float32),
        bias=None,
        bits=None,
        work=None if p.mask.known_on_host else work_pipeline(w),
        ended=common.barriers(1, w, cluster) if cluster > 1 else None,
    )
    smem = smem._replace(bits=common.first_that_fits(smem, _mask_pipelines(p, tile)))
    return smem._replace(bias=common.first_that_fits(smem, _bias_pipelines(p, tile)))


def work_pipeline(consumers: int) -> Pipeline:
    """Return the pipeline of work tiles: for consumers, warps for their queries, and warp 0."""
    return scheduler.work_pipeline(consumers + min(consumers, WARPS_FOR_QUERIES) + 1)


def _mask_pipelines(p: AnyProblem, tile: ForwardTile):
    """Yield pipelines for tiles of mask arrays, as bits."""
    arrays = sum(map(has_pairs, p.mask.leaves))
    # A tile is whole words, and copied for one CTA.
    if arrays and tile.block_kv % ptx.BITS == 0 and tile.cluster_size == 1:
        rows = tile.warpgroups * ptx.ROWS
        smem = plgpu.SMEM((arrays, MASK_STAGES, tile.block_kv // ptx.BITS, rows), jnp.uint32)
        yield Pipeline.spec(smem, MASK_STAGES, copies=arrays, consumers=tile.warpgroups)


def _bias_pipelines(p: AnyProblem, tile: ForwardTile):
    """Yield pipelines for tiles of the bias: with as many stages as keys have, or fewer."""
    if p.bias is None or 1 in p.bias.shape[2:]:
        return
    # A warp that waits for one consumer's tiles keeps another one from its own.
    if tile.warpgroups > WARPS_FOR_QUERIES:
        return
    dtype = jnp.dtype(stored_dtype(p.bias.dtype))
    # Copies take rows of a multiple of 16 bytes.
    if dtype.itemsize == 1 or p.kv_len * dtype.itemsize % 16:
        return
    for stages in range(tile.stages, 0, -1):
        count = tile.warpgroups * stages
        smem = common.strips(dtype, count, rows=ptx.ROWS, columns=tile.block_kv)
        copies = smem.shape[1]
        yield Pipeline.spec(smem, stages, copies=copies, pipelines=tile.warpgroups)


class NarrowConfig(ForwardConfig):
    """The configuration of the kernel, known at compile time."""

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer's thread and of a producer's."""
        return REGISTERS[self.tile.warpgroups]

    def first_row(self, work_tile, query_tile):
        """Return the first query of one of a work tile's query tiles."""
        return self.query_tiles.first_row(work_tile.index, query_tile)

    def query_tile(self, warpgroup, i):
        """Return which of the i-th work tile's query tiles a warpgroup computes.

        Each warpgroup has all of them in turn, because under a causal mask the last one sees most,
        and in a last work tile it may not exist.
        """
        query_tile = common.remainder(i + warpgroup, self.tile.warpgroups)
        if self.tile.cluster_size == 1:
            return query_tile
        return query_tile + self.tile.warpgroups * lax.axis_index(common.RANK)

    def work_tiles(self, warpgroup, tiles: scheduler.WorkTiles) -> scheduler.WorkTiles:
        """Return the work tiles with the blocks that a warpgroup visits."""
        return tiles._replace(query_tile=lambda i: self.query_tile(warpgroup, i))


# ------------------------------------------------------------------------------------------------
# Consumers
# ------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A K/V block that a warpgroup visits.

    Attributes:
        place: its place in the stream.
        first_key: its first key.
        partial: whether the mask is applied: in partial blocks, and in the first one visited.
        at: its head, or each row's, and the positions of queries and of keys; [64, block_kv].
        options: with what was read of the block ahead of the product.
    """

    place: Any
    first_key: Any
    partial: bool
    at: Any
    options: ElementOptions


@dataclasses.dataclass(frozen=True)
class ForwardConsumer(Consumer):
    """A consumer warpgroup at one work tile.

    The state of its loop is acc, p, m and l: p belongs to the last block, and its product with v
    has not been started.

    Attributes:
        query_tile: which of the work tile's query tiles this one is.
        bias_base: tiles of the bias that this warpgroup had before.
    """

    query_tile: Any
    bias_base: Any

    @property
    def queries(self) -> Pipeline:
        """Its queries."""
        return self.smem.q.pipeline_of_warpgroup(self.warpgroup)

    def run(self):
        """Compute and store the output of the query tile."""
        visited, blocks = self.visited, self.work_tile.kv_blocks
        config = self.config
        max_logits = config.options.max_logits
        state = initial_state(config.value_dim, large=config.options.large, max_logits=max_logits)
        self.queries.consumer_wait(0)
        lax.fori_loop(jnp.int32(0), visited.start, self.skip, None)
        # A query tile may see no key at all.
        some = visited.start < visited.stop
        acc, m, l = common.cond(some, self.mainloop, self.no_blocks, *state)
        lax.fori_loop(visited.stop, blocks.count, self.skip, None)
        self.epilogue(acc, m, l)

    # ---------------------------------------------------------------------------------- one block

    def block(self, j, *, partial: bool) -> Block:
        """Return the j-th block of the stream, and start its reads of device memory."""
        first_key, shape = self.first_key(j), (ptx.ROWS, self.config.kv.block)
        at = self.heads_and_positions(shape, first_key)
        options = self.options.read_ahead(*at, masked=partial)
        return Block(j, first_key, partial, at, options)

    def heads_and_positions(self, shape, first_key):
        """Return the head, or each row's, and the positions of queries and of keys."""
        return self.work_tile.h, *common.positions(shape, self.first_row, first_key)

    def start_qk(self, j):
        """Start s = q @ k.T of the j-th block."""
        self.smem.k.consumer_wait(self.kv_base + j)
        k = self.smem.k.smem_of(self.kv_base + j)
        # Rows may have two axes there.
        q = self.queries.smem_of(0)
        q = q.reshape(q.shape[0], ptx.ROWS, ptx.COLUMNS)
        return ptx.product_t(q, k, self.config.head_dim)

    def wait_qk(self, block: Block, s, *, running: int):
        """Return the block with its bias, and s when at most `running` products still run."""
        if not block.partial:
            block = self.with_bias(block)
        self.wait_mask(block.place)
        s = ptx.wait(running, s)
        self.smem.k.consumer_release(self.kv_base + block.place)
        # Earlier, there are no registers for a bias beside what the mask reads.
        return self.with_bias(block) if block.partial else block, s

    def softmax(self, block: Block, s, m, l):
        """Return p after dropout, in the dtype of the operands, and m, l and alpha."""
        config, options = self.config, block.options
        s, c = options.logits(s, *block.at, masked=block.partial)
        if block.partial:
            s = options.hide(s, *block.at, bits=self.read_mask(block.place))
        p, m, l, alpha = softmax(s, c, m, l, large=config.options.large)
        if options.extras.dropout is not None:
            kept = options.kept(s.shape, self.work_tile.h, self.first_row, block.first_key)
            p = ptx.where(kept, p, 0.0)
        return p.astype(self.smem.k.smem.dtype), m, l, alpha

    def start_pv(self, j, acc, p):
        """Start acc + p @ v of the j-th block, with values in shared memory."""
        return ptx.accumulate(acc, p, self.smem.v.smem_of(self.kv_base + j))

    def wait_pv(self, j, acc, p):
        """Return acc when the j-th block has been added, and release its values.

        In a cluster, for each CTA one thread arrives for the warpgroup: p @ v is one operation of
        its four warps.
        """
        acc = ptx.wait(0, acc, p)
        self.smem.v.consumer_release(self.kv_base + j)
        return acc

    def step(self, j, state, *, partial: bool):
        """Compute p of the j-th block while p @ v of the block before runs."""
        acc, p, m, l = state
        block, s = self.block(j, partial=partial), self.start_qk(j)
        acc = self.start_pv(j - 1, acc, p)
        block, s = self.wait_qk(block, s, running=1)
        p_next, m, l, alpha = self.softmax(block, s, m, l)
        # This zero depends on l. So the compiler must leave the softmax before the waits for values
        # and for p @ v; it would wait first, and nothing would overlap. v(j) is waited for before
        # v(j - 1) is released, so there must be two stages.
        self.smem.v.consumer_wait(self.kv_base + j, after=ptx.uniform_zero(l))
        self.release_mask(j, l)
        acc = self.wait_pv(j - 1, acc, p)
        return ptx.rescale(acc, alpha), p_next, m, l

    # -------------------------------------------------------------------------------- all of them

    def mainloop(self, acc, m, l):
        """Visit the blocks: partial ones, full ones, and partial ones again."""
        visited, masked = self.visited, self.config.masked
        block, s = self.block(visited.start, partial=masked), self.start_qk(visited.start)
        block, s = self.wait_qk(block, s, running=0)
        p, m, l, _ = self.softmax(block, s, m, l)
        self.smem.v.consumer_wait(self.kv_base + visited.start)
        self.clean_values(visited.start)
        self.release_mask(visited.start, l)
        acc, p, m, l = self.steps((acc, p, m, l), visited._replace(start=visited.start + 1))
        if self.smem.o_sm is not None:
            self.queries.consumer_release(0)
        last = visited.stop - 1
        self.clean_tail(last)
        return self.wait_pv(last, self.start_pv(last, acc, p), p), m, l

    def steps(self, state, visited: scheduler.VisitedBlocks):
        """Run `step` over all these blocks."""
        partial, full = (functools.partial(self.step, partial=x) for x in (True, False))

        def partial_then_full(state, start, full_start, stop):
            full_start = jnp.maximum(full_start, start)
            state = lax.fori_loop(start, full_start, partial, state)
            return lax.fori_loop(full_start, stop, full, state)

        def turn(n, state):
            """In turn 0 the partial and the full blocks, in turn 1 the partial tail."""
            tail = n > 0
            start = jnp.maximum(jnp.where(tail, visited.tail, visited.start), visited.start)
            full_start = jnp.where(tail, visited.stop, visited.full)
            return partial_then_full(
                state, start, full_start, jnp.where(tail, visited.stop, visited.tail)
            )

        if not self.config.masked:
            return lax.fori_loop(visited.start, visited.stop, full, state)
        if not self.config.partial_tail:
            return partial_then_full(state, visited.start, visited.full, visited.stop)
        # One loop around both, because a third loop would be a third copy of the code.
        turns = 1 + (visited.tail < visited.stop).astype(jnp.int32)
        return lax.fori_loop(jnp.int32(0), turns, turn, state)

    def clean_values(self, j):
        """Replace values of the first block, the j-th, behind a valid length by zeros."""
        if self.length is not None:
            v = self.smem.v.smem_of(self.kv_base + j)
            zero_values(v, self.length - self.first_key(j))

    def clean_tail(self, j):
        """Replace values of the last block, the j-th, before the first visible key by zeros.

        Nothing is to be done here: only behind a valid length values may be NaN.
        """

    def no_blocks(self, *state):
        """Take the place of `mainloop` for a query tile that sees no key."""
        if self.smem.o_sm is not None:
            self.queries.consumer_release(0)
        return state

    def skip(self, j, _):
        """Wait for a block that this query tile does not see, and release it."""
        for pipeline in (self.smem.k, self.smem.v):
            pipeline.consumer_wait(self.kv_base + j)
            if self.config.tile.cluster_size > 1:
                meet_to_skip(self.warpgroup)
            pipeline.consumer_release(self.kv_base + j)
        self.wait_mask(j)
        self.release_mask(j)

    # ---------------------------------------------------------------------------- bias and masks

    def with_bias(self, block: Block) -> Block:
        """Return the block with its tile of the bias, if tiles of it are copied."""
        if self.smem.bias is None:
            return block
        pipeline = self.smem.bias.pipeline_of_warpgroup(self.warpgroup)
        i = self.bias_base - self.visited.start + block.place
        pipeline.consumer_wait(i)
        bias = ptx.load_strips(pipeline.smem_of(i))
        ptx.fence()
        pipeline.consumer_release(i)
        return block._replace(options=block.options.with_bias(bias))

    def wait_mask(self, j):
        """Wait for the tiles of mask arrays of the j-th block, if they are copied."""
        if self.smem.bits is not None:
            self.smem.bits.consumer_wait(self.kv_base + j)

    def read_mask(self, j):
        """Return bools of the j-th block for each mask array that is copied."""
        if self.smem.bits is None:
            return ()
        stage, first_row = self.smem.bits.stage(self.kv_base + j), self.query_tile * ptx.ROWS
        return self.config.streams.masks.read(self.smem.bits.smem, stage, first_row)

    def release_mask(self, j, l=None):
        """Release the tiles of mask arrays; after l was computed, which has used them.

        The arrival depends on l, so that it needs no `ptx.fence`.
        """
        if self.smem.bits is not None:
            after = 0 if l is None else ptx.uniform_zero(l)
            self.smem.bits.consumer_release(self.kv_base + j, after)

    # ------------------------------------------------------------------------------------ the end

    def epilogue(self, acc, m, l):
        """Store the output and the statistics through shared memory."""
        config, smem = self.config, self.smem
        b, h, first_row = self.work_tile.b, self.work_tile.h, self.first_row
        statistics, weight = results_of_rows(self.options, h, m, l, large=config.options.large)
        o = acc * common.along_rows(weight, acc.shape)
        parts = parts_of_output(o, smem.k.smem.dtype, self.o_refs)
        rows = pl.ds(first_row, ptx.ROWS)
        # The copies of the last work tile must have left shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # `commit_smem` below makes the statistics visible to their copies, too.
        for n, x in enumerate(statistics):
            smem.statistics_sm[self.warpgroup, n] = x
        column_blocks = range(-(-config.value_dim // ptx.COLUMNS))
        staging, slots = self.queries.smem_of(0), len(column_blocks)
        if smem.o_sm is not None:
            staging, slots = smem.o_sm.at[self.warpgroup], config.tile.output_slots
        for i, ((part, ref), n) in enumerate(itertools.product(parts, column_blocks)):
            if i >= slots:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged = staging.at[i % slots]
            staged[...] = ptx.columns(part, n * ptx.COLUMNS)
            plgpu.commit_smem()
            columns = common.block_of_columns(n, b)
            plgpu.copy_smem_to_gmem(staged, ref.at[b, rows, h, columns])
        statistics_sm = smem.statistics_sm.at[self.warpgroup]
        copy_statistics(self.statistic_refs, statistics_sm, b, h, first_row)
        if smem.o_sm is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.queries.consumer_release(0)


def consume(cta: Cta, tiles: scheduler.WorkTiles, warpgroup, kind=ForwardConsumer):
    """Run a consumer warpgroup, of a class, over all work tiles of its CTA."""
    config = cta.config
    cta.smem.q.pipeline_of_warpgroup(warpgroup).consumer_start()
    plgpu.set_max_registers(config.registers[0], action="increase")

    def compute(i, work_tile, bases):
        kv_base, bias_base = bases
        query_tile = config.query_tile(warpgroup, i)
        consumer = kind(
            **vars(cta),
            warpgroup=warpgroup,
            work_tile=work_tile,
            query_tile=query_tile,
            first_row=config.first_row(work_tile, query_tile),
            options=config.options.element_options(cta.inputs.options, work_tile.b),
            kv_base=kv_base,
            length=valid_length(cta.inputs, work_tile.b),
            bias_base=bias_base,
        )
        consumer.run()
        visited = consumer.visited
        return kv_base + work_tile.kv_blocks.count, bias_base + visited.stop - visited.start

    bases = jnp.int32(0), jnp.int32(0)
    scheduler.for_each(config.work_tiles(warpgroup, tiles), compute, bases)
    leave(cta.smem.ended)


# ------------------------------------------------------------------------------------------------
# The producer
# ------------------------------------------------------------------------------------------------


class ForwardProducer(Cta):
    """The producer warpgroup of a CTA; its methods are a warp's bodies for `scheduler.for_each`."""

    def run(self, tiles: scheduler.WorkTiles):
        """Copy all that the consumers of this CTA need."""
        config = self.config
        plgpu.set_max_registers(config.registers[1], action="decrease")

        def warp(n):
            def load(i, work_tile, bias_base):
                for w in range(n, config.tile.warpgroups, WARPS_FOR_QUERIES):
                    bias_base = self.load_queries(w, i, work_tile, bias_base)
                return bias_base

            return tiles if config.streams.bias is None else config.work_tiles(n, tiles), load

        warps = map(warp, range(min(config.tile.warpgroups, WARPS_FOR_QUERIES)))
        run_producer_warps(tiles, self.load_keys_and_values, *warps)

    def load_keys_and_values(self, i, work_tile: scheduler.WorkTile, kv_base):
        """Copy the K/V blocks of a work tile; return how many the CTA has had."""
        del i
        config, smem, blocks = self.config, self.smem, work_tile.kv_blocks

        def load_masks(i, first_key):
            if smem.bits is None:
                return
            smem.bits.producer_acquire(i)
            place = first_key, work_tile.index * config.q.block
            to, b, h = (smem.bits.smem, smem.bits.stage(i)), work_tile.b, work_tile.h
            full = smem.bits.filled(i)
            config.streams.masks.copy(self.inputs.streamed.bits, *to, b, h, *place, full)

        b, rows_of = self.keys_of(work_tile)
        copy_keys_and_values(
            self.inputs,
            smem.k,
            smem.v,
            stream=(blocks.count, lambda j: blocks.block_at(j, self.inputs.table)),
            where=(b, common.quotient(work_tile.h, config.groups)),
            base=kv_base,
            cluster_size=config.tile.cluster_size,
            beside=load_masks,
            rows_of=rows_of,
        )
        return kv_base + blocks.count

    def keys_of(self, work_tile) -> tuple[Any, Any]:
        """Return where keys are on the first axis, and `rows_of` of `copy_keys_and_values`."""
        return work_tile.b, None

    def queries_of(self, work_tile, first_row) -> tuple:
        """Return where the queries of a query tile are."""
        return work_tile.b, pl.ds(first_row, ptx.ROWS), work_tile.h

    def load_queries(self, w: int, i, work_tile: scheduler.WorkTile, bias_base):
        """Copy the queries of consumer warpgroup w, and its tiles of the bias."""
        config, pipeline = self.config, self.smem.q.pipeline_of_warpgroup(w)
        pipeline.producer_wait(0)
        first_row = config.first_row(work_tile, config.query_tile(w, i))
        at = self.queries_of(work_tile, first_row)
        copy(self.inputs.q, at, pipeline.smem_of(0), pipeline.filled(0))
        if config.streams.bias is None:
            return bias_base
        return self.load_bias(w, first_row, work_tile, bias_base)

    def load_bias(self, w: int, first_row, work_tile: scheduler.WorkTile, bias_base):
        """Copy the tiles of the bias that consumer warpgroup w visits; return how many it has had.

        Args:
            w: the warpgroup.
            first_row: its first query.
            work_tile: the work tile.
            bias_base: tiles that it had before.
        """
        bias, axes, visited = self.smem.bias, self.config.streams.bias, work_tile.visited
        assert bias is not None and axes is not None and visited is not None
        pipeline = bias.pipeline_of_warpgroup(w)
        _, strips, rows, width = pipeline.smem.shape

        def one(j, i):
            first = work_tile.kv_blocks.block_at(j, self.inputs.table) * (strips * width)
            pipeline.producer_acquire(i)
            for n in range(strips):
                at = (
                    *axes.index_of(work_tile.b, work_tile.h),
                    pl.ds(first_row, rows),
                    pl.ds(first + n * width, width),
                )
                to = pipeline.smem_of(i).at[n]
                plgpu.copy_gmem_to_smem(self.inputs.streamed.bias.at[at], to, pipeline.filled(i))
            return i + 1

        return lax.fori_loop(visited.start, visited.stop, one, bias_base)


# ------------------------------------------------------------------------------------------------
# The kernel and its launch
# ------------------------------------------------------------------------------------------------


def pallas_flash_forward(inputs: Inputs, dynamic_schedule, *outputs, static, **memory):
    """Compute the work tiles of one CTA; a static schedule is in the inputs."""
    n = static.num_parts
    cta = Cta(inputs, outputs[:n], outputs[n:], Smem(**memory), static)
    run_cta(cta, dynamic_schedule, static.tile.warpgroups, consume, ForwardProducer)


def forward(problem: Problem, tile: ForwardTile, lengths=None):
    """Return the results of `forward_common.launch`, which takes these arguments."""
    smem, w = scratch(problem, tile), tile.warpgroups
    return launch(
        *(pallas_flash_forward, NarrowConfig, problem, tile, lengths, smem),
        query_tiles=w,
        consumers=w,
        copied=dict(bias=smem.bias is not None, masks=smem.bits is not None),
    )


def check_tile(tile: ForwardTile, p: Problem) -> None:
    """Raise ValueError if a tile does not fit on the GPU."""
    registers, _ = REGISTERS[tile.warpgroups]
    check_fits(tile, p, scratch(p, tile), p.value_dim, registers)
    if not tile.output_slots and p.value_dim > p.head_dim:
        raise ValueError(
            "`config.forward` must have `output_slots` where values are wider than queries; "
            f"got {tile} and head dims of {p.head_dim} and {p.value_dim} (of values). Use 1."
        )
