"""Which attention layer the GPT of `train_gpt.py` is built with, and what serves it here."""

import jax
import jax.numpy as jnp

import pallas_flash
from models.gpt import GPTConfig
from models.sharding import AXES, Layout
from pallas_flash.flax import SelfAttention, apply_rope
from scripts.training.messages import UserError


class CudnnSelfAttention(SelfAttention):
    """The same layer and parameters through cuDNN's attention, for comparison in training."""

    def __init__(self, *args, **kwargs):
        # What serves calls with a cache; "cudnn" is none of the package's.
        super().__init__(*args, **(kwargs | {"implementation": None}))

    def __call__(self, x, *, decode=False):
        """Mixes the tokens of each sequence; with a cache as the package does."""
        if decode:
            return super().__call__(x, decode=True)
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.rope_theta is not None:
            positions = jnp.arange(x.shape[-2], dtype=jnp.int32)
            q, k = (apply_rope(y, positions, self.rope_theta) for y in (q, k))
        return self.out(_cudnn(q, k, v))


def _cudnn(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def attention_layer(model: GPTConfig) -> type[SelfAttention]:
    """The class of the model's attention layers."""
    return CudnnSelfAttention if model.attention == "cudnn" else SelfAttention


def explain_attention(model: GPTConfig, sequences: int, layout: Layout) -> tuple[str, str]:
    """Which attention serves a device in a step on `sequences` full contexts, and the reasons.

    Raises:
        UserError: The one asked for does not serve it here.
    """
    data, fsdp, sequence, tensor = (layout.mesh.shape[name] for name in AXES)
    # Attention itself is told how a sequence is divided; of the rest a device has its share.
    places = layout.sharding(None, "sequence") if sequence > 1 else None
    order = layout.order(model.context)
    positions = None if order is None else order[None]
    query, key = (
        jax.ShapeDtypeStruct(
            (sequences // (data * fsdp), model.context, heads // tensor, model.head_dim),
            jnp.dtype(model.dtype),
            sharding=places,
        )
        for heads in (model.num_heads, model.kv_heads)
    )
    if model.attention == "cudnn":
        _check_cudnn(query, key)
        return "cudnn", "cudnn: asked for."
    try:
        told = pallas_flash.explain(
            query,
            key,
            key,
            is_causal=True,
            implementation=model.attention,
            query_positions=positions,
            key_value_positions=positions,
        )
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"`attention` must be one that serves here; got: {error}") from error
    return told.implementation, str(told)


def _check_cudnn(query, key):
    """Raises unless cuDNN serves these shapes, forward and backward."""
    if jax.default_backend() != "gpu" or query.dtype != jnp.bfloat16:
        raise UserError(
            "`attention` cudnn must have a GPU and bfloat16 activations; got "
            f"{query.dtype} on a {jax.default_backend()}: choose another --attention."
        )
    try:
        jax.eval_shape(lambda q, k, v: jax.vjp(_cudnn, q, k, v)[1](q), query, key, key)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"`attention` cudnn must be served by the cuDNN here; got: {error} Choose another "
            "--attention."
        ) from error
