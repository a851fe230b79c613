"""The mesh of a run: the number of devices on each of its axes, and whether the run fits them.

`models/sharding.py` says what the axes mean, and where every parameter lies.
"""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from models.config import DecoderConfig
from models.errors import UserError
from models.sharding import AXES, Layout
from models.training.processes import say
from models.training.settings import TrainConfig, mesh_sizes


def make_layout(config: TrainConfig, model: DecoderConfig) -> Layout:
    """Return the mesh of all devices of all processes.

    Raises:
        UserError: Its axes do not fit the devices, the model or the batch.
    """
    count = jax.device_count()
    sizes = mesh_sizes(config.mesh or f"data={count}")
    asked = config.mesh or f"data={count} (every device there is)"
    if math.prod(sizes.values()) != count:
        raise UserError(
            f"`mesh` must multiply to the number of devices; got {asked}, which is "
            f"{math.prod(sizes.values())}, and {count} devices: change a size, or show JAX fewer "
            "devices (CUDA_VISIBLE_DEVICES)."
        )
    batch = "batch_size" if config.accumulation == 1 else "batch_size / accumulation"
    for axes, name, size in (
        (("data", "fsdp"), batch, config.microbatch),
        (("fsdp",), "features", model.features),
        (("sequence",), "context", config.context),
        (("tensor",), "num_heads", model.num_heads),
        (("tensor",), "num_kv_heads", model.num_kv_heads),
        (("tensor",), "width of the MLP", model.hidden),
    ):
        devices = math.prod(sizes[axis] for axis in axes)
        if size % devices:
            raise UserError(
                f"`mesh` must divide the run's {name}, {size}, by {' times '.join(axes)}; got "
                f"{asked}, which is {devices}: change that size or this one."
            )
    mesh = jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return Layout(mesh)


def describe_mesh(config: TrainConfig, model: DecoderConfig, layout: Layout):
    """Print the share of each device in a mesh of several."""
    sizes = layout.mesh.shape
    if layout.mesh.size == 1:
        return
    say("mesh", ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1))
    shares = {
        "sequences at once": config.microbatch // (sizes["data"] * sizes["fsdp"]),
        "tokens of each": config.context // sizes["sequence"],
        "heads": model.num_heads // sizes["tensor"],
        "hidden units": model.hidden // sizes["tensor"],
    }
    computes = ", ".join(f"{count:,} {name}" for name, count in shares.items())
    say("", f"a device computes {computes}")
    say("", f"and holds 1/{sizes['fsdp'] * sizes['tensor']} of every matrix of parameters")
    if sizes["sequence"] > 1 and layout.order(config.context) is None:
        equal = 2 * sizes["sequence"]
        say("", f"work is unequal: a multiple of {equal} as the context would make it equal")


def count_of(params) -> int:
    """Return the number of parameters."""
    return sum(x.size for x in jax.tree.leaves(params))


def check_memory(config: TrainConfig, params: Any, sizes, device, frozen: Any = None):
    """Refuse a model whose parameters, gradient and AdamW moments a device cannot hold.

    Args:
        config: The settings.
        params: The shapes of the parameters that are tuned.
        sizes: Number of devices on each axis of the mesh.
        device: One of the devices, a `jax.Device`.
        frozen: The shapes of the others; None: there are none.
    """
    needed = jnp.dtype(config.param_dtype).itemsize * (4 * count_of(params) + count_of(frozen))
    needed //= sizes["fsdp"] * sizes["tensor"]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu":
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = host // jax.local_device_count()
    if limit is not None and needed > limit:
        raise UserError(
            f"`features` and the other sizes must fit the memory of the {device.platform}; got "
            f"{count_of((params, frozen)):,} parameters, which with optimizer and gradient need at "
            f"least {needed / 1e9:,.1f} of {limit / 1e9:,.1f} GB: choose a smaller model, or more "
            "devices on the axis fsdp of --mesh."
        )
