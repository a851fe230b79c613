"""What the backward begins with: delta, the LSE, and zeros where the sums of dq are to be.

    delta = rowsum(o * do)                                              [64]
    shift = rowsum(q * c)               for heads whose keys have a center c, see `_key_center`

Where a query sees nothing, and where it does not exist, delta is 0 and the LSE inf, so that it has
no weights and needs no mask. (In the forward its LSE is -inf.)

Reading and writing device memory is all that takes time. XLA would do one after the other, and for
rows that are behind an example's end, too.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._mosaic import common, ptx
from pallas_flash._problem import Problem
from pallas_flash._scores import LOG2E, LogSum

plgpu = common.plgpu

ROWS = 64


@dataclasses.dataclass(frozen=True)
class Static:
    """What the kernel knows when it is compiled.

    Attributes:
        q_len: queries.
        heads: query heads.
        tiles: of 64 queries.
        groups: of a tile's sums, see `ptx.OF_GROUP`; 0 if there are no sums.
        ends: whether it is told how many queries of each example there are.
        q_heads: query heads that share a key/value head.
        centers: whether keys have a center, which may be zero.
        large: whether the shift is that of a maximum apart from the LSE.
    """

    q_len: int
    heads: int
    tiles: int
    groups: int
    ends: bool
    q_heads: int
    centers: bool
    large: bool


def pallas_flash_preprocess(*refs, static: Static, q_sm, o_sm, do_sm, numbers_sm, full, q_full):
    """64 queries of one head."""
    refs = list(refs)
    sums_ref = refs.pop() if static.groups else None
    shift_ref = refs.pop() if static.large else None
    # Queries, centers and whether these are not zero are there if `static.centers`.
    before: list[Any] = [None] * 3 + refs[:-5]
    q_ref, center_ref, is_centered_ref = before[-3:]
    o_ref, do_ref, lse_ref, delta_ref, new_lse_ref = refs[-5:]
    program = lax.axis_index("program")
    b, (tile, h) = common.digits(program, (static.tiles, static.heads))
    rows = pl.ds(tile * ROWS, ROWS)
    delta_sm, lse_sm, given_sm, shift_sm = (numbers_sm.at[i] for i in range(4))

    def row(x):
        return plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), ptx.ROW)

    def compute():
        blocks = range(do_sm.shape[0])
        for n in blocks:
            at = b, rows, h, common.block_of_columns(n, b)
            plgpu.copy_gmem_to_smem(o_ref.at[at], o_sm.at[n], full)
            plgpu.copy_gmem_to_smem(do_ref.at[at], do_sm.at[n], full)
        plgpu.copy_gmem_to_smem(lse_ref.at[b, h, rows], given_sm, full)
        if sums_ref is not None:
            zeros = jnp.zeros((ROWS, ptx.GROUP * static.groups), jnp.float32)
            first = ((b * static.heads + h) * static.tiles + tile) * static.groups
            ptx.store_fragments(plgpu.layout_cast(zeros, ptx.WGMMA), sums_ref.at[first])
        plgpu.barrier_wait(full)
        delta, lse = row(0.0), plgpu.load(given_sm, layout=ptx.ROW)
        for n in blocks:
            o, do = (plgpu.load(x.at[n], layout=ptx.WGMMA) for x in (o_sm, do_sm))
            delta = delta + jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=1)
        sees = lse != -jnp.inf
        delta_sm[...] = jnp.where(sees, delta, 0.0)
        lse_sm[...] = jnp.where(sees, lse, jnp.inf)
        if static.centers:
            shift_sm[...] = row(0.0)
            kv_head = common.quotient(h, static.q_heads)
            centered = plgpu.load(is_centered_ref.at[b, kv_head]) != 0
            pl.when(centered)(lambda: center(kv_head))

    def center(kv_head):
        """Shifts the LSE, or tells its shift. All else is in shared memory by now."""
        blocks = range(q_sm.shape[0])
        for n in blocks:
            at = b, rows, h, common.block_of_columns(n, b)
            plgpu.copy_gmem_to_smem(q_ref.at[at], q_sm.at[n], q_full)
        plgpu.barrier_wait(q_full)
        shift = row(0.0)
        for n in blocks:
            q = plgpu.load(q_sm.at[n], layout=ptx.WGMMA).astype(jnp.float32)
            c = center_ref.at[b, kv_head, pl.ds(n * ptx.COLUMNS, ptx.COLUMNS)]
            c = plgpu.load(c, layout=ptx.COLUMN, optimized=False)
            shift = shift + jnp.sum(q * common.along_columns(c, q.shape), axis=1)
        lse = plgpu.load(lse_sm, layout=ptx.ROW)
        if static.large:
            shift_sm[...] = jnp.where(lse < jnp.inf, shift, 0.0)
        else:
            lse_sm[...] = jnp.where(lse < jnp.inf, lse - shift, jnp.inf)

    def nothing():
        delta_sm[...] = row(0.0)
        shift_sm[...] = row(0.0)
        lse_sm[...] = row(jnp.inf)

    last = plgpu.load(refs[0].at[b]) if static.ends else static.q_len
    some = tile * ROWS < last
    pl.when(some)(compute)
    pl.when(jnp.logical_not(some))(nothing)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(delta_sm, delta_ref.at[b, h, rows])
    plgpu.copy_smem_to_gmem(lse_sm, new_lse_ref.at[b, h, rows])
    if shift_ref is not None:
        plgpu.copy_smem_to_gmem(shift_sm, shift_ref.at[b, h, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def preprocess(
    problem: Problem, o, do, log_sum: LogSum, *, head_dim: int = 0, seen=None, center=None
):
    """Delta, the `LogSum` for keys less their center, and zeros for the sums of dq.

    All are float32 [B, N, whole tiles of 128 queries], but m, which is [B, N, T].

    Args:
        problem: the call.
        o: [B, T, N, V].
        do: likewise.
        log_sum: of float32 [B, N, T], -inf where a query sees nothing.
        head_dim: the columns of these sums; without any there are no zeros.
        seen: int32 [B], how many of the first queries see something; None if it is not known.
            Of the sums of those behind nothing is written.
        center: float32 [B, K, H], or None.

    Returns:
        delta, the LSE, and if there is a head size float32 [B, N, tiles of 64 queries, groups,
        `ptx.OF_GROUP`].
    """
    p, (m, lse) = problem, log_sum
    q_len, heads, value_dim = o.shape[1:]
    tiles, groups = -(-q_len // (2 * ROWS)) * 2, ptx.groups(head_dim)
    large = m is not None and center is not None
    centers, q_blocks = center is not None, -(-p.head_dim // ptx.COLUMNS)

    def run(_, o, do, lse, *others):
        count = len(o) * heads * tiles
        numbers = [((len(o), heads, tiles * ROWS), jnp.float32)] * (3 if large else 2)
        sums = [((count * groups, *ptx.OF_GROUP), jnp.float32)] if groups else []
        blocks = common.blocks(o.dtype, rows=ROWS, columns=value_dim)
        found = common.launch(
            pallas_flash_preprocess,
            (*others, o, do, lse),
            outputs=[*numbers, *sums],
            memory=dict(
                q_sm=common.blocks(o.dtype, rows=ROWS, columns=p.head_dim) if centers else None,
                o_sm=blocks,
                do_sm=blocks,
                numbers_sm=plgpu.SMEM((4, ROWS), jnp.float32),
                full=plgpu.Barrier(num_arrivals=2 * blocks.shape[0] + 1),
                q_full=plgpu.Barrier(num_arrivals=q_blocks) if centers else None,
            ),
            grid=dict(program=count),
            warpgroups=1,
            static=static,
        )
        shape = len(o), heads, tiles, groups, *ptx.OF_GROUP
        return *found[: len(numbers)], *(x.reshape(shape) for x in found[len(numbers) :])

    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, -q_len % ROWS)), constant_values=-jnp.inf)
    static = Static(q_len, heads, tiles, groups, seen is not None, p.groups, centers, large)
    others = [] if seen is None else [seen]
    if center is not None:
        shift = center * p.scale.astype(jnp.float32) * (1 if large else LOG2E)
        shift = jnp.pad(shift, ((0, 0), (0, 0), (0, -p.head_dim % ptx.COLUMNS)))
        others += [p.query, shift, (center != 0).any(axis=2).astype(jnp.int32)]
    delta, lse, *rest = common.by_instance(run, len(o))((), o, do, lse, *others)
    if large:
        m = m - rest.pop(0)[:, :, :q_len]
    return delta, LogSum(m, lse), *rest
