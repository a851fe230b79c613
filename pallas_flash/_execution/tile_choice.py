"""The tiles of a call: the ones that are asked for, and default ones of a backend for the rest."""

from collections.abc import Collection
from types import ModuleType

from pallas_flash._jax import device
from pallas_flash._problem.features import CallFeatures, features_of
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import (
    KERNELS,
    TileSizes,
    filled,
    given_tiles,
    selected,
    serving,
)


def tiles_of_call(problem: Problem, implementation: str, asked: TileSizes | None) -> TileSizes:
    """Return the tiles of all kernels, as `completed` does, for a call on the current device."""
    f = features_of(problem, capability=device.tile_capability(implementation))
    return completed(asked, problem, f, implementation)


def completed(
    asked: TileSizes | None,
    problem: Problem | None,
    f: CallFeatures,
    implementation: str,
    kernels: Collection[str] = KERNELS,
) -> TileSizes:
    """Return the tiles that are asked for, as they are, and default ones for the rest of `kernels`.

    Raises:
        ValueError: if tiles that were asked for do not fit on the GPU.
    """
    tiles = backend(implementation)
    if asked is None or not given_tiles(asked):
        return tiles.default(problem, f, kernels)
    asked = serving(asked, f.few_queries)
    given = given_tiles(asked)
    for kernel, tile in given.items():
        tiles.check(kernel, tile, problem, f)
    missing = [kernel for kernel in kernels if kernel not in given]
    return filled(selected(asked, kernels), tiles.default(problem, f, missing))


def backend(implementation: str) -> ModuleType:
    """Return the module with a backend's tiles. It has three functions.

    * `default(problem, features, kernels)` returns the tiles of a call, which fit on the GPU;
    * `check(kernel, tile, problem, features)` raises ValueError if a tile does not fit;
    * `candidates(kernel, problem, choose)` returns the tiles that `tuning.tune` tries.
    """
    # Imported when needed, like the kernels.
    if implementation == "mosaic":
        from pallas_flash._backends.mosaic import tiles
    else:
        from pallas_flash._backends.triton import tiles
    return tiles
