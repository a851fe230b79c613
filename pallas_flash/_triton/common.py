"""What the kernels share: products, exponentials, masked loads, and how operands reach a program.

Three habits keep the inner loops lean on a GPU, where issuing instructions is the limit before
multiplying is:

* everything is in base 2: exp(scale * s - m) = exp2(c * s - m_log2) with c = scale * log2(e), one
  multiply-add and one special-function instruction an element (one more where a call can make
  scores large, see `Static.weights`);
* that pair is spelt in PTX, flushing denormals, because XLA neither contracts a product and a
  difference nor drops the denormal fix-up of its own exp2;
* masks cost nothing on full tiles: `visit` passes them by under a branch or in a loop of its own.

What a call does not ask for, such as a bias or dropout, is not there when its kernel is compiled.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash import _compat
from pallas_flash._dropout import drop, kept
from pallas_flash._masks import Mask, Tiling
from pallas_flash._operands import Operand
from pallas_flash._problem import Extras, Problem
from pallas_flash._scores import LOG2E, Functions, LogSum, Scores, with_sink
from pallas_flash._tiling.sizes import MIN_ROWS
from pallas_flash._visits import Edges, in_tile

# Bytes of keys and values (or queries) that programs of different heads stream at the same time: so
# many stay in the L2 cache of an A100 (40 MB) and later, beside all else.
L2_SHARE = 32 * 2**20

# The smallest scale used: -inf * 0 would be NaN where a score is masked, and this one still gives
# equal weights.
MIN_SCALE = 1e-30

# The largest soft cap at which the error by `_tanh`, 2^-22 times the cap, does not show in the LSE,
# which is float32 in 16 bits, too. (At 2^10 the LSE was 10 times as far off as dense attention's.)
MAX_QUICK_CAP = 64.0


class Rows(NamedTuple):
    """Queries that stay in a program.

    Attributes:
        q: [rows, padded H].
        b: their example.
        h: their head, or int32 [rows].
        pos: their positions, int32 [rows].
        exist: which of them exist, bool [rows], or None for all.
    """

    q: Any
    b: Any
    h: Any
    pos: Any
    exist: Any

    def at(self, k_pos):
        """Their indices and those of keys, to broadcast to [rows, keys]."""
        h = self.h if jnp.ndim(self.h) == 0 else self.h[:, None]
        return self.b, h, self.pos[:, None], k_pos[None, :]


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel knows when it is compiled."""

    extras: Any
    dtypes: tuple[Any, ...]  # Of the arrays of `extras`, before `leaves`.
    edges: Edges
    unseen: bool  # Whether there may be a key that no query sees, or a query that sees none.
    large: bool  # Whether scores may be, see `Problem.large`; then m is natural, else in base 2.
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
        return self.edges is not Edges.NONE

    def load_extras(self, refs) -> Extras:
        """What `Extras` held, with references in place of arrays."""
        ragged = self.q.length % self.q.block > 0 or self.kv.length % self.kv.block > 0
        operands = zip(refs, self.dtypes, strict=True)
        return jax.tree.unflatten(self.extras, [RefOperand(*x, ragged) for x in operands])

    def logits(self, extras: Extras, s, scale, *at):
        """Scores and a factor c that takes them to base 2, for products s at indices `at`."""
        if not extras.scores:
            if self.large:
                return s * scale, LOG2E
            return s, jnp.maximum(scale, MIN_SCALE) * LOG2E
        functions = self._functions(extras.scores)
        return extras.scores.logits(s * scale, *at, functions=functions), LOG2E

    def logits_vjp(self, extras: Extras, s, scale, *at):
        """As `logits`, and a function that takes a cotangent of the scores to one of scale * s."""
        if not extras.scores:
            return *self.logits(extras, s, scale), lambda ds: ds
        logits, pull = extras.scores.vjp(s * scale, *at, functions=self._functions(extras.scores))
        return logits, LOG2E, pull

    def _functions(self, scores: Scores) -> Functions:
        # Else the library's function, which is exact to the last place (counted: 18 instructions
        # an element, where the quick one has 8).
        quick = self.itemsize == 2 and (scores.soft_cap or 0) <= MAX_QUICK_CAP
        return Functions(_tanh) if quick and not self.interpret else Functions()

    def rows(self, b, h, q_tile, q_ref) -> Rows:
        """Load the rows of a query tile of one head."""
        pos = in_tile(q_tile, self.q.block)
        exist = existing(self.q, pos)
        return Rows(load(q_ref, exist, self.head_dim), b, h, pos, exist)

    def kept(self, extras: Extras, *at, first=(0, 0)):
        """Which probabilities dropout keeps, at indices `at`; None for all. See `Dropout.kept`."""
        multiply = None if self.interpret else _multiply_wide
        return kept(extras.dropout, at, first=first, multiply=multiply)

    def kept_in_tile(self, extras: Extras, b, h, q_tile, kv_tile, *, transposed: bool = False):
        """As `kept`, for [block_q, block_kv], or transposed.

        Indices count within the tile, where the compiler knows them: so it finds the elements of a
        thread that share a counter.
        """
        block_q, block_kv = self.q.block, self.kv.block
        q, k = lax.iota(jnp.int32, block_q), lax.iota(jnp.int32, block_kv)
        q, k = (q[None, :], k[:, None]) if transposed else (q[:, None], k[None, :])
        first = q_tile * block_q, kv_tile * block_kv
        return self.kept(extras, b, h, q, k, first=first)

    def drop(self, kept, x):
        """`x` where it is kept, else zero; for `x` that is then rounded to 16 bits.

        LLVM would round before a `where`, and then choose and pair numbers of 16 bits.
        """
        if kept is None or self.interpret:
            return drop(kept, x)
        return _ptx("selp.f32 $0, $1, 0f00000000, $2;", x, kept)

    def fence(self, x, tile, side: Tiling):
        """`x`, which depends on the tile's first product, behind a branch that is always taken.

        What is loaded after it is waited for here. Else Triton waits for all that a tile needs
        before its first product; with two stages its copies have just been issued then. Timed on an
        H200 with two stages: 10 % at head size 256. With three it costs 1 to 10 %.
        """
        if self.num_stages != 2 or self.interpret:
            return x
        # A condition that Triton leaves alone, and that is no more than a comparison in the end.
        return lax.cond(tile < side.count, lambda x: x, lambda x: 0.5 * x, x)

    def dot(self, a, b):
        """The product a @ b, accumulated in float32."""
        return self._dot(a, b, 0)

    def dot_t(self, a, b):
        """The product a @ b.T: matrix units read a transposed operand for free."""
        return self._dot(a, b, 1)

    def _dot(self, a, b, axis):
        return lax.dot_general(
            a,
            b,
            (((1,), (axis,)), ((), ())),
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )

    def top(self, s, c):
        """The largest score of each row, [rows], in the base of m."""
        highest = jnp.max(s, axis=1)
        return highest if self.large else highest * c

    def weights(self, s, c, m):
        """exp(score - maximum) for scores s that c takes to base 2, and m in its base.

        One rounding of m, one multiply-add and one exponential: the largest weight is then 2 to the
        power of that rounding's error, about 2^-24 of the score. Sums of weights have it, too, and
        it cancels while no weight overflows: in float32 for scores to 1e9, in float16 to 1e8. What
        is not large by `Problem.large` comes there by huge queries and keys alone.

        Large scores are rounded before m is subtracted, so that the largest weight is 1.
        """
        if not self.large:
            return self.exp2_scaled(s, c, m)
        if self.interpret:
            # A minimum, so that no compiler fuses the difference with a product in s.
            return jnp.exp2((jnp.minimum(s, m) - m) * c)
        # For the same reason roundings are spelt out; 0f3FB8AA3B is log2(e).
        return _ptx(
            "{ .reg .f32 t; sub.rn.ftz.f32 t, $1, $2; mul.rn.ftz.f32 t, t, 0f3FB8AA3B; "
            "ex2.approx.ftz.f32 $0, t; }",
            *jnp.broadcast_arrays(s, m),
        )

    def probabilities(self, s, c, log_sum: LogSum):
        """exp(score - LSE) for scores s that c takes to base 2."""
        m, l_log2 = log_sum
        if m is None:
            return self.exp2_scaled(s, c, l_log2)
        if self.interpret:
            return jnp.exp2((jnp.minimum(s, m) - m) * c - l_log2)
        return _ptx(
            "{ .reg .f32 t, u; sub.rn.ftz.f32 t, $1, $2; neg.ftz.f32 u, $3; "
            "fma.rn.ftz.f32 t, t, 0f3FB8AA3B, u; ex2.approx.ftz.f32 $0, t; }",
            *jnp.broadcast_arrays(s, m, l_log2),
        )

    def shrink(self, m, to, exp2=jnp.exp2):
        """What weights relative to m are multiplied with where they are to be relative to `to`."""
        return exp2((m - to) * LOG2E if self.large else m - to)

    def with_sink(self, m, l, sink):
        """As `_scores.with_sink`, for a natural sink."""
        if self.large:
            return with_sink(m, l, sink)
        return with_sink(m, l, sink * LOG2E, jnp.exp2)

    def log_sum(self, arrays) -> tuple[LogSum, Any]:
        """The `LogSum` that the first one or two arrays or references make, and the others."""
        n = self.num_statistics
        return LogSum(None if n == 1 else arrays[0], arrays[n - 1]), arrays[n:]

    @property
    def num_statistics(self) -> int:
        """Arrays that a `LogSum` has."""
        return 2 if self.large else 1

    def statistics(self, m, l, alive) -> list:
        """Those of a `LogSum`, from m in its base and l, for rows that have seen something."""
        l_log2 = jnp.where(alive, jnp.log2(l) if self.large else m + jnp.log2(l), -jnp.inf)
        return [m, l_log2] if self.large else [l_log2]

    def exp2_scaled(self, s, c, shift):
        """2 to the power of s * c - shift, elementwise."""
        if self.interpret:
            return jnp.exp2(s * c - shift)
        # The negation is free: it folds into the multiply-add.
        return _ptx(
            "{ .reg .f32 t; neg.ftz.f32 t, $3; fma.rn.ftz.f32 t, $1, $2, t; ex2.approx.ftz.f32 "
            "$0, t; }",
            *jnp.broadcast_arrays(s, c, shift),
        )

    def exp2(self, x):
        """2 to the power of x, elementwise."""
        return jnp.exp2(x) if self.interpret else _ptx("ex2.approx.ftz.f32 $0, $1;", x)


