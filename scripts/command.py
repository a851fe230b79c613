"""Flags and errors of the commands of this folder: each mistake ends in one sentence."""

import argparse
import difflib
import functools
import math
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from models.errors import UserError as UserError
from models.errors import is_out_of_memory as is_out_of_memory
from models.errors import naming as naming
from models.errors import why as why


class _Help(argparse.RawDescriptionHelpFormatter):
    """Adds the default to the help of each flag that has one."""

    def _get_help_string(self, action):
        default = action.default
        if default in (None, False, argparse.SUPPRESS) or default == []:
            return action.help
        words = " ".join(map(str, default)) if isinstance(default, list | tuple) else f"{default}"
        return f"{action.help} (default: {words})"


class Parser(argparse.ArgumentParser):
    """A parser whose help shows defaults, and whose error on an unknown flag names one alike."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=_Help, **options)

    def error(self, message: str):
        """Print the usage and the message, and exit with 2."""
        kind, _, words = message.partition(": ")
        flags = [word.partition("=")[0] for word in words.split() if word.startswith("--")]
        if kind == "unrecognized arguments" and flags:
            near = difflib.get_close_matches(flags[0], self._option_string_actions, 1)
            message += "".join(f"; did you mean {flag}?" for flag in near)
        super().error(message)


def command(main: Callable[..., Any]) -> Callable[..., Any]:
    """Make `main` end with one sentence on a mistake, and quietly under `| head`."""

    @functools.wraps(main)
    def ending(*arguments, **options):
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # the shell has closed it
                # SIM115 wants a `with`, and this stays open until the process ends.
                setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        # The terminal may lack characters of what is printed.
        sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
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


def parse_size(text: str) -> int:
    """Return a flag's positive int."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"must be an int from 1 to 2**31 - 1; got {text!r}.")
    return int(text)


def _number(most: float, wanted: str) -> Callable[[str], float]:
    """Return a parser of a flag's number between 0 and `most`, both excluded."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < most:
            raise argparse.ArgumentTypeError(f"must be a {wanted}; got {text!r}.")
        return value

    return parse


parse_seconds = _number(math.inf, "positive number of seconds")
parse_positive = _number(math.inf, "positive number")
parse_rate = _number(1, "number between 0 and 1")


def parse_path(text: str) -> pathlib.Path:
    """Return a flag's file or folder; refuse an empty one, as of an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path; got ''.")
    return pathlib.Path(text)
