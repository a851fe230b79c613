"""Parts of all Hopper kernels: index arithmetic, shared memory, and the launch.

A CTA has warpgroups of 128 threads. Consumer warpgroups compute; one producer warpgroup starts the
copies (TMA) of what streams past them to the stages of pipelines in shared memory, see `pipeline`.
In the backward consumers copy their part of the outer tile, except in clusters and, for keys, with
valid lengths.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import ptx
from pallas_flash._backends.mosaic.score_mask import Options
from pallas_flash._jax import compat, hardware
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import check_shared_memory

plgpu = compat.mosaic_gpu()

HOPPER = (9, 0)  # Its compute capability.
SMEM_ALIGNMENT = 1024  # Bytes.
# Numbers of 16 bits in a CTA's shared memory, less 3 KB for barriers and float32 rows.
ROOM = 224 * 1024 // 2

PARAMETERS = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    # Each row is in one warp, so that no sum or maximum takes shared memory.
    reduction_scratch_bytes=0,
)


def cond(pred, then, otherwise, *operands):
    """`lax.cond` for warpgroups. JAX runs `ptxas --version` for each bool that it would convert."""
    index = lax.select(pred, jnp.int32(1), jnp.int32(0))
    return lax.switch(index, (otherwise, then), *operands)


def when(pred):
    """`pl.when` for warpgroups, by `cond`."""
    return lambda then: cond(pred, then, lambda: None)


def positions(shape, row, column):
    """Return int32 indices of a tile's rows and of its columns, each of the tile's shape."""
    return ptx.positions(shape, 0, row), ptx.positions(shape, 1, column)


def along_rows(x, shape):
    """Return a tile whose rows are filled with one number of x each."""
    return lax.broadcast_in_dim(x, shape, (0,))


def along_columns(x, shape):
    """Return a tile whose columns are filled with one number of x each."""
    return lax.broadcast_in_dim(x, shape, (1,))


def block_of_columns(n, x, width: int = ptx.COLUMNS):
    """Return the slice of the n-th `width` columns; x is any int32, n may be one.

    A block may reach beyond the last column. Pallas refuses that where it knows the first one, so
    x hides it. Copies take the columns that exist, and fill the others with zeros.
    """
    return pl.ds(0 * x + n * width, width)


def remainder(x, n: int):
    """Return x % n for an int32 that is not negative."""
    return lax.rem(x, jnp.int32(n))


def quotient(x, n: int):
    """Return x // n for an int32 that is not negative."""
    return lax.div(x, jnp.int32(n))


def digits(number, counts):
    """Return the quotient, and the index of each axis; the last axis varies fastest."""
    remainders = []
    for count in reversed(counts):
        remainders.append(jnp.int32(0) if count == 1 else remainder(number, count))
        number = number if count == 1 else quotient(number, count)
    return number, remainders[::-1]


