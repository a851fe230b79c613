"""The kernels as a GPU runs them: their Triton IR, lowered for CUDA, executed with checked memory.

`ttir.evaluate` raises when an active lane of a load or a store leaves its array in any dimension,
so each evaluation here is a test of bounds as well.
"""

import dataclasses
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from support import cases, oracle, ttir
from support.judge import ROUNDING, judge
from support.lowered_triton import TILES, _attention, differentiated

import pallas_flash
from pallas_flash._backends.triton import backward_dkv, grid
from pallas_flash._backends.triton.spec import MAX_QUICK_CAP
from pallas_flash.tuning import Tile, TileSizes

# A launch for dk and one for dv.
APART = TileSizes(Tile(32, 32), dk=Tile(32, 64), dv=Tile(64, 32), dq=Tile(64, 32))

# Cases that lower to something new. test_accuracy.py runs all of them.
every_case = cases.parametrize(
    names=[
        "full, whole tiles",
        "large heads",
        "lengths of zero",
        "everything at once",
        "mask with empty tiles",
        "bias of heads",
        "positions, window, slopes, lengths",
        "score function",
        "dropout",
        "blocks and predicate",
    ],
    others_extended=True,
)


@functools.cache
def _evaluated(case, dtype="float32", tiles=TILES):
    problem = case.problem(dtype)
    if case.name == "large heads":
        tiles = None  # These would not fit in shared memory; the table's do.
    results, runs = differentiated(problem, tiles)
    of_keys = ["dkv"] if tiles == TILES else ["dk", "dv"]
    names = ["forward", "delta", *of_keys, "dq", *["dbias"] * ("bias" in problem[2])]
    # Tests select kernels by their names.
    assert [run.kernel.name for run in runs] == [f"pallas_flash_{name}" for name in names]
    return results, runs


@every_case
def test_numbers(case, kernel_case):
    judge(case, "float32", _evaluated(case)[0])


