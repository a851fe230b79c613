"""The method "heads": each device computes some heads, of all queries and keys.

    [B, T / n, N, H]   all-to-all   [B, T, N / n, H]   attention   all-to-all back

Every device has the same work under any mask. If devices do not divide the key/value heads, each
device receives the key/value heads of its query heads, and some go to several devices. (Jacobs et
al., 2023, "DeepSpeed Ulysses", arXiv:2309.14509.)
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash._execution import partition
from pallas_flash._execution.context.parts import device, gather
from pallas_flash._execution.partition import LSE, OUTPUT, ROW, Along
from pallas_flash._problem.problem import Gradients, Problem
from pallas_flash._problem.scores import LogSum


def forward(run, problem: Problem, along: Along):
    """Return the output [B, T, N, V] and a `LogSum` of [B, N, T], of a device's queries."""
    o, log_sum = run(_divided(problem, along))
    there = Exchange(problem, along)
    o = jax.tree.map(lambda x: there.back(x, OUTPUT), o)
    return o, jax.tree.map(lambda x: there.back(x, ROW), log_sum)


def backward(run, problem: Problem, o, log_sum: LogSum, do, dlse, along: Along, wanted):
    """Return a device's gradients."""
    there = Exchange(problem, along)
    rows = (
        jax.tree.map(lambda x: there(x, OUTPUT), o),
        jax.tree.map(lambda x: there(x, ROW), log_sum),
        there(do, OUTPUT),
        None if dlse is None else there(dlse, LSE),
    )
    grads: Gradients = run(_divided(problem, along), *rows, sinks=wanted.sinks)
    axes = partition.letters(problem)
    return grads._replace(
        query=there.back(grads.query, axes.query),
        key=there.keys_back(grads.key),
        value=there.keys_back(grads.value),
        bias=None if grads.bias is None else there.back(grads.bias, axes.bias),
        sinks=None if grads.sinks is None else there.back(grads.sinks, "n"),
        slopes=None if grads.slopes is None else there.back(grads.slopes, "n"),
    )


def _divided(problem: Problem, along: Along) -> Problem:
    """Return the problem of all queries and keys of a device's heads."""
    there = Exchange(problem, along)
    none = dict(key=None, value=None)
    rest, axes = (dataclasses.replace(x, **none) for x in (problem, partition.letters(problem)))
    whole = dataclasses.replace(
        jax.tree.map(there, rest, axes),
        key=there.keys(problem.key),
        value=there.keys(problem.value),
    )
    return partition.with_origin(whole, h=there.here.index * there.heads)


class Exchange:
    """Moves arrays between a part of the sequence and a part of the heads, by letters of axes."""

    def __init__(self, problem: Problem, along: Along):
        self.names, self.here = along.names, device(along)
        self.along, self.problem = along, problem
        self.heads = problem.num_heads // self.here.number
        # For each run of a device's query heads that share a key/value head, that head.
        run = math.gcd(self.heads, problem.groups)
        firsts = range(0, problem.num_heads, run)
        self.of_devices = np.array([h // problem.groups for h in firsts], np.int32)

    def __call__(self, x, axes: str):
        """Return a part of the heads from a part of the sequence."""
        heads, rows = (axes.find(letter) for letter in "nt")
        if "s" in axes:
            return gather(self.along, x, axes.index("s"))
        if heads >= 0 and rows >= 0:
            return self._all_to_all(x, heads, rows)
        if rows >= 0:
            return gather(self.along, x, rows)
        if heads >= 0:
            return lax.dynamic_slice_in_dim(x, self.here.index * self.heads, self.heads, heads)
        return x

    def back(self, x, axes: str):
        """Return a part of the sequence, or of a sum over devices, from a part of the heads."""
        heads, rows = (axes.find(letter) for letter in "nt")
        if heads >= 0 and rows >= 0:
            return self._all_to_all(x, rows, heads)
        if rows >= 0:
            wide = x.astype(self.problem.accumulator_dtype)
            sums = lax.psum_scatter(wide, self.names, scatter_dimension=rows, tiled=True)
            return sums.astype(x.dtype)
        if heads >= 0:
            shape = list(x.shape)
            shape[heads] = self.problem.num_heads
            none = lax.full_like(x, 0, shape=tuple(shape))
            return lax.dynamic_update_slice_in_dim(none, x, self.here.index * self.heads, heads)
        return x

    def keys(self, x):
        """Return the key/value heads of a device's query heads from a part of the sequence."""
        if len(self.of_devices) != x.shape[2]:
            x = jnp.take(x, self.of_devices, axis=2)
        return self._all_to_all(x, 2, 1)

    def keys_back(self, x) -> Any:
        """Return the gradient of a part of the keys from the gradients of a device's heads."""
        x = self._all_to_all(x, 1, 2)
        count = self.problem.num_kv_heads
        if x.shape[2] == count:
            return x
        wide = x.astype(self.problem.accumulator_dtype)
        sums = lax.full_like(wide, 0, shape=(*x.shape[:2], count, x.shape[3]))
        return sums.at[:, :, self.of_devices].add(wide).astype(x.dtype)

    def _all_to_all(self, x, split: int, join: int):
        return lax.all_to_all(x, self.names, split_axis=split, concat_axis=join, tiled=True)
