"""The kernels for Hopper, emulated: what each program, and each warpgroup of it, computes."""

import dataclasses
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support import mosaic_emulator as emulator
from support.judge import judge
from support.mosaic_cases import (
    LONG,
    LONG_CAUSAL,
    MANY_KEYS,
    checked,
    documents,
    emulated,
    in_order,
    judge_both,
    on_sms,
    run_forward,
    with_heads,
)

from pallas_flash._backends.mosaic import (
    backward_common,
    backward_splits,
    common,
    forward_common,
    forward_kernel,
    scheduler,
)
from pallas_flash._backends.mosaic.forward_tiles import default_tile
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.features import features_of
from pallas_flash.masks import BlockMask, Predicate
from pallas_flash.tuning import ForwardTile, TileSizes
from scripts.benchmarks import results
from scripts.maintenance import make_tables


@in_order
def test_heads_of_a_group_in_one_cta(monkeypatch, in_order, kernel_case):
    """As where there are many programs: these have a head each."""
    monkeypatch.setattr(backward_splits, "num_splits", lambda *_: 1)
    judge(LONG_CAUSAL, "bfloat16", emulated(LONG_CAUSAL.problem("bfloat16"), in_order))


@in_order
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_heads_that_do_not_fill_the_grid(kv_heads, monkeypatch, in_order, kernel_case):
    """Three key/value heads, or shares of one, of which two have their programs side by side."""
    monkeypatch.setattr(backward_common, "MAX_NEIGHBOURS", 2)
    case = dataclasses.replace(LONG_CAUSAL, T=150, S=150, N=3, K=kv_heads)
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order))


@in_order
def test_unequal_splits_of_heads(monkeypatch, in_order, kernel_case):
    """Two groups of three heads have splits of two and of one, whose sums stay apart in order."""
    monkeypatch.setattr(backward_splits, "num_splits", lambda *_: 2)
    case = dataclasses.replace(LONG_CAUSAL, T=150, S=150, N=6, K=2)
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order))


CAUSAL, WINDOW = dict(is_causal=True), dict(is_causal=True, local_window_size=(1023, 0))


