"""dq, dk and dv in one pass for H + V above 256: a cluster of two CTAs divides the products.

Equations are as in `backward_kernel`. The registers of one CTA do not hold dk and dv, so the two
CTAs of a cluster share 128 keys, and each has one of them:

    CTA 0   s_t  = k @ q.T            p_t = exp2(c * s_t - lse_log2)        dv += dropout(p_t) @ do
    CTA 1   dp_t = v @ do.T           ds_t = p_t * (dropout(dp_t) - delta)  dk += ds_t @ q
    each    dq  += ds_t.T @ k         for its part of the columns

CTA 0 sends p_t, and CTA 1 sends ds_t back: 16 KiB each for 64 queries, through distributed shared
memory. So there are five products; each CTA computes two and its part of dq, and copies all of q
and do. For a product the cluster adds half as much to dq as a CTA would that computes all five for
64 keys.

**What CTA 0 sends** is p_t times the derivative of the scores, in 16 bits: float16 of 2**14 p_t, so
that there are 11 significant bits down to 4e-9. (ds_t, which comes of it, is rounded to the 8 bits
of bfloat16 or the 11 of float16.) With a score function, whose derivative may be any number, it has
the dtype of the operands and no factor. The sign says what dropout keeps; where scores have a
derivative, which may be negative, CTA 1 draws that again.

**Roles.** A CTA has three warpgroups, as in `backward_kernel`: two consumers (240 registers) with
64 keys each, and a producer (24 registers), which copies all tiles. dq's strips of columns are
divided among the four consumers; where the strips of a CTA are an odd number, both of its consumers
compute the one in the middle, and consumer 0 adds it.

**A step**, of the j-th queries. CTA 0 computes dq of the step before, so that ds_t has the time of
a step to come. CTA 1 starts dp_t of the next step before it adds dq, so that it runs while the
additions wait for memory. (The same with s_t in CTA 0 made causal calls 8 % slower.)

    CTA 0   s_t(j)   p_t(j), sent   dv(j)   wait for ds_t(j - 1)   dq(j - 1)
    CTA 1   wait for p_t(j)   ds_t(j), sent   dq(j)   dk(j)   dp_t(j + 1)

**Shared memory.** Tiles lie in strips, [columns / width, rows, width], see `backward_kernel`. A CTA
has one of two sets of tiles, in the same memory; sums leave through it in the end.

| buffer | CTA 0 | CTA 1 |
|---|---|---|
| outer tile, 128 keys | k | v, and the columns of k for its part of dq |
| q, do, 64 queries | stages + 1 of each | stages of each |
| ds [2, 128, 64] | | ds_t of both warpgroups |
| received [2, 128, 64] | ds_t | p_t, as registers hold it |
| numbers, float32 [stages + 1, ..] | the LSE | delta |
| one more row of it | barriers of messages (1) | the same |
| pairs, see `pairs_pipelines` | masks of the inner tile, where there is room | |

(1) An array of their own would take 1 KiB, the room of a mask's tile at head dim 256.

**Barriers.** A copy and a warpgroup of 128 threads are one arrival each. At barriers of the cluster
an arrival is one at the barriers of both CTAs.

| barrier | arrivals | who arrives | who waits | what it says |
|---|---|---|---|---|
| k_full | copies of k | these copies | consumers of CTA 0 | k is there |
| v_full | copies of v and k | these copies | consumers of CTA 1 | v and columns of k are there |
| queries.full, cotangents.full [stage] | copies | these copies | consumers | the tile is there |
| queries.empty, cotangents.empty [stage] | 2 | consumers | producer | products have read it (5) |
| numbers_full [slot] | copies | these copies | consumers | numbers are there (2) |
| messages [buffer] | 1 and 16 KiB | consumer 0, and bytes | consumers | a message is there (3) |
| started | 1 of each CTA | consumer 0 | consumers | messages may be sent |
| ended | 2 of each CTA | consumers | consumers | both CTAs have received all messages |
| turn[step % 2] | 1 | producer | consumers | dq of the step may be added, in turn (5) |
| landed | 1 | a copy | producer | rows behind a valid length can be zeroed |
| DS_WRITTEN | 256 threads (4) | consumers of CTA 1 | the same | both have written ds_t |
| TILES_READ | 256 threads | consumers | consumers | both have read all tiles: sums go there |
| KEYS_CENTERED | 256 threads | consumers | consumers | both have centered their keys |

(2) A slot needs no empty barrier. Numbers j are copied when do of step j - n has been read, for n
stages of do. In CTA 0 that was for dv(j - n), after consumers had used numbers j - n; in CTA 1 for
dp_t(j - n), after they had used numbers j - n - 1. So n or n + 1 slots suffice: stages + 1 in both.

(3) A message needs no acknowledgement, because the next message back implies it. CTA 0 sends
p_t(j + 2) when both of its consumers have received ds_t(j) and computed dq(j). CTA 1 sends
ds_t(j + 2) when it has received p_t(j + 2). So two buffers suffice in `received`. In `ds` they do
because both consumers of CTA 1 have computed dq(j) when they meet at DS_WRITTEN of step j + 1, and
CTA 0 has received ds_t(j) when it sends p_t(j + 2).

(4) Named barriers, see `Meeting`.

(5) In CTA 1 as in `backward_kernel`. CTA 0 adds dq of step j in step j + 1, and releases queries at
the beginning of a step. The producer reports the turn of step j when the queries of step j have
been released. Consumers know of turn j - 2 by then, so that two barriers suffice. When the queries
of step j + 2 have been released, dq of step j has been added. In the end consumers release two
stages more, for the last two steps.
"""

