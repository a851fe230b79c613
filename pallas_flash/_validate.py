"""Raw arguments of `attention` to one frozen `Problem`.

Every error that a user can meet is raised here, in _select or in _tiles, and all is decided from
shapes, dtypes and Python values, so errors appear while tracing.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash._masks import Band, Lengths, Mask, Segments
from pallas_flash._problem import Problem

DTYPES = ("float16", "bfloat16", "float32", "float64")

# Far beyond any sequence, and far enough from the ends of int32 that sums of positions cannot wrap.
_FAR = 2**30


def validate(
    query,
    key,
    value,
    bias,
    mask,
    *,
    scale,
    is_causal,
    query_seq_lengths,
    key_value_seq_lengths,
    local_window_size,
    segment_ids,
    query_offset,
    precision,
) -> Problem:
    """Checks the arguments of `attention` and brings them into one form."""
    query, key, value = (
        _array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    _check_inputs(query, key, value)
    if query.ndim == 3:
        query, key, value = query[None], key[None], value[None]
    batch, q_len, num_heads, head_dim = query.shape
    kv_len = key.shape[1]
    scores_shape = (batch, num_heads, q_len, kv_len)
    query, scale = _scale(scale, query, head_dim)
    return Problem(
        query=query,
        key=key,
        value=value,
        scale=scale,
        bias=_bias(bias, scores_shape),
        mask_array=_mask_array(mask, scores_shape),
        mask=_mask(
            batch,
            q_len,
            kv_len,
            is_causal=is_causal,
            window=local_window_size,
            offset=query_offset,
            lengths=(query_seq_lengths, key_value_seq_lengths),
            segment_ids=segment_ids,
        ),
        precision=_precision(precision),
    )


def check_flag(name: str, value) -> bool:
    """A Python bool: it decides what is compiled, so it cannot be an array."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"`{name}` must be True or False; got {_describe(value)}. Pass a Python bool, which "
            "under `jax.jit` means a static argument."
        )
    return bool(value)


def check_results(return_residual, return_lse) -> None:
    """At most one of the two statistics can be asked for."""
    flags = {"return_residual": return_residual, "return_lse": return_lse}
    if all([check_flag(name, value) for name, value in flags.items()]):
        raise ValueError(
            "`return_residual` and `return_lse` must not both be True; got both. Keep "
            "`return_lse`: it is float32 and "
            "has a gradient, `return_residual` is its rounded constant copy."
        )


def _check_inputs(query, key, value) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if x.dtype.name not in DTYPES:
            raise TypeError(
                f"`{name}` must be one of {', '.join(DTYPES)}; got {x.dtype}. Cast it with "
                f"`.astype`."
            )
    if query.ndim not in (3, 4):
        raise ValueError(
            f"`query` must have shape [B, T, N, H] or [T, N, H]; got rank {query.ndim} "
            f"(query.shape={query.shape}). "
            + (
                "Reshape its leading axes into one batch axis."
                if query.ndim > 4
                else "Add each missing axis with size 1."
            )
        )
    for name in ("key", "value"):
        x = named[name]
        if x.dtype != query.dtype:
            raise TypeError(
                f"`{name}` must have the dtype of `query`; got {x.dtype} and {query.dtype}. Cast "
                f"one with `.astype`."
            )
        if x.ndim != query.ndim:
            raise ValueError(
                f"`{name}` must have the rank of `query`; got {x.ndim} and {query.ndim} "
                f"({name}.shape={x.shape}, query.shape={query.shape}). Add or drop the batch axis."
            )
    shapes = f"query.shape={query.shape}, key.shape={key.shape}, value.shape={value.shape}"

    def equal(name, axis, other, meaning, fix):
        if named[name].shape[axis] != named[other].shape[axis]:
            raise ValueError(
                f"`{name}` must have the {meaning} of `{other}`; got {named[name].shape[axis]} and "
                f"{named[other].shape[axis]} ({shapes}). {fix}"
            )

    if query.ndim == 4:
        equal(
            "key", 0, "query", "batch size", "Broadcast the smaller batch with `jnp.broadcast_to`."
        )
        equal(
            "value",
            0,
            "query",
            "batch size",
            "Broadcast the smaller batch with `jnp.broadcast_to`.",
        )
    equal("value", -3, "key", "length", "Give each key one value.")
    equal("value", -2, "key", "number of heads", "Give each key head one value head.")
    equal("key", -1, "query", "head size", "Give both one head size; only that of `value` is free.")
    for name, x in named.items():
        if 0 in x.shape[-2:]:
            raise ValueError(
                f"`{name}` must have at least one head and a head size of at least 1; got "
                f"{x.shape[-2]} heads of size "
                f"{x.shape[-1]} ({name}.shape={x.shape}). Check the order of its axes: [B, T, N, "
                f"H]."
            )
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"`query` must have a multiple of the heads of `key`; got {query.shape[-2]} query "
            f"heads and "
            f"{key.shape[-2]} key/value heads ({shapes}). Repeat or drop heads until they divide."
        )


