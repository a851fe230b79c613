"""`models.engine`: many requests at once, each as if it were alone."""

import dataclasses
import functools
import itertools
import os
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import eight_devices
from support.decoder_files import make

from models import Decoder, generation
from models.engine import Engine, Sampling
from models.engine.pages import bytes_of_token
from models.engine.sampling import LIMITED, Limits, draw
from models.generation import Generation
from models.sharding import AXES, Layout
from models.tokens import Bytes
from scripts.benchmarks import engine as benchmark
from scripts.benchmarks import results

GREEDY = Sampling(temperature=0, max_tokens=12)
SIZES = dict(pages=24, page_size=4, max_requests=4, max_tokens_per_step=16)
# The first is read in three chunks; the last one begins as the second does.
PROMPTS = [[n * n % 31 for n in range(40)], [*range(20)], [7], [3, 1, 4], [5] * 9, [*range(18)]]


# Layers of two kinds: two see all tokens, and five have windows, so that a text has four tables.
MIXED = ["full_attention" if n in (1, 4) else "sliding_attention" for n in range(7)]
MIXED = dict(num_hidden_layers=7, layer_types=MIXED, sliding_window=6)


@functools.cache
def model_of(family, **changes):
    if family == "mixed":
        return make("gemma3_text", max_position_embeddings=64, **MIXED, **changes)
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    return make(family, **{name: 64}, **changes)


def engine_of(family="llama", tokenizer=None, **changes):
    return Engine(model_of(family), tokenizer, **(SIZES | changes))


def alone(prompt, count, family="llama"):
    made = Generation(model_of(family), [prompt], count, generation.Sampling(temperature=0))
    return [token for [token] in made]


def tokens_of(answers):
    return [answer.tokens for answer in answers]


# ----------------------------------------------------------------------------- texts


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "mixed", "phi3", "smollm3"])
def test_text_is_that_of_each_alone(family):
    engine = engine_of(family)
    assert tokens_of(engine.run(PROMPTS, GREEDY)) == [alone(x, 12, family) for x in PROMPTS]
    assert not engine.busy
    # The prompts are in pages by now.
    assert tokens_of(engine.run(PROMPTS, GREEDY)) == [alone(x, 12, family) for x in PROMPTS]


