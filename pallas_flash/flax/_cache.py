"""`KVCache`: keys and values of earlier tokens, in one array with room for each sequence.

Slot j holds token j of a sequence. In a ring, slot j holds the last token whose position is j
modulo the room, so that a window's length of room serves any number of tokens.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from pallas_flash._arguments.attention import window_sides
from pallas_flash._call.attention import attention
from pallas_flash._problem.checks import array_of_dtype, as_dtype, at_least, describe, flag, is_int
from pallas_flash._problem.masks import FAR
from pallas_flash._problem.named_masks import Tree
from pallas_flash.flax._arrays import merge_batch, merge_full, new_tokens, spec_of


class KVCache(nnx.Module):
    """Keys and values of earlier tokens, in one array with room for each sequence.

    `SelfAttention.init_cache` makes one. A layer of your own calls `attend` with the new tokens'
    queries, keys and values, which adds them to the cache and attends to all of it.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_flash.flax import KVCache
        >>> cache = KVCache((2, 16, 1, 8), ragged=True)  # 2 sequences, room for 16 tokens
        >>> q, k = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 1, 8))
        >>> cache.attend(q, k, k, seq_lengths=jnp.array([5, 3])).shape  # two prompts
        (2, 5, 4, 8)
        >>> cache.attend(q[:, :1], k[:, :1], k[:, :1]).shape  # one token
        (2, 1, 4, 8)
        >>> cache.lengths[...].tolist()
        [6, 4]

    Args:
        shape: (*batch, room, K, H), for any batch axes.
        dtype: Floating point dtype of the cache.
        value_dim: Head dim of the values. None is H.
        ragged: Whether each sequence has a length of its own. Else all have equally many tokens.
        ring: Whether new tokens take the slots of the oldest ones. It serves attention with a
            `local_window_size`, whose `left` must not be above the room. A room of left + n reads
            the cache in place for n tokens at once; with less, it is copied.
        sharding: Where the arrays of `shape` lie; batch and heads may be sharded. It is needed on
            a mesh of Explicit axes.

    Attributes:
        keys: [*batch, room, K, H].
        values: [*batch, room, K, V].
        lengths: The tokens of each sequence, int32 [*batch] if `ragged`, else [].

    Raises:
        TypeError: If `dtype` is not floating point, or `sharding` not a `NamedSharding`.
        ValueError: If `shape` or `value_dim` are not sizes, or the sharding divides the room or the
            head dim.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Dtype = jnp.float32,
        *,
        value_dim: int | None = None,
        ragged: bool = False,
        ring: bool = False,
        sharding: NamedSharding | None = None,
    ):
        sizes = shape if isinstance(shape, (tuple, list)) else ()
        if len(sizes) < 3 or not all(is_int(n) and n >= 0 for n in sizes):
            raise ValueError(
                f"`shape` must be sizes (*batch, room, K, H); got {describe(shape)}. Give the "
                "sizes of the keys of the longest sequence."
            )
        dtype = as_dtype("dtype", dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"`dtype` must be floating point; got {dtype}. Leave it out for the layer's, "
                "or quantise in a `PagedKVCache`."
            )
        *batch, _, _, head_dim = sizes
        value_dim = head_dim if value_dim is None else at_least(0, "value_dim", value_dim)
        value_shape = (*sizes[:-1], value_dim)
        spec_of(sharding, len(sizes))
        self.ragged, self.ring = flag("ragged", ragged), flag("ring", ring)
        self.keys = nnx.Cache(jnp.zeros(tuple(sizes), dtype, device=sharding))
        self.values = nnx.Cache(jnp.zeros(value_shape, dtype, device=sharding))
        by_sequence = _sequence_sharding(sharding, len(batch) if ragged else 0)
        counts = tuple(batch) if ragged else ()
        self.lengths = nnx.Cache(jnp.zeros(counts, jnp.int32, device=by_sequence))

    def positions(self, length: int) -> Int32[Array, "*#batch T"]:
        """Return the positions of the next `length` tokens of each sequence."""
        return _behind(self.lengths[...], length)

    def check(self, name: str, x, features: int, seq_lengths=None) -> tuple[Any, Any, Any]:
        """Raise if the tokens of argument `name` do not fit in.

        Args:
            name: The argument.
            x: An array [*batch, T, ..] of new tokens.
            features: The number of its axes after T.
            seq_lengths: As in `attend`.

        Returns:
            The tokens of each sequence before them, the number of real new ones, and whether they
            overflow the cache, which is not known while it is traced. These are [B] in a ragged
            cache, whose batch axes are merged, else scalars.
        """
        *batch, room, _, _ = self.keys.shape
        *of_tokens, length = x.shape[: x.ndim - features]
        if of_tokens != batch:
            raise ValueError(
                f"`{name}` must have the batch axes {tuple(batch)} of the cache; got "
                f"{name}.shape={x.shape}. Call `init_cache` for this batch."
            )
        start, new = self.lengths[...], length
        if self.ragged:
            start = start.reshape(-1)
        if seq_lengths is not None:
            if not self.ragged:
                raise ValueError(
                    "`seq_lengths` must be None in a cache with one length for all sequences; got "
                    f"{type(seq_lengths).__name__}. Make it with ragged=True."
                )
            new = jnp.clip(merge_full("seq_lengths", seq_lengths, batch, ()), 0, length)
        if self.ring:
            return start, new, None
        full = start + new > room
        traced = isinstance(full, Tracer)
        too_long = length > room and seq_lengths is None
        if too_long or (not traced and full.any()):
            taken = "some" if traced else jnp.max(start)
            raise ValueError(
                f"`{name}` must fit in what is left of the cache; got {length} tokens with {taken} "
                f"of {room} taken. Call `init_cache` with a greater length."
            )
        return start, new, full

    def attend(
        self,
        query: Float[Array, "*batch T N H"],
        key: Float[Array, "*batch T K H"],
        value: Float[Array, "*batch T K V"],
        *,
        seq_lengths: Int32[Array, "*#batch"] | None = None,
        tree: Int32[Array, "*#batch T"] | None = None,
        **options,
    ) -> Any:
        """Add new tokens to the cache, and return their attention to all tokens so far.

        Args:
            query: Queries of the new tokens.
            key: Keys of the new tokens.
            value: Values of the new tokens.
            seq_lengths: The real tokens of each sequence, from 0 to T, which come first; the others
                are padding. They are not added, and their output is zero. It needs a `ragged`
                cache.
            tree: Parents of the new tokens where they are drafts that branch, as in
                `pallas_flash.masks.Tree`. None is a sequence.
            **options: Options of `pallas_flash.attention`, such as `local_window_size` or `sinks`,
                but none that says where tokens are or that attention is causal.

        Returns:
            The results of `pallas_flash.attention`: the output is [*batch, T, N, V]; NaN where a
            traced call finds no room.

        Raises:
            TypeError: If an argument is of the wrong kind or dtype, or an option is the cache's.
            ValueError: If shapes do not fit, if there is no room, if a ring has no window or less
                room than it or is to be batch-invariant, or if a tree meets a ring or a window.
        """
        keys, values, ranks = self.keys, self.values, (self.keys.ndim,)
        query, key, value = new_tokens(query, key, value, keys=keys, values=values, ranks=ranks)
        *batch, length, _, _ = query.shape
        start, new, full = self.check("query", query, 2, seq_lengths)
        at = _behind(start, length)
        slots = self._slots(at, start + new, new)
        olds = tuple(x[...].reshape(-1, *x.shape[-3:]) for x in (self.keys, self.values))
        q, *news = (_beside(merge_batch(x, batch), olds[0]) for x in (query, key, value))
        # A ring's slots are in a row unless they go on at its start.
        in_row = not self.ragged and (length == 1 or not self.ring)
        write = _write_row if in_row else _write
        extended = tuple(write(x, slots, y) for x, y in zip(olds, news, strict=True))
        if self.ring:
            arrays, where = self._in_ring(olds, extended, news, at, start + new, options, tree)
        else:
            arrays = extended
            where = dict(query_offset=start, is_causal=tree is None)
            if tree is not None:
                where["mask"] = _tree(merge_full("tree", tree, batch, (length,)), options)
        if seq_lengths is not None:
            where["query_seq_lengths"] = new
        if taken := sorted(where.keys() & options.keys()):
            raise TypeError(
                f"`{taken[0]}` must be left out, because the cache gives it to `attention`; got "
                f"{describe(options[taken[0]])}. Drop it."
            )
        results = attention(q, *(x.astype(q.dtype) for x in arrays), **where, **options)

        self.keys[...], self.values[...] = (
            x.reshape(y.shape) for x, y in zip(extended, (self.keys, self.values), strict=True)
        )
        end = self.lengths[...] + (new if seq_lengths is None else new.reshape(batch))
        self.lengths[...] = end if self.ring else jnp.minimum(end, self.keys.shape[-3])
        o, *rest = results if isinstance(results, tuple) else (results,)
        if isinstance(full, Tracer):
            o = jnp.where(full.reshape(-1, 1, 1, 1), jnp.nan, o)
        o = o.reshape(*batch, *o.shape[1:])
        return (o, *rest) if rest else o

    def accept(
        self,
        start: Int32[Array, "*batch"],
        path: Int32[Array, "*batch A"],
        count: Int32[Array, "*batch"],
    ) -> None:
        """Keep some of the tokens after `start`, as of a tree of drafts, and forget the others.

        Args:
            start: `lengths` before these tokens were added.
            path: The numbers of the tokens to keep after `start`, 0 the first, in their new order.
            count: The number of tokens of `path` that each sequence keeps, at most A.

        Raises:
            TypeError: If an argument is not int32.
            ValueError: If the cache is not ragged, or a ring, or if shapes do not fit.
        """
        if not self.ragged or self.ring:
            raise ValueError(
                "`path` must be for a cache with ragged=True and ring=False; got "
                f"ragged={self.ragged}, ring={self.ring}. To drop drafts that lie in a "
                "row, set `lengths` back."
            )
        batch, given = self.lengths.shape, {"start": start, "path": path, "count": count}
        given = {name: array_of_dtype(name, x, "int32") for name, x in given.items()}
        of_path = given["path"].shape[-1:] or (1,)
        starts, counts = (merge_full(name, given[name], batch, ()) for name in ("start", "count"))
        paths = merge_full("path", given["path"], batch, of_path)
        for cell in (self.keys, self.values):
            x = cell[...].reshape(-1, *cell.shape[-3:])
            x = jax.vmap(_moved)(x, _beside(starts, x), _beside(paths, x))
            cell[...] = x.reshape(cell.shape)
        self.lengths[...] = (starts + counts).reshape(batch)

    def _slots(self, at, end, new):
        """Return the slot of each new token at positions `at`; a slot beyond the room if none."""
        room, length = self.keys.shape[-3], at.shape[-1]
        steps, end = _steps(length, at.ndim), jnp.expand_dims(end, -1)
        kept = None if isinstance(new, int) else steps < new[:, None]
        if self.ring and length > room:
            # The first tokens would be overwritten by the last ones.
            last = at >= end - room
            kept = last if kept is None else kept & last
        slots = at % room if self.ring else at
        return slots if kept is None else jnp.where(kept, slots, room + steps)

    def _in_ring(self, olds, extended, news, at, end, options, tree):
        """Return keys and values for queries at positions `at`, and the arguments of positions."""
        room, length = self.keys.shape[-3], at.shape[-1]
        left = window_in_ring(options.get("local_window_size"), room)
        if flag("batch_invariant", options.get("batch_invariant", False)):
            raise ValueError(
                "`batch_invariant` must be False in a ring, whose slots are in no order; got True. "
                "Make a cache that is no ring."
            )
        if tree is not None:
            raise ValueError(
                "`tree` must be None in a ring, whose slots are in no order; got an array. Make a "
                "cache that is no ring."
            )
        at, end = (x.reshape(-1, n) for x, n in ((at, length), (end, 1)))
        if left + length <= room:
            arrays, keys_at = extended, _held(end, room)
        else:
            # New tokens take slots that their first queries still see.
            arrays = (jnp.concatenate([x, y], 1) for x, y in zip(olds, news, strict=True))
            before, new_at = _held(at[:, :1], room), jnp.where(at < end, at, EMPTY)
            keys_at = jnp.concatenate([before, new_at], axis=1)
        where = dict(query_positions=at, key_value_positions=keys_at, is_causal=True)
        return arrays, where


