"""The check of the argument `implementation`."""

from pallas_flash._arguments import other_libraries
from pallas_flash._execution.limits import IMPLEMENTATIONS


def check_implementation(asked) -> None:
    """Raise unless `asked` is None or the name of an implementation."""
    if asked is not None and not (isinstance(asked, str) and asked in IMPLEMENTATIONS):
        hint = other_libraries.hint(other_libraries.IMPLEMENTATIONS, asked)
        raise ValueError(
            f"`implementation` must be None or one of {IMPLEMENTATIONS}; got {asked!r:.60}. "
            f"Use None for the fastest{hint}."
        )