def _scale(scale: Any, query, head_dim):
    """A scale that is not negative, and `query` with the sign of the given one.

    The kernels take the maximum of the raw products and scale only that, which needs a scale of one
    sign; the sign is moved to the queries exactly. Outside the custom derivative, so that both keep
    their gradients.
    """
    dtype = np.promote_types(query.dtype, np.float32)
    if scale is None:
        scale = 1 / math.sqrt(head_dim)
    if _is_int(scale) or isinstance(scale, (float, np.floating)):
        # An int stays one, because it may be too large for a float. NaN fails the comparison.
        number = scale if isinstance(scale, int) else float(scale)
        if not abs(number) <= float(jnp.finfo(dtype).max):
            raise ValueError(
                f"`scale` must be finite in {dtype.name}; got {_describe(scale)}. Use None for "
                "1 / sqrt(head size)."
            )
        return (-query if number < 0 else query), jnp.asarray(abs(float(number)), dtype)
    if not _is_array(scale) or scale.ndim or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(
            f"`scale` must be a number or a floating-point scalar array; got {_describe(scale)}. "
            "Multiply `query` by a scale per head or position and pass `scale=1.0`."
        )
    scale = jnp.asarray(scale, dtype)
    return jnp.where(scale < 0, -query, query), jnp.where(scale < 0, -scale, scale)


