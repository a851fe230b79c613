"""What `train_gpt.py` says, and the error that is one sentence."""

import sys


class UserError(ValueError):
    """A mistake in what was asked for, or a machine that cannot do it: told in one sentence."""


def say(label: str, text: str):
    """Prints a labelled line, at once even into a file."""
    print(f"{label:<11}{text}", flush=True)


def warn(text: str):
    """Prints what went wrong and was mended, beside the output."""
    print(f"train_gpt.py: warning: {text}", file=sys.stderr, flush=True)
