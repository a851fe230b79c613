"""The sharding of a GPT: which axis of the mesh divides which axis of which array.

    data       the batch
    fsdp       the batch, too; and an axis of each matrix, which is gathered where it is used
    sequence   the tokens of a batch element
    tensor     the heads of attention and the hidden units of the MLP

Axes are Auto: this file gives the shardings of arrays, and XLA's partitioner derives the messages
between devices from them. An optimizer's moments have the shardings of their parameters.
"""

import dataclasses
import re
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from pallas_flash.masks import balanced_order

# Outermost axis first. The devices of a host are neighbours on the last axes, whose messages a
# layer waits for.
AXES = ("data", "fsdp", "sequence", "tensor")
BATCH = ("data", "fsdp")

# The end of a parameter's path, and the axis of the mesh for each axis of the array.
RULES = (
    (r"attention/(query|key|value)/kernel", PartitionSpec("fsdp", "tensor")),  # [C, heads, H]
    (r"attention/out/kernel", PartitionSpec("tensor", None, "fsdp")),  # [heads, H, C]
    (r"mlp/(gate|up)/kernel", PartitionSpec("fsdp", "tensor")),  # [C, hidden]
    (r"mlp/down/kernel", PartitionSpec("tensor", "fsdp")),  # [hidden, C]
    (r"embedding", PartitionSpec(None, "fsdp")),  # [vocab, C]
    (r"scale", PartitionSpec()),
    # The same of `Decoder`, with matrices [outputs, inputs].
    (r"(attention/(query|key|value)|mlp/(gate|up))/weight", PartitionSpec("tensor", "fsdp")),
    (r"(attention/out|mlp/down)/weight", PartitionSpec("fsdp", "tensor")),
    (r"(embedding|position_embedding|head)/weight", PartitionSpec(None, "fsdp")),
    (r"(\w*norm/weight|bias|sinks)", PartitionSpec()),
)


def rule(path: str) -> PartitionSpec:
    """Return the sharding of the parameter at a path, as in `blocks/0/mlp/up/kernel`.

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

    def shardings(self, state: Any) -> Any:
        """Return the sharding of every array in a tree of parameters or of an optimizer's state."""

        def lie(path, x):
            path = jax.tree_util.keystr(path, simple=True, separator="/")
            return NamedSharding(self.mesh, rule(path) if x.ndim else PartitionSpec())

        return jax.tree_util.tree_map_with_path(lie, state)

    def place(self, module: nnx.Module) -> None:
        """Move the parameters of a module, or of a part of one, to their devices."""
        state = nnx.to_pure_dict(nnx.state(module))
        nnx.update(module, jax.tree.map(_spread, state, self.shardings(state)))

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


def _spread(x, sharding: NamedSharding):
    """Keep the shards of this process's devices of an array that every process has made alike."""
    if isinstance(x, jax.core.Tracer):
        return x
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
