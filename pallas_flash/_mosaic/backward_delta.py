"""What the backward begins with: delta, and zeros where the sums of dq are to be.

    delta = rowsum(o * do)                                              [64]

Reading and writing device memory is all that takes time. XLA would do both one after the other, and
for rows that are behind an example's end, too.
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
        heads: query heads.
        tiles: of 64 queries.
        groups: of a tile's sums, see `ptx.OF_GROUP`; 0 if there are no sums.
        ends: whether it is told how many queries of each example there are.
    """

    heads: int
    tiles: int
    groups: int
    ends: bool


def pallas_flash_delta(*refs, static: Static, o_sm, do_sm, delta_sm, full):
    """64 queries of one head."""
    refs = list(refs)
    sums_ref = refs.pop() if static.groups else None
    *seen_ref, o_ref, do_ref, delta_ref = refs
    program = lax.axis_index("program")
    b, (tile, h) = common.digits(program, (static.tiles, static.heads))
    rows = pl.ds(tile * ROWS, ROWS)
    nothing = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ptx.ROW)

    def compute():
        blocks = range(o_sm.shape[0])
        for n in blocks:
            at = b, rows, h, common.block_of_columns(n, b)
            plgpu.copy_gmem_to_smem(o_ref.at[at], o_sm.at[n], full)
            plgpu.copy_gmem_to_smem(do_ref.at[at], do_sm.at[n], full)
        if sums_ref is not None:
            zeros = jnp.zeros((ROWS, ptx.GROUP * static.groups), jnp.float32)
            first = ((b * static.heads + h) * static.tiles + tile) * static.groups
            ptx.store_fragments(plgpu.layout_cast(zeros, ptx.WGMMA), sums_ref.at[first])
        plgpu.barrier_wait(full)
        delta = nothing
        for n in blocks:
            o, do = (plgpu.load(x.at[n], layout=ptx.WGMMA) for x in (o_sm, do_sm))
            delta = delta + jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=1)
        delta_sm[...] = delta

    if static.ends:
        some = tile * ROWS < plgpu.load(seen_ref[0].at[b])
        pl.when(some)(compute)

        @pl.when(jnp.logical_not(some))
        def _():
            delta_sm[...] = nothing
    else:
        compute()
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(delta_sm, delta_ref.at[b, h, rows])
    plgpu.wait_smem_to_gmem(0)


def delta(o, do, *, head_dim: int = 0, seen=None):
    """Delta, float32 [B, N, T], and zeros for the sums of dq.

    Args:
        o: [B, T, N, V].
        do: likewise.
        head_dim: the columns of these sums; without any there are no zeros.
        seen: int32 [B], how many of the first queries see something; None if it is not known.
            Delta of those behind is zero, and of their sums nothing is written.

    Returns:
        delta, and if there is a head size float32 [B, N, tiles of 64 queries, groups,
        `ptx.OF_GROUP`]; the number of tiles is even.
    """
    heads, value_dim = o.shape[2:]
    tiles, groups = -(-o.shape[1] // (2 * ROWS)) * 2, ptx.groups(head_dim)

    def run(_, o, do, *seen):
        count = len(o) * heads * tiles
        sums = [((count * groups, *ptx.OF_GROUP), jnp.float32)] if groups else []
        blocks = common.blocks(o.dtype, rows=ROWS, columns=value_dim)
        found, *zeros = common.launch(
            pallas_flash_delta,
            (*seen, o, do),
            outputs=[((len(o), heads, tiles * ROWS), jnp.float32), *sums],
            memory=dict(
                o_sm=blocks,
                do_sm=blocks,
                delta_sm=plgpu.SMEM((ROWS,), jnp.float32),
                full=plgpu.Barrier(num_arrivals=2 * blocks.shape[0]),
            ),
            grid=dict(program=count),
            warpgroups=1,
            static=Static(heads, tiles, groups, bool(seen)),
        )
        return found, *(x.reshape(len(o), heads, tiles, groups, *ptx.OF_GROUP) for x in zeros)

    found, *zeros = common.by_instance(run, len(o))((), o, do, *([] if seen is None else [seen]))
    return found[:, :, : o.shape[1]], *zeros
