import dataclasses
import functools
import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import cases
import flax.linen.attention
import flax.nnx.nn.attention
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxprs import trace
from strict import strictly

import pallas_flash.flax
from pallas_flash.flax import SelfAttention, apply_rope, attention_fn
from pallas_flash.flax._arrays import merge_batch

# No two sizes agree, so a swapped axis cannot pass unseen.
Q_LEN, KV_LEN, NUM_HEADS, HEAD_DIM, V_DIM = 5, 7, 4, 8, 6
FEATURES = NUM_HEADS * HEAD_DIM

# The same on every machine; what the automatic choice takes is tested with SelfAttention.
OURS = functools.partial(attention_fn, implementation="xla")


@pytest.fixture(autouse=True)
def ieee_products():
    # TF32 on a GPU would hide in its own error what these tests look for.
    with jax.default_matmul_precision("highest"):
        yield


def normal(seed: int, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(batch=(2,), dtype=jnp.float32, num_kv_heads=NUM_HEADS, v_dim=HEAD_DIM):
    return (
        normal(1, (*batch, Q_LEN, NUM_HEADS, HEAD_DIM), dtype),
        normal(2, (*batch, KV_LEN, num_kv_heads, HEAD_DIM), dtype),
        normal(3, (*batch, KV_LEN, num_kv_heads, v_dim), dtype),
    )


def random_mask(shape: tuple[int, ...], dtype=jnp.bool_) -> jax.Array:
    mask = np.random.default_rng(4).random(shape) < 0.5
    # Every query sees key 0, because a query that sees nothing is where Flax differs.
    mask[..., 0] = True
    return jnp.asarray(mask, dtype)


def causal_mask(q_len: int = Q_LEN, kv_len: int = KV_LEN) -> jax.Array:
    return jnp.tril(jnp.ones((q_len, kv_len), bool))


def distance(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def assert_close(got, want) -> None:
    """Same structure, shapes and dtypes, and half of the digits of the dtype agree."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert distance(a, b) < math.sqrt(jnp.finfo(b.dtype).eps)


def assert_as_exact_as(got, want, exact) -> None:
    """Same shapes and dtypes as `want`, and at most twice its error (or two roundings)."""
    for a, b, c in zip(*map(jax.tree.leaves, (got, want, exact)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert distance(a, c) <= 2 * max(distance(b, c), float(jnp.finfo(b.dtype).eps))


def output_and_gradients(fn: Callable, arrays: tuple, cotangent: jax.Array):
    @jax.jit
    def run(arrays, cotangent):
        out, pull = jax.vjp(fn, *arrays)
        return out, pull(cotangent.astype(out.dtype))

    return run(arrays, cotangent)


# attention_fn against Flax's functions


@pytest.mark.parametrize(
    ("batch", "mask_axes", "mask_dtype", "bias_axes", "is_causal"),
    [
        ((), "bnts", jnp.bool_, None, False),
        ((2,), None, None, None, False),
        ((2,), "b11s", jnp.float32, "1n1s", True),
        ((2, 3), "ts", jnp.int32, "bnts", False),
        ((3, 1, 2), "b1t1", jnp.float32, "n1s", True),
    ],
)
def test_output_and_gradients_are_flaxs(batch, mask_axes, mask_dtype, bias_axes, is_causal):
    sizes = {"n": (NUM_HEADS,), "t": (Q_LEN,), "s": (KV_LEN,), "1": (1,)}
    # "b" stands for all batch axes; of several, the first one is left to broadcasting.
    sizes["b"] = (1, *batch[1:]) if len(batch) > 1 else batch

    def shape(axes):
        return sum((sizes[axis] for axis in axes), ())

    arrays = qkv(batch, v_dim=V_DIM)
    if bias_axes:
        arrays += (normal(5, shape(bias_axes)),)
    mask = random_mask(shape(mask_axes), mask_dtype) if mask_axes else None
    cotangent = normal(6, (*batch, Q_LEN, NUM_HEADS, V_DIM))

    def ours(*arrays):
        return OURS(*arrays, mask=mask, is_causal=is_causal)

    full_mask = mask
    if is_causal:
        full_mask = causal_mask() if mask is None else (mask != 0) & causal_mask()

    def flaxs(*arrays):
        return linen.dot_product_attention(*arrays, mask=full_mask)

    got = output_and_gradients(ours, arrays, cotangent)
    want = output_and_gradients(flaxs, arrays, cotangent)
    with jax.enable_x64(True):
        exact = output_and_gradients(flaxs, tuple(x.astype(jnp.float64) for x in arrays), cotangent)
    assert_as_exact_as(got, want, exact)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_as_exact_as_flaxs(dtype):
    arrays = qkv(dtype=dtype)
    with jax.enable_x64(True):
        exact = linen.dot_product_attention(*(x.astype(jnp.float64) for x in arrays))
    assert_as_exact_as(OURS(*arrays), linen.dot_product_attention(*arrays), exact)


@pytest.mark.parametrize("flax_fn", [linen.dot_product_attention, nnx.dot_product_attention])
@pytest.mark.parametrize(
    ("dtypes", "dtype"),
    [
        (("float32", "bfloat16", "bfloat16"), None),
        (("float16", "bfloat16", "float16"), None),
        (("bfloat16", "bfloat16", "bfloat16"), None),
        (("int32", "int32", "int32"), None),
        (("float32", "float32", "float32"), jnp.bfloat16),
        (("bfloat16", "float16", "int8"), jnp.float32),
    ],
)
def test_dtypes_promote_as_in_flax(flax_fn, dtypes, dtype):
    arrays = [jax.ShapeDtypeStruct(x.shape, name) for x, name in zip(qkv(), dtypes, strict=True)]
    got = jax.eval_shape(functools.partial(OURS, dtype=dtype), *arrays)
    want = jax.eval_shape(functools.partial(flax_fn, dtype=dtype), *arrays)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)


def test_grouped_heads_are_nnxs():
    arrays = qkv(num_kv_heads=2)
    assert_close(OURS(*arrays), nnx.dot_product_attention(*arrays))


def test_a_query_that_sees_nothing_gives_zeros():
    arrays = qkv()
    mask = jnp.ones((Q_LEN, KV_LEN)).at[2].set(0.0)
    out, grads = output_and_gradients(
        functools.partial(OURS, mask=mask), arrays, normal(6, arrays[0].shape)
    )
    assert not out[:, 2].any()
    assert not grads[0][:, 2].any()
    assert all(bool(jnp.isfinite(g).all()) for g in grads)
    seen = jnp.arange(Q_LEN) != 2
    assert_close(out[:, seen], linen.dot_product_attention(*arrays, mask=mask)[:, seen])


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=6), st.data())
def test_merged_batch_axes_broadcast_as_before(axes, data):
    axes = [(1, False)] * (3 - len(axes)) + axes
    full = tuple(size for size, _ in axes)
    shape = tuple(1 if squeezed else size for size, squeezed in axes)
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    # Leading axes of size 1 may also be left out.
    leading = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    x = x.reshape(shape[data.draw(st.integers(0, leading)) :])

    merged = np.asarray(merge_batch(x, full[:-3]))
    assert merged.shape[1:] == shape[-3:]
    flat = (math.prod(full[:-3]), *full[-3:])
    np.testing.assert_array_equal(
        np.broadcast_to(merged, flat), np.broadcast_to(x, full).reshape(flat)
    )


# Every keyword of Flax's functions


class Sower:
    """Stands for a module of linen or nnx: keeps what is sown."""

    def __init__(self):
        self.sown = {}

    def sow(self, collection, name, value):
        self.sown[name] = value


def rope_by_hand(x, positions=None):
    """A rotary module in Flax's layout: x [..., T, H], positions [T]."""
    positions = jnp.arange(x.shape[-2]) if positions is None else positions
    return apply_rope(x[..., None, :], positions)[..., 0, :]


def to_bfloat16(arrays, dtype=None):
    return tuple(x.astype(jnp.bfloat16) for x in arrays)


POSITIONS = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
DROPOUT = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}


@dataclasses.dataclass
class Keyword:
    """How `attention_fn` treats a keyword of Flax: refused, or the same as in Flax."""

    kwargs: dict[str, Any]
    refused: bool = False
    changes_output: bool = True
    equals_flax: bool = True


KEYWORDS = {
    "bias": Keyword({"bias": normal(5, (1, NUM_HEADS, Q_LEN, Q_LEN))}),
    "mask": Keyword({"mask": random_mask((2, NUM_HEADS, Q_LEN, Q_LEN), jnp.float32)}),
    "is_causal": Keyword({"is_causal": True}),
    "dtype": Keyword({"dtype": jnp.bfloat16}),
    "promote_dtype": Keyword({"promote_dtype": to_bfloat16}),
    "precision": Keyword({"precision": jax.lax.Precision.HIGHEST}, changes_output=False),
    "module": Keyword({"module": Sower()}, changes_output=False),
    "force_fp32_for_softmax": Keyword({"force_fp32_for_softmax": True}, changes_output=False),
    "rope": Keyword({"rope": rope_by_hand}),
    # nnx 0.12.12 maps the positions along the head axis: test_rope_hook_... has the right answer.
    "input_positions": Keyword(
        {"rope": rope_by_hand, "input_positions": POSITIONS}, equals_flax=False
    ),
    # Other random numbers: what must agree is in test_dropout_...
    "dropout_rate": Keyword(DROPOUT, equals_flax=False),
    "deterministic": Keyword({"dropout_rate": 0.5, "deterministic": True}, changes_output=False),
    "dropout_rng": Keyword({"dropout_rng": jax.random.key(0)}, changes_output=False),
    "broadcast_dropout": Keyword({"broadcast_dropout": False, **DROPOUT}, equals_flax=False),
    "einsum_dot_general": Keyword({"einsum_dot_general": jax.lax.dot_general}, refused=True),
    "qk_attn_weights_einsum": Keyword({"qk_attn_weights_einsum": jnp.einsum}, refused=True),
    "attn_weights_value_einsum": Keyword({"attn_weights_value_einsum": jnp.einsum}, refused=True),
}

FLAX_FUNCTIONS = [
    value
    for module in (flax.linen.attention, flax.nnx.nn.attention)
    for name, value in vars(module).items()
    if name.startswith("dot_product_attention") and not name.endswith("_weights")
]


def keywords(fn: Callable) -> set[str]:
    named = {
        name
        for name, parameter in inspect.signature(fn).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    return named - {"query", "key", "value"}


@pytest.mark.parametrize("name", sorted(set().union(*map(keywords, FLAX_FUNCTIONS))))
def test_keyword_of_flax_is_honoured_or_refused(name):
    assert name in KEYWORDS, f"`{name}` is new in Flax: honour or refuse it, and say so in KEYWORDS"
    keyword = KEYWORDS[name]
    assert set(keyword.kwargs) <= keywords(attention_fn)
    query, _, value = qkv()
    # Rotary positions are those of self-attention, so key and query are equally long here.
    arrays = (query, normal(2, query.shape), value[:, :Q_LEN])

    if keyword.refused:
        with pytest.raises(NotImplementedError, match=f"`{name}` must be .*; got .*Use Flax's"):
            OURS(*arrays, **keyword.kwargs)
        return

    out = OURS(*arrays, **keyword.kwargs)
    plain = OURS(*arrays)
    changed = out.dtype != plain.dtype or distance(out, plain) > 0.01
    assert changed == keyword.changes_output
    for flax_fn in FLAX_FUNCTIONS:
        if keyword.equals_flax and set(keyword.kwargs) <= keywords(flax_fn):
            assert_close(out, flax_fn(*arrays, **keyword.kwargs))


def test_keywords_lists_only_what_exists():
    assert set(KEYWORDS) <= keywords(attention_fn)
    assert keywords(attention_fn) - set(KEYWORDS) == {"implementation", "reproducible"}


def test_linen_and_nnx_give_positional_arguments_the_same_meaning():
    ours = list(inspect.signature(attention_fn).parameters.values())
    ours = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    for flax_fn in (linen.dot_product_attention, nnx.dot_product_attention):
        assert list(inspect.signature(flax_fn).parameters)[: len(ours)] == ours


def test_what_attention_decides_reaches_it(monkeypatch):
    seen = {}

    def spy(query, key, value, bias, mask, **kwargs):
        seen.update(kwargs)
        return query

    monkeypatch.setattr(pallas_flash.flax._drop_in, "attention", spy)
    wanted = {"is_causal": True, "precision": jax.lax.Precision.HIGH, "implementation": "xla"}
    wanted["reproducible"] = True
    dropout = {"dropout_rate": 0.25, "broadcast_dropout": False}
    attention_fn(*qkv(), **wanted, **dropout, dropout_rng=5)
    assert seen == {**wanted, **dropout, "dropout_key": 5}
    attention_fn(*qkv(), **wanted, dropout_rate=0.25, deterministic=True)
    off = {"dropout_rate": 0.0, "broadcast_dropout": True, "dropout_key": None}
    assert seen == {**wanted, **off}


@pytest.mark.parametrize("precision", [None, "high", jax.lax.Precision.HIGHEST], ids=str)
def test_products_have_flaxs_precision(precision):
    """By the program: a CPU computes all of them alike."""

    def precisions(fn):
        eqns = trace(functools.partial(fn, precision=precision), *qkv())
        return {e.params["precision"] for e in eqns if e.primitive.name == "dot_general"}

    # Not the suite's: it would be the default of what has none.
    with jax.default_matmul_precision("default"):
        ours = precisions(OURS)
        assert ours == precisions(linen.dot_product_attention)
    assert len(ours) == 1


# Dropout


def dropped_weights(fn, batch, **kwargs):
    """The weights with dropout and without, [*batch, N, T, S]: v is the identity matrix."""
    q, k, _ = qkv(batch)
    q, k = (jnp.tile(x, (*[1] * (x.ndim - 3), 8, 1, 1)) for x in (q, k))
    v = jnp.broadcast_to(jnp.eye(k.shape[-3])[:, None], (*k.shape[:-1], k.shape[-3]))
    kwargs |= {"dropout_rate": 0.25, "dropout_rng": jax.random.key(3)}
    got = jax.jit(functools.partial(fn, **kwargs))(q, k, v)
    return jnp.moveaxis(got, -2, -3), linen.dot_product_attention_weights(q, k)


@pytest.mark.parametrize(("batch", "broadcast"), [((2, 3), None), ((2,), False)], ids=str)
@pytest.mark.parametrize("fn", [OURS, linen.dot_product_attention, nnx.dot_product_attention])
def test_dropout_has_flaxs_statistics(fn, broadcast, batch):
    kwargs = {} if broadcast is None else {"broadcast_dropout": broadcast}
    weights, plain = dropped_weights(fn, batch, **kwargs)
    kept = weights > 0
    assert_close(jnp.where(kept, plain / 0.75, 0), weights)
    if broadcast is None:
        each = kept.reshape(-1, *kept.shape[-2:])
        assert (each == each[0]).all()
        kept = each[0]
    # The share of n independent draws lies outside of this once in 15000 times; no axis is fixed.
    sigma = (0.25 * 0.75 / kept.size) ** 0.5
    assert abs(kept.mean() - 0.75) < 4 * sigma
    for axis in range(kept.ndim):
        assert 0 < jnp.diff(kept.astype(int), axis=axis).astype(bool).mean() < 1


@pytest.mark.parametrize("broadcast", [False, True])
def test_dropout_mask_tells_what_is_dropped(broadcast):
    """All batch axes count as one, and the gradients drop the same."""
    batch, key, rate = (2, 3), jax.random.key(7), 0.4
    arrays = qkv(batch, v_dim=V_DIM)
    shape = (1, 1) if broadcast else (math.prod(batch), NUM_HEADS)
    keep = pallas_flash.dropout_mask(key, (*shape, Q_LEN, KV_LEN), rate)
    if not broadcast:
        keep = keep.reshape(*batch, *keep.shape[1:])

    def dense(q, k, v):
        weights = linen.dot_product_attention_weights(q, k)
        weights = jnp.where(keep, weights / (1 - rate), 0)
        return jnp.einsum("...nts,...snv->...tnv", weights, v)

    ours = functools.partial(OURS, dropout_rate=rate, dropout_rng=key, broadcast_dropout=broadcast)
    cotangent = normal(6, (*batch, Q_LEN, NUM_HEADS, V_DIM))
    got = output_and_gradients(ours, arrays, cotangent)
    assert_close(got, output_and_gradients(dense, arrays, cotangent))


def test_dropout_depends_on_its_key_alone():
    def out(key, **kwargs):
        return np.asarray(OURS(*qkv(), dropout_rate=0.5, dropout_rng=key, **kwargs))

    want = out(jax.random.key(1))
    np.testing.assert_array_equal(out(jax.random.key(1)), want)
    np.testing.assert_array_equal(out(jax.random.PRNGKey(1)), want)
    np.testing.assert_array_equal(out(nnx.Rngs(dropout=1).dropout.key[...]), want)
    assert distance(out(jax.random.key(2)), want) > 0.1
    for key in (jax.random.key(1), None):
        np.testing.assert_array_equal(out(key, deterministic=True), OURS(*qkv()))


ROPES = [rope_by_hand] + ([nnx.RoPE()] if hasattr(nnx, "RoPE") else [])


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: type(rope).__name__)
@pytest.mark.parametrize("positions", [None, POSITIONS[0], POSITIONS], ids=["none", "t", "bt"])
def test_rope_hook_turns_queries_and_keys(rope, positions):
    q, _, _ = qkv()
    k, v = normal(2, q.shape), normal(3, q.shape)
    explicit = jnp.arange(Q_LEN) if positions is None else positions
    want = OURS(apply_rope(q, explicit), apply_rope(k, explicit), v)
    assert_close(OURS(q, k, v, rope=rope, input_positions=positions), want)


@pytest.mark.parametrize("num_kv_heads", [2, NUM_HEADS])
def test_sown_weights_belong_to_the_output(num_kv_heads):
    q, k, v = qkv((2, 3), num_kv_heads=num_kv_heads)
    sower = Sower()
    mask = random_mask((2, 3, 1, 1, KV_LEN))
    out = OURS(q, k, v, normal(5, (Q_LEN, KV_LEN)), mask, module=sower, is_causal=True)
    weights = sower.sown["attention_weights"]
    assert weights.shape == (2, 3, NUM_HEADS, Q_LEN, KV_LEN)
    v = jnp.repeat(v, NUM_HEADS // num_kv_heads, axis=-2)
    assert_close(jnp.einsum("...nts,...snv->...tnv", weights, v), out)


EXAMPLES = 6  # Batch axes (2, 3), which count as one in mask objects.
PREFIXES = jnp.arange(EXAMPLES, dtype=jnp.int32)
PER_HEAD = random_mask((1, NUM_HEADS, Q_LEN, KV_LEN))
DOCUMENTS = tuple(
    jnp.tile(jnp.arange(length, dtype=jnp.int32) // 4, (EXAMPLES, 1)) for length in (Q_LEN, KV_LEN)
)
SEEN = {
    "prefix": causal_mask() | (jnp.arange(KV_LEN) < PREFIXES[:, None, None, None]),
    "documents": DOCUMENTS[0][:, None, :, None] == DOCUMENTS[1][:, None, None, :],
    "array": PER_HEAD,
}
PREFIX, PACKED = pallas_flash.PrefixLM(PREFIXES), pallas_flash.Segments(*DOCUMENTS)
JOINED = {
    "object and array": (PREFIX & PER_HEAD, ("prefix", "array")),
    "array and two objects": (PER_HEAD & (PACKED & PREFIX), ("array", "documents", "prefix")),
    "blocks": (
        pallas_flash.BlockMask.from_mask(PACKED & PER_HEAD, Q_LEN, KV_LEN, block_q=2, block_kv=3),
        ("documents", "array"),
    ),
    "blocks and object": (
        pallas_flash.BlockMask.from_mask(PER_HEAD, Q_LEN, KV_LEN, block_q=2, block_kv=3) & PACKED,
        ("array", "documents"),
    ),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", JOINED)
def test_sown_weights_of_joined_masks_are_dense_ones(name, is_causal):
    mask, parts = JOINED[name]
    if is_causal and "prefix" in parts:
        mask, parts = PACKED & PER_HEAD, ("documents", "array")
    q, k, v = qkv((2, 3))
    bias, sower = normal(5, (NUM_HEADS, 1, KV_LEN)), Sower()
    OURS(q, k, v, bias, mask, module=sower, is_causal=is_causal)
    seen = functools.reduce(jnp.logical_and, [SEEN[part] for part in parts])
    seen = seen & causal_mask() if is_causal else seen
    scores = jnp.einsum("...tnh,...snh->...nts", q, k) / math.sqrt(HEAD_DIM) + bias
    seen = jnp.broadcast_to(seen, (EXAMPLES, *scores.shape[2:])).reshape(scores.shape)
    # Flax's weights of a query that sees nothing are those of equal scores.
    want = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    assert not seen.all()
    assert_close(sower.sown["attention_weights"], want)


@pytest.mark.parametrize("force", [False, True])
def test_sown_weights_have_flaxs_dtype(force):
    ours, flaxs = Sower(), Sower()
    for fn, sower in ((OURS, ours), (linen.dot_product_attention, flaxs)):
        fn(*qkv(dtype=jnp.bfloat16), module=sower, force_fp32_for_softmax=force)
    assert_close(ours.sown, flaxs.sown)


# attention_fn in Flax's modules


def nnx_layers(**kwargs):
    """One nnx layer with our attention and one with Flax's, parameters the same."""
    make = functools.partial(
        nnx.MultiHeadAttention, NUM_HEADS, FEATURES, **{"decode": False} | kwargs
    )
    return make(attention_fn=OURS, rngs=nnx.Rngs(0)), make(rngs=nnx.Rngs(0))


def linen_layers(x, **kwargs):
    """One linen layer with our attention and one with Flax's, and parameters for both."""
    make = functools.partial(linen.MultiHeadDotProductAttention, NUM_HEADS, **kwargs)
    ours, flaxs = make(attention_fn=OURS), make()
    return ours, flaxs, flaxs.init(jax.random.key(0), x)


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


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
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


def test_linens_filter_hides_nothing_from_a_partial():
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
    # Two examples that are alike stay alike where they share a dropout mask.
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
    mask = pallas_flash.PrefixLM(prefix) & pallas_flash.Predicate(even_keys)
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


@pytest.mark.parametrize("num_kv_heads", [2, NUM_HEADS])
def test_nnx_decoding_step_by_step(num_kv_heads):
    x = normal(1, (2, Q_LEN, FEATURES))
    ours, flaxs = nnx_layers(num_kv_heads=num_kv_heads)
    want = flaxs(x, mask=causal_mask(Q_LEN, Q_LEN)[None, None])
    ours.init_cache(x.shape)
    step = nnx.jit(lambda layer, token: layer(token, decode=True))
    got = jnp.concatenate([step(ours, x[:, t : t + 1]) for t in range(Q_LEN)], axis=1)
    assert_close(got, want)


def test_linen_decoding_step_by_step():
    x = normal(1, (2, Q_LEN, FEATURES))
    _, flaxs, params = linen_layers(x)
    want = flaxs.apply(params, x, mask=causal_mask(Q_LEN, Q_LEN))
    ours, _, variables = linen_layers(x, decode=True)
    cache = variables["cache"]

    @jax.jit
    def step(cache, token):
        return ours.apply({**params, "cache": cache}, token, mutable=["cache"])

    got = []
    for t in range(Q_LEN):
        out, changed = step(cache, x[:, t : t + 1])
        cache = changed["cache"]
        got.append(out)
    assert_close(jnp.concatenate(got, axis=1), want)


# apply_rope


def test_rope_is_a_product_of_complex_numbers():
    x, theta = normal(1, (2, 3, NUM_HEADS, HEAD_DIM)), 500.0
    positions = np.asarray([[0, 5, 1000], [7, 7, -3]])
    half = HEAD_DIM // 2
    angles = positions[..., None, None] * theta ** (-np.arange(half) / half)
    pairs = np.asarray(x[..., :half]) + 1j * np.asarray(x[..., half:])
    turned = pairs * np.exp(1j * angles)
    want = np.concatenate([turned.real, turned.imag], axis=-1).astype(np.float32)
    # An angle of 1000 in float32 is off by 1000 * 2^-24, and so is what it turns.
    assert distance(apply_rope(x, jnp.asarray(positions), theta), want) < 1000 * 2.0**-24


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(-500, 500))
def test_rope_keeps_norms_and_sees_only_differences(q_pos, k_pos, offset):
    q, k = normal(1, (1, 1, HEAD_DIM)), normal(2, (1, 1, HEAD_DIM))

    def turned(x, position):
        return np.asarray(apply_rope(x, jnp.asarray([position])), np.float64)

    def product(offset):
        return (turned(q, q_pos + offset) * turned(k, k_pos + offset)).sum()

    norm = np.linalg.norm(np.asarray(q, np.float64))
    # Angles below 1000 are off by less than 1000 * 2^-24, in each of four turned vectors.
    error = 4 * 1000 * 2.0**-24
    assert abs(np.linalg.norm(turned(q, q_pos)) / norm - 1) < error
    scale = norm * np.linalg.norm(np.asarray(k, np.float64))
    assert abs(product(0) - product(offset)) < error * scale


def test_rope_computes_in_float32_and_keeps_the_dtype():
    x = normal(1, (Q_LEN, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    # bfloat16 has 8 bits, so positions and angles above 256 would be far off in it.
    positions = 1000 + jnp.arange(Q_LEN)
    with jax.numpy_dtype_promotion("strict"):
        got = apply_rope(x, positions)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, apply_rope(x.astype(jnp.float32), positions).astype(x.dtype))
    with jax.enable_x64(True):
        x = x.astype(jnp.float64) / 3
        still = apply_rope(x, 0 * positions)
        assert still.dtype == jnp.float64
        np.testing.assert_array_equal(still, x)


# SelfAttention


def self_attention(**kwargs) -> SelfAttention:
    kwargs = {"features": FEATURES, "num_heads": NUM_HEADS, "rngs": nnx.Rngs(0)} | kwargs
    return SelfAttention(**kwargs)


@pytest.mark.parametrize(("is_causal", "use_bias"), [(False, True), (True, False)])
def test_module_without_rope_is_flaxs(is_causal, use_bias):
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
def test_batch_axes_are_examples(batch):
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


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_documents_are_separate_documents(is_causal):
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
    # With the tokens and their positions in another order, the same output comes in that order.
    order = jnp.asarray([3, 0, 4, 1, 2])
    assert_close(layer(x[:, order], positions=positions[order]), want[:, order])


@pytest.mark.parametrize("rope_theta", [10_000.0, None])
def test_a_balanced_order_of_tokens_is_one_of_results(rope_theta):
    layer = self_attention(local_window_size=5, rope_theta=rope_theta)
    x = normal(1, (2, 3, 16, FEATURES))
    segment_ids = jnp.asarray([7] * 5 + [3] * 11)
    want = layer(x, segment_ids=segment_ids)
    order = pallas_flash.balanced_order(16, 2)
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
            "logits_soft_cap",
            "sinks",
            "dropout_key",
        )
    )
    assert seen == {
        **nothing,
        "is_causal": False,
        "query_offset": 0,
        "dropout_rate": 0.0,
        "broadcast_dropout": True,
        "precision": "high",
        "implementation": "xla",
        "reproducible": True,
        "shapes": ((6, Q_LEN, NUM_HEADS, 6), (6, Q_LEN, 2, 6), (6, Q_LEN, 2, 6)),
    }


# What SelfAttention can do besides, against its equations.

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
        call={"mask": pallas_flash.PrefixLM(jnp.full(6, 5, jnp.int32))},
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


@pytest.mark.parametrize("name", VARIANTS)
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


def test_options_that_are_off_leave_no_parameters():
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(self_attention()))]
    assert {path[0] for path in paths} == {"query", "key", "value", "out"}


