"""o and lse for one query tile, keys and values streamed past it.

    s    = q @ k.T    where there is more than a scale, see _scores     [block_q, block_kv]
    m'   = max(m, c * rowmax(s))    c = scale * log2(e), so base 2      [block_q]
    p    = exp2(c * s - m')         alpha = exp2(m - m')
    l    = alpha * l + rowsum(p)    in parts, see PARTS
    acc  = alpha * acc + dropout(p) @ v                                 [block_q, V]

    at the end    o = acc / l    lse_log2 = m + log2(l)    with a sink in both, if there is one

Where scores may be large, m is the natural maximum of s, and stays apart from log2(l); see
`LogSum`.

m and l are the online softmax of Milakov and Gimelshein (2018), the loop order that of
FlashAttention-2 (Dao, 2023).
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash._dropout import rescaled
from pallas_flash._problem import Problem
from pallas_flash._tiling.sizes import Tile
from pallas_flash._triton import common
from pallas_flash._visits import in_tile, visit

# Sums that are kept of a row of p, added up after the loop. In the accumulators of the matrix
# units a thread holds two of every 8 numbers of a row: so many sums need no exchange of threads.
PARTS = 8


def attend(rows: common.Rows, k_ref, v_ref, scale, tiles, kept_of, extras: common.Extras, static):
    """What one program finds for its rows in a range of tiles: acc [rows, V], m and l [rows].

    `kept_of` takes the number and the positions of a key tile to what dropout keeps in it.
    """
    mask, block_kv = extras.mask, static.kv.block

    def step(kv_tile, masked, carry):
        acc, m, l = carry
        k_pos = in_tile(kv_tile, block_kv)
        at = rows.at(k_pos)
        keys = None
        if static.unseen and masked:
            keys = common.seen_keys(mask, rows.b, rows.h, rows.pos, k_pos, rows.exist)
        span = pl.ds(kv_tile * block_kv, block_kv)
        k = common.load(k_ref.at[span, :], keys, static.head_dim)
        # Where this stands decides how many registers it takes; see docs/performance.md.
        keep = kept_of(kv_tile, k_pos)
        s, c = static.logits(extras, static.dot_t(rows.q, k), scale, *at)
        if masked:
            s = jnp.where(mask.allowed(*at), s, -jnp.inf)
        m_new = static.fence(jnp.maximum(m, static.top(s, c)), kv_tile, static.kv)
        v = common.load(v_ref.at[span, :], keys, static.value_dim)
        # A row that has seen nothing yet: -inf - -inf would be NaN, -inf - 0 gives weight 0.
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        p = static.weights(s, c, m_safe[:, None])
        alpha = static.shrink(m, m_safe, static.exp2)
        l = alpha[:, None] * l + jnp.sum(p.reshape(len(p), -1, PARTS), axis=1)
        p = static.drop(keep, p)
        acc = alpha[:, None] * acc + static.dot(p.astype(v.dtype), v)
        return acc, m_new, l

    start = (
        jnp.zeros((len(rows.q), v_ref.shape[-1]), jnp.float32),
        jnp.full((len(rows.q),), -jnp.inf, jnp.float32),
        jnp.zeros((len(rows.q), PARTS), jnp.float32),
    )
    acc, m, l = visit(tiles, step, start, static.edges)
    return acc, m, jnp.sum(l, axis=1)


def pallas_flash_forward(q_ref, k_ref, v_ref, scale_ref, *refs, static: common.Static, here):
    """One query tile of one head."""
    n = static.num_statistics
    tables, o_ref, statistic_refs = refs[: -n - 1], refs[-n - 1], refs[-n:]
    tiles, extras = common.load_tables(tables, static, flow=static.kv)
    b, h, q_tile = here()
    rows = static.rows(b, h, q_tile, q_ref)

    def kept_of(kv_tile, k_pos):
        return static.kept_in_tile(extras, b, h, q_tile, kv_tile)

    acc, m, l = attend(rows, k_ref, v_ref, scale_ref[0], tiles(0), kept_of, extras, static)
    alive = l > 0.0
    l, factor = jnp.where(alive, l, 1.0), 1.0
    if static.large or extras.sinks is not None:
        m = jnp.where(alive, m, 0.0)
    if extras.sinks is not None:
        m, l, factor = static.with_sink(m, l, extras.sinks[h])
    weight = rescaled(extras.dropout, factor / l)
    common.store(o_ref, acc * weight[:, None], rows.exist, static.value_dim)
    for ref, x in zip(statistic_refs, static.statistics(m, l, alive), strict=True):
        common.store_row(ref, x, rows.exist)


def forward(problem: Problem, tile: Tile, *, interpret: bool):
    """The output [B, T, N, V] and a `LogSum` of float32 [B, N, T]."""
    p = problem
    static, extras, table = common.make_static(p, tile, flow="kv", interpret=interpret)
    layout = common.QueryTiles(p, static, extras.mask)
    tables, table_specs = layout.operands(extras, table)
    o, *log_sum = common.call(
        pallas_flash_forward,
        p.query,
        p.key,
        p.value,
        p.scale[None],
        *tables,
        static=static,
        tile=tile,
        grid=layout.grid,
        in_specs=[
            layout.rows(p.head_dim),
            layout.keys(p.head_dim),
            layout.keys(p.value_dim),
            common.whole(p.scale[None]),
            *table_specs,
        ],
        out_specs=[layout.rows(p.value_dim), *[layout.row_statistic()] * static.num_statistics],
        out_shapes=[
            ((*p.query.shape[:3], p.value_dim), p.dtype),
            *[((p.batch, p.num_heads, p.q_len), jnp.float32)] * static.num_statistics,
        ],
        here=layout.here,
    )
    return o, static.log_sum(log_sum)[0]
