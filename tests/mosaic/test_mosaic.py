"""The kernels for Hopper, emulated: their numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, large_scores
from support import mosaic_emulator as emulator
from support.judge import judge
from support.mosaic_cases import (
    LONG,
    LONG_CAUSAL,
    MANY_KEYS,
    TWO_PASSES,
    biased,
    checked,
    emulated,
    forward_of,
    gradient_of_the_scale,
    in_order,
    judge_both,
    on_sms,
    run_forward,
    with_heads,
)

import pallas_flash
from pallas_flash._backends import mosaic
from pallas_flash._backends.mosaic.score_mask import Options, shared_arrays
from pallas_flash._execution.plan import Plan
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.scores import FUNCTIONS
from pallas_flash.tuning import BackwardTile, DqTile, ForwardTile, Tile, TileSizes

# Both orders of sums, of which another test has the second one by default.
one_pass = pytest.mark.parametrize(
    "in_order", cases.default([False], [False, True]), ids=["one-pass", "in-order"]
)
# A negative sign goes to the queries before the kernels.
IN_KERNELS = [name for name in cases.HEADS_ON_HOPPER if name != "negative scale"]
# Some of them, for the other tiles that larger heads have.
LARGE = ["full", "causal, first queries see nothing", "one key/value head"]


def served(size, names):
    """Cases at a head size, each of which takes seconds."""
    return [
        pytest.param(
            with_heads(cases.BY_NAME[name], size),
            id=f"{name.replace(' ', '-')}-{size}",
            marks=pytest.mark.extended,
        )
        for name in names
    ]


@in_order
@pytest.mark.parametrize(
    "case", [LONG, LONG_CAUSAL, MANY_KEYS], ids=["full", "causal", "many-keys"]
)
def test_stages_are_used_again(case, in_order, kernel_case):
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order))


@pytest.mark.parametrize(
    "case",
    cases.default(
        ["lengths of zero", "tiles of a bias"],
        ["lengths of zero", "bias of all examples", "mask of all examples and heads", "bias",
         "bias of keys", "tiles of a bias", "mask with empty tiles",
         "slopes, offset for each example", "all features"],
    ),
)  # fmt: skip
@in_order
def test_instances_have_their_own(case, in_order, monkeypatch, kernel_case):
    """Compute the second of two instances, as `jax.vmap` makes them; the first is different."""

    def batch_instances(function, batch):
        def of_two(x, first):
            return jnp.concatenate([first(x), x])

        def call(shared, *arrays):
            shared = jax.tree.map(lambda x: of_two(x, jnp.zeros_like), shared)
            arrays = jax.tree.map(lambda x: of_two(x, lambda x: x[::-1]), arrays)
            results = function(shared, *arrays)
            return jax.tree.map(lambda x: x[len(x) // 2 :], results)

        return call

    monkeypatch.setattr(emulator, "batch_instances", batch_instances)
    in_tiles = biased(B=2, T=100, S=104, N=2, K=1)
    case = in_tiles if case == "tiles of a bias" else cases.BY_NAME[case]
    judge_both(with_heads(case, 64), in_order)


# None of them is the table's.
SIZES = [
    TileSizes(ForwardTile(2, 80, 0, 3), dkv=BackwardTile(64, 3), dq=DqTile(2, 128, 3)),
    TileSizes(ForwardTile(3, 112, 2, 2), backward=BackwardTile(128, 3)),
]


@pytest.mark.parametrize("sizes", cases.default(SIZES[:1], SIZES), ids=["two-passes", "one-pass"])
def test_explicit_tiles_give_the_same(monkeypatch, sizes, kernel_case):
    start, used = emulator.launch, []

    def launch(kernel, operands, *, static, **others):
        if hasattr(static, "tile"):
            used.append(static.tile)
        return start(kernel, operands, static=static, **others)

    monkeypatch.setattr(emulator, "launch", launch)
    in_order = TWO_PASSES if sizes.backward is None else False
    judge(LONG, "bfloat16", emulated(LONG.problem("bfloat16"), in_order, sizes))
    assert {*used} == {*vars(sizes).values()} - {None}


SHORT = [
    (ForwardTile(2, 64, 2, 4), dict(is_causal=True)),
    (ForwardTile(3, 64, 1, 3), dict(key_value_seq_lengths=jnp.int32([130, 7]))),
]


@pytest.mark.parametrize(("tile", "options"), SHORT, ids=["causal", "lengths"])
def test_tiles_of_short_sequences(tile, options, monkeypatch, kernel_case):
    """Two CTAs compute all work tiles, so that all stages are used again."""
    on_sms(monkeypatch, 2)
    sizes = dict(B=2, T=200, S=200, N=4, K=2, H=128, V=128)
    case = dataclasses.replace(LONG, **sizes, options=lambda *_: options)
    problem = case.problem("bfloat16")
    results = forward_of(case, TileSizes(forward=tile))
    judge(case, "bfloat16", results, problem, apart=checked(problem[0], options).large)


@pytest.mark.parametrize(
    ("options", "near"),
    [
        (dict(alibi_slopes=jnp.ones(4)), True),
        (dict(alibi_slopes=jnp.ones(4), query_offset=2**24 - 19), True),
        (dict(alibi_slopes=jnp.ones(4), query_offset=2**24), False),
        (dict(alibi_slopes=jnp.ones(4), query_offset=jnp.zeros(2, jnp.int32)), False),
        (dict(alibi_slopes=jnp.ones(4), query_positions=jnp.zeros((2, 9), jnp.int32)), False),
    ],
)
def test_distances_are_quick_floats_where_all_are_small(options, near):
    """Distances that arrays tell may be anything."""
    q = jnp.zeros((2, 9, 4, 64), jnp.bfloat16)
    problem = checked((q, q, q), options)
    shared = shared_arrays(problem, problem.mask)
    tiling = Tiling(9, 64)
    functions = Options.from_problem(problem, shared, tiling, tiling).functions
    assert (functions.to_float is not FUNCTIONS.to_float) == near


FAR = cases.CANCELLING[1]


@in_order
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(FAR, id="two stores"),
        pytest.param(with_heads(FAR, 128, T=3, S=300), id="decoding"),
        pytest.param(with_heads(FAR, 256, T=70), id="cluster", marks=pytest.mark.extended),
        pytest.param(cases.CANCELLING[3], id="bias", marks=pytest.mark.extended),
    ],
)
def test_sums_that_nearly_cancel(case, in_order, kernel_case):
    problem = case.problem("bfloat16")
    large = checked(problem[0], problem[2]).large
    judge(case, "bfloat16", emulated(problem, in_order), problem, apart=large)


# With fewer queries than keys a call is decoding, up to a head dim of 256.
LOW_PARTS = [(64, 64, 130, 70), (64, 200, 130, 70), (64, 64, 3, 600), (264, 384, 70, 600)]
LOW_PARTS += [(576, 512, 1, 600)]


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "q_len", "kv_len"),
    cases.default(LOW_PARTS, [*LOW_PARTS, (128, 128, 300, 200), (256, 256, 130, 70)]),
)
def test_low_part_is_what_rounding_takes_off(head_dim, value_dim, q_len, kv_len, kernel_case):
    """By every forward. Queries of zero have equal weights, which no product rounds."""
    case = dataclasses.replace(LONG, H=head_dim, V=value_dim, T=q_len, S=kv_len)
    (q, k, v), _, _ = case.problem("bfloat16")
    call = checked((q * 0, k, v), {})
    with emulator.emulated(pytest.MonkeyPatch()):
        o, _ = run_forward(call)
        split, _ = run_forward(dataclasses.replace(call, split_output=True))
    # Splits of one query's keys have rounded outputs of their own otherwise.
    assert q_len == 1 or np.array_equal(o, split.o)
    exact = np.asarray(v, np.float64).mean(1, keepdims=True)
    found = np.asarray(split.o, np.float64) + np.asarray(split.low, np.float64)
    assert np.abs(found - exact).max() <= 2.0**-16 * np.abs(exact).max()


@in_order
@pytest.mark.parametrize(
    "case", [*served(64, IN_KERNELS), *served(128, LARGE), *served(256, LARGE)]
)
def test_numbers(case, in_order, kernel_case):
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order))


# Each stands for a way in which the kernels learn of something.
FEATURES = [
    "lengths of zero",
    "documents, causal, long",
    "mask with empty tiles",
    "blocks and predicate",
    "mask and function of heads",
    "bias of minus infinity",
    "dropout",
    "all features",
]
# Cases with a backward; queries take a negative scale before the kernels are called.
SERVED = [
    case for case in map(cases.BY_NAME.get, cases.SERVED_ON_HOPPER) if case.name != "negative scale"
]


@in_order
@cases.parametrize(names=FEATURES, others_extended=True, table=SERVED)
def test_numbers_of_features(case, in_order, kernel_case):
    judge_both(case, in_order)


@in_order
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    cases.default(
        chosen := [(40, 72), (192, 128), (8, 256)],
        [
            *chosen,
            (128, 64),
            (256, 256),
            (40, 40),
            (80, 80),
            (96, 96),
            (112, 48),
            (64, 128),
            (16, 112),
        ],
    ),
)
def test_numbers_of_other_head_dims(head_dim, value_dim, in_order, kernel_case):
    """Slots are used again, and query heads share their sums."""
    case = dataclasses.replace(LONG, T=100, S=150, H=head_dim, V=value_dim)
    judge_both(case, in_order)


@one_pass
@cases.parametrize(names=["everything at once"], more=["dropout", "large scores"])
def test_another_forward_may_come_before(case, in_order, monkeypatch, kernel_case):
    """The forward is that of "triton", as where "mosaic" is chosen for the backward alone."""
    triton = Plan.from_implementation("interpret", TileSizes(forward=Tile(32, 32)))
    monkeypatch.setattr(mosaic, "forward", lambda p, _: triton.run_forward(p))
    judge_both(dataclasses.replace(case, H=64, V=64), in_order)


def test_largest_additive_mask(kernel_case):
    """It is read for queries that do not exist, too, of which the tile has some."""
    pair = "left padding", "max of float32"
    args = large_scores.arguments(70, 70, False, (pair,), "bfloat16")
    large_scores.check(args, emulated(large_scores.problem(*args)))


@one_pass
def test_gradient_of_the_scale(in_order):
    problem = cases.BY_NAME["scale"].problem("bfloat16")
    got = gradient_of_the_scale(problem, in_order)
    qkv, (do, dlse), _ = problem

    def blocked(scale):
        """Call plain JAX, which rounds as the kernels do: the sum is small beside its terms."""
        return pallas_flash.attention(*qkv, scale=scale, return_lse=True, implementation="xla")

    _, pull = jax.vjp(blocked, jnp.float32(0.7))
    [want] = pull((do, dlse))
    np.testing.assert_allclose(got, want, rtol=2e-3)


def test_gradient_of_the_scale_in_order():
    """The tiles of 192 of 520 queries end before those of 128 that delta has."""
    problem = dataclasses.replace(LONG, T=520).problem("bfloat16")
    one_pass, in_order = (gradient_of_the_scale(problem, x) for x in (False, TWO_PASSES))
    np.testing.assert_allclose(in_order, one_pass, rtol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(8))
def test_random_problems(seed, kernel_case):
    random = np.random.default_rng(seed)
    T, S = (int(x) for x in random.integers(1, 400, 2))
    kv_heads = int(random.integers(1, 3))
    options = dict(is_causal=True, query_offset=int(random.integers(-T, S)))
    case = cases.Case(
        f"random {seed}",
        *(1, T, S, kv_heads * int(random.integers(1, 4)), kv_heads),
        *[int(random.choice([64, 128]))] * 2,
        options=lambda random, case: options if seed % 2 else {},
    )
    dtype = ["bfloat16", "float16"][seed // 2 % 2]
    judge(case, dtype, emulated(case.problem(dtype)))
