"""`paged_attention` by the forward for Hopper: packed query heads, keys and values in pages.

All is as in forward_kernel.py, but for this:

    rows       a query tile has the queries of all heads that share keys, so that keys are read once
               for them: row r is query r // room of head r % room, where `room` is the next power
               of two. A copy takes a box of queries x heads. Threads store the rows that exist,
               because those behind them belong to other requests.
    pages      are one array [P * page_size, K, H]. A K/V block is copied in units, each of which
               lies in one page; a full barrier counts the column blocks of each unit.
    schedule   dynamic: a work tile is a block of queries of one request for a group of heads, the
               longest ones first. It depends on lengths and on the split of tokens into requests
               alone, so that the layers of a step share it; each launch has a counter of its own.
    KV splits  shares of the K/V blocks of each work tile, where these leave SMs idle. Their acc, m
               and l are combined in ascending order.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common, forward_kernel, ptx, scheduler
from pallas_flash._backends.mosaic.forward_common import (
    Cta,
    Inputs,
    kv_pipelines,
    log_sum_of,
    num_statistics,
    results_of_rows,
    run_cta,
    zero_values,
)
from pallas_flash._backends.mosaic.pairs import StreamedArrays, Streams
from pallas_flash._backends.mosaic.pipeline import Pipeline
from pallas_flash._backends.mosaic.score_mask import Options, shared_arrays
from pallas_flash._backends.mosaic.splits import combine, num_splits
from pallas_flash._problem import invariance
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.paged import AnyProblem, PagedProblem, RowTiles
from pallas_flash._problem.tile_sizes import ForwardTile, power_of_2

plgpu = common.plgpu


def default_tile(p: AnyProblem) -> ForwardTile:
    """Return the tile of a call, with stages that fit at its head dims."""
    width = max(p.head_dim, p.value_dim)
    stages = 4 if width <= 64 else 3 if width <= 128 else 2
    return ForwardTile(2, invariance.block_kv(width), 0, stages)


class RequestRows(NamedTuple):
    """The numbers that a work tile of one request has in `own`, int32 each.

    Its `b` is the request, `h` the first query head of the group, and `index` the first query.

    Attributes:
        token: the token of the request's first query.
        queries: the request's queries.
        first_key: the first key that any query of the work tile sees.
        stop_key: the key after the last one.
        split: the KV split.
    """

    token: Any
    queries: Any
    first_key: Any
    stop_key: Any
    split: Any

    @staticmethod
    def columns(query_tile=None) -> list:
        """Return the columns of the schedule that `unpack` takes; the last ones are its own."""
        last = range(scheduler.DYNAMIC_COLUMNS - OWN, scheduler.DYNAMIC_COLUMNS)
        return [*scheduler.WorkTile.columns(query_tile), *last]

    @classmethod
    def unpack(cls, numbers) -> scheduler.WorkTile:
        """Return the work tile that these columns describe."""
        return scheduler.WorkTile.unpack(numbers[:-OWN])._replace(own=cls(*numbers[-OWN:]))


OWN = len(RequestRows._fields)


@dataclasses.dataclass(frozen=True)
class PagedConfig(forward_kernel.NarrowConfig):
    """The configuration of the kernel, known at compile time.

    Attributes:
        num_heads: query heads.
        page_size: keys of a page; 0 without pages.
        splits: KV splits.
    """

    num_heads: int
    page_size: int
    splits: int
    kind = RequestRows

    @property
    def registers(self):
        # The producer's warp for keys holds the rows of two blocks' units; with 24 it would spill.
        return (224, 56) if self.tile.warpgroups == 2 else super().registers

    @property
    def unit(self) -> int:
        """Keys of a unit."""
        return math.gcd(self.page_size, self.kv.block)

    @property
    def room(self) -> int:
        """Rows of a query."""
        return room_of(self.groups)

    def first_row(self, work_tile, query_tile):
        return work_tile.index + query_tile * (ptx.ROWS // self.room)


def room_of(groups: int) -> int:
    """Return the rows of a query, a power of two."""
    return power_of_2(groups)


def scratch(p: AnyProblem, tile: ForwardTile, page_size: int = 0) -> forward_kernel.Smem:
    """Return the specification of a CTA's shared memory and barriers."""
    smem, w, room = forward_kernel.scratch(p, tile), tile.warpgroups, room_of(p.groups)
    column_blocks = smem.q.smem.shape[1]
    shape = w, column_blocks, ptx.ROWS // room, room, ptx.COLUMNS
    q = plgpu.SMEM(shape, p.dtype, transforms=ptx.BLOCKS)
    units = tile.block_kv // math.gcd(page_size, tile.block_kv)
    k, v = kv_pipelines(p, tile, units, consumers=w)
    q = Pipeline.spec(q, 1, copies=column_blocks, pipelines=w)
    work = forward_kernel.work_pipeline(w)
    return smem._replace(q=q, k=k, v=v, statistics_sm=None, work=work)


