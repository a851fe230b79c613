"""Tuning: what is tried, what wins, and what `tuning.tune` does with it."""

import contextlib
import dataclasses
import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support.described_gpus import described_gpu
from support.tune_cases import (
    FAST,
    FASTER,
    MOSAIC,
    OTHER,
    TRITON,
    arguments,
    array,
    features,
    newer,
    problem,
    table,
    tiles_of,
    warned,
)
from support.tune_fixtures import h200_here, instant_search, own_file  # noqa: F401  Tests name them by their arguments.

import pallas_flash
from pallas_flash._backends.triton import tiles as triton_tiles
from pallas_flash._call import tune
from pallas_flash._call.tune import ROUNDS, SLOW, Trial, Tuning
from pallas_flash._execution import limits, tile_choice
from pallas_flash._execution.plan import Plan
from pallas_flash._jax import device
from pallas_flash._problem.problem import Gradients
from pallas_flash._problem.tile_sizes import selected, sizes_for, tile_of
from pallas_flash._selection import tuned
from pallas_flash.tuning import BackwardTile, ForwardTile, Tile, TileSizes

KERNELS = ("forward", "dkv", "dk", "dv", "dq")
# Relative errors of rounding; that of float32 is TF32's.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-10}
PROGRAM = tune._program

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


# A pass alone, whose programs take seconds to compile; what the other one adds is its kernels.
KERNELS_OF = {"forward": KERNELS[:1], "backward": KERNELS[1:]}
over_passes = pytest.mark.parametrize("name", cases.default(["forward"], KERNELS_OF))


@functools.cache
def interpreted(name):
    """The search of a pass with the kernels in the interpreter, three candidates for each."""
    tiles = [Tile(16, 16), Tile(16, 32), Tile(32, 16)]
    ms = dict(zip(tiles, (2.0, 1.0, 4.0), strict=True))
    clock = Clock(lambda kernel, tile: ms[tile] * (1.5 if kernel == "dkv" else 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_tiles, "candidates", lambda *_: tiles)
        tuning = tune.search(
            problem(kv_heads=1, is_causal=True, dtype=jnp.bfloat16),
            [name],
            ["interpret"],
            measure=clock,
        )
    return tuning, clock, ms


@over_passes
def test_the_fastest_tile_of_each_kernel_wins(name, kernel_case):
    tuning, _, ms = interpreted(name)
    best = Tile(16, 32)
    winners = ["forward"] if name == "forward" else ["dkv", "dq"]
    assert tuning.config == TileSizes(**dict.fromkeys(winners, best))
    for kernel in KERNELS_OF[name]:
        trials = [trial for trial in tuning.trials if trial.kernel == kernel]
        factor = 1.5 if kernel == "dkv" else 1
        assert trials == [
            Trial(kernel, tile, ms[tile] * factor, None) for tile in sorted(ms, key=ms.get)
        ]
    p = problem(kv_heads=1, is_causal=True, dtype=jnp.bfloat16)
    assert tuning.tables == {"interpret": tile_choice.tiles_of_call(p, "interpret", None)}


@over_passes
def test_candidates_are_timed_in_turns_and_slow_ones_once(name, kernel_case):
    _, clock, ms = interpreted(name)
    first, best, _ = ms
    assert ms[first] > SLOW * ms[best]
    assert clock.asked == [
        (kernel, tile) for kernel in KERNELS_OF[name] for tile in (*ms, *[best] * (ROUNDS - 1))
    ]


def test_the_search_announces_its_candidates(capsys):
    programs = {tile: jax.jit(lambda x: x) for tile in (FAST, FASTER, OTHER)}
    tune._announce([{"forward": programs}, {"dkv": {FAST: None}, "dq": {}}], {"forward": (1.0,)})
    counts = "4 configurations to compile, check and time: forward 3, dkv 1"
    assert capsys.readouterr().err == f"{counts}; about 1 min to compile\n"
    tune._announce([{"forward": {FAST: None}}], {"forward": (1.0,)})
    assert capsys.readouterr().err.endswith("and time: forward 1\n")


def fake_programs(monkeypatch, change=lambda tile, results: results):
    """Exact results for every tile, then changed; nothing of the kernels is compiled."""

    def program(kernel, plan):
        tiles = plan.forward.tiles
        tile, exact = tile_of(tiles, kernel), PROGRAM(kernel, Plan.from_implementation("xla"))
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
        assert tile_of(tuning.config, kernel) in (FAST, None)
    assert "winner" in str(tuning)


# ------------------------------------------------------------------------------------------------
# Of two implementations.

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
    times = dict(
        zip([selected(MOSAIC, ["forward"]), selected(TRITON, ["forward"])], forward, strict=True)
    )
    ways = (
        selected(MOSAIC, ["backward"]),
        selected(MOSAIC, ["dkv", "dq"]),
        selected(TRITON, ["dkv", "dq"]),
    )
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
        tile_choice.backend("mosaic"), "candidates", lambda kernel, *_: [tile_of(MOSAIC, kernel)]
    )
    both = ["triton", "mosaic"]
    p = problem(size=64, value_dim=64, dtype=jnp.bfloat16)
    tuning = tune.search(p, ["forward", "backward"], both, measure=measure)
    assert tuning.config == wanted
    told = str(tuning)
    assert "backward  mosaic, block_q 128, stages 2  1.0000 ms" in told
    whole = [line for line in told.splitlines() if "  all of " in line]
    # A pass by each, and that for gradients in two ways.
    assert len(whole) == 5
    assert sum(line.endswith("  winner") for line in whole) == 2 + bool(wanted.backward)


