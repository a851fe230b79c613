"""What the implementations are given, and what their backward gives back."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_flash._masks import Mask


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
        mask_array: bool, rank 4, each axis 1 or that of BNTS.
        mask: everything that positions, lengths and segment ids say about visibility.
        precision: what `lax.dot_general` takes.
    """

    query: Any
    key: Any
    value: Any
    scale: Any
    bias: Any
    mask_array: Any
    mask: Mask
    precision: Any = dataclasses.field(default=None, metadata=dict(static=True))

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
    def accumulator_dtype(self) -> Any:
        """The dtype of scores, statistics and sums: at least float32."""
        return np.promote_types(self.dtype, np.float32)

    def split(self) -> tuple[dict[str, Any], "Problem"]:
        """The operands that have a gradient, and the problem without them."""
        operands = {name: getattr(self, name) for name in Gradients._fields}
        return operands, dataclasses.replace(self, **dict.fromkeys(operands))

    def join(self, operands: dict[str, Any]) -> "Problem":
        """The inverse of `split`."""
        return dataclasses.replace(self, **operands)


class Gradients(NamedTuple):
    """One for each differentiable operand, None where there is none or it was not asked for."""

    query: Any
    key: Any
    value: Any
    scale: Any
    bias: Any
