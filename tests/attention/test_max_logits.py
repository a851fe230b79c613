"""The largest score of each head, as dense attention has it: by every implementation and case."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, jaxprs, oracle, ttir
from support.compare import assert_close, assert_same_bits
from support.few_queries import SERVED as FEW_QUERIES
from support.few_queries import with_few
from support.judge import SMALL, judge_max_logits
from support.strict import strictly

import pallas_flash
from pallas_flash._backends import xla
from pallas_flash.tuning import Tile, TileSizes

IMPLEMENTATIONS = ("interpret", "xla", "reference")


@pytest.fixture
def small_blocks(monkeypatch):
    """Several tiles of "xla" in short sequences, too."""
    monkeypatch.setattr(xla, "BLOCK_Q", 16)
    monkeypatch.setattr(xla, "BLOCK_KV", 32)


def call_of(implementation, options, **extra):
    if implementation == "interpret":
        extra = {"config": SMALL} | extra
    return functools.partial(
        pallas_flash.attention,
        return_max_logits=True,
        implementation=implementation,
        **options,
        **extra,
    )


# By default those where scores are made or hidden in another way.
CHOSEN = (
    "T of several tiles, S of one",
    "causal, first queries see nothing",
    "everything at once",
    "large scores",
    "negative scale",
    "zero scale",
    "soft cap, bias",
    "sinks, causal, first queries see nothing",
    "bias of minus infinity",
    "all features",
)
BY_XLA = ("negative scale", "large scores", "soft cap, bias", "everything at once", "all features")
CASES = [(by, case) for by in IMPLEMENTATIONS for case in cases.CASES]
BY_DEFAULT = [
    (by, case)
    for by, case in CASES
    if case.name in {"interpret": CHOSEN, "xla": BY_XLA}.get(by, ())
]


@pytest.mark.parametrize(
    ("implementation", "case"),
    cases.default(BY_DEFAULT, CASES),
    ids=lambda x: x if isinstance(x, str) else x.name.replace(" ", "-"),
)
def test_max_logits_of_each_case(case, implementation, small_blocks):
    qkv, _, options = case.problem()
    with strictly(x64=False, leaks=False):
        _, found = oracle.compiled(call_of(implementation, options))(*qkv)
    judge_max_logits(case, "float32", found)


@cases.parametrize(names=["full", "everything at once", "large scores"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_max_logits_in_bfloat16(case, implementation):
    """They are float32, and no score is rounded to 16 bits."""
    qkv, _, options = case.problem("bfloat16")
    _, found = oracle.compiled(call_of(implementation, options))(*qkv)
    judge_max_logits(case, "bfloat16", found)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_max_logits_in_float64(implementation):
    with jax.enable_x64(True):
        case = cases.BY_NAME["everything at once"]
        problem = case.problem("float64")
        qkv, _, options = problem
        _, found = oracle.compiled(call_of(implementation, options))(*qkv)
        judge_max_logits(case, "float64", found)


@cases.parametrize(
    names=["one key/value head", "everything at once", "soft cap", "sinks"],
    others_extended=True,
    table=FEW_QUERIES,
)
def test_max_logits_of_decoding(case, kernel_case):
    """Splits of the keys have maxima of their own."""
    case = with_few(case)
    qkv, _, options = case.problem()
    _, found = oracle.compiled(call_of("interpret", options))(*qkv)
    judge_max_logits(case, "float32", found)


@cases.parametrize(
    names=["large scores", "everything at once", "soft cap, bias"], others_extended=True
)
@pytest.mark.parametrize("few", [False, True], ids=["forward", "decoding"])
def test_max_logits_of_lowered_kernels(case, few, kernel_case):
    """Run as their IR for a GPU, in memory that is checked."""
    case = with_few(case) if few and case in FEW_QUERIES else case
    qkv, _, options = case.problem()
    tiles = dict(decode=Tile(16, 16)) if few else dict(forward=Tile(64, 32))
    call = call_of("triton", options, config=TileSizes(**tiles))
    _, found = ttir.evaluate(lambda qkv: call(*qkv), qkv)
    judge_max_logits(case, "float32", found)


# The tests below compile calls of few sizes, by both kinds of forwards.
by_both = pytest.mark.parametrize("implementation", ["interpret", "xla"])
by_each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
CAUSAL = dict(is_causal=True, query_offset=-5)


def small_call(implementation, **options):
    """A call, its operands, and their largest scores."""
    case = cases.Case("small", T=21, S=35, N=6, H=8, V=5)
    qkv, *_ = case.problem()
    return call_of(implementation, CAUSAL | options), qkv, _largest(qkv)


def _largest(qkv):
    truth = oracle.solve(*qkv, **CAUSAL)
    return np.asarray(truth.values["max_logits"], np.float32)


@by_each
def test_results_come_in_order(implementation):
    call, qkv, want = small_call(implementation)
    o, max_logits = call(*qkv)
    for name, dtype in (("return_lse", jnp.float32), ("return_residual", jnp.float32)):
        again, lse, also = functools.partial(call, **{name: True})(*qkv)
        assert_same_bits((again, also), (o, max_logits))
        assert (lse.shape, lse.dtype) == ((2, 21, 6), dtype)
    _, unbatched = call(*(x[1] for x in qkv))
    assert_close(max_logits, want)
    assert_close(unbatched, want[1])


@by_each
@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_nothing_has_no_largest_score(implementation, empty):
    call, (q, k, v), _ = small_call(implementation)
    if empty == "batch":
        q, k, v = (x[:0] for x in (q, k, v))
    elif empty == "queries":
        q = q[:, :0]
    else:
        k, v = (x[:, :0] for x in (k, v))
    _, max_logits = call(q, k, v)
    np.testing.assert_array_equal(max_logits, np.full((len(q), 6), -np.inf, np.float32))


@by_each
def test_max_logits_have_no_gradient(implementation):
    call, qkv, _ = small_call(implementation)
    plain = functools.partial(call, return_max_logits=False)

    def gradients(loss):
        return jax.jit(jax.grad(lambda *qkv: loss(*qkv), (0, 1, 2)))(*qkv)

    zeros = gradients(lambda *qkv: call(*qkv)[1].sum())
    assert_same_bits(zeros, jax.tree.map(jnp.zeros_like, qkv))
    both = gradients(lambda *qkv: sum(x.sum() for x in call(*qkv)))
    assert_same_bits(both, gradients(lambda *qkv: plain(*qkv).sum()))


def test_max_logits_have_no_tangent():
    call, qkv, _ = small_call("reference")
    _, (_, tangent) = jax.jvp(call, qkv, qkv)
    np.testing.assert_array_equal(tangent, np.zeros((2, 6), np.float32))


@by_both
def test_max_logits_beside_second_derivatives(implementation):
    call, qkv, want = small_call(implementation)
    plain = functools.partial(call, return_max_logits=False)

    def with_max(q):
        o, max_logits = call(q, *qkv[1:])
        return (o**2).sum(), max_logits

    def along(gradient):
        return jax.jit(lambda q: jax.jvp(gradient, (q,), (q,)))(qkv[0])

    (grads, max_logits), (tangents, none) = along(jax.grad(with_max, has_aux=True))
    expected = along(jax.grad(lambda q: (plain(q, *qkv[1:]) ** 2).sum()))
    assert_same_bits((grads, tangents), expected)
    assert_close(max_logits, want)
    assert not none.any()


@by_both
def test_max_logits_of_mapped_calls(implementation):
    call, (q, k, v), want = small_call(implementation)
    several = jnp.stack([q, q[::-1]])
    mapped = jax.jit(jax.vmap(call, in_axes=(0, None, None)))
    one_by_one = jnp.stack([call(x, k, v)[1] for x in several])
    found = mapped(several, k, v)[1]
    assert_close(found, one_by_one)
    assert_close(found[0], want)


@by_both
def test_remat_saves_what_comes_with_the_output(implementation):
    """No forward runs again for the backward, also where it reads the largest scores."""
    call, qkv, _ = small_call(implementation)

    def layer(*qkv):
        o, max_logits = call(*qkv)
        return (o * max_logits[:, None, :, None]).sum()

    saved = jax.checkpoint(layer, policy=pallas_flash.save_residuals)
    assert_close(jax.grad(saved)(*qkv), jax.grad(layer)(*qkv))
    if implementation == "interpret":
        names = jaxprs.kernels(jaxprs.trace(jax.grad(saved), *qkv))
        assert names.count("pallas_flash_forward") == 1


def test_exported_with_symbolic_sizes():
    call, qkv, want = small_call("xla")
    b, t, s = jax.export.symbolic_shape("b, t, s")
    shapes = [(b, t, 6, 8), (b, s, 2, 8), (b, s, 2, 5)]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    exported = jax.export.export(jax.jit(call))(*shapes)
    assert_close(exported.call(*qkv)[1], want)


@pytest.mark.parametrize("queries", [21, 1], ids=["forward", "decoding"])
@pytest.mark.parametrize("scale", [None, 8.0], ids=["one", "two"])
def test_kernels_that_are_not_asked_store_no_more(queries, scale):
    """One statistic of rows, or two with a separate maximum; one more if asked."""
    call, (q, k, v), _ = small_call("interpret", scale=scale)

    def outputs(**options):
        eqns = jaxprs.trace(functools.partial(call, **options), q[:, :queries], k, v)
        return [len(e.outvars) for e in eqns if e.primitive.name == "pallas_call"][-1]

    assert outputs(return_max_logits=False) == 2 + (scale is not None)
    assert outputs() == 3 + (scale is not None)
