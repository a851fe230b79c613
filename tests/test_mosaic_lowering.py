"""What "mosaic" serves lowers for a Hopper GPU that is not here, in both modes of its backward.

Lowering knows what Pallas has for Mosaic GPU, which the emulator does not: layouts, operations and
sizes that it refuses. All of it happens under JAX's strict switches.
"""

import dataclasses
import functools
import re

import cases
import jax
import oracle
import pytest
from described_gpus import described_gpu
from strict import strictly
from test_decode import with_few

import pallas_flash
from pallas_flash import _compat, _select
from pallas_flash._tiling.tune import _problem

# JAX 0.10.2 has not the operations that the kernels use: the others, on which .ci/run tests this
# file too, have.
if not _compat.has_mosaic_gpu():
    pytest.skip("JAX is too old; test_select has what is said then", allow_module_level=True)

# Ranges and lists of tiles, and all options. All take as long.
IN_DEFAULT = ("documents, causal, long", "blocks and predicate", "all features")
SERVED = [cases.BY_NAME[name] for name in cases.SERVED_ON_HOPPER]


def launches(case, reproducible: bool) -> int:
    """Those of "mosaic" in forward and backward."""
    qkv, cotangents, options = case.problem("bfloat16")
    operands, options = oracle.split(options)
    arrays, constant = {}, {}
    for name, x in options.items():
        (arrays if isinstance(x, jax.Array) else constant)[name] = x

    def gradients(qkv, cotangents, operands, arrays):
        def call(qkv, operands):
            call = functools.partial(
                pallas_flash.attention,
                **operands,
                **arrays,
                **constant,
                return_lse=True,
                implementation="mosaic",
                reproducible=reproducible,
            )
            return call(*qkv)

        return jax.vjp(call, qkv, operands)[1](cotangents)

    with strictly(leaks=False), described_gpu("NVIDIA H200"):
        traced = jax.jit(gradients).trace(qkv, cotangents, operands, arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall(r"@mosaic_gpu\w*\(", text))


@pytest.mark.parametrize("reproducible", [False, True], ids=["one-pass", "in-order"])
@cases.parametrize(names=IN_DEFAULT, others_extended=True, table=SERVED)
def test_lowers(case, reproducible):
    qkv, _, options = case.problem("bfloat16")
    if _select.mosaic_backward_limit(_problem(qkv, options)):
        assert launches(case, reproducible) == 1
    else:
        of_bias = "bias" in options
        assert launches(case, reproducible) >= (3 if reproducible else 2) + of_bias


@pytest.mark.parametrize("head_dim", [192, 256])
def test_the_largest_heads_leave_room_for_all_statistics(head_dim):
    """Of scores that may be large a row has two, in shared memory that is nearly full."""
    case = dataclasses.replace(cases.BY_NAME["large scores"].scaled(5), H=head_dim, V=head_dim)
    for reproducible in (False, True):
        assert launches(case, reproducible) >= 3


def test_two_slots_of_the_gradient_of_a_bias_leave_room_for_all_statistics():
    """The case has a bias in 32 bits, and scores that may be large."""
    case = dataclasses.replace(cases.BY_NAME["bias"].scaled(5), H=80, V=80)
    assert launches(case, False) >= 3


@cases.parametrize(names=["lengths of zero", "documents in pairs", "sinks", "all features"])
def test_few_queries_lower(case):
    case = dataclasses.replace(with_few(case, 3), S=1500)
    assert launches(case, False) >= 1
