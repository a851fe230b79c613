"""Tile sizes: what the table chooses fits every GPU, and what a user asks for is kept; their order.

That wrong sizes are refused is in the table of test_validate_tiles.py.
"""

import dataclasses
import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import pytest
from support import ttir

from pallas_flash import attention
from pallas_flash._backends.triton.grid import QueryTiles, side_by_side
from pallas_flash._backends.triton.tiles import FEW, _smaller, splits_of_heads
from pallas_flash._execution.tile_choice import completed
from pallas_flash._jax.hardware import shared_memory_limit
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.features import CallFeatures, MaskKind, Option
from pallas_flash._problem.masks import Band, Mask
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import KERNELS, tile_of
from pallas_flash.tuning import Tile, TileSizes

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


def chosen(
    asked=None,
    head_dim=64,
    value_dim=None,
    itemsize=2,
    capability=(9, 0),
    pair_bytes=0,
    q_len=999,
    kv_len=999,
    kind="another mask",
    masked=True,
    rows=2**20,
    kv_rows=2**20,
    groups=1,
):
    """The table's tiles for a call with many programs, unless told otherwise."""
    options = {"scores": {Option.SOFT_CAP}, "dropout": {Option.DROPOUT}}.get(kind, set())
    mask = MaskKind.OTHER if options else MaskKind(kind)
    f = Counted(
        dtype={2: "bfloat16", 4: "float32"}[itemsize],
        head_dim=head_dim,
        value_dim=value_dim or head_dim,
        q_len=q_len,
        kv_len=kv_len,
        batch=1,
        num_heads=groups,
        num_kv_heads=1,
        mask=mask if masked else MaskKind.FULL,
        options=frozenset(options),
        pair_bytes=pair_bytes,
        capability=capability,
        all_rows=rows,
        all_kv_rows=kv_rows,
    )
    return completed(asked, None, f, "triton")


@dataclasses.dataclass(frozen=True)
class Counted(CallFeatures):
    """Features with these queries and keys of all heads, whatever the lengths are."""

    all_rows: int = 0
    all_kv_rows: int = 0

    rows = property(lambda self: self.all_rows)
    kv_rows = property(lambda self: self.all_kv_rows)


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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gpus_whose_matrix_instructions_wait_have_tiles_of_their_own(head_dim):
    """In 16 bits; among them the newest with little shared memory."""
    old, new = (chosen(None, head_dim, capability=x) for x in ((8, 6), (12, 0)))
    assert old == new
    assert chosen(None, head_dim, capability=(8, 0)) != chosen(None, head_dim, capability=(9, 0))