@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "options", "in_order", "shares"),
    [
        (4, 4096, 16, 16, CAUSAL, False, 1),  # Nothing to share.
        (2, 2**13, 64, 8, CAUSAL, False, 8),  # A head a program, or so many that
        (4, 4096, 64, 8, CAUSAL, False, 4),  # they have 8192 queries,
        (8, 2048, 64, 8, CAUSAL, False, 2),
        (8, 2048, 71, 1, CAUSAL, False, 18),
        (1, 4096, 64, 8, CAUSAL, False, 8),  # or fewer, so that none is long the last.
        (1, 2**17, 64, 8, CAUSAL, False, 8),
        (1, 2**17, 64, 8, CAUSAL, True, 2),  # Whose sums take 2 GiB.
        (1, 2048, 32, 8, WINDOW, False, 1),  # One wave of 128 programs.
        (1, 4096, 32, 8, WINDOW, False, 1),
        (1, 1024, 64, 8, {}, False, 2),  # 64 CTAs for 132 SMs,
        (1, 2048, 64, 8, {}, False, 1),  # 128,
        (1, 2112, 64, 8, {}, False, 8),  # 136,
        (4, 4352, 64, 8, {}, False, 4),  # and 1088, which do not fill their last wave.
        (1, 64, 32, 8, {}, False, 1),  # Not worth sums.
        (1, 1024, 8, 8, CAUSAL, False, 2),  # The queries of a head, for 64 programs,
        (1, 2048, 2, 2, {}, False, 4),  # 32,
        (1, 1024, 4, 4, {}, False, 4),  # or so,
        (1, 1024, 9, 9, {}, False, 1),  # but not for 72,
        (1, 512, 16, 16, {}, False, 1),  # nor of so few,
        (1, 2048, 4, 4, dict(local_window_size=(256, 0)), False, 1),  # or that see so few;
        (1, 1024, 8, 8, CAUSAL, True, 1),  # nor where sums have an order.
    ],
)
def test_splits_of_heads_and_queries(batch, length, heads, kv_heads, options, in_order, shares):
    found = []

    def call(q, k):
        tiles = Tiling(length, 128)
        p = checked((q, k, k), options)
        steps = backward_splits.Steps.from_problem(p, tiles, tiles)
        found.append(backward_splits.num_splits(p, batch, steps, tiles, in_order))

    shapes = ((batch, length, n, 128) for n in (heads, kv_heads))
    jax.eval_shape(call, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    assert found == [shares]


def test_query_splits_where_they_were_faster():
    """The number of programs of a key tile costs 3 % of the fastest one's time at most."""
    calls = {}
    for r in make_tables.records("h200-shared-queries"):
        if programs := r["config"].get("programs_of_a_key_tile"):
            call = r["B"], r["T"], r["N"], r["D"], r["causal"]
            calls.setdefault(call, {})[programs] = results.time(r)
    assert calls
    for (*shape, causal), ms in calls.items():
        q = jnp.zeros(shape, jnp.bfloat16)
        p = checked((q, q, q), dict(is_causal=causal))
        q, kv = Tiling(shape[1], 64), Tiling(shape[1], 128)
        steps = backward_splits.Steps.from_problem(p, q, kv)
        programs = backward_splits.num_splits(p, p.batch, steps, kv, False)
        assert ms[programs] <= 1.03 * min(ms.values()), (shape, causal)


@pytest.mark.parametrize(("parts", "head_dim"), cases.default([(3, 160)], [(2, 64), (3, 160)]))
@cases.parametrize(
    names=["everything at once"],
    more=[
        "mask with empty tiles",
        "lengths of zero",
        "full",
        "causal, first queries see nothing",
        "one key/value head",
        "dropout",
    ],
)
def test_query_splits(case, parts, head_dim, monkeypatch, kernel_case):
    """More programs than some tiles of keys have tiles of queries."""
    monkeypatch.setattr(backward_splits, "num_splits", lambda p, *_: parts * p.groups)
    case = with_heads(case, head_dim)
    judge(case, "bfloat16", emulated(case.problem("bfloat16")))


def test_query_splits_of_scattered_blocks(monkeypatch, kernel_case):
    """A program whose tiles are not the first ones of a list knows which need the mask."""
    monkeypatch.setattr(backward_splits, "num_splits", lambda *_: 3)
    # Two documents, as an array.
    document = jnp.arange(600) // 300
    options = dict(mask=document[:, None] == document)
    case = with_heads(LONG, 160, T=600, S=600, N=1)
    case = dataclasses.replace(case, options=lambda *_: options)
    judge(case, "bfloat16", emulated(case.problem("bfloat16")))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_numbers_of_ctas_with_many_work_tiles(head_dim, causal, monkeypatch, kernel_case):
    """On a GPU with two cores: a warpgroup has every part of a tile in turn."""
    on_sms(monkeypatch, 2)
    case = with_heads(LONG_CAUSAL if causal else MANY_KEYS, head_dim, T=601)
    if causal:
        judge_both(case, in_order=False)
    else:
        judge(case, "bfloat16", emulated(case.problem("bfloat16")))


@pytest.mark.parametrize(
    ("T", "causal", "head_dim", "cores"),
    cases.default(
        chosen := [(601, False, 128, 2), (600, True, 80, 4)],
        [*chosen, (512, False, 64, 132), (700, True, 128, 2), (129, False, 256, 132)],
    ),
)
def test_numbers_of_clusters(T, causal, head_dim, cores, monkeypatch, kernel_case):
    """One of the last pair may have nothing to do; the first of a causal pair sees fewer keys."""
    on_sms(monkeypatch, cores)
    copy, copies = emulator.copy_gmem_to_smem, set()

    def spied(source, destination, barrier, collective_axes=None):
        copies.add((len(destination.array), collective_axes))
        copy(source, destination, barrier, collective_axes)

    monkeypatch.setattr(emulator.plgpu, "copy_gmem_to_smem", spied)
    case = with_heads(LONG_CAUSAL if causal else MANY_KEYS, head_dim, T=T, S=600)
    sizes = TileSizes(ForwardTile(block_kv=96, cluster_size=2))
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), False, sizes))
    assert {axes for rows, axes in copies if rows == 96} == {"rank"}


