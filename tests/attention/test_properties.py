"""Whole problems drawn at random obey the rule of test_accuracy, by the kernels or by the blocked
XLA path in turns.

The default run has one problem of the list, by both. NumPy draws them from their numbers, so they
are the same everywhere.
"""

import pytest
from support import cases
from support.judge import judge, measured
from support.random_problems import WORST, draw

NUMBERS = range(320)


BY = "interpret", "xla"
FIRST = [(3, BY)]
TABLE = [*FIRST, *((n, (BY[n % 2],)) for n in NUMBERS if n != FIRST[0][0])]


@pytest.mark.parametrize(
    ("number", "implementations"),
    cases.default(FIRST, TABLE),
    ids=lambda x: "-".join(x) if isinstance(x, tuple) else None,
)
def test_random_problem_as_accurate_as_dense(number, implementations, kernel_case):
    case, dtype, tiles = draw(number)
    for implementation in implementations:
        sizes = tiles if implementation == "interpret" else None
        judge(case, dtype, measured(case, dtype, implementation, tile_sizes=sizes), worst=WORST)
