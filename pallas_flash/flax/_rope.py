"""Rotary position embedding (RoPE)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from pallas_flash._jax.one_device import divided_alike
from pallas_flash._problem.checks import array, describe, is_array, is_number
from pallas_flash.flax._arrays import check_positions


def apply_rope(
    x: Float[Array, "*batch T N H"],
    positions: Integer[Array, "*#batch T"],
    rope_theta: float = 10_000.0,
) -> Float[Array, "*batch T N H"]:
    """Apply rotary position embedding, which turns pairs of components by the position's angles.

    For i < H/2 and the angle a_i = position * rope_theta^(-2i/H),

        y[i]       = x[i] cos(a_i) - x[i + H/2] sin(a_i)
        y[i + H/2] = x[i + H/2] cos(a_i) + x[i] sin(a_i)

    This is section 3.2.2 of RoFormer (https://arxiv.org/abs/2104.09864), which pairs 2i with
    2i + 1. Pairing i with i + H/2 instead ("rotate half") comes from GPT-NeoX; `nnx.RoPE` and the
    Llama weights of Hugging Face do the same. Norms stay, and the product of a turned query with a
    turned key depends on the difference of their positions only.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_flash.flax import apply_rope
        >>> x = jnp.ones((2, 5, 3, 8))
        >>> bool(jnp.allclose(apply_rope(x, jnp.zeros(5, int)), x))
        True

    Args:
        x: Queries or keys.
        positions: Position of each row of `x`.
        rope_theta: Base of the angles.

    Returns:
        The turned `x`, in its dtype. Angles are float32, and so is the product for a narrower `x`.

    Raises:
        TypeError: If `positions` are not integers, or `rope_theta` is no number.
        ValueError: If H is odd, `positions` do not broadcast to [*batch, T], or `rope_theta` is not
            positive.
    """
    x = array("x", x)
    if x.ndim < 3 or x.shape[-1] % 2:
        raise ValueError(
            f"`x` must be [*batch, length, heads, an even head_dim]; got x.shape={x.shape}."
        )
    if not is_array(rope_theta):
        check_rope_theta(rope_theta)
    positions = check_positions(positions, x.shape[:-2])
    return _turned(x, divided_alike(positions, x, x.ndim - 2 - positions.ndim), rope_theta)


def check_rope_theta(rope_theta) -> None:
    """Raise unless this is the base of rotary angles."""
    if not is_number(rope_theta):
        raise TypeError(
            f"`rope_theta` must be a number; got {describe(rope_theta)}. Most models have 10,000."
        )
    if not rope_theta > 0:
        raise ValueError(f"`rope_theta` must be positive; got {rope_theta}.")


# Compiled as one program outside of `jit`, too; else JAX compiles each operation for each shape.
@functools.partial(jax.jit, inline=True)
def _turned(x, positions, rope_theta):
    half = x.shape[-1] // 2
    inverse_period = rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    positions = jnp.expand_dims(positions, (*range(x.ndim - 2 - positions.ndim), -2, -1))
    # [*#batch, T, 1, H/2]
    angle = positions.astype(jnp.float32) * jnp.expand_dims(inverse_period, range(x.ndim - 1))
    dtype = np.promote_types(x.dtype, np.float32)
    cos, sin = jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)
    low, high = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)
