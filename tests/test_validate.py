"""Every error that a call of `attention` can meet: one table, and no `raise` without a row."""

import ast
import contextlib
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import f32, i32, inputs, unbatched
from described_gpus import described_gpu
from refusals import Row
from refused_arrays import (
    bad_caps,
    bad_context,
    bad_dtypes,
    bad_flags,
    bad_lengths,
    bad_per_head,
    bad_positions,
    bad_scales,
    bad_windows,
    no_arrays,
    not_broadcastable,
)
from refused_functions import (
    bad_dropout,
    bad_mask_objects,
    bad_operands,
    bad_score_functions,
    other_functions,
    without_gradient,
)
from refused_tiles import NEWER, bad_tiles, not_served, not_served_on_hopper

import pallas_flash

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
