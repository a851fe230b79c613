"""Parts of the kernels of the forward: online softmax, ends of a work tile, copies, launch.

Equations are in forward_kernel.py. The maximum m moves only when it would grow by more than
THRESHOLD. That is exact: acc, l and the LSE share the shift, whatever it is, and p is at most
2^THRESHOLD.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common, ptx, scheduler
from pallas_flash._backends.mosaic.pairs import Streams
from pallas_flash._backends.mosaic.pipeline import Pipeline
from pallas_flash._backends.mosaic.scheduler import Schedule
from pallas_flash._backends.mosaic.score_mask import (
    ElementOptions,
    Options,
    left_out,
    shared_arrays,
)
from pallas_flash._problem import invariance
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.dropout import rescaled
from pallas_flash._problem.paged import AnyProblem
from pallas_flash._problem.problem import Problem, SplitOutput
from pallas_flash._problem.scores import LN2, LOG2E, LogSum, with_sink

plgpu = common.plgpu

THRESHOLD = 8.0  # In base 2.
# Less than every score, and finite, because -inf - -inf would be NaN.
LOWEST = -3e38

NOT_COPIED = dict(bias=False, masks=False)

# Named barriers, one for each consumer warpgroup of a CTA in a cluster: see `meet_to_skip`.
SKIPPED = (ptx.FREE_BARRIER, ptx.FREE_BARRIER + 1)


# ------------------------------------------------------------------------------------------------
# Softmax
# ------------------------------------------------------------------------------------------------


class RowMax(NamedTuple):
    """The maximum of each row, in base 2, or in base e if scores may be large.

    Attributes:
        m: what weights are relative to: the maximum, or up to THRESHOLD less.
        exact: the maximum; None unless the call asks for the largest scores.
    """

    m: Any
    exact: Any = None

    def shifted(self, shift: float) -> "RowMax":
        """Return the maximum of scores that are larger by `shift`."""
        return jax.tree.map(lambda x: x + shift, self)


def initial_rows(*, large: bool, max_logits: bool):
    """Return the `RowMax` and l before the first K/V block."""
    m = jnp.full((ptx.ROWS,), -jnp.inf if large else LOWEST, jnp.float32)
    l = jnp.zeros((ptx.ROWS,), jnp.float32)
    exact = jnp.full((ptx.ROWS,), -jnp.inf, jnp.float32) if max_logits else None
    return jax.tree.map(lambda x: plgpu.layout_cast(x, ptx.ROW), (RowMax(m, exact), l))


def initial_state(value_dim: int, **rows):
    """Return acc, the `RowMax` and l before the first K/V block; `rows` are for `initial_rows`."""
    acc = plgpu.layout_cast(jnp.zeros((ptx.ROWS, value_dim), jnp.float32), ptx.WGMMA)
    return acc, *initial_rows(**rows)


def softmax(s, c, row_max: RowMax, l, *, large: bool):
    """Return p, float32, the new maximum and l, and alpha, for scores s that c takes to base 2."""
    m, exact = row_max
    highest = jnp.max(s, axis=1) if large else jnp.max(s, axis=1) * c
    grown = jnp.maximum(m, highest)
    exact = None if exact is None else jnp.maximum(exact, highest)
    if large:
        m_new = jnp.where(grown - m > THRESHOLD / LOG2E, grown, m)
        # A row without visible keys so far: -inf - -inf would be NaN, -inf - 0 gives weight 0.
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        alpha = jnp.exp2((m - m_safe) * LOG2E)
        # Scores are rounded before m is subtracted, so that the weight of a score m is exactly 1.
        p = jnp.exp2(ptx.difference(s, common.along_rows(m_safe, s.shape)) * LOG2E)
    else:
        m_new = jnp.where(grown - m > THRESHOLD, grown, m)
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s * c - common.along_rows(m_new, s.shape))
    return p, RowMax(m_new, exact), alpha * l + jnp.sum(p, axis=1), alpha


def finish(row_max: RowMax, l, sink, *, large: bool):
    """Return the arrays of `LogSum`, and the factor of the sums of weighted values."""
    m, exact = row_max
    has_keys = l > 0.0
    l, factor = jnp.where(has_keys, l, 1.0), 1.0
    if large or sink is not None:
        m = jnp.where(has_keys, m, 0.0)
    if sink is not None and large:
        m, l, factor = with_sink(m, l, sink)
    elif sink is not None:
        m, l, factor = with_sink(m, l, sink * LOG2E, jnp.exp2)
    l_log2 = jnp.log2(l) if large else m + jnp.log2(l)
    l_log2 = jnp.where(has_keys, l_log2, -jnp.inf)
    statistics = [m, l_log2] if large else [l_log2]
    if exact is not None:
        statistics.append(exact if large else exact * LN2)
    return statistics, factor / l


def log_sum_of(statistics, *, large: bool) -> LogSum:
    """Return the `LogSum` of the arrays of `finish`."""
    m, (l_log2, *max_logits) = (statistics[0], statistics[1:]) if large else (None, statistics)
    return LogSum(m, l_log2, *max_logits)


def num_statistics(p: AnyProblem) -> int:
    """Return how many arrays `finish` returns."""
    return 1 + p.large + p.max_logits


# ------------------------------------------------------------------------------------------------
# The ends of a work tile and of a CTA
# ------------------------------------------------------------------------------------------------


def results_of_rows(options: ElementOptions, h, m: RowMax, l, *, large: bool):
    """Return the arrays of `LogSum`, and the factor of acc, dropout's too."""
    sinks, shift = options.extras.sinks, left_out(options.extras.scores)
    m = m.shifted(shift) if shift else m
    sink = None if sinks is None else sinks[h]
    if sink is not None and sink.ndim:  # A row's own, in each column of a tile.
        sink = jnp.max(sink, axis=1)
    statistics, weight = finish(m, l, sink, large=large)
    return statistics, rescaled(options.extras.dropout, weight)


