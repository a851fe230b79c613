"""Tangents of o and of the LSE of a resident query tile, with keys and values streamed.

    s      = q @ k.T            s_dot = scale * (q_dot @ k.T + q @ k_dot.T)     [block_q, block_kv]
    p      = exp2(c * s - lse_log2)   c = scale * log2(e); both through the scores, see `scores`
    mass   = mass + rowsum(p)
    mean'  = mean + rowsum(p * (s_dot - mean)) / mass                           [block_q]
    p_dot  = p * (s_dot - mean')
    acc    = acc + (mean - mean') * o + dropout(p_dot) @ v + dropout(p) @ v_dot [block_q, V]
    o      = o + dropout(p) @ v                                                 [block_q, V]

    at the end    lse_dot = rowsum(p * s_dot) = mean * mass     o_dot = acc + (mean - lse_dot) * o

p_dot is rounded to the inputs' dtype. Without the mean of the keys so far it would be rounded to
the size of s_dot, of which a part that all keys share cancels in o_dot.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash._backends.triton import memory, visibility
from pallas_flash._backends.triton.grid import QueryTiles
from pallas_flash._backends.triton.launch import launch, load_tables, whole
from pallas_flash._backends.triton.spec import KernelSpec, make_spec, softmax_shift
from pallas_flash._problem.dropout import rescaled
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.scores import LogSum
from pallas_flash._problem.tile_sizes import Tile
from pallas_flash._problem.traversal import in_tile, visit


def pallas_flash_tangents(
    q_ref,
    q_dot_ref,
    k_ref,
    k_dot_ref,
    v_ref,
    v_dot_ref,
    scale_ref,
    *refs,
    spec: KernelSpec,
    here,
):
    """Compute one query tile of one head."""
    *refs, o_dot_ref, lse_dot_ref = refs
    log_sum_refs, tables = spec.log_sum(refs)
    tiles, extras = load_tables(tables, spec, streamed=spec.kv)
    mask, block_kv, scale = extras.mask, spec.kv.block, scale_ref[0]
    b, h, q_tile = here()
    rows = spec.rows(b, h, q_tile, q_ref)
    q_dot = memory.load(q_dot_ref, rows.valid, spec.head_dim)
    log_sum = jax.tree.map(lambda ref: memory.load_row(ref, rows.valid)[:, None], log_sum_refs)
    shift = softmax_shift(extras, log_sum)

    def step(kv_tile, masked, carry):
        acc, o, mass, mean = carry
        k_pos = in_tile(kv_tile, block_kv)
        at = rows.indices(k_pos)
        keys = visibility.keys_to_load(spec, mask, rows, k_pos, masked)
        span = pl.ds(kv_tile * block_kv, block_kv)
        k, k_dot = (memory.load(x.at[span, :], keys, spec.head_dim) for x in (k_ref, k_dot_ref))
        v, v_dot = (memory.load(x.at[span, :], keys, spec.value_dim) for x in (v_ref, v_dot_ref))
        s, c, pull = spec.logits_vjp(extras, spec.dot_t(rows.q, k), scale, *at)
        # A score depends on one product alone: its derivative is the same in both modes.
        s_dot = pull(scale * (spec.dot_t(q_dot, k) + spec.dot_t(rows.q, k_dot)))
        p = spec.probabilities(s, c, shift)
        if masked:
            ok = mask.allowed(*at)
            p, s_dot = jnp.where(ok, p, 0.0), jnp.where(ok, s_dot, 0.0)
        mass = mass + jnp.sum(p, axis=1)
        change = jnp.sum(p * (s_dot - mean[:, None]), axis=1) / jnp.where(mass > 0.0, mass, 1.0)
        mean = mean + change
        p_dot = p * (s_dot - mean[:, None])
        keep = spec.kept_in_tile(extras, b, h, q_tile, kv_tile)
        p, p_dot = (spec.drop(keep, x).astype(v.dtype) for x in (p, p_dot))
        acc = acc - change[:, None] * o + spec.dot(p_dot, v) + spec.dot(p, v_dot)
        return acc, o + spec.dot(p, v), mass, mean

    acc = jnp.zeros((len(rows.pos), v_ref.shape[-1]), jnp.float32)
    row = jnp.zeros(rows.pos.shape, jnp.float32)
    acc, o, mass, mean = visit(tiles(0), step, (acc, acc, row, row), spec.sparsity)
    # Without a sink the mass is 1 but for the rounding of the LSE.
    lse_dot = mean if extras.sinks is None else mean * mass
    o_dot = rescaled(extras.dropout, acc + (mean - lse_dot)[:, None] * o)
    memory.store(o_dot_ref, o_dot, rows.valid, spec.value_dim)
    memory.store_row(lse_dot_ref, lse_dot, rows.valid)


def small_tile(dq: Tile, width: int) -> Tile:
    """Return a tile that needs no more shared memory than dq's tile.

    dq has q and do resident, and streams k and v. Here q, k and v have a tangent beside them. A row
    has two sums of `width` numbers, and four warps have registers for 64 rows of 128 numbers.
    """
    block_q = min(64 if width <= 128 else 32, dq.block_q)
    room = dq.block_q + dq.num_stages * dq.block_kv

    def in_two_stages(block_kv):
        return block_q + 4 * block_kv <= room

    long_steps = width <= 64 and in_two_stages(64)
    block_kv = min(64 if long_steps else 32, dq.block_kv)
    return Tile(block_q, block_kv, 4, 2 if in_two_stages(block_kv) else 1)


def tangents(problem: Problem, log_sum: LogSum, dots: tuple, dq: Tile, *, interpret: bool) -> tuple:
    """Return the tangents of o [B, T, N, V] and of the natural LSE, float32 [B, N, T].

    Args:
        problem: the call.
        log_sum: float32 [B, N, T].
        dots: the tangents of queries, keys and values.
        dq: the tile of the dq pass.
        interpret: whether the kernel runs in the interpreter.
    """
    p, tile = problem, small_tile(dq, problem.value_dim)
    q_dot, k_dot, v_dot = dots
    spec, extras, table = make_spec(p, tile, streamed="kv", interpret=interpret)
    layout = QueryTiles(p, spec, extras.mask)
    statistic = layout.row_statistic()
    o_dot, lse_dot = launch(
        pallas_flash_tangents,
        [
            *((x, layout.rows(p.head_dim)) for x in (p.query, q_dot)),
            *((x, layout.keys(p.head_dim)) for x in (p.key, k_dot)),
            *((x, layout.keys(p.value_dim)) for x in (p.value, v_dot)),
            whole(p.scale[None]),
            *((x, statistic) for x in jax.tree.leaves(log_sum)),
            *layout.operands(extras, table),
        ],
        [
            ((*p.query.shape[:3], p.value_dim), p.dtype, layout.rows(p.value_dim)),
            ((p.batch, p.num_heads, p.q_len), jnp.float32, statistic),
        ],
        spec=spec,
        tile=tile,
        grid=layout.grid,
        here=layout.here,
    )
    return o_dot, lse_dot
