"""Every case of the table is as accurate as a dense computation in the same dtype: see judge.py."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle
from support.judge import ROUNDING, SMALL, check_that_nothing_shows, judge, measured, program
from support.strict import strictly

import pallas_flash
from pallas_flash._backends import xla
from pallas_flash._backends.triton import backward_dkv

# Cases that a dtype could break: several tiles, ragged and whole tiles, rows without keys, all
# conditions. A single mask does not depend on the dtype.
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
    return {"config": SMALL}


@pytest.fixture
def small_blocks(case, monkeypatch):
    """Several tiles of "xla" in short sequences, too."""
    if case in cases.FEATURES:
        monkeypatch.setattr(xla, "BLOCK_Q", 16)
        monkeypatch.setattr(xla, "BLOCK_KV", 32)


# The default run has each case once. The kernels, which are the slowest to compile, have cases that
# no case of test_lowering covers. "xla" has those in which it visits other tiles or reads another
# array, and "reference", which is the quickest to compile, the rest.
BY_KERNELS = (
    "one of everything",
    "documents in pairs",
    "mask, causal, lengths",
    "bias of minus infinity",
    "soft cap, bias",
    "sinks, causal, first queries see nothing",
    "prefix",
)
BY_XLA = (
    "T of one tile, S of several",
    "one query",
    "zero scale",
    "scores far below zero",
    "causal, no query sees a key",
    "window, causal",
    "lengths of zero",
    "documents, causal, long",
    "everything at once",
    "mask with empty tiles",
    "bias",
    "bias of queries, in 16 bits",
    # A row whose weights are all zero is a case of its own in each implementation.
    "bias of minus infinity",
    "sinks",
    "positions, window, slopes, lengths",
    "score function",
    "dropout for all alike, causal",
    "blocks larger than tiles",
    "all features",
    "masks by and, or, not",
)
IMPLEMENTATIONS = ("interpret", "xla", "reference")
BY_DEFAULT = [
    (by, case)
    for by, names in (("interpret", BY_KERNELS), ("xla", BY_XLA))
    for case in map(cases.BY_NAME.get, names)
]
BY_DEFAULT += [
    ("reference", case) for case in cases.CASES if case.name not in (*BY_KERNELS, *BY_XLA)
]
by_one_implementation = pytest.mark.parametrize(
    ("implementation", "case"),
    cases.default(BY_DEFAULT, list(itertools.product(IMPLEMENTATIONS, cases.CASES))),
    ids=lambda x: getattr(x, "name", x).replace(" ", "-"),
)


@by_one_implementation
def test_float32_as_accurate_as_dense(case, implementation, small_blocks, tiles_of_kernels):
    judge(case, "float32", measured(case, "float32", implementation, **tiles_of_kernels))


@in_bfloat16
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_bfloat16_as_accurate_as_dense(case, implementation, tiles_of_kernels, monkeypatch):
    """In tiles so small that a sum over them, were it rounded in each, would be too far off."""
    monkeypatch.setattr(xla, "BLOCK_Q", 16)
    monkeypatch.setattr(xla, "BLOCK_KV", 16)
    judge(case, "bfloat16", measured(case, "bfloat16", implementation, **tiles_of_kernels))


@cases.parametrize(names=["full"], more=["everything at once"])
@pytest.mark.parametrize("dtype", cases.default(["bfloat16"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("implementation", cases.default(["xla"], ["interpret", "xla"]))
def test_optimized_by_xla_as_accurate_as_dense(case, dtype, implementation, monkeypatch):
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
def test_traces_under_strict_switches(case, implementation):
    """Traced with x64 on, and with x64 off what `measured` above has not run under all of them."""
    qkv, cotangents, options = case.problem()
    operands, options = oracle.split(options)
    extra = {"config": SMALL} if implementation == "interpret" else {}
    for x64 in [True] if implementation == "xla" else [True, False]:
        run = program(implementation, options, **extra)
        with strictly(x64=x64):
            results = jax.eval_shape(run, *qkv, *cotangents, **operands)
        assert {x.dtype.name for x in results[:5]} == {"float32"}


# test_lowering has the kernels in float16, too.
@cases.parametrize(names=["everything at once"], more=["full"])
@pytest.mark.parametrize("implementation", cases.default(["interpret"], ["interpret", "xla"]))
def test_float16_as_accurate_as_dense(case, implementation):
    judge(case, "float16", measured(case, "float16", implementation))


@cases.parametrize(
    names=["large scores", "everything at once"], more=["causal, first queries see nothing"]
)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_float64_as_accurate_as_dense(case, implementation):
    with jax.enable_x64(True):
        qkv, (do, dlse), options = case.problem("float64")
        problem = qkv, (do, dlse.astype(jnp.float64)), options
        judge(case, "float64", measured(case, "float64", implementation, problem), problem)


@pytest.mark.parametrize("implementation", cases.default(["xla", "reference"], IMPLEMENTATIONS))
def test_slopes_move_with_known_offset(implementation):
    """The table of cases has an offset for each batch element; this one is known."""
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
# test_lowering has the same test of the kernels.
@pytest.mark.parametrize("implementation", cases.default(["xla", "reference"], IMPLEMENTATIONS))
def test_hidden_tokens_have_no_effect(case, implementation, small_blocks):
    check_that_nothing_shows(case, implementation)


# Arrays that are not finite at the third query or the second key, and what its scores are.
NOT_FINITE = {
    "queries": ("query", np.nan),
    "keys": ("key", np.nan),
    "infinite keys": ("key", np.inf),
    "bias": ("bias", np.nan),
    "infinite bias": ("bias", np.inf),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", NOT_FINITE)
def test_scores_that_are_not_finite_show(case, implementation):
    """The output is NaN where a query sees them; other rows stay, and empty rows are zero."""
    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 8))
    arguments = dict(query=x, key=x, value=x, bias=jnp.zeros((6, 6)))
    name, number = NOT_FINITE[case]
    at = {"query": (0, 2), "key": (0, 1), "bias": (2, 1)}[name]

    def run(arguments):
        return pallas_flash.attention(
            **arguments,
            is_causal=True,
            query_seq_lengths=jnp.array([5]),
            implementation=implementation,
            return_lse=True,
            return_max_logits=True,
        )

    want, want_lse, _ = run(arguments)
    o, lse, largest = run(arguments | {name: arguments[name].at[at].set(number)})
    # The queries that see the key are those from 1 on; the last one sees nothing.
    rows = [1, 2, 3, 4] if name == "key" else [2]
    assert np.isnan(o[:, rows]).all() and np.isneginf(lse[:, rows]).all()
    assert not np.isfinite(largest).any() and np.isnan(largest).any() == (case != "infinite bias")
    rest = [i for i in range(6) if i not in rows]
    np.testing.assert_allclose(o[:, rest], want[:, rest], atol=1e-6)
    np.testing.assert_allclose(lse[:, rest], want_lse[:, rest], atol=1e-6)
    assert not o[:, 5].any()


TILES = [
    pallas_flash.tuning.Tile(*tile)
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
def test_every_tile_gives_the_same_result(case, tile, split, kernel_case):
    """Also with dk and dv in one launch or two."""
    backward = dict(dk=tile, dv=tile) if split else dict(dkv=tile)
    sizes = pallas_flash.tuning.TileSizes(forward=tile, dq=tile, **backward)
    judge(case, "float32", measured(case, "float32", "interpret", config=sizes))


@cases.parametrize(names=["mask, causal, lengths"])
def test_split_heads_with_listed_tiles(case, monkeypatch, kernel_case):
    """Three programs for 6 query heads of a key head, with tiles listed for each head."""
    monkeypatch.setattr(backward_dkv, "splits_of_heads", lambda *_: 3)
    case = dataclasses.replace(case, name="6 heads", N=12, K=2)
    problem = case.problem()
    judge(case, "float32", measured(case, "float32", "interpret", problem, config=SMALL),
          problem)  # fmt: skip


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("scale", cases.default([-0.4, 0.0], [0.4, -0.4, 0.0]))
@cases.parametrize(names=["everything at once", "lengths of zero"])
def test_traced_scale_and_its_gradient(case, implementation, scale):
    qkv, (do, dlse), options = case.problem()
    truth = oracle.solve(*qkv, do, dlse, scale=scale, **options)

    def run(s, qkv, cotangents):
        def call(s):
            return pallas_flash.attention(
                *qkv, scale=s, return_lse=True, implementation=implementation, **options
            )

        results, pull = jax.vjp(call, s)
        return *results, *pull(cotangents)

    *results, dscale = oracle.compiled(run)(jnp.float32(scale), qkv, (do, dlse))
    for name, x in zip(("o", "lse"), results, strict=True):
        assert oracle.errors(x, truth, name)["l2"] <= 8 * ROUNDING["float32"] * case.S, name
    assert abs(dscale - truth.values["dscale"]) <= 8 * ROUNDING["float32"] * truth.terms["dscale"]