def window_in_ring(window, room: int) -> int:
    """Return the tokens before its own that a query sees; raise if a ring does not hold them."""
    left = window_sides(window)[0]
    if left is None or left > room:
        raise ValueError(
            f"`local_window_size` must see at most {room} tokens back, the room of the ring; got "
            f"{window}. Make a cache that is no ring, or a larger one."
        )
    return left


# The position of a slot without a token: in the future of every query.
EMPTY = FAR


def _tree(parents, options) -> Tree:
    """Return the mask of a tree; raise if the options go by the order of its tokens."""
    window = options.get("local_window_size")
    if window is not None:
        raise ValueError(
            "`tree` must be None with `local_window_size`, which counts tokens in a row; got a "
            f"window of {window}. Check each branch of the draft by a call of its own."
        )
    return Tree(parents)


def _held(end: Int32[Array, "B 1"], room: int) -> Int32[Array, "B room"]:
    """Return the position that each slot of a ring holds after `end` tokens."""
    last = end - 1
    position = last - (last - _steps(room, 2)) % room
    return jnp.where(position < 0, EMPTY, position)


def _behind(start, length: int):
    """Return start, start + 1, .. along a new last axis."""
    return start[..., None] + _steps(length, start.ndim + 1)


def _steps(length: int, ndim: int):
    return jnp.arange(length, dtype=jnp.int32).reshape(*[1] * (ndim - 1), length)


