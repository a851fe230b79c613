"""The recipes of docs/recipes/libraries.md, with the libraries that are installed."""

import functools
import importlib
import importlib.metadata
import os
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packaging.requirements import Requirement
from support.repository import ROOT

import pallas_flash
import pallas_flash.flax

# Their warnings are not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")

PAGE = ROOT / "docs" / "recipes" / "libraries.md"
BLOCK = re.compile(r'^```python title="pip install (?:--pre )?(.*?)"\n(.*?)^```', re.M | re.S)
BLOCKS = [
    (
        Requirement(block[1].strip("'")),
        "\n" * PAGE.read_text().count("\n", 0, block.start(2)),
        block[2],
    )
    for block in BLOCK.finditer(PAGE.read_text())
]
# Names of modules that blocks replace, which are put back after a test.
REPLACED = {
    "keras.src.backend.jax.nn": ("dot_product_attention",),
    "levanter.layers.attention": ("dot_product_attention",),
}


def need(requirement):
    """Skip a test whose package is absent."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{requirement} is not installed")
    if not requirement.specifier.contains(version, prereleases=True):
        pytest.skip(f"{requirement} is not installed, but {version}")


@pytest.fixture
def calls(monkeypatch):
    """The calls of the package so far: without one a recipe compares a library with itself."""
    made = []

    def count(module, name):
        function = getattr(module, name)

        @functools.wraps(function)
        def call(*args, **kwargs):
            made.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    count(pallas_flash, "attention")
    count(pallas_flash.flax, "attention_fn")
    return made


@pytest.fixture
def run(monkeypatch):
    """A function that runs block `n` of a package and returns the namespace after it."""

    def run(name, n=0):
        chosen = [block for block in BLOCKS if block[0].name == name]
        requirement, lines, source = chosen[n]
        need(requirement)
        monkeypatch.setenv("KERAS_BACKEND", "jax")
        for module, names in REPLACED.items():
            if module.split(".")[0] in source:
                module = importlib.import_module(module)
                for name in names:
                    monkeypatch.setattr(module, name, getattr(module, name))
        for module in re.findall(r"^from ([\w.]+) import modeling_flax_(\w+)$", source, re.M):
            keep(monkeypatch, ".modeling_flax_".join(module))
        namespace = {"__name__": PAGE.name}
        exec(compile(lines + source, str(PAGE), "exec"), namespace)
        return namespace

    return run


def keep(monkeypatch, module):
    """Return a module of transformers, whose names are put back after the test."""
    module = importlib.import_module(module)
    for name in ("dot_product_attention_weights", "jnp"):
        monkeypatch.setattr(module, name, getattr(module, name))
    return module


def numbered():
    """Yield each block's package, and its number among those of the package."""
    names = [requirement.name for requirement, *_ in BLOCKS]
    for n, name in enumerate(names):
        yield name, names[:n].count(name)


def close(ours, theirs):
    """Whether two trees agree to a share of each one's largest number; the key biases' is zero."""
    largest = max(jnp.abs(x).max() for x in jax.tree.leaves(theirs))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * largest)


def test_the_page_has_every_package():
    extra = re.search(r"^interop = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)[
        1
    ]
    wanted = {Requirement(x).name for x in re.findall(r'"(.*?)"', extra)}
    # test_families.py and test_peft.py need these, and no recipe does.
    of_weights = {"torch", "gguf", "accelerate", "peft"}
    assert wanted - of_weights == {name for name, _ in numbered()} - {"marin-levanter"}


@pytest.mark.parametrize(("name", "n"), list(numbered()))
def test_gradients_are_those_of_the_library(name, n, run, calls):
    run(name, n)
    assert calls


def test_equinox_layer_with_dropout(run, calls):
    page = run("equinox")
    layer = page["eqx"].nn.MultiheadAttention(4, 32, dropout_p=0.5, key=jax.random.key(1))
    layer, x = page["with_flash"](layer), page["x"]

    @jax.vmap
    def call(x, key):
        return layer(x, x, x, key=key)

    keys = jax.random.split(jax.random.key(2), 2)
    assert not jnp.allclose(call(x, keys), call(x, keys[::-1]), atol=1e-2)
    quiet = jax.vmap(lambda x: layer(x, x, x, inference=True))(x)
    close(quiet, jax.vmap(lambda x: layer.layer(x, x, x, inference=True))(x))