@pytest.mark.parametrize(("family", "pages"), [("llama", 14), ("mixed", 9)])
def test_text_that_loses_its_pages_goes_on(family, pages):
    engine = engine_of(family, pages=pages)
    wanted = pages * 4 * bytes_of_token(model_of(family).config, None)
    found = sum(x.nbytes for x in engine._device.state[0])
    assert wanted <= found < wanted * (pages + 1) / pages
    for _ in range(3):
        answers = engine.run(PROMPTS, GREEDY)
        assert tokens_of(answers) == [alone(x, 12, family) for x in PROMPTS]
    assert engine.preemptions > 1


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("call", [0, 3])
def test_interrupted_step_leaves_no_named_page(monkeypatch, call, drafts):
    """Pages that no step has computed would be shared by the next request of the same text."""
    engine, left = engine_of(drafts=drafts, max_tokens_per_step=32), [call]
    real = Engine._call

    def interrupted(*args, **kwargs):
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(Engine, "_call", interrupted)
    first = engine.submit(PROMPTS[0], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        while engine.busy:
            engine.step()
    # The same request goes on, and another one of the same text is right, too.
    second, texts = engine.submit(PROMPTS[0], GREEDY), {}
    while engine.busy:
        texts |= {answer.id: answer.tokens for answer in engine.step()}
    assert texts == dict.fromkeys((first, second), alone(PROMPTS[0], 12))


def test_drawn_text_depends_on_its_seed_alone():
    engine = engine_of(pages=14)
    each = [
        Sampling(seed=3, max_tokens=12),
        Sampling(top_k=5, seed=4, max_tokens=12),
        Sampling(repetition_penalty=1.5, top_p=0.9, seed=4, max_tokens=12),
        dataclasses.replace(GREEDY, repetition_penalty=1e6),
        Sampling(min_p=0.1, seed=-1, max_tokens=12),
        Sampling(0.5, max_tokens=12),
    ]
    beside = tokens_of(engine.run(PROMPTS, each))
    for prompt, sampling, tokens in zip(PROMPTS, each, beside, strict=True):
        assert tokens_of(engine.run([prompt], sampling)) == [tokens]
    # No token comes twice where that is dear, and few where nothing forbids it.
    assert len({*beside[3], *PROMPTS[3]}) == 15
    assert engine.preemptions > 1


def test_samples_of_a_prompt_differ():
    engine = engine_of()
    prompt = PROMPTS[0]
    sampling = Sampling(samples=6, max_tokens=8, seed=5)
    answers = engine.run([prompt, [1, 2]], [sampling, GREEDY])
    assert [(x.id, x.sample) for x in answers] == [*((0, n) for n in range(6)), (1, 0)]
    assert len({tuple(x) for x in tokens_of(answers[:6])}) == 6
    again = dataclasses.replace(sampling, samples=1)
    assert tokens_of(engine.run([prompt], again)) == tokens_of(answers[:1])


def test_steps_return_answers_by_request_and_sample():
    engine = engine_of()
    prompts = PROMPTS[:3]
    engine.run(prompts, GREEDY)  # The next texts have slots in another order.
    engine.submit(prompts[0], Sampling(max_tokens=8))
    engine.submit(prompts[1], Sampling(samples=3, max_tokens=5))
    steps = []
    while engine.busy:
        steps.append([(x.id, x.sample) for x in engine.step()])
    assert max(map(len, steps)) > 2 and steps == [sorted(set(x)) for x in steps]


def test_log_probabilities_are_the_model_s():
    model = model_of("llama")
    [answer] = engine_of().run([PROMPTS[1]], Sampling(0.7, top_k=9, repetition_penalty=1.2))
    text = jnp.asarray([*answer.prompt, *answer.tokens])
    wanted = jax.nn.log_softmax(model(text[None])[0, len(answer.prompt) - 1 : -1])
    wanted = np.take_along_axis(wanted, np.array(answer.tokens)[:, None], axis=1)[:, 0]
    assert answer.end == "full" and len(answer.tokens) == 45
    np.testing.assert_allclose(answer.log_probabilities, wanted, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mixed"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_small_caches_change_logits_little(dtype, family):
    answers = [
        engine_of(family, cache_dtype=x).run(PROMPTS, dataclasses.replace(GREEDY, max_tokens=1))
        for x in (None, dtype)
    ]
    right, found = ([x.log_probabilities[0] for x in row] for row in answers)
    assert found != right
    np.testing.assert_allclose(found, right, atol=0.15)


@functools.cache
def draft_model(family="mistral"):
    """A model that knows fewer tokens, and sees fewer: its pages are kept for the other one."""
    sizes = dict(num_hidden_layers=1, vocab_size=29, max_position_embeddings=64)
    kinds = dict(num_hidden_layers=2) if family == "gemma3_text" else {}
    return make(family, seed=1, **sizes | kinds)


@pytest.mark.parametrize(
    ("family", "drafts", "draft"),
    [
        ("llama", 1, None),
        ("llama", 3, None),
        ("llama", 3, draft_model),
        ("mixed", 3, functools.partial(draft_model, "gemma3_text")),
    ],
)
def test_guessed_tokens_change_no_answer(family, drafts, draft):
    """Texts that repeat themselves, drawn in all ways, with pages that do not suffice."""
    draft = draft and draft()
    sizes = dict(pages=20 if family == "llama" else 18, max_tokens_per_step=32)
    prompts = [x * 3 for x in PROMPTS[2:5]] + PROMPTS
    two = dict(temperature=2, top_k=2, max_tokens=40)
    dear = Sampling(temperature=0, max_tokens=30, repetition_penalty=1.3)
    each = [Sampling(**two, seed=n) if n % 2 else dear if n == 4 else GREEDY for n in range(9)]
    engine = engine_of(family, drafts=drafts, draft=draft, **sizes)
    found, right = engine.run(prompts, each), engine_of(family, **sizes).run(prompts, each)
    assert engine.preemptions > 1
    assert [(x.tokens, x.end) for x in found] == [(x.tokens, x.end) for x in right]
    for one, other in zip(found, right, strict=True):
        np.testing.assert_allclose(one.log_probabilities, other.log_probabilities, atol=1e-4)
    assert engine.warm_up() == engine.programs <= 10
    # One token, over and over: a step gives all that it guesses, and one more. So does a model that
    # guesses its own tokens.
    prompt = [7]
    if draft is not None:
        same = dict(drafts=drafts, draft=model_of(family))
        prompt, engine = PROMPTS[1], engine_of(family, **same, **sizes)
    engine.submit(prompt, Sampling(temperature=0, max_tokens=40))
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    assert steps < 5 + 40 / (1 + drafts)


def test_guesses_of_a_model_keep_the_distribution():
    """Chi-square of the third token, which a step draws after two guesses where both are right."""
    prompt, count, vocab = [3, 1, 4], 2000, np.arange(31)
    sizes = dict(pages=200, max_requests=40, max_tokens_per_step=128)
    engine = engine_of(drafts=2, draft=draft_model(), **sizes)
    engine.submit(prompt, Sampling(0.7, max_tokens=3, samples=count))
    ended, steps = [], 0
    while engine.busy:
        ended += [x for x in engine.step() if x.end is not None]
        steps += 1
    assert 2 * count / 40 < steps < 3 * count / 40
    one, two = (x.ravel() for x in np.meshgrid(vocab, vocab, indexing="ij"))
    texts = jnp.stack([*[jnp.full(31**2, x) for x in prompt], one, two], axis=1)
    p = jax.nn.softmax(model_of("llama")(texts)[:, 2:] / 0.7)
    wanted = p[:, 0][np.arange(31**2), one] * p[:, 1][np.arange(31**2), two]
    wanted = np.asarray(wanted @ p[:, 2]) * count
    found = np.bincount([x.tokens[2] for x in ended], minlength=31)
    assert ((found - wanted) ** 2 / wanted).sum() < 59.8  # of 30 degrees, once in a thousand


def compare_devices():
    config, types = model_of("mixed").config, (jax.sharding.AxisType.Auto,) * 4
    layout = Layout(jax.make_mesh((1, 1, 1, 2), AXES, axis_types=types, devices=jax.devices()[:2]))
    models = (Decoder(config, rngs=nnx.Rngs(0), layout=x) for x in (None, layout))
    one, two = (Engine(model, **SIZES | dict(pages=9)) for model in models)
    assert tokens_of(one.run(PROMPTS, GREEDY)) == tokens_of(two.run(PROMPTS, GREEDY))
    assert two.preemptions and two.programs == 2


def test_two_devices_share_heads():
    eight_devices.run(__name__, "compare_devices")


# ----------------------------------------------------------------------------- ends


def test_requests_come_and_go():
    engine = engine_of()
    first = engine.submit(PROMPTS[0], GREEDY)
    second = engine.submit([1, 2], Sampling(max_tokens=None))
    seen, added = {}, None
    for n in range(200):
        for answer in engine.step():
            seen[answer.id] = answer
        if n == 5:
            engine.cancel(second)
            added = engine.submit(PROMPTS[3], GREEDY)
        if not engine.busy:
            break
    engine.cancel(first)  # It has ended.
    assert {id: answer.end for id, answer in seen.items()} == {
        first: "length",
        second: "cancelled",
        added: "length",
    }
    assert seen[first].tokens == alone(PROMPTS[0], 12)
    assert seen[added].tokens == alone(PROMPTS[3], 12)
    assert engine._scheduler.pages.free == 24


@pytest.mark.parametrize(("pages", "most", "length"), [(24, None, 64), (10, 50, 40), (24, 30, 30)])
def test_text_ends_where_context_or_pages_are_full(pages, most, length):
    endless = dataclasses.replace(GREEDY, max_tokens=None)
    engine = engine_of(pages=pages, max_length=most)
    answers = engine.run([PROMPTS[1], [3] * length, [4]], endless)
    assert [(len(x.tokens), x.end) for x in answers] == [
        (length - 19, "full"),
        (1, "full"),
        (length, "full"),
    ]
    assert answers[0].tokens == alone(PROMPTS[1], length - 19)


def test_stop_ends_the_text():
    prompt = [3, 1, 4]
    text = alone(prompt, 12)
    [answer] = engine_of().run([prompt], dataclasses.replace(GREEDY, stop_tokens=[text[4]]))
    end = text.index(text[4]) + 1
    assert (answer.tokens, answer.end) == (text[:end], "stop")
    # Tokens are bytes: a string that two of them form.
    engine = engine_of(tokenizer=Bytes())
    stop = bytes(text[4:6]).decode()
    [answer] = engine.run([prompt], dataclasses.replace(GREEDY, stop=["x", stop]))
    written = bytes(text).decode().split(stop)[0]
    assert (answer.text, answer.end) == (written, "stop")


def test_new_parameters_forget_old_pages():
    engine, other = engine_of(), make("llama", seed=1, max_position_embeddings=64)
    before = tokens_of(engine.run(PROMPTS, GREEDY))
    engine.set_model(other)
    after = tokens_of(engine.run(PROMPTS, GREEDY))
    engine.set_model(model_of("llama"))
    assert tokens_of(engine.run(PROMPTS, GREEDY)) == before != after
    fresh = Engine(other, **SIZES).run(PROMPTS, GREEDY)
    assert tokens_of(fresh) == after


# ----------------------------------------------------------------------------- programs


def test_few_programs_serve_any_traffic():
    """All are there after `warm_up`, which may come while texts are written."""
    engine = engine_of(pages=23, max_requests=3, max_tokens_per_step=64)
    # No token comes twice, which steps remember on the device.
    once = dataclasses.replace(GREEDY, repetition_penalty=1e6)
    [right] = tokens_of(engine.run([[1, 2]], once))
    other, one = engine.submit([5], GREEDY), engine.submit([1, 2], once)
    engine.step()
    engine.step()
    assert engine.warm_up() == 9 == engine.programs
    answers = {x.id: x.tokens for _ in range(20) for x in engine.step()}
    assert answers == {other: alone([5], 12), one: right}
    rng = np.random.default_rng(0)
    for n in range(5):
        prompts = [rng.integers(0, 31, rng.integers(1, 60)).tolist() for _ in range(1 + 3 * n)]
        for sampling in (GREEDY, Sampling(max_tokens=9), Sampling(top_k=3, max_tokens=9)):
            engine.run(prompts, sampling)
    assert engine.programs == 9
    engine.score([[1, *prompt] for prompt in prompts])
    assert engine.programs == 10


# ----------------------------------------------------------------------------- drawing

P = np.array([0.1, 0.4, 0.05, 0.25, 0.2])


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(), P),
        (Sampling(0.5), P**2),
        (Sampling(top_k=2), P * [0, 1, 0, 1, 0]),
        (Sampling(top_p=0.7), P * [0, 1, 0, 1, 1]),
        (Sampling(min_p=0.3), P * [0, 1, 0, 1, 1]),
        (Sampling(0.5, top_k=3, min_p=0.3), P**2 * [0, 1, 0, 1, 0]),
        (Sampling(repetition_penalty=2.0), P ** np.array([1, 2, 1, 1, 2])),
        (Sampling(temperature=0, repetition_penalty=2.0), [0, 0, 0, 1, 0]),
        (Sampling(temperature=0), [0, 1, 0, 0, 0]),
    ],
)
def test_drawn_tokens_have_their_probability(sampling, wanted):
    """Chi-square over the positions of one text, beside rows that are drawn otherwise."""
    count, wanted = 4000, np.array(wanted) / np.sum(wanted)
    packed = np.stack([sampling.packed(1), Sampling(seed=5, top_k=1).packed(0)] * count)
    logits = jnp.tile(jnp.log(jnp.asarray(P, jnp.float32)), (2 * count, 1))
    seen = jnp.tile(jnp.array([False, True, False, False, True]), (2 * count, 1))
    position = jnp.repeat(jnp.arange(count), 2)
    limits = Limits.unpacked(jnp.asarray(packed))
    tokens = jax.jit(draw, static_argnums=4)(logits, limits, position, seen, LIMITED)
    found = np.bincount(tokens[::2], minlength=5)
    assert not found[wanted == 0].any()
    kept = wanted > 0
    chi_square = ((found - count * wanted)[kept] ** 2 / (count * wanted[kept])).sum()
    assert chi_square < 18.5  # of 4 degrees of freedom, once in a thousand
    if sampling.temperature and kept.sum() > 2:
        other = jnp.asarray(np.stack([sampling.packed(2)] * (2 * count)))
        again = draw(logits, Limits.unpacked(other), position, seen, LIMITED)
        assert (np.asarray(again)[::2] != np.asarray(tokens)[::2]).mean() > 0.2


