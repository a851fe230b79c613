"""Stages of shared memory through which a producer hands tiles to consumers.

Tile number i, counted over the life of a CTA, has stage i % stages. Two barriers guard a stage:

| barrier | who arrives | who waits |
|---|---|---|
| full | each copy, when its bytes are in shared memory | the consumers, before they read |
| empty | each consumer, when it has read (or by `consumer_start`) | the producer, before it fills |

A barrier knows its phase by one bit. So every thread that waits at a barrier waits for each of its
phases: a wait that is left out would later mistake an old phase for the new one. Consumers that do
not use a tile wait for it and release it like the others.
"""

import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_flash._backends.mosaic import common

plgpu = common.plgpu

STATIC = dict(static=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Stages and their barriers: specifications outside of a kernel, references inside.

    `common.launch` takes such an object among the shared memory and hands the kernel another one.

    Attributes:
        smem: what the stages hold, any tree; `[stages, ...]` for `smem_of`.
        full: barriers of the stages; the copies of a tile arrive.
        empty: barriers of the stages; the consumers arrive.
        first: the first stage of `smem` and of the barriers that belongs to this pipeline.
        stages: the number of stages.
    """

    smem: Any
    full: Any
    empty: Any
    first: Any = 0
    stages: int = dataclasses.field(default=1, metadata=STATIC)

    @classmethod
    def spec(
        cls,
        smem,
        stages: int,
        *,
        copies: int,
        consumers: int = 1,
        cluster_size: int = 1,
        pipelines: int = 1,
    ) -> "Pipeline":
        """Return the specification of a pipeline.

        Args:
            smem: specification of the shared memory.
            stages: number of stages.
            copies: copies that fill a stage, each of which arrives once.
            consumers: arrivals that empty a stage, of each CTA.
            cluster_size: CTAs that share the copies.
            pipelines: how many pipelines lie one after another, each for a warpgroup.
        """
        count = stages * pipelines
        full = common.barriers(count, copies)
        # No `first`: it would be a leaf, and what is allocated are leaves.
        empty = common.barriers(count, consumers, cluster_size)
        return cls(smem, full, empty, None, stages)

    def pipeline_of_warpgroup(self, n) -> "Pipeline":
        """Return the n-th of `pipelines` pipelines."""
        return dataclasses.replace(self, first=n * self.stages)

    def stage(self, i):
        """Return the number of the stage of tile i."""
        stage = common.remainder(i, self.stages) if self.stages > 1 else 0
        return stage if self.first is None else self.first + stage

    def smem_of(self, i):
        """Return the shared memory of tile i."""
        return self.smem.at[self.stage(i)]

    def producer_acquire(self, i):
        """Wait until the consumers have emptied the stage of tile i; at first all are empty."""
        pl.when(i >= self.stages)(lambda: self.producer_wait(i))

    def producer_wait(self, i):
        """Wait as `producer_acquire`, for producers whose consumers call `consumer_start`."""
        plgpu.barrier_wait(self.empty.at[self.stage(i)])

    def filled(self, i):
        """Return the barrier at which copies to the stage of tile i arrive."""
        return self.full.at[self.stage(i)]

    def consumer_start(self):
        """Release all stages: they are empty at first, and `producer_wait` has no branch for that.

        Without that branch a kernel has fewer instructions, and compiles faster.
        """
        for i in range(self.stages):
            self.consumer_release(i)

    def consumer_wait(self, i, after=0):
        """Wait until tile i is in shared memory.

        Args:
            i: the tile.
            after: `ptx.uniform_zero` of a value, which is then computed before the wait.
        """
        plgpu.barrier_wait(self.full.at[self.stage(i) + after])

    def consumer_release(self, i, after=0):
        """Report that this consumer has read tile i; `after` as of `consumer_wait`."""
        plgpu.barrier_arrive(self.empty.at[self.stage(i) + after])
