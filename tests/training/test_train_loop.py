"""The trainer: its loss, its files, its attention, and its check of gradients."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support.tiny_run import STEPS, TINY, checkpoint_steps, flags, metrics, model_of, one_device

import pallas_flash.flax
from models import Decoder
from models.train import main
from models.training import loop
from models.training.loop import train
from models.training.processes import UserError
from models.training.report import Speed, Work, explain_attention, metric_lines
from models.training.text import load_text, training_batch

pytestmark = pytest.mark.usefixtures("compile_once")


def test_loss_falls_and_the_result_says_so(finished):
    config, result = finished
    lines = metrics(config)
    assert lines[0]["loss"] == pytest.approx(np.log(256), abs=0.2)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert result.val_loss < np.log(256) - 0.5
    assert (result.step, result.loss) == (STEPS, lines[-1]["loss"])
    assert result.val_loss == lines[-1]["val_loss"]
    assert not result.interrupted


def test_metrics_have_one_line_a_step(finished):
    config, _ = finished
    lines = [json.loads(x) for x in Path(config.out_dir, "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        losses = {"loss", "val_loss", "val_bits_per_byte"}
        assert set(line) == {"step", *losses, "lr", *Speed._fields, "peak_bytes"}
        bits = line["val_loss"] and pytest.approx(line["val_loss"] / np.log(2))
        assert line["val_bits_per_byte"] == bits
        assert (line["val_loss"] is not None) == (line["step"] % 4 == 0)
        assert line["ms"] > 0
        assert line["tokens_per_second"] == pytest.approx(4 * 12 * 1e3 / line["ms"])
        assert line["mfu"] is None
    rates = [line["lr"] for line in lines]
    # Warmup over two updates, then half a cosine down to a tenth.
    expected = [5e-3] + [1e-2 * (0.55 + 0.45 * np.cos(np.pi * i / 10)) for i in range(11)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_run_leaves_curves_and_checkpoints(finished):
    config, _ = finished
    folder = Path(config.out_dir)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert checkpoint_steps(config) == [10, 12]
    saved = json.loads((folder / "run.json").read_text())
    assert saved["num_kv_heads"] == 1
    # Other libraries read these, and `generate.py`.
    assert Decoder.from_pretrained(folder / "weights").config.num_kv_heads == 1
    # The default is spelt out: what ran, not what was asked for.
    assert saved["dtype"] == "float32"
    assert not list(folder.rglob("*.tmp"))


def test_kernels_train_as_the_reference(config, finished, capsys, kernel_case):
    train(dataclasses.replace(config, attention="interpret"))
    assert "attention  interpret (--attention interpret)" in capsys.readouterr().out
    got, expected = ([line["loss"] for line in metrics(c)] for c in (config, finished[0]))
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_loss_that_is_not_finite_stops_the_run():
    values = [{"loss": 1.0, "lr": 0.1}, {"loss": np.inf, "lr": 0.1}]
    with pytest.raises(UserError, match="`loss` must stay finite; got inf at step 8"):
        metric_lines(8, values, Work(1, 1, None).speed(1.0), None)


def test_accumulation_gives_the_same_gradient(config, corpus):
    text = load_text(config)
    init, loss_fn = loop.model_functions(model_of(config), 0, one_device())
    params = init()
    batch = training_batch(text, 1, dataclasses.replace(config, accumulation=1), one_device())
    assert batch.tokens.shape == (1, 4, 13)
    # Parts differ in the number of tokens that carry loss.
    answers = jnp.arange(4 * 13).reshape(1, 4, 13) > 29
    batch = batch._replace(answers=answers)

    def mean_loss(params, batch):
        total, count = loss_fn(params, batch)
        return total / count

    whole = jax.jit(jax.value_and_grad(mean_loss))(params, jax.tree.map(lambda x: x[0], batch))
    cut = training_batch(text, 1, dataclasses.replace(config, accumulation=4), one_device())
    assert cut.tokens.shape == (4, 1, 13)
    cut = cut._replace(answers=answers.swapaxes(0, 1))
    got = jax.jit(lambda p, b: loop.mean_gradient(loss_fn, p, b))(params, cut)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), got, whole)


def test_weight_decay_shrinks_matrices_alone(config):
    params = {"kernel": jnp.ones((2, 3)), "scale": jnp.ones(3)}
    optimizer, _ = loop.make_optimizer(dataclasses.replace(config, warmup_steps=0))
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    assert (updates["scale"] == 0).all()
    assert (updates["kernel"] < 0).all()


@pytest.mark.parametrize(("given", "left"), [(100.0, 1 / np.sqrt(10)), (0.01, 0.01)])
def test_gradient_is_clipped_by_its_norm(config, given, left):
    """Adam forgets a gradient's scale, so its memory is what shows the clip."""
    layers = {n: {"a": jnp.zeros((2, 2))} for n in range(2)}
    params = {"layers": layers, "b": jnp.zeros(2)}
    optimizer, _ = loop.make_optimizer(config)
    gradient = jax.tree.map(lambda x: jnp.full(x.shape, given), params)
    _, state = optimizer.update(gradient, optimizer.init(params), params)
    means = [x for x in jax.tree.leaves(state) if x.shape == (2, 2)][:2]
    np.testing.assert_allclose(means, np.full((2, 2, 2), 0.1 * left), rtol=1e-5)