# ----------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: engine_of(pages=0), "`pages` must be an int of at least 1; got 0"),
        (lambda: engine_of(page_size=2.0), "`page_size` must be an int of at least 1; got 2.0"),
        (
            lambda: engine_of(max_tokens_per_step=24),
            "`max_tokens_per_step` must be a power of two above 4, what all requests decode in a "
            "step, and at most 1048576; got 24",
        ),
        (lambda: engine_of(max_requests=16), "must be a power of two above 16, what all requests"),
        (lambda: engine_of(drafts=4), "must be a power of two above 20, what all requests decode"),
        (lambda: engine_of(draft=draft_model()), "`drafts` must be at least 1 with a `draft`; got"),
        (lambda: engine_of(drafts=1, draft=3), "`draft` must be a Decoder; got int"),
        (lambda: engine_of(max_tokens_per_step=2**40), "and at most 1048576; got 1099511627776"),
        (lambda: engine_of(batch_invariant=1), "`batch_invariant` must be True or False; got 1"),
        (
            lambda: engine_of(tokenizer="x"),
            "`tokenizer` must have `decode`, as in `models.tokens`; g",
        ),
        (lambda: engine_of(drafts=-1), "`drafts` must be an int of at least 0; got -1"),
        (
            lambda: engine_of(cache_dtype="int4"),
            "`cache_dtype` must be None or one of float32, bfloat16, float16, int8, float8_e4m3fn; "
            "got 'int4'",
        ),
        (lambda: Engine(None, **SIZES), "`model` must be a Decoder; got NoneType"),
        (lambda: engine_of().submit([]), "`prompt` must have a token in each text; got none"),
        (lambda: engine_of().submit([3, 31]), "must have tokens from 0 to 30; got 3 to 31"),
        (lambda: engine_of().submit([1.5]), "`prompt` must be a list of ints for each text; got"),
        (
            lambda: engine_of(pages=3).submit([1] * 13),
            "`prompt` must have at most the 12 tokens that context, pages and `max_length` allow; "
            "got 13. Shorten",
        ),
        (lambda: engine_of().submit("a"), "`prompt` must be tokens for an engine without"),
        (
            lambda: engine_of(tokenizer=Bytes()).submit([{"role": "user", "content": "a"}]),
            "`prompt` must be no messages without a chat template",
        ),
        (
            lambda: engine_of().submit([1], generation.Sampling()),
            "`sampling` must be a models.engine.Sampling; got models.generation.Sampling",
        ),
        (lambda: engine_of().submit([1], Sampling(stop=["a"])), "`stop` needs an engine with"),
        (lambda: engine_of().run([[1]], [GREEDY] * 2), "or one for each; got 2"),
        (lambda: engine_of().run([[1]], 3), "`sampling` must be a models.engine.Sampling; got bui"),
        (
            lambda: engine_of().warm_up(3),
            "`sampling` must be a models.engine.Sampling; got builtin",
        ),
        (lambda: engine_of().run(None), "`prompts` must be a list of prompts; got None"),
        (
            lambda: engine_of().submit([1, [2]]),
            "`prompt` must be a list of ints for each text; got",
        ),
        (
            lambda: engine_of().submit([1], Sampling(stop_tokens=[31])),
            "must be tokens from 0 to 30;",
        ),
        (lambda: engine_of().run("a"), "`prompts` must be a list of prompts; got a text"),
        (lambda: engine_of().run([1, 2]), "`prompt` must be a list of ints for each text; got int"),
        (lambda: engine_of().run([[1]], GREEDY)[0].text, "`text` needs an engine with a tokeniz"),
        (lambda: engine_of().cancel(0), "`id` must be a number that `submit` has returned; got 0"),
        (lambda: engine_of().set_model(3), "`model` must be a Decoder; got int"),
        (lambda: engine_of().set_model(make("llama", vocab_size=30)), "`model` must have the"),
        (lambda: Sampling(max_tokens=0), "`max_tokens` must be an int of at least 1, or None"),
        (lambda: Sampling(samples=None), "`samples` must be an int of at least 1; got None"),
        (lambda: Sampling(repetition_penalty=0), "`repetition_penalty` must be a positive number"),
        (lambda: Sampling(stop=None), "`stop` must be a list of texts with a character; got None"),
        (lambda: Sampling(stop_tokens=1.5), "`stop_tokens` must be a list of ints, or None; got 1"),
        (lambda: Sampling(stop="end"), "`stop` must be a list of texts with a character; got 'end"),
        (lambda: Sampling(stop_tokens=3), "`stop_tokens` must be a list of ints, or None; got 3"),
        (lambda: Sampling(top_k=0), "`top_k` must be an int of at least 1, or None; got 0"),
    ],
)
def test_wrong_argument_is_refused(call, said):
    with pytest.raises(ValueError) as error:
        call()
    assert said in str(error.value)


