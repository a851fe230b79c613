"""Adapters: peft reads ours, and we read peft's."""

import copy
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from interop.test_families import TOKENS, close, theirs, torch, transformers

from models import Decoder, lora
from models.export import main as export

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("targets", [None, "first"])
@pytest.mark.parametrize("name", ["llama", "phi3-long", "gpt2", "gemma3"])
def test_adapters_go_both_ways(name, targets, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path / "base")
    ours = Decoder.from_pretrained(tmp_path / "base")
    graphdef, params = nnx.split(ours)
    config, params = ours.config, nnx.to_pure_dict(params)

    def logits(adapter, alpha):
        changed = lora.merged(config, params, adapter, alpha)
        return nnx.merge(graphdef, changed)(jnp.asarray(TOKENS))

    with jax.default_matmul_precision("highest"):
        names = sorted({x.rpartition(".")[2] for x in lora.matrices(config, params)})
        chosen = names if targets is None else names[:1]
        adapter = lora.init(jax.random.key(0), config, params, 3, targets and chosen)
        # As the last updates of a run leave it.
        adapter = jax.tree.map(
            lambda x: jax.random.normal(jax.random.key(x.size), x.shape) / 9, adapter
        )
        lora.save(tmp_path / "ours", config, params, adapter, 5.0, str(tmp_path / "base"))
        read = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours").eval()
        wanted = read(torch.tensor(TOKENS)).logits.detach()
        close(logits(adapter, 5.0), wanted)
        assert (wanted - model(torch.tensor(TOKENS)).logits.detach()).abs().max() > 0.01

        # The copy with the sum in it.
        command = [str(tmp_path / "base"), str(tmp_path / "merged")]
        assert export([*command, "--adapter", str(tmp_path / "ours")]) == 0
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", attn_implementation="eager"
        )
        close(again(torch.tensor(TOKENS)).logits.detach(), wanted)

        settings = peft.LoraConfig(
            **dict(r=2, lora_alpha=3, target_modules=chosen, task_type="CAUSAL_LM"),
            **dict(init_lora_weights=False, lora_dropout=0.1, fan_in_fan_out=name == "gpt2"),
        )
        tuned = peft.get_peft_model(copy.deepcopy(model), settings).eval()
        tuned.save_pretrained(tmp_path / "theirs")
        adapter, alpha = lora.load(tmp_path / "theirs", config, params)
        assert alpha == 3
        close(logits(adapter, alpha), tuned(torch.tensor(TOKENS)).logits.detach())
    fields = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert fields["target_modules"] == chosen
