"""`SelfAttention`: against Flax's layer, against its equations, and what it can do besides."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import cases
from support.flax_cases import (
    FEATURES,
    NUM_HEADS,
    Q_LEN,
    assert_close,
    causal_mask,
    distance,
    nnx_layers,
    normal,
    self_attention,
)

import pallas_flash.flax
from pallas_flash.flax import apply_rope

pytestmark = pytest.mark.usefixtures("ieee_products")


@pytest.mark.parametrize(("is_causal", "use_bias"), [(False, True), (True, False)])
def test_module_without_rope_equals_flax(is_causal, use_bias):
    x = normal(1, (2, Q_LEN, FEATURES))
    options = {"num_kv_heads": 2, "use_bias": use_bias}
    layer = self_attention(rope_theta=None, is_causal=is_causal, **options)
    _, flaxs = nnx_layers(**options)
    # Biases start as zeros, which would hide whether they are there.
    params = jax.tree.map(lambda p: p + 0.1 * normal(p.size, p.shape), nnx.state(flaxs))
    assert jax.tree.structure(nnx.state(layer)) == jax.tree.structure(params)
    for module in (layer, flaxs):
        nnx.update(module, params)
    mask = causal_mask(Q_LEN, Q_LEN)[None, None] if is_causal else None
    assert_close(layer(x), flaxs(x, mask=mask))


def test_grouped_heads_are_repeated_heads():
    x = normal(1, (2, Q_LEN, FEATURES))
    grouped, full = self_attention(num_kv_heads=2), self_attention()
    nnx.update(full, nnx.state(grouped, lambda path, _: path[0] in ("query", "out")))
    for name in ("key", "value"):
        kernel = getattr(grouped, name).kernel[...]
        getattr(full, name).kernel[...] = jnp.repeat(kernel, NUM_HEADS // 2, axis=1)
    assert_close(grouped(x), full(x))


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_layer_sows_the_largest_scores(batch):
    """The soft cap bounds the scores, and sowing them changes nothing else."""
    x = normal(1, (*batch, Q_LEN, FEATURES))
    options = dict(num_kv_heads=2, rope_theta=None, logits_soft_cap=0.3)
    layer = self_attention(sow_max_logits=True, **options)
    y, sown = nnx.capture(layer, nnx.Intermediate)(x)
    np.testing.assert_array_equal(y, self_attention(**options)(x))
    q, k = layer.query(x), jnp.repeat(layer.key(x), 2, axis=-2)
    s = jnp.einsum("...tnh,...snh->...nts", q, k) / q.shape[-1] ** 0.5
    s = jnp.where(causal_mask(Q_LEN, Q_LEN), 0.3 * jnp.tanh(s / 0.3), -jnp.inf)
    [max_logits] = sown["max_logits"]
    assert_close(max_logits, s.max((-2, -1)))


@pytest.mark.parametrize("batch", [pytest.param((), marks=pytest.mark.extended), (2, 3)], ids=str)
def test_batch_axes_are_batch_elements(batch):
    layer = self_attention(num_kv_heads=2)
    x = normal(1, (*batch, Q_LEN, FEATURES))
    segment_ids = jnp.asarray([0, 0, 1, 1, 1])
    positions = jnp.arange(math.prod(batch))[:, None] * jnp.asarray([0, 2, 3, 7, 11])
    got = layer(x, segment_ids=segment_ids, positions=positions.reshape(*batch, Q_LEN))
    want = layer(
        x.reshape(-1, Q_LEN, FEATURES),
        segment_ids=jnp.broadcast_to(segment_ids, positions.shape),
        positions=positions,
    )
    assert_close(got, want.reshape(x.shape))


@pytest.mark.parametrize("is_causal", cases.default([False], [False, True]))
def test_packed_sequences_are_separate(is_causal):
    layer = self_attention(is_causal=is_causal)
    x = normal(1, (2, 9, FEATURES))
    documents = x[:, :4], x[:, 4:]
    want = jnp.concatenate([layer(document) for document in documents], axis=1)
    segment_ids = jnp.asarray([7] * 4 + [3] * 5)
    assert_close(layer(x, segment_ids=jnp.broadcast_to(segment_ids, (2, 9))), want)
    restarted = jnp.asarray([*range(4), *range(5)])
    assert_close(layer(x, segment_ids=segment_ids, positions=restarted), want)


def test_only_differences_of_positions_matter():
    layer = self_attention(is_causal=False)
    x = normal(1, (2, Q_LEN, FEATURES))
    positions = jnp.asarray([0, 2, 3, 7, 11])
    want = layer(x, positions=positions)
    assert_close(layer(x, positions=positions + 19), want)
    assert distance(layer(x), want) > 0.01
    assert_close(layer(x, positions=jnp.arange(Q_LEN) + 19), layer(x))
    # Tokens and positions in another order give the same output in that order.
    order = jnp.asarray([3, 0, 4, 1, 2])
    assert_close(layer(x[:, order], positions=positions[order]), want[:, order])


@pytest.mark.parametrize("rope_theta", cases.default([10_000.0], [10_000.0, None]))
def test_balanced_order_in_layer(rope_theta):
    layer = self_attention(local_window_size=5, rope_theta=rope_theta)
    x = normal(1, (2, 3, 16, FEATURES))
    segment_ids = jnp.asarray([7] * 5 + [3] * 11)
    want = layer(x, segment_ids=segment_ids)
    order = pallas_flash.masks.balanced_order(16, 2)
    # One for each sequence of a batch axis, and one for all.
    for positions in (order, jnp.broadcast_to(order.astype(jnp.int16), (2, 1, 16))):
        got = layer(
            x[..., order, :], positions=positions, segment_ids=segment_ids[order], reordered=True
        )
        assert_close(got, want[..., order, :])


def test_causal_module_sees_no_later_token():
    layer = self_attention()
    x = normal(1, (2, Q_LEN, FEATURES))
    out, changed = layer(x), layer(x.at[:, 3].add(1.0))
    assert_close(changed[:, :3], out[:, :3])
    assert all(distance(changed[:, t], out[:, t]) > 0.01 for t in (3, 4))


def test_transformed_module_is_the_module():
    layer = self_attention(num_kv_heads=2)
    x = normal(1, (2, Q_LEN, FEATURES))
    segment_ids = jnp.asarray([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])

    def forward(layer, x):
        return layer(x, segment_ids=segment_ids)

    def run(forward):
        def loss(layer, x):
            return (forward(layer, x) * normal(2, x.shape)).sum()

        return jax.tree.leaves(nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(layer, x))

    want = run(forward)
    assert_close(run(nnx.remat(forward)), want)
    assert_close((forward(layer, x) * normal(2, x.shape)).sum(), want[0])


@pytest.mark.parametrize(
    ("dtype", "x_dtype", "want"),
    [
        (None, jnp.float32, jnp.float32),
        (None, jnp.bfloat16, jnp.float32),
        (jnp.bfloat16, jnp.float32, jnp.bfloat16),
    ],
)
def test_computation_dtype(monkeypatch, dtype, x_dtype, want):
    seen = []

    def spy(query, key, value, bias, mask, **kwargs):
        seen.extend(x.dtype for x in (query, key, value))
        return query

    monkeypatch.setattr(pallas_flash.flax._layer, "attention", spy)
    layer = self_attention(dtype=dtype)
    out = jax.eval_shape(layer, jax.ShapeDtypeStruct((2, Q_LEN, FEATURES), x_dtype))
    assert [*seen, out.dtype] == [want] * 4
    assert layer.query.kernel.dtype == jnp.float32


def test_module_options_reach_attention(monkeypatch):
    seen = {}

    def spy(query, key, value, bias, mask, **kwargs):
        seen.update(kwargs, shapes=(query.shape, key.shape, value.shape))
        return query

    monkeypatch.setattr(pallas_flash.flax._layer, "attention", spy)
    layer = self_attention(
        num_kv_heads=2,
        head_dim=6,
        is_causal=False,
        precision="high",
        implementation="xla",
        reproducible=True,
        batch_invariant=True,
        context_parallelism="heads",
    )
    layer(normal(1, (2, 3, Q_LEN, FEATURES)))
    nothing = dict.fromkeys(
        (
            "query_seq_lengths",
            "key_value_seq_lengths",
            "local_window_size",
            "segment_ids",
            "query_positions",
            "key_value_positions",
            "scale",
            "logits_soft_cap",
            "sinks",
            "dropout_key",
            "sequence_axis",
        )
    )
    assert seen == {
        **nothing,
        "is_causal": False,
        "dropout_rate": 0.0,
        "broadcast_dropout": True,
        "precision": "high",
        "implementation": "xla",
        "reproducible": True,
        "batch_invariant": True,
        "context_parallelism": "heads",
        "return_max_logits": False,
        "shapes": ((6, Q_LEN, NUM_HEADS, 6), (6, Q_LEN, 2, 6), (6, Q_LEN, 2, 6)),
    }


# Options of SelfAttention, against its equations.

TOKENS = 9
SEQ_LENGTHS = jnp.asarray([[9], [4]], jnp.int32)


@dataclasses.dataclass
class Variant:
    """Options of the layer and of the call, and which (query, key) pairs they leave."""

    layer: dict[str, Any] = dataclasses.field(default_factory=dict)
    call: dict[str, Any] = dataclasses.field(default_factory=dict)
    visible: Callable = lambda t, s: True


VARIANTS = {
    "QK norm": Variant({"normalize_qk": True}),
    "window": Variant(
        {"local_window_size": (2, 1)}, visible=lambda t, s: (s >= t - 2) & (s <= t + 1)
    ),
    "causal window": Variant(
        {"local_window_size": (2, None), "is_causal": True},
        visible=lambda t, s: (s >= t - 2) & (s <= t),
    ),
    "soft cap": Variant({"logits_soft_cap": 0.5}),
    "sinks": Variant({"use_sinks": True}),
    "bias": Variant(call={"bias": normal(8, (1, NUM_HEADS, 1, TOKENS))}),
    "bias of an example": Variant(call={"bias": normal(8, (2, 1, NUM_HEADS, TOKENS, TOKENS))}),
    "mask": Variant(
        call={"mask": (jnp.arange(TOKENS) % 3 != 1).astype(jnp.float32)[None]},
        visible=lambda t, s: s % 3 != 1,
    ),
    "mask object": Variant(
        call={"mask": pallas_flash.masks.PrefixLM(jnp.full(6, 5, jnp.int32))},
        visible=lambda t, s: (s <= t) | (s < 5),
    ),
    "lengths": Variant(
        call={"seq_lengths": SEQ_LENGTHS},
        visible=lambda t, s: jnp.maximum(t, s) < SEQ_LENGTHS[..., None, None, None],
    ),
    "everything": Variant(
        {
            "normalize_qk": True,
            "local_window_size": 3,
            "is_causal": True,
            "logits_soft_cap": 2.0,
            "use_sinks": True,
            "num_kv_heads": 2,
        },
        {
            "bias": normal(8, (NUM_HEADS, TOKENS, TOKENS)),
            "mask": jnp.arange(TOKENS) % 3 != 1,
            "seq_lengths": SEQ_LENGTHS,
            "segment_ids": jnp.arange(TOKENS, dtype=jnp.int32) // 5,
        },
        lambda t, s: (
            (s >= t - 3)
            & (s <= t)
            & (s % 3 != 1)
            & (s // 5 == t // 5)
            & (jnp.maximum(t, s) < SEQ_LENGTHS[..., None, None, None])
        ),
    ),
}


def by_equations(layer, x, visible, bias=None):
    """The layer, dense and spelled out."""
    q, k, v = layer.query(x), layer.key(x), layer.value(x)
    if layer.query_norm is not None:
        q, k = (
            y / jnp.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * norm.scale[...]
            for y, norm in ((q, layer.query_norm), (k, layer.key_norm))
        )
    positions = jnp.arange(x.shape[-2])
    q, k = (apply_rope(y, positions) for y in (q, k))
    k, v = (jnp.repeat(y, q.shape[-2] // y.shape[-2], -2) for y in (k, v))
    s = jnp.einsum("...tnh,...snh->...nts", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        s = s + bias
    if (cap := layer.logits_soft_cap) is not None:
        s = cap * jnp.tanh(s / cap)
    p = jnp.where(visible, jnp.exp(s), 0)
    total = p.sum(-1, keepdims=True)
    if layer.sinks is not None:
        total = total + jnp.exp(layer.sinks[...])[:, None, None]
    p = p / jnp.where(p.any(-1, keepdims=True), total, 1)
    return layer.out(jnp.einsum("...nts,...snv->...tnv", p, v))


# The last one has what the others leave out.
CHOSEN = ["QK norm", "window", "sinks", "bias of an example", "mask object", "everything"]


@pytest.mark.parametrize("name", cases.default(CHOSEN, VARIANTS))
def test_variant_is_its_equations(name):
    variant = VARIANTS[name]
    x = normal(1, (2, 3, TOKENS, FEATURES))
    layer = self_attention(**{"is_causal": False} | variant.layer)
    # Scales start as ones and sinks as zeros, which would hide much.
    params = jax.tree.map(lambda p: p + 0.3 * normal(p.size, p.shape), nnx.state(layer, nnx.Param))
    nnx.update(layer, params)
    visible = variant.visible(jnp.arange(TOKENS)[:, None], jnp.arange(TOKENS))
    bias = variant.call.get("bias")
    rest = {key: value for key, value in variant.call.items() if key != "bias"}

    def run(forward):
        def loss(layer, x, bias):
            out = forward(layer, x, bias)
            return (out * normal(2, out.shape)).sum(), out

        argnums = (0, 1) if bias is None else (0, 1, 2)
        grad = nnx.value_and_grad(loss, argnums=argnums, has_aux=True)
        (_, out), grads = nnx.jit(grad)(layer, x, bias)
        return out, jax.tree.map(jnp.asarray, jax.tree.leaves(grads)), grads[0]

    got = run(lambda layer, x, bias: layer(x, bias=bias, **rest))
    want = run(lambda layer, x, bias: by_equations(layer, x, visible, bias))
    assert_close(got[:2], want[:2])
    learned = {path[0] for path, _ in nnx.to_flat_state(got[2])}
    for option, names in (("normalize_qk", {"query_norm", "key_norm"}), ("use_sinks", {"sinks"})):
        assert (names <= learned) == bool(variant.layer.get(option))
    assert all(float(jnp.abs(g).max()) > 0 for g in got[1])


class Halves(nnx.Module):
    """A norm without a mean; it is made as `nnx.RMSNorm` is."""

    def __init__(self, size, *, dtype, param_dtype, rngs):
        self.scale = nnx.Param(jnp.full(size, 0.5, param_dtype))

    def __call__(self, x):
        return self.scale[...] * x


def test_parts_of_ones_own_replace_the_layers():
    """Maps, norms, rotary rule, scale, biases and attention; the cache serves them, too."""
    made, called = [], []

    def linear(*sizes, **options):
        made.append(sizes)
        return nnx.LinearGeneral(*sizes, **options)

    def attention(*arrays, **options):
        called.append(options["scale"])
        return pallas_flash.attention(*arrays, **options)

    def rope(x, positions):
        return apply_rope(x, positions, 500.0)

    x, options = normal(1, (2, Q_LEN, FEATURES)), dict(use_bias=True, use_out_bias=False)
    parts = dict(linear=linear, norm=Halves, rope=rope, scale=0.3, attention=attention)
    layer = self_attention(normalize_qk=True, **parts, **options)
    heads = NUM_HEADS, FEATURES // NUM_HEADS
    assert made == [*[(FEATURES, heads)] * 3, (heads, FEATURES)]
    assert layer.query.bias is not None and layer.out.bias is None
    # Two halves of the scores are a quarter.
    same = self_attention(rope_theta=500.0, scale=0.3 / 4, **options)
    nnx.update(same, nnx.state(layer, lambda path, _: path[0] in ("query", "key", "value", "out")))
    want = same(x)
    assert_close(layer(x), want)
    assert called == [0.3]
    layer.init_cache(x.shape)
    assert_close(
        jnp.concatenate([layer(x[:, :3], decode=True), layer(x[:, 3:], decode=True)], 1), want
    )
    assert called == [0.3]


def test_options_that_are_off_leave_no_parameters():
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(self_attention()))]
    assert {path[0] for path in paths} == {"query", "key", "value", "out"}


def test_sinks_initializer():
    layer = self_attention(use_sinks=True, sinks_init=nnx.initializers.constant(3.0))
    np.testing.assert_array_equal(layer.sinks[...], [3.0] * NUM_HEADS)
    assert not self_attention(use_sinks=True).sinks[...].any()


@pytest.mark.parametrize("broadcast", cases.default([None], [None, False]))
def test_module_drops_out_in_training(broadcast):
    x = jnp.broadcast_to(normal(1, (1, Q_LEN, FEATURES)), (2, Q_LEN, FEATURES))
    options = {} if broadcast is None else {"broadcast_dropout": broadcast}
    layer, plain = self_attention(dropout_rate=0.5, **options), self_attention()(x)
    step = nnx.jit(lambda layer, x: layer(x))
    layer.eval()
    assert_close(step(layer, x), plain)
    assert_close(nnx.view(self_attention(dropout_rate=0.5), deterministic=True)(x), plain)
    layer.train()
    first, second = step(layer, x), step(layer, x)
    assert distance(first, second) > 0.1
    assert distance(first, plain) > 0.1
    assert bool((first[0] == first[1]).all()) == (broadcast is None)
    # The call decides before the layer does, and its random numbers are those it is given.
    assert_close(layer(x, deterministic=True), plain)
    streams = nnx.Rngs(dropout=1), nnx.Rngs(dropout=1).dropout, nnx.Rngs(dropout=1).dropout()
    a, b, c = (layer(x, rngs=rngs) for rngs in streams)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, c)
    layer.eval()
    np.testing.assert_array_equal(a, layer(x, rngs=nnx.Rngs(dropout=1), deterministic=False))


def test_remat_repeats_dropout():
    layer = self_attention(dropout_rate=0.5, deterministic=False)
    x, key = normal(1, (2, Q_LEN, FEATURES)), jax.random.key(4)

    def gradient(wrap):
        forward = wrap(lambda x: (layer(x, rngs=key) * x).sum())
        return jax.jit(jax.grad(forward))(x)

    assert_close(gradient(jax.checkpoint), gradient(lambda f: f))


def test_dropout_stream_is_kept_where_needed():
    assert self_attention().rngs is None
    assert self_attention(dropout_rate=0.5, keep_rngs=False).rngs is None
    rngs = nnx.Rngs(0)
    kept = self_attention(dropout_rate=0.5, rngs=rngs).rngs
    assert isinstance(kept, nnx.RngStream)
    assert kept is not rngs.dropout


def test_initializers():
    ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
    layer = self_attention(kernel_init=ones)
    leaves = jax.tree.leaves(nnx.state(layer, nnx.Param))
    assert leaves and all((x == 1).all() for x in leaves)
    layer = self_attention(kernel_init=ones, out_kernel_init=zeros)
    assert (layer.value.kernel[...] == 1).all()
    assert not layer.out.kernel[...].any()
