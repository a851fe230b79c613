"""Tuning: what is tried, what wins, where it is kept, which calls it serves, and the command."""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described_gpus import described_gpu

import pallas_flash
from pallas_flash import Tile, TileSizes, _compat, _select, _vjp
from pallas_flash._tiling import cache, choose, tune
from pallas_flash._tiling.sizes import sizes_for
from pallas_flash._tiling.tune import ROUNDS, SLOW, Trial, Tuning
from pallas_flash._triton import tiles as triton_tiles
from pallas_flash.mosaic import BackwardTile, DecodeTile, DqTile, ForwardTile

KERNELS = ("forward", "dkv", "dk", "dv", "dq")
# Of TF32 for float32.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-10}
PROGRAM = tune._program
# None of them is in the table.
FAST, FASTER, OTHER = Tile(32, 32, 1, 1), Tile(32, 16, 1, 1), Tile(16, 32, 1, 1)


@pytest.fixture(autouse=True)
def file(monkeypatch, tmp_path):
    """A file of winners for each test alone, which does not exist yet."""
    path = tmp_path / "folder" / "tiles.json"
    monkeypatch.setenv("PALLAS_FLASH_TUNED", str(path))
    for cached in (cache.read, cache._ignore):
        cached.cache_clear()
    yield path
    cache.read.cache_clear()


@pytest.fixture
def h200(monkeypatch):
    """A GPU that is here, as far as one can tell before a program is compiled."""
    gpu_here(monkeypatch, "NVIDIA H200")


def gpu_here(monkeypatch, kind):
    monkeypatch.setattr(_select, "target", lambda: _select.Target(kind, True, (9, 0)))


def array(length=24, heads=2, size=16, dtype=jnp.float32, batch=1):
    return jnp.ones((batch, length, heads, size), dtype)


def arguments(q_len=24, kv_len=40, kv_heads=2, value_dim=16, **changed):
    """Of `attention`: the sizes are those of `array`, or the arguments themselves."""
    sizes = {
        name: changed.pop(name) for name in ("heads", "size", "dtype", "batch") & changed.keys()
    }
    shared = {name: x for name, x in sizes.items() if name != "heads"}
    key = array(kv_len, kv_heads, **shared)
    value = array(kv_len, kv_heads, **(shared | {"size": value_dim}))
    return dict(query=array(q_len, **sizes), key=key, value=value) | changed


def problem(**changed):
    changed = arguments(**changed)
    return tune._problem([changed.pop(name) for name in ("query", "key", "value")], changed)


def tiles_of(monkeypatch, **changed) -> TileSizes:
    """What a call of `attention` computes with."""
    used = []
    with monkeypatch.context() as patch:
        patch.setattr(
            _vjp, "attend", lambda plan, *_: used.append(plan.tiles) or (jnp.zeros(()), None)
        )
        pallas_flash.attention(**arguments(**changed))
    [tiles] = used
    return tiles


def table(**changed) -> TileSizes:
    return choose.by_table(problem(**changed), "triton", None)


