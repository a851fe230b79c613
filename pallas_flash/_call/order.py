"""The order of tokens in arrays that are divided over devices."""

import jax
import jax.numpy as jnp

from pallas_flash._problem.checks import at_least


def balanced_order(length: int, devices: int) -> jax.Array:
    """Return the order of tokens that gives the devices of a ring equal work under a causal mask.

    In order of position, the queries of the first device see few keys, and it waits for the last.
    Here the sequence is cut into 2 n chunks for n devices, and device i has chunks i and
    2 n - 1 - i. For 4 devices:

        device    0      1      2      3
        chunks   0 7    1 6    2 5    3 4

    Index every array that has a number for each token with this order, once, before the first
    layer: tokens, labels, segment ids. Pass `order[None]` as `query_positions` and
    `key_value_positions` of `attention`, and as the positions of rotary embeddings. Layers that
    compute each token alone need no change. `jnp.argsort(order)` is the inverse.

    Leave tokens in order of position for `context_parallelism="heads"`: all devices have the same
    work there, and more blocks are skipped.

    Args:
        length: tokens of the sequence, a multiple of 2 * devices.
        devices: the number of devices that share the sequence.

    Returns:
        int32 [length]: the position of the token that lies at each place.

    Raises:
        ValueError: the sequence does not divide, or an argument is no int of at least 1.

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> order = pallas_flash.masks.balanced_order(8, 2)
        >>> order
        Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
        >>> x = jnp.arange(8.0).reshape(1, 8, 1, 1)
        >>> moved, where = x[:, order], order[None]
        >>> y = pallas_flash.attention(moved, moved, moved, is_causal=True,
        ...                            query_positions=where, key_value_positions=where)
        >>> want = pallas_flash.attention(x, x, x, is_causal=True)
        >>> bool(jnp.allclose(y[:, jnp.argsort(order)], want, atol=1e-6))
        True
    """
    length, devices = at_least(1, "length", length), at_least(1, "devices", devices)
    if length % (2 * devices):
        raise ValueError(
            f"`length` must be a multiple of 2 * devices = {2 * devices}; got {length}. Add "
            "padding to the sequence."
        )
    chunks = jnp.arange(length, dtype=jnp.int32).reshape(2, devices, -1)
    early, late = chunks[0], chunks[1, ::-1]
    return jnp.stack([early, late], axis=1).reshape(length)
