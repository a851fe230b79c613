"""Recipes are short and say what is true; tests/project/test_docs.py runs their blocks."""

import re

import jax
import jax.numpy as jnp
import pytest
from support.described_gpus import described_gpu
from support.repository import ROOT

import pallas_flash
from pallas_flash._jax import compat

VARIANTS = (ROOT / "docs" / "recipes" / "variants.md").read_text()
# T, S, N, K, H, V of the calls in the table of latent attention, in its order.
CALLS = [
    (4096, 4096, 16, 16, 192, 128),
    (1, 4096, 16, 16, 192, 128),
    (4096, 4096, 16, 1, 576, 512),
    (1, 4096, 16, 1, 576, 512),
]


def test_blocks_of_variants_are_short():
    blocks = re.findall(r"^```python\n(.*?)^```", VARIANTS, re.M | re.S)
    lines = [sum(bool(line.strip()) for line in block.splitlines()) for block in blocks]
    assert len(lines) >= 16 and max(lines) <= 12


@pytest.mark.parametrize(("gpu", "column"), [("NVIDIA H200", 1), ("NVIDIA A100-SXM4-80GB", 2)])
def test_latent_attention_runs_on_what_is_said(gpu, column):
    if not compat.has_mosaic_gpu():
        pytest.skip("JAX is too old for the kernels for Hopper")
    table = VARIANTS.split("| call | H200 | other NVIDIA GPUs |\n|---|---|---|\n")[1]
    rows = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()]
    assert len(rows) == len(CALLS)
    for row, (T, S, N, K, H, V) in zip(rows, CALLS, strict=True):
        shapes = (2, T, N, H), (2, S, K, H), (2, S, K, V)
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        with described_gpu(gpu):
            plan = pallas_flash.explain(*arrays, is_causal=T > 1)
        assert str(plan).split(":")[0] == row[column]
