"""The tile that a call of forward_kernel.py has: the first of `TILE_RULES` that fits decides."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from pallas_flash._backends.mosaic.scheduler import folded, most_rows
from pallas_flash._problem import invariance
from pallas_flash._problem.features import SCORES, CallFeatures, MaskKind, Option
from pallas_flash._problem.tile_sizes import ForwardTile


class TileRule(NamedTuple):
    """A tile for a kind of call.

    Attributes:
        width: the largest head dim of the kind.
        kind: the rest of it in words.
        tile: its tile.
        fits: whether a call of such a head dim is of the kind.
    """

    width: float
    kind: str
    tile: ForwardTile
    fits: Callable[[CallFeatures], bool] = lambda f: True


# The first rule that fits decides. Times were taken on an H200 unless said otherwise.
TILE_RULES = (
    # Tiles of 192 x 96 would make most blocks of 128 x 128 partial, 2.4 times as long.
    TileRule(
        *(64, "block masks, dropout or float32 biases", ForwardTile(2, 128, 1)),
        lambda f: f.has_block_mask or bool(f.options & {Option.DROPOUT, Option.BIAS}),
    ),
    TileRule(
        *(64, "batch-invariant, and what takes registers for each pair", ForwardTile(2, 128, 1)),
        lambda f: f.batch_invariant and _takes_registers(f),
    ),
    # 1024 causal tokens of 16 heads: 11 and 13 microseconds, and with slopes 15 and 21.
    TileRule(64, "folded query tiles", ForwardTile(2, 128, 1, 4), lambda f: folded(f, 2)),
    TileRule(
        *(64, "a mask or scores that take registers for each pair", ForwardTile(3, 96, 1)),
        lambda f: _takes_registers(f),
    ),
    # 512 tokens of 32 x 16 heads: 86 and 91 microseconds, with lengths 75 and 79, of 32 x 32 causal
    # heads 117 and 124; 2048 tokens of 32 heads 77 and 81, but causal ones 47 and 46.
    TileRule(
        *(64, "products alone, few keys, fewer queries of a CTA by four warpgroups"),
        *(ForwardTile(4, 64, 1, 4), lambda f: _is_shorter_by_four(f)),
    ),
    # 512 tokens of 32 heads: 9.5 and 11 microseconds. But 128 of 128 x 32 heads: 80 and 74.
    TileRule(
        *(64, "products alone, no mask, several blocks, fewer queries of a CTA by two warpgroups"),
        ForwardTile(2, 128, 1, 4),
        lambda f: _products_alone(f) and not f.masked and f.kv_len > 128 and _is_shorter_by_two(f),
    ),
    # At 4096 tokens four stages take 6 % longer.
    TileRule(64, "mask arrays", ForwardTile(3, 128, 1, 2), lambda f: f.mask is MaskKind.ARRAY),
    # A warpgroup begins its next query tile while others end theirs, as far as keys are there: at
    # 512 to 2048 causal tokens two stages take 2 to 7 % longer.
    TileRule(64, "all others", ForwardTile(3, 128, 1, 4)),
    TileRule(128, "float32 biases", ForwardTile(2, 96, 2), lambda f: Option.BIAS in f.options),
    # 4096 tokens: 1.22 and 1.31 ms.
    TileRule(
        *(128, "soft caps and no mask", ForwardTile(3, 80, 1)),
        lambda f: Option.SOFT_CAP in f.options and not f.masked and _waits_for_scores(f),
    ),
    # 256 tokens of 64 x 16 heads: 72 and 79 microseconds, and by blocks of 128 keys 75.
    TileRule(
        *(128, "products alone, few causal keys, many work tiles, fewer queries by two warpgroups"),
        ForwardTile(2, 64, 2, 4),
        lambda f: (
            f.causal
            and _hides_some_of_few(f)
            and most_rows(f, 3) >= MANY_ROWS_OF_A_CTA
            and _is_shorter_by_two(f)
        ),
    ),
    # 512 causal tokens at head dim 128: 99 and 102 microseconds, on an H100 109 and 116; at head
    # dim 80 121 and 144. With lengths of up to 256, 384 and 512: 85 and 93, 84 and 95, 103 and 110.
    TileRule(
        *(128, "products alone, few keys, causal or with lengths", ForwardTile(3, 64, 1, 3)),
        lambda f: _hides_some_of_few(f),
    ),
    # Much of the last block of few keys is padding: 1024 keys take 10 % longer, 2048 5 %.
    TileRule(
        *(128, "products alone, no mask, more than 2048 keys", ForwardTile(2, 176, 1)),
        lambda f: _products_alone(f) and not f.masked and f.kv_len > 2048,
    ),
    TileRule(128, "all others", ForwardTile(2, 128, 2)),
    # Values that are no wider leave through the buffer of the queries. 4096 tokens with soft caps:
    # 0.96 and 0.99 ms, with slopes 0.96 and 1.02 ms.
    TileRule(
        *(256, "products alone without a mask, or scores that are waited for"),
        *(ForwardTile(2, 80, 0), lambda f: f.value_dim <= f.head_dim and _is_light(f)),
    ),
    TileRule(math.inf, "all others", ForwardTile(2, 64, 1)),
)


def default_tile(f: CallFeatures) -> ForwardTile:
    """Return the tile of a call, by the rules; two CTAs may be a cluster that shares loads."""
    tile = rule_of(f).tile
    return dataclasses.replace(tile, cluster_size=2) if _in_pairs(f) else tile


def rule_of(f: CallFeatures) -> TileRule:
    """Return the rule that decides; batch-invariant calls have only rules of one `block_kv`."""
    keys = invariance.block_kv(f.width)
    rules = [x for x in TILE_RULES if not f.batch_invariant or x.tile.block_kv == keys]
    return next(rule for rule in rules if f.width <= rule.width and rule.fits(f))


def _products_alone(f: CallFeatures) -> bool:
    """Return whether products and a softmax are all that is computed for each pair."""
    return not (f.scores or f.options & {Option.DROPOUT, Option.SCALE})


def _takes_registers(f: CallFeatures) -> bool:
    """Return whether a mask or scores take registers, of which wide tiles leave few."""
    if f.options & (SCORES - {Option.SOFT_CAP, Option.SLOPES}):
        return True
    # Slopes beside a mask spill in tiles of 128 keys.
    return f.mask not in QUICK or (f.masked and Option.SLOPES in f.options)


# Masks that take few instructions a tile.
QUICK = MaskKind.FULL, MaskKind.CAUSAL, MaskKind.RANGES, MaskKind.LENGTHS, MaskKind.ARRAY


def _waits_for_scores(f: CallFeatures) -> bool:
    """Return whether soft caps or slopes are all that is done to scores."""
    changed = f.options & (SCORES | {Option.DROPOUT})
    return bool(changed) and changed <= {Option.SOFT_CAP, Option.SLOPES} and not f.by_arrays


def _is_light(f: CallFeatures) -> bool:
    return (_products_alone(f) and not f.masked) or _waits_for_scores(f)


def _is_shorter_by_two(f: CallFeatures) -> bool:
    """Return whether the longest CTA has fewer queries by two warpgroups than by three."""
    return 5 * most_rows(f, 3) > 6 * most_rows(f, 2)


def _hides_some_of_few(f: CallFeatures) -> bool:
    """Return whether keys are 512 or fewer, under a causal mask that is not folded or lengths.

    Smaller blocks of keys have fewer hidden ones.
    """
    hides = (f.causal and not folded(f, 2)) or f.mask is MaskKind.LENGTHS
    return _products_alone(f) and f.kv_len <= 512 and hides


def _is_shorter_by_four(f: CallFeatures) -> bool:
    """Return whether keys are few, and the longest CTA has fewer queries by four warpgroups.

    They have blocks of half as many keys, so with many keys they take longer for as many queries.
    Causal work tiles differ, so that the queries of a CTA with few of them tell little.
    """
    most_keys = {MaskKind.FULL: 2048, MaskKind.CAUSAL: 1024, MaskKind.LENGTHS: 1024}.get(f.mask, 0)
    three, four = (most_rows(f, n) for n in (3, 4))
    if f.kv_len > most_keys or (f.mask is MaskKind.CAUSAL and three < MANY_ROWS_OF_A_CTA):
        return False
    return _products_alone(f) and 9 * three >= 10 * four


# Queries of the longest CTA: more than five work tiles of three warpgroups.
MANY_ROWS_OF_A_CTA = 1024

# Queries of all heads and batch elements: two tiles of 128 for each of an H200's 132 SMs.
FEW_ROWS = 2**15


def _in_pairs(f: CallFeatures) -> bool:
    """Return whether two CTAs should share keys and values.

    Timed on a hot H200, up to 16384 tokens. At head dim 128 they take 3 to 6 % less time without a
    mask, and up to 5 % less under a causal one, but 2048 tokens take as long. At head dim 64 they
    take 2 % less without a mask, and 10 to 16 % more under a causal one. Clusters save power, which
    does not limit few rows: these take 7 to 12 % longer at head dim 128.
    """
    if f.width <= 64 or not _products_alone(f) or min(f.q_len, f.kv_len) < 4096:
        return False
    return not f.masked or (f.causal and f.rows > FEW_ROWS)
