"""Timers of programs: several clocks, the order of measurements, and the state of the GPU."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax

from scripts.benchmarks.programs import JaxProgram, Program, TorchProgram

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, and of each of its kernels by name."""

    ms: float
    kernels: Mapping[str, float] = dataclasses.field(default_factory=dict)


def host_timer(program: Program, iterations: int) -> Timing:
    """Time by the host's clock, the median of a few calls: for devices that do not queue."""
    jax.block_until_ready(program())
    seconds = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready(program())
        seconds.append(time.perf_counter() - start)
    return Timing(statistics.median(seconds) * 1e3)


class _Calls:
    """A program in the form that `profiler.measure` calls; each call takes the next set.

    The profiler keeps all results until it has waited for them. This object replaces the results
    and holds the last one, so that thousands of calls fit in memory.
    """

    def __init__(self, program: JaxProgram):
        self.program = program

    def __call__(self):
        self.last = self.program()
        return self

    def block_until_ready(self):
        jax.block_until_ready(self.last)
        return self

    lower = trace = eval_shape = __call__


def cupti_timer(program: JaxProgram, iterations: int) -> Timing:
    """Time by CUPTI: the sum over the kernels of a call; the median over calls."""
    from jax.experimental.mosaic.gpu import profiler

    iterations = max(2, iterations)
    measured = profiler.Cupti(finalize=False).measure(
        _Calls(program), aggregate=False, iterations=iterations
    )
    _, calls = measured()
    if calls is None:
        raise RuntimeError("CUPTI reports no kernel.")
    kernels: dict[str, float] = collections.defaultdict(float)
    for launches in zip(*calls, strict=True):
        kernels[launches[0][0]] += statistics.median(ms for _, ms in launches)
    total = statistics.median(sum(ms for _, ms in launches) for launches in calls)
    return Timing(total, dict(kernels))


def slope_timer(program: JaxProgram, iterations: int) -> Timing:
    """Time by the slope between two lengths of the program's loop."""

    def seconds(n):
        start = time.perf_counter()
        jax.block_until_ready(program.loop(n, *program.sets[0]))
        return time.perf_counter() - start

    seconds(1)
    return Timing((seconds(2 * iterations) - seconds(iterations)) / iterations * 1e3)


def event_timer(program: TorchProgram, iterations: int) -> Timing:
    """Time by CUDA events, with a cleared cache before each call; the median over calls."""
    import triton.testing

    return Timing(triton.testing.do_bench(program, warmup=5, rep=40, return_mode="median"))


class Timers:
    """Chooses the timer of a program, also for a program that CUPTI refuses."""

    def __init__(self, platform: str):
        self.on_gpu = platform == "gpu"
        self.refused: dict[Program, str] = {}

    def name(self, program: Program) -> str:
        """Return the name of the timer in records."""
        if isinstance(program, TorchProgram):
            return "events"
        if not self.on_gpu:
            return "host"
        return "slope" if program in self.refused else "cupti"

    def __call__(self, program: Program, iterations: int) -> Timing:
        """Time one program."""
        if self.name(program) == "cupti":
            try:
                return cupti_timer(program, iterations)
            except jax.errors.JaxRuntimeError:
                raise
            except (RuntimeError, ImportError) as error:
                self.refused[program] = first_line(error)
                print(f"CUPTI: {self.refused[program]}; taking slopes", file=sys.stderr)
        timers = {"events": event_timer, "host": host_timer, "slope": slope_timer}
        return timers[self.name(program)](program, iterations)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, with its type."""
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}"


def take_turns(
    rounds: int, measurements: Mapping[str, Callable[[], T]], *, back_and_forth: bool = False
) -> dict[str, list[T]]:
    """Measure each program once in each round, in one order, or there and back."""
    results: dict[str, list[T]] = {name: [] for name in measurements}
    for n in range(rounds):
        names = list(measurements)
        for name in reversed(names) if back_and_forth and n % 2 else names:
            results[name].append(measurements[name]())
    return results


@dataclasses.dataclass(frozen=True)
class Turn:
    """A period in which one program ran alone: its median time, and the GPU's clocks."""

    timing: Timing
    clocks: Mapping[str, float] | None

    def record(self) -> dict[str, object]:
        """Return the turn for JSON."""
        return {"ms": self.timing.ms, "clocks": self.clocks}


def sustain(measure: Callable[[], Timing], seconds: float, clocks: Clocks) -> Turn:
    """Measure repeatedly for some seconds."""
    clocks.take()
    end = time.monotonic() + seconds
    timings = [measure()]
    while time.monotonic() < end:
        timings.append(measure())
    timings.sort(key=lambda timing: timing.ms)
    return Turn(timings[(len(timings) - 1) // 2], clocks.take())


def gpu_id() -> str:
    """Return nvidia-smi's name of the timed GPU, the first that CUDA shows."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"


class Clocks:
    """Clocks and power of the GPU while peers take turns, read by nvidia-smi.

    The power is instantaneous; nvidia-smi's "power.draw" is the mean of a second.
    """

    QUERY = ("clocks.sm", "clocks.mem", "power.draw.instant", "temperature.gpu")

    def __init__(self):
        self.samples: list[list[float]] = []
        try:
            self.process = subprocess.Popen(
                [
                    "nvidia-smi",
                    f"--id={gpu_id()}",
                    f"--query-gpu={','.join(self.QUERY)}",
                    "--format=csv,noheader,nounits",
                    "--loop-ms=50",
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
            )
        except OSError:
            self.process = None
        else:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                self.samples.append([float(x) for x in line.split(",")])

    def take(self) -> dict[str, float] | None:
        """Return medians since the last call."""
        samples, self.samples = self.samples, []
        if not samples:
            return None
        columns = zip(*samples, strict=True)
        return dict(zip(self.QUERY, map(statistics.median, columns), strict=True))

    def close(self):
        """End nvidia-smi."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
