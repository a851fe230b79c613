"""`apply_rope`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flax_cases import HEAD_DIM, NUM_HEADS, Q_LEN, distance, normal

from pallas_flash.flax import apply_rope

pytestmark = pytest.mark.usefixtures("ieee_products")


def test_rope_equals_complex_product():
    x, theta = normal(1, (2, 3, NUM_HEADS, HEAD_DIM)), 500.0
    positions = np.asarray([[0, 5, 1000], [7, 7, -3]])
    half = HEAD_DIM // 2
    angles = positions[..., None, None] * theta ** (-np.arange(half) / half)
    pairs = np.asarray(x[..., :half]) + 1j * np.asarray(x[..., half:])
    turned = pairs * np.exp(1j * angles)
    want = np.concatenate([turned.real, turned.imag], axis=-1).astype(np.float32)
    # An angle of 1000 in float32 is off by 1000 * 2^-24, and so is what it turns.
    assert distance(apply_rope(x, jnp.asarray(positions), theta), want) < 1000 * 2.0**-24


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(-500, 500))
def test_rope_keeps_norms_and_differences(q_pos, k_pos, offset):
    q, k = normal(1, (1, 1, HEAD_DIM)), normal(2, (1, 1, HEAD_DIM))

    def turned(x, position):
        return np.asarray(apply_rope(x, jnp.asarray([position])), np.float64)

    def product(offset):
        return (turned(q, q_pos + offset) * turned(k, k_pos + offset)).sum()

    norm = np.linalg.norm(np.asarray(q, np.float64))
    # Angles below 1000 are off by less than 1000 * 2^-24, in each of four turned vectors.
    error = 4 * 1000 * 2.0**-24
    assert abs(np.linalg.norm(turned(q, q_pos)) / norm - 1) < error
    scale = norm * np.linalg.norm(np.asarray(k, np.float64))
    assert abs(product(0) - product(offset)) < error * scale


def test_rope_computes_in_float32_keeps_dtype():
    x = normal(1, (Q_LEN, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    # bfloat16 has 8 bits, so positions and angles above 256 would be far off in it.
    positions = 1000 + jnp.arange(Q_LEN)
    with jax.numpy_dtype_promotion("strict"):
        got = apply_rope(x, positions)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, apply_rope(x.astype(jnp.float32), positions).astype(x.dtype))
    with jax.enable_x64(True):
        x = x.astype(jnp.float64) / 3
        still = apply_rope(x, 0 * positions)
        assert still.dtype == jnp.float64
        np.testing.assert_array_equal(still, x)
