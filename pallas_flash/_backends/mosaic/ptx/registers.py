"""The registers of one thread, and assembly on them."""

# The types of MLIR's Python bindings do not say what these functions take and return.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOptionalCall=false

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_flash._backends.mosaic.ptx.layouts import WGMMA
from pallas_flash._jax import compat

plgpu = compat.mosaic_gpu()
internals = compat.mosaic_gpu_internals()


def f32():
    """Return the type float32 of MLIR."""
    return ir.F32Type.get()


def i32():
    """Return the signless type int32 of MLIR."""
    return ir.IntegerType.get_signless(32)


def float32(shape, layout):
    """Return the type of a float32 result in a layout."""
    return plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)


def scalars(x) -> list:
    """Return the float32 registers of a thread, in the order of wgmma."""
    return (
        [
            vector.extract(register, dynamic_position=[], static_position=[i])
            for register in x.registers.flat
            for i in range(ir.VectorType(register.type).shape[0])
        ]
        if isinstance(x.registers.flat[0].type, ir.VectorType)
        else list(x.registers.flat)
    )


def words(x) -> list:
    """Return the registers of a 16-bit tile, two numbers in each."""
    one = ir.VectorType.get((1,), i32())
    return [
        vector.extract(vector.bitcast(one, r), dynamic_position=[], static_position=[0])
        for r in x.registers.flat
    ]


def array(scalars, shape, layout, kind=None, signed=True):
    """Return the array with these registers of a `kind`, in the order of `scalars`."""
    kind, layout = kind or f32(), layout.to_mgpu()
    width = layout.vector_length
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for i in range(registers.size):
        mine = scalars[i * width : (i + 1) * width]
        registers.flat[i] = vector.from_elements(ir.VectorType.get((width,), kind), mine)
    return compat.fragmented_array(
        registers, layout, signed if isinstance(kind, ir.IntegerType) else None
    )


def pointer_to(ref):
    """Return a pointer to device memory."""
    pointer = internals.memref_ptr(ref)
    if pointer.type.address_space == 0:
        pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), pointer)
    return pointer


def number(i: int):
    """Return an int32 constant."""
    return mgpu.c(i, i32())


def thread_number():
    """Return the number of the thread in its warpgroup."""
    return arith.remui(mgpu.thread_idx(), number(128))


def elementwise(text: str, *arrays):
    """Apply assembly to each element of float32 [64, n]; compilers may move and drop it."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,) * len(arrays), return_type=float32(arrays[0].shape, WGMMA)
    )
    def emit(_, *arrays):
        constraints = ",".join(["=f"] + ["f"] * len(arrays))
        results = [
            llvm.inline_asm(f32(), list(x), text, constraints, asm_dialect=0)
            for x in zip(*map(scalars, arrays), strict=True)
        ]
        return array(results, arrays[0].shape, WGMMA)

    return emit(*(plgpu.layout_cast(x, WGMMA) for x in arrays))


def effect(text: str, constraints: list[str], arguments: list) -> None:
    """Emit assembly without a result, that no access of memory is moved across."""
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        arguments,
        text,
        ",".join([*constraints, "~{memory}"]),
        has_side_effects=True,
        asm_dialect=0,
    )


def assembly(text: str, constraints: list[str], arguments: list, results: list) -> list:
    """Emit assembly that stays where it is; return its results."""
    struct = llvm.inline_asm(
        llvm.StructType.get_literal(results),
        arguments,
        text,
        ",".join(constraints),
        has_side_effects=True,
        asm_dialect=0,
    )
    return [llvm.extractvalue(kind, struct, [i]) for i, kind in enumerate(results)]
