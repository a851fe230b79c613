"""The named cases: each is there to kill a class of bug. They drive every pass of every
implementation.

All sizes of a case differ, batch and heads are above one, and lengths are no multiples of a tile
unless the name says so.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.oracle import ExactScoreMod, visible

from pallas_flash import ScoreMod
from pallas_flash._call import attention
from pallas_flash.masks import (
    BlockCausal,
    BlockMask,
    Chunked,
    Dilated,
    Neighborhood,
    Predicate,
    PrefixLM,
    Segments,
    SharedPrefix,
    Tree,
    arguments_from_cu_seqlens,
)

Random = np.random.Generator


def _none(random: Random, case: "Case") -> dict[str, Any]:
    return {}


def _array(x, dtype=None):
    """Rounded by NumPy: `jnp.asarray` compiles a program for each shape, long on a GPU."""
    return jax.device_put(np.asarray(x, dtype and jnp.dtype(dtype)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem without its numbers; `options` draws the keyword arguments of `attention`."""

    name: str
    B: int = 2
    T: int = 75
    S: int = 91
    N: int = 4
    K: int = 2
    H: int = 24
    V: int = 40
    options: Callable[[Random, "Case"], dict[str, Any]] = _none
    # Number that all scores have besides, by a feature that all queries and all keys share.
    level: float = 0.0
    # A number that is added to two features of all keys; queries are divided by it there.
    key_bias: float = 0.0
    # A number that is added to all values. Cotangents of the output then sum to zero over channels,
    # so that it cancels in dp and in delta.
    value_mean: float = 0.0

    def problem(self, dtype="float32", seed: int = 0):
        """(q, k, v), (do, dlse) and the keyword arguments."""
        c, random = self, np.random.default_rng([seed, *self.name.encode()])

        def normal(*shape):
            return _array(random.standard_normal(shape), dtype)

        q, k, v = normal(c.B, c.T, c.N, c.H), normal(c.B, c.S, c.K, c.H), normal(c.B, c.S, c.K, c.V)
        if c.level:
            shared = _array(c.level * c.H**0.5 / 4, "bfloat16").astype(dtype)
            # The last one: a chain of float32 additions is rounded to its size once.
            q, k = q.at[..., -1].set(4), k.at[..., -1].set(shared)
        if c.key_bias:
            q = q.at[..., :2].multiply(1 / c.key_bias)
            k = k.at[..., :2].add(c.key_bias)
        dlse = _array(random.standard_normal((c.B, c.T, c.N)), "float32")
        do = normal(c.B, c.T, c.N, c.V)
        if c.value_mean:
            v, do = v + c.value_mean, do - do.mean(-1, keepdims=True)
        return (q, k, v), (do, dlse), c.options(random, c)

    def scaled(self, factor: int) -> "Case":
        """The same case with longer sequences, for a real card: one stays one, tiles whole."""
        if factor == 1:
            return self
        T, S = (x if x == 1 else x * factor + (x % 64 > 0) for x in (self.T, self.S))
        return dataclasses.replace(self, T=T, S=S)


def _fixed(**options):
    return lambda random, case: options


def _lengths(random, c):
    return dict(
        query_seq_lengths=_ints(random, 1, c.T, c.B),
        key_value_seq_lengths=_ints(random, 1, c.S, c.B),
    )


