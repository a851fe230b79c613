"""The order in which a kernel visits the blocks that a mask leaves, given as ranges or lists.

A number is the number of a tile along the streamed side. Blocks are as in `_problem.blocks`.
"""

import enum

import jax
import jax.numpy as jnp
from jax import lax


def in_tile(number, block: int) -> jax.Array:
    """Return the positions of a tile, int32 [block]."""
    return number * block + lax.iota(jnp.int32, block)


class Sparsity(enum.Enum):
    """The form in which a kernel gets the blocks to visit."""

    DENSE = "all blocks, and each one is full"
    RANGES = "a range of blocks, with the full ones in a range within it"
    LISTS = "a list of numbers, with the full blocks first (block-sparse)"


def visit(ranges, step, carry, sparsity: Sparsity):
    """Run `carry = step(number, masked, carry)` over the full blocks, then over the partial ones.

    One loop serves the partial blocks on both sides of the full ones. A loop for each side could
    not be left out where that side seems statically empty: without a full block, the empty full
    range may lie at the other end.

    Args:
        ranges: start, full_start, full_stop, stop. For lists: the count of full blocks, the count
            of all blocks, and a function from an index of the list to a number.
        step: takes an int32 number, whether the mask must be applied (a Python bool), and the
            carry.
        carry: any pytree.
        sparsity: the form of `ranges`.
    """
    if sparsity is Sparsity.LISTS:
        full, count, number_at = ranges
        carry = lax.fori_loop(0, full, lambda i, c: step(number_at(i), False, c), carry)
        return lax.fori_loop(full, count, lambda i, c: step(number_at(i), True, c), carry)
    start, full_start, full_stop, stop = ranges
    carry = lax.fori_loop(full_start, full_stop, lambda n, c: step(n, False, c), carry)
    if sparsity is Sparsity.DENSE:
        return carry
    before = full_start - start

    def partial(i, carry):
        return step(jnp.where(i < before, start + i, full_stop - before + i), True, carry)

    return lax.fori_loop(0, before + stop - full_stop, partial, carry)


def edges_first(start, full_start, full_stop, stop):
    """Return the blocks of a range as a list with the partial ones first.

    The last block comes first. Under a causal mask the first queries of a query tile then see no
    key in the first blocks of the list, and see every key in the later ones. This is for kernels
    that issue work of the next block early, and need its number early.

    Returns:
        The count of partial blocks, the count of all blocks, and a function from an index of the
        list to a number.
    """
    after = stop - full_stop
    partial = after + full_start - start

    def number_at(i):
        of_partial = jnp.where(i < after, stop - 1 - i, start + i - after)
        return jnp.where(i < partial, of_partial, full_start - partial + i)

    return partial, stop - start, number_at


def listed_edges_first(full, count, number_at):
    """Return the results of `edges_first` for a list that has the full blocks first."""
    partial = count - full
    return partial, count, lambda i: number_at(jnp.where(i < partial, full + i, i - partial))


def split(ranges, split_index, splits, sparsity: Sparsity):
    """Return the ranges of one of `splits` nearly equal splits of the blocks, for `visit`."""

    def bounds(count):
        """Return the first block of this split, and the first one of the next split."""
        # lax.div rounds towards zero. jnp's division needs `sign`, which JAX does not lower under
        # every mesh.
        known = isinstance(count, int)
        small, rest = (
            divmod(count, splits) if known else (lax.div(count, splits), lax.rem(count, splits))
        )
        return [i * small + lax.min(i, rest) for i in (split_index, split_index + 1)]

    def between(low, x, high):
        return lax.min(lax.max(x, low), high)

    if sparsity is Sparsity.LISTS:
        full, count, number_at = ranges
        first, last = bounds(count)
        full_here = between(0, full - first, last - first)
        return full_here, last - first, lambda i: number_at(first + i)
    start, full_start, full_stop, stop = ranges
    first, last = (start + bound for bound in bounds(stop - start))
    return first, between(first, full_start, last), between(first, full_stop, last), last
