"""The GPT: its logits, its loss, its samples, and the source of its attention."""

import ast
import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import cases, jaxprs
from support.strict import strictly

import models.gpt
import pallas_flash.flax
from models.gpt import GPT, GPTConfig, generate, loss
from models.layers import RMSNorm, TiedEmbedding

# The dense reference compiles fastest; the tests of causality and of the package's part take the
# implementation that serves by default.
TINY = GPTConfig(
    vocab_size=13,
    context=9,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    embed_dim=16,
    mlp_ratio=2.0,
    attention="reference",
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
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
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
    return make_model(attention=None)


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
    fresh = GPT(TINY, rngs=nnx.Rngs(0))
    assert abs(float(nnx.jit(loss)(fresh, tokens)) - np.log(TINY.vocab_size)) < 0.1


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


@pytest.mark.parametrize("attention", [None, "xla", "reference"])
def test_implementation_is_handed_down(tokens, monkeypatch, attention):
    calls = []
    real = pallas_flash.flax._layer.attention

    def record(*args, implementation, **kwargs):
        calls.append(implementation)
        return real(*args, implementation="reference", **kwargs)

    monkeypatch.setattr(pallas_flash.flax._layer, "attention", record)
    nnx.eval_shape(lambda: make_model(attention=attention)(tokens))
    assert calls == [attention] * TINY.num_layers


def test_other_attention_layer_same_parameters(tokens):
    class Mute(pallas_flash.flax.SelfAttention):
        def __call__(self, x, *, decode=False):
            return jnp.zeros_like(x)

    ours, mute = (
        nnx.eval_shape(lambda layer=layer: GPT(TINY, rngs=nnx.Rngs(0), attention_layer=layer))
        for layer in (pallas_flash.flax.SelfAttention, Mute)
    )
    assert nnx.to_pure_dict(nnx.state(ours)) == nnx.to_pure_dict(nnx.state(mute))
    mute = nnx.merge(nnx.graphdef(mute), nnx.state(make_model()))
    changed = tokens.at[:, 4].set((tokens[:, 4] + 1) % TINY.vocab_size)
    before, after = (np.asarray(logits_of(mute, x)) for x in (tokens, changed))
    np.testing.assert_array_equal(np.delete(before, 4, axis=1), np.delete(after, 4, axis=1))


def test_grouped_heads_have_fewer_parameters(tokens):
    def count(m):
        return sum(x.size for x in jax.tree.leaves(nnx.state(m)))

    grouped, full = make_model(num_kv_heads=1), make_model(num_kv_heads=None)
    # Each layer saves three of four heads of keys and values.
    assert count(full) - count(grouped) == TINY.num_layers * 2 * 3 * 16 * 4
    gradient = nnx.jit(nnx.grad(loss))(grouped, tokens)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert jnp.isfinite(leaf).all(), jax.tree_util.keystr(path)
        assert jnp.abs(leaf).max() > 0, jax.tree_util.keystr(path)


def test_bfloat16_keeps_float32_parameters(tokens):
    full, half = make_model(), make_model(dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("float32")}
    assert half.embedding.encode(tokens).dtype == jnp.bfloat16
    logits, exact = (np.asarray(logits_of(m, tokens)) for m in (half, full))
    assert logits.dtype == jnp.float32
    # Logits of bfloat16 would have 16 zero bits at their end.
    assert (logits.view(np.uint32) & 0xFFFF).any()
    error = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.05


def test_residual_branches_start_smaller():
    config = dataclasses.replace(TINY, num_layers=8, embed_dim=128)
    block = GPT(config, rngs=nnx.Rngs(0)).blocks[0]
    inner, outer = block.attention.value.kernel, block.attention.out.kernel
    assert np.std(inner) == pytest.approx(128**-0.5, rel=0.05)
    assert np.std(outer) == pytest.approx((128 * 16) ** -0.5, rel=0.05)
    assert np.std(block.mlp.up.kernel) == pytest.approx(128**-0.5, rel=0.05)
    assert np.std(block.mlp.down.kernel) == pytest.approx((256 * 16) ** -0.5, rel=0.05)


def test_loss_is_the_mean_surprise_at_next_token(model, tokens):
    logits = np.asarray(logits_of(model, tokens), np.float64)[:, :-1]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    surprise = [
        -log_probs[row, t, tokens[row, t + 1]]
        for row in range(tokens.shape[0])
        for t in range(tokens.shape[1] - 1)
    ]
    assert float(nnx.jit(loss)(model, tokens)) == pytest.approx(np.mean(surprise), rel=1e-6)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("bfloat16", 2**-7)])
