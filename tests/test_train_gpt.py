"""The training script: what it learns, checks and refuses, and how exactly it resumes."""

import dataclasses
import functools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import types
import typing
from pathlib import Path

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import pallas_flash.flax
from models.gpt import GPTConfig
from scripts import train_gpt
from scripts.train_gpt import main, train
from scripts.training import attention
from scripts.training.files import MARK
from scripts.training.memory import check_memory, parameter_count
from scripts.training.mesh import make_layout
from scripts.training.messages import UserError
from scripts.training.process import as_a_process
from scripts.training.run_folder import RunFolder
from scripts.training.settings import (
    PRESETS,
    RANGES,
    TrainConfig,
    config_from_flags,
    flat_config,
    make_parser,
)
from scripts.training.speed import PEAK_FLOPS, Speed, Work, work_of
from scripts.training.text import (
    held_out_batches,
    load_text,
    read_files,
    split_files,
    training_batch,
)

STEPS = 12

# Checkpoints at 5, 10 and the end, so that kills fall before the first and between two.
TINY = TrainConfig(
    model=GPTConfig(
        context=12, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=16, attention="reference"
    ),
    steps=STEPS,
    batch_size=4,
    accumulation=2,
    learning_rate=1e-2,
    warmup_steps=2,
    eval_every=4,
    eval_batches=2,
    log_every=3,
    checkpoint_every=5,
    keep_checkpoints=2,
    gradient_check=False,
    sample_tokens=8,
)


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Nearly all the time would go into compiling one tiny model again and again."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    # JAX looks at the folder once; it may have looked before these tests.
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of a few texts that repeat themselves, which even a tiny model can learn."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "sub").mkdir()
    for i, word in enumerate(["apple", "banana", "cherry", "damson", "elder", "fig", "grape"]):
        (folder / ("sub" if i % 2 else ".") / f"{word}.txt").write_text(f"a {word} a day, " * 40)
    return folder


@pytest.fixture
def config(corpus, tmp_path):
    return dataclasses.replace(TINY, data=str(corpus), out_dir=str(tmp_path / "run"))


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """An uninterrupted run: its settings and its result."""
    out_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    config = dataclasses.replace(TINY, data=str(corpus), out_dir=str(out_dir))
    return config, train(config)


def flags(config, **changes):
    """The command line of a configuration."""
    values = {**flat_config(config), **changes}
    argv = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if name == "vocab_size":
            continue
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            argv += [flag, "auto" if value is None else str(value)]
    return argv


@functools.cache
def one_device():
    return make_layout(TINY)


def metrics(config):
    """The lines of metrics.jsonl without what a clock has measured."""
    lines = [json.loads(x) for x in Path(config.out_dir, "metrics.jsonl").read_text().splitlines()]
    return [{k: line[k] for k in ("step", "loss", "val_loss", "lr")} for line in lines]


