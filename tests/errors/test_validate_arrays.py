"""Arrays that are refused: no arrays at all, and wrong ranks, sizes and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
from support.calls import (
    LENGTHS,
    PER_HEAD,
    POSITIONS,
    Row,
    assert_each,
    f32,
    given,
    inputs,
    of_dtypes,
    table,
    unbatched,
)

INPUTS = ("query", "key", "value")
ARRAYS = (*INPUTS, "bias", "mask", *LENGTHS, "segment_ids", *POSITIONS, *PER_HEAD)
RANKS = "`query` must have shape [B, T, N, H] or [T, N, H]; got rank "


def bad_dtypes():
    for name in INPUTS:
        said = f"`{name}` must be one of float16, bfloat16, float32, float64; got {{x.dtype}}."
        x = inputs()[name]
        dtypes = of_dtypes("int32 bool complex64 float8_e4m3fn int4", *x.shape)
        yield from given(name, dtypes, TypeError, said)
        if name != "query":
            said = f"`{name}` must have the dtype of `query`; got bfloat16 and float32."
            yield from given(name, of_dtypes("bfloat16", *x.shape), TypeError, said)


def no_arrays():
    for name in ARRAYS:
        said = f"`{name}` must be an array; got {{x.__class__.__name__}} "
        kinds = ([[1.0, 2.0]], "text", 1.5, True, jax.ShapeDtypeStruct((2,), jnp.int32))
        for x in kinds:
            yield Row(
                f"{name} as {type(x).__name__}",
                # A list could be a pair of ids.
                lambda name=name, x=x: {name: (x, x) if name == "segment_ids" else x},
                TypeError,
                said.format(x=x),
            )
        arrays = {f"in {x}": np.zeros((2, 5), x) for x in ("object", "U4", "datetime64[s]")}
        said = f"`{name}` must be an array that JAX can hold; got ndarray of "
        yield from given(name, arrays, TypeError, said)
    for name in INPUTS:
        yield from given(name, (None,), TypeError, f"`{name}` must be an array; got NoneType None.")
    said = "`key` must be one of float16, bfloat16, float32, float64; got key<fry>."
    yield from given("key", {"of a random generator": jax.random.key(0)}, TypeError, said)
    masked = {"as masked array": np.ma.ones((2, 5, 6, 8), np.float32)}
    said = "`query` must be an array that JAX can hold; got MaskedArray of float32."
    yield from given("query", masked, TypeError, said)
    said = "`query` must be an array; got a Ref of float32 with shape (2, 5, 6, 8). Pass what"
    ref = jax.new_ref
    yield Row("query as a Ref", lambda: {"query": ref(inputs()["query"])}, TypeError, said)


def numbers_that_wrap():
    """In int32, in which JAX keeps the lowest bits of a NumPy int64."""
    for name in (*LENGTHS, "query_offset"):
        said = f"`{name}` must have numbers that int32 holds; got {{x[0]}} to {{x[1]}}."
        wide = {"past int32": np.array([3, 2**40]), "below int32": np.array([-(2**40), 3])}
        yield from given(name, wide, ValueError, said)


def not_broadcastable():
    wrong = {
        "batch": (3, 6, 5, 7),
        "head": (2, 5, 5, 7),
        "head, which counts those of keys": (2, 3, 5, 7),
        "query": (2, 6, 7, 7),
        "query, of a [T, S] array": (7, 5),
        "key": (2, 6, 5, 5),
        "key, of length 0": (2, 6, 5, 0),
    }
    for name, dtype in (("bias", jnp.float32), ("mask", jnp.bool_)):
        said = (
            f"`{name}` must be broadcastable to [B, N, T, S] = (2, 6, 5, 7); "
            f"got {name}.shape={{x.shape}}."
        )
        arrays = {f"with a wrong axis: {axis}": jnp.zeros(x, dtype) for axis, x in wrong.items()}
        yield from given(name, arrays, ValueError, said)
        said = f"`{name}` must have at most 4 axes, [B, N, T, S]; got rank 5"
        yield from given(name, {"of rank 5": jnp.zeros((1, 2, 6, 5, 7), dtype)}, ValueError, said)


def bad_ranks():
    for shape in ((), (5, 8), (1, 2, 5, 6, 8)):
        yield from given("query", {f"of {shape}": f32(*shape)}, ValueError, RANKS + str(len(shape)))
    yield from given("query", (np.float32(1),), ValueError, f"{RANKS}0")
    for name, shape in {"key": (7, 3, 8), "value": (7, 3, 4)}.items():
        said = f"`{name}` must have the rank of `query`; got {{x.ndim}} and 4 ({name}.shape="
        arrays = {"of rank 3": f32(*shape), "of rank 5": f32(1, 2, *shape)}
        yield from given(name, arrays, ValueError, said)


MULTIPLE = "`query` must have a multiple of the heads of `key`; got"
HEADS = "`query` must have at least one head and a head dim of at least 1; got"
SHAPES = {
    "batched keys for an unbatched query": (
        lambda: unbatched(key=f32(2, 7, 3, 8)),
        "`key` must have the rank of `query`; got 4 and 3",
    ),
    "batch of key": (
        lambda: {"key": f32(1, 7, 3, 8)},
        "`key` must have the batch size of `query`; got 1 and 2 (query.shape=(2, 5, 6, 8), ",
    ),
    "batch of value": (
        lambda: {"value": f32(3, 7, 3, 4)},
        "`value` must have the batch size of `query`; got 3 and 2",
    ),
    "batch of query": (
        lambda: {"query": f32(1, 5, 6, 8)},
        "`key` must have the batch size of `query`; got 2 and 1",
    ),
    "length of value": (
        lambda: {"value": f32(2, 5, 3, 4)},
        "`value` must have the length of `key`; got 5 and 7",
    ),
    "length of an unbatched value": (
        lambda: unbatched(value=f32(5, 3, 4)),
        "`value` must have the length of `key`; got 5 and 7",
    ),
    "heads of value": (
        lambda: {"value": f32(2, 7, 1, 4)},
        "`value` must have the number of heads of `key`; got 1 and 3",
    ),
    "head dim of key": (
        lambda: {"key": f32(2, 7, 3, 4)},
        "`key` must have the head dim of `query`; got 4 and 8",
    ),
    "query heads that do not divide": (
        lambda: {"query": f32(2, 5, 7, 8)},
        f"{MULTIPLE} 7 query heads and 3 key/value",
    ),
    "fewer query heads than key heads": (
        lambda: {"query": f32(2, 5, 2, 8)},
        f"{MULTIPLE} 2 query heads and 3 key/value",
    ),
    "no query heads": (lambda: {"query": f32(2, 5, 0, 8)}, f"{HEADS} 0 heads of size 8"),
    "no key heads": (
        lambda: {"key": f32(2, 7, 0, 8), "value": f32(2, 7, 0, 4)},
        "`key` must have at least one head",
    ),
    "head dim 0": (
        lambda: {"query": f32(2, 5, 6, 0), "key": f32(2, 7, 3, 0)},
        f"{HEADS} 6 heads of size 0",
    ),
    "head dim 0 of value": (
        lambda: {"value": f32(2, 7, 3, 0)},
        "`value` must have at least one head",
    ),
}


def bad_pairs():
    said = "`bias` must be floating point; got {x.dtype}."
    yield from given("bias", of_dtypes("int32 complex64", 5, 7), TypeError, said)
    said += " Pass a boolean array that says who may attend as `mask`."
    yield from given("bias", of_dtypes("bool", 5, 7), TypeError, said)
    said = (
        "`mask` must be boolean, True where a query may attend; got {x.dtype}. Pass "
        "`mask.astype(bool)`, or numbers to add to the scores as `bias`."
    )
    yield from given("mask", of_dtypes("float32 int32", 5, 7), TypeError, said)


ROWS = [
    *bad_ranks(),
    *table(ValueError, SHAPES),
    *bad_dtypes(),
    *no_arrays(),
    *numbers_that_wrap(),
    *bad_pairs(),
    *not_broadcastable(),
]


def test_error_messages():
    assert_each(ROWS)
