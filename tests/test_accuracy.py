"""Every case of the table is as accurate as a dense computation in the same dtype.

The measure is the error of output, LSE and gradients against float64, in the L2 norm and at the
worst element: at most twice that of the dense computation. Four kinds of rounding are allowed in
place of a dense error that is smaller by luck, as where one key makes every probability exactly 1:

* the backward computes p = exp(s - lse) from a float32 LSE and a float32 argument, which is about
  -log(S) where many keys share a row: p has a relative error of about |lse| + log(S) in float32's
  last place;
* the backward takes delta = rowsum(o * do) from the output in the inputs' dtype, and with TF32
  subtracts it from a dp = do @ v.T of cut operands, where dense attention subtracts a sum of dp;
* p and ds are rounded before their products, and o before delta. Where a result has few elements
  (one query, two channels, a bias that all scores share) the dense computation's own error is a
  lucky or unlucky draw: what is expected counts. TF32 cuts them, where the gradient of a bias is no
  product and dense attention's own is exact;
* results are rounded to that dtype.
"""

import dataclasses
import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from strict import strictly

import pallas_flash
from pallas_flash import _xla
from pallas_flash._triton import backward_dkv

# Results of so few elements have no average, such as the gradient of a bias that all scores share.
FEW = 64

# The relative error of rounding to nearest.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
# The mean error of cutting off.
TF32 = 2.0**-11


def program(implementation, options, **extra):
    """Of q, k, v, do, dlse and `oracle.OPERANDS`, to the results of `oracle.differentiate`."""
    call = functools.partial(
        pallas_flash.attention, return_lse=True, implementation=implementation, **options, **extra
    )
    return oracle.compiled(functools.partial(oracle.differentiate, call))


def measured(case, dtype, implementation, problem=None, **extra):
    """The results of a case, computed under all of JAX's strict switches."""
    qkv, cotangents, options = problem or case.problem(dtype)
    operands, options = oracle.split(options)
    run = program(implementation, options, **extra)
    # The search for leaks forgets what is compiled, for which a GPU takes long; "reference" is
    # searched in `test_strict_switches`. Traces are the same for "triton" and "interpret".
    with strictly(x64=dtype == "float64", leaks=implementation in ("interpret", "xla")):
        return run(*qkv, *cotangents, **operands)


def _expected_of(problem, tf32):
    """The names of results, the exact ones, and those of the dense computation."""
    qkv, cotangents, options = problem
    truth = oracle.solve(*qkv, *cotangents, tf32=tf32, **options)
    operands, options = oracle.split(options)
    dense = functools.partial(oracle.dense, tf32=tf32, **options)
    run = oracle.compiled_alike(functools.partial(oracle.differentiate, dense))
    return oracle.names(operands), truth, run(*qkv, *cotangents, **operands)


@functools.lru_cache(maxsize=len(cases.CASES))
def _expected(case, dtype, tf32):
    """The same of a case, which several tests judge."""
    return _expected_of(case.problem(dtype), tf32)


def judge(case, dtype, results, problem=None, worst=2, tf32=False, *, expected=None, apart=False):
    """Asserts the rule for each result: all that `oracle.names` names, or those of `oracle.NAMES`,
    or the output and the LSE.

    `worst` is its factor at the worst element, and for less than `FEW` of them. `tf32`: the
    products were of float32 cut to TF32. `expected`: what `_expected_of` returns, where it is
    known. `apart`: the backward was given the logarithm of each sum apart from the maximum.
    """
    if expected is not None:
        names, truth, baseline = expected
    elif problem is None:
        names, truth, baseline = _expected(case, dtype, tf32)
    else:
        names, truth, baseline = _expected_of(problem, tf32)
    if len(results) in (2, len(oracle.NAMES)):
        names, baseline = names[: len(results)], baseline[: len(results)]
    shapes = [x.shape for x in baseline]
    assert [x.shape for x in results] == shapes
    assert [x.dtype for x in results] == [x.dtype for x in baseline]
    lse = np.zeros(1) if apart else np.abs(truth.values["lse"])
    of_lse = ROUNDING["float64" if dtype == "float64" else "float32"] * (
        1 + lse.max(where=np.isfinite(lse), initial=0) + np.log(case.S)
    )
    failures = []
    for name, ours, theirs in zip(names, results, baseline, strict=True):
        rounding = ROUNDING[ours.dtype.name]
        ours, theirs = (oracle.errors(x, truth, name) for x in (ours, theirs))
        floor = oracle.natural(of_lse, truth, name)
        of_terms = oracle.errors(truth.from_rounded.get(name, truth.values[name]), truth, name)
        if name != "lse":
            floor = max(floor, rounding / 2)
        # The gradients of operands are no products.
        cut = tf32 and name[1:] in oracle.OPERANDS
        expected = oracle.of_rounding(TF32 if cut else ROUNDING[dtype], truth, name)
        for norm in ours:
            least = max(theirs[norm], floor, of_terms[norm], expected[norm])
            # The L2 norm of a few numbers is that of the worst.
            few = truth.values[name].size < FEW
            bound = (worst if norm == "max" or few else 2) * least
            if not ours[norm] <= bound:
                failures.append(
                    f"{name} {norm}: {ours[norm]:.2e} > {bound:.2e} (dense {theirs[norm]:.2e})"
                )
    assert not failures, "; ".join(failures)


