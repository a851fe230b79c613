"""The machine code of the kernels, compiled for described GPUs.

Machine code says nothing about time. But a kernel that spills, loses Hopper's matrix instructions
or issues more instructions per element is slower, and each of these has happened after harmless
changes. `scripts/maintenance/inspect_kernels.py` prints the numbers that these tests check.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from support import cases
from support.repository import ROOT

import pallas_flash
from pallas_flash._backends import triton
from pallas_flash._execution import tile_choice
from pallas_flash._jax import compat
from pallas_flash._problem.scores import LogSum
from pallas_flash._problem.tile_sizes import tile_of
from pallas_flash.tuning import Tile, TileSizes
from scripts.maintenance.inspection import gpu_compiler, machine_code
from scripts.maintenance.inspection.calls import FEATURES, PASSES, inspect_attention
from scripts.maintenance.inspection.kernels import array, compile_kernels, peak_memory

needs_compiler = pytest.mark.skipif(
    bool(gpu_compiler.missing()), reason=gpu_compiler.missing() or "everything is here"
)


@pytest.fixture(autouse=True, scope="module")
def compile_as_users_do():
    """Compile with all optimizations. The rest of the suite compiles cheaply."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")


# Head dim, mask, query heads per key head.
CASES = [
    *(
        (head_dim, mask, 1)
        for head_dim in (64, 128)
        for mask in ("full", "causal", "segments", "ragged")
    ),
    *((head_dim, mask, 4) for head_dim in (64, 128) for mask in ("causal", "ragged")),
    (128, "lengths", 4),
    (256, "full", 1),
    (256, "causal", 1),
]

# Instructions per element of a full tile, by pass and head dim: a little above those of the table's
# tiles. Fewer are possible, but on a card smaller tiles, of which more fit on an SM, beat 128 x 128
# with 8.1 instructions by 5 % (forward, head dim 128). Kernels of one pass are summed.
BUDGETS = {
    "forward": {64: 9.4, 128: 11.6, 256: 16.8},
    "dkv": {64: 10.6, 128: 12.8, 256: 35.0},
    "dq": {64: 7.1, 128: 10.2, 256: 25.0},
}


# Local memory instructions allowed in the loop over partial tiles, of which a row of tiles has one
# or two. (dkv with head dim 128, ragged lengths and 4 query heads per key head has 2.) The loop
# over full tiles spills nothing.
PARTIAL_SPILLS = 3


@functools.cache
def compile_once(head_dim, mask, group, target):
    return inspect_attention(head_dim, mask=mask, group=group, target=target)


def compiled(head_dim, mask, group=1, target="h200"):
    """Compile forward and backward with the table's tiles, and print them for a failing test."""
    program = compile_once(head_dim, mask, group, target)
    print(*program.lines(), sep="\n")
    return program


def faults(kernels, head_dim):
    """Yield a sentence for each fault of kernels for Hopper."""
    for kernel in kernels:
        full, *partial = [loop.spills for loop in kernel.loops] or [0]
        if full or sum(partial) > PARTIAL_SPILLS:
            yield (
                f"{kernel.name} spills: {[loop.spills for loop in kernel.loops]} instructions in "
                f"its loops, {kernel.stack_bytes} bytes of stack."
            )
        wanted = set() if kernel.attention_pass == "delta" else {"HGMMA"}
        if kernel.matrix != wanted:
            yield f"{kernel.name} multiplies by {set(kernel.matrix)} and not by {wanted}."
            continue
        if wanted and kernel.work != 1:
            yield f"{kernel.name} does its matrix work {kernel.work} times."
        for loop in kernel.loops:
            # When registers are short, ptxas may wait after each matrix instruction.
            if loop.opcodes.get("WARPGROUP.DEPBAR", 0) > loop.matrix["HGMMA"] // 2:
                yield f"{kernel.name} runs its matrix instructions one by one: {loop.order}."
    for attention_pass, budgets in BUDGETS.items():
        costs = [k.per_element for k in kernels if k.attention_pass == attention_pass]
        if not costs or sum(costs) > budgets[head_dim]:
            yield f"{attention_pass} issues {costs} instructions per element."


