"""A decoder; its configuration covers GPT-2, Llama, Qwen 2.5 and 3, Mistral and Gemma 1 to 3.

    x = embedding[tokens]                   times sqrt(features) in Gemma; plus positions in GPT-2
    x = x + post(attention(norm(x)))        post is the identity, or in Gemma a norm
    x = x + post(mlp(norm(x)))              both repeated num_layers times
    logits = cap(norm(x) @ head.T)

It has the attention of gpt-oss, too, but no mixture of experts. `Decoder.from_pretrained` reads a
folder with config.json and safetensors; `save_pretrained` writes one. Parameters have the shapes of
those files: a matrix is [outputs, inputs].
"""

import dataclasses
import math
import pathlib
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32, Shaped

import pallas_flash
from models import checkpoint
from models.config import DecoderConfig, Rope
from models.layers import rms_normalize
from models.sharding import Layout
from pallas_flash.flax import KVCache

# GPT-2's, which most families took over.
_init = nnx.initializers.normal(0.02)


def _last(vector, x):
    """Return a vector with axes in front, as many as `x` has."""
    return jnp.expand_dims(vector, range(x.ndim - 1))


class Linear(nnx.Module):
    """`x @ weight.T + bias`, the weight [outputs, inputs]."""

    def __init__(self, inputs, outputs, *, use_bias: bool = False, config: DecoderConfig, rngs):
        dtype = config.param_dtype
        self.dtype = config.compute_dtype
        self.weight = nnx.Param(_init(rngs.params(), (outputs, inputs), dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if use_bias else None

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Apply the map in the activations' dtype, with float32 sums."""
        y = jnp.dot(x.astype(self.dtype), self.weight[...].astype(self.dtype).T)
        return y if self.bias is None else y + _last(self.bias[...].astype(self.dtype), y)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last axis, computed in float32.

    rms     x / rms(x) * weight
    rms1    x / rms(x) * (1 + weight)
    layer   (x - mean(x)) / std(x) * weight + bias
    """

    def __init__(self, features: int, config: DecoderConfig):
        self.kind, self.epsilon = config.norm, config.norm_epsilon
        zeros = jnp.zeros(features, config.param_dtype)
        self.weight = nnx.Param(zeros if self.kind == "rms1" else zeros + 1)
        self.bias = nnx.Param(zeros) if self.kind == "layer" else None

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        """Normalise each position on its own."""
        weight = self.weight[...].astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.bias is None:
            return rms_normalize(x, 1 + weight if self.kind == "rms1" else weight, self.epsilon)
        wide = x.astype(weight.dtype) - jnp.mean(x.astype(weight.dtype), axis=-1, keepdims=True)
        variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
        y = wide * jax.lax.rsqrt(variance + self.epsilon) * _last(weight, x)
        return (y + _last(self.bias[...].astype(y.dtype), x)).astype(x.dtype)


def rotation(rope: Rope, head_dim: int, positions: Int[Array, "B T"]):
    """Return the cosines and sines, [B, T, 1, H/2] in float32, by which positions turn pairs."""
    angles = positions[..., None, None].astype(jnp.float32)
    angles = angles * _last(rope.frequencies(head_dim), angles)
    return rope.amplitude * jnp.cos(angles), rope.amplitude * jnp.sin(angles)


def rotate(x: Float[Array, "B T N H"], cos, sin) -> Float[Array, "B T N H"]:
    """Turn the pairs (i, i + H/2) of each head, as `pallas_flash.flax.apply_rope` does."""
    low, high = jnp.split(x.astype(jnp.promote_types(x.dtype, jnp.float32)), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the tokens of a call are.

    Attributes:
        rotations: For each `Rope` of the model, the cosines and sines of the tokens' positions.
        segment_ids: Document of each token; None is one document.
        decode: Whether the tokens follow those in the cache.
        lengths: For `decode`, the real tokens of each batch element; None if all are real.
    """

    rotations: dict[Rope, tuple[Array, Array]]
    segment_ids: Int32[Array, "B T"] | None
    decode: bool = False
    lengths: Int32[Array, " B"] | None = None


class Attention(nnx.Module):
    """Self-attention with grouped heads, and a cache with a length for each batch element.

    `pallas_flash.flax.SelfAttention` has one rule of rotary positions and one choice of biases.
    Model families differ in both.
    """

    def __init__(self, config: DecoderConfig, layer: int, rngs: nnx.Rngs):
        features, H, kwargs = config.features, config.head_dim, {"config": config, "rngs": rngs}
        heads, kv_heads = config.num_heads * H, config.num_kv_heads * H
        self.query = Linear(features, heads, use_bias=config.qkv_bias, **kwargs)
        self.key = Linear(features, kv_heads, use_bias=config.qkv_bias, **kwargs)
        self.value = Linear(features, kv_heads, use_bias=config.qkv_bias, **kwargs)
        self.out = Linear(heads, features, use_bias=config.out_bias, **kwargs)
        self.query_norm = Norm(H, config) if config.normalize_qk else None
        self.key_norm = Norm(H, config) if config.normalize_qk else None
        sinks = jnp.zeros(config.num_heads, config.param_dtype)
        self.sinks = nnx.Param(sinks) if config.use_sinks else None
        self.rope = config.rope_of(layer)
        # A token sees itself and the window - 1 tokens before it.
        self.window = (config.window - 1, 0) if config.has_window(layer) else None
        self.config = config
        self.cache: KVCache | None = nnx.data(None)

    def __call__(self, x: Float[Array, "B T C"], place: Place) -> Float[Array, "B T C"]:
        """Mix the tokens of each sequence."""
        config, (batch, length, _) = self.config, x.shape
        q, k, v = (
            linear(x).reshape(batch, length, -1, config.head_dim)
            for linear in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rope is not None:
            q, k = (rotate(y, *place.rotations[self.rope]) for y in (q, k))
        options = dict(
            scale=config.attention_scale,
            local_window_size=self.window,
            logits_soft_cap=config.attention_soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            implementation=config.implementation,
        )
        if place.decode and self.cache is not None:
            o = self.cache.attend(q, k, v, seq_lengths=place.lengths, **options)
        else:
            o = pallas_flash.attention(
                q, k, v, is_causal=True, segment_ids=place.segment_ids, **options
            )
        return self.out(o.reshape(batch, length, -1))


class MLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` without a gate."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        kwargs = {"use_bias": config.mlp_bias, "config": config, "rngs": rngs}
        self.gate = Linear(config.features, config.hidden, **kwargs) if config.gated else None
        self.up = Linear(config.features, config.hidden, **kwargs)
        self.down = Linear(config.hidden, config.features, **kwargs)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        """Apply the MLP to each position on its own."""
        activation = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}[self.activation]
        up = self.up(x)
        return self.down(activation(up) if self.gate is None else activation(self.gate(x)) * up)


class Layer(nnx.Module):
    """Attention, then an MLP, each between norms and added to its input."""

    def __init__(self, config: DecoderConfig, layer: int, rngs: nnx.Rngs):
        def norm(wanted=True):
            return Norm(config.features, config) if wanted else None

        self.attention_norm, self.attention = norm(), Attention(config, layer, rngs)
        self.attention_post_norm = norm(config.post_norms)
        self.mlp_norm, self.mlp = norm(), MLP(config, rngs)
        self.mlp_post_norm = norm(config.post_norms)

    def __call__(self, x: Float[Array, "B T C"], place: Place) -> Float[Array, "B T C"]:
        """Return the residual stream after this layer."""
        y = self.attention(self.attention_norm(x), place)
        x = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = self.mlp(self.mlp_norm(x))
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))


class Embedding(nnx.Module):
    """One row for each token or position, NaN for others."""

    def __init__(self, rows: int, config: DecoderConfig, rngs: nnx.Rngs):
        shape = rows, config.features
        self.weight = nnx.Param(_init(rngs.params(), shape, config.param_dtype))
        self.dtype = config.compute_dtype

    def __call__(self, numbers: Int[Array, "..."]) -> Float[Array, "... C"]:
        """Return the row of each number."""
        weight = self.weight[...]
        # A negative number would count from the end; like one above all others it gives NaN.
        numbers = jnp.where(numbers < 0, len(weight), numbers.astype(jnp.int32))
        return jnp.take(weight, numbers, axis=0, mode="fill").astype(self.dtype)


class Decoder(nnx.Module):
    """Logits of the next token at every position of a text.

    Args:
        config: The model's shape.
        rngs: Source of the initial values.
        layout: The shardings of parameters and activations on several devices; None for one device.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, layout: Layout | None = None):
        self.config, self.layout = config, layout
        self.embedding = Embedding(config.vocab_size, config, rngs)
        self.position_embedding = None if config.rope else Embedding(config.context, config, rngs)
        self.layers = nnx.List([Layer(config, n, rngs) for n in range(config.num_layers)])
        self.norm = Norm(config.features, config)
        shape = config.features, config.vocab_size
        self.head = None if config.tied else Linear(*shape, config=config, rngs=rngs)
        if layout is not None:
            layout.place(self)

    def __call__(self, tokens: Int[Array, "B T"], **where) -> Float[Array, "B T vocab"]:
        """Return float32 logits; the keyword arguments are as in `stream`."""
        return self.logits(self.stream(tokens, **where))

    def stream(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int32[Array, "B T"] | None = None,
        decode: bool = False,
        lengths: Int32[Array, " B"] | None = None,
    ) -> Float[Array, "B T C"]:
        """Return the normalised residual stream, of which `logits` is a linear map.

        Args:
            tokens: Texts; for `decode`, the tokens that follow those in the cache.
            positions: Position of each token, for its embedding; masks go by the order of the
                array. None counts from the cache's end, or from each document's start.
            segment_ids: Document of each token of packed documents, which never see each other; a
                document is one run of equal numbers.
            decode: Whether keys and values are cached for later tokens; call `init_cache` first.
            lengths: For `decode`, the number of real tokens of each row, which are its first; the
                others are padding. None: all are real. A row beyond the cache's room gives NaN.

        Raises:
            ValueError: The arguments do not fit each other, the model or the cache.
        """
        self._check(tokens, segment_ids, decode, lengths)
        step = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        if decode:
            step = self._cache().positions(tokens.shape[1])
        elif segment_ids is not None:
            first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
            step = step - jax.lax.cummax(jnp.where(first, step, 0), axis=1)
        positions = step if positions is None else positions
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        if self.config.scale_embedding:
            x = x * jnp.asarray(math.sqrt(self.config.features), x.dtype)
        ropes = {layer.attention.rope for layer in self.layers} - {None}
        turns = {rope: rotation(rope, self.config.head_dim, positions) for rope in ropes}
        place = Place(turns, segment_ids, decode, lengths)

        def through(layer, x):
            return layer(x, place)

        if self.config.remat and not decode:
            through = nnx.remat(through, policy=pallas_flash.save_residuals)
        for layer in self.layers:
            # Activations of decoding follow the parameters.
            x = through(layer, x if self.layout is None or decode else self.layout.stream(x))
        return self.norm(x)

    def _cache(self) -> KVCache:
        """Return the cache of the first layer; all layers have its lengths."""
        if (cache := self.layers[0].attention.cache) is None:
            raise ValueError(
                "`decode` must be False without a cache; got True. Call `init_cache` first."
            )
        return cache

    def logits(self, stream: Float[Array, "... C"]) -> Float[Array, "... vocab"]:
        """Return float32 logits of the next token."""
        part = self.embedding if self.head is None else self.head
        matrix = part.weight[...].astype(part.dtype)
        y = jnp.dot(stream.astype(part.dtype), matrix.T, preferred_element_type=jnp.float32)
        cap = self.config.final_soft_cap
        return y if cap is None else cap * jnp.tanh(y / cap)

    def init_cache(self, batch: int, length: int) -> None:
        """Make an empty cache in every layer for `batch` texts of `length` tokens.

        Raises:
            ValueError: The texts are longer than the learned positions, or a number is no size.
        """
        for name, size in (("batch", batch), ("length", length)):
            if not isinstance(size, int | np.integer) or size < 1:
                raise ValueError(f"`{name}` must be an int of at least 1; got {size!r}.")
        self._check_length("length", length)
        shape = batch, length, self.config.num_kv_heads, self.config.head_dim
        heads = None if self.layout is None else self.layout.sharding(None, None, "tensor")
        for layer in self.layers:
            cache = KVCache(shape, self.config.compute_dtype, ragged=True, sharding=heads)
            layer.attention.cache = cache

    @classmethod
    def from_pretrained(
        cls,
        folder: str | pathlib.Path,
        *,
        layout: Layout | None = None,
        dtype: str | None = None,
        param_dtype: str | None = None,
        implementation: str | None = None,
    ) -> Self:
        """Return the model of a folder with config.json and model.safetensors, or shards of it.

        Files are memory-mapped. One tensor at a time goes to its devices, of which each reads only
        its part.

        Args:
            folder: The folder.
            layout: The shardings on several devices; None for one device.
            dtype: Type of the activations; None is the embedding's in the file.
            param_dtype: Type of the parameters; None is each tensor's in the file.
            implementation: As in `pallas_flash.attention`.

        Raises:
            ValueError: The configuration is none that `Decoder` computes, a dtype is none of these,
                or a tensor is missing, unexpected, of another shape or damaged.
        """
        for name, value in (("dtype", dtype), ("param_dtype", param_dtype)):
            if value not in (None, *checkpoint.DTYPES.values()):
                known = ", ".join(checkpoint.DTYPES.values())
                raise ValueError(f"`{name}` must be None or one of {known}; got {value!r}.")
        text, tensors = checkpoint.open_folder(pathlib.Path(folder))
        config = dataclasses.replace(
            DecoderConfig.from_json(text), dtype=dtype, implementation=implementation
        )
        stored = checkpoint.embedding_dtype(config, tensors)
        config = dataclasses.replace(config, param_dtype=param_dtype or stored)
        abstract = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0)))
        abstract.layout = layout
        graphdef, shapes = nnx.split(abstract)
        params = checkpoint.read(config, nnx.to_pure_dict(shapes), tensors, layout, param_dtype)
        return nnx.merge(graphdef, params)

    def save_pretrained(self, folder: str | pathlib.Path, max_file_bytes: int = 5 * 10**9) -> None:
        """Write config.json and model.safetensors, or shards with an index, into a folder.

        Args:
            folder: A folder without weights, or a new one.
            max_file_bytes: Size above which weights are written as several files.

        Raises:
            ValueError: The model's configuration comes from no config.json, the folder has weights,
                or other processes hold parts of the parameters.
        """
        params = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        checkpoint.write(pathlib.Path(folder), self.config, params, max_file_bytes)

    def _check(self, tokens: Shaped[Array, "..."], segment_ids, decode: bool, lengths) -> None:
        shape, dtype = (getattr(tokens, name, None) for name in ("shape", "dtype"))
        if shape is None or len(shape) != 2 or not jnp.issubdtype(dtype, jnp.integer):
            got = type(tokens).__name__ if shape is None else f"{dtype} {shape}"
            raise ValueError(f"`tokens` must be integers [batch, length]; got {got}.")
        if shape[1] == 0:
            raise ValueError(f"`tokens` must have a token in each row; got shape {shape}.")
        if segment_ids is not None and (got := jnp.shape(segment_ids)) != shape:
            raise ValueError(f"`segment_ids` must have the shape of `tokens`, {shape}; got {got}.")
        self._check_length("tokens", tokens.shape[1])
        if decode:
            self._cache().check("tokens", tokens, 0, lengths)
        name, refused = ("segment_ids", segment_ids) if decode else ("lengths", lengths)
        if refused is not None:
            raise ValueError(f"`{name}` must be None with decode={decode}; got an array.")

    def _check_length(self, name: str, length: int) -> None:
        if self.position_embedding is not None and length > self.config.context:
            raise ValueError(
                f"`{name}` must be no longer than the {self.config.context} learned positions; got "
                f"{length}."
            )
