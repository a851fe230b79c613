"""The backward's preprocess: delta, the LSE, and zeros where sums of dq will be added.

    delta = rowsum(o * do)                                              [64]
    shift = scale * rowsum(q * c)       off the LSE, if keys have a center c, see `key_center`

Where a query sees nothing, and where it does not exist, delta is 0 and the LSE inf, so that it has
no weights and needs no mask. (In the forward its LSE is -inf.)

A CTA is one warpgroup with 64 queries of one head. Reading and writing device memory is all that
takes time. XLA would do one after the other, and for rows behind a valid length, too.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common, ptx
from pallas_flash._problem.problem import Problem, widened
from pallas_flash._problem.scores import LOG2E, LogSum

plgpu = common.plgpu


@dataclasses.dataclass(frozen=True)
class PreprocessConfig:
    """The configuration of the kernel, known at compile time.

    Attributes:
        q_len: queries.
        heads: query heads.
        tiles: tiles of 64 queries.
        groups: groups of a tile's sums, see `ptx.OF_GROUP`; 0 if there are no sums.
        q_heads: query heads that share a K/V head.
        large: whether the shift is of a maximum apart from the LSE.
    """

    q_len: int
    heads: int
    tiles: int
    groups: int
    q_heads: int
    large: bool


class Inputs(NamedTuple):
    """The arrays that the kernel reads.

    Attributes:
        o: [B, T, N, V], and its low part if it has one, see `SplitOutput`.
        do: [B, T, N, V].
        lse: float32 [B, N, whole tiles of 64 queries].
        valid: int32 [B], how many rows have keys, if these come first; else None.
        q: [B, T, N, H] where keys have a center, else None.
        shift: float32 [B, K, H padded], the center times what takes its products to scores.
        is_centered: int32 [B, K], whether the center is not zero.
    """

    o: tuple[Any, ...]
    do: Any
    lse: Any
    valid: Any = None
    q: Any = None
    shift: Any = None
    is_centered: Any = None


class Outputs(NamedTuple):
    """The arrays that the kernel writes: float32 [B, N, rows], and fragments of zeros."""

    delta: Any
    lse: Any
    shift: Any = None
    sums: Any = None


def pallas_flash_preprocess(
    inputs: Inputs, *outputs, static: PreprocessConfig, q_sm, o_sm, do_sm, numbers_sm, full, q_full
):
    """Compute the numbers of 64 queries of one head."""
    config, outputs = static, list(outputs)
    out = Outputs(
        *outputs[:2],
        shift=outputs[2] if config.large else None,
        sums=outputs[-1] if config.groups else None,
    )
    b, (tile, h) = common.digits(lax.axis_index("cta"), (config.tiles, config.heads))
    rows = pl.ds(tile * ptx.ROWS, ptx.ROWS)
    delta_sm, lse_sm, given_sm, shift_sm = (numbers_sm.at[i] for i in range(4))

    def row(x):
        return plgpu.layout_cast(jnp.full((ptx.ROWS,), x, jnp.float32), ptx.ROW)

    def compute():
        blocks = range(do_sm.shape[0])
        for n in blocks:
            at = b, rows, h, common.block_of_columns(n, b)
            for ref, block_sm in zip((*inputs.o, inputs.do), (*o_sm, do_sm), strict=True):
                plgpu.copy_gmem_to_smem(ref.at[at], block_sm.at[n], full)
        plgpu.copy_gmem_to_smem(inputs.lse.at[b, h, rows], given_sm, full)
        if out.sums is not None:
            zeros = jnp.zeros((ptx.ROWS, ptx.GROUP * config.groups), jnp.float32)
            first = ((b * config.heads + h) * config.tiles + tile) * config.groups
            ptx.store_fragments(plgpu.layout_cast(zeros, ptx.WGMMA), out.sums.at[first])
        plgpu.barrier_wait(full)
        delta, lse = row(0.0), plgpu.load(given_sm, layout=ptx.ROW)
        for n in blocks:
            *parts, do = (plgpu.load(x.at[n], layout=ptx.WGMMA) for x in (*o_sm, do_sm))
            o = widened(parts, jnp.float32)
            delta = delta + jnp.sum(o * do.astype(jnp.float32), axis=1)
        sees = lse != -jnp.inf
        delta_sm[...] = jnp.where(sees, delta, 0.0)
        lse_sm[...] = jnp.where(sees, lse, jnp.inf)
        if inputs.is_centered is not None:
            shift_sm[...] = row(0.0)
            kv_head = common.quotient(h, config.q_heads)
            centered = plgpu.load(inputs.is_centered.at[b, kv_head]) != 0
            common.when(centered)(lambda: center(kv_head))

    def center(kv_head):
        """Shift the LSE, or compute its shift. All else is in shared memory by now."""
        blocks = range(q_sm.shape[0])
        for n in blocks:
            at = b, rows, h, common.block_of_columns(n, b)
            plgpu.copy_gmem_to_smem(inputs.q.at[at], q_sm.at[n], q_full)
        plgpu.barrier_wait(q_full)
        shift = row(0.0)
        for n in blocks:
            q = plgpu.load(q_sm.at[n], layout=ptx.WGMMA).astype(jnp.float32)
            c = inputs.shift.at[b, kv_head, pl.ds(n * ptx.COLUMNS, ptx.COLUMNS)]
            c = plgpu.load(c, layout=ptx.COLUMN, optimized=False)
            shift = shift + jnp.sum(q * common.along_columns(c, q.shape), axis=1)
        lse = plgpu.load(lse_sm, layout=ptx.ROW)
        if config.large:
            shift_sm[...] = jnp.where(lse < jnp.inf, shift, 0.0)
        else:
            lse_sm[...] = jnp.where(lse < jnp.inf, lse - shift, jnp.inf)

    def nothing():
        delta_sm[...] = row(0.0)
        shift_sm[...] = row(0.0)
        lse_sm[...] = row(jnp.inf)

    last = config.q_len if inputs.valid is None else plgpu.load(inputs.valid.at[b])
    some = tile * ptx.ROWS < last
    common.when(some)(compute)
    common.when(jnp.logical_not(some))(nothing)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(delta_sm, out.delta.at[b, h, rows])
    plgpu.copy_smem_to_gmem(lse_sm, out.lse.at[b, h, rows])
    if out.shift is not None:
        plgpu.copy_smem_to_gmem(shift_sm, out.shift.at[b, h, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def preprocess(
    problem: Problem, o, do, log_sum: LogSum, *, dq_columns: int = 0, valid=None, center=None
):
    """Return delta, the `LogSum` for keys less their center, and zeros for the sums of dq.

    Delta and log2 l are float32 [B, N, whole tiles of 128 queries], m is [B, N, T], and the zeros
    are what `add_fragments` adds to.

    Args:
        problem: the call.
        o: [B, T, N, V], or a `SplitOutput`.
        do: [B, T, N, V].
        log_sum: of float32 [B, N, T], -inf in rows without keys.
        dq_columns: the columns of these sums; 0 if no sums are wanted.
        valid: int32 [B], how many rows have keys, if these come first; else None. The sums of
            the rows behind are left as they are.
        center: float32 [B, K, H], or None.

    Returns:
        delta, a `LogSum`, and if sums are wanted float32 [B, N, tiles of 64 queries, groups,
        `ptx.OF_GROUP`].
    """
    p, (m, lse, _) = problem, log_sum
    outputs = tuple(jax.tree.leaves(o))
    q_len, heads, value_dim = do.shape[1:]
    tiles, groups = -(-q_len // (2 * ptx.ROWS)) * 2, ptx.groups(dq_columns)
    large = m is not None and center is not None
    config = PreprocessConfig(q_len, heads, tiles, groups, p.groups, large)

    def run(_, inputs: Inputs):
        batch, dtype = len(inputs.do), inputs.do.dtype
        count = batch * heads * tiles
        numbers = [((batch, heads, tiles * ptx.ROWS), jnp.float32)] * (3 if large else 2)
        sums = [((count * groups, *ptx.OF_GROUP), jnp.float32)] if groups else []
        blocks = common.blocks(dtype, rows=ptx.ROWS, columns=value_dim)
        q_sm = q_full = None
        if center is not None:
            q_sm = common.blocks(dtype, rows=ptx.ROWS, columns=p.head_dim)
            q_full = plgpu.Barrier(num_arrivals=q_sm.shape[0])
        results = common.launch(
            pallas_flash_preprocess,
            (inputs,),
            outputs=[*numbers, *sums],
            memory=dict(
                q_sm=q_sm,
                o_sm=[blocks] * len(outputs),
                do_sm=blocks,
                numbers_sm=plgpu.SMEM((4, ptx.ROWS), jnp.float32),
                full=plgpu.Barrier(num_arrivals=(len(outputs) + 1) * blocks.shape[0] + 1),
                q_full=q_full,
            ),
            grid=dict(cta=count),
            warpgroups=1,
            static=config,
        )
        shape = batch, heads, tiles, groups, *ptx.OF_GROUP
        return *results[: len(numbers)], *(x.reshape(shape) for x in results[len(numbers) :])

    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, -q_len % ptx.ROWS)), constant_values=-jnp.inf)
    inputs = Inputs(outputs, do, lse, valid)
    if center is not None:
        shift = center * p.scale.astype(jnp.float32) * (1 if large else LOG2E)
        shift = jnp.pad(shift, ((0, 0), (0, 0), (0, -p.head_dim % ptx.COLUMNS)))
        is_centered = (center != 0).any(axis=2).astype(jnp.int32)
        inputs = inputs._replace(q=p.query, shift=shift, is_centered=is_centered)
    delta, lse, *rest = common.batch_instances(run, len(do))((), inputs)
    if large:
        m = m - rest.pop(0)[:, :, :q_len]
    return delta, LogSum(m, lse), *rest
