"""What the methods of context parallelism send, and about how long they take.

A model of H100s and H200s in hosts of 8, with one message after the other:

    ring      max(kernel, message) for each step; at the end the last gradients go home
    gather    messages, then kernels
    heads     messages, then kernels; the same work on every device

It is there to choose a method. On two and four H200s it was right within 9 % where the kernels of
"mosaic" ran (docs/scaling.md); more have not been measured.
"""

from typing import NamedTuple

import numpy as np

# Bytes a second that a GPU sends, and at the same time receives: to others of its host, and to
# those of other hosts through a network card of its own.
NVLINK, NETWORK, HOST = 450e9, 50e9, 8
# Seconds until a message has begun, and for what a step of the ring has besides: kernels that start
# anew, and joining their results. Both are rough, and not measured.
LATENCY, STEP = 15e-6, 20e-6

# Gathering takes memory, so it must be faster by more than what is unsure here.
GATHER_SAVES = 1.05
# Bytes of gathered keys and values that need not be thought of: a device holds much more.
SMALL = 2**28

# Operations a second in blocks of many tokens, forward and backward, and the tokens of a block at
# which it is half of that: of "mosaic" on one H200 with 32768 tokens or more
# (docs/results/archive/h200-x2-2026-11-22.jsonl), and on an H100 with 2048 (h100-2026-11-22.jsonl).
SPEED, HALF = (640e12, 600e12), 350


class Load(NamedTuple):
    """What one of the devices holds of a call whose sequence they divide.

    Attributes:
        devices: how many there are.
        rows: its queries, of all heads and examples.
        kv_rows: its keys.
        block: its keys of one head and example.
        width: head size of queries and keys and that of values together.
        itemsize: bytes of a number.
        num_kv_heads: K.
    """

    devices: int
    rows: int
    kv_rows: int
    block: int
    width: int
    itemsize: int
    num_kv_heads: int


class Work(NamedTuple):
    """What is computed; 1 is all scores of a device's queries and a device's keys.

    Attributes:
        steps: in each step of a ring that has anything, on the device that has most of it.
        busiest: with all keys at once, on the device that has most of it.
        mean: the same on average.
    """

    steps: np.ndarray
    busiest: float
    mean: float


def whole(devices: int) -> Work:
    """Without a mask."""
    return Work(np.ones(devices), devices, devices)


def causal(devices: int, *, balanced: bool) -> Work:
    """Under a causal mask, with tokens in order or in `balanced_order`.

    For each tile of queries a kernel visits one run of tiles of keys. In balanced order those of a
    device are in one, but not those of all devices one after the other: what lies in between is
    visited for nothing. So that order is for the ring.
    """
    n = devices
    if balanced:
        return Work(np.full(n, 0.5), n - 0.5, (6 * n - 1) / 8)
    return Work(np.concatenate([[0.5], np.ones(n - 1)]), n - 0.5, n / 2)


def sent(load: Load, work: Work, method: str) -> tuple[float, float]:
    """Bytes that a device receives in the forward and in the backward.

    Keys and values travel in both; in the backward their gradients come home, too. For heads,
    queries and outputs travel with them, there or back: q, o; and q, o, do, dq. So does the LSE,
    in float32. Where there are fewer key/value heads than devices, several get the same.
    """
    n = load.devices
    rows, keys = (load.width * load.itemsize * x for x in (load.rows, load.kv_rows))
    if method == "heads":
        lse, keys = 4 * load.rows, keys * max(1, n // load.num_kv_heads)
        away = (n - 1) / n
        return away * (rows + keys + lse), away * (2 * rows + 2 * keys + lse)
    blocks = len(work.steps) - 1 if method == "ring" else n - 1
    return blocks * keys, blocks * 2 * keys


def seconds(load: Load, work: Work, method: str) -> float:
    """Of forward and backward together."""
    n, messages = load.devices, sent(load, work, method)
    if method == "ring":
        # Over the edge of a host goes one message, through one card, and the others wait for it.
        link = NVLINK if n <= HOST else NETWORK
        total = load.kv_rows * load.width * load.itemsize / link
        for kernel, received in zip(_kernels(load, load.block), messages, strict=True):
            steps = kernel * work.steps
            message = received / max(1, len(steps) - 1) / link + LATENCY
            total += steps[-1] + np.maximum(steps[:-1], message).sum() + STEP * (len(steps) - 1)
        return float(total)
    kernels = sum(_kernels(load, n * load.block))
    if method == "heads":
        return work.mean * kernels + _exchanged(sum(messages), n) + 13 * LATENCY
    # What all devices get comes into a host once, through all of its cards.
    gathered, home = messages[0] + messages[1] / 2, messages[1] / 2
    link = NVLINK if n <= HOST else min(NVLINK, HOST * NETWORK)
    return work.busiest * kernels + gathered / link + _exchanged(home, n) + 6 * LATENCY


def refused(load: Load, num_heads: int) -> dict[str, str]:
    """The methods that are not for a call of so many query heads, and why; whole sentences."""
    reasons, n = {}, load.devices
    if num_heads % n:
        reasons["heads"] = f"Got {num_heads} query heads, which {n} devices do not divide."
    rows, keys = (load.width * load.itemsize * x for x in (load.rows, n * load.kv_rows))
    if keys > max(rows, SMALL):
        reasons["gather"] = (
            f"All keys and values would take {keys} bytes on every device, and its queries and "
            f"outputs take {rows}."
        )
    return reasons


def fastest(estimates: dict[str, float]) -> str:
    """The method to take, of those for which there are seconds."""
    return min(estimates, key=lambda x: estimates[x] * (GATHER_SAVES if x == "gather" else 1))


def _exchanged(received: float, n: int) -> float:
    """Seconds for what differs from device to device: from those of other hosts through a card."""
    away = max(0, n - HOST) / max(1, n - 1)
    return max(away * received / NETWORK, (1 - away) * received / NVLINK)


def _kernels(load: Load, keys: int) -> tuple[float, ...]:
    """Seconds for all scores of a device's queries and a device's keys, forward and backward.

    Args:
        load: what a device holds.
        keys: how many are in a call of the kernels.
    """
    # Two operations for each number of a product, two products in the forward, five in the
    # backward.
    operations = load.rows * load.block * load.width
    slow = 1 + HALF / keys
    return tuple(n * operations * slow / speed for n, speed in zip((2, 5), SPEED, strict=True))
