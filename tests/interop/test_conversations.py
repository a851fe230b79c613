"""Conversations have the loss of transformers, whose labels are -100 outside of answers."""

import importlib.util
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.decoder_files import tokenizer_of_bytes

from models import Decoder
from models.loss import next_token_loss
from models.tokens import FromFolder
from models.training.conversations import pack

# torch without Triton would take the folder tests/triton for it.
spec = importlib.util.find_spec("triton")
if spec is not None and spec.origin is None:
    sys.modules["triton"] = None
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="4.57")
    pytest.importorskip("transformers.generation.utils")

# Their warnings are not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")

MARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<end>' }}{% endgeneration %}{% else %}"
    "{{ m.content + '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CONVERSATIONS = [
    [("system", "S"), ("user", "a question"), ("assistant", "an answer")],
    [("user", "世"), ("assistant", "é 👍🏽"), ("user", "and"), ("assistant", "\n me <end>")],
    [("user", "q"), ("assistant", "a"), ("assistant", "more")],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model and a tokenizer, as transformers writes them."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of_bytes(["<end>"]), eos_token="<end>", pad_token="<end>"
    )
    tokenizer.chat_template = MARKED
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_loss_is_that_of_transformers(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    words, theirs = FromFolder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    ours, encoded = [], []
    for turns in CONVERSATIONS:
        messages = [{"role": role, "content": text} for role, text in turns]
        # The name of a special token in a message is text here alone.
        plain = [x | {"content": x["content"].replace("<end>", "")} for x in messages]
        tokens, answers, _ = words.encode_answers(plain)
        wanted = theirs.apply_chat_template(
            plain, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        assert tokens == wanted["input_ids"]
        assert answers.astype(int).tolist() == wanted["assistant_masks"]
        ours.append(np.stack([tokens, answers], 1).astype(np.int32))
        encoded.append((tokens, answers))

    # A batch of padded rows there, and packed rows here.
    longest = max(len(tokens) for tokens, _ in encoded)
    ids = torch.zeros((len(encoded), longest), dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for n, (tokens, answers) in enumerate(encoded):
        ids[n, : len(tokens)], mask[n, : len(tokens)] = torch.tensor(tokens), 1
        labels[n, : len(tokens)] = torch.tensor(np.where(answers, tokens, -100))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, labels=labels).loss.item()
    rows = pack(ours, 2 * longest)
    assert len(rows.tokens) < len(ours) + 1
    got = next_token_loss(Decoder.from_pretrained(Path(folder)), *rows)
    assert float(got) == pytest.approx(expected, rel=1e-5)
