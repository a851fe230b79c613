"""Turns the arguments of `paged_attention` into a `PagedProblem`, and checks arguments about pages.

Shapes and dtypes are always checked. Numbers in `key_value_seq_lengths`, `page_indices` and
`cu_seqlens_q` are checked where they are known; where they are traced, no number leads outside of
an array.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_flash._arguments.attention import (
    DTYPES,
    _per_head,
    _precision,
    _scale,
    _soft_cap,
    check_implementation,
    window_sides,
)
from pallas_flash._jax.one_device import whole
from pallas_flash._jax.symbolic import symbolic_sizes
from pallas_flash._problem.checks import array, array_of_dtype, as_dtype, describe, flag, integers
from pallas_flash._problem.paged import PagedProblem, Requests

# The dtypes of quantised caches, and the largest number of each that is used.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def validate(
    query,
    key_pages,
    value_pages,
    key_value_seq_lengths,
    page_indices,
    cu_seqlens_q,
    *,
    key_scales,
    value_scales,
    scale,
    local_window_size,
    logits_soft_cap,
    sinks,
    alibi_slopes,
    precision,
    return_lse,
    batch_invariant,
    implementation,
) -> PagedProblem:
    """Return the problem of a call of `paged_attention`; raise if its arguments are wrong."""
    flag("return_lse", return_lse)
    check_implementation(implementation)
    query = _floating("query", query)
    given = key_pages, value_pages, key_scales, value_scales
    pages, scales = _pages(*given, query.dtype, "query")
    _check_known_sizes(query, *pages)
    left = None if local_window_size is None else window_sides(local_window_size)[0]
    of_requests = key_value_seq_lengths, page_indices, cu_seqlens_q
    query, requests = requests_of(*of_requests, "query", query, pages[0].shape, before=left)
    _, num_heads, head_dim = query.shape
    num_kv_heads = pages[0].shape[2]
    if head_dim != pages[0].shape[3]:
        raise ValueError(
            f"`key_pages` must have the head dim of `query`; got {pages[0].shape[3]} and "
            f"{head_dim} (key_pages.shape={pages[0].shape}). Give both one head dim; only "
            "`value_pages` may have another."
        )
    if not num_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"`query` must have a multiple of the heads of `key_pages`; got {num_heads} query "
            f"heads and {num_kv_heads} key/value heads (key_pages.shape={pages[0].shape}). Pages "
            "are [P, page_size, K, H]."
        )
    batch_invariant = flag("batch_invariant", batch_invariant)
    query, scale, any_scale = _scale(scale, query, head_dim, known=batch_invariant)
    return PagedProblem(
        query=query,
        key_pages=pages[0],
        value_pages=pages[1],
        key_scales=scales[0],
        value_scales=scales[1],
        requests=requests,
        scale=scale,
        sinks=_per_head("sinks", sinks, num_heads, scale.dtype),
        slopes=_per_head("alibi_slopes", alibi_slopes, num_heads, scale.dtype),
        left=left,
        soft_cap=_soft_cap(logits_soft_cap, scale.dtype),
        precision=_precision(precision),
        any_scale=any_scale,
        batch_invariant=batch_invariant,
    )


def append_arguments(
    key_pages,
    value_pages,
    key,
    value,
    key_value_seq_lengths,
    page_indices,
    cu_seqlens_q,
    *,
    key_scales,
    value_scales,
) -> tuple[list, list, Requests]:
    """Return the new keys and values [tokens, K, ..], the scales, and the requests."""
    key, value = _floating("key", key), _floating("value", value)
    pages, scales = _pages(key_pages, value_pages, key_scales, value_scales, key.dtype, "key")
    _check_known_sizes(key, value, *pages)
    if value.shape[:-1] != key.shape[:-1] or value.dtype != key.dtype:
        raise ValueError(
            f"`value` must have the shape of `key` but for its head dim, and its dtype; got "
            f"{describe(value)} and {describe(key)}. Give each key one value."
        )
    new, requests = [], None
    for name, x, page in (("key", key, pages[0]), ("value", value, pages[1])):
        of_requests = key_value_seq_lengths, page_indices, cu_seqlens_q
        x, requests = requests_of(*of_requests, name, x, page.shape)
        if x.shape[1:] != page.shape[2:]:
            raise ValueError(
                f"`{name}` must have the heads and the head dim of `{name}_pages`; got "
                f"{x.shape[1:]} and {page.shape[2:]}. Pages are [P, page_size, K, H]."
            )
        new.append(x)
    assert requests is not None
    return new, scales, requests


def quantize_arguments(pages, dtype, per_head) -> tuple[jax.Array, Any]:
    """Return the arguments of `paged.quantize`, checked."""
    pages, dtype = array("pages", pages), as_dtype("dtype", dtype)
    if dtype.name not in LARGEST:
        raise TypeError(
            f"`dtype` must be one of {', '.join(LARGEST)}; got {dtype}. Use `jnp.int8` for the "
            "smaller error."
        )
    flag("per_head", per_head)
    if not jnp.issubdtype(pages.dtype, jnp.floating) or pages.ndim < 3:
        raise TypeError(
            "`pages` must be floating point, [.., tokens, K, H]; got "
            f"{describe(pages)}. Pass keys or values as they were computed."
        )
    if not pages.size:
        raise ValueError(
            f"`pages` must have no empty axis; got pages.shape={pages.shape}. Leave out what has "
            "no numbers."
        )
    return pages, dtype


def _floating(name: str, x) -> jax.Array:
    """Return `x` as an array of one of the dtypes that `attention` takes."""
    x = array(name, x)
    if x.dtype.name not in DTYPES:
        raise TypeError(
            f"`{name}` must be one of {', '.join(DTYPES)}; got {x.dtype}. Cast it with `.astype`."
        )
    return x


def _pages(
    key_pages, value_pages, key_scales, value_scales, dtype, named: str
) -> tuple[list, list]:
    """Return the pages of keys and values, and their scales (None if they are not quantised)."""
    key_pages, value_pages = array("key_pages", key_pages), array("value_pages", value_pages)
    for name, x in {"key_pages": key_pages, "value_pages": value_pages}.items():
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(
                f"`{name}` must have shape [P, page_size, K, H] without an empty axis; got "
                f"{name}.shape={x.shape}. Reshape a contiguous cache [B, S, K, H] to "
                "[B * S / page_size, page_size, K, H]."
            )
        if x.dtype != dtype and x.dtype.name not in LARGEST:
            raise TypeError(
                f"`{name}` must have the dtype of `{named}`, {dtype}, or one of "
                f"{', '.join(LARGEST)}; got {x.dtype}. Cast it with `.astype`, or see "
                "`paged.quantize`."
            )
    if key_pages.shape[:3] != value_pages.shape[:3]:
        raise ValueError(
            "`value_pages` must have the pages, the page size and the heads of `key_pages`; got "
            f"{value_pages.shape[:3]} and {key_pages.shape[:3]}. Give each key one value."
        )
    pages = [key_pages, value_pages]
    scales = [
        _page_scales("key_scales", key_scales, key_pages),
        _page_scales("value_scales", value_scales, value_pages),
    ]
    return pages, scales


def _page_scales(name: str, scales, pages):
    quantised = pages.dtype.name in LARGEST
    if (scales is not None) != quantised:
        raise ValueError(
            f"`{name}` must be {'given with' if quantised else 'None without'} quantised pages; "
            f"got {describe(scales)} for pages of {pages.dtype}. `paged.quantize` returns both."
        )
    if scales is None:
        return None
    scales = array_of_dtype(name, scales, "float32")
    count, page_size, heads, _ = pages.shape
    if scales.shape not in ((count, heads, page_size), (heads,)):
        raise ValueError(
            f"`{name}` must have shape [P, K, page_size] = {(count, heads, page_size)} or [K] = "
            f"{(heads,)}; got {scales.shape}. Give a scale for each token and head, or each head."
        )
    return scales


def _check_known_sizes(*arrays) -> None:
    if symbolic_sizes(arrays):
        raise NotImplementedError(
            "`query` and pages must have known sizes; got symbolic ones. Export one program for "
            "each size: lengths and pages are arrays, and need no export of their own."
        )


def requests_of(
    lengths,
    page_indices,
    cu_seqlens_q,
    name: str,
    x,
    pages_shape,
    rest: str = "heads, head dim",
    *,
    before: int | None = 0,
) -> tuple[jax.Array, Requests]:
    """Return the tokens of argument `name` as [tokens, ..], and the requests.

    Args:
        lengths: the argument, as the next two.
        page_indices: which pages a request has.
        cu_seqlens_q: where its tokens begin, or None.
        name: the argument of the tokens.
        x: its value.
        pages_shape: the shape of the pages.
        rest: names of the axes of x after the tokens.
        before: the keys before each new token whose pages are needed; None for all.
    """
    axes = rest.count(",") + 1
    lengths, starts = array("key_value_seq_lengths", lengths), cu_seqlens_q
    count = lengths.shape[0] if lengths.ndim == 1 else 0
    if not count:
        raise ValueError(
            "`key_value_seq_lengths` must have shape [R] with at least one request; got "
            f"{lengths.shape}. Give the number of keys of each request."
        )
    lengths = integers("key_value_seq_lengths", lengths, (count,), "[R]")
    table = array("page_indices", page_indices)
    width = table.shape[1] if table.ndim == 2 else 0
    shape, letters = (count, width), "[R, pages of a request]"
    table = integers("page_indices", table, shape, letters, each="page of each request")
    if starts is None:
        if x.ndim != 2 + axes or x.shape[0] != count:
            raise ValueError(
                f"`{name}` must have shape [R, T, {rest}] for {count} requests; got "
                f"{name}.shape={x.shape}. Give `cu_seqlens_q` with tokens in one axis."
            )
        most = x.shape[1]
        x = whole(x, 1).reshape(count * most, *x.shape[2:])
    else:
        each = "request, and the end of the last one"
        starts = integers("cu_seqlens_q", starts, (count + 1,), "[R + 1]", each=each)
        if x.ndim != 1 + axes:
            raise ValueError(
                f"`{name}` must have shape [tokens, {rest}] with `cu_seqlens_q`; got "
                f"{name}.shape={x.shape}. Put the tokens of all requests into one axis."
            )
        most = x.shape[0]
    pages, page_size = pages_shape[:2]
    requests = Requests(lengths, table, starts, x.shape[0], most, pages, page_size)
    _check_numbers(requests, before)
    return x, requests


def _check_numbers(r: Requests, before: int | None) -> None:
    """Check the numbers that are known."""
    lengths, table, starts = (_known(x) for x in (r.lengths, r.page_indices, r.cu_seqlens_q))
    if starts is not None and (np.diff(starts, prepend=0, append=r.tokens) < 0).any():
        raise ValueError(
            f"`cu_seqlens_q` must not decrease, and must be from 0 to {r.tokens}, the number "
            f"of tokens; got {starts[:8].tolist()}. Give the first token of each request, and the "
            "end of the last one."
        )
    if lengths is None:
        return
    if (outside := (lengths < 0) | (lengths > r.room)).any():
        raise ValueError(
            f"`key_value_seq_lengths` must be from 0 to the room of a request's pages, {r.room}; "
            f"got {lengths[outside][0]}. Give `page_indices` more columns, one for each page of "
            "the longest request."
        )
    if starts is None and r.cu_seqlens_q is not None:
        return
    new = np.full_like(lengths, r.max_tokens) if starts is None else np.diff(starts)
    if (short := (lengths > 0) & (lengths < new)).any():
        raise ValueError(
            "`key_value_seq_lengths` must count the new tokens of a request, too, or be 0 where "
            f"there is no request; got {lengths[short][0]} for {new[short][0]} new tokens. Give "
            "the number of keys after they are appended."
        )
    if table is None:
        return
    first = np.zeros_like(lengths) if before is None else lengths - new - before
    page = np.arange(table.shape[1]) * r.page_size
    needed = (page < lengths[:, None]) & (page + r.page_size > first[:, None]) & (new > 0)[:, None]
    bad = table[needed & ((table < 0) | (table >= r.num_pages))]
    if bad.size:
        raise ValueError(
            f"`page_indices` must be from 0 to {r.num_pages - 1} up to each length; got {bad[0]}. "
            "Give the number of a page of `key_pages`; places that a call neither reads nor writes "
            "may hold anything."
        )


def _known(x) -> np.ndarray | None:
    """Return the numbers of an array; None where they are traced, or there is none."""
    return None if x is None or isinstance(x, Tracer) else np.asarray(x)
