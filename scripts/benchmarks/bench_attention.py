"""Times `pallas_flash.attention` beside the other attentions installed, after checking them all.

    python scripts/benchmarks/bench_attention.py --length 4096 --heads 32 --causal   # your shape
    python scripts/benchmarks/bench_attention.py --list                # named shapes, and peers
    python scripts/benchmarks/bench_attention.py --shapes all --json results.jsonl
    python scripts/benchmarks/bench_attention.py --shapes 128-causal-16k --peers ours --sustained 1
    python scripts/benchmarks/bench_attention.py --table results.jsonl # Markdown
    python scripts/benchmarks/bench_attention.py --plot results.jsonl --out-dir docs/results

For each shape and pass, every peer is first compared with our blocked algorithm in IEEE float32 on
the same inputs, by relative L2 error. A peer with too large an error gets no time. Then the peers
take turns, one measurement each in a round. Our speed relative to a peer is the median over rounds.

These measurements are bursts of 30 ms. `--sustained SECONDS` heats the card up, as training does:
each peer first runs alone for that time, and again that long in its turns of all rounds together.
The record of a turn has the clock and the power of the GPU.

A time is device time: the kernels of one call, casts and transposes included, by CUPTI, the median
over calls on several sets of random normal inputs. Without CUPTI, it is the slope between two
lengths of a loop inside one program. PyTorch is timed by events, a CPU by the host's clock. The
backward is the pullback alone, with residuals as arguments.

FLOPs: 2 B N T S (D + V) forward; half of it if causal; by allowed pairs for windows, packed
sequences, lengths and mask arrays; 2.5 times as much backward.

This file is the command line. Its parts are in `benchmark/`: `shapes.py`, `peers.py`, `programs.py`
(compile and check), `timers.py`, `run.py` (the order of a run), `recording.py` and `report.py`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from scripts.benchmarks.peers import OURS, PEERS, VARIANTS
from scripts.benchmarks.programs import ALLOWED
from scripts.benchmarks.recording import add_flags, recording
from scripts.benchmarks.report import line, load, plot, table
from scripts.benchmarks.run import Bench
from scripts.benchmarks.shapes import DIRECTIONS, FLAGS_OF_OPTIONS, SHAPES, Shape, shape_of
from scripts.benchmarks.timers import Clocks
from scripts.command import (
    Parser,
    UserError,
    command,
    parse_path,
    parse_positive,
    parse_rate,
    parse_seconds,
    parse_size,
)

# Flags of a shape: what follows a flag, its default, and its help.
_SHAPE: dict[str, tuple[Any, Any, str]] = {
    "batch": (parse_size, 1, "sequences"),
    "length": (parse_size, 4096, "queries of a sequence"),
    "key-length": (parse_size, None, "keys of a sequence (default: as many as queries)"),
    "heads": (parse_size, 16, "query heads"),
    "kv-heads": (parse_size, None, "key/value heads (default: as many as query heads)"),
    "head-dim": (parse_size, 128, "head dim of queries and keys"),
    "value-dim": (parse_size, None, "head dim of values (default: as of keys)"),
    "dtype": (tuple(ALLOWED), "bfloat16", "dtype of q, k and v"),
    "causal": (bool, False, "a query sees the keys up to itself"),
    "window": (parse_size, None, "a query sees this many keys, itself the last; implies --causal"),
    "segments": (parse_size, None, "packed sequences, of random lengths"),
    "lengths": (bool, False, "a valid length for each sequence, random from a quarter on"),
}
# At most one of these.
_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "soft-cap": (parse_positive, None, "scores become X tanh(s / X)"),
    "dropout": (parse_rate, None, "probability with which a weight is dropped"),
    "bias": (bool, False, "a number for each head and pair, in --dtype; without its gradient"),
    "sinks": (bool, False, "a logit for each head in the denominator, with its gradient"),
    "alibi": (bool, False, "a slope for each head"),
}
_METAVARS = {parse_size: "INT", parse_positive: "X", parse_rate: "RATE"}


def _add_shape_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "a shape of your own",
        "Any of these flags gives one; named shapes are then timed only if --shapes names them.",
    )
    options = group.add_mutually_exclusive_group()
    for where, flags in ((group, _SHAPE), (options, _OPTIONS)):
        for name, (kind, default, text) in flags.items():
            how: dict[str, Any] = {"type": kind, "metavar": _METAVARS.get(kind)}
            if kind is bool:
                how = {"action": "store_true"}
            elif isinstance(kind, tuple):
                how = {"choices": kind}
            text += "" if default in (None, False) else f" (default: {default})"
            where.add_argument(f"--{name}", default=argparse.SUPPRESS, help=text, **how)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    _add_shape_flags(parser)
    add = parser.add_argument_group("what is timed, and how").add_argument
    add("--shapes", nargs="+", metavar="NAME", help="shapes or cases of --list (default: all)")
    add(
        "--peers",
        nargs="+",
        choices=PEERS,
        metavar="NAME",
        default=[name for name in PEERS if name not in VARIANTS],
        help="names of --list (default: all but ours_invariant and ours_reproducible)",
    )
    add("--passes", choices=(*DIRECTIONS, "both"), default="both", help="passes to time")
    add("--rounds", type=parse_size, metavar="INT", default=5, help="measurements of each peer")
    add("--iterations", type=parse_size, metavar="INT", default=8, help="most calls of a burst")
    add(
        "--sustained",
        type=parse_seconds,
        metavar="SECONDS",
        help="run each peer alone for this long, and again in its turns (default: bursts of 30 ms)",
    )
    add("--quick", action="store_true", help="two rounds, and one length of each case")
    add(
        "--budget",
        type=parse_seconds,
        metavar="SECONDS",
        help="begin no further shape after this time, and say which are left out (default: none)",
    )
    add_flags(parser)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--list", action="store_true", help="print shapes and peers, and end")
    add("--table", type=parse_path, metavar="FILE", help="print Markdown from --json's file")
    add("--plot", type=parse_path, metavar="FILE", help="draw figures from --json's file")
    add = parser.add_argument
    add(
        "--out-dir",
        type=parse_path,
        metavar="FOLDER",
        default=pathlib.Path("docs/results"),
        help="folder of the figures of --plot",
    )
    return parser


@command
def main(argv: Sequence[str] | None = None, shapes: Mapping[str, Shape] = SHAPES) -> None:
    """Run the command line; `shapes` are the shapes that it can name."""
    start = time.monotonic()
    options = _parser().parse_args(argv)
    if options.list:
        for shape in shapes.values():
            print(f"{shape.name:36} {shape}")
        for name, peer in PEERS.items():
            print(f"{name:16} {peer.package} {peer.version or 'not installed'}")
        return
    if file := options.table or options.plot:
        records = [r for r in load(file) if r["implementation"] in (OURS, *options.peers)]
        if options.table:
            print(table(records))
        else:
            print(*plot(records, options.out_dir), sep="\n")
        return
    chosen = _chosen(options, shapes)
    rounds = options.rounds
    if options.quick:
        rounds = 2
        chosen = list({s.case: s for s in reversed(chosen)}.values())[::-1]

    # PyTorch, in the same process, needs memory, too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    seconds: dict[str, float] = collections.defaultdict(float)
    with contextlib.ExitStack() as stack:
        about, append = stack.enter_context(recording(options.json, options.commit))
        print(json.dumps(about), flush=True)
        peers = _installed(options.peers)
        if jax.default_backend() == "cpu":
            print("On a CPU all times are of XLA's programs, and say nothing about GPU kernels.")
        clocks = Clocks()
        stack.callback(clocks.close)

        def emit(record):
            # The file comes first, because the reader of the output may stop.
            append(record)
            print(line(record), flush=True)
            seconds[record["implementation"]] += record.get("compile_s", 0)

        bench = Bench(
            peers,
            DIRECTIONS if options.passes == "both" else (options.passes,),
            rounds=rounds,
            iterations=options.iterations,
            sustained=options.sustained,
            emit=emit,
        )
        left_out = bench.run(chosen, start + (options.budget or math.inf), clocks)
    compiling = ", ".join(f"{name} {s:.0f}" for name, s in seconds.items() if s)
    print(f"{time.monotonic() - start:.0f} s; seconds of compiling, in parallel: {compiling}")
    if left_out:
        print(f"left out after {options.budget:.0f} s: {' '.join(left_out)}")


def _installed(names: Sequence[str]) -> list[str]:
    """Return the peers that are installed, and print the others with what installs them."""
    absent: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        if PEERS[name].version is None:
            absent.setdefault(PEERS[name].install or "", []).append(name)
    if absent:
        words = (f"{', '.join(peers)} ({install})" for install, peers in absent.items())
        print(f"not installed: {'; '.join(words)}", flush=True)
    installed = [name for name in dict.fromkeys(names) if PEERS[name].version is not None]
    if not installed:
        raise UserError(f"--peers must have one that is installed; got {' '.join(names)}.")
    return installed


def _chosen(options: argparse.Namespace, shapes: Mapping[str, Shape]) -> list[Shape]:
    chosen = []
    flags = {name.replace("-", "_"): row[1] for name, row in _SHAPE.items()}
    given = {name: x for name, x in vars(options).items() if name in flags | FLAGS_OF_OPTIONS}
    if given:
        chosen.append(shape_of(**flags | given))
    for name in options.shapes or ([] if given else ["all"]):
        slug = name.replace(" ", "-")
        named = [s for s in shapes.values() if slug in ("all", s.name, s.case.replace(" ", "-"))]
        if not named:
            raise UserError(f"--shapes must be names that --list prints; got {name!r}.")
        chosen += named
    return list(dict.fromkeys(chosen))


if __name__ == "__main__":
    main()
