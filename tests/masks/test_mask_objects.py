"""Masks that users build: every pair of tiles against brute force, and calls with each."""

import functools
import itertools
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, jaxprs, oracle
from support.block_classes import assert_classes, of_pairs, of_ranges

import pallas_flash
from pallas_flash._arguments.attention import mask_of
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.mask_leaves import BlockLeaf, MaskArray
from pallas_flash._problem.mask_objects import Call, fitted
from pallas_flash._problem.masks import Band, Lengths, Mask
from pallas_flash._problem.operands import Pairs, Positions, TokenPositions, readable
from pallas_flash.masks import (
    BlockCausal,
    BlockMask,
    Chunked,
    Neighborhood,
    Predicate,
    PrefixLM,
    Segments,
)
from pallas_flash.tuning import Tile, TileSizes

BATCH, HEADS = 2, 3

# Queries, keys: whole tiles and ragged ones, one tile and several.
TILINGS = [
    (Tiling(12, 4), Tiling(18, 6)),
    (Tiling(15, 4), Tiling(17, 5)),
    (Tiling(5, 8), Tiling(21, 4)),
    (Tiling(21, 2), Tiling(3, 16)),
]
over_tilings = pytest.mark.parametrize(("q", "kv"), TILINGS, ids=lambda t: f"{t.length}by{t.block}")
over_two_tilings = pytest.mark.parametrize(
    ("q", "kv"), cases.default(TILINGS[1:3], TILINGS), ids=lambda t: f"{t.length}by{t.block}"
)


def random(seed=0):
    return np.random.default_rng(seed)


def int32(x):
    return jnp.asarray(x, jnp.int32)


# ------------------------------------------------------------------------------------------------
# The definition: who sees whom, [B, N, T, S].


def seen_by(mask, shape, offset=0):
    """Return the pairs that an object, an array or several of them allow."""
    return oracle.visible(shape, mask=mask, query_offset=offset)


COLOURS = random(1).integers(0, 3, 64).astype(np.int32)


def same_colour(b, h, q, k, colours):
    return ((colours[q] == colours[k]) & (q + h >= b)) | (k == 0)


# ------------------------------------------------------------------------------------------------
# Random masks.


