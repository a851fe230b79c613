"""The machine code of the kernels for Hopper, compiled on a machine without a GPU."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from support import cases
from support.compiled_code import machine_code_of, shaped
from support.lowered import attention, gradients
from support.mosaic_cases import NO_FLAGS, checked, run_backward, run_forward

from pallas_flash import paged_attention
from pallas_flash._backends.mosaic import (
    backward_dbias,
    backward_splits,
    forward_common,
    scheduler,
)
from pallas_flash._problem.scores import LogSum
from scripts.maintenance.inspection import gpu_compiler
from scripts.maintenance.inspection.calls import inspect_attention
from scripts.maintenance.inspection.kernels import compile_kernels

pytestmark = pytest.mark.skipif(
    bool(gpu_compiler.missing()), reason=gpu_compiler.missing() or "is here"
)


# Bytes that a program reads at a time in the kernels before and after a backward, which compute
# hardly anything. An H200's memory, by its datasheet, delivers 36 KB for each SM in a microsecond.
# A read takes about that long, so more bytes than these must be under way to keep memory busy.
READ_AT_A_TIME = {
    "pallas_flash_preprocess": lambda size: 2 * 2 * 64 * size,
    "pallas_flash_postprocess": lambda size: 4 * 64 * 64,
}
BUSY = 60_000


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "reproducible"),
    [
        *((64, 64, False), (64, 64, True), (128, 128, False), (128, 128, True)),
        *((192, 128, False), (192, 128, True), (256, 256, False), (256, 256, True)),
        *((80, 80, False), (80, 80, True), (96, 96, False), (112, 112, True)),
    ],
)
def test_machine_code(head_dim, value_dim, reproducible, is_causal):
    """Nothing spilt, and products that run side by side, not one by one."""
    # Known: CTA 1 in turn, where the barrier of turns takes one register too many.
    most_spills = 3 if (head_dim, reproducible, is_causal) == (192, True, True) else 0
    q, v = (jax.ShapeDtypeStruct((2, 4096, 8, n), jnp.bfloat16) for n in (head_dim, value_dim))
    call = functools.partial(attention, is_causal=is_causal, reproducible=reproducible)
    kernels = list(machine_code_of(functools.partial(gradients, call=call), q, q, v))
    print(*kernels, sep="\n")
    assert len(kernels) == 4
    for name, registers, stack, loops in kernels:
        if read := READ_AT_A_TIME.get(name.removesuffix("_mosaic_gpu_kernel")):
            programs = 65536 // (128 * registers)
            assert programs * read(value_dim) >= BUSY and not stack and not loops, name
            continue
        three = head_dim == 64 and ("forward" in name or "dq" in name)
        warpgroups = 3 if three else 2
        # A warpgroup that loads has the same until `set_max_registers`.
        assert registers * 128 * (warpgroups + 1) <= 65536, name
        # Outside of loops it may have spilt some.
        assert stack <= 64, name
        assert loops, name
        for loop in loops:
            assert loop.spills <= most_spills, name
            # The compiler waits after each of them, if it can not see that none needs another.
            assert loop.opcodes["WARPGROUP.DEPBAR"] <= loop.matrix["HGMMA"] // 2, loop.order
            # Products overwrite what nobody sets to zero before, but for those of dq's pass.
            assert "CS2R" not in loop.opcodes or "_dq_" in name, name


@pytest.mark.parametrize("head_dim", cases.default([64, 128], [40, 64, 80, 128, 256]))
def test_machine_code_of_folded_tiles(head_dim, monkeypatch):
    q, found = shaped(1, 1024, 16, head_dim, dtype=jnp.bfloat16), []
    right = scheduler.QueryTiles.from_problem.__func__

    @classmethod
    def spied(cls, *args):
        found.append(right(cls, *args))
        return found[-1]

    monkeypatch.setattr(scheduler.QueryTiles, "from_problem", spied)
    [(_, _, stack, loops)] = machine_code_of(functools.partial(attention, is_causal=True), q, q, q)
    assert found and all(parts.folded for parts in found)
    assert stack == 0 and loops and all(loop.spills == 0 for loop in loops)


FOUR, SHORT = (4, (32, 512, 32, 64)), (3, (64, 256, 16, 128))
MASKED = [(FOUR, "full"), (FOUR, "causal"), (FOUR, "lengths"), (SHORT, "lengths")]


@pytest.mark.parametrize(
    ("call", "mask"), cases.default([MASKED[0], MASKED[-1]], [*MASKED, ((2, SHORT[1]), "causal")])
)
def test_machine_code_of_warpgroups(call, mask):
    """Threads of four have the fewest registers; the backward wants the LSE."""
    warpgroups, (batch, *sizes) = call
    q, lengths = shaped(batch, *sizes, dtype=jnp.bfloat16), [shaped(batch)] * (mask == "lengths")

    def run(q, k, v, *lengths):
        options = dict(zip(["key_value_seq_lengths"], lengths, strict=False))
        return run_forward(checked((q, k, v), options | dict(is_causal=mask == "causal")))

    [(_, registers, stack, loops)] = machine_code_of(run, q, q, q, *lengths)
    assert (registers, stack) == (forward_common.at_launch(warpgroups), 0)
    assert loops and all(loop.spills == 0 for loop in loops)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", cases.default([128], [64, 128, 256]))
def test_machine_code_of_query_splits(head_dim, is_causal, monkeypatch):
    # Two CTAs compute a K/V tile at head dim 256, so SMs lack work up to half as many heads.
    heads = 4 if head_dim == 256 else 8
    q, found, shares = (
        shaped(1, 1024, heads, head_dim, dtype=jnp.bfloat16),
        [],
        backward_splits.num_splits,
    )
    monkeypatch.setattr(
        backward_splits, "num_splits", lambda *x: found.append(shares(*x)) or found[-1]
    )
    call = functools.partial(attention, is_causal=is_causal)
    kernels = machine_code_of(functools.partial(gradients, call=call), q, q, q)
    assert {loop.spills for *_, loops in kernels for loop in loops} == {0}
    assert set(found) == {2}


# Without a mask, and so many tokens that query tiles are alike: a program counts its items. When
# that for its queries took the first item for itself, ptxas (13.0) left a register unset that has
# to be zero, the first column of a copy, at 64 and 40 with 1920 tokens, and others where tiles were
# asked for. So results hung on what an earlier kernel had left there: all were right, or the first
# item of every program was wrong, or the card stopped at an illegal instruction.
ALIKE = [(64, 1920), (128, 1024)]
MORE_ALIKE = [(40, 1920), (64, 384), (64, 4224), (80, 640), (96, 1920), (128, 256), (192, 1024)]


@pytest.mark.parametrize(
    ("head_dim", "length"), cases.default(ALIKE, [*ALIKE, *MORE_ALIKE, (256, 1024)])
)
def test_no_copy_reads_an_unset_register(head_dim, length):
    q = shaped(2, length, 16, head_dim, dtype=jnp.bfloat16)
    # It looks for them in every kernel.
    [_] = machine_code_of(functools.partial(attention, is_causal=False), q, q, q)


# The arrays of an option, and the others; 1000 tokens, of which no tile is a divisor.
OPTIONS = {
    "lengths": (dict(key_value_seq_lengths=shaped(2)), {}),
    "documents": (dict(segment_ids=shaped(2, 1000)), dict(is_causal=True)),
    "mask array": (dict(mask=shaped(2, 1, 1000, 1000, dtype=jnp.bool_)), {}),
    "bias": (dict(bias=shaped(1, 8, 1000, 1000, dtype=jnp.bfloat16)), {}),
    "bias in 32 bits": (dict(bias=shaped(1, 8, 1000, 1000, dtype=jnp.float32)), {}),
    "soft cap": ({}, dict(logits_soft_cap=30.0)),
    "slopes": (dict(alibi_slopes=shaped(8, dtype=jnp.float32)), dict(is_causal=True)),
    "sinks": (dict(sinks=shaped(8, dtype=jnp.float32)), dict(is_causal=True)),
    "dropout": ({}, dict(dropout_rate=0.1, dropout_key=jax.random.key(0))),
}


# Instructions whose results are rounded.
ROUND = "FADD", "FMUL", "FFMA", "MUFU.EX2", "MUFU.RCP"


# A bias of keys is read where it lies in device memory, one of pairs by tiles.
OF_FORWARD = OPTIONS | {
    "nothing": ({}, {}),
    "causal": ({}, dict(is_causal=True)),
    "bias, causal": (OPTIONS["bias"][0], dict(is_causal=True)),
    "bias of keys": (dict(bias=shaped(1, 8, 1, 1000, dtype=jnp.bfloat16)), {}),
}


@pytest.mark.extended
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192])
@pytest.mark.parametrize("option", OF_FORWARD)
@pytest.mark.parametrize("max_logits", [False, True])
def test_machine_code_of_the_forward_with(option, head_dim, max_logits):
    """Nothing spilt in loops, whatever is computed and read for each pair."""
    arrays, others = OF_FORWARD[option]
    q = shaped(2, 1000, 8, head_dim, dtype=jnp.bfloat16)

    def call(q, k, v, *values):
        given = dict(zip(arrays, values, strict=True)) | dict(return_max_logits=max_logits)
        return run_forward(checked((q, k, v), given | others))

    [(name, _, _, loops)] = machine_code_of(call, q, q, q, *arrays.values())
    assert loops, name
    for loop in loops:
        assert loop.spills == 0, (name, loop.order)
        assert loop.opcodes["WARPGROUP.DEPBAR"] <= max(loop.matrix["HGMMA"] // 2, 1), loop.order
        # As `STREAMED` below.
        assert "FENCE" in loop.opcodes or "LDSM" not in loop.opcodes, name


EQUAL = ["nothing", "causal", "lengths", "documents", "window", "sinks"]
# Which products are fused with a sum is not known for these.
NOT_FUSED = ["slopes", "bias, causal"]
MASKED = {
    "window": ({}, dict(is_causal=True, local_window_size=(300, 0))),
    "soft cap, causal": ({}, dict(logits_soft_cap=30.0, is_causal=True)),
}


def softmaxes_of(kernel):
    """The copies of its softmax: of the first block, of partial and of full ones."""
    return [x for x in kernel.between_products if x.get("MUFU.EX2", 0) >= 32]


INVARIANT = [*EQUAL, "slopes", "soft cap", "soft cap, causal"]


@pytest.mark.parametrize(
    ("option", "head_dim", "batch_invariant"),
    cases.default(
        [("causal", 128, False), ("documents", 64, False), ("soft cap, causal", 128, True)],
        [
            *itertools.product([*EQUAL, *NOT_FUSED], [64, 128, 256], [False]),
            *itertools.product(INVARIANT, [64, 128, 256], [True]),
        ],
    ),
)
def test_blocks_have_equal_arithmetic(option, head_dim, batch_invariant):
    """Whether a block is a row's first one, partial or full depends on other rows, too.

    So a row's bits would, if the three copies of the softmax added or fused in different ways.
    """
    arrays, others = (OF_FORWARD | MASKED)[option]
    q = shaped(2, 1000, 8, head_dim, dtype=jnp.bfloat16)

    def call(q, k, v, *values):
        given = dict(zip(arrays, values, strict=True)) | others
        return run_forward(checked((q, k, v), given | dict(batch_invariant=batch_invariant)))

    [kernel] = compile_kernels(call, q, q, q, *arrays.values())
    elements = kernel.tile[1] // 2  # Of a thread.
    assert not batch_invariant or elements == (32 if head_dim == 256 else 64)
    copies = softmaxes_of(kernel)
    first, partial, full = ({x: copy.get(x, 0) for x in ROUND} for copy in copies)
    # Behind the last loop, each row's maximum gets what a soft cap leaves out of scores.
    full["FADD"] -= 2 * ("soft cap" in option)
    assert partial == full
    # Loops have a sum that orders waits, `ptx.uniform_zero`, and rescale acc.
    assert first | {"FADD": first["FADD"] + 1, "FMUL": full["FMUL"]} == full
    if option in EQUAL:
        # Scale and maximum are fused for each weight, and the new sum with the old one.
        assert full["FFMA"] == full["MUFU.EX2"] == elements + 2
        # The mask.
        assert copies[1]["FSEL"] - copies[2]["FSEL"] == elements


@pytest.mark.parametrize(
    ("options", "head_dim"),
    cases.default(
        [(dict(logits_soft_cap=30.0), 128)],
        list(itertools.product([{}, dict(logits_soft_cap=30.0)], [64, 128, 256])),
    ),
)
def test_pages_have_the_arithmetic_of_the_forward(options, head_dim):
    """In the loop over partial blocks; slopes are added to more conversions to float32 there."""
    q, packed = (shaped(*n, 8, head_dim, dtype=jnp.bfloat16) for n in ((2, 1000), (100,)))
    pages = shaped(64, 16, 2, head_dim, dtype=jnp.bfloat16)
    options = options | dict(batch_invariant=True)

    def forward(q, k, v):
        return run_forward(checked((q, k, v), dict(is_causal=True) | options))

    [kernel] = compile_kernels(forward, q, q, q)
    requests = shaped(4), shaped(4, 30), shaped(5)
    paged = functools.partial(paged_attention, **options)
    by_pages = compile_kernels(paged, packed, pages, pages, *requests)
    [by_pages] = [x for x in by_pages if "pallas_flash" in x.name]
    _, partial, _ = softmaxes_of(kernel)
    _, same, _ = softmaxes_of(by_pages)
    assert {x: partial.get(x, 0) for x in ROUND} == {x: same.get(x, 0) for x in ROUND}


@pytest.mark.parametrize("queries", [4096, 1], ids=["forward", "decoding"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_max_logits_cost_two_instructions_a_block(head_dim, is_causal, queries):
    """One for each of a thread's two rows; a few more move registers."""
    q, k = (shaped(2, n, 8, head_dim, dtype=jnp.bfloat16) for n in (queries, 4096))

    def kernel(**asked):
        call = functools.partial(attention, is_causal=is_causal, query_offset=4096 - queries)
        [(name, *_, stack, loops)] = machine_code_of(functools.partial(call, **asked), q, k, k)
        assert stack == 0 and loops and all(loop.spills == 0 for loop in loops), name
        return [sum(loop.opcodes.values()) for loop in loops]

    asked, not_asked = kernel(return_max_logits=True), kernel()
    assert all(0 < x - y <= 6 for x, y in zip(asked, not_asked, strict=True)), (asked, not_asked)


