"""Tiles of both backends. Each backend has its own tables and its own check of shared memory.

sizes           `TileSizes` and the class of each kernel's tile, with their checks
configurations  `Triton` and `Mosaic`, the tiles of one backend that a call asks for
choose          the tiles of a call: the ones that it asks for, and the rest from a table
tune            the search for the fastest tiles on the GPU that is here
cache           the file of tuned tiles, and the calls that they serve
"""
