"""How a call is divided over the devices of a mesh: by examples, by heads and along the sequence.

Examples and key/value heads know nothing of each other, so a device that holds some of both
computes its part alone. Only gradients of what devices share are summed over them. Along the
sequence devices need each other's keys: that is `_context`'s. There are three ways in which JAX may
be told how arrays lie:

* Manual axes, inside `jax.shard_map`: the arrays are parts already, and nothing is left to do but
  along a sequence, whose axis the call names;
* Explicit axes: types tell, and `explicitly` puts a `shard_map` around the op;
* Auto axes: only XLA's partitioner knows, while it compiles. It would gather the operands of a
  kernel on every device; `divided` tells it with `custom_partitioning` what each one can do alone.

`letters` says what the axes of an array are. Everything here follows from it.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_flash._dropout import Dropout
from pallas_flash._mask_objects import BlockMask, Predicate, PrefixLM
from pallas_flash._masks import Band, Lengths, Segments
from pallas_flash._operands import Pairs, Positions
from pallas_flash._problem import Gradients, Problem
from pallas_flash._scores import Scores
from pallas_flash._symbolic import is_symbolic

# The axes of every array of a problem: b examples, t queries, s keys, a keys where every device has
# all of them, n query heads, k key/value heads, h and v sizes of heads. An axis of length 1 is
# shared, whatever its letter, and so is every axis that is not named here: those of operands of the
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
    Segments: {"query": "bt", "key_value": "bs"},
    PrefixLM: {"prefix_lengths": "b", "offset": "b"},
    BlockMask: {"some": "bn", "every": "bn"},
}
OUTPUT, LSE, ROW = "btnv", "btn", "bnt"

SHARED = "1"
# Axes that `jax.vmap` has put in front.
MAPPED = "23456789"
FEATURES = "hv"


def letters(problem: Problem) -> Problem:
    """The problem with the letters of its axes in place of each array."""

    def name(x: Any, axes: str = "") -> Any:
        if isinstance(x, tuple):
            return tuple(map(name, x))
        if dataclasses.is_dataclass(x):
            return replace_fields(x, name)
        if not isinstance(x, jax.Array):
            return x
        known = zip(axes.ljust(x.ndim, SHARED), x.shape, strict=True)
        return "".join(SHARED if n == 1 else letter for letter, n in known)

    return name(problem)


def axes_of(x: Any) -> Mapping[str, str]:
    """The letters of the fields of a dataclass. A class made from a leaf has that leaf's."""
    return next((AXES[kind] for kind in type(x).__mro__ if kind in AXES), {})


def replace_fields(x: Any, fn: Callable) -> Any:
    """A dataclass with `fn(field, its letters)` in place of each field."""
    axes = axes_of(x)
    return replaced(x, {name: fn(y, axes.get(name, "")) for name, y in vars(x).items()})


def replaced(x: Any, fields: dict[str, Any]) -> Any:
    """A dataclass of whatever kind with other fields."""
    return dataclasses.replace(x, **fields)


class Along(NamedTuple):
    """That a sequence is divided.

    Attributes:
        names: of the mesh axes that divide the queries, the slowest first.
        keys: whether they divide keys and values, too. If not, every device holds all.
    """

    names: tuple[str, ...]
    keys: bool = True


class Shards(NamedTuple):
    """The part of a problem that one device holds.

    Attributes:
        batch: names of the mesh axes that divide the examples.
        heads: names of the mesh axes that divide the heads.
        key_heads: whether they divide the key/value heads, too. If not, because there are too few
            of them, every device holds all.
        along: how the sequence is divided, if it is.
        mapped: names of the mesh axes that divide an axis of `jax.vmap`, by its letter.
        again: whether parts like it may follow, each in a program of its own.
    """

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    key_heads: bool = True
    along: Along | None = None
    mapped: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    again: bool = False

    def names(self, letter: str) -> tuple[str, ...]:
        """Of the mesh axes that divide the axis of an array."""
        if letter == "k" and not self.key_heads:
            return ()
        by_letter = {"b": self.batch, "n": self.heads, "k": self.heads, **self.mapped}
        if self.along is not None:
            by_letter |= {"t": self.along.names, "s": self.along.names if self.along.keys else ()}
        return by_letter.get(letter, ())

    def spec(self, axes: str) -> PartitionSpec:
        """How an array lies."""
        return PartitionSpec(*(self.names(letter) or None for letter in axes))

    def summed(self, axes: str) -> tuple[str, ...]:
        """Over which mesh axes the parts of an array's gradient are to be added up."""
        divided = {name for letter in axes for name in self.names(letter)}
        every = *self.batch, *self.heads, *(self.along.names if self.along else ())
        return tuple(name for name in every if name not in divided)


