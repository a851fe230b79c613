"""Which method computes attention on a sequence that is divided over devices.

Decided from shapes, the mask as far as it is known at trace time, and the number of devices: by an
estimate of the time that forward and backward take together on GPUs like the H200.

    work        pairs of queries and keys, on the device that has the most of them to compute
    sent        bytes that a device receives: while kernels run (ring), or before they may
"""

from typing import NamedTuple

import numpy as np

from pallas_flash._masks import Band
from pallas_flash._problem import Problem

METHODS = "ring", "gather", "heads"

# Of the kernels, and of NVLink in one direction; seconds for each message, and for each step of the
# ring, whose kernels and branch start anew. Not measured: the last two are rough.
FLOPS, BYTES, LATENCY, STEP = 550e12, 450e9, 15e-6, 40e-6


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
    refused: dict[str, str] = {}
    if not keys:
        why = "Every device has all keys and values, and nothing is sent."
        refused |= dict.fromkeys(("ring", "heads"), why)
    elif problem.num_heads % devices:
        refused["heads"] = (
            f"Got {problem.num_heads} query heads, which {devices} devices do not divide."
        )
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
    seconds = times(problem, devices)
    rows, all_keys = _bytes(problem).rows, devices * _bytes(problem).keys
    if all_keys > rows:
        refused["gather"] = (
            f"All keys and values would take {all_keys} bytes on every device, and its queries and "
            f"outputs take {rows}."
        )
    served = [x for x in METHODS if x not in refused]
    method = min(served, key=seconds.__getitem__)
    for name in served:
        refused.setdefault(name, f"Estimated to take {seconds[name] * 1e3:.3g} ms.")
    del refused[method]
    reason = f"estimated to take the least time, {seconds[method] * 1e3:.3g} ms."
    return Choice(method, reason, refused)


class _Bytes(NamedTuple):
    """What a device holds: queries and outputs, and keys and values."""

    rows: int
    keys: int


def _bytes(p: Problem) -> _Bytes:
    width = (p.head_dim + p.value_dim) * p.dtype.itemsize
    return _Bytes(p.rows * width, p.kv_rows * width)


def times(problem: Problem, devices: int) -> dict[str, float]:
    """Estimated seconds of forward and backward by each method."""
    p, n = problem, devices
    rows, keys = _bytes(p)
    # Two products in the forward and five in the backward, of two operations a number.
    block = 7 * p.rows * p.kv_len * (p.head_dim + p.value_dim) / FLOPS
    work = block * seen(p, n)
    busiest = work.sum(axis=1).max()
    # Of each block k and v twice, and dk and dv once.
    of_block = 3 * keys / BYTES + 3 * LATENCY
    steps = [
        max(work[d, (d - back) % n] for d in range(n))
        for back in range(n)
        if any(work[d, (d - back) % n] for d in range(n))
    ]
    waiting = sum(max(0.0, of_block - step) for step in steps[:-1]) + keys / BYTES
    # q, o and do to the heads, o and dq back; k and v twice, dk and dv once.
    exchanged = (n - 1) / n * (3.5 * rows + 3 * keys * max(1, n // p.num_kv_heads))
    return {
        "ring": busiest + waiting + STEP * (len(steps) - 1),
        "gather": busiest + (n - 1) * 3 * keys / BYTES + 3 * LATENCY,
        "heads": work.sum() / n + exchanged / BYTES + 12 * LATENCY,
    }


def seen(problem: Problem, devices: int) -> np.ndarray:
    """The share of pairs that each device sees of each block of keys, by the known part of a mask.

    [devices, devices], from some queries of each device.
    """
    p, n = problem, devices
    samples = min(p.q_len, max(2, 512 // n))
    inside = np.floor((np.arange(samples) + 0.5) * p.q_len / samples)
    queries = (np.arange(n)[:, None] * p.q_len + inside)[..., None]
    first = np.arange(n) * p.kv_len
    start, stop = first + 0.0 * queries, first + p.kv_len + 0.0 * queries
    for band in p.mask.leaves:
        if isinstance(band, Band) and band.offset is None:
            if band.low is not None:
                start = np.maximum(start, queries + band.low)
            if band.high is not None:
                stop = np.minimum(stop, queries + band.high + 1)
    return (np.maximum(stop - start, 0) / p.kv_len).mean(axis=1)
