"""Bits of Hopper's matrix units, and of rows of the forward, emulated.

At one tile a row's output and LSE have the same bits, whatever is computed beside it. The emulator
knows neither the order of a reduction in a card nor what the compiler fuses: see
`test_blocks_have_equal_arithmetic` of test_mosaic_machine_code.py for that.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support import mosaic_emulator as emulator
from support.mosaic_cases import checked, on_sms

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


def draw(seed, length=T):
    """Return q, k and v with such scores that the maximum moves by more than the threshold."""
    random = np.random.default_rng(seed)
    kinds = (2, 3.0), (1, 1.0), (1, 1.0)
    return [
        jnp.asarray(random.normal(0, deviation, (1, length, heads, 64)), jnp.bfloat16)
        for heads, deviation in kinds
    ]


QKV = draw(0)


def rows(qkv, tile=TILE, sms=132, **options):
    """Output and LSE as integers, [B, T, ...]."""
    sizes = TileSizes(forward=tile)
    with (
        pytest.MonkeyPatch.context() as patch,
        emulator.emulated(patch, emulator.matrix_units),
    ):
        on_sms(patch, sms)
        o, log_sum = mosaic.forward(checked(qkv, dict(is_causal=True) | options), sizes)
    lse, *_ = public_rows(log_sum)
    return np.asarray(o).view(np.uint16), np.asarray(lse).view(np.uint32)


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
        monkeypatch.setattr(paged, "num_splits", lambda *_: splits)
        q, k, v = QKV
        tile = ForwardTile(2, 128, 0, 3)
        return rows([q[:, -1:], k, v], tile, query_offset=T - 1)

    assert differ(decoded(1), [x[:, -1:] for x in alone()]) == 0
    assert differ(decoded(1), decoded(2)) > 0


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_of_pages_have_the_same_bits(splits, monkeypatch):
    """Without KV splits: a chunk, a token and drafts in one step, as in a forward without pages."""
    on_sms(monkeypatch, 2)
    monkeypatch.setattr(paged, "num_splits", lambda *_: splits)
    q = jax.random.normal(jax.random.key(0), (T, 4, 64), jnp.bfloat16)
    k, v = jax.random.normal(jax.random.key(1), (2, T, 1, 64), jnp.bfloat16)
    pages = jax.random.permutation(jax.random.key(2), 25)[: -(-T // 16)].astype(jnp.int32)
    cache = [
        jnp.zeros((25, 16, 1, 64), x.dtype)
        .at[pages]
        .set(jnp.pad(x, ((0, -T % 16), (0, 0), (0, 0))).reshape(-1, 16, 1, 64))
        for x in (k, v)
    ]
    names = "key_scales", "value_scales", "scale", "local_window_size", "logits_soft_cap"
    names += "sinks", "alibi_slopes", "precision"
    rows, lengths = np.r_[100:220, 299, 290:298], jnp.int32([220, 300, 298])
    requests = lengths, jnp.stack([pages] * 3), jnp.int32([0, 120, 121, 129])
    options = dict.fromkeys(names) | dict(return_lse=True, implementation=None)
    problem = validate(q[rows], *cache, *requests, **options)
    with emulator.emulated(pytest.MonkeyPatch(), emulator.matrix_units):
        results = paged.forward(problem)
        call = checked((q[None], k[None], v[None]), dict(is_causal=True))
        o, log_sum = mosaic.forward(call, TileSizes(forward=TILE))
    different = [
        (np.asarray(x) != np.asarray(y)[0, rows]).any()
        for x, y in zip(results, (o, public_rows(log_sum)[0]), strict=True)
    ]
    assert any(different) == (splits > 1)
