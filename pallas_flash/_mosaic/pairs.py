"""Arrays over (q, k) that are copied to shared memory tile by tile: a bias, and masks as bits.

Read in device memory, a tile would take eight cache lines for each 128 bytes of a warp, and all
warps would wait for the memory to answer.
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
from pallas_flash._mosaic.operands import Bits, stored_dtype
from pallas_flash._mosaic.tiles import StreamRoom, has_pairs
from pallas_flash._problem import Problem

plgpu = common.plgpu


class BroadcastAxes(NamedTuple):
    """Which axes of an array [instances and batch elements, heads, T, S] are not broadcast.

    Attributes:
        batch: batch elements of an instance.
        instances: whether instances have numbers of their own.
        examples: whether batch elements do.
        heads: whether heads do.
    """

    batch: int
    instances: bool
    examples: bool
    heads: bool

    @classmethod
    def of(cls, x, batch: int) -> "BroadcastAxes":
        """Return those of an array whose first axes are instances, batch elements and heads."""
        return cls(batch, *(n > 1 for n in x.shape[:3]))

    def at(self, b, h):
        """Return where batch element b, counted over all instances, and a head are in the array."""
        if not self.examples:
            b = common.quotient(b, self.batch) if self.instances else 0
        elif not self.instances:
            b = common.remainder(b, self.batch)
        return b, h if self.heads else 0


def without_bias(shared):
    """Return the result of `shared_arrays` without the bias, and the bias as a kernel takes it."""
    scale, extras = shared
    bias = extras.scores.bias.array
    scores = dataclasses.replace(extras.scores, bias=None)
    return (scale, extras._replace(scores=scores)), bias.astype(stored_dtype(bias.dtype))


def without_masks(shared):
    """Return the result of `shared_arrays` without mask arrays over (q, k), and these arrays.

    The first of them contains the parts of the mask that have no arrays.
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
        # None if all are allowed.
        taken[0] = taken[0] if allowed is None else taken[0] & allowed
        rest = tuple(leaf for leaf in rest if jax.tree.leaves(leaf))
    return (scale, extras._replace(mask=Mask(rest))), taken


def rows_of_one_axis(x):
    """Return an array as copies take it: with one axis for instances and batch elements."""
    return x.reshape(-1, *x.shape[2:])


def words_of(x, axis: int, columns: Tiling):
    """Return bools as copies take them: bits along axis 2 or 3, in words [.., words, positions].

    Positions are padded, because copies take rows of a multiple of 16 bytes.
    """
    words = rows_of_one_axis(Bits.along(axis, columns).of(x))
    words = jnp.swapaxes(words, 2, 3) if axis == 3 else words
    return jnp.pad(words, [(0, 0)] * 3 + [(0, -words.shape[3] % 4)])


class Masks(NamedTuple):
    """Mask arrays as bits: the axes of each.

    A tile is [words, 64 n]: its columns lie along the bits of words, its rows side by side.
    """

    axes: tuple[BroadcastAxes, ...] = ()

    @classmethod
    def of(cls, arrays, batch: int) -> "Masks":
        """Return those of arrays that `without_masks` returned."""
        return cls(tuple(BroadcastAxes.of(x, batch) for x in arrays))

    def memory(self, slots: int, columns: int, rows: int):
        """Return the specification of shared memory; None if there are no masks."""
        shape = len(self.axes), slots, columns // ptx.BITS, rows
        return plgpu.SMEM(shape, jnp.uint32) if self.axes else None

    def copy(self, refs, sm, slot, b, h, first_column, first_row, full):
        """Start the copies of a tile, which arrive at `full`."""
        for n, (axes, ref) in enumerate(zip(self.axes, refs, strict=True)):
            words, rows = sm.shape[2:]
            place = pl.ds(common.quotient(first_column, ptx.BITS), words), pl.ds(first_row, rows)
            plgpu.copy_gmem_to_smem(ref.at[(*axes.at(b, h), *place)], sm.at[n, slot], full)

    def read(self, sm, slot, first_row) -> list:
        """Return bools [64, columns] of each array, of a tile's rows from `first_row` on."""
        tiles = (sm.at[n, slot] for n in range(len(self.axes)))
        return [ptx.bits_of_tile(tile, first_row) for tile in tiles]


class Streams(NamedTuple):
    """The arrays over (q, k) that stream past resident keys, beside queries.

    Attributes:
        slots: pipeline stages of their tiles; 0 if nothing streams.
        bias: the axes of a bias in 16 bits; None if it is read in device memory, or there is none.
        masks: the mask arrays that are copied.
    """

    slots: int = 0
    bias: BroadcastAxes | None = None
    masks: Masks = Masks()

    @classmethod
    def of(cls, problem: Problem, shared, room: StreamRoom, q: Tiling):
        """Return the streams, the rest of `shared_arrays`, and the arrays as copies take them."""
        arrays, bias, masks = [], None, []
        if room.bias:
            shared, x = without_bias(shared)
            bias = BroadcastAxes.of(x, problem.batch)
            arrays.append(rows_of_one_axis(x))
        if room.slots:
            shared, masks = without_masks(shared)
            arrays += [words_of(x, 2, q) for x in masks]
        return cls(room.slots, bias, Masks.of(masks, problem.batch)), shared, arrays

    @property
    def arrays(self) -> int:
        """The number of arrays."""
        return (self.bias is not None) + len(self.masks.axes)

    def memory(self, dtype, q: Tiling, warpgroups: int) -> dict[str, Any]:
        """Return the specification of shared memory and barriers."""
        shape = self.slots, warpgroups, q.block, ptx.COLUMNS
        bias = None if self.bias is None else plgpu.SMEM(shape, dtype, transforms=ptx.BLOCKS)
        copies = warpgroups * (self.bias is not None) + len(self.masks.axes)
        return dict(
            bias_sm=bias,
            bits_sm=self.masks.memory(self.slots, q.block, warpgroups * ptx.COLUMNS),
            pairs_full=common.barriers(self.slots, copies) if self.slots else None,
            pairs_free=common.barriers(self.slots, warpgroups) if self.slots else None,
        )

    def copy(self, refs, memory, j, b, h, first_query, first_key):
        """Copy the tiles of step j to their stage, as soon as it is empty."""
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
    """Views of the streams that a warpgroup reads at step j, in tiles whose rows are its keys.

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
        """Wait until the tiles are in shared memory."""
        if self.streams.slots:
            plgpu.barrier_wait(self._at("pairs_full"))

    def free(self):
        """Report that the tiles were read."""
        if self.streams.slots:
            ptx.fence()
            plgpu.barrier_arrive(self._at("pairs_free"))

    def with_bias(self, options):
        """Return `ExampleOptions` with the tile of the bias."""
        if self.streams.bias is None:
            return options
        return options.with_bias(ptx.load_transposed(self._at("bias_sm").at[self.warpgroup]))

    def masks(self) -> list:
        """Return bools of the tile for each mask array."""
        if not self.streams.slots or self.memory is None:
            return []
        slot, first = common.Ring(self.streams.slots)(self.j), self.warpgroup * ptx.COLUMNS
        return self.streams.masks.read(self.memory["bits_sm"], slot, first)
