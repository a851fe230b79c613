"""Kernels in Mosaic GPU, lowered for a GPU that need not be there."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
from support.described_gpus import described_gpu

import pallas_flash


def launches(text):
    return len(re.findall(r"@mosaic_gpu\w*\(", text))


SHAPE = (4, 300, 4, 64)

attention = functools.partial(
    pallas_flash.attention, is_causal=True, return_lse=True, implementation="mosaic"
)


def gradients(q, k, v, call=attention):
    out, pull = jax.vjp(call, q, k, v)
    return pull(out)


def lowered(function, shape=SHAPE, shapes=None):
    """The lowering for an H200 that is not here."""
    shapes = shapes or [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3
    with described_gpu("NVIDIA H200"):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
