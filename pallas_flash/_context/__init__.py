"""Attention on a sequence that is divided over devices; the surface is `forward`, `backward`.

Both run on each device, where the names of mesh axes can be used, around what computes attention on
one device. Whatever is asked of them comes down to parts of the problem (`parts`), which are
problems like any other: for each pair of shards of queries and keys (`ring`), for a shard of
queries and all keys (`gather`), or for all queries and keys of some heads (`heads`). `choose`
decides.
"""

import dataclasses
from collections.abc import Callable

from jax import lax

from pallas_flash._context import gather, heads, ring
from pallas_flash._context.choice import METHODS, Choice, choose
from pallas_flash._context.parts import whole_keys
from pallas_flash._context.ring import calls_in_order
from pallas_flash._partition import Along
from pallas_flash._problem import Gradients, Problem
from pallas_flash._scores import LogSum

__all__ = [
    "METHODS",
    "Choice",
    "backward",
    "calls_in_order",
    "choose",
    "forward",
    "whole_keys",
]


def forward(run: Callable, problem: Problem, along: Along, method: str):
    """The output [B, T, N, V] and a `LogSum` of [B, N, T], of a device's queries.

    Args:
        run: what computes both for a problem on one device.
        problem: what this device has of the call; bias and mask arrays have rows for its queries,
            and columns for all keys.
        along: which mesh axes divide the sequence.
        method: one of `METHODS`.
    """
    return _MODULES[method].forward(run, problem, along)


def backward(
    run: Callable, problem: Problem, o, log_sum: LogSum, do, dlse, along: Along, wanted, method: str
) -> Gradients:
    """A device's share of the gradients: of what devices share they are still to be added up.

    Args:
        run: what computes them for a problem on one device, with the keyword `sinks`: whether their
            gradient is wanted.
        problem: as in `forward`, whose results are `o` and `log_sum`.
        o: [B, T, N, V].
        log_sum: [B, N, T].
        do: [B, T, N, V], the cotangent of `o`.
        dlse: [B, T, N], that of the natural LSE, or None.
        along: as in `forward`.
        wanted: which gradients are asked for, see `_vjp.Wanted`.
        method: as in `forward`.
    """
    # Else the compiler sends keys for the backward while the forward waits for its own, or takes
    # those of the forward for both, and keeps all of them until then.
    operands = problem.query, problem.key, problem.value
    operands, o, log_sum, do = lax.optimization_barrier((operands, o, log_sum, do))
    query, key, value = operands
    problem = dataclasses.replace(problem, query=query, key=key, value=value)
    return _MODULES[method].backward(run, problem, o, log_sum, do, dlse, along, wanted)


_MODULES = {"ring": ring, "gather": gather, "heads": heads}