@cases.parametrize(names=["full", "everything at once"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_in_16_bits(case, dtype, kernel_case):
    judge(case, dtype, _evaluated(case, dtype)[0])


@cases.parametrize(
    names=["full, whole tiles"],
    more=[
        "full",
        "causal, more queries",
        "window narrower than a tile gap",
        "everything at once",
        "dropout",
    ],
)
def test_dk_and_dv_in_two_launches(case, kernel_case):
    results, runs = _evaluated(case, tiles=APART)
    judge(case, "float32", results)
    _assert_stored_once(runs)
    _assert_pipelined(case, runs)


@pytest.mark.parametrize("splits", cases.default([2, 4], [1, 2, 4]))
@cases.parametrize(names=["causal, whole tiles", "everything at once"], more=["all features"])
def test_dkv_with_split_heads(case, splits, monkeypatch, kernel_case):
    # Each number of splits has another B, because a call of the same shapes is traced once.
    case = dataclasses.replace(case, B=splits, T=min(case.T, 128), S=min(case.S, 128), N=8, K=2)
    monkeypatch.setattr(backward_dkv, "splits_of_heads", lambda *_: splits)
    problem = case.problem("float32")
    results, runs = differentiated(problem)
    judge(case, "float32", results, problem)
    _assert_stored_once(runs)
    [grid] = [run.kernel.grid for run in runs if run.kernel.name == "pallas_flash_dkv"]
    assert math.prod(grid) == splits * case.B * case.K * -(-case.S // TILES.dkv.block_kv)


@pytest.mark.parametrize(("heads", "dtype"), [(2, "bfloat16"), (4, "float32")])
def test_sums_of_several_programs_are_float32(heads, dtype):
    """A single program rounds its sum to the dtype of the operands."""
    q, k = (jax.ShapeDtypeStruct((1, 64, n, 32), jnp.bfloat16) for n in (heads, 2))
    gradient = jax.grad(lambda q, k, v: _attention({})(q, k, v)[0].astype(jnp.float32).sum(), 1)
    [dkv] = [x for x in ttir.lower(gradient, q, k, k) if x.name == "pallas_flash_dkv"]
    assert {x.dtype.name for x in dkv.results} == {dtype}


@pytest.mark.parametrize("heads", cases.default([2], [2, 4]))
def test_heads_side_by_side(heads, monkeypatch, kernel_case):
    """The L2 budget holds keys and values of `heads` heads, and queries of half as many groups."""
    # Each number of heads has another B, because a call of the same shapes is traced once.
    case = dataclasses.replace(
        cases.BY_NAME["causal, whole tiles"], B=heads // 2, T=128, S=128, N=8, K=4
    )
    monkeypatch.setattr(grid, "STREAMED_L2_BYTES", heads * case.S * (case.H + case.V) * 4)
    problem = case.problem("float32")
    results, runs = differentiated(problem)
    judge(case, "float32", results, problem)
    _assert_stored_once(runs)
    outer = {run.kernel.name: run.kernel.grid[1] for run in runs if "delta" not in run.kernel.name}
    of_keys, of_queries = 4 // heads, 8 // heads
    assert outer == {
        "pallas_flash_forward": of_keys,
        "pallas_flash_dkv": of_queries,
        "pallas_flash_dq": of_keys,
    }


@pytest.mark.parametrize(("options", "loops"), [({"is_causal": True}, 2), ({}, 1)])
def test_partial_tiles_have_a_loop_of_their_own(options, loops):
    q = jnp.ones((1, 64, 1, 16))
    [forward] = ttir.lower(_attention(options, TileSizes(Tile(32, 16))), q, q, q)
    assert len([loop for loop in ttir.loops(forward) if loop.dots]) == loops


@cases.parametrize(names=["everything at once", "dropout"], more=["full", "lengths of zero"])
def test_gradient_of_a_traced_scale(case, kernel_case):
    """The dq kernel has one more result for it."""
    qkv, cotangents, options = case.problem()

    def gradient(scale, cotangents):
        _, vjp = jax.vjp(lambda scale: _attention(options)(*qkv, scale=scale), scale)
        return vjp(cotangents)

    scale, runs = jnp.float32(0.4), []
    [dscale] = ttir.evaluate(gradient, scale, cotangents, runs=runs)
    truth = oracle.solve(*qkv, *cotangents, scale=scale, **options)
    assert abs(dscale - truth.values["dscale"]) <= 8 * ROUNDING["float32"] * truth.terms["dscale"]
    _assert_stored_once(runs)


def _assert_stored_once(runs):
    assert all(run.stores for run in runs) and runs
    for run in runs:
        for stores in run.stores:
            np.testing.assert_array_equal(stores, 1, err_msg=run.kernel.name)


@every_case
def test_results_are_stored_once(case):
    _assert_stored_once(_evaluated(case)[1])


@every_case
def test_streamed_rows_are_read_if_visible(case):
    """Other rows may hold NaN, and zero times NaN is NaN.

    Keys and values are streamed past query tiles, queries and do past key/value tiles. Resident
    tiles are read whole, and their hidden rows do not reach the results.
    """
    (q, k, v), (do, _), options = case.problem()
    ok = oracle.visible((case.B, case.N, case.T, case.S), **options)
    queries = ok.any(3).transpose(0, 2, 1)[..., None]
    keys = ok.any(2).reshape(case.B, case.K, -1, case.S).any(2).transpose(0, 2, 1)[..., None]
    streamed = dict.fromkeys(["forward", "dq"], (keys, {k.shape, v.shape}))
    streamed |= dict.fromkeys(["dkv", "dk", "dv"], (queries, {q.shape, do.shape}))
    others = set()
    for run in _evaluated(case)[1]:
        name = run.kernel.name.removeprefix("pallas_flash_")
        if name not in streamed:
            others.add(name)
            continue
        visible, shapes = streamed[name]
        read = [
            touched == visible
            for x, touched in zip(run.kernel.operands, run.touched, strict=True)
            if x.shape in shapes
        ]
        assert len(read) >= 2
        assert all(np.all(equal) for equal in read), name
    assert others == {"delta", *["dbias"] * ("bias" in options)}


@cases.parametrize(
    names=["lengths of zero", "everything at once", "bias of keys", "blocks and predicate"],
    more=[
        "causal, first queries see nothing",
        "window narrower than a tile gap",
        "mask with empty tiles",
        "all features",
    ],
)
def test_nothing_shows_of_hidden_rows(case, kernel_case):
    """Masked lanes hold here what a GPU gives them, not the interpreter's padding."""
    qkv, cotangents, options = case.problem()
    arrays = cases.poison(case, qkv, cotangents, options)
    poisoned, _ = differentiated((*arrays, cases.poison_bias(case, options)))
    for name, a, b in zip(oracle.names(options), _evaluated(case)[0], poisoned, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


# A tile selects and compares for these options, too.
_LIKE_MASKS = {"bias", "dropout_rate", "score_mod", "alibi_slopes"}


def _assert_pipelined(case, runs):
    _, _, options = case.problem()
    for run in runs:
        kernel = run.kernel
        loops = [loop for loop in ttir.loops(kernel) if loop.dots]
        if kernel.name == "pallas_flash_dbias" and not loops:
            continue  # It passes empty tiles by under a branch, and a pipeline has none.
        assert bool(loops) == any(op.name == "tt.dot" for op in ttir.walk(kernel.body))
        assert all(loop.pipelinable for loop in loops), kernel.name
        masking = [
            loop.count("arith.cmpi", rank=1) + loop.count("arith.select", rank=2) for loop in loops
        ]
        no_mask_at_all = case.name == "full, whole tiles"
        if _LIKE_MASKS.isdisjoint(options):
            assert masking.count(0) >= (len(loops) if no_mask_at_all else bool(loops)), kernel.name
        elif loops:
            assert min(masking) < max(masking) or kernel.name == "pallas_flash_dbias", kernel.name


@every_case
def test_loops_are_pipelined_and_full_ones_bare(case):
    _assert_pipelined(case, _evaluated(case)[1])


@pytest.mark.parametrize(
    ("tiles", "backward"), [(TILES, ["dkv", "dq"]), (APART, ["dk", "dv", "dq"])]
)
@cases.parametrize(names=["full, whole tiles"])
def test_kernels_and_launches(case, tiles, backward):
    runs = _evaluated(case, tiles=tiles)[1]
    kernels = [run.kernel for run in runs]
    names = ["forward", "delta", *backward]
    assert [kernel.name for kernel in kernels] == [f"pallas_flash_{name}" for name in names]
    for name, kernel in zip(names, kernels, strict=True):
        if name != "delta":
            tile = getattr(tiles, name)
            assert (kernel.num_warps, kernel.num_stages) == (tile.num_warps, tile.num_stages)


@pytest.mark.parametrize(
    ("shape", "dtype", "over_pairs"),
    [
        ((40, 50), "float32", True),
        ((40, 50), "bool", True),
        ((1, 50), "float32", False),
        ((40, 1), "bool", False),
    ],
)
def test_tiles_leave_room_for_pair_arrays(shape, dtype, over_pairs):
    """In float32 the table's three stages become two. Arrays of keys or of queries are small."""
    # The table's tiles are for this many rows.
    x, k = (jax.ShapeDtypeStruct((500, n, 1, 16), jnp.float32) for n in (40, 50))
    name = "mask" if dtype == "bool" else "bias"
    call = functools.partial(pallas_flash.attention, implementation="triton")
    [forward] = ttir.lower(lambda x, k, array: call(x, k, k, **{name: array}), x, k,
                           jnp.ones(shape, dtype))  # fmt: skip
    assert forward.num_stages == (2 if over_pairs else 3)


@pytest.mark.parametrize(
    ("precision", "instruction"),
    [(None, "tf32"), ("highest", "ieee"), (jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3, "tf32x3")],
)
def test_precision_reaches_every_product(precision, instruction):
    qkv, cotangents, _ = cases.BY_NAME["full"].problem()
    function = functools.partial(oracle.differentiate, _attention({"precision": precision}))
    kernels = ttir.lower(function, *qkv, *cotangents)
    used = {kernel.name: ttir.dot_precisions(kernel) for kernel in kernels}
    assert used.pop("pallas_flash_delta") == set()
    assert set(used) == {"pallas_flash_forward", "pallas_flash_dkv", "pallas_flash_dq"}
    assert all(precisions == {instruction} for precisions in used.values()), used


BEYOND = math.nextafter(MAX_QUICK_CAP, math.inf)


@pytest.mark.parametrize(
    ("dtype", "cap", "quick"),
    [
        ("bfloat16", MAX_QUICK_CAP, True),
        ("float16", MAX_QUICK_CAP, True),
        ("bfloat16", BEYOND, False),
        ("float16", BEYOND, False),
        ("float32", 1.0, False),
    ],
)
def test_quick_tanh_needs_16_bits_and_a_small_cap(dtype, cap, quick):
    qkv, cotangents, _ = cases.BY_NAME["full"].problem(dtype)
    function = functools.partial(oracle.differentiate, _attention({"logits_soft_cap": cap}))
    kernels = ttir.lower(function, *qkv, *cotangents)
    found = [kernel.name for kernel in kernels if kernel.name != "pallas_flash_delta"]
    assert len(found) == 3
    for kernel in kernels:
        if kernel.name in found:
            assembly = [op.attributes.get("asm_string", "") for op in ttir.walk(kernel.body)]
            # No other function has this instruction of the quick tanh.
            assert any("rcp.approx" in code for code in assembly) == quick, kernel.name
            assert ("tanh" in kernel.text) != quick, kernel.name


@pytest.mark.parametrize("cap", [MAX_QUICK_CAP, 2.0**24])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cap_far_above_scores_changes_nothing(dtype, cap):
    """A cap multiplies the error of tanh. The quick one would be off by 4 at the larger cap."""
    case = cases.BY_NAME["causal"]
    qkv, cotangents, options = case.problem(dtype)
    problem = qkv, cotangents, {**options, "logits_soft_cap": cap}
    results, _ = differentiated(problem)
    judge(case, dtype, results, problem)


# Each tile of 32 queries sees one of 32 keys, another one in each head.
_DIAGONAL = np.eye(10, dtype=bool)[:, np.random.default_rng(0).permutation(10)]
_BLOCKS = np.stack([_DIAGONAL, _DIAGONAL[::-1]])[None]


# For each tile of scores.
PRODUCTS = {"pallas_flash_forward": 2, "pallas_flash_dkv": 4, "pallas_flash_dq": 3}


@pytest.mark.parametrize("form", cases.default(["blocks"], ["blocks", "array", "predicate"]))
def test_work_is_proportional_to_visited_tiles(form):
    array = jnp.asarray(_BLOCKS.repeat(32, axis=2).repeat(32, axis=3))
    masks = {
        "blocks": pallas_flash.masks.BlockMask(jnp.asarray(_BLOCKS), 32, 32),
        "array": array,
        "predicate": pallas_flash.masks.BlockMask.from_mask(
            pallas_flash.masks.Predicate(lambda b, h, q, k, x: x[h, q, k], (array[0],)),
            320,
            320,
            num_heads=2,
            block_q=32,
            block_kv=32,
        ),
    }
    case = cases.Case("tenth", T=320, S=320, N=2, K=1, H=16, V=16)
    tile = Tile(32, 32)
    tiles = TileSizes(tile, dkv=tile, dq=tile)

    def products(options):
        qkv, cotangents, _ = case.problem()
        _, runs = differentiated((qkv, cotangents, options), tiles)
        return {run.kernel.name: run.dots for run in runs if run.dots}

    everything = case.B * case.N * 10 * 10
    assert products({}) == {name: n * everything for name, n in PRODUCTS.items()}
    assert products({"mask": masks[form]}) == {n: x * everything / 10 for n, x in PRODUCTS.items()}


@cases.parametrize(
    names=["mask with empty tiles", "blocks larger than tiles"],
    more=["mask", "mask of keys", "blocks smaller than tiles"],
)
def test_tiles_visited_are_those_not_empty(case):
    _, _, options = case.problem()
    ok = oracle.visible((case.B, case.N, case.T, case.S), **options)
    dots = {run.kernel.name: run.dots for run in _evaluated(case)[1] if run.dots}
    assert dots.keys() == PRODUCTS.keys()
    for name in dots:
        tile = getattr(TILES, name.removeprefix("pallas_flash_"))
        rows, columns = (range(0, n, b) for n, b in ((case.T, tile.block_q),
                                                     (case.S, tile.block_kv)))  # fmt: skip
        visited = sum(
            ok[:, :, i : i + tile.block_q, j : j + tile.block_kv].any((2, 3)).sum()
            for i in rows
            for j in columns
        )
        assert dots[name] == PRODUCTS[name] * visited, name


# Counts of a call without options: operands besides the table of tiles, and in the loop over full
# tiles reads (k, v; q, do, lse, delta; k, v) and exponentials.
PLAIN = {"forward": (4, 2, 2), "dkv": (7, 4, 1), "dq": (7, 2, 1)}
ON_TILES = {
    *("arith.addf", "arith.subf", "arith.mulf", "arith.addi", "arith.muli"),
    *("tt.load", "tt.addptr", "tt.broadcast", "tt.expand_dims", "tt.trans", "tt.reduce", "tt.dot"),
    "tt.elementwise_inline_asm",
}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_unused_options_cost_nothing(options):
    qkv, cotangents, _ = cases.BY_NAME["full, whole tiles"].problem()
    function = functools.partial(oracle.differentiate, _attention(options))
    kernels = {kernel.name: kernel for kernel in ttir.lower(function, *qkv, *cotangents)}
    assert len(kernels) == 4
    for name, (operands, reads, exponentials) in PLAIN.items():
        kernel = kernels[f"pallas_flash_{name}"]
        assert len(kernel.operands) == operands + ("is_causal" in options)
        [loop, *_] = [loop for loop in ttir.loops(kernel) if loop.pipelinable]
        assert loop.count("tt.load") == reads
        assert loop.count("tt.elementwise_inline_asm") == exponentials
        names = {op.name for op in loop.direct if any(len(shape) == 2 for shape in op.shapes)}
        assert names <= ON_TILES


def test_lowering_does_not_search_for_modules(monkeypatch):
    """MLIR would search for each value of a Triton type, which takes half the time of lowering."""
    searched = []

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            searched.append(name)

    x = jnp.ones((1, 64, 1, 16))
    ttir.lower(_attention({}), x, x, x)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    ttir.lower(_attention({"is_causal": True}), x, x, x)
    assert not searched


def test_long_arrays_are_addressed_with_64_bits():
    """The arrays have 2^32 elements, and nothing is computed."""
    x = jax.ShapeDtypeStruct((1, 2**18, 128, 128), jnp.bfloat16)

    def function(q, k, v, do):
        attention = functools.partial(pallas_flash.attention, implementation="triton")
        return jax.vjp(attention, q, k, v)[1](do)

    kernels = ttir.lower(function, x, x, x, x)
    assert len(kernels) >= 4
    for kernel in kernels:
        addresses = [op for op in ttir.walk(kernel.body) if op.name == "arith.muli"]
        assert any(op.dtypes[0] == np.int64 for op in addresses), kernel.name


def test_vmap_equals_a_loop():
    """The batched axis becomes one more axis of the grid, and one more term of each address."""
    (q, k, v), _, options = cases.BY_NAME["causal"].problem()
    attention = _attention(options)
    q = jnp.stack([q, -q, q / 2])
    one_by_one = [ttir.evaluate(attention, x, k, v) for x in q]
    batched = ttir.evaluate(jax.vmap(attention, in_axes=(0, None, None)), q, k, v)
    for result, expected in zip(batched, zip(*one_by_one, strict=True), strict=True):
        np.testing.assert_array_equal(result, jnp.stack(expected))


# ---------------------------------------------------------------------------------------------
# The evaluator itself
# ---------------------------------------------------------------------------------------------


def _call(kernel, shape, dtype=jnp.float32, programs=1):
    """Return a kernel on whole arrays, which Pallas masks in no version."""
    return pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
    )


@pytest.mark.parametrize(("axis", "shape"), [(0, (6, 4)), (1, (4, 6))])
def test_evaluator_catches_out_of_bounds(axis, shape):
    """Along the last axis only the last row leaves the allocation. The others wrap around."""

    def kernel(x_ref, o_ref):
        at = [pl.ds(0, 4), pl.ds(0, 4)]
        at[axis] = pl.ds(4 * pl.program_id(0), 4)
        plgpu.store(o_ref.at[*at], plgpu.load(x_ref.at[*at]))

    copy = _call(kernel, shape, programs=2)
    with pytest.raises(ttir.Fault, match=rf"tt\.load.* leave dimension {axis} of operand 0"):
        ttir.evaluate(copy, jnp.ones(shape))


def test_evaluator_catches_an_unmasked_store():
    def kernel(x_ref, o_ref):
        at = pl.ds(4 * pl.program_id(0), 4)
        inside = 4 * pl.program_id(0) + jnp.arange(4) < 6
        plgpu.store(o_ref.at[at], plgpu.load(x_ref.at[at], mask=inside, other=0.0))

    copy = _call(kernel, (6,), programs=2)
    with pytest.raises(ttir.Fault, match=r"tt\.store.* leave dimension 0 of result 0"):
        ttir.evaluate(copy, jnp.ones(6))


def test_evaluator_counts_accesses_and_poisons():
    def kernel(x_ref, o_ref):
        column = jnp.arange(4)
        x = plgpu.load(x_ref, mask=(column < 2)[None, :])
        plgpu.store(o_ref, x, mask=(column < 3)[None, :])

    x = jnp.arange(8.0).reshape(2, 4)
    runs = []
    copy = _call(kernel, (2, 4), programs=2)
    out = ttir.evaluate(copy, x, runs=runs)
    nan = np.nan
    np.testing.assert_array_equal(out, [[0, 1, nan, nan], [4, 5, nan, nan]])
    [run] = runs
    np.testing.assert_array_equal(run.touched[0], [[True, True, False, False]] * 2)
    np.testing.assert_array_equal(run.stores[0], [[2, 2, 2, 0]] * 2)


_OPERATIONS = {
    "integer division": lambda x: _integers(x) // 3 + _integers(x) % 3,
    "shifts": lambda x: (_integers(x) << 3) ^ (_integers(x) >> 1),
    "unsigned": lambda x: jnp.maximum(_integers(x).astype(jnp.uint32) // 3, 7) >> 2,
    "comparison of unsigned": lambda x: _integers(x).astype(jnp.uint32) > jnp.uint32(2**31),
    "halves": lambda x: (x.astype(jnp.bfloat16) * jnp.bfloat16(3)).astype(jnp.float16),
    "bits": lambda x: jax.lax.bitcast_convert_type(x, jnp.int32),
    "boolean": lambda x: (x > 0) ^ ~(x == x.T),
    "not a number": lambda x: jnp.where(jnp.isnan(jnp.sqrt(x)), jnp.abs(x), jnp.sqrt(x)),
    "functions": lambda x: jnp.exp(x) + jnp.log1p(jnp.abs(x)) * jnp.tanh(x) - jnp.floor(x),
    "sum": lambda x: jnp.broadcast_to(x.sum(axis=0), x.shape),
    "position of the largest": lambda x: jnp.broadcast_to(jnp.argmax(x, axis=1), x.shape),
    "product": lambda x: jnp.dot(x, x.T, precision="highest"),
    "branch": lambda x: jax.lax.cond(x.sum() > 0, lambda: x, lambda: -x),
    "counted loop": lambda x: jax.lax.fori_loop(0, _integers(x.sum()), lambda i, y: y + i * x, x),
    "other loop": lambda x: jax.lax.while_loop(lambda y: y.sum() < 99, lambda y: y + x * x, x),
}


def _integers(x):
    return (100 * x).astype(jnp.int32)


@pytest.mark.parametrize("name", _OPERATIONS)
def test_evaluator_equals_jax(name):
    function = _OPERATIONS[name]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(16, 16)), jnp.float32)
    expected = function(x)

    def kernel(x_ref, o_ref):
        o_ref[...] = function(x_ref[...])

    call = _call(kernel, expected.shape, expected.dtype)
    # The order of sums differs.
    np.testing.assert_allclose(
        np.asarray(ttir.evaluate(call, x), np.float64), np.asarray(expected, np.float64), 1e-5
    )


def test_evaluator_tells_pipelined_loops():
    def kernel(x_ref, o_ref):
        def step(i, y):
            x = plgpu.load(x_ref.at[pl.ds(16 * i, 16), :])
            return y + jnp.dot(x, x)

        start = jnp.zeros((16, 16), jnp.float32)
        plain = jax.lax.fori_loop(0, pl.num_programs(0), step, start)
        masked = jax.lax.fori_loop(0, 2, lambda i, y: jnp.where(y > i, step(i, y), 0), plain)
        _, other = jax.lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 2, step(c[0], c[1])), (0, masked)
        )
        o_ref[...] = other

    [kernel] = ttir.lower(_call(kernel, (16, 16), programs=2), jnp.zeros((32, 16)))
    assert kernel.grid == (2, 1, 1)
    plain, masked, other = ttir.loops(kernel)
    assert [loop.pipelinable for loop in (plain, masked, other)] == [True, True, False]
    assert [loop.count("arith.select", rank=2) for loop in (plain, masked)] == [0, 1]
    assert plain.dots == masked.dots == other.dots == 1


