"""Every error that a call of `attention` can meet: one table, and no `raise` without a row."""

import ast
import contextlib
import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from described_gpus import described_gpu
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_flash
from pallas_flash import BlockMask, Predicate, PrefixLM, Segments, Tile, TileSizes, _compat, mosaic
from pallas_flash._validate import _At, _band, _offset


def zeros(shape, dtype):
    """Made by NumPy: `jnp.zeros` compiles a program for each shape."""
    return jax.device_put(np.zeros(shape, dtype))


def f32(*shape):
    return zeros(shape, np.float32)


def i32(*shape):
    return zeros(shape, np.int32)


def inputs(dtype=jnp.float32, head_dim=8):
    """A valid call; its sizes are all different, so that no two axes can be confused."""
    shapes = {"query": (2, 5, 6, head_dim), "key": (2, 7, 3, head_dim), "value": (2, 7, 3, 4)}
    return {name: zeros(shape, dtype) for name, shape in shapes.items()}


def unbatched(**changed):
    return {"query": f32(5, 6, 8), "key": f32(7, 3, 8), "value": f32(7, 3, 4)} | changed


class Row(NamedTuple):
    """A call that is refused.

    `arguments` makes what differs from a valid call. `gpu` is the kind of the GPU to compile for,
    the CPU if None; `traced` is an argument that arrives as a tracer; `differentiated` is one with
    respect to which the call is differentiated; `function` is called in place of `attention`, with
    `arguments` alone.
    """

    id: str
    arguments: Callable[[], dict]
    error: type[Exception]
    fragment: str
    gpu: str | None = None
    x64: bool = False
    traced: str | None = None
    differentiated: str | None = None
    function: Callable | None = None


INPUTS = ("query", "key", "value")
LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")
PER_HEAD = ("sinks", "alibi_slopes")
POSITIONS = ("query_positions", "key_value_positions")
ARRAYS = (*INPUTS, "bias", "mask", *LENGTHS, "segment_ids", *POSITIONS, *PER_HEAD)
FLAGS = ("is_causal", "broadcast_dropout", "return_residual", "return_lse")


def bad_dtypes():
    for name in INPUTS:
        for dtype in ("int32", "bool", "complex64", "float8_e4m3fn", "int4"):
            yield Row(
                f"{name} in {dtype}",
                lambda name=name, dtype=dtype: {name: inputs()[name].astype(dtype)},
                TypeError,
                f"`{name}` must be one of float16, bfloat16, float32, float64; got {dtype}.",
            )
    for name in ("key", "value"):
        yield Row(
            f"{name} in another dtype",
            lambda name=name: {name: inputs()[name].astype(jnp.bfloat16)},
            TypeError,
            f"`{name}` must have the dtype of `query`; got bfloat16 and float32.",
        )


def no_arrays():
    for name in ARRAYS:
        for x in ([[1.0, 2.0]], "text", 1.5, True, jax.ShapeDtypeStruct((2,), jnp.int32)):
            yield Row(
                f"{name} as {type(x).__name__}",
                # A list could be a pair of ids.
                lambda name=name, x=x: {name: (x, x) if name == "segment_ids" else x},
                TypeError,
                f"`{name}` must be an array; got {type(x).__name__} ",
            )
        for dtype in ("object", "U4", "datetime64[s]"):
            yield Row(
                f"{name} as NumPy array of {dtype}",
                lambda name=name, dtype=dtype: {name: np.zeros((2, 5), dtype)},
                TypeError,
                f"`{name}` must be an array that JAX can hold; got ndarray of ",
            )
    for name in INPUTS:
        yield Row(
            f"{name} missing",
            lambda name=name: {name: None},
            TypeError,
            f"`{name}` must be an array; got NoneType None.",
        )
    yield Row(
        "key of a random generator",
        lambda: {"key": jax.random.key(0)},
        TypeError,
        "`key` must be one of float16, bfloat16, float32, float64; got key<fry>.",
    )
    yield Row(
        "masked NumPy array",
        lambda: {"query": np.ma.ones((2, 5, 6, 8), np.float32)},
        TypeError,
        "`query` must be an array that JAX can hold; got MaskedArray of float32.",
    )


def bad_flags():
    for name in FLAGS:
        for x in (1, None, "yes", np.array(True)):
            yield Row(
                f"{name} as {type(x).__name__}",
                lambda name=name, x=x: {name: x},
                TypeError,
                f"`{name}` must be True or False; got ",
            )
        yield Row(
            f"{name} traced",
            lambda name=name: {name: True},
            TypeError,
            f"`{name}` must be True or False; got an array of bool with shape ().",
            traced=name,
        )

    for x in (1, "yes", np.array(True)):
        yield Row(
            f"reproducible as {type(x).__name__}",
            lambda x=x: {"reproducible": x},
            TypeError,
            "`reproducible` must be None, True or False; got ",
        )


def bad_context():
    for axis in ("sequence", ("data", "sequence"), (), {"sequence"}, [["sequence"]], 3):
        yield Row(
            f"sequence axis {axis}",
            lambda axis=axis: {"sequence_axis": axis},
            ValueError,
            "`sequence_axis` must name mesh axes, each once, that a `jax.shard_map` around the "
            f"call has made manual; got {axis!r}, and the call is in none.",
        )
    for x in ("ulysses", 3):
        yield Row(
            f"context parallelism {x!r}",
            lambda x=x: {"context_parallelism": x},
            ValueError,
            "`context_parallelism` must be None or one of ('ring', 'gather', 'heads'); got ",
        )

    def divided(heads: int, keys: P):
        mesh = AbstractMesh((4,), ("sequence",))
        query, key = (
            jax.ShapeDtypeStruct((1, 64, heads, 8), jnp.float32, sharding=NamedSharding(mesh, spec))
            for spec in (P(None, "sequence"), keys)
        )
        return {"query": query, "key": key, "value": key}

    yield Row(
        "heads that devices do not divide",
        lambda: divided(6, P(None, "sequence")) | {"context_parallelism": "heads"},
        NotImplementedError,
        "`context_parallelism` must be a method that serves the call; got 'heads'. Got 6 query "
        "heads, which 4 devices do not divide. Use None, or one of ['ring', 'gather'].",
        function=pallas_flash.explain,
    )
    yield Row(
        "a ring of keys that are not divided",
        lambda: divided(4, P()) | {"context_parallelism": "ring"},
        NotImplementedError,
        "got 'ring'. Every device has all keys and values, and nothing is sent.",
        function=pallas_flash.explain,
    )


def not_broadcastable():
    for name, dtype in (("bias", jnp.float32), ("mask", jnp.bool_)):
        for axis, shape in {
            "batch": (3, 6, 5, 7),
            "head": (2, 5, 5, 7),
            "head, which counts those of keys": (2, 3, 5, 7),
            "query": (2, 6, 7, 7),
            "query, of a [T, S] array": (7, 5),
            "key": (2, 6, 5, 5),
            "key, of length 0": (2, 6, 5, 0),
        }.items():
            yield Row(
                f"{name} with a wrong axis: {axis}",
                lambda name=name, shape=shape, dtype=dtype: {name: jnp.zeros(shape, dtype)},
                ValueError,
                f"`{name}` must be broadcastable to [B, N, T, S] = (2, 6, 5, 7); "
                f"got {name}.shape={shape}.",
            )
        yield Row(
            f"{name} of rank 5",
            lambda name=name, dtype=dtype: {name: jnp.zeros((1, 2, 6, 5, 7), dtype)},
            ValueError,
            f"`{name}` must have at most 4 axes, [B, N, T, S]; got rank 5",
        )


def bad_lengths():
    for name in LENGTHS:
        for dtype in ("float32", "uint32", "int8", "bool"):
            yield Row(
                f"{name} in {dtype}",
                lambda name=name, dtype=dtype: {name: jnp.zeros(2, dtype)},
                TypeError,
                f"`{name}` must be int32; got {dtype}.",
            )
        yield Row(
            f"{name} in int64",
            lambda name=name: {name: jnp.zeros(2, jnp.int64)},
            TypeError,
            f"`{name}` must be int32; got int64. Cast it",
            x64=True,
        )
        for shape in ((), (1,), (3,), (2, 1)):
            yield Row(
                f"{name} of shape {shape}",
                lambda name=name, shape=shape: {name: i32(*shape)},
                ValueError,
                f"`{name}` must have shape [B] = (2,); got {shape}.",
            )
    yield Row(
        "lengths of an unbatched call",
        lambda: unbatched(key_value_seq_lengths=i32()),
        ValueError,
        "`key_value_seq_lengths` must have shape [B] = (1,); got ().",
    )


def bad_positions():
    for name, letters, length in zip(POSITIONS, ("[B, T]", "[B, S]"), (5, 7), strict=True):
        for dtype in ("float32", "int16", "uint32", "bool"):
            yield Row(
                f"{name} in {dtype}",
                lambda name=name, length=length, dtype=dtype: {name: jnp.zeros((2, length), dtype)},
                TypeError,
                f"`{name}` must be int32; got {dtype}. Cast it",
            )
        for shape in ((length,), (2, length + 1), (3, length), (1, 1, length)):
            yield Row(
                f"{name} of shape {shape}",
                lambda name=name, shape=shape: {name: i32(*shape)},
                ValueError,
                f"`{name}` must have shape {letters} = {(2, length)}, its first axis possibly 1; "
                f"got {shape}. Give one number for each token.",
            )
    for offset in (3, np.int32(-1), jnp.int32(0), np.array([2, -1], np.int32)):
        yield Row(
            f"positions of queries and an offset of {offset}",
            lambda offset=offset: {"query_positions": i32(1, 5), "query_offset": offset},
            ValueError,
            "`query_offset` must be 0 with `query_positions`, which tell the same of each query; "
            "got ",
        )


