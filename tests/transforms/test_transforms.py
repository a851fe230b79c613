"""JAX's transformations of `attention`: each gives what it gives for the dense definition.

Here are `jit` and gradients; further ones are in test_transforms_*.py, derivatives of second order
in test_second_order.py. The kernels run in Pallas's interpreter, or are lowered for a GPU that is
only described.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from support import cases, jaxprs, oracle
from support.compare import assert_close, assert_same_bits
from support.described_gpus import described_gpu
from support.transform_cases import (
    BATCH,
    BLOCKED,
    FLOATS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    KV_LEN,
    MASKED,
    Q_LEN,
    VALUE_DIM,
    by_xla,
    draw_all,
    masked,
    normal_like,
    output_and_gradients,
)

pytestmark = pytest.mark.usefixtures("ieee_products", "small_tiles")

# ------------------------------------------------------------------------------------------------
# jit and differentiation
# ------------------------------------------------------------------------------------------------


@by_xla
def test_eager_is_jit(implementation):
    arguments = draw_all(*MASKED)
    eager = output_and_gradients(masked(implementation))
    assert_close(eager(arguments), oracle.compiled(eager)(arguments))


@functools.cache
def dense_of_all(*names: str):
    """The output and all gradients of `draw_all`, by the definition."""
    return oracle.compiled(output_and_gradients(masked("reference")))(draw_all(*names))


@pytest.mark.parametrize(
    ("implementation", "name"),
    cases.default(
        [("xla", "query"), ("xla", "bias"), ("interpret", "scale")],
        [("xla", name) for name in FLOATS] + [("interpret", name) for name in ("value", "scale")],
    ),
)
def test_gradient_of_one_input(implementation, name):
    names = ("scale", *MASKED, *(["bias"] if implementation == "xla" else []))
    got = oracle.compiled(output_and_gradients(masked(implementation), (name,)))(draw_all(*names))
    out, gradients = dense_of_all(*names)
    assert_close(got, (out, {name: gradients[name]}))


def test_costly_gradients_are_computed_on_request():
    def trace(implementation, *floats):
        names = ["scale"] if implementation == "interpret" else ["scale", "bias"]
        run = output_and_gradients(masked(implementation), ("query", *floats))
        return jaxprs.trace(run, draw_all(*names))

    def outputs_of_dq(eqns):
        [n] = [len(e.outvars) for e in eqns if jaxprs.kernels([e]) == ["pallas_flash_dq"]]
        return n

    assert outputs_of_dq(trace("interpret")) == 1
    assert outputs_of_dq(trace("interpret", "scale")) == 2

    def updates(eqns):
        return sum(e.primitive.name == "dynamic_update_slice" for e in eqns)

    # Updates of dq and, with a bias, of dbias, in the loops over full and over partial blocks.
    assert updates(trace("xla", "scale")) == 2
    assert updates(trace("xla", "bias")) == 4


@pytest.mark.parametrize(
    ("implementation", "alone"),
    cases.default(
        [("interpret", False), ("xla", True)], list(itertools.product(BLOCKED, [False, True]))
    ),
)
def test_gradient_of_lse(implementation, alone):
    """Cotangents of output and LSE arrive at rows without keys, too."""
    arguments = draw_all("scale", *MASKED)

    def run(by):
        def call(arguments):
            found = masked(by, return_lse=True)(arguments)
            return found[1] if alone else found

        return oracle.compiled(output_and_gradients(call))(arguments)

    got, want = run(implementation), run("reference")
    lse = want[0] if alone else want[0][1]
    assert np.isneginf(lse).any() and np.isfinite(lse).any()
    assert_close(got, want)
    assert alone != np.asarray(got[1]["value"]).any()


def summed(x):
    return jax.tree.map(lambda y: y.sum(0), x)


# Functions of the values, of a function of a factor of the queries and of the values.
TRANSPOSED = {
    "call": lambda f: lambda v: f(1.0, v),
    "jit": lambda f: lambda v: jax.jit(f)(1.0, v),
    "remat": lambda f: lambda v: jax.checkpoint(f)(1.0, v),
    "vmap": lambda f: lambda v: summed(jax.vmap(f)(jnp.ones(2), jnp.stack([v, 2 * v]))),
    "vmap of queries": lambda f: lambda v: summed(jax.vmap(f, (0, None))(jnp.arange(2.0), v)),
}


@pytest.mark.parametrize("by", TRANSPOSED)
@pytest.mark.parametrize("implementation", cases.default(["xla"], [*BLOCKED, "reference"]))
def test_linear_transpose_in_values(implementation, by):
    """It is the gradient of the values, also where the LSE comes with them, which has none."""
    arguments = draw_all("scale", *MASKED)
    value = arguments.pop("value")

    def run(by_name):
        def call(factor, v):
            some = {"query": factor * arguments["query"], "value": v}
            return masked(by_name, return_lse=True, return_max_logits=True)(arguments | some)[:2]

        return TRANSPOSED[by](call)

    ct = normal_like(oracle.compiled(run(implementation))(value))
    got = oracle.compiled(lambda ct: jax.linear_transpose(run(implementation), value)(ct)[0])(ct)
    want = oracle.compiled(lambda do: jax.vjp(lambda v: run("reference")(v)[0], value)[1](do)[0])
    assert_close(got, want(ct[0]))


def test_unused_lse_costs_nothing():
    def inputs_of_delta(*, used: bool):
        def fn(arguments):
            out, lse = masked("interpret", return_lse=True)(arguments)
            return (out, lse) if used else out

        eqns = jaxprs.trace(output_and_gradients(fn), draw_all())
        [n] = [len(e.invars) for e in eqns if jaxprs.kernels([e]) == ["pallas_flash_delta"]]
        return n

    assert inputs_of_delta(used=True) == inputs_of_delta(used=False) + 1


@pytest.mark.parametrize(
    ("implementation", "modes"),
    cases.default(
        [("reference", ("fwd", "rev"))], [("reference", ("fwd", "rev")), ("xla", ("rev",))]
    ),
)
def test_gradients_equal_finite_differences(implementation, modes):
    with jax.enable_x64(True):
        arguments = draw_all("bias", "scale", "key_value_seq_lengths")
        # Every query sees a key, because there are no differences of -inf.
        lengths = jnp.maximum(arguments.pop("key_value_seq_lengths"), 1)
        names, floats = arguments.keys(), [x.astype(jnp.float64) for x in arguments.values()]

        @jax.jit
        def fn(*floats):
            named = dict(zip(names, floats, strict=True))
            fn = masked(implementation, return_lse=True, key_value_seq_lengths=lengths)
            return fn(named)

        jax.test_util.check_grads(fn, floats, order=1, modes=modes)


# ------------------------------------------------------------------------------------------------
# No queries, no keys
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
@pytest.mark.parametrize("implementation", ["xla", "interpret", "triton", "reference"])
def test_empty_axes_give_zeros(implementation, empty):
    batch, q_len, kv_len = (
        0 if empty == name else size
        for name, size in (("batch", BATCH), ("queries", Q_LEN), ("keys", KV_LEN))
    )
    arguments = {
        "query": jnp.ones((batch, q_len, HEADS, HEAD_DIM)),
        "key": jnp.ones((batch, kv_len, KV_HEADS, HEAD_DIM)),
        "value": jnp.ones((batch, kv_len, KV_HEADS, VALUE_DIM)),
        "scale": jnp.float32(0.5),
        "key_value_seq_lengths": jnp.zeros(batch, jnp.int32),
    }
    if implementation in ("xla", "reference"):
        arguments["bias"] = jnp.ones((HEADS, 1, 1))
        arguments["mask"] = jnp.ones((1, kv_len), bool)
    with described_gpu("NVIDIA H200"):
        run = jax.jit(output_and_gradients(masked(implementation, return_lse=True)))
        traced = run.trace(arguments)
    (out, lse), gradients = traced.lower(lowering_platforms=("cpu",)).compile()(arguments)
    np.testing.assert_array_equal(out, np.zeros((batch, q_len, HEADS, VALUE_DIM)))
    np.testing.assert_array_equal(lse, np.full((batch, q_len, HEADS), -np.inf))
    assert {"query", "key", "value", "scale"} <= gradients.keys()
    assert_same_bits(gradients, {name: jnp.zeros_like(arguments[name]) for name in gradients})
