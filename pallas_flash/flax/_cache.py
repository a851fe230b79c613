"""The cache of keys and values of earlier tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax.core import Tracer
from jaxtyping import Array

from pallas_flash._checks import is_int


class Cache(NamedTuple):
    """The cache of one layer.

    Attributes:
        keys: [*batch, room, K, H].
        values: [*batch, room, K, H].
        taken: the number of tokens in the cache, int32.
    """

    keys: nnx.Cache[Array]
    values: nnx.Cache[Array]
    taken: nnx.Cache[Array]

    @classmethod
    def empty(
        cls, input_shape: Sequence[int], features: int, *, heads: Sequence[int], dtype: Dtype
    ) -> "Cache":
        """Return an empty cache for inputs [*batch, length, features]; `heads` are K and H."""
        sizes = input_shape if isinstance(input_shape, (tuple, list)) else ()
        right = all(is_int(n) and n >= 0 for n in sizes)
        if not right or len(sizes) < 2 or sizes[-1] != features:
            raise ValueError(
                f"`input_shape` must be sizes (*batch, length, {features}); got "
                f"{input_shape!r:.80}. Give the shape of the longest input."
            )
        dtype = jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"`dtype` must be floating point; got {dtype}. Leave it out for that of the layer."
            )
        shape = (*sizes[:-1], *heads)
        return cls(
            nnx.Cache(jnp.zeros(shape, dtype)),
            nnx.Cache(jnp.zeros(shape, dtype)),
            nnx.Cache(jnp.zeros((), jnp.int32)),
        )

    def start(self, x: Array) -> tuple[Array, Any]:
        """Return the number of cached tokens, and whether `x` overflows the cache while traced."""
        *batch, room, _, _ = self.keys.shape
        if list(x.shape[:-2]) != batch:
            raise ValueError(
                f"`x` must have the batch axes {tuple(batch)} of the cache; got x.shape={x.shape}. "
                "Call `init_cache` for this batch."
            )
        start = self.taken[...]
        full = start + x.shape[-2] > room
        traced = isinstance(full, Tracer)
        if x.shape[-2] > room or (not traced and full):
            raise ValueError(
                f"`x` must fit in what is left of the cache; got {x.shape[-2]} tokens with "
                f"{'some' if traced else start} of {room} taken. Call `init_cache` with a greater "
                "length."
            )
        return start, full

    def extended(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Return all keys and values, the new ones after the cached ones."""
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(
                cache[...], new.astype(cache.dtype), self.taken[...], axis=-3
            )
            for cache, new in ((self.keys, k), (self.values, v))
        )
        return keys, values

    def keep(self, extended: tuple[Array, Array], taken: Array | int) -> None:
        """Store the extended cache; call it after all checks."""
        self.keys[...], self.values[...] = extended
        self.taken[...] = jnp.minimum(taken, self.keys.shape[-3])
