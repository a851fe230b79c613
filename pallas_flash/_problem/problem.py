"""`Problem`, the argument of every implementation, and `Gradients`, the result of its backward."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash._jax.symbolic import symbolic_sizes
from pallas_flash._problem import visibility
from pallas_flash._problem.dropout import Dropout
from pallas_flash._problem.masks import Mask
from pallas_flash._problem.operands import Divisible, Pairs, pairs_of
from pallas_flash._problem.scores import Scores

# Score up to which one LSE in float32 suffices: its rounding changes probabilities by about 1e-5.
# The soft caps of models are below it.
SMALL_CAP = 100.0


class Sizes:
    """Products of the sizes of a call, for a frozen class that has these sizes."""

    batch: Any
    q_len: Any
    kv_len: Any
    num_heads: Any
    num_kv_heads: Any

    @functools.cached_property
    def groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @functools.cached_property
    def rows(self) -> int:
        """Queries of all heads and batch elements."""
        return self.batch * self.num_heads * self.q_len

    @functools.cached_property
    def kv_rows(self) -> int:
        """Keys of all key/value heads and batch elements."""
        return self.batch * self.num_kv_heads * self.kv_len


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem(Sizes, Divisible):
    """A checked call: batched arrays, one `Mask`, a scale that is not negative.

    Attributes:
        query: [B, T, N, H].
        key: [B, S, K, H].
        value: [B, S, K, V].
        scale: float32 (float64 for float64 inputs) scalar, not negative.
        bias: added to the scaled scores; rank 4, each axis 1 or as in BNTS.
        sinks: float32 (float64 for float64 inputs) [N], logits in the softmax's denominator.
        slopes: [N], ALiBi's; of the dtype of `scale`.
        score_operands: arrays for the score function.
        mask: the conjunction of all conditions on which keys a query may see.
        rest_of_scores: the parts of `scores` that have no gradient.
        dropout: the rule that says which probabilities become zero.
        precision: the argument of `lax.dot_general`.
        key_center: the vector of `_problem.key_center` where this is a part of a problem, float32
            [B, K, H]; None elsewhere.
        any_scale: whether `scale` may be larger than 1, the largest default.
        partial_rows: whether other parts of a problem have keys of the same rows of scores.
        max_logits: whether the forward also gives the largest score of each row.
        split_output: whether the forward gives the output as a `SplitOutput`.
        batch_invariant: whether a row's bits may depend on its own sequence alone.
    """

    query: Any
    key: Any
    value: Any
    scale: Any
    bias: Any
    sinks: Any
    slopes: Any
    score_operands: Any
    mask: Mask
    rest_of_scores: Scores = dataclasses.field(default_factory=Scores)
    dropout: Dropout | None = None
    precision: Any = dataclasses.field(default=None, metadata=dict(static=True))
    key_center: Any = None
    any_scale: bool = dataclasses.field(default=False, metadata=dict(static=True))
    partial_rows: bool = dataclasses.field(default=False, metadata=dict(static=True))
    max_logits: bool = dataclasses.field(default=False, metadata=dict(static=True))
    split_output: bool = dataclasses.field(default=False, metadata=dict(static=True))
    batch_invariant: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @functools.cached_property
    def batch(self) -> int:
        return self.query.shape[0]

    @functools.cached_property
    def q_len(self) -> int:
        return self.query.shape[1]

    @functools.cached_property
    def kv_len(self) -> int:
        return self.key.shape[1]

    @functools.cached_property
    def num_heads(self) -> int:
        return self.query.shape[2]

    @functools.cached_property
    def num_kv_heads(self) -> int:
        return self.key.shape[2]

    @functools.cached_property
    def head_dim(self) -> int:
        return self.query.shape[3]

    @functools.cached_property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @functools.cached_property
    def dtype(self) -> Any:
        return self.query.dtype

    @functools.cached_property
    def symbolic(self) -> tuple[Any, ...]:
        """The sizes of arrays that `jax.export` leaves open, each once."""
        return symbolic_sizes(jax.tree.leaves(self))

    @property
    def accumulator_dtype(self) -> Any:
        """The dtype of scores, statistics and sums: at least float32."""
        return np.promote_types(self.dtype, np.float32)

    @functools.cached_property
    def scores(self) -> Scores:
        """The function that is applied to scaled products of queries and keys."""
        return dataclasses.replace(
            self.rest_of_scores,
            bias=None if self.bias is None else Pairs(self.bias),
            slopes=self.slopes,
            operands=self.score_operands,
        )

    @functools.cached_property
    def large(self) -> bool:
        """Whether scores may be large: an option may make them so, and no soft cap bounds them.

        Then kernels subtract m from rounded scores, so that a score of m has exactly the weight 1,
        and the backward gets m apart from the sum, see `LogSum`.
        """
        return may_be_large(self.scores, any_scale=self.any_scale)

    @property
    def pair_bytes(self) -> int:
        """Bytes of (q, k) arrays for each pair of a query and a key."""
        arrays = pairs_of((self.mask, self.scores))
        return sum(x.array.dtype.itemsize for x in arrays if 1 not in x.shape[2:])

    def visible_keys(self, positions=None):
        """Return which keys are visible to any query, bool [1 or B, 1 or K, keys].

        At int32 `positions`, or at all of them; None if every key is known to be visible.
        """
        visible = visibility.visible_keys(self.mask, self._scores_shape, positions)
        if visible is None or visible.shape[1] == 1:
            return visible
        return visible.reshape(len(visible), self.num_kv_heads, self.groups, -1).any(axis=2)

    def rows_with_keys(self):
        """Return which queries see any key, bool [1 or B, 1 or N, T]; None if all are known to."""
        return visibility.rows_with_keys(self.mask, self._scores_shape)

    def valid_lengths(self):
        """Return how many queries see a key, and how many keys are visible, int32 [B] each.

        None unless the mask is made of lengths, see `Mask.has_valid_lengths`.
        """
        valid = visibility.valid_lengths(self.mask, self.q_len, self.kv_len)
        return valid and tuple(jnp.broadcast_to(x, (self.batch,)).astype(jnp.int32) for x in valid)

    @property
    def decodes_prefix(self) -> bool:
        """Whether one query sees the first keys of its batch element, and nothing changes scores.

        A sink in the softmax's denominator may stand beside them.
        """
        leaves = self.mask.leaves
        first = all(
            leaf.lengths is not None
            or (leaf.exact_ranges and leaf.window is not None and leaf.window.low is None)
            for leaf in leaves
        )
        return self.q_len == 1 and first and not self.scores and self.dropout is None

    @property
    def _scores_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.num_heads, self.q_len, self.kv_len

    def restrict(self, part) -> "Problem":
        if self.slopes is None or self.rest_of_scores.positions is not None:
            return self
        shift, offset = part.offset(self.rest_of_scores.shift, self.rest_of_scores.offset)
        scores = dataclasses.replace(self.rest_of_scores, shift=shift, offset=offset)
        return dataclasses.replace(self, rest_of_scores=scores)

    def split(self) -> tuple[dict[str, Any], "Problem"]:
        """Return the operands that may be differentiated, and the problem without them."""
        operands = {name: getattr(self, name) for name in Gradients._fields}
        return operands, dataclasses.replace(self, **dict.fromkeys(operands))

    def join(self, operands: dict[str, Any]) -> "Problem":
        """Return the problem with the operands that `split` took out."""
        return dataclasses.replace(self, **operands)


def may_be_large(scores: Scores, *, any_scale: bool) -> bool:
    """Return `Problem.large` for these scores."""
    cap = scores.soft_cap
    return (bool(scores) or any_scale) and (cap is None or cap > SMALL_CAP)


class Extras(NamedTuple):
    """The parts of a call beyond products and a softmax; arrays, or references to them."""

    mask: Mask
    scores: Scores
    sinks: Any = None
    dropout: Dropout | None = None


class SplitOutput(NamedTuple):
    """An output in 16 bits and what its rounding took off, for a delta that is right to 2^-17.

    Attributes:
        o: the output, [B, T, N, V].
        low: the exact output less `o`, rounded to the same dtype.
    """

    o: Any
    low: Any

    @classmethod
    def from_float32(cls, o, dtype, *, split: bool):
        """Return an output of float32 in a dtype; its two parts if it is to be split."""
        if not split:
            return o.astype(dtype)
        info = jnp.finfo(dtype)
        # XLA may leave out a conversion and its inverse, but not this.
        rounded = lax.reduce_precision(o, info.nexp, info.nmant)
        # It makes zeros of numbers that are subnormal in the dtype. They have no low part.
        rounded = jnp.where(rounded == 0, o, rounded)
        return cls(rounded.astype(dtype), (o - rounded).astype(dtype))


def widened(o, dtype):
    """Return an output, or the sum of both parts of one, in a wider dtype."""
    high, *low = (x.astype(dtype) for x in jax.tree.leaves(o))
    return high + low[0] if low else high


class Gradients(NamedTuple):
    """The gradient of each floating-point operand; None if there is none or it was not wanted.

    `score_operands` is a tuple of such gradients, or None.
    """

    query: Any
    key: Any
    value: Any
    scale: Any
    bias: Any
    sinks: Any = None
    slopes: Any = None
    score_operands: Any = None
