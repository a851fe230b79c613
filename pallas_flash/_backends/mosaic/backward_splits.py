"""How many CTAs share the work on a K/V tile of the backward, and which split each has.

A CTA keeps one K/V tile and walks over the queries of all query heads that share it. Where that
leaves SMs without work, several CTAs split these heads, or the queries of a single head, and what
they find for dk and dv is summed. `num_splits` chooses the number by one estimate of the time.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_flash._backends.mosaic import common, scheduler
from pallas_flash._problem import features
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.features import MaskKind
from pallas_flash._problem.problem import Problem

# CTAs among which the queries of one head are split, at most.
MAX_QUERY_SPLITS = 4

# Queries of all heads of a CTA under a causal mask, about; the queries of one head are not cut for
# it. CTAs of other K/V tiles are done with a head at other times. With more queries they soon read
# and add in more memory than L2 holds.
MAX_CAUSAL_QUERIES = 8192

# Bytes of partial dk and dv, at most, where these are stored apart and summed in a fixed order.
MAX_PARTIAL_BYTES = 2**31

# The unit of time below is a step of 128 queries and 128 keys.
STEP = 128
STEPS_OF_A_CTA = 2  # Start and end of a CTA.
STEPS_OF_SUMMING = 2  # Summing the partial dk and dv at all,
STEPS_OF_SUMMING_A_TILE = 0.015  # and each K/V tile (each split of it, in a fixed order).


@dataclasses.dataclass(frozen=True)
class Splits:
    """The CTAs that share one K/V tile.

    Attributes:
        count: their number. If they are more than the query heads, they split each head's queries.
        groups: query heads that share a K/V head.
    """

    count: int
    groups: int

    @property
    def query_splits(self) -> int:
        """CTAs among which the queries of a head are split."""
        return max(1, self.count // self.groups)

    def heads(self, number):
        """Return the K/V head, the first query head and the number of query heads of a CTA.

        `number` counts the splits of all K/V heads.
        """
        if self.count == 1:
            return number, number * self.groups, self.groups
        kv_head = common.quotient(number, self.count)
        if self.query_splits > 1:
            return kv_head, common.quotient(number, self.query_splits), 1
        small, rest = divmod(self.groups, self.count)
        split = common.remainder(number, self.count)
        first, stop = (i * small + jnp.minimum(i, rest) for i in (split, split + 1))
        return kv_head, kv_head * self.groups + first, stop - first

    def query_split(self, number):
        """Return which split of a head's inner tiles the CTA has, and how many there are."""
        return common.remainder(number, self.query_splits), self.query_splits


class Steps(NamedTuple):
    """The steps of K/V tiles for one head; where only the GPU knows them, steps of all queries.

    Attributes:
        mean: of all tiles.
        longest: of the tile with most.
        equal: whether all tiles are known to have as many.
    """

    mean: float
    longest: float
    equal: bool

    @classmethod
    def from_problem(cls, p: Problem, q: Tiling, kv: Tiling) -> "Steps":
        """Return the steps of a call.

        Not to be called where `jax.vmap` adds instances: it computes with the call's own mask.
        """
        ranges = p.mask.q_ranges(q, kv)
        known = isinstance(ranges, np.ndarray) and not p.mask.scattered
        tiles = ranges[..., 3] - ranges[..., 0] if known else np.int32(q.count)
        steps = np.minimum(tiles * q.block, p.q_len) / STEP
        return cls(steps.mean(), steps.max(), known and steps.min() == steps.max())


def num_splits(
    p: Problem, batch: int, steps: Steps, kv: Tiling, deterministic: bool, ctas: int = 1
) -> int:
    """Return the number of CTAs per K/V tile that the estimate finds the fastest.

    Args:
        p: the call.
        batch: batch elements of all instances.
        steps: the steps of K/V tiles.
        kv: the tiles of keys.
        deterministic: whether dk and dv must be summed in a fixed order.
        ctas: CTAs of a cluster; "CTA" elsewhere is then such a cluster.
    """
    places = scheduler.NUM_SMS // ctas
    kv_tiles = batch * p.num_kv_heads * kv.count

    def time(splits: int):
        """Waves of equal CTAs. Unequal ones fill all SMs until the second half of the longest."""
        heads = -(-p.groups // splits) if splits <= p.groups else p.groups / splits
        mean, longest = (heads * x + STEPS_OF_A_CTA for x in steps[:2])
        waves = kv_tiles * splits / places
        if steps.equal or waves <= 1:
            computing = math.ceil(waves) * longest
        else:
            computing = waves * mean + longest / 2
        if splits == 1:
            return computing
        summed = kv_tiles * (splits if deterministic else 1)
        return computing + STEPS_OF_SUMMING + STEPS_OF_SUMMING_A_TILE * summed

    fewest, most = 1, p.groups
    if features.kind_of(p.mask) is MaskKind.CAUSAL:
        fewest = -(-p.groups // -(-MAX_CAUSAL_QUERIES // p.q_len))
    if deterministic:
        partial = 4 * batch * p.kv_len * p.num_kv_heads * (p.head_dim + p.value_dim)
        most = min(most, max(1, MAX_PARTIAL_BYTES // partial))
    elif p.groups == 1:
        # Only SMs that would have no CTA take part of a head's queries.
        most = max(1, min(MAX_QUERY_SPLITS, places // kv_tiles))
    return min(range(min(fewest, most), most + 1), key=time)
