"""Caches with a length for each sequence, rings and pages: token by token what the text gives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases
from support.flax_cases import FEATURES, assert_close, normal, self_attention

import pallas_flash
from pallas_flash.flax import KVCache, PagedKVCache

pytestmark = pytest.mark.usefixtures("ieee_products")

LENGTH, SEQUENCES = 24, 3
OPTIONS = [
    {"num_kv_heads": 2},
    {"local_window_size": (4, 0), "use_sinks": True, "sinks_init": nnx.initializers.normal(1.0)},
    {"num_kv_heads": 1, "logits_soft_cap": 1.5, "rope_theta": None},
]
INTERPRET = {"local_window_size": (4, 0), "num_kv_heads": 2, "implementation": "interpret"}
# How many real tokens each of three sequences gets, call by call; the rest is padding. Calls have 7
# tokens or one, so that they are two programs.
SCHEDULE = [[5, 7, 1], [1, 1, 1], [0, 3, 7], [1, 1, 1], [7, 2, 3], [1, 1, 1]]


def padded(x, start, counts):
    """Return the next tokens of each sequence, and 9 behind them."""
    rows = np.full((len(counts), max(counts), FEATURES), 9.0, np.float32)
    for row, y, first, n in zip(rows, x, start, counts, strict=True):
        row[:n] = y[first : first + n]
    return jnp.asarray(rows)


@nnx.jit
def decoded(layer, part, **where):
    return layer(part, decode=True, **where)


def assert_follows(layer, schedule=SCHEDULE):
    """Each call's real tokens are as in the whole text, and padding has the output of zeros."""
    x = normal(1, (SEQUENCES, LENGTH, FEATURES))
    whole, start = layer(x), np.zeros(SEQUENCES, int)
    step = nnx.jit(
        lambda layer, part, counts: layer(part, decode=True, seq_lengths=counts),
        donate_argnums=0,
    )
    for counts in schedule:
        y = step(layer, padded(x, start, counts), jnp.int32(counts))
        for row, want, first, n in zip(y, whole, start, counts, strict=True):
            assert_close(row[:n], want[first : first + n])
            assert not row[n:].any()
        start += counts
        assert layer.cache.lengths[...].tolist() == start.tolist()


@pytest.mark.parametrize(
    "options", cases.default([OPTIONS[1], INTERPRET], [*OPTIONS, INTERPRET]), ids="-".join
)
def test_ragged_cache_follows_each_text(options):
    layer = self_attention(**options)
    layer.init_cache((SEQUENCES, LENGTH, FEATURES), ragged=True)
    assert_follows(layer)


# A room of the window alone, of one token more, and for all tokens of a call.
ROOMS = [(4, OPTIONS[1]), (5, OPTIONS[1]), (11, OPTIONS[1]), (5, INTERPRET)]


@pytest.mark.parametrize(("room", "options"), cases.default([ROOMS[0], ROOMS[-1]], ROOMS))
def test_ring_follows_each_text(room, options):
    layer = self_attention(**options)
    layer.init_cache((SEQUENCES, room, FEATURES), ragged=True, ring=True)
    assert layer.cache.keys.shape[1] == room
    assert_follows(layer)


def test_ring_with_one_length_follows_text():
    layer, x = self_attention(**OPTIONS[1]), normal(1, (2, LENGTH, FEATURES))
    layer.init_cache((2, 6, FEATURES), ring=True)
    whole, start = layer(x), 0
    for part in jnp.split(x, [8, 9, 10, 12, 13, 14, 16], axis=1):
        end = start + part.shape[1]
        assert_close(decoded(layer, part), whole[:, start:end])
        start = end


