"""A part of a problem is a problem: some consecutive queries and some consecutive keys.

`part_of` cuts arrays by the letters of their axes (`_execution.partition.axes.AXES`). Then it calls
the method `restrict(part)` of every class, which shifts positions so that the part counts from 0.
Dropout and user's functions need indices of the whole call; their field `origin` says where the
part begins.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_flash._execution import partition
from pallas_flash._execution.partition import Along
from pallas_flash._problem.operands import Divisible
from pallas_flash._problem.problem import Problem


class Side(NamedTuple):
    """The queries of a part, or its keys.

    Attributes:
        first: the position of the first token, a multiple of `length`; may be traced.
        length: the number of tokens.
        at: the index of the first token in arrays, which need not hold the whole sequence.
    """

    first: Any
    length: int
    at: Any

    def inside(self, length):
        """Return how many of this side's positions are below a length."""
        return jnp.clip(length - self.first, 0, self.length).astype(jnp.int32)


class Part(NamedTuple):
    """Some queries and some keys.

    Attributes:
        q: the queries.
        kv: the keys.
        distance: q.first - kv.first, an int where it is known, else int32 [B].
    """

    q: Side
    kv: Side
    distance: Any

    def offset(self, shift: int, offset) -> tuple[int, Any]:
        """Return the position of query 0 relative to key 0: an int and None, or 0 and int32 [B].

        Args:
            shift: the relative position in the whole problem, where it is known.
            offset: int32 [B]; None if it is `shift`.
        """
        if offset is None and isinstance(self.distance, int):
            return shift + self.distance, None
        return 0, self.distance + (shift if offset is None else offset)


def part_of(problem: Problem, part: Part) -> Problem:
    """Return the part as a problem."""
    sides = {"t": part.q, "s": part.kv, partition.ALL_KEYS: part.kv}

    def cut(x: Any, axes: str = "") -> Any:
        if isinstance(x, tuple):
            return tuple(map(cut, x))
        if isinstance(x, Divisible):
            keys = _array_of_same_tokens(x)
            x = x if keys is None else dataclasses.replace(x, key_value=keys)
            x = partition.replace_fields(x, cut)
            return x.restrict(part)
        for axis, letter in enumerate(axes):
            side = sides.get(letter)
            if side is not None and x is not None and x.shape[axis] not in (1, side.length):
                x = lax.dynamic_slice_in_dim(x, side.at, side.length, axis)
        return x

    return partition.with_origin(cut(problem), q=part.q.first, k=part.kv.first)


def with_all_keys(problem: Problem, along: Along) -> Problem:
    """Return a device's problem with the masks' and scores' arrays of all keys.

    These arrays are small: a number or two for each key. Keys and values stay the device's own.
    """

    def gathered(x: Any, axes: str = "") -> Any:
        if isinstance(x, tuple):
            return tuple(map(gathered, x))
        if not isinstance(x, Divisible):
            divided = along.keys and "s" in axes and x is not None
            return gather(along, x, axes.index("s")) if divided else x
        if (keys := _array_of_same_tokens(x)) is not None:
            # The queries' array holds the device's own queries alone.
            return dataclasses.replace(x, key_value=gather(along, keys, 1))
        return partition.replace_fields(x, gathered)

    kept = {name: getattr(problem, name) for name in ("key", "value")}
    rest = dataclasses.replace(problem, **dict.fromkeys(kept))
    return dataclasses.replace(gathered(rest), **kept)


def _array_of_same_tokens(x: Any):
    """Return the array of queries that also stands for the keys; None if there is none."""
    keys = "s" in partition.axes_of(x).get("key_value", "")
    return x.query if keys and x.key_value is None else None


def gather(along: Along, x, axis: int):
    """Gather an axis that devices divide."""
    return lax.all_gather(x, along.names, axis=axis, tiled=True)


class Device(NamedTuple):
    """The place of this device along the mesh axes that divide the sequence.

    Attributes:
        index: the device's index, traced.
        number: the number of devices.
    """

    index: Any
    number: int


def device(along: Along) -> Device:
    """Return the place of this device."""
    return Device(lax.axis_index(along.names).astype(jnp.int32), lax.axis_size(along.names))


def distance_per_batch_element(problem: Problem, distance):
    """Return a traced distance in the form of `Part.distance`."""
    return jnp.full((problem.batch,), distance, jnp.int32)


def gathered_keys(problem: Problem, along: Along) -> Problem:
    """Return a device's problem with all keys and values; JAX can differentiate this."""
    problem = with_all_keys(problem, along)
    if along.keys:
        key, value = (gather(along, x, 1) for x in (problem.key, problem.value))
        problem = dataclasses.replace(problem, key=key, value=value)
    return problem


def whole_keys(problem: Problem, along: Along) -> Problem:
    """Return the part of a device's queries and all keys; JAX can differentiate this."""
    problem = gathered_keys(problem, along)
    first = device(along).index * problem.q_len
    part = Part(
        Side(first, problem.q_len, 0),
        Side(0, problem.kv_len, 0),
        distance_per_batch_element(problem, first),
    )
    return part_of(problem, part)


def visit(part: Problem, fn: Callable, carry):
    """Return `fn(carry)` if the part has any allowed pair, else `carry`."""
    sees = part.mask.sees(part.q_len, part.kv_len)
    if isinstance(sees, bool):
        return fn(carry) if sees else carry
    return lax.cond(sees, fn, lambda carry: carry, carry)
