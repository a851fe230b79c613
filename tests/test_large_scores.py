"""Scores of any size: additive masks, written as a bias of -1e4, -1e9, -1e30 or `finfo.min`, and
large scales.

All products of queries and keys are exact here, so scores are the same float32 numbers in every
implementation. What they should give is found from those in float64: where a whole row is at -1e9
it is the mean of all values, because nothing else is left in float32.
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import ttir
from test_accuracy import ROUNDING, judge

import pallas_flash
from pallas_flash import Tile, TileSizes, _xla
from pallas_flash._scores import LogSum

AMOUNTS = {
    "-1e4": -1e4,
    "-1e7": -1e7,
    "-1e9": -1e9,
    "-1e10": -1e10,
    "-1e20": -1e20,
    "-1e30": -1e30,
    **{f"min of {x}": float(jnp.finfo(x).min) for x in ("float16", "bfloat16", "float32")},
    "-inf": -np.inf,
    "1e10": 1e10,
    "max of float32": float(jnp.finfo("float32").max),
}

# Who gets the amount: query positions [T, 1] and keys [1, S].
PATTERNS = {
    "left padding": lambda q, k, S: (k < S // 3) | (k > q),
    "documents": lambda q, k, S: 4 * k // S != 4 * q // S,
    "window": lambda q, k, S: (k > q) | (k < q - S // 5),
    "whole rows": lambda q, k, S: (q % 3 == 0) & (k >= 0),
    "every row": lambda q, k, S: q + k >= 0,
}

# One head for each pair: all of them, or each amount once and each pattern twice or more.
ALL = [(pattern, amount) for pattern in PATTERNS for amount in AMOUNTS]
SOME = [(list(PATTERNS)[n % len(PATTERNS)], amount) for n, amount in enumerate(AMOUNTS)]
FEW_PAIRS = [
    ("left padding", "-1e9"),
    ("whole rows", "-1e10"),
    ("every row", "min of float32"),
    ("window", "-1e30"),
    ("documents", "-1e7"),
    ("left padding", "max of float32"),
]

SLOPE, RATE = 0.125, 0.25
HALVED = oracle.ScoreFn(lambda s, *_: 0.5 * s, lambda s, *_: 0.5 * s, lambda s, *_: 0.5)


def options_of(amounts, T, S, together):
    """What else the call has: nothing, or all that meets the scores."""
    if not together:
        return {}
    # Every third sink beats all that is hidden, the others are what `HALVED` makes of the amounts.
    sinks = [n % 9 - 4 if n % 3 == 0 or np.isinf(x) else 0.5 * x for n, x in enumerate(amounts)]
    return dict(
        sinks=jnp.asarray(sinks, jnp.float32),
        alibi_slopes=jnp.full(len(amounts), SLOPE, jnp.float32),
        score_fn=HALVED,
        dropout_rate=RATE,
        dropout_key=jax.random.key(5),
        broadcast_dropout=True,
        is_causal=True,
        query_offset=S - T,
    )


def dyadic(random, *shape):
    """Quarters up to 2: a sum of their products is exact in any order, in 16 bits and in TF32."""
    return np.clip(np.round(4 * random.standard_normal(shape)) / 4, -2, 2)


@functools.cache
def problem(T, S, pairs, dtype="float32", together=False, H=16):
    """As `cases.Case.problem`; heads share nothing."""
    random, n = np.random.default_rng(0), len(pairs)
    shapes = (1, T, n, H), (1, S, n, H), (1, S, n, H), (1, T, n, H)
    q, k, v, do = (jnp.asarray(dyadic(random, *shape), dtype) for shape in shapes)
    dlse = jnp.asarray(random.standard_normal((1, T, n)), jnp.float32)
    at = np.arange(T)[:, None] + S - T, np.arange(S), S
    bias = [np.where(PATTERNS[name](*at), AMOUNTS[amount], 0) for name, amount in pairs]
    options = options_of([AMOUNTS[amount] for _, amount in pairs], T, S, together)
    return (q, k, v), (do, dlse), options | {"bias": jnp.asarray(bias, jnp.float32)[None]}


def head(n, x, name=None):
    """What belongs to one head of an array of a problem or a result."""
    if name in ("sinks", "dsinks", "alibi_slopes"):
        return x[n : n + 1]
    return x[:, n : n + 1] if name in ("bias", "dbias") else x[:, :, n : n + 1]


@functools.cache
def expected(args, tf32=False):
    """For each head what `judge` expects."""
    qkv, cotangents, options = problem(*args)
    operands, rest = oracle.split(options)
    names = oracle.names(options)
    dense = functools.partial(oracle.dense, tf32=tf32, **rest)
    run = oracle.compiled(functools.partial(oracle.differentiate, dense))
    baseline = run(*qkv, *cotangents, **operands)
    per_head = ("bias", "sinks", "alibi_slopes")
    found = []
    for n in range(qkv[0].shape[2]):
        own = {name: head(n, x, name) if name in per_head else x for name, x in options.items()}
        arrays = (head(n, x) for x in (*qkv, *cotangents))
        truth = oracle.solve(*arrays, **own, tf32=tf32, rounded=np.float32)
        found.append((names, truth, [head(n, x, y) for x, y in zip(baseline, names, strict=True)]))
    return found


def check(args, results, tf32=False):
    """`judge` for each head, and the LSE of each row, of which some are small and some are not."""
    _, S, pairs, dtype, *_ = args
    case, failures = cases.Case("additive", S=S), []
    for n, (pair, found) in enumerate(zip(pairs, expected(args, tf32), strict=True)):
        names, truth, _ = found
        names = names[: len(results)]
        own = [head(n, x, name) for x, name in zip(results, names, strict=True)]
        lse, want = np.asarray(own[1], np.float64), truth.values["lse"]
        finite = np.isfinite(want)
        error = np.abs(lse[finite] - want[finite])
        bound = 2 * ROUNDING["float32"] * (np.abs(want[finite]) + 1 + np.log(S))
        try:
            np.testing.assert_array_equal(lse[~finite], want[~finite])
            assert np.all(error <= bound), f"lse: {error.max():.2e}"
            judge(case, dtype, own, expected=found, tf32=tf32, apart=True)
        except AssertionError as failure:
            failures.append(f"{', '.join(pair)}: {str(failure).strip().splitlines()[0]}")
    assert not failures, "\n".join(failures)


def attention(implementation, options, tiles):
    tiles = {"tile_sizes": tiles} if implementation in ("triton", "interpret") else {}
    return functools.partial(
        pallas_flash.attention, return_lse=True, implementation=implementation, **options, **tiles
    )


def results_of(implementation, args, tiles=None, run=oracle.compiled):
    """Output, LSE and gradients."""
    qkv, cotangents, options = problem(*args)
    operands, rest = oracle.split(options)
    call = attention(implementation, rest, tiles)

    def function(qkv, cotangents, operands):
        return oracle.differentiate(call, *qkv, *cotangents, **operands)

    return run(function)(qkv, cotangents, operands)


# Several along both axes, the last ones ragged; few queries have two parts.
TILES = TileSizes(Tile(64, 32), dkv=Tile(32, 64), dq=Tile(32, 64))
FEW_TILES = TileSizes(decode=Tile(16, 64), dkv=Tile(16, 128), dq=Tile(16, 128))
FEW = 3, 600


def arguments(T, S, together, pairs=tuple(SOME), dtype="float32"):
    """Of `problem`."""
    return T, S, pairs, dtype, together


def emulated(function):
    """With the lowered kernels executed in NumPy, where a multiply-add of a GPU rounds once."""
    return functools.partial(ttir.evaluate, function)


RUNS = {
    "emulated": ("triton", emulated),
    **{name: (name, oracle.compiled) for name in ("interpret", "xla", "reference")},
}
CALLS = {
    "alone": arguments(70, 70, False),
    "together": arguments(70, 70, True, tuple(FEW_PAIRS)),
    "few queries": arguments(*FEW, True, tuple(FEW_PAIRS)),
    "all alone": arguments(70, 70, False, tuple(ALL)),
    "all together": arguments(70, 70, True, tuple(ALL)),
    "all of few queries": arguments(*FEW, True, tuple(ALL)),
}
# What "emulated" is for, the others do alike.
DEFAULT = [
    *(("emulated", call) for call in ("together", "few queries")),
    ("reference", "alone"),
    ("xla", "together"),
]


@pytest.fixture(autouse=True)
def several_tiles_of_xla(monkeypatch):
    monkeypatch.setattr(_xla, "BLOCK_Q", 16)
    monkeypatch.setattr(_xla, "BLOCK_KV", 32)


@pytest.mark.parametrize(
    ("run", "call"),
    [
        pytest.param(run, call, marks=() if (run, call) in DEFAULT else pytest.mark.extended)
        for run in RUNS
        for call in CALLS
    ],
)
def test_additive_masks(run, call, kernel_case):
    implementation, how = RUNS[run]
    tiles = FEW_TILES if CALLS[call][:2] == FEW else TILES
    check(CALLS[call], results_of(implementation, CALLS[call], tiles, how))


@pytest.mark.parametrize("call", cases.default(["together"], ["alone", "together"]))
def test_additive_masks_in_whole_rows(call, whole_rows):
    check(CALLS[call], results_of("xla", CALLS[call]))


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("run", ["emulated", "xla"])
def test_additive_masks_in_16_bits(run, dtype, kernel_case):
    implementation, how = RUNS[run]
    args = arguments(70, 70, True, tuple(ALL), dtype)
    check(args, results_of(implementation, args, TILES, how))


@functools.cache
def with_scale(run):
    """The results of a call as a function of (q, k, v), (do, dlse) and the scale."""
    implementation, how = RUNS.get(run, (run, oracle.compiled))
    call = attention(implementation, {}, TILES)

    def function(qkv, cotangents, scale):
        (o, lse), pull = jax.vjp(lambda *x: call(*x[:3], scale=x[3]), *qkv, scale)
        return o, lse, *pull(cotangents)

    return how(function)


def check_scale(run, scale, dtype="float32"):
    """Traced, so that nobody knows it."""
    qkv, cotangents, _ = problem(40, 50, tuple(SOME[:2]), dtype)
    truth = oracle.solve(*qkv, *cotangents, scale=scale, rounded=np.float32)
    baseline = oracle.differentiate(functools.partial(oracle.dense, scale=scale), *qkv, *cotangents)
    *results, dscale = with_scale(run)(qkv, cotangents, jnp.float32(scale))
    case = cases.Case("scale", S=50)
    judge(case, dtype, results, expected=(oracle.NAMES, truth, baseline), apart=True)
    assert abs(dscale - truth.values["dscale"]) <= 8 * ROUNDING[dtype] * truth.terms["dscale"]


@pytest.mark.parametrize(
    ("run", "scale"),
    [
        pytest.param(
            run, x, marks=pytest.mark.extended if run != "xla" and x in (30.0, 1e4) else ()
        )
        for run in RUNS
        for x in (30.0, 300.0, 1e4, 1e9)
    ],
)
def test_large_scales(run, scale, kernel_case):
    """One key has nearly all the weight of a row, and an LSE of 1e4 in one float32 would be off by
    5e-4, as would each probability.
    """
    check_scale(run, scale)


def residuals(**options):
    """How many numbers a row the backward gets beside the output."""
    x = jax.ShapeDtypeStruct((1, 7, 2, 16), jnp.float32)
    call = attention("interpret", options, None)
    _, pull = jax.eval_shape(functools.partial(jax.vjp, call), x, x, x)
    return sum(leaf.shape == (1, 2, 7) for leaf in jax.tree.leaves(pull))


# Only what can make scores large costs an instruction an element and a number a row.
LARGE = {
    "bias": dict(bias=jnp.zeros(())),
    "slopes": dict(alibi_slopes=jnp.zeros(2)),
    "score function": dict(score_fn=HALVED),
    "large soft cap": dict(logits_soft_cap=101.0),
    "large scale": dict(scale=-1.01),
    "unknown scale": dict(scale=jnp.float32(0.1)),
}
SMALL = {
    "nothing": {},
    "scale": dict(scale=-1.0),
    "soft cap": dict(logits_soft_cap=100.0, bias=jnp.zeros(()), scale=jnp.float32(9)),
    "sinks": dict(sinks=jnp.zeros(2)),
    "mask": dict(is_causal=True),
    "dropout": dict(dropout_rate=0.5, dropout_key=jax.random.key(0)),
}


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        *(pytest.param(options, 2, id=name) for name, options in LARGE.items()),
        *(pytest.param(options, 1, id=name) for name, options in SMALL.items()),
    ],
)
def test_what_can_make_scores_large(options, numbers):
    assert residuals(**options) == numbers


def test_parts_of_a_row_join_to_the_whole():
    """Each of another device of a ring, in any order; of one nothing is seen, one is hidden."""
    random = np.random.default_rng(0)
    orders, parts, keys = 9, 4, 8
    # [orders, amounts, parts, keys]: in every order the same.
    scores = random.normal(size=(len(AMOUNTS), parts, keys)).astype(np.float32)
    for row, amount in zip(scores, AMOUNTS.values(), strict=True):
        row[random.random(row.shape) < 0.6] = amount
        row[1], row[2] = amount, -np.inf
    scores = np.stack([scores[:, random.permutation(parts)] for _ in range(orders)])

    def softmax(s):
        """The output, where every second key has the value 1 and the others 0, and the `LogSum`."""
        m = s.max(-1)
        m = np.where(m == -np.inf, 0, m)
        weights = np.exp(s - m[..., None])
        l = weights.sum(-1)
        with np.errstate(divide="ignore"):
            return weights[..., ::2].sum(-1) / np.where(l > 0, l, 1), LogSum(m, np.log2(l))

    o, total = jax.tree.map(jnp.asarray, softmax(np.full_like(scores[:, :, 0], -np.inf)))
    for i in range(parts):
        o_part, part = softmax(scores[:, :, i])
        total, mine, others = total.joined(part)
        o = mine * o + others * o_part
    want, whole = softmax(scores.reshape(orders, len(AMOUNTS), -1).astype(np.float64))
    np.testing.assert_array_equal(total.m, whole.m)
    np.testing.assert_allclose(total.l_log2, whole.l_log2, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-6)