# ------------------------------------------------------------------------------------------------
# The kernel
# ------------------------------------------------------------------------------------------------


class PagedConsumer(forward_kernel.ForwardConsumer):
    """A consumer warpgroup at one work tile."""

    def heads_and_positions(self, shape, first_key):
        config = self.config
        row, k_pos = common.positions(shape, jnp.int32(0), first_key)
        # Heads beyond the last one are not stored.
        h = jnp.minimum(self.work_tile.h + (row & (config.room - 1)), config.num_heads - 1)
        return h, self.first_row + (row >> (config.room.bit_length() - 1)), k_pos

    def clean_values(self, j):
        """Replace values that no query of the work tile sees by zeros: they may be NaN.

        The first block has the last visible key, and the last one the first visible key.
        """
        own, first_key = self.work_tile.own, self.first_key(j)
        start = own.first_key - first_key if self.config.partial_tail else None
        zero_values(self.smem.v.smem_of(self.kv_base + j), own.stop_key - first_key, start)

    def clean_tail(self, j):
        if self.config.partial_tail:
            self.clean_values(j)

    def epilogue(self, acc, m, l):
        """Store the rows that exist: the results, or of a KV split acc, l and the `RowMax`."""
        self.queries.consumer_release(0)
        config, work_tile, results = self.config, self.work_tile, [acc, m.m, l, m.exact]
        if config.splits == 1:
            h, *_ = self.heads_and_positions((ptx.ROWS, ptx.GROUP), jnp.int32(0))
            large = config.options.large
            statistics, weight = results_of_rows(self.options, h, m, l, large=large)
            o = acc * common.along_rows(weight, acc.shape)
            results = [o.astype(self.o_refs[0].dtype), *statistics]
        own = work_tile.own
        tokens = own.token + self.first_row, own.token + own.queries
        heads = work_tile.h, work_tile.h + config.groups
        for x, ref in zip(
            jax.tree.leaves(results), (*self.o_refs, *self.statistic_refs), strict=True
        ):
            ptx.store_rows(x, ref.at[own.split], *tokens, *heads, room=config.room)


