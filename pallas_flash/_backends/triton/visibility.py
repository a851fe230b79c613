"""Which keys and queries of a partial tile are loaded: those with a pair that the mask allows.

The others may hold NaN, and 0 * NaN is NaN, or may not exist at all.
"""

import jax.numpy as jnp

from pallas_flash._backends.triton.spec import KernelSpec, Rows
from pallas_flash._problem.masks import Mask


def visible_keys(mask: Mask, b, h, q_pos, k_pos, rows):
    """Return which keys any query of the tile sees, bool [block_kv].

    The mask is evaluated once more here, transposed. The values for the scores would be kept in
    registers across the first product, and transposed the maximum runs within a warp.

    Args:
        mask: the mask.
        b: the batch element.
        h: the query head, or int32 [block_q] where rows differ.
        q_pos: int32 [block_q].
        k_pos: int32 [block_kv].
        rows: which queries exist, bool [block_q]; None means all.
    """
    h = h if jnp.ndim(h) == 0 else h[None, :]
    q_pos, k_pos = q_pos[None, :], k_pos[:, None]
    return _any(mask.allowed(b, h, q_pos, k_pos), rows, k_pos + q_pos)


def keys_to_load(spec: KernelSpec, mask: Mask, rows: Rows, k_pos, masked: bool):
    """Return the keys of a tile that are loaded, bool [block_kv]; None for all of them."""
    if not (spec.mask_loads and masked):
        return None
    return visible_keys(mask, rows.b, rows.h, rows.pos, k_pos, rows.valid)


def queries_with_keys(mask: Mask, b, h, q_pos, k_pos, keys):
    """Return which queries see any key of the tile, bool [block_q]; see `visible_keys`."""
    q_pos, k_pos = q_pos[:, None], k_pos[None, :]
    return _any(mask.allowed(b, h, q_pos, k_pos), keys, q_pos + k_pos)


def _any(ok, columns, tile):
    """Return whether a row of `ok` holds in any of `columns` (bool, or None for all)."""
    ok = jnp.broadcast_to(ok, tile.shape)
    ok = ok if columns is None else ok & columns[None, :]
    return jnp.max(ok.astype(jnp.int32), axis=1) > 0
