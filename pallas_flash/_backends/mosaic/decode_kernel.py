"""o and lse in decoding, where reading keys and values takes nearly all the time.

    rows       the queries of all heads that share keys and values, 64 in a row tile: keys are read
               once for all of them, and not once a head
    KV splits  shares of the K/V blocks for CTAs of their own: a few heads alone would leave most
               of a GPU idle

The equations of a split are as in forward_kernel.py. Its result is acc, m and l of an online
softmax as they are; XLA combines the results exactly (`combine`):

    m = max_i m_i         w_i = exp2(m_i - m)
    l = sum_i w_i l_i     o = sum_i w_i acc_i / l     lse_log2 = m + log2(l), or both apart

Roles. The kernel is persistent: a CTA reads work tiles, each a row tile and a KV split, from a
static schedule (`split_schedule`). It has w = 2 or 3 *consumer warpgroups* and one *producer
warpgroup*, of which warp 0 copies keys and values, and warp 1 queries. All consumers have the same
64 rows, and share out the K/V blocks by pipeline stages: stage n is always consumer n % w's, so the
number of stages is a multiple of w. Each keeps sums of its own, so that a split has w results.

Buffers in shared memory (`scratch`); a column block has 64 columns, H and V are head dims.

    buffer        shape                                       holds
    q             [ceil(H / 64), 64, 64]                      the rows
    k, v          [stages, ceil(H or V / 64), block_kv, 64]   blocks of keys, of values

Barriers, in Pallas's unit of arrivals: a copy or a warpgroup is one.

    barrier       number    arrivals         who arrives          who waits
    q.full        1         column blocks    copies of warp 1     all consumers
    q.empty       1         w                all consumers        producer warp 1
    k.full        stages    column blocks    copies of warp 0     the consumer of the stage
    k.empty       stages    1                that consumer        producer warp 0
    v.full        stages    column blocks    copies of warp 0     the consumer of the stage
    v.empty       stages    1                that consumer        producer warp 0

Each product is waited for at once: with every row in use, the two products of a block and its
softmax take about as long as its copy, and w warpgroups are at work. Copies must go on all the
time, of as many blocks as there are stages.

    producer      copy k(j+3), v(j+3) .... copy k(j+4), v(j+4) .... copy k(j+5), v(j+5) ....
    consumer 0    q k(j) | softmax | p v(j) |                       q k(j+2) | softmax | ...
    consumer 1                              q k(j+1) | softmax | p v(j+1) |

Values that no query sees may hold NaN, and 0 * NaN is NaN. A copy of the values without them would
take longer than all else, so that zeros are put in their place in shared memory, in partial blocks.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common, ptx, scheduler
from pallas_flash._backends.mosaic.forward_common import (
    RowMax,
    check_fits,
    copy,
    copy_keys_and_values,
    finish,
    initial_state,
    kv_pipelines,
    log_sum_of,
    run_producer_warps,
    softmax,
)
from pallas_flash._backends.mosaic.operands import DeviceOperand, Layout
from pallas_flash._backends.mosaic.pipeline import Pipeline
from pallas_flash._backends.mosaic.score_mask import (
    ElementOptions,
    Options,
    left_out,
    shared_arrays,
)
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.dropout import kept, rescaled
from pallas_flash._problem.features import CallFeatures
from pallas_flash._problem.paged import AnyProblem
from pallas_flash._problem.problem import Problem, SplitOutput
from pallas_flash._problem.scores import LOG2E
from pallas_flash._problem.tile_sizes import DecodeTile
from pallas_flash._problem.traversal import edges_first, listed_edges_first

plgpu = common.plgpu

# Registers of a consumer's thread and of a producer's, by the number of consumer warpgroups. With
# 24 the warp that loads block-sparse K/V would spill.
REGISTERS = {2: (232, 40), 3: (160, 32)}

MIN_BLOCKS_OF_A_SPLIT = 4  # K/V blocks: fewer are not worth a split's results.


# ------------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------------


class Smem(NamedTuple):
    """Shared memory: specifications outside of the kernel, references inside."""

    q: Pipeline
    k: Pipeline
    v: Pipeline


def scratch(p: Problem, tile: DecodeTile) -> Smem:
    """Return the specification of a CTA's shared memory and barriers."""
    q_sm = common.blocks(p.dtype, rows=ptx.ROWS, columns=p.head_dim)
    q = Pipeline.spec(q_sm, 1, copies=q_sm.shape[0], consumers=tile.warpgroups)
    return Smem(q, *kv_pipelines(p, tile))


