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
from pallas_flash._dropout import Dropout, multiply_wide, philox, seed_of
from pallas_flash.tuning import Tile, TileSizes

# ------------------------------------------------------------------------------------------------
# The generator.

WORD, HALF = 2**32, 2**16


def philox_of_ints(counter, key, rounds):
    """Philox-4x32 in Python's integers, from its equations."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 // WORD ^ c[1] ^ k[0], p1 % WORD, p0 // WORD ^ c[3] ^ k[1], p0 % WORD]
        k = [(k[0] + 0x9E3779B9) % WORD, (k[1] + 0xBB67AE85) % WORD]
    return c


PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
ONES = (WORD - 1,) * 4, (WORD - 1,) * 2
ZEROS = (0,) * 4, (0,) * 2

# The known answers that the generator's authors publish, by counter, key and rounds.
KNOWN = [
    (*ZEROS, 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (*ONES, 7, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (*PI, 7, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (*ZEROS, 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (*ONES, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (*PI, 10, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "rounds", "words"), KNOWN)
def test_philox_equals_published_integers(counter, key, rounds, words):
    got = philox_of_ints(counter, key, rounds)
    assert " ".join(f"{word:08x}" for word in got) == words


@pytest.mark.parametrize("x64", [False, True])
def test_philox_of_arrays_equals_integers(x64):
    rng = np.random.default_rng(0)
    words = rng.integers(0, WORD, (6, 50), dtype=np.uint32)
    words[:, :3] = [0, WORD - 1, 1]
    with jax.enable_x64(x64):
        c0, c1, c2, c3, k0, k1 = map(jnp.asarray, words)
        got = jax.jit(lambda c, k: philox(c, k, multiply_wide))((c0, c1, c2, c3), (k0, k1))
    assert {x.dtype for x in got} == {np.dtype("uint32")}
    want = [philox_of_ints(x[:4], x[4:], 7) for x in words.T.tolist()]
    np.testing.assert_array_equal(np.stack(got, axis=1), np.array(want, np.uint32))


@pytest.mark.parametrize("m", [0xD2511F53, 0xCD9E8D57, 0, 1, 0xFFFF, 0x10000, WORD - 1])
def test_multiply_wide(m):
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
    mask, seed = np.asarray(dropout_mask(key, SHAPE, rate)), seed_of(key).tolist()
    np.testing.assert_array_equal(mask, oracle.kept(key, SHAPE, rate))
    # In Python's integers: the elements that share the counter (h, 33, b, 18).
    for b, h, lower, right, odd in np.ndindex(3, 4, 2, 2, 2):
        words = philox_of_ints((h, 33, b, 18), seed, 7)
        bits = words[2 * lower + right] >> 16 * odd & HALF - 1
        element = mask[b, h, 33 + 8 * lower, 18 + 8 * right + odd]
        assert element == (bits >= round(rate * HALF))


def test_first_index_multiple_of_16():
    dropout = Dropout(seed_of(KEYS["typed"]()), None, 0.3)
    b, h, q, k = (jnp.asarray(x, jnp.int32) for x in np.ogrid[:2, :2, :40, :24])
    want = np.asarray(kept(dropout, b, h, q + 48, k + 16))
    np.testing.assert_array_equal(kept(dropout, b, h, q, k, first=(48, 16)), want)
    # Any arrays that broadcast are indices: here rows are heads of one query.
    rows = jnp.array([[0], [1], [1]]), jnp.array([[50], [50], [61]])
    got = kept(dropout, 1, *rows, k[0, 0] + 16)
    np.testing.assert_array_equal(got, want[1, [0, 1, 1], [2, 2, 13]])


def test_typed_and_raw_keys():
    made = masks()
    typed, raw = made.pop("typed"), made.pop("raw")
    np.testing.assert_array_equal(typed, raw)
    np.testing.assert_array_equal(typed, dropout_mask(np.asarray(KEYS["raw"]()), SHAPE, 0.3))
    for x, y in itertools.combinations([typed, *made.values()], 2):
        correlation(x, y)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("key", KEYS)
def test_rate(rate, key):
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


def test_rate_limits():
    key = KEYS["typed"]()
    assert dropout_mask(key, SHAPE, 0.0).all()
    assert dropout_mask(key, SHAPE, 0).dtype == bool
    assert dropout_mask(key, (0, 1, 2, 3), 0.5).shape == (0, 1, 2, 3)


@pytest.mark.parametrize("rate", [1e-12, 1e-7, 0.4 / HALF])
def test_least_rate_drops_one_in_65536(rate):
    key, shape = KEYS["typed"](), (2, 3, 300, 301)
    dropped = ~np.asarray(dropout_mask(key, shape, rate))
    assert dropped.any()
    np.testing.assert_array_equal(dropped, oracle.random_bits(key, shape) == 0)
    assert Dropout(seed_of(key), rate=rate).factor == HALF / (HALF - 1)


@pytest.mark.parametrize("rate", [np.nextafter(1.0, 0.0), 1 - 1e-7, 1 - 0.4 / HALF])
def test_greatest_rate_keeps_one_in_65536(rate):
    key, shape = KEYS["typed"](), (2, 3, 300, 301)
    mask = np.asarray(dropout_mask(key, shape, rate))
    assert mask.any()
    np.testing.assert_array_equal(mask, oracle.random_bits(key, shape) == HALF - 1)
    assert Dropout(seed_of(key), rate=rate).factor == HALF


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


@functools.cache
def inputs(dtype=jnp.float32, value_dim=S):
    rng = np.random.default_rng(2)
    shapes = (B, T, N, 8), (B, S, K, 8), (B, S, K, value_dim), (B, T, N, value_dim)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def tiles(block_q, block_kv):
    tile = Tile(block_q, block_kv)
    return TileSizes(forward=tile, dkv=tile, dq=tile)


WAYS = {
    "reference": dict(implementation="reference"),
    "xla": dict(implementation="xla"),
    "interpret": dict(implementation="interpret", tile_sizes=tiles(16, 16)),
    "interpret, other tiles": dict(implementation="interpret", tile_sizes=tiles(32, 32)),
}
over_ways = pytest.mark.parametrize(
    "way", cases.default(list(WAYS.values())[:3], WAYS.values()), ids=WAYS
)


def probabilities(way, key, **options):
    """The dropped probabilities [B, N, T, S]: the output, where values are the identity."""
    q, k, *_ = inputs()
    v = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, K, S))

    @oracle.compiled
    def call(key):
        out = pallas_flash.attention(q, k, v, dropout_key=key, **way, **options)
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
        q, k = (jnp.asarray(np.asarray(x), jnp.float64) for x in inputs()[:2])
        v = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, K, S))
        call = functools.partial(pallas_flash.attention, implementation=implementation)
        dropping = functools.partial(call, dropout_rate=rate, dropout_key=KEYS["typed"]())
        plain, dropped = (np.asarray(oracle.compiled(f)(q, k, v)) for f in (call, dropping))
    kept = dropped != 0
    assert kept.any()
    error = np.abs(dropped[kept] / plain[kept] / factor - 1).max()
    assert error < 100 * np.finfo(np.float64).eps < abs(as_given / factor - 1) / 100


def test_factor_is_finite_at_greatest_rate():
    """None of these is kept: the output and the gradients are zeros."""
    rate = float(np.nextafter(1.0, 0.0))
    *qkv, do = inputs(value_dim=5)
    options = dict(dropout_rate=rate, dropout_key=KEYS["typed"]())
    for way in (WAYS["reference"], WAYS["xla"]):

        def both(q, k, v, do, way=way):
            call = functools.partial(pallas_flash.attention, **options, **way)
            out, pull = jax.vjp(call, q, k, v)
            return out, *pull(do)

        for x in jax.jit(both)(*qkv, do):
            np.testing.assert_array_equal(x, 0)


@pytest.mark.parametrize("key", ["raw", "rbg"])
def test_any_kind_of_key(key):
    key = KEYS[key]()
    got = probabilities(WAYS["xla"], key, dropout_rate=RATE)
    np.testing.assert_array_equal(got != 0, dropout_mask(key, (B, N, T, S), RATE))


def test_each_key_of_a_vmap_has_its_own_mask():
    q, k, *_ = inputs()
    v = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, K, S))
    keys = jax.random.split(jax.random.key(3), 3)

    @jax.vmap
    def call(key):
        options = dict(dropout_rate=RATE, dropout_key=key, implementation="xla")
        return jnp.moveaxis(pallas_flash.attention(q, k, v, **options), 1, 2)

    want = [dropout_mask(key, (B, N, T, S), RATE) for key in keys]
    np.testing.assert_array_equal(jax.jit(call)(keys) != 0, jnp.stack(want))


def test_a_rate_of_zero_drops_nothing():
    got = probabilities(WAYS["xla"], KEYS["typed"](), dropout_rate=0.0)
    np.testing.assert_array_equal(got, probabilities(WAYS["xla"], None))


def test_mean_over_keys_equals_no_dropout():
    q, k, v, _ = inputs()
    call = functools.partial(pallas_flash.attention, q, k, v, implementation="xla")
    outputs = jax.jit(jax.vmap(lambda key: call(dropout_rate=0.5, dropout_key=key)))(
        jax.random.split(jax.random.key(4), 300)
    )
    error = outputs.mean(0) - call()
    # The largest of B * T * N * S, each a sum of as many terms as there are keys.
    assert (jnp.abs(error) < (SIGMAS + 1) * outputs.std(0) / np.sqrt(300)).all()


@functools.cache
def results(name):
    """The output, the LSE and the gradients."""
    *qkv, do = inputs(value_dim=5)

    @oracle.compiled
    def run(*qkv):
        def call(*qkv):
            options = dict(dropout_rate=RATE, dropout_key=KEYS["typed"](), is_causal=True)
            return pallas_flash.attention(*qkv, return_lse=True, **options, **WAYS[name])

        out, pull = jax.vjp(call, *qkv)
        return *out, *pull((do, do[..., 0]))

    return run(*qkv)


@pytest.mark.parametrize("name", cases.default(["xla"], list(WAYS)[1:]))
def test_gradients_equal_definition(name):
    for got, want in zip(results(name), results("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", cases.default(["xla"], ["xla", "reference"]))
def test_gradients_equal_differences(implementation):
    with jax.enable_x64(True):
        rng = np.random.default_rng(5)
        *qkv, do = (jnp.asarray(np.asarray(x), jnp.float64) for x in inputs(value_dim=5))
        steps = [jnp.asarray(rng.normal(size=x.shape)) for x in qkv]
        options = dict(dropout_rate=RATE, dropout_key=KEYS["typed"]())

        def loss(*qkv):
            out = pallas_flash.attention(*qkv, implementation=implementation, **options)
            return (out * do).sum()

        @oracle.compiled
        def both(h):
            ahead, behind = (
                loss(*(x + sign * h * dx for x, dx in zip(qkv, steps, strict=True)))
                for sign in (1, -1)
            )
            gradients = jax.grad(loss, (0, 1, 2))(*qkv)
            along = sum((g * dx).sum() for g, dx in zip(gradients, steps, strict=True))
            return (ahead - behind) / (2 * h), along

        # Central differences are off by h^2.
        slope, along = both(1e-5)
        np.testing.assert_allclose(slope, along, rtol=1e-7)
