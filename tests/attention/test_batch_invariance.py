"""Documents of batch-invariant calls that begin elsewhere than at a block of keys.

Bits are compared in test_mosaic_bits.py and, on a GPU, in test_mosaic_invariance.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash
from pallas_flash._execution import limits


def ids(*lengths):
    """Segment ids for pairs of an id and a length."""
    numbers, counts = zip(*lengths, strict=True)
    return np.repeat(np.int32(numbers), counts)


# The ids of queries, of keys, and where rows are NaN.
ROWS = {
    "aligned": (ids((0, 128), (1, 256), (2, 128)), None, []),
    "one behind 100": (ids((0, 100), (1, 28), (2, 384)), None, range(100, 128)),
    "padding": (ids((0, 100), (-1, 28), (2, 300), (-1, 84)), None, []),
    "two runs": (ids((3, 128), (1, 128), (3, 256)), None, [*range(128), *range(256, 512)]),
    "ids that fall": (ids((9, 256), (4, 250), (1, 6)), None, range(506, 512)),
    "keys": (ids((0, 100), (1, 412)), ids((0, 256), (1, 256)), []),
    "keys behind 200": (ids((0, 100), (1, 412)), ids((0, 200), (1, 312)), range(200, 512)),
    "no keys": (ids((0, 100), (1, 412)), ids((0, 512)), []),
}


def test_rows_of_misaligned_documents_are_nan(monkeypatch):
    """Where ids are traced; else the call raises. Any implementation serves here."""
    monkeypatch.setattr(limits, "check_invariance", lambda *_: None)
    q, k, v = jax.random.normal(jax.random.key(0), (3, len(ROWS), 512, 1, 8))
    pairs = [(x, x if y is None else y) for x, y, _ in ROWS.values()]
    of_ids = tuple(map(jnp.stack, zip(*pairs, strict=True)))

    def call(of_ids, **options):
        named = dict(segment_ids=of_ids, return_lse=True, implementation="xla", **options)
        return pallas_flash.attention(q, k, v, is_causal=True, **named)

    o, lse = jax.jit(lambda x: call(x, batch_invariant=True))(of_ids)
    o_elsewhere, lse_elsewhere = jax.jit(call)(of_ids)
    for b, (name, (*_, rows)) in enumerate(ROWS.items()):
        wrong = np.isin(np.arange(512), rows)
        for x, y in ((o[b], o_elsewhere[b]), (lse[b], lse_elsewhere[b])):
            expected = np.where(wrong.reshape(-1, *[1] * (x.ndim - 1)), np.nan, y)
            np.testing.assert_array_equal(x, expected, name)
    with pytest.raises(ValueError, match="of query 100 of batch element 1"):
        call(of_ids, batch_invariant=True)
