"""Tiles of the kernels: the search for them, and configurations of them by hand.

This module is unstable: it names insides of the kernels, and any release may change it.

`tune` finds tiles by measuring, and keeps them for later calls. It may find another backend for
each pass, and so it gives a `TileSizes`, which holds tiles of both.

A configuration names its backend. A `Triton` has `Tile`s; a `Mosaic` has a class of its own for
each kernel, because the kernels for Hopper are made differently. A number that a tile may not have
raises ValueError, and anything but an int TypeError. `attention` takes each of them as `config`:

* With `implementation`, the configuration must be for that one. Another one raises.
* Without, it is a preference. Its backend computes each pass for which it has a tile, if it serves
  the call. If it does not, the configuration has no effect. `explain` says which of both.
"""

from pallas_flash._call.tune import Trial, Tuning, tune
from pallas_flash._problem.configurations import Mosaic, Triton
from pallas_flash._problem.tile_sizes import (
    BackwardTile,
    DqTile,
    ForwardTile,
    Tile,
    TileSizes,
)

__all__ = [
    "BackwardTile",
    "DqTile",
    "ForwardTile",
    "Mosaic",
    "Tile",
    "TileSizes",
    "Trial",
    "Triton",
    "Tuning",
    "tune",
]
