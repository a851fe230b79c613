"""Parts of all kernels of the backward: a tile's scores and gradients, inner tiles, and copies.

    p  = exp2(c * s - lse_log2)             c = scale * log2(e), see `scores` for what else is in s;
                                            with m apart, exp2(c * s - m * log2(e) - lse_log2)
    ds = p * (dropout(dp) - delta)          through the derivative of the scores

A CTA keeps its outer tile, of keys or of queries, and walks over the inner tiles of the other side.
Queries are the rows of a tile of scores, or its columns where it is called transposed.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common, pairs, ptx
from pallas_flash._backends.mosaic.score_mask import Options
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.dropout import shrunk
from pallas_flash._problem.masks import Mask
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.scores import LOG2E, LogSum

plgpu = common.plgpu

# K/V heads whose CTAs are neighbours in the grid, at most, see `neighbours`.
MAX_NEIGHBOURS, MAX_NEIGHBOURS_IN_CLUSTERS = 32, 4
NO_STREAMS, NO_VIEW = pairs.Streams(), pairs.StageView()


# ------------------------------------------------------------------------------------------------
# Operands
# ------------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """The arrays that a launch reads; inside of its kernel, references to them.

    Attributes:
        q: [B, T, N, H], or [B, T, N, strips, width], see `in_strips`.
        k: [B, S, K, H], or in strips.
        v: [B, S, K, V], or in strips.
        do: [B, T, N, V], or in strips.
        delta: float32 [B, N, rows], divided by the factor of dropout, with rows of whole tiles.
        lse: float32 [B, N, rows], in base 2 (less m, if it is apart); inf for queries that do not
            exist, and in rows without keys.
        m: float32 [B, N, rows], the maximum where it is apart from the LSE; else None.
        valid_q: int32 [B], the number of rows with keys, where these come first; the others may
            hold anything. None if it is not known.
        valid_kv: int32 [B], the number of visible keys, where these come first, or None.
        center: float32 [B, K, H padded], a vector that keys have in common; None if they have none.
        is_centered: int32 [B, K], whether this vector is not zero.
        row_sums: float32 [B, N, rows], the sums of ds over a row; None if they are zero.
        table: int32, the rows of `scheduler.block_table`; None without a mask.
        turns: int32 [rows of the table, tiles of queries], how many CTAs add to a tile of dq before
            a CTA, where they do it in turn and there is a mask; else None.
        options: the arrays of `Options.operands`.
        streamed: the (q, k) arrays of which tiles are copied.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    delta: Any
    lse: Any
    m: Any = None
    valid_q: Any = None
    valid_kv: Any = None
    center: Any = None
    is_centered: Any = None
    row_sums: Any = None
    table: Any = None
    turns: Any = None
    options: Any = ()
    streamed: pairs.StreamedArrays = pairs.StreamedArrays()

    @classmethod
    def from_call(
        cls, problem: Problem, do, log_sum: LogSum, delta, valid, rows: int
    ) -> "Operands":
        """Return the operands of a call.

        A query that does not exist has an LSE of inf, and so no weights; see `preprocess`. Its
        maximum is inf, too: of the largest bias nothing less would be finite.

        Args:
            problem: the call.
            do: [B, T, N, V].
            log_sum: of float32 [B, N, T or more].
            delta: float32 [B, N, T or more].
            valid: `valid_q` and `valid_kv`, or None.
            rows: how many rows delta and the statistics have at least.
        """
        p, (m, l_log2, _) = problem, log_sum

        def padded(x, value):
            missing = max(0, rows - x.shape[2])
            return jnp.pad(x, ((0, 0), (0, 0), (0, missing)), constant_values=value)

        return cls(
            *(p.query, p.key, p.value, do.astype(p.dtype)),
            delta=padded(shrunk(p.dropout, delta), 0),
            lse=padded(l_log2, jnp.inf),
            m=None if m is None else padded(m, jnp.inf),
            **({} if valid is None else dict(valid_q=valid[0], valid_kv=valid[1])),
        )

    def launched(self, config: "BackwardConfig", shared, table, **streamed) -> "Operands":
        """Return them with what all CTAs read."""
        return self._replace(
            table=jnp.asarray(table).reshape(-1, table.shape[-1]) if config.masked else None,
            options=tuple(config.options.operands(shared)),
            **streamed,
        )


