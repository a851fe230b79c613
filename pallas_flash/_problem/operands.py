"""Arrays that masks and scores read at indices, in one way for plain JAX and for kernels."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash._jax.symbolic import is_symbolic


class Divisible:
    """A dataclass in a problem that can be cut to a part of the problem."""

    # For type checkers: subclasses are dataclasses.
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def restrict(self, part) -> Any:
        """Return this for a `context.parts.Part`; its arrays have been cut to it already.

        In a part, positions count from 0 again, so that whatever holds positions shifts them.
        """
        del part
        return self


class Operand:
    """An array read at one integer index for each axis; indices broadcast.

    A user's function gets operands, because inside a kernel there is no array, only memory. An
    index outside of the array is moved to its edge. `dtype` is the dtype of the elements that are
    read, where memory holds another one.
    """

    def __init__(self, array, dtype=None):
        self._array = array
        self._dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self._array.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self._dtype or self._array.dtype

    @property
    def ndim(self) -> int:
        """The number of axes, and of indices to be given."""
        return len(self.shape)

    def __getitem__(self, index) -> jax.Array:
        index = index if isinstance(index, tuple) else (index,)
        integers = all(
            isinstance(i, (int, np.integer))
            or (isinstance(i, (jax.Array, np.ndarray)) and jnp.issubdtype(i.dtype, jnp.integer))
            for i in index
        )
        if len(index) != self.ndim or not integers:
            raise IndexError(
                f"an operand of shape {self.shape} must be indexed by {self.ndim} integers or "
                f"integer arrays; got {index}. Kernels read single elements: write out each index, "
                "such as `operand[h, q_pos]`."
            )
        return self._read(index).astype(self.dtype)

    def _read(self, index):
        return self._array[self._inside(index)]

    def _inside(self, index):
        return nearest(index, self.shape)

    def readable(self) -> "Operand":
        """Return this operand in a form that a user's function reads at any index."""
        return self


class Noted(Operand):
    """An operand, or an array, whose reads go through a function.

    Args:
        operand: the operand or the array.
        note: takes the index as a tuple and the numbers there, and returns the numbers to use.
    """

    def __init__(self, operand, note):
        super().__init__(operand)
        self._note = note

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return self._note(index, self._array[index])

    def readable(self):
        return Noted(_operand(self._array), self._note)


def nearest(index: tuple, shape: tuple[int, ...]) -> tuple:
    """Return the index inside of an array of this shape that is nearest to `index`."""
    return tuple(_nearest(i, n) for i, n in zip(index, shape, strict=True))


def _nearest(i, n: int):
    """Return the index of 0 .. n - 1 that is nearest to `i`, which may have any integer type."""
    if isinstance(i, (int, np.integer)):
        i = max(int(i), 0)
        return min(i, n - 1) if not is_symbolic(n) else jnp.minimum(jnp.int32(i), n - 1)
    # A smaller type could not hold n - 1, and int32 not every index of a larger one.
    least = jnp.uint32 if jnp.issubdtype(i.dtype, jnp.unsignedinteger) else jnp.int32
    i = i.astype(jnp.promote_types(i.dtype, least))
    return jnp.asarray(i.clip(0, n - 1), jnp.int32)


def readable(x) -> Any:
    """Return `x` for a user's function: an `Operand`, or the number if `x` is a scalar."""
    operand = _operand(x)
    return operand if operand.ndim else operand[()]


def _operand(x) -> Operand:
    return x.readable() if isinstance(x, Operand) else Operand(jnp.asarray(x))


class TileView(Operand):
    """A tile that was cut out of a (q, k) array; reads ignore indices and return the tile."""

    def __init__(self, array, shape):
        super().__init__(array)
        self._shape = shape

    @property
    def shape(self):
        return self._shape

    def __getitem__(self, index):
        return self._array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pairs(Divisible):
    """A (q, k) array: one number for each batch element, head, query and key.

    Its shape is [B | 1, N | 1, T | 1, S | 1].
    """

    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, b, h, q, k) -> jax.Array:
        """Return the numbers at indices that broadcast."""
        index = (b, h, q, k)
        return self.array[tuple(0 if n == 1 else i for n, i in zip(self.shape, index, strict=True))]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Positions(Divisible):
    """The positions of tokens in their sequence, where these are not their indices in the arrays.

    Attributes:
        query: int32 [B | 1, T].
        key_value: int32 [B | 1, S]; None if queries and keys are the same tokens.
    """

    query: Any
    key_value: Any = None

    @property
    def keys(self) -> Any:
        return self.query if self.key_value is None else self.key_value

    def query_positions(self, b, q) -> jax.Array:
        """Return the positions of queries, at indices that broadcast."""
        return self.query[0 if self.query.shape[0] == 1 else b, q]

    def key_positions(self, b, k) -> jax.Array:
        """Return the positions of keys, at indices that broadcast."""
        return self.keys[0 if self.keys.shape[0] == 1 else b, k]


class TokenPositions(NamedTuple):
    """The positions of the tokens of a call.

    Attributes:
        shift: the position of query 0, where it is known.
        offset: int32 [B], the positions of query 0; None if it is `shift`.
        positions: of all tokens, if arrays hold them; then there is no offset.
    """

    shift: int = 0
    offset: Any = None
    positions: Positions | None = None

    @property
    def moved(self) -> bool:
        """Whether positions may differ from indices."""
        return bool(self.shift) or self.offset is not None or self.positions is not None


def is_pairs(x) -> bool:
    """Whether `x` is `Pairs`, for `jax.tree.map`."""
    return isinstance(x, Pairs)


def pairs_of(tree) -> list[Pairs]:
    """Return all `Pairs` of a tree."""
    return list(filter(is_pairs, jax.tree.leaves(tree, is_leaf=is_pairs)))
