"""Calls outside of `jit` are compiled once, not each time."""

import jax
import pytest

import pallas_flash


@pytest.mark.parametrize("implementation", ["interpret", "xla", "reference"])
def test_second_call_compiles_nothing(implementation, caplog):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 20, 2, 16))

    def gradients():
        def total(*qkv):
            options = dict(is_causal=True, implementation=implementation)
            return pallas_flash.attention(*qkv, **options).sum()

        return jax.grad(total, (0, 1, 2))(q, k, v)

    # What the first call of a process imports adds to JAX's settings, on which its cache depends.
    gradients()
    jax.clear_caches()
    with jax.log_compiles():
        gradients()
        assert "Compiling" in caplog.text
        caplog.clear()
        gradients()
        assert "Compiling" not in caplog.text
