"""Other libraries' names of the arguments of `attention`, and the names to write here instead."""

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from pallas_flash._problem.checks import describe

# Advice, and the keywords of flash-attn, PyTorch, tokamax, Flax and JAX that it is for.
_KEYWORDS = {
    "Use `query`.": "q",
    "Use `key`.": "k k_cache",
    "Use `value`.": "v v_cache",
    "Use `bias`.": "ab attn_bias position_bias",
    "Use `mask` for bools, True where a query may see a key, or `bias` for numbers to add.": (
        "attn_mask attention_mask"
    ),
    "Use `mask` with a `pallas_flash.masks.BlockMask`.": "block_mask",
    "Use `mask` with a `pallas_flash.masks.Predicate`.": "mask_mod mask_fn",
    "Use `scale`.": "softmax_scale sm_scale scaling",
    "Use `is_causal`, aligned at the first key; add `query_offset=S - T` to align the last ones.": (
        "causal use_causal_mask"
    ),
    "Use `local_window_size`, with None on a side without a bound.": (
        "window_size window sliding_window sliding_window_size"
    ),
    "Use `logits_soft_cap`, with None for no cap.": (
        "softcap soft_cap softcapping logit_cap logit_soft_cap logit_softcap logit_softcapping "
        "logits_softcap attn_logits_soft_cap attn_logit_softcapping"
    ),
    "Use `query_seq_lengths`.": "seqused_q q_seq_lengths q_seqlen",
    "Use `key_value_seq_lengths`.": "seqused_k kv_seq_lengths kv_seqlen kv_lens",
    "Use `key_value_seq_lengths` to hide padded keys, and `query_seq_lengths` for outputs of 0.": (
        "seq_lengths lengths"
    ),
    "Use `query_positions` and `key_value_positions`.": "positions",
    "Use `query_offset` for the lengths before and `key_value_seq_lengths` for those after.": (
        "cache_seqlens"
    ),
    "Use `segment_ids`, from `pallas_flash.masks.segment_ids_from_cu_seqlens`.": "cu_seqlens",
    "Use `segment_ids` and positions, from `pallas_flash.masks.arguments_from_cu_seqlens`.": (
        "cu_seqlens_q cu_seqlens_k cu_seqlens_kv"
    ),
    "Use `segment_ids` with a pair (query, key_value).": (
        "q_segment_ids kv_segment_ids query_segment_ids key_value_segment_ids"
    ),
    "Use `sinks`.": "sink learnable_sink s_aux softmax_aux attention_sinks",
    "Use `alibi_slopes`.": "alibi slopes",
    "Use `score_mod` with a `pallas_flash.ScoreMod`, a function and its arrays.": "score_operands",
    "Use `score_mod`.": "score_fn",
    "Use `dropout_rate` and `dropout_key`.": "dropout_p dropout dropout_prob",
    "Use `dropout_key`.": "dropout_rng dropout_seed",
    "Use `reproducible` for equal gradients in every run; drop `dropout_rate` for no dropout.": (
        "deterministic"
    ),
    "Use `return_lse`.": "return_attn_probs return_softmax_lse return_aux",
    "Use `return_lse`, or `return_residual` for jax.nn's.": "return_residuals",
    "Use `config`.": "block_sizes kernel_options block_q block_k block_kv",
    "Use `implementation`.": "backend impl",
    'Use `implementation="interpret"`.': "interpret",
    "Drop it: `key` and `value` may have fewer heads than `query`.": "enable_gqa",
    "Drop it: the sharding of the arrays is seen.": "q_sharding",
    "Drop it: cast `query`, `key` and `value`, whose dtype the output has.": "dtype",
    "Drop it: the kernels are chosen for the device of the call.": "device",
    "Drop it: `segment_ids` need no lengths.": "max_seqlen max_seqlen_q max_seqlen_k",
    "Use `pallas_flash.paged_attention`, which has pages, and its own arguments.": (
        "block_table page_table page_indices"
    ),
}
KEYWORDS = {name: advice for advice, names in _KEYWORDS.items() for name in names.split()}

IMPLEMENTATIONS = {
    "cudnn": 'cuDNN is `jax.nn.dot_product_attention(..., implementation="cudnn")`',
    "xla_chunked": 'tokamax\'s "xla_chunked" is "xla"',
    "mosaic_gpu": '"mosaic" is for Hopper GPUs',
}

METHODS = {
    "ulysses": 'Ulysses is "heads"',
    "all_to_all": 'it is "heads"',
    "a2a": 'it is "heads"',
    "all_gather": 'it is "gather"',
    "allgather": 'it is "gather"',
    "p2p": 'it is "ring"',
    "ring_attention": 'it is "ring"',
    "zigzag": 'it is "ring", with tokens in `pallas_flash.masks.balanced_order`',
}


def hint(names: Mapping[str, str], value: Any) -> str:
    """Return the end of a sentence that translates the name in `value`, or ""."""
    return f"; {names[value]}" if isinstance(value, str) and value in names else ""


def check_keywords(name_of_call: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise a TypeError for the first keyword of a call that is not `known`."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            help_of = f"help(pallas_flash.{name_of_call})"
            guess = f"Use `{near[0]}`." if near else f"Drop it: see `{help_of}`."
            advice = KEYWORDS.get(name, guess)
            # `tuning.tune` does not have all arguments of `attention`.
            if (use := re.match(r"Use `(\w+)[`=]", advice)) and use[1] not in known:
                advice = f"Drop it: see `{help_of}`."
            raise TypeError(
                f"`{name}` must be an argument of `{name_of_call}`; got {describe(given[name])}. "
                f"{advice}"
            )
