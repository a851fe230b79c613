"""What Pallas has no operation for, in PTX; every piece with what it gains.

A warpgroup is 128 threads. Tiles of scores and of the output are 64 rows of one warpgroup, spread
over its registers as the matrix instruction `wgmma` leaves them: layout `ACC` while a product may
still be running, `WGMMA` otherwise. A thread holds two rows, and of each 8 columns two.

Gains were measured on an H200, most of them with prototypes, as the time of a whole pass.

    product_t, accumulate   a first instruction that overwrites in place of zeroed accumulators, and
                            key tiles that are no multiple of 64: 80 and 176 keys, the latter 6 to
                            12 % at head size 128
    product_t, product_of_transposed
                            likewise in the backward: 5 to 7 % at head size 64, 0 to 2 at 128,
                            3 at 256
    wait, waited            products in flight under a softmax that the compiler leaves there: 5 %
                            at head size 64
    uniform_zero            likewise: without it the waits move up
    rescale                 5 to 9 % at head sizes 128 and 256, with THRESHOLD of `forward`
    add_fragments           4 % of the backward, against adding through shared memory
    load_fragments          what was added is rows again at 4 TB/s, by XLA's transposition at 3.4
    count_up                Pallas has no atomic addition that says what was there before
    anew                    no spills in dq at head size 256, nor by masks at 64
    meet, fence             two barriers fewer for each tile of the backward
    joined                  a tile of parts, which the compiler computes one after the other
    positions               no division for each element, where a tile's width is no power of two
    gather, bits, bits_of_tile
                            Pallas reads no element of device memory for each one of a tile
    load_transposed         nor a tile whose rows become columns
    load_strips, put_strips nor a tile to which copies may come that reach beyond an array's end
    store_rows, store_zeros, zero_rows
                            nor does it store a part of one, or 16 bytes at a time
    logistic, columns_to_float
                            fewer instructions of the units for exponentials: with a soft cap 15 %
                            of the forward at head size 128
    where, difference, tanh, multiply_wide
                            roundings, accuracy and instructions that the compiler does not choose
"""

# The types of MLIR's Python bindings do not say what these functions take and return.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOptionalCall=false

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

from pallas_flash import _compat

plgpu, internals = _compat.mosaic_gpu(), _compat.mosaic_gpu_internals()

WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)  # One number a row.
COLUMN = WGMMA.reduce(0)  # One number a column.
ACC = _compat.accumulator_layout()
SPLAT = plgpu.Layout.WG_SPLAT

COLUMNS = 64
# Numbers of 16 bits that a thread stores at a time.
AT_A_TIME = 8


def tile_columns(width: int) -> int:
    """The columns of the tiles in which rows of so many numbers lie, see `tiled`."""
    return math.gcd(width, COLUMNS)


def tiled(width: int):
    """How operands of matrix instructions lie in shared memory, [rows, width] of 16 bits.

    In tiles of 8 rows and of 64, 32 or 16 columns, the most of which the width has a multiple. They
    are permuted so that reading a column meets no bank twice.
    """
    columns = tile_columns(width)
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)


