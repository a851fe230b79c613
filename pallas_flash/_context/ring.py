"""Keys and values go round the devices, and each computes with what it holds.

    step s of device d      o_s, lse_s of its queries and the keys of device d - s
                            while the keys of the next step are on their way to it
    at the end              o = sum_s exp(lse_s - lse) o_s      lse = log sum_s exp(lse_s)

The backward goes round in the same way: p = exp(s - lse) needs the whole LSE alone, so each step
gives a part of dq, which stays, and one of dk and dv, which is sent home at once.

What a step's keys are to a device's queries is known when the program is compiled, but for one bit:
whether they are ahead of them (d < s), where the ring closes. Where nothing can be seen, by a
window or causally, nothing is computed, and blocks that no device needs are not sent.

A program has all steps written out. A barrier after each keeps the compiler from sending more than
one block ahead, so that a device holds two of them at a time.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash._context.parts import (
    Device,
    Part,
    Side,
    device,
    for_each_example,
    part_of,
    visit,
    with_all_keys,
)
from pallas_flash._partition import Along
from pallas_flash._problem import Gradients, Problem
from pallas_flash._scores import LOG2E, LogSum, sinks_gradient

# How many devices a step looks back, and for each device whether it sees what it finds there.
Use = tuple[int, tuple[bool, ...]]


class Step(NamedTuple):
    """One block of keys, for every device another one.

    Attributes:
        back: how many devices back the keys' home is.
        used: for each device, whether it may see any of them.
        behind: the part, where the keys come before the queries or are their own.
        ahead: the part where they come after, on devices with a number below `back`.
        first_key: the position of the first key.
    """

    back: int
    used: tuple[bool, ...]
    behind: Problem
    ahead: Problem
    first_key: Any

    def run(self, here: Device, fn, carry):
        """`fn(part, carry)` on a device that sees anything, elsewhere `carry`."""

        def by(part):
            return lambda carry: visit(part, lambda carry: fn(part, carry), carry)

        if self.behind is self.ahead:
            return by(self.behind)(carry)
        return lax.cond(here.index < self.back, by(self.ahead), by(self.behind), carry)


def forward(run, problem: Problem, along: Along):
    """The output [B, T, N, V] and a `LogSum` of [B, N, T], of a device's queries."""
    sinks, dtype = problem.sinks, problem.dtype
    here, problem = device(along), _without_sinks(problem, along)
    ring = Ring(problem, along, here)
    total = _nothing(problem)
    for step, blocks, following in ring:

        def add(part, total, blocks=blocks):
            o, log_sum = run(_with_blocks(part, blocks))
            log_sum, mine, others = total[1].joined(log_sum)
            return _by_row(mine) * total[0] + _by_row(others) * o, log_sum

        total = step.run(here, add, total)
        total = ring.after(total, following)
    o, log_sum = total
    if sinks is not None:
        log_sum, share, _ = log_sum.joined(_of_sinks(sinks, log_sum))
        o = _by_row(share) * o
    return o.astype(dtype), log_sum


def backward(run, problem: Problem, o, log_sum: LogSum, do, dlse, along: Along, wanted):
    """A device's share of the gradients."""
    sinks, dtype = problem.sinks, problem.accumulator_dtype
    here, problem = device(along), _without_sinks(problem, along)
    ring = Ring(problem, along, here)
    query, bias = problem.query, problem.bias

    def zeros(like):
        return lax.full_like(query, 0, dtype, like.shape)

    sums = Gradients(
        zeros(query),
        zeros(problem.key),
        zeros(problem.value),
        zeros(problem.scale) if wanted.scale else None,
        zeros(bias) if wanted.bias else None,
    )
    for step, blocks, following in ring:

        def add(part, carry, blocks=blocks, step=step):
            dq, dscale, dbias, _, _ = carry
            if wanted.bias:
                # So that its gradient is rounded once.
                part = dataclasses.replace(part, bias=part.bias.astype(dtype))
            grads = run(_with_blocks(part, blocks), o, log_sum, do, dlse, sinks=False)
            if wanted.bias:
                dbias = _add_keys(dbias, grads.bias, step.first_key)
            dscale = dscale + grads.scale if wanted.scale else None
            return dq + grads.query, dscale, dbias, grads.key, grads.value

        nothing = (lax.full_like(query, 0, x.dtype, x.shape) for x in blocks)
        carry = sums.query, sums.scale, sums.bias, *nothing
        dq, dscale, dbias, dk, dv = step.run(here, add, carry)
        dq, dscale, dbias, home = ring.after((dq, dscale, dbias, (sums.key, sums.value)), following)
        arrived = ring.home(step, (dk, dv))
        dk, dv = (x + y.astype(dtype) for x, y in zip(home, arrived, strict=True))
        sums = Gradients(dq, dk, dv, dscale, dbias)
    dsinks = None
    if wanted.sinks:
        delta = (o.astype(dtype) * do.astype(dtype)).sum(axis=-1)
        delta = delta if dlse is None else delta - dlse
        dsinks = sinks_gradient(sinks, log_sum, jnp.moveaxis(delta, 1, 2))
    return Gradients(
        sums.query.astype(problem.dtype),
        sums.key.astype(problem.dtype),
        sums.value.astype(problem.dtype),
        sums.scale,
        sums.bias.astype(bias.dtype) if wanted.bias else None,
        dsinks,
    )


