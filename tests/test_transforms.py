"""JAX's transformations of `attention`: each gives what it gives for the dense definition.

Those that depend on JAX's modes rather than on numbers (x64, strict promotion, debug modes, export,
sharding) are here too. The kernels run in Pallas's interpreter, or are lowered for a GPU that is
only described.
"""

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import jax
import jax.export
import jax.numpy as jnp
import jax.test_util
import jaxprs
import numpy as np
import oracle
import pytest
import ttir
from described_gpus import described_gpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import Tile, TileSizes, _xla, attention, save_residuals

# No two of B, T, S, N, K, N / K, H and V agree, so a swapped axis cannot pass unseen.
BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 21, 35, 6, 2, 8, 5

TILE_SIZES = TileSizes(forward=Tile(16, 16), dkv=Tile(16, 16), dq=Tile(16, 16))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles along both axes, the last ones ragged."""
    _make_tiles_small(monkeypatch.setattr)


def _make_tiles_small(set_attribute):
    set_attribute(_xla, "BLOCK_Q", 8)
    set_attribute(_xla, "BLOCK_KV", 16)


pytestmark = pytest.mark.usefixtures("ieee_products")

BLOCKED = ("xla", "interpret")
# Both take the same way through a transformation: by default one of them goes it.
by_xla = pytest.mark.parametrize("implementation", cases.default(["xla"], BLOCKED))
by_kernels = pytest.mark.parametrize("implementation", cases.default(["interpret"], BLOCKED))


def by(implementation: str) -> Callable:
    """`attention`, in several tiles."""
    kernels = implementation in ("interpret", "triton")
    tiles = {"tile_sizes": TILE_SIZES} if kernels else {}
    return functools.partial(attention, implementation=implementation, **tiles)


def draw(name: str, rng: np.random.Generator) -> Any:
    """One argument of `attention`."""
    if name in ("query", "key", "value"):
        rows = {"query": (Q_LEN, HEADS, HEAD_DIM), "key": (KV_LEN, KV_HEADS, HEAD_DIM)}
        shape = (BATCH, *rows.get(name, (KV_LEN, KV_HEADS, VALUE_DIM)))
        return jnp.asarray(rng.normal(size=shape), jnp.float32)
    if name == "scale":
        return jnp.asarray(rng.uniform(0.2, 0.6), jnp.float32)
    if name == "bias":
        return jnp.asarray(rng.normal(size=(HEADS, 1, KV_LEN)), jnp.float32)
    if name == "mask":
        return jnp.asarray(rng.random((BATCH, 1, Q_LEN, KV_LEN)) < 0.8)
    if name == "segment_ids":
        ids = (rng.integers(0, 3, size=(BATCH, length)) for length in (Q_LEN, KV_LEN))
        return tuple(jnp.asarray(np.sort(x), jnp.int32) for x in ids)
    if name in ("query_positions", "key_value_positions"):
        shape = (BATCH, Q_LEN) if name == "query_positions" else (1, KV_LEN)
        return jnp.asarray(rng.integers(-5, KV_LEN, shape), jnp.int32)
    # Lengths, among them one that is zero, and offsets.
    limit = Q_LEN if name == "query_seq_lengths" else KV_LEN
    numbers = rng.permutation([0, limit, *rng.integers(1, limit, size=BATCH - 2)])
    return jnp.asarray(numbers, jnp.int32)


def draw_all(*names: str, seed: int = 0) -> dict[str, Any]:
    """Arguments by name, query, key and value among them."""
    rng = np.random.default_rng(seed)
    return {name: draw(name, rng) for name in ("query", "key", "value", *names)}


def normal_like(tree, seed: int = 1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)


FLOATS = ("query", "key", "value", "bias", "scale")


def output_and_gradients(fn: Callable, floats=FLOATS) -> Callable:
    """fn(arguments) to its output and the gradients by those named in `floats`."""

    def run(arguments):
        inputs = {name: arguments[name] for name in floats if name in arguments}
        out, pull = jax.vjp(lambda inputs: fn(arguments | inputs), inputs)
        [gradients] = pull(normal_like(out))
        return out, gradients

    return run


def assert_close(got, want):
    """The same structure, shapes and dtypes, and half of the digits agree."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        tolerance = float(jnp.finfo(y.dtype).eps) ** 0.5
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        infinite = np.isinf(y)
        np.testing.assert_array_equal(x[infinite], y[infinite])
        x, y = x[~infinite], y[~infinite]
        assert np.linalg.norm(x - y) <= tolerance * (np.linalg.norm(y) or 1.0)


