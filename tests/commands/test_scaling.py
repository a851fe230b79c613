"""docs/scaling.md and the model behind it: bytes are those that XLA compiles, speeds measured."""

import itertools
import json
import math
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import children
from support.repository import ROOT

import pallas_flash
from pallas_flash._execution.context import cost
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.masks import Mask, PositionBand
from pallas_flash._problem.operands import Positions
from scripts import bench_scaling
from scripts.benchmark import results

PAGE = ROOT / "docs" / "scaling.md"

DEVICES = 8
B, T, S, N, H, V = 2, 64, 32, 16, 12, 4

METHODS = ("ring", "gather", "heads")


def load(num_kv_heads, itemsize=4):
    rows, kv_rows = B * N * T // DEVICES, B * num_kv_heads * S // DEVICES
    return cost.Load(DEVICES, rows, kv_rows, S // DEVICES, H + V, itemsize, num_kv_heads)


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
    each, work = load(num_kv_heads), cost.whole(DEVICES)
    if window:
        each = each._replace(kv_rows=B * num_kv_heads * T // DEVICES, block=T // DEVICES)
        work = work._replace(steps=np.array([0.5, 0.5]))
    want = cost.sent(each, work, method)
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
# Seconds
# ------------------------------------------------------------------------------------------------

RESULTS = ROOT / "docs" / "results" / "archive"


def rows_of(file):
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


def test_kernels_have_the_speed_that_was_measured():
    found = []
    for row in rows_of("h100-2026-11-22.jsonl"):
        if (row["peer"], row["shape"]) == ("ours_mosaic", "128-full-2k"):
            number = ("forward", "backward").index(row["pass"])
            found.append((number, row["T"], 1e12 * row["tflops"]))
    for row in rows_of("h200-x2-2026-11-22.jsonl"):
        if row.get("on") == "one GPU" and row["implementation"] == "mosaic":
            pairs = row["T"] ** 2 / (2 if row["what"] == "causal" else 1)
            times = row["forward_ms"], row["ms"] - row["forward_ms"]
            for number, (products, ms) in enumerate(zip((2, 5), times, strict=True)):
                found.append((number, row["T"], 2 * products * pairs * 32 * 128 / (ms / 1e3)))
    assert len(found) == 6
    for number, length, speed in found:
        model = cost.SPEED[number] / (1 + cost.HALF / length)
        assert abs(model / speed - 1) < 0.06, (number, length, model / speed)


def test_page_has_times_of_two_and_four_gpus():
    found = {}
    for row in rows_of("h200-x2-2026-11-22.jsonl"):
        if row.get("axes") == "auto" and "ms" in row:
            found["2", row["what"], str(row["T"]), row["method"]] = row["ms"]
    for row in rows_of("h200-x4-2026-11-22.jsonl"):
        if "method" in row:
            method = row["method"] + " in balanced order" * row["balanced"]
            ms = row["ms"]["forward and backward"]
            found["4", row["mask"], str(row["tokens"]), method] = ms
            share = f"{1 / row['share']['forward and backward']:.2f}"
            shown = f"| {method} | {ms:.1f} | {share} |", f"in balanced order gave {share}."
            assert any(x in PAGE.read_text() for x in shown)
    line = r'^    \((\d), "(\w+)", (\d+), "(.*?)", ([\d.]+)\),$'
    table = re.findall(line, PAGE.read_text(), re.M)
    assert len(table) == 8
    for *what, ms in table:
        assert round(found[tuple(what)], 1) == float(ms)


def test_training_page_has_measured_times():
    page = (ROOT / "docs" / "training.md").read_text()
    rows = [row for row in rows_of("h200-x4-2026-11-22.jsonl") if row["program"] == "train_gpt"]
    of_one = {row["name"]: row["tokens_per_second"] for row in rows if row["devices"] == 1}
    beside = {"sequence4-64k": "one-64k", "xl-fsdp4": "xl-one"}
    for row in rows:
        one = of_one[beside.get(row["name"], "one")]
        memory = re.search(r"a step takes (\S+) GB", row["compiled"])[1]
        share = f"{row['tokens_per_second'] / one:.2f}" if row["devices"] == 4 else ""
        speed = f"{row['ms']:.1f} | {row['tokens_per_second']:,.0f} | {100 * row['mfu']:.1f} %"
        assert f"| {speed} | {memory} | {share}".rstrip() in page
    assert page.count(" % | ") == len(rows)


def of_tokens(each, devices, heads=32, kv_heads=8):
    """Return the load of `each` tokens on a device, heads of 128 in 16 bits."""
    return cost.Load(devices, each * heads, each * kv_heads, each, 256, 2, kv_heads)


@pytest.mark.parametrize(("devices", "link"), [(8, cost.NVLINK), (64, cost.NETWORK)])
def test_messages_hide_from_enough_tokens_on(devices, link, monkeypatch):
    """In the ring's steps, with kernels as fast in short blocks as in long ones."""
    monkeypatch.setattr(cost, "HALF", 0)
    monkeypatch.setattr(cost, "LATENCY", 0)
    monkeypatch.setattr(cost, "STEP", 0)
    work = cost.causal(devices, balanced=True)
    enough = math.ceil(8 / 32 * cost.SPEED[0] / (0.5 * link))

    def waits(tokens):
        each = of_tokens(tokens, devices)
        home = each.kv_rows * each.width * each.itemsize / link
        alone = sum(cost._kernels(each, each.block)) * work.steps.sum() + home
        return cost.seconds(each, work, "ring") > alone * (1 + 1e-9)

    assert waits(int(0.95 * enough))
    assert not waits(enough)


def test_messages_between_hosts_use_their_cards(monkeypatch):
    """Kernels take no time here; there are two hosts of 8 devices."""
    for name, value in (("SPEED", (np.inf, np.inf)), ("LATENCY", 0), ("STEP", 0)):
        monkeypatch.setattr(cost, name, value)
    each, work = of_tokens(1000, 16), cost.whole(16)
    keys, rows = 1000 * 8 * 256 * 2, 1000 * 32 * 256 * 2
    # k and v twice and dk and dv once, over the card between the hosts; the last of these alone.
    assert np.isclose(cost.seconds(each, work, "ring"), (15 * 3 + 1) * keys / 50e9)
    # k and v through all cards of a host; dk and dv of 8 other devices through a device's own.
    want = 15 * 2 * keys / 400e9 + 8 * keys / 50e9
    assert np.isclose(cost.seconds(each, work, "gather"), want)
    # Half of all is in the other host. 16 devices hold 8 key heads twice.
    want = (3 * (rows + 2 * keys) + 2 * 4 * 1000 * 32) / 2 / 50e9
    assert np.isclose(cost.seconds(each, work, "heads"), want)


def test_time_of_long_sequences_is_of_kernels():
    for devices in (2, 8, 32):
        each, work = of_tokens(2**20, devices), cost.whole(devices)
        alone = sum(cost._kernels(each, each.block)) * devices
        for method in METHODS:
            assert 1 - 1e-3 < cost.seconds(each, work, method) / alone < 1.05


def test_the_order_of_tokens_is_for_the_ring():
    each = of_tokens(2**16, 8)
    ratios = [
        cost.seconds(each, cost.causal(8, balanced=False), method)
        / cost.seconds(each, cost.causal(8, balanced=True), method)
        for method in METHODS
    ]
    np.testing.assert_allclose(ratios, [7.5 / 4, 1, 4 / 5.875], rtol=0.02)


def tiles(order, devices, block=16):
    """The work of each device in tiles that kernels visit, of its own keys and of all."""
    shards = np.reshape(order, (devices, 1, -1)).astype(np.int32)
    per_shard = shards.shape[-1] // block

    def visited(q, k):
        leaf = PositionBand(Positions(q, k), None, 0)
        sides = Tiling(q.shape[1], block), Tiling(k.shape[1], block)
        start, _, _, stop = np.moveaxis(np.asarray(Mask((leaf,)).kv_ranges(*sides)), -1, 0)
        return (stop - start).sum() / per_shard**2

    blocks = np.array([[visited(q, k) for k in shards] for q in shards])
    everything = np.reshape(order, (1, -1)).astype(np.int32)
    return (
        blocks,
        np.array([visited(q, everything) for q in shards]),
        visited(everything, everything),
    )


@pytest.mark.parametrize("balanced", [True, False])
def test_work_is_what_ranges_of_tiles_say(balanced):
    """But for the diagonal, of which tiles have more than half."""
    n, length = 4, 1024
    order = pallas_flash.balanced_order(length, n) if balanced else np.arange(length)
    blocks, rows, everything = tiles(order, n)
    work = cost.causal(n, balanced=balanced)
    device = np.arange(n)
    steps = blocks[device[:, None], (device[:, None] - device) % n].max(axis=0)
    np.testing.assert_allclose(steps, work.steps, atol=0.04)
    np.testing.assert_allclose([rows.max(), everything / n], [work.busiest, work.mean], atol=0.1)


def test_methods_that_do_not_serve_are_refused():
    few, many = of_tokens(1024, 8), of_tokens(2**17, 64)
    assert cost.refused(few, 32) == {}
    assert list(cost.refused(few, 20)) == ["heads"]
    assert list(cost.refused(many, 64)) == ["gather"]


def test_gather_must_be_faster_by_a_margin():
    assert cost.fastest({"ring": 1.0, "gather": 0.97, "heads": 1.1}) == "ring"
    assert cost.fastest({"ring": 1.0, "gather": 0.9, "heads": 1.1}) == "gather"
    assert cost.fastest({"ring": 1.0, "gather": 0.9, "heads": 0.91}) == "heads"
    assert cost.fastest({"gather": 2.0, "ring": 3.0}) == "gather"


# ------------------------------------------------------------------------------------------------
# scripts/bench_scaling.py
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
    command = [sys.executable, "scripts/bench_scaling.py", *flags.split(), "--json", "lines"]
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