def array(rng, q, kv):
    """Sparse and dense in patches, so that tiles are of all classes; axes may be broadcast."""
    sizes = (BATCH, HEADS, q.length, kv.length)
    shape = [n if rng.random() < 0.7 else 1 for n in sizes]
    coarse = rng.random([n if a < 2 else -(-n // 7) for a, n in enumerate(shape)])
    patches = np.where(coarse < 0.4, 0.02, np.where(coarse < 0.8, 1.0, 0.5))
    for axis in (2, 3):
        patches = np.repeat(patches, 7, axis).take(range(shape[axis]), axis)
    return jnp.asarray(rng.random(shape) < patches)


def prefix(rng, q, kv):
    return PrefixLM(int32(rng.integers(-2, kv.length + 4, BATCH)))


def segments(rng, q, kv):
    return Segments(*(int32(rng.integers(0, 3, (BATCH, t.length))) for t in (q, kv)))


def sorted_segments(rng, q, kv):
    return Segments(*(jnp.sort(x, axis=1) for x in vars(segments(rng, q, kv)).values()))


def predicate(rng, q, kv):
    return Predicate(same_colour, (int32(COLOURS),))


def blocks(rng, q, kv):
    block_q, block_kv = (int(n) for n in rng.integers(1, 9, 2))
    shape = [n if rng.random() < 0.5 else 1 for n in (BATCH, HEADS)]
    counts = Tiling(q.length, block_q).count, Tiling(kv.length, block_kv).count
    return BlockMask(jnp.asarray(rng.random((*shape, *counts)) < 0.6), block_q, block_kv)


def joined(rng, q, kv):
    return prefix(rng, q, kv) & array(rng, q, kv) & predicate(rng, q, kv)


OBJECTS = [array, prefix, segments, sorted_segments, predicate, blocks, joined]
over_objects = pytest.mark.parametrize("make", OBJECTS, ids=lambda make: make.__name__)


def fit(mask, q, kv, **at) -> Mask:
    """As `attention` sees it; `at` are fields of `TokenPositions`."""
    call = Call((BATCH, HEADS, q.length, kv.length), at=TokenPositions(**at))
    return Mask(fitted(mask, call))


@functools.partial(jax.jit, static_argnames=("method", "q", "kv"))
def in_one_program(method, mask, q, kv):
    """Return the method's result, compiled at once, which is faster than by operations."""
    return getattr(mask, method)(q, kv)


@jax.jit
def allowed_at(mask, b, h, i, j):
    return mask.allowed(b, h, i, j)


def allowed(mask, q, kv):
    shape = BATCH, HEADS, q.length, kv.length
    indices = (np.asarray(x, np.int32) for x in np.ogrid[tuple(map(slice, shape))])
    return np.broadcast_to(allowed_at(mask, *indices), shape)


@over_tilings
@over_objects
def test_allowed_equals_definition(make, q, kv):
    mask = make(random(), q, kv)
    seen = seen_by(mask, (BATCH, HEADS, q.length, kv.length))
    assert seen.any()
    np.testing.assert_array_equal(allowed(fit(mask, q, kv), q, kv), seen)


# ------------------------------------------------------------------------------------------------
# Tiles.


def check_ranges(leaf, seen, q, kv, exact, exact_of_queries):
    """The leaf has one axis for all heads."""
    of_keys = of_ranges(in_one_program("kv_ranges", leaf, q, kv), kv.count)
    assert_classes(of_keys, of_pairs(seen[:, 0], q, kv), exact)
    of_queries = of_ranges(in_one_program("q_ranges", leaf, q, kv), q.count)
    want = [x.swapaxes(1, 2) for x in of_pairs(seen[:, 0], q, kv)]
    assert_classes(of_queries, want, exact_of_queries)


@over_tilings
@pytest.mark.parametrize("offset", [0, 3, -4, "by example"])
def test_ranges_of_prefix(offset, q, kv):
    """Ranges are safe, and exact for whole tiles; ranges of keys also for ragged tiles."""
    rng = random()
    for length in (None, 0, kv.length, kv.length + 9):
        mask = prefix(rng, q, kv) if length is None else PrefixLM(int32([length, 1]))
        offsets = rng.integers(-q.length, kv.length, BATCH) if offset == "by example" else offset
        call = dict(offset=int32(offsets)) if offset == "by example" else dict(shift=offset)
        seen = seen_by(mask, (BATCH, 1, q.length, kv.length), offsets)
        check_ranges(fit(mask, q, kv, **call), seen, q, kv, True, q.length % q.block == 0)


@over_tilings
def test_ranges_of_prefix_with_positions(q, kv):
    """In any order, and exact where tokens are in order and there are no others."""
    rng = random()
    for ordered in (True, False):
        tokens = np.arange(kv.length), np.arange(q.length) + 3
        key_value, query = (int32(x if ordered else rng.permutation(x))[None] for x in tokens)
        mask = prefix(rng, q, kv)
        leaf = fit(mask, q, kv, positions=Positions(query, key_value))
        seen = oracle.visible(
            (BATCH, 1, q.length, kv.length),
            mask=mask, query_positions=query, key_value_positions=key_value,
        )  # fmt: skip
        got = allowed(leaf, q, kv)
        np.testing.assert_array_equal(got, np.broadcast_to(seen, got.shape))
        check_ranges(leaf, seen, q, kv, ordered, ordered)


def test_prefix_sees_diagonal():
    q = kv = Tiling(8, 4)
    mask = PrefixLM(int32([3, 0]))
    for shift, expected in ((-1, False), (0, True), (2, True)):
        assert fit(mask, q, kv, shift=shift).sees_diagonal is expected
    assert not fit(mask, q, kv, offset=int32([0, 1])).sees_diagonal
    tokens = int32(np.arange(8)[::-1].copy())[None]
    assert fit(mask, q, kv, positions=Positions(tokens)).sees_diagonal
    assert not fit(mask, q, kv, positions=Positions(tokens, tokens + 1)).sees_diagonal


@over_tilings
@pytest.mark.parametrize("make", [array, blocks])
def test_block_classes_are_exact(make, q, kv):
    for seed in range(3):
        mask = make(random(seed), q, kv)
        want = of_pairs(seen_by(mask, (BATCH, HEADS, q.length, kv.length)), q, kv)
        got = in_one_program("block_classes", fit(mask, q, kv).leaves[0], q, kv)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.broadcast_to(x, y.shape), y)


@over_tilings
@pytest.mark.parametrize("first", [(0, 0), (1, 0), (0, 3)])
@pytest.mark.parametrize("scale", [1, 2])
def test_block_classes_of_tiles_that_divide_blocks(scale, first, q, kv):
    """They lie in one block each, but in a part that begins inside of a block."""
    sizes = [scale * tiles.block for tiles in (q, kv)]
    ends = [-(-(x.length + n) // size) for x, n, size in zip((q, kv), first, sizes, strict=True)]
    table = random().random((1, HEADS, *ends)) < 0.6
    part = None if first == (0, 0) else int32(first)
    leaf = BlockLeaf(jnp.asarray(table), *sizes, first=part)
    pairs = table.repeat(sizes[0], 2).repeat(sizes[1], 3)[:, :, first[0] :, first[1] :]
    want = of_pairs(pairs[:, :, : q.length, : kv.length], q, kv)
    for x, y in zip(in_one_program("block_classes", leaf, q, kv), want, strict=True):
        np.testing.assert_array_equal(x, y)


def listed_as_classes(lists, count):
    """Decodes lists [.., stay, 2 + flow], each tile of which may be there once."""
    lists = np.asarray(lists)
    assert lists.dtype == np.int32
    visited, full = (np.zeros((*lists.shape[:-1], count), bool) for _ in range(2))
    for index in np.ndindex(lists.shape[:-1]):
        n_full, n, *tiles = lists[index].tolist()
        assert 0 <= n_full <= n <= count
        assert sorted(set(tiles)) == list(range(count))
        visited[index][tiles[:n]], full[index][tiles[:n_full]] = True, True
    return visited, full


@over_two_tilings
def test_lists_of_grouped_heads(q, kv):
    """A tile that any head sees is visited; one that all heads see in full needs no mask."""
    allowed = random().random((BATCH, 4, q.length, kv.length)) < 0.9
    allowed[:, 0], allowed[:, 2], allowed[0, 3] = True, False, True
    allowed[:, 1, : q.block] = True
    mask = Mask((MaskArray(Pairs(jnp.asarray(allowed))),))
    some, every = (x.reshape(BATCH, 2, 2, *x.shape[2:]) for x in of_pairs(allowed, q, kv))
    want = some.any(axis=2), every.all(axis=2)
    assert_classes(listed_as_classes(mask.kv_lists(q, kv, 2), kv.count), want, exact=True)
    want_of_queries = [x.swapaxes(2, 3) for x in want]
    assert_classes(listed_as_classes(mask.q_lists(q, kv, 2), q.count), want_of_queries, exact=True)
    assert every.any() and not every.all() and not np.array_equal(every.any(axis=2), want[1])


@over_two_tilings
@pytest.mark.parametrize("ragged", ["q", "kv"])
def test_lists_of_conjunction(ragged, q, kv):
    """Exact for exact leaves, as far as one leaf alone can tell; never wrong for all together."""
    rng, shape = random(), (BATCH, HEADS, q.length, kv.length)
    ends = int32([q.length, 3]), int32([kv.length - 1, kv.length])
    lengths = Lengths(*ends), dict(query_seq_lengths=ends[0], key_value_seq_lengths=ends[1])
    band = Band(-9, 4), dict(local_window_size=(9, 4))

    def part(make):
        """Leaves, and who sees whom by them."""
        if isinstance(make, tuple):
            leaf, conditions = make
            return (leaf,), oracle.visible(shape, **conditions)
        mask = make(rng, q, kv)
        return fit(mask, q, kv).leaves, np.broadcast_to(seen_by(mask, shape), shape)

    q_inside, kv_inside = (
        (np.arange(t.count) + 1) * t.block <= (t.length if name == ragged else 10**6)
        for name, t in (("q", q), ("kv", kv))
    )
    inside = q_inside[:, None] & kv_inside
    for first, second in itertools.chain(
        itertools.product([array], [array, blocks, lengths]),
        itertools.product([blocks], [prefix, band]),
    ):
        (leaves, seen), (more, also) = part(first), part(second)
        mask = Mask((*leaves, *more)).within(**{ragged: {"q": q, "kv": kv}[ragged]})
        assert mask.scattered
        some, every = of_pairs(seen & also, q, kv)
        by_first, by_second = of_pairs(seen, q, kv), of_pairs(also, q, kv)
        for lists, count, swap in (
            (in_one_program("kv_lists", mask, q, kv), kv.count, False),
            (in_one_program("q_lists", mask, q, kv), q.count, True),
        ):
            found = [
                np.broadcast_to(x.swapaxes(2, 3) if swap else x, some.shape)
                for x in listed_as_classes(lists, count)
            ]
            assert_classes(found, (some, every & inside))
            if second in (array, blocks):
                # A block that is full for each leaf is full.
                want = by_first[0] & by_second[0], by_first[1] & by_second[1] & inside
                assert_classes(found, want, exact=True)


# ------------------------------------------------------------------------------------------------
# Tables that are built once.


@over_tilings
@over_objects
def test_from_mask_finds_blocks(make, q, kv):
    x64 = q.length % 2 == 0
    mask = make(random(), q, kv)
    shape = BATCH, HEADS, q.length, kv.length

    def build(mask):
        sizes = dict(block_q=q.block, block_kv=kv.block)
        if make is predicate:
            sizes |= dict(batch=BATCH, num_heads=HEADS)
        if make is joined:
            sizes |= dict(num_heads=HEADS)
        return BlockMask.from_mask(mask, q.length, kv.length, **sizes)

    with jax.enable_x64(x64):
        made = jax.jit(build)(mask)
        if (q, kv) == TILINGS[0]:
            eager = build(mask)
            assert jax.tree.structure(made) == jax.tree.structure(eager)
            jax.tree.map(np.testing.assert_array_equal, made, eager)
        want = seen_by(mask, shape)
        for x, y in zip((made.some, made.every), of_pairs(want, q, kv), strict=True):
            assert x.dtype == bool
            assert {n for n, m in zip(x.shape, y.shape, strict=True) if n != m} <= {1}
            np.testing.assert_array_equal(np.broadcast_to(x, y.shape), y)
        again = fit(made, q, kv)
        np.testing.assert_array_equal(allowed(again, q, kv), want)
        # Tiles of other sizes visit every block with an allowed pair, and possibly others.
        other = Tiling(q.length, 3), Tiling(kv.length, 7)
        classes = again.block_classes(*other)
        assert_classes(
            (np.asarray(classes.some), np.asarray(classes.every)), of_pairs(want, *other)
        )


def largest(scores, k):
    """The definition of `from_topk`, row by row."""
    some = np.zeros(scores.shape, bool)
    for row in np.ndindex(scores.shape[:-1]):
        candidates = [j for j, x in enumerate(scores[row]) if x > -np.inf]
        some[row][sorted(candidates, key=lambda j: (-scores[row][j], j))[:k]] = True
    return some


@pytest.mark.parametrize("k", [1, 4, 9, 2**31])
def test_from_topk_takes_the_first_of_equal_scores(k):
    """Small integers are often equal, and bfloat16 has them."""
    rng = random(k)
    scores = rng.integers(-2, 3, (2, 3, 7, 9)).astype(np.float32)
    for number in (-0.0, -np.inf, np.inf, np.nan):
        scores[rng.random(scores.shape) < 0.12] = number
    for x in (scores, *(jnp.asarray(scores, dtype) for dtype in ("bfloat16", "float8_e5m2"))):
        np.testing.assert_array_equal(BlockMask.from_topk(x, k).some, largest(scores, k))
    # Without infinities, which are NaN there.
    finite = np.where(np.isinf(scores), np.nan, scores)
    few = BlockMask.from_topk(jnp.asarray(finite, jnp.float8_e4m3fn), k)
    np.testing.assert_array_equal(few.some, largest(finite, k))
    traced = jax.jit(lambda x: BlockMask.from_topk(x, k, kv_len=35, block_q=8, block_kv=4))(scores)
    np.testing.assert_array_equal(traced.some, largest(scores, k))
    assert (traced.block_q, traced.block_kv, traced.kv_len) == (8, 4, 35)


@pytest.mark.parametrize("dtype", ["int4", "int8", "int32", "uint32"])
def test_from_topk_takes_blocks_that_were_chosen_before(dtype):
    """In any order, some twice, some outside; a ragged last block counts."""
    numbers = random().integers(0 if dtype == "uint32" else -2, 8, (2, 3, 5, 4))
    numbers[0, 0] += 0 if dtype == "int4" else 4
    blocks = BlockMask.from_topk(jnp.asarray(numbers, dtype), kv_len=35, block_kv=4)
    some = (numbers[..., None] == np.arange(9)).any(3)
    np.testing.assert_array_equal(blocks.some, some)
    kept = jnp.where(blocks.some, jnp.arange(9), -1)
    np.testing.assert_array_equal(BlockMask.from_topk(kept, kv_len=35, block_kv=4).some, some)


def test_from_topk_has_no_gradient():
    scores = jnp.arange(8.0).reshape(1, 1, 2, 4)
    gradient = jax.grad(lambda x: (BlockMask.from_topk(x, 2).some * x).sum())(scores)
    np.testing.assert_array_equal(gradient, largest(scores, 2))


# ------------------------------------------------------------------------------------------------
# As `mask` of a call.

T, S = 45, 38
TILES = TileSizes(forward=Tile(16, 16), dkv=Tile(16, 16), dq=Tile(16, 16))


@functools.cache
def inputs(q_len=T, kv_len=S):
    rng = random(3)
    shapes = [(q_len, HEADS * 2), (kv_len, HEADS), (kv_len, HEADS), (q_len, HEADS * 2)]
    return [jnp.asarray(rng.normal(size=(BATCH, n, h, 8)), jnp.float32) for n, h in shapes]


@functools.cache
def compiled(implementation):
    tiles = {"config": TILES} if implementation == "interpret" else {}

    @oracle.compiled
    def run(mask, q, k, v, do):
        call = functools.partial(
            pallas_flash.attention, mask=mask, implementation=implementation, **tiles
        )
        o, pull = jax.vjp(call, q, k, v)
        return o, *pull(do)

    return run


def results(implementation, mask, arrays=None):
    """The output and the gradients."""
    return compiled(implementation)(mask, *(arrays or inputs()))


def close(got, want):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


class Parts(NamedTuple):
    """For calls with six heads of queries."""

    prefix: PrefixLM
    documents: Segments
    predicate: Predicate
    blocks: BlockMask
    by_head: jax.Array
    by_example: jax.Array


@functools.cache
def parts() -> Parts:
    q, kv, rng = Tiling(T, 8), Tiling(S, 8), random(4)
    return Parts(
        prefix(rng, q, kv),
        sorted_segments(rng, q, kv),
        predicate(rng, q, kv),
        BlockMask(jnp.asarray(rng.random((1, 6, 6, 5)) < 0.5), 8, 8),
        *(jnp.asarray(rng.random(shape) < 0.3) for shape in ((1, 6, T, S), (2, 1, T, S))),
    )


build = functools.partial(BlockMask.from_mask, q_len=T, kv_len=S, block_q=8, block_kv=16)

CALLS = {
    "object and array": lambda p: p.prefix & p.by_head,
    "array and object": lambda p: p.by_head & p.prefix,
    "NumPy array and object": lambda p: np.asarray(p.by_head) & p.prefix,
    "NumPy array and two": lambda p: np.asarray(p.by_example) & (p.documents & p.prefix),
    "two objects and an array": lambda p: p.documents & p.predicate & p.by_example,
    "blocks": lambda p: p.blocks,
    "blocks of an array": lambda p: build(p.by_head),
    "blocks of documents": lambda p: build(p.documents),
    "blocks of a predicate": lambda p: build(p.predicate, batch=2, num_heads=6),
    "blocks of blocks and an array": lambda p: build(p.blocks & p.by_example),
}


# Where nothing is in a case that the kernels have not met in another.
PLAIN_JAX_ALONE = {"object and array", "array and object", "NumPy array and object"}


CHOSEN = ["object and array", "blocks of a predicate"]


@pytest.mark.parametrize("name", cases.default(CHOSEN, CALLS))
def test_mask_object_equals_its_array(name):
    mask = CALLS[name](parts())
    want = results("reference", jnp.asarray(seen_by(mask, (BATCH, 6, T, S))))
    close(results("xla", mask), want)
    if name not in PLAIN_JAX_ALONE:
        close(results("interpret", mask), want)


@pytest.mark.parametrize("implementation", cases.default(["xla"], ["xla", "interpret"]))
def test_predicate_may_be_constant(implementation):
    everything, nothing = (Predicate(lambda *_, x=x: x) for x in (True, False))
    want = results("reference", None)
    for mask in (everything, build(everything)):
        close(results(implementation, mask), want)
    want = results("reference", parts().by_example)
    close(results(implementation, everything & parts().by_example), want)
    assert all((x == 0).all() for x in jax.tree.leaves(results(implementation, nothing)))


def test_conjunction_in_any_order():
    p, shape = parts(), (BATCH, 6, T, S)
    one, other = (
        Mask(fitted(x, Call(shape))).allowed(*np.ogrid[tuple(map(slice, shape))])
        for x in (p.prefix & p.by_head & p.blocks, p.blocks & (p.prefix & p.by_head))
    )
    np.testing.assert_array_equal(one, other)


def bool_operand():
    """Memory holds it in another dtype, of which ~ is no negation; whole tiles show it."""
    hide = jnp.arange(32) % 3 == 0

    def visible(b, h, q, k, hide):
        assert hide.dtype == bool
        return ~hide[k]

    return Predicate(visible, (hide,)), ~hide, inputs(32, 32)


def operand_read_outside():
    """An index is moved to the edge."""
    steps = int32([0, 3, 9])
    q, k = np.ogrid[:T, :S]
    want = jnp.asarray(k >= np.asarray(steps)[np.clip((q - 10) // 10, 0, 2)])
    return Predicate(lambda b, h, q, k, steps: k >= steps[(q - 10) // 10], (steps,)), want, inputs()


def index_of_small_dtype():
    """The length of an operand may not fit in the type of an index into it."""
    rows = jnp.asarray(np.arange(S) * 255 // (S - 1), jnp.uint8)
    table = jnp.arange(300) % 3 > 0
    visible = Predicate(lambda b, h, q, k, rows, table: table[rows[k]], (rows, table))
    return visible, table[rows], inputs()


@pytest.mark.parametrize("make", [bool_operand, operand_read_outside, index_of_small_dtype])
@pytest.mark.parametrize(
    "implementation", cases.default(["interpret"], ["interpret", "xla", "reference"])
)
def test_operands_of_predicate(make, implementation):
    mask, array, arrays = make()
    close(results(implementation, mask, arrays), results("reference", array, arrays))


@pytest.mark.parametrize(
    "dtype",
    ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"],
)
def test_operand_index_of_any_int_moves_to_edge(dtype):
    """Also one that int32 does not hold, and one of a type that the last index does not fit."""
    x64 = dtype.endswith("64")
    with jax.enable_x64(x64):
        limits, operand = np.iinfo(dtype), readable(jnp.arange(300))
        indices = [limits.min, limits.min // 2, 0, 100, limits.max // 2, limits.max]
        indices += [i for i in (-1, 299, 300, 2**32 + 7) if limits.min <= i <= limits.max]
        want = np.clip(np.array(indices, object), 0, 299).tolist()
        for array in (np.array(indices, dtype), jnp.asarray(np.array(indices, dtype))):
            assert operand[array].tolist() == want
        assert [operand[i].tolist() for i in indices] == want
        assert [operand[np.dtype(dtype).type(i)].tolist() for i in indices] == want


# ------------------------------------------------------------------------------------------------
# Documents.

LENGTHS = [7, 0, 12, 1]


def test_ids_from_cu_seqlens():
    ends = np.cumsum([0, *LENGTHS]).astype(np.int32)
    want = [i for i, n in enumerate(LENGTHS) for _ in range(n)] + [len(LENGTHS)] * 15
    ids = functools.partial(pallas_flash.masks.segment_ids_from_cu_seqlens, length=35)
    for x64 in (False, True):
        with jax.enable_x64(x64):
            for got in (ids(ends), ids(jnp.asarray(ends)), jax.jit(ids)(ends)):
                assert got.dtype == jnp.int32
                assert got.tolist() == want
    assert ids(np.array([0], np.int32)).tolist() == [0] * 35
    assert ids(np.array([0, 35], np.int32)).tolist() == [0] * 35
    assert pallas_flash.masks.segment_ids_from_cu_seqlens(int32([0]), 0).shape == (0,)
    rows = jax.vmap(ids)(int32([[0, 3, 35], [0, 5, 9]]))
    assert rows.tolist() == [[0] * 3 + [1] * 32, [0] * 5 + [1] * 4 + [2] * 26]


QUERIES = [3, 9, 0, 6, 5]


@pytest.mark.parametrize("options", [{}, {"is_causal": True},
                                     {"is_causal": True, "local_window_size": (4, None)}],
                         ids=["whole", "causal", "window"])  # fmt: skip
@pytest.mark.parametrize("traced", [False, True])
def test_packed_queries_and_keys_equal_calls_of_their_own(options, traced):
    """Aligned at the last key; tokens behind the last sequence may be anything."""
    lengths = [*LENGTHS, 8]
    of_q, of_k = (np.cumsum([0, *x]).astype(np.int32) for x in (QUERIES, lengths))
    T, S = of_q[-1] + 4, of_k[-1] + 5
    rng = random(7)
    q, k, v = (jnp.asarray(rng.standard_normal((n, 2, 8)), jnp.float32) for n in (T, S, S))

    def call(q, k, v, of_q, of_k):
        packed = pallas_flash.masks.arguments_from_cu_seqlens(of_q, of_k, T, S)
        return pallas_flash.attention(q, k, v, implementation="xla", **packed, **options)

    call = jax.jit(call) if traced else call
    poisoned = (x.at[ends[-1] :].set(jnp.nan) for x, ends in ((q, of_q), (k, of_k), (v, of_k)))
    o = call(*poisoned, int32(of_q), int32(of_k))
    assert not np.asarray(o[of_q[-1] :]).any()
    for n, (t, s) in enumerate(zip(QUERIES, lengths, strict=True)):
        if t:
            own = [x[ends[n] : ends[n + 1]] for x, ends in ((q, of_q), (k, of_k), (v, of_k))]
            alone = pallas_flash.attention(*own, query_offset=s - t, **options)
            np.testing.assert_allclose(o[of_q[n] : of_q[n + 1]], alone, rtol=1e-5, atol=1e-6)


def test_packed_positions_skip_blocks_above_the_diagonal():
    """In each of the sequences: their positions rise along the row."""
    ends = int32([0, 256, 1024]), int32([0, 512, 1024])
    packed = pallas_flash.masks.arguments_from_cu_seqlens(*ends, 1024, 1024)
    shape = 1, 1, 1024, 1024
    conditions = dict(is_causal=True, **packed)
    mask = mask_of(shape, **conditions)
    q = kv = Tiling(1024, 64)
    some, _ = of_pairs(oracle.visible(shape, **conditions), q, kv)
    np.testing.assert_array_equal(mask.block_classes(q, kv).some, some)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_block_mask_reads_ids_in_kernels_alone(implementation):
    """No layer compares the ids of tiles anew."""
    from support.described_gpus import described_gpu

    ids = jnp.zeros((1, 256), jnp.int32)
    ready = BlockMask.from_mask(Segments(ids), 256, 256)
    x = jnp.zeros((1, 256, 2, 16))

    def gradients(x, mask):
        def loss(x):
            options = dict(mask=mask, implementation=implementation)
            return pallas_flash.attention(x, x, x, **options).sum()

        return jax.grad(loss)(x)

    def compares(mask):
        """Whether an equation outside of kernels reduces ids, as their tables do."""
        with described_gpu("NVIDIA H200"):
            eqns = jaxprs.trace(gradients, x, mask)
        return any(
            eqn.primitive.name in ("reduce_min", "reduce_max")
            and eqn.invars[0].aval.dtype == jnp.int32
            and eqn.invars[0].aval.size == ids.size
            for eqn in eqns
        )

    assert compares(Segments(ids))
    assert not compares(ready)


# ------------------------------------------------------------------------------------------------
# As pytrees


@pytest.mark.parametrize(
    "make",
    [
        lambda: Segments(int32([[0, 1]])),
        lambda: Segments(int32([[0, 1]]), int32([[0, 1, 1]])),
        lambda: PrefixLM(int32([3])),
        lambda: Predicate(max, (int32([1]), int32([2]))),
        lambda: BlockMask(jnp.ones((1, 1, 2, 2), bool), 8, 8),
        lambda: BlockMask.from_mask(PrefixLM(int32([3])), 9, 9),
        lambda: PrefixLM(int32([3])) & jnp.ones((9, 9), bool),
    ],
)
def test_pytree_structure_is_fixed(make):
    mask = make()
    structure = jax.tree.structure(mask)
    numbers = jax.tree.map(lambda x: 0, mask)
    assert jax.tree.structure(numbers) == structure
    assert jax.tree.leaves(numbers) == [0] * structure.num_leaves
    assert jax.tree.structure(jax.tree.map(lambda x: max, mask)) == structure
    shapes = jax.tree.map(lambda x: list(x.shape), mask)
    assert jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, list))
    assert pickle.loads(pickle.dumps(jax.tree.map(np.asarray, mask))) != mask
    assert mask != make()
    again = jax.tree.map(lambda x: x, mask)
    assert mask == again and hash(mask) == hash(again) and mask != np.asarray(1)


def test_equal_constants_are_equal_masks():
    one, other = (Chunked(4) & ~Neighborhood((2, 3), (1, 1)) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert Chunked(4) != Chunked(5) and Chunked(4) != BlockCausal(4) and Chunked(4) != 4


def test_vmap_axes_by_field():
    q, k, v = (jnp.asarray(random(i).standard_normal((2, 9, 1, 8)), jnp.float32) for i in range(3))
    ids = jnp.asarray(random(3).integers(0, 2, (3, 2, 9)), jnp.int32)

    def call(mask):
        return pallas_flash.attention(q, k, v, mask=mask, implementation="xla")

    mapped = jax.vmap(call, in_axes=(Segments(0, None),))(Segments(ids, ids[0]))
    looped = jnp.stack([call(Segments(x, ids[0])) for x in ids])
    np.testing.assert_allclose(mapped, looped, rtol=1e-5, atol=1e-6)


def test_constant_mask_is_not_folded(capfd):
    """It says so itself, where that takes more than a second."""
    x = jax.ShapeDtypeStruct((1, 1024, 1, 8), jnp.float32)
    mask = random(0).random((1024, 1024)) < 0.5

    def call(x, mask):
        return pallas_flash.attention(x, x, x, mask=mask, implementation="xla")

    masks = mask, BlockMask(jnp.asarray(mask[None, None]), 1, 1)
    for mask in masks:
        jax.jit(lambda x, mask=mask: call(x, mask)).lower(x).compile()
    assert "folding" not in capfd.readouterr().err
