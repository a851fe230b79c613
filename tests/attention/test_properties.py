"""Whole problems drawn at random obey the rule of test_accuracy, by the kernels or by the blocked
XLA path in turns.

The default run has a few small problems of the list, which have each option at least twice. NumPy
draws them from their numbers, so they are the same everywhere.
"""

import pytest
from support import cases
from support.judge import judge, measured
from support.random_problems import WORST, draw

# The first one is computed by both.
FEW = 3, 27, 38, 65, 83, 113, 123, 125, 129, 164, 182, 202, 211, 235, 241, 277, 279, 285, 296, 311
BY = "interpret", "xla"


def row(number):
    return number, BY if number == FEW[0] else (BY[number % 2],)


@pytest.mark.parametrize(
    ("number", "implementations"),
    cases.default(list(map(row, FEW)), list(map(row, range(320)))),
    ids=lambda x: "-".join(x) if isinstance(x, tuple) else None,
)
def test_random_problem_as_accurate_as_dense(number, implementations, kernel_case):
    case, dtype, tiles = draw(number)
    for implementation in implementations:
        sizes = tiles if implementation == "interpret" else None
        judge(case, dtype, measured(case, dtype, implementation, config=sizes), worst=WORST)
