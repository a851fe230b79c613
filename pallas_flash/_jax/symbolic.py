"""Sizes of arrays that `jax.export` leaves open, such as the batch "b" of `symbolic_shape`.

Such a size takes part in arithmetic, in shapes and in arrays, but has no number while a call is
traced. A comparison with it raises unless it holds for all values of the size, or for none.
"""

from collections.abc import Iterable
from typing import Any

import jax.export
import numpy as np
from jax.extend.core import InconclusiveDimensionOperation


def is_symbolic(size: Any) -> bool:
    """Whether a size has no number yet."""
    return jax.export.is_symbolic_dim(size)


def symbolic_sizes(arrays: Iterable[Any]) -> tuple[Any, ...]:
    """Return the sizes of arrays that have no number yet, each once."""
    return tuple(dict.fromkeys(n for x in arrays for n in np.shape(x) if is_symbolic(n)))


def known_at_most(size: Any, limit: Any) -> bool:
    """Whether a size is known not to exceed a limit; either may be symbolic."""
    try:
        return bool(size <= limit)
    except InconclusiveDimensionOperation:
        return False


def smaller(size: Any, limit: int) -> Any:
    """Return the smaller of a size and a limit; the limit where the size is symbolic."""
    return size if known_at_most(size, limit) else limit
