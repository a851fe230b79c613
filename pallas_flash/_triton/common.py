"""What the kernels share: products, exponentials, masked loads, and how operands reach a program.

Three habits keep the inner loops lean on a GPU, where issuing instructions is the limit before
multiplying is:

* everything is in base 2: exp(scale * s - m) = exp2(c * s - m_log2) with c = scale * log2(e), one
  multiply-add and one special-function instruction an element;
* that pair is spelt in PTX, flushing denormals, because XLA neither contracts a product and a
  difference nor drops the denormal fix-up of its own exp2;
* masks cost nothing on full tiles: `visit` passes them by under a branch or in a loop of its own.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash import _compat
from pallas_flash._masks import Edges, Mask, Tiling
from pallas_flash._problem import Problem

LOG2E = math.log2(math.e)

# The smallest scale used: -inf * 0 would be NaN where a score is masked, and this one still gives
# equal weights.
MIN_SCALE = 1e-30


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel knows when it is compiled."""

    mask: Any
    edges: Edges
    unseen: bool  # Whether there may be a key that no query sees, or a query that sees none.
    q: Tiling
    kv: Tiling
    head_dim: int
    value_dim: int
    precision: Any
    interpret: bool

    def load_mask(self, refs) -> Mask:
        """The mask with references in place of arrays."""
        return jax.tree.unflatten(self.mask, refs)

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


def _ptx(code: str, *args):
    [out] = _compat.triton().elementwise_inline_asm(
        code,
        args=args,
        constraints=",".join(["=f"] + ["f"] * len(args)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )
    return out


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


def seen_keys(mask: Mask, b, q_pos, k_pos, rows):
    """Bool [block_kv]: which keys any query of the tile sees; `rows` are those that exist, or None.

    Where something may be unseen, masked tiles load only what is seen: the rest may hold NaN, and
    0 * NaN is NaN, or may not exist at all. The predicate is evaluated anew and transposed: reusing
    the one for the scores would keep it in registers across the first product, and this way the
    maximum runs along a row, within a warp.
    """
    return _any(mask.allowed(b, q_pos[None, :], k_pos[:, None]), rows)


def seen_queries(mask: Mask, b, q_pos, k_pos, keys):
    """Bool [block_q]: which queries see any key of the tile; as `seen_keys`."""
    return _any(mask.allowed(b, q_pos[:, None], k_pos[None, :]), keys)


def _any(ok, columns):
    """Whether a row of `ok` holds in any of `columns` (bool, or None for all)."""
    ok = ok if columns is None else ok & columns[None, :]
    return jnp.max(ok.astype(jnp.int32), axis=1) > 0


def padded(width: int) -> int:
    """The tile width for a head size: a power of two that matrix instructions take."""
    return max(16, pl.next_power_of_2(width))


def block_for(length: int, block: int) -> int:
    """A tile no longer than the sequence needs."""
    return min(block, max(16, pl.next_power_of_2(length)))


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
        out_shape=[_compat.varying_like(shape, dtype, *operands) for shape, dtype in out_shapes],
        interpret=static.interpret,
        name=kernel.__name__,
        compiler_params=None
        if static.interpret
        else _compat.compiler_params(tile.num_warps, tile.num_stages),
    )(*operands)


