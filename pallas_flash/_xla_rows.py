"""Attention in plain JAX by blocks of queries with all of their keys: how "xla" computes on a GPU.

A block's scores go through device memory, and what counts is how often. With whole rows there is
neither a running maximum nor a rescaling, and XLA makes one pass of a softmax:

    s   = scores(scale * q @ k.T), masked
    o   = dropout(softmax(s)) @ v
    lse = log(sum(exp(s)))             another pass, which goes where nobody asks for it

The backward computes p, by the softmax or as exp(s - lse), and ds = p * (dp - delta) once each, and
stores them in the dtype of the operands, see `_narrow`.

Memory is linear in T and S, because no more than `BYTES` of scores exist at a time. That bounds the
examples and key/value heads that are computed together, a share, which come one after the other.
Only where the scores of a single key/value head are too many, or where the mask leaves out keys of
some queries, are queries cut into blocks. A block takes the keys from the first one to the last one
that any of its queries sees. What is static may differ from block to block, but makes a program of
its own, so there are few different widths.

Letters of the einsums: b example and k key/value head of the share, g query head of its group, t
query of the block, s key, h head size of q and k, v head size of v.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash import _key_center
from pallas_flash._dropout import drop, kept, rescaled
from pallas_flash._masks import Mask, Tiling
from pallas_flash._operands import Cut, Pairs, is_pairs
from pallas_flash._problem import Gradients, Problem
from pallas_flash._scores import LogSum, below, with_sink

# The scores of all examples, heads and queries that exist at the same time.
BYTES = 2**30

# Fewer queries of a key/value head are no block: sums over keys would be read and written too
# often.
LEAST_ROWS = 256

# Up to so many keys are taken by all blocks where arrays tell which ones each sees: a tile of the
# other way has as many, and would skip none.
UNKNOWN = 2048

# Different widths of blocks, and what they and their first keys are multiples of.
WIDTHS, ALIGNED = 4, 128

# Bytes that pass through memory for a score, and for a number of dk and dv in every block.
PER_SCORE, PER_SUM = 24, 12


class Group(NamedTuple):
    """Blocks of queries one after the other that take equally many keys.

    Attributes:
        first: the number of the first block.
        starts: the first key of each.
        width: the keys of each.
    """

    first: int
    starts: tuple[int, ...]
    width: int


@dataclasses.dataclass(frozen=True)
class Cuts:
    """How a problem is divided; all of it is known when it is traced.

    Attributes:
        batch: examples in a share.
        kv_heads: key/value heads in a share, all of them if it has several examples.
        rows: queries in a block.
        groups: of blocks.
    """

    batch: int
    kv_heads: int
    rows: int
    groups: tuple[Group, ...]


def cuts(problem: Problem) -> Cuts | None:
    """How to divide the problem, or None if tiles of some keys serve it better.

    They do where arrays tell which keys are left out: what is empty can only then be skipped. With
    symbolic sizes nobody knows.
    """
    p = problem
    if p.symbolic:
        return None
    budget = BYTES // p.accumulator_dtype.itemsize
    head = p.groups * p.q_len * p.kv_len
    batch = _divisor(p.batch, budget // (p.num_kv_heads * head))
    kv_heads = p.num_kv_heads if batch else _divisor(p.num_kv_heads, budget // head)
    most = p.q_len if head <= budget else budget // (p.groups * p.kv_len)
    if most < min(p.q_len, LEAST_ROWS):
        return None
    best = None
    for parts in itertools.takewhile(lambda n: n == 1 or p.q_len >= n * LEAST_ROWS, _powers()):
        rows = -(-p.q_len // parts)
        rows = rows if parts == 1 else -(-rows // 8) * 8
        if rows > most:
            continue
        groups = _groups(p.mask, Tiling(p.q_len, rows), p.kv_len)
        if groups is None:
            return None
        width = sum(len(group.starts) * group.width for group in groups)
        cost = width * (p.groups * rows * PER_SCORE + (p.head_dim + p.value_dim) * PER_SUM)
        if best is None or cost < best[0]:
            best = cost, Cuts(batch or 1, kv_heads or 1, rows, groups)
        if not p.mask:
            break
    return best and best[1]


def _powers():
    return (2**i for i in itertools.count())


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is no larger than `most`; 0 if there is none."""
    return max((d for d in range(1, min(n, most) + 1) if n % d == 0), default=0)