def bad_windows():
    for window in (
        1.5, True, "3", {}, (), (1,), (1, 2, 3), (1.0, 2), (True, 1), np.array([1, 2]), np.array(1)
    ):  # fmt: skip
        yield Row(
            f"window {window!r}",
            lambda window=window: {"local_window_size": window},
            TypeError,
            "`local_window_size` must be None, an int or a pair (left, right) of these; got ",
        )
    for window in (-1, (-1, 2), (2, -1), (None, -1), np.int32(-3)):
        yield Row(
            f"window {window!r}",
            lambda window=window: {"local_window_size": window},
            ValueError,
            f"`local_window_size` must not be negative; got {window}.",
        )


def bad_scales():
    for scale in (
        "1", True, np.True_, 1j, [1.0], jnp.ones(1), jnp.ones((), jnp.int32), np.array(1),
        jnp.ones((), bool), jnp.ones((), jnp.complex64), jax.random.key(0),
    ):  # fmt: skip
        yield Row(
            f"scale {scale!r}",
            lambda scale=scale: {"scale": scale},
            TypeError,
            "`scale` must be a number or a floating-point scalar array; got ",
        )
    for scale in (float("nan"), float("inf"), -float("inf"), 1e39, 10**400, np.float16("nan")):
        yield Row(
            f"scale {scale!r:.20}",
            lambda scale=scale: {"scale": scale},
            ValueError,
            "`scale` must be finite in float32; got ",
        )


def sizes_with(name, x):
    return TileSizes(forward=Tile(**{"block_q": 16, "block_kv": 16} | {name: x}))


# A tile of "mosaic", a number of it, and what that may not be.
NUMBERS = [
    (mosaic.ForwardTile, "warpgroups", (1, 4)),
    (mosaic.ForwardTile, "block_kv", (0, 100, 272)),
    (mosaic.ForwardTile, "output_slots", (-1, 5)),
    (mosaic.ForwardTile, "stages", (1, 5)),
    (mosaic.ForwardTile, "programs", (0, 3)),
    (mosaic.DecodeTile, "warpgroups", (1,)),
    (mosaic.DecodeTile, "stages", (0, 1, 5, 14)),
    (mosaic.BackwardTile, "block_q", (32, 96)),
    (mosaic.BackwardTile, "stages", (0,)),
    (mosaic.DqTile, "warpgroups", (1,)),
    (mosaic.DqTile, "block_kv", (32, 80)),
    (mosaic.DqTile, "stages", (0,)),
]
# Tiles of "mosaic" that no Hopper GPU has room for, and why.
TOO_LARGE = [
    ("forward", mosaic.ForwardTile(2, 192), 128, "`tile_sizes.forward` must fit in the GPU's 227"),
    ("backward", mosaic.BackwardTile(128, 4), 64, "`tile_sizes.backward` must fit in the GPU's"),
    ("dq", mosaic.DqTile(3, 128, 4), 128, "`tile_sizes.dq` must fit in the GPU's 227 KiB"),
    ("forward", mosaic.ForwardTile(3, 224), 8, "`tile_sizes.forward` must fit in a thread's 160"),
    ("dkv", mosaic.BackwardTile(128), 128, "`tile_sizes.dkv` must fit in a thread's 240"),
    ("dq", mosaic.DqTile(3, 128), 64, "`tile_sizes.dq` must fit in a thread's 160 registers"),
    ("backward", mosaic.BackwardTile(64), 64, "`tile_sizes.backward` must have 128 queries at"),
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
    for name, x in (("decode", mosaic.ForwardTile()), ("dq", mosaic.ForwardTile())):
        yield Row(
            f"{name} with a tile of another kernel",
            lambda name=name, x=x: {"tile_sizes": TileSizes(**{name: x})},
            TypeError,
            f"`{name}` must be a pallas_flash.Tile",
        )
    yield Row(
        "a pass for all gradients with a tile that has none",
        lambda: {"tile_sizes": TileSizes(backward=tile)},
        TypeError,
        "`backward` must be a pallas_flash.mosaic.BackwardTile or None; got Tile Tile(",
    )
    for dkv in ({"dkv": tile}, {"dk": tile, "dv": tile}):
        yield Row(
            f"{' and '.join(dkv)} and dq of two implementations",
            lambda dkv=dkv: {"tile_sizes": TileSizes(**dkv, dq=mosaic.DqTile())},
            ValueError,
            f"`dq` must be for the implementation of `{next(iter(dkv))}`; got DqTile(",
        )
    for kernel, x in (("forward", mosaic.ForwardTile()), ("backward", mosaic.BackwardTile())):
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
        "programs that share keys, with more warpgroups",
        lambda: {"tile_sizes": mosaic.ForwardTile(warpgroups=3, programs=2)},
        ValueError,
        "`programs` must be one of (1,); got 2.",
    )
    yield Row(
        "programs that share keys that arrays tell",
        lambda: {
            **for_hopper(128),
            "key_value_seq_lengths": jnp.array([3, 4]),
            "tile_sizes": TileSizes(forward=mosaic.ForwardTile(programs=2)),
        },
        ValueError,
        "`tile_sizes.forward` must have `programs=1` where arrays or a predicate say which ",
        gpu="NVIDIA H200",
    )
    yield Row(
        "wider values in place of queries",
        lambda: {
            **for_hopper(8),
            "value": jnp.zeros((2, 5, 4, 72), jnp.bfloat16),
            "tile_sizes": TileSizes(forward=mosaic.ForwardTile(output_slots=0)),
        },
        ValueError,
        "`tile_sizes.forward` must have `output_slots` where values are wider than queries; got ",
        gpu="NVIDIA H200",
    )


