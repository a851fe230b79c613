"""Rows of arrays, flags and numbers that are refused; see `refusals`."""

import jax
import jax.numpy as jnp
import numpy as np
from calls import f32, i32, inputs, unbatched
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import ARRAYS, FLAGS, INPUTS, LENGTHS, PER_HEAD, POSITIONS, Row

import pallas_flash


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
