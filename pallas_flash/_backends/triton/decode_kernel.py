"""The forward kernel of decoding, where reading k and v takes nearly all the time.

    rows    the queries of all heads that share keys and values, in one tile. Keys are read once for
            every 64 of them (32 at head dim 256), and not once for each head.
    splits  ranges of key tiles with a program each (split-KV). Without them a few heads would leave
            most of a GPU idle.

A split gives acc, m and l of its online softmax, see forward_kernel.py. A second kernel combines
the splits exactly:

    m = max_i m_i         w_i = exp2(m_i - m)
    l = sum_i w_i l_i     o = sum_i w_i acc_i / l     lse_log2 = m + log2(l), or both apart

Splitting the keys is Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.triton import memory
from pallas_flash._backends.triton.forward_kernel import attend
from pallas_flash._backends.triton.launch import launch, load_tables, table_operands, whole
from pallas_flash._backends.triton.spec import KernelSpec, Rows, make_spec
from pallas_flash._jax import compat
from pallas_flash._problem.dropout import rescaled
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.scores import LOG2E
from pallas_flash._problem.tile_sizes import Tile
from pallas_flash._problem.traversal import in_tile, split

# Programs to launch. 256 run in one wave, two on each of an H200's 132 SMs, and keep its memory
# busy. Where the heads alone have more programs, 2048 make the last wave short.
# The batch of `jax.vmap` is not known here.
ONE_WAVE, MANY_PROGRAMS = 256, 2048
# Key tiles of a split at least. With fewer its results cost more than it gains.
MIN_TILES_PER_SPLIT = 4

# Splits that the combine kernel adds in a step.
SPLITS_PER_STEP = 16


def pallas_flash_decode(
    q_ref,
    k_ref,
    v_ref,
    scale_ref,
    *refs,
    spec: KernelSpec,
    groups: int,
    splits: int,
    num_rows: int,
):
    """Compute one split of the keys for one tile of rows: `groups` heads for each query."""
    *tables, acc_ref, m_ref, l_ref = refs
    tiles, extras = load_tables(tables, spec, streamed=spec.kv)
    block = q_ref.shape[0]
    row = in_tile(pl.program_id(0), block)
    valid = row < num_rows if num_rows % block else None
    q = memory.load(q_ref, valid, spec.head_dim)
    # Rows beyond the last one get its indices, so that every index is inside.
    row = lax.min(row, np.int32(num_rows - 1))
    query, head = query_and_head(row, groups)
    rows = Rows(q, pl.program_id(3), pl.program_id(2) * groups + head, query, valid)
    mine = split(tiles(0), pl.program_id(1), splits, spec.sparsity)

    def kept_of(kv_tile, k_pos):
        return spec.kept(extras, *rows.indices(k_pos))

    (acc,), m, l = attend(rows, (q,), k_ref, v_ref, scale_ref[0], mine, kept_of, extras, spec)
    memory.store(acc_ref, acc, valid, spec.value_dim)
    memory.store_row(m_ref, m, valid)
    memory.store_row(l_ref, l, valid)


class Splits(NamedTuple):
    """The splits of one row.

    Attributes:
        acc_ref: a ref to acc.
        m_ref: a ref to m.
        l_ref: a ref to l.
        at: `at(ref, i, n)` is the ref of the numbers of splits i * n .. i * n + n - 1 of this row.
        count: how many there are.
        most: a power of two that `count` does not exceed.
    """

    acc_ref: Any
    m_ref: Any
    l_ref: Any
    at: Callable
    count: Any
    most: int


def pallas_flash_decode_combine(
    acc_ref,
    m_ref,
    l_ref,
    *refs,
    spec: KernelSpec,
    factor: float,
    groups: int,
    splits: int,
):
    """Combine the splits of one row of the output, times `factor`."""

    def at(ref, i, n):
        return ref.at[pl.ds(i * n, n)]

    head = pl.program_id(1) * groups + query_and_head(pl.program_id(0), groups)[1]
    mine = Splits(acc_ref, m_ref, l_ref, at, splits, m_ref.shape[0])
    combine([mine], head, refs, spec, factor)


def combine(parts: list[Splits], head, refs, spec: KernelSpec, factor: float = 1.0):
    """Store the combined splits of one row of query head `head`, times `factor`.

    `refs` are the sinks, if there are any, the row of the output or of both its parts, and its row
    outputs.
    """
    sinks, o_refs, row_refs = spec.outputs(refs)
    maxima, sums = [], []
    for x in parts:
        inside = lax.iota(jnp.int32, x.most) < x.count
        maxima.append(_load_maxima(x.at(x.m_ref, 0, x.most), inside))
        sums.append(memory.load_row(x.at(x.l_ref, 0, x.most), inside))
    highest = functools.reduce(jnp.maximum, map(jnp.max, maxima))
    max_logits, has_keys = spec.max_logits_of(highest), highest > -jnp.inf
    # A sink is a key with the value 0, and so one more split.
    sinks = [ref[head] if spec.separate_max else ref[head] * LOG2E for ref in sinks]
    highest = jnp.where(has_keys, functools.reduce(jnp.maximum, sinks, highest), 0.0)
    total = sum(jnp.sum(spec.rescaling(m, highest) * l) for m, l in zip(maxima, sums, strict=True))
    total += sum(spec.rescaling(x, highest) for x in sinks)
    total = jnp.where(has_keys, total, 1.0)

    o = jnp.zeros(o_refs[0].shape, jnp.float32)
    for x in parts:
        o = _add_splits(o, x, highest, spec)
    o = o * (factor / total)
    column = lax.iota(jnp.int32, len(o))
    inside = None if len(o) == spec.value_dim else column < spec.value_dim
    for ref, x in zip(o_refs, spec.parts_of_output(o, o_refs[0].dtype), strict=True):
        memory.store_row(ref, x, inside)
    results = spec.statistics(highest, total, has_keys) + max_logits
    for ref, x in zip(row_refs, results, strict=True):
        memory.store_row(ref, x[None], None)


def _add_splits(o, x: Splits, highest, spec: KernelSpec):
    """Return `o` plus the acc of all splits, relative to the maximum `highest`."""
    splits = x.count

    def step(i, o):
        inside = in_tile(i, SPLITS_PER_STEP) < splits
        m = _load_maxima(x.at(x.m_ref, i, SPLITS_PER_STEP), inside)
        weight = spec.rescaling(m, highest)
        acc = memory.load(x.at(x.acc_ref, i, SPLITS_PER_STEP), inside, spec.value_dim)
        return o + jnp.sum(weight[:, None] * acc, axis=0)

    return lax.fori_loop(0, pl.cdiv(splits, SPLITS_PER_STEP), step, o)


def query_and_head(row, groups: int):
    """Return the query of a row, and the number of its head within the group."""
    return lax.div(row, np.int32(groups)), lax.rem(row, np.int32(groups))


def _load_maxima(ref, inside):
    return compat.triton().load(ref, mask=inside, other=-jnp.inf)


def decode(problem: Problem, tile: Tile, *, interpret: bool):
    """Return the output [B, T, N, V] and a `LogSum` of float32 [B, N, T]."""
    p, groups = problem, problem.groups
    spec, extras, table = make_spec(p, tile, streamed="kv", interpret=interpret, groups=groups)
    num_rows = p.q_len * groups
    block = memory.block_for(num_rows, tile.block_q)
    row_tiles = pl.cdiv(num_rows, block)
    programs = row_tiles * p.num_kv_heads * p.batch
    splits = ONE_WAVE // programs or pl.cdiv(MANY_PROGRAMS, programs)
    splits = max(1, min(splits, spec.kv.count // MIN_TILES_PER_SPLIT))
    width, value_width = memory.padded(p.head_dim), memory.padded(p.value_dim)
    # A query tile has the rows of `groups` row tiles, or all rows.
    tables = table_operands(extras, table, lambda r, i, k, b: (b, k, lax.div(r, np.int32(groups))))
    # [B, T, N, H] to [B, K, rows, H], which copies nothing for a single query.
    rows = p.query.reshape(p.batch, p.q_len, p.num_kv_heads, groups, p.head_dim).swapaxes(1, 2)
    rows = rows.reshape(p.batch, p.num_kv_heads, num_rows, p.head_dim)
    tile_of_rows = None, None, None, block

    def of_head(width):
        return pl.BlockSpec((None, p.kv_len, None, width), lambda r, i, k, b: (b, 0, k, 0))

    statistic = (p.batch, splits, p.num_kv_heads, num_rows)
    results = launch(
        pallas_flash_decode,
        [
            (rows, pl.BlockSpec((None, None, block, width), lambda r, i, k, b: (b, k, r, 0))),
            (p.key, of_head(width)),
            (p.value, of_head(value_width)),
            whole(p.scale[None]),
            *tables,
        ],
        [
            (
                *((*statistic, p.value_dim), jnp.float32),
                pl.BlockSpec((*tile_of_rows, value_width), lambda r, i, k, b: (b, i, k, r, 0)),
            ),
            *[(statistic, jnp.float32, pl.BlockSpec(tile_of_rows, lambda r, i, k, b: (b, i, k, r)))]
            * 2,
        ],
        spec=spec,
        tile=tile,
        grid=(row_tiles, splits, p.num_kv_heads, p.batch),
        groups=groups,
        splits=splits,
        num_rows=num_rows,
    )
    return _combine(p, results, tile, spec)


def _combine(p: Problem, splits_of_rows, tile: Tile, spec: KernelSpec):
    """Combine splits to the results of `decode`.

    `splits_of_rows` are acc [B, splits, K, rows, V], m and l [B, splits, K, rows].
    """
    _, splits, _, num_rows = splits_of_rows[1].shape
    block = (None, max(SPLITS_PER_STEP, pl.next_power_of_2(splits)), None, None)
    width, groups = memory.padded(p.value_dim), p.groups
    sinks = [] if p.sinks is None else [p.sinks]

    def of_row(r, k):
        query, head = query_and_head(r, groups)
        return query, k * groups + head

    acc, *rest = splits_of_rows
    of_rest = pl.BlockSpec(block, lambda r, k, b: (b, 0, k, r))
    of_o = pl.BlockSpec((None, None, None, width), lambda r, k, b: (b, *of_row(r, k), 0))
    of_statistic = pl.BlockSpec((None, None, 1), lambda r, k, b: (b, *of_row(r, k)[::-1]))
    results = launch(
        pallas_flash_decode_combine,
        [
            (acc, pl.BlockSpec((*block, width), lambda r, k, b: (b, 0, k, r, 0))),
            *((x, of_rest) for x in rest),
            *map(whole, sinks),
        ],
        [
            *[((*p.query.shape[:3], p.value_dim), p.dtype, of_o)] * spec.num_parts,
            *[((p.batch, p.num_heads, p.q_len), jnp.float32, of_statistic)] * spec.num_row_outputs,
        ],
        spec=spec,
        tile=tile,
        grid=(num_rows, p.num_kv_heads, p.batch),
        factor=rescaled(p.dropout, 1.0),
        groups=groups,
        splits=splits,
    )
    return spec.results_of_forward(results)
