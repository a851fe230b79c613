"""Reads and writes of memory, fences and named barriers."""

# The types of MLIR's Python bindings do not say what these functions take and return.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOptionalCall=false

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_flash._backends.mosaic.ptx.layouts import (
    COLUMNS,
    GROUP,
    OF_GROUP,
    ROW,
    SPLAT,
    WGMMA,
    columns_of,
    strips,
    strips_type,
    tiles_of,
)
from pallas_flash._backends.mosaic.ptx.registers import (
    array,
    assembly,
    effect,
    f32,
    float32,
    i32,
    number,
    pointer_to,
    scalars,
    thread_number,
    words,
)
from pallas_flash._jax import compat

plgpu = compat.mosaic_gpu()
internals = compat.mosaic_gpu_internals()

# 16-bit numbers that a thread stores at a time.
AT_A_TIME = 8


def load_strips(ref):
    """Return [64, n] from `strips` [n / width, 64, width], without bank conflicts."""
    result = plgpu.ShapeDtypeStruct((ref.shape[1], columns_of(ref)), ref.dtype, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(strips_type(ref),), return_type=result)
    def emit(_, tiles):
        [swizzle], layout = strips(ref.shape[-1], ref.dtype), WGMMA.to_mgpu()
        return mgpu.FragmentedArray.load_tiled(tiles_of(tiles), swizzle.swizzle, layout=layout)

    return emit(ref)


def put_strips(x, ref):
    """Store x, [64, n], where `load_strips` would find it."""

    @plgpu.inline_mgpu(arg_types=(WGMMA, strips_type(ref)))
    def emit(_, x, tiles):
        [swizzle] = strips(ref.shape[-1], ref.dtype)
        x.store_tiled(tiles_of(tiles), swizzle.swizzle)

    emit(x, ref)


def load_transposed(ref):
    """Return 16-bit [64, n] that lies in shared memory as [n, 64], one of `strips`."""
    n, width = ref.shape
    assert width == COLUMNS and jnp.dtype(ref.dtype).itemsize == 2
    result = plgpu.ShapeDtypeStruct((COLUMNS, n), ref.dtype, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(strips_type(ref),), return_type=result)
    def emit(_, ref):
        thread = thread_number()
        warp, lane = arith.divui(thread, number(32)), arith.remui(thread, number(32))
        # Each lane gives the address of 8 numbers of a row: 8 lanes for each of the four 8 x 8
        # matrices of a warp's 16 columns and 16 rows. The lowest bits of the row swizzle 16 bytes.
        row, square = arith.remui(lane, number(8)), arith.divui(lane, number(8))
        below = arith.muli(arith.divui(square, number(2)), number(8))
        right = arith.addi(arith.muli(warp, number(2)), arith.remui(square, number(2)))
        at = arith.muli(arith.addi(row, below), number(COLUMNS))
        at = arith.addi(at, arith.muli(arith.xori(right, row), number(AT_A_TIME)))
        pointer, kind = internals.memref_ptr(ref), ref.type.element_type
        first = internals.getelementptr(pointer, [at], kind)
        loaded = []
        for i in range(0, n, 16):
            place = internals.getelementptr(first, [i * COLUMNS], kind)
            text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
            loaded += assembly(text, ["=r"] * 4 + ["r"], [place], [i32()] * 4)
        registers = np.empty(len(loaded), dtype=object)
        registers[:] = [llvm.bitcast(ir.VectorType.get((2,), kind), x) for x in loaded]
        layout = WGMMA.to_mgpu()
        registers = registers.reshape(layout.registers_shape((COLUMNS, n)))
        return compat.fragmented_array(registers, layout, None)

    return emit(ref)


def add_fragments(x, ref, taken: slice = slice(None)):
    """Add the groups `taken` of x, float32 [64, n], to device memory, atomically.

    `ref` is the place of x's first group, of shape `OF_GROUP`; the others follow it.
    """
    _fragments(x, ref, taken, "red.relaxed.gpu.global.add.v4.f32")


