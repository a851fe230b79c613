"""Processes that tests start end with the process that started them."""

import os
import signal
import sys
from pathlib import Path

import pytest
from support import children

# Each prints the number of a child that would run for minutes, and waits.
PARENTS = {
    "command": """
        child = children.start([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
        child.wait()
    """,
    "pool": """
        child = children.pool()
        print(child.submit(os.getpid).result(), flush=True)
        time.sleep(600)
    """,
}


@pytest.mark.parametrize("kind", PARENTS)
def test_a_child_ends_when_its_parent_is_killed(kind):
    code = "import os, sys, time\n\nfrom support import children\n"
    for line in PARENTS[kind].splitlines():
        code += line.strip() + "\n"
    parent = children.start(
        [sys.executable, "-c", code],
        stdout=children.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(children.__file__).parents[1])},
    )
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    try:
        # Standard output ends when no process holds it any more.
        assert parent.communicate(timeout=30) == (b"", None)
    except children.TimeoutExpired:
        os.kill(child, signal.SIGKILL)
        raise


def test_a_command_is_the_child_itself():
    """Its number and its exit status are those of the command, not of what ties it."""
    code = "import os, sys; print(os.getpid()); sys.exit(3)"
    child = children.start([sys.executable, "-c", code], stdout=children.PIPE)
    out, _ = child.communicate()
    assert (int(out), child.returncode) == (child.pid, 3)
