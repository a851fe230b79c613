"""Attention on a sequence that devices divide; `forward` and `backward` are the entry points.

Both run on each device, where collectives can name mesh axes, and call the attention of one device
for parts of the problem (`parts`), which are problems, too. `choose` picks one of three methods:

    ring      a call for each pair of a shard of queries and a shard of keys
    gather    a call for a shard of queries and all keys
    heads     a call for all queries and keys of some heads
"""

import dataclasses
from collections.abc import Callable

from jax import lax

from pallas_flash._execution.context import gather, heads, ring
from pallas_flash._execution.context.choice import METHODS as METHODS
from pallas_flash._execution.context.choice import Choice as Choice
from pallas_flash._execution.context.choice import choose as choose
from pallas_flash._execution.context.parts import whole_keys as whole_keys
from pallas_flash._execution.context.ring import calls_in_order as calls_in_order
from pallas_flash._execution.partition import Along
from pallas_flash._problem.problem import Gradients, Problem
from pallas_flash._problem.scores import LogSum


def forward(run: Callable, problem: Problem, along: Along, method: str):
    """Return the output [B, T, N, V] and a `LogSum` of [B, N, T], of a device's queries.

    Args:
        run: computes both for a problem on one device.
        problem: this device's shard of the call; (q, k) arrays have rows for its queries and
            columns for all keys.
        along: the mesh axes that divide the sequence.
        method: one of `METHODS`.
    """
    return _MODULES[method].forward(run, problem, along)


def backward(
    run: Callable, problem: Problem, o, log_sum: LogSum, do, dlse, along: Along, wanted, method: str
) -> Gradients:
    """Return a device's gradients; gradients of operands that devices share are yet to be summed.

    Args:
        run: computes them for a problem on one device; its keyword `sinks` says whether to compute
            the gradient of the sinks.
        problem: as in `forward`, which returned `o` and `log_sum`.
        o: [B, T, N, V], or a `SplitOutput`.
        log_sum: [B, N, T].
        do: [B, T, N, V], the cotangent of `o`.
        dlse: [B, T, N], the cotangent of the natural LSE, or None.
        along: as in `forward`.
        wanted: the gradients to compute, see `_execution.plan.Wanted`.
        method: as in `forward`.
    """
    # Without the barrier, the compiler may send keys for the backward while the forward waits for
    # its own. Or it keeps the keys that the forward received until the backward.
    operands = problem.query, problem.key, problem.value
    operands, o, log_sum, do = lax.optimization_barrier((operands, o, log_sum, do))
    query, key, value = operands
    problem = dataclasses.replace(problem, query=query, key=key, value=value)
    return _MODULES[method].backward(run, problem, o, log_sum, do, dlse, along, wanted)


_MODULES = {"ring": ring, "gather": gather, "heads": heads}