@needs_compiler
@pytest.mark.parametrize(
    ("head_dim", "dtype", "mask", "queries", "group", "programs"),
    [
        *((head_dim, "bfloat16", "full", 1, 1, 3) for head_dim in (64, 128, 256)),
        *((head_dim, "bfloat16", "lengths", 1, 8, 3) for head_dim in (64, 128, 256)),
        *((head_dim, "bfloat16", "lengths", 8, 8, 2) for head_dim in (64, 128, 256)),
        *((head_dim, "float32", "full", 8, 8, 2) for head_dim in (128, 256)),
    ],
)
def test_decoding_keeps_enough_loads_in_flight(head_dim, dtype, mask, queries, group, programs):
    """An SM's share of 4.8 TB/s is 36 KB in a microsecond, about the latency under load.

    Each program has a tile of keys and one of values in flight, 32 KB together, while it works on
    the previous ones. Two programs are enough, and three leave room.
    """
    case = dict(dtype=dtype, mask=mask, queries=queries, group=group, length=2**15)
    program = inspect_attention(head_dim, passes=["decode"], **case)
    print(*program.lines(), sep="\n")
    [kernel, join] = program.kernels
    assert kernel.loop_spills == join.loop_spills == 0
    assert kernel.main.opcodes["LDGSTS"] > 0
    assert kernel.ctas_per_core >= programs


# One test has a whole case, so that several processes compile each case once.
@needs_compiler
@pytest.mark.parametrize(("head_dim", "mask", "group"), CASES)
def test_hopper_kernels_are_lean(head_dim, mask, group):
    found = list(faults(compiled(head_dim, mask, group).kernels, head_dim))
    assert not found, "\n".join(found)


@needs_compiler
@pytest.mark.parametrize(
    ("head_dim", "kernel", "tile", "mask"),
    [
        *(
            (256, "forward", Tile(128, 64, 8, 2), mask)
            for mask in ("full", "causal", "segments", "lengths", "array")
        ),
        (128, "forward", Tile(128, 64, 4, 2), "causal"),
        *((256, "dv", Tile(64, 128, 8, 2), mask) for mask in ("full", "causal", "segments")),
    ],
)
def test_two_stages_wait_late_for_last_operand(head_dim, kernel, tile, mask):
    """The last operand of a tile is in flight during the first product and the exponentials."""
    others = {"dk": Tile(32, 128, 8, 3)} if kernel == "dv" else {}
    program = inspect_attention(
        head_dim,
        mask=mask,
        passes=["dkv" if others else "forward"],
        config=TileSizes(**{kernel: tile}, **others),
    )
    print(*program.lines(), sep="\n")
    [found] = [x for x in program.kernels if x.name == f"pallas_flash_{kernel}"]
    assert re.search(r"copied\(1\).*HGMMA.*copied\(0\).*HGMMA", found.main.order)
    assert found.main.spills == 0


@needs_compiler
@pytest.mark.parametrize("group", [1, 4])
def test_two_programs_of_128_rows_share_an_sm(group):
    """The table's tile of causal calls with head dim 128 and many rows."""
    program = inspect_attention(128, mask="causal", group=group, length=2**13, passes=["forward"])
    print(*program.lines(), sep="\n")
    [kernel] = program.kernels
    assert kernel.tile == (128, 64)
    assert kernel.ctas_per_core == 2
    assert kernel.main.spills == 0
    assert kernel.loop_spills <= PARTIAL_SPILLS
    assert kernel.per_element <= 10.2


@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 128])
def test_three_stages_wait_once(head_dim):
    kernels = [kernel for kernel in compiled(head_dim, "full").kernels if kernel.stages == 3]
    assert {"forward", "dkv"} <= {kernel.attention_pass for kernel in kernels}
    assert {kernel.main.order.count("copied") for kernel in kernels} == {1}


# Instructions per element with dropout, head dim 128, causal. The compiler must find that eight
# elements share a counter, in dk and dv four.
DROPOUT_BUDGETS = {"forward": 16.9, "dkv": 24.6, "dq": 15.4}


