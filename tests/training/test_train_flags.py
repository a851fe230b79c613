"""The training script's command line, and the memory that its sizes take."""

import contextlib
import dataclasses
import json
import runpy
import sys
import types

import jax
import pytest
from support import tiny_run
from support.tiny_run import flags, parameters_of

from pallas_flash._execution import limits
from scripts import train_gpt
from scripts.train_gpt import main
from scripts.training.checkpoints import MARK
from scripts.training.mesh import check_memory
from scripts.training.processes import UserError
from scripts.training.settings import (
    CHOICES,
    HUGE,
    INT,
    PRESETS,
    RANGES,
    TINY,
    config_from_flags,
    flat_config,
    make_parser,
)

pytestmark = pytest.mark.usefixtures("compile_once")


# Flags of the command alone.
OTHERS = {"preset", "config", "restart", "compare_attention", "help"}


def test_every_field_is_a_flag_with_a_help():
    named = {}
    parser = make_parser()
    assert "auto is bfloat16 on a GPU" in " ".join(parser.format_help().split())
    for action in parser._actions:
        named[action.dest] = action.help
    expected = set(flat_config(tiny_run.TINY)) - {"vocab_size"}
    assert set(named) == expected | OTHERS
    assert set(CHOICES["attention"]) == {"auto", "cudnn", *limits.IMPLEMENTATIONS}
    for name, text in named.items():
        assert text, f"{name} has no help"
        assert "None" not in text
    assert "(default: 800; gpt2-small: 2000; gpt3-xl: 2000; fine-tune: 200)" in named["steps"]
    assert "(default: auto)" in named["num_kv_heads"]
    assert named["remat"].startswith("Whether the backward ")
    assert "The residuals of attention are kept. (default" in named["remat"]


def parsed(*arguments):
    values = vars(make_parser().parse_args(arguments))
    values.pop("restart")
    return config_from_flags(values)


def test_flags_of_a_configuration_give_it_back(config):
    assert parsed(*flags(config)) == config
    model = dataclasses.replace(config.model, attention=None, rope_theta=None)
    other = dataclasses.replace(config, model=model, top_k=None, gradient_check=True)
    assert flat_config(parsed(*flags(other))) == flat_config(other)


def written(path, **changes):
    settings = flat_config(PRESETS["gpt2-small"]) | dict(text="hash") | changes
    path.write_text(json.dumps({**MARK, **settings}))
    return str(path)


