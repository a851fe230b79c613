"""Self-attention as a layer."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int32, Integer, PRNGKeyArray, Shaped

from pallas_flash._arguments.attention import _precision
from pallas_flash._call.attention import ContextParallelism, Implementation, attention
from pallas_flash._problem.checks import (
    array,
    as_dtype,
    at_least,
    describe,
    flag,
    is_int,
    share_to_drop,
)
from pallas_flash._problem.mask_objects import MaskObject
from pallas_flash.flax._arrays import (
    as_bool,
    merge_batch,
    merge_full,
    merge_positions,
    merge_scores,
    place_in_sequence,
)
from pallas_flash.flax._cache import KVCache, window_in_ring
from pallas_flash.flax._paged_cache import PagedKVCache, Requests
from pallas_flash.flax._rope import apply_rope, check_rope_theta

_lecun_normal, _zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()


class SelfAttention(nnx.Module):
    """Self-attention with grouped key/value heads, rotary positions and packed sequences.

    Linear maps of the tokens give q, k and v; if asked for, an RMSNorm over each head normalises q
    and k, and `apply_rope` turns them; a linear map of `pallas_flash.attention(q, k, v)` is the
    output. As in `attention`, nothing is hidden by default: a language model gives
    `is_causal=True`.
    Each run of `num_heads // num_kv_heads` query heads shares one key/value head (GQA,
    https://arxiv.org/abs/2305.13245).

    Its parts can be replaced: `linear` and `norm` make the maps and norms, `rope` turns q and k,
    and `attention` mixes the tokens. The parts are attributes: `query`, `key`, `value`, `out`,
    `query_norm`, `key_norm`, and `cache`, to which a `KVCache` of another shape may be assigned.

    To generate text, `init_cache` makes room for keys and values, and calls with `decode=True` add
    the next tokens to it: first all of the prompt, then each new token. `init_pages` makes pages
    that requests share, as a server does.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from pallas_flash.flax import SelfAttention
        >>> options = dict(is_causal=True, rope_theta=10_000.0)
        >>> layer = SelfAttention(16, num_heads=4, num_kv_heads=2, **options, rngs=nnx.Rngs(0))
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
            array and whatever their `positions`, unless a call says `reordered`.
        rope_theta: Base of the rotary angles, 10,000 in most models. None is no rotary embedding.
        rope: Rotary rule, if `apply_rope` with `rope_theta` is not the one: `rope(x, positions)`
            returns queries or keys `x` [*batch, T, heads, H], turned.
        normalize_qk: Whether queries and keys go through an RMSNorm over the head dim, each with a
            learned scale [H] that all heads share, before rotary positions (as in Qwen 3,
            https://arxiv.org/abs/2505.09388, and Gemma 3, https://arxiv.org/abs/2503.19786).
        scale: Multiplies the products of queries and keys. None is 1 / sqrt(H).
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
        use_out_bias: The same of the output map. None is `use_bias`.
        dtype: Computation dtype. None is the one that the input and the parameters promote to.
        param_dtype: Dtype of the parameters.
        precision: Precision of the linear maps and of the attention.
        kernel_init: Initializer of the linear maps.
        out_kernel_init: Initializer of the output map. None is `kernel_init`.
        sinks_init: Initializer of the sinks.
        linear: Makes the four linear maps; it is called as `nnx.LinearGeneral` is.
        norm: Makes the norms of `normalize_qk`; it is called as `nnx.RMSNorm` is.
        attention: Computes attention where nothing is cached; it is called as
            `pallas_flash.attention` is, which None stands for.
        implementation: As in `pallas_flash.attention`.
        reproducible: As in `pallas_flash.attention`; `deterministic` is about dropout.
        batch_invariant: As in `pallas_flash.attention`, for caches and pages, too; not for rings.
            It speaks of attention alone: the linear maps are what `linear` makes of them.
        sequence_axis: As in `pallas_flash.attention`, for a layer that is called inside a
            `jax.shard_map` with this device's share of the tokens, segments and positions. Then a
            `bias` or `mask` has columns for the tokens of all devices, `seq_lengths` count those,
            and `positions` of None go on from one device to the next.
        context_parallelism: As in `pallas_flash.attention`.
        sow_max_logits: Whether calls sow the largest score of each head, [*batch, N], as
            `nnx.Intermediate` "max_logits", see `return_max_logits` of `pallas_flash.attention`.
            `nnx.capture` collects what a model sows.
        rngs: The source of the random keys of parameters and of dropout.
        keep_rngs: Whether a layer with dropout keeps a copy of the dropout stream of `rngs`, so
            that calls need not give one.

    Raises:
        TypeError: If an argument is of the wrong kind or dtype.
        ValueError: If the sizes do not fit each other, or `dropout_rate` is outside [0, 1).
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        is_causal: bool = False,
        rope_theta: float | None = None,
        rope: Callable[[Array, Array], Array] | None = None,
        normalize_qk: bool = False,
        scale: float | None = None,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        use_sinks: bool = False,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool | None = None,
        use_bias: bool = False,
        use_out_bias: bool | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: str | jax.lax.Precision | None = None,
        kernel_init: Initializer = _lecun_normal,
        out_kernel_init: Initializer | None = None,
        sinks_init: Initializer = _zeros,
        linear: Callable[..., Any] = nnx.LinearGeneral,
        norm: Callable[..., Any] = nnx.RMSNorm,
        attention: Callable[..., Any] | None = None,
        implementation: Implementation | None = None,
        reproducible: bool | None = None,
        batch_invariant: bool = False,
        sequence_axis: str | tuple[str, ...] | None = None,
        context_parallelism: ContextParallelism | None = None,
        sow_max_logits: bool = False,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ):
        num_kv_heads, head_dim = _head_sizes(
            features, num_heads, num_kv_heads, head_dim, rope_theta
        )
        _check_parts(rope_theta, rope=rope, linear=linear, norm=norm, attention=attention)
        _check_numerics(dtype, param_dtype, precision, rngs)
        self.features, self.kv_shape = features, (num_kv_heads, head_dim)
        self.dtype, self.param_dtype = dtype, param_dtype
        self.is_causal = is_causal
        self.rope_theta, self.rope = rope_theta, rope
        self.scale, self.local_window_size = scale, local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.dropout_rate = share_to_drop("dropout_rate", dropout_rate)
        self.broadcast_dropout = broadcast_dropout
        self.deterministic = deterministic
        self.precision = precision
        self.implementation: Implementation | None = implementation
        self.reproducible, self.batch_invariant = reproducible, batch_invariant
        self.sequence_axis = sequence_axis
        self.context_parallelism: ContextParallelism | None = context_parallelism
        self.sow_max_logits = flag("sow_max_logits", sow_max_logits)
        self.attention = attention
        options = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        linear = functools.partial(linear, precision=precision, **options)
        of_input = dict(kernel_init=kernel_init, use_bias=use_bias)
        self.query = linear(features, (num_heads, head_dim), **of_input)
        self.key = linear(features, (num_kv_heads, head_dim), **of_input)
        self.value = linear(features, (num_kv_heads, head_dim), **of_input)
        self.out = linear(
            (num_heads, head_dim),
            features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            use_bias=use_bias if use_out_bias is None else use_out_bias,
        )
        self.query_norm, self.key_norm = (
            norm(head_dim, **options) if normalize_qk else None for _ in range(2)
        )
        self.sinks = (
            nnx.Param(sinks_init(rngs.params(), (num_heads,), param_dtype)) if use_sinks else None
        )
        self.rngs = rngs.dropout.fork() if keep_rngs and dropout_rate > 0.0 else None
        self.cache: KVCache | PagedKVCache | None = nnx.data(None)

    def __call__(
        self,
        x: Float[Array, "*batch T F"],
        *,
        bias: Float[Array, "*#batch #N #T #T"] | None = None,
        mask: Shaped[Array, "*#batch #N #T #T"] | MaskObject | None = None,
        seq_lengths: Int32[Array, "*#batch"] | None = None,
        segment_ids: Int32[Array, "*#batch T"] | None = None,
        positions: Integer[Array, "*#batch T"] | None = None,
        reordered: bool = False,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | PRNGKeyArray | None = None,
        decode: bool = False,
        requests: Requests | None = None,
    ) -> Float[Array, "*batch T F"]:
        """Mix the tokens of each sequence.

        Args:
            x: Tokens.
            bias: Added to the scaled scores; it has a gradient.
            mask: As in `attention_fn`. A key is visible if this mask and all other arguments
                allow it.
            seq_lengths: Tokens of each sequence. Later tokens are neither visible nor do they see
                a key: their output is the output of zeros. With `decode` they are the real tokens
                of `x`, and need a cache with ragged=True.
            segment_ids: Document of each token; tokens of different documents never see each
                other. None is one document.
            positions: Rotary position of each token. None is 0..T-1, which also serves packed
                documents: only differences of positions matter, and within a document they do not
                depend on where it starts.
            reordered: Whether tokens lie in another order than their `positions`, as after
                `pallas_flash.masks.balanced_order`. Then `positions` are for the mask, too:
                `is_causal`, `local_window_size` and a `PrefixLM` go by them, and not by the order
                in the array.
            deterministic: Whether dropout is switched off. None is what the layer was told.
            rngs: Where the random key of dropout comes from, or that key. None is what the layer
                keeps.
            decode: Whether `x` are the tokens that follow those in the cache. They are added to it
                and see it, and `positions` of None go on counting.
            requests: For the pages of `init_pages`: (key_value_seq_lengths, page_indices) with `x`
                [R, T, F], or (key_value_seq_lengths, page_indices, cu_seqlens_q) with `x`
                [tokens, F], as in `pallas_flash.paged_attention`.

        Returns:
            One new token for each token; NaN where a traced call finds no room for `x` behind the
            tokens in the cache.

        Raises:
            TypeError: If `positions` are not integers.
            ValueError: If shapes do not fit, if `positions` come without rotary embedding and not
                `reordered`, if `reordered` comes without them, or if a layer with dropout is not
                told whether it is on, or finds no random key. With `decode`: if there is no cache,
                or no room in it, if the layer is not causal, or if there is a bias, a mask,
                segments or another order, which a cache does not keep, or if devices divide the
                sequence by `sequence_axis`.
        """
        x = array("x", x)
        if x.ndim < 2 or x.shape[-1] != self.features:
            raise ValueError(
                f"`x` must be [*batch, length, {self.features}]; got x.shape={x.shape}."
            )
        *batch, length, _ = x.shape
        if flag("reordered", reordered):
            _check_reordered(positions, decode)
            where = merge_positions(positions, batch, length)
        else:
            where = None
        first, whole = place_in_sequence(self.sequence_axis, length)
        cache = None
        following = first + jnp.arange(length, dtype=jnp.int32)
        if flag("decode", decode):
            refused = dict(bias=bias, mask=mask, segment_ids=segment_ids)
            cache = self._cache(refused, divided=whole != length)
            following = _following(cache, x, seq_lengths, requests)
        elif requests is not None:
            raise ValueError(
                "`requests` must be None without decode=True, because they are of tokens in pages; "
                f"got {type(requests).__name__}. Leave them out."
            )
        if not self._turns and positions is not None and where is None:
            raise ValueError(
                "`positions` must be None without `rope` and `rope_theta`, as nothing reads them; "
                f"got positions.shape={positions.shape}. Leave them out, or pass reordered=True "
                "for a mask that goes by them."
            )
        q, k, v = self._projections(x, following if positions is None else positions)
        dropout_key = self._dropout_key(deterministic, rngs)
        if isinstance(cache, PagedKVCache):
            self._check_pages(dropout_key)
            o = cache.attend(q, k, v, requests, **self._scores())
            return self.out(o).reshape(x.shape)
        options: dict[str, Any] = dict(
            self._scores(),
            dropout_rate=0.0 if dropout_key is None else self.dropout_rate,
            dropout_key=dropout_key,
            broadcast_dropout=self.broadcast_dropout,
            reproducible=self.reproducible,
            return_max_logits=self.sow_max_logits,
        )
        if cache is not None:
            results = cache.attend(q, k, v, seq_lengths=seq_lengths, **options)
        else:
            scores_shape = (*batch, q.shape[-2], length, whole)
            seq_lengths = merge_full("seq_lengths", seq_lengths, batch, ())
            results = (self.attention or attention)(
                merge_batch(q, batch),
                *(merge_batch(y.astype(q.dtype), batch) for y in (k, v)),
                bias=merge_scores("bias", bias, scores_shape),
                mask=merge_scores("mask", as_bool(mask), scores_shape),
                is_causal=self.is_causal,
                query_seq_lengths=seq_lengths,
                key_value_seq_lengths=seq_lengths,
                query_positions=where,
                key_value_positions=where,
                segment_ids=merge_full("segment_ids", segment_ids, batch, (length,)),
                sequence_axis=self.sequence_axis,
                context_parallelism=self.context_parallelism,
                **options,
            )
        o = self._sown(results, batch) if self.sow_max_logits else results
        return self.out(o).reshape(x.shape)

    @property
    def _turns(self) -> bool:
        """Whether queries and keys are turned by their positions."""
        return self.rope is not None or self.rope_theta is not None

    def _projections(self, x, positions) -> tuple[Array, Array, Array]:
        """Return q [*batch, T, N, H], k and v [*batch, T, K, H] of tokens at `positions`."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rope is not None:
            q, k = (self.rope(y, positions) for y in (q, k))
        elif self.rope_theta is not None:
            q, k = (apply_rope(y, positions, self.rope_theta) for y in (q, k))
        return q, k, v

    def _scores(self) -> dict:
        """Return the options that `attention` and `paged_attention` share."""
        return dict(
            scale=self.scale,
            local_window_size=self.local_window_size,
            logits_soft_cap=self.logits_soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            precision=self.precision,
            implementation=self.implementation,
            batch_invariant=self.batch_invariant,
        )

    def _check_pages(self, dropout_key) -> None:
        """Raise if the layer does what attention to pages does not."""
        if dropout_key is not None or self.sow_max_logits:
            raise ValueError(
                "`decode` must be False with dropout or `sow_max_logits` where the cache has "
                "pages; got True. Pass deterministic=True, or call `init_cache`."
            )

    def _sown(self, results, batch: Sequence[int]) -> Array:
        """Sow the largest scores, and return the output."""
        if not isinstance(results, tuple) or len(results) != 2:
            raise ValueError(
                "`attention` must return (output, largest scores) in a layer with "
                f"`sow_max_logits`; got {type(results).__name__}. Take its argument "
                "`return_max_logits` into account, or leave out `sow_max_logits`."
            )
        o, max_logits = results
        self.sow(nnx.Intermediate, "max_logits", max_logits.reshape(*batch, -1))
        return o

    def init_cache(
        self,
        input_shape: Sequence[int],
        dtype: Dtype | None = None,
        *,
        ragged: bool = False,
        ring: bool = False,
        sharding: NamedSharding | None = None,
    ) -> None:
        """Make an empty `KVCache` for keys and values; it replaces an older cache.

        It is state of the kind `nnx.Cache`, so `nnx.state(model, nnx.Param)` is what to save of a
        model that generates. Decode under `nnx.jit`: outside of it each call waits for the number
        of tokens in the cache.

        Args:
            input_shape: [*batch, length, features] of the longest input, as for
                `nnx.MultiHeadAttention`; the length counts the prompt and all that follows, or is
                the room of a ring.
            dtype: Dtype of the cache. None is that in which the layer computes with inputs in the
                dtype of its parameters.
            ragged: Whether each sequence has a length of its own, see `KVCache`.
            ring: Whether new tokens take the slots of the oldest ones, for a layer with a window,
                see `KVCache`.
            sharding: Where the cache [*batch, length, K, H] lies, see `KVCache`.

        Raises:
            TypeError: If `dtype` is not floating point, or `sharding` not a `NamedSharding`.
            ValueError: If `input_shape` are not sizes, or its last size is not `features`, a ring
                has less room than the window, or the sharding divides the length or the head dim.
        """
        sizes = input_shape if isinstance(input_shape, (tuple, list)) else ()
        right = all(is_int(n) and n >= 0 for n in sizes)
        if not right or len(sizes) < 2 or sizes[-1] != self.features:
            raise ValueError(
                f"`input_shape` must be sizes (*batch, length, {self.features}); got "
                f"{describe(input_shape)}. Give the shape of the longest input."
            )
        shape = (*sizes[:-1], *self.kv_shape)
        if flag("ring", ring):
            window_in_ring(self.local_window_size, sizes[-2])
        dtype = self._cache_dtype(dtype)
        self.cache = KVCache(shape, dtype, ragged=ragged, ring=ring, sharding=sharding)

    def init_pages(
        self,
        num_pages: int,
        page_size: int,
        dtype: Dtype | None = None,
        *,
        sharding: NamedSharding | None = None,
    ) -> None:
        """Make an empty `PagedKVCache` for keys and values; it replaces an older cache.

        Args:
            num_pages: Pages that all requests share.
            page_size: Tokens of a page.
            dtype: Dtype of the pages; int8 and float8_e4m3fn are quantised. None is as in
                `init_cache`.
            sharding: Where the pages [P, page_size, K, H] lie, see `PagedKVCache`.

        Raises:
            TypeError: If `dtype` is not floating point or int8, or `sharding` not a
                `NamedSharding`.
            ValueError: If a size is not an int of at least 1, or the sharding divides tokens of a
                page or the head dim.
        """
        shape = (num_pages, page_size, *self.kv_shape)
        self.cache = PagedKVCache(shape, self._cache_dtype(dtype), sharding=sharding)

    def _cache_dtype(self, dtype: Dtype | None) -> Dtype:
        """Return the dtype of a new cache."""
        return self.dtype or self.param_dtype if dtype is None else dtype

    def _cache(self, refused: dict, *, divided: bool) -> KVCache | PagedKVCache:
        """Return the cache, for a call that it can serve.

        Args:
            refused: the arguments of the call that must be None, by name.
            divided: whether devices divide the sequence.
        """
        if divided:
            raise ValueError(
                "`decode` must be False where devices divide the sequence, because each would "
                "keep a cache of its own tokens; got True with sequence_axis="
                f"{self.sequence_axis!r}. Decode with a layer that has none."
            )
        if self.cache is None:
            raise ValueError(
                "`decode` must be False without a cache; got True. Call "
                "`init_cache((*batch, length, features))` first."
            )
        if not self.is_causal:
            raise ValueError(
                "`decode` must be False in a layer with is_causal=False, whose tokens see later "
                "ones; got True. Build the layer with is_causal=True."
            )
        for name, value in refused.items():
            if value is not None:
                raise ValueError(
                    f"`{name}` must be None with decode=True, because the cache does not keep it "
                    f"for later tokens; got {type(value).__name__}. Leave it out."
                )
        return self.cache

    def set_view(self, deterministic: bool | None = None) -> None:
        """Called by `nnx.view`, which makes a copy of a model with dropout on or off.

        Args:
            deterministic: Whether dropout is switched off. None changes nothing.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _dropout_key(self, deterministic, rngs):
        """Return the random key of this call's dropout; None if it is off."""
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


def _check_parts(rope_theta: float | None, **parts) -> None:
    """Raise unless the parts of a layer are functions, and only one turns queries and keys."""
    for name, part in parts.items():
        if not callable(part) and (part is not None or name in ("linear", "norm")):
            raise TypeError(
                f"`{name}` must be a class or a function; got {describe(part)}. "
                "`help(SelfAttention)` says how the layer calls it."
            )
    if None not in (parts["rope"], rope_theta):
        raise ValueError(
            "`rope_theta` must be None with `rope`, which has a base of its own; got "
            f"{rope_theta}. Pass one of the two."
        )


def _check_numerics(dtype, param_dtype, precision, rngs) -> None:
    """Raise unless these are what Flax's modules and `attention` take."""
    for name, x in {"dtype": dtype, "param_dtype": param_dtype}.items():
        given = None if x is None and name == "dtype" else as_dtype(name, x)
        if given is not None and not jnp.issubdtype(given, jnp.floating):
            raise TypeError(f"`{name}` must be floating point; got {given}. Use `jnp.bfloat16`.")
    _precision(precision)
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"`rngs` must be an `nnx.Rngs`; got {describe(rngs)}. Pass `nnx.Rngs(0)`, or the "
            "model's."
        )


