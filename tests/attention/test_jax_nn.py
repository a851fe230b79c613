"""`attention` is a drop-in for `jax.nn.dot_product_attention`: same arguments, same results.

Both are judged by the equations in float64 NumPy. jax.nn must agree with these to half of its
digits, which shows that they read the arguments as jax.nn does, and ours may be at most twice as
wrong as jax.nn. Gradients are those of random cotangents.

By design one thing differs: a query that may see nothing gives zeros here and the mean of all
values there. These rows of jax.nn are left out (their cotangent is zero), ours are asserted to be
zero and to have no influence.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle

from pallas_flash import attention
from pallas_flash._backends import xla
from pallas_flash.tuning import Tile, TileSizes

# No two of B, T, S, N, K, N / K and H agree, so a swapped axis cannot pass unseen.
BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, HEAD_DIM = 4, 21, 18, 6, 2, 5

theirs = functools.partial(jax.nn.dot_product_attention, implementation="xla")
TILE = Tile(16, 16)
OURS = {
    "xla": functools.partial(attention, implementation="xla"),
    "reference": functools.partial(attention, implementation="reference"),
    "interpret": functools.partial(
        attention,
        implementation="interpret",
        config=TileSizes(forward=TILE, dkv=TILE, dq=TILE),
    ),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles along both axes, the last ones ragged."""
    monkeypatch.setattr(xla, "BLOCK_Q", 8)
    monkeypatch.setattr(xla, "BLOCK_KV", 4)


