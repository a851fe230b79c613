"""Which keys a query may see, written once for every implementation and every pass.

A `Mask` is a conjunction of leaves. From each leaf come

* the elementwise predicate, `allowed(b, h, q, k)`: may query `q` of example `b` and query head `h`
  see key `k`? The arguments are integer index arrays that broadcast against each other, so the same
  code serves a dense [T, S] mask, a tile in plain JAX and a transposed tile; and the leaf's arrays
  may be references into a kernel's memory, so it serves the kernels too;
* the tile ranges, which let a blocked algorithm skip what is empty and leave unmasked what is full.

A tile range is four int32 numbers for each tile that stays in place, counting the tiles that stream
past it:

    0 ..... start ..... full_start ..... full_stop ..... stop ..... n
      empty       mask             full            mask       empty

Nothing is allowed outside [start, stop); everything is allowed inside [full_start, full_stop).
Without a full tile, full_start = full_stop = start.

Where a leaf's tiles form no such run, as those of a boolean array, the tiles that are not empty are
listed in place of the range, the full ones first.
"""

import abc
import dataclasses
import math
from typing import Any, NamedTuple, Protocol, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash._operands import Positions
from pallas_flash._symbolic import is_symbolic, known_at_most

# An int where a bound is known at trace time, else int32 [B] (or, inside a kernel, a reference to
# it).
Bound = Any


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How one side's `length` positions are cut into tiles of `block`.

    The length may be symbolic, and so is the number of tiles then. Numbers of tiles are NumPy
    arrays where the length is known, and JAX's where it is not.
    """

    length: int
    block: int

    @property
    def count(self) -> int:
        return -(-self.length // self.block)

    @property
    def numbers(self) -> np.ndarray:
        """The number of each tile, int32 [1, tiles]: next to numbers of each example, [B, 1]."""
        xp: Any = jnp if is_symbolic(self.length) else np
        return xp.arange(self.count, dtype=np.int32)[None]

    @property
    def first(self) -> np.ndarray:
        """The first position of each tile, [1, tiles]."""
        return self.numbers * self.block

    @property
    def last(self) -> np.ndarray:
        """The last position of each tile that exists, [1, tiles]."""
        xp: Any = jnp if is_symbolic(self.length) else np
        return xp.minimum(self.first + self.block, self.length) - 1

    def filled(self, number: int) -> np.ndarray:
        """The same number for each tile, int32 [1, tiles]; it may be symbolic, too."""
        xp: Any = jnp if is_symbolic(self.length) or is_symbolic(number) else np
        return xp.full((1, self.count), number, np.int32)


class TileRange(NamedTuple):
    """One range for each tile that stays, each field int32 [1 or B, tiles]; see the module."""

    start: Any
    full_start: Any
    full_stop: Any
    stop: Any


class Leaf(Protocol):
    """One condition on (query, key) pairs."""

    def allowed(self, b, h, q, k) -> jax.Array:
        """Whether query `q` of example `b` and head `h` may see key `k`; indices broadcast."""
        ...

    def kv_range(self, q: Tiling, kv: Tiling) -> TileRange:
        """For each query tile, the key tiles it meets."""
        ...

    def q_range(self, q: Tiling, kv: Tiling) -> TileRange:
        """For each key tile, the query tiles it meets."""
        ...

    def tile_classes(self, q: Tiling, kv: Tiling) -> "TileClasses | None":
        """Which tiles are allowed, where they form no runs; the ranges then hold all tiles."""
        ...

    @property
    def reflexive(self) -> bool:
        """Whether every query is known to see the key at its own position."""
        ...

    @property
    def intervals(self) -> bool:
        """Whether ranges of tiles of one position tell exactly who sees whom."""
        ...


class Runs:
    """A leaf whose allowed tiles form one run for each tile that stays."""

    @property
    def intervals(self) -> bool:
        return False

    def tile_classes(self, q, kv):
        return None


class TileClasses(NamedTuple):
    """For each pair of tiles whether anything and everything is allowed.

    Bool [1 or B, 1 or N, query tiles or 1, key tiles or 1].
    """

    some: Any
    every: Any


# Far beyond any sequence, and far enough from the ends of int32 that sums of positions cannot wrap.
FAR = 2**30


# Of so many pairs a mask is evaluated at a time, where nothing but all pairs tells: 32 MB.
PAIRS_AT_ONCE = 2**25


# Metadata of a field that is compiled in.
STATIC = dict(static=True)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def leaf(cls):
    """Makes a frozen dataclass a pytree of what is not declared `STATIC`, whatever it holds."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@leaf
