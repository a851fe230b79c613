"""The tiles of the Mosaic kernels, by what was measured on an H200 (with prototypes)."""

import dataclasses
import itertools
from typing import NamedTuple

import jax

from pallas_flash import _hardware
from pallas_flash._mask_objects import BlockMask, MaskArray
from pallas_flash._mosaic import common, scheduler
from pallas_flash._mosaic.backward_memory import BLOCK_KV, Grads, keys_scratch, padded
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

HOPPER = (9, 0)
# Bytes for the barriers of `StreamRoom` at most, and what an array begins at a multiple of.
BARRIERS, ALIGNED = 64, 1024

# Numbers of 16 bits in the shared memory of a program, less 3 KB for barriers and numbers a query.
ROOM = 224 * 1024 // 2


def default(p: Problem) -> TileSizes:
    """Those of a call."""
    sizes, few = padded(p.head_dim, p.value_dim), p.few_queries and p.kv_len > MANY_KEYS
    return TileSizes(
        forward=None if few else forward_tile(p),
        decode=decode_tile(p) if few else None,
        backward=None if two_passes(p) else backward_tile(*sizes, in_order=False),
        dkv=backward_tile(*sizes, in_order=True),
        dq=dq_tile(*sizes, bool(p.mask) or p.bias is not None),
    )


def forward_tile(p: Problem) -> ForwardTile:
    """By the head sizes, and what there is beside products."""
    head_dim = max(p.head_dim, p.value_dim)
    # What is computed or read for each pair takes registers, of which wide tiles leave few.
    bare = not (p.scores or p.dropout or p.any_scale)
    plain = bare and not p.mask
    scores = dataclasses.replace(p.scores, soft_cap=None)
    quick = (leaf.exact_ranges or isinstance(leaf, MaskArray) for leaf in p.mask.leaves)
    # Soft caps are waited for, less so by three warpgroups, or in tiles of 80 keys. With 4096
    # tokens, timed: 1.22 in place of 1.31 ms at 128 (causal level), 0.96 in place of 0.99 at 256,
    # where slopes take 0.96 in place of 1.02.
    others = dataclasses.replace(scores, slopes=None)
    # Slopes beside a mask spill registers in tiles of 128 keys.
    busy = others or not all(quick) or (scores and p.mask)
    waits = bool(p.scores) and not (others or p.dropout or jax.tree.leaves(p.mask))
    # Whether programs of two warpgroups have one item each, from both ends: see `QueryTiles`.
    zigzag = scheduler.QueryTiles.of(p, p.batch, 2).folded
    if head_dim <= 64:
        # Of 192 queries and 96 keys, with blocks of 128 of both, most tiles would need the mask:
        # 4096 tokens took 2.4 times as long.
        blocks = any(isinstance(leaf, BlockMask) for leaf in p.mask.leaves)
        if p.dropout or blocks or (p.bias is not None and p.bias.dtype.itemsize > 2):
            return ForwardTile(2, 128, 1)
        # More programs have something to do. Timed with 1024 tokens of 16 heads, causal: 11 in
        # place of 13 microseconds, with slopes 15 in place of 21, with a bias 37 in place of 45.
        if zigzag:
            return ForwardTile(2, 128, 1, 4)
        if busy:
            return ForwardTile(3, 96, 1)
        # Likewise where no program is at work for as long. Timed with 1024 tokens of 16 and of 32
        # heads: 15 in place of 18 microseconds, and 25 in place of 31.
        if plain and 5 * _longest(p, 3) > 6 * _longest(p, 2):
            return ForwardTile(2, 128 if _longest(p, 2) == 128 else 160, 1, 4)
        # Under a causal mask one warpgroup is done with a query tile before another, and begins the
        # next as far as its keys are there. Timed at 512, 1000, 1024 and 2048 tokens, two slots of
        # them take 4, 6, 7 and 2 % longer than four; with a mask array alone, at 4096, 6 % less.
        alone = p.mask and all(isinstance(leaf, MaskArray) for leaf in p.mask.leaves)
        return ForwardTile(3, 128, 1, 2 if alone else 4)
    if head_dim <= 128:
        if p.bias is not None and p.bias.dtype.itemsize > 2:
            return ForwardTile(2, 96, 2)
        if waits and not p.mask and p.scores.soft_cap is not None:
            return ForwardTile(3, 80, 1)
        # Timed with 512 causal tokens at 128: on an H200 99 in place of 102 microseconds, on an
        # H100 109 in place of 116; at 80 121 in place of 144. With 1024 it takes 5 and 3 % longer.
        if bare and p.mask.known_kind == "causal" and p.kv_len <= 512 and not zigzag:
            return ForwardTile(3, 64, 1, 3)
        # Of few keys the last tile of 176 is not used well: 1024 took 10 % longer, 2048 5 %.
        tile = ForwardTile(2, 176, 1) if plain and p.kv_len > 2048 else ForwardTile(2, 128, 2)
    else:
        # Only values that are no wider leave in place of the queries.
        narrow = (plain or waits) and p.value_dim <= p.head_dim
        tile = ForwardTile(2, 80, 0) if narrow else ForwardTile(2, 64, 1)
    return dataclasses.replace(tile, programs=2) if bare and _in_pairs(p) else tile


