"""The custom derivative of `attention`: its rule and its residuals.

    forward:   (o, LSE) = forward_pass(operands)
    tangents:  (o_dot, lse_dot) = a linear map of the operands' tangents, `forward_tangents`
    backward:  gradients = backward_pass(operands, o, LSE, do, dlse), the transpose of that map

Residuals are the operands, the output and the LSE as a `LogSum`; the backward computes delta
itself. `splits_output` says when the output is a `SplitOutput`. The output and the LSE carry
checkpoint names. A remat policy, `save_residuals`, can keep them, so that the forward never runs
twice.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType

from pallas_flash._autodiff import linear_map
from pallas_flash._autodiff.passes import backward_pass, forward_pass, moved_operands
from pallas_flash._execution import partition, tangents
from pallas_flash._execution.plan import Plan, Wanted
from pallas_flash._jax import compat
from pallas_flash._jax.one_device import explicit_mesh
from pallas_flash._jax.symbolic import known_at_most
from pallas_flash._problem.problem import Problem, SplitOutput
from pallas_flash._problem.scores import LogSum

# The checkpoint names of the output and of the LSE, and the policy that saves both.
NAMES = "pallas_flash_out", "pallas_flash_lse"
_save_names = jax.checkpoint_policies.save_only_these_names(*NAMES)

# Keys of a row up to which, and features below which, `splits_output` is true of every call. With
# more of both, errors of dq and dk were at most twice dense attention's (random problems).
FEW_KEYS, FEW_FEATURES = 32, 16


def save_residuals(*args, **kwargs):
    """A policy of `jax.checkpoint` that saves the results of the forward of `attention`.

    Pass it without a call, as `policy=pallas_flash.save_residuals`.
    These are the output, as large as the queries, and one or two float32 for each query and head.
    Some calls in 16 bits have a second array as large, for example those with a trained bias.
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
    automatic = all(kind == AxisType.Auto for kind in kinds)
    if traced and automatic and explicit_mesh((operands, rest)) is None:
        return _attend_on_mesh(plan, operands, rest)
    # Outside of `jit` one compiled program costs less than its operations one by one, and JAX has
    # no rule for what is differentiated here inside a `shard_map` of Explicit axes.
    return _attend_compiled(plan, operands, rest)


def _attend_on_mesh(plan: Plan, operands: dict, rest: Problem):
    def attend(problem, along):
        here = plan if along is None else dataclasses.replace(plan, along=along)
        operands, rest = problem.split()
        bias = operands["bias"]
        if bias is not None and compat.shared(bias, (operands, rest)):
            # In float32, the gradient of the bias is rounded once, after the sum over devices.
            here = dataclasses.replace(here, bias_dtype=bias.dtype)
            operands["bias"] = bias.astype(problem.accumulator_dtype)
        operands, rest = compat.vary_alike((operands, rest))
        return _attend(here, operands, rest)

    return partition.explicitly(attend, rest.join(operands))


