"""Lengths, positions, offsets, windows and ids of segments that are refused."""

import jax.numpy as jnp
import numpy as np
from support.calls import (
    LENGTHS,
    POSITIONS,
    Row,
    assert_each,
    given,
    i32,
    of_dtypes,
    of_shapes,
    row_of,
    unbatched,
)

import pallas_flash


def bad_lengths():
    for name in LENGTHS:
        said = f"`{name}` must be int32; got {{x.dtype}}."
        yield from given(name, of_dtypes("float32 uint32 int8 bool", 2), TypeError, said)
        yield Row(
            f"{name} in int64",
            lambda name=name: {name: jnp.zeros(2, jnp.int64)},
            TypeError,
            f"`{name}` must be int32; got int64. Cast it",
            x64=True,
        )
        said = f"`{name}` must have shape [B] = (2,); got {{x.shape}}."
        yield from given(name, of_shapes((), (1,), (3,), (2, 1)), ValueError, said)
    yield Row(
        "lengths of an unbatched call",
        lambda: unbatched(key_value_seq_lengths=i32()),
        ValueError,
        "`key_value_seq_lengths` must have shape [B] = (1,); got ().",
    )


def bad_positions():
    for name, letters, n in zip(POSITIONS, ("[B, T]", "[B, S]"), (5, 7), strict=True):
        said = f"`{name}` must be int32; got {{x.dtype}}. Cast it"
        yield from given(name, of_dtypes("float32 int16 uint32 bool", 2, n), TypeError, said)
        said = (
            f"`{name}` must have shape {letters} = {(2, n)}, its first axis possibly 1; "
            "got {x.shape}. "
        )
        yield from given(name, of_shapes((n,)), ValueError, said + "Add the batch axis, by `[None]")
        said += "Give one number for each token."
        yield from given(name, of_shapes((2, n + 1), (3, n), (1, 1, n)), ValueError, said)
    offsets = (3, np.int32(-1), jnp.int32(0), np.array([2, -1], np.int32))
    said = "`query_offset` must be 0 with `query_positions`, which tell the same of each query; "
    yield from given("query_offset", offsets, ValueError, f"{said}got ", query_positions=i32(1, 5))


def bad_offsets():
    name = "query_offset"
    said = "`query_offset` must be an int, an int32 scalar or int32 [B]; got "
    yield from given(name, (1.0, None, True, "1", [1, 2]), TypeError, said)
    said = "`query_offset` must be int32; got {x.dtype}."
    yield from given(name, of_dtypes("float32 uint8", 2), TypeError, said)
    said = "`query_offset` must have shape [B] = (2,); got {x.shape}. Give one number for each"
    yield from given(name, of_shapes((1,), (2, 5)), ValueError, said)


def bad_windows():
    name = "local_window_size"
    said = "`local_window_size` must be None, an int or a pair (left, right) of these; got "
    kinds = (
        1.5, True, "3", {}, (), (1,), (1, 2, 3), (1.0, 2), (True, 1), np.array([1, 2]), np.array(1)
    )  # fmt: skip
    yield from given(name, kinds, TypeError, said)
    for id, x, more in (
        ("window traced", 3, "an array of int32 with shape (). Pass a size that is traced or dif"),
        ("pair of windows traced", (3, 2), ""),
    ):
        yield Row(id, lambda x=x: {name: x}, TypeError, said + more, traced=name)
    negative = (-1, (-1, 2), (2, -1), (None, -1), np.int32(-3))
    said = "`local_window_size` must not be negative; got {x}."
    yield from given(name, negative, ValueError, said)


