"""Small calls of `attention`: valid ones, and rows of refused ones, whose errors have one form.

The tables are in test_validate_*.py.
"""

import contextlib
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.described_gpus import described_gpu
from support.repository import assert_none

import pallas_flash
from pallas_flash._jax import compat

NEWER = jax.__version_info__ >= compat.MOSAIC_SINCE

LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")
PER_HEAD = ("sinks", "alibi_slopes")
POSITIONS = ("query_positions", "key_value_positions")


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


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def numbers(**changed):
    shapes = {"query": (2, 5, 6, 8), "key": (2, 7, 3, 8), "value": (2, 7, 3, 4)}
    return {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())} | changed


class Row(NamedTuple):
    """A call that is refused.

    `arguments` makes what differs from a valid call. `gpu` is the kind of the GPU to compile for,
    the CPU if None; `traced` is an argument that arrives as a tracer; `differentiated` is one with
    respect to which the call is differentiated; `function` is called instead of `attention`, with
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


def row_of(id, function, error, fragment, **arguments):
    """A call of another function than `attention`."""
    return Row(id, lambda: arguments, error, fragment, function=function)


def given(name, values, error, fragment, id=None, **others):
    """Rows of calls in which one argument has each of some values, by id or by their repr.

    `fragment` may have fields of the value, as in {x.shape}; `others` are further arguments.
    """
    values = values if isinstance(values, dict) else {f"{x!r:.20}": x for x in values}
    return [
        Row(f"{id or name} {key}", lambda x=x: {name: x, **others}, error, fragment.format(x=x))
        for key, x in values.items()
    ]


def of_dtypes(dtypes, *shape):
    """Values for `given`: arrays of one shape."""
    return {f"in {dtype}": zeros(shape, jnp.dtype(dtype)) for dtype in dtypes.split()}


def of_shapes(*shapes):
    """Values for `given`: int32 arrays."""
    return {f"of shape {shape}": i32(*shape) for shape in shapes}


def table(error, rows):
    """Rows of calls that raise one type of error: {id: (arguments, fragment)}."""
    return [Row(id, make, error, fragment) for id, (make, fragment) in rows.items()]


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


# `argument` must requirement; got values. The advice is an imperative sentence.
ADVICE = (
    "Add|Broadcast|Cast|Check|Choose|Convert|Drop|Give|Keep|Multiply|Pass|Repeat|Reshape|Use|Wrap|"
    "Write"
)
FORM = re.compile(rf"`[\w.\[\]]+`.* must .+; got .+\. ({ADVICE}) .+\.")


def check(row):
    """The row's call raises its error, in the form of all errors, and so does `explain`."""
    error = refusal(row)
    said = str(error)
    assert type(error) is row.error, type(error)
    assert row.fragment in said, said
    assert FORM.fullmatch(said), said
    # Explaining computes nothing, differentiates nothing, and takes shapes for arrays.
    if not row.differentiated and not row.function and "ShapeDtypeStruct" not in row.id:
        explained = str(refusal(row, pallas_flash.explain))
        for form in ("`{}`", "pallas_flash.{}"):
            explained = explained.replace(form.format("explain"), form.format("attention"))
        assert explained == said, explained


def assert_each(rows, check=check):
    """Check all rows, and name those whose check fails."""

    def failure(row):
        try:
            check(row)
        except (Exception, pytest.fail.Exception) as error:
            return f"{row.id}: {type(error).__name__}: {error}"

    assert_none(filter(None, map(failure, rows)))
