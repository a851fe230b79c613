"""Explicit mesh axes: types hold the sharding, and a `shard_map` goes around the op."""

import dataclasses
from collections.abc import Callable

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_flash._execution.partition.axes import LSE, OUTPUT, letters
from pallas_flash._execution.partition.shards import (
    check_features,
    count,
    names_of,
    run_on_shard,
    shards_of,
)
from pallas_flash._jax.one_device import explicit_mesh
from pallas_flash._problem.problem import Problem


def explicitly(attend: Callable, problem: Problem):
    """Return `attend(problem)` inside a `shard_map` under Explicit axes.

    These are the output, the LSE and, if the problem asks for them, the largest scores of rows.

    Args:
        attend: the function; its keyword `along` is `Shards.along`.
        problem: the call.
    """
    mesh = explicit_mesh(problem)
    if mesh is None:
        return attend(problem, along=None)
    if problem.symbolic:
        raise NotImplementedError(
            "`query` must have known sizes under Explicit mesh axes, because JAX does not compile "
            f"a `shard_map` of symbolic ones; got {', '.join(map(str, problem.symbolic))}. Use "
            "Auto axes, or give each size a number."
        )
    axes = letters(problem)
    names = [names_of(jax.typeof(x).sharding.spec, x.ndim) for x in jax.tree.leaves(problem)]
    check_features(mesh, problem, jax.tree.leaves(axes), names)
    (batch, rows, heads, _), (_, keys, *_) = names[:2]
    axes_of_letter = {"b": batch, "t": rows, "n": heads, "s": keys}
    shards = shards_of(mesh, axes_of_letter, problem)
    specs = jax.tree.map(shards.spec, axes)
    problem = jax.tree.map(
        lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), problem, specs
    )
    outs = (OUTPUT, LSE, LSE) if problem.max_logits else (OUTPUT, LSE)
    results = jax.shard_map(
        lambda problem: run_on_shard(attend, shards, (axes,), outs, (problem,)),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=tuple(map(shards.spec, outs)),
        axis_names=_explicit_axes(mesh),
    )(problem)
    if shards.along is not None or not rows:
        return results
    # A mesh axis of one device divides nothing, but its name belongs into the types.
    lie = PartitionSpec(shards.batch or None, rows, shards.heads or None)
    return tuple(jax.sharding.reshard(x, NamedSharding(mesh, lie)) for x in results)


def shard_of_device(problem: Problem, query, key):
    """Return the shapes of a device's shard, from the shardings of queries and keys.

    Returns:
        The problem with these shapes, the mesh axes that divide the sequence (None if it is whole
        or the sharding is not known), and the number of their devices.
    """
    of_query, of_key = _sharding(query), _sharding(key)
    if not (isinstance(of_query, NamedSharding) and isinstance(of_key, NamedSharding)):
        return problem, None, 1
    mesh = of_query.mesh
    (batch, rows, heads, _), (_, keys, *_) = (
        ((),) * (4 - x.ndim) + names_of(sharding.spec, x.ndim)
        for x, sharding in ((query, of_query), (key, of_key))
    )
    shards = shards_of(mesh, {"b": batch, "t": rows, "n": heads, "s": keys}, problem)
    if shards.along is None:
        return problem, None, 1

    def shard(x, axes):
        sizes = (count(mesh, shards.names(letter)) for letter in axes)
        shape = tuple(n // m for n, m in zip(x.shape, sizes, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    axes = letters(problem)
    names = "query", "key", "value"
    shapes = {name: shard(getattr(problem, name), getattr(axes, name)) for name in names}
    return dataclasses.replace(problem, **shapes), shards.along, count(mesh, shards.along.names)


def _sharding(x):
    """Return the sharding of an array if it is known; a tracer has it in its type."""
    if isinstance(x, Tracer):
        return jax.typeof(x).sharding
    return getattr(x, "sharding", None)


def _explicit_axes(mesh) -> set[str]:
    """Return the mesh axes that `shard_map` makes manual, also those that divide nothing."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name for name, kind in kinds.items() if kind == AxisType.Explicit}
    # An empty set means all axes but those over which `jax.vmap` maps.
    return explicit if len(explicit) < len(kinds) else set()
