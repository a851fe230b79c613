"""The emulator sees kernels for Hopper that are broken on purpose.

It runs copies and products as late as it may, so that a wait too few shows.
"""

import dataclasses
import functools
import time

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from support import cases
from support import mosaic_emulator as emulator
from support.broken_kernels import (
    with_arrivals,
    with_mask_moved,
    with_memory,
    without_rescaling,
    without_waiting_at,
)
from support.judge import judge
from support.mosaic_cases import (
    LONG,
    LONG_CAUSAL,
    MANY_KEYS,
    TWO_PASSES,
    biased,
    emulated,
    on_sms,
    with_bias,
    with_heads,
)

from pallas_flash._backends.mosaic import backward_dbias, forward_kernel, forward_tiles, pairs
from pallas_flash._backends.mosaic.pipeline import Pipeline


def in_pairs(broken):
    """Where two programs share what they load."""

    def shared(patch):
        patch.setattr(forward_tiles, "_in_pairs", lambda p: True)
        broken(patch)

    return shared


def of_one_program(spec):
    """A barrier that only its own program reports to."""
    return emulator.Barrier(spec.num_barriers, spec.num_arrivals)


def without_waiting_for_products(patch):
    patch.setattr(emulator, "complete", lambda running: None)
    patch.setitem(vars(emulator.plgpu), "wgmma_wait", lambda running: None)


# A bias of which a tile has eight steps.
BIAS = with_bias("S", B=1)


# A bias that is copied in more tiles than there are stages.
BIAS_IN_TILES = biased(B=1, N=2, K=1, T=601, S=600)


PRODUCER = forward_kernel.ForwardProducer


def with_rows_of_the_bias_moved(patch):
    load_bias = PRODUCER.load_bias

    def moved(self, w, first_row, *others):
        return load_bias(self, w, first_row + 1, *others)

    patch.setattr(PRODUCER, "load_bias", moved)


def with_keys_of_the_bias_moved(patch):
    load_bias = PRODUCER.load_bias

    def moved(self, w, first_row, tile, base):
        blocks = tile.kv_blocks._replace(first=tile.kv_blocks.first - 1)
        return load_bias(self, w, first_row, tile._replace(kv_blocks=blocks), base)

    patch.setattr(PRODUCER, "load_bias", moved)


def with_numbers_of_another_head(patch):
    patch.setattr(pairs.BroadcastAxes, "index_of", lambda self, b, h: (0, 1 - h))


# Masks of which tiles are copied, more than there are slots.
MASKS_IN_TILES = dataclasses.replace(LONG, N=2, T=601, S=600, options=cases._mask("NTS"))


def with_tiles_at(owner, place, change):
    """Copies of tiles from another place than this argument, an int32."""

    def broken(patch):
        copy = owner.copy

        def moved(self, *args):
            args = list(args)
            args[place] = change(args[place])
            return copy(self, *args)

        patch.setattr(owner, "copy", moved)

    return broken


# Where a tile begins, among the arguments; those of masks end with their barrier.
QUERY, KEY = -2, -1
COLUMN, ROW = -3, -2


def with_a_slot_freed_before_it_is_read(patch):
    wait = emulator.plgpu.barrier_wait
    start, pairs = emulator.launch, {}

    def launch(kernel, operands, *, memory, **others):
        def spied(*refs, static, **mine):
            # The forward's; in `backward_dbias` this is where sums leave.
            if isinstance(bias := mine.get("bias"), Pipeline):
                both = zip(bias.full.all, bias.empty.all, strict=True)
                pairs.update((id(full), empty) for full, empty in both)
            kernel(*refs, static=static, **mine)

        return start(spied, operands, memory=memory, **others)

    def barrier_wait(barrier):
        wait(barrier)
        free = pairs.get(id(barrier))
        if free is not None:
            emulator.arrive(free)
            time.sleep(0.02)

    def barrier_arrive(barrier):
        if all(barrier is not free for free in pairs.values()):
            emulator.arrive(barrier)

    patch.setattr(emulator, "launch", launch)
    patch.setattr(emulator.plgpu, "barrier_wait", barrier_wait)
    patch.setattr(emulator.plgpu, "barrier_arrive", barrier_arrive)


def of_all_steps(broken):
    """Where a program has them all."""

    def in_one(patch):
        patch.setattr(backward_dbias, "_splits", lambda *_: 1)
        broken(patch)

    return in_one