def _shards(mesh, found: Mapping[str, tuple[str, ...]], problem: Problem) -> Shards:
    """What the query's mesh axes mean for all, where they divide without a remainder.

    Args:
        mesh: the mesh.
        found: the names of its axes by the letters b, n, t and s.
        problem: the whole call.
    """
    batch, heads, rows, keys = (found.get(letter, ()) for letter in "bnts")

    def dividing(names, length):
        return names if length % _count(mesh, names) == 0 else ()

    heads = dividing(heads, problem.num_heads)
    key_heads = problem.num_kv_heads % _count(mesh, heads) == 0
    along = _along(mesh, rows, keys, problem)
    return Shards(dividing(batch, problem.batch), heads, key_heads, along)


def _along(mesh, rows, keys, problem: Problem) -> Along | None:
    """How the sequence is divided, by the mesh axes of queries and of keys."""
    # Mesh axes of one device divide nothing.
    rows, keys = (names if _count(mesh, names) > 1 else () for names in (rows, keys))
    if not rows and not keys:
        return None
    if keys not in ((), rows):
        names = ["nothing" if not x else ", ".join(map(repr, x)) for x in (rows, keys)]
        raise NotImplementedError(
            "`key` must be sharded along its sequence as `query` is, or not at all; got queries "
            f"(T={problem.q_len}) over {names[0]} and keys (S={problem.kv_len}) over {names[1]}. "
            "Shard both alike, or gather the keys (of a cache, say) before the call."
        )
    devices = _count(mesh, rows)
    check_lengths(problem.q_len, problem.kv_len if keys else None, devices, rows)
    return Along(rows, bool(keys))


def check_lengths(q_len: int, kv_len: int | None, devices: int, names) -> None:
    """Refuses sequences that devices do not divide, or that leave them less than two tokens.

    Args:
        q_len: T.
        kv_len: S; None if keys are not divided.
        devices: how many there are.
        names: of their mesh axes.
    """
    for name, letter, length in (("query", "T", q_len), ("key", "S", kv_len)):
        over = f"the {devices} devices of {', '.join(map(repr, names))}"
        if is_symbolic(length):
            raise NotImplementedError(
                f"`{name}` must have a known length where its sequence is sharded over {over}; "
                f"got {letter}={length}. Give the length a number, or gather the sequence before "
                "the call."
            )
        if length is not None and length % devices:
            raise NotImplementedError(
                f"`{name}` must have a length that {over} divide, which its sequence is sharded "
                f"over; got {letter}={length}. Pad it to {-(-length // devices) * devices}, and "
                "hide what was added by `query_seq_lengths` and `key_value_seq_lengths`."
            )
        if length is not None and length < 2 * devices:
            raise NotImplementedError(
                f"`{name}` must have two tokens or more for each of {over}, which its sequence is "
                f"sharded over; got {letter}={length}. Decode with a cache whose sequence is "
                "gathered, or sharded by heads."
            )


def _count(mesh, names) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _names(spec, rank: int) -> tuple[tuple[str, ...], ...]:
    """The names of mesh axes for each axis of an array."""
    entries = (*spec, *(None,) * (rank - len(spec)))
    return tuple(() if e is None else e if isinstance(e, tuple) else (e,) for e in entries)


def _check(mesh, problem: Problem, axes, names) -> None:
    """Refuses arrays that are divided along their features.

    Args:
        mesh: the mesh.
        problem: the arrays.
        axes: the letters of each.
        names: for each axis of each, those of the mesh axes that divide it.
    """
    paths = [path for path, _ in jax.tree.leaves_with_path(problem)]
    for path, letters, by_axis in zip(paths, axes, names, strict=True):
        for letter, mesh_axes in zip(letters, by_axis, strict=True):
            if letter in FEATURES and _count(mesh, mesh_axes) > 1:
                name = path[0].name
                raise NotImplementedError(
                    f"`{name}` must be sharded by examples, by heads or along its sequence; got "
                    f"its features sharded over {', '.join(map(repr, mesh_axes))}. Gather that "
                    "axis before the call, or shard by heads."
                )


