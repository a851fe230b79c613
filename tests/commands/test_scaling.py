"""docs/scaling.md: bytes are those that XLA compiles, times those that were measured."""

import itertools
import math
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import children
from support.repository import ROOT

import pallas_flash
from scripts.benchmarks import bench_scaling, results

PAGE = ROOT / "docs" / "scaling.md"

DEVICES = 8
B, T, S, N, H, V = 2, 64, 32, 16, 12, 4

METHODS = ("ring", "gather", "heads")


def sent(method, num_kv_heads, kv_len=S, steps=DEVICES):
    """Return the bytes that the page's code gives for a call in float32."""
    (code,) = re.findall(r"^def received\(.*?^$", PAGE.read_text(), re.M | re.S)
    page = {}
    exec(code, page)
    queries, keys, lse = (
        4 * B * x // DEVICES for x in (N * T * (H + V), num_kv_heads * kv_len * (H + V), N * T)
    )
    return page["received"](method, steps, num_kv_heads, queries, keys, lse)


# ------------------------------------------------------------------------------------------------
# Bytes
# ------------------------------------------------------------------------------------------------


def received(text: str) -> int:
    """Bytes that a device gets from others by the collectives of a compiled program."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    total = 0
    for shapes, name in re.findall(rf" = (.*?) ({names})(?:-start)?\(", text):
        assert name in ("all-gather", "all-to-all", "collective-permute"), name
        numbers = sum(
            math.prod(int(n) for n in shape.split(",") if n)
            for shape in re.findall(r"f32\[([\d,]*)\]", shapes)
        )
        # A part of the numbers that are gathered or exchanged was here.
        own = 0 if name == "collective-permute" else numbers // DEVICES
        total += 4 * (numbers - own)
    return total


def check_bytes(method, num_kv_heads, window):
    """A window that sees the own shard and the one before it: the ring has two steps."""
    mesh = jax.make_mesh((DEVICES,), ("sequence",), axis_types=(AxisType.Auto,))
    kv_len = T if window else S
    shapes = [(T, N, H), (kv_len, num_kv_heads, H), (kv_len, num_kv_heads, V), (T, N, V)]
    sharding = NamedSharding(mesh, P(None, "sequence"))
    arrays = [jax.ShapeDtypeStruct((B, *x), jnp.float32, sharding=sharding) for x in shapes]
    options = dict(is_causal=True, local_window_size=(T // DEVICES, None)) if window else {}

    def forward(q, k, v):
        return pallas_flash.attention(
            q, k, v, implementation="xla", context_parallelism=method, **options
        )

    def both(q, k, v, do):
        o, pull = jax.vjp(forward, q, k, v)
        return o, *pull(do)

    def compiled(fn, *arrays):
        return received(jax.jit(fn).lower(*arrays).compile().as_text())

    of_forward = compiled(forward, *arrays[:3])
    of_both = compiled(both, *arrays)
    want = sent(method, num_kv_heads, kv_len, 2 if window else DEVICES)
    if method == "heads":
        # XLA drops what is not asked for: the LSE, of the forward alone.
        away = (DEVICES - 1) * 4 * B * N * T // DEVICES**2
        assert of_forward == want[0] - away
    else:
        assert of_forward == want[0]
    assert of_both == sum(want)


# The method, key/value heads, and whether there is a window.
SENT = [("ring", 4, True), ("ring", 4, False), ("gather", 4, False), ("heads", 8, False),
        ("heads", 4, False)]  # fmt: skip


def main(call):
    assert len(jax.devices()) == DEVICES
    check_bytes(*SENT[call])
    print("checked")


def environment(devices: int, *paths):
    """Return the environment of a process that has devices, and compiles as cheaply as tests."""
    xla = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    cheap = {"XLA_FLAGS": xla, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
    return os.environ | cheap | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


@pytest.mark.extended
@pytest.mark.parametrize("call", range(len(SENT)))
def test_devices_receive_what_the_page_says(call):
    here = Path(__file__)
    child = children.run(
        [sys.executable, "-c", f"import {here.stem}; {here.stem}.main({call})"],
        env=environment(DEVICES, here.parent, here.parents[1], ROOT),
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-5000:]
    assert child.stdout == "checked\n"


# ------------------------------------------------------------------------------------------------
# Times
# ------------------------------------------------------------------------------------------------

LINES = results.load(ROOT / "docs" / "results" / "h200-scaling.jsonl")


def test_page_has_times_of_two_and_four_gpus():
    page = PAGE.read_text()
    lines = [r for r in LINES if r["pass"] == "forward and backward"]
    for r in lines:
        ms = f"{r['ms']['median']:.1f}"
        if r["T"] == 131072 and "share" in r:
            method = r["config"]["method"] + " in balanced order" * r["config"]["balanced"]
            speed = f"{1 / r['share']:.2f}"
            shown = f"| {method} | {ms} | {speed} |", f"in balanced order gave {speed}."
            assert any(x in page for x in shown)
        elif r["T"] == 131072:
            assert f"takes {ms} ms" in page
    rows = re.findall(r"^\| (\S+) tokens, (.*?) \| (.*) \|$", page, re.M)
    assert len(rows) == 3
    methods = (None, False), ("ring", False), ("ring", True), ("heads", False)
    for tokens, words, cells in rows:
        found = {
            (r["config"].get("method"), r["config"].get("balanced", False)): r["ms"]["median"]
            for r in lines
            if f"{r['T']:,}" == tokens
            and r["causal"] == words.startswith("causal")
            and ("window" in r) == ("window" in words)
        }
        assert [x.strip() for x in cells.split("|")] == [
            f"{found[x]:.1f}" if x in found else "" for x in methods
        ]


def test_training_page_has_measured_times():
    page = (ROOT / "docs" / "training.md").read_text()
    rows = [r for r in LINES if r["pass"] == "update"]
    of_one = {r["shape"]: r["tokens_per_second"] for r in rows if r["config"]["devices"] == 1}
    beside = {"sequence4-64k": "one-64k", "xl-fsdp4": "xl-one"}
    for r in rows:
        one = of_one[beside.get(r["shape"], "one")]
        share = f"{r['tokens_per_second'] / one:.2f}" if r["config"]["devices"] == 4 else ""
        speed = f"{r['ms']['median']:.1f} | {r['tokens_per_second']:,.0f} | {100 * r['mfu']:.1f} %"
        assert f"| {speed} | {r['gb_per_device']:.2f} | {share}".rstrip() in page
    assert page.count(" % | ") == len(rows)


# ------------------------------------------------------------------------------------------------
# scripts/benchmarks/bench_scaling.py
# ------------------------------------------------------------------------------------------------


def test_benchmark_refuses_sizes_that_do_not_fit(monkeypatch):
    wanted = "error: --tokens must be a multiple of twice the number of devices"
    with pytest.raises(SystemExit, match=f"{wanted}.*got 64 tokens and 1 devices"):
        bench_scaling.main(["--tokens", "64"])
    monkeypatch.setattr(jax, "devices", lambda: [None] * 8)
    with pytest.raises(SystemExit, match=f"{wanted}.*got 24 tokens and 8 devices"):
        bench_scaling.main(["--tokens", "24"])
    with pytest.raises(SystemExit, match="--heads must be a multiple of --kv-heads; got 6 and 4"):
        bench_scaling.main(["--tokens", "32", "--heads", "6", "--kv-heads", "4"])


def test_benchmark_does_not_time_wrong_results(monkeypatch, capsys):
    """On one device, where all methods are the same; the second result is another one."""
    results = iter([{"o": jnp.ones(4)}, {"o": 1.1 * jnp.ones(4)}])
    monkeypatch.setattr(bench_scaling, "_results", lambda *_: next(results))
    monkeypatch.setattr(bench_scaling, "_times", lambda *_: {})
    options = bench_scaling._parser().parse_args(["--methods", "ring", "--dtype", "float32"])
    (alone, []), (ring, [record]) = bench_scaling._measure(options, "full", jax.devices()[:1])
    assert (alone, ring, set(record) & {"ms", "red"}) == ("one device", "ring", {"red"})
    assert bench_scaling._cells([record]) == "  WRONG, not timed: o 1.0e-01"


def test_benchmark_prints_times_and_shares():
    times = [{"ms": {"median": 1.5}, "share": 0.5}, {"ms": {"median": 4.0}}]
    assert bench_scaling._cells(times).split() == ["1.500", "0.50", "4.000"]
    assert bench_scaling._cells([{"unserved": "no."}]) == "  not served: no."


@pytest.mark.extended
def test_benchmark_times_every_method(tmp_path):
    flags = "--tokens 32 --heads 2 --kv-heads 2 --head-dim 16 --dtype float32 --masks causal"
    flags += " --patience 0"
    command = [
        sys.executable,
        "scripts/benchmarks/bench_scaling.py",
        *flags.split(),
        "--json",
        "lines",
    ]
    command[1] = str(ROOT / command[1])
    env = environment(2, ROOT)
    run = children.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    assert [line[:7] for line in run.stdout.splitlines()].count("causal ") == 7
    lines = results.load(tmp_path / "lines")
    alone = {r["pass"]: r["ms"]["median"] for r in lines if r["config"] == {"devices": 1}}
    shared = [r for r in lines if r["config"] != {"devices": 1}]
    expected = itertools.product(("ring", "gather", "heads"), (False, True), alone)
    found = [(r["config"]["method"], r["config"]["balanced"], r["pass"]) for r in shared]
    assert found == list(expected) and len(alone) == 2
    for record in shared:
        assert record["config"]["devices"] == 2
        assert record["share"] == pytest.approx(record["ms"]["median"] / alone[record["pass"]])
        assert max(record["errors"].values()) < 1e-5
