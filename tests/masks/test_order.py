"""Tokens in another order: the same results, and equal work for all devices."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle
from support.judge import SMALL

import pallas_flash
from pallas_flash import PrefixLM
from pallas_flash._blocks import Tiling
from pallas_flash._masks import Mask, PositionBand
from pallas_flash._operands import Positions

B, T, N, K, H = 2, 96, 4, 2, 16

# [B, T], or one for the batch: four sequences, two of them in each row.
IDS = jnp.asarray(np.arange(T) // 40 + np.array([[0], [5]]), jnp.int32)

OPTIONS = {
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(20, 9)),
    "documents": dict(is_causal=True, segment_ids=IDS),
    "slopes": dict(is_causal=True, alibi_slopes=jnp.linspace(0.05, 0.4, N)),
    "prefix": dict(mask=PrefixLM(jnp.asarray([30, 0], jnp.int32))),
    "everything": dict(
        is_causal=True,
        local_window_size=(50, None),
        segment_ids=IDS,
        alibi_slopes=jnp.linspace(0.05, 0.4, N),
        sinks=jnp.linspace(-1.0, 1.0, N),
        logits_soft_cap=3.0,
    ),
}


@functools.cache
def results(implementation, name, moved):
    """The output, the LSE and the gradients, with tokens in order or moved."""
    random = np.random.default_rng(0)
    shapes = [(N, H), (K, H), (K, H), (N, H), (N,)]
    arrays = [jnp.asarray(random.normal(size=(B, T, *x)), jnp.float32) for x in shapes]
    options = OPTIONS[name] | dict(implementation=implementation, return_lse=True)
    if implementation == "interpret":
        options["tile_sizes"] = SMALL
    order = pallas_flash.balanced_order(T, 4)
    if moved:
        arrays = [x[:, order] for x in arrays]
        if "segment_ids" in options:
            options["segment_ids"] = options["segment_ids"][:, order]
        options |= dict.fromkeys(("query_positions", "key_value_positions"), order[None])
    operands, options = oracle.split(options)
    call = functools.partial(pallas_flash.attention, **options)
    found = oracle.compiled(functools.partial(oracle.differentiate, call))(*arrays, **operands)
    return [x[:, order] if x.ndim > 1 and not moved else x for x in found]


# Each option once, but for slopes, which "everything" has. test_lowering has positions in kernels.
BY_DEFAULT = [
    ("xla", "causal"),
    ("xla", "window"),
    ("xla", "everything"),
    ("reference", "documents"),
    ("reference", "prefix"),
]


@pytest.mark.parametrize(
    ("implementation", "name"),
    cases.default(BY_DEFAULT, list(itertools.product(["interpret", "xla", "reference"], OPTIONS))),
)
def test_balanced_order_permutes_results(implementation, name, kernel_case):
    for x, y in zip(*(results(implementation, name, moved) for moved in (True, False)),
                    strict=True):  # fmt: skip
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y)


@pytest.mark.parametrize(("length", "devices"), [(2, 1), (48, 3), (64, 8), (20, 5)])
def test_balanced_order_chunks(length, devices):
    order = pallas_flash.balanced_order(length, devices)
    assert order.dtype == jnp.int32
    chunk = length // (2 * devices)
    for i, tokens in enumerate(np.reshape(order, (devices, 2, chunk))):
        late = 2 * devices - 1 - i
        np.testing.assert_array_equal(tokens[0], i * chunk + np.arange(chunk))
        np.testing.assert_array_equal(tokens[1], late * chunk + np.arange(chunk))
    np.testing.assert_array_equal(order[jnp.argsort(order)], np.arange(length))
    if devices == 1:
        np.testing.assert_array_equal(order, np.arange(length))


def tiles_of_each_device(order, devices, block):
    """How many tiles each device visits, of the keys of all devices one after the other."""
    shards = np.reshape(order, (devices, 1, -1)).astype(np.int32)
    tiling = Tiling(shards.shape[-1], block)

    def visited(q, k):
        leaf = PositionBand(Positions(q, k), None, 0)
        start, _, _, stop = np.moveaxis(np.asarray(Mask((leaf,)).kv_ranges(tiling, tiling)), -1, 0)
        return int((stop - start).sum())

    return [sum(visited(q, k) for k in shards) for q in shards]


@pytest.mark.parametrize(("length", "devices", "block"), [(512, 4, 16), (960, 8, 8), (96, 2, 16)])
def test_balanced_order_blocks_per_device(length, devices, block):
    order = pallas_flash.balanced_order(length, devices)
    counts = tiles_of_each_device(order, devices, block)
    # A tile for each step of the ring, in which a tile may meet the end of a chunk.
    assert max(counts) - min(counts) <= 1
    count = length // block
    if length % (2 * devices * block) == 0:
        assert sum(counts) == count * (count + 1) // 2
    # In order of position the last device has nearly all of the work.
    assert np.ptp(tiles_of_each_device(np.arange(length), devices, block)) > count
