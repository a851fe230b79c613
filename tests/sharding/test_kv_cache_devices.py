"""Caches whose batch and heads devices share: each device keeps and reads its own part.

Eight CPUs are simulated, in a process of their own: see eight_devices.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases, eight_devices
from support.compare import assert_close
from support.meshes import collectives, make_mesh, put

import pallas_flash
from pallas_flash.flax import KVCache, PagedKVCache, SelfAttention

AXES = {"batch": 2, "heads": 2}
ROWS = P("batch", None, "heads")
B, T, N, K, H = 4, 9, 8, 4, 8
# Real tokens of each sequence in a prompt, then in a step.
COUNTS = np.int32([[5, 2, 8, 3], [1, 1, 1, 0]])


def _tokens():
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (B, T, n, H)) for key, n in zip(keys, (N, K, K), strict=True)]


def _run(cache, step, calls):
    """Call `step` compiled with the cache donated; it must exchange nothing."""
    graph, state = nnx.split(cache)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state, qkv, *rest):
        cache = nnx.merge(graph, state)
        o = step(cache, *qkv, *rest)
        return o, nnx.state(cache)

    text = run.lower(state, *calls[0]).compile().as_text()
    assert not collectives(text), collectives(text)
    results = []
    for call in calls:
        o, state = run(state, *call)
        results.append(np.asarray(o))
    nnx.update(cache, state)
    return results


def _checked(results):
    """Each call's real tokens are as in the whole text, of which a row sees its past alone."""
    want = pallas_flash.attention(*_tokens(), is_causal=True)
    start = np.zeros(B, int)
    for o, counts in zip(results, COUNTS, strict=True):
        for b, (first, n) in enumerate(zip(start, counts, strict=True)):
            assert_close(o[b, :n], want[b, first : first + n])
        start += counts


def _next(start, counts, mesh):
    """Return the next tokens of each sequence."""
    parts = []
    for x in map(np.asarray, _tokens()):
        part = np.zeros((B, counts.max(), *x.shape[2:]), np.float32)
        for row, y, first, n in zip(part, x, start, counts, strict=True):
            row[:n] = y[first : first + n]
        parts.append(put(part, mesh, ROWS))
    return parts


def check_contiguous(kind, ring):
    mesh = make_mesh(AXES, kind)
    with jax.set_mesh(mesh):
        cache = KVCache((B, 24, K, H), ragged=True, ring=ring, sharding=NamedSharding(mesh, ROWS))
        start, calls = np.zeros(B, int), []
        for counts in COUNTS:
            calls.append((_next(start, counts, mesh), put(counts, mesh, P("batch"))))
            start += counts
        window = (20, None) if ring else None

        def step(cache, q, k, v, n):
            return cache.attend(
                q, k, v, seq_lengths=n, local_window_size=window, implementation="xla"
            )

        _checked(_run(cache, step, calls))
        assert cache.keys[...].sharding.shard_shape(cache.keys.shape) == (2, 24, 2, H)


def check_unplaced(kind):
    """New tokens that no device shares go where the cache is; one length, then a tree."""
    mesh = make_mesh(AXES, kind)
    q, k, v = _tokens()
    with jax.set_mesh(mesh):
        where = NamedSharding(mesh, ROWS)
        for ragged in False, True:
            cache = KVCache((B, 24, K, H), ragged=ragged, sharding=where)
            o = cache.attend(q, k, v, implementation="xla")
            assert_close(np.asarray(o), pallas_flash.attention(*_tokens(), is_causal=True))
            assert cache.keys[...].sharding.is_equivalent_to(where, 4)
        parents = jnp.zeros((B, 2), jnp.int32) - 1
        cache.attend(q[:, :2], k[:, :2], v[:, :2], tree=parents, implementation="xla")
        cache.accept(jnp.full(B, T), jnp.ones((B, 1), jnp.int32), jnp.ones(B, jnp.int32))
        assert cache.lengths[...].tolist() == [T + 1] * B
        assert_close(np.asarray(cache.keys[...][:, T]), k[:, 1])


def check_pages(kind, dtype):
    """Each device of the axis "batch" has two requests and four pages of its own."""
    mesh = make_mesh(AXES, kind)
    with jax.set_mesh(mesh):
        where = NamedSharding(mesh, ROWS)
        cache = PagedKVCache((8, 16, K, H), jnp.dtype(dtype), sharding=where)
        table = put(np.int32([[3], [0], [1], [2]]), mesh, P("batch"))
        q, k, v = (put(np.asarray(x), mesh, ROWS) for x in _tokens())

        def step(cache, q, k, v, lengths):
            return cache.attend(q, k, v, (lengths, table), implementation="xla")

        lengths = put(np.full(B, T, np.int32), mesh, P("batch"))
        (o,) = _run(cache, step, [((q, k, v), lengths)])
        want = pallas_flash.attention(*_tokens(), is_causal=True)
        if dtype == "int8":
            assert jnp.allclose(o, want, atol=0.05)
        else:
            assert_close(o, want)
        assert cache.key_pages[...].sharding.shard_shape(cache.key_pages.shape) == (4, 16, 2, H)


def check_layer(kind):
    """`SelfAttention` with replicated parameters and a batch that devices share."""
    mesh = make_mesh(AXES, kind)
    options = dict(is_causal=True, rope_theta=10_000.0, implementation="xla")
    layer = SelfAttention(32, num_heads=4, **options, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (B, T, 32))
    whole = np.asarray(layer(x))
    with jax.set_mesh(mesh):
        nnx.update(layer, put(nnx.state(layer), mesh, P()))
        layer.init_cache(x.shape, ragged=True, sharding=NamedSharding(mesh, P("batch")))
        x = put(np.asarray(x), mesh, P("batch"))
        step = nnx.jit(lambda layer, part: layer(part, decode=True))
        assert_close(np.asarray(step(layer, x[:, :5])), whole[:, :5])
        assert_close(np.asarray(step(layer, x[:, 5:6])), whole[:, 5:6])


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_contiguous_cache_on_devices(kind, ring):
    eight_devices.run(__name__, "check_contiguous", kind, ring)


@pytest.mark.parametrize("kind", cases.default(["auto"], ["auto", "explicit"]))
def test_cache_takes_tokens_from_anywhere(kind):
    eight_devices.run(__name__, "check_unplaced", kind)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_pages_on_devices(kind, dtype):
    eight_devices.run(__name__, "check_pages", kind, dtype)


@pytest.mark.parametrize("kind", cases.default(["explicit"], ["auto", "explicit"]))
def test_layer_with_cache_on_devices(kind):
    eight_devices.run(__name__, "check_layer", kind)
