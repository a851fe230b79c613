"""Calls outside of `jit` are compiled once, not each time."""

import jax
import jax.numpy as jnp
import pytest
from support import cases

import pallas_flash


def halved(s, *at):
    return s / 2


@pytest.mark.parametrize(
    "implementation", cases.default(["xla"], ["interpret", "xla", "reference"])
)
def test_second_call_compiles_nothing(implementation, caplog):
    def gradients():
        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 20, 2, 16))

        def total(*qkv):
            options = dict(is_causal=True, implementation=implementation, score_mod=halved)
            options |= dict(dropout_rate=0.5, dropout_key=jax.random.key(0))
            return pallas_flash.attention(*qkv, **options).sum()

        return jax.grad(total, (0, 1, 2))(q, k, v)

    with jax.log_compiles():
        gradients()
        assert "Compiling" in caplog.text
        # The imports of the first call add JAX settings, which are part of the cache's key.
        gradients()
        caplog.clear()
        gradients()
        assert "Compiling" not in caplog.text


def test_call_is_one_program(caplog):
    q = jnp.ones((1, 21, 2, 16))
    with jax.log_compiles():
        pallas_flash.attention(q, q, q, is_causal=True, return_lse=True)
    assert caplog.text.count("Finished XLA compilation") == 1


def apart(b, h, q_pos, k_pos):
    return abs(q_pos - k_pos) > 3


def test_second_block_mask_compiles_nothing(caplog):
    def table(length):
        mask = pallas_flash.masks.Predicate(apart) & jnp.ones((length, length), bool)
        return pallas_flash.masks.BlockMask.from_mask(mask, length, length, block_q=16, block_kv=16)

    table(40)
    with jax.log_compiles():
        table(41)
        assert "Compiling" in caplog.text
        caplog.clear()
        table(41)
        assert "Compiling" not in caplog.text
