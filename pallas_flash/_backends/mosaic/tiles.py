"""The tiles of these kernels: the ones of a call, whether one fits, and which `tuning.tune` tries.

The module of each launch has its `default_tile`, by what was measured on an H200 (with prototypes),
and most have a `check_tile`.
"""

import dataclasses
import itertools
from collections.abc import Collection
from typing import Any

from pallas_flash._backends.mosaic import (
    backward_dq,
    backward_launch,
    decode,
    forward_kernel,
    forward_tiles,
    forward_wide,
    paged,
)
from pallas_flash._problem.features import CallFeatures
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import (
    KERNELS,
    BackwardTile,
    Choose,
    DqTile,
    ForwardTile,
    TileSizes,
    fits,
    tile_of,
)


def default(p: Problem, f: CallFeatures, kernels: Collection[str] = KERNELS) -> TileSizes:
    """Return the tiles of some kernels; None for a kernel that does not serve the call."""
    if forward_wide.serves(p):
        forward = forward_wide.default_tile(p) if "forward" in kernels else None
        return TileSizes(forward=forward)
    return TileSizes(**{kernel: _default_tile(kernel, p, f) for kernel in kernels})


def _default_tile(kernel: str, p: Problem, f: CallFeatures) -> Any:
    match kernel:
        case "forward":
            return paged.default_tile(p) if decode.packs(p) else forward_tiles.default_tile(f)
        case "backward" | "dkv":
            return backward_launch.default_tile(p, two_passes=kernel == "dkv")
        case "dq":
            return backward_dq.default_tile(p)
    return None


def check(kernel: str, tile, p: Problem, f: CallFeatures) -> None:
    """Raise ValueError if a tile does not fit on the GPU."""
    del f
    match kernel:
        case "forward" if forward_wide.serves(p):
            forward_wide.check_tile(tile, p)
        case "forward":
            (decode if decode.serves(p, tile) else forward_kernel).check_tile(tile, p)
        case "dq":
            backward_dq.check_tile(tile, p)
        case _:
            backward_launch.check_tile(kernel, tile, p)


def candidates(kernel: str, p: Problem, choose: Choose) -> list:
    """Return the tiles that `tuning.tune` tries: the default one, if any, and all that fit."""
    # The output leaves through one buffer, or, where that has no room, through the queries'.
    keys_and_slots = (64, 80, 96, 112, 128, 144, 160, 176, 192), (1, 0)
    forward = [ForwardTile(*x) for x in itertools.product((2, 3), *keys_and_slots, (2, 3))]
    if max(p.head_dim, p.value_dim) > 64:  # Smaller heads gain nothing by a cluster.
        forward += [ForwardTile(2, *x, cluster_size=2) for x in itertools.product(*keys_and_slots)]
    else:
        forward.append(ForwardTile(4, 64, 1, 4))
    backward = [BackwardTile(*sizes) for sizes in itertools.product((64, 128), (1, 2, 3))]
    tried = {
        "forward": forward,
        "backward": backward,
        "dkv": backward,
        "dq": [DqTile(*sizes) for sizes in itertools.product((2, 3), (64, 128), (2, 3, 4))],
    }[kernel]
    if kernel == "forward" and decode.packs(p):
        tried = [ForwardTile(*x) for x in itertools.product((2, 3), (64, 128), (0,), (2, 3, 4))]
    fitting = [tile for tile in tried if fits(kernel, tile, choose)]
    if kernel == "forward":
        with_slots = {dataclasses.replace(x, output_slots=0) for x in fitting if x.output_slots}
        fitting = [x for x in fitting if x not in with_slots]
    own = tile_of(choose(None), kernel)
    return list(dict.fromkeys([*([] if own is None else [own]), *fitting]))
