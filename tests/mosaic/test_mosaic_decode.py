"""Few queries by the kernels for Hopper: the emulated kernel, and how its work is divided.

See mosaic_cases for the emulator.
"""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import broken_kernels, cases
from support import mosaic_emulator as emulator
from support.compiled_code import machine_code_of, shaped
from support.few_queries import RANGES
from support.judge import judge
from support.lowered import attention, launches, lowered
from support.mosaic_cases import checked, run_forward

from pallas_flash._autodiff.vjp import public_rows
from pallas_flash._backends.mosaic import decode_kernel, scheduler
from pallas_flash._backends.mosaic.decode_kernel import default_tile
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.features import FEW_QUERIES, features_of
from pallas_flash._problem.traversal import edges_first
from scripts.maintenance.inspection import gpu_compiler


def with_few(case, T=3, **sizes):
    """The case with few queries and so many keys that their parts fill all slots and begin anew."""
    return dataclasses.replace(case, **{"T": T, "S": 700, "N": 3, "K": 1, "H": 64, "V": 64} | sizes)


def run(case, dtype="bfloat16", problem=None):
    """The output and the LSE, and whether scores may be large."""
    qkv, _, options = problem or case.problem(dtype)
    with emulator.emulated(pytest.MonkeyPatch()):
        o, log_sum = run_forward(checked(qkv, options))
    return (o, *public_rows(log_sum)), log_sum.m is not None


def assert_right(case, dtype="bfloat16", problem=None):
    results, large = run(case, dtype, problem)
    judge(case, dtype, results, problem, apart=large)


# Cases with one array of ids for queries and keys need as many of both.
SERVED = [
    case
    for case in map(cases.BY_NAME.get, cases.SERVED_ON_HOPPER)
    if case.name not in ("documents", "documents, causal, long", "negative scale")
]


@pytest.fixture
def one_program(monkeypatch):
    """All items in one program, so that its slots are used again and parts follow each other."""
    monkeypatch.setattr(scheduler, "NUM_SMS", 1)


@cases.parametrize(
    names=["everything at once", "mask with empty tiles", "sinks"],
    others_extended=True,
    table=SERVED,
)
def test_numbers(case, kernel_case):
    assert_right(with_few(case))


@cases.parametrize(names=["lengths of zero"], more=["full", "bias", "all features"])
@pytest.mark.parametrize(("H", "V"), [(128, 128), (40, 72), (256, 192)])
def test_numbers_of_other_sizes(case, H, V, kernel_case):
    """One query, with heads in groups of two and values of their own size."""
    assert_right(with_few(case, T=1, N=4, K=2, H=H, V=V), "float16")


@cases.parametrize(names=["full"], more=["everything at once", "mask with empty tiles"])
def test_stages_are_used_again(case, one_program, kernel_case):
    assert_right(with_few(case, S=1500, N=2, K=2))


@cases.parametrize(names=["causal"], more=["mask with empty tiles", "all features"])
def test_more_rows_than_a_tile(case, kernel_case):
    """And more queries than few, of all heads."""
    assert_right(with_few(case, T=70, S=600, B=1, N=3))


def test_sink_far_above_all_scores(kernel_case):
    case = with_few(cases.BY_NAME["full"])
    problem = (*case.problem("bfloat16")[:2], {"sinks": jnp.full(case.N, 200.0)})
    assert_right(case, problem=problem)


@cases.parametrize(
    names=["lengths of zero"], more=["everything at once", "mask with empty tiles", "mask of keys"]
)
def test_hidden_keys_have_no_effect(case, kernel_case):
    case = with_few(case, N=2, K=2)
    qkv, cotangents, options = case.problem("bfloat16")
    poisoned, _ = cases.poison(case, qkv, cotangents, options)
    assert all(np.isnan(np.asarray(x, np.float32)).any() for x in poisoned[1:])
    (want, _), (got, _) = (run(case, problem=(x, None, options)) for x in (qkv, poisoned))
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)


def with_parts_overlapping(patch):
    cut = decode_kernel.split_entries

    def overlapping(entries, parts, listed):
        cut_entries = np.array(cut(entries, parts, listed))
        cut_entries[..., 1:, 0] -= 1
        return cut_entries

    patch.setattr(decode_kernel, "split_entries", overlapping)
    # One program alone would not cut anything.
    patch.setattr(decode_kernel, "num_splits", lambda *_, **__: 2)


def with_heads_in_another_order(patch):
    place = decode_kernel.heads_and_positions

    def moved(kv_head, first_row, *others):
        return place(kv_head, first_row + 1, *others)

    patch.setattr(decode_kernel, "heads_and_positions", moved)


