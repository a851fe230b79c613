"""A vector that all keys of a head have in common, and gradients of queries without its errors.

    dq_i = scale * sum_j ds_ij k_j
         = scale * sum_j ds_ij (k_j - c)  +  scale * r_i c          r_i = sum_j ds_ij

Both lines are equal for every vector c. A softmax does not change when all of its scores are
shifted, so r_i is known: it is zero, unless the LSE has a cotangent or a sink takes a share. In 16
bits the computed ds have another sum, because they are rounded, and because delta comes from the
rounded output. The first line multiplies this error by the mean key, the second line by the mean of
k_j - c.

c is the mean of a sample of visible keys, in features where the mean exceeds the deviation, and
zero elsewhere. Projections with a bias have such features. Rotary embeddings turn a bias from
position to position, and only their slow features keep it.

A soft cap or a score function multiplies ds by a derivative, after which r_i is not known: these
calls do not use c. Nor do inputs of 32 and 64 bits, whose rounding is small.
"""

import dataclasses

import jax.numpy as jnp

from pallas_flash._problem.problem import Problem
from pallas_flash._problem.scores import LOG2E, LogSum

# The largest score beside which float32 has room for a shift: its last digit is then 2^-10.
MAX_SHIFTED = 2.0**13

# Keys of a head that are looked at, evenly spaced; up to twice as many if there are few.
SAMPLE = 64


def center_of(problem: Problem):
    """Return c, float32 [B, K, H] of numbers that the keys' dtype has; None if it is not used."""
    p = problem
    if p.partial_rows or not applies(p):
        return p.key_center
    visible = p.visible_keys(sample_positions(p.kv_len)) if p.mask else None
    return center(moments(p, visible), p.dtype)


def center_for_shift(problem: Problem, log_sum: LogSum):
    """Return the c of `center_of`, with zeros for heads with scores too large for `shifted`."""
    c = center_of(problem)
    return c if problem.partial_rows else where_small(c, problem, log_sum)


def where_small(c, problem: Problem, log_sum: LogSum):
    """Return c, with zeros for heads that have scores too large to be shifted.

    A bias of -1e9 leaves float32 no room for q . c beside it. In a row of such scores alone k - c
    would give other weights than the forward had.
    """
    m, l_log2, _ = log_sum
    if c is None or m is None:
        return c
    m = jnp.where(jnp.isfinite(l_log2), jnp.abs(m), 0)
    largest = m.reshape(problem.batch, problem.num_kv_heads, -1).max(2)
    return jnp.where(largest[..., None] < MAX_SHIFTED, c, 0.0)


def applies(problem: Problem) -> bool:
    """Return whether the sums of ds are known, and its rounding matters."""
    scores = problem.rest_of_scores
    return problem.dtype.itemsize == 2 and scores.score_mod is None and scores.soft_cap is None


def sample(kv_len: int) -> slice:
    """Return which keys are looked at. The first key of many is left out: it is often special."""
    step = max(1, kv_len // SAMPLE) if isinstance(kv_len, int) else 1
    return slice(step // 2, None, step)


def sample_positions(kv_len: int):
    """Return int32 positions of these keys."""
    return jnp.arange(kv_len, dtype=jnp.int32)[sample(kv_len)]


def moments(problem: Problem, visible):
    """Return the number, the sum and the sum of squares of visible keys: three of [B, K, H].

    Args:
        problem: the call.
        visible: bool [1 or B, 1 or K, sample], whether any query sees the key; None is all.
    """
    x = problem.key[:, sample(problem.kv_len)].astype(jnp.float32)
    n = jnp.full((1, 1, 1), x.shape[1], jnp.float32)
    if visible is not None:
        visible = jnp.swapaxes(visible, 1, 2)[..., None]
        n, x = visible.sum(1, dtype=jnp.float32), jnp.where(visible, x, 0.0)
    return n, x.sum(1), (x * x).sum(1)


def center(moments, dtype):
    """Return c, float32 [B, K, H], for `moments` of keys of a dtype; 0 for NaN and infinity."""
    n, total, squares = moments
    mean = total / jnp.maximum(n, 1)
    variance = jnp.maximum(squares - total * mean, 0) / jnp.maximum(n - 1, 1)
    # The mean of a few keys is far from zero by chance.
    large = (n > 1) & (mean * mean > variance * (1 + 8 / jnp.maximum(n, 1)))
    return jnp.where(large, mean, 0.0).astype(dtype).astype(jnp.float32)


def centered(key, c):
    """Return keys less c, which broadcasts to them, in the dtype of the keys."""
    return (key.astype(jnp.float32) - c).astype(key.dtype)


def shifted(problem: Problem, log_sum: LogSum, c) -> tuple[Problem, LogSum]:
    """Return the problem with k - c for keys, and the LSE of its scores: p and ds stay the same."""
    if c is None:
        return problem, log_sum
    p, (m, l_log2, _) = problem, log_sum
    shift = p.scale.astype(jnp.float32) * products(p, c)
    shift = jnp.where(jnp.isfinite(l_log2), shift, 0.0)
    shifted = LogSum(None, l_log2 - LOG2E * shift) if m is None else LogSum(m - shift, l_log2)
    return dataclasses.replace(p, key=centered(p.key, c[:, None])), shifted


def products(problem: Problem, c):
    """Return q . c, float32 [B, N, T]."""
    return jnp.einsum(
        "btnh,bnh->bnt", problem.query.astype(jnp.float32), jnp.repeat(c, problem.groups, axis=1)
    )


def row_sums(problem: Problem, log_sum: LogSum, delta, dlse):
    """Return r, the sums of ds over a row: float32 [B, N, T], or None if they are zero.

        r_i = dlse_i + exp(sink - lse_i) delta_i

    Args:
        problem: the call; rows of a part have their sums elsewhere.
        log_sum: of [B, N, T]; its sign of infinity in rows that see nothing does not matter.
        delta: [B, N, T], rowsum(o * do) - dlse.
        dlse: [B, N, T] or None.
    """
    p, (m, l_log2, _) = problem, log_sum
    if p.partial_rows or (p.sinks is None and dlse is None):
        return None
    r = jnp.zeros_like(delta) if dlse is None else dlse
    if p.sinks is not None:
        sinks = p.sinks[None, :, None] - (0 if m is None else m)
        r = r + jnp.exp2(sinks * LOG2E - l_log2) * delta
    return jnp.where(jnp.isfinite(l_log2), r, 0.0)


def known_part(problem: Problem, c, r):
    """Return r_i c, float32 [B, T, N, H]: what is missing of dq / scale from centered keys."""
    c = jnp.repeat(c, problem.groups, axis=1)
    return jnp.swapaxes(r, 1, 2)[..., None] * c[:, None]


def whole_sums(problem: Problem, c, log_sum: LogSum, delta, dlse, dq, dscale):
    """Return dq and the gradient of the scale, from `dq` and `dscale` of centered keys.

    Args:
        problem: the call, with its own keys.
        c: as `center_of` returned it.
        log_sum: as in `row_sums`.
        delta: [B, N, T].
        dlse: [B, N, T] or None.
        dq: [B, T, N, H].
        dscale: a float32 number or None.
    """
    r = None if c is None else row_sums(problem, log_sum, delta, dlse)
    if r is None:
        return dq, dscale
    known = problem.scale.astype(jnp.float32) * known_part(problem, c, r)
    dq = (dq.astype(jnp.float32) + known).astype(dq.dtype)
    if dscale is not None:
        # A query of a row that sees nothing may be NaN.
        dscale = dscale + jnp.where(r == 0, 0.0, r * products(problem, c)).sum()
    return dq, dscale
