"""One primitive for all that one device computes alone.

Inside `jax.shard_map` and under Explicit axes, JAX gives every array a type with its sharding, and
checks each operation by these types. Pallas's interpreter and Mosaic GPU do not pass the check.
Kernels of one device do not use the mesh. So they are traced without these types, and
`on_one_device` makes one primitive of them. Its results vary over every manual mesh axis over which
an operand varies.

The primitive has no derivative, because custom derivatives surround the passes that call it.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from pallas_flash import _compat


def on_one_device(function: Callable, *args) -> Any:
    """Return `function(*args)`, computed without the mesh; inside a `shard_map` as one primitive.

    Args:
        function: maps pytrees of arrays to pytrees of arrays, and uses no mesh axis.
        *args: the arguments.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return function(*args)
    arrays, structure = jax.tree.flatten(args)

    def of_arrays(*arrays):
        return function(*jax.tree.unflatten(structure, arrays))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with _alone():
        program, out = jax.make_jaxpr(of_arrays, return_shape=True)(*shapes)
    results = _on_one_device.bind(*arrays, program=program)
    return jax.tree.unflatten(jax.tree.structure(out), results)


_on_one_device = Primitive("pallas_flash_on_one_device")
_on_one_device.multiple_results = True
_on_one_device.def_impl(lambda *arrays, program: jaxpr_as_fun(program)(*arrays))


@_on_one_device.def_abstract_eval
def _(*operands, program):
    return [_compat.varying_like(x, operands) for x in program.out_avals]


def _lower(context, *operands, program):
    context = context.replace(avals_in=program.in_avals)
    with _alone():
        return mlir.lower_fun(jaxpr_as_fun(program))(context, *operands)


def _batched(arrays, dims, *, program):
    def mapped(*arrays):
        return on_one_device(jax.vmap(jaxpr_as_fun(program), tuple(dims)), *arrays)

    mesh, names = _dividing(arrays, dims)
    if names:
        # Each device maps over its own part of the axis.
        specs = tuple(PartitionSpec() if d is None else _spec(names, d) for d in dims)
        mapped = jax.shard_map(
            mapped, mesh=mesh, in_specs=specs, out_specs=_spec(names, 0), axis_names=set(names)
        )
    results = mapped(*arrays)
    return results, [0] * len(results)


mlir.register_lowering(_on_one_device, _lower)
batching.primitive_batchers[_on_one_device] = _batched


def _dividing(arrays, dims) -> tuple[Any, tuple]:
    """Return the mesh, and the names of its Explicit axes that divide the mapped axis."""
    for x, dim in zip(arrays, dims, strict=True):
        sharding = jax.typeof(x).sharding
        if dim is not None and (names := sharding.spec[dim]) is not None:
            return sharding.mesh, names if isinstance(names, tuple) else (names,)
    return None, ()


def _spec(names: tuple, dim: int) -> PartitionSpec:
    return PartitionSpec(*[None] * dim, names)


def _alone():
    """Trace without a mesh, for the described device."""
    device = _compat.abstract_device()
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
