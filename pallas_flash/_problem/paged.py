"""`PagedProblem`: a checked call of `paged_attention`, and the work tiles of its kernel.

Request r has n_r = cu_seqlens_q[r + 1] - cu_seqlens_q[r] queries, its last tokens, and
lengths[r] keys. Its key at position j is at

    page_indices[r, j // page_size], j % page_size

A row is a query of one of the G query heads that share keys: row n * G + g of a request is query n
of head g of the group. A row tile is a block of rows of one request, and a work tile is a row tile
with a range of key tiles. All of this is computed from traced arrays, and all shapes are known.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash._problem import blocks
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.masks import STATIC, Band, Lengths, Mask
from pallas_flash._problem.problem import Problem, Sizes, may_be_large
from pallas_flash._problem.scores import Scores
from pallas_flash._problem.traversal import Sparsity, in_tile, split


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
    """The tokens and the pages of R requests.

    Attributes:
        lengths: int32 [R], the keys of each request.
        page_indices: int32 [R, pages of a request].
        cu_seqlens_q: int32 [R + 1], the first new token of each request, and the last one's
            end; None if each request has `max_tokens`. Whatever depends on it alone is then a NumPy
            array, which no kernel of XLA computes.
        tokens: the room for new tokens of all requests.
        max_tokens: a number of new tokens that no request exceeds.
        num_pages: the pages of the cache.
        page_size: the keys of a page.
    """

    lengths: Any
    page_indices: Any
    cu_seqlens_q: Any
    tokens: int = dataclasses.field(metadata=STATIC)
    max_tokens: int = dataclasses.field(metadata=STATIC)
    num_pages: int = dataclasses.field(metadata=STATIC)
    page_size: int = dataclasses.field(metadata=STATIC)

    @property
    def count(self) -> int:
        return self.lengths.shape[0]

    @property
    def room(self) -> int:
        """The keys of a request at most."""
        return self.page_indices.shape[1] * self.page_size

    @property
    def starts(self) -> Any:
        """`cu_seqlens_q`, moved to where they count up and are inside of the tokens."""
        if self.cu_seqlens_q is None:
            return np.arange(self.count + 1, dtype=np.int32) * np.int32(self.max_tokens)
        return lax.cummax(jnp.clip(self.cu_seqlens_q, 0, self.tokens))

    @property
    def new(self) -> Any:
        """The new tokens of each request, int32 [R]."""
        starts = self.starts
        return _namespace(starts).minimum(starts[1:] - starts[:-1], np.int32(self.max_tokens))

    @property
    def offset(self) -> jax.Array:
        """The position of the first new token of each request, int32 [R]; it may be negative."""
        return jnp.clip(self.lengths, 0, self.room) - self.new

    def places(self) -> tuple[Any, Any, Any]:
        """Return the request of each token, its number there, and if it has any; [tokens]."""
        starts, token = self.starts, np.arange(self.tokens, dtype=np.int32)
        request = _namespace(starts).minimum(_owner(starts[1:], token), np.int32(self.count - 1))
        number = token - starts[request]
        return request, number, (number >= 0) & (number < self.new[request])

    def positions(self) -> tuple[Any, jax.Array, Any]:
        """Return the request and the position of each token, and if it has any; [tokens].

        A position is negative where a request has more new tokens than its length, and goes on
        beyond the pages.
        """
        request, number, exists = self.places()
        return request, (jnp.maximum(self.lengths, 0) - self.new)[request] + number, exists

    def page_of(self, request, position):
        """Return the pages of positions of requests, as the table has them."""
        column = lax.div(position, jnp.int32(self.page_size))
        return self.page_indices[request, jnp.clip(column, 0, self.page_indices.shape[1] - 1)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedProblem(Sizes):
    """A checked call of `paged_attention`. Its `batch` elements are requests.

    Attributes:
        query: [tokens, N, H], the queries of the first request first.
        key_pages: [P, page_size, K, H], in the dtype of `query` or quantised.
        value_pages: [P, page_size, K, V], in one of these dtypes.
        key_scales: float32 [P, K, page_size], or [K], of quantised keys; else None.
        value_scales: the same of values.
        requests: the requests.
        scale: float32 (float64 for float64 inputs) scalar, not negative.
        sinks: as in `Problem`.
        slopes: as in `Problem`.
        left: the keys that a query sees before its own; None for all.
        soft_cap: bound of the scores.
        precision: the argument of `lax.dot_general`.
        any_scale: whether `scale` may be larger than 1.
        batch_invariant: as in `Problem`.
    """

    query: Any
    key_pages: Any
    value_pages: Any
    key_scales: Any
    value_scales: Any
    requests: Requests
    scale: Any
    sinks: Any
    slopes: Any
    left: int | None = dataclasses.field(metadata=STATIC)
    soft_cap: float | None = dataclasses.field(metadata=STATIC)
    precision: Any = dataclasses.field(metadata=STATIC)
    any_scale: bool = dataclasses.field(metadata=STATIC)
    batch_invariant: bool = dataclasses.field(default=False, metadata=STATIC)

    # A `Problem` may have these.
    bias: ClassVar[None] = None
    dropout: ClassVar[None] = None
    max_logits: ClassVar[bool] = False
    split_output: ClassVar[bool] = False

    @property
    def batch(self) -> int:
        return self.requests.count

    @property
    def tokens(self) -> int:
        return self.query.shape[0]

    @property
    def q_len(self) -> int:
        """The queries of a request at most."""
        return self.requests.max_tokens

    @property
    def kv_len(self) -> int:
        """The keys of a request at most."""
        return self.requests.room

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.key_pages.shape[2]

    @property
    def head_dim(self) -> int:
        return self.query.shape[2]

    @property
    def value_dim(self) -> int:
        return self.value_pages.shape[3]

    @property
    def dtype(self) -> Any:
        return self.query.dtype

    @property
    def accumulator_dtype(self) -> Any:
        return np.promote_types(self.dtype, np.float32)

    @property
    def mask(self) -> Mask:
        """Causal, aligned at the last key of each request."""
        return Mask((self.band(self.requests.offset),))

    def band(self, offset) -> Band:
        """Return the band of queries whose first position is `offset`."""
        return Band(None if self.left is None else -self.left, 0, offset)

    @property
    def scores(self) -> Scores:
        """The terms of the scores."""
        offset = None if self.slopes is None else self.requests.offset
        return Scores(slopes=self.slopes, offset=offset, soft_cap=self.soft_cap)

    @property
    def large(self) -> bool:
        """As in `Problem`."""
        return may_be_large(self.scores, any_scale=self.any_scale)

    def dense(self) -> Problem:
        """Return the same call for contiguous keys and padded queries, [R, max_tokens, N, H].

        It has the wide dtype, in which quantised keys and values are exact.
        """
        requests = self.requests
        request = jnp.arange(self.batch, dtype=jnp.int32)[:, None]
        number = jnp.arange(self.q_len, dtype=jnp.int32)[None]
        token = jnp.clip(requests.starts[:-1, None] + number, 0, self.tokens - 1)
        position = jnp.arange(self.kv_len, dtype=jnp.int32)[None]
        page = jnp.clip(requests.page_of(request, position), 0, requests.num_pages - 1)
        row = position % requests.page_size

        def gathered(pages, scales):
            x = pages[page, row].astype(self.accumulator_dtype)
            if scales is None:
                return x
            return x * (scales if scales.ndim == 1 else scales[page, :, row])[..., None]

        return Problem(
            query=self.query[token].astype(self.accumulator_dtype),
            key=gathered(self.key_pages, self.key_scales),
            value=gathered(self.value_pages, self.value_scales),
            scale=self.scale,
            bias=None,
            sinks=self.sinks,
            slopes=self.slopes,
            score_operands=(),
            mask=self.mask & Lengths(jnp.asarray(requests.new), None),
            rest_of_scores=dataclasses.replace(self.scores, slopes=None),
            precision=self.precision,
            any_scale=self.any_scale,
        )


AnyProblem = Problem | PagedProblem


class RowTiles(NamedTuple):
    """The row tiles of a call, and their key tiles. Tiles that do not exist have no rows.

    Attributes:
        block: rows of a tile.
        first_tile: the number of each request's first tile, int32 [R]; rows / block follow.
        request: int32 [tiles].
        first_row: the first row of each tile in its request, int32 [tiles].
        num_rows: the rows of the request, int32 [tiles].
        ranges: the key tiles that it visits, int32 [tiles, 4], as `_problem.traversal.visit` takes
        them.
    """

    block: int
    first_tile: Any
    request: Any
    first_row: Any
    num_rows: Any
    ranges: Any

    @classmethod
    def from_problem(
        cls, p: PagedProblem, block: int, kv: Tiling, rows=(0, None), groups: int | None = None
    ) -> "RowTiles":
        """Return the tiles of the requests that have more than rows[0] and at most rows[1] rows.

        A query has a row for each of `groups` heads, by default for all that share keys.
        """
        (more_than, at_most), groups = rows, groups or p.groups
        total, most = p.tokens * groups, p.q_len * groups
        at_most = most if at_most is None else min(at_most, most)
        requests = min(p.batch, total // (more_than + 1))
        # Three bounds: by requests, by tokens, and by rows with a ragged tile for each request.
        by_rows = (total + requests * (block - 1)) // block
        by_requests, by_tokens = requests * -(-at_most // block), p.tokens * -(-groups // block)
        tile = np.arange(min(by_requests, by_tokens, by_rows), dtype=np.int32)

        num_rows = p.requests.new * np.int32(groups)
        xp = _namespace(num_rows)
        num_rows = xp.where((num_rows > more_than) & (num_rows <= at_most), num_rows, np.int32(0))
        tiles = _div(num_rows + np.int32(block - 1), block)
        stops = _cumulative(tiles)
        owner = _owner(stops, tile)
        request = xp.minimum(owner, np.int32(p.batch - 1))
        first_row = (tile - (stops - tiles)[request]) * np.int32(block)
        num_rows = xp.where(owner < p.batch, num_rows[request], np.int32(0))

        ranges = _ranges(p, kv, request, first_row, num_rows, block, groups)
        return cls(block, stops - tiles, request, first_row, num_rows, ranges)

    def slices(self, p: PagedProblem, kv: Tiling, count: int) -> jax.Array:
        """Return the ranges of `count` slices of each tile, int32 [tiles, count, 4].

        The rows of these tiles are queries.
        """
        block, tiles = self.block // count, len(self.first_row)
        tile, number = np.divmod(np.arange(tiles * count, dtype=np.int32), np.int32(count))
        request, first_row, num_rows = (x[tile] for x in self[2:5])
        ranges = _ranges(p, kv, request, first_row + number * block, num_rows, block, 1)
        return ranges.reshape(tiles, count, 4)

    def work(self, p: PagedProblem, count: int, splits: int, least: int) -> "Work":
        """Return `count` work tiles: each row tile's key tiles in nearly equal splits.

        Args:
            p: the call.
            count: work tiles, at least row tiles + `splits`.
            splits: the number of work tiles among which all key tiles are divided.
            least: key tiles of a work tile at least, where there are enough.
        """
        visits = self.ranges[:, 3] - self.ranges[:, 0]
        total = jnp.sum(visits, dtype=jnp.int32)
        share = jnp.maximum(least, lax.div(total + (splits - 1), jnp.int32(splits)))
        splits_of = lax.div(visits + share - 1, share)
        stops = _cumulative(splits_of)
        number = jnp.arange(count, dtype=jnp.int32)
        owner = _owner(stops, number)
        tile = jnp.minimum(owner, len(visits) - 1)
        ranges: Any = split(
            tuple(self.ranges[tile].T),
            number - (stops - splits_of)[tile],
            jnp.maximum(splits_of[tile], 1),
            Sparsity.RANGES,
        )
        known = self.request, p.requests.starts[self.request], self.first_row, self.num_rows
        columns = *(jnp.asarray(x)[tile] for x in known), *ranges
        exists = (owner < len(visits))[:, None]
        table = jnp.where(exists, jnp.stack(columns, axis=1), 0)
        return Work(table, stops - splits_of, splits_of)

    def tile_of_rows(self, p: PagedProblem) -> tuple[Any, Any, Any]:
        """Return the tile of each row [tokens * G], the row's number there, and if it has any."""
        request, number, exists = p.requests.places()
        xp, block = _namespace(number), self.block
        row = number[:, None] * np.int32(p.groups) + np.arange(p.groups, dtype=np.int32)[None]
        tile = self.first_tile[request][:, None] + _div(row, block)
        inside = xp.clip(tile, 0, np.int32(len(self.request) - 1))
        mine = (self.request[inside] == request[:, None]) & (self.num_rows[inside] > 0)
        exists = exists[:, None] & mine
        row = row - _div(row, block) * np.int32(block)
        return inside.reshape(-1), row.reshape(-1), exists.reshape(-1)


