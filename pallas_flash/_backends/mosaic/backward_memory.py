"""The gradients of each launch of the backward, and the shared memory and barriers of its CTAs.

Launches allocate these specifications, and tiles are chosen by their bytes (`common.smem_bytes`).
`backward_kernel`, `backward_cluster` and `backward_dq` say what each buffer and each barrier is
for.
"""

import enum
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_flash._backends.mosaic import common, pairs, ptx
from pallas_flash._backends.mosaic.pipeline import Pipeline
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import BackwardTile, DqTile, in_clusters, padded

plgpu = common.plgpu

# Numbers of 16 bits in a CTA's shared memory, less 3 KB for barriers and float32 rows.
ROOM = 224 * 1024 // 2
# Keys of a CTA whose outer tile is of keys, and the two consumer warpgroups that share them.
BLOCK_KV, CONSUMERS = 128, 2
# CTAs of a cluster, and queries of its steps.
CLUSTER, CLUSTER_QUERIES = 2, 64
# Stages for the ds_t that these exchange: one is written while the other is read.
DS_STAGES = 2
# Queries of a consumer warpgroup where the outer tile is of queries.
QUERY_ROWS = 64
# Registers of a thread of a consumer, and of the producer, where the outer tile is of keys.
REGISTERS = 240, 24


class Grads(enum.Enum):
    """The gradients of a launch with keys as outer tile, by its kernel's name in a profile.

    In clusters the kernel is `pallas_flash_backward_cluster`.
    """

    DQ_DK_DV = "pallas_flash_backward", ("dq", "dk", "dv")
    DK_DV = "pallas_flash_dkv", ("dk", "dv")
    DK = "pallas_flash_dk", ("dk",)
    DV = "pallas_flash_dv", ("dv",)

    def __init__(self, kernel_name: str, names: tuple[str, ...]):
        self.kernel_name, self.names = kernel_name, names
        self.dq, self.dk, self.dv = (name in names for name in ("dq", "dk", "dv"))

    @classmethod
    def launches(cls, head_dim: int, value_dim: int, deterministic: bool) -> "list[Grads]":
        """Return what is launched, by the padded head dims."""
        if deterministic:
            return [cls.DK, cls.DV] if in_clusters(head_dim, value_dim) else [cls.DK_DV]
        return [cls.DQ_DK_DV]

    def in_clusters(self, head_dim: int, value_dim: int) -> bool:
        """Return whether a cluster of CTAs computes it, `backward_cluster`; by padded head dims."""
        return self.dq and in_clusters(head_dim, value_dim)

    def stages(self, tile: BackwardTile) -> int:
        """Return the stages; dv alone has two or more, a stage of do for each consumer's result."""
        return tile.stages if self.dk else max(2, tile.stages)


def scratch(p: Problem, tile: BackwardTile, grads: Grads, *, has_lengths: bool = False):
    """Return the specification of a `KeysScratch` or of a `ClusterScratch`.

    Tiles of (q, k) arrays are in it where there is room beside all else.

    Args:
        p: the call.
        tile: block sizes.
        grads: what is computed.
        has_lengths: whether there are valid lengths.
    """
    if grads.in_clusters(*padded(p.head_dim, p.value_dim)):
        return _cluster_scratch(p, tile, has_lengths)
    return _keys_scratch(p, tile, grads, has_lengths)


def default_tile(p: Problem, *, in_order: bool) -> BackwardTile | None:
    """Return the tile of the launches of a call; None if one pass is the slower backward.

    It is where threads read a bias in device memory, and heads are wide. On an H200, 2048 tokens at
    head dim 128 take two passes 2.35 ms, and one pass 4.73 ms.
    """
    sizes = padded(p.head_dim, p.value_dim)
    tile = largest_tile(*sizes, in_order)
    if in_order or p.bias is None or all_columns(*sizes):
        return tile
    launches = Grads.launches(*sizes, deterministic=False)
    return tile if all(copies_bias(p, tile, grads) for grads in launches) else None


