"""What a process says when another one of its run has died.

The runtime of JAX then aborts it, with pages about heartbeats and a stack of C++, and no Python
runs any more. So what is not Python writes to its standard error through this small program, which
passes everything on but those pages, and puts a sentence in their place.
"""

import os
import select
import subprocess
import sys

# What the runtime writes when it ends a process because of another, in all supported versions.
ABORT = b"JAX distributed service detected fatal errors"
SPOKEN = b"another process of this run is gone\n"
# The pages come at once; who writes anything else is passed on after so many seconds.
PATIENCE, MUCH = 1.0, 1 << 20


def keep(sentence: str):
    """From now on, what is not Python writes through this program."""
    program = subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, sentence],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is not for it.
    )
    # Python's own messages go straight on.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    os.dup2(program.stdin.fileno(), 2)
    program.stdin.close()
    # It outlives this process on purpose, and nobody asks for its exit status.
    program.returncode = 0


def speak():
    """Has the sentence said, in place of all that came just before."""
    os.write(2, SPOKEN)


def main(sentence: str):
    """Passes the standard input on to the standard error."""
    held = b""
    while True:
        paused = held and not select.select([0], [], [], PATIENCE)[0]
        if (paused or len(held) > MUCH) and not about_a_death(held):
            write(held)
            held = b""
        chunk = os.read(0, 1 << 16)
        if not chunk:
            break
        held += chunk
    write(f"{sentence}\n".encode() if about_a_death(held) else held)


def about_a_death(text: bytes) -> bool:
    """Whether this is what a process writes because another one died."""
    return ABORT in text or SPOKEN in text


def write(text: bytes):
    """Writes all of it."""
    while text:
        text = text[os.write(2, text) :]


if __name__ == "__main__":
    main(sys.argv[1])