def bad_tiles():
    for name in ("block_q", "block_kv", "num_warps", "num_stages", "num_slices"):
        for x in (16.0, True, "16", None, np.int64(16)):
            yield Row(
                f"{name} as {type(x).__name__}",
                lambda name=name, x=x: {"tile_sizes": sizes_with(name, x)},
                TypeError,
                f"`{name}` must be an int; got {type(x).__name__} ",
            )
        for x in (0, -16, 12, 512) if name != "num_slices" else (0, 3, 8):
            yield Row(
                f"{name} of {x}",
                lambda name=name, x=x: {"tile_sizes": sizes_with(name, x)},
                ValueError,
                f"`{name}` must be one of (",
            )
    yield Row(
        "slices of 8 queries",
        lambda: {"tile_sizes": sizes_with("num_slices", 2)},
        ValueError,
        "`num_slices` must leave 16 or more of `block_q` queries in each; got 2 of 16. Use fewer.",
    )
    for x in (1, None, "yes", np.bool_(True)):
        yield Row(
            f"one_loop as {type(x).__name__}",
            lambda x=x: {"tile_sizes": sizes_with("one_loop", x)},
            TypeError,
            f"`one_loop` must be a bool; got {type(x).__name__} ",
        )
    for name in ("decode", "dkv", "dk", "dv", "dq"):
        yield Row(
            f"{name} in one loop",
            lambda name=name: {"tile_sizes": TileSizes(**{name: Tile(64, 64, one_loop=True)})},
            ValueError,
            f"`{name}` must have `one_loop` False; got Tile(",
        )
    for name in ("decode", "dkv", "dk", "dv"):
        yield Row(
            f"{name} in slices",
            lambda name=name: {"tile_sizes": TileSizes(**{name: Tile(64, 64, num_slices=2)})},
            ValueError,
            f"`{name}` must have `num_slices` 1; got Tile(",
        )
    for name in ("forward", "dkv", "dk", "dv", "dq"):
        yield Row(
            f"{name} tile that is none",
            lambda name=name: {"tile_sizes": TileSizes(**{name: (64, 64)})},
            TypeError,
            f"`{name}` must be a pallas_flash.Tile",
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
    for x in (tile, (64, 64), {"forward": tile}, "large"):
        yield Row(
            f"tile sizes as {type(x).__name__}",
            lambda x=x: {"tile_sizes": x},
            TypeError,
            f"`tile_sizes` must be a pallas_flash.TileSizes; got {type(x).__name__} ",
        )
    for implementation in ("xla", "reference"):
        yield Row(
            f"tile sizes for {implementation}",
            lambda implementation=implementation: {
                "tile_sizes": TileSizes(forward=tile),
                "implementation": implementation,
            },
            ValueError,
            "`tile_sizes` must be None where no kernel takes them; got TileSizes(",
        )
    # 8 stages of 64 keys and values at head size 128 in two bytes: 264 KiB and more.
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


ONE_OF = (
    "`implementation` must be None or one of ('mosaic', 'triton', 'interpret', 'xla', "
    "'reference'); "
)


def not_served():
    for x in ("cudnn", "XLA", "", 1, ["xla"], np.ones(3), jnp.ones(3)):
        yield Row(
            f"implementation {x!r}",
            lambda x=x: {"implementation": x},
            ValueError,
            ONE_OF,
        )
    yield Row(
        "implementation traced",
        lambda: {"implementation": 1},
        ValueError,
        ONE_OF,
        traced="implementation",
    )
    yield Row(
        "triton on a CPU",
        lambda: {"implementation": "triton"},
        NotImplementedError,
        "got 'triton'. The kernels need an NVIDIA GPU, and the device is cpu. Use \"xla\".",
    )
    for gpu, capability in {"Tesla V100": "7.0", "Tesla T4": "7.5", "Tesla P100": "6.0"}.items():
        yield Row(
            f"triton on a {gpu}",
            lambda: {"implementation": "triton"},
            NotImplementedError,
            f"compute capability 8.0 or more (A100 or newer), and the device is {gpu} (described, "
            f'not here) with {capability}. Use "xla".',
            gpu=gpu,
        )
    for implementation, gpu in (("triton", "NVIDIA H200"), ("interpret", None)):
        for id, arguments, fragment, x64 in (
            ("float64", lambda: inputs(jnp.float64), "Got float64, and the kernels", True),
            ("head size", lambda: inputs(head_dim=257), "Got a head size of 257, and", False),
            ("value size", lambda: {"value": f32(2, 7, 3, 300)}, "Got a head size of 300,", False),
        ):
            yield Row(
                f"{implementation} for {id}",
                lambda arguments=arguments, implementation=implementation: {
                    **arguments(),
                    "implementation": implementation,
                },
                NotImplementedError,
                f"`implementation` must be one that serves the call; got '{implementation}'. "
                + fragment,
                gpu=gpu,
                x64=x64,
            )


NEWER = jax.__version_info__ >= _compat.MOSAIC_SINCE


def not_served_on_hopper():
    """What "mosaic" says of calls that others serve."""

    def half(head_dim=64, dtype=jnp.bfloat16, **options):
        x = jnp.zeros((2, 5, 4, head_dim), dtype)
        return dict(query=x, key=x, value=x, implementation="mosaic", **options)

    newer = [
        ("float32", lambda: half(dtype=jnp.float32), "Got float32, and they serve float16 and "),
        ("a head size", lambda: half(36), "Got head sizes of 36 and 36 (of values), and they "),
        (
            "a score function",
            lambda: half(score_fn=lambda s, *at: jnp.floor(s)),
            "The mask or the score function uses floor, which ",
        ),
    ]
    older = [("this JAX", half, "in Mosaic GPU need JAX 0.11.2 or newer, and this is 0.10.2.")]
    for name, arguments, fragment in newer if NEWER else older:
        yield Row(f"mosaic for {name}", arguments, NotImplementedError, fragment, gpu="NVIDIA H200")
    for gpu, told in (
        ("NVIDIA A100", 'NVIDIA A100 (described, not here) with 8.0. Use "triton".'),
        ("NVIDIA B200", 'NVIDIA B200 (described, not here) with 10.0. Use "triton".'),
        ("NVIDIA Z900", 'NVIDIA Z900 (described, not here). Use "triton".'),
        (None, 'the device is cpu. Use "xla".'),
    ):
        yield Row(f"mosaic on {gpu or 'a CPU'}", half, NotImplementedError, told, gpu=gpu)


def bad_per_head():
    for name in PER_HEAD:
        for dtype in ("int32", "bool", "complex64"):
            yield Row(
                f"{name} in {dtype}",
                lambda name=name, dtype=dtype: {name: jnp.zeros(6, dtype)},
                TypeError,
                f"`{name}` must be floating point; got {dtype}.",
            )
        for shape in ((), (1,), (3,), (2, 6), (6, 1)):
            yield Row(
                f"{name} of shape {shape}",
                lambda name=name, shape=shape: {name: f32(*shape)},
                ValueError,
                f"`{name}` must have shape [N] = (6,); got {shape}. Give one number for each query",
            )


def bad_caps():
    for cap in ("1", True, np.True_, 1j, [1.0], jnp.ones(()), np.ones(())):
        yield Row(
            f"soft cap {cap!r}",
            lambda cap=cap: {"logits_soft_cap": cap},
            TypeError,
            "`logits_soft_cap` must be None or a number; got ",
        )
    yield Row(
        "soft cap traced",
        lambda: {"logits_soft_cap": 2.0},
        TypeError,
        "`logits_soft_cap` must be None or a number; got an array of float32 with shape (). Write "
        "a `score_fn` for a cap that is traced",
        traced="logits_soft_cap",
    )
    for cap in (0, 0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-39, 10**400, np.float32("nan")):
        yield Row(
            f"soft cap {cap!r:.20}",
            lambda cap=cap: {"logits_soft_cap": cap},
            ValueError,
            "`logits_soft_cap` must be positive and finite in float32; got ",
        )


class Unhashable:
    """A function that could be compiled in only once for each of its values."""

    __hash__ = None

    def __call__(self, *at):
        return at[-1] >= at[-2]


TABLE = jnp.arange(12.0).reshape(3, 4)

# What is wrong with a function: itself, its operands, the error. The functions take scores and
# indices; a Predicate's is given zeros for scores.
FUNCTIONS = {
    "no function": (3, (), "must be a function of the indices b, h, q_pos and k_pos; got int 3."),
    "unhashable": (Unhashable(), (), "must be hashable, because it is compiled in; got Unhashable"),
    "raises": (
        lambda s, *at: {}["name"],
        (),
        "followed by 0 operands; got KeyError: 'name'. Use elementwise jax.numpy",
    ),
    "of too few arguments": (lambda s, b, h, q: s, (), "got TypeError: "),
    "without a parameter for its operand": (
        lambda s, b, h, q, k: s,
        (f32(3),),
        "followed by 1 operands; got TypeError: ",
    ),
    "decides by a value": (
        lambda s, b, h, q, k: s if b > h else -s,
        (),
        "got TracerBoolConversionError: ",
    ),
    "of too few indices": (
        lambda s, b, h, q, k, table: s + table[q],
        (TABLE,),
        "got IndexError: an operand of shape (3, 4) must be indexed by 2 integers",
    ),
    "of a slice": (
        lambda s, b, h, q, k, table: s + table[h, :2],
        (TABLE,),
        "got IndexError: an operand of shape (3, 4) must be indexed by 2 integers",
    ),
    "of floating-point indices": (
        lambda s, b, h, q, k, table: s + table[h, q * 1.0],
        (TABLE,),
        "got IndexError: an operand of shape (3, 4) must be indexed by 2 integers",
    ),
    "with an array of its own": (
        lambda s, b, h, q, k: s + TABLE[0, 0],
        (),
        "must read arrays from its operands; got one that it made or closes over, an array of "
        "float32 with shape (3, 4). Pass it as an operand",
    ),
    "returns nothing": (lambda s, *at: None, (), "must return one array; got NoneType None."),
    "returns two arrays": (lambda s, *at: (s, s), (), "must return one array; got tuple ("),
}


def bad_score_functions():
    for id, (fn, operands, fragment) in FUNCTIONS.items():
        yield Row(
            f"score function: {id}",
            lambda fn=fn, operands=operands: {"score_fn": fn, "score_operands": operands},
            TypeError,
            fragment,
        )
    for id, fn, got in (
        ("another dtype", lambda s, *at: s.astype(jnp.bfloat16), "bfloat16 of shape (2, 3)"),
        ("ints", lambda s, b, h, q, k: q - k, "int32 of shape (2, 3)"),
        ("another shape", lambda s, *at: s[:, :2], "float32 of shape (2, 2)"),
        ("one more axis", lambda s, *at: s[None], "float32 of shape (1, 2, 3)"),
        ("a sum", lambda s, *at: s.sum(), "float32 of shape ()"),
        ("a number", lambda s, *at: 1.0, "float32 of shape ()"),
    ):
        yield Row(
            f"score function that returns {id}",
            lambda fn=fn: {"score_fn": fn},
            TypeError,
            "`score_fn` must return scores of the shape and dtype that it is given; got "
            f"{got} for float32 of shape (2, 3).",
        )
    yield Row(
        "operands without a function",
        lambda: {"score_operands": (f32(3),)},
        ValueError,
        "`score_operands` must be empty without a `score_fn`; got 1 arrays.",
    )


def bad_operands():
    def of_score(operands):
        return {"score_fn": lambda s, b, h, q, k, *xs: s, "score_operands": operands}

    def of_predicate(operands):
        return {"mask": Predicate(lambda b, h, q, k, *xs: q >= k, operands)}

    for name, call in (("score_operands", of_score), ("Predicate.operands", of_predicate)):
        for id, operands, fragment in (
            ("an array", f32(3), "` must be a tuple of arrays; got an array of float32"),
            ("None", None, "` must be a tuple of arrays; got NoneType None."),
            ("dict", {"x": f32(3)}, "` must be a tuple of arrays; got dict "),
            ("list inside", (f32(2), [1.0]), "[1]` must be an array; got list [1.0]."),
            ("number inside", (1.0,), "[0]` must be an array; got float 1.0."),
            ("key inside", (jax.random.key(0),), "[0]` must be real numbers or bools of at most"),
            ("complex", (f32(3) * 1j,), "[0]` must be real numbers or bools of at most 32 bits;"),
        ):
            yield Row(
                f"{name}: {id}",
                lambda call=call, operands=operands: call(operands),
                TypeError,
                f"`{name}{fragment}",
            )
        yield Row(
            f"{name}: empty",
            lambda call=call: call((f32(0),)),
            ValueError,
            f"`{name}[0]` must have at least one element; got shape (0,).",
        )
        for dtype in ("int64", "float64"):
            yield Row(
                f"{name} in {dtype}",
                lambda call=call, dtype=dtype: call((jnp.zeros(3, dtype),)),
                TypeError,
                f"`{name}[0]` must be real numbers or bools of at most 32 bits; got {dtype}.",
                x64=True,
            )


def bad_mask_objects():
    for id, (fn, operands, fragment) in FUNCTIONS.items():
        wrapped = fn if not callable(fn) or id == "unhashable" else of_indices(fn)
        yield Row(
            f"Predicate: {id}",
            lambda fn=wrapped, operands=operands: {"mask": Predicate(fn, operands)},
            TypeError,
            fragment,
        )
    for id, fn, got in (
        ("floats", lambda b, h, q, k: (q - k) * 1.0, "float32 of shape (2, 3)"),
        ("ints", lambda b, h, q, k: q - k, "int32 of shape (2, 3)"),
        ("another shape", lambda b, h, q, k: (q >= k)[:, :2], "bool of shape (2, 2)"),
        ("one more axis", lambda b, h, q, k: (q >= k)[None], "bool of shape (1, 2, 3)"),
    ):
        yield Row(
            f"Predicate that returns {id}",
            lambda fn=fn: {"mask": Predicate(fn)},
            TypeError,
            f"`Predicate.fn` must return a bool for each pair of its indices; got {got} for ",
        )

    def mask(make, id, error, fragment, **other):
        return Row(id, lambda: {"mask": make(), **other}, error, fragment)

    allowed = jnp.ones((5, 7), bool)
    yield from (
        mask(lambda: PrefixLM(i32(2)), "PrefixLM and causal", ValueError,
             "`is_causal` must be False with a PrefixLM `mask`; got True.", is_causal=True),
        mask(lambda: allowed & PrefixLM(i32(2)), "PrefixLM joined and causal", ValueError,
             "`is_causal` must be False with a PrefixLM `mask`; got True.", is_causal=True),
        mask(lambda: PrefixLM(3), "prefix as int", TypeError,
             "`PrefixLM.prefix_lengths` must be an array; got int 3."),
        mask(lambda: PrefixLM([3, 4]), "prefix as list", TypeError,
             "`PrefixLM.prefix_lengths` must be an array; got list [3, 4]."),
        mask(lambda: PrefixLM(f32(2)), "prefix of floats", TypeError,
             "`PrefixLM.prefix_lengths` must be int32; got float32."),
        mask(lambda: PrefixLM(i32(3)), "prefixes of another batch", ValueError,
             "`PrefixLM.prefix_lengths` must have shape [B] = (2,); got (3,)."),
        mask(lambda: Segments(i32(2, 5)), "Segments of queries for T != S", ValueError,
             "`Segments.key_value` must be given where T and S differ; got None with T=5 and S=7."),
        mask(lambda: Segments(i32(5), i32(7)), "Segments without a batch axis", ValueError,
             "`Segments.query` must have shape [B, T] = (2, 5); got (5,)."),
        mask(lambda: Segments(i32(2, 5), f32(2, 7)), "Segments of floats", TypeError,
             "`Segments.key_value` must be int32; got float32."),
        mask(lambda: Segments([[0] * 5], i32(2, 7)), "Segments of lists", TypeError,
             "`Segments.query` must be an array; got list "),
        mask(lambda: PrefixLM(i32(2)) & f32(5, 7), "joined with floats", TypeError,
             "`mask` must be boolean, True where a query may attend; got float32."),
        mask(lambda: np.ones((7, 5), bool) & PrefixLM(i32(2)), "joined with an array", ValueError,
             "`mask` must be broadcastable to [B, N, T, S] = (2, 6, 5, 7); got mask.shape=(7, 5)."),
        mask(lambda: PrefixLM(i32(2)) & True, "joined with a bool", TypeError,
             "`mask` must be an array; got bool True."),
        mask(lambda: "text" & PrefixLM(i32(2)), "joined with a string", TypeError,
             "`mask` must be an array; got str 'text'."),
        mask(lambda: block_mask(q_len=6), "BlockMask for other queries", ValueError,
             "`BlockMask.q_len` must be that of the call; got 6 and 5."),
        mask(lambda: block_mask(kv_len=9), "BlockMask for other keys", ValueError,
             "`BlockMask.kv_len` must be that of the call; got 9 and 7."),
        mask(lambda: BlockMask(f32(1, 1, 1, 1)), "BlockMask of floats", TypeError,
             "`BlockMask.some` must be boolean; got float32."),
        mask(lambda: BlockMask([[True]]), "BlockMask of lists", TypeError,
             "`BlockMask.some` must be an array; got list [[True]]."),
        mask(lambda: BlockMask(jnp.ones((3, 2), bool), 2, 4), "BlockMask of rank 2", ValueError,
             "`BlockMask.some` must have shape [B, N, ceil(T / block_q), ceil(S / block_kv)] = "
             "(2, 6, 3, 2), its first two axes possibly 1; got (3, 2)."),
        mask(lambda: BlockMask(jnp.ones((1, 3, 3, 2), bool), 2, 4), "BlockMask by head of keys",
             ValueError, "its first two axes possibly 1; got (1, 3, 3, 2)."),
        mask(lambda: BlockMask(jnp.ones((1, 1, 1, 2), bool), 2, 4), "BlockMask, broadcast",
             ValueError, "its first two axes possibly 1; got (1, 1, 1, 2)."),
        mask(lambda: dataclasses.replace(block_mask(), every=f32(1, 1, 3, 2)),
             "BlockMask with floats for every", TypeError,
             "`BlockMask.every` must be boolean; got float32."),
        mask(lambda: dataclasses.replace(block_mask(), mask=None), "BlockMask without a mask",
             ValueError, "must be given together; got `every` alone. Use `BlockMask.from_mask`"),
        mask(lambda: dataclasses.replace(block_mask(), every=None), "BlockMask without every",
             ValueError, "must be given together; got `mask` alone. Use `BlockMask.from_mask`"),
        mask(lambda: dataclasses.replace(block_mask(), mask="text"), "BlockMask of text", TypeError,
             "`mask` must be an array; got str 'text'."),
        *(mask(lambda name=name, x=x: dataclasses.replace(block_mask(), **{name: x}),
               f"BlockMask with {name} = {x!r}", ValueError,
               f"`BlockMask.{name}` must be an int of at least 1; got ")
          for name in ("block_q", "block_kv") for x in (0, -1, 2.0, True, "2")),
        mask(lambda: BlockMask.from_mask(PrefixLM(i32(2)), 5, 7), "BlockMask of a prefix, causal",
             ValueError, "`is_causal` must be False with a PrefixLM", is_causal=True),
        *(mask(lambda: BlockMask.from_mask(PrefixLM(i32(2)), 5, 7),
               f"BlockMask of a prefix, moved by {type(offset).__name__}", ValueError,
               "`query_offset` must be 0, and `query_positions` and `key_value_positions` None, "
               "with a BlockMask made from a PrefixLM",
               query_offset=offset)
          for offset in (3, i32(2))),
        mask(lambda: BlockMask.from_mask(PrefixLM(i32(2)), 5, 7),
             "BlockMask of a prefix, of positions", ValueError,
             "whose blocks were found without them; got positions. Pass the PrefixLM itself",
             key_value_positions=i32(1, 7)),
        # What `from_mask` itself refuses.
        *(mask(lambda name=name, x=x: BlockMask.from_mask(**dict(mask=allowed, q_len=5, kv_len=7)
                                                          | {name: x}),
               f"from_mask with {name} = {x!r}", ValueError,
               f"`{name}` must be an int of at least 1; got ")
          for name in ("q_len", "kv_len", "batch", "num_heads", "block_q", "block_kv")
          for x in (0, 2.0, True)),
        *(mask(lambda fn=fn: BlockMask.from_mask(Predicate(fn), 5, 7),
               f"from_mask of a Predicate that asks for {name}", ValueError,
               f"`{name}` must be given for a Predicate that asks for its index; got None.")
          for name, fn in (("batch", lambda b, h, q, k: (k <= q) | (b == 1)),
                           ("num_heads", lambda b, h, q, k: (k <= q) | (h == 1)))),
        mask(lambda: BlockMask.from_mask("text", 5, 7), "from_mask of text", TypeError,
             "`mask` must be an array; got str 'text'."),
        mask(lambda: BlockMask.from_mask(f32(5, 7), 5, 7), "from_mask of floats", TypeError,
             "`mask` must be boolean, True where a query may attend; got float32."),
        mask(lambda: BlockMask.from_mask(allowed, 7, 5), "from_mask of other lengths", ValueError,
             "`mask` must be broadcastable to [B, N, T, S] = (1, 1, 7, 5); got mask.shape=(5, 7)."),
        mask(lambda: BlockMask.from_mask(jnp.ones((3, 1, 5, 7), bool), 5, 7, batch=2),
             "from_mask for another batch", ValueError,
             "`mask` must be broadcastable to [B, N, T, S] = (2, 1, 5, 7)"),
        mask(lambda: BlockMask.from_mask(jnp.ones((3, 5, 7), bool), 5, 7, num_heads=6),
             "from_mask for other heads", ValueError,
             "`mask` must be broadcastable to [B, N, T, S] = (1, 6, 5, 7)"),
        mask(lambda: BlockMask.from_mask(Segments(i32(3, 5), i32(3, 7)), 5, 7, batch=2),
             "from_mask of Segments of another batch", ValueError,
             "`Segments.query` must have shape [B, T] = (2, 5); got (3, 5)."),
        mask(lambda: BlockMask.from_mask(PrefixLM(i32(3)) & Segments(i32(2, 5), i32(2, 7)), 5, 7),
             "from_mask of two batches", ValueError,
             "`Segments.query` must have shape [B, T] = (3, 5); got (2, 5)."),
        mask(lambda: BlockMask.from_mask(jnp.ones((3, 1, 5, 7), bool), 5, 7),
             "BlockMask of another batch", ValueError,
             "`BlockMask.some` must have shape [B, N, ceil(T / block_q), ceil(S / block_kv)] = "
             "(2, 6, 1, 1), its first two axes possibly 1; got (3, 1, 1, 1)."),
    )  # fmt: skip
    yield Row(
        "size of blocks as an array",
        lambda: {"mask": block_mask(block_q=jnp.int32(2))},
        ValueError,
        "`BlockMask.block_q` must be an int of at least 1; got an array of int32 with shape ().",
    )


def of_indices(fn):
    return lambda b, h, q, k, *operands: fn(jnp.float32(0), b, h, q, k, *operands)


def block_mask(q_len=5, kv_len=7, block_q=2):
    made = BlockMask.from_mask(
        jnp.ones((q_len, kv_len), bool), q_len, kv_len, block_q=2, block_kv=4
    )
    return dataclasses.replace(made, block_q=block_q)


def bad_dropout():
    key = jax.random.key(0)
    for rate in ("0.1", None, True, np.True_, [0.1], jnp.float32(0.1), np.array(0.1), 1j):
        yield Row(
            f"dropout rate {rate!r}",
            lambda rate=rate: {"dropout_rate": rate, "dropout_key": key},
            TypeError,
            "`dropout_rate` must be a number; got ",
        )
    yield Row(
        "dropout rate traced",
        lambda: {"dropout_rate": 0.1, "dropout_key": key},
        TypeError,
        "`dropout_rate` must be a number; got an array of float32 with shape (). Pass a Python",
        traced="dropout_rate",
    )
    for rate in (1, 1.0, -0.1, 1.5, float("nan"), float("inf"), 10**400, np.float32(2)):
        yield Row(
            f"dropout rate {rate!r:.20}",
            lambda rate=rate: {"dropout_rate": rate, "dropout_key": key},
            ValueError,
            "`dropout_rate` must be at least 0 and less than 1; got ",
        )
    yield Row(
        "dropout without a key",
        lambda: {"dropout_rate": 0.1},
        ValueError,
        "`dropout_key` must be given with a `dropout_rate`; got None and 0.1.",
    )
    # Also where nothing is dropped.
    for rate in (0.0, 0.1):
        for x in (0, "key", [0, 1]):
            yield Row(
                f"dropout key {x!r}, rate {rate}",
                lambda x=x, rate=rate: {"dropout_rate": rate, "dropout_key": x},
                TypeError,
                f"`dropout_key` must be a jax.random key; got {type(x).__name__} {x!r}.",
            )
        for id, x in (
            ("two", jax.random.split(key)),
            ("two raw", jax.random.split(jax.random.PRNGKey(0))),
            ("raw, too long", jnp.zeros(3, jnp.uint32)),
            ("raw, a scalar", jnp.zeros((), jnp.uint32)),
            ("ints", i32(2)),
            ("floats", np.zeros(2)),
        ):
            yield Row(
                f"dropout key: {id}, rate {rate}",
                lambda x=x, rate=rate: {"dropout_rate": rate, "dropout_key": x},
                TypeError,
                "`dropout_key` must be one jax.random key; got an array of ",
            )


def without_gradient():
    for implementation in ("xla", "interpret"):
        for argument, arguments in (
            ("alibi_slopes", lambda: {"alibi_slopes": f32(6)}),
            (
                "score_operands",
                lambda: {"score_fn": scaled_by_head, "score_operands": (i32(2), f32(6))},
            ),
        ):
            yield Row(
                f"{argument} differentiated by {implementation}",
                lambda arguments=arguments, implementation=implementation: {
                    **arguments(),
                    "implementation": implementation,
                },
                NotImplementedError,
                f"`{argument}` must not be differentiated by '{implementation}', which has no "
                "gradient for it; got a derivative with respect to it. Wrap it in ",
                differentiated=argument,
            )


def other_functions():
    ids = pallas_flash.segment_ids_from_cu_seqlens

    def row(id, function, error, fragment, **arguments):
        return Row(id, lambda: arguments, error, fragment, function=function)

    def tangent_of_the_call(x):
        call = functools.partial(pallas_flash.attention, implementation="xla")
        return jax.jvp(lambda q: call(q, q, q), (x,), (x,))

    yield row(
        "forward mode",
        tangent_of_the_call,
        NotImplementedError,
        "`attention` must be differentiated in reverse mode by 'xla'",
        x=jnp.ones((1, 4, 2, 8)),
    )

    for length, devices, fragment in (
        (20, 4, "`length` must be a multiple of 2 * devices = 8; got 20. Add padding"),
        (0, 4, "`length` must be an int of at least 1; got int 0"),
        (16.0, 4, "`length` must be an int of at least 1; got float 16.0"),
        (16, None, "`devices` must be an int of at least 1; got NoneType None"),
    ):
        yield row(
            f"balanced order of {length} for {devices}",
            pallas_flash.balanced_order,
            ValueError,
            fragment,
            length=length,
            devices=devices,
        )

    for x in ([0, 2], 3, None):
        yield row(
            f"cu_seqlens {x!r}",
            ids,
            TypeError,
            f"`cu_seqlens` must be an array; got {type(x).__name__} ",
            cu_seqlens=x,
            length=5,
        )
    for dtype in ("float32", "uint32", "bool"):
        yield row(
            f"cu_seqlens in {dtype}",
            ids,
            TypeError,
            f"`cu_seqlens` must be int32; got {dtype}.",
            cu_seqlens=jnp.zeros(3, dtype),
            length=5,
        )
    for shape in ((), (0,), (2, 3)):
        yield row(
            f"cu_seqlens of shape {shape}",
            ids,
            ValueError,
            f"`cu_seqlens` must have shape [documents + 1]; got {shape}.",
            cu_seqlens=i32(*shape),
            length=5,
        )
    for ends in ((1, 3), (0, 3, 2), (0, 6), (-1, 2)):
        yield row(
            f"cu_seqlens {ends}",
            ids,
            ValueError,
            "`cu_seqlens` must rise from 0 to at most length = 5; got an array of int32 with shape "
            f"({len(ends)},) from {ends[0]} to {ends[-1]}.",
            cu_seqlens=np.array(ends, np.int32),
            length=5,
        )
    for length in (-1, 2.0, None):
        yield row(
            f"length {length}",
            ids,
            ValueError,
            "`length` must be an int of at least 0; got ",
            cu_seqlens=i32(1),
            length=length,
        )
    valid = dict(key=jax.random.key(0), shape=(1, 2, 3, 4), rate=0.1)
    for id, error, fragment, changed in (
        (
            "shape of rank 3",
            TypeError,
            "`shape` must be a tuple of four ints",
            {"shape": (1, 2, 3)},
        ),
        ("shape as an int", TypeError, "[B, N, T, S]; got int 3.", {"shape": 3}),
        ("shape of floats", ValueError, "`shape[2]` must be an int of", {"shape": (1, 2, 3.0, 4)}),
        ("negative shape", ValueError, "of at least 0; got int -1.", {"shape": (1, -1, 3, 4)}),
        ("rate of 1", ValueError, "`rate` must be at least 0 and less than 1; got", {"rate": 1.0}),
        ("rate as an array", TypeError, "`rate` must be a number; got", {"rate": jnp.ones(())}),
        ("no key", TypeError, "`key` must be a jax.random key; got NoneType", {"key": None}),
        ("no key, rate 0", TypeError, "`key` must be a jax.", {"key": 3, "rate": 0.0}),
        ("two keys", TypeError, "`key` must be one jax.", {"key": jax.random.split(valid["key"])}),
    ):
        yield row(
            f"dropout_mask: {id}", pallas_flash.dropout_mask, error, fragment, **valid | changed
        )

    yield row(
        "slopes differentiated after the queries",
        lambda query, slopes: jax.jvp(
            lambda slopes: jax.grad(with_slopes)(query, slopes), (slopes,), (slopes,)
        ),
        NotImplementedError,
        "`alibi_slopes` must not be differentiated by 'xla', which has no gradient for it",
        query=inputs()["query"],
        slopes=f32(6),
    )


def scaled_by_head(s, b, h, q, k, offset, slope):
    return s * slope[h]


RANKS = "must have shape [B, T, N, H] or [T, N, H]; got rank"

ROWS = [
    # Shapes of query, key and value.
    Row("query of rank 0", lambda: {"query": f32()}, ValueError, f"`query` {RANKS} 0"),
    Row("query of rank 2", lambda: {"query": f32(5, 8)}, ValueError, f"`query` {RANKS} 2"),
    Row("query of rank 5", lambda: {"query": f32(1, 2, 5, 6, 8)}, ValueError, f"`query` {RANKS} 5"),
    Row(
        "query as NumPy scalar", lambda: {"query": np.float32(1)}, ValueError, f"`query` {RANKS} 0"
    ),
    Row("key of rank 3", lambda: {"key": f32(7, 3, 8)}, ValueError, "`key` must have the rank of"),
    Row("key of rank 5", lambda: {"key": f32(1, 2, 7, 3, 8)}, ValueError, "got 5 and 4 (key.shape"),
    Row(
        "value of rank 3", lambda: {"value": f32(7, 3, 4)}, ValueError, "`value` must have the rank"
    ),
    Row(
        "value of rank 5", lambda: {"value": f32(1, 2, 7, 3, 4)}, ValueError, "got 5 and 4 (value."
    ),
    Row(
        "batched keys for an unbatched query",
        lambda: unbatched(key=f32(2, 7, 3, 8)),
        ValueError,
        "`key` must have the rank of `query`; got 4 and 3",
    ),
    Row(
        "batch of key",
        lambda: {"key": f32(1, 7, 3, 8)},
        ValueError,
        "`key` must have the batch size of `query`; got 1 and 2 (query.shape=(2, 5, 6, 8), ",
    ),
    Row(
        "batch of value",
        lambda: {"value": f32(3, 7, 3, 4)},
        ValueError,
        "`value` must have the batch size of `query`; got 3 and 2",
    ),
    Row(
        "batch of query",
        lambda: {"query": f32(1, 5, 6, 8)},
        ValueError,
        "`key` must have the batch size of `query`; got 2 and 1",
    ),
    Row(
        "length of value",
        lambda: {"value": f32(2, 5, 3, 4)},
        ValueError,
        "`value` must have the length of `key`; got 5 and 7",
    ),
    Row(
        "length of an unbatched value",
        lambda: unbatched(value=f32(5, 3, 4)),
        ValueError,
        "`value` must have the length of `key`; got 5 and 7",
    ),
    Row(
        "heads of value",
        lambda: {"value": f32(2, 7, 1, 4)},
        ValueError,
        "`value` must have the number of heads of `key`; got 1 and 3",
    ),
    Row(
        "head size of key",
        lambda: {"key": f32(2, 7, 3, 4)},
        ValueError,
        "`key` must have the head size of `query`; got 4 and 8",
    ),
    Row(
        "query heads that do not divide",
        lambda: {"query": f32(2, 5, 7, 8)},
        ValueError,
        "`query` must have a multiple of the heads of `key`; got 7 query heads and 3 key/value",
    ),
    Row(
        "fewer query heads than key heads",
        lambda: {"query": f32(2, 5, 2, 8)},
        ValueError,
        "`query` must have a multiple of the heads of `key`; got 2 query heads and 3 key/value",
    ),
    Row(
        "no query heads",
        lambda: {"query": f32(2, 5, 0, 8)},
        ValueError,
        "`query` must have at least one head and a head size of at least 1; got 0 heads of size 8",
    ),
    Row(
        "no key heads",
        lambda: {"key": f32(2, 7, 0, 8), "value": f32(2, 7, 0, 4)},
        ValueError,
        "`key` must have at least one head",
    ),
    Row(
        "head size 0",
        lambda: {"query": f32(2, 5, 6, 0), "key": f32(2, 7, 3, 0)},
        ValueError,
        "`query` must have at least one head and a head size of at least 1; got 6 heads of size 0",
    ),
    Row(
        "head size 0 of value",
        lambda: {"value": f32(2, 7, 3, 0)},
        ValueError,
        "`value` must have at least one head",
    ),
    *bad_dtypes(),
    *no_arrays(),
    # Bias and mask.
    Row(
        "bias of integers", lambda: {"bias": i32(5, 7)}, TypeError, "`bias` must be floating point;"
    ),
    Row(
        "bias of bools",
        lambda: {"bias": jnp.ones((5, 7), bool)},
        TypeError,
        "`bias` must be floating point; got bool. Pass a boolean array that says who may attend as "
        "`mask`.",
    ),
    Row(
        "complex bias",
        lambda: {"bias": jnp.zeros((5, 7), jnp.complex64)},
        TypeError,
        "`bias` must be floating point; got complex64.",
    ),
    Row(
        "mask of floats",
        lambda: {"mask": f32(5, 7)},
        TypeError,
        "`mask` must be boolean, True where a query may attend; got float32. Pass "
        "`mask.astype(bool)`, or numbers to add to the scores as `bias`.",
    ),
    Row("mask of ints", lambda: {"mask": i32(5, 7)}, TypeError, "`mask` must be boolean"),
    *not_broadcastable(),
    # What positions may see each other.
    *bad_flags(),
    *bad_lengths(),
    *bad_positions(),
    *bad_windows(),
    Row(
        "window traced",
        lambda: {"local_window_size": 3},
        TypeError,
        "got an array of int32 with shape (). Pass a size that is traced or differs by example as "
        "`mask`.",
        traced="local_window_size",
    ),
    Row(
        "pair of windows traced",
        lambda: {"local_window_size": (3, 2)},
        TypeError,
        "`local_window_size` must be None, an int or a pair",
        traced="local_window_size",
    ),
    *(
        Row(
            f"offset {x!r}",
            lambda x=x: {"query_offset": x},
            TypeError,
            "`query_offset` must be an int, an int32 scalar or int32 [B]; got ",
        )
        for x in (1.0, None, True, "1", [1, 2])
    ),
    *(
        Row(
            f"offset in {dtype}",
            lambda dtype=dtype: {"query_offset": jnp.zeros(2, dtype)},
            TypeError,
            f"`query_offset` must be int32; got {dtype}.",
        )
        for dtype in ("float32", "uint8")
    ),
    *(
        Row(
            f"offset of shape {shape}",
            lambda shape=shape: {"query_offset": i32(*shape)},
            ValueError,
            f"`query_offset` must have shape [B] = (2,); got {shape}. Give one number for each",
        )
        for shape in ((1,), (2, 5))
    ),
    Row(
        "one array of ids for T != S",
        lambda: {"segment_ids": i32(2, 5)},
        ValueError,
        "`segment_ids` must be a (query, key_value) pair when T and S differ; got one array with "
        "T=5 and S=7.",
    ),
    *(
        Row(
            f"{count} arrays of ids",
            lambda count=count: {"segment_ids": [i32(2, 5)] * count},
            ValueError,
            f"`segment_ids` must be one array or a (query, key_value) pair; got {count} items.",
        )
        for count in (0, 1, 3)
    ),
    Row(
        "ids as nested lists",
        lambda: {"segment_ids": [[0] * 5, [0] * 7]},
        TypeError,
        "`segment_ids` must be an array; got list [0, 0, 0, 0, 0].",
    ),
    Row(
        "ids of queries missing",
        lambda: {"segment_ids": (None, i32(2, 7))},
        TypeError,
        "`segment_ids` must be an array; got NoneType None.",
    ),
    *(
        Row(
            f"ids in {dtype}",
            lambda dtype=dtype: {"segment_ids": (jnp.zeros((2, 5), dtype), i32(2, 7))},
            TypeError,
            f"`segment_ids` must be int32; got {dtype}.",
        )
        for dtype in ("float32", "int16", "bool")
    ),
    Row(
        "ids of keys in int8",
        lambda: {"segment_ids": (i32(2, 5), jnp.zeros((2, 7), jnp.int8))},
        TypeError,
        "`segment_ids` must be int32; got int8.",
    ),
    Row(
        "ids of queries with a wrong shape",
        lambda: {"segment_ids": (i32(2, 7), i32(2, 7))},
        ValueError,
        "`segment_ids` must have shape [B, T] = (2, 5); got (2, 7). Give one number for each to",
    ),
    Row(
        "ids of keys with a wrong shape",
        lambda: {"segment_ids": (i32(2, 5), i32(7))},
        ValueError,
        "`segment_ids` must have shape [B, S] = (2, 7); got (7,).",
    ),
    # How it is computed.
    *bad_scales(),
    Row(
        "scale of integers traced",
        lambda: {"scale": 2},
        TypeError,
        "`scale` must be a number or a floating-point scalar array; got an array of int32",
        traced="scale",
    ),
    *(
        Row(
            f"precision {x!r}",
            lambda x=x: {"precision": x},
            TypeError,
            "`precision` must be None, a jax.lax.Precision, a jax.lax.DotAlgorithmPreset or one of "
            "['default', 'high', 'highest']; got ",
        )
        for x in ("bogus", "", 1, ("high", "high"), jnp.float32)
    ),
    Row(
        "both statistics",
        lambda: {"return_residual": True, "return_lse": True},
        ValueError,
        "`return_residual` and `return_lse` must not both be True; got both.",
    ),
    *bad_tiles(),
    *not_served(),
    *not_served_on_hopper(),
    # What happens to scores and probabilities.
    *bad_per_head(),
    *bad_caps(),
    *bad_score_functions(),
    *bad_operands(),
    *bad_mask_objects(),
    *bad_dropout(),
    *without_gradient(),
    *other_functions(),
    # Sequences that devices divide; those errors that need a mesh are in
    # test_context_devices.py.
    *bad_context(),
]

every_row = pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])


