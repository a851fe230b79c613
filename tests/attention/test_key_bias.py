"""Gradients of queries in 16 bits where keys have a common part, as from a projection with a bias.

The rule is that of test_accuracy, without its allowance for a delta from the rounded output: the
error is at most twice that of dense attention, which subtracts a sum that it computes itself.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle
from support.cases import checked
from support.judge import SMALL, check_that_nothing_shows, program
from support.key_bias import BIAS, assert_as_dense

from pallas_flash._problem import key_center
from pallas_flash._problem.scores import LogSum


def biased(name: str, **changes):
    return dataclasses.replace(cases.BY_NAME[name], key_bias=BIAS, **changes)


# Calls whose sums of ds are known: zero, or those of a cotangent of the LSE and of sinks.
CASES = [
    biased("full"),
    biased("causal"),
    biased("causal, first queries see nothing"),
    biased("window, causal"),
    biased("documents, causal, long"),
    biased("lengths of zero"),
    biased("mask of keys"),
    biased("predicate"),
    biased("bias of all examples"),
    biased("slopes, offset for each example"),
    biased("sinks"),
    biased("dropout"),
    biased("scale"),
]
# One of each sum. The next test has other ways in which keys are hidden.
BY_DEFAULT = ("causal, first queries see nothing", "bias of all examples", "sinks", "dropout")


@pytest.mark.parametrize(
    "case",
    cases.default([x for x in CASES if x.name in BY_DEFAULT], CASES),
    ids=lambda x: x.name.replace(" ", "-"),
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_dq_as_accurate_as_dense(case, dtype, implementation):
    problem = case.problem(dtype)
    qkv, cotangents, options = problem
    operands, rest = oracle.split(options)
    extra = {"config": SMALL} if implementation == "interpret" else {}
    results = program(implementation, rest, **extra)(*qkv, *cotangents, **operands)
    assert_as_dense(results, problem)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize(
    "name",
    cases.default(
        ["lengths of zero", "mask of keys"],
        ["lengths of zero", "causal, first queries see nothing", "mask of keys"],
    ),
)
def test_hidden_tokens_have_no_effect(name, implementation):
    """The center is that of visible keys."""
    check_that_nothing_shows(biased(name), implementation, "bfloat16")


def test_heads_with_large_scores_have_no_center():
    """But where no query sees a key, a maximum may be anything."""
    case = biased("full")
    qkv, _, options = case.problem("bfloat16")
    call = checked(qkv, options)
    m = jnp.zeros((case.B, case.N, case.T)).at[0, 0, 3].set(-1e9).at[1, 1, 5].set(-1e9)
    l_log2 = jnp.zeros_like(m).at[1, 1, 5].set(-jnp.inf)
    center = key_center.where_small(key_center.center_of(call), call, LogSum(m, l_log2))
    assert (np.asarray(center[0, 0]) == 0).all()
    assert (np.asarray(center[[0, 1, 1], [1, 0, 1], 0]) != 0).all()


def center_of(case, dtype="bfloat16", **options):
    qkv, _, drawn = case.problem(dtype)
    return key_center.center_of(checked(qkv, drawn | options))


def test_center_is_mean_of_biased_features():
    center = np.asarray(center_of(biased("full", S=400)))
    assert np.abs(center[..., :2] - BIAS).max() < 0.5
    assert (center[..., 2:] == 0).mean() > 0.99


def test_center_of_the_first_key_alone_is_zero():
    """It is often larger than the others, which are many."""
    case = cases.BY_NAME["full"]
    (q, k, v), *_ = dataclasses.replace(case, S=400).problem("bfloat16")
    call = checked((q, k.at[:, 0].set(1000), v), {})
    assert (np.asarray(key_center.center_of(call)) == 0).mean() > 0.99


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {}),
        ("bfloat16", dict(logits_soft_cap=2.0)),
        ("bfloat16", dict(score_mod=lambda s, b, h, q, k: 2 * s)),
    ],
    ids=["float32", "soft-cap", "score-function"],
)
def test_calls_without_a_center(dtype, options):
    assert center_of(biased("full"), dtype, **options) is None