def test_norm_and_gradients_agree_with_flax(dtype, error):
    rng = np.random.default_rng(0)
    x, cotangent = rng.normal(0.3, [1.0, 2.0, 5.0], (2, 4, 7, 3)).transpose(0, 1, 3, 2)
    norms = [
        cls(7, dtype=dtype, param_dtype="float32", rngs=nnx.Rngs(0))
        for cls in (RMSNorm, nnx.RMSNorm)
    ]
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
    embedding = TiedEmbedding(5, 8, dtype=dtype, param_dtype="float32", rngs=nnx.Rngs(0))
    tokens = jnp.array([[3, 0, 4], [1, 2, 3]])
    expected = embedding.embedding[...].astype(dtype)[tokens]
    got = embedding.encode(tokens)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, expected)
    # Else a GPU rounds float32 to TF32.
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in str(
        jax.make_jaxpr(embedding.encode)(tokens)
    )


def test_embedding_gradient_sums_in_float32():
    """Added one by one in bfloat16, ones would stay at 256."""
    embedding = TiedEmbedding(3, 8, dtype="bfloat16", param_dtype="float32", rngs=nnx.Rngs(0))
    tokens = jnp.zeros(1024, jnp.int32).at[7].set(2)
    gradient = nnx.grad(lambda layer: layer.encode(tokens).sum(dtype=jnp.float32))(embedding)
    expected = jnp.broadcast_to(jnp.array([1023.0, 0.0, 1.0])[:, None], (3, 8))
    np.testing.assert_allclose(gradient["embedding"][...], expected, rtol=2**-8)


def test_remat_runs_each_kernel_once(tokens):
    """Remat keeps loss and gradients, and runs the forward kernel once for each layer."""
    programs, results = [], []
    for remat in (False, True):
        graphdef, state = nnx.split(make_model(remat=remat, attention="interpret"))
        fn = jax.value_and_grad(
            lambda state, graphdef=graphdef: loss(nnx.merge(graphdef, state), tokens)
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


def test_mlp_size_is_a_multiple_of_64():
    sizes = {dim: GPTConfig(embed_dim=dim).mlp_dim for dim in (16, 128, 768)}
    assert sizes == {16: 64, 128: 384, 768: 2048}
    assert GPTConfig(embed_dim=128, mlp_ratio=3.0).mlp_dim == 384


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"num_layers": 0}, "`num_layers` must be positive and finite; got 0"),
        ({"context": -1}, "`context` must be positive and finite; got -1"),
        ({"mlp_ratio": 0.0}, "`mlp_ratio` must be positive"),
        ({"num_kv_heads": 0}, "`num_kv_heads` must be positive"),
        ({"embed_dim": 18}, "`embed_dim` must be a multiple of `num_heads`; got 18 and 4"),
        ({"num_kv_heads": 3}, "`num_heads` must be a multiple of `num_kv_heads`; got 4 and 3"),
        ({"embed_dim": 12}, "must be even, because rotary positions turn pairs; got 12 / 4 = 3"),
    ],
)
def test_sizes_that_do_not_fit(changes, fragment):
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(TINY, **changes)
    assert fragment in str(caught.value)


