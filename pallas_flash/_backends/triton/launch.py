"""The launch of a kernel, and the operands that all kernels have: tables of a mask, and arrays."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash._backends.triton.spec import KernelSpec
from pallas_flash._jax import compat
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.problem import Extras
from pallas_flash._problem.traversal import Sparsity


def whole(x) -> tuple:
    """Return an array that every program gets whole, and its spec; the kernel indexes it."""
    return x, pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def launch(kernel, operands, outputs, *, spec: KernelSpec, grid, tile, **options):
    """Call `pl.pallas_call` for a kernel of this package.

    Args:
        kernel: takes `spec` and `options` as keywords; its name is the name in a profile.
        operands: (array, BlockSpec) of each.
        outputs: (shape, dtype, BlockSpec) of each.
        spec: what the kernel knows when it is compiled.
        grid: axis 0 varies fastest.
        tile: the tile, which has the number of warps and stages.
        **options: further keywords for the kernel.
    """

    def body(*refs):
        # In x64 mode, Python's numbers would make the kernel count in int64 and round from float64.
        with jax.enable_x64(False):
            kernel(*refs, spec=spec, **options)

    body.__name__ = body.__qualname__ = kernel.__name__
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[block for _, block in operands],
        out_specs=[block for *_, block in outputs],
        out_shape=[compat.out_shape(shape, dtype) for shape, dtype, _ in outputs],
        interpret=spec.interpret,
        name=kernel.__name__,
        compiler_params=None
        if spec.interpret
        else compat.compiler_params(tile.num_warps, tile.num_stages),
    )(*(x for x, _ in operands))


def kernel_arrays(extras: Extras) -> list:
    """Return its arrays as kernels take them: bools as int8, because bools have no pointers."""
    return [x.astype(jnp.int8) if x.dtype == jnp.bool_ else x for x in jax.tree.leaves(extras)]


def table_operands(extras: Extras, table, row, heads: int | None = None) -> list:
    """Return the operands after the common ones: the table, then the arrays of extras.

    Args:
        extras: every program gets its arrays whole.
        table: the table of `make_spec`.
        row: maps grid indices to the batch element, the block of heads and the tile.
        heads: the heads of a block; None means that a program has one head.
    """
    arrays = [whole(x) for x in kernel_arrays(extras)]
    if table is None:
        return arrays
    batch, by_head = table.shape[0] > 1, table.shape[1] > 1

    def index(*ids):
        b, h, tile = row(*ids)
        return (b if batch else 0, h if by_head else 0, tile, 0)

    block = (None, heads if by_head else None, None, table.shape[-1])
    return [(table, pl.BlockSpec(block, index)), *arrays]


def load_tables(refs, spec: KernelSpec, streamed: Tiling):
    """Return the tiles to visit, as a function of the head, and the extras of `table_operands`."""
    if spec.sparsity is Sparsity.DENSE:
        return lambda g: (0, 0, streamed.count, streamed.count), spec.load_extras(refs)
    table_ref, *refs = refs

    def tiles(*row):
        if spec.sparsity is Sparsity.LISTS:
            return table_ref[*row, 0], table_ref[*row, 1], lambda t: table_ref[*row, 2 + t]
        return [table_ref[*row, i] for i in range(4)]

    if len(table_ref.shape) > 1:
        # A program has several heads, and each head has its own tiles.
        return tiles, spec.load_extras(refs)
    row = tiles()
    return lambda g: row, spec.load_extras(refs)
