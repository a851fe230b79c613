"""The command `python -m pallas_flash.tune`. As a name of the package, `tune` is the function.

python -m pallas_flash.tune --head-dim 128 --length 4096 --heads 16 --causal
python -m pallas_flash.tune --show
"""

import argparse
import os
import sys

import jax

from pallas_flash._tiling import cache, tune
from pallas_flash._tiling.sizes import KERNELS


def main() -> int:
    """Tunes for one kind of call, or shows or removes what was found; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_flash.tune",
        description="Finds the fastest tiles on this GPU and keeps them for later calls.",
    )
    add = parser.add_argument
    add("--head-dim", type=_size, default=128, help="head size (128)")
    add("--length", type=_size, default=4096, help="of queries and of keys (4096)")
    add("--heads", type=_size, default=16, help="query heads (16)")
    add("--kv-heads", type=_size, help="key/value heads, if another number")
    add("--batch", type=_size, default=1, help="examples (1)")
    add("--dtype", choices=list(tune.ALLOWED), default="bfloat16", help="(bfloat16)")
    add("--causal", action="store_true", help="with a causal mask")
    add("--passes", nargs="+", choices=list(tune.PASSES), default=list(tune.PASSES))
    add("--dry-run", action="store_true", help="tune, but do not keep the winner")
    add("--show", action="store_true", help="print the winners that are kept, and end")
    add("--clear", action="store_true", help="remove them, and end")
    args = parser.parse_args()
    try:
        print(_stored(args.clear) if args.show or args.clear else _tuned(args))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; nor is there anybody to tell at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (RuntimeError, OSError, TypeError, ValueError, MemoryError, OverflowError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        print(f"{parser.prog}: error: {reason[0]}", file=sys.stderr)
        return 2
    return 0


def _size(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"must be an int from 1 to 2**31 - 1; got {text!r}.")
    return int(text)


def _tuned(args: argparse.Namespace) -> tune.Tuning:
    try:
        jax.devices()
    except Exception as error:  # An AssertionError, if JAX_PLATFORMS=cuda finds none.
        raise RuntimeError(
            f"JAX must find a device; got {error!r:.200}. Look at JAX_PLATFORMS in the environment."
        ) from error
    q, kv = (
        jax.ShapeDtypeStruct((args.batch, args.length, heads, args.head_dim), args.dtype)
        for heads in (args.heads, args.kv_heads or args.heads)
    )
    options = dict(passes=args.passes, store=not args.dry_run, is_causal=args.causal)
    return tune.tune(q, kv, kv, **options)


def _stored(clear: bool) -> str:
    file = cache.file()
    if file is None:
        raise ValueError("PALLAS_FLASH_TUNED=0 switches winners off; unset it.")
    try:
        if clear:
            cache.remove(file)
            return f"removed {file}"
        winners = cache.parse(file)
    except FileNotFoundError:
        winners = {}
    lines = []
    for name, tiles in winners.items():
        found = [kernel for kernel in KERNELS if tiles.tile(kernel)]
        lines += [name, *(f"  {kernel:<8}{tune.column(tiles.tile(kernel))}" for kernel in found)]
    return "\n".join(lines) or f"no winners in {file}"


if __name__ == "__main__":
    sys.exit(main())

# To import this file is to ask for the function: else the module would take its place.
sys.modules[__name__] = tune.tune  # pyright: ignore[reportArgumentType]
