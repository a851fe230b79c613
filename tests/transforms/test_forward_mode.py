"""Forward mode: tangents of output and LSE in all operands, as accurate as dense attention's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, jaxprs, oracle, ttir
from support.compare import assert_close
from support.described_gpus import described_gpu
from support.forward_mode import Call, judge_tangents, tangents_of
from support.judge import SMALL
from support.pairs_of_settings import SETTINGS, call_of, covering
from support.strict import strictly

from pallas_flash import ScoreMod, attention
from pallas_flash._backends import xla
from pallas_flash._backends.triton import tangent_kernel
from pallas_flash._execution import tangents
from pallas_flash._jax import compat
from pallas_flash._problem.scores import LN2, LogSum

EACH = ("xla", "interpret", "reference")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of queries, the last one ragged."""
    monkeypatch.setattr(tangents, "ROWS_AT_ONCE", 256)
    monkeypatch.setattr(xla, "BLOCK_Q", 16)
    monkeypatch.setattr(xla, "BLOCK_KV", 32)


def tiles(implementation):
    return {"config": SMALL} if implementation == "interpret" else {}


# ------------------------------------------------------------------------------------------------
# Accuracy
# ------------------------------------------------------------------------------------------------

# Each operand with a tangent, rows without keys, and large scores.
CASES = [
    (by, cases.BY_NAME[name])
    for by, name in [
        ("interpret", "causal, first queries see nothing"),
        ("xla", "large scores"),
        ("interpret", "negative scale"),
        ("xla", "bias of minus infinity"),
        ("interpret", "sinks, causal, first queries see nothing"),
        ("xla", "slopes, offset for each example"),
        ("interpret", "score function"),
        ("reference", "all features"),
    ]
]
by_case = pytest.mark.parametrize(
    ("by", "case"),
    cases.default(CASES, [(by, case) for by in EACH for case in cases.CASES]),
    ids=lambda x: getattr(x, "name", x).replace(" ", "-"),
)


@by_case
def test_tangents_in_float32(by, case):
    call = Call.from_problem(case.problem("float32"))
    judge_tangents(call, tangents_of(call, by, **tiles(by))[1])


@pytest.mark.parametrize("by", cases.default(["interpret"], EACH))
@cases.parametrize(names=["full, whole tiles"], others_extended=True)
def test_tangents_in_bfloat16(case, by):
    call = Call.from_problem(case.problem("bfloat16"))
    judge_tangents(call, tangents_of(call, by, **tiles(by))[1])


@cases.parametrize(
    names=[
        "everything at once",
        "large scores",
        "one of everything",
        "all features",
    ],
    others_extended=True,
)
@pytest.mark.parametrize("dtype", cases.default(["bfloat16"], ["float32", "bfloat16"]))
def test_tangents_by_the_kernel(case, dtype, kernel_case):
    """The kernel computes tangents of queries, keys and values."""
    call = Call.from_problem(case.problem(dtype)).moved(["query", "key", "value"])
    judge_tangents(call, tangents_of(call, "interpret", **tiles("interpret"))[1])


@pytest.mark.parametrize("by", ["xla", "interpret"])
@cases.parametrize(
    names=["causal, first queries see nothing"],
    more=["lengths of zero", "everything at once", "all features"],
)
def test_hidden_tokens_have_no_tangent(case, by):
    """NaN in hidden keys and values, in queries without keys, and in their tangents."""
    qkv, cotangents, options = case.problem()
    names = ["query", "key", "value"]
    call = Call.from_problem((qkv, cotangents, options)).moved(names)

    def poisoned(arrays):
        arrays = [arrays[name] for name in names]
        found, _ = cases.poison(case, arrays, cotangents, options)
        return dict(zip(names, found, strict=True))

    changed = dataclasses.replace(
        call, floats=call.floats | poisoned(call.floats), dots=poisoned(call.dots)
    )
    results = (tangents_of(x, by, **tiles(by)) for x in (call, changed))
    jax.tree.map(np.testing.assert_array_equal, *results)


