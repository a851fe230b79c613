"""Calls outside of `jit` are compiled once, not each time."""

import jax
import pytest

import pallas_flash


def halved(s, *at):
    return s / 2


@pytest.mark.parametrize("implementation", ["interpret", "xla", "reference"])
def test_second_call_compiles_nothing(implementation, caplog):
    def gradients(length):
        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, length, 2, 16))

        def total(*qkv):
            options = dict(is_causal=True, implementation=implementation, score_fn=halved)
            options |= dict(dropout_rate=0.5, dropout_key=jax.random.key(0))
            return pallas_flash.attention(*qkv, **options).sum()

        return jax.grad(total, (0, 1, 2))(q, k, v)

    # What the first call of a process imports adds to JAX's settings, on which its cache depends.
    gradients(length=19)
    with jax.log_compiles():
        gradients(length=20)
        assert "Compiling" in caplog.text
        caplog.clear()
        gradients(length=20)
        assert "Compiling" not in caplog.text
