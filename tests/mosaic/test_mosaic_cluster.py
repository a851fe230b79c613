"""The backward for Hopper in clusters, H + V above 256: numbers and barriers."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support import cases, oracle
from support import mosaic_emulator as emulator
from support.broken_kernels import with_arrivals, without_waiting_at
from support.judge import judge
from support.mosaic_cases import (
    LONG,
    LONG_CAUSAL,
    TWO_PASSES,
    checked,
    emulated,
    gradient_of_the_scale,
)
from support.repository import assert_none

from pallas_flash._backends.mosaic import (
    backward_cluster,
    backward_common,
    backward_launch,
    backward_splits,
    common,
    tiles,
)
from pallas_flash._backends.mosaic.backward_keys import Grads
from pallas_flash._jax import hardware
from pallas_flash._problem.features import features_of
from pallas_flash._problem.tile_sizes import padded, tile_of

CLUSTER = "_cluster"  # In the kernel's name.


def wide(case, head_dim=192, value_dim=128, **sizes):
    """The case at these head dims."""
    return dataclasses.replace(case, H=head_dim, V=value_dim, **sizes)


def assert_right(case, dtype="bfloat16"):
    problem = case.problem(dtype)
    judge(case, dtype, emulated(problem), problem)


# Each stands for a way in which CTA 1 learns of something.
FEATURES = ["lengths of zero", "blocks and predicate", "dropout", "all features"]
# Queries take a negative scale before the kernels are called.
SERVED = [
    case for case in map(cases.BY_NAME.get, cases.SERVED_ON_HOPPER) if case.name != "negative scale"
]


@cases.parametrize(names=FEATURES, others_extended=True, table=SERVED)
def test_numbers_of_features(case, kernel_case):
    assert_right(wide(case))


HEAD_DIMS = [(256, 256), (64, 256), (224, 64)]


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    cases.default(
        HEAD_DIMS, [*HEAD_DIMS, (32, 256), (160, 256), (256, 40), (192, 192), (136, 136)]
    ),
)
def test_numbers_of_head_dims(head_dim, value_dim, kernel_case):
    """Strips of dq for four consumers: one each, one for two, one for all, and others."""
    assert_right(wide(LONG_CAUSAL, head_dim, value_dim, T=130, S=200))


@pytest.mark.parametrize(
    "case", cases.default([LONG_CAUSAL], [LONG, LONG_CAUSAL]), ids=["full", "causal"]
)
def test_stages_are_used_again(case, kernel_case):
    assert_right(wide(case, 256, 256, T=500, S=150))


@pytest.mark.parametrize("name", cases.default(["score function"], ["causal", "score function"]))
def test_float16(name, kernel_case):
    case = dataclasses.replace(LONG_CAUSAL, options=cases.BY_NAME[name].options)
    assert_right(wide(case, T=130, S=140), "float16")


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("count", [2, 3])
def test_splits(groups, count, monkeypatch, kernel_case):
    """CTAs that share a K/V tile add their sums, of heads or of queries."""
    monkeypatch.setattr(backward_splits, "num_splits", lambda *_: count)
    assert_right(wide(LONG_CAUSAL, T=200, S=150, N=groups, K=1))


def test_heads_that_do_not_fill_the_grid(monkeypatch, kernel_case):
    """Three key/value heads, of which two have their clusters side by side: two blocks of two."""
    grids, launch = [], emulator.launch

    def spy(kernel, *args, grid, **options):
        grids.append(grid)
        return launch(kernel, *args, grid=grid, **options)

    monkeypatch.setattr(emulator, "launch", spy)
    monkeypatch.setattr(backward_common, "MAX_NEIGHBOURS_IN_CLUSTERS", 2)
    assert_right(wide(LONG_CAUSAL, T=150, S=150, N=3, K=3))
    # Batch elements, key tiles, blocks, heads of a block.
    assert dict(cta=LONG_CAUSAL.B * 2 * 2 * 2) in grids


def test_gradient_of_the_scale(kernel_case):
    case = wide(LONG_CAUSAL, T=100, S=150)
    problem = case.problem("bfloat16")
    one_pass, in_turn, two_passes = (
        gradient_of_the_scale(problem, in_order) for in_order in (False, True, TWO_PASSES)
    )
    assert abs(one_pass - two_passes) < 0.01 * abs(two_passes)
    assert abs(in_turn - one_pass) < 1e-5 * abs(one_pass)


def test_small_weights_keep_their_bits(kernel_case):
    """A sink takes nearly all of a row, and leaves weights of a few billionths."""
    sinks = dict(sinks=jnp.full(2, 16.0))
    case = wide(LONG, T=70, S=140, options=lambda random, case: sinks)
    assert_right(case)


def opposite(score, b, h, q, k):
    return -score


def test_dropout_with_a_derivative_that_may_be_negative(kernel_case):
    """Signs of what is sent do not say what dropout keeps."""
    options = dict(
        score_mod=oracle.ExactScoreMod(opposite, opposite, lambda *_: -1.0),
        dropout_rate=0.4,
        dropout_key=jax.random.key(0),
    )
    assert_right(wide(LONG, T=70, S=140, options=lambda random, case: options))


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "stages"),
    [(256, 256, 1), (192, 128, 2), (256, 128, 1), (64, 256, 2), (256, 32, 2), (136, 136, 2)],
)
def test_tiles_fit(head_dim, value_dim, stages):
    for options in ({}, dict(is_causal=True)):
        case = wide(LONG_CAUSAL, head_dim, value_dim, options=lambda random, case, o=options: o)
        qkv, _, given = case.problem("bfloat16")
        call = checked(qkv, given)
        tile = tile_of(tiles.default(call, features_of(call)), "backward")
        need = common.smem_bytes(backward_launch.scratch(call, tile, Grads.DQ_DK_DV))
        assert need <= hardware.shared_memory_limit(common.HOPPER)
        assert tile.stages == stages


def test_sums_leave_before_what_may_still_be_sent():
    """In the memory that both share, dk ends before ds begins."""
    dims, offenders = range(8, 257, 8), []
    for head_dim, value_dim in ((x, y) for x in dims for y in dims if x + y > 256):
        qkv, _, options = wide(LONG, head_dim, value_dim, T=8, S=8).problem("bfloat16")
        call, sizes = checked(qkv, options), padded(head_dim, value_dim)
        if not Grads.DQ_DK_DV.in_clusters(*sizes):
            continue
        tile = backward_launch.largest_tile(*sizes, two_passes=False)
        union = backward_launch.scratch(call, tile, Grads.DQ_DK_DV).tiles
        _, of_dk, _, dk = union.refs
        if common.smem_bytes(dk) > common.smem_bytes(of_dk._replace(ds=None)):
            offenders.append((head_dim, value_dim))
    assert_none(offenders)


def without_messages(patch):
    patch.setitem(emulator.fake_ptx, "wait_for_message", lambda barriers, n, parity: None)


def without_expecting(patch):
    patch.setitem(emulator.fake_ptx, "expect_message", lambda barriers, n, size: None)


def with_columns_of_another_cta(patch):
    right = backward_cluster.Columns.from_rank.__func__
    patch.setattr(
        backward_cluster.Columns,
        "from_rank",
        classmethod(lambda cls, tiles, rank: right(cls, tiles, 1 - rank)),
    )


def without_subtracting_delta(patch):
    ds = backward_cluster.DkConsumer.ds
    patch.setattr(
        backward_cluster.DkConsumer,
        "ds",
        lambda self, j, factors, dp_t, delta: ds(self, j, factors, dp_t, 0 * delta),
    )


BROKEN = {
    "no wait for messages": without_messages,
    "no wait for keys": without_waiting_at({"k_full"}, CLUSTER),
    "no wait for values": without_waiting_at({"v_full"}, CLUSTER),
    "no wait for queries": without_waiting_at({"queries_full"}, CLUSTER),
    "no wait for cotangents": without_waiting_at({"cotangents_full"}, CLUSTER),
    "no wait for numbers": without_waiting_at({"numbers_full"}, CLUSTER),
    "no wait for a free stage": without_waiting_at({"queries_empty"}, CLUSTER),
    "no wait for the end of the other CTA": without_waiting_at({"ended"}, CLUSTER),
    "no message is expected": without_expecting,
    "an arrival too many": with_arrivals("cotangents_empty", 1, CLUSTER),
    "an arrival too few": with_arrivals("queries_empty", -1, CLUSTER),
    "columns of the other CTA": with_columns_of_another_cta,
    "no delta": without_subtracting_delta,
}


@pytest.mark.parametrize(
    "broken", cases.default(["no wait for messages", "columns of the other CTA"], list(BROKEN))
)
def test_emulator_finds_a_broken_kernel(broken, monkeypatch):
    monkeypatch.setattr(emulator, "TIMEOUT", 1.0)
    BROKEN[broken](monkeypatch)
    with pytest.raises((AssertionError, emulator.EmulationError)):
        for _ in range(5):
            assert_right(wide(LONG, T=400, S=150))
