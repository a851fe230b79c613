"""How tiles lie in registers, in shared memory and, as sums, in device memory."""

# The types of MLIR's Python bindings do not say what these functions take and return.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOptionalCall=false

import math

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu

from pallas_flash import _compat

plgpu = _compat.mosaic_gpu()

WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)  # One number a row.
COLUMN = WGMMA.reduce(0)  # One number a column.
ACC = _compat.accumulator_layout()
SPLAT = plgpu.Layout.WG_SPLAT
COLUMNS = 64


def tile_columns(width: int) -> int:
    """The columns of the tiles in which rows of so many numbers lie, see `tiled`."""
    return math.gcd(width, COLUMNS)


def tiled(width: int):
    """How operands of matrix instructions lie in shared memory, [rows, width] of 16 bits.

    In tiles of 8 rows and of 64, 32 or 16 columns, the most of which the width has a multiple. They
    are permuted so that reading a column meets no bank twice.
    """
    columns = tile_columns(width)
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)


TILED = tiled(COLUMNS)

# The same for numbers of 32 bits.
TILED_32 = (plgpu.TilingTransform((8, COLUMNS // 2)), plgpu.SwizzleTransform(2 * COLUMNS))

# The same for tiles of 64 columns one after the other, [columns / 64, rows, 64]: copies then take
# arrays of any length and width, and fill with zeros what is beyond.
BLOCKS = (plgpu.SwizzleTransform(2 * COLUMNS),)


def strip_width(columns: int, dtype) -> int:
    """The columns of each of the `strips` in which a tile of so many lies: 128 bytes at most."""
    return math.gcd(columns, 2 * COLUMNS // jnp.dtype(dtype).itemsize)


def strips(width: int, dtype):
    """As `BLOCKS`, [columns / width, rows, width], for other widths and for numbers of 32 bits."""
    return (plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize),)


def columns_of(ref) -> int:
    """How many `strips` have, or `BLOCKS`."""
    return ref.shape[-3] * ref.shape[-1]


def strips_type(ref):
    """The type of such a reference, or of one strip."""
    return plgpu.RefType(strips(ref.shape[-1], ref.dtype))


# What a warpgroup's registers hold of 8 columns, 64 rows of float32, lies in device memory as a
# thread's four numbers side by side, and threads in their order.
GROUP, OF_GROUP = 8, (4, 128)


def groups(width: int) -> int:
    """Of so many columns."""
    return width // GROUP


def tiles_of(ref):
    """`strips` as the tiles that they consist of, [rows / 8, columns / width, 8, width]."""
    return mgpu.memref_transpose(mgpu.memref_unfold(ref, 1, (None, 8)), (1, 0, 2, 3))
