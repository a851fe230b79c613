"""The reads of tables with a gradient, and the sum of a gradient at the places that are read.

A table is the array of slopes, or a floating operand of the score function. A score reads a table
at an index that its indices b, h, q and k give. So the gradient of a table is

    dtable[n] = sum of ds/dread over all scores and reads whose index is n

Scores with the same index can be summed before their index is known. `reads_of` says on which of
the indices an index depends: at `table[h]` or `table[clip(q - k, 0, 9)]`, say, a kernel adds up all
scores of a head or of a diagonal, and `add_at` has few numbers to add to the table.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from pallas_flash._jax.symbolic import known_at_most
from pallas_flash._problem.scores import Scores

# Conversions to these keep differences of indices. Sums of floats are rounded, which do not.
_KEEPS_DIFFERENCES = "int32", "uint32", "int64"
_COMPARISONS = "eq", "ne", "lt", "le", "gt", "ge"
_CALLS = "pjit", "jit", "closed_call", "custom_jvp_call"


class Read(NamedTuple):
    """One read of a table.

    Attributes:
        table: 0 for the slopes, 1 + i for operand i.
        letters: on which indices the read's index depends: of b, h, q, k, and d for q - k.
    """

    table: int
    letters: frozenset[str]

    @property
    def by_pair(self) -> bool:
        """Whether the index depends on q and on k in another way than through q - k."""
        return len(self.letters & set("qkd")) > 1


def reads_of(scores: Scores) -> tuple[Read, ...]:
    """Return the reads of floating tables, in the order of `Scores.reads`."""
    of_slopes = () if scores.slopes is None else (Read(0, frozenset("h")),)
    if scores.score_mod is None or not scores.operands:
        return of_slopes
    shapes = tuple((x.shape, jnp.dtype(x.dtype)) for x in scores.operands)
    return of_slopes + _reads_of_function(scores.score_mod, shapes)


@functools.lru_cache(256)
def _reads_of_function(score_mod, shapes) -> tuple[Read, ...]:
    arrays = tuple(jax.ShapeDtypeStruct(*x) for x in shapes)
    number, one = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    tables = []

    def indices(b, h, q, k, arrays):
        scores = Scores(score_mod=score_mod, operands=arrays)
        reads = scores.reads(jnp.zeros((1, 1), jnp.float32), b, h, q, k)
        tables.extend(table for table, _ in reads)
        # Each as one array, so that the results of the program are the indices.
        return [[jnp.asarray(i) for i in index] for _, index in reads]

    program, out = jax.make_jaxpr(indices, return_shape=True)(number, number, one, one, arrays)
    none = frozenset()
    of_arguments = [
        *(_Index(0, 0, frozenset(letter)) for letter in "bh"),
        *(_Index(1, 0, none), _Index(0, 1, none)),
        *[_Index(0, 0, none)] * len(jax.tree.leaves(arrays)),
    ]
    results = iter(_walk(program.jaxpr, of_arguments))
    return tuple(
        Read(table, none.union(*(next(results).letters for _ in index)))
        for table, index in zip(tables, out, strict=True)
    )


class _Index(NamedTuple):
    """An integer of a program: q * query + k * key + a function of what `rest` names.

    Attributes:
        q: the factor of the query's index.
        k: the factor of the key's index.
        rest: letters as in `Read.letters`.
    """

    q: int
    k: int
    rest: frozenset[str]

    @property
    def letters(self) -> frozenset[str]:
        if self.q == -self.k:
            return self.rest | ({"d"} if self.q else set())
        return self.rest | ({"q"} if self.q else set()) | ({"k"} if self.k else set())

    def plus(self, other: "_Index", sign: int = 1) -> "_Index":
        q, k = self.q + sign * other.q, self.k + sign * other.k
        return _Index(q, k, self.rest | other.rest)


def _walk(jaxpr: Any, arguments: list[_Index]) -> list[_Index]:
    """Return on what the results of a program depend, for what its arguments depend on."""
    known = dict(zip(jaxpr.invars, arguments, strict=True))
    nothing = _Index(0, 0, frozenset())

    def index_of(x):
        return nothing if isinstance(x, Literal) else known.get(x, nothing)

    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, list(map(index_of, eqn.invars))
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if name in _CALLS and inner is not None:
            results = _walk(inner.jaxpr, inputs)
        else:
            results = [_result(eqn, name, inputs)] * len(eqn.outvars)
        known.update(zip(eqn.outvars, results, strict=True))
    return list(map(index_of, jaxpr.outvars))


def _result(eqn, name: str, inputs: list[_Index]) -> _Index:
    if name in ("add", "sub"):
        return inputs[0].plus(inputs[1], 1 if name == "add" else -1)
    if name in _COMPARISONS:
        return _Index(0, 0, inputs[0].plus(inputs[1], -1).letters)
    if name == "neg":
        return _Index(0, 0, frozenset()).plus(inputs[0], -1)
    same = name in ("broadcast_in_dim", "reshape", "squeeze", "copy")
    if name == "convert_element_type":
        same = jnp.dtype(eqn.params["new_dtype"]).name in _KEEPS_DIFFERENCES
    if same:
        return inputs[0]
    return _Index(0, 0, frozenset().union(*(x.letters for x in inputs)))


def add_at(table, index: tuple, x, *, sort: bool):
    """Return the table with the numbers x added at their index; they keep the dtype of the table.

    Args:
        table: a floating array.
        index: an integer array inside of the table for each of its axes; they broadcast to x.
        x: the numbers.
        sort: whether to add in a deterministic order on a GPU, too, where a scatter has none: the
            numbers are sorted by their index, and sums of runs are a scan.
    """
    arrays = [jnp.reshape(i, (1,) * (x.ndim - jnp.ndim(i)) + jnp.shape(i)) for i in index]
    shared = tuple(axis for axis in range(x.ndim) if all(i.shape[axis] == 1 for i in arrays))
    x = x.sum(axis=shared, keepdims=True)
    if not index:
        return table + x.reshape(())
    arrays = [jnp.broadcast_to(i, x.shape).ravel() for i in arrays]
    x = x.ravel()
    if not sort or not known_at_most(math.prod(table.shape), 2**31 - 1):
        return table.at[tuple(arrays)].add(x, mode="promise_in_bounds")
    places = jnp.zeros_like(arrays[0])
    for i, n in zip(arrays, table.shape, strict=True):
        places = places * jnp.int32(n) + i
    places, x = lax.sort((places, x), num_keys=1, is_stable=True)
    changes, edge = places[1:] != places[:-1], jnp.ones_like(places[:1], bool)
    starts, ends = jnp.concatenate([edge, changes]), jnp.concatenate([changes, edge])

    def join(a, b):
        return a[0] | b[0], jnp.where(b[0], b[1], a[1] + b[1])

    _, sums = lax.associative_scan(join, (starts, x))
    # Only the last sum of a run is added: the others have a place outside of the table.
    size = math.prod(table.shape)
    places = jnp.where(ends, places, jnp.int32(size))
    return table.ravel().at[places].add(sums, mode="drop").reshape(table.shape)
