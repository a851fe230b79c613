"""`batch_invariant`: a row's bits depend on its own query and on the keys that it sees alone.

A row adds up its keys block by block. So the blocks of such calls have one size, whatever else a
call has, and each sequence begins at the first key of a block.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_flash._problem.masks import LeafKind, SegmentLeaf
from pallas_flash._problem.problem import Problem

# Packed sequences begin at multiples of this, at every head dim.
ALIGNED = 128
# Masks that let a row see keys of one run, in the order of their positions.
SERVED_MASKS = LeafKind.BAND, LeafKind.LENGTHS, LeafKind.DOCUMENTS


def block_kv(width: int) -> int:
    """Return the keys of a block, by the larger head dim."""
    return ALIGNED if width <= 128 else ALIGNED // 2


def _documents(p: Problem, *, traced: bool) -> list[SegmentLeaf]:
    """Return the leaves of the mask that compare segment ids, traced or known ones, with keys."""
    documents = [x for x in p.mask.leaves if isinstance(x, SegmentLeaf) and p.kv_len]
    return [x for x in documents if any(isinstance(y, Tracer) for y in x.numbers) == traced]


def misaligned(queries, keys, xp=jnp):
    """Return which queries [T] have a document whose keys [S] begin elsewhere, or are no run.

    Negative ids are of padding, which may lie anywhere. `xp` is the arrays' library.
    """
    order = xp.argsort(keys, stable=True).astype(xp.int32)
    first, last = (xp.searchsorted(keys[order], queries, side=x) for x in ("left", "right"))
    place = order[xp.minimum(first, len(keys) - 1)]
    is_run = order[last - 1] - place == last - 1 - first
    return (queries >= 0) & (last > first) & ~(is_run & (place % ALIGNED == 0))


def check_documents(p: Problem) -> None:
    """Raise ValueError if segment ids are known, and a document does not begin at a block."""
    for documents in _documents(p, traced=False):
        # NumPy needs no device, as calls that are compiled for another one have none.
        rows = zip(*map(np.asarray, documents.numbers), strict=True)
        wrong = np.argwhere([misaligned(q, k, np) for q, k in rows])
        if len(wrong):
            b, t = wrong[0]
            raise ValueError(
                "`segment_ids` must give each document one run of keys that begins at a multiple "
                f"of {ALIGNED} with `batch_invariant=True`; got another one, of query {t} of batch "
                f"element {b}. Give the padding behind a document its id if `is_causal`, else a "
                "negative one."
            )


def spoilt(p: Problem, o, lse):
    """Return the output and the LSE [B, T, ..], NaN where traced segment ids do not serve.

    `check_documents` would raise there if they were known. Rows that see no key stay as they are.
    """
    for documents in _documents(p, traced=True):
        wrong = jax.vmap(misaligned)(*documents.numbers)[:, :, None] & (lse != -jnp.inf)
        o, lse = jnp.where(wrong[..., None], jnp.nan, o), jnp.where(wrong, jnp.nan, lse)
    return o, lse