def test_rejected_drafts_leave_the_cache_right():
    """Lengths are set back, also in a ring with room for the draft."""
    for kwargs in {}, {"ring": True}:
        layer, x = self_attention(**OPTIONS[1]), normal(1, (2, 14, FEATURES))
        layer.init_cache((2, 8 if kwargs else 20, FEATURES), ragged=True, **kwargs)
        whole, start = layer(x), np.array([6, 6])
        decoded(layer, x[:, :6])
        draft = padded(x, start, [4, 4]).at[0, 1:].set(7.0).at[1, 2:].set(7.0)
        assert_close(decoded(layer, draft)[1, :2], whole[1, 6:8])
        layer.cache.lengths[...] = jnp.int32([7, 8])
        y = decoded(layer, padded(x, [7, 8], [1, 1]))
        assert_close(y[:, 0], jnp.stack([whole[0, 7], whole[1, 8]]))


def test_full_ragged_row_gives_nan_alone():
    layer, x = self_attention(), normal(1, (2, 5, FEATURES))
    layer.init_cache((2, 6, FEATURES), ragged=True)
    step = nnx.jit(lambda layer, part, n: layer(part, decode=True, seq_lengths=n))
    step(layer, x, jnp.int32([5, 2]))
    y = step(layer, x[:, :2], jnp.int32([2, 2]))
    assert jnp.isnan(y[0]).all() and jnp.isfinite(y[1]).all()
    with pytest.raises(ValueError, match="got 2 tokens with 6 of 6 taken"):
        layer(x[:, :2], decode=True)


# Caches with room for 16 tokens.
FULL = {
    "in a row": lambda: KVCache((1, 16, 2, 8)),
    "ragged": lambda: KVCache((1, 16, 2, 8), ragged=True),
    "pages": lambda: PagedKVCache((3, 8, 2, 8)),
    "int8": lambda: PagedKVCache((3, 8, 2, 8), jnp.int8),
}


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("kind", FULL)
def test_full_cache_keeps_its_tokens(kind, new):
    """Of traced tokens beyond the room only those with a place are written."""
    cache, whole = FULL[kind](), FULL[kind]()
    text = [heads(s, 1, 24, n) for s, n in ((1, 4), (2, 2), (3, 2))]

    @nnx.jit
    def add(cache, part, length):
        if isinstance(cache, KVCache):
            cache.attend(*part)
            return jnp.stack([length])[:, None] - 1
        requests = jnp.stack([length]), jnp.int32([[2, 0]])
        cache.attend(*part, requests)
        return cache.positions(part[0].reshape(1, -1, 32), requests)

    add(whole, [x[:, :16] for x in text], 16)
    for start, stop in [(0, 13), *((n, n + new) for n in range(13, 19, new))]:
        positions = add(cache, [x[:, start:stop] for x in text], stop)
        assert positions[0, -1] == stop - 1
    got, want = (jax.tree.leaves(nnx.state(x, nnx.Cache)) for x in (cache, whole))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("ragged", [False, True])
def test_donated_cache_is_not_copied(ragged):
    """The compiled program writes new tokens into the arrays that it is given."""
    layer, x = self_attention(num_kv_heads=2), normal(1, (2, 1, FEATURES))
    layer.init_cache((2, 40, FEATURES), ragged=ragged)
    graph, cache, rest = nnx.split(layer, nnx.Cache, ...)

    def step(cache, rest, x):
        layer = nnx.merge(graph, cache, rest)
        return layer(x, decode=True), nnx.state(layer, nnx.Cache)

    lowered = jax.jit(step, donate_argnums=0).lower(cache, rest, x)
    text = lowered.compile().as_text()
    shape = r"f32\[2,40,2,\d+\]\S*"
    assert len(re.findall(rf"{shape} parameter\(", text.split("ENTRY")[1])) == 2
    assert not re.findall(rf"{shape} copy\(", text)
    # Some versions of XLA compile a scatter to slices, too.
    assert ("stablehlo.scatter" in lowered.as_text()) == ragged


