"""The seven kernels of docs/hopper-steps.md compute attention, and compile without spills."""

import contextlib
import functools
import heapq
import importlib
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import mosaic_emulator as emulator
from support.lowered import launches, lowered
from support.repository import ROOT, read

import pallas_flash
from pallas_flash._jax import compat
from scripts.benchmarks import bench_attention, bench_hopper_steps
from scripts.benchmarks.peers import Unserved
from scripts.maintenance.inspection import gpu_compiler
from scripts.maintenance.inspection.kernels import compile_kernels

if not compat.has_mosaic_gpu():
    pytest.skip("JAX is too old for the operations of these kernels", allow_module_level=True)

PAGE, FOLDER = ROOT / "docs" / "hopper-steps.md", ROOT / "docs" / "hopper_steps"
STEPS = sorted(path.stem for path in FOLDER.glob("step[0-9]_*.py"))
# Every step without a mask, and those that have one with it.
CALLS = [(step, False) for step in STEPS] + [(step, True) for step in STEPS[5:]]
MOST_LINES = 180


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


def attention_of(step, is_causal):
    """The function of a step that takes q, k and v."""
    attention = importlib.import_module(step).attention
    return functools.partial(attention, is_causal=True) if is_causal else attention


def launch(kernel, *arrays, grid, warpgroups, scratch, cluster=()):
    """As `step_common.launch`."""

    def run(*refs, static, **memory):
        kernel(*refs, *memory.values())

    [o] = emulator.launch(
        run,
        arrays,
        outputs=[(arrays[-1].shape, arrays[-1].dtype)],
        memory={f"memory_{i:02}": x for i, x in enumerate(scratch)},
        grid=grid,
        warpgroups=warpgroups,
        static=None,
        cluster_size=math.prod(cluster),
    )
    return o


@contextlib.contextmanager
def emulated(step, sms=2):
    """Within it the emulator runs a step, on a GPU with so few SMs."""

    def iota(dtype, shape, axis, layout):
        return jax.lax.broadcasted_iota(dtype, shape, axis)

    plgpu = types.SimpleNamespace(**vars(emulator.plgpu) | dict(broadcasted_iota=iota))
    fakes = dict(plgpu=plgpu, pl=emulator.fake_pl, lax=emulator.fake_lax, launch=launch, SMS=sms)
    fakes["any_below_one"] = lambda x: int((np.asarray(x) < 1).any())
    with pytest.MonkeyPatch.context() as patch:
        for module in map(importlib.import_module, (step, "step_common")):
            for name in fakes.keys() & vars(module).keys():
                patch.setattr(module, name, fakes[name])
        yield


def dense(q, k, v, is_causal):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    s = np.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    if is_causal:
        s = np.where(np.tri(s.shape[-1], dtype=bool), s, -np.inf)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", e / e.sum(axis=-1, keepdims=True), v)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("step", "is_causal"), CALLS)
