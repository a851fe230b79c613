"""`PagedKVCache`: keys and values of many requests, in pages that they share."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from pallas_flash._arguments import paged
from pallas_flash._call.paged_attention import paged_attention
from pallas_flash._call.pages import append
from pallas_flash._jax.one_device import divided_by_xla
from pallas_flash._problem.checks import array, as_dtype, at_least, describe, is_int
from pallas_flash.flax._arrays import new_tokens, spec_of

# (key_value_seq_lengths, page_indices) and, with tokens in one axis, cu_seqlens_q, as
# `paged_attention` has them.
Requests = tuple[Any, ...] | list[Any]
# The options of `paged_attention` that have a number for each query head.
PER_HEAD = "sinks", "alibi_slopes"


class PagedKVCache(nnx.Module):
    """Keys and values of many requests, in pages that they share.

    `SelfAttention.init_pages` makes one. Which pages a request has is not kept here: each call is
    given the `requests`, because all layers of a model have the same.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_flash.flax import PagedKVCache
        >>> cache = PagedKVCache((8, 16, 1, 8))  # 8 pages of 16 tokens
        >>> requests = jnp.array([5, 5]), jnp.array([[6], [3]])  # lengths, page_indices
        >>> q, k = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 1, 8))
        >>> cache.attend(q, k, k, requests).shape
        (2, 5, 4, 8)

    Args:
        shape: (P, page_size, K, H).
        dtype: Dtype of the pages. In int8 and float8_e4m3fn each token and head has a scale.
        value_dim: Head dim of the values. None is H.
        sharding: Where the arrays of `shape` lie. Heads may be sharded, and pages: then each device
            has its own requests, and `page_indices` count its own pages.

    Attributes:
        key_pages: [P, page_size, K, H].
        value_pages: [P, page_size, K, V].
        key_scales: float32 [P, K, page_size]; None if the pages are not quantised.
        value_scales: The same.

    Raises:
        TypeError: If `dtype` is not floating point or int8, or `sharding` not a `NamedSharding`.
        ValueError: If `shape` or `value_dim` are not sizes, or the sharding divides tokens of a
            page or the head dim.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Dtype = jnp.float32,
        *,
        value_dim: int | None = None,
        sharding: NamedSharding | None = None,
    ):
        sizes = tuple(shape) if isinstance(shape, (tuple, list)) else ()
        if len(sizes) != 4 or not all(is_int(n) and n > 0 for n in sizes):
            raise ValueError(
                f"`shape` must be sizes (P, page_size, K, H); got {describe(shape)}. Give the "
                "number of pages, and of tokens in each."
            )
        dtype = as_dtype("dtype", dtype)
        quantised = dtype.name in paged.LARGEST
        if not quantised and not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"`dtype` must be floating point or int8; got {dtype}. Leave it out for the "
                "layer's."
            )
        pages, page_size, heads, head_dim = sizes
        value_dim = head_dim if value_dim is None else at_least(1, "value_dim", value_dim)
        spec = spec_of(sharding, 4)
        self.sharding = sharding
        self._axes = spec[0], spec[2]

        def zeros(size):
            return nnx.Cache(jnp.zeros((*sizes[:3], size), dtype, device=sharding))

        def scales():
            where = None if sharding is None else NamedSharding(sharding.mesh, P(spec[0], spec[2]))
            shape = pages, heads, page_size
            return nnx.Cache(jnp.ones(shape, jnp.float32, device=where)) if quantised else None

        self.key_pages = zeros(head_dim)
        self.value_pages = zeros(value_dim)
        self.key_scales, self.value_scales = nnx.data(scales()), nnx.data(scales())

    def positions(self, x: Array, requests: Requests | None) -> Int32[Array, "..."]:
        """Return the positions of the tokens `x`, [R, T, features] or [tokens, features]."""
        requests, x = _checked(requests), array("x", x)
        lengths, page_indices, *rest = requests
        starts = rest[0] if rest else None
        _, checked = paged.requests_of(
            lengths, page_indices, starts, "x", x, self.key_pages.shape, "features"
        )
        positions = divided_by_xla(lambda checked: checked.positions()[1], None, checked)
        return jnp.maximum(positions, 0).reshape(x.shape[:-1])

    def attend(
        self,
        query: Float[Array, "R T N H"] | Float[Array, "tokens N H"],
        key: Float[Array, "R T K H"] | Float[Array, "tokens K H"],
        value: Float[Array, "R T K V"] | Float[Array, "tokens K V"],
        requests: Requests | None,
        **options,
    ) -> Any:
        """Add new tokens to their pages, and return their attention to all tokens so far.

        Args:
            query: Queries of the new tokens, which are the last ones of each request.
            key: Keys of the new tokens.
            value: Values of the new tokens.
            requests: (key_value_seq_lengths, page_indices), and cu_seqlens_q with tokens in one
                axis, as `pallas_flash.paged_attention` has them; lengths count the new tokens.
            **options: Options of `pallas_flash.paged_attention`, such as `local_window_size`.

        Returns:
            The results of `pallas_flash.paged_attention`.

        Raises:
            TypeError: If an argument is of the wrong kind or dtype.
            ValueError: If shapes do not fit, or pages are sharded and tokens are in one axis.
        """
        requests = _checked(requests)
        keys, values = self.key_pages, self.value_pages
        query, key, value = new_tokens(query, key, value, keys=keys, values=values, ranks=(3, 4))
        named = dict(key_scales=self.key_scales, value_scales=self.value_scales)
        named = {name: x[...] for name, x in named.items() if x is not None}
        pages = self.key_pages[...], self.value_pages[...]
        if not named:
            key, value = (x.astype(pages[0].dtype) for x in (key, value))
        per_head = {name: options[name] for name in PER_HEAD if options.get(name) is not None}
        options = {name: x for name, x in options.items() if name not in PER_HEAD}

        def step(pages, named, new, requests, per_head):
            query, *new = new
            dtype = query.dtype
            pages = append(*pages, *new, *requests, **named)
            named = dict(zip(named, pages[2:], strict=True))
            if not named:
                query = query.astype(pages[0].dtype)
            o = paged_attention(query, *pages[:2], *requests, **named, **per_head, **options)
            return pages, (o[0].astype(dtype), o[1]) if isinstance(o, tuple) else o.astype(dtype)

        operands = pages, named, (query, key, value), requests, per_head
        run = step
        if self.sharding is not None:
            run = self._run_on_shards(step, operands, options.get("return_lse", False))
        pages, o = run(*operands)
        cells = self.key_pages, self.value_pages, self.key_scales, self.value_scales
        for cell, x in zip([cell for cell in cells if cell is not None], pages, strict=True):
            cell[...] = x
        return o

    def _run_on_shards(self, step, operands, return_lse: bool):
        """Return `step` inside of a `shard_map`: each device has its own heads and requests."""
        pages, heads = self._axes
        _, named, _, requests, per_head = operands
        if pages is not None and len(requests) > 2:
            raise ValueError(
                "`requests` must be (key_value_seq_lengths, page_indices) where devices divide the "
                "pages; got cu_seqlens_q, too. Give each request the same number of new tokens."
            )
        assert self.sharding is not None
        mesh, paged_limits = self.sharding.mesh, P(pages, None, heads)
        of_tokens = P(pages, None, heads) if len(requests) == 2 else P(None, heads)
        of_scales = dict.fromkeys(named, P(pages, heads))
        specs = (
            (paged_limits, paged_limits),
            of_scales,
            (of_tokens,) * 3,
            tuple(P(pages) for _ in requests),
            dict.fromkeys(per_head, P(heads)),
        )
        pages_and_scales = (paged_limits, paged_limits, *of_scales.values())
        o = (of_tokens, of_tokens) if return_lse else of_tokens
        out_specs = pages_and_scales, o
        run = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out_specs)

        def placed(*operands):
            where = jax.tree.map(
                lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
            )
            return run(*jax.tree.map(_put, operands, where))

        return placed


def _checked(requests) -> tuple:
    """Return `requests` as a tuple, without a last None; raise if it has another form."""
    if not isinstance(requests, (tuple, list)) or len(requests) not in (2, 3):
        raise ValueError(
            "`requests` must be (key_value_seq_lengths, page_indices) or (key_value_seq_lengths, "
            f"page_indices, cu_seqlens_q); got {describe(requests)}. Give them to each call with "
            "pages."
        )
    return tuple(requests[:2] if requests[-1] is None else requests)


def _put(x, sharding: NamedSharding):
    """Return `x` where `sharding` says."""
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)
