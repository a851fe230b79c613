"""The rule that picks a call's tiles from `table`, and the shared memory that they take."""

import dataclasses
import math

from pallas_flash._backends.triton.tiles import table
from pallas_flash._jax import hardware
from pallas_flash._problem.features import CallFeatures, Option
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import (
    KERNELS,
    KEYS_STAY,
    Tile,
    TileSizes,
    check_shared_memory,
    power_of_2,
)


def default(p: Problem | None, f: CallFeatures) -> TileSizes:
    """Return the table's tiles for a call, fitted to the GPU.

    Tiles that were not timed with bias or mask arrays have two stages at most if there are some, so
    that as many programs fit on an SM as without.
    """
    del p  # The features say all.
    size = _width(f), f.itemsize
    matrix_units = hardware.matrix_units(f.capability)
    measured = table.BY_MATRIX_UNITS[matrix_units][size]
    # The rest of the table was timed on Hopper alone.
    hopper = matrix_units == "hopper"
    with_pairs = table.WITH_PAIRS.get(size) if hopper and f.pair_bytes else None
    if with_pairs:
        measured = with_pairs[max(n for n in with_pairs if n <= f.pair_bytes)]
    tiles = {kernel: tile for kernel in KERNELS if (tile := measured.tile(kernel))}
    if hopper and not with_pairs:
        tiles |= _low_occupancy_tiles(f) | _tiles_of_kind(f)
    if f.few_queries and f.kv_len > table.MANY_KEYS:
        block_kv = table.DECODE_STAGE // (2 * math.prod(size))
        tiles["decode"] = Tile(table.DECODE_ROWS[size[0]], block_kv, 4, 3)
        del tiles["forward"]
    for kernel, tile in tiles.items():
        if f.pair_bytes and (kernel == "decode" or not with_pairs):
            tile = dataclasses.replace(tile, num_stages=min(tile.num_stages, 2))
        tiles[kernel] = _fitted(kernel, tile, f)
    return TileSizes(**tiles)


def _low_occupancy_tiles(f: CallFeatures) -> dict[str, Tile]:
    """Return the tiles that differ at low occupancy."""
    limit, tiles = table.FEW.get((_width(f), f.itemsize), (0, {}))
    spread = f.kv_rows * splits_of_heads(f.groups, f.kv_rows, f.masked)

    def few(kernel: str) -> bool:
        return (spread if kernel in KEYS_STAY else f.rows) * (2 - f.masked) <= limit

    return {kernel: tile for kernel, tile in tiles.items() if few(kernel)}


def _tiles_of_kind(f: CallFeatures) -> dict[str, Tile]:
    """Return the tiles that differ for this kind of call."""
    kind = "scores" if f.scores else "dropout" if Option.DROPOUT in f.options else f.mask
    many, tiles = table.BY_KIND.get((kind, _width(f), f.itemsize), (0, {}))
    return tiles if f.rows >= many else {}


def _fitted(kernel: str, tile: Tile, f: CallFeatures) -> Tile:
    """Return the tile, or the largest smaller one that fits in the GPU's shared memory."""
    limit = hardware.shared_memory_limit(f.capability)
    if kernel == "decode" and shared_bytes(kernel, tile, f) > limit:
        # Rows, for which keys are read once, matter more than another stage.
        tile = dataclasses.replace(tile, num_stages=2)
    while shared_bytes(kernel, tile, f) > limit and (smaller := _smaller(kernel, tile)) != tile:
        tile = smaller
    return tile


def _width(f: CallFeatures) -> int:
    """Return the head dim in the table."""
    return max(64, power_of_2(f.width))


def _smaller(kernel: str, tile: Tile) -> Tile:
    """Return the tile with its larger block halved, and 4 warps for 64 resident rows or fewer.

    The smallest blocks have one stage left.
    """
    if tile.block_q == tile.block_kv == 16:
        return dataclasses.replace(tile, num_stages=1)
    if tile.block_q >= tile.block_kv:
        tile = dataclasses.replace(tile, block_q=max(16, tile.block_q // 2))
    else:
        tile = dataclasses.replace(tile, block_kv=max(16, tile.block_kv // 2))
    resident = tile.block_kv if kernel in KEYS_STAY else tile.block_q
    return dataclasses.replace(tile, num_warps=4) if resident <= 64 else tile


def check(kernel: str, tile: Tile, p: Problem | None, f: CallFeatures) -> None:
    """Raise ValueError if a tile does not fit in the GPU's shared memory."""
    del p
    limit = hardware.shared_memory_limit(f.capability)
    check_shared_memory(kernel, tile, shared_bytes(kernel, tile, f), limit, f.width)


def shared_bytes(kernel: str, tile: Tile, f: CallFeatures) -> int:
    """Return the bytes of shared memory that a kernel needs at least.

    It holds the resident tiles, and for each stage a streamed pair and tiles of the (q, k) arrays.
    """
    resident, streamed = tile.block_q, tile.block_kv
    if kernel in KEYS_STAY:
        resident, streamed = streamed, resident
    kept = {"forward": 1, "decode": 1, "dkv": 2, "dk": 2, "dv": 1, "dq": 2}[kernel]
    pairs = tile.num_stages * resident * streamed * f.pair_bytes
    return (kept * resident + 2 * tile.num_stages * streamed) * _width(f) * f.itemsize + pairs


def splits_of_heads(groups: int, kv_rows: int, masked: bool) -> int:
    """Return among how many programs "dkv" splits the `groups` query heads of a key head.

    It is the smallest divisor of `groups` that makes programs enough, or else all of `groups`.
    Sums of many splits take time and memory, so a little less than enough will do.

    Args:
        groups: query heads of a key head.
        kv_rows: keys of all heads and batch elements. (There may be none.)
        masked: whether there is a mask. Its tiles differ in f, so more programs are better.
    """
    enough = (table.ENOUGH_KEYS if masked else table.ENOUGH_KEYS / 2) / math.sqrt(2)
    divisors = (n for n in range(1, groups) if groups % n == 0)
    return next((n for n in divisors if n * kv_rows >= enough), groups)
