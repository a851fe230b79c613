"""Leaves of the algebra of masks that come of what a user passes as `mask`.

`_problem.mask_objects` has the objects that users build. In a call, each becomes leaves: those here
and in `_problem.masks`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash._problem.blocks import BlockClasses, BlockRange, Tiling, all_blocks
from pallas_flash._problem.masks import STATIC, Leaf, LeafKind, Mask, NumberLeaf, Scattered, leaf
from pallas_flash._problem.operands import Pairs, Positions, readable


@leaf
class MaskArray(Scattered):
    """A boolean (q, k) array: True where the query may see the key."""

    kind = LeafKind.ARRAY
    pairs: Pairs

    def allowed(self, b, h, q, k):
        return self.pairs.read(b, h, q, k)

    def block_classes(self, q_tiles, kv_tiles):
        return classes_of_array(self.pairs.array, q_tiles, kv_tiles)


@functools.partial(jax.jit, static_argnums=(1, 2))
def classes_of_array(array, q_tiles: Tiling, kv_tiles: Tiling) -> BlockClasses:
    """Return the classes of an array's blocks; axes that broadcast stay 1."""
    array = _not_folded(array)

    def reduce(fill, reduction):
        x = array
        for axis, tiling in ((2, q_tiles), (3, kv_tiles)):
            if array.shape[axis] != 1:
                missing = tiling.count * tiling.block - tiling.length
                pad = [(0, missing if a == axis else 0) for a in range(4)]
                x = jnp.pad(x, pad, constant_values=fill)
        tiles = [
            (tiling.count, tiling.block) if n != 1 else (1, 1)
            for n, tiling in zip(array.shape[2:], (q_tiles, kv_tiles), strict=True)
        ]
        x = x.reshape(*array.shape[:2], *tiles[0], *tiles[1])
        return reduction(x, axis=(3, 5))

    return BlockClasses(reduce(False, jnp.any), reduce(True, jnp.all))


def _not_folded(array):
    """Return the array behind a barrier, so that XLA does not fold computations on a constant.

    Folding takes seconds of compile time for an array of 1024 x 1024.
    """
    return lax.optimization_barrier(array)


