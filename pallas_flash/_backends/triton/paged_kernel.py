"""The kernel of paged attention: decoding, prefill and both in one call.

A program computes a work tile (`_problem.paged`): a block of rows of one request, for the query
heads that share one key head, and a range of its key tiles. Its loop is `attend`, as in the
forward. Keys and values are read from their pages in place:

    page_size a multiple of block_kv   a key tile is in one page: one number of the page table
    else                               each key has a page of its own: a gather of rows

Quantised keys and values are read as words of two, see `eight_bit`, and dequantised by their scales
without rounding. Scores have the factor of their key, and weights the factor of their value:

    s = (q @ k_quantised.T) * key_scale[None]     acc += (p * value_scale[None]) @ v_quantised

All work tiles are computed, whatever the lengths, by one fixed grid. `RowTiles.work` divides the
key tiles of all requests evenly, so that a program of a short request has as much work as one of
a long request. A second kernel combines the splits of each row, as in decoding.

Rows that few keys share go by a launch with small row tiles, where a program with more rows would
wait for the matrix units. In a call that may have both, requests with many rows go by a second
launch, and the combination takes both.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.triton import eight_bit, memory
from pallas_flash._backends.triton.decode_kernel import (
    MANY_PROGRAMS,
    MIN_TILES_PER_SPLIT,
    ONE_WAVE,
    Splits,
    combine,
    query_and_head,
)
from pallas_flash._backends.triton.forward_kernel import attend
from pallas_flash._backends.triton.launch import kernel_arrays, launch, whole
from pallas_flash._backends.triton.spec import KernelSpec, Rows
from pallas_flash._backends.triton.tiles import BY_MATRIX_UNITS, decode_tile
from pallas_flash._jax import device, hardware
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.paged import PagedProblem, RowTiles, Work, key_place
from pallas_flash._problem.problem import Extras
from pallas_flash._problem.tile_sizes import Tile, tile_of
from pallas_flash._problem.traversal import Sparsity


class PagedKeys(NamedTuple):
    """The keys or the values of one head of one request.

    Attributes:
        ref: the pages of the head, [P, page_size, padded width].
        scales_ref: their scales, [P, page_size] or [K]; None if they are not quantised.
        table_ref: the page table, int32 [R, pages of a request].
        request: the request.
        head: the key head.
        dtype: the dtype of products.
        cache: the dtype of the pages.
        parts: 2 if the pages are words of two columns, see `eight_bit`; else 1.
    """

    ref: Any
    scales_ref: Any
    table_ref: Any
    request: Any
    head: Any
    dtype: Any
    cache: Any
    parts: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.shape


def _paged(x: PagedKeys, kv_tile, keys, width: int, spec: KernelSpec):
    """Load a tile of keys or values, as `attend` calls it."""
    num_pages, page_size, _ = x.ref.shape
    block = spec.kv.block
    column, row = key_place(kv_tile, block, page_size)
    # The last tile may have columns beyond the table; its keys there are hidden.
    column = jnp.minimum(column, x.table_ref.shape[1] - 1)
    gathered = jnp.ndim(row) > 0
    page = x.table_ref[x.request, column]
    # No index of the table leads outside of the cache.
    page = lax.max(lax.min(page, np.int32(num_pages - 1)), np.int32(0))
    if gathered:
        tile = memory.load_at(x.ref, (page, row), keys, width // x.parts)
    else:
        row = pl.ds(row, block)
        tile = memory.load(x.ref.at[page, row, :], keys, width // x.parts)
    if x.scales_ref is None:
        return (tile,), None
    if x.parts > 1:
        tiles = eight_bit.unpack(tile, x.cache, x.dtype, interpret=spec.interpret)
    else:
        tiles = (tile.astype(x.dtype),)
    if len(x.scales_ref.shape) == 1:
        return tiles, x.scales_ref[x.head]
    return tiles, memory.load_row(x.scales_ref.at[page, row], keys)[None, :]


def _interleaved(ref, parts: int, *rows):
    """Return a ref for each part: the columns of a number modulo `parts`, at int32 [rows]."""
    column = parts * lax.iota(jnp.int32, ref.shape[-1] // parts)
    rows = [i[:, None] for i in rows]
    return [ref.at[*rows, (column + part)[None, :]] for part in range(parts)]


def pallas_flash_paged(
    q_ref,
    k_ref,
    v_ref,
    scale_ref,
    work_ref,
    table_ref,
    *refs,
    spec: KernelSpec,
    groups: int,
    quantised: tuple[bool, bool],
    caches: tuple[Any, Any],
    parts: int,
):
    """Compute one work tile for one key head."""
    *refs, acc_ref, m_ref, l_ref = refs
    scales = [refs.pop(0) if x else None for x in quantised]
    extras = spec.load_extras(refs)
    kv_head, block = pl.program_id(0), spec.q.block
    request, token, first_row, num_rows, *ranges = (work_ref[i] for i in range(8))
    row = first_row + lax.iota(jnp.int32, block)
    valid = row < num_rows
    query, head = query_and_head(row, groups)
    head = kv_head * groups + head
    q = tuple(
        memory.load(ref, valid, spec.head_dim // parts)
        for ref in _interleaved(q_ref, parts, token + query, head)
    )
    rows = Rows(q, request, head, query, valid)
    k, v = (
        PagedKeys(ref, scale, table_ref, request, kv_head, q_ref.dtype, cache, parts)
        for ref, scale, cache in zip((k_ref, v_ref), scales, caches, strict=True)
    )
    acc, m, l = attend(
        rows, q, k, v, scale_ref[0], ranges, lambda *_: None, extras, spec, load=_paged
    )
    for ref, x in zip(_interleaved(acc_ref, parts, lax.iota(jnp.int32, block)), acc, strict=True):
        memory.store(ref, x, valid, spec.value_dim // parts)
    memory.store_row(m_ref, m, valid)
    memory.store_row(l_ref, l, valid)


def pallas_flash_paged_combine(
    rows_ref,
    *refs,
    spec: KernelSpec,
    groups: int,
    most: tuple[int, ...],
):
    """Combine the splits of one row. `rows_ref` has 3 numbers of each launch, see `_combine`."""
    head = pl.program_id(1) * groups + query_and_head(pl.program_id(0), groups)[1]
    parts = []
    for part, n in enumerate(most):
        acc_ref, m_ref, l_ref, *refs = refs
        first, count, row = (rows_ref[3 * part + i] for i in range(3))
        last = np.int32(m_ref.shape[0] - 1)

        def at(ref, i, n, first=first, row=row, last=last):
            split = lax.min(first + i * n + lax.iota(jnp.int32, n), last)
            if len(ref.shape) == 2:
                return ref.at[split, row]
            return ref.at[split[:, None], row, lax.iota(jnp.int32, ref.shape[2])[None, :]]

        parts.append(Splits(acc_ref, m_ref, l_ref, at, count, n))
    combine(parts, head, refs, spec)


class _Launch(NamedTuple):
    """One launch of `pallas_flash_paged`, and what the combination needs of it.

    Attributes:
        results: acc [work tiles, K, rows, V], m and l [work tiles, K, rows].
        tiles: its row tiles.
        work: its work tiles.
        most: a power of two that the splits of a row tile do not exceed.
        spec: what its kernel knows.
        tile: its tile.
    """

    results: Any
    tiles: RowTiles
    work: Work
    most: int
    spec: KernelSpec
    tile: Tile


def forward(problem: PagedProblem, *, interpret: bool):
    """Return the output [tokens, N, V] and the LSE float32 [tokens, N]."""
    capability = device.tile_capability("interpret" if interpret else "triton")
    launches = []
    for tile, rows in launches_of(problem, capability):
        kv = Tiling(problem.kv_len, tile.block_kv)
        tiles = RowTiles.from_problem(problem, tile.block_q, kv, rows)
        if len(tiles.request):
            launches.append(_launch(problem, tile, tiles, kv, interpret=interpret))
    return _combine(problem, launches)


def launches_of(p: PagedProblem, capability) -> list[tuple[Tile, tuple[int, int | None]]]:
    """Return the tile of each launch, and the rows of its requests: more than, and at most."""
    width = max(64, memory.padded(max(p.head_dim, p.value_dim)))
    rows = p.q_len * p.groups
    # Quantised keys have the same tiles, because conversions take the registers of more keys.
    few = decode_tile(width, p.dtype.itemsize)
    uniform = p.tokens == p.batch * p.q_len
    most = memory.block_for(rows if uniform else p.groups, few.block_q)
    few = dataclasses.replace(few, block_q=most)
    if rows <= few.block_q:
        return [(few, (0, None))]
    units = hardware.matrix_units(capability)
    many = tile_of(BY_MATRIX_UNITS[units][width, p.dtype.itemsize], "forward")
    assert isinstance(many, Tile)
    if width == 256:
        # Addresses of pages take registers; with more keys it spills.
        many = dataclasses.replace(many, block_kv=32)
    if uniform or few.block_q >= many.block_q:
        return [(many, (0, None))]
    return [(few, (0, few.block_q)), (many, (few.block_q, None))]


def _launch(p: PagedProblem, tile: Tile, tiles: RowTiles, kv: Tiling, *, interpret: bool):
    """Return the `_Launch` that computes these row tiles."""
    count = len(tiles.request)
    # As in decoding, but for all requests together.
    programs = count * p.num_kv_heads
    splits = pl.cdiv(ONE_WAVE if programs <= ONE_WAVE else MANY_PROGRAMS, p.num_kv_heads)
    splits_of_tile = pl.cdiv(kv.count, MIN_TILES_PER_SPLIT)
    work = tiles.work(p, min(count + splits, count * splits_of_tile), splits, MIN_TILES_PER_SPLIT)
    extras = Extras(p.mask, p.scores)
    spec = KernelSpec(
        extras=jax.tree.structure(extras),
        dtypes=tuple(x.dtype for x in jax.tree.leaves(extras)),
        sparsity=Sparsity.RANGES,
        mask_loads=True,
        separate_max=p.large,
        max_logits=False,
        split_output=False,
        q=Tiling(tile.block_q, tile.block_q),
        kv=Tiling(kv.count * kv.block, kv.block),
        num_stages=tile.num_stages,
        head_dim=p.head_dim,
        value_dim=p.value_dim,
        itemsize=p.dtype.itemsize,
        precision=p.precision,
        interpret=interpret,
    )
    most = pl.next_power_of_2(min(splits, splits_of_tile))
    results = _compute(p, work, spec, extras, tile)
    return _Launch(results, tiles, work, most, spec, tile)


def _compute(p: PagedProblem, work: Work, spec: KernelSpec, extras: Extras, tile: Tile):
    """Return acc [work tiles, K, rows, V], m and l [work tiles, K, rows] of all work tiles."""
    width, value_width = memory.padded(p.head_dim), memory.padded(p.value_dim)
    scales = [x for x in (p.key_scales, p.value_scales) if x is not None]
    parts = eight_bit.parts_of(p)
    key_pages, value_pages = eight_bit.pages_of(p)
    block, rows = tile.block_q, min(tile.block_q, p.q_len * p.groups)
    statistic = (len(work.table), p.num_kv_heads, rows)

    def pages(width):
        return pl.BlockSpec(
            (p.requests.num_pages, p.requests.page_size, None, width), lambda k, w: (0, 0, k, 0)
        )

    def with_spec(scales):
        if scales.ndim == 1:
            return whole(scales)
        block = p.requests.num_pages, None, p.requests.page_size
        return scales, pl.BlockSpec(block, lambda k, w: (0, k, 0))

    # The compiler divides its stages between two loads, of a page's number and of its keys.
    tile = dataclasses.replace(tile, num_stages=2 * tile.num_stages - 1)
    return launch(
        pallas_flash_paged,
        [
            (p.query, pl.BlockSpec((p.tokens, p.num_heads, width), lambda k, w: (0, 0, 0))),
            (key_pages, pages(width // parts)),
            (value_pages, pages(value_width // parts)),
            whole(p.scale[None]),
            (work.table, pl.BlockSpec((None, work.table.shape[1]), lambda k, w: (w, 0))),
            whole(p.requests.page_indices),
            *map(with_spec, scales),
            *map(whole, kernel_arrays(extras)),
        ],
        [
            (
                *((*statistic, p.value_dim), jnp.float32),
                pl.BlockSpec((None, None, block, value_width), lambda k, w: (w, k, 0, 0)),
            ),
            *[(statistic, jnp.float32, pl.BlockSpec((None, None, block), lambda k, w: (w, k, 0)))]
            * 2,
        ],
        spec=spec,
        tile=tile,
        grid=(p.num_kv_heads, len(work.table)),
        groups=p.groups,
        quantised=(p.key_scales is not None, p.value_scales is not None),
        caches=(p.key_pages.dtype, p.value_pages.dtype),
        parts=parts,
    )


def _combine(p: PagedProblem, launches: list[_Launch]):
    """Return the output [tokens, N, V] and the LSE [tokens, N]."""
    columns, operands = [], []
    width, groups = memory.padded(p.value_dim), p.groups
    for part in launches:
        tile, row, exists = part.tiles.tile_of_rows(p)
        # The first split of each row, their number, and the row in the tile.
        columns += [part.work.first[tile], jnp.where(exists, part.work.count[tile], 0), row]
        acc, *rest = part.results
        count, _, rows = rest[0].shape
        of_rest = pl.BlockSpec((count, None, rows), lambda r, k: (0, k, 0))
        operands += [
            (acc, pl.BlockSpec((count, None, rows, width), lambda r, k: (0, k, 0, 0))),
            *((x, of_rest) for x in rest),
        ]
    table = jnp.stack(columns, axis=1)
    sinks = [] if p.sinks is None else [p.sinks]
    spec = launches[0].spec

    def token_and_head(r, k):
        query, head = query_and_head(r, groups)
        return query, k * groups + head

    of_o = pl.BlockSpec((None, None, width), lambda r, k: (*token_and_head(r, k), 0))
    of_statistic = pl.BlockSpec((None, 1), lambda r, k: token_and_head(r, k)[::-1])
    o, *log_sum = launch(
        pallas_flash_paged_combine,
        [
            (table, pl.BlockSpec((None, table.shape[1]), lambda r, k: (r, 0))),
            *operands,
            *map(whole, sinks),
        ],
        [
            ((*p.query.shape[:2], p.value_dim), p.dtype, of_o),
            *[((p.num_heads, p.tokens), jnp.float32, of_statistic)] * spec.num_statistics,
        ],
        spec=spec,
        tile=launches[0].tile,
        grid=(len(table), p.num_kv_heads),
        groups=groups,
        most=tuple(part.most for part in launches),
    )
    return o, spec.log_sum(log_sum)[0].lse.T