def test_equinox_mask_of_each_head(run, calls):
    page = run("equinox")
    layer, x = page["layer"], page["x"][0]
    mask = jax.random.bernoulli(jax.random.key(3), 0.5, (4, 16, 16)) | jnp.eye(16, dtype=bool)
    close(page["with_flash"](layer)(x, x, x, mask), layer(x, x, x, mask))


def test_keras_model_is_trained(run, calls):
    page = run("keras", 1)
    keras, x = page["keras"], np.asarray(page["x"])
    tokens = keras.layers.Input(x.shape[1:])
    layer = page["FlashAttention"](4, 8, dropout=0.1)
    model = keras.Model(tokens, layer(tokens, tokens, use_causal_mask=True))
    model.compile("sgd", "mse")
    before = model.evaluate(x, x, verbose=0)
    model.fit(x, x, epochs=3, verbose=0)
    assert model.evaluate(x, x, verbose=0) < before


def test_keras_masks_of_padding(run, calls):
    page = run("keras", 0)
    keras, x = page["keras"], page["x"]
    layer = keras.layers.MultiHeadAttention(4, 8)
    visible = jnp.arange(16) < jnp.array([[16], [9]])
    calls.clear()
    ours = layer(x, x, attention_mask=visible[:, None], use_causal_mask=True)
    assert calls
    weights = [np.asarray(w) for w in layer.get_weights()]
    dense = keras.layers.MultiHeadAttention(4, 8, dropout=0.1)  # Dropout keeps it dense.
    dense.build(x.shape, x.shape)
    dense.set_weights(weights)
    close(ours, dense(x, x, attention_mask=visible[:, None], use_causal_mask=True))


# The largest relative error of rounding to nearest.
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
DTYPES = pytest.mark.parametrize("dtype", ROUNDING)


def compare(results, replace, dtype, calls):
    """Assert that a model has the output and gradients that it has with its own attention.

    Args:
        results: called with a dtype, returns a tree of arrays.
        replace: puts our attention into the model.
        dtype: in float32 each array agrees to 64 roundings. In bfloat16 its error against float32
            is at most twice that of the model's own attention, or that of rounding the array.
        calls: the calls of the package so far.
    """
    exact, theirs = results("float32"), results(dtype)
    calls.clear()
    replace()
    ours = results(dtype)
    assert calls
    allowed = ROUNDING[dtype] * (32 if dtype == "float32" else 0.5)
    largest = max(float(jnp.linalg.norm(x.ravel())) for x in jax.tree.leaves(exact))
    failures = []

    def judge(path, ours, theirs, exact):
        ours, theirs, exact = (np.asarray(x, np.float64) for x in (ours, theirs, exact))
        error, of_theirs = (np.linalg.norm(x - exact) for x in (ours, theirs))
        # The gradient of a key's bias is zero: what it has is rounding of larger numbers.
        size = max(np.linalg.norm(exact), 0.05 * largest)
        if not error <= 2 * max(of_theirs, allowed * size):
            name = jax.tree_util.keystr(path)
            failures.append(f"{name}: {error:.2e} of {size:.2e}, its own {of_theirs:.2e}")

    jax.tree.map_with_path(judge, ours, theirs, exact)
    assert not failures, "; ".join(failures)


def randomised(parameters):
    """Random values for parameters, of a size at which scores differ and each parameter matters."""
    leaves, structure = jax.tree.flatten(parameters)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    noise = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
    leaves = [0.2 * e + (0 if x.ndim > 1 else x) for e, x in zip(noise, leaves, strict=True)]
    return jax.tree.unflatten(structure, leaves)


TOKENS = jax.random.randint(jax.random.key(0), (2, 16), 3, 50)
VISIBLE = jnp.arange(16) < jnp.array([[16], [9]])