TILED = tiled(COLUMNS)
# The same for numbers of 32 bits.
TILED_32 = (plgpu.TilingTransform((8, COLUMNS // 2)), plgpu.SwizzleTransform(2 * COLUMNS))
# The same for tiles of 64 columns one after the other, [columns / 64, rows, 64]: copies then take
# arrays of any length and width, and fill with zeros what is beyond.
BLOCKS = (plgpu.SwizzleTransform(2 * COLUMNS),)
_BLOCKS = plgpu.RefType(BLOCKS)


def strip_width(columns: int, dtype) -> int:
    """The columns of each of the `strips` in which a tile of so many lies: 128 bytes at most."""
    return math.gcd(columns, 2 * COLUMNS // jnp.dtype(dtype).itemsize)


def strips(width: int, dtype):
    """As `BLOCKS`, [columns / width, rows, width], for other widths and for numbers of 32 bits."""
    return (plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize),)


def columns_of(ref) -> int:
    """How many `strips` have, or `BLOCKS`."""
    return ref.shape[-3] * ref.shape[-1]


def _strips(ref):
    return plgpu.RefType(strips(ref.shape[-1], ref.dtype))


def load_strips(ref):
    """[64, n] from shared memory, `strips` of [n / width, 64, width]; it meets no bank twice."""
    result = plgpu.ShapeDtypeStruct((ref.shape[1], columns_of(ref)), ref.dtype, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(_strips(ref),), return_type=result)
    def emit(_, tiles):
        [swizzle], layout = strips(ref.shape[-1], ref.dtype), WGMMA.to_mgpu()
        return mgpu.FragmentedArray.load_tiled(_tiles(tiles), swizzle.swizzle, layout=layout)

    return emit(ref)


def put_strips(x, ref):
    """Puts x, [64, n], where `load_strips` would find it."""

    @plgpu.inline_mgpu(arg_types=(WGMMA, _strips(ref)))
    def emit(_, x, tiles):
        [swizzle] = strips(ref.shape[-1], ref.dtype)
        x.store_tiled(_tiles(tiles), swizzle.swizzle)

    emit(x, ref)


def load_transposed(ref):
    """[64, n] of 16 bits from shared memory, where it lies as [n, 64], `strips` of that width."""
    n, width = ref.shape
    assert width == COLUMNS and jnp.dtype(ref.dtype).itemsize == 2
    result = plgpu.ShapeDtypeStruct((COLUMNS, n), ref.dtype, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(_BLOCKS,), return_type=result)
    def emit(_, ref):
        thread = _thread()
        warp, lane = arith.divui(thread, _number(32)), arith.remui(thread, _number(32))
        # A lane says where 8 numbers of a row are: 8 lanes for each of four squares, those of a
        # warp's 16 columns and of 16 rows. 16 bytes are permuted by the lowest bits of the row.
        row, square = arith.remui(lane, _number(8)), arith.divui(lane, _number(8))
        below = arith.muli(arith.divui(square, _number(2)), _number(8))
        right = arith.addi(arith.muli(warp, _number(2)), arith.remui(square, _number(2)))
        at = arith.muli(arith.addi(row, below), _number(COLUMNS))
        at = arith.addi(at, arith.muli(arith.xori(right, row), _number(AT_A_TIME)))
        pointer, kind = internals.memref_ptr(ref), ref.type.element_type
        first = internals.getelementptr(pointer, [at], kind)
        found = []
        for i in range(0, n, 16):
            place = internals.getelementptr(first, [i * COLUMNS], kind)
            text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
            found += _assembly(text, ["=r"] * 4 + ["r"], [place], [_i32()] * 4)
        registers = np.empty(len(found), dtype=object)
        registers[:] = [llvm.bitcast(ir.VectorType.get((2,), kind), x) for x in found]
        layout = WGMMA.to_mgpu()
        registers = registers.reshape(layout.registers_shape((COLUMNS, n)))
        return _compat.fragmented_array(registers, layout, None)

    return emit(ref)


def product_t(a_ref, b_ref, inner: int | None = None):
    """Starts a @ b.T, [64, n], for a and b in shared memory; `wait` for it.

    Args:
        a_ref: `strips` of [64, k].
        b_ref: `strips` of [n, k], as wide.
        inner: how many of the k columns count, if not all; the rest up to a multiple of 16 must be
            zeros.
    """
    shape, inner = (a_ref.shape[1], b_ref.shape[1]), inner or columns_of(a_ref)

    @plgpu.inline_mgpu(arg_types=(_strips(a_ref), _strips(b_ref)), return_type=_float32(shape, ACC))
    def emit(_, a, b):
        b = mgpu.memref_transpose(_tiles(b), (1, 0, 3, 2))
        return _array(_multiply(_tiles(a), b, None, shape[1], inner), shape, ACC)

    return emit(a_ref, b_ref)


def product_of_transposed(a_ref, b_ref):
    """Starts a.T @ b, [64, n], for a [k, 64], `tiled` as wide as the `strips` of [k, n] are."""
    inner, width = a_ref.shape
    shape = width, columns_of(b_ref)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tiled(b_ref.shape[-1])), _strips(b_ref)),
        return_type=_float32(shape, ACC),
    )
    def emit(_, a, b):
        a = mgpu.memref_transpose(a, (1, 0, 3, 2))
        return _array(_multiply(a, _tiles(b), None, shape[1], inner), shape, ACC)

    return emit(a_ref, b_ref)


def accumulate(acc, a, b_ref):
    """Starts acc + a @ b, [64, n], for b in shared memory, `strips` of [k, n or more].

    `a` is [64, k]: in registers, or in shared memory, `tiled` as wide as the strips. What is in
    registers is in use until the product was waited for.
    """
    in_registers = isinstance(a, jax.Array)
    kind = WGMMA if in_registers else plgpu.RefType(tiled(b_ref.shape[-1]))

    @plgpu.inline_mgpu(arg_types=(ACC, kind, _strips(b_ref)), return_type=_float32(acc.shape, ACC))
    def emit(_, acc, given, b):
        registers = _multiply(given, _tiles(b), _scalars(acc), acc.shape[1], a.shape[1])
        return _array(registers, acc.shape, ACC)

    return emit(acc, a, b_ref)


def wait(products: int, x):
    """Waits until no more than `products` are running; `x`, in layout WGMMA, can be used then."""

    @plgpu.inline_mgpu(arg_types=(ACC,), return_type=_float32(x.shape, ACC))
    def emit(_, x):
        return _array(_wait(products, _scalars(x)), x.shape, ACC)

    return plgpu.layout_cast(emit(x), WGMMA)