@pytest.mark.parametrize("head_dim", cases.default([128], [64, 128, 256]))
def test_low_part_of_the_output_costs_nothing_in_loops(head_dim):
    q = shaped(2, 4096, 8, head_dim, dtype=jnp.bfloat16)

    def loops(split):
        def call(q, k, v):
            call = checked((q, k, v), dict(is_causal=True))
            return run_forward(dataclasses.replace(call, split_output=split))

        [(name, *_, stack, loops)] = machine_code_of(call, q, q, q)
        assert stack == 0 and loops and all(loop.spills == 0 for loop in loops), name
        return [sum(loop.opcodes.values()) for loop in loops]

    assert all(abs(x - y) <= 2 for x, y in zip(loops(True), loops(False), strict=True))


# Local memory instructions in the loop of the backward, where an option needs many registers. Not
# what is wanted; none of them is to grow.
SPILLS = {(64, "soft cap"): 100, (64, "dropout"): 4}
# Counted with the code that centers keys before the loop, see `_key_center`; without it, 0.
SPILLS |= {(64, "lengths"): 10, (64, "documents"): 1}
# Arrays that are copied by tiles. Reads must be done before the next copy, see `ptx.fence`, whose
# lack emulated kernels do not show.
STREAMED = "mask array", "bias"


