"""Flax on top of `pallas_flash.attention`: a drop-in `attention_fn` and a self-attention module.

Letters of shapes: `*batch` any number of batch axes, T query length, S key/value length, N query
heads, K key/value heads (N is a multiple of K), H head size of query and key, V head size of value,
F features.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import Dtype, Initializer, PromoteDtypeFn
from jax.core import Tracer
from jaxtyping import Array, Float, Int32, Integer, PRNGKeyArray, Shaped

from pallas_flash._api import Implementation, attention
from pallas_flash._checks import is_int, share_to_drop
from pallas_flash._mask_objects import Call, Joinable, fitted
from pallas_flash._masks import Mask

__all__ = ["SelfAttention", "apply_rope", "attention_fn"]

_lecun_normal, _zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()


# ------------------------------------------------------------------------------------------------
# In the place of Flax's function
# ------------------------------------------------------------------------------------------------


def attention_fn(
    query: Shaped[Array, "*batch T N H"],
    key: Shaped[Array, "*batch S K H"],
    value: Shaped[Array, "*batch S K V"],
    bias: Float[Array, "*#batch #N #T #S"] | None = None,
    mask: Shaped[Array, "*#batch #N #T #S"] | Mask | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: PRNGKeyArray | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: str | jax.lax.Precision | None = None,
    module: nnx.Module | linen.Module | None = None,
    *,
    is_causal: bool = False,
    promote_dtype: PromoteDtypeFn = flax_promote_dtype,
    rope: Callable[..., Array] | None = None,
    input_positions: Integer[Array, "*#batch T"] | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*batch T N V"]:
    """`pallas_flash.attention` in the place of Flax's `dot_product_attention`.

    Give it as `attention_fn` to `nnx.MultiHeadAttention` or `linen.MultiHeadDotProductAttention`;
    bind with `functools.partial` what those modules do not pass. It takes every keyword of Flax's
    functions, linen's and nnx's, and honours it or raises. It differs from them in this:

    - a query that may see no key gives zeros and zero gradients, where Flax gives the mean of
      `value`;
    - the softmax is always computed in float32;
    - dropout has Flax's statistics and other random numbers: which probabilities it drops is a
      function of `dropout_rng` and of the place of each, see `pallas_flash.dropout_mask`;
    - `key` and `value` may have fewer heads than `query` in linen too, not only in nnx.

    Example:
        >>> import functools
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from pallas_flash.flax import attention_fn
        >>> layer = nnx.MultiHeadAttention(
        ...     num_heads=2,
        ...     in_features=8,
        ...     decode=False,
        ...     attention_fn=functools.partial(attention_fn, implementation="xla"),
        ...     rngs=nnx.Rngs(0),
        ... )
        >>> layer(jnp.ones((3, 5, 8)), is_causal=True).shape
        (3, 5, 8)

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        bias: Added to the scaled scores.
        mask: Nonzero where a query may attend to a key: boolean masks serve, and so do the 0/1
            float masks that Flax's `make_causal_mask` and its kin return. A mask that is to be
            added to the scores is a `bias`. Or a mask object of `pallas_flash`, in which all batch
            axes count as one.
        broadcast_dropout: Whether one dropout mask [T, S] serves all batch axes and heads.
        dropout_rng: A `jax.random` key, typed or raw; needed where dropout is active.
        dropout_rate: The share of probabilities that become zero while `deterministic` is false;
            the others are divided by 1 - rate.
        deterministic: Whether dropout is switched off.
        dtype: Computation dtype. None is the one that `query`, `key` and `value` promote to.
        precision: As in `pallas_flash.attention`.
        module: Module that sows the weights [*batch, N, T, S] as "attention_weights". They are
            computed by Flax, before dropout, apart from the output and in memory quadratic in the
            length, so the output is the same with and without them; for a query that sees no key
            they are 1 / S.
        is_causal: Whether query t sees only keys 0..t, also when T != S.
        promote_dtype: Called as `promote_dtype((query, key, value), dtype=dtype)`.
        rope: Turns `query` and `key` before all else, as in `nnx.dot_product_attention_with_rope`:
            an `nnx.RoPE`, or any function of an array [..., T, H] and, optionally, positions [T].
        input_positions: Positions given to `rope`.
        force_fp32_for_softmax: Whether sown weights are float32; the softmax is so anyway.
        einsum_dot_general: Must be None.
        qk_attn_weights_einsum: Must be None.
        attn_weights_value_einsum: Must be None.
        implementation: As in `pallas_flash.attention`.

    Returns:
        The attention output in the computation dtype.

    Raises:
        NotImplementedError: If an einsum is replaced.
        TypeError: If an argument is of the wrong kind or dtype.
        ValueError: If shapes do not fit, if `dropout_rate` is outside [0, 1), if dropout is active
            without `dropout_rng`, or if `input_positions` come without `rope`.
    """
    for name, einsum in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if einsum is not None:
            raise NotImplementedError(
                f"`{name}` must be None, because the kernels contain no einsum to replace; got "
                f"{einsum!r}. Use Flax's `dot_product_attention` for this layer."
            )
    dropout_rate = share_to_drop("dropout_rate", dropout_rate)
    if deterministic:
        dropout_rate = 0.0
    if dropout_rate > 0.0 and dropout_rng is None:
        raise ValueError(
            "`dropout_rng` must be a jax.random key while dropout is active; got None with "
            f"dropout_rate={dropout_rate}, deterministic={deterministic}. Pass a new key for each "
            "call, or deterministic=True for no dropout."
        )

    if rope is not None:
        query, key = (_apply_module_rope(rope, x, input_positions) for x in (query, key))
    elif input_positions is not None:
        raise ValueError(
            "`input_positions` must be None without `rope`, which alone reads them; got "
            f"input_positions.shape={input_positions.shape}. Bind `rope` with functools.partial."
        )
    query, key, value = promote_dtype((query, key, value), dtype=dtype)

    batch = query.shape[:-3]
    one_batch = batch == key.shape[:-3] == value.shape[:-3]
    if not one_batch or min(query.ndim, key.ndim, value.ndim) < 3:
        raise ValueError(
            "`query`, `key` and `value` must be [*batch, length, heads, head_dim] with the same "
            f"batch axes; got query.shape={query.shape}, key.shape={key.shape}, "
            f"value.shape={value.shape}."
        )
    scores_shape = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
    out = attention(
        _merge_batch(query, batch),
        _merge_batch(key, batch),
        _merge_batch(value, batch),
        bias=_merge_scores("bias", bias, scores_shape),
        mask=_merge_scores("mask", _as_bool(mask), scores_shape),
        is_causal=is_causal,
        dropout_rate=dropout_rate,
        dropout_key=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        implementation=implementation,
    )
    if module is not None:
        visible = _dense(_as_bool(mask), scores_shape)
        _sow_weights(
            module, query, key, bias, visible, is_causal, precision, force_fp32_for_softmax
        )
    return out.reshape(*batch, *out.shape[1:])


def _apply_module_rope(
    rope: Callable[..., Array],
    x: Shaped[Array, "*batch T N H"],
    positions: Integer[Array, "*#batch T"] | None,
) -> Shaped[Array, "*batch T N H"]:
    """Calls an `nnx.RoPE`, which wants time next to last and one row of positions at a time."""
    x = jnp.swapaxes(x, -2, -3)
    if positions is None:
        x = rope(x)
    else:
        x = jnp.vectorize(rope, signature="(t,h),(t)->(t,h)")(x, positions[..., None, :])
    return jnp.swapaxes(x, -2, -3)


def _sow_weights(
    module: nnx.Module | linen.Module,
    query: Shaped[Array, "*batch T N H"],
    key: Shaped[Array, "*batch S K H"],
    bias: Float[Array, "*#batch #N #T #S"] | None,
    mask: Shaped[Array, "*#batch #N #T #S"] | None,
    is_causal: bool,
    precision: str | jax.lax.Precision | None,
    force_fp32_for_softmax: bool,
) -> None:
    """Makes `module` sow the attention weights.

    Linen's function serves nnx modules too, which know its collection "intermediates" as
    `nnx.Intermediate`. It has neither `is_causal` nor grouped heads, so both are spelled out here.
    """
    if is_causal:
        causal = jnp.tril(jnp.ones((query.shape[-3], key.shape[-3]), bool))
        mask = causal if mask is None else mask & causal
    linen.dot_product_attention_weights(
        query,
        jnp.repeat(key, query.shape[-2] // key.shape[-2], axis=-2),
        bias,
        mask,
        deterministic=True,
        precision=precision,
        module=module,  # pyright: ignore[reportArgumentType]
        force_fp32_for_softmax=force_fp32_for_softmax,
    )


def _dense(mask, scores_shape: Sequence[int]) -> Any:
    """A mask object as an array [*batch, N, T, S]; anything else as it is."""
    if not _is_object(mask):
        return mask
    shape = (math.prod(scores_shape[:-3]), *scores_shape[-3:])
    indices = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(4))
    whole = Mask(fitted(mask, Call(shape)))  # pyright: ignore[reportArgumentType]
    return jnp.broadcast_to(whole.allowed(*indices), shape).reshape(scores_shape)


# ------------------------------------------------------------------------------------------------
# A layer, and its rotary positions
# ------------------------------------------------------------------------------------------------


class SelfAttention(nnx.Module):
    """Self-attention with grouped key/value heads, rotary positions and packed documents.

    Linear maps of the tokens give q, k and v; if asked for, an RMSNorm over each head normalises q
    and k; `apply_rope` turns them; a linear map of `pallas_flash.attention(q, k, v)` is the output.
    Each run of `num_heads // num_kv_heads` query heads shares one key/value head (GQA,
    https://arxiv.org/abs/2305.13245).

    To generate text, `init_cache` makes room for keys and values, and calls with `decode=True` add
    the next tokens to it: first all of the prompt, then each new token.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from pallas_flash.flax import SelfAttention
        >>> layer = SelfAttention(16, num_heads=4, num_kv_heads=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 7, 16))).shape
        (3, 7, 16)
        >>> layer.init_cache((3, 8, 16))
        >>> layer(jnp.ones((3, 7, 16)), decode=True).shape
        (3, 7, 16)
        >>> layer(jnp.ones((3, 1, 16)), decode=True).shape
        (3, 1, 16)

    Args:
        features: Size of the last axis of input and output.
        num_heads: Number of query heads.
        num_kv_heads: Number of key/value heads, a divisor of `num_heads`. None is `num_heads`.
        head_dim: Size of a head. None is `features // num_heads`.
        is_causal: Whether a token sees only itself and the tokens before it, by their order in the
            array and whatever their `positions`.
        rope_theta: Base of the rotary angles. None is no rotary embedding.
        normalize_qk: Whether queries and keys go through an RMSNorm over the head size, each with a
            learned scale [H] that all heads share, before rotary positions (as in Qwen 3,
            https://arxiv.org/abs/2505.09388, and Gemma 3, https://arxiv.org/abs/2503.19786).
        local_window_size: (left, right): a token sees the `left` tokens before it and, unless it is
            causal, the `right` tokens after it; an int for both. None is no window.
        logits_soft_cap: Scores s become cap * tanh(s / cap). None is no cap.
        use_sinks: Whether each head learns a sink: a logit that takes part in the softmax without a
            value, so that a head may attend to nothing (https://arxiv.org/abs/2309.17453).
        dropout_rate: The share of attention probabilities that become zero in training.
        broadcast_dropout: Whether one dropout mask [T, T] serves all batch axes and heads.
        deterministic: Whether dropout is switched off. None leaves it to the call, or to
            `train()`, `eval()` and `nnx.view`, which set it.
        use_bias: Whether the linear maps add a bias.
        dtype: Computation dtype. None is the one that the input and the parameters promote to.
        param_dtype: Dtype of the parameters.
        precision: Precision of the linear maps and of the attention.
        kernel_init: Initializer of the linear maps.
        out_kernel_init: Initializer of the output map. None is `kernel_init`.
        sinks_init: Initializer of the sinks.
        implementation: As in `pallas_flash.attention`.
        rngs: Where the random keys of the parameters come from, and those of dropout.
        keep_rngs: Whether a layer with dropout keeps a copy of the dropout stream of `rngs`, so
            that calls need not give one.

    Raises:
        TypeError: If `dropout_rate` is not a number.
        ValueError: If the sizes do not fit each other, or `dropout_rate` is outside [0, 1).
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        is_causal: bool = True,
        rope_theta: float | None = 10_000.0,
        normalize_qk: bool = False,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        use_sinks: bool = False,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool | None = None,
        use_bias: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: str | jax.lax.Precision | None = None,
        kernel_init: Initializer = _lecun_normal,
        out_kernel_init: Initializer | None = None,
        sinks_init: Initializer = _zeros,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ):
        if num_kv_heads is None:
            num_kv_heads = num_heads
        if min(features, num_heads, num_kv_heads) < 1:
            raise ValueError(
                "`features`, `num_heads` and `num_kv_heads` must be at least 1; got "
                f"features={features}, num_heads={num_heads}, num_kv_heads={num_kv_heads}."
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                "`num_heads` must be a multiple of `num_kv_heads`; got "
                f"num_heads={num_heads}, num_kv_heads={num_kv_heads}."
            )
        if head_dim is None:
            if features % num_heads:
                raise ValueError(
                    "`features` must be a multiple of `num_heads` unless `head_dim` is given; got "
                    f"features={features}, num_heads={num_heads}."
                )
            head_dim = features // num_heads
        if head_dim < 1:
            raise ValueError(f"`head_dim` must be at least 1; got {head_dim}.")
        if rope_theta is not None and rope_theta <= 0:
            raise ValueError(f"`rope_theta` must be positive; got {rope_theta}.")
        if rope_theta is not None and head_dim % 2:
            raise ValueError(
                f"`head_dim` must be even, because rotary positions turn pairs; got {head_dim}. "
                "Give an even `head_dim`, or rope_theta=None for no rotary embedding."
            )

        self.features = features
        self.is_causal = is_causal
        self.rope_theta = rope_theta
        self.local_window_size = local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.dropout_rate = share_to_drop("dropout_rate", dropout_rate)
        self.broadcast_dropout = broadcast_dropout
        self.deterministic = deterministic
        self.precision = precision
        self.implementation: Implementation | None = implementation
        linear = functools.partial(
            nnx.LinearGeneral,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            rngs=rngs,
        )
        self.query = linear(features, (num_heads, head_dim), kernel_init=kernel_init)
        self.key = linear(features, (num_kv_heads, head_dim), kernel_init=kernel_init)
        self.value = linear(features, (num_kv_heads, head_dim), kernel_init=kernel_init)
        self.out = linear(
            (num_heads, head_dim),
            features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
        )
        self.query_norm, self.key_norm = (
            nnx.RMSNorm(head_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
            if normalize_qk
            else None
            for _ in range(2)
        )
        self.sinks = (
            nnx.Param(sinks_init(rngs.params(), (num_heads,), param_dtype)) if use_sinks else None
        )
        self.rngs = rngs.dropout.fork() if keep_rngs and dropout_rate > 0.0 else None
        self.cached_key: nnx.Cache[Array] | None = nnx.data(None)
        self.cached_value: nnx.Cache[Array] | None = nnx.data(None)
        self.cache_index: nnx.Cache[Array] | None = nnx.data(None)

    def __call__(
        self,
        x: Float[Array, "*batch T F"],
        *,
        bias: Float[Array, "*#batch #N #T #T"] | None = None,
        mask: Shaped[Array, "*#batch #N #T #T"] | Mask | None = None,
        seq_lengths: Int32[Array, "*#batch"] | None = None,
        segment_ids: Int32[Array, "*#batch T"] | None = None,
        positions: Integer[Array, "*#batch T"] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | PRNGKeyArray | None = None,
        decode: bool = False,
    ) -> Float[Array, "*batch T F"]:
        """Mixes the tokens of each sequence.

        Args:
            x: Tokens.
            bias: Added to the scaled scores; it has a gradient.
            mask: As in `attention_fn`. It holds together with everything else that says who sees
                whom.
            seq_lengths: Tokens of each sequence; those after them are neither seen nor do they see:
                their output is that of zeros.
            segment_ids: Document of each token; tokens of different documents never see each
                other. None is one document.
            positions: Rotary position of each token. None is 0..T-1, which also serves packed
                documents: only differences of positions matter, and within a document they do not
                depend on where it starts.
            deterministic: Whether dropout is switched off. None is what the layer was told.
            rngs: Where the random key of dropout comes from, or that key. None is what the layer
                keeps.
            decode: Whether `x` are the tokens that follow those in the cache. They are added to it
                and see it, and `positions` of None go on counting.

        Returns:
            One new token for each token; NaN where a traced call finds no room for `x` behind the
            tokens in the cache.

        Raises:
            TypeError: If `positions` are not integers.
            ValueError: If shapes do not fit, if `positions` come without rotary embedding, or if a
                layer with dropout is not told whether it is on, or finds no random key. With
                `decode`: if there is no cache, or no room in it, if the layer is not causal, or if
                there is a bias, a mask, lengths or segments, which a cache does not keep.
        """
        if x.ndim < 2 or x.shape[-1] != self.features:
            raise ValueError(
                f"`x` must be [*batch, length, {self.features}]; got x.shape={x.shape}."
            )
        *batch, length, _ = x.shape
        start, full = (
            self._start_in_cache(
                x, bias=bias, mask=mask, seq_lengths=seq_lengths, segment_ids=segment_ids
            )
            if decode
            else (0, False)
        )
        # q is [*batch, T, N, H], k and v are [*batch, T, K, H].
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rope_theta is not None:
            if positions is None:
                positions = start + jnp.arange(length, dtype=jnp.int32)
            q, k = (apply_rope(y, positions, self.rope_theta) for y in (q, k))
        elif positions is not None:
            raise ValueError(
                "`positions` must be None when `rope_theta` is None, because nothing reads them; "
                f"got positions.shape={positions.shape}."
            )
        scores_shape = (*batch, q.shape[-2], length, length)
        seq_lengths = _merge_full("seq_lengths", seq_lengths, batch, ())
        dropout_key = self._dropout_key(deterministic, rngs)
        cached = self._with_cached(k, v) if decode else (k, v)

        o = attention(
            _merge_batch(q, batch),
            *(_merge_batch(y.astype(q.dtype), batch) for y in cached),
            bias=_merge_scores("bias", bias, scores_shape),
            mask=_merge_scores("mask", _as_bool(mask), scores_shape),
            is_causal=self.is_causal,
            query_seq_lengths=seq_lengths,
            key_value_seq_lengths=seq_lengths,
            local_window_size=self.local_window_size,
            query_offset=start,
            segment_ids=_merge_full("segment_ids", segment_ids, batch, (length,)),
            logits_soft_cap=self.logits_soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            dropout_rate=0.0 if dropout_key is None else self.dropout_rate,
            dropout_key=dropout_key,
            broadcast_dropout=self.broadcast_dropout,
            precision=self.precision,
            implementation=self.implementation,
        )
        if decode:
            self._keep(cached, start + length)
        o = self.out(o).reshape(x.shape)
        return jnp.where(full, jnp.nan, o) if isinstance(full, Tracer) else o

    def init_cache(self, input_shape: Sequence[int], dtype: Dtype | None = None) -> None:
        """Makes an empty cache for keys and values, in place of the one there may be.

        It is state of the kind `nnx.Cache`, so `nnx.state(model, nnx.Param)` is what to save of a
        model that generates. Decode under `nnx.jit`: outside of it each call waits for the number
        of tokens in the cache. On meshes, axes must be Auto.

        Args:
            input_shape: [*batch, length, features] of the longest input, as for
                `nnx.MultiHeadAttention`; the length is that of the prompt and all that follows.
            dtype: Dtype of the cache. None is that in which the layer computes with inputs in the
                dtype of its parameters.

        Raises:
            TypeError: If `dtype` is not floating point.
            ValueError: If `input_shape` is none, or its last size is not `features`.
        """
        sizes = input_shape if isinstance(input_shape, (tuple, list)) else ()
        right = all(is_int(n) and n >= 0 for n in sizes)
        if not right or len(sizes) < 2 or sizes[-1] != self.features:
            raise ValueError(
                f"`input_shape` must be sizes (*batch, length, {self.features}); got "
                f"{input_shape!r:.80}. Give the shape of the longest input."
            )
        dtype = jnp.dtype(dtype or self.key.dtype or self.key.param_dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"`dtype` must be floating point; got {dtype}. Leave it out for that of the layer."
            )
        shape = (*sizes[:-1], *self.key.out_features)
        self.cached_key = nnx.Cache(jnp.zeros(shape, dtype))
        self.cached_value = nnx.Cache(jnp.zeros(shape, dtype))
        self.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))

    def _cache(self) -> tuple[nnx.Cache, nnx.Cache, nnx.Cache]:
        """Keys and values [*batch, length, K, H], and how many of them are taken."""
        if self.cached_key is None or self.cached_value is None or self.cache_index is None:
            raise ValueError(
                "`decode` must be False without a cache; got True. Call "
                "`init_cache((*batch, length, features))` first."
            )
        return self.cached_key, self.cached_value, self.cache_index

    def _start_in_cache(self, x, **refused):
        """How many tokens the cache holds, and whether `x` goes beyond it in a traced call."""
        keys, _, index = self._cache()
        if not self.is_causal:
            raise ValueError(
                "`decode` must be False in a layer with is_causal=False, whose tokens see later "
                "ones; got True. Build a causal layer."
            )
        for name, value in refused.items():
            if value is not None:
                raise ValueError(
                    f"`{name}` must be None with decode=True, because the cache does not keep it "
                    f"for later tokens; got {type(value).__name__}. Leave it out."
                )
        *batch, room, _, _ = keys.shape
        if list(x.shape[:-2]) != batch:
            raise ValueError(
                f"`x` must have the batch axes {tuple(batch)} of the cache; got x.shape={x.shape}. "
                "Call `init_cache` for this batch."
            )
        start = index[...]
        full = start + x.shape[-2] > room
        traced = isinstance(full, Tracer)
        if x.shape[-2] > room or (not traced and full):
            raise ValueError(
                f"`x` must fit in what is left of the cache; got {x.shape[-2]} tokens with "
                f"{'some' if traced else start} of {room} taken. Call `init_cache` with a greater "
                "length."
            )
        return start, full

    def _with_cached(self, k, v):
        """All keys and values of the cache, with these behind those that were there."""
        keys, values, index = self._cache()
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(
                cache[...], new.astype(cache.dtype), index[...], axis=-3
            )
            for cache, new in ((keys, k), (values, v))
        )

    def _keep(self, cached, taken) -> None:
        """Called when nothing can be refused any more."""
        keys, values, index = self._cache()
        keys[...], values[...] = cached
        index[...] = jnp.minimum(taken, keys.shape[-3])

    def set_view(self, deterministic: bool | None = None) -> None:
        """Called by `nnx.view`, which makes a copy of a model with dropout on or off.

        Args:
            deterministic: Whether dropout is switched off. None changes nothing.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _dropout_key(self, deterministic, rngs):
        """The random key of this call's dropout; None if it is off."""
        if self.dropout_rate == 0.0:
            return None
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic is None:
            raise ValueError(
                "`deterministic` must be True or False in a layer with dropout; got None. Pass it "
                "to the call or to the layer, or call `train()` or `eval()` of the model."
            )
        if deterministic:
            return None
        if rngs is None:
            rngs = self.rngs
        if rngs is None:
            raise ValueError(
                "`rngs` must be given to a call with dropout of a layer built with "
                "keep_rngs=False; got None. Pass nnx.Rngs(dropout=...), or a jax.random key."
            )
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs.dropout
        return rngs() if isinstance(rngs, nnx.RngStream) else rngs


