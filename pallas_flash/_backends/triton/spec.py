"""The configuration of a kernel, and how it computes scores, weights and results by it.

A kernel is compiled without the options that its call does not use, such as a bias or dropout.
Full tiles pay nothing for a mask, because `visit` has a loop of its own for partial tiles.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash._backends.triton import arithmetic
from pallas_flash._backends.triton.memory import RefOperand, block_for, load, valid_positions
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.dropout import kept
from pallas_flash._problem.problem import Extras, Problem, SplitOutput
from pallas_flash._problem.scores import LN2, LOG2E, Functions, LogSum, Scores, with_sink
from pallas_flash._problem.traversal import Sparsity, in_tile

# The smallest scale that kernels use. A scale of 0 would make a masked score NaN (-inf * 0), and
# this one still gives equal weights.
MIN_SCALE = 1e-30

# The largest soft cap that uses `arithmetic.tanh`, whose error is 2^-22 times the cap. Up to this
# cap it does not show in the LSE, which is float32 also for inputs in 16 bits. (At a cap of 2^10
# the LSE was 10 times as far off as in dense attention.)
MAX_QUICK_CAP = 64.0


class Rows(NamedTuple):
    """The resident queries of a program.

    Attributes:
        q: the queries, [rows, padded H].
        b: the batch element, int32.
        h: the query head, int32, or int32 [rows] where rows differ.
        pos: the positions, int32 [rows].
        valid: which rows exist, bool [rows]; None means all.
    """

    q: Any
    b: Any
    h: Any
    pos: Any
    valid: Any

    def indices(self, k_pos):
        """Return the indices b, h, q, k of scores, which broadcast to [rows, keys]."""
        h = self.h if jnp.ndim(self.h) == 0 else self.h[:, None]
        return self.b, h, self.pos[:, None], k_pos[None, :]


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """The configuration of a kernel, known at compile time.

    Attributes:
        extras: the tree structure of `Extras`.
        dtypes: the dtypes of its arrays, before `kernel_arrays`.
        sparsity: how the tiles to visit are given.
        mask_loads: whether partial tiles load only visible keys, or only queries with keys. Needed
            where a key may be visible to no query, or a query may see no key.
        separate_max: whether m stays apart from log2(l), see `Problem.large`. Then m is in base e,
            otherwise in base 2.
        max_logits: whether the forward also stores the largest score of each row.
        split_output: whether the forward stores the low part of the output, see `SplitOutput`.
        q: query tiles.
        kv: key tiles.
        num_stages: pipeline stages.
        head_dim: head dim of queries and keys.
        value_dim: head dim of values.
        itemsize: bytes of an element of q, k and v.
        precision: precision of products.
        interpret: whether the kernel runs in the interpreter.
    """

    extras: Any
    dtypes: tuple[Any, ...]
    sparsity: Sparsity
    mask_loads: bool
    separate_max: bool
    max_logits: bool
    split_output: bool
    q: Tiling
    kv: Tiling
    num_stages: int
    head_dim: int
    value_dim: int
    itemsize: int
    precision: Any
    interpret: bool

    @property
    def masked(self) -> bool:
        """Whether there is a mask."""
        return self.sparsity is not Sparsity.DENSE

    def load_extras(self, refs) -> Extras:
        """Return `Extras` with refs as its arrays."""
        ragged = self.q.length % self.q.block > 0 or self.kv.length % self.kv.block > 0
        operands = zip(refs, self.dtypes, strict=True)
        return jax.tree.unflatten(self.extras, [RefOperand(*x, ragged) for x in operands])

    def logits(self, extras: Extras, s, scale, *at):
        """Return scores and the factor c that takes them to base 2, for products s at indices."""
        if not extras.scores:
            if self.separate_max:
                return s * scale, LOG2E
            return s, jnp.maximum(scale, MIN_SCALE) * LOG2E
        functions = self._functions(extras.scores)
        return extras.scores.logits(s * scale, *at, functions=functions), LOG2E

    def logits_vjp(self, extras: Extras, s, scale, *at):
        """Return `logits` and a function from a cotangent of the scores to one of scale * s."""
        if not extras.scores:
            return *self.logits(extras, s, scale), lambda ds: ds
        logits, pull = extras.scores.vjp(s * scale, *at, functions=self._functions(extras.scores))
        return logits, LOG2E, pull

    def read_vjp(self, number: int):
        """Return `logits_vjp` with the derivative in what read `number` of `Scores.reads` gives."""

        def logits_vjp(extras: Extras, s, scale, *at):
            scores = extras.scores
            logits, pull = scores.vjp_of_reads(
                [number], s * scale, *at, functions=self._functions(scores)
            )
            return logits, LOG2E, lambda ds: pull(ds)[0]

        return logits_vjp

    def _functions(self, scores: Scores) -> Functions:
        # The library's tanh is exact to the last place, and takes 18 instructions an element
        # instead of 8 (counted).
        quick = self.itemsize == 2 and (scores.soft_cap or 0) <= MAX_QUICK_CAP
        return Functions(arithmetic.tanh) if quick and not self.interpret else Functions()

    def rows(self, b, h, q_tile, q_ref) -> Rows:
        """Load a query tile of one head."""
        pos = in_tile(q_tile, self.q.block)
        exist = valid_positions(self.q, pos)
        return Rows(load(q_ref, exist, self.head_dim), b, h, pos, exist)

    def kept(self, extras: Extras, *at, first=(0, 0)):
        """Return which probabilities dropout keeps at indices `at`; None means all of them.

        See `Dropout.kept`.
        """
        multiply = None if self.interpret else arithmetic.multiply_wide
        return kept(extras.dropout, at, first=first, multiply=multiply)

    def kept_in_tile(self, extras: Extras, b, h, q_tile, kv_tile, *, transposed: bool = False):
        """Return `kept` for a tile [block_q, block_kv], or transposed.

        Indices count within the tile. The compiler knows those, and finds the elements of a thread
        that share a counter.
        """
        block_q, block_kv = self.q.block, self.kv.block
        q, k = lax.iota(jnp.int32, block_q), lax.iota(jnp.int32, block_kv)
        q, k = (q[None, :], k[:, None]) if transposed else (q[:, None], k[None, :])
        first = q_tile * block_q, kv_tile * block_kv
        return self.kept(extras, b, h, q, k, first=first)

    def drop(self, kept, x):
        """Return `x` where it is kept, else zero; see `arithmetic.drop`."""
        return arithmetic.drop(kept, x, interpret=self.interpret)

    def fence(self, x, tile, side: Tiling):
        """Return `x`, which depends on the tile's first product, behind a branch always taken.

        Triton waits for a copy where its result is used, and joins waits unless a branch stands
        between them. Without this branch a tile waits for all its copies before its first product,
        and with two stages these have just been issued: the forward is 1.11 times as fast at head
        dim 256. With three stages the branch costs 2 to 10 %.
        """
        if self.num_stages != 2 or self.interpret:
            return x
        # Triton keeps this condition, and in machine code it is one comparison.
        return lax.cond(tile < side.count, lambda x: x, lambda x: 0.5 * x, x)

    def dot(self, a, b):
        """Return a @ b, accumulated in float32."""
        return self._dot(a, b, 0)

    def dot_t(self, a, b):
        """Return a @ b.T. Matrix units read a transposed operand for free."""
        return self._dot(a, b, 1)

    def _dot(self, a, b, axis):
        return lax.dot_general(
            a,
            b,
            (((1,), (axis,)), ((), ())),
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )

    def row_max(self, s, c):
        """Return the largest score of each row, [rows], in the base of m."""
        highest = jnp.max(s, axis=1)
        return highest if self.separate_max else highest * c

    def weights(self, s, c, m):
        """Return exp(score - maximum) for scores s that c takes to base 2, and m in its base.

        Without a separate maximum this is one rounding of m, one multiply-add and one exponential.
        The largest weight is 2 to the power of that rounding's error, about 2^-24 of the score.
        Sums of weights have the same factor, and it cancels while no weight overflows: in float32
        for scores to 1e9, in float16 to 1e8. Only huge queries and keys make such scores there.

        Scores are rounded before a separate maximum is subtracted, so that the largest weight
        is 1.
        """
        if self.separate_max:
            return arithmetic.exp2_of_difference(s, m, c, interpret=self.interpret)
        return arithmetic.exp2_scaled(s, c, m, interpret=self.interpret)

    def probabilities(self, s, c, log_sum: LogSum):
        """Return exp(score - LSE) for scores s that c takes to base 2."""
        m, l_log2, _ = log_sum
        if m is None:
            return arithmetic.exp2_scaled(s, c, l_log2, interpret=self.interpret)
        return arithmetic.exp2_of_difference(s, m, c, l_log2, interpret=self.interpret)

    def rescaling(self, m, to, exp2=jnp.exp2):
        """Return the factor that takes weights relative to m to weights relative to `to`."""
        return exp2((m - to) * LOG2E if self.separate_max else m - to)

    def with_sink(self, m, l, sink):
        """Return `_problem.scores.with_sink` for a sink in base e."""
        if self.separate_max:
            return with_sink(m, l, sink)
        return with_sink(m, l, sink * LOG2E, jnp.exp2)

    def log_sum(self, arrays) -> tuple[LogSum, Any]:
        """Return the `LogSum` of the first arrays or refs, and the remaining ones."""
        n = self.num_statistics
        return LogSum(None if n == 1 else arrays[0], arrays[n - 1]), arrays[n:]

    @property
    def num_statistics(self) -> int:
        """The number of arrays of a `LogSum`: 2 with a separate maximum, otherwise 1."""
        return 2 if self.separate_max else 1

    @property
    def num_row_outputs(self) -> int:
        """The number of outputs of the forward with a number for each row."""
        return self.num_statistics + self.max_logits

    @property
    def num_parts(self) -> int:
        """The number of arrays of an output: 2 of a `SplitOutput`, otherwise 1."""
        return 2 if self.split_output else 1

    def outputs(self, refs) -> tuple[Any, Any, Any]:
        """Return the refs before the forward's outputs, of the output, and of its rows."""
        n = self.num_row_outputs
        before = len(refs) - n - self.num_parts
        return refs[:before], refs[before:-n], refs[-n:]

    def parts_of_output(self, o, dtype) -> list:
        """Return what is rounded to `dtype`: the output and, if it is split, its low part."""
        if not self.split_output:
            return [o]
        if self.interpret:
            return list(SplitOutput.from_float32(o, dtype, split=True))
        # Compilers of kernels do not leave out a conversion and its inverse.
        return [o, o - o.astype(dtype).astype(jnp.float32)]

    def results_of_forward(self, arrays) -> tuple[Any, LogSum]:
        """Return the output, or a `SplitOutput`, and the `LogSum` of the forward's arrays."""
        outputs, rows = arrays[: self.num_parts], arrays[self.num_parts :]
        log_sum, rest = self.log_sum(rows)
        log_sum = log_sum._replace(max_logits=rest[0]) if rest else log_sum
        return SplitOutput(*outputs) if self.split_output else outputs[0], log_sum

    def max_logits_of(self, m) -> list:
        """Return the largest score of each row, from m in its base before sinks, if asked for."""
        if not self.max_logits:
            return []
        return [m if self.separate_max else m * LN2]

    def statistics(self, m, l, has_keys) -> list:
        """Return the arrays of a `LogSum`, from m in its base, l, and which rows have keys."""
        l_log2 = jnp.log2(l) if self.separate_max else m + jnp.log2(l)
        l_log2 = jnp.where(has_keys, l_log2, -jnp.inf)
        return [m, l_log2] if self.separate_max else [l_log2]

    def exp2(self, x):
        """Return 2 to the power of x, elementwise."""
        return arithmetic.exp2(x, interpret=self.interpret)


