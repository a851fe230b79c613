"""The parts of a program, read from its jaxpr."""

from collections.abc import Iterator

import jax
from jax.extend import core


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All equations, those of inner jaxprs included, but not those of kernels."""
    for eqn in _without_dead_kernels(jaxpr):
        yield eqn
        if eqn.primitive.name != "pallas_call":
            for inner in core.jaxprs_in_params(eqn.params):
                yield from equations(inner)


def _without_dead_kernels(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """As XLA sees to it; JAX itself drops kernels without a use only from 0.12 on."""
    used, kept = set(_variables(jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name == "pallas_call" and not eqn.effects and used.isdisjoint(eqn.outvars):
            continue
        used.update(_variables(eqn.invars))
        kept.append(eqn)
    return kept[::-1]


def _variables(atoms):
    return (x for x in atoms if isinstance(x, core.Var))


def trace(function, *args) -> list[core.JaxprEqn]:
    """The equations of `function(*args)`; the arguments may be shapes."""
    return list(equations(jax.jit(function).trace(*args).jaxpr.jaxpr))


def kernels(eqns) -> list[str]:
    """The names of the kernels among equations, in order."""
    return [e.params["name"] for e in eqns if e.primitive.name == "pallas_call"]
