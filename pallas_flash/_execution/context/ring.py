"""The method "ring": keys and values travel round the devices, and each computes with its block.

    step s of device d      o_s, lse_s of its queries and the keys of device d - s,
                            while the keys of the next step are on their way
    at the end              o = sum_s exp(lse_s - lse) o_s      lse = log sum_s exp(lse_s)

The backward has the same steps, because p = exp(s - lse) needs only the final LSE. Each step gives
a part of dq, which stays, and a part of dk and dv, which is sent to the owner of the keys at once.

The distance of a step's keys from a device's queries is known at compile time, but for one bit:
whether the keys are ahead of the queries (d < s), where the ring closes. A step without an allowed
pair computes nothing, and blocks that no device needs are not sent.

If arrays hold the positions, a causal step tests at run time whether they are in `balanced_order`.
In that case it makes one of a few calls that need no positions, see `_in_order`.

The program has all steps unrolled. A barrier after each step keeps the compiler from sending more
than one block ahead, so that a device holds two blocks at a time.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash._execution.context.parts import (
    Device,
    Part,
    Side,
    device,
    distance_per_batch_element,
    part_of,
    visit,
    with_all_keys,
)
from pallas_flash._execution.partition import Along
from pallas_flash._problem import key_center
from pallas_flash._problem.masks import Band, LeafKind, Mask
from pallas_flash._problem.operands import Positions
from pallas_flash._problem.problem import Gradients, Problem, SplitOutput, widened
from pallas_flash._problem.scores import LOG2E, LogSum, sinks_gradient


class Piece(NamedTuple):
    """Some consecutive queries of a device, and some consecutive keys of a block.

    Attributes:
        problem: the part.
        row: the index of the first query in the device's shard.
        key: the index of the first key in the block.
    """

    problem: Problem
    row: int = 0
    key: int = 0

    def with_keys(self, message) -> Problem:
        """Return the part with keys and values of the block that has arrived."""
        stop = self.key + self.problem.kv_len
        key, value = (lax.slice_in_dim(x, self.key, stop, axis=1) for x in _opened(message))
        return dataclasses.replace(self.problem, key=key, value=value)

    def rows(self, x, axis: int = 1):
        """Return the rows of the piece from an array of the device's rows."""
        return lax.slice_in_dim(x, self.row, self.row + self.problem.q_len, axis=axis)


class Step(NamedTuple):
    """One step of the ring, in which every device has another block of keys.

    Attributes:
        back: device d has the block of device d - back.
        used: for each device, whether its queries may see any key of its block.
        pieces: the pieces that devices compute, one for each device.
        which: the index of this device's piece, traced.
        first_key: the position of the block's first key.
    """

    back: int
    used: tuple[bool, ...]
    pieces: tuple[Piece, ...]
    which: Any
    first_key: Any

    def run(self, fn, carry):
        """Return `fn(piece, carry)` on a device with an allowed pair, elsewhere `carry`."""

        def branch(piece):
            return lambda carry: visit(piece.problem, lambda carry: fn(piece, carry), carry)

        if len(self.pieces) == 1:
            return branch(self.pieces[0])(carry)
        return lax.switch(self.which, [branch(piece) for piece in self.pieces], carry)


def forward(run, problem: Problem, along: Along):
    """Return the output [B, T, N, V] and a `LogSum` of [B, N, T], of a device's queries."""
    sinks, dtype = problem.sinks, problem.dtype
    problem = _without_sinks(problem, along)
    ring = Ring(problem, along)
    total = _nothing(problem)
    for step, message, following in ring:

        def add(piece, total, message=message):
            o, log_sum = piece.rows(total[0]), _rows_of(total[1], piece)
            o_part, part = run(piece.with_keys(message))
            log_sum, mine, others = log_sum.joined(part)
            o = _row_factor(mine) * o + _row_factor(others) * widened(o_part, o.dtype)
            statistics = jax.tree.map(lambda x, y: _put(x, y, 2, piece.row), total[1], log_sum)
            return _put(total[0], o, 1, piece.row), statistics

        total = step.run(add, total)
        total = ring.after(total, following)
    o, log_sum = total
    if sinks is not None:
        log_sum, share, _ = log_sum.joined(_log_sum_of_sinks(sinks, log_sum))
        o = _row_factor(share) * o
    return SplitOutput.from_float32(o, dtype, split=problem.split_output), log_sum


