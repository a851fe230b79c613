"""Masks against brute force: what each (query, key) pair and each pair of tiles may be."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle
from support.block_classes import assert_classes, of_pairs, of_ranges

from pallas_flash._problem import visibility
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.mask_leaves import BlockLeaf, MaskArray, PredicateLeaf
from pallas_flash._problem.masks import ArrayLengths, Band, Lengths, Mask, PositionBand, SegmentLeaf
from pallas_flash._problem.operands import Pairs, Positions
from pallas_flash._problem.traversal import Sparsity, in_tile, visit

BATCH = 3

# ------------------------------------------------------------------------------------------------
# The definition: who sees whom.


def seen_by(leaf, shape):
    """bool [B, queries, keys]; positions may lie beyond those that exist."""
    batch, queries, keys = shape

    def window(low, high):
        return None if low is None else -low, high

    match leaf:
        case Band(low, high, offset):
            moved = 0 if offset is None else offset
            conditions = dict(local_window_size=window(low, high), query_offset=moved)
        case Lengths():
            lengths = dict(query_seq_lengths=leaf.query, key_value_seq_lengths=leaf.key_value)
            conditions = {
                name: np.broadcast_to(x, batch) for name, x in lengths.items() if x is not None
            }
        case SegmentLeaf(query, key_value):
            conditions = dict(segment_ids=(query, key_value))
        case PositionBand(positions, low, high):
            conditions = dict(
                query_positions=positions.query,
                key_value_positions=positions.keys,
                local_window_size=window(low, high),
            )
    return oracle.visible((batch, 1, queries, keys), **conditions)[:, 0]


def seen_by_all(leaves, shape):
    return np.logical_and.reduce([np.ones(shape, bool), *(seen_by(x, shape) for x in leaves)])


def whole_tiles(q, kv):
    """The shape of `seen_by` when the last tiles are full of positions."""
    return BATCH, q.count * q.block, kv.count * kv.block


def pairs(batch, queries, keys):
    """The indices b, h, q and k of all pairs; these leaves do not look at the head."""
    b, q, k = np.ogrid[:batch, :queries, :keys]
    return b, 0, q, k


def both_sides(mask, seen, q, kv):
    """Yield the classes of blocks by ranges and by brute force, of query tiles and of key tiles."""
    yield of_ranges(mask.kv_ranges(q, kv), kv.count), of_pairs(seen, q, kv)
    yield of_ranges(mask.q_ranges(q, kv), q.count), of_pairs(seen.swapaxes(1, 2), kv, q)


def check_ranges(mask, seen, q, kv, exact=False):
    for got, want in both_sides(mask, seen, q, kv):
        assert_classes(got, want, exact)


# ------------------------------------------------------------------------------------------------
# Random masks. Arrays are NumPy's, so that everything is, and thousands of tiles take no time.


def tiling(rng):
    return Tiling(int(rng.integers(1, 41)), int(rng.choice([1, 2, 3, 4, 8, 16, 64])))


def band(rng, q, kv):
    low, high = sorted(int(x) for x in rng.integers(-45, 46, 2))
    return Band(*[(low, high), (None, high), (low, None)][rng.integers(3)])


def empty_band(rng, q, kv):
    high, low = sorted(int(x) for x in rng.integers(-45, 46, 2))
    return Band(low + 1, high)


def band_with_offsets(rng, q, kv):
    return dataclasses.replace(band(rng, q, kv), offset=int32(rng, -45, 46))


def query_lengths(rng, q, kv):
    return Lengths(length(rng, q), None)


def key_lengths(rng, q, kv):
    return Lengths(None, length(rng, kv))


def both_lengths(rng, q, kv):
    return Lengths(length(rng, q), length(rng, kv))


def length(rng, of):
    lengths = int32(rng, -2, of.length + 5)
    return int(max(0, lengths[0])) if rng.random() < 0.3 else lengths


def int32(rng, low, high):
    return rng.integers(low, high, BATCH).astype(np.int32)


LEAVES = [band, band_with_offsets, query_lengths, key_lengths, both_lengths]


def problems(make, count=300):
    rng = np.random.default_rng(0)
    for _ in range(count):
        q, kv = tiling(rng), tiling(rng)
        yield make(rng, q, kv), q, kv


@pytest.mark.parametrize("make", LEAVES)
def test_ranges_of_leaf_are_exact(make):
    tiles = np.zeros(3, int)
    for leaf, q, kv in problems(make):
        seen = seen_by(leaf, whole_tiles(q, kv))
        for got, want in both_sides(Mask((leaf,)), seen, q, kv):
            assert_classes(got, want, exact=True)
            some, every = want
            tiles += [every.sum(), (some & ~every).sum(), (~some).sum()]
    # Full, partial and empty blocks were all there.
    assert (tiles > 4_000).all(), tiles


def test_ranges_of_empty_band():
    for leaf, q, kv in problems(empty_band):
        seen = seen_by(leaf, whole_tiles(q, kv))
        assert not seen.any()
        check_ranges(Mask((leaf,)), seen, q, kv)


def test_ranges_of_conjunction_intersect():
    rng = np.random.default_rng(1)
    for _ in range(300):
        q, kv = tiling(rng), tiling(rng)
        chosen = rng.permutation(len(LEAVES))[: rng.integers(2, 4)]
        leaves = tuple(LEAVES[i](rng, q, kv) for i in chosen)
        seen = seen_by_all(leaves, whole_tiles(q, kv))
        alone = [list(both_sides(Mask((leaf,)), seen, q, kv)) for leaf in leaves]
        for i, (got, want) in enumerate(both_sides(Mask(leaves), seen, q, kv)):
            assert_classes(got, want)
            for class_, x in enumerate(got):
                both = functools.reduce(np.logical_and, (sides[i][0][class_] for sides in alone))
                np.testing.assert_array_equal(x, np.broadcast_to(both, x.shape))


@pytest.mark.parametrize("make", LEAVES)
def test_allowed_equals_definition(make):
    for leaf, q, kv in problems(make, 50):
        seen = seen_by(leaf, (BATCH, q.length, kv.length))
        b, i, j = np.ogrid[:BATCH, : q.length, : kv.length]
        np.testing.assert_array_equal(np.broadcast_to(leaf.allowed(b, 0, i, j), seen.shape), seen)
        # The kernel for dk and dv evaluates one batch element, with keys along the rows.
        b, i, j = 1, i[0].T, j[0].T
        transposed = np.broadcast_to(leaf.allowed(b, 0, i, j), seen[1].T.shape)
        np.testing.assert_array_equal(transposed, seen[1].T)


def test_mask_allows_what_all_leaves_allow():
    rng = np.random.default_rng(2)
    q, kv = Tiling(23, 8), Tiling(31, 8)
    leaves = [leaf(rng, q, kv) for leaf in LEAVES]
    indices = pairs(BATCH, 23, 31)
    for chosen in itertools.combinations(leaves, 2):
        seen = seen_by_all(chosen, (BATCH, 23, 31))
        mask = Mask() & chosen[0] & chosen[1]
        np.testing.assert_array_equal(np.broadcast_to(mask.allowed(*indices), seen.shape), seen)


def test_empty_mask_allows_all():
    q, kv = Tiling(10, 4), Tiling(17, 8)
    assert not Mask()
    assert Mask((Band(0),))
    check_ranges(Mask(), np.ones(whole_tiles(q, kv), bool), q, kv, exact=True)


# ------------------------------------------------------------------------------------------------
# Segments and positions, whose ranges are computed by JAX: a few shapes, each compiled once.

SEGMENT_TILINGS = [
    (Tiling(40, 8), Tiling(40, 8)),
    (Tiling(37, 4), Tiling(23, 16)),
    (Tiling(5, 1), Tiling(39, 3)),
    (Tiling(16, 64), Tiling(33, 8)),
    (Tiling(1, 2), Tiling(7, 4)),
]
over_segment_tilings = pytest.mark.parametrize(
    ("q", "kv"), cases.default(SEGMENT_TILINGS[1:4], SEGMENT_TILINGS)
)


def seen_in_whole_tiles(leaf, q, kv):
    """Return the visible pairs of whole tiles, their missing numbers filled with existing ones."""

    def fill(numbers, tiling):
        missing = tiling.count * tiling.block - tiling.length
        return np.pad(numbers, ((0, 0), (0, missing)), mode="edge")

    query, key_value = leaf.numbers
    whole = fill(query, q), fill(key_value, kv)
    if isinstance(leaf, PositionBand):
        return seen_by(dataclasses.replace(leaf, positions=Positions(*whole)), whole_tiles(q, kv))
    return seen_by(SegmentLeaf(*whole), whole_tiles(q, kv))


def any_segments(rng, q, kv):
    ends = np.iinfo(np.int32)
    values = np.array([ends.min, -1, 0, 1, ends.max], np.int32)[: rng.integers(1, 6)]
    return SegmentLeaf(*(rng.choice(values, (BATCH, t.length)) for t in (q, kv)))


def packed_segments(rng, q, kv):
    """Sorted ids, each of which both sides have."""
    count = int(rng.integers(1, 1 + min(q.length, kv.length)))
    every = np.tile(np.arange(count), (BATCH, 1))
    more = (rng.integers(0, count, (BATCH, t.length - count)) for t in (q, kv))
    return SegmentLeaf(*(np.sort(np.hstack([every, x])).astype(np.int32) for x in more))


def any_positions(rng, q, kv):
    """Return positions up to the clipping limits; one side is sometimes the same for the batch."""
    far = int(rng.choice([40, 2**30]))
    query, key_value = (
        rng.integers(-far, far, (int(rng.choice([1, BATCH])), t.length)).astype(np.int32)
        for t in (q, kv)
    )
    sides = band(rng, q, kv)
    return PositionBand(Positions(query, key_value), sides.low, sides.high)


def sorted_positions(rng, q, kv):
    """A causal mask of positions with gaps, or a window of those without."""
    query, key_value = (
        np.sort(rng.integers(-40, 60, (BATCH, t.length)), axis=1).astype(np.int32) for t in (q, kv)
    )
    if rng.random() < 0.5:
        return PositionBand(Positions(query, key_value), None, int(rng.integers(-9, 9)))
    query, key_value = (
        x[:, :1] + np.arange(x.shape[1], dtype=np.int32) for x in (query, key_value)
    )
    sides = band(rng, q, kv)
    return PositionBand(Positions(query, key_value), sides.low, sides.high)


def shards_in_balanced_order(rng, q, kv):
    """Chunks of two devices, the queries of one and the keys of the other, when causal."""
    devices = 4

    def shard(length):
        first, last = length // 2, length - length // 2
        i = int(rng.integers(devices))
        late = (2 * devices - 1 - i) * last
        return np.concatenate([i * last + np.arange(first), late + np.arange(last)])

    numbers = (shard(t.length)[None].astype(np.int32) for t in (q, kv))
    return PositionBand(Positions(*numbers), None, 0)


@over_segment_tilings
@pytest.mark.parametrize(
    "make",
    [any_segments, any_positions, packed_segments, sorted_positions, shards_in_balanced_order],
)
def test_ranges_of_numbers(make, q, kv):
    """Safe, and exact where numbers are sorted."""
    rng, exact = np.random.default_rng(3), make not in (any_segments, any_positions)
    for leaf in [make(rng, q, kv) for _ in range(20)]:
        check_ranges(Mask((leaf,)), seen_in_whole_tiles(leaf, q, kv), q, kv, exact)


@over_segment_tilings
@pytest.mark.parametrize("make", [any_segments, any_positions])
def test_allowed_of_numbers_equals_definition(make, q, kv):
    rng, shape = np.random.default_rng(5), (BATCH, q.length, kv.length)
    for leaf in [make(rng, q, kv) for _ in range(20)]:
        allowed = np.broadcast_to(leaf.allowed(*pairs(*shape)), shape)
        np.testing.assert_array_equal(allowed, seen_by(leaf, shape))


# ------------------------------------------------------------------------------------------------
# Ragged tiles.


@pytest.mark.parametrize("sides", ["q", "kv", "q kv"])
def test_within_masks_padding(sides):
    for leaf, q, kv in problems(band_with_offsets, 100):
        cut = {name: t for name, t in {"q": q, "kv": kv}.items() if name in sides.split()}
        mask = Mask((leaf,)).within(**cut)
        shape = whole_tiles(q, kv)
        _, i, j = np.ogrid[: shape[0], : shape[1], : shape[2]]
        exist = (i < (q.length if "q" in cut else shape[1])) & (
            j < (kv.length if "kv" in cut else shape[2])
        )
        seen = seen_by(leaf, shape) & exist
        allowed = mask.allowed(*pairs(*shape))
        np.testing.assert_array_equal(np.broadcast_to(allowed, shape), seen)
        check_ranges(mask, seen, q, kv)


def test_within_keeps_whole_tiles():
    mask = Mask((Band(None, 0),))
    assert mask.within(q=Tiling(32, 8), kv=Tiling(48, 16)) is mask
    assert mask.within() is mask
    assert mask.within(kv=Tiling(33, 8)) == mask & ArrayLengths(None, 33)


# ------------------------------------------------------------------------------------------------
# Masks as JAX sees them.


def a_mask(array):
    """Return every kind of leaf, for a batch of 3 with 20 queries and 30 keys, made of `array`s."""
    ids = np.sort(np.random.default_rng(6).integers(0, 4, (BATCH, 30)).astype(np.int32))
    return Mask(
        (
            Band(-9, 4, array(np.array([-3, 0, 20], np.int32))),
            Band(-12, None),
            Lengths(array(np.array([20, 0, 7], np.int32))),
            ArrayLengths(None, 27),
            SegmentLeaf(array(ids[:, :20]), array(ids)),
            PositionBand(Positions(array(ids[:1, :20]), array(3 * ids)), -5, 6),
        )
    )


def test_mask_is_a_pytree_of_its_arrays():
    mask = a_mask(jnp.asarray)
    leaves, structure = jax.tree.flatten(mask)
    assert [x.shape for x in leaves] == [(3,), (3,), *[(3, 20), (3, 30)], *[(1, 20), (3, 30)]]
    assert jax.tree.structure(jax.tree.unflatten(structure, leaves)) == structure
    assert hash(structure) == hash(jax.tree.structure(a_mask(jnp.asarray)))
    assert jax.tree.leaves(Mask((Band(-1, 2), ArrayLengths(5, None)))) == []

    def differ(a, b):
        return jax.tree.structure(a) != jax.tree.structure(b)

    assert differ(Band(None, 0), Band(None, 1))
    assert differ(Band(None, 0), Band(0, None))
    assert differ(ArrayLengths(5, None), ArrayLengths(None, 5))
    assert differ(ArrayLengths(5, None), Lengths(jnp.zeros(3, jnp.int32), None))


@pytest.mark.parametrize("x64", [False, True])
def test_jit_of_mask_equals_numpy(x64):
    q, kv = Tiling(20, 4), Tiling(30, 8)

    def everything(mask):
        indices = (np.asarray(x, np.int32) for x in pairs(BATCH, 20, 30))
        return mask.kv_ranges(q, kv), mask.q_ranges(q, kv), mask.allowed(*indices)

    with jax.enable_x64(x64):
        traced = jax.jit(everything)(a_mask(jnp.asarray))
        for got, wanted in zip(traced, everything(a_mask(np.asarray)), strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)


def test_static_ranges_are_constants():
    q, kv = Tiling(20, 4), Tiling(30, 8)
    mask = Mask((Band(-9, 4), ArrayLengths(17, 27)))
    assert isinstance(mask.kv_ranges(q, kv), np.ndarray)
    assert isinstance(mask.q_ranges(q, kv), np.ndarray)


def test_later_rows_see_more():
    assert Mask((Lengths(3), Band(None, 0))).later_rows_see_more
    assert not Mask((Band(-3, None), Lengths(3, 4))).later_rows_see_more
    tokens = Positions(np.zeros((1, 20), np.int32))
    assert Mask((PositionBand(tokens, None, 0),)).later_rows_see_more
    assert not Mask((PositionBand(tokens, -3, None),)).later_rows_see_more


# ------------------------------------------------------------------------------------------------
# Tiles, and the loop over them.


@pytest.mark.parametrize(
    ("length", "block", "first", "last"),
    [
        (12, 4, [0, 4, 8], [3, 7, 11]),
        (13, 4, [0, 4, 8, 12], [3, 7, 11, 12]),
        (3, 16, [0], [2]),
        (1, 1, [0], [0]),
    ],
)
def test_tiling_first_and_last_positions(length, block, first, last):
    tiling = Tiling(length, block)
    assert tiling.count == len(first)
    assert tiling.first.tolist() == [first]
    assert tiling.last.tolist() == [last]


def test_in_tile_gives_all_positions():
    assert in_tile(3, 4).tolist() == [12, 13, 14, 15]
    assert in_tile(3, 4).dtype == jnp.int32


N_TILES, MARGIN = 6, 3


def visits(ranges, edges):
    """How often each tile is visited, [without, with] the mask; a margin shows visits outside."""

    def step(tile, masked, counts):
        return counts.at[jnp.int32(masked), tile + MARGIN].add(1)

    return visit(ranges, step, jnp.zeros((2, N_TILES + 2 * MARGIN), jnp.int32), edges)


def test_visit_masks_partial_blocks_alone():
    every = itertools.combinations_with_replacement(range(N_TILES + 1), 4)
    ranges = np.array([r for r in every if r[1] < r[2] or r[1] == r[0]], np.int32)
    t = np.arange(-MARGIN, N_TILES + MARGIN)
    start, full_start, full_stop, stop = ranges.T[:, :, None]
    full = (full_start <= t) & (t < full_stop)
    edge = (start <= t) & (t < stop) & ~full
    counts = jax.jit(jax.vmap(functools.partial(visits, edges=Sparsity.RANGES)))(tuple(ranges.T))
    np.testing.assert_array_equal(counts, np.stack([full, edge], axis=1))


def test_visit_without_partial_blocks():
    counts = np.asarray(visits((0, 0, N_TILES, N_TILES), Sparsity.DENSE))
    assert counts[0, MARGIN:-MARGIN].tolist() == [1] * N_TILES
    assert counts.sum() == N_TILES

    def step(tile, masked, carry):
        assert not masked
        return carry

    visit((0, 0, N_TILES, N_TILES), step, 0, Sparsity.DENSE)


TOKENS = np.random.default_rng(7).integers(0, 99, (1, 20)).astype(np.int32)

DIAGONALS = [
    (Band(high=0), True),
    (Band(low=0, high=0), True),
    (Band(low=-3), True),
    (Band(low=-3, high=2), True),
    (Band(low=1), False),
    (Band(low=-9, high=-1), False),
    (Band(high=0, offset=np.zeros(BATCH, np.int32)), False),
    (Lengths(query=7), False),
    (Lengths(key_value=np.full(BATCH, 7, np.int32)), False),
    (SegmentLeaf(np.zeros((BATCH, 20), np.int32)), True),
    (SegmentLeaf(np.zeros((BATCH, 20), np.int32), np.zeros((BATCH, 20), np.int32)), False),
    (PositionBand(Positions(TOKENS), None, 0), True),
    (PositionBand(Positions(TOKENS), -3, -1), False),
    (PositionBand(Positions(TOKENS, TOKENS), None, 0), False),
]


@pytest.mark.parametrize("leaf, sees_diagonal", DIAGONALS)
def test_sees_diagonal(leaf, sees_diagonal):
    assert Mask((leaf,)).sees_diagonal is sees_diagonal
    if sees_diagonal:
        b, t = np.arange(BATCH)[:, None], np.arange(20)
        assert np.all(leaf.allowed(b, 0, t, t))


def test_conjunction_sees_diagonal():
    assert Mask().sees_diagonal
    assert Mask((Band(high=0), Band(low=-4))).sees_diagonal
    assert not Mask((Band(high=0), Lengths(query=7))).sees_diagonal


def test_segments_with_one_array():
    ids = np.array([[0, 0, 1, 1, 2]] * BATCH, np.int32)
    one, two = SegmentLeaf(ids), SegmentLeaf(ids, ids)
    assert len(jax.tree.leaves(one)) == 1
    tiling = Tiling(5, 2)
    for a, b in zip(one.kv_range(tiling, tiling), two.kv_range(tiling, tiling), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(one.q_range(tiling, tiling), two.q_range(tiling, tiling), strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------------
# Keys that no query sees, and queries that see no key.


SHAPE = B, N, T, S = BATCH, 2, 23, 31


def some(random, *shape):
    return jnp.asarray(random.random(shape) < 0.1)


# Masks whose visibility follows from ranges, and masks that are evaluated for all pairs; with the
# batch size and number of heads of the result.
HIDDEN = {
    "band": (lambda random: [Band(12, 14)], (1, 1)),
    "lengths": (lambda random: [Lengths(jnp.array([0, 5, 40]), jnp.array([31, 7, 2]))], (B, 1)),
    "documents": (lambda random: [segments(random), Lengths(None, jnp.array([31, 7, 0]))], (B, 1)),
    "array": (lambda random: [MaskArray(Pairs(some(random, 1, N, T, S)))], (1, N)),
    "array of keys": (lambda random: [MaskArray(Pairs(some(random, B, 1, 1, S)))], (B, 1)),
    "array of examples": (lambda random: [MaskArray(Pairs(some(random, B, 1, 1, 1)))], (B, 1)),
    "one for all": (lambda random: [MaskArray(Pairs(jnp.zeros((1, 1, 1, 1), bool)))], (1, 1)),
    "array of queries, band": (
        lambda random: [MaskArray(Pairs(some(random, 1, 1, T, 1))), Band(None, -4)],
        (1, 1),
    ),
    "blocks": (lambda random: [BlockLeaf(some(random, B, N, 8, 7), 3, 5)], (B, N)),
    "blocks, bands and lengths": (
        lambda random: [
            Band(-9, 0, jnp.array([3, 0, 7])),
            BlockLeaf(some(random, 1, N, 6, 4), 4, 9),
            Lengths(jnp.array([20, 5, 0]), None),
        ],
        (B, N),
    ),
    "blocks of a part": (
        lambda random: [
            Band(None, 4),
            BlockLeaf(some(random, 1, 1, 5, 4), 6, 12, first=jnp.array([5, 7], jnp.int32)),
        ],
        (1, 1),
    ),
    "two tables": (
        lambda random: [
            BlockLeaf(some(random, 1, 1, T, S), 1, 1),
            BlockLeaf(~some(random, 1, 1, 2, 4), 12, 8),
        ],
        (1, 1),
    ),
    "predicate": (
        lambda random: [PredicateLeaf(lambda b, h, q, k: (q * 7 + k * h) % 29 == 3)],
        (1, N),
    ),
}


def segments(random):
    query, key = (jnp.asarray(random.integers(0, 40, (B, n)), jnp.int32) for n in (T, S))
    return SegmentLeaf(query, key)


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("at_once", [1, 700, 2**25])
def test_visible_keys_and_rows_with_keys(name, at_once, monkeypatch):
    monkeypatch.setattr(visibility, "PAIRS_AT_ONCE", at_once)
    leaves, differ = HIDDEN[name]
    mask = Mask(tuple(leaves(np.random.default_rng(0))))
    ok = np.broadcast_to(mask.allowed(*np.ogrid[:B, :N, :T, :S]), SHAPE)
    assert not ok.any(2).all()
    for find, axis in ((visibility.visible_keys, 2), (visibility.rows_with_keys, 3)):
        found, want = jax.jit(functools.partial(find, mask, SHAPE))(), ok.any(axis)
        assert found.shape == (*differ, want.shape[2])
        np.testing.assert_array_equal(np.broadcast_to(found, want.shape), want)


@pytest.mark.parametrize("bands", [[], [(None, 0)], [(-3, None)], [(-9, 2), (-2, 7)], [(0, 0)]])
@pytest.mark.parametrize("of", ["query", "key_value", "both"])
def test_valid_lengths(bands, of):
    """Rows with keys and visible keys are the first ones; `valid_lengths` counts them."""
    q_len, kv_len = 9, 12
    for n, m in itertools.product(range(q_len + 2), range(kv_len + 2)):
        lengths = dict(query=jnp.array([n]), key_value=jnp.array([m]))
        lengths = {name: x for name, x in lengths.items() if of in (name, "both")}
        mask = Mask((Lengths(**lengths), *(Band(*band) for band in bands)))
        assert mask.has_valid_lengths
        ok = mask.allowed(*np.ogrid[:1, :1, :q_len, :kv_len])
        ok = np.broadcast_to(ok, (1, 1, q_len, kv_len))[0, 0]
        for end, some in zip(
            visibility.valid_lengths(mask, q_len, kv_len), (ok.any(1), ok.any(0)), strict=True
        ):
            np.testing.assert_array_equal(some, np.arange(len(some)) < np.ravel(end))


def test_visibility_needs_little_memory():
    """A program that reads arrays, and one that has no operand but the queries' length."""

    def find(query, key):
        predicate = PredicateLeaf(lambda b, h, q, k: (q * 7 + k) % 5 < 2)
        masks = Mask((SegmentLeaf(query, key),)), Mask((predicate,))
        shape = (1, 4, query.shape[1], key.shape[1])
        return [
            (visibility.visible_keys(x, shape), visibility.rows_with_keys(x, shape)) for x in masks
        ]

    query, key = (jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (2**16, 2**16 + 1))
    memory = jax.jit(find).lower(query, key).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 5 * visibility.PAIRS_AT_ONCE
