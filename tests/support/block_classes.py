"""Which blocks of a mask are empty, partial or full: of all pairs by brute force, and as ranges."""

import itertools

import numpy as np


def of_pairs(seen, rows, columns):
    """Return whether some and whether every pair of each block is allowed.

    Args:
        seen: bool [..., T, S], or up to the ends of the last blocks: keys there are pairs, too.
        rows: the `Tiling` of T; rows past its length do not count, for kernels drop their results.
        columns: the `Tiling` of S.
    """
    whole = rows.count * rows.block, columns.count * columns.block
    exists = np.zeros(whole, bool)
    exists[: min(rows.length, seen.shape[-2]), : seen.shape[-1]] = True
    padding = [(0, n - m) for n, m in zip(whole, seen.shape[-2:], strict=True)]
    seen = np.pad(seen, [(0, 0)] * (seen.ndim - 2) + padding)

    def blocks(x):
        shape = (*x.shape[:-2], rows.count, rows.block, columns.count, columns.block)
        return x.reshape(shape).swapaxes(-3, -2)

    return blocks(seen & exists).any((-1, -2)), blocks(seen | ~exists).all((-1, -2))


def of_ranges(ranges, count):
    """Return which blocks are visited and which are visited as full: bool [..., stay, flow]."""
    ranges = np.asarray(ranges)
    assert ranges.dtype == np.int32
    start, full_start, full_stop, stop = np.moveaxis(ranges, -1, 0)[..., None]
    ends = [0 * start, start, full_start, full_stop, stop, 0 * stop + count]
    assert all((a <= b).all() for a, b in itertools.pairwise(ends))
    # A range without full blocks has full_start = full_stop = start.
    assert (full_start == start)[full_start == full_stop].all()
    t = np.arange(count)
    return (start <= t) & (t < stop), (full_start <= t) & (t < full_stop)


def assert_classes(got, want, exact=False):
    """Assert that no allowed pair is in an empty block, and no other in a full one.

    Args:
        got: which blocks are visited, and which as full.
        want: which have some allowed pair, and which have no other.
        exact: whether both must be the same.
    """
    some, every = want
    visited, full = (np.broadcast_to(x, some.shape) for x in got)
    assert not (some & ~visited).any()
    assert not (full & ~every).any()
    if exact:
        np.testing.assert_array_equal(visited, some)
        np.testing.assert_array_equal(full, every)
