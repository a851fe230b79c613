"""Lengths, positions, offsets, windows and ids of segments that are refused."""

import jax.numpy as jnp
import numpy as np
from support.calls import LENGTHS, POSITIONS, Row, check, each, i32, row_of, unbatched

import pallas_flash


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


def bad_cu_seqlens():
    ids = pallas_flash.segment_ids_from_cu_seqlens
    for x in ([0, 2], 3, None):
        yield row_of(
            f"cu_seqlens {x!r}",
            ids,
            TypeError,
            f"`cu_seqlens` must be an array; got {type(x).__name__} ",
            cu_seqlens=x,
            length=5,
        )
    for dtype in ("float32", "uint32", "bool"):
        yield row_of(
            f"cu_seqlens in {dtype}",
            ids,
            TypeError,
            f"`cu_seqlens` must be int32; got {dtype}.",
            cu_seqlens=jnp.zeros(3, dtype),
            length=5,
        )
    for shape in ((), (0,), (2, 3)):
        yield row_of(
            f"cu_seqlens of shape {shape}",
            ids,
            ValueError,
            f"`cu_seqlens` must have shape [documents + 1]; got {shape}.",
            cu_seqlens=i32(*shape),
            length=5,
        )
    for ends in ((1, 3), (0, 3, 2), (0, 6), (-1, 2)):
        yield row_of(
            f"cu_seqlens {ends}",
            ids,
            ValueError,
            "`cu_seqlens` must rise from 0 to at most length = 5; got an array of int32 with shape "
            f"({len(ends)},) from {ends[0]} to {ends[-1]}.",
            cu_seqlens=np.array(ends, np.int32),
            length=5,
        )
    for length in (-1, 2.0, None):
        yield row_of(
            f"length {length}",
            ids,
            ValueError,
            "`length` must be an int of at least 0; got ",
            cu_seqlens=i32(1),
            length=length,
        )


def bad_orders():
    for length, devices, fragment in (
        (20, 4, "`length` must be a multiple of 2 * devices = 8; got 20. Add padding"),
        (0, 4, "`length` must be an int of at least 1; got int 0"),
        (16.0, 4, "`length` must be an int of at least 1; got float 16.0"),
        (16, None, "`devices` must be an int of at least 1; got NoneType None"),
    ):
        yield row_of(
            f"balanced order of {length} for {devices}",
            pallas_flash.balanced_order,
            ValueError,
            fragment,
            length=length,
            devices=devices,
        )


ROWS = [
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
    *bad_cu_seqlens(),
    *bad_orders(),
]


@each(ROWS)
def test_error_message(row):
    check(row)
