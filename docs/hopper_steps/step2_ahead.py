"""Step 2: the copy of a block starts as soon as the block before it has been read."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from step_common import along_rows, before_any_key, launch, operand, product, zeros

QUERIES, KEYS = 64, 128  # Rows of the tile that stays, and of a block that streams past it.


def softmax(s, m, l, scale):
    """Return the weights of a block, m and l with it, and the factor of all earlier sums."""
    s = s * scale
    m_new = jnp.maximum(m, jnp.max(s, axis=1))
    alpha = jnp.exp(m - m_new)
    p = jnp.exp(s - along_rows(m_new, s))
    return p.astype(jnp.bfloat16), m_new, alpha * l + jnp.sum(p, axis=1), alpha


def kernel(q_ref, k_ref, v_ref, o_ref, q_sm, k_sm, v_sm, q_full, k_full, v_full):
    """Compute one query tile of one head."""
    head, tile, batch = (lax.axis_index(x) for x in ("head", "tile", "batch"))
    _, length, _, head_dim = k_ref.shape
    count, scale = length // KEYS, head_dim**-0.5

    queries = batch, pl.ds(tile * QUERIES, QUERIES), head
    plgpu.copy_gmem_to_smem(q_ref.at[queries], q_sm, q_full)
    plgpu.barrier_wait(q_full)

    def copy(j, ref, sm, full):
        keys = batch, pl.ds(j * KEYS, KEYS), head
        pl.when(j < count)(lambda: plgpu.copy_gmem_to_smem(ref.at[keys], sm, full))

    def step(j, state):
        acc, m, l = state
        plgpu.barrier_wait(k_full)
        s = product(q_sm, k_sm.T, zeros(QUERIES, KEYS))
        copy(j + 1, k_ref, k_sm, k_full)
        p, m, l, alpha = softmax(s, m, l, scale)
        plgpu.barrier_wait(v_full)
        acc = product(p, v_sm, acc * along_rows(alpha, acc))
        copy(j + 1, v_ref, v_sm, v_full)
        return acc, m, l

    copy(0, k_ref, k_sm, k_full)
    copy(0, v_ref, v_sm, v_full)
    state = zeros(QUERIES, head_dim), *before_any_key(QUERIES)
    acc, _, l = lax.fori_loop(0, count, step, state)

    q_sm[...] = (acc / along_rows(l, acc)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_sm, o_ref.at[queries])
    plgpu.wait_smem_to_gmem(0)


def attention(q, k, v):
    """Return softmax(q k.T / sqrt(H)) v for bfloat16 [B, T, N, H]."""
    batch, length, heads, head_dim = q.shape
    return launch(
        kernel,
        *(q, k, v),
        grid=dict(head=heads, tile=length // QUERIES, batch=batch),
        warpgroups=1,
        scratch=[
            *(operand(rows, head_dim) for rows in (QUERIES, KEYS, KEYS)),
            *[plgpu.Barrier()] * 3,
        ],
    )
