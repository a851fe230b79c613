"""Attention and its gradients in NumPy and float64, sharing no line with the package."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

# The statistics and gradients that are judged, in the order in which `differentiate` returns them.
NAMES = ("o", "lse", "dq", "dk", "dv")


def visible(shape, *, is_causal=False, local_window_size=None, query_offset=0, segment_ids=None,
            query_seq_lengths=None, key_value_seq_lengths=None, mask=None, **_):  # fmt: skip
    """bool [B, N, T, S]: who sees whom, one comparison a condition."""
    B, _, T, S = shape
    ok = np.ones(shape, bool)
    t = (np.arange(T) + np.broadcast_to(np.asarray(query_offset), (B,))[:, None])[:, None, :, None]
    row, col = np.arange(T)[:, None], np.arange(S)
    if is_causal:
        ok &= col <= t
    if local_window_size is not None:
        window = local_window_size
        left, right = window if isinstance(window, tuple) else (window, window)
        ok &= (left is None) | (col >= t - (left or 0))
        ok &= (right is None) | (col <= t + (right or 0))
    if segment_ids is not None:
        ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        ok &= np.asarray(ids[0])[:, None, :, None] == np.asarray(ids[1])[:, None, None, :]
    if query_seq_lengths is not None:
        ok &= row < np.asarray(query_seq_lengths)[:, None, None, None]
    if key_value_seq_lengths is not None:
        ok &= col < np.asarray(key_value_seq_lengths)[:, None, None, None]
    if mask is not None:
        ok &= np.asarray(mask)
    return ok


@dataclasses.dataclass(frozen=True)
class Truth:
    """What a call should give, and how large its terms were before they cancelled."""

    values: dict[str, np.ndarray]
    terms: dict[str, float]
    # Exact but for delta = rowsum(o * do), which is taken from o in the inputs' dtype, and for dp,
    # whose operands are cut where matrix units cut them.
    from_rounded: dict[str, np.ndarray]


def solve(q, k, v, do, dlse, *, scale=None, bias=None, tf32=False, **conditions) -> Truth:
    """The exact result for [B, T, N, H], [B, S, K, H], [B, S, K, V], [B, T, N, V], [B, T, N]."""
    dtype = q.dtype
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    scale = H**-0.5 if scale is None else float(scale)

    def heads_first(x, copies=1):
        return np.repeat(np.asarray(x, np.float64), copies, axis=2).swapaxes(1, 2)

    def heads_last(x):
        return x.swapaxes(1, 2)

    def group(x):
        return heads_last(x.reshape(B, K, N // K, S, x.shape[-1]).sum(2))

    q, do, dlse = heads_first(q), heads_first(do), heads_first(dlse)
    k, v = heads_first(k, N // K), heads_first(v, N // K)
    ok = visible((B, N, T, S), **conditions)
    raw = q @ k.mT
    s = scale * raw + (0 if bias is None else np.asarray(bias, np.float64))
    s = np.where(ok, s, -np.inf)
    m = s.max(-1, keepdims=True)
    m = np.where(np.isinf(m), 0, m)
    e = np.exp(s - m)
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = heads_last((m + np.log(total))[..., 0])
    o = p @ v

    def delta_of(o):
        return (o * do).sum(-1, keepdims=True) - dlse[..., None]

    def dq_dk(ds):
        return {"dq": heads_last(scale * (ds @ k)), "dk": group(scale * (ds.mT @ q))}

    dp, delta = do @ v.mT, delta_of(o)
    ds = p * (dp - delta)
    values = {
        "o": heads_last(o),
        "lse": lse,
        **dq_dk(ds),
        "dv": group(p.mT @ do),
        "dscale": (ds * raw).sum(),
    }
    if bias is not None:
        shape = (1,) * (4 - np.ndim(bias)) + np.shape(bias)
        axes = tuple(a for a in range(4) if shape[a] == 1)
        values["dbias"] = ds.sum(axis=axes, keepdims=True).reshape(np.shape(bias))
    # ds is a difference: rounding is judged against the size of what is subtracted.
    size = p * (np.abs(dp) + np.abs(delta))
    terms = {
        "o": p @ np.abs(v),
        "lse": np.where(np.isinf(lse), 0, 1 + np.abs(lse)),
        "dq": abs(scale) * (size @ np.abs(k)),
        "dk": abs(scale) * (size.mT @ np.abs(q)),
        "dv": p.mT @ np.abs(do),
        "dscale": (size * np.abs(raw)).sum(),
        "dbias": size.sum(),
    }
    cut_dp = as_tf32(do) @ as_tf32(v).mT if tf32 else dp
    return Truth(
        values,
        {name: float(np.linalg.norm(x)) for name, x in terms.items()},
        dq_dk(p * (cut_dp - delta_of(np.asarray(o.astype(dtype), np.float64)))),
    )


def as_tf32(x):
    """What matrix units read of float32 numbers: the last 13 bits are dropped."""
    bits = np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32).astype(np.float64)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _operand(rounded, x):
    """An operand of a product, `rounded` to what matrix units read."""
    return rounded(x)


_operand.defvjp(lambda rounded, x: (rounded(x), None), lambda rounded, _, dx: (dx,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(rounded, s):
    """The identity on a product, whose cotangent is `rounded`: it is an operand of the next one.

    jax.nn's dense attention rounds ds so, too; automatic differentiation alone would leave it in
    float32.
    """
    return s


_product.defvjp(lambda rounded, s: (s, None), lambda rounded, _, ds: (rounded(ds),))


def dense(q, k, v, *, scale=None, bias=None, tf32=False, **conditions):
    """Dense attention in plain JAX: products of the inputs' dtype or TF32, softmax in float32."""
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def rounded(x):
        if not tf32:
            # XLA keeps what it may in float32, unless it is stopped.
            return jax.lax.optimization_barrier(x.astype(q.dtype)).astype(x.dtype)
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFE000)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def product(equation, a, b):
        a, b = (_operand(rounded, x).astype(q.dtype) for x in (a, b))
        x = jnp.einsum(equation, a, b, preferred_element_type=wide, precision="highest")
        return _product(rounded, x)

    kk, vv = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    s = product("btnh,bsnh->bnts", q, kk) * (H**-0.5 if scale is None else scale)
    if bias is not None:
        s = s + bias
    ok = jnp.asarray(visible((B, N, T, S), **conditions))
    s = jnp.where(ok, s, -jnp.inf)
    m = jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True))
    m = jnp.where(m == -jnp.inf, 0, m)
    e = jnp.where(ok, jnp.exp(s - m), 0)
    total = e.sum(-1, keepdims=True)
    alive = total > 0
    total = jnp.where(alive, total, 1)
    lse = jnp.where(alive, m + jnp.log(total), -jnp.inf)[..., 0].transpose(0, 2, 1)
    return product("bnts,bsnv->btnv", e / total, vv).astype(q.dtype), lse


