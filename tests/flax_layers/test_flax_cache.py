"""`SelfAttention` with a cache: token by token what the whole text gives."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support import cases
from support.flax_cases import FEATURES, assert_close, distance, normal, self_attention, with_cache

pytestmark = pytest.mark.usefixtures("ieee_products")


WITH_CACHE = [
    {"num_kv_heads": 2, "normalize_qk": True, "use_bias": True},
    {"local_window_size": (2, 0), "logits_soft_cap": 1.5},
    {},
    {"use_sinks": True, "sinks_init": nnx.initializers.normal(1.0), "rope_theta": None},
    {"num_kv_heads": 1, "implementation": "interpret"},
]


def options_in_words(options):
    return "-".join(options) or "plain"


@pytest.mark.parametrize(
    "options",
    cases.default(WITH_CACHE[1:2], WITH_CACHE),
    ids=options_in_words,
)
def test_cached_tokens_equal_whole_text(options):
    """A prompt, then single tokens, then a few: that is how text is generated and checked."""
    layer, x = with_cache(2, 11, **options), normal(1, (2, 11, FEATURES))
    whole = layer(x)
    step = nnx.jit(lambda layer, part: layer(part, decode=True))
    start = 0
    for part in jnp.split(x, [5, 6, 7, 10], axis=1):
        end = start + part.shape[1]
        assert_close(step(layer, part), whole[:, start:end])
        assert layer.cache.lengths[...] == end
        start = end
    # A new one starts anew.
    layer.init_cache((2, 4, FEATURES))
    assert_close(layer(x[:, :4], decode=True), whole[:, :4])


@pytest.mark.parametrize(
    "options", cases.default(WITH_CACHE[1:2], WITH_CACHE[:4]), ids=options_in_words
)
def test_vmap_maps_the_cache(options):
    """Prompts of different lengths, padded at their ends; the padding is then overwritten."""
    layer, x = self_attention(**options), normal(1, (3, 11, FEATURES))
    layer.init_cache((11, FEATURES))
    graph, cache, parameters = nnx.split(layer, nnx.Cache, ...)
    caches = jax.tree.map(lambda x: jnp.stack([x] * 3), cache)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0, 0, 0))
    def step(parameters, cache, tokens, length):
        layer = nnx.merge(graph, cache, parameters)
        end = layer.cache.lengths[...] + length
        y = layer(tokens, decode=True)
        layer.cache.lengths[...] = end
        return y[length - 1], nnx.state(layer, nnx.Cache)

    whole, examples, lengths = layer(x), jnp.arange(3), jnp.array([2, 7, 1])
    tokens, added = (
        jnp.where(jnp.arange(7)[:, None] < lengths[:, None, None], x[:, :7], 9.0),
        lengths,
    )
    for _ in range(4):
        y, caches = step(parameters, caches, tokens, added)
        assert_close(y, whole[examples, lengths - 1])
        tokens, added = x[examples, lengths][:, None], jnp.ones_like(lengths)
        lengths += 1


def test_cache_shape_and_dtype():
    layer, x = self_attention(num_kv_heads=2), normal(1, (2, 1, 3, FEATURES))
    layer.init_cache(x.shape, jnp.bfloat16)
    assert layer.cache.keys.shape == layer.cache.values.shape == (2, 1, 3, 2, 8)
    assert layer.cache.keys.dtype == layer.cache.values.dtype == jnp.bfloat16
    got = layer(x, decode=True)
    assert got.dtype == x.dtype
    assert 0 < distance(got, layer(x)) < 0.02
    layer.init_cache(x.shape)
    assert layer.cache.keys.dtype == jnp.float32
    layer = with_cache(dtype=jnp.bfloat16)
    assert layer.cache.keys.dtype == layer.cache.values.dtype == jnp.bfloat16


def test_refused_call_keeps_cache():
    layer, x = with_cache(implementation="nothing"), normal(1, (2, 3, FEATURES))
    with pytest.raises(ValueError, match="`implementation` must be"):
        layer(x, decode=True)
    assert layer.cache.lengths[...] == 0
    assert not layer.cache.keys[...].any()


def test_positions_continue_in_cache():
    layer, x = with_cache(), normal(1, (2, 6, FEATURES))
    layer(x[:, :5], decode=True)
    other = layer(x[:, 5:], positions=jnp.array([0]), decode=True)
    want = layer(x, positions=jnp.array([0, 1, 2, 3, 4, 0]))
    assert_close(other, want[:, 5:])
    assert distance(other, layer(x)[:, 5:]) > 0.01


def test_cache_overflow_under_jit_gives_nan():
    """A traced call cannot raise, and an overwritten cache must not pass unnoticed."""
    layer, x = with_cache(length=9), normal(1, (2, 5, FEATURES))
    step = nnx.jit(lambda layer, part: layer(part, decode=True))
    assert jnp.isfinite(step(layer, x)).all()
    assert jnp.isfinite(step(layer, x[:, :4])).all()
    assert jnp.isnan(step(layer, x[:, :1])).all()
    with pytest.raises(ValueError, match="got 1 tokens with 9 of 9 taken"):
        layer(x[:, :1], decode=True)


def test_layer_without_cache_has_only_parameters():
    layer = self_attention()
    assert not jax.tree.leaves(nnx.state(layer, nnx.Cache))
    layer.init_cache((1, 3, FEATURES))
    assert len(jax.tree.leaves(nnx.state(layer, nnx.Cache))) == 3
