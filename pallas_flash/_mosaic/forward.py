"""o and lse, query tile by query tile, keys and values streamed past it.

    s    = q @ k.T                                                      [64, block_kv]
    m'   = max(m, c * rowmax(s))    c = scale * log2(e), so base 2      [64]
    p    = exp2(c * s - m')         alpha = exp2(m - m')
    l    = alpha * l + rowsum(p)
    acc  = alpha * acc + p @ v                                          [64, V]

    at the end    o = acc / l    lse_log2 = m + log2(l)

A program has two or three computing warpgroups, with 64 rows of the query tile each, and one that
loads. It stays on its core and takes query tiles from a list (`common.worklists`).

A computing warpgroup keeps the matrix units busy while it computes a softmax: p of one key tile is
multiplied by v only after the product of q and the next keys has been started.

    matrix units   | q k1      | q k2   p1 v1      | q k3   p2 v2      |
    softmax                    | ...    of q k1    | ...    of q k2    |

m moves only when it would grow by more than THRESHOLD. That is exact: acc, l and the LSE share the
shift, whatever it is, and p stays below 2^THRESHOLD.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._masks import Mask, Tiling, edges_first
from pallas_flash._mosaic import common, ptx
from pallas_flash._mosaic.tiles import ForwardTile
from pallas_flash._problem import Problem

plgpu = common.plgpu

ROWS = 64  # Of a warpgroup: what one matrix instruction takes.
THRESHOLD = 8.0
# Less than every score, and a finite number: -inf - -inf would be NaN.
LOWEST = -3e38

# Registers of a thread that computes, and of one that loads, by the number of computing warpgroups:
# together they must be no more than 64 Ki.
REGISTERS = {2: (232, 40), 3: (160, 32)}


@dataclasses.dataclass(frozen=True)
class Static:
    """What the kernel knows when it is compiled."""

    mask: Mask
    q: Tiling
    kv: Tiling
    groups: int
    tile: ForwardTile


def softmax(s, m, l, c, hide):
    """p, float32, and the new m and l, and alpha; `hide` masks scores, or is None."""
    s = s if hide is None else hide(s)
    grown = jnp.maximum(m, jnp.max(s, axis=1) * c)
    m_new = jnp.where(grown - m > THRESHOLD, grown, m)
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s * c - common.along_rows(m_new, s.shape))
    return p, m_new, alpha * l + jnp.sum(p, axis=1), alpha


def compute(list_ref, c_ref, o_ref, lse_ref, memory, program, warpgroup, static: Static):
    """One computing warpgroup."""
    tile, block_kv = static.tile, static.kv.block
    registers, _ = REGISTERS[tile.warpgroups]
    plgpu.set_max_registers(registers, action="increase")
    q_sm, k_sm, v_sm, o_sm = (memory[x] for x in ("q_sm", "k_sm", "v_sm", "o_sm"))
    lse_sm = memory["lse_sm"]
    ring = common.Ring(tile.stages)
    dtype, value_dim = k_sm.dtype, v_sm.shape[-1]
    my_q = q_sm.at[warpgroup]

    def item(i, item, used):
        b, h, q_tile, *tiles = item
        edges, count, tile_at = edges_first(*tiles)
        first_row = q_tile * static.q.block + warpgroup * ROWS
        c = plgpu.load(c_ref.at[b])
        m = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ptx.ROW)
        l = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ptx.ROW)
        acc = plgpu.layout_cast(jnp.zeros((ROWS, value_dim), jnp.float32), ptx.ACC)

        def hide(j):
            def hide(s):
                q_pos, k_pos = common.positions(s.shape, first_row, tile_at(j) * block_kv)
                return common.hide(static.mask, b, h, q_pos, k_pos, s)

            return hide

        def scores(j):
            """Starts the product of the queries and the j-th keys."""
            slot = ring(used + j)
            plgpu.barrier_wait(memory["k_full"].at[slot])
            return ptx.product_t(my_q, k_sm.at[slot])

        def weighted(acc, p, slot):
            """Starts the product of p and the values in `slot`."""
            return ptx.accumulate(acc, p, v_sm.at[slot])

        def step(j, carry, *, masked):
            acc, p, m, l = carry
            slot, before = ring(used + j), ring(used + j - 1)
            s = scores(j)
            acc = weighted(acc, p, before)
            s = ptx.wait(1, s)
            plgpu.barrier_arrive(memory["k_free"].at[slot])
            p_new, m, l, alpha = softmax(s, m, l, c, hide(j) if masked else None)
            plgpu.barrier_wait(memory["v_full"].at[slot + ptx.uniform_zero(l)])
            acc = ptx.waited(0, acc, p)
            plgpu.barrier_arrive(memory["v_free"].at[before])
            return ptx.rescale(acc, alpha), p_new.astype(dtype), m, l

        def some(acc, m, l):
            s = ptx.wait(0, scores(0))
            plgpu.barrier_arrive(memory["k_free"].at[ring(used)])
            p, m, l, _ = softmax(s, m, l, c, hide(0) if static.mask else None)
            plgpu.barrier_wait(memory["v_full"].at[ring(used)])
            carry, start = (acc, p.astype(dtype), m, l), jnp.int32(1)
            if static.mask:
                start = jnp.maximum(edges, 1)
                on_edge = functools.partial(step, masked=True)
                carry = lax.fori_loop(jnp.int32(1), start, on_edge, carry)
            inside = functools.partial(step, masked=False)
            acc, p, m, l = lax.fori_loop(start, count, inside, carry)
            last = ring(used + count - 1)
            acc = ptx.waited(0, weighted(acc, p, last), p)
            plgpu.barrier_arrive(memory["v_free"].at[last])
            return acc, m, l

        plgpu.barrier_wait(memory["q_full"].at[warpgroup])
        # A query tile that sees nothing has no tiles.
        acc, m, l = lax.cond(count > 0, some, lambda *carry: carry, acc, m, l)
        if o_sm is not None:
            plgpu.barrier_arrive(memory["q_free"].at[warpgroup])
        alive = l > 0.0
        l = jnp.where(alive, l, 1.0)
        lse_log2 = jnp.where(alive, m + jnp.log2(l), -jnp.inf)
        acc = plgpu.layout_cast(acc, ptx.WGMMA)
        o = (acc * common.along_rows(1.0 / l, acc.shape)).astype(dtype)
        rows = pl.ds(first_row, ROWS)
        # What was stored last must have left shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        lse_sm[warpgroup] = lse_log2
        if o_sm is None:
            my_q[...] = o
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_q, o_ref.at[b, rows, h])
        else:
            for column in range(0, value_dim, ptx.COLUMNS):
                slot = column // ptx.COLUMNS % tile.output_slots
                if column // ptx.COLUMNS >= tile.output_slots:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                staged = o_sm.at[warpgroup, slot]
                staged[...] = o[:, column : column + ptx.COLUMNS]
                plgpu.commit_smem()
                columns = pl.ds(column, ptx.COLUMNS)
                plgpu.copy_smem_to_gmem(staged, o_ref.at[b, rows, h, columns])
        plgpu.copy_smem_to_gmem(lse_sm.at[warpgroup], lse_ref.at[b, h, rows])
        if o_sm is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(memory["q_free"].at[warpgroup])
        return used + count

    common.for_each_item(list_ref, program, item, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def load(list_ref, q_ref, k_ref, v_ref, memory, program, static: Static):
    """The loading warpgroup: one warp for keys and values, one for queries."""
    tile = static.tile
    _, registers = REGISTERS[tile.warpgroups]
    plgpu.set_max_registers(registers, action="decrease")
    ring = common.Ring(tile.stages)

    def keys_and_values(i, item, used):
        del i
        b, h, _, *tiles = item
        _, count, tile_at = edges_first(*tiles)
        kv_head = common.quotient(h, static.groups)

        def one(j, _):
            slot = ring(used + j)
            at = b, pl.ds(tile_at(j) * static.kv.block, static.kv.block), kv_head
            for x in "kv":
                ring.refill(used + j, memory[f"{x}_free"])
                plgpu.copy_gmem_to_smem(
                    {"k": k_ref, "v": v_ref}[x].at[at],
                    memory[f"{x}_sm"].at[slot],
                    memory[f"{x}_full"].at[slot],
                )

        lax.fori_loop(jnp.int32(0), count, one, None)
        return used + count

    def queries(i, item, _):
        b, h, q_tile, *_ = item
        for w in range(tile.warpgroups):
            pl.when(i > 0)(lambda w=w: plgpu.barrier_wait(memory["q_free"].at[w]))
            rows = pl.ds(q_tile * static.q.block + w * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(
                q_ref.at[b, rows, h], memory["q_sm"].at[w], memory["q_full"].at[w]
            )

    @plgpu.warp_map
    def _(warp):
        @pl.when(warp == 0)
        def _():
            common.for_each_item(list_ref, program, keys_and_values, jnp.int32(0))

        @pl.when(warp == 1)
        def _():
            common.for_each_item(list_ref, program, queries, None)


def pallas_flash_forward(
    list_ref, c_ref, q_ref, k_ref, v_ref, o_ref, lse_ref, *, static: Static, **memory
):
    """The query tiles of one program."""
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    computes = warpgroup < static.tile.warpgroups

    @pl.when(computes)
    def _():
        compute(list_ref, c_ref, o_ref, lse_ref, memory, program, warpgroup, static)

    @pl.when(jnp.logical_not(computes))
    def _():
        load(list_ref, q_ref, k_ref, v_ref, memory, program, static)


def forward(problem: Problem, tile: ForwardTile):
    """The output [B, T, N, V] and `lse_log2` float32 [B, N, T]."""
    p = problem
    q = Tiling(p.q_len, tile.warpgroups * ROWS)
    kv = Tiling(p.kv_len, tile.block_kv)
    mask = p.mask.within(kv=kv)
    static = Static(mask, q, kv, p.groups, tile)

    def tiles(*shape):
        return plgpu.SMEM(shape, p.dtype, transforms=ptx.TILED)

    def barriers(count, arrivals=1):
        return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)

    w, stages = tile.warpgroups, tile.stages

    def run(c, query, key, value):
        batch = len(query)
        lists = jnp.asarray(common.worklists(p, batch, mask, q, kv))
        return common.launch(
            pallas_flash_forward,
            (lists, c, query, key, value),
            outputs=[
                ((*query.shape[:3], p.value_dim), p.dtype),
                # Copies want rows of 16 bytes, so the LSE is padded to whole tiles.
                ((batch, p.num_heads, q.count * q.block), jnp.float32),
            ],
            memory=dict(
                q_sm=tiles(w, ROWS, p.head_dim),
                k_sm=tiles(stages, kv.block, p.head_dim),
                v_sm=tiles(stages, kv.block, p.value_dim),
                o_sm=tiles(w, tile.output_slots, ROWS, ptx.COLUMNS) if tile.output_slots else None,
                lse_sm=plgpu.SMEM((w, ROWS), jnp.float32),
                q_full=barriers(w),
                q_free=barriers(w),
                k_full=barriers(stages),
                k_free=barriers(stages, w),
                v_full=barriers(stages),
                v_free=barriers(stages, w),
            ),
            grid=dict(program=lists.shape[0]),
            warpgroups=w + 1,
            static=static,
        )

    operands = map(common.copyable, (p.query, p.key, p.value))
    o, lse_log2 = common.by_example(run)(common.factor(p), *operands)
    return o[:, : p.q_len], lse_log2[:, :, : p.q_len]
