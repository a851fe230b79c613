"""The search for the fastest tiles of a call on this GPU.

    candidates -> compiled, in threads -> checked against plain JAX -> timed in turns -> stored

Each kernel is searched in programs without the others: the space is a sum over kernels, and no
product. Backends give the candidates. Where two backends serve the call, whole passes with the
winners of each are tried in the same way. `cache` keeps the winners and gives them to later calls.
"""

import concurrent.futures
import dataclasses
import functools
import inspect
import math
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from pallas_flash._arguments import other_libraries
from pallas_flash._arguments.attention import NOT_OF_PROBLEM
from pallas_flash._call import attention
from pallas_flash._execution import limits, tile_choice
from pallas_flash._execution.plan import Plan, Wanted
from pallas_flash._jax import device
from pallas_flash._problem.features import features_of
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import (
    FORWARD,
    KERNELS,
    KEYS_STAY,
    TileSizes,
    backend_of,
    describe,
    filled,
    of_implementation,
    selected,
    sizes_for,
    tile_of,
)
from pallas_flash._selection import tuned

# The kernels of each pass. One kernel of the forward serves a call. All ways to the gradients are
# tried: one kernel for dk and dv, one for each, and one for all three.
PASSES = {"forward": FORWARD, "backward": (*KEYS_STAY, "dq", "backward")}

# The gradients that each kernel of the backward computes, by the names of `Gradients`.
GRADIENTS = {"dkv": ("key", "value"), "dk": ("key",), "dv": ("value",), "dq": ("query",)}
GRADIENTS |= {"backward": ("query", "key", "value")}

# The launches of a kernel that "mosaic" divides where head dims are large.
PARTS = {"dkv": "dkv|dk|dv"}

