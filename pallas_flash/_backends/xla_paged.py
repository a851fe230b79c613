"""Paged attention in plain JAX: any device, memory linear in the tokens.

The algorithm is as in `_backends.xla`, for row tiles of requests (`_problem.paged`). Each row
tile gathers the keys of one tile at a time from their pages. Letters of the einsums: k key head, r
row, s key, h head dim of q and k, v head dim of v.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash._backends.xla import finish, online_softmax
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.paged import PagedProblem, RowTiles
from pallas_flash._problem.traversal import Sparsity, in_tile, visit

# Rows and keys of a tile.
BLOCK_ROWS, BLOCK_KV = 64, 256


def forward(problem: PagedProblem):
    """Return the output [tokens, N, V] and the LSE float32 or float64 [tokens, N]."""
    p, requests, groups = problem, problem.requests, problem.groups
    block = min(BLOCK_ROWS, p.q_len * groups)
    kv = Tiling(p.kv_len, min(BLOCK_KV, p.kv_len))
    tiles = RowTiles.from_problem(p, block, kv)
    queries = p.query.reshape(p.tokens, p.num_kv_heads, groups, p.head_dim)
    kv_head = jnp.arange(p.num_kv_heads, dtype=jnp.int32)[:, None]
    starts, of_tile = jnp.asarray(requests.starts), jax.tree.map(jnp.asarray, tiles)
    mask, scores, wide = p.mask, p.scores, p.accumulator_dtype

    def einsum(equation, a, b):
        return jnp.einsum(equation, a, b, precision=p.precision, preferred_element_type=wide)

    def row_tile(i):
        request = of_tile.request[i]
        row = of_tile.first_row[i] + jnp.arange(block, dtype=jnp.int32)
        # Rows beyond the last one get its indices.
        row = jnp.clip(row, 0, jnp.maximum(of_tile.num_rows[i] - 1, 0))
        query, head = lax.div(row, jnp.int32(groups)), lax.rem(row, jnp.int32(groups))
        q = jnp.moveaxis(queries[starts[request] + query, :, head], 1, 0)  # [K, block, H]
        heads = kv_head * groups + head[None]  # [K, block]

        def step(kv_tile, masked, carry):
            del masked  # The mask also hides keys whose pages hold anything.
            position = in_tile(kv_tile, kv.block)
            at = request, heads[..., None], query[None, :, None], position[None, None]
            page = jnp.clip(requests.page_of(request, position), 0, requests.num_pages - 1)
            of_page = position % requests.page_size
            k, v = (x[page, of_page].astype(p.dtype) for x in (p.key_pages, p.value_pages))
            k_scales, v_scales = (
                _scales_at(x, page, of_page) for x in (p.key_scales, p.value_scales)
            )
            s = p.scale * (einsum("krh,skh->krs", q, k) * k_scales)
            s = scores.logits(s, *at) if scores else s
            ok = mask.allowed(*at)
            s = jnp.where(ok, s, -jnp.inf)
            # Zero where no query sees the key, because 0 * NaN is NaN.
            seen = ok.any(axis=(0, 1))
            v, v_scales = jnp.where(seen[:, None, None], v, 0), jnp.where(seen, v_scales, 0)

            def product(weight):
                return einsum("krs,skv->krv", (weight * v_scales).astype(v.dtype), v)

            return online_softmax(carry, s, s.max(axis=-1), product, large=p.large)

        rows = q.shape[:-1]
        start = (
            jnp.full(rows, -jnp.inf, wide),
            jnp.zeros(rows, wide),
            jnp.zeros((*rows, p.value_dim), wide),
        )
        sums = visit(tuple(of_tile.ranges[i]), step, start, Sparsity.RANGES)
        acc, factor, log_sum = finish(sums, None if p.sinks is None else p.sinks[heads])
        return (acc * factor[..., None]).astype(p.dtype), log_sum.lse

    o, lse = lax.map(row_tile, jnp.arange(len(tiles.request), dtype=jnp.int32))
    tile, row, exists = tiles.tile_of_rows(p)

    def of_tokens(x, fill):
        x = jnp.where(exists.reshape(-1, *[1] * (x.ndim - 2)), x[tile, :, row], fill)
        # [tokens * G, K, ..] to [tokens, N, ..].
        x = x.reshape(p.tokens, groups, p.num_kv_heads, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(p.tokens, p.num_heads, *x.shape[3:])

    return of_tokens(o, 0), of_tokens(lse, -jnp.inf)


def _scales_at(scales, page, row) -> jax.Array:
    """Return the scales of keys, [K | 1, 1, keys | 1]."""
    if scales is None:
        return jnp.ones((1, 1, 1), jnp.float32)
    return scales[:, None, None] if scales.ndim == 1 else scales[page, :, row].T[:, None]
