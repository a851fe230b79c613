"""Tile sizes of both backends, and their checks.

A program keeps a tile of one side, with its sums in registers, while tiles of the other side pass
through shared memory in pipeline stages.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

# The kernels that have a tile, by the names of the fields of `TileSizes`.
KERNELS = ("forward", "decode", "dkv", "dk", "dv", "dq", "backward")
FORWARD = ("forward", "decode")
KEYS_STAY = ("dkv", "dk", "dv")

# The fewest rows and columns of a matrix product.
MIN_ROWS = 16

# Columns of dk and dv, together, that the registers of a CTA hold in the backward for Hopper.
MAX_COLUMNS = 256


def padded(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the columns that tiles have in the backward for Hopper, by the head dims of a call.

    Matrix instructions take 16. Above 128, where tiles of 16 columns would be many, 32.
    """
    columns = 16 if max(head_dim, value_dim) <= 128 else 32
    head_dim, value_dim = (-(-n // columns) * columns for n in (head_dim, value_dim))
    return head_dim, value_dim


def in_clusters(head_dim: int, value_dim: int) -> bool:
    """Return whether dk and dv of a K/V tile need two CTAs or launches, by `padded` columns."""
    return head_dim + value_dim > MAX_COLUMNS


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of a program of a kernel of "triton", and its launch.

    Attributes:
        block_q: queries in a tile, a power of two from 16 to 256.
        block_kv: keys and values in a tile, a power of two from 16 to 256.
        num_warps: warps of 32 threads in a program: 1, 2, 4, 8 or 16.
        num_stages: pipeline stages of the tiles that are streamed, 1 to 8.
    """

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self):
        allowed = {
            "block_q": (16, 32, 64, 128, 256),
            "block_kv": (16, 32, 64, 128, 256),
            "num_warps": (1, 2, 4, 8, 16),
            "num_stages": tuple(range(1, 9)),
        }
        _check(self, **allowed)


# The pipeline stages of "mosaic": a tile is loaded into one while another one is in use.
_STAGES = (2, 3, 4)


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """The tile of a CTA of the Hopper forward.

    Attributes:
        warpgroups: consumer warpgroups, 2 to 4, with 64 queries each.
        block_kv: keys of a block, a multiple of 16 up to 256.
        output_slots: buffers of 64 columns in shared memory through which the output leaves, up to
            4; 0 reuses the buffer of the queries, or, where query heads are packed, none.
        stages: pipeline stages of keys, and of values, 2 to 4.
        cluster_size: CTAs of neighbouring query tiles that share the copies of keys and values, 1
            or 2. 2 needs 2 warpgroups and a mask that is known at tracing.
    """

    warpgroups: int = 2
    block_kv: int = 128
    output_slots: int = 1
    stages: int = 2
    cluster_size: int = 1

    def __post_init__(self):
        _check(self, warpgroups=(2, 3, 4), block_kv=tuple(range(16, 257, 16)))
        _check(self, output_slots=tuple(range(5)), stages=_STAGES)
        _check(self, cluster_size=(1, 2) if self.warpgroups == 2 else (1,))


@dataclasses.dataclass(frozen=True)
class BackwardTile:
    """The tile of a CTA of the Hopper backward, with 128 keys.

    Attributes:
        block_q: queries of a tile, 64 or 128.
        stages: pipeline stages of queries, and of cotangents, 1 to 4; a launch for dv alone has two
            or more.
    """

    block_q: int = 64
    stages: int = 2

    def __post_init__(self):
        _check(self, block_q=(64, 128), stages=(1, *_STAGES))


@dataclasses.dataclass(frozen=True)
class DqTile:
    """The tile of a CTA of the Hopper pass for dq alone.

    Attributes:
        warpgroups: consumer warpgroups, 2 or 3, with 64 queries each.
        block_kv: keys of a block, a multiple of 64 up to 256.
        stages: pipeline stages of keys, and of values if there is room, 2 to 4.
    """

    warpgroups: int = 2
    block_kv: int = 128
    stages: int = 2

    def __post_init__(self):
        _check(self, warpgroups=(2, 3), block_kv=(64, 128, 192, 256), stages=_STAGES)


def _check(tile, **allowed: tuple[int, ...]) -> None:
    """Raise unless each number of a tile, by name, is one of the allowed ones."""
    for name, values in allowed.items():
        value = getattr(tile, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(
                f"`{name}` must be an int; got {type(value).__name__} {value!r}. Pass one of "
                f"{values}."
            )
        if value not in values:
            raise ValueError(
                f"`{name}` must be one of {values}; got {value}. Choose the nearest of them."
            )


# The tiles of "mosaic", by kernel; all others are `Tile`s.
MOSAIC = {
    "forward": ForwardTile,
    "dkv": BackwardTile,
    "dq": DqTile,
    "backward": BackwardTile,
}

# The kernels whose tiles decide which implementation computes a pass; the first tile decides.
OF_PASS = {
    "forward": ("decode", "forward"),
    "backward": ("backward", "dkv", "dk", "dv", "dq"),
    "two passes": ("dkv", "dk", "dv", "dq"),
}


def backend_of(tile) -> str:
    """Return the implementation of a tile: "mosaic", or "triton" (also for "interpret")."""
    return "triton" if isinstance(tile, Tile) else "mosaic"


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Tiles for each kernel of `attention`, of several backends: the result of `tuning.tune`.

    `attention` takes it as `config`, too. Write a `Triton` or a `Mosaic` yourself: they name
    their backend. Here the class of each tile does: a `Tile` is for "triton" and "interpret", all
    others are for "mosaic".

    Attributes:
        forward, dkv, dq: as in `Triton` and `Mosaic`.
        decode, dk, dv: as in `Triton`.
        backward: as in `Mosaic`.

    Raises:
        ValueError: if `dkv` is mixed with `dk` or `dv`, or one of these two is missing, or if
            passes of two implementations are mixed.
        TypeError: if one is no tile of this kernel.
    """

    forward: Tile | ForwardTile | None = None
    decode: Tile | None = None
    dkv: Tile | BackwardTile | None = None
    dk: Tile | None = None
    dv: Tile | None = None
    dq: Tile | DqTile | None = None
    backward: BackwardTile | None = None

    def __post_init__(self):
        for name in KERNELS:
            self._check_kind(name)
        split = (self.dk is not None, self.dv is not None)
        if any(split) and (self.dkv is not None or not all(split)):
            raise ValueError(
                f"`dk` and `dv` must be given together and without `dkv`; got dkv={self.dkv}, "
                f"dk={self.dk}, "
                f"dv={self.dv}. Give either `dkv` or both others."
            )
        with_dq = self.dkv or self.dk
        if with_dq and self.dq and backend_of(with_dq) != backend_of(self.dq):
            raise ValueError(
                f"`dq` must be for the implementation of `{'dkv' if self.dkv else 'dk'}`; got "
                f"{self.dq} and {with_dq}. Give two tiles of one."
            )

    def _check_kind(self, name: str) -> None:
        value, mosaic = getattr(self, name), MOSAIC.get(name)
        if value is None or (mosaic and isinstance(value, mosaic)):
            return
        if name == "backward":
            raise TypeError(
                f"`backward` must be a pallas_flash.tuning.BackwardTile or None; got "
                f"{type(value).__name__} {value!r}. Give tiles of other implementations to `dkv` "
                "and `dq`."
            )
        if not isinstance(value, Tile):
            also = f", a pallas_flash.tuning.{mosaic.__name__}" if mosaic else ""
            raise TypeError(
                f"`{name}` must be a pallas_flash.tuning.Tile{also} or None; got "
                f"{type(value).__name__} {value!r}. "
                "Write Tile(block_q, block_kv, num_warps, num_stages)."
            )


def tile_of(sizes: TileSizes, kernel: str) -> Any:
    """Return the tile of one of `KERNELS`; None if there is none."""
    return getattr(sizes, kernel)


def given_tiles(sizes: TileSizes) -> dict[str, Any]:
    """Return the tiles that are not None, by kernel."""
    return {kernel: tile for kernel in KERNELS if (tile := tile_of(sizes, kernel)) is not None}


def selected(sizes: TileSizes, kernels: Iterable[str]) -> TileSizes:
    """Return the tiles of some kernels."""
    return TileSizes(**{kernel: tile_of(sizes, kernel) for kernel in kernels})


def of_implementation(sizes: TileSizes, implementation: str) -> TileSizes:
    """Return the tiles of one implementation; "interpret" has the tiles of "triton"."""
    name = "triton" if implementation == "interpret" else implementation
    return selected(
        sizes, (k for k, tile in given_tiles(sizes).items() if backend_of(tile) == name)
    )


def asked_implementation(sizes: TileSizes, attention_pass: str) -> str:
    """Return the implementation that the tiles of a pass ask for; "" if there is no tile."""
    tiles = (tile_of(sizes, kernel) for kernel in OF_PASS[attention_pass])
    return next((backend_of(tile) for tile in tiles if tile is not None), "")


def filled(sizes: TileSizes, default: TileSizes) -> TileSizes:
    """Return tiles, with those that are None from `default`."""
    forward = default if sizes.forward is None and sizes.decode is None else sizes
    backward = default if sizes.dkv is None and sizes.dk is None else sizes
    return TileSizes(
        forward=forward.forward,
        decode=forward.decode,
        dkv=backward.dkv,
        dk=backward.dk,
        dv=backward.dv,
        dq=sizes.dq or default.dq,
        backward=sizes.backward or default.backward,
    )


def serving(sizes: TileSizes, few: bool) -> TileSizes:
    """Return tiles without the one of the forward kernel that does not serve the call."""
    if sizes.decode is None:
        return sizes
    return dataclasses.replace(sizes, **{"forward" if few else "decode": None})


def describe(tile) -> str:
    """Return a tile in words."""
    if not isinstance(tile, Tile):
        return ", ".join(f"{name} {x}" for name, x in dataclasses.asdict(tile).items())
    blocks = f"{tile.block_q} x {tile.block_kv}"
    return f"{blocks}, {tile.num_warps} warps, {tile.num_stages} stages"


def sizes_for(kernel: str, tile: Any) -> TileSizes:
    """Return `TileSizes` of one kernel's tile; dk and dv come together, the other one smallest."""
    sizes: dict[str, Any] = {}
    if kernel in ("dk", "dv"):
        sizes = dict.fromkeys(("dk", "dv"), Tile(16, 16, 4, 1))
    return TileSizes(**sizes | {kernel: tile})


# Returns the tiles of a call, the given ones and default ones for the rest; raises ValueError if
# one does not fit.
Choose = Callable[[TileSizes | None], TileSizes]


def fits(kernel: str, tile: Any, choose: Choose) -> bool:
    """Return whether a tile fits."""
    try:
        choose(sizes_for(kernel, tile))
    except ValueError:
        return False
    return True


def check_shared_memory(kernel: str, tile, need: int, limit: int, head_dim: int) -> None:
    """Raise ValueError if a tile that was asked for needs more bytes than a program may have."""
    if need > limit:
        raise ValueError(
            f"`config.{kernel}` must fit in the GPU's {limit // 1024} KiB of shared "
            f"memory; got {tile}, which needs about {need // 1024} KiB at head dim {head_dim}. "
            "Use smaller blocks or fewer stages."
        )


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()