import abc
import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common, ptx
from pallas_flash._backends.mosaic.backward_common import (
    Operands,
    copies_in_strips,
    num_statistics,
    statistics,
)
from pallas_flash._backends.mosaic.backward_keys import (
    BLOCK_KV,
    CONSUMERS,
    DS_STAGES,
    PRODUCER,
    TURNS,
    Cta,
    KeysConsumer,
    KeysProducer,
    Meeting,
    OuterKeysConfig,
    pairs_pipelines,
    store_sums,
    subtract_center,
    turn_barrier,
)
from pallas_flash._backends.mosaic.pipeline import Pipeline
from pallas_flash._problem.dropout import drop, rescaled
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import BackwardTile, padded

plgpu = common.plgpu

CLUSTER = 2  # CTAs.
OF_DV, OF_DK = 0, 1  # Their ranks.
MESSAGE_BYTES = 2 * BLOCK_KV * ptx.ROWS


# ------------------------------------------------------------------------------------------------
# Shared memory
# ------------------------------------------------------------------------------------------------


class TilesOfDv(NamedTuple):
    """Tiles of the CTA of a cluster that sums dv."""

    k: Any
    q: Any
    do: Any


class TilesOfDk(NamedTuple):
    """Tiles of the CTA of a cluster that sums dk; `k` has its columns of dq, None if none."""

    v: Any
    k: Any
    q: Any
    do: Any
    ds: Any


class ClusterScratch(NamedTuple):
    """Shared memory of a CTA of `backward_cluster`; None where there is nothing."""

    # A union: `TilesOfDv`, `TilesOfDk`, dv and dk on their way to device memory.
    tiles: Any
    queries: Pipeline
    cotangents: Pipeline
    received: Any
    numbers: Any
    pairs: Pipeline | None
    k_full: Any
    v_full: Any
    numbers_full: Any
    started: Any
    ended: Any
    turn: Any
    landed: Any


def strips_of_dq(strips: int) -> tuple[int, int]:
    """Return how many of the `strips` of dq's columns each CTA of a cluster computes."""
    return strips - strips // 2, strips // 2


