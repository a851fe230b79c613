"""Kernels in Mosaic GPU that are broken on purpose, in the emulator."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from support import mosaic_cases  # noqa: F401  It skips whoever imports it where JAX is too old.
from support import mosaic_emulator as emulator

from pallas_flash._backends.mosaic import forward_common, score_mask
from pallas_flash._backends.mosaic.pipeline import Pipeline


def by_names(memory):
    """Shared memory and barriers by one name each: "k_full" of the pipeline "k"."""
    found = {}
    for name, x in memory.items():
        if isinstance(x, Pipeline):
            found |= {f"{name}_{field}": getattr(x, field) for field in ("smem", "full", "empty")}
        elif isinstance(x, dict):
            found |= x
        else:
            found[name] = x
    return {name: x for name, x in found.items() if x is not None}


def without_waiting_at(names, of=""):
    """`barrier_wait` that passes by barriers of these names, of kernels with this in their name."""

    def broken(patch):
        allocate, wait = emulator.launch, emulator.plgpu.barrier_wait
        skipped = set()

        def launch(kernel, operands, *, memory, **others):
            def spied(*refs, static, **mine):
                named = by_names(mine)
                for name in names & named.keys() if of in kernel.__name__ else ():
                    skipped.update(map(id, named[name].all))
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

    def changed(memory):
        if name in memory:
            return {name: change(memory[name])}
        for group, x in memory.items():
            if isinstance(x, dict) and name in x:
                return {group: x | {name: change(x[name])}}
        pipeline, _, field = name.rpartition("_")
        spec = memory[pipeline]
        return {pipeline: dataclasses.replace(spec, **{field: change(getattr(spec, field))})}

    def broken(patch):
        start = emulator.launch

        def launch(kernel, operands, *, memory, **others):
            if name in by_names(memory) and of in kernel.__name__:
                memory = memory | changed(memory)
            return start(kernel, operands, memory=memory, **others)

        patch.setattr(emulator, "launch", launch)

    return broken


def with_arrivals(name, more, of=""):
    """Another number of arrivals at these barriers."""
    return with_memory(
        name, lambda spec: dataclasses.replace(spec, num_arrivals=spec.num_arrivals + more), of
    )


def with_mask_moved(patch):
    hide = score_mask.hide
    patch.setattr(
        score_mask, "hide", lambda mask, b, h, q, k, s: hide(mask, b, h, q, k + jnp.int32(1), s)
    )


def without_rescaling(patch):
    patch.setattr(forward_common, "THRESHOLD", 0.0)
    patch.setitem(emulator.fake_ptx, "rescale", lambda acc, alpha: np.asarray(acc))
