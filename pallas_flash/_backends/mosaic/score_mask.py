"""The scale, scores, mask and dropout of a call, as kernels in Mosaic GPU compute them on a tile.

`Options` is what a kernel knows of them at compile time; `ElementOptions`, made inside the kernel,
is what it knows of one batch element. Its arrays are `DeviceOperand`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash._backends.mosaic import ptx
from pallas_flash._backends.mosaic.operands import (
    OVERHANG,
    RANK_OF_TOKENS,
    Bits,
    CachedOperand,
    DeviceOperand,
    Layout,
    ReadCache,
    read_dtype,
    stored_dtype,
)
from pallas_flash._jax import compat
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.masks import Mask
from pallas_flash._problem.operands import Pairs, TileView, is_pairs
from pallas_flash._problem.paged import AnyProblem
from pallas_flash._problem.problem import Extras
from pallas_flash._problem.scores import LOG2E, Functions, Scores

plgpu = compat.mosaic_gpu()

# The smallest scale used: -inf * 0 would be NaN where a score is masked, and this one still gives
# equal weights.
MIN_SCALE = 1e-30
# The largest soft cap at which the errors of `ptx.logistic` and `ptx.tanh`, 2^-20 and 2^-22 times
# the cap, hardly show in the LSE, which is float32.
MAX_QUICK_CAP = 64.0
# Integers below this are exact in float32, and so are their sums.
EXACT_IN_FLOAT32 = 2**24
# Columns of a tile for which random numbers are drawn at a time. More take more registers.
DRAWN_AT_A_TIME = 32


def hide(mask: Mask, b, h, q_pos, k_pos, s):
    """Return scores, -inf where the mask does not allow them."""
    return ptx.where(mask.allowed(b, h, q_pos, k_pos), s, -jnp.inf)


def _without_add_any(function, x):
    """Return `function(x)`, with sums for `add_any` of derivatives, which Pallas does not lower."""

    def run(program, consts, arguments):
        values = dict(zip(program.constvars, consts, strict=True))
        values |= zip(program.invars, arguments, strict=True)

        def value(x):
            # A literal holds its number.
            return x.val if hasattr(x, "val") else values[x]

        for eqn in program.eqns:
            inputs = list(map(value, eqn.invars))
            if eqn.primitive.name == "add_any":
                outputs = [jnp.add(*inputs)]
            elif eqn.primitive.name in ("jit", "pjit"):
                inner = eqn.params["jaxpr"]
                outputs = run(inner.jaxpr, inner.consts, inputs)
            else:
                outputs = eqn.primitive.bind(*inputs, **eqn.params)
                outputs = outputs if eqn.primitive.multiple_results else [outputs]
            values |= zip(eqn.outvars, outputs, strict=True)
        return list(map(value, program.outvars))

    program = jax.make_jaxpr(function)(x)
    return run(program.jaxpr, program.consts, [x])


def _laid(scores):
    """Return scores in the layout of a product; a score function may return a scalar."""
    return plgpu.layout_cast(scores, ptx.WGMMA)


def shared_arrays(problem: AnyProblem, mask: Mask):
    """Return the scale and the `Extras` of a problem, with an axis of instances before all others.

    An instance is a call that `jax.vmap` has many of, with all batch elements of the call.
    """
    extras = Extras(mask, problem.scores, problem.sinks, problem.dropout)
    return jax.tree.map(lambda x: jnp.asarray(x)[None], (problem.scale, extras))


class Leaf(NamedTuple):
    """An array as far as it is known at compile time."""

    shape: tuple[int, ...]  # Without the axis of instances.
    dtype: Any
    each: bool  # Whether each instance has its own.
    bits: Bits | None  # How bools are packed, if they are.


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a call, as far as they are known at compile time.

    Attributes:
        structure: tree structure of what `shared_arrays` returned.
        leaves: its arrays.
        batch: batch elements of an instance.
        large: whether scores may be large, see `Problem.large`.
        max_logits: whether the forward gives the largest score of each row.
        batch_invariant: whether a score must not depend on what else its tile holds.
        ragged: whether tiles reach beyond the positions that exist.
        near: whether all positions are the tile's own, and their differences exact in float32.
        transposed: whether queries are the columns of tiles.
    """

    structure: Any
    leaves: tuple[Leaf, ...]
    batch: int
    large: bool
    max_logits: bool
    batch_invariant: bool
    ragged: bool
    near: bool
    transposed: bool

    @classmethod
    def from_problem(
        cls, problem: AnyProblem, shared, q: Tiling, kv: Tiling, *, transposed: bool = False
    ) -> "Options":
        """Return the options of a problem that is cut into tiles."""
        arrays, structure = jax.tree.flatten(shared)
        of_pairs = jax.tree.map(
            lambda x: jax.tree.map(lambda _: is_pairs(x), x), shared, is_leaf=is_pairs
        )
        axis, columns = (2, q) if transposed else (3, kv)

        def leaf(x, of_pairs):
            shape, packed = x.shape[1:], of_pairs and x.dtype == jnp.bool_
            bits = Bits.along(axis, columns) if packed and shape[axis] > 1 else None
            return Leaf(shape, read_dtype(x.dtype), len(x) > 1, bits)

        leaves = tuple(map(leaf, arrays, jax.tree.leaves(of_pairs)))
        ragged, scores = any(t.length % t.block for t in (q, kv)), problem.scores
        given = scores.offset is not None or scores.positions is not None
        near = not given and problem.q_len + problem.kv_len + abs(scores.shift) < EXACT_IN_FLOAT32
        wanted = problem.large, problem.max_logits, problem.batch_invariant
        return cls(structure, leaves, problem.batch, *wanted, ragged, near, transposed)

    def operands(self, shared) -> list:
        """Return its arrays as kernels take them: of one axis, and no bools."""

        def operand(x, leaf: Leaf):
            x, rank = x if leaf.bits is None else leaf.bits.pack(x), x.ndim - 1
            x = x.astype(stored_dtype(x.dtype)).reshape(-1)
            return jnp.pad(x, (0, OVERHANG if rank == RANK_OF_TOKENS else 0))

        return list(map(operand, jax.tree.leaves(shared), self.leaves))

    @property
    def approximate(self) -> bool:
        """Whether the compiler may use approximate instructions for functions.

        The kernels' own functions are chosen for that; a user's and a wide soft cap are not.
        """
        return not self.has_score_mod and self.quick_cap

    @property
    def quick_cap(self) -> bool:
        """Whether the quick functions of `ptx` serve for the soft cap, if there is one."""
        return has_quick_cap(self._extras.scores)

    @property
    def functions(self) -> Functions:
        """The functions that compute scores."""
        functions = Functions(ptx.tanh) if self.quick_cap else Functions()
        if self.batch_invariant:
            functions = functions._replace(subtract=ptx.difference)
        if not self.near:
            return functions
        # Differences of queries and keys grow along columns by this.
        per_column = 1 if self.transposed else -1
        return functions._replace(
            to_float=functools.partial(ptx.columns_to_float, per_column=per_column)
        )

    @property
    def drops(self) -> bool:
        """Whether there is dropout."""
        return self._extras.dropout is not None

    @property
    def has_scores(self) -> bool:
        """Whether scores are more than scaled products."""
        return bool(self._extras.scores)

    @property
    def has_score_mod(self) -> bool:
        """Whether there is a score function."""
        return self._extras.scores.score_mod is not None

    @property
    def _extras(self) -> Extras:
        _, extras = jax.tree.unflatten(self.structure, self.leaves)
        return extras

    def element_options(self, refs, b) -> "ElementOptions":
        """Return the options of one batch element, counted over all instances, for references."""
        batch = jnp.int32(self.batch)
        instance, b = lax.div(b, batch), lax.rem(b, batch)

        def operand(ref, leaf: Leaf):
            ragged = self.ragged and len(leaf.shape) != RANK_OF_TOKENS
            layout = Layout(leaf.shape, instance if leaf.each else 0, ragged, bits=leaf.bits)
            return DeviceOperand(ref, leaf.dtype, layout)

        operands = [operand(*x) for x in zip(refs, self.leaves, strict=True)]
        scale, extras = jax.tree.unflatten(self.structure, operands)
        return ElementOptions(self, b, scale[()], extras)


