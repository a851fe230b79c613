"""`merge`: attention over two sets of keys, from one call for each."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_flash._jax.one_device import divided_alike
from pallas_flash._problem.checks import array
from pallas_flash._problem.scores import LogSum


def merge(
    o: Float[Array, "*B T N V"],
    lse: Float[Array, "*B T N"],
    o2: Float[Array, "*B T N V"],
    lse2: Float[Array, "*B T N"],
) -> tuple[Array, Array]:
    """Return the attention of queries over two sets of keys, from a call for each set.

        lse = log(exp(lse_1) + exp(lse_2))      o = exp(lse_1 - lse) o_1 + exp(lse_2 - lse) o_2

    Both calls have the same queries and `return_lse=True`, and no key is in both. Cascades use it:
    one call for a prefix that all batch elements share, one for each element's own keys. All four
    arguments have gradients. More than two sets merge one after the other, in any order.

    A row without a key in one call (LSE -inf) has the other call's results, and a row without any
    key stays zero, with zero gradients. Pass `sinks` to one of the calls alone: they would count
    twice.

    Args:
        o: [B, T, N, V] or [T, N, V], the output of one call.
        lse: float32 [B, T, N] or [T, N], its LSE; float64 for outputs in float64.
        o2: the output of the other call, as `o`.
        lse2: its LSE, as `lse`.

    Returns:
        The output and the LSE over all keys, as one call with `return_lse=True` gives them.

    Raises:
        TypeError: an argument is not an array, or has another dtype.
        ValueError: shapes differ.

    Example:
        >>> import jax, jax.numpy as jnp, pallas_flash
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))
        >>> first, rest = (
        ...     pallas_flash.attention(q, k[:, x], v[:, x], return_lse=True)
        ...     for x in (slice(0, 5), slice(5, 16))
        ... )
        >>> o, lse = pallas_flash.merge(*first, *rest)
        >>> bool(jnp.allclose(o, pallas_flash.attention(q, k, v), atol=1e-5))
        True
    """
    named = {
        name: array(name, x) for name, x in (("o", o), ("lse", lse), ("o2", o2), ("lse2", lse2))
    }
    first = named["o"]
    if first.ndim not in (3, 4) or not jnp.issubdtype(first.dtype, jnp.floating):
        raise ValueError(
            "`o` must be an output [B, T, N, V] or [T, N, V] of `attention`; got "
            f"{first.dtype} of shape {first.shape}. Pass the first of what `return_lse=True` gives."
        )
    wide = np.promote_types(first.dtype, np.float32)
    for name, x in named.items():
        of_row = name.startswith("lse")
        shape, dtype = (first.shape[:-1], wide) if of_row else (first.shape, first.dtype)
        if x.shape != shape:
            raise ValueError(
                f"`{name}` must have shape {shape}, for `o` of shape {first.shape}; got {x.shape}. "
                "Give both calls the same queries, and reshape the results to one layout."
            )
        if x.dtype != dtype:
            raise TypeError(
                f"`{name}` must be {dtype} for `o` in {first.dtype}; got {x.dtype}. "
                + ("Use `return_lse`, not `return_residual`." * of_row or "Cast it to one dtype.")
            )
    o, lse, o2, lse2 = (divided_alike(x, first) for x in named.values())
    total, share, share2 = _joined(lse, lse2)
    o = share[..., None] * o.astype(wide) + share2[..., None] * o2.astype(wide)
    return o.astype(first.dtype), total


@jax.custom_jvp
def _joined(lse, lse2):
    """Return the LSE of both, and each one's share of the sum of weights."""
    rows = (
        LogSum(jnp.where(x > -jnp.inf, x, 0), jnp.where(x > -jnp.inf, 0.0, x)) for x in (lse, lse2)
    )
    total, share, share2 = LogSum.joined(*rows)
    return total.lse, share, share2


@_joined.defjvp
def _joined_jvp(primals, tangents):
    """Differentiate `_joined`; JAX's own rules would give NaN in rows without a key.

    d lse = share_1 dlse_1 + share_2 dlse_2      d share_i = share_i (dlse_i - d lse)
    """
    results = _joined(*primals)
    _, *shares = results
    moved = [jnp.where(x > -jnp.inf, dx, 0) for x, dx in zip(primals, tangents, strict=True)]
    total = shares[0] * moved[0] + shares[1] * moved[1]
    return results, (total, *(p * (dx - total) for p, dx in zip(shares, moved, strict=True)))
