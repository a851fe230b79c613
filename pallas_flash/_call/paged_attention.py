"""The public function `paged_attention`."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_flash._arguments import paged
from pallas_flash._autodiff import linear_map
from pallas_flash._backends import reference, xla_paged
from pallas_flash._call.attention import Implementation
from pallas_flash._execution import limits
from pallas_flash._jax import device
from pallas_flash._jax.one_device import on_one_device
from pallas_flash._problem.checks import held
from pallas_flash._problem.paged import PagedProblem

# Auto-selection picks the first that serves the call.
AUTO = ("mosaic", "triton")


def paged_attention(
    query: Float[Array, "tokens N H"] | Float[Array, "R T N H"],
    key_pages: Float[Array, "P page_size K H"],
    value_pages: Float[Array, "P page_size K V"],
    key_value_seq_lengths: Int32[Array, " R"],
    page_indices: Int32[Array, "R pages"],
    cu_seqlens_q: Int32[Array, " R+1"] | None = None,
    *,
    key_scales: Float[Array, "..."] | None = None,
    value_scales: Float[Array, "..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    precision: str | lax.Precision | lax.DotAlgorithmPreset | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Causal attention of the last tokens of requests to keys and values in pages of a cache.

        query i of request r is at position p = key_value_seq_lengths[r] - n_r + i, where n_r are
        its queries
        s_j = soft_cap(scale * q . k_j - slope * (p - j))     for keys j <= p inside of the window
        o   = sum_j softmax_j(s_j) v_j                        zero if there is no such key

        key j of request r is key_pages[page_indices[r, j // page_size], j % page_size]

    The pages are read where they are, and lengths, pages and the split of tokens into requests may
    be traced: one program serves decoding, prefill in chunks, and both in one call. There are R
    requests; N query heads are a multiple of K key heads.

    Args: Inputs
        query: [R, T, N, H], T queries for each request, or [tokens, N, H] with `cu_seqlens_q`;
            float16, bfloat16, float32 or float64. They are the last tokens of each request, and
            their keys are in the pages (`paged.append`).
        key_pages: [P, page_size, K, H], in the dtype of `query`, int8 or float8_e4m3fn.
        value_pages: [P, page_size, K, V], in one of these dtypes.
        key_value_seq_lengths: int32 [R], the keys of each request, its queries' keys included; 0
            gives zeros.
        page_indices: int32 [R, pages of a request], the pages of each request in the order of its
            tokens. Pages may have any order, and requests may share them. Where no query of this
            call sees a page, after the length or before the window, the number may be any.
        cu_seqlens_q: int32 [R + 1], the first query of each request, and the end of the last
            one's. Tokens outside of it give zeros.
        key_scales: float32 [P, K, page_size] or [K]: quantised keys stand for key_pages * scale.
        value_scales: the same for values.

    Args: Scores
        scale: as in `attention`.
        local_window_size: (left, right), or an int for both: a query sees keys p - left .. p.
            Pages that no query sees are not read.
        logits_soft_cap: as in `attention`.
        sinks: as in `attention`.
        alibi_slopes: as in `attention`.
        precision: as in `attention`.

    Args: Execution
        return_lse: also return the LSE, float32; -inf where a query sees no key.
        batch_invariant: as in `attention`, with which it gives the same bits. Needs "mosaic".
        implementation: "mosaic" is a kernel for Hopper GPUs that serves float16 and bfloat16 in
            pages of a multiple of 16 tokens, "triton" are kernels for NVIDIA GPUs, "interpret" the
            same kernels in Pallas's interpreter, "xla" plain JAX, "reference" the dense definition.
            None is the first of "mosaic", "triton" and "xla" that serves the call.

    Returns:
        The output, of the shape of `query` with head dim V; with `return_lse` a pair of it and the
        LSE [R, T, N] or [tokens, N].

        Traced numbers are not checked, and no memory outside of the arrays is read: lengths beyond
        the pages count as the end of the pages, indices outside of the cache as its nearest page,
        and `cu_seqlens_q` as the nearest ones that do not decrease.

    Raises:
        TypeError: an argument is of the wrong kind or dtype.
        ValueError: the arguments do not fit together, or numbers that are known when the call is
            traced are out of range.
        NotImplementedError: the implementation asked for does not serve the call, or the call is
            differentiated.

    Example:
        >>> import jax, jax.numpy as jnp, pallas_flash
        >>> keys, values = jax.random.normal(jax.random.key(0), (2, 8, 16, 2, 64))  # 8 pages of 16
        >>> q = jax.random.normal(jax.random.key(1), (3, 1, 4, 64))  # one token of 3 requests
        >>> lengths = jnp.array([20, 3, 16])
        >>> page_indices = jnp.array([[5, 0], [2, 2], [7, 7]])
        >>> pallas_flash.paged_attention(q, keys, values, lengths, page_indices).shape
        (3, 1, 4, 64)
    """
    query = held(query)
    problem = paged.validate(
        query,
        key_pages,
        value_pages,
        key_value_seq_lengths,
        page_indices,
        cu_seqlens_q,
        key_scales=key_scales,
        value_scales=value_scales,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        precision=precision,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
        implementation=implementation,
    )
    rows = problem.query.shape[:2]
    if 0 in (problem.tokens, problem.kv_len):
        o = jnp.zeros((*rows, problem.value_dim), problem.dtype)
        lse = jnp.full(rows, -jnp.inf, problem.accumulator_dtype)
    else:
        o, lse = _attend(problem, _resolve(problem, implementation))
    o, lse = (x.reshape(*query.shape[:-2], *x.shape[1:]) for x in (o, lse))
    return (o, lse) if return_lse else o


