"""Dropout: the generator against published words, the mask's statistics, what attention drops."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle

import pallas_flash
from pallas_flash import dropout_mask
from pallas_flash._problem.dropout import Dropout, multiply_wide, philox, seed_of
from pallas_flash.tuning import Tile, TileSizes

# ------------------------------------------------------------------------------------------------
# The generator.

WORD, HALF = 2**32, 2**16


PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
ONES = (WORD - 1,) * 4, (WORD - 1,) * 2
ZEROS = (0,) * 4, (0,) * 2

# The known answers that the generator's authors publish, by counter and key.
KNOWN = [
    (*ZEROS, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (*ONES, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (*PI, "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def test_philox_equals_published_words():
    """The oracle's words are known answers; the package has the same words."""
    counters, keys, words = zip(*KNOWN, strict=True)
    got = np.stack(oracle.philox_4x32_7(np.transpose(counters), np.transpose(keys)), axis=1)
    assert [" ".join(f"{word:08x}" for word in x) for x in got.tolist()] == list(words)


@pytest.mark.parametrize("x64", [False, True])
def test_philox_equals_oracle(x64):
    rng = np.random.default_rng(0)
    words = rng.integers(0, WORD, (6, 50), dtype=np.uint32)
    words[:, :3] = [0, WORD - 1, 1]
    with jax.enable_x64(x64):
        counter, key = (tuple(map(jnp.asarray, x)) for x in (words[:4], words[4:]))
        got = jax.jit(lambda c, k: philox(c, k, multiply_wide))(counter, key)
    assert {x.dtype for x in got} == {np.dtype("uint32")}
    np.testing.assert_array_equal(got, oracle.philox_4x32_7(words[:4], words[4:]))


@pytest.mark.parametrize("m", [0xD2511F53, 0xCD9E8D57, 0, 1, 0xFFFF, 0x10000, WORD - 1])
def test_multiply_wide_equals_integers(m):
    ends = [0, 1, 0xFFFF, 0x10000, 0x10001, 0x7FFFFFFF, 0x80000000, WORD - 2, WORD - 1]
    x = [*ends, *np.random.default_rng(1).integers(0, WORD, 100).tolist()]
    high, low = multiply_wide(jnp.asarray(np.array(x, np.uint32)), m)
    assert high.tolist() == [n * m // WORD for n in x]
    assert low.tolist() == [n * m % WORD for n in x]


# ------------------------------------------------------------------------------------------------
# The mask.

KEYS = {
    "typed": lambda: jax.random.key(7),
    "raw": lambda: jax.random.PRNGKey(7),
    "rbg": lambda: jax.random.key(7, impl="rbg"),
    "another": lambda: jax.random.key(8),
}
SHAPE = (3, 4, 60, 70)

# A statistic of n independent draws is this many standard deviations off with p < 1e-6.
SIGMAS = 5


def kept(dropout, *at, **options):
    """Compiled: operation by operation takes many times as long."""
    return jax.jit(lambda dropout, *at: dropout.kept(*at, **options))(dropout, *at)


def masks(rate=0.3):
    return {name: np.asarray(dropout_mask(make(), SHAPE, rate)) for name, make in KEYS.items()}


def test_mask_equals_definition():
    key, rate = KEYS["typed"](), 0.3
    np.testing.assert_array_equal(dropout_mask(key, SHAPE, rate), oracle.kept(key, SHAPE, rate))


def test_first_index_multiple_of_16():
    dropout = Dropout(seed_of(KEYS["typed"]()), None, 0.3)
    b, h, q, k = (jnp.asarray(x, jnp.int32) for x in np.ogrid[:2, :2, :40, :24])
    want = np.asarray(kept(dropout, b, h, q + 48, k + 16))
    np.testing.assert_array_equal(kept(dropout, b, h, q, k, first=(48, 16)), want)
    # Any arrays that broadcast are indices: here rows are heads of one query.
    rows = jnp.array([[0], [1], [1]]), jnp.array([[50], [50], [61]])
    got = kept(dropout, 1, *rows, k[0, 0] + 16)
    np.testing.assert_array_equal(got, want[1, [0, 1, 1], [2, 2, 13]])


def test_typed_and_raw_keys_give_one_mask():
    made = masks()
    typed, raw = made.pop("typed"), made.pop("raw")
    np.testing.assert_array_equal(typed, raw)
    np.testing.assert_array_equal(typed, dropout_mask(np.asarray(KEYS["raw"]()), SHAPE, 0.3))
    for x, y in itertools.combinations([typed, *made.values()], 2):
        correlation(x, y)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("key", KEYS)
def test_mask_drops_as_many_as_the_rate(rate, key):
    mask = np.asarray(dropout_mask(KEYS[key](), SHAPE, rate))
    for axes in ((0, 1, 2, 3), (2, 3), (0, 1, 2), (0, 1, 3)):
        n = np.prod([SHAPE[axis] for axis in axes])
        # The largest of as many as there are rows is further off than one of them.
        limit = SIGMAS * np.sqrt(rate * (1 - rate) / n)
        assert np.abs(mask.mean(axes) - (1 - rate)).max() < limit


def test_larger_rate_drops_a_superset():
    key = KEYS["typed"]()
    some, more = (np.asarray(dropout_mask(key, SHAPE, rate)) for rate in (0.2, 0.4))
    assert not (more & ~some).any()


def test_rate_zero_and_empty_shape():
    key = KEYS["typed"]()
    assert dropout_mask(key, SHAPE, 0.0).all()
    assert dropout_mask(key, SHAPE, 0).dtype == bool
    assert dropout_mask(key, (0, 1, 2, 3), 0.5).shape == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("rates", "factor"),
    [
        ((1e-12, 1e-7, 0.4 / HALF), HALF / (HALF - 1)),
        ((np.nextafter(1.0, 0.0), 1 - 1e-7, 1 - 0.4 / HALF), HALF),
    ],
    ids=["least", "greatest"],
)
def test_rate_drops_some_and_keeps_some(rates, factor):
    key, shape = KEYS["typed"](), (2, 3, 300, 301)
    bits = oracle.random_bits(key, shape)
    want = bits > 0 if factor < 2 else bits == HALF - 1
    assert want.any() and not want.all()
    for rate in rates:
        np.testing.assert_array_equal(dropout_mask(key, shape, rate), want)
        assert Dropout(seed_of(key), rate=rate).factor == factor


