"""What the implementations are given, and what their backward gives back."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_flash._dropout import Dropout
from pallas_flash._masks import Mask
from pallas_flash._operands import Pairs, is_pairs
from pallas_flash._scores import Scores
from pallas_flash._symbolic import is_symbolic
from pallas_flash._tiling import sizes

# Scores up to this are not large: beside them float32 has room for the logarithm of a sum, to about
# 1e-5 of a probability. Above the soft caps that models have.
SMALL_CAP = 100.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """A checked call: batched arrays, one mask object, a positive scale.

    Attributes:
        query: [B, T, N, H].
        key: [B, S, K, H].
        value: [B, S, K, V].
        scale: float32 (float64 for float64 inputs) scalar, not negative.
        bias: added to the scaled scores; rank 4, each axis 1 or that of BNTS.
        sinks: float32 (float64 for float64 inputs) [N], logits in the softmax's denominator.
        slopes: [N], ALiBi's; of the dtype of `scale`.
        score_operands: arrays for the score function.
        mask: everything that says who sees whom.
        rest_of_scores: the parts of `scores` that have no gradient.
        dropout: which probabilities become zero.
        precision: what `lax.dot_general` takes.
        key_center: of a part of a problem the vector of `_key_center`, float32 [B, K, H].
        any_scale: whether `scale` may be larger than 1, the default of the smallest heads.
        partial_rows: whether other parts of a problem have keys of the same rows of scores.
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

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def q_len(self) -> int:
        return self.query.shape[1]

    @property
    def kv_len(self) -> int:
        return self.key.shape[1]

    @property
    def num_heads(self) -> int:
        return self.query.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[2]

    @property
    def groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.query.shape[3]

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @property
    def dtype(self) -> Any:
        return self.query.dtype

    @property
    def symbolic(self) -> tuple[Any, ...]:
        """The sizes of arrays that `jax.export` leaves open, each once."""
        sizes = (n for x in jax.tree.leaves(self) for n in np.shape(x) if is_symbolic(n))
        return tuple(dict.fromkeys(sizes))

    @property
    def accumulator_dtype(self) -> Any:
        """The dtype of scores, statistics and sums: at least float32."""
        return np.promote_types(self.dtype, np.float32)

    @property
    def scores(self) -> Scores:
        """What is done to scaled products of queries and keys."""
        return dataclasses.replace(
            self.rest_of_scores,
            bias=None if self.bias is None else Pairs(self.bias),
            slopes=self.slopes,
            operands=self.score_operands,
        )

    @property
    def large(self) -> bool:
        """Whether scores may be large: what the call asks for can make them so, and no cap bounds.

        Then the maximum is subtracted from rounded scores, so that its weight is exactly 1, and the
        backward is given it apart from the sum, see `LogSum`.
        """
        cap = self.rest_of_scores.soft_cap
        return (bool(self.scores) or self.any_scale) and (cap is None or cap > SMALL_CAP)

    @property
    def kind(self) -> str:
        """What loops have besides products: "scores", "dropout", else the mask's kind."""
        return "scores" if self.scores else "dropout" if self.dropout else self.mask.kind

    @property
    def rows(self) -> int:
        """Queries of all heads and examples."""
        return self.batch * self.num_heads * self.q_len

    @property
    def kv_rows(self) -> int:
        """Keys of all heads and examples."""
        return self.batch * self.num_kv_heads * self.kv_len

    @property
    def few_queries(self) -> bool:
        """Whether the kernel for few queries may serve."""
        return sizes.few_queries(self.q_len, self.kv_len, self.rows)

    @property
    def pair_bytes(self) -> int:
        """Bytes of bias and mask arrays for each pair of a query and a key."""
        arrays = jax.tree.leaves((self.mask, self.scores), is_leaf=is_pairs)
        return sum(x.array.dtype.itemsize for x in arrays if is_pairs(x) and 1 not in x.shape[2:])

    def visible_keys(self, positions=None):
        """Return which keys any query sees, at int32 positions or at all of them.

        Bool [1 or B, 1 or K, keys]; None where it is all of them.
        """
        shape = self.batch, self.num_heads, self.q_len, self.kv_len
        visible = self.mask.seen_keys(shape, positions)
        if visible is None or visible.shape[1] == 1:
            return visible
        return visible.reshape(len(visible), self.num_kv_heads, self.groups, -1).any(axis=2)

    def moved(self, part) -> "Problem":
        """See `_context.parts`."""
        if self.slopes is None or self.rest_of_scores.positions is not None:
            return self
        shift, offset = part.offset(self.rest_of_scores.shift, self.rest_of_scores.offset)
        scores = dataclasses.replace(self.rest_of_scores, shift=shift, offset=offset)
        return dataclasses.replace(self, rest_of_scores=scores)

    def split(self) -> tuple[dict[str, Any], "Problem"]:
        """The operands that may be differentiated, and the problem without them."""
        operands = {name: getattr(self, name) for name in Gradients._fields}
        return operands, dataclasses.replace(self, **dict.fromkeys(operands))

    def join(self, operands: dict[str, Any]) -> "Problem":
        """The inverse of `split`."""
        return dataclasses.replace(self, **operands)


class Extras(NamedTuple):
    """What a call may ask for beyond products and a softmax; arrays, or references to them."""

    mask: Mask
    scores: Scores
    sinks: Any = None
    dropout: Dropout | None = None


class Gradients(NamedTuple):
    """One for each floating-point operand, None where there is none or it was not asked for."""

    query: Any
    key: Any
    value: Any
    scale: Any
    bias: Any
    sinks: Any = None
    # These have none; `_vjp` refuses to differentiate them.
    slopes: Any = None
    score_operands: Any = None
