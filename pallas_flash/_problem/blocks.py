"""Which key blocks a query tile visits, and which query blocks a key tile visits.

One side of the scores is the outer one: its tiles stay in place, as queries do in the forward. The
tiles of the inner side stream past them. A pair of an outer and an inner tile is a block of scores:

* empty: the mask allows none of its scores, and kernels skip it;
* partial: the mask allows some of its scores, and kernels evaluate the mask;
* full: the mask allows all of its scores, and kernels leave the mask out.

A mask whose blocks form one run for each outer tile gives a `BlockRange`, four int32 numbers:

    0 ..... start ..... full_start ..... full_stop ..... stop ..... n
      empty     partial            full           partial    empty

Without a full block, full_start = full_stop = start. Any other mask, such as a boolean array, gives
`BlockClasses`, and `lists` makes of them a list of block numbers for each outer tile.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash._jax.symbolic import is_symbolic


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How one side's `length` positions are cut into tiles of `block`.

    The length may be symbolic, and then so is the number of tiles. Tile numbers are NumPy arrays
    where the length is known, else JAX arrays.
    """

    length: int
    block: int

    @property
    def count(self) -> int:
        return -(-self.length // self.block)

    @property
    def numbers(self) -> np.ndarray:
        """The number of each tile, int32 [1, tiles]; broadcasts against [B, 1]."""
        xp: Any = jnp if is_symbolic(self.length) else np
        return xp.arange(self.count, dtype=np.int32)[None]

    @property
    def first(self) -> np.ndarray:
        """The first position of each tile, [1, tiles]."""
        return self.numbers * self.block

    @property
    def last(self) -> np.ndarray:
        """The last position of each tile inside the array, [1, tiles]."""
        xp: Any = jnp if is_symbolic(self.length) else np
        return xp.minimum(self.first + self.block, self.length) - 1

    def filled(self, number: int) -> np.ndarray:
        """Return the same number for each tile, int32 [1, tiles]; it may be symbolic."""
        xp: Any = jnp if is_symbolic(self.length) or is_symbolic(number) else np
        return xp.full((1, self.count), number, np.int32)


class BlockRange(NamedTuple):
    """One run of inner blocks for each outer tile; each field is int32 [1 or B, outer tiles]."""

    start: Any
    full_start: Any
    full_stop: Any
    stop: Any


class BlockClasses(NamedTuple):
    """For each block, whether some and whether all of its scores are allowed.

    Bool [1 or B, 1 or N, query tiles or 1, key tiles or 1].
    """

    some: Any
    every: Any


def all_blocks(outer: Tiling, inner: Tiling, *, full: bool) -> BlockRange:
    """Return ranges of all inner blocks: all of them full, or all of them partial."""
    start, stop = outer.filled(0), outer.filled(inner.count)
    return BlockRange(start, start, stop if full else start, stop)


def band_range(outer: Tiling, inner: Tiling, low, high) -> BlockRange:
    """Return the blocks of an outer position's window: inner positions outer + low .. outer + high.

    Args:
        outer: the side that stays.
        inner: the side that streams.
        low: an int, or int32 [B, 1]; None if the window has no lower bound.
        high: the same for the upper bound.
    """
    block = inner.block
    zero, end = outer.filled(0), outer.filled(inner.count)
    start = zero if low is None else (outer.first + low) // block
    full_start = zero if low is None else -(-(outer.last + low) // block)
    stop = end if high is None else (outer.last + high) // block + 1
    full_stop = end if high is None else (outer.first + high + 1) // block
    return BlockRange(start, full_start, full_stop, stop)


def lengths_range(outer: Tiling, inner: Tiling, outer_length, inner_length) -> BlockRange:
    """Return the blocks below a length of each side, an int or int32 [B]; None is no limit."""
    start = outer.filled(0)
    stop = full_stop = outer.filled(inner.count)
    if inner_length is not None:
        length = _column(inner_length)
        stop, full_stop = -(-length // inner.block) + start, length // inner.block + start
    if outer_length is not None:
        # An outer tile past its own length visits nothing. One that straddles its length has masked
        # rows in every block.
        length = _column(outer_length)
        some, every = ((x < length).astype(np.int32) for x in (outer.first, outer.last))
        stop, full_stop = some * stop, every * full_stop
    return BlockRange(start, start, full_stop, stop)


class Extremes(NamedTuple):
    """The least and the greatest number of the tokens of each tile."""

    low: Any
    high: Any


def _compared(leaf, q_tiles: Tiling, kv_tiles: Tiling):
    """Return what `leaf.compare` says of each block, [1 or B, query tiles, key tiles]."""

    def extremes(x, tiling, axis):
        def tiles(fill):
            padding = ((0, 0), (0, tiling.count * tiling.block - tiling.length))
            x_tiled = jnp.pad(x, padding, constant_values=fill)
            return x_tiled.reshape(x.shape[0], tiling.count, tiling.block)

        limits = jnp.iinfo(x.dtype)
        ends = tiles(limits.max).min(-1), tiles(limits.min).max(-1)
        return Extremes(*(jnp.expand_dims(end, axis) for end in ends))

    query, key_value = leaf.numbers
    return leaf.compare(extremes(query, q_tiles, 2), extremes(key_value, kv_tiles, 1))


def number_classes(leaf, q_tiles: Tiling, kv_tiles: Tiling) -> BlockClasses:
    """Return the classes of the blocks of a `NumberLeaf`, [1 or B, 1, query tiles, key tiles]."""
    return BlockClasses(*(jnp.expand_dims(x, 1) for x in _compared(leaf, q_tiles, kv_tiles)))


def _number_range(leaf, q_tiles: Tiling, kv_tiles: Tiling, inner: int) -> BlockRange:
    """Return the ranges of a `NumberLeaf`, which compares numbers of queries and of keys.

    Args:
        leaf: a pytree with the property `numbers` and the method `compare`.
        q_tiles: the tiles of queries.
        kv_tiles: the tiles of keys.
        inner: the axis of the inner side in [B, query tiles, key tiles].
    """
    some, every = _compared(leaf, q_tiles, kv_tiles)
    n = (q_tiles, kv_tiles)[inner - 1].count
    tile = jnp.expand_dims(jnp.arange(n, dtype=jnp.int32), (0, 3 - inner))

    def first(where):
        return jnp.min(jnp.where(where, tile, n), axis=inner, initial=n)

    start, full_start = first(some), first(every)
    stop = jnp.max(jnp.where(some, tile + 1, 0), axis=inner, initial=0)
    full_stop = first(~every & (tile >= jnp.expand_dims(full_start, inner)))
    return BlockRange(start, full_start, full_stop, stop)


# Compiled, so that the [tiles, tiles] comparisons fuse into their reductions and are never stored.
number_range = jax.jit(_number_range, static_argnums=(1, 2, 3))


def whole_tiles(outer: Tiling, inner: Tiling) -> BlockRange:
    """Return ranges in which a ragged outer tile has partial blocks alone."""
    none, every = outer.filled(0), outer.filled(inner.count)
    fits = outer.first + outer.block <= outer.length
    whole = _namespace(fits, every).where(fits, every, none)
    return BlockRange(none, none, whole, every)


def intersect(ranges: list[BlockRange], outer: Tiling, inner: Tiling):
    """Return the ranges of a conjunction, int32 [1 or B, outer tiles, 4]."""
    everything = BlockRange(*map(outer.filled, (0, 0, inner.count, inner.count)))
    start, full_start, full_stop, stop = everything
    for r in ranges:
        start, full_start = _maximum(start, r.start), _maximum(full_start, r.full_start)
        full_stop, stop = _minimum(full_stop, r.full_stop), _minimum(stop, r.stop)
    stop = _maximum(stop, everything.start)
    start = _minimum(start, stop)
    full_start, full_stop = _maximum(full_start, start), _minimum(full_stop, stop)
    none_full = full_stop <= full_start
    xp = _namespace(none_full, start)
    full_start, full_stop = (xp.where(none_full, start, x) for x in (full_start, full_stop))
    columns = xp.broadcast_arrays(start, full_start, full_stop, stop)
    return xp.stack(columns, axis=-1).astype(np.int32)


def classes_of_ranges(kv_ranges, q_ranges, q_tiles: Tiling, kv_tiles: Tiling) -> BlockClasses:
    """Return the classes that ranges in both directions give.

    Both are needed: each direction knows ragged tiles only on its inner side.
    """

    def inside(ranges, inner: Tiling):
        tile = inner.numbers[None, None]
        start, full_start, full_stop, stop = (ranges[:, None, :, i, None] for i in range(4))
        return (start <= tile) & (tile < stop), (full_start <= tile) & (tile < full_stop)

    some, every = inside(kv_ranges, kv_tiles)
    some_t, every_t = inside(q_ranges, q_tiles)
    return BlockClasses(some & some_t.swapaxes(2, 3), every & every_t.swapaxes(2, 3))


def group_classes(classes: BlockClasses, groups: int) -> BlockClasses:
    """Return the classes of `groups` consecutive heads together, [1 or B, 1 or N / groups, ...]."""
    if groups == 1 or classes.some.shape[1] == 1:
        return classes
    some, every = (x.reshape(x.shape[0], -1, groups, *x.shape[2:]) for x in classes)
    return BlockClasses(some.any(axis=2), every.all(axis=2))


@jax.jit
def lists(classes: BlockClasses) -> jax.Array:
    """Return int32 [..., outer, 2 + inner] for classes [..., outer, inner].

    A row is the number of full blocks, the number of full and partial blocks, and their numbers,
    full blocks first. The rest of the row has no meaning.
    """
    some, every = classes
    order = jnp.argsort(jnp.where(every, 0, jnp.where(some, 1, 2)), axis=-1, stable=True)
    counts = [x.sum(axis=-1, keepdims=True, dtype=jnp.int32) for x in (every, some)]
    return jnp.concatenate([*counts, order.astype(jnp.int32)], axis=-1)


def _column(length):
    """A length in a form that broadcasts against [B, tiles]."""
    if is_symbolic(length):
        return jnp.asarray(length, jnp.int32)
    return length if isinstance(length, int) else length[:, None]


# Ranges that depend on no array are NumPy: they become constants of the program.
def _namespace(*arrays):
    return np if all(isinstance(a, np.ndarray) for a in arrays) else jnp


def _maximum(a, b):
    return _namespace(a, b).maximum(a, b)


def _minimum(a, b):
    return _namespace(a, b).minimum(a, b)
