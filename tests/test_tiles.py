"""Tile sizes: what the table chooses fits every GPU, and what a user asks for is kept.

That wrong sizes are refused is in the table of test_validate.py.
"""

import dataclasses
import itertools

import pytest

from pallas_flash import Tile, TileSizes
from pallas_flash._tiles import KERNELS, choose, shared_memory_limit

KIB = 1024
# None is a GPU that is not known, and (9, 9) one that is not listed.
LIMITS = {
    (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99, (9, 9): 99,
    None: 227,
}  # fmt: skip


def needed(kernel: str, tile: Tile, head_dim: int, itemsize: int) -> int:
    """Bytes of the tiles that a kernel has in shared memory at least, counted by hand.

    forward, decode and dq keep queries, the others keys; dkv, dk and dq keep two arrays (k and v,
    or q and do), and each stage brings two more.
    """
    queries_stay = kernel in ("forward", "decode", "dq")
    stays, flows = tile.block_q, tile.block_kv
    if not queries_stay:
        stays, flows = flows, stays
    arrays = 1 if kernel in ("forward", "decode", "dv") else 2
    return (arrays * stays + 2 * tile.num_stages * flows) * head_dim * itemsize


def chosen(asked=None, head_dim=64, value_dim=None, itemsize=2, capability=(9, 0), q_len=999):
    return choose(
        asked,
        q_len=q_len,
        head_dim=head_dim,
        value_dim=value_dim or head_dim,
        itemsize=itemsize,
        capability=capability,
    )


def tiles_of(sizes: TileSizes) -> dict[str, Tile]:
    return {name: tile for name in KERNELS if (tile := getattr(sizes, name)) is not None}


@pytest.mark.parametrize("capability", LIMITS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("q_len", "forward"), [(16, "decode"), (17, "forward")])
def test_chosen_tiles_serve_every_kernel_and_fit_for_every_head_size(
    itemsize, capability, q_len, forward
):
    for head_dim in range(1, 257):
        sizes = chosen(None, head_dim, itemsize=itemsize, capability=capability, q_len=q_len)
        tiles = tiles_of(sizes)
        assert {"forward", "decode", "dq"} & set(tiles) == {forward, "dq"}
        assert ("dkv" in tiles) != ({"dk", "dv"} <= set(tiles))
        for kernel, tile in tiles.items():
            assert needed(kernel, tile, head_dim, itemsize) <= LIMITS[capability] * KIB


@pytest.mark.parametrize("capability", LIMITS)
def test_limit_of_shared_memory(capability):
    assert shared_memory_limit(capability) == LIMITS[capability] * KIB


def test_the_larger_head_size_decides():
    for small, large in itertools.combinations((16, 64, 65, 128, 129, 256), 2):
        both = {(small, large), (large, small), (large, large)}
        assert len({chosen(None, h, v, itemsize=4) for h, v in both}) == 1
    assert chosen(None, 64) != chosen(None, 65)
    assert chosen(None, 64, itemsize=2) != chosen(None, 64, itemsize=4)


def test_tiles_shrink_only_where_memory_is_small():
    assert chosen(None, 128, capability=None) == chosen(None, 128, capability=(9, 0))
    large = chosen(None, 128, itemsize=4, capability=(8, 0))
    small = chosen(None, 128, itemsize=4, capability=(8, 9))
    assert small != large
    for kernel, tile in tiles_of(small).items():
        other = getattr(large, kernel)
        assert tile.block_q <= other.block_q
        assert tile.block_kv <= other.block_kv
        assert min(tile.block_q, tile.block_kv) >= 16


@pytest.mark.parametrize(
    ("kernel", "q_len"), [("forward", 99), ("decode", 9), ("dkv", 99), ("dq", 99)]
)
def test_a_tile_that_is_asked_for_is_used_and_the_others_come_from_the_table(kernel, q_len):
    asked = Tile(16, 32, num_warps=2, num_stages=3)
    sizes = chosen(TileSizes(**{kernel: asked}), q_len=q_len)
    for name in KERNELS:
        wanted = asked if name == kernel else getattr(chosen(q_len=q_len), name)
        assert getattr(sizes, name) == wanted


def test_one_forward_kernel_serves_and_the_one_for_few_queries_comes_first():
    one, other = Tile(16, 32), Tile(32, 16)
    for asked, few, many in [
        (TileSizes(forward=one), (one, None), (one, None)),
        (TileSizes(decode=other), (None, other), (chosen().forward, None)),
        (TileSizes(forward=one, decode=other), (None, other), (one, None)),
    ]:
        for q_len, wanted in ((16, few), (17, many)):
            sizes = chosen(asked, q_len=q_len)
            assert (sizes.forward, sizes.decode) == wanted


def test_nothing_asked_for_is_the_table():
    assert chosen(TileSizes()) == chosen(None)


def test_a_split_backward_replaces_the_tile_of_a_joint_one_and_the_reverse():
    tile = Tile(16, 16)
    assert chosen(head_dim=64).dkv is not None
    split = chosen(TileSizes(dk=tile, dv=tile), head_dim=64)
    assert (split.dkv, split.dk, split.dv) == (None, tile, tile)
    assert chosen(head_dim=256).dkv is None
    joint = chosen(TileSizes(dkv=tile), head_dim=256)
    assert (joint.dkv, joint.dk, joint.dv) == (tile, None, None)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_asked_for_is_refused_exactly_where_it_does_not_fit(kernel):
    accepted = 0
    blocks = (16, 32, 64, 128, 256)
    for block_q, block_kv, stages in itertools.product(blocks, blocks, range(1, 9)):
        tile = Tile(block_q, block_kv, num_stages=stages)
        # dk and dv come in pairs.
        other = {"dk": {"dv": Tile(16, 16)}, "dv": {"dk": Tile(16, 16)}}.get(kernel, {})
        asked, q_len = TileSizes(**{kernel: tile}, **other), 1 if kernel == "decode" else 99
        if needed(kernel, tile, 128, itemsize=2) > LIMITS[8, 9] * KIB:
            with pytest.raises(ValueError, match=f"`tile_sizes.{kernel}` must fit"):
                chosen(asked, 128, capability=(8, 9), q_len=q_len)
        else:
            accepted += 1
            sizes = chosen(asked, 128, capability=(8, 9), q_len=q_len)
            assert getattr(sizes, kernel) == tile
    assert 0 < accepted < len(blocks) ** 2 * 8


def test_every_size_that_is_documented_is_accepted():
    for block in (16, 32, 64, 128, 256):
        for warps, stages in itertools.product((1, 2, 4, 8, 16), range(1, 9)):
            Tile(block, block, warps, stages)


def test_tile_sizes_are_values():
    tile = Tile(16, 16)
    assert hash(TileSizes(forward=tile)) == hash(TileSizes(forward=Tile(16, 16)))
    assert TileSizes(forward=tile) != TileSizes(dq=tile)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tile.block_q = 32


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_arrays_over_pairs_leave_smaller_tiles_and_at_most_two_stages(head_dim, itemsize):
    """However many there are: the least tile is chosen where none fits."""
    for pair_bytes in (1, 2, 5, 7, 100):
        sizes = choose(
            None,
            q_len=99,
            head_dim=head_dim,
            value_dim=head_dim,
            itemsize=itemsize,
            capability=(8, 9),
            pair_bytes=pair_bytes,
        )
        assert all(tile.num_stages <= 2 for tile in tiles_of(sizes).values())
