"""delta for one tile of rows: what every tile of ds subtracts, computed once.

    delta = rowsum(o * do) - dlse

dlse, the cotangent of the LSE, enters here and nowhere else: d lse_i / d s_ij = p_ij, so it
adds p * dlse to ds.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash._masks import Tiling
from pallas_flash._problem import Problem
from pallas_flash._tiling.sizes import Tile
from pallas_flash._triton import common
from pallas_flash._visits import in_tile

_TILE = Tile(block_q=64, block_kv=16, num_warps=4, num_stages=1)


def pallas_flash_delta(o_ref, do_ref, *refs, static: common.Static):
    """Delta for the rows of one tile of one head."""
    *dlse_ref, delta_ref = refs
    rows = common.existing(static.q, in_tile(pl.program_id(0), static.q.block))
    o, do = (
        common.load(ref, rows, static.value_dim).astype(jnp.float32) for ref in (o_ref, do_ref)
    )
    delta = jnp.sum(o * do, axis=1)
    if dlse_ref:
        delta = delta - common.load_row(dlse_ref[0], rows)
    common.store_row(delta_ref, delta, rows)


def delta(problem: Problem, o, do, dlse, *, interpret: bool):
    """float32 [B, N, T] from o and do [B, T, N, V] and dlse (float32 [B, T, N] or None)."""
    p = problem
    static, *_ = common.make_static(p, _TILE, flow="q", interpret=interpret)
    tiles: Tiling = static.q
    wide = pl.BlockSpec(
        (None, tiles.block, None, common.padded(p.value_dim)), lambda i, n, b: (b, i, n, 0)
    )
    by_row = pl.BlockSpec((None, tiles.block, None), lambda i, n, b: (b, i, n))
    [out] = common.call(
        pallas_flash_delta,
        o,
        do,
        *([] if dlse is None else [dlse]),
        static=static,
        tile=_TILE,
        grid=(tiles.count, p.num_heads, p.batch),
        in_specs=[wide, wide, *([] if dlse is None else [by_row])],
        out_specs=[pl.BlockSpec((None, None, tiles.block), lambda i, n, b: (b, n, i))],
        out_shapes=[((p.batch, p.num_heads, p.q_len), jnp.float32)],
    )
    return out
