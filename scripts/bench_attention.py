"""Times `pallas_flash.attention` beside the other attentions installed, after checking them all.

    python scripts/bench_attention.py --list                   # shapes, and which peers are here
    python scripts/bench_attention.py --shapes all --json results.jsonl
    python scripts/bench_attention.py --shapes 128-causal-16k --peers ours jax_cudnn --rounds 3
    python scripts/bench_attention.py --table results.jsonl    # Markdown
    python scripts/bench_attention.py --plot results.jsonl --out-dir docs/results

For each shape and pass every peer is first compared with our blocked algorithm in IEEE float32 on
the same inputs, by relative L2 error; a peer that is off gets no time. Then the peers take turns,
one measurement each a round, and our speed relative to a peer is the median over rounds.

A time is that of the device: the kernels of one call, casts and transposes included, as CUPTI
reports them, the median over calls that go round several sets of random normal inputs. If CUPTI is
refused, it is the slope between two lengths of a loop inside one program; PyTorch is timed by
events; a CPU by the host's clock. The backward is the pullback alone, its residuals arguments.

FLOPs: 4 B N T S D forward, half of it if causal, the pairs that see each other for windows and
documents; 2.5 times as much backward.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scripts.benchmark import overview
from scripts.benchmark.peers import OURS, PEERS, Attend, Shape, TorchAttend, short, trusted

DIRECTIONS = ("forward", "backward")
TOKENS, WIDTH = 16384, 2048  # B * T and N * D.
K = 1024


def _setting(case: str, T: int, D: int, *, N: int | None = None, K: int | None = None, **mask):
    heads = N or WIDTH // D
    return Shape(case, max(1, TOKENS // T), T, T, heads, K or heads, D, **mask)


def _shapes() -> Iterator[Shape]:
    lengths = (16 * K, 8 * K, 4 * K, 2 * K)
    for D in (128, 64, 256):
        for causal in (True, False):
            case = f"{D} {'causal' if causal else 'full'}"
            yield from (_setting(case, T, D, causal=causal) for T in lengths)
    yield from (_setting("gqa 128 causal", T, 128, N=64, K=8, causal=True) for T in lengths)
    for T in (16 * K, 32 * K):
        yield _setting("window 1024 gqa 64", T, 64, K=4, causal=True, window=1024)
    for T in (32 * K, 64 * K):
        yield _setting("documents 12", T, 128, causal=True, documents=12)
    for D in (128, 64):
        yield from (_setting(f"short {D} causal", T, D, causal=True) for T in (K, 512))
    # Few programs: one example; what one of 8 GPUs has of 64 heads; there a part of a long prompt.
    for T in (2 * K, K):
        yield Shape("gqa one example", 1, T, T, 32, 8, 128, causal=True)
    for T in (8 * K, 2 * K):
        yield Shape("gqa 8 of 64 heads", 1, T, T, 8, 1, 128, causal=True)
    yield Shape("512 queries gqa 8 of 64 heads", 1, 512, 32 * K, 8, 1, 128, passes=("forward",))
    # 2 GB of keys and values.
    for B, S in ((4, 128 * K), (64, 8 * K)):
        yield Shape("decode gqa 128", B, 1, S, 64, 8, 128, passes=("forward",))
    yield _setting("float32 64 causal", 4 * K, 64, causal=True, dtype="float32")
    yield _setting("float32 64 full", 4 * K, 64, dtype="float32")
    # For machines without a GPU.
    yield Shape("small", 2, 256, 256, 4, 2, 64, causal=True, dtype="float32")


# The most important first: --budget leaves out the end.
SHAPES = {shape.name: shape for shape in _shapes()}

# Relative L2 error that is allowed: four units in the last place of what is multiplied.
ALLOWED = {"bfloat16": 2**-6, "float16": 2**-9, "float32": 2**-8}  # float32: TF32


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, and of each of its kernels by name."""

    ms: float
    kernels: Mapping[str, float] = dataclasses.field(default_factory=dict)


# ------------------------------------------------------------------------------------------------
# Programs: a peer, a shape and a pass.