@newer
def test_what_mosaic_has_no_backward_for_is_tuned_all_the_same(monkeypatch):
    fake_programs(monkeypatch)
    monkeypatch.setattr(limits, "backward_limit", lambda problem, by: "it has none")
    p = problem(size=64, value_dim=64, dtype=jnp.bfloat16)
    tile = ForwardTile(2, 64, 0)
    monkeypatch.setattr(tile_choice.backend("mosaic"), "candidates", lambda kernel, *_: [tile])
    tuning = tune.search(p, ["forward", "backward"], ["mosaic"], measure=lambda *_: 1.0)
    assert tuning.config == TileSizes(forward=tile)


@newer
@pytest.mark.parametrize("size", [40, 64, 128, 256])
@pytest.mark.parametrize(
    ("kernel", "q_len", "kv_len"),
    [("forward", 9, 600), *((x, 300, 300) for x in ("forward", "backward", "dkv", "dq"))],
)
def test_candidates_of_mosaic_fit_and_the_tables_is_the_first(kernel, q_len, kv_len, size):
    p = problem(size=size, value_dim=size, q_len=q_len, kv_len=kv_len, dtype=jnp.bfloat16)
    by_table = functools.partial(tile_choice.tiles_of_call, p, "mosaic")
    tiles = tile_choice.backend("mosaic").candidates(kernel, p, by_table)
    assert tiles[0] == tile_of(by_table(None), kernel)
    assert len({*tiles}) == len(tiles) <= 36
    assert len(tiles) >= (1 if size > 128 else 8 if kernel == "forward" else 2)
    for tile in tiles:
        by_table(sizes_for(kernel, tile))  # Raises where it does not fit.


def test_an_infinite_lse_is_right_where_nothing_is_seen(monkeypatch):
    """And wrong elsewhere."""
    lengths = {"query_seq_lengths": jnp.asarray([7], jnp.int32)}
    fake_programs(monkeypatch)
    assert searched(monkeypatch, {FAST: 1.0}, **lengths).config.forward == FAST
    fake_programs(
        monkeypatch, lambda tile, results: [results[0], results[1].at[0, 0, 0].set(-jnp.inf)]
    )
    assert searched(monkeypatch, {FAST: 1.0}, **lengths).config.forward is None
    fake_programs(monkeypatch, lambda tile, results: [results[0], jnp.maximum(results[1], -100)])
    assert searched(monkeypatch, {FAST: 1.0}, **lengths).config.forward is None
    fake_programs(monkeypatch, lambda tile, results: [results[0], 1.1 * results[1]])
    assert searched(monkeypatch, {FAST: 1.0}, **lengths).config.forward is None


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
        fails = tile_of(plan.forward.tiles, kernel) == FASTER and step != "measure"
        return Failing() if fails else program(kernel, plan)

    monkeypatch.setattr(tune, "_program", some_fail)
    monkeypatch.setattr(triton_tiles, "candidates", lambda *_: [FASTER, FAST])

    def measure(kernel, tile, call, arguments):
        return fail() if (step, tile) == ("measure", FASTER) else 1.0

    tuning = tune.search(problem(), ["forward"], ["interpret"], measure=measure)
    assert tuning.config == TileSizes(forward=FAST)
    assert tuning.trials == (
        Trial("forward", FAST, 1.0, None),
        Trial("forward", FASTER, None, "RuntimeError: out of shared memory"),
    )