def backward(run, problem: Problem, o, log_sum: LogSum, do, dlse, along: Along, wanted):
    """Return a device's gradients."""
    whole, dtype = problem, problem.accumulator_dtype
    problem = _without_sinks(problem, along)
    # The keys of a row of scores are in several parts, and all parts subtract the same center.
    center = key_center.where_small(_key_center_of_all(problem, along), problem, log_sum)
    problem = dataclasses.replace(problem, key_center=center, partial_rows=True)
    ring = Ring(problem, along)
    query, bias = problem.query, problem.bias

    def zeros(like):
        return lax.full_like(query, 0, dtype, like.shape)

    sums = Gradients(
        zeros(query),
        zeros(problem.key),
        zeros(problem.value),
        zeros(problem.scale) if wanted.scale else None,
        zeros(bias) if wanted.bias else None,
        slopes=zeros(problem.slopes) if wanted.slopes else None,
        score_operands=tuple(
            zeros(x) if want else None
            for x, want in zip(problem.score_operands or (), wanted.score_operands, strict=False)
        ),
    )
    for step, message, following in ring:

        def add(piece, carry, message=message, step=step):
            dq, dscale, dbias, dtables, dk, dv = carry
            part = piece.with_keys(message)
            if wanted.bias:
                # In float32 the gradient of the bias is rounded once, at the end.
                part = dataclasses.replace(part, bias=part.bias.astype(dtype))
            rows = jax.tree.map(piece.rows, o), _rows_of(log_sum, piece), piece.rows(do)
            grads = run(part, *rows, None if dlse is None else piece.rows(dlse), sinks=False)
            if wanted.bias:
                at = (piece.row, 2), (step.first_key + piece.key, 3)
                dbias = _add(dbias, grads.bias, *at)
            dscale = dscale + grads.scale if wanted.scale else None
            # A tuple of operands may be None where nothing of it is wanted.
            of_part = grads.slopes, grads.score_operands or (None,) * len(wanted.score_operands)
            dtables = jax.tree.map(lambda x, y: x + y.astype(dtype), dtables, of_part)
            dk, dv = (_put(x, y, 1, piece.key) for x, y in ((dk, grads.key), (dv, grads.value)))
            return _add(dq, grads.query, (piece.row, 1)), dscale, dbias, dtables, dk, dv

        nothing = (lax.full_like(query, 0, x.dtype, x.shape) for x in (problem.key, problem.value))
        stay = sums.query, sums.scale, sums.bias, (sums.slopes, sums.score_operands)
        *stay, dk, dv = step.run(add, (*stay, *nothing))
        *stay, home = ring.after((*stay, (sums.key, sums.value)), following)
        dq, dscale, dbias, dtables = stay
        arrived = ring.home(step, (dk, dv))
        dk, dv = (x + y.astype(dtype) for x, y in zip(home, arrived, strict=True))
        slopes, score_operands = dtables
        sums = Gradients(dq, dk, dv, dscale, dbias, slopes=slopes, score_operands=score_operands)
    delta = (widened(o, dtype) * do.astype(dtype)).sum(axis=-1)
    delta = jnp.moveaxis(delta if dlse is None else delta - dlse, 1, 2)
    dlse = None if dlse is None else jnp.moveaxis(dlse, 1, 2)
    dsinks = sinks_gradient(whole.sinks, log_sum, delta) if wanted.sinks else None
    sums_of_rows = sums.query, sums.scale
    dq, dscale = key_center.whole_sums(whole, center, log_sum, delta, dlse, *sums_of_rows)
    return Gradients(
        dq.astype(problem.dtype),
        sums.key.astype(problem.dtype),
        sums.value.astype(problem.dtype),
        dscale,
        sums.bias.astype(bias.dtype) if wanted.bias else None,
        dsinks,
        sums.slopes,
        _in_own_dtypes(sums.score_operands, problem.score_operands),
    )


def _in_own_dtypes(gradients, operands):
    """Return the gradients of operands in their dtypes; None if there are none."""
    if not jax.tree.leaves(gradients):
        return None
    pairs = zip(gradients, operands, strict=True)
    return tuple(None if x is None else x.astype(of.dtype) for x, of in pairs)