def of_the_backward(option, head_dim):
    """The kernels of one backward with an option."""
    arrays, others = OPTIONS[option]
    q = shaped(2, 1000, 8, head_dim, dtype=jnp.bfloat16)
    row = shaped(2, 8, 1000, dtype=jnp.float32)

    def call(q, k, v, o, do, m, l_log2, *values):
        problem = checked((q, k, v), dict(zip(arrays, values, strict=True)) | others)
        log_sum = LogSum(m if problem.large else None, l_log2)
        return run_backward(problem, o, log_sum, do, None, **NO_FLAGS, in_order=False)

    return list(machine_code_of(call, *[q] * 5, row, row, *arrays.values()))


@pytest.mark.extended
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("option", OPTIONS)
def test_machine_code_of_the_backward_with(option, head_dim):
    kernels = of_the_backward(option, head_dim)
    # Beside delta two passes with a bias that threads read, where heads are large, or one and what
    # makes rows of sums.
    assert len(kernels) == 3
    small = [f"{name}_mosaic_gpu_kernel" for name in READ_AT_A_TIME]
    computing = [loops for name, _, _, loops in kernels if name not in small]
    assert computing and all(computing)
    for name, _, _, loops in kernels:
        for loop in loops:
            assert loop.spills <= SPILLS.get((head_dim, option), 0), (name, loop.order)
            assert loop.opcodes["WARPGROUP.DEPBAR"] <= loop.matrix["HGMMA"] // 2, loop.order
            assert option not in STREAMED or loop.opcodes["FENCE"] == 2, name


