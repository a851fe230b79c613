"""What "mosaic" serves lowers for a Hopper GPU that is not here, in both modes of its backward.

Lowering knows what Pallas has for Mosaic GPU, which the emulator does not: layouts, operations and
sizes that it refuses. All of it happens under JAX's strict switches.
"""

import dataclasses
import functools
import itertools
import math
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

from test_mosaic import checked

from pallas_flash._mosaic import backward_dbias, common, tiles
from pallas_flash._scores import LogSum

plgpu = common.plgpu

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


class Launched(Exception):
    """In place of a launch, with what it allocates."""


def allocated(memory) -> int:
    """Bytes of shared memory: arrays, each of which begins at a multiple of 1 KiB, and barriers."""
    barriers = [x for x in memory if isinstance(x, plgpu.Barrier)]
    arrays = [x.inner_aval for x in memory if not isinstance(x, plgpu.Barrier)]
    sizes = [-(-x.size * x.dtype.itemsize // 1024) * 1024 for x in arrays]
    return sum(sizes) + 8 * sum(math.prod(x.num_barriers) for x in barriers)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradient_of_a_bias_fits_at_all_head_sizes(dtype, monkeypatch):
    """With a slot or more, by what its kernel asks for where scores may be large."""

    def launch(*args, memory, **others):
        raise Launched(allocated(memory.values()))

    def run(q, k, v, do, row, bias):
        problem = checked((q, k, v), dict(bias=bias))
        assert problem.large
        tile = tiles.dbias_tile(problem)
        assert tile.stages >= 1, (q.shape, v.shape)
        backward_dbias.dbias(problem, do, LogSum(row, row), row, tile)

    monkeypatch.setattr(common, "launch", launch)
    row, bias = (
        jax.ShapeDtypeStruct(*x) for x in (((1, 2, 300), "float32"), ((1, 2, 300, 400), dtype))
    )
    sizes = range(8, 257, 8)
    for head_dim, value_dim in {tiles.padded(*x) for x in itertools.product(sizes, sizes)}:
        shapes = (300, head_dim), (400, head_dim), (400, value_dim), (300, value_dim)
        rows = [jax.ShapeDtypeStruct((1, n, 2, size), "bfloat16") for n, size in shapes]
        with described_gpu("NVIDIA H200"), pytest.raises(Launched) as launched:
            jax.eval_shape(run, *rows, row, bias)
        assert launched.value.args[0] <= 227 * 1024, (head_dim, value_dim)


@cases.parametrize(names=["lengths of zero", "documents in pairs", "sinks", "all features"])
def test_few_queries_lower(case):
    case = dataclasses.replace(with_few(case, 3), S=1500)
    assert launches(case, False) >= 1
