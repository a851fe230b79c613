"""KV splits: shares of the K/V blocks for CTAs of their own, where work tiles leave SMs idle.

The result of a split is acc, m and l of an online softmax. XLA combines the results exactly:

    m = max_i m_i         w_i = exp2(m_i - m)
    l = sum_i w_i l_i     o = sum_i w_i acc_i / l     lse_log2 = m + log2(l), or both apart
"""

import functools
import operator

import jax.numpy as jnp

from pallas_flash._backends.mosaic import scheduler
from pallas_flash._backends.mosaic.forward_common import RowMax, finish
from pallas_flash._backends.mosaic.score_mask import left_out
from pallas_flash._problem.dropout import rescaled
from pallas_flash._problem.paged import AnyProblem
from pallas_flash._problem.scores import LOG2E

MIN_BLOCKS = 4  # K/V blocks of a split: fewer are not worth its results.


def num_splits(work_tiles: int, blocks: int) -> int:
    """Return into how many splits the K/V blocks of each work tile are cut, `blocks` at most.

    With these, the CTA that has most is done first. To start a split takes as long as a block.
    """

    def time(splits: int) -> float:
        return -(-work_tiles * splits // scheduler.NUM_SMS) * (blocks / splits + 1)

    # About two for each SM.
    most = min(blocks // MIN_BLOCKS, -(-2 * scheduler.NUM_SMS // work_tiles))
    return min(range(1, max(1, most) + 1), key=time)


def ascending(x):
    """Return the sum of x along axis 1, in this order."""
    return functools.reduce(operator.add, [x[:, i] for i in range(x.shape[1])])


def combine(p: AnyProblem, sinks, acc, m, l, exact=None) -> list:
    """Return the float32 output and the arrays of `finish`.

    Args:
        p: the call.
        sinks: of each row, or None.
        acc: [B, splits, ..., V].
        m: [B, splits, ...].
        l: [B, splits, ...].
        exact: as in `RowMax`, [B, splits, ...], or None.
    """
    top = m.max(axis=1)
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp2((m - top[:, None]) * (LOG2E if p.large else 1.0))
    row_max = RowMax(top, None if exact is None else exact.max(axis=1))
    row_max = row_max.shifted(left_out(p.scores))
    statistics, factor = finish(row_max, ascending(weights * l), sinks, large=p.large)
    o = ascending(weights[..., None] * acc) * rescaled(p.dropout, factor)[..., None]
    return [o, *statistics]
