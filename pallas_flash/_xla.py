"""The kernels' algorithm in plain JAX: any device, any floating dtype, memory linear in T and S.

A tile of queries stays while tiles of keys and values flow past it; m, l and acc are the running
maximum, sum and output:

    s   = scale * q @ k.T + bias, masked
    m'  = max(m, rowmax(s))    p = exp(s - m')    alpha = exp(m - m')
    l   = alpha * l + rowsum(p)
    acc = alpha * acc + p @ v

    at the end    o = acc / l    lse = m + log(l)

The backward recomputes the tiles of p = exp(s - lse), see `backward`. All examples and heads of a
tile are computed together, each product as one batched `a @ b` or `a @ b.T`: on a CPU, `a.T @ b`
takes several times as long. Letters of the einsums: b batch, k key/value head, g query head of its
group, t query, s key, h head size of q and k, v head size of v.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_flash._masks import Edges, Mask, Tiling, in_tile, visit
from pallas_flash._problem import Gradients, Problem

# Queries and keys of a tile: big enough for matrix products, small enough for a core's cache, where
# the scores of all heads meet. Few heads leave room for twice the queries.
BLOCK_Q, BLOCK_KV = 256, 256
FEW_HEADS = 4

LOG2E = math.log2(math.e)


def forward(problem: Problem):
    """The output [B, T, N, V] and `lse_log2` = LSE * log2(e), [B, N, T] in float32 or float64."""
    p, blocks = problem, _Blocks(problem)
    ranges = blocks.kv_ranges()
    # The tiles [.., H, block_kv] are transposed once for all query tiles.
    keys_t = jnp.swapaxes(blocks.keys, -1, -2)

    def q_tile(i):
        q = _take(blocks.queries, i)

        def step(j, masked, carry):
            m, l, acc = carry
            k_t, v = _take(keys_t, j), _take(blocks.values, j)
            qk = blocks.einsum("bkgth,bkhs->bkgts", q, k_t)
            bias = blocks.bias(i, j)
            s = blocks.scores(qk, bias)
            if masked:
                ok = blocks.allowed(i, j)
                s = jnp.where(ok, s, -jnp.inf)
                # Zero where a key is seen by no query: 0 * NaN would be NaN.
                v = jnp.where(ok.any(axis=(2, 3))[..., None], v, 0)
            # Equal without mask and bias, because scale >= 0; s need not be stored then.
            s_max = s.max(axis=-1) if masked or bias is not None else p.scale * qk.max(axis=-1)
            m_new = jnp.maximum(m, s_max)
            m_safe = jnp.where(m_new == -jnp.inf, 0, m_new)
            weight = jnp.exp(s - m_safe[..., None])
            alpha = jnp.exp(m - m_safe)
            l = alpha * l + weight.sum(axis=-1)
            pv = blocks.einsum("bkgts,bksv->bkgtv", weight.astype(v.dtype), v)
            return m_new, l, alpha[..., None] * acc + pv

        rows = q.shape[:-1]
        fills = (-jnp.inf, rows), (0, rows), (0, (*rows, p.value_dim))
        start = tuple(blocks.full(shape, fill) for fill, shape in fills)
        m, l, acc = visit(ranges[i], step, start, blocks.edges)
        alive = l > 0
        l = jnp.where(alive, l, 1)
        lse_log2 = jnp.where(alive, (m + jnp.log(l)) * LOG2E, -jnp.inf)
        return (acc / l[..., None]).astype(p.dtype), lse_log2

    o, lse_log2 = lax.map(q_tile, jnp.arange(blocks.q.count, dtype=jnp.int32))
    return blocks.join_rows(o), jnp.moveaxis(blocks.join_rows(lse_log2), 1, 2)


def backward(
    problem: Problem, o, lse_log2, do, dlse, *, want_scale: bool, want_bias: bool
) -> Gradients:
    """Gradients for the cotangents do [B, T, N, V] and dlse ([B, T, N] or None), in one pass.

    delta = rowsum(o * do) - dlse      p = exp(s - lse)      ds = p * (do @ v.T - delta)
    of the key/value tile that stays   dv = p.T @ do         dk = scale * ds.T @ q
    of each query tile that flows      dq = scale * ds @ k   dscale = sum(q * (ds @ k))
    dbias = ds summed over the axes that bias broadcasts

    One after the other, key/value tiles can all add to dq; the kernels, which run them at the same
    time, need a second pass for it. Tiles of scores are transposed, so that their rows are keys,
    and so is dq: then no product has to transpose one of them.
    """
    p, blocks = problem, _Blocks(problem)
    dtype = p.accumulator_dtype
    delta = jnp.einsum("btnv,btnv->btn", o.astype(dtype), do.astype(dtype))
    if dlse is not None:
        delta = delta - dlse
    # +inf in place of -inf: a row that sees nothing then has p = 0 without a special case.
    lse = jnp.where(lse_log2 == -jnp.inf, jnp.inf, lse_log2) / LOG2E
    do, delta, lse = map(blocks.split_rows, (do, delta, jnp.moveaxis(lse, 1, 2)))
    ranges = blocks.q_ranges()

    def kv_tile(sums, j):
        k, v = _take(blocks.keys, j), _take(blocks.values, j)
        # Kept apart: XLA would put the transposition back into the product.
        k_t = lax.optimization_barrier(jnp.swapaxes(k, -1, -2))

        def step(i, masked, carry):
            dk, dv, dq_t, dbias = carry
            q, do_i, lse_i, delta_i = (_take(x, i) for x in (blocks.queries, do, lse, delta))
            qk_t = blocks.einsum("bksh,bkgth->bksgt", k, q)
            s_t = blocks.scores(qk_t, _transpose(blocks.bias(i, j)))
            p_t = jnp.exp(s_t - lse_i[:, :, None])
            dp_t = blocks.einsum("bksv,bkgtv->bksgt", v, do_i)
            ds_t = p_t * (dp_t - delta_i[:, :, None])
            seen_k_t = k_t
            if masked:
                ok_t = _transpose(blocks.allowed(i, j))
                p_t, ds_t = jnp.where(ok_t, p_t, 0), jnp.where(ok_t, ds_t, 0)
                # Zero where a query sees no key or a key is seen by none: 0 * NaN would be NaN.
                seen = ok_t.any(axis=2)[..., None]
                q, do_i = jnp.where(seen, q, 0), jnp.where(seen, do_i, 0)
                seen_k_t = jnp.where(ok_t.any(axis=(3, 4))[:, :, None], k_t, 0)
            if want_bias:
                dbias = blocks.add_tile(dbias, ds_t, i, j)
            p_t, ds_t = p_t.astype(p.dtype), ds_t.astype(p.dtype)
            dv = dv + blocks.einsum("bksgt,bkgtv->bksv", p_t, do_i)
            dk = dk + blocks.einsum("bksgt,bkgth->bksh", ds_t, q)
            dq_i = _take(dq_t, i) + blocks.einsum("bkhs,bksgt->bkhgt", seen_k_t, ds_t)
            return dk, dv, lax.dynamic_update_index_in_dim(dq_t, dq_i, i, 0), dbias

        start = blocks.full(k.shape, 0), blocks.full(v.shape, 0), *sums
        dk, dv, *sums = visit(ranges[j], step, start, blocks.edges)
        return tuple(sums), ((dk * p.scale).astype(p.dtype), dv.astype(p.dtype))

    rows = p.groups, blocks.q.block
    dq_t = blocks.full((blocks.q.count, p.batch, p.num_kv_heads, p.head_dim, *rows), 0)
    sums = dq_t, blocks.zero_bias() if want_bias else None
    (dq_t, dbias), (dk, dv) = lax.scan(kv_tile, sums, jnp.arange(blocks.kv.count, dtype=jnp.int32))
    dq = jnp.moveaxis(dq_t, 3, -1)
    dscale = None
    if want_scale:
        alive = lse[..., None] < jnp.inf
        dscale = jnp.sum(jnp.where(alive, blocks.queries.astype(dtype) * dq, 0))
    return Gradients(
        blocks.join_rows((dq * p.scale).astype(p.dtype)),
        blocks.join_keys(dk),
        blocks.join_keys(dv),
        dscale,
        blocks.crop_bias(dbias).astype(p.bias.dtype) if want_bias else None,
    )


class _Blocks:
    """A problem in whole tiles.

    Attributes:
        queries: [tiles, B, K, G, block_q, H].
        keys: [tiles, B, K, block_kv, H].
        values: [tiles, B, K, block_kv, V].
    """

    def __init__(self, problem: Problem):
        p = self.problem = problem
        block_q = 2 * BLOCK_Q if p.batch * p.num_heads <= FEW_HEADS else BLOCK_Q
        self.q = Tiling(p.q_len, min(block_q, p.q_len))
        self.kv = Tiling(p.kv_len, min(BLOCK_KV, p.kv_len))
        self.mask: Mask = p.mask.within(q=self.q, kv=self.kv)
        masked = bool(self.mask) or p.mask_array is not None
        self.edges = Edges.APART if masked else Edges.NONE
        self.queries = self.split_rows(p.query)
        self.keys, self.values = (_split(x, self.kv, p.num_kv_heads) for x in (p.key, p.value))
        self._bias: Any = self._pad_tiles(p.bias)
        self._mask_array: Any = self._pad_tiles(p.mask_array)

    def full(self, shape, fill):
        """The start of a sum or maximum, varying over the manual mesh axes of the operands."""
        return lax.full_like(self.queries, fill, self.problem.accumulator_dtype, shape)

    def einsum(self, equation, a, b):
        p = self.problem
        return jnp.einsum(
            equation, a, b, precision=p.precision, preferred_element_type=p.accumulator_dtype
        )

    def scores(self, qk, bias):
        """The scaled products of queries and keys, and the bias if it is not None."""
        s = self.problem.scale * qk
        return s if bias is None else s + bias.astype(s.dtype)

    def bias(self, i, j):
        """[B | 1, K | 1, G | 1, block_q | 1, block_kv | 1], or None."""
        return None if self._bias is None else self._tile(self._bias, i, j)

    def allowed(self, i, j):
        """Bool [B | 1, K | 1, G | 1, block_q, block_kv]."""
        ok = jnp.ones((1, 1, 1, self.q.block, self.kv.block), bool)
        if self.mask:
            b = jnp.arange(self.problem.batch, dtype=jnp.int32)[:, None, None]
            q, k = in_tile(i, self.q.block)[:, None], in_tile(j, self.kv.block)
            allowed = self.mask.allowed(b, q, k)
            # A leading axis of examples is there only if some leaf needs it; others may be 1.
            ok &= allowed[:, None, None] if allowed.ndim == 3 else allowed
        return ok if self._mask_array is None else ok & self._tile(self._mask_array, i, j)

    def kv_ranges(self):
        return self._ranges(self.mask.kv_ranges(self.q, self.kv), self.kv)

    def q_ranges(self):
        return self._ranges(self.mask.q_ranges(self.q, self.kv), self.q)

    def _ranges(self, ranges, flow: Tiling):
        """One range for all examples, [tiles, 4]: their hull, and what is full in every one."""
        start, full_start, full_stop, stop = jnp.moveaxis(jnp.asarray(ranges), -1, 0)
        empty = start >= stop
        start = jnp.where(empty, flow.count, start).min(axis=0)
        stop = jnp.where(empty, 0, stop).max(axis=0)
        start = jnp.minimum(start, stop)
        full_start, full_stop = full_start.max(axis=0), full_stop.min(axis=0)
        if self._mask_array is not None:
            full_stop = full_start
        none_full = full_stop <= full_start
        full_start, full_stop = (jnp.where(none_full, start, x) for x in (full_start, full_stop))
        return jnp.stack([start, full_start, full_stop, stop], axis=-1)

    def split_rows(self, x):
        """[B, T, N, ...] to [tiles, B, K, G, block_q, ...]."""
        return _split(x, self.q, self.problem.num_kv_heads, self.problem.groups)

    def join_rows(self, x):
        """The inverse of `split_rows`."""
        return _join(x, self.q, self.problem.num_kv_heads, self.problem.groups)

    def join_keys(self, x):
        """[tiles, B, K, block_kv, ...] to [B, S, K, ...]."""
        return _join(x, self.kv, self.problem.num_kv_heads)

    def _pad_tiles(self, x):
        """Bias or mask array with whole tiles along T and S, where it does not broadcast."""
        if x is None:
            return None
        for axis, tiling in ((2, self.q), (3, self.kv)):
            if x.shape[axis] > 1:
                x = _pad(x, axis, tiling)
        return x

    def _tile(self, x, i, j):
        """Tile (i, j) of a bias or mask array: [B | 1, K | 1, G | 1, block_q | 1, block_kv | 1]."""
        p = self.problem
        for axis, tiling, t in ((2, self.q, i), (3, self.kv, j)):
            if x.shape[axis] > 1:
                x = lax.dynamic_slice_in_dim(x, t * tiling.block, tiling.block, axis)
        heads = (p.num_kv_heads, p.groups) if x.shape[1] > 1 else (1, 1)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    def zero_bias(self):
        return self.full(self._bias.shape, 0)

    def add_tile(self, dbias, ds_t, i, j):
        """The sum `dbias` with one tile of ds added, summed over the axes that bias broadcasts."""
        ds = jnp.moveaxis(ds_t, 2, -1)
        ds = ds.reshape(ds.shape[0], -1, *ds.shape[3:])
        broadcast = tuple(axis for axis in range(4) if dbias.shape[axis] == 1)
        ds = ds.sum(axis=broadcast, keepdims=True)
        # Of one dtype with the tile numbers, in x64 mode too.
        zero = jnp.int32(0)
        at = (
            zero,
            zero,
            i * self.q.block if dbias.shape[2] > 1 else zero,
            j * self.kv.block if dbias.shape[3] > 1 else zero,
        )
        return lax.dynamic_update_slice(dbias, lax.dynamic_slice(dbias, at, ds.shape) + ds, at)

    def crop_bias(self, dbias):
        shape = self.problem.bias.shape
        return dbias[:, :, : shape[2], : shape[3]]


def _take(tiles, i):
    return lax.dynamic_index_in_dim(tiles, i, keepdims=False)


def _transpose(x) -> Any:
    """[.., .., G, block_q, block_kv] of a bias or mask to [.., .., block_kv, G, block_q]."""
    return None if x is None else jnp.moveaxis(x, -1, 2)


def _split(x, tiling: Tiling, *heads: int):
    """[B, length, all heads, ...] to [tiles, B, *heads, block, ...]."""
    x = _pad(x, 1, tiling)
    x = x.reshape(x.shape[0], tiling.count, tiling.block, *heads, *x.shape[3:])
    return jnp.moveaxis(x, (1, 2), (0, 2 + len(heads)))


def _join(x, tiling: Tiling, *heads: int):
    """The inverse of `_split`."""
    x = jnp.moveaxis(x, (0, 2 + len(heads)), (1, 2))
    x = x.reshape(x.shape[0], -1, math.prod(heads), *x.shape[3 + len(heads) :])
    return x[:, : tiling.length]


def _pad(x, axis: int, tiling: Tiling):
    missing = tiling.count * tiling.block - tiling.length
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])
