"""Unusual calls that are served, and agree with the definition in float64 NumPy."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.calls import i32, inputs, normal, numbers

import pallas_flash
from pallas_flash import ScoreMod
from pallas_flash._arguments.attention import _band, _offset
from pallas_flash._problem.operands import TokenPositions
from pallas_flash.masks import BlockMask, PrefixLM, Segments


def cast(dtype):
    return {name: x.astype(dtype) for name, x in numbers().items()}


def first(count):
    """The first `count` keys or values of `numbers`."""
    return {name: numbers()[name][:, :count] for name in ("key", "value")}


# Unusual calls that are served; each of them meets a way to go wrong after the checks.
SERVED = {
    "NumPy arrays": lambda: {},
    "NumPy float64, which JAX reads as float32": lambda: cast(np.float64),
    "NumPy bfloat16": lambda: cast(ml_dtypes.bfloat16),
    "weak types": lambda: dict.fromkeys(
        ("query", "key", "value"), jnp.broadcast_to(jnp.asarray(1.0), (2, 5, 6, 8))
    ),
    "no batch axis": lambda: {name: x[0] for name, x in numbers().items()},
    "no examples": lambda: {name: x[:0] for name, x in numbers().items()},
    "no queries": lambda: {"query": numbers()["query"][:, :0]},
    "no keys": lambda: {**first(0), "mask": np.ones((5, 0), bool)},
    "one head": lambda: {name: x[:, :, :1] for name, x in numbers().items()},
    "scalar bias": lambda: {"bias": jnp.array(3.0)},
    "bias in another dtype": lambda: {"bias": normal(3, 6, 1, 7).astype(np.float16)},
    "bias in float64": lambda: {"bias": normal(3, 5, 7).astype(np.float64)},
    "scalar mask": lambda: {"mask": np.True_},
    "mask of nothing": lambda: {"mask": np.zeros((2, 1, 5, 1), bool)},
    "NumPy bool": lambda: {"is_causal": np.True_},
    "key lengths": lambda: {"key_value_seq_lengths": np.array([3, 7], np.int32)},
    "query lengths": lambda: {"query_seq_lengths": np.array([3, 5], np.int32)},
    "int64 lengths, which JAX reads as int32": lambda: {"key_value_seq_lengths": np.array([0, 4])},
    "lengths out of range": lambda: {"key_value_seq_lengths": np.array([-9, 99], np.int32)},
    "lengths at the ends of int32": lambda: {
        "query_seq_lengths": np.array([-(2**31), 2**31 - 1], np.int32)
    },
    "length of an unbatched call": lambda: {
        **{name: x[0] for name, x in numbers().items()},
        "key_value_seq_lengths": np.array([3], np.int32),
    },
    "window": lambda: {"local_window_size": 2},
    "window of NumPy integers": lambda: {"local_window_size": (np.int64(1), np.int32(0))},
    "window as a list": lambda: {"local_window_size": [1, 2]},
    "window open to the left": lambda: {"local_window_size": (None, 1)},
    "window open to the right": lambda: {"local_window_size": (1, None)},
    "window open to both": lambda: {"local_window_size": (None, None)},
    "window past int32": lambda: {"local_window_size": 2**40, "query_offset": np.array([2, -1])},
    "NumPy offset": lambda: {"query_offset": np.int64(2), "is_causal": True},
    "offset past int32": lambda: {"query_offset": 2**40, "local_window_size": 3},
    "negative offset past int32": lambda: {"query_offset": -(2**40), "is_causal": True},
    "offsets": lambda: {"query_offset": np.array([2, -3], np.int32), "is_causal": True},
    "one offset": lambda: {"query_offset": jnp.int32(-1), "is_causal": True},
    "positions of queries": lambda: {
        "query_positions": np.array([[4, 0, 3, 1, 2]], np.int32),
        "is_causal": True,
    },
    "positions of keys, and an offset": lambda: {
        "key_value_positions": np.array([[6, 3, 4, 0, 1, 2, 5]] * 2, np.int32),
        "query_offset": 1,
        "is_causal": True,
    },
    "positions of keys, and offsets": lambda: {
        "key_value_positions": np.array([[6, 3, 4, 0, 1, 2, 5]], np.int32),
        "query_offset": np.array([2, -1], np.int32),
        "local_window_size": 2,
    },
    "positions at the ends of int32": lambda: {
        "query_positions": np.array([[-(2**31), 2**31 - 1, 0, 1, 2]], np.int32),
        "key_value_positions": np.array([[2**31 - 1, -(2**31), 0, 1, 2, 3, 4]], np.int32),
        "is_causal": True,
    },
    "positions that nothing asks for": lambda: {"query_positions": i32(1, 5)},
    "ids as a list of two arrays": lambda: {
        "segment_ids": [np.arange(n, dtype=np.int32).reshape(2, n // 2) // 3 for n in (10, 14)]
    },
    "one array of ids": lambda: {**first(5), "segment_ids": np.arange(10).reshape(2, 5) // 3},
    "scale 0": lambda: {"scale": 0.0},
    "negative scale": lambda: {"scale": -0.5},
    "NumPy scale": lambda: {"scale": np.float64(0.3)},
    "NumPy scale in float16": lambda: {"scale": np.float16(-0.3)},
    "integer scale": lambda: {"scale": 2},
    "negative scale as an array": lambda: {"scale": jnp.float32(-0.5)},
    "scale in bfloat16": lambda: {"scale": jnp.bfloat16(0.3)},
    "soft cap of an int": lambda: {"logits_soft_cap": 50},
    "sinks in float16": lambda: {"sinks": np.array([0, 1, -1, 9, -9, 2], np.float16)},
    "a key where nothing is dropped": lambda: {"dropout_key": jax.random.key(0)},
    "a list of no operands": lambda: {"score_mod": ScoreMod(lambda s, *at: s, [])},
    "a mask of Segments": lambda: {
        "mask": Segments(*(np.arange(n, dtype=np.int32).reshape(2, -1) // 3 for n in (10, 14)))
    },
    "a BlockMask of NumPy integers": lambda: {
        "mask": BlockMask(np.array([[[[True, False]]]]), np.int64(5), np.int32(4))
    },
    "a prefix beyond the keys": lambda: {"mask": PrefixLM(np.array([99, -3], np.int32))},
    "precision by name": lambda: {"precision": "HIGHEST"},
    "precision of JAX": lambda: {"precision": jax.lax.Precision.HIGH},
    "more queries than a tile": lambda: {"query": normal(3, 2, 257, 6, 8)},
    "more keys than a tile": lambda: {
        "key": normal(3, 2, 257, 3, 8),
        "value": normal(4, 2, 257, 3, 4),
    },
}


def sees(q, k, *, causal, window, offset):
    """The meaning of `is_causal`, `local_window_size` and `query_offset`."""
    position = q + offset
    left, right = window
    return (
        (not causal or k <= position)
        and (left is None or k >= position - left)
        and (right is None or k <= position + right)
    )


def spelt_out(mask, q_len, kv_len):
    """A mask object as an array."""
    q, k = np.ogrid[:q_len, :kv_len]
    match mask:
        case PrefixLM(lengths):
            return (k <= q) | (k < lengths[:, None, None, None])
        case Segments(query, key_value):
            return (query[:, :, None] == key_value[:, None, :])[:, None]
        case BlockMask(some, block_q, block_kv):
            return some[:, :, q // int(block_q), k // int(block_kv)]
        case _:
            return np.asarray(mask)


def dense(
    query, key, value, bias=0, mask=True, *, scale=None, is_causal=False, query_seq_lengths=None,
    key_value_seq_lengths=None, local_window_size=None, segment_ids=None, query_offset=0,
    query_positions=None, key_value_positions=None, precision=None, logits_soft_cap=None,
    sinks=None, dropout_key=None, score_mod=None,
):  # fmt: skip
    """The output and the LSE by the docstring of `attention`, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    if query.ndim == 3:
        query, key, value = query[None], key[None], value[None]
    batch, q_len, heads, head_dim = query.shape
    kv_len, groups = key.shape[1], heads // key.shape[2]
    key, value = np.repeat(key, groups, axis=2), np.repeat(value, groups, axis=2)
    visible = np.ones((batch, heads, q_len, kv_len), bool) & spelt_out(mask, q_len, kv_len)
    window = local_window_size
    case = {
        "causal": is_causal,
        "window": window if isinstance(window, (tuple, list)) else (window, window),
    }
    where = [np.arange(q_len) + np.reshape(query_offset, (-1, 1)), np.arange(kv_len)[None]]
    for side, x in enumerate((query_positions, key_value_positions)):
        where[side] = where[side] if x is None else np.asarray(x, np.int64)
    q_pos, k_pos = (np.broadcast_to(x, (batch, x.shape[1])).tolist() for x in where)
    query_seq_lengths = [q_len] * batch if query_seq_lengths is None else query_seq_lengths
    key_lengths = [kv_len] * batch if key_value_seq_lengths is None else key_value_seq_lengths
    ids = segment_ids if isinstance(segment_ids, list) else [segment_ids] * 2
    for b, i, j in np.ndindex(batch, q_len, kv_len):
        visible[b, :, i, j] &= (
            sees(q_pos[b][i], k_pos[b][j], **case, offset=0)
            and i < query_seq_lengths[b]
            and j < key_lengths[b]
            and (segment_ids is None or bool(ids[0][b, i] == ids[1][b, j]))
        )
    scale = 1 / np.sqrt(head_dim) if scale is None else float(scale)
    s = scale * np.einsum("btnh,bsnh->bnts", query, key) + np.asarray(bias, np.float64)
    if logits_soft_cap is not None:
        s = logits_soft_cap * np.tanh(s / logits_soft_cap)
    weight = np.where(visible, np.exp(s), 0)
    total = weight.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks.astype(np.float64))[:, None, None] * (total > 0)
    o = np.einsum("bnts,bsnv->btnv", weight / np.where(total > 0, total, 1), value)
    with np.errstate(divide="ignore"):
        return o, np.log(total[..., 0]).swapaxes(1, 2)


