"""Layouts of tiles in registers and shared memory, and of sums in device memory."""

# The types of MLIR's Python bindings do not say what these functions take and return.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOptionalCall=false

import math

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu

from pallas_flash._jax import compat

plgpu = compat.mosaic_gpu()

WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)  # One number a row.
COLUMN = WGMMA.reduce(0)  # One number a column.
ACC = compat.accumulator_layout()
SPLAT = plgpu.Layout.WG_SPLAT
COLUMNS = 64
ROWS = 64  # Rows of a warpgroup's tile: the rows of one wgmma instruction.


def tile_columns(width: int) -> int:
    """Return the columns of the tiles in which rows of `width` numbers lie, see `tiled`."""
    return math.gcd(width, COLUMNS)


def tiled(width: int):
    """Return the transforms of wgmma operands in shared memory, 16-bit [rows, width].

    Tiles have 8 rows and 64, 32 or 16 columns, the most that divide the width. They are swizzled so
    that reading a column has no bank conflicts.
    """
    columns = tile_columns(width)
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)


TILED = tiled(COLUMNS)

# The transforms of 32-bit numbers.
TILED_32 = (plgpu.TilingTransform((8, COLUMNS // 2)), plgpu.SwizzleTransform(2 * COLUMNS))

# The transforms of tiles in blocks of 64 columns, [columns / 64, rows, 64]: copies then take arrays
# of any length and width, and fill with zeros what is beyond.
BLOCKS = (plgpu.SwizzleTransform(2 * COLUMNS),)


def strip_width(columns: int, dtype) -> int:
    """Return the columns of each of the `strips` of a tile: 128 bytes at most."""
    return math.gcd(columns, 2 * COLUMNS // jnp.dtype(dtype).itemsize)


def strips(width: int, dtype):
    """Return transforms as `BLOCKS`, of [columns / width, rows, width], for any width and dtype."""
    return (plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize),)


def columns_of(ref) -> int:
    """Return the number of columns of a tile stored in `strips` or `BLOCKS`."""
    return ref.shape[-3] * ref.shape[-1]


def strips_type(ref):
    """Return the type of a reference to `strips`, or to one strip."""
    return plgpu.RefType(strips(ref.shape[-1], ref.dtype))


# A group is 8 columns of 64 rows of float32, as a warpgroup's registers hold them: in device memory
# threads are in their order, each with its four numbers side by side. Only the size of the shape is
# used.
GROUP, OF_GROUP = 8, (4, 128)


def groups(width: int) -> int:
    """Return the number of 8-column groups in `width`."""
    return width // GROUP


def tiles_of(ref):
    """Return `strips` as the tiles that they consist of, [rows / 8, columns / width, 8, width]."""
    return mgpu.memref_transpose(mgpu.memref_unfold(ref, 1, (None, 8)), (1, 0, 2, 3))