def test_sinks_initializer():
    layer = self_attention(use_sinks=True, sinks_init=nnx.initializers.constant(3.0))
    np.testing.assert_array_equal(layer.sinks[...], [3.0] * NUM_HEADS)
    assert not self_attention(use_sinks=True).sinks[...].any()


@pytest.mark.parametrize("broadcast", [None, False])
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


def with_cache(batch=2, length=9, **kwargs) -> SelfAttention:
    layer = self_attention(**kwargs)
    layer.init_cache((batch, length, FEATURES))
    return layer


WITH_CACHE = [
    {"num_kv_heads": 2, "normalize_qk": True, "use_bias": True},
    {"local_window_size": (2, 0), "logits_soft_cap": 1.5},
    {},
    {"use_sinks": True, "sinks_init": nnx.initializers.normal(1.0), "rope_theta": None},
    {"num_kv_heads": 1, "implementation": "interpret"},
]


@pytest.mark.parametrize(
    "options",
    cases.default(WITH_CACHE[:2], WITH_CACHE),
    ids=lambda options: "-".join(options) or "plain",
)
def test_tokens_by_a_cache_are_those_of_the_whole_text(options):
    """A prompt, then single tokens, then a few: that is how text is generated and checked."""
    layer, x = with_cache(2, 11, **options), normal(1, (2, 11, FEATURES))
    whole = layer(x)
    step = nnx.jit(lambda layer, part: layer(part, decode=True))
    start = 0
    for part in jnp.split(x, [5, 6, 7, 10], axis=1):
        end = start + part.shape[1]
        assert_close(step(layer, part), whole[:, start:end])
        assert layer.cache_index[...] == end
        start = end
    # A new one starts anew.
    layer.init_cache((2, 4, FEATURES))
    assert_close(layer(x[:, :4], decode=True), whole[:, :4])