def test_what_has_no_time_is_timed_again(monkeypatch):
    """CUPTI sees most kernels most of the time."""
    fake_programs(monkeypatch)
    monkeypatch.setattr(triton_tiles, "candidates", lambda *_: [FASTER, FAST])
    asked = []

    def measure(kernel, tile, call, arguments):
        asked.append(tile)
        return 1.0 if tile == FASTER and asked.count(tile) == 3 else None

    seen, unseen = tune.search(problem(), ["forward"], ["interpret"], measure=measure).trials
    assert (seen.tile, seen.ms) == (FASTER, 1.0)
    assert (unseen.tile, unseen.ms) == (FAST, None)
    assert "saw no kernel" in unseen.failure
    assert asked.count(FAST) == tune.ROUNDS


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
    assert tuning.config == TileSizes(decode=FAST)


@pytest.mark.parametrize("kernel", [*KERNELS, "decode"])
@pytest.mark.parametrize("capability", [(9, 0), (8, 9)])
@pytest.mark.parametrize(("size", "dtype"), [(64, "bfloat16"), (128, "bfloat16"), (256, "float32")])
def test_candidates_fit_and_the_tables_is_the_first(monkeypatch, kernel, size, dtype, capability):
    q_len, kv_len = (9, 600) if kernel == "decode" else (300, 300)
    p = problem(size=size, value_dim=size, q_len=q_len, kv_len=kv_len, dtype=jnp.dtype(dtype))
    monkeypatch.setattr(device, "tile_capability", lambda implementation: capability)
    by_table = functools.partial(tile_choice.tiles_of_call, p, "triton")
    tiles = triton_tiles.candidates(kernel, p, by_table)
    default = tile_of(by_table(None), kernel)
    assert default in (None, *tiles[:1])
    assert len({*tiles}) == len(tiles) <= 36
    # Few tiles of wide heads fit on small GPUs, and no dkv where the table has dk and dv.
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
        assert stay * (sums + scores * flow) / (32 * tile.num_warps) <= 255
        by_table(sizes_for(kernel, tile))  # Raises where it does not fit.


def test_blocks_longer_than_the_sequence_are_tried_once():
    p = problem(q_len=3, kv_len=33)
    by_table = functools.partial(tile_choice.tiles_of_call, p, "interpret")
    tiles = triton_tiles.candidates("forward", p, by_table)
    assert {tile.block_q for tile in tiles} == {by_table(None).forward.block_q, 64, 128}
    shortened = [(x.num_warps, x.num_stages, min(x.block_kv, 64)) for x in tiles]
    assert len({*shortened}) == len(shortened)


def test_rows_of_few_queries_are_those_of_all_heads_that_share_keys():
    p = problem(q_len=1, kv_len=600, heads=128, kv_heads=1)
    tiles = triton_tiles.candidates(
        "decode", p, functools.partial(tile_choice.tiles_of_call, p, "interpret")
    )
    assert {64, 128} <= {tile.block_q for tile in tiles if tile.num_warps == 4}
    alone = problem(q_len=1, kv_len=600)
    fewer = triton_tiles.candidates(
        "decode", alone, functools.partial(tile_choice.tiles_of_call, p, "interpret")
    )
    assert len(fewer) < len(tiles)


