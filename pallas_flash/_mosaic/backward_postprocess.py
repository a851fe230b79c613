"""Sums that lie in fragments, as rows.

    row_i = factor * (sum of the shares) + w_i c        rounded to the dtype of the operands

`backward` puts sums of 64 rows into device memory as they lie in registers, see `ptx.OF_GROUP`.
Here a warpgroup takes those of a head back into its registers, and what it writes to shared memory
are rows. Reading and writing device memory is all that takes time.

The term w_i c is compiled in for dq of centered keys, where sums of ds are not zero: c is the
center and w_i is scale times such a sum, see `_key_center`.
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
        heads_of_center: heads that share a center c; 0 without the term w_i c.
    """

    heads: int
    shares: int
    row_tiles: int
    groups: int
    batch: int
    own_factor: bool
    ends: bool
    heads_of_center: int


def pallas_flash_postprocess(*refs, static: Static, staged):
    """64 rows of one head."""
    factor_ref, *refs, fragments_ref, rows_ref = refs
    seen_ref = refs.pop(0) if static.ends else None
    weights_ref, center_ref = refs or (None, None)
    program = lax.axis_index("program")
    b, (row_tile, head) = common.digits(program, (static.row_tiles, static.heads))
    first_row = row_tile * ROWS
    instance = common.quotient(b, static.batch) if static.own_factor else 0
    factor = plgpu.load(factor_ref.at[instance])
    shares = jnp.int32(static.shares)
    if seen_ref is not None:
        # Where nobody is seen there are no sums to read.
        shares = jnp.where(first_row < plgpu.load(seen_ref.at[b]), shares, 0)
    first_sum = (b * static.heads + head) * static.shares

    def sum_of(group: int, count: int):
        def add(share, x):
            place = ((first_sum + share) * static.row_tiles + row_tile) * static.groups + group
            return x + ptx.load_fragments(fragments_ref.at[place], count)

        nothing = jnp.zeros((ROWS, ptx.GROUP * count), jnp.float32)
        return lax.fori_loop(jnp.int32(0), shares, add, plgpu.layout_cast(nothing, ptx.WGMMA))

    def with_center(x, first_column: int):
        if weights_ref is None or center_ref is None:
            return x
        weights = weights_ref.at[b, head, pl.ds(first_row, ROWS)]
        at = b, common.quotient(head, static.heads_of_center), pl.ds(first_column, x.shape[1])
        weights = plgpu.load(weights, layout=ptx.ROW, optimized=False)
        c = plgpu.load(center_ref.at[at], layout=ptx.COLUMN, optimized=False)
        return x + common.along_rows(weights, x.shape) * common.along_columns(c, x.shape)

    of_block = ptx.groups(ptx.COLUMNS)
    for n in range(staged.shape[0]):
        group = n * of_block
        x = sum_of(group, min(of_block, static.groups - group)) * factor
        x = with_center(x, group * ptx.GROUP)
        staged.at[n][...] = ptx.columns(x.astype(staged.dtype), 0)
    plgpu.commit_smem()
    for n in range(staged.shape[0]):
        at = b, pl.ds(first_row, ROWS), head, common.block_of_columns(n, b)
        plgpu.copy_smem_to_gmem(staged.at[n], rows_ref.at[at])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def postprocess(fragments, factor, shape, dtype, *, batch: int, seen=None, weighted_center=()):
    """[B, T, N, H] of fragments.

    Args:
        fragments: float32 [B, N, shares, tiles of 64 rows, groups, `ptx.OF_GROUP`].
        factor: float32 [1 or instances].
        shape: of the result; its last rows and columns may be missing.
        dtype: of the result.
        batch: the examples of an instance, see `common.by_instance`.
        seen: int32 [B], how many of the first rows anything was added to; None for all.
        weighted_center: w, float32 [B, N, whole tiles of 64 rows], and c, [B, K, columns].
    """
    _, heads, shares, row_tiles, groups, *group = fragments.shape
    others = [] if seen is None else [seen]
    heads_of_center = heads // weighted_center[1].shape[1] if weighted_center else 0
    static = Static(
        *(heads, shares, row_tiles, groups, batch, len(factor) > 1, seen is not None),
        heads_of_center,
    )
    [result] = common.launch(
        pallas_flash_postprocess,
        (factor, *others, *weighted_center, fragments.reshape(-1, *group)),
        outputs=[(shape, dtype)],
        memory=dict(staged=common.blocks(dtype, rows=ROWS, columns=ptx.GROUP * groups)),
        grid=dict(program=math.prod(fragments.shape[:2]) * row_tiles),
        warpgroups=1,
        static=static,
    )
    return result
