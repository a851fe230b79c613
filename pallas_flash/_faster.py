"""Which passes of "mosaic" were measured to be faster than those of "triton", on an H200.

What is not here is slower, or was not measured. `scripts/make_tables.py` writes these tables from
the times in docs/results.
"""

import math

from pallas_flash._mask_objects import BlockMask, MaskArray, Predicate
from pallas_flash._masks import Segments
from pallas_flash._problem import Problem

# The length from which on a pass is faster, by the kind of call and the head dim, see `_size`. A
# call of several kinds needs all of them. "backward of few programs" is for the backwards for which
# `_few_programs` is true.
# table: faster
FASTER_BY_MOSAIC = {
    "forward": {
        "full": {64: 1000, 128: 512, 256: 512},
        "causal": {64: 512, 128: 512, 256: 512},
        "ranges": {64: 1024, 128: 1024, 256: 1024},
        "documents": {64: 2048, 128: 2048, 256: 2048},
        "lengths": {64: 1024, 128: 1024, 256: 1024},
        "mask array": {64: 1024, 128: 1024, 256: 1024},
        "bias in 16 bits": {64: 4096, 128: 2048, 256: 2048},
        "soft cap": {64: 1024, 128: 1024, 256: 1024},
        "slopes": {64: 1024, 128: 1024, 256: 1024},
        "sinks": {64: 1024, 128: 1024, 256: 1024},
        "scale": {128: 1024, 256: 1024},
        "dropout": {128: 1024, 256: 1024},
        "bias": {64: 4096, 128: 4096, 256: 2048},
        "predicate": {64: 1024, 128: 1024, 256: 1024},
        "score function": {128: 1024, 256: 1024},
        "blocks": {64: 4096, 128: 1024, 256: 1024},
    },
    "backward": {
        "full": {64: 512, 128: 512, 256: 512},
        "causal": {64: 512, 128: 512, 256: 512},
        "ranges": {64: 1024, 128: 1024, 256: 1024},
        "documents": {64: 2048, 128: 2048, 256: 2048},
        "lengths": {64: 1024, 128: 1024, 256: 1024},
        "mask array": {64: 1024, 128: 1024, 256: 1024},
        "bias in 16 bits": {64: 2048, 128: 512, 256: 2048},
        "soft cap": {64: 1024, 128: 1024, 256: 1024},
        "slopes": {64: 1024, 128: 1024, 256: 1024},
        "sinks": {64: 1024, 128: 1024, 256: 1024},
        "scale": {64: 1024, 128: 1024, 256: 1024},
        "dropout": {64: 1024, 128: 1024, 256: 1024},
        "bias": {64: 2048, 128: 2048, 256: 2048},
        "predicate": {64: 1024, 128: 1024, 256: 1024},
        "score function": {64: 1024, 128: 1024, 256: 1024},
        "blocks": {64: 4096, 128: 2048, 256: 1024},
    },
    "backward of few programs": {
        "full": {64: 2048, 128: 1024, 256: 2048},
        "causal": {64: 1024, 128: 512, 256: 512},
    },
    "backward in order": {
        "full": {64: 512, 128: 512, 256: 512},
        "causal": {64: 1024, 128: 512, 256: 512},
        "ranges": {64: 2048, 128: 1024, 256: 1024},
        "documents": {128: 2048, 256: 2048},
        "lengths": {64: 1024, 128: 1024, 256: 1024},
        "mask array": {64: 1024, 128: 1024, 256: 1024},
        "bias in 16 bits": {128: 4096, 256: 2048},
        "soft cap": {128: 1024, 256: 1024},
        "slopes": {128: 1024, 256: 1024},
        "sinks": {64: 4096, 128: 1024, 256: 1024},
        "scale": {64: 2048, 128: 1024, 256: 1024},
        "dropout": {128: 1024, 256: 1024},
        "predicate": {64: 2048, 128: 1024, 256: 1024},
        "score function": {128: 1024, 256: 1024},
        "blocks": {128: 1024, 256: 1024},
    },
    "backward with dbias": {
        "full": {64: 2048, 128: 512},
        "causal": {64: 2048, 128: 2048},
        "bias in 16 bits": {64: 2048, 128: 512},
    },
    "backward in order with dbias": {
        "full": {128: 512},
        "causal": {64: 2048, 128: 2048},
        "bias in 16 bits": {64: 2048, 128: 512},
    },
}
# end

