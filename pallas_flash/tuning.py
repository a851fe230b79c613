"""Configurations of the kernels, for calls that know better than auto-selection and the tables.

This module is unstable: it names insides of the kernels, and any release may change it.

A configuration names its backend. A `Triton` has `Tile`s; a `Mosaic` has a class of its own for
each kernel, because the kernels for Hopper are made differently. A number that a tile may not have
raises ValueError, and anything but an int TypeError. `attention` takes either configuration as
`tile_sizes`:

* With `implementation`, the configuration must be for that one. Another one raises.
* Without, it is a preference. Its backend computes each pass for which it has a tile, if it serves
  the call. If it does not, the configuration has no effect. `explain` says which of both.

`pallas_flash.tune` finds tiles by measuring. It may find another backend for each pass, and so it
gives a `TileSizes`, which holds tiles of both.
"""

from pallas_flash._problem.configurations import Mosaic as Mosaic
from pallas_flash._problem.configurations import Triton as Triton
from pallas_flash._problem.tile_sizes import BackwardTile as BackwardTile
from pallas_flash._problem.tile_sizes import DecodeTile as DecodeTile
from pallas_flash._problem.tile_sizes import DqTile as DqTile
from pallas_flash._problem.tile_sizes import ForwardTile as ForwardTile
from pallas_flash._problem.tile_sizes import Tile as Tile
from pallas_flash._problem.tile_sizes import TileSizes as TileSizes
