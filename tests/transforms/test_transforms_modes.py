"""JAX's modes: x64, strict promotion, default precision, and what looks for NaN and inf."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support import cases, jaxprs, oracle, ttir
from support.compare import assert_close, assert_same_bits
from support.described_gpus import described_gpu
from support.transform_cases import (
    BLOCKED,
    MASKED,
    POSITIONS,
    attention_by,
    by_xla,
    draw_all,
    masked,
    output_and_gradients,
)

pytestmark = pytest.mark.usefixtures("ieee_products", "small_tiles")


# That kernels are the same is shown below.
@pytest.mark.parametrize("dtype", cases.default([jnp.float32], [jnp.float32, jnp.bfloat16]))
@by_xla
def test_x64_changes_no_result(implementation, dtype):
    """It changes no dtype, and neither positions nor loops mind it."""
    # The gradient by the scale is a float32, but no more exact than the products.
    arguments = draw_all(*POSITIONS, *(["scale"] if dtype == jnp.float32 else []))
    arguments |= {name: arguments[name].astype(dtype) for name in ("query", "key", "value")}

    def run(implementation):
        fn = masked(implementation, return_lse=True, local_window_size=(9, 9))
        return oracle.compiled(output_and_gradients(fn))(arguments)

    want = run("reference")
    with jax.enable_x64(True):
        got = run(implementation)
    assert_close(got, want)


@by_xla
def test_float64_bias_among_float32(implementation):
    """The scores are float32; the gradient comes back in the bias's own dtype."""
    with jax.enable_x64(True):
        arguments = draw_all("bias")
        # No float32 has these numbers.
        arguments["bias"] = arguments["bias"].astype(jnp.float64) + 1e-9

        def run(implementation):
            return oracle.compiled(output_and_gradients(masked(implementation)))(arguments)

        (out, got), (want_out, want) = run(implementation), run("reference")
        assert got["bias"].dtype == want["bias"].dtype == jnp.float64
        assert want["bias"].any()
        for gradients in (got, want):
            # As exact as the scores.
            gradients["bias"] = gradients["bias"].astype(jnp.float32)
        assert_close((out, got), (want_out, want))


def test_float64_bias_does_not_reach_kernels():
    def kernels(dtype):
        with jax.enable_x64(True):
            arguments = draw_all("bias")
            arguments["bias"] = arguments["bias"].astype(dtype)
            run = output_and_gradients(masked("triton"))
            return [kernel.text for kernel in ttir.lower(run, arguments)]

    assert kernels(jnp.float64) == kernels(jnp.float32)


@pytest.mark.parametrize("whole_tiles", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_x64_lowers_to_the_same_kernels(dtype, whole_tiles):
    if whole_tiles:
        arguments = {name: x[:, :16] for name, x in draw_all().items()}
    else:
        arguments = draw_all("scale", *POSITIONS)
    arguments |= {name: arguments[name].astype(dtype) for name in ("query", "key", "value")}

    def kernels():
        fn = functools.partial(attention_by("triton"), return_lse=True)
        run = output_and_gradients(lambda arguments: fn(**arguments))
        return [kernel.text for kernel in ttir.lower(run, arguments)]

    want = kernels()
    assert len(want) == 4
    with jax.enable_x64(True):
        got = kernels()
    assert got == want


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("implementation", ["xla", "interpret", "triton", "reference"])
def test_no_implicit_promotion(implementation, dtype):
    names = ["scale", *POSITIONS]
    if implementation in ("xla", "reference"):
        names += ["bias", "mask"]
    arguments = draw_all(*names)
    arguments |= {name: arguments[name].astype(dtype) for name in ("query", "key", "value")}
    fn = masked(implementation, return_lse=True, local_window_size=9)
    run = output_and_gradients(fn)
    with jax.numpy_dtype_promotion("strict"), described_gpu("NVIDIA H200"):
        out, gradients = jax.eval_shape(run, arguments)
    assert (out[0].dtype, out[1].dtype) == (dtype, jnp.float32)
    assert {name: x.dtype for name, x in gradients.items()} == {
        name: arguments[name].dtype for name in gradients
    }


@pytest.mark.parametrize(
    ("around_call", "around_gradient", "precision", "instruction"),
    [("highest", None, "HIGHEST", "ieee"), (None, "highest", "DEFAULT", "tf32"),
     ("tensorfloat32", "highest", "HIGH", "tf32")],
)  # fmt: skip
def test_precision_of_the_context(around_call, around_gradient, precision, instruction):
    """For all products of all passes, and of derivatives of gradients."""
    arguments = draw_all("scale")

    def run(implementation, *, tangents=False):
        def call(arguments):
            with jax.default_matmul_precision(around_call):
                return masked(implementation)(arguments)

        function = output_and_gradients(call)
        if tangents:
            return lambda x: jax.jvp(function, (x,), (x,))
        return function

    def products(*args, **kwargs):
        eqns = jaxprs.trace(run(*args, **kwargs), arguments)
        return [e.params["precision"] for e in eqns if e.primitive.name == "dot_general"]

    with jax.default_matmul_precision(around_gradient):
        by_xla = products("xla")
        kernels = ttir.lower(run("triton"), arguments)
        # Always at full precision, as are tangents of the others' gradients.
        dense = [*products("reference"), *products("reference", tangents=True)]
        of_second_order = products("xla", tangents=True)
    assert len(by_xla) >= 7
    assert set(by_xla) == {(jax.lax.Precision[precision],) * 2}
    used = [ttir.dot_precisions(k) for k in kernels if k.name != "pallas_flash_delta"]
    assert used == [{instruction}] * 3
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert set(dense) == {highest}
    assert set(of_second_order) == {*by_xla, highest}


@pytest.mark.parametrize("mode", [jax.debug_nans, jax.debug_infs])
@pytest.mark.parametrize("implementation", BLOCKED)
def test_debug_modes_find_nothing(implementation, mode):
    """Inside, rows that see nothing are -inf; none of that comes out."""
    arguments = draw_all(*MASKED)
    run = oracle.compiled(output_and_gradients(masked(implementation)))
    want = run(arguments)
    with mode(True):
        assert_same_bits(run(arguments), want)


def test_debug_nans_finds_nothing_without_jit():
    arguments = draw_all(*MASKED)
    with jax.debug_nans(True):
        output_and_gradients(masked("xla", return_lse=True))(arguments)
