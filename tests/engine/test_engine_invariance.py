"""`Engine(batch_invariant=True)`: a text's bits alone, among others, after preemption, and scored.

On a GPU attention is "mosaic". On a CPU the check of the device is left out, and attention is plain
JAX. XLA promises no equal rows there, but happens to compute them so in one program of one shape.
So that test is of the engine: of its one program, and of what is computed where.
"""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.decoder_files import make
from support.described_gpus import described_gpu, described_mesh

import pallas_flash
from models import Decoder
from models.config import DecoderConfig
from models.engine import Engine, Sampling
from models.engine.program import programs
from models.rope import Rope
from models.sharding import Layout
from pallas_flash._jax import compat

# The last text has pages of the first one, and fills the engine.
SIZES = dict(page_size=16, max_requests=6, max_tokens_per_step=64, max_length=144)
LENGTHS = 130, 1, 33, 60, 7, 90, 125
WAYS = [
    Sampling(temperature=0, max_tokens=12),
    Sampling(seed=3, max_tokens=60),
    Sampling(top_k=7, top_p=0.9, seed=4, max_tokens=40),
    Sampling(0.7, min_p=0.02, repetition_penalty=1.3, max_tokens=15),
    Sampling(temperature=0, max_tokens=60),
    Sampling(samples=2, seed=5, max_tokens=8),
    Sampling(2.0, max_tokens=None),
]
SMALL = dict(vocab_size=30, features=32, hidden=48, head_dim=16)


@functools.cache
def model_of(dtype, **changes):
    sizes: dict[str, Any] = dict(vocab_size=600, features=128, hidden=256, num_layers=2)
    sizes |= dict(num_heads=2, num_kv_heads=1, head_dim=64, context=256, tied=True)
    config = DecoderConfig(**sizes | changes, rope=Rope(10_000.0), param_dtype=dtype)
    return Decoder(config, rngs=nnx.Rngs(0))


def bits(numbers):
    return np.asarray(numbers, np.float32).view(np.uint32).tolist()


def check_bits(model, pages=15, **options):
    """Compare texts of few pages with each alone, and with their scores."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 30, length).tolist() for length in LENGTHS]
    prompts[-1][:100] = prompts[0][:100]
    option = dict(batch_invariant=True, **SIZES, **options)
    crowded, free = Engine(model, pages=pages, **option), Engine(model, pages=60, **option)
    among = crowded.run(prompts, WAYS)
    alone = [x for prompt, how in zip(prompts, WAYS, strict=True) for x in free.run([prompt], how)]
    assert crowded.preemptions and not free.preemptions
    for answer, other in zip(among, alone, strict=True):
        assert (answer.tokens, answer.end) == (other.tokens, other.end)
        assert bits(answer.log_probabilities) == bits(other.log_probabilities)
    texts = [[*x.prompt, *x.tokens] for x in among]
    scores = crowded.score(texts)
    assert list(map(bits, scores)) == [bits(free.score([text])[0]) for text in texts]
    for answer, found in zip(among, scores, strict=True):
        assert bits(found[len(answer.prompt) - 1 :]) == bits(answer.log_probabilities)
    # JAX distinguishes parameters that it was told where to put.
    crowded.set_model(model)
    assert crowded.run(prompts[:1], WAYS[:1])[0].tokens == among[0].tokens
    assert crowded.programs == free.programs == 1


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 3])
def test_bits_on_a_gpu(drafts):
    check_bits(model_of("bfloat16"), drafts=drafts)


@pytest.fixture
def anywhere(monkeypatch):
    """Compute batch-invariant attention in plain JAX, as if the device were a Hopper GPU."""
    monkeypatch.setattr(
        sys.modules[pallas_flash.paged_attention.__module__], "_resolve", lambda *_: "xla"
    )
    yield
    # Others with the same shapes are traced again.
    programs.cache_clear()


@pytest.mark.parametrize(
    ("drafts", "sliding", "pages"), [(0, (), 15), (3, (), 15), (3, (True, False, True), 8)]
)
def test_bits_of_one_program(anywhere, drafts, sliding, pages):
    layers = dict(num_layers=len(sliding) or 2, sliding=sliding, window=20)
    check_bits(model_of("float32", **SMALL, **layers), pages, drafts=drafts)


def test_default_of_the_only_size(anywhere):
    model = make("llama", num_hidden_layers=1)
    for drafts, size in ((0, 128), (2, 256)):
        engine = Engine(model, pages=9, drafts=drafts, batch_invariant=True)
        assert (engine._sizes, engine.warm_up()) == ([size], 1)


def test_scores_without_the_option():
    """They are as the forward has them, also for a text that fills the engine."""
    model = model_of("float32", implementation="reference", **SMALL)
    engine = Engine(model, pages=10, drafts=3, **SIZES)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 30, length).tolist() for length in (100, 2, 145, 17, 66)]
    padded = jnp.array([text + [0] * (145 - len(text)) for text in texts])
    wanted = jax.nn.log_softmax(nnx.jit(model)(padded))
    for text, found, row in zip(texts, engine.score(texts), wanted, strict=True):
        np.testing.assert_allclose(found, row[np.arange(len(text) - 1), text[1:]], atol=1e-4)
    assert engine.programs == 1
    # Scores had a program of the smallest size. Without the option a step's size chooses one.
    engine.run(texts[:1], Sampling(temperature=0, max_tokens=3))
    assert engine.programs == 3


@pytest.mark.parametrize(
    ("kind", "changes", "options", "said"),
    [
        ("NVIDIA A100", {}, {}, "need a GPU of compute capability 9.0 (H100, H200, GH200), and"),
        ("NVIDIA H200", {}, dict(cache_dtype="int8"), "Got pages of int8, and they serve pages in"),
        ("NVIDIA H200", {}, dict(page_size=24), "Got pages of 24 keys, and they serve multiples"),
        ("NVIDIA H200", dict(param_dtype="float32"), {}, "Got float32, and they serve float16 and"),
        ("NVIDIA H200", dict(implementation="xla"), {}, 'must be None or "mosaic" with `batch_inv'),
        ("NVIDIA H200", {}, dict(draft=True), "must be False with a `draft`, and on several dev"),
        ("NVIDIA H200", {}, dict(layout=2), "must be False with a `draft`, and on several devices"),
        ("NVIDIA H200", {}, dict(max_requests=64, max_tokens_per_step=64), "a power of two above"),
    ],
)
def test_what_is_not_served_is_refused(kind, changes, options, said):
    if not compat.has_mosaic_gpu() and said.startswith("Got"):
        said = f"The kernels in Mosaic GPU need JAX {'.'.join(map(str, compat.MOSAIC_SINCE))}"
    model = Decoder(dataclasses.replace(model_of("bfloat16").config, **changes), rngs=nnx.Rngs(0))
    options = dict(pages=9, batch_invariant=True, **options)
    if options.get("draft"):
        options |= dict(drafts=1, draft=model)
    if count := options.pop("layout", 0):
        model.layout = Layout(described_mesh({"tensor": count}))
    with described_gpu(kind), pytest.raises((ValueError, NotImplementedError)) as error:
        Engine(model, **options)
    assert said in str(error.value)


def test_scores_need_two_tokens():
    engine = Engine(make("llama", num_hidden_layers=1), pages=9)
    with pytest.raises(ValueError, match="`texts` must have at least two tokens each; got one"):
        engine.score([[1, 2], [3]])
    assert not engine.busy
