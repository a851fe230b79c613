"""What the kernels in Mosaic GPU share: how programs divide their work, and how they are launched.

A program has warpgroups, 128 threads each: some compute, one has little to do but to start the
copies of what they need next from device memory to shared memory. A copy reports to a barrier in
shared memory, at which those wait who need it; where it lies is a slot of a ring, and whoever has
used a slot reports to another barrier that it is free.
"""

import dataclasses
import functools
import heapq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash import _compat
from pallas_flash._masks import Mask, Tiling
from pallas_flash._problem import Problem
from pallas_flash._scores import LOG2E

plgpu = _compat.mosaic_gpu()

# The smallest scale used: -inf * 0 would be NaN where a score is masked, and this one still gives
# equal weights.
MIN_SCALE = 1e-30

# Bytes of keys and values that programs of different heads stream at the same time: so many stay in
# the L2 cache of an H100 (50 MB) beside all else.
L2_SHARE = 24 * 10**6

# The cores (SMs) of an H100 and of an H200. On a GPU with fewer, some programs start late.
CORES = 132

PARAMETERS = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    # Rows are in one warp each, so that no sum or maximum takes shared memory.
    reduction_scratch_bytes=0,
)


def factor(problem: Problem):
    """float32 [B]: what takes products of queries and keys to scores in base 2."""
    c = jnp.maximum(problem.scale, MIN_SCALE) * LOG2E
    # One for each example, so that an axis of `jax.vmap` can become one of examples.
    return jnp.broadcast_to(c.astype(jnp.float32), (problem.batch,))


def positions(shape, row, column):
    """int32 indices of a tile's rows and columns, each of its whole shape."""
    rows, columns = (
        plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
    )
    return rows + row, columns + column


def hide(mask: Mask, b, h, q_pos, k_pos, s):
    """Scores, -inf where the mask does not allow them."""
    return jnp.where(mask.allowed(b, h, q_pos, k_pos), s, -jnp.inf)


def along_rows(x, shape):
    """One number a row, as a tile."""
    return lax.broadcast_in_dim(x, shape, (0,))


def along_columns(x, shape):
    """One number a column, as a tile."""
    return lax.broadcast_in_dim(x, shape, (1,))


def copyable(x):
    """[B, T, N, H] with zeros behind, where T is no multiple of 8: copies of tiles want that."""
    missing = -x.shape[1] % 8
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x


def remainder(x, n: int):
    """The rest of x by n, for an int32 that is not negative."""
    return lax.rem(x, jnp.int32(n))


def quotient(x, n: int):
    """How often n is in x, likewise."""
    return lax.div(x, jnp.int32(n))


class Ring:
    """Which slot of shared memory the i-th tile of a program has."""

    def __init__(self, slots: int):
        self.slots = slots

    def __call__(self, i):
        return remainder(i, self.slots)

    def refill(self, i, free):
        """Waits until the slot of tile i is `free` of the tile that it had before."""
        # At first all slots are free.
        pl.when(i >= self.slots)(lambda: plgpu.barrier_wait(free.at[self(i)]))


# ------------------------------------------------------------------------------------------------
# Who does what
# ------------------------------------------------------------------------------------------------

# Columns of a program's list: where an item's query tile is, and its range of key tiles.
ITEM = ("b", "h", "q_tile", "start", "full_start", "full_stop", "stop")