def default_tile(f: CallFeatures) -> DecodeTile:
    """Return the tile of a call, with as many stages as the larger head dim leaves memory for.

    An H200's memory is busy with about 40 KB under way to each SM: an SM's share of 4.8 TB/s for a
    microsecond. Other tiles were not timed.
    """
    if f.width <= 64:
        return DecodeTile(block_kv=128)
    return DecodeTile(stages=6 if f.width <= 128 else 4 if f.width <= 192 else 2)


def check_tile(tile: DecodeTile, p: Problem) -> None:
    """Raise ValueError if a tile does not fit on the GPU."""
    registers, _ = REGISTERS[tile.warpgroups]
    check_fits("decode", tile, p, scratch(p, tile), p.value_dim, registers)


class Inputs(NamedTuple):
    """The operands of the kernel: arrays outside, references inside.

    Attributes:
        schedule: see `split_schedule`.
        q: rows, [B, K, T * groups, H].
        k: [B, S, K, H].
        v: [B, S, K, V].
        table: `block_table` with all rows on one axis, if it holds lists; else None.
        visible: int8 of one axis, whether any query sees a key; None if all are visible.
        options: the arrays of `Options.operands`.
    """

    schedule: Any
    q: Any
    k: Any
    v: Any
    table: Any
    visible: Any
    options: Any

    lengths = None  # Where `copy_keys_and_values` finds none.


class SplitTile(NamedTuple):
    """A work tile, int32 each.

    Attributes:
        b: batch element, counted over all instances.
        h: key/value head.
        place: number of the row tile times the number of splits, plus the split.
        entry: what `partial_first` takes.
    """

    b: Any
    h: Any
    place: Any
    entry: Any

    @staticmethod
    def columns(query_tile=None) -> list:
        """Return the columns of the schedule that `unpack` takes."""
        del query_tile
        return list(range(7))

    @classmethod
    def unpack(cls, numbers) -> "SplitTile":
        """Return the work tile that these columns describe."""
        b, h, place, *entry = numbers
        return cls(b, h, place, entry)


@dataclasses.dataclass(frozen=True)
class DecodeConfig(common.KernelConfig):
    """The configuration of the kernel, known at compile time.

    Attributes:
        visible: the shape of the array that tells which keys any query sees; None if all are.
        num_rows: queries of all heads that share keys and values.
        splits: KV splits.
        head_dim: head dim of queries and keys.
        value_dim: head dim of values.
    """

    visible: tuple[int, int, int] | None
    num_rows: int
    splits: int
    head_dim: int
    value_dim: int

    def row_tile_and_split(self, place):
        """Return the row tile and the KV split of a work tile."""
        return common.quotient(place, self.splits), common.remainder(place, self.splits)


# ------------------------------------------------------------------------------------------------
# K/V blocks: partial ones, then full ones
# ------------------------------------------------------------------------------------------------


class PartialFirst(NamedTuple):
    """The K/V blocks of one query tile, partial ones first.

    Attributes:
        partial: number of partial blocks.
        count: number of all blocks.
        block_at: function from a place to the number of the block there.
    """

    partial: Any
    count: Any
    block_at: Any


def row_entries(rows, scattered: bool):
    """Return what `partial_first` takes for each row of `block_table`: int32 [..., 4].

    That is the row itself; or of a list the number of the row, the number of full blocks, of all,
    and the place in the list where they begin.
    """
    if not scattered:
        return rows
    full, count = rows[..., 0], rows[..., 1]
    number = np.arange(full.size, dtype=np.int32).reshape(full.shape)
    return jnp.stack([number, full, count, 0 * count], axis=-1)


def partial_first(entry, table_ref) -> PartialFirst:
    """Return the blocks of an entry; `table_ref` as of `scheduler.KvBlocks`."""
    if table_ref is None:
        return PartialFirst(*edges_first(*entry))
    row, full, count, first = entry
    first = first + 2

    def block_at(i):
        return plgpu.load(table_ref.at[row, first + i])

    return PartialFirst(*listed_edges_first(full, count, block_at))


