"""`merge`: attention over several sets of keys, from one call for each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_flash._jax.one_device import divided_alike
from pallas_flash._problem.checks import array, describe
from pallas_flash._problem.scores import LogSum


def merge(
    *pairs: tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]],
) -> tuple[Array, Array]:
    """Return the attention of queries over several sets of keys, from a call for each set.

        lse = log(sum_i exp(lse_i))      o = sum_i exp(lse_i - lse) o_i

    All calls have the same queries and `return_lse=True`, and no key is in two of them. Cascades
    use it: one call for a prefix that all batch elements share, one for each element's own keys.
    Outputs and LSEs have gradients. The result is such a pair, too: sets may merge in any order,
    at once or one after the other.

    A row without a key in one call (LSE -inf) has the results of the other calls, and a row without
    any key stays zero, with zero gradients. Pass `sinks` to one of the calls alone: they would
    count twice.

    Args:
        *pairs: (output, LSE) of each call, as `attention` and `paged_attention` return them: the
            output [B, T, N, V] or [T, N, V], and the LSE [B, T, N] or [T, N], in float32 (float64
            for outputs in float64).

    Returns:
        The output and the LSE over all keys, as one call with `return_lse=True` gives them.

    Raises:
        TypeError: a pair is no pair of arrays, or one has another dtype.
        ValueError: shapes differ.

    Example:
        >>> import jax, jax.numpy as jnp, pallas_flash
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))
        >>> first, rest = (
        ...     pallas_flash.attention(q, k[:, x], v[:, x], return_lse=True)
        ...     for x in (slice(0, 5), slice(5, 16))
        ... )
        >>> o, lse = pallas_flash.merge(first, rest)
        >>> bool(jnp.allclose(o, pallas_flash.attention(q, k, v), atol=1e-5))
        True
    """
    outputs, lses = zip(*_checked(pairs), strict=True)
    first = outputs[0]
    outputs, lses = ([divided_alike(x, first) for x in xs] for xs in (outputs, lses))
    total, shares = _joined(lses)
    weighted = (
        share[..., None] * o.astype(total.dtype) for share, o in zip(shares, outputs, strict=True)
    )
    return functools.reduce(jnp.add, weighted).astype(first.dtype), total


def _checked(pairs) -> list[list[jax.Array]]:
    """Return outputs and LSEs as arrays; raise unless they are of calls with the same queries."""
    if not pairs:
        raise TypeError(
            "`pairs` must be (output, LSE) of one call or more; got none. Write "
            "`merge(*[attention(..., return_lse=True), ...])`."
        )
    checked = []
    for i, pair in enumerate(pairs):
        if isinstance(pair, (tuple, list)) and all(isinstance(x, (tuple, list)) for x in pair):
            raise TypeError(
                f"`pairs` must be arguments of their own; got {type(pair).__name__} of "
                f"{len(pair)} pairs. Write `merge(*pairs)`."
            )
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"`pairs[{i}]` must be a pair (output, LSE); got {describe(pair)}. Pass what a "
                "call with `return_lse=True` returns, without `*` before it."
            )
        checked.append([array(f"pairs[{i}][{j}]", x) for j, x in enumerate(pair)])
    first = checked[0][0]
    if first.ndim not in (3, 4) or not jnp.issubdtype(first.dtype, jnp.floating):
        raise ValueError(
            "`pairs[0][0]` must be an output [B, T, N, V] or [T, N, V] of `attention`; got "
            f"{first.dtype} of shape {first.shape}. Pass the first of what `return_lse=True` gives."
        )

    def same(name, x, shape, dtype, advice):
        if x.shape != shape:
            raise ValueError(
                f"`{name}` must have shape {shape}, for a first output of shape {first.shape}; got "
                f"{x.shape}. Give all calls the same queries, and reshape the results to one "
                "layout."
            )
        if x.dtype != dtype:
            raise TypeError(
                f"`{name}` must be {dtype} for a first output in {first.dtype}; got {x.dtype}. "
                f"{advice}"
            )

    wide = np.promote_types(first.dtype, np.float32)
    for i, (o, lse) in enumerate(checked):
        same(f"pairs[{i}][0]", o, first.shape, first.dtype, "Cast it to one dtype.")
        advice = "Use `return_lse`, not `return_residual`."
        same(f"pairs[{i}][1]", lse, first.shape[:-1], wide, advice)
    return checked


@jax.custom_jvp
def _joined(lses):
    """Return the LSE of all, and each one's share of the sum of weights."""
    # As m, since an LSE may be too large to keep what l_log2 adds.
    keys = [lse != -jnp.inf for lse in lses]
    sums = [
        LogSum(jnp.where(has_keys, lse, 0), jnp.where(has_keys, 0.0, -jnp.inf).astype(lse.dtype))
        for lse, has_keys in zip(lses, keys, strict=True)
    ]
    total, *shares = LogSum.joined(*sums)
    return total.lse, shares


@_joined.defjvp
def _joined_jvp(primals, tangents):
    """Differentiate `_joined`; JAX's own rules would give NaN in rows without a key.

    d lse = sum_i share_i dlse_i      d share_i = share_i (dlse_i - d lse)
    """
    ((lses,), (moved,)) = primals, tangents
    results = _joined(lses)
    _, shares = results
    moved = [jnp.where(x > -jnp.inf, dx, 0) for x, dx in zip(lses, moved, strict=True)]
    total = functools.reduce(jnp.add, (p * dx for p, dx in zip(shares, moved, strict=True)))
    return results, (total, [p * (dx - total) for p, dx in zip(shares, moved, strict=True)])