def largest_tile(head_dim: int, value_dim: int, in_order: bool) -> BackwardTile:
    """Return the tile with as many stages as fit, up to two, by the padded head dims."""
    if all_columns(head_dim, value_dim):
        return BackwardTile(128)
    block_q, width = 64, head_dim + value_dim
    taken = 128 * width + (0 if in_order else 2 * 128 * block_q)
    if not in_order and in_clusters(head_dim, value_dim):
        # A CTA of a cluster has room for messages, and for the larger set of tiles of the two.
        of_dv = 128 * head_dim + block_q * width
        of_dk = 128 * value_dim + 128 * (head_dim // 2) + 2 * 128 * block_q
        taken = max(of_dv, of_dk) + 2 * 128 * block_q
    return BackwardTile(block_q, min(2, (ROOM - taken) // (block_q * width)))


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
    sizes, in_order = padded(p.head_dim, p.value_dim), kernel == "dkv"
    launches = Grads.launches(*sizes, deterministic=in_order)
    memory = max((scratch(p, tile, grads) for grads in launches), key=common.smem_bytes)
    columns = max(sizes) if in_clusters(*sizes) else sum(sizes)
    common.check_fits(kernel, tile, p, memory, columns // 2 + tile.block_q, REGISTERS[0])
    # Two warpgroups share a tile of dq, by its queries or by its columns. Where dv has a launch of
    # its own, the 64 rows of a warpgroup leave through a stage of do.
    rows = 2 * QUERY_ROWS if all_columns(*sizes) else QUERY_ROWS
    if (not in_order or in_clusters(*sizes)) and tile.block_q != rows:
        raise ValueError(
            f"`tile_sizes.{kernel}` must have {rows} queries at head dim "
            f"{max(p.head_dim, p.value_dim)}; got {tile}. Use block_q={rows}."
        )


class KeysScratch(NamedTuple):
    """Shared memory of a CTA of `backward_kernel`; None where there is nothing."""

    k: Any
    v: Any
    queries: Pipeline
    cotangents: Pipeline
    ds: Any
    pairs: Pipeline | None
    kv_full: Any
    delta_full: Any
    landed: Any


def _keys_scratch(p: Problem, tile: BackwardTile, grads: Grads, has_lengths: bool) -> KeysScratch:
    head_dim, value_dim = padded(p.head_dim, p.value_dim)
    stages, block_q = grads.stages(tile), tile.block_q
    k_sm = common.strips(p.dtype, rows=BLOCK_KV, columns=head_dim)
    v_sm = common.strips(p.dtype, rows=BLOCK_KV, columns=value_dim) if grads.dk else None
    kv_copies = k_sm.shape[-3] + (v_sm.shape[-3] if v_sm else 0)
    # ds and k are operands of dq's product, and have to lie alike.
    ds = plgpu.SMEM((DS_STAGES, BLOCK_KV, block_q), p.dtype, transforms=ptx.tiled(head_dim))

    def pipeline(dim, columns, copies, **scalars):
        tiles = common.strips(p.dtype, stages, rows=block_q, columns=columns)
        copies += copies_in_strips(dim, tiles)
        smem = dict(tiles=tiles, **scalars)
        return Pipeline.spec(smem, stages, copies=copies, consumers=CONSUMERS)

    memory = KeysScratch(
        k=k_sm,
        v=v_sm,
        queries=pipeline(
            *(p.head_dim, head_dim, num_statistics(p)), statistics=statistics(p, stages, block_q)
        ),
        cotangents=pipeline(
            *(p.value_dim, value_dim, 0), delta=plgpu.SMEM((stages, block_q), jnp.float32)
        ),
        ds=ds if grads.dq else None,
        pairs=None,
        kv_full=common.barriers(1, kv_copies * (1 if has_lengths else CONSUMERS)),
        delta_full=common.barriers(stages) if grads.dk else None,
        landed=common.barriers(1) if has_lengths else None,
    )
    pipelines = _pairs_pipelines(p, block_q, stages)
    return memory._replace(pairs=common.first_that_fits(memory, pipelines))


class TilesOfDv(NamedTuple):
    """Tiles of the CTA of a cluster that sums dv."""

    k: Any
    q: Any
    do: Any


class TilesOfDk(NamedTuple):
    """Tiles of the CTA of a cluster that sums dk; `k` has its columns of dq, None if none."""

    v: Any
    k: Any
    q: Any
    do: Any
    ds: Any


class ClusterScratch(NamedTuple):
    """Shared memory of a CTA of `backward_cluster`; None where there is nothing."""

    # A union: `TilesOfDv`, `TilesOfDk`, dv and dk on their way to device memory.
    tiles: Any
    queries: Pipeline
    cotangents: Pipeline
    received: Any
    numbers: Any
    pairs: Pipeline | None
    k_full: Any
    v_full: Any
    numbers_full: Any
    started: Any
    ended: Any
    landed: Any


def strips_of_dq(strips: int) -> tuple[int, int]:
    """Return how many of the `strips` of dq's columns each CTA of a cluster computes."""
    return strips - strips // 2, strips // 2


def _cluster_scratch(p: Problem, tile: BackwardTile, has_lengths: bool) -> ClusterScratch:
    head_dim, value_dim = padded(p.head_dim, p.value_dim)
    rows, stages = CLUSTER_QUERIES, tile.stages

    def strips(columns, *outer, rows=BLOCK_KV):
        return common.strips(p.dtype, *outer, rows=rows, columns=columns)

    def inner(columns, stages):
        return strips(columns, stages, rows=rows)

    def pipeline(dim, tiles):
        copies = copies_in_strips(dim, tiles)
        return Pipeline.spec(None, stages + 1, copies=copies, consumers=CONSUMERS)

    k, v = strips(head_dim), strips(value_dim)
    count, _, width = k.shape
    _, here = strips_of_dq(count)
    # ds and k are operands of dq's product, and have to lie alike.
    ds = plgpu.SMEM((DS_STAGES, BLOCK_KV, rows), p.dtype, transforms=ptx.tiled(width))
    q, do = inner(head_dim, stages + 1), inner(value_dim, stages + 1)
    of_dk = TilesOfDk(
        v=v,
        k=common.strips(p.dtype, rows=BLOCK_KV, columns=here * width, width=width)
        if here
        else None,
        q=inner(head_dim, stages),
        do=inner(value_dim, stages),
        ds=ds,
    )
    memory = ClusterScratch(
        tiles=plgpu.RefUnion(
            *(TilesOfDv(k, q, do), of_dk, inner(value_dim, CONSUMERS), inner(head_dim, CONSUMERS))
        ),
        queries=pipeline(p.head_dim, q),
        cotangents=pipeline(p.value_dim, do),
        received=ds,
        numbers=statistics(p, stages + 2, rows),
        pairs=None,
        k_full=common.barriers(1, count),
        v_full=common.barriers(1, v.shape[0] + here),
        numbers_full=common.barriers(stages + 1, num_statistics(p)),
        started=common.barriers(1, 1, CLUSTER),
        ended=common.barriers(1, CONSUMERS, CLUSTER),
        landed=common.barriers(1) if has_lengths else None,
    )
    pipelines = _pairs_pipelines(p, rows, stages, bias=False)
    return memory._replace(pairs=common.first_that_fits(memory, pipelines))


def _pairs_pipelines(p: Problem, block_q: int, stages: int, bias: bool = True):
    """Yield pipelines for tiles of a bias and of mask arrays, the most wanted first.

    First with the bias, in as many stages as queries have, then in fewer; then the same without it.
    `bias`: whether a bias may be copied.
    """
    dtype: Any = None if p.bias is None else p.bias.dtype
    masks = sum(map(pairs.has_pairs, p.mask.leaves))
    copied = False
    if bias and p.bias is not None and 1 not in p.bias.shape[2:]:
        # `ptx.load_transposed` reads 16 bits; copies take rows of a multiple of 16 bytes.
        copied = dtype.itemsize == 2 and p.kv_len % 8 == 0
    for with_bias, n in itertools.product([copied, False], range(stages, 0, -1)):
        shapes = (n, CONSUMERS, block_q, ptx.COLUMNS), (masks, n, block_q // ptx.BITS, BLOCK_KV)
        smem = dict(
            bias=plgpu.SMEM(shapes[0], dtype, transforms=ptx.BLOCKS) if with_bias else None,
            bits=plgpu.SMEM(shapes[1], jnp.uint32) if masks else None,
        )
        if with_bias or masks:
            yield Pipeline.spec(smem, n, copies=CONSUMERS * with_bias + masks, consumers=CONSUMERS)


class QueriesScratch(NamedTuple):
    """Shared memory of a CTA of `backward_dq`; None where there is nothing."""

    q: Any
    do: Any
    delta: Any
    statistics: Any
    k: Pipeline
    v: Pipeline
    rows_full: Any
    landed: Any


def queries_scratch(p: Problem, tile: DqTile, *, has_lengths: bool = False) -> QueriesScratch:
    """Return the specification of a `QueriesScratch`; arguments as of `keys_scratch`."""
    consumers = tile.warpgroups
    head_dim, value_dim = padded(p.head_dim, p.value_dim)

    def tiles(columns, stages, rows):
        return common.strips(p.dtype, stages, rows=rows, columns=columns)

    def pipeline(dim, columns, stages):
        smem = tiles(columns, stages, tile.block_kv)
        copies = copies_in_strips(dim, smem)
        return Pipeline.spec(smem, stages, copies=copies, consumers=consumers)

    q_sm, do_sm = (tiles(columns, consumers, QUERY_ROWS) for columns in (head_dim, value_dim))
    copies = copies_in_strips(p.head_dim, q_sm) + copies_in_strips(p.value_dim, do_sm)
    return QueriesScratch(
        q=q_sm,
        do=do_sm,
        delta=plgpu.SMEM((consumers, QUERY_ROWS), jnp.float32),
        statistics=statistics(p, consumers, QUERY_ROWS),
        k=pipeline(p.head_dim, head_dim, tile.stages),
        v=pipeline(p.value_dim, value_dim, _value_stages(tile, head_dim, value_dim)),
        rows_full=common.barriers(consumers, copies + num_statistics(p) + 1),
        landed=common.barriers(consumers + 1) if has_lengths else None,
    )


def _value_stages(tile: DqTile, head_dim: int, value_dim: int) -> int:
    """Return the stages of values: as many as of keys, which are in use longer, or fewer."""
    outer = QUERY_ROWS * tile.warpgroups * (head_dim + value_dim)
    room = ROOM - outer - tile.stages * tile.block_kv * head_dim
    return max(1, min(tile.stages, room // (tile.block_kv * value_dim)))


def num_statistics(p: Problem) -> int:
    """Return how many statistics a row has: the maximum may be apart from the LSE."""
    return 2 if p.large else 1


def statistics(p: Problem, stages: int, rows: int):
    """Return the shared memory of all statistics: an array begins at a multiple of 1 KiB."""
    return plgpu.SMEM((stages, num_statistics(p) * rows), jnp.float32)


def copies_in_strips(dim: int, tiles) -> int:
    """Return how many copies take a tile of `backward_common.in_strips`, of this head dim."""
    strips, _, width = tiles.shape[-3:]
    return 1 if dim == strips * width else strips
