"""The order in which a kernel visits the tiles that a mask leaves, given as ranges or lists."""

import enum

import jax
import jax.numpy as jnp
from jax import lax


def in_tile(tile, block: int) -> jax.Array:
    """Return the positions of tile number `tile`, int32 [block]."""
    return tile * block + lax.iota(jnp.int32, block)


class Sparsity(enum.Enum):
    """How the tiles to visit are given. Partial tiles need the mask, full tiles do not."""

    DENSE = "all tiles, and each one is full"
    RANGES = "a range of tiles, with the full ones in a range within it"
    LISTS = "a list of tile numbers, with the full ones first (block-sparse)"


def visit(ranges, step, carry, sparsity: Sparsity):
    """Run `carry = step(tile, masked, carry)` over the full tiles, then over the partial ones.

    One loop serves the partial tiles on both sides of the full ones. A loop for each side could not
    be left out where that side seems statically empty: if there is no full tile, the empty full
    range may lie at the other end.

    Args:
        ranges: start, full_start, full_stop, stop. Of lists: the number of full tiles, the number
            of all tiles, and a function from an index of the list to the tile number.
        step: takes an int32 tile number, whether the mask must be applied (a Python bool), and the
            carry.
        carry: any pytree.
        sparsity: how `ranges` gives the tiles.
    """
    if sparsity is Sparsity.LISTS:
        full, count, tile_at = ranges
        carry = lax.fori_loop(0, full, lambda t, c: step(tile_at(t), False, c), carry)
        return lax.fori_loop(full, count, lambda t, c: step(tile_at(t), True, c), carry)
    start, full_start, full_stop, stop = ranges
    carry = lax.fori_loop(full_start, full_stop, lambda t, c: step(t, False, c), carry)
    if sparsity is Sparsity.DENSE:
        return carry
    before = full_start - start

    def partial(t, carry):
        return step(jnp.where(t < before, start + t, full_stop - before + t), True, carry)

    return lax.fori_loop(0, before + stop - full_stop, partial, carry)


def edges_first(start, full_start, full_stop, stop):
    """Return the tiles of a range as a list with the partial ones first.

    The last tile comes first. Under a causal mask the first queries of a query tile then see no key
    in the first tiles of the list, and see every key in the later ones. This is for kernels that
    issue work of the next tile early, and need its number early.

    Returns:
        The number of partial tiles, the number of all tiles, and a function from an index of the
        list to the tile number.
    """
    after = stop - full_stop
    partial = after + full_start - start

    def tile_at(i):
        partial_tile = jnp.where(i < after, stop - 1 - i, start + i - after)
        return jnp.where(i < partial, partial_tile, full_start - partial + i)

    return partial, stop - start, tile_at


def listed_edges_first(full, count, tile_at):
    """Return the same three values for a list that has the full tiles first."""
    partial = count - full
    return partial, count, lambda i: tile_at(jnp.where(i < partial, full + i, i - partial))


def split(ranges, index, splits: int, sparsity: Sparsity):
    """Return the ranges of one of `splits` nearly equal splits of the tiles, as `visit` takes them.

    `index` is the number of the split.
    """

    def bounds(count):
        """Return the first tile of this split, and the first one of the next split."""
        # lax.div rounds towards zero. jnp's division needs `sign`, which JAX does not lower under
        # every mesh.
        known = isinstance(count, int)
        small, rest = (
            divmod(count, splits) if known else (lax.div(count, splits), lax.rem(count, splits))
        )
        return [i * small + lax.min(i, rest) for i in (index, index + 1)]

    def between(low, x, high):
        return lax.min(lax.max(x, low), high)

    if sparsity is Sparsity.LISTS:
        full, count, tile_at = ranges
        first, last = bounds(count)
        return between(0, full - first, last - first), last - first, lambda t: tile_at(first + t)
    start, full_start, full_stop, stop = ranges
    first, last = (start + bound for bound in bounds(stop - start))
    return first, between(first, full_start, last), between(first, full_stop, last), last
