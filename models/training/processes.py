"""Processes of a run: how they find each other and stop together, and which one writes and prints.

Processes that train one model find each other through `jax.distributed`. All compute the same
values, and so take the same decisions. Process 0 writes files and prints; every process writes its
part of a checkpoint's arrays. The processes vote on whether to stop.

If a process dies, the others wait for its messages. JAX misses its heartbeats and ends the others.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from models.errors import UserError as UserError
from models.sharding import Layout

# Seconds without a heartbeat after which a process is dead; seconds to wait for all at the start.
HEARTBEAT, WAIT = 30, 120
WHICH = ("coordinator", "num_processes", "process_id")
FLAGS = ("cluster", *WHICH)


def say(label: str, text: str):
    """Print a labelled line, at once even into a file; only process 0 does."""
    if is_writer():
        print(f"{label:<11}{text}", flush=True)


def warn(text: str):
    """Print a warning to the standard error."""
    print(f"train: {_name()}warning: {text}", file=sys.stderr, flush=True)


def fail(text: object):
    """Print the error that ends the script to the standard error."""
    print(f"train: {_name()}error: {text}", file=sys.stderr, flush=True)


def _name() -> str:
    return "" if is_writer() else f"process {jax.process_index()}: "


def first_line(error: Exception) -> str:
    """Return the start of an error's message; messages of JAX and TensorStore have pages."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def add_process_flags(parser: argparse.ArgumentParser):
    """Add the flags that number the processes."""
    title = "several processes", "Each has these and the same other flags; see docs/training.md."
    add = parser.add_argument_group(*title).add_argument
    detected = "take the next three from the cluster's environment, as JAX detects it (Slurm, ...)"
    add("--cluster", action="store_true", help=detected)
    add("--coordinator", metavar="HOST:PORT", help="host of process 0, and a free port there")
    add("--num-processes", type=int, metavar="INT", help="number of processes")
    add("--process-id", type=int, metavar="INT", help="number of this process, from 0")


def join(flags: dict[str, Any]):
    """Make this process one of several, if its flags say so.

    Raises:
        UserError: The flags do not fit each other, or the others were not found.
    """
    if not flags:
        return
    given = [name for name in WHICH if name in flags]
    if len(given) != (0 if "cluster" in flags else len(WHICH)):
        raise UserError(
            "`coordinator`, `num_processes` and `process_id` must be given together, or `cluster` "
            f"alone; got {', '.join(flags)}."
        )
    # The processes vote on SIGTERM; JAX's own handler would take the signal.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            *(flags.get(name) for name in WHICH),
            initialization_timeout=WAIT,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except Exception as error:  # JAX raises exceptions of many types here.
        raise UserError(
            f"the processes must find each other; got {first_line(error)!r}: see that all "
            f"run and reach --coordinator within {WAIT} seconds."
        ) from error


def several() -> bool:
    """Whether this process is one of several."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_writer() -> bool:
    """Whether this is the process that writes files and prints."""
    # Asking for the index before `join` would start JAX as a single process.
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def result_of_writer(work: Callable[[], int]) -> int:
    """Return the result of `work` in the writer, in all processes, once it is done."""
    result = np.int32(work() if is_writer() else 0)
    return int(multihost_utils.broadcast_one_to_all(result)) if several() else int(result)


def check_same(settings: dict[str, Any]):
    """Refuse processes that would train different things.

    Raises:
        UserError: They have other values of some settings.
    """
    if not several():
        return
    hashes = [zlib.crc32(json.dumps(value).encode()) for value in settings.values()]
    table = multihost_utils.process_allgather(np.array(hashes, np.uint32))
    for index, row in enumerate(np.asarray(table)):
        names = [name for name, x, y in zip(settings, table[0], row, strict=True) if x != y]
        if names:
            raise UserError(
                f"`{'`, `'.join(names)}` must be the same in all processes; got other values in "
                f"process {index} than in process 0: start all with the same flags and texts."
            )


@contextlib.contextmanager
def stop_signals():
    """Turn the first Ctrl-C or SIGTERM into an entry of the list that this context gives.

    An exception could come when the old state is donated and the new state is not there yet; the
    list is read between two steps. A second Ctrl-C interrupts at once.
    """
    received = []

    def receive(number, frame):
        received.append(number)
        signal.signal(number, before[number])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Vote:
    """The common decision of the processes to stop, where any of them may get a signal.

    All must stop after the same step. Each votes with every step; the answer is the outcome of the
    step before, for which no device has to wait.

    Args:
        layout: The mesh.
        asked: A list that is no longer empty when this process has got a signal.
    """

    def __init__(self, layout: Layout, asked: list):
        self._asked, self._before = asked, None
        self._places = layout.sharding(layout.mesh.axis_names)
        self._any = jax.jit(jax.numpy.any, out_shardings=layout.sharding())

    def __call__(self) -> bool:
        """Return the outcome; every process calls this once a step."""
        if not several():
            return bool(self._asked)
        mine = np.full(jax.local_device_count(), bool(self._asked))
        vote = self._any(jax.make_array_from_process_local_data(self._places, mine))
        before, self._before = self._before, vote
        return before is not None and bool(before)


def finish():
    """Leave the other processes, which end now, too."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def leave(status: int) -> int:
    """End this process with an exit status if others wait for it; else return the status.

    Python's ordinary end would wait for the others, which wait for this one's next message.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