def refusal(row: Row, function=pallas_flash.attention) -> Exception:
    """The error of a call of `function` with the row's arguments."""
    with contextlib.ExitStack() as stack:
        if row.gpu:
            stack.enter_context(described_gpu(row.gpu))
        if row.x64:
            stack.enter_context(jax.enable_x64(True))
        caught = stack.enter_context(pytest.raises(row.error))
        arguments = row.arguments() if row.function else inputs() | row.arguments()
        function = row.function or function
        if changed := row.traced or row.differentiated:
            x = arguments.pop(changed)

            def call(x):
                return function(**arguments, **{changed: x})

            if row.traced:
                jax.eval_shape(call, x)
            else:
                jax.vjp(call, x)
        else:
            function(**arguments)
    return caught.value


# `argument` must requirement; got values. What to do, as an imperative sentence.
ADVICE = (
    "Add|Broadcast|Cast|Check|Choose|Convert|Drop|Give|Keep|Multiply|Pass|Repeat|Reshape|Use|Wrap|"
    "Write"
)
FORM = re.compile(rf"`[\w.\[\]]+`.* must .+; got .+\. ({ADVICE}) .+\.")


@every_row
def test_a_refused_call_raises_one_sentence_in_the_form_of_all_errors(row):
    """And so does `explain`."""
    error = refusal(row)
    assert type(error) is row.error
    assert row.fragment in str(error)
    assert FORM.fullmatch(str(error))
    # Explaining computes nothing, differentiates nothing, and takes shapes for arrays.
    if not row.differentiated and not row.function and "ShapeDtypeStruct" not in row.id:
        assert str(refusal(row, pallas_flash.explain)) == str(error)


