"""The backward for Hopper in turn: CTAs add to a tile of dq in one order."""

import collections
import dataclasses
import functools
import time

import numpy as np
import pytest
from support import cases
from support import mosaic_emulator as emulator
from support.broken_kernels import without_waiting_at
from support.judge import judge
from support.lowered import attention, gradients, lowered
from support.mosaic_cases import LONG_CAUSAL, biased, checked, emulated

from pallas_flash._backends.mosaic import (
    backward_cluster,
    backward_kernel,
    backward_keys,
    backward_launch,
    backward_splits,
    common,
    scheduler,
    tiles,
)
from pallas_flash._backends.mosaic.backward_keys import Grads
from pallas_flash._problem.features import features_of
from pallas_flash._problem.tile_sizes import tile_of
from pallas_flash.masks import BlockMask
from pallas_flash.tuning import BackwardTile, TileSizes

MASKS = {
    "full": {},
    "ragged": {},
    "causal": dict(is_causal=True),
    "blocks": dict(mask=BlockMask(np.random.default_rng(0).random((1, 1, 5, 4)) < 0.6, 128, 128)),
}


def add_late(patch, late):
    """Add to dq late where `late()`; return, by place, which CTAs of a head have added."""
    added, add = collections.defaultdict(list), emulator.fake_ptx["add_fragments"]

    def spy(x, ref, taken=slice(None)):
        axes = emulator.here.axes
        # A head has a cluster for each K/V tile.
        place = int(axes["kv_tile"] if "kv_tile" in axes else axes["cta"])
        time.sleep(0.05 if late(place, emulator.here.warpgroup) else 0)
        added[int(ref.index[0])].append(place)
        add(x, ref, taken)

    patch.setitem(emulator.fake_ptx, "add_fragments", spy)
    patch.setattr(backward_splits, "num_splits", lambda *_: 1)
    return added


def check_order(added):
    assert max(map(len, added.values())) > 2
    for places in added.values():
        assert places == sorted(set(places))


def turns_case(name, head_dim, q_len=600):
    sizes = 1, q_len, 512 if name == "full" else 500, 2, 1
    return cases.Case("turns", *sizes, head_dim, head_dim, lambda *_: MASKS[name])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", cases.default(["full", "causal"], MASKS))
def test_ctas_add_dq_in_turn(name, head_dim, monkeypatch, kernel_case):
    """A tile of dq gets the shares of its K/V tiles from the last to the first."""
    case = turns_case(name, head_dim)
    # Two CTAs run at a time. Without turns the later one would be the first.
    added = add_late(monkeypatch, lambda place, warpgroup: place % 2 == 0)
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order=True))
    check_order(added)


@pytest.mark.parametrize("head_dim", cases.default([256], [64, 128, 192, 256]))
def test_a_warpgroup_may_be_late(head_dim, monkeypatch, kernel_case):
    """The producer reports no turn before both consumers know of the one at the same barrier."""
    case = turns_case("full", head_dim, q_len=900)
    added = add_late(monkeypatch, lambda place, warpgroup: warpgroup == 1)
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order=True))
    check_order(added)


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), cases.default([(16, 256)], [(16, 256), (32, 256), (192, 128)])
)
def test_turns_of_clusters(head_dim, value_dim, kernel_case):
    """At head dim 16 CTA 0 has all columns of dq, and CTA 1 takes no turns."""
    case = dataclasses.replace(LONG_CAUSAL, H=head_dim, V=value_dim)
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order=True))


def test_bias_in_fewer_stages_than_queries(kernel_case):
    """Its copy may not wait for a step whose turn is reported later: three stages, and one."""
    case = biased(H=32, V=64, T=640, S=304)
    sizes = TileSizes(backward=BackwardTile(128, 3))
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order=True, sizes=sizes))


