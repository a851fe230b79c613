"""Processes that tests start: each ends when the one that started it ends, however that ends.

Neither `finally` nor `atexit` runs in a process that is killed, and a worker of pytest-xdist may be
killed. Tests start processes through this module alone (see `test_structure`).
"""

import concurrent.futures.process
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from subprocess import PIPE, STDOUT, TimeoutExpired  # noqa: F401  Users of `start` name them.

_PR_SET_PDEATHSIG = 1  # From <linux/prctl.h>.


def run(command, **options):
    """Call `subprocess.run` with a command that ends when this process ends."""
    return subprocess.run(_tied(command), **options)


def start(command, **options):
    """Call `subprocess.Popen` with a command that ends when this process ends."""
    return subprocess.Popen(_tied(command), **options)


def pool(prepare=None):
    """Return a pool of one process, started anew and not forked, that ends when this one ends.

    Args:
        prepare: a function of a module, called there first.
    """
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(
        1, mp_context=spawn, initializer=_begin, initargs=(os.getpid(), prepare)
    )


def _begin(parent, prepare):
    _end_with(parent)
    if prepare:
        prepare()


def _tied(command):
    """Return a command that runs this file, which becomes `command` by `exec`."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *map(os.fspath, command)]


def _end_with(parent):
    """Have Linux kill this process when its parent ends; `exec` keeps that.

    Linux watches the thread that started the process, which is the main one in all tests.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        # The parent may have ended before the call.
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    _end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
