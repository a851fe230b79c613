"""Few queries by the kernels for Hopper: the emulated kernel, and how its work is divided.

See mosaic_cases for the emulator, and test_mosaic_paged, whose kernel this is.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support import mosaic_emulator as emulator
from support.compiled_code import machine_code_of, shaped
from support.judge import judge
from support.lowered import attention, launches, lowered
from support.mosaic_cases import checked, on_sms, run_forward

from pallas_flash._autodiff.vjp import public_rows
from pallas_flash._backends.mosaic import decode, paged, scheduler
from pallas_flash._backends.mosaic import splits as kv_splits
from pallas_flash._backends.mosaic.forward_common import log_sum_of
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.features import FEW_QUERIES
from pallas_flash.tuning import ForwardTile, TileSizes
from scripts.maintenance.inspection import gpu_compiler


def with_few(case, T=3, **sizes):
    """The case with few queries, and keys whose splits fill all stages more than once."""
    return dataclasses.replace(
        case, **{"T": T, "S": 1100, "N": 3, "K": 1, "H": 64, "V": 64} | sizes
    )


def run(case, dtype="bfloat16", problem=None, packed=True):
    """The output and the LSE, and whether scores may be large."""
    qkv, _, options = problem or case.problem(dtype)
    call = checked(qkv, options)
    assert decode.packs(call) == packed
    with emulator.emulated(pytest.MonkeyPatch()), jax.numpy_rank_promotion("raise"):
        o, log_sum = run_forward(call)
    return (o, *public_rows(log_sum)), log_sum.m is not None


def assert_right(case, dtype="bfloat16", problem=None, **others):
    results, large = run(case, dtype, problem, **others)
    judge(case, dtype, results, problem, apart=large)


def packs(case):
    qkv, _, options = with_few(case).problem("bfloat16")
    return decode.packs(checked(qkv, options))


# Cases with one array of ids for queries and keys need as many of both.
SERVED = [
    case
    for case in map(cases.BY_NAME.get, cases.SERVED_ON_HOPPER)
    if case.name not in ("documents", "documents, causal, long", "negative scale")
]
PACKED = [case for case in SERVED if packs(case)]


@cases.parametrize(
    names=["sinks, causal, first queries see nothing", "window, moved", "soft cap"],
    others_extended=True,
    table=PACKED,
)
def test_numbers(case, kernel_case):
    """Each work tile has several splits."""
    assert_right(with_few(case))


@cases.parametrize(
    names=["everything at once"],
    others_extended=True,
    table=[case for case in SERVED if case not in PACKED],
)
def test_others_have_the_forward_for_many_queries(case, kernel_case):
    assert_right(with_few(case), packed=False)


@cases.parametrize(
    names=["lengths of zero"], more=["full", "window", "slopes, offset for each example"]
)
@pytest.mark.parametrize(("H", "V"), [(128, 128), (40, 72), (256, 192)])
def test_numbers_of_other_sizes(case, H, V, kernel_case):
    """One query, with heads in groups of two and values of their own size."""
    assert_right(with_few(case, T=1, N=4, K=2, H=H, V=V), "float16")


@cases.parametrize(names=["window, moved"], more=["causal, offset for each example", "sinks"])
@pytest.mark.parametrize(("T", "N", "K"), [(70, 3, 1), (9, 64, 1), (20, 2, 2)])
def test_numbers_without_splits(case, T, N, K, kernel_case, monkeypatch):
    """One CTA has all work tiles, and a batch element has several."""
    on_sms(monkeypatch, 1)
    assert_right(with_few(case, T=T, N=N, K=K))


def test_sink_far_above_all_scores(kernel_case):
    case = with_few(cases.BY_NAME["full"])
    problem = (*case.problem("bfloat16")[:2], {"sinks": jnp.full(case.N, 200.0)})
    assert_right(case, problem=problem)


@pytest.mark.parametrize("sms", [132, 1])
def test_low_part_of_the_output(sms, monkeypatch):
    """For a gradient: what rounding took off."""
    on_sms(monkeypatch, sms)
    qkv, _, options = with_few(cases.BY_NAME["sinks"]).problem("bfloat16")
    call = checked(qkv, options)
    with emulator.emulated(monkeypatch):
        (want, _), ((high, low), _) = (
            run_forward(dataclasses.replace(call, split_output=x)) for x in (False, True)
        )
    np.testing.assert_array_equal(high, want)
    high, low = (np.abs(np.asarray(x, np.float32)) for x in (high, low))
    assert (low <= 2.0**-8 * high).all() and np.mean(low > 0) > 0.9


def assert_hidden(case, **options):
    """NaN in all that no query sees changes no bit."""
    case = with_few(case, T=5, N=2, K=2)
    qkv, cotangents, drawn = case.problem("bfloat16")
    poisoned, _ = cases.poison(case, qkv, cotangents, options := drawn | options)
    assert all(np.isnan(np.asarray(x, np.float32)).any() for x in poisoned[1:])
    (want, _), (got, _) = (run(case, problem=(x, None, options)) for x in (qkv, poisoned))
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)


# Keys before the first one that is seen, behind the last one, and no key at all.
@cases.parametrize(
    names=["lengths of zero", "window, moved"],
    more=["causal, first queries see nothing", "prefix"],
)
def test_hidden_keys_have_no_effect(case, kernel_case):
    assert_hidden(case)


# The last queries are padding, and would see a block more.
PADDING = dict(is_causal=True, query_offset=1022, query_seq_lengths=jnp.int32([1, 2]))


def test_values_that_only_padding_would_see(kernel_case):
    assert_hidden(cases.BY_NAME["full"], **PADDING)


def with_first_keys(patch):
    """Values before the window stay as they are."""
    right = emulator.zero_rows

    def broken(ref, *ends):
        if len(ends) == 1:
            right(ref, *ends)

    patch.setitem(emulator.fake_ptx, "zero_rows", broken)


def with_last_keys(patch):
    patch.setattr(paged.PagedConsumer, "clean_values", lambda *_: None)


def with_ranges_of_tiles(patch):
    """Ranges of all queries of a work tile together, which hold keys that none of them sees."""
    right = scheduler.block_table

    def broken(mask, q, *others, **named):
        table = right(mask, Tiling(q.length, q.length) if q.block == 1 else q, *others, **named)
        return jnp.broadcast_to(table, (*table.shape[:2], q.count, 4))

    patch.setattr(scheduler, "block_table", broken)


BROKEN = {
    "values behind the last key": (with_last_keys, "lengths of zero", {}),
    "values before the first key": (with_first_keys, "window, moved", {}),
    "values that padding would see": (with_ranges_of_tiles, "full", PADDING),
}


@pytest.mark.parametrize("broken", cases.default(["values before the first key"], list(BROKEN)))
def test_hidden_keys_would_show(broken, monkeypatch):
    change, name, options = BROKEN[broken]
    change(monkeypatch)
    with pytest.raises(AssertionError):
        assert_hidden(cases.BY_NAME[name], **options)


# ------------------------------------------------------------------------------------------------
# Which kernel serves, and how it lowers.


@pytest.mark.parametrize(
    ("T", "tile", "options", "name"),
    [
        (1, None, {}, "decode"),
        (FEW_QUERIES, None, {}, "decode"),
        (FEW_QUERIES + 1, None, {}, "forward"),
        (1, ForwardTile(3, 64, 0, 2), {}, "decode"),
        (1, ForwardTile(2, 128, 1), {}, "forward"),
        (1, ForwardTile(2, 128, 0, cluster_size=2), {}, "forward"),
        (1, None, dict(bias=jnp.zeros((1, 1, 1, 513))), "forward"),
    ],
)
def test_which_kernel_serves(T, tile, options, name):
    q, k = (shaped(1, n, 300, 64, dtype=jnp.bfloat16) for n in (T, 513))
    config = None if tile is None else TileSizes(forward=tile)

    def call(q, k, v):
        return attention(q, k, v, config=config, query_offset=513 - T, **options)

    assert f"pallas_flash_{name}" in lowered(call, shapes=(q, k, k)).as_text()


def test_keys_are_not_copied():
    """Nothing but the kernel has an array as large as the keys."""
    q, k = (shaped(2, n, h, 64, dtype=jnp.bfloat16) for n, h in ((1, 8), (1000, 2)))

    def call(q, k, v, offset, lengths):
        return attention(q, k, v, query_offset=offset, key_value_seq_lengths=lengths)

    text = lowered(call, shapes=(q, k, k, shaped(2), shaped(2))).as_text()
    assert launches(text) == 1
    large = [x for x in text.splitlines() if "2x1000x2x64" in x and "func.func" not in x]
    assert all("mosaic_gpu" in x or "call @" in x or "return" in x for x in large), large


def test_vmap_computes_what_a_loop_does():
    """In one launch, that counts the examples of all instances."""
    q, k = (jax.ShapeDtypeStruct((3, 2, n, 8, 64), jnp.bfloat16) for n in (1, 700))
    lengths = jax.ShapeDtypeStruct((3, 2), jnp.int32)

    def forward(q, k, v, lengths):
        return attention(q, k, v, is_causal=False, key_value_seq_lengths=lengths)

    text = lowered(jax.vmap(forward), shapes=(q, k, k, lengths)).as_text()
    assert launches(text) == 1


@pytest.mark.parametrize("splits", cases.default([3], [1, 3]))
@pytest.mark.parametrize("instances", [1, 2])
def test_schedule_visits_what_queries_see(instances, splits):
    """Each query of each head visits all that it sees, in one split each; windows of 300 keys."""
    batch, q_len, block = 3, 70, 128
    q, k = (jnp.zeros((batch, n, h, 64), jnp.bfloat16) for n, h in ((q_len, 6), (1000, 2)))
    options = dict(is_causal=True, local_window_size=(299, 0))
    offset = jnp.int32([[-50, 0, 500], [100, 960, 2000]])[:instances]
    p = checked((q, k, k), options | dict(query_offset=offset[0]))
    mask = jax.tree.map(lambda x: offset, p.mask.within(kv=Tiling(1000, block)))
    kv, tile = Tiling(1000, block), ForwardTile(2, block, 0, 3)
    tiles = paged.tilings(p, tile)[1]
    _, *rows, last = np.asarray(
        decode.schedule(p, mask, instances * batch, kv, tiles, tile.warpgroups, splits)
    )
    assert last[0] == -1 and len(rows) == instances * batch * tiles.count * 2 * splits
    seen = np.zeros((instances * batch, 2, q_len, 8 * block), int)
    for row, w in itertools.product(np.stack(rows), range(2)):
        found = paged.RequestRows.unpack([row[i] for i in paged.RequestRows.columns(w)])
        first, own, visited = found.index + 16 * w, found.own, found.visited
        assert own.token == found.b * q_len and own.queries == q_len
        mine = np.arange(first, min(first + 16, q_len))
        for place in range(visited.start, visited.stop):
            key = found.kv_blocks.block_at(place, None) * block + np.arange(block)
            distance = key - mine[:, None] - offset.reshape(-1)[found.b]
            sees = (distance <= 0) & (distance > -300) & (key < 1000)
            assert sees.all() or not visited.full <= place < visited.tail
            assert (sees <= ((key >= own.first_key) & (key < own.stop_key))).all()
            seen[found.b, found.h // 3, mine[:, None], key] += sees
    distance = np.arange(8 * block) - np.arange(q_len)[:, None] - offset.reshape(-1, 1, 1, 1)
    want = (distance <= 0) & (distance > -300) & (np.arange(8 * block) < 1000)
    np.testing.assert_array_equal(seen, np.broadcast_to(want, seen.shape))


OPTIONS = {
    "none": {},
    "lengths": dict(key_value_seq_lengths=shaped(2)),
    "window and soft cap": dict(query_offset=shaped(2)),
    "slopes and sinks": dict.fromkeys(("alibi_slopes", "sinks"), shaped(32, dtype=jnp.float32)),
}


@pytest.mark.skipif(bool(gpu_compiler.missing()), reason=gpu_compiler.missing() or "is here")
@pytest.mark.parametrize(
    ("head_dim", "options"),
    cases.default([(128, "lengths")], list(itertools.product([64, 128, 192, 256], OPTIONS))),
)
def test_machine_code(head_dim, options):
    """Nothing spilt, and so little shared memory that a program fits."""
    q, k = (shaped(2, n, h, head_dim, dtype=jnp.bfloat16) for n, h in ((1, 32), (5000, 8)))
    arrays, named = OPTIONS[options], {}
    if options.startswith("window"):
        named = dict(is_causal=True, local_window_size=(500, 0), logits_soft_cap=30.0)

    def call(q, k, v, *values):
        return run_forward(checked((q, k, v), named | dict(zip(arrays, values, strict=True))))

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
    m, l, acc = (random.normal(size=(1, 3, 1, *rest)) for rest in ((), (), (64,)))
    l = 1 + np.abs(l)
    weights = np.exp(m - m.max(axis=1))
    total = (weights * l).sum(axis=1)
    results = (jnp.asarray(x, jnp.float32) for x in (acc, m, l))
    o, *statistics = kv_splits.combine(call, None, *results)
    want = (weights[..., None] * acc).sum(axis=1) / total[..., None]
    np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-6)
    lse = log_sum_of(statistics, large=True).lse
    np.testing.assert_allclose(lse, np.log(total) + m.max(axis=1), rtol=1e-5)
