"""Choices by the size of a launch count all instances of `jax.vmap`."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support import mosaic_cases  # noqa: F401  Skips where JAX is too old.
from support.described_gpus import described_gpu

from pallas_flash import attention
from pallas_flash._backends.mosaic import backward_splits, forward_kernel


def gradients(q, k, v):
    call = functools.partial(attention, implementation="mosaic", is_causal=True)
    o, vjp = jax.vjp(call, q, k, v)
    return vjp(o)


def launched(call, shape, monkeypatch):
    """Return the tile of the last forward and the splits of the last backward that were traced."""
    tiles, splits = [], []
    forward, num_splits = forward_kernel.forward, backward_splits.num_splits
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    jax.clear_caches()  # A call that was traced before is not traced again.
    with monkeypatch.context() as patch, described_gpu("NVIDIA H200"):
        patch.setattr(
            forward_kernel, "forward", lambda p, t, *x: tiles.append(t) or forward(p, t, *x)
        )
        patch.setattr(
            backward_splits, "num_splits", lambda *x: splits.append(num_splits(*x)) or splits[-1]
        )
        jax.eval_shape(call, x, x, x)
    return tiles[-1:], splits[-1:]


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize(
    "shape",
    [
        (512, 8, 128),
        pytest.param((1024, 8, 128), marks=pytest.mark.extended),
        (1024, 8, 64),
    ],
    ids=str,
)
def test_instances_count_as_batch_elements(shape, levels, monkeypatch):
    vmapped, instances = gradients, (8,) if levels == 1 else (2, 4)
    for _ in instances:
        vmapped = jax.vmap(vmapped)
    alone = launched(gradients, (1, *shape), monkeypatch)
    together = launched(gradients, (8, *shape), monkeypatch)
    assert launched(vmapped, (*instances, 1, *shape), monkeypatch) == together != alone
