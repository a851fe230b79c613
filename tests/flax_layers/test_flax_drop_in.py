"""`attention_fn` against Flax's own functions: results, every keyword, dropout, sown weights."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import flax.linen.attention
import flax.nnx.nn.attention
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cases, oracle
from support.flax_cases import (
    DROPOUT,
    HEAD_DIM,
    KV_LEN,
    NUM_HEADS,
    OURS,
    POSITIONS,
    Q_LEN,
    V_DIM,
    Sower,
    assert_as_exact_as,
    assert_close,
    causal_mask,
    distance,
    normal,
    output_and_gradients,
    qkv,
    random_mask,
    rope_by_hand,
)
from support.jaxprs import trace

import pallas_flash.flax
from pallas_flash.flax import apply_rope, attention_fn
from pallas_flash.flax._arrays import merge_batch
from pallas_flash.masks import Segments

pytestmark = pytest.mark.usefixtures("ieee_products")


SHAPES = [
    ((), "bnts", jnp.bool_, None, False),
    ((2,), "b11s", jnp.float32, "1n1s", True),
    ((2, 3), "ts", jnp.int32, "bnts", False),
    ((2,), None, None, None, False),
    ((3, 1, 2), "b1t1", jnp.float32, "n1s", True),
]


@pytest.mark.parametrize(
    ("batch", "mask_axes", "mask_dtype", "bias_axes", "is_causal"),
    cases.default(SHAPES[:3], SHAPES),
)
def test_output_and_gradients_equal_flax(batch, mask_axes, mask_dtype, bias_axes, is_causal):
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
def test_half_precision_error_below_flax(dtype):
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


def test_grouped_heads_equal_nnx():
    arrays = qkv(num_kv_heads=2)
    assert_close(OURS(*arrays), nnx.dot_product_attention(*arrays))


def test_variables_are_the_arrays_that_they_hold():
    """As in jax.nn, whatever the argument."""
    q, k, v = qkv()
    arrays = {
        **dict(query=q, key=k, value=v, bias=normal(4, (Q_LEN, KV_LEN)), sinks=normal(5, (4,))),
        **dict(mask=jnp.tri(Q_LEN, KV_LEN, 3, dtype=bool), scale=jnp.float32(0.3)),
        **dict(query_offset=jnp.int32(2), key_value_seq_lengths=jnp.array([7, 3])),
        **dict(
            segment_ids=(jnp.zeros((2, Q_LEN), int), jnp.arange(2 * KV_LEN).reshape(2, -1) // 9)
        ),
        **dict(dropout_key=jax.random.key(0), alibi_slopes=jnp.arange(NUM_HEADS) / 8),
    }

    def call(arrays):
        ids = Segments(*arrays["segment_ids"]) & arrays["mask"]
        rest = arrays | dict(mask=ids, dropout_rate=0.5, is_causal=True)
        return pallas_flash.attention(**rest, implementation="xla")

    held = jax.tree.map(nnx.Variable, arrays)
    np.testing.assert_array_equal(call(held), call(arrays))


def test_row_without_keys_gives_zeros():
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


def to_bfloat16(arrays, dtype=None):
    return tuple(x.astype(jnp.bfloat16) for x in arrays)


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
def test_flax_keyword_is_honoured_or_refused(name):
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
    own = {"implementation", "reproducible", "sequence_axis", "context_parallelism"}
    assert keywords(attention_fn) - set(KEYWORDS) == own


def test_positional_arguments_of_linen_and_nnx():
    ours = list(inspect.signature(attention_fn).parameters.values())
    ours = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    for flax_fn in (linen.dot_product_attention, nnx.dot_product_attention):
        assert list(inspect.signature(flax_fn).parameters)[: len(ours)] == ours


def test_options_reach_attention(monkeypatch):
    seen = {}

    def spy(query, key, value, bias, mask, **kwargs):
        seen.update(kwargs)
        return query

    monkeypatch.setattr(pallas_flash.flax._drop_in, "attention", spy)
    wanted = {"is_causal": True, "precision": jax.lax.Precision.HIGH, "implementation": "xla"}
    wanted |= {"reproducible": True, "sequence_axis": None, "context_parallelism": "heads"}
    dropout = {"dropout_rate": 0.25, "broadcast_dropout": False}
    attention_fn(*qkv(), **wanted, **dropout, dropout_rng=5)
    assert seen == {**wanted, **dropout, "dropout_key": 5}
    attention_fn(*qkv(), **wanted, dropout_rate=0.25, deterministic=True)
    off = {"dropout_rate": 0.0, "broadcast_dropout": True, "dropout_key": None}
    assert seen == {**wanted, **off}


@pytest.mark.parametrize("precision", [None, "high", jax.lax.Precision.HIGHEST], ids=str)
def test_precision_equals_flax(precision):
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
def test_dropout_statistics_equal_flax(fn, broadcast, batch):
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


@pytest.mark.parametrize("broadcast", cases.default([False], [False, True]))
def test_dropout_mask_is_what_is_dropped(broadcast):
    """All batch axes count as one, and the gradients drop the same."""
    batch, key, rate = (2, 3), jax.random.key(7), 0.4
    arrays = qkv(batch, v_dim=V_DIM)
    shape = (1, 1) if broadcast else (math.prod(batch), NUM_HEADS)
    keep = pallas_flash.dropout_mask(key, (*shape, Q_LEN, KV_LEN), rate)
    if not broadcast:
        keep = keep.reshape(*batch, *keep.shape[1:])

    def dense(q, k, v):
        weights = linen.dot_product_attention_weights(q, k)
        weights = jnp.where(keep, weights / oracle.share_kept(rate), 0)
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


@pytest.mark.parametrize("num_kv_heads", cases.default([2], [2, NUM_HEADS]))
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
# In NumPy, as the test is compiled and what is imported need not be.
PREFIXES = np.arange(EXAMPLES, dtype=np.int32)
PER_HEAD = random_mask((1, NUM_HEADS, Q_LEN, KV_LEN))
DOCUMENTS = tuple(
    np.tile(np.arange(length, dtype=np.int32) // 4, (EXAMPLES, 1)) for length in (Q_LEN, KV_LEN)
)
SEEN = {
    "prefix": np.tri(Q_LEN, KV_LEN, dtype=bool)
    | (np.arange(KV_LEN) < PREFIXES[:, None, None, None]),
    "documents": DOCUMENTS[0][:, None, :, None] == DOCUMENTS[1][:, None, None, :],
    "array": PER_HEAD,
}
PREFIX = pallas_flash.masks.PrefixLM(jnp.asarray(PREFIXES))
PACKED = pallas_flash.masks.Segments(*map(jnp.asarray, DOCUMENTS))


def blocks(mask):
    return pallas_flash.masks.BlockMask.from_mask(mask, Q_LEN, KV_LEN, block_q=2, block_kv=3)


JOINED = {
    "object and array": (lambda: PREFIX & PER_HEAD, ("prefix", "array")),
    "array and two objects": (
        lambda: PER_HEAD & (PACKED & PREFIX),
        ("array", "documents", "prefix"),
    ),
    "blocks": (lambda: blocks(PACKED & PER_HEAD), ("documents", "array")),
    "blocks and object": (lambda: blocks(PER_HEAD) & PACKED, ("array", "documents")),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", JOINED)
def test_sown_weights_of_mask_conjunction(name, is_causal):
    join, parts = JOINED[name]
    mask = join()
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
def test_sown_weights_dtype_equals_flax(force):
    ours, flaxs = Sower(), Sower()
    for fn, sower in ((OURS, ours), (linen.dot_product_attention, flaxs)):
        fn(*qkv(dtype=jnp.bfloat16), module=sower, force_fp32_for_softmax=force)
    assert_close(ours.sown, flaxs.sown)