def store_fragments(x, ref):
    """Store all groups of x, as `add_fragments` adds them."""
    _fragments(x, ref, slice(None), "st.global.v4.f32")


def load_fragments(ref, count: int):
    """Return float32 [64, 8 * count] that `store_fragments` stored."""
    shape = 64, GROUP * count

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=float32(shape, WGMMA))
    def emit(_, ref):
        four = ir.VectorType.get((4,), f32())
        loaded = [llvm.load(four, place, alignment=16) for place in _of_thread(ref, range(count))]
        numbers = [
            vector.extract(x, dynamic_position=[], static_position=[i])
            for x in loaded
            for i in range(4)
        ]
        return array(numbers, shape, WGMMA)

    return emit(ref)


def _of_thread(ref, numbers):
    """Return pointers to this thread's part of groups, counted from the group at `ref`."""
    thread = thread_number()
    mine = arith.muli(thread, number(4))
    first = internals.getelementptr(pointer_to(ref), [mine], f32())
    return [internals.getelementptr(first, [math.prod(OF_GROUP) * n], f32()) for n in numbers]


def _fragments(x, ref, taken: slice, instruction: str):
    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def emit(_, x, ref):
        registers = scalars(x)
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
    """Return [B, N, tiles of 64 rows, groups, `OF_GROUP`] as [B, T, N, H]."""
    b, n, tiles, count, *_ = x.shape
    # wgmma fragment axes: warp (16 rows), row, column pair, row half (+ 8), column of the pair.
    x = x.reshape(b, n, tiles, count, 4, 8, 4, 2, 2)
    batch, head, tile, group, warp, row, pair, half, two = range(9)
    x = x.transpose(batch, tile, warp, half, row, head, group, pair, two)
    return x.reshape(b, 64 * tiles, n, GROUP * count)


FREE_BARRIER = 5  # The first of the named barriers, up to 15, that Pallas itself does not use.


def meet(barrier: int, threads: int):
    """Synchronise `threads` threads at a named barrier."""

    @plgpu.inline_mgpu()
    def emit(_):
        internals.inline_ptx(f"bar.sync {barrier}, {threads};", has_side_effects=True)

    emit()


def fence():
    """Order this thread's accesses of shared memory before later accesses of wgmma and TMA.

    In the memory model of PTX these belong to another proxy than loads and stores of threads, and
    an arrival at a barrier orders accesses of one proxy only. So this fence stands

        between a store and the arrival after which wgmma or TMA reads     always
        between a load and the arrival after which TMA overwrites          unless the arrival comes
                                        after the use of what was loaded

    A load whose number was used is done, and the kernels rely on that. Other loads may still be
    under way at the arrival: without the fence a bias was read after the next copy.
    """

    @plgpu.inline_mgpu()
    def emit(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    emit()


def count_up(ref):
    """Increment an int32 in device memory atomically, once a warp; return what was there before."""
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def emit(_, ref):
        text = (
            "{ .reg .pred first; .reg .b32 lane, before; mov.u32 lane, %laneid; mov.b32 before, 0; "
            "setp.eq.u32 first, lane, 0; @first atom.relaxed.gpu.global.add.u32 before, [$1], 1; "
            "shfl.sync.idx.b32 $0, before, 0, 31, -1; }"
        )
        [before] = assembly(text, ["=r", "l"], [pointer_to(ref)], [i32()])
        return mgpu.FragmentedArray.splat(before, (), is_signed=True)

    return emit(ref)


def await_count(ref, count):
    """Wait in one thread of the warpgroup until an int32 in device memory is at least `count`.

    Threads to which it then reports see all that was added before `raise_count`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT))
    def emit(_, ref, count):
        effect(
            "{ .reg .pred other, early; .reg .b32 seen; setp.ne.u32 other, $2, 32; "
            "@other bra done; again: ld.acquire.gpu.global.b32 seen, [$0]; "
            "setp.lt.s32 early, seen, $1; @early bra again; done: }",
            ["l", "r", "r"],
            [pointer_to(ref), count.registers.flat[0], thread_number()],
        )

    emit(ref, count)


def raise_count(ref):
    """Add 1 to an int32 in device memory, after all that threads added and reported to this one.

    Another thread does it than the one in `await_count`, which may be waiting.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, ref):
        effect(
            "{ .reg .pred mine; setp.eq.u32 mine, $1, 64; @mine fence.acq_rel.gpu; "
            "@mine red.relaxed.gpu.global.add.s32 [$0], 1; }",
            ["l", "r"],
            [pointer_to(ref), thread_number()],
        )

    emit(ref)