def test_ids_are_unique():
    ids = [row.id for row in ROWS]
    assert sorted(set(ids)) == sorted(ids)


# These have public calls of their own, and tests of their own.
OTHERS = {"tune.py", "_tiling/tune.py", "_tiling/cache.py", "_plot.py", "_partition.py"}
PACKAGE = pathlib.Path(pallas_flash.__file__).parent
MODULES = [
    path
    for path in PACKAGE.rglob("*.py")
    if str(path.relative_to(PACKAGE)) not in OTHERS
    and path.parent.name != "flax"
    and (NEWER or path.parent.name != "_mosaic")
]


def test_every_raise_has_a_row():
    written = {
        (path, node.lineno): range(node.lineno, node.end_lineno + 1)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
    }
    reached = set()
    for row in ROWS:
        error = refusal(row)
        while error:
            traceback = error.__traceback__
            while traceback.tb_next:
                traceback = traceback.tb_next
            file = pathlib.Path(traceback.tb_frame.f_code.co_filename)
            reached.add((file, traceback.tb_lineno))
            error = error.__cause__
    without = [
        f"{file}:{line}"
        for (file, line), lines in written.items()
        if not any((file, hit) in reached for hit in lines)
    ]
    assert len(written) > 20
    assert not without


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def numbers(**changed):
    shapes = {"query": (2, 5, 6, 8), "key": (2, 7, 3, 8), "value": (2, 7, 3, 4)}
    return {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())} | changed


