"""`attention` is a drop-in for `jax.nn.dot_product_attention`: same arguments, same results.

Both are judged by `exact`, the definition in float64 NumPy: jax.nn must agree with it to half of its digits, which shows
that `exact` reads the arguments as jax.nn does, and ours may be at most twice as wrong as jax.nn. Gradients are those of
random cotangents.

By design one thing differs: a query that may see nothing gives zeros here and the mean of all values there. These rows
of jax.nn are left out (their cotangent is zero), ours are asserted to be zero and to have no influence.
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

from pallas_flash import Tile, TileSizes, _xla, attention

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
        tile_sizes=TileSizes(forward=TILE, dkv=TILE, dq=TILE),
    ),
}

# Compiling is what takes time here.
COMPILE_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles along both axes, the last ones ragged."""
    monkeypatch.setattr(_xla, "BLOCK_Q", 8)
    monkeypatch.setattr(_xla, "BLOCK_KV", 4)


@pytest.fixture(autouse=True)
def ieee_products():
    # TF32 on a GPU would hide in its own error what these tests look for.
    with jax.default_matmul_precision("highest"):
        yield


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


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments: those that are differentiated, other arrays, what is static; the output's cotangent."""

    floats: dict[str, Any]
    arrays: dict[str, Any]
    static: dict[str, Any]
    cotangent: Any


def make(case: Case) -> Call:
    rng = np.random.default_rng(7)
    batch = () if case.batch is None else (case.batch,)
    query = rng.normal(size=(*batch, case.q_len, case.heads, HEAD_DIM))
    key, value = rng.normal(size=(2, *batch, case.kv_len, case.kv_heads, HEAD_DIM))
    cotangent = rng.normal(size=query.shape)
    options = case.options(rng)
    floats = {"query": query, "key": key, "value": value}
    floats = {name: jnp.asarray(x, case.dtype) for name, x in floats.items()}
    floats |= {name: options.pop(name) for name in ("bias", "scale") if _is_array(options, name)}
    arrays = {name: options.pop(name) for name in list(options) if _is_array(options, name)}
    return Call(floats, arrays, options, jnp.asarray(cotangent, case.dtype))


def _is_array(options, name) -> bool:
    return isinstance(options.get(name), jax.Array)


def lengths(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def normal(rng, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def some(rng, *shape: int) -> jax.Array:
    return jnp.asarray(rng.random(shape) < 0.7)


def run(fn: Callable, call: Call, cotangent=None):
    """The output and the gradients by name."""

    @functools.partial(jax.jit, compiler_options=COMPILE_FAST)
    def output_and_gradients(floats, arrays, cotangent):
        out, pull = jax.vjp(lambda floats: fn(**floats, **arrays, **call.static), floats)
        [gradients] = pull(cotangent)
        return {"output": out, **gradients}

    cotangent = call.cotangent if cotangent is None else cotangent
    return output_and_gradients(call.floats, call.arrays, cotangent)


def visible(call: Call) -> np.ndarray:
    """bool [B, N, T, S]."""
    options = call.arrays | call.static
    query, key = (call.floats[name] for name in ("query", "key"))
    (*batch, q_len, heads, _), kv_len = query.shape, key.shape[-3]
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)
    seen = np.ones((*(batch or [1]), heads, q_len, kv_len), bool)
    if options.get("is_causal"):
        seen &= j <= i
    if (window := options.get("local_window_size")) is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        seen &= (i - left <= j) & (j <= i + right)
    for name, position in (("query_seq_lengths", i), ("key_value_seq_lengths", j)):
        if (length := options.get(name)) is not None:
            seen &= position < np.asarray(length)[:, None, None, None]
    if (mask := options.get("mask")) is not None:
        seen &= np.asarray(mask)
    return seen


class Exact(NamedTuple):
    """A result in float64, and the size of the terms that were summed where they may cancel."""

    value: np.ndarray
    size: np.ndarray | None = None

    def error(self, x) -> float:
        """That of finite numbers, in the Euclidean norm; relative unless the exact result is zero."""
        x = np.asarray(x, np.float64)
        assert np.isfinite(x).all()
        size = self.value if self.size is None else self.size
        return np.linalg.norm(x - self.value) / (np.linalg.norm(size) or 1.0)


def exact(call: Call) -> dict[str, Exact]:
    """Output, LSE and gradients from the equations."""
    floats = {name: np.asarray(x, np.float64) for name, x in call.floats.items()}
    do = np.asarray(call.cotangent, np.float64)
    scale = floats.get("scale", call.static.get("scale"))
    scale = HEAD_DIM**-0.5 if scale is None else scale
    q, k, v = floats["query"], floats["key"], floats["value"]
    if q.ndim == 3:
        q, k, v, do = q[None], k[None], v[None], do[None]
    groups = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))

    raw = np.einsum("btnh,bsnh->bnts", q, k)
    s = np.where(visible(call), scale * raw + floats.get("bias", 0), -np.inf)
    m = s.max(axis=-1, keepdims=True)
    weight = np.exp(s - np.where(m == -np.inf, 0, m))
    total = weight.sum(axis=-1, keepdims=True)
    p = weight / np.where(total == 0, 1, total)
    o = np.einsum("bnts,bsnh->btnh", p, v)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(total))[..., 0]
    dp = np.einsum("btnh,bsnh->bnts", do, v)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))

    def per_kv_head(x):
        return x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(axis=3)

    results = {
        "output": o,
        "lse": np.moveaxis(lse, 1, 2),
        "query": scale * np.einsum("bnts,bsnh->btnh", ds, k),
        "key": per_kv_head(scale * np.einsum("bnts,btnh->bsnh", ds, q)),
        "value": per_kv_head(np.einsum("bnts,btnh->bsnh", p, do)),
    }
    if call.floats["query"].ndim == 3:
        results = {name: x[0] for name, x in results.items()}
    results = {name: Exact(x) for name, x in results.items()}
    # The sum of ds over all keys is zero, so these are differences of larger numbers.
    if "bias" in floats:
        shape = floats["bias"].shape
        results["bias"] = Exact(sum_to(ds, shape), sum_to(np.abs(ds), shape))
    if "scale" in floats:
        results["scale"] = Exact((raw * ds).sum(), np.abs(raw * ds).sum())
    return results


def sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The transpose of broadcasting `shape` to that of x."""
    padded = (1,) * (x.ndim - len(shape)) + shape
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1)
    return x.sum(axis=axes).reshape(shape)


def dead_rows(call: Call) -> np.ndarray:
    """Queries that see nothing, bool [B, T, N] or [T, N]."""
    dead = np.moveaxis(~visible(call).any(axis=-1), 1, 2)
    return dead if call.floats["query"].ndim == 4 else dead[0]


def assert_drop_in(case: Case, implementations=("xla", "reference")):
    call = make(case)
    want, dead = exact(call), dead_rows(call)
    yardstick = run(theirs, call, jnp.where(dead[..., None], 0, call.cotangent))
    yardstick["output"] = jnp.where(dead[..., None], 0, yardstick["output"])
    for implementation in implementations:
        got = run(OURS[implementation], call)
        assert got.keys() == yardstick.keys()
        for name, x in got.items():
            y = yardstick[name]
            assert (x.shape, x.dtype) == (y.shape, y.dtype), name
            eps = float(jnp.finfo(y.dtype).eps)
            their_error, our_error = want[name].error(y), want[name].error(x)
            assert their_error < eps**0.5, name
            # Where jax.nn is exact, ours may still round twice.
            assert our_error <= 2 * max(their_error, eps), (implementation, name)
        assert not np.asarray(got["output"])[dead].any(), implementation
        assert not np.asarray(got["query"])[dead].any(), implementation


CASES = {
    "defaults": Case(),
    "T < S": Case(q_len=11),
    "one query": Case(q_len=1),
    "one key": Case(kv_len=1),
    "as many heads of keys as of queries": Case(kv_heads=HEADS),
    "one head of keys": Case(kv_heads=1),
    "one head": Case(heads=1, kv_heads=1),
    "no batch axis": Case(batch=None),
    "scale": Case(lambda rng: {"scale": 0.3}),
    "negative scale": Case(lambda rng: {"scale": -0.7}),
    "scale 0": Case(lambda rng: {"scale": 0}),
    "traced scale": Case(lambda rng: {"scale": jnp.float32(-0.4), "is_causal": True}),
    "causal, T > S": Case(lambda rng: {"is_causal": True}),
    "causal, T = S": Case(lambda rng: {"is_causal": True}, kv_len=Q_LEN),
    "causal, T < S": Case(lambda rng: {"is_causal": True}, q_len=11),
    "window, rows past the last key see nothing": Case(lambda rng: {"local_window_size": 1}),
    "window, T < S": Case(lambda rng: {"local_window_size": (2, 3)}, q_len=11),
    "window to the left": Case(lambda rng: {"local_window_size": (6, 0)}),
    "window to the right": Case(lambda rng: {"local_window_size": (0, 6)}),
    "window of one position": Case(lambda rng: {"local_window_size": (0, 0)}),
    "window beyond both ends": Case(lambda rng: {"local_window_size": (100, 100)}),
    "causal window, T > S": Case(lambda rng: {"is_causal": True, "local_window_size": 3}),
    "causal window, T < S": Case(
        lambda rng: {"is_causal": True, "local_window_size": (9, 2)}, q_len=11
    ),
    "query lengths": Case(lambda rng: {"query_seq_lengths": lengths(21, 1, 0, 13)}),
    "key lengths": Case(lambda rng: {"key_value_seq_lengths": lengths(0, 18, 1, 9)}),
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
    "float16": Case(dtype=jnp.float16),
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


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients(name):
    assert_drop_in(CASES[name])


@pytest.mark.parametrize(
    "name",
    [
        "T < S",
        "traced scale",
        "causal window, T > S",
        "lengths of both, causal",
        "no batch axis, lengths",
        "bfloat16",
    ],
)
def test_output_and_gradients_of_the_kernels(name):
    assert_drop_in(CASES[name], ["interpret"])


def broadcast_patterns() -> list[tuple[int, ...]]:
    """All shapes of rank 2 to 4 with axes that are whole or 1."""
    scores = (BATCH, HEADS, Q_LEN, KV_LEN)
    return [
        shape
        for rank in (2, 3, 4)
        for shape in itertools.product(*((size, 1) for size in scores[-rank:]))
    ]


PATTERNS = broadcast_patterns()


@pytest.mark.parametrize("i", range(len(PATTERNS)), ids=lambda i: "x".join(map(str, PATTERNS[i])))
def test_bias_and_mask_broadcast(i):
    """Each pattern once for the bias, and once for the mask."""
    mask_shape = PATTERNS[(i + 9) % len(PATTERNS)]

    def options(rng):
        mask = some(rng, *mask_shape)
        # A mask of one element would hide everything or nothing.
        mask = mask if mask.size > 1 else jnp.ones_like(mask)
        return {"bias": normal(rng, *PATTERNS[i]), "mask": mask}

    assert_drop_in(Case(options))
