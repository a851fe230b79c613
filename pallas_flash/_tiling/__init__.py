"""Tiles, whichever backend they are for; what a backend knows of its own is in its folder `tiles`.

sizes           `Tile` and `TileSizes`, and their checks
configurations  `Triton` and `Mosaic`, the tiles of one backend that a call asks for
choose          the tiles of a call: those that it asks for, else those of a backend's table
tune            the search for the fastest on the GPU that is here
cache           the file of what it found, and the calls that these serve
"""
