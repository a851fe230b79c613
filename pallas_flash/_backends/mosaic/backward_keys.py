"""The parts that both kernels of the backward with keys as outer tile share.

`backward_kernel` computes a K/V tile by one CTA, `backward_cluster` by two. Both have the grid and
the configuration here, consumer warpgroups with 64 keys each, and a producer warpgroup.
"""

import abc
import dataclasses
import enum
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common, pairs, ptx
from pallas_flash._backends.mosaic.backward_common import (
    BackwardConfig,
    InnerTiles,
    Operands,
    ScoreTile,
    TileCopies,
    store_tile,
)
from pallas_flash._backends.mosaic.backward_splits import Splits
from pallas_flash._backends.mosaic.pipeline import Pipeline
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import BackwardTile, in_clusters

plgpu = common.plgpu

# Keys of a CTA, and the consumer warpgroups that share them.
BLOCK_KV, CONSUMERS = 128, 2
# Stages for the ds_t that these exchange: one is written while the other is read.
DS_STAGES = 2
# Barriers at which the producer reports turns, by steps; `backward_cluster` needs two.
TURNS = 2
PRODUCER = CONSUMERS  # Number of the producer warpgroup.
# Registers of a thread of a consumer, and of the producer.
REGISTERS = 240, 24


class Meeting(enum.IntEnum):
    """Named barriers of both consumer warpgroups, by what both have done when they leave.

    The docstring of each kernel says why they meet.
    """

    DS_WRITTEN = ptx.FREE_BARRIER
    TILES_READ = enum.auto()
    KEYS_CENTERED = enum.auto()

    def wait(self):
        """Wait for the other consumer warpgroup."""
        ptx.meet(self, 128 * CONSUMERS)


class Grads(enum.Enum):
    """The gradients of a launch, by its kernel's name in a profile.

    In clusters the kernel is `pallas_flash_backward_cluster`.
    """

    DQ_DK_DV = "pallas_flash_backward", ("dq", "dk", "dv")
    DK_DV = "pallas_flash_dkv", ("dk", "dv")
    DK = "pallas_flash_dk", ("dk",)
    DV = "pallas_flash_dv", ("dv",)

    def __init__(self, kernel_name: str, names: tuple[str, ...]):
        self.kernel_name, self.names = kernel_name, names
        self.dq, self.dk, self.dv = (name in names for name in ("dq", "dk", "dv"))

    @classmethod
    def launches(cls, head_dim: int, value_dim: int, two_passes: bool) -> "list[Grads]":
        """Return what is launched, by the padded head dims; dq is apart in two passes."""
        if two_passes:
            return [cls.DK, cls.DV] if in_clusters(head_dim, value_dim) else [cls.DK_DV]
        return [cls.DQ_DK_DV]

    def in_clusters(self, head_dim: int, value_dim: int) -> bool:
        """Return whether a cluster of CTAs computes it, `backward_cluster`; by padded head dims."""
        return self.dq and in_clusters(head_dim, value_dim)

    def stages(self, tile: BackwardTile) -> int:
        """Return the stages; dv alone has two or more, a stage of do for each consumer's result."""
        return tile.stages if self.dk else max(2, tile.stages)


class Cta(NamedTuple):
    """The work of a CTA.

    Attributes:
        b: the batch element, counted over all instances.
        head: the split of a K/V head, counted over all heads.
        kv_tile: the outer tile.
    """

    b: Any
    head: Any
    kv_tile: Any


