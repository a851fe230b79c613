"""The mesh of a run: how many devices each of its axes has, and what each device then does.

What the axes mean, and where every parameter lies, is `models/sharding.py`.
"""

import math

import jax
from jax.sharding import AxisType

from models.sharding import AXES, Layout
from scripts.training.messages import UserError, say
from scripts.training.settings import TrainConfig, mesh_sizes


def make_layout(config: TrainConfig) -> Layout:
    """The mesh of all devices of all processes.

    Raises:
        UserError: Its axes do not fit the devices, the model or the batch.
    """
    count = jax.device_count()
    sizes = mesh_sizes(config.mesh or f"data={count}")
    asked = config.mesh or f"data={count} (every device there is)"
    if math.prod(sizes.values()) != count:
        raise UserError(
            f"`mesh` must multiply to the number of devices; got {asked}, which is "
            f"{math.prod(sizes.values())}, and {count} of them: change a size, or show JAX fewer "
            "devices (CUDA_VISIBLE_DEVICES)."
        )
    model = config.model
    texts = "batch_size" if config.accumulation == 1 else "batch_size / accumulation"
    for axes, name, size in (
        (("data", "fsdp"), texts, config.microbatch),
        (("fsdp",), "embed_dim", model.embed_dim),
        (("sequence",), "context", model.context),
        (("tensor",), "num_heads", model.num_heads),
        (("tensor",), "num_kv_heads", model.kv_heads),
        (("tensor",), "hidden size of the MLP", model.mlp_dim),
    ):
        parts = math.prod(sizes[axis] for axis in axes)
        if size % parts:
            raise UserError(
                f"`mesh` must divide the run's {name}, {size}, by {' times '.join(axes)}; got "
                f"{asked}, which is {parts}: change that size or this one."
            )
    if sizes["sequence"] > 1 and model.attention == "cudnn":
        raise UserError(
            f"`mesh` must leave sequences whole for attention by cuDNN; got {asked}: choose "
            "another --attention, or another axis."
        )
    mesh = jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return Layout(mesh)


def describe_mesh(config: TrainConfig, layout: Layout):
    """Prints what the axes of a mesh of several devices are for."""
    sizes, model = layout.mesh.shape, config.model
    if layout.mesh.size == 1:
        return
    used = {name: size for name, size in sizes.items() if size > 1}
    say("mesh", ", ".join(f"{name}={size}" for name, size in used.items()))
    examples = config.microbatch // (sizes["data"] * sizes["fsdp"])
    say("", f"at once, a device computes {examples} of {config.microbatch} examples")
    if sizes["sequence"] > 1:
        tokens = model.context // sizes["sequence"]
        order = "in an order by which all have equal work"
        if layout.order(model.context) is None:
            equal = 2 * sizes["sequence"]
            order = f"in their order; in a context that {equal} divides all had equal work"
        say("", f"and {tokens:,} of their {model.context:,} tokens, {order}")
    if sizes["tensor"] > 1:
        say(
            "",
            f"with {model.num_heads // sizes['tensor']} of {model.num_heads} heads and "
            f"{model.mlp_dim // sizes['tensor']:,} of {model.mlp_dim:,} hidden units",
        )
    parts = sizes["fsdp"] * sizes["tensor"]
    held = "all parameters" if parts == 1 else f"1/{parts} of every matrix of parameters"
    say("", f"it holds {held}, and their optimizer state")
