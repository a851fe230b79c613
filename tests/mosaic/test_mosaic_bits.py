"""Bits of Hopper's matrix units, and of rows of the forward, emulated.

At one tile a row's output and LSE have the same bits, whatever is computed beside it. The emulator
knows neither the order of a reduction in a card nor what the compiler fuses: see
`test_blocks_have_equal_arithmetic` of test_mosaic_machine_code.py for that.
"""

import contextlib
import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support import mosaic_emulator as emulator
from support.mosaic_cases import checked, on_sms, run_forward

from pallas_flash._arguments.paged import validate
from pallas_flash._autodiff.vjp import public_rows
from pallas_flash._backends import mosaic
from pallas_flash._backends.mosaic import paged
from pallas_flash._problem import features
from pallas_flash._problem.tile_sizes import ForwardTile, TileSizes

# ------------------------------------------------------------------------------------------------
# Matrix units
# ------------------------------------------------------------------------------------------------


def terms(*numbers, dtype="bfloat16"):
    """Factors of these numbers, which are numbers or pairs of factors, and of zeros behind them."""
    pairs = [x if isinstance(x, tuple) else (x, 1.0) for x in numbers]
    a, b = np.array(pairs + [(0.0, 0.0)] * (-len(pairs) % 16)).T
    return a[None].astype(jnp.dtype(dtype)), b[:, None].astype(jnp.dtype(dtype))


# Accumulator, factors, and the result of the matrix units.
KNOWN = {
    "results are truncated": (1, terms(1.5 * 2**-24), 1),
    "negative ones towards zero": (-1, terms(-1.5 * 2**-24), -1),
    "25 fractional bits are summed": (1, terms(*[2**-25] * 4), 1 + 2**-23),
    "a 26th is lost": (1, terms(*[2**-26] * 8), 1),
    "a negative 26th as well": (1, terms(*[-(2**-26)] * 8), 1),
    "the accumulator is truncated, too": (2**-26, terms(1, -1), 0),
    "a sum's order is lost": (0, terms(1, 2**-25, -1), 2**-25),
    "exponents of factors": (0, terms((1.5, 1.5), (1.5, -1.5), 2**-25), 2**-25),
    "zeros have no exponent": (0, terms((0, 2.0**100), 2**-60), 2**-60),
    "groups of 16": (0, terms(1, -1, *[0] * 14, 2**-30), 2**-30),
    "one group": (0, terms(1, -1, *[0] * 13, 2**-30), 0),
    "float16": (0, terms((1 + 2**-10, 1 + 2**-10), dtype="float16"), 1 + 2**-9 + 2**-20),
    "denormals": (0, terms(2**-24, (2**-24, 2**-23), dtype="float16"), 2**-24),
    "infinity": (1, terms(np.inf, 1), np.inf),
}
# Plain float32 sums have other bits.
DIFFERENT = {"results are truncated", "negative ones towards zero", "a 26th is lost"}


@pytest.mark.parametrize("name", KNOWN)
def test_matrix_units(name):
    acc, (a, b), expected = KNOWN[name]
    acc = np.full((1, 1), acc, np.float32)
    assert emulator.matrix_units(a, b, acc) == np.float32(expected)
    if name in DIFFERENT:
        assert emulator.float32_sums(a, b, acc) != np.float32(expected)


# ------------------------------------------------------------------------------------------------
# Rows of the forward
# ------------------------------------------------------------------------------------------------

T = 300
TILE = ForwardTile(2, 128, 1)


def draw(seed, length=T, head_dim=64):
    """Return q, k and v with such scores that the maximum moves by more than the threshold."""
    random = np.random.default_rng(seed)
    kinds = (2, 3.0), (1, 1.0), (1, 1.0)
    return [
        jnp.asarray(random.normal(0, deviation, (1, length, heads, head_dim)), jnp.bfloat16)
        for heads, deviation in kinds
    ]


QKV = draw(0)


@contextlib.contextmanager
def emulated(sms, splits=2):
    """A card with `sms` SMs, on which packed query heads have `splits` KV splits by default."""
    with (
        pytest.MonkeyPatch.context() as patch,
        emulator.emulated(patch, emulator.matrix_units),
    ):
        on_sms(patch, sms)
        patch.setattr(paged, "num_splits", lambda *_: splits)
        yield


def as_integers(o, lse):
    return np.asarray(o).view(np.uint16), np.asarray(lse).view(np.uint32)


def rows(qkv, tile=TILE, sms=132, splits=2, **options):
    """Output and LSE as integers, [B, T, ...]."""
    sizes = TileSizes(forward=tile)
    with emulated(sms, splits):
        o, log_sum = mosaic.forward(checked(qkv, dict(is_causal=True) | options), sizes)
    return as_integers(o, public_rows(log_sum)[0])