def waited(products: int, acc, a):
    """`wait`, for an accumulator and for the operand in registers that its product reads."""

    @plgpu.inline_mgpu(arg_types=(ACC, WGMMA), return_type=_float32(acc.shape, ACC))
    def emit(_, acc, a):
        registers = _wait(products, [*_scalars(acc), *_words(a)])
        return _array(registers[: acc.shape[1] // 2], acc.shape, ACC)

    return emit(acc, a)


def uniform_zero(x):
    """An int32 0 that the compiler takes for unknown until `x`, one number a row, is there.

    `x` must not be negative. ptxas moves arithmetic across the waits for products; it does not
    move it across the wait at a barrier whose number is computed from it.
    """

    @plgpu.inline_mgpu(
        arg_types=(ROW,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLAT)
    )
    def emit(_, x):
        total = arith.addf(*_scalars(x))
        negative = arith.cmpf(arith.CmpFPredicate.OLT, total, mgpu.c(0.0, _f32()))
        any_lane = nvvm.vote_sync(_number(-1), negative, nvvm.VoteSyncKind.any)
        return mgpu.FragmentedArray.splat(arith.extui(_i32(), any_lane), (), is_signed=True)

    return emit(x)


def rescale(acc, alpha):
    """The product of acc, [64, n], and alpha, [64], where a warp has an alpha other than one."""

    @plgpu.inline_mgpu(arg_types=(ACC, ROW), return_type=_float32(acc.shape, ACC))
    def emit(_, acc, alpha):
        values, factors = _scalars(acc), _scalars(alpha)
        one = mgpu.c(1.0, _f32())
        changed = [arith.cmpf(arith.CmpFPredicate.UNE, x, one) for x in factors]
        any_lane = nvvm.vote_sync(_number(-1), arith.ori(*changed), nvvm.VoteSyncKind.any)
        branch = scf.IfOp(any_lane, [_f32()] * len(values), has_else=True)
        with ir.InsertionPoint(branch.then_block):
            # Two columns of the thread's first row, two of its second, and so on.
            scf.yield_([arith.mulf(x, factors[i // 2 % 2]) for i, x in enumerate(values)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(values)
        return _array(list(branch.results), acc.shape, ACC)

    return emit(acc, alpha)


# What a warpgroup's registers hold of 8 columns, 64 rows of float32, lies in device memory as a
# thread's four numbers side by side, and threads in their order.
GROUP, OF_GROUP = 8, (4, 128)


def groups(width: int) -> int:
    """Of so many columns."""
    return width // GROUP


def add_fragments(x, ref, taken: slice = slice(None)):
    """Adds groups of x, float32 [64, n], those that are `taken`, to device memory.

    `ref` is where the first group of x is, one of `OF_GROUP`; the others follow it there.
    """
    _fragments(x, ref, taken, "red.relaxed.gpu.global.add.v4.f32")


def store_fragments(x, ref):
    """Stores all of them there."""
    _fragments(x, ref, slice(None), "st.global.v4.f32")


def load_fragments(ref, count: int):
    """float32 [64, 8 * count] that lie there."""
    shape = 64, GROUP * count

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_float32(shape, WGMMA))
    def emit(_, ref):
        four = ir.VectorType.get((4,), _f32())
        found = [llvm.load(four, place, alignment=16) for place in _of_thread(ref, range(count))]
        numbers = [
            vector.extract(x, dynamic_position=[], static_position=[i])
            for x in found
            for i in range(4)
        ]
        return _array(numbers, shape, WGMMA)

    return emit(ref)


def _of_thread(ref, numbers):
    """Pointers to what this thread has of groups, whose numbers are counted from that at `ref`."""
    thread = _thread()
    mine = arith.muli(thread, _number(4))
    first = internals.getelementptr(_global(ref), [mine], _f32())
    return [internals.getelementptr(first, [math.prod(OF_GROUP) * n], _f32()) for n in numbers]


def _fragments(x, ref, taken: slice, instruction: str):
    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def emit(_, x, ref):
        registers = _scalars(x)
        numbers = range(len(registers) // 4)[taken]
        for n, place in zip(numbers, _of_thread(ref, numbers), strict=True):
            internals.inline_ptx(
                f"{instruction} [$0], {{$1, $2, $3, $4}};",
                place,
                *registers[4 * n : 4 * n + 4],
                has_side_effects=True,
            )

    emit(x, ref)


def unfold(x):
    """[B, N, tiles of 64 rows, groups, `OF_GROUP`], as [B, T, N, H]."""
    b, n, tiles, count, *_ = x.shape
    # In a group: warps of 16 rows, rows, pairs of columns, a row or that 8 further, two columns.
    x = x.reshape(b, n, tiles, count, 4, 8, 4, 2, 2)
    batch, head, tile, group, warp, row, pair, half, two = range(9)
    x = x.transpose(batch, tile, warp, half, row, head, group, pair, two)
    return x.reshape(b, 64 * tiles, n, GROUP * count)


def meet(barrier: int, threads: int):
    """Waits until so many threads are here; Pallas itself has the barriers 0 to 4."""

    @plgpu.inline_mgpu()
    def emit(_):
        internals.inline_ptx(f"bar.sync {barrier}, {threads};", has_side_effects=True)

    emit()


def fence():
    """Matrix instructions see what this thread wrote to shared memory; copies wait for its reads.

    To arrive at a barrier is not enough for the latter, though a copy takes hundreds of clocks to
    come. Without it a bias was read after the next one had come, in every run of some tiles.
    """

    @plgpu.inline_mgpu()
    def emit(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    emit()


def count_up(ref):
    """Adds one to an int32 in device memory, for the warp that runs this; what was there before."""
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def emit(_, ref):
        text = (
            "{ .reg .pred first; .reg .b32 lane, before; mov.u32 lane, %laneid; mov.b32 before, 0; "
            "setp.eq.u32 first, lane, 0; @first atom.relaxed.gpu.global.add.u32 before, [$1], 1; "
            "shfl.sync.idx.b32 $0, before, 0, 31, -1; }"
        )
        [before] = _assembly(text, ["=r", "l"], [_global(ref)], [_i32()])
        return mgpu.FragmentedArray.splat(before, (), is_signed=True)

    return emit(ref)


def anew(x):
    """An int32 x that the compiler takes for unknown each time.

    What follows from a place in shared memory, two registers for each instruction of a product, it
    would otherwise compute before a loop, and spill.
    """
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLAT)

    @plgpu.inline_mgpu(arg_types=(SPLAT,), return_type=result)
    def emit(_, x):
        text = "mov.b32 $0, $1;"
        found = llvm.inline_asm(
            _i32(), list(x.registers.flat), text, "=r,r", has_side_effects=True, asm_dialect=0
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return emit(x)


def positions(shape, axis: int, start):
    """int32 [64, n] in layout WGMMA: where each element is along an axis, counted from `start`.

    Added here and first of all: positions within a tile would be kept in registers over a loop.
    """
    result = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(SPLAT,), return_type=result)
    def emit(_, start):
        thread = _thread()
        lane = arith.remui(thread, _number(32))
        warp = arith.divui(thread, _number(32))
        if axis == 0:
            row = arith.divui(lane, _number(4))
            first, apart = arith.addi(arith.muli(warp, _number(16)), row), (0, 8, 0)
        else:
            pair = arith.remui(lane, _number(4))
            first, apart = arith.muli(pair, _number(2)), (8, 0, 1)
        first = arith.addi(first, start.registers.flat[0])
        places = np.ndindex(shape[1] // 8, 2, 2)
        values = [arith.addi(first, _number(int(np.dot(x, apart)))) for x in places]
        return _array(values, shape, WGMMA, _i32())

    return emit(start)


def gather(ref, at, *, pairs: bool):
    """`ref[at]` for [n] in device memory and int32 [64, n] in layout WGMMA; integers in 32 bits.

    `pairs`: whether columns 2 i and 2 i + 1 are next to each other there, the first one at an even
    place.
    """
    floating = jnp.issubdtype(ref.dtype, jnp.floating)
    signed = jnp.issubdtype(ref.dtype, jnp.signedinteger)
    dtype = ref.dtype if floating else jnp.int32 if signed else jnp.uint32
    result = plgpu.ShapeDtypeStruct(at.shape, dtype, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA), return_type=result)
    def emit(_, ref, at):
        kind = ref.type.element_type
        wide, widen = kind if floating else _i32(), arith.extsi if signed else arith.extui
        pointer = _global(ref)

        def read(i):
            place = internals.getelementptr(pointer, [i], kind)
            if not pairs:
                return [llvm.load(kind, place, invariant=True)]
            pair, size = ir.VectorType.get((2,), kind), 2 * mgpu.bytewidth(kind)
            pair = llvm.load(pair, place, alignment=size, invariant=True)
            return [
                vector.extract(pair, dynamic_position=[], static_position=[n]) for n in range(2)
            ]

        found = [x for i in _scalars(at)[:: 2 if pairs else 1] for x in read(i)]
        found = found if kind == wide else [widen(wide, x) for x in found]
        return _array(found, at.shape, WGMMA, wide, signed)

    return emit(ref, plgpu.layout_cast(at, WGMMA))


LOG_BITS = 5
BITS = 2**LOG_BITS  # Of a word.


def bits(ref, at, columns, apart: int):
    """Bools [64, n], whether the bit of an element is set in words of device memory.

    Args:
        ref: uint32 [m].
        at: int32 [64, n] in layout WGMMA, the place of each element's word.
        columns: likewise where the elements of a row are along its bits: one after the other, from
            a multiple of n on.
        apart: how far a row's words are apart; if they are neighbours, from a multiple of n / 32
            words on, where n is a multiple of 32, else of 16.
    """
    n = at.shape[1]
    # A row that begins within a word has a word more.
    whole = n % BITS == 0
    count = n // BITS if whole else n // BITS + 1
    wide = math.gcd(count, 4) if whole and apart == 1 else 1
    result = plgpu.ShapeDtypeStruct(at.shape, jnp.bool_, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, WGMMA), return_type=result)
    def emit(_, ref, at, columns):
        pointer, kind = _global(ref), ir.VectorType.get((wide,), _i32())
        # Of a thread's first column, within its word.
        shift = arith.andi(_scalars(columns)[0], _number(BITS - 1))

        def of_row(first):
            """Words whose lowest bits are those of the thread's columns, 32 after 32."""
            words = []
            for i in range(0, count, wide):
                place = internals.getelementptr(pointer, [first], _i32())
                place = internals.getelementptr(place, [i * apart], _i32())
                found = llvm.load(kind, place, alignment=4 * wide, invariant=True)
                words += [
                    vector.extract(found, dynamic_position=[], static_position=[j])
                    for j in range(wide)
                ]
            if whole:
                return [arith.shrui(word, shift) for word in words]
            text = "shf.r.wrap.b32 $0, $1, $2, $3;"
            pairs = zip(words, [*words[1:], _number(0)], strict=True)
            return [
                llvm.inline_asm(_i32(), [*pair, shift], text, "=r,r,r,r", asm_dialect=0)
                for pair in pairs
            ]

        return _bits([of_row(_scalars(at)[i]) for i in (0, 2)], (64, n))

    return emit(ref, *(plgpu.layout_cast(x, WGMMA) for x in (at, columns)))


def bits_of_tile(ref, first):
    """As `bits`, [64, 32 m] whose words are in shared memory, uint32 [m, rows], from a row on."""
    count, rows = ref.shape
    shape = 64, BITS * count
    result = plgpu.ShapeDtypeStruct(shape, jnp.bool_, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT), return_type=result)
    def emit(_, ref, first):
        thread = _thread()
        warp, lane = arith.divui(thread, _number(32)), arith.remui(thread, _number(32))
        row = arith.addi(arith.muli(warp, _number(16)), arith.divui(lane, _number(4)))
        row = arith.addi(first.registers.flat[0], row)
        first = internals.getelementptr(internals.memref_ptr(ref), [row], _i32())
        shift = arith.muli(arith.remui(lane, _number(4)), _number(2))

        def of_row(half):
            places = (
                internals.getelementptr(first, [i * rows + 8 * half], _i32()) for i in range(count)
            )
            return [arith.shrui(llvm.load(_i32(), place), shift) for place in places]

        return _bits([of_row(half) for half in range(2)], shape)

    return emit(ref, first)


def store_rows(x, ref, first):
    """Stores those rows of x, float32 [64] or [64, n], that exist in `ref`, from `first` on.

    Args:
        x: one number a row in layout ROW, or a tile in layout WGMMA.
        ref: device memory, [rows] or [rows, n].
        first: the row there of the first one.
    """
    rows, width = ref.shape[0], x.shape[1] if x.ndim == 2 else 1
    each, store = 1, "st.global.f32 [$0], $1;"
    if width > 1:
        each, store = 2, "st.global.v2.f32 [$0], {$1, $2};"

    @plgpu.inline_mgpu(arg_types=(WGMMA if x.ndim == 2 else ROW, plgpu.RefType(), SPLAT))
    def emit(_, x, ref, first):
        thread = _thread()
        row = arith.addi(first.registers.flat[0], arith.divui(thread, _number(4)))
        # Four threads have the same rows, of warps 16 of which a thread has two, 8 apart.
        warp = arith.divui(thread, _number(32))
        row, pair = arith.addi(row, arith.muli(warp, _number(8))), arith.remui(thread, _number(4))
        pointer, values = _global(ref), _scalars(x)
        for half in range(2):
            mine = arith.addi(row, _number(8 * half))
            exists = arith.cmpi(arith.CmpIPredicate.slt, mine, _number(rows))
            if width == 1:
                exists = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.eq, pair, _number(0)))
            at = arith.muli(mine, _number(width))
            if width > 1:
                at = arith.addi(at, arith.muli(pair, _number(2)))
            place = internals.getelementptr(pointer, [at], _f32())
            for group in range(len(values) // (2 * each)):
                internals.inline_ptx(
                    store,
                    internals.getelementptr(place, [8 * group], _f32()),
                    *values[(2 * group + half) * each :][:each],
                    predicate=exists,
                    has_side_effects=True,
                )

    emit(x, ref, first)


def store_zeros(ref, first, head, rows: int):
    """Stores zeros in so many rows of a head from `first` on, those that exist.

    Args:
        ref: device memory, [T, N, H] of 16 bits, H a multiple of 8.
        first: the first row.
        head: of N.
        rows: a multiple of 128.
    """
    length, heads, width = ref.shape
    stores = width // AT_A_TIME

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, SPLAT))
    def emit(_, ref, first, head):
        def wide(i):
            return arith.extsi(ir.IntegerType.get_signless(64), i)

        first, head = (x.registers.flat[0] for x in (first, head))

        @_for_each_of_threads(rows * stores)
        def _(i):
            row = arith.addi(first, arith.divui(i, _number(stores)))
            column = arith.muli(arith.remui(i, _number(stores)), _number(AT_A_TIME))
            at = arith.muli(wide(row), wide(_number(heads * width)))
            at = arith.addi(at, wide(arith.addi(arith.muli(head, _number(width)), column)))
            exists = arith.cmpi(arith.CmpIPredicate.slt, row, _number(length))
            place = internals.getelementptr(_global(ref), [at], ir.IntegerType.get_signless(16))
            _store_zeros("global", place, exists)

    emit(ref, first, head)


def zero_rows(ref, first, *, strip: bool = False):
    """Zeroes the rows of a tile in shared memory from `first` on; `fence` is to follow.

    Args:
        ref: [rows, width] of 16 bits, `tiled`: these permutations leave a row where it is.
        first: the first row, an int32 that may be negative.
        strip: whether it is one of `strips` instead.
    """
    rows, width = ref.shape
    columns = tile_columns(width)
    kind = strips(width, ref.dtype) if strip else tiled(width)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(kind), SPLAT))
    def emit(_, ref, first):
        pointer = internals.memref_ptr(ref)
        first = arith.maxsi(first.registers.flat[0], _number(0))
        # In tiles of 8 rows and `columns` columns.
        groups_before = arith.divui(first, _number(8))

        @_for_each_of_threads(rows * width // AT_A_TIME, arith.muli(groups_before, _number(width)))
        def _(i):
            row = arith.remui(arith.divui(i, _number(columns // AT_A_TIME)), _number(8))
            row = arith.addi(arith.muli(arith.divui(i, _number(width)), _number(8)), row)
            at = arith.muli(i, _number(AT_A_TIME))
            place = internals.getelementptr(pointer, [at], ir.IntegerType.get_signless(16))
            behind = arith.cmpi(arith.CmpIPredicate.uge, row, first)
            _store_zeros("shared", place, behind)

    emit(ref, first)


def columns(x, first: int):
    """x[:, first : first + 64] for [64, n] of 16 bits, with zeros where it ends before."""
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
        return _compat.fragmented_array(
            registers.reshape(x.layout.registers_shape((64, COLUMNS))), x.layout, None
        )

    return emit(x)


def where(condition, x, otherwise: float):
    """`jnp.where` for float32 [64, n], one instruction for an element, whatever comes after.

    Of a conjunction LLVM would make several choices, and where numbers are then rounded to 16 bits,
    it would round first, and choose and pair them.
    """
    otherwise = {0.0: "0f00000000", -np.inf: "0fFF800000"}[otherwise]

    @plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA), return_type=_float32(x.shape, WGMMA))
    def emit(_, condition, x):
        text = f"selp.f32 $0, $1, {otherwise}, $2;"
        pairs = zip(_scalars(x), _scalars(condition), strict=True)
        results = [llvm.inline_asm(_f32(), pair, text, "=f,f,b", asm_dialect=0) for pair in pairs]
        return _array(results, x.shape, WGMMA)

    condition = jnp.broadcast_to(condition, x.shape)
    return emit(*(plgpu.layout_cast(x, WGMMA) for x in (condition, x)))


# Arithmetic of numbers, results first; NumPy executes it in tests/test_mosaic_ptx.py.
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
    """The difference x - y of float32 [64, n], rounded: a product in x is not fused with it."""
    return _elementwise("sub.rn.ftz.f32 $0, $1, $2;", x, y)


@jax.custom_jvp
def tanh(x):
    """Hyperbolic tangent: 1 - 2 / (1 + exp2(2 log2(e) x)), with an absolute error of about 2^-22.

    A soft cap multiplies that error. The instruction of this name is off by 2^-11. Only for those
    who differentiate it: as it is Pallas refuses it.
    """
    return _elementwise(TANH, x)


@tanh.defjvp
def _(primals, tangents):
    y = _elementwise(TANH, *primals)
    return y, (1 - y * y) * tangents[0]


def logistic(x, *, apart: bool):
    """1 / (1 + exp2(x)), to about 2^-21 by the errors of its instructions.

    Two neighbours share a reciprocal, because the units for exponentials and reciprocals are what a
    forward with a soft cap waits for: 1 / a = b / (a b). Neither is less than 2^-30 then. They also
    share NaN, which is right where both are of a row that sees them: its results are NaN in any
    case. `apart`: each has its own.
    """
    if apart:
        return _elementwise(LOGISTIC_APART, x)
    shape = x.shape

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=_float32(shape, WGMMA))
    def emit(_, x):
        x, results = _scalars(x), []
        both = llvm.StructType.get_literal([_f32(), _f32()])
        for pair in zip(x[::2], x[1::2], strict=True):
            found = llvm.inline_asm(both, list(pair), LOGISTIC, "=f,=f,f,f", asm_dialect=0)
            results += [llvm.extractvalue(_f32(), found, [i]) for i in range(2)]
        return _array(results, shape, WGMMA)

    return emit(plgpu.layout_cast(x, WGMMA))


def columns_to_float(x, dtype, *, per_column: int):
    """float32 for int32 [64, n] that change by so much from column to column, exactly below 2^24.

    Of a thread's columns one becomes a float: conversions have the units that a softmax needs for
    its exponentials. The others are sums.
    """
    assert dtype == jnp.float32

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=_float32(x.shape, WGMMA))
    def emit(_, x):
        # Two columns of the thread's first row, two of its second, and so on.
        first = [arith.sitofp(_f32(), _scalars(x)[i]) for i in (0, 2)]
        results = [
            arith.addf(first[half], mgpu.c(float(per_column * (8 * group + two)), _f32()))
            for group, half, two in np.ndindex(x.shape[1] // 8, 2, 2)
        ]
        return _array(results, x.shape, WGMMA)

    return emit(plgpu.layout_cast(x, WGMMA))


def multiply_wide(x, m: int):
    """The upper and the lower 32 bits of the products x * m, for uint32 [64, n].

    From one instruction: LLVM would make it several for the same product.
    """
    half = plgpu.ShapeDtypeStruct(x.shape, jnp.uint32, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=(half, half))
    def emit(_, x):
        both = llvm.StructType.get_literal([_i32(), _i32()])
        factor, pairs = _number(m - 2**32), []
        for i in _scalars(x):
            found = llvm.inline_asm(both, [i, factor], PRODUCT, "=r,=r,r,r", asm_dialect=0)
            pairs.append([llvm.extractvalue(_i32(), found, [n]) for n in range(2)])
        low, high = zip(*pairs, strict=True)
        return tuple(_array(half, x.shape, WGMMA, _i32(), False) for half in (high, low))

    return emit(plgpu.layout_cast(x, WGMMA))


def joined(parts: list):
    """Bools [64, n] of parts beside each other, whose columns are multiples of 8."""
    shape = parts[0].shape[0], sum(x.shape[1] for x in parts)
    result = plgpu.ShapeDtypeStruct(shape, jnp.bool_, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,) * len(parts), return_type=result)
    def emit(_, *parts):
        bools = [x for part in parts for x in _scalars(part)]
        return _array(bools, shape, WGMMA, ir.IntegerType.get_signless(1), False)

    return emit(*(plgpu.layout_cast(x, WGMMA) for x in parts))


