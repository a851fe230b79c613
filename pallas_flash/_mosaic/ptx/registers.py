"""The registers of one thread, and what is computed from them by assembly."""

# The types of MLIR's Python bindings do not say what these functions take and return.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOptionalCall=false

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_flash import _compat
from pallas_flash._mosaic.ptx.layouts import WGMMA

plgpu = _compat.mosaic_gpu()
internals = _compat.mosaic_gpu_internals()


def f32():
    """The type of MLIR."""
    return ir.F32Type.get()


def i32():
    """Likewise, without a sign."""
    return ir.IntegerType.get_signless(32)


def float32(shape, layout):
    """The type of such a result."""
    return plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)


def scalars(x) -> list:
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


def words(x) -> list:
    """The registers of a tile of 16 bits, two numbers in each."""
    one = ir.VectorType.get((1,), i32())
    return [
        vector.extract(vector.bitcast(one, r), dynamic_position=[], static_position=[0])
        for r in x.registers.flat
    ]


def array(scalars, shape, layout, kind=None, signed=True):
    """What has these registers, of float32 or of another `kind`, in the order of `scalars`."""
    kind, layout = kind or f32(), layout.to_mgpu()
    width = layout.vector_length
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for i in range(registers.size):
        mine = scalars[i * width : (i + 1) * width]
        registers.flat[i] = vector.from_elements(ir.VectorType.get((width,), kind), mine)
    return _compat.fragmented_array(
        registers, layout, signed if isinstance(kind, ir.IntegerType) else None
    )


def pointer_to(ref):
    """A pointer to what is in device memory."""
    pointer = internals.memref_ptr(ref)
    if pointer.type.address_space == 0:
        pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), pointer)
    return pointer


def number(i: int):
    """An int32."""
    return mgpu.c(i, i32())


def thread_number():
    """Its number in the warpgroup."""
    return arith.remui(mgpu.thread_idx(), number(128))


def elementwise(text: str, *arrays):
    """Assembly with a float32 result for float32 [64, n], which compilers may move and drop."""

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


def assembly(text: str, constraints: list[str], arguments: list, results: list) -> list:
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
