"""What happens to a tile of scores between the product of queries and keys and the softmax.

    x = scale * q . k                 what `logits` is given
    x = x + bias[b, h, q, k]
    x = x - slope[h] * |q + query_offset - k|     or between positions that arrays tell
    x = score_fn(x, b, h, q, k, *operands)
    x = soft_cap * tanh(x / soft_cap)

Written once, for tiles in kernels and in plain JAX; the backward takes its derivative in x from
`jax.vjp` of it on the tile. Sinks add exp(sink) to the softmax's denominator, once a row.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash._operands import Pairs, Positions, for_user

LOG2E, LN2 = math.log2(math.e), math.log(2.0)


def _to_float(x, dtype):
    return x.astype(dtype)


class Functions(NamedTuple):
    """What tiles of scores are computed with, which a GPU may have in ways of its own.

    Attributes:
        tanh: hyperbolic tangent.
        to_float: numbers for differences of positions.
    """

    tanh: Callable = jnp.tanh
    to_float: Callable = _to_float


FUNCTIONS = Functions()


@contextlib.contextmanager
def differentiated():
    """Say in one sentence that JAX cannot differentiate a score function, which it can trace."""
    try:
        yield
    except Exception as error:  # A user's derivative may raise anything.
        reason = str(error).partition("\n")[0].rstrip(".")
        raise NotImplementedError(
            "`score_fn` must have a derivative in the score where gradients are taken; got "
            f"{type(error).__name__}: {reason}. Wrap what has none in `jax.lax.stop_gradient`."
        ) from error


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """The optional parts of a score; all None where x is the score.

    Attributes:
        bias: a number for each pair.
        slopes: [N], ALiBi's.
        offset: int32 [B], the position of query 0 for the slopes; None if it is `shift`.
        positions: those of all tokens for the slopes, if arrays tell them.
        operands: arrays for `score_fn`.
        origin: as `Dropout.origin`.
        shift: the position of query 0 for the slopes, where it is known.
        score_fn: maps x and the indices to a score.
        soft_cap: bounds the scores.
    """

    bias: Pairs | None = None
    slopes: Any = None
    offset: Any = None
    positions: Positions | None = None
    operands: tuple[Any, ...] = ()
    origin: Any = None
    shift: int = dataclasses.field(default=0, metadata=dict(static=True))
    score_fn: Callable | None = dataclasses.field(default=None, metadata=dict(static=True))
    soft_cap: float | None = dataclasses.field(default=None, metadata=dict(static=True))

    def __bool__(self) -> bool:
        parts = self.bias, self.slopes, self.score_fn, self.soft_cap
        return any(part is not None for part in parts)

    def logits(self, x, b, h, q, k, *, functions=FUNCTIONS):
        """The scores for x = scale * q . k at indices that broadcast to the shape of x."""
        return self._mapped(self._added(x, b, h, q, k, functions), b, h, q, k, functions)

    def vjp(self, x, b, h, q, k, *, functions=FUNCTIONS):
        """`logits`, and the function that takes a cotangent of them to one of x."""
        x = self._added(x, b, h, q, k, functions)
        if self.score_fn is None and self.soft_cap is None:
            return x, lambda ds: ds
        with differentiated():
            logits, pull = jax.vjp(lambda x: self._mapped(x, b, h, q, k, functions), x)

        def pulled(ds):
            with differentiated():
                return pull(ds)[0]

        return logits, pulled

    def derivative(
        self, x, b, h, q, k, *, functions=FUNCTIONS, call=lambda function, x: function(x)
    ):
        """`logits`, and their derivative in x: each depends on one x alone.

        `call` is for who must call the function of x that is differentiated in a way of its own.
        """
        x = self._added(x, b, h, q, k, functions)
        mapped = functools.partial(self._mapped, b=b, h=h, q=q, k=k, functions=functions)
        with differentiated():
            return call(lambda x: jax.jvp(mapped, (x,), (jnp.ones_like(x),)), x)

    def _added(self, x, b, h, q, k, functions):
        if self.bias is not None:
            x = x + self.bias.read(b, h, q, k).astype(x.dtype)
        if self.slopes is not None:
            if self.positions is not None:
                distance = self.positions.of_query(b, q) - self.positions.of_key(b, k)
            else:
                distance = q + (self.shift if self.offset is None else self.offset[b]) - k
            x = x - self.slopes[h] * jnp.abs(functions.to_float(distance, x.dtype))
        return x

    def _mapped(self, x, b, h, q, k, functions):
        if self.score_fn is not None:
            if self.origin is not None:
                b, h, q, k = (x + self.origin[i] for i, x in enumerate((b, h, q, k)))
            out = self.score_fn(x, b, h, q, k, *map(for_user, self.operands))
            # It may be a Python number, or have fewer axes where the score was not read.
            x = jnp.broadcast_to(jnp.asarray(out, x.dtype), x.shape)
        if self.soft_cap is not None:
            x = self.soft_cap * functions.tanh(x * (1 / self.soft_cap))
        return x


class LogSum(NamedTuple):
    """The LSE of each row as the forward leaves it to the backward: m + log(2) * l_log2.

    Two numbers where scores may be large: float32 has no room for log(n) beside -1e9, and of n
    equal weights each would be taken for 1.

    Attributes:
        m: the row's largest score or sink, [B, N, T]; 0 where it sees nothing. None is 0.
        l_log2: log2(sum(exp(s - m))), likewise; -inf where the row sees nothing.
    """

    m: Any
    l_log2: Any

    @property
    def lse(self):
        """The natural LSE."""
        lse = self.l_log2 * LN2
        return lse if self.m is None else self.m + lse

    def joined(self, other: "LogSum") -> tuple["LogSum", Any, Any]:
        """That of the scores of both, and the shares of the two in their sum of weights."""
        m, mine, others = None, self.l_log2, other.l_log2
        if self.m is not None:
            highest = [jnp.where(x.l_log2 == -jnp.inf, -jnp.inf, x.m) for x in (self, other)]
            m = jnp.maximum(*highest)
            m = jnp.where(m == -jnp.inf, 0, m)
            mine, others = (
                x.l_log2 + (high - m) * LOG2E
                for x, high in zip((self, other), highest, strict=True)
            )
        top = jnp.maximum(mine, others)
        top = jnp.where(top == -jnp.inf, 0, top)
        weights = jnp.exp2(mine - top), jnp.exp2(others - top)
        total = weights[0] + weights[1]
        alive = total > 0
        total = jnp.where(alive, total, 1)
        l_log2 = jnp.where(alive, top + jnp.log2(total), -jnp.inf)
        return LogSum(m, l_log2), weights[0] / total, weights[1] / total

    def in_one(self) -> "LogSum":
        """Without m."""
        return self if self.m is None else LogSum(None, self.m * LOG2E + self.l_log2)


def below(s, m, *, large: bool):
    """The scores s less the maximum m of their row.

    Compilers for CPUs fuse s - m with a product before it, and then m alone is rounded. Where that
    could matter, a minimum keeps them apart: the largest difference is 0 whatever scores are.
    """
    return (jnp.minimum(s, m) if large else s) - m


def with_sink(m, l, sink, exp=jnp.exp):
    """The m and l of a softmax with one more score, and the factor of its weights so far."""
    high = jnp.maximum(m, sink)
    factor = exp(m - high)
    return high, factor * l + exp(sink - high), factor


def sinks_gradient(sinks, log_sum: LogSum, delta):
    """[N] from [N], [B, N, T] and [B, N, T]: the sink is a key with the value 0, so dp = 0.

    ds = p * (dp - delta) with p = exp(sink - lse), summed over all rows that see something.
    """
    m, l_log2 = log_sum
    sinks = sinks[None, :, None]
    sinks = sinks if m is None else sinks - m
    p = jnp.exp2(sinks * LOG2E - l_log2)
    return -jnp.sum(jnp.where(l_log2 == -jnp.inf, 0, p * delta), axis=(0, 2))
