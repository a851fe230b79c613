"""The forward kernel: o and lse of a resident query tile, with keys and values streamed.

    s    = q @ k.T    where there is more than a scale, see _problem.scores     [block_q, block_kv]
    m'   = max(m, c * rowmax(s))    c = scale * log2(e), so base 2      [block_q]
    p    = exp2(c * s - m')         alpha = exp2(m - m')
    l    = alpha * l + rowsum(p)    as partial sums, see PARTIAL_SUMS
    acc  = alpha * acc + dropout(p) @ v                                 [block_q, V]

    at the end    o = acc / l    lse_log2 = m + log2(l)    with a sink in both, if there is one

A separate maximum m is of s in base e, and stays apart from log2(l); see `LogSum`.

m and l are the online softmax of Milakov and Gimelshein (2018). The loop order comes from
FlashAttention-2 (Dao, 2023).
"""

import functools
import operator

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash._backends.triton import memory, visibility
from pallas_flash._backends.triton.grid import QueryTiles
from pallas_flash._backends.triton.launch import launch, load_tables, whole
from pallas_flash._backends.triton.spec import KernelSpec, Rows, make_spec
from pallas_flash._problem.dropout import rescaled
from pallas_flash._problem.problem import Extras, Problem
from pallas_flash._problem.tile_sizes import Tile
from pallas_flash._problem.traversal import in_tile, visit

# Partial sums of a row of p, which are added up after the loop. A thread holds two of every 8
# columns in the accumulators of the matrix units, so 8 partial sums need no exchange between
# threads.
PARTIAL_SUMS = 8


def _contiguous(ref, kv_tile, keys, width: int, spec: KernelSpec):
    span = pl.ds(kv_tile * spec.kv.block, spec.kv.block)
    return (memory.load(ref.at[span, :], keys, width),), None


def _scaled(x, scales):
    """Return the columns of `x` times the scale of each."""
    return x if scales is None else x * scales


def attend(
    rows: Rows,
    q,
    k_ref,
    v_ref,
    scale,
    tiles,
    kept_of,
    extras: Extras,
    spec: KernelSpec,
    load=_contiguous,
):
    """Run the online softmax of a program's rows over a range of key tiles.

    Args:
        rows: where the resident queries are.
        q: the queries, a tuple of parts of their columns, most often of one: [rows, padded H].
        k_ref: the keys of the head, [S, padded H].
        v_ref: the values of the head, [S, padded V].
        scale: the scale, float32.
        tiles: the tiles to visit, as `visit` takes them.
        kept_of: maps the number and the positions of a key tile to what dropout keeps of it.
        extras: mask, scores, sinks and dropout.
        spec: what the kernel knows when it is compiled.
        load: `load(ref, kv_tile, keys, width, spec)` returns a tile of keys or values, as a tuple
            of as many parts of its columns as `q` has, and the scale of each key, or None.

    Returns:
        acc, a tuple of float32 [rows, padded V / parts], m and l float32 [rows].
    """
    mask, block_kv = extras.mask, spec.kv.block
    parts, num_rows = len(q), len(rows.pos)

    def step(kv_tile, masked, carry):
        acc, m, l = carry
        k_pos = in_tile(kv_tile, block_kv)
        at = rows.indices(k_pos)
        keys = visibility.keys_to_load(spec, mask, rows, k_pos, masked)
        k, k_scales = load(k_ref, kv_tile, keys, spec.head_dim, spec)
        # Before the first product. After it the kernel would take 207 registers at head dim 128,
        # not 192, and at 64 two programs would fit on an SM, not four.
        keep = kept_of(kv_tile, k_pos)
        s = functools.reduce(operator.add, map(spec.dot_t, q, k))
        s, c = spec.logits(extras, _scaled(s, k_scales), scale, *at)
        if masked:
            s = jnp.where(mask.allowed(*at), s, -jnp.inf)
        m_new = spec.fence(jnp.maximum(m, spec.row_max(s, c)), kv_tile, spec.kv)
        v, v_scales = load(v_ref, kv_tile, keys, spec.value_dim, spec)
        # In a row without keys so far, -inf - -inf would be NaN, and -inf - 0 gives weight 0.
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        p = spec.weights(s, c, m_safe[:, None])
        alpha = spec.rescaling(m, m_safe, spec.exp2)
        l = alpha[:, None] * l + jnp.sum(p.reshape(len(p), -1, PARTIAL_SUMS), axis=1)
        p = _scaled(spec.drop(keep, p), v_scales)
        p = p.astype(v[0].dtype)
        acc = tuple(alpha[:, None] * x + spec.dot(p, y) for x, y in zip(acc, v, strict=True))
        return acc, m_new, l

    start = (
        (jnp.zeros((num_rows, v_ref.shape[-1]), jnp.float32),) * parts,
        jnp.full((num_rows,), -jnp.inf, jnp.float32),
        jnp.zeros((num_rows, PARTIAL_SUMS), jnp.float32),
    )
    acc, m, l = visit(tiles, step, start, spec.sparsity)
    return acc, m, jnp.sum(l, axis=1)


def pallas_flash_forward(q_ref, k_ref, v_ref, scale_ref, *refs, spec: KernelSpec, here):
    """Compute one query tile of one head."""
    tables, o_refs, row_refs = spec.outputs(refs)
    tiles, extras = load_tables(tables, spec, streamed=spec.kv)
    b, h, q_tile = here()
    rows = spec.rows(b, h, q_tile, q_ref)

    def kept_of(kv_tile, k_pos):
        return spec.kept_in_tile(extras, b, h, q_tile, kv_tile)

    (acc,), m, l = attend(
        rows, (rows.q,), k_ref, v_ref, scale_ref[0], tiles(0), kept_of, extras, spec
    )
    max_logits, has_keys = spec.max_logits_of(m), l > 0.0
    l, factor = jnp.where(has_keys, l, 1.0), 1.0
    if spec.separate_max or extras.sinks is not None:
        m = jnp.where(has_keys, m, 0.0)
    if extras.sinks is not None:
        m, l, factor = spec.with_sink(m, l, extras.sinks[h])
    weight = rescaled(extras.dropout, factor / l)
    parts = spec.parts_of_output(acc * weight[:, None], o_refs[0].dtype)
    for ref, x in zip(o_refs, parts, strict=True):
        memory.store(ref, x, rows.valid, spec.value_dim)
    for ref, x in zip(row_refs, spec.statistics(m, l, has_keys) + max_logits, strict=True):
        memory.store_row(ref, x, rows.valid)


def forward(problem: Problem, tile: Tile, *, interpret: bool):
    """Return the output [B, T, N, V] and a `LogSum` of float32 [B, N, T]."""
    p = problem
    spec, extras, table = make_spec(p, tile, streamed="kv", interpret=interpret)
    layout = QueryTiles(p, spec, extras.mask)
    statistic = layout.row_statistic()
    results = launch(
        pallas_flash_forward,
        [
            (p.query, layout.rows(p.head_dim)),
            (p.key, layout.keys(p.head_dim)),
            (p.value, layout.keys(p.value_dim)),
            whole(p.scale[None]),
            *layout.operands(extras, table),
        ],
        [
            *[((*p.query.shape[:3], p.value_dim), p.dtype, layout.rows(p.value_dim))]
            * spec.num_parts,
            *[((p.batch, p.num_heads, p.q_len), jnp.float32, statistic)] * spec.num_row_outputs,
        ],
        spec=spec,
        tile=tile,
        grid=layout.grid,
        here=layout.here,
    )
    return spec.results_of_forward(results)
