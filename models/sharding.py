"""How a GPT lies on a mesh of devices: which axis of the mesh divides which axis of which array.

    data       the examples
    fsdp       the examples, too; and an axis of each matrix, which is gathered where it is used
    sequence   the tokens of an example
    tensor     the heads of attention and the hidden units of the MLP

Axes are Auto: these are the places that arrays have to be in, and XLA's partitioner derives from
them what is sent. An optimizer's moments lie as their parameters do.
"""

import dataclasses
import re
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from pallas_flash import balanced_order

# From the outside to the inside: the devices of a host are neighbours on the last axes, whose
# messages a layer waits for.
AXES = ("data", "fsdp", "sequence", "tensor")
EXAMPLES = ("data", "fsdp")

# The end of a parameter's path, and the axis of the mesh for each axis of the array.
RULES = (
    (r"attention/(query|key|value)/kernel", PartitionSpec("fsdp", "tensor")),  # [C, heads, H]
    (r"attention/out/kernel", PartitionSpec("tensor", None, "fsdp")),  # [heads, H, C]
    (r"mlp/(gate|up)/kernel", PartitionSpec("fsdp", "tensor")),  # [C, hidden]
    (r"mlp/down/kernel", PartitionSpec("tensor", "fsdp")),  # [hidden, C]
    (r"embedding", PartitionSpec(None, "fsdp")),  # [vocab, C]
    (r"scale", PartitionSpec()),
)


def rule(path: str) -> PartitionSpec:
    """Where the parameter at a path lies, as in `blocks/0/mlp/up/kernel`.

    Raises:
        ValueError: No rule, or more than one, is about it.
    """
    found = [spec for pattern, spec in RULES if re.search(rf"(^|/){pattern}$", path)]
    if len(found) != 1:
        raise ValueError(f"`RULES` must have one line for each parameter; got {found} for {path}.")
    return found[0]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The places of a model's arrays on a mesh with the four axes above.

    Attributes:
        mesh: The devices.
    """

    mesh: Mesh

    def sharding(self, *axes) -> NamedSharding:
        """The one that divides the axes of an array by these of the mesh, one after the other."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def of(self, state: Any) -> Any:
        """The sharding of every array in a tree of parameters, or of an optimizer's state."""

        def lie(path, x):
            path = jax.tree_util.keystr(path, simple=True, separator="/")
            return NamedSharding(self.mesh, rule(path) if x.ndim else PartitionSpec())

        return jax.tree_util.tree_map_with_path(lie, state)

    def place(self, module: nnx.Module) -> None:
        """Moves the parameters of a module, or of a part of one, to where they belong."""
        state = nnx.to_pure_dict(nnx.state(module))
        nnx.update(module, jax.tree.map(_spread, state, self.of(state)))

    def order(self, length: int) -> Int32[Array, " T"] | None:
        """The positions of the tokens of a text as they lie here; None if one after the other.

        Where devices share a text they have equal work under the causal mask, if its length is a
        multiple of twice their number.
        """
        devices = self.mesh.shape["sequence"]
        if devices == 1 or length % (2 * devices):
            return None
        return balanced_order(length, devices)

    def stream(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """Divides the examples and the tokens of what is between two layers."""
        return jax.lax.with_sharding_constraint(x, self.sharding(EXAMPLES, "sequence"))


def _spread(x, sharding: NamedSharding):
    """An array that every process has made alike, of which each keeps what its devices hold."""
    if isinstance(x, jax.core.Tracer):
        return x
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
