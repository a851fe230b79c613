"""The configuration of `Decoder`, and how a config.json of the families below becomes one.

A family is the `model_type` of the file, a key of `FAMILIES`. A field of the file
    is read, if its family has it in `FAMILIES`,
    must have a value that `Decoder` computes, if it stands in `COMPUTED`,
    is left out, if its name matches one of `NO_EFFECT`,
    and raises otherwise.
"""

import dataclasses
import fnmatch
import json
import math
from typing import Any

import numpy as np


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


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: pair i of H/2 turns by `position * frequencies(H)[i]`.

    Attributes:
        theta: Base of the frequencies.
        kind: Rule that scales them for longer texts: default (none), linear, llama3 or yarn.
        factor: Ratio of the longer to the original context.
        original: Original context, in tokens; for llama3 and yarn.
        low: llama3 scales frequencies with fewer turns in the original context fully.
        high: llama3 keeps frequencies with more turns as they are.
        slow: yarn scales frequencies with fewer turns fully.
        fast: yarn keeps frequencies with more turns as they are.
        truncate: Whether yarn rounds the numbers of the two pairs between which it interpolates.
        amplitude: Multiplies queries and keys.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    slow: float = 1.0
    fast: float = 32.0
    truncate: bool = True
    amplitude: float = 1.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Return the angle of each of the head_dim / 2 pairs for one position, in float32."""
        half = head_dim // 2
        f = self.theta ** (-np.arange(half) / half)
        if self.kind == "linear":
            f = f / self.factor
        elif self.kind == "llama3":
            turns = self.original * f / (2 * math.pi)
            kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
            f = kept * f + (1 - kept) * f / self.factor
        elif self.kind == "yarn":
            # https://arxiv.org/abs/2309.00071, section 3.2
            first, last = (self._pair_with(turns, half) for turns in (self.fast, self.slow))
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            kept = 1 - np.clip((np.arange(half) - first) / max(last - first, 0.001), 0, 1)
            f = kept * f + (1 - kept) * f / self.factor
        return f.astype(np.float32)

    def _pair_with(self, turns: float, half: int) -> float:
        """Return the number of the pair that makes `turns` turns in the original context."""
        return half * math.log(self.original / (2 * math.pi * turns)) / math.log(self.theta)

    @classmethod
    def from_json(cls, fields: dict[str, Any], context: int) -> "Rope":
        """Return the rotary positions of `rope_theta` and the fields of `rope_scaling`.

        Raises:
            ValueError: The rule is unknown, has an unknown field or number, or lacks a field.
        """
        left = {name: x for name, x in fields.items() if x is not None}
        kind = left.pop("rope_type", left.pop("type", "default"))
        left.pop("type", None)
        if not isinstance(kind, str) or kind not in ROPE_FIELDS:
            raise ValueError(
                f"`rope_scaling` must have one of the types {', '.join(ROPE_FIELDS)}; got {kind!r}."
            )
        for name in ROPE_NO_EFFECT.get(kind, ()):
            left.pop(name, None)
        for name, x in left.items():
            wanted = "a bool" if name == "truncate" else "a number"
            if not (isinstance(x, bool) if name == "truncate" else _is_number(x)):
                raise ValueError(f"`{name}` of rotary positions must be {wanted}; got {x!r}.")
            # The interpolation of yarn divides by the logarithm of its base.
            least = 1 if (kind, name) == ("yarn", "rope_theta") else 0
            if name not in ("truncate", "mscale", "mscale_all_dim") and x <= least:
                raise ValueError(f"`{name}` of rotary positions must be above {least}; got {x}.")
        if left.pop("partial_rotary_factor", 1) != 1:
            raise ValueError(
                "`partial_rotary_factor` must be 1, because `Decoder` turns all of a head; got "
                f"{fields['partial_rotary_factor']}."
            )
        names = {"rope_theta": "theta"} | ROPE_FIELDS[kind]
        values = {ours: left.pop(name) for name, ours in names.items() if name in left}
        needed = {"linear": {"factor"}, "yarn": {"factor"}, "llama3": set(names.values())}
        if missing := sorted(needed.get(kind, set()) - values.keys()):
            raise ValueError(
                f"`rope_scaling` of type {kind} must give {', '.join(missing)}; got {fields}."
            )
        if kind == "llama3" and values["low"] >= values["high"]:
            raise ValueError(
                "`low_freq_factor` of rotary positions must be below `high_freq_factor`; got "
                f"{values['low']} and {values['high']}."
            )
        if kind == "yarn":
            values["amplitude"] = _yarn_amplitude(values["factor"], left, values)
            values.setdefault("original", context)
        if left:
            raise ValueError(
                f"`rope_scaling` of type {kind} must have the fields {', '.join(names)} alone; got "
                f"{', '.join(map(repr, left))}."
            )
        return cls(kind=kind, **values)


# Fields of the rules that other libraries write and do not read.
ROPE_NO_EFFECT = {"linear": ["original_max_position_embeddings"], "yarn": ["finetuned"]}
ROPE_FIELDS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original",
        "beta_slow": "slow",
        "beta_fast": "fast",
        "truncate": "truncate",
        "attention_factor": "amplitude",
    },
}


def _yarn_amplitude(factor: float, left: dict[str, Any], values: dict[str, Any]) -> float:
    """Return the amplitude that yarn's fields give or that its paper recommends."""

    def recommended(scale):
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    scales = [left.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    if "amplitude" in values:
        return values["amplitude"]
    if all(scales):
        return recommended(scales[0]) / recommended(scales[1])
    return recommended(1)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder, and the dtypes of its computation.

    Attributes:
        vocab_size: Number of tokens.
        features: Size of the residual stream.
        hidden: Size between the matrices of the MLP.
        num_layers: Number of layers, each of attention and an MLP.
        num_heads: Number of query heads.
        num_kv_heads: Number of key/value heads, a divisor of num_heads.
        head_dim: Size of a head.
        context: Longest text of training; with learned positions the longest input.
        norm: "rms" (x / rms(x) * weight), "rms1" (with 1 + weight, Gemma) or "layer" (LayerNorm).
        norm_epsilon: Added to the mean square or the variance.
        post_norms: Whether the outputs of attention and of the MLP are normalised, too (Gemma).
        activation: "silu" or "gelu" (with tanh).
        gated: Whether the MLP multiplies `activation(gate(x))` and `up(x)`; else it has no gate.
        qkv_bias: Whether the maps to queries, keys and values add a bias.
        out_bias: Whether attention's output map does.
        mlp_bias: Whether the maps of the MLP do.
        rope: Rotary positions; None for learned ones.
        sliding_rope: Rotary positions of the layers with a window; None for `rope`.
        sliding: For each layer, whether it has a window.
        window: Number of tokens that a token sees in such a layer, itself among them.
        normalize_qk: Whether each query and key head is normalised before rotary positions.
        attention_scale: Multiplies scores; None is 1 / sqrt(head_dim).
        attention_soft_cap: Scores s become cap * tanh(s / cap); None is no cap.
        final_soft_cap: The same for logits.
        use_sinks: Whether each head has a sink: a logit without a value (gpt-oss).
        scale_embedding: Whether embeddings are multiplied by sqrt(features) (Gemma).
        tied: Whether one matrix reads tokens and predicts them.
        dtype: Type of the activations; None is param_dtype.
        param_dtype: Type of the parameters that `Decoder` makes.
        implementation: As in `pallas_flash.attention`; None for auto-selection.
        remat: Whether the backward computes a layer's activations again, to save memory. The
            residuals of attention are kept.
        source: Text of the config.json that this comes from; None where it comes from no file.
    """

    vocab_size: int
    features: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    norm: str = "rms"
    norm_epsilon: float = 1e-6
    post_norms: bool = False
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope: Rope | None = None
    sliding_rope: Rope | None = None
    sliding: tuple[bool, ...] = ()
    window: int | None = None
    normalize_qk: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    use_sinks: bool = False
    scale_embedding: bool = False
    tied: bool = False
    dtype: str | None = None
    param_dtype: str = "float32"
    implementation: str | None = None
    remat: bool = False
    source: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        sizes = ("vocab_size", "features", "hidden", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value < 2**31:
                least = "below 2**31" if isinstance(value, int) and value > 1 else "of at least 1"
                raise ValueError(f"`{name}` must be an int {least}; got {value!r}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "`num_heads` must be a multiple of `num_kv_heads`; got "
                f"{self.num_heads} and {self.num_kv_heads}."
            )
        if self.rope is not None and self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even for rotary positions; got {self.head_dim}.")
        if len(self.sliding) not in (0, self.num_layers):
            raise ValueError(
                f"`sliding` must have {self.num_layers} entries, one for each layer; got "
                f"{len(self.sliding)}."
            )
        if any(self.sliding) and (self.window is None or self.window < 1):
            raise ValueError(
                f"`window` must be at least 1 where a layer has a window; got {self.window}."
            )

    @property
    def compute_dtype(self) -> str:
        """Type of the activations, the default filled in."""
        return self.dtype or self.param_dtype

    def has_window(self, layer: int) -> bool:
        """Whether a layer has a window."""
        return bool(self.sliding) and self.sliding[layer]

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotary positions of a layer."""
        return (self.sliding_rope if self.has_window(layer) else None) or self.rope

    @classmethod
    def from_json(cls, text: str) -> "DecoderConfig":
        """Return the configuration that the text of a config.json describes.

        Raises:
            ValueError: The text is no JSON object, the family is unknown, a field is missing or
                unknown, or a value is one that `Decoder` does not compute.
        """
        content = json_object("`config.json`", text)
        kind = content.pop("model_type", None)
        if content.get("num_local_experts") or content.get("num_experts"):
            raise ValueError(
                f"`config.json` must describe dense MLPs; got {kind!r} with experts, which "
                "`Decoder` does not compute: it has the attention of gpt-oss (sinks, windows, "
                "yarn), but no mixture of experts."
            )
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise ValueError(
                f"`model_type` must be one of {', '.join(FAMILIES)}; got {kind!r}"
                f"{': of a model with images, save its text part' if kind == 'gemma3' else ''}."
            )
        known, fixed = FAMILIES[kind]
        others = {name: x for name, x in content.items() if name not in known and x is not None}
        unknown = sorted(name for name in others if not _is_harmless(name))
        if unknown:
            raise ValueError(
                f"`config.json` of {kind} must have fields that `Decoder` computes; got "
                f"{', '.join(repr(name)[1:-1] for name in unknown)}. Delete those that change no "
                "logits; weights must not be quantised."
            )
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
        return cls(**{**_fields_of(values), **fixed, "source": text})


def _is_harmless(name: str) -> bool:
    """Whether a field of no family has no effect on logits, or one that is checked."""
    return name in COMPUTED or any(fnmatch.fnmatchcase(name, x) for x in NO_EFFECT)


def _is_number(x: Any) -> bool:
    """Whether a value of a file is a number that a float has."""
    return type(x) in (int, float) and abs(x) < 1e300


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
        fits, wanted = _is_number(x), "a number"
        # `Rope` checks its own.
        if fits and not name.startswith("rope"):
            fits, wanted = x > 0 or (x == 0 and "eps" in name), "a number above 0"
    else:
        x = int(x) if type(x) is float and x.is_integer() else x
        fits, wanted = type(x) is int, "int or null"
        # The window is checked where a layer has one.
        if default is NEEDED or (fits and name not in ("max_window_layers", "sliding_window")):
            fits, wanted = fits and x > 0, "an int of at least 1"
    if not fits:
        raise ValueError(f"`{name}` must be {wanted}; got {x!r}.")
    return x


def _fields_of(json: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` that stand in the fields of a file."""
    named = {GPT2_NAMES.get(name, name): x for name, x in json.items() if x is not None}
    get = named.get
    features, heads, layers = (
        get(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
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
        "sliding": _sliding(get, layers),
        "window": get("sliding_window"),
        "attention_soft_cap": get("attn_logit_softcapping"),
        "final_soft_cap": get("final_logit_softcapping"),
        "tied": get("tie_word_embeddings"),
    }
    if get("query_pre_attn_scalar"):
        fields["attention_scale"] = get("query_pre_attn_scalar") ** -0.5
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
    return Rope.from_json(sliding, context), Rope.from_json(full, context)


def _sliding(get, layers: int) -> tuple[bool, ...]:
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
    if get("max_window_layers") is not None:
        return tuple(layer >= get("max_window_layers") for layer in range(layers))
    # Every layer (Mistral), or all but each second (Gemma 2) or sixth (Gemma 3).
    every = get("_sliding_window_pattern") or get("sliding_window_pattern")
    return tuple(not every or (layer + 1) % every > 0 for layer in range(layers))


LAYER_TYPES = ("full_attention", "sliding_attention")
# A field of config.json that has no default.
NEEDED = object()
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
_GEMMA3 = {name: x for name, x in _GEMMA2.items() if name != "attn_logit_softcapping"} | {
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
    "gemma": (_GEMMA1, _GEMMA),
    "gemma2": (_GEMMA2, _POST_NORMS),
    "gemma3_text": (_GEMMA3, _POST_NORMS | {"normalize_qk": True}),
}
# Kinds of fields: these, bool by the default, and int.
CONTAINERS = {"rope_scaling": dict, "rope_parameters": dict, "layer_types": list}
NUMBERS = {
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
