"""dk and dv, and in the same pass dq: keys and values are the outer tile, queries the inner ones.

    s_t  = k @ q.T                      dp_t = v @ do.T                 [64, block_q] a warpgroup
    p_t  = exp2(c * s_t - lse_log2)     see `backward_common`
    dv  += dropout(p_t) @ do                                            [64, V]
    ds_t = p_t * (dropout(dp_t) - delta)
    dk  += ds_t @ q                     times scale once, after the loop [64, H]
    dq  += ds_t.T @ k                   times scale once, in the end     [block_q, H]

dk and dv stay in registers. dq is added to float32 in device memory by atomic adds, by default in
no order: two runs differ by the rounding of sums. So are dk and dv where several CTAs share a K/V
tile (`backward_splits`). Registers of a CTA hold 128 x 256 sums and one step; a larger H + V (of
padded head dims) takes two CTAs or two launches. `Grads` says which gradients a launch computes:

| backward | launches | products |
|---|---|---|
| H + V up to 256 | dq, dk and dv | 5 |
| H + V above 256 | dq, dk and dv, by a cluster (`backward_cluster`) | 5 |
| if threads read a bias, H or V above 64 | dk and dv; dq (`backward_dq`) | 4 + 3 |
| the same, H + V above 256 | dk; dv; dq | 3 + 2 + 3 |

**In turn.** Where sums must have one order, CTAs add to a tile of dq in the order of their K/V
tiles, from the last to the first. A counter in device memory says how many have added. The producer
waits until all CTAs before its own have (`scheduler.turns`), and counts its own when the consumers
have released the queries of the step, which they do after they have added. A CTA waits for earlier
CTAs of the grid alone. These run or have ended, because GPUs start CTAs in the order of the grid.
In clusters each CTA has a counter for its columns, and waits for CTAs of its own rank; CTA 0 goes
by the queries of two steps later.

Keys are centered first, see `_problem.key_center`: where the center c of a head is not zero, each
warpgroup subtracts it from its 64 keys in shared memory, once. The LSE is of the scores of k - c.
In two passes XLA subtracts it, because `backward_dq` streams keys.

**Roles.** A CTA has 128 keys and three warpgroups. Consumer warpgroups 0 and 1 (240 registers) have
64 keys each. For dq both need ds_t of all 128 keys, so they exchange it through shared memory, and
each computes half of the tile of dq: half of the queries if there are 128, else half of the
columns. Where halves are no whole tiles, both compute the columns in the middle, and warpgroup 0
alone adds these to dq (`dq_columns`). Warpgroup 2 is the producer (24 registers): it starts the
copies (TMA) of inner tiles.

**Shared memory.** Tiles lie in strips, [columns / width, rows, width], width up to 64 columns.

| buffer | shape | what |
|---|---|---|
| k, v | [strips, 128, width] | outer tile; dk and dv leave through them (3) |
| queries | stages x ([strips, block_q, width], float32 [statistics * block_q]) | q, and the LSE |
| cotangents | stages x ([strips, block_q, width], float32 [block_q]) | do, and delta |
| ds | [2, 128, block_q] | ds_t of both warpgroups, of this step and of the one before |
| pairs | see `pairs_pipelines` | bias and mask of the inner tile, where there is room |

**Barriers.** A copy arrives once, and a warpgroup of 128 threads arrives once. Full barriers are
waited for in each of their phases, empty ones before a stage is filled: at first all stages are
released.

| barrier | arrivals | who arrives | who waits | what it says |
|---|---|---|---|---|
| kv_full, one | copies of k and v (1) | these copies | consumers | the outer tile is there |
| queries.full[stage] | copies of q and LSE | these copies | consumers | q and LSE are there |
| queries.empty[stage] | 2 | consumers | producer | s_t and dk have been computed; dq is added |
| cotangents.full[stage] | copies of do | these copies | consumers | do is there |
| delta_full[stage] | 1 | copy of delta | consumers | delta is there |
| turn[step % 2] | 1 | producer | consumers | dq of the step may be added, in turn (6) |
| cotangents.empty[stage] | 2 | consumers | producer | dp_t, dv and ds_t have been computed |
| landed | 1 | a copy | producer | rows behind a valid length can be zeroed (2) |
| pairs.full[stage] | 2 for a bias (4), 1 a mask | their copies | consumers | tiles are there |
| pairs.empty[stage] | 2 | consumers | producer | bias and mask have been read |
| DS_WRITTEN | 256 threads (5) | consumers | consumers | both have written ds_t, for dq |
| TILES_READ | 256 threads | consumers | consumers | both have read k, or do: results go there |
| KEYS_CENTERED | 256 threads | consumers | consumers | both have centered their keys |

(1) Each consumer copies its own 64 keys, one copy for each strip of k and of v, and both wait for
all. With valid lengths the producer copies 128 keys, so that there are half as many copies. (2) If
a tile reaches beyond a valid length, its copies arrive here and not at its full barrier. The
producer waits for each, zeroes the rows, and arrives at the full barrier in its place. (3) Where dv
has a launch of its own, it leaves through the stages of do. (4) One for the keys of each consumer.
(5) Named barriers, see `Meeting`. (6) The producer reports it when the queries of the step before
have been released, so that consumers know of the turn before. One barrier would do here, not in
clusters.

**A step**, of the j-th queries, with two stages. Both warpgroups do this on their 64 keys. Time
runs to the right, and `|` is a wait:

    producer        copy q, lse (j+1) ......................  copy do, delta (j+1) .............
    matrix units    k q .. v do ....                    p do .......  ds k ..... ds q .........
    this warpgroup         | exp2: p | ds = p (dp - delta) store ds |    |       | add dq      |
    waits for              s         dp                        meeting   p do    ds k         ds q

do is released when the product p do, the oldest one, is done, and q after ds q. With one stage v do
starts before k q, because do is released earlier. This is the order of the source; ptxas moves most
of exp2 behind the wait for dp.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common, ptx
from pallas_flash._backends.mosaic.backward_common import (
    Operands,
    ScoreTile,
    TileCopies,
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
    Grads,
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
from pallas_flash._problem.dropout import rescaled
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import BackwardTile, padded

plgpu = common.plgpu


# ------------------------------------------------------------------------------------------------
# Shared memory
# ------------------------------------------------------------------------------------------------


class KeysScratch(NamedTuple):
    """Shared memory of a CTA of `backward_kernel`; None where there is nothing."""

    k: Any
    v: Any
    queries: Pipeline
    cotangents: Pipeline
    ds: Any
    pairs: Pipeline | None
    kv_full: Any
    delta_full: Any
    turn: Any
    landed: Any


def keys_scratch(
    p: Problem, tile: BackwardTile, grads: Grads, has_lengths: bool, in_turn: bool
) -> KeysScratch:
    """Return its specification; arguments as of `backward_launch.scratch`."""
    head_dim, value_dim = padded(p.head_dim, p.value_dim)
    stages, block_q = grads.stages(tile), tile.block_q
    k_sm = common.strips(p.dtype, rows=BLOCK_KV, columns=head_dim)
    v_sm = common.strips(p.dtype, rows=BLOCK_KV, columns=value_dim) if grads.dk else None
    kv_copies = k_sm.shape[-3] + (v_sm.shape[-3] if v_sm else 0)
    # ds and k are operands of dq's product, and have to lie alike.
    ds = plgpu.SMEM((DS_STAGES, BLOCK_KV, block_q), p.dtype, transforms=ptx.tiled(head_dim))

    def pipeline(dim, columns, copies, **scalars):
        tiles = common.strips(p.dtype, stages, rows=block_q, columns=columns)
        copies += copies_in_strips(dim, tiles)
        smem = dict(tiles=tiles, **scalars)
        return Pipeline.spec(smem, stages, copies=copies, consumers=CONSUMERS)

    memory = KeysScratch(
        k=k_sm,
        v=v_sm,
        queries=pipeline(
            *(p.head_dim, head_dim, num_statistics(p)), statistics=statistics(p, stages, block_q)
        ),
        cotangents=pipeline(
            *(p.value_dim, value_dim, 0), delta=plgpu.SMEM((stages, block_q), jnp.float32)
        ),
        ds=ds if grads.dq else None,
        pairs=None,
        kv_full=common.barriers(1, kv_copies * (1 if has_lengths else CONSUMERS)),
        delta_full=common.barriers(stages) if grads.dk else None,
        turn=common.barriers(TURNS) if in_turn else None,
        landed=common.barriers(1) if has_lengths else None,
    )
    pipelines = pairs_pipelines(p, block_q, stages, max(1, stages - 1) if in_turn else 1)
    return memory._replace(pairs=common.first_that_fits(memory, pipelines))


# ------------------------------------------------------------------------------------------------
# Consumers
# ------------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """The accumulators of a consumer warpgroup; None where a launch does not compute them."""

    dk: Any = None
    dv: Any = None


class BackwardConsumer(KeysConsumer):
    """One of the two warpgroups that compute."""

    def __init__(self, config, operands, grads, scratch: KeysScratch, cta, warpgroup):
        super().__init__(config, operands, grads, scratch, cta, warpgroup)
        self.grads, self.block_q = config.grads, config.q.block
        self.queries, self.cotangents = scratch.queries, scratch.cotangents
        self.pairs = scratch.pairs
        self.q_sm, self.do_sm = scratch.queries.smem["tiles"], scratch.cotangents.smem["tiles"]
        self.dtype, self.head_dim = scratch.k.dtype, ptx.columns_of(self.q_sm)
        self.value_dim = ptx.columns_of(self.do_sm)

    def before_keys(self):
        """Copy the warpgroup's rows of the outer tile, unless the producer does.

        The warpgroup that has registers to spare copies them. With lengths this is the producer,
        because their branches would cost registers here; without lengths the copies would cost the
        producer registers.
        """
        if self.config.has_lengths:
            return
        copies = TileCopies(None, None, self.cta.b)
        copies.start(*self._to_mine(self.operands.k, self.scratch.k))
        if self.grads.dk:
            copies.start(*self._to_mine(self.operands.v, self.scratch.v))

    def keys_full(self):
        """Return the barrier of the outer tile."""
        return self.scratch.kv_full

    def _to_mine(self, source, tile):
        return source, self.kv_head, self.first_key, tile.at[:, self.mine], self.scratch.kv_full

    def center_keys(self):
        """Subtract the center from the warpgroup's keys."""
        center = self.operands.center.at[self.cta.b, self.kv_head]
        subtract_center(center, self.scratch.k.at[:, self.mine])

    def zeros(self) -> Sums:
        """Return the sums of keys that no query sees."""

        def zeros(columns: int):
            return plgpu.layout_cast(jnp.zeros((ptx.ROWS, columns), jnp.float32), ptx.WGMMA)

        return Sums(
            dk=zeros(self.head_dim) if self.grads.dk else None,
            dv=zeros(self.value_dim) if self.grads.dv else None,
        )

    def mainloop(self) -> Sums:
        """Return the sums over all inner tiles."""
        return lax.fori_loop(jnp.int32(0), self.inner.count, self.step, self.zeros())

    # Products: each is started here, and waited for in `step`.

    def my_rows(self):
        """Return the slice of the warpgroup's keys, for k and v.

        Where a step needs many registers, the compiler is not to compute places before the loop.
        """
        extras, config = self.options.extras, self.config
        others = extras.scores or extras.dropout is not None or config.scattered
        busy = others or (config.masked and self.block_q > ptx.ROWS)
        return pl.ds((ptx.anew(self.warpgroup) if busy else self.warpgroup) * ptx.ROWS, ptx.ROWS)

    def start_s(self, j):
        """Start s_t = k @ q.T."""
        self.queries.consumer_wait(j)
        return ptx.product_t(
            self.scratch.k.at[:, self.my_rows()], self.q_sm.at[self.queries.stage(j)]
        )

    def start_dp(self, j):
        """Start dp_t = v @ do.T."""
        self.cotangents.consumer_wait(j)
        return ptx.product_t(
            self.scratch.v.at[:, self.my_rows()], self.do_sm.at[self.cotangents.stage(j)]
        )

    def start_dv(self, j, dv, p_t, scores: ScoreTile):
        """Start dv += dropout(p_t) @ do."""
        p_t = scores.dropped(p_t).astype(self.dtype)
        return ptx.accumulate(dv, p_t, self.do_sm.at[self.cotangents.stage(j)])

    def start_dk(self, j, dk, ds_t):
        """Start dk += ds_t @ q; ds_t is in registers or in shared memory."""
        return ptx.accumulate(dk, ds_t, self.q_sm.at[self.queries.stage(j)])

    def start_dq(self, j):
        """Start this warpgroup's part of dq = ds_t.T @ k."""
        ds, k = self.scratch.ds.at[common.remainder(j, DS_STAGES)], self.scratch.k
        if self.block_q > ptx.ROWS:
            # Half of the queries, all columns.
            return ptx.product_of_transposed(ds.at[:, self.mine], k)
        # All queries, half of the columns.
        width, columns = k.shape[-1], self.config.dq_columns(self.head_dim)
        strips = pl.ds(self.warpgroup * ((self.head_dim - columns) // width), columns // width)
        return ptx.product_of_transposed(ds, k.at[strips])

    # The computation between products.

    def softmax(self, j, scores: ScoreTile, s_t):
        """Return p_t; its signs say what dropout keeps."""
        stage, memory = self.queries.stage(j), self.queries.smem["statistics"]

        def statistic(name):
            return plgpu.load(self.config.statistic(memory, name, stage), layout=ptx.COLUMN)

        return scores.weights(s_t, statistic)

    def ds(self, j, scores: ScoreTile, p_t, dp_t):
        """Return ds_t in the dtype of the operands."""
        delta = self.cotangents.smem["delta"].at[self.cotangents.stage(j)]
        delta = plgpu.load(delta, layout=ptx.COLUMN)
        return scores.gradient(p_t, dp_t, delta).astype(self.dtype)

    def step(self, j, sums: Sums) -> Sums:
        """Compute one inner tile, see the diagram above."""
        # Read here, where tiles are scattered: later all would wait for it.
        place = self.inner.place_of(j)
        if self.grads is Grads.DV:
            return self.step_of_dv(j, place, sums)
        two_stages = self.config.stages > 1
        if two_stages:
            s_t, dp_t = self.start_s(j), self.start_dp(j)
        else:
            dp_t = self.start_dp(j)
            s_t = self.start_s(j)
        # A barrier of its own: the wait ends a basic block here, and without it registers spill.
        plgpu.barrier_wait(self.scratch.delta_full.at[self.cotangents.stage(j)])
        s_t = ptx.wait(1 if two_stages else 0, s_t)
        scores = self.score_tile(j, place)
        p_t = self.softmax(j, scores, s_t)
        dp_t = ptx.wait(0, dp_t)
        ds_t, (dk, dv) = self.ds(j, scores, p_t, dp_t), sums
        if self.grads.dv:
            dv = self.start_dv(j, dv, p_t, scores)
        else:
            ptx.fence()
            self.cotangents.consumer_release(j)
        if self.grads.dq:
            dk, dv = self.add_dq(j, place, ds_t, Sums(dk, dv))
        else:
            dk = self.start_dk(j, dk, ds_t)
            dv = self.wait_dv(j, dv, running=1)
        dk = ptx.wait(0, dk)
        self.queries.consumer_release(j)
        return Sums(dk, dv)

    def step_of_dv(self, j, place, sums: Sums) -> Sums:
        """Compute one inner tile where dv has a launch of its own."""
        s_t = ptx.wait(0, self.start_s(j))
        scores = self.score_tile(j, place)
        p_t = self.softmax(j, scores, s_t)
        ptx.fence()
        self.queries.consumer_release(j)
        self.cotangents.consumer_wait(j)
        dv = self.start_dv(j, sums.dv, p_t, scores)
        return Sums(dv=self.wait_dv(j, dv, running=0))

    def wait_dv(self, j, dv, *, running: int):
        """Return dv when at most `running` products still run, its own the oldest; release do.

        delta needs no `ptx.fence`: ds depends on it, and is an operand of a product by then.
        """
        if dv is not None:
            dv = ptx.wait(running, dv)
            self.cotangents.consumer_release(j)
        return dv

    def add_dq(self, j, place, ds_t, sums: Sums) -> Sums:
        """Add this warpgroup's part of dq to device memory; the product of dk still runs then."""
        my_ds = self.scratch.ds.at[common.remainder(j, DS_STAGES)].at[self.mine]
        my_ds[...] = ds_t
        ptx.fence()
        Meeting.DS_WRITTEN.wait()
        dq = self.start_dq(j)
        # The registers of a thread have no room for 256 columns and for ds_t.
        dk = self.start_dk(j, sums.dk, my_ds if self.head_dim > 192 else ds_t)
        dv = self.wait_dv(j, sums.dv, running=2)
        dq = ptx.wait(1, dq)
        if self.config.in_turn:
            plgpu.barrier_wait(turn_barrier(self.scratch, j))
        self.store_dq(place, dq)
        return Sums(dk, dv)

    def store_dq(self, place, dq):
        """Add a part of dq to device memory by atomic adds."""
        config, head_dim = self.config, self.head_dim
        columns = config.dq_columns(head_dim)
        head, first_query = place
        tile = self.cta.b * config.num_q_heads + self.first_head + head
        tile = tile * config.dq_tiles + common.quotient(first_query, 64)
        # Its part of the columns, or the next tile. One index needs fewer registers than several.
        offset = head_dim if self.block_q > ptx.ROWS else head_dim - columns
        group = tile * ptx.groups(head_dim) + self.warpgroup * ptx.groups(offset)
        ref = self.grads_refs["dq"].at[group]
        # Both warpgroups computed the columns in the middle; warpgroup 0 adds them.
        twice = ptx.groups(columns - offset) if self.block_q == ptx.ROWS else 0
        if twice:
            first = functools.partial(ptx.add_fragments, dq, ref, slice(twice))
            common.when(self.warpgroup == 0)(first)
        if offset:
            ptx.add_fragments(dq, ref, slice(twice, None))

    def epilogue(self, sums: Sums):
        """Scale the sums and store them."""
        if self.grads.dq or not self.grads.dk:
            # Results leave through shared memory that both warpgroups have read.
            Meeting.TILES_READ.wait()
        # Computed again: no register keeps it over the loop.
        options = self.config.options.element_options(self.operands.options, self.cta.b)
        dropout, (dk, dv) = options.extras.dropout, sums
        self.store(
            Sums(
                dk=None if dk is None else dk * rescaled(dropout, options.scale),
                dv=None if dv is None else rescaled(dropout, dv),
            )
        )

    def store(self, sums: Sums):
        """Start the copies of the results to device memory.

        They leave through the shared memory of the keys and values of this warpgroup, which only it
        reads by now; without v through a stage of do. Sums of splits leave from registers.
        """
        scratch, mine = self.scratch, pl.ds(self.warpgroup * ptx.ROWS, ptx.ROWS)
        of_dv = scratch.v.at[:, mine] if self.grads.dk else self.do_sm.at[self.warpgroup]
        staged = Sums(dk=scratch.k.at[:, mine], dv=of_dv)
        for name, x, tile in zip(Sums._fields, sums, staged, strict=True):
            if x is not None:
                store_sums(self.config, self.cta, self.warpgroup, x, tile, self.grads_refs[name])


# ------------------------------------------------------------------------------------------------
# Producer
# ------------------------------------------------------------------------------------------------


class BackwardProducer(KeysProducer):
    """The warpgroup that starts the copies of inner tiles."""

    scratch: KeysScratch

    def __init__(self, *args):
        super().__init__(*args)
        self.queries = self.scratch.queries

    def load_keys(self):
        """Start the copies of the outer tile, if there are lengths."""
        config, scratch = self.config, self.scratch
        if config.has_lengths:
            of_kv = (self.operands.k, scratch.k), (self.operands.v, scratch.v)
            for source, tile in of_kv if config.grads.dk else of_kv[:1]:
                self.copy_keys(source, self.kv_head, self.first_key, tile, scratch.kv_full)

    def step(self, j):
        """Copy one inner tile."""
        scratch = self.scratch
        head, first_query = self.inner.place_of(j)
        h = self.first_head + head
        # Cotangents are out of use earlier than queries if there is one stage.
        loads = [self.load_queries, self.load_cotangents]
        for load in loads if self.config.stages > 1 else reversed(loads):
            load(j, h, first_query)
        self.config.streams.copy(
            self.operands.streamed, scratch.pairs, j, self.cta.b, h, first_query, self.first_key
        )

    def load_queries(self, j, h, first_query):
        """Copy q and the statistics."""
        queries, operands = self.queries, self.operands
        self.acquire_queries(j)
        stage, full = queries.stage(j), queries.filled(j)
        self.copy_queries(operands.q, h, first_query, queries.smem["tiles"].at[stage], full)
        rows = pl.ds(first_query, self.config.q.block)
        for name in self.config.statistics:
            place = self.config.statistic(queries.smem["statistics"], name, stage)
            source = getattr(operands, name).at[self.cta.b, h, rows]
            plgpu.copy_gmem_to_smem(source, place, full)

    def load_cotangents(self, j, h, first_query):
        """Copy do and delta."""
        cotangents, operands = self.scratch.cotangents, self.operands
        cotangents.producer_wait(j)
        stage, full = cotangents.stage(j), cotangents.filled(j)
        self.copy_queries(operands.do, h, first_query, cotangents.smem["tiles"].at[stage], full)
        if self.config.grads.dk:
            rows = pl.ds(first_query, self.config.q.block)
            place, full = cotangents.smem["delta"].at[stage], self.scratch.delta_full.at[stage]
            plgpu.copy_gmem_to_smem(operands.delta.at[self.cta.b, h, rows], place, full)


# ------------------------------------------------------------------------------------------------
# Kernel
# ------------------------------------------------------------------------------------------------


def pallas_flash_backward(operands: Operands, added, *outputs, static: OuterKeysConfig, **memory):
    """Compute the gradients of one K/V tile; `added` are those that are added to, by name."""
    config, scratch = static, KeysScratch(**memory)
    stored = [name for name in config.grads.names if name not in added]
    grads = added | dict(zip(stored, outputs, strict=True))
    head, kv_tile, outer, warpgroup = map(lax.axis_index, ("head", "kv_tile", "outer", "warpgroup"))
    b, head = config.place(head, outer)
    args = config, operands, grads, scratch, Cta(b, head, config.kv_tile(kv_tile))

    @common.when(config.exists(head, warpgroup < CONSUMERS))
    def _():
        BackwardConsumer(*args, warpgroup).run()

    @common.when(config.exists(head, warpgroup == PRODUCER))
    def _():
        BackwardProducer(*args).run()