@pytest.mark.parametrize(
    ("sizes", "options", "programs"),
    [
        ((4096, 4096, 128), {}, 2),
        ((4096, 4096, 128), dict(is_causal=True), 2),
        ((4096, 4096, 128), dict(is_causal=True, logits_soft_cap=30.0), 1),
        ((4096, 4096, 128), dict(local_window_size=(100, 0)), 1),
        ((4096, 4096, 128), dict(is_causal=True, query_offset=jnp.int32(3)), 1),
        ((4096, 4096, 64), {}, 1),  # Three warpgroups.
        ((4096, 4096, 256), {}, 2),
        ((2048, 2048, 128), {}, 1),
        ((4096, 2048, 128), {}, 1),
        ((8192, 512, 128), {}, 1),
    ],
)
def test_clusters_where_they_were_faster(sizes, options, programs):
    T, S, H = sizes
    q, k = (jnp.zeros((1, n, 32, H), jnp.bfloat16) for n in (T, S))
    assert default_tile(features_of(checked((q, k, k), options))).cluster_size == programs


def test_block_mask_with_positions_has_its_tile():
    mask = BlockMask(jnp.ones((1, 1, 8, 8), bool), 128, 128)
    q = jnp.zeros((1, 1024, 16, 64), jnp.bfloat16)
    positions = jnp.arange(1024, dtype=jnp.int32)[None]
    options = dict(
        mask=mask, is_causal=True, query_positions=positions, key_value_positions=positions
    )
    assert features_of(checked((q, q, q), options)).has_block_mask


@pytest.mark.parametrize(
    ("length", "heads", "options", "programs"),
    [
        (4096, 4, {}, 2),
        (4096, 8, dict(is_causal=True), 1),
        (4096, 9, dict(is_causal=True), 2),
    ],
)
def test_no_clusters_for_few_rows(length, heads, options, programs):
    q = jnp.zeros((1, length, heads, 128), jnp.bfloat16)
    assert default_tile(features_of(checked((q, q, q), options))).cluster_size == programs


@pytest.mark.parametrize(
    ("length", "heads", "options", "tile"),
    [
        # Items of 128 queries for as many programs as there are cores, or fewer.
        (1024, 16, CAUSAL, (2, 128)),
        (2048, 8, CAUSAL, (2, 128)),
        (1024, 17, CAUSAL, (3, 128)),
        (1024, 16, CAUSAL | dict(logits_soft_cap=30.0), (2, 128)),
        (1024, 17, CAUSAL | dict(logits_soft_cap=30.0), (3, 128)),
        (1024, 16, CAUSAL | dict(alibi_slopes=jnp.ones(16)), (2, 128)),
        (1024, 17, CAUSAL | dict(alibi_slopes=jnp.ones(17)), (3, 96)),
        (1024, 16, CAUSAL | dict(segment_ids=jnp.zeros((1, 1024), jnp.int32)), (3, 96)),
        # Without a mask, by the CTA that has most queries.
        (1024, 16, {}, (2, 128)),  # 128, not 192 or 256.
        (1024, 22, {}, (3, 128)),  # 192, not 256.
        (1024, 32, {}, (4, 64)),  # 256, not 384.
        (2048, 32, {}, (4, 64)),  # 512, not 576.
        (2048, 40, {}, (3, 128)),  # 768, not 768.
        # More keys: 1024 and not 1152 are no reason for four, but 256 and not 384 for two.
        (4096, 32, {}, (3, 128)),
        (4096, 8, {}, (2, 128)),
        (1024, 32, CAUSAL, (3, 128)),
        (512, 96, CAUSAL, (3, 128)),
        (128, 200, {}, (3, 128)),  # One block of keys.
        (512, 512, {}, (4, 64)),  # 2048, not 2304.
        (512, 512, CAUSAL, (4, 64)),
        (512, 512, dict(logits_soft_cap=30.0), (3, 128)),
        (512, 512, dict(query_seq_lengths=jnp.int32([500])), (4, 64)),
        (2048, 32, dict(query_seq_lengths=jnp.int32([500])), (3, 128)),
    ],
)
def test_tiles_of_few_queries_at_64(length, heads, options, tile):
    q = jnp.zeros((1, length, heads, 64), jnp.bfloat16)
    found = default_tile(features_of(checked((q, q, q), options)))
    assert (found.warpgroups, found.block_kv) == tile


