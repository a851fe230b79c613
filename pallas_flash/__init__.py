"""Exact softmax attention for JAX on GPUs: blocked Pallas kernels, forward and backward."""

from pallas_flash._api import attention as attention
from pallas_flash._api import explain as explain
from pallas_flash._select import Explanation as Explanation
from pallas_flash._tiles import Tile as Tile
from pallas_flash._tiles import TileSizes as TileSizes
from pallas_flash._tune import tune as tune

__version__ = "0.1.0"
