"""The command `python -m pallas_flash tune`."""

import argparse
import functools
import os
import sys
from typing import Any

import jax
import numpy as np

from pallas_flash._call import tune
from pallas_flash._problem.tile_sizes import KERNELS, tile_of
from pallas_flash._selection import tuned

_EXAMPLES = """
examples:
  python -m pallas_flash tune --head-dim 128 --length 4096 --heads 16 --causal
  python -m pallas_flash tune --length 8192 --kv-heads 4 --window 1024 --soft-cap 50 --dry-run

  python -m pallas_flash tune --show
  NVIDIA H200, jax 0.11.2, kernels 0a1b2c3d: bfloat16, H 128, V 128, own keys, ...
    forward   mosaic, warpgroups 3, block_kv 96, output_slots 1, stages 2, cluster_size 1
"""


def add_to(commands: Any) -> None:
    """Add the command to the `commands` of a parser."""
    parser = commands.add_parser(
        "tune",
        help="find the fastest tiles on this GPU, and keep them for later calls",
        description="Finds the fastest tiles on this GPU and keeps them for later calls. The flags "
        "give a kind of call; numbers are random.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=functools.partial(_run, parser.prog))
    add = parser.add_argument
    for flag, default, text in (
        ("--batch", 1, "sequences (default: 1)"),
        ("--length", 4096, "queries and keys of a sequence (default: 4096)"),
        ("--heads", 16, "query heads (default: 16)"),
        ("--kv-heads", None, "key/value heads (default: as many as query heads)"),
        ("--head-dim", 128, "head dim (default: 128)"),
        ("--window", None, "a query sees this many keys, itself the last; implies --causal"),
        ("--segments", None, "packed sequences of about equal lengths"),
    ):
        add(flag, type=_size, metavar="INT", default=default, help=text)
    add("--causal", action="store_true", help="a query sees the keys up to itself")
    add("--soft-cap", type=float, metavar="X", help="scores become X tanh(s / X)")
    add("--bias", action="store_true", help="a number for each head and pair, without its gradient")
    dtypes = list(tune.ALLOWED)
    add("--dtype", choices=dtypes, default="bfloat16", help="dtype of q, k, v (default: bfloat16)")
    both = list(tune.PASSES)
    add("--passes", nargs="+", choices=both, default=both, help="passes to tune (default: both)")
    add("--dry-run", action="store_true", help="tune, but do not keep the winner")
    add("--show", action="store_true", help="print the winners that are kept, and end")
    add("--clear", action="store_true", help="remove them, and end")


def _run(command: str, args: argparse.Namespace) -> int:
    """Tune for one kind of call, or show or remove what was found; return the exit code."""
    try:
        print(_stored(args.clear) if args.show or args.clear else _tuned(args))
        sys.stdout.flush()
    except BrokenPipeError:  # The reader, as `| head`, has closed the pipe.
        # Python would write again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (RuntimeError, OSError, TypeError, ValueError, MemoryError, OverflowError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        print(f"{command}: error: {reason[0]}", file=sys.stderr)
        return 2
    return 0


def _size(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"must be an int from 1 to 2**31 - 1; got {text!r}.")
    return int(text)


def _tuned(args: argparse.Namespace) -> tune.Tuning:
    kv_heads = args.kv_heads or args.heads
    if args.heads % kv_heads:
        raise ValueError(f"--heads must be a multiple of --kv-heads; got {args.heads}, {kv_heads}.")
    if (args.segments or 0) > args.length:
        raise ValueError(
            f"--segments must be at most --length; got {args.segments} and {args.length}."
        )
    if args.soft_cap is not None and not args.soft_cap > 0:
        raise ValueError(f"--soft-cap must be a positive number; got {args.soft_cap}.")
    try:
        jax.devices()
    except Exception as error:  # An AssertionError, if JAX_PLATFORMS=cuda finds none.
        raise RuntimeError(
            f"JAX must find a device; got {error!r:.200}. Look at JAX_PLATFORMS in the environment."
        ) from error
    q, kv = (
        jax.ShapeDtypeStruct((args.batch, args.length, heads, args.head_dim), args.dtype)
        for heads in (args.heads, kv_heads)
    )
    options: dict[str, Any] = dict(is_causal=args.causal or args.window is not None)
    if args.window is not None:
        options["local_window_size"] = (args.window - 1, 0)
    if args.segments is not None:
        ids = np.arange(args.length, dtype=np.int64) * args.segments // args.length
        options["segment_ids"] = np.tile(ids.astype(np.int32), (args.batch, 1))
    if args.bias:
        pairs = (args.heads, args.length, args.length)
        options["bias"] = jax.random.normal(jax.random.key(0), pairs).astype(args.dtype)
    if args.soft_cap is not None:
        options["logits_soft_cap"] = args.soft_cap
    return tune.tune(q, kv, kv, passes=args.passes, store=not args.dry_run, **options)


def _stored(clear: bool) -> str:
    file = tuned.file()
    if file is None:
        raise ValueError("PALLAS_FLASH_TUNED=0 switches winners off; unset it.")
    try:
        if clear:
            tuned.remove(file)
            return f"removed {file}"
        winners = tuned.parse(file)
    except FileNotFoundError:
        winners = {}
    lines = []
    for name, tiles in winners.items():
        kernels = [kernel for kernel in KERNELS if tile_of(tiles, kernel)]
        lines += [
            name,
            *(f"  {kernel:<8}{tune.column(tile_of(tiles, kernel))}" for kernel in kernels),
        ]
    return "\n".join(lines) or f"no winners in {file}"