class Ring:
    """The steps, and the blocks that devices hold in each.

    Iterating gives a step, this device's block of keys and values, and that of the next step, on
    its way; None after the last one. `after` has to be called before the next step.
    """

    def __init__(self, problem: Problem, along: Along, here: Device):
        self.names, self.count = along.names, here.number
        steps = (_step(problem, here, back) for back in range(here.number))
        self.steps = [step for step in steps if any(step.used)]
        self._held = problem.key, problem.value

    def __iter__(self):
        if self.steps and self.steps[0].back:
            self._held = self._sent(self._held, 0, 0)
        for i, step in enumerate(self.steps):
            following = None
            if i + 1 < len(self.steps):
                following = self._sent(self._held, step.back, i + 1)
            yield step, self._held, following

    def after(self, results, following):
        """The results of a step: before they are there, nothing more is sent."""
        if following is not None:
            results, self._held = lax.optimization_barrier((results, following))
        return results

    def home(self, step: Step, x):
        """What devices found for the keys of a step, where these are at home."""
        if not step.back:
            return x
        n = self.count
        pairs = [(d, (d - step.back) % n) for d in range(n) if step.used[d]]
        return lax.ppermute(x, self.names, pairs)

    def _sent(self, blocks, back: int, number: int):
        """The blocks of a step, from where they were, so many devices from home."""
        n, hop = self.count, self.steps[number].back - back
        needed = self._needed(number)
        pairs = [(d, (d + hop) % n) for d in range(n) if needed[(d + hop) % n]]
        return lax.ppermute(blocks, self.names, pairs)

    def _needed(self, number: int) -> list[bool]:
        """For each device, whether it needs the blocks of a step, or has to pass them on."""
        step, n = self.steps[number], self.count
        if number + 1 == len(self.steps):
            return list(step.used)
        later, hop = self._needed(number + 1), self.steps[number + 1].back - step.back
        return [used or later[(d + hop) % n] for d, used in enumerate(step.used)]


def _step(problem: Problem, here: Device, back: int) -> Step:
    q_len, kv_len = problem.q_len, problem.kv_len
    owner = here.index - back + jnp.where(here.index < back, here.number, 0)
    q = Side(here.index * q_len, q_len, 0)
    kv = Side(owner * kv_len, kv_len, owner * kv_len)

    def at(distance):
        return part_of(problem, Part(q, kv, distance))

    def alike():
        return at(for_each_example(problem, q.first - kv.first))

    if q_len != kv_len:
        behind = ahead = alike()
    elif back == 0:
        behind = ahead = at(0)
    else:
        behind, ahead = at(back * q_len), at((back - here.number) * q_len)
        if jax.tree.structure(behind) == jax.tree.structure(ahead):
            behind = ahead = alike()
    sees = [part.mask.sees(q_len, kv_len) is not False for part in (ahead, behind)]
    used = tuple(sees[d >= back] for d in range(here.number))
    return Step(back, used, behind, ahead, kv.first)


def _without_sinks(problem: Problem, along: Along) -> Problem:
    """They are in the sum of a row once, after all steps."""
    return with_all_keys(dataclasses.replace(problem, sinks=None), along)


def _with_blocks(part: Problem, blocks) -> Problem:
    key, value = blocks
    return dataclasses.replace(part, key=key, value=value)


def _nothing(p: Problem):
    """The output and the `LogSum` of queries that have seen nothing yet."""
    rows = p.batch, p.num_heads, p.q_len

    def full(shape, fill):
        return lax.full_like(p.query, fill, p.accumulator_dtype, shape)

    m = full(rows, 0) if p.large else None
    return full((*p.query.shape[:3], p.value_dim), 0), LogSum(m, full(rows, -jnp.inf))


def _of_sinks(sinks, log_sum: LogSum) -> LogSum:
    """One more score for each row that sees anything."""
    sinks, alive = sinks[None, :, None], log_sum.l_log2 > -jnp.inf
    if log_sum.m is None:
        return LogSum(None, jnp.where(alive, sinks * LOG2E, -jnp.inf))
    alive = alive & (sinks > -jnp.inf)
    return LogSum(jnp.where(alive, sinks, 0), jnp.where(alive, 0.0, -jnp.inf))


def _by_row(x):
    """[B, N, T] as a factor of [B, T, N, V]."""
    return jnp.moveaxis(x, 1, 2)[..., None]


def _add_keys(dbias, part, first_key):
    """The sum with a part added, which has keys from `first_key` on."""
    if dbias.shape[3] == 1:
        return dbias + part
    length = part.shape[3]
    old = lax.dynamic_slice_in_dim(dbias, first_key, length, 3)
    return lax.dynamic_update_slice_in_dim(dbias, old + part, first_key, 3)