pytestmark = pytest.mark.usefixtures("ieee_products")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of either function; `options` makes its keyword arguments from a random generator."""

    options: Callable[[np.random.Generator], dict[str, Any]] = lambda rng: {}
    q_len: int = Q_LEN
    kv_len: int = KV_LEN
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    batch: int | None = BATCH
    dtype: Any = jnp.float32


class Call(NamedTuple):
    """A call of both functions.

    Attributes:
        floats: differentiated arrays.
        arrays: other arrays.
        static: the other arguments.
        cotangent: that of the output.
    """

    floats: dict[str, Any]
    arrays: dict[str, Any]
    static: dict[str, Any]
    cotangent: jax.Array

    @property
    def conditions(self) -> dict[str, Any]:
        """Everything but query, key and value."""
        named = self.floats | self.arrays | self.static
        return {name: x for name, x in named.items() if name not in ("query", "key", "value")}


def make(case: Case) -> Call:
    rng = np.random.default_rng(7)
    batch = () if case.batch is None else (case.batch,)
    query = rng.normal(size=(*batch, case.q_len, case.heads, HEAD_DIM))
    key, value = rng.normal(size=(2, *batch, case.kv_len, case.kv_heads, HEAD_DIM))
    cotangent, options = rng.normal(size=query.shape), case.options(rng)
    floats = {"query": query, "key": key, "value": value}
    floats = {name: jnp.asarray(x, case.dtype) for name, x in floats.items()}
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in options.items() if name not in arrays}
    floats |= {name: arrays.pop(name) for name in ("bias", "scale") if name in arrays}
    return Call(floats, arrays, static, jnp.asarray(cotangent, case.dtype))


def lengths(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def normal(rng, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def some(rng, *shape: int) -> jax.Array:
    return jnp.asarray(rng.random(shape) < 0.7)


def run(fn: Callable, call: Call, cotangent, compiled=oracle.compiled):
    """The output and the gradients by name."""

    def output_and_gradients(floats, arrays, cotangent):
        out, pull = jax.vjp(lambda floats: fn(**floats, **arrays, **call.static), floats)
        [gradients] = pull(cotangent)
        return {"output": out, **gradients}

    return compiled(output_and_gradients)(call.floats, call.arrays, cotangent)


def run_theirs(case: Case, call: Call, dead, **options):
    """jax.nn without the rows that see nothing."""
    # In float16 it asks for a product that CPUs lack and, not compiled, falls back by itself.
    eager = case.dtype == jnp.float16 and jax.default_backend() == "cpu"
    fn = functools.partial(theirs, **options)
    cotangent = jnp.where(dead[..., None], 0, call.cotangent)
    results = run(fn, call, cotangent, (lambda f: f) if eager else oracle.compiled)
    return results | {"output": jnp.where(dead[..., None], 0, results["output"])}


ORACLE_NAMES = {"output": "o", "query": "dq", "key": "dk", "value": "dv"}


def solve(call: Call) -> oracle.Truth:
    arrays = (*(call.floats[name] for name in ("query", "key", "value")), call.cotangent)
    q, k, v, do = (x[None] if x.ndim == 3 else x for x in arrays)
    return oracle.solve(q, k, v, do, np.zeros(q.shape[:3]), **call.conditions)


def dead_rows(call: Call) -> np.ndarray:
    """Queries that see nothing, bool [B, T, N] or [T, N]."""
    rows, kv_len = call.floats["query"].shape[:-1], call.floats["key"].shape[-3]
    batch, (q_len, heads) = rows[:-2] or (1,), rows[-2:]
    visible = oracle.visible((*batch, heads, q_len, kv_len), **call.conditions)
    return np.moveaxis(~visible.any(axis=-1), 1, 2).reshape(rows)


def error(x, truth: oracle.Truth, name: str) -> float:
    """Relative, in the Euclidean norm, of finite numbers."""
    want, terms = truth.values[name], truth.terms[name]
    x = np.asarray(x, np.float64).reshape(want.shape)
    assert np.isfinite(x).all()
    size = np.linalg.norm(want)
    # ds sums to zero over the keys. A sum of all ds can be no more exact than its terms.
    if name == "dscale" or size < 1e-9 * terms:
        size = terms
    return np.linalg.norm(x - want) / (size or 1.0)


def assert_drop_in(case: Case, implementation):
    call = make(case)
    truth, dead = solve(call), dead_rows(call)
    yardstick = run_theirs(case, call, dead)
    scores = dead.size * call.floats["key"].shape[-3]
    # Our backward takes p = exp(s - lse) from a float32 LSE, see test_accuracy (measured: 2.05
    # times the error of jax.nn, in dk).
    lse = np.abs(truth.values["lse"])
    largest = lse.max(where=np.isfinite(lse), initial=0)
    of_lse = jnp.finfo(jnp.float32).eps / 2 * (1 + largest + np.log(call.floats["key"].shape[-3]))
    got = run(OURS[implementation], call, call.cotangent)
    assert got.keys() == yardstick.keys()
    for name, x in got.items():
        y, oracle_name = yardstick[name], ORACLE_NAMES.get(name, f"d{name}")
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        eps = float(max(jnp.finfo(y.dtype).eps, jnp.finfo(case.dtype).eps))
        their_error, our_error = (error(z, truth, oracle_name) for z in (y, x))
        assert their_error < eps**0.5, name
        # Where jax.nn is exact, ours may still round twice, in each of the terms of a sum.
        terms = scores / x.size if name == "bias" else 1
        floor = max(eps * terms**0.5, 0 if name == "output" else of_lse)
        assert our_error <= 2 * max(their_error, floor), (implementation, name)
    assert not np.asarray(got["output"])[dead].any(), implementation
    assert not np.asarray(got["query"])[dead].any(), implementation


CASES = {
    "defaults": Case(),
    "T < S": Case(q_len=11),
    "traced scale": Case(lambda rng: {"scale": jnp.float32(-0.4), "is_causal": True}),
    "causal, T > S": Case(lambda rng: {"is_causal": True}),
    "causal, T < S": Case(lambda rng: {"is_causal": True}, q_len=11),
    "window, rows past the last key see nothing": Case(lambda rng: {"local_window_size": 1}),
    "window, T < S": Case(lambda rng: {"local_window_size": (2, 3)}, q_len=11),
    "window of one position": Case(lambda rng: {"local_window_size": (0, 0)}),
    "causal window, T > S": Case(lambda rng: {"is_causal": True, "local_window_size": 3}),
    "lengths of both, causal": Case(
        lambda rng: {
            "query_seq_lengths": lengths(21, 3, 8, 21),
            "key_value_seq_lengths": lengths(5, 12, 16, 0),
            "is_causal": True,
        }
    ),
    "no batch axis, lengths": Case(
        lambda rng: {"query_seq_lengths": lengths(17), "key_value_seq_lengths": lengths(9)},
        batch=None,
    ),
    "mask with rows that see nothing": Case(
        lambda rng: {"mask": jnp.asarray(rng.random((BATCH, 1, Q_LEN, KV_LEN)) < 0.08)}
    ),
    "no batch axis, bias and mask of one head": Case(
        lambda rng: {"bias": normal(rng, Q_LEN, 1), "mask": some(rng, 1, Q_LEN, KV_LEN)},
        batch=None,
    ),
    "bfloat16": Case(dtype=jnp.bfloat16),
    "bfloat16 with float32 bias": Case(
        lambda rng: {"bias": normal(rng, HEADS, Q_LEN, KV_LEN)}, dtype=jnp.bfloat16
    ),
    "float32 with float16 bias": Case(
        lambda rng: {"bias": normal(rng, HEADS, 1, KV_LEN, dtype=jnp.float16)}
    ),
}


def everything(dtype) -> Case:
    return Case(
        lambda rng: {
            "bias": normal(rng, BATCH, HEADS, Q_LEN, KV_LEN, dtype=dtype),
            "mask": some(rng, BATCH, HEADS, Q_LEN, KV_LEN),
            "scale": 0.4,
            "is_causal": True,
            "query_seq_lengths": lengths(21, 2, 15, 0),
            "key_value_seq_lengths": lengths(11, 18, 0, 7),
            "local_window_size": (9, 1),
        },
        dtype=dtype,
    )


CASES |= {
    f"everything in {dtype.dtype.name}": everything(dtype)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32)
}


# One for each argument and dtype; then those that have one more of what the first ones have.
CHOSEN = [
    "T < S",
    "traced scale",
    "causal window, T > S",
    "no batch axis, lengths",
    "mask with rows that see nothing",
    "bfloat16 with float32 bias",
    "everything in float32",
    "lengths of both, causal",
    "bfloat16",
    "no batch axis, bias and mask of one head",
]


WAYS = [(implementation, name) for implementation in ("xla", "reference") for name in CASES]
WAYS += [("interpret", name) for name in CHOSEN]
# Arguments are read before an implementation is called, so one of them stands for the others.
BY_DEFAULT = [("xla", name) for name in CHOSEN[:7]]
BY_DEFAULT += [("reference", "everything in float32"), ("interpret", CHOSEN[0])]


@pytest.mark.parametrize(("implementation", "name"), cases.default(BY_DEFAULT, WAYS))
def test_results_equal_jax_nn(implementation, name):
    assert_drop_in(CASES[name], implementation)


# All shapes of rank 2 to 4 with axes that are whole or 1.
PATTERNS = [
    shape
    for rank in (2, 3, 4)
    for shape in itertools.product(*((size, 1) for size in (BATCH, HEADS, Q_LEN, KV_LEN)[-rank:]))
]


@pytest.mark.parametrize(
    "i",
    cases.default(range(0, len(PATTERNS), 14), range(len(PATTERNS))),
    ids=lambda i: "x".join(map(str, PATTERNS[i])),
)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_bias_and_mask_broadcast(i, implementation):
    """Each pattern once for the bias, and once for the mask."""
    mask_shape = PATTERNS[(i + 9) % len(PATTERNS)]

    def options(rng):
        mask = some(rng, *mask_shape)
        # A single False would hide everything.
        mask = mask if mask.size > 1 else jnp.ones_like(mask)
        return {"bias": normal(rng, *PATTERNS[i]), "mask": mask}

    assert_drop_in(Case(options), implementation)


def test_positional_arguments_and_numpy_inputs():
    call = make(everything(jnp.float32))
    numpy = jax.tree.map(np.asarray, call.floats | call.arrays)
    names = ("query", "key", "value", "bias", "mask")
    positional = [numpy.pop(name) for name in names]
    want = run(theirs, call, call.cotangent)["output"]
    dead = dead_rows(call)
    got = OURS["xla"](*positional, **numpy, **call.static)
    assert isinstance(got, jax.Array)
    tolerance = float(jnp.finfo(jnp.float32).eps) ** 0.5
    np.testing.assert_allclose(got[~dead], want[~dead], tolerance, tolerance)
    np.testing.assert_array_equal(got[dead], 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", OURS)
def test_residual_equals_jax_nn(implementation, dtype):
    """return_residual: the LSE, in the dtype of key, without a gradient."""
    case = Case(CASES["lengths of both, causal"].options, dtype=dtype)
    call = make(case)
    truth, dead = solve(call), dead_rows(call)

    def evaluate(fn):
        @oracle.compiled
        def both(floats, arrays, cotangents):
            def pair(floats):
                return fn(**floats, **arrays, **call.static, return_residual=True)

            (out, residual), pull = jax.vjp(pair, floats)
            [gradients] = pull(cotangents)
            return out, residual, gradients

        # The output's cotangent is zero, so any gradient is one of the residual.
        no = jnp.zeros_like(call.cotangent)
        return both(call.floats, call.arrays, (no, call.cotangent[..., 0]))

    (_, theirs_, _), (out, ours, gradients) = evaluate(theirs), evaluate(OURS[implementation])
    assert out.shape == call.floats["query"].shape
    assert (ours.shape, ours.dtype) == (theirs_.shape, theirs_.dtype) == (dead.shape, dtype)
    np.testing.assert_array_equal(np.asarray(ours)[dead], -np.inf)
    want = truth.values["lse"][~dead]
    their_error, our_error = (
        np.linalg.norm(np.asarray(x, np.float64)[~dead] - want) / np.linalg.norm(want)
        for x in (theirs_, ours)
    )
    eps = float(jnp.finfo(dtype).eps)
    assert their_error < eps**0.5
    assert our_error <= 2 * max(their_error, eps)
    assert not any(np.any(x) for x in jax.tree.leaves(gradients))


def test_residual_without_a_batch_axis():
    call = make(CASES["no batch axis, lengths"])

    def run(fn):
        pair = functools.partial(fn, return_residual=True, **call.static)
        return jax.eval_shape(lambda arrays: pair(**arrays), call.floats | call.arrays)

    want = run(theirs)
    assert [x.shape for x in want] == [(Q_LEN, HEADS, HEAD_DIM), (Q_LEN, HEADS)]
    for fn in OURS.values():
        assert [(x.shape, x.dtype) for x in run(fn)] == [(x.shape, x.dtype) for x in want]
