"""The algebra of masks: which keys a query may see, written once for all passes.

A `Mask` is a conjunction of leaves. `Either` and `Complement` are leaves made of masks, for a
user's `|` and `~`. Each leaf has

* the elementwise predicate `allowed(b, h, q, k)`: may query `q` of batch element `b` and query head
  `h` see key `k`? The arguments are integer index arrays that broadcast against each other. So the
  same code serves a dense [T, S] mask, a tile in plain JAX and a transposed tile. The leaf's arrays
  may be references into a kernel's memory, so the same code serves the kernels, too;
* the block ranges or block classes of `_problem.blocks`, by which a blocked algorithm skips empty
  blocks and leaves full blocks unmasked.
"""

import abc
import dataclasses
import enum
import functools
import operator
from typing import Any, ClassVar, NamedTuple, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash._jax.symbolic import is_symbolic, known_at_most
from pallas_flash._problem import blocks
from pallas_flash._problem.blocks import BlockClasses, BlockRange, Extremes, Tiling, lists
from pallas_flash._problem.operands import Divisible, Positions

# An int where a bound is known at trace time, else int32 [B] (or, inside a kernel, a reference to
# it).
Bound = Any

# Known at trace time if no array says what the mask allows.
Ranges = jax.Array | np.ndarray

# Far beyond any sequence, and far enough from the ends of int32 that sums of positions cannot wrap.
FAR = 2**30

# Metadata of a field that is compiled in.
STATIC = dict(static=True)


class LeafKind(enum.Enum):
    """The kind of a leaf; each class of leaves has one."""

    BAND = "band"
    LENGTHS = "lengths"
    PADDING = "padding"
    DOCUMENTS = "documents"
    POSITIONS = "positions"
    ARRAY = "mask array"
    BLOCKS = "blocks"
    PREFIX = "prefix"
    PREDICATE = "predicate"
    NUMBERS = "numbers"
    EITHER = "either"
    COMPLEMENT = "complement"


class Window(NamedTuple):
    """The condition low <= key position - query position <= high; None is unbounded.

    Attributes:
        low: the least difference.
        high: the greatest difference.
        offset: int32 [B], the positions of query 0; None if positions are indices.
        positions: of all tokens, if arrays hold them.
    """

    low: int | None
    high: int | None
    offset: Any = None
    positions: Positions | None = None

    @property
    def known(self) -> bool:
        """Whether no array decides which keys are visible."""
        return self.offset is None and self.positions is None

    @property
    def unbounded(self) -> bool:
        """Whether every query sees every key."""
        return self.low is None and self.high is None

    @property
    def has_diagonal(self) -> bool:
        """Whether a key at the query's own position is inside."""
        return (self.low or 0) <= 0 <= (self.high or 0)


