"""The terms of a score between the product of queries and keys and the softmax.

    x = scale * q . k                 the argument of `Scores.logits`
    x = x + bias[b, h, q, k]
    x = x - slope[h] * |q + query_offset - k|     or the distance of positions given as arrays
    x = score_mod(x, b, h, q, k, *operands)
    x = soft_cap * tanh(x / soft_cap)

This one definition serves tiles in kernels and in plain JAX. The backward takes the derivative in x
by `jax.vjp` on the tile, and so the derivative in what a score reads of a table: slopes, operands.
Sinks add exp(sink) to the softmax's denominator, once a row. `LogSum` is the LSE as the forward
leaves it to the backward.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash._problem.operands import Divisible, Noted, Pairs, Positions, nearest, readable

LOG2E, LN2 = math.log2(math.e), math.log(2.0)


def _to_float(x, dtype):
    return x.astype(dtype)


class Functions(NamedTuple):
    """Functions of `Scores` that a kernel may replace by quicker ones.

    Attributes:
        tanh: hyperbolic tangent.
        to_float: conversion of differences of positions to a dtype.
        subtract: difference of two products.
    """

    tanh: Callable = jnp.tanh
    to_float: Callable = _to_float
    subtract: Callable = operator.sub


FUNCTIONS = Functions()


@contextlib.contextmanager
def differentiated(by: str = "the score"):
    """Raise one sentence where JAX can trace a score function but not differentiate it."""
    try:
        yield
    except Exception as error:  # A user's derivative may raise anything.
        reason = str(error).partition("\n")[0].rstrip(".")
        raise NotImplementedError(
            f"`score_mod` must have a derivative in {by} where gradients are taken; got "
            f"{type(error).__name__}: {reason}. Wrap what has none in `jax.lax.stop_gradient`."
        ) from error


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores(Divisible):
    """The optional terms of a score; without bias, slopes, `score_mod` and `soft_cap` it is x.

    Attributes:
        bias: a (q, k) array.
        slopes: ALiBi's slopes, [N].
        offset: position of query 0 for the slopes, int32 [B]; None means `shift`.
        positions: positions of all tokens for the slopes; None means that they count up.
        operands: arrays for `score_mod`.
        origin: indices of the first score in the whole call, see `Dropout.origin`.
        shift: position of query 0 for the slopes, where it is known at tracing.
        score_mod: function of x and the indices to a score.
        soft_cap: bound of the scores.
    """

    bias: Pairs | None = None
    slopes: Any = None
    offset: Any = None
    positions: Positions | None = None
    operands: tuple[Any, ...] = ()
    origin: Any = None
    shift: int = dataclasses.field(default=0, metadata=dict(static=True))
    score_mod: Callable | None = dataclasses.field(default=None, metadata=dict(static=True))
    soft_cap: float | None = dataclasses.field(default=None, metadata=dict(static=True))

    def __bool__(self) -> bool:
        terms = self.bias, self.slopes, self.score_mod, self.soft_cap
        return any(term is not None for term in terms)

    def logits(self, x, b, h, q, k, *, functions=FUNCTIONS):
        """Return the scores for x = scale * q . k at indices that broadcast to the shape of x."""
        return self._mapped(self._added(x, b, h, q, k, functions), b, h, q, k, functions)

    def vjp(self, x, b, h, q, k, *, functions=FUNCTIONS):
        """Return `logits`, and the function from a cotangent of them to one of x."""
        x = self._added(x, b, h, q, k, functions)
        if self.score_mod is None and self.soft_cap is None:
            return x, lambda ds: ds
        with differentiated():
            logits, pull = jax.vjp(lambda x: self._mapped(x, b, h, q, k, functions), x)

        def pulled(ds):
            with differentiated():
                return pull(ds)[0]

        return logits, pulled

    def reads(self, x, b, h, q, k) -> list[tuple[int, tuple]]:
        """Return the table and the index of each number that a score reads of a floating table.

        Table 0 are the slopes, table 1 + i is operand i. An index has an integer array for each
        axis of its table, and lies inside of it; the arrays broadcast to the shape of x.
        """
        reads = [] if self.slopes is None else [(0, (h,))]

        def note(table, index, read):
            reads.append((table, nearest(index, self.operands[table - 1].shape)))
            return read

        self._noted(note)._mapped(x, b, h, q, k, FUNCTIONS)
        return reads

    def vjp_of_reads(self, numbers, x, b, h, q, k, *, functions=FUNCTIONS):
        """Return `logits`, and the function from their cotangent to cotangents of some reads.

        `numbers` are places in the list that `reads` returns. A cotangent of a read has the shape
        of x: it is not yet summed over the scores that read the same number.
        """
        logits, pull = self.vjp(x, b, h, q, k, functions=functions)
        x_added = self._added(x, b, h, q, k, functions)
        first = 0 if self.slopes is None else 1

        def of_read(number, ds):
            if number < first:
                distance = self._distance(b, q, k)
                return -pull(ds) * jnp.abs(functions.to_float(distance, x.dtype))

            def mapped(term):
                numbers = itertools.count(first)

                def note(table, index, read):
                    del table, index
                    return read.astype(x.dtype) + term if next(numbers) == number else read

                return self._noted(note)._mapped(x_added, b, h, q, k, functions)

            with differentiated("its operands"):
                return jax.vjp(mapped, jnp.zeros_like(x))[1](ds)[0]

        return logits, lambda ds: [of_read(number, ds) for number in numbers]

    def _noted(self, note) -> "Scores":
        """Return the scores whose reads of floating operands go through `note`, see `reads`."""

        def noted(table, x):
            floating = jnp.issubdtype(x.dtype, jnp.floating)
            return Noted(x, functools.partial(note, table)) if floating else x

        operands = tuple(noted(1 + i, x) for i, x in enumerate(self.operands or ()))
        return dataclasses.replace(self, operands=operands)

    def derivative(
        self, x, b, h, q, k, *, functions=FUNCTIONS, call=lambda function, x: function(x)
    ):
        """Return `logits` and their derivative in x. Each score depends on one x alone.

        `call(function, x)` calls the differentiated function of x. Kernels that must transform it
        pass their own.
        """
        x = self._added(x, b, h, q, k, functions)
        mapped = functools.partial(self._mapped, b=b, h=h, q=q, k=k, functions=functions)
        with differentiated():
            return call(lambda x: jax.jvp(mapped, (x,), (jnp.ones_like(x),)), x)

    def _added(self, x, b, h, q, k, functions):
        if self.bias is not None:
            x = x + self.bias.read(b, h, q, k).astype(x.dtype)
        if self.slopes is not None:
            distance = self._distance(b, q, k)
            slope = self.slopes[h] * jnp.abs(functions.to_float(distance, x.dtype))
            x = functions.subtract(x, slope)
        return x

    def _distance(self, b, q, k):
        """Return the position of a query minus the position of a key, for the slopes."""
        if self.positions is not None:
            return self.positions.query_positions(b, q) - self.positions.key_positions(b, k)
        return q + (self.shift if self.offset is None else self.offset[b]) - k

    def _mapped(self, x, b, h, q, k, functions):
        if self.score_mod is not None:
            if self.origin is not None:
                b, h, q, k = (x + self.origin[i] for i, x in enumerate((b, h, q, k)))
            out = self.score_mod(x, b, h, q, k, *map(readable, self.operands))
            # The result may be a Python number, or have fewer axes if it does not depend on x.
            x = jnp.broadcast_to(jnp.asarray(out, x.dtype), x.shape)
        if self.soft_cap is not None:
            x = self.soft_cap * functions.tanh(x * (1 / self.soft_cap))
        return x


class LogSum(NamedTuple):
    """The LSE of each row as the forward leaves it to the backward: m + log(2) * l_log2.

    Two numbers keep the LSE exact where scores may be large. In one float32 number log(n) is lost
    beside -1e9, and each of n equal weights would become 1.

    Attributes:
        m: the shift of a row, its largest score or sink or a number near it, [B, N, T]; 0 in rows
            without keys. None means 0.
        l_log2: log2(sum(exp(s - m))) of a row, [B, N, T]; -inf in rows without keys.
        max_logits: the largest score of a row, without sinks, [B, N, T]; -inf in rows without keys.
            None unless the call asks for it, and in the backward, which does not need it.
    """

    m: Any
    l_log2: Any
    max_logits: Any = None

    @property
    def lse(self):
        """The LSE in base e."""
        lse = self.l_log2 * LN2
        return lse if self.m is None else self.m + lse

    def joined(self, *others: "LogSum") -> tuple[Any, ...]:
        """Return the `LogSum` of the scores of all, and each one's share of the sum of weights."""
        parts = self, *others
        m, sums = None, [x.l_log2 for x in parts]
        if self.m is not None:
            highest = [jnp.where(x.l_log2 == -jnp.inf, -jnp.inf, x.m) for x in parts]
            m = functools.reduce(jnp.maximum, highest)
            m = jnp.where(m == -jnp.inf, 0, m)
            sums = [x + (high - m) * LOG2E for x, high in zip(sums, highest, strict=True)]
        top = functools.reduce(jnp.maximum, sums)
        top = jnp.where(top == -jnp.inf, 0, top)
        weights = [jnp.exp2(x - top) for x in sums]
        total = functools.reduce(jnp.add, weights)
        has_keys = total > 0
        total = jnp.where(has_keys, total, 1)
        l_log2 = jnp.where(has_keys, top + jnp.log2(total), -jnp.inf)
        max_logits = self.max_logits
        if None not in (have := [x.max_logits for x in parts]):
            max_logits = functools.reduce(jnp.maximum, have)
        return LogSum(m, l_log2, max_logits), *(weight / total for weight in weights)

    def in_one(self) -> "LogSum":
        """Return the same LSE with m folded into l_log2."""
        if self.m is None:
            return self
        return self._replace(m=None, l_log2=self.m * LOG2E + self.l_log2)