class JaxProgram:
    """An `Attend`, compiled for one pass over arguments that are loaded later.

    Attributes:
        compile_s: Seconds for tracing, lowering and compiling, the forward that makes the
            residuals of a backward included.
        memory: Bytes of the arguments, results and temporaries of the pass.
    """

    def __init__(self, shape: Shape, attend: Attend, direction: str):
        self.shape, self.attend, self.direction = shape, attend, direction
        self.compile_s: float = math.nan
        self.memory: dict[str, int] = {}

    def compile(self) -> None:
        """May run in any thread."""
        start = time.perf_counter()
        call, arrays = self.attend.call, dict(self.attend.arrays)
        q, k, v, do = jax.eval_shape(self._to_peer, *arguments(self.shape))
        if self.direction == "forward":
            self.function = lambda q, k, v, arrays: call(q, k, v, **arrays)
            inputs = q, k, v, arrays
        else:
            residuals, self.function = differentiate(call)
            lowered = jax.jit(residuals).lower(q, k, v, arrays)
            self.residuals = lowered.compile()
            inputs = do, lowered.out_info
        self.run = jax.jit(self.function).lower(*inputs).compile()
        self.compile_s = time.perf_counter() - start
        memory = self.run.memory_analysis()
        if memory is not None:
            self.memory = {
                kind: getattr(memory, f"{kind}_size_in_bytes")
                for kind in ("argument", "output", "temp")
            }

    def load(self, sets: Iterable[tuple[jax.Array, ...]]) -> None:
        """Makes the arguments of the pass from sets of q, k, v and do."""
        # Where one set is far larger than the cache, there is no need to rotate.
        several = self.memory.get("argument", 0) < 2e9
        self.sets = [self._arguments(*x) for x in itertools.islice(sets, None if several else 1)]
        self.turns = itertools.cycle(self.sets)

    def __call__(self) -> Any:
        """One call, on the next set."""
        return self.run(*next(self.turns))

    @functools.cached_property
    def loop(self) -> Callable:
        """(n, *arguments): n calls, each with an element of the results of the one before."""

        def loop(n, first, *rest):
            def body(_, first):
                out = jax.tree.leaves(self.function(first, *rest))
                element = sum(x.ravel()[0].astype(jnp.float32) for x in out)
                return first.at[(0,) * first.ndim].set(element.astype(first.dtype))

            return jax.lax.fori_loop(0, n, body, first)

        return jax.jit(loop)

    def results(self) -> dict[str, jax.Array]:
        """What the first set gives, in the common form."""
        out = self.run(*self.sets[0])
        named = by_name(self.direction, out)
        return {name: self.attend.from_peer(self.shape, name, x) for name, x in named.items()}

    def _to_peer(self, *arrays):
        names = ("q", "k", "v", "do")
        return [
            self.attend.to_peer(self.shape, name, x) for name, x in zip(names, arrays, strict=True)
        ]

    def _arguments(self, *arrays):
        q, k, v, do = self._to_peer(*arrays)
        rest = jax.tree.map(jnp.asarray, dict(self.attend.arrays))
        if self.direction == "forward":
            return q, k, v, rest
        return do, self.residuals(q, k, v, rest)


def by_name(direction: str, results: Any) -> dict[str, Any]:
    """o, or dq, dk and dv."""
    if direction == "forward":
        return {"o": results}
    return dict(zip(("dq", "dk", "dv"), results, strict=True))


def differentiate(call: Callable) -> tuple[Callable, Callable]:
    """(q, k, v, arrays) -> residuals, and (do, residuals) -> (dq, dk, dv), after the former."""
    tree = None

    def residuals(q, k, v, arrays):
        nonlocal tree
        _, pull = jax.vjp(lambda q, k, v: call(q, k, v, **arrays), q, k, v)
        leaves, tree = jax.tree.flatten(pull)
        return leaves

    def pull(do, leaves):
        return jax.tree.unflatten(tree, leaves)(do)

    return residuals, pull


