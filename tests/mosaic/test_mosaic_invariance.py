"""Bits of rows on a Hopper GPU, computed in many ways: `pytest -m gpu`.

test_mosaic_bits.py has the same on a CPU, by a model of the matrix units.
"""

import concurrent.futures
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.mosaic_cases import on_sms

import pallas_flash

pytestmark = pytest.mark.gpu

TRIALS, REQUESTS, TOKENS, CHUNK = 20, 4, 384, 256


class Config(NamedTuple):
    """A sequence of `length` tokens, and its options, which its programs share."""

    name: str
    head_dim: int
    heads: tuple[int, int]
    options: dict
    length: int = 1000
    batch_invariant: bool = True

    def __str__(self):
        return self.name

    @property
    def causal(self):
        return self.options.get("is_causal", False)

    def draw(self, random, *shape):
        """Queries, keys and values; large scores make the maximum move."""
        deviation = random.choice([1.0, 3.0])
        n, k = self.heads
        return tuple(
            jnp.asarray(random.normal(0, size, (*shape, heads, self.head_dim)), jnp.bfloat16)
            for heads, size in ((n, deviation), (k, 1), (k, 1))
        )

    def attention(self, q, k, v, **more):
        named = dict(batch_invariant=self.batch_invariant, implementation="mosaic")
        return pallas_flash.attention(q, k, v, return_lse=True, **named, **self.options, **more)

    def paged_attention(self, *arrays):
        named = dict(batch_invariant=self.batch_invariant, implementation="mosaic")
        options = {name: x for name, x in self.options.items() if name != "is_causal"}
        return pallas_flash.paged_attention(*arrays, return_lse=True, **named, **options)

    # ---------------------------------------------- programs: all numbers of a call are traced

    def alone(self, sequence):
        return [x[0] for x in self.attention(*(x[None] for x in sequence))]

    def in_batch(self, sequence, alone, others, place, lengths):
        """One of three sequences, of which the others have other lengths."""
        batch = (x.at[place].set(y) for x, y in zip(others, sequence, strict=True))
        lengths = lengths.at[place].set(self.length)
        results = self.attention(*batch, key_value_seq_lengths=lengths)
        return unequal([x[place] for x in results], alone)

    def packed(self, sequence, alone, others, before):
        """A document behind some tokens, with padding behind it."""
        at = (before, 0, 0)
        row = (
            lax.dynamic_update_slice(x, y, at)[None] for x, y in zip(others, sequence, strict=True)
        )
        place = jnp.arange(len(others[0]), dtype=jnp.int32)
        ids = jnp.where(place < before, 0, jnp.where(place < before + self.length, 1, -1))
        results = self.attention(*row, segment_ids=ids[None])
        return unequal(
            [lax.dynamic_slice_in_dim(x[0], before, self.length) for x in results], alone
        )

    def chunk(self, sequence, alone, others, start, stop, *, size):
        """Queries of a chunk, with other keys in the room behind its last one."""
        place = start + jnp.arange(size, dtype=jnp.int32)
        at = jnp.minimum(place, self.length - 1)
        q, k, v = sequence
        more = {}
        if self.causal:
            known = (jnp.arange(self.length) < stop)[:, None, None]
            k, v = (jnp.where(known, x, y) for x, y in zip((k, v), others[1:], strict=True))
            more = dict(query_offset=start, key_value_seq_lengths=stop[None])
        results = self.attention(q[at][None], k[None], v[None], **more)
        return unequal([x[0] for x in results], [x[at] for x in alone], place < stop)

    def pages(self, sequence, alone, others, cache, order, requests, start, *, size):
        """A chunk of one of four requests, with keys in pages in any order."""
        mine, new, lengths = requests
        ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(new, dtype=jnp.int32)])
        count = -(-self.length // size)
        table = order[: REQUESTS * count].reshape(REQUESTS, count)
        token = jnp.arange(TOKENS, dtype=jnp.int32) - ends[mine]
        ours, at = (token >= 0) & (token < new[mine]), jnp.clip(start + token, 0, self.length - 1)
        q, *kv = sequence
        padding = (0, -self.length % size), (0, 0), (0, 0)
        cache = (
            x.at[table[mine]].set(jnp.pad(y, padding).reshape(count, size, *y.shape[1:]))
            for x, y in zip(cache, kv, strict=True)
        )
        q = jnp.where(ours[:, None, None], q[at], others[0][:TOKENS])
        results = self.paged_attention(q, *cache, lengths, table, ends)
        return unequal(results, [x[at] for x in alone], ours)


SINKS, SLOPES = (jnp.float32(np.linspace(*x, 8)) for x in ((-1, 2), (0.01, 0.3)))
CONFIGS = [
    Config("causal, 64", 64, (4, 2), dict(is_causal=True)),
    Config(
        *("window and sinks, 128", 128, (8, 1)),
        dict(is_causal=True, local_window_size=(300, 0), sinks=SINKS),
    ),
    Config("slopes, 256", 256, (2, 1), dict(is_causal=True, alibi_slopes=SLOPES[:2])),
    Config(
        *("slopes, sinks and a window, 64", 64, (2, 2)),
        dict(
            is_causal=True, alibi_slopes=SLOPES[4:6], sinks=SINKS[2:4], local_window_size=(200, 0)
        ),
    ),
    Config("soft cap, 128", 128, (6, 2), dict(is_causal=True, logits_soft_cap=20.0)),
    # Long enough for clusters, which only the sequence alone has.
    Config("no mask, 128", 128, (2, 2), {}, 4200),
]


def unequal(results, alone, valid=True):
    """Return how many rows that count have other bits; NaN counts."""
    (o, lse), (o_alone, lse_alone) = results, alone
    same = (bits(o) == bits(o_alone)).all(axis=-1) & (bits(lse) == bits(lse_alone))
    rows = jnp.broadcast_to(jnp.asarray(valid), same.shape[:1])[:, None]
    return jnp.sum(rows & ~(same & jnp.isfinite(lse)))


def bits(x):
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def count_unequal(config, trials):
    """Return how many rows have other bits than in their sequence alone, and the calls."""
    random = np.random.default_rng(0)
    programs, calls, wrong = {}, 0, []
    for _ in range(trials):
        pending = list(calls_of(config, random))
        if not programs:
            programs = compiled(pending)
        sequence = pending[0][3][0]
        alone = programs["alone"](sequence)
        for name, _, _, arguments in pending[1:]:
            wrong.append(programs[name](sequence, alone, *arguments))
        calls += len(pending)
    return int(sum(wrong)), calls


def calls_of(config, random):
    """Yield calls: a name of the program, SMs, its function, and its arguments."""
    n = config.length
    sequence, others, row = (config.draw(random, *x) for x in ((n,), (3, n), (n + 1304,)))
    draw = functools.partial(random.integers, dtype=np.int32)
    yield "alone", 132, config.alone, (sequence,)
    yield "batch", 33, config.in_batch, (others, np.int32(draw(3)), draw(1, n + 1, 3))
    yield "packed", 66, config.packed, (row, np.int32(128 * draw(11)))
    behind = [x[:n] for x in row]
    cuts = [0]
    while cuts[-1] < n:
        cuts.append(min(n, cuts[-1] + int(draw(17, CHUNK + 1))))
    starts = [(CHUNK, *x) for x in itertools.pairwise(cuts)]
    starts += [(8, x, x + 8) for x in draw(n - 8, size=2)]
    starts += [(1, x, x + 1) for x in [n - 1, *draw(n, size=2)]]
    for size, start, stop in starts:
        run = functools.partial(config.chunk, size=size)
        yield f"chunk {size}", 132, run, (behind, np.int32(start), np.int32(stop))
    for size, sms in ((16, 132), (64, 66), (128, 33)) * 2 if config.causal else ():
        count = REQUESTS * -(-n // size) + 5
        _, *cache = config.draw(random, count, size)
        new, mine = draw(0, 31, REQUESTS), np.int32(draw(REQUESTS))
        new[mine] = random.choice([1, 8, draw(2, CHUNK + 1)])
        lengths = new + draw(0, n - new + 1)
        start = lengths[mine] - new[mine]
        requests = mine, new, lengths
        run = functools.partial(config.pages, size=size)
        order = random.permutation(count).astype(np.int32)
        yield f"pages of {size}", sms, run, (behind, cache, order, requests, start)


def compiled(calls):
    """Compile a program for each name."""
    programs, alone = {}, None
    for name, sms, run, arguments in calls:
        if name in programs:
            continue
        jax.clear_caches()  # They do not know the number of SMs.
        with pytest.MonkeyPatch.context() as patch:
            on_sms(patch, sms)
            if alone is None:
                sequence = arguments[0]
                alone = jax.eval_shape(run, sequence)
                programs[name] = jax.jit(run).lower(sequence)
            else:
                programs[name] = jax.jit(run).lower(sequence, alone, *arguments)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda x: x.compile(), programs.values())
        return dict(zip(programs, found, strict=True))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_have_the_same_bits(config):
    """All tests together make more than 2,000 calls."""
    wrong, calls = count_unequal(config, TRIALS)
    print(f"{config}: {calls} calls, {wrong} unequal rows")
    assert wrong == 0 and calls >= 17 * TRIALS


def test_rows_have_other_bits_without_the_option():
    wrong, _ = count_unequal(CONFIGS[0]._replace(batch_invariant=False), 2)
    assert wrong > 0
