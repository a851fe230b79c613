"""Derivatives of second and higher order: those of the dense definition, in memory linear in S."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, jaxprs, oracle
from support.compare import assert_close

from pallas_flash import attention
from pallas_flash._backends import xla
from pallas_flash._execution import tangents
from pallas_flash.tuning import Tile, TileSizes

# No two of B, T, S, N, K, H and V agree; T and S are no multiples of a tile.
B, T, S, N, K, H, V = 2, 13, 19, 6, 3, 8, 5

TILE_SIZES = TileSizes(forward=Tile(16, 16), dkv=Tile(16, 16), dq=Tile(16, 16))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of queries, the last one ragged."""
    monkeypatch.setattr(tangents, "ROWS_AT_ONCE", 5 * B * N)
    monkeypatch.setattr(xla, "BLOCK_Q", 8)
    monkeypatch.setattr(xla, "BLOCK_KV", 16)


pytestmark = pytest.mark.usefixtures("ieee_products")


def ints(*numbers):
    return jnp.asarray(numbers, jnp.int32)


def ids(length: int):
    return jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (B, length))), jnp.int32)


LENGTHS = dict(query_seq_lengths=ints(9, T), key_value_seq_lengths=ints(S, 0))
MASKS = {
    "none": {},
    # The last rows of batch element 0 have no keys, and no row of batch element 1 has.
    "causal, lengths": dict(is_causal=True, **LENGTHS),
    "window, offset": dict(local_window_size=(4, 2), query_offset=ints(-6, 5)),
    "segments": dict(segment_ids=(ids(T), ids(S))),
    "positions": dict(is_causal=True, query_positions=2 * ids(T), key_value_positions=3 * ids(S)),
}
ARRAYS = {
    "bias": dict(bias=(1, N, 1, S)),
    "bias of queries, mask": dict(bias=(B, 1, T, 1), mask=(B, 1, T, S)),
}
SCORES = {
    "scores": dict(
        logits_soft_cap=3.0,
        alibi_slopes=jnp.linspace(0.1, 0.4, N),
        sinks=jnp.linspace(-1.0, 1.0, N),
        dropout_rate=0.3,
        dropout_key=jax.random.key(5),
    )
}


def draw(dtype=np.float64, **shapes) -> dict:
    """query, key, value, scale and what else has a shape, in `dtype`."""
    random = np.random.default_rng(1)
    shapes = dict(query=(B, T, N, H), key=(B, S, K, H), value=(B, S, K, V), scale=()) | shapes
    drawn = {name: random.normal(size=shape) for name, shape in shapes.items()}
    drawn["scale"] = np.asarray(0.4)
    return {name: jnp.asarray(x > -1 if name == "mask" else x, None if name == "mask" else dtype)
            for name, x in drawn.items()}  # fmt: skip


def split(arguments: dict) -> tuple[dict, dict]:
    """Return the arguments with derivatives, and the others."""
    floats = {name: x for name, x in arguments.items() if name != "mask"}
    return floats, {name: x for name, x in arguments.items() if name == "mask"}


def loss(implementation: str, **options) -> Callable:
    """A number from output and LSE, curved in both, as a function of a dictionary."""
    kernels = implementation == "interpret"
    options |= {"config": TILE_SIZES} if kernels else {}

    def fn(floats):
        call = functools.partial(attention, implementation=implementation, return_lse=True)
        o, lse = call(**floats, **options)
        random = np.random.default_rng(2)
        weights = (jnp.asarray(random.normal(size=x.shape), x.dtype) for x in (o, lse))
        do, dlse = weights
        seen = lse > -jnp.inf
        return (jnp.sin(o) * do).sum() + (jnp.cos(jnp.where(seen, lse, 0)) * dlse).sum()

    return fn


def directions(floats):
    random = np.random.default_rng(3)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), floats)


def forward_over_reverse(fn):
    return lambda x: jax.jvp(jax.grad(fn), (x,), (directions(x),))[1]


