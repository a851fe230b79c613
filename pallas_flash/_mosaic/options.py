"""What a call asks for beyond products and a softmax, as kernels in Mosaic GPU compute and read it.

Masks, scores and dropout are given `DeviceOperand` in place of arrays. They read the numbers of a
tile's positions from device memory; bools of pairs lie there as bits.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import _compat
from pallas_flash._blocks import Tiling
from pallas_flash._dropout import kept
from pallas_flash._masks import Mask
from pallas_flash._mosaic import ptx
from pallas_flash._operands import Operand, Pairs, TileView, is_pairs
from pallas_flash._problem import Extras, Problem
from pallas_flash._scores import LOG2E, Functions, Scores

plgpu = _compat.mosaic_gpu()

# The smallest scale used: -inf * 0 would be NaN where a score is masked, and this one still gives
# equal weights.
MIN_SCALE = 1e-30
# The largest soft cap at which the errors of `ptx.logistic` and `ptx.tanh`, 2^-20 and 2^-22 times
# the cap, hardly show in the LSE, which is float32.
MAX_QUICK_CAP = 64.0
# Whole numbers below are float32, and so are their sums.
NEAR = 2**24


def hide(mask: Mask, b, h, q_pos, k_pos, s):
    """Scores, -inf where the mask does not allow them."""
    return ptx.where(mask.allowed(b, h, q_pos, k_pos), s, -jnp.inf)


# Columns of a tile of which random numbers are computed at a time. More take more registers, see
# docs/notes/kernels.md.
DRAWN_AT_A_TIME = 32

# Positions of a tile may reach so far beyond the last one. Arrays of a number for each token are
# short: they are padded by that, and what is read beyond one example's is that of the next.
OVERHANG = 256
OF_TOKENS = 2  # Their rank.


class Bits(NamedTuple):
    """How the bools of pairs lie: 32 in a word, the first one lowest, along the tiles' columns.

    Attributes:
        axis: that of columns.
        words: how many there are in whole tiles.
    """

    axis: int
    words: int

    @classmethod
    def along(cls, axis: int, columns: Tiling) -> "Bits":
        """With a multiple of four words, for loads of so many."""
        return cls(axis, -(-columns.count * columns.block // (4 * ptx.BITS)) * 4)

    def of(self, x):
        """Of bools with an axis of instances before all others; uint32, with zeros behind."""
        # XLA would pack constants while it compiles, which takes seconds.
        x, axis = lax.optimization_barrier(x), self.axis + 1
        missing = self.words * ptx.BITS - x.shape[axis]
        x = jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])
        x = x.reshape(*x.shape[:axis], self.words, ptx.BITS, *x.shape[axis + 1 :])
        bits = jnp.arange(ptx.BITS, dtype=jnp.uint32)
        bits = jnp.uint32(1) << jnp.expand_dims(bits, tuple(range(1, x.ndim - axis - 1)))
        return jnp.sum(jnp.where(x, bits, jnp.uint32(0)), axis=axis + 1, dtype=jnp.uint32)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an operand lies, and what may be asked of it.

    Attributes:
        shape: that of the operand.
        first: where it begins, in units of its size.
        ragged: whether positions may be beyond its last one; they are moved to the edge.
        anywhere: whether any position may be asked for, likewise.
        columns: positions of a tile's columns, of which two neighbours are a thread's.
        known: what has been read, if it is to be remembered.
        bits: for bools that lie so.
    """

    shape: tuple[int, ...]
    first: Any
    ragged: bool
    anywhere: bool = False
    columns: Any = None
    known: "ByIndex | None" = None
    bits: Bits | None = None


class ByIndex(dict):
    """What has been read of an operand, for who asks by the same objects again."""

    def read(self, index, read):
        """What `read(index)` has been or is."""
        key = tuple(map(id, index))
        if key not in self:
            # The indices as well: others could get their places in memory.
            self[key] = index, read(index)
        return self[key][1]


