"""A new `Decoder` of the preset `gpt`: its first values, its loss, and its source."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import jaxprs

import models
import pallas_flash.flax
from models import Decoder
from models.config import DecoderConfig, gpt
from models.decoder import Embedding, Norm
from models.loss import next_token_loss

# The dense reference compiles fastest; the tests of causality and of the package's part take the
# implementation that serves by default.
TINY = gpt(
    vocab_size=13,
    context=9,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    features=16,
    implementation="reference",
)


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    """Nearly all the time would go into optimising programs that run once."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def make_model(seed=0, **changes):
    """A tiny model whose parameters are all random, the norms' scales among them."""
    config = dataclasses.replace(TINY, **changes)
    # Only the shapes come from the model: compiling its initialisation would take most of the time.
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)
    state = jax.tree.map(
        lambda x: jnp.asarray((x.ndim == 1) + 0.3 * rng.standard_normal(x.shape, np.float32)),
        shapes,
    )
    return nnx.merge(graphdef, state)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def default_model():
    return make_model(implementation=None)


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(7), (3, TINY.context), 0, TINY.vocab_size)


@nnx.jit
def logits_of(model, tokens):
    return model(tokens)


def test_logits_have_the_vocabulary_and_float32(model, tokens):
    logits = logits_of(model, tokens)
    assert logits.shape == (3, TINY.context, TINY.vocab_size)
    assert logits.dtype == jnp.float32


def test_first_prediction_is_nearly_uniform(tokens):
    fresh = Decoder(TINY, rngs=nnx.Rngs(0))
    assert abs(float(nnx.jit(next_token_loss)(fresh, tokens)) - np.log(TINY.vocab_size)) < 0.1


@pytest.mark.parametrize("position", [0, 4, TINY.context - 1])
def test_later_token_reaches_no_earlier_logits(default_model, tokens, position):
    changed = tokens.at[:, position].set((tokens[:, position] + 1) % TINY.vocab_size)
    before, after = (np.asarray(logits_of(default_model, x)) for x in (tokens, changed))
    np.testing.assert_array_equal(before[:, :position], after[:, :position])
    # Every position from there on sees it, through the attention.
    assert (np.abs(before - after)[:, position:].max(axis=-1) > 0).all()


def test_only_attention_mixes_positions(model, tokens, monkeypatch):
    calls = []

    def no_attention(query, key, value, **kwargs):
        calls.append(kwargs)
        return jnp.zeros_like(query)

    monkeypatch.setattr(pallas_flash.flax._layer, "attention", no_attention)
    changed = tokens.at[:, 4].set((tokens[:, 4] + 1) % TINY.vocab_size)
    # Not by logits_of, which may have been compiled with the real attention.
    run = nnx.jit(lambda model, tokens: model(tokens))
    before, after = (np.asarray(run(model, x)) for x in (tokens, changed))
    difference = np.abs(before - after).max(axis=(0, 2))
    assert difference[4] > 0
    assert (np.delete(difference, 4) == 0).all()
    assert len(calls) == TINY.num_layers
    assert all(call["is_causal"] is True for call in calls)


def test_bfloat16_keeps_float32_parameters(tokens):
    full, half = make_model(), make_model(dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("float32")}
    assert half.embedding(tokens).dtype == jnp.bfloat16
    logits, exact = (np.asarray(logits_of(m, tokens)) for m in (half, full))
    assert logits.dtype == jnp.float32
    # Logits of bfloat16 would have 16 zero bits at their end.
    assert (logits.view(np.uint32) & 0xFFFF).any()
    error = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.05


def test_residual_branches_start_smaller():
    [layer, *_] = Decoder(gpt(num_layers=8), rngs=nnx.Rngs(0)).layers
    assert np.std(layer.attention.value.weight) == pytest.approx(128**-0.5, rel=0.05)
    assert np.std(layer.attention.out.weight) == pytest.approx((128 * 16) ** -0.5, rel=0.05)
    assert np.std(layer.mlp.up.weight) == pytest.approx(128**-0.5, rel=0.05)
    assert np.std(layer.mlp.down.weight) == pytest.approx((384 * 16) ** -0.5, rel=0.05)


def test_loss_is_the_mean_surprise_at_next_token(model, tokens):
    logits = np.asarray(logits_of(model, tokens), np.float64)[:, :-1]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    surprise = [
        -log_probs[row, t, tokens[row, t + 1]]
        for row in range(tokens.shape[0])
        for t in range(tokens.shape[1] - 1)
    ]
    assert float(nnx.jit(next_token_loss)(model, tokens)) == pytest.approx(
        np.mean(surprise), rel=1e-6
    )


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("bfloat16", 2**-7)])
def test_norm_and_gradients_agree_with_flax(dtype, error):
    rng = np.random.default_rng(0)
    x, cotangent = rng.normal(0.3, [1.0, 2.0, 5.0], (2, 4, 7, 3)).transpose(0, 1, 3, 2)
    config = dataclasses.replace(TINY, norm_epsilon=1e-6)
    norms = [Norm(7, config), nnx.RMSNorm(7, dtype=dtype, rngs=nnx.Rngs(0))]
    scale = jnp.asarray(rng.normal(1, 0.5, 7), jnp.float32)

    def results(norm):
        graphdef, state = nnx.split(norm)
        state = jax.tree.map(lambda _: scale, state)

        @jax.jit
        def both(state, x, cotangent):
            y, transpose = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
            return y, transpose(cotangent)

        return jax.tree.leaves(both(state, jnp.asarray(x, dtype), jnp.asarray(cotangent, dtype)))

    for got, expected in zip(*map(results, norms), strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        got, expected = np.float64(got), np.float64(expected)
        assert np.linalg.norm(got - expected) < error * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_reads_rows_to_the_bit(dtype):
    embedding = Embedding(5, dataclasses.replace(TINY, dtype=dtype), nnx.Rngs(0))
    tokens = jnp.array([[3, 0, 4], [1, 2, 3]])
    got = embedding(tokens)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, embedding.weight[...].astype(dtype)[tokens])
    # Else a GPU rounds float32 to TF32.
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in str(
        jax.make_jaxpr(embedding)(tokens)
    )
    large = Embedding(600, dataclasses.replace(TINY, dtype=dtype), nnx.Rngs(0))
    assert "dot_general" not in str(jax.make_jaxpr(large)(tokens))