def parts_of_output(o, dtype, refs) -> list:
    """Return pairs of what a float32 output stores in a dtype and of its reference.

    `refs` belong to the output and, if it is split, to its low part, see `SplitOutput`.
    """
    high = o.astype(dtype)
    low = [(o - high.astype(jnp.float32)).astype(dtype) for _ in refs[1:]]
    return list(zip([high, *low], refs, strict=True))


def copy_statistics(refs, statistics_sm, b, h, first_row):
    """Start the copies of a query tile's statistics to device memory."""
    rows = pl.ds(first_row, ptx.ROWS)
    # Copies of one axis do not end with the array, as copies of tiles do.
    for n, ref in enumerate(refs):
        source = statistics_sm.at[n]
        start = functools.partial(plgpu.copy_smem_to_gmem, source, ref.at[b, h, rows])
        common.when(first_row < ref.shape[2])(start)


def meet_to_skip(warpgroup):
    """Wait for all warps of a consumer warpgroup in a cluster, before it releases what it skips.

    For each CTA one thread of the warpgroup arrives: all warps must have waited.
    """
    for n, barrier in enumerate(SKIPPED):
        common.when(warpgroup == n)(functools.partial(ptx.meet, barrier, 128))


def leave(ended):
    """End a consumer warpgroup: wait for its copies, and at `ended` for the other CTA, if any."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if ended is not None:
        # A CTA must not exit while its peer may still arrive at its barriers.
        plgpu.barrier_arrive(ended.at[0])
        plgpu.barrier_wait(ended.at[0])


# ------------------------------------------------------------------------------------------------
# Values that no query sees
# ------------------------------------------------------------------------------------------------


def zero_values(v, stop, start=None):
    """Store zeros in the rows of a tile of values from `stop` on.

    NaN may stand there, and 0 * NaN is NaN. Each warpgroup that needs the zeros stores them.

    Args:
        v: reference to column blocks of a K/V block in shared memory.
        stop: the row after the last one that is kept, an int32 of any size.
        start: the first row that is kept, an int32 of any size; None is 0.
    """
    some = stop < v.shape[1]

    @common.when(some if start is None else some | (start > 0))
    def _():
        for n in range(v.shape[0]):
            ptx.zero_rows(v.at[n], stop)
            if start is not None:
                ptx.zero_rows(v.at[n], jnp.int32(0), start)
        plgpu.commit_smem()


# ------------------------------------------------------------------------------------------------
# The producer's copies
# ------------------------------------------------------------------------------------------------


def kv_pipelines(p: AnyProblem, tile, units: int = 1, **shared) -> tuple[Pipeline, Pipeline]:
    """Return the specifications of the pipelines of keys and of values.

    `shared` are arguments of `Pipeline.spec` beside the copies, of which 64 columns have `units`.
    """

    def pipeline(columns: int) -> Pipeline:
        smem = common.blocks(p.dtype, tile.stages, rows=tile.block_kv, columns=columns)
        return Pipeline.spec(smem, tile.stages, copies=units * smem.shape[1], **shared)

    return pipeline(p.head_dim), pipeline(p.value_dim)


# Registers of a thread that ptxas wants beside the sums of the output.
OF_PTXAS = 30


def at_launch(warpgroups: int) -> int:
    """Return the registers of each thread at the launch, by the number of consumer warpgroups.

    A CTA may have 64 Ki, and a thread has a multiple of 8.
    """
    return 2**16 // (128 * (warpgroups + 1)) // 8 * 8


def check_fits(tile, p: Problem, memory, columns: int, registers: int) -> None:
    """Raise ValueError unless a tile fits on the GPU.

    Args:
        tile: the tile.
        p: the call.
        memory: the specification of the shared memory.
        columns: columns of the output that a consumer warpgroup sums.
        registers: registers of its threads.
    """
    # Sums, scores, and in 16 bits the weights of the block before.
    taken = columns // 2 + tile.block_kv // 2 + tile.block_kv // 4
    common.check_fits("forward", tile, p, memory, taken, registers)
    if columns // 2 + OF_PTXAS > at_launch(tile.warpgroups):
        raise ValueError(
            "`config.forward` must have fewer warpgroups, whose threads have more registers, for "
            f"outputs of {columns} columns; got {tile}. Use 2."
        )
    if tile.cluster_size > 1 and not p.mask.known_on_host:
        raise ValueError(
            "`config.forward` must have `cluster_size=1` where arrays or a predicate say which "
            f"keys are seen; got {tile}. Use 1."
        )
    keys = invariance.block_kv(max(p.head_dim, p.value_dim))
    if p.batch_invariant and tile.block_kv != keys:
        raise ValueError(
            f"`config.forward` must have `block_kv={keys}` with `batch_invariant=True` at these "
            f"head dims; got {tile}. Use {keys}."
        )


def copy(ref, index, destination, barrier, cluster_size: int = 1, first_block: Any = 0):
    """Copy a tile to shared memory, 64 columns at a time, from this block of columns on.

    In a cluster each CTA copies a part of the rows to the shared memory of all (TMA multicast).
    """
    axes = None if cluster_size == 1 else common.RANK
    for n in range(destination.shape[0]):
        columns = common.block_of_columns(first_block + n, index[0])
        tile = ref.at[(*index, columns)]
        plgpu.copy_gmem_to_smem(tile, destination.at[n], barrier, collective_axes=axes)


def copy_keys_and_values(
    inputs,
    k: Pipeline,
    v: Pipeline,
    stream,
    where,
    base,
    cluster_size: int = 1,
    beside=lambda i, first_key: None,
    rows_of=None,
):
    """Copy the K/V blocks of a work tile, each to its stage as soon as that is empty.

    Args:
        inputs: with k and v.
        k: the pipeline of keys.
        v: the pipeline of values.
        stream: the number of blocks, and a function from a place to the number of the block.
        where: the batch element and the key/value head.
        base: blocks that this CTA had before.
        cluster_size: CTAs that share the copies.
        beside: starts what else is copied for a block, the i-th one of this CTA.
        rows_of: where keys are in pages, a function from the first key of a block to the first
            rows of its units, which are equal shares of it and are copied one by one.
    """
    (count, at), (b, h) = stream, where
    block = k.smem.shape[2]

    def one(j, rows):
        i, first = base + j, at(j) * block
        # Numbers of pages take time, and so they are loaded a block ahead.
        following = None if rows_of is None else rows_of(at(j + 1) * block)

        def start(pipeline, ref, first):
            to, firsts = pipeline.smem_of(i), [first] if rows is None else rows
            unit = block // len(firsts)
            for n, row in enumerate(firsts):
                part = to if rows is None else to.at[:, pl.ds(n * unit, unit)]
                copy(ref, (b, pl.ds(row, unit), h), part, pipeline.filled(i), cluster_size)

        beside(i, first)
        k.producer_acquire(i)
        start(k, inputs.k, first)
        v.producer_acquire(i)
        start(v, inputs.v, first)
        return following

    rows = None if rows_of is None else rows_of(at(0) * block)
    lax.fori_loop(jnp.int32(0), count, one, rows)


def run_producer_warps(tiles: scheduler.WorkTiles, keys_and_values: Any, *queries):
    """Run each function over a CTA's work tiles, in a warp of its own; the first warp takes them.

    Args:
        tiles: the work tiles of the first warp.
        keys_and_values: its body for `scheduler.for_each`, whose carry begins with 0, as the
            others' does.
        *queries: for each of the other warps its work tiles, and its body.
    """

    @plgpu.warp_map
    def _(warp):
        @pl.when(warp == 0)
        def _():
            scheduler.for_each(tiles, keys_and_values, jnp.int32(0), takes=True)

        for n, (tiles_of_warp, body) in enumerate(queries, 1):

            @pl.when(warp == n)
            def _(tiles=tiles_of_warp, body=body):
                scheduler.for_each(tiles, body, jnp.int32(0))


# ------------------------------------------------------------------------------------------------
# The launch
# ------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The operands of a kernel: arrays outside, references inside.

    Attributes:
        q: [B, T, N, H].
        k: [B, S, K, H].
        v: [B, S, K, V].
        table: `block_table` with all rows on one axis, if it holds lists; else None.
        options: the arrays of `Options.operands`.
        streamed: the (q, k) arrays of which tiles are copied; None if the kernel copies none.
        lengths: int32 [B], valid lengths of keys, behind which values may be NaN; or None.
        schedule: a static schedule, or a dynamic one whose counter lies elsewhere; else None.
        pages: the page table, int32 [R, pages of a request], or None.
    """

    q: Any
    k: Any
    v: Any
    table: Any
    options: Any
    streamed: Any
    lengths: Any
    schedule: Any
    pages: Any = None


