"""Candidate tiles that `tuning.tune` tries for each kernel."""

import itertools
from collections.abc import Callable

from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import (
    FORWARD,
    KEYS_STAY,
    Tile,
    TileSizes,
    power_of_2,
    sizes_for,
)

Choose = Callable[[TileSizes | None], TileSizes]


def candidates(kernel: str, problem: Problem, choose: Choose) -> list[Tile]:
    """Return tiles around the table's, which comes first; `choose` is a partial `by_table`.

    A tile has 64 resident rows or more for each 4 warps, as Hopper's matrix instructions want it,
    or as many as in the table. Its float32 sums and scores fit in the 255 registers of each thread.
    Blocks longer than the sequence, which kernels shorten, come once.
    """
    p, table = problem, choose(None)
    h, v = (max(16, power_of_2(width)) for width in (p.head_dim, p.value_dim))
    sums = {"forward": v, "decode": v, "dkv": h + v, "dk": h, "dv": v, "dq": h}[kernel]
    scores = 1 if kernel in (*FORWARD, "dv") else 2
    near = table.tile(kernel) or table.tile("dkv") or table.tile("dk")
    turn = -1 if kernel in KEYS_STAY else 1  # There keys are resident and queries streamed.
    rows, columns = (near.block_q, near.block_kv)[::turn]
    launches = {(rows, near.num_warps), (64, 4), (128, 4), (128, 8)}
    widths = [width for width in (columns // 2, columns, 2 * columns) if 16 <= width <= 128]
    tiles = [near] if table.tile(kernel) else []
    for (rows, warps), width, stages in itertools.product(sorted(launches), widths, (2, 3, 4)):
        block_q, block_kv = (rows, width)[::turn]
        tile = Tile(block_q, block_kv, warps, stages)
        if rows * (sums + scores * width) <= 255 * 32 * warps and _fits(kernel, tile, choose):
            tiles.append(tile)
    q_rows = p.q_len * p.groups if kernel == "decode" else p.q_len
    q_len, kv_len = (max(16, power_of_2(length)) for length in (q_rows, p.kv_len))
    distinct = {}
    for x in tiles:
        block_q, block_kv = min(x.block_q, q_len), min(x.block_kv, kv_len)
        as_run = block_q, block_kv, x.num_warps, x.num_stages
        distinct.setdefault(as_run, x)
    return list(distinct.values())


def _fits(kernel: str, tile: Tile, choose: Choose) -> bool:
    try:
        return bool(choose(sizes_for(kernel, tile)))
    except ValueError:
        return False