def apply_rope(
    x: Float[Array, "*batch T N H"],
    positions: Integer[Array, "*#batch T"],
    theta: float = 10_000.0,
) -> Float[Array, "*batch T N H"]:
    """Rotary position embedding: turns pairs of components by angles linear in the position.

    With i < H/2 and the angle a_i = position * theta^(-2i/H),

        y[i]       = x[i] cos(a_i) - x[i + H/2] sin(a_i)
        y[i + H/2] = x[i + H/2] cos(a_i) + x[i] sin(a_i)

    This is section 3.2.2 of RoFormer (https://arxiv.org/abs/2104.09864), which pairs 2i with
    2i + 1. Pairing i with i + H/2 instead ("rotate half") comes from GPT-NeoX; `nnx.RoPE` and the
    Llama weights of Hugging Face do the same. Norms stay, and the product of a turned query with a
    turned key depends on the difference of their positions only.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_flash.flax import apply_rope
        >>> x = jnp.ones((2, 5, 3, 8))
        >>> bool(jnp.allclose(apply_rope(x, jnp.zeros(5, int)), x))
        True

    Args:
        x: Queries or keys.
        positions: Position of each row of `x`.
        theta: Base of the angles.

    Returns:
        The turned `x`, in its dtype. Angles are float32, and so is the product for a narrower `x`.

    Raises:
        TypeError: If `positions` are not integers.
        ValueError: If H is odd, or if `positions` do not broadcast to [*batch, T].
    """
    if x.ndim < 3 or x.shape[-1] % 2:
        raise ValueError(
            f"`x` must be [*batch, length, heads, an even head_dim]; got x.shape={x.shape}."
        )
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"`positions` must be integers; got positions.dtype={positions.dtype}.")
    _check_broadcasts("positions", positions, x.shape[:-2])

    half = x.shape[-1] // 2
    inverse_period = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * inverse_period  # [*batch, T, 1, H/2]
    dtype = np.promote_types(x.dtype, np.float32)
    cos, sin = jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)
    low, high = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)


