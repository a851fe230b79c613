"""The tiles of the Mosaic kernels, by what was measured on an H200 (with prototypes)."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from pallas_flash._backends.mosaic import common, forward_wide, ptx
from pallas_flash._backends.mosaic.backward_keys import Grads
from pallas_flash._backends.mosaic.backward_launch import scratch
from pallas_flash._backends.mosaic.scheduler import folded, most_rows
from pallas_flash._jax import hardware
from pallas_flash._problem.features import SCORES, CallFeatures, MaskKind, Option
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import (
    BackwardTile,
    DecodeTile,
    DqTile,
    ForwardTile,
    TileSizes,
    in_clusters,
    padded,
)

# Keys from which on decoding has KV splits, which take a launch more; as for "triton".
MANY_KEYS = 512

# Masks that take few instructions a tile.
QUICK = MaskKind.FULL, MaskKind.CAUSAL, MaskKind.RANGES, MaskKind.LENGTHS, MaskKind.ARRAY
WIDE = 256  # Head dims above it take the kernels for wide heads.
# Numbers of 16 bits in a CTA's shared memory, less 3 KB for barriers and float32 rows.
ROOM = 224 * 1024 // 2


def default(p: Problem, f: CallFeatures) -> TileSizes:
    """Return the tiles of a call."""
    if is_wide(p):
        return TileSizes(forward=wide_tile(p))
    sizes, few = padded(p.head_dim, p.value_dim), f.few_queries and f.kv_len > MANY_KEYS
    return TileSizes(
        forward=None if few else forward_tile(f),
        decode=decode_tile(f) if few else None,
        backward=None if two_passes(p) else backward_tile(*sizes, in_order=False),
        dkv=backward_tile(*sizes, in_order=True),
        dq=dq_tile(*sizes, bool(p.mask) or p.bias is not None),
    )


def is_wide(p: Problem) -> bool:
    """Return whether a call has heads that are too wide for `forward_kernel`."""
    return max(p.head_dim, p.value_dim) > WIDE


def wide_tile(p: Problem) -> ForwardTile:
    """Return the tile of `forward_wide`, with as many stages of keys as fit.

    Two CTAs share keys and values wherever the schedule is static and both have queries.
    """
    cluster_size = 2 if p.mask.known_on_host and p.q_len > ptx.ROWS else 1
    limit = hardware.shared_memory_limit(common.HOPPER)
    tried = (
        ForwardTile(forward_wide.CONSUMERS, forward_wide.BLOCK_KV, 1, stages, cluster_size)
        for stages in (4, 3, 2)
    )
    return next(x for x in tried if common.smem_bytes(forward_wide.scratch(p, x)) <= limit)


class TileRule(NamedTuple):
    """A tile of the forward for a kind of call.

    Attributes:
        kind: the kind in words.
        fits: whether a call is of that kind.
        tile: its tile.
    """

    kind: str
    fits: Callable[[CallFeatures], bool]
    tile: ForwardTile


# The first rule that fits decides. Times were taken on an H200 unless said otherwise.
FORWARD_RULES = (
    TileRule(
        # Tiles of 192 x 96 would make most blocks of 128 x 128 partial, 2.4 times as long.
        "head dims to 64, with block masks, dropout or float32 biases",
        lambda f: (
            f.width <= 64 and (f.has_block_mask or bool(f.options & {Option.DROPOUT, Option.BIAS}))
        ),
        ForwardTile(2, 128, 1),
    ),
    TileRule(
        # 1024 causal tokens of 16 heads: 11 and 13 microseconds, and with slopes 15 and 21.
        "head dims to 64, with folded query tiles",
        lambda f: f.width <= 64 and folded(f, 2),
        ForwardTile(2, 128, 1, 4),
    ),
    TileRule(
        "head dims to 64, with a mask or scores that take registers for each pair",
        lambda f: f.width <= 64 and _takes_registers(f),
        ForwardTile(3, 96, 1),
    ),
    TileRule(
        # 1024 tokens of 16 heads: 15 and 18 microseconds.
        "head dims to 64, products alone, one work tile for each CTA",
        lambda f: f.width <= 64 and _is_shorter_by_two(f) and most_rows(f, 2) == 2 * ptx.ROWS,
        ForwardTile(2, 128, 1, 4),
    ),
    TileRule(
        # 1024 tokens of 32 heads: 25 and 31 microseconds.
        "head dims to 64, products alone, whose longest CTA has fewer queries by two warpgroups",
        lambda f: f.width <= 64 and _is_shorter_by_two(f),
        ForwardTile(2, 160, 1, 4),
    ),
    TileRule(
        # At 4096 tokens four stages take 6 % longer.
        "head dims to 64, with mask arrays",
        lambda f: f.width <= 64 and f.mask is MaskKind.ARRAY,
        ForwardTile(3, 128, 1, 2),
    ),
    TileRule(
        # A warpgroup begins its next query tile while others end theirs, as far as keys are there:
        # at 512 to 2048 causal tokens two stages take 2 to 7 % longer.
        "head dims to 64",
        lambda f: f.width <= 64,
        ForwardTile(3, 128, 1, 4),
    ),
    TileRule(
        "head dims to 128, with float32 biases",
        lambda f: f.width <= 128 and Option.BIAS in f.options,
        ForwardTile(2, 96, 2),
    ),
    TileRule(
        # 4096 tokens: 1.22 and 1.31 ms.
        "head dims to 128, with soft caps and no mask",
        lambda f: (
            f.width <= 128
            and Option.SOFT_CAP in f.options
            and not f.masked
            and _waits_for_scores(f)
        ),
        ForwardTile(3, 80, 1),
    ),
    TileRule(
        # 512 tokens at head dim 128: 99 and 102 microseconds, on an H100 109 and 116; at head dim
        # 80 121 and 144.
        "head dims to 128, causal, of 512 keys or fewer, products alone, not folded",
        lambda f: (
            f.width <= 128
            and f.kv_len <= 512
            and f.causal
            and _products_alone(f)
            and not folded(f, 2)
        ),
        ForwardTile(3, 64, 1, 3),
    ),
    TileRule(
        # Much of the last block of few keys is padding: 1024 keys take 10 % longer, 2048 5 %.
        "head dims to 128, products alone, no mask, more than 2048 keys",
        lambda f: f.width <= 128 and f.kv_len > 2048 and not f.masked and _products_alone(f),
        ForwardTile(2, 176, 1),
    ),
    TileRule("head dims to 128", lambda f: f.width <= 128, ForwardTile(2, 128, 2)),
    TileRule(
        # Values that are no wider leave through the buffer of the queries. 4096 tokens with soft
        # caps: 0.96 and 0.99 ms, with slopes 0.96 and 1.02 ms.
        "head dims to 256, products alone without a mask, or with scores that are waited for",
        lambda f: (
            f.value_dim <= f.head_dim
            and ((_products_alone(f) and not f.masked) or _waits_for_scores(f))
        ),
        ForwardTile(2, 80, 0),
    ),
    TileRule("all other calls", lambda f: True, ForwardTile(2, 64, 1)),
)


def forward_tile(f: CallFeatures) -> ForwardTile:
    """Return the tile of the forward, by the rules; two CTAs may be a cluster that shares loads."""
    tile = next(rule.tile for rule in FORWARD_RULES if rule.fits(f))
    if f.width > 64 and _products_alone(f) and _in_pairs(f):
        return dataclasses.replace(tile, cluster_size=2)
    return tile


def _products_alone(f: CallFeatures) -> bool:
    """Return whether products and a softmax are all that is computed for each pair."""
    return not (f.scores or f.options & {Option.DROPOUT, Option.SCALE})


def _takes_registers(f: CallFeatures) -> bool:
    """Return whether a mask or scores take registers, of which wide tiles leave few."""
    if f.options & (SCORES - {Option.SOFT_CAP, Option.SLOPES}):
        return True
    # Slopes beside a mask spill in tiles of 128 keys.
    return f.mask not in QUICK or (f.masked and Option.SLOPES in f.options)


def _waits_for_scores(f: CallFeatures) -> bool:
    """Return whether soft caps or slopes are all that is done to scores."""
    changed = f.options & (SCORES | {Option.DROPOUT})
    return bool(changed) and changed <= {Option.SOFT_CAP, Option.SLOPES} and not f.by_arrays


def _is_shorter_by_two(f: CallFeatures) -> bool:
    """Return whether the longest CTA has fewer queries by two warpgroups than by three."""
    alone = _products_alone(f) and not f.masked
    return alone and 5 * most_rows(f, 3) > 6 * most_rows(f, 2)


# Queries of all heads and batch elements: two tiles of 128 for each of an H200's 132 SMs.
FEW_ROWS = 2**15


def _in_pairs(f: CallFeatures) -> bool:
    """Return whether two CTAs should share keys and values, at head dims above 64.

    Timed on a hot H200, up to 16384 tokens. At head dim 128, 2048 tokens take as long; more tokens
    take 3 to 5 % less without a mask, and up to 5 % less under a causal one. At head dim 64 calls
    take 2 % less without a mask, and 10 to 16 % more under a causal one. Clusters save power, which
    does not limit few rows: these take 7 to 12 % longer at head dim 128.
    """
    if f.masked and not f.causal:
        return False
    # The second CTA of the last cluster may have nothing to do.
    alone = 0 < f.q_len % 256 <= 128 and f.q_len < 4096
    if alone or (f.rows <= FEW_ROWS and (f.masked or f.kv_len < 4096)):
        return False
    return min(f.q_len, f.kv_len) >= (4096 if f.masked else 2048)


def decode_tile(f: CallFeatures) -> DecodeTile:
    """Return the tile of decoding, with as many stages as the larger head dim leaves memory for.

    An H200's memory is busy with about 40 KB under way to each SM: an SM's share of 4.8 TB/s for a
    microsecond. Other tiles were not timed.
    """
    if f.width <= 64:
        return DecodeTile(block_kv=128)
    return DecodeTile(stages=6 if f.width <= 128 else 4 if f.width <= 192 else 2)


def all_columns(head_dim: int, value_dim: int) -> bool:
    """Return whether tiles of the backward have 128 queries, by the padded head dims.

    Then a warpgroup computes all columns of dq, for half of the queries.
    """
    return max(head_dim, value_dim) <= 64


def copies_bias(p: Problem, tile: BackwardTile, grads: Grads) -> bool:
    """Return whether a launch of the backward copies tiles of the bias to shared memory."""
    pipeline = scratch(p, tile, grads).pairs
    return pipeline is not None and pipeline.smem["bias"] is not None


def two_passes(p: Problem) -> bool:
    """Return whether the deterministic backward is the faster one.

    It is where threads read a bias in device memory, and heads are wide. On an H200, 2048 tokens at
    head dim 128 take it 2.35 ms, and one pass 4.73 ms.
    """
    sizes = padded(p.head_dim, p.value_dim)
    if p.bias is None or max(sizes) <= 64:
        return False
    tile = backward_tile(*sizes, in_order=False)
    launched = Grads.launches(*sizes, deterministic=False)
    return not all(copies_bias(p, tile, grads) for grads in launched)


def backward_tile(head_dim: int, value_dim: int, in_order: bool) -> BackwardTile:
    """Return the tile of `backward_kernel` or `backward_cluster`, by the padded head dims."""
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


def dq_tile(head_dim: int, value_dim: int, registers: bool) -> DqTile:
    """Return the tile of `backward_dq`, by the padded head dims.

    At head dim 128 it is the largest one that the compiler keeps in registers. At head dim 64, on
    an H100 without a mask, 2 warpgroups take 4 % longer with 128 keys, and 7 % with 64 keys.

    Args:
        head_dim: padded head dim of queries and keys.
        value_dim: padded head dim of values.
        registers: whether a mask or a bias takes registers.
    """
    if max(head_dim, value_dim) <= 64:
        return DqTile(3, 64, 2)
    width = head_dim + value_dim
    if head_dim > 128 or width > 256:
        return DqTile(2, 64, min(3, max(2, (ROOM - 128 * width) // (64 * width))))
    return DqTile(2, 64, 3) if registers else DqTile(2, 128, 2)


def value_stages(tile: DqTile, head_dim: int, value_dim: int) -> int:
    """Return the stages of values: as many as of keys, which are in use longer, or fewer."""
    outer = 64 * tile.warpgroups * (head_dim + value_dim)
    room = ROOM - outer - tile.stages * tile.block_kv * head_dim
    return max(1, min(tile.stages, room // (tile.block_kv * value_dim)))


class DbiasTile(NamedTuple):
    """The tile of `backward_dbias`, which has 128 queries.

    Attributes:
        block_kv: keys of a tile.
        stages: pipeline stages of queries and keys, and of cotangents and values.
    """

    block_kv: int
    stages: int


def dbias_tile(p: Problem) -> DbiasTile:
    """Return the tile of `backward_dbias`: with 128 keys, if they fit."""
    itemsize, width = min(4, p.bias.dtype.itemsize), sum(padded(p.head_dim, p.value_dim))

    def stages(block_kv: int) -> int:
        room, each = ROOM - 64 * block_kv * itemsize, (128 + block_kv) * width
        # The float32 rows of 128 queries may take 2 KB, in two stages 3 KB, and barriers one more.
        return 2 if room - 1024 // 2 >= 2 * each else min(1, room // each)

    block_kv = 128 if stages(128) else 64
    return DbiasTile(block_kv, stages(block_kv))
