"""Paged attention agrees with float64 for every schedule of pages, and reads nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, paged_cases, ttir
from support.paged_cases import CONFIGS, check, draw, program
from support.strict import strictly

import pallas_flash
from pallas_flash.tuning import Tile

paged = pallas_flash.paged_attention
ALL = "interpret", "xla", "reference"
PLAIN = CONFIGS[0]


def run(config, implementation, numbers):
    traces = []
    call = program(config, implementation, traces)
    for n in numbers:
        schedule = draw(config, n)
        check(schedule, call(schedule.arrays, schedule.scales))
        if n == numbers[0]:
            # Imports of the first call add JAX settings, by which a second one is traced again.
            call(schedule.arrays, schedule.scales)
            traces.clear()
    assert not traces


CASES = [(config, "interpret") for config in CONFIGS]
CASES += [(CONFIGS[0], "reference"), (CONFIGS[1], "xla"), (CONFIGS[3], "xla")]


# The kernels have all that is plain with other options, too.
@pytest.mark.parametrize(("config", "implementation"), cases.default(CASES[1:], CASES), ids=str)
def test_random_schedules(config, implementation, kernel_case):
    """Pages in any order; NaN in all that is not read; one program for all lengths."""
    run(config, implementation, range(12))


@pytest.mark.extended
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_more_random_schedules(config, implementation, kernel_case):
    run(config, implementation, range(12, 210))


ON_A_GPU = [
    *CONFIGS,
    *(
        dataclasses.replace(x, name=f"{x.name}-{n}", dims=(n, n), dtype="bfloat16")
        for x, n in zip(CONFIGS, (64, 128, 256, 128, 64, 256), strict=True)
    ),
]


ON_HOPPER = [x for x in ON_A_GPU if x.dtype != "float32" and not x.cache] + [
    dataclasses.replace(CONFIGS[1], name=f"groups-{n}", page_size=48, heads=(2 * n, 2), dims=x)
    for n, x in ((1, (128, 64)), (7, (64, 128)))
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("config", "implementation"),
    [*((x, "triton") for x in ON_A_GPU), *((x, "mosaic") for x in ON_HOPPER)],
    ids=str,
)
def test_random_schedules_on_a_gpu(config, implementation, monkeypatch):
    assert jax.default_backend() == "gpu", "`-m gpu` needs a GPU and a JAX that sees it."
    if implementation == "mosaic":
        # Several K/V blocks, and KV splits of them.
        monkeypatch.setattr(paged_cases, "ROOM", 4096)
    run(config, implementation, range(10))


def each_byte(implementation, cache, head_dim):
    """Return the output of 256 requests of one key, and its value: each byte in each column."""
    bytes_of = np.arange(256)[:, None] + 7 * np.arange(head_dim)
    pages = bytes_of.astype(np.uint8).view(cache)[:, None, None]
    query = np.ones((256, 1, 1, head_dim), jnp.bfloat16)
    lengths, table, scales = np.ones(256, np.int32), np.arange(256)[:, None], np.ones(1, np.float32)
    o = paged(
        query,
        np.ones_like(pages),
        pages,
        lengths,
        table.astype(np.int32),
        key_scales=scales,
        value_scales=scales,
        implementation=implementation,
    )
    return np.asarray(o, np.float32)[:, 0, 0], pages[:, 0, 0].astype(np.float32)


BYTES = [(x, n) for x in (np.int8, jnp.float8_e4m3fn) for n in (64, 16, 31)]


@pytest.mark.parametrize(
    ("cache", "head_dim"), cases.default([x for x in BYTES if x[1] != 16], BYTES), ids=str
)
def test_each_byte_in_words_or_columns(cache, head_dim):
    """As words of two columns, and as single columns."""
    np.testing.assert_array_equal(*each_byte("interpret", cache, head_dim))


@pytest.mark.gpu
@pytest.mark.parametrize(("cache", "head_dim"), BYTES, ids=str)
def test_each_byte_on_a_gpu(cache, head_dim):
    np.testing.assert_array_equal(*each_byte("triton", cache, head_dim))


@pytest.mark.parametrize("cache", [np.int8, jnp.float8_e4m3fn])
def test_large_pages_are_served(cache):
    """Between 2^31 and 2^32 numbers, as words of two, which have half the indices."""

    def served(dtype):
        pages = jax.ShapeDtypeStruct((3 * 2**21, 16, 1, 32), cache)
        call = functools.partial(paged, implementation="interpret")
        query, scales = jax.ShapeDtypeStruct((1, 1, 1, 32), dtype), jnp.ones(1)
        numbers = jnp.int32([1]), jnp.int32([[0]])
        options = dict(key_scales=scales, value_scales=scales)
        return jax.eval_shape(call, query, pages, pages, *numbers, **options)

    assert served(jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(NotImplementedError, match=f"{np.dtype(cache)} with 3221225472 elements"):
        served(jnp.float16)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_order_of_pages_changes_no_bit(implementation):
    schedule = draw(PLAIN, 0)
    q, k, v, lengths, table, cu = schedule.arrays
    order = np.random.default_rng(0).permutation(PLAIN.num_pages)
    place = np.append(np.argsort(order), 0)
    moved = place[np.clip(table, -1, PLAIN.num_pages)].astype(np.int32)
    call = program(PLAIN, implementation)
    first = call((q, k, v, lengths, table, cu), {})
    second = call((q, k[order], v[order], lengths, moved, cu), {})
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", cases.default(["interpret"], ["interpret", "xla"]))
def test_one_call_equals_a_call_for_each_request(implementation):
    """Decoding, a chunk of a prompt, and a request without keys."""
    schedule = draw(dataclasses.replace(PLAIN, name="mixed"), 3)
    q, k, v, _, table, _ = schedule.arrays
    lengths, cu = np.int32([40, 0, 100, 17, 256]), np.int32([0, 1, 2, 20, 21, 22])
    table = np.where((table < 0) | (table >= len(k)), 0, table)
    k, v = (jnp.nan_to_num(x, nan=0.5) for x in (k, v))
    whole = paged(q, k, v, lengths, table, cu, implementation=implementation)
    for r in range(5):
        at = slice(cu[r], cu[r + 1])
        rest = lengths[r : r + 1], table[r : r + 1]
        one = paged(q[None, at], k, v, *rest, implementation=implementation)
        np.testing.assert_allclose(one[0], whole[at], atol=2e-6)
    assert not whole[1].any() and not whole[22:].any()


FEATURES = [
    {},
    {"local_window_size": 9},
    {"logits_soft_cap": 2.0},
    {"sinks": np.float32([0.5, -1, 2, 0])},
    {"alibi_slopes": np.float32([0.1, 0.2, 0.3, 0.4])},
    {"scale": -0.7},
]


# Random schedules have all of them.
@pytest.mark.parametrize(
    "options", cases.default(FEATURES[:2], FEATURES), ids=lambda x: next(iter(x), "plain")
)
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_token_by_token_equals_the_forward(options, implementation):
    """Two sequences side by side: a prompt in chunks, then single tokens, all appended."""
    N, K, H, T = 4, 2, 16, 40
    q, k, v = (jax.random.normal(jax.random.key(i), (2, T, n, H)) for i, n in enumerate((N, K, K)))
    want = pallas_flash.attention(q, k, v, is_causal=True, implementation="xla", **options)
    pages = [jnp.full((9, 16, K, H), jnp.nan)] * 2
    table = jnp.int32([[3, 8, 0], [5, 1, 7]])

    @jax.jit
    def step(pages, q, k, v, lengths):
        pages = pallas_flash.paged.append(*pages, k, v, lengths, table)
        return pages, paged(q, *pages, lengths, table, implementation=implementation, **options)

    start = 0
    for n in (18, 18, 1, 1, 1, 1):
        new = slice(start, start + n)
        start += n
        lengths = jnp.full(2, start, jnp.int32)
        pages, o = step(pages, q[:, new], k[:, new], v[:, new], lengths)
        np.testing.assert_allclose(o, want[:, new], atol=3e-6)


@pytest.mark.parametrize("implementation", ALL)
def test_traced_numbers_out_of_range(implementation):
    """They count as the nearest that are in range, and nothing is NaN."""
    q = jax.random.normal(jax.random.key(0), (6, 4, 16))
    k, v = jax.random.normal(jax.random.key(1), (2, 7, 16, 2, 16))
    call = jax.jit(functools.partial(paged, implementation=implementation))
    wild = jnp.int32([1000, -5]), jnp.int32([[-3, 2], [9, 7]]), jnp.int32([-4, 5, 3])
    near = jnp.int32([32, 0]), jnp.int32([[0, 2], [6, 6]]), jnp.int32([0, 5, 5])
    np.testing.assert_array_equal(call(q, k, v, *wild), call(q, k, v, *near))


@pytest.mark.parametrize("implementation", ALL)
def test_nan_shows_where_a_query_sees_it(implementation):
    """In a key of the second page, which the second request has, and in no other row."""
    q = jax.random.normal(jax.random.key(0), (2, 2, 2, 16))
    k, v = jax.random.normal(jax.random.key(1), (2, 3, 16, 1, 16))
    rest = jnp.int32([16, 18]), jnp.int32([[0, 9], [0, 1]])
    call = functools.partial(paged, implementation=implementation, return_lse=True)
    want = call(q, k, v, *rest)
    for x, y in zip(call(q, k.at[1, 1].set(jnp.nan), v, *rest), want, strict=True):
        np.testing.assert_allclose(x[0], y[0], atol=1e-6)
        np.testing.assert_allclose(x[1, 0], y[1, 0], atol=1e-6)
        assert not np.isfinite(x[1, 1]).any()
        assert np.isnan(x[1, 1]).all() == (x.ndim == 4)


def test_wild_numbers_read_nothing_outside():
    """The lowered kernels, whose every load and store is checked."""
    q = jax.random.normal(jax.random.key(0), (9, 4, 32))
    k, v = jax.random.normal(jax.random.key(1), (2, 7, 24, 2, 32))
    call = functools.partial(paged, implementation="triton", return_lse=True)
    lengths, cu = jnp.int32([1000, 30, -5]), jnp.int32([1, 6, 99, 3])
    table = jnp.int32([[-3, 2, 4], [90, 7, 5], [1, 1, 1]])
    o, lse = ttir.evaluate(jax.jit(call), q, k, v, lengths, table, cu)
    lengths, cu = jnp.clip(lengths, 0, 72), jnp.int32([1, 6, 9, 9])
    want, want_lse = paged(
        q, k, v, lengths, jnp.clip(table, 0, 6), cu, implementation="xla", return_lse=True
    )
    np.testing.assert_allclose(o, want, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)


def test_it_is_not_differentiable():
    q, (k, v) = jnp.ones((1, 1, 2, 16)), jnp.ones((2, 4, 16, 2, 16))
    rest = jnp.int32([5]), jnp.int32([[1]])

    def total(q):
        return paged(q, k, v, *rest, implementation="xla").sum()

    with pytest.raises(NotImplementedError, match="`paged_attention` must not be differentiated"):
        jax.grad(total)(q)
    assert not jax.grad(lambda q: total(jax.lax.stop_gradient(q)))(q).any()


def test_second_call_compiles_nothing(caplog):
    q, (k, v) = jnp.ones((2, 1, 2, 16)), jnp.ones((2, 4, 16, 2, 16))

    def call(*lengths):
        return paged(q, k, v, np.int32(lengths), np.int32([[1], [0]]), implementation="xla")

    with jax.log_compiles():
        call(5, 6)
        call(7, 16)
        caplog.clear()
        call(1, 0)
        assert "Compiling" not in caplog.text


def test_no_tokens_and_no_pages():
    k = jnp.ones((4, 16, 2, 16))
    o = paged(jnp.ones((0, 2, 16)), k, k, jnp.int32([0]), jnp.int32([[1]]), jnp.int32([0, 0]))
    assert o.shape == (0, 2, 16)
    none = jnp.zeros((1, 0), jnp.int32)
    o, lse = paged(jnp.ones((1, 1, 2, 16)), k, k, jnp.int32([0]), none, return_lse=True)
    assert not o.any() and (lse == -jnp.inf).all()


def test_many_splits_and_row_tiles():
    """One long request in many splits, and rows of several tiles, by small tiles."""
    from pallas_flash._backends.triton import paged_kernel

    k, v = jax.random.normal(jax.random.key(1), (2, 64, 16, 1, 16))
    q = jax.random.normal(jax.random.key(0), (40, 2, 16))
    table = jax.random.permutation(jax.random.key(2), 64).reshape(2, 32).astype(jnp.int32)
    rest = jnp.int32([512, 300]), table, jnp.int32([0, 1, 40])
    want = paged(q, k, v, *rest, implementation="reference")
    small = [(Tile(16, 16), (0, 16)), (Tile(32, 32), (16, None))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_kernel, "launches_of", lambda *_: small)
        o = paged(q, k, v, *rest, implementation="interpret")
    np.testing.assert_allclose(o, want, atol=2e-6)


def test_inside_a_shard_map():
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    q, (k, v) = jnp.ones((1, 1, 2, 16)), jnp.ones((2, 4, 16, 2, 16))
    P = jax.sharding.PartitionSpec
    for implementation in ("xla", "interpret"):
        call = functools.partial(paged, implementation=implementation)
        sharded = jax.shard_map(
            call,
            mesh=mesh,
            in_specs=(P(None, None, "heads"), *[P(None, None, "heads")] * 2, P(), P()),
            out_specs=P(None, None, "heads"),
        )
        rest = jnp.int32([5]), jnp.int32([[1]])
        np.testing.assert_allclose(jax.jit(sharded)(q, k, v, *rest), call(q, k, v, *rest))


def test_all_configurations_are_named_once():
    assert len({x.name for x in CONFIGS}) == len(CONFIGS) == len(set(map(str, CONFIGS)))
    assert {x for config in CONFIGS for x in config.options} == set(paged_cases.OPTIONS)


@pytest.mark.parametrize("implementation", cases.default(ALL[:2], ALL))
def test_strict_switches_and_64_bits(implementation):
    """A number of queries for each request, or cumulative lengths, which must agree."""
    q = jax.random.normal(jax.random.key(0), (3, 2, 4, 16), jnp.float32)
    k, v = jax.random.normal(jax.random.key(1), (2, 7, 16, 2, 16), jnp.float32)
    rest = np.int32([20, 2, 32]), np.int32([[3, 1], [0, 9], [5, 6]])
    options = {"alibi_slopes": np.ones(4, np.float32), "local_window_size": 20}
    call = functools.partial(paged, implementation=implementation, **options)
    with strictly(x64=True, leaks=True):
        each = jax.jit(call)(q, k, v, *rest)
        flat = jax.jit(call)(q.reshape(6, 4, 16), k, v, *rest, np.int32([0, 2, 4, 6]))
        new = jax.jit(pallas_flash.paged.append)(k, v, q[:, :, :2], q[:, :, :2], *rest)
        assert each.dtype == jnp.float32 and new[0].shape == k.shape
    np.testing.assert_allclose(each.reshape(flat.shape), flat, atol=1e-6)


# The others are plain JAX.
@pytest.mark.parametrize("implementation", cases.default(["interpret"], ALL))
def test_vmap(implementation):
    q = jax.random.normal(jax.random.key(0), (2, 3, 1, 4, 16))
    k, v = jax.random.normal(jax.random.key(1), (2, 7, 16, 2, 16))
    lengths, table = jnp.int32([[20, 2, 32], [0, 1, 5]]), jnp.int32([[3, 1], [0, 9], [5, 6]])
    call = functools.partial(paged, implementation=implementation)
    mapped = jax.vmap(call, (0, None, None, 0, None))(q, k, v, lengths, table)
    for i in range(2):
        np.testing.assert_allclose(mapped[i], call(q[i], k, v, lengths[i], table), atol=1e-6)
