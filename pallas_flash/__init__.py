"""Exact softmax attention for JAX on GPUs: blocked Pallas kernels, forward and backward."""

from pallas_flash import tuning as tuning
from pallas_flash._autodiff.vjp import save_residuals as save_residuals
from pallas_flash._call.attention import attention as attention
from pallas_flash._call.attention import dropout_mask as dropout_mask
from pallas_flash._call.attention import explain as explain
from pallas_flash._call.merge import merge as merge
from pallas_flash._call.order import balanced_order as balanced_order
from pallas_flash._call.packed import arguments_from_cu_seqlens as arguments_from_cu_seqlens
from pallas_flash._call.packed import segment_ids_from_cu_seqlens as segment_ids_from_cu_seqlens
from pallas_flash._call.paged_attention import paged_attention as paged_attention
from pallas_flash._call.pages import append_to_pages as append_to_pages
from pallas_flash._call.pages import quantize_pages as quantize_pages
from pallas_flash._call.plot import plot_mask as plot_mask
from pallas_flash._call.tune import tune as tune
from pallas_flash._problem.mask_objects import BlockMask as BlockMask
from pallas_flash._problem.mask_objects import Predicate as Predicate
from pallas_flash._problem.mask_objects import PrefixLM as PrefixLM
from pallas_flash._problem.mask_objects import Segments as Segments
from pallas_flash._problem.named_masks import BlockCausal as BlockCausal
from pallas_flash._problem.named_masks import Chunked as Chunked
from pallas_flash._problem.named_masks import Dilated as Dilated
from pallas_flash._problem.named_masks import Neighborhood as Neighborhood
from pallas_flash._problem.named_masks import SharedPrefix as SharedPrefix
from pallas_flash._problem.named_masks import Tree as Tree
from pallas_flash._problem.score_mod import ScoreMod as ScoreMod
from pallas_flash._selection.resolve import Explanation as Explanation

__version__ = "0.1.0"