# Small tiles, so that a short sequence has empty, masked and full ones; their sides differ in every
# kernel.
SMALL = pallas_flash.TileSizes(
    forward=pallas_flash.Tile(32, 16, one_loop=True),
    decode=pallas_flash.Tile(16, 16),
    dkv=pallas_flash.Tile(16, 32),
    dq=pallas_flash.Tile(16, 32),
)


# What a dtype could break: several tiles, ragged and whole ones, rows that see nothing, all
# conditions. Each mask by itself does not depend on it.
in_bfloat16 = cases.parametrize(
    names=[
        "full, whole tiles",
        "one of everything",
        "lengths of zero",
        "everything at once",
    ],
    others_extended=True,
)


@pytest.fixture
def tiles_of_kernels(implementation, request):
    """The options of a call, which counts as one of the kernels if it is."""
    if implementation != "interpret":
        return {}
    request.getfixturevalue("kernel_case")
    return {"tile_sizes": SMALL}


@pytest.fixture
def small_blocks(case, monkeypatch):
    """Several tiles of "xla" in short sequences, too."""
    if case in cases.FEATURES:
        monkeypatch.setattr(_xla, "BLOCK_Q", 16)
        monkeypatch.setattr(_xla, "BLOCK_KV", 32)


# Of each case the default run has one: by the kernels, which are the slowest to compile, where they
# meet something that no case of test_lowering has there; the others by the other two in turns.
BY_KERNELS = (
    "one of everything",
    "causal, first queries see nothing",
    "documents in pairs",
    "mask, causal, lengths",
    "soft cap, bias",
    "sinks, causal, first queries see nothing",
    "prefix",
)
IMPLEMENTATIONS = ("interpret", "xla", "reference")
BY_DEFAULT = [
    ("interpret" if case.name in BY_KERNELS else IMPLEMENTATIONS[1 + n % 2], case)
    for n, case in enumerate(cases.CASES)
]
by_one_implementation = pytest.mark.parametrize(
    ("implementation", "case"),
    cases.default(BY_DEFAULT, list(itertools.product(IMPLEMENTATIONS, cases.CASES))),
    ids=lambda x: getattr(x, "name", x).replace(" ", "-"),
)


@by_one_implementation
def test_float32(case, implementation, small_blocks, tiles_of_kernels):
    judge(case, "float32", measured(case, "float32", implementation, **tiles_of_kernels))


@in_bfloat16
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_bfloat16(case, implementation, tiles_of_kernels, monkeypatch):
    """In tiles so small that a sum over them, were it rounded in each, would be too far off."""
    monkeypatch.setattr(_xla, "BLOCK_Q", 16)
    monkeypatch.setattr(_xla, "BLOCK_KV", 16)
    judge(case, "bfloat16", measured(case, "bfloat16", implementation, **tiles_of_kernels))


