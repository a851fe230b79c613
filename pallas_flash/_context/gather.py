"""Keys and values are gathered once; each device then has all that its queries see.

    forward     all-gather k, v       o and lse of own queries and all keys
    backward    all-gather k, v       dq, and a part of dk and dv of all keys
                all-to-all dk, dv     the parts of own keys, added up in float32

For few key/value heads: every device holds those of the whole sequence for a while.
"""

import jax.numpy as jnp
from jax import lax

from pallas_flash._context.parts import device, whole_keys
from pallas_flash._partition import Along
from pallas_flash._problem import Gradients, Problem


def forward(run, problem: Problem, along: Along):
    """The output [B, T, N, V] and a `LogSum` of [B, N, T], of a device's queries."""
    return run(whole_keys(problem, along))


def backward(run, problem: Problem, o, log_sum, do, dlse, along: Along, wanted):
    """A device's share of the gradients."""
    grads: Gradients = run(whole_keys(problem, along), o, log_sum, do, dlse, sinks=wanted.sinks)
    if not along.keys:
        return grads
    dk, dv = (home(x, along, problem) for x in (grads.key, grads.value))
    return grads._replace(key=dk, value=dv)


def home(x, along: Along, problem: Problem):
    """The sum of all devices' parts of a gradient [B, S, K, H], for this device's keys.

    As a reduce-scatter, but in an order that is always the same, and in float32 whatever is sent.
    """
    count = device(along).number
    x = x.reshape(x.shape[0], count, -1, *x.shape[2:])
    x = lax.all_to_all(x, along.names, split_axis=1, concat_axis=1, tiled=True)
    return jnp.sum(x, axis=1, dtype=problem.accumulator_dtype).astype(x.dtype)
