"""Converts Flax's masks, biases and batch axes to the form of `pallas_flash.attention`."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Shaped

from pallas_flash._arguments.attention import parse_sequence_axis
from pallas_flash._execution.context.parts import device
from pallas_flash._problem.checks import array, array_of_dtype, describe
from pallas_flash._problem.mask_objects import MaskObject


def as_bool(mask) -> Any:
    """Return an array mask as booleans, True where it is not zero."""
    return mask if mask is None or isinstance(mask, MaskObject) else jnp.asarray(mask).astype(bool)


def place_in_sequence(sequence_axis, length: int) -> tuple[Array | int, int]:
    """Return the position of this device's first token, and the length of the whole sequence."""
    along = parse_sequence_axis(sequence_axis)
    if along is None:
        return 0, length
    here = device(along)
    return here.index * length, here.number * length


def new_tokens(query, key, value, *, keys, values, ranks: Sequence[int]) -> tuple[Array, ...]:
    """Return the arrays of new tokens; raise unless a cache of `keys` and `values` can take them.

    `ranks` are those that arrays of tokens may have, [.., T, heads, head dim].
    """
    named = {"query": query, "key": key, "value": value}
    named = {name: array(name, x) for name, x in named.items()}
    query = named["query"]
    if query.ndim not in ranks:
        raise ValueError(
            f"`query` must have {' or '.join(map(str, ranks))} axes for this cache, the last ones "
            f"[T, N, H]; got query.shape={query.shape}. Give each token its heads."
        )
    for name, cached in (("query", None), ("key", keys), ("value", values)):
        x = named[name]
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"`{name}` must be floating point; got {x.dtype}. Cast it with `.astype`."
            )
        if cached is not None and x.shape != (*query.shape[:-2], *cached.shape[-2:]):
            raise ValueError(
                f"`{name}` must have shape {(*query.shape[:-2], *cached.shape[-2:])}, for the "
                f"tokens of `query` and the heads of the cache; got {x.shape}. Give each query "
                "one key and one value, or make a cache for these heads."
            )
    return tuple(named.values())


def spec_of(sharding, ndim: int) -> tuple:
    """Return the mesh axes that divide each of `ndim` axes [.., tokens, heads, head dim].

    They must not divide tokens or the head dim.
    """
    if sharding is None:
        return (None,) * ndim
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"`sharding` must be a `jax.sharding.NamedSharding`; got {describe(sharding)}. Make "
            "one of a mesh and a `PartitionSpec`."
        )
    spec = tuple(sharding.spec)
    padded = (*spec, *[None] * ndim)[:ndim]
    if len(spec) > ndim or padded[-3] or padded[-1]:
        raise ValueError(
            f"`sharding` must leave tokens and the head dim whole; got {spec} for {ndim} axes. "
            "Divide the heads, or the axes before the tokens."
        )
    return padded


def merge_scores(name: str, x, scores_shape: Sequence[int]) -> Any:
    """Return a bias or a mask for scores [*batch, N, T, S] with one batch axis.

    Mask objects stay as they are. The check is here and not in `attention`, so that messages show
    the caller's shapes.
    """
    if x is None or isinstance(x, MaskObject):
        return x
    x = array(name, x)
    check_broadcasts(name, x, scores_shape)
    return merge_batch(x, scores_shape[:-3])


def merge_full(name: str, x, batch: Sequence[int], rest: tuple[int, ...]) -> Any:
    """Return an int32 array [*#batch, *rest] as [prod(batch), *rest], broadcast."""
    if x is None:
        return None
    x = array_of_dtype(name, x, "int32")
    check_broadcasts(name, x, (*batch, *rest))
    return jnp.broadcast_to(x, (*batch, *rest)).reshape(math.prod(batch), *rest)


def merge_positions(x, batch: Sequence[int], length: int):
    """Return positions [*#batch, T] as int32 [B, T]; B is 1 if all sequences have the same."""
    x = check_positions(x, (*batch, length))
    x = jnp.broadcast_to(x.astype(jnp.int32), (*x.shape[:-1], length))
    return merge_batch(x[..., None, None], batch)[..., 0, 0]


def check_positions(x, shape: Sequence[int]) -> Array:
    """Return positions as an array; raise unless they are integers that broadcast to `shape`."""
    x = array("positions", x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(
            f"`positions` must be integers; got {x.dtype}. Cast them with `.astype(jnp.int32)`."
        )
    check_broadcasts("positions", x, shape)
    return x


def check_broadcasts(name: str, x: Shaped[Array, "..."], shape: Sequence[int]) -> None:
    """Raise if `x` does not broadcast to `shape`."""
    trailing = shape[len(shape) - x.ndim :]
    if x.ndim > len(shape) or any(a not in (1, b) for a, b in zip(x.shape, trailing, strict=True)):
        raise ValueError(
            f"`{name}` must broadcast to {tuple(shape)}; got {name}.shape={x.shape}. Give each "
            "axis that size or 1; missing ones are added in front."
        )


def merge_batch(
    x: Shaped[Array, "*#batch a b c"], batch: Sequence[int]
) -> Shaped[Array, "B a b c"]:
    """Merge batch axes: B is 1 where `x` has no batch axis above 1, else prod(batch).

    The last three axes are never expanded, so a mask [T, S] stays as small as it is.
    """
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    lead, rest = x.shape[:-3], x.shape[-3:]
    if any(size != 1 for size in lead):
        lead = tuple(batch)
        x = jnp.broadcast_to(x, lead + rest)
    return x.reshape(math.prod(lead), *rest)
