"""Attention and its gradients in NumPy and float64, sharing no line with the package."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

# The statistics and gradients that are judged, in the order in which `differentiate` returns them;
# `names` has those of a call.
NAMES = ("o", "lse", "dq", "dk", "dv")

# Further arguments that are differentiated where a call has them.
OPERANDS = ("bias", "sinks")


def names(options) -> tuple[str, ...]:
    """Return the names of the results of `differentiate` for a call with these options."""
    return NAMES + tuple(f"d{name}" for name in OPERANDS if name in options)


def split(options) -> tuple[dict, dict]:
    """The options that are differentiated, and the others."""
    operands = {name: x for name, x in options.items() if name in OPERANDS}
    return operands, {name: x for name, x in options.items() if name not in OPERANDS}


def visible(shape, *, is_causal=False, local_window_size=None, segment_ids=None,
            query_seq_lengths=None, key_value_seq_lengths=None, mask=None, **others):  # fmt: skip
    """bool [B, N, T, S]: who sees whom, one comparison a condition."""
    B, _, T, S = shape
    ok = np.ones(shape, bool)
    t, s = positions(B, T, S, **others)
    row, col = np.arange(T)[:, None], np.arange(S)
    if is_causal:
        ok &= s <= t
    if local_window_size is not None:
        window = local_window_size
        left, right = window if isinstance(window, tuple) else (window, window)
        ok &= (left is None) | (s >= t - (left or 0))
        ok &= (right is None) | (s <= t + (right or 0))
    if segment_ids is not None:
        ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        ok &= np.asarray(ids[0])[:, None, :, None] == np.asarray(ids[1])[:, None, None, :]
    if query_seq_lengths is not None:
        ok &= row < np.asarray(query_seq_lengths)[:, None, None, None]
    if key_value_seq_lengths is not None:
        ok &= col < np.asarray(key_value_seq_lengths)[:, None, None, None]
    if mask is not None:
        ok &= _seen_by(mask, shape, t, s)
    return ok


def positions(B, T, S, *, query_offset=0, query_positions=None, key_value_positions=None, **_):
    """Return the positions of queries [B, 1, T, 1] and of keys [B, 1, 1, S]."""
    t = np.arange(T) + np.broadcast_to(np.asarray(query_offset), (B,))[:, None]
    t = t if query_positions is None else query_positions
    s = np.arange(S) if key_value_positions is None else key_value_positions
    t, s = np.broadcast_to(t, (B, T)), np.broadcast_to(s, (B, S))
    return t[:, None, :, None], s[:, None, None, :]


def _seen_by(mask, shape, t, s):
    """Return the visible pairs of a mask array or a mask object, at positions `t` and `s`."""
    b, h, q, k = np.ogrid[tuple(map(slice, shape))]
    match type(mask).__name__:
        case "AllOf":
            return functools.reduce(np.logical_and, (_seen_by(x, shape, t, s) for x in mask.parts))
        case "PrefixLM":
            return (s <= t) | (s < np.asarray(mask.prefix_lengths)[:, None, None, None])
        case "Segments":
            query = np.asarray(mask.query)
            key_value = query if mask.key_value is None else np.asarray(mask.key_value)
            return query[:, None, :, None] == key_value[:, None, None, :]
        case "AnyOf":
            return functools.reduce(np.logical_or, (_seen_by(x, shape, t, s) for x in mask.parts))
        case "Not":
            return ~_seen_by(mask.parts[0], shape, t, s)
        case "Chunked" | "BlockCausal" | "Dilated" | "SharedPrefix" | "Tree" | "Neighborhood":
            return _seen_by_name(mask, t, s)
        case "Predicate":
            return mask.fn(b, h, q, k, *map(Clamped, mask.operands))
        case "BlockMask" if mask.mask is not None:
            return _seen_by(mask.mask, shape, t, s)
        case "BlockMask":
            rows, columns = q[0, 0, :, 0] // mask.block_q, k[0, 0, 0] // mask.block_kv
            return np.asarray(mask.some)[:, :, rows][..., columns]
        case _:
            return np.asarray(mask)


def _seen_by_name(mask, t, s):
    """Return the visible pairs of a mask that has a name in the literature."""
    match type(mask).__name__:
        case "Chunked":
            return s // mask.size == t // mask.size
        case "BlockCausal":
            return s // mask.size <= t // mask.size
        case "Dilated":
            return (s - t) % mask.stride == 0
        case "SharedPrefix":
            query = np.asarray(mask.query)
            key_value = query if mask.key_value is None else np.asarray(mask.key_value)
            query, key_value = query[:, None, :, None], key_value[:, None, None, :]
            return (key_value == 0) | (key_value == query)
        case "Tree":
            return _seen_in_tree(np.asarray(mask.parents), s - t[:, :, :1])
        case "Neighborhood":
            return _seen_on_grid(mask.grid, mask.window, *np.broadcast_arrays(t, s))


def _seen_in_tree(parents, token):
    """Return the visible pairs of a tree; `token` [B, 1, 1, S] is the number of each key in it."""
    B, T = parents.shape
    ok = np.zeros((B, 1, T, token.shape[-1]), bool)
    for b, i in np.ndindex(B, T):
        ok[b, 0, i], at = token[b, 0, 0] < 0, i
        while at >= 0:
            ok[b, 0, i] |= token[b, 0, 0] == at
            at = parents[b, at]
    return ok


def _seen_on_grid(grid, window, t, s):
    """Return the visible pairs of a grid, axis by axis, of the points `t` and `s`."""
    ok = True
    for i, j, n, size in zip(
        np.unravel_index(t, grid), np.unravel_index(s, grid), grid, window, strict=True
    ):
        first = np.clip(i - size // 2, 0, n - size)
        ok = ok & (first <= j) & (j < first + size)
    return ok


class Clamped:
    """An operand of a user's function: an index outside is moved to the edge."""

    def __init__(self, array):
        self._array = array if isinstance(array, jax.core.Tracer) else np.asarray(array)

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        inside = (np.clip(i, 0, n - 1) for i, n in zip(index, self._array.shape, strict=True))
        return self._array[tuple(inside)]


