"""Keywords that `attention` does not have, most of them another library's."""

import inspect
import operator
import pickle
import re

import jax
import pytest
from support.calls import Row, assert_each, f32, i32, inputs

import pallas_flash
from pallas_flash._arguments import other_libraries

PARAMETERS = list(inspect.signature(pallas_flash.attention).parameters)

# A call as it would be written for that library, and what the sentence says to use.
PEERS = {
    "flash-attn": {
        "softmax_scale": (0.5, "Use `scale`."),
        "causal": (True, "Use `is_causal`, aligned at the first key; add `query_offset=S - T`"),
        "window_size": ((-1, 0), "Use `local_window_size`, with None on a side without a bound."),
        "softcap": (30.0, "Use `logits_soft_cap`, with None for no cap."),
        "dropout_p": (0.1, "Use `dropout_rate` and `dropout_key`."),
        "deterministic": (True, "Use `reproducible` for equal gradients in every run;"),
        "return_attn_probs": (True, "Use `return_lse`."),
        "cu_seqlens": (i32(3), "Use `segment_ids`, from `pallas_flash.masks.segment_ids_from"),
        "cu_seqlens_q": (i32(3), "positions, from `pallas_flash.masks.arguments_from_cu_seqlens`."),
        "seq_lengths": (
            i32(2),
            "Use `key_value_seq_lengths` to hide padded keys, and `quer",
        ),
        "cache_seqlens": (i32(2), "Use `query_offset` for the lengths before"),
        "block_table": (i32(2, 3), "Use `pallas_flash.paged_attention`"),
    },
    "PyTorch": {
        "attn_mask": (f32(5, 7), "Use `mask` for bools, True where a query may see a key, or `bi"),
        "enable_gqa": (True, "Drop it: `key` and `value` may have fewer heads"),
        "block_mask": (None, "Use `mask` with a `pallas_flash.masks.BlockMask`."),
        "mask_mod": (max, "Use `mask` with a `pallas_flash.masks.Predicate`."),
    },
    "JAX": {
        "sm_scale": (0.5, "Use `scale`."),
        "block_sizes": (None, "Use `config`."),
        "interpret": (True, 'Use `implementation="interpret"`.'),
        "q_sharding": (None, "Drop it: the sharding of the arrays is seen."),
        "dropout_rng": (jax.random.key(0), "Use `dropout_key`."),
    },
    "other words": {
        "score_fn": (max, "Use `score_mod`."),
        "score_operands": ((), "Use `score_mod` with a `pallas_flash.ScoreMod`, a function and i"),
    },
    "misspelled": {
        "logits_softcap": (30.0, "Use `logits_soft_cap`, with None for no cap."),
        "is_casual": (True, "Use `is_causal`."),
        "segment_id": (i32(2, 5), "Use `segment_ids`."),
        "zzz": (1, "Drop it: see `help(pallas_flash."),
    },
}


def unknown():
    for library, names in PEERS.items():
        for name, (value, advice) in names.items():
            yield Row(
                f"{name} of {library}" if library != "misspelled" else f"misspelled {name}",
                lambda name=name, value=value: {name: value},
                TypeError,
                advice,
            )
    yield Row(
        "a traced unknown keyword",
        lambda: {"causal": True},
        TypeError,
        "`causal` must be an argument of `attention`; got an array of bool with shape ().",
        traced="causal",
    )


ROWS = [*unknown()]


def test_unknown_keywords_raise_one_sentence():
    assert_each(ROWS)


def test_unknown_array_names_are_reported_first():
    with pytest.raises(TypeError, match=r"^`q` must be an argument .* Use `query`\.$"):
        pallas_flash.attention(q=f32(2, 5, 6, 8))


def test_advice_names_what_exists():
    assert not set(other_libraries.KEYWORDS) & set(PARAMETERS)
    for advice in other_libraries.KEYWORDS.values():
        for name in re.findall(r"`([\w.]+)[^`]*`", advice):
            module, _, attribute = name.partition(".")
            if attribute:
                operator.attrgetter(attribute)(pallas_flash)
            else:
                assert module in PARAMETERS


@pytest.mark.parametrize("function", [pallas_flash.attention, pallas_flash.explain])
def test_functions_keep_their_signature(function):
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert inspect.getsource(function).count(f"def {function.__name__}(") == 1
    assert pickle.loads(pickle.dumps(function)) is function
    static = jax.jit(pallas_flash.attention, static_argnames="is_causal")
    assert static(**inputs(), is_causal=True).shape == (2, 5, 6, 4)
