"""The attention layer of the GPT that `train_gpt.py` trains, and the implementation behind it."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import pallas_flash
from models.gpt import GPTConfig
from models.sharding import AXES, BATCH, Layout
from pallas_flash.flax import SelfAttention, apply_rope
from scripts.training.processes import UserError
from scripts.training.weights import Tuned


class _LayerWithCall(SelfAttention):
    """The package's layer and parameters, with attention by `call(q, k, v, order)`.

    `order` has the positions of the tokens; None: their places.
    """

    def __init__(self, *args, call: Callable, **kwargs):
        super().__init__(*args, **kwargs)
        self.call = call

    def __call__(self, x, *, positions=None, reordered=False, decode=False):
        """Mix the tokens of each sequence; with a cache as the package does."""
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
    """Call attention on each device's share of the batch, the tokens and the heads.

    XLA's partitioner would divide the ordinary call in the same way, but would lower its kernels
    again for every layer, which takes seconds each.
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

    rows, tokens = PartitionSpec(BATCH, "sequence", "tensor"), PartitionSpec(None, "sequence")
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
    """Return the constructor of the model's attention layers.

    The reference stays an ordinary call on every mesh, because the comparison with it must not
    depend on the division.
    """
    if model.attention == "cudnn":
        return lambda *args, **kwargs: _LayerWithCall(
            *args, call=_cudnn, **kwargs | {"implementation": None}
        )
    if layout is None or layout.mesh.size == 1 or model.attention == "reference":
        return SelfAttention
    call = functools.partial(_by_shares, layout=layout, implementation=model.attention)
    return functools.partial(_LayerWithCall, call=call)


def explain_attention(model: GPTConfig | Tuned, sequences: int, layout: Layout) -> tuple[str, str]:
    """Return the attention that serves a device in a step on a batch, and why not the kernels.

    Args:
        model: The model.
        sequences: The number of sequences that are computed at once.
        layout: The mesh.

    Raises:
        UserError: The explicit choice does not serve this step here.
    """
    data, fsdp, sequence, tensor = (layout.mesh.shape[name] for name in AXES)
    # Attention divides a sequence itself; of the other axes a device has its share.
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
    try:
        if model.attention == "cudnn":
            jax.eval_shape(_cudnn, query, key, key)
            return "cudnn", ""
        explanation = pallas_flash.explain(
            query,
            key,
            key,
            is_causal=True,
            implementation=model.attention,
            query_positions=positions,
            key_value_positions=positions,
            **(model.options(query.shape[0]) if isinstance(model, Tuned) else {}),
        )
    except (ValueError, NotImplementedError, RuntimeError) as error:
        refused = f"`implementation` must be one that serves the call; got {model.attention!r}. "
        raise UserError(
            f"`attention` must be one that serves here; got {model.attention!r}: "
            f"{str(error).removeprefix(refused)}"
        ) from error
    # "interpret" and "reference" serve explicit choices alone.
    absent = [why for name, why in explanation.refused.items() if name in ("triton", "mosaic")]
    reason = absent[0] if explanation.implementation == "xla" and absent else ""
    choice = explanation.context_parallelism
    return explanation.implementation + (f", {choice.method}" if choice else ""), reason