class TorchProgram:
    """The same for a `TorchAttend`, which PyTorch compiles when it is first called."""

    def __init__(self, shape: Shape, attend: TorchAttend, direction: str):
        self.shape, self.attend, self.direction = shape, attend, direction
        self.compile_s: float = math.nan
        self.memory: dict[str, int] = {}

    def compile(self) -> None:
        """Waits for the arguments."""

    def load(self, sets: Iterable[tuple[jax.Array, ...]]) -> None:
        """Takes the first set, without a copy: the timer clears the cache between calls."""
        import torch

        start = time.perf_counter()
        arrays = jax.block_until_ready(next(iter(sets)))
        q, k, v, do = (torch.from_dlpack(x).transpose(1, 2) for x in arrays)
        if self.direction == "forward":
            self.run = torch.no_grad()(lambda: self.attend.call(q, k, v))
        else:
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            o = self.attend.call(*inputs)
            self.run = lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)
        self.run()
        torch.cuda.synchronize()
        self.compile_s = time.perf_counter() - start

    def __call__(self) -> Any:
        """One call."""
        return self.run()

    def results(self) -> dict[str, jax.Array]:
        """As those of `JaxProgram`."""
        import torch

        out = self.run()
        torch.cuda.synchronize()
        named = by_name(self.direction, out)
        return {
            name: jnp.from_dlpack(x.detach().transpose(1, 2).contiguous()).astype(jnp.float32)
            for name, x in named.items()
        }


Program = JaxProgram | TorchProgram


