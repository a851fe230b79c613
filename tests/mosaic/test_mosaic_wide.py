"""The forward for Hopper at head dims above 256: numbers, barriers and machine code."""

import dataclasses

import jax.numpy as jnp
import pytest
from support import cases
from support import mosaic_emulator as emulator
from support.broken_kernels import (
    with_arrivals,
    with_mask_moved,
    without_rescaling,
    without_waiting_at,
)
from support.compiled_code import machine_code_of, shaped
from support.judge import judge
from support.mosaic_cases import (
    CAUSAL,
    LONG,
    LONG_CAUSAL,
    WINDOW,
    checked,
    forward_of,
    on_sms,
    run_forward,
)
from support.repository import assert_none

from pallas_flash._backends.mosaic import common, forward_common, forward_wide, tiles
from pallas_flash._jax import hardware
from pallas_flash._problem.features import features_of
from pallas_flash._problem.tile_sizes import tile_of
from pallas_flash.tuning import ForwardTile, TileSizes
from scripts.maintenance.inspection import gpu_compiler


def wide(case, head_dim, value_dim=None, **sizes):
    """The case at these head dims."""
    return dataclasses.replace(case, H=head_dim, V=value_dim or head_dim, **sizes)


def assert_right(case, sizes=None):
    problem = case.problem("bfloat16")
    large = checked(problem[0], problem[2]).large
    results = forward_of(case, *([] if sizes is None else [sizes]))
    judge(case, "bfloat16", results, problem, apart=large)


# A case of few queries goes to the kernel all the same: this is not the choice of who computes it.
SERVED = [
    case for case in map(cases.BY_NAME.get, cases.SERVED_ON_HOPPER) if case.name != "negative scale"
]
FEATURES = ["lengths of zero", "blocks and predicate", "all features"]


@cases.parametrize(names=FEATURES, others_extended=True, table=SERVED)
def test_numbers_of_features(case, kernel_case):
    assert_right(wide(case, 320))


def test_any_padding_behind_lengths(kernel_case):
    """Within a block, at the end of one, none and all."""
    ends = dict(key_value_seq_lengths=jnp.array([150, 256, 400, 0], jnp.int32))
    case = wide(dataclasses.replace(LONG, B=4, N=1, options=lambda *_: ends), 320, T=70, S=400)
    qkv, cotangents, options = case.problem("bfloat16")
    poisoned, _ = cases.poison(case, qkv, cotangents, options)
    assert jnp.isnan(poisoned[2]).any()
    with emulator.emulated(pytest.MonkeyPatch()):
        (want, _), (got, _) = (run_forward(checked(x, options)) for x in (qkv, poisoned))
    assert_none(b for b in range(4) if not (want[b] == got[b]).all())


HEAD_DIMS = [(512, 512), (576, 512), (264, 384), (64, 320), (288, 64)]


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    cases.default(HEAD_DIMS, [*HEAD_DIMS, (320, 320), (448, 448), (384, 264), (576, 8)]),
)
def test_numbers_of_head_dims(head_dim, value_dim, kernel_case):
    assert_right(wide(LONG_CAUSAL, head_dim, value_dim, T=200, S=300))


def test_numbers_where_blocks_rescale(monkeypatch, kernel_case):
    """Maxima that grow by little move, too: each block has a factor of its own."""
    monkeypatch.setattr(forward_common, "THRESHOLD", 0.0)
    assert_right(wide(LONG, 320, T=130, S=400))


