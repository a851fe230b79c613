"""The building blocks of all kernels: products, exponentials, masked loads, operands of a program.

Three habits keep the inner loops short. On a GPU, issuing instructions is the limit before the
matrix units are.

* Exponentials are in base 2: exp(scale * s - m) = exp2(c * s - m_log2) with c = scale * log2(e).
  An element takes one multiply-add and one special-function instruction. Calls with a separate
  maximum take one more, see `KernelSpec.weights`.
* That pair is written in PTX and flushes denormals, because XLA neither contracts a product and a
  difference nor drops the denormal fix-up of its own exp2.
* Full tiles pay nothing for a mask, because `visit` has a loop of its own for partial tiles.

A kernel is compiled without the options that its call does not use, such as a bias or dropout.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._jax import compat
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.dropout import drop, kept
from pallas_flash._problem.masks import Mask
from pallas_flash._problem.operands import Operand
from pallas_flash._problem.problem import Extras, Problem, SplitOutput
from pallas_flash._problem.scores import LN2, LOG2E, Functions, LogSum, Scores, with_sink
from pallas_flash._problem.tile_sizes import MIN_ROWS
from pallas_flash._problem.traversal import Sparsity, in_tile

# Bytes of keys and values (or queries) that programs of different heads stream at the same time.
# They fit in the L2 cache of an A100 (40 MB) and of later GPUs beside everything else.
STREAMED_L2_BYTES = 32 * 2**20

# The smallest scale that kernels use. A scale of 0 would make a masked score NaN (-inf * 0), and
# this one still gives equal weights.
MIN_SCALE = 1e-30

# The largest soft cap that uses `_tanh`. The error by `_tanh` is 2^-22 times the cap. Up to this
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
        return Functions(_tanh) if quick and not self.interpret else Functions()

    def rows(self, b, h, q_tile, q_ref) -> Rows:
        """Load a query tile of one head."""
        pos = in_tile(q_tile, self.q.block)
        exist = valid_positions(self.q, pos)
        return Rows(load(q_ref, exist, self.head_dim), b, h, pos, exist)

    def kept(self, extras: Extras, *at, first=(0, 0)):
        """Return which probabilities dropout keeps at indices `at`; None means all of them.

        See `Dropout.kept`.
        """
        multiply = None if self.interpret else _multiply_wide
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
        """Return `x` where it is kept, else zero, for `x` that is then rounded to 16 bits.

        LLVM would round before a `where`, and then select and pair numbers of 16 bits.
        """
        if kept is None or self.interpret:
            return drop(kept, x)
        return _ptx("selp.f32 $0, $1, 0f00000000, $2;", x, kept)

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
        if not self.separate_max:
            return self.exp2_scaled(s, c, m)
        if self.interpret:
            # The minimum keeps compilers from fusing the difference with a product in s.
            return jnp.exp2((jnp.minimum(s, m) - m) * c)
        # Roundings are explicit for the same reason; 0f3FB8AA3B is log2(e).
        return _ptx(
            "{ .reg .f32 t; sub.rn.ftz.f32 t, $1, $2; mul.rn.ftz.f32 t, t, 0f3FB8AA3B; "
            "ex2.approx.ftz.f32 $0, t; }",
            *jnp.broadcast_arrays(s, m),
        )

    def probabilities(self, s, c, log_sum: LogSum):
        """Return exp(score - LSE) for scores s that c takes to base 2."""
        m, l_log2, _ = log_sum
        if m is None:
            return self.exp2_scaled(s, c, l_log2)
        if self.interpret:
            return jnp.exp2((jnp.minimum(s, m) - m) * c - l_log2)
        return _ptx(
            "{ .reg .f32 t, u; sub.rn.ftz.f32 t, $1, $2; neg.ftz.f32 u, $3; "
            "fma.rn.ftz.f32 t, t, 0f3FB8AA3B, u; ex2.approx.ftz.f32 $0, t; }",
            *jnp.broadcast_arrays(s, m, l_log2),
        )

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

    def exp2_scaled(self, s, c, shift):
        """Return 2 to the power of s * c - shift, elementwise."""
        if self.interpret:
            return jnp.exp2(s * c - shift)
        # The negation folds into the multiply-add.
        return _ptx(
            "{ .reg .f32 t; neg.ftz.f32 t, $3; fma.rn.ftz.f32 t, $1, $2, t; ex2.approx.ftz.f32 "
            "$0, t; }",
            *jnp.broadcast_arrays(s, c, shift),
        )

    def exp2(self, x):
        """Return 2 to the power of x, elementwise."""
        return jnp.exp2(x) if self.interpret else _ptx("ex2.approx.ftz.f32 $0, $1;", x)


def _ptx(code: str, *args, register="f", dtype=jnp.float32):
    registers = ("b" if x.dtype == bool else register for x in args)
    [out] = compat.triton().elementwise_inline_asm(
        code,
        args=args,
        constraints=",".join([f"={register}", *registers]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return out


def _multiply_wide(x, m: int):
    """Return `dropout.multiply_wide`. The assembler keeps one of the two equal products."""

    def half(shift: str):
        code = f"{{ .reg .u64 t; mul.wide.u32 t, $1, {m}; {shift}cvt.u32.u64 $0, t; }}"
        # Results of inline assembly are signless.
        return _ptx(code, x, register="r", dtype=jnp.int32).astype(jnp.uint32)

    return half("shr.u64 t, t, 32; "), half("")


@jax.custom_jvp
def _tanh(x):
    """Return tanh(x) = 1 - 2 / (1 + exp2(2 log2(e) x)), with an absolute error of about 2^-22.

    A soft cap multiplies that error.
    """
    return _ptx(
        "{ .reg .f32 t; mul.ftz.f32 t, $1, 0f4038AA3B; ex2.approx.ftz.f32 t, t; "
        "add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; "
        "fma.rn.ftz.f32 $0, t, 0fC0000000, 0f3F800000; }",
        x,
    )


@_tanh.defjvp
def _(primals, tangents):
    y = _tanh(*primals)
    return y, (1 - y * y) * tangents[0]


class RefOperand(Operand):
    """An operand in a kernel's memory, read at positions of a tile.

    Args:
        ref: the ref.
        dtype: the dtype of the operand; the ref may have another one, see `kernel_arrays`.
        ragged: whether positions can lie outside. Reads return zero there.
    """

    def __init__(self, ref, dtype, ragged: bool):
        super().__init__(ref, dtype)
        self._ragged = ragged

    def readable(self):
        # A masked `load` has no derivative, not even where nothing is differentiated.
        return Operand(self._array, self._dtype)

    def _read(self, index):
        shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
        if not shape:
            return self._array[index]
        ref = self._array.at[index]
        if not self._ragged:
            return compat.triton().load(ref)
        inside = functools.reduce(
            jnp.logical_and,
            [(i >= 0) & (i < n) for i, n in zip(index, self.shape, strict=True) if jnp.ndim(i)],
        )
        return compat.triton().load(ref, mask=jnp.broadcast_to(inside, shape), other=0)


def softmax_shift(extras: Extras, log_sum: LogSum) -> LogSum:
    """Return the LSE as the backward subtracts it from scores: +inf in rows without weight.

    A bias of -inf leaves a row without weight although no mask hides it, and -inf - -inf is NaN.
    """
    m, l_log2, _ = log_sum
    return LogSum(m, jnp.where(l_log2 == -jnp.inf, jnp.inf, l_log2)) if extras.scores else log_sum


def load_at(ref, index, rows, width: int):
    """Load rows from anywhere: `load` of rows at `index`, integers or int32 [rows] by axis."""
    column = lax.iota(jnp.int32, ref.shape[-1])[None, :]
    return load(ref.at[*(i[:, None] if jnp.ndim(i) else i for i in index), column], rows, width)


def load(ref, rows, width: int):
    """Load a tile [rows, padded width], zero where `rows` (bool or None) is False or past `width`.

    The compiler has only tiles whose sizes are powers of two. Loads of a padded width are masked.
    """
    mask = _tile_mask(ref.shape[-1], rows, width)
    if mask is None:
        return compat.triton().load(ref)
    other = 0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0
    return compat.triton().load(ref, mask=mask, other=other)


def store(ref, x, rows, width: int) -> None:
    """Store a tile where `rows` (bool [rows] or None) is True, and nothing beyond `width`."""
    compat.triton().store(ref, x.astype(ref.dtype), mask=_tile_mask(ref.shape[-1], rows, width))


def store_pairs(ref, x, rows, keys) -> None:
    """Store a tile where `rows` and `keys` (bool or None) are True."""
    inside = None if rows is None else rows[:, None]
    if keys is not None:
        inside = keys[None, :] if inside is None else inside & keys[None, :]
    inside = None if inside is None else jnp.broadcast_to(inside, x.shape)
    compat.triton().store(ref, x.astype(ref.dtype), mask=inside)


def _tile_mask(padded: int, rows, width: int):
    rows = None if rows is None else rows[:, None]
    columns = None if padded == width else (lax.iota(jnp.int32, padded) < width)[None, :]
    if rows is None or columns is None:
        return columns if rows is None else rows
    return rows & columns


def load_row(ref, inside):
    """Load one number a row, [rows], zero where not `inside` (bool [rows] or None)."""
    if inside is None:
        return compat.triton().load(ref)
    return compat.triton().load(ref, mask=inside, other=0.0)


def store_row(ref, x, inside) -> None:
    """Store one number a row where `inside` (bool [rows] or None)."""
    compat.triton().store(ref, x.astype(ref.dtype), mask=inside)


def valid_positions(tiling: Tiling, positions):
    """Return which positions of a tile exist; None if all of them do in every tile."""
    return positions < tiling.length if tiling.length % tiling.block else None


def visible_keys(mask: Mask, b, h, q_pos, k_pos, rows):
    """Return which keys any query of the tile sees, bool [block_kv].

    Partial tiles load only visible keys. The others may hold NaN, and 0 * NaN is NaN, or may not
    exist at all. The mask is evaluated once more here, transposed. The values for the scores would
    be kept in registers across the first product, and transposed the maximum runs within a warp.

    Args:
        mask: the mask.
        b: the batch element.
        h: the query head, or int32 [block_q] where rows differ.
        q_pos: int32 [block_q].
        k_pos: int32 [block_kv].
        rows: which queries exist, bool [block_q]; None means all.
    """
    h = h if jnp.ndim(h) == 0 else h[None, :]
    q_pos, k_pos = q_pos[None, :], k_pos[:, None]
    return _any(mask.allowed(b, h, q_pos, k_pos), rows, k_pos + q_pos)


def keys_to_load(spec: KernelSpec, mask: Mask, rows: Rows, k_pos, masked: bool):
    """Return the keys of a tile that are loaded, bool [block_kv]; None for all of them."""
    if not (spec.mask_loads and masked):
        return None
    return visible_keys(mask, rows.b, rows.h, rows.pos, k_pos, rows.valid)


def queries_with_keys(mask: Mask, b, h, q_pos, k_pos, keys):
    """Return which queries see any key of the tile, bool [block_q]; see `visible_keys`."""
    q_pos, k_pos = q_pos[:, None], k_pos[None, :]
    return _any(mask.allowed(b, h, q_pos, k_pos), keys, q_pos + k_pos)


def _any(ok, columns, tile):
    """Return whether a row of `ok` holds in any of `columns` (bool, or None for all)."""
    ok = jnp.broadcast_to(ok, tile.shape)
    ok = ok if columns is None else ok & columns[None, :]
    return jnp.max(ok.astype(jnp.int32), axis=1) > 0


def padded(width: int) -> int:
    """Return the tile width for a head dim: a power of two that matrix instructions take."""
    return max(MIN_ROWS, pl.next_power_of_2(width))


def block_for(length: int, block: int) -> int:
    """Return the block size, shortened to what the sequence needs."""
    return min(block, max(MIN_ROWS, pl.next_power_of_2(length)))


def whole_array(x) -> pl.BlockSpec:
    """Return the spec of a whole array, which every program gets and the kernel indexes."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def call(
    kernel, *operands, spec: KernelSpec, grid, in_specs, out_specs, out_shapes, tile, **options
):
    """Call `pl.pallas_call` for a kernel of this package.

    Args:
        kernel: takes `spec` and `options` as keywords; its name is the name in a profile.
        *operands: arrays.
        spec: what the kernel knows when it is compiled.
        grid: axis 0 varies fastest.
        in_specs: one BlockSpec for each operand.
        out_specs: one for each output.
        out_shapes: (shape, dtype) of each output.
        tile: the tile, which has the number of warps and stages.
        **options: further keywords for the kernel.
    """

    def body(*refs):
        # In x64 mode, Python's numbers would make the kernel count in int64 and round from float64.
        with jax.enable_x64(False):
            kernel(*refs, spec=spec, **options)

    body.__name__ = body.__qualname__ = kernel.__name__
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[compat.out_shape(shape, dtype) for shape, dtype in out_shapes],
        interpret=spec.interpret,
        name=kernel.__name__,
        compiler_params=None
        if spec.interpret
        else compat.compiler_params(tile.num_warps, tile.num_stages),
    )(*operands)


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
        tiles, 2 + tiles], see `_problem.masks`. Where both sides are streamed it is int32 [1 or B,
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


def kernel_arrays(extras: Extras) -> list:
    """Return its arrays as kernels take them: bools as int8, because bools have no pointers."""
    return [x.astype(jnp.int8) if x.dtype == jnp.bool_ else x for x in jax.tree.leaves(extras)]


def operands(extras: Extras, table, row, heads: int | None = None):
    """Return the operands after the common ones, and their specs: the table, then extras' arrays.

    Args:
        extras: every program gets its arrays whole.
        table: the table of `make_spec`.
        row: maps grid indices to the batch element, the block of heads and the tile.
        heads: the heads of a block; None means that a program has one head.
    """
    arrays = kernel_arrays(extras)
    specs = [whole_array(x) for x in arrays]
    if table is None:
        return arrays, specs
    batch, by_head = table.shape[0] > 1, table.shape[1] > 1

    def index(*ids):
        b, h, tile = row(*ids)
        return (b if batch else 0, h if by_head else 0, tile, 0)

    block = (None, heads if by_head else None, None, table.shape[-1])
    return [table, *arrays], [pl.BlockSpec(block, index), *specs]


def load_tables(refs, spec: KernelSpec, streamed: Tiling):
    """Return the tiles to visit, as a function of the head, and the extras; see `operands`."""
    if spec.sparsity is Sparsity.DENSE:
        return lambda g: (0, 0, streamed.count, streamed.count), spec.load_extras(refs)
    table_ref, *refs = refs

    def tiles(*row):
        if spec.sparsity is Sparsity.LISTS:
            return table_ref[*row, 0], table_ref[*row, 1], lambda t: table_ref[*row, 2 + t]
        return [table_ref[*row, i] for i in range(4)]

    if len(table_ref.shape) > 1:
        # A program has several heads, and each head has its own tiles.
        return tiles, spec.load_extras(refs)
    row = tiles()
    return lambda g: row, spec.load_extras(refs)


def side_by_side(problem: Problem, mask: Mask, length: int) -> int:
    """Return how many key/value heads have their programs side by side in the grid.

    The result divides the number of key/value heads. Under a mask tiles differ in work. If one head
    came after the other, a heavy tile of the last head would start late, and most of the GPU would
    wait for it. But the L2 cache must hold what these heads stream, `length` positions of each.
    """
    p = problem
    if not mask:
        return 1
    streamed = length * (p.head_dim + p.value_dim) * p.dtype.itemsize
    counts = (n for n in range(p.num_kv_heads, 1, -1) if p.num_kv_heads % n == 0)
    return next((n for n in counts if n * streamed <= STREAMED_L2_BYTES), 1)


class QueryTiles:
    """The grid and the block specs of kernels with a resident query tile.

    Grid axes: query head of its group, key/value head of those side by side, query tile, the rest
    of the key/value head, batch element. Query heads that share keys and values are neighbours on
    the fastest axis, so that they meet in the L2 cache.
    """

    def __init__(self, problem: Problem, spec: KernelSpec, mask: Mask):
        p, count = problem, spec.q.count
        self.problem, self.spec = problem, spec
        self.heads = side_by_side(p, mask, p.kv_len)
        self.grid = (p.groups, self.heads, count, p.num_kv_heads // self.heads, p.batch)
        # Under a causal mask the last tiles have the most work. They start first, so that no heavy
        # tile is left over at the end.
        self.tile_of = (lambda i: count - 1 - i) if mask.later_rows_see_more else (lambda i: i)

    def index(self, g, k, i, outer, b):
        """Return the batch element, the query head and the tile of grid indices."""
        return b, self._kv_head(k, outer) * self.problem.groups + g, self.tile_of(i)

    def _kv_head(self, k, outer):
        return outer * self.heads + k

    def here(self):
        """Return the batch element, the query head and the tile of this program."""
        return self.index(*map(pl.program_id, range(5)))

    def operands(self, extras: Extras, table):
        """Return the operands after the common ones, and their specs; see `operands`."""
        return operands(extras, table, self.index)

    def rows(self, width: int) -> pl.BlockSpec:
        """Return the spec of a tile of [B, T, N, width]."""

        def index(*ids):
            b, h, i = self.index(*ids)
            return b, i, h, 0

        return pl.BlockSpec((None, self.spec.q.block, None, padded(width)), index)

    def keys(self, width: int) -> pl.BlockSpec:
        """Return the spec of one head of [B, S, K, width]."""
        return pl.BlockSpec(
            (None, self.problem.kv_len, None, padded(width)),
            lambda g, k, i, outer, b: (b, 0, self._kv_head(k, outer), 0),
        )

    def row_statistic(self) -> pl.BlockSpec:
        """Return the spec of a tile of [B, N, T]."""
        return pl.BlockSpec((None, None, self.spec.q.block), self.index)
