"""Arithmetic of tiles."""

# The types of MLIR's Python bindings do not say what these functions take and return.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOptionalCall=false

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_flash._backends.mosaic.ptx.layouts import COLUMNS, SPLAT, WGMMA
from pallas_flash._backends.mosaic.ptx.registers import (
    array,
    elementwise,
    f32,
    float32,
    i32,
    number,
    scalars,
    thread_number,
)
from pallas_flash._jax import compat

plgpu = compat.mosaic_gpu()


def anew(x):
    """Return an int32 x that is opaque to the compiler.

    It would otherwise compute the descriptors of a product's operands, two registers for each
    instruction, before a loop, and spill them.
    """
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLAT)

    @plgpu.inline_mgpu(arg_types=(SPLAT,), return_type=result)
    def emit(_, x):
        text = "mov.b32 $0, $1;"
        register = llvm.inline_asm(
            i32(), list(x.registers.flat), text, "=r,r", has_side_effects=True, asm_dialect=0
        )
        return mgpu.FragmentedArray.splat(register, (), is_signed=True)

    return emit(x)


def positions(shape, axis: int, start):
    """Return int32 [64, n] in layout WGMMA: each element's place along an axis, from `start` on.

    The start is added here and first: positions within a tile would stay in registers over a loop.
    """
    result = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(SPLAT,), return_type=result)
    def emit(_, start):
        thread = thread_number()
        lane = arith.remui(thread, number(32))
        warp = arith.divui(thread, number(32))
        if axis == 0:
            row = arith.divui(lane, number(4))
            first, apart = arith.addi(arith.muli(warp, number(16)), row), (0, 8, 0)
        else:
            pair = arith.remui(lane, number(4))
            first, apart = arith.muli(pair, number(2)), (8, 0, 1)
        first = arith.addi(first, start.registers.flat[0])
        places = np.ndindex(shape[1] // 8, 2, 2)
        values = [arith.addi(first, number(int(np.dot(x, apart)))) for x in places]
        return array(values, shape, WGMMA, i32())

    return emit(start)


def columns(x, first: int):
    """Return x[:, first : first + 64] for 16-bit [64, n], padded by zeros."""
    result = plgpu.ShapeDtypeStruct((x.shape[0], COLUMNS), x.dtype, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=result)
    def emit(_, x):
        # For 8 columns a thread has two registers.
        mine = list(x.registers.flat)[first // 4 : (first + COLUMNS) // 4]
        kind = mine[0].type
        zero = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(kind.element_type, 0.0))
        mine += [arith.constant(kind, zero)] * (COLUMNS // 4 - len(mine))
        registers = np.empty(len(mine), dtype=object)
        registers[:] = mine
        return compat.fragmented_array(
            registers.reshape(x.layout.registers_shape((64, COLUMNS))), x.layout, None
        )

    return emit(x)


def where(condition, x, otherwise: float):
    """Return `jnp.where` for float32 [64, n], as one instruction for each element.

    LLVM would make several selects of a conjunction. Before a rounding to 16 bits it would round
    first, then select and pair.
    """
    otherwise = {0.0: "0f00000000", -np.inf: "0fFF800000"}[otherwise]

    @plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA), return_type=float32(x.shape, WGMMA))
    def emit(_, condition, x):
        text = f"selp.f32 $0, $1, {otherwise}, $2;"
        pairs = zip(scalars(x), scalars(condition), strict=True)
        results = [llvm.inline_asm(f32(), pair, text, "=f,f,b", asm_dialect=0) for pair in pairs]
        return array(results, x.shape, WGMMA)

    condition = jnp.broadcast_to(condition, x.shape)
    return emit(*(plgpu.layout_cast(x, WGMMA) for x in (condition, x)))


# Arithmetic of numbers, results first; NumPy executes it in tests/mosaic/test_mosaic_ptx.py.
TANH = (
    "{ .reg .f32 t; mul.ftz.f32 t, $1, 0f4038AA3B; ex2.approx.ftz.f32 t, t; "
    "add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; "
    "fma.rn.ftz.f32 $0, t, 0fC0000000, 0f3F800000; }"
)
LOGISTIC = (
    "{ .reg .f32 a, b, r; ex2.approx.ftz.f32 a, $2; ex2.approx.ftz.f32 b, $3; "
    "add.ftz.f32 a, a, 0f3F800000; add.ftz.f32 b, b, 0f3F800000; "
    "min.ftz.NaN.f32 a, a, 0f4E800000; min.ftz.NaN.f32 b, b, 0f4E800000; mul.ftz.f32 r, a, b; "
    "rcp.approx.ftz.f32 r, r; mul.ftz.f32 $0, r, b; mul.ftz.f32 $1, r, a; }"
)
LOGISTIC_APART = (
    "{ .reg .f32 a; ex2.approx.ftz.f32 a, $1; add.ftz.f32 a, a, 0f3F800000; "
    "rcp.approx.ftz.f32 $0, a; }"
)
PRODUCT = "{ .reg .b64 t; mul.wide.u32 t, $2, $3; mov.b64 {$0, $1}, t; }"  # Low half first.


def difference(x, y):
    """Return x - y of float32 [64, n], rounded by itself: a product in x is not fused with it."""
    return elementwise("sub.rn.ftz.f32 $0, $1, $2;", x, y)


@jax.custom_jvp
def tanh(x):
    """Return the hyperbolic tangent 1 - 2 / (1 + exp2(2 log2(e) x)), to about 2^-22 absolute.

    A soft cap multiplies that error; the GPU's own instruction is off by 2^-11. For derivatives
    only: Pallas does not lower a `custom_jvp` outside of them.
    """
    return elementwise(TANH, x)


