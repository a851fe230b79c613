"""Generated text: what is drawn, batches of different lengths, and texts beyond the context."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.decoder_files import make

from models import generation
from models.generation import Generation, Sampling, draw, limited

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
GREEDY = Sampling(temperature=0)


def texts(model, prompts, count, sampling=GREEDY, **options):
    """The new tokens of each text."""
    steps = list(Generation(model, prompts, count, sampling, **options))
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


@nnx.jit
def logits_of(model, tokens):
    return model(tokens)


def by_whole_passes(model, prompt, count, keep=0):
    """The most likely tokens without a cache; texts beyond the context of 32 slide."""
    tokens, new = list(prompt), []
    for _ in range(count):
        if len(tokens) > 32:
            tokens = tokens[:keep] + tokens[-max((32 - keep) // 2, 1) :]
        padded = jnp.asarray([tokens + [0] * (32 - len(tokens))])
        new.append(int(jnp.argmax(logits_of(model, padded)[0, len(tokens) - 1])))
        tokens.append(new[-1])
    return new


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_batch_of_lengths_is_each_alone(family):
    model = make(family)
    found = texts(model, PROMPTS, 9)
    assert found == [by_whole_passes(model, prompt, 9) for prompt in PROMPTS]


@pytest.mark.parametrize(("when_full", "sampling"), [("stop", GREEDY), ("slide", Sampling(seed=3))])
def test_text_depends_on_itself_alone(when_full, sampling):
    """Some of its neighbours fill the context, at different steps."""
    model, prompts = make("qwen3"), [[3, 1, 4], [*range(29)], [7] * 32, [5, 8] * 10]
    alone = [texts(model, [x], 25, sampling, when_full=when_full)[0] for x in prompts]
    for order in ((0, 1, 2, 3), (3, 2, 0, 1)):
        given = [prompts[n] for n in order]
        beside = texts(model, given, 25, sampling, when_full=when_full)
        assert beside == [alone[n] for n in order]
    assert [*map(len, alone)] == ([25, 4, 1, 13] if when_full == "stop" else [25] * 4)


def test_equal_prompts_are_drawn_apart():
    model = make("llama")
    first, other, second = texts(model, [[1, 2], [3], [1, 2]], 12, Sampling())
    assert [first] == texts(model, [[1, 2]], 12, Sampling())
    assert len({tuple(x) for x in (first, other, second)}) == 3


def test_padding_changes_no_token(monkeypatch):
    """Prompts and cache are padded to 32, and then not at all."""
    model, drawn = make("gemma3_text"), Sampling(seed=1)
    padded = texts(model, PROMPTS, 9, drawn)
    monkeypatch.setattr(generation, "_rounded", lambda length, least, most: int(length))
    assert padded == texts(model, PROMPTS, 9, drawn)


def test_few_programs_serve_all_lengths(monkeypatch):
    model, compiled = make("llama", num_hidden_layers=1, max_position_embeddings=1024), []

    def compile_(lowered):
        compiled.append(lowered)
        return lambda cache, params, tokens, *inputs: (tokens, cache)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    generation._programs.cache_clear()
    for count in (8, 9):
        for length in np.linspace(70, 1000, 20).astype(int):
            list(Generation(model, [[1] * length], count, GREEDY))
        assert 4 < len(compiled) <= 7
    generation._programs.cache_clear()


def test_second_generation_compiles_nothing():
    """Other numbers of the same model need no new program, nor does another seed."""
    first, second = make("llama"), make("llama")
    flat, tree = jax.tree.flatten(nnx.state(second))
    nnx.update(second, jax.tree.unflatten(tree, [-x for x in flat]))
    results = []
    for seed, model in enumerate((first, second, first)):
        generation = Generation(model, [[1] * 7, [2] * 3], 4, Sampling(seed=seed % 2))
        results.append([*generation])
        assert (generation.compile_seconds > 0) == (seed == 0)
    assert results[0] == results[2] != results[1]


def test_stop_token_ends_one_text():
    model = make("llama")
    whole = texts(model, PROMPTS, 9)
    stop = whole[0][2]
    found = texts(model, PROMPTS, 9, stop_tokens=[stop])
    ends = [row.index(stop) + 1 if stop in row else 9 for row in whole]
    assert found == [row[:end] for row, end in zip(whole, ends, strict=True)]
    assert len(found[0]) <= 3


def test_ended_text_gets_no_token():
    model = make("llama")
    generation = Generation(model, PROMPTS[:2], 6, GREEDY)
    found = []
    for n, tokens in enumerate(generation):
        found.append(tokens)
        if n == 1:
            generation.end(1)
    assert [row[1] is None for row in found] == [False, False, True, True, True, True]
    assert all(row[0] is not None for row in found)
    assert generation.prefill[0] == 7
    assert generation.decode[0] == 6


def test_text_ends_where_the_context_is_full():
    """The first text gets all tokens that it may have; the third meets its stop token there."""
    model = make("llama")
    prompts = [[1] * 30, [2] * 31, [3] * 32]
    stop = texts(model, prompts, 9)[2][0]
    made = Generation(model, prompts, 3, GREEDY, stop_tokens=[stop])
    lengths = [sum(token is not None for token in row) for row in zip(*made, strict=True)]
    assert lengths == [3, 2, 1]
    assert made.full == [False, True, False]
    assert made.ended == [False, True, True]
    assert made.prefill[0] == 93


@pytest.mark.parametrize(("given", "keep"), [(5, 0), (32, 0), (33, 0), (5, 7), (70, 30), (3, 31)])
def test_text_slides_behind_its_beginning(given, keep):
    """Half of the context beside the kept tokens is read again, several times."""
    model = make("qwen3")
    prompt = [n * n % 31 for n in range(given)]
    [found] = texts(model, [prompt], 60, when_full="slide", keep=keep)
    assert found == by_whole_passes(model, prompt, 60, keep)


def test_seed_decides_the_text():
    model = make("llama")
    same, again, other = (texts(model, PROMPTS, 9, Sampling(seed=x)) for x in (1, 1, 2))
    assert same == again != other
    # Each token has a key of its own.
    flat = dataclasses.replace(model.config, final_soft_cap=1e-6)
    model.config = flat
    [row] = texts(model, [[1]], 60, Sampling(seed=3), when_full="slide")
    assert len(set(row[:25])) > 10
    # So has the first token after the context was read again.
    assert len({row[0], row[32], row[49]}) > 1


def shares(logits, sampling, count=4000):
    """Return the share of the draws that each token has."""
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    drawn = collections.Counter(np.asarray(draw(logits, jax.random.key(0), sampling)).tolist())
    return np.array([drawn[n] for n in range(logits.shape[1])]) / count


P = np.array([0.1, 0.4, 0.05, 0.25, 0.2])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), [0, 1, 2, 3, 4]),
        (Sampling(top_k=2), [1, 3]),
        (Sampling(top_k=99), [0, 1, 2, 3, 4]),
        (Sampling(top_p=0.6), [1, 3]),
        (Sampling(top_p=0.7), [1, 3, 4]),
        (Sampling(top_p=0.01), [1]),
        (Sampling(min_p=0.5), [1, 3, 4]),
        (Sampling(top_k=3, min_p=0.6), [1, 3]),
        (Sampling(temperature=0), [1]),
    ],
)
def test_drawn_tokens_have_their_probability(sampling, kept):
    wanted = np.where(np.isin(np.arange(5), kept), P, 0)
    found = shares(np.log(P), sampling)
    np.testing.assert_allclose(found, wanted / wanted.sum(), atol=0.03)
    np.testing.assert_array_equal(np.flatnonzero(found), kept)


def test_temperature_sharpens():
    sharp = P**2 / (P**2).sum()
    np.testing.assert_allclose(shares(np.log(P), Sampling(0.5)), sharp, atol=0.03)
    logits = limited(jnp.log(jnp.asarray(P))[None], Sampling(0.5))[0]
    np.testing.assert_allclose(jax.nn.softmax(logits), sharp, rtol=1e-5)


INF = float("inf")


@pytest.mark.parametrize(
    ("logits", "sampling", "kept"),
    [
        *(([0, 1, 9, 2], Sampling(t), [2]) for t in (1e-37, 1e-38, 1e-45, 1e-320)),
        ([3e38, -3e38, -INF], Sampling(np.float32(1e-40)), [0]),
        ([1, 1, 0], Sampling(1e-40), [0, 1]),
        ([1, 2, -INF], Sampling(1e300), [0, 1]),
        ([1, INF, -INF], Sampling(0.5), [1]),
        ([-INF] * 3, Sampling(), [0, 1, 2]),
        ([0, 1, 1, 1], Sampling(top_k=2), [1, 2]),
        ([-0.0, 0.0, -1], Sampling(top_k=1), [0]),
        ([-3, -1, -2], Sampling(top_k=2), [1, 2]),
        ([0, 0.01, 0.02, 0.01], Sampling(1e300, top_k=1), [2]),
        ([0, 0.01, 0.02, 0.01], Sampling(1e300, top_p=0.3), [1, 2]),
        ([1, 1, 1], Sampling(top_p=1e-45), [0]),
        ([1, 2, 1], Sampling(top_p=0.2, min_p=1e-320), [1]),
        ([0, -30, 0], Sampling(top_p=1), [0, 1, 2]),
        ([-INF, 3, 3], Sampling(top_k=3, top_p=1, min_p=1), [1, 2]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_limits_hold_at_their_edges(logits, sampling, kept, dtype):
    logits = jnp.asarray([logits], jnp.float32).astype(dtype)
    left = limited(logits, sampling)
    assert left.dtype == jnp.float32
    np.testing.assert_array_equal(np.flatnonzero(jax.nn.softmax(left)), kept)
    assert int(draw(logits, jax.random.key(0), sampling)[0]) in kept


@pytest.mark.parametrize(
    ("make_it", "said"),
    [
        (lambda: Sampling(temperature=-1.0), "`temperature` must be a finite number of at least"),
        (lambda: Sampling(temperature=float("nan")), "of at least 0; got nan"),
        (lambda: Sampling(temperature=INF), "of at least 0; got inf"),
        (lambda: Sampling(temperature="a"), "of at least 0; got 'a'"),
        (lambda: Sampling(top_k=0), "`top_k` must be an int of at least 1"),
        (lambda: Sampling(top_k=2.5), "`top_k` must be an int of at least 1, or None; got 2.5"),
        (lambda: Sampling(top_p="a"), "`top_p` must be above 0 and at most 1, or None; got 'a'"),
        (lambda: Sampling(seed=None), "`seed` must be an int; got None"),
        (lambda: Sampling(top_p=1.5), "`top_p` must be above 0 and at most 1"),
        (lambda: Sampling(min_p=0.0), "`min_p` must be above 0 and at most 1"),
        (lambda: Generation(make("llama"), [], 1), "`prompts` must have at least one text"),
        (lambda: Generation(make("llama"), [[1], []], 1), "got none in text 2"),
        (lambda: Generation(make("llama"), [1, 2], 1), "for each text; got int64 () in text 1"),
        (lambda: Generation(make("llama"), [[1], [1.5]], 1), "got float64 (1,) in text 2"),
        (lambda: Generation(make("llama"), [[1, 31]], 1), "from 0 to 30; got 1 to 31 in text 1"),
        (
            lambda: Generation(make("llama"), [[1] * 32, [1] * 33], 1),
            "`prompts` must have at most the 32 tokens of the context; got 33 in text 2. Shorten",
        ),
        (
            lambda: Generation(make("llama"), [[1]], 1, when_full="halve"),
            '`when_full` must be "stop" or "slide"; got \'halve\'',
        ),
        (
            lambda: Generation(make("llama"), [[1]], 1, keep=2),
            '`keep` must be 0 unless `when_full` is "slide"; got 2',
        ),
        *(
            (
                lambda keep=keep: Generation(make("llama"), [[1]], 1, when_full="slide", keep=keep),
                f"`keep` must be from 0 to 31 tokens, fewer than the context; got {keep!r}",
            )
            for keep in (32, -1, 1.5)
        ),
    ],
)
def test_wrong_argument_is_refused(make_it, said):
    with pytest.raises(ValueError) as error:
        make_it()
    assert said in str(error.value)
