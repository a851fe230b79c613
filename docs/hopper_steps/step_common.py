"""The layouts of tiles in registers and in shared memory, and the launch, of all steps."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

# In registers of a warpgroup: a tile of 64 rows as products leave it, and a number for each row.
TILE, ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
# In shared memory: rows of bfloat16 as copies write them and products read them.
OPERAND = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def along_rows(x, tile):
    """Return a tile of this shape whose rows are filled with one number of x each."""
    return lax.broadcast_in_dim(x, tile.shape, (0,))


def zeros(rows, columns):
    """Return a tile of zeros."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), TILE)


def before_any_key(rows):
    """Return the maximum and the sum of the weights of no keys, for each row."""
    m, l = jnp.full((rows,), -jnp.inf, jnp.float32), jnp.zeros((rows,), jnp.float32)
    return plgpu.layout_cast(m, ROW), plgpu.layout_cast(l, ROW)


def product(a, b, acc):
    """Return acc + a @ b, and wait for it; b is in shared memory, a there or in registers."""

    def run(acc_ref):
        acc_ref[...] = acc
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(run, plgpu.ACC(acc.shape, jnp.float32))


@plgpu.inline_mgpu(
    arg_types=(ROW,),
    return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
)
def any_below_one(_, x):
    """Return 1 in a warp that has a number below 1, otherwise 0: Pallas has no vote of a warp."""
    i32 = ir.IntegerType.get_signless(32)
    rows = [vector.extract(register, [], [0]) for register in (x < 1.0).registers.flat]
    below = nvvm.vote_sync(mgpu.c(-1, i32), arith.ori(*rows), nvvm.VoteSyncKind.any)
    return mgpu.FragmentedArray.splat(arith.extui(i32, below), (), is_signed=True)


def rescale(acc, alpha):
    """Return acc * alpha; a warp whose alpha are all 1 skips the multiplication."""
    factor = along_rows(alpha, acc)
    return lax.switch(any_below_one(alpha), [lambda: acc, lambda: acc * factor])


def hide_later_keys(s, first_query, first_key):
    """Return s, and -inf where the key comes after the query."""
    query, key = (plgpu.broadcasted_iota(jnp.int32, s.shape, n, layout=TILE) for n in (0, 1))
    return jnp.where(first_key + key <= first_query + query, s, -jnp.inf)


def operand(*shape):
    """Return a specification of shared memory for operands of products."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=OPERAND)


def barriers_of_cluster(count, arrivals, ctas):
    """Return a specification of barriers with this number of arrivals in each CTA of a cluster."""
    if ctas == 1:
        return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)
    axes = ("rank",)
    return plgpu.ClusterBarrier(collective_axes=axes, num_barriers=count, num_arrivals=arrivals)


def launch(kernel, *arrays, grid, warpgroups, scratch, cluster=()):
    """Return a kernel's output, which is like the last array.

    Args:
        kernel: called with references to the arrays, the output, and all scratch.
        *arrays: the inputs.
        grid: axes of CTAs by name, the first varies fastest.
        warpgroups: warpgroups of a CTA.
        scratch: specifications of shared memory and of barriers.
        cluster: how many CTAs a cluster has, on the axis "rank"; by default there is no such axis.

    Raises:
        ValueError: the last array is none of which all steps take blocks.
    """
    like = jax.ShapeDtypeStruct(arrays[-1].shape, arrays[-1].dtype)
    _, length, _, head_dim = like.shape
    if length % 256 or head_dim not in (64, 128) or like.dtype != jnp.bfloat16:
        raise ValueError(
            "q, k and v must be bfloat16 [B, T, N, H] with T a multiple of 256 and H of 64 or 128; "
            f"got {like}."
        )
    return plgpu.kernel(
        kernel,
        out_type=like,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=cluster,
        cluster_names=("rank",) * len(cluster),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name="attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*arrays)
