"""The tiles of the Mosaic kernels, by what was measured on an H200 (with prototypes)."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from pallas_flash._features import SCORES, CallFeatures, MaskKind, Option
from pallas_flash._mosaic.backward_memory import Grads, keys_scratch, padded
from pallas_flash._mosaic.scheduler import QUERY_ROWS, folded, most_rows
from pallas_flash._problem import Problem
from pallas_flash._tiling.sizes import (
    BackwardTile,
    DecodeTile,
    DqTile,
    ForwardTile,
    TileSizes,
)

# So many are worth what joins the parts of few queries' keys; as for "triton".
MANY_KEYS = 512

# Masks whose tiles take few instructions.
QUICK = MaskKind.FULL, MaskKind.CAUSAL, MaskKind.RANGES, MaskKind.LENGTHS, MaskKind.ARRAY
# Numbers of 16 bits in the shared memory of a program, less 3 KB for barriers and numbers a query.
ROOM = 224 * 1024 // 2


def default(p: Problem, f: CallFeatures) -> TileSizes:
    """Return the tiles of a call."""
    sizes, few = padded(p.head_dim, p.value_dim), f.few_queries and f.kv_len > MANY_KEYS
    return TileSizes(
        forward=None if few else forward_tile(f),
        decode=decode_tile(f) if few else None,
        backward=None if two_passes(p) else backward_tile(*sizes, in_order=False),
        dkv=backward_tile(*sizes, in_order=True),
        dq=dq_tile(*sizes, bool(p.mask) or p.bias is not None),
    )


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


# The first rule that fits decides. The times are those of an H200 unless said otherwise.
FORWARD_RULES = (
    TileRule(
        # With 192 queries and 96 keys most blocks of 128 x 128 would be partial: 2.4 times as long.
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
        lambda f: f.width <= 64 and _is_shorter_by_two(f) and most_rows(f, 2) == 2 * QUERY_ROWS,
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
        # Of few keys the last tile is not used well: 1024 take 10 % longer, 2048 5 %.
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


# Queries of all heads and examples: two tiles of 128 for each core of an H200, which has 132.
FEW_ROWS = 2**15


def _in_pairs(f: CallFeatures) -> bool:
    """Return whether two CTAs should share keys and values, at head dims above 64.

    Timed on a hot H200, up to 16384 tokens: without a mask 2048 at 128 take as long, and others 3
    to 5 % less; causal 2048 take as long, and more of them up to 5 % less. At 64 it is 2 % less,
    and causal 10 to 16 % more. It saves power, of which few rows do not need as much: these take 7
    to 12 % longer at 128, but 8 heads of 4096 tokens without a mask 4 to 6 % less.
    """
    if f.masked and not f.causal:
        return False
    # The other program of the last pair may have nothing to do.
    alone = 0 < f.q_len % 256 <= 128 and f.q_len < 4096
    if alone or (f.rows <= FEW_ROWS and (f.masked or f.kv_len < 4096)):
        return False
    return min(f.q_len, f.kv_len) >= (4096 if f.masked else 2048)


def decode_tile(f: CallFeatures) -> DecodeTile:
    """By the larger head size: as much on its way as there is memory for.

    To keep the memory of an H200 busy takes about 40 KB for each core: 4.8 TB/s, of which a core
    has its share, for a microsecond. Others were not timed.
    """
    if f.width <= 64:
        return DecodeTile(block_kv=128)
    return DecodeTile(stages=6 if f.width <= 128 else 4 if f.width <= 192 else 2)


def all_columns(head_dim: int, value_dim: int) -> bool:
    """Whether the tiles of the backward have 128 queries, for the padded head sizes.

    Then a warpgroup computes all columns of dq, for half of them.
    """
    return max(head_dim, value_dim) <= 64


def copies_bias(p: Problem, tile: BackwardTile, grads: Grads) -> bool:
    """Return whether a launch of the backward copies tiles of the bias to shared memory."""
    pipeline = keys_scratch(p, tile, grads).pairs
    return pipeline is not None and pipeline.smem["bias"] is not None


def two_passes(p: Problem) -> bool:
    """Whether the backward whose sums have an order is the faster one.

    It is where threads read a bias in device memory, and heads are wide. Timed on an H200, 2048
    tokens at head size 128, milliseconds of it and of one pass: 2.35 and 4.73.
    """
    sizes = padded(p.head_dim, p.value_dim)
    if p.bias is None or max(sizes) <= 64:
        return False
    tile = backward_tile(*sizes, in_order=False)
    launched = Grads.launches(*sizes, deterministic=False)
    return not all(copies_bias(p, tile, grads) for grads in launched)


def backward_tile(head_dim: int, value_dim: int, in_order: bool) -> BackwardTile:
    """By the padded head sizes."""
    if all_columns(head_dim, value_dim):
        return BackwardTile(128)
    block_q, width = 64, head_dim + value_dim
    exchanged = 0 if in_order else 2 * 128 * block_q
    return BackwardTile(block_q, min(2, (ROOM - 128 * width - exchanged) // (block_q * width)))


def dq_tile(head_dim: int, value_dim: int, registers: bool) -> DqTile:
    """By the padded head sizes, and whether a mask or a bias takes registers.

    At 128 the largest tiles of which the compiler keeps everything in registers. At 64, timed on an
    H100 without a mask, both passes: 2 warpgroups and 128 keys take 4 % longer, 64 keys 7 %.
    """
    if max(head_dim, value_dim) <= 64:
        return DqTile(3, 64, 2)
    width = head_dim + value_dim
    if head_dim > 128 or width > 256:
        return DqTile(2, 64, min(3, max(2, (ROOM - 128 * width) // (64 * width))))
    return DqTile(2, 64, 3) if registers else DqTile(2, 128, 2)


def value_slots(tile: DqTile, head_dim: int, value_dim: int) -> int:
    """Slots of values: as many as of keys, which are in use longer, where there is room."""
    stays = 64 * tile.warpgroups * (head_dim + value_dim)
    room = ROOM - stays - tile.stages * tile.block_kv * head_dim
    return max(1, min(tile.stages, room // (tile.block_kv * value_dim)))


class DbiasTile(NamedTuple):
    """How a program of the pass for the gradient of the bias is made; it has 128 queries.

    Attributes:
        block_kv: keys of a tile.
        stages: slots of queries and keys, and of cotangents and values.
    """

    block_kv: int
    stages: int


def dbias_tile(p: Problem) -> DbiasTile:
    """128 keys, if they fit."""
    itemsize, width = min(4, p.bias.dtype.itemsize), sum(padded(p.head_dim, p.value_dim))

    def stages(block_kv: int) -> int:
        room, each = ROOM - 64 * block_kv * itemsize, (128 + block_kv) * width
        # 128 queries' numbers may take 2 KB, in two slots 3 KB. Then barriers want another.
        return 2 if room - 1024 // 2 >= 2 * each else min(1, room // each)

    block_kv = 128 if stages(128) else 64
    return DbiasTile(block_kv, stages(block_kv))
