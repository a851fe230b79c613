"""The kernels' algorithm in plain JAX: any device, any floating dtype, memory linear in T and S.

A tile of queries stays while tiles of keys and values flow past it; m, l and acc are the running
maximum, sum and output:

    s   = scale * q @ k.T + bias, masked
    m'  = max(m, rowmax(s))    p = exp(s - m')    alpha = exp(m - m')
    l   = alpha * l + rowsum(p)
    acc = alpha * acc + p @ v

    at the end    o = acc / l    lse = m + log(l)

The backward recomputes the tiles of p = exp(s - lse) in two passes, one for dk and dv, one for dq,
see `backward`. All examples and heads of a tile are computed together. Letters of the einsums: b
batch, k key/value head, g query head of its group, t query, s key, h head size of q and k, v head
size of v.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_flash._masks import Edges, Mask, Tiling, in_tile, visit
from pallas_flash._problem import Gradients, Problem

# Scores of a tile in elements per head: big enough for matrix products, small enough for a core's
# cache.
BLOCK_Q, BLOCK_KV = 256, 256

LOG2E = math.log2(math.e)


def forward(problem: Problem):
    """The output [B, T, N, V] and `lse_log2` = LSE * log2(e), [B, N, T] in float32 or float64."""
    p, blocks = problem, _Blocks(problem)
    ranges = blocks.kv_ranges()

    def q_tile(i):
        q = blocks.query(i)

        def step(j, masked, carry):
            m, l, acc = carry
            k, v = blocks.key(j), blocks.value(j)
            ok = blocks.allowed(i, j) if masked else None
            k, v = _seen_keys(ok, k), _seen_keys(ok, v)
            s = blocks.scores(q, k, i, j, ok)
            m_new = jnp.maximum(m, s.max(axis=-1))
            m_safe = jnp.where(m_new == -jnp.inf, 0, m_new)
            weight = jnp.exp(s - m_safe[..., None])
            alpha = jnp.exp(m - m_safe)
            l = alpha * l + weight.sum(axis=-1)
            acc = alpha[..., None] * acc + blocks.einsum(
                "bkgts,bksv->bkgtv", weight.astype(v.dtype), v
            )
            return m_new, l, acc

        rows = q.shape[:-1]
        fills = (-jnp.inf, rows), (0, rows), (0, (*rows, p.value_dim))
        start = tuple(blocks.full(shape, fill) for fill, shape in fills)
        m, l, acc = visit(ranges[i], step, start, blocks.edges)
        alive = l > 0
        l = jnp.where(alive, l, 1)
        lse_log2 = jnp.where(alive, (m + jnp.log(l)) * LOG2E, -jnp.inf)
        return (acc / l[..., None]).astype(p.dtype), lse_log2

    o, lse_log2 = lax.map(q_tile, jnp.arange(blocks.q.count, dtype=jnp.int32))
    return blocks.join_rows(o), jnp.moveaxis(blocks.join_rows(lse_log2[..., None])[..., 0], 1, 2)


def backward(
    problem: Problem, o, lse_log2, do, dlse, *, want_scale: bool, want_bias: bool
) -> Gradients:
    """Gradients for the cotangents do [B, T, N, V] and dlse ([B, T, N] or None), in two passes.

    delta = rowsum(o * do) - dlse      p = exp(s - lse)      ds = p * (do @ v.T - delta)
    first pass, a key/value tile stays    dv = p.T @ do          dk = scale * ds.T @ q
    second pass, a query tile stays       dq = scale * ds @ k    dscale = sum(q * (ds @ k))
    dbias = ds summed over the axes that bias broadcasts
    """
    p, blocks = problem, _Blocks(problem)
    dtype = p.accumulator_dtype
    delta = jnp.einsum("btnv,btnv->btn", o.astype(dtype), do.astype(dtype))
    if dlse is not None:
        delta = delta - dlse
    do = blocks.split_rows(do)
    # +inf in place of -inf: a row that sees nothing then has p = 0 without a special case.
    lse = jnp.where(lse_log2 == -jnp.inf, jnp.inf, lse_log2) / LOG2E
    lse, delta = (blocks.split_rows(x[..., None])[..., 0] for x in (jnp.moveaxis(lse, 1, 2), delta))

    def tile(i, j, q, k, v, do_i, ok):
        """The p and ds of one tile, zero where it is masked, even of inputs not finite there."""
        s = blocks.scores(q, k, i, j, None)
        prob = jnp.exp(s - blocks.rows(lse, i)[..., None])
        dp = blocks.einsum("bkgtv,bksv->bkgts", do_i, v)
        ds = prob * (dp - blocks.rows(delta, i)[..., None])
        return (prob, ds) if ok is None else (jnp.where(ok, prob, 0), jnp.where(ok, ds, 0))

    def kv_tile(j):
        k, v = blocks.key(j), blocks.value(j)

        def step(i, masked, carry):
            dk, dv = carry
            ok = blocks.allowed(i, j) if masked else None
            q, do_i = (_seen_queries(ok, x) for x in (blocks.query(i), blocks.rows(do, i)))
            prob, ds = tile(i, j, q, k, v, do_i, ok)
            dv = dv + blocks.einsum("bkgts,bkgtv->bksv", prob.astype(do.dtype), do_i)
            dk = dk + blocks.einsum("bkgts,bkgth->bksh", ds.astype(q.dtype), q)
            return dk, dv

        start = blocks.full(k.shape, 0), blocks.full(v.shape, 0)
        dk, dv = visit(q_ranges[j], step, start, blocks.edges)
        return (dk * p.scale).astype(p.dtype), dv.astype(p.dtype)

    def q_tile(sums, i):
        q, do_i = blocks.query(i), blocks.rows(do, i)

        def step(j, masked, carry):
            dq, dbias = carry
            ok = blocks.allowed(i, j) if masked else None
            k, v = _seen_keys(ok, blocks.key(j)), _seen_keys(ok, blocks.value(j))
            _, ds = tile(i, j, q, k, v, do_i, ok)
            if want_bias:
                dbias = blocks.add_tile(dbias, ds, i, j)
            return dq + blocks.einsum("bkgts,bksh->bkgth", ds.astype(k.dtype), k), dbias

        dscale, dbias = sums
        start = blocks.full(q.shape, 0), dbias
        dq, dbias = visit(kv_ranges[i], step, start, blocks.edges)
        if want_scale:
            alive = blocks.rows(lse, i)[..., None] < jnp.inf
            dscale = dscale + jnp.sum(jnp.where(alive, q.astype(dtype) * dq, 0))
        return (dscale, dbias), (dq * p.scale).astype(p.dtype)

    q_ranges, kv_ranges = blocks.q_ranges(), blocks.kv_ranges()
    dk, dv = lax.map(kv_tile, jnp.arange(blocks.kv.count, dtype=jnp.int32))
    sums = blocks.full((), 0), blocks.zero_bias() if want_bias else None
    (dscale, dbias), dq = lax.scan(q_tile, sums, jnp.arange(blocks.q.count, dtype=jnp.int32))
    return Gradients(
        blocks.join_rows(dq),
        blocks.join_keys(dk),
        blocks.join_keys(dv),
        dscale if want_scale else None,
        blocks.crop_bias(dbias).astype(p.bias.dtype) if want_bias else None,
    )


class _Blocks:
    """A problem in whole tiles: rows are [B, K, G, T, ...], keys and values [B, K, S, ...]."""

    def __init__(self, problem: Problem):
        p = self.problem = problem
        self.q = Tiling(p.q_len, min(BLOCK_Q, p.q_len))
        self.kv = Tiling(p.kv_len, min(BLOCK_KV, p.kv_len))
        self.mask: Mask = p.mask.within(q=self.q, kv=self.kv)
        masked = bool(self.mask) or p.mask_array is not None
        self.edges = Edges.APART if masked else Edges.NONE
        self._query = self.split_rows(p.query)
        self._key, self._value = (self._split_keys(x) for x in (p.key, p.value))
        self._bias: Any = self._pad_tiles(p.bias)
        self._mask_array: Any = self._pad_tiles(p.mask_array)

    def query(self, i):
        return self.rows(self._query, i)

    def key(self, j):
        return _slice(self._key, 2, self.kv, j)

    def value(self, j):
        return _slice(self._value, 2, self.kv, j)

    def rows(self, x, i):
        """Tile `i` of something that has one row a query, [B, K, G, T, ...]."""
        return _slice(x, 3, self.q, i)

    def full(self, shape, fill):
        """The start of a sum or maximum, varying over the manual mesh axes of the operands."""
        return lax.full_like(self._query, fill, self.problem.accumulator_dtype, shape)

    def einsum(self, equation, a, b):
        p = self.problem
        return jnp.einsum(
            equation, a, b, precision=p.precision, preferred_element_type=p.accumulator_dtype
        )

    def scores(self, q, k, i, j, ok):
        """[B, K, G, block_q, block_kv], -inf where not `ok`."""
        s = self.problem.scale * self.einsum("bkgth,bksh->bkgts", q, k)
        if self._bias is not None:
            s = s + self._tile(self._bias, i, j).astype(s.dtype)
        return s if ok is None else jnp.where(ok, s, -jnp.inf)

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
        """[B, T, N, D] to [B, K, G, whole tiles of T, D]."""
        p = self.problem
        x = x.reshape(p.batch, p.q_len, p.num_kv_heads, p.groups, x.shape[-1])
        return _pad(x.transpose(0, 2, 3, 1, 4), 3, self.q)

    def _split_keys(self, x):
        return _pad(x.transpose(0, 2, 1, 3), 2, self.kv)

    def join_rows(self, x):
        """[tiles, B, K, G, block_q, D] back to [B, T, N, D]."""
        p = self.problem
        x = x.transpose(1, 0, 4, 2, 3, 5).reshape(p.batch, -1, p.num_heads, x.shape[-1])
        return x[:, : p.q_len]

    def join_keys(self, x):
        """[tiles, B, K, block_kv, D] back to [B, S, K, D]."""
        p = self.problem
        x = x.transpose(1, 0, 3, 2, 4).reshape(p.batch, -1, p.num_kv_heads, x.shape[-1])
        return x[:, : p.kv_len]

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
                x = _slice(x, axis, tiling, t)
        heads = (p.num_kv_heads, p.groups) if x.shape[1] > 1 else (1, 1)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    def zero_bias(self):
        return self.full(self._bias.shape, 0)

    def add_tile(self, dbias, ds, i, j):
        """The sum `dbias` with one tile of ds added, summed over the axes that bias broadcasts."""
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


def _seen_keys(ok, x):
    """Keys or values [B, K, block_kv, D], zero where no query sees them: 0 * NaN would be NaN."""
    return x if ok is None else jnp.where(ok.any(axis=(2, 3))[..., None], x, 0)


def _seen_queries(ok, x):
    """Rows [B, K, G, block_q, D] with those zeroed that see no key of the tile."""
    return x if ok is None else jnp.where(ok.any(axis=-1)[..., None], x, 0)


def _slice(x, axis: int, tiling: Tiling, t):
    return lax.dynamic_slice_in_dim(x, t * tiling.block, tiling.block, axis)


def _pad(x, axis: int, tiling: Tiling):
    missing = tiling.count * tiling.block - tiling.length
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])
