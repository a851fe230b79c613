"""Models built on `pallas_flash`, for the scripts of a checkout."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.decoder import Decoder as Decoder


def __getattr__(name: str):
    # Commands that only share errors need no Flax.
    if name == "Decoder":
        from models.decoder import Decoder

        return Decoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