def cluster_scratch(
    p: Problem, tile: BackwardTile, has_lengths: bool, in_turn: bool
) -> ClusterScratch:
    """Return its specification; arguments as of `backward_launch.scratch`."""
    head_dim, value_dim = padded(p.head_dim, p.value_dim)
    rows, stages = ptx.ROWS, tile.stages

    def strips(columns, *outer, rows=BLOCK_KV):
        return common.strips(p.dtype, *outer, rows=rows, columns=columns)

    def inner(columns, stages):
        return strips(columns, stages, rows=rows)

    def pipeline(dim, tiles):
        copies = copies_in_strips(dim, tiles)
        return Pipeline.spec(None, stages + 1, copies=copies, consumers=CONSUMERS)

    k, v = strips(head_dim), strips(value_dim)
    count, _, width = k.shape
    _, here = strips_of_dq(count)
    # ds and k are operands of dq's product, and have to lie alike.
    ds = plgpu.SMEM((DS_STAGES, BLOCK_KV, rows), p.dtype, transforms=ptx.tiled(width))
    q, do = inner(head_dim, stages + 1), inner(value_dim, stages + 1)
    of_dk = TilesOfDk(
        v=v,
        k=common.strips(p.dtype, rows=BLOCK_KV, columns=here * width, width=width)
        if here
        else None,
        q=inner(head_dim, stages),
        do=inner(value_dim, stages),
        ds=ds,
    )
    memory = ClusterScratch(
        tiles=plgpu.RefUnion(
            *(TilesOfDv(k, q, do), of_dk, inner(value_dim, CONSUMERS), inner(head_dim, CONSUMERS))
        ),
        queries=pipeline(p.head_dim, q),
        cotangents=pipeline(p.value_dim, do),
        received=ds,
        numbers=statistics(p, stages + 2, rows),
        pairs=None,
        k_full=common.barriers(1, count),
        v_full=common.barriers(1, v.shape[0] + here),
        numbers_full=common.barriers(stages + 1, num_statistics(p)),
        started=common.barriers(1, 1, CLUSTER),
        ended=common.barriers(1, CONSUMERS, CLUSTER),
        turn=common.barriers(TURNS) if in_turn else None,
        landed=common.barriers(1) if has_lengths else None,
    )
    pipelines = pairs_pipelines(p, rows, stages, stages if in_turn else 1, bias=False)
    return memory._replace(pairs=common.first_that_fits(memory, pipelines))


