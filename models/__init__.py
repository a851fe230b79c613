"""Models built on `pallas_flash`, for the scripts of a checkout."""

from models.decoder import Decoder as Decoder