def test_config_takes_the_settings_of_a_run_and_flags_override_them(tmp_path):
    path = written(tmp_path / "run.json", seed=7, learning_rate=1)
    expected = dataclasses.replace(PRESETS["gpt2-small"], seed=7, learning_rate=1, top_k=5)
    assert parsed("--config", path, "--top-k", "5") == expected
    assert flat_config(parsed("--config", path, "--top-k", "5")) == flat_config(expected)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (dict(stepz=3), "--config must have settings of this script; got 'stepz': 3 in "),
        (dict(steps="3"), "--config must have settings of this script; got 'steps': '3' in "),
        (dict(remat=1), "--config must have settings of this script; got 'remat': 1 in "),
        (dict(steps=0), "--steps must be between 1 and 2147483647; got 0"),
        (dict(made_by="a person"), "--config must be the run.json of a run of this script; got "),
    ],
)
def test_config_with_a_wrong_setting_names_it(change, fragment, tmp_path, capsys):
    assert main(["--config", written(tmp_path / "run.json", **change)]) == 2
    assert fragment in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "steps", "warmup"),
    [("--steps 9999", 9999, 200), ("--steps 50", 50, 5), ("--steps 50 --warmup-steps 20", 50, 20)],
)
def test_flag_overrides_its_preset(arguments, steps, warmup):
    config = parsed("--preset", "gpt2-small", *arguments.split())
    assert (config.steps, config.warmup_steps) == (steps, warmup)
    assert config.model == PRESETS["gpt2-small"].model


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--data", "/no/such/place"], "--data must be a file or a folder; got '/no/such/place'"),
        (["--data", "EMPTY"], "--data must have text in it; found none in"),
        (["--context", "5000"], "--context must be below the length of both sides of the text"),
        (["--context", "1"], "--context must be between 2 and 2147483647; got 1"),
        (["--embed-dim", "15"], "--embed-dim must be a multiple of --num-heads; got 15 and 2"),
        (["--batch-size", "3"], "--batch-size must be a multiple of --accumulation; got 3 and 2"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--warmup-steps", "12"], "--warmup-steps must be below --steps; got 12 and 12"),
        (["--learning-rate", "nan"], "--learning-rate must be between 1e-30 and 1e+30; got nan"),
        (["--beta2", "1.5"], "--beta2 must be between 0 and 0.999999; got 1.5"),
        (["--top-k", "some"], "argument --top-k: invalid int or auto value: 'some'"),
        (["--prompt", ""], "--prompt must have a character; got ''"),
        (["--out-dir", ""], "--out-dir must have a character; got ''"),
        (["--out-dir", "FILE/run"], "reading or writing failed: [Errno 20] Not a directory: "),
        (["--out-dir", "FILE"], "--out-dir must be a folder; got the file"),
        (["--embed-dim", "400000"], "--embed-dim and the other sizes must fit the memory of the"),
        (["--attention", "triton"], "--attention must be one that serves here; got 'triton': The"),
        (["--compare-attention"], "--compare-attention must be another than --attention; got 'ref"),
        (["--compare-attention", "triton"], "--attention must be one that serves here; got 'trit"),
        (["--tensorboard"], "--tensorboard needs the package tensorboardX: run pip install tensor"),
        (["--preset", "huge"], "argument --preset: invalid choice: 'huge'"),
        (["--learning-rat", "1"], "arguments: --learning-rat 1; did you mean --learning-rate?"),
    ],
)
def test_bad_input_is_one_sentence(config, tmp_path, capsys, arguments, fragment, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    paths = {"EMPTY": "empty", "FILE": "file", "FILE/run": "file/run"}
    arguments = [str(tmp_path / paths[x]) if x in paths else x for x in arguments]
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


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [(x, *RANGES[x]) for x in RANGES] + [("steps", 1, INT), ("clip_norm", TINY, HUGE)],
)
def test_number_out_of_its_range_is_refused(name, low, high, capsys):
    for value in (low - 1, high * 10, "nan", 10**400):
        with contextlib.suppress(SystemExit):  # argparse refuses a NaN that must be an int
            assert main([f"--{name.replace('_', '-')}={value}", "--data", "/no/such/place"]) == 2
        error = capsys.readouterr().err
        assert (
            f"--{name.replace('_', '-')} must be " in error or "invalid int value: 'nan'" in error
        )


def test_model_must_fit_the_memory_of_a_gpu():
    gpu = types.SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 1_300_000_000})
    one = {"fsdp": 1, "tensor": 1}
    for name, sizes in (("cpu", one), ("gpt2-small", {"fsdp": 2, "tensor": 1})):
        check_memory(PRESETS[name], parameters_of(PRESETS[name].model), sizes, gpu)
    large = PRESETS["gpt2-small"]
    with pytest.raises(UserError) as caught:
        check_memory(large, parameters_of(large.model), one, gpu)
    assert "got 85,150,464 parameters, which with optimizer and gradient" in str(caught.value)
    assert "need at least 1.4 of 1.3 GB: choose a smaller model, or more dev" in str(caught.value)


def test_out_of_memory_is_one_sentence(config, monkeypatch, capsys):
    def full(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand\nmore")

    monkeypatch.setattr(train_gpt, "run_steps", full)
    assert main(flags(config)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--batch-size must fit the device's memory; got 2 sequences of 12 tokens" in error


@pytest.mark.parametrize("missing", ["optax", "orbax"])
def test_missing_package_is_one_sentence(monkeypatch, missing):
    for name in [n for n in sys.modules if n.partition(".")[0] in (missing, "scripts")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(train_gpt.__file__)
    assert f"no module named '{missing}" in caught.value.code
    assert "pip install -e '.[train]'" in caught.value.code
