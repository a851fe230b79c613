"""Scores of any size: additive masks, written as a bias of -1e4, -1e9, -1e30 or `finfo.min`, and
large scales.

All products of queries and keys are exact here, so scores are the same float32 numbers in every
implementation. The expected results come from these scores in float64: a whole row at -1e9 gives
the mean of all values, because nothing else is left in float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from support import cases, oracle, ttir
from support.judge import ROUNDING, judge

import pallas_flash
from pallas_flash.tuning import Tile, TileSizes

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

# The pairs that get the amount, by query positions [T, 1] and keys [1, S].
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

SLOPE, RATE = 0.125, 0.25

HALVED = oracle.ExactScoreMod(lambda s, *_: 0.5 * s, lambda s, *_: 0.5 * s, lambda s, *_: 0.5)


def options_of(amounts, T, S, together):
    """Return the other options of the call: none, or all that meet the scores."""
    if not together:
        return {}
    # Every third sink beats all that is hidden, the others are what `HALVED` makes of the amounts.
    sinks = [n % 9 - 4 if n % 3 == 0 or np.isinf(x) else 0.5 * x for n, x in enumerate(amounts)]
    return dict(
        sinks=jnp.asarray(sinks, jnp.float32),
        alibi_slopes=jnp.full(len(amounts), SLOPE, jnp.float32),
        score_mod=HALVED,
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
    """Return the part of one head of an array of a problem or a result."""
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
    tiles = {"config": tiles} if implementation in ("triton", "interpret") else {}
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


def arguments(T, S, together, pairs=tuple(SOME), dtype="float32"):
    """Return the arguments of `problem`."""
    return T, S, pairs, dtype, together


def emulated(function):
    """Execute the lowered kernels in NumPy, where a multiply-add of a GPU rounds once."""
    return functools.partial(ttir.evaluate, function)


RUNS = {
    "emulated": ("triton", emulated),
    **{name: (name, oracle.compiled) for name in ("interpret", "xla", "reference")},
}


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