def cast(dtype):
    return {name: x.astype(dtype) for name, x in numbers().items()}


def first(count):
    """The first `count` keys or values of `numbers`."""
    return {name: numbers()[name][:, :count] for name in ("key", "value")}


# Unusual calls that are served; each of them meets a way to go wrong after the checks.
SERVED = {
    "NumPy arrays": lambda: {},
    "NumPy float64, which JAX reads as float32": lambda: cast(np.float64),
    "NumPy bfloat16": lambda: cast(ml_dtypes.bfloat16),
    "weak types": lambda: dict.fromkeys(
        ("query", "key", "value"), jnp.broadcast_to(jnp.asarray(1.0), (2, 5, 6, 8))
    ),
    "no batch axis": lambda: {name: x[0] for name, x in numbers().items()},
    "no examples": lambda: {name: x[:0] for name, x in numbers().items()},
    "no queries": lambda: {"query": numbers()["query"][:, :0]},
    "no keys": lambda: {**first(0), "mask": np.ones((5, 0), bool)},
    "one head": lambda: {name: x[:, :, :1] for name, x in numbers().items()},
    "scalar bias": lambda: {"bias": jnp.array(3.0)},
    "bias in another dtype": lambda: {"bias": normal(3, 6, 1, 7).astype(np.float16)},
    "bias in float64": lambda: {"bias": normal(3, 5, 7).astype(np.float64)},
    "scalar mask": lambda: {"mask": np.True_},
    "mask of nothing": lambda: {"mask": np.zeros((2, 1, 5, 1), bool)},
    "NumPy bool": lambda: {"is_causal": np.True_},
    "key lengths": lambda: {"key_value_seq_lengths": np.array([3, 7], np.int32)},
    "query lengths": lambda: {"query_seq_lengths": np.array([3, 5], np.int32)},
    "int64 lengths, which JAX reads as int32": lambda: {"key_value_seq_lengths": np.array([0, 4])},
    "lengths out of range": lambda: {"key_value_seq_lengths": np.array([-9, 99], np.int32)},
    "lengths at the ends of int32": lambda: {
        "query_seq_lengths": np.array([-(2**31), 2**31 - 1], np.int32)
    },
    "length of an unbatched call": lambda: {
        **{name: x[0] for name, x in numbers().items()},
        "key_value_seq_lengths": np.array([3], np.int32),
    },
    "window": lambda: {"local_window_size": 2},
    "window of NumPy integers": lambda: {"local_window_size": (np.int64(1), np.int32(0))},
    "window as a list": lambda: {"local_window_size": [1, 2]},
    "window open to the left": lambda: {"local_window_size": (None, 1)},
    "window open to the right": lambda: {"local_window_size": (1, None)},
    "window open to both": lambda: {"local_window_size": (None, None)},
    "window past int32": lambda: {"local_window_size": 2**40, "query_offset": np.array([2, -1])},
    "NumPy offset": lambda: {"query_offset": np.int64(2), "is_causal": True},
    "offset past int32": lambda: {"query_offset": 2**40, "local_window_size": 3},
    "negative offset past int32": lambda: {"query_offset": -(2**40), "is_causal": True},
    "offsets": lambda: {"query_offset": np.array([2, -3], np.int32), "is_causal": True},
    "one offset": lambda: {"query_offset": jnp.int32(-1), "is_causal": True},
    "positions of queries": lambda: {
        "query_positions": np.array([[4, 0, 3, 1, 2]], np.int32),
        "is_causal": True,
    },
    "positions of keys, and an offset": lambda: {
        "key_value_positions": np.array([[6, 3, 4, 0, 1, 2, 5]] * 2, np.int32),
        "query_offset": 1,
        "is_causal": True,
    },
    "positions of keys, and offsets": lambda: {
        "key_value_positions": np.array([[6, 3, 4, 0, 1, 2, 5]], np.int32),
        "query_offset": np.array([2, -1], np.int32),
        "local_window_size": 2,
    },
    "positions at the ends of int32": lambda: {
        "query_positions": np.array([[-(2**31), 2**31 - 1, 0, 1, 2]], np.int32),
        "key_value_positions": np.array([[2**31 - 1, -(2**31), 0, 1, 2, 3, 4]], np.int32),
        "is_causal": True,
    },
    "positions that nothing asks for": lambda: {"query_positions": i32(1, 5)},
    "ids as a list of two arrays": lambda: {
        "segment_ids": [np.arange(n, dtype=np.int32).reshape(2, n // 2) // 3 for n in (10, 14)]
    },
    "one array of ids": lambda: {**first(5), "segment_ids": np.arange(10).reshape(2, 5) // 3},
    "scale 0": lambda: {"scale": 0.0},
    "negative scale": lambda: {"scale": -0.5},
    "NumPy scale": lambda: {"scale": np.float64(0.3)},
    "NumPy scale in float16": lambda: {"scale": np.float16(-0.3)},
    "integer scale": lambda: {"scale": 2},
    "negative scale as an array": lambda: {"scale": jnp.float32(-0.5)},
    "scale in bfloat16": lambda: {"scale": jnp.bfloat16(0.3)},
    "soft cap of an int": lambda: {"logits_soft_cap": 50},
    "sinks in float16": lambda: {"sinks": np.array([0, 1, -1, 9, -9, 2], np.float16)},
    "a key where nothing is dropped": lambda: {"dropout_key": jax.random.key(0)},
    "a list of no operands": lambda: {"score_operands": []},
    "a mask of Segments": lambda: {
        "mask": Segments(*(np.arange(n, dtype=np.int32).reshape(2, -1) // 3 for n in (10, 14)))
    },
    "a BlockMask of NumPy integers": lambda: {
        "mask": BlockMask(np.array([[[[True, False]]]]), np.int64(5), np.int32(4))
    },
    "a prefix beyond the keys": lambda: {"mask": PrefixLM(np.array([99, -3], np.int32))},
    "precision by name": lambda: {"precision": "HIGHEST"},
    "precision of JAX": lambda: {"precision": jax.lax.Precision.HIGH},
    "more queries than a tile": lambda: {"query": normal(3, 2, 257, 6, 8)},
    "more keys than a tile": lambda: {
        "key": normal(3, 2, 257, 3, 8),
        "value": normal(4, 2, 257, 3, 4),
    },
}


def sees(q, k, *, causal, window, offset):
    """The meaning of `is_causal`, `local_window_size` and `query_offset`."""
    position = q + offset
    left, right = window
    return (
        (not causal or k <= position)
        and (left is None or k >= position - left)
        and (right is None or k <= position + right)
    )


def spelt_out(mask, q_len, kv_len):
    """A mask object as an array."""
    q, k = np.ogrid[:q_len, :kv_len]
    match mask:
        case PrefixLM(lengths):
            return (k <= q) | (k < lengths[:, None, None, None])
        case Segments(query, key_value):
            return (query[:, :, None] == key_value[:, None, :])[:, None]
        case BlockMask(some, block_q, block_kv):
            return some[:, :, q // int(block_q), k // int(block_kv)]
        case _:
            return np.asarray(mask)


def dense(
    query, key, value, bias=0, mask=True, *, scale=None, is_causal=False, query_seq_lengths=None,
    key_value_seq_lengths=None, local_window_size=None, segment_ids=None, query_offset=0,
    query_positions=None, key_value_positions=None, precision=None, logits_soft_cap=None,
    sinks=None, dropout_key=None, score_operands=(),
):  # fmt: skip
    """The output and the LSE by the docstring of `attention`, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    if query.ndim == 3:
        query, key, value = query[None], key[None], value[None]
    batch, q_len, heads, head_dim = query.shape
    kv_len, groups = key.shape[1], heads // key.shape[2]
    key, value = np.repeat(key, groups, axis=2), np.repeat(value, groups, axis=2)
    visible = np.ones((batch, heads, q_len, kv_len), bool) & spelt_out(mask, q_len, kv_len)
    window = local_window_size
    case = {
        "causal": is_causal,
        "window": window if isinstance(window, (tuple, list)) else (window, window),
    }
    where = [np.arange(q_len) + np.reshape(query_offset, (-1, 1)), np.arange(kv_len)[None]]
    for side, x in enumerate((query_positions, key_value_positions)):
        where[side] = where[side] if x is None else np.asarray(x, np.int64)
    q_pos, k_pos = (np.broadcast_to(x, (batch, x.shape[1])).tolist() for x in where)
    query_seq_lengths = [q_len] * batch if query_seq_lengths is None else query_seq_lengths
    key_lengths = [kv_len] * batch if key_value_seq_lengths is None else key_value_seq_lengths
    ids = segment_ids if isinstance(segment_ids, list) else [segment_ids] * 2
    for b, i, j in np.ndindex(batch, q_len, kv_len):
        visible[b, :, i, j] &= (
            sees(q_pos[b][i], k_pos[b][j], **case, offset=0)
            and i < query_seq_lengths[b]
            and j < key_lengths[b]
            and (segment_ids is None or bool(ids[0][b, i] == ids[1][b, j]))
        )
    scale = 1 / np.sqrt(head_dim) if scale is None else float(scale)
    s = scale * np.einsum("btnh,bsnh->bnts", query, key) + np.asarray(bias, np.float64)
    if logits_soft_cap is not None:
        s = logits_soft_cap * np.tanh(s / logits_soft_cap)
    weight = np.where(visible, np.exp(s), 0)
    total = weight.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks.astype(np.float64))[:, None, None] * (total > 0)
    o = np.einsum("bnts,bsnv->btnv", weight / np.where(total > 0, total, 1), value)
    with np.errstate(divide="ignore"):
        return o, np.log(total[..., 0]).swapaxes(1, 2)


@pytest.mark.parametrize("arguments", SERVED.values(), ids=SERVED)
def test_unusual_but_valid_calls_agree_with_the_definition(arguments):
    arguments = numbers() | arguments()
    call = functools.partial(pallas_flash.attention, implementation="xla", return_lse=True)
    o, lse = jax.jit(functools.partial(call, **arguments))()
    wanted, wanted_lse = dense(**arguments)
    dtype = jax.dtypes.canonicalize_dtype(arguments["query"].dtype)
    assert o.dtype == dtype
    tolerance = 16 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(o, np.float32), wanted.reshape(o.shape), rtol=0, atol=tolerance
    )
    np.testing.assert_allclose(lse, wanted_lse.reshape(lse.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 4), (4, 1), (3, 5), (5, 3), (4, 4)])
def test_positions_become_the_band_they_mean(q_len, kv_len, causal):
    sides = (None, 0, 1, 2, 4, 2**40)
    offsets = np.arange(-6, 7, dtype=np.int32)
    b, q, k = np.ogrid[: len(offsets), :q_len, :kv_len]
    for window in itertools.product(sides, sides):
        case = {"causal": causal, "window": window}

        def seen(offset, case=case):
            every = itertools.product(range(q_len), range(kv_len))
            pairs = [sees(q, k, **case, offset=offset) for q, k in every]
            return np.reshape(pairs, (q_len, kv_len))

        for offset in (*range(-6, 7), -(2**40), 2**40):
            shift, _ = _offset(offset, 1)
            band = _band(q_len, kv_len, **case, at=_At(shift))
            # What excludes nothing is no mask at all.
            assert (band is None) == seen(offset).all()
            if band is not None:
                allowed = np.broadcast_to(band.allowed(0, 0, q[0], k[0]), (q_len, kv_len))
                np.testing.assert_array_equal(allowed, seen(offset))
        band = _band(q_len, kv_len, **case, at=_At(0, offsets))
        if band is not None:
            wanted = np.stack([seen(offset) for offset in offsets.tolist()])
            band = dataclasses.replace(band, offset=np.asarray(band.offset))
            np.testing.assert_array_equal(band.allowed(b, 0, q, k), wanted)
        else:
            assert not causal
            assert window == (None, None)


@pytest.mark.parametrize("implementation", ["interpret", "xla", "reference"])
def test_offsets_at_the_ends_of_int32(implementation):
    """As arrays they count as far off as ints do, and no sum of positions wraps."""
    arrays = inputs()

    @jax.jit
    def call(offset):
        options = dict(is_causal=True, local_window_size=(None, 4), return_lse=True)
        return pallas_flash.attention(
            **arrays, **options, query_offset=offset, implementation=implementation
        )

    for offset in (2**31 - 1, -(2**31)):
        o, lse = call(jnp.full(2, offset, jnp.int32))
        definition = functools.partial(
            pallas_flash.attention, query_offset=offset, is_causal=True, return_lse=True,
            implementation="reference",
        )  # fmt: skip
        want = jax.jit(definition)(**arrays)
        assert np.isneginf(lse).all() == (offset < 0)
        for x, y in zip((o, lse), want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_shapes_alone_are_traced_with_eval_shape():
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs().items()}
    assert jax.eval_shape(pallas_flash.attention, **shapes).shape == (2, 5, 6, 4)


# ------------------------------------------------------------------------------------------------
# What has no gradient: refused where it is differentiated, and nowhere else.


def with_slopes(query, slopes, **options):
    x = inputs() | {"query": query}
    return pallas_flash.attention(**x, alibi_slopes=slopes, **options).sum()


def with_operand(query, slopes, **options):
    operands = dict(score_fn=scaled_by_head, score_operands=(i32(2), slopes))
    return pallas_flash.attention(**inputs() | {"query": query}, **operands, **options).sum()


def scanned(function):
    """The sum over two steps of a loop, the operand one of its constants."""
    return lambda q, x: jax.lax.scan(lambda c, _: (c + function(q, x), None), 0.0, None, 2)[0]


def carried(function):
    """As `scanned`, the operand in the carry."""

    def step(carry, _):
        total, x = carry
        return (total + function(total * inputs()["query"], x), x), None

    return lambda q, x: jax.lax.scan(step, (q.sum(), x), None, 2)[0][0]


def over_several(function):
    return lambda q, x: jax.vmap(function, (0, None))(jnp.stack([q, q]), x).sum()


TRANSFORMS = {
    "none": lambda f: f,
    "jit": jax.jit,
    "vmap": over_several,
    "remat": jax.checkpoint,
    "scan": scanned,
    "carry of scan": carried,
    "remat in scan in jit": lambda f: jax.jit(scanned(jax.checkpoint(f))),
}


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("function", [with_slopes, with_operand])
def test_operands_without_a_gradient_are_refused_only_where_one_is_asked_for(
    function, transform, implementation
):
    q, x = inputs()["query"], f32(6)
    loss = transform(functools.partial(function, implementation=implementation))

    def gradient(function, *argnums):
        return jax.eval_shape(jax.grad(function, argnums), q, x)

    with pytest.raises(NotImplementedError, match=r'no gradient .* implementation="reference"'):
        gradient(loss, 1)
    with pytest.raises(NotImplementedError, match=r'no gradient .* implementation="reference"'):
        gradient(loss, 0, 1)
    [got] = gradient(loss, 0)
    assert got.shape == q.shape
    gradient(lambda q, x: loss(q, jax.lax.stop_gradient(x)), 0, 1)
    gradient(lambda q, _: loss(q, x), 0)


def test_integers_and_masks_are_no_operands_with_a_gradient():
    colours, bound = i32(9), f32(3)

    def near(b, h, q, k, colours, bound):
        return (colours[q] == colours[k]) | (abs(q - k) < bound[b])

    def loss(query, colours, bound):
        mask = Predicate(near, (colours, bound))
        return pallas_flash.attention(**inputs() | {"query": query}, mask=mask).sum()

    gradients = jax.grad(loss, (0, 1, 2), allow_int=True)(inputs()["query"], colours, bound)
    assert gradients[1].dtype == jax.dtypes.float0
    assert not gradients[2].any()

    def with_ids(query, ids):
        return with_operand(query, f32(6)) + ids.sum()

    jax.eval_shape(jax.grad(with_ids, (0, 1), allow_int=True), inputs()["query"], colours)


@pytest.mark.parametrize("function", [with_slopes, with_operand])
def test_the_reference_differentiates_everything(function):
    with jax.enable_x64(True):
        x = {name: jnp.asarray(x, jnp.float64) for name, x in numbers().items()}
        weight = jnp.asarray(normal(9, 2, 5, 6, 4), jnp.float64)

        @jax.jit
        def loss(slopes):
            options = dict(alibi_slopes=slopes)
            if function is with_operand:
                options = dict(score_fn=scaled_by_head, score_operands=(i32(2), slopes))
            out = pallas_flash.attention(**x, **options, implementation="reference")
            return (out * weight).sum()

        slopes, step = jnp.asarray(normal(7, 2, 6), jnp.float64)
        slope, tangent = jax.jvp(loss, (slopes,), (step,))[1], 1e-6 * step
        moved = (loss(slopes + tangent) - loss(slopes - tangent)) / 2e-6
        np.testing.assert_allclose(slope, moved, rtol=1e-6)
        assert abs(slope) > 1e-3
