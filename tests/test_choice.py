"""None takes "mosaic" on Hopper where the times in docs/results say that it is faster.

After a new measurement this says what the tables of `pallas_flash._faster` are to be.
"""

import math
import re
import statistics

import jax
import jax.numpy as jnp
import pytest
from claims_of_steps import PARTS, times_of_parts
from described_gpus import described_gpu
from results import (
    HOPPER_CHOICE,
    HOPPER_DBIAS,
    PASSES,
    SUSTAINED,
    all_gains,
    lines,
    times_of_few_programs,
)

import pallas_flash
from pallas_flash import _compat, _faster
from scripts.benchmark.shapes import SHAPES

# "triton"'s time over that of "mosaic" from which on None takes the latter.
FASTER = 1.03


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(_compat, "has_mosaic_gpu", lambda: True)
    with described_gpu("NVIDIA H200"):
        yield


def table_of(attention_pass):
    """The lengths in the package's table, by head size and kind."""
    return {
        (size, kind): length
        for size, by_length in _faster.FASTER_BY_MOSAIC[attention_pass].items()
        for length, kinds in by_length.items()
        for kind in kinds.split(", ")
    }


@pytest.mark.parametrize("attention_pass", PASSES)
def test_none_takes_what_was_measured_to_be_faster(attention_pass):
    wanted = {}
    for key, gain in all_gains(attention_pass).items():
        slower = [length for length, x in gain.items() if x < FASTER]
        if lengths := [length for length in gain if length > max(slower, default=0)]:
            wanted[key] = min(lengths)
    assert table_of(attention_pass) == wanted


def shapes_between():
    """Whether it is causal, the head sizes of keys and values, and milliseconds of each."""
    for row in lines(HOPPER_CHOICE):
        if shape := re.fullmatch(r"(full|causal) (\d+)(?:/(\d+))? T\d+", row["call"]):
            mask, size, value_size = shape.groups()
            if value_size or size not in ("64", "128", "256"):
                yield mask == "causal", int(size), int(value_size or size), row["ms"]


def test_none_takes_head_sizes_between_those_of_the_table_likewise(hopper):
    """At all of these "mosaic" was faster, and narrower values do not matter."""
    tried = set()
    for causal, size, value_size, ms in shapes_between():
        tried.add((size, value_size))
        x = [jax.ShapeDtypeStruct((4, 4096, 16, n), jnp.bfloat16) for n in (size, size, value_size)]
        for name in ms.keys() - {"triton", "cudnn"}:
            assert ms["triton"] >= FASTER * ms[name]
            in_order = name.endswith("reproducible")
            choice = pallas_flash.explain(*x, is_causal=causal, reproducible=in_order)
            assert choice.implementation == "mosaic" and "backward" not in choice.reason
    assert {40, 72, 104, 136, 160, 192, 208, 224} <= {size for size, _ in tried}
    assert {(128, 64), (192, 128)} <= tried


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_times_of_none_are_of_what_it_takes(direction, hopper):
    """By the names of the kernels that ran."""
    others = []
    for record in lines(SUSTAINED):
        if (record["peer"], record["pass"]) != ("ours", direction):
            continue
        shape = SHAPES[record["shape"]]
        x = (
            jax.ShapeDtypeStruct((shape.B, length, heads, size), shape.dtype)
            for length, heads, size in (
                (shape.T, shape.N, shape.D),
                (shape.S, shape.K, shape.D),
                (shape.S, shape.K, shape.value_dim),
            )
        )
        window = None if shape.window is None else (shape.window - 1, 0)
        options = dict(is_causal=shape.causal, local_window_size=window, **shape.arrays())
        choice = pallas_flash.explain(*x, **options)
        chosen = re.search('The backward is that of "(.*?)"', choice.reason)
        other_pass = direction == "backward" and chosen
        taken = chosen[1] if other_pass else choice.implementation
        ran = any(name.endswith("_mosaic_gpu_kernel") for name in record["kernels"])
        if ("mosaic" if ran else "triton") != taken:
            others.append(record["shape"])
    assert not others


def test_none_takes_calls_with_few_queries_of_all_heads_likewise():
    gain = {}
    times = times_of_few_programs()
    for call, (*kind, rows), peer in times:
        # Of few programs with keys of their own another table tells.
        idle = kind[0] == "backward" and rows <= 128 * _faster.FEW_PROGRAMS and "gqa" not in call[0]
        if peer == "ours_mosaic" and not idle:
            x = times[call, (*kind, rows), "ours_triton"] / times[call, (*kind, rows), peer]
            gain.setdefault(tuple(kind), {}).setdefault(rows, []).append(x)
    wanted = {}
    for kind, calls in gain.items():
        by_rows = {rows: statistics.geometric_mean(x) for rows, x in calls.items()}
        slower = [rows for rows, x in by_rows.items() if x < FASTER]
        if enough := [rows for rows in by_rows if rows > max(slower, default=0)]:
            wanted[kind] = min(enough)
    assert wanted == _faster.FEWER_ROWS_MEASURED


def test_none_takes_the_backward_of_few_programs_likewise():
    """With as many programs for the queries of a head as there are then."""
    gain, wanted = {}, {}
    for (size, heads, length), parts in PARTS.items():
        for mask in ("full", "causal") if heads * length <= 128 * _faster.FEW_PROGRAMS else ():
            times = times_of_parts(mask, size, heads, length)
            of_kind = gain.setdefault((size, mask), {}).setdefault(length, [])
            of_kind.append(times["triton"] / times[str(parts)])
    for key, by_length in gain.items():
        slower = [length for length, x in by_length.items() if min(x) < FASTER]
        if lengths := [length for length in by_length if length > max(slower, default=0)]:
            wanted[key] = min(lengths)
    assert table_of("backward of few programs") == wanted


@pytest.mark.parametrize(
    ("attention_pass", "name"),
    [
        ("backward with dbias", "mosaic"),
        ("backward in order with dbias", "mosaic, reproducible"),
    ],
)
def test_none_takes_the_gradient_of_a_bias_likewise(attention_pass, name):
    gain, wanted = {}, {}
    for row in lines(HOPPER_DBIAS):
        axes, mask, size, length = re.fullmatch(
            r"bias \[(.*)\] (full|causal) (64|128) T(\d+)", row["call"]
        ).groups()
        # Who shares it with nobody is not chosen.
        if axes != "B, N, T, S":
            times = gain.setdefault((int(size), mask), {}).setdefault(int(length), [])
            times.append(row["ms"]["triton"] / row["ms"][name])
    for (size, mask), by_length in gain.items():
        slower = [length for length, x in by_length.items() if min(x) < FASTER]
        if lengths := [length for length in by_length if length > max(slower, default=0)]:
            wanted[size, mask] = min(lengths)
            of_bias = size, "bias in 16 bits"
            wanted[of_bias] = min(min(lengths), wanted.get(of_bias, math.inf))
    assert table_of(attention_pass) == wanted
