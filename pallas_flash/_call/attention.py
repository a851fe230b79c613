"""The public functions `attention`, `explain` and `dropout_mask`."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast, overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_flash._arguments import other_libraries
from pallas_flash._arguments.attention import (
    check_choices,
    dropout_mask_arguments,
    parse_sequence_axis,
    validate,
)
from pallas_flash._autodiff import linear_map, vjp
from pallas_flash._backends import reference
from pallas_flash._execution import context, partition
from pallas_flash._execution.plan import Plan
from pallas_flash._problem import configurations, invariance
from pallas_flash._problem.checks import held
from pallas_flash._problem.configurations import Configuration
from pallas_flash._problem.mask_objects import MaskObject
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.score_mod import ScoreMod
from pallas_flash._selection import resolve
from pallas_flash._selection.resolve import Explanation, Request

Implementation = Literal["mosaic", "triton", "interpret", "xla", "reference"]
ContextParallelism = Literal["ring", "gather", "heads"]
_Function = TypeVar("_Function", bound=Callable)


def _checks_keywords(function: _Function) -> _Function:
    """Make `function` refuse unknown keywords with a hint. Its signature stays."""
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not kwargs.keys() <= known:
            other_libraries.check_keywords(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return cast(_Function, call)


def _with_signature_of(model: Callable) -> Callable[[_Function], _Function]:
    """Give a function that passes its arguments on the parameters of `model`."""

    def give(function: _Function) -> _Function:
        returns = inspect.signature(function).return_annotation
        signature = inspect.signature(model).replace(return_annotation=returns)
        function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return give


class Options(TypedDict, total=False):
    """The keywords of `attention` for type checkers, without those that change its results."""

    scale: float | Float[Array, ""] | None
    is_causal: bool
    query_seq_lengths: Int32[Array, " B"] | None
    key_value_seq_lengths: Int32[Array, " B"] | None
    local_window_size: int | tuple[int | None, int | None] | None
    segment_ids: Int32[Array, "B T"] | tuple[Int32[Array, "B T"], Int32[Array, "B S"]] | None
    query_offset: int | Int32[Array, ""] | Int32[Array, " B"]
    query_positions: Int32[Array, "#B T"] | None
    key_value_positions: Int32[Array, "#B S"] | None
    logits_soft_cap: float | None
    sinks: Float[Array, " N"] | None
    alibi_slopes: Float[Array, " N"] | None
    score_mod: Callable | ScoreMod | None
    dropout_rate: float
    dropout_key: Array | None
    broadcast_dropout: bool
    precision: str | lax.Precision | lax.DotAlgorithmPreset | None
    implementation: Implementation | None
    config: Configuration | None
    reproducible: bool | None
    batch_invariant: bool
    sequence_axis: str | tuple[str, ...] | None
    context_parallelism: ContextParallelism | None


@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | MaskObject | None = None,
    *,
    return_residual: Literal[False] = False,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | MaskObject | None = None,
    *,
    return_residual: Literal[True],
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | MaskObject | None = None,
    *,
    return_residual: Literal[False] = False,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
# One overload for two results and for three: both unpack.
@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | MaskObject | None = None,
    *,
    return_residual: bool = False,
    return_lse: bool = False,
    return_max_logits: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, ...]: ...
# Pyright joins the overloads above for a flag that is no literal; mypy needs one for it.
@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | MaskObject | None = None,
    *,
    return_residual: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    **options: Unpack[Options],
) -> jax.Array | tuple[jax.Array, ...]: ...
@_checks_keywords
def attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | MaskObject | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int32[Array, " B"] | None = None,
    key_value_seq_lengths: Int32[Array, " B"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    segment_ids: Int32[Array, "B T"]
    | tuple[Int32[Array, "B T"], Int32[Array, "B S"]]
    | None = None,
    query_offset: int | Int32[Array, ""] | Int32[Array, " B"] = 0,
    query_positions: Int32[Array, "#B T"] | None = None,
    key_value_positions: Int32[Array, "#B S"] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    score_mod: Callable | ScoreMod | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    broadcast_dropout: bool = False,
    precision: str | lax.Precision | lax.DotAlgorithmPreset | None = None,
    return_residual: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    implementation: Implementation | None = None,
    config: Configuration | None = None,
    reproducible: bool | None = None,
    batch_invariant: bool = False,
    sequence_axis: str | tuple[str, ...] | None = None,
    context_parallelism: ContextParallelism | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Exact softmax attention with memory linear in the lengths, forward and backward.

        s_ij = soft_cap(scale * q_i . k_j + bias_ij)    where query i may see key j, else -inf
        o_i  = sum_j dropout(softmax_j(s_ij)) v_j       zero, with zero gradients, if query i sees
                                                        no key

    A drop-in for `jax.nn.dot_product_attention`: arguments of the same name have the same meaning,
    and the results agree, except for a query that may see no key: it gives zeros here, and the mean
    of all values there. A query sees a key if all conditions (causal, window, lengths, segments,
    mask) allow it.

    Letters: B batch, T query length, S key/value length, N query heads, K key/value heads, H head
    dim of queries and keys, V head dim of values. N is a multiple of K; query heads n * N/K ..
    (n + 1) * N/K - 1 share key/value head n.

    Args: Inputs
        query: [B, T, N, H] or [T, N, H]; float16, bfloat16, float32 or float64.
        key: [B, S, K, H] or [S, K, H], in the dtype of `query`.
        value: [B, S, K, V] or [S, K, V], in the dtype of `query`.

    Args: Masks
        mask: True where a query may see a key; at most 4 axes, broadcastable to [B, N, T, S] and
            never expanded to it. Kernels skip tiles without a True. Or an object of
            `pallas_flash.masks`: a `BlockMask`, `BlockCausal`, `Chunked`, `Dilated`,
            `Neighborhood`, `Predicate`, `PrefixLM`, `Segments`, `SharedPrefix` or `Tree`, or
            several, and boolean arrays, joined by `&`, `|` and `~`. The arguments below stay joined
            by "and": `~` shows no padding.
        is_causal: query t sees keys up to its own position t + query_offset. For T = 3 and S = 5:

                query_offset=0      query_offset=2 (= S - T)
                1 0 0 0 0           1 1 1 0 0
                1 1 0 0 0           1 1 1 1 0
                1 1 1 0 0           1 1 1 1 1

        local_window_size: (left, right), or an int for both: a query at position i sees keys i -
            left .. i + right, both ends included; None on one side is unbounded. The last W keys
            are (W - 1, 0).
        query_seq_lengths: int32 [B]; rows of the output past these lengths are zero.
        key_value_seq_lengths: int32 [B]; keys past these lengths are hidden, and have no effect on
            any result. For both, a number below 0 counts as 0, and one above the length as the
            length.
        segment_ids: int32 [B, T], or a pair for queries and keys; a token sees the tokens with its
            own id. Kernels skip tiles without a common id. `masks.segment_ids_from_cu_seqlens`
            makes one row of them, [T], from the ends of packed sequences.
        query_offset: position of query 0 among the keys, an int, an int32 scalar or int32 [B]; it
            moves `is_causal`, `local_window_size`, `alibi_slopes` and `PrefixLM`.
        query_positions: int32 [B, T] or [1, T], the position of each query, -2^30 .. 2^30 - 1,
            where tokens are not in the order of their positions. All that `query_offset` moves
            goes by them. All else goes by places in the arrays: `bias`, boolean masks, lengths,
            dropout, and the indices that functions get. See `masks.balanced_order`.
        key_value_positions: int32 [B, S] or [1, S], the position of each key; None is 0, 1, 2, ...
            Pass the same array for both where queries and keys are the same tokens.

    Args: Scores
        scale: factor of the scores, 1 / sqrt(H) if None. May be traced, and has a gradient.
        bias: added to the scaled scores; at most 4 axes, broadcastable to [B, N, T, S] and never
            expanded to it. Its gradient has its own shape.
        alibi_slopes: [N]; subtracts slope * |position of the query - position of the key| (Press,
            Smith and Lewis, 2022, arXiv:2108.12409). Has a gradient.
        score_mod: `score_mod(s, b, h, q_pos, k_pos) -> s` maps the scaled scores, with bias and
            slopes, at int32 indices of batch element, query head, query and key. It is elementwise
            jax.numpy, traced into the kernels. A `ScoreMod` is such a function and the arrays that
            it reads, and says what both may be.
        logits_soft_cap: scores s become cap * tanh(s / cap), after the bias and `score_mod`.
        sinks: [N], a logit for each head that takes part in the softmax and has no value: it adds
            exp(sink) to the denominator and to the LSE of every query that sees a key. -inf is no
            sink; +inf is not supported.

    Args: Dropout
        dropout_rate: the share of probabilities that become zero, in [0, 1); the others are divided
            by 1 - rate. For both it is rounded to a multiple of 2^-16, but not to 0 or to 1.
        dropout_key: a `jax.random` key, typed or raw. The mask depends on it and on the indices of
            batch element, head, query and key alone, see `dropout_mask`. Inside a `jax.shard_map`
            of your own these are the indices of the shard: fold the shard's number into the key.
        broadcast_dropout: whether all batch elements and heads share one dropout mask.

    Args: Numerics
        precision: of the matrix products for float32 inputs, a `jax.lax.Precision`, its name, or a
            `jax.lax.DotAlgorithmPreset` that the device supports. None is what
            `jax.default_matmul_precision` is around this call, for its gradients too; by default
            that is TF32 on GPUs (10 bits of mantissa). "highest" is IEEE float32.
        reproducible: whether gradients must be the same in every run, bit by bit. None follows
            XLA's flags for it, `--xla_gpu_deterministic_ops` and
            `--xla_gpu_exclude_nondeterministic_ops`. False lets "mosaic" add parts of the gradient
            of `query` in the order in which they are ready, in one pass, and with grouped or few
            heads also of the gradients of `key` and `value`; all else is reproducible anyway.
        batch_invariant: whether the bits of a row of the output and the LSE depend on its own query
            and the keys and values that it sees alone, if these are finite: not on the batch, on
            the number of queries, or on where the sequence lies. It needs a Hopper GPU, 16 bits,
            head dims that are multiples of 8 up to 256, and sequences of `segment_ids` that begin
            at multiples of 128: rows of others are NaN if the ids are traced. It turns
            `reproducible` on. See docs/batch-invariance.md.
        return_lse: also return the LSE (logsumexp), log sum_j exp(s_ij), in float32 (float64 for
            float64 inputs) and differentiable; -inf where a query sees no key.
        return_residual: also return jax.nn's residual: the LSE in the dtype of `key`, without a
            gradient.
        return_max_logits: also return the largest score s_ij of each batch element and head, in
            float32 (float64 for float64 inputs) and without a gradient, as QK-Clip needs it
            (Kimi Team, 2025, arXiv:2507.20534). Sinks and hidden keys do not count; -inf where no
            query of the head sees a key. With `sequence_axis` it is of all devices.

    Args: Execution
        implementation: "mosaic" are kernels for Hopper GPUs, "triton" those for NVIDIA GPUs from
            compute capability 8.0 on, "interpret" the latter in Pallas's interpreter (any device,
            slow), "xla" the same algorithm in plain JAX, "reference" the dense definition. One that
            is given is used or raises. None lets auto-selection pick the fastest. See `explain`.
        config: a `tuning.Triton` or a `tuning.Mosaic`, the tiles of the kernels. A tile that is
            None is what `tuning.tune` found on this GPU, or else from a table. With
            `implementation`, it is a configuration of that one. Without, its backend computes the
            passes for which it has a tile if it serves the call, and else it has no effect:
            `explain` says which.
        sequence_axis: inside a `jax.shard_map`, the mesh axis (or axes, the slowest first) that
            divides the sequence: `query`, `key`, `value`, `segment_ids` and positions are this
            device's shard of it; `bias` and `mask` arrays have rows for its queries and columns for
            all keys; lengths and offsets are of the whole sequence. With None inside a
            `jax.shard_map` each device sees its own keys alone; outside of one the arrays tell how
            they are sharded.
        context_parallelism: how devices that divide a sequence work together. "ring" sends keys and
            values around while kernels run, "gather" gathers them first, "heads" exchanges the
            sequence for heads and back. By default a rule picks one, see `explain`. It has no
            effect where no sequence is divided, nor on "reference", which gathers.

    Returns:
        The output, [B, T, N, V] or [T, N, V], in the dtype of `query`. If more is asked for, a
        tuple of it, the residual or the LSE, [B, T, N] or [T, N], and the largest scores, [B, N] or
        [N], in this order.

    Raises:
        TypeError: an argument is of the wrong kind or dtype.
        ValueError: the arguments do not fit together.
        NotImplementedError: the call is valid, but the implementation asked for does not serve it.

    Example:
        >>> import jax, jax.numpy as jnp, pallas_flash
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 128, 4, 64))
        >>> pallas_flash.attention(q, k, v, is_causal=True).shape
        (2, 128, 4, 64)

    The algorithm is FlashAttention-2 (Dao, 2023, arXiv:2307.08691).
    """
    check_choices(return_residual, return_lse, reproducible, context_parallelism)
    problem = validate(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        query_offset=query_offset,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        score_mod=score_mod,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        return_max_logits=return_max_logits,
        batch_invariant=batch_invariant,
        sequence_axis=sequence_axis,
    )
    sizes = configurations.sizes_of(config, implementation)
    plan = resolve.resolve(problem, Request(implementation, sizes, reproducible))
    resolve.warn_of_fallback(plan, implementation)
    along = parse_sequence_axis(sequence_axis)
    plan = dataclasses.replace(plan, along=along, method=context_parallelism)
    o, lse, *row_maxima = _run(problem, plan)
    if problem.batch_invariant:
        o, lse = invariance.spoilt(problem, o, lse)
    results = [o]
    if return_lse:
        results.append(lse)
    elif return_residual:
        results.append(linear_map.constant(lse).astype(problem.dtype))
    results += [_max_over_rows(x, sequence_axis) for x in row_maxima]
    results = [x[0] for x in results] if held(query).ndim == 3 else results
    return tuple(results) if len(results) > 1 else results[0]