def test_few_queries_are_tuned_by_their_rows():
    keys = [
        tuned.key(features(q_len=q_len, heads=heads, kv_heads=2), "a GPU")
        for q_len, heads in ((1, 4), (2, 2), (1, 64), (17, 4), (17, 64))
    ]
    assert keys[0].replace("T 1,", "T 2,") == keys[1]
    assert ["rows' keys" in key for key in keys] == [True, True, True, False, False]
    assert len(set(keys)) == 5


def test_queries_of_all_heads_may_be_few():
    few, many = (tuned.key(features(q_len=n, heads=1, kv_heads=1), "") for n in (40, 41))
    assert "64 rows' keys" in few
    assert "own keys" in many


def test_queries_and_keys_of_all_heads_count():
    sizes = [{"heads": 4, "kv_heads": 2}, {"heads": 8, "kv_heads": 2}, {"heads": 8, "kv_heads": 4}]
    keys = [tuned.key(features(**more), "") for more in sizes]
    numbers = "128 and 128", "256 and 128", "256 and 256"
    assert [key.partition(", in all ")[2] for key in keys] == list(numbers)


# ------------------------------------------------------------------------------------------------
# The clocks.


@pytest.fixture
def cupti(monkeypatch):
    """JAX's profiler, with launches that are made up."""
    from jax.experimental.mosaic.gpu import profiler

    launches = [("pallas_flash_delta", 5.0), ("pallas_flash_dkv__1", 2.0), ("fusion", 1.0)]

    class Cupti:
        def __init__(self, finalize):
            assert not finalize

        def measure(self, call, *, aggregate, iterations):
            assert not aggregate
            return lambda *args: (call(*args), [launches] * iterations)

    monkeypatch.setattr(profiler, "Cupti", Cupti)
    return launches


def test_a_kernel_is_timed_by_its_name(cupti):
    measure, _ = tune._clock()
    assert measure("dkv", FAST, lambda: None, ()) == 2.0
    assert measure("dk", FAST, lambda: None, ()) is None
    # A whole pass is all that is launched.
    assert measure("backward", TRITON, lambda: None, ()) == 8.0


def test_a_kernel_in_parts_is_timed_whole(cupti):
    measure, _ = tune._clock()
    mosaic = "mosaic_gpu_kernel"
    cupti[:] = [(f"pallas_flash_dk_{mosaic}", 7.0), (f"pallas_flash_dv_{mosaic}", 10.0)]
    assert measure("dkv", BackwardTile(), lambda: None, ()) == 17.0


def test_a_cluster_is_timed_as_the_backward(cupti):
    measure, _ = tune._clock()
    cupti.append(("pallas_flash_backward_cluster_mosaic_gpu_kernel", 7.0))
    assert measure("backward", BackwardTile(), lambda: None, ()) == 7.0


@pytest.mark.parametrize("kernel", tune.GRADIENTS)
def test_a_program_has_its_kernel_once(kernel):
    """Whatever XLA takes for the same."""
    calls = []

    class Plan:
        def run_backward(self, x):
            calls.append(x)
            return Gradients(x, x, x, None, None, None)

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


def each_fifth(function, *args):
    return list(function(*args))[::5]


@pytest.mark.gpu
def test_on_a_gpu(file, monkeypatch):
    """Whatever compiles is right, and has a time; the winner serves the next call.

    Each fifth candidate is compiled, for all take 500 seconds of a core.
    """
    on_hopper = "mosaic" not in limits.not_on_gpu(problem(dtype=jnp.bfloat16), device.target())
    for by in ("triton", "mosaic")[: 1 + on_hopper]:
        backend = tile_choice.backend(by)
        some = functools.partial(each_fifth, backend.candidates)
        monkeypatch.setattr(backend, "candidates", some)
    x = jax.ShapeDtypeStruct((1, 700, 4, 64), jnp.bfloat16)
    tuning = pallas_flash.tuning.tune(x, x, x, is_causal=True)
    print(tuning)
    failed = [trial.failure for trial in tuning.trials if trial.ms is None]
    # CUPTI never sees a few kernels: one or two of 45, others in another process.
    unseen = [failure for failure in failed if "saw no kernel" in failure]
    assert len(unseen) <= len(tuning.trials) // 10
    assert all("RESOURCE_EXHAUSTED" in failure for failure in failed if failure not in unseen)
    wanted = {*KERNELS, "backward"} if on_hopper else {*KERNELS}
    assert {trial.kernel for trial in tuning.trials if trial.ms} == wanted
    assert tuning.clock == "kernel alone, by CUPTI"
    x = jnp.zeros(x.shape, x.dtype)
    assert str(file) in pallas_flash.explain(x, x, x, is_causal=True).reason


