"""What the kernels of the backward share: the steps of a program, and gradients of scores.

    p  = exp2(c * s - lse_log2)             c = scale * log2(e), see _scores for what else is in s
    ds = p * (dropout(dp) - delta)          through the derivative of the scores

Queries are the rows of a tile, or its columns.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._blocks import Tiling
from pallas_flash._dropout import drop, shrunk
from pallas_flash._masks import Mask
from pallas_flash._mosaic import common, pairs, ptx
from pallas_flash._mosaic.options import Options
from pallas_flash._problem import Problem
from pallas_flash._scores import LOG2E, LogSum

plgpu = common.plgpu

# The most key/value heads that have their programs side by side: as many as were measured.
SIDE_BY_SIDE = 32
NOTHING_STREAMS = pairs.InSlot()


@dataclasses.dataclass(frozen=True)
class Static(common.Static):
    """What a kernel knows when it is compiled.

    Attributes:
        table_shape: of `work.table`, if there is a mask.
        may_be_idle: whether there may be programs whose tile meets no other.
        q: the tiles of queries.
        num_heads: heads that have programs, or shares of them.
        side_by_side: how many of them have their programs side by side; of the last ones there may
            be fewer.
        ends: whether it is told how many queries and keys of each example there are, see `rows`.
        streams: what is copied of pairs.
    """

    table_shape: tuple[int, ...]
    may_be_idle: bool
    q: Tiling
    num_heads: int
    side_by_side: int
    ends: bool
    streams: pairs.Streams

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of those of `LogSum`."""
        return ("m", "lse") if self.options.large else ("lse",)

    def numbers_memory(self, slots: int, rows: int) -> dict[str, Any]:
        """For delta and the statistics of rows, in slots.

        The statistics share an array, because each array begins at a multiple of 1 KiB.
        """
        shapes = dict(delta_sm=(slots, rows), statistics_sm=(slots, len(self.statistics) * rows))
        return {name: plgpu.SMEM(shape, jnp.float32) for name, shape in shapes.items()}

    def numbers(self, memory, name: str, slot):
        """A slot of `numbers_memory`, for those of that name."""
        delta, statistics = (memory[x] for x in ("delta_sm", "statistics_sm"))
        if name == "delta":
            return delta.at[slot]
        rows = delta.shape[1]
        return statistics.at[slot, pl.ds(self.statistics.index(name) * rows, rows)]

    @property
    def _blocks(self) -> int:
        return -(-self.num_heads // self.side_by_side)

    def grid(self, examples: int, **tiles: int) -> dict[str, int]:
        """That of the kernel, for its tiles by name."""
        return dict(head=self.side_by_side, **tiles, outer=self._blocks * examples)

    def program(self, head, outer):
        """The example and the head of a program, from its indices in the grid."""
        head = common.remainder(outer, self._blocks) * self.side_by_side + head
        return common.quotient(outer, self._blocks), head

    def exists(self, head, condition):
        """The condition, of a program that has such a head."""
        if self.num_heads % self.side_by_side == 0:
            return condition
        return condition & (head < self.num_heads)

    def refs(self, names, refs) -> dict[str, Any]:
        """References by name, of which these are the last."""
        refs = list(refs)
        table = refs.pop(0) if self.masked else None
        shared = [refs.pop(0) for _ in self.options.leaves]
        streams = [refs.pop(0) for _ in range(self.streams.arrays)]
        inputs = ["q", "k", "v", "do", "delta", *self.statistics]
        if self.ends:
            inputs += ["seen_q", "seen_kv"]
        named = dict(zip([*inputs, *names], refs, strict=True))
        return named | dict(table=table, shared=shared, streams=streams)

    def copies(self, refs, memory, b, side: str, warpgroup=0):
        """A function that copies an example's rows, of `side` "q" those of q and do.

        Its arguments are a name, the head, the first row, where they go, and the barrier for who
        reads them, at which it arrives as often as `count_copies` says.
        With `ends`, rows behind them become zeros, for NaN may stand there and 0 * NaN is NaN:
        there this warpgroup waits for the copy, at its own one of the barriers `landed`, and then
        arrives in place of the copy.
        """
        seen = plgpu.load(refs[f"seen_{side}"].at[b]) if self.ends else 0

        def copy(name, h, first, place, full):
            strips, rows, width = place.shape
            source, at = refs[name], (b, pl.ds(first, rows), h)
            # From where, to where, and the strips of that.
            if len(source.shape) == 5:
                each = [place.at[i] for i in range(strips)]
                parts = [(source.at[at], place.transpose((1, 0, 2)), each)]
            else:
                columns = (common.block_of_columns(i, b, width) for i in range(strips))
                parts = [
                    (source.at[(*at, x)], place.at[i], [place.at[i]]) for i, x in enumerate(columns)
                ]

            def whole():
                for start, to, _ in parts:
                    plgpu.copy_gmem_to_smem(start, to, full)

            def cleaned():
                landed = memory["landed"].at[warpgroup]
                for start, to, each in parts:
                    plgpu.copy_gmem_to_smem(start, to, landed)
                    plgpu.barrier_wait(landed)
                    for strip in each:
                        ptx.zero_rows(strip, seen - first)
                    ptx.fence()
                    plgpu.barrier_arrive(full)

            if not self.ends:
                whole()
                return
            all_seen = first + rows <= seen
            pl.when(all_seen)(whole)
            pl.when(jnp.logical_not(all_seen))(cleaned)

        return copy

    def row(self, b, h, tile):
        """That of the table for a tile that stays."""
        batch, heads, count, _ = self.table_shape
        return ((b if batch > 1 else 0) * heads + (h if heads > 1 else 0)) * count + tile


def store(place, ref, at):
    """Starts the copies of a tile to device memory, to `at` but for the columns."""
    strips, _, width = place.shape
    if len(ref.shape) == 5:
        plgpu.copy_smem_to_gmem(place.transpose((1, 0, 2)), ref.at[at])
        return
    for i in range(strips):
        columns = common.block_of_columns(i, at[0], width)
        plgpu.copy_smem_to_gmem(place.at[i], ref.at[(*at, columns)])


class Steps:
    """The tiles that stream past a program, for one head after another.

    Args:
        static: the kernel's.
        table_ref: `work.table` with all its rows on one axis, if there is a mask.
        program: the program's example, its head and the tile that stays.
        flow: the side that streams.
        heads: how many heads stream.
        part: of a head's tiles, its number and how many there are; if more than one, of one head.
    """

    def __init__(
        self, static: Static, table_ref, program, flow: Tiling, heads: Any = 1, part=(0, 1)
    ):
        self._static, self._flow, self._heads, self._table_ref = static, flow, heads, table_ref
        self._may_be_idle, self._begin = static.may_be_idle, 0
        if not static.masked:
            self._each = each = jnp.int32(flow.count)
        else:
            self._row = static.row(*program)
            entry = [
                plgpu.load(table_ref.at[self._row, i]) for i in range(2 if self._listed else 4)
            ]
            if self._listed:
                self._full, each = entry
            else:
                start, self._full_start, self._full_stop, stop = entry
                self._start, each = jnp.minimum(start, flow.count - 1), stop - start
            self._some = each > 0
            # At least one: for a loop that may be empty, the compiler keeps sums twice, and has not
            # the registers.
            self._each = jnp.maximum(each, 1)
        self.count = self._each * heads
        part, parts = part
        if parts > 1:
            self._begin, end = (common.quotient(each * x, parts) for x in (part, part + 1))
            self._may_be_idle, self._some = True, end > self._begin
            self.count = jnp.maximum(end - self._begin, 1)

    def if_any(self, work, otherwise=lambda: None):
        """Runs `work()` if there are any, else `otherwise()`."""
        if not self._may_be_idle:
            work()
            return
        # In this order: the other one costs registers in `work`.
        pl.when(jnp.logical_not(self._some))(otherwise)
        pl.when(self._some)(work)

    @property
    def _listed(self) -> bool:
        return self._static.listed

    def _split(self, j):
        """The head, counted from the program's first, and the number of the tile of step j."""
        one = isinstance(self._heads, int) and self._heads == 1
        if one:
            head, i = 0, j + self._begin
        else:
            head, i = lax.div(j, self._each), lax.rem(j, self._each)
        if not self._static.masked:
            return head, i
        if self._listed:
            return head, plgpu.load(self._table_ref.at[self._row, 2 + i])
        return head, self._start + i

    def at(self, j):
        """The head and the first position of step j."""
        head, tile = self._split(j)
        return head, tile * self._flow.block

    def masked(self, j):
        """Whether its tile needs the mask."""
        if not self._static.masked:
            return False
        if self._listed:
            return lax.rem(j + self._begin, self._each) >= self._full
        _, tile = self._split(j)
        return (tile < self._full_start) | (tile >= self._full_stop)


class Tile:
    """A tile of pairs, in a kernel.

    Args:
        options: of its example.
        static: the kernel's.
        h: its query head.
        first_query: its first query.
        first_key: its first key.
        masked: whether it needs the mask.
        transposed: whether its rows are keys.
        in_slot: what streams, where rows are keys.
    """

    def __init__(
        self,
        options,
        static: Static,
        h,
        first_query,
        first_key,
        masked,
        *,
        transposed: bool,
        in_slot: pairs.InSlot = NOTHING_STREAMS,
    ):
        self._options, self._static, self._h, self._masked = options, static, h, masked
        self._in_slot = in_slot
        self._first = first_query, first_key
        self._transposed = transposed

    def _positions(self, shape):
        """Of queries and of keys. Computed wherever they are used: nothing is to keep them."""
        q, k = (1, 0) if self._transposed else (0, 1)
        first_query, first_key = self._first
        return ptx.positions(shape, q, first_query), ptx.positions(shape, k, first_key)

    def along(self, statistic, shape):
        """One number a query, as a tile."""
        along = common.along_columns if self._transposed else common.along_rows
        return along(statistic, shape)

    def weights(self, s, statistic):
        """The weights p for products s; their signs say whether dropout keeps them.

        Signs, because the compiler would keep a register for each answer. `statistic` takes a name
        to numbers of the queries; it is called late, for the registers that these take.
        """
        at, shape, in_slot = self._options, s.shape, self._in_slot
        in_slot.wait()
        with_bias = in_slot.with_bias(at)
        s, c, self._pull = with_bias.logits_vjp(s, self._h, lambda: self._positions(shape))

        def hidden(s):
            bits, positions = in_slot.masks(), self._positions(shape)
            return at.hide(s, self._h, *positions, bits=bits, transposed=self._transposed)

        if self._static.masked:
            s = lax.cond(self._masked, hidden, lambda s: s, s)
        in_slot.free()
        *m, l_log2 = (self.along(statistic(x), shape) for x in self._static.statistics)
        p = jnp.exp2((ptx.difference(s, m[0]) * LOG2E if m else s * c) - l_log2)
        kept = at.kept(shape, self._h, *self._first, transposed=self._transposed)
        return p if kept is None else jnp.where(kept, p, -p)

    @property
    def _drops(self) -> bool:
        return self._options.extras.dropout is not None

    def dropped(self, p):
        """Weights after dropout."""
        return jnp.maximum(p, 0.0) if self._drops else p

    def gradient(self, p, dp, delta):
        """The gradients ds, for `weights` and dp before dropout; delta is `shrunk`."""
        size, dp = (jnp.maximum(p, -p), drop(p > 0.0, dp)) if self._drops else (p, dp)
        ds = size * (dp - self.along(delta, p.shape))
        if self._pull is not None:
            ds = self._pull(ds)
        # With dropout there are no registers for that at head size 64: there an infinite dp shows.
        if not self._static.masked or (self._drops and self._pull is None and p.shape[1] > 64):
            return ds
        # Where a pair is not seen, dp may be infinite, and its score anything. A branch needs
        # registers for both its ways.
        if self._drops or self._pull is not None:
            return jnp.where(p == 0.0, 0.0, ds)
        return lax.cond(self._masked, lambda ds: ptx.where(p != 0.0, ds, 0.0), lambda ds: ds, ds)


def call_static(
    kind,
    problem: Problem,
    mask: Mask,
    shared,
    table,
    q: Tiling,
    kv: Tiling,
    *,
    transposed: bool = False,
    streams: pairs.Streams = NOTHING_STREAMS.streams,
    **others,
):
    """The `Static` of a call, for what `shared_arrays` and `work.table` returned."""
    known = isinstance(table, np.ndarray)
    return kind(
        options=Options.of(problem, shared, q, kv, transposed=transposed),
        masked=bool(mask),
        listed=mask.scattered,
        table_shape=table.shape,
        may_be_idle=not (known and not mask.scattered and (table[..., 0] < table[..., 3]).all()),
        q=q,
        kv=kv,
        groups=problem.groups,
        streams=streams,
        **others,
    )


def mask_for(problem: Problem, q: Tiling, kv: Tiling, seen) -> Mask:
    """The mask of a problem in the backward.

    Queries past the end need none: by their LSE they have no weights. Nor do those behind the ones
    that see something, see `rows`; so their number ends with a tile here. But they read a bias,
    which may be NaN where the last query sees nothing.
    """
    mask, exact = problem.mask, bool(problem.mask) and problem.bias is not None
    if seen is not None:
        queries, keys = seen
        queries = queries if exact else -(-queries // q.block) * q.block
        mask = mask.with_lengths(queries, keys)
    return mask.within(q=q if exact else None, kv=kv)


def operands(static: Static, shared, table, rows, streams=()) -> list:
    """Those of a kernel, as `Static.refs` names them."""
    tables = [jnp.asarray(table).reshape(-1, table.shape[-1])] if static.masked else []
    return [*tables, *static.options.operands(shared), *streams, *rows]


def rows(problem: Problem, do, log_sum: LogSum, delta, seen, length: int) -> tuple:
    """q, k, v and do, and delta and the statistics of `length` queries or more.

    Last comes `seen`, if it is there: int32 [B] each, how many queries see something and how many
    keys are seen, where these are the first ones; what is behind them may hold anything.

    A query that does not exist has no weights, by an LSE of inf; see `backward_preprocess`. Its
    maximum is inf, too: of the largest bias nothing less would be finite.
    """
    p, (m, l_log2) = problem, log_sum

    def padded(x, value):
        missing = max(0, length - x.shape[2])
        return jnp.pad(x, ((0, 0), (0, 0), (0, missing)), constant_values=value)

    return (
        *(p.query, p.key, p.value, do.astype(p.dtype)),
        padded(shrunk(p.dropout, delta), 0),
        *([] if m is None else [padded(m, jnp.inf)]),
        padded(l_log2, jnp.inf),
        *(seen or []),
    )


def in_strips(x, columns: int):
    """[B, T, N, H] as [B, T, N, strips, width], so that one copy takes all strips of a tile.

    As it is, if H is not the columns of a tile, but less.
    """
    if x.shape[3] != columns:
        return x
    return x.reshape(*x.shape[:3], -1, ptx.strip_width(columns, x.dtype))


def count_copies(rows, tiles) -> dict[str, int]:
    """How many take a tile of q, k, v or do to its place: one, or one for each strip.

    Args:
        rows: these arrays, and others.
        tiles: shared memory, by the names of references; None where no tile is.
    """
    places = zip(("q", "k", "v", "do"), rows, strict=False)
    return {
        name: 1 if len(x.shape) == 5 else tiles[f"{name}_sm"].shape[-3]
        for name, x in places
        if tiles[f"{name}_sm"] is not None
    }


def side_by_side(num_kv_heads: int) -> int:
    """How many key/value heads have their programs side by side, nearly as many each time.

    Programs of one head start at the same tiles: many at a time would read from one place of
    memory, and those of one pass add to one place. Timed on an H100, in one pass: with one head at
    a time twice as long at 2048 tokens, and at 8192 1.8 times at head size 64; 8 take as long as
    32.
    """
    times = -(-num_kv_heads // SIDE_BY_SIDE)
    return -(-num_kv_heads // times)
