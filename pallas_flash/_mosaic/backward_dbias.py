"""dbias: a tile of the bias stays, and all that it is broadcast over is streamed past it.

    s   = q @ k.T                       dp = do @ v.T                   [64, block_kv] a warpgroup
    p   = exp2(c * s - lse_log2)        see `backward_common`
    ds  = p * (dropout(dp) - delta)     through the derivative of the scores
    acc = acc + ds

A pass of its own: the others meet the examples and heads that share a number of the bias in
programs of their own. Here the tile of the sum stays in registers, and is stored once. A step has
an example, a head, a query tile and a key tile; those of the axes that the bias has are the
program's. Where queries or keys share a number, tiles are added up as they are, and XLA adds the
rows or columns of the sum.

The tile of the bias is the same in all steps: a program reads it once, to shared memory. It has two
computing warpgroups with 64 queries each, which never wait for each other, and one that loads. What
the mask leaves out whole is not in a program's list of steps.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._blocks import BlockClasses, Tiling, lists
from pallas_flash._dropout import rescaled
from pallas_flash._masks import Mask
from pallas_flash._mosaic import backward_common as shared
from pallas_flash._mosaic import common, ptx, work
from pallas_flash._mosaic.options import shared_arrays
from pallas_flash._mosaic.tiles import DbiasTile, padded
from pallas_flash._operands import Pairs
from pallas_flash._problem import Problem
from pallas_flash._scores import LogSum

plgpu = common.plgpu

WARPGROUPS, ROWS = 2, 64
BLOCK_Q = WARPGROUPS * ROWS
# Registers of a thread that computes, and of one that loads.
REGISTERS = 240, 24


@dataclasses.dataclass(frozen=True)
class Static(shared.Static):
    """What the kernel knows when it is compiled; its programs are those of tiles of the bias.

    Attributes:
        own: of examples, heads, query tiles and key tiles how many the bias has of its own.
        streamed: over how many it is broadcast; where it has its own 1.
        shares: into how many the steps of a tile are shared out.
    """

    own: tuple[int, ...]
    streamed: tuple[int, ...]
    shares: int


class Steps:
    """What streams past a program.

    Args:
        static: the kernel's.
        table_ref: of `_table`, with all its rows on one axis, if there is a mask.
        number: the program's.
    """

    def __init__(self, static: Static, table_ref, number):
        self._static, self._table_ref = static, table_ref
        self.outer, self.place = common.digits(number, static.own)
        self._instance, share = common.digits(self.outer, (static.shares,))
        if static.masked:
            at = jnp.int32(0)
            for i, n in zip((self._instance, *self.place), static.table_shape, strict=False):
                at = at if n == 1 else at * n + i
            self._row = at
            self._full, count = (plgpu.load(table_ref.at[at, i]) for i in range(2))
        else:
            count = jnp.int32(math.prod(static.streamed))
        self._first, stop = (
            common.quotient(count * i, static.shares) for i in (share[0], share[0] + 1)
        )
        self.count = stop - self._first

    def at(self, j):
        """The example, counted over all instances, the head, the query tile and the key tile."""
        j = self._first + j
        if self._static.masked:
            j = plgpu.load(self._table_ref.at[self._row, 2 + j])
        _, flow = common.digits(j, self._static.streamed)
        b, *others = (
            i if n > 1 else x
            for i, x, n in zip(flow, self.place, self._static.streamed, strict=True)
        )
        return self.example(b), *others

    def example(self, b):
        """Example b of the program's instance, counted over all of them."""
        return self._instance * self._static.options.batch + b

    def masked(self, j):
        """Whether the tile of step j needs the mask."""
        return self._first + j >= self._full if self._static.masked else False


