"""The order of a run: compile, check, take turns and write records."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from scripts.benchmarks.peers import OURS, PEERS, Attend, Unserved, trusted
from scripts.benchmarks.programs import (
    ALLOWED,
    JaxProgram,
    Program,
    TorchProgram,
    draw,
    errors,
    is_red,
)
from scripts.benchmarks.shapes import Shape
from scripts.benchmarks.timers import Clocks, Timers, Timing, first_line, sustain, take_turns

# Milliseconds of a burst, and of a measurement in a sustained turn, where the card should not wait
# for a read of the clock. Then the most calls in a measurement.
BURST, MEASUREMENT, MANY = 30, 250, 10_000

# Programs that are compiled before the first is timed; some take ten times as long as others.
PROGRAMS_OF_A_CORE = 2


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, Unserved) else first_line(error)


def build(shape: Shape, name: str, direction: str) -> Program | str:
    """Return the program of a peer, not compiled, or why there is none."""
    try:
        attend = PEERS[name].build(shape, direction)
    except ImportError as error:
        install = PEERS[name].install
        return _sentence(error) + (f": {install}" if install else "")
    except Exception as error:  # Any error of a peer is its reason.
        return _sentence(error)
    return (JaxProgram if isinstance(attend, Attend) else TorchProgram)(shape, attend, direction)


def compile_all(programs: Mapping[Any, Program | str]) -> dict[Any, Program | str]:
    """Compile in threads, because XLA releases the lock; an error becomes the peer's reason."""

    def compiled(program):
        if isinstance(program, str):
            return program
        try:
            program.compile()
        except Exception as error:  # Compilers raise any error; other peers go on.
            return _sentence(error)
        return program

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(programs, pool.map(compiled, programs.values()), strict=True))


