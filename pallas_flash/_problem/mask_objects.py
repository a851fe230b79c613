"""Masks that a user builds and passes as `mask`, and `&`, `|` and `~`, which join them.

An object has what the user gave, and nothing else. Its constructor checks the kinds of its fields;
`fitted` checks it against a call, and returns leaves of the algebra of `_problem.masks`. The other
arguments of `attention` that restrict keys become further leaves.
"""

import abc
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from pallas_flash._jax.one_device import divided_by_xla
from pallas_flash._problem.blocks import BlockClasses, Tiling
from pallas_flash._problem.checks import (
    array,
    array_of_dtype,
    at_least,
    broadcastable,
    broadcasts,
    check_function,
    check_tuple,
    describe,
    function,
    held,
    integers,
    is_array,
    is_int,
    operands,
    uses,
)
from pallas_flash._problem.mask_leaves import (
    BlockLeaf,
    MaskArray,
    PredicateLeaf,
    PrefixLeaf,
    classes_of_array,
)
from pallas_flash._problem.masks import (
    STATIC,
    Complement,
    Either,
    Leaf,
    LeafKind,
    Mask,
    SegmentLeaf,
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


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
def mask_object(cls):
    """Make a class a frozen dataclass and a pytree of the fields that are not `STATIC`.

    JAX makes objects that hold anything, such as axes or shapes, past the constructor's checks.
    """
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    names = {x.name: x.metadata == STATIC for x in dataclasses.fields(cls)}
    data, static = ([x for x in names if names[x] == is_static] for is_static in (False, True))

    def values(mask, names):
        return tuple(getattr(mask, name) for name in names)

    def flatten(mask):
        return values(mask, data), values(mask, static)

    def flatten_with_keys(mask):
        keys = map(jax.tree_util.GetAttrKey, data)
        return tuple(zip(keys, values(mask, data), strict=True)), values(mask, static)

    def unflatten(fixed, leaves):
        mask = object.__new__(cls)
        vars(mask).update(zip(static, fixed, strict=True), **dict(zip(data, leaves, strict=True)))
        return mask

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


class MaskObject(abc.ABC):
    """A mask that a user may build, with the operators `&`, `|` and `~`.

    Masks are equal if they have one class, equal constants, and the same array objects: numbers in
    arrays are not compared.
    """

    # Keeps NumPy from applying operators to each element of an array.
    __array_ufunc__ = None

    def __and__(self, other) -> "MaskObject":
        """A query sees the keys that both masks allow; `other` may be a boolean array."""
        return AllOf((*_parts(AllOf, self), *_parts(AllOf, other)))

    def __rand__(self, other) -> "MaskObject":
        return AllOf((*_parts(AllOf, other), *_parts(AllOf, self)))

    def __or__(self, other) -> "MaskObject":
        """A query sees the keys that either mask allows; `other` may be a boolean array."""
        return AnyOf((*_parts(AnyOf, self), *_parts(AnyOf, other)))

    def __ror__(self, other) -> "MaskObject":
        return AnyOf((*_parts(AnyOf, other), *_parts(AnyOf, self)))

    def __invert__(self) -> "MaskObject":
        """A query sees the keys that this mask hides."""
        return Not((self,))

    def __eq__(self, other):
        if not isinstance(other, MaskObject):
            return NotImplemented
        (mine, fields), (others, other_fields) = map(jax.tree.flatten, (self, other))
        return fields == other_fields and all(map(operator.is_, mine, others))

    def __hash__(self):
        leaves, fields = jax.tree.flatten(self)
        return hash((fields, *map(id, leaves)))

    def __bool__(self):
        got = "a joined mask" if isinstance(self, Joined) else type(self).__name__
        raise TypeError(
            f"`mask` must be joined by `&`, `|` and `~`; got {got} as a condition. Write `a & b`, "
            "not `a and b`, of which Python keeps one."
        )

    @abc.abstractmethod
    def _fit(self, call: Call) -> tuple[Leaf, ...]:
        """Return the leaves that this mask is in a call; raise if it does not fit the call."""

    def _sizes(self) -> tuple[int, ...]:
        """Return B, N, T and S as far as its arrays have them; 1 elsewhere."""
        return 1, 1, 1, 1

    def _asks(self, axis: int) -> bool:
        """Whether a function of the mask uses the index of the batch element (0) or head (1)."""
        del axis
        return False


@mask_object
class Joined(MaskObject):
    """Masks, each an object or an array, and an operator."""

    parts: tuple[Any, ...]

    def _sizes(self):
        return tuple(map(max, zip(*map(sizes_of, self.parts), strict=True)))

    def _asks(self, axis):
        return any(_asks(part, axis) for part in self.parts)


@mask_object
class AllOf(Joined):
    """The pairs that all masks allow."""

    def _fit(self, call):
        return tuple(leaf for part in self.parts for leaf in fitted(part, call))


@mask_object
class AnyOf(Joined):
    """The pairs that any of the masks allows."""

    def _fit(self, call):
        return (Either(tuple(Mask(fitted(part, call)) for part in self.parts)),)


@mask_object
class Not(Joined):
    """The pairs that a mask, the only part, does not allow."""

    def __invert__(self):
        return self.parts[0]

    def _fit(self, call):
        return (Complement(Mask(fitted(self.parts[0], call))),)


def fitted(mask, call: Call) -> tuple[Leaf, ...]:
    """Return the leaves of the argument `mask`, checked against the call."""
    if isinstance(mask, MaskObject):
        return mask._fit(call)
    return (MaskArray(Pairs(broadcastable("mask", _array(mask), call.pairs_shape))),)


def sizes_of(mask) -> tuple[int, ...]:
    """Return B, N, T and S as far as the arrays of the argument `mask` have them; 1 elsewhere."""
    return mask._sizes() if isinstance(mask, MaskObject) else _padded_shape(_array(mask))


def _array(mask) -> jax.Array:
    """Return the argument `mask` as an array of bools, where it is no mask object."""
    mask, advice = held(mask), None
    if isinstance(mask, type) and issubclass(mask, MaskObject):
        advice = f"Pass an object of it: `{mask.__name__}(...)`."
    elif callable(mask):
        advice = "Wrap a function in `pallas_flash.masks.Predicate`."
    elif isinstance(mask, (tuple, list)) and any(isinstance(x, MaskObject) for x in mask):
        advice = "Write `a & b` or `a | b`, which join masks."
    if advice is not None:
        raise TypeError(f"`mask` must be an array or a mask object; got {describe(mask)}. {advice}")
    x = array("mask", mask)
    if x.dtype != jnp.bool_:
        raise TypeError(
            f"`mask` must be boolean, True where a query may attend; got {x.dtype}. Pass "
            "`mask.astype(bool)`, or numbers to add to the scores as `bias`."
        )
    return x


def _parts(kind: type["Joined"], mask) -> tuple[Any, ...]:
    """Return the masks that an operator has joined to `mask`; raise if it is none."""
    if isinstance(mask, kind):
        return mask.parts
    return (mask if isinstance(mask, MaskObject) else _array(mask),)


def check_array(name: str, x, dtype: str) -> None:
    """Raise if a field of a mask object can be no array of integers or bools.

    A shape stands for an array, and ints and shardings are of trees like the mask, as in `in_axes`.
    """
    if is_int(x) or isinstance(x, jax.ShapeDtypeStruct | jax.sharding.Sharding | PartitionSpec):
        return
    x, kind = held(x), jnp.bool_ if dtype == "bool" else jnp.integer
    if not (is_array(x) and jnp.issubdtype(x.dtype, kind)):
        array_of_dtype(name, x, dtype)


def _asks(mask, axis: int) -> bool:
    return isinstance(mask, MaskObject) and mask._asks(axis)


@mask_object
class Segments(MaskObject):
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

    query: Any
    key_value: Any = None

    def __post_init__(self):
        check_segments(self)

    def _fit(self, call):
        return (segment_leaf("Segments", self.query, self.key_value, call),)

    def _sizes(self):
        return segment_sizes(self.query, self.key_value)


def check_segments(mask: Any) -> None:
    """Raise if a mask object has ids of queries or keys that can be none."""
    name = type(mask).__name__
    check_array(f"{name}.query", mask.query, "int32")
    if mask.key_value is not None:
        check_array(f"{name}.key_value", mask.key_value, "int32")


def segment_leaf(name: str, query, key_value, call: Call) -> SegmentLeaf:
    """Return the leaf of the ids of queries and keys, two attributes of the mask object `name`."""
    batch, _, q_len, kv_len = call.scores_shape
    query = integers(f"{name}.query", query, (batch, q_len), "[B, T]")
    if key_value is not None:
        keys = integers(f"{name}.key_value", key_value, (batch, kv_len), "[B, S]")
        return SegmentLeaf(query, keys)
    if q_len != kv_len:
        raise ValueError(
            f"`{name}.key_value` must be given where T and S differ; got None with T={q_len} "
            f"and S={kv_len}. Pass the ids of the keys, [B, S]."
        )
    return SegmentLeaf(query)


def segment_sizes(query, key_value) -> tuple[int, ...]:
    """Return B, N, T and S as far as ids of queries and keys have them; 1 elsewhere."""
    keys = query if key_value is None else key_value
    (batch, q_len), (_, kv_len) = ((1, 1, *np.shape(x))[-2:] for x in (query, keys))
    return batch, 1, q_len, kv_len


@mask_object
class PrefixLM(MaskObject):
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
    """

    prefix_lengths: Any

    def __post_init__(self):
        check_array("PrefixLM.prefix_lengths", self.prefix_lengths, "int32")

    def _fit(self, call):
        if call.is_causal:
            raise ValueError(
                "`is_causal` must be False with a PrefixLM `mask`; got True. Drop `is_causal`: it "
                "would hide the prefix, and after that the mask is causal by itself."
            )
        lengths = integers(
            "PrefixLM.prefix_lengths", self.prefix_lengths, (call.scores_shape[0],), "[B]"
        )
        return (PrefixLeaf(lengths, call.at.offset, call.at.positions, call.at.shift),)

    def _sizes(self):
        return (*np.shape(self.prefix_lengths), 1)[0], 1, 1, 1


@mask_object
class Predicate(MaskObject):
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

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> def same_colour(b, h, q_pos, k_pos, colour):
        ...     return colour[q_pos] == colour[k_pos]
        >>> x = jnp.ones((1, 4, 1, 16))
        >>> mask = pallas_flash.masks.Predicate(same_colour, (jnp.array([0, 1, 0, 1]),))
        >>> pallas_flash.attention(x, x, x, mask=mask).shape
        (1, 4, 1, 16)
    """

    fn: Callable = dataclasses.field(metadata=STATIC)
    operands: tuple[Any, ...] = ()

    def __post_init__(self):
        check_function("Predicate.fn", self.fn)
        check_tuple("Predicate.operands", self.operands)

    def _fit(self, call):
        arrays = operands("Predicate.operands", self.operands)
        function("Predicate.fn", self.fn, None, arrays)
        return (PredicateLeaf(self.fn, arrays),)

    def _asks(self, axis: int) -> bool:
        index = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
        program = jax.make_jaxpr(lambda at, xs: self.fn(*at, *map(readable, xs)))(
            index, operands("Predicate.operands", self.operands)
        ).jaxpr
        return uses(program, axis)


@mask_object
class BlockMask(MaskObject):
    """Block-sparse attention: a bool for each block of queries and keys.

    Kernels visit only tiles that overlap a True block; sizes of tiles and blocks are independent.
    One object serves every layer and step. `from_mask` builds one from another mask, `from_topk`
    from scores of blocks.

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
    """

    some: Any
    block_q: int = dataclasses.field(default=64, metadata=STATIC)
    block_kv: int = dataclasses.field(default=64, metadata=STATIC)
    every: Any = None
    mask: Any = None
    q_len: int | None = dataclasses.field(default=None, metadata=STATIC)
    kv_len: int | None = dataclasses.field(default=None, metadata=STATIC)

    def __post_init__(self):
        for name in ("block_q", "block_kv", "q_len", "kv_len"):
            if (value := getattr(self, name)) is not None or name.startswith("block"):
                at_least(1, f"BlockMask.{name}", value)
        check_array("BlockMask.some", self.some, "bool")
        if (self.every is None) != (self.mask is None):
            given = "every" if self.mask is None else "mask"
            raise ValueError(
                f"`BlockMask.every` and `BlockMask.mask` must be given together; got `{given}` "
                "alone. Use `BlockMask.from_mask`, which finds both tables."
            )
        if self.every is not None:
            check_array("BlockMask.every", self.every, "bool")

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
            if _asks(mask, axis) and given[name] is None and own[axis] == 1:
                raise ValueError(
                    f"`{name}` must be given for a Predicate that asks for its index; got None. "
                    "Pass the size in the calls that the mask is for."
                )
            own[axis] = sizes[name] if sizes[name] > 1 else own[axis]
        own_batch, own_heads = own
        leaves = Mask(fitted(mask, Call((own_batch, own_heads, q_len, kv_len))))

        def tables(leaves):
            if [leaf.kind for leaf in leaves.leaves] == [LeafKind.ARRAY]:
                some, every = leaves.block_classes(q, kv)
            else:
                some, every = _classes_by_rows(leaves, own_batch, own_heads, q, kv)
            shape = (*some.shape[:2], q.count, kv.count)
            return [jnp.broadcast_to(x, shape) for x in (some, every)]

        some, every = divided_by_xla(tables, None, leaves)
        # NumPy arrays become the device's once, and not in each call.
        mask = jax.tree.map(jnp.asarray, mask)
        return cls(some, block_q, block_kv, every, mask, q_len, kv_len)

    @classmethod
    def from_topk(cls, scores, k: int | None = None, *, kv_len: int | None = None,
                  block_q: int = 64, block_kv: int = 64) -> "BlockMask":  # fmt: skip
        """Return the key blocks that data chooses for each block of queries.

        The lowest of blocks with equal scores comes first, so that every run and device chooses
        the same. The choice has no gradient. `is_causal` still hides later keys of a chosen block.

        Args:
            scores: floating [B | 1, N | 1, ceil(T / block_q), ceil(S / block_kv)], a number for
                each key block: +inf forces a block, and -inf and NaN exclude it. Or the numbers of
                blocks that were chosen before, integers [B | 1, N | 1, ceil(T / block_q), any] in
                any order; a number outside of the key blocks, such as -1, is none.
            k: the most key blocks of a block of queries; None with numbers of blocks.
            kv_len: S, if known. Numbers of blocks need it.
            block_q: queries in a block; with 1 each query chooses for itself.
            block_kv: keys in a block.

        Returns:
            A mask that allows all pairs of the chosen blocks. Its `some` may be kept and used
            again.

        Example:
            >>> import jax.numpy as jnp, pallas_flash
            >>> scores = jnp.array([[[[0.5, 0.5, 0.5], [0.1, 0.3, jnp.inf]]]])
            >>> mask = pallas_flash.masks.BlockMask.from_topk(scores, 2, block_q=4, block_kv=4)
            >>> mask.some[0, 0].astype(int)
            Array([[1, 1, 0],
                   [0, 1, 1]], dtype=int32)
        """
        scores = array("scores", scores)
        block_q, block_kv = at_least(1, "block_q", block_q), at_least(1, "block_kv", block_kv)
        numbered = jnp.issubdtype(scores.dtype, jnp.integer)
        if not numbered and not jnp.issubdtype(scores.dtype, jnp.floating):
            raise TypeError(
                "`scores` must be floating point, or integers that are numbers of key blocks; got "
                f"{scores.dtype}. Pass a table of bools as `BlockMask(table, block_q, block_kv)`."
            )
        if scores.ndim != 4:
            raise ValueError(
                "`scores` must have 4 axes, [B, N, query blocks, key blocks], the first two "
                f"possibly 1; got shape {scores.shape}. Add each missing axis with size 1."
            )
        if numbered and k is not None:
            raise ValueError(
                f"`k` must be None with numbers of blocks, which are all taken; got {describe(k)}. "
                "Drop it, or give fewer numbers."
            )
        if numbered and kv_len is None:
            raise ValueError(
                "`kv_len` must be given with numbers of blocks, which do not say how many blocks "
                "there are; got None. Pass S."
            )
        if numbered:
            kv_len = at_least(1, "kv_len", kv_len)
            choose = functools.partial(_numbered, count=Tiling(kv_len, block_kv).count)
        else:
            kv_len = None if kv_len is None else at_least(1, "kv_len", kv_len)
            choose = functools.partial(_largest, k=min(at_least(1, "k", k), scores.shape[-1]))
        some = divided_by_xla(choose, None, scores)
        if kv_len is not None and some.shape[3] != Tiling(kv_len, block_kv).count:
            raise ValueError(
                f"`scores` must have a key block for each {block_kv} of {kv_len} keys, "
                f"{Tiling(kv_len, block_kv).count} in all; got shape {scores.shape}. Use the "
                "`block_kv` of the scores, or their `kv_len`."
            )
        return cls(some, block_q, block_kv, kv_len=kv_len)

    def _fit(self, call):
        sizes: dict[str, Any] = dict(block_q=int(self.block_q), block_kv=int(self.block_kv))
        q_len, kv_len = call.lengths
        for name, have, want in (("q_len", self.q_len, q_len), ("kv_len", self.kv_len, kv_len)):
            if have not in (None, want):
                raise ValueError(
                    f"`BlockMask.{name}` must be that of the call; got {have} and {want}. Use "
                    "`BlockMask.from_mask` for these lengths."
                )
        tables = {"some": self._table("some", call)}
        if self.mask is None:
            return (BlockLeaf(**tables, **sizes),)
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
        return (BlockLeaf(**tables, **sizes, mask=mask),)

    def _table(self, name, call: Call):
        table = array_of_dtype(f"BlockMask.{name}", getattr(self, name), "bool")
        (batch, num_heads, *_), (q_len, kv_len) = call.scores_shape, call.lengths
        q, kv = Tiling(q_len, self.block_q), Tiling(kv_len, self.block_kv)
        want = batch, num_heads, q.count, kv.count
        if table.ndim != 4 or table.shape[2:] != want[2:] or not broadcasts(table.shape, want):
            raise ValueError(
                f"`BlockMask.{name}` must have shape [B, N, ceil(T / block_q), ceil(S / block_kv)] "
                f"= {want}, its first two axes possibly 1; got {table.shape} with "
                f"block_q={self.block_q} and block_kv={self.block_kv}. Use a table "
                "for this call, with the `block_q` and `block_kv` that it was made for."
            )
        return table

    def _sizes(self):
        return *_padded_shape(self.some)[:2], self.q_len or 1, self.kv_len or 1


# Compiled once for all calls outside of `jit`, as are the functions below.
@functools.partial(jax.jit, static_argnames="k")
def _largest(scores: jax.Array, k: int) -> jax.Array:
    """Return where the k largest scores of each row are; of equal ones the first, and no -inf."""
    scores = lax.stop_gradient(scores)
    if scores.dtype.itemsize == 1:  # Some have no infinity.
        scores = scores.astype(jnp.float32)
    candidates = scores > -jnp.inf  # False for NaN, too.
    scores = jnp.where(candidates, scores, -jnp.inf)
    # A number, not the order in which `top_k` returns equal ones, which is up to the device.
    least = lax.top_k(scores, k)[0][..., -1:]
    above, equal = scores > least, scores == least
    room = k - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return candidates & (above | equal & (jnp.cumsum(equal, -1, dtype=jnp.int32) <= room))


@functools.partial(jax.jit, static_argnames="count")
def _numbered(numbers: jax.Array, count: int) -> jax.Array:
    """Return which of `count` blocks each row of numbers names."""
    if numbers.dtype.itemsize == 1:  # Integers of 4 bits do not promote.
        numbers = numbers.astype(jnp.int32)
    return (numbers[..., None] == jnp.arange(count)).any(-2)


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
        return classes_of_array(ok, Tiling(q_tiles.block, q_tiles.block), kv_tiles)

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