# ------------------------------------------------------------------------------------------------
# The kernel
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DecodeConsumer:
    """A consumer warpgroup at one work tile.

    Attributes:
        inputs: operands in device memory.
        result_refs: acc, m, l and, if asked for, the exact maximum.
        smem: shared memory and barriers.
        config: what is known at compile time.
        warpgroup: its number in the CTA.
        work_tile: the work tile.
        blocks: its K/V blocks, of all warpgroups.
        visible: which keys any query sees, an operand; None if all are visible.
        options: the options of its batch element.
        base: K/V blocks that the CTA had before this work tile.
    """

    inputs: Inputs
    result_refs: Any
    smem: Smem
    config: DecodeConfig
    warpgroup: Any
    work_tile: SplitTile
    blocks: PartialFirst
    visible: DeviceOperand | None
    options: ElementOptions
    base: Any

    def run(self):
        """Compute and store the result of this warpgroup."""
        config, w = self.config, self.config.tile.warpgroups
        row_tile, split = config.row_tile_and_split(self.work_tile.place)
        first_row = row_tile * ptx.ROWS
        # The first block that is this warpgroup's, by its stage.
        first = common.remainder(self.warpgroup + w - common.remainder(self.base, w), w)

        def mine(count):
            """Return how many of the first `count` blocks are this warpgroup's."""
            return common.quotient(count - first + w - 1, w)

        def step(i, state, *, partial):
            return self.step(first + i * w, state, first_row, partial=partial)

        self.smem.q.consumer_wait(0)
        large, max_logits = config.options.large, config.options.max_logits
        state = initial_state(config.value_dim, large=large, max_logits=max_logits)
        partial = jnp.int32(0)
        if config.masked:
            partial = mine(self.blocks.partial)
            masked = functools.partial(step, partial=True)
            state = lax.fori_loop(jnp.int32(0), partial, masked, state)
        full = functools.partial(step, partial=False)
        acc, m, l = lax.fori_loop(partial, mine(self.blocks.count), full, state)
        self.smem.q.consumer_release(0)
        result = split * w + self.warpgroup
        results = acc, m.m, l, *jax.tree.leaves(m.exact)
        for x, ref in zip(results, self.result_refs, strict=True):
            heads = ref.at[self.work_tile.b, result]
            place = self.work_tile.h, self.work_tile.h + 1, first_row, jnp.int32(config.num_rows)
            ptx.store_rows(x, heads, *place, room=ptx.ROWS)

    def step(self, j, state, first_row, *, partial: bool):
        """Add the j-th block."""
        acc, m, l = state
        k, v, i = self.smem.k, self.smem.v, self.base + j
        first_key = self.blocks.block_at(j) * self.config.kv.block
        shape = ptx.ROWS, self.config.kv.block
        at = heads_and_positions(self.work_tile.h, first_row, first_key, shape, self.config)
        options = self.options.read_ahead(*at, masked=partial)
        k.consumer_wait(i)
        s = ptx.wait(0, ptx.product_t(self.smem.q.smem, k.smem_of(i), self.config.head_dim))
        k.consumer_release(i)
        s, c = options.logits(s, *at, masked=partial)
        s = options.hide(s, *at) if partial else s
        p, m, l, alpha = softmax(s, c, m, l, large=self.config.options.large)
        if (dropout := options.extras.dropout) is not None:
            drawn = kept(dropout, (options.b, *at), multiply=ptx.multiply_wide)
            p = ptx.where(drawn, p, 0.0)
        p = p.astype(v.smem.dtype)
        v.consumer_wait(i)
        if partial and self.visible is not None:
            head = self.work_tile.h if self.visible.shape[1] > 1 else 0
            clean(v.smem_of(i), self.visible, (self.work_tile.b, head, first_key))
        acc = ptx.rescale(acc, alpha)
        acc = ptx.wait(0, ptx.accumulate(acc, p, v.smem_of(i)), p)
        v.consumer_release(i)
        return acc, m, l