class Columns(NamedTuple):
    """The columns of dq that a CTA computes, in strips.

    Attributes:
        width: of a strip.
        first: the first strip.
        strips: strips of the CTA.
        of_consumer: strips that each of its consumers computes.
    """

    width: int
    first: int
    strips: int
    of_consumer: int

    @classmethod
    def from_rank(cls, tiles, rank: int) -> "Columns":
        """Return the columns of the CTA of a rank, which has these tiles."""
        _, strips, _, width = tiles.q.shape
        each = strips_of_dq(strips)
        return cls(width, each[0] * rank, each[rank], -(-each[rank] // CONSUMERS))

    @property
    def twice(self) -> int:
        """Strips that both consumers compute."""
        return CONSUMERS * self.of_consumer - self.strips


def tiles_of_rank(scratch: ClusterScratch, rank: int):
    """Return the tiles of the CTA of a rank, and its pipelines of queries and of cotangents."""
    tiles = tuple(scratch.tiles)[rank]

    def pipeline(pipeline: Pipeline, tiles) -> Pipeline:
        return dataclasses.replace(pipeline, smem=tiles, stages=tiles.shape[0])

    return tiles, pipeline(scratch.queries, tiles.q), pipeline(scratch.cotangents, tiles.do)


# ------------------------------------------------------------------------------------------------
# Consumers
# ------------------------------------------------------------------------------------------------


class Messages(NamedTuple):
    """Messages between the CTAs of a cluster, one a step each way; see notes 1 and 3.

    Attributes:
        received: the buffers, [DS_STAGES, 128, 64]; a message goes to the same place in both CTAs.
        barriers: shared memory for a barrier of each buffer.
        width: columns of a strip of ds_t.
        warpgroup: the consumer that sends and receives.
        mine: the slice of its 64 rows of a buffer.
    """

    received: Any
    barriers: Any
    width: int
    warpgroup: Any
    mine: Any

    def start(self, started):
        """Let messages come, when both CTAs are ready for them."""

        def start_messages():
            ptx.start_messages(self.barriers, DS_STAGES, MESSAGE_BYTES)
            plgpu.barrier_arrive(started)

        common.when(self.warpgroup == 0)(start_messages)
        plgpu.barrier_wait(started)

    def wait(self, j):
        """Wait for the message of step j; return its buffer."""
        n = common.remainder(j, DS_STAGES)
        ptx.wait_for_message(self.barriers, n, common.remainder(common.quotient(j, DS_STAGES), 2))
        expect = functools.partial(ptx.expect_message, self.barriers, n, MESSAGE_BYTES)
        common.when(self.warpgroup == 0)(expect)
        return n

    def send_p(self, j, p_t):
        """Send the message of step j to CTA 1, from registers."""
        n = common.remainder(j, DS_STAGES)
        ptx.send_words(p_t, self.received.at[n, self.mine], self.barriers, n, OF_DK, self.width)

    def take_p(self, n, dtype):
        """Return what `send_p` has sent to buffer n."""
        return ptx.take_words(self.received.at[n, self.mine], dtype, self.width)

    def send_ds(self, n, ds_t):
        """Send a message to buffer n of CTA 0, from shared memory."""
        ptx.send_tile(ds_t, self.received.at[n, self.mine], self.barriers, n, OF_DV, self.width)


class ClusterConsumer(KeysConsumer):
    """A consumer warpgroup of either CTA."""

    rank: int
    name: str  # The gradient that it sums.
    outer: Any  # The tile of keys or values of the CTA's first product.
    sums_like: Any  # A tile with as many columns as the sums have.

    def __init__(self, config, operands, grads, scratch: ClusterScratch, cta, warpgroup):
        super().__init__(config, operands, grads, scratch, cta, warpgroup)
        self.tiles, self.queries, self.cotangents = tiles_of_rank(scratch, self.rank)
        self.columns = Columns.from_rank(self.tiles, self.rank)
        self.dtype, self.pairs = self.tiles.q.dtype, None
        self.slots = scratch.numbers.shape[0] - 1

    def before_keys(self):
        """Let messages come."""
        barriers = self.scratch.numbers.at[self.slots]
        self.messages = Messages(
            self.scratch.received, barriers, self.columns.width, self.warpgroup, self.mine
        )
        self.messages.start(self.scratch.started.at[0])

    def keys_full(self):
        """Return the barrier of the outer tile."""
        return self.scratch.k_full if self.rank == OF_DV else self.scratch.v_full

    def epilogue(self, sums):
        """Scale the sums and store them."""
        Meeting.TILES_READ.wait()
        # Computed again: no register keeps it over the loop.
        options = self.config.options.element_options(self.operands.options, self.cta.b)
        self.store(self.scaled(sums, options))
        # A CTA must not exit while its copies are being read, or while the other one arrives.
        plgpu.barrier_arrive(self.scratch.ended.at[0])
        plgpu.barrier_wait(self.scratch.ended.at[0])

    @abc.abstractmethod
    def scaled(self, sums, options) -> Any:
        """Return the sums times their factor."""

    @abc.abstractmethod
    def ds_and_k(self, n) -> tuple:
        """Return ds_t in buffer n, and the CTA's strips of k for dq."""

    def zeros(self):
        """Return the sums of keys that no query sees."""
        shape = ptx.ROWS, ptx.columns_of(self.sums_like)
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), ptx.WGMMA)

    def start_first_product(self, j, pipeline: Pipeline):
        """Start the product of the warpgroup's outer rows and of an inner tile."""
        # The compiler is not to compute places before the loop.
        mine = pl.ds(ptx.anew(self.warpgroup) * ptx.ROWS, ptx.ROWS)
        return ptx.product_t(self.outer.at[:, mine], pipeline.smem_of(j))

    def wait_for_numbers(self, j):
        """Wait for the numbers of step j; return their slot."""
        slot = common.remainder(j, self.slots)
        plgpu.barrier_wait(self.scratch.numbers_full.at[slot])
        return slot

    def first_strip(self):
        """Return the first of the CTA's strips of dq that the warpgroup computes."""
        return self.warpgroup * (self.columns.strips - self.columns.of_consumer)

    def start_dq(self, n):
        """Start the warpgroup's part of dq, for ds_t in buffer n; None if there is none."""
        if not self.columns.strips:
            return None
        ds, k = self.ds_and_k(n)
        return ptx.product_of_transposed(
            ds, k.at[pl.ds(self.first_strip(), self.columns.of_consumer)]
        )

    def add_dq(self, j, products: int, dq):
        """Wait until at most `products` run, and add dq of step j to device memory."""
        if dq is None:
            return
        dq, columns, config = ptx.wait(products, dq), self.columns, self.config
        if config.in_turn:
            plgpu.barrier_wait(turn_barrier(self.scratch, j))
        head, first_query = self.inner.place_of(j)
        tile = self.cta.b * config.num_q_heads + self.first_head + head
        tile = tile * config.dq_tiles + common.quotient(first_query, ptx.ROWS)
        group = tile * ptx.groups(ptx.columns_of(self.queries.smem_of(0)))
        of_strip = ptx.groups(columns.width)
        group = group + (columns.first + self.first_strip()) * of_strip
        ref, twice = self.grads_refs["dq"].at[group], columns.twice * of_strip
        if twice:
            first = functools.partial(ptx.add_fragments, dq, ref, slice(twice))
            common.when(self.warpgroup == 0)(first)
        if columns.of_consumer > columns.twice:
            ptx.add_fragments(dq, ref, slice(twice, None))

    def store(self, sums):
        """Store the sums, through memory of tiles that nobody reads any more."""
        *_, staged_dv, staged_dk = self.scratch.tiles
        staged = (staged_dv if self.rank == OF_DV else staged_dk).at[self.warpgroup]
        ref = self.grads_refs[self.name]
        store_sums(self.config, self.cta, self.warpgroup, sums, staged, ref)