def test_steps_compute_attention(step, is_causal, head_dim):
    """Four blocks and more use all stages again; SMs have several work tiles."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 512, 1, head_dim))
    # The maximum of a row stays, moves a little, or so far that weights would overflow.
    k[:, 140] *= 40
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (8 * q, k, v))
    with emulated(step):
        o = attention_of(step, is_causal)(q, k, v)
    error = np.asarray(o, np.float64) - (right := dense(q, k, v, is_causal))
    # Of each query: an error in few of them must show.
    assert (np.linalg.norm(error, axis=-1) < 2**-6 * np.linalg.norm(right, axis=-1)).all()


@pytest.mark.parametrize(("step", "is_causal"), CALLS)
def test_steps_lower(step, is_causal):
    assert launches(lowered(attention_of(step, is_causal), (1, 512, 2, 64)).as_text()) == 1


def test_steps_refuse_a_length_that_is_no_multiple_of_a_block():
    q = jnp.ones((1, 200, 1, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="with T a multiple of 256"):
        attention_of("step1_plain", False)(q, q, q)


def test_page_shows_every_step():
    """And files are short: three screens."""
    assert len(STEPS) == 7
    for number, step in enumerate(STEPS, 1):
        assert len(read(FOLDER / f"{step}.py").splitlines()) <= MOST_LINES
        assert f"<!-- table: step {number} -->" in read(PAGE)
        assert f"(hopper_steps/{step}.py)" in read(PAGE)
    assert len(read(FOLDER / "step_common.py").splitlines()) <= MOST_LINES // 1.5


def test_schedule_ends_when_the_page_says():
    """In units of a block; CTAs of the sixth step start in their order."""
    heads, tiles, sms = 16, 128, 132
    schedule = importlib.import_module("step7_persistent").schedule
    rows = [row[1 : 1 + row[0, 0]] for row in schedule(1, heads, 128 * tiles, True, 1)]
    assert sorted(tuple(x) for row in rows for x in row) == [
        (0, head, tile, tile + 1) for head in range(heads) for tile in range(tiles)
    ]
    free = [0.0] * sms
    for tile in range(tiles):
        for _ in range(heads):
            heapq.heapreplace(free, free[0] + tile + 1 + 1.5)
    seventh = [sum(row[:, 3] + 1.5) for row in rows]
    ends = f"after {max(free):g} in step 6 and after {max(seventh):g} in step 7"
    assert f"{ends}. The mean of all CTAs is {sum(seventh) / sms:g}" in " ".join(read(PAGE).split())


@pytest.mark.skipif(bool(gpu_compiler.missing()), reason=gpu_compiler.missing() or "is here")
@pytest.mark.parametrize(("step", "is_causal"), [*CALLS, ("shipped", False), ("shipped", True)])
def test_machine_code_is_as_the_page_says(step, is_causal):
    """Nothing is spilt; from the fourth step on all exponentials are under a product."""
    q = jax.ShapeDtypeStruct((1, 16384, 16, 128), jnp.bfloat16)
    call = functools.partial(pallas_flash.attention, is_causal=is_causal, implementation="mosaic")
    if step in STEPS:
        call = attention_of(step, is_causal)
    [kernel] = compile_kernels(call, q, q, q)
    assert not kernel.unset and kernel.stack_bytes == kernel.loop_spills == 0
    assert kernel.main.exp2_hidden == float(step >= "step4" or step == "shipped")
    name = "shipped kernel" if step == "shipped" else f"step {step[4]}"
    cells = [
        name + (", causal" if is_causal else ""),
        kernel.registers,
        round(kernel.shared_bytes / 1024),
        kernel.ctas_per_core,
        # For 64 queries and 128 keys, by a warp.
        round(64 * kernel.per_element),
        f"{100 * kernel.main.exp2_hidden:.0f} %",
    ]
    row, page = f"| {' | '.join(map(str, cells))} |", " ".join(read(PAGE).split())
    # Another compiler may choose other instructions.
    if jax.__version__ == "0.11.2":
        assert row in page, row
        order = f"step {step[4]} {kernel.main.order}"
        assert order in page or step[4] not in "34", order
        # Zeros of accumulators.
        assert ("CS2R" in kernel.main.opcodes) == (step == STEPS[3])


def test_benchmark_has_a_step_as_a_peer(monkeypatch):
    monkeypatch.setattr(bench_hopper_steps, "PEERS", peers := {})
    monkeypatch.setattr(bench_attention, "main", lambda *arguments: called.append(arguments))
    called = []
    bench_hopper_steps.main(["--step", STEPS[0], "--json", "x.jsonl"])
    [(argv, shapes)] = called
    assert {*bench_hopper_steps.TIMED} == {*argv} & shapes.keys()
    assert {"ours", STEPS[0], "--json=x.jsonl"} < {*argv}
    full, causal = (shapes[name] for name in bench_hopper_steps.TIMED)
    assert peers[STEPS[0]].build(full, "forward").call is attention_of(STEPS[0], False)
    with pytest.raises(Unserved, match="has no mask"):
        peers[STEPS[0]].build(causal, "forward")
    assert bench_hopper_steps._build(STEPS[5], causal, "forward").call.keywords["is_causal"]


def test_benchmark_kills_a_step_that_hangs(capsys):
    with pytest.raises(SystemExit, match=f"{STEPS[1]} had not ended after 0.1 s"):
        bench_hopper_steps.main(["--steps", STEPS[1], "--patience", "0.1"])
