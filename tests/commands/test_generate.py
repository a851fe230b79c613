"""`scripts/generate.py`: text from runs and from folders of weights."""

import argparse
import io
import json
import os
import pathlib
import random
import re
import shutil
import sys

import pytest
from support import children
from support.decoder_files import make, tokenizer_of_bytes
from support.repository import ROOT, assert_none

from models import Decoder
from models.engine import Engine
from models.engine.scheduler import Scheduler
from models.generation import Generation, Sampling
from models.tokens import Bytes, FromFolder, TextStream
from scripts import generate
from scripts.generate import main, read_prompts
from scripts.generation import requests


@pytest.fixture
def run(capsys, monkeypatch):
    """A function that runs the script, and returns its output and what it says beside."""

    def run(*words, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        main([str(word) for word in words])
        return capsys.readouterr()

    return run


@pytest.fixture
def refused(run):
    """A function that runs the script, and returns the sentence in which it ends."""

    def refused(*words, **options):
        with pytest.raises(SystemExit) as end:
            run(*words, **options)
        assert isinstance(end.value.code, str), "argparse's error"
        assert "\n" not in end.value.code
        return end.value.code.removeprefix("error: ")

    return refused


# --------------------------------------------------------------------------------- runs


def test_run_writes_text(finished, run):
    config, _ = finished
    words = "--prompt", "a fig", "--temperature", 0, "--tokens", 7
    out, err = run(config.out_dir, *words)
    assert out == run(pathlib.Path(config.out_dir, "weights"), *words).out
    model = Decoder.from_pretrained(pathlib.Path(config.out_dir, "weights"))
    tokens = [token for [token] in Generation(model, [list(b"a fig")], 7, Sampling(0))]
    assert out == bytes(tokens).decode(errors="replace") + "\n"
    assert "a second)" in err


def test_run_without_weights_is_refused(refused, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert "must have weights/, which a run writes when it ends; got none" in refused(tmp_path)


# --------------------------------------------------------------------------------- folders

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder with a tokenizer of bytes, whose 257th token ends a text."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("weights") / "model"
    make("llama", vocab_size=257, max_position_embeddings=128).save_pretrained(folder)
    tokenizer_of_bytes(["<end>"]).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def changed(weights, tmp_path):
    """A function that returns a copy of the folder with other JSON files."""

    def changed(**files):
        folder = tmp_path / "changed"
        shutil.copytree(weights, folder)
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / f"{name}.json").write_text(text)
        return folder

    return changed


GREEDY = "--temperature", "0", "--tokens", "12"


def test_batch_is_each_prompt_alone(weights, run, tmp_path):
    prompts = ["hello", "a", "the third one"]
    (tmp_path / "prompts").write_text("\n".join(prompts) + "\n")
    alone = [run(weights, "--prompt", prompt, *GREEDY).out for prompt in prompts]
    wanted = "".join(f"# {n + 1} of 3: {prompts[n]!r}\n{text}" for n, text in enumerate(alone))
    assert run(weights, "--prompts", tmp_path / "prompts", *GREEDY).out == wanted
    assert run(weights, "--prompts", "-", *GREEDY, stdin="\n".join(prompts)).out == wanted
    assert len(set(alone)) == 3


def test_standard_input_is_one_prompt(weights, run):
    given = run(weights, "--prompt", "two\nlines", *GREEDY).out
    assert run(weights, *GREEDY, stdin="two\nlines\n").out == given


def test_stop_string_ends_the_text(weights, run):
    whole = run(weights, "--prompt", "hello", *GREEDY).out[:-1]
    stop = whole[4:6]
    out, err = run(weights, "--prompt", "hello", *GREEDY, "--stop", "never", "--stop", stop)
    assert out == whole[: whole.index(stop)] + "\n"
    assert "wrote" in err


def test_end_token_ends_the_text(changed, run, weights):
    whole = run(weights, "--prompt", "hello", *GREEDY).out[:-1]
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(weights / "tokenizer.json"))
    [end] = tokenizer.encode(whole[-1]).ids[-1:]
    folder = changed(generation_config={"eos_token_id": [256, end]})
    out = run(folder, "--prompt", "hello", *GREEDY).out[:-1]
    assert whole.startswith(out)
    assert whole.index(whole[-1]) < len(out) <= len(whole)


