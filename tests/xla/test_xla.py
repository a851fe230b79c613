"""What is particular to "xla": its speed on a CPU, and what its backward has to itself."""

import contextlib
import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle
from support.described_gpus import described_gpu
from support.jaxprs import trace
from support.judge import (
    check_gradient_of_the_scale,
    check_that_nothing_shows,
    judge,
    measured,
)

import pallas_flash
from pallas_flash import _xla, _xla_rows
from pallas_flash._masks import Band, Mask, Segments, Tiling
from pallas_flash._problem import Problem
from pallas_flash._scores import LogSum

# The shortest of several times, taken in turns: what else runs on the machine only lengthens a
# time. Measured ratios are below a half, which leaves room for a guard at 1.
ROUNDS = 30


def seconds(run, inputs) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*inputs))
    return time.perf_counter() - start


@pytest.mark.parametrize(
    ("dtype", "is_causal"),
    cases.default(
        [("float32", True)], list(itertools.product(["float32", "bfloat16"], [False, True]))
    ),
)
def test_on_a_cpu_value_and_gradients_take_no_longer_than_those_of_jax(dtype, is_causal):
    rng = np.random.default_rng(0)
    with jax.default_device(jax.devices("cpu")[0]):
        inputs = [jnp.asarray(rng.standard_normal((1, 1024, 4, 64)), dtype) for _ in range(4)]

        def timed(attention):
            def loss(q, k, v, weight):
                out = attention(q, k, v, is_causal=is_causal, implementation="xla")
                return jnp.sum(out * weight, dtype=jnp.float32)

            gradients = oracle.optimized(jax.value_and_grad(loss, argnums=(0, 1, 2)))
            return functools.partial(seconds, gradients.lower(*inputs).compile(), inputs)

        ours, theirs = map(timed, (pallas_flash.attention, jax.nn.dot_product_attention))
        times = []
        for _ in range(ROUNDS):
            times.append((ours(), theirs()))
            best, goal = 1e3 * np.min(times, axis=0)
            if len(times) > 2 and best <= goal:
                return
    pytest.fail(f"{best:.1f} ms, and jax.nn took {goal:.1f} ms.")


@cases.parametrize(names=["lengths of zero", "causal, first queries see nothing"])
def test_queries_that_see_nothing_do_not_show_in_the_gradient_of_the_scale(case):
    qkv, cotangents, options = case.problem()

    @oracle.compiled
    def gradient(qkv, cotangents):
        def call(scale):
            return pallas_flash.attention(
                *qkv, scale=scale, return_lse=True, implementation="xla", **options
            )

        return jax.vjp(call, jnp.float32(0.4))[1](cotangents)

    poisoned = cases.poison(case, qkv, cotangents, options)
    np.testing.assert_array_equal(gradient(*poisoned), gradient(qkv, cotangents))


@pytest.mark.parametrize("heads", [1, 16, 128, 4096])
@pytest.mark.parametrize("length", [100, 2048, 16384])
def test_tiles_on_a_gpu_are_few_and_their_scores_bounded(heads, length):
    block_q, block_kv = _xla._block_sizes(heads, length, on_gpu=True)
    assert block_q % _xla.BLOCK_Q == 0 and block_kv == _xla.GPU_BLOCK
    fits = heads * block_q * min(block_kv, length) <= _xla.GPU_SCORES
    assert fits or block_q == _xla.BLOCK_Q
    more = heads * (block_q + _xla.BLOCK_Q) * min(block_kv, length) <= _xla.GPU_SCORES
    assert block_q == _xla.GPU_BLOCK or not more


@pytest.mark.parametrize("kind", [None, "NVIDIA H200"])
@pytest.mark.parametrize("known", [True, False])
def test_the_device_decides_on_the_tiles_of_both_passes(kind, known):
    length = 4096
    x = jax.ShapeDtypeStruct((1, length, 8, 320), jnp.bfloat16)
    ids = None if known else jax.ShapeDtypeStruct((1, length), jnp.int32)

    def gradients(q, ids):
        def loss(q):
            return pallas_flash.attention(q, q, q, segment_ids=ids, implementation="xla").sum()

        return jax.grad(loss)(q)

    with described_gpu(kind) if kind else contextlib.nullcontext():
        products = [e for e in trace(gradients, x, ids) if e.primitive.name == "dot_general"]
    keys = {e.outvars[0].aval.shape[-1] for e in products} - {320}
    if not kind:
        assert keys <= {_xla.BLOCK_Q, _xla.BLOCK_KV}
    elif known:
        assert keys == {length} and len(products) == 7
    else:
        assert length not in keys and _xla.GPU_BLOCK in keys


# ------------------------------------------------------------------------------------------------
# Whole rows of scores, as on a GPU


# Each kind of mask, score and statistic; several blocks, the last one ragged, and shares. The
# default run has each kind in one case.
@cases.parametrize(
    names=[
        "T of one tile, S of several",
        "one of everything",
        "mask, causal, lengths",
        "bias of minus infinity",
        "sinks, causal, first queries see nothing",
        "window, moved",
        "positions, window, slopes, lengths",
        "dropout",
        "all features",
    ],
    others_extended=True,
)
def test_whole_rows_are_right(case, whole_rows):
    judge(case, "float32", measured(case, "float32", "xla"))


