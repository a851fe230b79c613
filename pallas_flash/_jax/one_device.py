"""Computations that JAX's types of sharded arrays do not follow.

Inside `jax.shard_map` and under Explicit axes, JAX gives every array a type with its sharding, and
checks each operation by these types. Pallas's interpreter and Mosaic GPU do not pass the check.
Kernels of one device do not use the mesh. So they are traced without these types, and
`on_one_device` makes one primitive of them. Its results vary over every manual mesh axis over which
an operand varies. The primitive has no derivative, because custom derivatives surround the passes
that call it.

Operations outside of these passes would need the sharding of each result under Explicit axes.
`divided_by_xla` leaves it to XLA, as under Auto axes, and `whole` gathers a small array first.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_flash._jax import compat


def on_one_device(function: Callable, *args) -> Any:
    """Return `function(*args)`, computed without the mesh; inside a `shard_map` as one primitive.

    Args:
        function: maps pytrees of arrays to pytrees of arrays, and uses no mesh axis.
        *args: the arguments.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        mesh = explicit_mesh(args)
        if mesh is None:
            return function(*args)
        with jax.sharding.use_abstract_mesh(mesh):
            return on_one_device(function, *args)
    arrays, structure = jax.tree.flatten(args)

    def of_arrays(*arrays):
        return function(*jax.tree.unflatten(structure, arrays))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with _alone():
        program, out = jax.make_jaxpr(of_arrays, return_shape=True)(*shapes)
    results = _on_one_device.bind(*arrays, program=program)
    return jax.tree.unflatten(jax.tree.structure(out), results)


def explicit_mesh(tree) -> Any:
    """Return the mesh with Explicit axes on which an array of a pytree lies, or None."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def divided_by_xla(function: Callable, like, *args) -> Any:
    """Return `function(*args)`, which XLA divides over Explicit axes as it does over Auto ones.

    Args:
        function: maps pytrees of arrays to a pytree of arrays.
        like: arrays that the results are divided as, a pytree of the form of the results; None:
            every device has all of the results.
        *args: the arguments.
    """
    mesh = explicit_mesh((like, args))
    if mesh is None:
        return function(*args)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    where: Any = NamedSharding(mesh, PartitionSpec())
    if like is not None:
        where = jax.tree.map(lambda x: NamedSharding(mesh, jax.typeof(x).sharding.spec), like)
    return jax.sharding.auto_axes(function, axes=explicit, out_sharding=where)(*args)


def whole(x, *axes: int) -> jax.Array:
    """Return an array of which every device has these axes whole, all of them by default."""
    axes = axes or tuple(range(x.ndim))
    return _placed(x, [None if i in axes else name for i, name in enumerate(_names(x))])


def divided_alike(x, like, first: int = 0) -> jax.Array:
    """Return an array that Explicit axes divide as they divide `like` from axis `first` on."""
    names = _names(like)[first : first + x.ndim]
    return _placed(x, [None if n == 1 else name for n, name in zip(x.shape, names, strict=True)])


def _names(x) -> list:
    """Return the names of the mesh axes that divide each axis of an array, as its type has them."""
    return list(jax.typeof(x).sharding.spec)


def _placed(x, names: list):
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types or names == _names(x):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*names)))


_on_one_device = Primitive("pallas_flash_on_one_device")
_on_one_device.multiple_results = True
_on_one_device.def_impl(lambda *arrays, program: jaxpr_as_fun(program)(*arrays))


@_on_one_device.def_abstract_eval
def _(*operands, program):
    return [compat.varying_like(x, operands) for x in program.out_avals]


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
    device = compat.abstract_device()
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