class Leaf(Divisible, abc.ABC):
    """One condition on (query, key) pairs."""

    kind: ClassVar[LeafKind]

    @abc.abstractmethod
    def allowed(self, b, h, q, k) -> Any:
        """Whether query `q` of batch element `b` and head `h` may see key `k`."""

    @abc.abstractmethod
    def kv_range(self, q_tiles: Tiling, kv_tiles: Tiling) -> BlockRange:
        """Return the key blocks that each query tile visits."""

    @abc.abstractmethod
    def q_range(self, q_tiles: Tiling, kv_tiles: Tiling) -> BlockRange:
        """Return the query blocks that each key tile visits."""

    def block_classes(self, q_tiles: Tiling, kv_tiles: Tiling) -> BlockClasses | None:
        """Return the classes of blocks that form no runs; None if the ranges say all.

        The ranges of a leaf that has classes hold all blocks.
        """
        del q_tiles, kv_tiles
        return None

    def classes(self, q_tiles: Tiling, kv_tiles: Tiling) -> BlockClasses:
        """Return the class of every block by this leaf alone, over the pairs of the arrays.

        Axes of tiles may be 1 where the class does not vary.
        """
        classes = self.block_classes(q_tiles, kv_tiles)
        if classes is not None:
            return classes
        return Mask((self,)).block_classes(q_tiles, kv_tiles)

    @property
    def scattered(self) -> bool:
        """Whether blocks form no runs, so that kernels need lists of them."""
        return False

    @property
    def later_rows_see_more(self) -> bool:
        """Whether later queries see more keys."""
        return self.window is not None and self.window.high is not None

    @property
    def exact_ranges(self) -> bool:
        """Whether ranges for tiles of one position say exactly which pairs are allowed."""
        return False

    @property
    def sees_diagonal(self) -> bool:
        """Whether every query is known to see the key at its own position."""
        return False

    @property
    def window(self) -> Window | None:
        """The window of positions, if that is the whole condition."""
        return None

    @property
    def lengths(self) -> tuple[Bound, Bound] | None:
        """The lengths of queries and of keys, if these are the whole condition."""
        return None


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def leaf(cls):
    """Make a class a frozen dataclass and a pytree of the fields that are not `STATIC`."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@leaf
class Band(Leaf):
    """Query q sees key k when low <= k - (q + offset) <= high; None is unbounded.

    Causal attention is high = 0, a sliding window (left, right) is low = -left, high = right.
    `offset` int32 [B] moves the queries of each batch element. An offset known at trace time is
    folded into `low` and `high`.
    """

    kind = LeafKind.BAND
    low: int | None = dataclasses.field(default=None, metadata=STATIC)
    high: int | None = dataclasses.field(default=None, metadata=STATIC)
    offset: Any = None

    def allowed(self, b, h, q, k):
        if self.offset is None:
            # One sum for each query and none for each pair. It does not wrap: see `trimmed`.
            above = None if self.low is None else k >= q + self.low
            below = None if self.high is None else k <= q + self.high
            return _both(above, below)
        distance = k - (q + self.offset[b])
        above = None if self.low is None else distance >= self.low
        below = None if self.high is None else distance <= self.high
        return _both(above, below)

    def restrict(self, part):
        shift, offset = part.offset(0, self.offset)
        if offset is not None:
            return Band(self.low, self.high, offset)
        low, high = (None if side is None else side + shift for side in (self.low, self.high))
        return Band(low, high).trimmed(part.q.length, part.kv.length)

    def trimmed(self, q_len: int, kv_len: int) -> "Band":
        """Return a band of known offset without bounds that exclude no pair of these lengths."""
        low, high = self.low, self.high
        if low is not None:
            low = None if known_at_most(low, 1 - q_len) else max(-FAR, min(low, FAR))
        if high is not None:
            high = None if known_at_most(kv_len - 1, high) else max(-FAR, min(high, FAR))
        return Band(low, high)

    def kv_range(self, q_tiles, kv_tiles):
        low, high = self._moved_bounds()
        return blocks.band_range(q_tiles, kv_tiles, low, high)

    def q_range(self, q_tiles, kv_tiles):
        # k - q in [low, high] read from the other side: q - k in [-high, -low].
        low, high = self._moved_bounds()
        return blocks.band_range(kv_tiles, q_tiles, _negate(high), _negate(low))

    def _moved_bounds(self):
        if self.offset is None:
            return self.low, self.high
        return (None if x is None else self.offset[:, None] + x for x in (self.low, self.high))

    @property
    def window(self):
        return Window(self.low, self.high, self.offset)

    @property
    def exact_ranges(self):
        return True

    @property
    def sees_diagonal(self):
        return self.window.known and self.window.has_diagonal


@leaf
class Lengths(Leaf):
    """Query q sees key k when q < query and k < key_value, each int32 [B], or None for no limit."""

    kind = LeafKind.LENGTHS
    query: Any = None
    key_value: Any = None

    def allowed(self, b, h, q, k):
        inside = [
            position < (length if _is_size(length) else length[b])
            for position, length in ((q, self.query), (k, self.key_value))
            if length is not None
        ]
        return _both(*inside) if len(inside) == 2 else inside[0]

    def restrict(self, part):
        sides = (self.query, part.q), (self.key_value, part.kv)
        return Lengths(*(None if x is None else side.inside(x) for x, side in sides))

    def kv_range(self, q_tiles, kv_tiles):
        return blocks.lengths_range(q_tiles, kv_tiles, self.query, self.key_value)

    def q_range(self, q_tiles, kv_tiles):
        return blocks.lengths_range(kv_tiles, q_tiles, self.key_value, self.query)

    @property
    def lengths(self):
        return self.query, self.key_value

    @property
    def exact_ranges(self):
        return True


@leaf
class ArrayLengths(Lengths):
    """`Lengths` that are the lengths of the arrays: known when the mask is built, or symbolic."""

    kind = LeafKind.PADDING
    query: int | None = dataclasses.field(default=None, metadata=STATIC)
    key_value: int | None = dataclasses.field(default=None, metadata=STATIC)


class NumberLeaf(Leaf):
    """A leaf that compares a number of each query with one of each key, read from arrays.

    Its ranges follow from the least and the greatest number of each tile. They are exact where
    numbers are sorted and both sides have the same numbers; elsewhere they hold more blocks.
    """

    @property
    @abc.abstractmethod
    def numbers(self) -> tuple[Any, Any]:
        """The numbers of queries, int32 [1 or B, T], and of keys, int32 [1 or B, S]."""

    @abc.abstractmethod
    def compare(self, q: Extremes, k: Extremes) -> tuple[Any, Any]:
        """Whether some and whether every pair of two tiles may be allowed; arguments broadcast."""

    def kv_range(self, q_tiles, kv_tiles):
        return blocks.number_range(self, q_tiles, kv_tiles, 2)

    def q_range(self, q_tiles, kv_tiles):
        return blocks.number_range(self, q_tiles, kv_tiles, 1)

    def classes(self, q_tiles, kv_tiles):
        return blocks.number_classes(self, q_tiles, kv_tiles)


@leaf
class SegmentLeaf(NumberLeaf):
    """Query q sees key k when their ids are equal: query int32 [B, T], key_value int32 [B, S].

    None for `key_value` means the ids of the queries: they are the same tokens.
    """

    kind = LeafKind.DOCUMENTS
    query: Any
    key_value: Any = None

    @property
    def numbers(self):
        return self.query, self.query if self.key_value is None else self.key_value

    def allowed(self, b, h, q, k):
        # Ragged tiles ask beyond the arrays, where any id may stand: `ArrayLengths` masks those
        # positions.
        query, key_value = self.numbers
        return query[b, q] == key_value[b, k]

    def compare(self, q, k):
        some = (q.low <= k.high) & (k.low <= q.high)
        return some, (q.low == q.high) & (k.low == k.high) & (q.low == k.low)

    @property
    def sees_diagonal(self):
        return self.key_value is None


@leaf
class NumberBand(NumberLeaf):
    """Query q sees key k when low <= number of k - number of q <= high; None is unbounded.

    Attributes:
        positions: numbers of all tokens; without key numbers, queries and keys are the same tokens.
        low: the least difference.
        high: the greatest difference.
        diagonal: whether every query is known to see the key of its own index, though queries and
            keys have numbers of their own.
    """

    kind = LeafKind.NUMBERS
    positions: Positions
    low: int | None = dataclasses.field(default=None, metadata=STATIC)
    high: int | None = dataclasses.field(default=None, metadata=STATIC)
    diagonal: bool = dataclasses.field(default=False, metadata=STATIC)

    @property
    def numbers(self):
        return self.positions.query, self.positions.keys

    def allowed(self, b, h, q, k):
        distance = self.positions.key_positions(b, k) - self.positions.query_positions(b, q)
        return self._within(distance, distance)

    def compare(self, q, k):
        least, greatest = k.low - q.high, k.high - q.low
        return self._within(greatest, least), self._within(least, greatest)

    def _within(self, for_low, for_high):
        above = None if self.low is None else for_low >= self.low
        below = None if self.high is None else for_high <= self.high
        return _both(above, below)

    @property
    def later_rows_see_more(self):
        return self.high is not None

    @property
    def sees_diagonal(self):
        same = self.positions.key_value is None and Window(self.low, self.high).has_diagonal
        return same or self.diagonal


@leaf
class PositionBand(NumberBand):
    """A `Band` between positions that arrays hold: low <= position of k - position of q <= high."""

    kind = LeafKind.POSITIONS

    @property
    def window(self):
        return Window(self.low, self.high, positions=self.positions)


class Scattered(Leaf):
    """A leaf whose blocks form no runs; `block_classes` gives their classes."""

    @property
    def scattered(self):
        return True

    def kv_range(self, q_tiles, kv_tiles):
        return blocks.all_blocks(q_tiles, kv_tiles, full=True)

    def q_range(self, q_tiles, kv_tiles):
        return blocks.all_blocks(kv_tiles, q_tiles, full=True)


@leaf
class Either(Scattered):
    """The disjunction of masks: a pair is allowed where any of them allows it.

    A block is full if it is full for one of them, and empty only if it is empty for all of them.
    One mask alone is that mask, by lists of blocks.
    """

    kind = LeafKind.EITHER
    masks: tuple["Mask", ...]

    def allowed(self, b, h, q, k):
        conditions = [mask.allowed(b, h, q, k) for mask in self.masks]
        # A mask without leaves allows all.
        arrays = [jnp.asarray(True) if x is None else x for x in conditions]
        return functools.reduce(operator.or_, arrays)

    def block_classes(self, q_tiles, kv_tiles):
        some, every = zip(*(mask.classes(q_tiles, kv_tiles) for mask in self.masks), strict=True)
        return BlockClasses(*(functools.reduce(operator.or_, x) for x in (some, every)))

    @property
    def sees_diagonal(self):
        return any(mask.sees_diagonal for mask in self.masks)


@leaf
class Complement(Scattered):
    """The pairs of the arrays that a mask does not allow: empty blocks of the mask are full here.

    Positions past the arrays and all other leaves of a call stay hidden: they are joined by "and".
    """

    kind = LeafKind.COMPLEMENT
    mask: "Mask"

    def allowed(self, b, h, q, k):
        hidden = self.mask.allowed(b, h, q, k)
        return jnp.asarray(False) if hidden is None else ~hidden

    def block_classes(self, q_tiles, kv_tiles):
        some, every = self.mask.classes(q_tiles, kv_tiles)
        return BlockClasses(~every, ~some)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask(Divisible):
    """The conjunction of `leaves`; without leaves every query sees every key."""

    leaves: tuple[Leaf, ...] = ()

    def __and__(self, other: Leaf) -> "Mask":
        return Mask((*self.leaves, other))

    def __bool__(self) -> bool:
        return bool(self.leaves)

    def allowed(self, b, h, q, k) -> Any:
        """Whether all leaves allow a pair, None without leaves; see `Leaf.allowed`."""
        return _both(*(leaf.allowed(b, h, q, k) for leaf in self.leaves))

    def restrict(self, part) -> "Mask":
        del part
        return Mask(tuple(x for x in self.leaves if x.window is None or not x.window.unbounded))

    def sees(self, q_len: int, kv_len: int) -> Any:
        """Whether any query may see any key: a bool where that is known, else a traced one."""
        some = self.block_classes(Tiling(q_len, q_len), Tiling(kv_len, kv_len)).some.any()
        return bool(some) if isinstance(some, np.bool_) else some

    def within(self, *, q: Tiling | None = None, kv: Tiling | None = None) -> "Mask":
        """Return this mask for ragged tiles, which also masks positions outside the arrays."""
        ragged = ArrayLengths(*(t.length if t and t.length % t.block else None for t in (q, kv)))
        return self if ragged == ArrayLengths() else self & ragged

    def kv_ranges(self, q_tiles: Tiling, kv_tiles: Tiling) -> Ranges:
        """Return the range of key blocks for each query tile, int32 [1 or B, query tiles, 4]."""
        ranges = [leaf.kv_range(q_tiles, kv_tiles) for leaf in self.leaves]
        return blocks.intersect(ranges, q_tiles, kv_tiles)

    def q_ranges(self, q_tiles: Tiling, kv_tiles: Tiling, *, sums_keys: bool = False) -> Ranges:
        """Return the range of query blocks for each key tile, int32 [1 or B, key tiles, 4].

        A ragged key tile may have full blocks if the kernel drops the results of its keys past the
        end. With `sums_keys`, for a dq that sums over a tile's keys, it has partial blocks alone:
        no LSE bounds the weights of keys that do not exist, and they may be infinite.
        """
        ranges = [leaf.q_range(q_tiles, kv_tiles) for leaf in self.leaves]
        if sums_keys:
            ranges.append(blocks.whole_tiles(kv_tiles, q_tiles))
        return blocks.intersect(ranges, kv_tiles, q_tiles)

    @property
    def scattered(self) -> bool:
        """Whether blocks form no runs, so that kernels need lists of them."""
        return any(leaf.scattered for leaf in self.leaves)

    @property
    def known_on_host(self) -> bool:
        """Whether NumPy knows the blocks, because no array decides them."""
        return not (self.scattered or jax.tree.leaves(self))

    def kv_lists(self, q_tiles: Tiling, kv_tiles: Tiling, groups: int = 1) -> jax.Array:
        """Return the key blocks of each query tile as `_problem.blocks.lists`.

        Int32 [1 or B, 1 or N / groups, query tiles, 2 + key tiles]. `groups` consecutive heads
        share a list of the blocks that any of them needs.
        """
        return lists(blocks.group_classes(self.block_classes(q_tiles, kv_tiles), groups))

    def q_lists(self, q_tiles: Tiling, kv_tiles: Tiling, groups: int = 1) -> jax.Array:
        """Return the query blocks of each key tile, [1 or B, .., key tiles, 2 + query tiles]."""
        classes = blocks.group_classes(self.block_classes(q_tiles, kv_tiles), groups)
        return lists(BlockClasses(*(x.swapaxes(2, 3) for x in classes)))

    def block_classes(self, q_tiles: Tiling, kv_tiles: Tiling) -> BlockClasses:
        """Return the class of every block, by all leaves together; no axis of tiles is 1."""
        ranges = self.kv_ranges(q_tiles, kv_tiles), self.q_ranges(q_tiles, kv_tiles)
        some, every = blocks.classes_of_ranges(*ranges, q_tiles, kv_tiles)
        for leaf in self.leaves:
            if (classes := leaf.block_classes(q_tiles, kv_tiles)) is not None:
                some, every = some & classes.some, every & classes.every
        return BlockClasses(some, every)

    def classes(self, q_tiles: Tiling, kv_tiles: Tiling) -> BlockClasses:
        """Return the class of every block over the pairs of the arrays.

        It is closer than `block_classes` for leaves that compare numbers, for which that knows only
        one run of blocks for each tile.
        """
        some, every = Mask().block_classes(q_tiles, kv_tiles)
        for leaf in self.leaves:
            classes = leaf.classes(q_tiles, kv_tiles)
            some, every = some & classes.some, every & classes.every
        return BlockClasses(some, every)

    @property
    def windows(self) -> list[Window]:
        """The windows of the leaves that have one."""
        return [leaf.window for leaf in self.leaves if leaf.window is not None]

    @property
    def has_valid_lengths(self) -> bool:
        """Whether the visible keys are a batch element's first ones, and so are rows with keys.

        That is so under `Lengths`, alone or with bands around each query's own position.
        """
        rest = [leaf for leaf in self.leaves if leaf.lengths is None]
        around = all(x.window is not None and x.window.known and x.sees_diagonal for x in rest)
        return around and any(leaf.kind is LeafKind.LENGTHS for leaf in self.leaves)

    def with_lengths(self, query, key_value) -> "Mask":
        """Return this mask with other `Lengths`, int32 [B]."""
        rest = tuple(leaf for leaf in self.leaves if leaf.kind is not LeafKind.LENGTHS)
        return Mask((*rest, Lengths(query, key_value)))

    @property
    def sees_diagonal(self) -> bool:
        """Whether every query is known to see the key at its own position, if there is one.

        Where T = S, every key is then visible to some query, and every row has keys.
        """
        return all(leaf.sees_diagonal for leaf in self.leaves)

    @property
    def later_rows_see_more(self) -> bool:
        """Whether later queries see more keys, so that their tiles should start first."""
        return any(leaf.later_rows_see_more for leaf in self.leaves)


def _both(*conditions):
    """The conjunction of the conditions that are not None."""
    result = None
    for condition in conditions:
        if condition is not None:
            result = condition if result is None else result & condition
    return result


def _is_size(length: Bound) -> bool:
    """Whether a length is an array's size, and not an array of lengths."""
    return isinstance(length, int) or is_symbolic(length)


def _negate(side):
    return None if side is None else -side