@dataclasses.dataclass(frozen=True)
class ExactScoreMod:
    """A `score_mod` for `attention`, and the same in NumPy with its derivative found by hand."""

    traced: Callable
    exact: Callable
    slope: Callable

    def __call__(self, *arguments):
        return self.traced(*arguments)


def parts_of(score_mod):
    """Return the function and the operands of what `attention` takes as `score_mod`."""
    return getattr(score_mod, "fn", score_mod), getattr(score_mod, "operands", ())


def kept(key, shape, rate, broadcast=False):
    """bool [B, N, T, S]: the probabilities that dropout keeps."""
    return random_bits(key, shape, broadcast) >= dropped_of_65536(rate)


def dropped_of_65536(rate):
    """How many of the numbers of 16 bits drop: some, and not all."""
    return min(max(round(rate * 65536), 1), 65535)


def share_kept(rate):
    """Return the divisor of kept probabilities."""
    return 1 - dropped_of_65536(rate) / 65536


def random_bits(key, shape, broadcast=False):
    """Return the bits of dropout, 16 for each of [B, N, T, S]."""
    with jax.ensure_compile_time_eval():
        seed = np.asarray(jax.random.bits(key, (2,), jnp.uint32))
    b, h, q, k = np.ogrid[tuple(map(slice, shape))]
    if broadcast:
        b, h = 0 * b, 0 * h
    # The halves of every 16 queries and 16 keys share counters; an even key and the next share a
    # word of these.
    counter = h, q // 16 * 16 + q % 8, b, k // 16 * 16 + k % 8 // 2 * 2
    words = np.stack(np.broadcast_arrays(*philox_4x32_7(counter, seed)))
    word = 2 * (q // 8 % 2) + k // 8 % 2
    word = np.take_along_axis(words, np.broadcast_to(word, words.shape[1:])[None], axis=0)[0]
    return np.broadcast_to(np.where(k % 2 == 0, word % 65536, word // 65536), shape)


def philox_4x32_7(counter, key):
    """Salmon et al. (2011), figure 2 and section 4.3, in integers of 64 bits."""
    word = np.uint64(0xFFFFFFFF)
    x0, x1, x2, x3 = (np.asarray(x, np.uint64) for x in counter)
    key0, key1 = (np.asarray(x, np.uint64) for x in key)
    for _ in range(7):
        product0, product1 = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0 = (product1 >> np.uint64(32)) ^ x1 ^ key0
        x2 = (product0 >> np.uint64(32)) ^ x3 ^ key1
        x1, x3 = product1 & word, product0 & word
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & word, (key1 + np.uint64(0xBB67AE85)) & word
    return x0, x1, x2, x3


@dataclasses.dataclass(frozen=True)
class Truth:
    """The right results of a call, and how large their terms were before they cancelled."""

    values: dict[str, np.ndarray]
    terms: dict[str, float]
    # Exact but for delta = rowsum(o * do), which is taken from o in the inputs' dtype, and for dp,
    # whose operands are cut where matrix units cut them.
    from_rounded: dict[str, np.ndarray]
    # Expected effect of rounding p, ds and delta's o, over the rounding: how large a result becomes
    # if each has an independent error of its own size.
    of_rounding: dict[str, np.ndarray]


def scores_of(products, held, shape, *, bias, alibi_slopes, score_mod, logits_soft_cap, conditions):
    """The scores of scaled products [B, N, T, S], and their derivative in the products."""
    B, N, T, S = shape
    s, slope = held(products), 1.0
    if bias is not None:
        s = held(s + np.asarray(bias, np.float64))
    if alibi_slopes is not None:
        distance = np.abs(np.subtract(*positions(B, T, S, **conditions)))
        s = held(s - np.asarray(alibi_slopes, np.float64)[:, None, None] * distance)
    if score_mod is not None:
        fn, operands = parts_of(score_mod)
        at = (*np.ogrid[:B, :N, :T, :S], *map(Clamped, operands))
        s, slope = held(fn.exact(s, *at)), fn.slope(s, *at)
    if logits_soft_cap is not None:
        s, inner = logits_soft_cap * np.tanh(s / logits_soft_cap), s
        slope = slope / np.cosh(np.clip(inner / logits_soft_cap, -300, 300)) ** 2
    return s, slope


def heads_first(x):
    return np.asarray(x, np.float64).swapaxes(1, 2)


def heads_last(x):
    return x.swapaxes(1, 2)


def grouped(x, kv_heads):
    """The rows of the query heads that share a key head, as rows of one matrix."""
    B, N, T, width = x.shape
    return x.reshape(B, kv_heads, N // kv_heads * T, width)


def times(x, y):
    """x @ y, where y has the heads of keys."""
    return (grouped(x, y.shape[1]) @ y).reshape(*x.shape[:3], y.shape[-1])


def solve(q, k, v, do=None, dlse=None, *, scale=None, bias=None, sinks=None, alibi_slopes=None,
          score_mod=None, logits_soft_cap=None, dropout_rate=0.0,
          dropout_key=None, broadcast_dropout=False, tf32=False, rounded=np.float64,
          exact_delta=False, **conditions):  # fmt: skip
    """The `Truth` for [B, T, N, H], [B, S, K, H], [B, S, K, V], [B, T, N, V] and [B, T, N].

    Without the cotangents `do` and `dlse` it has no gradients. `rounded` is the dtype that has room
    for a score, after each step to it. `exact_delta`: o is not rounded before delta.
    """
    dtype = np.float64 if exact_delta else q.dtype
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    scale = H**-0.5 if scale is None else float(scale)

    def held(s):
        with np.errstate(over="ignore"):
            return s.astype(rounded).astype(np.float64)

    def summed(x, y):
        """x.mT @ y, summed over the query heads that share a key head."""
        return heads_last(grouped(x, K).mT @ grouped(y, K))

    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    ok = visible((B, N, T, S), **conditions)
    raw = times(q, k.mT)
    s, slope = scores_of(
        scale * raw,
        held,
        (B, N, T, S),
        bias=bias,
        alibi_slopes=alibi_slopes,
        score_mod=score_mod,
        logits_soft_cap=logits_soft_cap,
        conditions=conditions,
    )
    s = np.where(ok, s, -np.inf)
    m = s.max(-1, keepdims=True)
    alive = m > -np.inf
    # No sink is one of -inf.
    sink = np.asarray([-np.inf] if sinks is None else sinks, np.float64)[:, None, None]
    m = np.where(alive, np.maximum(m, sink), 0)
    e, of_sink = np.exp(s - m), np.where(alive, np.exp(sink - m), 0)
    total = e.sum(-1, keepdims=True) + of_sink
    p, p_sink = (x / np.where(alive, total, 1) for x in (e, of_sink))
    with np.errstate(divide="ignore"):
        lse = heads_last((m + np.log(total))[..., 0])
    dropped = 1.0
    if dropout_rate:
        ones = kept(dropout_key, (B, N, T, S), dropout_rate, broadcast_dropout)
        dropped = ones / share_kept(dropout_rate)
    weight = p * dropped
    o, of_o = times(weight, v), times(weight**2, v**2)
    largest = s.max((2, 3))
    values = {"o": heads_last(o), "lse": lse, "max_logits": largest}
    terms = {
        "o": times(weight, np.abs(v)),
        "lse": np.where(np.isinf(lse), 0, 1 + np.abs(lse)),
        "max_logits": np.where(np.isinf(largest), 0, 1 + np.abs(largest)),
    }
    # Variances. o has that of its rounding and of p's before it.
    of_rounding = {"o": heads_last(of_o)}
    if do is None:
        return _truth(values, terms, {}, of_rounding)
    do, dlse = heads_first(do), heads_first(dlse)

    def delta_of(o):
        return (o * do).sum(-1, keepdims=True) - dlse[..., None]

    def sum_like(x, operand):
        shape = (1,) * (4 - np.ndim(operand)) + np.shape(operand)
        axes = tuple(a for a in range(4) if shape[a] == 1)
        return x.sum(axis=axes, keepdims=True).reshape(np.shape(operand))

    def through_ds(dp, delta):
        """The gradients that depend on delta."""
        ds = p * (dp - delta) * slope
        found = {"dq": heads_last(scale * times(ds, k)), "dk": scale * summed(ds, q)}
        if bias is not None:
            found["dbias"] = sum_like(ds, bias)
        if sinks is not None:
            # A key with the value 0, so dp = 0.
            found["dsinks"] = -(p_sink * delta).sum((0, 2, 3))
        return found, ds

    dp, delta = times(do, v.mT) * dropped, delta_of(o)
    gradients, ds = through_ds(dp, delta)
    values |= {**gradients, "dv": summed(weight, do), "dscale": (ds * raw).sum()}
    # ds is a difference: rounding is judged against the size of what is subtracted.
    size = p * (np.abs(dp) + np.abs(delta)) * np.abs(slope)
    terms |= {
        "dq": abs(scale) * times(size, np.abs(k)),
        "dk": abs(scale) * (size.mT @ np.abs(q)),
        "dv": weight.mT @ np.abs(do),
        "dscale": (size * np.abs(raw)).sum(),
    }
    if bias is not None:
        terms["dbias"] = sum_like(size, bias)
    if sinks is not None:
        terms["dsinks"] = (p_sink * np.abs(delta)).sum((0, 2, 3))
    cut_dp = times(as_tf32(do), as_tf32(v).mT) * dropped if tf32 else dp
    # A row of ds shares the variance of delta, of p's rounding and of o's. All channels share p's.
    of_channels = (of_o if tf32 else 0) + (0 if exact_delta else o**2)
    of_delta = ((p * dp) ** 2).sum(-1, keepdims=True)
    of_delta = of_delta + (do**2 * of_channels).sum(-1, keepdims=True)
    share = p * slope
    of_rounding |= {
        "dq": scale**2 * heads_last(times(ds**2, k**2) + times(share, k) ** 2 * of_delta),
        "dk": scale**2 * (summed(ds**2, q**2) + summed(share**2, q**2 * of_delta)),
        "dv": summed(weight**2, do**2),
        "dscale": ((ds * raw) ** 2).sum()
        + ((share * raw).sum(-1, keepdims=True) ** 2 * of_delta).sum(),
    }
    if bias is not None:
        of_rows = share if np.shape(bias)[-1:] == (S,) else share.sum(-1, keepdims=True)
        of_rounding["dbias"] = sum_like(of_rows**2 * of_delta, bias)
    if sinks is not None:
        of_rounding["dsinks"] = (p_sink**2 * of_delta).sum((0, 2, 3))
    from_rounded, _ = through_ds(cut_dp, delta_of(np.asarray(o.astype(dtype), np.float64)))
    return _truth(values, terms, from_rounded, of_rounding)


def _truth(values, terms, from_rounded, variances):
    return Truth(
        values,
        {name: float(np.linalg.norm(x)) for name, x in terms.items()},
        from_rounded,
        {name: np.sqrt(x) for name, x in variances.items()},
    )


def as_tf32(x):
    """Return float32 numbers as matrix units read them: the last 13 bits are dropped."""
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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _operand_and_tangent(rounded, x):
    """An operand of a product in forward mode: its tangent is one, too."""
    return rounded(x)


_operand_and_tangent.defjvp(lambda rounded, x, dx: (rounded(*x), rounded(*dx)))


def dense(q, k, v, *, scale=None, bias=None, sinks=None, alibi_slopes=None, score_mod=None,
          logits_soft_cap=None, dropout_rate=0.0, dropout_key=None, broadcast_dropout=False,
          tf32=False, return_max_logits=False, forward_mode=False, **conditions):  # fmt: skip
    """Dense attention in plain JAX: products of the inputs' dtype or TF32, softmax in float32.

    It has gradients, or tangents in `forward_mode`.
    """
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def rounded(x):
        if not tf32:
            # XLA keeps what it may in float32, unless it is stopped.
            return jax.lax.optimization_barrier(x.astype(q.dtype)).astype(x.dtype)
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFE000)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def product(equation, a, b):
        operand = _operand_and_tangent if forward_mode else _operand
        a, b = (operand(rounded, x).astype(q.dtype) for x in (a, b))
        x = jnp.einsum(equation, a, b, preferred_element_type=wide, precision="highest")
        return x if forward_mode else _product(rounded, x)

    kk, vv = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    s = product("btnh,bsnh->bnts", q, kk) * (H**-0.5 if scale is None else scale)
    if bias is not None:
        s = s + bias.astype(wide)
    if alibi_slopes is not None:
        distance = np.abs(np.subtract(*positions(B, T, S, **conditions)))
        s = s - alibi_slopes[:, None, None] * distance.astype(wide)
    if score_mod is not None:
        fn, operands = parts_of(score_mod)
        s = fn(s, *np.ogrid[:B, :N, :T, :S], *map(Clamped, operands))
    if logits_soft_cap is not None:
        s = logits_soft_cap * jnp.tanh(s / logits_soft_cap)
    ok = visible((B, N, T, S), **conditions)
    # No array where it is one value, see `compiled_alike`: of that XLA makes another program.
    ok = jnp.full(ok.shape, ok.all()) if ok.all() == ok.any() else jnp.asarray(ok)
    s = jnp.where(ok, s, -jnp.inf)
    m = jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True))
    alive = m > -jnp.inf
    if sinks is not None:
        # Else exp(sink - m) overflows where a slope has made all scores of a row small.
        m = jnp.maximum(m, jax.lax.stop_gradient(sinks[:, None, None]))
    m = jnp.where(m == -jnp.inf, 0, m)
    e = jnp.where(ok, jnp.exp(s - m), 0)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks[:, None, None] - m)
    total = jnp.where(alive, total, 1)
    lse = jnp.where(alive, m + jnp.log(total), -jnp.inf)[..., 0].transpose(0, 2, 1)
    p = e / total
    if dropout_rate:
        ones = kept(dropout_key, (B, N, T, S), dropout_rate, broadcast_dropout)
        p = jnp.where(ones, p / share_kept(dropout_rate), 0)
    o = product("bnts,bsnv->btnv", p, vv).astype(q.dtype)
    return (o, lse, s.max((2, 3))) if return_max_logits else (o, lse)


