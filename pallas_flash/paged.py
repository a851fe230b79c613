"""Pages of a cache outside of `paged_attention`: new tokens, and quantised numbers."""

from pallas_flash._call.pages import append, quantize

__all__ = ["append", "quantize"]
