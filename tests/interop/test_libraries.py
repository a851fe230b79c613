"""The recipes of docs/recipes/libraries.md, with the libraries that are installed."""

import functools
import importlib
import importlib.metadata
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    # test_families.py needs torch, and no recipe does.
    assert wanted - {"torch"} == {name for name, _ in numbered()} - {"marin-levanter"}


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
# By the name of the module: the prefix of the classes, and the sizes.
MODELS = {
    "bert": ("Bert", TINY),
    "llama": ("Llama", TINY | dict(num_key_value_heads=2)),
    "mistral": ("Mistral", TINY | dict(num_key_value_heads=2, sliding_window=5)),
    "bloom": ("Bloom", dict(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)),
    "bart": ("Bart", PAIR | dict(max_position_embeddings=32)),
    "whisper": ("Whisper", PAIR | WHISPER),
    "t5": ("T5", dict(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_model(name, run, calls, monkeypatch):
    page = run("transformers")
    import transformers

    prefix, sizes = MODELS[name]
    module = keep(monkeypatch, f"transformers.models.{name}.modeling_flax_{name}")

    def old_clip(x, a_max):  # T5 calls a `jnp.clip` that newer versions of JAX do not have.
        return jnp.minimum(x, a_max)

    module.jnp = page["Numpy"]()
    module.jnp.clip = old_clip
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    model = getattr(transformers, f"Flax{prefix}Model")(config)
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 3, 50)
    visible = (jnp.arange(16) < jnp.array([[16], [9]])).astype(int)
    inputs = dict(input_ids=tokens, attention_mask=visible)
    if name in ("bart", "t5"):
        inputs["decoder_input_ids"] = tokens[:, :9]
    if name == "whisper":
        sound = jax.random.normal(jax.random.key(1), (2, 8, 32))
        inputs = dict(input_features=sound, decoder_input_ids=tokens)

    def loss(parameters):
        y = model(**inputs, params=parameters)[0]
        return (y**2 * (visible[..., None] if y.shape[1] == 16 else 1)).sum()

    theirs = jax.jit(jax.grad(loss))(model.params)
    calls.clear()
    page["use_flash"](module, only_mask=name not in ("bloom", "t5"))
    module.jnp.clip = old_clip
    close(jax.jit(jax.grad(loss))(model.params), theirs)
    assert calls
