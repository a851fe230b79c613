"""Flags and numbers that are refused: scale, precision, soft cap, sinks, slopes, dropout."""

import jax
import jax.numpy as jnp
import numpy as np
from support.calls import PER_HEAD, Row, assert_each, f32, given, i32, of_dtypes, row_of

import pallas_flash

FLAGS = ("is_causal", "broadcast_dropout", "return_residual", "return_lse", "return_max_logits")


def bad_flags():
    for name in FLAGS:
        said = f"`{name}` must be True or False; got "
        yield from given(name, (1, None, "yes", np.array(True)), TypeError, said)
        traced = f"{said}an array of bool with shape ()."
        yield Row(f"{name} traced", lambda name=name: {name: True}, TypeError, traced, traced=name)
    said = "`reproducible` must be None, True or False; got "
    yield from given("reproducible", (1, "yes", np.array(True)), TypeError, said)


def bad_scales():
    said = "`scale` must be a number or a floating-point scalar array; got "
    kinds = ("1", True, np.True_, 1j, [1.0], np.array(1), jax.random.key(0))
    yield from given("scale", kinds, TypeError, said)
    arrays = {
        "of rank 1": jnp.ones(1),
        **of_dtypes("int32 bool complex64"),
    }
    yield from given("scale", arrays, TypeError, said)
    said = f"{said}an array of int32"
    yield Row("scale traced", lambda: {"scale": 2}, TypeError, said, traced="scale")
    infinite = (float("nan"), float("inf"), -float("inf"), 1e39, 10**400, np.float16("nan"))
    yield from given("scale", infinite, ValueError, "`scale` must be finite in float32; got ")


def bad_per_head():
    for name in PER_HEAD:
        said = f"`{name}` must be floating point; got {{x.dtype}}."
        yield from given(name, of_dtypes("int32 bool complex64", 6), TypeError, said)
        shapes = {f"of shape {x}": f32(*x) for x in ((), (1,), (3,), (2, 6), (6, 1))}
        said = f"`{name}` must have shape [N] = (6,); got {{x.shape}}. Give one number for each qu"
        yield from given(name, shapes, ValueError, said)


def bad_caps():
    name, said = "logits_soft_cap", "`logits_soft_cap` must be None or a number; got "
    kinds = ("1", True, np.True_, 1j, [1.0], jnp.ones(()), np.ones(()))
    yield from given(name, kinds, TypeError, said)
    traced = f"{said}an array of float32 with shape (). Write a `score_mod` for a cap that is trac"
    yield Row("soft cap traced", lambda: {name: 2.0}, TypeError, traced, traced=name)
    said = "`logits_soft_cap` must be positive and finite in float32; got "
    numbers = (0, 0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-39, 10**400, np.float32("nan"))
    yield from given(name, numbers, ValueError, said)


def bad_dropout():
    key, name, said = jax.random.key(0), "dropout_rate", "`dropout_rate` must be a number; got "
    kinds = ("0.1", None, True, np.True_, [0.1], jnp.float32(0.1), np.array(0.1), 1j)
    yield from given(name, kinds, TypeError, said, dropout_key=key)
    traced = f"{said}an array of float32 with shape (). Pass a Python"
    yield Row(
        "dropout rate traced", lambda: {name: 0.1, "dropout_key": key}, TypeError, traced,
        traced=name,
    )  # fmt: skip
    said = "`dropout_rate` must be at least 0 and less than 1; got "
    numbers = (1, 1.0, -0.1, 1.5, float("nan"), float("inf"), 10**400, np.float32(2))
    yield from given(name, numbers, ValueError, said, dropout_key=key)
    said = "`dropout_key` must be given with a `dropout_rate`; got None and 0.1."
    yield Row("dropout without a key", lambda: {name: 0.1}, ValueError, said)
    # Also where nothing is dropped.
    for rate in (0.0, 0.1):
        id = f"dropout key, rate {rate}:"
        said = "`dropout_key` must be a jax.random key; got {x.__class__.__name__} {x!r}."
        kinds = (0, "key", [0, 1])
        yield from given("dropout_key", kinds, TypeError, said, id, dropout_rate=rate)
        arrays = {
            "two": jax.random.split(key),
            "two raw": jax.random.split(jax.random.PRNGKey(0)),
            "raw, too long": jnp.zeros(3, jnp.uint32),
            "raw, a scalar": jnp.zeros((), jnp.uint32),
            "ints": i32(2),
            "floats": np.zeros(2),
        }
        said = "`dropout_key` must be one jax.random key; got an array of "
        yield from given("dropout_key", arrays, TypeError, said, id, dropout_rate=rate)


def bad_dropout_masks():
    valid = dict(dropout_key=jax.random.key(0), shape=(1, 2, 3, 4), dropout_rate=0.1)
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
        (
            "rate of 1",
            ValueError,
            "`dropout_rate` must be at least 0 and less than 1; got",
            {"dropout_rate": 1.0},
        ),
        (
            "rate as an array",
            TypeError,
            "`dropout_rate` must be a number; got",
            {"dropout_rate": jnp.ones(())},
        ),
        (
            "no key",
            TypeError,
            "`dropout_key` must be a jax.random key; got NoneType",
            {"dropout_key": None},
        ),
        (
            "no key, rate 0",
            TypeError,
            "`dropout_key` must be a jax.",
            {"dropout_key": 3, "dropout_rate": 0.0},
        ),
        (
            "two keys",
            TypeError,
            "`dropout_key` must be one jax.",
            {"dropout_key": jax.random.split(valid["dropout_key"])},
        ),
    ):
        yield row_of(
            f"dropout_mask: {id}", pallas_flash.dropout_mask, error, fragment, **valid | changed
        )


PRECISIONS = ("bogus", "", 1, ("high", "high"), jnp.float32)
PRECISION = (
    "`precision` must be None, a jax.lax.Precision, a jax.lax.DotAlgorithmPreset or one of "
    "['default', 'high', 'highest']; got "
)
ROWS = [
    *bad_flags(),
    *bad_scales(),
    *given("precision", PRECISIONS, TypeError, PRECISION),
    Row(
        "both statistics",
        lambda: {"return_residual": True, "return_lse": True},
        ValueError,
        "`return_residual` and `return_lse` must not both be True; got both.",
    ),
    *bad_per_head(),
    *bad_caps(),
    *bad_dropout(),
    *bad_dropout_masks(),
]


def test_error_messages():
    assert_each(ROWS)
