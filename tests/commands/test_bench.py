"""The benchmark: what it counts, and what it refuses to time. Times themselves need a card."""

import dataclasses
import importlib.util
import itertools
import json
import math
import pathlib
import re
import sys
import tomllib
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, jaxprs, oracle
from support.repository import assert_none

import pallas_flash
from scripts.benchmarks import peers, programs, recording, report, shapes, timers
from scripts.benchmarks import run as runs
from scripts.benchmarks.bench_attention import main
from scripts.benchmarks.peers import PEERS, Attend, Peer, Unserved
from scripts.benchmarks.programs import JaxProgram
from scripts.benchmarks.results import problem
from scripts.benchmarks.run import Bench
from scripts.benchmarks.shapes import OPTIONS, Shape
from scripts.benchmarks.timers import Clocks, Timing

TINY = Shape("tiny causal", 1, 32, 32, 2, 1, 8, causal=True, dtype="float32")
SHAPES = {
    shape.name: shape
    for shape in [
        TINY,
        dataclasses.replace(TINY, T=48, S=48),
        Shape("tiny window", 1, 40, 40, 4, 2, 8, causal=True, window=9, dtype="float32"),
        Shape("tiny documents", 2, 40, 40, 2, 2, 8, causal=True, documents=4, dtype="float32"),
        Shape("tiny lengths", 3, 40, 40, 2, 2, 8, causal=True, lengths=True, dtype="float32"),
        Shape("tiny decode", 2, 1, 40, 4, 2, 8, dtype="float32", passes=("forward",)),
    ]
}
# The same with each option, values of another head dim, and no mask to hide it.
OPTIONAL = [
    Shape(f"tiny with {option}", 2, 24, 24, 4, 2, 8, V=12, option=option, dtype="float32")
    for option in OPTIONS
]
# Shapes by flags, as the command gives them.
SIZES = dict(batch=2, length=40, heads=4, kv_heads=2, head_dim=8, dtype="float32")
BY_FLAGS = [
    shapes.shape_of(**SIZES | flags)
    for flags in (
        dict(window=9, segments=3, soft_cap=3.0),
        dict(segments=3, lengths=True),
        dict(causal=True, segments=3, lengths=True, value_dim=12),
        dict(causal=True, key_length=24, dropout=0.5),
        dict(causal=True, key_length=56, bias=True),
        dict(key_length=24, alibi=True),
    )
]
HERE = ["ours_xla", "jax_xla"]  # These run on a CPU.


# ------------------------------------------------------------------------------------------------
# Shapes.


def allowed(shape):
    """bool [B, T, S], from the words of `Shape`."""
    i, j = np.mgrid[: shape.T, : shape.S]
    visible = np.broadcast_to(i >= j if shape.causal else True, (shape.B, *i.shape))
    if shape.window is not None:
        visible = visible & (i - j < shape.window)
    if shape.documents is not None:
        ids = shape.segment_ids()
        visible = visible & (ids[:, :, None] == ids[:, None, :])
    if shape.lengths:
        filled = np.arange(shape.T) < shape.each_length()[:, None]
        visible = visible & filled[:, :, None] & filled[:, None, :]
    if shape.option == "mask array":
        visible = visible & np.asarray(shape.arrays()["mask"])[0]
    return visible


def pairs_of(shape):
    """The pairs that are counted."""
    # The convention halves a merely causal problem, which leaves out half of the diagonal.
    rows = shape.each_length().sum() if shape.lengths else shape.B * min(shape.T, shape.S)
    diagonal = rows / 2 if shape.causal and not (shape.window or shape.documents) else 0
    return allowed(shape).sum() - diagonal


def test_pairs_are_the_allowed_pairs():
    every = [*SHAPES.values(), *OPTIONAL, *BY_FLAGS]
    assert_none(shape.name for shape in every if shape.pairs() != pairs_of(shape))
    for shape in every:
        assert shape.flops("forward") == 2 * (shape.D + shape.value_dim) * shape.N * shape.pairs()
        assert shape.flops("backward") == 2.5 * shape.flops("forward")


