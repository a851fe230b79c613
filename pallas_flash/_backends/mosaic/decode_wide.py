"""o and lse in decoding at head dims above 256, through the forward for such heads.

One query of G heads that share a key head becomes G queries of one head: keys are read for 64 of
them at a time. The keys are cut into parts (KV splits), which are batch elements of the forward.
The results of the parts are combined as in `splits`.

    query [B, 1, K * G, H]  ->  [B * parts, G, K, H]
    key   [B, S, K, H]      ->  [B * parts, S / parts, K, H]    without a copy; values, too
    mask                    ->  a valid length for each part

This serves one query that sees the first keys of its batch element, see `Problem.decodes_prefix`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_flash._backends.mosaic import forward_wide, ptx, scheduler, splits
from pallas_flash._backends.mosaic.forward_common import LOWEST, log_sum_of
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.masks import Lengths, Mask
from pallas_flash._problem.problem import Problem, SplitOutput, widened
from pallas_flash._problem.scores import LOG2E
from pallas_flash._problem.tile_sizes import ForwardTile

MIN_KEYS = 256  # Keys of a part: with fewer the results of parts take long.


def num_parts(p: Problem) -> int:
    """Return how many parts of equal length give each SM two work tiles, or the most there are."""
    work_tiles = p.batch * p.num_kv_heads * -(-p.groups // ptx.ROWS)
    parts = [n for n in range(1, p.kv_len // MIN_KEYS + 1) if p.kv_len % n == 0] or [1]
    return next((n for n in parts if n * work_tiles >= 2 * scheduler.NUM_SMS), parts[-1])


def decode(problem: Problem, tile: ForwardTile):
    """Return the output [B, 1, N, V] and a `LogSum` of float32 [B, N, 1]."""
    p, parts = problem, num_parts(problem)
    batch, kv_heads, size = p.batch, p.num_kv_heads, p.kv_len // parts

    # The query sees the keys up to the end of its range.
    ends = p.mask.kv_ranges(Tiling(1, 1), Tiling(p.kv_len, 1))[:, :, 3]
    lengths = jnp.clip(ends - size * jnp.arange(parts, dtype=jnp.int32)[None], 0, size)
    lengths = jnp.broadcast_to(lengths, (batch, parts)).reshape(-1).astype(jnp.int32)

    rows = p.query.reshape(batch, 1, kv_heads, p.groups, p.head_dim).swapaxes(2, 3)
    rows = jnp.broadcast_to(rows, (batch, parts, *rows.shape[2:]))
    of_parts = dataclasses.replace(
        p,
        query=rows.reshape(-1, *rows.shape[2:]),
        key=p.key.reshape(-1, size, *p.key.shape[2:]),
        value=p.value.reshape(-1, size, *p.value.shape[2:]),
        mask=Mask((Lengths(None, lengths),)),
        sinks=None,
    )
    o, log_sum = forward_wide.forward(of_parts, tile, lengths)

    o = widened(o, jnp.float32)
    o = o.reshape(batch, parts, p.groups, kv_heads, p.value_dim).swapaxes(2, 3)
    log_sum = jax.tree.map(lambda x: x.reshape(batch, parts, kv_heads, p.groups), log_sum)
    has_keys = log_sum.l_log2 > -jnp.inf
    # The output of a part is divided by its sum of weights already.
    if log_sum.m is None:
        m, l = jnp.where(has_keys, log_sum.l_log2, LOWEST), has_keys.astype(jnp.float32)
    else:
        m, l = jnp.where(has_keys, log_sum.m, -jnp.inf), jnp.exp2(log_sum.l_log2)
        o = o * l[..., None]
    exact = log_sum.max_logits
    exact = exact if p.large or exact is None else exact * LOG2E
    sinks = None if p.sinks is None else p.sinks.reshape(1, kv_heads, p.groups)
    o, *statistics = splits.combine(p, sinks, o, m, l, exact)
    o = o.reshape(batch, 1, p.num_heads, p.value_dim)
    o = SplitOutput.from_float32(o, p.dtype, split=p.split_output)
    statistics = [x.reshape(batch, p.num_heads, 1) for x in statistics]
    return o, log_sum_of(statistics, large=p.large)
