"""The order in which a kernel visits the tiles that a mask leaves, as ranges or lists tell them."""

import enum

import jax
import jax.numpy as jnp
from jax import lax


def in_tile(tile, block: int) -> jax.Array:
    """int32 [block]: the positions of tile number `tile`."""
    return tile * block + lax.iota(jnp.int32, block)


class Edges(enum.Enum):
    """How a kernel meets tiles that need the mask."""

    NONE = "every tile is known to be full"
    APART = "a loop over the full tiles, then one over the others"
    LISTED = "the same for tiles whose numbers are listed"


def visit(ranges, step, carry, edges: Edges):
    """Runs `carry = step(tile, masked, carry)` over a range.

    The order of tiles does not matter to the sums. Where edges are apart a single loop serves both,
    because leaving one out where it seems statically empty loses tiles whenever the full run is
    empty and lies at the other end.

    Args:
        ranges: start, full_start, full_stop, stop; if listed, the number of full tiles, that of all
            tiles, and a function from a place in the list to the number of the tile there.
        step: takes an int32 tile number, whether the mask must be applied (a Python bool), and the
            carry.
        carry: any pytree.
        edges: how to meet them.
    """
    if edges is Edges.LISTED:
        full, count, tile_at = ranges
        carry = lax.fori_loop(0, full, lambda t, c: step(tile_at(t), False, c), carry)
        return lax.fori_loop(full, count, lambda t, c: step(tile_at(t), True, c), carry)
    start, full_start, full_stop, stop = ranges
    carry = lax.fori_loop(full_start, full_stop, lambda t, c: step(t, False, c), carry)
    if edges is Edges.NONE:
        return carry
    before = full_start - start

    def edge(t, carry):
        return step(jnp.where(t < before, start + t, full_stop - before + t), True, carry)

    return lax.fori_loop(0, before + stop - full_stop, edge, carry)


def edges_first(start, full_start, full_stop, stop):
    """The tiles of a range as a list: the number of edge tiles, that of all, and what is where.

    The last one comes first, and so back to the full ones: under a causal mask the first queries of
    a tile then see nothing until they see all that is left. For kernels that run ahead of
    themselves, and want to know the next tile early. The third is a function from a place in the
    list to the number of the tile there.
    """
    after = stop - full_stop
    edges = after + full_start - start

    def tile_at(i):
        edge = jnp.where(i < after, stop - 1 - i, start + i - after)
        return jnp.where(i < edges, edge, full_start - edges + i)

    return edges, stop - start, tile_at


def listed_edges_first(full, count, tile_at):
    """The same for listed tiles, of which the full ones are first in the list."""
    edges = count - full
    return edges, count, lambda i: tile_at(jnp.where(i < edges, full + i, i - edges))


def share(ranges, part, parts: int, edges: Edges):
    """What `visit` is given for one of `parts` nearly equal shares of the tiles of `ranges`."""

    def bounds(count):
        """The first tile of the share, and that of the next one."""
        # Rounded towards zero: jnp's division asks for signs, which JAX does not lower under every
        # mesh.
        known = isinstance(count, int)
        small, rest = (
            divmod(count, parts) if known else (lax.div(count, parts), lax.rem(count, parts))
        )
        return [i * small + lax.min(i, rest) for i in (part, part + 1)]

    def between(low, x, high):
        return lax.min(lax.max(x, low), high)

    if edges is Edges.LISTED:
        full, count, tile_at = ranges
        first, last = bounds(count)
        return between(0, full - first, last - first), last - first, lambda t: tile_at(first + t)
    start, full_start, full_stop, stop = ranges
    first, last = (start + bound for bound in bounds(stop - start))
    return first, between(first, full_start, last), between(first, full_stop, last), last