@dataclasses.dataclass
class Bench:
    """Runs shapes and emits a record for each shape, pass and peer.

    Attributes:
        peers: Names of `PEERS`.
        directions: Passes.
        rounds: Measurements of each peer.
        iterations: Calls in a burst, at most.
        emit: Receives each record at once.
        sustained: Seconds that each peer runs alone, and again in turns; None for bursts.
        timer: (program, calls) -> its time; `Timers` if None is given.
    """

    peers: Sequence[str]
    directions: Sequence[str]
    _: dataclasses.KW_ONLY
    rounds: int
    iterations: int
    emit: Callable[[dict[str, Any]], None]
    sustained: float | None = None
    timer: Callable[[Program, int], Timing] | None = None

    def __post_init__(self):
        self.timer = self.timer or Timers(jax.devices()[0].platform)

    def run(self, shapes: Iterable[Shape], deadline: float, clocks: Clocks) -> list[str]:
        """Measure shapes until the deadline; returns the names of those left out."""
        shapes, compiled = list(shapes), {}
        for n, shape in enumerate(shapes):
            if time.monotonic() >= deadline:
                return [shape.name for shape in shapes[n:]]
            for direction in self._passes(shape):
                if (shape, direction, None) not in compiled:
                    compiled = compile_all(self._next_programs(shapes[n:]))
                names = (None, *self.peers)
                programs = {name: compiled.pop((shape, direction, name)) for name in names}
                self._measure(shape, direction, programs, clocks)
        return []

    def _passes(self, shape):
        return [direction for direction in self.directions if direction in shape.passes]

    def _next_programs(self, shapes):
        """Return programs of the first shapes, enough to keep all CPUs compiling."""
        programs, enough = {}, PROGRAMS_OF_A_CORE * (os.cpu_count() or 1)
        for shape in shapes:
            if len(programs) >= enough:
                break
            for direction in self._passes(shape):
                programs[shape, direction, None] = JaxProgram(shape, trusted(shape), direction)
                for name in self.peers:
                    programs[shape, direction, name] = build(shape, name, direction)
        return programs

    def _measure(self, shape, direction, programs, clocks):
        timer = self.timer
        assert timer is not None  # `__post_init__` has chosen one
        sets = [draw(shape, seed) for seed in range(4)]
        reference = programs.pop(None)
        try:
            if isinstance(reference, str):
                raise Unserved(reference)
            reference.load(sets[:1])
            right = reference.results()
        except Exception as error:  # Any failure leaves nothing to compare with.
            problem = f"nothing to compare with: {_sentence(error)}"
            programs, right = dict.fromkeys(programs, problem), {}
        del reference

        ready, result_errors = {}, {}
        for name, program in programs.items():
            record = self._record(shape, direction, name)
            if isinstance(program, str):
                self.emit({**record, "unserved": program})
                continue
            try:
                program.load(sets)
                result_errors[name] = errors(program.results(), right)
                once = timer(program, 2).ms
            except Exception as error:  # After any failure of a peer, others go on.
                self.emit({**record, "unserved": _sentence(error)})
                continue
            if is_red(result_errors[name], shape.dtype):
                self.emit({**record, "red": result_errors[name], "allowed": ALLOWED[shape.dtype]})
            else:
                ready[name] = functools.partial(timer, program, self._calls(once))
        del right
        measured = self._in_turns(ready, clocks)
        ours = measured[OURS][0] if OURS in measured else None
        for name, (times, clocked) in measured.items():
            program = programs[name]
            assert not isinstance(program, str)  # else it is not in `ready`
            record = self._record(shape, direction, name)
            record |= summary(times, ours, shape, direction)
            record |= {"errors": result_errors[name], "compile_s": program.compile_s}
            record |= {"memory": program.memory, **clocked}
            if isinstance(timer, Timers):
                record["timer"] = timer.name(program)
            self.emit(record)

    def _calls(self, ms: float) -> int:
        """Return the number of calls in a measurement of a program of `ms`; at least two."""
        if self.sustained is None:
            return max(2, min(self.iterations, int(BURST / ms)))
        return max(2, min(MANY, int(min(MEASUREMENT, 1e3 * self.sustained / self.rounds) / ms)))

    def _in_turns(self, ready, clocks):
        """Return for each name the times of its rounds, and the clocks meanwhile."""
        if self.sustained is None:
            clocks.take()
            times = take_turns(self.rounds, ready)
            clocked = {"clocks": clocks.take()}
            return {name: (times[name], clocked) for name in ready}

        def stretches(seconds):
            return {
                name: functools.partial(sustain, measure, seconds, clocks)
                for name, measure in ready.items()
            }

        alone = take_turns(1, stretches(self.sustained))
        seconds = self.sustained / self.rounds
        turns = take_turns(self.rounds, stretches(seconds), back_and_forth=True)
        return {
            name: (
                [turn.timing for turn in turns[name]],
                {
                    "clocks": middle([turn.clocks for turn in turns[name]]),
                    "sustained": {
                        "seconds": self.sustained,
                        "alone": alone[name][0].record(),
                        "rounds": [turn.record() for turn in turns[name]],
                    },
                },
            )
            for name in ready
        }

    def _record(self, shape, direction, name):
        problem = dataclasses.asdict(shape)
        del problem["passes"]
        mode = {} if self.sustained is None else {"sustained": {"seconds": self.sustained}}
        return {
            "shape": shape.name,
            **problem,
            "pass": direction,
            "implementation": name,
            "config": {},
            "peer_version": PEERS[name].version,
            **mode,
        }


def summary(
    times: Sequence[Timing], ours: Sequence[Timing] | None, shape: Shape, direction: str
) -> dict[str, Any]:
    """Return the numbers of one peer, and our relative speed, round by round."""
    median = statistics.median(x.ms for x in times)
    numbers = {
        "ms": spread([x.ms for x in times]),
        "tflops": shape.flops(direction) / median / 1e9,
        "kernels": {
            name: statistics.median(x.kernels.get(name, 0.0) for x in times)
            for name in times[0].kernels
        },
    }
    if direction == "forward":
        numbers["tb_per_s"] = shape.bytes() / median / 1e9
    if ours is not None:
        numbers["ratios"] = [a.ms / b.ms for a, b in zip(times, ours, strict=True)]
        numbers["ratio"] = spread(numbers["ratios"])
    return numbers


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, smallest, largest and number."""
    spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return spread | {"n": len(values)}


def middle(clocks: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    """Return medians of the clocks of several turns; None if there are none."""
    known = [x for x in clocks if x is not None]
    if not known:
        return None
    return {name: statistics.median(x[name] for x in known) for name in known[0]}