def checkpoint_steps(config):
    names = [p.name for p in Path(config.out_dir, "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdigit())


# ------------------------------------------------------------------------------------------ the run


def test_the_loss_falls_and_the_result_says_so(finished):
    config, result = finished
    lines = metrics(config)
    assert lines[0]["loss"] == pytest.approx(np.log(256), abs=0.2)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert result.val_loss < np.log(256) - 0.5
    assert (result.step, result.loss) == (STEPS, lines[-1]["loss"])
    assert result.val_loss == lines[-1]["val_loss"]
    assert not result.interrupted
    assert result.sample.startswith("\n")
    assert len(result.sample.encode(errors="replace")) >= 9


def test_metrics_have_one_complete_line_a_step(finished):
    config, _ = finished
    lines = [json.loads(x) for x in Path(config.out_dir, "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert set(line) == {"step", "loss", "val_loss", "lr", *Speed._fields}
        assert (line["val_loss"] is not None) == (line["step"] % 4 == 0)
        assert line["ms"] > 0
        assert line["tokens_per_second"] == pytest.approx(4 * 12 * 1e3 / line["ms"])
        assert line["mfu"] is None
    rates = [line["lr"] for line in lines]
    # Warmup over two updates, then half a cosine down to a tenth.
    expected = [5e-3] + [1e-2 * (0.55 + 0.45 * np.cos(np.pi * i / 10)) for i in range(11)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_the_run_leaves_curves_settings_and_its_last_checkpoints(finished):
    config, _ = finished
    folder = Path(config.out_dir)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert checkpoint_steps(config) == [10, 12]
    saved = json.loads((folder / "run.json").read_text())
    assert saved["num_kv_heads"] == 1
    # The default is spelt out: what ran, not what was asked for.
    assert saved["dtype"] == "float32"
    assert not list(folder.rglob("*.tmp"))


def test_the_first_lines_say_what_runs(config, capsys, monkeypatch):
    monkeypatch.setattr(train_gpt, "run_steps", lambda *args: (_ for _ in ()).throw(UserError("x")))
    with pytest.raises(UserError):
        train(config)
    out = capsys.readouterr().out
    for text in ("device     cpu", f"jax {jax.__version__}", "parameters: 1 layers of 16"):
        assert text in out
    assert "attention  reference (asked for: reference)" in out
    assert f"pallas_flash {pallas_flash.__version__}" in out


@pytest.mark.parametrize("attention", ["xla", "interpret"])
def test_an_attention_asked_for_is_the_one_that_runs(config, monkeypatch, attention):
    asked = []
    real = pallas_flash.flax._layer.attention

    def record(*args, implementation, **kwargs):
        asked.append(implementation)
        return real(*args, implementation="reference", **kwargs)

    monkeypatch.setattr(pallas_flash.flax._layer, "attention", record)
    model = dataclasses.replace(config.model, attention=attention)
    config = dataclasses.replace(config, model=model, steps=1, warmup_steps=0, eval_batches=1)
    train(config)
    assert set(asked) == {attention}


def test_the_kernels_train_as_the_reference_does(config, finished, capsys, kernel_case):
    model = dataclasses.replace(config.model, attention="interpret")
    train(dataclasses.replace(config, model=model))
    assert "attention  interpret (asked for: interpret)" in capsys.readouterr().out
    got, expected = ([line["loss"] for line in metrics(c)] for c in (config, finished[0]))
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_two_runs_are_equal(finished, config):
    train(config)
    assert metrics(config) == metrics(finished[0])


def test_another_seed_is_another_run(finished, config):
    train(dataclasses.replace(config, seed=1))
    assert metrics(config)[0]["loss"] != metrics(finished[0])[0]["loss"]


def test_accumulation_gives_the_gradient_of_the_whole_batch(config, corpus):
    text = load_text(config)
    init, loss_fn, _ = train_gpt.model_functions(config.model, seed=0)
    params = init()
    batch = training_batch(text.train, 1, dataclasses.replace(config, accumulation=1), one_device())
    assert batch.shape == (1, 4, 13)
    whole = jax.jit(jax.value_and_grad(loss_fn))(params, batch[0])
    cut = training_batch(text.train, 1, dataclasses.replace(config, accumulation=4), one_device())
    assert cut.shape == (4, 1, 13)
    got = jax.jit(lambda p, b: train_gpt.mean_gradient(loss_fn, p, b))(params, cut)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), got, whole)


def test_weight_decay_shrinks_matrices_alone(config):
    params = {"kernel": jnp.ones((2, 3)), "scale": jnp.ones(3)}
    optimizer, _ = train_gpt.make_optimizer(dataclasses.replace(config, warmup_steps=0))
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    assert (updates["scale"] == 0).all()
    assert (updates["kernel"] < 0).all()


def test_a_gradient_is_clipped_by_its_global_norm(config):
    """Adam forgets a gradient's scale, so its memory is what shows the clip."""
    params = {"a": jnp.zeros((2, 2)), "b": jnp.zeros(2)}
    optimizer, _ = train_gpt.make_optimizer(config)
    gradient = jax.tree.map(lambda x: jnp.full(x.shape, 100.0), params)
    _, state = optimizer.update(gradient, optimizer.init(params), params)
    means = [x for x in jax.tree.leaves(state) if x.shape == (2, 2)][:1]
    np.testing.assert_allclose(means[0], 0.1 / np.sqrt(6), rtol=1e-5)


def test_half_precision_keeps_float32_parameters(config):
    model = dataclasses.replace(config.model, dtype="bfloat16")
    init_state, train_step, _ = train_gpt.make_steps(
        dataclasses.replace(config, model=model), one_device()
    )
    text = load_text(config)
    batch = training_batch(text.train, 1, config, one_device())
    shapes, _ = jax.eval_shape(train_step, jax.eval_shape(init_state), batch)
    dtypes = {x.dtype.name for x in jax.tree.leaves(shapes)}
    assert dtypes == {"float32", "int32"}


def test_few_steps_of_a_preset_run_to_their_end(corpus, tmp_path):
    sizes = {"num-layers": 1, "num-heads": 2, "embed-dim": 16, "context": 12, "batch-size": 4}
    argv = ["--preset", "gpt2-small", "--steps", "50", "--attention", "reference"]
    argv += ["--data", str(corpus), "--out-dir", str(tmp_path / "run"), "--sample-tokens", "8"]
    argv += [f"--{name}={size}" for name, size in sizes.items()]
    assert main(argv) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 50
    assert json.loads(lines[-1])["val_loss"] < np.log(256) - 0.1


# -------------------------------------------------------------------------------------------- speed


def parameters_of(model):
    init, _, _ = train_gpt.model_functions(model, seed=0)
    return jax.eval_shape(init)


def work_on(kind, model=TINY.model, count=1):
    device = types.SimpleNamespace(device_kind=kind)
    return work_of(model, parameters_of(model), 4, device, count)


def test_the_work_of_a_token_is_that_of_palm_with_half_of_the_scores():
    work = work_on("cpu")
    # q, k, v and out; gate, up and down; three norms.
    parameters = 16 * (16 + 8 + 8 + 16) + 3 * 16 * 64 + 3 * 16
    scores = 12 * 1 * 16 * 12 / 2
    assert work == Work(tokens=4 * 12, flops_per_token=6 * parameters + scores, peak=None)
    # Twice the layers and twice the context.
    deep = dataclasses.replace(TINY.model, num_layers=2, context=24)
    parameters += parameters - 16
    assert work_on("cpu", deep).flops_per_token == 6 * parameters + 4 * scores


def test_the_preset_has_the_parameters_it_says():
    model = PRESETS["gpt2-small"].model
    work = work_on("cpu", model)
    parameters = (work.flops_per_token - 6 * 12 * 768 * 1024) / 6
    assert round(parameters / 1e6) == 85


def test_a_peak_is_that_of_exactly_this_device():
    assert work_on("NVIDIA H200").peak == 989e12
    assert work_on("NVIDIA A100-SXM4-80GB").peak == 312e12
    # A slice of a GPU and a slower one of a similar name.
    for kind in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 NVL", "cpu", "TPU v4"):
        assert work_on(kind).peak is None
    assert "peak 989 TFLOP/s" in str(work_on("NVIDIA H200"))
    assert work_on("NVIDIA H200", count=4).peak == 4 * 989e12
    assert "MFU is n/a" in str(work_on("cpu"))


def test_mfu_is_the_share_of_the_peak():
    speed = Work(tokens=1000, flops_per_token=3_000_000, peak=1e12).speed(ms=20.0)
    assert speed == (20.0, 50_000.0, pytest.approx(0.15))
    assert str(speed) == "20.0 ms/step, 50,000 tokens/s, MFU 15.0%"
    unknown = Work(tokens=1000, flops_per_token=3_000_000, peak=None).speed(ms=20.0)
    assert str(unknown) == "20.0 ms/step, 50,000 tokens/s, MFU n/a"


@pytest.mark.parametrize("known", [False, True], ids=["no peak", "a peak"])
def test_mfu_is_shown_and_written(config, monkeypatch, capsys, known):
    if known:
        monkeypatch.setitem(PEAK_FLOPS, jax.devices()[0].device_kind, 1e9)
    assert main(flags(config)) == 0
    out = capsys.readouterr().out.splitlines()
    shown = [line for line in out if line.startswith(("step ", "done "))]
    # A line for each look at the held-out text, and the last.
    assert len(shown) == 4
    assert all(("MFU n/a" in line) != known for line in shown)
    flops = work_on("cpu").flops_per_token
    for line in Path(config.out_dir, "metrics.jsonl").read_text().splitlines():
        line = json.loads(line)
        expected = pytest.approx(line["tokens_per_second"] * flops / 1e9) if known else None
        assert line["mfu"] == expected


# ----------------------------------------------------------------------------------- cuDNN's layer


def test_the_model_through_cudnn_is_the_same_model(finished, config, monkeypatch, capsys):
    asked = []
    real = jax.nn.dot_product_attention

    def on_a_cpu(*args, implementation, **kwargs):
        asked.append(implementation)
        return real(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_a_cpu)
    monkeypatch.setattr(attention, "_check_cudnn", lambda *args: None)
    train(checked(config, "cudnn"))
    assert set(asked) == {"cudnn"}
    got, expected = ([line["loss"] for line in metrics(c)] for c in (config, finished[0]))
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    out = capsys.readouterr().out
    assert "attention  cudnn (asked for: cudnn)" in out
    assert "gradients  not compared: cuDNN takes no float32" in out


def test_what_cudnn_does_not_serve_is_one_sentence(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # No head size of cuDNN's.
    model = dataclasses.replace(
        TINY.model, embed_dim=24, num_heads=2, attention="cudnn", dtype="bfloat16"
    )
    with pytest.raises(UserError) as caught:
        attention.explain_attention(model, 4, one_device())
    assert "`attention` cudnn must be served by the cuDNN here; got: " in str(caught.value)
    assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------------- data


def test_batches_are_a_function_of_seed_and_step(config):
    text = load_text(config).train
    first = training_batch(text, 3, config, one_device())
    np.testing.assert_array_equal(first, training_batch(text, 3, config, one_device()))
    for other in (
        training_batch(text, 4, config, one_device()),
        training_batch(text, 3, dataclasses.replace(config, seed=1), one_device()),
    ):
        assert (first != other).any()


def test_windows_reach_both_ends_of_the_text(config):
    """A text of one window more than the context: an index too far would be an error."""
    text = np.arange(14, dtype=np.uint8)
    starts = set()
    for step in range(20):
        batch = np.asarray(training_batch(text, step, config, one_device()), int)
        np.testing.assert_array_equal(np.diff(batch), 1)
        starts |= set(batch[..., 0].ravel().tolist())
    assert starts == {0, 1}
    held_out = held_out_batches(text, config, one_device())
    assert held_out.shape == (4, 2, 13)
    assert (held_out[0, 0, 0], held_out[-1, -1, -1]) == (0, 13)


def test_no_file_is_on_both_sides(config, corpus):
    text = load_text(config)
    assert not set(text.train_files) & set(text.held_out_files)
    everything = {p.relative_to(corpus).as_posix() for p in corpus.rglob("*.txt")}
    assert set(text.train_files) | set(text.held_out_files) == everything
    for names, side in ((text.train_files, text.train), (text.held_out_files, text.held_out)):
        # Whole files in the named order, a zero byte between them.
        expected = b"\0".join((corpus / name).read_bytes() for name in names)
        assert side.tobytes() == expected
    assert 0 < len(text.held_out) < 0.3 * len(text.train)


def test_the_default_text_is_source_of_the_standard_library(config):
    default = dataclasses.replace(config, data=None)
    text, again = load_text(default), load_text(default)
    assert text.sha256 == again.sha256
    assert not set(text.train_files) & set(text.held_out_files)
    names = text.train_files + text.held_out_files
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    for name in names:
        assert name.endswith(".py")
        folders = set(name.split("/")[:-1])
        assert not folders & {"site-packages", "test", "tests", "idle_test", "encodings"}
    assert len(text.train) > 3_000_000
    assert 0.08 < len(text.held_out) / (len(text.train) + len(text.held_out)) < 0.2


def test_a_file_keeps_its_side_when_others_come():
    files = [(f"{i}.txt", b"x" * 100) for i in range(40)]
    before = {name for name, _ in split_files(files)[1]}
    after = {name for name, _ in split_files([*files, ("new.txt", b"x" * 100)])[1]}
    assert len(before) == 4
    assert len(before & after) >= 3


@pytest.mark.parametrize("sizes", [(1000, 10), (10, 1000), (500, 500)])
def test_the_smaller_of_two_files_is_held_out(sizes):
    files = [(f"{i}", b"x" * size) for i, size in enumerate(sizes)]
    train_side, held_out = split_files(files)
    assert len(train_side) == len(held_out) == 1
    assert len(held_out[0][1]) == min(sizes)


def test_a_single_file_is_cut(config, tmp_path):
    (tmp_path / "book").write_bytes(bytes(range(1, 201)))
    text = load_text(dataclasses.replace(config, data=str(tmp_path / "book")))
    assert text.train.tolist() == list(range(1, 181))
    assert text.held_out.tolist() == list(range(181, 201))


def test_a_folder_gives_its_texts_and_not_what_the_run_writes(tmp_path):
    for name in ("a.txt", "b.md", ".hidden", ".git/config", "run/metrics.jsonl", "deep/er/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("some text")
    (tmp_path / "empty").touch()
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0")
    # Without an end.
    os.mkfifo(tmp_path / "pipe")
    config = dataclasses.replace(TINY, data=str(tmp_path), out_dir=str(tmp_path / "run"))
    assert [name for name, _ in read_files(config)[0]] == ["a.txt", "b.md", "deep/er/c"]


def test_run_folders_among_the_texts_are_left_out_with_a_word(
    corpus, finished, tmp_path, monkeypatch, capsys
):
    """A run that read its own folder, or another's, would read other texts when it is resumed."""
    texts = shutil.copytree(corpus, tmp_path / "texts")
    config = dataclasses.replace(TINY, data=str(texts), out_dir=str(texts / "runs" / "two"))
    before = load_text(config).sha256
    for name in ("one", "two"):
        shutil.copytree(finished[0].out_dir, texts / "runs" / name)
    assert load_text(config).sha256 == before
    monkeypatch.setattr(train_gpt, "run_steps", lambda *args: (_ for _ in ()).throw(UserError("x")))
    with pytest.raises(UserError):
        train(dataclasses.replace(config, out_dir=str(tmp_path / "run")))
    out = capsys.readouterr().out
    assert "left out, because they are folders of runs: runs/one, runs/two\n" in out


@pytest.mark.parametrize("name", ["runs/1", "."])
def test_the_folder_of_a_run_is_no_text(corpus, tmp_path, name):
    texts = shutil.copytree(corpus, tmp_path / "texts")
    (texts / "runs" / "1").mkdir(parents=True)
    (texts / "runs" / "1" / "run.json").write_text(json.dumps(MARK))
    config = dataclasses.replace(TINY, data=str(texts / name), out_dir=str(texts))
    with pytest.raises(UserError, match="`data` must be text, not the folder of a run; got"):
        read_files(config)


# ----------------------------------------------------------------------------------- gradient check


def checked(config, attention, **changes):
    model = dataclasses.replace(config.model, attention=attention, **changes)
    return dataclasses.replace(config, model=model, gradient_check=True)


@pytest.mark.parametrize("attention", ["xla", "interpret"])
def test_gradients_of_the_whole_model_agree_with_the_reference(config, attention, request):
    if attention == "interpret":
        request.getfixturevalue("kernel_case")
    config = checked(config, attention, context=40)
    error, name = train_gpt.gradient_error(config, load_text(config), one_device())
    # Not the reference compared with itself, and far inside the bound.
    assert 0 < error < train_gpt.GRADIENT_BOUND / 10, name


def scale_gradient(x, factor):
    """The same value, and `factor` times its gradient."""
    return factor * x + jax.lax.stop_gradient(x - factor * x)


def off_by_one_mask(attention, query, key, value, **kwargs):
    """Lets each query see one key too many."""
    return attention(query, key, value, **(kwargs | {"query_offset": 1}))


def wrong_gradient(which):
    def broken(attention, *operands, **kwargs):
        operands = [scale_gradient(x, 1.001 if i == which else 1.0) for i, x in enumerate(operands)]
        return attention(*operands, **kwargs)

    return broken


def not_a_number(attention, query, key, value, **kwargs):
    return scale_gradient(attention(query, key, value, **kwargs), jnp.nan)


@pytest.mark.parametrize(
    ("broken", "culprit"),
    [
        (wrong_gradient(0), "query"),
        (wrong_gradient(1), "key"),
        (wrong_gradient(2), "value"),
        (off_by_one_mask, ""),
        (not_a_number, ""),
    ],
    ids=["dq", "dk", "dv", "mask", "nan"],
)
def test_a_broken_attention_stops_the_script(config, monkeypatch, capsys, broken, culprit):
    real = pallas_flash.flax._layer.attention

    def attention(*args, implementation, **kwargs):
        if implementation == "reference":
            return real(*args, implementation="reference", **kwargs)
        return broken(real, *args, implementation="reference", **kwargs)

    monkeypatch.setattr(pallas_flash.flax._layer, "attention", attention)
    assert main(flags(checked(config, "xla"))) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "`attention` must give the reference's gradients to within 1e-04; got" in error
    assert culprit in error
    assert not Path(config.out_dir, "metrics.jsonl").exists()


# ------------------------------------------------------------------------------------------- resume


class Killed(BaseException):
    """Stands for a process that ends here: nothing in the script may catch it."""


def die_at_batch(monkeypatch, step):
    real = train_gpt.training_batch

    def training_batch(text, at, *args):
        # The first batch of a session is also made for compiling.
        if at == step and dies.pop("waits", None) is None:
            raise Killed
        return real(text, at, *args)

    dies = {"waits": True} if step == 1 else {}
    monkeypatch.setattr(train_gpt, "training_batch", training_batch)


def die_in(name):
    """Kills right after the folder has appended the lines of a step, or saved it."""

    def arrange(monkeypatch, step):
        real = getattr(RunFolder, name)

        def work(self, *args):
            result = real(self, *args)
            last = args[0][-1]["step"] if name == "append" else args[0]
            if last >= step:
                raise Killed
            return result

        monkeypatch.setattr(RunFolder, name, work)

    return arrange


DEATHS = [
    (die_at_batch, 6, 5),
    # The lines of a checkpoint are there, the checkpoint is not.
    (die_in("append"), 12, 10),
    (die_in("save"), 10, 10),
    (die_at_batch, 1, 0),
    (die_in("append"), 5, 0),
    (die_in("save"), 12, 12),
]


@pytest.mark.parametrize(("arrange", "step", "resumed_from"), cases.default(DEATHS[:3], DEATHS))
def test_a_killed_run_resumes_to_the_same_bits(
    finished, config, monkeypatch, capsys, arrange, step, resumed_from
):
    with monkeypatch.context() as patch:
        arrange(patch, step)
        with pytest.raises(Killed):
            train(config)
    capsys.readouterr()
    result = train(config)
    out = capsys.readouterr().out
    assert (f"resuming   after step {resumed_from}," in out) == (0 < resumed_from < STEPS)
    assert metrics(config) == metrics(finished[0])
    assert result.val_loss == finished[1].val_loss
    assert result.sample == finished[1].sample
    assert checkpoint_steps(config) == [10, 12]


@pytest.mark.extended
def test_a_process_killed_while_it_writes_checkpoints_resumes(config, tmp_path, capsys):
    """By SIGKILL, with a checkpoint after every step: most of the time goes into writing them."""
    long = dataclasses.replace(config, steps=40, checkpoint_every=1, log_every=1)
    command = [sys.executable, train_gpt.__file__, *flags(long)]
    environment = {
        **os.environ,
        # The same programs, or the bits may differ.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    path = Path(long.out_dir, "metrics.jsonl")
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=tmp_path,  # As any folder that is not the checkout's.
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < 17:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    # A second one in the same folder, while the first holds its breath and its lock.
    process.send_signal(signal.SIGSTOP)
    for more in ([], ["--restart"]):
        assert main([*flags(long), *more]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"where process {process.pid} on " in error
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    # Its lock ended with it, and nothing before that touched its files.
    assert 17 <= len(path.read_text().splitlines()) < 40
    train(long)
    whole = dataclasses.replace(long, out_dir=str(tmp_path / "whole"), checkpoint_every=40)
    train(whole)
    assert metrics(long) == metrics(whole)
    assert checkpoint_steps(long) == [39, 40]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_says_how_to_resume(finished, config, monkeypatch, capsys, number):
    real = train_gpt.training_batch

    def training_batch(text, step, *args):
        if step == 7:
            os.kill(os.getpid(), number)
        return real(text, step, *args)

    before = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(sys, "argv", ["scripts/train_gpt.py"])
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "training_batch", training_batch)
        assert main(flags(config)) == 130
    assert [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)] == before
    out = capsys.readouterr().out
    assert "stopped    after step 7, checkpoint saved; resume with: python scripts/train_gpt" in out
    assert f"--out-dir {config.out_dir}" in out
    assert checkpoint_steps(config) == [5, 7]
    assert Path(config.out_dir, "loss.png").exists()
    assert main(flags(config)) == 0
    assert metrics(config) == metrics(finished[0])


def test_an_interrupt_before_training_is_no_traceback(config, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_gpt, "load_text", interrupt)
    assert main(flags(config)) == 130
    assert "stopped    at once, without a new checkpoint" in capsys.readouterr().out


def test_a_finished_run_is_reported_and_left_alone(finished, capsys):
    config, first = finished
    before = Path(config.out_dir, "metrics.jsonl").read_text()
    assert main(flags(config)) == 0
    out = capsys.readouterr().out
    assert f"holds this run with all its {STEPS} steps: nothing to train" in out
    assert first.sample.strip() in out
    assert Path(config.out_dir, "metrics.jsonl").read_text() == before
    again = train(config)
    assert (again.val_loss, again.sample, again.speed) == (first.val_loss, first.sample, None)


def test_other_settings_are_refused_by_name(finished, capsys):
    config, _ = finished
    before = Path(config.out_dir, "run.json").read_text()
    assert main(flags(config, steps=13, num_kv_heads=2, learning_rate=1e-3)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in ("num_kv_heads (there 1, now 2)", "steps (there 12, now 13)", "learning_rate"):
        assert part in error
    assert "batch_size" not in error
    assert Path(config.out_dir, "run.json").read_text() == before


def test_another_text_is_refused(finished, tmp_path, capsys):
    (tmp_path / "book").write_text("another text " * 100)
    assert main(flags(finished[0], data=tmp_path / "book")) == 2
    assert "which differs in text (there '" in capsys.readouterr().err


def test_settings_that_change_no_number_may_change(finished, config, corpus, monkeypatch):
    with monkeypatch.context() as patch:
        die_at_batch(patch, 7)
        with pytest.raises(Killed):
            train(config)
    moved = Path(config.out_dir).with_name("moved")
    Path(config.out_dir).rename(moved)
    config = dataclasses.replace(
        config, out_dir=str(moved), data=f"{corpus}/.", log_every=1, checkpoint_every=1, prompt="a"
    )
    assert train(config).sample.startswith("a")
    assert metrics(config) == metrics(finished[0])


def copy_of(finished, config):
    """The finished run, in the folder of `config`."""
    return Path(shutil.copytree(finished[0].out_dir, config.out_dir))


def test_a_restart_that_fails_leaves_the_old_run_and_one_that_works_replaces_it(
    config, finished, capsys
):
    folder = copy_of(finished, config)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    del before[folder / "train_gpt.lock"]
    # Not finite at the second step.
    assert main([*flags(config, learning_rate=1e30, log_every=1), "--restart"]) == 2
    captured = capsys.readouterr()
    assert "`loss` must stay finite; got" in captured.err
    assert "restored   the run that --restart had moved aside" in captured.out
    assert {p: p.read_bytes() for p in before} == before

    short = dataclasses.replace(config, steps=3)
    assert main([*flags(short), "--restart"]) == 0
    assert [line["step"] for line in metrics(short)] == [1, 2, 3]
    assert checkpoint_steps(short) == [3]


def test_a_run_with_a_damaged_checkpoint_and_no_metrics_ends_as_it_did(config, finished, capsys):
    folder = copy_of(finished, config)
    for path in (folder / "checkpoints" / "12" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:50])
    (folder / "metrics.jsonl").unlink()
    result = train(config)
    captured = capsys.readouterr()
    assert "resuming   after step 10," in captured.out
    assert "the checkpoint of step 12 is damaged" in captured.err
    assert "metrics.jsonl had 0 of its first 10 lines" in captured.err
    assert metrics(config) == metrics(finished[0])
    assert (result.val_loss, result.sample) == (finished[1].val_loss, finished[1].sample)


# ------------------------------------------------------------------------------------- command line


def test_every_field_is_a_flag_with_a_help():
    named = {}
    parser = make_parser()
    assert "auto is bfloat16 on a GPU" in " ".join(parser.format_help().split())
    for action in parser._actions:
        named[action.dest] = action.help
    expected = set(flat_config(TINY)) - {"vocab_size"}
    assert set(named) == expected | {"preset", "restart", "help"}
    for name, text in named.items():
        assert text, f"{name} has no help"
        assert "None" not in text


def test_flags_of_a_configuration_give_it_back(config):
    parsed = vars(make_parser().parse_args(flags(config)))
    parsed.pop("restart")
    assert config_from_flags(parsed) == config
    model = dataclasses.replace(config.model, attention=None, rope_theta=None)
    other = dataclasses.replace(config, model=model, top_k=None, gradient_check=True)
    parsed = vars(make_parser().parse_args(flags(other)))
    parsed.pop("restart")
    got = config_from_flags(parsed)
    assert flat_config(got) == flat_config(other)


def test_a_flag_overrides_its_preset():
    parsed = vars(make_parser().parse_args(["--preset", "gpt2-small", "--steps", "9999"]))
    parsed.pop("restart")
    config = config_from_flags(parsed)
    assert (config.steps, config.model.num_layers, config.model.context) == (9999, 12, 1024)
    assert config.warmup_steps == PRESETS["gpt2-small"].warmup_steps


@pytest.mark.parametrize(
    ("arguments", "warmup"), [([], 5), (["--warmup-steps", "20"], 20)], ids=["preset", "flag"]
)
def test_a_presets_warmup_is_cut_to_fit_few_steps(arguments, warmup):
    parsed = vars(make_parser().parse_args(["--preset", "gpt2-small", "--steps", "50", *arguments]))
    parsed.pop("restart")
    assert config_from_flags(parsed).warmup_steps == warmup


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--data", "/no/such/place"], "`data` must be a file or a folder; got '/no/such/place'"),
        (["--data", "EMPTY"], "`data` must have text in it; found none in"),
        (["--data", "BINARY"], "`data` must have text in it; found none in"),
        (
            ["--context", "5000"],
            "`context` must be below the length of both sides of the text; got",
        ),
        (["--context", "1"], "`context` must be between 2 and 2147483647; got 1"),
        (["--embed-dim", "15"], "`embed_dim` must be a multiple of `num_heads`; got 15 and 2"),
        (["--num-kv-heads", "3"], "`num_heads` must be a multiple of `num_kv_heads`; got 2 and 3"),
        (["--num-layers", "0"], "`num_layers` must be positive and finite; got 0"),
        (["--batch-size", "3"], "`batch_size` must be a multiple of `accumulation`; got 3 and 2"),
        (["--steps", "0"], "`steps` must be between 1 and 2147483647; got 0"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--warmup-steps", "12"], "`warmup_steps` must be below `steps`; got 12 and 12"),
        (["--learning-rate", "nan"], "`learning_rate` must be between 1e-30 and 1e+30; got nan"),
        (["--learning-rate", "1e30"], "`loss` must stay finite; got"),
        (["--weight-decay", "-1"], "`weight_decay` must be between 0 and 1e+30; got -1.0"),
        (["--beta2", "1.5"], "`beta2` must be between 0 and 0.999999; got 1.5"),
        (["--seed", "-1"], "`seed` must be between 0 and 4294967295; got -1"),
        (["--top-k", "0"], "`top_k` must be between 1 and 2147483647; got 0"),
        (["--top-k", "some"], "argument --top-k: invalid int or auto value: 'some'"),
        (["--temperature", "-1"], "`temperature` must be between 0 and 1e+30; got -1.0"),
        (["--prompt", ""], "`prompt` must have at least one byte"),
        (["--prompt", "\udcff"], r"`prompt` must be text in UTF-8; got '\udcff'"),
        (["--out-dir", ""], "`out_dir` must be a path; got '', as of a shell variable that is not"),
        (["--data", ""], "`data` must be a path; got '', as of a shell variable that is not set"),
        (["--data", "x" * 300], "`data` must be readable; got 'File name too long' at "),
        (["--out-dir", "x" * 300], "`out_dir` must be a folder that can be read and written; got"),
        (["--out-dir", "FILE/run"], "`out_dir` must be a folder that can be read and written; got"),
        (["--embed-dim", "200000"], "`embed_dim` and the other sizes must fit the memory of the"),
        (["--num-layers", "100000000"], "must fit the memory of the cpu; got 387,"),
        (["--mlp-ratio", "1e20"], "must fit the memory of the cpu; got "),
        (["--batch-size", "2000000000"], "must fit the memory of the cpu; got "),
        (["--eval-batches", "2000000000"], "`batch_size` times `eval_batches` must fit this"),
        (["--attention", "flash"], "argument --attention: invalid choice: 'flash'"),
        (["--attention", "triton"], "`attention` must be one that serves here; got: "),
        (
            ["--attention", "cudnn"],
            "`attention` cudnn must have a GPU and bfloat16 activations; got float32 on a cpu: "
            "choose another --attention.",
        ),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--preset", "huge"], "argument --preset: invalid choice: 'huge'"),
        (["--out-dir", "FILE"], "`out_dir` must be a folder; got the file"),
        (["--out-dir", "FOREIGN"], "with metrics.jsonl and checkpoints but no run.json: pass"),
        (["--out-dir", "FOREIGN", "--restart"], "with metrics.jsonl and checkpoints but no run"),
        (["--learning-rat", "1"], "unrecognized arguments: --learning-rat"),
    ],
)
def test_bad_input_is_one_sentence(config, tmp_path, capsys, arguments, fragment):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "file").write_text("text")
    (tmp_path / "foreign" / "checkpoints").mkdir(parents=True)
    (tmp_path / "foreign" / "metrics.jsonl").write_text("precious")
    paths = {"EMPTY": "empty", "BINARY": "binary", "FILE": "file", "FOREIGN": "foreign"}

    def under(value):
        first, *rest = value.split("/")
        return str(tmp_path.joinpath(paths[first], *rest)) if first in paths else value

    arguments = [x if x.startswith("-") else under(x) for x in arguments]
    try:
        status = main([*flags(config), *arguments])
    except SystemExit as error:  # argparse's own way out
        status = error.code
    err = capsys.readouterr().err
    assert status == 2
    assert fragment in err
    message = [line for line in err.splitlines() if not line.startswith("usage:")]
    assert len(message) == 1
    assert message[0].startswith("train_gpt.py: error: ")
    assert (tmp_path / "foreign" / "metrics.jsonl").read_text() == "precious"


NUMBERS = {
    name: hint
    for cls in (GPTConfig, TrainConfig)
    for name, hint in typing.get_type_hints(cls).items()
    if {int, float} & {hint, *typing.get_args(hint)} and name != "vocab_size"
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_its_range_is_refused(name, capsys):
    low, high = RANGES[name]
    integer = int in (NUMBERS[name], *typing.get_args(NUMBERS[name]))
    wrong = [low - 1, high * 10]
    wrong += [-(10**23), 10**23, 10**400] if integer else ["nan", "inf", "-inf", "1e999"]
    for value in wrong:
        assert main([f"--{name.replace('_', '-')}={value}", "--data", "/no/such/place"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        # Of how many heads there may be, the embedding says more than the range.
        assert f"`{name}` must be " in error or f"multiple of `{name}`; got" in error


@pytest.mark.parametrize("model", [TINY.model, PRESETS["cpu"].model], ids=["tiny", "cpu"])
def test_parameters_are_counted_without_a_model(model):
    expected = sum(x.size for x in jax.tree.leaves(parameters_of(model)))
    assert parameter_count(model) == expected


def test_sizes_are_held_against_the_memory_of_a_gpu():
    gpu = types.SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 2_000_000_000})
    check_memory(TINY, gpu)
    check_memory(PRESETS["cpu"], gpu)
    # Half of the parameters and of the batch.
    check_memory(PRESETS["gpt2-small"], gpu, {"fsdp": 2})
    with pytest.raises(UserError) as caught:
        check_memory(PRESETS["gpt2-small"], gpu)
    assert "got 85,150,464 parameters, which with" in str(caught.value)
    assert "of 2.0 GB: choose a smaller model, a smaller batch by --accumula" in str(caught.value)


def test_a_device_that_runs_out_of_memory_is_one_sentence(config, monkeypatch, capsys):
    def full(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand\nmore")

    monkeypatch.setattr(train_gpt, "run_steps", full)
    assert main(flags(config)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "`batch_size` must fit the device's memory; got 2 texts of 12 at once" in error


# ------------------------------------------------------------------------------------- as a process


def run_script(monkeypatch, argv):
    """The script from its first line, in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *argv])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(train_gpt.__file__, run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, before)
    return caught.value.code


def test_sigterm_before_the_loop_says_so(config, monkeypatch, capsys):
    monkeypatch.setattr(
        "scripts.training.text.load_text", lambda config: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert run_script(monkeypatch, flags(config)) == 130
    assert "stopped    at once, without a new checkpoint" in capsys.readouterr().out


def test_sigterm_among_the_imports_says_so(config, monkeypatch, capsys):
    class Slow(types.ModuleType):
        def __getattr__(self, name):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setitem(sys.modules, "tqdm", Slow("tqdm"))
    assert run_script(monkeypatch, flags(config)) == 130
    assert capsys.readouterr().out == "stopped    before anything ran\n"


def test_a_reader_that_goes_away_ends_the_script_quietly(config, monkeypatch, capfd):
    """As `| head` does."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert run_script(monkeypatch, flags(config)) == 141
        # What Python does at its end.
        stdout.flush()
    assert capfd.readouterr().err == ""


def test_an_output_that_cannot_be_written_is_one_sentence(config, monkeypatch, capfd):
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert run_script(monkeypatch, flags(config)) == 2
        stdout.flush()
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "error: reading or writing failed: [Errno 28] No space left on device" in error


def test_a_terminal_that_does_not_know_a_character_is_no_error(monkeypatch, tmp_path):
    with open(tmp_path / "out", "w", encoding="ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert as_a_process(lambda: print("\ufffd")) is None
    assert (tmp_path / "out").read_text() == "\\ufffd\n"


@pytest.mark.parametrize(
    "missing", ["jax", "flax", "optax", "numpy", "tqdm", "orbax", "matplotlib", "models"]
)
def test_a_missing_package_is_one_sentence(monkeypatch, missing):
    for name in [n for n in sys.modules if n.partition(".")[0] in (missing, "scripts")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(train_gpt.__file__)
    assert "\n" not in caught.value.code
    assert "this script needs a checkout installed with its `train` extra; got no module" in (
        caught.value.code
    )
    assert missing in caught.value.code
    assert "pip install -e '.[train]'" in caught.value.code