@pytest.mark.parametrize("options", [CAUSAL, WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("cluster_size", [1, 2])
def test_stages_are_used_again(options, cluster_size, monkeypatch, kernel_case):
    """Few CTAs compute all work tiles, and skip blocks that only one of a cluster sees."""
    on_sms(monkeypatch, 2)
    tile = ForwardTile(2, 64, 1, 3, cluster_size)
    case = wide(LONG, 320, T=300, S=500, options=options)
    assert_right(case, TileSizes(forward=tile))


@pytest.mark.parametrize(("head_dim", "value_dim"), HEAD_DIMS)
def test_tiles_fit(head_dim, value_dim):
    case = wide(LONG_CAUSAL, head_dim, value_dim)
    qkv, _, options = case.problem("bfloat16")
    call = checked(qkv, options)
    tile = tile_of(tiles.default(call, features_of(call)), "forward")
    need = common.smem_bytes(forward_wide.scratch(call, tile))
    assert need <= hardware.shared_memory_limit(common.HOPPER)
    assert tile.stages >= 3 and tile.cluster_size == 2


def test_pieces_cover_all_values():
    def fits(value_dim):
        pieces = forward_wide.ValuePieces.from_value_dim(value_dim)
        both = forward_wide.CONSUMERS * pieces.count * pieces.columns
        return value_dim <= both < value_dim + 128 and pieces.columns <= 256 and both // 2 <= 256

    assert_none(n for n in range(8, 513, 8) if not fits(n))


WRONG = {
    f"no wait at {name}": without_waiting_at({name})
    for name in ("q_full", "k_full", "k_empty", "v_full", "v_empty", "weights_full")
} | {
    "keys are released too late": with_arrivals("k_empty", 1),
    "the mask is moved": with_mask_moved,
    "sums are not rescaled": without_rescaling,
}


@pytest.mark.parametrize(
    "broken",
    cases.default(
        ["no wait at v_full", "keys are released too late", "sums are not rescaled"], WRONG
    ),
)
def test_broken_kernels_are_seen(broken, monkeypatch):
    on_sms(monkeypatch, 2)
    case = wide(LONG_CAUSAL, 320, T=300, S=500)
    assert_right(case)
    monkeypatch.setattr(emulator, "TIMEOUT", 1.0)
    WRONG[broken](monkeypatch)
    with pytest.raises((AssertionError, emulator.EmulationError)):
        # Threads run as fast as they may, and a stage may happen to be there.
        for _ in range(5):
            assert_right(case)


# The arrays of an option, and the others; and local memory instructions in the loop.
OPTIONS = {
    "nothing": ({}, {}, 0),
    "causal": ({}, dict(is_causal=True), 0),
    "lengths": (dict(key_value_seq_lengths=shaped(2)), {}, 0),
    "documents": (dict(segment_ids=shaped(2, 1000)), dict(is_causal=True), 0),
    "mask array": (dict(mask=shaped(2, 1, 1000, 1000, dtype=jnp.bool_)), {}, 0),
    "bias": (dict(bias=shaped(1, 8, 1000, 1000, dtype=jnp.bfloat16)), {}, 20),
    "soft cap": ({}, dict(logits_soft_cap=30.0), 0),
    "slopes": (dict(alibi_slopes=shaped(8, dtype=jnp.float32)), dict(is_causal=True), 0),
    "sinks": (dict(sinks=shaped(8, dtype=jnp.float32)), dict(is_causal=True), 0),
    "largest scores": ({}, dict(is_causal=True, return_max_logits=True), 0),
}


@pytest.mark.skipif(bool(gpu_compiler.missing()), reason=gpu_compiler.missing() or "is here")
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "option"),
    cases.default(
        [(512, 512, "causal"), (576, 512, "nothing"), (512, 512, "largest scores")],
        [(*dims, option) for dims in [(512, 512), (576, 512), (320, 320)] for option in OPTIONS],
    ),
)
def test_machine_code(head_dim, value_dim, option):
    """Products of a column block are not waited for one by one, and hardly anything is spilt."""
    arrays, others, spills = OPTIONS[option]
    q, k, v = (
        shaped(2, 1000, heads, n, dtype=jnp.bfloat16)
        for heads, n in ((8, head_dim), (1, head_dim), (1, value_dim))
    )

    def call(q, k, v, *values):
        return run_forward(checked((q, k, v), dict(zip(arrays, values, strict=True)) | others))

    [(name, registers, _, loops)] = machine_code_of(call, q, k, v, *arrays.values())
    assert registers * 128 * 3 <= 65536, name
    [loop] = [loop for loop in loops if loop.matrix["HGMMA"]]
    assert loop.spills <= spills, (name, loop.order)
    # Four instructions for 64 columns of scores and for 64 keys; a wait for each such product.
    pieces = forward_wide.ValuePieces.from_value_dim(value_dim).count
    products = forward_wide.column_blocks(head_dim) + 2 * pieces
    assert loop.matrix["HGMMA"] == 4 * products, loop.order
    assert loop.opcodes["WARPGROUP.DEPBAR"] == products, loop.order