def worklists(problem: Problem, batch: int, mask: Mask, q: Tiling, kv: Tiling) -> np.ndarray:
    """int32 [programs, 1 + items, len(ITEM)]: the items of each program, behind their number.

    Programs stay on their core, as a dynamic scheduler would have it: who is free takes the next
    item. Long ones come first, of as many heads at a time as share the L2 cache. An order that
    does not look at the lengths can resonate with them: measured with a prototype on an H200,
    causal, one lost 40 %, and this one gains 6 to 18 % against a program for each tile.
    """
    p = problem
    ranges = np.asarray(mask.kv_ranges(q, kv))
    streamed = p.kv_len * (p.head_dim + p.value_dim) * p.dtype.itemsize
    heads = max(1, int(L2_SHARE // streamed)) * p.groups if mask else 1
    return _worklists(batch, p.num_heads, heads, ranges.tobytes(), ranges.shape)


@functools.lru_cache(maxsize=64)
def _worklists(batch: int, num_heads: int, heads: int, ranges: bytes, shape) -> np.ndarray:
    table: Any = np.frombuffer(ranges, np.int32).reshape(shape)
    rows = batch * num_heads
    heads = min(heads, rows)
    lengths = table[0, :, 3] - table[0, :, 0]
    order = np.argsort(-lengths, kind="stable")
    programs = min(CORES, rows * len(order))
    items: list[list[tuple]] = [[] for _ in range(programs)]
    # When each program is free, counted in key tiles.
    free = [(0.0, i) for i in range(programs)]
    for first in range(0, rows, heads):
        for tile in order:
            for row in range(first, min(first + heads, rows)):
                time, program = heapq.heappop(free)
                items[program].append((*divmod(row, num_heads), tile, *table[0, tile]))
                # Starting an item and storing its output take as long as about 1.5 key tiles.
                heapq.heappush(free, (time + lengths[tile] + 1.5, program))
    lists = np.zeros((programs, 1 + max(map(len, items)), len(ITEM)), np.int32)
    for program, mine in enumerate(items):
        lists[program, 0, 0] = len(mine)
        lists[program, 1 : 1 + len(mine)] = mine
    return lists


def for_each_item(list_ref, program, body, carry):
    """Runs `carry = body(i, item, carry)` over a program's list; an item is loaded one ahead."""

    def load(i):
        return [plgpu.load(list_ref.at[program, i, column]) for column in range(len(ITEM))]

    count = plgpu.load(list_ref.at[program, 0, 0])

    def step(i, state):
        item, carry = state
        # Past the last one it loads the last row that there is.
        following = load(jnp.minimum(i + 2, list_ref.shape[1] - 1))
        return following, body(i, item, carry)

    return lax.fori_loop(jnp.int32(0), count, step, (load(jnp.int32(1)), carry))[1]


# ------------------------------------------------------------------------------------------------
# Launching
# ------------------------------------------------------------------------------------------------


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
    **parameters,
):
    """`pl.kernel` for this package's kernels.

    Args:
        kernel: takes references to operands, sums and outputs, and as keywords `static` and its
            shared memory; its name is the name in a profile.
        operands: arrays.
        outputs: (shape, dtype) of each.
        memory: shared memory and barriers by name; None is handed on.
        grid: names and lengths of its axes, the first varies fastest.
        warpgroups: of a program.
        static: what the kernel knows at compile time.
        sums: shapes of float32 arrays in device memory to which all programs add.
        **parameters: of the compiler, beside `PARAMETERS`.

    Returns:
        The sums and the outputs, in a list.
    """
    nothing = {name: None for name, x in memory.items() if x is None}

    def body(*refs):
        def with_memory(**memory):
            # In x64 mode, Python's numbers would make it count in int64 and round from float64.
            with jax.enable_x64(False):
                kernel(*refs, static=static, **memory, **nothing)

        existing = {name: x for name, x in memory.items() if x is not None}
        pl.run_scoped(with_memory, **existing, collective_axes="warpgroup")

    run = pl.kernel(
        body,
        mesh=plgpu.Mesh(
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            num_threads=warpgroups,
            thread_name="warpgroup",
            kernel_name=kernel.__name__,
        ),
        compiler_params=dataclasses.replace(PARAMETERS, **parameters),
        name=kernel.__name__,
    )
    results = [
        *(jnp.zeros(shape, jnp.float32) for shape in sums),
        *(pl.empty(shape, dtype) for shape, dtype in outputs),
    ]

    def fill(refs):
        run(*operands, *refs)

    return pl.run_state(fill)(results)


def by_example(function):
    """`function(*arrays)` for arrays that all begin with an axis of examples, as its results do.

    An axis of `jax.vmap` becomes one of examples: JAX has no rule of its own for such kernels.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        return function(*arrays)

    @call.def_vmap
    def _(size, mapped, *arrays):
        arrays = [
            x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_mapped in zip(arrays, mapped, strict=True)
        ]
        results = call(*(x.reshape(-1, *x.shape[2:]) for x in arrays))
        results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return call
