"""Tile sizes that are refused: of the wrong type, of another kernel, too large for the GPU."""

import jax.numpy as jnp
import numpy as np
from support.calls import NEWER, Row, check, each, inputs

from pallas_flash import tuning
from pallas_flash.tuning import Tile, TileSizes


def sizes_with(name, x):
    return TileSizes(forward=Tile(**{"block_q": 16, "block_kv": 16} | {name: x}))


# A tile of "mosaic", a number of it, and what that may not be.
NUMBERS = [
    (tuning.ForwardTile, "warpgroups", (1, 4)),
    (tuning.ForwardTile, "block_kv", (0, 100, 272)),
    (tuning.ForwardTile, "output_slots", (-1, 5)),
    (tuning.ForwardTile, "stages", (1, 5)),
    (tuning.ForwardTile, "cluster_size", (0, 3)),
    (tuning.DecodeTile, "warpgroups", (1,)),
    (tuning.DecodeTile, "stages", (0, 1, 5, 14)),
    (tuning.BackwardTile, "block_q", (32, 96)),
    (tuning.BackwardTile, "stages", (0,)),
    (tuning.DqTile, "warpgroups", (1,)),
    (tuning.DqTile, "block_kv", (32, 80)),
    (tuning.DqTile, "stages", (0,)),
]
# Tiles of "mosaic" that no Hopper GPU has room for, and why.
TOO_LARGE = [
    ("forward", tuning.ForwardTile(2, 192), 128, "`tile_sizes.forward` must fit in the GPU's 227"),
    ("backward", tuning.BackwardTile(128, 4), 64, "`tile_sizes.backward` must fit in the GPU's"),
    ("dq", tuning.DqTile(3, 128, 4), 128, "`tile_sizes.dq` must fit in the GPU's 227 KiB"),
    ("forward", tuning.ForwardTile(3, 224), 8, "`tile_sizes.forward` must fit in a thread's 160"),
    ("dkv", tuning.BackwardTile(128), 128, "`tile_sizes.dkv` must fit in a thread's 240"),
    ("dq", tuning.DqTile(3, 128), 64, "`tile_sizes.dq` must fit in a thread's 160 registers"),
    ("backward", tuning.BackwardTile(64), 64, "`tile_sizes.backward` must have 128 queries at"),
]


def for_hopper(head_dim):
    x = jnp.zeros((2, 5, 4, head_dim), jnp.bfloat16)
    return dict(query=x, key=x, value=x, implementation="mosaic")


def bad_tiles_of_mosaic():
    tile = Tile(64, 64)
    for kind, name, values in NUMBERS:
        for x in values:
            yield Row(
                f"{name} of {x}, {kind.__name__}",
                lambda kind=kind, name=name, x=x: {"tile_sizes": kind(**{name: x})},
                ValueError,
                f"`{name}` must be one of (",
            )
        yield Row(
            f"{name} as a float, {kind.__name__}",
            lambda kind=kind, name=name: {"tile_sizes": kind(**{name: 64.0})},
            TypeError,
            f"`{name}` must be an int; got float 64.0.",
        )
    for name, x in (("decode", tuning.ForwardTile()), ("dq", tuning.ForwardTile())):
        yield Row(
            f"{name} with a tile of another kernel",
            lambda name=name, x=x: {"tile_sizes": TileSizes(**{name: x})},
            TypeError,
            f"`{name}` must be a pallas_flash.tuning.Tile",
        )
    yield Row(
        "a pass for all gradients with a tile that has none",
        lambda: {"tile_sizes": TileSizes(backward=tile)},
        TypeError,
        "`backward` must be a pallas_flash.tuning.BackwardTile or None; got Tile Tile(",
    )
    for dkv in ({"dkv": tile}, {"dk": tile, "dv": tile}):
        yield Row(
            f"{' and '.join(dkv)} and dq of two implementations",
            lambda dkv=dkv: {"tile_sizes": TileSizes(**dkv, dq=tuning.DqTile())},
            ValueError,
            f"`dq` must be for the implementation of `{next(iter(dkv))}`; got DqTile(",
        )
    for kernel, x in (("forward", tuning.ForwardTile()), ("backward", tuning.BackwardTile())):
        yield Row(
            f"{kernel} tile of mosaic for others",
            lambda kernel=kernel, x=x: {
                "tile_sizes": TileSizes(**{kernel: x}),
                "implementation": "interpret",
            },
            ValueError,
            f"`tile_sizes.{kernel}` must be a tile of who computes that pass, 'interpret'; got ",
        )
    if not NEWER:
        return
    yield Row(
        "a tile of others for mosaic",
        lambda: for_hopper(128) | {"tile_sizes": TileSizes(dkv=tile)},
        ValueError,
        "`tile_sizes.dkv` must be a tile of who computes that pass, 'mosaic'; got Tile(",
        gpu="NVIDIA H200",
    )
    for kernel, x, head_dim, fragment in TOO_LARGE:
        yield Row(
            f"{x} for {kernel} at {head_dim}",
            lambda kernel=kernel, x=x, head_dim=head_dim: (
                for_hopper(head_dim) | {"tile_sizes": TileSizes(**{kernel: x})}
            ),
            ValueError,
            fragment,
            gpu="NVIDIA H200",
        )
    yield Row(
        "cluster with three warpgroups",
        lambda: {"tile_sizes": tuning.ForwardTile(warpgroups=3, cluster_size=2)},
        ValueError,
        "`cluster_size` must be one of (1,); got 2.",
    )
    yield Row(
        "cluster with a mask of arrays",
        lambda: {
            **for_hopper(128),
            "key_value_seq_lengths": jnp.array([3, 4]),
            "tile_sizes": TileSizes(forward=tuning.ForwardTile(cluster_size=2)),
        },
        ValueError,
        "`tile_sizes.forward` must have `cluster_size=1` where arrays or a predicate say which ",
        gpu="NVIDIA H200",
    )
    yield Row(
        "wider values in place of queries",
        lambda: {
            **for_hopper(8),
            "value": jnp.zeros((2, 5, 4, 72), jnp.bfloat16),
            "tile_sizes": TileSizes(forward=tuning.ForwardTile(output_slots=0)),
        },
        ValueError,
        "`tile_sizes.forward` must have `output_slots` where values are wider than queries; got ",
        gpu="NVIDIA H200",
    )


