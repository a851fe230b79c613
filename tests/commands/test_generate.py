"""`scripts/generate.py`: text from runs and from folders of weights."""

import io
import json
import re
import shutil

import jax
import numpy as np
import pytest
from support.decoder_files import make

from models.gpt import GPT, generate
from scripts import train_gpt
from scripts.generate import main
from scripts.generation.tokens import Bytes, TextStream
from scripts.training.checkpoints import Checkpoints


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


def greedy(config, prompt, count):
    """Return the most likely text, by the GPT itself."""
    init, _, graphdef = train_gpt.model_functions(config.model, config.seed)
    checkpoints = Checkpoints(train_gpt.RunFolder(config, "").path / "checkpoints")
    params = checkpoints.parameters(config.steps, jax.eval_shape(init))
    model = train_gpt.nnx.merge(graphdef, params)
    assert isinstance(model, GPT)
    tokens = np.frombuffer(prompt.encode(), np.uint8)[None].astype(np.int32)
    text = generate(model, jax.random.key(0), tokens, count, temperature=0.0)
    return bytes(np.asarray(text[0, len(prompt) :], np.uint8)).decode(errors="replace")


def test_run_needs_no_flag_repeated(finished, run):
    config, _ = finished
    out, err = run(config.out_dir, "--prompt", "a fig", "--temperature", 0, "--tokens", 7)
    assert out == greedy(config, "a fig", 7) + "\n"
    assert f"step {config.steps} of the run" in err
    assert "a second)" in err


def test_run_has_its_own_prompt_and_drawing(finished, run):
    config, _ = finished
    drawn = "--temperature", config.temperature, "--top-k", config.top_k
    given = run(config.out_dir, "--tokens", 9, "--prompt", config.prompt, *drawn).out
    assert run(config.out_dir, "--tokens", 9).out == given
    others = {run(config.out_dir, "--tokens", 9, "--seed", n).out for n in range(3)}
    assert len(others) == 3
    assert given in others


def test_damaged_checkpoint_is_skipped(finished, run, refused, tmp_path):
    config, _ = finished
    folder = tmp_path / "run"
    shutil.copytree(config.out_dir, folder)
    (folder / "checkpoints" / str(config.steps) / "metrics.jsonl").write_text("")
    _, err = run(folder, "--tokens", 1)
    assert f"the checkpoint of step {config.steps} is damaged" in err
    assert "step 10 of the run" in err
    shutil.rmtree(folder / "checkpoints")
    assert "must have a whole checkpoint; got none" in refused(folder)
    (folder / "run.json").write_text("{}")
    assert "must be one that train_gpt.py has written" in refused(folder)


# --------------------------------------------------------------------------------- folders

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder with a tokenizer of bytes, whose 257th token ends a text."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("weights") / "model"
    make("llama", vocab_size=257, max_position_embeddings=128).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: n for n, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
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
        assert written("--prompt", prompt, *flags) == written("--no-chat", "--prompt", text)
    named = [{"name": name, "template": x} for name, x in (("tools", "no"), ("default", TEMPLATE))]
    text = json.dumps(settings | {"chat_template": named})
    (folder / "tokenizer_config.json").write_text(text)
    text = "<user>hi<end><assistant>"
    assert written("--prompt", "hi") == written("--no-chat", "--prompt", text)


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
    assert "must have a tokenizer.json that the package" in refused(folder, "--prompt", "a")


MISTAKES = {
    "": "--prompt must have a character",
    "--prompt=": "--prompt must have a character",
    "--prompt a --stop=": "--stop must have a character; got ''",
    "--prompts missing": "--prompts must be text; got missing: no such file",
    "--prompt a --temperature -1": "--temperature must be a finite number of at least 0; got -1",
    "--prompt a --top-p 2": "--top-p must be above 0 and at most 1, or None; got 2",
    "--prompt a --min-p 0": "--min-p must be above 0",
    "--prompt a --chat": "--chat must come with a chat template",
    "--prompt a --attention triton": "--attention must be one that serves the call; got 'triton'",
    "--prompt \udcff": "--prompt must be UTF-8; got '\\udcff'",
    "--prompt a --devices 3": "--devices must be at most 1, which JAX shows; got 3.",
    "--prompt a --system b": "--system must come with a chat; got none",
    f"--prompt {'a' * 129}": "--prompt must have at most the 128 tokens of the context; got 129",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistake_ends_in_one_sentence(words, refused, weights, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert MISTAKES[words] in refused(weights, *words.split())


def test_broken_chat_template_is_named(changed, refused):
    pytest.importorskip("jinja2")
    folder = changed(tokenizer_config={"chat_template": "{% if %}"})
    assert "must be one that jinja2 renders" in refused(folder, "--prompt", "a")
    template = "{{ raise_exception('no') }}"
    (folder / "chat_template.jinja").write_text(template)
    assert "the chat template must take the prompt; got 'no'" in refused(folder, "--prompt", "a")


def test_help_shows_defaults(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "most tokens of each text (default: 200)" in text
    assert "Defaults are those of the run" in text


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
    for byte in [200] * 20 + [97]:
        stream.add(byte)
    stream.finish()
    assert stream.text == "\ufffd" * 20 + "a"