@DTYPES
@pytest.mark.parametrize("is_causal", [False, True])
def test_equinox_model(is_causal, dtype, run, calls):
    page = run("equinox")
    eqx = page["eqx"]

    class Block(eqx.Module):
        norms: list
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP

        def __init__(self, key):
            keys = jax.random.split(key)
            biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
            self.norms = [eqx.nn.LayerNorm(32), eqx.nn.LayerNorm(32)]
            self.attention = eqx.nn.MultiheadAttention(4, 32, **biases, key=keys[0])
            self.mlp = eqx.nn.MLP(32, 32, 64, 1, key=keys[1])

        def __call__(self, x, mask):
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y, mask)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))

    class Model(eqx.Module):
        embedding: eqx.nn.Embedding
        blocks: list

        def __call__(self, tokens, visible):
            mask = jnp.broadcast_to(visible, (16, 16))
            mask = jnp.tril(mask) if is_causal else mask
            x = jax.vmap(self.embedding)(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return x

    keys = jax.random.split(jax.random.key(0), 3)
    model = Model(eqx.nn.Embedding(50, 32, key=keys[2]), [Block(key) for key in keys[:2]])
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    model = eqx.combine(randomised(parameters), static)

    def results(dtype):
        @eqx.filter_jit
        @functools.partial(eqx.filter_grad, has_aux=True)
        def gradients(model):
            model = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)
            y = jax.vmap(model)(TOKENS, VISIBLE).astype(jnp.float32) * VISIBLE[..., None]
            return (y**2).sum(), y

        gradient, y = gradients(model)
        return jax.tree.leaves(eqx.filter(gradient, eqx.is_inexact_array)), y

    def replace():
        nonlocal model
        model = page["with_flash"](model)

    compare(results, replace, dtype, calls)


@DTYPES
@pytest.mark.parametrize("recipe", ["function", "subclass"])
def test_keras_encoder_and_decoder(recipe, dtype, run, calls):
    page = run("keras", 1)
    keras = page["keras"]
    layer, policy = keras.layers.MultiHeadAttention, "float32"

    def build():
        """A model with padding, causal and cross-attention, whose two inputs are token ids."""
        source, target = (keras.layers.Input((n,), dtype="int32") for n in (16, 9))
        embed = keras.layers.Embedding(50, 32, mask_zero=True, dtype=policy)
        x, y = embed(source), embed(target)
        visible = keras.ops.expand_dims(keras.ops.not_equal(source, 0), 1)
        x = x + layer(4, 8, dtype=policy)(x, x)
        y = y + layer(4, 8, dtype=policy)(y, y, use_causal_mask=True)
        y = y + layer(4, 8, dtype=policy)(y, x, attention_mask=visible)
        return keras.Model((source, target), y)

    source = jnp.where(VISIBLE, TOKENS, 0)
    target = source[::-1, 5:14]
    parameters = randomised([v.value for v in build().trainable_variables])

    def results(dtype):
        nonlocal policy
        policy = keras.DTypePolicy("mixed_bfloat16" if dtype == "bfloat16" else dtype)
        model = build()

        @jax.jit
        @functools.partial(jax.grad, has_aux=True)
        def gradients(parameters):
            state = [v.value for v in model.non_trainable_variables]
            y, _ = model.stateless_call(parameters, state, (source, target))
            y = y.astype(jnp.float32) * (target > 0)[..., None]
            return (y**2).sum(), y

        return gradients(parameters)

    def replace():
        nonlocal layer
        if recipe == "function":
            run("keras", 0)
        else:
            layer = page["FlashAttention"]

    compare(results, replace, dtype, calls)


