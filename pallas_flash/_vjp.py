"""The custom derivative; the only place that knows residuals.

Residuals are the operands, the output and one row of LSE a head; delta is the backward's own. The
output and the LSE carry checkpoint names, so that a remat policy can keep them and never run the
forward twice:

    jax.checkpoint_policies.save_only_these_names("pallas_flash_out", "pallas_flash_lse")
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_flash import _compat, _xla
from pallas_flash._problem import Gradients, Problem
from pallas_flash._tiles import TileSizes

LN2 = math.log(2.0)


_NO_TILES = TileSizes()


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who computes: "xla", or the kernels ("triton", "interpret") with their tiles."""

    implementation: str
    tiles: TileSizes = _NO_TILES

    # Compiled here, so that calls outside of `jit` do not compile loops and kernels each time.
    @functools.partial(jax.jit, static_argnums=0)
    def forward(self, problem: Problem):
        """The output and `lse_log2` [B, N, T]."""
        if self.implementation == "xla":
            return _xla.forward(problem)
        return self._kernels().forward(problem, self.tiles, interpret=self._interpret)

    @functools.partial(jax.jit, static_argnums=0)
    def backward(self, problem, o, lse_log2, do, dlse, wanted: "Wanted") -> Gradients:
        """The gradients for cotangents do [B, T, N, V] and dlse ([B, T, N] or None)."""
        cotangents = (problem, o, lse_log2, do, dlse)
        if self.implementation == "xla":
            return _xla.backward(*cotangents, want_scale=wanted.scale, want_bias=wanted.bias)
        return self._kernels().backward(
            *cotangents, self.tiles, want_scale=wanted.scale, interpret=self._interpret
        )

    @property
    def _interpret(self) -> bool:
        return self.implementation == "interpret"

    @staticmethod
    def _kernels():
        # Imported when needed: the package works without Pallas's Triton lowering.
        from pallas_flash import _triton

        return _triton


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which of the gradients that cost something extra are asked for."""

    scale: bool
    bias: bool


def attend(plan: Plan, operands: dict, rest: Problem):
    """The output [B, T, N, V] and the natural LSE [B, T, N] of what `Problem.split` gave."""
    return _attend(plan, *_compat.vary_alike((operands, rest)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, operands, rest):
    o, lse_log2 = plan.forward(rest.join(operands))
    return o, _public_lse(lse_log2)


def _forward(plan: Plan, operands, rest):
    def perturbed(name):
        return operands[name] is not None and operands[name].perturbed

    wanted = Wanted(scale=perturbed("scale"), bias=perturbed("bias"))
    operands, rest = jax.tree.map(
        lambda x: x.value, (operands, rest), is_leaf=lambda x: hasattr(x, "perturbed")
    )
    o, lse_log2 = plan.forward(rest.join(operands))
    o = checkpoint_name(o, "pallas_flash_out")
    lse_log2 = checkpoint_name(lse_log2, "pallas_flash_lse")
    return (o, _public_lse(lse_log2)), (operands, rest, o, lse_log2, wanted)


def _backward(plan: Plan, residuals, cotangents):
    operands, rest, o, lse_log2, wanted = residuals
    do, dlse = cotangents
    if isinstance(do, SymbolicZero):
        do = jnp.zeros_like(o)
    if isinstance(dlse, SymbolicZero):
        dlse = None
    gradients = plan.backward(rest.join(operands), o, lse_log2, do, dlse, wanted)
    # None stands for a zero, as it does for everything in `rest`: masks, lengths and ids have no
    # gradient.
    return gradients._asdict(), None


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _public_lse(lse_log2):
    return jnp.moveaxis(lse_log2 * LN2, 1, 2)
