"""The tiles of the Mosaic kernels, by what was measured on an H200 (with prototypes)."""

import dataclasses

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


def default(p: Problem) -> TileSizes:
    """Those of a call."""
    head_dim = padded(max(p.head_dim, p.value_dim))
    tile, few = backward_tile(head_dim), p.few_queries and p.kv_len > MANY_KEYS
    return TileSizes(
        forward=None if few else forward_tile(p),
        decode=decode_tile(p) if few else None,
        backward=tile,
        dkv=tile,
        dq=dq_tile(head_dim, bool(p.mask)),
    )


def forward_tile(p: Problem) -> ForwardTile:
    """By the head sizes, and what there is beside products."""
    head_dim = max(p.head_dim, p.value_dim)
    # What is computed or read for each pair takes registers, of which wide tiles leave few.
    plain = not (p.mask or p.scores or p.dropout or p.any_scale)
    scores = dataclasses.replace(p.scores, soft_cap=None)
    busy = scores or not all(leaf.intervals for leaf in p.mask.leaves)
    if head_dim <= 64:
        if p.dropout or p.bias is not None:
            return ForwardTile(2, 128, 1)
        return ForwardTile(3, 96 if busy else 128, 1)
    if head_dim <= 128:
        if p.bias is not None and p.bias.dtype.itemsize > 2:
            return ForwardTile(2, 96, 2)
        return ForwardTile(2, 176, 1) if plain else ForwardTile(2, 128, 2)
    # Only values that are no wider leave in place of the queries.
    return ForwardTile(2, 80, 0) if plain and p.value_dim <= p.head_dim else ForwardTile(2, 64, 1)


def decode_tile(p: Problem) -> DecodeTile:
    """By the larger head size: as much on its way as there is memory for.

    To keep the memory of an H200 busy takes about 40 KB for each core: 4.8 TB/s, of which a core
    has its share, for a microsecond. Not timed.
    """
    head_dim = max(p.head_dim, p.value_dim)
    if head_dim <= 64:
        return DecodeTile(block_kv=128)
    return DecodeTile(stages=6 if head_dim <= 128 else 4 if head_dim <= 192 else 2)


def padded(head_dim: int) -> int:
    """The head size that the kernels of the backward have for one that is not theirs."""
    return 64 if head_dim <= 64 else 128


def backward_tile(head_dim: int) -> BackwardTile:
    """By the larger head size."""
    return BackwardTile(128 if head_dim <= 64 else 64)


def dq_tile(head_dim: int, masked: bool) -> DqTile:
    """By the padded head size, and whether there is a mask.

    At 128 the largest tiles of which the compiler keeps everything in registers. At 64, timed on an
    H100 without a mask, both passes: 2 warpgroups and 128 keys take 4 % longer, 64 keys 7 %.
    """
    if head_dim <= 64:
        return DqTile(3, 64, 2)
    return DqTile(2, 64, 3) if masked else DqTile(2, 128, 2)
