"""Chooses the method of context parallelism.

The choice follows from shapes, the number of devices, and the part of the mask that is known while
tracing. It minimizes the estimated time of forward and backward together, see `cost`.
"""

import functools
from typing import NamedTuple

import numpy as np

from pallas_flash._execution.context import cost
from pallas_flash._problem.problem import Problem

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
    """Return the method for the problem that one device holds.

    Args:
        problem: the device's queries and keys.
        devices: the number of devices that divide the sequence.
        asked: the method that the call names, or None.
        keys: whether devices divide keys and values, too, and not only the queries.

    Raises:
        NotImplementedError: if the named method does not serve the call.
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
    """Return the sizes of one device's shard."""
    p = problem
    width = p.head_dim + p.value_dim
    return cost.Load(devices, p.rows, p.kv_rows, p.kv_len, width, p.dtype.itemsize, p.num_kv_heads)


def work_of(problem: Problem, devices: int) -> cost.Work:
    """Return the work of the devices, by the part of the mask that is known.

    Arrays of positions under a causal mask are assumed to be in `balanced_order`.
    """
    low = high = None
    for window in problem.mask.windows:
        if window.positions is not None and window.high is not None:
            return cost.causal(devices, balanced=True)
        if window.known:
            low, high = window.low, window.high
    return _work(low, high, devices, problem.q_len, problem.kv_len)


@functools.lru_cache
def _work(low, high, devices: int, q_len: int, kv_len: int) -> cost.Work:
    share = allowed_share(low, high, devices, q_len, kv_len)
    device = np.arange(devices)
    steps = share[device[:, None], (device[:, None] - device) % devices].max(axis=0)
    return cost.Work(steps[steps > 0], share.sum(axis=1).max(), share.sum() / devices)


def allowed_share(low, high, devices: int, q_len: int, kv_len: int) -> np.ndarray:
    """Return the share of allowed pairs for each shard of queries and keys, [devices, devices].

    A pair is allowed if low <= k - q <= high; None is unbounded.
    """
    first = np.arange(devices)
    ahead = (first[:, None] * q_len - first * kv_len).astype(float)

    def up_to(x):
        """Count the pairs with k - q <= x: a triangle without its corners outside of the block."""
        inside = (x + q_len, 1), (x, -1), (x + q_len - kv_len, -1), (x - kv_len, 1)
        corners = ((np.maximum(y, 0), sign) for y, sign in inside)
        return sum(sign * y * (y + 1) / 2 for y, sign in corners)

    pairs = float(q_len * kv_len) if high is None else up_to(high + ahead)
    if low is not None:
        pairs = pairs - up_to(low - 1 + ahead)
    return np.broadcast_to(np.maximum(pairs, 0) / (q_len * kv_len), ahead.shape)
