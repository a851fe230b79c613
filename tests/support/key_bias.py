"""The rule for gradients where keys have a common part, see `cases.Case.key_bias`."""

import numpy as np
from support import oracle

BIAS = 50.0


def relative_error(x, exact):
    return np.linalg.norm(np.asarray(x, np.float64) - exact) / np.linalg.norm(exact)


def assert_as_dense(results, problem, names=("dq",), factor=2.0):
    """Asserts that results of a problem, as `oracle.names` has them, are as accurate as dense ones.

    Dense attention subtracts from dp a sum that it computes itself. The allowance of
    `support.judge` for a delta from the rounded output is none here.
    """
    qkv, cotangents, options = problem
    truth = oracle.solve(*qkv, *cotangents, **options)
    operands, rest = oracle.split(options)
    dense = oracle.compiled(
        lambda *args, **operands: oracle.differentiate(
            lambda *a, **o: oracle.dense(*a, **o, **rest), *args, **operands
        )
    )(*qkv, *cotangents, **operands)
    for name in names:
        i = oracle.NAMES.index(name)
        ours, theirs = (relative_error(x[i], truth.values[name]) for x in (results, dense))
        assert ours <= factor * theirs, f"{name}: {ours:.2e} > {factor} * {theirs:.2e}"
