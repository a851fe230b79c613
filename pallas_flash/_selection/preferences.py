"""The rules by which auto-selection prefers "mosaic" to "triton": `faster_by_mosaic`.

They follow from times of an H200 in docs/results, and of an H100 where kernels have changed since.
tests/selection/test_choice.py compares rules and times, and prints the loss of each call for which
the rules pick the slower one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from pallas_flash._problem.features import BIASES, CallFeatures, MaskKind, Option
from pallas_flash._problem.tile_sizes import in_clusters, padded

NEVER = math.inf

# So few CTAs leave half of the SMs of an H100 or H200 idle. A CTA of the backward has 128 keys.
FEW_CTAS = 132 // 2
KEYS_OF_A_CTA = 128

# Masks and options that were measured with 256 tokens, too.
SHORT_MASKS = set(MaskKind) - {MaskKind.PREDICATE, MaskKind.BLOCKS, MaskKind.OTHER}
SHORT_OPTIONS = {Option.SOFT_CAP, Option.SLOPES, Option.SINKS}

# Most measured calls have this many queries in all heads and batch elements, or more.
MANY_ROWS = 2**17


@dataclasses.dataclass(frozen=True)
class Measured:
    """A pass of a call, in the words of the rules.

    Attributes:
        f: the call.
        backward: whether the pass is a backward.
        deterministic: whether its sums have a deterministic order.
        dbias: whether it gives the gradient of the bias, too.
    """

    f: CallFeatures
    backward: bool = False
    deterministic: bool = False
    dbias: bool = False

    @functools.cached_property
    def head_dim(self) -> int:
        """The measured head dim that takes as long as the call's; 0 if there is none."""
        # Head dims from 40 to 256 were measured, and narrower values: 128 of 192 and 64 of 128.
        f, sizes = self.f, (64, 128, 256)
        return next((n for n in sizes if 40 <= f.head_dim <= n and f.value_dim <= f.head_dim), 0)

    @functools.cached_property
    def plain(self) -> bool:
        """Whether the call has no mask or a causal one, and no option."""
        return not self.f.options and (self.f.causal or not self.f.masked)

    @functools.cached_property
    def unordered(self) -> bool:
        """Whether it is a backward of q, k and v alone whose sums have no order."""
        return self.backward and not (self.deterministic or self.dbias)

    @functools.cached_property
    def in_clusters(self) -> bool:
        """Whether clusters of two CTAs compute it, in no order."""
        return self.unordered and in_clusters(*padded(self.f.head_dim, self.f.value_dim))

    @functools.cached_property
    def few_ctas(self) -> bool:
        """Whether it is a backward in no order of few CTAs, without clusters, of own keys."""
        f = self.f
        ctas = f.batch * f.num_kv_heads * -(-f.kv_len // KEYS_OF_A_CTA)
        few = f.groups == 1 and ctas <= FEW_CTAS
        return self.unordered and not self.in_clusters and few

    @functools.cached_property
    def drops(self) -> bool:
        """Whether dropout is the call's only option."""
        return self.f.options == {Option.DROPOUT}

    def asks(self, *options: Option) -> bool:
        """Return whether the call asks for one of these."""
        return not self.f.options.isdisjoint(options)


class Rule(NamedTuple):
    """The number of queries and keys from which on "mosaic" computes calls of a kind.

    Attributes:
        kind: the kind in words.
        since: that number; NEVER if "mosaic" is slower, or was not measured.
        gain: the largest loss of a timed call without the rule, as a share of its time;
            None if no call of the kind was timed. Sources are the files in docs/results.
        fits: whether a call is of that kind.
    """

    kind: str
    since: float
    gain: float | None
    fits: Callable[[Measured], bool]

    def prefers_mosaic(self, call: Measured) -> bool:
        """Return whether "mosaic" computes a call of the kind."""
        if not call.head_dim or min(call.f.q_len, call.f.kv_len) < self.since:
            return False
        # No backward of fewer keys was timed.
        if call.backward and call.f.kv_rows < 2**11:
            return False
        # Clusters were faster with as little work as was measured.
        return call.in_clusters or call.few_ctas or _has_enough_work(call)


# The first rule that fits decides.
RULES = (
    Rule(
        "dbias where it was not measured, or is slower: deterministic, head dim 64, without a mask",
        *(NEVER, 0.14),
        lambda c: (
            c.dbias
            and (
                c.f.options != {Option.BIAS_16_BITS}
                or not (c.f.causal or not c.f.masked)
                or c.head_dim == 256
                or (c.deterministic and c.head_dim == 64 and not c.f.masked)
            )
        ),
    ),
    Rule(
        "biases in 16 bits without a mask, but in the forward at 64 and in order at 128",
        *(256, 0.79),
        lambda c: (
            c.head_dim <= 128
            and c.asks(Option.BIAS_16_BITS)
            and not c.f.masked
            and (c.backward or c.head_dim == 128)
            and (not c.deterministic or c.head_dim == 64)
        ),
    ),
    Rule(
        "biases in 16 bits in the backward at head dim 128: dbias without a mask, or in any order",
        *(512, 0.33),
        lambda c: (
            c.backward
            and c.head_dim == 128
            and c.asks(Option.BIAS_16_BITS)
            and (not c.f.masked if c.dbias else not c.deterministic)
        ),
    ),
    Rule(
        "backwards of few CTAs that were not measured",
        *(NEVER, None),
        lambda c: c.few_ctas and not c.plain,
    ),
    Rule(
        "backwards of few CTAs without a mask at head dim 64",
        *(2048, 0.09),
        lambda c: c.few_ctas and c.head_dim == 64 and not c.f.masked,
    ),
    Rule(
        "other backwards of few CTAs, of which shorter ones were not measured",
        *(256, None),
        lambda c: c.few_ctas,
    ),
    Rule(
        "score functions in the forward at head dim 64",
        *(NEVER, 0.11),
        lambda c: not c.backward and c.head_dim == 64 and c.asks(Option.SCORE_MOD),
    ),
    Rule(
        "deterministic at head dim 64: score functions and block masks",
        *(NEVER, 0.17),
        lambda c: (
            c.deterministic
            and c.head_dim == 64
            and not c.dbias
            and (c.f.mask is MaskKind.BLOCKS or c.asks(Option.SCORE_MOD))
        ),
    ),
    Rule(
        "float32 biases, deterministic, which were not measured",
        *(NEVER, None),
        lambda c: c.deterministic and c.asks(Option.BIAS),
    ),
    Rule(
        "block masks, and in the forward biases, at head dim 64",
        *(4096, 0.25),
        lambda c: (
            c.head_dim == 64
            and (c.f.mask is MaskKind.BLOCKS or (not c.backward and c.asks(*BIASES)))
        ),
    ),
    Rule(
        "biases, of which shorter ones were not measured, but deterministic at head dim 64",
        *(2048, None),
        lambda c: c.asks(*BIASES) and (c.dbias or not (c.deterministic and c.head_dim == 64)),
    ),
    Rule(
        "documents, chunks and joined masks in the forward at head dim 64",
        *(2048, 0.16),
        lambda c: (
            not c.backward and c.head_dim == 64 and c.f.mask in (MaskKind.DOCUMENTS, MaskKind.OTHER)
        ),
    ),
    Rule(
        "dropout without a mask or with a causal one, but in the forward at 64, in order at 128",
        *(256, 0.37),
        lambda c: (
            c.drops
            and c.head_dim <= 128
            and (c.f.causal or not c.f.masked)
            and (c.unordered or (c.head_dim == 64) == c.backward)
        ),
    ),
    Rule(
        "dropout in no order, and in the forward at 128, of which shorter ones were not measured",
        *(512, None),
        lambda c: c.drops and (c.unordered or (not c.backward and c.head_dim == 128)),
    ),
    Rule(
        "no mask or a causal one, no option, 256 in order, of which shorter ones were not measured",
        *(512, None),
        lambda c: c.plain and c.head_dim == 256 and c.deterministic,
    ),
    Rule(
        "no mask or a causal one, no option, at 256, of which shorter ones were not measured",
        *(128, None),
        lambda c: c.plain and c.head_dim == 256,
    ),
    # Tiles of the Triton kernels have 64 queries.
    Rule(
        "no mask or a causal one, and no option",
        *(65, 1.63),
        lambda c: c.plain,
    ),
    Rule(
        "soft caps and slopes in the forward at head dim 64",
        *(512, 0.3),
        lambda c: not c.backward and c.head_dim == 64 and c.asks(Option.SOFT_CAP, Option.SLOPES),
    ),
    Rule(
        "lengths up to head dim 128, but in the backward at head dim 64",
        *(128, 0.62),
        lambda c: (
            c.head_dim <= 128
            and c.f.mask is MaskKind.LENGTHS
            and not (c.f.options or (c.backward and c.head_dim == 64))
        ),
    ),
    # Timed one at a time, the options without a mask.
    Rule(
        "lengths, windows, documents, mask arrays, soft caps, slopes, sinks, but in order at 128",
        *(256, 0.88),
        lambda c: (
            c.head_dim <= 128
            and (not c.deterministic or c.head_dim == 64)
            and c.f.mask in SHORT_MASKS
            and c.f.options <= SHORT_OPTIONS
        ),
    ),
    Rule("all other calls", 1024, None, lambda c: True),
)


def faster_by_mosaic(call: Measured) -> bool:
    """Return whether "mosaic" computes a pass of a call, by the rules."""
    return rule_of(call).prefers_mosaic(call)


def rule_of(call: Measured) -> Rule:
    """Return the rule that decides."""
    return next(rule for rule in RULES if rule.fits(call))


def _has_enough_work(call: Measured) -> bool:
    """Return whether all heads and batch elements have enough queries.

    A plain call needs 2^21 numbers of them, and half as many in a causal forward; but a forward of
    fewer than 384 queries or keys twice as many. Others were measured from `MANY_ROWS` queries on
    (of fewer than 512 tokens from twice as many), dropout in a backward in no order from a quarter
    of them on.
    """
    f = call.f
    if not call.plain or call.deterministic or call.dbias:
        return f.rows >= (MANY_ROWS // 4 if call.drops and call.unordered else MANY_ROWS)
    least = 2**20 if f.causal and not call.backward else 2**21
    short = not call.backward and min(f.q_len, f.kv_len) < 384
    return f.rows * call.head_dim >= (2 * least if short else least)