@tanh.defjvp
def _(primals, tangents):
    y = elementwise(TANH, *primals)
    return y, (1 - y * y) * tangents[0]


def logistic(x, *, apart: bool):
    """Return 1 / (1 + exp2(x)), to about 2^-21 by the errors of its instructions.

    Two neighbours share a reciprocal, 1 / a = b / (a b), because a forward with a soft cap waits
    for the units for exponentials and reciprocals. Neither result is less than 2^-30 then. They
    share NaN, too, which is right where the row sees both: its results are NaN in any case.

    `apart`: whether each has a reciprocal of its own.
    """
    if apart:
        return elementwise(LOGISTIC_APART, x)
    shape = x.shape

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=float32(shape, WGMMA))
    def emit(_, x):
        x, results = scalars(x), []
        both = llvm.StructType.get_literal([f32(), f32()])
        for pair in zip(x[::2], x[1::2], strict=True):
            outputs = llvm.inline_asm(both, list(pair), LOGISTIC, "=f,=f,f,f", asm_dialect=0)
            results += [llvm.extractvalue(f32(), outputs, [i]) for i in range(2)]
        return array(results, shape, WGMMA)

    return emit(plgpu.layout_cast(x, WGMMA))


def columns_to_float(x, dtype, *, per_column: int):
    """Return float32 of int32 [64, n] that grow by `per_column` a column, exactly below 2^24.

    One of a thread's columns is converted, and the others are sums, because conversions would take
    the units that a softmax needs for its exponentials.
    """
    assert dtype == jnp.float32

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=float32(x.shape, WGMMA))
    def emit(_, x):
        # Two columns of the thread's first row, two of its second, and so on.
        first = [arith.sitofp(f32(), scalars(x)[i]) for i in (0, 2)]
        results = [
            arith.addf(first[half], mgpu.c(float(per_column * (8 * group + two)), f32()))
            for group, half, two in np.ndindex(x.shape[1] // 8, 2, 2)
        ]
        return array(results, x.shape, WGMMA)

    return emit(plgpu.layout_cast(x, WGMMA))


def multiply_wide(x, m: int):
    """Return the upper and the lower 32 bits of the products x * m, for uint32 [64, n].

    One instruction computes both; LLVM would use several.
    """
    half = plgpu.ShapeDtypeStruct(x.shape, jnp.uint32, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=(half, half))
    def emit(_, x):
        both = llvm.StructType.get_literal([i32(), i32()])
        factor, pairs = number(m - 2**32), []
        for i in scalars(x):
            words = llvm.inline_asm(both, [i, factor], PRODUCT, "=r,=r,r,r", asm_dialect=0)
            pairs.append([llvm.extractvalue(i32(), words, [n]) for n in range(2)])
        low, high = zip(*pairs, strict=True)
        return tuple(array(half, x.shape, WGMMA, i32(), False) for half in (high, low))

    return emit(plgpu.layout_cast(x, WGMMA))


LOWER, UPPER = 0x5410, 0x7632  # The halves of two words that `prmt` puts side by side.


def halves_of_neighbours(words):
    """Return the 16 bits of dropout of each element, as the upper ones of uint32 [64, n].

    In a tile whose rows are keys, a thread has columns c and c + 1 of rows of one parity, and the
    thread whose lane differs by 4 has them of the rows beside these. Each draws the words of one of
    these columns, takes its half of them and gives the other half to its neighbour.

    Args:
        words: four uint32 [64, n], see `Dropout.words`. For each 16 columns a thread has one of
            each: for even rows a word of the even columns, for odd rows a word of the odd ones.
    """
    shape = words[0].shape
    result = plgpu.ShapeDtypeStruct(shape, jnp.uint32, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,) * 4, return_type=result)
    def emit(_, *words):
        odd_row = arith.andi(thread_number(), number(4))
        odd_row = arith.cmpi(arith.CmpIPredicate.ne, odd_row, number(0))
        mine, given = (
            arith.select(odd_row, number(x), number(y)) for x, y in ((UPPER, LOWER), (LOWER, UPPER))
        )

        def halves(pair, which):
            text = "prmt.b32 $0, $1, $2, $3;"
            return llvm.inline_asm(i32(), [*pair, which], text, "=r,r,r,r", asm_dialect=0)

        upper, words = [], list(map(scalars, words))
        # A thread has two of 8 columns, of one row and then of the row 8 below. Words 0 and 1
        # belong to the first 8 columns of 16, for these two rows.
        for first in range(0, len(words[0]), 8):
            w0, w1, w2, w3 = (x[first] for x in words)
            for pair in (w0, w1), (w2, w3):
                own = halves(pair, mine)
                other = mgpu.utils.shfl_bfly(halves(pair, given), 4)
                columns = arith.select(odd_row, other, own), arith.select(odd_row, own, other)
                upper += [arith.shli(x, number(16)) for x in columns]
                upper += columns
        return array(upper, shape, WGMMA, i32(), False)

    return emit(*(plgpu.layout_cast(x, WGMMA) for x in words))


def joined(parts: list):
    """Return bools [64, n] of parts side by side, whose columns are multiples of 8."""
    shape = parts[0].shape[0], sum(x.shape[1] for x in parts)
    result = plgpu.ShapeDtypeStruct(shape, jnp.bool_, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,) * len(parts), return_type=result)
    def emit(_, *parts):
        bools = [x for part in parts for x in scalars(part)]
        return array(bools, shape, WGMMA, ir.IntegerType.get_signless(1), False)

    return emit(*(plgpu.layout_cast(x, WGMMA) for x in parts))