# All these calls had so many queries of all heads and examples, or more; those named, by pass, head
# size and kind, had fewer. And the backwards had so many keys, whose tiles are their programs: by
# head size. Those at 64 were 71 heads on one, at 128 8 on one; at 256 as many keys as queries.
ROWS_MEASURED = 2**17
# table: fewer-rows
FEWER_ROWS_MEASURED = {
    ("forward", 64, "causal"): 16384,
    ("forward", 64, "full"): 65536,
    ("forward", 128, "causal"): 8192,
    ("forward", 128, "full"): 16384,
    ("forward", 256, "causal"): 4096,
    ("forward", 256, "full"): 8192,
    ("backward", 64, "full"): 32768,
    ("backward", 128, "causal"): 65536,
    ("backward", 128, "full"): 16384,
    ("backward", 256, "full"): 16384,
}
# end
KEYS_MEASURED = {64: 2**14, 128: 2**13}

FEW_PROGRAMS = 132 // 2  # For half of the cores of an H100 or an H200.

KIND_OF_LEAF = {
    Segments: "documents",
    MaskArray: "mask array",
    BlockMask: "blocks",
    Predicate: "predicate",
}


def faster_by_mosaic(attention_pass: str, p: Problem) -> bool:
    """Whether this pass was measured to be faster than that of "triton" for calls like this."""
    if p.symbolic:
        return False
    size, kinds = _size(p), _kinds(p)
    few = attention_pass == "backward" and _few_programs(p)
    if few:
        attention_pass = "backward of few programs"
    lengths = FASTER_BY_MOSAIC[attention_pass]
    since = max(lengths.get(kind, {}).get(size, math.inf) for kind in kinds)
    long_enough = min(p.q_len, p.kv_len) >= since
    if few:
        return long_enough
    rows = max(FEWER_ROWS_MEASURED.get((attention_pass, size, x), ROWS_MEASURED) for x in kinds)
    enough = p.rows >= rows
    if attention_pass != "forward":
        enough = enough and p.kv_rows >= KEYS_MEASURED.get(size, rows)
    return enough and long_enough


def _few_programs(p: Problem) -> bool:
    """Whether the backward of heads with keys of their own leaves half of the cores idle, or more.

    A program has 128 keys.
    """
    return p.groups == 1 and p.batch * p.num_kv_heads * -(-p.kv_len // 128) <= FEW_PROGRAMS


def _size(p: Problem) -> int:
    """A head size that was measured and that takes as long; 0 if there is none."""
    # Sizes from 40 to 256 were, and narrower values: 128 of 192 and 64 of 128.
    sizes = (n for n in (64, 128, 256) if 40 <= p.head_dim <= n and p.value_dim <= p.head_dim)
    return next(sizes, 0)


def _kinds(p: Problem) -> set[str]:
    """What a call is by its mask, and what else it asks for; as in `FASTER_BY_MOSAIC`."""
    if p.mask.known_kind != "other":
        kinds = {p.mask.known_kind}
    elif p.mask.has_valid_lengths:
        kinds = {"lengths"}
    else:
        kinds = {_kind_of_leaf(x) for x in p.mask.leaves if not x.exact_ranges} or {"ranges"}
    in_16_bits = p.bias is not None and p.bias.dtype.itemsize == 2
    asked = {
        "bias in 16 bits" if in_16_bits else "bias": p.bias,
        "slopes": p.slopes,
        "score function": p.scores.score_mod,
        "soft cap": p.scores.soft_cap,
        "sinks": p.sinks,
        "dropout": p.dropout,
        "scale": p.any_scale or None,
    }
    return kinds | {name for name, x in asked.items() if x is not None}


def _kind_of_leaf(leaf) -> str:
    kinds = (kind for cls, kind in KIND_OF_LEAF.items() if isinstance(leaf, cls))
    return next(kinds, "another mask")
