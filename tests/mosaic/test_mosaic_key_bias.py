"""The kernels for Hopper, emulated: gradients of queries where keys have a common part."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle
from support.key_bias import BIAS, assert_as_dense
from support.mosaic_cases import (
    LONG_CAUSAL,
    checked,
    emulated,
    every_backward,
    gradient_of_the_scale,
    in_order,
    with_heads,
)

from pallas_flash._problem import key_center

BIASED = dataclasses.replace(LONG_CAUSAL, key_bias=BIAS)


def without_keys_for_some(random, case):
    """A cotangent of the LSE is in every case; a sink and rows that see nothing, in this one."""
    return cases._sinks(random, case) | dict(is_causal=True, query_offset=-20)


LENGTHS = dict(
    key_value_seq_lengths=jnp.array([400, 130], jnp.int32),
    query_seq_lengths=jnp.array([300, 70], jnp.int32),
)


CASES = [
    BIASED,
    with_heads(BIASED, 128, T=150),  # Warpgroups share the columns of dq.
    dataclasses.replace(BIASED, H=72, V=40, T=150),  # Columns that do not exist.
    dataclasses.replace(BIASED, H=160, V=128, T=150, S=200),  # Two launches.
    dataclasses.replace(BIASED, name="sinks", options=without_keys_for_some),
    dataclasses.replace(BIASED, name="large", T=150, options=lambda *_: dict(scale=2.0)),
]
OTHERS = [
    dataclasses.replace(BIASED, name="lengths", B=2, options=lambda *_: LENGTHS),
    dataclasses.replace(BIASED, name="full", B=2, N=4, T=150, options=lambda *_: {}),
    dataclasses.replace(BIASED, name="mask", T=150, options=cases._mask("BS")),
    dataclasses.replace(BIASED, name="bias", T=150, options=cases._bias("NTS", "bfloat16")),
]


@every_backward
@pytest.mark.parametrize(
    "case",
    cases.default(CASES, CASES + OTHERS),
    ids=lambda x: f"{x.name}-{x.H}".replace(" ", "-"),
)
def test_gradients_as_accurate_as_dense(case, in_order, kernel_case):
    problem = case.problem("bfloat16")
    assert np.asarray(key_center.center_of(checked(problem[0], problem[2]))).any()
    assert_as_dense(emulated(problem, in_order), problem, names=("dq", "dk", "dv"))


@in_order
def test_dscale(in_order, kernel_case):
    """It is summed over queries times their gradients; a sink and dlse leave sums of ds."""
    case = dataclasses.replace(BIASED, name="sinks", T=150, options=without_keys_for_some)
    qkv, (do, dlse), options = case.problem("bfloat16")
    truth = oracle.solve(*qkv, do, dlse, scale=0.7, **options)
    got = gradient_of_the_scale((qkv, (do, dlse), options), in_order)
    assert abs(got - truth.values["dscale"]) < 4 * 2**-8 * truth.terms["dscale"] / case.key_bias


@in_order
def test_rows_without_keys_may_hold_nan(in_order, kernel_case):
    """Their sums of ds are zero, whatever the cotangent of the LSE is there."""
    case = dataclasses.replace(BIASED, H=72, V=40, T=150)
    (q, k, v), (do, dlse), options = case.problem("bfloat16")
    rows = jnp.arange(case.T)[:, None] < 20

    def dq(hidden):
        queries, cotangents = (jnp.where(rows[..., None], hidden, x) for x in (q, do))
        problem = (queries, k, v), (cotangents, jnp.where(rows, hidden, dlse)), options
        return emulated(problem, in_order)[oracle.NAMES.index("dq")]

    np.testing.assert_array_equal(dq(np.nan), dq(0.0))
