"""How a config.json of the families below becomes the fields of a `DecoderConfig`.

A family is the `model_type` of the file, a key of `FAMILIES`; a model with images (`TEXT_PARTS`) is
its text part. A field of the file
    is read, if its family has it in `FAMILIES`,
    must have a value that `Decoder` computes, if it stands in `COMPUTED`,
    is left out, if its name matches one of `NO_EFFECT`,
    and raises otherwise.
"""

import fnmatch
import json
from typing import Any

from models.rope import Rope, is_number


def json_object(name: Any, text: str | bytes) -> dict[str, Any]:
    """Return the fields of a JSON text.

    Args:
        name: The file's name in messages.
        text: Its content.

    Raises:
        ValueError: The text is no JSON object.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be JSON; got {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name} must be a JSON object; got {text[:40]!r}.")
    return content


def fields_from_json(text: str) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` that the text of a config.json describes.

    Raises:
        ValueError: The text is no JSON object, the family is unknown, a field is missing or
            unknown, or a value is one that `Decoder` does not compute.
    """
    content = json_object("`config.json`", text)
    kind = content.get("model_type")
    if isinstance(kind, str) and kind in TEXT_PARTS:
        content = _text_part(content)
        text = json.dumps(content)
    kind = content.pop("model_type", None)
    if content.get("num_local_experts") or content.get("num_experts"):
        raise ValueError(
            f"`config.json` must describe dense MLPs; got {kind!r} with experts, which "
            "`Decoder` does not compute: it has the attention of gpt-oss (sinks, windows, "
            "yarn), but no mixture of experts."
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"`model_type` must be one of {', '.join((*FAMILIES, *TEXT_PARTS))}; got {kind!r}."
        )
    known, fixed = FAMILIES[kind]
    known = {name: x for name, x in known.items() if x is not UNREAD}
    unread = FAMILIES[kind][0].keys() - known.keys()
    others = {name: x for name, x in content.items() if name not in known and x is not None}
    others = {name: x for name, x in others.items() if name not in unread}
    _refuse_unknown(kind, [name for name in others if not _is_harmless(name)])
    if missing := [name for name, x in known.items() if x is NEEDED and name not in content]:
        raise ValueError(f"`config.json` of {kind} must have {', '.join(missing)}.")
    values = {name: _value(name, content, default) for name, default in known.items()}
    for name, x in (others | values).items():
        wanted = known.get(name, COMPUTED.get(name))
        if isinstance(wanted, tuple) and x not in wanted:
            raise ValueError(
                f"`{name}` of {kind} must be {' or '.join(map(repr, wanted))}; got {x!r}, "
                "which `Decoder` does not compute."
            )
    return {**_fields_of(values), **fixed, "source": text}


