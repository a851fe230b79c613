"""Which keys are visible to any query, and which rows have keys: analysis of a whole mask.

A padding token may hold NaN, and 0 * NaN is NaN. So implementations ask for the keys that no query
sees and for the rows without a key, and replace these by zeros.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.mask_leaves import BlockLeaf
from pallas_flash._problem.masks import FAR, Mask

# Pairs for which a mask is evaluated at a time, where only a look at all pairs decides: 32 MB.
PAIRS_AT_ONCE = 2**25


def visible_keys(mask: Mask, shape: tuple[int, int, int, int], positions=None):
    """Return which keys are visible to any query, bool [1 or B, 1 or N, keys].

    Args:
        mask: the mask.
        shape: B, N, T and S.
        positions: int32, the keys that are asked for; None asks for all of them.

    Returns:
        None if every key is known to be visible.
    """
    return _not_empty(mask, shape, 2, positions)


def rows_with_keys(mask: Mask, shape: tuple[int, int, int, int]):
    """Return which queries see any key, bool [1 or B, 1 or N, T]; None if all are known to."""
    return _not_empty(mask, shape, 3)


def _not_empty(mask: Mask, shape, others: int, positions=None):
    *_, q_len, kv_len = shape
    if mask.sees_diagonal and q_len == kv_len:
        return None
    rest, tables = [], []
    for leaf in mask.leaves:
        is_table = isinstance(leaf, BlockLeaf) and leaf.mask is None
        (tables if is_table else rest).append(leaf)
    if len(tables) > 1 or not all(leaf.exact_ranges for leaf in rest):
        return _evaluate_pairs(mask, shape, others, positions)
    rest = Mask(tuple(rest))
    ranges = rest.q_ranges if others == 2 else rest.kv_ranges
    bounds = ranges(Tiling(q_len, 1), Tiling(kv_len, 1))
    start, stop = bounds[..., 0], bounds[..., 3]
    some = tables[0].meets(start, stop, others) if tables else (start < stop)[:, None]
    if isinstance(some, np.ndarray) and some.all():
        return None
    return some if positions is None else jnp.asarray(some)[:, :, positions]


def _evaluate_pairs(mask: Mask, shape, others: int, positions=None):
    """Evaluate the mask for all pairs, some positions at a time against all others.

    An axis along which the mask does not vary has length 1.
    """
    kept, length = 5 - others, shape[5 - others]

    def along(axis, positions):
        return lax.expand_dims(positions, [i for i in range(4) if i != axis])

    def allowed(positions):
        at = [along(axis, lax.iota(jnp.int32, n)) for axis, n in enumerate(shape)]
        at[kept] = along(kept, positions)
        ok = mask.allowed(*at)
        # An array that broadcasts along every axis gives a scalar.
        return ok.reshape(*(1,) * (4 - ok.ndim), *ok.shape)

    if positions is not None:
        some = allowed(positions).any(axis=others)
        return jnp.broadcast_to(some, (*some.shape[:2], len(positions)))

    def of_block(first):
        # The last block repeats the last position where it overhangs.
        positions = jnp.minimum(first + lax.iota(jnp.int32, block), length - 1)
        some = allowed(positions).any(axis=others)
        return jnp.broadcast_to(some, (*some.shape[:2], block))

    pairs = math.prod(jax.eval_shape(allowed, lax.iota(jnp.int32, length)).shape)
    block = max(1, min(length, length * PAIRS_AT_ONCE // max(1, pairs)))
    # The barrier keeps XLA from computing the result while it compiles.
    first = lax.optimization_barrier(jnp.arange(0, length, block, dtype=jnp.int32))
    some = jnp.moveaxis(lax.map(of_block, first), 0, 2)
    return some.reshape(*some.shape[:2], -1)[:, :, :length]


def valid_lengths(mask: Mask, q_len: int, kv_len: int):
    """Return how many queries see a key, and how many keys are visible, each int32 [B] or [].

    None unless `Mask.has_valid_lengths`: other masks may hide tokens in the middle.
    """
    if not mask.has_valid_lengths:
        return None
    queries, keys, before, after = q_len, kv_len, FAR, FAR
    for leaf in mask.leaves:
        if leaf.lengths is not None:
            queries, keys = (
                n if x is None else jnp.clip(x, 0, n)
                for n, x in zip((queries, keys), leaf.lengths, strict=True)
            )
        elif leaf.window is not None:
            before = min(before, FAR if leaf.window.low is None else -leaf.window.low)
            after = min(after, FAR if leaf.window.high is None else leaf.window.high)
    # The last query that sees the last key stands `before` positions behind it, and vice versa.
    return (
        jnp.where(keys > 0, jnp.minimum(queries, keys + before), 0),
        jnp.where(queries > 0, jnp.minimum(keys, queries + after), 0),
    )
