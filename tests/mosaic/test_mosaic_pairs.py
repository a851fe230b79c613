"""The kernels for Hopper, emulated: biases and masks of pairs."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle
from support import mosaic_emulator as emulator
from support.judge import judge
from support.mosaic_cases import (
    CAUSAL,
    LONG,
    TABLE,
    WINDOW,
    biased,
    emulated,
    fixed,
    forward_of,
    judge_both,
    on_sms,
    with_bias,
)

from pallas_flash._backends.mosaic import backward_dbias
from pallas_flash._backends.mosaic.operands import Bits
from pallas_flash._backends.mosaic.pairs import BroadcastAxes
from pallas_flash._problem.blocks import Tiling
from pallas_flash.tuning import ForwardTile, TileSizes

# Over all that a bias may be broadcast.
AXES_OF_BIAS = ["BNTS", "NTS", "BTS", "TS", "NS", "S", "T", "BT", ""]


@pytest.mark.parametrize(
    ("axes", "shares"),
    cases.default([("NTS", 1), ("S", 3)], [*itertools.product(AXES_OF_BIAS, (1, 3))]),
)
def test_steps_of_a_bias(axes, shares, monkeypatch, kernel_case):
    """As where there are many programs, with all steps of a tile; and with a share of them."""
    monkeypatch.setattr(backward_dbias, "_splits", lambda programs, steps: min(steps, shares))
    case = with_bias(axes)
    judge_both(case, in_order=True)


OF_LENGTHS = fixed(key_value_seq_lengths=jnp.asarray([390, 130], jnp.int32), is_causal=True)
IN_PAIRS = TileSizes(ForwardTile(2, 96, 1, cluster_size=2))
THREE = TileSizes(ForwardTile(3, 80, 1, 3))
# The case, tiles, and whether there are tiles of the bias; of some one slot for each warpgroup.
BIASED = {
    "heads, causal": (biased(options=CAUSAL), TABLE, True),
    "examples": (biased("BTS", T=120), TABLE, True),
    "examples and heads": (biased("BNTS", T=120, H=128, V=128), TABLE, True),
    "neither": (biased("TS", B=1, S=104), TABLE, True),
    "32 bits": (biased("NTS", "float32", S=396, B=1), TABLE, True),
    "rows of no 16 bytes": (biased(S=404, B=1), TABLE, False),
    "queries": (biased("NT", B=1), TABLE, False),
    "keys": (biased("NS", B=1), TABLE, False),
    "window": (biased(options=WINDOW, B=1), THREE, True),
    "lengths": (biased(options=OF_LENGTHS), TABLE, True),
    "lists": (biased(options=cases._mask("NTS", 0.7), B=1), THREE, True),
    "pairs of programs": (biased(options=CAUSAL, B=1), IN_PAIRS, True),
    "wide heads": (biased(B=1, H=256, V=256, N=2, K=1), TABLE, True),
    "no room": (biased("NTS", "float32", B=1, H=256, V=256, N=2, K=1), TABLE, False),
}
SOME_BIASED = ["examples and heads", "32 bits", "rows of no 16 bytes", "lists", "pairs of programs"]


@pytest.mark.parametrize("name", cases.default(SOME_BIASED, list(BIASED)))
def test_tiles_of_a_bias(name, monkeypatch, kernel_case):
    """On one core, where slots are used again; or where a bias has none, what reads it."""
    case, sizes, in_tiles = BIASED[name]
    on_sms(monkeypatch, 2 if sizes is IN_PAIRS else 1)
    start, found = emulator.launch, []

    def launch(kernel, operands, *, memory, **others):
        found.append(memory["bias"] is not None)
        return start(kernel, operands, memory=memory, **others)

    monkeypatch.setattr(emulator, "launch", launch)
    judge(case, "bfloat16", forward_of(case, sizes), apart=True)
    assert found == [in_tiles]


@pytest.mark.parametrize("own", [*itertools.product([False, True], repeat=3)])
def test_bias_by_instance_batch_and_head(own):
    counts = I, B, N = 3, 2, 4
    array = np.arange(I * B * N).reshape(counts)[*(slice(None if x else 1) for x in own)]
    whole, flat = np.broadcast_to(array, counts), array.reshape(-1, array.shape[2])
    bias = BroadcastAxes(B, *own)
    for i, b, h in np.ndindex(counts):
        assert flat[bias.index_of(jnp.int32(i * B + b), h)] == whole[i, b, h]


def of_pairs(axes, share=0.5):
    """A mask array that has these axes, of several tiles along queries and keys."""
    return dataclasses.replace(
        LONG, name=f"mask {axes}", B=2, T=300, S=250, options=cases._mask(axes, share)
    )


@pytest.mark.parametrize("block_kv", cases.default([80], [64, 80, 96, 112, 128, 176]))
@pytest.mark.parametrize("axes", cases.default(["BNTS"], ["BNTS", "NTS", "BTS", "TS", "S", "T"]))
def test_bits_of_masks(axes, block_kv, kernel_case):
    """Axes have keys, in tiles that are whole words or begin within one, queries, or neither."""
    sizes, case = TileSizes(ForwardTile(2, block_kv, 1)), of_pairs(axes)
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), block_kv == 96, sizes))


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize(("length", "block"), [(300, 80), (256, 128), (31, 176)])
def test_bools_are_packed(axis, length, block):
    """32 in a word, the first one lowest, with zeros behind up to the end of the last tile."""
    shape = [1, 3, 2, 5, 7]
    shape[axis + 1] = length
    x = np.random.default_rng(0).random(shape) < 0.5
    packed = Bits.along(axis, Tiling(length, block)).pack(jnp.asarray(x))
    words = np.moveaxis(np.asarray(packed), axis + 1, -1)
    found = words[..., None] >> np.arange(32, dtype=np.uint32) & 1
    found = found.reshape(*words.shape[:-1], -1)
    assert words.shape[-1] % 4 == 0 and found.shape[-1] >= -(-length // block) * block
    np.testing.assert_array_equal(found[..., :length], np.moveaxis(x, axis + 1, -1))
    assert not found[..., length:].any()


@pytest.mark.parametrize("axes", cases.default(["TS"], ["TS", "S"]))
def test_bias_of_hidden_pairs_has_no_effect(axes, kernel_case):
    case = with_bias(axes, B=1)
    qkv, cotangents, options = case.problem("bfloat16")
    poisoned = *cases.poison(case, qkv, cotangents, options), cases.poison_bias(case, options)
    assert np.isnan(np.asarray(poisoned[2]["bias"], np.float32)).any()
    want, got = (emulated(problem, True) for problem in ((qkv, cotangents, options), poisoned))
    for name, a, b in zip(oracle.names(options), want, got, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