def tangent_kernels(by, moved, gpu="NVIDIA H200", **options):
    """The number of tangent kernels in a program for a described GPU."""
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    call = functools.partial(attention, is_causal=True, implementation=by)
    slopes = jax.ShapeDtypeStruct((2,), jnp.float32)
    floats = dict(query=x, key=x, value=x) | ({"alibi_slopes": slopes} if options else {})

    def run(floats):
        some = {name: floats[name] for name in moved}
        return jax.jvp(lambda some: call(**floats | some), (some,), (some,))

    with described_gpu(gpu):
        lowered = jax.jit(run).trace(floats).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count('name = "pallas_flash_tangents"')


@pytest.mark.parametrize("by", ["triton", *["mosaic"] * compat.has_mosaic_gpu()])
def test_common_calls_have_a_tangent_kernel(by):
    assert tangent_kernels(by, ["query", "key", "value"]) == 1
    assert tangent_kernels(by, ["key"]) == 1
    assert tangent_kernels(by, ["query", "alibi_slopes"], slopes=True) == 0


def test_lowered_tangent_kernel():
    """Run on the IR of Triton, where memory outside of an array raises."""
    case = dataclasses.replace(cases.BY_NAME["everything at once"], T=75, S=91)
    problem = case.problem()
    call = Call.from_problem(problem).moved(["query", "key", "value"])
    p = cases.checked(problem[0], problem[2])
    lse = oracle.solve(*problem[0], *problem[1], **problem[2]).values["lse"]
    log_sum = LogSum(None, jnp.asarray(np.moveaxis(lse, 2, 1) / LN2, jnp.float32))
    run = functools.partial(tangent_kernel.tangents, p, dq=SMALL.dq, interpret=False)
    o_dot, lse_dot = ttir.evaluate(run, log_sum, tuple(call.dots.values()))
    judge_tangents(call, [o_dot, jnp.moveaxis(lse_dot, 1, 2)])


@cases.parametrize(names=["causal, first queries see nothing"], more=["all features"])
@pytest.mark.parametrize("by", ["xla", "reference"])
def test_tangents_in_float64(case, by):
    with jax.enable_x64(True):
        call = Call.from_problem(case.problem("float64")).widened()
        exact = call.jvp(functools.partial(oracle.dense, forward_mode=True))
        assert_close(tangents_of(call, by), exact, tolerance=1e-13)


ROWS = covering(SETTINGS)


@pytest.mark.parametrize("by", cases.default(["xla"], EACH))
@pytest.mark.parametrize(
    "row", cases.default(ROWS[:1], ROWS), ids=lambda row: "".join(map(str, row.values()))
)
def test_every_pair_of_settings_has_tangents(row, by):
    _, problem = call_of(row)
    call = Call.from_problem(problem)
    judge_tangents(call, tangents_of(call, by, **tiles(by))[1])


@pytest.mark.parametrize(
    "moved",
    cases.default(
        ["operands"],
        ["query", "key", "value", "bias", "sinks", "alibi_slopes", "operands"],
    ),
)
def test_one_operand_alone_has_a_tangent(moved):
    call = Call.from_problem(cases.BY_NAME["all features"].problem()).moved([moved])
    judge_tangents(call, tangents_of(call, "xla")[1])


def test_results_beside_tangents_stay_the_same():
    call = Call.from_problem(cases.BY_NAME["everything at once"].problem("bfloat16"))
    for by in ("xla", "interpret"):
        results, _ = tangents_of(call, by, **tiles(by))
        alone = functools.partial(attention, implementation=by, return_lse=True, **tiles(by))
        wanted = oracle.compiled(call.function(alone))(call.floats)
        jax.tree.map(np.testing.assert_array_equal, results, wanted)


