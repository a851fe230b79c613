"""Converts Flax's masks, biases and batch axes to those of `pallas_flash.attention`."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from pallas_flash import _validate
from pallas_flash._checks import array, of_dtype
from pallas_flash._context.parts import device
from pallas_flash._mask_objects import Joinable
from pallas_flash._masks import Mask


def is_object(mask) -> bool:
    return isinstance(mask, (Mask, Joinable))


def as_bool(mask) -> Any:
    """Return an array mask as booleans, True where it is not zero."""
    return mask if mask is None or is_object(mask) else jnp.asarray(mask).astype(bool)


def place_in_sequence(sequence_axis, length: int) -> tuple[Array | int, int]:
    """Return the position of this device's first token, and the length of the whole sequence."""
    along = _validate.along(sequence_axis)
    if along is None:
        return 0, length
    here = device(along)
    return here.index * length, here.number * length


def merge_scores(name: str, x, scores_shape: Sequence[int]):
    """Return a bias or a mask for scores [*batch, N, T, S] with one batch axis.

    Mask objects stay as they are. The check is here and not in `attention`, so that messages show
    the caller's shapes.
    """
    if x is None or is_object(x):
        return x
    x = array(name, x)
    check_broadcasts(name, x, scores_shape)
    return merge_batch(x, scores_shape[:-3])


def merge_full(name: str, x, batch: Sequence[int], rest: tuple[int, ...]):
    """Return an int32 array [*#batch, *rest] as [prod(batch), *rest], broadcast."""
    if x is None:
        return None
    x = of_dtype(name, x, "int32")
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
