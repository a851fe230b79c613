"""A replacement of Flax's `dot_product_attention`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import Dtype, PromoteDtypeFn
from jaxtyping import Array, Float, Integer, PRNGKeyArray, Shaped

from pallas_flash._call.attention import ContextParallelism, Implementation, attention
from pallas_flash._problem.checks import describe, flag, share_to_drop
from pallas_flash._problem.mask_objects import Call, MaskObject, fitted
from pallas_flash._problem.masks import Mask
from pallas_flash.flax._arrays import as_bool, merge_batch, merge_scores, place_in_sequence


def attention_fn(
    query: Shaped[Array, "*batch T N H"],
    key: Shaped[Array, "*batch S K H"],
    value: Shaped[Array, "*batch S K V"],
    bias: Float[Array, "*#batch #N #T #S"] | None = None,
    mask: Shaped[Array, "*#batch #N #T #S"] | MaskObject | None = None,
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
    reproducible: bool | None = None,
    sequence_axis: str | tuple[str, ...] | None = None,
    context_parallelism: ContextParallelism | None = None,
) -> Float[Array, "*batch T N V"]:
    """Compute `pallas_flash.attention` with the arguments of Flax's `dot_product_attention`.

    Give it as `attention_fn` to `nnx.MultiHeadAttention` or `linen.MultiHeadDotProductAttention`;
    bind with `functools.partial` what those modules do not pass. nnx passes `is_causal` in every
    call, so that a bound one has no effect there: call `layer(x, is_causal=True)`. This function
    takes every keyword of Flax's functions, linen's and nnx's, and honours it or raises. It differs
    from them in this:

    - a query that may see no key gives zeros and zero gradients, where Flax gives the mean of
      `value`;
    - the softmax is always computed in float32;
    - dropout has Flax's statistics and other random numbers: which probabilities it drops is a
      function of `dropout_rng` and of the place of each, see `pallas_flash.dropout_mask`;
    - `key` and `value` may have fewer heads than `query` in linen too, not only in nnx;
    - `is_causal` hides nothing from a decoding step, one query with the mask of a cache.

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
            the others are divided by 1 - rate. Rounded as in `pallas_flash.attention`.
        deterministic: Whether dropout is switched off.
        dtype: Computation dtype. None is the one that `query`, `key` and `value` promote to.
        precision: As in `pallas_flash.attention`.
        module: Module that sows the weights [*batch, N, T, S] as "attention_weights". They are
            computed by Flax, before dropout, apart from the output and in memory quadratic in the
            length, so the output is the same with and without them; for a query that sees no key
            they are 1 / S.
        is_causal: Whether query t sees only keys 0..t, also when T != S. One query of several keys
            (T = 1 < S) is a decoding step: the columns of its `mask` array show the keys so far,
            and `is_causal` changes nothing; without such a mask it raises.
        promote_dtype: Called as `promote_dtype((query, key, value), dtype=dtype)`.
        rope: Turns `query` and `key` before all else, as in `nnx.dot_product_attention_with_rope`:
            an `nnx.RoPE`, or any function of an array [..., T, H] and, optionally, positions [T].
            It needs T = S, and so does not serve the caches of Flax's modules.
        input_positions: Positions given to `rope`. None is 0, 1, 2, ..., and with `sequence_axis`
            they go on from one device to the next.
        force_fp32_for_softmax: Whether sown weights are float32; the softmax is so anyway.
        einsum_dot_general: Must be None.
        qk_attn_weights_einsum: Must be None.
        attn_weights_value_einsum: Must be None.
        implementation: As in `pallas_flash.attention`.
        reproducible: As in `pallas_flash.attention`; `deterministic` is about dropout.
        sequence_axis: As in `pallas_flash.attention`, for a module that is called inside a
            `jax.shard_map` with this device's share of the tokens. Then a `bias` or `mask` has
            columns for the keys of all devices.
        context_parallelism: As in `pallas_flash.attention`.

    Returns:
        The attention output in the computation dtype.

    Raises:
        NotImplementedError: If an einsum is replaced, or weights are sown with `sequence_axis`.
        TypeError: If an argument is of the wrong kind or dtype.
        ValueError: If shapes do not fit, if `dropout_rate` is outside [0, 1), if dropout is active
            without `dropout_rng`, if `input_positions` come without `rope`, if `rope` is given
            other than as many queries as keys, or if `is_causal` holds for one query of several
            keys without a mask array.
    """
    _check_served(
        module,
        sequence_axis,
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )
    dropout_rate = _checked_dropout_rate(dropout_rate, dropout_rng, deterministic)
    query, key = _turned(query, key, rope, input_positions, sequence_axis)
    query, key, value = promote_dtype((query, key, value), dtype=dtype)

    batch = query.shape[:-3]
    one_batch = batch == key.shape[:-3] == value.shape[:-3]
    if not one_batch or min(query.ndim, key.ndim, value.ndim) < 3:
        raise ValueError(
            "`query`, `key` and `value` must be [*batch, length, heads, head_dim] with the same "
            f"batch axes; got query.shape={query.shape}, key.shape={key.shape}, "
            f"value.shape={value.shape}."
        )
    _, kv_len = place_in_sequence(sequence_axis, key.shape[-3])
    scores_shape = (*batch, query.shape[-2], query.shape[-3], kv_len)
    mask = as_bool(mask)
    _, q_len = place_in_sequence(sequence_axis, query.shape[-3])
    is_causal = _causal_mask_applies(is_causal, mask, q_len, kv_len)
    out = attention(
        merge_batch(query, batch),
        merge_batch(key, batch),
        merge_batch(value, batch),
        bias=merge_scores("bias", bias, scores_shape),
        mask=merge_scores("mask", mask, scores_shape),
        is_causal=is_causal,
        dropout_rate=dropout_rate,
        dropout_key=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        implementation=implementation,
        reproducible=reproducible,
        sequence_axis=sequence_axis,
        context_parallelism=context_parallelism,
    )
    if module is not None:
        visible = _dense(mask, scores_shape)
        _sow_weights(
            module, query, key, bias, visible, is_causal, precision, force_fp32_for_softmax
        )
    return out.reshape(*batch, *out.shape[1:])


def _check_served(module, sequence_axis, **einsums: Callable | None) -> None:
    """Raise if an einsum is replaced, or if weights are sown where a device has not all keys."""
    for name, einsum in einsums.items():
        if einsum is not None:
            raise NotImplementedError(
                f"`{name}` must be None, because the kernels contain no einsum to replace; got "
                f"{einsum!r}. Use Flax's `dot_product_attention` for this layer."
            )
    if module is not None and sequence_axis is not None:
        raise NotImplementedError(
            "`module` must be None with `sequence_axis`, because a device has not all keys for the "
            f"weights; got {type(module).__name__}. Sow weights outside of a `shard_map`."
        )


def _checked_dropout_rate(rate: float, rng: PRNGKeyArray | None, deterministic: bool) -> float:
    """Return the dropout rate of the call: 0 where dropout is switched off."""
    rate = share_to_drop("dropout_rate", rate)
    if deterministic:
        return 0.0
    if rate > 0.0 and rng is None:
        raise ValueError(
            "`dropout_rng` must be a jax.random key while dropout is active; got None with "
            f"dropout_rate={rate}, deterministic={deterministic}. Pass a new key for each "
            "call, or deterministic=True for no dropout."
        )
    return rate


def _causal_mask_applies(is_causal: bool, mask, q_len: int, kv_len: int) -> bool:
    """Return `is_causal`, or False for a decoding step, whose mask shows the keys so far.

    Flax's modules decode one token at a time and pass a mask [*batch, 1, 1, S] of the filled part
    of the cache. Query 0 is not at position 0 there, where the causal mask would put it.
    """
    if not flag("is_causal", is_causal) or not q_len == 1 < kv_len:
        return is_causal
    if mask is None or isinstance(mask, MaskObject) or mask.shape[-1:] != (kv_len,):
        raise ValueError(
            f"`is_causal` must be False for one query of {kv_len} keys, because its position among "
            "them is unknown, unless a `mask` array has a column for each key; got True with "
            f"mask {describe(mask)}. Drop it if the query sees all keys, or call "
            "`pallas_flash.attention` with `query_offset`."
        )
    return False


def _turned(
    query: Shaped[Array, "*batch T N H"],
    key: Shaped[Array, "*batch S K H"],
    rope: Callable[..., Array] | None,
    positions: Integer[Array, "*#batch T"] | None,
    sequence_axis: str | tuple[str, ...] | None,
) -> tuple[Array, Array]:
    """Return queries and keys with rotary positions."""
    if rope is None:
        if positions is not None:
            raise ValueError(
                "`input_positions` must be None without `rope`, which alone reads them; got "
                f"input_positions.shape={positions.shape}. Bind `rope` with functools.partial."
            )
        return query, key
    if query.shape[-3:-2] != key.shape[-3:-2]:
        raise ValueError(
            "`rope` must be None unless there are as many queries as keys, because it counts "
            f"the positions of both from 0; got query.shape={query.shape}, "
            f"key.shape={key.shape}. Decode with `SelfAttention`, whose cache knows positions, "
            "or turn both by `apply_rope` before the call."
        )
    if sequence_axis is not None and positions is None:
        # Positions continue from one device to the next.
        first, _ = place_in_sequence(sequence_axis, query.shape[-3])
        positions = first + jnp.arange(query.shape[-3], dtype=jnp.int32)
    return _apply_module_rope(rope, query, positions), _apply_module_rope(rope, key, positions)


def _apply_module_rope(
    rope: Callable[..., Array],
    x: Shaped[Array, "*batch T N H"],
    positions: Integer[Array, "*#batch T"] | None,
) -> Shaped[Array, "*batch T N H"]:
    """Call an `nnx.RoPE`, which needs the time axis next to last and one row of positions."""
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
    """Make `module` sow the attention weights.

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
    """Return a mask object as an array [*batch, N, T, S], and other masks unchanged."""
    if not isinstance(mask, MaskObject):
        return mask
    shape = (math.prod(scores_shape[:-3]), *scores_shape[-3:])
    indices = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(4))
    whole = Mask(fitted(mask, Call(shape)))  # pyright: ignore[reportArgumentType]
    return jnp.broadcast_to(whole.allowed(*indices), shape).reshape(scores_shape)
