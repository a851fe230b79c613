"""Calls with `tuning.Triton` and `tuning.Mosaic`, with and without `implementation`."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.calls import NEWER
from support.described_gpus import described_gpu

from pallas_flash import explain, tuning
from pallas_flash._problem.tile_sizes import KERNELS, MOSAIC
from pallas_flash._selection import resolve
from pallas_flash.tuning import BackwardTile, DqTile, ForwardTile, Mosaic, Tile, TileSizes, Triton

X = jax.ShapeDtypeStruct((2, 4096, 16, 128), jnp.bfloat16)
TILE = Tile(64, 64)
needs_mosaic = pytest.mark.skipif(not NEWER, reason="JAX is too old for Mosaic GPU")


def fields(configuration):
    return [field.name for field in dataclasses.fields(configuration)]


def test_configurations_have_the_kernels_of_their_backends():
    assert set(fields(Mosaic)) == set(MOSAIC)
    assert set(fields(Triton)) == set(KERNELS) - {"backward"}
    assert set(fields(TileSizes)) == set(KERNELS)


def reason_of(gpu, **options):
    with described_gpu(gpu):
        choice = explain(X, X, X, **options)
    return choice.implementation, choice.reason


def plan_of(monkeypatch, gpu, **options):
    plans, right = [], resolve.resolve

    def spied(*arguments):
        plans.append(right(*arguments))
        return plans[-1]

    monkeypatch.setattr(resolve, "resolve", spied)
    reason_of(gpu, **options)
    return plans[0]


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_triton_configuration_reaches_the_kernels(monkeypatch, implementation):
    options = dict(config=Triton(forward=TILE, dq=TILE), implementation=implementation)
    plan = plan_of(monkeypatch, "NVIDIA H200", **options)
    assert plan.forward.implementation == plan.backward.implementation == "triton"
    assert plan.forward.tiles.forward == plan.backward.tiles.dq == TILE
    assert plan.backward.tiles.dkv


@needs_mosaic
@pytest.mark.parametrize("implementation", [None, "mosaic"])
def test_mosaic_configuration_reaches_the_kernels(monkeypatch, implementation):
    tiles = Mosaic(forward=ForwardTile(3, 96), backward=BackwardTile(64, 2))
    options = dict(config=tiles, implementation=implementation)
    plan = plan_of(monkeypatch, "NVIDIA H200", **options)
    assert plan.forward.implementation == plan.backward.implementation == "mosaic"
    assert plan.forward.tiles.forward == tiles.forward
    assert plan.backward.tiles.backward == tiles.backward


def test_explain_says_what_a_configuration_asks_for():
    by, reason = reason_of("NVIDIA H200", config=Triton(forward=TILE, dkv=TILE))
    assert by == "triton"
    assert '`config` asks for "triton" where it serves the call.' in reason
    assert "no effect" not in reason


def test_explain_says_where_a_configuration_has_no_effect():
    by, reason = reason_of("NVIDIA A100", config=Mosaic(forward=ForwardTile(), dq=DqTile()))
    assert by == "triton"
    assert '`config` asks for "mosaic" where it serves the call.' in reason
    for kernel in ("forward", "dq"):
        assert f'`config.{kernel}` has no effect: "triton" computes that pass.' in reason


def test_explain_says_nothing_of_a_configuration_without_a_choice():
    sentence = "`config`"
    assert sentence not in reason_of("NVIDIA A100")[1]
    options = dict(config=Triton(forward=TILE), implementation="triton")
    assert sentence not in reason_of("NVIDIA A100", **options)[1]


@pytest.mark.parametrize("kind", [Triton, TileSizes])
def test_configurations_are_hashable_and_frozen(kind):
    assert hash(kind(forward=TILE)) == hash(kind(forward=Tile(64, 64)))
    assert kind(forward=TILE) != kind(dq=TILE) != Mosaic()
    for x, name in ((kind(), "forward"), (TILE, "block_q")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(x, name, TILE)


def test_the_module_says_that_it_is_unstable():
    assert "unstable" in tuning.__doc__