def blocks(dtype, *outer: int, rows: int, columns: int):
    """Return a specification of shared memory for tiles, in blocks of 64 columns."""
    shape = (*outer, -(-columns // ptx.COLUMNS), rows, ptx.COLUMNS)
    return plgpu.SMEM(shape, dtype, transforms=ptx.BLOCKS)


def strips(dtype, *outer: int, rows: int, columns: int, width: int = 0):
    """Return a specification of shared memory for tiles, as `ptx.load_strips` reads them.

    `width` is a strip's, by default the largest one.
    """
    width = width or ptx.strip_width(columns, dtype)
    shape = (*outer, columns // width, rows, width)
    return plgpu.SMEM(shape, dtype, transforms=ptx.strips(width, dtype))


def store(ref, at, x):
    """Store a tile at its place in device memory.

    Neighbouring threads write 16 bytes of 16-bit numbers. From JAX 0.12 on Pallas refuses stores of
    less than 32 bytes unless they are asked for.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref.at[at], x, optimized=False)
    else:
        ref[at] = x


RANK = "rank"  # The axis of a cluster.


def barriers(count: int, arrivals: int = 1, cluster_size: int = 1):
    """Return a specification of `count` barriers that complete after `arrivals` of each CTA.

    In a cluster of several CTAs an arrival is one at the barriers of all its CTAs.
    """
    if cluster_size == 1:
        return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)
    axes = (RANK,)
    return plgpu.ClusterBarrier(collective_axes=axes, num_barriers=count, num_arrivals=arrivals)


def smem_bytes(memory) -> int:
    """Return the bytes of shared memory that specifications take, of any tree.

    Each array begins at a multiple of `SMEM_ALIGNMENT`, and a barrier takes 8 bytes.
    """
    total = 0
    for x in jax.tree.leaves(memory):
        if isinstance(x, plgpu.Barrier | plgpu.ClusterBarrier):
            total += 8 * int(np.prod(x.num_barriers))
        else:
            size = math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
            total += -(-size // SMEM_ALIGNMENT) * SMEM_ALIGNMENT
    return total


def check_fits(kernel: str, tile, p: Problem, memory, taken: int, registers: int) -> None:
    """Raise ValueError unless a tile fits in a CTA's shared memory and in a thread's registers.

    Args:
        kernel: the kernel of the tile.
        tile: the tile.
        p: the call.
        memory: the specification of the shared memory.
        taken: registers that a thread needs for its tiles; 128 threads share 64 rows.
        registers: registers that it has.
    """
    width, limit = max(p.head_dim, p.value_dim), hardware.shared_memory_limit(HOPPER)
    check_shared_memory(kernel, tile, smem_bytes(memory), limit, width)
    if taken >= registers:
        raise ValueError(
            f"`config.{kernel}` must fit in a thread's {registers} registers; got {tile}, "
            f"whose sums and scores take {taken} at head dim {width}. Use smaller blocks or "
            "fewer warpgroups."
        )


def first_that_fits(memory, pipelines):
    """Return the first of these specifications that has room beside `memory`; None for none."""
    limit = hardware.shared_memory_limit(HOPPER)
    return next((x for x in pipelines if smem_bytes((memory, x)) <= limit), None)


# ------------------------------------------------------------------------------------------------
# Launching
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """The configuration that every kernel has, known at compile time.

    Attributes:
        options: scores, mask and dropout.
        masked: whether there is a mask.
        scattered: whether the mask is block-sparse.
        kv: the K/V blocks.
        groups: query heads that share a key/value head.
        tile: block sizes.
    """

    options: Options
    masked: bool
    scattered: bool
    kv: Tiling
    groups: int
    tile: Any


def launch(
    kernel,
    operands,
    *,
    outputs,
    memory,
    grid: dict[str, int],
    warpgroups: int,
    static,
    sums=(),
    cluster_size: int = 1,
    **parameters,
):
    """Launch one of this package's kernels through `pl.kernel`.

    The kernel is called as `kernel(*operands, *sums, *outputs, static=static, **memory)`, where
    each array has become a reference and all else is as it is here: any operand or sum may be a
    tree of arrays, and any memory a tree of specifications, with None where there is nothing.

    Args:
        kernel: its name is the name in a profile.
        operands: trees of arrays.
        outputs: (shape, dtype) of each.
        memory: shared memory and barriers by name.
        grid: names and lengths of its axes, the last varies fastest.
        warpgroups: warpgroups of a CTA.
        static: what the kernel knows at compile time.
        sums: trees of arrays in device memory that CTAs update: sums, a counter.
        cluster_size: CTAs of a cluster.
        **parameters: of the compiler, beside `PARAMETERS`.

    Returns:
        The sums, flattened, and the outputs, in a list.
    """
    inputs, tree = jax.tree.flatten((*operands, *sums))
    count = len(inputs) - len(jax.tree.leaves(sums))

    def body(*refs):
        arguments = jax.tree.unflatten(tree, refs[: len(inputs)])

        def with_memory(**memory):
            # In x64 mode, Python's numbers would make it count in int64 and round from float64.
            with jax.enable_x64(False):
                kernel(*arguments, *refs[len(inputs) :], static=static, **memory)

        pl.run_scoped(with_memory, **memory, collective_axes="warpgroup")

    run = pl.kernel(
        body,
        mesh=plgpu.Mesh(
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            cluster=() if cluster_size == 1 else (cluster_size,),
            cluster_names=() if cluster_size == 1 else (RANK,),
            num_threads=warpgroups,
            thread_name="warpgroup",
            kernel_name=kernel.__name__,
        ),
        compiler_params=dataclasses.replace(PARAMETERS, **parameters),
        name=kernel.__name__,
    )
    results = [*inputs[count:], *(pl.empty(shape, dtype) for shape, dtype in outputs)]

    def fill(refs):
        run(*inputs[:count], *refs)

    return pl.run_state(fill)(results)


def batch_instances(function, batch: int):
    """Return `function(shared, *arrays)` for which `jax.vmap` multiplies the batch axis.

    JAX has no batching rule of its own for such kernels.

    Args:
        function: takes trees of arrays. In `shared` they begin with an axis of instances, of length
            1 if all share it; the others and the results begin with the batch elements of all
            instances.
        batch: batch elements of an instance.
    """

    @jax.custom_batching.custom_vmap
    def call(shared, *arrays):
        return function(shared, *arrays)

    @call.def_vmap
    def _(size, mapped, shared, *arrays):
        mapped_shared, *mapped = mapped
        first, is_mapped = (jax.tree.leaves(x)[0] for x in (arrays, mapped))
        instances = first.shape[is_mapped] // batch

        def element(x, is_mapped):
            x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        def instance(x, is_mapped):
            if not is_mapped and len(x) == 1:
                return x
            x = x if is_mapped else x[None]
            return jnp.broadcast_to(x, (size, instances, *x.shape[2:])).reshape(-1, *x.shape[2:])

        shared = jax.tree.map(instance, shared, mapped_shared)
        results = call(shared, *jax.tree.map(element, arrays, tuple(mapped)))
        results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return call
