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

from pallas_flash._blocks import Tiling
from pallas_flash._masks import Mask
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


class Masks(NamedTuple):
    """Mask arrays as bits: who owns each, and its tiles, [words, 64 n] of so many rows.

    A tile has its columns along the bits of words, and its rows lie beside each other.
    """

    owners: tuple[Owners, ...] = ()

    @classmethod
    def of(cls, arrays, batch: int) -> "Masks":
        """Of arrays that `without_masks` returned."""
        return cls(tuple(Owners.of(x, batch) for x in arrays))

    def memory(self, slots: int, columns: int, rows: int):
        """Shared memory; None if there are no masks."""
        shape = len(self.owners), slots, columns // ptx.BITS, rows
        return plgpu.SMEM(shape, jnp.uint32) if self.owners else None

    def copy(self, refs, sm, slot, b, h, first_column, first_row, full):
        """Starts the copies of a tile, which report to `full`."""
        for n, (owners, ref) in enumerate(zip(self.owners, refs, strict=True)):
            words, rows = sm.shape[2:]
            place = pl.ds(common.quotient(first_column, ptx.BITS), words), pl.ds(first_row, rows)
            plgpu.copy_gmem_to_smem(ref.at[(*owners.at(b, h), *place)], sm.at[n, slot], full)

    def read(self, sm, slot, first_row) -> list:
        """Bools [64, columns] of each, of rows that begin there in the tile."""
        tiles = (sm.at[n, slot] for n in range(len(self.owners)))
        return [ptx.bits_of_tile(tile, first_row) for tile in tiles]


class Streams(NamedTuple):
    """What streams past keys that stay, beside queries.

    Attributes:
        slots: in which tiles lie one after the other; 0 if nothing streams.
        bias: the owners of a bias in 16 bits; None if it is read in device memory, or there is
            none.
        masks: those that are copied.
    """

    slots: int = 0
    bias: Owners | None = None
    masks: Masks = Masks()

    @classmethod
    def of(cls, problem: Problem, shared, room: StreamRoom, q: Tiling):
        """What streams, what is left of `shared_arrays`, and arrays as copies take them."""
        arrays, bias, masks = [], None, []
        if room.bias:
            shared, x = without_bias(shared)
            bias = Owners.of(x, problem.batch)
            arrays.append(rows_of_one_axis(x))
        if room.slots:
            shared, masks = without_masks(shared)
            arrays += [words_of(x, 2, q) for x in masks]
        return cls(room.slots, bias, Masks.of(masks, problem.batch)), shared, arrays

    @property
    def arrays(self) -> int:
        """How many there are."""
        return (self.bias is not None) + len(self.masks.owners)

    def memory(self, dtype, q: Tiling, warpgroups: int) -> dict[str, Any]:
        """Shared memory and barriers."""
        shape = self.slots, warpgroups, q.block, ptx.COLUMNS
        bias = None if self.bias is None else plgpu.SMEM(shape, dtype, transforms=ptx.BLOCKS)
        copies = warpgroups * (self.bias is not None) + len(self.masks.owners)
        return dict(
            bias_sm=bias,
            bits_sm=self.masks.memory(self.slots, q.block, warpgroups * ptx.COLUMNS),
            pairs_full=common.barriers(self.slots, copies) if self.slots else None,
            pairs_free=common.barriers(self.slots, warpgroups) if self.slots else None,
        )

    def copy(self, refs, memory, j, b, h, first_query, first_key):
        """Copies the tile of step j to its slot, as soon as that is free."""
        if not self.slots:
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
        self.masks.copy(refs, memory["bits_sm"], slot, b, h, first_query, first_key, full)


class InSlot(NamedTuple):
    """What a warpgroup reads of the tile of step j, whose rows are its 64 keys.

    By default nothing streams.
    """

    streams: Streams = Streams()
    memory: dict[str, Any] | None = None
    j: Any = 0
    warpgroup: Any = 0

    def _at(self, name: str):
        assert self.memory is not None
        return self.memory[name].at[common.Ring(self.streams.slots)(self.j)]

    def wait(self):
        """Until it is there."""
        if self.streams.slots:
            plgpu.barrier_wait(self._at("pairs_full"))

    def free(self):
        """Reports that it was read."""
        if self.streams.slots:
            ptx.fence()
            plgpu.barrier_arrive(self._at("pairs_free"))

    def with_bias(self, options):
        """`ExampleOptions` with the tile's bias."""
        if self.streams.bias is None:
            return options
        return options.with_bias(ptx.load_transposed(self._at("bias_sm").at[self.warpgroup]))

    def masks(self) -> list:
        """Bools of the tile for each mask array."""
        if not self.streams.slots or self.memory is None:
            return []
        slot, first = common.Ring(self.streams.slots)(self.j), self.warpgroup * ptx.COLUMNS
        return self.streams.masks.read(self.memory["bits_sm"], slot, first)
