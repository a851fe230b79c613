"""Dropout whose mask depends on the key and the indices alone, not on tiles or devices.

Element (b, h, q, k) is kept when its 16 bits of a counter-based generator are at least t, the rate
in units of 2^-16: rounded, but at least 1 and at most 2^16 - 1. Probabilities that are kept are
divided by 1 - t / 2^16. Eight elements share the four words of a counter; q8 = q & 8, k8 = k & 8
and k1 = k & 1 tell them apart:

    counter       h, q - q8, b, k - k8 - k1
    word          0 to 3 for (q8, k8) = (0, 0), (0, 8), (8, 0), (8, 8)
    bits          the lower 16 of the word for k1 = 0, the upper 16 for k1 = 1

In an accumulator of Ampere's and Hopper's matrix units, a thread holds rows r and r + 8, and of
each row columns c, c + 1, c + 8 and c + 9. Where keys are the columns, one counter serves eight of
its elements; where queries are, four, and the other four are a neighbour's. The generator is
Philox-4x32 with 7 rounds, the fewest that pass the BigCrush tests in Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3" (2011):

    each round    c0, c2 <- hi(M1 c2) ^ c1 ^ k0, hi(M0 c0) ^ c3 ^ k1
                  c1, c3 <- lo(M1 c2), lo(M0 c0)
                  k0, k1 <- k0 + W0, k1 + W1

Queries and keys are words 1 and 3 of the counter, which meet in no product before the fourth round.
So everything computed before that round is the same along a row or a column.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash._problem.operands import Divisible

ROUNDS = 7
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout(Divisible):
    """The rule that says which probabilities become zero.

    Attributes:
        seed: uint32 [2].
        origin: int32 [4], the indices in the whole call of the first batch element, query head,
            query and key; None if all are 0.
        rate: the share of probabilities that become zero, in (0, 1), before it is rounded.
        broadcast: whether all batch elements and heads share one mask.
        aligned: whether the first query and the first key are multiples of 16.
    """

    seed: Any
    origin: Any = None
    rate: float = dataclasses.field(default=0.0, metadata=dict(static=True))
    broadcast: bool = dataclasses.field(default=False, metadata=dict(static=True))
    aligned: bool = dataclasses.field(default=True, metadata=dict(static=True))

    @property
    def factor(self) -> float:
        """The factor of the probabilities that are kept."""
        return 1 / (1 - self._threshold / 2**16)

    @property
    def _threshold(self) -> int:
        """The t of the definition: a positive rate drops some, and one below 1 keeps some."""
        return min(max(round(self.rate * 2**16), 1), 2**16 - 1)

    def restrict(self, part) -> "Dropout":
        return dataclasses.replace(self, aligned=part.q.length % 16 == part.kv.length % 16 == 0)

    def kept(self, b, h, q, k, *, first=(0, 0), multiply=None) -> jax.Array:
        """Whether the probability at an index is kept; arguments as of `words`."""
        if self.origin is not None and not self.aligned:
            q, k = q + self.origin[2], k + self.origin[3]
        w0, w1, w2, w3 = self.words(b, h, q, k, first=first, multiply=multiply)
        q8, k8, k1 = q & 8, k & 8, k & 1
        word = jnp.where(q8 > 0, jnp.where(k8 > 0, w3, w2), jnp.where(k8 > 0, w1, w0))
        return self.keeps(word << (16 - 16 * k1).astype(jnp.uint32))

    def words(self, b, h, q, k, *, first=(0, 0), multiply=None) -> tuple:
        """Return the four words at an index; indices are int32 and broadcast.

        Args:
            b: batch element.
            h: query head.
            q: query, counted from `first[0]`; where dropout is not `aligned`, in the whole call.
            k: key, as q.
            first: multiples of 16.
            multiply: as `multiply_wide`.
        """
        if self.origin is not None:
            b, h = b + self.origin[0], h + self.origin[1]
            if self.aligned:
                first = first[0] + self.origin[2], first[1] + self.origin[3]
        if self.broadcast:
            b, h = jnp.int32(0), jnp.int32(0)
        # (q | 8) - 8 is q - q8. Written so, LLVM sees that two elements have the same counter;
        # written with & ~8, or as differences, it does not always see it.
        counter = jnp.broadcast_arrays(h, first[0] + ((q | 8) - 8), b, first[1] + ((k | 9) - 9))
        key = self.seed[0], self.seed[1]
        return philox([x.astype(jnp.uint32) for x in counter], key, multiply or multiply_wide)

    def keeps(self, bits) -> jax.Array:
        """Whether probabilities are kept whose 16 bits are the upper ones of these uint32.

        The lower ones do not change the comparison.
        """
        return bits >= np.uint32(self._threshold << 16)

    # Compiled as one program; else JAX compiles each of dozens of operations for every shape.
    @functools.partial(jax.jit, static_argnums=1)
    def kept_of(self, shape: tuple[int, ...]) -> jax.Array:
        """Return `kept` of all indices of [B, N, T, S]."""
        indices = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(4))
        return self.kept(*indices)


def kept(dropout: Dropout | None, at, **options):
    """Return whether probabilities at indices `at` are kept; None if there is no dropout."""
    return None if dropout is None else dropout.kept(*at, **options)


def drop(kept, x):
    """Return `x` where it is kept, else zero."""
    return x if kept is None else jnp.where(kept, x, 0)


def rescaled(dropout: Dropout | None, x):
    """Return `x` divided by the share of probabilities that are kept."""
    return x if dropout is None else x * dropout.factor


def shrunk(dropout: Dropout | None, x):
    """Return `x` times the share of probabilities that are kept.

    p (rescaled(drop(dp)) - delta) = rescaled(p (drop(dp) - shrunk(delta))), so that a kernel
    rescales the sums of the right side once.
    """
    return x if dropout is None else x * (1 / dropout.factor)


def philox(counter, key, multiply):
    """Return four uint32 words for four uint32 counters and two uint32 keys; all broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1 = _MULTIPLIERS
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = multiply(c0, m0), multiply(c2, m1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + np.uint32(_WEYL[0]), k1 + np.uint32(_WEYL[1])
    return c0, c1, c2, c3


def multiply_wide(x, m: int):
    """Return the upper and the lower 32 bits of x * m, from products of 16 bits."""
    half = np.uint32(16)
    m_low, m_high = np.uint32(m & 0xFFFF), np.uint32(m >> 16)
    x_low, x_high = x & np.uint32(0xFFFF), x >> half
    cross = x_high * m_low + ((x_low * m_low) >> half)
    carry = x_low * m_high + (cross & np.uint32(0xFFFF))
    return x_high * m_high + (cross >> half) + (carry >> half), x * np.uint32(m)


def seed_of(key) -> jax.Array:
    """Return uint32 [2] for a `jax.random` key of any generator."""
    return jax.random.bits(key, (2,), jnp.uint32)
