"""Which method computes attention on a sequence that is divided over devices.

Decided from shapes, the mask as far as it is known at trace time, and the number of devices: by an
estimate of the time that forward and backward take together, see `cost`.
"""

import functools
from typing import NamedTuple

import numpy as np

from pallas_flash._context import cost
from pallas_flash._masks import Band, PositionBand
from pallas_flash._problem import Problem

METHODS = "ring", "gather", "heads"


class Choice(NamedTuple):
    """A method of context parallelism, and why.

    Attributes:
        method: "ring", "gather" or "heads".
        reason: a sentence.
        refused: why each of the others was not chosen, by name.
    """

    method: str
    reason: str
    refused: dict[str, str]


def choose(problem: Problem, devices: int, asked: str | None, *, keys: bool = True) -> Choice:
    """The method for the problem that one device holds.

    Args:
        problem: its queries and keys.
        devices: how many divide the sequence.
        asked: a method that is asked for.
        keys: whether keys and values are divided, too, and not only the queries.

    Raises:
        NotImplementedError: if what is asked for does not serve the call.
    """
    if problem.symbolic:
        raise NotImplementedError(
            "`query` must have known sizes where its sequence is sharded; got the symbolic sizes "
            f"{', '.join(map(str, problem.symbolic))}. Give each a number, or gather the sequence "
            "before the call."
        )
    load = load_of(problem, devices)
    refused = cost.refused(load, problem.num_heads)
    if asked == "gather":
        refused.pop(asked, None)
    if not keys:
        why = "Every device has all keys and values, and nothing is sent."
        refused = {"ring": why, "heads": why}
    if asked is not None:
        if asked in refused:
            raise NotImplementedError(
                "`context_parallelism` must be a method that serves the call; got "
                f"{asked!r}. {refused[asked]} Use None, or one of "
                f"{[x for x in METHODS if x not in refused]}."
            )
        refused |= {x: f"{asked!r} was asked for." for x in METHODS if x != asked}
        return Choice(asked, "asked for.", refused)
    if not keys:
        return Choice("gather", refused["ring"], refused)
    work = work_of(problem, devices)
    served = [x for x in METHODS if x not in refused]
    seconds = {x: cost.seconds(load, work, x) for x in served}
    method = cost.fastest(seconds)
    for name in served:
        refused.setdefault(name, f"Estimated to take {seconds[name] * 1e3:.3g} ms.")
    del refused[method]
    reason = f"estimated to take the least time, {seconds[method] * 1e3:.3g} ms."
    return Choice(method, reason, refused)


def load_of(problem: Problem, devices: int) -> cost.Load:
    """What one of the devices holds."""
    p = problem
    width = p.head_dim + p.value_dim
    return cost.Load(devices, p.rows, p.kv_rows, p.kv_len, width, p.dtype.itemsize, p.num_kv_heads)


def work_of(problem: Problem, devices: int) -> cost.Work:
    """What the devices have to compute, by the part of the mask that is known.

    Where arrays tell positions under a causal mask, they are taken to be in `balanced_order`.
    """
    low = high = None
    for leaf in problem.mask.leaves:
        if isinstance(leaf, PositionBand) and leaf.high is not None:
            return cost.causal(devices, balanced=True)
        if isinstance(leaf, Band) and leaf.offset is None:
            low, high = leaf.low, leaf.high
    return _work(low, high, devices, problem.q_len, problem.kv_len)


@functools.lru_cache
def _work(low, high, devices: int, q_len: int, kv_len: int) -> cost.Work:
    share = seen(low, high, devices, q_len, kv_len)
    device = np.arange(devices)
    steps = share[device[:, None], (device[:, None] - device) % devices].max(axis=0)
    return cost.Work(steps[steps > 0], share.sum(axis=1).max(), share.sum() / devices)


def seen(low, high, devices: int, q_len: int, kv_len: int) -> np.ndarray:
    """The share of pairs that each device sees of each block of keys, [devices, devices].

    Those with low <= k - q <= high; None is unbounded.
    """
    first = np.arange(devices)
    ahead = (first[:, None] * q_len - first * kv_len).astype(float)

    def up_to(x):
        """How many pairs have k - q <= x: those of a triangle without what is outside."""
        inside = (x + q_len, 1), (x, -1), (x + q_len - kv_len, -1), (x - kv_len, 1)
        corners = ((np.maximum(y, 0), sign) for y, sign in inside)
        return sum(sign * y * (y + 1) / 2 for y, sign in corners)

    pairs = float(q_len * kv_len) if high is None else up_to(high + ahead)
    if low is not None:
        pairs = pairs - up_to(low - 1 + ahead)
    return np.broadcast_to(np.maximum(pairs, 0) / (q_len * kv_len), ahead.shape)