def test_chat_template_is_applied(changed, run):
    pytest.importorskip("jinja2")
    settings = {"chat_template": TEMPLATE, "eos_token": {"content": "<end>"}}
    folder = changed(tokenizer_config=settings)

    def written(*flags):
        """The text, and the number of tokens before it, on which short texts may not depend."""
        out, err = run(folder, *flags, *GREEDY)
        return out, re.search(r"read (\d+) tokens", err)[1]

    for flags, text in (
        ([], "<user>hi<end><assistant>"),
        (["--chat", "--system", "Be brief."], "<system>Be brief.<end><user>hi<end><assistant>"),
        (["--no-chat"], "hi"),
    ):
        prompt = " hi" if "user" in text else "hi"
        plain = "--no-chat", "--special-tokens", "--prompt"
        assert written("--prompt", prompt, *flags) == written(*plain, text)
    named = [{"name": name, "template": x} for name, x in (("tools", "no"), ("default", TEMPLATE))]
    text = json.dumps(settings | {"chat_template": named})
    (folder / "tokenizer_config.json").write_text(text)
    text = "<user>hi<end><assistant>"
    assert written("--prompt", "hi") == written(*plain, text)


def test_chat_template_has_the_special_tokens(changed, run):
    pytest.importorskip("jinja2")
    import tokenizers

    folder = changed(tokenizer_config={"chat_template": "<end>{{ messages[0].content }}"})
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "<end> $A", special_tokens=[("<end>", tokenizer.token_to_id("<end>"))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    chat = run(folder, "--prompt", "hi", *GREEDY)
    assert chat.out == run(folder, "--no-chat", "--prompt", "hi", *GREEDY).out
    assert "read 3 tokens" in chat.err


NAMES = ["<end>", "<<end>end>", "a<end>\n<end> b", "\ufdd0<end>"]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_name_of_a_special_token_in_a_chat_is_text(name, normalized, changed):
    """Only the template writes special tokens; the letters of a message stay as they are."""
    pytest.importorskip("jinja2")
    folder = changed(tokenizer_config={"chat_template": TEMPLATE, "eos_token": "<end>"})
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][0]["normalized"] = normalized
    (folder / "tokenizer.json").write_text(json.dumps(content))
    words = FromFolder(folder)
    letters = Bytes().encode(f"<system>{name}"), Bytes().encode(f"<user>{name}")
    chat = words.encode_chat(f" {name}", name)
    text = [words.encode(bytes(x).decode()) for x in letters]
    assert chat == [*text[0], 256, *text[1], 256, *words.encode("<assistant>")]
    assert 256 not in text[0] + text[1]
    # The next chat is none the wiser.
    assert words.encode_chat("a", None).count(256) == 1


def test_name_of_a_special_token_in_a_prompt_is_text(weights, run, refused, changed):
    for flags, tokens, said in (([], 6, True), (["--special-tokens"], 2, False)):
        _, err = run(weights, "--prompt", "a<end>", *flags, "--tokens", "1")
        assert f"read {tokens} tokens" in err
        assert ("<end> in a prompt is text: --special-tokens" in err) == said
    folder = changed(tokenizer_config={"chat_template": TEMPLATE})
    assert "must come without a chat" in refused(folder, "--prompt", "a", "--special-tokens")


def test_prompt_ends_without_what_ends_texts(changed):
    """A tokenizer may begin and end texts; a prompt is to be continued."""
    import tokenizers

    folder = changed()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    both = tokenizers.processors.TemplateProcessing(
        "<end> $A <end>", special_tokens=[("<end>", 256)]
    )
    tokenizer.post_processor = both
    tokenizer.save(str(folder / "tokenizer.json"))
    words = FromFolder(folder)
    assert words.encode("a") == [256, *words.documents(["a"])[0][1:-1]]
    assert words.documents(["a"])[0][-1] == 256