def _zero_lengths(random, c):
    return dict(
        query_seq_lengths=_array([c.T // 2, c.T], "int32"),
        key_value_seq_lengths=_array([c.S // 3, 0], "int32"),
    )


def _sorted_ids(random, c, length):
    return _array(np.sort(random.integers(0, 4, (c.B, length)), axis=1), "int32")


def _documents(random, c):
    return dict(segment_ids=_sorted_ids(random, c, c.T))


def _document_pairs(random, c):
    return dict(segment_ids=(_sorted_ids(random, c, c.T), _sorted_ids(random, c, c.S)))


def _shuffled_ids(random, c):
    return dict(segment_ids=(_ints(random, -2, 2, (c.B, c.T)), _ints(random, -2, 2, (c.B, c.S))))


def _foreign_ids(random, c):
    return dict(
        segment_ids=(_array(np.zeros((c.B, c.T)), "int32"), _array(np.ones((c.B, c.S)), "int32"))
    )


def _offsets(random, c):
    return dict(query_offset=_ints(random, -c.T, c.S, c.B), is_causal=True)


def _positions(random, c):
    """In no order, of keys for all examples alike; some positions have no token, some several."""
    return dict(
        query_positions=_ints(random, -5, c.S, (c.B, c.T)),
        key_value_positions=_array(random.permutation(2 * c.S)[None, : c.S] - c.S // 2, "int32"),
    )


def _array_and_function(random, c):
    """The function has no arrays, and asks for the batch element and the head."""
    [array] = _mask("TS", 0.7)(random, c).values()
    return dict(mask=array & ~Predicate(lambda b, h, q, k: (q // 9 + h) % 2 == b))


def _packed(random, c):
    """Three sequences with other numbers of queries than of keys, and padding behind them."""
    rows = []
    for _ in range(c.B):
        ends = (np.sort(random.integers(0, n + 1, 3)) for n in (c.T, c.S))
        of_q, of_k = (_array([0, *x], "int32") for x in ends)
        rows.append(arguments_from_cu_seqlens(of_q, of_k, c.T, c.S))
    packed = jax.tree.map(lambda *x: _array(np.concatenate(x)), *rows)
    return dict(is_causal=True, **packed)


def _everything(random, c):
    return dict(
        is_causal=True,
        local_window_size=(40, 7),
        query_offset=_ints(random, 0, c.S // 2, c.B),
        **_lengths(random, c),
        **_document_pairs(random, c),
    )


def _ints(random, low, high, shape):
    return _array(random.integers(low, high + 1, shape), "int32")


def _shape(c, axes):
    """[B, N, T, S] with 1 for the axes that the string leaves out."""
    sizes = {"B": c.B, "N": c.N, "T": c.T, "S": c.S}
    return tuple(size if axis in axes else 1 for axis, size in sizes.items())


def _mask(axes, share=0.5, **options):
    def draw(random, c):
        return dict(mask=_array(random.random(_shape(c, axes)) < share), **options)

    return draw


def _mask_with_empty_tiles(random, c):
    """And full ones, and rows and columns without a True."""
    mask = random.random((c.B, c.N, c.T, c.S)) < 0.5
    mask[:, 0, c.T // 3 :] = False
    mask[:, 1, c.T // 3 :] = True
    mask[:, 2:, :, : c.S // 2] = False
    return dict(mask=_array(mask))


def _bias(axes, dtype="float32", **options):
    def draw(random, c):
        return dict(bias=_normal(random, _shape(c, axes), dtype), **options)

    return draw


def _normal(random, shape, dtype="float32"):
    return _array(random.standard_normal(shape), dtype)


def _infinite_bias(random, c):
    """Pairs, and in one example whole rows, that only the bias hides."""
    bias = random.standard_normal((c.B, 1, c.T, c.S))
    bias[random.random(bias.shape) < 0.3] = -np.inf
    bias[0, :, :5] = -np.inf
    return dict(bias=_array(bias, "float32"))


def _sinks(random, c):
    # One so large that it takes nearly all, one so small that it takes nothing.
    return dict(sinks=_array([9.0, -99.0, *random.standard_normal(c.N)[2:]][: c.N], "float32"))


def _slopes(random, c):
    return dict(
        alibi_slopes=_array(random.uniform(0.02, 0.3, c.N), "float32"),
        query_offset=_ints(random, -c.T // 2, c.S, c.B),
    )


# An index outside, as that of the key before the first, is moved to the edge.
_WAVES = ExactScoreMod(
    lambda s, b, h, q, k, gate, mark: (
        gate[h] * s + 0.5 * jnp.sin(s) + mark[b, k - 1] * (q % 2).astype(s.dtype)
    ),
    lambda s, b, h, q, k, gate, mark: gate[h] * s + 0.5 * np.sin(s) + mark[b, k - 1] * (q % 2),
    lambda s, b, h, q, k, gate, mark: gate[h] + 0.5 * np.cos(s),
)


def _score_mod(random, c):
    operands = _normal(random, c.N), _normal(random, (c.B, c.S))
    return dict(score_mod=ScoreMod(_WAVES, operands))


def _dropout(rate, **options):
    def draw(random, c):
        key = jax.random.key(int(random.integers(2**31)))
        return dict(dropout_rate=rate, dropout_key=key, **options)

    return draw


def _prefix(random, c):
    return dict(
        mask=PrefixLM(_array([0, 3 * c.S // 4], "int32")),
        query_offset=_ints(random, -9, 9, c.B),
    )


def _same_colour(b, h, q, k, colour):
    return (colour[b, q] == colour[b, k + 3]) | (h == 1)


def _predicate(random, c):
    return Predicate(_same_colour, (_ints(random, 0, 2, (c.B, c.T)),))


def _blocks(axes, block_q, block_kv):
    def draw(random, c):
        heads = _shape(c, axes)[:2]
        blocks = (-(-c.T // block_q), -(-c.S // block_kv))
        return dict(mask=BlockMask(_array(random.random((*heads, *blocks)) < 0.4), block_q,
                                   block_kv))  # fmt: skip

    return draw


def _blocks_of_a_predicate(random, c):
    sizes = dict(batch=c.B, num_heads=c.N, block_q=24, block_kv=20)
    return dict(mask=BlockMask.from_mask(_predicate(random, c), c.T, c.S, **sizes))


def _blocks_of_chunks(random, c):
    return dict(mask=BlockMask.from_mask(Chunked(20), c.T, c.S, block_q=16, block_kv=8))


def _joined(random, c):
    return dict(mask=_blocks("N", 16, 32)(random, c)["mask"] & _predicate(random, c))


def _sorted_id_pairs(random, c):
    return _document_pairs(random, c)["segment_ids"]


def _tree(random, c):
    """Most tokens are near their parents; some begin a tree of their own."""
    rows = [[random.integers(max(-1, i - 9), i) for i in range(c.T)] for _ in range(c.B)]
    most = max(c.S - c.T, 0)
    return dict(mask=Tree(_array(rows, "int32")), query_offset=_ints(random, -3, most, c.B))


def _grid(random, c):
    """The last points of a grid look at all points."""
    grid = -(-max(c.T, c.S) // 12), 12
    q, k = np.arange(c.T)[None] + max(c.S - c.T, 0), np.arange(c.S)[None]
    positions = dict(query_positions=_array(q, "int32"), key_value_positions=_array(k, "int32"))
    return dict(mask=Neighborhood(grid, (3, 5)), **positions)


def _algebra(random, c):
    """All operators; padding and later keys stay hidden."""
    array = _array(random.random((c.N, c.T, c.S)) < 0.3)
    hidden = Chunked(20) & ~SharedPrefix(*_sorted_id_pairs(random, c))
    mask = ~hidden & (array | Segments(*_sorted_id_pairs(random, c)) | ~_predicate(random, c))
    return dict(mask=mask, is_causal=True, query_offset=30, **_lengths(random, c))


def _together(*draws):
    def draw(random, c):
        return {name: x for draw in draws for name, x in draw(random, c).items()}

    return draw


CASES: tuple[Case, ...] = (
    Case("full"),
    Case("full, whole tiles", T=128, S=256, H=64, V=64),
    Case("T of one tile, S of several", T=33, S=290),
    Case("T of several tiles, S of one", T=290, S=33),
    Case("one query", T=1),
    Case("one key", S=1),
    Case("one of everything", B=1, T=1, S=1, N=1, K=1, H=1, V=1),
    Case("no key/value groups", N=3, K=3),
    Case("one key/value head", N=5, K=1),
    Case("small heads", H=3, V=5),
    Case("value heads smaller", H=65, V=16),
    Case("large heads", B=1, N=2, K=1, H=136, V=160),
    Case("scale", options=_fixed(scale=0.7)),
    Case("negative scale", options=_fixed(scale=-0.3)),
    Case("zero scale", options=_fixed(scale=0.0)),
    Case("large scores", options=_fixed(scale=8.0)),
    # Keys past the end have 0, beside which these have no weight.
    Case("scores far below zero", level=-100.0),
    Case("causal", options=_fixed(is_causal=True)),
    Case("causal, whole tiles", T=256, S=256, H=64, V=64, options=_fixed(is_causal=True)),
    Case("causal, more queries", T=190, S=70, options=_fixed(is_causal=True)),
    Case("causal, aligned at the end", options=_fixed(is_causal=True, query_offset=91 - 75)),
    Case("causal, first queries see nothing", options=_fixed(is_causal=True, query_offset=-20)),
    Case("causal, no query sees a key", options=_fixed(is_causal=True, query_offset=-75)),
    Case("causal, offset for each example", options=_offsets),
    Case("window", options=_fixed(local_window_size=(17, 5))),
    Case("window of the own position", T=91, options=_fixed(local_window_size=0)),
    Case("window to the left only", T=200, S=200, options=_fixed(local_window_size=(20, None))),
    Case("window to the right only", options=_fixed(local_window_size=(None, 3))),
    Case("window, causal", T=300, S=300, options=_fixed(local_window_size=33, is_causal=True)),
    Case("window, moved", options=_fixed(local_window_size=(9, 4), query_offset=30)),
    Case("window narrower than a tile gap", T=300, S=150, options=_fixed(local_window_size=1)),
    Case("lengths", options=_lengths),
    Case("lengths of zero", options=_zero_lengths),
    Case("documents", T=91, options=_documents),
    Case(
        "documents, causal, long",
        T=310,
        S=310,
        N=2,
        K=1,
        options=lambda r, c: dict(**_documents(r, c), is_causal=True),
    ),
    Case("documents in pairs", options=_document_pairs),
    Case("documents, shuffled", options=_shuffled_ids),
    Case("documents, nothing in common", options=_foreign_ids),
    Case("everything at once", T=140, S=170, options=_everything),
)

# Options of a call beyond the above. All have one shape.
FEATURES = (
    Case("mask", options=_mask("BNTS")),
    Case("mask of all examples and heads", options=_mask("TS")),
    Case("mask of keys", options=_mask("BS")),
    Case("mask with empty tiles", options=_mask_with_empty_tiles),
    Case(
        "mask, causal, lengths", options=_together(_mask("NTS", 0.8, is_causal=True), _zero_lengths)
    ),
    Case("bias", options=_bias("BNTS")),
    Case("bias of all examples", options=_bias("NTS", is_causal=True)),
    Case("bias of keys", options=_bias("BS")),
    Case("bias of heads", options=_bias("N")),
    Case("bias of queries, in 16 bits", options=_bias("T", "bfloat16")),
    Case("bias of minus infinity", options=_infinite_bias),
    Case("soft cap", options=_fixed(logits_soft_cap=1.5, is_causal=True)),
    Case("soft cap, bias", options=_bias("NS", logits_soft_cap=0.7)),
    Case("sinks", options=_sinks),
    Case("sinks, causal, first queries see nothing",
         options=_together(_sinks, _fixed(is_causal=True, query_offset=-20))),
    Case("slopes, offset for each example", options=_slopes),
    Case("positions", options=_together(_positions, _fixed(is_causal=True))),
    Case("positions, window, slopes, lengths",
         options=lambda r, c: dict(
             **_positions(r, c), **_lengths(r, c), alibi_slopes=_slopes(r, c)["alibi_slopes"],
             local_window_size=(30, 20))),
    Case("positions, prefix",
         options=lambda r, c: dict(**_positions(r, c), mask=_prefix(r, c)["mask"])),
    Case("score function", options=_score_mod),
    Case("dropout", options=_dropout(0.3)),
    Case("dropout for all alike, causal",
         options=_dropout(0.8, broadcast_dropout=True, is_causal=True)),
    Case("prefix", options=_prefix),
    Case("predicate", options=lambda random, c: dict(mask=_predicate(random, c))),
    Case("blocks smaller than tiles", options=_blocks("BN", 8, 12)),
    Case("blocks larger than tiles", options=_blocks("B", 40, 72)),
    Case("blocks of a predicate", options=_blocks_of_a_predicate),
    Case("blocks and predicate", options=_joined),
    Case(
        "all features",
        options=_together(
            _mask("NTS", 0.7), _everything, _bias("BTS", logits_soft_cap=2.5), _sinks,
            _slopes, _score_mod, _dropout(0.2),
        ),
    ),
    Case("chunked, causal", options=_together(_offsets, _fixed(mask=Chunked(20)))),
    Case("blocks of chunks", options=_blocks_of_chunks),
    Case("block-causal", options=_fixed(mask=BlockCausal(12), query_offset=16)),
    Case("dilated window, positions",
         options=_together(_positions, _fixed(mask=Dilated(3), local_window_size=(30, 9)))),
    Case("shared prefix, causal",
         options=lambda r, c: dict(mask=SharedPrefix(*_sorted_id_pairs(r, c)), is_causal=True)),
    Case("tree", options=_tree),
    Case("neighborhood", options=_grid),
    Case("masks by and, or, not", options=_algebra),
    Case("packed in pairs, causal", options=_packed),
    Case("mask and function of heads", options=_array_and_function),
)  # fmt: skip

CASES += FEATURES

BY_NAME = {case.name: case for case in CASES}


def _sinks_of_their_size(random, c):
    return dict(sinks=_normal(random, (c.N,)), is_causal=c.T == c.S)


# In 16 bits: sums of ds that nearly cancel, where errors that the ds of a row share would show.
CANCELLING = (
    Case("sinks, values of mean 4", B=1, T=91, value_mean=4, options=_sinks_of_their_size),
    Case("sinks, values of mean 20", B=1, T=91, value_mean=20, options=_sinks_of_their_size),
    Case("bias of keys, mean 20", value_mean=20, options=_bias("NS")),
    Case("bias of pairs, mean 4", value_mean=4, options=_bias("1NTS", is_causal=True)),
    Case(
        "soft cap, dropout, sinks, bias, mean 20",
        value_mean=20,
        options=lambda random, c: dict(
            **_sinks_of_their_size(random, c),
            bias=_normal(random, (1, c.N, 1, c.S)),
            logits_soft_cap=3.0,
            dropout_rate=0.2,
            dropout_key=jax.random.key(1),
        ),
    ),
    Case("three keys", B=1, T=79, S=3, N=2, K=1, H=1, V=128),
    Case("three keys, mean 20", B=1, T=79, S=3, N=2, K=1, H=1, V=128, value_mean=20),
    Case("one pair and a sink", T=1, S=1, options=_sinks_of_their_size),
    Case("one feature, mean 4", B=1, T=16, S=238, N=2, K=1, H=1, V=64, value_mean=4),
)


def default(chosen, values):
    """The values of a `parametrize`; those that are not `chosen` run with `-m extended`."""
    import pytest

    assert all(x in values for x in chosen)
    return [
        pytest.param(
            *(x if isinstance(x, tuple) else (x,)),
            marks=() if x in chosen else pytest.mark.extended,
        )
        for x in values
    ]


# Cases that "mosaic" serves: its copies take rows of 16 bytes.
SERVED_ON_HOPPER = tuple(case.name for case in CASES if case.H % 8 == case.V % 8 == 0)

# Cases that are run at each head dim that has tiles of its own.
HEADS_ON_HOPPER = (
    "full",
    "T of one tile, S of several",
    "T of several tiles, S of one",
    "one query",
    "one key",
    "no key/value groups",
    "one key/value head",
    "scale",
    "negative scale",
    "zero scale",
    "causal",
    "causal, whole tiles",
    "causal, more queries",
    "causal, aligned at the end",
    "causal, first queries see nothing",
    "causal, no query sees a key",
    "window, moved",
    "documents, causal, long",
    "mask with empty tiles",
    "large scores",
    "scores far below zero",
    "soft cap",
    "slopes, offset for each example",
    "dropout",
    "all features",
)


def parametrize(*, names=None, more=(), others_extended=False, table=CASES):
    """Marks a test to run for each case, with the case's name as its id.

    Cases in `more`, or with `others_extended` all that `names` leaves out, run with `-m extended`.
    """
    import pytest

    assert {*(names or ()), *more} <= BY_NAME.keys()
    chosen = [c for c in table if names is None or c.name in names]
    values = [c for c in table if c in chosen or c.name in more or others_extended]
    ids = [c.name.replace(" ", "-") for c in values]
    return pytest.mark.parametrize("case", default(chosen, values), ids=ids)


def checked(qkv, options):
    """The call as the implementations get it."""
    return attention.problem_of(attention.bound(*qkv, **options))


def poison(case: Case, qkv, cotangents, options):
    """The problem with NaN in all that no query sees and in queries that see nothing."""
    ok = visible((case.B, case.N, case.T, case.S), **options)
    by_query = ok.any(-1).transpose(0, 2, 1)[..., None]
    by_key = ok.any(2).reshape(case.B, case.K, -1, case.S).any(2).transpose(0, 2, 1)[..., None]
    (q, k, v), (do, dlse) = qkv, cotangents
    q, do = (jnp.where(by_query, x, jnp.nan) for x in (q, do))
    k, v = (jnp.where(by_key, x, jnp.nan) for x in (k, v))
    return (q, k, v), (do, jnp.where(by_query[..., 0], dlse, jnp.nan))


def poison_bias(case: Case, options):
    """The options with NaN in a bias of pairs that are not seen."""
    if "bias" not in options:
        return options
    bias = options["bias"]
    ok = visible((case.B, case.N, case.T, case.S), **options)
    broadcast = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
    return options | {"bias": jnp.where(ok.any(broadcast, keepdims=True), bias, jnp.nan)}
