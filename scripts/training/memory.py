"""Whether a run can fit the memory of its device and its host, told before anything runs."""

import os
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from models.gpt import GPTConfig
from models.sharding import AXES
from scripts.training.messages import UserError
from scripts.training.settings import TrainConfig


def parameter_count(model: GPTConfig) -> int:
    """The parameters of a GPT, counted without building it."""
    attention = 2 * model.embed_dim * model.head_dim * (model.num_heads + model.kv_heads)
    mlp = 3 * model.embed_dim * model.mlp_dim
    norms = 2 * model.embed_dim
    layers = model.num_layers * (attention + mlp + norms)
    return model.vocab_size * model.embed_dim + layers + model.embed_dim


def needed_bytes(config: TrainConfig, sizes: Mapping[str, int]) -> tuple[int, int]:
    """What an update cannot do without, on each device of a mesh and on the host of all.

    On the device: parameters, two moments of AdamW and a gradient; and of a microbatch the residual
    stream before each layer and the logits. On the host: the windows of a batch and of a look at
    the held-out text, and the indices that cut them out.
    """
    data, fsdp, sequence, tensor = (sizes.get(name, 1) for name in AXES)
    model = config.model
    state = 4 * jnp.dtype(model.param_dtype).itemsize * parameter_count(model)
    stream = jnp.dtype(model.dtype or model.param_dtype).itemsize * model.embed_dim
    tokens = config.microbatch * model.context // (data * fsdp * sequence)
    activations = tokens * (model.num_layers * stream + 4 * model.vocab_size)
    index = 1 + jnp.dtype("int64").itemsize
    windows = config.batch_size * config.eval_batches * (model.context + 1) * index
    return state // (fsdp * tensor) + activations, windows


def host_bytes() -> int | None:
    """The memory of this machine; None where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def check_memory(
    config: TrainConfig, device: jax.Device, sizes: Mapping[str, int] = MappingProxyType({})
):
    """Refuses sizes that cannot be allocated; what passes may still need more than there is.

    Args:
        config: The settings.
        device: One of the devices.
        sizes: Of the axes of their mesh.

    Raises:
        UserError: The least that an update needs is more than there is.
    """
    on_device, on_host = needed_bytes(config, sizes)
    on_host //= jax.process_count()
    host = host_bytes()
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu" and host is not None:
        limit = host // jax.local_device_count()
    if limit is not None and on_device > limit:
        raise UserError(
            f"`embed_dim` and the other sizes must fit the memory of the {device.platform}; got "
            f"{parameter_count(config.model):,} parameters, which with optimizer, gradient and the "
            f"activations of {config.microbatch} texts need at least {_gb(on_device)} of "
            f"{_gb(limit)}: choose a smaller model, a smaller batch by --accumulation, or more "
            "devices on the axis fsdp of --mesh."
        )
    if host is not None and on_host > host:
        raise UserError(
            f"`batch_size` times `eval_batches` must fit this machine's memory; got "
            f"{config.batch_size} and {config.eval_batches}, whose texts need at least "
            f"{_gb(on_host)} of {_gb(host)}: choose smaller ones."
        )


def program_bytes(program: jax.stages.Compiled) -> int:
    """What a compiled program holds on each device while it runs, its arguments among it."""
    plan = program.memory_analysis()
    given = plan.argument_size_in_bytes - plan.alias_size_in_bytes
    return given + plan.output_size_in_bytes + plan.temp_size_in_bytes


def peak_bytes() -> int | None:
    """The most that a device of this process has had in use; None where JAX does not count."""
    counts = [
        (device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()
    ]
    return max((x for x in counts if x is not None), default=None)


def out_of_memory(config: TrainConfig) -> UserError:
    """The sentence for a device that turned out to have too little memory."""
    return UserError(
        f"`batch_size` must fit the device's memory; got {config.microbatch} texts of "
        f"{config.model.context} at once, for which it could not allocate all that a program "
        "needs: raise --accumulation, or choose a smaller model."
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