def in_batch():
    others = draw(1), QKV, draw(2)
    return [x[1:2] for x in rows([jnp.concatenate(x) for x in zip(*others, strict=True)])]


def chunk(start, stop, room=0, **options):
    """Queries of a chunk with the keys up to its end, and room behind them."""
    q, k, v = QKV
    padding = (0, 0), (0, room), (0, 0), (0, 0)
    k, v = (jnp.pad(x[:, :stop], padding, constant_values=jnp.nan) for x in (k, v))
    if room:
        options["key_value_seq_lengths"] = jnp.array([stop])
    return rows([q[:, start:stop], k, v], query_offset=start, **options)


def document(before, after=50):
    """The sequence as a document between two others."""
    documents = draw(3, before), QKV, draw(4, after)
    packed = [jnp.concatenate(x, axis=1) for x in zip(*documents, strict=True)]
    ids = jnp.repeat(jnp.arange(3), jnp.array([before, T, after]))[None]
    return [x[:, before : before + T] for x in rows(packed, segment_ids=ids)]


alone = functools.cache(functools.partial(rows, QKV))


def differ(x, y):
    """Return how many rows of all heads differ in output or LSE."""
    (o, lse), (o_alone, lse_alone) = x, y
    return np.sum((o != o_alone).any(axis=-1) | (lse != lse_alone))


CLUSTER = ForwardTile(2, 128, 1, cluster_size=2)
SAME = {
    "three warpgroups": lambda: rows(QKV, ForwardTile(3, 128, 1)),
    "three stages, output through queries": lambda: rows(QKV, ForwardTile(2, 128, 0, 3)),
    "cluster": lambda: rows(QKV, CLUSTER),
    "one CTA": lambda: rows(QKV, sms=1),
    "one cluster": lambda: rows(QKV, CLUSTER, sms=2),
    "batch": in_batch,
    "document behind 128": lambda: document(128),
    "document behind 256": lambda: document(256),
}


@pytest.mark.parametrize("name", cases.default([x for x in SAME if "256" not in x], SAME))
def test_rows_have_the_same_bits(name):
    assert differ(SAME[name](), alone()) == 0


@pytest.mark.parametrize(
    "options",
    [{}, dict(room=150), dict(local_window_size=(100, 0))],
    ids=["causal", "room", "window"],
)
@pytest.mark.parametrize(("start", "stop"), [(37, 120), (100, 300), (128, 256), (299, 300)])
def test_rows_of_a_chunk_have_the_same_bits(start, stop, options):
    whole = alone(**{name: x for name, x in options.items() if name != "room"})
    assert differ(chunk(start, stop, **options), [x[:, start:stop] for x in whole]) == 0


# Today's choices that change bits.
OTHER = {
    "blocks of 64 keys": lambda: rows(QKV, ForwardTile(2, 64, 1)),
    "blocks of 176 keys": lambda: rows(QKV, ForwardTile(2, 176, 1)),
    "document behind 16": lambda: document(16),
    "document behind 64": lambda: document(64),
}


@pytest.mark.parametrize("name", cases.default(["blocks of 64 keys", "document behind 64"], OTHER))
def test_rows_have_other_bits(name):
    assert differ(OTHER[name](), alone()) > 0


def test_splits_change_bits(monkeypatch):
    """How many there are in decoding depends on the batch and on the SMs; one changes no bit."""
    monkeypatch.setattr(features, "MANY_KEYS", T - 1)

    def decoded(splits):
        q, k, v = QKV
        tile = ForwardTile(2, 128, 0, 3)
        return rows([q[:, -1:], k, v], tile, splits=splits, query_offset=T - 1)

    assert differ(decoded(1), [x[:, -1:] for x in alone()]) == 0
    assert differ(decoded(1), decoded(2)) > 0


# ------------------------------------------------------------------------------------------------
# `batch_invariant=True`: tiles from the table, whatever a call is
# ------------------------------------------------------------------------------------------------


KEYWORDS = [
    x.name for x in inspect.signature(validate).parameters.values() if x.kind == x.KEYWORD_ONLY
]