@needs_compiler
def test_scores_share_the_words_of_dropout():
    tiles = TileSizes(dkv=Tile(64, 128, 8, 3))
    program = inspect_attention(128, mask="causal", features=("dropout",), config=tiles)
    print(*program.lines(), sep="\n")
    costs = {kernel.attention_pass: kernel.per_element for kernel in program.kernels}
    assert {name for name, budget in DROPOUT_BUDGETS.items() if costs[name] > budget} == set()


@needs_compiler
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [*((h, "bfloat16") for h in (64, 128, 256)), (256, "float32")]
)
def test_kernels_compile_for_the_b200(head_dim, dtype):
    """Operands of products go through shared and tensor memory, which must have room for them."""
    program = inspect_attention(head_dim, dtype=dtype, mask="causal", target="b200")
    print(*program.lines(), sep="\n")
    kernels = program.kernels
    assert sum(kernel.loop_spills for kernel in kernels) <= PARTIAL_SPILLS
    assert {kernel.attention_pass for kernel in kernels} == {"forward", "delta", "dkv", "dq"}
    assert "UTCHMMA" in frozenset().union(*(kernel.matrix for kernel in kernels))


@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_compile_for_the_a100(head_dim):
    kernels = compiled(head_dim, "causal", target="a100").kernels
    assert {kernel.attention_pass for kernel in kernels} == {"forward", "delta", "dkv", "dq"}
    # A mask under a branch would take scores through shared memory.
    [forward] = [kernel for kernel in kernels if kernel.attention_pass == "forward"]
    assert "stage" not in forward.main.order
    assert frozenset().union(*(kernel.matrix for kernel in kernels)) == {"HMMA"}
    assert {k.name: k.loop_spills for k in kernels} == {k.name: 0 for k in kernels}


@needs_compiler
@pytest.mark.parametrize(
    ("head_dim", "dtype", "target"),
    [
        (64, "bfloat16", "h200"),
        pytest.param(128, "bfloat16", "h200", marks=pytest.mark.extended),
        (256, "bfloat16", "h200"),
        (128, "float32", "h200"),
        (128, "bfloat16", "a100"),
    ],
)
def test_all_features_at_once_compile(head_dim, dtype, target):
    """Tiles must leave room for bias and mask, which wait in shared memory too."""
    kernels = inspect_attention(
        head_dim, dtype=dtype, mask="array", features=FEATURES, target=target
    ).kernels
    assert {kernel.attention_pass for kernel in kernels} == set(PASSES) - {"decode", "backward"}
    assert all(kernel.matrix or kernel.attention_pass == "delta" for kernel in kernels)


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradient_of_a_broadcast_bias_compiles(dtype):
    """Its loop over the broadcast axes is pipelined, with all four operands in shared memory."""
    q, k = array((2, 512, 2, 128), dtype), array((2, 512, 2, 128), dtype)
    v = array((2, 512, 2, 256), dtype)

    def gradient(q, k, v, bias):
        call = functools.partial(pallas_flash.attention, q, k, v, implementation="triton")
        return jax.grad(lambda bias: call(bias=bias).astype(jnp.float32).sum())(bias)

    assert peak_memory(gradient, q, k, v, array((512, 512), dtype)) > 0


@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 128])
def test_compilation_takes_seconds(head_dim):
    program = compiled(head_dim, "causal")
    # The clock counts on an idle machine, which compiles kernels in parallel. Processor time counts
    # on a busy one. Slow machines take twice as long as fast ones.
    assert min(program.seconds, program.cpu_seconds) < 6


ROWS = {
    '"triton"': dict(implementation="triton"),
    '"mosaic"': dict(implementation="mosaic"),
    '"xla"': dict(implementation="xla"),
}


