"""Tokens in another order, which gives all devices equal work.

Results in it are those of the cases with positions, see test_accuracy.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.masks import Mask, PositionBand
from pallas_flash._problem.operands import Positions


@pytest.mark.parametrize(("length", "devices"), [(2, 1), (48, 3), (64, 8), (20, 5)])
def test_balanced_order_chunks(length, devices):
    order = pallas_flash.masks.balanced_order(length, devices)
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
    order = pallas_flash.masks.balanced_order(length, devices)
    counts = tiles_of_each_device(order, devices, block)
    # A tile for each step of the ring, in which a tile may meet the end of a chunk.
    assert max(counts) - min(counts) <= 1
    count = length // block
    if length % (2 * devices * block) == 0:
        assert sum(counts) == count * (count + 1) // 2
    # In order of position the last device has nearly all of the work.
    assert np.ptp(tiles_of_each_device(np.arange(length), devices, block)) > count