def correlation(x, y):
    """Checks that two masks of one rate do not know of each other."""
    x, y = (z.astype(np.float64).ravel() - z.mean() for z in (x, y))
    assert abs((x * y).mean()) < SIGMAS * x.std() * y.std() / np.sqrt(x.size)


@pytest.mark.parametrize("key", ["typed", "rbg"])
@pytest.mark.parametrize("axis", [0, 1, 2, 3], ids=["example", "head", "query", "key"])
def test_neighbours_are_independent(key, axis):
    mask = np.asarray(dropout_mask(KEYS[key](), SHAPE, 0.3))
    for distance in (1, 2, 3, 8, 16, 32):
        if distance < SHAPE[axis]:
            correlation(
                mask.take(range(distance, SHAPE[axis]), axis),
                mask.take(range(SHAPE[axis] - distance), axis),
            )
    # Nor do diagonals, nor swapped indices.
    correlation(mask[:, :, 1:, 1:], mask[:, :, :-1, :-1])
    correlation(mask[:, :, 8:, 8:], mask[:, :, :-8, :-8])
    correlation(mask[:, :, 8:, :-8], mask[:, :, :-8, 8:])
    correlation(mask[:, :, :60, :60], mask[:, :, :60, :60].swapaxes(2, 3).copy()[:, :, ::-1])


@pytest.mark.parametrize("rate", [0.03, 0.5, 0.9])
@pytest.mark.parametrize("key", ["typed", "rbg"])
def test_elements_of_one_counter_are_independent(key, rate):
    shape = 2, 3, 160, 320
    mask, bits = dropout_mask(KEYS[key](), shape, rate), oracle.random_bits(KEYS[key](), shape)
    for x in (np.asarray(mask), bits):
        # The 8 elements of each counter, and of each word its halves.
        x = x.reshape(2, 3, 10, 2, 8, 20, 2, 4, 2)
        x = np.moveaxis(x, (3, 6, 8), (0, 1, 2)).reshape(8, -1)
        for one, other in itertools.combinations(x, 2):
            correlation(one, other)
        for lower, upper in x.reshape(4, 2, -1):
            # Nor do the neighbours that have two words.
            correlation(upper[:-1], lower[1:])


def test_consecutive_keys_are_independent():
    first, second = (np.asarray(dropout_mask(jax.random.key(n), SHAPE, 0.3)) for n in (0, 1))
    split = (np.asarray(dropout_mask(k, SHAPE, 0.3)) for k in jax.random.split(jax.random.key(0)))
    for x, y in itertools.combinations([first, second, *split], 2):
        correlation(x, y)