def below(s, m, *, large: bool):
    """Return s - m for the scores s of rows with the maximum m.

    A compiler for CPUs may fuse s - m with the product before it, and then m alone is rounded. For
    large scores a minimum keeps the two apart, so that the largest difference is 0.
    """
    return (jnp.minimum(s, m) if large else s) - m


def with_sink(m, l, sink, exp=jnp.exp):
    """Return m and l of a softmax with a sink added, and the factor of the weights without it."""
    high = jnp.maximum(m, sink)
    factor = exp(m - high)
    return high, factor * l + exp(sink - high), factor


def sinks_gradient(sinks, log_sum: LogSum, delta):
    """Return the gradient of the sinks, [N].

    A sink is a key with the value 0, so its dp is 0. The gradient is the sum of ds = p * (0 -
    delta) with p = exp(sink - lse) over all rows with keys.

    Args:
        sinks: [N].
        log_sum: the LSE, with arrays [B, N, T].
        delta: [B, N, T].
    """
    m, l_log2, _ = log_sum
    sinks = sinks[None, :, None]
    sinks = sinks if m is None else sinks - m
    p = jnp.exp2(sinks * LOG2E - l_log2)
    return -jnp.sum(jnp.where(l_log2 == -jnp.inf, 0, p * delta), axis=(0, 2))