@contextlib.contextmanager
def warned(count, text=""):
    """Everything inside gives this many warnings in all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert len(caught) == count, [str(warning.message) for warning in caught]
    assert all(text in str(warning.message) for warning in caught)


# ------------------------------------------------------------------------------------------------
# The search.


class Clock:
    """Times that are made up, by kernel and tile, among them outliers; notes who was timed."""

    def __init__(self, times):
        self.times, self.asked = times, []

    def __call__(self, kernel, tile, call, arguments):
        noise = (1, 9, 1, 0.1, 1)[self.asked.count((kernel, tile))]
        self.asked.append((kernel, tile))
        return self.times(kernel, tile) * noise


@functools.cache
def interpreted(joint_ms):
    """A whole search with the kernels in the interpreter, three candidates for each."""
    tiles = [Tile(16, 16), Tile(16, 32), Tile(32, 16)]
    ms = dict(zip(tiles, (2.0, 1.0, 4.0), strict=True))
    clock = Clock(lambda kernel, tile: ms[tile] * (joint_ms if kernel == "dkv" else 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_tiles, "candidates", lambda *_: tiles)
        tuning = tune.search(
            problem(kv_heads=1, is_causal=True, dtype=jnp.bfloat16),
            ("forward", "backward"),
            ["interpret"],
            measure=clock,
        )
    return tuning, clock, ms


def test_the_fastest_tile_of_each_kernel_wins(kernel_case):
    tuning, _, ms = interpreted(1.5)
    best = Tile(16, 32)
    assert tuning.tile_sizes == TileSizes(forward=best, dkv=best, dq=best)
    for kernel in KERNELS:
        trials = [trial for trial in tuning.trials if trial.kernel == kernel]
        factor = 1.5 if kernel == "dkv" else 1
        assert trials == [
            Trial(kernel, tile, ms[tile] * factor, None) for tile in sorted(ms, key=ms.get)
        ]
    p = problem(kv_heads=1, is_causal=True, dtype=jnp.bfloat16)
    assert tuning.tables == {"interpret": choose.by_table(p, "interpret", None)}


def test_candidates_are_timed_in_turns_and_slow_ones_once(kernel_case):
    _, clock, ms = interpreted(1.5)
    first, best, _ = ms
    assert ms[first] > SLOW * ms[best]
    assert clock.asked == [
        (kernel, tile) for kernel in KERNELS for tile in (*ms, *[best] * (ROUNDS - 1))
    ]


def fake_programs(monkeypatch, change=lambda tile, results: results):
    """Exact results for every tile, then changed; nothing of the kernels is compiled."""

    def program(kernel, plan):
        tiles = plan.mosaic_tiles if plan.implementation == "mosaic" else plan.tiles
        tile, exact = tiles.tile(kernel), PROGRAM(kernel, _vjp.Plan("xla"))
        return jax.jit(lambda *args: change(tile, exact(*args)))

    monkeypatch.setattr(tune, "_program", program)


def searched(monkeypatch, times, passes=("forward",), **changed):
    monkeypatch.setattr(triton_tiles, "candidates", lambda *_: list(times))
    return tune.search(
        problem(**changed),
        passes,
        ["interpret"],
        measure=lambda kernel, tile, call, arguments: times[tile],
    )


@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        *(("too far", dtype) for dtype in ROUNDING),
        ("NaN", "bfloat16"),
        ("one result of several", "bfloat16"),
    ],
)
def test_a_wrong_candidate_never_wins(monkeypatch, dtype, passes, fault):
    def change(tile, results):
        factor = 1 + ROUNDING[dtype] * (8 if tile == FASTER else 1)
        if fault == "NaN" and tile == FASTER:
            return [x.at[(0,) * x.ndim].set(jnp.nan) for x in results]
        # The LSE, or the last gradient.
        right = results[:-1] if fault == "one result of several" else []
        return [*right, *(x * jnp.asarray(factor, x.dtype) for x in results[len(right) :])]

    fake_programs(monkeypatch, change)
    tuning = searched(monkeypatch, {FASTER: 1.0, FAST: 2.0}, [passes], dtype=jnp.dtype(dtype))
    for kernel in ("forward",) if passes == "forward" else KERNELS[1:]:
        right, wrong = [trial for trial in tuning.trials if trial.kernel == kernel]
        assert right == Trial(kernel, FAST, 2.0, None)
        assert (wrong.tile, wrong.ms) == (FASTER, None)
        assert wrong.failure.startswith("wrong: a relative error of ")
        assert tuning.tile_sizes.tile(kernel) in (FAST, None)
    assert "winner" in str(tuning)


# ------------------------------------------------------------------------------------------------
# Of two implementations.

newer = pytest.mark.skipif(
    not _compat.has_mosaic_gpu(), reason='JAX is too old for "mosaic": test_select has what is said'
)
MOSAIC = TileSizes(
    forward=ForwardTile(3, 96), backward=BackwardTile(128), dkv=BackwardTile(64), dq=DqTile(2, 64)
)
TRITON = TileSizes(forward=FAST, dkv=FAST, dq=FAST)
# Times of whole passes by who computes them, and what then wins.
RACES = {
    "mosaic, in one pass": ((1, 2), (1, 2, 3), MOSAIC),
    "one pass, else triton": (
        (1, 2),
        (1, 3, 2),
        dataclasses.replace(TRITON, forward=MOSAIC.forward, backward=MOSAIC.backward),
    ),
    "two passes": ((3, 2), (2, 1, 3), TileSizes(FAST, dkv=MOSAIC.dkv, dq=MOSAIC.dq)),
    "triton": ((3, 2), (2, 3, 1), TRITON),
    "what is right": ((None, 2), (None, 3, 1), TRITON),
}


@newer
@pytest.mark.parametrize("race", RACES)
def test_the_faster_implementation_wins_each_pass(monkeypatch, race):
    forward, backward, wanted = RACES[race]
    times = dict(zip([MOSAIC.only(["forward"]), TRITON.only(["forward"])], forward, strict=True))
    ways = MOSAIC.only(["backward"]), MOSAIC.only(["dkv", "dq"]), TRITON.only(["dkv", "dq"])
    times |= dict(zip(ways, backward, strict=True))

    def measure(kernel, tile, call, arguments):
        if times.get(tile, 1) is None:
            raise RuntimeError("it burnt")
        return times.get(tile, 1)

    of_triton = {"forward": FAST, "dkv": FAST, "dq": FAST}
    fake_programs(monkeypatch)
    monkeypatch.setattr(
        triton_tiles, "candidates", lambda kernel, *_: [x for x in [of_triton.get(kernel)] if x]
    )
    monkeypatch.setattr(
        choose.backend("mosaic"), "candidates", lambda kernel, *_: [MOSAIC.tile(kernel)]
    )
    both = ["triton", "mosaic"]
    p = problem(size=64, value_dim=64, dtype=jnp.bfloat16)
    tuning = tune.search(p, ["forward", "backward"], both, measure=measure)
    assert tuning.tile_sizes == wanted
    told = str(tuning)
    assert "backward  mosaic, block_q 128, stages 2  1.0000 ms" in told
    whole = [line for line in told.splitlines() if "  all of " in line]
    # A pass by each, and that for gradients in two ways.
    assert len(whole) == 5
    assert sum(line.endswith("  winner") for line in whole) == 2 + bool(wanted.backward)


@newer
def test_what_mosaic_has_no_backward_for_is_tuned_all_the_same(monkeypatch):
    fake_programs(monkeypatch)
    monkeypatch.setattr(_select, "mosaic_backward_limit", lambda problem: "it has none")
    p = problem(size=64, value_dim=64, dtype=jnp.bfloat16)
    tile = ForwardTile(2, 64, 0)
    monkeypatch.setattr(choose.backend("mosaic"), "candidates", lambda kernel, *_: [tile])
    tuning = tune.search(p, ["forward", "backward"], ["mosaic"], measure=lambda *_: 1.0)
    assert tuning.tile_sizes == TileSizes(forward=tile)


@newer
@pytest.mark.parametrize("size", [40, 64, 128, 256])
@pytest.mark.parametrize("kernel", ["forward", "decode", "backward", "dkv", "dq"])
def test_candidates_of_mosaic_fit_and_the_tables_is_the_first(kernel, size):
    q_len, kv_len = (9, 600) if kernel == "decode" else (300, 300)
    p = problem(size=size, value_dim=size, q_len=q_len, kv_len=kv_len, dtype=jnp.bfloat16)
    by_table = functools.partial(choose.by_table, p, "mosaic")
    tiles = choose.backend("mosaic").candidates(kernel, p, by_table)
    assert tiles[0] == by_table(None).tile(kernel)
    assert len({*tiles}) == len(tiles) <= 36
    assert len(tiles) >= (1 if size > 128 else 8 if kernel == "forward" else 2)
    for tile in tiles:
        by_table(sizes_for(kernel, tile))  # Raises where it does not fit.


LONG = dict(q_len=2048, kv_len=2048, heads=32, kv_heads=32, size=128, value_dim=128)
LONG |= dict(dtype=jnp.bfloat16, batch=2)


def explained(**options):
    shapes = {
        name: jax.ShapeDtypeStruct((2, 2048, 32, 128), jnp.bfloat16)
        for name in ("query", "key", "value")
    }
    return pallas_flash.explain(**shapes, **options)


@pytest.fixture
def hopper(monkeypatch, h200):
    monkeypatch.setattr(_compat, "has_mosaic_gpu", lambda: True)


@pytest.mark.parametrize(
    ("tiles", "forward", "why_not", "backward"),
    [
        (None, "mosaic", "Slower than the kernels for Hopper.", ""),
        (TileSizes(forward=FAST), "triton", '"triton" was faster when such calls were tuned', ""),
        (TRITON, "triton", '"triton" was faster when such calls were tuned on this GPU.', ""),
        (
            TileSizes(FAST, backward=BackwardTile()),
            "triton",
            '"triton" was faster',
            'The backward is that of "mosaic": "mosaic" was faster when such calls were tuned',
        ),
        (
            TileSizes(ForwardTile(), dkv=FAST, dq=FAST),
            "mosaic",
            '"mosaic" was faster when such calls were tuned on this GPU.',
            'The backward is that of "triton": "triton" was faster when such calls were tuned',
        ),
    ],
    ids=["nothing", "forward", "triton", "backward by mosaic", "forward by mosaic"],
)
def test_a_winner_chooses_who_computes_each_pass(
    monkeypatch, hopper, file, tiles, forward, why_not, backward
):
    # By the table "mosaic" is faster in both.
    if tiles is not None:
        cache.store(problem(**LONG), "NVIDIA H200", tiles)
    monkeypatch.setattr(choose, "by_table", lambda problem, by, asked: asked or TileSizes())
    choice = explained()
    assert choice.implementation == forward
    assert why_not in choice.refused["triton" if forward == "mosaic" else "mosaic"]
    assert backward in choice.reason
    assert (f"Its tiles are tuned, from {file}." in choice.reason) == (tiles is not None)
    # What is asked for comes first.
    other = "mosaic" if forward == "triton" else "triton"
    assert explained(implementation=other).implementation == other
    given = {"mosaic": TileSizes(forward=ForwardTile()), "triton": TileSizes(forward=OTHER)}[other]
    choice = explained(tile_sizes=given)
    assert choice.implementation == other
    assert f'are those of "{other}"' in choice.refused[forward]


def plan_of(monkeypatch, **options):
    """Who computes a call of `attention`, and how."""
    used = []
    with monkeypatch.context() as patch:
        patch.setattr(_vjp, "attend", lambda plan, *_: used.append(plan) or (jnp.zeros(()), None))
        patch.setattr(choose, "by_table", lambda problem, by, asked: asked or TileSizes())
        x = jnp.zeros((1, 64, 2, 64), jnp.bfloat16)
        pallas_flash.attention(x, x, x, **options)
    [plan] = used
    return plan


@pytest.mark.parametrize(
    ("given", "reproducible", "by", "in_order"),
    [
        (MOSAIC, False, "mosaic", False),
        (MOSAIC, True, "mosaic", True),
        (MOSAIC.only(["dkv", "dq"]), False, "mosaic", True),
        (MOSAIC.only(["dq"]), False, "mosaic", True),
        (MOSAIC.only(["backward"]), False, "mosaic", False),
        (MOSAIC.only(["backward"]), True, "triton", False),
        (dataclasses.replace(TRITON, backward=BackwardTile(128)), False, "mosaic", False),
        (dataclasses.replace(TRITON, backward=BackwardTile(128)), True, "triton", False),
        (TRITON, False, "triton", False),
    ],
)
def test_tiles_say_how_gradients_are_computed(
    monkeypatch, hopper, given, reproducible, by, in_order
):
    """In one pass or in two, or by "triton", to which so short a call goes without tiles."""
    plan = plan_of(monkeypatch, tile_sizes=given, reproducible=reproducible)
    assert (plan.backward_by, plan.in_order) == (by, in_order)
    assert plan.implementation == (given.computed_by("forward") or "triton")
    assert (plan.tiles, plan.mosaic_tiles) == tuple(
        given.of(name) if name in (by, plan.implementation) else TileSizes()
        for name in ("triton", "mosaic")
    )


def test_tiles_of_mosaic_do_not_matter_where_it_does_not_serve(monkeypatch):
    gpu_here(monkeypatch, "NVIDIA A100")
    monkeypatch.setattr(_select, "target", lambda: _select.Target("NVIDIA A100", True, (8, 0)))
    plan = plan_of(monkeypatch, tile_sizes=MOSAIC)
    assert (plan.implementation, plan.backward_by) == ("triton", "triton")
    assert plan.tiles == plan.mosaic_tiles == TileSizes()


def test_an_infinite_lse_is_right_where_nothing_is_seen(monkeypatch):
    """And wrong elsewhere."""
    lengths = {"query_seq_lengths": jnp.asarray([7], jnp.int32)}
    fake_programs(monkeypatch)
    assert searched(monkeypatch, {FAST: 1.0}, **lengths).tile_sizes.forward == FAST
    fake_programs(
        monkeypatch, lambda tile, results: [results[0], results[1].at[0, 0, 0].set(-jnp.inf)]
    )
    assert searched(monkeypatch, {FAST: 1.0}, **lengths).tile_sizes.forward is None
    fake_programs(monkeypatch, lambda tile, results: [results[0], jnp.maximum(results[1], -100)])
    assert searched(monkeypatch, {FAST: 1.0}, **lengths).tile_sizes.forward is None
    fake_programs(monkeypatch, lambda tile, results: [results[0], 1.1 * results[1]])
    assert searched(monkeypatch, {FAST: 1.0}, **lengths).tile_sizes.forward is None


@pytest.mark.parametrize("step", ["lower", "compile", "run", "measure"])
def test_a_candidate_that_fails_is_reported_and_the_others_go_on(monkeypatch, step):
    """As one does that needs more shared memory than there is."""

    def fail(*_):
        raise RuntimeError("out of shared memory\nand a long trace")

    fake_programs(monkeypatch)
    program = tune._program

    class Failing:
        """A program, then lowered, then compiled."""

        lower = fail if step == "lower" else lambda self, *args: self
        compile = fail if step == "compile" else lambda self: self
        __call__ = fail

    def some_fail(kernel, plan):
        fails = plan.tiles.tile(kernel) == FASTER and step != "measure"
        return Failing() if fails else program(kernel, plan)

    monkeypatch.setattr(tune, "_program", some_fail)
    monkeypatch.setattr(triton_tiles, "candidates", lambda *_: [FASTER, FAST])

    def measure(kernel, tile, call, arguments):
        return fail() if (step, tile) == ("measure", FASTER) else 1.0

    tuning = tune.search(problem(), ["forward"], ["interpret"], measure=measure)
    assert tuning.tile_sizes == TileSizes(forward=FAST)
    assert tuning.trials == (
        Trial("forward", FAST, 1.0, None),
        Trial("forward", FASTER, None, "RuntimeError: out of shared memory"),
    )


@pytest.mark.parametrize(
    ("ms", "winners"),
    [
        ({"dkv": 3.0, "dk": 1.0, "dv": 1.0}, {"dk", "dv"}),
        ({"dkv": 3.0, "dk": 2.0, "dv": 2.0}, {"dkv"}),
        ({"dkv": None, "dk": 2.0, "dv": 2.0}, {"dk", "dv"}),
        ({"dkv": 3.0, "dk": None, "dv": 1.0}, {"dkv"}),
        ({"dkv": None, "dk": None, "dv": 1.0}, set()),
        ({"forward": 1.0, "dq": None}, {"forward"}),
    ],
)
def test_one_kernel_or_two_for_dk_and_dv_whichever_is_faster(ms, winners):
    tiles = tune._winners([Trial(kernel, FAST, time, None) for kernel, time in ms.items()])
    assert tiles == TileSizes(**dict.fromkeys(winners, FAST))


def test_few_queries_have_a_kernel_of_their_own(monkeypatch):
    fake_programs(monkeypatch)
    tuning = searched(monkeypatch, {FAST: 1.0}, q_len=16, kv_len=513)
    assert tuning.trials == (Trial("decode", FAST, 1.0, None),)
    assert tuning.tile_sizes == TileSizes(decode=FAST)


@pytest.mark.parametrize("kernel", [*KERNELS, "decode"])
@pytest.mark.parametrize("capability", [(9, 0), (8, 9)])
@pytest.mark.parametrize(("size", "dtype"), [(64, "bfloat16"), (128, "bfloat16"), (256, "float32")])
def test_candidates_fit_and_the_tables_is_the_first(monkeypatch, kernel, size, dtype, capability):
    q_len, kv_len = (9, 600) if kernel == "decode" else (300, 300)
    p = problem(size=size, value_dim=size, q_len=q_len, kv_len=kv_len, dtype=jnp.dtype(dtype))
    monkeypatch.setattr(_select, "tile_capability", lambda implementation: capability)
    by_table = functools.partial(choose.by_table, p, "triton")
    tiles = triton_tiles.candidates(kernel, p, by_table)
    default = by_table(None).tile(kernel)
    assert default in (None, *tiles[:1])
    assert len({*tiles}) == len(tiles) <= 36
    # Of wide heads and small GPUs only few can be tried, and no dkv where the table has dk and dv.
    assert len(tiles) >= (8 if size < 256 else 1 if default else 0)
    # float32 numbers for each row that stays: of the sums, and of the scores of each column.
    sums = 2 * size if kernel == "dkv" else size
    scores = 1 if kernel in ("forward", "decode", "dv") else 2
    for tile in tiles[default is not None :]:
        stay, flow = tile.block_q, tile.block_kv
        if kernel in ("dkv", "dk", "dv"):
            stay, flow = flow, stay
        # The table itself has fewer rows where nothing else fits.
        fewest = default.block_q if kernel == "decode" else 64
        assert stay >= min(fewest, 16 * tile.num_warps) or (size, capability) == (256, (8, 9))
        assert flow in (16, 32, 64, 128)
        assert tile.num_slices == (2 if stay == 256 else 1)
        assert not tile.one_loop
        assert stay * (sums + scores * flow) / (32 * tile.num_warps) <= 255
        by_table(sizes_for(kernel, tile))  # Raises where it does not fit.


def test_one_loop_is_tried_where_it_makes_a_difference():
    def tried(kernel="forward", **of):
        p = problem(**of)
        tiles = triton_tiles.candidates(
            kernel, p, functools.partial(choose.by_table, p, "interpret")
        )
        return {(tile.num_stages, tile.num_slices) for tile in tiles if tile.one_loop}

    same, causal = dict(kv_len=300, q_len=300), dict(is_causal=True)
    assert tried(**same, **causal) == {(2, 1)}
    assert not tried(**same) | tried("dq", **same, **causal) | tried(**causal)
    assert not tried(**same, key_value_seq_lengths=jnp.array([50]))
    # Also with the table's own sizes, where that has a loop for masked tiles.
    wide = problem(**same, **causal, size=256, value_dim=256, dtype=jnp.bfloat16)
    by_table = functools.partial(choose.by_table, wide, "interpret")
    table = by_table(None).forward
    assert not table.one_loop
    both = {table, dataclasses.replace(table, one_loop=True)}
    assert both <= {*triton_tiles.candidates("forward", wide, by_table)}


def test_blocks_longer_than_the_sequence_are_tried_once():
    p = problem(q_len=3, kv_len=33)
    by_table = functools.partial(choose.by_table, p, "interpret")
    tiles = triton_tiles.candidates("forward", p, by_table)
    # Three queries cannot be sliced.
    assert {tile.block_q for tile in tiles} == {by_table(None).forward.block_q, 64, 128}
    shortened = [(x.num_warps, x.num_stages, min(x.block_kv, 64)) for x in tiles]
    assert len({*shortened}) == len(shortened)


def test_rows_of_few_queries_are_those_of_all_heads_that_share_keys():
    p = problem(q_len=1, kv_len=600, heads=128, kv_heads=1)
    tiles = triton_tiles.candidates("decode", p, functools.partial(choose.by_table, p, "interpret"))
    assert {64, 128} <= {tile.block_q for tile in tiles if tile.num_warps == 4}
    alone = problem(q_len=1, kv_len=600)
    fewer = triton_tiles.candidates(
        "decode", alone, functools.partial(choose.by_table, p, "interpret")
    )
    assert len(fewer) < len(tiles)


def test_few_queries_are_tuned_by_their_rows():
    keys = [
        cache.key(problem(q_len=q_len, heads=heads, kv_heads=2), "a GPU")
        for q_len, heads in ((1, 4), (2, 2), (1, 64), (17, 4), (17, 64))
    ]
    assert keys[0].replace("T 1,", "T 2,") == keys[1]
    assert ["rows' keys" in key for key in keys] == [True, True, True, False, False]
    assert len(set(keys)) == 5


def test_queries_of_all_heads_may_be_few():
    few, many = (cache.key(problem(q_len=n, heads=1, kv_heads=1), "") for n in (40, 41))
    assert "64 rows' keys" in few
    assert "own keys" in many


def test_queries_and_keys_of_all_heads_count():
    sizes = [{"heads": 4, "kv_heads": 2}, {"heads": 8, "kv_heads": 2}, {"heads": 8, "kv_heads": 4}]
    keys = [cache.key(problem(**more), "") for more in sizes]
    numbers = "128 and 128", "256 and 128", "256 and 256"
    assert [key.partition(", in all ")[2] for key in keys] == list(numbers)


# ------------------------------------------------------------------------------------------------
# The clocks.


@pytest.fixture
def cupti(monkeypatch):
    """JAX's profiler, with launches that are made up."""
    from jax.experimental.mosaic.gpu import profiler

    launches = [("pallas_flash_delta", 5.0), ("pallas_flash_dkv__1", 2.0), ("fusion", 1.0)]

    def measure(call, *, aggregate, iterations):
        assert not aggregate
        return lambda *args: (call(*args), [launches] * iterations)

    monkeypatch.setattr(profiler, "measure", measure)
    return launches