# ------------------------------------------------------------------------------------------------
# Forward mode and reverse mode
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["xla", "interpret"])
@cases.parametrize(names=["lengths of zero"], others_extended=True)
def test_cotangents_times_tangents_are_equal(case, by):
    """<do, o_dot> + <dlse, lse_dot> = sum of <dx, x_dot> over the operands x."""
    problem = case.problem()
    call, (do, dlse) = Call.from_problem(problem), problem[1]
    run = call.function(
        functools.partial(attention, implementation=by, return_lse=True, **tiles(by))
    )
    (_, lse), dots = tangents_of(call, by, **tiles(by))
    dlse = jnp.where(lse > -jnp.inf, dlse, 0)
    gradients = oracle.compiled(lambda x: jax.vjp(run, x)[1]((do, dlse)))(call.floats)[0]

    def product(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return [np.asarray(x, np.float64).ravel() @ np.asarray(y, np.float64).ravel()
                for x, y in pairs]  # fmt: skip

    terms = product(gradients, call.dots)
    size = np.linalg.norm(do) * np.linalg.norm(dots[0]) + sum(map(abs, terms))
    assert abs(sum(product((do, dlse), dots)) - sum(terms)) <= 1e-5 * size


# ------------------------------------------------------------------------------------------------
# Transformations
# ------------------------------------------------------------------------------------------------

TRANSFORMED = {
    "linearize": lambda f, x, dx: jax.linearize(f, x)[1](dx),
    "jacfwd": lambda f, x, dx: jax.jacfwd(lambda row: f(x.at[0, 1, 1].set(row)))(dx[0, 1, 1]),
    "remat": lambda f, x, dx: jax.jvp(jax.jit(jax.checkpoint(f)), (x,), (dx,)),
    "scan": lambda f, x, dx: jax.jvp(
        lambda x: jax.lax.scan(lambda x, w: (x + w * f(x), None), x, jnp.array([0.5, 2.0]))[0],
        (x,),
        (dx,),
    ),
    "of a vmap": lambda f, x, dx: jax.jvp(
        jax.vmap(f), (jnp.stack([x, -x]),), (jnp.stack([dx, x]),)
    ),
    "vmap": lambda f, x, dx: jax.vmap(lambda x, dx: jax.jvp(f, (x,), (dx,)))(
        jnp.stack([x, -x]), jnp.stack([dx, x])
    ),
    "vmap of tangents": lambda f, x, dx: jax.vmap(jax.linearize(f, x)[1])(jnp.stack([dx, x])),
    "transpose": lambda f, x, dx: jax.linear_transpose(jax.linearize(f, x)[1], x)(dx),
    "twice": lambda f, x, dx: jax.jvp(lambda x: jax.jvp(f, (x,), (dx,))[1], (x,), (x,)),
    "gradient": lambda f, x, dx: jax.grad(lambda x: (jax.jvp(f, (x,), (dx,))[1] ** 2).sum())(x),
    "Hessian product": lambda f, x, dx: jax.jvp(jax.grad(lambda x: (f(x) ** 2).sum()), (x,), (dx,)),
}
# Others have all that these do, and test_second_order.py has the last.
AMONG_OTHERS = ("linearize", "jacfwd", "Hessian product")


@pytest.mark.parametrize("by", cases.default(["interpret"], ["xla", "interpret"]))
@pytest.mark.parametrize(
    "transformed", cases.default([x for x in TRANSFORMED if x not in AMONG_OTHERS], TRANSFORMED)
)
def test_forward_mode_under_transformations(transformed, by):
    x, dx = np.random.default_rng(0).normal(size=(2, 2, 21, 4, 8)).astype(np.float32)

    def run(by):
        def fn(x):
            key, value = x[:, :, :2], jnp.sin(x[:, :, 2:])
            options = dict(is_causal=True, implementation=by, **tiles(by))
            return attention(x, key, value, **options)

        return oracle.compiled(functools.partial(TRANSFORMED[transformed], fn))(x, dx)

    assert_close(run(by), run("reference"))


def test_forward_mode_outside_of_jit():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, 2, 8)), np.float32)

    def run(by):
        return jax.jvp(lambda x: attention(x, x, x, implementation=by), (x,), (x,))

    assert_close(run("xla"), run("reference"))


