"""Decoding: the kernel that reads keys once for all heads that share them, in KV splits.

The tests run the lowered IR with checked memory, as test_lowering. Random problems include
decoding, and check its gradients.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle, ttir
from support.few_queries import RANGES, SERVED, with_few
from support.judge import judge, measured

import pallas_flash
from pallas_flash._backends.triton import decode_kernel
from pallas_flash._problem.features import FEW_QUERIES
from pallas_flash._problem.traversal import Sparsity, split
from pallas_flash.tuning import Tile, TileSizes

# 200 keys are 13 tiles, so 3 parts.
TILES = TileSizes(decode=Tile(16, 16), dkv=Tile(16, 16), dq=Tile(16, 16))


every_case = cases.parametrize(
    names=[
        "full",
        "one key/value head",
        "causal, offset for each example",
        "lengths of zero",
        "everything at once",
        "mask with empty tiles",
        "bias",
        "blocks and predicate",
    ],
    others_extended=True,
    table=SERVED,
)


def run(problem, tiles=TILES):
    """The output and the LSE, and the runs of the kernels."""
    qkv, _, options = problem
    operands, options = oracle.split(options)
    attention = functools.partial(
        pallas_flash.attention,
        return_lse=True,
        implementation="triton",
        config=tiles,
        **options,
    )
    runs = []
    results = ttir.evaluate(lambda qkv, more: attention(*qkv, **more), qkv, operands, runs=runs)
    return results, runs


@functools.cache
def evaluated(case, dtype="float32"):
    return run(case.problem(dtype))


def assert_right(case, dtype="float32"):
    judge(case, dtype, evaluated(case, dtype)[0])


@every_case
def test_decode_as_accurate_as_dense(case, kernel_case):
    assert_right(with_few(case))


@cases.parametrize(
    names=["full", "lengths of zero", "all features"],
    more=["causal, offset for each example", "documents in pairs", "mask of keys", "sinks"],
)
def test_one_query_as_accurate_as_dense(case, kernel_case):
    assert_right(with_few(case, 1))


def test_sink_far_above_scores(kernel_case):
    """exp2 of the difference would overflow."""
    case = with_few(cases.BY_NAME["full"])
    problem = (*case.problem()[:2], {"sinks": jnp.full(case.N, 200.0)})
    judge(case, "float32", run(problem)[0], problem)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@cases.parametrize(names=["full", "all features"], more=["everything at once"])
def test_16_bits_as_accurate_as_dense(case, dtype, kernel_case):
    assert_right(with_few(case), dtype)


@cases.parametrize(names=["sinks"], more=["lengths of zero", "dropout", "all features"])
def test_gradients_as_accurate_as_dense(case, kernel_case):
    """The backward takes the output and the LSE as from the other kernel."""
    case = with_few(case, 4)
    judge(case, "float32", measured(case, "float32", "interpret", config=TILES))


@cases.parametrize(names=["full"], more=["mask of keys", "all features"])
def test_more_rows_than_a_tile(case, kernel_case):
    """And as many queries as are few however many heads have them."""
    case = with_few(case, FEW_QUERIES, B=1, N=7, K=1)
    assert_right(case)
    row_tiles, parts = 7 * FEW_QUERIES // 16, 3
    assert np.prod(evaluated(case)[1][0].kernel.grid) == row_tiles * parts


@cases.parametrize(
    names=["full", "everything at once"],
    more=[
        "causal",
        "causal, first queries see nothing",
        "mask with empty tiles",
        "all features",
    ],
)
@pytest.mark.parametrize(("B", "N", "K"), [(1, 3, 1), (2, 2, 2)])
def test_more_queries_than_a_tile(case, B, N, K, kernel_case):
    """Few in all heads; each tile has keys of its own to visit."""
    case = dataclasses.replace(case, B=B, N=N, K=K, T=42, S=200)
    assert_right(case)
    assert evaluated(case)[1][0].kernel.name == "pallas_flash_decode"


@cases.parametrize(names=["bias"], more=["documents, shuffled"])
def test_padding_rows_read_inside(case, kernel_case):
    """48 of 64, with sizes that tiles divide, where no other index is checked."""
    case = dataclasses.replace(case, B=1, T=FEW_QUERIES, S=192, N=3, K=1, H=16, V=16)
    results, _ = run(case.problem(), TileSizes(decode=Tile(64, 16)))
    judge(case, "float32", results)


@every_case
def test_every_element_is_stored_once(case):
    runs = evaluated(with_few(case))[1]
    assert all(one.stores for one in runs) and runs
    for one in runs:
        for stores in one.stores:
            np.testing.assert_array_equal(stores, 1, err_msg=one.kernel.name)


@cases.parametrize(
    names=["lengths of zero", "everything at once", "bias of keys"],
    more=[
        "causal, first queries see nothing",
        "mask with empty tiles",
        "blocks and predicate",
        "all features",
    ],
)
def test_hidden_tokens_have_no_effect(case, kernel_case):
    case = with_few(case)
    qkv, cotangents, options = case.problem()
    arrays = cases.poison(case, qkv, cotangents, options)
    poisoned, _ = run((*arrays, cases.poison_bias(case, options)))
    for a, b in zip(evaluated(case)[0], poisoned, strict=True):
        np.testing.assert_array_equal(a, b)


@cases.parametrize(
    names=["full", "mask with empty tiles"], more=["lengths", "window, moved", "mask of keys"]
)
def test_shared_keys_are_multiplied_once(case):
    """Two products for each tile that any query of any of these heads sees."""
    case = with_few(case)
    _, _, options = case.problem()
    ok = oracle.visible((case.B, case.N, case.T, case.S), **options)
    ok = ok.reshape(case.B, case.K, -1, case.S).any(2)
    seen = sum(ok[:, :, j : j + 16].any(2).sum() for j in range(0, case.S, 16))
    attend, join = evaluated(case)[1]
    assert (attend.dots, join.dots) == (2 * seen, 0)
    assert attend.kernel.name == "pallas_flash_decode"


# (keys, batch size, key/value heads, KV splits): all programs fit into one wave if possible, else
# they are many; no split is too small.
KV_SPLITS = [
    (513, 1, 1, 2),
    (2**17, 1, 8, 32),
    (2**17, 16, 8, 2),
    (2**17, 17, 8, 1),
    (2**17, 32, 8, 1),
    (2**17, 33, 8, 8),
    (4096, 64, 8, 4),
    (1024, 64, 8, 4),
    (1024, 512, 8, 1),
]


@pytest.mark.parametrize(("S", "B", "K", "parts"), KV_SPLITS)
def test_number_of_kv_splits(S, B, K, parts):
    q, k = (jax.ShapeDtypeStruct((B, n, h, 128), jnp.bfloat16) for n, h in ((1, 4 * K), (S, K)))
    attention = functools.partial(pallas_flash.attention, implementation="triton")
    kernel, join = ttir.lower(attention, q, k, k)
    assert np.prod(kernel.grid) == parts * K * B
    assert np.prod(join.grid) == 4 * K * B


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_kv_splits_are_even_and_complete(parts):
    for start, full_start, full_stop, stop in RANGES:
        shares = [
            tuple(map(int, split((start, full_start, full_stop, stop), i, parts, Sparsity.RANGES)))
            for i in range(parts)
        ]
        full = [t for _, a, b, _ in shares for t in range(a, b)]
        assert full == list(range(full_start, full_stop))
        assert [t for a, _, _, b in shares for t in range(a, b)] == list(range(start, stop))
        sizes = {b - a for a, _, _, b in shares}
        assert max(sizes) - min(sizes) <= 1
        assert all(a <= b <= c <= d for a, b, c, d in shares)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_kv_splits_of_a_list(parts):
    tiles = [7, 3, 9, 0, 4]
    for count in range(6):
        for full in range(count + 1):
            found = {True: [], False: []}
            for i in range(parts):
                n_full, n, tile_at = split(
                    (full, count, tiles.__getitem__), i, parts, Sparsity.LISTS
                )
                for t in range(int(n)):
                    found[bool(t < n_full)].append(tile_at(int(t)))
            assert found == {True: tiles[:full], False: tiles[full:count]}


def kernel_of(T, tiles, S=513, N=64):
    q, k = (jax.ShapeDtypeStruct((1, n, N, 64), jnp.bfloat16) for n in (T, S))
    attention = functools.partial(pallas_flash.attention, implementation="triton", config=tiles)
    return ttir.lower(attention, q, k, k)[0].name.removeprefix("pallas_flash_")


@pytest.mark.parametrize(
    ("asked", "few", "many"),
    [
        (None, "decode", "forward"),
        (TileSizes(dq=Tile(16, 16)), "decode", "forward"),
        (TileSizes(decode=Tile(16, 32)), "decode", "forward"),
        (TileSizes(forward=Tile(16, 32)), "forward", "forward"),
        (TileSizes(forward=Tile(16, 32), decode=Tile(16, 16)), "decode", "forward"),
    ],
)
def test_decode_kernel_is_chosen(asked, few, many):
    assert [kernel_of(T, asked) for T in (1, FEW_QUERIES, FEW_QUERIES + 1)] == [few, few, many]


@pytest.mark.parametrize(
    ("T", "sizes", "asked", "kernel"),
    [
        (128, dict(N=4), None, "decode"),
        (129, dict(N=4), None, "forward"),
        (1, dict(S=512), None, "forward"),
        (1, dict(S=512), TileSizes(decode=Tile(16, 16)), "decode"),
    ],
    ids=["queries-of-all-heads", "too-many", "short-keys", "short-keys-asked-for"],
)
def test_decode_kernel_by_sizes(T, sizes, asked, kernel):
    assert kernel_of(T, asked, **sizes) == kernel


def test_vmap_equals_loop():
    (q, k, v), _, options = with_few(cases.BY_NAME["lengths"]).problem()
    attention = functools.partial(
        pallas_flash.attention, implementation="triton", config=TILES, **options
    )
    q = jnp.stack([q, -q])
    one_by_one = [ttir.evaluate(attention, x, k, v) for x in q]
    batched = ttir.evaluate(jax.vmap(attention, in_axes=(0, None, None)), q, k, v)
    np.testing.assert_array_equal(batched, np.stack(one_by_one))


def test_decode_in_x64_mode():
    case = with_few(cases.BY_NAME["everything at once"])
    (expected, _), _ = evaluated(case)
    with jax.enable_x64(True):
        (result, lse), _ = run(case.problem())
    assert lse.dtype == jnp.float32
    np.testing.assert_array_equal(result, expected)


def test_many_splits_combine_in_several_steps(monkeypatch, kernel_case):
    monkeypatch.setattr(decode_kernel, "MIN_TILES_PER_SPLIT", 1)
    case = with_few(cases.BY_NAME["sinks"], 2)
    case = dataclasses.replace(case, S=16 * 2 * decode_kernel.SPLITS_PER_STEP + 5)
    assert_right(case)
    parts = np.prod(evaluated(case)[1][0].kernel.grid) / (case.B * case.K)
    assert parts == 2 * decode_kernel.SPLITS_PER_STEP + 1
