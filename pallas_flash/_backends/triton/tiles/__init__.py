"""Tiles for these kernels: the measured ones, the rule that picks, and candidates for tuning."""

from pallas_flash._backends.triton.tiles.candidates import candidates
from pallas_flash._backends.triton.tiles.rule import check, default

__all__ = ["candidates", "check", "default"]
