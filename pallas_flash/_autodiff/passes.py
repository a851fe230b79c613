"""The forward and the backward as functions that JAX differentiates again.

    forward_pass:  operands -> (o, LSE)                         tangents: `forward_tangents`
    backward_pass: (operands, o, LSE, do, dlse) -> gradients    tangents: `backward_tangents`

The passes are computed as the plan says. Their tangents are plain JAX, from which every higher
derivative comes, in both modes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_flash._execution import tangents
from pallas_flash._execution.plan import Plan, Wanted
from pallas_flash._problem.problem import SplitOutput
from pallas_flash._problem.scores import LN2


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward_pass(plan: Plan, operands, rest):
    """Return o, or a `SplitOutput`, and the LSE as a `LogSum`, of what `Problem.split` returned."""
    return plan.run_forward(rest.join(operands))


@functools.partial(forward_pass.defjvp, symbolic_zeros=True)
def _(plan: Plan, primals, dots):
    operands, rest = primals
    moved = moved_operands(dots[0])
    o_dot, lse_dot = tangents.forward_tangents(tuple(moved), plan.along, operands, rest, moved)
    o, log_sum = forward_pass(plan, operands, rest)
    # Only the sum of two terms has a meaning, so that one of them may get all of its tangent. The
    # largest scores have none.
    others_dot = jax.tree.map(jnp.zeros_like, log_sum._replace(l_log2=None))
    if isinstance(o, SplitOutput):
        o_dot = SplitOutput(o_dot, jnp.zeros_like(o.low))
    return (o, log_sum), (o_dot, others_dot._replace(l_log2=jnp.moveaxis(lse_dot, 2, 1) / LN2))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def backward_pass(plan: Plan, wanted: Wanted, operands, rest, o, log_sum, do, dlse):
    """Return the gradients of the operands, for cotangents of the output and of the LSE."""
    return plan.run_backward(rest.join(operands), o, log_sum, do, dlse, wanted)


@functools.partial(backward_pass.defjvp, symbolic_zeros=True)
def _(plan: Plan, wanted: Wanted, primals, dots):
    operands, rest, _, _, *cotangents = primals
    gradients = backward_pass(plan, wanted, *primals)
    named = tangents.named_arrays(gradients._asdict())
    names = tuple(name for name, x in named.items() if x is not None)
    moved = moved_operands(dots[0])
    cotangents_dot = [
        jnp.zeros_like(x) if isinstance(t, SymbolicZero) else t
        for x, t in zip(cotangents, dots[4:], strict=True)
    ]
    return gradients, tangents.backward_tangents(
        tuple(moved), names, plan.along, operands, rest, cotangents, (moved, cotangents_dot)
    )


def moved_operands(dots: dict) -> dict:
    """Return the tangents of operands that have one, by the names of `named_arrays`."""
    named = tangents.named_arrays(dots)
    return {name: t for name, t in named.items() if not (t is None or isinstance(t, SymbolicZero))}
