"""Appending to pages writes the new tokens alone, and quantised pages have the error stated."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.paged_cases import dequantised

import pallas_flash
from pallas_flash.paged import append, quantize

QUANTISED = jnp.int8, jnp.float8_e4m3fn
TABLE = jnp.int32([[4, 1, 9], [0, 7, 9], [2, -1, 9]])
PAGES, SIZE, K, H, V = 8, 16, 2, 32, 24


def tokens(*shape):
    return (jax.random.normal(jax.random.key(n), (*shape, K, n)) for n in (H, V))


def caches(dtype=jnp.float32):
    return tuple(jnp.full((PAGES, SIZE, K, n), 7, dtype) for n in (H, V))


def written(old, new):
    """The places (page, row) that changed, sorted."""
    changed = (np.asarray(old) != np.asarray(new)).reshape(PAGES, SIZE, -1).any(-1)
    return [tuple(map(int, x)) for x in np.argwhere(changed)]


def test_tokens_are_written_at_their_positions():
    """Chunks of two requests, and none of the third."""
    k, v = tokens(9)
    rest = jnp.int32([18, 5, 4]), TABLE, jnp.int32([0, 6, 8, 8])
    new = append(*caches(), k, v, *rest)
    places = [(4, 12), (4, 13), (4, 14), (4, 15), (1, 0), (1, 1), (0, 3), (0, 4)]
    for x, cache, old in zip((k, v), new, caches(), strict=True):
        assert written(old, cache) == sorted(places)
        for token, place in enumerate(places):
            np.testing.assert_array_equal(cache[place], x[token])


# Lengths after three new tokens of each request, pages, and the places where these are written.
IN_PAGES = [[4, 5, 6], [0, 7, 1], [2, 3, 3]]
WITHOUT_PLACE = {
    "beyond the table": ([49, 50, 51], IN_PAGES, [(6, 14), (6, 15), (1, 15)]),
    "far beyond it": ([52, 100, 2**31 - 1], IN_PAGES, []),
    "before the first": ([1, 0, -(2**31)], IN_PAGES, [(4, 0)]),
    "in no page": ([17, 18, 35], [[4, 8, -1], [0, -1, 9], [9, 2, -9]], [(4, 14), (4, 15), (0, 15)]),
    "no table": ([0, 1, 48], [[], [], []], []),
}


@pytest.mark.parametrize("cache", [jnp.float32, *QUANTISED], ids=lambda x: jnp.dtype(x).name)
@pytest.mark.parametrize("case", WITHOUT_PLACE)
def test_tokens_without_a_place_are_dropped(case, cache):
    lengths, table, places = WITHOUT_PLACE[case]
    old, scales = caches(cache), {}
    if cache != jnp.float32:
        scales = dict.fromkeys(("key_scales", "value_scales"), jnp.full((PAGES, K, SIZE), 9.0))
    rest = jnp.int32(lengths), jnp.asarray(table, jnp.int32)
    new = jax.jit(append)(*old, *tokens(3, 3), *rest, **scales)
    for before, after in zip((*old, *scales.values()), new, strict=True):
        before, after = (np.asarray(x, float) for x in (before, after))
        if before.ndim == 3:
            before, after = before.swapaxes(1, 2), after.swapaxes(1, 2)
        assert written(before, after) == sorted(places)


@pytest.mark.parametrize("dtype", QUANTISED, ids=lambda x: jnp.dtype(x).name)
@pytest.mark.parametrize("per_head", [False, True], ids=["token", "head"])
def test_quantised_tokens_are_written(dtype, per_head):
    """They are those of `paged.quantize`, and their scales are beside them."""
    new = list(tokens(3, 1))
    cache, scales, want = caches(dtype), [], []
    for x in new:
        scale = quantize(x, dtype, per_head=per_head)[1]
        want.append(quantize(x, dtype, per_head=per_head)[0])
        scales.append(scale if per_head else jnp.full((PAGES, K, SIZE), 3.0))
    lengths = jnp.int32([17, 1, 16])
    keys, values, *after = append(
        *cache, *new, lengths, TABLE, key_scales=scales[0], value_scales=scales[1]
    )
    for x, pages, numbers, scale, before in zip(
        new, (keys, values), want, after, scales, strict=True
    ):
        for r, place in enumerate([(1, 0), (0, 0), (2, 15)]):
            np.testing.assert_array_equal(pages[place].astype(float), numbers[r, 0].astype(float))
            if not per_head:
                of_token = scale[place[0], :, place[1]]
                np.testing.assert_allclose(of_token, quantize(x, dtype)[1][r, :, 0])
        assert (np.asarray(scale) != np.asarray(before)).sum() == (0 if per_head else 3 * K)


@pytest.mark.parametrize(("dtype", "per_head"), [*itertools.product(QUANTISED, [False, True])])
def test_nan_is_kept_or_zero(dtype, per_head):
    """Int8 with a scale per head has none. A token without a place may have one."""
    new = [x.at[0].set(jnp.nan) for x in tokens(3, 1)]
    scale = jnp.ones(K) if per_head else jnp.ones((PAGES, K, SIZE))
    named = dict(key_scales=scale, value_scales=scale)
    lengths = jnp.int32([17, 1, 16])
    pages, _, scales, _ = jax.jit(append)(*caches(dtype), *new, lengths, TABLE, **named)
    got = pages[1, 0].astype(float) * (scales if per_head else scales[1, :, 0])[:, None]
    assert (got == 0).all() if per_head and dtype == jnp.int8 else jnp.isnan(got).all()
    without = append(*caches(dtype), *new, lengths.at[0].set(0), TABLE, **named)
    assert written(caches(dtype)[0].astype(float), without[0].astype(float)) == [(0, 0), (2, 15)]


@pytest.mark.parametrize("per_head", [False, True], ids=["token", "head"])
def test_error_of_int8(per_head):
    x = jax.random.normal(jax.random.key(0), (5, SIZE, K, H)) * jnp.array([1e-3, 40])[:, None]
    numbers, scales = quantize(x, jnp.int8, per_head=per_head)
    assert numbers.shape == x.shape and scales.shape == ((K,) if per_head else (5, K, SIZE))
    largest = np.abs(x).max((0, 1, 3) if per_head else 3)[..., None]
    error = np.abs(dequantised(numbers, scales) - np.asarray(x, np.float64))
    assert (error <= largest / 254 * (1 + 1e-5)).all()
    assert error.max() > largest.max() / 300


@pytest.mark.parametrize("per_head", [False, True], ids=["token", "head"])
def test_error_of_float8(per_head):
    x = jax.random.normal(jax.random.key(0), (5, SIZE, K, H)) * jnp.array([1e-3, 40])[:, None]
    numbers, scales = quantize(x, jnp.float8_e4m3fn, per_head=per_head)
    largest = np.abs(x).max((0, 1, 3) if per_head else 3)[..., None]
    error = np.abs(dequantised(numbers, scales) - np.asarray(x, np.float64))
    limit = np.maximum(np.abs(x) / 16, largest * 2.0**-18)
    assert (error <= limit * (1 + 1e-5)).all()
    assert (error / np.abs(x)).max() > 1 / 20


@pytest.mark.parametrize("dtype", QUANTISED, ids=lambda x: jnp.dtype(x).name)
def test_tiny_numbers_stay_finite(dtype):
    """A scale of 1e-37 / 448 is no normal float32, and XLA for CPUs makes it zero."""
    largest = np.float32([0, 1e-44, 1e-37, 1e-30])
    x = jnp.zeros((1, 4, K, H)).at[..., 0].set(largest[:, None])
    error = np.abs(dequantised(*quantize(x, dtype)) - np.asarray(x, np.float64))
    assert (error <= np.maximum(largest / 16, 1e-36)[:, None, None]).all()


# The error of the output over its norm, for normal keys and values with a scale per token.
OUTPUT_ERROR = {"int8": 0.012, "float8_e4m3fn": 0.045}


@pytest.mark.parametrize("dtype", QUANTISED, ids=lambda x: jnp.dtype(x).name)
def test_error_of_attention(dtype):
    keys, values = jax.random.normal(jax.random.key(0), (2, 32, SIZE, K, 64))
    q = jax.random.normal(jax.random.key(1), (1, 4, 4, 64))
    rest = jnp.int32([500]), jnp.arange(32, dtype=jnp.int32)[None]
    want = pallas_flash.paged_attention(q, keys, values, *rest, implementation="xla")
    (k, k_scales), (v, v_scales) = (quantize(x, dtype) for x in (keys, values))
    o = pallas_flash.paged_attention(
        q, k, v, *rest, key_scales=k_scales, value_scales=v_scales, implementation="xla"
    )
    error = float(jnp.linalg.norm(o - want) / jnp.linalg.norm(want))
    limit = OUTPUT_ERROR[jnp.dtype(dtype).name]
    assert limit / 4 < error < limit


def test_zeros_have_no_error():
    for dtype in QUANTISED:
        numbers, scales = quantize(jnp.zeros((2, SIZE, K, H)), dtype)
        assert not numbers.astype(float).any() and (scales == 1).all()