def test_a_cache_has_all_batch_axes_and_a_dtype_of_its_own():
    layer, x = self_attention(num_kv_heads=2), normal(1, (2, 1, 3, FEATURES))
    layer.init_cache(x.shape, jnp.bfloat16)
    assert layer.cached_key.shape == layer.cached_value.shape == (2, 1, 3, 2, 8)
    assert layer.cached_key.dtype == layer.cached_value.dtype == jnp.bfloat16
    got = layer(x, decode=True)
    assert got.dtype == x.dtype
    assert 0 < distance(got, layer(x)) < 0.02
    layer.init_cache(x.shape)
    assert layer.cached_key.dtype == jnp.float32
    layer = with_cache(dtype=jnp.bfloat16)
    assert layer.cached_key.dtype == layer.cached_value.dtype == jnp.bfloat16


def test_a_call_that_is_refused_leaves_the_cache_as_it_was():
    layer, x = with_cache(implementation="nothing"), normal(1, (2, 3, FEATURES))
    with pytest.raises(ValueError, match="`implementation` must be"):
        layer(x, decode=True)
    assert layer.cache_index[...] == 0
    assert not layer.cached_key[...].any()


def test_positions_go_on_counting_unless_they_are_given():
    layer, x = with_cache(), normal(1, (2, 6, FEATURES))
    layer(x[:, :5], decode=True)
    other = layer(x[:, 5:], positions=jnp.array([0]), decode=True)
    want = layer(x, positions=jnp.array([0, 1, 2, 3, 4, 0]))
    assert_close(other, want[:, 5:])
    assert distance(other, layer(x)[:, 5:]) > 0.01