def consume(inputs: Inputs, result_refs, smem: Smem, tiles, warpgroup, config: DecodeConfig):
    """Run a consumer warpgroup over all work tiles of its CTA."""
    smem.q.consumer_start()
    registers, _ = REGISTERS[config.tile.warpgroups]
    plgpu.set_max_registers(registers, action="increase")
    visible = None
    if config.visible is not None:
        layout = Layout(config.visible, 0, ragged=True)
        visible = DeviceOperand(inputs.visible, jnp.bool_, layout)

    def compute(i, work_tile, base):
        del i
        blocks = partial_first(work_tile.entry, inputs.table)
        options = config.options.element_options(inputs.options, work_tile.b)
        cta = inputs, result_refs, smem, config
        DecodeConsumer(*cta, warpgroup, work_tile, blocks, visible, options, base).run()
        return base + blocks.count

    scheduler.for_each(tiles, compute, jnp.int32(0))


def heads_and_positions(kv_head, first_row, first_key, shape, config: DecodeConfig):
    """Return the head, the query and the key of each element of a tile, int32."""
    # Rows beyond the last one see what it sees, so that every index is inside.
    row = jnp.minimum(ptx.positions(shape, 0, first_row), config.num_rows - 1)
    groups = jnp.full(shape, config.groups, jnp.int32)
    head = kv_head * config.groups + lax.rem(row, groups) if config.groups > 1 else kv_head
    return head, lax.div(row, groups), ptx.positions(shape, 1, first_key)


def clean(v_sm, visible, at):
    """Replace values that no query sees by zeros.

    Args:
        v_sm: a block of values, in blocks of 64 columns.
        visible: which keys any query sees, an operand.
        at: where the block begins there.
    """
    *which, first_key = at
    for row in range(0, v_sm.shape[1], ptx.ROWS):
        key = ptx.positions((ptx.ROWS, ptx.COLUMNS), 0, first_key + row)
        is_visible = visible[(*which, key)]
        for n in range(v_sm.shape[0]):
            block = v_sm.at[n, pl.ds(row, ptx.ROWS)]
            block[...] = jnp.where(is_visible, plgpu.load(block, layout=ptx.WGMMA), 0)
    plgpu.commit_smem()


def produce(inputs: Inputs, smem: Smem, tiles: scheduler.WorkTiles, config: DecodeConfig):
    """Run the producer warpgroup: one warp for keys and values, one for queries."""
    _, registers = REGISTERS[config.tile.warpgroups]
    plgpu.set_max_registers(registers, action="decrease")

    def load_keys_and_values(i, work_tile, base):
        del i
        blocks = partial_first(work_tile.entry, inputs.table)
        stream = blocks.count, blocks.block_at
        copy_keys_and_values(inputs, smem.k, smem.v, stream, (work_tile.b, work_tile.h), base)
        return base + blocks.count

    def load_queries(i, work_tile, nothing):
        del i
        row_tile, _ = config.row_tile_and_split(work_tile.place)
        smem.q.producer_wait(0)
        rows = pl.ds(row_tile * ptx.ROWS, ptx.ROWS)
        copy(inputs.q, (work_tile.b, work_tile.h, rows), smem.q.smem, smem.q.filled(0))
        return nothing

    run_producer_warps(tiles, load_keys_and_values, (tiles, load_queries))


def pallas_flash_decode(inputs: Inputs, *result_refs, static: DecodeConfig, **memory):
    """Compute the KV splits of one CTA."""
    smem, config = Smem(**memory), static
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    tiles = scheduler.WorkTiles(inputs.schedule, cta, None, kind=SplitTile)
    consumes = warpgroup < config.tile.warpgroups

    @common.when(consumes)
    def _():
        consume(inputs, result_refs, smem, tiles, warpgroup, config)

    @common.when(jnp.logical_not(consumes))
    def _():
        produce(inputs, smem, tiles, config)


# ------------------------------------------------------------------------------------------------
# KV splits
# ------------------------------------------------------------------------------------------------


