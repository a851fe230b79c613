"""How kernels in Mosaic GPU read the arrays of masks, scores and dropout in device memory.

Masks, scores and dropout are given a `DeviceOperand` for each array. It reads the numbers at a
tile's positions. Bools over (q, k) lie there as bits, see `Bits`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash._backends.mosaic import ptx
from pallas_flash._jax import compat
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.operands import Operand

plgpu = compat.mosaic_gpu()

# Positions by which tiles overhang a sequence, at most. Arrays of one number a token are padded by
# as many, so that reads stay in bounds; between batch elements they get the next one's numbers.
OVERHANG = 256
RANK_OF_TOKENS = 2  # The rank of these arrays, [B, T].


def stored_dtype(dtype):
    """Return the dtype in which device memory holds an operand's numbers."""
    return jnp.int8 if dtype == jnp.bool_ else read_dtype(dtype)


def read_dtype(dtype):
    """Return the dtype that an operand's numbers have in a kernel, where none has 64 bits."""
    with jax.enable_x64(False):
        return jax.dtypes.canonicalize_dtype(dtype)


class Bits(NamedTuple):
    """How bools over (q, k) are packed: 32 in a word, the first one lowest, along tiles' columns.

    Attributes:
        axis: the axis of columns.
        words: number of words in whole tiles.
    """

    axis: int
    words: int

    @classmethod
    def along(cls, axis: int, columns: Tiling) -> "Bits":
        """Return a packing with a multiple of four words, because a load takes up to four."""
        return cls(axis, -(-columns.count * columns.block // (4 * ptx.BITS)) * 4)

    def pack(self, x):
        """Return uint32 words, padded by zeros, of bools [instances, ...]."""
        # XLA would pack constants while it compiles, which takes seconds.
        x, axis = lax.optimization_barrier(x), self.axis + 1
        missing = self.words * ptx.BITS - x.shape[axis]
        x = jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])
        x = x.reshape(*x.shape[:axis], self.words, ptx.BITS, *x.shape[axis + 1 :])
        bits = jnp.arange(ptx.BITS, dtype=jnp.uint32)
        bits = jnp.uint32(1) << jnp.expand_dims(bits, tuple(range(1, x.ndim - axis - 1)))
        return jnp.sum(jnp.where(x, bits, jnp.uint32(0)), axis=axis + 1, dtype=jnp.uint32)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where an operand lies in device memory, and which positions may be asked for.

    Attributes:
        shape: shape of the operand.
        first: where it begins, in units of its size.
        ragged: whether positions may exceed the last one; they are clipped to it.
        anywhere: whether any position may be asked for; they are clipped, too.
        columns: positions of a tile's columns, of which a thread has two neighbours.
        cache: what has been read; None if it is not kept.
        bits: how bools are packed, if they are.
    """

    shape: tuple[int, ...]
    first: Any
    ragged: bool
    anywhere: bool = False
    columns: Any = None
    cache: "ReadCache | None" = None
    bits: Bits | None = None


class ReadCache(dict):
    """Results of reads of an operand, by the identity of the index arrays."""

    def read(self, index, read):
        """Return `read(index)`, of which only the first call reads."""
        key = tuple(map(id, index))
        if key not in self:
            # Hold the index arrays, or their `id` could be reused.
            self[key] = index, read(index)
        return self[key][1]


class DeviceOperand(Operand):
    """An operand in device memory, read at positions of a tile.

    Args:
        ref: reference to an array of one axis.
        dtype: dtype that the numbers stand for.
        layout: where they are.
    """

    def __init__(self, ref, dtype, layout: Layout):
        super().__init__(ref, dtype)
        self._layout = layout

    @property
    def shape(self):
        return self._layout.shape

    def placed(self, **changes) -> "DeviceOperand":
        """Return this operand with changes of its layout."""
        layout = dataclasses.replace(self._layout, **changes)
        return DeviceOperand(self._array, self._dtype, layout)

    def readable(self):
        return self.placed(anywhere=True, cache=None)

    def _read(self, index):
        cache = self._layout.cache
        return self._load(index) if cache is None else cache.read(index, self._load)

    def _load(self, index):
        layout, shape = self._layout, self._layout.shape
        if layout.bits is not None:
            return self._load_bits(index, layout.bits)
        # Two neighbours are read at once: both exist, or none, if their number is even.
        pairs = bool(index) and index[-1] is layout.columns and shape[-1] % 2 == 0
        if layout.anywhere:
            index, pairs = self._inside(index), False
        elif layout.ragged:
            last = [n - 1 for n in shape]
            if pairs:
                last[-1] -= 1
            index = [
                jnp.minimum(i, n) if jnp.ndim(i) else i for i, n in zip(index, last, strict=True)
            ]
        at = self._address(index, shape)
        if jnp.ndim(at):
            read = ptx.gather(self._array, at, pairs=pairs)
        else:
            # A scalar of the whole warpgroup.
            read = plgpu.load(self._array.at[at])
        return read.astype(jnp.int32) != 0 if self._dtype == jnp.bool_ else read

    def _load_bits(self, index, bits: Bits):
        """Return whether the bit of each (q, k) is set."""
        layout, axis = self._layout, bits.axis
        columns = index[axis]
        assert columns is layout.columns, "Bits are read along a tile's columns."
        shape = [bits.words if a == axis else n for a, n in enumerate(layout.shape)]
        index = [columns >> ptx.LOG_BITS if a == axis else i for a, i in enumerate(index)]
        if layout.ragged:
            index = [
                jnp.minimum(i, n - 1) if jnp.ndim(i) else i
                for i, n in zip(index, shape, strict=True)
            ]
        apart = math.prod(shape[axis + 1 :])
        return ptx.bits(self._array, self._address(index, shape), columns, apart)

    def _address(self, index, shape):
        """Return where an index is in memory."""
        at = self._layout.first
        for i, n in zip(index, shape, strict=True):
            at = at * n + i
        return at


class CachedOperand(Operand):
    """An operand for a function that is called twice, which the second call does not read again."""

    def __init__(self, operand: Operand):
        super().__init__(None, operand.dtype)
        self._operand, self._values, self._again = operand.readable(), [], None

    @property
    def shape(self):
        return self._operand.shape

    def again(self):
        """Prepare for the second call of the function."""
        self._again = iter(self._values)

    def readable(self):
        return self

    def _read(self, index):
        if self._again is not None:
            return next(self._again)
        self._values.append(self._operand[index])
        return self._values[-1]