@pytest.mark.parametrize(
    ("length", "heads", "options", "tile"),
    [
        (512, 132, CAUSAL, (3, 64)),
        (512, 48, CAUSAL, (3, 64)),
        (256, 352, CAUSAL, (2, 64)),  # 768 queries of a CTA, not 1152.
        (513, 132, CAUSAL, (2, 128)),
        (512, 132, {}, (2, 128)),
        (512, 132, CAUSAL | dict(logits_soft_cap=30.0), (2, 128)),
        (512, 132, CAUSAL | dict(query_offset=jnp.int32(3)), (2, 128)),
        (512, 48, dict(key_value_seq_lengths=jnp.int32([500])), (3, 64)),
        (513, 48, dict(key_value_seq_lengths=jnp.int32([500])), (2, 128)),
    ],
)
@pytest.mark.parametrize("head_dim", [80, 128])
def test_tiles_that_hide_some_of_few_keys(length, heads, options, tile, head_dim):
    q = jnp.zeros((1, length, heads, head_dim), jnp.bfloat16)
    found = default_tile(features_of(checked((q, q, q), options)))
    assert (found.warpgroups, found.block_kv) == tile


def test_short_causal_low_occupancy_wide_tiles():
    """As longer ones: each program has one item."""
    q = jnp.zeros((1, 512, 32, 128), jnp.bfloat16)
    found = default_tile(features_of(checked((q, q, q), CAUSAL)))
    assert (found.warpgroups, found.block_kv) == (2, 128)


@pytest.mark.parametrize("head_dim", [48, 64, 128, 256])
def test_tiles_are_no_larger_than_blocks(head_dim):
    """Blocks have the usual size of a block mask: full tiles need no mask."""
    q = jnp.zeros((1, 512, 1, head_dim), jnp.bfloat16)
    mask = BlockMask(jnp.ones((1, 1, 4, 4), bool), 128, 128)
    tile = default_tile(features_of(checked((q, q, q), dict(mask=mask))))
    assert 128 % (64 * tile.warpgroups) == 128 % tile.block_kv == 0


def end_of_the_last(lengths, programs):
    """When the last program is done, if who is free takes the next item."""
    free = [0.0] * programs
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + length + 1.5)
    return max(free)