# What transformers 5.24 renders, with the system's words "s" and the user's "hé\n".
RENDERED = {
    "{{ {'b': 'é<', 'a': 1} | tojson }}": '{"b": "é<", "a": 1}',
    "{{ {'b': 'é', 'a': [1]} | tojson(ensure_ascii=True, sort_keys=True) }}": (
        '{"a": [1], "b": "\\u00e9"}'
    ),
    "{{ [1, {'a': 2}] | tojson(indent=1, separators=(',', ':')) }}": '[\n 1,\n {\n  "a":2\n }\n]',
    "{% set x = 1 %}{% generation %}{{ messages[1].content }}{% set x = 2 %}{% endgeneration %}"
    "{{ x }}": "hé\n1",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}"
    "{% endfor %}": "user",
    "{% if tools is none and documents is none and add_generation_prompt %}x{% endif %}": "x",
    "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ add_bos_token is defined }}": (
        "<end>FalseFalse"
    ),
    "{% for m in messages %}\n  {% if true %}\n  {{ m.content }}\n  {% endif %}\n{% endfor %}\n": (
        "  s\n  hé\n\n"
    ),
    "{{ strftime_now('%%') }}": "%",
}


@pytest.mark.parametrize("template", RENDERED)
def test_template_renders_as_in_transformers(template, changed):
    pytest.importorskip("jinja2")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hé\n"}]
    tokens = {"bos_token": None, "eos_token": {"content": "<end>"}, "add_bos_token": True}
    folder = changed(tokenizer_config={"chat_template": template, **tokens})
    assert FromFolder(folder).chat(messages) == RENDERED[template]


def test_template_files_come_before_the_settings(changed, refused):
    pytest.importorskip("jinja2")
    folder = changed(tokenizer_config={"chat_template": [{"name": "rag", "template": "r"}]})
    assert "must have a chat template named default; got rag" in refused(folder, "--prompt", "a")
    # Without a chat no template is needed.
    assert FromFolder(folder).encode("a")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    assert "named default; got tool_use" in refused(folder, "--prompt", "a")
    (folder / "chat_template.jinja").write_text("«{{ eos_token }}»", encoding="utf-8")
    assert FromFolder(folder).chat([]) == "«»"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    assert "the chat templates of" in refused(folder, "--prompt", "a")


@pytest.mark.parametrize("given", [{"default": "t"}, [{"template": "t"}]])
def test_template_of_another_form_is_refused(given, changed, refused):
    folder = changed(tokenizer_config={"chat_template": given})
    assert "must be text, or a list of names and templates" in refused(folder, "--prompt", "a")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_file_of_prompts_has_one_in_each_line(end, tmp_path, monkeypatch):
    """Other characters that end lines for Python are text; an editor's first mark is none."""
    wanted = ["first", "the\u2028second\x85 \x1c", "third\x0c", "\rfourth é"]
    text = "\ufeff" + end.join([*wanted[:2], "", *wanted[2:]]) + end
    (tmp_path / "prompts").write_text(text, encoding="utf-8", newline="")
    monkeypatch.setattr("sys.stdin", io.StringIO(text, newline=""))
    for name in (tmp_path / "prompts", pathlib.Path("-")):
        assert read_prompts(argparse.Namespace(prompt=None, prompts=name)) == wanted


def test_locale_without_letters_changes_nothing(changed, tmp_path, capfd):
    """Files and flags are UTF-8; letters that the terminal lacks are shown by their numbers."""
    pytest.importorskip("jinja2")
    folder = changed(tokenizer_config={"chat_template": "«{{ messages[0].content }}»"})
    (tmp_path / "prompts").write_text("世é", encoding="utf-8")
    command = [sys.executable, generate.__file__, folder]
    command += ["--prompt", "é", "--prompts", tmp_path / "prompts", "--tokens", "1"]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = children.run(command, env={**os.environ, **locale}, cwd=ROOT)
    out, err = capfd.readouterr()
    assert done.returncode == 0, err
    # Two letters around each prompt, of two bytes each.
    assert f"read {2 + 4 + 5 + 4} tokens" in err
    assert "# 2 of 2: '\\u4e16\\xe9'\n" in out