def _write(x, slots, new):
    """Write `new` [B, T, K, H] into `x` [B, room, K, H] at slots [T] or [B, T], if inside."""

    def one(x, slots, new):
        return x.at[slots].set(new.astype(x.dtype), mode="drop", unique_indices=True)

    if slots.ndim == 1:
        return jax.vmap(one, in_axes=(0, None, 0))(x, slots, new)
    return jax.vmap(one)(x, _beside(slots, x), new)


def _write_row(x, slots, new):
    """Write `new` as `_write` does into slots [T] in a row.

    XLA makes it one copy on a GPU, where a scatter takes an index for each token.
    """
    room, length = x.shape[1], new.shape[1]
    if not length:
        return x
    first = jnp.minimum(slots[0], room - length)
    old = lax.dynamic_slice_in_dim(x, first, length, axis=1)
    # Where there is no room, the last slots hold `beyond` older tokens, and new ones as they fit.
    beyond = slots[0] - first
    new = jnp.roll(new.astype(x.dtype), beyond, axis=1)
    new = jnp.where((_steps(length, 1) < beyond)[:, None, None], old, new)
    return lax.dynamic_update_slice_in_dim(x, new, first, axis=1)


def _beside(new, x):
    """Return `new` with its batch and heads on the devices as in `x`, under Explicit axes."""
    where = jax.typeof(x).sharding
    if AxisType.Explicit not in where.mesh.axis_types:
        return new
    batch, _, heads, _ = (*where.spec, *[None] * 4)[:4]
    spec = PartitionSpec(batch, None, heads) if new.ndim == 4 else PartitionSpec(batch)
    return jax.sharding.reshard(new, NamedSharding(where.mesh, spec))


def _moved(x, start, path):
    """Return `x` [room, ..] with the rows start + path moved to start, start + 1, .."""
    slots = _behind(start, path.shape[0])
    return x.at[slots].set(x[start + path], mode="drop", unique_indices=True)


def _sequence_sharding(sharding: NamedSharding | None, axes: int) -> NamedSharding | None:
    """Return the sharding of the first `axes` axes."""
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:axes]))
