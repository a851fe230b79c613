"""A kernel that computes a user's function alone, to see whether Pallas lowers it.

The function gets indices in each form that it meets in the other kernels:

    b, h scalars    q [block_q, 1]    k [1, block_kv]    forward, dq, dbias
    b scalar        h, q [rows, 1]    k [1, block_kv]    decode: rows of several heads
    b, h scalars    q [1, block_q]    k [block_kv, 1]    dk and dv, and which keys are visible
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.triton.launch import kernel_arrays, launch, whole
from pallas_flash._backends.triton.spec import KernelSpec, make_spec
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import Tile

TILE = Tile(16, 32)


def pallas_flash_function(*refs, spec: KernelSpec, derivative: bool, reads: int):
    """Compute scores or their derivative, and the mask, of one tile in each form.

    Where there are `reads` of tables, it is the derivative in them.
    """
    *refs, out_ref = refs
    extras = spec.load_extras(refs)
    b, h = pl.program_id(0), pl.program_id(1)
    q, k = lax.iota(jnp.int32, spec.q.block), lax.iota(jnp.int32, spec.kv.block)
    total = jnp.float32(0)
    for at in (
        (b, h, q[:, None], k[None, :]),
        (b, h + q[:, None], q[:, None], k[None, :]),
        (b, h, q[None, :], k[:, None]),
    ):
        s = (at[2] + at[3]).astype(jnp.float32)
        if reads:
            for number in range(reads):
                _, _, pull = spec.read_vjp(number)(extras, s, 1.0, *at)
                total += jnp.sum(pull(s))
        elif derivative:
            s, _, pull = spec.logits_vjp(extras, s, 1.0, *at)
            s = pull(s)
        else:
            s, _ = spec.logits(extras, s, 1.0, *at)
        if extras.mask:
            s = jnp.where(extras.mask.allowed(*at), s, -jnp.inf)
        total += jnp.sum(s)
    out_ref[0, 0] = total


def compute(problem: Problem, *, derivative: bool, reads: int = 0):
    """Call `pallas_flash_function` for the mask and the scores of a problem."""
    spec, extras, _ = make_spec(problem, TILE, streamed="kv", interpret=False)
    [out] = launch(
        pallas_flash_function,
        [whole(x) for x in kernel_arrays(extras)],
        [((1, 1), jnp.float32, pl.BlockSpec((1, 1), lambda *_: (0, 0)))],
        spec=spec,
        tile=TILE,
        grid=(1, 1),
        derivative=derivative,
        reads=reads,
    )
    return out