def test_chosen_blocks_are_counted():
    """Query heads of a key head share them, and the own block is always one."""
    shape = Shape("chosen causal", 1, 640, 640, 4, 2, 8, causal=True, chosen=2)
    some = np.asarray(shape.arrays()["mask"].some)[0]
    assert (some.sum((1, 2)) == shapes.visited_blocks(640, 2)).all()
    assert (some[0] == some[1]).all() and (some[1] != some[2]).any()
    assert some.diagonal(axis1=1, axis2=2).all() and shapes.visited_blocks(640) == 15
    visible = some.repeat(128, 1).repeat(128, 2) & np.tri(640, dtype=bool)
    # Half of the diagonal is left out, as below.
    assert shape.pairs() == visible[0].sum() - 640 / 2


def test_lengths_differ_within_a_batch():
    [shape] = [shape for shape in SHAPES.values() if shape.lengths]
    lengths = shape.each_length()
    assert shape.T / 4 <= lengths.min() < lengths.max() <= shape.T
    assert (lengths == shape.each_length()).all()


@pytest.mark.parametrize("name", ["tiny-window-40", "tiny-documents-40"])
def test_first_keys_agree_with_ids_and_windows(name):
    shape = SHAPES[name]
    i, j = np.mgrid[: shape.T, : shape.S]
    assert ((j >= shape.first_keys()[..., None]) & (i >= j) == allowed(shape)).all()


def test_bytes_count_q_k_v_and_o():
    for shape in [*SHAPES.values(), *OPTIONAL]:
        # do is as large as o.
        arrays = programs.arguments(shape)
        assert shape.bytes() == sum(x.size * x.dtype.itemsize for x in arrays)


