"""Which attention layer the GPT of `train_gpt.py` is built with, and what serves it here."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import pallas_flash
from models.gpt import GPTConfig
from models.sharding import AXES, EXAMPLES, Layout
from pallas_flash.flax import SelfAttention, apply_rope
from scripts.training.messages import UserError


class _By(SelfAttention):
    """The same layer and parameters, whose attention is `call(q, k, v, order)`.

    `order` has the positions of tokens that do not lie one after the other, and else is None.
    """

    def __init__(self, *args, call: Callable, **kwargs):
        super().__init__(*args, **kwargs)
        self.call = call

    def __call__(self, x, *, positions=None, reordered=False, decode=False):
        """Mixes the tokens of each sequence; with a cache as the package does."""
        if decode:
            return super().__call__(x, decode=True)
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.rope_theta is not None:
            where = positions
            if where is None:
                where = jnp.arange(x.shape[-2], dtype=jnp.int32)
            q, k = (apply_rope(y, where, self.rope_theta) for y in (q, k))
        return self.out(self.call(q, k, v, positions))


def _cudnn(query, key, value, order=None):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def _by_shares(query, key, value, order, *, layout: Layout, implementation: str | None):
    """Each device calls attention on what it has of the examples, the tokens and the heads.

    XLA's partitioner would divide the ordinary call alike, but lower its kernels anew for every
    layer, which takes seconds each.
    """
    along = "sequence" if layout.mesh.shape["sequence"] > 1 else None

    def call(query, key, value, order):
        return pallas_flash.attention(
            query,
            key,
            value,
            is_causal=True,
            query_positions=order,
            key_value_positions=order,
            implementation=implementation,
            sequence_axis=along,
        )

    rows, tokens = PartitionSpec(EXAMPLES, "sequence", "tensor"), PartitionSpec(None, "sequence")
    order = None if order is None else order[None]
    # Unchecked, because Pallas refuses the kernels for Hopper where it is checked. All axes divide
    # the arrays, so that no gradient is a sum over devices.
    shared = jax.shard_map(
        call,
        mesh=layout.mesh,
        in_specs=(rows, rows, rows, tokens),
        out_specs=rows,
        check_vma=False,
    )
    return shared(query, key, value, order)


_by_shares = jax.jit(_by_shares, static_argnames=("layout", "implementation"))


def attention_layer(model: GPTConfig, layout: Layout | None = None) -> Callable[..., SelfAttention]:
    """What makes the model's attention layers.

    The reference stays an ordinary call on every mesh: what others are compared with should not
    depend on how they are divided.
    """
    if model.attention == "cudnn":
        return lambda *args, **kwargs: _By(*args, call=_cudnn, **kwargs | {"implementation": None})
    if layout is None or layout.mesh.size == 1 or model.attention == "reference":
        return SelfAttention
    call = functools.partial(_by_shares, layout=layout, implementation=model.attention)
    return functools.partial(_By, call=call)


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
