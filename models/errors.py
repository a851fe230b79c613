"""The error of commands: a mistake that ends in one sentence."""


class UserError(ValueError):
    """A mistake of the user, or a machine that cannot do it; the message is one sentence."""


def why(error: OSError | UnicodeError) -> str:
    """Return why a file cannot be used, in a few words without its name."""
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return "no text"
