"""`scripts/train_gpt.py`: it learns, resumes to the same bits, and names mistakes."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from support import cases, children
from support.repository import ROOT

import pallas_flash.flax
from models import Decoder
from models.training import files
from scripts import train_gpt
from scripts.train_gpt import main

pytestmark = pytest.mark.usefixtures("compile_once")

TINY = [
    "--num-layers",
    "1",
    "--num-heads",
    "2",
    "--features",
    "16",
    "--context",
    "12",
    "--batch-size",
    "4",
]
TINY += ["--steps", "12", "--eval-every", "4", "--learning-rate", "0.01"]


@pytest.fixture
def words(corpus, tmp_path):
    return [*TINY, "--data", str(corpus), "--out-dir", str(tmp_path / "run")]


def log_of(folder):
    """The newest checkpoint's settings and losses."""
    newest = max(Path(folder, "checkpoints").iterdir(), key=lambda p: int(p.name))
    return json.loads((newest / "log" / "metadata").read_text())


def test_file_is_short():
    assert len(Path(train_gpt.__file__).read_text().splitlines()) <= 300


def test_run_learns_and_leaves_curve_weights_and_sample(words, tmp_path, capsys):
    main(words)
    out, losses = capsys.readouterr().out, log_of(tmp_path / "run")["losses"]
    assert losses["train"][0] == pytest.approx(np.log(256), abs=0.2)
    assert losses["train"][-1] < losses["train"][0] - 0.5
    assert [step for step, _ in losses["held out"]] == [4, 8, 12]
    assert len(losses["train"]) == 12
    assert re.search(r"gradients: error \d\.\de-0[78] relative", out)
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert Decoder.from_pretrained(tmp_path / "run" / "weights").config.context == 12
    assert "\ndef " in out
    # The same command again trains nothing.
    main(words)
    out = capsys.readouterr().out
    assert "resuming after step 12" in out and "step    12:" not in out


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("step", cases.default([7], [3, 7, 12]))
def test_killed_run_resumes_to_the_same_bits(words, tmp_path, monkeypatch, capsys, step):
    whole = [*words[:-1], str(tmp_path / "whole")]
    main(whole)
    real = train_gpt.training_batch

    def training_batch(text, at, flags):
        if at == step:
            raise Killed
        return real(text, at, flags)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(train_gpt, "training_batch", training_batch)
        main(words)
    capsys.readouterr()
    main(words)
    # From the start it would come to the same bits, too.
    assert ("resuming after step" in capsys.readouterr().out) == (step > 4)
    assert log_of(tmp_path / "run") == log_of(tmp_path / "whole")
    weights = [tmp_path / x / "weights" / "model.safetensors" for x in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.extended
def test_sigkill_at_random_moments_loses_nothing(words, tmp_path):
    """A checkpoint after every other step, so that kills fall into writing, too."""
    words = [*words, "--steps", "150", "--eval-every", "2"]
    environment = {
        **os.environ,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, train_gpt.__file__, *words]
    random, kills = np.random.default_rng(), 0
    for _ in range(20):
        process = children.start(
            command, env=environment, cwd=ROOT, stdout=children.PIPE, stderr=children.STDOUT
        )
        time.sleep(random.uniform(3, 12))
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), out
        kills += process.returncode != 0
    assert kills > 5
    main(words)
    main([*words, "--out-dir", str(tmp_path / "whole")])
    assert log_of(tmp_path / "run") == log_of(tmp_path / "whole")


def test_second_run_in_a_folder_is_refused(words, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    refused = pytest.raises(SystemExit, match=r"^error: --out-dir must be in no other run's use; g")
    with files.lock(tmp_path / "run" / "train.lock"), refused:
        main(words)
    # A kill may leave the lock's file alone.
    assert [x.name for x in (tmp_path / "run").iterdir()] == ["train.lock"]
    main(words)
    assert "resuming" not in capsys.readouterr().out


def test_other_settings_are_refused_by_name(words):
    main(words)
    with pytest.raises(SystemExit, match=r"^error: --out-dir must .* in num_heads, seed: go back"):
        main([*words, "--seed", "1", "--num-heads", "4"])


@pytest.mark.parametrize(
    ("more", "fragment"),
    [
        (
            "--data /no/such/place",
            "error: --data must be text, of more bytes on both sides than a ",
        ),
        (f"--out-dir {__file__}", "error: --out-dir must be new, or have a run of this script; g"),
        ("--out-dir /proc/run", "error: [Errno 2] No such file or directory: '/proc/run'"),
        ("--out-dir models", "error: --out-dir must be new, or have a run of this script; got "),
        ("--features 15", "error: --features must be a multiple of --num-heads; got 15 and 2"),
        (
            "--num-kv-heads 3",
            "error: --num-heads must be a multiple of --num-kv-heads; got ",
        ),
        ("--attention triton", "error: --attention must be one that serves the call; got "),
        ("--learning-rate 1e9", "error: --learning-rate must be lower; got a loss of "),
    ],
)
def test_mistake_is_one_sentence(words, more, fragment):
    with pytest.raises(SystemExit) as caught:
        main([*words, *more.split()])
    assert caught.value.code.startswith(fragment)
    assert "\n" not in caught.value.code


@pytest.mark.parametrize(
    "more", ["--steps 0", "--steps many", "--preset huge", "--data=", "--stepz 3"]
)
def test_wrong_flag_is_named(words, more, capsys):
    with pytest.raises(SystemExit):
        main([*words, *more.split()])
    assert f"error: {'unrec' if 'stepz' in more else 'argument ' + more[:6]}" in (
        capsys.readouterr().err
    )


def test_wrong_gradient_stops_the_run(words, monkeypatch):
    real = pallas_flash.flax._layer.attention

    def attention(query, key, value, *, implementation, **options):
        if implementation != "reference":
            query = 1.001 * query - jax.lax.stop_gradient(0.001 * query)
        return real(query, key, value, implementation="reference", **options)

    monkeypatch.setattr(pallas_flash.flax._layer, "attention", attention)
    with pytest.raises(SystemExit, match="--attention must be exact; got an error of"):
        main(words)
