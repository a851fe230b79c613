"""Step 4: the softmax of a block runs under the product p v of the block before it."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from step_common import along_rows, before_any_key, launch, operand, product, zeros

QUERIES, KEYS, STAGES = 64, 128, 2  # Queries of a consumer; keys of a block.
CONSUMERS = 2


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


def kernel(q_ref, k_ref, v_ref, o_ref, q_sm, k_sm, v_sm, *barriers):
    """Compute one query tile for each consumer, all of one head."""
    q_full, k_full, v_full, k_empty, v_empty = barriers
    head, tile, batch = (lax.axis_index(x) for x in ("head", "tile", "batch"))
    warpgroup = lax.axis_index("warpgroup")
    _, length, _, head_dim = k_ref.shape
    count, scale = length // KEYS, head_dim**-0.5

    def consume():
        plgpu.set_max_registers(240, action="increase")
        tile_of_warpgroup = tile * CONSUMERS + warpgroup
        queries = batch, pl.ds(tile_of_warpgroup * QUERIES, QUERIES), head
        q = q_sm.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[queries], q, q_full.at[warpgroup])
        plgpu.barrier_wait(q_full.at[warpgroup])

        def step(j, state):
            acc, p, m, l = state
            stage, stage_before = stage_of(j), stage_of(j - 1)

            def qk_pv(s_ref, acc_ref):
                acc_ref[...] = acc
                plgpu.barrier_wait(k_full.at[stage])
                plgpu.wgmma(s_ref, q, k_sm.at[stage].T)
                plgpu.wgmma(acc_ref, p, v_sm.at[stage_before])
                s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                plgpu.barrier_arrive(k_empty.at[stage])
                p_new, m_new, l_new, alpha = softmax(s, m, l, scale)
                plgpu.barrier_wait(v_full.at[stage])
                acc_new = acc_ref[...]
                plgpu.barrier_arrive(v_empty.at[stage_before])
                return acc_new * along_rows(alpha, acc), p_new, m_new, l_new

            shapes = (QUERIES, KEYS), acc.shape
            return pl.run_scoped(qk_pv, *(plgpu.ACC(x, jnp.float32) for x in shapes))

        plgpu.barrier_wait(k_full.at[0])
        s = product(q, k_sm.at[0].T, zeros(QUERIES, KEYS))
        plgpu.barrier_arrive(k_empty.at[0])
        p, m, l, _ = softmax(s, *before_any_key(QUERIES), scale)
        plgpu.barrier_wait(v_full.at[0])
        acc, p, _, l = lax.fori_loop(1, count, step, (zeros(QUERIES, head_dim), p, m, l))
        acc = product(p, v_sm.at[(count - 1) % STAGES], acc)

        q[...] = (acc / along_rows(l, acc)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, o_ref.at[queries])
        plgpu.wait_smem_to_gmem(0)

    def produce():
        plgpu.set_max_registers(24, action="decrease")

        def copy(j, _):
            stage, keys = stage_of(j), (batch, pl.ds(j * KEYS, KEYS), head)
            pl.when(j >= STAGES)(lambda: plgpu.barrier_wait(k_empty.at[stage]))
            plgpu.copy_gmem_to_smem(k_ref.at[keys], k_sm.at[stage], k_full.at[stage])
            pl.when(j >= STAGES)(lambda: plgpu.barrier_wait(v_empty.at[stage]))
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_sm.at[stage], v_full.at[stage])

        lax.fori_loop(0, count, copy, None)

    pl.when(warpgroup < CONSUMERS)(consume)
    pl.when(warpgroup == CONSUMERS)(produce)


def attention(q, k, v):
    """Return softmax(q k.T / sqrt(H)) v for bfloat16 [B, T, N, H]."""
    batch, length, heads, head_dim = q.shape
    return launch(
        kernel,
        *(q, k, v),
        grid=dict(head=heads, tile=length // (CONSUMERS * QUERIES), batch=batch),
        warpgroups=CONSUMERS + 1,
        scratch=[
            operand(CONSUMERS, QUERIES, head_dim),
            *[operand(STAGES, KEYS, head_dim)] * 2,
            plgpu.Barrier(num_barriers=CONSUMERS),
            *[plgpu.Barrier(num_barriers=STAGES)] * 2,
            *[plgpu.Barrier(num_barriers=STAGES, num_arrivals=CONSUMERS)] * 2,
        ],
    )
