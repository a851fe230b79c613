"""What the kernels of the backward share: the steps of a program, and what they are given."""

import jax.numpy as jnp
from jax import lax

from pallas_flash._masks import Tiling
from pallas_flash._mosaic import common, ptx
from pallas_flash._problem import Problem

plgpu = common.plgpu

# The most key/value heads that have their programs side by side: as many as were measured.
SIDE_BY_SIDE = 32


class Steps:
    """The tiles that stream past a program: those of its range, for one head after another.

    Args:
        ranges_ref: a range for each tile that stays.
        tile: the one that stays.
        flow: the side that streams.
        masked: whether there is a mask.
        heads: how many heads stream.
    """

    def __init__(self, ranges_ref, tile, flow: Tiling, *, masked: bool, heads: int = 1):
        self._flow, self._masked, self._heads = flow, masked, heads
        if masked:
            start, self._full_start, self._full_stop, stop = (
                plgpu.load(ranges_ref.at[tile, i]) for i in range(4)
            )
            self._start = jnp.minimum(start, flow.count - 1)
            self._each = stop - self._start
        else:
            self._start, self._each = 0, jnp.int32(flow.count)
        # At least one, which is masked if there is none to do: for a loop that may be empty, the
        # compiler keeps sums twice, and has not the registers.
        self.count = jnp.maximum(self._each * heads, 1)

    def _split(self, j):
        if self._heads == 1:
            return 0, self._start + j
        each = jnp.maximum(self._each, 1)
        return lax.div(j, each), self._start + lax.rem(j, each)

    def at(self, j):
        """The head, counted from the program's first, and the first position of step j."""
        head, tile = self._split(j)
        return head, tile * self._flow.block

    def masked(self, j):
        """Whether its tile needs the mask."""
        if not self._masked:
            return False
        _, tile = self._split(j)
        return (tile < self._full_start) | (tile >= self._full_stop)


def column(ref, shape):
    """One number a query, where queries are columns, as a tile."""
    return common.along_columns(plgpu.load(ref, layout=ptx.COLUMN), shape)


def operands(problem: Problem, do, lse_log2, delta, length: int) -> tuple:
    """What all kernels are given: c, scale, q, k, v, do, lse_log2, delta.

    All of them begin with an axis of examples. The last two have `length` queries: where none
    exists, and where one sees nothing, it has no weights by an LSE of inf, and needs no mask.
    """
    p = problem
    padding = (0, 0), (0, 0), (0, length - p.q_len)
    lse_log2 = jnp.where(lse_log2 == -jnp.inf, jnp.inf, lse_log2)
    return (
        common.factor(p),
        jnp.broadcast_to(p.scale.astype(jnp.float32), (p.batch,)),
        *map(common.copyable, (p.query, p.key, p.value, do.astype(p.dtype))),
        jnp.pad(lse_log2, padding, constant_values=jnp.inf),
        jnp.pad(delta, padding),
    )


def side_by_side(num_kv_heads: int) -> int:
    """How many key/value heads have their programs side by side, a divisor of their number.

    Programs of one head start at the same tiles: many at a time would read from one place of
    memory, and those of one pass add to one place. Timed on an H100, in one pass: with one head at
    a time twice as long at 2048 tokens, and at 8192 1.8 times at head size 64; 8 take as long as
    32.
    """
    return max(n for n in range(1, SIDE_BY_SIDE + 1) if num_kv_heads % n == 0)