def dense(shape, q, k, v):
    """The output in float64, from the words of `Shape` and `OPTIONS`."""
    q, k, v = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v))
    k, v = (x.repeat(shape.N // shape.K, axis=1) for x in (k, v))
    extra = {name: np.asarray(x, np.float64) for name, x in shape.arrays().items()}
    s = shape.scale * q @ k.swapaxes(2, 3)
    i, j = np.mgrid[: shape.T, : shape.S]
    denominator = 0
    match shape.option:
        case "soft cap":
            cap = shape.amount or 50
            s = cap * np.tanh(s / cap)
        case "ALiBi":
            s -= extra["alibi_slopes"][:, None, None] * abs(i - j)
        case "bias" | "trained bias":
            s += extra["bias"]
        case "sinks":
            denominator = np.exp(extra["sinks"])[:, None, None]
    weights = np.where(allowed(shape)[:, None], np.exp(s), 0)
    denominator = denominator + weights.sum(-1, keepdims=True)
    p = weights / np.where(denominator, denominator, 1)
    if shape.option == "dropout":
        pairs = (shape.B, shape.N, shape.T, shape.S)
        rate = shape.amount or 0.1
        mask = pallas_flash.dropout_mask(shape.arrays()["dropout_key"], pairs, rate)
        p *= np.asarray(mask) / oracle.share_kept(rate)
    return (p @ v).swapaxes(1, 2)


@pytest.mark.parametrize(
    "shape",
    cases.default(
        [*SHAPES.values()][2:5] + OPTIONAL[:2] + BY_FLAGS[:2],
        [*SHAPES.values(), *OPTIONAL, *BY_FLAGS],
    ),
    ids=lambda shape: shape.name,
)
def test_trusted_peer_is_attention_in_float32(shape):
    attend, (*qkv, _) = peers.trusted(shape), programs.draw(shape, 0)
    got = attend.call(*qkv, **attend.arrays)
    np.testing.assert_allclose(got, dense(shape, *qkv), rtol=1e-4, atol=1e-5)
    products = [
        eqn.params["precision"]
        for eqn in jaxprs.trace(lambda *x: attend.call(*x, **attend.arrays), *qkv)
        if eqn.primitive.name == "dot_general"
    ]
    assert set(products) == {(jax.lax.Precision.HIGHEST,) * 2}


def test_named_shapes_share_tokens_and_width():
    every = shapes.SHAPES.values()
    dense = [shape for shape in every if shape.case.split()[0] in ("64", "128", "256")]
    assert {(x.B * x.T, x.N * x.D) for x in dense} == {(16384, 2048)}
    packed = [shape for shape in every if shape.documents]
    lengths = [np.bincount(shape.segment_ids()[0]) for shape in packed]
    assert packed and [len(x) for x in lengths] == [shape.documents for shape in packed]
    assert min(x.min() for x in lengths) > 0
    assert min(2 * x.B * x.S * x.K * x.D * 2 for x in every if x.T == 1) >= 1e9


# ------------------------------------------------------------------------------------------------
# Programs.


def test_layouts_of_peers_are_undone():
    """Heads first, another dtype and a scale that q brings along change no result."""
    shape = dataclasses.replace(TINY, option="trained bias")

    def scaleless(q, k, v, bias):
        q, k, v = (x.swapaxes(1, 2).astype(jnp.float32) for x in (q, k, v))
        o = pallas_flash.attention(q, k, v, bias, scale=1.0, is_causal=True, implementation="xla")
        return o.swapaxes(1, 2).astype(jnp.float16)

    for direction in ("forward", "backward"):
        odd = JaxProgram(
            shape,
            Attend(scaleless, shape.arrays(), dtype="float16", heads_first=True, has_scale=False),
            direction,
        )
        right = JaxProgram(shape, peers.trusted(shape), direction)
        for program in (odd, right):
            program.compile()
            program.load([programs.draw(shape, 0)])
        assert max(programs.errors(odd.results(), right.results()).values()) < 2e-3


@pytest.mark.parametrize("timed", [True, False])
def test_xla_autotunes_only_timed_programs(monkeypatch, timed):
    attend = peers._ours("xla", TINY, "backward") if timed else peers.trusted(TINY)
    compile_it, given = jax.stages.Lowered.compile, []

    def spied(self, options=None):
        given.append(options)
        return compile_it(self, options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", spied)
    JaxProgram(TINY, attend, "backward").compile()
    assert given == [None if timed else {"xla_gpu_autotune_level": 0}] * 2


def test_the_backward_does_not_run_the_forward():
    """The residuals are arguments of what is timed."""
    attend = peers._ours("interpret", TINY, "backward")
    residuals, pull = programs.differentiate(attend.call)
    q, k, v, do = programs.arguments(TINY)
    leaves = jax.eval_shape(residuals, q, k, v, {})
    assert jaxprs.kernels(jaxprs.trace(pull, do, leaves)) == [
        "pallas_flash_delta",
        "pallas_flash_dkv",
        "pallas_flash_dq",
    ]


def test_programs_go_round_their_sets():
    program = JaxProgram(TINY, Attend(lambda q, k, v: q), "forward")
    program.compile()
    sets = [programs.draw(TINY, seed) for seed in range(3)]
    program.load(sets)
    for q, *_ in [*sets, sets[0]]:
        np.testing.assert_array_equal(program(), q)


# ------------------------------------------------------------------------------------------------
# Timers.


def test_cupti_sums_the_kernels_of_a_call(monkeypatch):
    profiler = pytest.importorskip("jax.experimental.mosaic.gpu.profiler")
    calls, alive = [], weakref.WeakSet()

    class Result:
        pass

    class Program:
        def __call__(self):
            calls.append(1)
            alive.add(result := Result())
            return result

    class Cupti:
        def _cupti_init(self):
            calls.clear()

        def _cupti_get_timings(self, finalize):
            assert len(calls) == 3
            assert len(alive) == 1  # Thousands would not fit in memory.
            return [("a", 1.0), ("b", 2.0), ("a", 3.0)] * 2 + [("a", 9.0), ("b", 9.0), ("a", 9.0)]

    class Library:
        _mosaic_gpu_ext = Cupti()

    monkeypatch.setattr(profiler, "mosaic_gpu_lib", Library)
    assert timers.cupti_timer(Program(), 3) == Timing(6.0, {"a": 4.0, "b": 2.0})


def test_without_cupti_times_are_slopes(monkeypatch, capsys):
    def refused(program, iterations):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    timer = timers.Timers("gpu")
    monkeypatch.setattr(timers, "cupti_timer", refused)
    clock = iter([0.0, 5.0, 10.0, 18.0, 20.0, 25.0])  # 5 s for 1 turn, 8 s for 6, 5 s for 3
    monkeypatch.setattr(timers.time, "perf_counter", lambda: next(clock))
    program = JaxProgram(TINY, peers._ours("xla", TINY, "forward"), "forward")
    monkeypatch.setattr(program, "compile_s", 0.0)
    program.function = lambda q: q + 1
    program.sets = [(jnp.zeros((2, 3)),)]
    assert timer(program, 3) == Timing(1000.0)
    assert timer.name(program) == "slope"
    assert "INSUFFICIENT_PRIVILEGES" in capsys.readouterr().err
    # Each turn depends on the one before.
    assert float(program.loop(4, jnp.zeros((2, 3)))[0, 0]) == 4


def test_peers_take_turns():
    now = itertools.count()
    times = timers.take_turns(3, {name: lambda: Timing(next(now)) for name in ("a", "b", "c")})
    assert [t.ms for t in times["a"]] == [0, 3, 6]
    assert [t.ms for t in times["c"]] == [2, 5, 8]


def test_ratios_are_of_the_same_round():
    ours, peer = ([Timing(ms) for ms in x] for x in ([1.0, 2.0, 4.0], [2.0, 3.0, 12.0]))
    numbers = runs.summary(peer, ours, TINY, "forward")
    assert numbers["ratio"] == {"median": 2.0, "min": 1.5, "max": 3.0, "n": 3}
    assert numbers["ms"] == {"median": 3.0, "min": 2.0, "max": 12.0, "n": 3}
    assert numbers["tflops"] == pytest.approx(TINY.flops("forward") / 3e-3 / 1e12)
    assert numbers["tb_per_s"] == pytest.approx(TINY.bytes() / 3e-3 / 1e12)


# ------------------------------------------------------------------------------------------------
# Runs.


def run(peers, shapes, monkeypatch, extra=None, deadline=math.inf, **options):
    """Records of a run in which time stands still but for a second in each measurement."""
    now = [0.0]

    def timer(program, calls):
        now[0] += 1
        return Timing(1000.0, {"kernel": 1000.0})

    monkeypatch.setattr(timers.time, "monotonic", lambda: now[0])
    for name, build in (extra or {}).items():
        monkeypatch.setitem(PEERS, name, Peer("jax", build))
    records = []
    options = {"rounds": 2, "iterations": 2, "timer": timer} | options
    bench = Bench(peers, ("forward", "backward"), emit=records.append, **options)
    clocks = Clocks()
    left_out = bench.run(shapes, deadline, clocks)
    clocks.close()
    return records, left_out


@pytest.mark.parametrize(("visible", "found"), [(None, "0"), ("", "0"), ("1", "1"), ("3,2", "3")])
def test_clocks_are_of_the_timed_gpu(monkeypatch, visible, found):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    asked = []

    def popen(command, **_):
        asked.append(command)
        raise OSError

    monkeypatch.setattr(timers.subprocess, "Popen", popen)
    assert Clocks().take() is None
    assert f"--id={found}" in asked[0]


@pytest.mark.parametrize(("ms", "calls"), [(100.0, 2), (7.0, 4), (1e-3, 8)])
def test_a_measurement_takes_about_30_ms(monkeypatch, ms, calls):
    """But never less than two calls, nor more than were asked for."""
    asked, seeds = [], []

    def timer(program, iterations):
        asked.append(iterations)
        return Timing(ms)

    def draw(shape, seed, draw=programs.draw):
        seeds.append(seed)
        return draw(shape, seed)

    monkeypatch.setattr(runs, "draw", draw)
    bench = Bench(["jax_xla"], ["forward"], rounds=3, iterations=8, emit=id, timer=timer)
    clocks = Clocks()
    bench.run([TINY], math.inf, clocks)
    clocks.close()
    assert asked == [2, *[calls] * 3]
    # Sets of arguments of their own, so that none is in a cache.
    assert seeds == [0, 1, 2, 3]


# Relative errors of rounding bfloat16 and float16 to nearest; the card cuts float32 to TF32.
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-10}


@pytest.mark.parametrize("dtype", ROUNDING)
def test_the_gate_lets_four_roundings_pass(dtype):
    allowed = 4 * ROUNDING[dtype]
    assert not programs.is_red({"dq": 0.0, "dk": allowed}, dtype)
    assert programs.is_red({"dq": 0.0, "dk": 1.01 * allowed}, dtype)
    assert programs.is_red({"dq": math.nan, "dk": 0.0}, dtype)


def no_mask(shape, direction):
    return peers._ours("xla", dataclasses.replace(shape, causal=False), direction)


def not_a_number(shape, direction):
    return Attend(lambda q, k, v: q * jnp.nan)


def only_its_backward_is_wrong(shape, direction):
    call = peers._ours("xla", shape, direction).call
    return Attend(lambda q, k, v: call(q, jax.lax.stop_gradient(k), v))


def test_a_wrong_peer_gets_no_time(monkeypatch, capsys):
    wrong = {"no_mask": no_mask, "nan": not_a_number, "no_dk": only_its_backward_is_wrong}
    records, _ = run(["ours_xla", *wrong], [TINY], monkeypatch, wrong)
    found = {(r["implementation"], r["pass"]): r for r in records}
    assert len(found) == len(records) == 8
    for (peer, direction), record in found.items():
        red = peer in ("no_mask", "nan") or (peer == "no_dk" and direction == "backward")
        assert ("ms" in record) == (not red), (peer, direction)
        assert ("red" in record) == red
        text = report.line(record)
        assert (" ms " in text) == (not red)
        assert ("WRONG" in text) == red
    assert found["no_dk", "backward"]["red"]["dk"] > 0.9
    assert found["no_dk", "backward"]["red"]["dv"] < 1e-5


def test_unserved_peer_has_its_reason(monkeypatch):
    def needs_a_package(shape, direction):
        import no_such_package  # noqa: F401

    def refuses(shape, direction):
        raise Unserved("has no sense of humour")

    def fails_to_compile(shape, direction):
        return Attend(lambda q, k, v: q @ v)

    def fails_to_run(shape, direction):
        class Unlucky(Attend):
            def from_peer(self, *_):
                raise ValueError("out of luck\nand of breath")

        return Unlucky(lambda q, k, v: q)

    bad = {
        "absent": needs_a_package,
        "refuses": refuses,
        "compile": fails_to_compile,
        "runs": fails_to_run,
    }
    records, _ = run(["ours_triton", *bad, "ours_xla"], [TINY], monkeypatch, bad)
    why = {r["implementation"]: r.get("unserved") for r in records if r["pass"] == "forward"}
    assert list(why) == ["ours_triton", "absent", "refuses", "compile", "runs", "ours_xla"]
    assert "NVIDIA GPU" in why["ours_triton"]
    assert why["absent"] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert why["refuses"] == "has no sense of humour"
    assert why["compile"].startswith("TypeError: dot_general")
    assert why["runs"] == "ValueError: out of luck"
    assert why["ours_xla"] is None
    assert not [r for r in records if "unserved" in r and "ms" in r]


# For each module that a peer imports first: the peer, and the command that installs the module.
BROUGHT = {
    "jax_triton": ("triton_tutorial", "pip install -e '.[bench]', on Python 3.12 or newer"),
    "tokamax": ("tokamax_triton", "pip install -e '.[bench]', on Python 3.12 or newer"),
    "torch": ("torch_flex", "pip install torch"),
}


@pytest.mark.parametrize("module", BROUGHT)
def test_absent_peer_names_its_install(monkeypatch, module):
    for name in [x for x in sys.modules if x.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "xprof", None)
    peer, install = BROUGHT[module]
    reason = runs.build(TINY, peer, "forward")
    assert reason.startswith("ModuleNotFoundError: ")
    assert reason.endswith(f": {install}")
    for other, entry in PEERS.items():
        mine = entry.package not in ("pallas-flash", "jax")
        assert (entry.install is not None) == mine, other


def test_the_extra_brings_what_peers_import():
    with open(pathlib.Path(__file__).parents[2] / "pyproject.toml", "rb") as file:
        extra = tomllib.load(file)["project"]["optional-dependencies"]["bench"]
    brought = {re.match(r"[\w-]+", requirement)[0] for requirement in extra}
    assert brought == {"jax-triton", "tokamax", "matplotlib"}
    shape = Shape("any", 1, 256, 256, 2, 2, 64)
    # Where it is installed, as in the repository's own checks, everything of it imports.
    for peer, entry in PEERS.items():
        if entry.install == BROUGHT["tokamax"][1] and importlib.util.find_spec("tokamax"):
            entry.build(shape, "forward")
            assert entry.version, peer


# The options that each peer computes, for peers of a CPU and where the shape alone decides.
SERVED = {
    "jax_xla": {"window", "lengths", "grouped heads", "bias", "trained bias", "mask array"},
    "jax_mha": {"segment ids", "lengths"},
    "triton_tutorial": set(),
}


@pytest.mark.parametrize("peer", SERVED)
def test_a_peer_refuses_what_it_does_not_compute(monkeypatch, peer):
    monkeypatch.setitem(sys.modules, "jax_triton", types.ModuleType("jax_triton"))
    monkeypatch.setitem(sys.modules, "scripts.benchmarks.triton_kernel", types.ModuleType("kernel"))
    refused = {}
    for shape in shapes.SHAPES.values():
        lacking = [name for name in shape.features if name not in SERVED[peer]]
        if lacking:
            refused[shape] = f"has no {lacking[0]}"
    assert refused
    for shape, reason in refused.items():
        shape = dataclasses.replace(shape, B=2, T=64, S=64)  # Its arrays would take minutes.
        assert runs.build(shape, peer, "forward") == reason, shape.name


def test_gradients_of_trained_arrays_are_checked(monkeypatch):
    [bias] = [shape for shape in OPTIONAL if shape.option == "trained bias"]
    bias = dataclasses.replace(bias, V=None, passes=("backward",))
    [record], _ = run(["jax_xla"], [bias], monkeypatch, rounds=1)
    assert record["errors"].keys() == {"dq", "dk", "dv", "dbias"}
    assert max(record["errors"].values()) < 2e-6


def test_padding_rows_are_not_compared(monkeypatch):
    shape = dataclasses.replace(TINY, lengths=True)
    attend = peers._ours("xla", shape, "backward")
    filled = np.arange(shape.T)[:, None, None] < shape.each_length()[0]

    def call(q, k, v, **arrays):
        o = attend.call(q, k, v, **arrays)
        return jnp.where(filled, o, 7 * v)

    odd = {"odd": lambda shape, direction: Attend(call, attend.arrays)}
    records, _ = run(["odd"], [shape], monkeypatch, odd, rounds=1)
    assert [max(r["errors"].values()) < 2e-6 for r in records] == [True, True]


def sustained_run(monkeypatch, seconds=6.0):
    """Records, and (name, calls) of each measurement; a call of "a" takes 10 s, one of "b" 20."""
    now, order = [0.0], []

    class Clocked:
        QUERY = Clocks.QUERY

        def take(self):
            return {name: now[0] for name in self.QUERY}

    def timer(program, calls):
        name = program.attend.call.__name__
        order.append((name, calls))
        now[0] += 2
        return Timing({"a": 10.0, "b": 20.0}[name] + now[0] / 1000)

    def build(name):
        def call(q, k, v):
            return peers._ours("xla", TINY, "forward").call(q, k, v)

        call.__name__ = name
        return lambda shape, direction: Attend(call)

    monkeypatch.setattr(timers.time, "monotonic", lambda: now[0])
    monkeypatch.setitem(PEERS, "ours", Peer("jax", build("a")))
    monkeypatch.setitem(PEERS, "b", Peer("jax", build("b")))
    records = []
    bench = Bench(
        ["ours", "b"],
        ["forward"],
        rounds=3,
        iterations=8,
        sustained=seconds,
        emit=records.append,
        timer=timer,
    )
    bench.run([TINY], math.inf, Clocked())
    return records, order


def test_sustained_peers_run_alone_then_in_turns(monkeypatch):
    records, order = sustained_run(monkeypatch)
    # A first look; 6 s alone; then 2 s in each round, there and back.
    calls = {"a": 250 // 10, "b": 250 // 20}
    assert order[:2] == [("a", 2), ("b", 2)]
    assert order[2:] == [(name, calls[name] - (name == "a")) for name in "aaabbbabbaab"]
    for record, ms in zip(records, (10, 20), strict=True):
        assert record["sustained"]["seconds"] == 6
        assert record["sustained"]["alone"]["ms"] == pytest.approx(ms, rel=1e-2)
        assert len(record["sustained"]["rounds"]) == len(record["ratios"]) == 3
        # Each turn has its own clocks, and the record their median.
        clocks = [turn["clocks"]["clocks.sm"] for turn in record["sustained"]["rounds"]]
        assert len(set(clocks)) == 3
        assert record["clocks"].keys() == set(Clocks.QUERY)
        assert record["clocks"]["clocks.sm"] == sorted(clocks)[1]
        assert " MHz " in report.line(record)
        assert " W" in report.line(record)
    ours, b = records
    turns = [[turn["ms"] for turn in r["sustained"]["rounds"]] for r in (ours, b)]
    assert b["ratios"] == [y / x for x, y in zip(*turns, strict=True)]
    assert b["ratio"]["median"] == sorted(b["ratios"])[1]


def test_short_sustained_turn_is_one_measurement(monkeypatch):
    _, order = sustained_run(monkeypatch, seconds=0.3)
    assert [calls for _, calls in order[2:]] == [9, 4, 9, 4, 4, 9, 9, 4]


def test_without_a_card_there_are_no_clocks(monkeypatch):
    records, _ = run(["ours_xla"], [TINY], monkeypatch, sustained=2.0)
    assert [record["pass"] for record in records] == ["forward", "backward"]
    for record in records:
        assert record["clocks"] is None
        assert record["sustained"]["alone"] == {"ms": 1000.0, "clocks": None}
        assert report.line(record)


def test_nothing_is_timed_without_trusted_result(monkeypatch):
    def broken(q, k, v):
        raise MemoryError("too large")

    monkeypatch.setattr(runs, "trusted", lambda shape: Attend(broken))
    records, _ = run(["ours_xla"], [TINY], monkeypatch)
    why = "nothing to compare with: MemoryError: too large"
    assert [r["unserved"] for r in records] == [why] * 2


def test_a_budget_leaves_out_the_end(monkeypatch):
    shapes = list(SHAPES.values())
    # Two rounds of two passes take longer: time is up after the first shape, which is finished.
    records, left_out = run(["ours_xla"], shapes, monkeypatch, deadline=3)
    assert [r["shape"] for r in records] == [TINY.name] * 2
    assert left_out == [shape.name for shape in shapes[1:]]


def test_shapes_are_compiled_side_by_side(monkeypatch):
    """As many as keep the cores busy, before any of them is timed; the rest later."""
    monkeypatch.setattr(runs.os, "cpu_count", lambda: 3)
    portions = []
    compile_all = runs.compile_all

    def counted(programs):
        portions.append(len(programs))
        return compile_all(programs)

    monkeypatch.setattr(runs, "compile_all", counted)
    shapes = [dataclasses.replace(TINY, case=name) for name in "abc"]
    records, _ = run(["ours_xla"], shapes, monkeypatch)
    # Two passes of a peer and of what it is compared with, of each shape.
    assert portions == [8, 4]
    assert [record["case"] for record in records] == ["a", "a", "b", "b", "c", "c"]


def test_command_line(tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    some = {name: SHAPES[name] for name in ("tiny-documents-40", "tiny-decode-40")}
    command = ["--shapes", "all", "--peers", *HERE, "torch_flex", "--rounds", "2"]
    main([*command, "--iterations", "2", "--json", str(file)], some)
    out = capsys.readouterr().out
    records = [json.loads(line) for line in file.read_text().splitlines()]
    found = list(filter(lambda name: PEERS[name].version, [*HERE, "torch_flex"]))
    assert len(records) == len(found) * (2 * len(some) - 1)
    if "torch_flex" not in found:
        assert "not installed: torch_flex (pip install torch)" in out
    assert "On a CPU all times are of XLA's programs" in out
    for record in records:
        assert not problem(record)
        assert report.line(record) in out
        assert {"device", "driver", "versions", "commit", "date", "B", "S", "N"} <= record.keys()
        own = {"jax_xla": jax.__version__, "ours_xla": pallas_flash.__version__}
        assert record["peer_version"] == own.get(record["implementation"], record["peer_version"])
        if "unserved" not in record:
            assert record["ms"]["min"] <= record["ms"]["median"] <= record["ms"]["max"]
            assert record["timer"] == "host"
            assert record["compile_s"] > 0
            assert record["memory"]["argument"] > 0
            assert 0 <= max(record["errors"].values()) < 2e-6
    # Further runs add to the file; reports take the later line of each way of timing.
    for more in ([], ["--sustained", "0.01"]):
        main(["--shapes", "all", "--peers", "jax_xla", "--json", str(file), *more], some)
    assert len(file.read_text().splitlines()) == len(records) + 6
    assert len(report.load(file)) == len(records) + 3


@pytest.mark.parametrize("changes", ["", " M README.md"])
def test_a_commit_with_changes_is_called_dirty(monkeypatch, changes):
    said = {"rev-parse": "0123abc", "status": changes}
    monkeypatch.setattr(recording, "_output", lambda *words: said.get(words[1]))
    assert recording.surroundings(None)["commit"] == "0123abc" + "-dirty" * bool(changes)
    assert recording.surroundings("told")["commit"] == "told"


def test_list_has_shapes_and_peers(capsys):
    main(["--list"], SHAPES)
    out = capsys.readouterr().out
    assert not [name for name in [*SHAPES, *PEERS] if name not in out]


def test_flags_give_a_shape(monkeypatch):
    asked = []
    monkeypatch.setattr(Bench, "run", lambda bench, shapes, *_: asked.append(shapes))
    words = "--length 64 --kv-heads 2 --window 9 --segments 4 --soft-cap 30"
    main([*words.split(), "--peers", "ours"], SHAPES)
    main(["--heads", "2", "--shapes", "tiny-window", "--peers", "ours"], SHAPES)
    [own], [defaults, named] = asked
    assert own == Shape(
        "b1 h16 on 2 d128 causal window 9 4 segments with soft cap 30",
        *(1, 64, 64, 16, 2, 128),
        causal=True,
        window=9,
        documents=4,
        option="soft cap",
        amount=30.0,
    )
    assert (defaults.name, named.name) == ("b1-h2-d128-full-4k", "tiny-window-40")
    assert shapes.shape_of(**SIZES | dict(length=1, key_length=64)).passes == ("forward",)


def test_quick_takes_one_length_of_each_case(monkeypatch):
    asked = []
    monkeypatch.setattr(Bench, "run", lambda bench, shapes, *_: asked.append((bench, shapes)))
    main(["--quick", "--peers", "ours_xla", "ours_xla", "--passes", "forward"], SHAPES)
    [(bench, chosen)] = asked
    assert [shape.name for shape in chosen] == [name for name in SHAPES if name != "tiny-causal-48"]
    assert (bench.rounds, bench.peers, bench.directions) == (2, ["ours_xla"], ("forward",))
