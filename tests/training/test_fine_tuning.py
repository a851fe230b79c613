"""The training script tunes a folder of weights, on packed documents, and saves the copy."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import cases
from support.decoder_files import make
from support.tiny_run import TINY, checkpoint_steps, metrics, one_device

import models.loss
from models import Decoder, checkpoint, export, lora
from models.errors import UserError
from models.loss import next_token_loss
from models.train import main
from models.training import loop
from models.training.loop import train
from models.training.report import work_of
from models.training.settings import config_from_flags, model_config
from models.training.text import held_out_batches, load_text, training_batch
from scripts import generate, prepare_tokens

pytestmark = pytest.mark.usefixtures("compile_once")
SIZES = dict(vocab_size=320, max_position_embeddings=64, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def folders(corpus, tmp_path_factory):
    """Weights with a tokenizer, and the corpus in their tokens."""
    pytest.importorskip("tokenizers")
    weights, tokens = (tmp_path_factory.mktemp("tuning") / x for x in ("weights", "tokens"))
    prepare_tokens.main([str(corpus), "--vocab-size", "300", "--out-dir", str(tokens)])
    make("qwen2", dtype="bfloat16", **SIZES).save_pretrained(weights)
    shutil.copy(tokens / "tokenizer.json", weights)
    (weights / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    # Not for publishing.
    (weights / "notes.json").write_text("{}")
    (weights / "merges.txt").symlink_to(weights / "notes.json")
    return weights, tokens


@pytest.fixture
def tuning(folders, tmp_path):
    """The settings of a run that tunes."""
    weights, tokens = map(str, folders)
    paths = dict(init_from=weights, data=tokens, out_dir=str(tmp_path / "run"))
    return dataclasses.replace(TINY, **paths)


def functions_of(config):
    """The loss of a run's model, and its parameters."""
    model = model_config(config, 0)
    loss_fn = loop.model_functions(model, config.seed, one_device())[1]
    return lambda *args: loss_fn(*args)[0], loop.first_params(config, model, one_device())


# --------------------------------------------------------------------------------- packed documents


def mean_loss(model, rows):
    """The mean cross-entropy of (given, next) pairs of lists, each a row of its own.

    Rows of one length are one program. A causal model looks at nothing of their padding.
    """
    given = np.zeros((len(rows), max(len(x) for x, _ in rows)), np.int32)
    for row, (tokens, _) in zip(given, rows, strict=True):
        row[: len(tokens)] = tokens
    log_probs = np.asarray(jax.nn.log_softmax(model(jnp.asarray(given))))
    return np.mean(
        [
            -x[i, token]
            for x, (_, next_) in zip(log_probs, rows, strict=True)
            for i, token in enumerate(next_)
        ]
    )


@pytest.mark.parametrize("family", cases.default(["gpt2"], ["qwen2", "gemma2", "gpt2"]))
def test_packed_documents_do_not_see_each_other(family):
    model = make(family)
    tokens = jnp.asarray([[5, 7, 0, 9, 2, 0, 8, 0, 0, 4, 6, 1]])
    # One document has the end token inside, as a chat has at the end of a turn.
    numbers = jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 3]], jnp.int32)
    documents = [
        ([5, 7, 0], [7, 0, 9]),
        ([9, 2, 0, 8, 0], [2, 0, 8, 0, 0]),
        ([0], [4]),
        ([4, 6], [6, 1]),
    ]
    assert next_token_loss(model, tokens, numbers) == pytest.approx(
        mean_loss(model, documents), rel=1e-5
    )
    whole = [(tokens[0, :-1].tolist(), tokens[0, 1:].tolist())]
    assert next_token_loss(model, tokens, None) == pytest.approx(mean_loss(model, whole), rel=1e-5)


@pytest.mark.parametrize("at_once", cases.default([5], [1, 4, 5]))
def test_loss_by_parts_has_the_same_gradient(at_once, monkeypatch, tuning):
    text = load_text(tuning)
    batch = training_batch(text, 1, tuning, one_device())
    batch = jax.tree.map(lambda x: x[0], batch)
    loss_fn, params = functions_of(tuning)
    whole = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    monkeypatch.setattr(models.loss, "LOGITS_AT_ONCE", at_once)
    monkeypatch.setattr(models.loss, "SMALL", 0)
    parts = jax.jit(jax.value_and_grad(functions_of(tuning)[0]))(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), parts, whole)


