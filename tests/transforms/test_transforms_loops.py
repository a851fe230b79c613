"""`vmap` over every argument, `scan` over layers, and rematerialisation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, jaxprs, oracle
from support.compare import assert_close
from support.transform_cases import (
    BATCH,
    BLOCKED,
    HEAD_DIM,
    HEADS,
    MASKED,
    Q_LEN,
    VALUE_DIM,
    attention_by,
    by_xla,
    draw,
    draw_all,
    masked,
    output_and_gradients,
)

from pallas_flash import save_residuals

pytestmark = pytest.mark.usefixtures("ieee_products", "small_tiles")


# ------------------------------------------------------------------------------------------------
# vmap
# ------------------------------------------------------------------------------------------------

COPIES = 3

# The mapped axis of each array, for each of nested maps. Other arrays are shared.
EVERYWHERE = {
    "all three": [{"query": 3, "key": 1, "value": 4}],
    "queries": [{"query": 0}],
    "keys and values": [{"key": 0, "value": 0}],
    "nested": [{"query": 0, "value": 0}, {"key": 0}],
    "lengths": [{"query_seq_lengths": 0, "key_value_seq_lengths": 1}],
    "segment ids": [{"segment_ids": 0}],
    "offset and keys": [{"query_offset": 0, "key": 0}],
    "positions": [{"query_positions": 0, "key_value_positions": 2}],
    "scale": [{"scale": 0}],
}
WITHOUT_KERNELS = {
    "bias": [{"bias": 0}],
    "mask and queries": [{"mask": 0, "query": 0}],
    "nested bias": [{"bias": 0, "query": 0}, {"bias": 1, "mask": 0}],
}


def draw_copies(name: str, axes: list[int], rng: np.random.Generator) -> Any:
    """One argument with a new axis for each of the nested maps, the outermost first."""
    if not axes:
        return draw(name, rng)
    copies = [draw_copies(name, axes[1:], rng) for _ in range(COPIES)]
    return jax.tree.map(lambda *x: jnp.stack(x, axes[0]), *copies)


def loop(fn: Callable, axes: dict[str, int]) -> Callable:
    """Return the definition of vmap as a loop, which is not unrolled, so that it compiles once."""

    def take(axis, i, tree):
        return jax.tree.map(lambda x: jnp.take(x, i, axis), tree)

    def looped(arguments):
        def one(i):
            taken = {name: take(axis, i, arguments[name]) for name, axis in axes.items()}
            return fn(arguments | taken)

        return jax.lax.map(one, jnp.arange(COPIES))

    return looped


@pytest.mark.parametrize(
    ("implementation", "name"),
    cases.default(
        [
            ("interpret", "lengths"),
            ("xla", "all three"),
            ("xla", "positions"),
            ("xla", "nested bias"),
        ],
        [(implementation, name) for implementation in BLOCKED for name in EVERYWHERE]
        + [("xla", name) for name in WITHOUT_KERNELS],
    ),
)
def test_vmap_equals_loop(implementation, name):
    """Gradients by what is shared are summed over the copies."""
    maps = (EVERYWHERE | WITHOUT_KERNELS)[name]
    rng, names = np.random.default_rng(0), {"query", "key", "value"}.union(*maps)
    arguments = {
        name: draw_copies(name, [axes[name] for axes in maps if name in axes], rng)
        for name in sorted(names)
    }
    vmapped, looped = masked(implementation), masked("reference")
    for axes in reversed(maps):
        in_axes = {name: axes.get(name) for name in arguments}
        vmapped, looped = jax.vmap(vmapped, in_axes=(in_axes,)), loop(looped, axes)
    got, want = (oracle.compiled(output_and_gradients(fn)) for fn in (vmapped, looped))
    assert_close(got(arguments), want(arguments))


@by_xla
def test_jacrev_equals_dense(implementation):
    """The backward pass mapped over cotangents, residuals shared."""
    arguments = draw_all(*MASKED)

    def jacobian(implementation):
        def few(query):
            out = masked(implementation)(arguments | {"query": query})
            return out.sum(axis=(0, 1, 2))

        return oracle.compiled(jax.jacrev(few))(arguments["query"])

    got = jacobian(implementation)
    assert got.shape == (VALUE_DIM, *arguments["query"].shape)
    assert_close(got, jacobian("reference"))


# ------------------------------------------------------------------------------------------------
# scan and rematerialisation
# ------------------------------------------------------------------------------------------------

LAYERS = 3

REMAT = {
    "without": lambda fn: fn,
    "default": jax.checkpoint,
    "results saved": functools.partial(jax.checkpoint, policy=save_residuals),
    "products saved, too": functools.partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_saveable, save_residuals
        ),
    ),
}


def layer(implementation: str, lengths) -> Callable:
    def apply(x, weights):
        q, k, v = (x @ w for w in weights)
        out = attention_by(implementation)(q, k, v, is_causal=True, key_value_seq_lengths=lengths)
        return x + out

    return apply


@pytest.mark.parametrize("remat", cases.default(["default", "results saved"], REMAT))
@pytest.mark.parametrize("implementation", BLOCKED)
def test_scan_over_layers_equals_unrolled(implementation, remat):
    rng = np.random.default_rng(0)
    x = draw("query", rng)
    weights = jnp.asarray(rng.normal(size=(LAYERS, 3, HEAD_DIM, HEAD_DIM)), jnp.float32) / 4
    lengths = draw("query_seq_lengths", rng)

    def scanned(arguments):
        apply = REMAT[remat](layer(implementation, lengths))

        def step(x, weights):
            return apply(x, weights), None

        return jax.lax.scan(step, arguments["x"], arguments["weights"])[0]

    def unrolled(arguments):
        x = arguments["x"]
        for i in range(LAYERS):
            x = layer("reference", lengths)(x, arguments["weights"][i])
        return x

    got, want = (
        oracle.compiled(output_and_gradients(fn, ("x", "weights")))({"x": x, "weights": weights})
        for fn in (scanned, unrolled)
    )
    assert_close(got, want)


@pytest.mark.parametrize(
    ("remat", "forwards"),
    [("without", 1), ("default", 2), ("results saved", 1), ("products saved, too", 1)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_runs_again_unless_saved(remat, forwards, dtype):
    """In bfloat16 with the low part of the output, because there are few features."""
    weights = jnp.zeros((3, HEAD_DIM, HEAD_DIM), dtype)
    x = jnp.zeros((BATCH, Q_LEN, HEADS, HEAD_DIM), dtype)

    def trace(implementation):
        apply = REMAT[remat](layer(implementation, None))
        return jaxprs.trace(jax.grad(lambda w: apply(x, w).sum()), weights)

    backward = ["pallas_flash_delta", "pallas_flash_dkv", "pallas_flash_dq"]
    expected = ["pallas_flash_forward"] * forwards + backward
    assert jaxprs.kernels(trace("interpret")) == expected
    loops = [e for e in trace("xla") if e.primitive.name == "scan"]
    assert len(loops) == forwards + 1
