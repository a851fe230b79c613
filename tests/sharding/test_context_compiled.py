"""A sequence that devices divide, in the programs that XLA compiles for several GPUs."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import attention
from scripts.maintenance.inspection import gpu_compiler

# That compiler is the extra `inspect`: .ci/run installs it for one JAX and runs this file there.
pytestmark = pytest.mark.skipif(
    bool(gpu_compiler.missing()), reason=gpu_compiler.missing() or "everything is here"
)


def compiled_for_gpus(devices: int, length: int, heads: int, kv_heads: int):
    """The causal ring, forward and backward, on so many H200s."""
    mesh = gpu_compiler.mesh_of("h200", devices, "sequence")
    rows = NamedSharding(mesh, P(None, "sequence"))
    q, k = (
        jax.ShapeDtypeStruct((1, length, n, 64), jnp.bfloat16, sharding=rows)
        for n in (heads, kv_heads)
    )
    call = functools.partial(
        attention, is_causal=True, implementation="triton", context_parallelism="ring"
    )

    def run(q, k, v, do):
        o, pull = jax.vjp(call, q, k, v)
        return o, *pull(do)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(run).trace(q, k, k, q).lower(lowering_platforms=("cuda",))
        return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})


def test_memory_falls_with_number_of_gpus():
    """The call has a million tokens. A ring of two holds less than longer rings."""
    peaks = []
    for devices in (2, 4, 8):
        memory = compiled_for_gpus(devices, 2**20, 8, 4).memory_analysis()
        peaks.append(memory.peak_memory_in_bytes)
    assert peaks[2] <= 0.51 * peaks[1], peaks
    assert peaks[1] <= 0.65 * peaks[0], peaks


def test_blocks_travel_while_kernels_run():
    """In the program for GPUs: the next block is on its way before a step's kernels start."""
    text = compiled_for_gpus(4, 1024, 4, 4).as_text()
    assert "is_scheduled=true" in text
    # For each message how far it goes, and what runs meanwhile: a step or a kernel of one.
    sent, beside = {}, {}
    for line in text[text.index("\nENTRY") :].splitlines():
        permute = r"(\S+) = .* collective-permute(-start)?\(.*_pairs={{(\d),(\d)}"
        if found := re.search(permute, line):
            name, begins, *pair = found.groups()
            sent[name], beside[name] = int(pair[1]) - int(pair[0]), [] if begins else None
        for name, lines in beside.items():
            if f"collective-permute-done({name})" in line:
                beside[name] = tuple(lines)
            elif isinstance(lines, list) and re.search(r" conditional\(|gpu\.triton", line):
                lines.append(line)
    assert collections.Counter(sent.values()) == {1: 6, -1: 1, -2: 1, -3: 1}
    assert all(beside[name] for name, hop in sent.items() if hop == 1)
    # Gradients go home beside the next step, but for the last ones.
    assert sum(bool(beside[name]) for name, hop in sent.items() if hop < 0) == 2


def test_layers_on_a_mesh_have_the_same_kernels():
    """JAX lowers every call anew with Auto axes; there are two layers, each of four kernels."""
    mesh = gpu_compiler.mesh_of("h200", 2, "data")
    x = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    call = functools.partial(attention, is_causal=True, implementation="mosaic")

    def loss(x):
        x = call(x, x, x)
        return call(x, x, x).astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",))
        text = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text()
    kernels = re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text)
    assert sorted(collections.Counter(kernels).values()) == [2, 2, 2, 2]
