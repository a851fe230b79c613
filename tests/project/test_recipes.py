"""Recipes are short and say what is true; tests/project/test_docs.py runs their blocks."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.described_gpus import described_gpu
from support.repository import ROOT

import pallas_flash
from pallas_flash._jax import compat

VARIANTS = (ROOT / "docs" / "recipes" / "variants.md").read_text()
# T, S, N, K, H, V of the calls in the table of latent attention, in its order.
CALLS = [
    (4096, 4096, 16, 16, 192, 128),
    (1, 4096, 16, 16, 192, 128),
    (4096, 4096, 16, 1, 576, 512),
    (1, 4096, 16, 1, 576, 512),
]


def test_blocks_of_variants_are_short():
    blocks = re.findall(r"^```python\n(.*?)^```", VARIANTS, re.M | re.S)
    lines = [sum(bool(line.strip()) for line in block.splitlines()) for block in blocks]
    assert len(lines) >= 16 and max(lines) <= 12


@pytest.mark.parametrize(("gpu", "column"), [("NVIDIA H200", 1), ("NVIDIA A100-SXM4-80GB", 2)])
def test_latent_attention_runs_on_what_is_said(gpu, column):
    if not compat.has_mosaic_gpu():
        pytest.skip("JAX is too old for the kernels for Hopper")
    table = VARIANTS.split("| call | H200 | other NVIDIA GPUs |\n|---|---|---|\n")[1]
    rows = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()]
    assert len(rows) == len(CALLS)
    for row, (T, S, N, K, H, V) in zip(rows, CALLS, strict=True):
        shapes = (2, T, N, H), (2, S, K, H), (2, S, K, V)
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        with described_gpu(gpu):
            plan = pallas_flash.explain(*arrays, is_causal=T > 1)
        assert str(plan).split(":")[0] == row[column]


# ------------------------------------------------------------------------------------------------
# Pages with functions to copy: each on another problem than the page's, beside the dense formula.


@functools.cache
def page(name):
    """The namespace after the blocks of a page, and the lines of its longest block."""
    text, namespace = (ROOT / "docs" / name).read_text(), {"__name__": name}
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    for block in blocks:
        exec(block, namespace)
    return namespace, max(sum(bool(x.strip()) for x in block.splitlines()) for block in blocks)


@pytest.mark.parametrize("name", ["sparse.md", "structural-biology.md"])
def test_functions_to_copy_are_short(name):
    assert page(name)[1] <= 30


def normal(*shapes):
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def assert_same(ours, dense, *arrays):
    """Two functions agree, and so do the gradients of all their arguments."""
    cotangents = normal(*(x.shape for x in jax.tree.leaves(jax.eval_shape(dense, *arrays))))

    def passes(function):
        results, pull = jax.vjp(lambda *arrays: jax.tree.leaves(function(*arrays)), *arrays)
        return *results, *pull(cotangents)

    results = (jax.jit(passes, static_argnums=0)(x) for x in (ours, dense))
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


B, T, N, K, H, BLOCK = 2, 80, 6, 2, 8, 16
QKV = normal((B, T, N, H), (B, T, K, H), (B, T, K, H))
CAUSAL = np.tri(T, dtype=bool)
over_block_q = pytest.mark.parametrize("block_q", [1, 8])


def chosen(scores, forced, top, block_q):
    """Who sees whom, [B, N, T, T]: a query sees what the first query of its block chooses.

    `scores` [B, N, T, blocks] are of each query, `forced(own)` are the numbers of forced blocks.
    """
    visible = np.zeros((B, N, T, T), bool)
    for b, n, t in np.ndindex(B, N, T):
        first = t // block_q * block_q
        own = first // BLOCK
        take = set(forced(own))
        rest = sorted(set(range(own)) - take, key=lambda j: -scores[b, n, first, j])
        for j in [*take, *rest[: top - len(take)]]:
            visible[b, n, t, j * BLOCK : (j + 1) * BLOCK] = True
    return visible & CAUSAL


def of_blocks(x):
    """The mean of each block, for each query head, [B, blocks, N, H]."""
    return jnp.repeat(x.reshape(B, -1, BLOCK, K, H).mean(2), N // K, 2)


@over_block_q
def test_moba_is_dense_attention_to_its_blocks(block_q):
    q, k, _ = QKV
    scores = np.einsum("btnh,bjnh->bntj", q, of_blocks(k))
    visible = chosen(scores, lambda own: [own], 3, block_q)
    assert_same(
        functools.partial(page("sparse.md")[0]["moba"], block=BLOCK, block_q=block_q),
        functools.partial(jax.nn.dot_product_attention, mask=visible),
        *QKV,
    )


@over_block_q
def test_nsa_is_three_dense_branches(block_q):
    dense = jax.nn.dot_product_attention
    whole = (np.arange(T // BLOCK) + 1) * BLOCK - 1 <= np.arange(T)[:, None]

    def compressed(q, k):
        s = jnp.einsum("btnh,bjnh->bntj", q, of_blocks(k)) / H**0.5
        return jax.nn.softmax(jnp.where(whole, s, -jnp.inf), where=whole)

    importance = compressed(*QKV[:2]).reshape(B, K, N // K, T, -1).sum(2)
    importance = np.repeat(importance, N // K, 1)
    visible = chosen(importance, lambda own: {0, max(own - 1, 0), own}, 4, block_q)

    def branches(q, k, v, gates):
        small = jnp.einsum("bntj,bjnh->btnh", compressed(q, k), of_blocks(v))
        local = dense(q, k, v, is_causal=True, local_window_size=(19, 0))
        return gates[0] * small + gates[1] * dense(q, k, v, mask=visible) + gates[2] * local

    ours = functools.partial(page("sparse.md")[0]["nsa"], block=BLOCK, block_q=block_q, window=20)
    assert_same(ours, branches, *QKV, *normal((3, B, T, N, 1)))


@over_block_q
def test_indexer_learns_where_attention_is(block_q):
    index_q, index_k = normal((B, T, K, 4), (B, T, 4))

    def scores(index_q, index_k):
        s = jnp.einsum("btkh,bsh->bkts", index_q, index_k)
        return jnp.where(CAUSAL, s, -jnp.inf).reshape(B, K, T, -1, BLOCK).max(-1)

    repeated = np.repeat(scores(index_q, index_k), N // K, 1)
    visible = chosen(repeated, lambda own: [own], 3, block_q)
    blocks = visible[:, :: N // K].reshape(B, K, T, -1, BLOCK).any(-1)[:, :, ::block_q]

    def dense(q, k, v, index_q, index_k):
        s = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, N // K, 2)) / H**0.5
        p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf))
        p = p.reshape(B, K, N // K, T, -1, BLOCK).sum(-1).mean(2)[:, :, ::block_q]
        p = jax.lax.stop_gradient(p)
        log_p = jax.nn.log_softmax(scores(index_q, index_k)[:, :, ::block_q], where=blocks)
        loss = jnp.where(p > 0, p * (jnp.log(p) - log_p), 0).sum(-1).mean()
        return jax.nn.dot_product_attention(q, k, v, mask=visible), loss

    recipe = page("sparse.md")[0]["indexed"]
    assert_same(
        lambda *arrays: recipe(*arrays, block=BLOCK, block_q=block_q)[:2],
        dense,
        *(*QKV, index_q, index_k),
    )


def softmax(s, visible):
    """Zeros where nothing is visible."""
    return jax.nn.softmax(jnp.where(visible, s, -jnp.inf), where=visible)


# Of batch, rows and tokens: some hidden keys, and a row without any.
PAIRS = jnp.arange(2 * 19 * 19).reshape(2, 19, 19) % 5 > 0
PAIRS = PAIRS.at[0, 3].set(False)


def test_adapter_has_five_axes():
    """At a head dim above 128, for two structures with a bias each."""

    def dense(q, k, v, bias):
        s = 0.1 * jnp.einsum("bnhqd,bnhkd->bnhqk", q, k) + bias
        return jnp.einsum("bnhqk,bnhkd->bnhqd", softmax(s, PAIRS[:, :, None, None]), v)

    adapter, axes = page("structural-biology.md")[0]["as_cuequivariance"], (2, 19, 2, 19, 136)
    assert_same(
        lambda *arrays: adapter(*arrays, PAIRS[:, :, None, None], 0.1)[0],
        dense,
        *normal(axes, axes, axes, (2, 1, 2, 19, 19)),
    )


@pytest.mark.parametrize("ending", [False, True])
def test_triangle_attention_of_pairs(ending):
    """q_ij meets k_ik with the bias b_jk; at the ending node k_kj with the bias b_ki."""
    names, mask = ("q", "k", "v", "gate", "bias", "out"), PAIRS[0]
    key, of_bias, seen = ("kjhd", "kih", mask.T) if ending else ("ikhd", "jkh", mask)

    def dense(z, *weights):
        projected = [jnp.einsum("ijc,c...->ij...", z, x) for x in weights[:-1]]
        q, k, v, gate, bias = projected
        s = jnp.einsum(f"ijhd,{key}->ijhk", q, k) / 8**0.5
        s = s + jnp.einsum(f"{of_bias},ij->ijhk", bias, jnp.ones((19, 19)))
        visible = (seen[None] if ending else seen[:, None])[:, :, None]
        o = jnp.einsum(f"ijhk,{key}->ijhd", softmax(s, visible), v) * jax.nn.sigmoid(gate)
        return jnp.einsum("ijhd,hdc->ijc", o, weights[-1])

    triangle_attention = page("structural-biology.md")[0]["triangle_attention"]
    assert_same(
        lambda z, *w: triangle_attention(z, mask, dict(zip(names, w, strict=True)), ending=ending),
        dense,
        *normal((19, 19, 5), *[(5, 2, 8)] * 4, (5, 2), (2, 8, 5)),
    )
