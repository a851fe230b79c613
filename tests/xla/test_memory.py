"""Memory is linear in the sequence lengths, forward and backward, and broadcast arrays stay small.

Nothing runs here. Compiled programs tell what they would allocate, and jaxprs what they compute.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from support import jaxprs
from support.described_gpus import described_gpu

from pallas_flash import attention
from pallas_flash._backends import xla

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 16


def shapes(
    q_len: int, kv_len: int, batch: int = BATCH, **others
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return arguments of `attention`, with `others` among them."""
    query = (batch, q_len, HEADS, HEAD_DIM)
    key = (batch, kv_len, KV_HEADS, HEAD_DIM)
    floats = {"query": query, "key": key, "value": key, "scale": ()}
    arguments = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in floats.items()}
    return arguments | others


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bools(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


def value_and_gradients(implementation: str, **options):
    """Return the gradients of every input, for a loss of the output and the LSE."""

    def run(arguments):
        names = ("query", "key", "value", "bias", "scale")
        inputs = {name: arguments[name] for name in names if name in arguments}

        def loss(inputs):
            call = functools.partial(attention, implementation=implementation, **options)
            out, lse = call(**(arguments | inputs), return_lse=True)
            return (out**2).sum() + lse.sum()

        return jax.value_and_grad(loss)(inputs)

    return run


OPTIONS = {
    "no mask": ({}, lambda q_len, kv_len: {}),
    "causal window": ({"is_causal": True, "local_window_size": 300}, lambda q_len, kv_len: {}),
    "everything": (
        {"is_causal": True},
        lambda q_len, kv_len: {
            "query_seq_lengths": ints(BATCH),
            "key_value_seq_lengths": ints(BATCH),
            "query_offset": ints(BATCH),
            "segment_ids": (ints(BATCH, q_len), ints(BATCH, kv_len)),
        },
    ),
}


# ------------------------------------------------------------------------------------------------
# Compiled programs
# ------------------------------------------------------------------------------------------------


def temporary_bytes(implementation: str, arguments, **options) -> int:
    """Return what a compiled forward and backward allocates besides arguments and results."""
    run = jax.jit(value_and_gradients(implementation, **options))
    return run.lower(arguments).compile().memory_analysis().temp_size_in_bytes


# Sums are in float32, twice the size of bfloat16 inputs. JAX 0.10 computes products in it, too.
@pytest.mark.parametrize(("dtype", "times"), [("float32", 3), ("bfloat16", 6)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["no mask", "causal"])
def test_compiled_memory_is_a_few_inputs(dtype, times, options):
    inputs = [jax.ShapeDtypeStruct((BATCH, 4096, HEADS, 64), dtype)] * 3

    def loss(q, k, v):
        out = attention(q, k, v, implementation="xla", **options)
        return jnp.sum(out * out, dtype=jnp.float32)

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*inputs).compile()
    allowed = times * sum(x.size * x.dtype.itemsize for x in inputs)
    assert compiled.memory_analysis().temp_size_in_bytes <= allowed


BIAS, MASK = ("bias", (1, HEADS, 768, 768)), ("mask", (1, 1, 768, 768))


@pytest.mark.extended  # The tests below look at the same in traces.
@pytest.mark.parametrize(("name", "shape"), [BIAS, MASK], ids=["bias", "mask"])
def test_shared_arrays_are_not_copied_per_batch(name, shape):
    """More batch elements take as much memory as without the array, its gradient included."""

    def growth(**others):
        few, many = (temporary_bytes("xla", shapes(768, 768, batch, **others)) for batch in (2, 5))
        return many - few

    array = (floats if name == "bias" else bools)(*shape)
    # Copies for three more batch elements would be three times as large as the array.
    assert growth(**{name: array}) - growth() < array.size * array.dtype.itemsize


# ------------------------------------------------------------------------------------------------
# Intermediate results
# ------------------------------------------------------------------------------------------------

# These are no multiples of a tile, because padding could multiply what it pads.
Q_LEN, KV_LEN = 2007, 3001


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Shrink the tiles of "xla" on a GPU, which would hold all scores here."""
    monkeypatch.setattr(xla, "GPU_BLOCK", 256)


def largest_result(implementation: str, arguments, **options) -> int:
    """Return the elements of the largest array outside of kernels."""
    with described_gpu("NVIDIA H200"):
        eqns = jaxprs.trace(value_and_gradients(implementation, **options), arguments)
    kernels = jaxprs.kernels(eqns)
    kinds = 4 + ("bias" in arguments)
    assert len(kernels) == (kinds if implementation in ("interpret", "triton") else 0)
    return max(x.aval.size for e in eqns for x in e.outvars if hasattr(x.aval, "size"))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("implementation", ["triton", "interpret", "xla"])
def test_scores_never_exist(implementation, name):
    options, others = OPTIONS[name]
    arguments = shapes(Q_LEN, KV_LEN, **others(Q_LEN, KV_LEN))
    assert largest_result(implementation, arguments, **options) < Q_LEN * KV_LEN


def test_scores_exist_in_the_dense_definition():
    arguments = shapes(Q_LEN, KV_LEN)
    assert largest_result("reference", arguments) == BATCH * HEADS * Q_LEN * KV_LEN


@pytest.mark.parametrize(
    "shape",
    [(1, 1), (1, KV_LEN), (Q_LEN, 1), (HEADS, 1, KV_LEN), (BATCH, 1, Q_LEN, 1)],
    ids=str,
)
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_broadcast_bias_and_mask_are_not_expanded(implementation, shape):
    arguments = shapes(Q_LEN, KV_LEN, bias=floats(*shape), mask=bools(*shape))
    assert largest_result(implementation, arguments) < Q_LEN * KV_LEN


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_pair_arrays_are_not_repeated_for_heads(implementation):
    """The only copies are "xla"'s padding to whole tiles and the gradient of the bias."""
    arguments = shapes(Q_LEN, KV_LEN, bias=floats(Q_LEN, KV_LEN), mask=bools(1, 1, Q_LEN, KV_LEN))
    assert largest_result(implementation, arguments) < 2 * Q_LEN * KV_LEN


def test_gradient_of_a_bias_needs_no_scratch():
    """One array has the size of the bias: the result."""
    arguments = shapes(Q_LEN, KV_LEN, bias=floats(1, HEADS, Q_LEN, KV_LEN))
    with described_gpu("NVIDIA H200"):
        eqns = jaxprs.trace(value_and_gradients("triton"), arguments)
    large = [
        (x.aval.shape, eqn.primitive.name)
        for eqn in eqns
        for x in eqn.outvars
        if getattr(x.aval, "size", 0) >= Q_LEN * KV_LEN and eqn.primitive.name not in CALLS
    ]
    assert large == [((1, HEADS, Q_LEN, KV_LEN), "pallas_call")]


# Calls return what an equation inside of them has computed.
CALLS = ("jit", "pjit", "custom_vjp_call", "custom_jvp_call", "custom_partitioning")
