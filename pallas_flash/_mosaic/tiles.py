"""The tiles of the Mosaic kernels, by what was measured on an H200 (with prototypes)."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """How a program of the forward is made.

    Attributes:
        warpgroups: those that compute, 2 or 3, with 64 queries each.
        block_kv: keys and values of a tile, a multiple of 16 (of 8 for the matrix units).
        output_slots: places of 64 columns in shared memory through which the output leaves; 0
            takes the place of the queries, for want of memory.
        stages: slots of keys, and of values.
    """

    warpgroups: int = 2
    block_kv: int = 128
    output_slots: int = 1
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class BackwardTile:
    """How a program of the backward is made; it has 128 keys.

    Attributes:
        block_q: queries of a tile, 64 or 128.
        stages: slots of queries, and of cotangents.
    """

    block_q: int = 64
    stages: int = 2


def forward_tile(head_dim: int, masked: bool) -> ForwardTile:
    """By the larger head size, and whether there is a mask."""
    if head_dim <= 64:
        return ForwardTile(3, 128, 1)
    if head_dim <= 128:
        return ForwardTile(2, 128, 2) if masked else ForwardTile(2, 176, 1)
    return ForwardTile(2, 64, 1) if masked else ForwardTile(2, 80, 0)


def backward_tile(head_dim: int) -> BackwardTile:
    """By the larger head size."""
    return BackwardTile(128 if head_dim <= 64 else 64)