# ------------------------------------------------------------------------------------------------
# The registers of one thread
# ------------------------------------------------------------------------------------------------


def _f32():
    return ir.F32Type.get()


def _i32():
    return ir.IntegerType.get_signless(32)


def _float32(shape, layout):
    return plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)


def _scalars(x) -> list:
    """The float32 registers of a thread, in the order in which `wgmma` takes them."""
    return (
        [
            vector.extract(register, dynamic_position=[], static_position=[i])
            for register in x.registers.flat
            for i in range(ir.VectorType(register.type).shape[0])
        ]
        if isinstance(x.registers.flat[0].type, ir.VectorType)
        else list(x.registers.flat)
    )


def _words(x) -> list:
    """The registers of a tile of 16 bits, two numbers in each."""
    one = ir.VectorType.get((1,), _i32())
    return [
        vector.extract(vector.bitcast(one, r), dynamic_position=[], static_position=[0])
        for r in x.registers.flat
    ]


def _array(scalars, shape, layout, kind=None, signed=True):
    kind, layout = kind or _f32(), layout.to_mgpu()
    width = layout.vector_length
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for i in range(registers.size):
        mine = scalars[i * width : (i + 1) * width]
        registers.flat[i] = vector.from_elements(ir.VectorType.get((width,), kind), mine)
    return _compat.fragmented_array(
        registers, layout, signed if isinstance(kind, ir.IntegerType) else None
    )