def has_quick_cap(scores: Scores) -> bool:
    """Return whether a soft cap, if there is one, is low enough for quick functions."""
    return (scores.soft_cap or 0) <= MAX_QUICK_CAP


def left_out(scores: Scores) -> float:
    """Return the constant, in base 2, that `ElementOptions.logits` leaves out of all scores.

    It changes no weight.
    """
    cap = scores.soft_cap
    return -cap * LOG2E if cap is not None and has_quick_cap(scores) else 0.0


class ElementOptions(NamedTuple):
    """The options of one batch element inside a kernel.

    Attributes:
        options: what is known at compile time.
        b: the batch element, within its instance.
        scale: the scale of scores.
        extras: mask, scores, sinks and dropout, with `DeviceOperand` as arrays.
    """

    options: Options
    b: Any
    scale: Any
    extras: Extras

    def logits(self, s, h, q_pos, k_pos, *, masked: bool = True):
        """Return scores and a factor c that takes them to base 2, for products s at positions.

        NaN may spread along the rows of a tile that is not `masked`. A soft cap leaves out a
        constant, see `left_out`:

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
            apart = masked or self.options.batch_invariant
            return ptx.logistic(x, apart=apart), 2 * LOG2E * cap
        if scores:
            return _laid(scores.logits(s * self.scale, *at, functions=functions)), LOG2E
        if self.options.large:
            return s * self.scale, LOG2E
        return s, jnp.maximum(self.scale, MIN_SCALE) * LOG2E

    def logits_vjp(self, s, h, positions):
        """Return what `logits` does and a function from ds to the cotangents of scale * s.

        None stands for the identity. `positions` is a function, called where they are used.
        """
        scores = self.extras.scores
        if not scores:
            return *self.logits(s, h, None, None), None
        functions = self.options.functions
        if scores.score_mod is not None:
            q_pos, k_pos = positions()
            # Pallas has no derivative of reads.
            operands = tuple(map(CachedOperand, scores.operands))
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

    def read_ahead(self, h, q_pos, k_pos, *, masked: bool) -> "ElementOptions":
        """Return the options of a tile whose columns are k_pos, with what is read of its arrays.

        Loads begin here, before the product that their use has to wait for.
        """
        extras = jax.tree.map(lambda x: x.placed(columns=k_pos, cache=ReadCache()), self.extras)
        if extras.scores.bias is not None:
            extras.scores.bias.read(self.b, h, q_pos, k_pos)
        if masked:
            extras.mask.allowed(self.b, h, q_pos, k_pos)
        return self._replace(extras=extras)

    def with_bias(self, tile) -> "ElementOptions":
        """Return the options of one tile whose bias was read already."""
        scores = dataclasses.replace(self.extras.scores, bias=Pairs(TileView(tile, (1, 1, 1, 1))))
        return self._replace(extras=self.extras._replace(scores=scores))

    def hide(self, s, h, q_pos, k_pos, *, bits=(), transposed: bool = False):
        """Return scores, -inf where the mask does not allow them.

        Args:
            s: the scores.
            h: the head.
            q_pos: positions of queries.
            k_pos: positions of keys.
            bits: bools of the tile, of mask arrays that were taken out of the mask.
            transposed: whether queries are columns.
        """
        columns = q_pos if transposed else k_pos
        mask = jax.tree.map(lambda x: x.placed(columns=columns), self.extras.mask)
        s = hide(mask, self.b, h, q_pos, k_pos, s) if mask else s
        for allowed in bits:
            s = ptx.where(allowed, s, -jnp.inf)
        return s

    def kept(self, shape, h, first_q, first_k, *, transposed: bool = False):
        """Return which probabilities of a tile dropout keeps; None for all."""
        if self.extras.dropout is None:
            return None
        dropout, chunks, (rows, columns) = self.extras.dropout, [], shape
        axes = (1, 0) if transposed else (0, 1)
        for start in range(0, columns, DRAWN_AT_A_TIME):
            chunk = rows, min(columns - start, DRAWN_AT_A_TIME)
            # Within it, where the compiler knows which elements of a thread share a counter.
            q, k = (ptx.positions(chunk, axis, jnp.int32(0)) for axis in axes)
            first = (first_q + start, first_k) if transposed else (first_q, first_k + start)
            options = dict(first=first, multiply=ptx.multiply_wide)
            if transposed and dropout.aligned:
                # Two neighbouring threads need the words of both queries, and each draws for one.
                words = dropout.words(self.b, h, (q | 1) - 1 + (k & 1), k, **options)
                chunks.append(dropout.keeps(ptx.halves_of_neighbours(words)))
            else:
                chunks.append(dropout.kept(self.b, h, q, k, **options))
        return ptx.joined(chunks)
