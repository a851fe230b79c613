"""Dropout whose mask depends on the key and the position alone, not on who computes it.

Element (b, h, q, k) is kept when its 16 bits of a counter-based generator are at least t, the rate
in units of 2^-16: rounded, but at least 1 and at most 2^16 - 1. What is kept is divided by
1 - t / 2^16. Eight elements share the four words of a counter; q8 = q & 8, k8 = k & 8 and
k1 = k & 1 tell them apart:

    counter       h, q - q8, b, k - k8 - k1
    word          0 to 3 for (q8, k8) = (0, 0), (0, 8), (8, 0), (8, 8)
    bits          the lower 16 of the word for k1 = 0, the upper 16 for k1 = 1

A thread of Ampere's and Hopper's matrix units holds the results at a row and at the one 8 further
on, and there at two neighbouring columns and those 8 further on. Where keys are the columns it
computes a counter for eight elements; where queries are, for four. The generator is Philox-4x32
with 7 rounds, the fewest that pass the BigCrush tests in Salmon, Moraes, Dror and Shaw, "Parallel
random numbers: as easy as 1, 2, 3" (2011):

    each round    c0, c2 <- hi(M1 c2) ^ c1 ^ k0, hi(M0 c0) ^ c3 ^ k1
                  c1, c3 <- lo(M1 c2), lo(M0 c0)
                  k0, k1 <- k0 + W0, k1 + W1

Queries and keys are its words 1 and 3 because there they do not meet in a product before the fourth
round: what comes before is the same along a row or a column.
"""

import dataclasses
import functools
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
        origin: int32 [4]: the first example, query head, query and key, where this is a part of a
            larger call; None if all are 0.
        rate: the share of probabilities that become zero, in (0, 1), before it is rounded.
        broadcast: whether all examples and heads share one mask.
        aligned: whether the first query and the first key are multiples of 16.
    """

    seed: Any
    origin: Any = None
    rate: float = dataclasses.field(default=0.0, metadata=dict(static=True))
    broadcast: bool = dataclasses.field(default=False, metadata=dict(static=True))
    aligned: bool = dataclasses.field(default=True, metadata=dict(static=True))

    @property
    def factor(self) -> float:
        """What probabilities that are kept are multiplied with."""
        return 1 / (1 - self._threshold / 2**16)

    @property
    def _threshold(self) -> int:
        """The t of the definition: a positive rate drops some, and one below 1 keeps some."""
        return min(max(round(self.rate * 2**16), 1), 2**16 - 1)

    def moved(self, part) -> "Dropout":
        """See `_context.parts`."""
        return dataclasses.replace(self, aligned=part.q.length % 16 == part.kv.length % 16 == 0)

    def kept(self, b, h, q, k, *, first=(0, 0), multiply=None) -> jax.Array:
        """Whether the probability at an index is kept; indices are int32 and broadcast.

        Args:
            b: example.
            h: query head.
            q: query, counted from `first[0]`.
            k: key, counted from `first[1]`.
            first: multiples of 16.
            multiply: as `multiply_wide`.
        """
        if self.origin is not None:
            b, h = b + self.origin[0], h + self.origin[1]
            if self.aligned:
                first = first[0] + self.origin[2], first[1] + self.origin[3]
            else:
                q, k = q + self.origin[2], k + self.origin[3]
        if self.broadcast:
            b, h = jnp.int32(0), jnp.int32(0)
        q8, k8, k1 = q & 8, k & 8, k & 1
        # (q | 8) - 8 is q - q8. LLVM takes it for x where q is x | 8; written with & ~8, or as
        # differences, it does not always see that two elements have the same counter.
        counter = jnp.broadcast_arrays(h, first[0] + ((q | 8) - 8), b, first[1] + ((k | 9) - 9))
        key = self.seed[0], self.seed[1]
        words = philox([x.astype(jnp.uint32) for x in counter], key, multiply or multiply_wide)
        w0, w1, w2, w3 = words
        word = jnp.where(q8 > 0, jnp.where(k8 > 0, w3, w2), jnp.where(k8 > 0, w1, w0))
        # To the upper half; what is then below does not change the comparison.
        bits = word << (16 - 16 * k1).astype(jnp.uint32)
        return bits >= np.uint32(self._threshold << 16)

    # One program: dozens of operations would each be compiled for a shape, and store a result.
    @functools.partial(jax.jit, static_argnums=1)
    def kept_of(self, shape: tuple[int, ...]) -> jax.Array:
        """`kept` of all indices of [B, N, T, S]."""
        indices = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(4))
        return self.kept(*indices)


def kept(dropout: Dropout | None, at, **options):
    """Which probabilities at indices `at` are kept; None for all. See `Dropout.kept`."""
    return None if dropout is None else dropout.kept(*at, **options)


def drop(kept, x):
    """`x` where it is kept, else zero."""
    return x if kept is None else jnp.where(kept, x, 0)


def rescaled(dropout: Dropout | None, x):
    """`x` divided by the share of probabilities that are kept."""
    return x if dropout is None else x * dropout.factor


def shrunk(dropout: Dropout | None, x):
    """`x` times the share of probabilities that are kept.

    p (rescaled(drop(dp)) - delta) is rescaled(p (drop(dp) - shrunk(delta))), and sums of that are
    rescaled once.
    """
    return x if dropout is None else x * (1 / dropout.factor)


def philox(counter, key, multiply):
    """Four uint32 words for four uint32 counters and two uint32 keys; all broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1 = _MULTIPLIERS
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = multiply(c0, m0), multiply(c2, m1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + np.uint32(_WEYL[0]), k1 + np.uint32(_WEYL[1])
    return c0, c1, c2, c3


def multiply_wide(x, m: int):
    """The upper and the lower 32 bits of the products x * m, from products of 16 bits."""
    half = np.uint32(16)
    m_low, m_high = np.uint32(m & 0xFFFF), np.uint32(m >> 16)
    x_low, x_high = x & np.uint32(0xFFFF), x >> half
    cross = x_high * m_low + ((x_low * m_low) >> half)
    carry = x_low * m_high + (cross & np.uint32(0xFFFF))
    return x_high * m_high + (cross >> half) + (carry >> half), x * np.uint32(m)


def seed_of(key) -> jax.Array:
    """uint32 [2] for a `jax.random` key, of whatever generator."""
    return jax.random.bits(key, (2,), jnp.uint32)