def in_strips(x, columns: int):
    """Return [B, T, N, H] as [B, T, N, strips, width], so that one copy takes a tile.

    Return it as it is if a tile has more than its H columns.
    """
    if x.shape[3] != columns:
        return x
    return x.reshape(*x.shape[:3], -1, ptx.strip_width(columns, x.dtype))


def mask_for(problem: Problem, q: Tiling, kv: Tiling, valid) -> Mask:
    """Return the mask of a problem in the backward.

    Queries past the end need none: by their LSE they have no weights. Nor do those behind the valid
    ones, see `Operands`; so the valid length is rounded up to whole tiles here. But they read a
    bias, which may be NaN where the last query sees nothing.
    """
    mask, exact = problem.mask, bool(problem.mask) and problem.bias is not None
    if valid is not None:
        queries, keys = valid
        queries = queries if exact else -(-queries // q.block) * q.block
        mask = mask.with_lengths(queries, keys)
    return mask.within(q=q if exact else None, kv=kv)


# ------------------------------------------------------------------------------------------------
# Shared memory
# ------------------------------------------------------------------------------------------------


def num_statistics(p: Problem) -> int:
    """Return how many statistics a row has: the maximum may be apart from the LSE."""
    return 2 if p.large else 1


def statistics(p: Problem, stages: int, rows: int):
    """Return the shared memory of all statistics: an array begins at a multiple of 1 KiB."""
    return plgpu.SMEM((stages, num_statistics(p) * rows), jnp.float32)


def copies_in_strips(dim: int, tiles) -> int:
    """Return how many copies take a tile of `in_strips`, of this head dim."""
    strips, _, width = tiles.shape[-3:]
    return 1 if dim == strips * width else strips


# ------------------------------------------------------------------------------------------------
# Configurations
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BackwardConfig(common.KernelConfig):
    """The configuration of a kernel of the backward, known at compile time.

    Attributes:
        table_shape: of `scheduler.block_table`, if there is a mask.
        may_be_idle: whether a CTA may have no inner tiles.
        q: the tiles of queries.
        num_heads: heads in the grid, or splits of heads.
        neighbours: how many of them are neighbours in the grid; of the last ones may be fewer.
        has_lengths: whether the kernel reads valid lengths, see `Operands`.
        streams: the (q, k) arrays of which tiles are copied.
    """

    table_shape: tuple[int, ...]
    may_be_idle: bool
    q: Tiling
    num_heads: int
    neighbours: int
    has_lengths: bool
    streams: pairs.Streams

    @classmethod
    def from_call(
        cls,
        problem: Problem,
        mask: Mask,
        shared,
        table,
        q: Tiling,
        kv: Tiling,
        *,
        transposed: bool = False,
        streams: pairs.Streams = NO_STREAMS,
        **others,
    ):
        """Return the configuration of a call, for its `shared_arrays` and its `block_table`.

        `others` are the fields of a subclass, and those that are not named here.
        """
        known = isinstance(table, np.ndarray) and not mask.scattered
        return cls(
            options=Options.from_problem(problem, shared, q, kv, transposed=transposed),
            masked=bool(mask),
            scattered=mask.scattered,
            table_shape=table.shape,
            may_be_idle=not (known and (table[..., 0] < table[..., 3]).all()),
            q=q,
            kv=kv,
            groups=problem.groups,
            streams=streams,
            **others,
        )

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics of `LogSum`, as in `Operands`."""
        return ("m", "lse") if self.options.large else ("lse",)

    def statistic(self, memory, name: str, stage):
        """Return a stage of one statistic in this memory."""
        rows = memory.shape[1] // len(self.statistics)
        return memory.at[stage, pl.ds(self.statistics.index(name) * rows, rows)]

    @property
    def _head_blocks(self) -> int:
        return -(-self.num_heads // self.neighbours)

    def grid(self, batch: int, **tiles: int) -> dict[str, int]:
        """Return the grid: neighbouring heads, tiles, and blocks of heads of each batch element."""
        return dict(head=self.neighbours, **tiles, outer=self._head_blocks * batch)

    def place(self, head, outer):
        """Return the batch element and the head of a CTA, by its indices in the grid."""
        head = common.remainder(outer, self._head_blocks) * self.neighbours + head
        return common.quotient(outer, self._head_blocks), head

    def exists(self, head, condition):
        """Return the condition, and whether there is such a head."""
        if self.num_heads % self.neighbours == 0:
            return condition
        return condition & (head < self.num_heads)

    def table_row(self, b, h, tile):
        """Return which row of the table belongs to an outer tile."""
        batch, heads, count, _ = self.table_shape
        return ((b if batch > 1 else 0) * heads + (h if heads > 1 else 0)) * count + tile


def neighbours(num_kv_heads: int, in_clusters: bool = False, masked_turns: bool = False) -> int:
    """Return how many K/V heads are neighbours in the grid, nearly equal numbers of them.

    CTAs of many heads at a time read and add to more memory than L2 holds. Without clusters,
    neighbours lie on the slowest axis of the grid, but in turn without a mask: CTAs of all tiles of
    one come before the next one's. Timed on an H100, one pass: without neighbours, where all heads
    run at a time, twice as long at 2048 tokens, and at 8192 1.8 times at head dim 64; 8 take as
    long as 32. Clusters have them on the fastest axis. At head dim 256, 4 take 0.5 to 1 times as
    long as 8, 16 or 32. In turn with a mask clusters have none, and one head follows another: its
    CTAs are at queries far apart then. On an H200, 4 took 1.28 times as long at 16384 causal
    tokens, and 1.03 times at 4096.
    """
    most = MAX_NEIGHBOURS
    if in_clusters:
        most = 1 if masked_turns else MAX_NEIGHBOURS_IN_CLUSTERS
    blocks = -(-num_kv_heads // most)
    return -(-num_kv_heads // blocks)


# ------------------------------------------------------------------------------------------------
# Copies
# ------------------------------------------------------------------------------------------------


class TileCopies:
    """Copies of tiles of rows from device memory to shared memory, for one batch element.

    Rows behind valid lengths become zeros, because NaN may stand there and 0 * NaN is NaN. A
    tile that has such rows is copied and cleaned by the calling warpgroup, which then arrives at
    the barrier as often as the copies would.

    Args:
        valid_length: reference to `valid_q` or `valid_kv`, or None.
        landed: the calling warpgroup's own barrier, used with valid lengths.
        b: the batch element.
    """

    def __init__(self, valid_length, landed, b):
        self._has_lengths, self._landed, self._b = valid_length is not None, landed, b
        self._valid = plgpu.load(valid_length.at[b]) if self._has_lengths else 0

    def start(self, source, h, first, tile, full, first_strip: int = 0):
        """Start the copies of a tile, one or one for each strip, which report to `full`."""
        strips, rows, width = tile.shape
        at = self._b, pl.ds(first, rows), h
        # The source, the destination and the strips of the destination of each copy.
        if len(source.shape) == 5:
            each = [tile.at[i] for i in range(strips)]
            copies = [(source.at[at], tile.transpose((1, 0, 2)), each)]
        else:
            numbers = range(first_strip, first_strip + strips)
            columns = (common.block_of_columns(i, self._b, width) for i in numbers)
            copies = [
                (source.at[(*at, x)], tile.at[i], [tile.at[i]]) for i, x in enumerate(columns)
            ]

        def whole():
            for source, destination, _ in copies:
                plgpu.copy_gmem_to_smem(source, destination, full)

        def cleaned():
            landed = self._landed
            for source, destination, strips in copies:
                plgpu.copy_gmem_to_smem(source, destination, landed)
                plgpu.barrier_wait(landed)
                for strip in strips:
                    ptx.zero_rows(strip, self._valid - first)
                ptx.fence()
                plgpu.barrier_arrive(full)

        if not self._has_lengths:
            whole()
            return
        all_valid = first + rows <= self._valid
        common.when(all_valid)(whole)
        common.when(jnp.logical_not(all_valid))(cleaned)


def store_tile(tile, ref, at):
    """Start the copies of a tile to device memory, to `at`, which is without the columns."""
    strips, _, width = tile.shape
    if len(ref.shape) == 5:
        plgpu.copy_smem_to_gmem(tile.transpose((1, 0, 2)), ref.at[at])
        return
    for i in range(strips):
        columns = common.block_of_columns(i, at[0], width)
        plgpu.copy_smem_to_gmem(tile.at[i], ref.at[(*at, columns)])


# ------------------------------------------------------------------------------------------------
# Inner tiles
# ------------------------------------------------------------------------------------------------


class InnerTiles:
    """The inner tiles of a CTA, for one head after another; step j of the CTA has tile j.

    Args:
        config: of the kernel.
        table_ref: `Operands.table`.
        outer: the batch element, the head and the number of the outer tile.
        inner: the tiles of the inner side.
        heads: how many heads these tiles are taken of.
        split: which split of them the CTA has, and how many there are; if several, of a head.

    Attributes:
        count: the number of steps, 1 at least: for a possibly empty loop the compiler keeps two
            copies of the accumulators, and spills. See `if_any`.
    """

    def __init__(
        self,
        config: BackwardConfig,
        table_ref,
        outer,
        inner: Tiling,
        heads: Any = 1,
        split=(0, 1),
    ):
        self._config, self._inner, self._heads, self._table_ref = config, inner, heads, table_ref
        self._may_be_idle, self._begin = config.may_be_idle, 0
        if not config.masked:
            self._each = each = jnp.int32(inner.count)
        else:
            self._row = config.table_row(*outer)
            entry = [
                plgpu.load(table_ref.at[self._row, i]) for i in range(2 if config.scattered else 4)
            ]
            if config.scattered:
                self._full, each = entry
            else:
                start, self._full_start, self._full_stop, stop = entry
                self._start, each = jnp.minimum(start, inner.count - 1), stop - start
            self._some = each > 0
            self._each = jnp.maximum(each, 1)
        self.count = self._each * heads
        number, splits = split
        if splits > 1:
            self._begin, end = (common.quotient(each * i, splits) for i in (number, number + 1))
            self._may_be_idle, self._some = True, end > self._begin
            self.count = jnp.maximum(end - self._begin, 1)

    def if_any(self, work, otherwise=lambda: None):
        """Run `work()` if there are any tiles, else `otherwise()`."""
        if not self._may_be_idle:
            work()
            return
        # In this order: the other one costs registers in `work`.
        common.when(jnp.logical_not(self._some))(otherwise)
        common.when(self._some)(work)

    def _head_and_tile(self, j):
        """Return the head, counted from the CTA's first, and the number of the tile of step j."""
        one = isinstance(self._heads, int) and self._heads == 1
        if one:
            head, i = 0, j + self._begin
        else:
            head, i = lax.div(j, self._each), lax.rem(j, self._each)
        if not self._config.masked:
            return head, i
        if self._config.scattered:
            return head, plgpu.load(self._table_ref.at[self._row, 2 + i])
        return head, self._start + i

    def place_of(self, j):
        """Return the head, counted from the CTA's first, and the first position of step j."""
        head, tile = self._head_and_tile(j)
        return head, tile * self._inner.block

    def masked(self, j):
        """Return whether the tile of step j is a partial block, to which the mask is applied."""
        if not self._config.masked:
            return False
        if self._config.scattered:
            return lax.rem(j + self._begin, self._each) >= self._full
        _, tile = self._head_and_tile(j)
        return (tile < self._full_start) | (tile >= self._full_stop)


# ------------------------------------------------------------------------------------------------
# Scores and their gradients
# ------------------------------------------------------------------------------------------------


class ScoreTile:
    """A tile of (q, k) pairs, in a kernel.

    Args:
        options: `ElementOptions` of its batch element.
        config: of the kernel.
        h: its query head.
        first_query: its first query.
        first_key: its first key.
        masked: whether the mask is applied.
        transposed: whether its rows are keys.
        view: what of it was copied to shared memory, where rows are keys.
    """

    def __init__(
        self,
        options,
        config: BackwardConfig,
        h,
        first_query,
        first_key,
        masked,
        *,
        transposed: bool,
        view: pairs.StageView = NO_VIEW,
    ):
        self._options, self._config, self._h, self._masked = options, config, h, masked
        self._view = view
        self._first = first_query, first_key
        self._transposed = transposed

    def _positions(self, shape):
        """Return queries and keys, computed wherever they are used: no register is to keep them."""
        q, k = (1, 0) if self._transposed else (0, 1)
        first_query, first_key = self._first
        return ptx.positions(shape, q, first_query), ptx.positions(shape, k, first_key)

    def along(self, statistic, shape):
        """Return a tile filled with one number for each query."""
        along = common.along_columns if self._transposed else common.along_rows
        return along(statistic, shape)

    def weights(self, s, statistic):
        """Return p for products s; the sign of a weight says whether dropout keeps it.

        Signs, because the compiler would keep a register for each answer. `statistic` takes a name
        to one number for each query; it is called late, because these take registers.
        """
        options, shape, view = self._options, s.shape, self._view
        view.wait()
        with_bias = view.with_bias(options)
        s, c, self._pull = with_bias.logits_vjp(s, self._h, lambda: self._positions(shape))

        def hidden(s):
            bits, positions = view.masks(), self._positions(shape)
            return options.hide(s, self._h, *positions, bits=bits, transposed=self._transposed)

        if self._config.masked:
            s = common.cond(self._masked, hidden, lambda s: s, s)
        view.release()
        *m, l_log2 = (self.along(statistic(x), shape) for x in self._config.statistics)
        p = jnp.exp2((ptx.difference(s, m[0]) * LOG2E if m else s * c) - l_log2)
        kept = options.kept(shape, self._h, *self._first, transposed=self._transposed)
        return p if kept is None else jnp.where(kept, p, -p)

    @property
    def _drops(self) -> bool:
        return self._options.extras.dropout is not None

    def dropped(self, p):
        """Return weights after dropout."""
        return jnp.maximum(p, 0.0) if self._drops else p

    def factors(self, p):
        """Return p times the derivative of scores; if there is none, the sign of dropout stays."""
        if self._pull is None:
            return p
        # Where a pair is not allowed, its score may be anything.
        return jnp.where(p == 0.0, 0.0, self._pull(jnp.abs(p) if self._drops else p))

    def gradient(self, p, dp, delta):
        """Return ds, for `weights` and for dp before dropout; delta is `shrunk`."""
        delta = self.along(delta, p.shape)
        # The form with dropout takes three instructions. To drop dp first would take four.
        ds = self.dropped(p) * dp - jnp.abs(p) * delta if self._drops else p * (dp - delta)
        if self._pull is not None:
            ds = self._pull(ds)
        # A known limit: with dropout and wide inner tiles the selection below would spill, so an
        # infinite dp of a pair that is not allowed reaches ds.
        if not self._config.masked or (self._drops and self._pull is None and p.shape[1] > 64):
            return ds
        # Where a pair is not allowed, dp may be infinite, and its score anything. A branch needs
        # registers for both its ways.
        if self._drops or self._pull is not None:
            return jnp.where(p == 0.0, 0.0, ds)
        return common.cond(self._masked, lambda ds: ptx.where(p != 0.0, ds, 0.0), lambda ds: ds, ds)