# ------------------------------------------------------------------------------------------------
# One device's part
# ------------------------------------------------------------------------------------------------


def _part(fn: Callable, shards: Shards, axes_in, axes_out, args):
    """`fn(problem, *rows)` where every device computes its part.

    Args:
        fn: the function; its keyword `along` says how the sequence is divided, if it is.
        shards: how its arguments are divided.
        axes_in: letters of the arguments.
        axes_out: letters of the results.
        args: a device's part of the arguments; all key/value heads where they are not divided.
    """
    problem, *rows = args
    bias = problem.bias
    of_bias = axes_out.bias if isinstance(axes_out, Gradients) else None
    adds_bias = of_bias is not None and bool(shards.along or shards.summed(of_bias))
    if adds_bias:
        # So that its gradient is rounded once, when the shares of all devices have been added.
        problem = dataclasses.replace(problem, bias=bias.astype(problem.accumulator_dtype))
    problem = _with_origin(problem, shards)
    fn = functools.partial(fn, along=shards.along)
    heads = None
    if shards.heads and not shards.key_heads and "k" in axes_in[0].key:
        heads = _key_heads(problem, shards)
        key, value = (jnp.take(x, heads, axis=2) for x in (problem.key, problem.value))
        results = fn(dataclasses.replace(problem, key=key, value=value), *rows)
    else:
        results = fn(problem, *rows)

    def whole(axes, x):
        if heads is not None and "k" in axes:
            every = (*x.shape[:2], problem.num_kv_heads, x.shape[3])
            wide = x.astype(problem.accumulator_dtype)
            return jnp.zeros(every, wide.dtype).at[:, :, heads].add(wide)
        return x

    def add(axes, x):
        over = shards.summed(axes)
        if not over:
            return x
        x_whole = whole(axes, x)
        wide = x_whole.astype(jnp.promote_types(x.dtype, jnp.float32))
        return lax.psum(wide, over).astype(x.dtype)

    results = jax.tree.map(add, axes_out, results)
    if adds_bias:
        results = results._replace(bias=results.bias.astype(bias.dtype))
    return results


def _with_origin(part: Problem, shards: Shards) -> Problem:
    """A device's part that knows its first example and query head, where indices are asked for."""
    if not (shards.batch or shards.heads):
        return part

    def first(names, count):
        return lax.axis_index(names) * count if names else jnp.int32(0)

    return with_origin(
        part, b=first(shards.batch, part.batch), h=first(shards.heads, part.num_heads)
    )


def with_origin(part: Problem, *, b: Any = 0, h: Any = 0, q: Any = 0, k: Any = 0) -> Problem:
    """A part that knows its first example, query head, query and key, where it is asked for them.

    The first ones of what it is a part of, which may have an origin, too.
    """
    if any(isinstance(x, Tracer) for x in (b, h, q, k)) or any((b, h, q, k)):
        first = jnp.stack([jnp.asarray(x, jnp.int32) for x in (b, h, q, k)])
    else:
        return part

    def put(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(put, x))
        if not dataclasses.is_dataclass(x):
            return x
        fields = {name: put(y) for name, y in vars(x).items() if name != "origin"}
        if isinstance(x, (Dropout, Predicate)) or (isinstance(x, Scores) and x.score_mod):
            whole: Any = x.origin
            fields["origin"] = first if whole is None else whole + first
        return replaced(x, fields)

    return put(part)


def _key_heads(part: Problem, shards: Shards):
    """The key/value heads of a device's query heads, one for each run that shares one."""
    groups = part.num_heads * lax.axis_size(shards.heads) // part.num_kv_heads
    run = math.gcd(part.num_heads, groups)
    first = lax.axis_index(shards.heads) * part.num_heads
    return (first + jnp.arange(0, part.num_heads, run, dtype=jnp.int32)) // groups


# ------------------------------------------------------------------------------------------------
# Explicit axes
# ------------------------------------------------------------------------------------------------


