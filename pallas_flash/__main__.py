"""The commands `python -m pallas_flash` and `python -m pallas_flash tune`.

The first prints what a report of a bug should contain: versions, the device, which implementation
computes an ordinary call and why the others do not, and the file of tuned tiles.
"""

import argparse
import importlib.metadata
import os
import platform
import sys

import jax
import jax.numpy as jnp

import pallas_flash
from pallas_flash._call import tune_command
from pallas_flash._selection import tuned

PACKAGES = "jax", "jaxlib", "flax", "optax", "jax-triton"
# They decide what runs, or where results are kept.
VARIABLES = "JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "PALLAS_FLASH_TUNED"


def main() -> int:
    """Run the command that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_flash",
        description="Prints what a report of a bug should contain, or runs a command.",
    )
    tune_command.add_to(parser.add_subparsers(title="commands"))
    args = parser.parse_args()
    if hasattr(args, "run"):
        return args.run(args)
    print(report())
    return 0


def report() -> str:
    """Return the report."""
    lines = [
        f"pallas_flash {pallas_flash.__version__}, Python {platform.python_version()}",
        ", ".join(filter(None, map(_version, PACKAGES))),
        f"devices: {_devices()}",
        *(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ),
        f"tuned tiles: {_tuned()}",
        "",
        "A causal call of 4 x 4096 tokens, 16 heads, head dim 128, bfloat16:",
        _choice(),
    ]
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _choice() -> str:
    x = jax.ShapeDtypeStruct((4, 4096, 16, 128), jnp.bfloat16)
    try:
        return str(pallas_flash.explain(x, x, x, is_causal=True))
    except Exception as error:  # Whatever JAX raises where it finds no device.
        return f"explain fails: {error!r:.200}"


def _devices() -> str:
    try:
        devices = jax.devices()
    except Exception as error:  # An AssertionError, if JAX_PLATFORMS=cuda finds none.
        return f"JAX finds none: {error!r:.200}"
    capability = getattr(devices[0], "compute_capability", None)
    return f"{len(devices)} x {devices[0].device_kind}" + (
        f", compute capability {capability}" if capability else ""
    )


def _tuned() -> str:
    path = tuned.file()
    if path is None:
        return "switched off by PALLAS_FLASH_TUNED"
    return f"{path}, {len(tuned.read(path))} winners" if path.exists() else f"none in {path}"


if __name__ == "__main__":
    sys.exit(main())