@overload
def explain(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    return_residual: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    **options: Unpack[Options],
) -> Explanation: ...
@overload
def explain(query, key, value, bias=None, mask=None, **options: Any) -> Explanation: ...
@_checks_keywords
@_with_signature_of(attention)
def explain(*args, **kwargs) -> Explanation:
    """Tell which implementation serves this call of `attention` here, and why the others do not.

    `explain` takes the arguments of `attention`, raises the same errors, and computes nothing. It
    speaks of this process's default device: ask on a machine with the GPU that you mean. Give a
    `jax.ShapeDtypeStruct` for an array that does not exist yet.

    Where devices divide the sequence, it tells the method of context parallelism, too. Arrays that
    `jax.jit` traces do not know their sharding: give arrays outside of `jit`, or shapes with a
    `sharding`.

    Returns:
        An `Explanation`, which prints as a few lines.

    Example:
        >>> import jax, jax.numpy as jnp, pallas_flash
        >>> x = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)
        >>> pallas_flash.explain(x, x, x, implementation="xla").implementation
        'xla'
    """
    call = bound(*args, **kwargs)
    arrays, structure = jax.tree.flatten(call)
    shapes = {i: x for i, x in enumerate(arrays) if isinstance(x, jax.ShapeDtypeStruct)}
    results = []

    def traced(traced):
        filled = [traced.get(i, x) for i, x in enumerate(arrays)]
        call_of_arrays = jax.tree.unflatten(structure, filled)
        results.append(_explain(call_of_arrays, call["query"], call["key"]))

    jax.eval_shape(traced, shapes)
    return results[0]


