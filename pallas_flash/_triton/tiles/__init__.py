"""Tiles for these kernels: the measured ones, the rule that picks, and candidates for tuning."""

from pallas_flash._triton.tiles.candidates import candidates
from pallas_flash._triton.tiles.rule import check, default

__all__ = ["candidates", "check", "default"]
