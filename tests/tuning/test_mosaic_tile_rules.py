"""The rules by which the forward for Hopper has its tile."""

import dataclasses
import itertools

from support import mosaic_cases  # noqa: F401  Skips where JAX is too old.

from pallas_flash._backends.mosaic.forward_tiles import TILE_RULES, default_tile, rule_of
from pallas_flash._problem.features import CallFeatures, MaskKind, Option
from pallas_flash.tuning import ForwardTile

SIZES = (64, 64), (80, 80), (128, 128), (192, 128), (128, 256)


def calls():
    """Calls of all kinds of masks, with one option or none."""
    asked = [frozenset(), *(frozenset({option}) for option in Option)]
    for (head_dim, value_dim), length, heads, mask, options in itertools.product(
        SIZES, (512, 1024, 4096), (16, 32, 64, 224), MaskKind, asked
    ):
        sizes = dict(head_dim=head_dim, value_dim=value_dim, q_len=length, kv_len=length)
        heads_of = dict(batch=1, num_heads=heads, num_kv_heads=heads)
        call = CallFeatures("bfloat16", **sizes, **heads_of, mask=mask, options=options)
        yield from (dataclasses.replace(call, batch_invariant=x) for x in (False, True))


def test_every_rule_decides_for_some_call():
    assert {rule_of(f) for f in calls()} == set(TILE_RULES)


def test_batch_invariant_calls_have_one_size_of_blocks():
    sizes = {(f.width > 128, default_tile(f).block_kv) for f in calls() if f.batch_invariant}
    assert sizes == {(False, 128), (True, 64)}


def test_clusters_share_keys_only_where_tiles_are_known():
    """Two CTAs need the same keys, in the same order."""
    sharing = {(f.mask, f.by_arrays) for f in calls() if default_tile(f).cluster_size > 1}
    assert sharing == {(MaskKind.FULL, False), (MaskKind.CAUSAL, False)}


def test_block_mask_among_others_has_its_tile():
    """As with positions, by which the mask as a whole has no kind of its own."""
    sizes = dict(head_dim=64, value_dim=64, q_len=4096, kv_len=4096)
    heads = dict(batch=1, num_heads=16, num_kv_heads=16)
    features = CallFeatures("bfloat16", **sizes, **heads, mask=MaskKind.OTHER, has_block_mask=True)
    assert default_tile(features) == ForwardTile(2, 128, 1)
