"""Arrays over (q, k) that are copied to shared memory tile by tile: a bias, and masks as bits.

Read in device memory, a tile would take eight cache lines for each 128 bytes of a warp, and all
warps would wait for the memory to answer.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common, ptx
from pallas_flash._backends.mosaic.operands import Bits, stored_dtype
from pallas_flash._backends.mosaic.pipeline import Pipeline
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.checks import uses
from pallas_flash._problem.mask_leaves import MaskArray
from pallas_flash._problem.masks import Mask
from pallas_flash._problem.problem import Problem

plgpu = common.plgpu


def has_pairs(leaf) -> bool:
    """Return whether a leaf of a mask is an array that has queries and keys for axes."""
    return isinstance(leaf, MaskArray) and 1 not in leaf.pairs.shape[-2:]


class BroadcastAxes(NamedTuple):
    """Which axes of an array [instances and batch elements, heads, T, S] are not broadcast.

    Attributes:
        batch: batch elements of an instance.
        instances: whether instances have numbers of their own.
        elements: whether batch elements do.
        heads: whether heads do.
    """

    batch: int
    instances: bool
    elements: bool
    heads: bool

    @classmethod
    def from_array(cls, x, batch: int) -> "BroadcastAxes":
        """Return the axes of an array of instances, batch elements and heads."""
        return cls(batch, *(n > 1 for n in x.shape[:3]))

    def index_of(self, b, h):
        """Return where batch element b, counted over all instances, and a head are in the array."""
        if not self.elements:
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

    The first of them contains the parts of the mask that positions alone decide.
    """
    scale, extras = shared
    leaves = extras.mask.leaves
    taken = [leaf.pairs.array for leaf in leaves if has_pairs(leaf)]
    rest = tuple(leaf for leaf in leaves if not has_pairs(leaf))
    if taken:
        here = [_depends_on_positions(leaf) for leaf in rest]
        known = Mask(tuple(itertools.compress(rest, here)))
        shape = 1, 1, 1, *taken[0].shape[3:]
        q, k = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (3, 4))
        allowed = known.allowed(jnp.int32(0), jnp.int32(0), q, k)
        # None if all are allowed.
        taken[0] = taken[0] if allowed is None else taken[0] & allowed
        rest = tuple(leaf for leaf, known_here in zip(rest, here, strict=True) if not known_here)
    return (scale, extras._replace(mask=Mask(rest))), taken


def _depends_on_positions(leaf) -> bool:
    """Return whether neither arrays, batch elements nor heads decide what a leaf allows."""
    if jax.tree.leaves(leaf):
        return False
    program = jax.make_jaxpr(leaf.allowed)(*[jax.ShapeDtypeStruct((), jnp.int32)] * 4).jaxpr
    return not uses(program, 0) and not uses(program, 1)


def rows_of_one_axis(x):
    """Return an array as copies take it: with one axis for instances and batch elements."""
    return x.reshape(-1, *x.shape[2:])


def words_of(x, axis: int, columns: Tiling):
    """Return bools as copies take them: bits along axis 2 or 3, in words [.., words, positions].

    Positions are padded, because copies take rows of a multiple of 16 bytes.
    """
    words = rows_of_one_axis(Bits.along(axis, columns).pack(x))
    words = jnp.swapaxes(words, 2, 3) if axis == 3 else words
    return jnp.pad(words, [(0, 0)] * 3 + [(0, -words.shape[3] % 4)])


class Masks(NamedTuple):
    """Mask arrays as bits: the axes of each.

    A tile is [words, 64 n]: its columns lie along the bits of words, its rows side by side.
    """

    axes: tuple[BroadcastAxes, ...] = ()

    @classmethod
    def from_arrays(cls, arrays, batch: int) -> "Masks":
        """Return the masks of arrays that `without_masks` returned."""
        return cls(tuple(BroadcastAxes.from_array(x, batch) for x in arrays))

    def copy(self, refs, smem, stage, b, h, first_column, first_row, full):
        """Start the copies of a tile, which arrive at `full`."""
        for n, (axes, ref) in enumerate(zip(self.axes, refs, strict=True)):
            words, rows = smem.shape[2:]
            place = pl.ds(common.quotient(first_column, ptx.BITS), words), pl.ds(first_row, rows)
            plgpu.copy_gmem_to_smem(ref.at[(*axes.index_of(b, h), *place)], smem.at[n, stage], full)

    def read(self, smem, stage, first_row) -> list:
        """Return bools [64, columns] of each array, of a tile's rows from `first_row` on."""
        tiles = (smem.at[n, stage] for n in range(len(self.axes)))
        return [ptx.bits_of_tile(tile, first_row) for tile in tiles]


