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
    # Exact but for delta = rowsum(o * do), which is taken from o in the inputs' dtype.
    from_rounded_o: dict[str, np.ndarray]


def solve(q, k, v, do, dlse, *, scale=None, bias=None, **conditions) -> Truth:
    """The exact result for [B, T, N, H], [B, S, K, H], [B, S, K, V], [B, T, N, V], [B, T, N]."""
    dtype = q.dtype
    q, k, v, do, dlse = (np.asarray(x, np.float64) for x in (q, k, v, do, dlse))
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    kk, vv = (np.repeat(x, N // K, axis=2) for x in (k, v))
    scale = H**-0.5 if scale is None else float(scale)
    ok = visible((B, N, T, S), **conditions)
    raw = np.einsum("btnh,bsnh->bnts", q, kk)
    s = scale * raw + (0 if bias is None else np.asarray(bias, np.float64))
    s = np.where(ok, s, -np.inf)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isinf(m), 0, m))
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isinf(m), 0, m) + np.log(total))[..., 0].transpose(0, 2, 1)
    o = np.einsum("bnts,bsnv->btnv", p, vv)
    dp = np.einsum("btnv,bsnv->bnts", do, vv)

    def delta_of(o):
        return (np.einsum("btnv,btnv->btn", o, do) - dlse).transpose(0, 2, 1)[..., None]

    def group(x):
        return x.reshape(B, S, K, N // K, x.shape[-1]).sum(3)

    def dq_dk(ds):
        return {
            "dq": scale * np.einsum("bnts,bsnh->btnh", ds, kk),
            "dk": group(scale * np.einsum("bnts,btnh->bsnh", ds, q)),
        }

    delta = delta_of(o)
    ds = p * (dp - delta)
    values = {
        "o": o,
        "lse": lse,
        **dq_dk(ds),
        "dv": group(np.einsum("bnts,btnv->bsnv", p, do)),
        "dscale": (ds * raw).sum(),
    }
    if bias is not None:
        shape = (1,) * (4 - np.ndim(bias)) + np.shape(bias)
        axes = tuple(a for a in range(4) if shape[a] == 1)
        values["dbias"] = ds.sum(axis=axes, keepdims=True).reshape(np.shape(bias))
    # ds is a difference: rounding is judged against the size of what is subtracted.
    size = p * (np.abs(dp) + np.abs(delta))
    terms = {
        "o": np.einsum("bnts,bsnv->btnv", p, np.abs(vv)),
        "lse": np.where(np.isinf(lse), 0, 1 + np.abs(lse)),
        "dq": abs(scale) * np.einsum("bnts,bsnh->btnh", size, np.abs(kk)),
        "dk": abs(scale) * np.einsum("bnts,btnh->bsnh", size, np.abs(q)),
        "dv": np.einsum("bnts,btnv->bsnv", p, np.abs(do)),
        "dscale": (size * np.abs(raw)).sum(),
        "dbias": size.sum(),
    }
    rounded = np.asarray(o.astype(dtype), np.float64)
    return Truth(
        values,
        {name: float(np.linalg.norm(x)) for name, x in terms.items()},
        dq_dk(p * (dp - delta_of(rounded))),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dtype, s):
    """The identity, whose cotangent is rounded to the dtype of the product's operands.

    Matrix units multiply 16-bit numbers, so ds is rounded before it meets q and k, as it is by
    jax.nn's dense attention; automatic differentiation alone would leave it in float32.
    """
    return s


_product.defvjp(
    lambda dtype, s: (s, None), lambda dtype, _, ds: (ds.astype(dtype).astype(ds.dtype),)
)


def dense(q, k, v, *, scale=None, bias=None, **conditions):
    """Dense attention in plain JAX: products of the inputs' dtype, softmax in float32."""
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    kk, vv = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    s = _product(q.dtype, jnp.einsum("btnh,bsnh->bnts", q, kk, preferred_element_type=wide))
    s = s * (H**-0.5 if scale is None else scale)
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
    p = (e / total).astype(v.dtype)
    return jnp.einsum("bnts,bsnv->btnv", p, vv, preferred_element_type=wide).astype(q.dtype), lse


def differentiate(function, q, k, v, do, dlse):
    """o, lse, dq, dk and dv of `function(q, k, v) -> (o, lse)` for cotangents do and dlse."""
    (o, lse), vjp = jax.vjp(function, q, k, v)
    return o, lse, *vjp((do, dlse))


# Interpreted kernels run for milliseconds and compile for seconds: LLVM's optimizations are not
# worth their time here.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def compiled(function):
    """jit for tests that run each program once, on a CPU."""
    return jax.jit(function, compiler_options=QUICK if jax.default_backend() == "cpu" else None)


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
