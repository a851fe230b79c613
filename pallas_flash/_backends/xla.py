"""The kernels' algorithm in plain JAX: any device, any floating dtype, memory linear in T and S.

A query tile is resident, and tiles of keys and values are streamed. m, l and acc are the running
maximum, sum and output:

    s   = scores(scale * q @ k.T), masked
    m'  = max(m, rowmax(s))    p = exp(s - m')    alpha = exp(m - m')
    l   = alpha * l + rowsum(p)
    acc = alpha * acc + dropout(p) @ v

    at the end    o = acc / l    lse = m + log(l)    with a sink in both, if there is one

The backward recomputes the tiles of p = exp(s - lse), see `backward`. All batch elements and heads
of a tile are computed together, each product as one batched `a @ b` or `a @ b.T`, because on a CPU
`a.T @ b` takes several times as long. Letters of the einsums: b batch, k key/value head, g query
head of its group, t query, s key, h head dim of q and k, v head dim of v.

An export with a symbolic length has a symbolic number of tiles, to which the loops count.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash._jax.symbolic import is_symbolic, known_at_most, smaller
from pallas_flash._problem import key_center
from pallas_flash._problem.blocks import BlockClasses, Tiling, lists
from pallas_flash._problem.dropout import drop, kept, rescaled
from pallas_flash._problem.masks import Mask
from pallas_flash._problem.operands import Pairs, TileView, is_pairs
from pallas_flash._problem.problem import Gradients, Problem, SplitOutput, widened
from pallas_flash._problem.scores import LN2, LogSum, Scores, below, sinks_gradient, with_sink
from pallas_flash._problem.table_gradients import add_at, reads_of
from pallas_flash._problem.traversal import Sparsity, in_tile, visit

# Queries and keys of a tile on a CPU: enough for matrix products, and few enough that the scores of
# all heads fit in the cache. With few heads twice the queries fit.
BLOCK_Q, BLOCK_KV = 256, 256
FEW_HEADS = 4

# Queries and keys of a tile on a GPU, and scores of all batch elements and heads in it at most.
# Scores go through device memory there, so few large tiles are faster.
GPU_BLOCK, GPU_SCORES = 2048, 2**28


def forward(problem: Problem, *, on_gpu: bool = False):
    """Return the output [B, T, N, V] and a `LogSum` of [B, N, T] in float32 or float64.

    The output is a `SplitOutput` if the problem asks for one, here and in the other forwards.
    """
    p, blocks = problem, _Blocks(problem, on_gpu)
    ranges = blocks.kv_ranges()
    # The tiles [.., H, block_kv] are transposed once for all query tiles.
    keys_t = jnp.swapaxes(blocks.keys, -1, -2)

    def q_tile(i):
        q = _take(blocks.queries, i)

        def step(j, masked, carry):
            k_t, v = _take(keys_t, j), _take(blocks.values, j)
            qk = blocks.einsum("bkgth,bkhs->bkgts", q, k_t)
            tile = blocks.tile(i, j)
            s = p.scale * qk
            if p.scores:
                s = tile.scores.logits(s, *tile.at)
            if masked:
                ok = tile.allowed()
                s = jnp.where(ok, s, -jnp.inf)
                # Zero where no query sees the key, because 0 * NaN is NaN.
                v = jnp.where(ok.any(axis=(2, 3))[..., None], v, 0)
            # Because scale >= 0, both are equal where s is scale * qk. Then s need not be stored.
            s_max = s.max(axis=-1) if masked or p.scores else p.scale * qk.max(axis=-1)

            def product(weight):
                weight = drop(kept(p.dropout, tile.at), weight)
                return blocks.einsum("bkgts,bksv->bkgtv", weight.astype(v.dtype), v)

            return online_softmax(carry, s, s_max, product, large=p.large)

        rows = q.shape[:-1]
        fills = (-jnp.inf, rows), (0, rows), (0, (*rows, p.value_dim))
        start = tuple(blocks.full(shape, fill) for fill, shape in fills)
        sums = visit(blocks.range(ranges, i), step, start, blocks.sparsity)
        sinks = None
        if p.sinks is not None:
            sinks = p.sinks.reshape(1, p.num_kv_heads, p.groups, 1)
        acc, weight, log_sum = finish(sums, sinks)
        if p.max_logits:
            log_sum = log_sum._replace(max_logits=sums[0])
        weight = rescaled(p.dropout, weight)
        o = SplitOutput.from_float32(acc * weight[..., None], p.dtype, split=p.split_output)
        return o, log_sum

    o, log_sum = lax.map(q_tile, jnp.arange(blocks.q.count, dtype=jnp.int32))
    rows = jax.tree.map(lambda x: jnp.moveaxis(blocks.join_rows(x), 1, 2), log_sum)
    return jax.tree.map(blocks.join_rows, o), rows


def online_softmax(carry, s, s_max, product, *, large: bool):
    """Return m, l and acc after a tile of scores `s` with the row maxima `s_max`.

    `product` maps the weights of the tile to their product with its values.
    """
    m, l, acc = carry
    m_new = jnp.maximum(m, s_max)
    m_safe = jnp.where(m_new == -jnp.inf, 0, m_new)
    weight = jnp.exp(below(s, m_safe[..., None], large=large))
    alpha = jnp.exp(m - m_safe)
    l = alpha * l + weight.sum(axis=-1)
    pv = product(weight)
    return m_new, l, alpha[..., None] * acc + pv


def finish(sums, sinks):
    """Return acc, the factor that makes it the output, and the `LogSum`, for m, l and acc.

    `sinks`, or None, broadcast to m.
    """
    m, l, acc = sums
    has_keys = l > 0
    m, l, factor = jnp.where(has_keys, m, 0), jnp.where(has_keys, l, 1), 1
    if sinks is not None:
        m, l, factor = with_sink(m, l, sinks)
    return acc, factor / l, LogSum(m, jnp.where(has_keys, jnp.log2(l), -jnp.inf))


def backward(
    problem: Problem,
    o,
    log_sum: LogSum,
    do,
    dlse,
    *,
    want_scale: bool,
    want_bias: bool,
    want_sinks: bool,
    on_gpu: bool = False,
) -> Gradients:
    """Return the gradients for the cotangents do [B, T, N, V] and dlse ([B, T, N] or None).

    delta = rowsum(o * do) - dlse      p = exp(s - lse)      dp = dropout(do @ v.T)
    ds = p * (dp - delta), through the derivative of the scores
    of the resident key/value tile     dv = dropout(p).T @ do   dk = scale * ds.T @ q
    of each streamed query tile        dq = scale * ds @ k      dscale = sum(q * (ds @ k))
                                       (k less a vector, see `_problem.key_center`)
    dbias = ds summed over the axes that bias broadcasts
    dsink = -sum(exp(sink - lse) * delta)

    This is one pass, because key/value tiles come one after the other and all add to dq. Kernels
    run them at the same time, and need a second pass for dq. Tiles of scores and dq are transposed,
    with keys as rows of the scores, so that no product transposes one of them.
    """
    p, dtype = problem, problem.accumulator_dtype
    delta = _delta(o, do, dlse, dtype)
    dsinks = sinks_gradient(p.sinks, log_sum, jnp.moveaxis(delta, 1, 2)) if want_sinks else None
    center, known = key_center.center_of(p), None
    if center is not None:
        by_row = (None if x is None else jnp.moveaxis(x, 1, 2) for x in (delta, dlse))
        r = key_center.row_sums(p, log_sum, *by_row)
        known = None if r is None else key_center.known_part(p, center, r)

    blocks = _Blocks(p, on_gpu)
    do, rows = blocks.split_rows(do), _Rows.from_blocks(blocks, log_sum, delta)
    ranges = blocks.q_ranges()

    def kv_tile(sums, j):
        k, v = _take(blocks.keys, j), _take(blocks.values, j)
        # Without the barrier XLA would put the transposition back into the product.
        centered = k if center is None else key_center.centered(k, center[:, :, None])
        k_t = lax.optimization_barrier(jnp.swapaxes(centered, -1, -2))

        def step(i, masked, carry):
            dk, dv, dq_t, dbias = carry
            q, do_i = (_take(x, i) for x in (blocks.queries, do))
            tile = blocks.tile(i, j, transposed=True)
            qk_t = blocks.einsum("bksh,bkgth->bksgt", k, q)
            dp_t = blocks.einsum("bksv,bkgtv->bksgt", v, do_i)
            rows_i = jax.tree.map(lambda x: _take(x, i), rows)
            p_t, ds_t = _weights_and_ds(p, tile, qk_t, dp_t, rows_i)
            visible_k_t = k_t
            if masked:
                ok_t = tile.allowed()
                p_t, ds_t = jnp.where(ok_t, p_t, 0), jnp.where(ok_t, ds_t, 0)
                # Zero where a query sees no key, or no query sees a key, because 0 * NaN is NaN.
                sees = ok_t.any(axis=2)[..., None]
                q, do_i = jnp.where(sees, q, 0), jnp.where(sees, do_i, 0)
                visible_k_t = jnp.where(ok_t.any(axis=(3, 4))[:, :, None], k_t, 0)
            if want_bias:
                dbias = blocks.add_tile(dbias, ds_t, i, j)
            p_t, ds_t = p_t.astype(p.dtype), ds_t.astype(p.dtype)
            dv = dv + blocks.einsum("bksgt,bkgtv->bksv", p_t, do_i)
            dk = dk + blocks.einsum("bksgt,bkgth->bksh", ds_t, q)
            dq_i = _take(dq_t, i) + blocks.einsum("bkhs,bksgt->bkhgt", visible_k_t, ds_t)
            return dk, dv, lax.dynamic_update_index_in_dim(dq_t, dq_i, i, 0), dbias

        start = blocks.full(k.shape, 0), blocks.full(v.shape, 0), *sums
        dk, dv, *sums = visit(blocks.range(ranges, j), step, start, blocks.sparsity)
        return tuple(sums), ((dk * p.scale).astype(p.dtype), dv.astype(p.dtype))

    queries = p.groups, blocks.q.block
    dq_t = blocks.full((blocks.q.count, p.batch, p.num_kv_heads, p.head_dim, *queries), 0)
    sums = dq_t, blocks.zero_bias() if want_bias else None
    (dq_t, dbias), (dk, dv) = lax.scan(kv_tile, sums, jnp.arange(blocks.kv.count, dtype=jnp.int32))
    # Sums over centered keys.
    dq, dscale = blocks.join_rows(jnp.moveaxis(dq_t, 3, -1)), None
    dq = dq if known is None else dq + known
    if want_scale:
        has_keys = jnp.moveaxis(log_sum.l_log2 > -jnp.inf, 1, 2)[..., None]
        dscale = jnp.sum(jnp.where(has_keys, p.query.astype(dtype) * dq, 0))
    return Gradients(
        (dq * p.scale).astype(p.dtype),
        blocks.join_keys(dk),
        blocks.join_keys(dv),
        dscale,
        blocks.crop_bias(dbias).astype(p.bias.dtype) if want_bias else None,
        dsinks,
    )


def table_gradients(
    problem: Problem,
    o,
    log_sum: LogSum,
    do,
    dlse,
    wanted: tuple[bool, ...],
    *,
    on_gpu: bool = False,
) -> list:
    """Return the gradients of tables (`table_gradients`), the slopes first; None if not wanted.

        dtable[n] = sum of ds_ij * ds_ij/dread over all i, j and reads whose index is n

    This is a pass of its own, with the tiles of `backward`. It serves every index, in memory linear
    in T and S: the numbers of a tile are added to the table before the next tile comes.

    Args:
        problem: the call.
        o: [B, T, N, V], or a `SplitOutput`.
        log_sum: [B, N, T].
        do: [B, T, N, V].
        dlse: [B, T, N] or None.
        wanted: for each table, whether its gradient is wanted.
        on_gpu: as in `forward`.
    """
    p, dtype = problem, problem.accumulator_dtype
    delta = _delta(o, do, dlse, dtype)
    blocks = _Blocks(p, on_gpu)
    do, rows = blocks.split_rows(do), _Rows.from_blocks(blocks, log_sum, delta)
    ranges = blocks.q_ranges()
    tables = p.slopes, *(p.score_operands or ())
    reads = [n for n, read in enumerate(reads_of(p.scores)) if wanted[read.table]]

    def kv_tile(sums, j):
        k, v = _take(blocks.keys, j), _take(blocks.values, j)

        def step(i, masked, sums):
            q, do_i = (_take(x, i) for x in (blocks.queries, do))
            tile = blocks.tile(i, j, transposed=True)
            qk_t = blocks.einsum("bksh,bkgth->bksgt", k, q)
            dp_t = blocks.einsum("bksv,bkgtv->bksgt", v, do_i)
            rows_i = jax.tree.map(lambda x: _take(x, i), rows)
            vjp = functools.partial(Scores.vjp_of_reads, tile.scores, reads)
            _, ds_t = _weights_and_ds(p, tile, qk_t, dp_t, rows_i, vjp)
            indices = tile.scores.reads(qk_t, *tile.at)
            sums = list(sums)
            for number, dread_t in zip(reads, ds_t, strict=True):
                table, index = indices[number]
                x = jnp.where(tile.allowed(), dread_t, 0) if masked else dread_t
                sums[table] = add_at(sums[table], index, x, sort=on_gpu)
            return tuple(sums)

        return visit(blocks.range(ranges, j), step, sums, blocks.sparsity), None

    zeros = tuple(
        blocks.full(x.shape, 0) if want else None for x, want in zip(tables, wanted, strict=True)
    )
    sums, _ = lax.scan(kv_tile, zeros, jnp.arange(blocks.kv.count, dtype=jnp.int32))
    pairs = zip(sums, tables, strict=True)
    return [None if x is None else x.astype(table.dtype) for x, table in pairs]


def _delta(o, do, dlse, dtype):
    """Return rowsum(o * do) - dlse, [B, T, N]."""
    delta = (widened(o, dtype) * do.astype(dtype)).sum(axis=-1)
    return delta if dlse is None else delta - dlse


class _Rows(NamedTuple):
    """The numbers of each row that the backward reads, [tiles, B, K, G, block_q] or a tile of it.

    Attributes:
        delta: see `backward`.
        m: the maximum where it is separate, see `Problem.large`; else None.
        log_l: the LSE less m, or all of it; +inf in rows without keys, so that their p is 0.
    """

    delta: Any
    m: Any
    log_l: Any

    @classmethod
    def from_blocks(cls, blocks: "_Blocks", log_sum: LogSum, delta) -> "_Rows":
        """Return the rows in blocks, for delta [B, T, N]."""
        m = log_sum.m
        log_l = jnp.where(log_sum.l_log2 == -jnp.inf, jnp.inf, log_sum.l_log2 * LN2)
        if not blocks.problem.large:
            m, log_l = None, log_l if m is None else m + log_l
        m, log_l = (None if x is None else jnp.moveaxis(x, 1, 2) for x in (m, log_l))
        return jax.tree.map(blocks.split_rows, cls(delta, m, log_l))


def _weights_and_ds(p: Problem, tile: "_ScoreTile", qk_t, dp_t, rows: _Rows, vjp=None):
    """Return p_t after dropout and ds_t of a transposed tile, from its products and its rows.

    `vjp`, by default `tile.scores.vjp`, says in what the derivative is.
    """
    s_t, pull = p.scale * qk_t, None
    if p.scores:
        s_t, pull = (vjp or tile.scores.vjp)(s_t, *tile.at)
    delta, log_l = (x[:, :, None] for x in (rows.delta, rows.log_l))
    s_t = s_t if rows.m is None else below(s_t, rows.m[:, :, None], large=True)
    p_t = jnp.exp(s_t - log_l)
    keep = kept(p.dropout, tile.at)
    dp_t = drop(keep, rescaled(p.dropout, dp_t))
    ds_t = p_t * (dp_t - delta)
    ds_t = ds_t if pull is None else pull(ds_t)
    p_t = drop(keep, rescaled(p.dropout, p_t))
    return p_t, ds_t


def _block_sizes(heads: int, kv_len: int, on_gpu: bool) -> tuple[int, int]:
    """Return the queries and keys of a tile, for `heads` of all batch elements."""
    if not on_gpu:
        return (2 * BLOCK_Q if known_at_most(heads, FEW_HEADS) else BLOCK_Q), BLOCK_KV
    if is_symbolic(heads):
        return BLOCK_Q, GPU_BLOCK
    rows = GPU_SCORES // (heads * smaller(kv_len, GPU_BLOCK))
    return max(BLOCK_Q, min(GPU_BLOCK, rows - rows % BLOCK_Q)), GPU_BLOCK


class _ScoreTile(NamedTuple):
    """One tile of scores.

    Attributes:
        at: the indices b, h, q, k, which broadcast to the tile.
        mask: the mask, with its (q, k) arrays cut to the tile.
        scores: the terms of the scores, with their (q, k) arrays cut to the tile.
        transposed: whether keys come before queries.
    """

    at: tuple
    mask: Mask
    scores: Scores
    transposed: bool

    def allowed(self):
        """Return which scores are allowed, a bool array of the tile's five axes.

        The axes of queries and keys are whole, because callers reduce along them. The others are 1
        where the mask does not need them.
        """
        _, _, q, k = self.at
        ok = self.mask.allowed(*self.at)
        return jnp.broadcast_to(ok, jnp.broadcast_shapes(ok.shape, q.shape, k.shape))


class _Blocks:
    """A problem cut into whole tiles.

    Attributes:
        queries: [tiles, B, K, G, block_q, H].
        keys: [tiles, B, K, block_kv, H].
        values: [tiles, B, K, block_kv, V].
        mask: the mask, which also hides the padding of the last tiles.
        sparsity: how the tiles to visit are given.
    """

    def __init__(self, problem: Problem, on_gpu: bool):
        p = self.problem = problem
        block_q, block_kv = _block_sizes(p.batch * p.num_heads, p.kv_len, on_gpu)
        self.q = Tiling(p.q_len, smaller(p.q_len, block_q))
        self.kv = Tiling(p.kv_len, smaller(p.kv_len, block_kv))
        self.mask: Mask = p.mask.within(q=self.q, kv=self.kv)
        self.sparsity = Sparsity.RANGES if self.mask else Sparsity.DENSE
        if self.mask.scattered:
            self.sparsity = Sparsity.LISTS
        self.queries = self.split_rows(p.query)
        self.keys, self.values = (_split(x, self.kv, p.num_kv_heads) for x in (p.key, p.value))
        self._mask, self._scores = self._pad_pairs((self.mask, p.scores))

    def full(self, shape, fill):
        """Return the start of a sum or maximum, varying over the operands' manual mesh axes."""
        return lax.full_like(self.queries, fill, self.problem.accumulator_dtype, shape)

    def einsum(self, equation, a, b):
        p = self.problem
        return jnp.einsum(
            equation, a, b, precision=p.precision, preferred_element_type=p.accumulator_dtype
        )

    def tile(self, i, j, *, transposed=False) -> _ScoreTile:
        """Return tile (i, j) of the scores.

        It is [B, K, G, block_q, block_kv], or transposed [B, K, block_kv, G, block_q].
        """
        p = self.problem
        b, h = (jnp.arange(n, dtype=jnp.int32) for n in (p.batch, p.num_heads))
        at = (
            b.reshape(-1, 1, 1, 1, 1),
            h.reshape(1, p.num_kv_heads, p.groups, 1, 1),
            in_tile(i, self.q.block).reshape(1, 1, 1, -1, 1),
            in_tile(j, self.kv.block).reshape(1, 1, 1, 1, -1),
        )
        if transposed:
            at = tuple(jnp.moveaxis(x, -1, 2) for x in at)

        def cut(x):
            if not is_pairs(x):
                return x
            tile = self._tile(x.array, i, j)
            return Pairs(TileView(jnp.moveaxis(tile, -1, 2) if transposed else tile, x.shape))

        mask, scores = jax.tree.map(cut, (self._mask, self._scores), is_leaf=is_pairs)
        return _ScoreTile(at, mask, scores, transposed)

    def kv_ranges(self):
        """Return the key tiles to visit for each query tile."""
        if self.sparsity is Sparsity.LISTS:
            return self._lists(self.mask.block_classes(self.q, self.kv), 2)
        return self._ranges(self.mask.kv_ranges(self.q, self.kv), self.kv)

    def q_ranges(self):
        """Return the query tiles to visit for each key tile."""
        if self.sparsity is Sparsity.LISTS:
            return self._lists(self.mask.block_classes(self.q, self.kv), 3)
        return self._ranges(self.mask.q_ranges(self.q, self.kv, sums_keys=True), self.q)

    def range(self, ranges, i):
        """Return row `i` of `kv_ranges` or `q_ranges`, as `visit` takes it."""
        row = ranges[i]
        return (
            row if self.sparsity is not Sparsity.LISTS else (row[0], row[1], lambda t: row[2 + t])
        )

    def _lists(self, classes: BlockClasses, resident_axis: int):
        """Return one list for all batch elements and heads, [tiles, 2 + tiles]."""
        some, every = classes.some.any((0, 1)), classes.every.all((0, 1))
        if resident_axis == 3:
            some, every = some.T, every.T
        return lists(BlockClasses(some, every))

    def _ranges(self, ranges, streamed: Tiling):
        """Return one range for all batch elements, [tiles, 4].

        It is their hull, with the tiles that are full in every batch element.
        """
        start, full_start, full_stop, stop = jnp.moveaxis(jnp.asarray(ranges), -1, 0)
        empty = start >= stop
        start = jnp.where(empty, streamed.count, start).min(axis=0)
        stop = jnp.where(empty, 0, stop).max(axis=0)
        start = jnp.minimum(start, stop)
        full_start, full_stop = full_start.max(axis=0), full_stop.min(axis=0)
        none_full = full_stop <= full_start
        full_start, full_stop = (jnp.where(none_full, start, x) for x in (full_start, full_stop))
        # A symbolic number of tiles is an int64 in x64 mode.
        return jnp.stack([start, full_start, full_stop, stop], axis=-1).astype(jnp.int32)

    def split_rows(self, x):
        """Split [B, T, N, ...] to [tiles, B, K, G, block_q, ...]."""
        return _split(x, self.q, self.problem.num_kv_heads, self.problem.groups)

    def join_rows(self, x):
        """Invert `split_rows`."""
        return _join(x, self.q, self.problem.num_kv_heads, self.problem.groups)

    def join_keys(self, x):
        """Join [tiles, B, K, block_kv, ...] to [B, S, K, ...]."""
        return _join(x, self.kv, self.problem.num_kv_heads)

    def _pad_pairs(self, tree):
        """Pad (q, k) arrays to whole tiles along T and S, where they do not broadcast."""

        def pad(x):
            if not is_pairs(x):
                return x
            array = x.array
            for axis, tiling in ((2, self.q), (3, self.kv)):
                if x.shape[axis] != 1:
                    array = _pad(array, axis, tiling)
            return Pairs(array)

        return jax.tree.map(pad, tree, is_leaf=is_pairs)

    def _tile(self, x, i, j):
        """Return tile (i, j) of a (q, k) array.

        It is [B | 1, K | 1, G | 1, block_q | 1, block_kv | 1].
        """
        p = self.problem
        for axis, tiling, t in ((2, self.q, i), (3, self.kv, j)):
            if x.shape[axis] != 1:
                x = lax.dynamic_slice_in_dim(x, t * tiling.block, tiling.block, axis)
        heads = (p.num_kv_heads, p.groups) if x.shape[1] != 1 else (1, 1)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    def zero_bias(self):
        return self.full(self._scores.bias.shape, 0)

    def add_tile(self, dbias, ds_t, i, j):
        """Add one tile of ds to `dbias`, summed over the axes that the bias broadcasts."""
        ds = jnp.moveaxis(ds_t, 2, -1)
        ds = ds.reshape(ds.shape[0], -1, *ds.shape[3:])
        broadcast = tuple(axis for axis in range(4) if dbias.shape[axis] == 1)
        ds = ds.sum(axis=broadcast, keepdims=True)
        # All indices have the dtype of the tile numbers, in x64 mode too.
        zero = jnp.int32(0)
        at = (
            zero,
            zero,
            i * self.q.block if dbias.shape[2] != 1 else zero,
            j * self.kv.block if dbias.shape[3] != 1 else zero,
        )
        return lax.dynamic_update_slice(dbias, lax.dynamic_slice(dbias, at, ds.shape) + ds, at)

    def crop_bias(self, dbias):
        shape = self.problem.bias.shape
        return dbias[:, :, : shape[2], : shape[3]]


def _take(tiles, i):
    return lax.dynamic_index_in_dim(tiles, i, keepdims=False)


def _split(x, tiling: Tiling, *heads: int):
    """Split [B, length, all heads, ...] to [tiles, B, *heads, block, ...]."""
    x = _pad(x, 1, tiling)
    # One axis at a time, because JAX 0.10 reshapes no more at once with Explicit axes.
    x = x.reshape(x.shape[0], tiling.count, tiling.block, *x.shape[2:])
    x = x.reshape(*x.shape[:3], *heads, *x.shape[4:])
    return jnp.moveaxis(x, (1, 2), (0, 2 + len(heads)))


def _join(x, tiling: Tiling, *heads: int):
    """Invert `_split`."""
    x = jnp.moveaxis(x, (0, 2 + len(heads)), (1, 2))
    x = x.reshape(*x.shape[:3], math.prod(heads), *x.shape[3 + len(heads) :])
    x = x.reshape(x.shape[0], -1, *x.shape[3:])
    return x[:, : tiling.length]


def _pad(x, axis: int, tiling: Tiling):
    missing = tiling.count * tiling.block - tiling.length
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])
