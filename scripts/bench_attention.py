"""Times `pallas_flash.attention` beside the other attentions installed, after checking them all.

    python scripts/bench_attention.py --list                   # shapes, and which peers are here
    python scripts/bench_attention.py --shapes all --json results.jsonl
    python scripts/bench_attention.py --shapes 128-causal-16k --peers ours jax_cudnn --sustained 1
    python scripts/bench_attention.py --table results.jsonl    # Markdown
    python scripts/bench_attention.py --plot results.jsonl --out-dir docs/results

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
(compile and check), `timers.py`, `run.py` (the order of a run) and `report.py`.
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
from typing import TextIO

from scripts.benchmark.peers import OURS, PEERS
from scripts.benchmark.report import line, load, plot, table
from scripts.benchmark.results import dump
from scripts.benchmark.run import Bench, surroundings
from scripts.benchmark.shapes import DIRECTIONS, SHAPES, Shape
from scripts.benchmark.timers import Clocks
from scripts.command import UserError, command, parse_path, parse_seconds, parse_size, why


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", metavar="NAME", default=["all"], help="see --list; a case or all")
    add("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME", help="see --list")
    add("--passes", choices=(*DIRECTIONS, "both"), default="both")
    add("--rounds", type=parse_size, default=5, help="measurements of each peer")
    add("--iterations", type=parse_size, default=8, help="calls in a burst, at most")
    add("--sustained", type=parse_seconds, metavar="SECONDS", help="see above")
    add("--quick", action="store_true", help="two rounds, and one length of each case")
    add("--budget", type=parse_seconds, metavar="SECONDS", help="then start no shape")
    add("--json", type=parse_path, metavar="FILE", help="append a line for each measurement")
    add("--commit", help="what to write down as the commit, if git cannot tell")
    add("--out-dir", type=parse_path, default=pathlib.Path("docs/results"), help="of --plot")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--list", action="store_true", help="print shapes and peers")
    add("--table", type=parse_path, metavar="FILE", help="print Markdown from --json's file")
    add("--plot", type=parse_path, metavar="FILE", help="plot --json's file")
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
    chosen = _chosen(options.shapes, shapes)
    rounds = options.rounds
    if options.quick:
        rounds = 2
        chosen = list({s.case: s for s in reversed(chosen)}.values())[::-1]

    # PyTorch, in the same process, needs memory, too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    about = surroundings(options.commit)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_appended(options.json)) if options.json else None
        print(json.dumps(about), flush=True)
        clocks = Clocks()
        seconds: dict[str, float] = collections.Counter()
        stack.callback(clocks.close)

        def emit(record):
            # The file comes first, because the reader of the output may stop.
            if file is not None:
                file.write(dump({**record, **about}))
                file.flush()
            print(line(record), flush=True)
            seconds[record["implementation"]] += record.get("compile_s", 0)

        bench = Bench(
            list(dict.fromkeys(options.peers)),
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


def _chosen(names: Sequence[str], shapes: Mapping[str, Shape]) -> list[Shape]:
    chosen = []
    for name in names:
        slug = name.replace(" ", "-")
        named = [s for s in shapes.values() if slug in ("all", s.name, s.case.replace(" ", "-"))]
        if not named:
            raise UserError(f"--shapes must be names that --list prints; got {name!r}.")
        chosen += named
    return list(dict.fromkeys(chosen))


def _appended(path: pathlib.Path) -> TextIO:
    """Open a file of results, or a new one, at its end."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("no regular file")
        if path.exists():
            load(path)
        file = path.open("a+")
        # The last line may lack its end.
        file.seek(0)
        if (text := file.read()) and not text.endswith("\n"):
            file.write("\n")
        return file
    except OSError as error:
        raise UserError(
            f"--json must be a file that can be written; got {path}: {why(error)}."
        ) from error


if __name__ == "__main__":
    main()