class PagedProducer(forward_kernel.ForwardProducer):
    """The producer warpgroup of a CTA."""

    def queries_of(self, work_tile, first_row):
        room = self.config.room
        tokens = pl.ds(work_tile.own.token + first_row, ptx.ROWS // room)
        return jnp.int32(0), tokens, pl.ds(work_tile.h, room)

    def keys_of(self, work_tile):
        config, table, end = self.config, self.inputs.pages, self.inputs.k.shape[1]
        if table is None:
            return super().keys_of(work_tile)
        size, unit, own = config.page_size, config.unit, work_tile.own

        def row(key):
            # The block behind the last one has negative keys; its rows are not used.
            column = jnp.clip(common.quotient(key, size), 0, table.shape[1] - 1)
            page = jnp.clip(plgpu.load(table.at[work_tile.b, column]), 0, end // size - 1)
            # Where no query sees a unit, its page may hold NaN. Behind all pages copies find zeros.
            seen = (key + unit > own.first_key) & (key < own.stop_key)
            return jnp.where(seen, page * size + common.remainder(key, size), end)

        return jnp.int32(0), lambda first: [row(first + n) for n in range(0, config.kv.block, unit)]


def pallas_flash_paged(inputs: Inputs, counter, *outputs, static: PagedConfig, **memory):
    """Compute the work tiles of one CTA."""
    cta = Cta(inputs, outputs[:1], outputs[1:], forward_kernel.Smem(**memory), static)
    consume = functools.partial(forward_kernel.consume, kind=PagedConsumer)
    run_cta(cta, counter, static.tile.warpgroups, consume, PagedProducer)


# ------------------------------------------------------------------------------------------------
# The launch
# ------------------------------------------------------------------------------------------------


def forward(problem: PagedProblem):
    """Return the output [tokens, N, V] and the LSE float32 [tokens, N]."""
    p, tile, requests = problem, default_tile(problem), problem.requests
    kv, q = tilings(p, tile)
    tiles = RowTiles.from_problem(p, q.block, kv, groups=1)
    splits = splits_of(p, len(tiles.request) * p.num_kv_heads, kv.count)
    work_tiles = schedule(p, tiles, kv, tile.warpgroups, splits)
    k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (p.key_pages, p.value_pages))
    results = launch(
        *(pallas_flash_paged, p, tile, shared_arrays(p, p.mask), p.query, k, v, work_tiles, splits),
        partial_tail=p.left is not None,
        pages=requests.page_indices,
        page_size=requests.page_size,
    )
    o, *statistics = combined(p, [x[None] for x in results])
    o, lse = o[0].astype(p.dtype), log_sum_of(statistics, large=p.large).lse[0]
    if requests.cu_seqlens_q is None:
        return o, lse
    exists = requests.places()[2][:, None]
    return jnp.where(exists[..., None], o, 0), jnp.where(exists, lse, -jnp.inf)


def splits_of(p: AnyProblem, work_tiles: int, blocks: int) -> int:
    """Return the KV splits of a call; more than one would depend on the batch."""
    return 1 if p.batch_invariant else num_splits(work_tiles, blocks)


def tilings(p: AnyProblem, tile: ForwardTile) -> tuple[Tiling, Tiling]:
    """Return the K/V blocks, and the queries of each work tile."""
    rows = tile.warpgroups * ptx.ROWS // room_of(p.groups)
    return Tiling(p.kv_len, tile.block_kv), Tiling(p.q_len, rows)


def launch(
    kernel,
    p: AnyProblem,
    tile: ForwardTile,
    shared,
    query,
    key,
    value,
    work_tiles,
    splits: int,
    *,
    partial_tail: bool,
    pages=None,
    page_size: int = 0,
) -> list:
    """Return the results, [splits, tokens, N, ...]; acc, l and a `RowMax` of more than one split.

    Args:
        kernel: `pallas_flash_paged`, or the same by another name.
        p: the call.
        tile: block sizes.
        shared: what `shared_arrays` returns, of all instances.
        query: [tokens, N, H].
        key: [1 or B, keys, K, H].
        value: [1 or B, keys, K, V].
        work_tiles: see `rows_of_schedule`.
        splits: KV splits.
        partial_tail: whether a query may see no first keys.
        pages: the page table; None if keys are in no pages.
        page_size: keys of a page; 0 without pages.
    """
    (kv, q), ctas = tilings(p, tile), min(scheduler.NUM_SMS, len(work_tiles) - 2)
    # No position leads outside of an array of options, so that tiles are not ragged.
    options = Options.from_problem(p, shared, *[Tiling(ptx.ROWS, ptx.ROWS)] * 2)
    config = PagedConfig(
        options=options,
        masked=True,
        scattered=False,
        kv=kv,
        groups=p.groups,
        tile=tile,
        q=q,
        head_dim=p.head_dim,
        value_dim=p.value_dim,
        query_tiles=None,
        partial_tail=partial_tail,
        streams=Streams(),
        num_parts=1,
        num_heads=p.num_heads,
        page_size=page_size,
        splits=splits,
    )
    inputs = Inputs(
        q=query[None],
        k=key,
        v=value,
        table=None,
        options=options.operands(shared),
        streamed=StreamedArrays(),
        lengths=None,
        schedule=work_tiles,
        pages=pages,
    )
    rows, dtype = (splits, *query.shape[:2]), p.dtype
    count = num_statistics(p) if splits == 1 else 2 + p.max_logits
    if splits > 1 or p.split_output:
        dtype = jnp.float32
    _, *results = common.launch(
        kernel,
        (inputs,),
        sums=(jnp.full((1, 1), 1 + ctas, jnp.int32),),
        outputs=[((*rows, p.value_dim), dtype), *[(rows, jnp.float32)] * count],
        memory=scratch(p, tile, page_size)._asdict(),
        grid=dict(cta=ctas),
        warpgroups=tile.warpgroups + 1,
        static=config,
        approx_math=options.approximate,
    )
    return results


def combined(p: AnyProblem, results) -> list:
    """Return the output and the statistics [B, ..., N, ...] of results [B, splits, ..., N, ...]."""
    if results[0].shape[1] == 1:
        return [x[:, 0] for x in results]
    return combine(p, None if p.sinks is None else p.sinks[None, None], *results)


def schedule(p: PagedProblem, tiles: RowTiles, kv: Tiling, warpgroups: int, splits: int):
    """Return `rows_of_schedule` of a call.

    Args:
        p: the call.
        tiles: the queries of each CTA's work tiles.
        kv: the K/V blocks.
        warpgroups: consumer warpgroups of a CTA.
        splits: KV splits.
    """
    request, first, queries = (jnp.asarray(x) for x in tiles[2:5])
    offset = p.requests.offset[request]
    stop_key = offset + jnp.minimum(first + tiles.block, queries)
    first_key = 0 * offset if p.left is None else offset + first - p.left
    token = jnp.asarray(p.requests.starts)[request]
    of_tile = jnp.where(queries > 0, request, -1), first, token, queries, first_key, stop_key
    blocks = tiles.ranges[:, 0], tiles.ranges[:, 3], tiles.slices(p, kv, warpgroups)
    return rows_of_schedule(p, of_tile, *blocks, splits)


def rows_of_schedule(p: AnyProblem, of_tile, start, stop, slices, splits: int):
    """Return the rows of `scheduler.dynamic_schedule`, without its counter, of `RequestRows`.

    They are a NumPy array if `of_tile` and the others are.

    Args:
        p: the call.
        of_tile: of the queries of a work tile the request, or -1 if it does not exist, the first
            query, and the numbers of `RequestRows` but the split; int32 [tiles] each.
        start: the first K/V block that any of the queries sees, [tiles].
        stop: the block after the last one.
        slices: the blocks that each warpgroup visits, int32 [tiles, warpgroups, 4].
        splits: KV splits.
    """
    # Each split has a share of the blocks that any query tile visits.
    xp: Any = np if isinstance(slices, np.ndarray) else jnp
    split, (tiles, warpgroups, _) = np.arange(splits + 1, dtype=np.int32)[None], slices.shape
    small, rest = xp.divmod((stop - start)[:, None], np.int32(splits))
    cuts = (start[:, None] + split * small + xp.minimum(split, rest))[:, :, None, None]
    ranges = xp.clip(slices[:, None], cuts[:, :-1], cuts[:, 1:])
    blocks = scheduler.blocks_of_ranges(ranges.reshape(1, 1, -1, 4), warpgroups)
    blocks = blocks.reshape(tiles, splits, 1, -1)

    b, first, *own = (x[:, None, None] for x in of_tile)
    h = p.groups * np.arange(p.num_kv_heads, dtype=np.int32)[None, None]
    missing = scheduler.DYNAMIC_COLUMNS - OWN - len(scheduler.WHERE) - blocks.shape[-1]
    columns = b, h, first, *xp.moveaxis(blocks, 3, 0), *[b] * missing, *own, split[:, :-1, None]
    table = xp.stack(xp.broadcast_arrays(*columns), axis=-1)
    if math.prod(table.shape[:3]) > scheduler.NUM_SMS:
        # The longest first, all splits of it together. Work tiles that do not exist are last.
        table = table[xp.argsort(xp.where(of_tile[0] < 0, 1, start - stop), stable=True)]
    before, after = np.zeros((2, 1, scheduler.DYNAMIC_COLUMNS), np.int32)
    after[0, 0] = -1
    return xp.concatenate([before, table.reshape(-1, scheduler.DYNAMIC_COLUMNS), after])