def test_a_cache_that_overflows_under_jit_gives_nan():
    """Nothing can be raised there, and what was overwritten must not go unseen."""
    layer, x = with_cache(length=9), normal(1, (2, 5, FEATURES))
    step = nnx.jit(lambda layer, part: layer(part, decode=True))
    assert jnp.isfinite(step(layer, x)).all()
    assert jnp.isfinite(step(layer, x[:, :4])).all()
    assert jnp.isnan(step(layer, x[:, :1])).all()
    with pytest.raises(ValueError, match="got 1 tokens with 9 of 9 taken"):
        layer(x[:, :1], decode=True)


def test_a_layer_without_a_cache_has_only_parameters():
    layer = self_attention()
    assert not jax.tree.leaves(nnx.state(layer, nnx.Cache))
    layer.init_cache((1, 3, FEATURES))
    assert len(jax.tree.leaves(nnx.state(layer, nnx.Cache))) == 3


def test_dropout_of_a_rematerialised_layer_is_the_same_twice():
    layer = self_attention(dropout_rate=0.5, deterministic=False)
    x, key = normal(1, (2, Q_LEN, FEATURES)), jax.random.key(4)

    def gradient(wrap):
        forward = wrap(lambda x: (layer(x, rngs=key) * x).sum())
        return jax.jit(jax.grad(forward))(x)

    assert_close(gradient(jax.checkpoint), gradient(lambda f: f))