def reverse_over_reverse(fn):
    def along(x):
        products = jax.tree.map(lambda g, d: (g * d).sum(), jax.grad(fn)(x), directions(x))
        return sum(jax.tree.leaves(products))

    return jax.grad(along)


def reverse_over_forward_over_reverse(fn):
    def curvature(x):
        products = jax.tree.map(
            lambda h, d: (h * d).sum(), forward_over_reverse(fn)(x), directions(x)
        )
        return sum(jax.tree.leaves(products))

    return jax.grad(curvature)


def check(run, implementation):
    """`run` gives the same by an implementation and by the definition, and no zeros."""
    got, want = (run(name) for name in (implementation, "reference"))
    assert all(np.any(x) for x in jax.tree.leaves(want))
    assert_close(got, want)


DERIVATIVES = [forward_over_reverse, reverse_over_reverse]
by_kernels = pytest.mark.parametrize(
    "implementation", cases.default(["interpret"], ["xla", "interpret"])
)


@pytest.mark.parametrize(
    "mask",
    cases.default(
        ["causal, lengths", "bias of queries, mask", "scores"], [*MASKS, *ARRAYS, *SCORES]
    ),
)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_hessian_products_in_float64(derivative, mask):
    with jax.enable_x64(True):
        floats, others = split(draw(**ARRAYS.get(mask, {})))
        options = MASKS.get(mask, {}) | SCORES.get(mask, {}) | others
        check(lambda by: oracle.compiled(derivative(loss(by, **options)))(floats), "xla")


@pytest.mark.parametrize("mask", cases.default(["causal, lengths"], MASKS))
@pytest.mark.parametrize("derivative", cases.default([forward_over_reverse], DERIVATIVES))
def test_hessian_products_of_the_kernels(derivative, mask, kernel_case):
    got = oracle.compiled(derivative(loss("interpret", **MASKS[mask])))(draw(np.float32))
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: x.astype(np.float64), draw(np.float32))
        want = oracle.compiled(derivative(loss("reference", **MASKS[mask])))(exact)
        assert_close(got, want, dtypes=False)


@by_kernels
def test_third_order_equals_definition(implementation):
    options, floats = MASKS["causal, lengths"], draw(np.float32)
    derivative = reverse_over_forward_over_reverse
    check(lambda by: oracle.compiled(derivative(loss(by, **options)))(floats), implementation)


@by_kernels
def test_hessians_and_jacobians(implementation):
    """Mapped over directions."""
    floats = draw(np.float32)

    def run(by):
        def by_few(few):
            row = floats["query"].at[1, 2, 3].set(few["row"])
            return loss(by, is_causal=True)(floats | {"query": row, "scale": few["scale"]})

        few = {"row": floats["query"][1, 2, 3], "scale": floats["scale"]}
        both = jax.hessian(by_few), jax.jacfwd(jax.grad(by_few))
        return oracle.compiled(lambda few: [fn(few) for fn in both])(few)

    check(run, implementation)


@pytest.mark.parametrize("transform", cases.default(["vmap", "remat"], ["vmap", "remat", "eager"]))
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_second_order_under_transformations(implementation, transform):
    floats = draw(np.float32)

    def run(by):
        fn = loss(by, **MASKS["causal, lengths"])
        if transform == "eager":
            with jax.debug_nans(True):
                return forward_over_reverse(fn)(floats)
        if transform == "remat":
            return oracle.compiled(reverse_over_reverse(jax.checkpoint(fn)))(floats)
        queries = jnp.stack([floats["query"], -2 * floats["query"]])
        by_query = jax.vmap(lambda q: reverse_over_reverse(fn)(floats | {"query": q}))
        return oracle.compiled(by_query)(queries)

    check(run, implementation)


