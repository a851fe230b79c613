"""The trainer tunes on conversations: answers alone carry loss, and none sees another."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoder_files import make, tokenizer_of_bytes
from support.tiny_run import TINY, checkpoint_steps, metrics, one_device

from models import Decoder
from models.errors import UserError
from models.loss import next_token_loss, summed_loss
from models.tokens import FromFolder
from models.train import main
from models.training import loop
from models.training.conversations import load_conversations, pack
from models.training.loop import train
from models.training.text import held_out_batches, training_batch
from scripts import generate

pytestmark = pytest.mark.usefixtures("compile_once")

CHATML = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = CHATML.replace(
    "{{ '<|' + m.role + '|>' + (m.content or '') }}",
    "{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
    "{% endgeneration %}{% continue %}{% endif %}{{ m.content }}",
)
# As Llama 3 does, and Mistral, whose answers have a space in front and no prompt.
TRIMMED = CHATML.replace("(m.content or '')", "m.content | trim")
MISTRAL = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '<end>' }}{% endif %}{% endfor %}"
)
# As Qwen 3: an answer before the last user's words loses its thinking, and only the last has some.
THINKING = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights whose tokens are bytes, with a template."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    folder = tmp_path_factory.mktemp("chats") / "weights"
    make("llama", vocab_size=258, max_position_embeddings=64).save_pretrained(folder)
    tokenizer_of_bytes(["<end>"], [("\u010a", "\u010a")]).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "generation_config.json").write_text('{"eos_token_id": 257}')
    return folder


@pytest.fixture
def with_template(weights, tmp_path):
    """A function that returns the weights with another template."""

    def change(template):
        folder = shutil.copytree(weights, tmp_path / "weights")
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return change


def chat(*texts, first="user"):
    """Messages by turns."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def write(path, conversations):
    lines = (json.dumps({"messages": x}, ensure_ascii=False) + "\n" for x in conversations)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def answers_of(folder, messages, tools=None):
    """The text of the tokens that carry loss, special ones by their names."""
    words = FromFolder(folder)
    tokens, answers, _ = words.encode_answers(messages, tools)
    kept = [x for x, carries in zip(tokens, answers, strict=True) if carries]
    return words._tokenizer.decode(kept, skip_special_tokens=False)


# -------------------------------------------------------------------------------- what carries loss

TOOL = [
    *chat("Tea?"),
    {"role": "assistant", "tool_calls": [{"name": "buy"}]},
    {"role": "tool", "content": "bought"},
    *chat("Here.", first="assistant"),
]
CARRIES = {
    "one turn": (CHATML, chat("hi", "you"), "you<end>"),
    "several turns": (CHATML, chat("hi", "you", "and", "me"), "you<end>me<end>"),
    "marked": (MARKED, chat("hi", "you", "and", "me"), "you<end>me<end>"),
    "letters of several bytes": (CHATML, chat("世", "é👍🏽 世", "ü"), "é👍🏽 世<end>"),
    "system": (CHATML, [{"role": "system", "content": "S"}, *chat("hi", "you")], "you<end>"),
    "two answers in a row": (
        CHATML,
        [*chat("hi", "you"), *chat("me", first="assistant")],
        "you<end>me<end>",
    ),
    "tools": (CHATML, TOOL, '[{"name": "buy"}]<end>Here.<end>'),
    "white space": (TRIMMED, chat("hi ", " you \n"), "you<end>"),
    "no prompt": (MISTRAL, chat("hi", "you", "and", "me"), " you<end> me<end>"),
    "thinking": (THINKING, chat("hi", "you"), "<think></think>you<end>"),
    "name of a special token": (CHATML, chat("<end>", "a<end>b"), "a<end>b<end>"),
}


@pytest.mark.parametrize("case", CARRIES)
def test_answers_alone_carry_loss(case, with_template):
    template, messages, expected = CARRIES[case]
    folder = with_template(template)
    assert answers_of(folder, messages) == expected
    if case == "name of a special token":
        # Of three ends in the text, two are letters.
        assert FromFolder(folder).encode_answers(messages)[0].count(257) == 2


def test_answer_of_weight_zero_carries_none(with_template):
    messages = chat("hi", "you", "and", "me")
    messages[1]["weight"] = 0
    for template, expected in ((CHATML, "me<end>"), (MARKED, "me<end>")):
        folder = with_template(template)
        assert answers_of(folder, messages) == expected
        shutil.rmtree(folder)
    assert answers_of(with_template(THINKING), messages) == "<think></think>me<end>"


def test_date_of_a_template_stays(with_template):
    """A run that is resumed on another day has the same tokens."""
    folder = with_template("{{ strftime_now('%d %b %Y') }}" + CHATML)
    [tokens, _, _] = FromFolder(folder).encode_answers(chat("hi", "you"))
    assert FromFolder(folder).decode(tokens).startswith("26 Jul 2024")


@pytest.fixture
def packed(weights):
    """Conversations of other lengths in tokens of the weights, in two rows and an empty one."""
    words, conversations = FromFolder(weights), []
    for n in (1, 2, 7, 5, 3):
        tokens, answers, _ = words.encode_answers(chat("q" * n, "a" * (9 - n), "r", "b" * n))
        conversations.append(np.stack([tokens, answers], 1).astype(np.int32))
    return conversations, pack(conversations, 125)


def test_packed_rows_have_every_conversation_once(packed):
    conversations, rows = packed
    assert rows.tokens.shape == (4, 125)
    left = [x.tolist() for x in conversations]
    for tokens, documents, answers in zip(*rows, strict=True):
        for n in range(documents.max()):
            [places] = np.nonzero(documents == n)
            np.testing.assert_array_equal(np.diff(places), 1)
            left.remove(np.stack([tokens[places], answers[places]], 1).tolist())
        assert not answers[documents == documents.max()].any()
    assert left == [] and not rows.answers[-1].any()


def test_aligned_conversations_begin_at_multiples(packed):
    conversations, _ = packed
    rows = pack(conversations, 125, aligned=16)
    starts = [np.nonzero(np.diff(x, prepend=-1))[0] for x in rows.documents]
    assert not (np.concatenate(starts) % 16).any()
    assert sum(map(len, starts)) >= len(conversations)


@pytest.mark.parametrize("aligned", [1, 16])
def test_packed_loss_is_that_of_each_alone(weights, packed, aligned):
    model, (conversations, _) = Decoder.from_pretrained(weights), packed
    rows = pack(conversations, 125, aligned)
    together = summed_loss(model, *map(jnp.asarray, rows))
    alone = [
        summed_loss(
            model, *(jnp.asarray(x[None]) for x in (tokens, np.zeros_like(tokens), answers > 0))
        )
        for tokens, answers in (x.T for x in conversations)
    ]
    totals, counts = (float(sum(x)) for x in zip(*alone, strict=True))
    assert float(together[0]) == pytest.approx(totals, rel=1e-6)
    assert float(together[1]) == counts


def test_prompts_have_no_gradient_and_nothing_leaks(weights, packed, monkeypatch):
    """Exactly none at the logits before tokens of prompts, and the same bits beside a change."""
    model, (_, rows) = Decoder.from_pretrained(weights), packed
    real = Decoder.logits

    def gradient(tokens, answers):
        def loss(more):
            monkeypatch.setattr(Decoder, "logits", lambda self, x: real(self, x) + more)
            return summed_loss(model, tokens, jnp.asarray(rows.documents), answers)[0]

        return np.asarray(jax.grad(loss)(jnp.zeros((*tokens[:, 1:].shape, 258))))

    tokens, answers = jnp.asarray(rows.tokens), jnp.asarray(rows.answers)
    norms = np.abs(gradient(tokens, answers)).max(-1)
    np.testing.assert_array_equal(norms > 0, rows.answers[:, 1:])
    # The first conversation of the first row carries no loss, and then has other words.
    first = jnp.asarray(rows.documents == 0) & (jnp.arange(4) == 0)[:, None]
    before, after = (
        gradient(x, answers & ~first)
        for x in (tokens, jnp.where(first, (tokens + 1) % 256, tokens))
    )
    np.testing.assert_array_equal(before, after)