# ------------------------------------------------------------------------------------------------
# For both: masks, biases and batch axes
# ------------------------------------------------------------------------------------------------


def _is_object(mask) -> bool:
    return isinstance(mask, (Mask, Joinable))


def _as_bool(mask) -> Any:
    """A mask that is an array, True where it is not zero."""
    return mask if mask is None or _is_object(mask) else jnp.asarray(mask).astype(bool)


def _merge_scores(name: str, x, scores_shape: Sequence[int]):
    """A bias or a mask for scores [*batch, N, T, S] with one batch axis; a mask object stays.

    Checked here and not in `attention`, so that messages show the caller's shapes.
    """
    if x is None or _is_object(x):
        return x
    _check_broadcasts(name, x, scores_shape)
    return _merge_batch(x, scores_shape[:-3])


def _merge_full(name: str, x, batch: Sequence[int], rest: tuple[int, ...]):
    """An array [*#batch, *rest] as [prod(batch), *rest], broadcast."""
    if x is None:
        return None
    _check_broadcasts(name, x, (*batch, *rest))
    return jnp.broadcast_to(x, (*batch, *rest)).reshape(math.prod(batch), *rest)


def _check_broadcasts(name: str, x: Shaped[Array, "..."], shape: Sequence[int]) -> None:
    """Raises if `x` does not broadcast to `shape`."""
    trailing = shape[len(shape) - x.ndim :]
    if x.ndim > len(shape) or any(a not in (1, b) for a, b in zip(x.shape, trailing, strict=True)):
        raise ValueError(f"`{name}` must broadcast to {tuple(shape)}; got {name}.shape={x.shape}.")


def _merge_batch(
    x: Shaped[Array, "*#batch a b c"], batch: Sequence[int]
) -> Shaped[Array, "B a b c"]:
    """Makes one batch axis of many: B is 1 where `x` has no batch axis above 1, else prod(batch).

    The last three axes are never expanded, so a mask [T, S] stays as small as it is.
    """
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    lead, rest = x.shape[:-3], x.shape[-3:]
    if any(size != 1 for size in lead):
        lead = tuple(batch)
        x = jnp.broadcast_to(x, lead + rest)
    return x.reshape(math.prod(lead), *rest)
