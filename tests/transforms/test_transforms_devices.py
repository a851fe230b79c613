"""Programs for devices that are not here: lowered, exported, and divided by a mesh.

More of meshes is in test_sharding.py.
"""

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.export
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import children, oracle
from support.described_gpus import described_gpu
from support.transform_cases import (
    FLOATS,
    MASKED,
    POSITIONS,
    assert_close,
    draw_all,
    make_tiles_small,
    masked,
    output_and_gradients,
)

pytestmark = pytest.mark.usefixtures("ieee_products", "small_tiles")

# ------------------------------------------------------------------------------------------------
# Lowering and export
# ------------------------------------------------------------------------------------------------


def test_lowering_for_a_gpu_does_not_warn():
    with described_gpu("NVIDIA H200"), warnings.catch_warnings():
        warnings.simplefilter("error")
        run = jax.jit(output_and_gradients(masked("triton")))
        text = run.trace(draw_all(*POSITIONS)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 4


def test_export_for_absent_gpu():
    check = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    arguments = draw_all(*POSITIONS)
    run = jax.jit(output_and_gradients(masked("triton")))
    with described_gpu("NVIDIA H200"):
        exported = jax.export.export(run, platforms=["cuda"], disabled_checks=[check])(arguments)
    assert exported.platforms == ("cuda",)
    assert exported.mlir_module().count("@__gpu$xla.gpu.triton") == 4
    shapes = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    want = jax.eval_shape(output_and_gradients(masked("reference")), arguments)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), want
    )


def test_one_export_for_several_platforms():
    arguments = draw_all(*MASKED)
    run = jax.jit(output_and_gradients(masked("xla")))
    exported = jax.export.export(run, platforms=["cpu", "cuda", "tpu"])(arguments)
    called = oracle.compiled(lambda arguments: exported.call(arguments))(arguments)
    dense = oracle.compiled(output_and_gradients(masked("reference")))(arguments)
    assert_close(called, dense)


# ------------------------------------------------------------------------------------------------
# Sharding
# ------------------------------------------------------------------------------------------------

ROWS, LENGTHS = P("batch", None, "heads"), P("batch")
# The bias is the same for all examples: its gradient is a sum over devices.
SPECS = {
    "query": ROWS,
    "key": ROWS,
    "value": ROWS,
    "key_value_seq_lengths": LENGTHS,
    "query_seq_lengths": LENGTHS,
    "bias": P("heads"),
    "scale": P(),
}


def sharded(implementation: str, arguments, mesh, check_vma: bool) -> Callable:
    in_specs = {name: SPECS[name] for name in arguments}
    return jax.shard_map(
        masked(implementation, return_lse=True),
        mesh=mesh,
        in_specs=(in_specs,),
        out_specs=(ROWS, ROWS),
        check_vma=check_vma,
    )


# With the kind of the mesh's axes and shard_map's own check. Without shard_map (None), XLA divides.
SHARDED = [
    ("xla", AxisType.Auto, True),
    ("xla", AxisType.Auto, False),
    ("xla", AxisType.Explicit, True),
    ("xla", AxisType.Auto, None),
    ("interpret", AxisType.Auto, True),
    ("interpret", AxisType.Auto, False),
    ("interpret", AxisType.Explicit, True),
]


def check_sharding_on_four_devices():
    """Runs in a process of its own, see below."""
    make_tiles_small(setattr)
    assert len(jax.devices()) == 4
    for implementation, axis_type, check_vma in SHARDED:
        arguments = draw_all("scale", *MASKED, *(["bias"] if implementation == "xla" else []))
        mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(axis_type,) * 2)
        placed = {
            name: jax.device_put(x, NamedSharding(mesh, SPECS[name]))
            for name, x in arguments.items()
        }
        fn = masked(implementation, return_lse=True)
        if check_vma is not None:
            fn = sharded(implementation, arguments, mesh, check_vma)
        dense = masked("reference", return_lse=True)
        got = oracle.compiled(output_and_gradients(fn))(placed)
        assert_close(got, oracle.compiled(output_and_gradients(dense))(arguments))
        print("agrees:", implementation, axis_type, check_vma)


@pytest.mark.extended
def test_sharding_by_batch_and_heads():
    here = Path(__file__)
    paths = os.pathsep.join(map(str, here.parents[:3]))
    flags = f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}"
    code = f"import {here.stem}; {here.stem}.check_sharding_on_four_devices()"
    child = children.run(
        [sys.executable, "-c", code],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.count("agrees") == len(SHARDED)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_kernels_lower_inside_shard_map(axis_type, check_vma):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh(
        (2, 2), ("batch", "heads"), axis_types=(axis_type,) * 2, abstract_device=device
    )
    arguments = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, SPECS[name]))
        for name, x in draw_all("scale", *MASKED).items()
    }
    with jax.sharding.use_abstract_mesh(mesh):

        def run(arguments):
            fn = sharded("triton", arguments, mesh, check_vma)
            inputs = {name: x for name, x in arguments.items() if name in FLOATS}
            out, pull = jax.vjp(lambda inputs: fn(arguments | inputs), inputs)
            return pull(out)

        lowered = jax.jit(run).trace(arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 4
