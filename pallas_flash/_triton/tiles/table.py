"""Tiles of these kernels: what was measured, and nothing else. `rule` picks from it.

A number that was not timed says so. Matrix instructions of Hopper want 64 rows of the tile that
stays for each 4 warps.
"""

from pallas_flash._tiling.sizes import Tile, TileSizes

# Tiles by how the GPU multiplies (`_hardware.matrix_units`), then by (padded head size, bytes of an
# element).
#
# Of Hopper: the fastest of those timed on an H200, full and causal, at 16384 tokens in 16 bits and
# at 4096 in float32 (docs/performance.md). With three stages two tiles are on their way while a
# third is worked on; with two, only what is needed late in a tile does not wait for memory.
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
        # These spill; with half the rows that stay they would not, but have too few for the matrix
        # instructions.
        forward=Tile(128, 16, 8, 2),
        dk=Tile(16, 64, 4, 2),
        dv=Tile(16, 64, 4, 2),
        dq=Tile(64, 16, 4, 2),
    ),
}
# By counts, not timed. What is multiplied goes through shared and tensor memory there, which must
# have room for it.
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
# By counts, too.
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
# of an element): from how many queries of all heads and examples on, and the tiles.
#
# Of a causal forward with 128 rows for 4 warps two programs share an SM. It wants many programs,
# because a last wave that does not fill the GPU costs more, the larger they are.
BY_KIND = {
    ("causal", 128, 2): (2**17, {"forward": Tile(128, 64, 4, 2)}),
    ("scores", 128, 2): (0, {"dkv": Tile(64, 64, 4, 2)}),
    ("dropout", 128, 2): (0, {"dkv": Tile(32, 64, 4, 3)}),
}

# The same with bias or mask arrays, by (padded head size, bytes of an element) and then by bytes of
# those arrays for each pair of a query and a key; timed at 4096 tokens.
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

# What was faster on an H200 where programs are few, by (padded head size, bytes of an element): up
# to how many queries, or keys, of all heads and examples, and the tiles. With 64 rows in place of
# 128 more programs run at once; where 64 stay anyway, longer steps win. Without a mask half as many
# queries and keys: all programs have the same work then, and more of them nothing to even out.
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

# With more keys than this few queries have "decode": fewer are not worth a second launch (a round
# number, not timed).
MANY_KEYS = 512

# Where keys stay, so many of all heads and examples make programs enough (half as many without a
# mask). With fewer, the query heads that share them are shared out. Timed on an H200.
ENOUGH_KEYS = 2**15

# Rows that stay in "decode", by padded head size. With more one program would fill a core at 256,
# and spill in float32.
DECODE_ROWS = {64: 64, 128: 64, 256: 32}

# Bytes of a key and a value tile of "decode". With three stages one pair is on its way while
# another is used, and three programs of up to 16 rows share a core of the H200 (counted). Half or
# twice the bytes, or other stages, were slower, but for two stages in one shape, by 4 % (timed).
DECODE_STAGE = 32 * 1024
