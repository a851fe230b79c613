"""Tiles, whichever backend they are for; what a backend knows of its own is in its folder `tiles`.

sizes           `Tile` and `TileSizes`, and their checks
configurations  `Triton` and `Mosaic`, the tiles of one backend that a call asks for
workload        what tiles are chosen by
choose          those of a call: what it asks for, else what was tuned, else the backend's own
tune            the search for the fastest on the GPU that is here
cache           the file of what it found, and the calls that these serve
"""
