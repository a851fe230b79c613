"""The backward's postprocess: float32 sums in fragments become rows of a gradient.

    row_i = factor * (sum of the partial sums) + w_i c      rounded to the dtype of the operands

`backward_kernel` leaves sums of 64 rows in device memory as they lie in registers, see
`ptx.OF_GROUP`. Here a warpgroup takes a head's sums back into its registers, and writes rows to
shared memory, from where copies (TMA) take them. Reading and writing device memory is all that
takes time.

The term w_i c is compiled in for dq of centered keys, where sums of ds are not zero: c is the
center and w_i is scale times such a sum, see `_problem.key_center`.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common, ptx

plgpu = common.plgpu


@dataclasses.dataclass(frozen=True)
class PostprocessConfig:
    """The configuration of the kernel, known at compile time.

    Attributes:
        heads: heads of the result.
        partial: partial sums of each row.
        row_tiles: tiles of 64 rows.
        groups: groups of a tile's columns, see `ptx.OF_GROUP`.
        batch: batch elements of an instance, see `common.batch_instances`.
        own_factor: whether instances have factors of their own.
    """

    heads: int
    partial: int
    row_tiles: int
    groups: int
    batch: int
    own_factor: bool


def pallas_flash_postprocess(
    factor_ref,
    fragments_ref,
    valid_ref,
    weighted_center,
    rows_ref,
    *,
    static: PostprocessConfig,
    staged,
):
    """Compute 64 rows of one head."""
    config = static
    b, (row_tile, head) = common.digits(lax.axis_index("cta"), (config.row_tiles, config.heads))
    first_row = row_tile * ptx.ROWS
    instance = common.quotient(b, config.batch) if config.own_factor else 0
    factor = plgpu.load(factor_ref.at[instance])
    partial = jnp.int32(config.partial)
    if valid_ref is not None:
        # Behind the valid rows there are no sums to read.
        partial = jnp.where(first_row < plgpu.load(valid_ref.at[b]), partial, 0)
    first_sum = (b * config.heads + head) * config.partial

    def sum_of(group: int, count: int):
        def add(i, x):
            place = ((first_sum + i) * config.row_tiles + row_tile) * config.groups + group
            return x + ptx.load_fragments(fragments_ref.at[place], count)

        nothing = jnp.zeros((ptx.ROWS, ptx.GROUP * count), jnp.float32)
        return lax.fori_loop(jnp.int32(0), partial, add, plgpu.layout_cast(nothing, ptx.WGMMA))

    def with_center(x, first_column: int):
        if weighted_center is None:
            return x
        weights_ref, center_ref = weighted_center
        center_head = common.quotient(head, config.heads // center_ref.shape[1])
        weights = weights_ref.at[b, head, pl.ds(first_row, ptx.ROWS)]
        c = center_ref.at[b, center_head, pl.ds(first_column, x.shape[1])]
        weights = plgpu.load(weights, layout=ptx.ROW, optimized=False)
        c = plgpu.load(c, layout=ptx.COLUMN, optimized=False)
        return x + common.along_rows(weights, x.shape) * common.along_columns(c, x.shape)

    groups_of_block = ptx.groups(ptx.COLUMNS)
    for n in range(staged.shape[0]):
        group = n * groups_of_block
        x = sum_of(group, min(groups_of_block, config.groups - group)) * factor
        x = with_center(x, group * ptx.GROUP)
        staged.at[n][...] = ptx.columns(x.astype(staged.dtype), 0)
    plgpu.commit_smem()
    for n in range(staged.shape[0]):
        at = b, pl.ds(first_row, ptx.ROWS), head, common.block_of_columns(n, b)
        plgpu.copy_smem_to_gmem(staged.at[n], rows_ref.at[at])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def postprocess(fragments, factor, shape, dtype, *, batch: int, valid=None, weighted_center=None):
    """Return rows [B, T, N, H] of fragments.

    Args:
        fragments: float32 [B, N, partial sums, tiles of 64 rows, groups, `ptx.OF_GROUP`].
        factor: float32 [1 or instances].
        shape: of the result; its last rows and columns may be missing.
        dtype: of the result.
        batch: batch elements of an instance, see `common.batch_instances`.
        valid: int32 [B], how many of the first rows anything was added to; None for all.
        weighted_center: w, float32 [B, N, tiles of 128 rows], and c, [B, K, columns]; or None.
    """
    _, heads, partial, row_tiles, groups, *group = fragments.shape
    [result] = common.launch(
        pallas_flash_postprocess,
        (factor, fragments.reshape(-1, *group), valid, weighted_center),
        outputs=[(shape, dtype)],
        memory=dict(staged=common.blocks(dtype, rows=ptx.ROWS, columns=ptx.GROUP * groups)),
        grid=dict(cta=math.prod(fragments.shape[:2]) * row_tiles),
        warpgroups=1,
        static=PostprocessConfig(heads, partial, row_tiles, groups, batch, len(factor) > 1),
    )
    return result