class Sequence(NamedTuple):
    """A sequence and its options. Each method computes some of its rows in another way.

    Methods return which rows these are, and their output and LSE.
    """

    head_dim: int
    options: dict
    batch_invariant: bool

    def draw(self, seed, length=T):
        return draw(seed, length, self.head_dim)

    def rows(self, qkv, sms=132, **more):
        options = self.options | dict(batch_invariant=self.batch_invariant) | more
        with emulated(sms):
            o, log_sum = run_forward(checked(qkv, options))
        return as_integers(o, public_rows(log_sum)[0])

    def chunk(self, start, stop, room, **more):
        """Some queries, with room behind the keys that their last one sees."""
        q, *kv = self.draw(0)
        if causal := self.options.get("is_causal"):
            more |= dict(query_offset=start)
        end, (_, *others) = stop if causal else T, self.draw(1, room)
        k, v = (jnp.concatenate([x[:, :end], y], 1) for x, y in zip(kv, others, strict=True))
        more |= dict(key_value_seq_lengths=jnp.array([end])) if room else {}
        return slice(start, stop), self.rows([q[:, start:stop], k, v], **more)

    def document(self, before):
        """Between two documents, of which the last one is padding."""
        documents = self.draw(3, before), self.draw(0), self.draw(4, 50)
        packed = [jnp.concatenate(x, axis=1) for x in zip(*documents, strict=True)]
        ids = jnp.repeat(jnp.array([0, 1, -1]), jnp.array([before, T, 50]))[None]
        results = self.rows(packed, segment_ids=ids)
        return slice(T), [x[:, before : before + T] for x in results]

    def batch(self):
        """In a batch of sequences of other lengths."""
        batch = [self.draw(n) for n in (1, 2, 3, 0)]
        qkv = [jnp.concatenate(x) for x in zip(*batch, strict=True)]
        results = self.rows(qkv, key_value_seq_lengths=jnp.array([7, 200, 130, T]), sms=33)
        return slice(T), [x[-1:] for x in results]

    def pages(self, page_size, sms):
        """A chunk, a token and drafts in requests of their own, between others."""
        q, *kv = (x[0] for x in self.draw(0))
        count = -(-T // page_size)
        pages = jax.random.permutation(jax.random.key(2), count + 9)[:count].astype(jnp.int32)
        shape = count + 9, page_size, 1, self.head_dim
        cache = [
            jax.random.normal(jax.random.key(3), shape, x.dtype)
            .at[pages]
            .set(jnp.pad(x, ((0, -T % page_size), (0, 0), (0, 0))).reshape(count, *shape[1:]))
            for x in kv
        ]
        where, lengths = np.r_[100:220, 299, 290:298], jnp.int32([220, 300, 298])
        requests = lengths, jnp.stack([pages] * 3), jnp.int32([0, 120, 121, 129])
        options = self.options | dict(batch_invariant=self.batch_invariant, return_lse=True)
        given = {name: options.get(name) for name in KEYWORDS}
        with emulated(sms):
            results = paged.forward(validate(q[where], *cache, *requests, **given))
        return where, [x[None] for x in as_integers(*results)]


WINDOW = dict(is_causal=True, local_window_size=(100, 0))
SEQUENCES = {
    "causal, 64": (64, dict(is_causal=True)),
    "window and sinks, 128": (128, WINDOW | dict(sinks=jnp.float32([0.5, -1]))),
    "slopes, 256": (256, dict(is_causal=True, alibi_slopes=jnp.float32([0.02, 0.1]))),
    "no mask, 256": (256, {}),
    "soft cap and no mask, 128": (128, dict(logits_soft_cap=20.0)),
}
WAYS = {
    "batch": lambda x: x.batch(),
    "document": lambda x: x.document(128),
    "far document": lambda x: x.document(384),
    "one query": lambda x: x.chunk(299, 300, 300),
    "eight queries": lambda x: x.chunk(37, 45, 0),
    "chunk": lambda x: x.chunk(100, 300, 20, sms=1),
    "pages of 16": lambda x: x.pages(16, 132),
    "pages of 64": lambda x: x.pages(64, 33),
    "pages of 128": lambda x: x.pages(128, 2),
}
EACH = [
    (name, way)
    for name, (_, options) in SEQUENCES.items()
    for way in WAYS
    if "pages" not in way or "is_causal" in options
]


def unequal(name, way, batch_invariant):
    """Return how many rows have other bits, if computed this way, than in their sequence alone."""
    where, results = WAYS[way](Sequence(*SEQUENCES[name], batch_invariant))
    return differ(results, [x[:, where] for x in whole(name, batch_invariant)])


@functools.cache
def whole(name, batch_invariant):
    sequence = Sequence(*SEQUENCES[name], batch_invariant)
    return sequence.rows(sequence.draw(0))


DEFAULT = [x for x in EACH if x[0] == "causal, 64"] + [("no mask, 256", "chunk")]


@pytest.mark.parametrize(("name", "way"), cases.default(DEFAULT, EACH))
def test_batch_invariant_rows(name, way):
    assert unequal(name, way, batch_invariant=True) == 0


@pytest.mark.parametrize("name", cases.default(["causal, 64"], SEQUENCES))
def test_rows_without_batch_invariance(name):
    assert any(unequal(x, way, batch_invariant=False) for x, way in EACH if x == name)