@pytest.mark.parametrize("arguments", SERVED.values(), ids=SERVED)
def test_unusual_calls_equal_definition(arguments):
    arguments = numbers() | arguments()
    call = functools.partial(pallas_flash.attention, implementation="xla", return_lse=True)
    o, lse = jax.jit(functools.partial(call, **arguments))()
    wanted, wanted_lse = dense(**arguments)
    dtype = jax.dtypes.canonicalize_dtype(arguments["query"].dtype)
    assert o.dtype == dtype
    tolerance = 16 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(o, np.float32), wanted.reshape(o.shape), rtol=0, atol=tolerance
    )
    np.testing.assert_allclose(lse, wanted_lse.reshape(lse.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 4), (4, 1), (3, 5), (5, 3), (4, 4)])
def test_positions_become_a_band(q_len, kv_len, causal):
    sides = (None, 0, 1, 2, 4, 2**40)
    offsets = np.arange(-6, 7, dtype=np.int32)
    b, q, k = np.ogrid[: len(offsets), :q_len, :kv_len]
    for window in itertools.product(sides, sides):
        case = {"causal": causal, "window": window}

        def seen(offset, case=case):
            every = itertools.product(range(q_len), range(kv_len))
            pairs = [sees(q, k, **case, offset=offset) for q, k in every]
            return np.reshape(pairs, (q_len, kv_len))

        for offset in (*range(-6, 7), -(2**40), 2**40):
            shift, _ = _offset(offset, 1)
            band = _band(q_len, kv_len, **case, at=TokenPositions(shift))
            # A band that excludes no pair is no mask at all.
            assert (band is None) == seen(offset).all()
            if band is not None:
                allowed = np.broadcast_to(band.allowed(0, 0, q[0], k[0]), (q_len, kv_len))
                np.testing.assert_array_equal(allowed, seen(offset))
        band = _band(q_len, kv_len, **case, at=TokenPositions(0, offsets))
        if band is not None:
            wanted = np.stack([seen(offset) for offset in offsets.tolist()])
            band = dataclasses.replace(band, offset=np.asarray(band.offset))
            np.testing.assert_array_equal(band.allowed(b, 0, q, k), wanted)
        else:
            assert not causal
            assert window == (None, None)


@pytest.mark.parametrize("implementation", ["interpret", "xla", "reference"])
def test_offsets_at_the_ends_of_int32(implementation):
    """As arrays they count as far off as ints do, and no sum of positions wraps."""
    arrays = inputs()

    @jax.jit
    def call(offset):
        options = dict(is_causal=True, local_window_size=(None, 4), return_lse=True)
        return pallas_flash.attention(
            **arrays, **options, query_offset=offset, implementation=implementation
        )

    for offset in (2**31 - 1, -(2**31)):
        o, lse = call(jnp.full(2, offset, jnp.int32))
        definition = functools.partial(
            pallas_flash.attention, query_offset=offset, is_causal=True, return_lse=True,
            implementation="reference",
        )  # fmt: skip
        want = jax.jit(definition)(**arrays)
        assert np.isneginf(lse).all() == (offset < 0)
        for x, y in zip((o, lse), want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_shapes_alone_are_traced_with_eval_shape():
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs().items()}
    assert jax.eval_shape(pallas_flash.attention, **shapes).shape == (2, 5, 6, 4)
