"""Gradients in 16 bits that are nearly cancelling sums of ds are as accurate as dense ones.

The rule is test_accuracy's. It has no allowance for a delta from the rounded output in these
calls, whose output is a `SplitOutput`: an error is at most twice dense attention's, which
rounds p and o and subtracts a sum that it computes itself, or a rounding of the result.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle
from support.judge import ROUNDING, SMALL, judge, program

from pallas_flash import ScoreMod, attention, explain
from pallas_flash._problem.problem import SplitOutput


@pytest.mark.parametrize("case", cases.CANCELLING, ids=lambda x: x.name.replace(" ", "-"))
@pytest.mark.parametrize("dtype", cases.default(["bfloat16"], ["bfloat16", "float16"]))
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_gradients_as_accurate_as_dense(case, dtype, implementation):
    problem = case.problem(dtype)
    qkv, cotangents, options = problem
    operands, rest = oracle.split(options)
    extra = {"config": SMALL} if implementation == "interpret" else {}
    results = program(implementation, rest, **extra)(*qkv, *cotangents, **operands)
    judge(case, dtype, results, problem)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("options", [{}, dict(logits_soft_cap=2.0)], ids=["alone", "soft cap"])
def test_gradient_of_the_scale(implementation, options):
    (q, k, v), (do, dlse), _ = cases.CANCELLING[1].problem("bfloat16")
    truth = oracle.solve(q, k, v, do, dlse, scale=0.3, exact_delta=True, **options)

    @oracle.compiled
    def dscale(scale):
        call = functools.partial(attention, return_lse=True, implementation=implementation)
        _, pull = jax.vjp(lambda scale: call(q, k, v, scale=scale, **options), scale)
        return pull((do, dlse))[0]

    rounding = ROUNDING["bfloat16"]
    # Kernels sum rounded ds.
    bound = 2 * max(rounding / 2, oracle.of_rounding(rounding, truth, "dscale")["l2"])
    assert oracle.errors(dscale(jnp.float32(0.3)), truth, "dscale")["l2"] <= bound


def test_split_output_has_subnormal_numbers():
    """They are as without the low part."""
    o = jnp.float32([3e-5, -1e-7, 6.1035e-5, 2.0**-14, 1.0001, 0])
    high, low = SplitOutput.from_float32(o, jnp.float16, split=True)
    np.testing.assert_array_equal(high, o.astype(jnp.float16))
    np.testing.assert_array_equal(low != 0, [False] * 4 + [True, False])


# The argument that is differentiated beside queries, keys and values, if any; sizes and dtype of
# the call, and whether the low part of its output is a residual.
KEPT = {
    "plain": (None, {}, False),
    "sinks": ("sinks", {}, True),
    "scale": ("scale", {}, True),
    "bias": ("bias", {}, True),
    "slopes": ("alibi_slopes", {}, True),
    "operand": ("operand", {}, True),
    "32 bits": ("sinks", dict(dtype=jnp.float32), False),
    "few keys": (None, dict(S=32), True),
    "few features": (None, dict(H=8), True),
    "soft cap": (None, {}, True),
    "score function": (None, {}, True),
    "soft cap in 32 bits": (None, dict(dtype=jnp.float32), False),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_low_part_is_kept_where_needed(name, implementation):
    argument, changes, kept = KEPT[name]
    sizes = dict(S=33, H=16, dtype=jnp.bfloat16) | changes
    T, N, V, dtype = 24, 2, 40, sizes["dtype"]
    q, k = (jnp.ones((1, n, N, sizes["H"]), dtype) for n in (T, sizes["S"]))
    v = jnp.ones((1, sizes["S"], N, V), dtype)
    x = jnp.ones((1, N, 1, 1) if argument == "bias" else () if argument == "scale" else N)

    def call(q, k, v, x, attention=attention):
        options = {} if argument in (None, "operand") else {argument: x}
        if "soft cap" in name:
            options["logits_soft_cap"] = 30.0
        if name == "score function":
            options["score_mod"] = lambda s, b, h, q, k: s / 2
        if argument == "operand":
            options["score_mod"] = ScoreMod(lambda s, b, h, q, k, x: s * x[h], (x,))
        return attention(q, k, v, implementation=implementation, **options)

    def explained(x):
        return str(call(q, k, v, x, explain))

    def residuals(of):
        """How many arrays like the output the backward is given."""
        _, pull = jax.vjp(lambda *some: call(*some, *(q, k, v, x)[len(some) :]), *of)
        return sum(x.shape == (1, T, N, V) for x in jax.tree.leaves(pull))

    assert residuals((q, k, v, x)) == 1 + kept
    assert ("Its gradient keeps the rounding error of the output" in explained(x)) is kept
    assert ("where a gradient of" in explained(x)) is (kept and argument not in (None, "operand"))
    if argument is not None:
        assert residuals((q, k, v)) == 1 + (argument == "operand")
