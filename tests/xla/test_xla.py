"""Tests of "xla" alone: its speed on a CPU, its gradient of the scale and its tiles on a GPU."""

import contextlib
import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle
from support.described_gpus import described_gpu
from support.jaxprs import trace

import pallas_flash
from pallas_flash._backends import xla

# Both are timed alternately this often, and the shortest times count, because other work only
# lengthens a time. Measured ratios are below a half, and the guard is at 1.
ROUNDS = 30


def seconds(run, inputs) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*inputs))
    return time.perf_counter() - start


@pytest.mark.parametrize(
    ("dtype", "is_causal"),
    cases.default(
        [("float32", True)], list(itertools.product(["float32", "bfloat16"], [False, True]))
    ),
)
def test_cpu_gradients_are_as_fast_as_jax(dtype, is_causal):
    rng = np.random.default_rng(0)
    with jax.default_device(jax.devices("cpu")[0]):
        inputs = [jnp.asarray(rng.standard_normal((1, 1024, 4, 64)), dtype) for _ in range(4)]

        def timed(attention):
            def loss(q, k, v, weight):
                out = attention(q, k, v, is_causal=is_causal, implementation="xla")
                return jnp.sum(out * weight, dtype=jnp.float32)

            gradients = oracle.optimized(jax.value_and_grad(loss, argnums=(0, 1, 2)))
            return functools.partial(seconds, gradients.lower(*inputs).compile(), inputs)

        ours, theirs = map(timed, (pallas_flash.attention, jax.nn.dot_product_attention))
        times = []
        for _ in range(ROUNDS):
            times.append((ours(), theirs()))
            best, goal = 1e3 * np.min(times, axis=0)
            if len(times) > 2 and best <= goal:
                return
    pytest.fail(f"{best:.1f} ms, and jax.nn took {goal:.1f} ms.")


@cases.parametrize(names=["lengths of zero", "causal, first queries see nothing"])
def test_queries_that_see_nothing_leave_dscale(case):
    qkv, cotangents, options = case.problem()

    @oracle.compiled
    def gradient(qkv, cotangents):
        def call(scale):
            return pallas_flash.attention(
                *qkv, scale=scale, return_lse=True, implementation="xla", **options
            )

        return jax.vjp(call, jnp.float32(0.4))[1](cotangents)

    poisoned = cases.poison(case, qkv, cotangents, options)
    np.testing.assert_array_equal(gradient(*poisoned), gradient(qkv, cotangents))


@pytest.mark.parametrize("heads", [1, 16, 128, 4096])
@pytest.mark.parametrize("length", [100, 2048, 16384])
def test_gpu_tiles_are_few_and_bounded(heads, length):
    block_q, block_kv = xla._block_sizes(heads, length, on_gpu=True)
    assert block_q % xla.BLOCK_Q == 0 and block_kv == xla.GPU_BLOCK
    fits = heads * block_q * min(block_kv, length) <= xla.GPU_SCORES
    assert fits or block_q == xla.BLOCK_Q
    more = heads * (block_q + xla.BLOCK_Q) * min(block_kv, length) <= xla.GPU_SCORES
    assert block_q == xla.GPU_BLOCK or not more


@pytest.mark.parametrize("kind", [None, "NVIDIA H200"])
def test_device_decides_on_the_tiles(kind):
    x = jax.ShapeDtypeStruct((1, 4096, 8, 320), jnp.bfloat16)

    def gradients(q):
        def loss(q):
            return pallas_flash.attention(q, q, q, implementation="xla").sum()

        return jax.grad(loss)(q)

    with described_gpu(kind) if kind else contextlib.nullcontext():
        products = [e for e in trace(gradients, x) if e.primitive.name == "dot_general"]
    sizes = {e.outvars[0].aval.shape[-1] for e in products} - {320}
    assert sizes == ({xla.GPU_BLOCK} if kind else {xla.BLOCK_Q})