def test_a_kernel_is_timed_by_its_name(cupti):
    measure, _ = tune._clock()
    assert measure("dkv", FAST, lambda: None, ()) == 2.0
    with pytest.raises(RuntimeError, match=r"saw no kernel pallas_flash_\(dk\)"):
        measure("dk", FAST, lambda: None, ())
    # A whole pass is all that is launched.
    assert measure("backward", TRITON, lambda: None, ()) == 8.0


def test_a_kernel_in_parts_is_timed_whole(cupti):
    measure, _ = tune._clock()
    mosaic = "mosaic_gpu_kernel"
    cupti += [(f"pallas_flash_dkq_{mosaic}", 7.0), (f"pallas_flash_dv_{mosaic}", 10.0)]
    assert measure("backward", BackwardTile(), lambda: None, ()) == 17.0


@pytest.mark.parametrize("kernel", tune.GRADIENTS)
def test_a_program_has_its_kernel_once(kernel):
    """Whatever XLA takes for the same."""
    calls = []

    class Plan:
        def backward(self, x):
            calls.append(x)
            return _vjp.Gradients(x, x, x, None, None, None)

    results = tune._program(kernel, Plan())(jnp.ones(1))
    assert len(calls) == 1 and len(results) == len(tune.GRADIENTS[kernel])