def compute(refs, memory, number, warpgroup, static: Static):
    """One computing warpgroup."""
    plgpu.set_max_registers(REGISTERS[0], action="increase")
    m, block_kv = memory, static.kv.block
    ring, shape = common.Ring(static.tile.stages), (ROWS, block_kv)
    steps = Steps(static, refs["table"], number)
    mine = pl.ds(warpgroup * ROWS, ROWS)
    # For want of registers: a product that runs has those of its result.
    busy = static.masked or static.options.drops
    bias_sm = None if m["bias_sm"] is None else m["bias_sm"].at[mine]

    def options_of(b):
        return static.options.of_example(refs["shared"], b)

    def first_of(q_tile, kv_tile):
        return q_tile * BLOCK_Q + warpgroup * ROWS, kv_tile * block_kv

    b, h, *tiles = steps.place
    if bias_sm is not None:
        options = options_of(steps.example(b))
        q_pos, k_pos = common.positions(shape, *first_of(*tiles))
        bias: Any = options.extras.scores.bias
        bias = Pairs(bias.array.placed(columns=k_pos))
        bias_sm[...] = bias.read(options.b, h, q_pos, k_pos)

    def with_bias(options):
        """With the tile of the bias as it was read, if the bias has one."""
        if bias_sm is None:
            return options
        return options.with_bias(plgpu.load(bias_sm, layout=ptx.WGMMA))

    def gradients_of_scores(j, s_acc, dp_acc):
        # Places that are the same in all steps would be computed before the loop, and spilt.
        slot, (b, h, *tiles) = ring(j), map(ptx.anew, steps.at(j))
        rows = pl.ds(ptx.anew(warpgroup) * ROWS, ROWS)

        def of_queries(name):
            return plgpu.load(static.numbers(m, name, slot).at[mine], layout=ptx.ROW)

        def start_dp():
            plgpu.barrier_wait(m["dp_full"].at[slot])
            plgpu.wgmma(dp_acc, m["do_sm"].at[slot].at[rows], m["v_sm"].at[slot].T)

        plgpu.barrier_wait(m["s_full"].at[slot])
        plgpu.wgmma(s_acc, m["q_sm"].at[slot].at[rows], m["k_sm"].at[slot].T)
        if not busy:
            start_dp()
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0 if busy else 1)
        pairs = shared.Tile(
            *(with_bias(options_of(b)), static, h, *first_of(*tiles), steps.masked(j)),
            transposed=False,
        )
        p = pairs.weights(s, of_queries)
        ptx.fence()
        plgpu.barrier_arrive(m["s_free"].at[slot])
        if busy:
            start_dp()
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        ds = pairs.gradient(p, dp, of_queries("delta"))
        ptx.fence()
        plgpu.barrier_arrive(m["dp_free"].at[slot])
        return ds

    def step(j, acc):
        scores = plgpu.ACC(shape, jnp.float32)
        return acc + pl.run_scoped(lambda *x: gradients_of_scores(j, *x), scores, scores)

    acc = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), ptx.WGMMA)
    acc = lax.fori_loop(jnp.int32(0), steps.count, step, acc)
    acc = rescaled(options_of(steps.example(b)).extras.dropout, acc)
    dbias = refs["dbias"]
    b = steps.outer * static.own[0] + b
    rows, columns = (pl.ds(first, n) for first, n in zip(first_of(*tiles), shape, strict=True))
    common.store(dbias, (b, h, rows, columns), acc.astype(dbias.dtype))


def load(refs, memory, number, static: Static):
    """The loading warpgroup."""
    plgpu.set_max_registers(REGISTERS[1], action="decrease")
    ring, steps = common.Ring(static.tile.stages), Steps(static, refs["table"], number)
    product = dict(s=("q", "k", static.statistics), dp=("do", "v", ("delta",)))

    def step(j):
        slot, (b, h, q_tile, kv_tile) = ring(j), steps.at(j)
        rows, keys = (
            pl.ds(q_tile * BLOCK_Q, BLOCK_Q),
            pl.ds(kv_tile * static.kv.block, static.kv.block),
        )
        for name, (of_queries, of_keys, numbers) in product.items():
            full = memory[f"{name}_full"].at[slot]
            ring.refill(j, memory[f"{name}_free"])
            at = (b, rows, h), (b, keys, common.quotient(h, static.groups))
            for x, index in zip((of_queries, of_keys), at, strict=True):
                plgpu.copy_gmem_to_smem(refs[x].at[index], memory[f"{x}_sm"].at[slot], full)
            for x in numbers:
                place = static.numbers(memory, x, slot)
                plgpu.copy_gmem_to_smem(refs[x].at[b, h, rows], place, full)

    pl.loop(jnp.int32(0), steps.count)(step)


def pallas_flash_dbias(*refs, static: Static, **memory):
    """One tile of the bias, or a share of its steps."""
    refs = static.refs(["dbias"], refs)
    number, warpgroup = map(lax.axis_index, ("program", "warpgroup"))

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        compute(refs, memory, number, warpgroup, static)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        load(refs, memory, number, static)


def _table(mask: Mask, q: Tiling, kv: Tiling, streamed: tuple[int, ...], instances: int):
    """The steps of each tile of the bias, full tiles first, as `Mask.kv_lists` has them.

    Args:
        mask: with an axis of instances before all others of its arrays.
        q: the tiles of queries.
        kv: the tiles of keys.
        streamed: as `Static.streamed`.
        instances: how many there are.

    Returns:
        int32 [1 or instances, 1 or B, 1 or N, 1 or query tiles, 1 or key tiles, 2 + steps].
    """

    def of_one(classes):
        # Steps count all that is streamed, whether the mask tells it apart or not.
        shape = (max(count, n) for count, n in zip(classes.shape, streamed, strict=True))
        classes = jnp.broadcast_to(classes, tuple(shape))
        flow = [axis for axis, n in enumerate(streamed) if n > 1]
        stay = tuple(1 if n > 1 else size for size, n in zip(classes.shape, streamed, strict=True))
        classes = jnp.moveaxis(classes, flow, range(4 - len(flow), 4))
        return classes.reshape(*stay, -1)

    def classes_of(mask: Mask):
        return lists(BlockClasses(*map(of_one, mask.block_classes(q, kv))))

    return work.of_instances(classes_of, mask, instances)


