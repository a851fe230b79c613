"""The largest score of each head, as dense attention has it: by every implementation and case."""

import functools

import jax
import pytest
from support import cases, oracle
from support.few_queries import SERVED as FEW_QUERIES
from support.few_queries import with_few
from support.judge import SMALL, judge_max_logits
from support.strict import strictly

import pallas_flash
from pallas_flash import _xla

IMPLEMENTATIONS = ("interpret", "xla", "reference")


@pytest.fixture
def small_blocks(monkeypatch):
    """Several tiles of "xla" in short sequences, too."""
    monkeypatch.setattr(_xla, "BLOCK_Q", 16)
    monkeypatch.setattr(_xla, "BLOCK_KV", 32)


def call_of(implementation, options, **extra):
    if implementation == "interpret":
        extra = {"tile_sizes": SMALL} | extra
    return functools.partial(
        pallas_flash.attention,
        return_max_logits=True,
        implementation=implementation,
        **options,
        **extra,
    )


# The kernels take the longest to compile: by default those where scores are made in another way.
BY_KERNELS = (
    "T of several tiles, S of one",
    "causal, first queries see nothing",
    "everything at once",
    "large scores",
    "negative scale",
    "zero scale",
    "soft cap, bias",
    "sinks, causal, first queries see nothing",
    "bias of minus infinity",
    "all features",
)
CASES = [("xla", case) for case in cases.CASES]
CASES += [("interpret", cases.BY_NAME[name]) for name in BY_KERNELS]
OTHERS = [(by, case) for by in IMPLEMENTATIONS for case in cases.CASES if (by, case) not in CASES]


@pytest.mark.parametrize(
    ("implementation", "case"),
    cases.default(CASES, CASES + OTHERS),
    ids=lambda x: x if isinstance(x, str) else x.name.replace(" ", "-"),
)
def test_max_logits_of_each_case(case, implementation, small_blocks):
    qkv, _, options = case.problem()
    with strictly(x64=False, leaks=False):
        _, found = oracle.compiled(call_of(implementation, options))(*qkv)
    judge_max_logits(case, "float32", found)


@cases.parametrize(names=["full", "everything at once", "large scores"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_max_logits_in_bfloat16(case, implementation):
    """They are float32, and no score is rounded to 16 bits."""
    qkv, _, options = case.problem("bfloat16")
    _, found = oracle.compiled(call_of(implementation, options))(*qkv)
    judge_max_logits(case, "bfloat16", found)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_max_logits_in_float64(implementation):
    with jax.enable_x64(True):
        case = cases.BY_NAME["everything at once"]
        problem = case.problem("float64")
        qkv, _, options = problem
        _, found = oracle.compiled(call_of(implementation, options))(*qkv)
        judge_max_logits(case, "float64", found)


@cases.parametrize(
    names=["one key/value head", "everything at once", "soft cap", "sinks"],
    others_extended=True,
    table=FEW_QUERIES,
)
def test_max_logits_of_decoding(case):
    """Splits of the keys have maxima of their own."""
    case = with_few(case)
    qkv, _, options = case.problem()
    _, found = oracle.compiled(call_of("interpret", options))(*qkv)
    judge_max_logits(case, "float32", found)
