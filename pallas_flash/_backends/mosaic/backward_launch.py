"""Launches of the backward with keys as outer tile, and rows from what they leave in fragments."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_flash._backends.mosaic import backward_splits, common, pairs, ptx, scheduler
from pallas_flash._backends.mosaic.backward_cluster import (
    CLUSTER,
    cluster_scratch,
    pallas_flash_backward_cluster,
)
from pallas_flash._backends.mosaic.backward_common import Operands, in_strips, mask_for, neighbours
from pallas_flash._backends.mosaic.backward_kernel import keys_scratch, pallas_flash_backward
from pallas_flash._backends.mosaic.backward_keys import (
    BLOCK_KV,
    CONSUMERS,
    REGISTERS,
    Grads,
    OuterKeysConfig,
)
from pallas_flash._backends.mosaic.backward_postprocess import postprocess
from pallas_flash._backends.mosaic.backward_splits import Splits
from pallas_flash._backends.mosaic.score_mask import shared_arrays
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.dropout import rescaled
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.scores import LogSum
from pallas_flash._problem.tile_sizes import BackwardTile, in_clusters, padded


def scratch(
    p: Problem,
    tile: BackwardTile,
    grads: Grads,
    *,
    has_lengths: bool = False,
    in_turn: bool = False,
):
    """Return the specification of a `KeysScratch` or of a `ClusterScratch`.

    Tiles of (q, k) arrays are in it where there is room beside all else.

    Args:
        p: the call.
        tile: block sizes.
        grads: what is computed.
        has_lengths: whether there are valid lengths.
        in_turn: whether CTAs add dq in turn.
    """
    if grads.in_clusters(*padded(p.head_dim, p.value_dim)):
        return cluster_scratch(p, tile, has_lengths, in_turn)
    return keys_scratch(p, tile, grads, has_lengths, in_turn)


def default_tile(p: Problem, *, two_passes: bool) -> BackwardTile | None:
    """Return the tile of the launches of a call; None if one pass is the slower backward.

    It is where threads read a bias in device memory, and heads are wide. On an H200, 2048 tokens at
    head dim 128 take two passes 2.35 ms, and one pass 4.73 ms.
    """
    sizes = padded(p.head_dim, p.value_dim)
    tile = largest_tile(*sizes, two_passes)
    if two_passes or p.bias is None or all_columns(*sizes):
        return tile
    launches = Grads.launches(*sizes, two_passes=False)
    return tile if all(copies_bias(p, tile, grads) for grads in launches) else None


def largest_tile(head_dim: int, value_dim: int, two_passes: bool) -> BackwardTile:
    """Return the tile with as many stages as fit, up to two, by the padded head dims.

    In clusters the count takes half of k's columns for each CTA; at 192 + 192 and 96 + 256 the
    kernel divides them so that two stages would fit, and this says one.
    """
    if all_columns(head_dim, value_dim):
        return BackwardTile(128)
    block_q, width = 64, head_dim + value_dim
    taken = 128 * width + (0 if two_passes else 2 * 128 * block_q)
    if not two_passes and in_clusters(head_dim, value_dim):
        # A CTA of a cluster has room for messages, and for the larger set of tiles of the two.
        of_dv = 128 * head_dim + block_q * width
        of_dk = 128 * value_dim + 128 * (head_dim // 2) + 2 * 128 * block_q
        taken = max(of_dv, of_dk) + 2 * 128 * block_q
    return BackwardTile(block_q, min(2, (common.ROOM - taken) // (block_q * width)))


def all_columns(head_dim: int, value_dim: int) -> bool:
    """Return whether tiles of the backward have 128 queries, by the padded head dims.

    Then a warpgroup computes all columns of dq, for half of the queries.
    """
    return max(head_dim, value_dim) <= 64


def copies_bias(p: Problem, tile: BackwardTile, grads: Grads) -> bool:
    """Return whether a launch of the backward copies tiles of the bias to shared memory."""
    pipeline = scratch(p, tile, grads).pairs
    return pipeline is not None and pipeline.smem["bias"] is not None


def check_tile(kernel: str, tile: BackwardTile, p: Problem) -> None:
    """Raise ValueError if a tile of "dkv" or "backward" does not fit on the GPU."""
    sizes, two_passes = padded(p.head_dim, p.value_dim), kernel == "dkv"
    launches = Grads.launches(*sizes, two_passes=two_passes)
    memory = max((scratch(p, tile, grads) for grads in launches), key=common.smem_bytes)
    columns = max(sizes) if in_clusters(*sizes) else sum(sizes)
    common.check_fits(kernel, tile, p, memory, columns // 2 + tile.block_q, REGISTERS[0])
    # Two warpgroups share a tile of dq, by its queries or by its columns. Where dv has a launch of
    # its own, the 64 rows of a warpgroup leave through a stage of do.
    rows = 2 * ptx.ROWS if all_columns(*sizes) else ptx.ROWS
    if (not two_passes or in_clusters(*sizes)) and tile.block_q != rows:
        raise ValueError(
            f"`config.{kernel}` must have {rows} queries at head dim "
            f"{max(p.head_dim, p.value_dim)}; got {tile}. Use block_q={rows}."
        )


@functools.cache
def _kernel(grads: Grads):
    """Return the kernel with a name for what it computes."""

    def kernel(*refs, **options):
        pallas_flash_backward(*refs, **options)

    kernel.__name__ = grads.kernel_name
    return kernel


def backward(
    problem: Problem,
    do,
    log_sum: LogSum,
    delta,
    tile: BackwardTile,
    grads: Grads,
    valid=None,
    *,
    dq_sums=None,
    center: Any = None,
    row_sums=None,
    want_scale: bool,
    deterministic: bool,
) -> dict:
    """Return the gradients of `grads.names`, by name.

    Args:
        problem: the call.
        do: [B, T, N, V].
        log_sum: of float32 [B, N, T padded], for keys less `center`.
        delta: float32 [B, N, T padded].
        tile: block sizes.
        grads: what to compute.
        valid: int32 [B] twice, see `Operands`; or None.
        dq_sums: zeros, to which dq is added, see `preprocess`; behind the valid queries, anything.
        center: float32 [B, K, H], subtracted from keys, zero for some heads; None if for all.
        row_sums: float32 [B, N, T], the sums of ds over a row; None if they are zero. With a center
            and without `want_scale`, dq receives its term of them.
        want_scale: whether dq is to be in float32 and without its factor.
        deterministic: whether all sums are to have a fixed order.
    """
    p = problem
    q, kv = Tiling(p.q_len, tile.block_q), Tiling(p.kv_len, BLOCK_KV)
    mask = mask_for(p, q, kv, valid)
    head_dim, value_dim = padded(p.head_dim, p.value_dim)
    steps = backward_splits.Steps.from_problem(p, q, kv)
    # As many rows as delta has: whole tiles of 128, for dq.
    operands = Operands.from_call(p, do, log_sum, delta, valid, delta.shape[2])
    in_turn = deterministic and grads.dq
    memory = scratch(p, tile, grads, has_lengths=valid is not None, in_turn=in_turn)
    # Only q and do get an axis of strips in device memory: a consumer copies its half of k and v,
    # which would be no one piece there.
    operands = operands._replace(
        q=in_strips(operands.q, head_dim), do=in_strips(operands.do, value_dim)
    )
    in_clusters = grads.in_clusters(head_dim, value_dim)
    weights = None
    if grads.dq and center is not None and row_sums is not None and not want_scale:
        weights = p.scale.astype(jnp.float32) * row_sums
        weights = jnp.pad(weights, ((0, 0), (0, 0), (0, -p.q_len % (2 * ptx.ROWS))))
    if center is not None:
        center = jnp.pad(center, ((0, 0), (0, 0), (0, head_dim - p.head_dim)))
        is_centered = (center != 0).any(axis=2).astype(jnp.int32)
        operands = operands._replace(center=center, is_centered=is_centered)

    def run(arrays, x):
        operands: Operands = x["operands"]
        scale, extras = arrays
        batch = len(operands.q)
        ctas = CLUSTER if in_clusters else 1
        count = backward_splits.num_splits(p, batch, steps, kv, deterministic, ctas)
        splits = Splits(count, p.groups)
        num_heads = p.num_kv_heads * splits.count
        table = scheduler.block_table(
            extras.mask, q, kv, "q", batch, p.batch, p.groups, sums_keys=grads.dq
        )
        smem = {} if memory.pairs is None else memory.pairs.smem
        copied = dict(bias=smem.get("bias") is not None, masks=smem.get("bits") is not None)
        streams, arrays, streamed = pairs.Streams.from_problem(p, arrays, 2, q, **copied)
        config = OuterKeysConfig.from_call(
            *(p, mask, arrays, table, q, kv),
            transposed=True,
            streams=streams,
            num_heads=num_heads,
            neighbours=neighbours(num_heads, in_clusters, in_turn and bool(p.mask)),
            tile=tile,
            has_lengths=valid is not None,
            grads=grads,
            splits=splits,
            adds=splits.count > 1 and not deterministic,
            in_turn=in_turn,
            counters=ctas,
            centers=center is not None,
        )
        turns = None
        if in_turn and config.masked:
            turns = scheduler.turns(table, q.count, config.scattered).reshape(-1, q.count)
        operands = operands.launched(config, arrays, table, turns=turns, streamed=streamed)
        results = _launch(config, p, memory, operands, x["dq_sums"])
        factor = rescaled(extras.dropout, scale)
        return _rows(config, p, operands, results, factor, x["weights"], want_scale)

    x = dict(operands=operands, dq_sums=dq_sums, weights=weights)
    arrays = shared_arrays(dataclasses.replace(p, sinks=None), mask)
    return common.batch_instances(run, p.batch)(arrays, x)


def _launch(config: OuterKeysConfig, p: Problem, memory, operands: Operands, dq_sums) -> dict:
    """Launch the kernel; return the gradients by name, some of them in fragments."""
    grads, batch = config.grads, len(operands.q)
    fragments, outputs, added = _fragments(config, p, batch), {}, {}
    if grads.dq:
        added["dq"] = dq_sums.reshape(-1, *ptx.OF_GROUP)
    if config.in_turn:
        added["turns"] = jnp.zeros(
            batch * p.num_heads * config.q.count * config.counters, jnp.int32
        )
    for name, like in (("dk", operands.k), ("dv", operands.v)):
        if name not in grads.names:
            continue
        outputs[name] = like.shape, like.dtype
        if name in fragments:
            outputs[name] = (math.prod(fragments[name][:5]), *ptx.OF_GROUP), jnp.float32
        if config.adds:
            added[name] = jnp.zeros(*outputs.pop(name))
    grid = config.grid(batch, kv_tile=config.kv.count)
    if config.in_turn and not p.mask and grid["outer"] < 2**16:
        # Each CTA is a step behind the one before. With heads at once fewer of them wait. CUDA
        # takes no more CTAs on the slowest axis.
        grid = dict(reversed(grid.items()))
    kernel: dict[str, Any] = dict(kernel=_kernel(grads), grid=grid)
    if grads.in_clusters(*padded(p.head_dim, p.value_dim)):
        kernel = dict(
            kernel=pallas_flash_backward_cluster,
            grid=dict(cta=math.prod(grid.values())),
            cluster_size=CLUSTER,
        )
    results = common.launch(
        operands=(operands,),
        sums=(added,),
        outputs=list(outputs.values()),
        memory=memory._asdict(),
        warpgroups=CONSUMERS + 1,
        static=config,
        approx_math=config.options.approximate,
        # The kernels say where threads wait for each other: `ptx.meet`, `ptx.fence`.
        unsafe_no_auto_barriers=True,
        **kernel,
    )
    return dict(zip([*sorted(added), *outputs], results, strict=True))


def _rows(
    config: OuterKeysConfig, p: Problem, operands: Operands, results, factor, weights, want_scale
) -> dict:
    """Return results of `_launch` with rows instead of fragments.

    Args:
        config: of the kernel.
        p: the call.
        operands: what the kernel read.
        results: gradients by name.
        factor: what dq is multiplied by, float32 [1 or instances].
        weights: of the term of dq with the center, see `postprocess`; None if dq has none.
        want_scale: as of `backward`.
    """
    batch, one, results = len(operands.q), np.ones(1, np.float32), dict(results)
    weighted_center = None if weights is None else (weights, operands.center)
    known = dict(
        dq=(p.query, operands.valid_q, factor, weighted_center),
        dk=(p.key, operands.valid_kv, one, None),
        dv=(p.value, operands.valid_kv, one, None),
    )
    for name, shape in _fragments(config, p, batch).items():
        rows, (like, valid, factor, weighted_center) = results[name].reshape(shape), known[name]
        if name == "dq" and want_scale:
            results[name] = ptx.unfold(rows[:, :, 0])[:, : p.q_len, :, : p.head_dim]
            continue
        results[name] = postprocess(
            *(rows, factor, (batch, *like.shape[1:]), p.dtype),
            batch=p.batch,
            valid=valid,
            weighted_center=weighted_center,
        )
    return results


def _fragments(config: OuterKeysConfig, p: Problem, batch: int) -> dict[str, tuple[int, ...]]:
    """Return shapes of the gradients that are left in fragments, see `postprocess`."""
    head_dim, value_dim = padded(p.head_dim, p.value_dim)
    partial = 1 if config.adds else config.splits.count
    of_keys = batch, p.num_kv_heads, partial, config.kv.count * CONSUMERS
    shapes = {}
    if config.grads.dq:
        shapes["dq"] = batch, p.num_heads, 1, config.dq_tiles, ptx.groups(head_dim), *ptx.OF_GROUP
    if config.splits.count > 1 and config.grads.dk:
        shapes["dk"] = *of_keys, ptx.groups(head_dim), *ptx.OF_GROUP
    if config.splits.count > 1 and config.grads.dv:
        shapes["dv"] = *of_keys, ptx.groups(value_dim), *ptx.OF_GROUP
    return shapes