def bound(*args, **kwargs) -> dict[str, Any]:
    """Return all arguments of a call of `attention` by name, defaults among them."""
    call = inspect.signature(attention).bind(*args, **kwargs)
    call.apply_defaults()
    return dict(call.arguments)


def problem_of(call: dict[str, Any]) -> Problem:
    """Return the checked problem of all arguments of a call of `attention`, by name."""
    choices = "return_residual", "return_lse", "reproducible", "context_parallelism"
    check_choices(*(call[x] for x in choices))
    others = {*choices, "implementation", "config"}
    return validate(**{x: call[x] for x in call if x not in others})


def _explain(call: dict[str, Any], query, key) -> Explanation:
    """Explain a call of arrays; `query` and `key` are those that were given."""
    problem = problem_of(call)
    asked, reproducible = call["implementation"], call["reproducible"]
    given = configurations.sizes_of(call["config"], asked)
    request = Request(asked, given, reproducible)
    plan = resolve.resolve(problem, request)
    method, along = None, parse_sequence_axis(call["sequence_axis"])
    if along is None:
        shard, along, devices = partition.shard_of_device(problem, query, key)
    else:
        shard, devices = problem, lax.axis_size(along.names)
    if along is not None:
        method = context.choose(shard, devices, call["context_parallelism"], keys=along.keys)
        calls = context.calls_in_order(shard) if method.method == "ring" else []
        if by := {request(x).implementation for x in calls}:
            reason = (
                f"{method.reason} In `balanced_order`, which is seen when it runs, steps are "
                f"causal or whole, and by {', '.join(map(repr, sorted(by)))}."
            )
            method = method._replace(reason=reason)
    return resolve.explained(problem, plan, request, method, call["scale"])


