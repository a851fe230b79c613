"""The trainer's report of its work, its speed and its share of the peak."""

import dataclasses
import json
import re
import types
from pathlib import Path

import jax
import pytest
from support import cases
from support.tiny_run import TINY, flags, model_of, parameters_of

from models.train import main
from models.training import loop
from models.training.report import PEAK_FLOPS, Work, peak_bytes, program_bytes, work_of
from models.training.settings import config_from_flags

pytestmark = pytest.mark.usefixtures("compile_once")


def work_on(kind, config=TINY, count=1):
    return work_of(model_of(config), config.context, parameters_of(config), 4, kind, count)


def test_work_is_of_palm_with_half_the_scores():
    work = work_on("cpu")
    # q, k, v and out; gate, up and down; three norms.
    parameters = 16 * (16 + 8 + 8 + 16) + 3 * 16 * 64 + 3 * 16
    scores = 12 * 1 * 16 * 12 / 2
    assert work == Work(tokens=4 * 12, flops_per_token=6 * parameters + scores, peak=None)
    # Twice the layers and twice the context.
    deep = dataclasses.replace(TINY, num_layers=2, context=24)
    parameters += parameters - 16
    assert work_on("cpu", deep).flops_per_token == 6 * parameters + 4 * scores


@pytest.mark.parametrize(
    ("name", "millions"),
    cases.default([("gpt2-small", 85)], [("gpt2-small", 85), ("gpt3-xl", 1214)]),
)
def test_preset_has_the_parameters_it_says(name, millions):
    config = config_from_flags({"preset": name})
    scores = 6 * config.num_layers * config.features * config.context
    parameters = (work_on("cpu", config).flops_per_token - scores) / 6
    assert round(parameters / 1e6) == millions


def test_peak_is_of_exactly_this_device():
    assert work_on("NVIDIA H200").peak == 989e12
    assert work_on("NVIDIA A100-SXM4-80GB").peak == 312e12
    # A slice of a GPU and a slower one of a similar name.
    for kind in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 NVL", "cpu", "TPU v4"):
        assert work_on(kind).peak is None
    assert "peak 989 TFLOP/s" in str(work_on("NVIDIA H200"))
    assert work_on("NVIDIA H200", count=4).peak == 4 * 989e12
    assert "no peak known, so no MFU" in str(work_on("cpu"))


@pytest.mark.parametrize(("peak", "mfu", "said"), [(1e12, 0.15, ", MFU 15.0%"), (None, None, "")])
def test_mfu_is_the_share_of_the_peak(peak, mfu, said):
    speed = Work(tokens=1000, flops_per_token=3_000_000, peak=peak).speed(ms=20.0)
    assert speed == (20.0, 50_000.0, mfu and pytest.approx(mfu))
    assert str(speed) == f"20.0 ms/step, 50,000 tokens/s{said}"


def test_program_bytes_count_all_its_arrays():
    numbers = jax.ShapeDtypeStruct((1000,), jax.numpy.float32)
    add = jax.jit(lambda x, y: x + y, donate_argnums=0)
    assert program_bytes(add.lower(numbers, numbers).compile()) == 8000
    sort = jax.jit(lambda x: jax.numpy.sort(x)[::2])
    assert program_bytes(sort.lower(numbers).compile()) >= 4000 + 2000 + 4000


def test_peak_bytes_are_of_the_fullest_device(monkeypatch):
    assert peak_bytes() is None  # CPUs do not count.
    stats = {"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 7}, None
    devices = [types.SimpleNamespace(memory_stats=lambda x=x: x) for x in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert peak_bytes() == 7


def test_a_log_gets_lines_between_evaluations(config, monkeypatch, capsys):
    monkeypatch.setattr(loop, "LOG_SECONDS", 0)
    assert main(flags(config, eval_every=5)) == 0
    out = capsys.readouterr().out
    lines = re.findall(r"^step +(\d+)   loss \d\.\d{4}   (held|\d\d:\d\d) ", out, re.M)
    assert [int(step) for step, _ in lines] == list(range(1, 13))
    assert [int(step) for step, word in lines if word == "held"] == [5, 10, 12]
    assert re.search(r"held out \d\.\d{4} nats per token, \d\.\d{3} bits per byte, ", out)


@pytest.mark.parametrize("known", cases.default([True], [False, True]), ids=["no peak", "a peak"])
def test_mfu_is_shown_and_written(config, monkeypatch, capsys, known):
    if known:
        monkeypatch.setitem(PEAK_FLOPS, jax.devices()[0].device_kind, 1e9)
    assert main(flags(config)) == 0
    out = capsys.readouterr().out.splitlines()
    shown = [line for line in out if line.startswith(("step ", "done "))]
    # A line for each look at the held-out text, and the last.
    assert len(shown) == 4
    assert all(("MFU" in line) == known for line in shown)
    assert any(re.fullmatch(r"compiled   in .* s; a step takes 0.00 GB a device", x) for x in out)
    flops = work_on("cpu").flops_per_token
    for line in Path(config.out_dir, "metrics.jsonl").read_text().splitlines():
        line = json.loads(line)
        expected = pytest.approx(line["tokens_per_second"] * flops / 1e9) if known else None
        assert line["mfu"] == expected
