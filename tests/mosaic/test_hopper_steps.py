"""The seven kernels of docs/hopper-steps.md compute attention, and compile without spills."""

import contextlib
import functools
import importlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support import mosaic_emulator as emulator
from support.lowered import launches, lowered
from support.repository import ROOT, read

from pallas_flash._jax import compat
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


def launch(kernel, *arrays, grid, warpgroups, scratch):
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
    """Three blocks and more: stages are used again. Large scores: the maximum moves, or stays."""
    shape = 3, 2, 384, 1, head_dim
    q, k, v = np.random.default_rng(0).normal(size=shape) * [[[[[4]]]], [[[[2]]]], [[[[1]]]]]
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    with emulated(step):
        o = attention_of(step, is_causal)(q, k, v)
    error = np.asarray(o, np.float64) - (right := dense(q, k, v, is_causal))
    # Of each query: an error in few of them must show.
    assert (np.linalg.norm(error, axis=-1) < 2**-6 * np.linalg.norm(right, axis=-1)).all()


@pytest.mark.parametrize(("step", "is_causal"), CALLS)
def test_steps_lower(step, is_causal):
    assert launches(lowered(attention_of(step, is_causal), (1, 384, 2, 64)).as_text()) == 1