def bad_segments():
    name, said = "segment_ids", "`segment_ids` must be one array or a (query, key_value) pair; got "
    for count in (0, 1, 3):
        items = {f"{count} arrays": [i32(2, 5)] * count}
        yield from given(name, items, ValueError, f"{said}{count} items.")
    for dtype in ("float32", "int16", "bool"):
        pair = {f"of queries in {dtype}": (jnp.zeros((2, 5), dtype), i32(2, 7))}
        yield from given(name, pair, TypeError, f"`segment_ids` must be int32; got {dtype}.")
    pairs = {
        "one array for T != S": (
            i32(2, 5),
            "be a (query, key_value) pair when T and S differ; got one array with T=5 and S=7.",
        ),
        "queries of a wrong shape": (
            (i32(2, 7), i32(2, 7)),
            "have shape [B, T] = (2, 5); got (2, 7). Give one number for each to",
        ),
        "keys of a wrong shape": (
            (i32(2, 5), i32(7)),
            "have shape [B, S] = (2, 7); got (7,).",
        ),
    }
    kinds = {
        "nested lists": ([[0] * 5, [0] * 7], "be an array; got list [0, 0, 0, 0, 0]."),
        "no queries": ((None, i32(2, 7)), "be an array; got NoneType None."),
        "keys in int8": ((i32(2, 5), jnp.zeros((2, 7), jnp.int8)), "be int32; got int8."),
    }
    for error, rows in ((ValueError, pairs), (TypeError, kinds)):
        for id, (x, fragment) in rows.items():
            yield from given(name, {id: x}, error, f"`segment_ids` must {fragment}")


def bad_cu_seqlens():
    def ids(id, error, fragment, cu_seqlens, length=5):
        function = pallas_flash.masks.segment_ids_from_cu_seqlens
        return row_of(id, function, error, fragment, cu_seqlens=cu_seqlens, length=length)

    for x in ([0, 2], 3, None):
        said = f"`cu_seqlens` must be an array; got {type(x).__name__} "
        yield ids(f"cu_seqlens {x!r}", TypeError, said, x)
    for dtype in ("float32", "uint32", "bool"):
        said = f"`cu_seqlens` must be int32; got {dtype}."
        yield ids(f"cu_seqlens in {dtype}", TypeError, said, jnp.zeros(3, dtype))
    for shape in ((), (0,), (2, 3)):
        said = f"`cu_seqlens` must have shape [documents + 1]; got {shape}."
        yield ids(f"cu_seqlens of shape {shape}", ValueError, said, i32(*shape))
    for ends in ((1, 3), (0, 3, 2), (0, 6), (-1, 2)):
        said = (
            "`cu_seqlens` must rise from 0 to at most length = 5; got an array of int32 with shape "
            f"({len(ends)},) from {ends[0]} to {ends[-1]}."
        )
        yield ids(f"cu_seqlens {ends}", ValueError, said, np.array(ends, np.int32))
    for length in (-1, 2.0, None):
        said = "`length` must be an int of at least 0; got "
        yield ids(f"length {length}", ValueError, said, i32(1), length)


def bad_arguments():
    ends = {"cu_seqlens_q": i32(3), "cu_seqlens_kv": i32(3), "q_len": 5, "kv_len": 7}

    def arguments(id, error, fragment, **given):
        function = pallas_flash.masks.arguments_from_cu_seqlens
        return row_of(f"packed, {id}", function, error, fragment, **ends | given)

    yield arguments("lists", TypeError, "`cu_seqlens_q` must be an array; got list [0, 2].",
                    cu_seqlens_q=[0, 2])  # fmt: skip
    yield arguments("keys past the end", ValueError,
                    "`cu_seqlens_kv` must rise from 0 to at most kv_len = 7; got an array of int32",
                    cu_seqlens_kv=np.array([0, 3, 8], np.int32))  # fmt: skip
    yield arguments("queries past the end", ValueError,
                    "`cu_seqlens_q` must rise from 0 to at most q_len = 5; got an array of int32",
                    cu_seqlens_q=np.array([0, 3, 6], np.int32))  # fmt: skip
    yield arguments("other sequences", ValueError,
                    "`cu_seqlens_kv` must have a sequence for each one of `cu_seqlens_q`; got "
                    "3 and 2. Repeat", cu_seqlens_kv=i32(4))  # fmt: skip
    yield arguments("length", ValueError, "`q_len` must be an int of at least 0; got ", q_len=2.0)


