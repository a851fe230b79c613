"""Decoding for Hopper at head dims above 256: one query, whose keys are cut into parts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support import mosaic_emulator as emulator
from support.compiled_code import machine_code_of, shaped
from support.judge import judge, judge_max_logits
from support.mosaic_cases import LONG, checked, fixed, forward_of, run_forward

from pallas_flash import attention
from pallas_flash._backends.mosaic import decode_wide
from scripts.maintenance.inspection import gpu_compiler

DECODED = dataclasses.replace(LONG, B=2, T=1, S=1024, N=6, K=2, H=320, V=264)
OPTIONS = {
    "all keys": fixed(),
    "causal": fixed(is_causal=True, query_offset=700),
    "offsets": lambda random, case: dict(is_causal=True, query_offset=jnp.array([0, 513])),
    "lengths": lambda random, case: dict(key_value_seq_lengths=jnp.array([1024, 300])),
    "no key": lambda random, case: dict(key_value_seq_lengths=jnp.array([0, 257])),
    "no query": lambda random, case: dict(query_seq_lengths=jnp.array([0, 1])),
    "sinks": lambda random, case: dict(sinks=jnp.linspace(-3.0, 8.0, case.N)),
    "large scores": lambda random, case: dict(scale=jnp.float32(40.0)),
}
OPTIONS["offsets and sinks"] = cases._together(OPTIONS["offsets"], OPTIONS["sinks"])


@pytest.mark.parametrize(
    "name", cases.default(["offsets and sinks", "no key", "large scores"], OPTIONS)
)
def test_numbers_of_one_query(name, kernel_case):
    """Parts of the keys have results of their own, and some parts have no visible key."""
    case = dataclasses.replace(DECODED, options=OPTIONS[name])
    problem = case.problem("bfloat16")
    qkv, _, options = problem
    call = checked(qkv, options | dict(return_max_logits=True))
    assert call.decodes_prefix and decode_wide.num_parts(call) == 4
    with emulator.emulated(pytest.MonkeyPatch()):
        _, log_sum = run_forward(call)
    judge(case, "bfloat16", forward_of(case), problem, apart=call.large)
    judge_max_logits(case, "bfloat16", log_sum.max_logits.max(axis=2))


@pytest.mark.parametrize(
    ("kv_len", "parts"),
    cases.default([(1030, 2), (40, 1)], [(1030, 2), (257, 1), (40, 1), (2048, 8)]),
)
def test_numbers_of_many_heads(kv_len, parts, kernel_case):
    """Heads of one key head take two query tiles, of which one is ragged."""
    case = dataclasses.replace(DECODED, B=1, S=kv_len, N=80, K=1, H=576, V=512, options=fixed())
    problem = case.problem("bfloat16")
    assert decode_wide.num_parts(checked(problem[0], problem[2])) == parts
    judge(case, "bfloat16", forward_of(case), problem)


def test_hidden_keys_of_one_query_have_no_effect(kernel_case):
    case = dataclasses.replace(DECODED, options=OPTIONS["lengths"])
    qkv, cotangents, options = case.problem("bfloat16")
    poisoned, _ = cases.poison(case, qkv, cotangents, options)
    assert all(np.isnan(np.asarray(x, np.float32)).any() for x in poisoned[1:])
    with emulator.emulated(pytest.MonkeyPatch()):
        (want, _), (got, _) = (run_forward(checked(x, options)) for x in (qkv, poisoned))
    np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize(
    ("batch", "kv_len", "heads", "parts"),
    [(32, 8192, 128, 8), (1, 8192, 128, 32), (8, 8192, 16, 32), (200, 4096, 128, 1)],
)
def test_num_parts_fill_the_gpu(batch, kv_len, heads, parts):
    shape = dict(B=batch, T=1, S=kv_len, N=heads, K=1, H=8, V=8)
    qkv, _, options = dataclasses.replace(DECODED, options=fixed(), **shape).problem("bfloat16")
    assert decode_wide.num_parts(checked(qkv, options)) == parts


@pytest.mark.parametrize(
    "options",
    [
        fixed(local_window_size=(3, None), query_offset=500),
        fixed(logits_soft_cap=5.0),
        lambda random, case: dict(mask=jnp.ones((case.S,), bool)),
        lambda random, case: dict(
            segment_ids=(jnp.zeros((2, 1), int), jnp.zeros((2, case.S), int))
        ),
    ],
    ids=["window", "soft cap", "mask array", "segments"],
)
def test_what_parts_do_not_serve(options):
    qkv, _, options = dataclasses.replace(DECODED, options=options).problem("bfloat16")
    assert not checked(qkv, options).decodes_prefix


@pytest.mark.skipif(bool(gpu_compiler.missing()), reason=gpu_compiler.missing() or "is here")
def test_machine_code_of_decoding():
    """Neither keys nor values are copied, but for the block in which a part ends."""
    q, k, v = (
        shaped(8, n, h, d, dtype=jnp.bfloat16)
        for n, h, d in ((1, 128, 576), (8192, 1, 576), (8192, 1, 512))
    )

    def call(q, k, v, lengths):
        return attention(q, k, v, key_value_seq_lengths=lengths)

    kernels = list(machine_code_of(call, q, k, v, shaped(8)))
    [(name, *_, loops)] = [x for x in kernels if "wide" in x[0]]
    [loop] = [loop for loop in loops if loop.matrix["HGMMA"]]
    assert loop.spills == 0, (name, loop.order)
