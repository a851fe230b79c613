"""dbias of a resident tile of the bias; the axes over which the bias broadcasts are streamed.

    acc = acc + ds                  summed along the axes over which the bias broadcasts

This is a pass of its own, because dk and dq need each ds once and in their own order. Here the tile
of the sum is resident, so that it is stored once, without atomics and without a copy for each batch
element or head. One loop goes over all batch elements, heads, query tiles and key tiles that share
the tile. `streamed.py` computes ds.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.triton import memory, streamed
from pallas_flash._backends.triton.launch import launch
from pallas_flash._backends.triton.spec import KernelSpec, make_spec
from pallas_flash._backends.triton.streamed import Streamed
from pallas_flash._problem.dropout import rescaled
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import Tile
from pallas_flash._problem.traversal import in_tile


def pallas_flash_dbias(
    *refs,
    spec: KernelSpec,
    counts: tuple[int, int, int, int],
    broadcast: tuple[bool, bool, bool, bool],
):
    """Compute one tile of dbias.

    `counts` are the numbers of batch elements, heads, query tiles and key tiles. `broadcast` says
    over which of these axes the bias broadcasts.
    """
    arrays, dbias_ref = Streamed.from_refs(refs, spec)
    grid = [pl.program_id(3 - axis) for axis in range(4)]

    def tile(*index):
        ds = arrays.ds(index, spec.logits_vjp)
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
        return arrays.add(acc, index, tile)

    shape = tuple(
        1 if one else tiling.block
        for one, tiling in zip(broadcast[2:], (spec.q, spec.kv), strict=True)
    )
    total = 1
    for count, one in zip(counts, broadcast, strict=True):
        total *= count if one else 1
    acc = lax.fori_loop(0, total, step, jnp.zeros(shape, jnp.float32))
    acc = rescaled(arrays.extras.dropout, acc)
    rows, keys = (
        None if one else memory.valid_positions(tiling, in_tile(grid[axis], tiling.block))
        for one, tiling, axis in ((broadcast[2], spec.q, 2), (broadcast[3], spec.kv, 3))
    )
    memory.store_pairs(dbias_ref, acc, rows, keys)


def dbias(problem: Problem, do, log_sum, delta, dq: Tile, *, interpret: bool):
    """Return the gradient of the bias, in its shape and dtype. `dq` is the tile of the dq pass."""
    p = problem
    tile = streamed.small_tile(dq)
    spec, extras, some = make_spec(p, tile, streamed="both", interpret=interpret)
    counts = (p.batch, p.num_heads, spec.q.count, spec.kv.count)
    broadcast = tuple(n == 1 for n in p.bias.shape)
    block = (
        None,
        None,
        1 if broadcast[2] else spec.q.block,
        1 if broadcast[3] else spec.kv.block,
    )
    [out] = launch(
        pallas_flash_dbias,
        streamed.operands(p, do, log_sum, delta, extras, some),
        [(p.bias.shape, p.bias.dtype, pl.BlockSpec(block, lambda j, i, h, b: (b, h, i, j)))],
        spec=spec,
        tile=tile,
        grid=tuple(1 if one else n for n, one in zip(counts, broadcast, strict=True))[::-1],
        counts=counts,
        broadcast=broadcast,
    )
    return out
