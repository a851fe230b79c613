"""The configuration of `Decoder`."""

import dataclasses
import json
import math
from typing import Literal

from models.families import fields_from_json
from models.rope import Rope

# As in `pallas_flash.attention`.
Implementation = Literal["mosaic", "triton", "interpret", "xla", "reference"]


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
        pre_norms: Whether the inputs of attention and of the MLP are normalised (not in OLMo 2).
        post_norms: Whether their outputs are (Gemma, OLMo 2).
        activation: "silu" or "gelu" (with tanh).
        gated: Whether the MLP multiplies `activation(gate(x))` and `up(x)`; else it has no gate.
        qkv_bias: Whether the maps to queries, keys and values add a bias.
        out_bias: Whether attention's output map does.
        mlp_bias: Whether the maps of the MLP do.
        rope: Rotary positions; None for learned ones.
        sliding_rope: Rotary positions of the layers with a window; None for `rope`.
        turned: For each layer, whether it has rotary positions; empty where all have (SmolLM3).
        sliding: For each layer, whether it has a window.
        window: Number of tokens that a token sees in such a layer, itself among them.
        normalize_qk: Whether each query and key head is normalised before rotary positions.
        joint_qk_norm: Whether that norm is one of all heads of a token together (OLMo 2).
        attention_scale: Multiplies scores; None is 1 / sqrt(head_dim).
        attention_soft_cap: Scores s become cap * tanh(s / cap); None is no cap.
        final_soft_cap: The same for logits.
        use_sinks: Whether each head has a sink: a logit without a value (gpt-oss).
        scale_embedding: Whether embeddings are multiplied by sqrt(features) (Gemma).
        tied: Whether one matrix reads tokens and predicts them.
        dtype: Type of the activations; None is param_dtype.
        param_dtype: Type of the parameters that `Decoder` makes.
        implementation: As in `pallas_flash.attention`; None for auto-selection.
        batch_invariant: As in `pallas_flash.attention`, for all layers.
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
    pre_norms: bool = True
    post_norms: bool = False
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope: Rope | None = None
    sliding_rope: Rope | None = None
    turned: tuple[bool, ...] = ()
    sliding: tuple[bool, ...] = ()
    window: int | None = None
    normalize_qk: bool = False
    joint_qk_norm: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    use_sinks: bool = False
    scale_embedding: bool = False
    tied: bool = False
    dtype: str | None = None
    param_dtype: str = "float32"
    implementation: Implementation | None = None
    batch_invariant: bool = False
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
        for rope in filter(None, (self.rope, self.sliding_rope)):
            rope.check(self.head_dim)
        for name in ("sliding", "turned"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise ValueError(
                    f"`{name}` must have {self.num_layers} entries, one for each layer; got "
                    f"{len(getattr(self, name))}."
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

    def local_window_of(self, layer: int) -> tuple[int, int] | None:
        """Return the `local_window_size` of a layer's attention; None without a window."""
        if not self.has_window(layer):
            return None
        assert self.window is not None  # `__post_init__` has refused it
        # A token sees itself and the window - 1 tokens before it.
        return self.window - 1, 0

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotary positions of a layer, which may turn nothing; None for learned ones."""
        rope = (self.sliding_rope if self.has_window(layer) else None) or self.rope
        if rope is None or not self.turned or self.turned[layer]:
            return rope
        return dataclasses.replace(rope, share=0.0)

    @classmethod
    def from_json(cls, text: str) -> "DecoderConfig":
        """Return the configuration that the text of a config.json describes.

        Raises:
            ValueError: The text is no JSON object, the family is unknown, a field is missing or
                unknown, or a value is one that `Decoder` does not compute.
        """
        return cls(**fields_from_json(text))


def gpt(
    *,
    vocab_size: int = 256,
    context: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    features: int = 128,
    **options,
) -> DecoderConfig:
    """Return the configuration of a GPT to train from nothing: a Llama with one embedding matrix.

    Args:
        vocab_size: Number of tokens; 256 for bytes.
        context: Longest text of training.
        num_layers: Number of layers.
        num_heads: Number of query heads, a divisor of `features`.
        num_kv_heads: Number of key/value heads; None is `num_heads`.
        features: Size of the residual stream. The MLP has 8/3 of it, rounded up to a multiple
            of 64: its three matrices then cost as much as two of four times the size.
        **options: Other fields of `DecoderConfig`, such as `dtype` and `remat`.

    Raises:
        ValueError: The sizes do not fit each other.
    """
    if num_heads < 1 or features % num_heads:
        raise ValueError(
            f"`features` must be a multiple of `num_heads`; got {features} and {num_heads}."
        )
    config = DecoderConfig(
        vocab_size=vocab_size,
        features=features,
        hidden=64 * math.ceil(features / 24),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=features // num_heads,
        context=context,
        rope=Rope(10_000.0),
        tied=True,
        **options,
    )
    source = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": features,
        "intermediate_size": config.hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
    }
    return dataclasses.replace(config, source=json.dumps(source))