# The relative L2 error above which a candidate is wrong: 4 roundings to the dtype, where right
# kernels have less than 1. float32 counts as TF32, to which GPUs round it by default.
ALLOWED = {"float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8, "float32": 4 * 2.0**-10}

# Each candidate is timed once, and ROUNDS times in turns if it is within SLOW of the fastest.
ROUNDS, ITERATIONS, SLOW = 5, 5, 1.3


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate: its time, or why it has none.

    Attributes:
        kernel: the name of the kernel, or of a whole pass: "forward" or "backward".
        tile: its tile; `TileSizes` for a whole pass.
        ms: the time in ms; None if the candidate failed.
        failure: why it failed, else None.
    """

    kernel: str
    tile: Any
    ms: float | None
    failure: str | None


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of `tuning.tune`; it prints as a table.

    Attributes:
        config: the fastest tiles, of the fastest implementation for each pass; None for kernels
            without a right candidate.
        trials: every candidate, kernel by kernel, the fastest first.
        tables: the package's own tiles for this call, by implementation.
        clock: the clock, and the program that it timed.
        file: the file that keeps the winner, None if none does.
    """

    config: TileSizes
    trials: tuple[Trial, ...]
    tables: Mapping[str, TileSizes]
    clock: str
    file: Path | None = None

    def __str__(self) -> str:
        lines = []
        for trial in self.trials:
            tile, kernel = trial.tile, trial.kernel
            result = trial.failure if trial.ms is None else f"{trial.ms:.4f} ms"
            winners, tables = self.config, self.tables.values()
            marks = "  table" * any(tile_of(table, kernel) == tile for table in tables)
            marks += "  winner" * (
                tile in (tile_of(winners, kernel), selected(winners, _given(tile)))
            )
            lines.append(f"{kernel:<8}{column(tile)}  {result}{marks}")
        where = f"stored in {self.file}" if self.file else "not stored"
        return "\n".join([*lines, f"{self.clock}; {where}"])


def _given(tile) -> list[str]:
    """Return the kernels that `TileSizes` give a tile."""
    sizes = tile if isinstance(tile, TileSizes) else TileSizes()
    return [kernel for kernel in KERNELS if tile_of(sizes, kernel)]


def column(tile) -> str:
    """Return a tile as a column of a table."""
    if isinstance(tile, TileSizes):
        by = "mosaic" if of_implementation(tile, "mosaic") == tile else "triton"
        return f"  all of {by}: {', '.join(_given(tile))}"
    words = describe(tile)
    if backend_of(tile) == "mosaic":
        return f"  mosaic, {words}"
    return " " * (9 - words.index(",")) + words


def tune(
    query,
    key,
    value,
    *,
    passes: Sequence[str] = ("forward", "backward"),
    store: bool = True,
    **options,
) -> Tuning:
    """Find the fastest tiles for a call of `attention` on this GPU, and keep them for later calls.

    Candidates around the table's tiles are compiled, compared with plain JAX on the same inputs,
    and timed. A wrong candidate is reported and never chosen. Where "triton" and "mosaic" both
    serve the call, whole passes by each are timed, and the faster one wins. The number of
    candidates and an estimate of the time go to stderr first, and then the progress.

    The winner serves later calls like this one, in this process and others, where they do not give
    `config`; `explain` says so, and PALLAS_FLASH_TUNED=0 in the environment prevents it. Calls
    are alike on one model of GPU and one version of JAX, with the same head dims, dtype and kind of
    mask (none, causal, other), query heads that share keys or do not, and lengths with the same
    next power of two, both of one head and (up to 2^18) of all heads and batch elements together.

    Args:
        query: [B, T, N, H] or [T, N, H]; an array or a `jax.ShapeDtypeStruct`. Only shapes and
            dtypes count: normal random numbers stand in for all three.
        key: [B, S, K, H] or [S, K, H], as `query`.
        value: [B, S, K, V] or [S, K, V], as `query`.
        passes: "forward", "backward" or both.
        store: whether to keep the winner.
        **options: the other arguments of `attention` that define the result: `is_causal` ...

    Returns:
        A `Tuning`: the winning `config`, and every candidate with its time or why it has none.

    Raises:
        NotImplementedError: this machine has no GPU for the kernels, or they do not serve the call.
        OSError: the file of winners cannot be read.
        TypeError: an argument is of the wrong kind.
        ValueError: the arguments do not fit together, or a file of something else is where winners
            would be stored.

    Example:
        On the GPU that is tuned for:

            q = jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)
            print(pallas_flash.tuning.tune(q, q, q, is_causal=True))
    """
    if not passes or not set(passes) <= set(PASSES):
        raise ValueError(
            f"`passes` must be a sequence of {' and '.join(map(repr, PASSES))}; got {passes!r}. "
            "Leave it out for both."
        )
    problem = _problem((query, key, value), options)
    target = device.target()
    gpu, refused = target.gpu_here, limits.not_on_gpu(problem, target)
    implementations = [name for name in ("triton", "mosaic") if name not in refused]
    if gpu is None or not implementations:
        why = refused.get("triton") or f"The device is {target.description}."
        raise NotImplementedError(
            f"tuning needs a GPU on which the kernels serve the call: {why[0].lower()}{why[1:]}"
        )
    if store:
        tuned.check()  # Before minutes are spent.
    tuning = search(problem, passes, implementations)
    try:
        if store and tuning.config != TileSizes():
            file = tuned.store(features_of(problem), gpu, tuning.config)
            tuning = dataclasses.replace(tuning, file=file)
    except (OSError, ValueError) as error:  # The caller still gets the result of some minutes.
        warnings.warn(
            f"pallas_flash.tuning.tune could not store its winner in {tuned.file()}, and it serves "
            f"this process alone: {error}",
            stacklevel=2,
        )
    return tuning


def _problem(inputs, options) -> Problem:
    """Return the checked call, with random numbers as its inputs."""
    # Other numbers can take less time, as zeros do, or have gradients of rounding errors alone.
    inputs = [
        jax.random.normal(jax.random.key(seed), x.shape).astype(x.dtype)
        if hasattr(x, "dtype")
        else x
        for seed, x in enumerate(inputs)
    ]
    if any(isinstance(x, Tracer) for x in jax.tree.leaves([inputs, options])):
        raise TypeError(
            "`tuning.tune` must be given numbers; got a traced array. Call it outside `jit`."
        )
    parameters = inspect.signature(attention.attention).parameters
    names = [x for x in parameters if x not in NOT_OF_PROBLEM][len(inputs) :]
    other_libraries.check_keywords("tuning.tune", options, names)
    return attention.problem_of(attention.bound(*inputs, **options))


def search(
    problem: Problem,
    passes: Iterable[str],
    implementations: Sequence[str] = ("triton",),
    *,
    measure: Callable[..., float | None] | None = None,
) -> Tuning:
    """Try all candidates, and return the fastest.

    Args:
        problem: the call.
        passes: names of `PASSES`.
        implementations: "triton" and "mosaic", or "interpret".
        measure: (kernel, tile, call, arguments) -> ms; by default a clock of this machine.
    """
    arguments, wanted = _exact(problem)
    names = [name for name in PASSES if name in passes]
    programs = {
        (name, by): _programs(problem, name, by) for name in names for by in implementations
    }
    if measure is None:
        _announce(programs.values(), arguments)
    measure, clock = (measure, "as given") if measure else _clock()
    trials, winners = [], TileSizes()
    for name in names:
        ways = {}
        for by in implementations:
            tiles, mine = functools.partial(tile_choice.tiles_of_call, problem, by), []
            for kernel, tried in programs[name, by].items():
                mine += _try_all(kernel, tried, arguments[kernel], wanted[kernel], measure)
            trials += mine
            ways |= {way: _plan(by, tiles(way), *_given(way)) for way in _ways(_winners(mine))}
        if len(ways) > 1:
            whole = {way: _program(name, plan) for way, plan in ways.items()}
            tried = _try_all(name, whole, arguments[name], wanted[name], measure)
            trials += tried
            ways = [trial.tile for trial in tried if trial.ms is not None]
        winners = filled(winners, _fastest(list(ways)))
    tables = {by: tile_choice.tiles_of_call(problem, by, None) for by in implementations}
    return Tuning(winners, tuple(trials), tables, clock)


def _programs(problem: Problem, attention_pass: str, by: str) -> dict[str, dict[Any, Any]]:
    """Return for each kernel of a pass its candidates with their programs, not compiled."""
    tiles = functools.partial(tile_choice.tiles_of_call, problem, by)
    return {
        kernel: {
            tile: _program(kernel, _plan(by, tiles(sizes_for(kernel, tile)), kernel))
            for tile in tile_choice.backend(by).candidates(kernel, problem, tiles)
        }
        for kernel in _kernels(attention_pass, by, problem, tiles(None))
    }


def _announce(programs: Iterable[Mapping[str, Mapping[Any, Any]]], arguments) -> None:
    """Print how many candidates there are, and about how long their compilation will take."""
    kernels = [(kernel, tried) for group in programs for kernel, tried in group.items() if tried]
    counts = ", ".join(f"{kernel} {len(tried)}" for kernel, tried in kernels)
    total = sum(len(tried) for _, tried in kernels)
    text = f"{total} configurations to compile, check and time: {counts}"
    try:
        kernel, tried = kernels[0]
        start = time.perf_counter()
        lowered = next(iter(tried.values())).lower(*arguments[kernel])
        middle = time.perf_counter()
        lowered.compile()
        # Threads compile side by side, and one thread lowers.
        compiling = (time.perf_counter() - middle) / min(os.cpu_count() or 1, total)
        minutes = total * max(middle - start, compiling) / 60
        text += f"; about {max(1, round(minutes))} min to compile"
    except Exception:  # Its trial reports why a candidate does not compile.
        pass
    print(text, file=sys.stderr, flush=True)


def _kernels(attention_pass: str, by: str, problem: Problem, table: TileSizes) -> list[str]:
    """Return the kernels of a pass that an implementation has for a problem."""
    kernels = PASSES[attention_pass]
    if attention_pass == "backward" and limits.backward_limit(problem, by):
        return []
    if by == "mosaic":
        return [kernel for kernel in kernels if tile_of(table, kernel)]
    # One kernel of the forward serves a call, but all ways to dk and dv do.
    return [k for k in kernels if tile_of(table, k) or k in KEYS_STAY]


def _plan(by: str, sizes: TileSizes, *kernels: str) -> Plan:
    """Return the plan for programs of these kernels, with tiles of `by`."""
    if by == "mosaic":
        return Plan.from_implementation(by, sizes, in_order="backward" not in kernels)
    return Plan.from_implementation(by, sizes)


def _ways(winners: TileSizes) -> list[TileSizes]:
    """Return the ways to a pass by an implementation: "mosaic" has two ways to the gradients."""
    kernels = _given(winners)
    ways = [[k for k in kernels if k != "backward"], [k for k in kernels if k == "backward"]]
    return [selected(winners, way) for way in ways if way]


def _fastest(ways: list[TileSizes]) -> TileSizes:
    """Return the first of ways sorted by time; one pass, which has no order, beside another way."""
    if ways and ways[0].backward and ways[1:]:
        return filled(ways[0], ways[1])
    return ways[0] if ways else TileSizes()


def _exact(problem: Problem):
    """Return for each kernel the arguments of its program, and its results by float32 plain JAX."""
    plain, no_extras = Plan.from_implementation("xla"), Wanted()
    inputs = {
        name: getattr(problem, name).astype(jnp.float32) for name in ("query", "key", "value")
    }
    exact = dataclasses.replace(problem, **inputs, precision=lax.Precision.HIGHEST)
    o, log_sum = plain.run_forward(exact)
    do = jax.random.normal(jax.random.key(len(inputs)), o.shape, problem.dtype)
    gradients = plain.run_backward(exact, o, log_sum, do.astype(o.dtype), None, no_extras)
    for_kernels = log_sum if problem.large else log_sum.in_one()
    residuals = (problem, o.astype(problem.dtype), for_kernels, do, None, no_extras)
    arguments = dict.fromkeys(FORWARD, (problem,)) | dict.fromkeys(GRADIENTS, residuals)
    wanted = {kernel: [getattr(gradients, x) for x in names] for kernel, names in GRADIENTS.items()}
    return arguments, wanted | {kernel: [o, log_sum.lse] for kernel in FORWARD}


def _program(kernel: str, plan: Plan):
    """Return a program of one kernel, and delta: XLA drops kernels whose results nothing uses."""
    if kernel in FORWARD:

        def forward(problem):
            o, log_sum = plan.run_forward(problem)
            return [o, log_sum.lse]

        return jax.jit(forward)

    # One call for all results: XLA would merge equal kernels of "triton", but not of "mosaic".
    def backward(*residuals):
        gradients = plan.run_backward(*residuals)
        return [getattr(gradients, name) for name in GRADIENTS[kernel]]

    return jax.jit(backward)


def _try_all(kernel: str, programs: dict, arguments, wanted, measure) -> list[Trial]:
    """Compile, check and time programs by their tiles; the fastest come first."""
    failures: dict[Any, str] = {}

    def attempt(tile, function: Callable, *args) -> Any:
        try:
            return function(*args)
        except Exception as error:  # Any failure of one leaves the others.
            failures[tile] = f"{type(error).__name__}: {error}".splitlines()[0][:160]

    def each(tiles: Iterable, doing: str) -> Iterable:
        tiles = list(tiles)
        for tile in _progress(tiles, f"{kernel}: {doing}"):
            if tile not in failures:
                yield tile

    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiling, compiled = {}, {}
        # This thread lowers, because it has the caller's settings of JAX. The others compile
        # meanwhile, because XLA releases Python's lock.
        for tile in each(programs, "lowering"):
            if lowered := attempt(tile, programs[tile].lower, *arguments):
                compiling[tile] = pool.submit(lowered.compile)
        for tile in each(compiling, "compiling"):
            compiled[tile] = attempt(tile, compiling[tile].result)
    allowed = ALLOWED[arguments[0].dtype.name]
    for tile in each(compiled, "checking"):
        error = attempt(tile, lambda call: float(_error(call(*arguments), wanted)), compiled[tile])
        # Written such that NaN is wrong.
        if error is not None and not error <= allowed:
            failures[tile] = (
                f"wrong: a relative error of {error:.1e}, where {allowed:.1e} is allowed"
            )
    times: dict[Any, list[float]] = {tile: [] for tile in compiled if tile not in failures}
    for tile in each(list(times) * ROUNDS, "timing"):
        fastest = min((ms[0] for ms in times.values() if ms), default=math.inf)
        if not times[tile] or times[tile][0] <= SLOW * fastest:
            ms = attempt(tile, measure, kernel, tile, compiled[tile], arguments)
            times[tile] += [] if ms is None else [ms]
    # CUPTI misses one or two programs of fifty, some of them in every round.
    for tile in times:
        if not times[tile]:
            failures.setdefault(tile, "RuntimeError: CUPTI saw no kernel of that name")

    return _sorted_trials(kernel, programs, times, failures)


def _sorted_trials(kernel: str, tiles: Iterable, times: dict, failures: dict) -> list[Trial]:
    """Return the trials of some tiles, the fastest first."""
    order = {tile: statistics.median(times.get(tile) or [math.inf]) for tile in tiles}
    return [
        Trial(kernel, tile, None if tile in failures else order[tile], failures.get(tile))
        for tile in sorted(order, key=order.__getitem__)
    ]


@jax.jit
def _error(actual, wanted):
    """Return the largest relative L2 error; not finite if results are finite at other places."""

    def error(x, want):
        difference = jnp.where(x == want, 0, x.astype(want.dtype) - want)
        finite = jnp.where(jnp.isfinite(want), want, 0)
        return jnp.linalg.norm(difference.ravel()) / jnp.linalg.norm(finite.ravel())

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(error, actual, wanted))))