@pytest.mark.parametrize(("in_turn", "stages"), [(False, 1), (True, None)])
def test_mask_in_fewer_stages_than_queries(in_turn, stages):
    """Head dim 128 with values of 224 has three stages of queries in CTA 0, and room for a mask."""
    masked = dict(mask=np.ones((1, 1, 300, 300), bool))
    case = dataclasses.replace(
        LONG_CAUSAL, H=128, V=224, T=300, S=300, options=lambda random, case: masked
    )
    qkv, _, options = case.problem("bfloat16")
    call = checked(qkv, options)
    tile = tile_of(tiles.default(call, features_of(call)), "backward")
    pipeline = backward_launch.scratch(call, tile, Grads.DQ_DK_DV, in_turn=in_turn).pairs
    assert tile.stages == 2 and (pipeline and pipeline.stages) == stages


@pytest.mark.parametrize(("batch", "slowest"), [(2, "outer"), (2**16, "head")])
def test_slowest_axis_of_the_grid(batch, slowest, monkeypatch):
    """Batch elements in turn without a mask, unless CUDA takes no so long axis there."""
    grids, launch = [], common.launch

    def spy(*args, **options):
        grids.append(options["grid"])
        return launch(*args, **options)

    monkeypatch.setattr(common, "launch", spy)
    call = functools.partial(attention, is_causal=False, reproducible=True)
    lowered(functools.partial(gradients, call=call), (batch, 8, 1, 64))
    [grid] = [x for x in grids if "kv_tile" in x]
    assert next(iter(grid)) == slowest


def without_counting(patch):
    patch.setitem(emulator.fake_ptx, "raise_count", lambda ref: None)


def with_the_counter_of_cta_0(patch):
    patch.setattr(backward_cluster.ClusterProducer, "counter", property(lambda _: 0, set_nothing))


def set_nothing(_, value):
    """Set an attribute that keeps its value."""


def with_a_count_too_early(patch):
    patch.setattr(
        backward_cluster.ClusterProducer, "added_late", property(lambda _: 1, set_nothing)
    )


def with_one_barrier(patch):
    for module in (backward_keys, backward_cluster, backward_kernel):
        patch.setattr(module, "TURNS", 1)


def with_first_tile_first(patch):
    patch.setattr(backward_keys.OuterKeysConfig, "kv_tile", lambda self, place: place)


BROKEN = {
    "no wait for turns": (without_waiting_at({"turn"}), 256),
    "no wait for turns, one CTA": (without_waiting_at({"turn"}), 128),
    "no wait for counts": (
        lambda patch: patch.setitem(emulator.fake_ptx, "await_count", lambda ref, count: None),
        256,
    ),
    "nobody counts": (without_counting, 256),
    "one counter for both CTAs": (with_the_counter_of_cta_0, 256),
    "a turn is counted before all have added": (with_a_count_too_early, 256),
    "one barrier for turns": (with_one_barrier, 256),
    "key tiles from the first to the last": (with_first_tile_first, 128),
}


@pytest.mark.parametrize("broken", cases.default(["no wait for turns"], BROKEN))
def test_emulator_finds_broken_turns(broken, monkeypatch):
    monkeypatch.setattr(emulator, "TIMEOUT", 2.0)
    change, head_dim = BROKEN[broken]
    case = turns_case("full", head_dim, q_len=900)
    change(monkeypatch)

    def late(place, warpgroup):
        return place % 2 == 0 and warpgroup == 1

    with pytest.raises((AssertionError, emulator.EmulationError)):
        for _ in range(5):
            added = add_late(monkeypatch, late)
            judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order=True))
            check_order(added)


@pytest.mark.parametrize("scattered", [False, True], ids=["ranges", "lists"])
def test_turn_is_the_number_of_later_tiles(scattered):
    random, shape = np.random.default_rng(0), (2, 3, 5)
    table = np.zeros((*shape, 2 + 7 if scattered else 4), np.int32)
    has = np.zeros((*shape, 7), bool)
    for at in np.ndindex(shape):
        if scattered:
            tiles = random.permutation(7)[: random.integers(8)]
            # Numbers behind a list count for nothing.
            table[at] = [0, len(tiles), *tiles, *[0] * (7 - len(tiles))]
        else:
            start, stop = sorted(random.integers(0, 8, 2))
            table[at], tiles = (start, start, stop, stop), np.arange(start, stop)
        has[at][tiles] = True
    later = [has[:, :, i + 1 :].sum(axis=2) for i in range(5)]
    np.testing.assert_array_equal(scheduler.turns(table, 7, scattered), np.stack(later, axis=2))
