"""dbias of a resident tile of the bias; the axes over which the bias broadcasts are streamed.

    s   = q @ k.T                   dp = do @ v.T                       [block_q, block_kv]
    p   = exp2(c * s - lse_log2)    c = scale * log2(e); _scores has the other terms of s
    ds  = p * (dropout(dp) - delta) through the derivative of the scores
    acc = acc + ds                  summed along the axes over which the bias broadcasts

This is a pass of its own, because dk and dq need each ds once and in their own order. Here the tile
of the sum is resident, so that it is stored once, without atomics and without a copy for each batch
element or head. One loop goes over all batch elements, heads, query tiles and key tiles that share
the tile.
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
    spec: common.KernelSpec,
    counts: tuple[int, int, int, int],
    broadcast: tuple[bool, bool, bool, bool],
):
    """Compute one tile of dbias.

    `counts` are the numbers of batch elements, heads, query tiles and key tiles. `broadcast` says
    over which of these axes the bias broadcasts.
    """
    log_sum_refs, (delta_ref, *refs) = spec.log_sum(refs)
    *refs, dbias_ref = refs
    some_ref = refs.pop(0) if spec.masked else None
    extras = spec.load_extras(refs)
    mask, block_q, block_kv = extras.mask, spec.q.block, spec.kv.block
    groups = q_ref.shape[2] // k_ref.shape[2]
    scale = scale_ref[0]
    grid = [pl.program_id(3 - axis) for axis in range(4)]

    def tile(b, h, q_tile, kv_tile):
        q_pos, k_pos = in_tile(q_tile, block_q), in_tile(kv_tile, block_kv)
        exist = common.valid_positions(spec.q, q_pos)
        rows, keys = exist, common.valid_positions(spec.kv, k_pos)
        if spec.mask_loads:
            rows, keys = (
                common.queries_with_keys(mask, b, h, q_pos, k_pos, keys),
                common.visible_keys(mask, b, h, q_pos, k_pos, rows),
            )
        at = b, h, q_pos[:, None], k_pos[None, :]
        q_span, kv_span = pl.ds(q_tile * block_q, block_q), pl.ds(kv_tile * block_kv, block_kv)
        q = common.load(q_ref.at[b, q_span, h, :], rows, spec.head_dim)
        k = common.load(k_ref.at[b, kv_span, h // groups, :], keys, spec.head_dim)
        s, c, pull = spec.logits_vjp(extras, spec.dot_t(q, k), scale, *at)
        do = common.load(do_ref.at[b, q_span, h, :], rows, spec.value_dim)
        v = common.load(v_ref.at[b, kv_span, h // groups, :], keys, spec.value_dim)
        dp = spec.dot_t(do, v)
        dp = drop(spec.kept_in_tile(extras, b, h, q_tile, kv_tile), dp)
        log_sum, delta = jax.tree.map(
            lambda ref: common.load_row(ref.at[b, h, q_span], exist)[:, None],
            (log_sum_refs, delta_ref),
        )
        delta = shrunk(extras.dropout, delta)
        p = spec.probabilities(s, c, common.softmax_shift(extras, log_sum))
        ds = pull(p * (dp - delta))
        if spec.masked:
            ds = jnp.where(mask.allowed(*at), ds, 0.0)
        for axis in (0, 1):
            if broadcast[2 + axis]:
                ds = jnp.sum(ds, axis=axis, keepdims=True)
        return ds

    def step(n, acc):
        index = []
        # The loop counts the broadcast axes, key tiles fastest. The grid counts the other axes.
        for axis in (3, 2, 1, 0):
            if broadcast[axis]:
                count = jnp.int32(counts[axis])
                index.insert(0, lax.rem(n, count))
                n = lax.div(n, count)
            else:
                index.insert(0, grid[axis])
        if some_ref is None:
            return acc + tile(*index)
        at = (0 if size == 1 else i for size, i in zip(some_ref.shape, index, strict=True))
        return lax.cond(some_ref[*at] > 0, lambda acc: acc + tile(*index), lambda acc: acc, acc)

    shape = tuple(
        1 if one else block for one, block in zip(broadcast[2:], (block_q, block_kv), strict=True)
    )
    total = 1
    for count, one in zip(counts, broadcast, strict=True):
        total *= count if one else 1
    acc = lax.fori_loop(0, total, step, jnp.zeros(shape, jnp.float32))
    acc = rescaled(extras.dropout, acc)
    rows, keys = (
        None if one else common.valid_positions(tiling, in_tile(grid[axis], tiling.block))
        for one, tiling, axis in ((broadcast[2], spec.q, 2), (broadcast[3], spec.kv, 3))
    )
    common.store_pairs(dbias_ref, acc, rows, keys)


def _tile(dq: Tile) -> Tile:
    """Return a tile of at most 64 x 64 that needs no more shared memory than dq's tile.

    dq has q and do resident and streams k and v. Here all four are streamed.
    """
    block_q, block_kv = min(64, dq.block_q), min(64, dq.block_kv)
    room = dq.block_q + dq.num_stages * dq.block_kv
    return Tile(block_q, block_kv, 4, 2 if 2 * (block_q + block_kv) <= room else 1)


def dbias(problem: Problem, do, log_sum, delta, dq: Tile, *, interpret: bool):
    """Return the gradient of the bias, in its shape and dtype. `dq` is the tile of the dq pass."""
    p = problem
    tile = _tile(dq)
    spec, extras, some = common.make_spec(p, tile, streamed="both", interpret=interpret)
    rows = (*jax.tree.leaves(log_sum), delta)
    arrays = () if some is None else (some,)
    arrays += tuple(common.kernel_arrays(extras))
    counts = (p.batch, p.num_heads, spec.q.count, spec.kv.count)
    broadcast = tuple(n == 1 for n in p.bias.shape)

    def wide(x):
        return pl.BlockSpec((*x.shape[:3], common.padded(x.shape[3])), lambda *_: (0,) * 4)

    block = (
        None,
        None,
        1 if broadcast[2] else spec.q.block,
        1 if broadcast[3] else spec.kv.block,
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
        spec=spec,
        tile=tile,
        grid=tuple(1 if one else n for n, one in zip(counts, broadcast, strict=True))[::-1],
        in_specs=[
            wide(p.query),
            wide(p.key),
            wide(p.value),
            common.whole_array(p.scale[None]),
            wide(do),
            *map(common.whole_array, (*rows, *arrays)),
        ],
        out_specs=[pl.BlockSpec(block, lambda j, i, h, b: (b, h, i, j))],
        out_shapes=[(p.bias.shape, p.bias.dtype)],
        counts=counts,
        broadcast=broadcast,
    )
    return out
