"""Small models of each family, as config.json has them, with random weights."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import Decoder
from models.config import DecoderConfig

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "torch_dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
GEMMA = {"head_dim": 6, "query_pre_attn_scalar": 9, "sliding_window": 3}
GPT2 = {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [3.0]}
FILES = {
    "gpt2": GPT2 | {"torch_dtype": "float32"},
    "llama": SIZES | {"rope_scaling": LLAMA3},
    "mistral": SIZES | {"sliding_window": 3},
    "qwen2": SIZES | WINDOW | {"tie_word_embeddings": True},
    "qwen3": SIZES | {"head_dim": 6},
    "gemma": SIZES | {"head_dim": 6, "hidden_act": "gelu"},
    "gemma2": SIZES | GEMMA,
    "gemma3_text": SIZES | GEMMA | {"layer_types": ["full_attention", "sliding_attention"]},
    # Its text part leaves out what transformers has by default, as published files do.
    "gemma3": {
        "text_config": {
            **{"model_type": "gemma3_text", "vocab_size": 31, "hidden_size": 16, "head_dim": 6},
            **{"intermediate_size": 24, "num_hidden_layers": 2, "sliding_window": 3},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        **{"vision_config": {"hidden_size": 8}, "mm_tokens_per_image": 4},
        **{"boi_token_index": 28, "eos_token_id": [1, 2], "torch_dtype": "float32"},
    },
    "olmo2": SIZES,
    "phi3": SIZES
    | {"original_max_position_embeddings": 8, "partial_rotary_factor": 0.5}
    | {"rope_scaling": LONGROPE},
    "smollm3": SIZES | {"no_rope_layer_interval": 2, "max_window_layers": 28},
}


def text_of(family, **changes):
    """The text of a config.json."""
    return json.dumps({"model_type": family} | FILES[family] | changes)


def make(family, dtype="float32", implementation="reference", seed=0, **changes):
    """A model whose parameters are all random."""
    config = DecoderConfig.from_json(text_of(family, **changes))
    config = dataclasses.replace(config, implementation=implementation, param_dtype=dtype)
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)
    state = jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape, np.float32), x.dtype), shapes
    )
    return nnx.merge(graphdef, state)


def tokenizer_of_bytes(special, merges=()):
    """A tokenizer of the 256 bytes, of pairs of letters, and of special tokens."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer
