"""`Decoder`: what its configurations say, packed sequences, and the cache."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import cases, jaxprs
from support.decoder_files import FILES, LLAMA3, LONGROPE, make, text_of
from support.strict import strictly

from models.config import DecoderConfig
from models.decoder import Decoder, Norm
from models.rope import Rope
from pallas_flash.flax import apply_rope

TOKENS = np.random.default_rng(1).integers(0, 31, (2, 11))


@nnx.jit
def logits_of(model, tokens, **where):
    return model(jnp.asarray(tokens), **where)


@nnx.jit
def decoded(model, tokens, lengths=None):
    return model(jnp.asarray(tokens), decode=True, lengths=lengths)


# ----------------------------------------------------------------------------------- configurations

LONG = {"short": (1.0,), "long": (3.0,)}
FIELDS = {
    "gpt2": {"norm": "layer", "gated": False, "mlp_bias": True, "rope": None, "hidden": 64}
    | {"tied": True, "norm_epsilon": 1e-5, "num_kv_heads": 4},
    "llama": {"rope": Rope(10_000.0, "llama3", 4.0, 16), "sliding": (), "qkv_bias": False},
    "mistral": {"window": 3, "sliding": (True, True), "tied": False},
    "qwen2": {"sliding": (False, True), "qkv_bias": True, "out_bias": False, "tied": True},
    "qwen3": {"normalize_qk": True, "head_dim": 6, "sliding": (), "qkv_bias": False},
    "gemma": {"norm": "rms1", "post_norms": False, "activation": "gelu", "tied": True},
    "gemma2": {"norm": "rms1", "post_norms": True, "attention_scale": 1 / 3}
    | {"attention_soft_cap": 50.0, "final_soft_cap": 30.0, "sliding": (True, False)},
    "gemma3_text": {"sliding": (False, True), "sliding_rope": Rope(10_000.0), "tied": True}
    | {"rope": Rope(1_000_000.0), "attention_soft_cap": None, "scale_embedding": True},
    "gemma3": {"vocab_size": 31, "rope": Rope(1_000_000.0, "linear", 8.0), "num_kv_heads": 4},
    "olmo2": {"pre_norms": False, "post_norms": True, "joint_qk_norm": True, "tied": False},
    "phi3": {"tied": False, "context": 32}
    | {"rope": Rope(1e4, "longrope", 4.0, 8, amplitude=(5 / 3) ** 0.5, share=0.5, **LONG)},
    "smollm3": {"turned": (True, False), "tied": True, "rope": Rope(2e6), "sliding": ()},
}


@pytest.mark.parametrize("family", FILES)
def test_config_has_the_fields_of_the_file(family):
    config = DecoderConfig.from_json(text_of(family))
    assert {name: getattr(config, name) for name in FIELDS[family]} == FIELDS[family]


def test_config_with_nested_rope_parameters():
    nested = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
    }
    config = DecoderConfig.from_json(text_of("gemma3_text", rope_parameters=nested))
    assert config.rope_of(0) == Rope(5e5, "linear", 2.0)
    assert config.rope_of(1) == Rope(7.0)
    flat = {"rope_theta": 9.0, **LLAMA3}
    config = DecoderConfig.from_json(text_of("llama", rope_scaling=None, rope_parameters=flat))
    assert config.rope == Rope(9.0, "llama3", 4.0, 16)


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# Family, and fields of published files that leave the configuration as it is.
HARMLESS = {
    "SmolLM2": (
        "llama",
        {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 2}
        | {"transformers.js_config": {"dtype": "q4f16"}, "architectures": ["LlamaForCausalLM"]},
    ),
    "from GGUF": ("llama", {"_model_name_or_path": "x", "unk_token_id": 0, "pad_token_id": -1}),
    "Unsloth": ("qwen2", {"unsloth_version": "2026.4.7", "unsloth_fixed": True}),
    "first LLaMA": ("llama", {"max_sequence_length": 2048, "auto_map": {}, "bos_token_id": 0}),
    "distilgpt2": (
        "gpt2",
        {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "n_ctx": 32}
        | {"summary_type": "cls_index", "summary_proj_to_labels": True, "embd_pdrop": 0.1},
    ),
    "gpt2-medium": (
        "gpt2",
        {"n_special": 0, "predict_special_tokens": True, "task_specific_params": {"a": {}}},
    ),
    "transformers": (
        "gpt2",
        {"tokenizer_class": "X", "is_decoder": True, "torchscript": False, "output_past": True}
        | {"finetuning_task": "x", "prefix": "x", "pruned_heads": {}, "tie_encoder_decoder": False}
        | {"is_encoder_decoder": False, "add_cross_attention": False, "use_bfloat16": False}
        | {"gradient_checkpointing": False, "sep_token_id": 1, "decoder_start_token_id": 1}
        | {"problem_type": "regression", "num_labels": 2, "chunk_size_feed_forward": 0}
        | {"return_dict": True, "output_attentions": False, "_commit_hash": "x", "dtype": "x"},
    ),
    "drawing": (
        "gpt2",
        {"max_length": 20, "top_k": 50, "do_sample": True, "num_beams": 1, "temperature": 0.7}
        | {"no_repeat_ngram_size": 3, "bad_words_ids": [[1]], "return_dict_in_generate": False}
        | {"forced_eos_token_id": 1, "begin_suppress_tokens": [1], "output_scores": False},
    ),
    "dropout": ("qwen3", {"attention_dropout": 0.1, "hidden_dropout_prob": 0.1}),
    "whole floats": ("llama", {"hidden_size": 16.0, "vocab_size": 31.0, "rope_theta": 10_000}),
    "nulls": (
        "llama",
        dict.fromkeys(
            ("head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings", "hidden_act")
        )
        | dict.fromkeys(("rope_parameters", "layer_types", "quantization_config", "colour")),
    ),
    "no experts": ("llama", {"num_experts": 0, "partial_rotary_factor": 1.0}),
    "rope in one object": ("qwen3", {"rope_parameters": DEFAULT_ROPE, "dtype": "bfloat16"}),
    "rope by layer": (
        "gemma2",
        {"rope_parameters": {"full_attention": DEFAULT_ROPE, "sliding_attention": None}},
    ),
    "layer types": ("gemma2", {"layer_types": ["sliding_attention", "full_attention"]}),
    "Gemma": ("gemma", {"hidden_activation": None, "use_bidirectional_attention": False}),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_config_with_fields_of_other_libraries(name):
    family, fields = HARMLESS[name]
    plain, other = (DecoderConfig.from_json(text_of(family, **x)) for x in ({}, fields))
    assert dataclasses.replace(other, source=plain.source) == plain


@pytest.mark.parametrize(
    ("family", "changes", "fields"),
    [
        ("gemma3_text", {"final_logit_softcapping": 30.0}, {"final_soft_cap": 30}),
        ("gemma3_text", {"final_logit_softcapping": 30}, {"final_soft_cap": 30}),
        ("gemma2", {"attn_logit_softcapping": None}, {"attention_soft_cap": None}),
        ("gemma2", {"sliding_window": None}, {"sliding": ()}),
        ("mistral", {"sliding_window": None}, {"sliding": (), "window": None}),
        ("qwen3", {"sliding_window": None, "max_window_layers": 36}, {"sliding": ()}),
        ("llama", {"max_position_embeddings": None}, {"context": 2048}),
        ("llama", {"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ("llama", {"rms_norm_eps": 0}, {"norm_epsilon": 0}),
        (
            "mistral",
            {"rope_scaling": {"type": "yarn", "factor": 2, "finetuned": True}},
            {"rope": Rope(10_000.0, "yarn", 2, 32, amplitude=0.1 * np.log(2) + 1)},
        ),
    ],
)
def test_config_reads_numbers_and_nulls(family, changes, fields):
    config = DecoderConfig.from_json(text_of(family, **changes))
    assert {name: getattr(config, name) for name in fields} == fields


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"model_type": "mamba"}, "`model_type` must be one of gpt2, llama"),
        ("llama", {"model_type": "gemma3"}, "`config.json` of gemma3 must have fields that"),
        ("llama", {"model_type": "gpt_oss", "num_local_experts": 4}, "no mixture of experts"),
        ("llama", {"quantization_config": {}, "colour": 1}, "got colour, quantization_config"),
        ("llama", {"hidden_act": "relu"}, "`hidden_act` of llama must be 'silu'; got 'relu'"),
        ("gpt2", {"scale_attn_weights": False}, "`scale_attn_weights` of gpt2 must be True"),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "got attn_logit_softcapping"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "`use_bidirectional_attention`"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "got 'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "must give factor"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "x": 1}}, "alone; got 'x'"),
        ("llama", {"rope_scaling": LLAMA3 | {"factor": None}}, "must give factor"),
        ("llama", {"rope_scaling": LLAMA3 | {"factor": 0}}, "`factor` of rotary positions must be"),
        ("llama", {"rope_theta": -1.0}, "`rope_theta` of rotary positions must be above 0; got -1"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "got 'chunked_attention'"),
        ("qwen2", {"layer_types": ["full_attention"]}, "`layer_types` must have 2 entries"),
        ("llama", {"num_key_value_heads": 3}, "`num_heads` must be a multiple"),
        ("llama", {"head_dim": 5}, "even for rotary positions; got 5"),
        ("llama", {"head_dim": "x"}, "`head_dim` must be int or null; got 'x'"),
        ("llama", {"head_dim": -2}, "`head_dim` must be an int of at least 1; got -2"),
        ("llama", {"rope_theta": None}, "`rope_theta` must be a number; got None"),
        ("llama", {"rope_scaling": "x"}, "`rope_scaling` must be dict or null; got 'x'"),
        ("llama", {"rope_scaling": LLAMA3 | {"factor": "x"}}, "must be a number; got 'x'"),
        ("llama", {"hidden_size": "16"}, "`hidden_size` must be an int of at least 1; got '16'"),
        ("llama", {"num_attention_heads": 0}, "`num_attention_heads` must be an int of at least 1"),
        ("llama", {"rms_norm_eps": "x"}, "`rms_norm_eps` must be a number; got 'x'"),
        ("llama", {"attention_bias": 1}, "`attention_bias` must be bool; got 1"),
        ("qwen2", {"use_mrope": True}, "`use_mrope` of qwen2 must be False"),
        ("mistral", {"sliding_window": -1}, "`window` must be at least 1"),
        (
            "llama",
            {"colour": 1, "a\nb": 2},
            r"got a\nb, colour. Delete those that change no logits",
        ),
        ("llama", {"model_type": ["llama"]}, "`model_type` must be one of gpt2"),
        (
            "llama",
            {"rope_interleaved": True},
            "`rope_interleaved` of llama must be False; got True",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` of llama must be 1"),
        ("llama", {"pruned_heads": {"0": [1]}}, "`pruned_heads` of llama must be {}"),
        ("gpt2", {"add_cross_attention": True}, "`add_cross_attention` of gpt2 must be False"),
        ("gpt2", {"scale_attn_weights": None}, "`scale_attn_weights` of gpt2 must be True"),
        ("gpt2", {"n_inner": 0}, "`n_inner` must be an int of at least 1; got 0"),
        ("qwen2", {"attention_bias": True}, "`attention_bias` of qwen2 must be False; got True"),
        ("gemma", {"hidden_activation": "gelu"}, "`hidden_activation` of gemma must be"),
        ("llama", {"hidden_size": 16.5}, "`hidden_size` must be an int of at least 1; got 16.5"),
        ("llama", {"hidden_size": True}, "`hidden_size` must be an int of at least 1; got True"),
        ("llama", {"hidden_size": 2**40}, "must be an int below 2**31"),
        ("llama", {"hidden_size": 18, "head_dim": None}, "a multiple of the number of heads"),
        ("mistral", {"num_hidden_layers": 2**30}, "at most 1000 layers; got 1073741824"),
        ("llama", {"rope_theta": float("nan")}, "`rope_theta` must be a number; got nan"),
        ("llama", {"rms_norm_eps": -1}, "`rms_norm_eps` must be a number above 0; got -1"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "`query_pre_attn_scalar` must be a number above"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "`final_logit_softcapping` must be a number"),
        ("gemma3_text", {"sliding_window_pattern": 0, "layer_types": None}, "an int of at least 1"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "with a `sliding_window`; got 'slid"),
        ("qwen3", {"layer_types": [1, []]}, "`layer_types` must be 'full_attention', or 'sliding"),
        (
            "mistral",
            {"layer_types": ["full_attention"] * 2},
            "`layer_types` of mistral must be Non",
        ),
        ("llama", {"rope_scaling": LONGROPE}, "an `original_max_position_embeddings` above 1 bes"),
        ("llama", {"rope_scaling": {"type": ["yarn"]}}, "must have one of the types default"),
        (
            "llama",
            {"rope_scaling": YARN | {"factor": True}},
            "`factor` of rotary positions must be",
        ),
        (
            "llama",
            {"rope_scaling": YARN | {"truncate": 1}},
            "`truncate` of rotary positions must be",
        ),
        ("llama", {"rope_scaling": YARN | {"beta_fast": -1}}, "must be above 0; got -1"),
        ("llama", {"rope_scaling": YARN, "rope_theta": 1}, "positions must be above 1; got 1"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "must be below `high_freq_f"),
        ("llama", {"rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.5}}, "must be 1,"),
        ("gemma2", {"rope_parameters": {"full_attention": [1]}}, "an object for each type of lay"),
        ("gemma3", {"text_config": {"model_type": "llama"}}, "an object of gemma3_text; got {'mo"),
        ("gemma3", {"text_config": []}, "`text_config` of gemma3 must be an object"),
        ("gemma3", {"quantization_config": {}}, "that `Decoder` computes; got quantization_config"),
        ("phi3", {"rope_scaling": LONGROPE | {"short_mscale": 1.1}}, "alone; got 'short_mscale'"),
        ("phi3", {"rope_scaling": LONGROPE | {"long_factor": None}}, "must give long_factor; got"),
        (
            "phi3",
            {"rope_scaling": LONGROPE | {"long_factor": [1, 2]}},
            "`long_factor` of rotary posi",
        ),
        ("phi3", {"rope_scaling": LONGROPE | {"long_factor": ["x"]}}, "numbers above 0; got ['x']"),
        ("phi3", {"rope_scaling": LONGROPE | {"factor": 3.0}}, "`factor` of longrope must be 4.0"),
        ("phi3", {"original_max_position_embeddings": 1}, "an `original_max_position_embeddings`"),
        ("phi3", {"partial_rotary_factor": 1.5}, "`partial_rotary_factor` must be at most 1; got"),
        ("phi3", {"partial_rotary_factor": 0.9}, "`head_dim` must be even for rotary positions; "),
        ("phi3", {"lm_head_bias": True}, "`lm_head_bias` of phi3 must be False; got True"),
        ("olmo2", {"clip_qkv": 8.0}, "that `Decoder` computes; got clip_qkv"),
        ("smollm3", {"no_rope_layers": [1]}, "`no_rope_layers` must have 0 or 1 for each of 2"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "`no_rope_layers` must have 0 or 1 for each of 2"),
        ("llama", {"no_rope_layers": [1, 0]}, "that `Decoder` computes; got no_rope_layers"),
    ],
)
def test_config_that_is_not_computed_is_refused(family, changes, said):
    with pytest.raises(ValueError) as error:
        DecoderConfig.from_json(text_of(family, **changes))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "said"), [("x", "JSON; got Expect"), ("[1]", "a JSON object")])
def test_config_that_is_no_object_is_refused(text, said):
    with pytest.raises(ValueError, match=rf"^`config\.json` must be {said}"):
        DecoderConfig.from_json(text)


def test_config_without_a_size_is_refused():
    with pytest.raises(ValueError, match=r"`config.json` of llama must have hidden_size"):
        content = json.loads(text_of("llama"))
        del content["hidden_size"]
        DecoderConfig.from_json(json.dumps(content))


def test_yarn_amplitude():
    fields = {"rope_theta": 10.0, "rope_type": "yarn", "factor": 4.0}
    assert Rope.from_json(fields, 16).amplitude == pytest.approx(0.1 * np.log(4) + 1)
    both = fields | {"mscale": 2.0, "mscale_all_dim": 1.0}
    wanted = (0.2 * np.log(4) + 1) / (0.1 * np.log(4) + 1)
    assert Rope.from_json(both, 16).amplitude == pytest.approx(wanted)
    assert Rope.from_json(fields | {"attention_factor": 1.5}, 16).amplitude == 1.5
    assert Rope.from_json(fields, 16).original == 16


def test_frequencies_by_their_turns():
    """Pairs with many turns in the original context stay, and those with few are scaled fully."""
    for rope in (Rope(1e4, "llama3", 8.0, 999), Rope(1e4, "yarn", 8.0, 999, truncate=False)):
        plain, scaled = Rope(1e4).frequencies(64), rope.frequencies(64)
        turns = 999 * plain / (2 * np.pi)
        many, few = (4, 1) if rope.kind == "llama3" else (32, 1)
        np.testing.assert_allclose(scaled[turns > many], plain[turns > many], rtol=1e-5)
        np.testing.assert_allclose(scaled[turns < few], plain[turns < few] / 8, rtol=1e-5)
        between = (turns > few) & (turns < many)
        assert ((scaled < plain) & (scaled > plain / 8))[between].all()
        assert between.any()


# ------------------------------------------------------------------------------------- computation


def test_rotation_turns_as_apply_rope():
    rng = np.random.default_rng(0)
    x, positions = rng.standard_normal((2, 5, 3, 8), np.float32), rng.integers(0, 99, (2, 5))
    turned = Rope(100.0)(jnp.asarray(x), positions)
    np.testing.assert_allclose(turned, apply_rope(x, positions, 100.0), atol=1e-5)
    longer = dataclasses.replace(Rope(100.0), amplitude=2.0)
    np.testing.assert_allclose(longer(jnp.asarray(x), positions), 2 * turned, atol=1e-5)


@pytest.mark.parametrize("kind", ["rms", "rms1", "layer"])
def test_norm_is_its_formula(kind):
    config = dataclasses.replace(make("llama").config, norm=kind, norm_epsilon=1e-3)
    norm, rng = Norm(16, config), np.random.default_rng(0)
    x, w = rng.normal(0.5, 1, (3, 16)), rng.normal(0, 1, (2, 16))
    norm.weight[...] = jnp.asarray(w[0], jnp.float32)
    y = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-3)
    y = y * (w[0] + (kind == "rms1"))
    if kind == "layer":
        norm.bias[...] = jnp.asarray(w[1], jnp.float32)
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)
        y = y * w[0] + w[1]
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), y, atol=1e-5)


def test_token_sees_the_window_in_each_layer():
    """Two layers with windows of three tokens: a token reaches the logits of the next four."""
    model = make("mistral", implementation=None)
    changed = TOKENS.copy()
    changed[:, 2] = (changed[:, 2] + 1) % 31
    before, after = (np.asarray(logits_of(model, x)) for x in (TOKENS, changed))
    reached = np.abs(before - after).max(axis=(0, 2)) > 0
    np.testing.assert_array_equal(np.flatnonzero(reached), [2, 3, 4, 5, 6])


def test_layer_without_rope_ignores_order():
    """The last token sees the tokens before it without an order."""
    changed = TOKENS[:, [*range(9, -1, -1), 10]]
    for marks, same in (([0], True), ([1], False)):
        model = make("smollm3", num_hidden_layers=1, no_rope_layers=marks)
        before, after = (logits_of(model, x)[:, -1] for x in (TOKENS, changed))
        assert np.allclose(before, after, atol=2e-5) == same


def families(*chosen):
    """By default some that have little in common: each compiles programs of its own."""
    return pytest.mark.parametrize("family", cases.default(chosen, FILES))


@families("gpt2", "mistral", "gemma3_text", "phi3")
def test_cached_equals_uncached(family):
    model = make(family)
    whole = logits_of(model, TOKENS)
    assert whole.shape == (2, 11, 31)
    assert whole.dtype == jnp.float32
    # The second prompt has three tokens of five; then three tokens at once, then one at a time.
    model.init_cache(2, 11)
    prompt = decoded(model, TOKENS[:, :5], jnp.array([5, 3]))
    np.testing.assert_allclose(prompt[0], whole[0, :5], atol=2e-5)
    np.testing.assert_allclose(prompt[1, :3], whole[1, :3], atol=2e-5)
    ends = np.array([5, 3])
    for count in (3, 1, 1):
        at = ends[:, None] + np.arange(count)
        rows = np.arange(2)[:, None]
        new = decoded(model, TOKENS[rows, at])
        np.testing.assert_allclose(new, whole[rows, at], atol=2e-5)
        ends += count


@pytest.mark.parametrize(("length", "kept"), [(11, 4), (4, 4), (3, 3)])
def test_layer_with_a_window_keeps_the_window_alone(length, kept):
    model = make("gemma3_text", sliding_window=4)
    model.init_cache(2, length)
    rooms = [layer.attention.cache.keys.shape[1] for layer in model.layers]
    assert rooms == [kept if sees_few else length for sees_few in model.config.sliding]
    assert {*rooms} == {kept, length} and any(model.config.sliding)


@pytest.mark.parametrize("room", [8, 9])
def test_room_chooses_the_factors_of_longrope(room):
    """The cache has the room, or else the texts; the original context has eight tokens."""
    model, factors = make("phi3"), {8: "short", 9: "long"}[room]
    chosen = getattr(model.config.rope, factors)
    always = make("phi3", rope_scaling=LONGROPE | {f"{x}_factor": [*chosen] for x in LONG})
    wanted = logits_of(always, TOKENS[:, :5])
    assert (logits_of(model, TOKENS[:, :5]) == wanted).all() == (room == 8)
    np.testing.assert_array_equal(
        logits_of(model, TOKENS[:, :room]), logits_of(always, TOKENS[:, :room])
    )
    for layer in model.layers:
        layer.attention.init_cache((2, room, 16), ragged=True)
    with pytest.raises(ValueError, match="in a cache of unknown length"):
        decoded(model, TOKENS[:, :5])
    model.init_cache(2, room)
    np.testing.assert_allclose(decoded(model, TOKENS[:, :5]), wanted, atol=2e-5)


@families("gpt2", "gemma3_text")
def test_packed_equals_separate(family):
    model = make(family)
    ids = np.array([[0] * 4 + [1] * 7, [3] * 9 + [1] * 2], np.int32)
    packed = logits_of(model, TOKENS, segment_ids=jnp.asarray(ids))
    parts = [(0, slice(0, 4)), (0, slice(4, 11)), (1, slice(0, 9)), (1, slice(9, 11))]
    # Rows of one length are one program; a causal model looks at nothing of their padding.
    rows = np.zeros((4, 11), TOKENS.dtype)
    for n, part in enumerate(parts):
        rows[n, : len(TOKENS[part])] = TOKENS[part]
    alone = logits_of(model, rows)
    for n, part in enumerate(parts):
        np.testing.assert_allclose(packed[part], alone[n, : len(TOKENS[part])], atol=2e-5)


def test_batch_invariance_is_of_all_layers():
    """Their caches keep all tokens in order, also where a window is shorter."""
    config = dataclasses.replace(make("gemma3_text").config, batch_invariant=True)
    model = Decoder(config, rngs=nnx.Rngs(0))
    model.init_cache(2, 11)
    layers = [x.attention for x in model.layers]
    assert [x.batch_invariant for x in layers] == [True] * config.num_layers
    assert any(config.sliding) and not any(x.cache.ring for x in layers)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_kernels_give_the_logits_of_the_reference(implementation):
    ours, reference = (
        logits_of(make("gemma2", implementation=x), TOKENS) for x in (implementation, "reference")
    )
    np.testing.assert_allclose(ours, reference, atol=2e-5)


def test_bfloat16_logits_are_near():
    full = make("gemma3_text")
    half = make("gemma3_text")
    half = nnx.merge(nnx.graphdef(make("gemma3_text", dtype="bfloat16")), nnx.state(half))
    logits, exact = (np.asarray(logits_of(m, TOKENS)) for m in (half, full))
    # Logits of bfloat16 would have 16 zero bits at their end.
    assert (logits.view(np.uint32) & 0xFFFF).any()
    assert 0 < np.linalg.norm(logits - exact) / np.linalg.norm(exact) < 0.1


def test_row_beyond_the_cache_is_nan():
    model = make("llama")
    model.init_cache(2, 4)
    assert jnp.isfinite(decoded(model, TOKENS[:, :6], jnp.array([3, 4]))).all()
    logits = decoded(model, TOKENS[:, :1])
    assert jnp.isfinite(logits[0]).all()
    assert jnp.isnan(logits[1]).all()


@pytest.mark.parametrize("token", [31, -1])
def test_unknown_token_is_nan(token):
    assert jnp.isnan(logits_of(make("llama"), np.array([[token]]))).all()


ONE = jnp.ones(1, jnp.int32)


def paged(model, tokens, **options):
    requests = 3 * ONE, jnp.zeros((1, 1), jnp.int32), jnp.array([0, 3], jnp.int32)
    return model(tokens, decode=True, requests=requests, **options)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: m(jnp.ones((2, 3))), "`tokens` must be integers"),
        (lambda m: m(jnp.ones(3, int)), "`tokens` must be integers [batch, length]"),
        (lambda m: m([[1, 2]]), "`tokens` must be integers [batch, length]; got list"),
        (lambda m: m(jnp.ones((2, 0), int)), "`tokens` must have a token in each row"),
        (
            lambda m: m(jnp.ones((1, 3), int), segment_ids=jnp.ones((1, 2), jnp.int32)),
            "`segment_ids` must have the shape of `tokens`, (1, 3); got (1, 2)",
        ),
        (lambda m: m.from_pretrained("here", dtype="int8"), "`dtype` must be None or one of"),
        (lambda m: m(jnp.ones((1, 33), int)), "no longer than the 32 learned positions; got 33"),
        (lambda m: m.init_cache(1, 33), "`length` must be no longer than the 32 learned"),
        (lambda m: m.init_cache(1, -1), "`length` must be an int of at least 1; got -1"),
        (lambda m: m.init_cache(0, 8), "`batch` must be an int of at least 1; got 0"),
        (lambda m: m(jnp.ones((1, 3), int), decode=True), "Call `init_cache` first"),
        (lambda m: m(jnp.ones((1, 3), int), lengths=jnp.ones(1, int)), "`lengths` must be None"),
        (
            lambda m: m.init_cache(1, 4) or m(jnp.ones((2, 3), int), decode=True),
            "`tokens` must have the batch axes (1,) of the cache; got tokens.shape=(2, 3). Call",
        ),
        (
            lambda m: m.init_cache(1, 4) or m(jnp.ones((1, 5), int), decode=True),
            "`tokens` must fit in what is left of the cache; got 5 tokens with 0 of 4 taken",
        ),
        (
            lambda m: (
                m.init_cache(1, 4)
                or m(jnp.ones((1, 3), int), decode=True, segment_ids=jnp.ones((1, 3), int))
            ),
            "`segment_ids` must be None",
        ),
        (lambda m: paged(m, jnp.ones(3, int)), "Call `init_pages` first"),
        (
            lambda m: m.init_pages(2, 4) or paged(m, jnp.ones((1, 3), int)),
            "`tokens` must be integers [tokens]; got int32 (1, 3)",
        ),
        (
            lambda m: m.init_pages(2, 4) or paged(m, jnp.ones(3, int), lengths=jnp.ones(1, int)),
            "`lengths` must be None with `requests`",
        ),
        (
            lambda m: m.init_pages(2, 4) or m(jnp.ones((1, 3), int), requests=(ONE, [[0]])),
            "`requests` must be None with decode=False",
        ),
        (lambda m: m.init_pages(2, 0), "`page_size` must be an int of at least 1; got 0"),
        (
            lambda m: m.init_pages(2, 4, groups=[0]),
            "`groups` must be 2 numbers of at least 0, one for each layer; got [0]",
        ),
        (lambda m: m.init_pages(2, 4, groups=(0, -1)), "one for each layer; got [0, -1]"),
        (
            lambda m: m.init_pages(2, 4, groups=[0, 1]) or paged(m, jnp.ones(3, int)),
            "must have page_indices [groups, R, pages] for 2 groups of layers; got (1, 1)",
        ),
    ],
)
def test_call_that_does_not_fit_is_refused(call, said):
    with pytest.raises(ValueError) as error:
        call(make("gpt2"))
    assert said in str(error.value)


@families("gpt2", "qwen2", "gemma2", "gemma3_text", "olmo2")
def test_each_parameter_has_a_gradient(family):
    graphdef, params = nnx.split(make(family))

    def loss(params):
        return -jnp.mean(jax.nn.log_softmax(nnx.merge(graphdef, params)(jnp.asarray(TOKENS))) ** 2)

    for path, x in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert jnp.isfinite(x).all(), jax.tree_util.keystr(path)
        # The softmax does not change if each score of a row grows by the same.
        if "'bias'" not in (name := jax.tree_util.keystr(path)) or "key" not in name:
            assert jnp.abs(x).max() > 0, name


def test_remat_computes_layers_again():
    """Gradients stay; the forward of attention is kept, so that six products a layer are new."""
    model, found = make("gemma2"), []
    for remat in (False, True):
        model.config = dataclasses.replace(model.config, remat=remat)
        graphdef, params = nnx.split(model)
        fn = jax.grad(lambda params, graphdef=graphdef: nnx.merge(graphdef, params)(TOKENS).var())
        products = [e for e in jaxprs.trace(fn, params) if e.primitive.name == "dot_general"]
        found.append((jax.jit(fn)(params), len(products)))
    (plain, fewer), (again, more) = found
    assert more > fewer
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), again, plain)


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_strict_switches(family):
    graphdef, params = nnx.split(make(family, implementation=None))
    tokens = jax.ShapeDtypeStruct((2, 6), jnp.int32)

    def run(params, tokens):
        def loss(params):
            ids = jnp.zeros_like(tokens)
            return jnp.mean(nnx.merge(graphdef, params)(tokens, segment_ids=ids))

        model = nnx.merge(graphdef, params)
        model.init_cache(2, 8)
        return jax.grad(loss)(params), model(tokens, decode=True, lengths=tokens[:, 0])

    with strictly(x64=True):
        gradients, logits = jax.eval_shape(run, params, tokens)
    assert {x.dtype.name for x in jax.tree.leaves(gradients)} == {"float32"}
    assert logits.dtype == jnp.float32