def test_folder_says_how_tokens_are_drawn(changed, run):
    asked = {"do_sample": True, "temperature": 0.7, "top_k": 3, "top_p": 0.9}
    folder = changed(generation_config=asked | {"repetition_penalty": 1.1})
    flags = "--temperature", 0.7, "--top-k", 3, "--top-p", 0.9
    out, err = run(folder, "--prompt", "hello")
    assert out == run(folder, "--prompt", "hello", *flags).out
    assert "asks for repetition_penalty: not applied" in err
    # Other libraries write 0 for all tokens, and draw only if asked to.
    path = folder / "generation_config.json"
    for content, flags in (
        (asked | {"top_k": 0}, ["--temperature", 0.7, "--top-p", 0.9]),
        (asked | {"do_sample": False}, []),
    ):
        path.write_text(json.dumps(content))
        out = run(folder, "--prompt", "hello").out
        path.unlink()
        assert out == run(folder, "--prompt", "hello", *flags).out


def test_text_ends_or_slides_where_the_context_is_full(changed, run, refused):
    """A sliding text keeps what the chat template puts before the prompt."""
    pytest.importorskip("jinja2")
    folder = changed(tokenizer_config={"chat_template": TEMPLATE, "eos_token": "<end>"})
    flags = "--temperature", 0, "--tokens", 200, "--system", "Be brief.", "--prompt"
    _, err = run(folder, *flags, "hi", "--prompt", "x" * 85)
    for row in (1, 2):
        assert f"text {row} of 2 ended because it filled the context of 128 tokens; --when" in err
    assert f"wrote {128 - 38 + 128 - 121} tokens" in err
    _, err = run(folder, *flags, "hi", "--when-full", "slide")
    assert "beyond 128 tokens, a text goes on from its first 24 and the newer half of the" in err
    assert "wrote 199 tokens" in err
    assert "ended" not in err
    flags = "--prompt", "a", "--when-full", "slide", "--system", "x" * 128
    assert "--system must be from 0 to 127 tokens, fewer than the" in refused(folder, *flags)


# --------------------------------------------------------------------------------- mistakes


