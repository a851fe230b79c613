"""Several processes that train one model, each with devices of its own.

They find each other through `jax.distributed`. Everything that all of them compute is the same in
all, so that what they decide by it is, too. Files are written by one process, the writer; only a
checkpoint's arrays are written by all. Whether to stop is put to the vote.

A process that dies leaves the others in the middle of a message that never comes. JAX notices by
heartbeats and then aborts each process with pages of C++; `last_words.py` makes a sentence of them.
"""

import json
import os
import re
import sys
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from models.sharding import Layout
from scripts.training import last_words, messages
from scripts.training.files import cause
from scripts.training.messages import UserError

# Seconds without a sign after which a process is dead, and to wait for all at the start.
HEARTBEAT, WAIT = 30, 40
FLAGS = ("cluster", "coordinator", "num_processes", "process_id", "wait")
GONE = (
    "train_gpt.py: error: stopped, because another process of this run has ended, or did not come "
    "in time (--wait); its own last words say why; run the same again in all to resume."
)


def add_process_flags(parser):
    """The flags that say which of several processes this one is."""
    group = parser.add_argument_group(
        "several processes", "Each has these and the same other flags; see docs/training.md."
    )
    group.add_argument(
        "--cluster",
        action="store_true",
        help="take what follows from the cluster's environment, as JAX detects it (Slurm, Open MPI,"
        " Kubernetes, ...)",
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="host of process 0, and a free port there"
    )
    group.add_argument("--num-processes", type=int, metavar="INT", help="how many there are")
    group.add_argument("--process-id", type=int, metavar="INT", help="which one this is, from 0")
    group.add_argument(
        "--wait",
        type=int,
        metavar="SECONDS",
        help=f"how long to wait for the others at the start, {WAIT} if not given",
    )


def _check(flags: dict[str, Any]):
    """Refuses flags that contradict each other, or that are not enough."""
    given = {name: flags[name] for name in FLAGS[1:4] if name in flags}
    written = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    if not 0 < flags.get("wait", WAIT) < 2**31:
        raise UserError(f"`wait` must be a positive number of seconds; got {flags['wait']}.")
    if flags.get("cluster"):
        if given:
            raise UserError(
                f"`cluster` must stand alone, because it finds the rest itself; got {written}, too:"
                " leave one or the other out."
            )
        return
    if len(given) < 3:
        raise UserError(
            "`coordinator`, `num_processes` and `process_id` must be given together; got "
            f"{written or 'none'} alone: add the others, or pass --cluster."
        )
    host, _, port = given["coordinator"].rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(
            f"`coordinator` must be HOST:PORT; got {given['coordinator']!r}: name the host of "
            "process 0 and a free port there."
        )
    count, index = given["num_processes"], given["process_id"]
    if not 0 <= index < count:
        raise UserError(
            f"`process_id` must be from 0 to `num_processes` - 1; got {index} of {count} processes."
        )


def join(flags: dict[str, Any]):
    """Makes this process one of several, if its flags say so.

    Raises:
        UserError: The flags do not fit each other, or the others were not found.
    """
    if not flags:
        return
    _check(flags)
    # SIGTERM is put to the vote here; JAX's own handler would take it away.
    jax.config.update("jax_enable_preemption_service", False)
    last_words.keep(GONE)
    try:
        jax.distributed.initialize(
            flags.get("coordinator"),
            flags.get("num_processes"),
            flags.get("process_id"),
            initialization_timeout=flags.get("wait", WAIT),
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    # JAX raises what it likes here.
    except Exception as error:
        if flags.get("cluster"):
            raise UserError(
                f"`cluster` must be one that JAX detects; got {cause(error)!r}: pass --coordinator,"
                " --num-processes and --process-id."
            ) from error
        raise UserError(
            f"`coordinator` must be where process 0 runs and all the others come to; got "
            f"{cause(error)!r} at {flags['coordinator']}: see that all {flags['num_processes']} "
            "run, or let each --wait longer."
        ) from error
    messages.process = jax.process_index()


def several() -> bool:
    """Whether this process is one of several."""
    return jax.process_count() > 1


def is_writer() -> bool:
    """Whether this is the process that writes files and speaks."""
    return messages.process == 0


def from_writer(work: Callable[[], int]) -> int:
    """What `work` gives in the writer, in all; nobody goes on before it is done."""
    result = np.int32(work() if is_writer() else 0)
    return int(multihost_utils.broadcast_one_to_all(result)) if several() else int(result)


def barrier(name: str):
    """Waits until all have come to here."""
    if several():
        multihost_utils.sync_global_devices(name)


def check_same(settings: dict[str, Any]):
    """Refuses processes that would train different things.

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


class Vote:
    """Whether to stop, where any process may have been asked to.

    All must stop after the same step. Each says with every step whether it was asked; what is
    answered is the outcome of the step before, for which no device has to wait.

    Args:
        layout: The mesh.
        asked: What is no longer empty when this process was asked to.
    """

    def __init__(self, layout: Layout, asked: list):
        self._asked, self._before = asked, None
        self._places = layout.sharding(layout.mesh.axis_names)
        self._any = jax.jit(jax.numpy.any, out_shardings=layout.sharding())

    def __call__(self) -> bool:
        """The outcome; called once a step by every process."""
        if not several():
            return bool(self._asked)
        mine = np.full(jax.local_device_count(), bool(self._asked))
        vote = self._any(jax.make_array_from_process_local_data(self._places, mine))
        before, self._before = self._before, vote
        return before is not None and bool(before)


def is_of_a_death(error: Exception) -> bool:
    """Whether an error is what this process sees of another one's end."""
    signs = "gloo|nccl|coordination|connection|unavailable|aborted|deadline_exceeded|barrier"
    several_then = jax.distributed.is_initialized() and several()
    return several_then and bool(re.search(signs, str(error), re.IGNORECASE))


def finish():
    """Leaves the others, who are at their end, too."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def leave(status: int) -> int:
    """Ends this process with an exit status if others may still count on it, and returns it if not.

    Python's ordinary end would wait for the others, while they wait for this one's next message.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
