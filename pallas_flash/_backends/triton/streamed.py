"""A tile of ds from whole arrays, for kernels whose resident tile is a sum of ds.

    s   = q @ k.T                   dp = do @ v.T                       [block_q, block_kv]
    p   = exp2(c * s - lse_log2)    c = scale * log2(e); _problem.scores has the other terms of s
    ds  = p * (dropout(dp) - delta) through the derivative of the scores

Each tile reads its part of all arrays.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.triton import memory, visibility
from pallas_flash._backends.triton.launch import kernel_arrays, whole
from pallas_flash._backends.triton.spec import KernelSpec, softmax_shift
from pallas_flash._problem.dropout import drop, shrunk
from pallas_flash._problem.problem import Extras, Problem
from pallas_flash._problem.tile_sizes import Tile
from pallas_flash._problem.traversal import in_tile


class Streamed(NamedTuple):
    """Refs of whole arrays, of which a program reads the tiles that it visits.

    Attributes:
        spec: the configuration of the kernel.
        extras: mask, scores and dropout.
        some: ref of the table of `make_spec`, positive where a tile is not empty; None if all are
            full.
        q: [B, T, N, H].
        k: [B, S, K, H].
        v: [B, S, K, V].
        do: [B, T, N, V].
        rows: the `LogSum` and delta, of [B, N, T].
        scale: the scale of scores.
    """

    spec: KernelSpec
    extras: Extras
    some: Any
    q: Any
    k: Any
    v: Any
    do: Any
    rows: tuple
    scale: Any

    @classmethod
    def from_refs(cls, refs, spec: KernelSpec) -> tuple["Streamed", Any]:
        """Return the refs of `operands`, and the ref of the one output."""
        q, k, v, scale_ref, do, *refs = refs
        log_sum_refs, (delta_ref, *refs) = spec.log_sum(refs)
        *refs, out_ref = refs
        some = refs.pop(0) if spec.masked else None
        rows = log_sum_refs, delta_ref
        return cls(spec, spec.load_extras(refs), some, q, k, v, do, rows, scale_ref[0]), out_ref

    def ds(self, index: tuple, logits_vjp):
        """Return ds of a tile, zero where a score is hidden.

        Args:
            index: the batch element, the head, the query tile and the key tile.
            logits_vjp: as in `KernelSpec`; it says in what the derivative is.
        """
        spec, extras, scale = self.spec, self.extras, self.scale
        b, h, q_tile, kv_tile = index
        mask, block_q, block_kv = extras.mask, spec.q.block, spec.kv.block
        groups = self.q.shape[2] // self.k.shape[2]
        q_pos, k_pos = in_tile(q_tile, block_q), in_tile(kv_tile, block_kv)
        exist = memory.valid_positions(spec.q, q_pos)
        rows, keys = exist, memory.valid_positions(spec.kv, k_pos)
        if spec.mask_loads:
            rows, keys = (
                visibility.queries_with_keys(mask, b, h, q_pos, k_pos, keys),
                visibility.visible_keys(mask, b, h, q_pos, k_pos, rows),
            )
        at = b, h, q_pos[:, None], k_pos[None, :]
        q_span, kv_span = pl.ds(q_tile * block_q, block_q), pl.ds(kv_tile * block_kv, block_kv)
        q = memory.load(self.q.at[b, q_span, h, :], rows, spec.head_dim)
        k = memory.load(self.k.at[b, kv_span, h // groups, :], keys, spec.head_dim)
        s, c, pull = logits_vjp(extras, spec.dot_t(q, k), scale, *at)
        do = memory.load(self.do.at[b, q_span, h, :], rows, spec.value_dim)
        v = memory.load(self.v.at[b, kv_span, h // groups, :], keys, spec.value_dim)
        dp = spec.dot_t(do, v)
        dp = drop(spec.kept_in_tile(extras, b, h, q_tile, kv_tile), dp)
        log_sum, delta = jax.tree.map(
            lambda ref: memory.load_row(ref.at[b, h, q_span], exist)[:, None], self.rows
        )
        delta = shrunk(extras.dropout, delta)
        p = spec.probabilities(s, c, softmax_shift(extras, log_sum))
        ds = pull(p * (dp - delta))
        if spec.masked:
            ds = jnp.where(mask.allowed(*at), ds, 0.0)
        return ds

    def add(self, acc, index, tile):
        """Return `acc` with `tile(*index)` added, where the tile is not empty."""
        if self.some is None:
            return acc + tile(*index)
        at = (0 if size == 1 else i for size, i in zip(self.some.shape, index, strict=True))
        return lax.cond(self.some[*at] > 0, lambda acc: acc + tile(*index), lambda acc: acc, acc)


def small_tile(dq: Tile) -> Tile:
    """Return a tile of at most 64 x 64 that needs no more shared memory than dq's tile.

    dq has q and do resident and streams k and v. Here all four are streamed.
    """
    block_q, block_kv = min(64, dq.block_q), min(64, dq.block_kv)
    room = dq.block_q + dq.num_stages * dq.block_kv
    return Tile(block_q, block_kv, 4, 2 if 2 * (block_q + block_kv) <= room else 1)


def operands(problem: Problem, do, log_sum, delta, extras: Extras, some):
    """Return the operands of `Streamed`."""
    p = problem
    rows = *jax.tree.leaves(log_sum), delta, *([] if some is None else [some])

    def wide(x):
        return x, pl.BlockSpec((*x.shape[:3], memory.padded(x.shape[3])), lambda *_: (0,) * 4)

    return [
        *(wide(p.query), wide(p.key), wide(p.value), whole(p.scale[None]), wide(do)),
        *map(whole, (*rows, *kernel_arrays(extras))),
    ]
