"""Masks joined by `&`, `|` and `~`: who sees whom, and the classes of blocks, by brute force."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle
from support.block_classes import assert_classes, of_pairs

import pallas_flash
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.mask_objects import AllOf, Call, MaskObject, fitted
from pallas_flash._problem.masks import Mask
from pallas_flash._problem.operands import TokenPositions
from pallas_flash.masks import (
    BlockCausal,
    BlockMask,
    Chunked,
    Dilated,
    Neighborhood,
    Predicate,
    PrefixLM,
    Segments,
    SharedPrefix,
    Tree,
)

BATCH, HEADS, LENGTH = 2, 2, 24
SHAPE = BATCH, HEADS, LENGTH, LENGTH
BLOCKS = [(4, 6), (5, 7), (24, 3), (1, 1)]


def int32(x):
    return jnp.asarray(x, jnp.int32)


def fit(mask, **at) -> Mask:
    return Mask(fitted(mask, Call(SHAPE, at=TokenPositions(**at))))


@jax.jit
def allowed_at(mask, b, h, i, j):
    return mask.allowed(b, h, i, j)


def allowed(mask: Mask):
    indices = (np.asarray(x, np.int32) for x in np.ogrid[tuple(map(slice, SHAPE))])
    return np.broadcast_to(allowed_at(mask, *indices), SHAPE)


@functools.partial(jax.jit, static_argnames=("q", "kv", "method"))
def classes_of(mask: Mask, q, kv, method="block_classes"):
    return getattr(mask, method)(q, kv)


def tilings():
    for block_q, block_kv in BLOCKS:
        yield Tiling(LENGTH, block_q), Tiling(LENGTH, block_kv)


# ------------------------------------------------------------------------------------------------
# Random masks.


def _array(rng):
    coarse = rng.choice([0.0, 1.0, 0.5], (4, 4), p=[0.4, 0.4, 0.2])
    shape = rng.choice([1, BATCH]), rng.choice([1, HEADS]), LENGTH, LENGTH
    return jnp.asarray(rng.random(shape) < np.repeat(np.repeat(coarse, 6, 0), 6, 1))


def _ids(rng):
    return int32(np.sort(rng.integers(0, 4, (BATCH, LENGTH)), axis=1))


def _blocks(rng):
    return BlockMask(jnp.asarray(rng.random((1, HEADS, 6, 8)) < 0.5), 4, 3)


def _odd(b, h, q, k):
    return (q + k + h) % 2 == b


# Masks whose classes are exact at every tile size, and others.
EXACT = {
    # Two arrays would join to an array, whose classes are exact, too.
    "array": lambda rng: AllOf((_array(rng),)),
    "prefix": lambda rng: PrefixLM(int32(rng.integers(0, LENGTH, BATCH))),
    "segments": lambda rng: Segments(_ids(rng)),
    "chunked": lambda rng: Chunked(int(rng.integers(1, 30))),
    "block-causal": lambda rng: BlockCausal(int(rng.integers(1, 30))),
}
OTHERS = {
    "shared prefix": lambda rng: SharedPrefix(_ids(rng)),
    "predicate": lambda rng: Predicate(_odd),
    "blocks": _blocks,
    "dilated": lambda rng: Dilated(int(rng.integers(1, 6))),
    "tree": lambda rng: Tree(
        int32([[rng.integers(max(-1, i - 4), i) for i in range(LENGTH)] for _ in range(BATCH)])
    ),
    "neighborhood": lambda rng: Neighborhood((4, 6), (3, int(rng.integers(1, 7)))),
}


def random_tree(rng, leaves, depth):
    """A mask of random operators and leaves, and the classes of its leaves joined by the rules.

    The second result is a function from the blocks to (some, every).
    """
    kind = rng.choice(["leaf", "and", "or", "not"]) if depth else "leaf"
    if kind == "leaf":
        mask = leaves[str(rng.choice(list(leaves)))](rng)
        seen = np.broadcast_to(oracle.visible(SHAPE, mask=mask), SHAPE)
        return mask, functools.partial(of_pairs, seen)
    mask, classes = random_tree(rng, leaves, depth - 1)
    if kind == "not":

        def complement(q, kv):
            some, every = classes(q, kv)
            return ~every, ~some

        return ~mask, complement
    join = operator.and_ if kind == "and" else operator.or_
    other, more = random_tree(rng, leaves, depth - 1)
    return join(mask, other), lambda q, kv: tuple(map(join, classes(q, kv), more(q, kv)))


@pytest.mark.parametrize("seed", cases.default(range(8), range(60)))
def test_trees_of_any_masks(seed):
    """The visible pairs are exact; no block is called empty or full that is not."""
    mask, _ = random_tree(np.random.default_rng(seed), EXACT | OTHERS, 3)
    seen, leaf = np.broadcast_to(oracle.visible(SHAPE, mask=mask), SHAPE), fit(mask)
    np.testing.assert_array_equal(allowed(leaf), seen)
    assert not leaf.sees_diagonal or np.diagonal(seen, axis1=2, axis2=3).all()
    for q, kv in tilings():
        assert_classes(classes_of(leaf, q, kv), of_pairs(seen, q, kv))


@pytest.mark.parametrize("seed", cases.default(range(8), range(60)))
def test_trees_of_exact_masks_follow_the_rules(seed):
    """Full if either is, empty only if both are, and exchanged by `~`, in ragged tiles too."""
    mask, rule = random_tree(np.random.default_rng(seed), EXACT, 3)
    leaf = fit(mask)
    for q, kv in tilings():
        want = rule(q, kv)
        some, every = (
            np.broadcast_to(x, want[0].shape) for x in classes_of(leaf, q, kv, "classes")
        )
        np.testing.assert_array_equal(some, want[0])
        np.testing.assert_array_equal(every, want[1])


# ------------------------------------------------------------------------------------------------
# Operators.


def test_operators_take_arrays_on_both_sides():
    rng = np.random.default_rng(0)
    array, mask = np.asarray(_array(rng)), Chunked(5)
    own = oracle.visible(SHAPE, mask=mask)
    for x in (array, jnp.asarray(array)):
        for joined, want in (
            (x | mask, array | own),
            (mask | x, array | own),
            (x & mask, array & own),
            (mask & x, array & own),
            ((mask & x) | x, array | (array & own)),
            (x & ~mask, array & ~own),
        ):
            assert isinstance(joined, MaskObject)
            np.testing.assert_array_equal(allowed(fit(joined)), np.broadcast_to(want, SHAPE))


def test_two_complements_are_the_mask():
    mask = Chunked(5) | Dilated(2)
    assert ~~mask is mask
    assert ~~Chunked(5) == Chunked(5)


def test_disjunction_of_three_is_one_leaf():
    [leaf] = fit(Chunked(5) | (Dilated(2) | BlockCausal(3))).leaves
    assert len(leaf.masks) == 3


def test_other_conditions_stay_joined_by_and():
    """The complement of a mask shows no padding, no later key and no other document."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((BATCH, LENGTH, HEADS, 16)), jnp.float32)
    lengths, ids = int32([20, 9]), _ids(rng)
    conditions = dict(
        is_causal=True, local_window_size=(9, 3), segment_ids=ids,
        key_value_seq_lengths=lengths, query_seq_lengths=lengths,
    )  # fmt: skip
    mask = ~(Chunked(4) & _array(rng))
    seen = oracle.visible(SHAPE, mask=mask, **conditions)
    poisoned = jnp.where(
        jnp.arange(LENGTH)[:, None, None] < lengths[:, None, None, None], x, jnp.nan
    )
    for implementation in ("xla", "interpret", "reference"):
        call = functools.partial(pallas_flash.attention, implementation=implementation)
        o = call(x, poisoned, poisoned, mask=mask, **conditions)
        want = call(x, x, x, mask=jnp.asarray(seen))
        np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-6)


def test_a_function_sees_its_indices_inside_operators():
    """`from_mask` asks for the sizes that a predicate needs, wherever it stands."""
    mask = ~(Predicate(_odd) | Chunked(4))
    with pytest.raises(ValueError, match="`batch` must be given for a Predicate"):
        BlockMask.from_mask(mask, LENGTH, LENGTH)
    made = BlockMask.from_mask(mask, LENGTH, LENGTH, batch=BATCH, num_heads=HEADS, block_q=4)
    seen = np.broadcast_to(oracle.visible(SHAPE, mask=mask), SHAPE)
    np.testing.assert_array_equal(allowed(fit(made)), seen)
    for x, y in zip((made.some, made.every), of_pairs(seen, Tiling(24, 4), Tiling(24, 64)),
                    strict=True):  # fmt: skip
        np.testing.assert_array_equal(x, y)
