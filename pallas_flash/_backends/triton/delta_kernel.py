"""The backward preprocess kernel: delta of one tile of rows, which every tile of ds subtracts.

    delta = rowsum(o * do) - dlse

dlse is the cotangent of the LSE. Because d lse_i / d s_ij = p_ij, it adds p * dlse to ds, and only
here does it enter.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash._backends.triton import memory
from pallas_flash._backends.triton.launch import launch
from pallas_flash._backends.triton.spec import KernelSpec, make_spec
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.problem import Problem, widened
from pallas_flash._problem.tile_sizes import Tile
from pallas_flash._problem.traversal import in_tile

_TILE = Tile(block_q=64, block_kv=16, num_warps=4, num_stages=1)


def pallas_flash_delta(o_ref, do_ref, *refs, spec: KernelSpec, split: bool):
    """Compute delta of the rows of one tile of one head; if `split`, with the low part of o."""
    low_ref, dlse_ref, delta_ref = refs[:split], refs[split:-1], refs[-1]
    rows = memory.valid_positions(spec.q, in_tile(pl.program_id(0), spec.q.block))
    *parts, do = (memory.load(ref, rows, spec.value_dim) for ref in (o_ref, *low_ref, do_ref))
    delta = jnp.sum(widened(parts, jnp.float32) * do.astype(jnp.float32), axis=1)
    if dlse_ref:
        delta = delta - memory.load_row(dlse_ref[0], rows)
    memory.store_row(delta_ref, delta, rows)


def delta(problem: Problem, o, do, dlse, *, interpret: bool):
    """Return delta, float32 [B, N, T].

    Args:
        problem: the call.
        o: the output, [B, T, N, V], or a `SplitOutput`.
        do: its cotangent, [B, T, N, V].
        dlse: the cotangent of the LSE, float32 [B, T, N], or None.
        interpret: whether the kernel runs in the interpreter.
    """
    p = problem
    spec, *_ = make_spec(p, _TILE, streamed="q", interpret=interpret)
    tiles: Tiling = spec.q
    wide = pl.BlockSpec(
        (None, tiles.block, None, memory.padded(p.value_dim)), lambda i, n, b: (b, i, n, 0)
    )
    by_row = pl.BlockSpec((None, tiles.block, None), lambda i, n, b: (b, i, n))
    of_delta = pl.BlockSpec((None, None, tiles.block), lambda i, n, b: (b, n, i))
    o, *low = jax.tree.leaves(o)
    [out] = launch(
        pallas_flash_delta,
        [*((x, wide) for x in (o, do, *low)), *([] if dlse is None else [(dlse, by_row)])],
        [((p.batch, p.num_heads, p.q_len), jnp.float32, of_delta)],
        spec=spec,
        tile=_TILE,
        grid=(tiles.count, p.num_heads, p.batch),
        split=bool(low),
    )
    return out