@dataclasses.dataclass(frozen=True)
class ForwardConfig(common.KernelConfig):
    """The configuration of both kernels, known at compile time.

    Attributes:
        q: the queries, in blocks of a work tile each.
        head_dim: head dim of queries and keys.
        value_dim: head dim of values.
        query_tiles: which query tiles make up a work tile.
        partial_tail: whether partial blocks may follow full ones.
        streams: the (q, k) arrays of which tiles are copied.
        num_parts: arrays of the output: 2 of a `SplitOutput`, otherwise 1.
        kind: what describes a work tile, see `scheduler.WorkTiles`.
    """

    q: Tiling
    head_dim: int
    value_dim: int
    query_tiles: Any
    partial_tail: bool
    streams: Streams
    num_parts: int
    kind: ClassVar[Any] = scheduler.WorkTile


@dataclasses.dataclass(frozen=True)
class Cta:
    """A CTA, as all its warpgroups see it.

    Attributes:
        inputs: operands in device memory.
        o_refs: the output or both its parts, see `parts_of_output`.
        statistic_refs: the statistics of `LogSum`.
        smem: shared memory and barriers.
        config: what is known at compile time.
    """

    inputs: Inputs
    o_refs: Any
    statistic_refs: Any
    smem: Any
    config: Any


@dataclasses.dataclass(frozen=True)
class Consumer(Cta):
    """A consumer warpgroup of a CTA at one work tile.

    Attributes:
        warpgroup: its number in the CTA.
        work_tile: the work tile.
        first_row: the first query.
        options: the options of its batch element.
        kv_base: K/V blocks that the CTA had before this work tile.
        length: the valid length of keys, behind which values may be NaN; None if all are valid.
    """

    warpgroup: Any
    work_tile: scheduler.WorkTile
    first_row: Any
    options: ElementOptions
    kv_base: Any
    length: Any

    @property
    def visited(self) -> scheduler.VisitedBlocks:
        """The places of the stream that it visits."""
        assert self.work_tile.visited is not None
        return self.work_tile.visited

    def first_key(self, j):
        """Return the first key of the j-th block of the stream."""
        return self.work_tile.kv_blocks.block_at(j, self.inputs.table) * self.config.kv.block


