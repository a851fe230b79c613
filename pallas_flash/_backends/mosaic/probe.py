"""A kernel that computes a user's function and nothing else, to see whether Pallas lowers it.

The function is given a tile of each form that it meets in the other kernels: b is a scalar, q and k
are of the whole tile, and h is a scalar, or of the whole tile in decode.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_flash._backends.mosaic import common, ptx
from pallas_flash._backends.mosaic.score_mask import Options, shared_arrays
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.problem import Problem

plgpu = common.plgpu

SHAPE = 64, 16
GROUPS = ptx.groups(SHAPE[1])


class FunctionConfig(NamedTuple):
    """Values that the kernel knows when it is compiled."""

    options: Options
    derivative: bool


def pallas_flash_function(*refs, static: FunctionConfig):
    """Compute scores or their derivative, and the mask, of one tile in each form."""
    *refs, out_ref = refs
    program = lax.axis_index("cta")
    options = static.options.element_options(refs, program)
    at = common.positions(SHAPE, program, program)
    for n, h in enumerate((program, at[0])):
        s = ptx.load_fragments(out_ref, GROUPS)
        if static.derivative:
            s, _, pull = options.logits_vjp(s, h, lambda: at)
            s = s if pull is None else pull(s)
        else:
            s, _ = options.logits(s, h, *at)
        ptx.store_fragments(options.hide(s, h, *at), out_ref.at[n * GROUPS])


def compute(problem: Problem, *, derivative: bool):
    """Launch the kernel for the mask and the scores of a problem."""
    shared = shared_arrays(problem, problem.mask)
    q, kv = Tiling(problem.q_len, SHAPE[0]), Tiling(problem.kv_len, SHAPE[1])
    options = Options.from_problem(problem, shared, q, kv)
    return common.launch(
        pallas_flash_function,
        options.operands(shared),
        outputs=[((2 * GROUPS, *ptx.OF_GROUP), jnp.float32)],
        memory={},
        grid=dict(cta=1),
        warpgroups=1,
        static=FunctionConfig(options, derivative),
        approx_math=options.approximate,
    )