def differentiate(function, q, k, v, do, dlse):
    """o, lse, dq, dk and dv of `function(q, k, v) -> (o, lse)` for cotangents do and dlse."""
    (o, lse), vjp = jax.vjp(function, q, k, v)
    return o, lse, *vjp((do, dlse))


def compiled(function):
    """jit for tests that run each program once: a GPU's fastest product is not searched for."""
    gpu = jax.default_backend() == "gpu"
    return jax.jit(function, compiler_options={"xla_gpu_autotune_level": 0} if gpu else None)


def optimized(function):
    """jit as it is outside of these tests, see conftest.py."""
    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    if jax.__version_info__ < (0, 11):
        options["xla_cpu_use_fusion_emitters"] = True
    return jax.jit(function, compiler_options=options)


def errors(actual, truth: Truth, name: str) -> dict[str, float]:
    """Relative L2 error, and the largest error relative to the largest value."""
    want = truth.values[name]
    have = np.asarray(actual, np.float64)
    finite = np.isfinite(want)
    assert np.array_equal(have[~finite], want[~finite]), f"{name}: empty rows differ"
    have, want = have[finite], want[finite]
    if not want.size:
        return {"l2": 0.0, "max": 0.0}
    norm, largest = np.linalg.norm(want), np.abs(want).max()
    difference = have - want
    return {
        "l2": float(np.linalg.norm(difference) / norm)
        if norm
        else float(np.linalg.norm(difference)),
        "max": float(np.abs(difference).max() / largest)
        if largest
        else float(np.abs(difference).max()),
    }


def natural(value: float, truth: Truth, name: str) -> float:
    """`value` times how much larger the terms of a result are than what cancellation leaves."""
    norm = np.linalg.norm(truth.values[name][np.isfinite(truth.values[name])])
    return value * (truth.terms[name] / norm if norm else truth.terms[name])


def log2(x: float) -> float:
    return math.log2(x) if x else -math.inf
