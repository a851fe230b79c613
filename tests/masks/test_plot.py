"""The picture of a mask is the mask, and its colours are what the kernels do with each tile."""

import functools
import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from support import cases
from support.strict import strictly

import pallas_flash
from pallas_flash.masks import BlockMask, Predicate, PrefixLM

matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")

T, S, B, N = 10, 14, 2, 3


@pytest.fixture(autouse=True)
def closed_figures():
    with strictly(leaks=False):
        yield
    plt.close("all")


def random(*shape):
    return jax.device_put(np.random.default_rng(0).random(shape) < 0.5)


def banded(b, h, q_pos, k_pos, width):
    return abs(q_pos - k_pos) <= width[b] + h


WIDTH = (jnp.asarray([1, 4], jnp.int32),)
BLOCKS = random(B, 1, 3, 4)
LENGTHS = {"q_len": T, "kv_len": S}
CASES = {
    "nothing hidden": LENGTHS,
    "causal": {"is_causal": True, "query_offset": 4, **LENGTHS},
    "causal, by example": {
        "is_causal": True,
        "query_offset": jnp.asarray([0, 3], jnp.int32),
        **LENGTHS,
    },
    "positions": {
        "is_causal": True,
        "query_positions": jnp.asarray([[*range(5, 10), *range(5)]] * B, jnp.int32),
        "key_value_positions": jnp.arange(S, dtype=jnp.int32)[None] + 1,
    },
    "window": {"local_window_size": (2, 1), **LENGTHS},
    "lengths": {
        "query_seq_lengths": jnp.asarray([10, 7], jnp.int32),
        "key_value_seq_lengths": jnp.asarray([3, 12], jnp.int32),
        **LENGTHS,
    },
    "mask": {"mask": random(B, N, T, S)},
    "mask of keys": {"mask": random(B, 1, 1, S), "q_len": T},
    "segments": {"segment_ids": (jnp.arange(T)[None] // 4, jnp.arange(S)[None] // 5)},
    "prefix": {"mask": PrefixLM(jnp.asarray([5, 2], jnp.int32)), **LENGTHS},
    "predicate": {"mask": Predicate(banded, WIDTH), **LENGTHS},
    "blocks": {"mask": BlockMask(BLOCKS, 4, 4), **LENGTHS},
    "blocks of a mask": {
        "mask": BlockMask.from_mask(Predicate(banded, WIDTH), T, S, batch=B, num_heads=N, block_q=4)
    },
    "joined": {
        "mask": BlockMask(BLOCKS, 4, 4) & Predicate(banded, WIDTH),
        "local_window_size": (3, None),
        **LENGTHS,
    },
}


def attended(b, h, case):
    """[T, S]: where `attention` lets a gradient through, found without any code of the drawing."""
    arguments = dict(case)
    for name in ("q_len", "kv_len"):
        arguments.pop(name, None)
    if case.get("segment_ids") is not None:
        arguments["segment_ids"] = tuple(
            jnp.broadcast_to(x, (B, x.shape[1])) for x in case["segment_ids"]
        )
    q, k = jnp.zeros((B, T, N, 1)), jnp.zeros((B, S, N, 1))
    v = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, N, S))
    call = functools.partial(pallas_flash.attention, implementation="reference", **arguments)
    return np.asarray(jax.jit(call)(q, k, v))[b, :, h] > 0


CHOSEN = ["causal, by example", "positions", "mask", "segments", "blocks", "joined"]


@pytest.mark.parametrize("name", cases.default(CHOSEN, CASES))
def test_image_is_the_mask(name):
    case, images = CASES[name], []
    broadcast = case.get("segment_ids") is not None
    for b, h in ((0, 0), (0 if broadcast else 1, 2)):
        [image] = pallas_flash.masks.plot(**case, b=b, h=h).images
        np.testing.assert_array_equal(image.get_array(), attended(b, h, case))
        # Row 0 is drawn at the top, and pixel (row, column) at (column, row).
        assert list(image.get_extent()) == [-0.5, S - 0.5, T - 0.5, -0.5]
        images.append(image.get_array())
    assert (name != "nothing hidden") == (not images[0].all())


