"""dbias for one tile of the bias; what the bias broadcasts over streams past it.

    s   = q @ k.T                   dp = do @ v.T                       [block_q, block_kv]
    p   = exp2(c * s - lse_log2)    c = scale * log2(e), see _scores for what else is in s
    ds  = p * (dropout(dp) - delta) through the derivative of the scores
    acc = acc + ds                  summed along the axes over which the bias broadcasts

A pass of its own, because dk and dq need each ds once and in an order of their own: here the tile
of the sum stays, so that it is stored once, without atomics and without a copy for each example or
head. One loop goes over all pairs of an example, a head, a query tile and a key tile that share it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._dropout import drop, rescaled, shrunk
from pallas_flash._problem import Problem
from pallas_flash._tiling.sizes import Tile
from pallas_flash._triton import common
from pallas_flash._visits import in_tile


def pallas_flash_dbias(
    q_ref,
    k_ref,
    v_ref,
    scale_ref,
    do_ref,
    *refs,
    static: common.Static,
    counts: tuple[int, int, int, int],
    broadcast: tuple[bool, bool, bool, bool],
):
    """One tile of dbias.

    `counts` are the examples, heads, query tiles and key tiles; `broadcast` says over which of them
    the bias broadcasts.
    """
    log_sum_refs, (delta_ref, *refs) = static.log_sum(refs)
    *refs, dbias_ref = refs
    seen_ref = refs.pop(0) if static.masked else None
    extras = static.load_extras(refs)
    mask, block_q, block_kv = extras.mask, static.q.block, static.kv.block
    groups = q_ref.shape[2] // k_ref.shape[2]
    scale = scale_ref[0]
    grid = [pl.program_id(3 - axis) for axis in range(4)]

    def tile(b, h, q_tile, kv_tile):
        q_pos, k_pos = in_tile(q_tile, block_q), in_tile(kv_tile, block_kv)
        exist = common.existing(static.q, q_pos)
        rows, keys = exist, common.existing(static.kv, k_pos)
        if static.unseen:
            rows, keys = (
                common.seen_queries(mask, b, h, q_pos, k_pos, keys),
                common.seen_keys(mask, b, h, q_pos, k_pos, rows),
            )
        at = b, h, q_pos[:, None], k_pos[None, :]
        q_span, kv_span = pl.ds(q_tile * block_q, block_q), pl.ds(kv_tile * block_kv, block_kv)
        q = common.load(q_ref.at[b, q_span, h, :], rows, static.head_dim)
        k = common.load(k_ref.at[b, kv_span, h // groups, :], keys, static.head_dim)
        s, c, pull = static.logits_vjp(extras, static.dot_t(q, k), scale, *at)
        do = common.load(do_ref.at[b, q_span, h, :], rows, static.value_dim)
        v = common.load(v_ref.at[b, kv_span, h // groups, :], keys, static.value_dim)
        dp = static.dot_t(do, v)
        dp = drop(static.kept_in_tile(extras, b, h, q_tile, kv_tile), dp)
        log_sum, delta = jax.tree.map(
            lambda ref: common.load_row(ref.at[b, h, q_span], exist)[:, None],
            (log_sum_refs, delta_ref),
        )
        delta = shrunk(extras.dropout, delta)
        p = static.probabilities(s, c, common.subtracted(extras, log_sum))
        ds = pull(p * (dp - delta))
        if static.masked:
            ds = jnp.where(mask.allowed(*at), ds, 0.0)
        for axis in (0, 1):
            if broadcast[2 + axis]:
                ds = jnp.sum(ds, axis=axis, keepdims=True)
        return ds

    def step(n, acc):
        index = []
        # The loop's number counts the broadcast axes, key tiles fastest; the grid the others.
        for axis in (3, 2, 1, 0):
            if broadcast[axis]:
                count = jnp.int32(counts[axis])
                index.insert(0, lax.rem(n, count))
                n = lax.div(n, count)
            else:
                index.insert(0, grid[axis])
        if seen_ref is None:
            return acc + tile(*index)
        at = (0 if size == 1 else i for size, i in zip(seen_ref.shape, index, strict=True))
        return lax.cond(seen_ref[*at] > 0, lambda acc: acc + tile(*index), lambda acc: acc, acc)

    shape = tuple(
        1 if one else block for one, block in zip(broadcast[2:], (block_q, block_kv), strict=True)
    )
    total = 1
    for count, one in zip(counts, broadcast, strict=True):
        total *= count if one else 1
    acc = lax.fori_loop(0, total, step, jnp.zeros(shape, jnp.float32))
    acc = rescaled(extras.dropout, acc)
    rows, keys = (
        None if one else common.existing(tiling, in_tile(grid[axis], tiling.block))
        for one, tiling, axis in ((broadcast[2], static.q, 2), (broadcast[3], static.kv, 3))
    )
    common.store_pairs(dbias_ref, acc, rows, keys)


def _tile(dq: Tile) -> Tile:
    """64 x 64 or less, of no more shared memory than dq's tile, which fits on the GPU.

    dq keeps q and do there and a pair of k and v for each stage; here all four flow.
    """
    block_q, block_kv = min(64, dq.block_q), min(64, dq.block_kv)
    room = dq.block_q + dq.num_stages * dq.block_kv
    return Tile(block_q, block_kv, 4, 2 if 2 * (block_q + block_kv) <= room else 1)


def dbias(problem: Problem, do, log_sum, delta, dq: Tile, *, interpret: bool):
    """The gradient of the bias, in its shape and dtype; `dq` is the tile of the pass for dq."""
    p = problem
    tile = _tile(dq)
    static, extras, seen = common.make_static(p, tile, flow="both", interpret=interpret)
    rows = (*jax.tree.leaves(log_sum), delta)
    arrays = () if seen is None else (seen,)
    arrays += tuple(common.leaves(extras))
    counts = (p.batch, p.num_heads, static.q.count, static.kv.count)
    broadcast = tuple(n == 1 for n in p.bias.shape)

    def wide(x):
        return pl.BlockSpec((*x.shape[:3], common.padded(x.shape[3])), lambda *_: (0,) * 4)

    block = (
        None,
        None,
        1 if broadcast[2] else static.q.block,
        1 if broadcast[3] else static.kv.block,
    )
    [out] = common.call(
        pallas_flash_dbias,
        p.query,
        p.key,
        p.value,
        p.scale[None],
        do,
        *rows,
        *arrays,
        static=static,
        tile=tile,
        grid=tuple(1 if one else n for n, one in zip(counts, broadcast, strict=True))[::-1],
        in_specs=[
            wide(p.query),
            wide(p.key),
            wide(p.value),
            common.whole(p.scale[None]),
            wide(do),
            *map(common.whole, (*rows, *arrays)),
        ],
        out_specs=[pl.BlockSpec(block, lambda j, i, h, b: (b, h, i, j))],
        out_shapes=[(p.bias.shape, p.bias.dtype)],
        counts=counts,
        broadcast=broadcast,
    )
    return out