class DeviceOperand(Operand):
    """An operand in device memory, read at positions of a tile.

    Args:
        ref: the reference, to an array of one axis.
        dtype: what its numbers mean.
        place: where they are.
    """

    def __init__(self, ref, dtype, place: Place):
        super().__init__(ref, dtype)
        self._place = place

    @property
    def shape(self):
        return self._place.shape

    def placed(self, **changes) -> "DeviceOperand":
        """This operand, of which other things may be asked."""
        place = dataclasses.replace(self._place, **changes)
        return DeviceOperand(self._array, self._dtype, place)

    def for_user(self):
        return self.placed(anywhere=True, known=None)

    def _read(self, index):
        known = self._place.known
        return self._load(index) if known is None else known.read(index, self._load)

    def _load(self, index):
        place, shape = self._place, self._place.shape
        if place.bits is not None:
            return self._load_bits(index, place.bits)
        # Of two neighbours both exist or none does, if their number is even.
        pairs = bool(index) and index[-1] is place.columns and shape[-1] % 2 == 0
        if place.anywhere:
            index, pairs = self._inside(index), False
        elif place.ragged:
            last = [n - 1 for n in shape]
            if pairs:
                last[-1] -= 1
            index = [
                jnp.minimum(i, n) if jnp.ndim(i) else i for i, n in zip(index, last, strict=True)
            ]
        at = self._at(index, shape)
        if jnp.ndim(at):
            read = ptx.gather(self._array, at, pairs=pairs)
        else:
            # A scalar of the whole warpgroup.
            read = plgpu.load(self._array.at[at])
        return read.astype(jnp.int32) != 0 if self._dtype == jnp.bool_ else read

    def _load_bits(self, index, bits: Bits):
        """Whether a pair's bit is set."""
        place, axis = self._place, bits.axis
        columns = index[axis]
        assert columns is place.columns, "Bits are read along a tile's columns."
        shape = [bits.words if a == axis else n for a, n in enumerate(place.shape)]
        index = [columns >> ptx.LOG_BITS if a == axis else i for a, i in enumerate(index)]
        if place.ragged:
            index = [
                jnp.minimum(i, n - 1) if jnp.ndim(i) else i
                for i, n in zip(index, shape, strict=True)
            ]
        apart = math.prod(shape[axis + 1 :])
        return ptx.bits(self._array, self._at(index, shape), columns, apart)

    def _at(self, index, shape):
        """Where an index is in memory."""
        at = self._place.first
        for i, n in zip(index, shape, strict=True):
            at = at * n + i
        return at


class Remembered(Operand):
    """An operand for a function that is called twice; the second time nothing is read again."""

    def __init__(self, operand: Operand):
        super().__init__(None, operand.dtype)
        self._operand, self._found, self._again = operand.for_user(), [], None

    @property
    def shape(self):
        return self._operand.shape

    def again(self):
        """To be called before the second call."""
        self._again = iter(self._found)

    def for_user(self):
        return self

    def _read(self, index):
        if self._again is not None:
            return next(self._again)
        self._found.append(self._operand[index])
        return self._found[-1]


def _without_add_any(function, x):
    """`function(x)`, with sums in place of an operation of derivatives that Pallas has not."""

    def run(program, consts, arguments):
        values = dict(zip(program.constvars, consts, strict=True))
        values |= zip(program.invars, arguments, strict=True)

        def value(x):
            # A literal holds its number.
            return x.val if hasattr(x, "val") else values[x]

        for eqn in program.eqns:
            inputs = list(map(value, eqn.invars))
            if eqn.primitive.name == "add_any":
                found = [jnp.add(*inputs)]
            elif eqn.primitive.name in ("jit", "pjit"):
                inner = eqn.params["jaxpr"]
                found = run(inner.jaxpr, inner.consts, inputs)
            else:
                found = eqn.primitive.bind(*inputs, **eqn.params)
                found = found if eqn.primitive.multiple_results else [found]
            values |= zip(eqn.outvars, found, strict=True)
        return list(map(value, program.outvars))

    program = jax.make_jaxpr(function)(x)
    return run(program.jaxpr, program.consts, [x])


def _laid(scores):
    """Scores as a product's lie: a score function may return one number for the whole tile."""
    return plgpu.layout_cast(scores, ptx.WGMMA)


def shared_arrays(problem: Problem, mask: Mask):
    """The scale and the `Extras` of a problem, with an axis of instances before all others.

    An instance is what `jax.vmap` has many of. It has all examples of the call.
    """
    extras = Extras(mask, problem.scores, problem.sinks, problem.dropout)
    return jax.tree.map(lambda x: jnp.asarray(x)[None], (problem.scale, extras))


class Leaf(NamedTuple):
    """What is known of an array that all programs share."""

    shape: tuple[int, ...]  # Without the axis of instances.
    dtype: Any
    each: bool  # Whether instances have their own.
    bits: Bits | None  # For bools that lie so.


