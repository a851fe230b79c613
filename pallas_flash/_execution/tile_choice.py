"""The tiles of a call: the ones that are asked for, and the rest from the tables of a backend."""

from types import ModuleType

from pallas_flash._jax import device
from pallas_flash._problem.features import CallFeatures, features_of
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import KERNELS, TileSizes


def tiles_of_call(problem: Problem, implementation: str, asked: TileSizes | None) -> TileSizes:
    """Return the tiles that are asked for, and the rest by the table of an implementation.

    Raises:
        ValueError: if tiles that were asked for do not fit on the GPU.
    """
    f = features_of(problem, capability=device.tile_capability(implementation))
    return completed(asked, problem, f, backend(implementation))


def tiles_of_launch(problem: Problem, instances: int, asked: TileSizes) -> TileSizes:
    """Return the tiles of "mosaic" for a launch of several instances of a problem."""
    return completed(asked, problem, features_of(problem, instances), backend("mosaic"))


def backend(implementation: str) -> ModuleType:
    """Return the module with a backend's tiles. It has three functions.

    * `default(problem, features)` returns the tiles of a call, which fit on the GPU;
    * `check(kernel, tile, problem, features)` raises ValueError if a tile does not fit;
    * `candidates(kernel, problem, choose)` returns the tiles that `tuning.tune` tries.
    """
    # Imported when needed, like the kernels.
    if implementation == "mosaic":
        from pallas_flash._backends.mosaic import candidates

        return candidates
    from pallas_flash._backends.triton import tiles

    return tiles


def completed(
    asked: TileSizes | None, problem: Problem | None, f: CallFeatures, backend: ModuleType
) -> TileSizes:
    """Return the tiles that are asked for, as they are, and the rest from a backend.

    Raises:
        ValueError: if tiles that were asked for do not fit on the GPU.
    """
    default = backend.default(problem, f)
    if asked is None:
        return default
    asked = asked.serving(f.few_queries)
    for kernel in KERNELS:
        if (tile := asked.tile(kernel)) is not None:
            backend.check(kernel, tile, problem, f)
    return asked.filled_from(default)
