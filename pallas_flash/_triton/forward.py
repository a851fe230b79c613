"""o and lse for one query tile, keys and values streamed past it.

    s    = q @ k.T                                                      [block_q, block_kv]
    m'   = max(m, c * rowmax(s))    c = scale * log2(e), so base 2      [block_q]
    p    = exp2(c * s - m')         alpha = exp2(m - m')
    l    = alpha * l + rowsum(p)
    acc  = alpha * acc + p @ v                                          [block_q, V]

    at the end    o = acc / l    lse_log2 = m + log2(l)

m and l are the online softmax of Milakov and Gimelshein (2018), the loop order that of
FlashAttention-2 (Dao, 2023).

Overlap. Taken in that order, the exponentials wait for q @ k.T and p @ v waits for them, so that
matrix and special-function units take turns. Over full tiles the loop therefore carries p one tile
late and issues p @ v of the tile before ahead of the softmax of this one: the compiler waits for a
product only where its result is used, which is after the next q @ k.T, and the exponentials run
under it. The sums are the same. p is carried in float32, because a loop-carried 16-bit operand
would be put in shared memory, and waited for.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._masks import in_tile, visit
from pallas_flash._problem import Problem
from pallas_flash._tiles import Tile
from pallas_flash._triton import common


def pallas_flash_forward(
    q_ref, k_ref, v_ref, scale_ref, *refs, static: common.Static, q_tile_of, overlap: bool
):
    """One query tile of one head."""
    *tables, o_ref, lse_ref = refs
    ranges, mask = common.load_tables(tables, static, flow=static.kv)
    b, block_q, block_kv = pl.program_id(3), static.q.block, static.kv.block
    q_pos = in_tile(q_tile_of(pl.program_id(1)), block_q)
    rows = common.existing(static.q, q_pos)
    q = common.load(q_ref, rows, static.head_dim)
    c = jnp.maximum(scale_ref[0], common.MIN_SCALE) * common.LOG2E

    def load_kv(ref, kv_tile, keys, width):
        return common.load(ref.at[pl.ds(kv_tile * block_kv, block_kv), :], keys, width)

    def scores(kv_tile, keys):
        return static.dot_t(q, load_kv(k_ref, kv_tile, keys, static.head_dim))

    def softmax(s, m, l):
        m_new = jnp.maximum(m, jnp.max(s, axis=1) * c)
        # A row that has seen nothing yet: -inf - -inf would be NaN, -inf - 0 gives the weight 0.
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        p = static.exp2_scaled(s, c, m_safe[:, None])
        alpha = static.exp2(m - m_safe)
        return p, alpha, m_new, alpha * l + jnp.sum(p, axis=1)

    def accumulate(acc, p, alpha, kv_tile, keys):
        v = load_kv(v_ref, kv_tile, keys, static.value_dim)
        return alpha[:, None] * acc + static.dot(p.astype(v.dtype), v)

    def step(kv_tile, masked, carry):
        acc, m, l = carry
        k_pos = in_tile(kv_tile, block_kv)
        keys = common.seen_keys(mask, b, q_pos, k_pos, rows) if masked else None
        s = scores(kv_tile, keys)
        if masked:
            s = jnp.where(mask.allowed(b, q_pos[:, None], k_pos[None, :]), s, -jnp.inf)
        p, alpha, m, l = softmax(s, m, l)
        return accumulate(acc, p, alpha, kv_tile, keys), m, l

    def overlapped(start, stop, carry):
        """`step` over the full tiles [start, stop), which must not be empty."""
        acc, m, l = carry
        p, alpha, m, l = softmax(scores(start, None), m, l)

        def late(kv_tile, carry):
            p, alpha, acc, m, l = carry
            s = scores(kv_tile, None)
            acc = accumulate(acc, p, alpha, kv_tile - 1, None)
            p, alpha, m, l = softmax(s, m, l)
            return p, alpha, acc, m, l

        p, alpha, acc, m, l = lax.fori_loop(start + 1, stop, late, (p, alpha, acc, m, l))
        return accumulate(acc, p, alpha, stop - 1, None), m, l

    def full_tiles(start, stop, carry):
        if not static.edges:
            return overlapped(start, stop, carry)
        return lax.cond(stop > start, lambda x: overlapped(start, stop, x), lambda x: x, carry)

    carry = (
        jnp.zeros((block_q, v_ref.shape[-1]), jnp.float32),
        jnp.full((block_q,), -jnp.inf, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
    )
    acc, m, l = visit(
        ranges, step, carry, edges=static.edges, full_tiles=full_tiles if overlap else None
    )
    alive = l > 0.0
    l = jnp.where(alive, l, 1.0)
    common.store(o_ref, acc * (1.0 / l)[:, None], rows, static.value_dim)
    common.store_row(lse_ref, jnp.where(alive, m + jnp.log2(l), -jnp.inf), rows)


def forward(problem: Problem, tile: Tile, *, overlap: bool, interpret: bool):
    """The output [B, T, N, V] and `lse_log2` float32 [B, N, T]."""
    p = problem
    static, mask, ranges = common.make_static(p, tile, flow="kv", interpret=interpret)
    layout = common.QueryTiles(p, static, latest_first=mask.grows)
    tables, table_specs = common.tables(mask, ranges, layout.tile_of)
    return common.call(
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
        out_specs=[layout.rows(p.value_dim), layout.row_statistic()],
        out_shapes=[
            ((*p.query.shape[:3], p.value_dim), p.dtype),
            ((p.batch, p.num_heads, p.q_len), jnp.float32),
        ],
        q_tile_of=layout.tile_of,
        overlap=overlap,
    )