@dataclasses.dataclass(frozen=True)
class Options:
    """What a kernel knows of a call's options when it is compiled.

    Attributes:
        structure: of what `shared_arrays` returned.
        leaves: its arrays.
        batch: the examples of an instance.
        large: whether scores may be, see `Problem.large`.
        ragged: whether tiles reach beyond the positions that exist.
        near: whether all positions differ by less than `NEAR`, and are those of the tile.
        transposed: whether queries are the columns of tiles.
    """

    structure: Any
    leaves: tuple[Leaf, ...]
    batch: int
    large: bool
    ragged: bool
    near: bool
    transposed: bool

    @classmethod
    def of(
        cls, problem: Problem, shared, q: Tiling, kv: Tiling, *, transposed: bool = False
    ) -> "Options":
        """Those of a problem, cut into tiles."""
        arrays, structure = jax.tree.flatten(shared)
        of_pairs = jax.tree.map(
            lambda x: jax.tree.map(lambda _: is_pairs(x), x), shared, is_leaf=is_pairs
        )
        axis, columns = (2, q) if transposed else (3, kv)

        def leaf(x, of_pairs):
            shape, packed = x.shape[1:], of_pairs and x.dtype == jnp.bool_
            bits = Bits.along(axis, columns) if packed and shape[axis] > 1 else None
            return Leaf(shape, _meant(x.dtype), len(x) > 1, bits)

        leaves = tuple(map(leaf, arrays, jax.tree.leaves(of_pairs)))
        ragged, scores = any(t.length % t.block for t in (q, kv)), problem.scores
        told = scores.offset is not None or scores.positions is not None
        near = not told and problem.q_len + problem.kv_len + abs(scores.shift) < NEAR
        return cls(structure, leaves, problem.batch, problem.large, ragged, near, transposed)

    def operands(self, shared) -> list:
        """Its arrays as kernels take them: of one axis, and no bools."""

        def operand(x, leaf: Leaf):
            x, rank = x if leaf.bits is None else leaf.bits.of(x), x.ndim - 1
            x = x.astype(held(x.dtype)).reshape(-1)
            return jnp.pad(x, (0, OVERHANG if rank == OF_TOKENS else 0))

        return list(map(operand, jax.tree.leaves(shared), self.leaves))

    @property
    def approximate(self) -> bool:
        """Whether functions may be the GPU's instructions, which are not exact to the last place.

        Those of a kernel are chosen for that; those of a user, and of a wide soft cap, are not.
        """
        return self._scores.score_mod is None and self.quick_cap

    @property
    def quick_cap(self) -> bool:
        """Whether functions of `ptx` serve for the soft cap, if there is one."""
        return has_quick_cap(self._scores)

    @property
    def functions(self) -> Functions:
        """Those of scores."""
        functions = Functions(ptx.tanh) if self.quick_cap else Functions()
        if not self.near:
            return functions
        # Of a difference of queries and keys.
        per_column = 1 if self.transposed else -1
        return functions._replace(
            to_float=functools.partial(ptx.columns_to_float, per_column=per_column)
        )

    @property
    def drops(self) -> bool:
        """Whether there is dropout."""
        _, extras = jax.tree.unflatten(self.structure, self.leaves)
        return extras.dropout is not None

    @property
    def _scores(self) -> Scores:
        _, extras = jax.tree.unflatten(self.structure, self.leaves)
        return extras.scores

    def of_example(self, refs, b) -> "ExampleOptions":
        """With references to its arrays, for one example, counted over all instances."""
        batch = jnp.int32(self.batch)
        instance, b = lax.div(b, batch), lax.rem(b, batch)

        def operand(ref, leaf: Leaf):
            ragged = self.ragged and len(leaf.shape) != OF_TOKENS
            place = Place(leaf.shape, instance if leaf.each else 0, ragged, bits=leaf.bits)
            return DeviceOperand(ref, leaf.dtype, place)

        operands = [operand(*x) for x in zip(refs, self.leaves, strict=True)]
        scale, extras = jax.tree.unflatten(self.structure, operands)
        return ExampleOptions(self, b, scale[()], extras)


def _meant(dtype):
    """The dtype that numbers have in a kernel, where none has 64 bits."""
    with jax.enable_x64(False):
        return jax.dtypes.canonicalize_dtype(dtype)


def held(dtype):
    """The dtype in which device memory holds them."""
    return jnp.int8 if dtype == jnp.bool_ else _meant(dtype)


def has_quick_cap(scores: Scores) -> bool:
    """Whether a soft cap, if there is one, is low enough for quick functions."""
    return (scores.soft_cap or 0) <= MAX_QUICK_CAP


def left_out(scores: Scores) -> float:
    """What `ExampleOptions.logits` leaves out of all scores, in base 2; no weight changes by it."""
    cap = scores.soft_cap
    return -cap * LOG2E if cap is not None and has_quick_cap(scores) else 0.0