def bad_merges():
    x = dict(o=jnp.zeros((2, 5, 6, 8)), lse=jnp.zeros((2, 5, 6)))
    x |= dict(o2=x["o"], lse2=x["lse"])

    def merge(id, error, fragment, **given):
        y = x | given
        pairs = given.get("pairs", ((y["o"], y["lse"]), (y["o2"], y["lse2"])))
        return row_of(f"merge, {id}", lambda pairs: pallas_flash.merge(*pairs), error, fragment,
                      pairs=pairs)  # fmt: skip

    yield merge("nothing", TypeError, "`pairs` must be (output, LSE) of one call or more; got none",
                pairs=())  # fmt: skip
    yield merge("no pairs", TypeError, "`pairs[0]` must be a pair (output, LSE); got an array of "
                "float32 with shape (2, 5, 6, 8).", pairs=(x["o"], x["lse"]))  # fmt: skip
    yield merge(
        "pairs in one list",
        TypeError,
        "`pairs` must be arguments of their own; got tuple of 2 pairs. Write `merge(*pairs)`.",
        o=(0, 0),
        lse=(0, 0),
    )
    yield merge("list", TypeError, "`pairs[0][1]` must be an array; got list [0].", lse=[0])
    yield merge("output of rank 2", ValueError, "`pairs[0][0]` must be an output [B, T, N, V] or "
                "[T, N, V] of `attention`; got float32 of shape (5, 6).",
                o=jnp.zeros((5, 6)))  # fmt: skip
    yield merge("output of ints", ValueError, "got int32 of shape (2, 5, 6, 8). Pass the first",
                o=i32(2, 5, 6, 8))  # fmt: skip
    yield merge("other queries", ValueError, "`pairs[1][0]` must have shape (2, 5, 6, 8), for a "
                "first output of shape (2, 5, 6, 8); got (2, 4, 6, 8).",
                o2=jnp.zeros((2, 4, 6, 8)))  # fmt: skip
    yield merge("LSE by heads first", ValueError, "`pairs[1][1]` must have shape (2, 5, 6), for a "
                "first output of shape (2, 5, 6, 8); got (2, 6, 5).",
                lse2=jnp.zeros((2, 6, 5)))  # fmt: skip
    yield merge("LSE in 16 bits", TypeError, "`pairs[0][1]` must be float32 for a first output in "
                "float32; got bfloat16. Use `return_lse`",
                lse=jnp.zeros((2, 5, 6), jnp.bfloat16))  # fmt: skip
    yield merge("outputs of two dtypes", TypeError, "`pairs[1][0]` must be float32 for a first "
                "output in float32; got bfloat16. Cast",
                o2=jnp.zeros((2, 5, 6, 8), jnp.bfloat16))  # fmt: skip


def bad_orders():
    for length, devices, fragment in (
        (20, 4, "`length` must be a multiple of 2 * devices = 8; got 20. Add padding"),
        (0, 4, "`length` must be an int of at least 1; got int 0"),
        (16.0, 4, "`length` must be an int of at least 1; got float 16.0"),
        (16, None, "`devices` must be an int of at least 1; got NoneType None"),
    ):
        yield row_of(
            f"balanced order of {length} for {devices}",
            pallas_flash.masks.balanced_order,
            ValueError,
            fragment,
            length=length,
            devices=devices,
        )


ROWS = [
    *bad_lengths(),
    *bad_positions(),
    *bad_offsets(),
    *bad_windows(),
    *bad_segments(),
    *bad_cu_seqlens(),
    *bad_arguments(),
    *bad_merges(),
    *bad_orders(),
]


def test_error_messages():
    assert_each(ROWS)