# ------------------------------------------------------------------------------------------ the run


FACTS = [
    chat(f"Colour of {x}?", f"It is {y}.")
    for x, y in zip("abcdef", ["red", "blue"] * 3, strict=True)
]


@pytest.fixture
def tuning(weights, tmp_path):
    """The settings of a run on a few conversations."""
    path = write(tmp_path / "chats.jsonl", FACTS)
    return dataclasses.replace(
        TINY,
        **dict(init_from=str(weights), conversations=str(path), out_dir=str(tmp_path / "run")),
        **dict(context=60, learning_rate=1e-2),
    )


def test_model_answers_after_tuning(tuning, capsys):
    """Every conversation is held out or trained on; those trained on are answered."""
    config = dataclasses.replace(tuning, steps=150, eval_every=150, learning_rate=2e-2)
    train(config)
    words = FromFolder(Path(config.init_from))
    rows = load_conversations(config).train
    capsys.readouterr()
    right = 0
    for question, answer in (x for x in FACTS):
        prompt = words.encode_chat(question["content"], None)
        if not any(str(prompt)[1:-1] in str(row.tolist()) for row in rows.tokens):
            continue
        flags = ["--prompt", question["content"], "--temperature", "0", "--tokens", "30"]
        generate.main([config.out_dir, *flags])
        assert capsys.readouterr().out == answer["content"] + "\n"
        right += 1
    assert right == 5


def test_report_says_what_carries_loss(tuning, weights, capsys):
    long = chat("q", "a" * 99)
    lost = chat("q" * 99, "a")
    write(Path(tuning.conversations), [*FACTS, long, lost])
    text = load_conversations(tuning)
    rows = len(text.train.tokens) + len(text.held_out.tokens) - 2
    counts = [line for line in text.said if "carry loss, in" in line]
    assert len(counts) == 2 and sum(int(x.rsplit(" ", 2)[1]) for x in counts) == rows
    carry = sum(int(x.answers.sum()) for x in (text.train, text.held_out))
    # An answer and its end; the long one has 61 tokens with the prompt.
    assert (
        carry
        == 3 * len("It is red.e") + 3 * len("It is blue.e") + 61 - len("|user|<>q<|assistant|>") - 1
    )
    assert "2 are longer than 61 tokens, and were cut there (the first is line 7)" in text.said
    assert any(x.startswith("1 were left out, because no answer begins in") for x in text.said)
    assert (
        len({load_conversations(dataclasses.replace(tuning, context=x)).sha256 for x in (50, 60)})
        == 2
    )


def test_first_token_carries_no_loss(tuning, with_template):
    """Only the conversation before it in the row could predict it."""
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    write(Path(tuning.conversations), [chat(x, first="assistant") for x in ("abc", "de", "f!")])
    rows = load_conversations(
        dataclasses.replace(tuning, init_from=str(with_template(template)))
    ).train
    firsts = np.diff(rows.documents, prepend=-1) > 0
    assert rows.documents.max() > 1 and not rows.answers[firsts].any()
    assert rows.answers.any()


def test_every_row_comes_once_in_a_pass(tuning):
    config = dataclasses.replace(tuning, context=45, batch_size=5, accumulation=1)
    text = load_conversations(config)
    count = len(text.train.tokens) - 1
    assert count == 5
    passes = [text.train.draw(step, config) for step in (1, 2, 1)]
    for numbers in passes:
        np.testing.assert_array_equal(sorted(numbers), np.arange(count))
    np.testing.assert_array_equal(passes[0], passes[2])
    # A whole held-out side, and empty rows up to whole batches.
    batch = held_out_batches(text, config, one_device())
    assert int(batch.answers.sum()) == int(text.held_out.answers.sum())
    few = training_batch(text, 3, dataclasses.replace(config, context=9), one_device())
    assert few.answers.shape == (1, 5, 10)


