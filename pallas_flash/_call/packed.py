"""Arguments of `attention` for sequences that are packed one after the other, from their ends."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_flash._jax.one_device import whole
from pallas_flash._problem.checks import array, at_least, describe, integers


def segment_ids_from_cu_seqlens(cu_seqlens, length: int) -> jax.Array:
    """Return the ids of sequences that are packed one after the other in a row.

    `attention` takes them with a batch axis, as `segment_ids=ids[None]`.

    `arguments_from_cu_seqlens` is for queries and keys that are packed with other lengths each.

    Args:
        cu_seqlens: int32 [n + 1], the first token of each of n sequences, and the end of the last
            one: 0, len_0, len_0 + len_1, ... May be traced.
        length: tokens in the row. Tokens past the last sequence have an id of their own and see
            each other alone. If they may be NaN, pass `cu_seqlens[-1:]` as lengths, too: a hidden
            key has probability 0, and 0 * NaN is NaN.

    Returns:
        int32 [length]: 0 in the first sequence, n past the last.

    Raises:
        TypeError: `cu_seqlens` is not an int32 array.
        ValueError: `cu_seqlens` is not of rank 1, or its known numbers do not rise from 0 or end
            past `length`.

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> pallas_flash.masks.segment_ids_from_cu_seqlens(jnp.array([0, 2, 5]), 7)
        Array([0, 0, 1, 1, 1, 2, 2], dtype=int32)
    """
    length = at_least(0, "length", length)
    return _ids(_ends("cu_seqlens", cu_seqlens, "length", length), length)


def arguments_from_cu_seqlens(
    cu_seqlens_q, cu_seqlens_kv, q_len: int, kv_len: int
) -> dict[str, Any]:
    """Return arguments of `attention` for packed queries and keys of other lengths each.

    Sequence n has the queries cu_seqlens_q[n] .. cu_seqlens_q[n + 1] - 1, which see the keys
    cu_seqlens_kv[n] .. cu_seqlens_kv[n + 1] - 1. With `is_causal` or a window, the last query of a
    sequence is at its last key, as in flash-attn's variable-length attention. For 2 queries of 3
    keys and 3 queries of 2 keys, with `is_causal=True`:

        1 1 0 0 0
        1 1 1 0 0
        0 0 0 0 0
        0 0 0 1 0
        0 0 0 1 1

    Args:
        cu_seqlens_q: int32 [n + 1], the first query of each of n sequences, and the end of the last
            one. May be traced.
        cu_seqlens_kv: the same of keys.
        q_len: queries in the row. Queries past the last sequence see nothing.
        kv_len: keys in the row. No query sees keys past the last sequence.

    Returns:
        `segment_ids`, `query_positions` and `key_value_positions` for a batch of one.

    Raises:
        TypeError: an array of ends is not int32.
        ValueError: the arrays differ in length, or are not ends: see `segment_ids_from_cu_seqlens`.

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> of_q, of_k = jnp.array([0, 2, 5]), jnp.array([0, 3, 5])
        >>> packed = pallas_flash.masks.arguments_from_cu_seqlens(of_q, of_k, 5, 5)
        >>> x = jnp.ones((5, 1, 8))
        >>> pallas_flash.attention(x, x, x, is_causal=True, **packed).shape
        (5, 1, 8)
    """
    q_len, kv_len = at_least(0, "q_len", q_len), at_least(0, "kv_len", kv_len)
    of_q = _ends("cu_seqlens_q", cu_seqlens_q, "q_len", q_len)
    of_k = _ends("cu_seqlens_kv", cu_seqlens_kv, "kv_len", kv_len)
    if of_q.shape != of_k.shape:
        raise ValueError(
            "`cu_seqlens_kv` must have a sequence for each one of `cu_seqlens_q`; got "
            f"{of_k.shape[0] - 1} and {of_q.shape[0] - 1}. Repeat an end for a sequence without "
            "tokens."
        )
    queries, keys = _ids(of_q, q_len), _ids(of_k, kv_len)
    # Keys past the end have an id that no query has.
    keys = jnp.where(keys == of_k.shape[0] - 1, of_k.shape[0], keys)
    # Keys count from 0, and each sequence's queries end where its keys end. So positions
    # rise along the row, and kernels skip blocks by them.
    moved = jnp.append(of_k[1:] - of_q[1:], 0)[queries]
    positions = jnp.arange(q_len, dtype=jnp.int32) + moved.astype(jnp.int32)
    return dict(
        segment_ids=(queries[None], keys[None]),
        query_positions=positions[None],
        key_value_positions=jnp.arange(kv_len, dtype=jnp.int32)[None],
    )


def _ends(name: str, cu_seqlens, name_of_length: str, length: int) -> jax.Array:
    """Return cumulative lengths, checked as far as they are known."""
    cu_seqlens = array(name, cu_seqlens)
    if cu_seqlens.ndim != 1 or not cu_seqlens.size:
        raise ValueError(
            f"`{name}` must have shape [documents + 1]; got {cu_seqlens.shape}. Pass one row's "
            "documents, and use `jax.vmap` for several rows."
        )
    cu_seqlens = integers(name, cu_seqlens, cu_seqlens.shape, "[documents + 1]")
    if not isinstance(cu_seqlens, Tracer):
        ends = np.asarray(cu_seqlens)
        if ends[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] > length:
            raise ValueError(
                f"`{name}` must rise from 0 to at most {name_of_length} = {length}; got "
                f"{describe(ends)} from {ends[0]} to {ends[-1]}. Pass the sums of the documents' "
                "lengths, 0 first."
            )
    return whole(cu_seqlens)


def _ids(cu_seqlens, length: int) -> jax.Array:
    """Return the number of the document of each token, int32 [length]."""
    tokens = jnp.arange(length, dtype=jnp.int32)
    return jnp.searchsorted(cu_seqlens[1:], tokens, side="right").astype(jnp.int32)