@cases.parametrize(names=["causal", "all features"], others_extended=True)
def test_whole_rows_are_right_in_bfloat16(case, whole_rows):
    judge(case, "bfloat16", measured(case, "bfloat16", "xla"))


@cases.parametrize(names=["everything at once"], more=["large scores", "full"])
def test_whole_rows_are_right_in_float64(case, whole_rows):
    with jax.enable_x64(True):
        qkv, (do, dlse), options = case.problem("float64")
        problem = qkv, (do, dlse.astype(jnp.float64)), options
        judge(case, "float64", measured(case, "float64", "xla", problem), problem)


@cases.parametrize(
    names=["causal, first queries see nothing", "all features"],
    more=["lengths of zero", "documents, nothing in common", "everything at once", "window, moved"],
)
def test_nothing_shows_in_whole_rows_of_what_no_query_sees(case, whole_rows):
    check_that_nothing_shows(case, "xla")


@cases.parametrize(names=["causal, first queries see nothing"], more=["everything at once"])
def test_gradient_of_a_traced_scale_of_whole_rows(case, whole_rows):
    check_gradient_of_the_scale(case, "xla", 0.4)


def test_of_keys_that_are_elsewhere_the_lse_knows(whole_rows):
    """The backward of a part of a sequence is given no m, and the LSE of all keys."""
    one = jnp.ones((1, 1, 1, 1))
    problem = Problem(one, one, one, jnp.float32(1), *[None] * 4, Mask())
    wanted = dict(want_scale=False, want_bias=False, want_sinks=False)
    # Weights of 1 here, and of 3 elsewhere.
    m, l_log2 = jnp.ones((1, 1, 1)), jnp.full((1, 1, 1), 2.0)
    for log_sum, weight in ((LogSum(m, 0 * l_log2), 1), (LogSum(m, l_log2).in_one(), 0.25)):
        grads = _xla.backward(problem, one, log_sum, one, None, on_gpu=True, **wanted)
        np.testing.assert_allclose(grads.value, np.full((1, 1, 1, 1), weight), rtol=1e-6)


def of_shapes(T, S, heads, kv_heads, batch=1, *leaves):
    """A problem of which only the shapes and the mask are known, and its cuts."""
    q, k = (jax.ShapeDtypeStruct((batch, *n, 16), jnp.float32) for n in ((T, heads), (S, kv_heads)))
    problem = Problem(q, k, k, *[None] * 5, Mask(leaves))
    return problem, _xla_rows.cuts(problem)


@pytest.mark.parametrize(
    ("T", "S", "heads", "kv_heads", "batch"),
    [
        (100, 100, 4, 2, 3),
        (2048, 2048, 16, 16, 8),
        (8192, 8192, 15, 5, 2),
        (40000, 40000, 3, 1, 1),
        (1, 2**20, 64, 8, 4),
        (70000, 3000, 71, 1, 2),
    ],
)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_blocks_hold_few_scores_and_all_that_is_seen(T, S, heads, kv_heads, batch, mask):
    leaves = {"full": (), "causal": (Band(high=S - T),), "window": (Band(-500, 30),)}[mask]
    problem, cuts = of_shapes(T, S, heads, kv_heads, batch, *leaves)
    assert batch % cuts.batch == kv_heads % cuts.kv_heads == 0
    assert cuts.kv_heads == kv_heads or cuts.batch == 1
    assert len({group.width for group in cuts.groups}) <= _xla_rows.WIDTHS
    every = cuts.batch * cuts.kv_heads * (heads // kv_heads) * cuts.rows * 4
    assert every * max(group.width for group in cuts.groups) <= _xla_rows.BYTES
    starts = [(start, g.width) for g in cuts.groups for start in g.starts]
    assert len(starts) == -(-T // cuts.rows)
    ranges = problem.mask.kv_ranges(Tiling(T, cuts.rows), Tiling(S, 1))[0]
    for (start, width), (first, _, _, stop) in zip(starts, ranges, strict=True):
        assert start >= 0 and start + width <= S
        assert first >= stop or (start <= first and stop <= start + width)


def test_a_causal_mask_saves_most_of_what_is_not_seen():
    _, cuts = of_shapes(8192, 8192, 16, 16, 1, Band(high=0))
    share = sum(len(g.starts) * g.width for g in cuts.groups) * cuts.rows / 8192**2
    assert share <= 0.63
    # A window of few keys costs what it sees, or about that.
    _, cuts = of_shapes(16384, 16384, 16, 16, 1, Band(-512, 0))
    share = sum(len(g.starts) * g.width for g in cuts.groups) * cuts.rows / (16384 * 512)
    assert share <= 3


def test_what_arrays_leave_out_is_left_to_tiles_unless_there_is_only_one():
    for length, by_rows in ((4096, False), (2048, True)):
        ids = Segments(jnp.zeros((1, length), jnp.int32))
        assert (of_shapes(length, length, 1, 1, 1, ids)[1] is not None) == by_rows
    # Nor do rows of so many keys fit that a block had a few hundred queries.
    assert of_shapes(2**16, 2**22, 1, 1)[1] is None