def _bits(rows, shape):
    """Whether a bit is set, for words of a thread's first row and of its second.

    Their lowest bits are those of its first column. Assembly: LLVM would shift once for each bit.
    """
    values, i1 = [], ir.IntegerType.get_signless(1)
    for group, half, two in np.ndindex(shape[1] // 8, 2, 2):
        word, bit = divmod(8 * group + two, BITS)
        text = f"{{ .reg .b32 t; and.b32 t, $1, {1 << bit}; setp.ne.b32 $0, t, 0; }}"
        values.append(llvm.inline_asm(i1, [rows[half][word]], text, "=b,r", asm_dialect=0))
    return _array(values, shape, WGMMA, i1, False)


def _global(ref):
    """A pointer to what is in device memory."""
    pointer = internals.memref_ptr(ref)
    if pointer.type.address_space == 0:
        pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), pointer)
    return pointer


def _tiles(ref):
    """`BLOCKS` as the tiles of 8 x 64 that they consist of, [rows / 8, columns / 64, 8, 64].

    Of `strips` those of 8 rows and their columns.
    """
    return mgpu.memref_transpose(mgpu.memref_unfold(ref, 1, (None, 8)), (1, 0, 2, 3))


def _number(i: int):
    return mgpu.c(i, _i32())


def _thread():
    """Its number in the warpgroup."""
    return arith.remui(mgpu.thread_idx(), _number(128))