def num_splits(p: Problem, batch: int, kv: Tiling, tile: DecodeTile, *, known: bool) -> int:
    """Return into how many splits the keys are cut.

    More splits fill all SMs; but a split's results are written and read, too.

    Args:
        p: the call.
        batch: batch elements of all instances.
        kv: the K/V blocks.
        tile: how a CTA is made.
        known: whether the blocks are known; else batch elements may differ.
    """
    rows = p.q_len * p.groups
    row_tiles = batch * p.num_kv_heads * -(-rows // ptx.ROWS)
    block_bytes = kv.block * (p.head_dim + p.value_dim) * p.dtype.itemsize
    result_bytes = 4 * min(rows, ptx.ROWS) * (p.value_dim + 2) * tile.warpgroups
    # To start a split takes about as long as a block.
    extra = 1 + 2 * result_bytes / block_bytes

    most = max(1, min(kv.count // MIN_BLOCKS_OF_A_SPLIT, 4 * scheduler.NUM_SMS))
    # Then every SM has splits of every batch element, whatever its length.
    least = 1 if known else min(most, -(-scheduler.NUM_SMS * batch // row_tiles))
    return best_splits(row_tiles, kv.count, extra, range(least, most + 1))


def best_splits(work_tiles: int, blocks: int, extra: float, splits: range) -> int:
    """Return the splits of work tiles with which the CTA that has most is done first.

    A split takes as long as its share of the `blocks`, and as `extra` ones.
    """

    def time(splits: int) -> float:
        return -(-work_tiles * splits // scheduler.NUM_SMS) * (blocks / splits + extra)

    return min(splits, key=time)


def split_entries(entries, splits: int, scattered: bool):
    """Return `row_entries` cut into nearly equal shares, [..., entries * splits, 4]."""
    xp: Any = np if isinstance(entries, np.ndarray) else jnp
    a, b, c, d = (entries[..., None, i] for i in range(4))
    count, split = c if scattered else d - a, np.arange(splits, dtype=np.int32).reshape(1, 1, 1, -1)
    small, rest = count // splits, count % splits
    first, last = (i * small + xp.minimum(i, rest) for i in (split, split + np.int32(1)))
    if scattered:
        cut = a, xp.clip(b - first, 0, last - first), last - first, first
    else:
        first, last = a + first, a + last
        cut = first, xp.clip(b, first, last), xp.clip(c, first, last), last
    cut = xp.stack(xp.broadcast_arrays(*cut), axis=-1).astype(np.int32)
    return cut.reshape(*entries.shape[:2], -1, 4)


def split_schedule(entries, batch: int, heads: int):
    """Return a static schedule of splits, int32 [CTAs, 1 + splits of a CTA, 7]: round robin.

    Its first row has the number of splits of a CTA.

    Splits of a head are equal. The splits of all heads of a batch element, if they are many enough,
    fall to all SMs alike. To sort them by length would take XLA longer than it can gain.
    """
    xp: Any = np if isinstance(entries, np.ndarray) else jnp
    shape = batch, heads, entries.shape[2]
    count = math.prod(shape)
    where = np.stack(np.unravel_index(np.arange(count), shape), axis=-1).astype(np.int32)
    entries = xp.broadcast_to(entries, (*shape, 4)).reshape(count, 4)
    ctas = min(scheduler.NUM_SMS, count)
    most = -(-count // ctas)
    tiles = xp.concatenate([where, entries], axis=1)
    tiles = xp.pad(tiles, ((0, ctas * most - count), (0, 0)))
    tiles = tiles.reshape(most, ctas, -1).swapaxes(0, 1)
    heading = np.zeros((ctas, 1, tiles.shape[2]), np.int32)
    heading[:, 0, 0] = most - (np.arange(ctas) >= count - ctas * (most - 1))
    return xp.concatenate([heading, tiles], axis=1)


def combine(p: Problem, acc, m, l, exact=None):
    """Return what `decode` does, of the results of splits.

    Args:
        p: the call.
        acc: [B, results, K, rows, V].
        m: [B, results, K, rows].
        l: [B, results, K, rows].
        exact: as in `RowMax`, [B, results, K, rows], or None.
    """
    sinks = p.sinks
    if sinks is not None:
        sinks = jnp.tile(sinks.reshape(p.num_kv_heads, p.groups), (1, p.q_len))[None]
    o, *statistics = combine_results(p, sinks, acc, m, l, exact)
    apart = p.batch, p.num_kv_heads, p.q_len, p.groups
    o = o.reshape(*apart, p.value_dim).swapaxes(1, 2).reshape(*p.query.shape[:3], p.value_dim)
    statistics = [
        x.reshape(apart).swapaxes(2, 3).reshape(p.batch, p.num_heads, p.q_len) for x in statistics
    ]
    o = SplitOutput.from_float32(o, p.dtype, split=p.split_output)
    return o, log_sum_of(statistics, large=p.large)


def combine_results(
    p: AnyProblem, sinks, acc, m, l, exact=None, total=lambda x: x.sum(axis=1)
) -> list:
    """Return the float32 output and the arrays of `finish`, of arrays of results along axis 1.

    `total` sums along it; the other arguments are as of `combine`, of any rows.
    """
    top = m.max(axis=1)
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp2((m - top[:, None]) * (LOG2E if p.large else 1.0))
    row_max = RowMax(top, None if exact is None else exact.max(axis=1))
    row_max = row_max.shifted(left_out(p.scores))
    statistics, factor = finish(row_max, total(weights * l), sinks, large=p.large)
    o = total(weights[..., None] * acc) * rescaled(p.dropout, factor)[..., None]
    return [o, *statistics]


# ------------------------------------------------------------------------------------------------
# The launch
# ------------------------------------------------------------------------------------------------


def decode(problem: Problem, tile: DecodeTile, visible):
    """Return the output [B, T, N, V] and a `LogSum` of float32 [B, N, T].

    Args:
        problem: the call.
        tile: how CTAs are made.
        visible: which keys any query sees, bool [1 or B, 1 or K, S]; None if all are visible.
    """
    p = problem
    num_rows = p.q_len * p.groups
    kv = Tiling(p.kv_len, tile.block_kv)
    # A query tile has the rows of `groups` row tiles, or all rows.
    q, row_tiles = Tiling(p.q_len, ptx.ROWS), np.arange(-(-num_rows // ptx.ROWS))
    mask = p.mask.within(kv=kv)
    known = not jax.tree.leaves(mask)

    def run(shared, rows, key, value, *visible):
        batch = len(rows)
        splits = num_splits(p, batch, kv, tile, known=known)
        table = scheduler.block_table(shared[1].mask, q, kv, "kv", batch, p.batch, groups=p.groups)
        entries = row_entries(table, mask.scattered)[:, :, row_tiles // p.groups]
        entries = split_entries(entries, splits, mask.scattered)
        schedule = jnp.asarray(split_schedule(entries, batch, p.num_kv_heads))
        options = Options.from_problem(p, shared, q, kv)
        inputs = Inputs(
            schedule=schedule,
            q=rows,
            k=key,
            v=value,
            table=table.reshape(-1, table.shape[-1]) if mask.scattered else None,
            visible=visible[0].astype(jnp.int8).reshape(-1) if visible else None,
            options=options.operands(shared),
        )
        statistic = batch, splits * tile.warpgroups, p.num_kv_heads, num_rows
        return common.launch(
            pallas_flash_decode,
            (inputs,),
            outputs=[
                ((*statistic, p.value_dim), jnp.float32),
                *[(statistic, jnp.float32)] * (2 + p.max_logits),
            ],
            memory=scratch(p, tile)._asdict(),
            grid=dict(cta=len(schedule)),
            warpgroups=tile.warpgroups + 1,
            static=DecodeConfig(
                options=options,
                masked=bool(mask),
                scattered=mask.scattered,
                kv=kv,
                groups=p.groups,
                tile=tile,
                visible=visible[0].shape if visible else None,
                num_rows=num_rows,
                splits=splits,
                head_dim=p.head_dim,
                value_dim=p.value_dim,
            ),
            approx_math=options.approximate,
        )

    run = common.batch_instances(run, p.batch)
    # [B, T, N, H] to [B, K, rows, H]: no copy with one query.
    rows = p.query.reshape(p.batch, p.q_len, p.num_kv_heads, p.groups, p.head_dim).swapaxes(1, 2)
    rows = rows.reshape(p.batch, p.num_kv_heads, num_rows, p.head_dim)
    visible = [] if visible is None else [jnp.broadcast_to(visible, (p.batch, *visible.shape[1:]))]
    results = run(shared_arrays(p, mask), rows, p.key, p.value, *visible)
    return combine(p, *results)
