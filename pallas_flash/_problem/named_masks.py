"""Masks that have a name in the literature, each a few lines on the algebra of `_problem.masks`.

Each gives every token a number or two and compares a query's numbers with a key's. So it follows
positions, and kernels skip blocks by the least and greatest number of their tiles.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from pallas_flash._jax.one_device import whole
from pallas_flash._problem.checks import at_least, describe, integers
from pallas_flash._problem.mask_objects import (
    MaskObject,
    check_array,
    check_segments,
    mask_object,
    segment_leaf,
    segment_sizes,
)
from pallas_flash._problem.masks import FAR, STATIC, Either, Mask, NumberBand, SegmentLeaf
from pallas_flash._problem.operands import Positions


@mask_object
class Chunked(MaskObject):
    """A query sees the keys of its own chunk of `size` tokens, as in Llama 4 with `is_causal`.

    For S = T = 6 and a size of 3, alone and with `is_causal=True`:

        1 1 1 0 0 0     1 0 0 0 0 0
        1 1 1 0 0 0     1 1 0 0 0 0
        1 1 1 0 0 0     1 1 1 0 0 0
        0 0 0 1 1 1     0 0 0 1 0 0
        0 0 0 1 1 1     0 0 0 1 1 0
        0 0 0 1 1 1     0 0 0 1 1 1

    Chunks count from position 0. `query_offset` moves the queries; where the call gives positions,
    chunks are made of them.

    Attributes:
        size: tokens in a chunk.

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> x = jnp.ones((1, 16, 1, 8))
        >>> o = pallas_flash.attention(x, x, x, is_causal=True, mask=pallas_flash.masks.Chunked(4))
        >>> o.shape
        (1, 16, 1, 8)
    """

    size: int = dataclasses.field(metadata=STATIC)

    def __post_init__(self):
        at_least(1, "Chunked.size", self.size)

    def _fit(self, call):
        size = _tokens(self.size)
        return (_band(call.positions(), lambda position: position // size, low=0),)


@mask_object
class BlockCausal(MaskObject):
    """A query sees all keys of its own block of `size` tokens, and of all earlier blocks.

    Block diffusion and autoregressive models of images use it. For S = T = 6 and a size of 2:

        1 1 0 0 0 0
        1 1 0 0 0 0
        1 1 1 1 0 0
        1 1 1 1 0 0
        1 1 1 1 1 1
        1 1 1 1 1 1

    `is_causal` would hide later tokens of the own block, and raises. Blocks count from position 0.
    `query_offset` moves the queries; where the call gives positions, blocks are made of them.

    Attributes:
        size: tokens in a block.

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> x = jnp.ones((1, 16, 1, 8))
        >>> pallas_flash.attention(x, x, x, mask=pallas_flash.masks.BlockCausal(4)).shape
        (1, 16, 1, 8)
    """

    size: int = dataclasses.field(metadata=STATIC)

    def __post_init__(self):
        at_least(1, "BlockCausal.size", self.size)

    def _fit(self, call):
        if call.is_causal:
            raise ValueError(
                "`is_causal` must be False with a BlockCausal `mask`; got True. Drop `is_causal`: "
                "it would hide the later tokens of each block, and leave a causal mask."
            )
        size = _tokens(self.size)
        return (_band(call.positions(), lambda position: position // size, low=None),)


@mask_object
class Dilated(MaskObject):
    """A query sees the keys whose distance from it is a multiple of `stride`.

    Together with `local_window_size` this mask is the dilated window of Longformer. For S = T = 6
    and a stride of 2, alone and with `is_causal=True, local_window_size=2`:

        1 0 1 0 1 0     1 0 0 0 0 0
        0 1 0 1 0 1     0 1 0 0 0 0
        1 0 1 0 1 0     1 0 1 0 0 0
        0 1 0 1 0 1     0 1 0 1 0 0
        1 0 1 0 1 0     0 0 1 0 1 0
        0 1 0 1 0 1     0 0 0 1 0 1

    A tile of `stride` or more neighbours has keys for every query, so that the stride skips no
    tile. It does where tokens with the same remainder are neighbours and the call gives positions.

    Attributes:
        stride: the distance of neighbouring keys that a query sees.

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> x = jnp.ones((1, 16, 1, 8))
        >>> options = dict(is_causal=True, local_window_size=(6, None))
        >>> pallas_flash.attention(x, x, x, mask=pallas_flash.masks.Dilated(2), **options).shape
        (1, 16, 1, 8)
    """

    stride: int = dataclasses.field(metadata=STATIC)

    def __post_init__(self):
        at_least(1, "Dilated.stride", self.stride)

    def _fit(self, call):
        stride = _tokens(self.stride)
        return (_band(call.positions(), lambda position: position % stride, low=0),)


@mask_object
class SharedPrefix(MaskObject):
    """Several continuations of one prompt in a row: each sees the prompt and itself.

    The ids of tokens are 0 in the prompt and another number in each continuation. For the ids
    0 0 1 1 2 2, alone and with `is_causal=True`:

        1 1 0 0 0 0     1 0 0 0 0 0
        1 1 0 0 0 0     1 1 0 0 0 0
        1 1 1 1 0 0     1 1 1 0 0 0
        1 1 1 1 0 0     1 1 1 1 0 0
        1 1 0 0 1 1     1 1 0 0 1 0
        1 1 0 0 1 1     1 1 0 0 1 1

    `segment_ids` keep several prompts in a row apart. Rotary positions of each continuation go on
    from the end of the prompt.

    Attributes:
        query: int32 [B, T], the ids of the queries.
        key_value: int32 [B, S], the ids of the keys; None if both are the same tokens.

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> ids = pallas_flash.masks.segment_ids_from_cu_seqlens(jnp.array([0, 6, 11, 16]), 16)
        >>> x = jnp.ones((1, 16, 1, 8))
        >>> mask = pallas_flash.masks.SharedPrefix(ids[None])
        >>> pallas_flash.attention(x, x, x, is_causal=True, mask=mask).shape
        (1, 16, 1, 8)
    """

    query: Any
    key_value: Any = None

    def __post_init__(self):
        check_segments(self)

    def _sizes(self):
        return segment_sizes(self.query, self.key_value)

    def _fit(self, call):
        own = segment_leaf("SharedPrefix", self.query, self.key_value, call)
        prompt = SegmentLeaf(jnp.zeros_like(own.query), own.numbers[1])
        return (Either((Mask((own,)), Mask((prompt,)))),)


@mask_object
class Tree(MaskObject):
    """A token of a tree sees itself and its ancestors, as drafts of speculative decoding do.

    For the parents -1 0 0 1 1 2:

        1 0 0 0 0 0
        1 1 0 0 0 0
        1 0 1 0 0 0
        1 1 0 1 0 0
        1 1 0 0 1 0
        1 0 1 0 0 1

    The queries are the tree. `query_offset` is the number of keys before it, such as the tokens of
    a cache: every query sees these keys. Keys after the tree are hidden. A token's rotary position
    is `query_offset` and the number of its ancestors. Kernels skip most where each token comes
    right after its parent or after a descendant of an earlier sibling, in depth-first order.

    Attributes:
        parents: int32 [B, T] or [1, T], the index of each token's parent, which comes before the
            token; -1 for a token without one.

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> tree = pallas_flash.masks.Tree(jnp.array([[-1, 0, 0, 1, 1, 2]]))
        >>> q, cache = jnp.ones((1, 6, 1, 8)), jnp.ones((1, 16, 1, 8))
        >>> pallas_flash.attention(q, cache, cache, mask=tree, query_offset=10).shape
        (1, 6, 1, 8)
    """

    parents: Any

    def __post_init__(self):
        check_array("Tree.parents", self.parents, "int32")

    def _sizes(self):
        batch, q_len = (1, 1, *np.shape(self.parents))[-2:]
        return batch, 1, q_len, 1

    def _fit(self, call):
        # q sees k if k's visit in a walk through the tree encloses q's.
        batch, _, q_len, kv_len = call.scores_shape
        if call.at.positions is not None or call.shards > 1:
            got = "sequence_axis" if call.shards > 1 else "query_positions or key_value_positions"
            raise NotImplementedError(
                "`query_positions`, `key_value_positions` and `sequence_axis` must be None with a "
                f"Tree `mask`, which needs the whole tree in its order; got `{got}`. Use "
                "`query_offset` for the keys before the tree, and shard outside of a `shard_map`."
            )
        shape = batch, q_len
        parents = whole(integers("Tree.parents", self.parents, shape, "[B, T]", shared=True))
        if not isinstance(parents, Tracer):
            known = np.asarray(parents)
            if ((known < -1) | (known >= np.arange(q_len))).any():
                raise ValueError(
                    "`Tree.parents` must be -1 or the index of an earlier token; got "
                    f"{describe(parents)} with others. Give -1 for a token without a parent."
                )
        shift = call.at.shift
        if call.at.offset is None and not 0 <= shift <= kv_len - q_len:
            raise ValueError(
                "`query_offset` must be the number of keys before the tree of a Tree `mask`, at "
                f"most S - T = {kv_len - q_len}; got {shift}. Write the keys of the tree after "
                "those before it."
            )
        enter, leave = jax.vmap(_visits)(parents)
        same = q_len == kv_len and not call.at.moved
        if same:
            starts, ends = enter, leave
        else:
            offset = call.at.shift if call.at.offset is None else call.at.offset[:, None]
            token = jnp.arange(kv_len, dtype=jnp.int32)[None] - offset
            rows = max(len(token), len(enter))
            token = jnp.broadcast_to(token, (rows, kv_len))
            at = jnp.clip(token, 0, q_len - 1)
            starts, ends = (
                jnp.take_along_axis(jnp.broadcast_to(x, (rows, q_len)), at, axis=1)
                for x in (enter, leave)
            )
            # Keys before the tree enclose all of it, keys after it nothing.
            starts = jnp.where(token < 0, -FAR, jnp.where(token < q_len, starts, FAR))
            ends = jnp.where(token < 0, FAR, ends)
        begun = NumberBand(Positions(enter, starts), None, 0, diagonal=same)
        not_ended = NumberBand(Positions(enter, ends), 0, None, diagonal=same)
        return (Either((Mask((begun, not_ended)),)),)


@mask_object
class Neighborhood(MaskObject):
    """Tokens are the points of a grid, row by row, and a query sees a window of points around it.

    The grid has any number of axes. As in NATTEN, a window at the edge is moved inside, so that
    every query sees equally many keys. For S = T = 12, a grid of (3, 4) and a window of (1, 3):

        1 1 1 0 0 0 0 0 0 0 0 0
        1 1 1 0 0 0 0 0 0 0 0 0
        0 1 1 1 0 0 0 0 0 0 0 0
        0 1 1 1 0 0 0 0 0 0 0 0
        0 0 0 0 1 1 1 0 0 0 0 0     and so on

    `query_offset` moves the queries. Where the call gives positions, they are the numbers of the
    points. Kernels skip by rectangles of points: row by row a tile has whole rows, and for a window
    of many rows they skip more if the points of a patch are neighbours in the arrays.

    Attributes:
        grid: points along each axis, such as (height, width).
        window: points along each axis that a query sees. An even window has one more point before
            the query than after it.

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> pixels = jnp.ones((1, 8 * 8, 1, 8))
        >>> mask = pallas_flash.masks.Neighborhood((8, 8), (3, 3))
        >>> pallas_flash.attention(pixels, pixels, pixels, mask=mask).shape
        (1, 64, 1, 8)
    """

    grid: tuple[int, ...] = dataclasses.field(metadata=STATIC)
    window: tuple[int, ...] = dataclasses.field(metadata=STATIC)

    def __post_init__(self):
        grid, window = (_ints(name, getattr(self, name)) for name in ("grid", "window"))
        if len(grid) != len(window) or any(w > n for n, w in zip(grid, window, strict=False)):
            raise ValueError(
                "`Neighborhood.window` must have an int for each axis of the grid, not above its "
                f"points; got {window} for a grid of {grid}. Use the grid's own for all points."
            )

    def _sizes(self):
        points = math.prod(map(int, self.grid))
        return 1, 1, points, points

    def _fit(self, call):
        grid, window = (tuple(map(int, x)) for x in (self.grid, self.window))
        points, (q_len, kv_len), shift = math.prod(grid), call.lengths, call.at.shift
        inside = 0 <= shift <= points - q_len and kv_len == points
        if call.at.positions is None and not inside:
            moved = f" and query_offset={shift}" * (shift != 0)
            raise ValueError(
                "`Neighborhood.grid` must have a point for each key and query; got "
                f"{points} points for T={q_len} and S={kv_len}{moved}. Give the sizes of the "
                "grid, or positions that tell each token's point."
            )
        positions, leaves = call.positions(), []
        for axis, (n, w) in enumerate(zip(grid, window, strict=True)):
            apart = math.prod(grid[axis + 1 :])
            # Without the remainder, positions outside of the grid are outside of its first axis.
            numbers = positions.query // apart, positions.keys // apart
            q, k = (x % n for x in numbers) if axis else numbers
            first = jnp.clip(q - w // 2, 0, n - w)
            same = positions.key_value is None and call.at.positions is None
            leaves.append(NumberBand(Positions(first, k), 0, w - 1, diagonal=same))
        return (Either((Mask(tuple(leaves)),)),)


def _tokens(value: int) -> int:
    """Return a number of tokens, which int32 holds: above all distances it makes no difference."""
    return min(int(value), jnp.iinfo(jnp.int32).max)


def _band(positions: Positions, number, *, low: int | None) -> NumberBand:
    """Return the mask low <= number(position of k) - number(position of q) <= 0."""
    return NumberBand(jax.tree.map(number, positions), low, 0)


def _ints(name: str, value) -> tuple[int, ...]:
    """Return the ints of an attribute of `Neighborhood`, checked."""
    if not isinstance(value, tuple) or not value:
        raise TypeError(
            f"`Neighborhood.{name}` must be a tuple of ints; got {describe(value)}. Write an int "
            "for each axis of the grid, as in (height, width)."
        )
    return tuple(at_least(1, f"Neighborhood.{name}", n) for n in value)


def _visits(parents):
    """Return when a walk through a tree enters and leaves each token, int32 [T] each.

    The walk goes depth first, and children of a token come in the order of their indices. It is a
    list of 2 T events, each with its successor. Ranks in the list follow by doubling: after n
    rounds, an event knows the event 2^n places later.
    """
    n = parents.shape[0]
    token = jnp.arange(n, dtype=jnp.int32)
    # Token n is a root above all. It leaves at event 2 n, which ends the list.
    parent = jnp.where(parents < 0, n, parents)
    # Compared in pairs: as much work as a score each, and few kernels for a small tree.
    first_child = _first(parent[:, None] == token[None])
    next_sibling = _first((parent[:, None] == parent[None]) & (token[:, None] > token[None]))
    after_enter = jnp.where(first_child < n, first_child, n + token)
    after_leave = jnp.where(next_sibling < n, next_sibling, n + parent)
    end = jnp.full(1, 2 * n, jnp.int32)
    successor = jnp.concatenate([after_enter, after_leave, end])
    left = jnp.ones(2 * n + 1, jnp.int32).at[2 * n].set(0)

    def double(_, carry):
        left, successor = carry
        return left + left[successor], successor[successor]

    rounds = max(1, (2 * n).bit_length())
    left, _ = lax.fori_loop(0, rounds, double, (left, successor), unroll=True)
    return -left[:n], -left[n : 2 * n]


def _first(is_one):
    """Return the first row of each column that is one, or their number where none is."""
    n = is_one.shape[0]
    rows = jnp.arange(n, dtype=jnp.int32)[:, None]
    return jnp.min(jnp.where(is_one, rows, n), axis=0, initial=n)