class DvConsumer(ClusterConsumer):
    """A consumer of CTA 0: s_t, p_t and dv."""

    rank, name = OF_DV, "dv"

    def __init__(self, *args):
        super().__init__(*args)
        self.outer, self.sums_like = self.tiles.k, self.tiles.do
        self.pairs = self.scratch.pairs

    def center_keys(self):
        """Subtract the center from the warpgroup's keys."""
        center = self.operands.center.at[self.cta.b, self.kv_head]
        subtract_center(center, self.tiles.k.at[:, self.mine])

    def scaled(self, sums, options):
        """Return dv."""
        _, exponent = message_format(self.config, self.dtype)
        return rescaled(options.extras.dropout, sums) * 2.0**-exponent

    def mainloop(self):
        """Return dv; dq is computed a step late."""
        last = self.inner.count - 1
        dv = self.step(jnp.int32(0), self.zeros(), first=True)
        dv = lax.fori_loop(jnp.int32(1), last + 1, self.step, dv)
        self.add_dq(last, 0, self.start_dq(self.messages.wait(last)))
        if self.config.in_turn:
            # The producer counts dq of a step when queries of two steps later are released. It has
            # waited for all earlier releases before the last turn, so it cannot miss these.
            for j in (1, 2):
                self.queries.consumer_release(last + j)
        return dv

    def step(self, j, dv, first: bool = False):
        """Compute dv of one inner tile, and dq of the one before."""
        self.queries.consumer_wait(j)
        s_t = ptx.wait(0, self.start_first_product(j, self.queries))
        self.queries.consumer_release(j)
        p_t = self.send_p(j, s_t)
        self.cotangents.consumer_wait(j)
        dv = ptx.accumulate(dv, p_t, self.cotangents.smem_of(j))
        dq = None if first else self.start_dq(self.messages.wait(j - 1))
        dv = ptx.wait(0 if dq is None else 1, dv)
        self.cotangents.consumer_release(j)
        self.add_dq(j - 1, 0, dq)
        return dv

    def send_p(self, j, s_t):
        """Send p_t to CTA 1; return it after dropout, in the dtype of the operands.

        Both are multiplied by a power of two, see `message_format`.
        """
        # Read here, where tiles are scattered: later all would wait for it.
        place = self.inner.place_of(j)
        slot = self.wait_for_numbers(j)
        scores = self.score_tile(j, place)
        dtype, exponent = message_format(self.config, self.dtype)

        def statistic(name):
            numbers = self.config.statistic(self.scratch.numbers, name, slot)
            numbers = plgpu.load(numbers, layout=ptx.COLUMN)
            return numbers - exponent if name == "lse" else numbers

        p_t = scores.weights(s_t, statistic)
        self.messages.send_p(j, scores.factors(p_t).astype(dtype))
        return scores.dropped(p_t).astype(self.dtype)

    def ds_and_k(self, n):
        """Return what CTA 1 has sent, and the first strips of all keys."""
        return self.scratch.received.at[n], self.tiles.k


