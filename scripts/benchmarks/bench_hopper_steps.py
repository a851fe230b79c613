"""Times the steps of docs/hopper-steps.md beside the shipped forward.

    python scripts/benchmarks/bench_hopper_steps.py --json docs/results/h200-hopper-steps.jsonl
    python scripts/maintenance/make_tables.py        # writes the times into the page

A kernel with a wrong barrier hangs. So each step has a process of its own, which is killed after
--patience, and the others go on. Such a process is `bench_attention.py` with two peers, the step
and the shipped kernel: both are compared with attention in IEEE float32, on the sizes that are
timed, and then take turns under sustained load. Inputs are normal with deviation 1.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

from scripts.benchmarks import bench_attention
from scripts.benchmarks.peers import OURS, PEERS, Attend, Peer, Unserved
from scripts.benchmarks.recording import add_flags
from scripts.benchmarks.shapes import SHAPES, Shape
from scripts.command import Parser, UserError, command, parse_seconds

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "hopper_steps"
STEPS = sorted(path.stem for path in FOLDER.glob("step[0-9]_*.py"))
FIRST_CAUSAL = STEPS.index("step6_causal")
TIMED = "128-full-16k", "128-causal-16k"


def _build(step: str, shape: Shape, direction: str) -> Attend:
    """Return a step as a peer of the benchmark."""
    if shape.causal and STEPS.index(step) < FIRST_CAUSAL:
        raise Unserved("has no mask")
    attention = importlib.import_module(step).attention
    return Attend(functools.partial(attention, is_causal=True) if shape.causal else attention)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--steps", nargs="+", choices=STEPS, metavar="NAME", default=STEPS, help="steps to time")
    add("--step", choices=STEPS, metavar="NAME", help="time this one alone, in this process")
    add(
        "--patience",
        type=parse_seconds,
        metavar="SECONDS",
        default=300.0,
        help="kill the process of a step after this time",
    )
    add(
        "--sustained",
        type=parse_seconds,
        metavar="SECONDS",
        default=1.0,
        help="run each kernel alone for this long, and again in its turns",
    )
    add_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None, shapes: Mapping[str, Shape] = SHAPES) -> None:
    """Run the command line; `shapes` has the two shapes that are timed."""
    options = _parser().parse_args(argv)
    more = [f"--sustained={options.sustained}"]
    more += [f"--json={options.json}"] if options.json else []
    more += [f"--commit={options.commit}"] if options.commit else []
    if options.step:
        sys.path.insert(0, str(FOLDER))
        PEERS[options.step] = Peer("pallas-flash", functools.partial(_build, options.step))
        peers = "--passes", "forward", "--peers", OURS, options.step
        bench_attention.main([*peers, *more, "--shapes", *TIMED], shapes)
        return
    failed = []
    for step in options.steps:
        print(f"\n{step}", flush=True)
        command_line = [sys.executable, __file__, "--step", step, *more]
        try:
            subprocess.run(command_line, timeout=options.patience, check=True)
        except subprocess.TimeoutExpired:
            failed.append(f"{step} had not ended after {options.patience:g} s")
        except subprocess.CalledProcessError as error:
            failed.append(f"{step} ended with {error.returncode}")
    if failed:
        raise UserError(f"All steps must end with their times; {', '.join(failed)}.")


if __name__ == "__main__":
    main()
