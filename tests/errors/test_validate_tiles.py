"""Tile sizes that are refused: of the wrong type, of another kernel, too large for the GPU."""

import functools

import jax.numpy as jnp
import numpy as np
from support.calls import NEWER, Row, assert_each, inputs

from pallas_flash import tuning
from pallas_flash.tuning import Tile, TileSizes


def sizes_with(name, x):
    return TileSizes(forward=Tile(**{"block_q": 16, "block_kv": 16} | {name: x}))


# A tile of "mosaic", a number of it, and what that may not be.
NUMBERS = [
    (tuning.ForwardTile, "warpgroups", (1, 5)),
    (tuning.ForwardTile, "block_kv", (0, 100, 272)),
    (tuning.ForwardTile, "output_slots", (-1, 5)),
    (tuning.ForwardTile, "stages", (1, 5)),
    (tuning.ForwardTile, "cluster_size", (0, 3)),
    (tuning.BackwardTile, "block_q", (32, 96)),
    (tuning.BackwardTile, "stages", (0,)),
    (tuning.DqTile, "warpgroups", (1,)),
    (tuning.DqTile, "block_kv", (32, 80)),
    (tuning.DqTile, "stages", (0,)),
]
# Tiles of "mosaic" that no Hopper GPU has room for, and why.
TOO_LARGE = [
    ("forward", tuning.ForwardTile(2, 192), 128, "`config.forward` must fit in the GPU's 227"),
    ("backward", tuning.BackwardTile(128, 4), 64, "`config.backward` must fit in the GPU's"),
    ("dq", tuning.DqTile(3, 128, 4), 128, "`config.dq` must fit in the GPU's 227 KiB"),
    ("forward", tuning.ForwardTile(3, 224), 8, "`config.forward` must fit in a thread's 160"),
    ("dkv", tuning.BackwardTile(128), 128, "`config.dkv` must fit in a thread's 240"),
    ("dq", tuning.DqTile(3, 128), 64, "`config.dq` must fit in a thread's 160 registers"),
    ("backward", tuning.BackwardTile(64), 64, "`config.backward` must have 128 queries at"),
    ("dkv", tuning.BackwardTile(128, 1), 160, "`config.dkv` must have 64 queries at head dim"),
]


def for_hopper(head_dim):
    x = jnp.zeros((2, 5, 4, head_dim), jnp.bfloat16)
    return dict(query=x, key=x, value=x, implementation="mosaic")


def tiles(id, error, fragment, make, *, gpu=None, call=dict, **others):
    """A row of a call with the `config` that `make` returns, or raises at."""
    return Row(id, lambda: {**call(), "config": make(), **others}, error, fragment, gpu=gpu)


def sizes_of(**tiles):
    return functools.partial(TileSizes, **tiles)


def bad_numbers():
    for kind, name, values in NUMBERS:
        for x in values:
            make = functools.partial(kind, **{name: x})
            said = f"`{name}` must be one of ("
            yield tiles(f"{name} of {x}, {kind.__name__}", ValueError, said, make)
        make = functools.partial(kind, **{name: 64.0})
        said = f"`{name}` must be an int; got float 64.0."
        yield tiles(f"{name} as a float, {kind.__name__}", TypeError, said, make)
    make = functools.partial(tuning.ForwardTile, warpgroups=3, cluster_size=2)
    said = "`cluster_size` must be one of (1,); got 2."
    yield tiles("cluster with three warpgroups", ValueError, said, make)
    for name in ("block_q", "block_kv", "num_warps", "num_stages"):
        for x in (16.0, True, "16", None, np.int64(16)):
            make = functools.partial(sizes_with, name, x)
            said = f"`{name}` must be an int; got {type(x).__name__} "
            yield tiles(f"{name} as {type(x).__name__}", TypeError, said, make)
        for x in (0, -16, 12, 512):
            make = functools.partial(sizes_with, name, x)
            yield tiles(f"{name} of {x}", ValueError, f"`{name}` must be one of (", make)


def bad_kernels():
    """Yield tiles of another kernel or of none, and of kernels that do not go together."""
    tile = Tile(64, 64)
    for name in ("forward", "dkv", "dk", "dv", "dq"):
        said = f"`{name}` must be a pallas_flash.tuning.Tile"
        yield tiles(f"{name} that is none", TypeError, said, sizes_of(**{name: (64, 64)}))
    for name in ("decode", "dq"):
        said = f"`{name}` must be a pallas_flash.tuning.Tile"
        make = sizes_of(**{name: tuning.ForwardTile()})
        yield tiles(f"{name} with a tile of another kernel", TypeError, said, make)
    said = "`backward` must be a pallas_flash.tuning.BackwardTile or None; got Tile Tile("
    make = sizes_of(backward=tile)
    yield tiles("all gradients with a tile that has none", TypeError, said, make)
    together = "`dk` and `dv` must be given together and without `dkv`; got "
    for mixed in ("dkv dk", "dkv dv", "dkv dk dv", "dk", "dv"):
        make = sizes_of(**dict.fromkeys(mixed.split(), tile))
        yield tiles(f"tiles for {mixed}", ValueError, together, make)
    make = functools.partial(tuning.Triton, dk=tile)
    yield tiles("dk of Triton alone", ValueError, together, make)
    for dkv in ({"dkv": tile}, {"dk": tile, "dv": tile}):
        said = f"`dq` must be for the implementation of `{next(iter(dkv))}`; got DqTile("
        make = sizes_of(**dkv, dq=tuning.DqTile())
        id = f"{' and '.join(dkv)} and dq of two implementations"
        yield tiles(id, ValueError, said, make)
    for name, kernel, x, kind in (
        ("Triton", "forward", tuning.ForwardTile(), "Tile"),
        ("Triton", "dk", (64, 64), "Tile"),
        ("Mosaic", "forward", tile, "ForwardTile"),
        ("Mosaic", "backward", tile, "BackwardTile"),
    ):
        got = type(x).__name__
        said = (
            f"`{kernel}` must be a pallas_flash.tuning.{kind} or None in a pallas_flash.tuning."
            f"{name}; got {got} "
        )
        make = functools.partial(getattr(tuning, name), **{kernel: x})
        yield tiles(f"{kernel} of {name} with a {got}", TypeError, said, make)