def test_without_cupti_the_host_times_the_program(monkeypatch):
    measure, clock = tune._clock()
    assert "by the host" in clock
    seconds, calls = itertools.count(), []
    monkeypatch.setattr(tune.time, "perf_counter", lambda: float(next(seconds)))
    ms = measure("dq", FAST, lambda *args: calls.append(args), (1, 2))
    assert ms == 1000 / tune.ITERATIONS
    assert calls == [(1, 2)] * (1 + tune.ITERATIONS)


@pytest.mark.gpu
def test_on_a_gpu(file):
    """Whatever compiles is right, and has a time; the winner serves the next call."""
    x = jax.ShapeDtypeStruct((1, 700, 4, 64), jnp.bfloat16)
    tuning = pallas_flash.tune(x, x, x, is_causal=True)
    print(tuning)
    failed = [trial.failure for trial in tuning.trials if trial.ms is None]
    assert all("RESOURCE_EXHAUSTED" in failure for failure in failed)
    on_hopper = "mosaic" not in _select.not_on_gpu(problem(dtype=jnp.bfloat16))
    wanted = {*KERNELS, "backward"} if on_hopper else {*KERNELS}
    assert {trial.kernel for trial in tuning.trials if trial.ms} == wanted
    assert tuning.clock == "kernel alone, by CUPTI"
    x = jnp.zeros(x.shape, x.dtype)
    assert str(file) in pallas_flash.explain(x, x, x, is_causal=True).reason


