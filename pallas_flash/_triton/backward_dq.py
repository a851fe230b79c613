"""dq for one query tile, keys and values streamed past it.

    s   = q @ k.T                   dp = do @ v.T                       [block_q, block_kv]
    p   = exp2(c * s - lse_log2)    c = scale * log2(e)
    ds  = p * (dropout(dp) - delta)     through the derivative of the scores, see _scores
    acc = acc + ds @ k                                                  [block_q, H]

    at the end    dq = scale * acc    and, where it is asked for, dscale = rowsum(q * acc)

dp is computed before the exponentials, which then run while the matrix units are busy with it.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash._dropout import drop, rescaled, shrunk
from pallas_flash._problem import Problem
from pallas_flash._tiling.sizes import Tile
from pallas_flash._triton import common
from pallas_flash._visits import in_tile, visit


def pallas_flash_dq(
    q_ref,
    k_ref,
    v_ref,
    scale_ref,
    do_ref,
    *refs,
    static: common.Static,
    here,
    want_scale: bool,
):
    """One query tile of one head."""
    log_sum_refs, (delta_ref, *refs) = static.log_sum(refs)
    *tables, dq_ref = refs[:-1] if want_scale else refs
    tiles, extras = common.load_tables(tables, static, flow=static.kv)
    mask, block_kv, scale = extras.mask, static.kv.block, scale_ref[0]
    b, h, q_tile = here()
    rows = static.rows(b, h, q_tile, q_ref)
    do = common.load(do_ref, rows.exist, static.value_dim)
    log_sum, delta = jax.tree.map(
        lambda ref: common.load_row(ref, rows.exist)[:, None], (log_sum_refs, delta_ref)
    )
    delta = shrunk(extras.dropout, delta)
    shift = common.subtracted(extras, log_sum)

    def step(kv_tile, masked, acc):
        k_pos = in_tile(kv_tile, block_kv)
        at = rows.at(k_pos)
        keys = None
        if static.unseen and masked:
            keys = common.seen_keys(mask, rows.b, rows.h, rows.pos, k_pos, rows.exist)
        span = pl.ds(kv_tile * block_kv, block_kv)
        k = common.load(k_ref.at[span, :], keys, static.head_dim)
        v = common.load(v_ref.at[span, :], keys, static.value_dim)
        s, c, pull = static.logits_vjp(extras, static.dot_t(rows.q, k), scale, *at)
        dp = static.dot_t(do, v)
        dp = drop(static.kept_in_tile(extras, b, h, q_tile, kv_tile), dp)
        ds = pull(static.probabilities(s, c, shift) * (dp - delta))
        if masked:
            ds = jnp.where(mask.allowed(*at), ds, 0.0)
        return acc + static.dot(ds.astype(k.dtype), k)

    acc = visit(tiles(0), step, jnp.zeros(rows.q.shape, jnp.float32), static.edges)
    acc = rescaled(extras.dropout, acc)
    common.store(dq_ref, acc * scale, rows.exist, static.head_dim)
    if want_scale:
        # A row that sees nothing may hold anything: its product with the zero sum is not taken.
        sees = log_sum.l_log2 > -jnp.inf
        dscale = jnp.where(sees, rows.q.astype(jnp.float32) * acc, 0.0)
        common.store_row(refs[-1], jnp.sum(dscale, axis=1), rows.exist)


def dq(problem: Problem, do, log_sum, delta, tile: Tile, *, want_scale: bool, interpret: bool):
    """Dq [B, T, N, H] and float32 [B, N, T], whose sum is the gradient of the scale, or None."""
    p = problem
    static, extras, table = common.make_static(p, tile, flow="kv", interpret=interpret)
    layout = common.QueryTiles(p, static, extras.mask)
    tables, table_specs = layout.operands(extras, table)
    out = [(layout.rows(p.head_dim), (p.query.shape, p.dtype))]
    if want_scale:
        out.append((layout.row_statistic(), (delta.shape, jnp.float32)))
    results = common.call(
        pallas_flash_dq,
        p.query,
        p.key,
        p.value,
        p.scale[None],
        do,
        *jax.tree.leaves(log_sum),
        delta,
        *tables,
        static=static,
        tile=tile,
        grid=layout.grid,
        in_specs=[
            layout.rows(p.head_dim),
            layout.keys(p.head_dim),
            layout.keys(p.value_dim),
            common.whole(p.scale[None]),
            layout.rows(p.value_dim),
            *[layout.row_statistic()] * (static.num_statistics + 1),
            *table_specs,
        ],
        out_specs=[spec for spec, _ in out],
        out_shapes=[shape for _, shape in out],
        here=layout.here,
        want_scale=want_scale,
    )
    return (*results, None)[:2]
