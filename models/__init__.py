"""Models built on `pallas_flash`, for the scripts of a checkout."""
