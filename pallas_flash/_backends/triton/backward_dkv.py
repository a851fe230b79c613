"""dk and dv of a resident key/value tile, with queries streamed.

    s_t  = k @ q.T                      dp_t = v @ do.T                 [block_kv, block_q]
    p_t  = exp2(c * s_t - lse_log2)     c = scale * log2(e)
    dv  += dropout(p_t) @ do                                            [block_kv, V]
    ds_t = p_t * (dropout(dp_t) - delta)    through the derivative of the scores, see `scores`
    dk  += ds_t @ q                     times scale once, after the loop [block_kv, H]

Scores are computed transposed, so that no product needs its accumulator transposed. A program sums
over the query heads of its group. The loop over heads goes around the loop over tiles, so that the
inner loop keeps its pipeline. Where that leaves a GPU with low occupancy, several programs split
the heads equally, and their float32 sums are added after the launch. Where dk and dv do not fit in
registers together, the kernel runs once for each.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.triton import memory, visibility
from pallas_flash._backends.triton.grid import side_by_side
from pallas_flash._backends.triton.launch import launch, load_tables, table_operands, whole
from pallas_flash._backends.triton.spec import KernelSpec, make_spec, softmax_shift
from pallas_flash._backends.triton.tiles import splits_of_heads
from pallas_flash._problem.dropout import drop, rescaled, shrunk
from pallas_flash._problem.problem import Extras, Problem
from pallas_flash._problem.tile_sizes import Tile
from pallas_flash._problem.traversal import in_tile, visit


class KeyTile(NamedTuple):
    """The resident tile of a program, and the queries that stream past it.

    Attributes:
        spec: the configuration of the kernel.
        extras: mask, scores and dropout.
        queries: refs of q, do, the `LogSum` and delta.
        scale: the scale of scores.
        b: the batch element, int32.
        first_head: the first query head, int32.
        number: the number of the key tile, int32.
        pos: positions of the keys, int32 [block_kv].
        valid: which keys exist, bool [block_kv]; None means all.
        k: the keys, [block_kv, padded H].
        v: the values, [block_kv, padded V]; None in a launch without dk.
        want_dv: whether dv is computed.
    """

    spec: KernelSpec
    extras: Extras
    queries: tuple
    scale: Any
    b: Any
    first_head: Any
    number: Any
    pos: Any
    valid: Any
    k: Any
    v: Any
    want_dv: bool

    def add(self, g, q_tile, masked, sums):
        """Return dk and dv with a query tile of head g added."""
        spec, extras, mask, (dk, dv) = self.spec, self.extras, self.extras.mask, sums
        q_ref, do_ref, log_sum_refs, delta_ref = self.queries
        q_pos = in_tile(q_tile, spec.q.block)
        span = pl.ds(q_tile * spec.q.block, spec.q.block)
        at = self.b, self.first_head + g, q_pos[None, :], self.pos[:, None]
        exist = rows = None
        if spec.mask_loads and masked:
            exist = memory.valid_positions(spec.q, q_pos)
            rows = visibility.queries_with_keys(mask, *at[:2], q_pos, self.pos, self.valid)

        def visible(x):
            return jnp.where(mask.allowed(*at), x, 0.0)

        def load_do():
            return memory.load(do_ref.at[span, g, :], rows, spec.value_dim)

        # The order of loads and products matters. lse is loaded before the products, so that the
        # exponentials run under the second one. delta is loaded late and holds no registers.
        log_sum = jax.tree.map(lambda ref: memory.load_row(ref.at[g, span], exist), log_sum_refs)
        q = memory.load(q_ref.at[span, g, :], rows, spec.head_dim)
        do = None if self.v is None else load_do()
        s_t, c, pull = spec.logits_vjp(extras, spec.dot_t(self.k, q), self.scale, *at)
        dp_t = 0.0 if self.v is None else spec.dot_t(self.v, do)
        log_sum = jax.tree.map(lambda x: x[None, :], softmax_shift(extras, log_sum))
        p_t = spec.probabilities(s_t, c, log_sum)
        kept = spec.kept_in_tile(extras, *at[:2], q_tile, self.number, transposed=True)
        if masked:
            p_t = visible(p_t)
        if do is None:
            p_t = spec.fence(p_t, q_tile, spec.q)
            do = load_do()
        if self.want_dv:
            dv = dv + spec.dot(drop(kept, p_t).astype(do.dtype), do)
        if self.v is not None:
            delta = shrunk(extras.dropout, memory.load_row(delta_ref.at[g, span], exist))
            ds_t = pull(p_t * (drop(kept, dp_t) - delta[None, :]))
            if masked:
                ds_t = visible(ds_t)  # Hides also what is not finite in dp_t.
            dk = dk + spec.dot(ds_t.astype(q.dtype), q)
        return dk, dv


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    scale_ref,
    do_ref,
    *refs,
    spec: KernelSpec,
    here,
    want_dk: bool,
    want_dv: bool,
):
    n_out = want_dk + want_dv
    log_sum_refs, (delta_ref, *refs) = spec.log_sum(refs)
    tables, outputs = refs[:-n_out], list(refs[-n_out:])
    tiles, extras = load_tables(tables, spec, streamed=spec.q)
    b, split, kv_tile = here()
    groups = q_ref.shape[1]
    first_head = split * groups
    k_pos = in_tile(kv_tile, spec.kv.block)
    keys = memory.valid_positions(spec.kv, k_pos)
    k = memory.load(k_ref, keys, spec.head_dim)
    v = memory.load(v_ref, keys, spec.value_dim) if want_dk else None
    queries = q_ref, do_ref, log_sum_refs, delta_ref
    scale = scale_ref[0]
    tile = KeyTile(
        *(spec, extras, queries, scale, b, first_head, kv_tile, k_pos, keys, k, v, want_dv)
    )

    def each_head(g, sums):
        return visit(tiles(g), functools.partial(tile.add, g), sums, spec.sparsity)

    zeros = tuple(
        jnp.zeros(ref.shape, jnp.float32) if wanted else ()
        for ref, wanted in ((k_ref, want_dk), (v_ref, want_dv))
    )
    # Pallas's interpreter fails on a constant head number, so it has a loop even over one head.
    loop = groups > 1 or spec.interpret
    dk, dv = lax.fori_loop(0, groups, each_head, zeros) if loop else each_head(0, zeros)
    if want_dk:
        dk = rescaled(extras.dropout, dk * scale)
        memory.store(outputs.pop(0), dk, keys, spec.head_dim)
    if want_dv:
        memory.store(outputs.pop(0), rescaled(extras.dropout, dv), keys, spec.value_dim)


def pallas_flash_dkv(*refs, **options):
    """Compute dk and dv of one key/value tile of one key/value head."""
    _kernel(*refs, **options, want_dk=True, want_dv=True)


def pallas_flash_dk(*refs, **options):
    """Compute dk alone."""
    _kernel(*refs, **options, want_dk=True, want_dv=False)


def pallas_flash_dv(*refs, **options):
    """Compute dv alone."""
    _kernel(*refs, **options, want_dk=False, want_dv=True)


def dkv(problem: Problem, do, log_sum, delta, tile: Tile, kernel, *, interpret: bool):
    """Return a list of what `kernel` computes: dk [B, S, K, H], dv [B, S, K, V] or both."""
    p = problem
    spec, extras, table = make_spec(p, tile, streamed="q", interpret=interpret)
    splits = splits_of_heads(p.groups, p.kv_rows, bool(p.mask))
    groups = p.groups // splits
    heads = side_by_side(p, extras.mask, p.q_len * p.groups)

    def index(split, j, outer, b):
        """Return the batch element, the split (of all query heads) and the tile of grid indices."""
        return b, outer * heads * splits + split, j

    def head_rows(width):
        """Return the spec of all queries of a split."""

        def block(*ids):
            b, split, _ = index(*ids)
            return b, 0, split, 0

        return pl.BlockSpec((None, p.q_len, groups, memory.padded(width)), block)

    def keys(width, splits_of_a_head=1):
        """Return the spec of a tile of [B, S, splits, width].

        Arrays [B, S, K, width] have one entry for `splits_of_a_head` splits.
        """

        def block(*ids):
            b, split, j = index(*ids)
            return b, j, lax.div(split, np.int32(splits_of_a_head)), 0

        return pl.BlockSpec((None, spec.kv.block, None, memory.padded(width)), block)

    statistic = pl.BlockSpec((None, groups, p.q_len), lambda *ids: (*index(*ids)[:2], 0))
    widths = []
    if kernel is not pallas_flash_dv:
        widths.append(p.head_dim)
    if kernel is not pallas_flash_dk:
        widths.append(p.value_dim)
    dtype = p.dtype if splits == 1 else jnp.float32
    sums = launch(
        kernel,
        [
            (p.query, head_rows(p.head_dim)),
            (p.key, keys(p.head_dim, splits)),
            (p.value, keys(p.value_dim, splits)),
            whole(p.scale[None]),
            (do, head_rows(p.value_dim)),
            *((x, statistic) for x in (*jax.tree.leaves(log_sum), delta)),
            *table_operands(extras, table, index, heads=groups),
        ],
        [((*p.key.shape[:2], p.num_kv_heads * splits, w), dtype, keys(w)) for w in widths],
        spec=spec,
        tile=tile,
        # Key tile 0 comes first. Under a causal mask it has the most queries, and heavy tiles
        # should start early.
        grid=(heads * splits, spec.kv.count, p.num_kv_heads // heads, p.batch),
        here=lambda: index(*map(pl.program_id, range(4))),
    )
    if splits == 1:
        return sums
    apart = (*p.key.shape[:3], splits, -1)
    return [x.reshape(apart).sum(axis=3).astype(p.dtype) for x in sums]
