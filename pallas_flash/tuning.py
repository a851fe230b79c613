"""The sizes of the kernels' tiles. Unstable: its names and numbers may change in any release.

`attention` takes a `TileSizes`, and `pallas_flash.tune` finds one.
"""

from pallas_flash._tiling.sizes import BackwardTile as BackwardTile
from pallas_flash._tiling.sizes import DecodeTile as DecodeTile
from pallas_flash._tiling.sizes import DqTile as DqTile
from pallas_flash._tiling.sizes import ForwardTile as ForwardTile
from pallas_flash._tiling.sizes import Tile as Tile
from pallas_flash._tiling.sizes import TileSizes as TileSizes