def differentiate(function, q, k, v, do, dlse, **operands):
    """o, lse, dq, dk, dv of `function(q, k, v, **operands) -> (o, lse)` for cotangents do and dlse.

    Then the gradients of `operands`, in the order of `OPERANDS`.
    """
    (o, lse), vjp = jax.vjp(lambda *x: function(*x[:3], **x[3]), q, k, v, operands)
    *gradients, others = vjp((do, dlse))
    return o, lse, *gradients, *(others[name] for name in OPERANDS if name in operands)


def compiled(function):
    """jit for tests that run each program once: compiling must be quick on a GPU, too.

    So dense products are cuBLAS's and not compiled, the fastest is not searched for, and constants
    such as masks are not folded.
    """
    options = {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_autotune_level": 0,
        "xla_disable_hlo_passes": "constant_folding",
    }
    return jax.jit(function, compiler_options=options if jax.default_backend() == "gpu" else None)


def compiled_alike(function):
    """`compiled`, once for all functions that differ only in the arrays they know, such as masks.

    They become arguments, so that programs are the same: in a process, and on a GPU in all
    processes, for which conftest.py keeps them.
    """

    def run(*args, **operands):
        jaxpr = jax.make_jaxpr(function)(*args, **operands)
        given = jaxpr.consts, *jax.tree.leaves((args, operands))
        program = compiled(functools.partial(jax.core.eval_jaxpr, jaxpr.jaxpr)).lower(*given)
        text = program.as_text()
        if text not in _programs:
            _programs[text] = program.compile()
        return _programs[text](*given)

    return run


_programs = {}


def optimized(function):
    """jit as it is outside of these tests, see conftest.py."""
    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    if jax.__version_info__ < (0, 11):
        options["xla_cpu_use_fusion_emitters"] = True
    elif jax.__version_info__ < (0, 12):
        options["xla_backend_extra_options"] = ""
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


def of_rounding(rounding: float, truth: Truth, name: str) -> dict[str, float]:
    """The expected errors, as `errors` gives them, of rounding operands and o."""
    if name not in truth.of_rounding:
        return {"l2": 0.0, "max": 0.0}
    size, want = truth.of_rounding[name], truth.values[name]
    norm, largest = np.linalg.norm(want), np.abs(want).max(initial=0)
    return {
        # Evenly distributed, so its root mean square is smaller by the root of 3.
        "l2": float(rounding / 3**0.5 * np.linalg.norm(size) / (norm or 1)),
        "max": float(rounding * size.max(initial=0) / (largest or 1)),
    }
