"""The rule for gradients of queries where keys have a common part, see `cases.Case.key_bias`."""

import numpy as np
from support import oracle

BIAS = 50.0


def relative_error(dq, truth):
    exact = truth.values["dq"]
    return np.linalg.norm(np.asarray(dq, np.float64) - exact) / np.linalg.norm(exact)


def assert_as_dense(dq, problem, factor=2.0):
    """Asserts the rule for the gradient of the queries of a problem."""
    qkv, cotangents, options = problem
    truth = oracle.solve(*qkv, *cotangents, **options)
    operands, rest = oracle.split(options)
    dense = oracle.compiled(
        lambda *args, **operands: oracle.differentiate(
            lambda *a, **o: oracle.dense(*a, **o, **rest), *args, **operands
        )
    )(*qkv, *cotangents, **operands)[2]
    ours, theirs = relative_error(dq, truth), relative_error(dense, truth)
    assert ours <= factor * theirs, f"{ours:.2e} > {factor} * {theirs:.2e}"