def _copyable(x, columns: int):
    """[B, T, N, H] with zeros behind: whole tiles of 8 rows and so many columns."""
    missing = -x.shape[1] % 8, columns - x.shape[3]
    return jnp.pad(x, ((0, 0), (0, missing[0]), (0, 0), (0, missing[1]))) if any(missing) else x


def _shares(programs: int, steps: int) -> int:
    """Into how many the steps of a tile are shared out: for two programs or more on each core."""
    return 1 if programs >= work.CORES else min(steps, -(-2 * work.CORES // programs))


def dbias(problem: Problem, do, log_sum: LogSum, delta, tile: DbiasTile):
    """The gradient of the bias, in its shape and dtype, of rows that hold nothing but numbers.

    The arguments are those of `backward`.
    """
    p = problem
    q, kv = Tiling(p.q_len, BLOCK_Q), Tiling(p.kv_len, tile.block_kv)
    mask = shared.mask_for(p, q, kv, None)
    head_dim, value_dim = padded(p.head_dim, p.value_dim)
    counts = p.batch, p.num_heads, q.count, kv.count
    broadcast = [n == 1 for n in p.bias.shape]
    own, streamed = (
        tuple(n if one == x else 1 for n, one in zip(counts, broadcast, strict=True))
        for x in (False, True)
    )
    shares = _shares(math.prod(own), math.prod(streamed))
    # Numbers of 64 bits are read as float32.
    bias_dtype = p.bias.dtype if p.bias.dtype.itemsize <= 4 else jnp.dtype(jnp.float32)
    tiled = ptx.TILED if bias_dtype.itemsize == 2 else ptx.TILED_32
    summed = [axis for axis in (2, 3) if broadcast[axis]]
    dtype = jnp.float32 if summed or shares > 1 else bias_dtype

    def tiles(rows, columns):
        shape = tile.stages, rows, columns
        return plgpu.SMEM(shape, p.dtype, transforms=ptx.tiled(columns))

    def run(arrays, *rows):
        query, *_ = rows
        _, extras = arrays
        instances = len(query) // p.batch
        table = _table(extras.mask, q, kv, streamed, instances)
        static = shared.call_static(
            *(Static, p, mask, arrays, table, q, kv),
            num_heads=own[1],
            side_by_side=own[1],
            ends=False,
            tile=tile,
            own=own,
            streamed=streamed,
            shares=shares,
        )
        shape = instances * shares * own[0], own[1], own[2] * q.block, own[3] * kv.block
        [found] = common.launch(
            pallas_flash_dbias,
            shared.operands(static, arrays, table, rows),
            outputs=[(shape, dtype)],
            memory=dict(
                q_sm=tiles(q.block, head_dim),
                k_sm=tiles(kv.block, head_dim),
                do_sm=tiles(q.block, value_dim),
                v_sm=tiles(kv.block, value_dim),
                **static.numbers_memory(tile.stages, q.block),
                bias_sm=None
                if len(summed) == 2
                else plgpu.SMEM((q.block, kv.block), bias_dtype, transforms=tiled),
                s_full=common.barriers(tile.stages, 2 + len(static.statistics)),
                dp_full=common.barriers(tile.stages, 3),
                s_free=common.barriers(tile.stages, WARPGROUPS),
                dp_free=common.barriers(tile.stages, WARPGROUPS),
            ),
            grid=dict(program=instances * shares * math.prod(own)),
            warpgroups=WARPGROUPS + 1,
            static=static,
            approx_math=static.options.approximate,
        )
        if shares > 1:
            found = found.reshape(instances, shares, own[0], *shape[1:]).sum(axis=1)
            found = found.reshape(-1, *shape[1:])
        return found.sum(axis=summed, keepdims=True) if summed else found

    rows = shared.rows(p, do, log_sum, delta, None, q.count * q.block)
    rows = (*map(_copyable, rows[:4], (head_dim, head_dim, value_dim, value_dim)), *rows[4:])
    arrays = shared_arrays(dataclasses.replace(p, sinks=None), mask)
    found = common.by_instance(run, p.batch)(arrays, *rows)
    _, _, q_len, kv_len = p.bias.shape
    return found[:, :, :q_len, :kv_len].astype(p.bias.dtype)
