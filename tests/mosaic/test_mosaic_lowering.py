"""Calls that "mosaic" serves lower for a Hopper GPU that is not here, in both backward modes.

So do transformations of such calls and calls on a mesh, each pass by who was chosen for it.

Lowering knows what Pallas has for Mosaic GPU, which the emulator does not: layouts, operations and
sizes that it refuses. All of it happens under JAX's strict switches.
"""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases, jaxprs, oracle
from support.described_gpus import described_gpu
from support.few_queries import with_few
from support.lowered import SHAPE, attention, gradients, launches, lowered
from support.mosaic_cases import checked, run_forward
from support.strict import strictly

import pallas_flash
from pallas_flash import ScoreMod
from pallas_flash._backends.mosaic import backward_dbias, common, forward_kernel, forward_tiles
from pallas_flash._call.tune import _problem
from pallas_flash._execution import limits
from pallas_flash._problem import features
from pallas_flash._problem.features import features_of
from pallas_flash._problem.scores import LogSum
from pallas_flash._problem.tile_sizes import padded
from pallas_flash._selection import resolve
from pallas_flash.masks import BlockMask
from pallas_flash.tuning import ForwardTile, TileSizes

plgpu = common.plgpu

# Ranges and lists of tiles, lengths with padding, and all options. All take as long.
IN_DEFAULT = (
    "lengths of zero",
    "documents, causal, long",
    "blocks and predicate",
    "all features",
)
SERVED = [cases.BY_NAME[name] for name in cases.SERVED_ON_HOPPER]