def test_unmapped_tangents_are_not_repeated():
    """A `vmap` of a function that gives the same tangents for each of its instances."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, 2, 8)), np.float32)

    def run(_):
        return jax.jvp(lambda x: attention(x, x, x, implementation="xla"), (x,), (x,))

    results = jax.vmap(run, out_axes=None)(jnp.arange(3))
    jax.tree.map(np.testing.assert_array_equal, results, run(None))


def test_largest_scores_have_no_tangent():
    x = jnp.ones((1, 9, 2, 8))
    call = functools.partial(attention, implementation="xla", return_max_logits=True)
    _, (_, dot) = jax.jvp(lambda x: call(x, x, x), (x,), (x,))
    assert not dot.any()


def test_integers_beside_tangents():
    """The operand of a score function may be of integers, and `jax.vjp` gives them a tangent."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, 2, 8)), jnp.float32)
    slopes, shift = jnp.array([0.5, 1.5]), jnp.array([3, 4], jnp.int32)

    def fn(slopes, shift):
        score_mod = ScoreMod(lambda s, b, h, q, k, a, n: s * a[h] + k % n[h], (slopes, shift))
        return attention(x, x, x, score_mod=score_mod, implementation="xla")

    _, dot = jax.jvp(lambda slopes: fn(slopes, shift), (slopes,), (slopes,))
    gradient, of_shift = jax.vjp(fn, slopes, shift)[1](dot)
    np.testing.assert_allclose(gradient @ slopes, (dot * dot).sum(), rtol=1e-5)
    assert of_shift.dtype == jax.dtypes.float0


def test_shared_keys_sum_gradients_in_float32():
    """The keys of all instances of a `vmap` are one array, of 16 bits."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(300, 1, 3, 2, 8)), jnp.bfloat16)
    do = jnp.ones_like(x) + jnp.arange(3, dtype=jnp.bfloat16)[:, None, None]

    def gradient(x, value, dtype):
        x, value, weight = (y.astype(dtype) for y in (x, value, do))

        def loss(value):
            mapped = jax.vmap(lambda q, k: attention(q, k, value, implementation="xla"))
            return (mapped(x, x) * weight).sum()

        return jax.jit(jax.grad(loss))(value)

    exact, ours = (gradient(x, x[0], dtype) for dtype in (jnp.float32, jnp.bfloat16))
    error = np.asarray(ours, np.float32) - np.asarray(exact)
    assert np.linalg.norm(error) <= 2**-8 * np.linalg.norm(exact)


def test_vmapped_gradient_under_strict_promotion():
    x = jax.ShapeDtypeStruct((3, 1, 9, 2, 8), jnp.bfloat16)

    def loss(x):
        call = functools.partial(attention, implementation="xla")
        return jax.vmap(call, in_axes=(0, None, None))(x, x[0], x[0]).astype(jnp.float32).sum()

    with strictly():
        assert jax.eval_shape(jax.grad(loss), x).dtype == jnp.bfloat16


# ------------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["query", "key"])
def test_memory_of_tangents_is_linear(argument):
    def temporary_bytes(length):
        few, many = (jax.ShapeDtypeStruct((1, n, 2, 8), jnp.float32) for n in (512, length))
        shapes = dict(query=few, key=few, value=few) | {argument: many}
        shapes["value"] = shapes["key"]

        def run(x, dx):
            call = functools.partial(attention, is_causal=True, implementation="xla")
            return jax.jvp(lambda x: call(**x), (x,), (dx,))

        compiled = jax.jit(run).lower(shapes, shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    size, doubled = (temporary_bytes(length) for length in (2048, 4096))
    assert size <= doubled <= 2.1 * size


def test_reverse_mode_traces_no_tangents(monkeypatch):
    monkeypatch.delattr(tangents, "forward_tangents")
    x = jnp.ones((2, 9, 2, 8))

    def loss(x):
        return attention(x, x, x, implementation="xla").sum()

    jaxprs.trace(jax.grad(lambda x: jax.vmap(loss)(x[None]).sum()), x)
    with pytest.raises(AttributeError, match="forward_tangents"):
        jax.jit(lambda x: jax.jvp(loss, (x,), (x,))).lower(x)