def without_the_last_step(patch):
    start = backward_dbias.Steps.__init__

    def init(self, *args):
        start(self, *args)
        self.count -= 1

    patch.setattr(backward_dbias.Steps, "__init__", init)


def with_tiles_moved(patch):
    place_of = backward_dbias.Steps.place_of

    def moved(self, j):
        *others, kv_tile = place_of(self, j)
        return *others, 1 - kv_tile

    patch.setattr(backward_dbias.Steps, "place_of", moved)


def on_one_core(broken):
    """Where a program takes many items."""

    def alone(patch):
        on_sms(patch, 1)
        broken(patch)

    return alone


# Many items, half of which see no key and are soon done with.
LENGTHS = dict(key_value_seq_lengths=jnp.asarray([100, 0], jnp.int32))
ITEMS = dataclasses.replace(LONG, B=2, T=80, S=150, N=16, options=lambda random, case: LENGTHS)


def with_rows_moved(patch):
    count_up = emulator.fake_ptx["count_up"]
    patch.setitem(emulator.fake_ptx, "count_up", lambda ref: count_up(ref) + 1)


BROKEN = {
    "no wait for keys": (without_waiting_at({"k_full"}), LONG),
    "no wait for values": (without_waiting_at({"v_full"}), LONG),
    "no wait for a free slot of keys": (without_waiting_at({"k_empty"}), MANY_KEYS),
    "no wait for queries": (without_waiting_at({"q_full"}), LONG),
    "no wait for queries, backward": (without_waiting_at({"queries_full"}), LONG),
    "no wait for cotangents": (without_waiting_at({"cotangents_full"}), LONG),
    "no wait for delta": (without_waiting_at({"delta_full"}), LONG),
    "no wait for outputs, delta": (without_waiting_at({"full"}, "_preprocess"), LONG),
    "no wait for products": (without_waiting_for_products, LONG),
    "no wait for items": (on_one_core(without_waiting_at({"work_full"})), ITEMS),
    "no wait for a free slot of items": (on_one_core(without_waiting_at({"work_empty"})), ITEMS),
    "a reader of items too many": (on_one_core(with_arrivals("work_empty", 1)), ITEMS),
    "a reader of items too few": (on_one_core(with_arrivals("work_empty", -1)), ITEMS),
    "items are passed over": (on_one_core(with_rows_moved), ITEMS),
    "no wait before rows are zeroed": (without_waiting_at({"landed"}), ITEMS),
    "an arrival too many": (with_arrivals("k_empty", 1), MANY_KEYS),
    "an arrival too few": (with_arrivals("v_empty", -1), MANY_KEYS),
    "an arrival too many, backward": (with_arrivals("queries_empty", 1), LONG),
    "slots are refilled when one of two has used them": (
        in_pairs(with_memory("k_empty", of_one_program)),
        with_heads(MANY_KEYS, 128),
    ),
    "no wait for the end of the other program": (
        in_pairs(with_memory("ended", lambda spec: None)),
        with_heads(MANY_KEYS, 128),
    ),
    "no wait for keys, in pairs": (
        in_pairs(without_waiting_at({"k_full"})),
        with_heads(LONG_CAUSAL, 128),
    ),
    "no wait for the bias": (without_waiting_at({"bias_full"}), BIAS_IN_TILES),
    "no wait for a free slot of the bias": (without_waiting_at({"bias_empty"}), BIAS_IN_TILES),
    "a slot of the bias is free before it is read": (
        with_a_slot_freed_before_it_is_read,
        BIAS_IN_TILES,
    ),
    "an arrival too many, bias": (with_arrivals("bias_empty", 1), BIAS_IN_TILES),
    "rows of the bias are moved": (with_rows_of_the_bias_moved, BIAS_IN_TILES),
    "keys of the bias are moved": (with_keys_of_the_bias_moved, BIAS_IN_TILES),
    "the bias of another head": (with_numbers_of_another_head, BIAS_IN_TILES),
    "no wait for a mask": (without_waiting_at({"bits_full"}), MASKS_IN_TILES),
    "no wait for a free slot of a mask": (without_waiting_at({"bits_empty"}), MASKS_IN_TILES),
    "an arrival too many, masks": (with_arrivals("bits_empty", 1), MASKS_IN_TILES),
    "queries of a mask are moved": (
        with_tiles_at(pairs.Masks, ROW, lambda i: i + 4),
        MASKS_IN_TILES,
    ),
    "keys of a mask are moved": (
        with_tiles_at(pairs.Masks, COLUMN, lambda i: i + 32),
        MASKS_IN_TILES,
    ),
    "the mask of another head": (with_numbers_of_another_head, MASKS_IN_TILES),
    **{
        f"{what}, backward": (broken, case)
        for case, kind in ((BIAS_IN_TILES, "bias"), (MASKS_IN_TILES, "mask"))
        for what, broken in {
            f"no wait for a {kind}": without_waiting_at({"pairs_full"}),
            f"no wait for a free slot of a {kind}": without_waiting_at({"pairs_empty"}),
            f"an arrival of a {kind} too many": with_arrivals("pairs_empty", 1),
            f"an arrival of a {kind} too few": with_arrivals("pairs_empty", -1),
            f"queries of a {kind} are moved": with_tiles_at(
                pairs.Streams, QUERY, lambda i: i + jnp.int32(64)
            ),
            f"keys of a {kind} are moved": with_tiles_at(
                pairs.Streams, KEY, lambda i: i + jnp.int32(8)
            ),
        }.items()
    },
    "a mask moved by one": (with_mask_moved, LONG_CAUSAL),
    "old sums keep their scale": (without_rescaling, LONG),
}
DQ, DBIAS = "_dq", "_dbias"
BROKEN_IN_ORDER = {
    "no wait for keys, dq": (without_waiting_at({"k_full"}, DQ), LONG),
    "no wait for values, dq": (without_waiting_at({"v_full"}, DQ), LONG),
    "no wait for rows, dq": (without_waiting_at({"rows_full"}, DQ), LONG),
    "an arrival too many, dq": (with_arrivals("k_empty", 1, DQ), LONG),
    "an arrival too few, dq": (with_arrivals("v_empty", -1, DQ), LONG),
    "an arrival too many, dkv": (with_arrivals("cotangents_empty", 1, "_dkv"), LONG),
    "no wait for queries, dbias": (of_all_steps(without_waiting_at({"s_full"}, DBIAS)), BIAS),
    "no wait for cotangents, dbias": (of_all_steps(without_waiting_at({"dp_full"}, DBIAS)), BIAS),
    "no wait for a free slot, dbias": (
        of_all_steps(without_waiting_at({"s_empty", "dp_empty"}, DBIAS)),
        BIAS,
    ),
    "an arrival too many, dbias": (of_all_steps(with_arrivals("s_empty", 1, DBIAS)), BIAS),
    "a head is forgotten, dbias": (of_all_steps(without_the_last_step), BIAS),
    "a tile is moved, dbias": (of_all_steps(with_tiles_moved), BIAS),
}

