"""What `train_gpt.py` says."""

import sys

from scripts.command import UserError as UserError

# Of several processes the first one speaks; errors and warnings of the others have their number.
process = 0


def say(label: str, text: str):
    """Prints a labelled line, at once even into a file."""
    if process == 0:
        print(f"{label:<11}{text}", flush=True)


def warn(text: str):
    """Prints what went wrong and was mended, beside the output."""
    _complain("warning", text)


def fail(text: object):
    """Prints why the script ends."""
    _complain("error", text)


def _complain(kind: str, text: object):
    who = f"process {process}: " if process else ""
    print(f"train_gpt.py: {who}{kind}: {text}", file=sys.stderr, flush=True)