@pytest.mark.parametrize(
    "option", cases.default(["soft cap"], [name for name in OPTIONS if "bias" not in name])
)
def test_machine_code_of_clusters_with(option):
    """Nothing spilt in either CTA; a bias takes two passes."""
    _, (name, _, _, loops), _ = of_the_backward(option, 256)
    assert "cluster" in name and len(loops) >= 2
    for loop in loops:
        assert loop.spills == 0, (name, loop.order)
        assert loop.opcodes["WARPGROUP.DEPBAR"] <= loop.matrix["HGMMA"] // 2, loop.order


# Instructions for an element with dropout and no mask. Which elements share a counter is for the
# compiler to find: where no two keys share a word, and products take several instructions, these
# were 17.2, 25.7, 25.1 and 24.2 at 64. Where neighbours exchange nothing, the backward has 22.9.
DROPOUT_BUDGETS = {
    64: {"forward": 12.5, "backward": 17.8},
    128: {"forward": 13.0, "backward": 21.3},
}


@pytest.mark.parametrize("head_dim", cases.default([64], DROPOUT_BUDGETS))
def test_scores_share_the_words_of_dropout(head_dim):
    program = inspect_attention(
        head_dim, implementation="mosaic", mask="full", features=("dropout",), length=4096
    )
    print(*program.lines(), sep="\n")
    assert not any(k.unset for k in program.kernels)
    costs = {k.attention_pass: k.per_element for k in program.kernels if k.main}
    budgets = DROPOUT_BUDGETS[head_dim]
    assert {name for name, budget in budgets.items() if costs[name] > budget} == set()


