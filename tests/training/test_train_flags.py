"""The training script's command line, and the memory that its sizes take."""

import dataclasses
import types
import typing

import jax
import pytest
from support.tiny_run import TINY, flags, parameters_of

from models.gpt import GPTConfig
from pallas_flash import _select
from scripts import train_gpt
from scripts.train_gpt import main
from scripts.training.memory import check_memory, parameter_count
from scripts.training.messages import UserError
from scripts.training.settings import (
    CHOICES,
    PRESETS,
    RANGES,
    TrainConfig,
    config_from_flags,
    flat_config,
    make_parser,
)

pytestmark = pytest.mark.usefixtures("compile_once")


def test_every_field_is_a_flag_with_a_help():
    named = {}
    parser = make_parser()
    assert "auto is bfloat16 on a GPU" in " ".join(parser.format_help().split())
    for action in parser._actions:
        named[action.dest] = action.help
    expected = set(flat_config(TINY)) - {"vocab_size"}
    assert set(named) == expected | {"preset", "restart", "help"}
    assert set(CHOICES["attention"]) == {"auto", "cudnn", *_select.IMPLEMENTATIONS}
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
