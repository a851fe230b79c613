"""Shows the machine code of the package's kernels, on a machine that has no GPU.

XLA's own CUDA compiler runs against a description of the GPU, so that registers, spills and
instructions are as this JAX and this ptxas make them for the card. They say nothing about time:
they reject bad kernels and keep good ones from getting worse.

The package's kernels as a table, and the changes since an earlier run:

    pip install -e '.[inspect]'
    python scripts/maintenance/inspect_kernels.py --masks full causal --json before.json
    python scripts/maintenance/inspect_kernels.py --masks full causal --against before.json
    python scripts/maintenance/inspect_kernels.py --implementation mosaic --masks full causal

Any function that calls Pallas kernels, from the root of the checkout:

    from scripts.maintenance.inspect_kernels import show
    show(lambda q, k, v: my_kernel(q, k, v), *["bf16[2,4096,8,128]"] * 3, target="h200")

The columns of the table:

    tile         rows x columns of the tile of scores, in Mosaic GPU of one warpgroup
    regs         registers of a thread
    stack        bytes of a thread's frame; not zero with spills or indexed local arrays
    shared       bytes of a CTA, static and dynamic
    CTAs         CTAs that fit on one SM
    insn         instructions that one warp issues for one full block (see `Loop`)
    /elem        insn x warps x 32 / elements of the tile, in Mosaic GPU of four warps
    matrix       matrix instructions among insn
    work         matrix operations issued / needed; 2.0: two groups of warps compute the same
    spills       local memory instructions in each loop, the loop over full blocks first
    hidden       part of the exponentials issued while a Hopper matrix instruction is in flight

Below each row stands the order of instructions in the loop over full blocks: `wait(n)` leaves n
groups of matrix instructions in flight, `copied(n)` n groups of copies; `stage` writes registers to
shared memory. UNSET is an error of ptxas: an instruction reads a register that no instruction sets.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from scripts.command import Parser, UserError, command, parse_path, parse_size, why
from scripts.maintenance.inspection.calls import (
    DTYPES,
    FEATURES,
    GROUPS,
    IMPLEMENTATIONS,
    MASKS,
    PASSES,
    RAGGED,
    inspect_attention,
)
from scripts.maintenance.inspection.gpu_compiler import TARGETS, missing
from scripts.maintenance.inspection.kernels import show as show


def _changes(before: dict[str, dict], after: dict[str, dict]) -> Iterator[str]:
    for key in dict.fromkeys([*after, *before]):
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            yield f"{key}: only {'after' if old is None else 'before'}"
        elif old != new:
            pairs = ((name, old.get(name), new.get(name)) for name in {**new, **old})
            yield f"{key}: " + ", ".join(f"{name} {a} -> {b}" for name, a, b in pairs if a != b)


def _tile(text: str) -> tuple[str, Any]:
    """KERNEL=Q,KV,WARPS,STAGES."""
    from pallas_flash.tuning import Tile

    match = re.fullmatch(r"(\w+)=(\d{1,9}(?:,\d{1,9}){3})", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"must look like forward=128,64,8,3; got {text!r}.")
    name, sizes = match.groups()
    try:
        return name, Tile(*map(int, sizes.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} In {text!r}.") from error


def _tile_sizes(tiles: Iterable[tuple[str, Any]]) -> Any:
    from pallas_flash.tuning import TileSizes

    kernels = [field.name for field in dataclasses.fields(TileSizes)]
    names = [name for name, _ in tiles]
    for name in names:
        if name not in kernels or names.count(name) > 1:
            raise UserError(
                f"--tiles must be for kernels among {', '.join(kernels)}, once each; got {name!r}."
            )
    try:
        return TileSizes(**dict(tiles))
    except ValueError as error:
        raise UserError(f"--tiles: {error}") from error


def _kernels_in(path: pathlib.Path) -> dict[str, dict]:
    """Return the kernels in a file of --json."""
    try:
        content = json.loads(path.read_bytes())
        kernels, known = content["kernels"], isinstance(content["jax"], str)
        if not known or not all(isinstance(record, dict) for record in kernels.values()):
            raise ValueError
        return kernels
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"A file that --json wrote must be named; got {path}: {why(error)}."
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} must be a file that --json wrote; got another.") from error


def _writable(path: pathlib.Path) -> None:
    """Refuse a path that cannot be written, or another kind of file, before compilation."""
    if path.is_file():
        _kernels_in(path)
    folder = path.absolute().parent
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"--json must be a file that can be written; got {path}.")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    several = functools.partial(parser.add_argument, nargs="+")
    several("--target", choices=TARGETS, default=["h200"], help="GPUs to compile for")
    several("--head-dims", type=parse_size, metavar="INT", default=[64, 128, 256], help="head dims")
    several("--dtypes", choices=DTYPES, default=["bfloat16"], help="dtypes of q, k and v")
    several("--masks", choices=MASKS, default=["full", "causal", "segments"], help="masks")
    several("--features", choices=FEATURES, default=[], help="options of the call, all at once")
    several("--passes", choices=PASSES, default=PASSES, help="kernels to show")
    several("--groups", type=int, choices=GROUPS, default=[1], help="query heads per key head")
    add("--implementation", choices=IMPLEMENTATIONS, default="triton", help="the kernels")
    add("--reproducible", action="store_true", help="gradients with sums of one order")
    add("--length", type=parse_size, metavar="INT", default=4096, help="keys of a sequence")
    add("--queries", type=parse_size, metavar="INT", help="queries (default: as many as keys)")
    several(
        "--tiles",
        metavar="KERNEL=Q,KV,WARPS,STAGES",
        type=_tile,
        default=[],
        help='tiles of "triton" (default: its choice), as in forward=128,64,8,3 dq=64,64,4,3',
    )
    add("--loops", action="store_true", help="show every loop, and its opcodes")
    add("--json", metavar="FILE", type=parse_path, help="also write JSON; - is the standard output")
    add("--against", metavar="FILE", type=parse_path, help="print what changed since this --json")
    add("--dump", metavar="FOLDER", type=parse_path, help="keep the machine code there")
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a call does not compile."""
    options = _parser().parse_args(argv)
    config = _tile_sizes(options.tiles) if options.tiles else None
    length = options.length - (RAGGED if "ragged" in options.masks else 0)
    if (options.queries or 1) > length:
        raise UserError(
            f"--length must be at least --queries, and {RAGGED} more for the mask ragged; got "
            f"{options.length}."
        )
    before = _kernels_in(options.against) if options.against else {}
    to_stdout = str(options.json) == "-"
    if options.json and not to_stdout:
        _writable(options.json)
    if options.dump and options.dump.exists() and not options.dump.is_dir():
        raise UserError(f"--dump must be a folder, or a new one; got the file {options.dump}.")
    if sentence := missing():
        raise UserError(sentence)
    report = sys.stderr if to_stdout else sys.stdout

    results: dict[str, dict] = {}
    failed = False
    for target, head_dim, dtype, mask, group in itertools.product(
        options.target, options.head_dims, options.dtypes, options.masks, options.groups
    ):
        case = " ".join([target, str(head_dim), dtype, mask, *options.features])
        case += f" {group}:1" if group > 1 else ""
        if options.implementation == "mosaic":
            case += " mosaic, in order" if options.reproducible else " mosaic"
        print(f"\n{case}", file=report)
        try:
            program = inspect_attention(
                head_dim,
                passes=options.passes,
                target=target,
                dump=options.dump and options.dump / case.replace(" ", "_"),
                dtype=dtype,
                mask=mask,
                features=options.features,
                group=group,
                length=options.length,
                queries=options.queries,
                config=config,
                implementation=options.implementation,
                reproducible=options.reproducible,
            )
        except (
            *(ValueError, NotImplementedError, MemoryError, OverflowError),
            jax.errors.JaxRuntimeError,
        ) as error:
            # Tiles may need too much memory, and kernels may not serve a call.
            failed = True
            print(f"does not compile: {error}", file=report)
            continue
        print(*program.lines(every_loop=options.loops), sep="\n", file=report)
        for kernel in program.kernels:
            results[f"{case} {kernel.name}"] = kernel.record()

    if options.json:
        about = {"jax": importlib.metadata.version("jax"), "kernels": results}
        text = json.dumps(about, indent=1) + "\n"
        if to_stdout:
            print(text, end="")
        else:
            options.json.write_text(text, encoding="utf-8")
    if options.against:
        changes = list(_changes(before, results)) or ["nothing changed"]
        print(f"\nSince {options.against}:", *changes, sep="\n", file=report)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