BROKEN = {
    "no wait for keys": (broken_kernels.without_waiting_at({"k_full"}), "full"),
    "no wait for values": (broken_kernels.without_waiting_at({"v_full"}), "full"),
    "no wait for queries": (broken_kernels.without_waiting_at({"q_full"}), "full"),
    "no wait for a free slot": (broken_kernels.without_waiting_at({"v_empty"}), "full"),
    "an arrival too many": (broken_kernels.with_arrivals("k_empty", 1), "full"),
    "an arrival too few": (broken_kernels.with_arrivals("q_empty", -1), "full"),
    "a mask moved by one": (broken_kernels.with_mask_moved, "causal, aligned at the end"),
    "parts with a tile in common": (with_parts_overlapping, "full"),
    "rows moved by one": (with_heads_in_another_order, "causal, aligned at the end"),
    "old sums keep their scale": (broken_kernels.without_rescaling, "full"),
}


@pytest.mark.parametrize(
    "broken", cases.default(["no wait for values", "rows moved by one"], list(BROKEN))
)
def test_emulator_finds_a_broken_kernel(broken, one_program, monkeypatch):
    change, name = BROKEN[broken]
    monkeypatch.setattr(emulator, "TIMEOUT", 1.0)
    change(monkeypatch)
    case = with_few(cases.BY_NAME[name], S=1500, N=2, K=2)
    options = dict(is_causal=True, query_offset=case.S - case.T) if "causal" in name else {}
    problem = *case.problem("bfloat16")[:2], options
    with pytest.raises((AssertionError, emulator.EmulationError)):
        assert_right(case, problem=problem)


# ------------------------------------------------------------------------------------------------
# How the work is divided.


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("xp", [np, jnp], ids=["known", "traced"])
def test_splits_are_even_and_cover_all_blocks(parts, xp):
    entries = xp.asarray(RANGES, np.int32)[None, None]
    cut = decode_kernel.split_entries(entries, parts, False)
    assert type(cut) is type(entries)
    cut = np.asarray(cut).reshape(len(RANGES), parts, 4)
    for (start, full_start, full_stop, stop), mine in zip(RANGES, cut, strict=True):
        found = collections.Counter()
        for entry in mine.tolist():
            edges, count, at = edges_first(*entry)
            for i in range(count):
                found[int(at(i)), i < edges] += 1
        full = range(full_start, full_stop)
        assert found == collections.Counter((t, t not in full) for t in range(start, stop))
        sizes = mine[:, 3] - mine[:, 0]
        assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_splits_of_scattered_blocks(parts):
    lists = [(full, count) for count in range(6) for full in range(count + 1)]
    tiles = np.array([7, 3, 9, 0, 4], np.int32)
    table = jnp.asarray([[*x, *tiles] for x in lists], jnp.int32)[None, None]
    entries = decode_kernel.row_entries(table, True)
    cut = np.asarray(decode_kernel.split_entries(entries, parts, True))
    cut = cut.reshape(len(lists), parts, 4)
    table_ref = emulator.Device(np.asarray(table[0, 0]))
    with emulator.emulated(pytest.MonkeyPatch()):
        for (full, count), mine in zip(lists, cut, strict=True):
            found = []
            for entry in mine:
                each = decode_kernel.partial_first(entry, table_ref)
                found += [(int(each.block_at(i)), i < each.partial) for i in range(int(each.count))]
            want = [(t, i >= full) for i, t in enumerate(tiles.tolist()[:count])]
            assert sorted(found) == sorted(want)


@pytest.mark.parametrize(
    ("batch", "heads", "parts", "shared"),
    [(2, 3, 5, (1, 1)), (4, 8, 40, (4, 1)), (1, 8, 1, (1, 8)), (3, 44, 2, (3, 44))],
)
def test_each_split_has_a_cta(batch, heads, parts, shared):
    entries = np.arange(np.prod(shared) * parts * 4, dtype=np.int32).reshape(*shared, parts, 4)
    lists = decode_kernel.split_schedule(entries, batch, heads)
    items = [item for row in lists.tolist() for item in row[1 : 1 + row[0][0]]]
    found = {tuple(item[:3]): item[3:] for item in items}
    assert len(found) == len(items)
    assert found.keys() == set(itertools.product(range(batch), range(heads), range(parts)))
    entries = np.broadcast_to(entries, (batch, heads, parts, 4))
    assert all(entry == entries[place].tolist() for place, entry in found.items())
    assert np.ptp(lists[:, 0, 0]) <= 1
    np.testing.assert_array_equal(
        lists, decode_kernel.split_schedule(jnp.asarray(entries), batch, heads)
    )