def valid_length(inputs: Inputs, b):
    """Return the valid length of keys of a batch element, or None."""
    return None if inputs.lengths is None else plgpu.load(inputs.lengths.at[b])


def run_cta(cta: Cta, dynamic_schedule, consumers: int, consume, producer):
    """Run the warpgroups of a CTA.

    Args:
        cta: the CTA.
        dynamic_schedule: a dynamic schedule or its counter, which is in row 0; or None.
        consumers: how many consumer warpgroups there are.
        consume: function of the CTA, the work tiles and the number of a warpgroup.
        producer: class of the producer warpgroup.
    """
    schedule = dynamic_schedule if cta.inputs.schedule is None else cta.inputs.schedule
    counter = None if dynamic_schedule is None else dynamic_schedule.at[0, 0]
    where = lax.axis_index("cta"), cta.smem.work, counter
    tiles = scheduler.WorkTiles(schedule, *where, kind=cta.config.kind)
    warpgroup = lax.axis_index("warpgroup")
    consumes = warpgroup < consumers
    common.when(consumes)(lambda: consume(cta, tiles, warpgroup))
    common.when(jnp.logical_not(consumes))(lambda: producer(**vars(cta)).run(tiles))


def launch(
    kernel,
    config_class,
    problem: Problem,
    tile,
    lengths,
    smem,
    *,
    query_tiles: int,
    consumers: int,
    copied=NOT_COPIED,
    **parameters,
):
    """Return the output [B, T, N, V], or a `SplitOutput`, and a `LogSum` of float32 [B, N, T].

    Args:
        kernel: takes `Inputs`, the work tiles of a dynamic schedule or None, the output or its
            parts, and statistics.
        config_class: class of the kernel's configuration.
        problem: the call; values that no query sees are finite, if `lengths` is None.
        tile: block sizes.
        lengths: int32 [B], how many of the first keys of each batch element are visible.
        smem: specification of shared memory and barriers.
        query_tiles: query tiles of a CTA.
        consumers: consumer warpgroups of a CTA.
        copied: which (q, k) arrays are copied to shared memory, see `Streams.from_problem`.
        **parameters: of the compiler.
    """
    p, cluster_size, num_parts = problem, tile.cluster_size, 1 + problem.split_output
    q = Tiling(p.q_len, query_tiles * cluster_size * ptx.ROWS)
    kv = Tiling(p.kv_len, tile.block_kv)
    mask = p.mask.within(kv=kv)

    def run(shared, query, key, value, *lengths):
        batch = len(query)
        schedule = Schedule.from_problem(p, tile, query_tiles, batch, shared[1].mask)
        streams, shared, streamed = Streams.from_problem(p, shared, 3, kv, **copied)
        config = config_class(
            options=Options.from_problem(p, shared, q, kv),
            masked=bool(mask),
            scattered=mask.scattered,
            kv=kv,
            groups=p.groups,
            tile=tile,
            q=q,
            head_dim=p.head_dim,
            value_dim=p.value_dim,
            query_tiles=schedule.query_tiles,
            partial_tail=schedule.partial_tail,
            streams=streams,
            num_parts=num_parts,
        )
        inputs = Inputs(
            q=query,
            k=key,
            v=value,
            table=schedule.table,
            options=config.options.operands(shared),
            streamed=streamed,
            lengths=lengths[0] if lengths else None,
            schedule=None if schedule.dynamic else schedule.work_tiles,
        )
        # Warpgroups copy their statistics as whole query tiles.
        statistic = batch, p.num_heads, -(-p.q_len // ptx.ROWS) * ptx.ROWS
        results = common.launch(
            kernel,
            (inputs,),
            # A dynamic schedule has a counter.
            sums=(schedule.work_tiles if schedule.dynamic else None,),
            outputs=[
                *[((*query.shape[:3], p.value_dim), p.dtype)] * num_parts,
                *[(statistic, jnp.float32)] * num_statistics(p),
            ],
            memory=smem._asdict(),
            grid=dict(cta=schedule.num_ctas),
            cluster_size=cluster_size,
            warpgroups=consumers + 1,
            static=config,
            approx_math=config.options.approximate,
            **parameters,
        )
        return results[1:] if schedule.dynamic else results

    run = common.batch_instances(run, p.batch)
    arrays = p.query, p.key, p.value, *([] if lengths is None else [lengths])
    results = run(shared_arrays(p, mask), *arrays)
    outputs, statistics = results[:num_parts], results[num_parts:]
    o = SplitOutput(*outputs) if p.split_output else outputs[0]
    return o, log_sum_of([x[:, :, : p.q_len] for x in statistics], large=p.large)
