"""Small calls of `attention`, whose sizes are all different."""

import jax
import jax.numpy as jnp
import numpy as np


def zeros(shape, dtype):
    """Made by NumPy: `jnp.zeros` compiles a program for each shape."""
    return jax.device_put(np.zeros(shape, dtype))


def f32(*shape):
    return zeros(shape, np.float32)


def i32(*shape):
    return zeros(shape, np.int32)


def inputs(dtype=jnp.float32, head_dim=8):
    """A valid call; its sizes are all different, so that no two axes can be confused."""
    shapes = {"query": (2, 5, 6, head_dim), "key": (2, 7, 3, head_dim), "value": (2, 7, 3, 4)}
    return {name: zeros(shape, dtype) for name, shape in shapes.items()}


def unbatched(**changed):
    return {"query": f32(5, 6, 8), "key": f32(7, 3, 8), "value": f32(7, 3, 4)} | changed


def scaled_by_head(s, b, h, q, k, offset, slope):
    return s * slope[h]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def numbers(**changed):
    shapes = {"query": (2, 5, 6, 8), "key": (2, 7, 3, 8), "value": (2, 7, 3, 4)}
    return {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())} | changed
