"""Masks with a name: who sees whom under offsets and positions, and which blocks are visited."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracle
from support.block_classes import assert_classes, of_pairs

import pallas_flash
from pallas_flash._arguments.attention import mask_of
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.named_masks import _visits
from pallas_flash.masks import (
    BlockCausal,
    BlockMask,
    Chunked,
    Dilated,
    Neighborhood,
    Segments,
    SharedPrefix,
    Tree,
)


def int32(x):
    return jnp.asarray(x, jnp.int32)


def parents(rng, n, near=9):
    return int32([[rng.integers(max(-1, i - near), i) for i in range(n)]])


def depth_first(rng, n):
    """Parents of a random tree whose tokens are in depth-first order."""
    path, found = [], []
    for i in range(n):
        del path[rng.integers(max(0, len(path) - 3), len(path) + 1) :]
        found.append(path[-1] if path else -1)
        path.append(i)
    return int32([found])


def allowed(mask, shape):
    indices = (int32(x) for x in np.ogrid[tuple(map(slice, shape))])
    return np.broadcast_to(mask.allowed(*indices), shape)


def random(seed=0):
    return np.random.default_rng(seed)


NAMED = {
    "chunked": lambda: Chunked(7),
    "block-causal": lambda: BlockCausal(7),
    "dilated": lambda: Dilated(3),
    "shared prefix": lambda: SharedPrefix(
        int32(np.sort(random().integers(0, 4, (1, 20)))),
        int32(np.sort(random(1).integers(0, 4, (1, 30)))),
    ),
    "tree": lambda: Tree(parents(random(), 20)),
    "neighborhood": lambda: Neighborhood((5, 6), (3, 4)),
    "neighborhood in 3D": lambda: Neighborhood((2, 3, 5), (1, 2, 5)),
}
PLACES = {
    "in place": {},
    "offset": dict(query_offset=10),
    "traced offset": dict(query_offset=int32([4])),
    "positions": dict(
        query_positions=int32(random(2).permutation(30)[None, :20]),
        key_value_positions=int32(random(3).permutation(30)[None]),
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMED)
def test_allowed_equals_definition(name, place):
    if name == "tree" and place == "positions":
        pytest.xfail("A tree is told by places in the array.")
    shape, options = (1, 1, 20, 30), dict(mask=NAMED[name](), **PLACES[place])
    mask, seen = mask_of(shape, **options), oracle.visible(shape, **options)
    np.testing.assert_array_equal(allowed(mask, shape), seen)
    assert 0 < seen.sum() < seen.size
    for blocks in ((4, 5), (7, 11)):
        q, kv = Tiling(20, blocks[0]), Tiling(30, blocks[1])
        assert_classes(mask.block_classes(q, kv), of_pairs(seen, q, kv))


# ------------------------------------------------------------------------------------------------
# Blocks.

# Whole tiles of tokens in order: blocks without a visible pair are skipped, full ones are known.
LENGTH, BLOCK = 64, 8
EXACT = {
    "chunked": dict(mask=Chunked(24)),
    "chunked, causal": dict(mask=Chunked(16), is_causal=True),
    "block-causal": dict(mask=BlockCausal(12)),
    "dilated": dict(mask=Dilated(2), is_causal=True, local_window_size=(20, None)),
    "dilated, by remainder": dict(
        mask=Dilated(4), query_positions=int32(np.arange(64).reshape(16, 4).T.reshape(1, 64))
    ),
    "shared prefix": dict(
        mask=SharedPrefix(int32([[0] * 20 + [1] * 20 + [2] * 24])), is_causal=True
    ),
    "tree in depth-first order": dict(mask=Tree(depth_first(random(), 64))),
    "tree and cache": dict(mask=Tree(depth_first(random(1), 64)), query_offset=0),
    "neighborhood": dict(mask=Neighborhood((8, 8), (3, 3))),
    "neighborhood in a long row": dict(mask=Neighborhood((4, 16), (1, 5))),
    "or": dict(mask=Chunked(16) | Segments(int32([[0] * 24 + [1] * 40]))),
    "not": dict(mask=~Chunked(16)),
}


def same_positions(options):
    """The options, with the positions of queries for the keys."""
    positions = options.get("query_positions")
    return options if positions is None else options | dict(key_value_positions=positions)


@pytest.mark.parametrize("name", EXACT)
def test_kernels_skip_every_empty_block(name):
    shape, options = (1, 1, LENGTH, LENGTH), same_positions(EXACT[name])
    mask, seen = mask_of(shape, **options), oracle.visible(shape, **options)
    q = kv = Tiling(LENGTH, BLOCK)
    some, every = of_pairs(seen, q, kv)
    got = mask.block_classes(q, kv)
    np.testing.assert_array_equal(np.broadcast_to(got.some, some.shape), some)
    assert_classes(got, (some, every))
    assert some.sum() < some.size
    counts = np.asarray(mask.kv_lists(q, kv))[..., 1] if mask.scattered else None
    if counts is None:
        ranges = np.asarray(mask.kv_ranges(q, kv))
        counts = ranges[..., 3] - ranges[..., 0]
    assert counts.sum() == some.sum()


def test_skipped_blocks_of_long_sequences():
    """The numbers of visited blocks of 128 tokens, of 16,384 in all."""
    n, q = 16384, Tiling(16384, 128)
    causal = n // 128 * (n // 128 + 1) // 2
    for visited, options in (
        (causal, dict(is_causal=True)),
        (8 * 16 * 17 // 2, dict(mask=Chunked(2048), is_causal=True)),
        (causal, dict(mask=BlockCausal(128))),
        (8 * 9 // 2 * 16 * 16, dict(mask=BlockCausal(2048))),
        # Rows of 128 points, each of which sees 7.
        (7 * 128, dict(mask=Neighborhood((128, 128), (7, 7)))),
    ):
        mask = mask_of((1, 1, n, n), **options)
        assert int(np.asarray(mask.block_classes(q, q).some).sum()) == visited


def test_points_in_patches():
    """Positions tell where the points of a grid lie in the arrays, here 4 x 4 points in a tile."""
    shape, q = (1, 1, 256, 256), Tiling(256, 16)
    patches = int32(np.arange(256).reshape(4, 4, 4, 4).swapaxes(1, 2).reshape(1, 256))
    where = dict(query_positions=patches, key_value_positions=patches)
    options = dict(mask=Neighborhood((16, 16), (3, 3)), **where)
    mask, seen = mask_of(shape, **options), oracle.visible(shape, **options)
    some, every = of_pairs(seen, q, q)
    got = mask.block_classes(q, q)
    np.testing.assert_array_equal(got.some, some)
    np.testing.assert_array_equal(got.every, every)
    assert some.sum() == 10 * 10


@pytest.mark.parametrize("name", EXACT)
def test_diagonal_is_known(name):
    """So that no pass looks for keys that no query sees."""
    options = same_positions(EXACT[name])
    mask = mask_of((1, 1, LENGTH, LENGTH), **options)
    assert mask.sees_diagonal == (name != "not")


# ------------------------------------------------------------------------------------------------
# Trees.


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_visits_enclose_those_of_descendants(n):
    for near in (1, 3, n):
        [tree] = parents(random(n), n, near)
        enter, leave = map(np.asarray, jax.jit(_visits)(tree))
        assert len({*enter, *leave}) == 2 * n
        seen = (enter[None] <= enter[:, None]) & (enter[:, None] <= leave[None])
        want = oracle.visible((1, 1, n, n), mask=Tree(tree[None]))
        np.testing.assert_array_equal(seen, want[0, 0])


def test_chain_is_causal():
    mask = mask_of((1, 1, 9, 9), mask=Tree(int32([range(-1, 8)])))
    np.testing.assert_array_equal(allowed(mask, (1, 1, 9, 9))[0, 0], np.tri(9, dtype=bool))


@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 2**80])
def test_sizes_above_all_distances(n):
    def seen(mask):
        return allowed(mask_of((1, 1, 9, 9), mask=mask), (1, 1, 9, 9))[0, 0]

    assert seen(Chunked(n) & BlockCausal(n)).all()
    np.testing.assert_array_equal(seen(Dilated(n)), np.eye(9, dtype=bool))


def test_drafts_after_a_cache():
    """Logits of each draft are those of its path alone; the buffer behind the drafts is NaN."""
    rng, length, tree = random(), 11, [-1, 0, 0, 1, 1, 2]
    q = jnp.asarray(rng.standard_normal((1, 6, 4, 8)), jnp.float32)
    cache = jnp.asarray(rng.standard_normal((2, 1, 24, 2, 8)), jnp.float32)
    k, v = cache.at[:, :, length + 6 :].set(jnp.nan)

    @jax.jit
    def step(tree, length):
        lengths = length[None] + 6
        options = dict(query_offset=length, key_value_seq_lengths=lengths)
        return pallas_flash.attention(q, k, v, mask=Tree(tree), implementation="xla", **options)

    o = step(int32([tree]), int32(length))
    for i in range(6):
        path, at = [], i
        while at >= 0:
            path, at = [length + at, *path], tree[at]
        keys = int32([*range(length), *path])
        alone = pallas_flash.attention(q[:, i : i + 1], k[:, keys], v[:, keys])
        np.testing.assert_allclose(o[:, i : i + 1], alone, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------
# Calls.


def test_continuations_equal_calls_of_their_own():
    """And so do the gradients of all tokens."""
    rng, ends = random(), [0, 6, 11, 16]
    q, k, v, do = jnp.asarray(rng.standard_normal((4, 1, 16, 2, 8)), jnp.float32)
    ids = pallas_flash.masks.segment_ids_from_cu_seqlens(int32(ends), 16)[None]

    def packed(q, k, v):
        options = dict(is_causal=True, mask=SharedPrefix(ids), implementation="xla")
        return pallas_flash.attention(q, k, v, **options)

    def apart(q, k, v):
        found = [pallas_flash.attention(*(x[:, :6] for x in (q, k, v)), is_causal=True)]
        for start, stop in ((6, 11), (11, 16)):
            at = int32([*range(6), *range(start, stop)])
            o = pallas_flash.attention(*(x[:, at] for x in (q, k, v)), is_causal=True)
            found.append(o[:, 6:])
        return jnp.concatenate(found, 1)

    for x, y in zip(*((o, *pull(do)) for o, pull in (jax.vjp(f, q, k, v) for f in (packed, apart))),
                    strict=True):  # fmt: skip
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def masks_by_arrays(rng):
    return {
        "tree": (Tree, jnp.concatenate([parents(rng, 16) for _ in range(3)])[:, None]),
        "shared prefix": (
            SharedPrefix, int32(np.sort(rng.integers(0, 3, (3, 1, 16)))),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("name", ["tree", "shared prefix"])
def test_vmap_of_traced_arrays(name, implementation):
    make, arrays = masks_by_arrays(random())[name]
    q, k, v = jnp.asarray(random(1).standard_normal((3, 1, 16, 2, 16)), jnp.float32)

    def call(x):
        return pallas_flash.attention(q, k, v, mask=make(x), implementation=implementation)

    mapped = jax.jit(jax.vmap(call))(arrays)
    np.testing.assert_allclose(mapped, jnp.stack([call(x) for x in arrays]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["chunked", "tree", "neighborhood", "shared prefix"])
def test_from_mask_of_one_element_serves_a_batch(name):
    """Its tables have no axis of the batch where the mask has none."""
    n = 30
    mask = {
        "tree": lambda: Tree(parents(random(), n)),
        "shared prefix": lambda: SharedPrefix(int32(np.arange(n)[None] // 9)),
    }.get(name, NAMED[name])()
    made = BlockMask.from_mask(mask, n, n, block_q=8, block_kv=8)
    batch = 1 if name == "shared prefix" else 2
    x = jnp.asarray(random(1).standard_normal((batch, n, 2, 16)), jnp.float32)
    call = functools.partial(pallas_flash.attention, x, x, x)
    seen = jnp.asarray(oracle.visible((1, 1, n, n), mask=mask))
    for implementation in ("xla", "interpret"):
        got = call(mask=made, implementation=implementation)
        np.testing.assert_allclose(got, call(mask=seen), rtol=1e-5, atol=1e-6)


def test_residues_become_neighbours_by_positions():
    """Tokens with the same remainder side by side: a dilated window is a window in each."""
    n, stride = 32, 4
    order = int32(np.arange(n).reshape(-1, stride).T.ravel())
    q, k, v = jnp.asarray(random().standard_normal((3, 1, n, 2, 8)), jnp.float32)
    options = dict(mask=Dilated(stride), is_causal=True, local_window_size=(8, None))
    want = pallas_flash.attention(q, k, v, **options)
    where = dict.fromkeys(("query_positions", "key_value_positions"), order[None])
    moved = pallas_flash.attention(*(x[:, order] for x in (q, k, v)), **options, **where)
    np.testing.assert_allclose(moved, want[:, order], rtol=1e-5, atol=1e-6)
