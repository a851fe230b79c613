"""The named cases: each is there to kill a class of bug. They drive every pass of every
implementation.

All sizes of a case differ, batch and heads are above one, and lengths are no multiples of a tile
unless the name says so.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

Random = np.random.Generator


def _none(random: Random, case: "Case") -> dict[str, Any]:
    return {}


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

    def problem(self, dtype="float32", seed: int = 0):
        """(q, k, v), (do, dlse) and the keyword arguments."""
        c, random = self, np.random.default_rng([seed, *self.name.encode()])

        def normal(*shape):
            return jnp.asarray(random.standard_normal(shape), dtype)

        qkv = normal(c.B, c.T, c.N, c.H), normal(c.B, c.S, c.K, c.H), normal(c.B, c.S, c.K, c.V)
        dlse = jnp.asarray(random.standard_normal((c.B, c.T, c.N)), jnp.float32)
        return qkv, (normal(c.B, c.T, c.N, c.V), dlse), c.options(random, c)

    def scaled(self, factor: int) -> "Case":
        """The same case with longer sequences, for a real card: one stays one, tiles whole."""
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
        query_seq_lengths=jnp.array([c.T // 2, c.T], jnp.int32),
        key_value_seq_lengths=jnp.array([c.S // 3, 0], jnp.int32),
    )


def _sorted_ids(random, c, length):
    return jnp.asarray(np.sort(random.integers(0, 4, (c.B, length)), axis=1), jnp.int32)


def _documents(random, c):
    return dict(segment_ids=_sorted_ids(random, c, c.T))


def _document_pairs(random, c):
    return dict(segment_ids=(_sorted_ids(random, c, c.T), _sorted_ids(random, c, c.S)))


def _shuffled_ids(random, c):
    return dict(segment_ids=(_ints(random, -2, 2, (c.B, c.T)), _ints(random, -2, 2, (c.B, c.S))))


def _foreign_ids(random, c):
    return dict(segment_ids=(jnp.zeros((c.B, c.T), jnp.int32), jnp.ones((c.B, c.S), jnp.int32)))


def _offsets(random, c):
    return dict(query_offset=_ints(random, -c.T, c.S, c.B), is_causal=True)


def _everything(random, c):
    return dict(
        is_causal=True,
        local_window_size=(40, 7),
        query_offset=_ints(random, 0, c.S // 2, c.B),
        **_lengths(random, c),
        **_document_pairs(random, c),
    )


def _ints(random, low, high, shape):
    return jnp.asarray(random.integers(low, high + 1, shape), jnp.int32)


CASES = (
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

BY_NAME = {case.name: case for case in CASES}


def parametrize(*, names=None, others_extended=False):
    """Marks a test to run for each case, with the case's name as its id.

    With `others_extended`, cases that `names` leaves out run with `-m extended`.
    """
    import pytest

    def param(case):
        chosen = names is None or case.name in names
        marks = () if chosen else pytest.mark.extended
        return pytest.param(case, marks=marks, id=case.name.replace(" ", "-"))

    assert names is None or set(names) <= BY_NAME.keys()
    cases = [c for c in CASES if names is None or c.name in names or others_extended]
    return pytest.mark.parametrize("case", [param(case) for case in cases])


def poison(case: Case, qkv, cotangents, options):
    """The problem with NaN in all that no query sees and in queries that see nothing."""
    from oracle import visible

    ok = visible((case.B, case.N, case.T, case.S), **options)
    by_query = ok.any(-1).transpose(0, 2, 1)[..., None]
    by_key = ok.any(2).reshape(case.B, case.K, -1, case.S).any(2).transpose(0, 2, 1)[..., None]
    (q, k, v), (do, dlse) = qkv, cotangents
    q, do = (jnp.where(by_query, x, jnp.nan) for x in (q, do))
    k, v = (jnp.where(by_key, x, jnp.nan) for x in (k, v))
    return (q, k, v), (do, jnp.where(by_query[..., 0], dlse, jnp.nan))
