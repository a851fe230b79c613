"""The features of a call: the input of most rules, and the key of the tuning cache.

`features_of(problem)` computes the features of a call once. The rules of `_selection.preferences`,
and most rules of tiles, read `CallFeatures` and nothing else of a call.
"""

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp

from pallas_flash._problem.masks import Band, LeafKind, Mask
from pallas_flash._problem.problem import Problem, Sizes
from pallas_flash._problem.tile_sizes import power_of_2

# A call with this many queries or fewer has few, because they fit in the smallest tile. So has a
# call with FEW_ROWS or fewer queries in all heads and batch elements, if there are as many keys:
# they are 64 programs of the forward, and leave half of a GPU idle.
FEW_QUERIES, FEW_ROWS = 16, 4096

# Keys from which on decoding has KV splits; fewer do not pay for a second launch. A round number,
# not timed.
MANY_KEYS = 512


class MaskKind(enum.StrEnum):
    """The kind of a mask. A mask of several leaves has the kind that comes last of theirs."""

    FULL = "full"
    # At any offset, which may be traced.
    CAUSAL = "causal"
    # Runs of keys for each query, such as windows.
    RANGES = "ranges"
    # The first keys and queries of each batch element, alone or with bands around the diagonal.
    LENGTHS = "lengths"
    ARRAY = "mask array"
    PREDICATE = "predicate"
    DOCUMENTS = "documents"
    BLOCKS = "blocks"
    # Anything else, such as positions that arrays tell.
    OTHER = "another mask"


class Option(enum.StrEnum):
    """Something that a call asks for besides products, a softmax and a mask."""

    BIAS_16_BITS = "bias in 16 bits"
    BIAS = "bias"
    SLOPES = "slopes"
    SCORE_MOD = "score function"
    SOFT_CAP = "soft cap"
    SINKS = "sinks"
    DROPOUT = "dropout"
    # A factor of the scores that may be larger than 1.
    SCALE = "scale"


BIASES = frozenset({Option.BIAS_16_BITS, Option.BIAS})
# The options that change scores, as `Problem.scores` does.
SCORES = BIASES | {Option.SLOPES, Option.SCORE_MOD, Option.SOFT_CAP}


@dataclasses.dataclass(frozen=True)
class CallFeatures(Sizes):
    """A call and its GPU, as far as they matter for who computes it and with which tiles.

    Attributes:
        dtype: name of the operands' dtype.
        head_dim: H.
        value_dim: V.
        q_len: T.
        kv_len: S.
        batch: batch elements, of all instances of `jax.vmap`.
        num_heads: N.
        num_kv_heads: K.
        mask: the kind of the mask.
        has_block_mask: whether a part of the mask is a `BlockMask`, whatever the others are.
        by_arrays: whether arrays say what the mask allows, so that only the GPU knows it.
        options: what else the call asks for.
        pair_bytes: bytes of bias and mask arrays for each pair of a query and a key.
        bias_is_shared: whether several pairs share an element of the bias.
        precision: precision of float32 products; "" for other dtypes.
        batch_invariant: whether a row's bits may depend on its own sequence alone.
        capability: compute capability of the GPU; None (unknown, or the interpreter) means the
            H100 and H200.
    """

    dtype: str
    head_dim: int
    value_dim: int
    q_len: int
    kv_len: int
    batch: int
    num_heads: int
    num_kv_heads: int
    mask: MaskKind = MaskKind.FULL
    has_block_mask: bool = False
    by_arrays: bool = False
    options: frozenset[Option] = frozenset()
    pair_bytes: int = 0
    bias_is_shared: bool = False
    precision: str = ""
    batch_invariant: bool = False
    capability: tuple[int, int] | None = None

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return jnp.dtype(self.dtype).itemsize

    @functools.cached_property
    def width(self) -> int:
        """The larger head dim."""
        return max(self.head_dim, self.value_dim)

    @functools.cached_property
    def padded_width(self) -> int:
        """The larger head dim as the tables of "triton" have it: a power of two from 64 on."""
        return max(64, power_of_2(self.width))

    @functools.cached_property
    def few_queries(self) -> bool:
        """Whether the kernel for decoding may serve."""
        few = self.q_len <= FEW_QUERIES or self.rows <= min(self.kv_len, FEW_ROWS)
        return few and not self.batch_invariant

    @functools.cached_property
    def decodes(self) -> bool:
        """Whether the kernel for decoding serves by default."""
        return self.few_queries and self.kv_len > MANY_KEYS

    @functools.cached_property
    def masked(self) -> bool:
        """Whether there is a mask."""
        return self.mask is not MaskKind.FULL

    @functools.cached_property
    def causal(self) -> bool:
        """Whether the mask is causal at an offset that is known."""
        return self.mask is MaskKind.CAUSAL and not self.by_arrays

    @functools.cached_property
    def scores(self) -> bool:
        """Whether anything changes scores."""
        return bool(self.options & SCORES)


def features_of(
    p: Problem, instances: int = 1, capability: tuple[int, int] | None = None
) -> CallFeatures:
    """Return the features of a call on a GPU, of which `instances` are launched at once."""
    return CallFeatures(
        dtype=p.dtype.name,
        head_dim=p.head_dim,
        value_dim=p.value_dim,
        q_len=p.q_len,
        kv_len=p.kv_len,
        batch=instances * p.batch,
        num_heads=p.num_heads,
        num_kv_heads=p.num_kv_heads,
        mask=kind_of(p.mask),
        has_block_mask=any(leaf.kind is LeafKind.BLOCKS for leaf in p.mask.leaves),
        by_arrays=bool(jax.tree.leaves(p.mask)),
        options=_options(p),
        pair_bytes=p.pair_bytes,
        bias_is_shared=p.bias is not None and p.bias.size < p.rows * p.kv_len,
        precision=str(p.precision).lower() if p.dtype.name == "float32" else "",
        batch_invariant=p.batch_invariant,
        capability=capability,
    )


def kind_of(mask: Mask) -> MaskKind:
    """Return the kind of a mask."""
    match mask.leaves:
        case ():
            return MaskKind.FULL
        case (Band(low=None),):
            return MaskKind.CAUSAL
    if mask.has_valid_lengths:
        return MaskKind.LENGTHS
    return max(map(_kind_of_leaf, mask.leaves), key=list(MaskKind).index)


def _kind_of_leaf(leaf) -> MaskKind:
    kinds = {
        LeafKind.DOCUMENTS: MaskKind.DOCUMENTS,
        LeafKind.NUMBERS: MaskKind.DOCUMENTS,
        LeafKind.ARRAY: MaskKind.ARRAY,
        LeafKind.BLOCKS: MaskKind.BLOCKS,
        LeafKind.PREDICATE: MaskKind.PREDICATE,
    }
    return MaskKind.RANGES if leaf.exact_ranges else kinds.get(leaf.kind, MaskKind.OTHER)


def _options(p: Problem) -> frozenset[Option]:
    in_16_bits = p.bias is not None and p.bias.dtype.itemsize == 2
    asked = {
        Option.BIAS_16_BITS if in_16_bits else Option.BIAS: p.bias,
        Option.SLOPES: p.slopes,
        Option.SCORE_MOD: p.rest_of_scores.score_mod,
        Option.SOFT_CAP: p.rest_of_scores.soft_cap,
        Option.SINKS: p.sinks,
        Option.DROPOUT: p.dropout,
        Option.SCALE: p.any_scale or None,
    }
    return frozenset(option for option, x in asked.items() if x is not None)