def dropout_mask(
    dropout_key: Array, shape: tuple[int, int, int, int], dropout_rate: float
) -> Bool[Array, "B N T S"]:
    """Return which probabilities `attention` keeps with this dropout key and rate.

    Args:
        dropout_key: a `jax.random` key.
        shape: (B, N, T, S); with `broadcast_dropout` (1, 1, T, S).
        dropout_rate: the share that is dropped, in [0, 1), rounded to a multiple of 2^-16 as in
            `attention`.

    Returns:
        True where a probability is kept: dropout(p) = where(mask, p / (1 - rate), 0), with the
        rounded rate.

    Example:
        >>> import jax, pallas_flash
        >>> mask = pallas_flash.dropout_mask(jax.random.key(0), (2, 4, 64, 64), 0.25)
        >>> bool(abs(mask.mean() - 0.75) < 0.02)
        True
    """
    sizes, dropout = dropout_mask_arguments(dropout_key, shape, dropout_rate)
    if dropout is None:
        return jnp.ones(sizes, bool)
    return dropout.kept_of(sizes)


def _reference_of(plan: Plan) -> Callable:
    def attend(problem: Problem, along):
        along = along or plan.along
        return reference.attention(problem if along is None else context.whole_keys(problem, along))

    return attend


def _run(problem: Problem, plan: Plan) -> tuple[jax.Array, ...]:
    """Return the output [B, T, N, V], the LSE and, if asked for, the row maxima, [B, T, N] each."""
    p = problem
    rows = (p.batch, p.q_len, p.num_heads)
    if 0 in (p.batch, p.q_len, p.kv_len):
        # Nothing to compute, and constants have zero gradients.
        none = jnp.full(rows, -jnp.inf, p.accumulator_dtype)
        o = jnp.zeros((*rows, p.value_dim), p.dtype)
        return (o, none, none) if p.max_logits else (o, none)
    if plan.implementation == "reference":
        return partition.explicitly(_reference_of(plan), p)
    operands, rest = p.split()
    return vjp.attend(plan, operands, rest)


def _max_over_rows(row_maxima, sequence_axis):
    """Return the maximum [B, N] of the rows' maxima [B, T, N], over the queries of all devices."""
    highest = lax.stop_gradient(row_maxima).max(axis=1, initial=-jnp.inf)
    names = sequence_axis if isinstance(sequence_axis, (tuple, list)) else [sequence_axis]
    # One by one, because JAX takes axes together only if the numbers vary over all or over none.
    for name in () if sequence_axis is None else names:
        highest = lax.pmax(highest, name)
    return linear_map.constant(
        highest,
        transposed="`return_max_logits` must be False where `jax.linear_transpose` transposes "
        "`attention`; got True. Use another call for the largest scores.",
    )