def gather(ref, at, *, pairs: bool):
    """Return `ref[at]` for [n] in device memory and int32 [64, n]; integers become 32 bits wide.

    `pairs`: whether columns 2 i and 2 i + 1 are neighbours in memory, the first at an even place.
    """
    floating = jnp.issubdtype(ref.dtype, jnp.floating)
    signed = jnp.issubdtype(ref.dtype, jnp.signedinteger)
    dtype = ref.dtype if floating else jnp.int32 if signed else jnp.uint32
    result = plgpu.ShapeDtypeStruct(at.shape, dtype, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA), return_type=result)
    def emit(_, ref, at):
        kind = ref.type.element_type
        wide, widen = kind if floating else i32(), arith.extsi if signed else arith.extui
        pointer = pointer_to(ref)

        def read(i):
            place = internals.getelementptr(pointer, [i], kind)
            if not pairs:
                return [llvm.load(kind, place, invariant=True)]
            pair, size = ir.VectorType.get((2,), kind), 2 * mgpu.bytewidth(kind)
            pair = llvm.load(pair, place, alignment=size, invariant=True)
            return [
                vector.extract(pair, dynamic_position=[], static_position=[n]) for n in range(2)
            ]

        values = [x for i in scalars(at)[:: 2 if pairs else 1] for x in read(i)]
        values = values if kind == wide else [widen(wide, x) for x in values]
        return array(values, at.shape, WGMMA, wide, signed)

    return emit(ref, plgpu.layout_cast(at, WGMMA))


LOG_BITS = 5
BITS = 2**LOG_BITS  # Bits of a word.


def bits(ref, at, columns, apart: int):
    """Return bools [64, n]: whether the bit of an element is set in words of device memory.

    Args:
        ref: uint32 [m].
        at: int32 [64, n] in layout WGMMA, the place of each element's word.
        columns: int32 [64, n], the number of each element's bit along its row: consecutive from a
            multiple of n on.
        apart: distance of a row's words. Neighbours begin at a multiple of n / 32 words if n is a
            multiple of 32, else of 16.
    """
    n = at.shape[1]
    # A row that begins within a word has one more word.
    whole = n % BITS == 0
    count = n // BITS if whole else n // BITS + 1
    wide = math.gcd(count, 4) if whole and apart == 1 else 1
    result = plgpu.ShapeDtypeStruct(at.shape, jnp.bool_, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, WGMMA), return_type=result)
    def emit(_, ref, at, columns):
        pointer, kind = pointer_to(ref), ir.VectorType.get((wide,), i32())
        # The bit of a thread's first column in its word.
        shift = arith.andi(scalars(columns)[0], number(BITS - 1))

        def of_row(first):
            """Return words of 32 columns, whose lowest bits are the thread's columns."""
            words = []
            for i in range(0, count, wide):
                place = internals.getelementptr(pointer, [first], i32())
                place = internals.getelementptr(place, [i * apart], i32())
                loaded = llvm.load(kind, place, alignment=4 * wide, invariant=True)
                words += [
                    vector.extract(loaded, dynamic_position=[], static_position=[j])
                    for j in range(wide)
                ]
            if whole:
                return [arith.shrui(word, shift) for word in words]
            text = "shf.r.wrap.b32 $0, $1, $2, $3;"
            pairs = zip(words, [*words[1:], number(0)], strict=True)
            return [
                llvm.inline_asm(i32(), [*pair, shift], text, "=r,r,r,r", asm_dialect=0)
                for pair in pairs
            ]

        return _bits([of_row(scalars(at)[i]) for i in (0, 2)], (64, n))

    return emit(ref, *(plgpu.layout_cast(x, WGMMA) for x in (at, columns)))