@pytest.mark.parametrize(("family", "rows"), [("gpt2", 31 + 32), ("qwen3", 31)])
def test_work_leaves_embeddings_out(family, rows):
    """Scores cost by the width of all heads, which qwen3 has above that of the stream."""
    model = make(family)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    count = sum(x.size for x in jax.tree.leaves(params)) - 16 * rows
    width = {"gpt2": 16, "qwen3": 24}[family]
    work = work_of(model.config, 12, params, 3, "cpu")
    assert work.tokens == 36
    assert work.flops_per_token == 6 * count + 12 * 2 * width * 12 / 2


# ---------------------------------------------------------------------------------------- the run


def test_run_tunes_and_saves_a_copy(tuning, folders, capsys):
    checked = dataclasses.replace(tuning, gradient_check=True, attention="xla", remat=True)
    result = train(checked)
    assert 0 < result.gradient_error < 1e-5
    losses = [line["loss"] for line in metrics(checked)]
    assert losses[-1] < losses[0] - 0.1
    copy = Path(checked.out_dir, "weights")
    said = capsys.readouterr()
    assert f"of step 12, the lowest held-out loss, are in {copy}, in bfloat16" in said.out
    assert "the weights have no merges.txt, because" in said.err
    left_out = {"notes.json", "merges.txt"}
    assert {p.name for p in copy.iterdir()} == {p.name for p in folders[0].iterdir()} - left_out
    model = Decoder.from_pretrained(copy, dtype="float32")
    assert model.embedding.weight.dtype == jnp.bfloat16
    text = load_text(checked)
    tokens, numbers, _ = held_out_batches(text, checked, one_device())
    pairs = zip(tokens.astype(jnp.int32), numbers, strict=True)
    tuned = np.mean([next_token_loss(model, *pair) for pair in pairs])
    assert tuned == pytest.approx(result.val_loss, rel=1e-2)
    bits = result.val_loss / np.log(2) * len(text.held_out.tokens) / text.bytes
    assert result.bits_per_byte == pytest.approx(bits)
    generate.main([checked.out_dir, "--prompt", "a fig", "--tokens", "3"])
    assert capsys.readouterr().out


def test_gradient_check_leaves_out_key_biases(tuning, tmp_path):
    """The gradient of a key bias is zero without rotary positions, and its error all rounding."""
    make("gpt2", vocab_size=320).save_pretrained(tmp_path / "gpt2")
    config = dataclasses.replace(tuning, attention="xla", init_from=str(tmp_path / "gpt2"))
    text, model = load_text(tuning), model_config(config, 0)
    error, name = loop.gradient_error(config, model, text, one_device())
    assert 0 < error < 1e-5, name


def test_tiny_rate_leaves_the_weights(tuning, folders):
    train(dataclasses.replace(tuning, learning_rate=1e-12, steps=3, warmup_steps=0))
    before, after = (
        checkpoint.open_file(x / "model.safetensors")
        for x in (folders[0], Path(tuning.out_dir, "weights"))
    )
    assert before.keys() == after.keys()
    for name, x in before.items():
        np.testing.assert_array_equal(x, after[name])


