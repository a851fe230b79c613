"""Letters for the axes of every array of a problem, and maps over its arrays by these letters.

Sharding, cutting into parts, and exchange between devices follow from the letters alone.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from pallas_flash._problem.dropout import Dropout
from pallas_flash._problem.mask_leaves import BlockLeaf, PredicateLeaf, PrefixLeaf
from pallas_flash._problem.masks import Band, Lengths, SegmentLeaf
from pallas_flash._problem.operands import Divisible, Pairs, Positions
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.scores import Scores

# The axes of every array of a problem: b batch elements, t queries, s keys, a keys where every
# device has all of them, n query heads, k key/value heads, h and v head dims. An axis of length 1
# is shared under any letter. Every axis that is not named here is shared, too: axes of operands of
# user's functions, and of tables of blocks.
ALL_KEYS = "a"
AXES = {
    Problem: {
        "query": "btnh",
        "key": "bskh",
        "value": "bskv",
        "bias": "bnta",
        "sinks": "n",
        "slopes": "n",
        "key_center": "bkh",
    },
    Scores: {"offset": "b"},
    Pairs: {"array": "bnta"},
    Positions: {"query": "bt", "key_value": "bs"},
    Band: {"offset": "b"},
    Lengths: {"query": "b", "key_value": "b"},
    SegmentLeaf: {"query": "bt", "key_value": "bs"},
    PrefixLeaf: {"prefix_lengths": "b", "offset": "b"},
    BlockLeaf: {"some": "bn", "every": "bn"},
}
OUTPUT, LSE, ROW = "btnv", "btn", "bnt"

SHARED = "1"
# The letters of axes that `jax.vmap` has put in front.
MAPPED = "23456789"
FEATURES = "hv"


def letters(problem: Problem) -> Problem:
    """Return the problem with the letters of its axes instead of each array."""

    def name(x: Any, axes: str = "") -> Any:
        if isinstance(x, tuple):
            return tuple(map(name, x))
        if isinstance(x, Divisible):
            return replace_fields(x, name)
        if not isinstance(x, jax.Array):
            return x
        known = zip(axes.ljust(x.ndim, SHARED), x.shape, strict=True)
        return "".join(SHARED if n == 1 else letter for letter, n in known)

    return name(problem)


def axes_of(x: Any) -> Mapping[str, str]:
    """Return the letters of the fields of a dataclass; subclasses have their base's."""
    return next((AXES[kind] for kind in type(x).__mro__ if kind in AXES), {})


def replace_fields(x: Any, fn: Callable) -> Any:
    """Return a dataclass with `fn(field, letters of the field)` instead of each field."""
    axes = axes_of(x)
    fields = {name: fn(y, axes.get(name, "")) for name, y in _fields(x).items()}
    return dataclasses.replace(x, **fields)


def _fields(x: Any) -> dict[str, Any]:
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}


def with_origin(part: Problem, *, b: Any = 0, h: Any = 0, q: Any = 0, k: Any = 0) -> Problem:
    """Return a part that knows the indices of its first batch element, query head, query and key.

    Dropout and user's functions need them. They count from the first indices of the whole that the
    part belongs to, which may have an origin, too.
    """
    if any(isinstance(x, Tracer) for x in (b, h, q, k)) or any((b, h, q, k)):
        first = jnp.stack([jnp.asarray(x, jnp.int32) for x in (b, h, q, k)])
    else:
        return part

    def put(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(put, x))
        if not isinstance(x, Divisible):
            return x
        fields = {name: put(y) for name, y in _fields(x).items() if name != "origin"}
        if isinstance(x, (Dropout, PredicateLeaf)) or (isinstance(x, Scores) and x.score_mod):
            whole: Any = x.origin
            fields["origin"] = first if whole is None else whole + first
        return dataclasses.replace(x, **fields)

    return put(part)