def bad_implementations():
    """Yield tiles of an implementation that does not compute the pass."""
    triton, mosaic = tuning.Triton(forward=Tile(64, 64)), tuning.Mosaic(dq=tuning.DqTile())
    for asked, x, wanted in (
        ("interpret", mosaic, "Triton"),
        ("triton", tuning.Mosaic(), "Triton"),
        ("mosaic", triton, "Mosaic"),
    ):
        said = (
            f"`config` must be a pallas_flash.tuning.{wanted} with implementation={asked!r}; "
            f"got {type(x).__name__}("
        )
        yield tiles(f"{x} for {asked}", ValueError, said, lambda x=x: x, implementation=asked)
    for asked in ("xla", "reference"):
        said = "`config` must be None where no kernel has tiles; got Triton("
        id = f"tile sizes for {asked}"
        yield tiles(id, ValueError, said, lambda: triton, implementation=asked)
    for kernel, x in (("forward", tuning.ForwardTile()), ("backward", tuning.BackwardTile())):
        said = f"`config.{kernel}` must be a tile of that pass's implementation, 'interpret'; got "
        id, make = f"{kernel} tile of mosaic for others", sizes_of(**{kernel: x})
        yield tiles(id, ValueError, said, make, implementation="interpret")


def too_large():
    """Yield tiles that the GPU has no room for, and others that do not fit the call."""
    # 8 stages of 64 keys and values of head dim 128 in two bytes: 264 KiB and more.
    deep, call = Tile(64, 64, num_stages=8), functools.partial(inputs, jnp.bfloat16, head_dim=128)
    for kernel in ("forward", "dkv", "dq"):
        for gpu, limit in (("NVIDIA H200", 227), ("NVIDIA A100", 163), ("NVIDIA L4", 99)):
            said = f"`config.{kernel}` must fit in the GPU's {limit} KiB of shared memory; got "
            id, make = f"{kernel} tile too large for {gpu}", sizes_of(**{kernel: deep})
            yield tiles(id, ValueError, said, make, gpu=gpu, call=call)
    if not NEWER:
        return

    def on_hopper(id, fragment, head_dim, others=(), **given):
        call = functools.partial(for_hopper, head_dim)
        made = sizes_of(**given)
        return tiles(id, ValueError, fragment, made, gpu="NVIDIA H200", call=call, **dict(others))

    for kernel, x, head_dim, fragment in TOO_LARGE:
        yield on_hopper(f"{x} for {kernel} at {head_dim}", fragment, head_dim, **{kernel: x})
    yield on_hopper(
        "a tile of others for mosaic",
        "`config.dkv` must be a tile of that pass's implementation, 'mosaic'; got Tile(",
        128,
        dkv=Tile(64, 64),
    )
    yield on_hopper(
        "cluster with a mask of arrays",
        "`config.forward` must have `cluster_size=1` where arrays or a predicate say which ",
        128,
        {"key_value_seq_lengths": jnp.array([3, 4])},
        forward=tuning.ForwardTile(cluster_size=2),
    )
    q, x = (jnp.zeros((2, n, 4, 320), jnp.bfloat16) for n in (20, 200))
    yield on_hopper(
        "a tile that wide heads do not have",
        "`config.forward` must have 2 warpgroups, 64 keys and 1 output slot at",
        320,
        dict(query=q, key=x, value=x),
        forward=tuning.ForwardTile(),
    )
    yield on_hopper(
        "more warpgroups than wide values leave registers for",
        "`config.forward` must have fewer warpgroups, whose threads have more registers, for ",
        160,
        forward=tuning.ForwardTile(4, 16),
    )
    yield on_hopper(
        "wider values where the output reuses the queries",
        "`config.forward` must have `output_slots` where values are wider than queries; got ",
        8,
        {"value": jnp.zeros((2, 5, 4, 72), jnp.bfloat16)},
        forward=tuning.ForwardTile(output_slots=0),
    )


def no_tiles():
    tile = Tile(64, 64)
    said = "`config` must be a pallas_flash.tuning.Triton or a pallas_flash.tuning.Mosaic; got "
    for x in (tile, (64, 64), {"forward": tile}, "large"):
        kind = type(x).__name__
        yield tiles(f"tile sizes as {kind}", TypeError, f"{said}{kind} ", lambda x=x: x)


ROWS = [
    *bad_numbers(),
    *bad_kernels(),
    *bad_implementations(),
    *too_large(),
    *no_tiles(),
]


def test_error_messages():
    assert_each(ROWS)
