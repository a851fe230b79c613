"""The grid of kernels with a resident query tile: which programs run next to each other."""

from jax.experimental import pallas as pl

from pallas_flash._backends.triton.launch import table_operands
from pallas_flash._backends.triton.memory import padded
from pallas_flash._backends.triton.spec import KernelSpec
from pallas_flash._problem.masks import Mask
from pallas_flash._problem.problem import Extras, Problem

# Bytes of keys and values (or queries) that programs of different heads stream at the same time.
# They fit in the L2 cache of an A100 (40 MB) and of later GPUs beside everything else.
STREAMED_L2_BYTES = 32 * 2**20


def side_by_side(problem: Problem, mask: Mask, length: int) -> int:
    """Return how many key/value heads have their programs side by side in the grid.

    The result divides the number of key/value heads. Under a mask tiles differ in work. If one head
    came after the other, a heavy tile of the last head would start late, and most of the GPU would
    wait for it. But the L2 cache must hold what these heads stream, `length` positions of each.
    """
    p = problem
    if not mask:
        return 1
    streamed = length * (p.head_dim + p.value_dim) * p.dtype.itemsize
    counts = (n for n in range(p.num_kv_heads, 1, -1) if p.num_kv_heads % n == 0)
    return next((n for n in counts if n * streamed <= STREAMED_L2_BYTES), 1)


class QueryTiles:
    """The grid and the block specs of kernels with a resident query tile.

    Grid axes: query head of its group, key/value head of those side by side, query tile, the rest
    of the key/value head, batch element. Query heads that share keys and values are neighbours on
    the fastest axis, so that they meet in the L2 cache.
    """

    def __init__(self, problem: Problem, spec: KernelSpec, mask: Mask):
        p, count = problem, spec.q.count
        self.problem, self.spec = problem, spec
        self.heads = side_by_side(p, mask, p.kv_len)
        self.grid = (p.groups, self.heads, count, p.num_kv_heads // self.heads, p.batch)
        # Under a causal mask the last tiles have the most work. They start first, so that no heavy
        # tile is left over at the end.
        self.tile_of = (lambda i: count - 1 - i) if mask.later_rows_see_more else (lambda i: i)

    def index(self, g, k, i, outer, b):
        """Return the batch element, the query head and the tile of grid indices."""
        return b, self._kv_head(k, outer) * self.problem.groups + g, self.tile_of(i)

    def _kv_head(self, k, outer):
        return outer * self.heads + k

    def here(self):
        """Return the batch element, the query head and the tile of this program."""
        return self.index(*map(pl.program_id, range(5)))

    def operands(self, extras: Extras, table):
        """Return the operands after the common ones, see `table_operands`."""
        return table_operands(extras, table, self.index)

    def rows(self, width: int) -> pl.BlockSpec:
        """Return the spec of a tile of [B, T, N, width]."""

        def index(*ids):
            b, h, i = self.index(*ids)
            return b, i, h, 0

        return pl.BlockSpec((None, self.spec.q.block, None, padded(width)), index)

    def keys(self, width: int) -> pl.BlockSpec:
        """Return the spec of one head of [B, S, K, width]."""
        return pl.BlockSpec(
            (None, self.problem.kv_len, None, padded(width)),
            lambda g, k, i, outer, b: (b, 0, self._kv_head(k, outer), 0),
        )

    def row_statistic(self) -> pl.BlockSpec:
        """Return the spec of a tile of [B, N, T]."""
        return pl.BlockSpec((None, None, self.spec.q.block), self.index)
