"""Kernels in Mosaic GPU that are broken on purpose, in the emulator."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from support import mosaic_cases  # noqa: F401  It skips whoever imports it where JAX is too old.
from support import mosaic_emulator as emulator

from pallas_flash._mosaic import forward_common, options


def without_waiting_at(names, of=""):
    """`barrier_wait` that passes by barriers of these names, of kernels with this in their name."""

    def broken(patch):
        allocate, wait = emulator.launch, emulator.plgpu.barrier_wait
        skipped = set()

        def launch(kernel, operands, *, memory, **others):
            def spied(*refs, static, **mine):
                for name in names & mine.keys() if of in kernel.__name__ else ():
                    skipped.update(map(id, mine[name].all))
                kernel(*refs, static=static, **mine)

            return allocate(spied, operands, memory=memory, **others)

        def barrier_wait(barrier):
            if id(emulator.one_barrier(barrier)) not in skipped:
                wait(barrier)

        patch.setattr(emulator, "launch", launch)
        patch.setattr(emulator.plgpu, "barrier_wait", barrier_wait)

    return broken


def with_memory(name, change, of=""):
    """Another specification of the shared memory of a name, likewise."""

    def broken(patch):
        start = emulator.launch

        def launch(kernel, operands, *, memory, **others):
            if name in memory and of in kernel.__name__:
                memory = memory | {name: change(memory[name])}
            return start(kernel, operands, memory=memory, **others)

        patch.setattr(emulator, "launch", launch)

    return broken


def with_arrivals(name, more, of=""):
    """Another number of arrivals at these barriers."""
    return with_memory(
        name, lambda spec: dataclasses.replace(spec, num_arrivals=spec.num_arrivals + more), of
    )


def with_mask_moved(patch):
    hide = options.hide
    patch.setattr(
        options, "hide", lambda mask, b, h, q, k, s: hide(mask, b, h, q, k + jnp.int32(1), s)
    )


def without_rescaling(patch):
    patch.setattr(forward_common, "THRESHOLD", 0.0)
    patch.setitem(emulator.fake_ptx, "rescale", lambda acc, alpha: np.asarray(acc))
