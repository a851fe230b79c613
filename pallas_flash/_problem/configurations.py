"""The tiles of one backend, as a user writes them for `config`."""

import dataclasses
from typing import Any

from pallas_flash._problem.tile_sizes import (
    FORWARD,
    KERNELS,
    MOSAIC,
    BackwardTile,
    DqTile,
    ForwardTile,
    Tile,
    TileSizes,
    backend_of,
    tile_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Triton:
    """Tiles of the kernels of "triton", and of "interpret", which runs the same kernels.

    Attributes:
        forward: the forward kernel; a query tile stays in registers.
        decode: the forward kernel for decoding: calls with at most 16 queries, or with at most 4096
            in all heads and batch elements and no more than keys. Its query tile holds the queries
            of all heads that share keys and values. If neither tile is given, this kernel serves
            such calls with more than 512 keys. If `forward` alone is given, the forward kernel
            serves them.
        dkv: the kernel for dk and dv together; a key/value tile stays in registers.
        dk: the kernel for dk alone. Give `dk` and `dv`, and no `dkv`, where both sums do not fit in
            registers.
        dv: the kernel for dv alone.
        dq: the kernel for dq; a query tile stays in registers.

    Raises:
        ValueError: if `dkv` is mixed with `dk` or `dv`, or one of these two is missing.
        TypeError: if one is no tile of this kernel.

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> from pallas_flash import tuning
        >>> x = jnp.ones((1, 32, 2, 16))
        >>> tiles = tuning.Triton(forward=tuning.Tile(16, 32))
        >>> pallas_flash.attention(x, x, x, implementation="interpret", config=tiles).shape
        (1, 32, 2, 16)
    """

    forward: Tile | None = None
    decode: Tile | None = None
    dkv: Tile | None = None
    dk: Tile | None = None
    dv: Tile | None = None
    dq: Tile | None = None

    def __post_init__(self):
        _sizes(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mosaic:
    """Tiles of the kernels of "mosaic", which are for Hopper GPUs.

    Attributes:
        forward: the forward kernel. In decoding, a tile without output slots and clusters packs the
            queries of all heads that share keys and values, where each query sees a range of keys
            and no bias, score function or dropout is asked for.
        backward: the kernel for dk, dv and dq in one pass. Without it, `dkv` and `dq` serve its
            calls, too, if one is given.
        dkv: the kernel for dk and dv in two passes.
        dq: the kernel for dq in two passes.

    Raises:
        TypeError: if one is no tile of this kernel.

    Example:
        >>> from pallas_flash import tuning
        >>> tuning.Mosaic(forward=tuning.ForwardTile(warpgroups=3, block_kv=96)).forward.stages
        2
    """

    forward: ForwardTile | None = None
    backward: BackwardTile | None = None
    dkv: BackwardTile | None = None
    dq: DqTile | None = None

    def __post_init__(self):
        _sizes(self)


Configuration = Triton | Mosaic | TileSizes

# The configuration that each implementation takes; others have no tiles.
OF: dict[str, type[Triton] | type[Mosaic]] = {
    "triton": Triton,
    "interpret": Triton,
    "mosaic": Mosaic,
}


def _sizes(configuration: Triton | Mosaic) -> TileSizes:
    """Return the tiles of a configuration, checked."""
    name, tiles = type(configuration).__name__, vars(configuration)
    for kernel, tile in tiles.items():
        kind = Tile if isinstance(configuration, Triton) else MOSAIC[kernel]
        if tile is not None and not isinstance(tile, kind):
            raise TypeError(
                f"`{kernel}` must be a pallas_flash.tuning.{kind.__name__} or None in a "
                f"pallas_flash.tuning.{name}; got {type(tile).__name__} {tile!r}. Write "
                f"{name}({kernel}={kind.__name__}(...))."
            )
    return TileSizes(**tiles)


def sizes_of(configuration: Any, implementation: Any) -> TileSizes | None:
    """Return the tiles of the argument `config`, checked against `implementation`."""
    if configuration is None:
        return None
    if not isinstance(configuration, Configuration):
        raise TypeError(
            "`config` must be a pallas_flash.tuning.Triton or a pallas_flash.tuning.Mosaic; "
            f"got {type(configuration).__name__} {configuration!r}. "
            "Write tuning.Triton(forward=tuning.Tile(128, 128, 8, 2))."
        )
    if implementation in ("xla", "reference"):
        raise ValueError(
            f"`config` must be None where no kernel has tiles; got {configuration} with "
            f"implementation={implementation!r}. Drop one of the two."
        )
    if isinstance(configuration, TileSizes):
        return configuration
    wanted = OF.get(implementation) if isinstance(implementation, str) else None
    if wanted is not None and not isinstance(configuration, wanted):
        raise ValueError(
            f"`config` must be a pallas_flash.tuning.{wanted.__name__} with "
            f"implementation={implementation!r}; got {configuration}. Drop one of the two."
        )
    return _sizes(configuration)


def effect(sizes: TileSizes, forward_by: str, backward_by: str) -> list[str]:
    """Return sentences on the effect of `config` on a call without `implementation`."""
    sentences = {}
    for kernel in KERNELS:
        by, tile = forward_by if kernel in FORWARD else backward_by, tile_of(sizes, kernel)
        if tile is None:
            continue
        asks = f'`config` asks for "{backend_of(tile)}" where it serves the call.'
        sentences[asks] = None
        if backend_of(tile) != by:
            sentences[f'`config.{kernel}` has no effect: "{by}" computes that pass.'] = None
    return list(sentences)
