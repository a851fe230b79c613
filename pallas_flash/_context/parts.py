"""A part of a problem is a problem: some queries in a row, and some keys in a row.

Arrays are cut, by the letters of their axes (`_partition.AXES`). What speaks of positions is moved,
so that in a part positions count from 0, too: where a class of the problem has a method
`moved(part)`, it is called after its arrays were cut. What asks for indices of the whole call
(dropout, functions of the user's) is told where the part begins, in its field `origin`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_flash import _partition
from pallas_flash._partition import Along
from pallas_flash._problem import Problem


class Side(NamedTuple):
    """The queries of a part, or its keys.

    Attributes:
        first: the position of the first one, a multiple of `length`; may be traced.
        length: how many.
        at: the index of the first one in arrays, which need not hold the whole sequence.
    """

    first: Any
    length: int
    at: Any

    def inside(self, length):
        """How many of this side's positions are below a length."""
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
        """The position of query 0 relative to key 0: an int and None, or 0 and int32 [B].

        Args:
            shift: the same of the whole, where it is known.
            offset: int32 [B]; None if it is `shift`.
        """
        if offset is None and isinstance(self.distance, int):
            return shift + self.distance, None
        return 0, self.distance + (shift if offset is None else offset)


def part_of(problem: Problem, part: Part) -> Problem:
    """The part as a problem of its own."""
    sides = {"t": part.q, "s": part.kv, _partition.ALL_KEYS: part.kv}

    def cut(x: Any, axes: str = "") -> Any:
        if isinstance(x, tuple):
            return tuple(map(cut, x))
        if dataclasses.is_dataclass(x):
            keys = _of_same_tokens(x)
            x = x if keys is None else _partition.replaced(x, {"key_value": keys})
            x = _partition.replace_fields(x, cut)
            return x.moved(part) if hasattr(x, "moved") else x
        for axis, letter in enumerate(axes):
            side = sides.get(letter)
            if side is not None and x is not None and x.shape[axis] not in (1, side.length):
                x = lax.dynamic_slice_in_dim(x, side.at, side.length, axis)
        return x

    return _partition.with_origin(cut(problem), q=part.q.first, k=part.kv.first)


def with_all_keys(problem: Problem, along: Along) -> Problem:
    """A device's problem where arrays of keys in masks and scores are those of all keys.

    They are small: a number or two for each key. Keys and values themselves stay.
    """

    def gathered(x: Any, axes: str = "") -> Any:
        if isinstance(x, tuple):
            return tuple(map(gathered, x))
        if not dataclasses.is_dataclass(x):
            divided = along.keys and "s" in axes and x is not None
            return gather(along, x, axes.index("s")) if divided else x
        if (keys := _of_same_tokens(x)) is not None:
            # Of the queries a device has its own alone.
            return _partition.replaced(x, {"key_value": gather(along, keys, 1)})
        return _partition.replace_fields(x, gathered)

    kept = {name: getattr(problem, name) for name in ("key", "value")}
    rest = dataclasses.replace(problem, **dict.fromkeys(kept))
    return dataclasses.replace(gathered(rest), **kept)


def _of_same_tokens(x: Any):
    """An array of queries that stands for one of keys as well; None if there is none."""
    keys = "s" in _partition.axes_of(x).get("key_value", "")
    return x.query if keys and x.key_value is None else None


def gather(along: Along, x, axis: int):
    """The whole of an axis that devices have divided."""
    return lax.all_gather(x, along.names, axis=axis, tiled=True)


class Device(NamedTuple):
    """Where this device is along the mesh axes that divide the sequence.

    Attributes:
        index: its number, traced.
        number: how many there are.
    """

    index: Any
    number: int


def device(along: Along) -> Device:
    """This one."""
    return Device(lax.axis_index(along.names).astype(jnp.int32), lax.axis_size(along.names))


def for_each_example(problem: Problem, distance):
    """A distance that is traced, as `Part` has it."""
    return jnp.full((problem.batch,), distance, jnp.int32)


def gathered_keys(problem: Problem, along: Along) -> Problem:
    """A device's problem with all keys and values, by operations that JAX differentiates."""
    problem = with_all_keys(problem, along)
    if along.keys:
        key, value = (gather(along, x, 1) for x in (problem.key, problem.value))
        problem = dataclasses.replace(problem, key=key, value=value)
    return problem


def whole_keys(problem: Problem, along: Along) -> Problem:
    """The part of a device's queries and all keys, likewise."""
    problem = gathered_keys(problem, along)
    first = device(along).index * problem.q_len
    part = Part(
        Side(first, problem.q_len, 0), Side(0, problem.kv_len, 0), for_each_example(problem, first)
    )
    return part_of(problem, part)


def visit(part: Problem, fn: Callable, carry):
    """`fn(carry)` if anything is seen in a part, else `carry`."""
    seen = part.mask.sees(part.q_len, part.kv_len)
    if isinstance(seen, bool):
        return fn(carry) if seen else carry
    return lax.cond(seen, fn, lambda carry: carry, carry)
