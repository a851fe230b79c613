"""o and lse where there are few queries, as in decoding: limited by reading keys and values.

    rows    the queries of all heads that share keys and values, in one tile: keys are read once
            for every 64 of them (32 at head size 256), and not once a head
    parts   shares of the key tiles, for programs of their own: a few heads alone would leave most
            of a GPU idle

A part gives acc, m and l of its online softmax as they are, see forward.py. They join exactly:

    m = max_i m_i         w_i = exp2(m_i - m)
    l = sum_i w_i l_i     o = sum_i w_i acc_i / l     lse_log2 = m + log2(l), or both apart

Splitting the keys is Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023).
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash import _compat
from pallas_flash._dropout import rescaled
from pallas_flash._problem import Problem
from pallas_flash._tiling.sizes import Tile
from pallas_flash._triton import common
from pallas_flash._triton.forward import attend
from pallas_flash._visits import in_tile, share

# How many programs are to run. Either all at once, which two on each of an H200's 132 cores do, and
# that is enough to keep its memory busy; or, where the heads alone are more, so many that the last
# ones to end are few (timed, see docs/performance.md). `jax.vmap` comes later: its axis is not
# known here.
AT_ONCE, MANY = 256, 2048
# Fewer are not worth a part's results.
TILES_OF_A_PART = 4

# The join adds so many parts in a step.
PARTS_AT_ONCE = 16


def pallas_flash_decode(
    q_ref,
    k_ref,
    v_ref,
    scale_ref,
    *refs,
    static: common.Static,
    groups: int,
    parts: int,
    num_rows: int,
):
    """One part of the keys for one tile of rows: `groups` heads for each query."""
    *tables, acc_ref, m_ref, l_ref = refs
    tiles, extras = common.load_tables(tables, static, flow=static.kv)
    block = q_ref.shape[0]
    row = in_tile(pl.program_id(0), block)
    exist = row < num_rows if num_rows % block else None
    q = common.load(q_ref, exist, static.head_dim)
    # Rows beyond the last one see what it sees, so that every index is inside.
    row = lax.min(row, np.int32(num_rows - 1))
    query, head = _query_and_head(row, groups)
    rows = common.Rows(q, pl.program_id(3), pl.program_id(2) * groups + head, query, exist)
    mine = share(tiles(0), pl.program_id(1), parts, static.edges)

    def kept_of(kv_tile, k_pos):
        return static.kept(extras, *rows.at(k_pos))

    acc, m, l = attend(rows, k_ref, v_ref, scale_ref[0], mine, kept_of, extras, static)
    common.store(acc_ref, acc, exist, static.value_dim)
    common.store_row(m_ref, m, exist)
    common.store_row(l_ref, l, exist)


def pallas_flash_decode_join(
    acc_ref,
    m_ref,
    l_ref,
    *refs,
    static: common.Static,
    factor: float,
    groups: int,
    parts: int,
):
    """One row of the output, `factor` times what the parts join to."""
    n = static.num_statistics
    sinks, o_ref, statistic_refs = refs[: -n - 1], refs[-n - 1], refs[-n:]
    part = lax.iota(jnp.int32, m_ref.shape[0])
    m = _load_maxima(m_ref, part < parts)
    l = common.load_row(l_ref, part < parts)
    highest = jnp.max(m)
    alive = highest > -jnp.inf
    # A sink is one more part: a key with the value 0.
    head = pl.program_id(1) * groups + _query_and_head(pl.program_id(0), groups)[1]
    sinks = [ref[head] if static.large else ref[head] * common.LOG2E for ref in sinks]
    highest = jnp.where(alive, functools.reduce(jnp.maximum, sinks, highest), 0.0)
    total = jnp.sum(static.shrink(m, highest) * l)
    total += sum(static.shrink(x, highest) for x in sinks)
    total = jnp.where(alive, total, 1.0)

    def step(i, o):
        span, part = pl.ds(i * PARTS_AT_ONCE, PARTS_AT_ONCE), in_tile(i, PARTS_AT_ONCE)
        weight = static.shrink(_load_maxima(m_ref.at[span], part < parts), highest)
        acc = common.load(acc_ref.at[span, :], part < parts, static.value_dim)
        return o + jnp.sum(weight[:, None] * acc, axis=0)

    o = jnp.zeros(o_ref.shape, jnp.float32)
    o = lax.fori_loop(0, pl.cdiv(parts, PARTS_AT_ONCE), step, o) * (factor / total)
    column = lax.iota(jnp.int32, len(o))
    common.store_row(o_ref, o, None if len(o) == static.value_dim else column < static.value_dim)
    for ref, x in zip(statistic_refs, static.statistics(highest, total, alive), strict=True):
        common.store_row(ref, x[None], None)


def _query_and_head(row, groups: int):
    """The query of a row, and which of the heads in its group it has."""
    return lax.div(row, np.int32(groups)), lax.rem(row, np.int32(groups))


def _load_maxima(ref, inside):
    return _compat.triton().load(ref, mask=inside, other=-jnp.inf)


def decode(problem: Problem, tile: Tile, *, interpret: bool):
    """The output [B, T, N, V] and a `LogSum` of float32 [B, N, T]."""
    p, groups = problem, problem.groups
    static, extras, table = common.make_static(
        p, tile, flow="kv", interpret=interpret, groups=groups
    )
    num_rows = p.q_len * groups
    block = common.block_for(num_rows, tile.block_q)
    row_tiles = pl.cdiv(num_rows, block)
    programs = row_tiles * p.num_kv_heads * p.batch
    parts = AT_ONCE // programs or pl.cdiv(MANY, programs)
    parts = max(1, min(parts, static.kv.count // TILES_OF_A_PART))
    width, value_width = common.padded(p.head_dim), common.padded(p.value_dim)
    # A query tile has the rows of `groups` row tiles, or all rows.
    tables, table_specs = common.operands(
        extras, table, lambda r, i, k, b: (b, k, lax.div(r, np.int32(groups)))
    )
    # [B, T, N, H] to [B, K, rows, H]: no copy with one query.
    rows = p.query.reshape(p.batch, p.q_len, p.num_kv_heads, groups, p.head_dim).swapaxes(1, 2)
    statistic = (p.batch, parts, p.num_kv_heads, num_rows)
    results = common.call(
        pallas_flash_decode,
        rows.reshape(p.batch, p.num_kv_heads, num_rows, p.head_dim),
        p.key,
        p.value,
        p.scale[None],
        *tables,
        static=static,
        tile=tile,
        grid=(row_tiles, parts, p.num_kv_heads, p.batch),
        in_specs=[
            pl.BlockSpec((None, None, block, width), lambda r, i, k, b: (b, k, r, 0)),
            pl.BlockSpec((None, p.kv_len, None, width), lambda r, i, k, b: (b, 0, k, 0)),
            pl.BlockSpec((None, p.kv_len, None, value_width), lambda r, i, k, b: (b, 0, k, 0)),
            common.whole(p.scale[None]),
            *table_specs,
        ],
        out_specs=[
            pl.BlockSpec(
                (None, None, None, block, value_width), lambda r, i, k, b: (b, i, k, r, 0)
            ),
            *[pl.BlockSpec((None, None, None, block), lambda r, i, k, b: (b, i, k, r))] * 2,
        ],
        out_shapes=[((*statistic, p.value_dim), jnp.float32), *[(statistic, jnp.float32)] * 2],
        groups=groups,
        parts=parts,
        num_rows=num_rows,
    )
    return _join(p, results, tile, static)


def _join(p: Problem, results, tile: Tile, static: common.Static):
    """What `decode` returns, from acc [B, parts, K, rows, V], m and l [B, parts, K, rows]."""
    _, parts, _, num_rows = results[1].shape
    block = (None, max(PARTS_AT_ONCE, pl.next_power_of_2(parts)), None, None)
    width, groups = common.padded(p.value_dim), p.groups
    sinks = [] if p.sinks is None else [p.sinks]

    def query_and_head(r, k):
        query, head = _query_and_head(r, groups)
        return query, k * groups + head

    o, *log_sum = common.call(
        pallas_flash_decode_join,
        *results,
        *sinks,
        static=static,
        tile=tile,
        grid=(num_rows, p.num_kv_heads, p.batch),
        in_specs=[
            pl.BlockSpec((*block, width), lambda r, k, b: (b, 0, k, r, 0)),
            *[pl.BlockSpec(block, lambda r, k, b: (b, 0, k, r))] * 2,
            *map(common.whole, sinks),
        ],
        out_specs=[
            pl.BlockSpec(
                (None, None, None, width),
                lambda r, k, b: (b, *query_and_head(r, k), 0),
            ),
            *[pl.BlockSpec((None, None, 1), lambda r, k, b: (b, *query_and_head(r, k)[::-1]))]
            * static.num_statistics,
        ],
        out_shapes=[
            ((*p.query.shape[:3], p.value_dim), p.dtype),
            *[((p.batch, p.num_heads, p.q_len), jnp.float32)] * static.num_statistics,
        ],
        factor=rescaled(p.dropout, 1.0),
        groups=groups,
        parts=parts,
    )
    return o, static.log_sum(log_sum)[0]
