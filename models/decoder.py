"""A decoder; its configuration covers the families of `models/families.py`.

    x = embedding[tokens]                   times sqrt(features) in Gemma; plus positions in GPT-2
    x = x + post(attention(norm(x)))        post is the identity, or in Gemma a norm; in OLMo 2
    x = x + post(mlp(norm(x)))              post is a norm, and norm the identity; num_layers times
    logits = cap(norm(x) @ head.T)

It has the attention of gpt-oss, too, but no mixture of experts. `Decoder.from_pretrained` reads a
folder with config.json and safetensors; `save_pretrained` writes one. Parameters have the shapes of
those files: a matrix is [outputs, inputs].
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32, Shaped

import pallas_flash
from models import checkpoint
from models.config import DecoderConfig
from models.errors import check_int
from models.rope import Rope
from models.sharding import Layout
from pallas_flash.flax import KVCache, PagedKVCache, SelfAttention

# GPT-2's: the first prediction is then nearly uniform, which no rule by the number of inputs gives
# to a matrix that may be both the first and the last.
_init_rows = nnx.initializers.normal(0.02)
# Largest vocabulary whose rows are read by a product.
SMALL = 512


def _last(vector, x):
    """Return a vector with axes in front, as many as `x` has."""
    return jnp.expand_dims(vector, range(x.ndim - 1))


def fan_in_init(inputs: int, *, branches: int = 1) -> nnx.Initializer:
    """Return a normal initialisation whose output has the variance of its input, or a share of it.

    Layers that write to the residual stream need the share: a sum of `n` independent branches, each
    `1/sqrt(n)` as large, has the same variance at every depth (GPT-2, section 2.3).

    Args:
        inputs: The number of inputs that each output sums over.
        branches: The number of branches that the residual stream sums; 1 for inner layers.
    """
    return nnx.initializers.normal((inputs * branches) ** -0.5)


class Linear(nnx.Module):
    """`x @ weight.T + bias`, the weight [outputs, inputs].

    It is made as `nnx.LinearGeneral` is. Several sizes are axes of `x`, the last ones, and of the
    result, but one axis of the weight.
    """

    def __init__(
        self,
        inputs: int | tuple[int, ...],
        outputs: int | tuple[int, ...],
        *,
        axis: int | tuple[int, ...] = -1,
        use_bias: bool = False,
        kernel_init: nnx.Initializer,
        dtype: str,
        param_dtype: str,
        precision: Any = None,
        rngs: nnx.Rngs,
    ):
        self.outputs = (outputs,) if isinstance(outputs, int) else outputs
        self.axes = 1 if isinstance(axis, int) else len(axis)
        self.dtype, self.precision = dtype, precision
        shape = math.prod(self.outputs), int(np.prod(inputs))
        self.weight = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.bias = nnx.Param(jnp.zeros(shape[0], param_dtype)) if use_bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Apply the map in the activations' dtype, with float32 sums."""
        before = x.shape[: x.ndim - self.axes]
        x = x.astype(self.dtype).reshape(*before, -1)
        y = jnp.dot(x, self.weight[...].astype(self.dtype).T, precision=self.precision)
        y = y if self.bias is None else y + _last(self.bias[...].astype(self.dtype), y)
        return y.reshape(*before, *self.outputs)


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


class JointNorm(Norm):
    """The norm of the last two axes together, which are heads and their features."""

    def __call__(self, x: Float[Array, "... N H"]) -> Float[Array, "... N H"]:
        """Normalise each position on its own."""
        return super().__call__(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


def _normalized(x, scale, epsilon):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + epsilon) * _last(scale, x)).astype(x.dtype)


# The operations have this order, and the forward keeps `x` alone, so that XLA makes the forward one
# kernel that reads `x` once. The backward computes a row's rms again, in the kernel that reads `x`
# for the row's other sum.
rms_normalize = jax.custom_vjp(_normalized, nondiff_argnums=(2,))


def _normalize_forward(x, scale, epsilon):
    return _normalized(x, scale, epsilon), (x, scale)