class Band(Runs):
    """Key k is seen by query q when low <= k - (q + offset) <= high; None is unbounded.

    Causal attention is high = 0, a sliding window (left, right) is low = -left, high = right.
    `offset` int32 [B] moves the queries of each example; an offset known at trace time is folded
    into `low` and `high`.
    """

    low: int | None = dataclasses.field(default=None, metadata=STATIC)
    high: int | None = dataclasses.field(default=None, metadata=STATIC)
    offset: Any = None

    def allowed(self, b, h, q, k):
        if self.offset is None:
            # A sum for each query, and nothing for each pair. It does not wrap: see `trimmed`.
            above = None if self.low is None else k >= q + self.low
            below = None if self.high is None else k <= q + self.high
            return _both(above, below)
        distance = k - (q + self.offset[b])
        above = None if self.low is None else distance >= self.low
        below = None if self.high is None else distance <= self.high
        return _both(above, below)

    def moved(self, part):
        """See `_context.parts`."""
        shift, offset = part.offset(0, self.offset)
        if offset is not None:
            return Band(self.low, self.high, offset)
        low, high = (None if side is None else side + shift for side in (self.low, self.high))
        return Band(low, high).trimmed(part.q.length, part.kv.length)

    def trimmed(self, q_len: int, kv_len: int) -> "Band":
        """Without a side that excludes nothing, of so many queries and keys and no offset."""
        low, high = self.low, self.high
        if low is not None:
            low = None if known_at_most(low, 1 - q_len) else max(-FAR, min(low, FAR))
        if high is not None:
            high = None if known_at_most(kv_len - 1, high) else max(-FAR, min(high, FAR))
        return Band(low, high)

    def kv_range(self, q, kv):
        low, high = (_shift(side, self.offset) for side in (self.low, self.high))
        return self._range(q, kv, low, high)

    def q_range(self, q, kv):
        # k - q in [low, high] read from the other side: q - k in [-high, -low].
        low, high = (_shift(side, self.offset) for side in (self.low, self.high))
        return self._range(kv, q, _negate(high), _negate(low))

    @property
    def intervals(self) -> bool:
        return True

    @property
    def reflexive(self):
        return self.offset is None and (self.low or 0) <= 0 <= (self.high or 0)

    @property
    def unbounded(self) -> bool:
        """Whether every query sees every key."""
        return self.low is None and self.high is None

    @staticmethod
    def _range(stay: Tiling, flow: Tiling, low, high) -> TileRange:
        """Positions stay + low .. stay + high in tiles of `flow`: their union, and their common."""
        block = flow.block
        zero, end = stay.filled(0), stay.filled(flow.count)
        start = zero if low is None else (stay.first + low) // block
        full_start = zero if low is None else -(-(stay.last + low) // block)
        stop = end if high is None else (stay.last + high) // block + 1
        full_stop = end if high is None else (stay.first + high + 1) // block
        return TileRange(start, full_start, full_stop, stop)


@leaf
class Lengths(Runs):
    """Query q sees key k when q < query and k < key_value, each int32 [B], or None for no limit."""

    query: Any = None
    key_value: Any = None

    def allowed(self, b, h, q, k):
        inside = [
            position < (length if _is_size(length) else length[b])
            for position, length in ((q, self.query), (k, self.key_value))
            if length is not None
        ]
        return _both(*inside) if len(inside) == 2 else inside[0]

    def moved(self, part):
        """See `_context.parts`."""
        sides = (self.query, part.q), (self.key_value, part.kv)
        return Lengths(*(None if x is None else side.inside(x) for x, side in sides))

    def kv_range(self, q, kv):
        return self._range(q, kv, self.query, self.key_value)

    def q_range(self, q, kv):
        return self._range(kv, q, self.key_value, self.query)

    @property
    def intervals(self) -> bool:
        return True

    @property
    def reflexive(self):
        return False

    @staticmethod
    def _range(stay: Tiling, flow: Tiling, stay_length, flow_length) -> TileRange:
        start = stay.filled(0)
        stop = full_stop = stay.filled(flow.count)
        if flow_length is not None:
            length = _column(flow_length)
            stop, full_stop = -(-length // flow.block) + start, length // flow.block + start
        if stay_length is not None:
            # A tile wholly past its own length meets nothing; one that straddles it has masked rows
            # in every tile.
            length = _column(stay_length)
            some, every = ((x < length).astype(np.int32) for x in (stay.first, stay.last))
            stop, full_stop = some * stop, every * full_stop
        return TileRange(start, start, full_stop, stop)


@leaf
class Ends(Lengths):
    """The same with sizes of arrays, which are known when the mask is built, or symbolic."""

    query: int | None = dataclasses.field(default=None, metadata=STATIC)
    key_value: int | None = dataclasses.field(default=None, metadata=STATIC)


class Span(NamedTuple):
    """The least and the greatest number of the tokens of each tile."""

    low: Any
    high: Any


class ByNumber(Runs):
    """A leaf that compares a number of each query with one of each key, read from arrays.

    Of a tile it knows the least and the greatest number. Its ranges are exact where numbers are
    sorted and both sides have the same ones, and safe where not.
    """

    @property
    @abc.abstractmethod
    def _numbers(self) -> tuple[Any, Any]:
        """Those of queries, int32 [1 or B, T], and of keys, int32 [1 or B, S]."""

    @abc.abstractmethod
    def _compare(self, q: Span, k: Span) -> tuple[Any, Any]:
        """Whether some and whether every pair of two tiles may be allowed; spans broadcast."""

    def kv_range(self, q, kv):
        return _range_by_number(self, q, kv, 2)

    def q_range(self, q, kv):
        return _range_by_number(self, q, kv, 1)


def _range_by_number_impl(leaf: ByNumber, q: Tiling, kv: Tiling, flow: int) -> TileRange:
    """The range along axis `flow` of [B, query tiles, key tiles]."""

    def span(x, tiling, axis):
        def tiles(fill):
            padding = ((0, 0), (0, tiling.count * tiling.block - tiling.length))
            x_tiled = jnp.pad(x, padding, constant_values=fill)
            return x_tiled.reshape(x.shape[0], tiling.count, tiling.block)

        limits = jnp.iinfo(x.dtype)
        ends = tiles(limits.max).min(-1), tiles(limits.min).max(-1)
        return Span(*(jnp.expand_dims(end, axis) for end in ends))

    query, key_value = leaf._numbers
    some, every = leaf._compare(span(query, q, 2), span(key_value, kv, 1))
    n = (q, kv)[flow - 1].count
    tile = jnp.expand_dims(jnp.arange(n, dtype=jnp.int32), (0, 3 - flow))

    def first(where):
        return jnp.min(jnp.where(where, tile, n), axis=flow, initial=n)

    start, full_start = first(some), first(every)
    stop = jnp.max(jnp.where(some, tile + 1, 0), axis=flow, initial=0)
    full_stop = first(~every & (tile >= jnp.expand_dims(full_start, flow)))
    return TileRange(start, full_start, full_stop, stop)


# Compiled, so that the [tiles, tiles] comparisons fuse into their reductions and are never stored.
_range_by_number = jax.jit(_range_by_number_impl, static_argnums=(1, 2, 3))


@leaf
class Segments(ByNumber):
    """Query q sees key k when their ids are equal: query int32 [B, T], key_value int32 [B, S].

    None for `key_value` means the ids of the queries: they are the same tokens.
    """

    query: Any
    key_value: Any = None

    @property
    def _numbers(self):
        return self.query, self.query if self.key_value is None else self.key_value

    def allowed(self, b, h, q, k):
        # Ragged tiles ask beyond the ends, where any id may stand in: `Lengths` masks those
        # positions.
        query, key_value = self._numbers
        return query[b, q] == key_value[b, k]

    def _compare(self, q, k):
        some = (q.low <= k.high) & (k.low <= q.high)
        return some, (q.low == q.high) & (k.low == k.high) & (q.low == k.low)

    @property
    def reflexive(self):
        return self.key_value is None


@leaf
class PositionBand(ByNumber):
    """`Band` between positions that arrays tell: low <= position of k - position of q <= high.

    Without keys' positions of their own, queries and keys are the same tokens.
    """

    positions: Positions
    low: int | None = dataclasses.field(default=None, metadata=STATIC)
    high: int | None = dataclasses.field(default=None, metadata=STATIC)

    @property
    def _numbers(self):
        return self.positions.query, self.positions.keys

    def allowed(self, b, h, q, k):
        distance = self.positions.of_key(b, k) - self.positions.of_query(b, q)
        return self._within(distance, distance)

    def _compare(self, q, k):
        least, greatest = k.low - q.high, k.high - q.low
        return self._within(greatest, least), self._within(least, greatest)

    def _within(self, for_low, for_high):
        above = None if self.low is None else for_low >= self.low
        below = None if self.high is None else for_high <= self.high
        return _both(above, below)

    @property
    def reflexive(self):
        return self.positions.key_value is None and (self.low or 0) <= 0 <= (self.high or 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """The conjunction of `leaves`; none at all lets every query see every key."""

    leaves: tuple[Leaf, ...] = ()

    # NumPy would otherwise join with each element of an array.
    __array_ufunc__ = None

    def __and__(self, other: Any) -> "Mask":
        return Mask((*self.leaves, *(other.leaves if isinstance(other, Mask) else (other,))))

    __rand__ = __and__

    def __bool__(self) -> bool:
        return bool(self.leaves)

    def allowed(self, b, h, q, k) -> Any:
        """The only comparison of positions in the package; see `Leaf.allowed`."""
        return _both(*(leaf.allowed(b, h, q, k) for leaf in self.leaves))

    def moved(self, part) -> "Mask":
        """See `_context.parts`."""
        del part
        return Mask(tuple(x for x in self.leaves if not (type(x) is Band and x.unbounded)))

    def sees(self, q_len: int, kv_len: int) -> Any:
        """Whether any query may see any key: a bool where that is known, else a traced one."""
        some = self.tile_classes(Tiling(q_len, q_len), Tiling(kv_len, kv_len)).some.any()
        return bool(some) if isinstance(some, np.bool_) else some

    def within(self, *, q: Tiling | None = None, kv: Tiling | None = None) -> "Mask":
        """This mask for ragged tiles: positions that do not exist are masked like any other."""
        ragged = Ends(*(t.length if t and t.length % t.block else None for t in (q, kv)))
        return self if ragged == Ends() else self & ragged

    def kv_ranges(self, q: Tiling, kv: Tiling) -> jax.Array | np.ndarray:
        """int32 [1 or B, query tiles, 4]: the range of key tiles for each query tile."""
        return _intersect([leaf.kv_range(q, kv) for leaf in self.leaves], q, kv)

    def q_ranges(self, q: Tiling, kv: Tiling, *, sums_keys: bool = False) -> jax.Array | np.ndarray:
        """int32 [1 or B, key tiles, 4]: the range of query tiles for each key tile.

        A ragged key tile counts as any other where its keys past the end are left out in the end.
        Not with `sums_keys`, for a dq that is summed over the keys of a tile: no LSE bounds the
        weights of keys that do not exist, and they may be infinite.
        """
        ranges = [leaf.q_range(q, kv) for leaf in self.leaves]
        if sums_keys:
            none, every = kv.filled(0), kv.filled(q.count)
            fits = kv.first + kv.block <= kv.length
            whole = _namespace(fits, every).where(fits, every, none)
            ranges.append(TileRange(none, none, whole, every))
        return _intersect(ranges, kv, q)

    @property
    def scattered(self) -> bool:
        """Whether tiles have to be listed."""
        return any(not isinstance(leaf, Runs) for leaf in self.leaves)

    def kv_lists(self, q: Tiling, kv: Tiling, groups: int = 1) -> jax.Array:
        """int32 [1 or B, 1 or N, query tiles, 2 + key tiles]: the key tiles of each query tile.

        A row is the number of full tiles, that of all tiles which are not empty, and their numbers,
        the full ones first; what follows is not to be read. `groups` heads after each other share a
        list: N / groups of them, of what any head needs.
        """
        return lists(self._classes_of_groups(q, kv, groups))

    def q_lists(self, q: Tiling, kv: Tiling, groups: int = 1) -> jax.Array:
        """int32 [1 or B, 1 or N, key tiles, 2 + query tiles]: the query tiles of each key tile."""
        classes = self._classes_of_groups(q, kv, groups)
        return lists(TileClasses(*(jnp.swapaxes(x, 2, 3) for x in classes)))

    def _classes_of_groups(self, q: Tiling, kv: Tiling, groups: int) -> TileClasses:
        classes = self.tile_classes(q, kv)
        if groups > 1 and classes.some.shape[1] > 1:
            some, every = (x.reshape(x.shape[0], -1, groups, *x.shape[2:]) for x in classes)
            classes = TileClasses(some.any(axis=2), every.all(axis=2))
        return classes

    def tile_classes(self, q: Tiling, kv: Tiling) -> TileClasses:
        """The class of every pair of tiles, by all leaves together; no axis of tiles is 1."""

        def inside(ranges, flow: Tiling):
            tile = flow.numbers[None, None]
            start, full_start, full_stop, stop = (ranges[:, None, :, i, None] for i in range(4))
            return (start <= tile) & (tile < stop), (full_start <= tile) & (tile < full_stop)

        # Both: each direction knows of ragged tiles only where they are the ones that stream.
        some, every = inside(self.kv_ranges(q, kv), kv)
        some_t, every_t = inside(self.q_ranges(q, kv), q)
        some, every = some & some_t.swapaxes(2, 3), every & every_t.swapaxes(2, 3)
        for leaf in self.leaves:
            if (classes := leaf.tile_classes(q, kv)) is not None:
                some, every = some & classes.some, every & classes.every
        return TileClasses(some, every)

    def seen_keys(self, shape: tuple[int, int, int, int], positions=None):
        """Return of B, N, T and S, which keys any query sees, at int32 positions or at all of them.

        Bool [1 or B, 1 or N, keys]; None where it is all of them.
        """
        return self._not_alone(shape, self.q_ranges, 2, positions)

    def seeing_queries(self, shape: tuple[int, int, int, int]):
        """The same of queries that see any key, bool [1 or B, 1 or N, T]."""
        return self._not_alone(shape, self.kv_ranges, 3)

    def _not_alone(self, shape, ranges, others: int, positions=None):
        *_, q_len, kv_len = shape
        if self.reflexive and q_len == kv_len:
            return None
        if all(leaf.intervals for leaf in self.leaves):
            some = _not_empty(ranges(Tiling(q_len, 1), Tiling(kv_len, 1)))
            return some if some is None or positions is None else jnp.asarray(some)[:, :, positions]
        return self._by_pairs(shape, others, positions)

    def _by_pairs(self, shape, others: int, positions=None):
        """As `_not_alone`, by all pairs: some positions at a time, against all others.

        Examples and heads that do not differ are not told apart.
        """
        kept, length = 5 - others, shape[5 - others]

        def along(axis, positions):
            return lax.expand_dims(positions, [i for i in range(4) if i != axis])

        def allowed(positions):
            at = [along(axis, lax.iota(jnp.int32, n)) for axis, n in enumerate(shape)]
            at[kept] = along(kept, positions)
            ok = self.allowed(*at)
            # No axis at all, of an array that broadcasts them all.
            return ok.reshape(*(1,) * (4 - ok.ndim), *ok.shape)

        if positions is not None:
            some = allowed(positions).any(axis=others)
            return jnp.broadcast_to(some, (*some.shape[:2], len(positions)))

        def of(first):
            # In the last step again the last ones, in place of some that do not exist.
            positions = jnp.minimum(first + lax.iota(jnp.int32, block), length - 1)
            some = allowed(positions).any(axis=others)
            return jnp.broadcast_to(some, (*some.shape[:2], block))

        pairs = math.prod(jax.eval_shape(allowed, lax.iota(jnp.int32, length)).shape)
        block = max(1, min(length, length * PAIRS_AT_ONCE // max(1, pairs)))
        # XLA is not to compute it while it compiles.
        first = lax.optimization_barrier(jnp.arange(0, length, block, dtype=jnp.int32))
        some = jnp.moveaxis(lax.map(of, first), 0, 2)
        return some.reshape(*some.shape[:2], -1)[:, :, :length]

    @property
    def ends_by_lengths(self) -> bool:
        """Whether what any query sees are an example's first keys, and who sees any its first ones.

        That is so under `Lengths`, alone or with bands around each query's own position.
        """
        rest = [leaf for leaf in self.leaves if not isinstance(leaf, Lengths)]
        around = all(isinstance(leaf, Band) and leaf.reflexive for leaf in rest)
        return around and any(type(leaf) is Lengths for leaf in self.leaves)

    def ends(self, q_len: int, kv_len: int):
        """How many queries see a key, and how many keys are seen, where `ends_by_lengths`.

        Each int32 [B], or [] where no array tells.
        """
        queries, keys, before, after = q_len, kv_len, FAR, FAR
        for leaf in self.leaves:
            if isinstance(leaf, Lengths):
                queries, keys = (
                    n if x is None else jnp.clip(x, 0, n)
                    for n, x in ((queries, leaf.query), (keys, leaf.key_value))
                )
            elif isinstance(leaf, Band):
                before = min(before, FAR if leaf.low is None else -leaf.low)
                after = min(after, FAR if leaf.high is None else leaf.high)
        # The last query that sees the last key is so far behind it, and the other way round.
        return (
            jnp.where(keys > 0, jnp.minimum(queries, keys + before), 0),
            jnp.where(queries > 0, jnp.minimum(keys, queries + after), 0),
        )

    def with_lengths(self, query, key_value) -> "Mask":
        """With other `Lengths`, int32 [B]."""
        rest: list[Any] = [leaf for leaf in self.leaves if type(leaf) is not Lengths]
        rest.append(Lengths(query, key_value))
        return Mask(tuple(rest))

    @property
    def reflexive(self) -> bool:
        """Whether every query is known to see the key at its own position, if there is one.

        With T = S nothing is then unseen: neither a key by all queries, nor all keys by a query.
        """
        return all(leaf.reflexive for leaf in self.leaves)

    @property
    def kind(self) -> str:
        """One of "full", "causal" (at any offset) and "other"."""
        match self.leaves:
            case ():
                return "full"
            case (Band(low=None),):
                return "causal"
            case _:
                return "other"

    @property
    def known_kind(self) -> str:
        """The kind, but "other" where arrays, of which offsets may be, say what is seen."""
        return "other" if jax.tree.leaves(self) else self.kind

    @property
    def grows(self) -> bool:
        """Whether later queries see more keys, so that their tiles should start first."""
        bands = (leaf for leaf in self.leaves if isinstance(leaf, (Band, PositionBand)))
        return any(band.high is not None for band in bands)


@jax.jit
def lists(classes: TileClasses) -> jax.Array:
    """int32 [..., stay, 2 + flow] for classes [..., stay, flow]; see `Mask.kv_lists`."""
    some, every = classes
    order = jnp.argsort(jnp.where(every, 0, jnp.where(some, 1, 2)), axis=-1, stable=True)
    counts = [x.sum(axis=-1, keepdims=True, dtype=jnp.int32) for x in (every, some)]
    return jnp.concatenate([*counts, order.astype(jnp.int32)], axis=-1)


def _intersect(ranges: list[TileRange], stay: Tiling, flow: Tiling):
    everything = TileRange(*map(stay.filled, (0, 0, flow.count, flow.count)))
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


def _not_empty(ranges):
    """Bool [1 or B, 1, tiles] for ranges [1 or B, tiles, 4], or None if all of them are known."""
    some = (ranges[..., 0] < ranges[..., 3])[:, None]
    return None if isinstance(some, np.ndarray) and some.all() else some


def _both(*conditions):
    """The conjunction of those conditions that are not None."""
    result = None
    for condition in conditions:
        if condition is not None:
            result = condition if result is None else result & condition
    return result


def _is_size(length: Bound) -> bool:
    """Whether a length is that of an array, and no array of lengths."""
    return isinstance(length, int) or is_symbolic(length)


def _column(length: Bound):
    """A length as something that broadcasts against [B, tiles]."""
    if is_symbolic(length):
        return jnp.asarray(length, jnp.int32)
    return length if isinstance(length, int) else length[:, None]


def _shift(side: int | None, offset: Bound | None):
    if side is None or offset is None:
        return side
    return offset[:, None] + side


def _negate(side):
    return None if side is None else -side


# Ranges that depend on no array are NumPy: they become constants of the program.
def _namespace(*arrays):
    return np if all(isinstance(a, np.ndarray) for a in arrays) else jnp


def _maximum(a, b):
    return _namespace(a, b).maximum(a, b)


def _minimum(a, b):
    return _namespace(a, b).minimum(a, b)