def softmax_shift(extras: Extras, log_sum: LogSum) -> LogSum:
    """Return the LSE as the backward subtracts it from scores: +inf in rows without weight.

    A bias of -inf leaves a row without weight although no mask hides it, and -inf - -inf is NaN.
    """
    m, l_log2, _ = log_sum
    return LogSum(m, jnp.where(l_log2 == -jnp.inf, jnp.inf, l_log2)) if extras.scores else log_sum


def make_spec(problem: Problem, tile, *, streamed: str, interpret: bool, groups: int = 1):
    """Return the spec of a kernel, its extras, and the table of the tiles to visit.

    The mask hides the positions past the end of the streamed side. The resident side needs no such
    mask, because rows that do not exist are not stored.

    Args:
        problem: the call.
        tile: block sizes, shortened here to the sequences.
        streamed: the streamed side, "q", "kv" or "both".
        interpret: whether the kernel runs in the interpreter.
        groups: the query heads of a program, in a kernel with resident queries.

    Returns:
        The spec; the extras, with the mask as the kernel evaluates it; and the table, None if every
        tile is full. The table has ranges int32 [1 or B, 1, tiles, 4] or lists [1 or B, 1 or N,
        tiles, 2 + tiles], see `_problem.blocks`. Where both sides are streamed it is int32 [1 or B,
        1 or N, query tiles, key tiles], positive where a tile is not empty.
    """
    q = Tiling(problem.q_len, block_for(problem.q_len, tile.block_q))
    kv = Tiling(problem.kv_len, block_for(problem.kv_len, tile.block_kv))
    mask = problem.mask.within(
        q=None if streamed == "kv" else q, kv=None if streamed == "q" else kv
    )
    all_see = mask.sees_diagonal and q.length == kv.length
    if not mask:
        sparsity, table = Sparsity.DENSE, None
    elif streamed == "both":
        sparsity, table = Sparsity.RANGES, jnp.asarray(mask.block_classes(q, kv).some, jnp.int32)
    elif mask.scattered:
        sparsity = Sparsity.LISTS
        table = mask.kv_lists(q, kv, groups) if streamed == "kv" else mask.q_lists(q, kv)
    else:
        sparsity = Sparsity.RANGES
        ranges = mask.kv_ranges if streamed == "kv" else mask.q_ranges
        table = jnp.asarray(ranges(q, kv))[:, None]
    extras = Extras(mask, problem.scores, problem.sinks, problem.dropout)
    spec = KernelSpec(
        extras=jax.tree.structure(extras),
        dtypes=tuple(x.dtype for x in jax.tree.leaves(extras)),
        sparsity=sparsity,
        mask_loads=bool(mask) and not all_see,
        separate_max=problem.large,
        max_logits=problem.max_logits,
        split_output=problem.split_output,
        q=q,
        kv=kv,
        num_stages=tile.num_stages,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        itemsize=problem.dtype.itemsize,
        precision=problem.precision,
        interpret=interpret,
    )
    return spec, extras, table
