"""Masks as objects, for the argument `mask` of `attention`; `&`, `|` and `~` join them.

Boolean arrays take part in `&` and `|`, too. Beside the classes are a picture of any mask, and the
arrays that packed sequences and sequences on several devices need. The constructor of a mask object
checks the kinds of its arguments, and a call checks their shapes. Masks are equal if they have one
class, equal constants and the same array objects.
"""

from pallas_flash._call.order import balanced_order
from pallas_flash._call.packed import arguments_from_cu_seqlens, segment_ids_from_cu_seqlens
from pallas_flash._call.plot import plot
from pallas_flash._problem.mask_objects import BlockMask, Predicate, PrefixLM, Segments
from pallas_flash._problem.named_masks import (
    BlockCausal,
    Chunked,
    Dilated,
    Neighborhood,
    SharedPrefix,
    Tree,
)

__all__ = [
    "BlockCausal",
    "BlockMask",
    "Chunked",
    "Dilated",
    "Neighborhood",
    "Predicate",
    "PrefixLM",
    "Segments",
    "SharedPrefix",
    "Tree",
    "arguments_from_cu_seqlens",
    "balanced_order",
    "plot",
    "segment_ids_from_cu_seqlens",
]
