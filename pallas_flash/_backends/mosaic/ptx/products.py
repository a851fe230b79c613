"""Products of tiles (wgmma), and waits for them."""

# The types of MLIR's Python bindings do not say what these functions take and return.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOptionalCall=false

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, scf, vector

from pallas_flash._backends.mosaic.ptx.layouts import (
    ACC,
    ROW,
    SPLAT,
    WGMMA,
    columns_of,
    strips_type,
    tiled,
    tiles_of,
)
from pallas_flash._backends.mosaic.ptx.registers import (
    array,
    assembly,
    f32,
    float32,
    i32,
    number,
    scalars,
    words,
)
from pallas_flash._jax import compat

plgpu = compat.mosaic_gpu()
internals = compat.mosaic_gpu_internals()


def product_t(a_ref, b_ref, inner: int | None = None, acc=None):
    """Start a @ b.T, [64, n], for a and b in shared memory; call `wait` for it.

    Args:
        a_ref: `strips` of [64, k].
        b_ref: `strips` of [n, k], as wide.
        inner: how many of the k columns to multiply, by default all; the rest, up to a multiple of
            16, must be zeros.
        acc: the result of a product, which may be running, to which this one is added; or None.
    """
    shape, inner = (a_ref.shape[1], b_ref.shape[1]), inner or columns_of(a_ref)
    sums = () if acc is None else (acc,)

    @plgpu.inline_mgpu(
        arg_types=(strips_type(a_ref), strips_type(b_ref), *[ACC] * len(sums)),
        return_type=float32(shape, ACC),
    )
    def emit(_, a, b, *sums):
        b = mgpu.memref_transpose(tiles_of(b), (1, 0, 3, 2))
        registers = scalars(sums[0]) if sums else None
        return array(_multiply(tiles_of(a), b, registers, shape[1], inner), shape, ACC)

    return emit(a_ref, b_ref, *sums)


def product_of_transposed(a_ref, b_ref):
    """Start a.T @ b, [64, n], for a [k, 64], `tiled` as wide as the `strips` of [k, n] are."""
    inner, width = a_ref.shape
    shape = width, columns_of(b_ref)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tiled(b_ref.shape[-1])), strips_type(b_ref)),
        return_type=float32(shape, ACC),
    )
    def emit(_, a, b):
        a = mgpu.memref_transpose(a, (1, 0, 3, 2))
        return array(_multiply(a, tiles_of(b), None, shape[1], inner), shape, ACC)

    return emit(a_ref, b_ref)


def accumulate(acc, a, b_ref):
    """Start acc + a @ b, [64, n], for b in shared memory, `strips` of [k, n or more].

    `a` is [64, k]: in registers, or in shared memory, `tiled` as wide as the strips. Its registers
    are in use until the product was waited for.
    """
    in_registers = isinstance(a, jax.Array)
    kind = WGMMA if in_registers else plgpu.RefType(tiled(b_ref.shape[-1]))

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, kind, strips_type(b_ref)), return_type=float32(acc.shape, ACC)
    )
    def emit(_, acc, given, b):
        registers = _multiply(given, tiles_of(b), scalars(acc), acc.shape[1], a.shape[1])
        return array(registers, acc.shape, ACC)

    return emit(acc, a, b_ref)


def wait(products: int, x, a=None):
    """Wait until at most `products` are running; return `x`, usable then, in layout WGMMA.

    `a` are the registers that its product reads, if any.
    """
    operands = () if a is None else (a,)

    @plgpu.inline_mgpu(
        arg_types=(ACC, *[WGMMA] * len(operands)), return_type=float32(x.shape, WGMMA)
    )
    def emit(_, x, *operands):
        registers = _wait(products, [*scalars(x), *(w for a in operands for w in words(a))])
        return array(registers[: x.shape[1] // 2], x.shape, WGMMA)

    return emit(x, *operands)


def uniform_zero(x):
    """Return an int32 0 that the compiler does not know before `x`, one number a row, is computed.

    `x` must not be negative. ptxas moves arithmetic across the waits for products; it does not
    move it across the wait at a barrier whose number is computed from it.
    """

    @plgpu.inline_mgpu(
        arg_types=(ROW,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLAT)
    )
    def emit(_, x):
        total = arith.addf(*scalars(x))
        negative = arith.cmpf(arith.CmpFPredicate.OLT, total, mgpu.c(0.0, f32()))
        any_lane = nvvm.vote_sync(number(-1), negative, nvvm.VoteSyncKind.any)
        return mgpu.FragmentedArray.splat(arith.extui(i32(), any_lane), (), is_signed=True)

    return emit(x)


def rescale(acc, alpha):
    """Return acc, [64, n], times alpha, [64]; warps whose alpha are all one skip the product."""

    @plgpu.inline_mgpu(arg_types=(WGMMA, ROW), return_type=float32(acc.shape, WGMMA))
    def emit(_, acc, alpha):
        pairs, factors = list(acc.registers.flat), scalars(alpha)
        one = mgpu.c(1.0, f32())
        changed = [arith.cmpf(arith.CmpFPredicate.UNE, x, one) for x in factors]
        any_lane = nvvm.vote_sync(number(-1), arith.ori(*changed), nvvm.VoteSyncKind.any)
        branch = scf.IfOp(any_lane, [pairs[0].type] * len(pairs), has_else=True)
        with ir.InsertionPoint(branch.then_block):
            # Two columns of the thread's first row, two of its second, and so on.
            factors = [vector.broadcast(pairs[0].type, x) for x in factors]
            scf.yield_([arith.mulf(x, factors[i % 2]) for i, x in enumerate(pairs)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(pairs)
        registers = np.array(branch.results, dtype=object).reshape(acc.registers.shape)
        return compat.fragmented_array(registers, WGMMA.to_mgpu(), None)

    return emit(acc, alpha)


def _wait(products: int, registers: list) -> list:
    """`registers` after a wait: nothing that uses them can move before it."""
    kinds = [x.type for x in registers]
    outputs = ["=f" if kind == f32() else "=r" for kind in kinds]
    inputs = [str(i) for i in range(len(registers))]
    text = f"wgmma.wait_group.sync.aligned {products};"
    return assembly(text, outputs + inputs, registers, kinds)


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
    # One side of a tile has 8 numbers, whichever way it is read, and the other side has more.
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
        operands_a, offset_a, transposed_a = words(a), None, ""
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
    return assembly(text, constraints, [*tied, *operands_a, base_b], [f32()] * results)