def make_static(problem: Problem, tile, *, flow: str, interpret: bool, branch: bool = False):
    """What a kernel over `tile` knows, its mask, and the ranges of the tiles that stream past it.

    The mask knows the ragged end of the side that streams past. That of the tile that stays needs
    none, because its rows are not stored; `seen_keys` and `seen_queries` are told of it.

    Args:
        problem: the call.
        tile: block sizes, shortened here where the sequences are.
        flow: the side that streams past, "q" or "kv".
        interpret: whether the kernel runs in the interpreter.
        branch: whether the kernel can mask under a branch, where nothing is unseen.

    Returns:
        The static part, the mask as the kernel evaluates it, and `Mask.kv_ranges` or
        `Mask.q_ranges`, None if every tile is full.
    """
    q = Tiling(problem.q_len, block_for(problem.q_len, tile.block_q))
    kv = Tiling(problem.kv_len, block_for(problem.kv_len, tile.block_kv))
    if flow == "kv":
        mask = problem.mask.within(kv=kv)
        ranges = mask.kv_ranges(q, kv) if mask else None
    else:
        mask = problem.mask.within(q=q)
        ranges = mask.q_ranges(q, kv) if mask else None
    unseen = not (mask.reflexive and q.length == kv.length)
    apart_or_branch = Edges.BRANCH if branch and not unseen else Edges.APART
    static = Static(
        mask=jax.tree.structure(mask),
        edges=apart_or_branch if mask else Edges.NONE,
        unseen=bool(mask) and unseen,
        q=q,
        kv=kv,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        precision=problem.precision,
        interpret=interpret,
    )
    return static, mask, ranges


def tables(mask: Mask, ranges, tile_of, *, tile_axis: int = 1, batch_axis: int = 3):
    """The operands that describe the mask, and their specs: tile ranges, then the mask's arrays.

    Args:
        mask: its arrays are given to every program whole.
        ranges: int32 [1 or B, tiles, 4], or None if every tile is full.
        tile_of: the tile number for a program's index along `tile_axis`.
        tile_axis: the grid axis that counts the tiles that stay.
        batch_axis: the grid axis that counts examples.
    """
    arrays = jax.tree.leaves(mask)
    specs = [whole(x) for x in arrays]
    if ranges is None:
        return arrays, specs
    ranges = jnp.asarray(ranges)

    def row(*ids):
        return (ids[batch_axis] if ranges.shape[0] > 1 else 0, tile_of(ids[tile_axis]), 0)

    return [ranges, *arrays], [pl.BlockSpec((None, None, 4), row), *specs]


def load_tables(refs, static: Static, flow: Tiling):
    """One program's tile range over `flow`, and its mask of references: what `tables` handed in."""
    if static.edges is Edges.NONE:
        return (0, 0, flow.count, flow.count), static.load_mask(refs)
    ranges_ref, *refs = refs
    return [ranges_ref[i] for i in range(4)], static.load_mask(refs)


class QueryTiles:
    """The grid and the specs of kernels in which a query tile stays.

    Grid axes: query head of its group, query tile, key/value head, example.
    Query heads that share keys and values are neighbours on the fastest axis, so that they meet in
    the L2 cache.
    """

    def __init__(self, problem: Problem, static: Static, *, latest_first: bool):
        p, count = problem, static.q.count
        self.problem, self.static = problem, static
        self.grid = (p.groups, count, p.num_kv_heads, p.batch)
        # Under a causal mask the last tiles have the most work; they start first, so that none is
        # left over at the end.
        self.tile_of = (lambda i: count - 1 - i) if latest_first else (lambda i: i)

    def rows(self, width: int) -> pl.BlockSpec:
        """A tile of [B, T, N, width]."""
        groups, tile_of = self.problem.groups, self.tile_of
        return pl.BlockSpec(
            (None, self.static.q.block, None, padded(width)),
            lambda g, i, k, b: (b, tile_of(i), k * groups + g, 0),
        )

    def keys(self, width: int) -> pl.BlockSpec:
        """All of one head of [B, S, K, width]."""
        return pl.BlockSpec(
            (None, self.problem.kv_len, None, padded(width)), lambda g, i, k, b: (b, 0, k, 0)
        )

    def row_statistic(self) -> pl.BlockSpec:
        """A tile of [B, N, T]."""
        groups, tile_of = self.problem.groups, self.tile_of
        return pl.BlockSpec(
            (None, None, self.static.q.block),
            lambda g, i, k, b: (b, k * groups + g, tile_of(i)),
        )
