"""Messages between the CTAs of a cluster, through distributed shared memory.

A CTA has a barrier for each buffer in which it receives. It completes when one thread has said how
many bytes to expect, and as many have come; the sender does not wait. Pallas has no such sends, and
its barriers cannot be handed to assembly; so these are 8 bytes of shared memory each, and who waits
keeps their parity: message i of a buffer, from 0, has parity i % 2.
"""

# The types of MLIR's Python bindings do not say what these functions take and return.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_flash._backends.mosaic.ptx.layouts import SPLAT, WGMMA, tiled
from pallas_flash._backends.mosaic.ptx.registers import (
    assembly,
    effect,
    i32,
    number,
    thread_number,
    words,
)
from pallas_flash._jax import compat

plgpu = compat.mosaic_gpu()
internals = compat.mosaic_gpu_internals()

WORDS_AT_A_TIME, BYTES_OF_A_THREAD = 4, 16


def start_messages(barriers, count: int, size: int):
    """Initialise `count` barriers at `barriers`, each for a message of `size` bytes.

    One warpgroup of each CTA does it, and reports it to the other CTAs before they may send. Any of
    its threads may report.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, barriers):
        each = [8 * i for i in range(count)]
        lines = [f"mbarrier.init.shared::cta.b64 [$0+{i}], 1;" for i in each]
        lines.append("fence.mbarrier_init.release.cluster;")
        lines += [f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0+{i}], {size};" for i in each]
        _emit_by_one_thread(lines, _address(barriers))
        # The thread that reports is another one of its warp.
        _emit("bar.warp.sync -1;")

    emit(barriers)


def expect_message(barriers, n, size: int):
    """Say how many bytes the next message of buffer n has, once after each wait."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT))
    def emit(_, barriers, n):
        line = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};"
        _emit_by_one_thread([line], _barrier(barriers, n))

    emit(barriers, n)


def wait_for_message(barriers, n, parity):
    """Wait for a message of this parity in buffer n."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, SPLAT))
    def emit(_, barriers, n, parity):
        text = (
            "{ .reg .pred done;\nagain:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n@!done bra again; }"
        )
        _emit(text, _barrier(barriers, n), parity.registers.flat[0])

    emit(barriers, n, parity)


def send_words(x, ref, barriers, n, rank: int, width: int):
    """Send x, 16-bit [64, 64], to where `take_words` finds it, in buffer n of the CTA of a rank.

    `ref` is `tiled` by this width for what other CTAs receive there; words do not lie in tiles.
    """

    @plgpu.inline_mgpu(arg_types=(WGMMA, _tile(width), plgpu.RefType(), SPLAT))
    def emit(_, x, ref, barriers, n):
        place, barrier = _remote(_of_thread(ref), rank), _remote(_barrier(barriers, n), rank)
        registers = words(x)
        for i in range(0, len(registers), WORDS_AT_A_TIME):
            _emit(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                f"[$0+{128 * 4 * i}], {{$1, $2, $3, $4}}, [$5];",
                *(place, *registers[i : i + WORDS_AT_A_TIME], barrier),
            )

    emit(x, ref, barriers, n)


def take_words(ref, dtype, width: int):
    """Return the 16-bit [64, 64] that `send_words` has sent."""
    result = plgpu.ShapeDtypeStruct(ref.shape, dtype, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(_tile(width),), return_type=result)
    def emit(_, ref):
        place, loaded = _of_thread(ref), []
        layout = WGMMA.to_mgpu()
        registers = np.empty(layout.registers_shape((64, 64)), dtype=object)
        for i in range(0, registers.size, WORDS_AT_A_TIME):
            text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{128 * 4 * i}];"
            loaded += assembly(text, ["=r"] * 4 + ["r"], [place], [i32()] * 4)
        kind = ir.F16Type.get() if jnp.dtype(dtype) == jnp.float16 else ir.BF16Type.get()
        registers.flat = [llvm.bitcast(ir.VectorType.get((2,), kind), x) for x in loaded]
        return compat.fragmented_array(registers, layout, None)

    return emit(ref)


def send_tile(source, ref, barriers, n, rank: int, width: int):
    """Copy a 16-bit [64, 64], `tiled` by this width, to buffer n of the CTA of a rank.

    One thread starts it; call `fence` in all that wrote the tile, and let them `meet`, before.
    """

    @plgpu.inline_mgpu(arg_types=(_tile(width), _tile(width), plgpu.RefType(), SPLAT))
    def emit(_, source, ref, barriers, n):
        line = (
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
            f"[$0], [$1], {2 * 64 * 64}, [$2];"
        )
        places = _remote(_address(ref), rank), _address(source)
        _emit_by_one_thread([line], *places, _remote(_barrier(barriers, n), rank))

    emit(source, ref, barriers, n)


def _tile(width: int):
    return plgpu.RefType(tiled(width))


def _address(ref):
    return llvm.ptrtoint(i32(), internals.memref_ptr(ref))


def _barrier(barriers, n):
    return arith.addi(_address(barriers), arith.muli(n.registers.flat[0], number(8)))


def _of_thread(ref):
    """The address of this thread's first words: neighbours have neighbouring places."""
    mine = arith.muli(thread_number(), number(BYTES_OF_A_THREAD))
    return arith.addi(_address(ref), mine)


def _remote(address, rank: int):
    """The address of the same place in the CTA of a rank."""
    text = "mapa.shared::cluster.u32 $0, $1, $2;"
    [place] = assembly(text, ["=r", "r", "r"], [address, number(rank)], [i32()])
    return place


def _emit_by_one_thread(lines, *arguments):
    """Emit lines for the first thread of the warpgroup."""
    condition = f"{{ .reg .pred first; setp.eq.u32 first, ${len(arguments)}, 0;"
    text = "\n".join([condition, *(f"@first {line}" for line in lines), "}"])
    _emit(text, *arguments, thread_number())


def _emit(text: str, *arguments):
    """Emit assembly for numbers of 32 bits."""
    effect(text, ["r"] * len(arguments), list(arguments))