class DkConsumer(ClusterConsumer):
    """A consumer of CTA 1: dp_t, ds_t and dk."""

    rank, name = OF_DK, "dk"

    def __init__(self, *args):
        super().__init__(*args)
        self.outer, self.sums_like = self.tiles.v, self.tiles.q

    def center_keys(self):
        """Subtract the center from the warpgroup's keys: the columns that are here."""
        if not self.columns.strips:
            return
        width = self.columns.width
        mine = pl.ds(self.columns.first * width, self.columns.strips * width)
        center = self.operands.center.at[self.cta.b, self.kv_head, mine]
        subtract_center(center, self.tiles.k.at[:, self.mine])

    def scaled(self, sums, options):
        """Return dk."""
        return sums * rescaled(options.extras.dropout, options.scale)

    def mainloop(self):
        """Return dk; dp_t is computed a step ahead."""
        self.cotangents.consumer_wait(0)
        dp_t = ptx.wait(0, self.start_first_product(0, self.cotangents))
        self.cotangents.consumer_release(0)
        nothing = self.zeros()
        dk, _ = lax.fori_loop(jnp.int32(0), self.inner.count, self.step, (nothing, dp_t))
        return dk

    def step(self, j, carry):
        """Compute dk and dq of one inner tile, and dp_t of the next one."""
        dk, dp_t = carry
        slot = self.wait_for_numbers(j)
        delta = plgpu.load(self.scratch.numbers.at[slot, pl.ds(0, ptx.ROWS)], layout=ptx.COLUMN)
        n = self.messages.wait(j)
        dtype, _ = message_format(self.config, self.dtype)
        factors = self.messages.take_p(n, dtype)
        ds_t = self.ds(j, factors.astype(jnp.float32), dp_t, delta).astype(self.dtype)
        my_ds = self.tiles.ds.at[n, self.mine]
        my_ds[...] = ds_t
        ptx.fence()
        Meeting.DS_WRITTEN.wait()
        self.messages.send_ds(n, my_ds)
        dq = self.start_dq(n)
        self.queries.consumer_wait(j)
        dk = ptx.accumulate(dk, ds_t, self.queries.smem_of(j))
        # After the last step nobody copies, and nobody uses this product.
        more = j + 1 < self.inner.count
        common.when(more)(lambda: self.cotangents.consumer_wait(j + 1))
        dp_t = self.start_first_product(j + 1, self.cotangents)
        self.add_dq(j, 2, dq)
        dk = ptx.wait(1, dk)
        self.queries.consumer_release(j)
        dp_t = ptx.wait(0, dp_t)
        self.cotangents.consumer_release(j + 1)
        return dk, dp_t

    def ds(self, j, factors, dp_t, delta):
        """Return ds_t."""
        config, kept, shape = self.config, None, dp_t.shape
        _, exponent = message_format(config, self.dtype)
        if config.options.drops:
            if config.options.has_scores:
                head, first_query = self.inner.place_of(j)
                at = self.first_head + head, first_query, self.first_key
                kept = self.options.kept(shape, *at, transposed=True)
            else:
                kept, factors = factors > 0.0, jnp.abs(factors)
        dp_t, delta = drop(kept, dp_t) * 2.0**-exponent, delta * 2.0**-exponent
        ds_t = factors * (dp_t - common.along_columns(delta, shape))
        if not config.masked:
            return ds_t
        # Where a pair is not allowed, dp may be infinite. A branch needs registers for both ways.
        if config.options.drops:
            return jnp.where(factors == 0.0, 0.0, ds_t)
        seen = functools.partial(ptx.where, factors != 0.0)
        return common.cond(self.inner.masked(j), lambda x: seen(x, 0.0), lambda x: x, ds_t)

    def ds_and_k(self, n):
        """Return ds_t of both warpgroups, and the columns of keys that are here."""
        return self.tiles.ds.at[n], self.tiles.k


def message_format(config: OuterKeysConfig, dtype) -> tuple[Any, int]:
    """Return the dtype of what CTA 0 sends, and the power of two by which it is multiplied."""
    return (dtype, 0) if config.options.has_score_mod else (jnp.float16, 14)


# ------------------------------------------------------------------------------------------------
# Producer
# ------------------------------------------------------------------------------------------------