NAMES = {
    "#ffffff": "empty block",
    "#ffe8cc": "partial, hidden",
    "#ff9420": "partial, visible",
    "#3d7edb": "full block",
}


def occurring(ax):
    """The name of each color that pairs have on the canvas, in the legend's order."""
    ax.figure.canvas.draw()
    canvas = np.asarray(ax.figure.canvas.buffer_rgba())
    rows, columns = np.indices(ax.images[0].get_array().shape)
    centers = ax.transData.transform(np.stack([columns.ravel(), rows.ravel()], axis=-1))
    x, y = centers.round().astype(int).T
    colors = {to_hex(color / 255) for color in canvas[len(canvas) - 1 - y, x]}
    assert colors <= NAMES.keys()
    return {name: color for color, name in NAMES.items() if color in colors}


def legend(ax):
    entries = ax.get_legend()
    colors = [to_hex(patch.get_facecolor()) for patch in entries.get_patches()]
    return dict(zip([text.get_text() for text in entries.get_texts()], colors, strict=True))


TILES = [
    ("blocks", (4, 2)),
    ("mask", (16, 1)),
    *((name, (3, 5)) for name in CHOSEN),
    ("causal", (4, 4)),
    *((name, (3, 5)) for name in CASES if name not in CHOSEN),
]


@pytest.mark.parametrize(("name", "blocks"), cases.default(TILES[:6], TILES))
def test_blocks_are_colored_by_class(name, blocks):
    block_q, block_kv = blocks
    # Another batch element and head than the first ones, which must not stand for all.
    at = {"b": 0 if name == "segments" else 1, "h": 2}
    ax = pallas_flash.masks.plot(**CASES[name], **at, block_q=block_q, block_kv=block_kv)
    seen, [mesh] = np.asarray(ax.images[0].get_array()), ax.collections
    classes = np.asarray(mesh.get_array())
    rows, columns = range(0, T, block_q), range(0, S, block_kv)
    assert classes.shape == (len(rows), len(columns))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            tile = seen[row : row + block_q, column : column + block_kv]
            # Tiles that are skipped are empty and tiles without a mask full; where the classes are
            # exact, the converse holds too, except at the ends.
            ragged = column + block_kv > S or row + block_q > T
            exact = int(tile.any()) + int(tile.all())
            assert classes[i, j] == exact or (
                classes[i, j] == 1 and (name in CONSERVATIVE or ragged)
            )
    assert [tuple(mesh.get_coordinates()[k, k]) for k in (0, -1)] == [
        (-0.5, -0.5),
        (S - 0.5, T - 0.5),
    ]
    assert legend(ax) == occurring(ax)


# Nobody asks a predicate for a whole tile, and tiles need not be those of a BlockMask; ids are
# compared by the smallest and largest of a tile.
CONSERVATIVE = {"predicate", "blocks", "blocks of a mask", "joined", "segments"}


def test_colors_tell_classes_and_pairs():
    ax = pallas_flash.masks.plot(q_len=12, kv_len=12, is_causal=True, block_q=4, block_kv=4)
    [mesh] = ax.collections
    np.testing.assert_array_equal(mesh.get_array(), [[1, 0, 0], [2, 1, 0], [2, 2, 1]])
    assert list(occurring(ax)) == list(NAMES.values())


def test_legend_omits_colors_that_do_not_occur():
    ax = pallas_flash.masks.plot(jnp.arange(8)[None] < jnp.full((8, 1), 4), block_q=4, block_kv=4)
    assert list(legend(ax)) == list(occurring(ax)) == ["empty block", "full block"]


def test_legend_is_absent_without_tiles():
    ax = pallas_flash.masks.plot(q_len=12, kv_len=12, is_causal=True)
    assert ax.get_legend() is None and not ax.collections


def test_ragged_block_is_partial():
    ax = pallas_flash.masks.plot(q_len=6, kv_len=6, block_q=4, block_kv=4)
    np.testing.assert_array_equal(ax.collections[0].get_array(), [[2, 1], [2, 1]])


def test_draws_into_given_axes():
    _, (left, right) = plt.subplots(1, 2)
    assert pallas_flash.masks.plot(q_len=3, kv_len=3, ax=right) is right
    assert right.images
    assert not left.images
    assert (right.get_xlabel(), right.get_ylabel()) == ("key", "query")


