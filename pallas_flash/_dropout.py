"""Dropout whose mask depends on the key and the position alone, not on who computes it.

Element (b, h, q, k) is kept when the first word of a counter-based generator for the counter (q, k,
h, b) is at least rate * 2^32. The generator is Philox-4x32 with 7 rounds, the fewest that pass the
BigCrush tests in Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(2011):

    each round    c0, c2 <- hi(M1 c2) ^ c1 ^ k0, hi(M0 c0) ^ c3 ^ k1
                  c1, c3 <- lo(M1 c2), lo(M0 c0)
                  k0, k1 <- k0 + W0, k1 + W1
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROUNDS = 7
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Which probabilities become zero.

    Attributes:
        seed: uint32 [2].
        origin: int32 [2]: the first example and the first query head, where this is a shard of a
            larger call; None if both are 0.
        rate: the share of probabilities that become zero, in (0, 1).
        broadcast: whether all examples and heads share one mask.
    """

    seed: Any
    origin: Any = None
    rate: float = dataclasses.field(default=0.0, metadata=dict(static=True))
    broadcast: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @property
    def factor(self) -> float:
        """What probabilities that are kept are multiplied with."""
        return 1 / (1 - self._threshold / 2**32)

    @property
    def _threshold(self) -> int:
        return min(round(self.rate * 2**32), 2**32 - 1)

    def kept(self, b, h, q, k, multiply=None) -> jax.Array:
        """Whether the probability at an index is kept; indices are int32 and broadcast.

        Args:
            b: example.
            h: query head.
            q: query.
            k: key.
            multiply: the high words of the products of uint32 arrays with an int.
        """
        if self.broadcast:
            b, h = jnp.int32(0), jnp.int32(0)
        elif self.origin is not None:
            b, h = b + self.origin[0], h + self.origin[1]
        b, h, q, k = (x.astype(jnp.uint32) for x in jnp.broadcast_arrays(b, h, q, k))
        key = self.seed[0], self.seed[1]
        bits = philox((q, k, h, b), key, multiply or multiply_high)[0]
        return bits >= np.uint32(self._threshold)


def kept(dropout: Dropout | None, at, multiply=None):
    """Which probabilities at indices `at` are kept; None for all."""
    return None if dropout is None else dropout.kept(*at, multiply=multiply)


def drop(kept, x):
    """`x` where it is kept, else zero."""
    return x if kept is None else jnp.where(kept, x, 0)


def rescaled(dropout: Dropout | None, x):
    """`x` divided by the share of probabilities that are kept."""
    return x if dropout is None else x * dropout.factor


def philox(counter, key, multiply_high):
    """Four uint32 words for four uint32 counters and two uint32 keys; all broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1 = _MULTIPLIERS
    for _ in range(ROUNDS):
        low0, low1 = c0 * np.uint32(m0), c2 * np.uint32(m1)
        c0, c2 = multiply_high(c2, m1) ^ c1 ^ k0, multiply_high(c0, m0) ^ c3 ^ k1
        c1, c3 = low1, low0
        k0, k1 = k0 + np.uint32(_WEYL[0]), k1 + np.uint32(_WEYL[1])
    return c0, c1, c2, c3


def multiply_high(x, m: int):
    """The upper 32 bits of the products x * m, from products of 16 bits."""
    half = np.uint32(16)
    m_low, m_high = np.uint32(m & 0xFFFF), np.uint32(m >> 16)
    x_low, x_high = x & np.uint32(0xFFFF), x >> half
    cross = x_high * m_low + ((x_low * m_low) >> half)
    carry = x_low * m_high + (cross & np.uint32(0xFFFF))
    return x_high * m_high + (cross >> half) + (carry >> half)


def seed_of(key) -> jax.Array:
    """uint32 [2] for a `jax.random` key, of whatever generator."""
    return jax.random.bits(key, (2,), jnp.uint32)