def bits_of_tile(ref, first):
    """Return what `bits` does, [64, 32 m], of uint32 [m, rows] in shared memory, from a row on."""
    count, rows = ref.shape
    shape = 64, BITS * count
    result = plgpu.ShapeDtypeStruct(shape, jnp.bool_, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT), return_type=result)
    def emit(_, ref, first):
        thread = thread_number()
        warp, lane = arith.divui(thread, number(32)), arith.remui(thread, number(32))
        row = arith.addi(arith.muli(warp, number(16)), arith.divui(lane, number(4)))
        row = arith.addi(first.registers.flat[0], row)
        first = internals.getelementptr(internals.memref_ptr(ref), [row], i32())
        shift = arith.muli(arith.remui(lane, number(4)), number(2))

        def of_row(half):
            places = (
                internals.getelementptr(first, [i * rows + 8 * half], i32()) for i in range(count)
            )
            return [arith.shrui(llvm.load(i32(), place), shift) for place in places]

        return _bits([of_row(half) for half in range(2)], shape)

    return emit(ref, first)


def store_rows(x, ref, first, stop, column, stop_column, *, room: int):
    """Store rows of x, [64] or [64, n], of which each row of `ref` takes `room`, a power of two.

    Args:
        x: float32, one number a row in layout ROW, or a tile in layout WGMMA, 16 bits too.
        ref: device memory, [rows, columns] or [rows, columns, n].
        first: the row of `ref` for the first row of x.
        stop: the first row of `ref` that is not stored.
        column: the column of `ref` for the first one of its rows of x.
        stop_column: the first column that is not stored.
        room: rows of x for a row of `ref`.
    """
    width, columns, wide = 1 if x.ndim == 1 else x.shape[1], ref.shape[1], x.dtype == jnp.float32
    # Registers of a row, and of those two neighbouring columns that a thread has in it.
    each = 2 if wide and width > 1 else 1
    of_row = max(1, width // 2 * each)
    store = "st.global.b32 [$0], $1;" if each == 1 else "st.global.v2.f32 [$0], {$1, $2};"

    @plgpu.inline_mgpu(arg_types=(ROW if x.ndim == 1 else WGMMA, plgpu.RefType(), *[SPLAT] * 4))
    def emit(_, x, ref, *numbers):
        first, stop, column, stop_column = (n.registers.flat[0] for n in numbers)
        less = functools.partial(arith.cmpi, arith.CmpIPredicate.slt)
        # A warp holds 16 rows; four threads share rows r and r + 8.
        thread = thread_number()
        warp, pair = arith.divui(thread, number(32)), arith.remui(thread, number(4))
        row = arith.addi(arith.divui(thread, number(4)), arith.muli(warp, number(8)))
        values, kind = (scalars(x), f32()) if wide else (words(x), i32())
        for half in range(2):
            mine = arith.addi(row, number(8 * half))
            i = arith.addi(first, arith.divui(mine, number(room)))
            j = arith.addi(column, arith.remui(mine, number(room)))
            exists = arith.andi(less(i, stop), less(j, stop_column))
            if width == 1:
                exists = arith.andi(exists, less(pair, number(1)))
            at = arith.addi(arith.muli(_wide(i), _wide(number(columns))), _wide(j))
            at = arith.muli(at, _wide(number(of_row)))
            at = arith.addi(at, _wide(arith.muli(pair, number(each))))
            place = internals.getelementptr(pointer_to(ref), [at], kind)
            for group in range(len(values) // (2 * each)):
                internals.inline_ptx(
                    store,
                    internals.getelementptr(place, [4 * each * group], kind),
                    *values[(2 * group + half) * each :][:each],
                    predicate=exists,
                    has_side_effects=True,
                )

    emit(x, ref, first, stop, column, stop_column)


def store_zeros(ref, first, head, rows: int):
    """Store zeros in `rows` rows of a head from `first` on, as far as they exist.

    Args:
        ref: device memory, [T, N, H] of 16 bits, H a multiple of 8.
        first: the first row.
        head: the head.
        rows: a multiple of 128.
    """
    length, heads, width = ref.shape
    stores = width // AT_A_TIME

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, SPLAT))
    def emit(_, ref, first, head):
        first, head = (x.registers.flat[0] for x in (first, head))

        @_for_each_of_threads(rows * stores)
        def _(i):
            row = arith.addi(first, arith.divui(i, number(stores)))
            column = arith.muli(arith.remui(i, number(stores)), number(AT_A_TIME))
            at = arith.muli(_wide(row), _wide(number(heads * width)))
            at = arith.addi(at, _wide(arith.addi(arith.muli(head, number(width)), column)))
            exists = arith.cmpi(arith.CmpIPredicate.slt, row, number(length))
            place = internals.getelementptr(pointer_to(ref), [at], ir.IntegerType.get_signless(16))
            _store_zeros("global", place, exists)

    emit(ref, first, head)