def _longest(p: Problem, warpgroups: int) -> int:
    """Queries of the program that has most, where all see as many keys."""
    items = p.batch * p.num_heads * scheduler.QueryTiles.of(p, p.batch, warpgroups).per_head
    return -(-items // scheduler.NUM_SMS) * warpgroups * scheduler.QUERY_ROWS


def aligned(size: int) -> int:
    """Bytes that an array takes of shared memory."""
    return -(-size // ALIGNED) * ALIGNED


class StreamRoom(NamedTuple):
    """What of pairs the backward copies to shared memory, where keys stay.

    Attributes:
        slots: in which tiles lie one after the other; 0 if nothing is copied.
        bias: whether the bias is, and not mask arrays alone.
    """

    slots: int = 0
    bias: bool = False


def has_pairs(leaf) -> bool:
    """Whether a leaf of a mask is an array that has queries and keys for axes."""
    return isinstance(leaf, MaskArray) and 1 not in leaf.pairs.shape[-2:]


def stream_room(p: Problem, tile: BackwardTile, grads: Grads) -> StreamRoom:
    """Return the room of a launch: as many slots as stages of queries, where there is room."""
    # `ptx.load_transposed` reads 16 bits; copies take rows of a multiple of 16 bytes.
    in_16_bits = p.bias is not None and p.bias.dtype.itemsize == 2 and 1 not in p.bias.shape[2:]
    of_bias = in_16_bits and p.kv_len % 8 == 0
    masks = sum(map(has_pairs, p.mask.leaves))
    taken = common.smem_bytes(keys_scratch(p, tile, grads))
    room = _hardware.shared_memory_limit(HOPPER) - taken - BARRIERS
    bits = masks * aligned(BLOCK_KV * tile.block_q // 8)
    for bias, slots in itertools.product([of_bias, False], range(grads.stages(tile), 0, -1)):
        size = bits + 2 * BLOCK_KV * tile.block_q * bias
        if size and slots * size <= room:
            return StreamRoom(slots, bias)
    return StreamRoom()


# Queries of all heads and examples: two tiles of 128 for each core of an H200, which has 132.
FEW_ROWS = 2**15


def _in_pairs(p: Problem) -> bool:
    """Whether two programs should share keys and values, at head sizes above 64.

    Timed on a hot H200, up to 16384 tokens: without a mask 2048 at 128 take as long, and others 3
    to 5 % less; causal 2048 take as long, and more of them up to 5 % less. At 64 it is 2 % less,
    and causal 10 to 16 % more. It saves power, of which few rows do not need as much: these take 7
    to 12 % longer at 128, but 8 heads of 4096 tokens without a mask 4 to 6 % less.
    """
    if p.mask.known_kind == "other":
        return False
    # The other program of the last pair may have nothing to do.
    alone = 0 < p.q_len % 256 <= 128 and p.q_len < 4096
    if alone or (p.rows <= FEW_ROWS and (p.mask or p.kv_len < 4096)):
        return False
    return min(p.q_len, p.kv_len) >= (4096 if p.mask else 2048)


def decode_tile(p: Problem) -> DecodeTile:
    """By the larger head size: as much on its way as there is memory for.

    To keep the memory of an H200 busy takes about 40 KB for each core: 4.8 TB/s, of which a core
    has its share, for a microsecond. Others were not timed.
    """
    head_dim = max(p.head_dim, p.value_dim)
    if head_dim <= 64:
        return DecodeTile(block_kv=128)
    return DecodeTile(stages=6 if head_dim <= 128 else 4 if head_dim <= 192 else 2)


def all_columns(head_dim: int, value_dim: int) -> bool:
    """Whether the tiles of the backward have 128 queries, for the padded head sizes.

    Then a warpgroup computes all columns of dq, for half of them.
    """
    return max(head_dim, value_dim) <= 64


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
    return not all(stream_room(p, tile, grads).bias for grads in launched)


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