@dataclasses.dataclass(frozen=True)
class OuterKeysConfig(BackwardConfig):
    """The configuration of a kernel; its grid counts splits of K/V heads.

    Attributes:
        grads: what it computes.
        splits: the CTAs that share a K/V tile.
        adds: whether CTAs add dk and dv in device memory, in no order.
        in_turn: whether they add dq in turn, see `backward_kernel`.
        counters: the counters of a tile of dq in turn, one for each CTA of a cluster.
        centers: whether keys have a center, which may be zero.
    """

    grads: Grads
    splits: Splits
    adds: bool
    in_turn: bool
    counters: int
    centers: bool

    @property
    def stages(self) -> int:
        """Stages of queries and of cotangents."""
        return self.grads.stages(self.tile)

    @property
    def num_q_heads(self) -> int:
        """Query heads."""
        return self.num_heads // self.splits.count * self.groups

    @property
    def dq_tiles(self) -> int:
        """Tiles of 64 queries that the sums of dq have for a head: of 128 whole ones."""
        return -(-self.q.count * self.q.block // 128) * 2

    def kv_tile(self, place):
        """Return the K/V tile of a place in the grid: in turn the last one comes first."""
        return self.kv.count - 1 - place if self.in_turn else place

    def dq_columns(self, head_dim: int) -> int:
        """Return the columns of dq that a warpgroup computes.

        It computes all columns for half of 128 queries. For 64 queries it computes half of the
        columns, or more where halves are no whole tiles: then both warpgroups compute the columns
        in the middle.
        """
        if self.q.block > ptx.ROWS:
            return head_dim
        tile = ptx.tile_columns(head_dim)
        return -(-head_dim // (2 * tile)) * tile

    def inner_tiles(self, operands: Operands, cta: Cta) -> InnerTiles:
        """Return the tiles of queries that a CTA walks over."""
        kv_head, _, heads = self.splits.heads(cta.head)
        split = self.splits.query_split(cta.head)
        outer = cta.b, kv_head, cta.kv_tile
        return InnerTiles(self, operands.table, outer, self.q, heads, split)


# ------------------------------------------------------------------------------------------------
# Shared memory
# ------------------------------------------------------------------------------------------------


def pairs_pipelines(p: Problem, block_q: int, stages: int, least: int = 1, bias: bool = True):
    """Yield pipelines for tiles of a bias and of mask arrays, the most wanted first.

    First with the bias, in as many stages as queries have, then in fewer; then the same without it.
    `bias`: whether a bias may be copied. `least`: the least number of stages. In turn it is one
    less than queries have: with n stages the copy of step j waits until step j - n has been
    computed, and consumers come there if the turn of step j - n - 1 is reported before the copy.
    """
    dtype: Any = None if p.bias is None else p.bias.dtype
    masks = sum(map(pairs.has_pairs, p.mask.leaves))
    copied = False
    if bias and p.bias is not None and 1 not in p.bias.shape[2:]:
        # `ptx.load_transposed` reads 16 bits; copies take rows of a multiple of 16 bytes.
        copied = dtype.itemsize == 2 and p.kv_len % 8 == 0
    for with_bias, n in itertools.product([copied, False], range(stages, least - 1, -1)):
        shapes = (n, CONSUMERS, block_q, ptx.COLUMNS), (masks, n, block_q // ptx.BITS, BLOCK_KV)
        smem = dict(
            bias=plgpu.SMEM(shapes[0], dtype, transforms=ptx.BLOCKS) if with_bias else None,
            bits=plgpu.SMEM(shapes[1], jnp.uint32) if masks else None,
        )
        if with_bias or masks:
            yield Pipeline.spec(smem, n, copies=CONSUMERS * with_bias + masks, consumers=CONSUMERS)


# ------------------------------------------------------------------------------------------------
# Consumers
# ------------------------------------------------------------------------------------------------


class KeysConsumer(abc.ABC):
    """A warpgroup that computes, with 64 keys of the outer tile.

    Args:
        config: of the kernel.
        operands: references to the arrays that are read.
        grads: references to the gradients, by name.
        scratch: shared memory.
        cta: the work.
        warpgroup: its number.
    """

    # It releases their stages.
    queries: Pipeline
    cotangents: Pipeline
    pairs: Pipeline | None

    def __init__(self, config: OuterKeysConfig, operands: Operands, grads, scratch, cta, warpgroup):
        self.config, self.operands, self.grads_refs = config, operands, grads
        self.scratch, self.cta, self.warpgroup = scratch, cta, warpgroup

    def run(self):
        """Compute the gradients of the warpgroup's keys, from the first copy to the last."""
        for pipeline in (self.queries, self.cotangents, self.pairs):
            if pipeline is not None:
                pipeline.consumer_start()
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        self.inner = self.config.inner_tiles(self.operands, self.cta)

        def some():
            self.prologue()
            self.epilogue(self.mainloop())

        def none():
            # The producer stores zeros for lengths, or nobody reads the sums (`store_zeros`).
            # Atomically added sums need none.
            if not (self.config.has_lengths or self.config.adds):
                self.store(self.zeros())

        self.inner.if_any(some, none)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def prologue(self):
        """Wait for the outer tile, and center its keys."""
        config = self.config
        self.kv_head, self.first_head, _ = config.splits.heads(self.cta.head)
        self.options = config.options.element_options(self.operands.options, self.cta.b)
        self.mine = pl.ds(self.warpgroup * ptx.ROWS, ptx.ROWS)
        self.first_key = self.cta.kv_tile * BLOCK_KV + self.warpgroup * ptx.ROWS
        self.before_keys()
        centered = self.operands.is_centered
        if config.centers:
            centered = plgpu.load(centered.at[self.cta.b, self.kv_head]) != 0
        plgpu.barrier_wait(self.keys_full())
        if config.centers:
            common.when(centered)(self.center_keys)
            # Products of both warpgroups read these keys, apart from the threads that stored them.
            # They meet without a center, too: a branch right before the loop costs it 22
            # instructions.
            ptx.fence()
            Meeting.KEYS_CENTERED.wait()

    def score_tile(self, j, place) -> ScoreTile:
        """Return the tile of scores of step j."""
        head, first_query = place
        return ScoreTile(
            self.options,
            self.config,
            self.first_head + head,
            first_query,
            self.first_key,
            self.inner.masked(j),
            transposed=True,
            view=pairs.StageView(self.config.streams, self.pairs, j, self.warpgroup),
        )

    @abc.abstractmethod
    def before_keys(self):
        """Do what comes before the wait for the outer tile."""

    @abc.abstractmethod
    def keys_full(self) -> Any:
        """Return the barrier of the outer tile."""

    @abc.abstractmethod
    def center_keys(self):
        """Subtract the center from the warpgroup's keys, as far as the CTA has them."""

    @abc.abstractmethod
    def zeros(self) -> Any:
        """Return the sums of keys that no query sees."""

    @abc.abstractmethod
    def mainloop(self) -> Any:
        """Return the sums over all inner tiles."""

    @abc.abstractmethod
    def epilogue(self, sums):
        """Scale the sums and store them."""

    @abc.abstractmethod
    def store(self, sums):
        """Start the copies of the results to device memory."""


def subtract_center(center, tile):
    """Subtract float32 [n] in device memory from `strips` of [64, n]."""
    center = plgpu.load(center, layout=ptx.COLUMN, optimized=False)
    k = ptx.load_strips(tile).astype(jnp.float32)
    ptx.put_strips((k - common.along_columns(center, k.shape)).astype(tile.dtype), tile)


def store_sums(config: OuterKeysConfig, cta: Cta, warpgroup, x, tile, ref):
    """Store sums of a warpgroup's keys, or add them, at their place in `ref`.

    Rows leave through the shared memory `tile`, sums of splits from registers.
    """
    kv_head, *_ = config.splits.heads(cta.head)
    if config.splits.count == 1:
        rows = pl.ds(cta.kv_tile * BLOCK_KV + warpgroup * ptx.ROWS, ptx.ROWS)
        ptx.put_strips(x.astype(tile.dtype), tile)
        plgpu.commit_smem()
        store_tile(tile, ref, (cta.b, rows, kv_head))
        return
    heads, h = config.num_heads, cta.head
    if config.adds:
        heads, h = heads // config.splits.count, kv_head
    row = (cta.b * heads + h) * config.kv.count + cta.kv_tile
    group = (row * CONSUMERS + warpgroup) * ptx.groups(x.shape[1])
    put = ptx.add_fragments if config.adds else ptx.store_fragments
    put(x, ref.at[group])


# ------------------------------------------------------------------------------------------------
# Producer
# ------------------------------------------------------------------------------------------------


class KeysProducer(abc.ABC):
    """The warpgroup that starts all copies; arguments as of `KeysConsumer`.

    Where CTAs add dq in turn it also waits for turns and counts those that have ended. It goes by
    the queries that consumers release: before it waits until queries of step j are released, it
    reports the turn of step j - `turn_late`; after that dq of step j - `added_late` has been added.

    Attributes:
        counter: the counter of this CTA, of those that a tile of dq has.
    """

    queries: Pipeline
    turn_late = added_late = counter = 0

    def __init__(self, config: OuterKeysConfig, operands: Operands, grads, scratch, cta: Cta):
        self.config, self.operands, self.grads_refs = config, operands, grads
        self.scratch, self.cta = scratch, cta
        # The gradients that the CTA's consumers store.
        self.sums = [name for name in config.grads.names if name != "dq"]

    def run(self):
        """Start all copies; with lengths, store the zeros of keys behind them."""
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        config, operands, scratch, b = self.config, self.operands, self.scratch, self.cta.b
        self.inner = config.inner_tiles(operands, self.cta)
        self.kv_head, self.first_head, _ = config.splits.heads(self.cta.head)
        self.first_key = self.cta.kv_tile * BLOCK_KV
        landed = scratch.landed.at[0] if config.has_lengths else None
        self.copy_keys = TileCopies(operands.valid_kv, landed, b).start
        self.copy_queries = TileCopies(operands.valid_q, landed, b).start
        self.inner.if_any(self.load)
        if config.has_lengths and config.splits.count == 1:
            store_zeros(config, operands, self.grads_refs, self.cta, self.sums)

    def load(self):
        """Start the copies of the outer tile, and of all inner ones; take all turns."""
        self.load_keys()
        count = self.inner.count

        @pl.loop(jnp.int32(0), count)
        def _(j):
            self.step(j)
            self.count_turn(j)

        if self.takes_turns:

            @pl.loop(count, count + self.queries.stages + self.added_late)
            def _(j):
                self.acquire_queries(j)
                self.count_turn(j)

    @property
    def takes_turns(self) -> bool:
        """Return whether the CTA adds to dq in turn."""
        return self.config.in_turn

    @abc.abstractmethod
    def load_keys(self):
        """Start the copies of the outer tile that the consumers do not start."""

    @abc.abstractmethod
    def step(self, j):
        """Start the copies of one inner tile."""

    def acquire_queries(self, j):
        """Wait until a stage is free for queries of step j; first report the next turn.

        Consumers wait for it, or in CTA 0 of a cluster for the one before, and release a stage.
        Behind the last step no queries follow, but consumers still release stages.
        """
        if self.takes_turns:
            self.of_a_step(j - self.queries.stages - self.turn_late, self.await_turn)
        self.queries.producer_wait(j)

    def count_turn(self, j):
        """Count the turn that has ended, as queries of step j have a stage.

        After the copies of the step: they complete when all warps have arrived, and the warp that
        counts waits for memory. Before the copies, calls were up to 6 % slower on an H200.
        """
        if self.takes_turns:
            ended = j - self.queries.stages - self.added_late
            self.of_a_step(ended, lambda j: ptx.raise_count(self.counter_of(j)[0]))

    def of_a_step(self, j, function):
        """Call `function(j)` if there is a step j."""
        common.when((j >= 0) & (j < self.inner.count))(lambda: function(j))

    def await_turn(self, j):
        """Wait until it is the CTA's turn to add dq of step j, and report it to the consumers."""
        counter, tile = self.counter_of(j)
        config, cta = self.config, self.cta
        turn = config.kv.count - 1 - cta.kv_tile
        if config.masked:
            row = config.table_row(cta.b, self.kv_head, cta.kv_tile)
            turn = plgpu.load(self.operands.turns.at[row, tile])
        ptx.await_count(counter, turn)
        plgpu.barrier_arrive(turn_barrier(self.scratch, j))

    def counter_of(self, j):
        """Return how many CTAs have added to their part of dq of step j, and the tile's number."""
        config, (head, first_query) = self.config, self.inner.place_of(j)
        tile = common.quotient(first_query, config.q.block)
        row = self.cta.b * config.num_q_heads + self.first_head + head
        at = (row * config.q.count + tile) * config.counters + self.counter
        return self.grads_refs["turns"].at[at], tile


def turn_barrier(scratch, j):
    """Return the barrier where the producer reports that dq of step j may be added."""
    return scratch.turn.at[common.remainder(j, TURNS)]


def store_zeros(config: OuterKeysConfig, operands: Operands, grads, cta: Cta, names):
    """Store zeros in gradients for keys behind the valid ones, in the producer's warpgroup.

    CTAs of K/V tiles with valid keys divide the other tiles of their head among them. (CTAs of
    these other tiles would all write at a time, and take as long as memory needs.) Without
    valid keys each CTA is left with its own tile. With splits nobody reads the sums of these
    keys.
    """
    count = jnp.int32(config.kv.count)
    valid = plgpu.load(operands.valid_kv.at[cta.b])
    some = common.quotient(valid + BLOCK_KV - 1, BLOCK_KV)
    step, kv_tile = jnp.where(some > 0, some, count), cta.kv_tile
    mine = jnp.where(kv_tile < step, lax.div(count - kv_tile - some + step - 1, step), 0)

    @pl.loop(jnp.int32(0), mine)
    def _(i):
        first = (kv_tile + some + i * step) * BLOCK_KV
        for name in names:
            ptx.store_zeros(grads[name].at[cta.b], first, cta.head, BLOCK_KV)