def _winners(trials: Iterable[Trial]) -> TileSizes:
    """Return the fastest tile of each kernel, with the faster of the two ways to dk and dv."""
    timed: list[Any] = [trial for trial in trials if trial.ms is not None]
    # The last trial of a name stays.
    best = {x.kernel: x for x in sorted(timed, key=lambda x: -x.ms)}
    joint, split = (
        sum(best[kernel].ms if kernel in best else math.inf for kernel in kernels)
        for kernels in (("dkv",), ("dk", "dv"))
    )
    lost = ("dk", "dv") if joint <= split else ("dkv",)
    return TileSizes(**{kernel: x.tile for kernel, x in best.items() if kernel not in lost})


def _clock() -> tuple[Callable[..., float | None], str]:
    """Return CUPTI's clock of a kernel, or where it fails the host's clock of the whole program."""
    try:
        if _launches(jax.jit(lambda x: x + 1), (jnp.zeros(8),)) is None:
            raise RuntimeError("it saw no kernel")
    except Exception as error:  # No library, no permission, another profiler ...
        return _program_ms, f"program with delta, by the host, because of CUPTI: {error!s:.80}"
    return _kernel_ms, "kernel alone, by CUPTI"


def _launches(call, arguments) -> Any:
    """Return (name, ms) of each launch, for each of some calls; None if CUPTI sees nothing."""
    from jax.experimental.mosaic.gpu import profiler

    # CUPTI stays in the process, because it crashes if it is detached hundreds of times.
    cupti = profiler.Cupti(finalize=False)
    _, calls = cupti.measure(call, aggregate=False, iterations=ITERATIONS)(*arguments)
    return calls


def _kernel_ms(kernel: str, tile, call, arguments) -> float | None:
    """Return the median over calls; None where CUPTI sees no kernel."""
    # XLA may append a number to a name. All kernels of a whole pass count.
    whole = isinstance(tile, TileSizes)
    parts = PARTS.get(kernel, kernel)
    name = re.compile("" if whole else rf"pallas_flash_({parts})(?![a-z])")
    calls = _launches(call, arguments) or [[]]
    times = [sum(ms for symbol, ms in call if name.search(symbol)) for call in calls]
    return statistics.median(times) if all(times) else None


def _program_ms(kernel: str, tile, call, arguments) -> float:
    results = jax.block_until_ready(call(*arguments))
    start = time.perf_counter()
    for _ in range(ITERATIONS):
        results = call(*arguments)
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / ITERATIONS * 1e3


def _progress(items: list, label: str) -> Iterable:
    """Return the items with a bar on stderr; without tqdm print one line."""
    try:
        from tqdm import tqdm
    except ImportError:
        print(f"{label} {len(items)} candidates", file=sys.stderr, flush=True)
        return items
    return tqdm(items, label, leave=False)
