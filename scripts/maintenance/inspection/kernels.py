"""Compiles functions for a GPU that need not be there, and reads the machine code of kernels."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from scripts.maintenance.inspection.gpu_compiler import (
    TARGETS,
    Compiled,
    Launch,
    compile_for,
    run_tool,
)
from scripts.maintenance.inspection.machine_code import (
    Instruction,
    Loop,
    between_products,
    loops,
    unset,
)

# Headings of the table, and the entries of `Kernel.record` below them.
_COLUMNS = {
    "tile": "tile",
    "warps": "warps",
    "stages": "stages",
    "regs": "registers",
    "stack": "stack_bytes",
    "shared": "shared_bytes",
    "CTAs": "ctas_per_core",
    "insn": "instructions",
    "/elem": "per_element",
    "matrix": "matrix",
    "work": "work",
    "spills": "spills",
    "hidden": "exp2_hidden",
}


# How Mosaic GPU ends the names of kernels.
MOSAIC = "_mosaic_gpu_kernel"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled Pallas kernel; `inspect_kernels.py` says more about the numbers.

    Attributes:
        symbol: The name in the executable.
        tile: Rows and columns of the tile of scores, in Mosaic GPU the tile of one warpgroup; None
            without a matrix product.
        warps: Warps of a CTA.
        stages: The kernel's `num_stages`.
        registers: Registers of a thread.
        stack_bytes: A thread's frame.
        shared_bytes: Shared memory of a CTA.
        ctas_per_core: The CTAs that fit on one SM.
        matrix: The kinds of matrix instructions in the whole kernel, see `Loop.matrix`.
        loops: The innermost loops with matrix instructions, the cheapest first.
        work: Matrix operations issued over those needed, where both are known.
        compiler: The version of ptxas.
        unset: Instructions that read a uniform register that ptxas left unset, see
            `machine_code.unset`.
        between_products: How often each opcode occurs there, see `machine_code.between_products`.
    """

    symbol: str
    tile: tuple[int, int] | None
    warps: int
    stages: int | None
    registers: int
    stack_bytes: int
    shared_bytes: int
    ctas_per_core: int
    matrix: frozenset[str]
    loops: tuple[Loop, ...]
    work: float | None
    compiler: str
    unset: tuple[str, ...]
    between_products: tuple[dict[str, int], ...]

    @property
    def name(self) -> str:
        """The name given to `pallas_call`."""
        return _unnumbered(self.symbol)

    @property
    def is_mosaic(self) -> bool:
        """Whether it was lowered through Mosaic GPU."""
        return self.symbol.endswith(MOSAIC)

    @property
    def main(self) -> Loop | None:
        """The loop over full blocks; other loops have a mask, too."""
        return self.loops[0] if self.loops else None

    @property
    def per_element(self) -> float | None:
        """Instructions of all threads for one element of a full block."""
        if self.main is None or self.tile is None:
            return None
        # In Mosaic GPU each warpgroup, of four warps, has a tile of its own.
        warps = 4 if self.is_mosaic else self.warps
        return self.main.instructions * warps * 32 / math.prod(self.tile)

    @property
    def loop_spills(self) -> int:
        """Local memory instructions in all loops."""
        return sum(loop.spills for loop in self.loops)

    @property
    def attention_pass(self) -> str:
        """The one of `PASSES` to which a kernel of the package belongs."""
        last = self.name.rpartition("_")[2]
        known = {"dk": "dkv", "dv": "dkv", "cluster": "backward", "preprocess": "delta"}
        return known.get(last, last)

    def record(self) -> dict[str, Any]:
        """Return the numbers of the table, for JSON."""
        main = self.main
        return {
            "tile": self.tile and "x".join(map(str, self.tile)),
            "warps": self.warps,
            "stages": self.stages,
            "registers": self.registers,
            "stack_bytes": self.stack_bytes,
            "shared_bytes": self.shared_bytes,
            "ctas_per_core": self.ctas_per_core,
            "instructions": main and main.instructions,
            "per_element": self.per_element and round(self.per_element, 2),
            "matrix": main and " ".join(f"{kind}x{n}" for kind, n in main.matrix.items()),
            "work": self.work,
            "spills": [loop.spills for loop in self.loops],
            "exp2_hidden": main and main.exp2_hidden and round(main.exp2_hidden, 2),
            "order": main and main.order,
            "compiler": self.compiler,
            "unset": list(self.unset),
        }

    def __str__(self) -> str:
        return "\n".join(_table([self], every_loop=True))


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled function.

    Attributes:
        kernels: Its Pallas kernels.
        launches: Every kernel that one call launches, XLA's own included, in order; those in Mosaic
            GPU, which XLA does not list, come last.
        seconds: Tracing, lowering and compiling, by the clock.
        cpu_seconds: The same as processor time of all threads and of ptxas.
        peak_bytes: Arguments, results and temporaries.
    """

    kernels: tuple[Kernel, ...]
    launches: tuple[Launch, ...]
    seconds: float
    cpu_seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        return "\n".join(self.lines(every_loop=True))

    def lines(self, *, every_loop: bool = False) -> list[str]:
        """Return the table, with a summary below it."""
        return [
            *_table(self.kernels, every_loop=every_loop),
            f"  {len(self.launches)} launches, compiled in {self.seconds:.1f} s "
            f"({self.cpu_seconds:.1f} s of processor time), "
            f"peak memory {self.peak_bytes / 1e6:.1f} MB",
        ]


_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_DTYPES |= {"i32": "int32", "u32": "uint32", "i64": "int64"}


def array(shape: str | Iterable[int], dtype: Any = "bfloat16") -> jax.ShapeDtypeStruct:
    """Return an argument's shape and dtype, also from a string of jaxprs: bf16[2,4096,8,128]."""
    if isinstance(shape, str):
        match = re.fullmatch(r"(\w+)\[([\d,\s]*)\]", shape)
        if match is None:
            raise ValueError(f"`shape` must look like 'bf16[2,4096,8,128]'; got {shape!r}.")
        dtype = _DTYPES.get(match[1], match[1])
        shape = map(int, filter(None, match[2].split(",")))
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def compile_program(
    function: Callable, *shapes: Any, target: str = "h200", dump: pathlib.Path | None = None
) -> Program:
    """Compile `function` for a GPU and reads the machine code of its Pallas kernels.

    Args:
        function: An argument of `jax.jit`.
        *shapes: The function's arguments: pytrees of things with a shape and a dtype, or of strings
            for `array`.
        target: A key of `TARGETS`.
        dump: A folder that receives each kernel's cubin and disassembly.

    Returns:
        The kernels, the launches of one call, the compile time and the peak memory.

    Raises:
        RuntimeError: The `inspect` extra is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        compiled = _compile(function, shapes, target, scratch)
        names = {call.name for call in compiled.calls}
        launched = {
            launch.name for launch in compiled.launches if _unnumbered(launch.name) in names
        } | {call.launch.name for call in compiled.calls if call.launch}
        kernels = []
        for cubin in compiled.cubins:
            if any(b".text.%s" % name.encode() in cubin for name in names):
                path = scratch / "kernel.cubin"
                path.write_bytes(cubin)
                kernels += _read(path, compiled, target, dump)
    # Without this check, a change of XLA's output would look like kernels without fault.
    if names and (not launched or launched != {kernel.symbol for kernel in kernels}):
        raise RuntimeError(
            f"XLA must launch kernels of {sorted(names)} and write their machine code; read "
            f"{sorted(launched)} from its launches and {[k.symbol for k in kernels]} from its "
            f"executable. JAX {jax.__version__} may write either in a new way."
        )
    return Program(
        kernels=tuple(kernels),
        launches=(*compiled.launches, *(call.launch for call in compiled.calls if call.launch)),
        seconds=compiled.seconds,
        cpu_seconds=compiled.cpu_seconds,
        peak_bytes=compiled.peak_bytes,
    )


def compile_kernels(function: Callable, *shapes: Any, target: str = "h200") -> list[Kernel]:
    """Return the Pallas kernels of `function`; see `compile_program` for the arguments."""
    return list(compile_program(function, *shapes, target=target).kernels)


def peak_memory(function: Callable, *shapes: Any, target: str = "h200") -> int:
    """Return the bytes of arguments, results and temporaries of the compiled `function`."""
    with tempfile.TemporaryDirectory() as folder:
        return _compile(function, shapes, target, pathlib.Path(folder)).peak_bytes


def show(function: Callable, *shapes: Any, target: str = "h200", dump: str | None = None) -> None:
    """Print what `compile_program` finds."""
    folder = None if dump is None else pathlib.Path(dump)
    print(compile_program(function, *shapes, target=target, dump=folder))


def _compile(function, shapes, target: str, scratch: pathlib.Path) -> Compiled:
    arguments = jax.tree.map(lambda x: array(x) if isinstance(x, str) else x, shapes)
    return compile_for(target, function, arguments, scratch)


def _unnumbered(symbol: str) -> str:
    """Return the name without XLA's number and without Mosaic GPU's suffix."""
    return re.sub(r"__\d+$", "", symbol.removesuffix(MOSAIC))


def _tile_of_warpgroup(inner: list[Loop]) -> tuple[int, int] | None:
    """Return the tile of scores: of the first product in the loop over full blocks."""
    return inner[0].first_product if inner else None


def _read(
    path: pathlib.Path, compiled: Compiled, target: str, dump: pathlib.Path | None
) -> Iterator[Kernel]:
    """Return the kernels of one cubin."""
    about, functions = json.loads(run_tool("nvdisasm", "--emit-json", path))
    lines = {f["function-name"]: f["sass-instructions"] for f in functions}
    usage = run_tool("cuobjdump", "-res-usage", path)
    for name, *numbers in re.findall(
        r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage
    ):
        same = [call for call in compiled.calls if call.name == _unnumbered(name)]
        own = (call.launch for call in same if call.launch)
        launch = next((x for x in (*own, *compiled.launches) if x.name == name), None)
        if launch is None:
            continue
        registers, stack, static_shared = map(int, numbers)
        shared = launch.dynamic_shared
        if not name.endswith(MOSAIC):  # The static part has a name of its own.
            shared += static_shared - TARGETS[target].reserved_shared
        code = [
            Instruction(i.get("predicate", ""), i["opcode"], i.get("operands", ""))
            for i in lines[name]
        ]
        inner = loops(code)
        call = next((call for call in same if call.blocks == launch.blocks), None)
        warps = launch.threads // 32
        work = inner[0].flops * warps / call.flops if inner and call and call.flops else math.nan
        yield Kernel(
            symbol=name,
            tile=call.tile or _tile_of_warpgroup(inner) if call else None,
            warps=warps,
            stages=call.stages if call else None,
            registers=registers,
            stack_bytes=stack,
            shared_bytes=shared,
            ctas_per_core=TARGETS[target].ctas_per_core(registers, shared, launch.threads),
            matrix=frozenset(i.kind for i in code if i.is_matrix),
            loops=tuple(inner),
            work=None if math.isnan(work) else work,
            compiler=about.get(".note.nv.tkinfo", {}).get("tki_toolVersion", ""),
            unset=tuple(unset(code)),
            between_products=tuple(between_products(code)),
        )
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            file = dump / name
            file.with_suffix(".cubin").write_bytes(path.read_bytes())
            file.with_suffix(".sass").write_text(
                "".join(
                    f"{16 * n:05x} {i.predicate:>6} {i.opcode} {i.operands}\n"
                    for n, i in enumerate(code)
                ),
                encoding="utf-8",
            )


def _table(kernels: Iterable[Kernel], every_loop: bool) -> Iterator[str]:
    kernels = list(kernels)
    if not kernels:
        yield "no Pallas kernel"
        return
    rows = [["kernel", *_COLUMNS]]
    for kernel in kernels:
        record = kernel.record()
        rows.append([kernel.name, *(_cell(record[key]) for key in _COLUMNS.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        " ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    yield lines[0]
    for kernel, line in zip(kernels, lines[1:], strict=True):
        yield line
        for loop in kernel.loops if every_loop else kernel.loops[:1]:
            if every_loop:
                yield (
                    f"  loop of {loop.instructions}, {loop.body} in all branches, "
                    f"{loop.spills} spills"
                )
                top = itertools.islice(loop.opcodes.items(), 16)
                yield "    " + " ".join(f"{kind}={n}" for kind, n in top)
            order = loop.order
            yield "    " + (order if every_loop or len(order) <= 160 else order[:157] + "...")
        yield from (f"    UNSET: {fault}" for fault in kernel.unset)


def _cell(value: Any) -> str:
    if isinstance(value, list):  # One number for each loop.
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else str(value)
