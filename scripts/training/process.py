"""How a process of `train_gpt.py` is asked to stop, and how it ends when nobody reads on."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable


@contextlib.contextmanager
def stop_signals():
    """Turns the first Ctrl-C or SIGTERM into an entry of the list it yields.

    An exception could strike when the old state is already donated and the new one not yet there;
    a list that is read between two steps cannot. A second Ctrl-C interrupts at once.
    """
    received = []
    # Python hands signals to the main thread alone, and lets no other ask for them.
    main = threading.current_thread() is threading.main_thread()
    previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM) if main}

    def receive(number, frame):
        received.append(number)
        signal.signal(number, previous[number])

    for number in previous:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def as_a_process(main: Callable[[], int]) -> int:
    """Calls `main` and returns its exit status, whatever becomes of the standard output."""
    # A model may write any character, the terminal may not know it.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    try:
        status = main()
        sys.stdout.flush()
        return status
    except OSError as error:
        # Python flushes once more at the end, and must not fail there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Nobody reads on, as behind `| head`: what a shell gives for SIGPIPE.
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"train_gpt.py: error: reading or writing failed: {error}.", file=sys.stderr)
        return 2
