"""Step 7: CTAs stay and take work tiles from a schedule; without a mask two share all blocks."""

import functools
import heapq
import itertools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from step_common import (
    along_rows,
    barriers_of_cluster,
    before_any_key,
    hide_later_keys,
    launch,
    operand,
    product,
    rescale,
    zeros,
)

QUERIES, KEYS, STAGES = 64, 128, 2  # Queries of a consumer; keys of a block.
CONSUMERS, SMS = 2, 132  # SMs of an H100 or H200.
THRESHOLD = 8.0  # In base 2: so much m may lag behind the maximum, and p is 2**8 at most.


def softmax(s, m, l, scale):
    """Return the weights of a block, m and l with it, and the factor of all earlier sums."""
    c = scale * math.log2(math.e)  # m is in base 2.
    grown = jnp.maximum(m, jnp.max(s, axis=1) * c)
    m_new = jnp.where(grown - m > THRESHOLD, grown, m)
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s * c - along_rows(m_new, s))
    return p.astype(jnp.bfloat16), m_new, alpha * l + jnp.sum(p, axis=1), alpha


def stage_of(j):
    """Return where block j lies."""
    return lax.rem(j, jnp.int32(STAGES))


def schedule(batch, heads, length, is_causal, ctas):
    """Return for each cluster rows of (batch, head, tile, blocks); in front stands how many.

    Heads follow one another, so that the keys of one stay in the L2 cache. The longest tile of a
    head is first, and the cluster that is free first takes it: a tile for each of its `ctas`.
    """
    tiles = range(0, length // (CONSUMERS * QUERIES), ctas)
    free = [(0.0, cluster) for cluster in range(min(SMS // ctas, batch * heads * len(tiles)))]
    work = [[] for _ in free]
    for b, h, tile in itertools.product(range(batch), range(heads), reversed(tiles)):
        time, cluster = heapq.heappop(free)
        count = tile + 1 if is_causal else length // KEYS
        work[cluster].append((b, h, tile, count))
        heapq.heappush(free, (time + count + 1.5, cluster))  # 1.5: its beginning and its end.
    rows = np.zeros((len(work), 1 + max(map(len, work)), 4), np.int32)
    for row, its_tiles in zip(rows, work, strict=True):
        row[0], row[1 : 1 + len(its_tiles)] = len(its_tiles), its_tiles
    return rows


def kernel(schedule_ref, q_ref, k_ref, v_ref, o_ref, q_sm, k_sm, v_sm, o_sm, *barriers, is_causal):
    """Compute the work tiles of one CTA."""
    q_full, q_empty, k_full, v_full, k_empty, v_empty, ended = barriers
    cluster, rank, warpgroup = (lax.axis_index(x) for x in ("cluster", "rank", "warpgroup"))
    head_dim = k_ref.shape[-1]
    scale = head_dim**-0.5

    def for_each_work_tile(body):
        def run(i, base):  # base counts blocks of earlier tiles.
            work = [plgpu.load(schedule_ref.at[cluster, i + 1, n]) for n in range(4)]
            body(i, base, *work)
            return base + work[3]

        lax.fori_loop(0, plgpu.load(schedule_ref.at[cluster, 0, 0]), run, jnp.int32(0))

    def consume():
        plgpu.set_max_registers(240, action="increase")

        def work_tile(i, base, batch, head, tile, count):
            tile_of_warpgroup = (tile + rank) * CONSUMERS + warpgroup
            queries = batch, pl.ds(tile_of_warpgroup * QUERIES, QUERIES), head
            q, o = q_sm.at[warpgroup], o_sm.at[warpgroup]
            plgpu.barrier_wait(q_full.at[warpgroup])

            def step(j, state):
                acc, p, m, l = state
                stage, stage_before = stage_of(base + j), stage_of(base + j - 1)

                def qk_pv(s_ref, acc_ref):
                    acc_ref[...] = acc
                    plgpu.wgmma(s_ref, q, k_sm.at[stage].T)
                    plgpu.wgmma(acc_ref, p, v_sm.at[stage_before])
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                    plgpu.barrier_arrive(k_empty.at[stage])
                    p_new, m_new, l_new, alpha = softmax(s, m, l, scale)
                    plgpu.barrier_wait(v_full.at[stage])
                    acc_new = acc_ref[...]
                    plgpu.barrier_arrive(v_empty.at[stage_before])
                    return rescale(acc_new, alpha), p_new, m_new, l_new

                shapes = (QUERIES, KEYS), acc.shape
                plgpu.barrier_wait(k_full.at[stage])  # Not below: s = 0 would take instructions.
                return pl.run_scoped(qk_pv, *(plgpu.ACC(x, jnp.float32) for x in shapes))

            first, last = stage_of(base), stage_of(base + count - 1)
            plgpu.barrier_wait(k_full.at[first])
            s = product(q, k_sm.at[first].T, zeros(QUERIES, KEYS))
            plgpu.barrier_arrive(k_empty.at[first])
            if is_causal:
                s = hide_later_keys(s, tile_of_warpgroup * QUERIES, (count - 1) * KEYS)
            p, m, l, _ = softmax(s, *before_any_key(QUERIES), scale)
            plgpu.barrier_wait(v_full.at[first])
            acc, p, _, l = lax.fori_loop(1, count, step, (zeros(QUERIES, head_dim), p, m, l))
            plgpu.barrier_arrive(q_empty.at[warpgroup])
            acc = product(p, v_sm.at[last], acc)
            plgpu.barrier_arrive(v_empty.at[last])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The output before has left o.
            o[...] = (acc / along_rows(l, acc)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o, o_ref.at[queries])

        for_each_work_tile(work_tile)
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(ended.at[0])  # The other CTA may still arrive at barriers of this one.
        plgpu.barrier_wait(ended.at[0])

    def produce():
        plgpu.set_max_registers(24, action="decrease")
        share = functools.partial(plgpu.copy_gmem_to_smem, collective_axes="rank")

        def load_keys_and_values(i, base, batch, head, tile, count):
            def copy(j, _):
                stage, keys = stage_of(base + j), (batch, pl.ds((count - 1 - j) * KEYS, KEYS), head)
                pl.when(base + j >= STAGES)(lambda: plgpu.barrier_wait(k_empty.at[stage]))
                share(k_ref.at[keys], k_sm.at[stage], k_full.at[stage])
                pl.when(base + j >= STAGES)(lambda: plgpu.barrier_wait(v_empty.at[stage]))
                share(v_ref.at[keys], v_sm.at[stage], v_full.at[stage])

            lax.fori_loop(0, count, copy, None)

        def load_queries(consumer, i, base, batch, head, tile, count):
            queries = batch, pl.ds(((tile + rank) * CONSUMERS + consumer) * QUERIES, QUERIES), head
            pl.when(i > 0)(lambda: plgpu.barrier_wait(q_empty.at[consumer]))
            plgpu.copy_gmem_to_smem(q_ref.at[queries], q_sm.at[consumer], q_full.at[consumer])

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(lambda: for_each_work_tile(load_keys_and_values))
            load = functools.partial(load_queries, warp - 1)
            pl.when((warp > 0) & (warp <= CONSUMERS))(lambda: for_each_work_tile(load))

    pl.when(warpgroup < CONSUMERS)(consume)
    pl.when(warpgroup == CONSUMERS)(produce)


def attention(q, k, v, *, is_causal=False):
    """Return softmax(q k.T / sqrt(H)) v for bfloat16 [B, T, N, H]."""
    batch, length, heads, head_dim = q.shape
    ctas = 1 if is_causal else 2  # Of a cluster.
    rows = schedule(batch, heads, length, is_causal, ctas)
    return launch(
        functools.partial(kernel, is_causal=is_causal),
        *(rows, q, k, v),
        grid=dict(cluster=len(rows)),
        cluster=(ctas,),
        warpgroups=CONSUMERS + 1,
        scratch=[
            operand(CONSUMERS, QUERIES, head_dim),
            *[operand(STAGES, KEYS, head_dim)] * 2,
            operand(CONSUMERS, QUERIES, head_dim),
            *[plgpu.Barrier(num_barriers=CONSUMERS)] * 2,
            *[plgpu.Barrier(num_barriers=STAGES)] * 2,
            *[barriers_of_cluster(STAGES, CONSUMERS, ctas)] * 3,
        ],
    )
