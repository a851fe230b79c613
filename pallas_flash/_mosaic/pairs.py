"""Numbers of pairs by tiles, which copies bring to shared memory: a bias, and masks as bits.

Read where they lie in device memory, a tile takes eight cache lines for each 128 bytes of a warp,
and all wait for the memory to answer.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._masks import Mask, Tiling
from pallas_flash._mosaic import common, ptx
from pallas_flash._mosaic.options import Bits, held
from pallas_flash._mosaic.tiles import StreamRoom, has_pairs
from pallas_flash._problem import Problem

plgpu = common.plgpu


class Owners(NamedTuple):
    """Who has numbers of their own in an array [instances and examples, heads, T, S].

    Attributes:
        batch: the examples of an instance.
        instances: whether instances have.
        examples: whether examples have.
        heads: whether heads have.
    """

    batch: int
    instances: bool
    examples: bool
    heads: bool

    @classmethod
    def of(cls, x, batch: int) -> "Owners":
        """For an array whose first axes are instances, examples and heads."""
        return cls(batch, *(n > 1 for n in x.shape[:3]))

    def at(self, b, h):
        """Where example b, counted over all instances, and a head are in the array."""
        if not self.examples:
            b = common.quotient(b, self.batch) if self.instances else 0
        elif not self.instances:
            b = common.remainder(b, self.batch)
        return b, h if self.heads else 0


def without_bias(shared):
    """What `shared_arrays` returned without the bias, and that, as a kernel takes it."""
    scale, extras = shared
    bias = extras.scores.bias.array
    scores = dataclasses.replace(extras.scores, bias=None)
    return (scale, extras._replace(scores=scores)), bias.astype(held(bias.dtype))


def without_masks(shared):
    """What `shared_arrays` returned without mask arrays that have queries and keys, and these.

    What else of the mask has no arrays the first of them has in it then.
    """
    scale, extras = shared
    leaves = extras.mask.leaves
    taken = [leaf.pairs.array for leaf in leaves if has_pairs(leaf)]
    rest = tuple(leaf for leaf in leaves if not has_pairs(leaf))
    if taken:
        known = Mask(tuple(leaf for leaf in rest if not jax.tree.leaves(leaf)))
        shape = 1, 1, 1, *taken[0].shape[3:]
        q, k = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (3, 4))
        allowed = known.allowed(jnp.int32(0), jnp.int32(0), q, k)
        # None where all are.
        taken[0] = taken[0] if allowed is None else taken[0] & allowed
        rest = tuple(leaf for leaf in rest if jax.tree.leaves(leaf))
    return (scale, extras._replace(mask=Mask(rest))), taken


def rows_of_one_axis(x):
    """An array as copies take it: instances and examples are one axis."""
    return x.reshape(-1, *x.shape[2:])


def words_of(x, axis: int, columns: Tiling):
    """Bools as copies take them: bits along an axis of 2 or 3, in words [.., words, positions].

    Copies take rows of a multiple of 16 bytes: there are positions that nobody reads.
    """
    words = rows_of_one_axis(Bits.along(axis, columns).of(x))
    words = jnp.swapaxes(words, 2, 3) if axis == 3 else words
    return jnp.pad(words, [(0, 0)] * 3 + [(0, -words.shape[3] % 4)])


class MaskTiles(NamedTuple):
    """How tiles of masks as bits are found, for who streams keys past queries.

    Attributes:
        slots: in which a program has tiles one after the other.
        owners: of each array.
    """

    slots: int
    owners: tuple[Owners, ...]

    def memory(self, words: int, rows: int):
        """Shared memory for tiles of so many words of each row."""
        return plgpu.SMEM((len(self.owners), self.slots, words, rows), jnp.uint32)

    def slot(self, i):
        """That of the i-th tile that a program has."""
        return common.remainder(i, self.slots)

    def copy(self, refs, memory, i, b, h, first_row, first_key):
        """Copies the i-th tile that a program has to its slot, as soon as that is free."""
        common.Ring(self.slots).refill(i, memory["bits_free"])
        slot, sm = self.slot(i), memory["bits_sm"]
        *_, words, rows = sm.shape
        place = pl.ds(common.quotient(first_key, ptx.BITS), words), pl.ds(first_row, rows)
        for n, (owners, ref) in enumerate(zip(self.owners, refs, strict=True)):
            tile = ref.at[(*owners.at(b, h), *place)]
            plgpu.copy_gmem_to_smem(tile, sm.at[n, slot], memory["bits_full"].at[slot])

    def read(self, memory, i, first_row):
        """Bools [64, n] for each array, of a warpgroup whose rows begin there in the program."""
        slot = self.slot(i)
        places = (memory["bits_sm"].at[n, slot] for n in range(len(self.owners)))
        return [ptx.bits_of_tile(place, first_row) for place in places]


class Streams(NamedTuple):
    """What streams past keys that stay, beside queries.

    Attributes:
        slots: in which tiles lie one after the other; 0 if nothing streams.
        bias: the owners of a bias in 16 bits; None if it is read in device memory, or there is
            none.
        masks: those of masks as bits.
    """

    slots: int = 0
    bias: Owners | None = None
    masks: tuple[Owners, ...] = ()

    @classmethod
    def of(cls, problem: Problem, shared, room: StreamRoom, q: Tiling):
        """What streams, what is left of `shared_arrays`, and arrays as copies take them."""
        arrays, bias, masks = [], None, []
        if room.bias:
            shared, x = without_bias(shared)
            bias = Owners.of(x, problem.batch)
            arrays.append(rows_of_one_axis(x))
        if room.masks:
            shared, masks = without_masks(shared)
            arrays += [words_of(x, 2, q) for x in masks]
        owners = tuple(Owners.of(x, problem.batch) for x in masks)
        return cls(room.slots, bias, owners), shared, arrays

    @property
    def arrays(self) -> int:
        """How many there are."""
        return (self.bias is not None) + len(self.masks)

    def memory(self, dtype, q: Tiling, warpgroups: int) -> dict[str, Any]:
        """Shared memory and barriers."""
        bias, bits, width = None, None, ptx.COLUMNS
        if self.bias is not None:
            shape = self.slots, warpgroups, q.block, width
            bias = plgpu.SMEM(shape, dtype, transforms=ptx.BLOCKS)
        if self.masks:
            shape = len(self.masks), self.slots, q.block // ptx.BITS, warpgroups * width
            bits = plgpu.SMEM(shape, jnp.uint32)
        copies = warpgroups * (self.bias is not None) + len(self.masks)
        return dict(
            bias_sm=bias,
            bits_sm=bits,
            pairs_full=common.barriers(self.slots, copies) if self.arrays else None,
            pairs_free=common.barriers(self.slots, warpgroups) if self.arrays else None,
        )

    def copy(self, refs, memory, j, b, h, first_query, first_key):
        """Copies the tile of step j to its slot, as soon as that is free."""
        if not self.arrays:
            return
        ring, refs = common.Ring(self.slots), list(refs)
        ring.refill(j, memory["pairs_free"])
        slot = ring(j)
        full = memory["pairs_full"].at[slot]
        if self.bias is not None:
            ref, place = refs.pop(0), memory["bias_sm"].at[slot]
            warpgroups, rows, width = place.shape
            for n in range(warpgroups):
                at = *self.bias.at(b, h), pl.ds(first_query, rows)
                keys = pl.ds(first_key + n * width, width)
                plgpu.copy_gmem_to_smem(ref.at[(*at, keys)], place.at[n], full)
        for n, (owners, ref) in enumerate(zip(self.masks, refs, strict=True)):
            place = memory["bits_sm"].at[n, slot]
            words, keys = place.shape
            first = common.quotient(first_query, ptx.BITS)
            at = *owners.at(b, h), pl.ds(first, words), pl.ds(first_key, keys)
            plgpu.copy_gmem_to_smem(ref.at[at], place, full)


class InSlot(NamedTuple):
    """What a warpgroup reads of the tile of step j, whose rows are its 64 keys."""

    streams: Streams
    memory: dict[str, Any]
    j: Any
    warpgroup: Any

    @property
    def _slot(self):
        return common.Ring(self.streams.slots)(self.j)

    def wait(self):
        """Until it is there."""
        if self.streams.arrays:
            plgpu.barrier_wait(self.memory["pairs_full"].at[self._slot])

    def free(self):
        """Reports that it was read."""
        if self.streams.arrays:
            ptx.fence()
            plgpu.barrier_arrive(self.memory["pairs_free"].at[self._slot])

    def with_bias(self, options):
        """`ExampleOptions` with the tile's bias."""
        if self.streams.bias is None:
            return options
        place = self.memory["bias_sm"].at[self._slot, self.warpgroup]
        return options.with_bias(ptx.load_transposed(place))

    def masks(self) -> list:
        """Bools of the tile for each mask array."""
        first = self.warpgroup * ptx.COLUMNS
        places = (self.memory["bits_sm"].at[n, self._slot] for n in range(len(self.streams.masks)))
        return [ptx.bits_of_tile(place, first) for place in places]
