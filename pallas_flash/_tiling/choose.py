"""The tiles of a call: those it asks for, else what `tune` found, else the backend's own."""

from types import ModuleType

from pallas_flash import _select
from pallas_flash._problem import Problem
from pallas_flash._tiling import cache
from pallas_flash._tiling.sizes import KERNELS, OfCall, TileSizes, whose


def before_tables(problem: Problem, asked: TileSizes | None) -> OfCall:
    """The tiles that a call asks for, and what `tune` found for such calls."""
    if problem.symbolic:
        # No kernel serves it.
        return OfCall(asked or TileSizes(), TileSizes())
    given = (asked or TileSizes()).used(problem.few_queries)
    return OfCall(given, tuned(problem) or TileSizes())


def tuned(problem: Problem) -> TileSizes | None:
    """What `tune` found for this problem on the GPU that is here, if anything."""

    def check(winner: TileSizes) -> None:
        for implementation in {whose(tile) for k in KERNELS if (tile := winner.tile(k))}:
            by_table(problem, implementation, winner.of(implementation))

    return cache.lookup(problem, check) if _select.target().nvidia else None


def for_call(problem: Problem, implementation: str, tiles: OfCall) -> TileSizes:
    """The tiles that the kernels of one implementation run with; None is the table of "mosaic".

    Raises:
        ValueError: if tiles that were asked for do not fit on the GPU.
    """
    given, tuned = (x.of(implementation) for x in tiles)
    if implementation == "mosaic" and given == tuned == TileSizes():
        return given  # Its kernels, which are not looked for here, ask their table themselves.
    sizes = by_table(problem, implementation, given)
    if implementation == "interpret" or tuned == TileSizes():
        return sizes
    return given.or_else(by_table(problem, implementation, tuned))


def by_table(problem: Problem, implementation: str, asked: TileSizes | None) -> TileSizes:
    """The tiles asked for, and the rest by the backend's table, whatever `tune` found."""
    of = backend(implementation)
    work = of.work_of(problem, _select.tile_capability(implementation))
    return completed(asked, work, of)


def backend(implementation: str) -> ModuleType:
    """What the backend of an implementation knows of tiles.

    * `work_of(problem, capability)`, what it chooses them by;
    * `default(work)`, its tiles for that, which fit on the GPU;
    * `check(kernel, tile, work)`, which raises ValueError if a tile does not;
    * `candidates(kernel, problem, choose)`, what `tune` is to try.
    """
    # Imported when needed, like the kernels.
    if implementation == "mosaic":
        from pallas_flash._mosaic import candidates

        return candidates
    from pallas_flash._triton import tiles

    return tiles


def completed(asked: TileSizes | None, work, backend: ModuleType) -> TileSizes:
    """The tiles asked for, as they are, and the rest from a backend.

    Raises:
        ValueError: if tiles that were asked for do not fit on the GPU.
    """
    default = backend.default(work)
    if asked is None:
        return default
    asked = asked.used(work.few_queries)
    for kernel in KERNELS:
        if (tile := asked.tile(kernel)) is not None:
            backend.check(kernel, tile, work)
    return asked.or_else(default)