class Ring:
    """The steps of the ring, and the blocks that devices hold in each.

    An iterator over steps. Each item is a step, the message with this device's block of keys and
    values, and the message of the next step, which is on its way; None in the last step. Call
    `after` before the next step.
    """

    def __init__(self, problem: Problem, along: Along):
        here = device(along)
        self.names, self.count = along.names, here.number
        steps = (_step(problem, here, back) for back in range(here.number))
        self.steps = [step for step in steps if any(step.used)]
        self._held = _message(problem.key, problem.value)

    def __iter__(self):
        if self.steps and self.steps[0].back:
            self._held = self._sent(self._held, 0, 0)
        for i, step in enumerate(self.steps):
            following = None
            if i + 1 < len(self.steps):
                following = self._sent(self._held, step.back, i + 1)
            yield step, self._held, following

    def after(self, results, following):
        """Return the results of a step behind a barrier: later messages wait for them."""
        if following is not None:
            results, self._held = lax.optimization_barrier((results, following))
        return results

    def home(self, step: Step, x):
        """Send the two gradients of a step's block to the device that owns the block."""
        if not step.back:
            return x
        n = self.count
        pairs = [(d, (d - step.back) % n) for d in range(n) if step.used[d]]
        return _opened(lax.ppermute(_message(*x), self.names, pairs))

    def _sent(self, message, back: int, number: int):
        """Send the blocks of step `number` from the devices that are `back` from the owners."""
        n, hop = self.count, self.steps[number].back - back
        needed = self._needed(number)
        pairs = [(d, (d + hop) % n) for d in range(n) if needed[(d + hop) % n]]
        return lax.ppermute(message, self.names, pairs)

    def _needed(self, number: int) -> list[bool]:
        """Return for each device whether it needs the block of a step, or has to pass it on."""
        step, n = self.steps[number], self.count
        if number + 1 == len(self.steps):
            return list(step.used)
        later, hop = self._needed(number + 1), self.steps[number + 1].back - step.back
        return [used or later[(d + hop) % n] for d, used in enumerate(step.used)]


def _message(key, value):
    """Stack keys and values of one shape: XLA overlaps kernels with one message at a time."""
    return jnp.stack([key, value]) if key.shape == value.shape else (key, value)


def _opened(message):
    """Return keys and values of a message; its halves are contiguous and need no copies."""
    if isinstance(message, tuple):
        return message
    return tuple(lax.index_in_dim(message, i, keepdims=False) for i in range(2))


def _step(problem: Problem, here: Device, back: int) -> Step:
    q_len, kv_len = problem.q_len, problem.kv_len
    owner = here.index - back + jnp.where(here.index < back, here.number, 0)
    q = Side(here.index * q_len, q_len, 0)
    kv = Side(owner * kv_len, kv_len, owner * kv_len)

    def at(distance):
        return Piece(part_of(problem, Part(q, kv, distance)))

    ahead = here.index < back
    if q_len == kv_len and back == 0:
        pieces = (at(0),)
    else:
        pieces = at(back * q_len), at((back - here.number) * q_len)
        if q_len != kv_len or len({jax.tree.structure(x.problem) for x in pieces}) == 1:
            pieces = (at(distance_per_batch_element(problem, q.first - kv.first)),)
    sees = [piece.problem.mask.sees(q_len, kv_len) is not False for piece in pieces]
    used = tuple(sees[-1] if d < back else sees[0] for d in range(here.number))
    which = ahead.astype(jnp.int32) if len(pieces) == 2 else 0
    if (positions := _causal_positions(problem)) is not None:
        ordered, number = _in_order(problem, positions, q, kv, own=back == 0)
        pieces, which = (*ordered, *pieces), jnp.where(number < 0, len(ordered) + which, number)
    return Step(back, used, pieces, which, kv.first)


def _causal_positions(problem: Problem) -> Positions | None:
    """The positions of a mask that is causal by positions, if both sides have the same halves."""
    windows = [x for x in problem.mask.windows if x.positions is not None]
    halves = problem.q_len == problem.kv_len and problem.q_len % 2 == 0
    causal = len(windows) == 1 and windows[0].low is None and windows[0].high == 0
    return windows[0].positions if halves and causal else None


def _in_order(problem: Problem, positions: Positions, q: Side, kv: Side, *, own: bool):
    """Return the calls of a step in `balanced_order`, which need no positions and are fast.

        own keys                       causal by index
        keys of a device before        all queries see the first half, no query the second
        keys of a device after         the second half of the queries sees all keys, the first none

    Returns:
        The pieces, and the index of this device's piece; -1 if its positions have another order.
    """
    half = q.length // 2

    def piece(*leaves, row=0, key=0, rows=q.length, keys=kv.length):
        block = {name: getattr(problem, name)[:, :keys] for name in ("key", "value")}
        part = dataclasses.replace(problem, mask=_without_positions(problem, *leaves), **block)
        sides = Side(q.first + row, rows, row), Side(kv.first + key, keys, kv.at + key)
        distance = distance_per_batch_element(problem, sides[0].first - sides[1].first)
        if own:
            distance = 0
        return Piece(part_of(part, Part(*sides, distance)), row, key)

    at_q = positions.query
    at_k = lax.dynamic_slice_in_dim(positions.keys, kv.at, kv.length, 1)
    if own:
        ordered = (at_k <= at_q).all() & (at_q[:, :-1] < at_k[:, 1:]).all()
        return (piece(Band(None, 0)),), jnp.where(ordered, 0, -1)

    def visible(q, k):
        return (k.max(axis=1) <= q.min(axis=1)).all()

    def hidden(q, k):
        return (k.min(axis=1) > q.max(axis=1)).all()

    before = visible(at_q, at_k[:, :half]) & hidden(at_q, at_k[:, half:])
    after = visible(at_q[:, half:], at_k) & hidden(at_q[:, :half], at_k)
    pieces = piece(keys=half), piece(row=half, rows=half)
    return pieces, jnp.where(before, 0, jnp.where(after, 1, -1))


