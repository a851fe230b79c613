"""Every argument of `attention` together with every other: each pair of settings works, forward and
backward, or raises and says why.

Each call combines many settings, so that few calls have all pairs (a covering array, found
greedily).
"""

import itertools

import pytest
from support import cases, lowered_triton, oracle
from support.judge import ROUNDING, SMALL, measured
from support.pairs_of_settings import REFUSED, SETTINGS, call_of, covering, pairs

import pallas_flash
from pallas_flash._backends import xla

ROWS = covering(SETTINGS)


def test_every_pair_of_settings_occurs():
    found = set().union(*map(pairs, ROWS))
    for (a, settings), (b, others) in itertools.combinations(sorted(SETTINGS.items()), 2):
        for pair in itertools.product(
            [(a, i) for i in range(len(settings))], [(b, j) for j in range(len(others))]
        ):
            assert (pair in found) != (pair in REFUSED), pair


def check(row, run):
    """`run` takes a problem, as `Case.problem` gives it."""
    _, problem = call_of(row)
    qkv, cotangents, options = problem
    truth, results = oracle.solve(*qkv, *cotangents, **options), run(problem)
    # A wrong result has a larger error; test_accuracy has tighter limits.
    roundings = 10 * ROUNDING[qkv[0].dtype.name]
    for name, x in zip(oracle.names(options), results, strict=True):
        error = oracle.errors(x, truth, name)["l2"]
        assert error <= oracle.natural(roundings, truth, name), name


WAYS = {
    "lowered": lambda problem: lowered_triton.differentiated(problem)[0],
    "interpret": lambda problem: measured(None, None, "interpret", problem, config=SMALL),
    "xla": lambda problem: measured(None, None, "xla", problem),
}


@pytest.mark.parametrize(
    "row", cases.default(ROWS[:2], ROWS), ids=lambda row: "".join(map(str, row.values()))
)
@pytest.mark.parametrize("way", cases.default(["lowered", "xla"], WAYS))
def test_row_of_settings_is_accurate(row, way, monkeypatch, request):
    if way != "xla":
        request.getfixturevalue("kernel_case")
    monkeypatch.setattr(xla, "BLOCK_Q", 16)
    monkeypatch.setattr(xla, "BLOCK_KV", 32)
    check(row, WAYS[way])


@pytest.mark.parametrize("pair", REFUSED, ids=str)
def test_impossible_pair_raises(pair):
    _, (qkv, _, options) = call_of(dict.fromkeys(SETTINGS, 0) | dict(pair))
    with pytest.raises(ValueError, match=REFUSED[pair]):
        pallas_flash.attention(*qkv, **options)