@cases.parametrize(names=["full"], more=["everything at once"])
@pytest.mark.parametrize("dtype", cases.default(["bfloat16"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("implementation", cases.default(["xla"], ["interpret", "xla"]))
def test_optimized_by_xla(case, dtype, implementation, monkeypatch):
    """As users compile it; the other tests let XLA optimize less."""
    monkeypatch.setattr(oracle, "compiled", oracle.optimized)
    judge(case, dtype, measured(case, dtype, implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@cases.parametrize(
    names=[
        "full, whole tiles",
        "one of everything",
        "lengths of zero",
        "everything at once",
        "mask with empty tiles",
        "bias of queries, in 16 bits",
        "positions, window, slopes, lengths",
        "score function",
        "dropout",
        "prefix",
        "blocks and predicate",
        "all features",
    ],
    others_extended=True,
)
def test_strict_switches(case, implementation):
    """Traced with x64 on, and with x64 off what `measured` above has not run under all of them."""
    qkv, cotangents, options = case.problem()
    operands, options = oracle.split(options)
    extra = {"tile_sizes": SMALL} if implementation == "interpret" else {}
    for x64 in [True] if implementation == "xla" else [True, False]:
        run = program(implementation, options, **extra)
        with strictly(x64=x64):
            results = jax.eval_shape(run, *qkv, *cotangents, **operands)
        assert {x.dtype.name for x in results[:5]} == {"float32"}


@cases.parametrize(names=["full", "everything at once"])
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_float16(case, implementation):
    judge(case, "float16", measured(case, "float16", implementation))


@cases.parametrize(
    names=["large scores", "everything at once", "causal, first queries see nothing"]
)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_float64(case, implementation):
    with jax.enable_x64(True):
        qkv, (do, dlse), options = case.problem("float64")
        problem = qkv, (do, dlse.astype(jnp.float64)), options
        judge(case, "float64", measured(case, "float64", implementation, problem), problem)


@pytest.mark.parametrize("implementation", cases.default(["xla", "reference"], IMPLEMENTATIONS))
def test_slopes_move_with_an_offset_that_is_known(implementation):
    """As with one for each example, which the cases have."""
    qkv, cotangents, _ = cases.BY_NAME["full"].problem()
    batch, _, num_heads, _ = qkv[0].shape
    slopes = jnp.linspace(0.1, 0.4, num_heads)

    def results(offset, implementation=implementation):
        run = program(implementation, dict(query_offset=offset, alibi_slopes=slopes))
        return run(*qkv, *cotangents)

    moved, by_example = results(9), results(jnp.full(batch, 9, jnp.int32))
    for x, y, still in zip(moved, by_example, results(0, "reference"), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
        assert np.abs(x - still).max() > 1e-2


@cases.parametrize(
    names=[
        "full",
        "causal, first queries see nothing",
        "lengths of zero",
        "everything at once",
    ],
    more=[
        "causal, more queries",
        "causal, no query sees a key",
        "window, moved",
        "lengths",
        "documents, nothing in common",
        "all features",
    ],
)
# Of the kernels test_lowering has the same.
@pytest.mark.parametrize("implementation", cases.default(["xla", "reference"], IMPLEMENTATIONS))
def test_nothing_shows_of_what_no_query_sees(case, implementation, small_blocks):
    check_that_nothing_shows(case, implementation)


def check_that_nothing_shows(case, implementation):
    """NaN in unseen keys, values and biases, and in queries that see nothing, changes no bit."""
    qkv, cotangents, options = case.problem()
    poisoned_qkv, poisoned_cotangents = cases.poison(case, qkv, cotangents, options)
    poisoned_operands, _ = oracle.split(cases.poison_bias(case, options))
    operands, rest = oracle.split(options)
    run = program(implementation, rest)
    clean = run(*qkv, *cotangents, **operands)
    poisoned = run(*poisoned_qkv, *poisoned_cotangents, **poisoned_operands)
    for name, a, b in zip(oracle.names(options), clean, poisoned, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


TILES = [
    pallas_flash.Tile(*tile)
    for tile in (
        (16, 16, 1, 1),
        (16, 128, 4, 2),
        (128, 16, 4, 1),
        (32, 64, 2, 3),
        (64, 32, 8, 2),
        (256, 64, 8, 1),
    )
]


@pytest.mark.parametrize(
    "tile",
    cases.default([TILES[1], TILES[2]], TILES),
    ids=lambda tile: f"{tile.block_q}x{tile.block_kv}",
)
@cases.parametrize(names=["everything at once", "window narrower than a tile gap"])
@pytest.mark.parametrize("split", [False, True], ids=["together", "apart"])
def test_every_tile_gives_the_same_answer(case, tile, split, kernel_case):
    """Also with dk and dv in one launch or two."""
    backward = dict(dk=tile, dv=tile) if split else dict(dkv=tile)
    sizes = pallas_flash.TileSizes(forward=tile, dq=tile, **backward)
    judge(case, "float32", measured(case, "float32", "interpret", tile_sizes=sizes))


@cases.parametrize(names=["mask, causal, lengths"])
def test_shares_of_heads_that_are_not_equal(case, monkeypatch, kernel_case):
    """Three programs for 7 query heads of a key head, with tiles listed for each head."""
    monkeypatch.setattr(backward_dkv, "shares_of_heads", lambda *_: 3)
    case = dataclasses.replace(case, name="7 heads", N=14, K=2)
    problem = case.problem()
    judge(case, "float32", measured(case, "float32", "interpret", problem, tile_sizes=SMALL),
          problem)  # fmt: skip


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("scale", cases.default([-0.4, 0.0], [0.4, -0.4, 0.0]))
@cases.parametrize(names=["everything at once", "lengths of zero"])
def test_gradient_of_a_traced_scale(case, implementation, scale):
    check_gradient_of_the_scale(case, implementation, scale)


def check_gradient_of_the_scale(case, implementation, scale):
    qkv, (do, dlse), options = case.problem()
    truth = oracle.solve(*qkv, do, dlse, scale=scale, **options)

    def gradient(s, qkv, cotangents):
        def call(s):
            return pallas_flash.attention(
                *qkv, scale=s, return_lse=True, implementation=implementation, **options
            )

        return jax.vjp(call, s)[1](cotangents)

    (dscale,) = oracle.compiled(gradient)(jnp.float32(scale), qkv, (do, dlse))
    assert abs(dscale - truth.values["dscale"]) <= 8 * ROUNDING["float32"] * truth.terms["dscale"]