def assert_same_bits(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


# ------------------------------------------------------------------------------------------------
# jit and differentiation
# ------------------------------------------------------------------------------------------------

# Some rows see nothing: those past a length, and all of the example without keys.
MASKED = ("key_value_seq_lengths", "query_seq_lengths")


def masked(implementation: str, **options) -> Callable:
    """Causal attention of a dictionary of arguments."""
    return lambda arguments: by(implementation)(**arguments, is_causal=True, **options)


@by_xla
def test_eager_is_jit(implementation):
    arguments = draw_all(*MASKED)
    eager = output_and_gradients(masked(implementation))
    dense = output_and_gradients(masked("reference"))
    got = eager(arguments)
    assert_close(got, oracle.compiled(eager)(arguments))
    assert_close(got, oracle.compiled(dense)(arguments))


@by_kernels
def test_every_way_to_a_gradient(implementation):
    arguments = draw_all(*MASKED)
    rest = {name: arguments.pop(name) for name in MASKED}

    def loss(q, k, v, implementation=implementation):
        out = masked(implementation)({"query": q, "key": k, "value": v} | rest)
        return (out**2).sum()

    by_all = (0, 1, 2)

    @oracle.compiled
    def run(*qkv):
        _, pull = jax.vjp(loss, *qkv)
        value, gradients = jax.value_and_grad(loss, by_all)(*qkv)
        return value, gradients, jax.grad(loss, by_all)(*qkv), pull(jnp.ones_like(value))

    dense = functools.partial(loss, implementation="reference")
    value, gradients = oracle.compiled(jax.value_and_grad(dense, by_all))(*arguments.values())
    assert_close(run(*arguments.values()), (value, gradients, gradients, gradients))


@functools.cache
def dense_of_all(*names: str):
    """The output and all gradients of `draw_all`, by the definition."""
    return oracle.compiled(output_and_gradients(masked("reference")))(draw_all(*names))


@pytest.mark.parametrize(
    ("implementation", "name"),
    cases.default(
        [("xla", name) for name in FLOATS] + [("interpret", "scale")],
        [("xla", name) for name in FLOATS] + [("interpret", name) for name in ("value", "scale")],
    ),
)
def test_gradient_by_one_input(implementation, name):
    names = ("scale", *MASKED, *(["bias"] if implementation == "xla" else []))
    got = oracle.compiled(output_and_gradients(masked(implementation), (name,)))(draw_all(*names))
    out, gradients = dense_of_all(*names)
    assert_close(got, (out, {name: gradients[name]}))


def test_gradients_that_cost_extra_are_computed_on_request():
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

    # Of dq, and then of dbias, too: one in the loop over full tiles, one in that over the others.
    assert updates(trace("xla", "scale")) == 2
    assert updates(trace("xla", "bias")) == 4


@by_kernels
def test_gradient_of_lse(implementation):
    """Cotangents of output and LSE together; both arrive at rows that see nothing, too."""
    arguments = draw_all("scale", *MASKED)
    got, want = (
        oracle.compiled(output_and_gradients(masked(name, return_lse=True)))(arguments)
        for name in (implementation, "reference")
    )
    (_, lse), _ = want
    assert np.isneginf(lse).any() and np.isfinite(lse).any()
    assert_close(got, want)


@by_xla
def test_gradient_of_lse_alone(implementation):
    arguments = draw_all(*MASKED)

    def lse(name):
        return lambda arguments: masked(name, return_lse=True)(arguments)[1]

    got, want = (
        oracle.compiled(output_and_gradients(lse(name)))(arguments)
        for name in (implementation, "reference")
    )
    assert_close(got, want)
    assert not np.asarray(got[1]["value"]).any()


def test_unused_lse_costs_nothing():
    def inputs_of_delta(*, used: bool):
        def fn(arguments):
            out, lse = masked("interpret", return_lse=True)(arguments)
            return (out, lse) if used else out

        eqns = jaxprs.trace(output_and_gradients(fn), draw_all())
        [n] = [len(e.invars) for e in eqns if jaxprs.kernels([e]) == ["pallas_flash_delta"]]
        return n

    assert inputs_of_delta(used=True) == inputs_of_delta(used=False) + 1


@by_xla
def test_traced_scale_of_any_sign(implementation):
    arguments = draw_all("scale", *MASKED)
    plain = masked("reference", return_lse=True)

    def scaled_before(arguments):
        query = arguments["scale"] * arguments["query"]
        return plain(arguments | {"query": query, "scale": 1.0})

    run = oracle.compiled(output_and_gradients(masked(implementation, return_lse=True)))
    dense = oracle.compiled(output_and_gradients(scaled_before))
    for scale in (0.4, -0.7, 0.0):
        arguments["scale"] = jnp.float32(scale)
        assert_close(run(arguments), dense(arguments))


@pytest.mark.parametrize(
    ("implementation", "modes"), [("reference", ("fwd", "rev")), ("xla", ("rev",))]
)
def test_gradients_are_those_of_finite_differences(implementation, modes):
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
# vmap
# ------------------------------------------------------------------------------------------------

COPIES = 3

# What is mapped along which axis, for each of nested maps. What is not named is shared.
EVERYWHERE = {
    "all three": [{"query": 3, "key": 1, "value": 4}],
    "queries": [{"query": 0}],
    "keys and values": [{"key": 0, "value": 0}],
    "nested": [{"query": 0, "value": 0}, {"key": 0}],
    "lengths": [{"query_seq_lengths": 0, "key_value_seq_lengths": 1}],
    "segment ids": [{"segment_ids": 0}],
    "offset and keys": [{"query_offset": 0, "key": 0}],
    "positions": [{"query_positions": 0, "key_value_positions": 2}],
    "scale": [{"scale": 0}],
}
WITHOUT_KERNELS = {
    "bias": [{"bias": 0}],
    "mask and queries": [{"mask": 0, "query": 0}],
    "nested bias": [{"bias": 0, "query": 0}, {"bias": 1, "mask": 0}],
}


def draw_copies(name: str, axes: list[int], rng: np.random.Generator) -> Any:
    """One argument with a new axis for each of the nested maps, the outermost first."""
    if not axes:
        return draw(name, rng)
    copies = [draw_copies(name, axes[1:], rng) for _ in range(COPIES)]
    return jax.tree.map(lambda *x: jnp.stack(x, axes[0]), *copies)


def loop(fn: Callable, axes: dict[str, int]) -> Callable:
    """What vmap means; not unrolled, which would be compiled for each copy."""

    def take(axis, i, tree):
        return jax.tree.map(lambda x: jnp.take(x, i, axis), tree)

    def looped(arguments):
        def one(i):
            taken = {name: take(axis, i, arguments[name]) for name, axis in axes.items()}
            return fn(arguments | taken)

        return jax.lax.map(one, jnp.arange(COPIES))

    return looped


@pytest.mark.parametrize(
    ("implementation", "name"),
    cases.default(
        [
            ("interpret", "lengths"),
            ("xla", "all three"),
            ("xla", "segment ids"),
            ("xla", "positions"),
            ("xla", "scale"),
            ("xla", "nested bias"),
        ],
        [(implementation, name) for implementation in BLOCKED for name in EVERYWHERE]
        + [("xla", name) for name in WITHOUT_KERNELS],
    ),
)
def test_vmap(implementation, name):
    """Gradients by what is shared are summed over the copies."""
    maps = (EVERYWHERE | WITHOUT_KERNELS)[name]
    rng, names = np.random.default_rng(0), {"query", "key", "value"}.union(*maps)
    arguments = {
        name: draw_copies(name, [axes[name] for axes in maps if name in axes], rng)
        for name in sorted(names)
    }
    vmapped, looped = masked(implementation), masked("reference")
    for axes in reversed(maps):
        in_axes = {name: axes.get(name) for name in arguments}
        vmapped, looped = jax.vmap(vmapped, in_axes=(in_axes,)), loop(looped, axes)
    got, want = (oracle.compiled(output_and_gradients(fn)) for fn in (vmapped, looped))
    assert_close(got(arguments), want(arguments))


@by_xla
def test_jacrev(implementation):
    """The backward pass mapped over cotangents, residuals shared."""
    arguments = draw_all(*MASKED)

    def jacobian(implementation):
        def few(query):
            out = masked(implementation)(arguments | {"query": query})
            return out.sum(axis=(0, 1, 2))

        return oracle.compiled(jax.jacrev(few))(arguments["query"])

    got = jacobian(implementation)
    assert got.shape == (VALUE_DIM, *arguments["query"].shape)
    assert_close(got, jacobian("reference"))


# ------------------------------------------------------------------------------------------------
# scan and rematerialisation
# ------------------------------------------------------------------------------------------------

LAYERS = 3

REMAT = {
    "without": lambda fn: fn,
    "default": jax.checkpoint,
    "results saved": functools.partial(jax.checkpoint, policy=save_residuals),
    "products saved, too": functools.partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_saveable, save_residuals
        ),
    ),
}