def _for_each_of_threads(count: int, first=None):
    """Runs `body(i)` for all i below `count`, a multiple of 128; each is one thread's.

    From `first` on, or up to 127 before. In a loop: unrolled, it takes registers from those that
    compute.
    """

    def run(body):
        turns, thread = _number(128), _thread()
        before = _number(0) if first is None else arith.divui(first, turns)

        @mgpu.fori(arith.subi(_number(count // 128), before), [])
        def _(i, _):
            body(arith.addi(thread, arith.muli(arith.addi(i, before), turns)))
            return []

    return run


def _store_zeros(space: str, place, condition):
    """16 bytes of them."""
    internals.inline_ptx(
        f"st.{space}.v4.b32 [$0], {{$1, $1, $1, $1}};",
        place,
        _number(0),
        predicate=condition,
        has_side_effects=True,
    )


def _elementwise(text: str, *arrays):
    """Assembly with a float32 result for float32 [64, n], which compilers may move and drop."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,) * len(arrays), return_type=_float32(arrays[0].shape, WGMMA)
    )
    def emit(_, *arrays):
        constraints = ",".join(["=f"] + ["f"] * len(arrays))
        results = [
            llvm.inline_asm(_f32(), list(x), text, constraints, asm_dialect=0)
            for x in zip(*map(_scalars, arrays), strict=True)
        ]
        return _array(results, arrays[0].shape, WGMMA)

    return emit(*(plgpu.layout_cast(x, WGMMA) for x in arrays))


def _assembly(text: str, constraints: list[str], arguments: list, results: list) -> list:
    """Assembly that stays where it is, and its results."""
    struct = llvm.inline_asm(
        llvm.StructType.get_literal(results),
        arguments,
        text,
        ",".join(constraints),
        has_side_effects=True,
        asm_dialect=0,
    )
    return [llvm.extractvalue(kind, struct, [i]) for i, kind in enumerate(results)]


def _wait(products: int, registers: list) -> list:
    """`registers` after a wait: nothing that uses them can move before it."""
    kinds = [x.type for x in registers]
    outputs = ["=f" if kind == _f32() else "=r" for kind in kinds]
    inputs = [str(i) for i in range(len(registers))]
    text = f"wgmma.wait_group.sync.aligned {products};"
    return _assembly(text, outputs + inputs, registers, kinds)


def _multiply(a, b, acc: list | None, n: int, inner: int) -> list:
    """Starts acc + a @ b as one group of instructions, each of which takes 16 of the inner size.

    Args:
        a: tiles in shared memory, or an array in registers.
        b: tiles of as many columns.
        acc: registers, or None for zeros.
        n: columns of b that are taken.
        inner: the inner size; operands have zeros from there to a multiple of 16.
    """
    (_, columns), element = internals.tiled_memref_shape(b)
    kind = {ir.BF16Type: "bf16", ir.F16Type: "f16"}[type(element)]
    # Of a tile one side has 8 numbers, whichever way it is read, and the other one more.
    width = max(ir.MemRefType(b.type).shape[2:])

    def descriptor(x, rows, right):
        """One of the first step, and the distance of any step from it."""
        (base, (_, [step])), (_, group), fastest = internals.create_descriptor(
            x,
            swizzle=2 * width,
            group_size=(width, rows) if right else (rows, width),
            logical_k_major=right,
        )
        per_group = width // 16

        def offset(i):
            return internals.encode_addr(i // per_group * group + i % per_group * step)

        return base, offset, int(fastest != internals.Dim.K)

    results = n // 2
    tied = acc or []
    first_a = results + len(tied)
    in_registers = isinstance(a, mgpu.FragmentedArray)
    if in_registers:
        operands_a, offset_a, transposed_a = _words(a), None, ""
    else:
        base, offset_a, transposed = descriptor(a, 64, False)
        operands_a, transposed_a = [base], f", {transposed}"
    first_b = first_a + len(operands_a)
    base_b, offset_b, transposed_b = descriptor(b, columns, True)
    accumulator = "{" + ", ".join(f"${i}" for i in range(results)) + "}"
    lines = [
        ".reg .pred no, yes; .reg .b64 da, db;",
        "setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0;",
        "wgmma.fence.sync.aligned;",
    ]
    for i in range(-(-inner // 16)):
        lines.append(f"add.s64 db, ${first_b}, {offset_b(i)};")
        if in_registers:
            operand = "{" + ", ".join(f"${first_a + 4 * i + j}" for j in range(4)) + "}"
        else:
            lines.append(f"add.s64 da, ${first_a}, {offset_a(i)};")
            operand = "da"
        adds = "no" if acc is None and i == 0 else "yes"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {accumulator}, {operand}, "
            f"db, {adds}, 1, 1{transposed_a}, {transposed_b};"
        )
    lines.append("wgmma.commit_group.sync.aligned;")
    constraints = [
        *["=f"] * results,
        *(str(i) for i in range(len(tied))),
        *["r" if in_registers else "l"] * len(operands_a),
        "l",
    ]
    text = "{\n" + "\n".join(lines) + "\n}\n"
    return _assembly(text, constraints, [*tied, *operands_a, base_b], [_f32()] * results)