def explicitly(attend: Callable, problem: Problem):
    """`attend(problem)`, the output and the LSE, inside a `shard_map` where types ask for one.

    Args:
        attend: the function; its keyword `along` says how the sequence is divided, if it is.
        problem: the call.
    """
    mesh = jax.typeof(problem.query).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return attend(problem, along=None)
    if problem.symbolic:
        raise NotImplementedError(
            "`query` must have known sizes under Explicit mesh axes, because JAX does not compile "
            f"a `shard_map` of symbolic ones; got {', '.join(map(str, problem.symbolic))}. Use "
            "Auto axes, or give each size a number."
        )
    axes = letters(problem)
    names = [_names(jax.typeof(x).sharding.spec, x.ndim) for x in jax.tree.leaves(problem)]
    _check(mesh, problem, jax.tree.leaves(axes), names)
    (batch, rows, heads, _), (_, keys, *_) = names[:2]
    found = {"b": batch, "t": rows, "n": heads, "s": keys}
    shards = _shards(mesh, found, problem)
    specs = jax.tree.map(shards.spec, axes)
    problem = jax.tree.map(
        lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), problem, specs
    )
    outs = OUTPUT, LSE
    results = jax.shard_map(
        lambda problem: _part(attend, shards, (axes,), outs, (problem,)),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=tuple(map(shards.spec, outs)),
        axis_names=_explicit_axes(mesh),
    )(problem)
    if shards.along is not None or not rows:
        return results
    # Along an axis of one device, whose name belongs into the types nevertheless.
    lie = PartitionSpec(shards.batch or None, rows, shards.heads or None)
    return tuple(jax.sharding.reshard(x, NamedSharding(mesh, lie)) for x in results)