def _head_sizes(
    features: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    rope_theta: float | None,
) -> tuple[int, int]:
    """Return the number of key/value heads and the head dim of a layer."""
    features, num_heads = at_least(1, "features", features), at_least(1, "num_heads", num_heads)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    num_kv_heads = at_least(1, "num_kv_heads", num_kv_heads)
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
    head_dim = at_least(1, "head_dim", head_dim)
    if rope_theta is not None:
        check_rope_theta(rope_theta)
    if rope_theta is not None and head_dim % 2:
        raise ValueError(
            f"`head_dim` must be even, because rotary positions turn pairs; got {head_dim}. "
            "Give an even `head_dim`, or rope_theta=None for no rotary embedding."
        )
    return num_kv_heads, head_dim


def _following(cache: KVCache | PagedKVCache, x, seq_lengths, requests) -> Array:
    """Return the positions of tokens `x` that follow those in the cache."""
    if isinstance(cache, KVCache):
        if requests is not None:
            raise ValueError(
                "`requests` must be None where the cache has no pages; got "
                f"{type(requests).__name__}. Leave them out, or call `init_pages`."
            )
        cache.check("x", x, 1, seq_lengths)
        return cache.positions(x.shape[-2])
    if seq_lengths is not None:
        raise ValueError(
            "`seq_lengths` must be None where the cache has pages; got "
            f"{type(seq_lengths).__name__}. Give the new tokens of each request by the "
            "cu_seqlens_q of `requests`."
        )
    return cache.positions(x, requests)


def _check_reordered(positions, decode: bool) -> None:
    """Raise if a call cannot have its tokens in another order than their positions."""
    if positions is None:
        raise ValueError(
            "`positions` must be given with reordered=True; got None. Pass the position of "
            "each token, which `pallas_flash.masks.balanced_order` returns."
        )
    if decode:
        raise ValueError(
            "`reordered` must be False with decode=True, because the cache keeps tokens in "
            "their order; got True. Take the tokens back to it by `jnp.argsort(order)`."
        )