def plot(*args, **kwargs):
    return lambda: pallas_flash.masks.plot(*args, **kwargs)


ERRORS = {
    "no length": (
        plot(is_causal=True),
        ValueError,
        "`q_len` must be given where neither `mask`, `segment_ids` nor positions tell it",
    ),
    "no key length": (plot(q_len=3), ValueError, "`kv_len` must be given where neither"),
    "length": (
        plot(q_len=0, kv_len=3),
        ValueError,
        "`q_len` must be an int of at least 1; got int 0",
    ),
    "length of another kind": (plot(q_len=3, kv_len=3.0), ValueError, "`kv_len` must be an int"),
    "one block": (
        plot(**LENGTHS, block_q=4),
        ValueError,
        "`block_kv` must be an int .*; got NoneType None",
    ),
    "block": (plot(**LENGTHS, block_q=0, block_kv=4), ValueError, "`block_q` must be an int"),
    "example": (plot(random(B, 1, T, S), b=B), ValueError, r"`b` must be in 0 .. 1 .*; got 2\. D"),
    "example of another kind": (plot(**LENGTHS, b=0.5), ValueError, "`b` must be an int"),
    "negative example": (plot(**LENGTHS, b=-1), ValueError, "`b` must be an int of at least 0"),
    "head": (plot(random(N, T, S), h=N), ValueError, r"`h` must be in 0 .. 2 .*; got 3\. D"),
    "negative head": (plot(random(N, T, S), h=-1), ValueError, "`h` must be an int of at least 0"),
    "example of an array for one": (
        plot(**LENGTHS, key_value_seq_lengths=jnp.array([3], jnp.int32), b=1),
        ValueError,
        r"`key_value_seq_lengths` must have shape \[B\] = \(2,\); got \(1,\)",
    ),
    "mask": (plot(jnp.ones((T, S))), TypeError, "`mask` must be boolean"),
    "mask that does not fit": (
        plot(random(T, S), q_len=T + 1),
        ValueError,
        "`mask` must be broadcastable",
    ),
    "segment_ids": (plot(**LENGTHS, segment_ids=5), TypeError, "`segment_ids` must be"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error(case):
    call, exception, message = ERRORS[case]
    with pytest.raises(exception, match=message):
        call()


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"`masks.plot` must have matplotlib.*pip install"):
        pallas_flash.masks.plot(q_len=3, kv_len=3)


def test_draws_the_same_under_x64():
    with jax.enable_x64(True):
        [image] = pallas_flash.masks.plot(**CASES["blocks"]).images
    np.testing.assert_array_equal(image.get_array(), attended(0, 0, CASES["blocks"]))


def test_classes_of_each_head():
    by_head = jnp.broadcast_to(jnp.arange(N)[:, None, None] == 2, (N, 8, 8))
    for h in range(N):
        [mesh] = pallas_flash.masks.plot(by_head, h=h, block_q=4, block_kv=4).collections
        assert np.all(mesh.get_array() == (2 if h == 2 else 0))


def test_sizes_from_conjunction():
    by_head = random(N, T, S)
    # So does the mask that a BlockMask keeps.
    [image] = pallas_flash.masks.plot(BlockMask.from_mask(by_head, T, S).mask, h=N - 1).images
    np.testing.assert_array_equal(image.get_array(), by_head[N - 1])
    [image] = pallas_flash.masks.plot(by_head & Predicate(banded, WIDTH), h=N - 1).images
    assert image.get_array().shape == (T, S)
    with pytest.raises(ValueError, match=r"`h` must be in 0 .. 2 .*; got 3"):
        pallas_flash.masks.plot(by_head & Predicate(banded, WIDTH), h=N)


def test_sizes_from_segments():
    ids = jnp.asarray([[0, 0, 1, 1], [0, 1, 1, 1]], jnp.int32)
    [image] = pallas_flash.masks.plot(pallas_flash.masks.Segments(ids), b=1).images
    np.testing.assert_array_equal(image.get_array(), ids[1][:, None] == ids[1][None])
