"""Auto mesh axes: only XLA's partitioner knows the sharding, and only while it compiles.

By itself it would gather the operands of a kernel on every device. `divided` tells it by
`custom_partitioning` what each device can compute alone, around it by `custom_vmap` what happens
under `jax.vmap`. Both follow from the letters of the arrays' axes.
"""

import functools
import itertools
from collections.abc import Callable

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from pallas_flash._execution.partition.axes import MAPPED, letters
from pallas_flash._execution.partition.shards import (
    Shards,
    check_features,
    names_of,
    run_on_shard,
    shards_of,
)
from pallas_flash._jax import compat
from pallas_flash._problem.problem import Problem


def divided(fn: Callable, problem: Problem, *rows, axes_of_rows=(), axes_out: Callable):
    """Return `fn(problem, *rows)`, of which XLA's partitioner gives each device its shard.

    Args:
        fn: the function; its keywords `along` and `again` are as in `Shards`.
        problem: its first argument.
        *rows: its other arguments.
        axes_of_rows: the letters of the other arguments.
        axes_out: maps the letters of the problem to the letters of the results.
    """
    # `custom_partitioning` needs known sizes. Plain JAX serves symbolic sizes, and XLA divides it.
    if problem.symbolic or not _several_devices():
        return fn(problem, *rows, along=None)
    axes = letters(problem)
    axes_in, results = (axes, *axes_of_rows), axes_out(axes)
    arrays, structure = jax.tree.flatten((problem, *rows))

    def on_shard(shards: Shards, *arrays):
        args = jax.tree.unflatten(structure, arrays)
        run = functools.partial(fn, again=shards.again)
        return tuple(jax.tree.leaves(run_on_shard(run, shards, axes_in, results, args)))

    # Shapes only: the partitioner keeps them.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), problem)
    flat_in, flat_out = (tuple(jax.tree.leaves(x)) for x in (axes_in, results))
    run = _partitioned(on_shard, shapes, flat_in, flat_out)
    return jax.tree.unflatten(jax.tree.structure(results), run(*arrays))


def _several_devices() -> bool:
    """Whether XLA may have to divide the program that is being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() > 1
    return mesh.size > 1 and all(kind == AxisType.Auto for kind in mesh.axis_types)


def _partitioned(on_shard: Callable, problem: Problem, axes_in, axes_out, num_mapped: int = 0):
    """Return `on_shard(Shards(), *arrays)` as a function with a rule for XLA's partitioner.

    Args:
        on_shard: a function of shards and arrays, which a device computes.
        problem: the shapes of the first arrays.
        axes_in: the letters of each array.
        axes_out: the letters of each result.
        num_mapped: the number of axes that `jax.vmap` has put in front; their letters are digits.
    """
    around = jax.sharding.get_abstract_mesh()

    def partition(mesh, args, results):
        del results
        of_args = [x.sharding for x in args]
        if mesh.empty:
            mesh, of_args = compat.on_mesh(around, of_args)
        names = [names_of(s.spec, len(x.shape)) for s, x in zip(of_args, args, strict=True)]
        operands = len(jax.tree.leaves(problem))
        check_features(mesh, problem, axes_in[:operands], names[:operands])
        axes_of_letter: dict[str, tuple[str, ...]] = {}
        # A mesh axis belongs to the first array that names it: the query comes first, then the key.
        for axes, by_axis in zip(axes_in, names, strict=True):
            for letter, mesh_axes in zip(axes, by_axis, strict=True):
                if letter in "bnt" or letter in MAPPED:
                    taken = set().union(*axes_of_letter.values())
                    axes_of_letter.setdefault(letter, tuple(x for x in mesh_axes if x not in taken))
        keys = dict(zip(axes_in[1], names[1], strict=True)).get("s", ())
        mapped = {letter: names for letter, names in axes_of_letter.items() if letter in MAPPED}
        shards = shards_of(mesh, axes_of_letter | {"s": keys}, problem)
        # A shard that `jax.vmap` has mapped is not mapped again.
        shards = shards._replace(mapped=mapped, again=not num_mapped)

        def shardings(axes):
            return tuple(NamedSharding(mesh, shards.spec(x)) for x in axes)

        return mesh, functools.partial(on_shard, shards), shardings(axes_out), shardings(axes_in)

    @custom_vmap
    def run(*arrays):
        # The `jit` makes arguments of constants, such as block ranges: a partitioned function must
        # not close over them.
        call = custom_partitioning(jax.jit(functools.partial(on_shard, Shards())))
        rule = _rule(
            axes_in,
            axes_out,
            one=problem.num_heads == problem.num_kv_heads,
            same_length=problem.q_len == problem.kv_len,
        )
        call.def_partition(partition, sharding_rule=rule)
        return call(*arrays)

    # JAX cannot map `custom_partitioning`. So `custom_vmap` makes a mapped axis one more axis that
    # mesh axes may divide.
    @run.def_vmap
    def _(size, batched, *arrays):
        del size
        in_axes = [0 if b else None for b in batched]
        letter = MAPPED[num_mapped]

        def mapped(shards, *arrays):
            return jax.vmap(functools.partial(on_shard, shards), in_axes)(*arrays)

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
    """Return the letters in the form of XLA's partitioner: axes of one name are divided alike.

    Args:
        axes_in: the letters of each array.
        axes_out: the letters of each result.
        one: whether the numbers of query and key/value heads are equal.
        same_length: whether the numbers of queries and keys are equal.
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
