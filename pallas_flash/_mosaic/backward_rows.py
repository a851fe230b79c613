"""Sums that lie in fragments, as rows.

    row = factor * (sum of the shares)      rounded to the dtype of the operands

`backward` puts sums of 64 rows into device memory as they lie in registers, see `ptx.OF_GROUP`.
Here a warpgroup takes those of a head back into its registers, and what it writes to shared memory
are rows. Reading and writing device memory is all that takes time.
"""

import dataclasses
import math

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
        heads: heads of the result.
        shares: sums for each of its rows.
        row_tiles: tiles of 64 rows.
        groups: of a tile's columns, see `ptx.OF_GROUP`.
        batch: the examples of an instance, see `common.by_instance`.
        own_factor: whether instances have their own.
        ends: whether it is told how many rows of each example there are.
    """

    heads: int
    shares: int
    row_tiles: int
    groups: int
    batch: int
    own_factor: bool
    ends: bool


def pallas_flash_rows(*refs, static: Static, staged):
    """64 rows of one head."""
    factor_ref, *seen_ref, fragments_ref, rows_ref = refs
    program = lax.axis_index("program")
    b, (row_tile, head) = common.digits(program, (static.row_tiles, static.heads))
    first_row = row_tile * ROWS
    instance = common.quotient(b, static.batch) if static.own_factor else 0
    factor = plgpu.load(factor_ref.at[instance])
    shares = jnp.int32(static.shares)
    if static.ends:
        # Where nobody is seen there are no sums to read.
        shares = jnp.where(first_row < plgpu.load(seen_ref[0].at[b]), shares, 0)
    first_sum = (b * static.heads + head) * static.shares

    def sum_of(group: int, count: int):
        def add(share, x):
            place = ((first_sum + share) * static.row_tiles + row_tile) * static.groups + group
            return x + ptx.load_fragments(fragments_ref.at[place], count)

        nothing = jnp.zeros((ROWS, ptx.GROUP * count), jnp.float32)
        return lax.fori_loop(jnp.int32(0), shares, add, plgpu.layout_cast(nothing, ptx.WGMMA))

    of_block = ptx.groups(ptx.COLUMNS)
    for n in range(staged.shape[0]):
        group = n * of_block
        x = sum_of(group, min(of_block, static.groups - group)) * factor
        staged.at[n][...] = ptx.columns(x.astype(staged.dtype), 0)
    plgpu.commit_smem()
    for n in range(staged.shape[0]):
        at = b, pl.ds(first_row, ROWS), head, common.block_of_columns(n, b)
        plgpu.copy_smem_to_gmem(staged.at[n], rows_ref.at[at])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def rows(fragments, factor, shape, dtype, *, batch: int, seen=None):
    """[B, T, N, H] of fragments.

    Args:
        fragments: float32 [B, N, shares, tiles of 64 rows, groups, `ptx.OF_GROUP`].
        factor: float32 [1 or instances].
        shape: of the result; its last rows and columns may be missing.
        dtype: of the result.
        batch: the examples of an instance, see `common.by_instance`.
        seen: int32 [B], how many of the first rows anything was added to; None for all.
    """
    _, heads, shares, row_tiles, groups, *group = fragments.shape
    [result] = common.launch(
        pallas_flash_rows,
        (factor, *([] if seen is None else [seen]), fragments.reshape(-1, *group)),
        outputs=[(shape, dtype)],
        memory=dict(staged=common.blocks(dtype, rows=ROWS, columns=ptx.GROUP * groups)),
        grid=dict(program=math.prod(fragments.shape[:2]) * row_tiles),
        warpgroups=1,
        static=Static(heads, shares, row_tiles, groups, batch, len(factor) > 1, seen is not None),
    )
    return result
