"""Makes the commands of this folder end with one sentence on every mistake."""

import argparse
import functools
import math
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any


class UserError(ValueError):
    """A mistake of the user, or a machine that cannot do it; the message is one sentence."""


def command(main: Callable[..., Any]) -> Callable[..., Any]:
    """Make `main` end with one sentence on a mistake, and quietly under `| head`."""

    @functools.wraps(main)
    def ending(*arguments, **options):
        try:
            code = main(*arguments, **options)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            # The reader has closed the pipe. Python would write again at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except KeyboardInterrupt:
            sys.exit("interrupted")
        except (UserError, OSError) as error:
            sys.exit(f"error: {error}")

    return ending


def why(error: OSError | UnicodeError) -> str:
    """Return why a file cannot be used, in a few words without its name."""
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return "no text"


def parse_size(text: str) -> int:
    """Return a flag's positive int."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"must be an int from 1 to 2**31 - 1; got {text!r}.")
    return int(text)


def parse_seconds(text: str) -> float:
    """Return a flag's time."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds; got {text!r}.")
    return value


def parse_path(text: str) -> pathlib.Path:
    """Return a flag's file or folder; refuse an empty one, as of an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path; got ''.")
    return pathlib.Path(text)
