"""`attention_fn` inside the attention layers of nnx and linen."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from support import cases
from support.flax_cases import (
    DROPOUT,
    FEATURES,
    KV_LEN,
    NUM_HEADS,
    OURS,
    Q_LEN,
    Sower,
    assert_close,
    causal_mask,
    distance,
    linen_layers,
    nnx_layers,
    normal,
    output_and_gradients,
    qkv,
    random_mask,
)

import pallas_flash.flax

pytestmark = pytest.mark.usefixtures("ieee_products")


@pytest.mark.parametrize(("batch", "num_kv_heads"), [((), 2), ((2, 3), NUM_HEADS)])
def test_nnx_module(batch, num_kv_heads):
    x = normal(1, (*batch, Q_LEN, FEATURES))
    mask = nnx.make_causal_mask(x[..., 0])
    assert mask.dtype == jnp.float32
    # Without biases, because that of the keys has no gradient but rounding errors.
    layers = nnx_layers(
        num_kv_heads=num_kv_heads, dropout_rate=0.5, deterministic=True, use_bias=False
    )

    @nnx.jit
    def run(layer, x):
        def loss(layer, x):
            out = layer(x, mask=mask)
            return (out * normal(2, out.shape)).sum(), out

        (_, out), grads = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
        return out, grads

    ours, flaxs = (run(layer, x) for layer in layers)
    assert_close(ours[0], flaxs[0])
    assert_close(jax.tree.leaves(ours[1]), jax.tree.leaves(flaxs[1]))


def test_nnx_module_is_causal():
    x = normal(1, (2, Q_LEN, FEATURES))
    ours, flaxs = nnx_layers()
    assert_close(ours(x, is_causal=True), flaxs(x, mask=causal_mask(Q_LEN, Q_LEN)[None, None]))


@pytest.mark.parametrize("batch", [pytest.param((), marks=pytest.mark.extended), (2, 3)], ids=str)
def test_linen_module(batch):
    x = normal(1, (*batch, Q_LEN, FEATURES))
    mask = linen.make_causal_mask(x[..., 0])
    assert mask.dtype == jnp.float32
    ours, flaxs, variables = linen_layers(x, dropout_rate=0.5, deterministic=True, use_bias=False)

    def run(layer):
        def out(variables, x):
            return layer.apply(variables, x, mask=mask)

        return output_and_gradients(out, (variables, x), normal(2, x.shape))

    assert_close(run(ours), run(flaxs))


def test_linen_filter_sees_partial_keywords():
    x = normal(1, (2, Q_LEN, FEATURES))
    einsums = dict.fromkeys(
        ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"), lambda: jnp.einsum
    )
    ours, _, variables = linen_layers(x, **einsums)
    with pytest.raises(NotImplementedError, match="`qk_attn_weights_einsum` must be None"):
        ours.apply(variables, x)


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("make", [nnx_layers, linen_layers])
def test_modules_drop_out(make, broadcast):
    # Two equal batch elements stay equal if they share a dropout mask.
    x = jnp.broadcast_to(normal(1, (1, Q_LEN, FEATURES)), (2, Q_LEN, FEATURES))
    options = {"dropout_rate": 0.5, "broadcast_dropout": broadcast}
    if make is nnx_layers:
        layers = make(**options)
        layers[0].train()

        def call(seed=None, **kwargs):
            # As in training, or with random numbers from the outside.
            return layers[0](x, rngs=seed and nnx.Rngs(dropout=seed), **kwargs)

        plain = layers[1](x, deterministic=True)
        assert distance(call(), call()) > 0.1
    else:
        ours, flaxs, variables = make(x, **options, deterministic=False)

        def call(seed, deterministic=False):
            layer = ours.clone(deterministic=deterministic)
            return layer.apply(variables, x, rngs={"dropout": jax.random.key(seed)})

        plain = flaxs.clone(deterministic=True).apply(variables, x)
    out = call(1)
    assert bool((out[0] == out[1]).all()) == broadcast
    assert distance(out, plain) > 0.1
    np.testing.assert_array_equal(call(1), out)
    assert distance(call(2), out) > 0.1
    assert_close(call(1, deterministic=True), plain)


def test_sown_weights_are_those_before_dropout():
    dropped, plain = Sower(), Sower()
    OURS(*qkv(), **DROPOUT, module=dropped)
    OURS(*qkv(), module=plain)
    assert_close(dropped.sown, plain.sown)


def even_keys(b, h, q_pos, k_pos):
    return (k_pos % 2 == 0) | (h == 1) | (b == q_pos)


@pytest.mark.parametrize("batch", [(2, 3)], ids=str)
def test_nnx_module_takes_mask_objects(batch):
    x = normal(1, (*batch, Q_LEN, FEATURES))
    prefix = jnp.arange(math.prod(batch), dtype=jnp.int32) % 4
    mask = pallas_flash.masks.PrefixLM(prefix) & pallas_flash.masks.Predicate(even_keys)
    t = jnp.arange(Q_LEN)
    dense = causal_mask(Q_LEN, Q_LEN) | (t < prefix[:, None, None, None])
    b, h = jnp.arange(prefix.size)[:, None, None, None], jnp.arange(NUM_HEADS)[:, None, None]
    dense = (dense & even_keys(b, h, t[:, None], t)).reshape(*batch, NUM_HEADS, Q_LEN, Q_LEN)
    ours, flaxs = nnx_layers()

    def forward(layer, mask):
        return layer(x, mask=mask, sow_weights=True)

    got, want = (
        nnx.capture(forward, nnx.Intermediate)(layer, m)
        for layer, m in ((ours, mask), (flaxs, dense))
    )
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


def test_nnx_sows_and_keeps_its_output():
    x = normal(1, (2, Q_LEN, FEATURES))

    def forward(layer):
        return layer(x, sow_weights=True)

    ours, flaxs = nnx_layers()
    got, got_sown = nnx.capture(forward, nnx.Intermediate)(ours)
    want, want_sown = nnx.capture(forward, nnx.Intermediate)(flaxs)
    assert_close(got, want)
    assert jax.tree.leaves(want_sown)
    assert_close(got_sown, want_sown)
    np.testing.assert_array_equal(got, ours(x))


def test_linen_sows_and_keeps_its_output():
    x = normal(1, (2, Q_LEN, FEATURES))
    ours, flaxs, variables = linen_layers(x)
    got, want = (
        layer.apply(variables, x, sow_weights=True, mutable=["intermediates"])
        for layer in (ours, flaxs)
    )
    assert want[1]["intermediates"]
    assert_close(got, want)
    np.testing.assert_array_equal(got[0], ours.apply(variables, x))


def every_token(step):
    """The outputs of single tokens, one after the other."""
    return jnp.concatenate([step(t) for t in range(Q_LEN)], axis=1)


@pytest.mark.parametrize(
    ("num_kv_heads", "is_causal"), cases.default([(2, True)], [(2, True), (NUM_HEADS, False)])
)
def test_nnx_decoding_step_by_step(num_kv_heads, is_causal):
    x = normal(1, (2, Q_LEN, FEATURES))
    ours, flaxs = nnx_layers(num_kv_heads=num_kv_heads)
    want = flaxs(x, mask=causal_mask(Q_LEN, Q_LEN)[None, None])
    assert_close(ours(x, is_causal=True), want)
    ours.init_cache(x.shape)
    # Before 0.12.12, Flax passes on `is_causal` of a decoding call.
    step = nnx.jit(lambda layer, token: layer(token, decode=True, is_causal=is_causal))
    assert_close(every_token(lambda t: step(ours, x[:, t : t + 1])), want)


@pytest.mark.parametrize("is_causal", cases.default([True], [True, False]))
def test_linen_decoding_step_by_step(is_causal):
    x = normal(1, (2, Q_LEN, FEATURES))
    _, flaxs, params = linen_layers(x)
    want = flaxs.apply(params, x, mask=causal_mask(Q_LEN, Q_LEN))
    ours, _, variables = linen_layers(x, decode=True)
    ours = ours.clone(attention_fn=functools.partial(OURS, is_causal=is_causal))
    if is_causal:
        assert_close(ours.clone(decode=False).apply(params, x), want)
    cache = variables["cache"]

    @jax.jit
    def apply(cache, token):
        return ours.apply({**params, "cache": cache}, token, mutable=["cache"])

    def step(t):
        nonlocal cache
        out, changed = apply(cache, x[:, t : t + 1])
        cache = changed["cache"]
        return out

    assert_close(every_token(step), want)


def test_decoding_step_joins_masks_of_the_call():
    """Padding in front, as in a batch of prompts that end together; sown weights agree."""
    x = normal(1, (2, Q_LEN, FEATURES))
    padding = jnp.array([0, 2])
    valid = (jnp.arange(Q_LEN) >= padding[:, None])[:, None, None, :]
    ours, flaxs = nnx_layers()
    want = flaxs(x, mask=valid & causal_mask(Q_LEN, Q_LEN))
    ours.init_cache(x.shape)
    forward = nnx.jit(
        nnx.capture(
            lambda layer, token: layer(
                token, mask=valid, decode=True, is_causal=True, sow_weights=True
            ),
            nnx.Intermediate,
        )
    )
    outputs = [forward(ours, x[:, t : t + 1]) for t in range(Q_LEN)]
    got = jnp.concatenate([out for out, _ in outputs], axis=1)
    real = jnp.arange(Q_LEN) >= padding[:, None]
    assert_close(got[real], want[real])
    (last,) = jax.tree.leaves(outputs[-1][1])
    assert last.shape == (2, NUM_HEADS, 1, Q_LEN)
    np.testing.assert_array_equal(last[:, 0, 0] > 0, real)


def test_one_query_with_mask_causal_or_not():
    q, k, v = qkv()
    mask = random_mask((2, 1, 1, KV_LEN), jnp.float32)
    want = linen.dot_product_attention(q[:, :1], k, v, mask=mask)
    assert_close(OURS(q[:, :1], k, v, mask=mask, is_causal=True), want)