_attend_compiled = jax.jit(_attend_on_mesh, static_argnums=0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(plan: Plan, operands, rest):
    o, log_sum = forward_pass(plan, operands, rest)
    lse, *row_maxima = public_rows(log_sum)
    fixed, structure = jax.tree.flatten((o, lse, operands | {"value": None}, rest))
    return *_of_values(_ValueGradients(plan, structure), fixed, operands["value"]), *row_maxima


# Compiled, so that `jax.vmap` outside of `jit` does not repeat values for what is not computed.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _of_values(rule: "_ValueGradients", fixed, value):
    return linear_map.apply(rule, fixed, [value])


@dataclasses.dataclass(frozen=True)
class _ValueGradients:
    """The output and the LSE as a linear map of the values, for `jax.linear_transpose`.

    Both have been computed, so that only the transpose computes anything.

    Attributes:
        plan: of the call.
        structure: of both, the operands without the values, and the rest.
    """

    plan: Plan
    structure: Any

    def tangents(self, fixed, moved):
        """Return the output and the LSE."""
        del moved
        return fixed[:2]

    formula = tangents

    def cotangents(self, fixed, cotangents):
        """Return the gradient of the values, on which only the output depends."""
        o, _, operands, rest = jax.tree.unflatten(self.structure, fixed)
        key = operands["key"]
        value = jax.lax.full_like(key, 0, shape=(*key.shape[:3], o.shape[3]))

        def of_values(value):
            return _attend(self.plan, operands | {"value": value}, rest)[0]

        do = jnp.zeros_like(o) if cotangents[0] is None else cotangents[0]
        return jax.vjp(of_values, value)[1](do)


@functools.partial(_attend.defjvp, symbolic_zeros=True)
def _(plan: Plan, primals, dots):
    operands, rest = primals
    moved = moved_operands(dots[0])
    wanted = _wanted(moved, operands)
    rest = dataclasses.replace(rest, split_output=splits_output(rest.join(operands), wanted))
    o, log_sum = forward_pass(plan, operands, rest)
    o = jax.tree.map(lambda x: checkpoint_name(x, NAMES[0]), o)
    log_sum = jax.tree.map(lambda x: checkpoint_name(x, NAMES[1]), log_sum)
    o, low = o if rest.split_output else (o, None)
    out = o, *public_rows(log_sum)
    fixed, structure = jax.tree.flatten((o, log_sum.l_log2, log_sum.m, low, operands, rest))
    rule = _Derivative(plan, wanted, tuple(moved), structure)
    o_dot, lse_dot = linear_map.apply(rule, fixed, list(moved.values()))
    # The largest scores, the third result, have no tangent.
    still = [SymbolicZero(jax.typeof(x).to_tangent_aval()) for x in out[2:]]
    return out, (o_dot, jnp.moveaxis(lse_dot, 1, 2), *still)


def _wanted(moved: dict, operands: dict) -> Wanted:
    """Return the gradients of the operands in `moved`, which `moved_operands` returned."""
    flags = {name: name in moved for name in ("scale", "bias", "sinks", "slopes")}
    of_scores = tangents.named_arrays({"score_operands": operands["score_operands"]})
    return Wanted(**flags, score_operands=tuple(name in moved for name in of_scores))


def splits_output(problem: Problem, wanted: Wanted) -> bool:
    """Return whether the forward leaves the low part of its output to the backward, too.

    delta = rowsum(o * do) of an output in 16 bits has an error of about 2^-9 |o| |do|, and every ds
    of the row has it in common. In a sum of ds over keys or queries it stays, while ds themselves
    nearly cancel. dq and dk multiply ds by keys and queries, which have many directions, unless
    there are few keys or few features, or the call has a soft cap or a score function: `key_center`
    does not serve them, and with a key bias dq has an error that the low part makes ten times
    smaller. Elsewhere the error hides below other roundings, where values have no large mean, and
    the time and memory of the low part are saved.
    """
    p = problem
    if p.dtype.itemsize != 2:
        return False
    sums = wanted.scale, wanted.bias, wanted.sinks, *wanted.tables
    mapped = p.scores.soft_cap is not None or p.scores.score_mod is not None
    few = known_at_most(p.kv_len, FEW_KEYS) or p.head_dim < FEW_FEATURES
    return any(sums) or mapped or few


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """The derivative of `_attend`, a linear map of tangents, and its transpose; see `linear_map`.

    Attributes:
        plan: of the call.
        wanted: the gradients that the transpose computes.
        names: the operands that have a tangent, by `_execution.tangents.named_arrays`.
        structure: of the residuals: o, both terms of the LSE, the low part of o, the operands, and
            the rest.
    """

    plan: Plan
    wanted: Wanted
    names: tuple[str, ...]
    structure: Any

    def tangents(self, fixed, moved):
        """Return the tangents of o [B, T, N, V] and of the natural LSE [B, N, T]."""
        _, l_log2, m, _, operands, rest = jax.tree.unflatten(self.structure, fixed)
        others = set(self.names) - {"query", "key", "value"}
        if others or self.plan.along or self.plan.tangents.implementation == "xla":
            return self.formula(fixed, moved)
        zeros = {x: jnp.zeros_like(operands[x]) for x in ("query", "key", "value")}
        dots = zeros | dict(zip(self.names, moved, strict=True))
        log_sum = LogSum(m, l_log2)
        return list(self.plan.run_tangents(rest.join(operands), log_sum, tuple(dots.values())))

    def formula(self, fixed, moved):
        """Return `tangents` by plain JAX."""
        *_, operands, rest = jax.tree.unflatten(self.structure, fixed)
        moved = dict(zip(self.names, moved, strict=True))
        o, lse = tangents.forward_tangents(self.names, self.plan.along, operands, rest, moved)
        return [o, jnp.moveaxis(lse, 2, 1)]

    def cotangents(self, fixed, cotangents):
        """Return the gradients of the operands in `names`."""
        o, l_log2, m, low, operands, rest = jax.tree.unflatten(self.structure, fixed)
        do, dlse = cotangents
        do = jnp.zeros_like(o) if do is None else do
        o = o if low is None else SplitOutput(o, low)
        dlse = None if dlse is None else jnp.moveaxis(dlse, 1, 2)
        log_sum = LogSum(m, l_log2)
        gradients = backward_pass(self.plan, self.wanted, operands, rest, o, log_sum, do, dlse)
        named = tangents.named_arrays(gradients._asdict())
        return [named[name] for name in self.names]


def public_rows(log_sum: LogSum) -> tuple:
    """Return the natural LSE [B, T, N] and, if asked for, the largest score of each row."""
    rows = (log_sum.lse,) if log_sum.max_logits is None else (log_sum.lse, log_sum.max_logits)
    return tuple(jnp.moveaxis(x, 1, 2) for x in rows)
