"""Hopper kernels, emulated, where the row maximum grows by much from tile to tile.

And where whoever waits for a slot overwrites it as soon as it is free.
"""

import dataclasses
import time

import jax.numpy as jnp
import numpy as np
import pytest
from support import mosaic_emulator as emulator
from support.judge import judge
from support.mosaic_cases import LONG, emulated

from pallas_flash.tuning import ForwardTile, TileSizes


def with_a_peak(case):
    """Scores near 200 at some keys in the middle, and near 0 elsewhere."""
    (q, k, v), cotangents, options = case.problem("bfloat16")
    peak = np.arange(case.S) // 40 == case.S // 80
    direction = jnp.zeros(case.H).at[0].set(1.0)
    q = (q * (1 - direction) + 40 * direction).astype(q.dtype)
    k = (k * (1 - direction) + jnp.where(peak, 40, 0)[:, None, None] * direction).astype(k.dtype)
    return (q, k, v), cotangents, options


@pytest.mark.parametrize(("T", "S"), [(300, 400), (3, 700)], ids=["many-queries", "few-queries"])
def test_sums_are_rescaled(T, S, kernel_case):
    """Without that weights overflow."""
    case = dataclasses.replace(LONG, T=T, S=S)
    problem = with_a_peak(case)
    judge(case, "bfloat16", emulated(problem), problem)


def test_no_stage_is_empty_too_early(monkeypatch, kernel_case):
    arrive = emulator.plgpu.barrier_arrive

    def and_pause(barrier):
        arrive(barrier)
        # Long enough for the other warpgroup to start its next copy, which poisons the slot.
        time.sleep(0.01)

    monkeypatch.setattr(emulator.plgpu, "barrier_arrive", and_pause)
    # Ten tiles of keys for two slots.
    case, sizes = dataclasses.replace(LONG, T=128, S=640, N=1), TileSizes(ForwardTile(2, 64, 1, 2))
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), sizes=sizes))
