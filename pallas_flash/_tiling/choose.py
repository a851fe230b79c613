"""The tiles of a call: those it asks for, else what `tune` found, else the backend's own."""

from types import ModuleType

from pallas_flash import _hardware, _select
from pallas_flash._problem import Problem
from pallas_flash._tiling import cache, workload
from pallas_flash._tiling.sizes import KERNELS, TileSizes
from pallas_flash._tiling.workload import Workload


def for_call(problem: Problem, implementation: str, asked: TileSizes | None) -> TileSizes:
    """The tiles that a call runs with.

    Raises:
        ValueError: if tiles that were asked for do not fit in the shared memory of the GPU.
    """
    tiles = by_table(problem, implementation, asked)
    if (winner := tuned(problem, implementation)) is not None:
        tiles = (asked or TileSizes()).used(problem.few_queries).or_else(winner)
    return tiles


def tuned(problem: Problem, implementation: str) -> TileSizes | None:
    """What `tune` found for this problem on the GPU that is here, if anything."""
    if implementation != "triton":
        return None
    return cache.lookup(problem, lambda winner: by_table(problem, implementation, winner))


def by_table(problem: Problem, implementation: str, asked: TileSizes | None) -> TileSizes:
    """The tiles asked for, and the rest by the backend's table, whatever `tune` found."""
    work = workload.of_problem(problem, _select.tile_capability(implementation))
    return completed(asked, work, backend(implementation))


def backend(implementation: str) -> ModuleType:
    """What the backend of "triton" and "interpret" knows of tiles.

    * `default(work)`, its tiles for a `Workload`, which fit on the GPU;
    * `shared_bytes(kernel, tile, work)`, what a tile takes of the GPU's shared memory;
    * `candidates(kernel, problem, choose)`, what `tune` is to try.
    """
    # Imported when needed, like the kernels.
    from pallas_flash._triton import tiles

    return tiles


def completed(asked: TileSizes | None, work: Workload, backend: ModuleType) -> TileSizes:
    """The tiles asked for, as they are, and the rest from a backend.

    Raises:
        ValueError: if tiles that were asked for do not fit in the shared memory of the GPU.
    """
    default = backend.default(work)
    if asked is None:
        return default
    asked, limit = asked.used(work.few_queries), _hardware.shared_memory_limit(work.capability)
    for kernel in KERNELS:
        tile = asked.tile(kernel)
        if tile is not None and (need := backend.shared_bytes(kernel, tile, work)) > limit:
            raise ValueError(
                f"`tile_sizes.{kernel}` must fit in the GPU's {limit // 1024} KiB of shared "
                f"memory; got {tile}, which needs about {need // 1024} KiB at head size "
                f"{max(work.head_dim, work.value_dim)}. Use smaller blocks or fewer stages."
            )
    return asked.or_else(default)