def _normalize_backward(epsilon, residuals, cotangent):
    x, scale = residuals
    # Without the barrier, XLA finds that the forward has the same sum of squares, and keeps it. The
    # extra axis avoids a copy of `x` where the residual stream adds to it.
    x = jax.lax.optimization_barrier(x[None])[0]
    _, transpose = jax.vjp(functools.partial(_normalized, epsilon=epsilon), x, scale)
    return transpose(cotangent)


rms_normalize.defvjp(_normalize_forward, _normalize_backward)


def attention_of(
    config: DecoderConfig, layer: int, attention: Callable[..., Any] | None, rngs: nnx.Rngs
) -> SelfAttention:
    """Return the attention of a layer, with the maps, norms and rotary rule of the model."""
    rope = config.rope_of(layer)
    width = config.num_heads * config.head_dim
    module = SelfAttention(
        config.features,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        is_causal=True,
        rope=rope,
        normalize_qk=config.normalize_qk,
        scale=config.attention_scale,
        local_window_size=config.local_window_of(layer),
        logits_soft_cap=config.attention_soft_cap,
        use_sinks=config.use_sinks,
        use_bias=config.qkv_bias,
        use_out_bias=config.out_bias,
        dtype=config.compute_dtype,
        param_dtype=config.param_dtype,
        kernel_init=fan_in_init(config.features),
        out_kernel_init=fan_in_init(width, branches=2 * config.num_layers),
        implementation=config.implementation,
        batch_invariant=config.batch_invariant,
        linear=Linear,
        norm=lambda size, **_: Norm(size, config),
        attention=attention,
        rngs=rngs,
    )
    if config.joint_qk_norm:
        module.query_norm = JointNorm(width, config)
        module.key_norm = JointNorm(config.num_kv_heads * config.head_dim, config)
    return module


class MLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` without a gate."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        features, hidden = config.features, config.hidden
        linear = functools.partial(
            Linear,
            use_bias=config.mlp_bias,
            dtype=config.compute_dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        inner = fan_in_init(features)
        outer = fan_in_init(hidden, branches=2 * config.num_layers)
        self.gate = linear(features, hidden, kernel_init=inner) if config.gated else None
        self.up = linear(features, hidden, kernel_init=inner)
        self.down = linear(hidden, features, kernel_init=outer)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        """Apply the MLP to each position on its own."""
        activation = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}[self.activation]
        up = self.up(x)
        return self.down(activation(up) if self.gate is None else activation(self.gate(x)) * up)


class Layer(nnx.Module):
    """Attention, then an MLP, each between norms and added to its input."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        attention: Callable[..., Any] | None,
        rngs: nnx.Rngs,
    ):
        norm = functools.partial(Norm, config.features, config)
        self.attention_norm = norm() if config.pre_norms else None
        self.attention = attention_of(config, layer, attention, rngs)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_norm = norm() if config.pre_norms else None
        self.mlp = MLP(config, rngs)
        self.mlp_post_norm = norm() if config.post_norms else None

    def __call__(self, x: Float[Array, "B T C"], **where) -> Float[Array, "B T C"]:
        """Return the residual stream after this layer; the keywords are of `SelfAttention`."""
        y = self.attention(_through(self.attention_norm, x), **where)
        x = x + _through(self.attention_post_norm, y)
        y = self.mlp(_through(self.mlp_norm, x))
        return x + _through(self.mlp_post_norm, y)


def _through(norm: Norm | None, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
    return x if norm is None else norm(x)


class Embedding(nnx.Module):
    """One row for each token or position, NaN for others."""

    def __init__(self, rows: int, config: DecoderConfig, rngs: nnx.Rngs):
        shape = rows, config.features
        self.weight = nnx.Param(_init_rows(rngs.params(), shape, config.param_dtype))
        self.dtype = config.compute_dtype

    def __call__(self, numbers: Int[Array, "..."]) -> Float[Array, "... C"]:
        """Return the row of each number.

        In a small vocabulary it is the product of a one-hot row with the matrix. A lookup gives the
        same bits, but its gradient adds one row for each token of the text to the matrix, in this
        dtype and in any order. If most tokens are a few letters, these additions wait for each
        other on a GPU. The product sums in float32.
        """
        weight = self.weight[...]
        if len(weight) <= SMALL:
            one_hot = jax.nn.one_hot(numbers, len(weight), dtype=self.dtype)
            y = jnp.dot(one_hot, weight.astype(self.dtype), precision="highest")  # no TF32
            known = (numbers >= 0) & (numbers < len(weight))
            return jnp.where(known[..., None], y, jnp.nan)
        # A negative number would count from the end; like one above all others it gives NaN.
        numbers = jnp.where(numbers < 0, len(weight), numbers.astype(jnp.int32))
        return jnp.take(weight, numbers, axis=0, mode="fill").astype(self.dtype)


class Decoder(nnx.Module):
    """Logits of the next token at every position of a text.

    Args:
        config: The model's shape.
        rngs: Source of the initial values.
        layout: The shardings of parameters and activations on several devices; None for one device.
            Parameters move to their devices as soon as they are made, so that no device ever holds
            the whole model.
        attention: Computes attention without a cache, as in `pallas_flash.flax.SelfAttention`;
            `Layout.attention` does it on a mesh.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        layout: Layout | None = None,
        attention: Callable[..., Any] | None = None,
    ):
        def placed(name, part):
            if layout is not None:
                layout.place(name, part)
            return part

        self.config, self.layout, self._groups = config, layout, None
        self.embedding = placed("embedding", Embedding(config.vocab_size, config, rngs))
        self.position_embedding = (
            placed("position_embedding", Embedding(config.context, config, rngs))
            if config.rope is None
            else None
        )
        layers = range(config.num_layers)
        self.layers = nnx.List(
            [placed("layers", Layer(config, n, attention, rngs)) for n in layers]
        )
        self.norm = placed("norm", Norm(config.features, config))
        head = functools.partial(
            Linear,
            config.features,
            config.vocab_size,
            kernel_init=_init_rows,
            dtype=config.compute_dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.head = None if config.tied else placed("head", head())

    def __call__(self, tokens: Int[Array, "B T"], **where) -> Float[Array, "B T vocab"]:
        """Return float32 logits; the keyword arguments are as in `stream`."""
        return self.logits(self.stream(tokens, **where))

    def stream(
        self,
        tokens: Int[Array, "B T"],
        *,
        order: Int32[Array, " T"] | None = None,
        segment_ids: Int32[Array, "B T"] | None = None,
        decode: bool = False,
        lengths: Int32[Array, " B"] | None = None,
        requests: tuple[Array, ...] | None = None,
    ) -> Float[Array, "B T C"]:
        """Return the normalised residual stream, of which `logits` is a linear map.

        Args:
            tokens: Texts; for `decode`, the tokens that follow those in the cache.
            order: The number in the text of each column of `tokens` and `segment_ids`, which then
                lie in this order; `Layout.order` returns it. None is the order of the text.
            segment_ids: Document of each token of packed documents, which never see each other; a
                document is one run of equal numbers.
            decode: Whether keys and values are cached for later tokens; call `init_cache` first.
            lengths: For `decode`, the number of real tokens of each row, which are its first; the
                others are padding. None: all are real. A row beyond the cache's room gives NaN.
            requests: For the pages of `init_pages`, as `pallas_flash.paged_attention` has them:
                (key_value_seq_lengths, page_indices) with `tokens` [R, T], or with cu_seqlens_q and
                `tokens` [tokens]; the result has no other axes. With `groups` of layers, there are
                `page_indices` of each group, [groups, R, pages].

        Raises:
            ValueError: The arguments do not fit each other, the model or the cache.
        """
        self._check(tokens, segment_ids, decode, lengths, requests)
        where: dict[str, Any]
        if decode:
            self._check_room()
        of_layers: list[Any] = [None] * len(self.layers)
        if decode and requests is not None:
            where, of_layers = dict(decode=True), self._requests_of_layers(requests)
            positions = self._cache(PagedKVCache).positions(tokens[..., None], of_layers[0])
        elif decode:
            where = dict(decode=True, seq_lengths=lengths)
            positions = self._cache(KVCache).positions(tokens.shape[1])
        else:
            where = dict(segment_ids=segment_ids)
            positions = _count(tokens.shape[1], segment_ids, order)
        if order is not None:
            where |= dict(positions=order, reordered=True)
        elif self.config.rope is not None:
            where |= dict(positions=positions)
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        if self.config.scale_embedding:
            x = x * jnp.asarray(math.sqrt(self.config.features), x.dtype)

        def through(layer, x, requests):
            return layer(x, requests=requests, **where)

        if self.config.remat and not decode:
            through = nnx.remat(through, policy=pallas_flash.save_residuals)
        # Activations of decoding follow the parameters.
        lay = self.layout.stream if self.layout is not None and not decode else lambda x: x
        x = lay(x)
        for layer, requests in zip(self.layers, of_layers, strict=True):
            x = lay(through(layer, x, requests))
        return self.norm(x)

    def _requests_of_layers(self, requests: tuple[Array, ...]) -> list[tuple[Array, ...]]:
        """Return the `requests` of each layer."""
        if self._groups is None:
            return [requests] * len(self.layers)
        lengths, page_indices, *starts = requests
        shape, count = jnp.shape(page_indices), max(self._groups) + 1
        if len(shape) != 3 or shape[0] < count:
            raise ValueError(
                f"`requests` must have page_indices [groups, R, pages] for {count} groups of "
                f"layers; got {shape}."
            )
        return [(lengths, page_indices[group], *starts) for group in self._groups]

    def _cache(self, kind: type) -> Any:
        """Return the cache of a layer; all have its lengths. It is no ring, if one is not."""
        caches = [layer.attention.cache for layer in self.layers]
        cache = next((x for x in caches if not getattr(x, "ring", False)), caches[0])
        if not isinstance(cache, kind):
            make = "init_cache" if kind is KVCache else "init_pages"
            raise ValueError(
                f"`decode` must be False without a cache; got True. Call `{make}` first."
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

        A layer with a window keeps the tokens of the window alone, if these are fewer; a
        batch-invariant one keeps all, in their order. The length also chooses the rotary positions
        of longrope, because what is cached has them.

        Raises:
            ValueError: The texts are longer than the learned positions, or a number is no size.
        """
        check_int("batch", batch)
        check_int("length", length)
        self._check_length("length", length)
        heads = None if self.layout is None else self.layout.sharding(None, None, "tensor")
        for number, layer in enumerate(self.layers):
            window, room = self.config.local_window_of(number), length
            if window is not None and not self.config.batch_invariant:
                room = min(length, window[0] + 1)
            shape, ring = (batch, room, self.config.features), room < length
            layer.attention.init_cache(shape, ragged=True, ring=ring, sharding=heads)
        self._set_room(length)

    def _set_room(self, length: int) -> None:
        """Choose the rotary positions of longrope for a cache of texts of this length."""
        for layer in self.layers:
            if isinstance(rope := layer.attention.rope, Rope) and rope.kind == "longrope":
                layer.attention.rope = dataclasses.replace(rope, room=length)

    def _check_room(self) -> None:
        """Raise if the length of the texts in a cache must be known and is not."""
        rope = self.layers[0].attention.rope
        if isinstance(rope, Rope) and rope.kind == "longrope" and not rope.room:
            raise ValueError(
                "`decode` must be False with longrope in a cache of unknown length, by which it "
                "chooses its factors; got True. Call `init_cache`."
            )

    def init_pages(
        self,
        pages: int,
        page_size: int,
        dtype: str | None = None,
        *,
        length: int | None = None,
        groups: Sequence[int] | None = None,
    ) -> None:
        """Make empty pages in every layer, which requests share.

        Args:
            pages: Number of pages.
            page_size: Tokens of a page.
            dtype: Type of the pages, quantised in int8 and float8_e4m3fn; None is the activations'.
            length: Longest text, by which longrope chooses as in `init_cache`; None is what the
                pages hold, or the context.
            groups: The group of each layer. The n-th layers of all groups share their pages, and a
                page is of one group. None is one group, and no axis of groups in `page_indices`.

        Raises:
            TypeError: `dtype` is none of a cache.
            ValueError: A number is no size, or `groups` are not of these layers.
        """
        check_int("pages", pages)
        check_int("page_size", page_size)
        layers = len(self.layers)
        if groups is not None and (len(groups) != layers or min(groups) < 0):
            raise ValueError(
                f"`groups` must be {layers} numbers of at least 0, one for each layer; got "
                f"{[*groups]}."
            )
        heads = None if self.layout is None else self.layout.sharding(None, None, "tensor")
        self._groups = None if groups is None else tuple(groups)
        caches = []
        for number, layer in enumerate(self.layers):
            rank = number if groups is None else groups[:number].count(groups[number])
            if rank == len(caches):
                layer.attention.init_pages(pages, page_size, dtype, sharding=heads)
                caches.append(layer.attention.cache)
            layer.attention.cache = caches[rank]
        self._set_room(length or min(pages * page_size, self.config.context))

    @classmethod
    def from_pretrained(
        cls,
        folder: str | pathlib.Path,
        *,
        layout: Layout | None = None,
        dtype: str | None = None,
        param_dtype: str | None = None,
        implementation: str | None = None,
        batch_invariant: bool = False,
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
            batch_invariant: As in `pallas_flash.attention`, for all layers.

        Raises:
            ValueError: The configuration is none that `Decoder` computes, a dtype is none of these,
                or a tensor is missing, unexpected, of another shape or damaged.
        """
        for name, value in (("dtype", dtype), ("param_dtype", param_dtype)):
            if value not in (None, *checkpoint.DTYPES.values()):
                known = ", ".join(checkpoint.DTYPES.values())
                raise ValueError(f"`{name}` must be None or one of {known}; got {value!r}.")
        text, tensors = checkpoint.open_folder(pathlib.Path(folder))
        how = dict(implementation=implementation, batch_invariant=batch_invariant)
        config = dataclasses.replace(DecoderConfig.from_json(text), dtype=dtype, **how)
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

    def _check(
        self, tokens: Shaped[Array, "..."], segment_ids, decode: bool, lengths, requests
    ) -> None:
        shape, dtype = (getattr(tokens, name, None) for name in ("shape", "dtype"))
        integers = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
        flat = requests is not None and len(requests) == 3
        if shape is None or len(shape) != 2 - flat or not integers:
            got = type(tokens).__name__ if shape is None else f"{dtype} {shape}"
            axes = "[tokens]" if flat else "[batch, length]"
            raise ValueError(f"`tokens` must be integers {axes}; got {got}.")
        if shape[-1] == 0:
            raise ValueError(f"`tokens` must have a token in each row; got shape {shape}.")
        if segment_ids is not None and (got := jnp.shape(segment_ids)) != shape:
            raise ValueError(f"`segment_ids` must have the shape of `tokens`, {shape}; got {got}.")
        if requests is None:
            self._check_length("tokens", shape[-1])
            if decode:
                self._cache(KVCache).check("tokens", tokens, 0, lengths)
        elif lengths is not None:
            raise ValueError("`lengths` must be None with `requests`; got an array.")
        beside = dict(lengths=lengths, requests=requests)
        for name, value in (dict(segment_ids=segment_ids) if decode else beside).items():
            if value is not None:
                raise ValueError(f"`{name}` must be None with decode={decode}; got an array.")

    def _check_length(self, name: str, length: int) -> None:
        if self.position_embedding is not None and length > self.config.context:
            raise ValueError(
                f"`{name}` must be no longer than the {self.config.context} learned positions; got "
                f"{length}."
            )


def _count(length: int, segment_ids, order) -> Int32[Array, "#B T"]:
    """Return the number of each token in its document."""
    step = jnp.arange(length, dtype=jnp.int32)[None]
    if segment_ids is not None:
        ids = segment_ids if order is None else segment_ids[:, jnp.argsort(order)]
        first = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
        step = step - jax.lax.cummax(jnp.where(first, step, 0), axis=1)
    return step if order is None else step[:, order]