def launches_of(case, reproducible: bool) -> int:
    """Return the launches of "mosaic" in forward and backward."""
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
        return launches(traced.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize("reproducible", [False, True], ids=["one-pass", "in-order"])
@cases.parametrize(names=IN_DEFAULT, others_extended=True, table=SERVED)
def test_lowers(case, reproducible):
    qkv, _, options = case.problem("bfloat16")
    if limits.backward_limit(_problem(qkv, options), "mosaic"):
        assert launches_of(case, reproducible) == 1
    else:
        # Forward, delta, and the backward in one pass with its rows, or in two.
        assert launches_of(case, reproducible) >= 4 + ("bias" in options)


@pytest.mark.parametrize("name", cases.default(["causal"], ["full", "causal"]))
def test_clusters_lower(name):
    sizes = dict(B=1, T=4096, S=4096, N=16, K=8, H=128, V=128)
    case = dataclasses.replace(cases.BY_NAME[name], **sizes)
    assert (
        forward_tiles.default_tile(
            features_of(_problem(*case.problem("bfloat16")[::2]))
        ).cluster_size
        == 2
    )
    assert launches_of(case, reproducible=False) >= 4


@pytest.mark.parametrize("reproducible", [False, True], ids=["one-pass", "in-order"])
@pytest.mark.parametrize("head_dim", [192, 256])
def test_largest_heads_have_room_for_statistics(head_dim, reproducible):
    """A row of scores that may be large has two, in shared memory that is nearly full."""
    case = dataclasses.replace(cases.BY_NAME["large scores"].scaled(5), H=head_dim, V=head_dim)
    assert launches_of(case, reproducible) >= 5


def test_dbias_stages_leave_room_for_statistics():
    """The case has a bias in 32 bits, and scores that may be large."""
    case = dataclasses.replace(cases.BY_NAME["bias"].scaled(5), H=80, V=80)
    assert launches_of(case, False) >= 5


class Launched(Exception):
    """In place of a launch, with what it allocates."""


def allocated(memory) -> int:
    """Bytes of shared memory: arrays, each of which begins at a multiple of 1 KiB, and barriers."""
    barriers = [x for x in memory if isinstance(x, plgpu.Barrier)]
    arrays = [x.inner_aval for x in memory if not isinstance(x, plgpu.Barrier)]
    sizes = [-(-x.size * x.dtype.itemsize // 1024) * 1024 for x in arrays]
    return sum(sizes) + 8 * sum(math.prod(x.num_barriers) for x in barriers)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dbias_fits_at_all_head_dims(dtype, monkeypatch):
    """The kernel has a stage or more in the memory that it asks for where scores may be large."""

    def launch(*args, memory, **others):
        raise Launched(allocated(jax.tree.leaves(memory)))

    def run(q, k, v, do, row, bias):
        problem = checked((q, k, v), dict(bias=bias))
        assert problem.large
        tile = backward_dbias.default_tile(problem)
        assert tile.stages >= 1, (q.shape, v.shape)
        backward_dbias.dbias(problem, do, LogSum(row, row), row, tile)

    monkeypatch.setattr(common, "launch", launch)
    row, bias = (
        jax.ShapeDtypeStruct(*x) for x in (((1, 2, 300), "float32"), ((1, 2, 300, 400), dtype))
    )
    sizes = range(8, 257, 8)
    for head_dim, value_dim in {padded(*x) for x in itertools.product(sizes, sizes)}:
        shapes = (300, head_dim), (400, head_dim), (400, value_dim), (300, value_dim)
        rows = [jax.ShapeDtypeStruct((1, n, 2, size), "bfloat16") for n, size in shapes]
        with described_gpu("NVIDIA H200"), pytest.raises(Launched) as launched:
            jax.eval_shape(run, *rows, row, bias)
        assert launched.value.args[0] <= 227 * 1024, (head_dim, value_dim)


BIASED = [
    *itertools.product((64, 80, 128, 256), ("bfloat16", "float32"), (1,)),
    (128, "bfloat16", 2),
]


def forward_with_bias(q, bias, tile=None, **options):
    """The output of a call with this bias."""
    problem = checked((q, q, q), dict(bias=bias) | options)
    return run_forward(problem, TileSizes(forward=tile))


@pytest.mark.parametrize(
    ("size", "dtype", "programs"), cases.default([BIASED[2], BIASED[-1]], BIASED)
)
def test_tiles_of_a_bias_lower(size, dtype, programs):
    """For arrays that end within a tile, of instances that have their own."""
    tile = None if programs == 1 else ForwardTile(block_kv=96, cluster_size=programs)
    call = functools.partial(forward_with_bias, tile=tile, is_causal=True)
    shapes = [jax.ShapeDtypeStruct((3, 2, 104, 2, size), "bfloat16")]
    shapes += [jax.ShapeDtypeStruct((3, 1, 2, 104, 104), dtype)]
    assert launches(lowered(jax.vmap(call), shapes=shapes).as_text()) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [{}, dict(lengths=True)], ids=["", "lengths"])
def test_tiles_of_a_bias_fit_at_all_head_dims(dtype, options, monkeypatch):
    """By what the kernel asks for; and no slot less than there is room for."""

    def launch(*args, memory, **others):
        raise Launched(allocated(jax.tree.leaves(memory)))

    found = []

    def run(q, v, bias, lengths):
        arrays = dict(key_value_seq_lengths=lengths) if options else {}
        problem = checked((q, q, v), dict(bias=bias) | arrays)
        assert problem.large
        tile = forward_tiles.default_tile(features_of(problem))
        pipeline = forward_kernel.scratch(problem, tile).bias
        slots = pipeline.stages if pipeline else 0
        each = tile.warpgroups * 64 * tile.block_kv * bias.dtype.itemsize
        found.append((each, slots, tile.stages))
        found.append(common.smem_bytes(forward_kernel.scratch(problem, tile)))
        run_forward(problem)

    monkeypatch.setattr(common, "launch", launch)
    bias = jax.ShapeDtypeStruct((1, 2, 400, 400), dtype)
    lengths = jax.ShapeDtypeStruct((1,), "int32")
    for head_dim, value_dim in itertools.product(range(64, 257, 64), repeat=2):
        q, v = (jax.ShapeDtypeStruct((1, 400, 2, x), "bfloat16") for x in (head_dim, value_dim))
        with described_gpu("NVIDIA H200"), pytest.raises(Launched) as launched:
            jax.eval_shape(run, q, v, bias, lengths)
        [used], (each, slots, stages), counted = launched.value.args, *found[-2:]
        assert used <= counted <= 227 * 1024, (head_dim, value_dim)
        assert slots == stages or counted + each > 227 * 1024, (head_dim, value_dim)
        assert slots or (dtype == "float32" and max(head_dim, value_dim) > 192)


@cases.parametrize(names=["lengths of zero", "all features"], more=["documents in pairs", "sinks"])
def test_decode_lowers(case):
    case = dataclasses.replace(with_few(case, 3), S=1500)
    assert launches_of(case, False) >= 1


# ------------------------------------------------------------------------------------------------
# What JAX makes of calls: transformations, meshes, and who was chosen for a pass.

ROWS = P("batch", None, "heads")


def documents(q, k, v):
    """Attention whose mask only the GPU knows, so that programs take items from one list."""
    begins = jnp.max(q, axis=(2, 3)) > 0
    return attention(q, k, v, segment_ids=jnp.cumsum(begins, axis=1, dtype=jnp.int32))


IDS = ["causal", "documents"]
CALLS = pytest.mark.parametrize("call", [attention, documents], ids=IDS)
# Where nothing else has values for each of them.
DOCUMENTS = pytest.mark.parametrize(
    "call", cases.default([documents], [attention, documents]), ids=IDS
)


# Launches of a call with its gradients: forward, delta, backward, and what makes rows of dq's sums.
ONE_PASS = 4


@CALLS
@pytest.mark.parametrize(
    ("transform", "shape"),
    [
        pytest.param(lambda function: function, SHAPE, id="alone", marks=pytest.mark.extended),
        pytest.param(jax.checkpoint, SHAPE, id="remat"),
        pytest.param(jax.vmap, (2, *SHAPE), id="vmap", marks=pytest.mark.extended),
        pytest.param(
            lambda function: jax.vmap(jax.vmap(function)), (2, 3, *SHAPE), id="vmap-twice"
        ),
    ],
)
def test_transformations_lower(transform, shape, call):
    assert launches(lowered(transform(call), shape).as_text()) == 1
    passes = functools.partial(gradients, call=call)
    assert launches(lowered(transform(passes), shape).as_text()) == ONE_PASS


BLOCKS = BlockMask(np.ones((1, 1, 64, 64), bool), 128, 128)
PLANS = [
    (128, {}, (ONE_PASS, 0)),
    (192, {}, (ONE_PASS, 0)),
    (256, {"reproducible": True}, (ONE_PASS, 0)),
    (64, {"reproducible": True, "mask": BLOCKS}, (1, 3)),
    (64, {"implementation": "mosaic", "reproducible": True}, (ONE_PASS, 0)),
    (128, {"implementation": "triton"}, (0, 4)),
]
MORE_PLANS = [
    (64, {}, (ONE_PASS, 0)),
    (256, {}, (ONE_PASS, 0)),
    (64, {"reproducible": True}, (ONE_PASS, 0)),
    (64, {"implementation": "mosaic"}, (ONE_PASS, 0)),
]


@pytest.mark.parametrize(
    ("head_dim", "options", "launched"),
    cases.default(PLANS, PLANS + MORE_PLANS),
    ids=lambda x: "-".join(x) if isinstance(x, dict) else str(x),
)
def test_each_pass_follows_its_plan(head_dim, options, launched):
    """The kernels are those of "mosaic" and "triton", in a long call with many programs."""
    call = functools.partial(attention, **{"implementation": None} | options)
    shape = 2, 8192, 2048 // head_dim, head_dim
    text = lowered(functools.partial(gradients, call=call), shape).as_text()
    assert (launches(text), text.count("@__gpu$xla.gpu.triton")) == launched


@pytest.mark.parametrize("reproducible", [False, True], ids=["one-pass", "in-order"])
@pytest.mark.parametrize("head_dim", cases.default([80, 256], [64, 80, 128, 256]))
def test_the_backward_takes_any_length_as_it_is(head_dim, reproducible):
    """The length is no multiple of 8."""
    call = functools.partial(attention, implementation="mosaic", reproducible=reproducible)
    text = lowered(functools.partial(gradients, call=call), (2, 1500, 2, head_dim)).as_text()
    assert not re.search(r"stablehlo.pad .*tensor<2x150\dx2x\d+xbf16>", text)


def test_reads_of_score_functions_have_no_derivative():
    """Pallas could not compute it, and the emulator does not see it."""
    slopes = jnp.ones(4, jnp.float32)

    def wave(s, b, h, q, k, slopes):
        return s * jnp.tanh(s) * slopes[h] + slopes[(q + k) % 4]

    call = functools.partial(attention, score_mod=ScoreMod(wave, (slopes,)))
    assert launches(lowered(functools.partial(gradients, call=call)).as_text()) == ONE_PASS


@CALLS
@pytest.mark.parametrize("x64", [False, True])
def test_lowers_under_strict_switches_of_jax(x64, call):
    # Pallas keeps references to tracers in the kernels' own.
    with strictly(x64=x64, leaks=False):
        function = functools.partial(gradients, call=call)
        assert launches(lowered(function).as_text()) == ONE_PASS


def test_export_for_a_gpu_that_is_not_here():
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    with described_gpu("NVIDIA H200"):
        export = jax.export.export(jax.jit(gradients), platforms=["cuda"], disabled_checks=[check])
        exported = export(x, x, x)
    assert exported.platforms == ("cuda",)
    assert launches(exported.mlir_module()) == ONE_PASS


def gpus(kind):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    return AbstractMesh((2, 2), ("batch", "heads"), axis_types=(kind,) * 2, abstract_device=device)


def traced_on(mesh, function):
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=NamedSharding(mesh, ROWS))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(x, x, x)


def within_shard_map(mesh, call, check_vma):
    def run(q, k, v):
        specs = dict(in_specs=(ROWS, ROWS, ROWS), out_specs=(ROWS, ROWS))
        return gradients(q, k, v, jax.shard_map(call, mesh=mesh, check_vma=check_vma, **specs))

    return run


KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


@CALLS
@KINDS
@pytest.mark.parametrize("check_vma", [True, False])
def test_lowers_inside_shard_map(check_vma, kind, call):
    mesh = gpus(kind)
    traced = traced_on(mesh, within_shard_map(mesh, call, check_vma))
    with jax.sharding.use_abstract_mesh(mesh):
        assert launches(traced.lower(lowering_platforms=("cuda",)).as_text()) == ONE_PASS


@DOCUMENTS
def test_lowers_where_an_explicit_axis_is_mapped(call):
    mesh = gpus(AxisType.Explicit)
    rows = NamedSharding(mesh, P("batch", None, None, "heads"))
    x = jax.ShapeDtypeStruct((2, *SHAPE), jnp.bfloat16, sharding=rows)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.vmap(functools.partial(gradients, call=call))).trace(x, x, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert launches(text) == ONE_PASS


@DOCUMENTS
def test_lowers_for_an_explicit_mesh(call):
    mesh = gpus(AxisType.Explicit)
    traced = traced_on(mesh, functools.partial(gradients, call=call))
    with jax.sharding.use_abstract_mesh(mesh):
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert launches(text) == ONE_PASS


def test_shards_have_kernels_the_whole_has_not(monkeypatch):
    """Steps of a ring in `balanced_order`, of which the call as a whole compares positions."""
    rules = resolve.faster_by_mosaic

    def unless_positions(call):
        return call.f.mask is not features.MaskKind.OTHER and rules(call)

    monkeypatch.setattr(resolve, "faster_by_mosaic", unless_positions)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    kind = (AxisType.Explicit,)
    mesh = AbstractMesh((2,), ("sequence",), axis_types=kind, abstract_device=device)
    rows = NamedSharding(mesh, P(None, "sequence"))
    x = jax.ShapeDtypeStruct((4, 16384, 16, 128), jnp.bfloat16, sharding=rows)
    where = jax.ShapeDtypeStruct((1, 16384), jnp.int32, sharding=rows)

    def run(x, where):
        places = dict(query_positions=where, key_value_positions=where)
        how = dict(is_causal=True, context_parallelism="ring", **places)
        assert pallas_flash.explain(x, x, x, **how).implementation == "triton"
        return pallas_flash.attention(x, x, x, **how)

    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(run).trace(x, where).lower(lowering_platforms=("cuda",)).as_text()
    assert launches(text) == 3


def test_auto_axes_are_left_to_the_partitioner():
    eqns = jaxprs.equations(traced_on(gpus(AxisType.Auto), gradients).jaxpr.jaxpr)
    assert len([e for e in eqns if e.primitive.name == "custom_partitioning"]) == 2
