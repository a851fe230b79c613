"""Python modules of MLIR's dialects that jaxlib does not have, see `compat`."""