def test_odd_head_dim_without_rotary_positions(tokens):
    model = make_model(embed_dim=12, num_kv_heads=None, rope_theta=None)
    assert logits_of(model, tokens).shape == (3, TINY.context, TINY.vocab_size)


def test_text_longer_than_the_context_is_refused(model, tokens):
    with pytest.raises(ValueError, match="no longer than the context; got 10 tokens and"):
        model(jnp.pad(tokens, ((0, 0), (0, 1))))


# ----------------------------------------------------------------------------------------- sampling


def test_same_key_gives_the_same_text(model, tokens):
    def draw(seed):
        return np.asarray(generate(model, jax.random.key(seed), tokens[:, :2], 12))

    first = draw(0)
    assert first.shape == (3, 14)
    np.testing.assert_array_equal(first[:, :2], tokens[:, :2])
    np.testing.assert_array_equal(first, draw(0))
    assert (first != draw(1)).any()


def test_every_token_has_its_own_chance(tokens):
    """A model that knows nothing draws many tokens; one repeated draw would give one token."""
    graphdef, state = nnx.split(make_model())
    ignorant = nnx.merge(graphdef, jax.tree.map(jnp.zeros_like, state))
    drawn = np.asarray(generate(ignorant, jax.random.key(0), tokens[:, :2], 40))[:, 2:]
    assert all(len(set(row)) > TINY.vocab_size / 2 for row in drawn.tolist())


LIKELY = [{"temperature": 0.0}, {"temperature": 1.2e-38}, {"temperature": 1e300, "top_k": 1}]


@pytest.mark.parametrize("options", LIKELY)
@pytest.mark.parametrize(("given", "count"), [(9, 6), (4, 2), (1, 8), (3, 10)])
def test_most_likely_text_is_of_a_plain_loop(model, tokens, given, count, options):
    """Texts end within the context of 9, past it where the window slides, and across its end."""
    expected = np.asarray(tokens)[:, :given]
    for _ in range(count):
        # One shape is compiled once; what follows the last token is not seen.
        window = expected[:, -TINY.context :]
        padded = np.pad(window, ((0, 0), (0, TINY.context - window.shape[1])))
        logits = np.asarray(logits_of(model, padded))[:, window.shape[1] - 1]
        expected = np.append(expected, logits.argmax(-1)[:, None], axis=1)
    got = generate(model, jax.random.key(0), tokens[:, :given], count, **options)
    np.testing.assert_array_equal(got, expected)


WORK = [
    (4, 9, [(3, 3), (3, 1), (3, 9)]),
    (9, 1, [(3, 9)]),
    (4, 3, [(3, 3), (3, 1)]),
    (1, 8, [(3, 1)]),
]


@pytest.mark.parametrize(("given", "count", "inputs"), cases.default(WORK[:2], WORK))
def test_token_of_text_costs_one_tokens_work(monkeypatch, given, count, inputs):
    """The model's inputs, as traced: the prompt, the step by the cache, the step by the window."""
    shapes, call = [], GPT.__call__

    def spy(self, tokens, **options):
        shapes.append(tokens.shape)
        return call(self, tokens, **options)

    monkeypatch.setattr(GPT, "__call__", spy)
    prompt = jnp.zeros((3, given), jnp.int32)
    # Another vocabulary than elsewhere, so that it is traced anew.
    generate(make_model(vocab_size=17), jax.random.key(0), prompt, count)
    assert list(dict.fromkeys(shapes)) == inputs


def test_cache_must_fit_the_context(model):
    with pytest.raises(ValueError, match="`length` must be no longer than the context; got 10"):
        model.init_cache(1, TINY.context + 1)


def test_prompt_longer_than_context_keeps_end(model):
    prompt = jax.random.randint(jax.random.key(3), (1, 20), 0, TINY.vocab_size)
    got = generate(model, jax.random.key(0), prompt, 1, temperature=0.0)
    expected = logits_of(model, prompt[:, -TINY.context :])[0, -1].argmax()
    assert int(got[0, -1]) == int(expected)


