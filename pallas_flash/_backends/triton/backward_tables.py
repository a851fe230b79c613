"""Gradients of tables that scores read: the slopes, and the operands of a score function.

    acc = acc + ds * ds/dread       of a resident query tile, key tile or diagonal of tiles

A pass of its own, so that the other passes stay as they are. One launch serves one read. It adds up
the scores of a row, of a column or of a diagonal, whichever have the same index
(`_problem.table_gradients`). A diagonal is q - k = const. A program has one diagonal of tiles: an
element of `acc` adds up the elements at its place in each tile, which all have the same q - k. No
two programs add to the same number, so that the sums are deterministic. Plain JAX adds the few sums
to the table.
"""

import enum

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.triton import memory, streamed
from pallas_flash._backends.triton.delta_kernel import delta
from pallas_flash._backends.triton.launch import launch
from pallas_flash._backends.triton.spec import KernelSpec, make_spec
from pallas_flash._backends.triton.streamed import Streamed
from pallas_flash._problem.dropout import rescaled
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.scores import LogSum
from pallas_flash._problem.table_gradients import Read, add_at, reads_of
from pallas_flash._problem.tile_sizes import Tile
from pallas_flash._problem.traversal import in_tile


class Sums(enum.Enum):
    """The scores that are added up: of a query, of a key, or of a difference of both."""

    ROWS = "q"
    COLUMNS = "k"
    DIAGONALS = "d"

    @classmethod
    def from_read(cls, read: Read) -> "Sums":
        return next((x for x in cls if x.value in read.letters), cls.ROWS)


def pallas_flash_read(*refs, spec: KernelSpec, number: int, sums: Sums, batch: int, by_batch: bool):
    """Compute the sums of one query tile, key tile or diagonal of tiles, of one head.

    `by_batch` says whether a program has one batch element, or all of `batch`.
    """
    arrays, out_ref = Streamed.from_refs(refs, spec)
    resident, h, b = map(pl.program_id, range(3))
    blocks = spec.q.block, spec.kv.block

    def tile(*index):
        ds = arrays.ds(index, spec.read_vjp(number))
        if sums is Sums.DIAGONALS:
            return ds
        return jnp.sum(ds, axis=1 if sums is Sums.ROWS else 0, keepdims=True)

    # The tiles (first + i, first + i - diagonal) of a diagonal.
    diagonal = resident - (spec.kv.count - 1)
    first = jnp.maximum(diagonal, 0)
    length = jnp.minimum(spec.q.count, spec.kv.count + diagonal) - first

    def step(n, acc):
        if sums is Sums.ROWS:
            index = b, h, resident, n
        elif sums is Sums.COLUMNS:
            index = b, h, n, resident
        else:
            q_tile = first + lax.rem(n, length)
            index = b if by_batch else lax.div(n, length), h, q_tile, q_tile - diagonal
        return arrays.add(acc, index, tile)

    shape, count, rows, keys = {
        Sums.ROWS: ((blocks[0], 1), spec.kv.count, spec.q, None),
        Sums.COLUMNS: ((1, blocks[1]), spec.q.count, None, spec.kv),
        Sums.DIAGONALS: (blocks, length * (1 if by_batch else batch), None, None),
    }[sums]
    acc = lax.fori_loop(0, count, step, jnp.zeros(shape, jnp.float32))
    acc = rescaled(arrays.extras.dropout, acc)
    rows, keys = (
        side and memory.valid_positions(side, in_tile(resident, side.block))
        for side in (rows, keys)
    )
    memory.store_pairs(out_ref, acc, rows, keys)


def table_gradients(
    problem: Problem,
    o,
    log_sum: LogSum,
    do,
    dlse,
    wanted: tuple[bool, ...],
    dq: Tile,
    *,
    interpret: bool,
) -> list:
    """Return the gradients of tables (`table_gradients`), the slopes first; None if not wanted.

    Args:
        problem: the call, whose reads of tables are not `Read.by_pair`.
        o: [B, T, N, V].
        log_sum: float32 [B, N, T].
        do: [B, T, N, V].
        dlse: float32 [B, T, N] or None.
        wanted: for each table, whether its gradient is wanted.
        dq: the tile of the dq pass.
        interpret: whether the kernel runs in the interpreter.
    """
    p = problem
    rows = do, log_sum, delta(p, o, do, dlse, interpret=interpret)
    tables = p.slopes, *(p.score_operands or ())
    gradients = [
        jnp.zeros(x.shape, jnp.float32) if want else None
        for x, want in zip(tables, wanted, strict=True)
    ]
    for number, read in enumerate(reads_of(p.scores)):
        if wanted[read.table]:
            x, at = _sums(p, *rows, number, read, dq, interpret=interpret)
            _, index = p.scores.reads(x, *at)[number]
            gradients[read.table] = add_at(gradients[read.table], index, x, sort=True)
    pairs = zip(gradients, tables, strict=True)
    return [None if x is None else x.astype(table.dtype) for x, table in pairs]