def bad_configurations():
    triton, mosaic = tuning.Triton(forward=Tile(64, 64)), tuning.Mosaic(dq=tuning.DqTile())
    for implementation, x, wanted in (
        ("interpret", mosaic, "Triton"),
        ("triton", tuning.Mosaic(), "Triton"),
        ("mosaic", triton, "Mosaic"),
    ):
        yield Row(
            f"{x} for {implementation}",
            lambda implementation=implementation, x=x: {
                "tile_sizes": x,
                "implementation": implementation,
            },
            ValueError,
            f"`tile_sizes` must be a pallas_flash.tuning.{wanted} with implementation="
            f"{implementation!r}; got {type(x).__name__}(",
        )
    for name, kernel, x, kind in (
        ("Triton", "forward", tuning.ForwardTile(), "Tile"),
        ("Triton", "dk", (64, 64), "Tile"),
        ("Mosaic", "forward", Tile(64, 64), "ForwardTile"),
        ("Mosaic", "decode", tuning.ForwardTile(), "DecodeTile"),
        ("Mosaic", "backward", Tile(64, 64), "BackwardTile"),
    ):
        yield Row(
            f"{kernel} of {name} with a {type(x).__name__}",
            lambda name=name, kernel=kernel, x=x: {
                "tile_sizes": getattr(tuning, name)(**{kernel: x})
            },
            TypeError,
            f"`{kernel}` must be a pallas_flash.tuning.{kind} or None in a pallas_flash.tuning."
            f"{name}; got {type(x).__name__} ",
        )
    yield Row(
        "dk of Triton alone",
        lambda: {"tile_sizes": tuning.Triton(dk=Tile(64, 64))},
        ValueError,
        "`dk` and `dv` must be given together and without `dkv`; got ",
    )


def bad_tiles():
    for name in ("block_q", "block_kv", "num_warps", "num_stages"):
        for x in (16.0, True, "16", None, np.int64(16)):
            yield Row(
                f"{name} as {type(x).__name__}",
                lambda name=name, x=x: {"tile_sizes": sizes_with(name, x)},
                TypeError,
                f"`{name}` must be an int; got {type(x).__name__} ",
            )
        for x in (0, -16, 12, 512):
            yield Row(
                f"{name} of {x}",
                lambda name=name, x=x: {"tile_sizes": sizes_with(name, x)},
                ValueError,
                f"`{name}` must be one of (",
            )
    for name in ("forward", "dkv", "dk", "dv", "dq"):
        yield Row(
            f"{name} tile that is none",
            lambda name=name: {"tile_sizes": TileSizes(**{name: (64, 64)})},
            TypeError,
            f"`{name}` must be a pallas_flash.tuning.Tile",
        )
    tile = Tile(64, 64)
    for mixed in ("dkv dk", "dkv dv", "dkv dk dv", "dk", "dv"):
        yield Row(
            f"tiles for {mixed}",
            lambda mixed=mixed: {"tile_sizes": TileSizes(**dict.fromkeys(mixed.split(), tile))},
            ValueError,
            "`dk` and `dv` must be given together and without `dkv`; got ",
        )
    yield from bad_tiles_of_mosaic()
    yield from bad_configurations()
    for x in (tile, (64, 64), {"forward": tile}, "large"):
        yield Row(
            f"tile sizes as {type(x).__name__}",
            lambda x=x: {"tile_sizes": x},
            TypeError,
            "`tile_sizes` must be a pallas_flash.tuning.Triton or a pallas_flash.tuning.Mosaic; "
            f"got {type(x).__name__} ",
        )
    for implementation in ("xla", "reference"):
        yield Row(
            f"tile sizes for {implementation}",
            lambda implementation=implementation: {
                "tile_sizes": tuning.Triton(forward=tile),
                "implementation": implementation,
            },
            ValueError,
            "`tile_sizes` must be None where no kernel takes them; got Triton(",
        )
    # 8 stages of 64 keys and values of head dim 128 in two bytes: 264 KiB and more.
    deep = Tile(64, 64, num_stages=8)
    for kernel in ("forward", "dkv", "dq"):
        for gpu, limit in (("NVIDIA H200", 227), ("NVIDIA A100", 163), ("NVIDIA L4", 99)):
            yield Row(
                f"{kernel} tile too large for {gpu}",
                lambda kernel=kernel: {
                    **inputs(jnp.bfloat16, head_dim=128),
                    "tile_sizes": TileSizes(**{kernel: deep}),
                },
                ValueError,
                f"`tile_sizes.{kernel}` must fit in the GPU's {limit} KiB of shared memory; got ",
                gpu=gpu,
            )


ROWS = list(bad_tiles())


@each(ROWS)
def test_error_message(row):
    check(row)
