"""Flags and numbers that are refused: scale, precision, soft cap, sinks, slopes, dropout."""

import jax
import jax.numpy as jnp
import numpy as np
from support.calls import PER_HEAD, Row, check, each, f32, i32, row_of

import pallas_flash

FLAGS = ("is_causal", "broadcast_dropout", "return_residual", "return_lse")


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
        "a `score_mod` for a cap that is traced",
        traced="logits_soft_cap",
    )
    for cap in (0, 0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-39, 10**400, np.float32("nan")):
        yield Row(
            f"soft cap {cap!r:.20}",
            lambda cap=cap: {"logits_soft_cap": cap},
            ValueError,
            "`logits_soft_cap` must be positive and finite in float32; got ",
        )


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


def bad_dropout_masks():
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
        yield row_of(
            f"dropout_mask: {id}", pallas_flash.dropout_mask, error, fragment, **valid | changed
        )


ROWS = [
    *bad_flags(),
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
    *bad_per_head(),
    *bad_caps(),
    *bad_dropout(),
    *bad_dropout_masks(),
]


@each(ROWS)
def test_error_message(row):
    check(row)