# (keys, examples, key/value heads, queries, parts): where keys are known all cores are done
# together, nearly; else each has parts of every example; and no part is too small.
PARTS = [
    (513, 1, 1, 1, 2),
    (2**17, 1, 8, 1, 33),
    (2**17, 64, 8, 1, 9),
    (4096, 8, 8, 1, 2),
    (4096, 64, 8, 1, 1),
    (2**15, 1, 1, 16, 128),
]


@pytest.mark.parametrize(("S", "B", "K", "T", "parts"), PARTS)
def test_splits(S, B, K, T, parts):
    def number(q, k, v, known):
        call = checked((q, k, v), {})
        tile = default_tile(features_of(call))
        return decode_kernel.num_splits(call, B, Tiling(S, tile.block_kv), tile, known=known)

    q, k = (jax.ShapeDtypeStruct((B, n, h, 128), jnp.bfloat16) for n, h in ((T, 4 * K), (S, K)))
    found = {}
    for known in (True, False):
        jax.eval_shape(
            lambda *qkv, known=known: found.update({known: number(*qkv, known)}), q, k, k
        )
    assert found[True] == parts
    assert found[False] * K >= min(
        scheduler.NUM_SMS, S // 64 // decode_kernel.MIN_BLOCKS_OF_A_SPLIT * K
    )


@pytest.mark.parametrize("T", [1, FEW_QUERIES, FEW_QUERIES + 1])
def test_which_kernel_serves(T):
    q, k = (jax.ShapeDtypeStruct((1, n, 300, 64), jnp.bfloat16) for n in (T, 513))
    name = "pallas_flash_decode" if T <= FEW_QUERIES else "pallas_flash_forward"
    assert name in lowered(attention, shapes=(q, k, k)).as_text()


def test_vmap_computes_what_a_loop_does():
    """In one launch, that counts the examples of all instances."""
    q, k = (jax.ShapeDtypeStruct((3, 2, n, 8, 64), jnp.bfloat16) for n in (1, 700))
    lengths = jax.ShapeDtypeStruct((3, 2), jnp.int32)

    def forward(q, k, v, lengths):
        return attention(q, k, v, is_causal=False, key_value_seq_lengths=lengths)

    text = lowered(jax.vmap(forward), shapes=(q, k, k, lengths)).as_text()
    assert launches(text) == 1


@pytest.mark.skipif(bool(gpu_compiler.missing()), reason=gpu_compiler.missing() or "is here")
@pytest.mark.parametrize(
    ("head_dim", "options"),
    cases.default(
        [(128, "lengths")],
        list(itertools.product([64, 128, 192, 256], ["none", "lengths", "mask array", "bias"])),
    ),
)
def test_machine_code(head_dim, options):
    """Nothing spilt, and so little shared memory that a program fits."""
    q, k = (shaped(2, n, h, head_dim, dtype=jnp.bfloat16) for n, h in ((1, 32), (5000, 8)))
    arrays = {
        "none": {},
        "lengths": dict(key_value_seq_lengths=shaped(2)),
        "mask array": dict(mask=shaped(2, 1, 1, 5000, dtype=jnp.bool_)),
        "bias": dict(bias=shaped(1, 32, 1, 5000, dtype=jnp.float32)),
    }[options]

    def call(q, k, v, *values):
        return run_forward(checked((q, k, v), dict(zip(arrays, values, strict=True))))

    [(name, registers, stack, loops)] = machine_code_of(call, q, k, k, *arrays.values())
    assert "pallas_flash_decode" in name
    assert registers * 128 * 3 <= 65536
    assert stack == 0
    for loop in loops:
        assert loop.spills == 0, loop.order


def test_splits_combine_large_scores():
    """The maximum of each split is in base e there, and decides the weight of the split."""
    random = np.random.default_rng(0)
    q, k, v = (jnp.ones((1, n, 1, 64), jnp.float32) for n in (1, 256, 256))
    call = checked((q, k, v), {"bias": jnp.zeros((1, 1, 1, 256))})
    assert call.large
    m, l, acc = (random.normal(size=(1, 3, 1, 1, *rest)) for rest in ((), (), (64,)))
    l = 1 + np.abs(l)
    weights = np.exp(m - m.max(axis=1))
    total = (weights * l).sum(axis=1)
    o, log_sum = decode_kernel.combine(call, *(jnp.asarray(x, jnp.float32) for x in (acc, m, l)))
    want = (weights[..., None] * acc).sum(axis=1) / total[..., None]
    np.testing.assert_allclose(o[0, 0, 0], want[0, 0, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        public_rows(log_sum)[0][0, 0, 0], (np.log(total) + m.max(axis=1))[0, 0, 0], rtol=1e-5
    )
