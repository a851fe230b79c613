"""Mistakes of users: each ends in one sentence, which names the argument, or the file."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np


class UserError(ValueError):
    """A mistake of the user, or a machine that cannot do it; the message is one sentence."""


def why(error: OSError | UnicodeError) -> str:
    """Return why a file cannot be used, in a few words without its name."""
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return "no text"


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the name of a file or folder to an error of writing it; a full disk's has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or the memory that JAX gives out on it, was too small."""
    return "RESOURCE_EXHAUSTED" in str(error)


def check_int(name: str, value: Any, least: int = 1, *, optional: bool = False) -> None:
    """Raise if an argument is no int from `least` on, and is not None where it is `optional`."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (whole and value >= least) and not (optional and value is None):
        none = ", or None" if optional else ""
        raise ValueError(f"`{name}` must be an int of at least {least}{none}; got {value!r}.")
