"""How many instances of a call `jax.vmap` maps over, for choices by the size of a launch."""

from collections.abc import Callable
from typing import Any

import jax


def counted(function: Callable, *args) -> Any:
    """Return `function(instances, *args)`, where `instances` counts those that run at once.

    It is 1, times the size of every `jax.vmap` around this call.

    Args:
        function: takes the count and `args`, and returns a tree of arrays.
        *args: trees of arrays.
    """
    arrays, structure = jax.tree.flatten(args)

    def of_arrays(instances, *arrays):
        return function(instances, *jax.tree.unflatten(structure, arrays))

    return _counted(of_arrays, 1)(*arrays)


def _counted(function: Callable, instances: int) -> Callable:
    @jax.custom_batching.custom_vmap
    def call(*arrays):
        return function(instances, *arrays)

    @call.def_vmap
    def _(size, mapped, *arrays):
        axes = tuple(0 if x else None for x in mapped)

        def of_all(instances, *arrays):
            return jax.vmap(lambda *x: function(instances, *x), axes)(*arrays)

        results = _counted(of_all, instances * size)(*arrays)
        return results, jax.tree.map(lambda _: True, results)

    return call
