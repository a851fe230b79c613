"""Records of a run: the fields that all share, and the file of --json that they are appended to."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import pathlib
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import jax

from scripts.benchmarks.report import load
from scripts.benchmarks.results import dump
from scripts.benchmarks.timers import gpu_id
from scripts.command import UserError, parse_path, why

PACKAGES = ("jax", "jaxlib", "torch", "triton", "tokamax", "jax-triton")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `recording`."""
    add = parser.add_argument
    add("--json", type=parse_path, metavar="FILE", help="append a line for each measurement")
    add("--commit", metavar="NAME", help="the commit to record, where git cannot tell it")


@contextlib.contextmanager
def recording(
    path: pathlib.Path | None, commit: str | None
) -> Iterator[tuple[dict[str, Any], Callable[[dict[str, Any]], None]]]:
    """Give the fields that all records share, and a function that appends a record to a file.

    Raises:
        UserError: JAX finds no device, or the file holds something else or cannot be written.
    """
    about = surroundings(commit)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_appended(path)) if path else None

        def append(record: dict[str, Any]) -> None:
            text = dump({**record, **about})
            if file is not None:
                file.write(text)
                file.flush()

        yield about, append


def surroundings(commit: str | None) -> dict[str, Any]:
    """Return device, versions, commit and date, which all lines of a run share."""
    try:
        device = jax.devices()[0]
    except Exception as error:  # An AssertionError, if JAX_PLATFORMS=cuda finds none.
        raise UserError(
            f"JAX must find a device; got {error!r:.200}. Look at JAX_PLATFORMS in the environment."
        ) from error
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    driver = _output("nvidia-smi", f"--id={gpu_id()}", *query)
    versions = {}
    for package in PACKAGES:
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
        root = pathlib.Path(__file__).parents[2]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=root, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _appended(path: pathlib.Path) -> TextIO:
    """Open a file of results, or a new one, at its end."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("no regular file")
        if path.exists():
            load(path)
        file = path.open("a+", encoding="utf-8")
        # The last line may lack its end.
        file.seek(0)
        if (text := file.read()) and not text.endswith("\n"):
            file.write("\n")
        return file
    except OSError as error:
        raise UserError(
            f"--json must be a file that can be written; got {path}: {why(error)}."
        ) from error
