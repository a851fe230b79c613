"""Masks that a user builds and passes as `mask`; boolean arrays are one of them.

`&`, `|` and `~` join them, see _problem.masks. `fit` checks an object against a call and returns a
leaf of the algebra. The other arguments of `attention` that restrict keys become further leaves.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash._jax.one_device import divided_by_xla
from pallas_flash._problem import masks
from pallas_flash._problem.blocks import BlockClasses, BlockRange, Tiling, all_blocks
from pallas_flash._problem.checks import (
    array,
    at_least,
    broadcastable,
    broadcasts,
    describe,
    function,
    integers,
    operands,
    uses,
)
from pallas_flash._problem.masks import (
    STATIC,
    Complement,
    Either,
    Leaf,
    LeafKind,
    Mask,
    NumberLeaf,
    Scattered,
    as_mask,
    leaf,
)
from pallas_flash._problem.operands import Pairs, Positions, TokenPositions, readable


class Call(NamedTuple):
    """The call that a mask has to fit.

    Attributes:
        scores_shape: B, N, T and S of the arrays.
        is_causal: whether the call is causal by its own argument.
        at: the positions of tokens.
        shards: the number of shards of the sequence; the arrays are one shard.
        mesh_axes: the mesh axes that divide the sequence into shards.
    """

    scores_shape: tuple[int, int, int, int]
    is_causal: bool = False
    at: TokenPositions = TokenPositions()
    shards: int = 1
    mesh_axes: tuple[str, ...] = ()

    @property
    def pairs_shape(self) -> tuple[int, int, int, int]:
        """B, N, T and S of a (q, k) array: the shard's queries, and the keys of all shards."""
        batch, num_heads, q_len, kv_len = self.scores_shape
        return batch, num_heads, q_len, kv_len * self.shards

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S of the whole sequence."""
        _, _, q_len, kv_len = self.scores_shape
        return q_len * self.shards, kv_len * self.shards

    def positions(self) -> Positions:
        """Return the positions of all tokens, also where these are their indices."""
        if self.at.positions is not None:
            return self.at.positions
        _, _, q_len, kv_len = self.scores_shape
        q, k = (jnp.arange(n, dtype=jnp.int32)[None] for n in (q_len, kv_len))
        if self.mesh_axes:
            shard = lax.axis_index(self.mesh_axes).astype(jnp.int32)
            q, k = q + shard * q_len, k + shard * kv_len
        if q_len == kv_len and not self.at.moved:
            return Positions(q)
        offset = self.at.shift if self.at.offset is None else self.at.offset[:, None]
        return Positions(q + offset, k)


class Joinable(abc.ABC):
    """A mask that a user may build, with the operators `&`, `|` and `~`."""

    # Keeps NumPy from applying operators to each element of an array.
    __array_ufunc__ = None

    def __and__(self, other) -> Mask:
        return Joined((self,)) & other

    def __rand__(self, other) -> Mask:
        return Joined((other,)) & self

    def __or__(self, other) -> Mask:
        return Joined((self,)) | other

    def __ror__(self, other) -> Mask:
        return Joined((other,)) | self

    def __invert__(self) -> Mask:
        return ~Joined((self,))

    def __bool__(self):
        raise _is_condition(type(self).__name__)

    @abc.abstractmethod
    def fit(self, call: Call) -> Leaf:
        """Return the leaf that this mask is in a call; raise if it does not fit the call."""

    def sizes(self) -> tuple[int, ...]:
        """Return B, N, T and S as far as its arrays have them; 1 elsewhere."""
        return 1, 1, 1, 1

    def asks(self, axis: int) -> bool:
        """Whether a function of the mask uses the index of the batch element (0) or head (1)."""
        del axis
        return False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Joined(Mask):
    """The mask that operators make of arrays and mask objects, before a call fits these."""

    def __bool__(self):
        raise _is_condition("a joined mask")


def _is_condition(got: str) -> TypeError:
    return TypeError(
        f"`mask` must be joined by `&`, `|` and `~`; got {got} as a condition. Write `a & b`, not "
        "`a and b`, of which Python keeps one."
    )


def fitted(mask, call: Call) -> tuple[Leaf, ...]:
    """Return the leaves of the argument `mask`, checked against the call."""

    def fit(x) -> Leaf:
        match x:
            case Either():
                return Either(tuple(Mask(fitted(y, call)) for y in x.masks))
            case Complement():
                return Complement(Mask(fitted(x.mask, call)))
        return _joinable(x).fit(call)

    return tuple(map(fit, as_mask(mask).leaves))


def members(mask) -> Iterator[Joinable]:
    """Yield the objects and arrays that operators have joined to the argument `mask`."""
    for x in as_mask(mask).leaves:
        match x:
            case Either():
                for y in x.masks:
                    yield from members(y)
            case Complement():
                yield from members(x.mask)
            case _:
                yield _joinable(x)


def sizes_of(mask) -> tuple[int, ...]:
    """Return B, N, T and S as far as the arrays of the argument `mask` have them; 1 elsewhere."""
    return tuple(max(sizes) for sizes in zip(*(x.sizes() for x in members(mask)), strict=True))


def _joinable(x) -> Joinable:
    return x if isinstance(x, Joinable) else MaskArray(Pairs(array("mask", x)))


@leaf
class MaskArray(Scattered, Joinable):
    """A boolean (q, k) array: True where the query may see the key."""

    kind = LeafKind.ARRAY
    pairs: Pairs

    def fit(self, call):
        x = self.pairs.array
        if x.dtype != jnp.bool_:
            raise TypeError(
                f"`mask` must be boolean, True where a query may attend; got {x.dtype}. Pass "
                "`mask.astype(bool)`, or numbers to add to the scores as `bias`."
            )
        return MaskArray(Pairs(broadcastable("mask", x, call.pairs_shape)))

    def sizes(self):
        return _padded_shape(self.pairs.array)

    def allowed(self, b, h, q, k):
        return self.pairs.read(b, h, q, k)

    def block_classes(self, q_tiles, kv_tiles):
        return _classes(self.pairs.array, q_tiles, kv_tiles)


def _classes_impl(array, q_tiles: Tiling, kv_tiles: Tiling) -> BlockClasses:
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


_classes = jax.jit(_classes_impl, static_argnums=(1, 2))


def _not_folded(array):
    """Return the array behind a barrier, so that XLA does not fold computations on a constant.

    Folding takes seconds of compile time for an array of 1024 x 1024.
    """
    return lax.optimization_barrier(array)


@leaf
class Segments(masks.Segments, Joinable):
    """The document mask of packed sequences: a query sees the keys that have its own id.

    The argument `segment_ids` of `attention` makes the same mask. This object can be passed to
    `BlockMask.from_mask`, whose tables serve all layers and are exact for unsorted ids, too.

    Attributes:
        query: int32 [B, T], the ids of the queries.
        key_value: int32 [B, S], the ids of the keys; None if both are the same tokens.

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> ids = pallas_flash.masks.segment_ids_from_cu_seqlens(jnp.array([0, 5, 12, 16]), 16)
        >>> documents = pallas_flash.masks.Segments(ids[None])
        >>> mask = pallas_flash.masks.BlockMask.from_mask(documents, 16, 16, block_q=4, block_kv=4)
        >>> mask.some[0, 0].astype(int)
        Array([[1, 1, 0, 0],
               [1, 1, 1, 0],
               [0, 1, 1, 0],
               [0, 0, 0, 1]], dtype=int32)
    """

    def fit(self, call, name="Segments"):
        batch, _, q_len, kv_len = call.scores_shape
        query = integers(f"{name}.query", self.query, (batch, q_len), "[B, T]")
        if self.key_value is not None:
            keys = integers(f"{name}.key_value", self.key_value, (batch, kv_len), "[B, S]")
            return Segments(query, keys)
        if q_len != kv_len:
            raise ValueError(
                f"`{name}.key_value` must be given where T and S differ; got None with T={q_len} "
                f"and S={kv_len}. Pass the ids of the keys, [B, S]."
            )
        return Segments(query)

    def sizes(self):
        keys = self.query if self.key_value is None else self.key_value
        (batch, q_len), (_, kv_len) = ((1, 1, *np.shape(x))[-2:] for x in (self.query, keys))
        return batch, 1, q_len, kv_len


@leaf
class PrefixLM(NumberLeaf, Joinable):
    """A query sees all keys of the prefix, and all keys up to its own position.

    For S = T = 5 and a prefix of 3:

        1 1 1 0 0
        1 1 1 0 0
        1 1 1 0 0
        1 1 1 1 0
        1 1 1 1 1

    `is_causal` would undo the prefix, and raises. `query_offset` moves the queries. Where the call
    gives positions, the prefix is made of the keys at positions below its length.

    Attributes:
        prefix_lengths: int32 [B], the keys of each batch element's prefix.
        offset: set by `attention`: the positions of query 0, int32 [B]; None if it is `shift`.
        positions: set by `attention`: the positions of all tokens, if arrays hold them.
        shift: set by `attention`: the position of query 0, where it is known.
    """

    kind = LeafKind.PREFIX
    prefix_lengths: Any
    offset: Any = None
    positions: Positions | None = None
    shift: int = dataclasses.field(default=0, metadata=STATIC)

    def fit(self, call):
        if call.is_causal:
            raise ValueError(
                "`is_causal` must be False with a PrefixLM `mask`; got True. Drop `is_causal`: it "
                "would hide the prefix, and after that the mask is causal by itself."
            )
        lengths = integers(
            "PrefixLM.prefix_lengths", self.prefix_lengths, (call.scores_shape[0],), "[B]"
        )
        return PrefixLM(lengths, call.at.offset, call.at.positions, call.at.shift)

    def sizes(self):
        return (*np.shape(self.prefix_lengths), 1)[0], 1, 1, 1

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
        return PrefixLM(part.kv.inside(self.prefix_lengths), offset, shift=shift)

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
class Numbers(masks.NumberBand, Joinable):
    """The leaf of a mask that compares numbers of tokens, in a call."""

    def fit(self, call):
        batch, _, *lengths = call.scores_shape
        for x, length in zip(self.numbers, lengths, strict=True):
            if x.shape[1] != length or x.shape[0] not in (1, batch):
                raise ValueError(
                    "`BlockMask.mask` must hold a number for each token of the call; got an array "
                    f"of shape {x.shape} for {length} tokens. Use `BlockMask.from_mask` for "
                    "arrays of this shape, and pass the mask itself inside a `jax.shard_map` that "
                    "divides the sequence."
                )
        return self


@leaf
class Predicate(Leaf, Joinable):
    """A mask by a function: True where the query may see the key.

    The function is traced into the kernels, which visit and mask every block. Wrap the predicate in
    `BlockMask.from_mask` once to skip empty blocks and leave full blocks unmasked.

    Attributes:
        fn: takes int32 indices b, h, q_pos, k_pos, which broadcast against each other, then the
            operands, and returns a bool for each. Built from elementwise jax.numpy. It reads an
            operand at one index for each axis, as in `operand[b, q_pos]`; an index outside is moved
            to the edge, a negative one to 0. An operand without axes is passed as its number.
            Define `fn` once: JAX compiles a program for each function object.
        operands: arrays.
        origin: set by `attention`, as `Dropout.origin`.

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> def same_colour(b, h, q_pos, k_pos, colour):
        ...     return colour[q_pos] == colour[k_pos]
        >>> x = jnp.ones((1, 4, 1, 16))
        >>> mask = pallas_flash.masks.Predicate(same_colour, (jnp.array([0, 1, 0, 1]),))
        >>> pallas_flash.attention(x, x, x, mask=mask).shape
        (1, 4, 1, 16)
    """

    kind = LeafKind.PREDICATE
    fn: Callable = dataclasses.field(metadata=STATIC)
    operands: tuple[Any, ...] = ()
    origin: Any = None

    def fit(self, call):
        arrays = operands("Predicate.operands", self.operands)
        function("Predicate.fn", self.fn, None, arrays)
        return Predicate(self.fn, arrays)

    def asks(self, axis: int) -> bool:
        index = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
        program = jax.make_jaxpr(lambda at, xs: self.fn(*at, *map(readable, xs)))(
            index, operands("Predicate.operands", self.operands)
        ).jaxpr
        return uses(program, axis)

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
class BlockMask(Scattered, Joinable):
    """Block-sparse attention: a bool for each block of queries and keys.

    Kernels visit only tiles that overlap a True block; sizes of tiles and blocks are independent.
    One object serves every layer and step. `from_mask` builds one from another mask.

    Attributes:
        some: bool [B | 1, N | 1, ceil(T / block_q), ceil(S / block_kv)]: blocks in which some pair
            is allowed.
        block_q: queries in a block.
        block_kv: keys in a block.
        every: bool as `some`, blocks in which every pair is allowed. None, together with `mask`, if
            these are the blocks of `some`.
        mask: decides in blocks that are in `some` and not in `every`. It is the argument of
            `from_mask`: it allows no pair outside of `some`, and every pair in `every`.
        q_len: T, if known.
        kv_len: S, if known.
        first: set by `attention`: the index in the first block of the first query and of the first
            key, int32 [2]; None if both are 0.
    """

    kind = LeafKind.BLOCKS
    some: Any
    block_q: int = dataclasses.field(default=64, metadata=STATIC)
    block_kv: int = dataclasses.field(default=64, metadata=STATIC)
    every: Any = None
    mask: Any = None
    q_len: int | None = dataclasses.field(default=None, metadata=STATIC)
    kv_len: int | None = dataclasses.field(default=None, metadata=STATIC)
    first: Any = None

    @classmethod
    def from_mask(cls, mask, q_len: int, kv_len: int, *, batch: int | None = None,
                  num_heads: int | None = None,
                  block_q: int = 64, block_kv: int = 64) -> "BlockMask":  # fmt: skip
        """Return the blocks of another mask: empty, partial and full.

        Args:
            mask: a boolean array broadcastable to [B, N, T, S], or a mask object.
            q_len: T.
            kv_len: S.
            batch: B if the mask differs between batch elements. A `Predicate` that uses the index
                `b` needs it; other masks have it in their arrays.
            num_heads: N if the mask differs between heads; as `batch`.
            block_q: queries in a block. Smaller blocks describe the mask more closely, so that
                kernels visit fewer blocks without an allowed pair.
            block_kv: keys in a block.

        Returns:
            A mask that allows what `mask` allows.
        """
        given = dict(
            q_len=q_len,
            kv_len=kv_len,
            batch=batch,
            num_heads=num_heads,
            block_q=block_q,
            block_kv=block_kv,
        )
        sizes = {name: at_least(1, name, 1 if x is None else x) for name, x in given.items()}
        q_len, kv_len, block_q, block_kv = (
            sizes[name] for name in ("q_len", "kv_len", "block_q", "block_kv")
        )
        q, kv, own = Tiling(q_len, block_q), Tiling(kv_len, block_kv), list(sizes_of(mask)[:2])
        for axis, name in enumerate(("batch", "num_heads")):
            asks = any(part.asks(axis) for part in members(mask))
            if asks and given[name] is None and own[axis] == 1:
                raise ValueError(
                    f"`{name}` must be given for a Predicate that asks for its index; got None. "
                    "Pass the size in the calls that the mask is for."
                )
            own[axis] = sizes[name] if sizes[name] > 1 else own[axis]
        own_batch, own_heads = own
        call = Call((own_batch, own_heads, q_len, kv_len))
        mask = Mask(fitted(mask, call))

        def tables(mask):
            if [leaf.kind for leaf in mask.leaves] == [LeafKind.ARRAY]:
                some, every = mask.block_classes(q, kv)
            else:
                some, every = _classes_by_rows(mask, own_batch, own_heads, q, kv)
            shape = (*some.shape[:2], q.count, kv.count)
            return [jnp.broadcast_to(x, shape) for x in (some, every)]

        some, every = divided_by_xla(tables, None, mask)
        return cls(some, block_q, block_kv, every, mask, q_len, kv_len)

    def fit(self, call):
        sizes = {
            name: at_least(1, f"BlockMask.{name}", getattr(self, name))
            for name in ("block_q", "block_kv")
        }
        q_len, kv_len = call.lengths
        for name, have, want in (("q_len", self.q_len, q_len), ("kv_len", self.kv_len, kv_len)):
            if have not in (None, want):
                raise ValueError(
                    f"`BlockMask.{name}` must be that of the call; got {have} and {want}. Use "
                    "`BlockMask.from_mask` for these lengths."
                )
        if (self.every is None) != (self.mask is None):
            given = "every" if self.mask is None else "mask"
            raise ValueError(
                f"`BlockMask.every` and `BlockMask.mask` must be given together; got `{given}` "
                "alone. Use `BlockMask.from_mask`, which finds both tables."
            )
        tables = {"some": self._table("some", call)}
        if self.mask is None:
            return dataclasses.replace(self, **tables, **sizes)
        tables["every"] = self._table("every", call)
        mask = Mask(fitted(self.mask, call))
        by_position = {LeafKind.PREFIX: "PrefixLM", LeafKind.NUMBERS: "mask that goes by positions"}
        names = [by_position[x.kind] for x in _leaves(mask) if x.kind in by_position]
        if call.at.moved and names:
            offset = call.at.shift if call.at.offset is None else call.at.offset
            got = describe(offset) if call.at.positions is None else "positions"
            raise ValueError(
                "`query_offset` must be 0, and `query_positions` and `key_value_positions` None, "
                f"with a BlockMask made from a {names[0]}, whose blocks were found without them; "
                f"got {got}. Pass the {names[0]} itself as `mask`."
            )
        return dataclasses.replace(self, **tables, **sizes, mask=mask)

    def _table(self, name, call: Call):
        table = array(f"BlockMask.{name}", getattr(self, name))
        if table.dtype != jnp.bool_:
            raise TypeError(
                f"`BlockMask.{name}` must be boolean; got {table.dtype}. Cast it with "
                "`.astype(bool)`."
            )
        (batch, num_heads, *_), (q_len, kv_len) = call.scores_shape, call.lengths
        q, kv = Tiling(q_len, self.block_q), Tiling(kv_len, self.block_kv)
        want = batch, num_heads, q.count, kv.count
        if table.ndim != 4 or table.shape[2:] != want[2:] or not broadcasts(table.shape, want):
            raise ValueError(
                f"`BlockMask.{name}` must have shape [B, N, ceil(T / block_q), ceil(S / block_kv)] "
                f"= {want}, its first two axes possibly 1; got {table.shape}. Use the blocks of "
                f"the call, of {self.block_q} queries and {self.block_kv} keys."
            )
        return table

    def sizes(self):
        return *_padded_shape(self.some)[:2], self.q_len or 1, self.kv_len or 1

    def allowed(self, b, h, q, k):
        if self.mask is not None:
            return self.mask.allowed(b, h, q, k)
        b, h = (0 if n == 1 else i for n, i in zip(self.some.shape, (b, h), strict=False))
        if self.first is not None:
            q, k = q + self.first[0], k + self.first[1]
        return self.some[b, h, q // self.block_q, k // self.block_kv]

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
            q_len=part.q.length,
            kv_len=part.kv.length,
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
            """Count the True blocks that each tile overlaps, by sums up to its corners."""
            table = _not_folded(table).astype(jnp.int32)
            total = jnp.cumsum(jnp.cumsum(table, axis=2), axis=3)
            total = jnp.pad(total, ((0, 0), (0, 0), (1, 0), (1, 0)))
            for axis, (start, stop) in ((2, rows), (3, columns)):
                total = jnp.take(total, stop, axis) - jnp.take(total, start, axis)
            return total

        every = self.some if self.every is None else self.every
        area = ((rows[1] - rows[0])[:, None] * (columns[1] - columns[0]))[None, None]
        return BlockClasses(count(self.some) > 0, count(every) == area)


# Compiled once for all calls outside of `jit`.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _classes_by_rows(
    mask: Mask, batch: int, num_heads: int, q_tiles: Tiling, kv_tiles: Tiling
) -> BlockClasses:
    """Return the class of every block; evaluates the mask for one row of blocks at a time."""
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
    h = jnp.arange(num_heads, dtype=jnp.int32)[None, :, None, None]
    k = jnp.arange(kv_tiles.length, dtype=jnp.int32)[None, None, None, :]

    def row(i):
        queries = i * q_tiles.block + jnp.arange(q_tiles.block, dtype=jnp.int32)
        q_pos = jnp.minimum(queries, q_tiles.length - 1)
        ok = mask.allowed(b, h, q_pos[None, None, :, None], k)
        ok = jnp.broadcast_to(ok, (batch, num_heads, q_tiles.block, kv_tiles.length))
        return _classes(ok, Tiling(q_tiles.block, q_tiles.block), kv_tiles)

    rows = lax.map(row, jnp.arange(q_tiles.count, dtype=jnp.int32))
    return BlockClasses(*(jnp.moveaxis(x[:, :, :, 0], 0, 2) for x in rows))


def _leaves(mask: Mask) -> Iterator[Leaf]:
    """Yield the leaves of a fitted mask that are not made of masks."""
    for x in mask.leaves:
        inner = x.masks if isinstance(x, Either) else (x.mask,) if isinstance(x, Complement) else ()
        for y in inner:
            yield from _leaves(y)
        if not inner:
            yield x


def _padded_shape(x) -> tuple[int, ...]:
    """Return the shape of an array of at most four axes, with 1 in front."""
    return (1, 1, 1, 1, *np.shape(x))[-4:]
