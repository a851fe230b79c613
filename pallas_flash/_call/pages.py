"""`paged.append` and `paged.quantize`: what happens to the pages outside of attention.

    quantised = x / scale, rounded to int8 or float8_e4m3fn      scale = max |x| / largest number

A scale per token and head bounds the error of each number: in int8 by max |x| / 254, and in
float8_e4m3fn by |x| / 16, or max |x| / 2^18 where that is more.
"""

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int32

from pallas_flash._arguments import paged
from pallas_flash._arguments.paged import LARGEST
from pallas_flash._jax.one_device import divided_by_xla
from pallas_flash._problem.paged import Requests


def quantize(
    pages: Float[Array, "P page_size K H"], dtype, *, per_head: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Quantise keys or values of a cache, for `paged_attention` and `paged.append`.

    Args:
        pages: the pages, or any keys or values [.., tokens, K, H] from which scales are taken.
        dtype: `jnp.int8` or `jnp.float8_e4m3fn`.
        per_head: whether all tokens of a head share a scale; else each token has its own. Take the
            scales of a head from keys like those to come: larger ones are clipped, and zeros give
            a scale of 1, beside which small numbers round to 0.

    Returns:
        The numbers, of the shape of `pages`, and the scales, float32 [P, K, page_size] or, per
        head, [K]. A number is at most max |x| / 254 off in int8, and at most |x| / 16 in
        float8_e4m3fn (max |x| / 2^18 where that is more). max |x| is over all numbers of a scale.

    Raises:
        TypeError: `pages` are not floating point [.., tokens, K, H], or `dtype` is another one.
        ValueError: `pages` have an empty axis.

    Example:
        >>> import jax, jax.numpy as jnp, pallas_flash
        >>> pages = jax.random.normal(jax.random.key(0), (8, 16, 2, 64))
        >>> numbers, scales = pallas_flash.paged.quantize(pages, jnp.int8)
        >>> numbers.dtype.name, scales.shape
        ('int8', (8, 2, 16))
    """
    pages, dtype = paged.quantize_arguments(pages, dtype, per_head)
    if per_head:
        axes = tuple(axis for axis in range(pages.ndim) if axis != pages.ndim - 2)
        scales = _scales(pages, dtype, axes)
        return _quantised(pages, scales, dtype), scales
    scales = _scales(pages, dtype, -1)
    return _quantised(pages, scales, dtype), jnp.swapaxes(scales, -1, -2)


def append(
    key_pages: Float[Array, "P page_size K H"],
    value_pages: Float[Array, "P page_size K V"],
    key: Float[Array, "*B T K H"],
    value: Float[Array, "*B T K V"],
    key_value_seq_lengths: Int32[Array, " R"],
    page_indices: Int32[Array, "R pages"],
    cu_seqlens_q: Int32[Array, " R+1"] | None = None,
    *,
    key_scales: Float[Array, "..."] | None = None,
    value_scales: Float[Array, "..."] | None = None,
) -> tuple[jax.Array, ...]:
    """Write the keys and values of new tokens into their pages.

    It takes what `paged_attention` takes, so that one set of arrays serves both: call it first.
    Under `jax.jit` with the pages donated, nothing but the new tokens is written.

    Args:
        key_pages: the pages of keys, of the dtype of `key`, int8 or float8_e4m3fn.
        value_pages: the pages of values.
        key: the new keys: [tokens, K, H] with `cu_seqlens_q`, or [B, T, K, H].
        value: the new values, of the shape of `key` but for the head dim V.
        key_value_seq_lengths: int32 [R], the keys of each request after the new tokens, which are
            its last ones; 0 for a request that is not there.
        page_indices: int32 [R, pages of a request], the pages of each request in the order of its
            tokens. Requests must not share the pages of their new tokens; the others are not used.
        cu_seqlens_q: int32 [R + 1], the first new token of each request, and the end of the
            last one's.
        key_scales: float32 [P, K, page_size] or [K], the scales of quantised keys. Scales per token
            are computed and written here, too; scales per head are given, and larger numbers are
            clipped. With scales per head int8 has no NaN: it raises if it is known, and is written
            as 0 if it is traced.
        value_scales: the same of quantised values.

    Returns:
        The pages of keys and of values; with quantised pages also their scales. A token whose
        position is not in the pages, or whose page is not in the cache, is not written.

    Raises:
        TypeError: an argument is of the wrong kind or dtype.
        ValueError: the arguments do not fit together, or lengths or pages that are known when the
            call is traced are out of range, or int8 pages cannot hold a known NaN.

    Example:
        >>> import jax, jax.numpy as jnp, pallas_flash
        >>> pages = jnp.zeros((8, 16, 2, 64))
        >>> k, v = jax.random.normal(jax.random.key(0), (2, 3, 1, 2, 64))  # a token of 3 requests
        >>> lengths, page_indices = jnp.array([1, 1, 1]), jnp.array([[5], [0], [2]])
        >>> keys, values = pallas_flash.paged.append(pages, pages, k, v, lengths, page_indices)
        >>> bool((keys[5, 0] == k[0, 0]).all())
        True
    """
    new, scales, requests = paged.append_arguments(
        key_pages,
        value_pages,
        key,
        value,
        key_value_seq_lengths,
        page_indices,
        cu_seqlens_q,
        key_scales=key_scales,
        value_scales=value_scales,
    )
    pages = [jnp.asarray(x) for x in (key_pages, value_pages)]
    for name, x, page, scale in zip(("key", "value"), new, pages, scales, strict=True):
        if page.dtype == jnp.int8 and scale.ndim == 1:
            _refuse_nan(name, x, requests)
    like = *pages, *[x for x in scales if x is not None]
    return divided_by_xla(_append, like, pages, scales, new, requests)


def _refuse_nan(name: str, tokens, requests: Requests) -> None:
    """Raise if a token that is written has a NaN, as far as both are known."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((tokens, requests))):
        return
    # Under `jit`, too, the numbers of arrays from outside are known.
    with jax.ensure_compile_time_eval():
        page, _ = _targets(requests)
        is_bad = jnp.isnan(tokens).any((1, 2)) & (page < requests.num_pages)
        if is_bad.any():
            raise ValueError(
                f"`{name}` must have no NaN with int8 pages and a scale for each head, because "
                f"int8 has none; got some in token {int(is_bad.argmax())}. Give a scale for each "
                "token and head, which keeps NaN, or float8_e4m3fn pages."
            )


def _append(pages, scales, new, requests: Requests) -> tuple[jax.Array, ...]:
    """Return the pages of keys and of values and their scales, with the new tokens."""
    page, row = _targets(requests)
    results, new_scales = [], []
    for x, scale, tokens in zip(pages, scales, new, strict=True):
        if scale is not None:
            per_token = scale.ndim == 3
            of_tokens = _scales(tokens, x.dtype, -1) if per_token else scale
            tokens = _quantised(tokens, of_tokens, x.dtype)
            if per_token:
                scale = _write(scale, (page, slice(None), row), of_tokens)
            new_scales.append(scale)
        results.append(_write(x, (page, row), tokens))
    return (*results, *new_scales)


def _targets(requests: Requests) -> tuple[jax.Array, jax.Array]:
    """Return the page and its row for each new token; a page beyond the cache if it has none."""
    request, position, exists = requests.positions()
    # A table without columns has no page.
    page = requests.page_of(request, jnp.maximum(position, 0)) if requests.room else -1
    inside = (position >= 0) & (position < requests.room)
    inside &= (page >= 0) & (page < requests.num_pages) & exists
    # Each a page of its own, because equal targets would need an order.
    outside = requests.num_pages + jnp.arange(requests.tokens, dtype=jnp.int32)
    return jnp.where(inside, page, outside), jnp.where(inside, position % requests.page_size, 0)


def _write(x, index, new):
    return x.at[index].set(new, mode="drop", unique_indices=True)


def _scales(x, dtype, axes) -> jax.Array:
    """Return scales that take the largest number along `axes` to the largest of `dtype`."""
    scales = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axes) / LARGEST[jnp.dtype(dtype).name]
    # Any scale serves zeros, and numbers so small that float32 has no scale for them.
    return jnp.where(scales == 0, 1.0, scales)


def _quantised(x, scales, dtype) -> jax.Array:
    """Return `x` divided by the scale of each of its rows, in `dtype`."""
    largest = LARGEST[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32) / scales[..., None]
    x = jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x
    return jnp.clip(x, -largest, largest).astype(dtype)