def test_keys_behind_all_queries_are_not_read():
    """The rows of a tile that are past the last query would see them."""
    case = dataclasses.replace(cases.BY_NAME["causal"], B=1, T=20, S=40, N=1, K=1, H=16, V=16)
    (q, k, v), _, options = case.problem()
    assert options == {"is_causal": True}
    poisoned = (x.at[:, case.T :].set(jnp.nan) for x in (k, v))
    want = ttir.evaluate(_attention(options), q, k, v)
    got = ttir.evaluate(_attention(options), q, *poisoned)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_dbias_computes_no_empty_tile():
    """Three of 2 x 2 tiles of a causal mask have visible pairs, in each of two heads."""
    case = dataclasses.replace(
        cases.BY_NAME["bias of heads"],
        B=1, T=64, S=64, N=2, K=1, H=16, V=16,
        options=lambda random, c: cases._bias("NTS")(random, c) | {"is_causal": True},
    )  # fmt: skip
    _, runs = differentiated(case.problem(), TileSizes(dq=Tile(32, 32)))
    [dbias] = [run for run in runs if run.kernel.name == "pallas_flash_dbias"]
    assert dbias.dots == 2 * 3 * case.N


def test_scale_of_zero_averages_visible_keys():
    """Zero times the minus infinity of a hidden key would be NaN."""
    q = k = jnp.ones((1, 40, 1, 16))
    v = jnp.arange(40.0)[None, :, None, None] * jnp.ones(16)
    o, _ = ttir.evaluate(_attention({"is_causal": True, "scale": 0.0}), q, k, v)
    np.testing.assert_allclose(o, v / 2, rtol=1e-5)


def test_scale_gradient_without_empty_rows():
    """A query without visible keys may hold NaN, and NaN times a dq of zero is NaN."""
    k = jnp.linspace(-1, 1, 40 * 16).reshape(1, 40, 1, 16)
    run = _attention({"is_causal": True, "query_offset": -8})

    def gradient(scale, q):
        _, pull = jax.vjp(lambda scale: run(q, k, k, scale=scale)[0], scale)
        return pull(k)

    scale = jnp.float32(0.4)
    [want] = ttir.evaluate(gradient, scale, k)
    [got] = ttir.evaluate(gradient, scale, k.at[:, :8].set(jnp.nan))
    assert want != 0
    np.testing.assert_array_equal(got, want)