def test_mask_depends_on_index_alone():
    """Larger calls begin with smaller ones, and a shard is a part of the whole."""
    key = KEYS["typed"]()
    whole = np.asarray(dropout_mask(key, SHAPE, 0.3))
    np.testing.assert_array_equal(dropout_mask(key, (2, 3, 7, 70), 0.3), whole[:2, :3, :7])
    np.testing.assert_array_equal(dropout_mask(key, (2, 3, 60, 9), 0.3), whole[:2, :3, :, :9])
    for first in ((1, 2, 0, 0), (1, 2, 16, 32), (0, 1, 13, 7)):
        aligned = first[2] % 16 == first[3] % 16 == 0
        sizes = [n - i for n, i in zip(SHAPE, first, strict=True)]
        at = [jnp.asarray(x, jnp.int32) for x in np.ogrid[tuple(map(slice, sizes))]]
        shard = Dropout(seed_of(key), jnp.array(first), 0.3, aligned=aligned)
        rectangle = tuple(slice(i, None) for i in first)
        np.testing.assert_array_equal(kept(shard, *at), whole[rectangle])
        shared = dataclasses.replace(shard, broadcast=True)
        np.testing.assert_array_equal(kept(shared, *at)[0, 0], whole[0, 0][rectangle[2:]])


# ------------------------------------------------------------------------------------------------
# What attention drops.

B, T, S, N, K = 2, 37, 21, 4, 2
RATE = 0.4


def inputs(dtype=np.float32):
    """The output is the probabilities that are left, if the values are the identity."""
    rng = np.random.default_rng(2)
    q, k = (rng.normal(size=shape).astype(dtype) for shape in ((B, T, N, 8), (B, S, K, 8)))
    return q, k, np.broadcast_to(np.eye(S, dtype=dtype)[:, None], (B, S, K, S))


def tiles(block_q, block_kv):
    tile = Tile(block_q, block_kv)
    return TileSizes(forward=tile, dkv=tile, dq=tile)


WAYS = {
    "reference": dict(implementation="reference"),
    "xla": dict(implementation="xla"),
    "interpret": dict(implementation="interpret", config=tiles(16, 16)),
    "interpret, other tiles": dict(implementation="interpret", config=tiles(32, 32)),
}
over_ways = pytest.mark.parametrize(
    "way", cases.default(list(WAYS.values())[:3], WAYS.values()), ids=WAYS
)


def probabilities(way, key, **options):
    """The dropped probabilities [B, N, T, S]."""

    @oracle.compiled
    def call(key):
        out = pallas_flash.attention(*inputs(), dropout_key=key, **way, **options)
        return jnp.moveaxis(out, 1, 2)

    return call(key)


@over_ways
@pytest.mark.parametrize("shared", [False, True])
def test_attention_drops_what_the_mask_says(way, shared):
    key = KEYS["typed"]()
    want = dropout_mask(key, (1, 1, T, S) if shared else (B, N, T, S), RATE)
    plain = probabilities(WAYS["reference"], None)
    got = probabilities(way, key, dropout_rate=RATE, broadcast_dropout=shared)
    np.testing.assert_array_equal(got != 0, jnp.broadcast_to(want, got.shape))
    dropped = np.where(want, plain / oracle.share_kept(RATE), 0)
    np.testing.assert_allclose(got, dropped, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("rate", "numbers"), [(1e-9, 1), (0.1, 6554), (0.999, 65470)])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_kept_probabilities_are_rescaled(implementation, rate, numbers):
    """The factor is that of the rounded rate, because 1 - rate would be biased."""
    factor, as_given = HALF / (HALF - numbers), 1 / (1 - rate)
    with jax.enable_x64(True):
        qkv = inputs(np.float64)
        call = functools.partial(pallas_flash.attention, implementation=implementation)
        dropping = functools.partial(call, dropout_rate=rate, dropout_key=KEYS["typed"]())
        plain, dropped = (np.asarray(oracle.compiled(f)(*qkv)) for f in (call, dropping))
    kept = dropped != 0
    assert kept.any()
    error = np.abs(dropped[kept] / plain[kept] / factor - 1).max()
    assert error < 100 * np.finfo(np.float64).eps < abs(as_given / factor - 1) / 100


@pytest.mark.parametrize("key", ["raw", "rbg"])
def test_raw_and_rbg_keys_drop_as_the_mask_says(key):
    key = KEYS[key]()
    got = probabilities(WAYS["xla"], key, dropout_rate=RATE)
    np.testing.assert_array_equal(got != 0, dropout_mask(key, (B, N, T, S), RATE))


def test_each_key_of_a_vmap_has_its_own_mask():
    keys = jax.random.split(jax.random.key(3), 3)

    @jax.vmap
    def call(key):
        options = dict(dropout_rate=RATE, dropout_key=key, implementation="xla")
        return jnp.moveaxis(pallas_flash.attention(*inputs(), **options), 1, 2)

    want = [dropout_mask(key, (B, N, T, S), RATE) for key in keys]
    np.testing.assert_array_equal(jax.jit(call)(keys) != 0, jnp.stack(want))


def test_a_rate_of_zero_drops_nothing():
    got = probabilities(WAYS["xla"], KEYS["typed"](), dropout_rate=0.0)
    np.testing.assert_array_equal(got, probabilities(WAYS["xla"], None))
