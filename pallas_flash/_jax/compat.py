"""Every name of JAX that moves between versions, and why the package needs it."""

import contextlib
import functools
import os
import re
import traceback
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def abstract_device():
    """Return the device that the current abstract mesh describes, or None; it need not exist."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def described_device(device):
    """Trace and lower for one described device; None: for the machine's own."""
    if device is None:
        return contextlib.nullcontext()
    auto = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def not_for_older_jax():
    """Export for this process alone, so that newer operations may be used."""
    # `jax.config.update` is for all threads, and this setting has no public context.
    from jax._src import config

    return config.export_ignore_forward_compatibility(True)


@functools.cache
def triton():
    """Return `jax.experimental.pallas.triton`, imported late.

    JAX has announced its removal, and some platforms lack it.

    Raises:
        ImportError: if this JAX has no Triton lowering.
    """
    from jax.experimental.pallas import triton

    _name_triton_dialect()
    return triton


def _name_triton_dialect() -> None:
    """Halve the time of lowering through Triton.

    For each value of a Triton type, MLIR looks for a Python module of the dialect. jaxlib has none,
    and MLIR remembers only a module that it finds, so it gets `mlir_dialects.tt` to find.
    """
    try:
        from jaxlib.mlir._mlir_libs import _mlir

        _mlir.globals.append_dialect_search_prefix("pallas_flash._jax.mlir_dialects")
    except (ImportError, AttributeError):
        pass  # The time is all that is lost.


def failing_operation(error: BaseException) -> str | None:
    """Return the operation at which Pallas failed to lower a kernel, if the error tells."""
    # Pallas names it in the message of some errors alone, or of all by a flag of the whole process,
    # `jax_pallas_verbose_errors`. Its frames have it until that flag has a context.
    operation, cause = None, error
    while cause is not None and operation is None:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            # Pallas loops over the equations of a jaxpr, inside over inner jaxprs' equations.
            primitive = getattr(frame.f_locals.get("eqn"), "primitive", None)
            operation = getattr(primitive, "name", operation)
        # JAX may leave its own frames out of an error; the cause has them.
        cause = cause.__cause__
    return operation


def has_triton() -> bool:
    """Whether kernels can be lowered through Triton by this JAX."""
    try:
        triton()
    except ImportError:
        return False
    return True


@functools.cache
def _compiler_params():
    """Return a class of CompilerParams whose lowering does not warn.

    From JAX 0.11.2 on, each lowering through Triton gives a DeprecationWarning, which is an error
    in users' strict tests. It comes while a user compiles, so that no context around our own calls
    could catch it, and a filter of ours would be gone where a cached trace is lowered. A subclass
    with its own lowering rule is left, until JAX removes the backend.
    """
    base = triton().CompilerParams
    try:
        from jax._src.pallas.core import get_lowering_rule, register_lowering_rule

        # Importing this module registers the rule that is looked up below.
        from jax._src.pallas.triton import pallas_call_registration as _  # noqa: F401
    except ImportError:
        return base
    lower = get_lowering_rule(base, "gpu")
    if lower is None:
        return base

    class QuietCompilerParams(base):
        pass

    def quietly(*args, **kwargs):
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
            )
            return lower(*args, **kwargs)

    register_lowering_rule(QuietCompilerParams, quietly, "gpu")
    return QuietCompilerParams


def compiler_params(num_warps: int, num_stages: int):
    """Return launch parameters, without which JAX 0.9 to 0.11.1 may choose another backend."""
    return _compiler_params()(num_warps=num_warps, num_stages=num_stages)


# The first JAX whose Mosaic GPU has the operations that the kernels use.
MOSAIC_SINCE = (0, 11, 2)


def has_mosaic_gpu() -> bool:
    """Whether kernels can be lowered through Mosaic GPU by this JAX."""
    return jax.__version_info__ >= MOSAIC_SINCE


