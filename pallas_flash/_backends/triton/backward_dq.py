"""dq of a resident query tile, with keys and values streamed.

    s   = q @ k.T                   dp = do @ v.T                       [block_q, block_kv]
    p   = exp2(c * s - lse_log2)    c = scale * log2(e)
    ds  = p * (dropout(dp) - delta)     through the derivative of the scores, see _problem.scores
    acc = acc + ds @ k                                                  [block_q, H]

    at the end    dq = scale * acc    and, for the gradient of the scale, dscale = rowsum(q * acc)

dp is issued before the exponentials, which run while the matrix units compute it.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash._backends.triton import memory, visibility
from pallas_flash._backends.triton.grid import QueryTiles
from pallas_flash._backends.triton.launch import launch, load_tables, whole
from pallas_flash._backends.triton.spec import KernelSpec, make_spec, softmax_shift
from pallas_flash._problem.dropout import drop, rescaled, shrunk
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import Tile
from pallas_flash._problem.traversal import in_tile, visit


def pallas_flash_dq(
    q_ref,
    k_ref,
    v_ref,
    scale_ref,
    do_ref,
    *refs,
    spec: KernelSpec,
    here,
    want_scale: bool,
):
    """Compute one query tile of one head."""
    log_sum_refs, (delta_ref, *refs) = spec.log_sum(refs)
    *tables, dq_ref = refs[:-1] if want_scale else refs
    tiles, extras = load_tables(tables, spec, streamed=spec.kv)
    mask, block_kv, scale = extras.mask, spec.kv.block, scale_ref[0]
    b, h, q_tile = here()
    rows = spec.rows(b, h, q_tile, q_ref)
    do = memory.load(do_ref, rows.valid, spec.value_dim)
    log_sum, delta = jax.tree.map(
        lambda ref: memory.load_row(ref, rows.valid)[:, None], (log_sum_refs, delta_ref)
    )
    delta = shrunk(extras.dropout, delta)
    shift = softmax_shift(extras, log_sum)

    def step(kv_tile, masked, acc):
        k_pos = in_tile(kv_tile, block_kv)
        at = rows.indices(k_pos)
        keys = visibility.keys_to_load(spec, mask, rows, k_pos, masked)
        span = pl.ds(kv_tile * block_kv, block_kv)
        k = memory.load(k_ref.at[span, :], keys, spec.head_dim)
        v = memory.load(v_ref.at[span, :], keys, spec.value_dim)
        s, c, pull = spec.logits_vjp(extras, spec.dot_t(rows.q, k), scale, *at)
        dp = spec.dot_t(do, v)
        dp = drop(spec.kept_in_tile(extras, b, h, q_tile, kv_tile), dp)
        ds = pull(spec.probabilities(s, c, shift) * (dp - delta))
        if masked:
            ds = jnp.where(mask.allowed(*at), ds, 0.0)
        return acc + spec.dot(ds.astype(k.dtype), k)

    acc = visit(tiles(0), step, jnp.zeros(rows.q.shape, jnp.float32), spec.sparsity)
    acc = rescaled(extras.dropout, acc)
    memory.store(dq_ref, acc * scale, rows.valid, spec.head_dim)
    if want_scale:
        # A row without keys may hold NaN, so it is left out of the product with its zero sum.
        has_keys = log_sum.l_log2 > -jnp.inf
        dscale = jnp.where(has_keys, rows.q.astype(jnp.float32) * acc, 0.0)
        memory.store_row(refs[-1], jnp.sum(dscale, axis=1), rows.valid)


def dq(problem: Problem, do, log_sum, delta, tile: Tile, *, want_scale: bool, interpret: bool):
    """Return dq [B, T, N, H] and the gradient of the scale by rows, float32 [B, N, T] or None."""
    p = problem
    spec, extras, table = make_spec(p, tile, streamed="kv", interpret=interpret)
    layout = QueryTiles(p, spec, extras.mask)
    statistic = layout.row_statistic()
    results = launch(
        pallas_flash_dq,
        [
            (p.query, layout.rows(p.head_dim)),
            (p.key, layout.keys(p.head_dim)),
            (p.value, layout.keys(p.value_dim)),
            whole(p.scale[None]),
            (do, layout.rows(p.value_dim)),
            *((x, statistic) for x in (*jax.tree.leaves(log_sum), delta)),
            *layout.operands(extras, table),
        ],
        [
            (p.query.shape, p.dtype, layout.rows(p.head_dim)),
            *[(delta.shape, jnp.float32, statistic)] * want_scale,
        ],
        spec=spec,
        tile=tile,
        grid=layout.grid,
        here=layout.here,
        want_scale=want_scale,
    )
    return (*results, None)[:2]
