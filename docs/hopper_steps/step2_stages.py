"""Step 2: two stages, so that the copies of a block run while the block before is computed."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from step_common import along_rows, before_any_key, launch, operand, product, zeros

QUERIES, KEYS, STAGES = 64, 64, 2  # Two blocks of 64 keys have the room of one of 128.


def softmax(s, m, l, scale):
    """Return the weights of a block, m and l with it, and the factor of all earlier sums."""
    s = s * scale
    m_new = jnp.maximum(m, jnp.max(s, axis=1))
    alpha = jnp.exp(m - m_new)
    p = jnp.exp(s - along_rows(m_new, s))
    return p.astype(jnp.bfloat16), m_new, alpha * l + jnp.sum(p, axis=1), alpha


def stage_of(j):
    """Return where block j lies."""
    return lax.rem(j, jnp.int32(STAGES))


def kernel(q_ref, k_ref, v_ref, o_ref, q_sm, k_sm, v_sm, q_full, k_full, v_full):
    """Compute one query tile of one head."""
    head, tile, batch = (lax.axis_index(x) for x in ("head", "tile", "batch"))
    _, length, _, head_dim = k_ref.shape
    count, scale = length // KEYS, head_dim**-0.5

    queries = batch, pl.ds(tile * QUERIES, QUERIES), head
    plgpu.copy_gmem_to_smem(q_ref.at[queries], q_sm, q_full)
    plgpu.barrier_wait(q_full)

    def copy(j):
        stage, keys = stage_of(j), (batch, pl.ds(j * KEYS, KEYS), head)
        plgpu.copy_gmem_to_smem(k_ref.at[keys], k_sm.at[stage], k_full.at[stage])
        plgpu.copy_gmem_to_smem(v_ref.at[keys], v_sm.at[stage], v_full.at[stage])

    def step(j, state):
        acc, m, l = state
        stage = stage_of(j)
        plgpu.barrier_wait(k_full.at[stage])
        s = product(q_sm, k_sm.at[stage].T, zeros(QUERIES, KEYS))
        p, m, l, alpha = softmax(s, m, l, scale)
        plgpu.barrier_wait(v_full.at[stage])
        acc = product(p, v_sm.at[stage], acc * along_rows(alpha, acc))
        pl.when(j + STAGES < count)(lambda: copy(j + STAGES))
        return acc, m, l

    for j in range(STAGES):
        copy(j)
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
            operand(QUERIES, head_dim),
            *[operand(STAGES, KEYS, head_dim)] * 2,
            plgpu.Barrier(),
            *[plgpu.Barrier(num_barriers=STAGES)] * 2,
        ],
    )