def test_killed_tuning_on_conversations_resumes(tuning, monkeypatch, capsys):
    """To the same bits; the weights are those of the lowest held-out loss."""
    # The words of one answer say nothing of another's: the held-out loss soon rises.
    words = ["wolf", "tiger", "mouse", "eagle", "shark", "zebra"]
    path = Path(tuning.conversations)
    write(path, [chat(f"{n}?", f"{word} {word}") for n, word in enumerate(words)])
    changes = dict(learning_rate=0.1, keep_checkpoints=1, attention="xla")
    tuning = dataclasses.replace(tuning, **changes)
    whole = dataclasses.replace(tuning, out_dir=tuning.out_dir + "-whole", gradient_check=True)
    result = train(whole)
    assert 0 < result.gradient_error < 1e-5
    real = loop.training_batch

    def training_batch(text, step, *args):
        if step == 7:
            raise KeyboardInterrupt
        return real(text, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "training_batch", training_batch)
        with pytest.raises(KeyboardInterrupt):
            train(tuning)
    capsys.readouterr()
    train(tuning)
    assert metrics(tuning) == metrics(whole)
    looks = {line["step"]: line["val_loss"] for line in metrics(whole) if line["val_loss"]}
    best = min(looks, key=looks.get)
    assert best < 12
    assert checkpoint_steps(tuning) == checkpoint_steps(whole) == [best, 12]
    assert f"of step {best}, the lowest held-out loss" in capsys.readouterr().out
    text = load_conversations(whole)
    batches = held_out_batches(text, whole, one_device())
    losses = []
    for config in (tuning, whole):
        model = Decoder.from_pretrained(Path(config.out_dir, "weights"))
        rows = (jnp.concatenate(list(x)) for x in batches)
        losses.append(float(next_token_loss(model, *rows)))
    assert losses[0] == losses[1] == pytest.approx(looks[best], rel=1e-5)


# ----------------------------------------------------------------------------------------- mistakes

LINE = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'
MISTAKES = {
    "no JSON in UTF-8 in line 2": "{",
    "no JSON in UTF-8 in line 2 of": LINE.replace('"q"', r'"\ud800"'),
    "no list of messages in line 2": '{"text": "a"}',
    "no list of messages in line 2 of": "[]",
    "no list of messages in line 2 of '": '{"messages": []}',
    "a str as messages[0] in line 2": '{"messages": ["a"]}',
    "'bot' as the role of messages[1], which is none of": LINE.replace("assistant", "bot"),
    "None as the role of messages[0]": LINE.replace('"role": "user", ', ""),
    "a list as the content of messages[0]": LINE.replace('"q"', "[]"),
    "a NoneType as the content of messages[1]": LINE.replace(', "content": "a"', ""),
    "an empty answer as messages[1]": LINE.replace('"a"', '" "'),
    "2 as the weight of messages[1]": LINE.replace('"a"', '"a", "weight": 2'),
    "1 as the weight of messages[0]": LINE.replace('"q"', '"q", "weight": 1'),
    "no answer that carries loss in line 2": LINE.replace('"a"', '"a", "weight": 0'),
    "no answer that carries loss in line 2 of": '{"messages": [{"role": "user", "content": "q"}]}',
    "a str as tools in line 2": LINE.replace("{", '{"tools": "abc", ', 1),
    "must be at least two, not equal, with an answer in their first 61 tokens": LINE,
}


@pytest.mark.parametrize("fragment", MISTAKES)
def test_mistake_names_the_line(fragment, tuning, capsys):
    path = Path(tuning.conversations)
    path.write_text(f"{LINE}\n{MISTAKES[fragment]}\n")
    said = refused(tuning, capsys)
    assert said.startswith("train: error: --conversations must ")
    assert fragment in said and repr(str(path)) in said


