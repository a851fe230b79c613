"""Kernels that are lowered once where JAX would lower every call of a program anew.

JAX lowers each call on Auto mesh axes while XLA compiles the program. For kernels that takes
long, and names that count make equal kernels different, so that XLA compiles each of them, too.
`call` exports the pass at its first call, and later calls of equal shapes get the same module.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash._jax import compat

# The implementations whose passes are lowered once, each for its platform.
PLATFORMS = {"mosaic": "cuda"}
# The custom calls of kernels, which JAX exports only if told so.
KERNELS = "mosaic_gpu_v2", "__gpu$xla.gpu.triton"


def call(function: Callable, plan: Any, platform: str, args: tuple, options: dict[str, Any]) -> Any:
    """Return `function(plan, *args, **options)`.

    Args:
        function: computes a pass on one device.
        plan: a hashable object.
        platform: to lower for.
        args: trees of arrays.
        options: static keywords of the function.
    """
    leaves, tree = jax.tree.flatten(args)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    # The default float says whether JAX is in x64 mode, by which traces differ.
    asked = tuple(options.items()), jnp.result_type(float)
    exported = _exported(function, plan, platform, *asked, tree, shapes)
    run = functools.partial(function, plan, **options)
    return (run if exported is None else exported)(*args)


@functools.lru_cache(64)
def _exported(function, plan, platform: str, options, floats, tree, shapes):
    """Return the lowered pass as a function; None where JAX cannot call it."""
    del floats  # Part of the key alone.
    checks = map(jax.export.DisabledSafetyCheck.custom_call, KERNELS)
    run = functools.partial(function, plan, **dict(options))
    export = jax.export.export(jax.jit(run), platforms=(platform,), disabled_checks=tuple(checks))
    with compat.not_for_older_jax():
        exported = export(*jax.tree.unflatten(tree, shapes))
    # A module may hold shardings of scalars, which XLA refuses in a part of a program.
    return None if "sdy." in exported.mlir_module() else exported.call