TINY = dict(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=32,
)
PAIR = dict(
    vocab_size=50,
    d_model=32,
    encoder_layers=1,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
)
WHISPER = dict(
    num_mel_bins=8,
    max_source_positions=16,
    max_target_positions=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
# The class, and the sizes, by the name of the module.
MODELS = {
    "gpt2": ("GPT2", dict(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32)),
    "bert": ("Bert", TINY),
    "llama": ("Llama", TINY | dict(num_key_value_heads=2)),
    "mistral": ("Mistral", TINY | dict(num_key_value_heads=2, sliding_window=5)),
    "bloom": ("Bloom", dict(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)),
    "bart": ("Bart", PAIR | dict(max_position_embeddings=32)),
    "whisper": ("Whisper", PAIR | WHISPER),
    "t5": ("T5", dict(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)),
}


@DTYPES
@pytest.mark.parametrize("name", MODELS)
def test_transformers_model(name, dtype, run, calls, monkeypatch):
    page = run("transformers")
    import transformers

    prefix, sizes = MODELS[name]
    module = keep(monkeypatch, f"transformers.models.{name}.modeling_flax_{name}")
    module.jnp = page["Numpy"]()  # T5's own attention needs its `clip`.
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    inputs, visible = dict(input_ids=TOKENS, attention_mask=VISIBLE.astype(int)), VISIBLE
    if name == "whisper":
        inputs = dict(input_features=jax.random.normal(jax.random.key(1), (2, 8, 32)))
    if name in ("bart", "t5", "whisper"):
        visible = jnp.arange(9) < jnp.array([[6], [9]])
        inputs["decoder_input_ids"] = TOKENS[:, :9]
        inputs["decoder_attention_mask"] = visible.astype(int)

    def results(dtype):
        model = getattr(transformers, f"Flax{prefix}Model")(config, dtype=jnp.dtype(dtype))

        @jax.jit
        @functools.partial(jax.grad, has_aux=True)
        def gradients(parameters):
            y = model(**inputs, params=parameters)[0].astype(jnp.float32) * visible[..., None]
            return (y**2).sum(), y

        return gradients(randomised(model.params))

    replace = functools.partial(page["use_flash"], module, only_mask=name not in ("bloom", "t5"))
    compare(results, replace, dtype, calls)


@pytest.fixture
def gemma(monkeypatch):
    """The modules of Flax's Gemma example, and its attention as the page changes it."""
    examples = os.environ.get("FLAX_EXAMPLES")
    if examples is None:
        # An installed Flax has no examples; .ci/nightly downloads its sources, and sets this.
        pytest.skip("FLAX_EXAMPLES is not set: the folder `examples` of Flax's source distribution")
    folder = pathlib.Path(examples) / "gemma"
    monkeypatch.syspath_prepend(folder)
    for path in folder.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    transformer = importlib.import_module("transformer")
    source, path = (folder / "modules.py").read_text(), str(PAGE)
    diff = re.search(r"^## Flax's Gemma.*?^```diff\n(.*?)^```", PAGE.read_text(), re.M | re.S)[1]
    changed = dict(vars(transformer.modules))
    exec(compile(applied(diff, source), path, "exec"), changed)
    return transformer, changed["Attention"]


def applied(diff, source):
    """Return a source with a diff applied, in which "..." stands for any removed lines."""
    for hunk in diff.split("\n\n"):
        lines = hunk.splitlines()
        old = (line[1:] for line in lines if line[0] != "+")
        old = (r"(?:.*\n)*?.*" if line.strip() == "..." else re.escape(line) for line in old)
        new = "\n".join(line[1:] for line in lines if line[0] != "-")
        source, count = re.subn("\n".join(old), lambda _, new=new: new, source)
        assert count == 1, hunk
    return source


GEMMA = dict(num_layers=2, num_embed=50, embed_dim=48, hidden_dim=80, num_heads=4, head_dim=16)
GEMMA |= dict(sliding_window_size=5, transpose_gating_einsum=False)


def gemma_results(transformer, version, dtype, seed=None, **options):
    """The output of a small Gemma, and its gradients."""
    types = transformer.modules.AttentionType
    config = getattr(transformer.TransformerConfig, version)(
        **GEMMA | options,
        attention_types=(types.LOCAL_SLIDING, types.GLOBAL),
        dtype=jnp.dtype(dtype),
    )
    graphdef, parameters, rest = nnx.split(
        transformer.Transformer(config, rngs=nnx.Rngs(0)), nnx.Param, ...
    )
    positions = transformer.build_positions_from_mask(VISIBLE)
    mask = transformer.make_causal_attn_mask(VISIBLE)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients(parameters):
        model = nnx.merge(graphdef, parameters, rest)
        rngs = None if seed is None else nnx.Rngs(dropout=seed)
        y, _ = model(TOKENS, positions, None, mask, rngs=rngs)
        y = y.astype(jnp.float32) * VISIBLE[..., None]
        return (y**2).sum(), y

    return gradients(randomised(parameters))


@DTYPES
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("version", ["gemma2_9b", "gemma3_4b"])
def test_gemma_of_flax(version, kv_heads, dtype, gemma, calls, monkeypatch):
    transformer, changed = gemma
    results = functools.partial(gemma_results, transformer, version, num_kv_heads=kv_heads)
    compare(
        results,
        lambda: monkeypatch.setattr(transformer.modules.Attention, "__call__", changed.__call__),
        dtype,
        calls,
    )


def test_gemma_of_flax_with_dropout(gemma, calls, monkeypatch):
    transformer, changed = gemma
    monkeypatch.setattr(transformer.modules.Attention, "__call__", changed.__call__)

    def output(seed):
        options = dict(num_kv_heads=2, dropout_rate=0.3)
        return gemma_results(transformer, "gemma2_9b", "float32", seed, **options)[1]

    assert jnp.array_equal(output(0), output(0))
    assert not jnp.allclose(output(0), output(1), atol=1e-2)
    assert calls
