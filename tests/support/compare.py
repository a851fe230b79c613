"""Whether two trees of arrays agree."""

import jax
import jax.numpy as jnp
import numpy as np


def assert_close(got, want, *, tolerance: float | None = None, dtypes: bool = True):
    """Assert that structures and shapes are the same, and numbers close in the L2 norm.

    Args:
        got: what is judged.
        want: what it should be; where this is infinite, `got` has the same.
        tolerance: the relative error; by default half of the digits of the less exact dtype agree.
        dtypes: whether dtypes must be the same, too.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype or not dtypes
        eps = max(float(jnp.finfo(z.dtype).eps) for z in (x, y))
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        x, y = x[finite], y[finite]
        assert np.linalg.norm(x - y) <= (tolerance or eps**0.5) * (np.linalg.norm(y) or 1.0)


def assert_same_bits(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)
