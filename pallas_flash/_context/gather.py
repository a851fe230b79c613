"""Keys and values are gathered once; each device then has all that its queries see.

    forward     all-gather k, v       o and lse of own queries and all keys
    backward    all-gather k, v       dq, and a part of dk and dv of all keys
                all-to-all dk, dv     the parts of own keys, added up in float32

For few key/value heads: every device holds those of the whole sequence for a while.

Under a causal mask or a window a program of a few devices has a call for each, of which a device
runs its own: where its queries stand is then known to the kernels, and keys after all of them are
left out. For more devices there is one call, which is told by an array.
"""

import jax.numpy as jnp
from jax import lax

from pallas_flash._context.parts import Part, Side, device, gathered_keys, part_of, whole_keys
from pallas_flash._masks import Band
from pallas_flash._partition import Along
from pallas_flash._problem import Gradients, Problem

# Up to so many devices have a call each.
CALLS = 8
# Keys are left out by so many, a tile of the largest kernels.
TILE = 128


def forward(run, problem: Problem, along: Along):
    """The output [B, T, N, V] and a `LogSum` of [B, N, T], of a device's queries."""
    return _for_device(run, problem, along)


def backward(run, problem: Problem, o, log_sum, do, dlse, along: Along, wanted):
    """A device's share of the gradients."""

    def with_all_keys(part):
        grads: Gradients = run(part, o, log_sum, do, dlse, sinks=wanted.sinks)
        return grads._replace(
            key=_padded(grads.key, 1, kv_len),
            value=_padded(grads.value, 1, kv_len),
            bias=None if grads.bias is None else _padded(grads.bias, 3, problem.bias.shape[3]),
        )

    kv_len = problem.kv_len * (device(along).number if along.keys else 1)
    grads = _for_device(with_all_keys, problem, along)
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


def _for_device(fn, problem: Problem, along: Along):
    """`fn(part)` of a device's queries and the keys that they may see, the first ones of all."""
    here, q_len = device(along), problem.q_len
    bands = [x for x in problem.mask.leaves if isinstance(x, Band) and x.offset is None]
    if not bands or here.number > CALLS:
        return fn(whole_keys(problem, along))
    problem = gathered_keys(problem, along)

    def of(number: int):
        first, kv_len = number * q_len, problem.kv_len
        for band in bands:
            if band.high is not None:
                seen = max(first + q_len + band.high, 1)
                kv_len = min(kv_len, -(-seen // TILE) * TILE)
        part = Part(Side(first, q_len, 0), Side(0, kv_len, 0), first)
        return lambda problem: fn(part_of(problem, part))

    return lax.switch(here.index, [of(i) for i in range(here.number)], problem)


def _padded(x, axis: int, length: int):
    """`x` with zeros after it."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = 0, length - x.shape[axis]
    return jnp.pad(x, padding) if x.shape[axis] < length else x