# ------------------------------------------------------------------------------------------------
# The function.


@pytest.fixture
def search(monkeypatch):
    """`tune` finds these tiles at once."""
    asked, found = [], TileSizes(forward=FAST)

    def search(problem, passes, implementations):
        asked.append((problem, passes))
        trials = (Trial("forward", FAST, 1.0, None), Trial("forward", OTHER, None, "it burnt"))
        return Tuning(found, trials, {"triton": table()}, "a clock")

    monkeypatch.setattr(tune, "search", search)
    return asked


def test_tuning_serves_later_calls(monkeypatch, h200, search, file):
    assert tiles_of(monkeypatch) == table()
    tuning = pallas_flash.tune(**arguments())
    assert tuning.file == file
    assert tuning.tile_sizes == TileSizes(forward=FAST)
    assert tiles_of(monkeypatch) == dataclasses.replace(table(), forward=FAST)
    assert str(tuning).splitlines() == [
        "forward   32 x 32, 1 warps, 1 stages  1.0000 ms  winner",
        "forward   16 x 32, 1 warps, 1 stages  it burnt",
        f"a clock; stored in {file}",
    ]


def test_a_dry_run_keeps_nothing(h200, search, file):
    assert pallas_flash.tune(**arguments(), store=False).file is None
    assert not file.exists()


def test_nothing_found_keeps_nothing(monkeypatch, h200, file):
    nothing = Tuning(TileSizes(), (), {}, "a clock")
    monkeypatch.setattr(tune, "search", lambda *_: nothing)
    assert pallas_flash.tune(**arguments()) == nothing
    assert not file.exists()


def test_a_file_that_cannot_be_written_loses_no_result(monkeypatch, h200, search, file):
    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with warned(1, "could not store its winner: disk full"):
        tuning = pallas_flash.tune(**arguments())
    assert (tuning.tile_sizes.forward, tuning.file) == (FAST, None)


def test_a_file_that_is_not_replaced_is_told_before_anything_is_timed(h200, search, file):
    file.parent.mkdir()
    file.write_text("mine")
    with pytest.raises(ValueError, match="must be a file that pallas_flash"):
        pallas_flash.tune(**arguments())
    assert not search
    assert pallas_flash.tune(**arguments(), store=False).file is None
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("a file where the folder should be")
    with pytest.raises(NotADirectoryError):
        pallas_flash.tune(**arguments())


def test_random_numbers_stand_in_for_arrays_and_shapes(h200, search):
    """Attention of constants has gradients of zero, against which no error is small."""
    shape = jax.ShapeDtypeStruct((1, 40, 2, 16), jnp.float32)
    pallas_flash.tune(array(30), shape, np.zeros((1, 40, 2, 8), np.float32), passes=["backward"])
    [(p, passes)] = search
    assert passes == ["backward"]
    assert [x.shape for x in (p.query, p.key, p.value)] == [
        (1, 30, 2, 16),
        shape.shape,
        (1, 40, 2, 8),
    ]
    assert all(0.9 < np.std(x) < 1.1 for x in (p.query, p.key, p.value))
    assert not np.array_equal(p.query[0, 0], p.key[0, 0])


def test_options_are_kept(h200, search):
    lengths = jnp.asarray([7], jnp.int32)
    pallas_flash.tune(**arguments(), is_causal=True, key_value_seq_lengths=lengths, scale=2.0)
    [(p, passes)] = search
    assert passes == ("forward", "backward")
    assert p.scale == 2.0
    band, leaf = p.mask.leaves
    assert (band.low, band.high) == (None, 0)
    np.testing.assert_array_equal(leaf.key_value, lengths)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"passes": "forward"}, ValueError, "`passes` must be a sequence of 'forward' and"),
        ({"passes": []}, ValueError, r"`passes` must be .* got \[\]"),
        ({"passes": ["dq"]}, ValueError, r"`passes` must be .* got \['dq'\]"),
        ({"return_lse": True}, TypeError, r"`tune` must have options .* got \['return_lse'\]"),
        ({"tile_sizes": TileSizes()}, TypeError, r"got \['tile_sizes'\]"),
        ({"is_causal": 1}, TypeError, "`is_causal` must be True or False"),
        ({"query": jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.int32)}, TypeError, "got int32"),
        ({"query": [1.0]}, TypeError, "`query` must be an array"),
        ({"value": array(40, size=264)}, NotImplementedError, "a head size of 264"),
        ({"sinks": jnp.zeros(3)}, ValueError, "`sinks` must have shape"),
    ],
)
def test_arguments_that_do_not_fit(h200, search, changed, error, message):
    with pytest.raises(error, match=message):
        pallas_flash.tune(**(arguments() | changed))
    assert not search


def test_a_traced_array_cannot_be_timed(h200):
    with pytest.raises(TypeError, match="got a traced array"):
        jax.jit(lambda x: pallas_flash.tune(x, x, x))(array())


@pytest.mark.parametrize("gpu", [None, "NVIDIA H200", "Tesla V100"])
def test_there_must_be_a_gpu(search, gpu):
    reason = {
        None: "the kernels need an NVIDIA GPU, and the device is cpu",
        "NVIDIA H200": "described, not here",
        "Tesla V100": "capability 8.0",
    }[gpu]
    with (
        described_gpu(gpu) if gpu else contextlib.nullcontext(),
        pytest.raises(NotImplementedError, match=f"^tuning needs a GPU .*{reason}"),
    ):
        pallas_flash.tune(**arguments())


# ------------------------------------------------------------------------------------------------
# Which calls a winner serves.

WINNER = TileSizes(forward=FAST, dkv=FAST, dq=FAST)


def store(tiles=WINNER, gpu="NVIDIA H200", **changed):
    return cache.store(problem(**changed), gpu, tiles)


ALIKE = {
    "itself": {},
    "another length": {"q_len": 17, "kv_len": 33},
    "examples for heads": {"batch": 2, "heads": 1, "kv_heads": 1},
}
DIFFERENT = {
    "longer queries": {"q_len": 33},
    "shorter queries": {"q_len": 16},
    "longer keys": {"kv_len": 65},
    "more examples": {"batch": 4},
    "more heads": {"heads": 5, "kv_heads": 5},
    "head size": {"size": 24},
    "head size of values": {"value_dim": 24},
    "dtype": {"dtype": jnp.bfloat16},
    "precision": {"precision": "highest"},
    "causal": {"is_causal": True},
    "window": {"local_window_size": 3},
    "lengths": {"key_value_seq_lengths": jnp.asarray([7], jnp.int32)},
    "shared keys": {"kv_heads": 1},
    "bias": {"bias": jnp.zeros((1, 40))},
    "sinks": {"sinks": jnp.zeros(2)},
    "soft cap": {"logits_soft_cap": 5.0},
    "dropout": {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)},
}


