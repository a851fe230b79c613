"""Kernels in Mosaic GPU, compiled for a GPU that need not be there."""

import jax
import jax.numpy as jnp

from scripts.maintenance.inspection.kernels import compile_kernels


def machine_code_of(function, *shapes):
    """Name, registers, stack and loops of each kernel, compiled for an H200."""
    for kernel in compile_kernels(function, *shapes):
        if kernel.is_mosaic:
            assert not kernel.unset, (kernel.symbol, kernel.unset)
            yield kernel.symbol, kernel.registers, kernel.stack_bytes, kernel.loops


def shaped(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)