# JAX before 0.12 loses the rule of a custom_jvp in a scan that it differentiates again. Loops in
# plain JAX have a forward mode without it.
IN_SCANS = [("xla", forward_over_reverse)]
if jax.__version_info__ >= (0, 12):
    IN_SCANS += [("interpret", forward_over_reverse)]
    IN_SCANS += [(implementation, reverse_over_reverse) for implementation in ("xla", "interpret")]


@pytest.mark.parametrize(("implementation", "derivative"), cases.default(IN_SCANS[-2:], IN_SCANS))
def test_derivatives_of_a_scan(implementation, derivative):
    x = draw(np.float32)["query"]

    def run(by):
        def layer(x, factor):
            tiles = {"config": TILE_SIZES} if by == "interpret" else {}
            call = functools.partial(attention, implementation=by, **tiles)
            return x + factor * call(x, x, x, is_causal=True), None

        def total(x):
            return (jax.lax.scan(layer, x, jnp.asarray([0.5, 2.0]))[0] ** 2).sum()

        return oracle.compiled(derivative(total))(x)

    check(run, implementation)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_second_order_dtypes_equal_operands(implementation, x64):
    floats = draw(np.float32) | {"query": draw(jnp.bfloat16)["query"]}
    floats |= {name: floats[name].astype(jnp.bfloat16) for name in ("key", "value")}

    def fn(floats):
        call = functools.partial(attention, implementation=implementation)
        o, lse = call(**floats, **MASKS["causal, lengths"], return_lse=True)
        return (o * o).sum().astype(jnp.float32) + (lse * lse).sum()

    def along(x):
        products = jax.tree.map(lambda g: (g * g).sum().astype(jnp.float32), jax.grad(fn)(x))
        return sum(jax.tree.leaves(products), jnp.float32(0))

    def dtype(x):
        return x.dtype

    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        for second in (lambda x: jax.jvp(jax.grad(fn), (x,), (x,))[1], jax.grad(along)):
            derivative = jax.eval_shape(second, floats)
            assert jax.tree.map(dtype, derivative) == jax.tree.map(dtype, floats)


# ------------------------------------------------------------------------------------------------
# What it costs
# ------------------------------------------------------------------------------------------------


def test_first_derivatives_trace_no_tangents(monkeypatch):
    for name in ("forward_tangents", "backward_tangents"):
        monkeypatch.delattr(tangents, name)
    jaxprs.trace(jax.grad(loss("xla")), draw(np.float32))
    with pytest.raises(AttributeError, match="forward_tangents"):
        jaxprs.trace(forward_over_reverse(loss("xla")), draw(np.float32))


@pytest.mark.parametrize("derivative", cases.default([reverse_over_reverse], DERIVATIVES))
def test_second_order_memory_is_linear(derivative, monkeypatch):
    monkeypatch.setattr(tangents, "ROWS_AT_ONCE", 256)

    def temporary_bytes(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)

        def total(x):
            return (attention(x, x, x, is_causal=True, implementation="xla") ** 2).sum()

        compiled = jax.jit(derivative(total)).lower(x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    size, doubled = (temporary_bytes(length) for length in (1024, 2048))
    assert size < doubled <= 2.1 * size


def test_rows_at_once_count_batch_and_heads():
    """Five queries of each at a time, by the fixture."""
    eqns = jaxprs.trace(forward_over_reverse(loss("xla")), draw(np.float32))
    assert -(-T // 5) in {eqn.params["length"] for eqn in eqns if eqn.primitive.name == "scan"}


def test_hidden_keys_have_no_effect():
    """Also where the last block of queries is filled up: those see nothing."""
    floats = draw(np.float32)
    unseen = jnp.arange(S)[:, None, None] >= T
    poisoned = {name: jnp.where(unseen, jnp.nan, floats[name]) for name in ("key", "value")}
    run = oracle.compiled(forward_over_reverse(loss("xla", is_causal=True)))
    clean, got = run(floats), run(floats | poisoned)
    for name in ("query", "scale"):
        np.testing.assert_array_equal(clean[name], got[name], err_msg=name)