def zero_rows(ref, first, stop=None):
    """Store zeros in the rows of a tile in shared memory from `first` on, up to `stop` or the last.

    Call `fence` afterwards, or `commit_smem` where products of other warps read the tile.

    Args:
        ref: one of `strips` or a column block, 16-bit [rows, width]; swizzled within a row.
        first: the first row, an int32 that may be negative.
        stop: the first row that is kept behind these, an int32; None for none.
    """
    (rows, width), ends = ref.shape, [first] if stop is None else [first, stop]

    @plgpu.inline_mgpu(arg_types=(strips_type(ref), *[SPLAT] * len(ends)))
    def emit(_, ref, *ends):
        pointer = internals.memref_ptr(ref)
        first, *stop = (
            arith.muli(arith.maxsi(x.registers.flat[0], number(0)), number(width // AT_A_TIME))
            for x in ends
        )

        @_for_each_of_threads(rows * width // AT_A_TIME, first)
        def _(i):
            at = arith.muli(i, number(AT_A_TIME))
            place = internals.getelementptr(pointer, [at], ir.IntegerType.get_signless(16))
            inside = arith.cmpi(arith.CmpIPredicate.uge, i, first)
            for x in stop:
                inside = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.ult, i, x))
            _store_zeros("shared", place, inside)

    emit(ref, *ends)


def _wide(i):
    """Return an int32 as an int64."""
    return arith.extsi(ir.IntegerType.get_signless(64), i)


def _bits(rows, shape):
    """Return whether each bit is set, for words of a thread's first row and of its second.

    The lowest bit belongs to the thread's first column. In assembly, because LLVM would shift once
    for each bit.
    """
    values, i1 = [], ir.IntegerType.get_signless(1)
    for group, half, two in np.ndindex(shape[1] // 8, 2, 2):
        word, bit = divmod(8 * group + two, BITS)
        text = f"{{ .reg .b32 t; and.b32 t, $1, {1 << bit}; setp.ne.b32 $0, t, 0; }}"
        values.append(llvm.inline_asm(i1, [rows[half][word]], text, "=b,r", asm_dialect=0))
    return array(values, shape, WGMMA, i1, False)


def _for_each_of_threads(count: int, first=None):
    """Run `body(i)` for all i below `count`, a multiple of 128; each is one thread's.

    It begins at `first`, or up to 127 before. A loop, because unrolled code would take registers
    from the consumers.
    """

    def run(body):
        turns, thread = number(128), thread_number()
        before = number(0) if first is None else arith.divui(first, turns)

        @mgpu.fori(arith.subi(number(count // 128), before), [])
        def _(i, _):
            body(arith.addi(thread, arith.muli(arith.addi(i, before), turns)))
            return []

    return run


def _store_zeros(space: str, place, condition):
    """Store 16 bytes of zeros where the condition holds."""
    internals.inline_ptx(
        f"st.{space}.v4.b32 [$0], {{$1, $1, $1, $1}};",
        place,
        number(0),
        predicate=condition,
        has_side_effects=True,
    )