def _groups(mask: Mask, q: Tiling, kv_len: int) -> tuple[Group, ...] | None:
    """None if arrays tell which keys a block sees, and there are many."""
    kv = Tiling(kv_len, min(ALIGNED, kv_len))
    if mask.scattered or not isinstance(ranges := mask.kv_ranges(q, kv), np.ndarray):
        if kv_len > UNKNOWN:
            return None
        ranges = np.broadcast_to(np.asarray([0, 0, kv.count, kv.count], np.int32), (1, q.count, 4))
    [ranges] = ranges
    start, stop = ranges[:, 0], np.maximum(ranges[:, 0] + 1, ranges[:, 3])
    # The widths are multiples of a share of the largest one.
    unit = -(-(stop - start).max() // WIDTHS)
    width = np.minimum(-(-(stop - start) // unit) * unit * kv.block, kv_len)
    start = np.maximum(np.minimum(start * kv.block, kv_len - width), 0)
    runs = itertools.groupby(range(q.count), key=lambda i: int(width[i]))
    return tuple(
        Group(blocks[0], tuple(int(start[i]) for i in blocks), width)
        for width, blocks in ((width, list(run)) for width, run in runs)
    )


def forward(problem: Problem, cuts: Cuts):
    """See `_xla.forward`."""
    p, rows = problem, _Rows(problem, cuts)

    def share(_, first, of_rows, of_keys):
        k, v = of_keys

        def block(_, tile, q):
            keys = tile.keys_of(v)
            s, _ = tile.scores(q, tile.keys_of(k))
            weight = drop(kept(p.dropout, tile.at), rows.softmax(s))
            o = rows.einsum("bkgts,bksv->bkgtv", weight.astype(p.dtype), keys)
            m, l = _max_and_sum(s, large=p.large)
            alive = l > 0
            m, l = jnp.where(alive, m, 0), jnp.where(alive, l, 1)
            if p.sinks is not None:
                without = l
                m, l, factor = with_sink(m, l, tile.sinks())
                o = o * (factor * without / l)[..., None]
            log_sum = LogSum(m, jnp.where(alive, jnp.log2(l), -jnp.inf))
            return (), (rescaled(p.dropout, o).astype(p.dtype), log_sum)

        return *rows.visit(block, (), first, *of_rows), ()

    _, (o, log_sum), _ = rows.shares(share, (), (rows.query,), (rows.key, rows.value))
    return o, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 2), log_sum)


def backward(
    problem: Problem,
    cuts: Cuts,
    do,
    delta,
    m,
    log_l,
    center,
    *,
    whole: bool,
    want_bias: bool,
) -> Gradients:
    """See `_xla.backward`; without the gradients of the scale and the sinks.

    That of the queries is float32, without its factor, and of centered keys.

    Args:
        problem: the call.
        cuts: how it is divided.
        do: [B, T, N, V].
        delta: [B, T, N].
        m: likewise, and with `log_l` the LSE, in natural units.
        log_l: likewise, +inf where a row sees nothing.
        center: float32 [B, K, H], see `_key_center`; or None.
        whole: whether the rows have all their keys here.
        want_bias: whether its gradient is wanted.
    """
    p, rows = problem, _Rows(problem, cuts)
    dtype = p.accumulator_dtype
    # The softmax again, and not exp(s - lse): it costs the same, and where nobody else asks for the
    # LSE, a pass in the forward is saved. With a sink, and where m is needed apart, the LSE is.
    again = whole and not p.large and p.sinks is None
    lse = (m, log_l) if p.large else (m + log_l,)
    do, delta = map(rows.seeing, (do, delta))
    # What rounds to 16 bits in the end can do with a dp of bfloat16, whose range is float32's.
    dp_dtype = p.dtype if p.dtype == jnp.bfloat16 else dtype

    def share(sums, first, of_rows, of_keys):
        k, v, *centered = of_keys

        def block(sums, tile, q, do, delta, *lse):
            dk, dv, dbias = sums
            keys = tile.keys_of(k)
            s, pull = tile.scores(q, keys)
            delta, *lse = (x[..., None] for x in (delta, *lse))
            if again:
                weight = rows.softmax(s)
            else:
                s = below(s, lse[0], large=p.large)
                weight = jnp.exp(s - lse[1] if p.large else s)
            weight = _narrow(weight, p.dtype)
            dp = rows.einsum("bkgtv,bksv->bkgts", do, tile.keys_of(v), dp_dtype)
            keep = kept(p.dropout, tile.at)
            dp = drop(keep, rescaled(p.dropout, dp.astype(dtype)))
            ds = pull(weight.astype(dtype) * (dp - delta))
            if want_bias:
                dbias = tile.add_to(dbias, ds)
            ds = _narrow(ds, p.dtype)
            if keep is not None:
                weight = _narrow(drop(keep, rescaled(p.dropout, weight.astype(dtype))), p.dtype)
            dv = tile.add_keys(dv, rows.einsum("bkgts,bkgtv->bksv", weight, do))
            dk = tile.add_keys(dk, rows.einsum("bkgts,bkgth->bksh", ds, q))
            keys = tile.keys_of(centered[0]) if centered else keys
            return (dk, dv, dbias), rows.einsum("bkgts,bksh->bkgth", ds, keys)

        sums = rows.full(k.shape, 0), rows.full(v.shape, 0), *sums
        (dk, dv, *sums), dq = rows.visit(block, sums, first, *of_rows)
        return tuple(sums), dq, ((dk * p.scale).astype(p.dtype), dv.astype(p.dtype))

    sums = (rows.zero_bias() if want_bias else None,)
    # Of the operands themselves XLA would take the forward's scores, and keep them until now.
    q, do = lax.optimization_barrier((rows.query, do))
    of_rows, of_keys = (q, do, delta, *lse), (rows.key, rows.value)
    if center is not None:
        of_keys = *of_keys, _key_center.centered(rows.key, center[:, None])
    (dbias,), dq, (dk, dv) = rows.shares(share, sums, of_rows, of_keys)
    if want_bias:
        dbias = dbias[:, :, : p.bias.shape[2]].astype(p.bias.dtype)  # pyright: ignore[reportOptionalSubscript]
    return Gradients(dq, dk, dv, None, dbias)


def _narrow(x, dtype):
    """`x` rounded, and stored once for all who use it.

    Without the barrier XLA would skip the rounding where `x` is widened again, and compute it once
    for each of its users, from the scores.
    """
    return lax.optimization_barrier(x.astype(dtype))


def _max_and_sum(s, *, large: bool):
    """The maximum m of each row and sum(exp(s - m)), in a pass of their own.

    In use by others, those of the softmax would keep XLA from fusing it. Rows of -inf have sum 0.
    """

    def join(a, b):
        (m_a, l_a), (m_b, l_b) = a, b
        m = jnp.maximum(m_a, m_b)
        weights = (jnp.exp(below(x, m, large=large)) for x in (m_a, m_b))
        return m, sum(w * l for w, l in zip(weights, (l_a, l_b), strict=True))

    least, zero, one = (np.asarray(x, s.dtype) for x in (jnp.finfo(s.dtype).min, 0, 1))
    # Ones, with a tangent if s has one: JAX's rule for such a reduction asks for it.
    return lax.reduce((s, lax.clamp(one, s, one)), (least, zero), join, (s.ndim - 1,))


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A block's scores: [b, k, g, t, s].

    Attributes:
        rows: what it is of.
        first: the first example, key/value head, query and key.
        shape: how many of each.
    """

    rows: "_Rows"
    first: tuple[Any, Any, Any, Any]
    shape: tuple[int, int, int, int]

    @property
    def at(self):
        """The indices b, h, q and k of all scores, which broadcast."""
        p = self.rows.problem
        (b, head, q, k), (n_b, n_heads, n_q, n_k) = self.first, self.shape
        iota = functools.partial(lax.iota, jnp.int32)
        return (
            (b + iota(n_b)).reshape(-1, 1, 1, 1, 1),
            (head * p.groups + iota(n_heads * p.groups)).reshape(1, n_heads, p.groups, 1, 1),
            (q + iota(n_q)).reshape(1, 1, 1, -1, 1),
            (k + iota(n_k)).reshape(1, 1, 1, 1, -1),
        )

    def scores(self, q, k):
        """The scores, and the function that takes their cotangent to that of scaled products."""
        p, at = self.rows.problem, self.at
        s = p.scale * self.rows.einsum("bkgth,bksh->bkgts", q, k)
        pull = None
        mask, scores = jax.tree.map(self._cut, (self.rows.mask, self.rows.scores), is_leaf=is_pairs)
        if p.scores:
            s, pull = scores.vjp(s, *at)
        if not mask:
            return s, pull or (lambda ds: ds)
        ok = mask.allowed(*at)
        s = jnp.where(ok, s, -jnp.inf)
        # The derivative of a score that is not seen may be NaN.
        return s, (lambda ds: ds) if pull is None else (lambda ds: jnp.where(ok, pull(ds), 0))

    def sinks(self):
        """Of the share's heads, [1, k, g, 1]."""
        p, (_, head, *_), (_, heads, *_) = self.rows.problem, self.first, self.shape
        sinks = p.sinks.reshape(1, p.num_kv_heads, p.groups, 1)
        return _part(sinks, head, heads, 1)

    def keys_of(self, x):
        """Of an array [b, k, S, ...] the tile's keys."""
        return _part(x, self.first[3], self.shape[3], 2)

    def add_keys(self, total, x):
        """The sum [b, k, S, ...] with `x` added at the tile's keys."""
        if x.shape == total.shape:
            return total + x
        return lax.dynamic_update_slice_in_dim(total, self.keys_of(total) + x, self.first[3], 2)

    def add_to(self, dbias, ds):
        """The sum `dbias` with ds added, summed over the axes that bias broadcasts."""
        ds = ds.reshape(ds.shape[0], -1, *ds.shape[3:])
        broadcast = tuple(axis for axis in range(4) if dbias.shape[axis] == 1)
        ds = ds.sum(axis=broadcast, keepdims=True)
        # Of one dtype, in x64 mode too.
        first, _ = self._of_heads()
        first = [jnp.int32(i if n > 1 else 0) for i, n in zip(first, dbias.shape, strict=True)]
        return lax.dynamic_update_slice(
            dbias, lax.dynamic_slice(dbias, first, ds.shape) + ds, first
        )

    def _of_heads(self):
        """`first` and `shape`, counted in query heads."""
        g = self.rows.problem.groups
        (b, head, *q_and_k), (n_b, heads, *lengths) = self.first, self.shape
        return (b, head * g, *q_and_k), (n_b, heads * g, *lengths)

    def _cut(self, x):
        """Of an array over pairs what is the tile's, [b | 1, k | 1, g | 1, t | 1, s | 1]."""
        if not is_pairs(x):
            return x
        array = x.array
        for axis, (first, length) in enumerate(zip(*self._of_heads(), strict=True)):
            if x.shape[axis] > 1:
                array = _part(array, first, length, axis)
        heads = self.shape[1] if x.shape[1] > 1 else 1
        array = array.reshape(array.shape[0], heads, -1, *array.shape[2:])
        return Pairs(Cut(array, x.shape))


class _Rows:
    """A problem in shares, as `Cuts` says.

    Attributes:
        query, key, value: those of the problem, with zeros in place of what nobody sees.
        mask: of the queries that fill up the last block, too.
        scores: with a bias of them.
        all_see: whether every query is known to have a key with a finite score.
    """

    def __init__(self, problem: Problem, cuts: Cuts):
        p = self.problem = problem
        self.cuts = cuts
        self.q = Tiling(p.q_len, cuts.rows)
        self.mask: Mask = p.mask.within(q=self.q)
        shape = p.batch, p.num_heads, p.q_len, p.kv_len
        self._seeing = p.mask.seeing_queries(shape) if p.mask else None
        seen = p.visible_keys() if p.mask else None
        ragged = p.q_len % cuts.rows
        self.all_see = not p.scores and self._seeing is None and not ragged
        # What nobody sees may be NaN, and 0 * NaN would be NaN.
        self.query = self.seeing(p.query)
        self.key, self.value = (_where(seen, x) for x in (p.key, p.value))
        self.mask, self.scores = jax.tree.map(self._pad, (self.mask, p.scores), is_leaf=is_pairs)

    def seeing(self, x):
        """Zero in place of what belongs to queries that see nothing, of [B, T, N, ...]."""
        return _where(self._seeing, x)

    def full(self, shape, fill):
        """The start of a sum, varying over the manual mesh axes of the operands."""
        return lax.full_like(self.query, fill, self.problem.accumulator_dtype, shape)

    def zero_bias(self):
        return self.full(self.scores.bias.shape, 0)

    def softmax(self, s):
        """In an order that XLA knows as a softmax. Of a row of -inf it is zero."""
        m = s.max(axis=-1, keepdims=True)
        m = m if self.all_see else jnp.maximum(m, jnp.finfo(m.dtype).min)
        weight = jnp.exp(below(s, m, large=self.problem.large))
        l = weight.sum(axis=-1, keepdims=True)
        return weight / (l if self.all_see else jnp.where(l > 0, l, 1))

    def einsum(self, equation, a, b, dtype=None):
        p = self.problem
        dtype = dtype or p.accumulator_dtype
        return jnp.einsum(equation, a, b, precision=p.precision, preferred_element_type=dtype)

    def shares(self, step, carry, of_rows, of_keys):
        """Runs carry, rows, keys = step(carry, first, of_rows, of_keys) over all shares.

        `first` are a share's first example and key/value head. Arrays are [B, T, N, ...] and
        [B, S, K, ...], and those of a share [b, k, g, T, ...], with T filled up to whole blocks,
        and [b, k, S, ...]. Each share takes its own: then XLA copies them once.
        """
        p, cuts = self.problem, self.cuts
        each = (p.batch, cuts.batch), (p.num_kv_heads, cuts.kv_heads)
        starts = np.meshgrid(*(np.arange(0, *x, dtype=np.int32) for x in each), indexing="ij")

        def one(carry, first):
            rows = [self._split_rows(x, first) for x in of_rows]
            keys = [jnp.moveaxis(self._part(x, first, 1), 1, 2) for x in of_keys]
            carry, rows, keys = step(carry, first, rows, keys)
            keys = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 1), keys)
            return carry, (jax.tree.map(self._join_rows, rows), keys)

        def whole(x):
            # One axis at a time: with Explicit axes JAX 0.10 reshapes no more at once.
            x = x.reshape(*starts[0].shape, *x.shape[1:])
            return _joined(_joined(jnp.moveaxis(x, 1, 3), 3), 0)

        if starts[0].size == 1:
            carry, outs = one(carry, (0, 0))
            return carry, *outs
        carry, outs = lax.scan(one, carry, tuple(jnp.asarray(x.reshape(-1)) for x in starts))
        return carry, *jax.tree.map(whole, outs)

    def visit(self, step, carry, of_share, *arrays):
        """Runs carry, out = step(carry, tile, *rows of arrays) over all blocks of a share.

        Rows are the fourth axis of arrays and of `out`, which is joined.
        """
        rows, outs = self.cuts.rows, []
        for group in self.cuts.groups:
            count = len(group.starts)
            known = group.starts[0] if len(set(group.starts)) == 1 else None
            shape = self.cuts.batch, self.cuts.kv_heads, rows, group.width

            def block(carry, x, shape=shape, known=known):
                first, start, *parts = x
                start = known if start is None else start
                return step(carry, _Tile(self, (*of_share, first, start), shape), *parts)

            parts = [_part(x, group.first * rows, count * rows, 3) for x in arrays]
            if count == 1:
                carry, out = block(carry, (group.first * rows, None, *parts))
            else:
                parts = [x.reshape(*x.shape[:3], count, rows, *x.shape[4:]) for x in parts]
                parts = [jnp.moveaxis(x, 3, 0) for x in parts]
                first = rows * (group.first + jnp.arange(count, dtype=jnp.int32))
                start = None if known is not None else jnp.asarray(group.starts, jnp.int32)
                carry, out = lax.scan(block, carry, (first, start, *parts))
                out = jax.tree.map(lambda x: _joined(jnp.moveaxis(x, 0, 3), 3), out)
            outs.append(out)
        return carry, jax.tree.map(lambda *x: jnp.concatenate(x, axis=3), *outs)

    def _part(self, x, first, groups: int):
        """A share's part of [B, L, K * groups, ...]."""
        x = _part(x, first[0], self.cuts.batch, 0)
        return _part(x, first[1] * groups, self.cuts.kv_heads * groups, 2)

    def _split_rows(self, x, first):
        """Of [B, T, N, ...] a share's [b, k, g, T, ...], filled up to whole blocks."""
        x = _pad(self._part(x, first, self.problem.groups), 1, self.q)
        x = x.reshape(*x.shape[:2], self.cuts.kv_heads, self.problem.groups, *x.shape[3:])
        return jnp.moveaxis(x, 1, 3)

    def _join_rows(self, x):
        """The inverse of `_split_rows`, but for what is not the share's."""
        return _joined(jnp.moveaxis(x, 3, 1), 2)[:, : self.problem.q_len]

    def _pad(self, x):
        """Arrays over pairs with whole blocks along T, where they do not broadcast."""
        return Pairs(_pad(x.array, 2, self.q)) if is_pairs(x) and x.shape[2] > 1 else x


def _where(condition, x):
    """`x` [B, L, heads, ...] where a condition [B | 1, heads | 1, L] holds, else zero."""
    if condition is None:
        return x
    condition = jnp.moveaxis(condition, 1, 2)
    return jnp.where(condition.reshape(*condition.shape, *(1,) * (x.ndim - 3)), x, 0)


def _part(x, first, length: int, axis: int):
    if x.shape[axis] == length:
        return x
    if isinstance(first, int):
        return lax.slice_in_dim(x, first, first + length, axis=axis)
    return lax.dynamic_slice_in_dim(x, first, length, axis)


def _joined(x, axis: int):
    """An axis and the next one as one."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _pad(x, axis: int, tiling: Tiling):
    missing = tiling.count * tiling.block - tiling.length
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])