def test_embedding_gradient_sums_in_float32():
    """Added one by one in bfloat16, ones would stay at 256."""
    embedding = Embedding(3, dataclasses.replace(TINY, dtype="bfloat16"), nnx.Rngs(0))
    tokens = jnp.zeros(1024, jnp.int32).at[7].set(2)
    gradient = nnx.grad(lambda layer: layer(tokens).sum(dtype=jnp.float32))(embedding)
    expected = jnp.broadcast_to(jnp.array([1023.0, 0.0, 1.0])[:, None], (3, 16))
    np.testing.assert_allclose(gradient["weight"][...], expected, rtol=2**-8)


def test_remat_runs_each_kernel_once(tokens):
    """Remat keeps loss and gradients, and runs the forward kernel once for each layer."""
    programs, results = [], []
    for remat in (False, True):
        graphdef, state = nnx.split(make_model(remat=remat, implementation="interpret"))
        fn = jax.value_and_grad(
            lambda state, graphdef=graphdef: next_token_loss(nnx.merge(graphdef, state), tokens)
        )
        programs.append(jaxprs.trace(fn, state))
        graphdef, state = nnx.split(make_model(remat=remat))
        results.append(jax.jit(fn)(state))
    plain, again = map(jaxprs.kernels, programs)
    assert sorted(plain) == sorted(again)
    products = [sum(e.primitive.name == "dot_general" for e in eqns) for eqns in programs]
    # The products of q, k, v, out, gate and up; nothing after the last product is needed again.
    assert products[1] - products[0] == TINY.num_layers * 6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *results)


def test_gpt_is_a_llama(tmp_path):
    """So that other libraries read it; `Decoder` reads it, too."""
    assert [gpt(features=n).hidden for n in (16, 128, 768)] == [64, 384, 2048]
    for config in (gpt(), TINY):
        read = DecoderConfig.from_json(config.source)
        assert dataclasses.replace(read, implementation=config.implementation) == config
    model = make_model()
    model.save_pretrained(tmp_path)
    again = Decoder.from_pretrained(tmp_path, implementation="reference")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(again))


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"num_layers": 0}, "`num_layers` must be an int of at least 1; got 0"),
        ({"context": -1}, "`context` must be an int of at least 1; got -1"),
        ({"features": 18}, "`features` must be a multiple of `num_heads`; got 18 and 4"),
        ({"num_kv_heads": 3}, "`num_heads` must be a multiple of `num_kv_heads`; got 4 and 3"),
        ({"features": 12}, "`head_dim` must be even for rotary positions; got 3"),
    ],
)
def test_sizes_that_do_not_fit(changes, fragment):
    with pytest.raises(ValueError) as caught:
        gpt(**changes)
    assert fragment in str(caught.value)


# ------------------------------------------------------------------------------------------- source


def model_sources():
    root = Path(models.__file__).parent
    return {str(p.relative_to(root)): ast.parse(p.read_text()) for p in root.rglob("*.py")}


def test_models_hold_no_attention_of_their_own():
    forbidden = {"softmax", "exp", "exp2", "einsum", "matmul", "dot_general", "tensordot", "vdot"}
    forbidden |= {"dot_product_attention", "MultiHeadAttention", "attention_fn", "scaled_dot"}
    products, attentions = [], []
    for file, tree in model_sources().items():
        for node in ast.walk(tree):
            name = getattr(node, "attr", getattr(node, "id", getattr(node, "name", None)))
            # The softmax of the logits draws a token.
            if (file, name) != ("generation.py", "softmax"):
                assert name not in forbidden, f"{file}:{node.lineno} uses {name}"
            assert not isinstance(node, ast.MatMult), f"{file} multiplies matrices by @"
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", None))
                products += [file] * (called == "dot")
                attentions += [file] * (called == "SelfAttention")
    # The products written out are the embedding's, of tokens and of logits; a linear map; and the
    # two matrices of an adapter.
    assert sorted(products) == ["decoder.py"] * 3 + ["lora.py"]
    assert attentions == ["decoder.py"]


def test_models_import_the_public_package_only():
    imported = set()
    for tree in model_sources().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name for name in imported if name.startswith("pallas_flash")}
    layers = {"flax.SelfAttention", "flax.KVCache", "flax.PagedKVCache"}
    public = {*layers, "attention", "masks.balanced_order"}
    assert ours == {"pallas_flash"} | {f"pallas_flash.{name}" for name in public}