@leaf
class PrefixLeaf(NumberLeaf):
    """The leaf of a `PrefixLM`: a query sees the prefix, and the keys up to its own position.

    Attributes:
        prefix_lengths: int32 [B].
        offset: the positions of query 0, int32 [B]; None if it is `shift`.
        positions: the positions of all tokens, if arrays hold them.
        shift: the position of query 0, where it is known.
    """

    kind = LeafKind.PREFIX
    prefix_lengths: Any
    offset: Any = None
    positions: Positions | None = None
    shift: int = dataclasses.field(default=0, metadata=STATIC)

    def allowed(self, b, h, q, k):
        if self.positions is not None:
            q, k = self.positions.query_positions(b, q), self.positions.key_positions(b, k)
        offset = self.shift if self.offset is None else self.offset[b]
        return (k <= q + offset) | (k < self.prefix_lengths[b])

    @property
    def numbers(self):
        assert self.positions is not None
        return self.positions.query, self.positions.keys

    def compare(self, q, k):
        prefix = self.prefix_lengths[:, None, None]
        return (k.low <= q.high) | (k.low < prefix), (k.high <= q.low) | (k.high < prefix)

    def restrict(self, part):
        if self.positions is not None:
            # Positions are absolute, and cut to the part already.
            return self
        shift, offset = part.offset(self.shift, self.offset)
        return PrefixLeaf(part.kv.inside(self.prefix_lengths), offset, shift=shift)

    def classes(self, q_tiles, kv_tiles):
        if self.positions is not None:
            return super().classes(q_tiles, kv_tiles)
        return Leaf.classes(self, q_tiles, kv_tiles)

    def kv_range(self, q_tiles, kv_tiles):
        if self.positions is not None:
            return super().kv_range(q_tiles, kv_tiles)
        # Query i sees the keys below max(i + offset + 1, prefix).
        offset, prefix = self._columns()
        some = jnp.clip(jnp.maximum(q_tiles.last + offset + 1, prefix), 0, kv_tiles.length)
        every = jnp.clip(jnp.maximum(q_tiles.first + offset + 1, prefix), 0, kv_tiles.length)
        # The last tile is full where it ends with the keys; `ArrayLengths` handles its ragged end.
        full = jnp.where(every == kv_tiles.length, kv_tiles.count, every // kv_tiles.block)
        zero = jnp.zeros_like(some)
        return BlockRange(zero, zero, full, -(-some // kv_tiles.block))

    def q_range(self, q_tiles, kv_tiles):
        if self.positions is not None:
            return super().q_range(q_tiles, kv_tiles)
        # Key j is visible to all queries if it is in the prefix, else from query j - offset on.
        offset, prefix = self._columns()
        some = jnp.where(kv_tiles.first < prefix, 0, kv_tiles.first - offset)
        every = jnp.where(kv_tiles.last < prefix, 0, kv_tiles.last - offset)
        start, full_start = (jnp.maximum(x, 0) for x in (some, every))
        stop = jnp.full_like(start, q_tiles.count)
        return BlockRange(start // q_tiles.block, -(-full_start // q_tiles.block), stop, stop)

    @property
    def exact_ranges(self) -> bool:
        return self.positions is None

    @property
    def sees_diagonal(self):
        if self.positions is not None:
            return self.positions.key_value is None
        return self.offset is None and self.shift >= 0

    def _columns(self):
        offset = self.shift if self.offset is None else self.offset[:, None]
        return offset, self.prefix_lengths[:, None]


@leaf
class PredicateLeaf(Leaf):
    """The leaf of a `Predicate`.

    Attributes:
        fn: the user's function.
        operands: its arrays.
        origin: as `Dropout.origin`.
    """

    kind = LeafKind.PREDICATE
    fn: Callable = dataclasses.field(metadata=STATIC)
    operands: tuple[Any, ...] = ()
    origin: Any = None

    def allowed(self, b, h, q, k):
        if self.origin is not None:
            b, h, q, k = (x + self.origin[i] for i, x in enumerate((b, h, q, k)))
        # The function may return a Python bool.
        return jnp.asarray(self.fn(b, h, q, k, *map(readable, self.operands)))

    def kv_range(self, q_tiles, kv_tiles):
        return all_blocks(q_tiles, kv_tiles, full=False)

    def q_range(self, q_tiles, kv_tiles):
        return all_blocks(kv_tiles, q_tiles, full=False)


@leaf
class BlockLeaf(Scattered):
    """The leaf of a `BlockMask`.

    Attributes:
        some: blocks in which some pair is allowed.
        block_q: queries in a block.
        block_kv: keys in a block.
        every: blocks in which every pair is allowed; None, together with `mask`, if these are the
            blocks of `some`.
        mask: decides in blocks that are in `some` and not in `every`.
        first: the index in the first block of the first query and of the first key, int32 [2]; None
            if both are 0.
    """

    kind = LeafKind.BLOCKS
    some: Any
    block_q: int = dataclasses.field(metadata=STATIC)
    block_kv: int = dataclasses.field(metadata=STATIC)
    every: Any = None
    mask: Mask | None = None
    first: Any = None

    def allowed(self, b, h, q, k):
        if self.mask is not None:
            return self.mask.allowed(b, h, q, k)
        b, h = (0 if n == 1 else i for n, i in zip(self.some.shape, (b, h), strict=False))
        if self.first is not None:
            q, k = q + self.first[0], k + self.first[1]
        return self.some[b, h, q // self.block_q, k // self.block_kv]

    def meets(self, start, stop, others: int):
        """Return whether a position meets a True block in its run of the other side's positions.

        That is exact for a leaf without a mask of its own.

        Args:
            start: the first of the run, int32 [1 or B, positions].
            stop: the one after the last.
            others: the axis of the other side in [B, N, T, S].

        Returns:
            Bool [1 or B, 1 or N, positions].
        """
        sizes, first = (self.block_q, self.block_kv), (0, 0) if self.first is None else self.first
        own, other = 3 - others, others - 2
        block = (jnp.arange(start.shape[1]) + first[own]) // sizes[own]
        # The True blocks before each block of the other side, on the last axis.
        table = jnp.swapaxes(_not_folded(self.some), others, 3).astype(jnp.int32)
        before = jnp.pad(jnp.cumsum(table, axis=3), ((0, 0), (0, 0), (0, 0), (1, 0)))
        b, h = (
            jnp.arange(n).reshape(-1, *[1] * axes)
            for n, axes in zip(table.shape, (2, 1), strict=False)
        )

        def count(position):
            return before[b, h, block, ((position + first[other]) // sizes[other])[:, None]]

        return (count(stop - 1 + sizes[other]) > count(start)) & (start < stop)[:, None]

    def restrict(self, part):
        sides = (part.q, self.block_q, 2), (part.kv, self.block_kv, 3)
        first, tables = [], {"some": self.some, "every": self.every}
        for side, block, axis in sides:
            count = self.some.shape[axis]
            if side.length % block:
                # The part overlaps at most this many blocks, wherever it begins in one.
                count = min(count, (side.length + block - 2) // block + 1)
            else:
                count = min(count, side.length // block)
            start = jnp.minimum(side.first // block, self.some.shape[axis] - count)
            first.append(side.first - start * block)
            for name, table in tables.items():
                if table is not None:
                    tables[name] = lax.dynamic_slice_in_dim(table, start, count, axis)
        whole = all(side.length % block == 0 for side, block, _ in sides)
        return dataclasses.replace(
            self,
            **tables,
            first=None if whole else jnp.stack(first).astype(jnp.int32),
        )

    def block_classes(self, q_tiles, kv_tiles):
        def overlapped(tiles: Tiling, block: int, first):
            """Return the first block that each tile overlaps, and the one after the last."""
            return (tiles.first[0] + first) // block, (tiles.last[0] + first) // block + 1

        first_q, first_k = (0, 0) if self.first is None else self.first
        rows = overlapped(q_tiles, self.block_q, first_q)
        columns = overlapped(kv_tiles, self.block_kv, first_k)

        def count(table):
            """Count the True blocks that each tile overlaps, on one axis after the other."""
            total = _not_folded(table).astype(jnp.int32)
            for axis, (start, stop), tiles, block in (
                (2, rows, q_tiles, self.block_q),
                (3, columns, kv_tiles, self.block_kv),
            ):
                if self.first is None and block % tiles.block == 0:
                    # Each tile is in one block.
                    total = total if block == tiles.block else jnp.take(total, start, axis)
                    continue
                pad = [(int(a == axis), 0) for a in range(4)]
                total = jnp.pad(jnp.cumsum(total, axis), pad)
                total = jnp.take(total, stop, axis) - jnp.take(total, start, axis)
            return total

        every = self.some if self.every is None else self.every
        area = ((rows[1] - rows[0])[:, None] * (columns[1] - columns[0]))[None, None]
        return BlockClasses(count(self.some) > 0, count(every) == area)