# One of each kind: waits, slots, counts of arrivals, places and values. The others are extended.
KINDS = [
    "no wait for products",
    "an arrival too few, dq",
    "slots are refilled when one of two has used them",
    "keys of a mask are moved, backward",
    "a mask moved by one",
]


@functools.cache
def check_whole(case, in_order):
    """That it passes as it is; nobody waits for JAX to compile its operations after that."""
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order))


@pytest.mark.parametrize("broken", cases.default(KINDS, [*BROKEN, *BROKEN_IN_ORDER]))
def test_emulator_finds_a_broken_kernel(broken, monkeypatch):
    in_order = TWO_PASSES if broken in BROKEN_IN_ORDER else False
    change, case = (BROKEN | BROKEN_IN_ORDER)[broken]
    check_whole(case, in_order)
    monkeypatch.setattr(emulator, "TIMEOUT", 1.0)
    change(monkeypatch)
    with pytest.raises((AssertionError, emulator.EmulationError)):
        # Threads run as fast as they may, and a slot may happen to be free.
        for _ in range(5):
            judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order))


def test_emulator_refuses_copies_beyond_the_end():
    """On a GPU they go on in the next row; those of tiles end."""
    numbers = emulator.Device(np.zeros((2, 100), np.float32)).at[0, pl.ds(64, 64)]
    numbers_sm = emulator.Shared(np.zeros(64, np.float32))
    with pytest.raises(emulator.EmulationError, match="of which"):
        emulator.copy_gmem_to_smem(numbers, numbers_sm, emulator.Phases(1))
    with pytest.raises(emulator.EmulationError, match="of which"):
        emulator.copy_smem_to_gmem(numbers_sm, numbers)