@pytest.mark.parametrize("changed", ALIKE.values(), ids=ALIKE)
def test_a_winner_serves_calls_that_are_alike(monkeypatch, h200, changed):
    store()
    assert tiles_of(monkeypatch, **changed) == WINNER.or_else(table(**changed))


@pytest.mark.parametrize("changed", DIFFERENT.values(), ids=DIFFERENT)
def test_and_no_others(monkeypatch, h200, changed):
    store()
    assert tiles_of(monkeypatch, **changed) == table(**changed)
    store(**changed)
    assert tiles_of(monkeypatch, **changed) == WINNER.or_else(table(**changed))


def test_enough_programs_are_alike(monkeypatch, h200):
    monkeypatch.setattr(cache, "MANY", 64)
    store()
    for changed in ({"batch": 4}, {"heads": 5, "kv_heads": 5}):
        assert tiles_of(monkeypatch, **changed) == WINNER.or_else(table(**changed))


def test_nor_on_another_gpu_jax_or_kernel(monkeypatch, h200):
    store()
    for change in (
        lambda patch: gpu_here(patch, "NVIDIA H100"),
        lambda patch: patch.setattr(jax, "__version__", "0.0"),
        lambda patch: patch.setattr(cache, "_fingerprint", lambda: "0"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert tiles_of(monkeypatch) == table()
    assert tiles_of(monkeypatch) == WINNER.or_else(table())


@pytest.mark.parametrize(
    "name",
    [
        "backward_dq.py",
        "common.py",
        "_masks.py",
        "_mask_objects.py",
        "_scores.py",
        "_operands.py",
        "_dropout.py",
        "ptx.py",
    ],
)
def test_the_fingerprint_is_of_the_kernels(monkeypatch, name):
    before, read = cache._fingerprint(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"#" * (self.name == name))
    assert cache._fingerprint.__wrapped__() != before


BLOCKS_OF_A_PREDICATE = pallas_flash.BlockMask.from_mask(
    pallas_flash.Predicate(lambda b, h, q, k: q > k), 24, 40
)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "full"),
        ({"is_causal": True}, "causal"),
        ({"is_causal": True, "query_offset": 3}, "causal"),
        ({"is_causal": True, "query_offset": jnp.asarray([3], jnp.int32)}, "causal"),
        ({"is_causal": True, "local_window_size": (4, None)}, "other"),
        ({"is_causal": True, "key_value_seq_lengths": jnp.asarray([7], jnp.int32)}, "other"),
        ({"local_window_size": (4, None)}, "other"),
        ({"segment_ids": (jnp.zeros((1, 24), jnp.int32), jnp.zeros((1, 40), jnp.int32))}, "other"),
        ({"mask": pallas_flash.PrefixLM(jnp.asarray([7], jnp.int32))}, "other"),
        ({"mask": jnp.ones((1, 40), bool)}, "listed"),
        ({"mask": jnp.ones((1, 40), bool), "is_causal": True}, "listed"),
        ({"mask": pallas_flash.BlockMask(jnp.ones((1, 1, 1, 1), bool))}, "listed"),
        ({"mask": pallas_flash.Predicate(lambda b, h, q, k: q > k)}, "predicate"),
        ({"mask": BLOCKS_OF_A_PREDICATE}, "predicate"),
    ],
)
def test_kinds_of_masks(options, kind):
    assert f" {kind} mask, T 32, S 64" in cache.key(problem(**options), "a GPU")


def halved(s, *at):
    return s / 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout_key": jax.random.key(0)}, ""),
        ({"bias": jnp.zeros(40)}, " + bias"),
        ({"bias": jnp.zeros((24, 40), jnp.float16)}, " + bias + 2 bytes a pair"),
        ({"alibi_slopes": jnp.zeros(2)}, " + slopes"),
        ({"score_fn": halved}, " + score_fn"),
        ({"logits_soft_cap": 3, "sinks": jnp.zeros(2)}, " + soft cap + sinks"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, " + dropout"),
    ],
)
def test_what_is_done_to_scores_and_probabilities_counts(options, words):
    assert f" full mask{words}, T 32, S 64" in cache.key(problem(**options), "a GPU")


def test_precision_counts_for_float32_however_it_is_set():
    with jax.default_matmul_precision("highest"):
        inherited = cache.key(problem(), "a GPU")
        half = cache.key(problem(dtype=jnp.float16), "a GPU")
    assert inherited == cache.key(problem(precision="highest"), "a GPU")
    assert inherited != cache.key(problem(), "a GPU")
    assert half == cache.key(problem(dtype=jnp.float16), "a GPU")


def test_tiles_that_are_asked_for_come_first(monkeypatch, h200):
    store()
    asked = TileSizes(dq=OTHER)
    expected = dataclasses.replace(WINNER.or_else(table()), dq=OTHER)
    assert tiles_of(monkeypatch, tile_sizes=asked) == expected
    split = TileSizes(forward=OTHER, dk=OTHER, dv=OTHER, dq=OTHER)
    assert tiles_of(monkeypatch, tile_sizes=split) == split.or_else(table())


def test_tiles_for_calls_of_all_lengths_leave_one_forward_kernel(monkeypatch, h200):
    both = TileSizes(forward=FAST, decode=OTHER)
    for q_len, wanted in ((16, (None, OTHER)), (33, (FAST, None))):
        cache.store(problem(q_len=q_len), "NVIDIA H200", TileSizes(dq=FASTER))
        tiles = tiles_of(monkeypatch, q_len=q_len, tile_sizes=both)
        assert (tiles.forward, tiles.decode, tiles.dq) == (*wanted, FASTER)


def test_the_interpreter_has_the_tables(monkeypatch, h200):
    store()
    assert tiles_of(monkeypatch, implementation="interpret") == table()


def test_a_described_gpu_has_the_tables_and_the_file_is_not_read(monkeypatch):
    store()

    def read(path):
        raise AssertionError("read")

    with monkeypatch.context() as patch, described_gpu("NVIDIA H200"):
        patch.setattr(cache, "read", read)
        assert tiles_of(monkeypatch) == table()
        choice = pallas_flash.explain(**arguments())
    assert choice.implementation == "triton"
    assert "tuned" not in str(choice)


def test_a_mesh_describes_gpus_that_are_here(monkeypatch):
    """As inside of shard_map."""

    class Gpu:
        platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"

        class client:
            platform_version = "cuda 13000"

    store(gpu="NVIDIA H200")
    store(gpu="NVIDIA H100")
    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu])
    with described_gpu("NVIDIA H200"):
        assert tiles_of(monkeypatch) == WINNER.or_else(table())
    with described_gpu("NVIDIA H100"):
        assert tiles_of(monkeypatch) == table()


def test_explain_tells_where_tiles_come_from(h200, file):
    assert "tuned" not in str(pallas_flash.explain(**arguments()))
    store()
    reason = pallas_flash.explain(**arguments()).reason
    assert reason == f"the kernels serve this call on this GPU. Its tiles are tuned, from {file}."
    asked = arguments(tile_sizes=TileSizes())
    assert pallas_flash.explain(**arguments(is_causal=True)).reason in reason
    assert "tuned" not in pallas_flash.explain(**asked, implementation="interpret").reason