class ExampleOptions(NamedTuple):
    """The options of a call inside a kernel.

    Attributes:
        options: what is known at compile time.
        b: the example, within its instance.
        scale: the scale of scores.
        extras: with `DeviceOperand` in place of arrays.
    """

    options: Options
    b: Any
    scale: Any
    extras: Extras

    def logits(self, s, h, q_pos, k_pos, *, masked: bool = True):
        """Scores and a factor c that takes them to base 2, for products s at positions.

        Of a tile that is not `masked` NaN may spread along its rows.

        But for what is `left_out` with a soft cap:

            cap * tanh(x / cap) = 2 cap / (1 + exp(-2 x / cap)) - cap
        """
        scores, functions = self.extras.scores, self.options.functions
        at, cap = (self.b, h, q_pos, k_pos), scores.soft_cap
        if cap is not None and self.options.quick_cap:
            rest = dataclasses.replace(scores, soft_cap=None)
            factor = -2 * LOG2E / cap
            if rest:
                x = _laid(rest.logits(s * self.scale, *at, functions=functions)) * factor
            else:
                x = s * (self.scale * factor)
            return ptx.logistic(x, apart=masked), 2 * LOG2E * cap
        if scores:
            return _laid(scores.logits(s * self.scale, *at, functions=functions)), LOG2E
        if self.options.large:
            return s * self.scale, LOG2E
        return s, jnp.maximum(self.scale, MIN_SCALE) * LOG2E

    def logits_vjp(self, s, h, positions):
        """As `logits`, and a function that takes a cotangent of the scores to one of scale * s.

        None stands for the identity. `positions` is a function, called where they are used.
        """
        scores = self.extras.scores
        if not scores:
            return *self.logits(s, h, None, None), None
        functions = self.options.functions
        if scores.score_mod is not None:
            q_pos, k_pos = positions()
            # Pallas has no derivative of reads.
            operands = tuple(map(Remembered, scores.operands))
            origin = scores.origin and [scores.origin[i] for i in range(4)]
            scores = dataclasses.replace(scores, operands=operands, origin=origin)
            at = self.b, h, q_pos, k_pos
            dataclasses.replace(scores, soft_cap=None).logits(s, *at)
            for operand in operands:
                operand.again()
            x = s * self.scale
            logits, slope = scores.derivative(x, *at, functions=functions, call=_without_add_any)
            return _laid(logits), LOG2E, lambda ds: ds * slope
        at = self.b, h, *positions()
        logits, pull = scores.vjp(s * self.scale, *at, functions=functions)
        return logits, LOG2E, pull

    def read_ahead(self, h, q_pos, k_pos, *, masked: bool) -> "ExampleOptions":
        """For a tile at these positions, of which k_pos are columns, with what is read of it.

        Loads begin here, before the product that their use has to wait for.
        """
        extras = jax.tree.map(lambda x: x.placed(columns=k_pos, known=ByIndex()), self.extras)
        if extras.scores.bias is not None:
            extras.scores.bias.read(self.b, h, q_pos, k_pos)
        if masked:
            extras.mask.allowed(self.b, h, q_pos, k_pos)
        return self._replace(extras=extras)

    def with_bias(self, tile) -> "ExampleOptions":
        """For one tile of pairs, whose bias was read already."""
        scores = dataclasses.replace(self.extras.scores, bias=Pairs(TileView(tile, (1, 1, 1, 1))))
        return self._replace(extras=self.extras._replace(scores=scores))

    def hide(self, s, h, q_pos, k_pos, *, bits=(), transposed: bool = False):
        """Scores, -inf where the mask does not allow them.

        Args:
            s: the scores.
            h: the head.
            q_pos: queries.
            k_pos: keys.
            bits: bools of the tile for arrays that the mask is without.
            transposed: whether queries are columns.
        """
        columns = q_pos if transposed else k_pos
        mask = jax.tree.map(lambda x: x.placed(columns=columns), self.extras.mask)
        s = hide(mask, self.b, h, q_pos, k_pos, s) if mask else s
        for allowed in bits:
            s = ptx.where(allowed, s, -jnp.inf)
        return s

    def kept(self, shape, h, first_q, first_k, *, transposed: bool = False):
        """Which probabilities of a tile dropout keeps; None for all."""
        if self.extras.dropout is None:
            return None
        parts, (rows, columns), axes = [], shape, (1, 0) if transposed else (0, 1)
        for start in range(0, columns, DRAWN_AT_A_TIME):
            part = rows, min(columns - start, DRAWN_AT_A_TIME)
            # Within it, where the compiler knows which elements of a thread share a counter.
            q, k = (ptx.positions(part, axis, jnp.int32(0)) for axis in axes)
            first = (first_q + start, first_k) if transposed else (first_q, first_k + start)
            at = self.b, h, q, k
            parts.append(kept(self.extras.dropout, at, first=first, multiply=ptx.multiply_wide))
        return ptx.joined(parts)
