"""The shards of a problem: which mesh axes divide it, and the computation of one shard."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from pallas_flash._execution.partition.axes import FEATURES, with_origin
from pallas_flash._jax.symbolic import is_symbolic
from pallas_flash._problem.problem import Gradients, Problem


class Along(NamedTuple):
    """The mesh axes that divide a sequence.

    Attributes:
        names: the mesh axes that divide the queries, the slowest first.
        keys: whether they divide keys and values, too. If not, every device holds all keys.
    """

    names: tuple[str, ...]
    keys: bool = True


class Shards(NamedTuple):
    """The mesh axes that divide a problem into shards, one for each device.

    Attributes:
        batch: the mesh axes that divide the batch.
        heads: the mesh axes that divide the query heads.
        key_heads: whether they divide the key/value heads, too. If not, because there are too few
            key/value heads, every device holds all of them.
        along: the mesh axes that divide the sequence; None if it is whole.
        mapped: the mesh axes that divide an axis of `jax.vmap`, by the letter of that axis.
        again: whether equal shards may share one lowered program, see `_execution.lowered_once`.
        XLA's
            partitioner lowers each by itself; `jax.vmap` cannot map a lowered one.
    """

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    key_heads: bool = True
    along: Along | None = None
    mapped: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    again: bool = False

    def names(self, letter: str) -> tuple[str, ...]:
        """Return the mesh axes that divide the axis of an array."""
        if letter == "k" and not self.key_heads:
            return ()
        by_letter = {"b": self.batch, "n": self.heads, "k": self.heads, **self.mapped}
        if self.along is not None:
            by_letter |= {"t": self.along.names, "s": self.along.names if self.along.keys else ()}
        return by_letter.get(letter, ())

    def spec(self, axes: str) -> PartitionSpec:
        """Return the sharding of an array."""
        return PartitionSpec(*(self.names(letter) or None for letter in axes))

    def summed(self, axes: str) -> tuple[str, ...]:
        """Return the mesh axes over which an array's gradient must be summed."""
        divided = {name for letter in axes for name in self.names(letter)}
        every = *self.batch, *self.heads, *(self.along.names if self.along else ())
        return tuple(name for name in every if name not in divided)


def shards_of(mesh, axes_of_letter: Mapping[str, tuple[str, ...]], problem: Problem) -> Shards:
    """Return the shards of a problem, by mesh axes that divide it without a remainder.

    Args:
        mesh: the mesh.
        axes_of_letter: the mesh axes that divide the letters b, n, t and s.
        problem: the whole call.
    """
    batch, heads, rows, keys = (axes_of_letter.get(letter, ()) for letter in "bnts")

    def dividing(names, length):
        return names if length % count(mesh, names) == 0 else ()

    heads = dividing(heads, problem.num_heads)
    key_heads = problem.num_kv_heads % count(mesh, heads) == 0
    along = _along(mesh, rows, keys, problem)
    return Shards(dividing(batch, problem.batch), heads, key_heads, along)


def _along(mesh, rows, keys, problem: Problem) -> Along | None:
    """Return the mesh axes that divide the sequence, from the axes of queries and of keys."""
    # Mesh axes of one device divide nothing.
    rows, keys = (names if count(mesh, names) > 1 else () for names in (rows, keys))
    if not rows and not keys:
        return None
    if keys not in ((), rows):
        names = ["nothing" if not x else ", ".join(map(repr, x)) for x in (rows, keys)]
        raise NotImplementedError(
            "`key` must be sharded along its sequence as `query` is, or not at all; got queries "
            f"(T={problem.q_len}) over {names[0]} and keys (S={problem.kv_len}) over {names[1]}. "
            "Shard both alike, or gather the keys (of a cache, say) before the call."
        )
    devices = count(mesh, rows)
    check_lengths(problem.q_len, problem.kv_len if keys else None, devices, rows)
    return Along(rows, bool(keys))


def check_lengths(q_len: int, kv_len: int | None, devices: int, names) -> None:
    """Refuse sequences that devices do not divide, or of less than two tokens for each device.

    Args:
        q_len: T.
        kv_len: S; None if keys are not divided.
        devices: the number of devices.
        names: the mesh axes of these devices.
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


def count(mesh, names) -> int:
    """Return the number of devices along mesh axes."""
    return math.prod(mesh.shape[name] for name in names)


def names_of(spec, rank: int) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that divide each axis of an array."""
    entries = (*spec, *(None,) * (rank - len(spec)))
    return tuple(() if e is None else e if isinstance(e, tuple) else (e,) for e in entries)


def check_features(mesh, problem: Problem, axes, names) -> None:
    """Refuse arrays that devices divide along their features.

    Args:
        mesh: the mesh.
        problem: the arrays.
        axes: the letters of each array.
        names: for each axis of each array, the mesh axes that divide it.
    """
    paths = [path for path, _ in jax.tree.leaves_with_path(problem)]
    for path, letters, by_axis in zip(paths, axes, names, strict=True):
        for letter, mesh_axes in zip(letters, by_axis, strict=True):
            if letter in FEATURES and count(mesh, mesh_axes) > 1:
                name = path[0].name
                raise NotImplementedError(
                    f"`{name}` must be sharded by examples, by heads or along its sequence; got "
                    f"its features sharded over {', '.join(map(repr, mesh_axes))}. Gather that "
                    "axis before the call, or shard by heads."
                )


def run_on_shard(fn: Callable, shards: Shards, axes_in, axes_out, args):
    """Return `fn(problem, *rows)`, of which every device computes its shard.

    Args:
        fn: the function; its keyword `along` is `Shards.along`.
        shards: the mesh axes that divide the arguments.
        axes_in: the letters of the arguments.
        axes_out: the letters of the results.
        args: a device's shard of the arguments, with all key/value heads if these are whole.
    """
    problem, *rows = args
    bias = problem.bias
    of_bias = axes_out.bias if isinstance(axes_out, Gradients) else None
    adds_bias = of_bias is not None and bool(shards.along or shards.summed(of_bias))
    if adds_bias:
        # In float32, the gradient of the bias is rounded once, after the sum over devices.
        problem = dataclasses.replace(problem, bias=bias.astype(problem.accumulator_dtype))
    problem = _with_first_indices(problem, shards)
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
        wide = x_whole.astype(np.promote_types(x.dtype, np.float32))
        return lax.psum(wide, over).astype(x.dtype)

    results = jax.tree.map(add, axes_out, results)
    if adds_bias:
        results = results._replace(bias=results.bias.astype(bias.dtype))
    return results


def _with_first_indices(shard: Problem, shards: Shards) -> Problem:
    """Return a shard that knows the indices of its first batch element and query head."""
    if not (shards.batch or shards.heads):
        return shard

    def first(names, count):
        return lax.axis_index(names) * count if names else jnp.int32(0)

    return with_origin(
        shard, b=first(shards.batch, shard.batch), h=first(shards.heads, shard.num_heads)
    )


def _key_heads(shard: Problem, shards: Shards):
    """Return the key/value head of each run of a device's query heads that share one."""
    groups = shard.num_heads * lax.axis_size(shards.heads) // shard.num_kv_heads
    run = math.gcd(shard.num_heads, groups)
    first = lax.axis_index(shards.heads) * shard.num_heads
    return (first + jnp.arange(0, shard.num_heads, run, dtype=jnp.int32)) // groups