def layer(implementation: str, lengths) -> Callable:
    def apply(x, weights):
        q, k, v = (x @ w for w in weights)
        out = by(implementation)(q, k, v, is_causal=True, key_value_seq_lengths=lengths)
        return x + out

    return apply


@pytest.mark.parametrize("remat", cases.default(["default", "results saved"], REMAT))
@pytest.mark.parametrize("implementation", BLOCKED)
def test_scan_over_layers(implementation, remat):
    rng = np.random.default_rng(0)
    x = draw("query", rng)
    weights = jnp.asarray(rng.normal(size=(LAYERS, 3, HEAD_DIM, HEAD_DIM)), jnp.float32) / 4
    lengths = draw("query_seq_lengths", rng)

    def scanned(arguments):
        apply = REMAT[remat](layer(implementation, lengths))

        def step(x, weights):
            return apply(x, weights), None

        return jax.lax.scan(step, arguments["x"], arguments["weights"])[0]

    def unrolled(arguments):
        x = arguments["x"]
        for i in range(LAYERS):
            x = layer("reference", lengths)(x, arguments["weights"][i])
        return x

    got, want = (
        oracle.compiled(output_and_gradients(fn, ("x", "weights")))({"x": x, "weights": weights})
        for fn in (scanned, unrolled)
    )
    assert_close(got, want)