# ------------------------------------------------------------------------------------------------
# The file.


def test_passes_are_merged(file):
    store(TileSizes(forward=FAST, dkv=FAST))
    store(TileSizes(dq=FAST), is_causal=True)
    store(TileSizes(dk=OTHER, dv=OTHER, dq=OTHER))
    assert cache.read(file) == {
        cache.key(problem(), "NVIDIA H200"): TileSizes(forward=FAST, dk=OTHER, dv=OTHER, dq=OTHER),
        cache.key(problem(is_causal=True), "NVIDIA H200"): TileSizes(dq=FAST),
    }


def test_tiles_of_both_implementations_are_stored(monkeypatch, capsys, file):
    sizes = dataclasses.replace(TRITON, forward=ForwardTile(3, 96), backward=BackwardTile(128))
    sizes = dataclasses.replace(sizes, decode=DecodeTile(stages=4))
    store(sizes)
    assert list(cache.read(file).values()) == [sizes]
    # A pass that is tuned again is forgotten whole, and the other one kept.
    store(TileSizes(dkv=BackwardTile(), dq=DqTile()))
    [merged] = cache.read(file).values()
    two_passes = dict(dkv=BackwardTile(), dq=DqTile())
    assert merged == TileSizes(ForwardTile(3, 96), DecodeTile(stages=4), **two_passes)
    assert command(monkeypatch, "--show") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  forward   mosaic, warpgroups 3, block_kv 96, output_slots 1, stages 2",
        "  decode    mosaic, warpgroups 2, block_kv 64, stages 4",
        "  dkv       mosaic, block_q 64, stages 2",
        "  dq        mosaic, warpgroups 2, block_kv 128, stages 2",
    ]


def test_a_file_of_before_is_read_and_kept(monkeypatch, h200, file):
    """Without tiles of "mosaic"; what an older version may not read says so by its number."""
    old = {
        "made_by": "pallas_flash.tune",
        "schema": 1,
        "winners": {
            "another call": {"forward": {"block_q": 64, "block_kv": 64, "num_warps": 4,
                                         "num_stages": 3}},
            cache.key(problem(), "NVIDIA H200"): {
                kernel: {**dataclasses.asdict(FAST)} for kernel in ("forward", "dkv", "dq")
            },
        },
    }  # fmt: skip
    file.parent.mkdir()
    file.write_text(json.dumps(old))
    with warned(0):
        assert tiles_of(monkeypatch) == WINNER.or_else(table())
        store(TileSizes(forward=OTHER))
    content = json.loads(file.read_text())
    assert content["schema"] == 2
    assert cache.read(file)["another call"] == TileSizes(Tile(64, 64, 4, 3))
    assert cache.read(file)[cache.key(problem(), "NVIDIA H200")] == dataclasses.replace(
        WINNER, forward=OTHER
    )


def test_the_file_is_read_once_and_again_after_a_store(monkeypatch, h200, file):
    assert tiles_of(monkeypatch) == table()
    store()
    first = file.read_text()
    assert tiles_of(monkeypatch) == WINNER.or_else(table())
    file.unlink()
    assert tiles_of(monkeypatch) == WINNER.or_else(table())
    store(TileSizes(forward=OTHER))
    assert tiles_of(monkeypatch).forward == OTHER
    file.write_text(first)
    assert tiles_of(monkeypatch).forward == OTHER


