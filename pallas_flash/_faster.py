"""Which passes of "mosaic" were measured to be faster than those of "triton", on an H200.

What is not here is slower, or was not measured. `tests/test_choice.py` makes these tables again
from the times in docs/results.
"""

import math

from pallas_flash._mask_objects import BlockMask, MaskArray, Predicate
from pallas_flash._masks import Segments
from pallas_flash._problem import Problem

# What is often faster from the same length on.
MASKS = "ranges, lengths, mask array, predicate"
OPTIONS = "soft cap, slopes, sinks, score function, scale, dropout"

# The kinds of calls for which a pass is faster, by head size, see `_size`, and the length from
# which on it is; of a call of several kinds all must be there.
FASTER_BY_MOSAIC = {
    "forward": {
        64: {
            512: "causal",
            1000: "full",
            1024: f"{MASKS}, soft cap, slopes, sinks",
            2048: "documents",
            4096: "blocks, bias in 16 bits, bias",
        },
        128: {
            512: "full, causal",
            1024: f"{MASKS}, blocks, {OPTIONS}",
            2048: "documents, bias in 16 bits",
            4096: "bias",
        },
        256: {
            512: "full, causal",
            1024: f"{MASKS}, blocks, {OPTIONS}",
            2048: "documents, bias in 16 bits, bias",
        },
    },
    "backward": {
        64: {
            512: "full, causal",
            1024: f"{MASKS}, {OPTIONS}",
            2048: "documents, bias in 16 bits, bias",
            4096: "blocks",
        },
        128: {
            512: "full, causal, bias in 16 bits",
            1024: f"{MASKS}, {OPTIONS}",
            2048: "documents, blocks, bias",
        },
        256: {
            512: "full, causal",
            1024: f"{MASKS}, blocks, {OPTIONS}",
            2048: "documents, bias in 16 bits, bias",
        },
    },
    # In place of the one before, for all calls of which `_few_programs` says so.
    "backward of few programs": {
        64: {
            1024: "causal",
            2048: "full",
        },
        128: {
            512: "causal",
            1024: "full",
        },
        256: {
            512: "causal",
            2048: "full",
        },
    },
    "backward in order": {
        64: {
            512: "full",
            1024: "causal, lengths, mask array",
            2048: "ranges, predicate, scale",
            4096: "sinks",
        },
        128: {
            512: "full, causal",
            1024: f"{MASKS}, blocks, {OPTIONS}",
            2048: "documents",
            4096: "bias in 16 bits",
        },
        256: {
            512: "full, causal",
            1024: f"{MASKS}, blocks, {OPTIONS}",
            2048: "documents, bias in 16 bits",
        },
    },
    "backward with dbias": {
        64: {
            2048: "full, causal, bias in 16 bits",
        },
        128: {
            512: "full, bias in 16 bits",
            2048: "causal",
        },
    },
    "backward in order with dbias": {
        64: {
            2048: "causal, bias in 16 bits",
        },
        128: {
            512: "full, bias in 16 bits",
            2048: "causal",
        },
    },
}

# All these calls had so many queries of all heads and examples, or more; those named, by pass, head
# size and kind, had fewer. And the backwards had so many keys, whose tiles are their programs: by
# head size. Those at 64 were 71 heads on one, at 128 8 on one; at 256 as many keys as queries.
ROWS_MEASURED = 2**17
FEWER_ROWS_MEASURED = {
    ("forward", 64, "full"): 2**16,
    ("forward", 64, "causal"): 2**14,
    ("forward", 128, "full"): 2**14,
    ("forward", 128, "causal"): 2**13,
    ("forward", 256, "full"): 2**13,
    ("forward", 256, "causal"): 2**12,
    ("backward", 64, "full"): 2**15,
    ("backward", 128, "full"): 2**14,
    ("backward", 128, "causal"): 2**16,
    ("backward", 256, "full"): 2**14,
}
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
    size, kinds = _size(p), _kinds(p)
    few = attention_pass == "backward" and _few_programs(p)
    if few:
        attention_pass = "backward of few programs"
    lengths = {
        kind: length
        for length, of_length in FASTER_BY_MOSAIC[attention_pass].get(size, {}).items()
        for kind in of_length.split(", ")
    }
    since = max(lengths.get(kind, math.inf) for kind in kinds)
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
    elif p.mask.ends_by_lengths:
        kinds = {"lengths"}
    else:
        kinds = {_kind_of_leaf(x) for x in p.mask.leaves if not x.intervals} or {"ranges"}
    in_16_bits = p.bias is not None and p.bias.dtype.itemsize == 2
    asked = {
        "bias in 16 bits" if in_16_bits else "bias": p.bias,
        "slopes": p.slopes,
        "score function": p.scores.score_fn,
        "soft cap": p.scores.soft_cap,
        "sinks": p.sinks,
        "dropout": p.dropout,
        "scale": p.any_scale or None,
    }
    return kinds | {name for name, x in asked.items() if x is not None}


def _kind_of_leaf(leaf) -> str:
    kinds = (kind for cls, kind in KIND_OF_LEAF.items() if isinstance(leaf, cls))
    return next(kinds, "another mask")
