"""Tiles for these kernels: what was measured, the rule that picks from it, and what to try."""

from pallas_flash._triton.tiles.candidates import candidates as candidates
from pallas_flash._triton.tiles.rule import default as default
from pallas_flash._triton.tiles.rule import shared_bytes as shared_bytes