def test_refused_request_leaves_nothing():
    engine = engine_of()
    with pytest.raises(ValueError, match="got none"):
        engine.run([[1, 2], []], GREEDY)
    assert not engine.busy
    other = engine.submit([1], GREEDY)
    with pytest.raises(
        ValueError, match="`run` and `score` need an engine without requests; it is `busy`"
    ):
        engine.run([[1]])
    engine.cancel(other)
    assert [x.end for x in engine.step()] == ["cancelled"]
    assert not engine.busy


@pytest.mark.extended
def test_benchmark_times_both(tmp_path, capsys):
    words = "--model tiny --shorter 32 --requests 6 --slots 4 --dtype float32 --commit x --json"
    benchmark.main([*words.split(), str(tmp_path / "lines")])
    lines = results.load(tmp_path / "lines")
    found = [(x["case"].split()[0], x["implementation"]) for x in lines]
    assert found == list(itertools.product(("traffic", "decode"), ("engine", "generation")))
    assert all(x["tokens_per_s"] > 0 for x in lines) and "share" in lines[2]
    assert len(capsys.readouterr().out.splitlines()) == 7


@pytest.mark.extended
@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_is_constant():
    """100,000 steps of requests that come, end, are cancelled and lose their pages."""
    engine = engine_of(pages=14)
    engine.warm_up()
    rng, alive, pages = random.Random(0), [], []
    for step in range(100_000):
        if step % 10_000 == 9_999:
            pages.append(int(pathlib.Path("/proc/self/statm").read_text().split()[1]))
        if rng.random() < 0.3 and len(alive) < 8:
            prompt = [rng.randrange(31) for _ in range(rng.randrange(1, 40))]
            many, samples = rng.randrange(1, 30), rng.choice([1, 1, 2])
            dear = dict(repetition_penalty=rng.choice([1, 1, 1.2]), seed=step)
            sampling = Sampling(rng.choice([0, 1]), max_tokens=many, samples=samples, **dear)
            alive.append(engine.submit(prompt, sampling))
        if alive and rng.random() < 0.03:
            engine.cancel(alive.pop(rng.randrange(len(alive))))
        engine.step()
        alive = [id for id in alive if id in engine._texts]
    assert engine.preemptions > 1000 and engine.programs <= 10
    grown = (pages[-1] - pages[0]) * os.sysconf("SC_PAGE_SIZE")
    assert grown < 2**22, [f"{x * os.sysconf('SC_PAGE_SIZE') / 2**20:.2f} MiB" for x in pages]