class Streams(NamedTuple):
    """The (q, k) arrays of which tiles are copied to shared memory.

    Attributes:
        bias: the axes of the bias; None if it is read in device memory, or there is none.
        masks: the mask arrays that are copied.
    """

    bias: BroadcastAxes | None = None
    masks: Masks = Masks()

    @classmethod
    def from_problem(
        cls, problem: Problem, shared, axis: int, columns: Tiling, *, bias: bool, masks: bool
    ) -> "tuple[Streams, Any, StreamedArrays]":
        """Return the streams, the rest of `shared_arrays`, and the arrays as copies take them.

        Args:
            problem: the call.
            shared: the result of `shared_arrays`.
            axis: the axis of a tile's columns, 2 or 3.
            columns: their tiles.
            bias: whether tiles of the bias are copied.
            masks: whether tiles of mask arrays are copied.
        """
        axes, array, bools = None, None, []
        if bias:
            shared, array = without_bias(shared)
            axes, array = BroadcastAxes.from_array(array, problem.batch), rows_of_one_axis(array)
        if masks:
            shared, bools = without_masks(shared)
        arrays = StreamedArrays(array, [words_of(x, axis, columns) for x in bools])
        return cls(axes, Masks.from_arrays(bools, problem.batch)), shared, arrays

    def copy(self, refs: "StreamedArrays", pipeline: Pipeline | None, j, b, h, query, key):
        """Copy the tiles from this query and key on to the stage of tile j, when that is empty."""
        if pipeline is None:
            return
        pipeline.producer_wait(j)
        stage, full = pipeline.stage(j), pipeline.filled(j)
        if self.bias is not None:
            smem = pipeline.smem["bias"].at[stage]
            warpgroups, rows, width = smem.shape
            for n in range(warpgroups):
                at = *self.bias.index_of(b, h), pl.ds(query, rows), pl.ds(key + n * width, width)
                plgpu.copy_gmem_to_smem(refs.bias.at[at], smem.at[n], full)
        self.masks.copy(refs.bits, pipeline.smem["bits"], stage, b, h, query, key, full)


class StreamedArrays(NamedTuple):
    """The arrays of `Streams` as copies take them: arrays outside of a kernel, references inside.

    Attributes:
        bias: [instances and batch elements, heads, T, S], or None.
        bits: `words_of` the mask arrays.
    """

    bias: Any = None
    bits: Any = ()


class StageView(NamedTuple):
    """The tiles that a warpgroup reads at step j, whose rows are its keys.

    By default nothing streams.
    """

    streams: Streams = Streams()
    pipeline: Pipeline | None = None
    j: Any = 0
    warpgroup: Any = 0

    def wait(self):
        """Wait until the tiles are in shared memory."""
        if self.pipeline is not None:
            self.pipeline.consumer_wait(self.j)

    def release(self):
        """Report that the tiles were read."""
        if self.pipeline is not None:
            ptx.fence()
            self.pipeline.consumer_release(self.j)

    def with_bias(self, options):
        """Return `ElementOptions` with the tile of the bias."""
        if self.pipeline is None or self.streams.bias is None:
            return options
        tile = self.pipeline.smem["bias"].at[self.pipeline.stage(self.j), self.warpgroup]
        return options.with_bias(ptx.load_transposed(tile))

    def masks(self) -> list:
        """Return bools of the tile for each mask array."""
        if self.pipeline is None:
            return []
        stage, first = self.pipeline.stage(self.j), self.warpgroup * ptx.COLUMNS
        return self.streams.masks.read(self.pipeline.smem["bits"], stage, first)
