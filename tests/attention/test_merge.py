"""`merge` of calls is one call over all their keys: results, gradients, LSEs of any size."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash
from pallas_flash import merge

B, T, S, N, K, H, V = 2, 9, 20, 4, 2, 8, 12
CUTS = {"one": (0, S), "two": (0, 7, S), "four": (0, 7, 8, 15, S), "one empty": (0, 0, S)}


def inputs(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, V)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def cotangents(dtype="float32"):
    rng = np.random.default_rng(1)
    do = jnp.asarray(rng.standard_normal((B, T, N, V)), dtype)
    return do, jnp.asarray(rng.standard_normal((B, T, N)), jnp.promote_types(dtype, jnp.float32))


def whole(q, k, v, **options):
    return pallas_flash.attention(q, k, v, return_lse=True, **options)


def merged(q, k, v, cuts, mask=None, **options):
    """Attention over the keys between cuts, merged."""
    parts = [
        whole(q, k[:, a:b], v[:, a:b], mask=None if mask is None else mask[:, a:b], **options)
        for a, b in itertools.pairwise(cuts)
    ]
    return merge(*parts)


def assert_close(got, want, tolerance):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        np.testing.assert_array_equal(np.isneginf(x), np.isneginf(y))
        finite = np.isfinite(y)
        np.testing.assert_allclose(x[finite], y[finite], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cuts", CUTS)
def test_merged_equals_one_call_in_float64(cuts):
    """Gradients of queries, keys and values go through outputs and LSEs of both calls."""
    with jax.enable_x64(True):
        options = dict(implementation="xla")
        arrays, ct = inputs("float64"), cotangents("float64")
        want, pull = jax.vjp(functools.partial(whole, **options), *arrays)
        got, pull_merged = jax.vjp(functools.partial(merged, cuts=CUTS[cuts], **options), *arrays)
        assert_close(got, want, 1e-12)
        assert_close(pull_merged(ct), pull(ct), 1e-11)


def dense(*pairs):
    """The definition, for finite LSEs."""
    total = sum(jnp.exp(lse) for _, lse in pairs)
    return sum(jnp.exp(lse)[..., None] * o for o, lse in pairs) / total[..., None], jnp.log(total)


def parts(shape=(B, T, N), dtype="float64", count=2):
    rng = np.random.default_rng(2)
    return tuple(
        (
            jnp.asarray(rng.standard_normal((*shape, V)), dtype),
            jnp.asarray(3 * rng.standard_normal(shape), dtype),
        )
        for _ in range(count)
    )


@pytest.mark.parametrize(("shape", "count"), [((B, T, N), 2), ((T, N), 3)])
def test_derivatives_of_all_arrays(shape, count):
    """Reverse and forward mode, and the second order, as of the definition."""
    with jax.enable_x64(True):
        x = parts(shape, count=count)
        moved = jax.tree.map(jnp.cos, x)
        assert_close(merge(*x), dense(*x), 1e-12)
        assert_close(jax.jvp(merge, x, moved), jax.jvp(dense, x, moved), 1e-12)

        def loss(function, x):
            o, lse = function(*x)
            return (o**3).sum() + jnp.sin(lse).sum()

        def second(f):
            return jax.grad(lambda x: sum(y.sum() for y in jax.tree.leaves(jax.grad(f)(x))))

        for order in (jax.grad, second):
            got, want = (order(functools.partial(loss, f))(x) for f in (merge, dense))
            assert_close(got, want, 1e-10)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_rows_without_keys(transform):
    """In one call, in the other, and in both: no NaN, and no gradient where there is no key."""
    arrays, ct = inputs(), cotangents()
    first, second = np.ones((T, 7), bool), np.ones((T, S - 7), bool)
    first[[0, 2]], second[[1, 2]] = False, False
    mask = jnp.asarray(np.concatenate([first, second], 1))
    options = dict(mask=mask, implementation="xla")
    want, pull = jax.vjp(functools.partial(whole, **options), *arrays)
    call = transform(functools.partial(merged, cuts=CUTS["two"], **options))
    with jax.debug_nans(True):
        got, pull_merged = jax.vjp(call, *arrays)
        gradients = pull_merged(ct)
    assert_close(got, want, 1e-5)
    assert_close(gradients, pull(ct), 1e-5)
    assert not np.asarray(got[0][:, 2]).any() and np.isneginf(got[1][:, 2]).all()

    (o, lse), (o2, lse2) = parts(dtype="float32")
    lse, lse2 = lse.at[:, [0, 2]].set(-jnp.inf), lse2.at[:, [1, 2]].set(-jnp.inf)
    o, o2 = o.at[:, [0, 2]].set(0), o2.at[:, [1, 2]].set(0)
    pull = transform(lambda *x: jax.vjp(merge, *x)[1](ct))
    (do, dlse), (do2, dlse2) = pull((o, lse), (o2, lse2))
    for x, rows in ((do, [0, 2]), (dlse, [0, 2]), (do2, [1, 2]), (dlse2, [1, 2])):
        assert not np.asarray(x[:, rows]).any()
        assert np.isfinite(x).all()
    np.testing.assert_allclose(dlse[:, 1], ct[1][:, 1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("distance", [0.0, 50.0, 200.0, 1e9])
def test_scores_of_any_size(distance):
    """No weight overflows, and the smaller part of far LSEs has none."""
    (o, lse), (o2, _) = parts(dtype="float32")
    got, total = merge((o, lse), (o2, lse - distance))
    share = 1 / (1 + np.exp(-distance))
    np.testing.assert_allclose(got, share * o + (1 - share) * o2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(total, lse + np.log1p(np.exp(-distance)), rtol=1e-6)
    swapped, _ = merge((o2, lse - distance), (o, lse))
    np.testing.assert_array_equal(got, swapped)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_outputs_in_16_bits(dtype):
    arrays = inputs(dtype)
    (o, lse), (want, want_lse) = merged(*arrays, cuts=CUTS["two"]), whole(*arrays)
    assert o.dtype == dtype and lse.dtype == jnp.float32
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (o, want)), rtol=0.03, atol=0.03
    )
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_cascade_under_vmap():
    """A prefix that all continuations share, once; each continuation's own keys are its own."""
    (q, k, v), (prefix_k, prefix_v) = inputs(), [x[:1, :5] for x in inputs()[1:]]
    rows = q.reshape(1, B * T, N, H)
    o, lse = whole(rows, prefix_k, prefix_v)
    shared = o.reshape(B, T, N, V), lse.reshape(B, T, N)
    own = whole(q, k, v)
    got = jax.vmap(merge)(shared, own)
    keys, values = (
        jnp.concatenate([jnp.repeat(x, B, 0), y], 1) for x, y in ((prefix_k, k), (prefix_v, v))
    )
    assert_close(got, whole(q, keys, values), 1e-5)