def test_a_copy_of_the_stream_is_kept_only_where_it_serves():
    assert self_attention().rngs is None
    assert self_attention(dropout_rate=0.5, keep_rngs=False).rngs is None
    rngs = nnx.Rngs(0)
    kept = self_attention(dropout_rate=0.5, rngs=rngs).rngs
    assert isinstance(kept, nnx.RngStream)
    assert kept is not rngs.dropout


def test_initializers():
    ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
    layer = self_attention(kernel_init=ones)
    assert all((x == 1).all() for x in jax.tree.leaves(nnx.state(layer, nnx.Param)))
    layer = self_attention(kernel_init=ones, out_kernel_init=zeros)
    assert (layer.value.kernel[...] == 1).all()
    assert not layer.out.kernel[...].any()


# Errors and imports

Q, K, V = qkv()
X = jnp.ones((2, Q_LEN, FEATURES))
ERRORS = {
    "rank": (lambda: attention_fn(Q[0, 0], K, V), ValueError, r"\[\*batch, length, heads"),
    "batch axes": (lambda: attention_fn(Q, K[:1], V), ValueError, "same batch axes"),
    "batch axes of equal product": (
        lambda: attention_fn(Q.reshape(2, 1, *Q.shape[1:]), K[None], V[None]),
        ValueError,
        "same batch axes",
    ),
    "mask rank": (
        lambda: attention_fn(Q, K, V, mask=jnp.ones((1, 1, 1, Q_LEN, KV_LEN))),
        ValueError,
        r"`mask` must broadcast to \(2, 4, 5, 7\); got mask.shape=\(1, 1, 1, 5, 7\)",
    ),
    "mask shape": (
        lambda: attention_fn(Q, K, V, mask=jnp.ones((KV_LEN, Q_LEN))),
        ValueError,
        "`mask` must broadcast",
    ),
    "bias shape": (
        lambda: attention_fn(Q, K, V, bias=jnp.ones((3, 1, Q_LEN, KV_LEN))),
        ValueError,
        "`bias` must broadcast",
    ),
    "dropout_rate": (
        lambda: attention_fn(Q, K, V, dropout_rate=1.5),
        ValueError,
        "`dropout_rate` must be at least 0 and less than 1; got float 1.5",
    ),
    "dropout_rate as an array, and off": (
        lambda: attention_fn(Q, K, V, dropout_rate=jnp.float32(0.5), deterministic=True),
        TypeError,
        "`dropout_rate` must be a number; got an array",
    ),
    "dropout_rng": (
        lambda: attention_fn(Q, K, V, dropout_rate=0.5),
        ValueError,
        "`dropout_rng` must be a jax.random key .*; got None with dropout_rate=0.5",
    ),
    "dropout_rng of another kind": (
        lambda: attention_fn(Q, K, V, dropout_rate=0.5, dropout_rng=7),
        TypeError,
        "must be a jax.random key; got int 7",
    ),
    "precision": (
        lambda: attention_fn(Q, K, V, precision=("high", "high")),
        TypeError,
        "`precision` must be None",
    ),
    "integer bias": (
        lambda: attention_fn(Q, K, V, bias=jnp.ones((Q_LEN, KV_LEN), int)),
        TypeError,
        "`bias` must be floating point",
    ),
    "negative dropout_rate": (
        lambda: attention_fn(Q, K, V, dropout_rate=-0.5),
        ValueError,
        "`dropout_rate` must be at least 0",
    ),
    "input_positions": (
        lambda: attention_fn(Q, K, V, input_positions=POSITIONS),
        ValueError,
        "`input_positions` must be None without `rope`",
    ),
    "features": (lambda: self_attention(features=0), ValueError, "at least 1; got features=0"),
    "num_kv_heads": (
        lambda: self_attention(num_kv_heads=3),
        ValueError,
        "multiple of `num_kv_heads`; got num_heads=4, num_kv_heads=3",
    ),
    "no num_kv_heads": (lambda: self_attention(num_kv_heads=0), ValueError, "num_kv_heads=0"),
    "features per head": (
        lambda: self_attention(features=30),
        ValueError,
        "`features` must be a multiple of `num_heads`",
    ),
    "head_dim": (lambda: self_attention(head_dim=0), ValueError, "`head_dim` must be at least 1"),
    "odd head_dim": (lambda: self_attention(head_dim=7), ValueError, "`head_dim` must be even"),
    "rope_theta": (lambda: self_attention(rope_theta=0.0), ValueError, "`rope_theta` must be pos"),
    "x features": (lambda: self_attention()(X[..., 1:]), ValueError, r"`x` must be .*length, 32\]"),
    "x rank": (lambda: self_attention()(X[0, 0]), ValueError, "`x` must be"),
    "positions shape": (
        lambda: self_attention()(X, positions=jnp.arange(3)),
        ValueError,
        r"`positions` must broadcast to \(2, 5\); got positions.shape=\(3,\)",
    ),
    "positions without rope": (
        lambda: self_attention(rope_theta=None)(X, positions=jnp.arange(Q_LEN)),
        ValueError,
        "`positions` must be None when `rope_theta` is None",
    ),
    "reordered without positions": (
        lambda: self_attention()(X, reordered=True),
        ValueError,
        "`positions` must be given with reordered=True; got None",
    ),
    "reordered as an int": (
        lambda: self_attention()(X, positions=jnp.arange(Q_LEN), reordered=1),
        TypeError,
        "`reordered` must be True or False; got int 1",
    ),
    "reordered, wrong positions": (
        lambda: self_attention(rope_theta=None)(X, positions=jnp.arange(3), reordered=True),
        ValueError,
        r"`positions` must broadcast to \(2, 5\); got positions.shape=\(3,\)",
    ),
    "reordered, decoding": (
        lambda: with_cache()(
            normal(1, (2, 3, FEATURES)), positions=jnp.arange(3), reordered=True, decode=True
        ),
        ValueError,
        "`reordered` must be False with decode=True",
    ),
    "positions dtype": (
        lambda: self_attention()(X, positions=jnp.arange(5.0)),
        TypeError,
        "`positions` must be integers; got positions.dtype=float32",
    ),
    "segment_ids shape": (
        lambda: self_attention()(X, segment_ids=jnp.zeros((3, Q_LEN), int)),
        ValueError,
        "`segment_ids` must broadcast",
    ),
    "module dropout_rate": (
        lambda: self_attention(dropout_rate=1.0),
        ValueError,
        "`dropout_rate` must be at least 0 and less than 1; got float 1.0",
    ),
    "module dropout_rate as text": (
        lambda: self_attention(dropout_rate="0.1"),
        TypeError,
        "`dropout_rate` must be a number; got str '0.1'",
    ),
    "undecided dropout": (
        lambda: self_attention(dropout_rate=0.5)(X),
        ValueError,
        "`deterministic` must be True or False",
    ),
    "dropout without random numbers": (
        lambda: self_attention(dropout_rate=0.5, keep_rngs=False)(X, deterministic=False),
        ValueError,
        "`rngs` must be given",
    ),
    "decode without a cache": (
        lambda: self_attention()(X, decode=True),
        ValueError,
        "`decode` must be False without a cache; got True. Call `init_cache",
    ),
    "decode in a layer that is not causal": (
        lambda: with_cache(is_causal=False)(X, decode=True),
        ValueError,
        "`decode` must be False in a layer with is_causal=False",
    ),
    "decode with a mask": (
        lambda: with_cache()(X, mask=jnp.ones((Q_LEN, Q_LEN), bool), decode=True),
        ValueError,
        "`mask` must be None with decode=True",
    ),
    "decode with segment_ids": (
        lambda: with_cache()(X, segment_ids=jnp.zeros((2, Q_LEN), jnp.int32), decode=True),
        ValueError,
        "`segment_ids` must be None with decode=True",
    ),
    "decode of another batch": (
        lambda: with_cache(batch=3)(X, decode=True),
        ValueError,
        r"`x` must have the batch axes \(3,\) of the cache; got x.shape=\(2, 5, 32\)",
    ),
    "decode of more than there is room for": (
        lambda: [layer := with_cache(), layer(X, decode=True), layer(X, decode=True)],
        ValueError,
        "`x` must fit in what is left of the cache; got 5 tokens with 5 of 9 taken",
    ),
    "decode of more than the cache": (
        lambda: nnx.jit(lambda layer: layer(X, decode=True))(with_cache(length=4)),
        ValueError,
        "got 5 tokens with some of 4 taken",
    ),
    "cache of integers": (
        lambda: self_attention().init_cache((2, 9, 32), jnp.int8),
        TypeError,
        "`dtype` must be floating point; got int8",
    ),
    "cache of negative length": (
        lambda: self_attention().init_cache((2, -1, 32)),
        ValueError,
        r"`input_shape` must be sizes \(\*batch, length, 32\); got \(2, -1, 32\)",
    ),
    "cache of a number": (
        lambda: self_attention().init_cache(9),
        ValueError,
        r"`input_shape` must be sizes \(\*batch, length, 32\); got 9",
    ),
    "cache of other features": (
        lambda: self_attention().init_cache((2, 9, 31)),
        ValueError,
        r"`input_shape` must be sizes \(\*batch, length, 32\); got \(2, 9, 31\)",
    ),
    "module mask shape": (
        lambda: self_attention()(X, mask=jnp.ones((3, Q_LEN), bool)),
        ValueError,
        r"`mask` must broadcast to \(2, 4, 5, 5\); got mask.shape=\(3, 5\)",
    ),
    "module bias shape": (
        lambda: self_attention()(X, bias=jnp.ones((NUM_HEADS, Q_LEN + 1, Q_LEN))),
        ValueError,
        "`bias` must broadcast to",
    ),
    "seq_lengths shape": (
        lambda: self_attention()(X, seq_lengths=jnp.ones(3, jnp.int32)),
        ValueError,
        r"`seq_lengths` must broadcast to \(2,\)",
    ),
    "window of a module": (
        lambda: self_attention(local_window_size=-1)(X),
        ValueError,
        "`local_window_size` must not be negative",
    ),
    "soft cap of a module": (
        lambda: self_attention(logits_soft_cap=0.0)(X),
        ValueError,
        "`logits_soft_cap` must be positive",
    ),
    "rope of an odd size": (
        lambda: apply_rope(Q[..., 1:], jnp.arange(Q_LEN)),
        ValueError,
        "`x` must be .*even",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error(case):
    call, exception, message = ERRORS[case]
    with pytest.raises(exception, match=message):
        call()


def test_flax_is_imported_on_demand():
    code = "import sys, pallas_flash; assert 'flax' not in sys.modules, 'pallas_flash imports flax'"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("x64", [False, True])
def test_strict_switches(x64):
    x = jax.ShapeDtypeStruct((2, 3, Q_LEN, FEATURES), jnp.float32)
    numbers = {
        "bias": jax.ShapeDtypeStruct((Q_LEN, Q_LEN), jnp.float32),
        "segment_ids": jax.ShapeDtypeStruct((Q_LEN,), jnp.int32),
        "positions": jax.ShapeDtypeStruct((Q_LEN,), jnp.int32),
        "seq_lengths": jax.ShapeDtypeStruct((3,), jnp.int32),
    }

    def run(x, numbers):
        layer = SelfAttention(
            FEATURES,
            NUM_HEADS,
            num_kv_heads=2,
            use_bias=True,
            normalize_qk=True,
            use_sinks=True,
            logits_soft_cap=5.0,
            local_window_size=3,
            dropout_rate=0.5,
            deterministic=False,
            implementation="xla",
            rngs=nnx.Rngs(0),
        )
        gradients = nnx.grad(lambda layer: layer(x, **numbers).sum())(layer)
        layer.init_cache(x.shape)
        return gradients, layer(x[..., :2, :], decode=True), layer(x[..., 2:3, :], decode=True)

    with strictly(x64=x64):
        shapes = jax.eval_shape(run, x, numbers)
    assert {x.dtype.name for x in jax.tree.leaves(shapes)} == {"float32"}
