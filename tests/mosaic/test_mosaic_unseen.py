"""The kernels for Hopper, emulated: nothing shows of what no query sees."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle
from support import mosaic_emulator as emulator
from support.judge import judge
from support.mosaic_cases import LONG, LONG_CAUSAL, checked, emulated, in_order, run_forward

from pallas_flash.tuning import ForwardTile, TileSizes


@in_order
def test_keys_behind_lengths_have_zero_gradients(in_order, kernel_case):
    """None of five tiles is visible, or one or two, whose CTAs store several others, or more."""
    lengths = jnp.array([0, 1, 256, 300, 520], jnp.int32)
    sizes = dict(B=len(lengths), T=150, S=600, N=1)
    options = dict(key_value_seq_lengths=lengths)
    case = dataclasses.replace(LONG, **sizes, options=lambda *_: options)
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order))


def test_hidden_keys_have_no_effect(kernel_case):
    case = dataclasses.replace(LONG_CAUSAL, T=100)
    qkv, cotangents, options = case.problem("bfloat16")
    poisoned = cases.poison(case, qkv, cotangents, options)
    # Keys that no query sees, too: those past the last query.
    assert all(np.isnan(np.asarray(x, np.float32)).any() for x in poisoned[0])
    want, got = emulated((qkv, cotangents, options)), emulated((*poisoned, options))
    for name, a, b in zip(oracle.NAMES, want, got, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        # dq is a sum in any order.
        np.testing.assert_allclose(a, b, rtol=1e-2 if name == "dq" else 0, err_msg=name)


# Within a tile, at the end of one, none and all.
ENDS = dict(query_seq_lengths=[200, 128, 300, 70], key_value_seq_lengths=[150, 256, 400, 0])


@in_order
@pytest.mark.parametrize(
    "options",
    cases.default(
        [dict(is_causal=True)], [{}, dict(is_causal=True), dict(local_window_size=(150, 20))]
    ),
    ids=lambda options: next(iter(options), "full"),
)
def test_any_padding_behind_lengths(options, in_order, kernel_case):
    """Tiles in which lengths end have copies that end with zeros."""
    judge_poisoned(options, in_order)


# Tokens, keys, their valid lengths, a window that ends behind the valid keys, and a tile in which
# no other warpgroup cleans the block before.
WINDOWS = [
    (128, 320, [10], None, (20, 20), (3, 64)),
    (256, 320, [200], [320], (64, 16), (3, 64)),
    (64, 256, [10], [256], (20, 100), (3, 128)),
    (320, 320, [280], None, (None, 0), (2, 96)),
]


@pytest.mark.parametrize(("tokens", "keys", "queries", "valid", "window", "tile"), WINDOWS)
def test_any_padding_where_windows_go_on_behind_it(
    tokens, keys, queries, valid, window, tile, kernel_case
):
    """Rows behind the valid queries have windows that end a block behind the last valid key."""
    ends = dict(query_seq_lengths=queries, key_value_seq_lengths=valid)
    ends = {name: jnp.asarray(x, jnp.int32) for name, x in ends.items() if x is not None}
    case = dataclasses.replace(
        LONG,
        **dict(B=1, N=1, K=1, T=tokens, S=keys, H=128, V=128),
        options=lambda *_: ends | dict(local_window_size=window),
    )
    qkv, cotangents, options = case.problem("bfloat16")
    poisoned, _ = cases.poison(case, qkv, cotangents, options)
    assert jnp.isnan(poisoned[2]).any()
    sizes = TileSizes(forward=ForwardTile(*tile))
    with emulator.emulated(pytest.MonkeyPatch()):
        (want, _), (got, _) = (run_forward(checked(x, options), sizes) for x in (qkv, poisoned))
    np.testing.assert_array_equal(want, got)


def test_any_padding_with_gradient_of_the_scale(kernel_case):
    """All sums of dq are read then."""
    judge_poisoned({}, want_scale=True)


def judge_poisoned(options, in_order=False, **others):
    ends = {name: jnp.asarray(x, jnp.int32) for name, x in ENDS.items()}
    case = dataclasses.replace(LONG, B=4, N=1, options=lambda random, case: options | ends)
    qkv, cotangents, options = case.problem("bfloat16")
    poisoned = cases.poison(case, qkv, cotangents, options)
    assert all(np.isnan(np.asarray(x, np.float32)).any() for x in poisoned[0])
    judge(case, "bfloat16", emulated((*poisoned, options), in_order, **others))


def test_any_padding_without_cotangent_of_lse(kernel_case):
    """Then delta leaves its kernel as it is used."""
    ends = {name: jnp.asarray(x, jnp.int32) for name, x in ENDS.items()}
    case = dataclasses.replace(LONG, B=4, N=1, options=lambda random, case: ends)
    qkv, cotangents, options = case.problem("bfloat16")
    poisoned, (poisoned_do, _) = cases.poison(case, qkv, cotangents, options)
    assert np.isnan(np.asarray(poisoned_do, np.float32)).any()
    problems = (qkv, cotangents[0]), (poisoned, poisoned_do)
    want, got = (emulated((qkv, (do, None), options), in_order=True) for qkv, do in problems)
    for name, a, b in zip(oracle.names(options), want, got, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_hidden_values_have_no_effect(kernel_case):
    """Whether these keys are known by lengths, or by evaluating the mask."""
    for name in ("lengths of zero", "mask with empty tiles"):
        case = cases.BY_NAME[name]
        qkv, cotangents, options = case.problem("bfloat16")
        poisoned, _ = cases.poison(case, qkv, cotangents, options)
        assert np.isnan(np.asarray(poisoned[2], np.float32)).any(), name
        with emulator.emulated(pytest.MonkeyPatch()):
            (want, _), (got, _) = (run_forward(checked(x, options)) for x in (qkv, poisoned))
        np.testing.assert_array_equal(want, got, err_msg=name)


@in_order
def test_scores_of_hidden_pairs_may_overflow(in_order):
    """The product of a cotangent and a value that its query does not see."""
    case = dataclasses.replace(LONG, T=100, S=100, N=1, options=lambda r, c: dict(is_causal=True))
    (q, k, v), (do, dlse), options = case.problem("bfloat16")
    v, do = v.at[:, 60:].multiply(1e20), do.at[:, :40].multiply(1e20)
    for name, x in zip(
        oracle.NAMES, emulated(((q, k, v), (do, dlse), options), in_order), strict=False
    ):
        assert jnp.isfinite(x).all(), name