def mosaic_gpu() -> Any:
    """Return `jax.experimental.pallas.mosaic_gpu`, imported late because that takes time."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


@functools.cache
def mosaic_gpu_internals() -> Any:
    """Return functions of `jax.experimental.mosaic.gpu` that it does not export.

    * getelementptr, memref_ptr, inline_ptx: addresses, and assembly at them;
    * tiled_memref_shape, create_descriptor, encode_addr, Dim: descriptors of operands of matrix
      instructions in shared memory.
    """
    from jax.experimental.mosaic.gpu import mma_utils
    from jax.experimental.mosaic.gpu.utils import (
        getelementptr,
        inline_ptx,  # pyright: ignore[reportAttributeAccessIssue]  # Not before `MOSAIC_SINCE`.
        memref_ptr,
    )

    return types.SimpleNamespace(
        getelementptr=getelementptr,
        inline_ptx=inline_ptx,
        memref_ptr=memref_ptr,
        tiled_memref_shape=mma_utils.tiled_memref_shape,
        create_descriptor=mma_utils.create_descriptor,
        encode_addr=mma_utils.encode_addr,
        Dim=mma_utils.Dim,
    )


def fragmented_array(registers, layout, is_signed) -> Any:
    """Return a warpgroup's array from a thread's registers; JAX has no public function for it."""
    from jax.experimental.mosaic.gpu import FragmentedArray

    return FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def xla_is_deterministic() -> bool:
    """Whether XLA's flags ask for GPU programs that give the same bits each time."""
    flags = os.environ.get("XLA_FLAGS", "")
    names = "deterministic_ops", "exclude_nondeterministic_ops"
    values = re.findall(rf"--xla_gpu_(?:{'|'.join(names)})(?:=(\S+))?(?:\s|$)", flags)
    return any(value.lower() in ("", "1", "true") for value in values)


def accumulator_layout() -> Any:
    """Return the layout of float32 accumulators of wgmma, one number a register.

    JAX has announced that it will merge this layout with `WGMMA`, of two numbers a register.
    """
    layout = mosaic_gpu().Layout
    return getattr(layout, "_WGMMA_ACC_32BIT", layout.WGMMA)


def out_shape(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
    """Return the type of a kernel's output, which varies over no mesh axis for `shard_map`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType())


def varying_like(x, operands):
    """Return the type `x`, varying over the manual mesh axes of the types `operands`."""
    axes = frozenset().union(*(y.manual_axis_type.varying for y in operands))
    mesh = jax.sharding.get_abstract_mesh()
    return ShapedArray(
        x.shape,
        x.dtype,
        sharding=NamedSharding(mesh, PartitionSpec(*[None] * x.ndim)),
        manual_axis_type=jax.sharding.ManualAxisType(varying=axes),
    )


def vary_alike(tree):
    """Return the arrays of `tree`, varying over every manual mesh axis of any of them.

    Loops and custom derivatives demand this under shard_map's checks. The transpose sums the
    gradient of an operand that all devices share, in float32 or wider.
    """
    axes = frozenset().union(*map(_varying_axes, jax.tree.leaves(tree)))

    def vary(x):
        missing = tuple(sorted(axes - _varying_axes(x)))
        if not missing:
            return x
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jax.lax.pcast(x, missing, to="varying")
        wide = x.astype(np.promote_types(x.dtype, np.float32))
        return jax.lax.pcast(wide, missing, to="varying").astype(x.dtype)

    return jax.tree.map(vary, tree)


def on_mesh(around, shardings) -> tuple[Mesh, list[NamedSharding]]:
    """Return a program's mesh, and the shardings that XLA has chosen by the axes of that mesh.

    `custom_partitioning` looks for a mesh in the arguments of the program, and in `with mesh`. It
    does not know the one of `jax.set_mesh`, which is `around` as an abstract mesh.
    """
    from jax._src.sharding_impls import parse_flatten_op_sharding

    devices = np.array(shardings[0]._device_assignment).reshape(around.axis_sizes)
    mesh = Mesh(devices, around.axis_names)
    specs = [parse_flatten_op_sharding(x._hlo_sharding, mesh)[0] for x in shardings]
    return mesh, [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]


def shared(x, tree) -> bool:
    """Whether `x` is the same along a manual mesh axis over which another array varies."""
    return any(_varying_axes(y) - _varying_axes(x) for y in jax.tree.leaves(tree))


def _varying_axes(x) -> frozenset:
    return getattr(getattr(jax.typeof(x), "mat", None), "varying", frozenset())