@pytest.mark.parametrize(
    ("batch", "heads", "side", "tiles", "own_heads", "listed", "late"),
    [
        *((2, 3, 1, 5, False, False, 1.3), (1, 1, 1, 1, False, False, 1.1)),
        *((1, 16, 1, 128, False, False, 1.02), (1, 16, 3, 512, False, False, 1.01)),
        *((3, 30, 4, 9, True, True, 1.15), (2, 6, 2, 700, False, True, 1.01)),
    ],
)
def test_dynamic_schedule_groups_heads_by_cache(batch, heads, side, tiles, own_heads, listed, late):
    """Longest first, and at the end those of more heads together."""
    random = np.random.default_rng(0)
    start, stop = documents(random, tiles)
    if listed:
        rows = np.stack([0 * start, stop - start, start], axis=-1)
    else:
        rows = np.stack([start, start, stop, stop], axis=-1)
    shape = batch, heads if own_heads else 1, *rows.shape
    table = jnp.asarray(np.broadcast_to(rows, shape), jnp.int32)
    if listed:
        entries = scheduler.blocks_of_lists(table, tiles, 1)
    else:
        entries = scheduler.blocks_of_ranges(table, 1)
    lists = np.asarray(scheduler.dynamic_schedule(batch, heads, side, entries))
    assert lists.dtype == np.int32 and lists.shape[1] == scheduler.DYNAMIC_COLUMNS
    items = lists[1:-1]
    programs = min(scheduler.NUM_SMS, len(items))
    assert lists[0, 0] == 1 + programs and lists[-1, 0] < 0
    places = [tuple(x) for x in items[:, :3].tolist()]
    assert sorted(places) == list(itertools.product(*map(range, (batch, heads, tiles))))
    for numbers in items[:, : len(scheduler.WorkTile.columns(0))].tolist():
        b, h, tile, blocks, visited, _ = scheduler.WorkTile.unpack(numbers)
        row = (b * shape[1] + (h if own_heads else 0)) * tiles + tile
        count = stop[tile] - start[tile]
        assert blocks.first == (row if listed else stop[tile] - 1)
        assert blocks.count == count and (visited.start, visited.stop) == (0, count)
    lengths = (stop - start)[items[:, 2]]
    # As many of `side` as divide the heads; with rows that are sorted together all of a row.
    apart = tiles * heads >= scheduler.SORTED_TOGETHER and not own_heads
    side = max(n for n in range(1, side + 1) if heads % n == 0)
    last = max(0, len(items) - -(-scheduler.SORTED_TOGETHER // (tiles * side)) * tiles * side)
    assert (np.diff(lengths[last:]) <= 0).all()
    if apart:
        of_heads = (items[:last, :2] @ [heads, 1]) // side
        assert (np.diff(of_heads) >= 0).all()
        assert ((np.diff(lengths[:last]) <= 0) | (np.diff(of_heads) > 0)).all()
        if last:
            assert len(set(items[: side * 2, 1])) == side
    mean = (lengths + 1.5).sum() / programs
    assert end_of_the_last(lengths, programs) <= late * max(mean, lengths.max() + 1.5)


def schedule_of(shape, options, members=1, kv_heads=None):
    """The schedule of a call; a CTA has 128 queries, and a block 128 keys."""
    batch, length, heads, head_dim = shape
    q = jnp.zeros(shape, jnp.bfloat16)
    k = jnp.zeros((batch, length, kv_heads or heads, head_dim), jnp.bfloat16)
    p = checked((q, k, k), options)
    tile = ForwardTile(2, 128, 1, cluster_size=members)
    # All of its arrays have an axis of instances, of which there is one.
    mask = jax.tree.map(lambda x: x[None], p.mask)
    return scheduler.Schedule.from_problem(p, tile, 2, batch, mask)


@pytest.mark.parametrize(
    ("options", "dynamic"),
    [
        *((CAUSAL, False), (WINDOW, False)),
        (dict(mask=Predicate(lambda b, h, q, k: q // 100 == k // 100)), False),
        (dict(key_value_seq_lengths=jnp.array([5, 300])), True),
        (dict(mask=BlockMask(jnp.ones((1, 1, 5, 5), bool), 128, 128)), True),
    ],
    ids=["causal", "window", "predicate", "lengths", "blocks"],
)
def test_schedule_is_dynamic_by_arrays(options, dynamic):
    schedule = schedule_of((2, 600, 3, 64), options)
    assert schedule.dynamic == dynamic
    assert isinstance(schedule.work_tiles, np.ndarray) != dynamic
    # Batch elements and heads of 5 work tiles; the last ones have 88 queries.
    assert schedule.num_ctas == 2 * 3 * 5


@pytest.mark.parametrize(("members", "lists"), [(1, 132), (2, 66)])
def test_all_sms_have_a_cta(members, lists):
    assert schedule_of((2, 4096, 16, 64), CAUSAL, members).num_ctas == lists


@pytest.mark.parametrize(
    ("shape", "kv_heads", "options", "members", "together"),
    [
        ((32, 512, 16, 128), 16, CAUSAL, 1, 15),
        ((16, 1024, 16, 64), 16, CAUSAL, 1, 15),
        ((4, 2048, 28, 128), 4, CAUSAL, 1, 3 * 7),
        ((8, 4096, 8, 256), 8, CAUSAL, 2, 1),
        ((2, 8192, 32, 64), 32, WINDOW, 1, 1),
        ((3, 2048, 44, 128), 44, {}, 2, 1),
    ],
)
def test_static_schedule_takes_few_heads(shape, kv_heads, options, members, together):
    """At the same time; and no program is late."""
    lists = schedule_of(shape, options, members, kv_heads).work_tiles
    items = [mine[1 : 1 + mine[0, 0]] for mine in lists]
    places = [tuple(x) for x in np.concatenate(items)[:, :3].tolist()]
    batch, length, heads, _ = shape
    tiles = length // (128 * members)
    assert sorted(places) == list(itertools.product(*map(range, (batch, heads, tiles))))
    count = len(scheduler.WHERE) + scheduler.KvBlocks._fields.index("count")
    ends = [(mine[:, count] + 1.5).cumsum() for mine in items]
    assert max(x[-1] for x in ends) <= 1.03 * np.mean([x[-1] for x in ends])
    at_work, found = {}, []
    starts = [(x - mine[:, count] - 1.5, mine) for x, mine in zip(ends, items, strict=True)]
    events = [
        (start, program, *where)
        for program, (begin, mine) in enumerate(starts)
        for start, where in zip(begin, mine[:, :2].tolist(), strict=True)
    ]
    for _, program, b, h in sorted(events):
        at_work[program] = b, h
        found.append(len(set(at_work.values())))
    assert np.median(found) <= 2 * len(lists) / tiles + together


@cases.parametrize(
    names=["causal", "everything at once", "mask with empty tiles"],
    more=["lengths of zero", "documents"],
)
def test_each_query_tile_has_one_work_tile(case, monkeypatch):
    """Tiles that see nothing have one, too; lists of many tiles may depend on arrays."""

    class Launched(Exception):
        pass

    def launch(kernel, operands, *, sums, **_):
        [inputs], [counted] = operands, sums
        raise Launched(inputs.schedule if counted is None else counted)

    qkv, _, options = with_heads(case.scaled(6), 64).problem("bfloat16")
    call = checked(qkv, options)
    with emulator.emulated(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(common, "launch", launch)
        with pytest.raises(Launched) as launched:
            run_forward(call)
    [lists] = map(np.asarray, launched.value.args)
    known = [row[1 : 1 + row[0, 0]] for row in lists] if lists.ndim == 3 else [lists[1:-1]]
    items = sorted(tuple(x) for x in np.concatenate(known)[:, :3].tolist())
    tiles = -(-call.q_len // (64 * default_tile(features_of(call)).warpgroups))
    assert items == list(itertools.product(*map(range, (call.batch, call.num_heads, tiles))))


# Short documents and a long one; what no query sees; few items; and one.
TAKEN = {
    "documents": (601, dict(segment_ids=np.repeat(range(5), (9, 30, 2, 500, 60))), True),
    "lengths": (601, dict(query_seq_lengths=[300], key_value_seq_lengths=[200]), False),
    "few": (150, dict(key_value_seq_lengths=[140]), False),
    "one": (60, dict(key_value_seq_lengths=[60]), False),
}


@pytest.mark.parametrize("head_dim", cases.default([64], [64, 128]))
@pytest.mark.parametrize("name", cases.default(["documents"], TAKEN))
def test_ctas_take_each_work_tile_once(name, head_dim, monkeypatch, kernel_case):
    """On a GPU with three cores, of which two are at work at a time: the third may come late."""
    length, arrays, is_causal = TAKEN[name]
    heads = 1 if name == "one" else 2
    arrays = {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()}
    if "segment_ids" in arrays:
        arrays = dict(segment_ids=arrays["segment_ids"][None])
    options = arrays | dict(is_causal=is_causal)
    case = cases.Case(
        f"taken {name}",
        *(1, length, length, heads, heads, head_dim, head_dim),
        options=lambda random, case: options,
    )
    start, count_up = emulator.launch, emulator.fake_ptx["count_up"]
    taken, counts = [], []

    def counted(ref):
        row = count_up(ref)
        taken.append((int(row), int(emulator.here.axes["cta"])))
        return row

    def launch(kernel, operands, **others):
        results = start(kernel, operands, **others)
        if kernel.__name__ == "pallas_flash_forward":
            counts.append((others["grid"]["cta"], len(results[0]) - 2, int(results[0][0, 0])))
        return results

    on_sms(monkeypatch, 3)
    monkeypatch.setattr(emulator, "launch", launch)
    monkeypatch.setitem(emulator.fake_ptx, "count_up", counted)
    judge(case, "bfloat16", emulated(case.problem("bfloat16")))
    [(programs, items, count)] = counts
    assert programs == min(3, items)
    # Each program counts on, after the first row that is no item, once.
    end = 1 + items + 2 * programs
    assert count == end and sorted(row for row, _ in taken) == list(range(1 + programs, end))
    behind = [program for row, program in taken if row > items]
    assert sorted(behind) == sorted(2 * list(range(programs)))


def parts_of(shape, options, *warpgroups):
    q = jnp.zeros(shape, jnp.bfloat16)
    p = checked((q, q, q), options)
    return scheduler.QueryTiles.from_problem(p, p.batch, *warpgroups)


@pytest.mark.parametrize(
    ("shape", "options", "warpgroups", "zigzag"),
    [
        ((1, 1024, 16, 128), CAUSAL, (2,), True),
        ((2, 1024, 8, 128), CAUSAL | dict(query_offset=5), (2,), True),
        ((1, 1024, 22, 64), CAUSAL, (3,), True),  # 6 items of 192 queries a head.
        ((1, 1024, 17, 128), CAUSAL, (2,), False),  # 136 items.
        ((1, 1024, 16, 128), {}, (2,), False),
        ((1, 1025, 16, 128), WINDOW, (2,), False),
        ((1, 1024, 16, 128), CAUSAL | dict(query_offset=jnp.int32(5)), (2,), False),
        ((1, 1024, 16, 128), CAUSAL, (2, 2), False),
    ],
)
def test_folded_if_no_cta_has_two_work_tiles(shape, options, warpgroups, zigzag):
    assert parts_of(shape, options, *warpgroups).folded == zigzag


@pytest.mark.parametrize("options", [CAUSAL, {}], ids=["zigzag", "neighbours"])
@pytest.mark.parametrize("warpgroups", [2, 3, 4])
@pytest.mark.parametrize("length", [64, 65, 600, 768])
def test_each_query_tile_is_in_one_split(length, warpgroups, options):
    """All work tiles have as much work, if query tiles are folded."""
    parts = parts_of((1, length, 2, 64), options, warpgroups)
    first = [[parts.first_row(i, n) for n in range(warpgroups)] for i in range(parts.per_head)]
    every = range(0, parts.per_head * warpgroups * 64, 64)
    assert sorted(itertools.chain(*first)) == list(every)
    assert every[-1] - 64 * (warpgroups - 1) < length
    numbers = np.arange(-(-length // 64))[None, None, :, None]
    ordered = parts.in_work_tile_order(numbers).ravel()
    if options:
        tiles = [x // 64 for x in itertools.chain(*first)]
        assert ordered.tolist() == [x if x < numbers.size else 0 for x in tiles]
        sums = [sum(x[: warpgroups & ~1]) for x in first]
        assert len(set(sums)) == 1
    else:
        assert ordered.tolist() == numbers.ravel().tolist()


@pytest.mark.parametrize("warpgroups", [2, 3, 4])
@pytest.mark.parametrize("length", cases.default([300, 700], [300, 321, 700]))
def test_numbers_of_folded_tiles(warpgroups, length, kernel_case, monkeypatch):
    """Stages are used again while a warpgroup passes by."""
    seen = []
    first_row = scheduler.QueryTiles.first_row

    def spied(self, *at):
        seen.append(self.folded)
        return first_row(self, *at)

    monkeypatch.setattr(scheduler.QueryTiles, "first_row", spied)
    case = dataclasses.replace(LONG_CAUSAL, T=length, S=length)
    sizes = TileSizes(ForwardTile(warpgroups, 64, stages=2))
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), False, sizes))
    assert all(seen) and seen


@pytest.mark.parametrize("warpgroups", [2, 3, 4])
@pytest.mark.parametrize("xp", [np, jnp], ids=["known", "traced"])
def test_warpgroups_compute_their_blocks(warpgroups, xp):
    """All pairs or triples of ranges, the last one of which lacks a tile of queries."""
    ranges = [x for x in itertools.product(range(4), repeat=4) if list(x) == sorted(x)]
    together = list(itertools.product(ranges[:: warpgroups**2], repeat=warpgroups))
    rows = xp.asarray(np.concatenate(together)[None, None, :-1], np.int32)
    entries = scheduler.blocks_of_ranges(rows, warpgroups)
    assert type(entries) is type(rows)
    rows = [*np.asarray(rows)[0, 0].tolist(), (0, 0, 0, 0)]
    for n, entry in enumerate(np.asarray(entries)[0, 0].tolist()):
        blocks, visited = scheduler.unpack(np.array(entry))
        order = [int(blocks.block_at(i, None)) for i in range(blocks.count)]
        mine = rows[n * warpgroups :][:warpgroups]
        some = [x for x in mine if x[0] < x[3]]
        first, last = (f((x[i] for x in some), default=0) for f, i in ((min, 0), (max, 3)))
        assert sorted(order) == list(range(first, last))
        each = zip(*visited, strict=True)
        for (start, full_start, full_stop, stop), places in zip(mine, each, strict=True):
            places = scheduler.VisitedBlocks(*map(int, places))
            assert sorted(places) == list(places)
            assert sorted(order[places.start : places.stop]) == list(range(start, stop))
            partial = order[places.start : places.full] + order[places.tail : places.stop]
            full = order[places.full : places.tail]
            assert sorted(full) == list(range(full_start, full_stop))
            assert not set(partial) & set(full)


def test_blocks_descend():
    """From the last one that any warpgroup visits, with the example of the docstring."""
    ranges = np.array([(0, 0, n, n + 1) for n in (4, 5, 6)], np.int32)[None, None]
    [stream] = scheduler.blocks_of_ranges(ranges, 3)[0, 0]
    blocks, visited = scheduler.unpack(stream)
    assert blocks == (6, 7, 0)
    assert [int(blocks.block_at(i, None)) for i in range(7)] == [6, 5, 4, 3, 2, 1, 0]
    assert [*zip(*visited, strict=True)] == [(2, 3, 7, 7), (1, 2, 7, 7), (0, 1, 7, 7)]


@cases.parametrize(
    names=["full", "causal", "documents", "lengths", "mask", "bias", "everything at once"]
)
def test_fourth_warpgroup(case, kernel_case, monkeypatch):
    """One warp of the producer copies the queries of two; on one core, where stages come again."""
    on_sms(monkeypatch, 1)
    sizes = TileSizes(ForwardTile(4, 64))
    case = dataclasses.replace(case.scaled(3), H=64, V=64)
    if case.name == "bias":  # Of rows that copies could take.
        case = dataclasses.replace(case, S=case.S // 8 * 8)
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), False, sizes))


@pytest.mark.parametrize("warpgroups", forward_kernel.REGISTERS)
def test_threads_have_the_registers_of_the_launch(warpgroups):
    """Else a warpgroup would wait for registers for ever."""
    consumer, producer = forward_kernel.REGISTERS[warpgroups]
    launched = (warpgroups + 1) * forward_common.at_launch(warpgroups)
    assert warpgroups * consumer + producer <= launched
    assert consumer % 8 == producer % 8 == 0


# Some of three warpgroups see neither the first nor the last key tile of their work tile.
APART = {
    "window": dict(local_window_size=(70, 0)),
    "documents": dict(segment_ids=jnp.searchsorted(jnp.array([250, 420]), jnp.arange(500))[None]),
}


@pytest.mark.parametrize("name", cases.default(["window"], APART))
def test_warpgroups_skip_blocks_of_others(name, kernel_case, monkeypatch):
    """On one core, where slots are used again."""
    on_sms(monkeypatch, 1)
    options = APART[name] | dict(is_causal=True)
    sizes = dict(B=1, T=500, S=500, N=1, K=1)
    case = dataclasses.replace(with_heads(LONG, 64, **sizes), options=lambda *_: options)
    judge(case, "bfloat16", emulated(case.problem("bfloat16")))
