"""`scripts/train_with_key_bias.py`: one model, several attentions, the same steps."""

import csv
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scripts import train_with_key_bias
from scripts.train_with_key_bias import draw, main, make_model

SMALL = ["--steps", "3", "--width", "128", "--context", "32", "--batch-size", "2"]


def test_key_biases_are_of_the_slowest_pairs():
    model = make_model(128, 32, "bfloat16", 200.0)
    for layer in model.layers:
        [bias] = np.asarray(layer.attention.key.bias[...]).reshape(-1, 64)
        assert {int(n): float(bias[n]) for n in np.flatnonzero(bias)} == pytest.approx(
            {31: 200, 63: -120, 30: 60, 62: 30}
        )
    assert model.config.compute_dtype == "bfloat16"
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model))} == {"float32"}


def test_runs_differ_by_attention_alone(tmp_path, monkeypatch, capsys):
    called = []

    def counted(name, attend):
        def call(q, k, v, **options):
            called.append((name, q.dtype.name))
            return attend(q, k, v, **options)

        return call

    given = {
        name: (dtype, counted(name, attend))
        for name, (dtype, attend) in train_with_key_bias.runs().items()
    }
    assert list(given) == ["dense, float32", "dense", "pallas_flash"]
    monkeypatch.setattr(train_with_key_bias, "runs", lambda: given)
    text = types.SimpleNamespace(train=np.frombuffer(b"a fig a day, " * 99, np.uint8))
    monkeypatch.setattr(train_with_key_bias, "load_text", lambda config: text)
    main([*SMALL, "--key-bias", "50", "--out-dir", str(tmp_path / "new")])
    assert set(called) == {(name, dtype) for name, (dtype, _) in given.items()}
    with open(tmp_path / "new" / "key-bias-training.csv") as file:
        names, *rows = csv.reader(file)
    assert names == ["step", *given]
    losses = np.array(rows, float)[:, 1:]
    assert losses.shape == (3, 3)
    assert abs(losses[0] - np.log(256)).max() < 0.2
    assert (losses[2] < losses[0]).all()
    np.testing.assert_allclose(losses, losses[:, :1].repeat(3, 1), rtol=1e-2)
    # Other roundings: the runs are not one and the same.
    assert len(set(losses[2])) == 3
    assert (tmp_path / "new" / "key-bias-training.png").read_bytes().startswith(b"\x89PNG")
    assert "pallas_flash: mean loss of the last steps" in capsys.readouterr().out


def test_picture_has_differences_to_the_first_run():
    exact = jnp.arange(40.0)
    differences = draw({"exact": exact, "other": exact + 2}).axes[1].lines
    [line] = differences
    assert line.get_label() == "other"
    assert line.get_xdata().tolist() == [20, 40]
    assert line.get_ydata().tolist() == [2, 2]