@pytest.mark.parametrize("dtype", [None, jnp.int8])
@pytest.mark.parametrize(
    "options", cases.default([OPTIONS[1], INTERPRET], [*OPTIONS, INTERPRET]), ids="-".join
)
def test_pages_follow_each_text(options, dtype):
    """The tokens of all requests in one axis, and pages in any order."""
    layer, x = self_attention(**options), normal(1, (SEQUENCES, LENGTH, FEATURES))
    layer.init_pages(8, 16, dtype)
    table = jnp.int32([[5, 0], [2, 7], [1, 6]])
    whole, start = layer(x), np.zeros(SEQUENCES, int)
    step = nnx.jit(
        lambda layer, part, requests: layer(part, decode=True, requests=requests),
        donate_argnums=0,
    )
    for counts in SCHEDULE:
        cu = np.cumsum([0, *counts])
        tokens = np.full((18, FEATURES), 9.0, np.float32)
        for y, first, at, n in zip(x, start, cu, counts, strict=False):
            tokens[at : at + n] = y[first : first + n]
        start += counts
        y = step(layer, tokens, (jnp.int32(start), table, jnp.int32(cu)))
        for want, end, at, n in zip(whole, start, cu, counts, strict=False):
            if dtype is None:
                assert_close(y[at : at + n], want[end - n : end])
            else:
                assert jnp.allclose(y[at : at + n], want[end - n : end], atol=0.05)


def test_quantised_contiguous_cache_is_pages_in_order():
    layer, x = self_attention(), normal(1, (2, 20, FEATURES))
    layer.init_pages(4, 16, jnp.int8)
    whole, table = layer(x), jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    for start, end in (0, 17), (17, 18), (18, 20):
        part = x[:, start:end]
        y = decoded(layer, part, requests=(jnp.full(2, end, jnp.int32), table))
        assert jnp.allclose(y, whole[:, start:end], atol=0.05)
    assert layer.cache.key_scales.shape == (4, 4, 16)


def heads(seed, batch, length, num_heads):
    return normal(seed, (batch, length, num_heads, 8))


def test_tree_of_drafts_then_accepted_path():
    """A tree is checked in one call; the accepted path follows the text as if it were read."""
    parents = jnp.int32([[-1, 0, 0, 2, 2], [-1, -1, 1, 2, 0]])
    paths = jnp.int32([[0, 2, 4], [1, 2, 3]])
    cache = KVCache((2, 16, 2, 8), ragged=True)
    prompt = [heads(s, 2, 6, n) for s, n in ((1, 4), (2, 2), (3, 2))]
    draft = [heads(s, 2, 5, n) for s, n in ((4, 4), (5, 2), (6, 2))]
    cache.attend(*prompt, seq_lengths=jnp.int32([6, 4]))
    start, o = cache.lengths[...], cache.attend(*draft, tree=parents)
    for b, (length, path) in enumerate(zip([6, 4], paths, strict=True)):
        parts = zip(prompt, draft, strict=True)
        text = (jnp.concatenate([x[b, :length], y[b, path]]) for x, y in parts)
        want = pallas_flash.attention(*text, is_causal=True)
        assert_close(o[b, path], want[length:])

    cache.accept(start, paths, jnp.int32([3, 2]))
    assert cache.lengths[...].tolist() == [9, 6]
    after = [heads(s, 2, 1, n) for s, n in ((7, 4), (8, 2), (9, 2))]
    o = cache.attend(*after)
    for b, (length, n) in enumerate([(6, 3), (4, 2)]):
        parts = zip(prompt, draft, after, strict=True)
        text = (jnp.concatenate([x[b, :length], y[b, paths[b, :n]], z[b]]) for x, y, z in parts)
        assert_close(o[b], pallas_flash.attention(*text, is_causal=True)[-1:])


def test_narrow_cache_keeps_dtype_of_layer():
    layer, x = self_attention(), normal(1, (2, 5, FEATURES))
    layer.init_cache(x.shape, jnp.bfloat16, ragged=True)
    y = layer(x, decode=True)
    layer.init_pages(2, 16, jnp.bfloat16)
    z = layer(x, decode=True, requests=(jnp.int32([5, 5]), jnp.int32([[1], [0]])))
    assert y.dtype == z.dtype == jnp.float32
    assert jnp.allclose(y, layer(x), atol=0.02) and jnp.allclose(z, layer(x), atol=0.02)


