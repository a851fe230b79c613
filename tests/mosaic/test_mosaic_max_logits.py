"""The largest score of each head by the kernels for Hopper, emulated."""

import dataclasses

import pytest
from support import cases
from support import mosaic_emulator as emulator
from support.few_queries import with_few
from support.judge import judge_max_logits
from support.mosaic_cases import LONG, LONG_CAUSAL, checked, run_forward, with_heads

ASKED = dict(return_max_logits=True)
# Scores in base 2 and in base e, a constant that is left out, all at once.
CASES = (
    "large scores",
    "zero scale",
    "soft cap",
    "bias of minus infinity",
    "all features",
)
SERVED = [case for case in cases.CASES if case.name != "negative scale"]


def judge_emulated(case):
    qkv, _, options = case.problem("bfloat16")
    with emulator.emulated(pytest.MonkeyPatch()):
        _, log_sum = run_forward(checked(qkv, options | ASKED))
    judge_max_logits(case, "bfloat16", log_sum.max_logits.max(axis=2))


@pytest.mark.parametrize("case", [LONG, LONG_CAUSAL], ids=["full", "causal"])
def test_max_logits_of_many_blocks(case, kernel_case):
    """Weights are relative to a maximum that lags behind."""
    judge_emulated(case)


@cases.parametrize(names=CASES, others_extended=True, table=SERVED)
def test_max_logits_of_each_case(case, kernel_case):
    judge_emulated(with_heads(case, 64))


@cases.parametrize(
    names=["soft cap", "all features"],
    others_extended=True,
    table=SERVED,
)
def test_max_logits_of_wide_heads(case, kernel_case):
    """Two warpgroups hand the largest score of all blocks to each other."""
    judge_emulated(with_heads(case, 320))


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    cases.default(
        [(40, 72), (192, 128), (576, 512)],
        [(40, 72), (192, 128), (256, 256), (576, 512), (64, 264)],
    ),
)
def test_max_logits_of_other_head_dims(head_dim, value_dim, kernel_case):
    judge_emulated(dataclasses.replace(LONG_CAUSAL, T=100, S=150, H=head_dim, V=value_dim))


@pytest.mark.parametrize(
    "name",
    cases.default(
        ["full", "everything at once"], ["full", "everything at once", "soft cap", "sinks"]
    ),
)
def test_max_logits_of_decoding(name, kernel_case):
    """Splits of the keys, and the consumers of a split, have maxima of their own."""
    judge_emulated(with_heads(with_few(cases.BY_NAME[name]), 64, S=1100))