def _text_part(content: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text part of a model with images."""
    kind, text = content["model_type"], content.get("text_config")
    text = {} if text is None else text
    of_images = (*IMAGES, "text_config", "model_type")
    others = [name for name in content if content[name] is not None and name not in of_images]
    _refuse_unknown(kind, [name for name in others if not _is_harmless(name)])
    if not isinstance(text, dict) or text.get("model_type", TEXT_PARTS[kind]) != TEXT_PARTS[kind]:
        raise ValueError(
            f"`text_config` of {kind} must be an object of {TEXT_PARTS[kind]}; got {text!r:.60}."
        )
    # The whole model has the tokens and the dtype.
    kept = {name: content[name] for name in others if name.endswith(("_token_id", "dtype"))}
    named = {"architectures": ["Gemma3ForCausalLM"], "model_type": TEXT_PARTS[kind]}
    return {**text, **kept, **named}


def _refuse_unknown(kind: str, names: list[str]) -> None:
    if names:
        raise ValueError(
            f"`config.json` of {kind} must have fields that `Decoder` computes; got "
            f"{', '.join(repr(name)[1:-1] for name in sorted(names))}. Delete those that change no "
            "logits; weights must not be quantised."
        )


def _is_harmless(name: str) -> bool:
    """Whether a field of no family has no effect on logits, or one that is checked."""
    return name in COMPUTED or any(fnmatch.fnmatchcase(name, x) for x in NO_EFFECT)


def _value(name: str, content: dict[str, Any], default: Any) -> Any:
    """Return the value of a field of config.json, or its default.

    Null is the default, or says that there is none (`NULL_IS_NONE`), or raises: where the default
    is true, or a number that other libraries do not fill in. A whole float is an int where an int
    is needed, because JSON has one kind of numbers.

    Raises:
        ValueError: The value is of another kind.
    """
    plain = default[0] if isinstance(default, tuple) else default
    x = content.get(name, plain)
    if x is None and name in NULL_IS_NONE:
        return None
    if x is None and (plain is None or plain is False or type(plain) in (int, str)):
        return plain
    if isinstance(default, tuple):
        return x
    if name in CONTAINERS:
        fits, wanted = isinstance(x, CONTAINERS[name]), f"{CONTAINERS[name].__name__} or null"
    elif isinstance(default, bool):
        fits, wanted = isinstance(x, bool), "bool"
    elif name in NUMBERS:
        fits, wanted = is_number(x), "a number"
        # `Rope` checks its own.
        if is_number(x) and not name.startswith("rope"):
            fits, wanted = x > 0 or (x == 0 and "eps" in name), "a number above 0"
    else:
        x = int(x) if type(x) is float and x.is_integer() else x
        fits, wanted = type(x) is int, "int or null"
        # The window is checked where a layer has one.
        if default is NEEDED or (fits and name not in ("max_window_layers", "sliding_window")):
            fits, wanted = type(x) is int and x > 0, "an int of at least 1"
    if not fits:
        raise ValueError(f"`{name}` must be {wanted}; got {x!r}.")
    return x


def _fields_of(json: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` that stand in the fields of a file."""
    named = {GPT2_NAMES.get(name, name): x for name, x in json.items() if x is not None}
    get = named.get
    features, heads, layers = (
        named[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    if layers > 1000:
        raise ValueError(f"`config.json` must have at most 1000 layers; got {layers}.")
    if get("head_dim") is None and features % heads:
        raise ValueError(
            "`config.json` without `head_dim` must have a hidden size that is a multiple of the "
            f"number of heads; got {features} and {heads}."
        )
    sliding, full = _ropes(get)
    bias = get("attention_bias", False)
    fields = {
        "vocab_size": get("vocab_size"),
        "features": features,
        "hidden": get("intermediate_size", 4 * features),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": get("num_key_value_heads", heads),
        "head_dim": get("head_dim", features // heads),
        "context": get("max_position_embeddings"),
        "norm_epsilon": get("rms_norm_eps"),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": get("mlp_bias", False),
        "rope": full,
        "sliding_rope": None if sliding == full else sliding,
        "turned": (turned := _turned(get, layers)),
        "sliding": _sliding(get, layers, turned),
        "window": get("sliding_window"),
        "attention_soft_cap": get("attn_logit_softcapping"),
        "final_soft_cap": get("final_logit_softcapping"),
        "tied": get("tie_word_embeddings"),
    }
    if scalar := get("query_pre_attn_scalar"):
        fields["attention_scale"] = scalar**-0.5
    return fields


def _ropes(get) -> tuple[Rope | None, Rope | None]:
    """Return the rotary positions of layers with a window, and of the others."""
    if get("rope_theta") is None:
        return None, None
    nested, context = get("rope_parameters", {}), get("max_position_embeddings")
    full = {"rope_theta": get("rope_theta"), **get("rope_scaling", {})}
    local = get("rope_local_base_freq")
    sliding = full if local is None else {"rope_theta": local}
    parts = {name: nested.get(name) or {} for name in LAYER_TYPES}
    if not all(isinstance(x, dict) for x in parts.values()):
        raise ValueError(
            f"`rope_parameters` must have an object for each type of layer; got {nested}."
        )
    if any(parts.values()):
        full = {"rope_theta": get("rope_theta"), **parts["full_attention"]}
        sliding = sliding | parts["sliding_attention"]
    elif nested:
        full = sliding = {"rope_theta": get("rope_theta"), **nested}
    share, original = get("partial_rotary_factor"), get("original_max_position_embeddings")
    for fields in (full, sliding):
        if share is not None:
            fields.setdefault("partial_rotary_factor", share)
        elif fields.get("partial_rotary_factor") not in (None, 1):
            raise ValueError(
                "`partial_rotary_factor` must be 1, because this family turns all of a head; got "
                f"{fields['partial_rotary_factor']}."
            )
    return Rope.from_json(sliding, context, original), Rope.from_json(full, context, original)


def _turned(get, layers: int) -> tuple[bool, ...]:
    """Return whether each layer has rotary positions; nothing if all have."""
    if (every := get("no_rope_layer_interval")) is None:
        return ()
    # Whatever its name says, the list has 1 for a layer with rotary positions.
    marks = get("no_rope_layers", [int((layer + 1) % every > 0) for layer in range(layers)])
    if len(marks) < layers or any(x not in (0, 1) for x in marks):
        raise ValueError(
            f"`no_rope_layers` must have 0 or 1 for each of {layers} layers; got {marks!r:.60}."
        )
    return () if all(marks[:layers]) else tuple(x == 1 for x in marks[:layers])


def _sliding(get, layers: int, turned: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return whether each layer has a window."""
    window = get("sliding_window") if get("use_sliding_window", True) else None
    kinds = get("layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise ValueError(
                f"`layer_types` must have {layers} entries, one for each layer; got {len(kinds)}."
            )
        wrong = [repr(x) for x in kinds if x not in LAYER_TYPES[: 1 if window is None else 2]]
        if wrong:
            raise ValueError(
                "`layer_types` must be 'full_attention', or 'sliding_attention' with a "
                f"`sliding_window`; got {wrong[0]}."
            )
        return tuple(kind == "sliding_attention" for kind in kinds)
    if window is None:
        return ()
    if get("no_rope_layer_interval") is not None:
        return tuple(not x for x in turned)
    if get("max_window_layers") is not None:
        return tuple(layer >= get("max_window_layers") for layer in range(layers))
    # Every layer (Mistral), or all but each second (Gemma 2) or sixth (Gemma 3).
    every = get("_sliding_window_pattern") or get("sliding_window_pattern")
    return tuple(not every or (layer + 1) % every > 0 for layer in range(layers))


LAYER_TYPES = ("full_attention", "sliding_attention")
# A field of config.json that has no default, and one that its family does not read.
NEEDED, UNREAD = object(), object()
# The text part of a model with images, and the fields of its config.json that are not of texts.
TEXT_PARTS = {"gemma3": "gemma3_text"}
IMAGES = ("vision_config", "mm_tokens_per_image")
IMAGES += ("boi_token_index", "eoi_token_index", "image_token_index")
GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
}
# The fields of each family with their defaults, which a file may leave out. A tuple has the values
# that `Decoder` computes, the first of them the default.
_LLAMA = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), NEEDED
    ),
    "num_attention_heads": NEEDED,
    "max_position_embeddings": 2048,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": ("silu",),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "layer_types": None,
}
_QWEN2 = _LLAMA | {
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA1 = _LLAMA | {
    "max_position_embeddings": 8192,
    "head_dim": 256,
    # The exact function is a mistake of the first files, which other libraries correct.
    "hidden_act": ("gelu_pytorch_tanh", "gelu"),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": False,
    "tie_word_embeddings": True,
}
_GEMMA2 = _GEMMA1 | {
    "query_pre_attn_scalar": 256.0,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "_sliding_window_pattern": 2,
}
# Text parts of models with images leave out what has these values.
_GEMMA3 = {name: x for name, x in _GEMMA2.items() if name != "attn_logit_softcapping"} | {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "final_logit_softcapping": None,
    "sliding_window_pattern": 6,
    "_sliding_window_pattern": None,
}
_GPT2 = {
    **dict.fromkeys(("vocab_size", "n_embd", "n_layer", "n_head"), NEEDED),
    "n_positions": 1024,
    "n_inner": None,
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}
_GEMMA = {"norm": "rms1", "activation": "gelu", "scale_embedding": True}
_POST_NORMS = _GEMMA | {"post_norms": True}
# The fields of a file with their defaults, and the fields of `DecoderConfig` that all models share.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (
        _GPT2,
        {
            **{"norm": "layer", "activation": "gelu", "gated": False},
            **{"qkv_bias": True, "out_bias": True, "mlp_bias": True},
        },
    ),
    "llama": (_LLAMA | {"attention_bias": False, "mlp_bias": False}, {}),
    "mistral": (
        # Other libraries give each layer the window, whatever the types say.
        _LLAMA
        | {"max_position_embeddings": 131_072, "sliding_window": 4096, "layer_types": (None,)},
        {},
    ),
    "qwen2": (_QWEN2, {"qkv_bias": True, "out_bias": False}),
    "qwen3": (_QWEN2 | {"attention_bias": False, "head_dim": 128}, {"normalize_qk": True}),
    "smollm3": (
        _LLAMA
        | {
            **{"max_position_embeddings": 32_768, "rope_theta": 2_000_000.0},
            **{"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
            **{"use_sliding_window": False, "sliding_window": None, "max_window_layers": UNREAD},
            **{"no_rope_layers": None, "no_rope_layer_interval": 4},
        },
        {},
    ),
    "olmo2": (
        _LLAMA | {"rms_norm_eps": 1e-5, "attention_bias": False, "layer_types": (None,)},
        {"pre_norms": False, "post_norms": True, "normalize_qk": True, "joint_qk_norm": True},
    ),
    # Phi-3 and Phi-4; Phi-4-mini turns a part of each head.
    "phi3": (
        _LLAMA
        | {
            **{"rms_norm_eps": 1e-5, "layer_types": (None,), "sliding_window": None},
            **{"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
            **{"partial_rotary_factor": 1.0, "lm_head_bias": (False,)},
            **{"full_attn_mod": (1,), "interpolate_factor": (1,)},
        },
        {},
    ),
    "gemma": (_GEMMA1, _GEMMA),
    "gemma2": (_GEMMA2, _POST_NORMS),
    "gemma3_text": (_GEMMA3, _POST_NORMS | {"normalize_qk": True}),
}
# Kinds of fields: these, bool by the default, and int.
CONTAINERS: dict[str, type] = {
    **dict.fromkeys(("rope_scaling", "rope_parameters"), dict),
    **dict.fromkeys(("layer_types", "no_rope_layers"), list),
}
NUMBERS = {
    "partial_rotary_factor",
    *("rms_norm_eps", "layer_norm_epsilon", "rope_theta", "rope_local_base_freq"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
}
# Null says that there is no window and no soft cap.
NULL_IS_NONE = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
# Fields that a file of any family may have with these values.
COMPUTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("rope_interleaved", "rope_traditional", "use_mrope"), (False,)),
    **dict.fromkeys(("use_bidirectional_attention", "add_cross_attention"), (False,)),
    "is_encoder_decoder": (False,),
    **dict.fromkeys(("num_experts", "num_local_experts"), (0,)),
    "partial_rotary_factor": (1,),
    "pruned_heads": ({},),
}
# Fields without effect on logits, as patterns of names.
NO_EFFECT = (
    # Attributes that libraries keep for themselves, and notes of where a file comes from.
    *("_*", "unsloth_*", "architectures", "auto_map", "transformers_version", "is_llama_config"),
    *(
        "transformers.js_config",
        "finetuning_task",
        "task_specific_params",
        "output_past",
        "name_or_path",
    ),
    # Tokens, texts and drawing.
    *("*_token_id", "*_token_ids", "tokenizer_*", "prefix", "model_max_length", "vocab_file"),
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "temperature"),
    *("top_k", "top_p", "min_p", "typical_p", "num_beams", "num_beam_groups", "early_stopping"),
    *("repetition_penalty", "length_penalty", "diversity_penalty", "*no_repeat_ngram_size"),
    *("bad_words_ids", "num_return_sequences", "return_dict*", "*suppress_tokens", "penalty_alpha"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "max_seq*_length"),
    # Heads for other tasks.
    *("id2label", "label2id", "num_labels", "problem_type", "summary_*", "is_decoder", "n_special"),
    *("predict_special_tokens", "tie_encoder_decoder", "cross_attention_hidden_size"),
    # Training; `Decoder` has no dropout.
    *("*dropout*", "*_pdrop", "initializer_range", "gradient_checkpointing", "pretraining_tp"),
    # How other libraries store or compute the same.
    *("torch_dtype", "dtype", "use_bfloat16", "use_cache", "cache_implementation", "torchscript"),
    *("attn_implementation", "use_flash_attn", "chunk_size_feed_forward", "output_*", "n_ctx"),
    *("tf_legacy_loss", "reorder_and_upcast_attn", "xla_device"),
)