@pytest.mark.parametrize(
    ("remat", "forwards"),
    [("without", 1), ("default", 2), ("results saved", 1), ("products saved, too", 1)],
)
def test_forward_runs_again_only_where_its_results_are_not_saved(remat, forwards):
    weights = jnp.zeros((3, HEAD_DIM, HEAD_DIM))
    x = jnp.zeros((BATCH, Q_LEN, HEADS, HEAD_DIM))

    def trace(implementation):
        apply = REMAT[remat](layer(implementation, None))
        return jaxprs.trace(jax.grad(lambda w: apply(x, w).sum()), weights)

    backward = ["pallas_flash_delta", "pallas_flash_dkv", "pallas_flash_dq"]
    expected = ["pallas_flash_forward"] * forwards + backward
    assert jaxprs.kernels(trace("interpret")) == expected
    loops = [e for e in trace("xla") if e.primitive.name == "scan"]
    assert len(loops) == forwards + 1


# ------------------------------------------------------------------------------------------------
# JAX's modes
# ------------------------------------------------------------------------------------------------

# Everything that computes positions.
POSITIONS = (*MASKED, "segment_ids", "query_offset")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", BLOCKED)
def test_x64(implementation, dtype):
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
def test_a_bias_in_float64_among_float32(implementation):
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


def test_a_bias_in_float64_does_not_reach_the_kernels():
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
        fn = functools.partial(by("triton"), return_lse=True)
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
def test_precision_is_that_around_the_call(around_call, around_gradient, precision, instruction):
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
def test_debug_modes(implementation, mode):
    """Inside, rows that see nothing are -inf; none of that comes out."""
    arguments = draw_all(*MASKED)
    run = oracle.compiled(output_and_gradients(masked(implementation)))
    want = run(arguments)
    with mode(True):
        assert_same_bits(run(arguments), want)


def test_debug_nans_outside_of_jit():
    arguments = draw_all(*MASKED)
    with jax.debug_nans(True):
        output_and_gradients(masked("xla", return_lse=True))(arguments)


def test_lowering_for_a_gpu_does_not_warn():
    with described_gpu("NVIDIA H200"), warnings.catch_warnings():
        warnings.simplefilter("error")
        run = jax.jit(output_and_gradients(masked("triton")))
        text = run.trace(draw_all(*POSITIONS)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 4


# ------------------------------------------------------------------------------------------------
# Export
# ------------------------------------------------------------------------------------------------


def test_export_for_a_gpu_that_is_not_here():
    check = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    arguments = draw_all(*POSITIONS)
    run = jax.jit(output_and_gradients(masked("triton")))
    with described_gpu("NVIDIA H200"):
        exported = jax.export.export(run, platforms=["cuda"], disabled_checks=[check])(arguments)
    assert exported.platforms == ("cuda",)
    assert exported.mlir_module().count("@__gpu$xla.gpu.triton") == 4
    shapes = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    want = jax.eval_shape(output_and_gradients(masked("reference")), arguments)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), want
    )