def arguments(shape: Shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of q, k, v and do in the common form."""
    s = shape
    q, k = ((s.B, s.T, s.N, s.D), (s.B, s.S, s.K, s.D))
    return tuple(jax.ShapeDtypeStruct(x, jnp.dtype(s.dtype)) for x in (q, k, k, q))


@functools.partial(jax.jit, static_argnums=0)
def draw(shape: Shape, seed) -> list[jax.Array]:
    """Random normal q, k, v and do."""
    keys = jax.random.split(jax.random.key(seed), 4)
    return [
        jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype)
        for key, x in zip(keys, arguments(shape), strict=True)
    ]


# ------------------------------------------------------------------------------------------------
# Gate and timers.


def errors(results: Mapping[str, jax.Array], right: Mapping[str, jax.Array]) -> dict[str, float]:
    """Relative L2 error of each result."""
    return {name: float(_relative_l2(results[name], right[name])) for name in right}


@jax.jit
def _relative_l2(a, b):
    return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())


def is_red(found: Mapping[str, float], dtype: str) -> bool:
    """Whether an error is too large, or not a number."""
    return not all(error <= ALLOWED[dtype] for error in found.values())


def host_timer(program: Program, iterations: int) -> Timing:
    """By the host's clock, the median of a few calls: for devices that do not queue."""
    jax.block_until_ready(program())
    seconds = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready(program())
        seconds.append(time.perf_counter() - start)
    return Timing(statistics.median(seconds) * 1e3)


class _Jitted:
    """What `profiler.measure` takes for a jitted function: a call of a program on its next set."""

    def __init__(self, program: JaxProgram):
        self.program = program

    def __call__(self):
        return self.program()

    lower = trace = eval_shape = __call__


def cupti_timer(program: JaxProgram, iterations: int) -> Timing:
    """By CUPTI: all kernels of a call, summed; the median over calls."""
    from jax.experimental.mosaic.gpu import profiler

    iterations = max(2, iterations)
    measured = profiler.Cupti(finalize=False).measure(
        _Jitted(program), aggregate=False, iterations=iterations
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
    """From two lengths of the program's loop."""

    def seconds(n):
        start = time.perf_counter()
        jax.block_until_ready(program.loop(n, *program.sets[0]))
        return time.perf_counter() - start

    seconds(1)
    return Timing((seconds(2 * iterations) - seconds(iterations)) / iterations * 1e3)


def event_timer(program: TorchProgram, iterations: int) -> Timing:
    """By CUDA events, with the cache cleared before each call; the median over calls."""
    import triton.testing

    return Timing(triton.testing.do_bench(program, warmup=5, rep=40, return_mode="median"))


class Timers:
    """Which timer is for which program, and what to do for a program that CUPTI refuses."""

    def __init__(self, platform: str):
        self.on_gpu = platform == "gpu"
        self.refused: dict[Program, str] = {}

    def name(self, program: Program) -> str:
        """What is written down."""
        if isinstance(program, TorchProgram):
            return "events"
        if not self.on_gpu:
            return "host"
        return "slope" if program in self.refused else "cupti"

    def __call__(self, program: Program, iterations: int) -> Timing:
        """Times one program."""
        if self.name(program) == "cupti":
            try:
                return cupti_timer(program, iterations)
            except jax.errors.JaxRuntimeError:
                raise
            except (RuntimeError, ImportError) as error:
                self.refused[program] = _sentence(error)
                print(f"CUPTI: {self.refused[program]}; taking slopes", file=sys.stderr)
        timers = {"events": event_timer, "host": host_timer, "slope": slope_timer}
        return timers[self.name(program)](program, iterations)


def take_turns(
    rounds: int, measurements: Mapping[str, Callable[[], Timing]]
) -> dict[str, list[Timing]]:
    """One measurement of each in each round."""
    times: dict[str, list[Timing]] = {name: [] for name in measurements}
    for _ in range(rounds):
        for name, measure in measurements.items():
            times[name].append(measure())
    return times


# ------------------------------------------------------------------------------------------------
# The run.


class Clocks:
    """What nvidia-smi says of the GPU while peers take turns; it only asks."""

    QUERY = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")

    def __init__(self):
        self.samples: list[list[float]] = []
        try:
            self.process = subprocess.Popen(
                [
                    "nvidia-smi",
                    "--id=0",
                    f"--query-gpu={','.join(self.QUERY)}",
                    "--format=csv,noheader,nounits",
                    "--loop-ms=100",
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
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
        """Medians since the last call."""
        samples, self.samples = self.samples, []
        if not samples:
            return None
        columns = zip(*samples, strict=True)
        return dict(zip(self.QUERY, map(statistics.median, columns), strict=True))

    def close(self):
        """Ends nvidia-smi."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


def surroundings(commit: str | None) -> dict[str, Any]:
    """Device, versions, commit and date, the same for all lines of a run."""
    device = jax.devices()[0]
    driver = _output("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader")
    packages = ("jax", "jaxlib", "torch", "triton", "tokamax", "jax-triton")
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if commit is None and (commit := _output("git", "rev-parse", "--short", "HEAD")):
        commit += "-dirty" if _output("git", "status", "--porcelain") else ""
    return {
        "device": device.device_kind,
        "driver": driver,
        "versions": versions,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _output(*command: str) -> str | None:
    try:
        root = pathlib.Path(__file__).parents[1]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _sentence(error: BaseException) -> str:
    """The first line of an error, with its type unless that says it all."""
    text = (str(error).strip().splitlines() or [""])[0][:200]
    kind = type(error).__name__
    return text if kind == "Unserved" else f"{kind}: {text}"


def build(shape: Shape, name: str, direction: str) -> Program | str:
    """The program of a peer, not compiled, or why there is none."""
    try:
        attend = PEERS[name].build(shape, direction)
    except ImportError as error:
        install = PEERS[name].install
        return _sentence(error) + (f": {install}" if install else "")
    except Exception as error:  # Whatever a peer raises is its reason.
        return _sentence(error)
    return (JaxProgram if isinstance(attend, Attend) else TorchProgram)(shape, attend, direction)


def compile_all(programs: Mapping[Any, Program | str]) -> dict[Any, Program | str]:
    """Compiles in threads, for XLA releases the lock; what fails becomes its reason."""

    def compiled(program):
        if isinstance(program, str):
            return program
        try:
            program.compile()
        except Exception as error:  # Compilers raise what they like, and the others go on.
            return _sentence(error)
        return program

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(programs, pool.map(compiled, programs.values()), strict=True))


class Bench:
    """Runs shapes and emits a record for each shape, pass and peer.

    Args:
        rounds: Measurements of each peer.
        iterations: Calls in a measurement.
        emit: Receives each record at once.
    """

    def __init__(
        self,
        peers: Sequence[str],
        directions: Sequence[str],
        *,
        rounds: int,
        iterations: int,
        emit: Callable[[dict[str, Any]], None],
        timer: Callable[[Program, int], Timing] | None = None,
    ):
        self.peers, self.directions = list(peers), directions
        self.rounds, self.iterations, self.emit = rounds, iterations, emit
        self.timer = timer or Timers(jax.devices()[0].platform)

    def run(self, shapes: Iterable[Shape], deadline: float, clocks: Clocks) -> list[str]:
        """Measures shapes until the deadline; returns the names of those left out."""
        left_out = []
        for _, group in itertools.groupby(shapes, key=lambda shape: shape.case):
            group = list(group)
            compiled = {}
            if time.monotonic() < deadline:
                compiled = compile_all(
                    {
                        (shape, direction, name): JaxProgram(shape, trusted(shape), direction)
                        if name is None
                        else build(shape, name, direction)
                        for shape in group
                        for direction in self.directions
                        if direction in shape.passes
                        for name in (None, *self.peers)
                    }
                )
            for shape in group:
                if time.monotonic() >= deadline:
                    left_out.append(shape.name)
                    continue
                for direction in self.directions:
                    if direction in shape.passes:
                        programs = {
                            name: compiled.pop((shape, direction, name))
                            for name in (None, *self.peers)
                        }
                        self._measure(shape, direction, programs, clocks)
        return left_out

    def _measure(self, shape, direction, programs, clocks):
        sets = [draw(shape, seed) for seed in range(4)]
        reference = programs.pop(None)
        if isinstance(reference, str):
            raise RuntimeError(f"No trusted result for {shape.name}: {reference}")
        reference.load(sets[:1])
        right = reference.results()
        del reference

        ready, found, calls = {}, {}, {}
        for name, program in programs.items():
            record = self._record(shape, direction, name)
            if isinstance(program, str):
                self.emit({**record, "unserved": program})
                continue
            try:
                program.load(sets)
                found[name] = errors(program.results(), right)
                # No more calls in a measurement than about 30 ms hold, but two.
                once = self.timer(program, 2).ms
                calls[name] = max(2, min(self.iterations, int(30 / once)))
            except Exception as error:  # However a peer fails on the device, the others go on.
                self.emit({**record, "unserved": _sentence(error)})
                continue
            if is_red(found[name], shape.dtype):
                self.emit({**record, "red": found[name], "allowed": ALLOWED[shape.dtype]})
            else:
                ready[name] = program
        del right
        clocks.take()
        times = take_turns(
            self.rounds,
            {
                name: functools.partial(self.timer, program, calls[name])
                for name, program in ready.items()
            },
        )
        seen = clocks.take()
        for name, program in ready.items():
            record = self._record(shape, direction, name)
            record |= summary(times[name], times.get(OURS), shape, direction)
            record |= {"errors": found[name], "compile_s": program.compile_s}
            record |= {"memory": program.memory, "clocks": seen}
            if isinstance(self.timer, Timers):
                record["timer"] = self.timer.name(program)
            self.emit(record)

    @staticmethod
    def _record(shape, direction, name):
        problem = dataclasses.asdict(shape)
        del problem["passes"]
        return {
            "shape": shape.name,
            **problem,
            "pass": direction,
            "peer": name,
            "peer_version": PEERS[name].version,
        }


def summary(
    times: Sequence[Timing], ours: Sequence[Timing] | None, shape: Shape, direction: str
) -> dict[str, Any]:
    """The numbers of one peer, and how many times as fast ours is, round by round."""
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
        numbers["ratio"] = spread([a.ms / b.ms for a, b in zip(times, ours, strict=True)])
    return numbers


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def line(record: Mapping[str, Any]) -> str:
    """A record for people."""
    start = f"{record['shape']:26} {record['pass']:8} {record['peer']:16}"
    if "unserved" in record:
        return f"{start} not served: {record['unserved']}"
    if "red" in record:
        wrong = ", ".join(f"{name} {error:.1e}" for name, error in record["red"].items())
        return f"{start} WRONG, not timed: {wrong} (allowed {record['allowed']:.1e})"
    text = f"{start} {record['ms']['median']:9.3f} ms {record['tflops']:7.1f} TFLOP/s"
    if record["T"] == 1:
        text += f" {record['tb_per_s']:5.2f} TB/s"
    text += f"  error {max(record['errors'].values()):.1e}"
    if "ratio" in record and record["peer"] != OURS:
        text += "  ours {median:5.2f}x ({min:.2f}..{max:.2f})".format(**record["ratio"])
    return text


# ------------------------------------------------------------------------------------------------
# Reports.


def load(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The records of a file; a later one replaces an earlier one of the same measurement."""
    records = map(json.loads, pathlib.Path(path).read_text().splitlines())
    return list({(r["shape"], r["pass"], r["peer"]): r for r in records}.values())


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each pass and case, with our speed and the ratios to the peers.

    Ours at the longest T; a ratio is the geometric mean over T of how many times as fast ours is,
    with the worst T in brackets.
    """
    timed = [r for r in records if "ms" in r]
    peers = [name for name in PEERS if any(r["peer"] == name for r in timed) and name != OURS]
    lines = [
        "| | T | ours, TFLOP/s at the longest |" + "".join(f" / {name} |" for name in peers),
        "|---" * (3 + len(peers)) + "|",
    ]
    for direction in DIRECTIONS:
        for case in dict.fromkeys(r["case"] for r in timed):
            row = [r for r in timed if r["pass"] == direction and r["case"] == case]
            ours = sorted((r for r in row if r["peer"] == OURS), key=lambda r: r["S"])
            if not ours:
                continue
            lengths = ", ".join(short(r["S"]) for r in ours)
            speed = f"{ours[-1]['tflops']:.0f}"
            if ours[-1]["T"] == 1:
                speed = f"{ours[-1]['tb_per_s']:.2f} TB/s"
            cells = [
                _ratio_cell({r["S"]: r["ratio"]["median"] for r in row if r["peer"] == name})
                for name in peers
            ]
            lines.append(f"| {direction} {case} | {lengths} | {speed} |" + "".join(cells))
    return "\n".join(lines)


def _ratio_cell(ratios: Mapping[int, float]) -> str:
    if not ratios:
        return " |"
    mean = statistics.geometric_mean(ratios.values())
    worst = min(ratios, key=lambda length: ratios[length])
    if len(ratios) == 1:
        return f" {mean:.2f} |"
    return f" {mean:.2f} ({ratios[worst]:.2f} at {short(worst)}) |"


def plot(records: Sequence[Mapping[str, Any]], folder: pathlib.Path) -> list[pathlib.Path]:
    """Bars for each pass and case, how speed goes with T, and an overview; returns the files."""
    from matplotlib.figure import Figure

    timed = [r for r in records if "ms" in r]
    folder.mkdir(parents=True, exist_ok=True)
    peers = [name for name in PEERS if any(r["peer"] == name for r in timed)]
    colours = {name: f"C{n}" if n < 10 else f"C{n - 10}" for n, name in enumerate(peers)}
    colours[OURS] = "black"
    subtitle = f"{timed[0]['device']}, {timed[0]['date'][:10]}"
    files = []

    def save(figure, name):
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150, bbox_inches="tight")

    for direction in DIRECTIONS:
        here = [r for r in timed if r["pass"] == direction]
        cases = list(dict.fromkeys(r["case"] for r in here))
        for case in cases:
            speed = {(r["peer"], r["S"]): r["tflops"] for r in here if r["case"] == case}
            lengths = sorted({length for _, length in speed})
            present = [name for name in peers if any(peer == name for peer, _ in speed)]
            figure = Figure(figsize=(2 + 1.6 * len(lengths), 3.2))
            axes = figure.add_subplot()
            width = 0.8 / len(present)
            for n, name in enumerate(present):
                places = [i - 0.4 + (n + 0.5) * width for i in range(len(lengths))]
                heights = [speed.get((name, length), 0) for length in lengths]
                axes.bar(places, heights, width * 0.9, label=name, color=colours[name])
            axes.set_xticks(range(len(lengths)), [short(length) for length in lengths])
            _finish(axes, f"{direction} {case}\n{subtitle}", "S" if here[0]["T"] == 1 else "T")
            axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
            save(figure, f"{direction}-{case.replace(' ', '-')}")
        scaled = [case for case in cases if len({r["S"] for r in here if r["case"] == case}) > 1]
        if not scaled:
            continue
        columns = min(3, len(scaled))
        rows = -(-len(scaled) // columns)
        figure = Figure(figsize=(3.6 * columns, 2.8 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in grid[len(scaled) :]:
            axes.remove()
        for axes, case in zip(grid, scaled, strict=False):
            for name in peers:
                points = sorted(
                    (r["S"], r["tflops"]) for r in here if (r["case"], r["peer"]) == (case, name)
                )
                if points:
                    axes.plot(*zip(*points, strict=True), ".-", label=name, color=colours[name])
            axes.set_xscale("log", base=2)
            ticks = sorted({r["S"] for r in here if r["case"] == case})
            axes.set_xticks(ticks, [short(length) for length in ticks])
            _finish(axes, case, "length")
        handles = {h.get_label(): h for axes in grid[: len(scaled)] for h in axes.lines}
        figure.legend(handles.values(), handles, loc="outside right upper", frameon=False)
        figure.suptitle(f"{direction}, {subtitle}")
        save(figure, f"{direction}-scaling")
    if overview.save(timed, folder / "overview.png"):
        files.append(folder / "overview.png")
    return files


def _finish(axes, title, below):
    axes.set_title(title, fontsize="medium", loc="left")
    axes.set_xlabel(below)
    axes.set_ylabel("TFLOP/s")
    axes.set_ylim(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


# ------------------------------------------------------------------------------------------------


def _parser(shapes: Mapping[str, Shape]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", metavar="NAME", default=["all"], help="see --list; a case or all")
    add("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME", help="see --list")
    add("--passes", choices=(*DIRECTIONS, "both"), default="both")
    add("--rounds", type=int, default=5, help="measurements of each peer")
    add("--iterations", type=int, default=8, help="calls in a measurement")
    add("--quick", action="store_true", help="two rounds, and one length of each case")
    add("--budget", type=float, default=math.inf, metavar="SECONDS", help="then start no shape")
    add("--json", type=pathlib.Path, metavar="FILE", help="append a line for each measurement")
    add("--commit", help="what to write down as the commit, if git cannot tell")
    add("--list", action="store_true", help="print shapes and peers")
    add("--table", type=pathlib.Path, metavar="FILE", help="print Markdown from --json's file")
    add("--plot", type=pathlib.Path, metavar="FILE", help="plot --json's file")
    add("--out-dir", type=pathlib.Path, default=pathlib.Path("docs/results"))
    return parser


def main(argv: Sequence[str] | None = None, shapes: Mapping[str, Shape] = SHAPES) -> None:
    """The command line; `shapes` are those that can be named."""
    start = time.monotonic()
    parser = _parser(shapes)
    options = parser.parse_args(argv)
    if file := options.table or options.plot:
        records = [r for r in load(file) if r["peer"] in (OURS, *options.peers)]
        if options.table:
            print(table(records))
        else:
            print(*plot(records, options.out_dir), sep="\n")
        return
    if options.list:
        for shape in shapes.values():
            print(f"{shape.name:26} {shape}")
        for name, peer in PEERS.items():
            print(f"{name:16} {peer.package} {peer.version or 'not installed'}")
        return
    chosen = []
    for name in options.shapes:
        slug = name.replace(" ", "-")
        named = [s for s in shapes.values() if slug in ("all", s.name, s.case.replace(" ", "-"))]
        if not named:
            parser.error(f"`--shapes` must be names that --list prints; got {name!r}.")
        chosen += named
    chosen = list(dict.fromkeys(chosen))
    rounds = options.rounds
    if options.quick:
        rounds = 2
        chosen = list({s.case: s for s in reversed(chosen)}.values())[::-1]

    # PyTorch, in the same process, wants memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    about = surroundings(options.commit)
    print(json.dumps(about), flush=True)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(options.json.open("a")) if options.json else None
        clocks = Clocks()
        seconds: dict[str, float] = collections.Counter()
        stack.callback(clocks.close)

        def emit(record):
            print(line(record), flush=True)
            seconds[record["peer"]] += record.get("compile_s", 0)
            if file is not None:
                file.write(json.dumps({**record, **about}) + "\n")
                file.flush()

        directions = DIRECTIONS if options.passes == "both" else (options.passes,)
        bench = Bench(
            options.peers, directions, rounds=rounds, iterations=options.iterations, emit=emit
        )
        left_out = bench.run(chosen, start + options.budget, clocks)
    compiling = ", ".join(f"{name} {s:.0f}" for name, s in seconds.items() if s)
    print(f"{time.monotonic() - start:.0f} s; seconds of compiling, in parallel: {compiling}")
    if left_out:
        print(f"left out after {options.budget:.0f} s: {' '.join(left_out)}")


if __name__ == "__main__":
    main()
