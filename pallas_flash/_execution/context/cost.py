"""A cost model of context parallelism: bytes that each method sends, and seconds that it takes.

It models H100s and H200s in hosts of 8, with one message after the other:

    ring      max(kernel, message) for each step; at the end the last gradients go home
    gather    messages, then kernels
    heads     messages, then kernels; the same work on every device

Its purpose is the choice of a method. On two and four H200s with the kernels of "mosaic" its error
is at most 9 % (docs/scaling.md). More devices have not been measured.
"""

from typing import NamedTuple

import numpy as np

# Bytes a second that a GPU sends and receives at the same time: within its host by NVLink, and to
# other hosts through its own network card. Then the GPUs of a host.
NVLINK, NETWORK, HOST = 450e9, 50e9, 8
# Seconds until a message begins; seconds of a ring step for kernel launches and for combining
# results. Both are rough and not measured.
LATENCY, STEP = 15e-6, 20e-6

# The least speed-up for which "gather", which takes memory, is chosen: above the model's error.
GATHER_SAVES = 1.05
# Bytes of gathered keys and values that are always acceptable.
SMALL = 2**28

# Operations a second for long blocks, forward and backward, and the tokens of a block at half of
# that speed. Sources: "mosaic" on one H200 with 32768 tokens or more
# (docs/results/archive/h200-x2-2026-11-22.jsonl), and on an H100 with 2048 (h100-2026-11-22.jsonl).
SPEED, HALF = (640e12, 600e12), 350


class Load(NamedTuple):
    """The sizes of one device's shard of a call.

    Attributes:
        devices: the number of devices that divide the sequence.
        rows: the shard's queries, over all heads and batch elements.
        kv_rows: the shard's keys, over all key/value heads and batch elements.
        block: the shard's keys of one head and batch element.
        width: head dims of keys and of values together.
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
    """The scores to compute; the unit is all scores of one shard of queries and one of keys.

    Attributes:
        steps: for each ring step with any work, the work of the busiest device.
        busiest: with all keys at once, the work of the busiest device.
        mean: with all keys at once, the average work of a device.
    """

    steps: np.ndarray
    busiest: float
    mean: float


def whole(devices: int) -> Work:
    """Return the work of a non-causal call."""
    return Work(np.ones(devices), devices, devices)


def causal(devices: int, *, balanced: bool) -> Work:
    """Return the work under a causal mask, with tokens in order or in `balanced_order`.

    For each query tile a kernel visits one run of key blocks. In balanced order the visible blocks
    of one device form a run, but the blocks of all devices together do not. A kernel that has all
    keys then visits empty blocks, too, so that this order is for the ring.
    """
    n = devices
    if balanced:
        return Work(np.full(n, 0.5), n - 0.5, (6 * n - 1) / 8)
    return Work(np.concatenate([[0.5], np.ones(n - 1)]), n - 0.5, n / 2)


def sent(load: Load, work: Work, method: str) -> tuple[float, float]:
    """Return the bytes that a device receives in the forward and in the backward.

    Keys and values travel in both passes. In the backward their gradients return, too. "heads" also
    exchanges q and o in the forward, q, o, do and dq in the backward, and the LSE in float32. With
    fewer key/value heads than devices, several devices receive the same heads.
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
    """Return the seconds of forward and backward together."""
    n, messages = load.devices, sent(load, work, method)
    if method == "ring":
        # One message crosses between two hosts, through one card, and the others wait for it.
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
    # Data for all devices enters a host once, through all of its cards.
    gathered, home = messages[0] + messages[1] / 2, messages[1] / 2
    link = NVLINK if n <= HOST else min(NVLINK, HOST * NETWORK)
    return work.busiest * kernels + gathered / link + _exchanged(home, n) + 6 * LATENCY


def refused(load: Load, num_heads: int) -> dict[str, str]:
    """Return why each refused method does not serve the call, by name; whole sentences."""
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
    """Return the method with the least seconds; "gather" needs a margin."""
    return min(estimates, key=lambda x: estimates[x] * (GATHER_SAVES if x == "gather" else 1))


def _exchanged(received: float, n: int) -> float:
    """Return the seconds of an all-to-all: parts of other hosts come through a device's card."""
    away = max(0, n - HOST) / max(1, n - 1)
    return max(away * received / NETWORK, (1 - away) * received / NVLINK)


def _kernels(load: Load, keys: int) -> tuple[float, ...]:
    """Return the seconds for one unit of `Work`, forward and backward.

    Args:
        load: the sizes of a device's shard.
        keys: the keys of one head in a call of the kernels.
    """
    # A multiply-add is two operations. The forward has two products, the backward five.
    operations = load.rows * load.block * load.width
    slow = 1 + HALF / keys
    return tuple(n * operations * slow / speed for n, speed in zip((2, 5), SPEED, strict=True))