def _resolve(problem: PagedProblem, asked: str | None) -> str:
    """Return the implementation of the call."""
    if problem.batch_invariant:
        limits.check_invariance(asked, limits.paged_limits(problem, "mosaic"))
        return "mosaic"
    names = AUTO if asked is None else (asked,)
    why_not = {name: limits.paged_limits(problem, name) for name in names}
    if serving := [name for name in names if not why_not[name]]:
        return serving[0]
    why = why_not[names[-1]]
    if asked is None:
        if device.target().nvidia:
            warnings.warn(
                f'pallas_flash.paged_attention falls back to the slower "xla": {why}', stacklevel=3
            )
        return "xla"
    by_triton = asked == "mosaic" and not limits.paged_limits(problem, "triton")
    raise NotImplementedError(
        f"`implementation` must be one that serves the call; got {asked!r}. {why} Use "
        f'"{"triton" if by_triton else "xla"}".'
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _attend(problem: PagedProblem, implementation: str):
    return linear_map.apply(_NoDerivative(), list(_compute(problem, implementation)), [])


@_attend.defjvp
def _(implementation, primals, tangents):
    del implementation
    return _NoDerivative().cotangents(primals, tangents)


@dataclasses.dataclass(frozen=True)
class _NoDerivative:
    """The results as they are; their derivative and their transpose raise."""

    def tangents(self, fixed, moved):
        """Return the output and the LSE."""
        del moved
        return fixed

    formula = tangents

    def cotangents(self, fixed, cotangents):
        """Raise."""
        del fixed, cotangents
        raise NotImplementedError(
            "`paged_attention` must not be differentiated, because it serves generation alone; got "
            "a derivative. Use `attention` for training, or `jax.lax.stop_gradient` on the "
            "arguments."
        )


# Compiled here, so that calls outside of `jit` do not compile each time.
@functools.partial(jax.jit, static_argnums=1)
def _compute(problem: PagedProblem, implementation: str):
    """Return the output [tokens, N, V] and the LSE [tokens, N]."""
    if implementation == "reference":
        return on_one_device(_reference_of, problem)
    if implementation == "xla":
        return on_one_device(xla_paged.forward, problem)
    # Imported when needed, because the package works without it.
    if implementation == "mosaic":
        from pallas_flash._backends.mosaic import paged as mosaic_paged

        return on_one_device(jax.custom_batching.sequential_vmap(mosaic_paged.forward), problem)
    from pallas_flash._backends.triton import paged_kernel

    run = functools.partial(paged_kernel.forward, interpret=implementation == "interpret")
    return on_one_device(run, problem)


def _reference_of(p: PagedProblem):
    o, lse = reference.attention(p.dense())
    request, number, exists = p.requests.places()
    number = jnp.clip(number, 0, p.q_len - 1)
    o = jnp.where(exists[:, None, None], o[request, number], 0).astype(p.dtype)
    return o, jnp.where(exists[:, None], lse[request, number], -jnp.inf)
