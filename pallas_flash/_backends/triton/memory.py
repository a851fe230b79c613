"""Tiles in memory: sizes that the compiler has, and loads and stores of what exists.

The compiler has only tiles whose sizes are powers of two, and Pallas checks no bounds. So a tile
may reach beyond a sequence or a head dim, and its loads and stores are masked there.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._jax import compat
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.operands import Operand
from pallas_flash._problem.tile_sizes import MIN_ROWS


def padded(width: int) -> int:
    """Return the tile width for a head dim: a power of two that matrix instructions take."""
    return max(MIN_ROWS, pl.next_power_of_2(width))


def block_for(length: int, block: int) -> int:
    """Return the block size, shortened to what the sequence needs."""
    return min(block, max(MIN_ROWS, pl.next_power_of_2(length)))


def valid_positions(tiling: Tiling, positions):
    """Return which positions of a tile exist; None if all of them do in every tile."""
    return positions < tiling.length if tiling.length % tiling.block else None


def load_at(ref, index, rows, width: int):
    """Load rows from anywhere: `load` of rows at `index`, integers or int32 [rows] by axis."""
    column = lax.iota(jnp.int32, ref.shape[-1])[None, :]
    return load(ref.at[*(i[:, None] if jnp.ndim(i) else i for i in index), column], rows, width)


def load(ref, rows, width: int):
    """Load a tile [rows, padded width], zero where `rows` (bool or None) is False, past `width`."""
    mask = _tile_mask(ref.shape[-1], rows, width)
    if mask is None:
        return compat.triton().load(ref)
    other = 0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0
    return compat.triton().load(ref, mask=mask, other=other)


def store(ref, x, rows, width: int) -> None:
    """Store a tile where `rows` (bool [rows] or None) is True, and nothing beyond `width`."""
    compat.triton().store(ref, x.astype(ref.dtype), mask=_tile_mask(ref.shape[-1], rows, width))


def store_pairs(ref, x, rows, keys) -> None:
    """Store a tile where `rows` and `keys` (bool or None) are True."""
    inside = None if rows is None else rows[:, None]
    if keys is not None:
        inside = keys[None, :] if inside is None else inside & keys[None, :]
    inside = None if inside is None else jnp.broadcast_to(inside, x.shape)
    compat.triton().store(ref, x.astype(ref.dtype), mask=inside)


def _tile_mask(padded: int, rows, width: int):
    rows = None if rows is None else rows[:, None]
    columns = None if padded == width else (lax.iota(jnp.int32, padded) < width)[None, :]
    if rows is None or columns is None:
        return columns if rows is None else rows
    return rows & columns


def load_row(ref, inside):
    """Load one number a row, [rows], zero where not `inside` (bool [rows] or None)."""
    if inside is None:
        return compat.triton().load(ref)
    return compat.triton().load(ref, mask=inside, other=0.0)


def store_row(ref, x, inside) -> None:
    """Store one number a row where `inside` (bool [rows] or None)."""
    compat.triton().store(ref, x.astype(ref.dtype), mask=inside)


class RefOperand(Operand):
    """An operand in a kernel's memory, read at positions of a tile.

    Args:
        ref: the ref.
        dtype: the dtype of the operand; the ref may have another one, see `kernel_arrays`.
        ragged: whether positions can lie outside. Reads return zero there.
    """

    def __init__(self, ref, dtype, ragged: bool):
        super().__init__(ref, dtype)
        self._ragged = ragged

    def readable(self):
        # A masked `load` has no derivative, not even where nothing is differentiated.
        return Operand(self._array, self._dtype)

    def _read(self, index):
        shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
        if not shape:
            return self._array[index]
        ref = self._array.at[index]
        if not self._ragged:
            return compat.triton().load(ref)
        inside = functools.reduce(
            jnp.logical_and,
            [(i >= 0) & (i < n) for i, n in zip(index, self.shape, strict=True) if jnp.ndim(i)],
        )
        return compat.triton().load(ref, mask=jnp.broadcast_to(inside, shape), other=0)