def part_of_device(problem: Problem, query, key):
    """What a device has of a call, by how the given arrays of queries and keys lie.

    Returns:
        The shapes of its part, how the sequence is divided (None if it is not, or not known), and
        over how many devices.
    """
    of_query, of_key = _sharding(query), _sharding(key)
    if not (isinstance(of_query, NamedSharding) and isinstance(of_key, NamedSharding)):
        return problem, None, 1
    mesh = of_query.mesh
    (batch, rows, heads, _), (_, keys, *_) = (
        ((),) * (4 - x.ndim) + _names(sharding.spec, x.ndim)
        for x, sharding in ((query, of_query), (key, of_key))
    )
    shards = _shards(mesh, {"b": batch, "t": rows, "n": heads, "s": keys}, problem)
    if shards.along is None:
        return problem, None, 1

    def part(x, axes):
        sizes = (_count(mesh, shards.names(letter)) for letter in axes)
        shape = tuple(n // m for n, m in zip(x.shape, sizes, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    axes = letters(problem)
    names = "query", "key", "value"
    shapes = {name: part(getattr(problem, name), getattr(axes, name)) for name in names}
    return replaced(problem, shapes), shards.along, _count(mesh, shards.along.names)


def _sharding(x):
    """As far as it is known: of what is being traced, by its type."""
    if isinstance(x, Tracer):
        return jax.typeof(x).sharding
    return getattr(x, "sharding", None)


def _explicit_axes(mesh) -> set[str]:
    """Those to be made manual, with the ones that divide nothing."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name for name, kind in kinds.items() if kind == AxisType.Explicit}
    # None named means all but those over which `jax.vmap` maps.
    return explicit if len(explicit) < len(kinds) else set()


# ------------------------------------------------------------------------------------------------
# Auto axes
# ------------------------------------------------------------------------------------------------


def divided(fn: Callable, problem: Problem, *rows, axes_of_rows=(), axes_out: Callable):
    """`fn(problem, *rows)`, of which XLA's partitioner gives each device its part.

    Args:
        fn: the function; its keyword `along` says how the sequence is divided, if it is, and
            `again` what `Shards.again` is.
        problem: its first argument.
        *rows: its other arguments.
        axes_of_rows: their letters.
        axes_out: from the letters of the problem to those of the results.
    """
    # `custom_partitioning` needs known sizes. Plain JAX alone serves others, and XLA divides it.
    if problem.symbolic or not _several_devices():
        return fn(problem, *rows, along=None)
    axes = letters(problem)
    axes_in, results = (axes, *axes_of_rows), axes_out(axes)
    arrays, structure = jax.tree.flatten((problem, *rows))

    def part(shards: Shards, *arrays):
        args = jax.tree.unflatten(structure, arrays)
        run = functools.partial(fn, again=shards.again)
        return tuple(jax.tree.leaves(_part(run, shards, axes_in, results, args)))

    # Shapes only: the partitioner keeps them.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), problem)
    flat_in, flat_out = (tuple(jax.tree.leaves(x)) for x in (axes_in, results))
    run = _partitioned(part, shapes, flat_in, flat_out)
    return jax.tree.unflatten(jax.tree.structure(results), run(*arrays))


def _several_devices() -> bool:
    """Whether XLA may have to divide what is being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() > 1
    return mesh.size > 1 and all(kind == AxisType.Auto for kind in mesh.axis_types)


def _partitioned(part: Callable, problem: Problem, axes_in, axes_out, num_mapped: int = 0):
    """`part(Shards(), *arrays)` with a rule for XLA's partitioner.

    Args:
        part: of shards and arrays.
        problem: the shapes of the first arrays.
        axes_in: the letters of each array.
        axes_out: those of each result.
        num_mapped: how many times `jax.vmap` has put an axis in front; its letter is a digit.
    """

    def partition(mesh, args, results):
        del results
        names = [_names(x.sharding.spec, len(x.shape)) for x in args]
        operands = len(jax.tree.leaves(problem))
        _check(mesh, problem, axes_in[:operands], names[:operands])
        found: dict[str, tuple[str, ...]] = {}
        # The first array to name a mesh axis has it; the query is the very first, then the key.
        for axes, by_axis in zip(axes_in, names, strict=True):
            for letter, mesh_axes in zip(axes, by_axis, strict=True):
                if letter in "bnt" or letter in MAPPED:
                    taken = set().union(*found.values())
                    found.setdefault(letter, tuple(x for x in mesh_axes if x not in taken))
        keys = dict(zip(axes_in[1], names[1], strict=True)).get("s", ())
        mapped = {letter: names for letter, names in found.items() if letter in MAPPED}
        shards = _shards(mesh, found | {"s": keys}, problem)
        # What is lowered already is not to be mapped.
        shards = shards._replace(mapped=mapped, again=not num_mapped)

        def shardings(axes):
            return tuple(NamedSharding(mesh, shards.spec(x)) for x in axes)

        return mesh, functools.partial(part, shards), shardings(axes_out), shardings(axes_in)

    @custom_vmap
    def run(*arrays):
        # Under `jit`, because what is partitioned must not close over constants (ranges of tiles).
        call = custom_partitioning(jax.jit(functools.partial(part, Shards())))
        rule = _rule(
            axes_in,
            axes_out,
            one=problem.num_heads == problem.num_kv_heads,
            same_length=problem.q_len == problem.kv_len,
        )
        call.def_partition(partition, sharding_rule=rule)
        return call(*arrays)

    # JAX has no rule for mapping what is partitioned: a mapped axis is one more that divides.
    @run.def_vmap
    def _(size, batched, *arrays):
        del size
        in_axes = [0 if b else None for b in batched]
        letter = MAPPED[num_mapped]

        def mapped(shards, *arrays):
            return jax.vmap(functools.partial(part, shards), in_axes)(*arrays)

        fronts = [letter if b else "" for b in batched]
        deeper = _partitioned(
            mapped,
            problem,
            tuple(front + axes for front, axes in zip(fronts, axes_in, strict=True)),
            tuple(letter + axes for axes in axes_out),
            num_mapped + 1,
        )
        return deeper(*arrays), (True,) * len(axes_out)

    return run


def _rule(axes_in, axes_out, *, one: bool, same_length: bool) -> str:
    """The letters as XLA's partitioner reads them: what has one name is divided alike.

    Args:
        axes_in: the letters of each array.
        axes_out: those of each result.
        one: whether query and key/value heads are the same.
        same_length: whether there are as many queries as keys.
    """
    unnamed = itertools.count()

    def factor(letter):
        if letter == "k" and one:
            return "n"
        if letter == "s" and same_length:
            return "t"
        if letter in "bnkts":
            return letter
        return f"m{letter}" if letter in MAPPED else f"x{next(unnamed)}"

    sides = (
        ", ".join(" ".join(map(factor, axes)) for axes in side) for side in (axes_in, axes_out)
    )
    return " -> ".join(sides)