@pytest.mark.parametrize("failing", ["write_text", "replace"])
def test_a_write_that_fails_leaves_the_file_as_it_was(monkeypatch, file, failing):
    store()
    before = file.read_text()

    def fail(self, *args):
        if failing == "write_text":
            with open(self, "w") as part:
                part.write("{")
        raise OSError("disk full")

    monkeypatch.setattr(Path if failing == "write_text" else os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        store(TileSizes(forward=OTHER))
    assert file.read_text() == before
    assert list(file.parent.iterdir()) == [file]


def edited(change):
    """The content of a file with one winner, changed."""

    def content(file):
        store()
        content = json.loads(file.read_text())
        change(content)
        return json.dumps(content).encode()

    return content


def of_the_winner(change):
    return edited(lambda content: change(*content["winners"].values()))


FOREIGN = {
    "empty": lambda file: b"",
    "cut short": lambda file: edited(lambda content: None)(file)[:-5],
    "not text": lambda file: b"\xff\xfe\x00",
    "nested too deep": lambda file: b"[" * 100_000,
    "a bare number": lambda file: b"1",
    "a list": lambda file: b"[]",
    "another program's": lambda file: b'{"schema": 1, "winners": {}}',
    "signed by another": edited(lambda content: content.update(made_by="tune")),
}
OTHER_FORM = {
    "an older schema": edited(lambda content: content.update(schema=0)),
    "a newer schema": edited(lambda content: content.update(schema=3)),
    "no schema": edited(lambda content: content.pop("schema")),
    "no winners": edited(lambda content: content.pop("winners")),
    "a size that is none": of_the_winner(lambda winner: winner["dq"].update(block_q=7)),
    "a size of another type": of_the_winner(lambda winner: winner["dq"].update(block_q="64")),
    "an unknown size": of_the_winner(lambda winner: winner["dq"].update(cluster=2)),
    "an unknown kernel": of_the_winner(lambda winner: winner.update(dbias=winner["dq"])),
    "dk alone": of_the_winner(lambda winner: winner.update(dk=winner.pop("dkv"))),
}
# Of the form, but beyond the shared memory: told when it is looked up.
TOO_LARGE = of_the_winner(
    lambda winner: winner["dq"].update(block_q=256, block_kv=256, num_stages=8)
)
UNREADABLE = FOREIGN | OTHER_FORM | {"too large": TOO_LARGE}


def put(file, content):
    """Writes what one of these tables makes; returns it."""
    file.parent.mkdir(exist_ok=True)
    content = content(file)
    file.write_bytes(content)
    cache.read.cache_clear()
    return content


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_file_is_ignored_with_one_warning(monkeypatch, h200, file, content):
    content = put(file, content)
    with warned(1, f"ignores the tuned tiles in {file}: "):
        for _ in range(3):
            assert tiles_of(monkeypatch) == table()
            assert "tuned" not in str(pallas_flash.explain(**arguments()))
    assert file.read_bytes() == content


@pytest.mark.parametrize("name", FOREIGN | OTHER_FORM)
def test_a_file_of_something_else_is_neither_overwritten_nor_shown(monkeypatch, capsys, file, name):
    content = put(file, (FOREIGN | OTHER_FORM)[name])
    sentence = "wrote, or none; got another" if name in FOREIGN else "this version's form"
    with pytest.raises(ValueError, match=sentence):
        store()
    assert command(monkeypatch, "--show") == 2
    assert sentence in mistake(capsys)
    assert [path.read_bytes() for path in file.parent.iterdir()] == [content]


@pytest.mark.parametrize("name", UNREADABLE)
def test_only_what_we_wrote_is_removed(monkeypatch, capsys, file, name):
    content = put(file, UNREADABLE[name])
    ours = name not in FOREIGN
    assert command(monkeypatch, "--clear") == (0 if ours else 2)
    if ours:
        assert capsys.readouterr().out == f"removed {file}\n"
        assert not file.exists()
    else:
        assert "Move it away, or name another file in PALLAS_FLASH_TUNED." in mistake(capsys)
        assert file.read_bytes() == content


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_regular_file_stays(monkeypatch, capsys, h200, file, make):
    file.parent.mkdir()
    make(file)
    with warned(1, "wrote, or none; got another"):
        assert tiles_of(monkeypatch) == table()
    with pytest.raises(ValueError, match="wrote, or none; got another"):
        store()
    assert command(monkeypatch, "--clear") == 2
    assert list(file.parent.iterdir()) == [file]


def test_a_missing_file_is_nothing_to_tell(monkeypatch, h200):
    with warned(0):
        assert tiles_of(monkeypatch) == table()


def test_winners_can_be_switched_off(monkeypatch, h200, file):
    store()
    monkeypatch.setenv("PALLAS_FLASH_TUNED", "0")
    assert tiles_of(monkeypatch) == table()
    before = file.read_text()
    assert store(TileSizes(forward=OTHER)) is None
    assert file.read_text() == before
    monkeypatch.setenv("PALLAS_FLASH_TUNED", str(file))
    assert tiles_of(monkeypatch) == WINNER.or_else(table())


@pytest.mark.parametrize("value", [None, "", "1"])
def test_the_file_is_in_the_users_cache_folder(monkeypatch, tmp_path, value):
    import platformdirs

    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.delenv("PALLAS_FLASH_TUNED")
    if value is not None:
        monkeypatch.setenv("PALLAS_FLASH_TUNED", value)
    assert cache.file() == tmp_path / "pallas_flash" / "tiles.json"


# ------------------------------------------------------------------------------------------------
# The command.


def command(monkeypatch, *words):
    """The exit code of `python -m pallas_flash.tune`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["tune", *words])
    monkeypatch.delitem(sys.modules, "pallas_flash.tune", raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("pallas_flash.tune", run_name="__main__")
    return end.value.code


def mistake(capsys):
    """The last line on stderr, which is all but for argparse's usage."""
    *usage, line = capsys.readouterr().err.splitlines()
    assert not usage or usage[0].startswith("usage: ")
    assert line.startswith("python -m pallas_flash.tune: error: ")
    return line


def test_the_command_tunes_and_prints_a_table(monkeypatch, capsys, h200, search, file):
    words = "--head-dim 64 --length 24 --heads 6 --kv-heads 2 --batch 3 --causal --dtype float16"
    assert command(monkeypatch, *words.split(), "--passes", "forward") == 0
    [(p, passes)] = search
    assert p.query.shape == (3, 24, 6, 64)
    assert p.key.shape == p.value.shape == (3, 24, 2, 64)
    assert (p.dtype, passes) == (jnp.float16, ["forward"])
    assert " causal mask" in cache.key(p, "")
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("1.0000 ms  winner")
    assert out[-1] == f"a clock; stored in {file}"


def test_defaults_of_the_command(monkeypatch, capsys, h200, search, file):
    assert command(monkeypatch, "--dry-run") == 0
    [(p, passes)] = search
    assert p.query.shape == p.key.shape == p.value.shape == (1, 4096, 16, 128)
    assert (p.dtype, passes) == (jnp.bfloat16, ["forward", "backward"])
    assert not p.mask.leaves
    assert capsys.readouterr().out.endswith("not stored\n")
    assert not file.exists()


def test_the_command_shows_and_clears(monkeypatch, capsys, file):
    assert command(monkeypatch, "--show") == 0
    assert capsys.readouterr().out == f"no winners in {file}\n"
    store(TileSizes(forward=FAST, dq=OTHER))
    assert command(monkeypatch, "--show") == 0
    assert capsys.readouterr().out.splitlines() == [
        cache.key(problem(), "NVIDIA H200"),
        "  forward   32 x 32, 1 warps, 1 stages",
        "  dq        16 x 32, 1 warps, 1 stages",
    ]
    assert command(monkeypatch, "--clear") == 0
    assert capsys.readouterr().out == f"removed {file}\n"
    assert not file.exists()
    for words in ("--clear", "--show"):
        assert command(monkeypatch, words) == 0
        assert capsys.readouterr().out == f"no winners in {file}\n"


def test_slices_and_one_loop_are_stored_and_shown(monkeypatch, capsys, file):
    sizes = TileSizes(forward=Tile(256, 64, 8, 3, num_slices=2, one_loop=True))
    store(sizes)
    assert list(cache.read(file).values()) == [sizes]
    assert command(monkeypatch, "--show") == 0
    assert capsys.readouterr().out.endswith(" 256 x 64, 8 warps, 3 stages, 2 slices, one loop\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--heads 3 --kv-heads 2", "`query` must have a multiple of the heads"),
        ("--show", "PALLAS_FLASH_TUNED=0 switches winners off"),
        ("--clear", "PALLAS_FLASH_TUNED=0 switches winners off"),
        ("--passes sideways", "invalid choice: 'sideways'"),
        ("--dtype float64", "invalid choice: 'float64'"),
        ("--head-dim -1", "argument --head-dim: must be an int from 1 to 2**31 - 1; got '-1'."),
        ("--length 0", "argument --length: must be an int"),
        ("--heads 1e3", "argument --heads: must be an int"),
        ("--kv-heads nan", "argument --kv-heads: must be an int"),
        ("--batch 2147483648", "argument --batch: must be an int"),
        ("--length 2147483647 --batch 2147483647", "size"),
    ],
)
def test_mistakes_are_told_in_a_line(monkeypatch, capsys, words, message):
    monkeypatch.setenv("PALLAS_FLASH_TUNED", "0")
    assert command(monkeypatch, "--length", "8", *words.split()) == 2
    assert message in mistake(capsys)


def test_a_machine_without_devices_is_told_in_a_line(monkeypatch, capsys):
    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    assert command(monkeypatch, "--length", "8") == 2
    assert "JAX must find a device; got AssertionError()." in mistake(capsys)


def test_a_reader_that_has_seen_enough_is_no_mistake(file):
    """As under `| head`: standard output is a pipe that nobody reads."""
    store()
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [sys.executable, "-m", "pallas_flash.tune", "--show"],
        stdout=write,
        stderr=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (0, b"")


def test_without_a_gpu_the_command_says_so():
    """In a process of its own, with warnings as errors."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pallas_flash.tune", "--length", "8"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    assert run.returncode == 2
    assert not run.stdout
    assert run.stderr == (
        "python -m pallas_flash.tune: error: tuning needs a GPU on which the kernels serve the "
        "call: the kernels need an NVIDIA GPU, and the device is cpu.\n"
    )


def test_importing_the_command_leaves_the_function_in_place(monkeypatch):
    monkeypatch.delitem(sys.modules, "pallas_flash.tune", raising=False)
    function = pallas_flash.tune
    assert callable(function)
    assert importlib.import_module("pallas_flash.tune") is function
    assert pallas_flash.tune is function
