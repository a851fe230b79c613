"""Adapters: what is written is read, what they are added to, and mistakes are named."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.decoder_files import make

from models import checkpoint, lora


def model_of(family, **options):
    """A model's configuration, and its parameters."""
    model = make(family, **options)
    return model.config, nnx.to_pure_dict(nnx.state(model, nnx.Param))


def random_adapter(config, params, targets=None):
    adapter = lora.init(jax.random.key(0), config, params, 3, targets)
    leaves, tree = jax.tree.flatten(adapter)
    rng = np.random.default_rng(0)
    leaves = [jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in leaves]
    return jax.tree.unflatten(tree, leaves)


# The names of each family's matrices, in its files.
MATRICES = {
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
}


@pytest.mark.parametrize("family", MATRICES)
def test_saved_adapter_is_read_and_added(family, tmp_path):
    config, params = model_of(family)
    adapter = random_adapter(config, params)
    assert {name.rpartition(".")[2] for name in adapter} == MATRICES[family]
    lora.save(tmp_path, config, params, adapter, 6)
    again, alpha = lora.load(tmp_path, config, params)
    assert alpha == 6
    jax.tree.map(np.testing.assert_array_equal, again, adapter)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 3

    before, after = (
        checkpoint.leaves_by_path(x) for x in (params, lora.merged(config, params, again, alpha))
    )
    assert before.keys() == after.keys()
    stored = lora.matrices(config, params)
    changed = {path for x in stored.values() for path in x.paths}
    assert {path for path, x in before.items() if (x != after[path]).any()} == changed
    for name, (paths, _) in stored.items():
        update = jnp.concatenate([after[path] - before[path] for path in paths])
        wanted = 2 * np.float64(adapter[name]["b"]) @ np.float64(adapter[name]["a"])
        np.testing.assert_allclose(update, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_adapter_changes_nothing(dtype):
    config, params = model_of("llama", dtype=dtype)
    adapter = lora.init(jax.random.key(0), config, params, 2)
    assert len({x["a"].tobytes() for x in map(jax.device_get, adapter.values())}) == 14
    sums = lora.merged(config, params, adapter, 1.0)
    jax.tree.map(np.testing.assert_array_equal, sums, params)


def fields(**changes):
    return lambda folder, _: (folder / lora.CONFIG).write_text(
        json.dumps(json.loads((folder / lora.CONFIG).read_text()) | changes)
    )


def tensors(change):
    def write(folder, adapter):
        leaves = {
            f"base_model.model.{n}.lora_{l.upper()}.weight": x
            for n, y in adapter.items()
            for l, x in y.items()
        }
        change(leaves)
        stored = {name: checkpoint.Stored([name], False) for name in leaves}
        checkpoint.write_file(folder / lora.WEIGHTS, stored, leaves)

    return write


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
MISTAKES = {
    "dora": (fields(use_dora=True), "fields that this code computes; got 'use_dora' with True"),
    "rslora": (fields(use_rslora=True), "got 'use_rslora' with True"),
    "ranks": (fields(rank_pattern={"q_proj": 2}), "got 'rank_pattern' with {'q_proj': 2}"),
    "bias": (fields(bias="all"), "got 'bias' with 'all'"),
    "kind": (fields(peft_type="IA3"), "got 'peft_type' with 'IA3'"),
    "start": (fields(init_lora_weights="pissa"), "got 'init_lora_weights' with 'pissa'"),
    "new field": (fields(colour=1), "got 'colour' with 1"),
    "rank": (fields(r="2"), "must have numbers `r` and `lora_alpha`; got '2' and 6"),
    "other rank": (fields(r=2), "must have the shape (2, 16); got (3, 16)"),
    "json": (lambda f, _: (f / lora.CONFIG).write_text("{"), "adapter_config.json must be JSON"),
    "file": (lambda f, _: (f / lora.WEIGHTS).unlink(), "without adapter_model.safetensors"),
    "name": (tensors(lambda x: x.update(extra=x[NAME])), "attention and MLP; got 'extra'"),
    "half": (tensors(lambda x: x.pop(NAME)), "must have both matrices of each pair"),
    "none": (tensors(lambda x: x.clear()), "must have both matrices of each pair"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_adapter_that_is_not_computed_is_refused(name, tmp_path):
    config, params = model_of("llama")
    adapter = random_adapter(config, params, ["q_proj"])
    lora.save(tmp_path, config, params, adapter, 6)
    with pytest.raises(ValueError, match="`folder` must be new or empty"):
        lora.save(tmp_path, config, params, adapter, 6)
    damage, said = MISTAKES[name]
    damage(tmp_path, adapter)
    with pytest.raises(ValueError) as error:
        lora.load(tmp_path, config, params)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rank", "targets", "said"),
    [
        (0, None, "`rank` must be an int of at least 1; got 0"),
        (
            2,
            ["lm_head"],
            "must be some of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_p",
        ),
        (2, [], "`targets` must be some of"),
        (2, "q_proj", "`targets` must be some of"),
    ],
)
def test_adapter_of_other_matrices_is_refused(rank, targets, said):
    config, params = model_of("llama")
    with pytest.raises(ValueError) as error:
        lora.init(jax.random.key(0), config, params, rank, targets)
    assert said in str(error.value)