def test_folder_that_is_none_is_refused(refused, weights, changed, tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("missing", "file"):
        assert "RUN_OR_FOLDER must be a folder; got" in refused(tmp_path / name)
    assert "RUN_OR_FOLDER must have config.json and model.safetensors" in refused(tmp_path)
    folder = changed(tokenizer="{", generation_config="[]")
    assert "must be a JSON object; got other text" in refused(folder, "--prompt", "a")
    (folder / "generation_config.json").unlink()
    assert "must be a tokenizer.json that the package" in refused(folder, "--prompt", "a")


MISTAKES = {
    "": "--prompt must have a character",
    "--prompt a --stop=": "--stop must have a character; got ''",
    "--prompts missing": "--prompts must be text; got missing: no such file",
    "--prompt a --temperature -1": "--temperature must be a finite number of at least 0; got -1",
    "--prompt a --top-p 2": "--top-p must be above 0 and at most 1, or None; got 2",
    "--prompt a --min-p 0": "--min-p must be above 0",
    "--prompt a --chat": "--chat must come with a chat template",
    "--prompt a --attention triton": "--attention must be one that serves the call; got 'triton'",
    "--prompt \udcff": "a text must be UTF-8; got '\\udcff'",
    "--prompt a --devices 3": "--devices must be at most 1, which JAX shows; got 3.",
    "--prompt a --system b": "--system must come with a chat; got none",
    "--prompt a --drafts 2": "--cache, --drafts, --draft and --batch-invariant must come with --re",
    f"--prompt {'a' * 129}": "--prompt must have at most the 128 tokens of the context; got 129",
}


def test_mistakes_end_in_one_sentence(refused, weights, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    said = [refused(weights, *words.split()) for words in MISTAKES]
    assert_none(x for x, part in zip(said, MISTAKES.values(), strict=True) if part not in x)


def test_broken_chat_template_is_named(changed, refused):
    pytest.importorskip("jinja2")
    folder = changed(tokenizer_config={"chat_template": "{% if %}"})
    assert "must be one that jinja2 renders" in refused(folder, "--prompt", "a")
    template = "{{ raise_exception('no') }}"
    (folder / "chat_template.jinja").write_text(template)
    assert "the chat template must take the messages; got 'no'" in refused(folder, "--prompt", "a")
    # A template is a program, which may fail in any way.
    for template in (
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{{ messages | tojson(other=1) }}",
        "{{ messages[0].content.nothing.more }}",
        "{% generation %}",
        "{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now(1) }}",
    ):
        (folder / "chat_template.jinja").write_text(template)
        assert "must be one that jinja2 renders; got " in refused(folder, "--prompt", "a")


def test_help_shows_defaults(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "most tokens of each text (default: 200)" in text
    assert "Defaults are in the folder" in text


# --------------------------------------------------------------------------------- streamed text


def streamed(text, stops=(), prompt="é"):
    """The pieces of a text, whose bytes come one at a time."""
    stream = TextStream(Bytes().decode, Bytes().encode(prompt), stops)
    pieces = []
    for byte in text.encode():
        before = stream.text
        stream.add(byte)
        pieces.append(stream.text[len(before) :])
        if stream.stopped:
            break
    stream.finish()
    return pieces, stream.text


def test_stream_shows_whole_characters():
    assert streamed("aß😀b") == (["a", "", "ß", "", "", "", "😀", "b"], "aß😀b")


def test_stream_holds_what_may_be_a_stop_string():
    assert streamed("ab</c</s>x", ["</s>"])[1] == "ab</c"
    assert streamed("ab</", ["</s>"]) == (["a", "b", "", ""], "ab</")
    assert streamed("one two", [" t", "e"])[1] == "on"


def test_stream_of_damaged_bytes_goes_on():
    stream = TextStream(Bytes().decode, [255], [])
    for byte in [200] * 99:
        stream.add(byte)
    assert len(stream.text) > 50
    stream.add(97)
    stream.finish()
    assert stream.text == "\ufffd" * 99 + "a"


def byte_tokens(kind):
    """A tokenizer whose tokens are often a part of a letter."""
    tokenizers = pytest.importorskip("tokenizers")
    decoders, models = tokenizers.decoders, tokenizers.models
    before = tokenizers.pre_tokenizers
    if kind == "byte-level":
        alphabet = sorted(before.ByteLevel.alphabet())
        # The last byte of é, and the first of the same.
        merges = [("©", "Ã"), ("Ġ", "ä")]
        names = [*alphabet, *(a + b for a, b in merges)]
        tokenizer = tokenizers.Tokenizer(models.BPE({x: n for n, x in enumerate(names)}, merges))
        tokenizer.pre_tokenizer = before.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
    names = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "a", "世"]
    model = models.BPE(
        {x: n for n, x in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    if kind == "metaspace":
        tokenizer.pre_tokenizer = before.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        replaced, strip = tokenizers.normalizers.Replace(" ", "▁"), []
        tokenizer.normalizer = replaced
        if kind == "llama":
            prepended = tokenizers.normalizers.Prepend("▁")
            tokenizer.normalizer = tokenizers.normalizers.Sequence([prepended, replaced])
            strip = [decoders.Strip(" ", 1, 0)]
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma", "metaspace"])
def test_stream_begins_at_a_letter(kind):
    """Wherever a text is cut, between letters or inside of one, no letter is lost or damaged."""
    tokenizer, rng = byte_tokens(kind), random.Random(0)

    def decode(tokens):
        return tokenizer.decode(list(tokens))

    letters = ["a世", "界🙂", "ééé", "é", " ", "  ", "\ufffd", " 不"]
    for text in ["你好世界", "🙂🙂🙂 a", *("".join(rng.choices(letters, k=9)) for _ in range(60))]:
        tokens = tokenizer.encode(text).ids
        for cut in range(len(tokens) + 1):
            stream = TextStream(decode, tokens[:cut], ())
            for token in tokens[cut:]:
                stream.add(token)
            stream.finish()
            whole = decode(tokens)
            given = whole[: len(whole) - len(stream.text)]
            assert given + stream.text == whole
            # A letter is new if one of its tokens is.
            assert given.rstrip("\ufffd").startswith(decode(tokens[:cut]).rstrip("\ufffd"))
            assert stream.text or cut == len(tokens) or not decode(tokens[cut:]).strip(" \ufffd")


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma", "metaspace"])
def test_stream_ends_inside_of_a_letter(kind):
    tokenizer = byte_tokens(kind)
    tokens = tokenizer.encode("aé🙂").ids[:-2]
    stream = TextStream(lambda x: tokenizer.decode(list(x)), tokens[:1], ())
    for token in tokens[1:]:
        stream.add(token)
    assert stream.text == ("aé" if kind in ("llama", "metaspace") else "é")
    stream.finish()
    assert stream.text.strip("aé").strip("\ufffd") == ""
    assert 1 <= stream.text.count("\ufffd") <= 2


def test_stream_keeps_a_space_after_a_special_token():
    tokenizer = byte_tokens("llama")
    stream = TextStream(lambda x: tokenizer.decode(list(x)), tokenizer.encode("a").ids, ())
    for token in tokenizer.encode("a<s>").ids[-1:] + tokenizer.encode("a").ids:
        stream.add(token)
    stream.finish()
    assert stream.text == " a"


# --------------------------------------------------------------------------------- engine


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def chat(changed, capsys, monkeypatch):
    """A function that chats with a model, whose guesses are its own; it returns the folder, too."""
    folder = changed(tokenizer_config={"chat_template": TEMPLATE, "eos_token": "<end>"})
    words = "--temperature", "0", "--tokens", "6", "--draft", str(folder), "--drafts", "2"
    monkeypatch.setattr(requests, "PAGE_SIZE", 8)

    def chat(lines):
        monkeypatch.setattr("sys.stdin", Terminal(lines))
        main([str(folder), *words])
        return folder, capsys.readouterr().out

    return chat


def test_chat_reads_each_turn_once(chat, monkeypatch):
    """Each answer is as for the whole chat, of which the engine has the turns before."""
    real, read = Scheduler.plan, []

    def plan(*args):
        parts = real(*args)
        read.extend(part.start for part in parts if part.admitted)
        return parts

    monkeypatch.setattr(Scheduler, "plan", plan)
    folder, out = chat("hello, a chat\n\nand this\n")
    words, model = FromFolder(folder), Decoder.from_pretrained(folder)
    messages, wanted, lengths = [], "", []
    for line in ("hello, a chat", "and this"):
        messages.append({"role": "user", "content": line})
        tokens = words.encode_messages(messages)
        made = [token for [token] in Generation(model, [tokens], 6, Sampling(0))]
        text = words.decode(made)
        messages.append({"role": "assistant", "content": text})
        wanted, lengths = wanted + text + "\n", [*lengths, len(tokens)]
    assert out == wanted
    assert read[0] == 0 and len(read) == 2 and read[1] >= lengths[0] // 8 * 8


def test_chat_that_is_too_long_is_refused(chat):
    with pytest.raises(SystemExit, match=r"a chat must have at most 128 tokens; got 2..: begin"):
        chat("a" * 200 + "\n")


def test_interrupt_ends_the_answer_alone(chat, monkeypatch):
    whole, real, left = chat("hello\n")[1], Engine.step, [3]

    def step(engine):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return real(engine)

    monkeypatch.setattr(Engine, "step", step)
    first, second, *rest = chat("hello\nhello\n")[1].split("\n")
    assert not rest[1:] and whole.startswith(first) and second


def test_requests_are_answered(changed, run, tmp_path):
    folder = changed(tokenizer_config={"chat_template": TEMPLATE, "eos_token": "<end>"})
    lines = [
        {"prompt": "hello", "id": "a"},
        {"messages": [{"role": "user", "content": "hello"}], "samples": 2, "temperature": 1},
        {"prompt": "hello", "max_tokens": 3, "id": "b"},
        {"messages": [{"role": x, "content": "a"} for x in ("user", "assistant", "user")]},
    ]
    path, out = tmp_path / "requests", tmp_path / "out"
    # As some editors write it.
    path.write_text("\r\n\r\n".join(map(json.dumps, lines)), encoding="utf-8-sig", newline="")
    assert run(folder, "--requests", path, "--out", out, *GREEDY).out == ""
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    named = {(x["id"], x["sample"]): x for x in answers}
    assert set(named) == {("a", 0), (3, 0), (3, 1), ("b", 0), (7, 0)} and len(answers) == 5
    alone = run(folder, "--prompt", "hello", *GREEDY).out.rstrip("\n")
    assert named["a", 0]["text"] == alone
    assert (named["b", 0]["tokens"], named["b", 0]["end"]) == (3, "length")
    assert named[3, 0]["text"] != named[3, 1]["text"]
    assert all(x["log_probability"] < 0 for x in answers)
    given = path.read_text(encoding="utf-8")
    piped = run(folder, "--requests", "-", "--out", "-", *GREEDY, stdin=given).out
    assert piped == out.read_text()
    with pytest.raises(ValueError, match=r"a text must be UTF-8; got '\\ud800'"):
        FromFolder(folder).encode_messages([{"role": "user", "content": "\ud800"}])


@pytest.mark.parametrize(
    ("line", "words", "said"),
    [
        ("{", [], "line 1 of {path}: a request must be JSON in UTF-8, like"),
        (
            '{"prompt": "a", "messages": []}',
            [],
            "line 1 of {path}: a request must be JSON in UTF-8",
        ),
        ('{"prompt": ""}', [], "line 1 of {path}: `prompt` must be a text with a character."),
        ('{"prompt": "a", "top": 3}', [], "line 1 of {path}: `top` must be one of id, prompt"),
        ('{"prompt": "a", "top_k": 0}', [], "line 1 of {path}: `top_k` must be an int of at least"),
        ('{"messages": []}', [], "line 1 of {path}: `messages` must come with a chat template."),
        ("\n", [], "--requests must have a request; got none in {path}."),
        ('{"prompt": "a"}', ["--prompt", "b"], "--requests must come without --prompt"),
        (
            '{"prompt": "a", "stop": null}',
            [],
            "line 1 of {path}: `stop` must be a list of texts wit",
        ),
        (
            '{"prompt": "a"}',
            ["--out", "{path}"],
            "--out must be another file than --requests; got {path} for both.",
        ),
        ('{"prompt": "a"}', ["--draft", "no"], "--draft must be a folder; got no."),
        ('{"prompt": "a"}', ["--batch-invariant"], "--batch-invariant must be False where it does"),
        ('{"prompt": "a"}', ["--out", "no/x"], "--out must be a file to write; got no/x: no such"),
        ("[" * 100_000, [], "line 1 of {path}: a request must be JSON in UTF-8, like"),
        (
            '{"prompt": "a", "id": "\\ud800"}',
            [],
            "line 1 of {path}: a request must be JSON in UTF-8",
        ),
    ],
)
def test_wrong_request_is_refused(weights, refused, tmp_path, line, words, said):
    path = tmp_path / "requests"
    path.write_text(line)
    words = [word.format(path=path) for word in words]
    found = refused(weights, "--requests", path, *words)
    assert found.startswith(said.format(path=path))