@needs_compiler
@pytest.mark.parametrize("row", cases.default(list(ROWS)[:2], ROWS))
def test_memory_is_what_the_page_says(row):
    """By "triton" two numbers for a query come on top of the arrays: LSE and delta."""
    if ROWS[row]["implementation"] == "mosaic" and not compat.has_mosaic_gpu():
        pytest.skip('JAX is too old for "mosaic"')
    wide = array((1, 16384, 16, 128))
    call = functools.partial(pallas_flash.attention, is_causal=True, **ROWS[row])

    def gradient(q, k, v, do):
        o, pull = jax.vjp(call, q, k, v)
        return o, *pull(do)

    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    (shown,) = re.findall(rf"^\| {re.escape(row)} \| (\d+) \| (\d+) \|$", page, re.M)
    found = peak_memory(call, wide, wide, wide), peak_memory(gradient, wide, wide, wide, wide)
    print(found)
    assert [round(x / 1e6) for x in found] == [int(x) for x in shown]


@needs_compiler
@pytest.mark.skipif(not compat.has_mosaic_gpu(), reason='JAX is too old for "mosaic"')
@pytest.mark.parametrize("reproducible", cases.default([True], [True, False]))
def test_mosaic_kernels_are_read(reproducible):
    program = inspect_attention(
        128, mask="causal", implementation="mosaic", reproducible=reproducible
    )
    print(*program.lines(), sep="\n")
    names = ["forward", "delta", "backward", "postprocess"]
    assert [kernel.attention_pass for kernel in program.kernels] == names
    launched = {launch.name for launch in program.launches}
    for kernel in program.kernels:
        assert kernel.is_mosaic and not kernel.unset
        assert kernel.symbol in launched
        if kernel.attention_pass in ("delta", "postprocess"):
            assert kernel.main is None
            continue
        assert kernel.matrix == {"HGMMA"}
        # Two consumer warpgroups with 64 rows each, and one producer warpgroup.
        assert (kernel.warps, kernel.tile[0], kernel.ctas_per_core) == (12, 64, 1)
        assert kernel.loop_spills == 0
        assert kernel.per_element < 15
    forward = program.kernels[0]
    q, o, k, v = 2 * 64 * 128 * 2, 2 * 2 * 64 * 64 * 2, *[2 * 128 * 128 * 2] * 2
    assert 0 <= forward.shared_bytes - (q + o + k + v) < 2048
    assert forward.tile == (64, 128)
    assert forward.main.exp2_hidden > 0.9


def parse(text):
    """Parse instructions from lines of predicate, opcode and operands; `.` stands for none."""
    fields = (line.split() for line in text.strip().splitlines())
    return [machine_code.Instruction(*("" if x == "." else x for x in line)) for line in fields]


def test_loop_is_measured_along_a_full_tile():
    [loop] = machine_code.loops(
        parse("""
            .   MOV       R0,R1
            .   HGMMA.64x128x16.F32.BF16  R24,gdesc[UR4],R24,gsb0
            @P0 BRA       0x50
            .   STL       [R1],R24
            .   FSEL      R24,R24,-INF,P1
            .   MUFU.EX2  R24,R24
            .   WARPGROUP.DEPBAR.LE  gsb0,0x0
            .   MUFU.EX2  R25,R25
            @P2 BRA       0x10
            .   EXIT      .
        """)
    )
    assert (loop.instructions, loop.body, loop.spills) == (6, 8, 1)
    assert loop.order == "HGMMA exp2 wait(0) exp2"
    assert loop.exp2_hidden == 0.5
    assert loop.flops * 4 == 2 * 64 * 128 * 16


def test_cheapest_innermost_loop_comes_first():
    found = machine_code.loops(
        parse("""
            .   HMMA.16816.F32.BF16  R0,R0,R0,R0
            .   FSEL  R0,R0,-INF,P0
            @P0 BRA   0x0
            .   HMMA.16816.F32.BF16  R0,R0,R0,R0
            @P0 BRA   0x30
            @P1 BRA   0x0
            .   EXIT  .
        """)
    )
    assert [loop.instructions for loop in found] == [2, 3]


