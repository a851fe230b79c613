"""Turns the arguments of `attention` into one frozen `Problem`.

Every error that a user can meet is raised here, in `_problem` or in `_selection.resolve`. All
checks look at shapes, dtypes and Python values, so that errors appear while tracing.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash._arguments import other_libraries
from pallas_flash._execution.context import METHODS
from pallas_flash._execution.limits import IMPLEMENTATIONS
from pallas_flash._execution.partition import Along, check_lengths
from pallas_flash._jax.one_device import whole
from pallas_flash._problem.checks import (
    array,
    at_least,
    broadcastable,
    describe,
    flag,
    held,
    integers,
    is_array,
    is_int,
    is_number,
    share_to_drop,
)
from pallas_flash._problem.dropout import Dropout, seed_of
from pallas_flash._problem.mask_objects import Call, fitted
from pallas_flash._problem.masks import FAR, Band, Lengths, Mask, PositionBand, SegmentLeaf
from pallas_flash._problem.operands import Positions, TokenPositions
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.score_mod import fitted_score_mod
from pallas_flash._problem.scores import Scores

DTYPES = ("float16", "bfloat16", "float32", "float64")


# The arguments of `attention` that say nothing of its problem, or only what else it returns, or
# leave `tuning.tune` nothing to choose.
NOT_OF_PROBLEM = (
    "return_residual",
    "return_lse",
    "return_max_logits",
    "implementation",
    "config",
    "reproducible",
    "batch_invariant",
    "context_parallelism",
)
LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")


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
    query_positions,
    key_value_positions,
    logits_soft_cap,
    sinks,
    alibi_slopes,
    score_mod,
    dropout_rate,
    dropout_key,
    broadcast_dropout,
    precision,
    return_max_logits,
    batch_invariant,
    sequence_axis,
) -> Problem:
    """Return the problem of a call of `attention`; raise if its arguments are wrong."""
    query, key, value = array("query", query), array("key", key), array("value", value)
    _check_inputs(query, key, value)
    if query.ndim == 3:
        query, key, value = query[None], key[None], value[None]
    (batch, q_len, num_heads, head_dim), kv_len = query.shape, key.shape[1]
    scores_shape = (batch, num_heads, q_len, kv_len)
    divided, shards = _devices(sequence_axis, q_len, kv_len)
    batch_invariant = flag("batch_invariant", batch_invariant)
    query, scale, any_scale = _scale(scale, query, head_dim, known=batch_invariant)
    slopes = _per_head("alibi_slopes", alibi_slopes, num_heads, scale.dtype)
    function = fitted_score_mod(score_mod, scale.dtype)
    positions = dict(
        query_offset=query_offset,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
    )
    # Positions change a score through the slopes alone.
    sizes = batch, q_len, kv_len
    at = TokenPositions() if slopes is None else _positions(sizes, divided, **positions)
    return Problem(
        query=query,
        key=key,
        value=value,
        scale=scale,
        bias=_bias(bias, Call(scores_shape, shards=shards).pairs_shape, scale.dtype),
        sinks=_per_head("sinks", sinks, num_heads, scale.dtype),
        slopes=slopes,
        score_operands=None if function is None else function.operands,
        mask=mask_of(
            scores_shape,
            mask,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            segment_ids=segment_ids,
            **positions,
            divided=divided,
        ),
        rest_of_scores=Scores(
            offset=at.offset,
            positions=at.positions,
            shift=at.shift,
            score_mod=None if function is None else function.fn,
            soft_cap=_soft_cap(logits_soft_cap, scale.dtype),
        ),
        dropout=dropout(dropout_rate, dropout_key, broadcast_dropout),
        precision=_precision(precision),
        any_scale=any_scale,
        max_logits=flag("return_max_logits", return_max_logits),
        batch_invariant=batch_invariant,
    )


def check_implementation(asked) -> None:
    """Raise unless `asked` is None or the name of an implementation."""
    if asked is not None and not (isinstance(asked, str) and asked in IMPLEMENTATIONS):
        hint = other_libraries.hint(other_libraries.IMPLEMENTATIONS, asked)
        raise ValueError(
            f"`implementation` must be None or one of {IMPLEMENTATIONS}; got {asked!r:.60}. "
            f"Use None for the fastest{hint}."
        )


def check_choices(return_residual, return_lse, reproducible, context_parallelism) -> None:
    """Check the arguments of `attention` that leave its problem as it is."""
    _check_results(return_residual, return_lse)
    _check_reproducible(reproducible)
    _check_method(context_parallelism)


def _devices(sequence_axis, q_len, kv_len) -> tuple[Along | None, Any]:
    """Return the mesh axes that divide the sequence, and how many devices they have."""
    divided = parse_sequence_axis(sequence_axis)
    shards = _count(divided)
    if divided is not None:
        check_lengths(q_len * shards, kv_len * shards, shards, divided.names)
    return divided, shards


def mask_of(
    scores_shape,
    mask=None,
    *,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    segment_ids=None,
    query_offset: Any = 0,
    query_positions=None,
    key_value_positions=None,
    divided: Along | None = None,
) -> Mask:
    """Return the whole mask for scores [B, N, T, S] of a call, or of one shard of it."""
    batch, _, q_len, kv_len = scores_shape
    sizes, shards = (batch, q_len, kv_len), _count(divided)
    at = _positions(
        sizes,
        divided,
        query_offset=query_offset,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
    )
    leaves = []
    causal = flag("is_causal", is_causal)
    band = _band(q_len * shards, kv_len * shards, causal=causal, window=local_window_size, at=at)
    if band is not None:
        leaves.append(band)
    lengths = [
        None if x is None else integers(name, x, (batch,), "[B]")
        for name, x in zip(LENGTHS, (query_seq_lengths, key_value_seq_lengths), strict=True)
    ]
    if any(x is not None for x in lengths):
        leaves.append(Lengths(*lengths))
    if segment_ids is not None:
        leaves.append(_segments(segment_ids, batch, q_len, kv_len))
    if mask is not None:
        names = () if divided is None else divided.names
        leaves += fitted(mask, Call(scores_shape, causal, at, shards, names))
    return Mask(tuple(leaves))


def parse_sequence_axis(sequence_axis) -> Along | None:
    """Return how Manual mesh axes divide the sequence; None if the call names none."""
    if sequence_axis is None:
        return None
    names = sequence_axis if isinstance(sequence_axis, (tuple, list)) else (sequence_axis,)
    mesh = jax.sharding.get_abstract_mesh()
    manual = () if mesh.empty else mesh.manual_axes
    # Names may have any type, hashable or not.
    if not names or not all(name in manual and names.count(name) == 1 for name in names):
        there = f"there are {tuple(manual)}" if manual else "the call is in none"
        raise ValueError(
            "`sequence_axis` must name mesh axes, each once, that a `jax.shard_map` around the "
            f"call has made manual; got {sequence_axis!r}, and {there}. Drop it outside of a "
            "`shard_map`: how arrays are sharded is seen there."
        )
    # Mesh axes of one device divide nothing.
    names = tuple(name for name in names if lax.axis_size(name) > 1)
    return Along(names) if names else None


def _count(divided: Along | None) -> int:
    """Return the number of shards of the sequence."""
    return 1 if divided is None else lax.axis_size(divided.names)


def _check_method(method) -> None:
    """Check that `context_parallelism` is None or the name of a method."""
    if method is not None and not (isinstance(method, str) and method in METHODS):
        raise ValueError(
            f"`context_parallelism` must be None or one of {METHODS}; got {describe(method)}. Use "
            "None for the one that a rule picks"
            f"{other_libraries.hint(other_libraries.METHODS, method)}."
        )


def _check_results(return_residual, return_lse) -> None:
    """Check that a call asks for at most one of the two statistics."""
    flags = {"return_residual": return_residual, "return_lse": return_lse}
    if all([flag(name, value) for name, value in flags.items()]):
        raise ValueError(
            "`return_residual` and `return_lse` must not both be True; got both. Keep "
            "`return_lse`: it is float32 and has a gradient, `return_residual` is its rounded "
            "constant copy."
        )


def _check_reproducible(reproducible) -> None:
    """Check that `reproducible` is None or a Python bool, because it decides what is compiled."""
    if reproducible is not None and not isinstance(reproducible, (bool, np.bool_)):
        raise TypeError(
            f"`reproducible` must be None, True or False; got {describe(reproducible)}. Use None "
            "to follow XLA's flags."
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
        fix = "Reshape its leading axes into one batch axis."
        fix = fix if query.ndim > 4 else "Add each missing axis with size 1."
        raise ValueError(
            f"`query` must have shape [B, T, N, H] or [T, N, H]; got rank {query.ndim} "
            f"(query.shape={query.shape}). {fix}"
        )
    for name in ("key", "value"):
        x = named[name]
        if x.dtype != query.dtype:
            raise TypeError(
                f"`{name}` must have the dtype of `query`; got {x.dtype} and {query.dtype}. Cast "
                "one with `.astype`."
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
        fix = "Broadcast the smaller batch with `jnp.broadcast_to`."
        equal("key", 0, "query", "batch size", fix)
        equal("value", 0, "query", "batch size", fix)
    equal("value", -3, "key", "length", "Give each key one value.")
    equal("value", -2, "key", "number of heads", "Give each key head one value head.")
    equal("key", -1, "query", "head dim", "Give both one head dim; only `value` may have another.")
    for name, x in named.items():
        if not all(isinstance(n, int) for n in x.shape[-2:]):
            raise NotImplementedError(
                f"`{name}` must have a known number of heads and a known head dim; got "
                f"{x.shape[-2]} heads of size {x.shape[-1]} ({name}.shape={x.shape}). Give both "
                "numbers: the batch and the lengths alone may be symbolic."
            )
        if 0 in x.shape[-2:]:
            raise ValueError(
                f"`{name}` must have at least one head and a head dim of at least 1; got "
                f"{x.shape[-2]} heads of size {x.shape[-1]} ({name}.shape={x.shape}). Check the "
                "order of its axes: [B, T, N, H]."
            )
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"`query` must have a multiple of the heads of `key`; got {query.shape[-2]} query "
            f"heads and {key.shape[-2]} key/value heads ({shapes}). Repeat or drop heads until "
            "they divide."
        )


def _scale(scale: Any, query, head_dim, *, known: bool):
    """Return `query` with the sign of the scale, the scale's size, and whether it may exceed 1.

    If it must be `known`, an array is refused: other kernels serve it than a number.

    The kernels take the maximum of the raw products and scale only the maximum, which is right for
    a scale that is not negative. Moving the sign to the queries is exact. It happens outside the
    custom derivative, so that both keep their gradients.
    """
    dtype, scale = np.promote_types(query.dtype, np.float32), held(scale)
    if scale is None:
        scale = 1 / math.sqrt(head_dim)
    if is_number(scale):
        # An int stays an int, because it may be too large for a float. NaN fails the comparison.
        number = scale if isinstance(scale, int) else float(scale)
        if not abs(number) <= float(jnp.finfo(dtype).max):
            raise ValueError(
                f"`scale` must be finite in {dtype.name}; got {describe(scale)}. Use None for "
                "1 / sqrt(head dim)."
            )
        size = abs(float(number))
        return (-query if number < 0 else query), jnp.asarray(size, dtype), size > 1
    if known:
        raise ValueError(
            "`scale` must be None or a number with `batch_invariant=True`; got "
            f"{describe(scale)}. Multiply `query` by an array, and pass `scale=1.0`."
        )
    if not is_array(scale) or scale.ndim or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(
            f"`scale` must be a number or a floating-point scalar array; got {describe(scale)}. "
            "Multiply `query` by a scale per head or position and pass `scale=1.0`."
        )
    scale = jnp.asarray(scale, dtype)
    return jnp.where(scale < 0, -query, query), jnp.where(scale < 0, -scale, scale), True


def _bias(bias, scores_shape, dtype):
    if bias is None:
        return None
    bias = array("bias", bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(
            f"`bias` must be floating point; got {bias.dtype}. Pass a boolean array that says who "
            "may attend as `mask`."
        )
    if bias.dtype.itemsize > dtype.itemsize:
        # Scores are computed in `dtype`; the gradient has the dtype of the given bias.
        bias = bias.astype(dtype)
    return broadcastable("bias", bias, scores_shape)


def _per_head(name, x, num_heads, dtype):
    if x is None:
        return None
    x = array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"`{name}` must be floating point; got {x.dtype}. Cast it with `.astype(jnp.float32)`."
        )
    if x.shape != (num_heads,):
        raise ValueError(
            f"`{name}` must have shape [N] = {(num_heads,)}; got {x.shape}. Give one number for "
            "each query head."
        )
    return x.astype(dtype)


def _soft_cap(cap, dtype):
    if cap is None:
        return None
    if not is_number(cap):
        raise TypeError(
            f"`logits_soft_cap` must be None or a number; got {describe(cap)}. Write a `score_mod` "
            "for a cap that is traced: this one is compiled in."
        )
    limits = jnp.finfo(dtype)
    # NaN fails the comparison.
    if not float(limits.tiny) <= cap <= float(limits.max):
        raise ValueError(
            f"`logits_soft_cap` must be positive and finite in {dtype.name}; got {describe(cap)}. "
            "Use None for no cap."
        )
    return float(cap)


def dropout(rate, key, broadcast) -> Dropout | None:
    """Return the dropout of a call of `attention`; None where nothing is dropped."""
    broadcast = flag("broadcast_dropout", broadcast)
    rate = share_to_drop("dropout_rate", rate)
    # The key is checked even where nothing is dropped, as in evaluation.
    seed = None if key is None else _seed("dropout_key", key)
    if rate == 0:
        return None
    if seed is None:
        raise ValueError(
            f"`dropout_key` must be given with a `dropout_rate`; got None and {rate}. Pass a "
            "jax.random.key, a new one for each call, or `dropout_rate=0.0` for no dropout."
        )
    return Dropout(seed, None, rate, broadcast)


def dropout_mask_arguments(key, shape, rate) -> tuple[tuple[int, ...], Dropout | None]:
    """Return the shape and the dropout for the arguments of `pallas_flash.dropout_mask`."""
    rate, seed = share_to_drop("dropout_rate", rate), _seed("dropout_key", key)
    if not isinstance(shape, (tuple, list)) or len(shape) != 4:
        raise TypeError(
            f"`shape` must be a tuple of four ints, [B, N, T, S]; got {describe(shape)}. Give each "
            "size, 1 where it is not needed."
        )
    shape = tuple(at_least(0, f"shape[{axis}]", n) for axis, n in enumerate(shape))
    return shape, None if rate == 0 else Dropout(seed, None, rate)


def _seed(name, key):
    """Return uint32 [2] from a `jax.random` key."""
    key = held(key)
    if not is_array(key):
        raise TypeError(
            f"`{name}` must be a jax.random key; got {describe(key)}. Pass `jax.random.key(0)`, or "
            "one split from it."
        )
    try:
        # `seed_of` raises for anything but one key.
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return seed_of(key if typed else jax.random.wrap_key_data(whole(jnp.asarray(key))))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` must be one jax.random key; got {describe(key)}. Pass "
            "`jax.random.key(0)`, or use `jax.vmap` over several."
        ) from error


def _positions(
    sizes, divided: Along | None, *, query_offset, query_positions, key_value_positions
) -> TokenPositions:
    """Return the positions of tokens; `sizes` are B, T and S."""
    batch, q_len, kv_len = sizes
    shift, offset = _offset(query_offset, batch)
    if query_positions is None and key_value_positions is None:
        return TokenPositions(shift, offset)
    if query_positions is not None and (shift or offset is not None):
        raise ValueError(
            "`query_offset` must be 0 with `query_positions`, which tell the same of each query; "
            f"got {describe(query_offset)}. Add it to the positions."
        )

    def positions(name, x, length, letters, first):
        if x is None:
            shard = 0 if divided is None else lax.axis_index(divided.names)
            x = lax.iota(jnp.int32, length)[None] + (first + length * shard)
        else:
            x = integers(name, x, (batch, length), letters, shared=True)
        # The limits keep differences of positions from wrapping.
        return jnp.clip(x, -FAR, FAR - 1)

    first = shift if offset is None else offset[:, None]
    query = positions("query_positions", query_positions, q_len, "[B, T]", first)
    if key_value_positions is query_positions and q_len == kv_len:
        # Queries and keys are known to be the same tokens, so that each token sees itself.
        return TokenPositions(positions=Positions(query))
    key_value = positions("key_value_positions", key_value_positions, kv_len, "[B, S]", 0)
    return TokenPositions(positions=Positions(query, key_value))


def _band(q_len, kv_len, *, causal, window, at: TokenPositions) -> Band | PositionBand | None:
    left, right = window_sides(window)
    if causal:
        right = 0 if right is None else min(right, 0)
    low, high = (None if left is None else -left), right
    if at.offset is None and at.positions is None:
        # A known offset is folded into the band, and a bound that excludes no pair is dropped.
        low, high = (None if side is None else side + at.shift for side in (low, high))
        band = Band(low, high).trimmed(q_len, kv_len)
        low, high = band.low, band.high
    if low is None and high is None:
        return None
    if at.positions is not None:
        return PositionBand(at.positions, low, high)
    return Band(low, high, at.offset)


def _offset(offset, batch):
    """Return `query_offset` as an int and None, or as 0 and int32 [B]."""
    offset = held(offset)
    if is_int(offset):
        return max(-FAR, min(FAR, int(offset))), None
    if not is_array(offset):
        raise TypeError(
            "`query_offset` must be an int, an int32 scalar or int32 [B]; got "
            f"{describe(offset)}. Use 0 for queries and keys that start together."
        )
    if offset.ndim == 0:
        # One traced number for the batch, such as the fill of a cache.
        offset = jnp.broadcast_to(array("query_offset", offset), (batch,))
    return 0, jnp.clip(integers("query_offset", offset, (batch,), "[B]"), -FAR, FAR)


def window_sides(window) -> tuple[int | None, int | None]:
    """Return (left, right), None where that side is unbounded."""
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2 or not all(side is None or is_int(side) for side in sides):
        raise TypeError(
            "`local_window_size` must be None, an int or a pair (left, right) of these; got "
            f"{describe(window)}. Pass a size that is traced or differs by example as `mask`."
        )
    left, right = (None if side is None else min(int(side), FAR) for side in sides)
    if any(side is not None and side < 0 for side in (left, right)):
        raise ValueError(
            f"`local_window_size` must not be negative; got {window}. Use None for no limit; "
            "(0, 0) sees only the query's own position."
        )
    return left, right


def _segments(segment_ids, batch, q_len, kv_len) -> SegmentLeaf:
    if isinstance(segment_ids, (tuple, list)):
        if len(segment_ids) != 2:
            raise ValueError(
                "`segment_ids` must be one array or a (query, key_value) pair; got "
                f"{len(segment_ids)} items. Pass one [B, T] array when queries and keys are the "
                "same tokens."
            )
        query, key_value = segment_ids
    else:
        segment_ids = array("segment_ids", segment_ids)
        if q_len != kv_len:
            raise ValueError(
                "`segment_ids` must be a (query, key_value) pair when T and S differ; got one "
                f"array with T={q_len} and S={kv_len}. Pass ([B, T], [B, S])."
            )
        return SegmentLeaf(integers("segment_ids", segment_ids, (batch, q_len), "[B, T]"))
    return SegmentLeaf(
        integers("segment_ids", query, (batch, q_len), "[B, T]"),
        integers("segment_ids", key_value, (batch, kv_len), "[B, S]"),
    )


def _precision(precision):
    if precision is None:
        # The default is read here for all passes, because a gradient may be taken where another
        # default holds. (JAX defines its options at run time.)
        default = jax.config.jax_default_matmul_precision or "default"  # pyright: ignore
        return lax.DotAlgorithmPreset.__members__.get(default) or lax.Precision(default)
    names = [p.name.lower() for p in lax.Precision]
    if isinstance(precision, str) and precision.lower() in names:
        return lax.Precision[precision.upper()]
    if isinstance(precision, (lax.Precision, lax.DotAlgorithmPreset)):
        return precision
    raise TypeError(
        "`precision` must be None, a jax.lax.Precision, a jax.lax.DotAlgorithmPreset or one of "
        f"{names}; got {describe(precision)}. Give one value, which serves all products."
    )