# ------------------------------------------------------------------------------------------------
# The function.


def test_tuning_serves_later_calls(monkeypatch, h200, search, file):
    assert tiles_of(monkeypatch) == table()
    tuning = pallas_flash.tuning.tune(**arguments())
    assert tuning.file == file
    assert tuning.config == TileSizes(forward=FAST)
    assert tiles_of(monkeypatch) == dataclasses.replace(table(), forward=FAST)
    assert str(tuning).splitlines() == [
        "forward   32 x 32, 1 warps, 1 stages  1.0000 ms  winner",
        "forward   16 x 32, 1 warps, 1 stages  it burnt",
        f"a clock; stored in {file}",
    ]


def test_a_dry_run_keeps_nothing(h200, search, file):
    assert pallas_flash.tuning.tune(**arguments(), store=False).file is None
    assert not file.exists()


def test_nothing_found_keeps_nothing(monkeypatch, h200, file):
    nothing = Tuning(TileSizes(), (), {}, "a clock")
    monkeypatch.setattr(tune, "search", lambda *_: nothing)
    assert pallas_flash.tuning.tune(**arguments()) == nothing
    assert not file.exists()


def test_a_file_that_cannot_be_written_loses_no_result(monkeypatch, h200, search, file):
    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with warned(1, f"could not store its winner in {file}, and it serves this process alone: disk"):
        tuning = pallas_flash.tuning.tune(**arguments())
    assert (tuning.config.forward, tuning.file) == (FAST, None)


def test_a_file_that_is_not_replaced_is_told_before_anything_is_timed(h200, search, file):
    file.parent.mkdir()
    file.write_text("mine")
    with pytest.raises(ValueError, match="must be a file that pallas_flash"):
        pallas_flash.tuning.tune(**arguments())
    assert not search
    assert pallas_flash.tuning.tune(**arguments(), store=False).file is None
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("a file where the folder should be")
    with pytest.raises(NotADirectoryError):
        pallas_flash.tuning.tune(**arguments())


def test_random_numbers_stand_in_for_arrays_and_shapes(h200, search):
    """Attention of constants has gradients of zero, against which no error is small."""
    shape = jax.ShapeDtypeStruct((1, 40, 2, 16), jnp.float32)
    pallas_flash.tuning.tune(
        array(30), shape, np.zeros((1, 40, 2, 8), np.float32), passes=["backward"]
    )
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
    pallas_flash.tuning.tune(
        **arguments(), is_causal=True, key_value_seq_lengths=lengths, scale=2.0
    )
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
        *(
            ({name: x}, TypeError, f"`{name}` must be an argument of `tuning.tune`; got")
            for name, x in dict(return_lse=True, return_max_logits=True, config=TileSizes()).items()
        ),
        ({"causal": True}, TypeError, "Use `is_causal`"),
        ({"block_sizes": 1}, TypeError, "Drop it: see `help\\(pallas_flash.tuning.tune"),
        ({"is_causal": 1}, TypeError, "`is_causal` must be True or False"),
        ({"query": jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.int32)}, TypeError, "got int32"),
        ({"query": [1.0]}, TypeError, "`query` must be an array"),
        ({"value": array(40, size=264)}, NotImplementedError, "a head dim of 264"),
        ({"sinks": jnp.zeros(3)}, ValueError, "`sinks` must have shape"),
    ],
)
def test_arguments_that_do_not_fit(h200, search, changed, error, message):
    with pytest.raises(error, match=message):
        pallas_flash.tuning.tune(**(arguments() | changed))
    assert not search


def test_a_traced_array_cannot_be_timed(h200):
    with pytest.raises(TypeError, match="got a traced array"):
        jax.jit(lambda x: pallas_flash.tuning.tune(x, x, x))(array())


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
        pallas_flash.tuning.tune(**arguments())
