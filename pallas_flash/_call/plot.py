"""Draws a mask, and which of its blocks are empty, partial and full."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from pallas_flash._arguments import attention
from pallas_flash._jax.one_device import whole
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.checks import at_least
from pallas_flash._problem.mask_objects import MaskObject, sizes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colors of hidden and visible pairs; with tiles, of the pairs in partial blocks.
PAIRS, PAIRS_IN_PARTIAL = ("#ffffff", "#808080"), ("#ffe8cc", "#ff9420")
# Colors of empty, partial and full blocks. A partial block shows its pairs; the others are opaque.
BLOCKS = ("#ffffff", "#00000000", "#3d7edb")


def plot(
    mask: Bool[Array, "..."] | MaskObject | None = None,
    *,
    q_len: int | None = None,
    kv_len: int | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int32[Array, " B"] | None = None,
    key_value_seq_lengths: Int32[Array, " B"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    segment_ids: Int32[Array, "B T"]
    | tuple[Int32[Array, "B T"], Int32[Array, "B S"]]
    | None = None,
    query_offset: int | Int32[Array, ""] | Int32[Array, " B"] = 0,
    query_positions: Int32[Array, "#B T"] | None = None,
    key_value_positions: Int32[Array, "#B S"] | None = None,
    b: int = 0,
    h: int = 0,
    block_q: int | None = None,
    block_kv: int | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw which keys each query sees: keys along x, queries down y.

    It takes the arguments of `attention` that restrict keys, so the mask of any call can be drawn.
    Visible pairs are grey. With tile sizes the colors tell what kernels do: white blocks are empty,
    and kernels skip them; blue blocks are full, and kernels compute them without the mask; orange
    blocks are partial, and kernels evaluate the mask: their hidden pairs are pale. The legend names
    the colors of the picture. Needs matplotlib, and memory for all T * S pairs: draw short lengths.

    Args:
        mask: as in `attention`.
        q_len: T. May be left out where `mask`, `segment_ids` or positions have that length.
        kv_len: S. May be left out in the same cases.
        is_causal: as in `attention`.
        query_seq_lengths: as in `attention`.
        key_value_seq_lengths: as in `attention`.
        local_window_size: as in `attention`.
        segment_ids: as in `attention`.
        query_offset: as in `attention`.
        query_positions: as in `attention`.
        key_value_positions: as in `attention`.
        b: the batch element whose mask is drawn.
        h: the query head whose mask is drawn.
        block_q: queries in a tile; None for both tile sizes: draw no blocks.
        block_kv: keys in a tile.
        ax: matplotlib Axes to draw into; None: a new figure.

    Returns:
        The Axes. The first of its `images` is the mask. With tiles, the first of its `collections`
        has the class of each block: 0 empty, 1 partial, 2 full.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: an argument is of the wrong kind or dtype.
        ValueError: the arguments do not fit together, or a length is not known.

    Example:
        >>> import pallas_flash
        >>> ax = pallas_flash.masks.plot(q_len=8, kv_len=8, is_causal=True, block_q=4, block_kv=4)
        >>> int(ax.images[0].get_array().sum())
        36
    """
    try:
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap
    except ImportError as error:
        raise ImportError(
            "`masks.plot` must have matplotlib, and it cannot be imported. Install it: "
            "`pip install matplotlib`."
        ) from error

    ids: Any = (segment_ids, segment_ids)
    if isinstance(segment_ids, (tuple, list)) and len(segment_ids) == 2:
        ids = segment_ids
    lengths: Any = (query_seq_lengths, key_value_seq_lengths)
    positions: Any = (query_positions, key_value_positions)
    sizes = [np.shape(x)[0] for x in (*lengths, *ids, *positions, query_offset) if np.ndim(x)]
    batch, num_heads, T, S = (1,) * 4 if mask is None else sizes_of(mask)
    batch, num_heads = _axis_size("b", b, max(batch, *sizes, 1)), _axis_size("h", h, num_heads)
    q_len = _length("q_len", q_len, T, ids[0], positions[0])
    kv_len = _length("kv_len", kv_len, S, ids[1], positions[1])
    joined = attention.mask_of(
        (batch, num_heads, q_len, kv_len),
        mask,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        query_offset=query_offset,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
    )
    joined = jax.tree.map(whole, joined)
    q_pos, k_pos = (jnp.arange(length, dtype=jnp.int32) for length in (q_len, kv_len))
    at = jnp.int32(b), jnp.int32(h), q_pos[:, None], k_pos[None, :]
    allowed = np.broadcast_to(joined.allowed(*at) if joined else True, (q_len, kv_len))

    if ax is None:
        _, ax = plt.subplots()
    with_blocks = block_q is not None or block_kv is not None
    colors = ListedColormap(PAIRS_IN_PARTIAL if with_blocks else PAIRS)
    ax.imshow(allowed, cmap=colors, vmin=0, vmax=1, interpolation="nearest")
    ax.set(xlabel="key", ylabel="query")
    if with_blocks:
        q = Tiling(q_len, at_least(1, "block_q", block_q))
        kv = Tiling(kv_len, at_least(1, "block_kv", block_kv))
        some, full = (
            np.asarray(x)[b % len(x), h % x.shape[1]].astype(int)
            for x in joined.within(kv=kv).block_classes(q, kv)
        )
        _draw_blocks(ax, q, kv, some + full, allowed)
    return ax


def _draw_blocks(ax, q: Tiling, kv: Tiling, classes: np.ndarray, allowed: np.ndarray) -> None:
    """Cover empty and full blocks with their color, and name the colors that occur.

    Args:
        ax: Axes that show `allowed`.
        q: the tiles of the queries.
        kv: the tiles of the keys.
        classes: int [query tiles, key tiles]: 0 empty, 1 partial, 2 full.
        allowed: bool [T, S].
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    edges = (np.append(tiling.first, tiling.length) - 0.5 for tiling in (kv, q))
    colors = ListedColormap(BLOCKS)
    ax.pcolormesh(*edges, classes, cmap=colors, vmin=0, vmax=2, edgecolor="black", lw=0.5)
    of_query, of_key = (np.arange(tiling.length) // tiling.block for tiling in (q, kv))
    in_partial = allowed[classes[of_query[:, None], of_key] == 1]
    occurring = {
        "empty block": (BLOCKS[0], (classes == 0).any()),
        "partial, hidden": (PAIRS_IN_PARTIAL[0], not in_partial.all()),
        "partial, visible": (PAIRS_IN_PARTIAL[1], in_partial.any()),
        "full block": (BLOCKS[2], (classes == 2).any()),
    }
    handles = [
        Patch(facecolor=color, edgecolor="black", label=name)
        for name, (color, occurs) in occurring.items()
        if occurs
    ]
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)


def _axis_size(name: str, index: int, known: int) -> int:
    """Return the size of an axis of which `index` is drawn; an axis of size 1 broadcasts."""
    index = at_least(0, name, index)
    if 1 < known <= index:
        raise ValueError(
            f"`{name}` must be in 0 .. {known - 1} for this mask; got {index}. Draw one of those."
        )
    return max(known, index + 1)


def _length(name: str, given: int | None, known: int, *of_tokens) -> int:
    """Return the given length, or else the length of a mask or of an array [B, length]."""
    if given is None:
        given = max(known, *(np.shape(x)[-1] if np.ndim(x) else 1 for x in of_tokens))
        if given == 1:
            raise ValueError(
                f"`{name}` must be given where neither `mask`, `segment_ids` nor positions tell "
                "it; got None. Give the length to draw."
            )
    return at_least(1, name, given)