@pytest.mark.extended  # test_train_resume.py has the same of a run from scratch.
def test_killed_tuning_resumes_to_the_same_bits(tuning, monkeypatch):
    whole = dataclasses.replace(tuning, out_dir=tuning.out_dir + "-whole")
    train(whole)
    real = loop.training_batch

    def training_batch(text, step, *args):
        if step == 7:
            raise KeyboardInterrupt
        return real(text, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "training_batch", training_batch)
        with pytest.raises(KeyboardInterrupt):
            train(tuning)
    assert not Path(tuning.out_dir, "weights").exists()
    with pytest.raises(SystemExit, match=r"must have weights/, which a run writes"):
        generate.main([tuning.out_dir, "--prompt", "a"])
    train(tuning)
    assert metrics(tuning) == metrics(whole)
    assert checkpoint_steps(tuning) == [10, 12]
    files = [Path(x.out_dir, "weights", "model.safetensors") for x in (tuning, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()
    # A tuned run is a folder of weights, too.
    again = dataclasses.replace(
        tuning, init_from=tuning.out_dir, out_dir=tuning.out_dir + "-again", learning_rate=1e-12
    )
    assert train(again).val_loss == pytest.approx(train(whole).val_loss, rel=1e-2)


def test_new_model_on_tokens_has_their_tokenizer(config, folders, capsys):
    on_tokens = dataclasses.replace(config, data=str(folders[1]))
    train(on_tokens)
    generate.main([config.out_dir, "--prompt", "a fig", "--tokens", "3"])
    assert capsys.readouterr().out
    written = Path(config.out_dir, "weights")
    tensors = checkpoint.open_file(written / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape[0] == 320
    assert json.loads((written / "config.json").read_text())["vocab_size"] == 320
    # Another run may begin with it on the same tokens.
    more = dataclasses.replace(on_tokens, init_from=config.out_dir, out_dir=config.out_dir + "-2")
    assert train(dataclasses.replace(more, steps=3, warmup_steps=0)).step == 3


# --------------------------------------------------------------------------------- adapters, export


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.fixture
def adapting(tuning):
    """The settings of a run that tunes an adapter; its weights are bfloat16."""
    return dataclasses.replace(
        tuning, lora_rank=2, lora_targets="q_proj,down_proj", learning_rate=0.1
    )


def test_adapter_alone_is_tuned(adapting, folders, capsys):
    before = bytes_of(folders[0])
    result = train(adapting)
    assert bytes_of(folders[0]) == before
    losses = [line["loss"] for line in metrics(adapting)]
    # `b` is zero at the first update, and the loss that of the weights.
    plain = dataclasses.replace(adapting, lora_rank=None, lora_targets=None, out_dir="unused")
    model = model_config(plain, 0)
    loss_fn = loop.model_functions(model, 0, one_device())[1]
    batch = training_batch(load_text(plain), 1, plain, one_device())
    first, _ = loop.mean_gradient(loss_fn, loop.first_params(plain, model, one_device()), batch)
    assert losses[0] == pytest.approx(float(first), rel=1e-6)
    assert losses[-1] < losses[0] - 0.02
    run, (said, _) = Path(adapting.out_dir), capsys.readouterr()
    assert "adapter    288 parameters of rank 2: down_proj, q_proj" in said
    # What `Decoder` reads: the weights with the adapter in them, and these two apart.
    base = Decoder.from_pretrained(folders[0], param_dtype="float32")
    config, params = base.config, nnx.to_pure_dict(nnx.state(base, nnx.Param))
    adapter, alpha = lora.load(run / "adapter", config, params)
    assert alpha == 4
    # A checkpoint has nothing else.
    jax.tree.map(np.testing.assert_array_equal, export.read_params(run, 12), adapter)
    names = {name.rpartition(".")[2] for name in adapter}
    assert names == {"q_proj", "down_proj"}
    sums = checkpoint.leaves_by_path(lora.merged(config, params, adapter, alpha))
    tuned = Decoder.from_pretrained(run / "weights")
    for path, x in checkpoint.leaves_by_path(nnx.to_pure_dict(nnx.state(tuned, nnx.Param))).items():
        np.testing.assert_array_equal(x, sums[path].astype(jnp.bfloat16), err_msg=path)
        same = (x == checkpoint.leaves_by_path(params)[path].astype(x.dtype)).all()
        assert same == (not any(y in path for y in ("query/weight", "down/weight"))), path
    assert result.step == 12


@pytest.mark.parametrize("kind", ["tuned", "adapter", "new"])
def test_export_is_the_weights_of_the_run(kind, adapting, folders, tmp_path, capsys):
    config = adapting
    if kind != "adapter":
        config = dataclasses.replace(config, lora_rank=None, lora_targets=None)
    if kind == "new":
        config = dataclasses.replace(config, init_from=None)
    train(dataclasses.replace(config, eval_every=5))
    run = Path(config.out_dir)
    weights = bytes_of(run / "weights")
    # As a run that was killed, which the trainer alone can lock.
    shutil.rmtree(run / "weights")
    assert export.main([config.out_dir, str(tmp_path / "new" / "best")]) == 0
    assert bytes_of(tmp_path / "new" / "best") == weights
    said = capsys.readouterr().out
    assert ("llama" if kind == "new" else "qwen2") in said
    other = next(x for x in checkpoint_steps(config) if f"of step {x} are" not in said)
    assert export.main([config.out_dir, str(tmp_path / "other"), "--step", str(other)]) == 0
    found = bytes_of(tmp_path / "other")
    assert found.keys() == weights.keys()
    assert [name for name, x in found.items() if x != weights[name]] == ["model.safetensors"]


EXPORTS = {
    "RUN FULL": "FOLDER must be new or empty; got ",
    "RUN FILE": "FOLDER must be new or empty; got ",
    "FULL NEW": "SOURCE must be the folder of a run of models.train, or one with config.json; got ",
    "WEIGHTS NEW --step 3": "--step must come with a run of models.train as SOURCE; got ",
    "RUN NEW --adapter FULL": "--adapter must come with weights that are no run as SOURCE; got ",
    "RUN NEW --step 3": "--step must be one of 10, 12; got 3.",
    "RUN NEW --step 10": "the checkpoint of step 10 must be whole; got ",
    "WEIGHTS NEW --adapter FULL": "must have adapter_config.json and adapter_model.safetensors; g",
    "LOST NEW": "SOURCE must have the weights that it tuned in 'nowhere', as it found them; got ",
    "RUN NEW": "No space left on device: '",
}


def test_export_that_fails_leaves_nothing(adapting, folders, tmp_path, capsys, monkeypatch):
    train(dataclasses.replace(adapting, eval_every=12))
    names = dict(RUN="run", LOST="lost", FULL="full", FILE="full/file", NEW="new")
    paths = {name: str(tmp_path / x) for name, x in names.items()} | {"WEIGHTS": str(folders[0])}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    shutil.copytree(paths["RUN"], paths["LOST"])
    settings = json.loads(Path(paths["LOST"], "run.json").read_text())
    Path(paths["LOST"], "run.json").write_text(json.dumps(settings | {"init_from": "nowhere"}))
    (part,) = Path(paths["RUN"], "checkpoints", "10").glob("state/_METADATA")
    part.write_text("{}")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for words, said in EXPORTS.items():
        if words == "RUN NEW":
            monkeypatch.setattr(checkpoint, "write_file", full)
        assert export.main([paths.get(x, x) for x in words.split()]) == 2, words
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("export: error: "), words
        assert said in error, words
        assert {x.name for x in tmp_path.iterdir()} == {"run", "lost", "full"}, words


def test_run_knows_the_config_of_its_weights(adapting, folders, tmp_path, capsys):
    """A run that ended has a copy, which is exported; one that was killed refuses another one."""
    config = dataclasses.replace(adapting, lora_rank=None, lora_targets=None)
    train(config)
    weights, path = Path(config.out_dir, "weights"), folders[0] / "config.json"
    before, text = bytes_of(weights), path.read_text()
    path.write_text(text.replace('"sliding_window": 3', '"sliding_window": 4'))
    assert path.read_text() != text
    with pytest.raises(UserError, match="which differs in the files in `init_from`"):
        train(config)
    assert export.main([config.out_dir, str(tmp_path / "new")]) == 0
    assert bytes_of(tmp_path / "new") == before
    shutil.rmtree(weights)
    assert export.main([config.out_dir, str(tmp_path / "other")]) == 2
    assert "as it found them; got others there" in capsys.readouterr().err
    path.write_text(text)


def test_killed_adapter_resumes_to_the_same_bits(adapting, folders, monkeypatch, capsys):
    whole = dataclasses.replace(adapting, out_dir=adapting.out_dir + "-whole")
    train(whole)
    real = loop.training_batch

    def training_batch(text, step, *args):
        if step == 7:
            raise KeyboardInterrupt
        return real(text, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "training_batch", training_batch)
        with pytest.raises(KeyboardInterrupt):
            train(adapting)
    # The weights that it tunes are in no checkpoint, and must be those of its beginning.
    path = folders[0] / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match="which differs in the files in `init_from`"):
        train(adapting)
    assert export.main([adapting.out_dir, adapting.out_dir + "-new"]) == 2
    assert "as it found them; got others there: put them back." in capsys.readouterr().err
    path.write_bytes(content)
    train(adapting)
    assert metrics(adapting) == metrics(whole)
    for name in ("adapter", "weights"):
        assert bytes_of(Path(adapting.out_dir, name)) == bytes_of(Path(whole.out_dir, name))


# ------------------------------------------------------------------------------------------ flags


def test_weights_have_a_preset_and_their_shape(folders):
    weights, _ = map(str, folders)
    config = config_from_flags({"init_from": weights, "context": 20, "steps": 50})
    assert (config.learning_rate, config.context, config.warmup_steps) == (2e-5, 20, 5)
    model = model_config(config, 0)
    assert (model.num_layers, model.hidden, model.remat) == (2, 24, False)
    assert config_from_flags({"init_from": weights}).context == 64


MISTAKES = [
    ("--num-layers 3", "--num-layers must be left out with weights in --init-from, because their"),
    ("--data TEXTS", "--data must be tokens of the folder in --init-from; got text: run python sc"),
    ("--data OTHER", "--data must be tokens of the folder in --init-from; got other ones in "),
    (
        "--init-from SMALL",
        "--data must be tokens of the folder in --init-from; got 288 different tok",
    ),
    ("--out-dir TOKENS", "--out-dir must be new, or the folder of a run; got "),
    ("--init-from LEARNED --context 33", "--context must be at most 32, which the weights in"),
    (
        "--context 65",
        "--context must be at most 64, which the weights in --init-from have by",
    ),
    ("--init-from BROKEN", "`model_type` must be one of gpt2, llama"),
    ("--init-from CUT", "must be a whole safetensors file; got 0 bytes"),
    ("--init-from EMPTY", "--init-from must have config.json and model.safetensors or "),
    (
        "--lora-rank 2 --lora-targets o_proj,x",
        "--lora-targets must be some of down_proj, gate_proj, k",
    ),
    ("--lora-rank 0", "--lora-rank must be between 1 and"),
    ("--lora-rank 9", "--lora-rank must be at most 8, the smaller size of model.layers.0.self_at"),
    ("--lora-alpha 2", "--lora-alpha must come with --lora-rank; got none."),
    ("--init-from TEXTS", "--init-from must be a folder with config.json, or a run that has end"),
]


@pytest.mark.parametrize(("words", "fragment"), MISTAKES)
def test_mistake_is_one_sentence(words, fragment, folders, corpus, tmp_path, capsys):
    weights, tokens = folders
    other, learned, broken, cut, small, empty = (
        tmp_path / x for x in ("other", "learned", "broken", "cut", "small", "empty")
    )
    if "OTHER" in words:
        shutil.copytree(tokens, other)
        (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + " ")
    make("gpt2").save_pretrained(learned)
    make("qwen2").save_pretrained(small)
    shutil.copytree(weights, broken)
    (broken / "config.json").write_text('{"model_type": "other"}')
    shutil.copytree(weights, cut)
    (cut / "model.safetensors").write_bytes(b"")
    shutil.copytree(weights, empty)
    (empty / "model.safetensors").unlink()
    paths = dict(TEXTS=corpus, OTHER=other, LEARNED=learned, BROKEN=broken, CUT=cut, SMALL=small)
    paths |= dict(EMPTY=empty, TOKENS=tokens)
    flags = [str(paths.get(x, x)) for x in words.split()]
    common = f"--init-from {weights} --data {tokens} --context 12 --batch-size 2".split()
    assert main([*common, "--out-dir", str(tmp_path / "run"), "--no-gradient-check", *flags]) == 2
    error = capsys.readouterr().err
    assert fragment in error
    assert error.count("\n") == 1
