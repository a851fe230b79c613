"""Tangents of a call in forward mode, judged against those of the dense formula in float64.

The measure is that of judge.py: at most twice the error of dense attention in the inputs' dtype,
which rounds operands of products, also tangents, to that dtype.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from support import oracle
from support.judge import FEW, ROUNDING, size_of_scores

import pallas_flash
from pallas_flash import ScoreMod


@dataclasses.dataclass(frozen=True)
class Call:
    """A call as a function of all its floating-point operands.

    Attributes:
        floats: the operands by name; those of a score function are a tuple.
        others: the other options.
        dots: a tangent of each operand.
    """

    floats: dict
    others: dict
    dots: dict

    @classmethod
    def from_problem(cls, problem, seed=7):
        """Return the call of a problem, as `Case.problem` gives it, with random tangents."""
        (q, k, v), _, options = problem
        floats, others = dict(query=q, key=k, value=v), dict(options)
        for name in ("bias", "sinks", "alibi_slopes", "scale"):
            if name in others:
                floats[name] = jnp.asarray(others.pop(name))
        if isinstance(others.get("score_mod"), ScoreMod):
            floats["operands"] = others["score_mod"].operands
        random = np.random.default_rng(seed)
        dots = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), floats)
        return cls(floats, others, dots)

    def moved(self, names):
        """Return the call in which only some operands have a tangent."""
        return dataclasses.replace(self, dots={name: self.dots[name] for name in names})

    def widened(self):
        """Return the call in float64."""
        wide = functools.partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.float64))
        return dataclasses.replace(self, floats=wide(self.floats), dots=wide(self.dots))

    def function(self, attention):
        """Return `attention(q, k, v, **options)` as a function of the operands with a tangent."""

        def run(moved):
            floats, options = self.floats | moved, dict(self.others)
            qkv = [floats[name] for name in ("query", "key", "value")]
            names = floats.keys() - {"query", "key", "value", "operands"}
            if "operands" in floats:
                options["score_mod"] = ScoreMod(options["score_mod"].fn, floats["operands"])
            return attention(*qkv, **{name: floats[name] for name in names}, **options)

        return run

    def jvp(self, attention):
        """Return the results of the call and their tangents."""
        primals = {name: self.floats[name] for name in self.dots}
        run = oracle.compiled(lambda x, dx: jax.jvp(self.function(attention), (x,), (dx,)))
        return run(primals, self.dots)


def tangents_of(call: Call, implementation: str, **extra):
    """Return the results and the tangents of o and of the LSE by an implementation."""
    attention = functools.partial(
        pallas_flash.attention, implementation=implementation, return_lse=True, **extra
    )
    return call.jvp(attention)


def judge_tangents(call: Call, found) -> None:
    """Assert the rule for the tangents of o and of the LSE."""
    dense = functools.partial(oracle.dense, forward_mode=True)
    with jax.enable_x64(True):
        (_, lse), exact = call.widened().jvp(dense)
        exact = dict(zip(("o", "lse"), map(np.asarray, exact), strict=True))
    # The error of probabilities enters twice: they are in a row's mean of s_dot, too.
    size = size_of_scores(lse, call.floats["key"].shape[1])
    truth = oracle.Truth(exact, {}, {}, {})
    _, baseline = call.jvp(dense)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in baseline]
    failures = []
    for name, ours, theirs in zip(exact, found, baseline, strict=True):
        rounding = ROUNDING[ours.dtype.name]
        # The dense computation's own error of a few numbers may be small by luck.
        few = exact[name].size < FEW
        floor = max(2 * size * ROUNDING["float32"], (4 if few else 0.5) * rounding)
        ours, theirs = (oracle.errors(x, truth, name) for x in (ours, theirs))
        for norm in ours:
            if not ours[norm] <= 2 * max(theirs[norm], floor):
                failures.append(f"{name} {norm}: {ours[norm]:.2e}, dense {theirs[norm]:.2e}")
    assert not failures, "; ".join(failures)