def calls_in_order(problem: Problem) -> list[Problem]:
    """Return shapes and masks of the calls of `_in_order`; none for other masks."""
    if _causal_positions(problem) is None:
        return []

    def masked(x, *leaves):
        return dataclasses.replace(x, mask=_without_positions(problem, *leaves))

    half = problem.kv_len // 2
    q, k, v = (
        jax.ShapeDtypeStruct((x.shape[0], half, *x.shape[2:]), x.dtype)
        for x in (problem.query, problem.key, problem.value)
    )
    few_keys, few_queries = (
        dataclasses.replace(problem, **x) for x in (dict(key=k, value=v), dict(query=q))
    )
    return [masked(problem, Band(None, 0)), masked(few_keys), masked(few_queries)]


def _without_positions(problem: Problem, *leaves) -> Mask:
    """Return the mask where `leaves` replace the leaf that goes by positions."""
    rest = (x for x in problem.mask.leaves if x.kind is not LeafKind.POSITIONS)
    return Mask((*leaves, *rest))


def _key_center_of_all(problem: Problem, along: Along):
    """Return the center of all devices' keys, see `_problem.key_center`; None if it is not used.

    Each device takes the keys of its own shard that its own queries see.
    """
    p, here = problem, device(along)
    if not key_center.applies(p):
        return None
    q = Side(here.index * p.q_len, p.q_len, 0)
    kv = Side(here.index * p.kv_len, p.kv_len, here.index * p.kv_len)
    distance = 0 if p.q_len == p.kv_len else distance_per_batch_element(p, q.first - kv.first)
    own = part_of(p, Part(q, kv, distance))
    visible = own.visible_keys(key_center.sample_positions(p.kv_len)) if own.mask else None
    moments = lax.psum(key_center.moments(p, visible), along.names)
    return key_center.center(moments, p.dtype)


def _without_sinks(problem: Problem, along: Along) -> Problem:
    """Remove the sinks, which enter the sum of a row once, after all steps."""
    return with_all_keys(dataclasses.replace(problem, sinks=None), along)


def _nothing(p: Problem):
    """Return the output and the `LogSum` of rows without a key so far."""
    rows = p.batch, p.num_heads, p.q_len

    def full(shape, fill):
        return lax.full_like(p.query, fill, p.accumulator_dtype, shape)

    m = full(rows, 0) if p.large else None
    o, l_log2 = full((*p.query.shape[:3], p.value_dim), 0), full(rows, -jnp.inf)
    return o, LogSum(m, l_log2, l_log2 if p.max_logits else None)


def _log_sum_of_sinks(sinks, log_sum: LogSum) -> LogSum:
    """Return the `LogSum` of the sinks, one more score for each row with keys."""
    sinks, has_keys = sinks[None, :, None], log_sum.l_log2 > -jnp.inf
    if log_sum.m is None:
        return LogSum(None, jnp.where(has_keys, sinks * LOG2E, -jnp.inf))
    has_keys = has_keys & (sinks > -jnp.inf)
    return LogSum(jnp.where(has_keys, sinks, 0), jnp.where(has_keys, 0.0, -jnp.inf))


def _row_factor(x):
    """Reshape [B, N, T] to a factor of [B, T, N, V]."""
    return jnp.moveaxis(x, 1, 2)[..., None]


def _rows_of(log_sum: LogSum, piece: Piece) -> LogSum:
    return jax.tree.map(lambda x: piece.rows(x, axis=2), log_sum)


def _put(x, part, axis: int, first: int):
    """Return `x` with a part of it along an axis replaced."""
    return part if x.shape == part.shape else lax.dynamic_update_slice_in_dim(x, part, first, axis)


def _add(x, part, *starts):
    """Return `x` with a part added at `starts`, pairs of an index and an axis."""
    part = part.astype(x.dtype)
    if x.shape == part.shape:
        return x + part
    at = [jnp.int32(0)] * x.ndim
    for first, axis in starts:
        if x.shape[axis] != part.shape[axis]:
            at[axis] = jnp.asarray(first, jnp.int32)
    old = lax.dynamic_slice(x, at, part.shape)
    return lax.dynamic_update_slice(x, old + part, at)
