"""The method "gather": each device gathers all keys and values, and computes its own queries.

    forward     all-gather k, v       o and lse of own queries and all keys
    backward    all-gather k, v       dq, and a part of dk and dv of all keys
                all-to-all dk, dv     the parts of own keys, added up in float32

Every device holds the keys and values of the whole sequence for a while, so this is a method for
few key/value heads.

Under a causal mask or a window, a program for up to `CALLS` devices contains one call for each
device, and a device runs its own. The kernels then know the positions of its queries, and the call
leaves out keys that no query sees. For more devices there is one call, with an array of offsets.
"""

import jax.numpy as jnp
from jax import lax

from pallas_flash._execution.context.parts import (
    Part,
    Side,
    device,
    gathered_keys,
    part_of,
    whole_keys,
)
from pallas_flash._execution.partition import Along
from pallas_flash._problem.problem import Gradients, Problem

# The number of devices up to which the program has a call for each.
CALLS = 8
# Keys are left out in multiples of this, the largest key tile.
TILE = 128


def forward(run, problem: Problem, along: Along):
    """Return the output [B, T, N, V] and a `LogSum` of [B, N, T], of a device's queries."""
    return _run_for_device(run, problem, along)


def backward(run, problem: Problem, o, log_sum, do, dlse, along: Along, wanted):
    """Return a device's gradients."""

    def with_all_keys(part):
        grads: Gradients = run(part, o, log_sum, do, dlse, sinks=wanted.sinks)
        return grads._replace(
            key=_padded(grads.key, 1, kv_len),
            value=_padded(grads.value, 1, kv_len),
            bias=None if grads.bias is None else _padded(grads.bias, 3, problem.bias.shape[3]),
        )

    kv_len = problem.kv_len * (device(along).number if along.keys else 1)
    grads = _run_for_device(with_all_keys, problem, along)
    if not along.keys:
        return grads
    dk, dv = (home(x, along, problem) for x in (grads.key, grads.value))
    return grads._replace(key=dk, value=dv)


def home(x, along: Along, problem: Problem):
    """Return the sum of all devices' parts of a gradient [B, S, K, H], for this device's keys.

    This is a reduce-scatter with a fixed order of addition, in float32 for messages of any dtype.
    """
    count = device(along).number
    x = x.reshape(x.shape[0], count, -1, *x.shape[2:])
    x = lax.all_to_all(x, along.names, split_axis=1, concat_axis=1, tiled=True)
    return jnp.sum(x, axis=1, dtype=problem.accumulator_dtype).astype(x.dtype)


def _run_for_device(fn, problem: Problem, along: Along):
    """Return `fn(part)` for a device's queries and the keys up to the last one they may see."""
    here, q_len = device(along), problem.q_len
    windows = [x for x in problem.mask.windows if x.known]
    if not windows or here.number > CALLS:
        return fn(whole_keys(problem, along))
    problem = gathered_keys(problem, along)

    def branch(number: int):
        first, kv_len = number * q_len, problem.kv_len
        for window in windows:
            if window.high is not None:
                visible = max(first + q_len + window.high, 1)
                kv_len = min(kv_len, -(-visible // TILE) * TILE)
        part = Part(Side(first, q_len, 0), Side(0, kv_len, 0), first)
        return lambda problem: fn(part_of(problem, part))

    return lax.switch(here.index, [branch(i) for i in range(here.number)], problem)


def _padded(x, axis: int, length: int):
    """Return `x` padded with zeros to a length."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = 0, length - x.shape[axis]
    return jnp.pad(x, padding) if x.shape[axis] < length else x