def test_own_layer_gets_lse_and_value_dim():
    cache = KVCache((1, 9, 2, 8), value_dim=6)
    q, k, v = heads(1, 1, 5, 4), heads(2, 1, 5, 2), normal(3, (1, 5, 2, 6))
    o, lse = cache.attend(q, k, v, return_lse=True)
    want = pallas_flash.attention(q, k, v, is_causal=True, return_lse=True)
    assert_close(o, want[0])
    assert_close(lse, want[1])
    pages = PagedKVCache((2, 16, 2, 8), value_dim=6)
    requests = jnp.int32([5]), jnp.int32([[1]])
    o, lse = pages.attend(q, k, v, requests, return_lse=True)
    assert_close(o, want[0])
    assert_close(lse, want[1])


X = jnp.ones((2, 3, FEATURES))
NEW = jnp.ones((2, 3, 4, 8))
REQUESTS = jnp.int32([3, 3]), jnp.int32([[0], [1]])
ERRORS = {
    "lengths in a cache with one length": (
        lambda layer: [layer.init_cache((2, 9, 32)), decode(layer, seq_lengths=jnp.int32([3, 2]))],
        "`seq_lengths` must be None in a cache with one length",
    ),
    "requests without pages": (
        lambda layer: [layer.init_cache((2, 9, 32)), decode(layer, requests=(1, 2))],
        "`requests` must be None where the cache has no pages",
    ),
    "requests without decode": (
        lambda layer: layer(X, requests=(1, 2)),
        "`requests` must be None without decode=True",
    ),
    "pages without requests": (
        lambda layer: [layer.init_pages(4, 16), decode(layer)],
        r"`requests` must be \(key_value_seq_lengths, page_indices\)",
    ),
    "pages without a batch": (
        lambda layer: [layer.init_pages(4, 16), layer(X[0], decode=True, requests=REQUESTS)],
        r"`x` must have shape \[R, T, features\] for 2 requests; got x.shape=\(3, 32\)",
    ),
    "pages with a batch": (
        lambda layer: [
            layer.init_pages(4, 16),
            decode(layer, requests=(*REQUESTS, jnp.int32([0, 1, 2]))),
        ],
        r"`x` must have shape \[tokens, features\] with `cu_seqlens_q`; got",
    ),
    "a number for decode": (
        lambda layer: [layer.init_cache((2, 9, 32)), layer(X, decode=1)],
        "`decode` must be True or False",
    ),
    "pages with lengths": (
        lambda layer: [layer.init_pages(4, 16), decode(layer, seq_lengths=jnp.int32([3, 2]))],
        "`seq_lengths` must be None where the cache has pages",
    ),
    "a ring without a window": (
        lambda layer: layer.init_cache((2, 9, 32), ring=True),
        "`local_window_size` must see at most 9 tokens back",
    ),
    "a tree in a ring": (
        lambda layer: KVCache((2, 9, 4, 8), ring=True).attend(
            *[jnp.ones((2, 3, 4, 8))] * 3, tree=jnp.zeros((2, 3), int), local_window_size=(2, 0)
        ),
        "`tree` must be None in a ring",
    ),
    "a batch-invariant ring": (
        lambda layer: KVCache((2, 9, 4, 8), ring=True).attend(
            *[jnp.ones((2, 3, 4, 8))] * 3, batch_invariant=True, local_window_size=(2, 0)
        ),
        "`batch_invariant` must be False in a ring",
    ),
    "a tree with a window": (
        lambda layer: KVCache((2, 9, 4, 8)).attend(
            *[jnp.ones((2, 3, 4, 8))] * 3, tree=jnp.zeros((2, 3), int), local_window_size=(2, 0)
        ),
        "`tree` must be None with `local_window_size`",
    ),
    "a path in a ring": (
        lambda layer: KVCache((2, 9, 4, 8), ragged=True, ring=True).accept(
            *[jnp.zeros(2, int)] * 3
        ),
        "`path` must be for a cache with ragged=True and ring=False",
    ),
    "a path of floats": (
        lambda layer: KVCache((2, 9, 4, 8), ragged=True).accept(
            jnp.zeros(2, int), jnp.zeros((2, 1)), jnp.zeros(2, int)
        ),
        "`path` must be int32; got float32",
    ),
    "a path of other sequences": (
        lambda layer: KVCache((2, 9, 4, 8), ragged=True).accept(
            jnp.zeros(2, int), jnp.zeros((3, 1), int), jnp.zeros(2, int)
        ),
        r"`path` must broadcast to \(2, 1\); got path.shape=\(3, 1\)",
    ),
    "a list": (lambda layer: attend(key=[1.0]), "`key` must be an array; got list"),
    "no batch": (lambda layer: attend(query=NEW[0]), "`query` must have 4 axes for this cache"),
    "integer keys": (lambda layer: attend(key=NEW.astype(int)), "`key` must be floating point"),
    "fewer keys": (
        lambda layer: attend(key=NEW[:, :2]),
        r"`key` must have shape \(2, 3, 4, 8\), for the tokens of `query` and the heads of the c",
    ),
    "values of another head dim": (
        lambda layer: attend(value=NEW[..., :4]),
        r"`value` must have shape \(2, 3, 4, 8\), .*; got \(2, 3, 4, 4\)",
    ),
    "keys of one head": (lambda layer: attend(key=NEW[:, :, :1]), "`key` must have shape"),
    "fewer keys for pages": (
        lambda layer: PagedKVCache((4, 16, 4, 8)).attend(NEW, NEW[:, :2], NEW[:, :2], REQUESTS),
        r"`key` must have shape \(2, 3, 4, 8\)",
    ),
    "causal": (lambda layer: attend(is_causal=True), "`is_causal` must be left out, because the c"),
    "no dtype": (lambda layer: KVCache((9, 4, 8), "float9"), "`dtype` must be a dtype; got str"),
    "no dtype of pages": (lambda layer: layer.init_pages(4, 16, 3), "`dtype` must be a dtype; got"),
    "value dim": (
        lambda layer: KVCache((9, 4, 8), value_dim=-1),
        "`value_dim` must be an int of at least 0; got int -1",
    ),
    "value dim of pages": (
        lambda layer: PagedKVCache((2, 9, 4, 8), value_dim=2.0),
        "`value_dim` must be an int of at least 1; got float 2.0",
    ),
    "a spec as sharding": (
        lambda layer: layer.init_cache((2, 9, 32), sharding=P("x")),
        "`sharding` must be a `jax.sharding.NamedSharding`; got",
    ),
    "a divided room": (
        lambda layer: layer.init_cache((2, 9, 32), sharding=divided(None, "x")),
        "`sharding` must leave tokens and the head dim whole; got",
    ),
    "divided pages' tokens": (
        lambda layer: layer.init_pages(4, 16, sharding=divided(None, "x")),
        "`sharding` must leave tokens and the head dim whole; got",
    ),
    "no shape": (lambda layer: KVCache((9, 4)), r"`shape` must be sizes \(\*batch, room, K, H\)"),
    "no pages": (lambda layer: layer.init_pages(0, 16), "`shape` must be sizes"),
    "integers": (
        lambda layer: layer.init_pages(4, 16, jnp.int32),
        "`dtype` must be floating point or int8",
    ),
}


def attend(**changes):
    return KVCache((2, 9, 4, 8)).attend(**{"query": NEW, "key": NEW, "value": NEW} | changes)


def divided(*axes):
    return NamedSharding(jax.make_mesh((1,), ("x",)), P(*axes))


def decode(layer, **kwargs):
    return layer(X, decode=True, **kwargs)


@pytest.mark.parametrize("case", ERRORS)
def test_error_names_argument(case):
    call, fragment = ERRORS[case]
    with pytest.raises((TypeError, ValueError), match=fragment):
        call(self_attention())


@pytest.mark.parametrize("pages", [False, True])
def test_batch_invariance_reaches_caches(pages):
    """A CPU has no such kernels."""
    layer, more = self_attention(batch_invariant=True), dict(requests=REQUESTS) if pages else {}
    if pages:
        layer.init_pages(4, 16)
    else:
        layer.init_cache((2, 9, FEATURES))
    with pytest.raises(NotImplementedError, match="`batch_invariant` must be False where"):
        decode(layer, **more)