# The larger block is halved; 4 warps do for 64 rows that stay; at the end a stage is left.
HALVED = [
    ("forward", Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("forward", Tile(64, 64, 4, 3), Tile(32, 64, 4, 3)),
    ("dq", Tile(256, 32, 8, 2), Tile(128, 32, 8, 2)),
    ("dq", Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
    ("dkv", Tile(32, 256, 8, 2), Tile(32, 128, 8, 2)),
    ("dk", Tile(32, 128, 8, 2), Tile(32, 64, 4, 2)),
    ("dv", Tile(256, 128, 8, 2), Tile(128, 128, 8, 2)),
    ("dkv", Tile(16, 16, 4, 3), Tile(16, 16, 4, 1)),
    ("dkv", Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
]


@pytest.mark.parametrize(("kernel", "tile", "smaller"), HALVED)
def test_a_tile_that_does_not_fit_is_halved(kernel, tile, smaller):
    assert _smaller(kernel, tile) == smaller


# Tiles that replace those of the table on an H200, by the kind of call: from how many rows on.
REPLACED = [
    ("causal", 2**17, dict(forward=Tile(128, 64, 4, 2))),
    ("scores", 1, dict(dkv=Tile(64, 64, 4, 2))),
    ("dropout", 1, dict(dkv=Tile(32, 64, 4, 3))),
]


def replaced(head_dim=128, **of):
    """The tiles that a call has in place of those of one of the same size and no known kind."""
    others = tiles_of(chosen(None, head_dim, **of | dict(kind="another mask")))
    sizes = tiles_of(chosen(None, head_dim, **of))
    return {kernel: tile for kernel, tile in sizes.items() if tile != others[kernel]}


@pytest.mark.parametrize("capability", [(9, 0), None])
@pytest.mark.parametrize(("kind", "rows", "tiles"), REPLACED)
@pytest.mark.parametrize("head_dim", [65, 128])
def test_kind_of_call_has_its_tiles(kind, rows, tiles, head_dim, capability):
    of = dict(kind=kind, capability=capability)
    assert replaced(head_dim, **of, rows=rows) == tiles
    if rows > 1:
        assert replaced(head_dim, **of, rows=rows - 1) != tiles


@pytest.mark.parametrize(
    "other",
    [
        dict(itemsize=4),
        dict(head_dim=64),
        dict(head_dim=129),
        *(dict(capability=capability) for capability in [(8, 0), (8, 9), (10, 0), (12, 0)]),
    ],
    ids=str,
)
def test_only_calls_like_those_that_were_timed_have_such_tiles(other):
    for kind, rows, _ in REPLACED:
        assert not replaced(**dict(kind=kind, rows=rows) | other)


@pytest.mark.parametrize(
    ("options", "block_q"),
    [
        ({}, 64),
        ({"is_causal": True}, 128),
        ({"is_causal": True, "query_offset": 5}, 128),
        ({"local_window_size": (None, 3)}, 128),
        ({"is_causal": True, "local_window_size": (99, 0)}, 64),
        ({"is_causal": True, "logits_soft_cap": 9.0}, 64),
        ({"is_causal": True, "dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, 64),
        ({"is_causal": True, "key_value_seq_lengths": jnp.array([5, 6])}, 64),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_options_of_a_long_call_choose_its_tile(options, block_q):
    q = jax.ShapeDtypeStruct((2, 8192, 16, 128), jnp.bfloat16)
    [kernel] = ttir.lower(functools.partial(attention, implementation="triton", **options), q, q, q)
    assert math.prod(kernel.grid) == 32 * 8192 // block_q


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("size", FEW, ids=str)
def test_calls_with_few_programs_have_tiles_of_their_own(size, masked):
    most, tiles = FEW[size]
    of = dict(zip(("head_dim", "itemsize"), size, strict=True), masked=masked)
    usual = tiles_of(chosen(**of, rows=2**16))
    most = most if masked else most // 2
    of_keys = {"dkv", "dk", "dv"} & set(tiles)
    for rows, kv_rows, few in [
        (most, most, set(tiles)),
        (most, most + 1, set(tiles) - of_keys),
        (most + 1, most, of_keys),
    ]:
        sizes = tiles_of(chosen(**of, rows=rows, kv_rows=kv_rows))
        assert {name for name, tile in sizes.items() if tile != usual[name]} == few
        assert all(sizes[name] == tiles[name] for name in few)


@pytest.mark.parametrize(
    "other", [dict(capability=(8, 0)), dict(capability=(10, 0)), dict(pair_bytes=2)], ids=str
)
def test_only_where_that_was_timed(other):
    for head_dim, itemsize in ((64, 2), (128, 2)):
        of = dict(head_dim=head_dim, itemsize=itemsize, **other)
        assert chosen(**of, rows=1000, kv_rows=1) == chosen(**of)


def test_heads_that_are_shared_out_count_as_many_keys():
    """16 heads for 1024 keys are as good as 16384 keys."""
    few = chosen(head_dim=128, kv_rows=1024, groups=16).dkv
    assert few == chosen(head_dim=128, kv_rows=1024).dkv
    assert chosen(head_dim=128, kv_rows=1024, groups=17).dkv == chosen(head_dim=128).dkv != few


@pytest.mark.parametrize("kind", ["scores", "dropout"])
def test_what_a_loop_has_besides_products_decides_first(kind):
    assert chosen(head_dim=128, kind=kind, kv_rows=1).dkv == chosen(head_dim=128, kind=kind).dkv


# (query heads of a key head, keys of all heads, masked, shares).
SHARES = [
    (1, 1, True, 1),
    (8, 0, True, 8),
    (8, 1, True, 8),
    (8, 2**12, True, 8),
    (8, 2**13, True, 4),
    (8, 2**14, True, 2),
    (8, 23170, True, 2),
    (8, 23171, True, 1),
    (8, 2**15, True, 1),
    (8, 2**20, True, 1),
    (8, 2**12, False, 4),
    (8, 11585, False, 2),
    (8, 11586, False, 1),
    (8, 2**14, False, 1),
    (6, 11000, True, 3),
    (7, 2**14, True, 7),
    (7, 2**15, True, 1),
    (8, 11000, True, 4),
    (71, 2**9, True, 71),
    (71, 2**15 - 1, True, 1),
]


@pytest.mark.parametrize(("groups", "kv_rows", "masked", "shares"), SHARES)
def test_so_many_programs_share_out_the_heads_of_a_key(groups, kv_rows, masked, shares):
    assert splits_of_heads(groups, kv_rows, masked) == shares


@pytest.mark.parametrize(
    ("sizes", "few"),
    [
        ((16, 600, 2**20), True),
        ((17, 600, 2**20), False),
        ((17, 600, 600), True),
        ((17, 600, 601), False),
        ((17, 9999, 4096), True),
        ((17, 9999, 4097), False),
    ],
)
def test_few_queries(sizes, few):
    q_len, kv_len, rows = sizes
    of = dict(dtype="float32", head_dim=1, value_dim=1, batch=1, num_heads=1, num_kv_heads=1)
    f = Counted(**of, q_len=q_len, kv_len=kv_len, all_rows=rows)
    assert f.few_queries == few


# (keys, key/value heads): 128 programs without a mask, for 8 query heads in 4 or 2 shares. Under a
# mask there are twice as many, of half the keys or in twice the shares.
@pytest.mark.parametrize(("S", "K"), [(4096, 1), (2048, 4)])
@pytest.mark.parametrize(
    ("options", "programs"),
    [({}, 128), ({"is_causal": True}, 256), ({"local_window_size": 9}, 256)],
    ids=str,
)
def test_a_call_says_how_many_programs_it_has(options, programs, S, K):
    q, k = (jax.ShapeDtypeStruct((1, n, h, 128), jnp.bfloat16) for n, h in ((64, 8), (S, K)))

    def gradient(q, k, v, do):
        call = functools.partial(attention, implementation="triton", **options)
        return jax.vjp(call, q, k, v)[1](do)

    grids = {kernel.name: kernel.grid for kernel in ttir.lower(gradient, q, k, k, q)}
    assert math.prod(grids["pallas_flash_dkv"]) == programs


@pytest.mark.parametrize(
    ("options", "warps", "stages"),
    [
        ({}, 8, 3),
        ({"logits_soft_cap": 9.0}, 4, 2),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, 4, 3),
        (
            {"logits_soft_cap": 9.0, "dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
            4,
            2,
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_a_call_says_what_it_has_besides_products(options, warps, stages):
    x = jax.ShapeDtypeStruct((4, 4096, 4, 128), jnp.bfloat16)
    call = functools.partial(attention, implementation="triton", is_causal=True, **options)
    gradient = jax.grad(lambda q, k, v: call(q, k, v).astype(jnp.float32).sum(), 1)
    [dkv] = [x for x in ttir.lower(gradient, x, x, x) if x.name == "pallas_flash_dkv"]
    assert (dkv.num_warps, dkv.num_stages) == (warps, stages)


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
    ("kernel", "q_len"), [(None, 99), ("forward", 99), ("decode", 9), ("dkv", 99), ("dq", 99)]
)
def test_a_tile_that_is_asked_for_is_used_and_the_others_come_from_the_table(kernel, q_len):
    asked = Tile(16, 32, num_warps=2, num_stages=3)
    given = {kernel: asked} if kernel else {}
    sizes = chosen(TileSizes(**given), q_len=q_len)
    for name in KERNELS:
        wanted = asked if name == kernel else getattr(chosen(q_len=q_len), name)
        assert getattr(sizes, name) == wanted


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decoding_keeps_rows_where_memory_is_small(head_dim, itemsize):
    """Else keys would be read several times; arrays over pairs do not leave it larger tiles."""
    one, two = (
        chosen(None, head_dim, None, itemsize, (8, 9), pair_bytes=n, q_len=1).decode for n in (0, 1)
    )
    assert one.block_q >= 32
    assert one.block_q * one.block_kv >= two.block_q * two.block_kv


def test_few_keys_have_the_other_forward_kernel():
    for kv_len, kernel in ((512, "forward"), (513, "decode")):
        assert tile_of(chosen(q_len=1, kv_len=kv_len), kernel)
        assert chosen(TileSizes(decode=Tile(16, 16)), q_len=1, kv_len=kv_len).decode


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


def test_a_split_backward_replaces_the_tile_of_a_joint_one_and_the_reverse():
    tile = Tile(16, 16)
    assert chosen(head_dim=64).dkv is not None
    split = chosen(TileSizes(dk=tile, dv=tile), head_dim=64)
    assert (split.dkv, split.dk, split.dv) == (None, tile, tile)
    assert chosen(head_dim=256).dkv is None
    joint = chosen(TileSizes(dkv=tile), head_dim=256)
    assert (joint.dkv, joint.dk, joint.dv) == (tile, None, None)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "backward"])
def test_what_is_asked_for_is_refused_exactly_where_it_does_not_fit(kernel):
    accepted = 0
    blocks = (16, 32, 64, 128, 256)
    for block_q, block_kv, stages in itertools.product(blocks, blocks, range(1, 9)):
        tile = Tile(block_q, block_kv, num_stages=stages)
        # dk and dv come in pairs.
        other = {"dk": {"dv": Tile(16, 16)}, "dv": {"dk": Tile(16, 16)}}.get(kernel, {})
        asked, q_len = TileSizes(**{kernel: tile}, **other), 1 if kernel == "decode" else 99
        if needed(kernel, tile, 128, itemsize=2) > LIMITS[8, 9] * KIB:
            with pytest.raises(ValueError, match=f"`config.{kernel}` must fit"):
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


# ------------------------------------------------------------------------------------------------
# Bias and mask arrays.


@pytest.mark.parametrize("capability", LIMITS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_arrays_over_pairs_wait_in_shared_memory_too(head_dim, itemsize, capability):
    """Each stage has its tile of them. Tiles that were not timed with them have two."""
    timed = capability in (None, (9, 0)) and itemsize == 2 and head_dim < 256
    for pair_bytes, q_len in itertools.product((1, 2, 5, 7), (1, 99)):
        sizes = chosen(None, head_dim, None, itemsize, capability, pair_bytes, q_len)
        for kernel, tile in tiles_of(sizes).items():
            pairs = tile.num_stages * tile.block_q * tile.block_kv * pair_bytes
            assert tile.num_stages <= (3 if timed and kernel != "decode" else 2)
            assert needed(kernel, tile, head_dim, itemsize) + pairs <= LIMITS[capability] * KIB


@pytest.mark.parametrize("itemsize", [2, 4])
def test_where_nothing_fits_the_least_tile_is_chosen(itemsize):
    sizes = chosen(None, 256, itemsize=itemsize, capability=(8, 9), pair_bytes=1000)
    assert set(tiles_of(sizes).values()) == {Tile(16, 16, 4, 1)}


def test_their_bytes_decide_on_tiles():
    """1: a mask, 2: a bias in 16 bits, 4: one in float32; and with a mask as without."""
    for head_dim in (64, 128):
        assert len({chosen(None, head_dim, pair_bytes=n) for n in (0, 1, 2, 4)}) == 4
    for bias in (2, 4):
        assert chosen(None, 64, pair_bytes=bias) == chosen(None, 64, pair_bytes=bias + 1)


def test_tiles_not_timed_with_arrays_over_pairs_lose_a_stage():
    plain, pairs = (tiles_of(chosen(None, 128, pair_bytes=n, itemsize=4)) for n in (0, 1))
    for kernel, tile in pairs.items():
        assert dataclasses.replace(plain[kernel], num_stages=2) == tile


def test_arrays_over_pairs_count_for_a_tile_that_is_asked_for():
    asked = TileSizes(forward=Tile(128, 64, num_stages=3))
    for pair_bytes, fits in ((0, True), (1, True), (10, False)):
        pairs = 3 * 128 * 64 * pair_bytes
        limit = LIMITS[9, 0] * KIB
        assert (needed("forward", asked.forward, 128, itemsize=2) + pairs <= limit) == fits
        if fits:
            assert chosen(asked, 128, pair_bytes=pair_bytes).forward == asked.forward
        else:
            with pytest.raises(ValueError, match=r"`config\.forward` must fit"):
                chosen(asked, 128, pair_bytes=pair_bytes)


# Bytes that one head streams and whether there is a mask, to how many of 12 heads are side by side:
# a divisor, so many that all fit in 32 MiB.
SIDE_BY_SIDE = [
    (32 * KIB * KIB // 12, True, 12),
    (32 * KIB * KIB // 12 + 4, True, 6),
    (32 * KIB * KIB // 5, True, 4),
    (8 * KIB * KIB, True, 4),
    (32 * KIB * KIB, True, 1),
    (64 * KIB * KIB, True, 1),
    (4, False, 1),
]


@pytest.mark.parametrize(("streamed", "masked", "heads"), SIDE_BY_SIDE)
def test_heads_that_share_the_cache_are_side_by_side(streamed, masked, heads):
    x = jax.ShapeDtypeStruct((2, 8, 12, 1), jnp.bfloat16)
    mask = Mask((Band(high=0),)) if masked else Mask(())
    problem = Problem(x, x, x, *[None] * 5, mask=mask)
    assert side_by_side(problem, mask, streamed // 4) == heads


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [100, 2**17])
def test_the_order_of_query_tiles(is_causal, length):
    """Heads that share keys, then those side by side, then tiles from the heaviest on."""
    B, N, K = 2, 12, 6
    mask = Mask((Band(high=0),)) if is_causal else Mask(())
    q, k = (jax.ShapeDtypeStruct((B, length, heads, 16), jnp.bfloat16) for heads in (N, K))
    problem = Problem(q, k, k, *[None] * 5, mask=mask)
    block = length // 4
    static = types.SimpleNamespace(q=Tiling(length, block))
    layout = QueryTiles(problem, static, mask)
    heads = {(True, 100): 6, (True, 2**17): 3}.get((is_causal, length), 1)
    tiles = [3, 2, 1, 0] if is_causal else [0, 1, 2, 3]
    wanted = [
        (b, 2 * kv_head + g, tile)
        for b in range(B)
        for first in range(0, K, heads)
        for tile in tiles
        for kv_head in range(first, first + heads)
        for g in range(2)
    ]
    ids = itertools.product(*map(range, layout.grid[::-1]))
    assert [layout.index(*x[::-1]) for x in ids] == wanted


def test_heads_are_side_by_side_in_every_kernel_that_has_tiles():
    """Axes of the grid that come before the last two are folded into the first."""
    x, k = (jax.ShapeDtypeStruct((3, 256, heads, 16), jnp.bfloat16) for heads in (8, 4))

    def gradient(q, k, v, do):
        call = functools.partial(attention, implementation="triton", is_causal=True)
        return jax.vjp(call, q, k, v)[1](do)

    grids = {kernel.name: kernel.grid for kernel in ttir.lower(gradient, x, k, k, x)}
    tiles = chosen(None, 16, kind="causal", rows=3 * 8 * 256, kv_rows=3 * 4 * 256, groups=2)
    assert grids["pallas_flash_forward"] == (2 * 4 * 256 // tiles.forward.block_q, 1, 3)
    assert grids["pallas_flash_dq"] == (2 * 4 * 256 // tiles.dq.block_q, 1, 3)
    # Heads that share keys have programs of their own in so small a call.
    assert grids["pallas_flash_dkv"] == (2 * 4 * 256 // tiles.dkv.block_kv, 1, 3)
