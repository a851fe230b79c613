"""The tiles of these kernels: measured ones, the rule that picks, and candidates for tuning.

Tiles that were not timed say so. Hopper's matrix instructions want 64 rows of the resident tile for
each 4 warps.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection

from pallas_flash._jax import hardware
from pallas_flash._problem.features import CallFeatures, Option
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import (
    FORWARD,
    KERNELS,
    KEYS_STAY,
    Choose,
    Tile,
    TileSizes,
    check_shared_memory,
    fits,
    given_tiles,
    power_of_2,
    tile_of,
)

# Tiles by the GPU's matrix units (`_jax.hardware.matrix_units`), then by (padded head dim, bytes of
# an element).
#
# Hopper's tiles are the fastest of those timed on an H200, non-causal and causal, at 16384 tokens
# in 16 bits and at 4096 in float32. With three stages two tiles are loading while a third is used.
# Two stages hide the copies of operands that a tile needs late, and no others.
HOPPER = {
    (64, 2): TileSizes(forward=Tile(64, 64, 4, 3), dkv=Tile(64, 64, 4, 3), dq=Tile(128, 64, 4, 3)),
    (128, 2): TileSizes(
        forward=Tile(64, 64, 4, 3), dkv=Tile(64, 128, 8, 3), dq=Tile(128, 64, 8, 4)
    ),
    (256, 2): TileSizes(
        forward=Tile(128, 64, 8, 2),
        dk=Tile(32, 128, 8, 3),
        dv=Tile(64, 128, 8, 2),
        dq=Tile(128, 32, 8, 3),
    ),
    (64, 4): TileSizes(
        forward=Tile(128, 64, 8, 3), dkv=Tile(64, 128, 8, 2), dq=Tile(128, 32, 4, 3)
    ),
    (128, 4): TileSizes(
        forward=Tile(128, 32, 8, 3),
        dk=Tile(16, 128, 8, 3),
        dv=Tile(32, 128, 8, 2),
        dq=Tile(128, 32, 8, 3),
    ),
    (256, 4): TileSizes(
        # These spill. Half the resident rows would not, but they are too few for the matrix
        # instructions.
        forward=Tile(128, 16, 8, 2),
        dk=Tile(16, 64, 4, 2),
        dv=Tile(16, 64, 4, 2),
        dq=Tile(64, 16, 4, 2),
    ),
}
# Chosen by counts, not timed. Operands of products go through shared and tensor memory there, which
# must have room for them.
BLACKWELL = HOPPER | {
    (256, 2): TileSizes(
        forward=Tile(128, 64, 8, 2),
        dk=Tile(32, 128, 8, 2),
        dv=Tile(32, 128, 8, 3),
        dq=Tile(128, 32, 8, 2),
    ),
    (256, 4): TileSizes(
        forward=Tile(64, 32, 4, 2),
        dk=Tile(16, 32, 4, 2),
        dv=Tile(16, 64, 4, 2),
        dq=Tile(32, 16, 4, 2),
    ),
}
# Chosen by counts, not timed.
SYNCHRONOUS = HOPPER | {
    (64, 2): TileSizes(forward=Tile(128, 64, 4, 2), dkv=Tile(64, 64, 4, 2), dq=Tile(64, 64, 4, 2)),
    (128, 2): TileSizes(forward=Tile(128, 64, 8, 2), dkv=Tile(32, 64, 4, 2), dq=Tile(64, 32, 4, 2)),
    (256, 2): TileSizes(
        forward=Tile(64, 32, 4, 2),
        dk=Tile(32, 64, 8, 2),
        dv=Tile(32, 64, 8, 2),
        dq=Tile(64, 32, 8, 2),
    ),
    (64, 4): TileSizes(forward=Tile(128, 32, 8, 3), dkv=Tile(64, 32, 4, 2), dq=Tile(64, 32, 4, 3)),
}

BY_MATRIX_UNITS = {"hopper": HOPPER, "blackwell": BLACKWELL, "synchronous": SYNCHRONOUS}

# Tiles that were faster on an H200 than the table above, by (kind of call, padded head dim, bytes
# of an element): from how many queries of all heads and batch elements on, and the tiles.
#
# Two programs of the causal forward with 128 rows and 4 warps share an SM. They pay off in calls
# with many programs, because a last wave that does not fill the GPU costs more with larger
# programs.
BY_KIND = {
    ("causal", 128, 2): (2**17, {"forward": Tile(128, 64, 4, 2)}),
    ("scores", 128, 2): (0, {"dkv": Tile(64, 64, 4, 2)}),
    ("dropout", 128, 2): (0, {"dkv": Tile(32, 64, 4, 3)}),
}

# Tiles that were faster with bias or mask arrays, by (padded head dim, bytes of an element) and
# then by the bytes of those (q, k) arrays for one score; timed at 4096 tokens.
WITH_PAIRS = {
    (64, 2): {
        1: TileSizes(forward=Tile(64, 64, 4, 3), dkv=Tile(32, 64, 4, 3), dq=Tile(128, 64, 4, 2)),
        2: TileSizes(forward=Tile(64, 64, 4, 3), dkv=Tile(32, 64, 4, 3), dq=Tile(128, 64, 4, 3)),
        4: TileSizes(forward=Tile(64, 32, 4, 3), dkv=Tile(64, 64, 4, 3), dq=Tile(128, 32, 4, 3)),
    },
    (128, 2): {
        1: TileSizes(forward=Tile(64, 64, 4, 3), dkv=Tile(64, 64, 4, 2), dq=Tile(64, 64, 4, 2)),
        2: TileSizes(forward=Tile(128, 64, 8, 3), dkv=Tile(32, 64, 4, 3), dq=Tile(128, 64, 8, 3)),
        4: TileSizes(forward=Tile(128, 64, 8, 3), dkv=Tile(32, 64, 4, 3), dq=Tile(64, 64, 4, 2)),
    },
}

# Tiles that were faster on an H200 at low occupancy, by (padded head dim, bytes of an element): up
# to how many queries, or keys, of all heads and batch elements, and the tiles. 64 resident rows
# instead of 128 make more programs. Where 64 are resident anyway, longer steps win. Without a mask
# the limit is half of this, because all programs have the same work and nothing needs balancing.
FEW = {
    (64, 2): (2**15, {"forward": Tile(64, 128, 4, 2), "dq": Tile(64, 64, 4, 3)}),
    (128, 2): (
        2**14,
        {
            "forward": Tile(64, 128, 4, 2),
            "dkv": Tile(64, 64, 4, 3),
            "dq": Tile(64, 64, 4, 3),
        },
    ),
    (256, 2): (
        2**14,
        {
            "forward": Tile(64, 64, 4, 2),
            "dk": Tile(32, 64, 4, 3),
            "dv": Tile(64, 64, 4, 2),
            "dq": Tile(64, 64, 4, 2),
        },
    ),
    (64, 4): (2**14, dict.fromkeys(("forward", "dkv", "dq"), Tile(64, 64, 4, 2))),
    (128, 4): (
        2**14,
        {
            "forward": Tile(64, 64, 4, 2),
            "dk": Tile(32, 64, 4, 2),
            "dv": Tile(32, 64, 4, 3),
            "dq": Tile(64, 32, 4, 3),
        },
    ),
}

# Keys of all heads and batch elements that make programs enough where keys are resident (half as
# many without a mask). With fewer, the query heads that share them are split. Timed on an H200.
ENOUGH_KEYS = 2**15

# Resident rows of "decode", by padded head dim. With more, one program would fill an SM at head dim
# 256, and spill in float32.
DECODE_ROWS = {64: 64, 128: 64, 256: 32}

# Bytes of a key and a value tile of "decode". With three stages one pair is loading while another
# is used, and three programs of up to 16 rows share an SM of the H200 (counted). Half or twice the
# bytes, or other stages, were slower, except two stages in one shape, by 4 % (timed).
DECODE_STAGE = 32 * 1024


def default(p: Problem | None, f: CallFeatures, kernels: Collection[str] = KERNELS) -> TileSizes:
    """Return the tables' tiles of some kernels for a call, fitted to the GPU.

    Tiles that were not timed with bias or mask arrays have two stages at most if there are some, so
    that as many programs fit on an SM as without.
    """
    del p  # The features say all.
    size = f.padded_width, f.itemsize
    matrix_units = hardware.matrix_units(f.capability)
    measured = BY_MATRIX_UNITS[matrix_units][size]
    # The rest of the table was timed on Hopper alone.
    hopper = matrix_units == "hopper"
    with_pairs = WITH_PAIRS.get(size) if hopper and f.pair_bytes else None
    if with_pairs:
        measured = with_pairs[max(n for n in with_pairs if n <= f.pair_bytes)]
    tiles = dict(given_tiles(measured))
    if hopper and not with_pairs:
        tiles |= _low_occupancy_tiles(f) | _tiles_of_kind(f)
    if f.decodes:
        tiles["decode"] = decode_tile(*size)
        del tiles["forward"]
    tiles = {kernel: tile for kernel, tile in tiles.items() if kernel in kernels}
    for kernel, tile in tiles.items():
        if f.pair_bytes and (kernel == "decode" or not with_pairs):
            tile = dataclasses.replace(tile, num_stages=min(tile.num_stages, 2))
        tiles[kernel] = _fitted(kernel, tile, f)
    return TileSizes(**tiles)


def _low_occupancy_tiles(f: CallFeatures) -> dict[str, Tile]:
    """Return the tiles that differ at low occupancy."""
    limit, tiles = FEW.get((f.padded_width, f.itemsize), (0, {}))
    spread = f.kv_rows * splits_of_heads(f.groups, f.kv_rows, f.masked)

    def few(kernel: str) -> bool:
        return (spread if kernel in KEYS_STAY else f.rows) * (2 - f.masked) <= limit

    return {kernel: tile for kernel, tile in tiles.items() if few(kernel)}


def _tiles_of_kind(f: CallFeatures) -> dict[str, Tile]:
    """Return the tiles that differ for this kind of call."""
    kind = "scores" if f.scores else "dropout" if Option.DROPOUT in f.options else f.mask
    many, tiles = BY_KIND.get((kind, f.padded_width, f.itemsize), (0, {}))
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


def decode_tile(width: int, itemsize: int) -> Tile:
    """Return the tile of decoding, by the padded head dim and the bytes of a number."""
    return Tile(DECODE_ROWS[width], DECODE_STAGE // (2 * width * itemsize), 4, 3)


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
    return (kept * resident + 2 * tile.num_stages * streamed) * f.padded_width * f.itemsize + pairs


def splits_of_heads(groups: int, kv_rows: int, masked: bool) -> int:
    """Return among how many programs "dkv" splits the `groups` query heads of a key head.

    It is the smallest divisor of `groups` that makes programs enough, or else all of `groups`.
    Sums of many splits take time and memory, so a little less than enough will do.

    Args:
        groups: query heads of a key head.
        kv_rows: keys of all heads and batch elements. (There may be none.)
        masked: whether there is a mask. Its tiles differ in f, so more programs are better.
    """
    enough = (ENOUGH_KEYS if masked else ENOUGH_KEYS / 2) / math.sqrt(2)
    divisors = (n for n in range(1, groups) if groups % n == 0)
    return next((n for n in divisors if n * kv_rows >= enough), groups)


def candidates(kernel: str, problem: Problem, choose: Choose) -> list[Tile]:
    """Return tiles around the default one, which comes first.

    A tile has 64 resident rows or more for each 4 warps, as Hopper's matrix instructions want it,
    or as many as in the table. Its float32 sums and scores fit in the 255 registers of each thread.
    Blocks longer than the sequence, which kernels shorten, come once.
    """
    p, table = problem, choose(None)
    h, v = (max(16, power_of_2(width)) for width in (p.head_dim, p.value_dim))
    sums = {"forward": v, "decode": v, "dkv": h + v, "dk": h, "dv": v, "dq": h}[kernel]
    scores = 1 if kernel in (*FORWARD, "dv") else 2
    near = tile_of(table, kernel) or tile_of(table, "dkv") or tile_of(table, "dk")
    turn = -1 if kernel in KEYS_STAY else 1  # There keys are resident and queries streamed.
    rows, columns = (near.block_q, near.block_kv)[::turn]
    launches = {(rows, near.num_warps), (64, 4), (128, 4), (128, 8)}
    widths = [width for width in (columns // 2, columns, 2 * columns) if 16 <= width <= 128]
    tiles = [near] if tile_of(table, kernel) else []
    for (rows, warps), width, stages in itertools.product(sorted(launches), widths, (2, 3, 4)):
        block_q, block_kv = (rows, width)[::turn]
        tile = Tile(block_q, block_kv, warps, stages)
        if rows * (sums + scores * width) <= 255 * 32 * warps and fits(kernel, tile, choose):
            tiles.append(tile)
    q_rows = p.q_len * p.groups if kernel == "decode" else p.q_len
    q_len, kv_len = (max(16, power_of_2(length)) for length in (q_rows, p.kv_len))
    distinct = {}
    for x in tiles:
        block_q, block_kv = min(x.block_q, q_len), min(x.block_kv, kv_len)
        as_run = block_q, block_kv, x.num_warps, x.num_stages
        distinct.setdefault(as_run, x)
    return list(distinct.values())