def test_jump_back_from_a_slow_path_is_no_loop():
    assert not machine_code.loops(
        parse("""
            .    HGMMA.64x128x16.F32.BF16  R24,gdesc[UR4],R24,gsb0
            @!P0 BRA   0x40
            .    MOV   R0,R1
            .    EXIT  .
            .    SYNCS.PHASECHK.TRANS64.TRYWAIT  P0,[UR4],R2
            @!P0 BRA   0x40
            .    BRA   0x20
        """)
    )


# UR8 has a copy's address in shared memory, and UR9 to UR11 have its barrier and indices.
SET = """
    .    UMOV  UR8,0x400
    .    UMOV  UR9,0x800
    .    UMOV  UR11,URZ
    .    ULDC.64  UR14,c[0x0][0x198]
"""


def test_unset_registers_are_found():
    copy = ".  UTMALDG.2D  [UR8],[UR14]"
    of_10 = ["UTMALDG.2D [UR8],[UR14] reads UR10"]
    assert machine_code.unset(parse(f"{SET} {copy}")) == of_10
    assert machine_code.unset(parse(f"{SET} . UMOV UR10,URZ\n {copy}")) == []
    # UR10 is set on one path only, for some threads only, or from an unset register.
    skipped = "@P0 BRA 0x60\n . UMOV UR10,URZ\n"
    assert machine_code.unset(parse(f"{SET} {skipped} {copy}")) == of_10
    assert machine_code.unset(parse(f"{SET} @UP2 UMOV UR10,URZ\n {copy}")) == of_10
    assert machine_code.unset(parse(f"{SET} . UIADD3 UR10,UR7,0x1,URZ\n {copy}")) == of_10
    # It may be set for exactly the threads that copy.
    elected = "@UP2 UMOV UR10,URZ\n @UP3 UTMALDG.2D [UR8],[UR14]"
    assert machine_code.unset(parse(f"{SET} {elected}")) == []


def test_register_operand_has_no_descriptor():
    of_second = ". UMOV UR6,URZ\n . UMOV UR7,URZ\n"
    assert machine_code.unset(parse(f"{of_second} . HGMMA R24,R8,gdesc[UR4],R24")) == []
    found = machine_code.unset(parse(f"{of_second} . HGMMA R24,gdesc[UR4],R24"))
    assert [line.split()[-1] for line in found] == ["UR4", "UR5"]


def test_snappy_copies_may_overlap():
    assert gpu_compiler._unsnap(b"\x0a\x04ab\x11\x02") == b"ababababab"


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "ctas"),
    [(255, 0, 256, 1), (128, 0, 256, 2), (128, 48 * 1024, 128, 4), (32, 227 * 1024, 128, 1)],
)
def test_blocks_per_core(registers, shared, threads, ctas):
    assert gpu_compiler.TARGETS["h200"].ctas_per_core(registers, shared, threads) == ctas


def test_one_sentence_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(gpu_compiler, "_plugins", list)
    sentence = gpu_compiler.missing()
    assert "CUDA plugin" in sentence and "pip install" in sentence
    with pytest.raises(RuntimeError, match="pip install"):
        gpu_compiler.mesh_of.__wrapped__("h200")


@needs_compiler
@pytest.mark.parametrize("head_dim", cases.default([128, 256], [64, 128, 256]))
def test_tangent_kernel_spills_nothing(head_dim):
    """In its loops, and two programs fit on an SM. Hopper's matrix instructions take 64 rows."""
    x, rows = array((2, 4096, 8, head_dim), "bfloat16"), array((2, 8, 4096), "float32")

    def tangents(l_log2, q, k, v, *dots):
        problem = cases.checked((q, k, v), dict(is_causal=True))
        dq = tile_of(tile_choice.tiles_of_call(problem, "triton", None), "dq")
        return triton.tangents(problem, LogSum(None, l_log2), dots, dq, interpret=False)

    [kernel] = compile_kernels(tangents, rows, *[x] * 6)
    assert kernel.loop_spills == 0 and kernel.ctas_per_core >= 2
    assert kernel.stack_bytes == 0 or head_dim == 256
    assert kernel.matrix == {"HGMMA" if head_dim <= 128 else "HMMA"}