def test_steps_are_those_of_the_optimizer(config, corpus):
    """A step depends on the optimizer's means, and on its place in the schedule."""
    text, layout = load_text(config), one_device()
    init_state, train_step, _ = loop.make_steps(config, model_of(config), layout)
    _, loss_fn = loop.model_functions(model_of(config), config.seed, layout)
    optimizer, _ = loop.make_optimizer(config)
    state = init_state()
    params = jax.device_get(state.params)
    memory = jax.device_get(state.opt_state)

    @jax.jit
    def by_optax(params, memory, batch):
        _, gradient = loop.mean_gradient(loss_fn, params, batch)
        updates, memory = optimizer.update(gradient, memory, params)
        return jax.tree.map(jnp.add, params, updates), memory

    for step in range(1, 4):
        batch = training_batch(text, step, config, layout)
        params, memory = by_optax(params, memory, batch)
        state, _ = train_step(state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state.params, params)


def test_attention_that_does_not_serve_is_refused():
    config = dataclasses.replace(TINY, attention="triton")
    with pytest.raises(
        UserError, match="`attention` must be one that serves the call; got 'triton'"
    ):
        explain_attention(config, model_of(config), one_device(), packed=False)


# --------------------------------------------------------------------------------- gradient check


@pytest.mark.parametrize("attention", cases.default(["interpret"], ["interpret", "xla"]))
def test_gradients_agree_with_the_reference(config, attention, request):
    if attention == "interpret":
        request.getfixturevalue("kernel_case")
    config = dataclasses.replace(config, attention=attention, context=40)
    error, name = loop.gradient_error(config, model_of(config), load_text(config), one_device())
    # Not the reference compared with itself, and far inside the bound.
    assert 0 < error < loop.GRADIENT_BOUND / 10, name


def scale_gradient(x, factor):
    """The same value, and `factor` times its gradient."""
    return factor * x + jax.lax.stop_gradient(x - factor * x)


def off_by_one_mask(attention, query, key, value, **kwargs):
    """Let each query see one key too many."""
    return attention(query, key, value, **(kwargs | {"query_offset": 1}))


def wrong_gradient(which):
    def broken(attention, *operands, **kwargs):
        operands = [scale_gradient(x, 1.001 if i == which else 1.0) for i, x in enumerate(operands)]
        return attention(*operands, **kwargs)

    return broken


def not_a_number(attention, query, key, value, **kwargs):
    return scale_gradient(attention(query, key, value, **kwargs), jnp.nan)


BROKEN = [
    (wrong_gradient(0), "query"),
    (not_a_number, ""),
    (off_by_one_mask, ""),
    (wrong_gradient(1), "key"),
    (wrong_gradient(2), "value"),
]


@pytest.mark.parametrize(
    ("broken", "culprit"),
    cases.default(BROKEN[:2], BROKEN),
    ids=["dq", "nan", "mask", "dk", "dv"],
)
def test_broken_attention_stops_the_script(config, monkeypatch, capsys, broken, culprit):
    real = pallas_flash.flax._layer.attention

    def attention(*args, implementation, **kwargs):
        if implementation == "reference":
            return real(*args, implementation="reference", **kwargs)
        return broken(real, *args, implementation="reference", **kwargs)

    monkeypatch.setattr(pallas_flash.flax._layer, "attention", attention)
    assert main(flags(config, attention="xla", gradient_check=True)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--attention must give the reference's gradients to within 1e-04; got" in error
    assert culprit in error
    assert Path(config.out_dir, "metrics.jsonl").read_text() == ""