# A bias in 16 bits with each option, and others alone; local memory instructions in the loop, as
# above: with a mask, because of the length.
BIASES = {
    name: (dict(bias=shaped(1, 8, 1000, 1000, dtype=jnp.bfloat16)) | arrays, others)
    for name, (arrays, others) in OPTIONS.items()
} | {
    "bias in 32 bits": OPTIONS["bias in 32 bits"],
    "bias of keys": (dict(bias=shaped(1, 8, 1, 1000, dtype=jnp.bfloat16)), {}),
    "bias of heads": (dict(bias=shaped(1, 8, 1, 1, dtype=jnp.bfloat16)), {}),
}
SPILLS_OF_BIAS = {"dropout": 75, "soft cap": 70, "mask array": 1}


@pytest.mark.parametrize(
    ("head_dim", "option"),
    cases.default([(128, "bias")], list(itertools.product([64, 128, 192], BIASES))),
)
def test_machine_code_of_dbias(head_dim, option):
    arrays, others = BIASES[option]
    q = shaped(2, 1000, 8, head_dim, dtype=jnp.bfloat16)
    row = shaped(2, 8, 1000, dtype=jnp.float32)

    def call(q, k, v, do, m, l_log2, *values):
        problem = checked((q, k, v), dict(zip(arrays, values, strict=True)) | others)
        log_sum = LogSum(m if problem.large else None, l_log2)
        return backward_dbias.dbias(problem, do, log_sum, m, backward_dbias.default_tile(problem))

    [(name, _, _, loops)] = machine_code_of(call, *[q] * 4, row, row, *arrays.values())
    [loop] = loops
    assert loop.spills <= SPILLS_OF_BIAS.get(option, 0), (name, loop.order)
    # One wait for each of the two products.
    assert loop.opcodes["WARPGROUP.DEPBAR"] == 2, loop.order
