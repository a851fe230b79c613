"""The shared memory of tiles, which of them fit, and which `tune` tries for each kernel."""

import dataclasses
import itertools
from collections.abc import Callable

from pallas_flash._backends.mosaic import (
    backward_dq,
    backward_launch,
    common,
    decode_kernel,
    forward_kernel,
    forward_wide,
    ptx,
    tiles,
)
from pallas_flash._backends.mosaic.backward_keys import REGISTERS, Grads
from pallas_flash._jax import hardware
from pallas_flash._problem.features import CallFeatures
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import (
    FORWARD,
    BackwardTile,
    DecodeTile,
    DqTile,
    ForwardTile,
    TileSizes,
    check_shared_memory,
    in_clusters,
    sizes_for,
)

default = tiles.default


def check(kernel: str, tile, p: Problem, f: CallFeatures) -> None:
    """Raise ValueError if a tile does not fit on the GPU."""
    del f
    if tiles.is_wide(p):
        _check_wide(kernel, tile, p)
    limit = hardware.shared_memory_limit(common.HOPPER)
    check_shared_memory(kernel, tile, shared_bytes(kernel, tile, p), limit, _width(p))
    taken, registers = _registers(kernel, tile, p)
    if taken >= registers:
        raise ValueError(
            f"`tile_sizes.{kernel}` must fit in a thread's {registers} registers; got {tile}, "
            f"whose sums and scores take {taken} at head dim {_width(p)}. Use smaller blocks or "
            "fewer warpgroups."
        )
    if kernel == "forward" and not tile.output_slots and p.value_dim > p.head_dim:
        raise ValueError(
            "`tile_sizes.forward` must have `output_slots` where values are wider than queries; "
            f"got {tile} and head dims of {p.head_dim} and {p.value_dim} (of values). Use 1."
        )
    if kernel == "forward" and tile.cluster_size > 1 and not p.mask.known_on_host:
        raise ValueError(
            "`tile_sizes.forward` must have `cluster_size=1` where arrays or a predicate say which "
            f"keys are seen; got {tile}. Use 1."
        )
    # Two warpgroups share a tile of dq, by its queries or by its columns. Where dv has a launch of
    # its own, the 64 rows of a warpgroup leave through a stage of do.
    rows = 2 * ptx.ROWS if tiles.all_columns(*_padded(p)) else ptx.ROWS
    fixed = kernel == "backward" or (kernel == "dkv" and sum(_padded(p)) > 256)
    if fixed and tile.block_q != rows:
        raise ValueError(
            f"`tile_sizes.{kernel}` must have {rows} queries at head dim {_width(p)}; got {tile}. "
            f"Use block_q={rows}."
        )


def _check_wide(kernel: str, tile, p: Problem) -> None:
    """Raise ValueError if no kernel for head dims above 256 has such a tile."""
    if kernel != "forward":
        raise ValueError(
            f"`tile_sizes.{kernel}` must be None at head dims above {tiles.WIDE}, where only the "
            f"forward is a kernel; got {tile} at head dim {_width(p)}. Drop it."
        )
    wanted = dataclasses.replace(
        tile, warpgroups=forward_wide.CONSUMERS, block_kv=forward_wide.BLOCK_KV, output_slots=1
    )
    # Keys of one query are cut into parts, whose lengths are arrays.
    cluster = ""
    if p.q_len == 1:
        wanted, cluster = (
            dataclasses.replace(wanted, cluster_size=1),
            ", and no cluster for one query,",
        )
    if tile != wanted:
        raise ValueError(
            f"`tile_sizes.forward` must have 2 warpgroups, {forward_wide.BLOCK_KV} keys and 1 "
            f"output slot{cluster} at head dims above {tiles.WIDE}; got {tile} at head dim "
            f"{_width(p)}. Use {wanted}."
        )


def shared_bytes(kernel: str, tile, p: Problem) -> int:
    """Return the bytes of shared memory of a kernel's CTA."""
    if kernel == "forward" and tiles.is_wide(p):
        return common.smem_bytes(forward_wide.scratch(p, tile))
    if kernel == "forward":
        return common.smem_bytes(forward_kernel.scratch(p, tile))
    if kernel == "decode":
        return common.smem_bytes(decode_kernel.scratch(p, tile))
    sizes = _padded(p)
    if kernel == "dq":
        return common.smem_bytes(backward_dq.queries_scratch(p, tile))
    launches = Grads.launches(*sizes, deterministic=kernel != "backward")
    return max(common.smem_bytes(backward_launch.scratch(p, tile, grads)) for grads in launches)


def _registers(kernel: str, tile, p: Problem) -> tuple[int, int]:
    """Return the registers that a thread needs for its tiles, and the registers that it has.

    128 threads share 64 rows.
    """
    if kernel in FORWARD:
        # Sums, scores, and in 16 bits the weights of the tile before.
        columns = p.value_dim // (2 if tiles.is_wide(p) else 1)
        numbers = columns // 2 + tile.block_kv // 2 + tile.block_kv // 4
        return numbers, forward_kernel.REGISTERS[tile.warpgroups][0]
    head_dim, value_dim = _padded(p)
    if kernel == "dq":
        return head_dim // 2 + tile.block_kv, backward_dq.REGISTERS[tile.warpgroups][0]
    apart = in_clusters(head_dim, value_dim)
    columns = max(head_dim, value_dim) if apart else head_dim + value_dim
    return columns // 2 + tile.block_q, REGISTERS[0]


def _padded(p: Problem) -> tuple[int, int]:
    return tiles.padded(p.head_dim, p.value_dim)


def _width(p: Problem) -> int:
    return max(p.head_dim, p.value_dim)


def candidates(kernel: str, problem: Problem, choose: Callable[[TileSizes | None], TileSizes]):
    """Return the tiles that fit, the table's first; `choose` is a partial `by_table`."""
    # The output leaves through one buffer, or, where that has no room, through the queries'.
    keys_and_slots = (64, 80, 96, 112, 128, 144, 160, 176, 192), (1, 0)
    forward = [ForwardTile(*x) for x in itertools.product((2, 3), *keys_and_slots, (2, 3))]
    if _width(problem) > 64:  # Smaller heads gain nothing by a cluster.
        forward += [ForwardTile(2, *x, cluster_size=2) for x in itertools.product(*keys_and_slots)]
    tried = {
        "forward": forward,
        "decode": [
            DecodeTile(w, kv, stages)
            for w, kv in itertools.product((2, 3), (64, 128))
            for stages in range(w, 13, w)
        ],
        "backward": [BackwardTile(*sizes) for sizes in itertools.product((64, 128), (1, 2, 3))],
        "dkv": [BackwardTile(*sizes) for sizes in itertools.product((64, 128), (1, 2, 3))],
        "dq": [DqTile(*sizes) for sizes in itertools.product((2, 3), (64, 128), (2, 3, 4))],
    }[kernel]
    fitting = [tile for tile in tried if _fits(kernel, tile, choose)]
    if kernel == "forward":
        with_slots = {dataclasses.replace(x, output_slots=0) for x in fitting if x.output_slots}
        fitting = [x for x in fitting if x not in with_slots]
    table = choose(None).tile(kernel)
    return list(dict.fromkeys([*([] if table is None else [table]), *fitting]))


def _fits(kernel: str, tile, choose) -> bool:
    try:
        return bool(choose(sizes_for(kernel, tile)))
    except ValueError:
        return False
