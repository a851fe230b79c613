"""The measured tiles of these kernels. `rule` picks from them.

Tiles that were not timed say so. Hopper's matrix instructions want 64 rows of the resident tile for
each 4 warps.
"""

from pallas_flash._problem.tile_sizes import Tile, TileSizes

# Tiles by the GPU's matrix units (`_jax.hardware.matrix_units`), then by (padded head dim, bytes of
# an element).
#
# Hopper's tiles are the fastest of those timed on an H200, non-causal and causal, at 16384 tokens
# in 16 bits and at 4096 in float32. With three stages two tiles are loading while a third is used.
# With two stages only operands that a tile needs late do not wait for memory.
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

# Keys from which on decoding has KV splits; fewer do not pay for a second launch. A round number,
# not timed.
MANY_KEYS = 512

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
