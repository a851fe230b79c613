"""The sharding of `Decoder`: which axis of the mesh divides which axis of which array.

    data       the batch
    fsdp       the batch, too; and an axis of each matrix, which is gathered where it is used
    sequence   the tokens of a batch element
    tensor     the heads of attention and the hidden units of the MLP

Axes are Auto: this file gives the shardings of arrays, and XLA's partitioner derives the messages
between devices from them. An optimizer's moments have the shardings of their parameters.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from pallas_flash import attention
from pallas_flash.masks import balanced_order

# Outermost axis first. The devices of a host are neighbours on the last axes, whose messages a
# layer waits for.
AXES = ("data", "fsdp", "sequence", "tensor")
BATCH = ("data", "fsdp")

# The end of a parameter's path, and the axis of the mesh for each axis of the array. A matrix is
# [outputs, inputs].
RULES = (
    (r"(attention/(query|key|value)|mlp/(gate|up))/weight", PartitionSpec("tensor", "fsdp")),
    (r"(attention/out|mlp/down)/weight", PartitionSpec("fsdp", "tensor")),
    (r"(embedding|position_embedding|head)/weight", PartitionSpec(None, "fsdp")),
    # The last are of adapters (`models/lora.py`).
    (r"(\w*norm/weight|bias|sinks|a|b)", PartitionSpec()),
)
# The same for the arrays that attention gets beside queries, keys and values.
OF_ATTENTION = {
    "segment_ids": PartitionSpec(BATCH, "sequence"),
    "query_positions": PartitionSpec(None, "sequence"),
    "key_value_positions": PartitionSpec(None, "sequence"),
    "sinks": PartitionSpec("tensor"),
}


def rule(path: str) -> PartitionSpec:
    """Return the sharding of the parameter at a path, as in `layers/0/mlp/up/weight`.

    Raises:
        ValueError: No rule or more than one rule matches the path.
    """
    specs = [spec for pattern, spec in RULES if re.search(rf"(^|/){pattern}$", path)]
    if len(specs) != 1:
        raise ValueError(f"`RULES` must have one line for each parameter; got {specs} for {path}.")
    return specs[0]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shardings of a model's arrays on a mesh with the four axes above.

    Attributes:
        mesh: The devices.
    """

    mesh: Mesh

    def sharding(self, *axes) -> NamedSharding:
        """Return the sharding that divides the axes of an array by these mesh axes, in order."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def shardings(self, state: Any, name: str = "") -> Any:
        """Return the sharding of each array in a tree of parameters or of an optimizer's state.

        Args:
            state: The tree.
            name: The path of the tree, where it is a part of the model's.
        """

        def lie(path, x):
            path = f"{name}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
            return NamedSharding(self.mesh, rule(path) if x.ndim else PartitionSpec())

        return jax.tree_util.tree_map_with_path(lie, state)

    def place(self, name: str, module: nnx.Module) -> None:
        """Move the parameters of a part of the model, which has this name, to their devices."""
        state = nnx.to_pure_dict(nnx.state(module))
        nnx.update(module, jax.tree.map(_spread, state, self.shardings(state, name)))

    def order(self, length: int) -> Int32[Array, " T"] | None:
        """Return the positions of a text's tokens in the order of the arrays; None if in order.

        If devices share a text and its length is a multiple of twice their number, this order gives
        them equal work under the causal mask.
        """
        devices = self.mesh.shape["sequence"]
        if devices == 1 or length % (2 * devices):
            return None
        return balanced_order(length, devices)

    def stream(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """Divide the batch and the tokens of the activations between two layers."""
        return jax.lax.with_sharding_constraint(x, self.sharding(BATCH, "sequence"))

    def attention(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        **options,
    ) -> Float[Array, "B T N H"]:
        """Call `pallas_flash.attention` on each device's share of batch, tokens and heads.

        XLA's partitioner divides the ordinary call in the same way, but lowers its kernels again
        for every layer, which takes seconds each.
        """
        options = {name: x for name, x in options.items() if x is not None}
        arrays = {name: options.pop(name) for name in OF_ATTENTION if name in options}
        return _by_shares(query, key, value, arrays, layout=self, options=tuple(options.items()))


@functools.partial(jax.jit, static_argnames=("layout", "options"))
def _by_shares(query, key, value, arrays, *, layout: Layout, options: tuple):
    along = "sequence" if layout.mesh.shape["sequence"] > 1 else None

    def call(query, key, value, arrays):
        return attention(query, key, value, sequence_axis=along, **arrays, **dict(options))

    rows = PartitionSpec(BATCH, "sequence", "tensor")
    # Unchecked, because Pallas refuses the kernels for Hopper where it is checked.
    shared = jax.shard_map(
        call,
        mesh=layout.mesh,
        in_specs=(rows, rows, rows, {name: OF_ATTENTION[name] for name in arrays}),
        out_specs=rows,
        check_vma=False,
    )
    return shared(query, key, value, arrays)


def _spread(x, sharding: NamedSharding):
    """Keep the shards of this process's devices of an array that every process has made alike."""
    if isinstance(x, Tracer):
        return x
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