def _ranges(p: PagedProblem, kv: Tiling, request, first_row, num_rows, block: int, groups: int):
    """Return the key tiles that blocks of rows visit, as `RowTiles.ranges`."""
    xp = _namespace(num_rows)
    last_row = xp.minimum(first_row + np.int32(block), num_rows) - np.int32(1)
    first, last = (_div(x, groups) for x in (first_row, last_row))
    outer = _OwnTiles(first, last, len(first_row))
    ranges = p.band(p.requests.offset[request]).kv_range(outer, kv)  # pyright: ignore[reportArgumentType]
    ranges = blocks.intersect([ranges], outer, kv)[:, 0]  # pyright: ignore[reportArgumentType]
    return jnp.where((first_row < num_rows)[:, None], ranges, 0)


class Work(NamedTuple):
    """Work tiles.

    Attributes:
        table: int32 [work tiles, 8]: the request, its first token, the tile's first row, the rows
            of the request (0 if the work tile does not exist), and the range of key tiles.
        first: the first work tile of each row tile, int32 [row tiles].
        count: the work tiles of each row tile, int32 [row tiles].
    """

    table: Any
    first: Any
    count: Any


class _OwnTiles:
    """Row tiles as `_problem.blocks` takes one side: each is the one tile of a batch element."""

    def __init__(self, first, last, count: int):
        self.first, self.last, self._count = first[:, None], last[:, None], count

    def filled(self, number: int):
        return jnp.full((self._count, 1), number, jnp.int32)