def test_one_export_for_several_platforms():
    arguments = draw_all(*MASKED)
    run = jax.jit(output_and_gradients(masked("xla")))
    exported = jax.export.export(run, platforms=["cpu", "cuda", "tpu"])(arguments)
    called = oracle.compiled(lambda arguments: exported.call(arguments))(arguments)
    dense = oracle.compiled(output_and_gradients(masked("reference")))(arguments)
    assert_close(called, dense)


# ------------------------------------------------------------------------------------------------
# Sharding
# ------------------------------------------------------------------------------------------------

ROWS, LENGTHS = P("batch", None, "heads"), P("batch")
# The bias is the same for all examples: its gradient is a sum over devices.
SPECS = {
    "query": ROWS,
    "key": ROWS,
    "value": ROWS,
    "key_value_seq_lengths": LENGTHS,
    "query_seq_lengths": LENGTHS,
    "bias": P("heads"),
    "scale": P(),
}


def sharded(implementation: str, arguments, mesh, check_vma: bool) -> Callable:
    in_specs = {name: SPECS[name] for name in arguments}
    return jax.shard_map(
        masked(implementation, return_lse=True),
        mesh=mesh,
        in_specs=(in_specs,),
        out_specs=(ROWS, ROWS),
        check_vma=check_vma,
    )


# With the kind of the mesh's axes and shard_map's own check. Without shard_map (None), XLA divides.
SHARDED = [
    ("xla", AxisType.Auto, True),
    ("xla", AxisType.Auto, False),
    ("xla", AxisType.Explicit, True),
    ("xla", AxisType.Auto, None),
    # Pallas's interpreter does not pass the check.
    ("interpret", AxisType.Auto, False),
]


def check_sharding_on_four_devices():
    """Runs in a process of its own, see below."""
    _make_tiles_small(setattr)
    assert len(jax.devices()) == 4
    for implementation, axis_type, check_vma in SHARDED:
        arguments = draw_all("scale", *MASKED, *(["bias"] if implementation == "xla" else []))
        mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(axis_type,) * 2)
        placed = {
            name: jax.device_put(x, NamedSharding(mesh, SPECS[name]))
            for name, x in arguments.items()
        }
        fn = masked(implementation, return_lse=True)
        if check_vma is not None:
            fn = sharded(implementation, arguments, mesh, check_vma)
        dense = masked("reference", return_lse=True)
        got = oracle.compiled(output_and_gradients(fn))(placed)
        assert_close(got, oracle.compiled(output_and_gradients(dense))(arguments))
        print("agrees:", implementation, axis_type, check_vma)


@pytest.mark.extended
def test_sharding_by_batch_and_heads():
    here = Path(__file__)
    paths = os.pathsep.join([str(here.parent), str(here.parents[1])])
    flags = f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}"
    code = f"import {here.stem}; {here.stem}.check_sharding_on_four_devices()"
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.count("agrees") == len(SHARDED)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_kernels_lower_inside_shard_map(axis_type, check_vma):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh(
        (2, 2), ("batch", "heads"), axis_types=(axis_type,) * 2, abstract_device=device
    )
    arguments = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, SPECS[name]))
        for name, x in draw_all("scale", *MASKED).items()
    }
    with jax.sharding.use_abstract_mesh(mesh):

        def run(arguments):
            fn = sharded("triton", arguments, mesh, check_vma)
            inputs = {name: x for name, x in arguments.items() if name in FLOATS}
            out, pull = jax.vjp(lambda inputs: fn(arguments | inputs), inputs)
            return pull(out)

        lowered = jax.jit(run).trace(arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 4


# ------------------------------------------------------------------------------------------------
# Running twice, running on nothing
# ------------------------------------------------------------------------------------------------


@by_xla
def test_bits_do_not_depend_on_the_run(implementation):
    arguments = draw_all("scale", *MASKED, *(["bias"] if implementation == "xla" else []))

    def compiled():
        return oracle.compiled(output_and_gradients(masked(implementation, return_lse=True)))

    run = compiled()
    first = run(arguments)
    assert_same_bits(run(arguments), first)
    assert_same_bits(compiled()(arguments), first)


@pytest.mark.parametrize("implementation", BLOCKED)
def test_donated_query(implementation):
    arguments = draw_all()
    arguments["value"] = arguments["key"]
    query = arguments.pop("query")

    def fn(query):
        return masked(implementation)(arguments | {"query": query})

    want = jax.jit(fn)(query)
    got = jax.jit(fn, donate_argnums=0)(query)
    assert query.is_deleted()
    assert_same_bits(got, want)


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
@pytest.mark.parametrize("implementation", ["xla", "interpret", "triton", "reference"])
def test_nothing_to_attend(implementation, empty):
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