def _sums(p: Problem, do, log_sum, delta, number: int, read: Read, dq: Tile, *, interpret: bool):
    """Return sums over scores of which a read has one index, and indices b, h, q, k of one each."""
    sums, by_batch = Sums.from_read(read), "b" in read.letters
    tile = streamed.small_tile(dq)
    if sums is Sums.DIAGONALS:
        sides = (p.q_len, tile.block_q), (p.kv_len, tile.block_kv)
        block = min(memory.block_for(*side) for side in sides)
        tile = Tile(block, block, tile.num_warps, tile.num_stages)
    else:
        by_batch = True
    spec, extras, some = make_spec(p, tile, streamed="both", interpret=interpret)
    batch = p.batch if by_batch else 1
    shape, block, count = {
        Sums.ROWS: ((p.q_len, 1), (spec.q.block, 1), spec.q.count),
        Sums.COLUMNS: ((1, p.kv_len), (1, spec.kv.block), spec.kv.count),
        Sums.DIAGONALS: (
            ((spec.q.count + spec.kv.count - 1) * spec.q.block, spec.q.block),
            (spec.q.block, spec.q.block),
            spec.q.count + spec.kv.count - 1,
        ),
    }[sums]

    def place(i, h, b):
        return (b, h, 0, i) if sums is Sums.COLUMNS else (b, h, i, 0)

    [x] = launch(
        pallas_flash_read,
        streamed.operands(p, do, log_sum, delta, extras, some),
        [((batch, p.num_heads, *shape), jnp.float32, pl.BlockSpec((None, None, *block), place))],
        spec=spec,
        tile=tile,
        grid=(count, p.num_heads, batch),
        number=number,
        sums=sums,
        batch=p.batch,
        by_batch=by_batch,
    )
    q = k = jnp.zeros((1, 1, 1, 1), jnp.int32)
    if sums is Sums.ROWS:
        q = jnp.arange(p.q_len, dtype=jnp.int32).reshape(1, 1, -1, 1)
    elif sums is Sums.COLUMNS:
        k = jnp.arange(p.kv_len, dtype=jnp.int32).reshape(1, 1, 1, -1)
    else:
        x, q = _sums_by_difference(x, spec.q.block, spec.kv.count)
    b, h = (jnp.arange(n, dtype=jnp.int32) for n in (batch, p.num_heads))
    return x, (b.reshape(-1, 1, 1, 1), h.reshape(1, -1, 1, 1), q, k)


def _sums_by_difference(x, block: int, kv_tiles: int):
    """Return the sums of the diagonals of square tiles, and q - k of each.

    Args:
        x: [B, N, diagonals * block, block], the sum of the tiles of each diagonal of tiles.
        block: the size of a tile.
        kv_tiles: the number of key tiles.

    Returns:
        The sums, [B, N, diagonals, 2 * block - 1], and int32 [1, 1, diagonals, 2 * block - 1].
    """
    x = x.reshape(*x.shape[:2], -1, block, block)[..., ::-1, :]
    # Row r of [block, 2 * block - 1] begins r places later in a row of 2 * block numbers, so that
    # a diagonal is a column.
    x = jnp.pad(x, ((0, 0),) * 4 + ((0, block),)).reshape(*x.shape[:3], -1)[..., :-block]
    x = x.reshape(*x.shape[:3], block, 2 * block - 1).sum(axis=3)
    tiles = jnp.arange(x.shape[2], dtype=jnp.int32)[:, None] - (kv_tiles - 1)
    within = block - 1 - jnp.arange(2 * block - 1, dtype=jnp.int32)
    return x, (tiles * block + within)[None, None]
