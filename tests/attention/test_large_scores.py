"""Scores of any size: additive masks, and large scales; see large_scores.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.large_scores import (
    ALL,
    AMOUNTS,
    HALVED,
    RUNS,
    TILES,
    arguments,
    attention,
    check,
    check_scale,
    results_of,
)

from pallas_flash._backends import xla
from pallas_flash._problem.scores import LogSum
from pallas_flash.tuning import Tile, TileSizes

FEW_PAIRS = [
    ("left padding", "-1e9"),
    ("whole rows", "-1e10"),
    ("every row", "min of float32"),
    ("window", "-1e30"),
    ("documents", "-1e7"),
    ("left padding", "max of float32"),
]


FEW_TILES = TileSizes(decode=Tile(16, 64), dkv=Tile(16, 128), dq=Tile(16, 128))
FEW = 3, 600


CALLS = {
    "alone": arguments(70, 70, False),
    "together": arguments(70, 70, True, tuple(FEW_PAIRS)),
    "few queries": arguments(*FEW, True, tuple(FEW_PAIRS)),
    "all alone": arguments(70, 70, False, tuple(ALL)),
    "all together": arguments(70, 70, True, tuple(ALL)),
    "all of few queries": arguments(*FEW, True, tuple(ALL)),
}
# Only "emulated" has code of its own for most calls.
DEFAULT = [
    *(("emulated", call) for call in ("together", "few queries")),
    ("reference", "alone"),
    ("xla", "together"),
]


@pytest.fixture(autouse=True)
def several_tiles_of_xla(monkeypatch):
    monkeypatch.setattr(xla, "BLOCK_Q", 16)
    monkeypatch.setattr(xla, "BLOCK_KV", 32)


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


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("run", ["emulated", "xla"])
def test_additive_masks_in_16_bits(run, dtype, kernel_case):
    implementation, how = RUNS[run]
    args = arguments(70, 70, True, tuple(ALL), dtype)
    check(args, results_of(implementation, args, TILES, how))


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
    "score function": dict(score_mod=HALVED),
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
def test_options_that_make_scores_large(options, numbers):
    assert residuals(**options) == numbers


def test_log_sums_combine():
    """Parts come from devices of a ring, in any order; one has no visible key, one is hidden."""
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
