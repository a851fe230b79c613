"""What the backward begins with: delta, the LSE, and zeros where the sums of dq are to be.

    delta = rowsum(o * do)                                              [64]

Where a query sees nothing, and where it does not exist, delta is 0 and the LSE inf, so that it has
no weights and needs no mask. (In the forward its LSE is -inf.)

Reading and writing device memory is all that takes time. XLA would do one after the other, and for
rows that are behind an example's end, too.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._mosaic import common, ptx

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
    """

    q_len: int
    heads: int
    tiles: int
    groups: int
    ends: bool


def pallas_flash_delta(*refs, static: Static, o_sm, do_sm, numbers_sm, full):
    """64 queries of one head."""
    refs = list(refs)
    sums_ref = refs.pop() if static.groups else None
    *seen_ref, o_ref, do_ref, lse_ref, delta_ref, new_lse_ref = refs
    program = lax.axis_index("program")
    b, (tile, h) = common.digits(program, (static.tiles, static.heads))
    rows = pl.ds(tile * ROWS, ROWS)
    delta_sm, lse_sm, given_sm = (numbers_sm.at[i] for i in range(3))

    def row(x):
        return plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), ptx.ROW)

    def compute():
        blocks = range(o_sm.shape[0])
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

    def nothing():
        delta_sm[...] = row(0.0)
        lse_sm[...] = row(jnp.inf)

    last = plgpu.load(seen_ref[0].at[b]) if static.ends else static.q_len
    some = tile * ROWS < last
    pl.when(some)(compute)
    pl.when(jnp.logical_not(some))(nothing)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(delta_sm, delta_ref.at[b, h, rows])
    plgpu.copy_smem_to_gmem(lse_sm, new_lse_ref.at[b, h, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def delta(o, do, lse, *, head_dim: int = 0, seen=None):
    """Delta and the LSE, float32 [B, N, whole tiles of 128 queries], and zeros for the sums of dq.

    Args:
        o: [B, T, N, V].
        do: likewise.
        lse: float32 [B, N, T], -inf where a query sees nothing.
        head_dim: the columns of these sums; without any there are no zeros.
        seen: int32 [B], how many of the first queries see something; None if it is not known.
            Of the sums of those behind nothing is written.

    Returns:
        delta, the LSE, and if there is a head size float32 [B, N, tiles of 64 queries, groups,
        `ptx.OF_GROUP`].
    """
    q_len, heads, value_dim = o.shape[1:]
    tiles, groups = -(-q_len // (2 * ROWS)) * 2, ptx.groups(head_dim)

    def run(_, o, do, lse, *seen):
        count = len(o) * heads * tiles
        sums = [((count * groups, *ptx.OF_GROUP), jnp.float32)] if groups else []
        blocks = common.blocks(o.dtype, rows=ROWS, columns=value_dim)
        found = common.launch(
            pallas_flash_delta,
            (*seen, o, do, lse),
            outputs=[((len(o), heads, tiles * ROWS), jnp.float32)] * 2 + sums,
            memory=dict(
                o_sm=blocks,
                do_sm=blocks,
                numbers_sm=plgpu.SMEM((3, ROWS), jnp.float32),
                full=plgpu.Barrier(num_arrivals=2 * blocks.shape[0] + 1),
            ),
            grid=dict(program=count),
            warpgroups=1,
            static=Static(q_len, heads, tiles, groups, bool(seen)),
        )
        shape = len(o), heads, tiles, groups, *ptx.OF_GROUP
        return *found[:2], *(x.reshape(shape) for x in found[2:])

    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, -q_len % ROWS)), constant_values=-jnp.inf)
    return common.by_instance(run, len(o))((), o, do, lse, *([] if seen is None else [seen]))