def _ptx(code: str, *args, register="f", dtype=jnp.float32):
    registers = ("b" if x.dtype == bool else register for x in args)
    [out] = _compat.triton().elementwise_inline_asm(
        code,
        args=args,
        constraints=",".join([f"={register}", *registers]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return out


def _multiply_wide(x, m: int):
    """As `_dropout.multiply_wide`; of the two equal products the assembler keeps one."""

    def half(shift: str):
        code = f"{{ .reg .u64 t; mul.wide.u32 t, $1, {m}; {shift}cvt.u32.u64 $0, t; }}"
        # Results of assembly have no sign.
        return _ptx(code, x, register="r", dtype=jnp.int32).astype(jnp.uint32)

    return half("shr.u64 t, t, 32; "), half("")


@jax.custom_jvp
def _tanh(x):
    """Hyperbolic tangent: 1 - 2 / (1 + exp2(2 log2(e) x)), with an absolute error of about 2^-22.

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
        ref: the reference.
        dtype: what its numbers mean.
        ragged: whether positions can be outside; what is read there is zero.
    """

    def __init__(self, ref, dtype, ragged: bool):
        super().__init__(ref, dtype)
        self._ragged = ragged

    def for_user(self):
        # `load` with a mask has no derivative, not even where nothing is to be differentiated.
        return Operand(self._array, self._dtype)

    def _read(self, index):
        shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
        if not shape:
            return self._array[index]
        ref = self._array.at[index]
        if not self._ragged:
            return _compat.triton().load(ref)
        inside = functools.reduce(
            jnp.logical_and,
            [(i >= 0) & (i < n) for i, n in zip(index, self.shape, strict=True) if jnp.ndim(i)],
        )
        return _compat.triton().load(ref, mask=jnp.broadcast_to(inside, shape), other=0)


def subtracted(extras: Extras, log_sum: LogSum) -> LogSum:
    """What is subtracted from scores: the LSE, or +inf where no weight is to be left.

    A bias of -inf may leave a row without weight and without a mask; -inf - -inf would be NaN.
    """
    m, l_log2 = log_sum
    return LogSum(m, jnp.where(l_log2 == -jnp.inf, jnp.inf, l_log2)) if extras.scores else log_sum


def load(ref, rows, width: int):
    """A tile [rows, padded width], zero where `rows` (bool or None) is False and past `width`.

    Widths are padded to a power of two because the compiler has no other tiles, so every load of
    one is masked.
    """
    mask = _tile_mask(ref.shape[-1], rows, width)
    if mask is None:
        return _compat.triton().load(ref)
    return _compat.triton().load(ref, mask=mask, other=0.0)


def store(ref, x, rows, width: int) -> None:
    """Stores a tile where `rows` (bool [rows] or None) is True, and nothing beyond `width`."""
    _compat.triton().store(ref, x.astype(ref.dtype), mask=_tile_mask(ref.shape[-1], rows, width))


def store_pairs(ref, x, rows, keys) -> None:
    """Stores a tile where `rows` and `keys` (bool or None) are True."""
    inside = None if rows is None else rows[:, None]
    if keys is not None:
        inside = keys[None, :] if inside is None else inside & keys[None, :]
    inside = None if inside is None else jnp.broadcast_to(inside, x.shape)
    _compat.triton().store(ref, x.astype(ref.dtype), mask=inside)


def _tile_mask(padded: int, rows, width: int):
    rows = None if rows is None else rows[:, None]
    columns = None if padded == width else (lax.iota(jnp.int32, padded) < width)[None, :]
    if rows is None or columns is None:
        return columns if rows is None else rows
    return rows & columns


def load_row(ref, inside):
    """One number a row, [rows], zero where not `inside` (bool [rows] or None)."""
    if inside is None:
        return _compat.triton().load(ref)
    return _compat.triton().load(ref, mask=inside, other=0.0)


def store_row(ref, x, inside) -> None:
    """Stores one number a row where `inside` (bool [rows] or None)."""
    _compat.triton().store(ref, x.astype(ref.dtype), mask=inside)


def existing(tiling: Tiling, positions):
    """Which positions of a tile exist; None if all of them do in every tile."""
    return positions < tiling.length if tiling.length % tiling.block else None


def seen_keys(mask: Mask, b, h, q_pos, k_pos, rows):
    """Bool [block_kv]: which keys any query of the tile sees; `rows` are those that exist, or None.

    Where something may be unseen, masked tiles load only what is seen: the rest may hold NaN, and
    0 * NaN is NaN, or may not exist at all. The predicate is evaluated anew and transposed: reusing
    the one for the scores would keep it in registers across the first product, and this way the
    maximum runs along a row, within a warp. `h` is a number, or int32 [block_q] if rows differ.
    """
    h = h if jnp.ndim(h) == 0 else h[None, :]
    q_pos, k_pos = q_pos[None, :], k_pos[:, None]
    return _any(mask.allowed(b, h, q_pos, k_pos), rows, k_pos + q_pos)


def seen_queries(mask: Mask, b, h, q_pos, k_pos, keys):
    """Bool [block_q]: which queries see any key of the tile; as `seen_keys`."""
    q_pos, k_pos = q_pos[:, None], k_pos[None, :]
    return _any(mask.allowed(b, h, q_pos, k_pos), keys, q_pos + k_pos)


def _any(ok, columns, tile):
    """Whether a row of `ok` holds in any of `columns` (bool, or None for all)."""
    ok = jnp.broadcast_to(ok, tile.shape)
    ok = ok if columns is None else ok & columns[None, :]
    return jnp.max(ok.astype(jnp.int32), axis=1) > 0


def padded(width: int) -> int:
    """The tile width for a head size: a power of two that matrix instructions take."""
    return max(MIN_ROWS, pl.next_power_of_2(width))


def block_for(length: int, block: int) -> int:
    """A tile no longer than the sequence needs."""
    return min(block, max(MIN_ROWS, pl.next_power_of_2(length)))


def whole(x) -> pl.BlockSpec:
    """The whole array, for every program; the kernel indexes it."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def call(kernel, *operands, static: Static, grid, in_specs, out_specs, out_shapes, tile, **options):
    """`pl.pallas_call` for this package's kernels.

    Args:
        kernel: takes `static` and `options` as keywords; its name is the name in a profile.
        *operands: arrays.
        static: what the kernel knows at compile time.
        grid: axis 0 varies fastest.
        in_specs: one BlockSpec for each operand.
        out_specs: one for each output.
        out_shapes: (shape, dtype) of each output.
        tile: its warps and stages are used.
        **options: further keywords for the kernel.
    """

    def body(*refs):
        # In x64 mode, Python's numbers would make it count in int64 and round from float64.
        with jax.enable_x64(False):
            kernel(*refs, static=static, **options)

    body.__name__ = body.__qualname__ = kernel.__name__
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[_compat.out_shape(shape, dtype) for shape, dtype in out_shapes],
        interpret=static.interpret,
        name=kernel.__name__,
        compiler_params=None
        if static.interpret
        else _compat.compiler_params(tile.num_warps, tile.num_stages),
    )(*operands)


def make_static(problem: Problem, tile, *, flow: str, interpret: bool, groups: int = 1):
    """What a kernel over `tile` knows, its extras, and the tiles that stream past it.

    The mask knows the ragged end of the side that streams past. That of the tile that stays needs
    none, because its rows are not stored; `seen_keys` and `seen_queries` are told of it.

    Args:
        problem: the call.
        tile: block sizes, shortened here where the sequences are.
        flow: the side that streams past, "q", "kv" or "both".
        interpret: whether the kernel runs in the interpreter.
        groups: the heads that a program of a kernel over queries has.

    Returns:
        The static part, the extras with the mask as the kernel evaluates it, and a table: ranges
        int32 [1 or B, 1, tiles, 4] or lists [1 or B, 1 or N, tiles, 2 + tiles], see _masks, or
        where both sides stream int32 [1 or B, 1 or N, query tiles, key tiles], positive where
        something is seen; None if every tile is full.
    """
    q = Tiling(problem.q_len, block_for(problem.q_len, tile.block_q))
    kv = Tiling(problem.kv_len, block_for(problem.kv_len, tile.block_kv))
    mask = problem.mask.within(q=None if flow == "kv" else q, kv=None if flow == "q" else kv)
    unseen = not (mask.reflexive and q.length == kv.length)
    if not mask:
        edges, table = Edges.NONE, None
    elif flow == "both":
        edges, table = Edges.APART, jnp.asarray(mask.tile_classes(q, kv).some, jnp.int32)
    elif mask.scattered:
        edges = Edges.LISTED
        table = mask.kv_lists(q, kv, groups) if flow == "kv" else mask.q_lists(q, kv)
    else:
        edges = Edges.APART
        ranges = mask.kv_ranges if flow == "kv" else mask.q_ranges
        table = jnp.asarray(ranges(q, kv))[:, None]
    extras = Extras(mask, problem.scores, problem.sinks, problem.dropout)
    static = Static(
        extras=jax.tree.structure(extras),
        dtypes=tuple(x.dtype for x in jax.tree.leaves(extras)),
        edges=edges,
        unseen=bool(mask) and unseen,
        large=problem.large,
        q=q,
        kv=kv,
        num_stages=tile.num_stages,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        itemsize=problem.dtype.itemsize,
        precision=problem.precision,
        interpret=interpret,
    )
    return static, extras, table


def leaves(extras: Extras) -> list:
    """Its arrays as kernels take them: no bools, which have no pointers."""
    return [x.astype(jnp.int8) if x.dtype == jnp.bool_ else x for x in jax.tree.leaves(extras)]


def operands(extras: Extras, table, row, heads: int | None = None):
    """The operands behind the common ones, and their specs: the table, then the extras' arrays.

    Args:
        extras: its arrays are given to every program whole.
        table: what `make_static` returned.
        row: a program's grid indices to its example, its block of heads and its tile.
        heads: the heads in a block if there are several, else None.
    """
    arrays = leaves(extras)
    specs = [whole(x) for x in arrays]
    if table is None:
        return arrays, specs
    batch, by_head = table.shape[0] > 1, table.shape[1] > 1

    def index(*ids):
        b, h, tile = row(*ids)
        return (b if batch else 0, h if by_head else 0, tile, 0)

    block = (None, heads if by_head else None, None, table.shape[-1])
    return [table, *arrays], [pl.BlockSpec(block, index), *specs]


def load_tables(refs, static: Static, flow: Tiling):
    """What `operands` handed in: the tiles to visit, as a function of the head, and the extras."""
    if static.edges is Edges.NONE:
        return lambda g: (0, 0, flow.count, flow.count), static.load_extras(refs)
    table_ref, *refs = refs

    def tiles(*row):
        if static.edges is Edges.LISTED:
            return table_ref[*row, 0], table_ref[*row, 1], lambda t: table_ref[*row, 2 + t]
        return [table_ref[*row, i] for i in range(4)]

    if len(table_ref.shape) > 1:
        # A program has several heads, and each of them tiles of its own.
        return tiles, static.load_extras(refs)
    row = tiles()
    return lambda g: row, static.load_extras(refs)


def side_by_side(problem: Problem, mask: Mask, length: int) -> int:
    """How many key/value heads have their programs side by side, a divisor of their number.

    Under a mask tiles differ in work. If one head came after the other, a heavy tile of the last
    head would start late, and most of the GPU would wait for it (timed on an H200, causal, at 4096
    tokens: 3 to 14 %). But what the heads stream, `length` positions of each, is to stay in the
    cache.
    """
    p = problem
    if not mask:
        return 1
    streamed = length * (p.head_dim + p.value_dim) * p.dtype.itemsize
    counts = (n for n in range(p.num_kv_heads, 1, -1) if p.num_kv_heads % n == 0)
    return next((n for n in counts if n * streamed <= L2_SHARE), 1)


class QueryTiles:
    """The grid and the specs of kernels in which a query tile stays.

    Grid axes: query head of its group, key/value head of those side by side, query tile, the rest
    of the key/value head, example. Query heads that share keys and values are neighbours on the
    fastest axis, so that they meet in the L2 cache.
    """

    def __init__(self, problem: Problem, static: Static, mask: Mask):
        p, count = problem, static.q.count
        self.problem, self.static = problem, static
        self.heads = side_by_side(p, mask, p.kv_len)
        self.grid = (p.groups, self.heads, count, p.num_kv_heads // self.heads, p.batch)
        # Under a causal mask the last tiles have the most work; they start first, so that none is
        # left over at the end.
        self.tile_of = (lambda i: count - 1 - i) if mask.grows else (lambda i: i)

    def index(self, g, k, i, outer, b):
        """Grid indices to the example, the query head and the tile."""
        return b, self._kv_head(k, outer) * self.problem.groups + g, self.tile_of(i)

    def _kv_head(self, k, outer):
        return outer * self.heads + k

    def here(self):
        """One program's example, query head and number of its tile."""
        return self.index(*map(pl.program_id, range(5)))

    def operands(self, extras: Extras, table):
        """As the function `operands`."""
        return operands(extras, table, self.index)

    def rows(self, width: int) -> pl.BlockSpec:
        """A tile of [B, T, N, width]."""

        def index(*ids):
            b, h, i = self.index(*ids)
            return b, i, h, 0

        return pl.BlockSpec((None, self.static.q.block, None, padded(width)), index)

    def keys(self, width: int) -> pl.BlockSpec:
        """All of one head of [B, S, K, width]."""
        return pl.BlockSpec(
            (None, self.problem.kv_len, None, padded(width)),
            lambda g, k, i, outer, b: (b, 0, self._kv_head(k, outer), 0),
        )

    def row_statistic(self) -> pl.BlockSpec:
        """A tile of [B, N, T]."""
        return pl.BlockSpec((None, None, self.static.q.block), self.index)
