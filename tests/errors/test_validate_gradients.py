"""Tables have gradients everywhere; a sentence names each derivative that is missing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.calls import assert_each, f32, i32, inputs, normal, numbers, row_of

import pallas_flash
from pallas_flash import ScoreMod
from pallas_flash.masks import Predicate


def scaled_by_head(s, b, h, q, k, offset, slope):
    return s * slope[h]


def with_slopes(query, slopes, **options):
    x = inputs() | {"query": query}
    return pallas_flash.attention(**x, alibi_slopes=slopes, **options).sum()


def with_operand(query, slopes, **options):
    score_mod = ScoreMod(scaled_by_head, (i32(2), slopes))
    x = inputs() | {"query": query}
    return pallas_flash.attention(**x, score_mod=score_mod, **options).sum()


@jax.custom_jvp
def without_derivative(s):
    return s


@without_derivative.defjvp
def _(primals, tangents):
    raise NotImplementedError("there is none")


def bad_derivatives():
    def gradient_of_a_score_function(x):
        options = dict(score_mod=lambda s, *at: without_derivative(s), implementation="xla")
        return jax.grad(lambda q: pallas_flash.attention(q, q, q, **options).sum())(x)

    yield row_of(
        "score function without a derivative",
        gradient_of_a_score_function,
        NotImplementedError,
        "`score_mod` must have a derivative in the score where gradients are taken",
        x=inputs()["query"],
    )

    def gradient_of_an_operand(x, factor):
        def loss(factor):
            score_mod = ScoreMod(lambda s, b, h, *x: s * without_derivative(x[2][h]), (factor,))
            return pallas_flash.attention(x, x, x, score_mod=score_mod, implementation="xla").sum()

        return jax.grad(loss)(factor)

    yield row_of(
        "score function without a derivative in an operand",
        gradient_of_an_operand,
        NotImplementedError,
        "`score_mod` must have a derivative in its operands where gradients are taken",
        x=inputs()["query"],
        factor=f32(6),
    )

    for name in ("query", "key"):
        yield row_of(
            f"transposed in {name}",
            lambda x, name=name: jax.linear_transpose(
                lambda y: pallas_flash.attention(**x | {name: y}, implementation="xla"), x[name]
            )(f32(2, 5, 6, 4)),
            NotImplementedError,
            "`attention` must be transposed in `value` alone, in which it is linear",
            x=inputs(),
        )

    # Older versions of JAX find by themselves that the scores do not depend on values.
    newest = jax.__version_info__ >= (0, 12)
    for name, jit in (("", lambda f: f), (", compiled", jax.jit)) if newest else ():
        yield row_of(
            f"transposed with max logits{name}",
            lambda x, jit=jit: jax.linear_transpose(
                jit(lambda v: pallas_flash.attention(**x | dict(value=v), return_max_logits=True)),
                x["value"],
            )((f32(2, 5, 6, 4), f32(2, 6))),
            NotImplementedError,
            "`return_max_logits` must be False where `jax.linear_transpose` transposes `attention`",
            x=inputs(),
        )


def test_transpose_beside_the_residual():
    """It is constant, so that its cotangent adds nothing."""
    x = inputs()

    def call(v, residual):
        return pallas_flash.attention(**x | dict(value=v), return_residual=residual)

    both, alone = (
        jax.linear_transpose(lambda v, r=r: call(v, r), x["value"]) for r in (True, False)
    )
    do = call(x["value"], False)
    assert jnp.array_equal(*both((do, f32(2, 5, 6))), *alone(do))


ROWS = list(bad_derivatives())


def test_error_messages():
    assert_each(ROWS)


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
def test_tables_have_a_gradient_everywhere(function, transform, implementation):
    q, x = inputs()["query"], f32(6)
    loss = transform(functools.partial(function, implementation=implementation))

    def gradient(function, *argnums):
        return jax.eval_shape(jax.grad(function, argnums), q, x)

    [got] = gradient(loss, 1)
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    assert [x.shape for x in gradient(loss, 0, 1)] == [q.shape, x.shape]
    [got] = gradient(loss, 0)
    assert got.shape == q.shape
    gradient(lambda q, x: loss(q, jax.lax.stop_gradient(x)), 0, 1)
    gradient(lambda q, _: loss(q, x), 0)


def test_integers_and_masks_have_no_gradient():
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
                options = dict(score_mod=ScoreMod(scaled_by_head, (i32(2), slopes)))
            out = pallas_flash.attention(**x, **options, implementation="reference")
            return (out * weight).sum()

        slopes, step = jnp.asarray(normal(7, 2, 6), jnp.float64)
        slope, tangent = jax.jvp(loss, (slopes,), (step,))[1], 1e-6 * step
        moved = (loss(slopes + tangent) - loss(slopes - tangent)) / 2e-6
        np.testing.assert_allclose(slope, moved, rtol=1e-6)
        assert abs(slope) > 1e-3
