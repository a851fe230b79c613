"""All of JAX's strict switches at once. (Warnings are errors in every test.)"""

import contextlib
import gc
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def strictly(*, x64: bool = False, leaks: bool = True) -> Iterator[None]:
    """No implicit promotion of ranks and dtypes; with `leaks`, no tracer outlives its trace."""
    # A search for leaks collects garbage, for which it need not look at all that is there already.
    gc.freeze()
    try:
        with (
            jax.numpy_rank_promotion("raise"),
            jax.numpy_dtype_promotion("strict"),
            jax.check_tracer_leaks(leaks),
            jax.enable_x64(x64),
        ):
            yield
    finally:
        gc.unfreeze()