def _owner(stops, number):
    """Return how many of the sorted `stops` each number has passed, int32 [numbers]."""
    return (stops[None, :] <= number[:, None]).sum(axis=1, dtype=np.int32)


def _cumulative(x):
    """Return the sums of `x` up to each element. XLA fuses this, and has two kernels for cumsum."""
    n = np.arange(len(x))
    before = n[None, :] <= n[:, None]
    return _namespace(x).where(before, x[None, :], np.int32(0)).sum(axis=1, dtype=np.int32)


def _div(x, n: int):
    """Return x / n, rounded towards zero, for x of -1 or more."""
    return lax.div(x, jnp.int32(n)) if isinstance(x, jax.Array) else np.maximum(x, 0) // np.int32(n)


def _namespace(x) -> Any:
    """Return the module of an array: NumPy for what is known."""
    return np if isinstance(x, np.ndarray) else jnp


def key_place(kv_tile, block: int, page_size: int):
    """Return the column of the page table of a key tile, and the rows in that page.

    A tile that lies in one page has one column and its first row; any other one has a column and a
    row for each key.
    """
    if page_size % block == 0:
        tiles = np.int32(page_size // block)
        return lax.div(kv_tile, tiles), lax.rem(kv_tile, tiles) * block
    position = in_tile(kv_tile, block)
    return lax.div(position, np.int32(page_size)), lax.rem(position, np.int32(page_size))