def refused(config, capsys, **changes):
    flags = dict(init_from=config.init_from, conversations=config.conversations) | changes
    argv = [f"--{k.replace('_', '-')}={v}" for k, v in flags.items() if v is not None]
    assert main([*argv, "--context=60", f"--out-dir={config.out_dir}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


TEMPLATES = {
    "must leave messages[1] as it is when others follow; got one": THINKING,
    "must begin messages[1] with the prompt for it; got one that": CHATML + "<think>",
    "must take the messages; got 'roles must alternate'": MISTRAL,
    "must be one that jinja2 renders; got": "{{ messages[5].content }}",
}


@pytest.mark.parametrize("fragment", TEMPLATES)
def test_template_that_does_not_serve_is_named(fragment, tuning, with_template, capsys):
    folder = with_template(TEMPLATES[fragment])
    messages = chat("q", "a", "r", "b")
    messages += messages[-1:] if "alternate" in fragment else []
    write(Path(tuning.conversations), [chat("q", "a"), messages])
    said = refused(tuning, capsys, init_from=folder)
    line = 1 if "begin" in fragment or "renders" in fragment else 2
    assert f"line {line} of {tuning.conversations!r}: the chat template {fragment}" in said


def test_files_that_do_not_serve_are_named(tuning, with_template, tmp_path, capsys):
    for fragment, changes in {
        "--conversations must be a file; got": dict(conversations=tmp_path / "none"),
        "--conversations must be at least two": dict(conversations=write(tmp_path / "empty", [])),
        "--conversations must come with weights in --init-from": dict(init_from=None),
        "--out-dir must be another folder than --init-from": dict(init_from=tuning.out_dir),
        "--preset must be one of fine-tune, lora with weights": dict(preset="gpt2-small"),
        "lora with --lora-rank alone, and": dict(preset="lora"),
        "--conversations must come with weights in": dict(data=tmp_path),
        "--init-from must be a folder with config.json": dict(init_from=tmp_path),
    }.items():
        assert fragment in refused(tuning, capsys, **changes)
    folder = with_template(CHATML)
    (folder / "chat_template.jinja").unlink()
    said = refused(tuning, capsys, init_from=folder)
    assert "--init-from must have a chat template for --conversations; got" in said


def test_warnings_name_lines(tuning, with_template):
    write(Path(tuning.conversations), [*FACTS, chat("q", "\n\na")])
    path = with_template(
        CHATML.replace("<end>", "").replace("|>'", "|>\\n'").replace("t|>{", "t|>\n{")
    )
    said = load_conversations(dataclasses.replace(tuning, init_from=str(path))).said
    assert not any("words the template changes" in x for x in said)
    assert any(x.startswith("1 have an answer that begins inside of a token") for x in said)
    assert any(x.startswith("7 have no stop token that carries loss") for x in said)
    (path / "chat_template.jinja").write_text(CHATML.replace("(m.content or '')", "m.content[-1]"))
    said = load_conversations(dataclasses.replace(tuning, init_from=str(path))).said
    assert any(x.startswith("6 have an answer whose words the template changes") for x in said)
    content = json.loads(LINE) | {"id": 3}
    content["messages"][1]["wieght"] = 0
    Path(tuning.conversations).write_text(f"{json.dumps(content)}\n{LINE}")
    fields = "fields that only the template may read: id, wieght of a message"
    assert fields in load_conversations(tuning).said
    # Equal lines are on one side.
    Path(tuning.conversations).write_text("\n".join(10 * [LINE, LINE.replace("q", "r")]))
    assert [x.partition(" ")[0] for x in load_conversations(tuning).said[:2]] == ["10", "10"]
    Path(tuning.conversations).write_text(LINE, encoding="utf-16")
    with pytest.raises(UserError, match="got no JSON in UTF-8 in line 1"):
        load_conversations(tuning)
