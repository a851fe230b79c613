"""The custom derivative of `attention`: its rule and its residuals.

    forward:   (o, LSE) = forward_pass(operands)
    backward:  gradients = backward_pass(operands, o, LSE, do, dlse)

Residuals are the operands, the output and the LSE as a `LogSum`; the backward computes delta
itself. The output and the LSE carry checkpoint names. A remat policy, `save_residuals`, can keep
them, so that the forward never runs twice.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType

from pallas_flash import _compat, _partition
from pallas_flash._passes import backward_pass, forward_pass
from pallas_flash._plan import Plan, Wanted
from pallas_flash._problem import Problem
from pallas_flash._reverse_mode import in_reverse_mode
from pallas_flash._scores import LogSum

# The checkpoint names of the output and of the LSE, and the policy that saves both.
NAMES = "pallas_flash_out", "pallas_flash_lse"
_save_names = jax.checkpoint_policies.save_only_these_names(*NAMES)


def save_residuals(*args, **kwargs):
    """A policy of `jax.checkpoint` that saves the results of the forward of `attention`.

    These are the output, as large as the queries, and one or two float32 for each query and head.
    With them the backward does not run the forward again; everything else is computed again. Join
    it with other policies by `jax.checkpoint_policies.save_from_both_policies`.

    Args:
        *args: the arguments that `jax.checkpoint` passes to a policy.
        **kwargs: its keywords.

    Example:
        >>> import jax, jax.numpy as jnp, pallas_flash
        >>> def layer(x):
        ...     return x + pallas_flash.attention(x, x, x, is_causal=True)
        >>> layer = jax.checkpoint(layer, policy=pallas_flash.save_residuals)
        >>> jax.grad(lambda x: layer(x).sum())(jnp.ones((1, 8, 2, 16))).shape
        (1, 8, 2, 16)
    """
    return _save_names(*args, **kwargs)


def attend(plan: Plan, operands: dict, rest: Problem):
    """Return the output [B, T, N, V], and `public_rows` of the `LogSum`.

    Args:
        plan: of the whole problem.
        operands: the operands that `Problem.split` returned.
        rest: the problem that it returned.
    """
    kinds = jax.typeof(operands["query"]).sharding.mesh.axis_types
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((operands, rest)))
    if traced and all(kind == AxisType.Auto for kind in kinds):
        return _attend_on_mesh(plan, operands, rest)
    # Outside of `jit` one compiled program costs less than its operations one by one, and JAX has
    # no rule for what is differentiated here inside a `shard_map` of Explicit axes.
    return _attend_compiled(plan, operands, rest)


def _attend_on_mesh(plan: Plan, operands: dict, rest: Problem):
    def attend(problem, along):
        here = plan if along is None else dataclasses.replace(plan, along=along)
        operands, rest = problem.split()
        bias = operands["bias"]
        if bias is not None and _compat.shared(bias, (operands, rest)):
            # In float32, the gradient of the bias is rounded once, after the sum over devices.
            here = dataclasses.replace(here, bias_dtype=bias.dtype)
            operands["bias"] = bias.astype(problem.accumulator_dtype)
        operands, rest = _compat.vary_alike((operands, rest))
        return _attend(here, in_reverse_mode(here.implementation, operands), rest)

    return _partition.explicitly(attend, rest.join(operands))


_attend_compiled = jax.jit(_attend_on_mesh, static_argnums=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, operands, rest):
    o, log_sum = forward_pass(plan, operands, rest)
    return o, *public_rows(log_sum)


def _forward(plan: Plan, operands, rest):
    def perturbed(name):
        return any(x.perturbed for x in jax.tree.leaves(operands[name], is_leaf=_has_tangent))

    flags = {name: perturbed(name) for name in ("scale", "bias", "sinks", "slopes")}
    of_scores = tuple(x.perturbed for x in operands["score_operands"] or ())
    wanted = Wanted(**flags, score_operands=of_scores)
    operands, rest = jax.tree.map(lambda x: x.value, (operands, rest), is_leaf=_has_tangent)
    o, log_sum = forward_pass(plan, operands, rest)
    o = checkpoint_name(o, NAMES[0])
    log_sum = jax.tree.map(lambda x: checkpoint_name(x, NAMES[1]), log_sum)
    residuals = operands, rest, o, log_sum._replace(max_logits=None), wanted
    return (o, *public_rows(log_sum)), residuals


def _has_tangent(x) -> bool:
    return hasattr(x, "perturbed")


def _backward(plan: Plan, residuals, cotangents):
    operands, rest, o, log_sum, wanted = residuals
    # The largest scores have no gradient: nothing uses their cotangent.
    do, dlse, *_ = cotangents
    if isinstance(do, SymbolicZero):
        do = jnp.zeros_like(o)
    if isinstance(dlse, SymbolicZero):
        dlse = None
    gradients = backward_pass(plan, wanted, operands, rest, o, log_sum, do, dlse)
    # None is a zero. Everything in `rest` has one: masks, lengths and ids have no gradient.
    return gradients._asdict(), None


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


def public_rows(log_sum: LogSum) -> tuple:
    """Return the natural LSE [B, T, N] and, if asked for, the largest score of each row."""
    rows = (log_sum.lse,) if log_sum.max_logits is None else (log_sum.lse, log_sum.max_logits)
    return tuple(jnp.moveaxis(x, 1, 2) for x in rows)
