"""The trainer's command line, and the memory that its sizes take."""

import contextlib
import dataclasses
import runpy
import sys
import types

import jax
import pytest
from support import tiny_run
from support.tiny_run import flags, parameters_of

import models.train
from models.train import main
from models.training import loop
from models.training.mesh import check_memory
from models.training.processes import UserError
from models.training.settings import (
    CHOICES,
    HUGE,
    INT,
    RANGES,
    TINY,
    config_from_flags,
    make_parser,
)
from pallas_flash._execution import limits

pytestmark = pytest.mark.usefixtures("compile_once")


def test_every_field_is_a_flag_with_a_help():
    named = {action.dest: action.help for action in make_parser()._actions}
    assert set(named) == set(dataclasses.asdict(tiny_run.TINY)) | {"preset", "help"}
    assert set(CHOICES["attention"]) == {*limits.IMPLEMENTATIONS}
    for name, text in named.items():
        assert text, f"{name} has no help"
        assert "None" not in text
    assert (
        "(default: 800; gpt2-small: 2000; gpt3-xl: 2000; fine-tune: 200; lora: 200)"
        in named["steps"]
    )
    assert named["num_kv_heads"].endswith("by default as many as of queries")
    assert named["remat"].endswith("(default: False; gpt3-xl: True)")


def parsed(*arguments):
    return config_from_flags(vars(make_parser().parse_args(arguments)))


def test_flags_of_a_configuration_give_it_back(config):
    other = dataclasses.replace(config, attention=None, remat=True, gradient_check=True)
    for x in (config, other):
        assert dataclasses.asdict(parsed(*flags(x))) == dataclasses.asdict(x)


@pytest.mark.parametrize(
    ("arguments", "steps", "warmup"),
    [("--steps 9999", 9999, 200), ("--steps 50", 50, 5), ("--steps 50 --warmup-steps 20", 50, 20)],
)
def test_flag_overrides_its_preset(arguments, steps, warmup):
    config = parsed("--preset", "gpt2-small", *arguments.split())
    assert (config.steps, config.warmup_steps) == (steps, warmup)
    assert (config.features, config.context) == (768, 1024)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--data", "/no/such/place"], "--data must be a file or a folder; got '/no/such/place'"),
        (["--data", "EMPTY"], "--data must have text in it; found none in"),
        (["--context", "5000"], "--context must be below the length of both sides of the text"),
        (["--context", "1"], "--context must be between 2 and 2147483647; got 1"),
        (["--features", "15"], "--features must be a multiple of --num-heads; got 15 and 2"),
        (["--batch-size", "3"], "--batch-size must be a multiple of --accumulation; got 3 and 2"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--warmup-steps", "12"], "--warmup-steps must be below --steps; got 12 and 12"),
        (["--learning-rate", "nan"], "--learning-rate must be between 1e-30 and 1e+30; got nan"),
        (["--out-dir", ""], "--out-dir must have a character; got ''"),
        (["--out-dir", "FILE/run"], "reading or writing failed: [Errno 20] Not a directory: "),
        (["--out-dir", "FILE"], "--out-dir must be new, or the folder of a run; got"),
        (["--features", "400000"], "--features and the other sizes must fit the memory of the"),
        (
            ["--attention", "triton"],
            "--attention must be one that serves the call; got 'triton'. The",
        ),
        (["--batch-invariant"], '--attention must be None or "mosaic" with '),
        (["--preset", "huge"], "argument --preset: invalid choice: 'huge'"),
        (["--learning-rat", "1"], "unrecognized arguments: --learning-rat 1"),
        (["--data", "/dev/null"], "--data must be a file or a folder; got '/dev/null', which is"),
    ],
)
def test_bad_input_is_one_sentence(config, tmp_path, capsys, arguments, fragment):
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
    assert message[0].startswith(("train: error: ", "python -m models.train: error: "))


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [(x, *RANGES[x]) for x in RANGES] + [("steps", 1, INT), ("learning_rate", TINY, HUGE)],
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
    one, large = {"fsdp": 1, "tensor": 1}, parsed("--preset", "gpt2-small")
    check_memory(parsed(), parameters_of(parsed()), one, gpu)
    check_memory(large, parameters_of(large), one | {"fsdp": 2}, gpu)
    with pytest.raises(UserError) as caught:
        check_memory(large, parameters_of(large), one, gpu)
    assert "got 85,150,464 parameters, which with optimizer and gradient" in str(caught.value)
    assert "need at least 1.4 of 1.3 GB: choose a smaller model, or more dev" in str(caught.value)


def test_out_of_memory_is_one_sentence(config, monkeypatch, capsys):
    def full(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand\nmore")

    monkeypatch.setattr(loop, "run_steps", full)
    assert main(flags(config)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--batch-size must fit the device's memory; got 2 sequences of 12 tokens" in error


@pytest.mark.parametrize("missing", ["optax", "orbax"])
def test_missing_package_is_one_sentence(monkeypatch, missing):
    for name in [n for n in sys.modules if n.partition(".")[0] in (missing, "models")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(models.train.__file__)
    assert f"no module named '{missing}" in caught.value.code
    assert "pip install -e '.[train]'" in caught.value.code
