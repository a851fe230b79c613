"""`python -m pallas_flash tune`."""

import os
import sys

import jax
import jax.numpy as jnp
import pytest
from support import children
from support.tune_cases import (
    FAST,
    OTHER,
    command,
    features,
    mistake,
    store,
    zeros_for_random_numbers,
)
from support.tune_fixtures import h200_here, instant_search, own_file  # noqa: F401  Tests name them by their arguments.

from pallas_flash._problem.features import features_of
from pallas_flash._selection import tuned
from pallas_flash.tuning import TileSizes


def test_the_command_tunes_and_prints_a_table(monkeypatch, capsys, h200, search, file):
    words = "--head-dim 64 --length 24 --heads 6 --kv-heads 2 --batch 3 --causal --dtype float16"
    assert command(monkeypatch, *words.split(), "--passes", "forward") == 0
    [(p, passes)] = search
    assert p.query.shape == (3, 24, 6, 64)
    assert p.key.shape == p.value.shape == (3, 24, 2, 64)
    assert (p.dtype, passes) == (jnp.float16, ["forward"])
    assert " causal mask" in tuned.key(features_of(p), "")
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("1.0000 ms  winner")
    assert out[-1] == f"a clock; stored in {file}"


def test_defaults_of_the_command(monkeypatch, capsys, h200, search, file):
    zeros_for_random_numbers(monkeypatch)
    assert command(monkeypatch, "--dry-run") == 0
    [(p, passes)] = search
    assert p.query.shape == p.key.shape == p.value.shape == (1, 4096, 16, 128)
    assert (p.dtype, passes) == (jnp.bfloat16, ["forward", "backward"])
    assert not p.mask.leaves
    assert capsys.readouterr().out.endswith("not stored\n")
    assert not file.exists()


def test_the_command_shows_and_clears(monkeypatch, capsys, file):
    assert command(monkeypatch, "--show") == 0
    assert capsys.readouterr().out == f"no winners in {file}\n"
    store(TileSizes(forward=FAST, dq=OTHER))
    assert command(monkeypatch, "--show") == 0
    assert capsys.readouterr().out.splitlines() == [
        tuned.key(features(), "NVIDIA H200"),
        "  forward   32 x 32, 1 warps, 1 stages",
        "  dq        16 x 32, 1 warps, 1 stages",
    ]
    assert command(monkeypatch, "--clear") == 0
    assert capsys.readouterr().out == f"removed {file}\n"
    assert not file.exists()
    for words in ("--clear", "--show"):
        assert command(monkeypatch, words) == 0
        assert capsys.readouterr().out == f"no winners in {file}\n"


def test_options_of_the_command(monkeypatch, capsys, h200, search):
    words = "--length 24 --heads 2 --batch 2 --window 5 --segments 3 --soft-cap 9 --bias --dry-run"
    assert command(monkeypatch, *words.split()) == 0
    [(p, _)] = search
    i = jnp.arange(24)
    visible = p.mask.allowed(0, 0, i[:, None], i[None])
    q, k = i[:, None], i[None]
    assert (visible == (q >= k) & (q - k < 5) & (q // 8 == k // 8)).all()
    assert "documents by arrays mask + bias in 16 bits + soft cap" in tuned.key(features_of(p), "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--heads 3 --kv-heads 2", "--heads must be a multiple of --kv-heads; got 3, 2."),
        ("--segments 9", "--segments must be at most --length; got 9 and 8."),
        ("--soft-cap nan", "--soft-cap must be a positive number; got nan."),
        ("--casual", "unrecognized arguments: --casual"),
        ("--show", "PALLAS_FLASH_TUNED=0 switches winners off"),
        ("--clear", "PALLAS_FLASH_TUNED=0 switches winners off"),
        ("--passes sideways", "invalid choice: 'sideways'"),
        ("--dtype float64", "invalid choice: 'float64'"),
        ("--head-dim -1", "argument --head-dim: must be an int from 1 to 2**31 - 1; got '-1'."),
        ("--length 0", "argument --length: must be an int"),
        ("--heads 1e3", "argument --heads: must be an int"),
        ("--kv-heads nan", "argument --kv-heads: must be an int"),
        ("--batch 2147483648", "argument --batch: must be an int"),
        ("--length 2147483647 --batch 2147483647", "size"),
    ],
)
def test_mistakes_are_told_in_a_line(monkeypatch, capsys, words, message):
    monkeypatch.setenv("PALLAS_FLASH_TUNED", "0")
    assert command(monkeypatch, "--length", "8", *words.split()) == 2
    assert message in mistake(capsys)


def test_a_machine_without_devices_is_told_in_a_line(monkeypatch, capsys):
    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    assert command(monkeypatch, "--length", "8") == 2
    assert "JAX must find a device; got AssertionError()." in mistake(capsys)


@pytest.mark.extended
def test_a_reader_that_has_seen_enough_is_no_mistake(file):
    """As under `| head`: standard output is a pipe that nobody reads."""
    store()
    read, write = os.pipe()
    os.close(read)
    run = children.run(
        [sys.executable, "-m", "pallas_flash", "tune", "--show"],
        stdout=write,
        stderr=children.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (0, b"")


@pytest.mark.extended
def test_without_a_gpu_the_command_says_so():
    """In a process of its own, with warnings as errors."""
    run = children.run(
        [sys.executable, "-W", "error", "-m", "pallas_flash", "tune", "--length", "8"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    assert run.returncode == 2
    assert not run.stdout
    assert run.stderr == (
        "python -m pallas_flash tune: error: tuning needs a GPU on which the kernels serve the "
        "call: the kernels need an NVIDIA GPU, and the device is cpu.\n"
    )
