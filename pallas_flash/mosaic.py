"""Tiles of the kernels for Hopper GPUs, implementation "mosaic"; `TileSizes` takes them."""

from pallas_flash._tiling.sizes import BackwardTile as BackwardTile
from pallas_flash._tiling.sizes import DecodeTile as DecodeTile
from pallas_flash._tiling.sizes import DqTile as DqTile
from pallas_flash._tiling.sizes import ForwardTile as ForwardTile
