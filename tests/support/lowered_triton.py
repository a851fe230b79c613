"""Kernels lowered through Triton, run on the lowered IR."""

import functools

from support import oracle, ttir

import pallas_flash
from pallas_flash.tuning import Tile, TileSizes

# Small, and of different shape for each kernel: a tile number taken from the wrong one shows.
TILES = TileSizes(Tile(64, 32), dkv=Tile(32, 64), dq=Tile(32, 64, 2, 3))


def _attention(options, tiles=TILES):
    return functools.partial(
        pallas_flash.attention,
        return_lse=True,
        implementation="triton",
        config=tiles,
        **options,
    )


def differentiated(problem, tiles=TILES):
    """The results that `oracle.names` names, and the runs of the kernels."""
    qkv, cotangents, options = problem
    operands, options = oracle.split(options)
    runs = []

    def function(qkv, cotangents, operands):
        return oracle.differentiate(_attention(options, tiles), *qkv, *cotangents, **operands)

    return ttir.evaluate(function, qkv, cotangents, operands, runs=runs), runs
