"""Documents of batch-invariant calls that begin elsewhere than at a block of keys.

Bits are compared in test_mosaic_bits.py and, on a GPU, in test_mosaic_invariance.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from support.described_gpus import described_mesh

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


def test_known_documents_are_checked_on_the_host():
    """The mesh of a GPU that is described has no devices to compute on."""
    document = jnp.asarray(ids((0, 100), (1, 412))[None])
    mesh = described_mesh({"x": 2}, AxisType.Explicit)
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match="of query 100"):
        x = jax.ShapeDtypeStruct((1, 512, 2, 8), jnp.bfloat16)
        pallas_flash.explain(x, x, x, segment_ids=document, batch_invariant=True)


def test_no_keys_and_strict_dtypes(monkeypatch):
    monkeypatch.setattr(limits, "check_invariance", lambda *_: None)
    x, of_ids = jnp.ones((1, 256, 1, 8)), jnp.zeros((1, 256), jnp.int32)

    def call(of_ids, keys):
        y, pair = x[:, :keys], (of_ids, of_ids[:, :keys])
        named = dict(implementation="xla", batch_invariant=True)
        return pallas_flash.attention(x, y, y, segment_ids=pair, **named)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(jax.jit(call, static_argnums=1)(of_ids, 256), 1)
    for run in (call, jax.jit(call, static_argnums=1)):
        np.testing.assert_array_equal(run(of_ids, 0), 0)