class ClusterProducer(KeysProducer):
    """The warpgroup of a CTA that starts all copies; `rank` is the CTA's."""

    def __init__(self, config: OuterKeysConfig, operands: Operands, grads, memory, cta: Cta, rank):
        super().__init__(config, operands, grads, memory, cta)
        self.memory: ClusterScratch = memory
        self.rank, self.sums = rank, ["dv" if rank == OF_DV else "dk"]
        self.tiles, self.queries, self.cotangents = tiles_of_rank(memory, rank)
        self.counter = rank
        if rank == OF_DV:
            # The consumers add dq a step late, and release queries early in a step.
            self.turn_late, self.added_late = 1, 2

    @property
    def takes_turns(self) -> bool:
        """Return whether the CTA adds to dq in turn: the other may compute all columns."""
        return self.config.in_turn and Columns.from_rank(self.tiles, self.rank).strips > 0

    def load_keys(self):
        """Start the copies of the outer tile."""
        memory, operands, tiles = self.memory, self.operands, self.tiles
        at = self.kv_head, self.first_key
        if self.rank == OF_DV:
            self.copy_keys(operands.k, *at, tiles.k, memory.k_full)
        else:
            self.copy_keys(operands.v, *at, tiles.v, memory.v_full)
            if tiles.k is not None:
                first = Columns.from_rank(tiles, self.rank).first
                self.copy_keys(operands.k, *at, tiles.k, memory.v_full, first)

    def step(self, j):
        """Copy one inner tile: first what the first product of the CTA reads."""
        head, first_query = self.inner.place_of(j)
        h = self.first_head + head
        loads = [self.load_queries, self.load_cotangents]
        for load in loads if self.rank == OF_DV else reversed(loads):
            load(j, h, first_query)
        if self.rank == OF_DV:
            self.config.streams.copy(
                *(self.operands.streamed, self.memory.pairs, j),
                *(self.cta.b, h, first_query, self.first_key),
            )

    def load_queries(self, j, h, first_query):
        """Copy q."""
        queries = self.queries
        self.acquire_queries(j)
        self.copy_queries(self.operands.q, h, first_query, queries.smem_of(j), queries.filled(j))

    def load_cotangents(self, j, h, first_query):
        """Copy do, and the statistics or delta."""
        memory, config, operands = self.memory, self.config, self.operands
        cotangents = self.cotangents
        cotangents.producer_wait(j)
        self.copy_queries(operands.do, h, first_query, cotangents.smem_of(j), cotangents.filled(j))
        slot = common.remainder(j, memory.numbers.shape[0] - 1)
        full, rows = memory.numbers_full.at[slot], pl.ds(first_query, ptx.ROWS)
        # CTA 1 reads delta alone; as many copies as in CTA 0 complete the barrier.
        of_dk = ["delta"] * len(config.statistics)
        for name, source in zip(
            config.statistics, config.statistics if self.rank == OF_DV else of_dk, strict=True
        ):
            place = config.statistic(memory.numbers, name, slot)
            ref = getattr(operands, source).at[self.cta.b, h, rows]
            plgpu.copy_gmem_to_smem(ref, place, full)


# ------------------------------------------------------------------------------------------------
# Kernel
# ------------------------------------------------------------------------------------------------


def pallas_flash_backward_cluster(
    operands: Operands, added, *outputs, static: OuterKeysConfig, **memory
):
    """Compute the gradients of one K/V tile; `added` are those that are added to, by name."""
    config, scratch = static, ClusterScratch(**memory)
    stored = [name for name in config.grads.names if name not in added]
    grads = added | dict(zip(stored, outputs, strict=True))
    counts = config.kv.count, config.neighbours
    outer, (kv_tile, head) = common.digits(lax.axis_index("cta"), counts)
    b, head = config.place(head, outer)
    cta, warpgroup = Cta(b, head, config.kv_tile(kv_tile)), lax.axis_index("warpgroup")
    rank = lax.axis_index(common.RANK)
    for consumer in (DvConsumer, DkConsumer):
        here = rank == consumer.rank

        @common.when(config.exists(head, here & (warpgroup < CONSUMERS)))
        def _(consumer=consumer):
            consumer(config, operands, grads, scratch, cta, warpgroup).run()

        @common.when(config.exists(head, here & (warpgroup == PRODUCER)))
        def _(consumer=consumer):
            ClusterProducer(config, operands, grads, scratch, cta, consumer.rank).run()
