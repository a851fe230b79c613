"""Exact softmax attention for JAX on GPUs: blocked Pallas kernels, forward and backward.

`attention` is the call (see `help(pallas_flash.attention)`), and `explain` says what computes it.
More is in modules:

    pallas_flash.masks     masks as objects, pictures of masks, packed sequences
    pallas_flash.paged     new tokens and quantised numbers for the pages of `paged_attention`
    pallas_flash.tuning    tiles of the kernels; unstable
    pallas_flash.flax      layers and caches for Flax: `from pallas_flash.flax import SelfAttention`
"""

from pallas_flash import masks, paged, tuning
from pallas_flash._autodiff.vjp import save_residuals
from pallas_flash._call.attention import attention, dropout_mask, explain
from pallas_flash._call.merge import merge
from pallas_flash._call.paged_attention import paged_attention
from pallas_flash._problem.score_mod import ScoreMod
from pallas_flash._selection.resolve import Explanation

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "ScoreMod",
    "attention",
    "dropout_mask",
    "explain",
    "masks",
    "merge",
    "paged",
    "paged_attention",
    "save_residuals",
    "tuning",
]