def _bias(bias, scores_shape):
    if bias is None:
        return None
    bias = _array("bias", bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(
            f"`bias` must be floating point; got {bias.dtype}. Pass a boolean array that says who "
            "may attend as `mask`."
        )
    return _broadcastable("bias", bias, scores_shape)


def _mask_array(mask, scores_shape):
    if mask is None:
        return None
    mask = _array("mask", mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"`mask` must be boolean, True where a query may attend; got {mask.dtype}. Pass "
            f"`mask.astype(bool)`, or "
            "numbers to add to the scores as `bias`."
        )
    return _broadcastable("mask", mask, scores_shape)


def _broadcastable(name, x, scores_shape):
    if x.ndim > 4:
        raise ValueError(
            f"`{name}` must have at most 4 axes, [B, N, T, S]; got rank {x.ndim} "
            f"({name}.shape={x.shape}). "
            "Drop the extra axes."
        )
    shape = (1,) * (4 - x.ndim) + x.shape
    if any(have not in (1, want) for have, want in zip(shape, scores_shape, strict=True)):
        raise ValueError(
            f"`{name}` must be broadcastable to [B, N, T, S] = {scores_shape}; got "
            f"{name}.shape={x.shape}. "
            "Give each axis size 1 or that of the scores; missing axes are added in front, heads "
            "are those of `query`."
        )
    return x.reshape(shape)


def _mask(batch, q_len, kv_len, *, is_causal, window, offset, lengths, segment_ids) -> Mask:
    leaves = []
    band = _band(
        batch,
        q_len,
        kv_len,
        causal=check_flag("is_causal", is_causal),
        window=window,
        offset=offset,
    )
    if band != Band():
        leaves.append(band)
    names = ("query_seq_lengths", "key_value_seq_lengths")
    lengths = [
        None if x is None else _integers(name, x, (batch,), "[B]")
        for name, x in zip(names, lengths, strict=True)
    ]
    if any(x is not None for x in lengths):
        leaves.append(Lengths(*lengths))
    if segment_ids is not None:
        leaves.append(_segments(segment_ids, batch, q_len, kv_len))
    return Mask(tuple(leaves))


def _band(batch, q_len, kv_len, *, causal, window, offset) -> Band:
    left, right = _window(window)
    if causal:
        right = 0 if right is None else min(right, 0)
    low, high = (None if left is None else -left), right
    if _is_int(offset):
        # Known now: folded into the band, and a side that excludes nothing is dropped.
        offset = max(-_FAR, min(_FAR, int(offset)))
        low, high = (None if side is None else side + offset for side in (low, high))
        low = None if low is None or low <= 1 - q_len else min(low, _FAR)
        high = None if high is None or high >= kv_len - 1 else max(high, -_FAR)
        return Band(low, high)
    if not _is_array(offset):
        raise TypeError(
            f"`query_offset` must be an int, an int32 scalar or int32 [B]; got "
            f"{_describe(offset)}. "
            "Use 0 for queries and keys that start together."
        )
    if offset.ndim == 0:
        # One traced number for the batch, such as the fill of a cache.
        offset = jnp.broadcast_to(offset, (batch,))
    offset = _integers("query_offset", offset, (batch,), "[B]")
    return Band() if low is None and high is None else Band(low, high, offset)


def _window(window) -> tuple[int | None, int | None]:
    """(left, right), None where that side is unbounded."""
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2 or not all(side is None or _is_int(side) for side in sides):
        raise TypeError(
            "`local_window_size` must be None, an int or a pair (left, right) of these; got "
            f"{_describe(window)}. Pass a size that is traced or differs by example as `mask`."
        )
    left, right = (None if side is None else min(int(side), _FAR) for side in sides)
    if any(side is not None and side < 0 for side in (left, right)):
        raise ValueError(
            f"`local_window_size` must not be negative; got {window}. Use None for no limit; "
            "(0, 0) sees only the query's own position."
        )
    return left, right


def _segments(segment_ids, batch, q_len, kv_len) -> Segments:
    if isinstance(segment_ids, (tuple, list)):
        if len(segment_ids) != 2:
            raise ValueError(
                f"`segment_ids` must be one array or a (query, key_value) pair; got "
                f"{len(segment_ids)} items. "
                "Pass one [B, T] array when queries and keys are the same tokens."
            )
        query, key_value = segment_ids
    else:
        segment_ids = _array("segment_ids", segment_ids)
        if q_len != kv_len:
            raise ValueError(
                f"`segment_ids` must be a (query, key_value) pair when T and S differ; got one "
                f"array with T={q_len} and "
                f"S={kv_len}. Pass ([B, T], [B, S])."
            )
        return Segments(_integers("segment_ids", segment_ids, (batch, q_len), "[B, T]"))
    return Segments(
        _integers("segment_ids", query, (batch, q_len), "[B, T]"),
        _integers("segment_ids", key_value, (batch, kv_len), "[B, S]"),
    )


def _integers(name, x, shape, letters):
    x = _array(name, x)
    if x.dtype != jnp.int32:
        raise TypeError(
            f"`{name}` must be int32; got {x.dtype}. Cast it with `.astype(jnp.int32)`."
        )
    if x.shape != shape:
        raise ValueError(
            f"`{name}` must have shape {letters} = {shape}; got {x.shape}. Give one number for "
            f"each " + ("example of the batch." if len(shape) == 1 else "token.")
        )
    return x


def _precision(precision):
    names = [p.name.lower() for p in lax.Precision]
    if isinstance(precision, str) and precision.lower() in names:
        return lax.Precision[precision.upper()]
    if precision is None or isinstance(precision, (lax.Precision, lax.DotAlgorithmPreset)):
        return precision
    raise TypeError(
        f"`precision` must be None, a jax.lax.Precision, a jax.lax.DotAlgorithmPreset or one of "
        f"{names}; got "
        f"{_describe(precision)}. Give one value, which serves all products."
    )


def _array(name, x):
    """A JAX array, or one clear sentence: sequences and strings are not converted silently."""
    if not _is_array(x):
        raise TypeError(
            f"`{name}` must be an array; got {_describe(x)}. Convert it with `jnp.asarray`; to "
            "trace shapes alone, call through `jax.eval_shape`."
        )
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        # NumPy has arrays of objects, of text, of dates, and masked ones.
        raise TypeError(
            f"`{name}` must be an array that JAX can hold; got {type(x).__name__} of {x.dtype}. "
            "Convert it to a plain NumPy array of numbers or bools."
        ) from error


def _is_array(x) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def _is_int(x) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _describe(x) -> str:
    if _is_array(x) and not isinstance(x, np.generic):
        return f"an array of {x.dtype} with shape {tuple(x.shape)}"
    text = repr(x)
    return f"{type(x).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
