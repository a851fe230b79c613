"""Arrays that are refused: no arrays at all, and wrong ranks, sizes and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
from support.calls import (
    LENGTHS,
    PER_HEAD,
    POSITIONS,
    Row,
    check,
    each,
    f32,
    i32,
    inputs,
    unbatched,
)

INPUTS = ("query", "key", "value")
ARRAYS = (*INPUTS, "bias", "mask", *LENGTHS, "segment_ids", *POSITIONS, *PER_HEAD)
RANKS = "must have shape [B, T, N, H] or [T, N, H]; got rank"


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
]


@each(ROWS)
def test_error_message(row):
    check(row)