def test_top_k_draws_by_probability(model):
    rows = 4000
    prompt = jnp.zeros((rows, 1), jnp.int32)
    logits = np.asarray(logits_of(model, prompt[:1]))[0, -1]
    best = np.argsort(logits)[-3:]
    drawn = np.asarray(
        generate(model, jax.random.key(0), prompt, 1, temperature=0.5, top_k=3)[:, 1]
    )
    assert set(drawn) == set(best)
    expected = np.exp(logits[best] / 0.5) / np.exp(logits[best] / 0.5).sum()
    counts = np.array([(drawn == token).mean() for token in best])
    # Five standard deviations of a count of so many draws.
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected * (1 - expected) / rows)).all()


def test_one_compilation_serves_every_sample(tokens):
    model = make_model(seed=5, context=8)
    before = models.gpt._generate._cache_size()
    for seed, temperature in [(0, 1.0), (1, 0.5), (2, 0.0)]:
        generate(model, jax.random.key(seed), tokens[:, :2], 11, temperature=temperature)
    generate(make_model(seed=6, context=8), jax.random.key(0), tokens[:, :2], 11)
    assert models.gpt._generate._cache_size() == before + 1


@pytest.mark.parametrize(
    ("prompt_length", "count", "options", "fragment"),
    [
        (0, 1, {}, "`prompt` must have at least one token; got shape (3, 0)"),
        (1, -1, {}, "`num_tokens` must not be negative; got -1"),
        (1, 1, {"temperature": -0.5}, "`temperature` must be a finite number of at least 0; got -"),
        (1, 1, {"temperature": math.nan}, "must be a finite number of at least 0; got nan"),
        (1, 1, {"top_k": 0}, "`top_k` must be an int of at least 1, or None; got 0"),
    ],
)
def test_samples_that_cannot_be_drawn(model, tokens, prompt_length, count, options, fragment):
    with pytest.raises(ValueError) as caught:
        generate(model, jax.random.key(0), tokens[:, :prompt_length], count, **options)
    assert fragment in str(caught.value)


# ------------------------------------------------------------------------------------------- source


def model_sources():
    return {p.name: ast.parse(p.read_text()) for p in Path(models.gpt.__file__).parent.glob("*.py")}


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
                ours = ast.unparse(node.func) == "pallas_flash.attention"
                ours = ours or called in ("SelfAttention", "attention_layer")
                attentions += [file] * ours
    # The products written out are the embedding's, of tokens and of logits; and a linear map.
    assert sorted(products) == ["decoder.py"] * 2 + ["layers.py"] * 2
    assert sorted(attentions) == ["decoder.py", "gpt.py"]


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
    public = {"flax.SelfAttention", "flax.KVCache", "masks.balanced_order", "save_residuals"}
    assert ours == {"pallas_flash"} | {f"pallas_flash.{name}" for name in public}
    roots = {name.partition(".")[0] for name in imported}
    standard = {"collections", "dataclasses", "fnmatch", "functools", "json", "math", "pathlib"}
    standard |= {"re", "time", "typing", "numpy"}
    others = {"jax", "jaxtyping", "flax", "safetensors"}
    assert roots <= standard | others | {"models", "pallas_flash"}


@pytest.mark.parametrize("x64", cases.default([True], [False, True]))
def test_strict_switches(x64):
    tokens = jax.ShapeDtypeStruct((2, TINY.context + 1), jnp.int32)

    def run(tokens):
        model = GPT(TINY, rngs=nnx.Rngs(0))
        gradients = nnx.grad(loss)(model, tokens)
        drawn = generate(model, jax.random.key(0), tokens[:, :3], TINY.context, top_k=4)
        return gradients, drawn

    with strictly(x64=x64):
        gradients, drawn = jax.eval_shape(run, tokens)
    assert {x.dtype.name for x in jax.tree.leaves(gradients)} == {"float32"}
    assert drawn.dtype == jnp.int32
