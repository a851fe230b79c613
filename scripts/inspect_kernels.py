"""What the GPU compiler makes of our kernels, on a machine that has no GPU.

XLA's own CUDA compiler runs against a description of the GPU, so registers, spills and instructions
are those that this JAX and this ptxas produce on the card. They say nothing about time: they reject
bad kernels and keep good ones from getting worse.

The package's kernels, as a table, and what has changed since an earlier run:

    pip install -e '.[inspect]'
    python scripts/inspect_kernels.py --head-sizes 64 128 --masks full causal --json before.json
    python scripts/inspect_kernels.py --head-sizes 64 128 --masks full causal --against before.json

Any function that calls Pallas kernels, from the root of the checkout:

    from scripts.inspect_kernels import show
    show(lambda q, k, v: my_kernel(q, k, v), *["bf16[2,4096,8,128]"] * 3, target="h200")

The columns of the table:

    tile         rows x columns of the tile of scores
    regs         registers of a thread
    stack        bytes of a thread's frame; not zero with spills or indexed local arrays
    shared       bytes of a block, static and dynamic
    CTAs         blocks that fit on one core (SM)
    insn         instructions that one warp issues for one full tile (see `Loop`)
    /elem        insn x warps x 32 / elements of the tile
    matrix       matrix instructions among insn
    work         matrix operations issued / needed; 2.0: two groups of warps compute the same
    spills       local memory instructions in each loop, that over full tiles first
    hidden       part of the exponentials issued while a Hopper matrix instruction is in flight

Below each row stands the order of instructions in the loop over full tiles: `wait(n)` leaves n
groups of matrix instructions in flight, `copied(n)` n groups of copies; `stage` writes registers to
shared memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scripts.command import UserError, command, parse_path, parse_size, why
from scripts.inspection.gpu_compiler import (
    TARGETS,
    Compiled,
    Launch,
    compile_for,
    missing,
    run_tool,
)
from scripts.inspection.machine_code import Instruction, Loop, loops

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

PASSES = ("forward", "decode", "delta", "dkv", "dq", "dbias")
FORWARD = {"forward", "decode"}
MASKS = ("full", "causal", "segments", "window", "lengths", "ragged", "array")
FEATURES = ("bias", "alibi", "softcap", "sinks", "dropout")
DTYPES = ("bfloat16", "float16", "float32")
# Query heads for each key head; there are 8 in all.
GROUPS = (1, 2, 4, 8)
# What makes a length of many tiles one that no tile divides.
RAGGED = 33


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled Pallas kernel; the module says more about the numbers.

    Attributes:
        symbol: Its name in the executable.
        tile: Rows and columns of the tile of scores; None without a matrix product.
        warps: Warps of a block.
        stages: What the kernel asked for as `num_stages`.
        registers: Registers of a thread.
        stack_bytes: A thread's frame.
        shared_bytes: Shared memory of a block.
        ctas_per_core: How many blocks fit on one core (SM).
        matrix: The kinds of matrix instructions in the whole kernel, see `Loop.matrix`.
        loops: The innermost loops with matrix instructions, the cheapest first.
        work: Matrix operations issued over those needed, where both are known.
        compiler: The version of ptxas.
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

    @property
    def name(self) -> str:
        """The name given to `pallas_call`."""
        return _unnumbered(self.symbol)

    @property
    def main(self) -> Loop | None:
        """The loop over full tiles: any other has a mask on top."""
        return self.loops[0] if self.loops else None

    @property
    def per_element(self) -> float | None:
        """Instructions of all threads for one element of a full tile."""
        if self.main is None or self.tile is None:
            return None
        return self.main.instructions * self.warps * 32 / math.prod(self.tile)

    @property
    def loop_spills(self) -> int:
        """Local memory instructions in all loops."""
        return sum(loop.spills for loop in self.loops)

    @property
    def attention_pass(self) -> str:
        """Which of `PASSES` one of the package's kernels belongs to."""
        last = self.name.rpartition("_")[2]
        return "dkv" if last in ("dk", "dv") else last

    def record(self) -> dict[str, Any]:
        """The numbers of the table, for JSON."""
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
        }

    def __str__(self) -> str:
        return "\n".join(_table([self], every_loop=True))


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled function.

    Attributes:
        kernels: Its Pallas kernels.
        launches: Every kernel that one call launches, XLA's own included, in order.
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
        """The table, with a summary below it."""
        return [
            *_table(self.kernels, every_loop=every_loop),
            f"  {len(self.launches)} launches, compiled in {self.seconds:.1f} s "
            f"({self.cpu_seconds:.1f} s of processor time), "
            f"peak memory {self.peak_bytes / 1e6:.1f} MB",
        ]


_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_DTYPES |= {"i32": "int32", "u32": "uint32", "i64": "int64"}


def array(shape: str | Iterable[int], dtype: Any = "bfloat16") -> jax.ShapeDtypeStruct:
    """An argument's shape and dtype, also from a string as jaxprs print it: bf16[2,4096,8,128]."""
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
    """Compiles `function` for a GPU and reads the machine code of its Pallas kernels.

    Args:
        function: Whatever `jax.jit` takes.
        *shapes: Its arguments: pytrees of things with a shape and a dtype, or of strings for
            `array`.
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
        }
        kernels = []
        for cubin in compiled.cubins:
            if any(b".text.%s" % name.encode() in cubin for name in names):
                path = scratch / "kernel.cubin"
                path.write_bytes(cubin)
                kernels += _read(path, compiled, target, dump)
    # Without this check, a change in what XLA writes would look like kernels without fault.
    if names and (not launched or launched != {kernel.symbol for kernel in kernels}):
        raise RuntimeError(
            f"XLA must launch kernels of {sorted(names)} and write their machine code; read "
            f"{sorted(launched)} from its launches and {[k.symbol for k in kernels]} from its "
            f"executable. JAX {jax.__version__} may write either in a new way."
        )
    return Program(
        kernels=tuple(kernels),
        launches=compiled.launches,
        seconds=compiled.seconds,
        cpu_seconds=compiled.cpu_seconds,
        peak_bytes=compiled.peak_bytes,
    )


def compile_kernels(function: Callable, *shapes: Any, target: str = "h200") -> list[Kernel]:
    """The Pallas kernels of `function`; see `compile_program` for the arguments."""
    return list(compile_program(function, *shapes, target=target).kernels)


def peak_memory(function: Callable, *shapes: Any, target: str = "h200") -> int:
    """Bytes of arguments, results and temporaries of the compiled `function`."""
    with tempfile.TemporaryDirectory() as folder:
        return _compile(function, shapes, target, pathlib.Path(folder)).peak_bytes


def show(function: Callable, *shapes: Any, target: str = "h200", dump: str | None = None) -> None:
    """Prints what `compile_program` finds."""
    folder = None if dump is None else pathlib.Path(dump)
    print(compile_program(function, *shapes, target=target, dump=folder))


def _compile(function, shapes, target: str, scratch: pathlib.Path) -> Compiled:
    arguments = jax.tree.map(lambda x: array(x) if isinstance(x, str) else x, shapes)
    return compile_for(target, function, arguments, scratch)


def _unnumbered(symbol: str) -> str:
    """XLA numbers different kernels of one name."""
    return re.sub(r"__\d+$", "", symbol)


def _read(
    path: pathlib.Path, compiled: Compiled, target: str, dump: pathlib.Path | None
) -> Iterator[Kernel]:
    """The kernels of one cubin."""
    about, functions = json.loads(run_tool("nvdisasm", "--emit-json", path))
    lines = {f["function-name"]: f["sass-instructions"] for f in functions}
    usage = run_tool("cuobjdump", "-res-usage", path)
    for name, *numbers in re.findall(
        r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage
    ):
        launch = next((launch for launch in compiled.launches if launch.name == name), None)
        if launch is None:
            continue
        registers, stack, static_shared = map(int, numbers)
        shared = launch.dynamic_shared + static_shared - TARGETS[target].reserved_shared
        code = [
            Instruction(i.get("predicate", ""), i["opcode"], i.get("operands", ""))
            for i in lines[name]
        ]
        found = loops(code)
        same = [call for call in compiled.calls if call.name == _unnumbered(name)]
        call = next((call for call in same if call.blocks == launch.blocks), None)
        warps = launch.threads // 32
        work = found[0].flops * warps / call.flops if found and call and call.flops else math.nan
        yield Kernel(
            symbol=name,
            tile=call.tile if call else None,
            warps=warps,
            stages=call.stages if call else None,
            registers=registers,
            stack_bytes=stack,
            shared_bytes=shared,
            ctas_per_core=TARGETS[target].ctas_per_core(registers, shared, launch.threads),
            matrix=frozenset(i.kind for i in code if i.is_matrix),
            loops=tuple(found),
            work=None if math.isnan(work) else work,
            compiler=about.get(".note.nv.tkinfo", {}).get("tki_toolVersion", ""),
        )
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            file = dump / name
            file.with_suffix(".cubin").write_bytes(path.read_bytes())
            file.with_suffix(".sass").write_text(
                "".join(
                    f"{16 * n:05x} {i.predicate:>6} {i.opcode} {i.operands}\n"
                    for n, i in enumerate(code)
                )
            )


def attention_call(
    head_dim: int,
    *,
    dtype: str = "bfloat16",
    mask: str = "full",
    features: Iterable[str] = (),
    backward: bool = True,
    batch: int = 2,
    length: int = 4096,
    queries: int | None = None,
    num_heads: int = 8,
    group: int = 1,
    tile_sizes: Any = None,
) -> tuple[Callable, list[Any]]:
    """A call of `pallas_flash.attention`, and its arguments, for `compile_program`.

    Args:
        head_dim: Head size of queries, keys and values.
        dtype: Their dtype.
        mask: One of `MASKS`. "segments" is causal too, as packed documents are; "window" is causal
            over 1024 keys; "lengths" are each example's own; "ragged" has no mask, but a length
            that no tile divides; "array" is a boolean array for all examples and heads.
        features: Some of `FEATURES`; the bias is for all examples, and differentiated.
        backward: Whether to return the gradients beside the output.
        batch: Examples.
        length: Of queries and of keys.
        queries: How many of them there are, at the last positions; None for all.
        num_heads: Query heads.
        group: Query heads for each key head.
        tile_sizes: Passed on; None is the package's choice.

    Returns:
        The function and its arguments' shapes.
    """
    # Here, so that other functions can be inspected without the package.
    import pallas_flash

    if mask == "ragged":
        length -= RAGGED
    queries = queries or length
    q = array((batch, queries, num_heads, head_dim), dtype)
    k = array((batch, length, num_heads // group, head_dim), dtype)
    options: dict[str, Any] = {"is_causal": mask in ("causal", "segments", "window")}
    if queries < length:
        options["query_offset"] = length - queries
    arrays = {}
    if mask == "segments":
        ids, of_queries = (array((batch, n), "int32") for n in (length, queries))
        arrays["segment_ids"] = ids if queries == length else (of_queries, ids)
    elif mask == "window":
        options["local_window_size"] = (1023, 0)
    elif mask == "lengths":
        lengths = array((batch,), "int32")
        arrays = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    elif mask == "array":
        arrays["mask"] = array((queries, length), "bool")
    differentiated = {}
    for feature in features:
        match feature:
            case "bias":
                differentiated["bias"] = array((num_heads, queries, length), dtype)
            case "alibi":
                arrays["alibi_slopes"] = array((num_heads,), "float32")
            case "softcap":
                options["logits_soft_cap"] = 50.0
            case "sinks":
                differentiated["sinks"] = array((num_heads,), "float32")
            case "dropout":
                options["dropout_rate"], arrays["dropout_key"] = 0.1, array((2,), "uint32")

    def forward(q, k, v, arrays):
        return pallas_flash.attention(
            q, k, v, **options, **arrays, implementation="triton", tile_sizes=tile_sizes
        )

    def forward_and_backward(q, k, v, arrays, do):
        arrays, extras = ({name: arrays[name] for name in names} for names in (constant, extra))
        out, vjp = jax.vjp(
            lambda q, k, v, extras: forward(q, k, v, {**arrays, **extras}), q, k, v, extras
        )
        return out, vjp(do)

    constant, extra, arrays = list(arrays), list(differentiated), {**arrays, **differentiated}
    return (
        (forward_and_backward, [q, k, k, arrays, q]) if backward else (forward, [q, k, k, arrays])
    )


def inspect_attention(
    head_dim: int,
    *,
    passes: Iterable[str] = PASSES,
    target: str = "h200",
    dump: pathlib.Path | None = None,
    **case: Any,
) -> Program:
    """Compiles one call of `pallas_flash.attention` and keeps the kernels of `passes`.

    Args:
        head_dim: Head size.
        passes: Some of `PASSES`; "dkv" stands also for dk and dv in kernels of their own.
        target: A key of `TARGETS`.
        dump: A folder that receives each kernel's cubin and disassembly.
        **case: See `attention_call`.

    Returns:
        The program, its kernels in the order of `PASSES` and then those of no pass.
    """
    passes = tuple(passes)
    function, shapes = attention_call(head_dim, backward=not FORWARD.issuperset(passes), **case)
    program = compile_program(function, *shapes, target=target, dump=dump)
    order = {name: n for n, name in enumerate(PASSES) if name in passes}
    others = set(PASSES) - order.keys()
    kernels = [kernel for kernel in program.kernels if kernel.attention_pass not in others]
    kernels.sort(key=lambda kernel: order.get(kernel.attention_pass, len(PASSES)))
    return dataclasses.replace(program, kernels=tuple(kernels))


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


def _cell(value: Any) -> str:
    if isinstance(value, list):  # One number for each loop.
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else str(value)


def _changes(before: dict[str, dict], after: dict[str, dict]) -> Iterator[str]:
    for key in dict.fromkeys([*after, *before]):
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            yield f"{key}: only {'after' if old is None else 'before'}"
        elif old != new:
            pairs = ((name, old.get(name), new.get(name)) for name in {**new, **old})
            yield f"{key}: " + ", ".join(f"{name} {a} -> {b}" for name, a, b in pairs if a != b)


def _tile(text: str) -> tuple[str, Any]:
    """KERNEL=Q,KV,WARPS,STAGES[,SLICES[,ONE_LOOP]]."""
    from pallas_flash import Tile

    match = re.fullmatch(r"(\w+)=(\d{1,9}(?:,\d{1,9}){3,4})(?:,([01]))?", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"must look like forward=256,64,8,3 with one more number for slices, and then 0 or 1 "
            f"for one loop; got {text!r}."
        )
    name, sizes, one_loop = match.groups()
    try:
        return name, Tile(
            *map(int, sizes.split(",")), **{"one_loop": True} if one_loop == "1" else {}
        )
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} In {text!r}.") from error


def _tile_sizes(tiles: Iterable[tuple[str, Any]]) -> Any:
    from pallas_flash import TileSizes

    kernels = [field.name for field in dataclasses.fields(TileSizes)]
    names = [name for name, _ in tiles]
    for name in names:
        if name not in kernels or names.count(name) > 1:
            raise UserError(
                f"--tiles must be for kernels among {', '.join(kernels)}, once each; got {name!r}."
            )
    try:
        return TileSizes(**dict(tiles))
    except ValueError as error:
        raise UserError(f"--tiles: {error}") from error


def _kernels_in(path: pathlib.Path) -> dict[str, dict]:
    """What --json wrote to a file."""
    try:
        content = json.loads(path.read_text())
        kernels = content["kernels"] if isinstance(content["jax"], str) else None
        if not all(isinstance(record, dict) for record in kernels.values()):
            raise ValueError
        return kernels
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"A file that --json wrote must be named; got {path}: {why(error)}."
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} must be a file that --json wrote; got another.") from error


def _writable(path: pathlib.Path) -> None:
    """Refuses what cannot be written to, and files of something else, before anything compiles."""
    if path.is_file():
        _kernels_in(path)
    folder = path.absolute().parent
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"--json must be a file that can be written; got {path}.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", nargs="+", choices=TARGETS, default=["h200"])
    add("--head-sizes", nargs="+", type=parse_size, default=[64, 128, 256])
    add("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"])
    add("--masks", nargs="+", choices=MASKS, default=["full", "causal", "segments"])
    add("--features", nargs="+", choices=FEATURES, default=[], help="all at once")
    add("--passes", nargs="+", choices=PASSES, default=PASSES)
    add(
        "--groups",
        nargs="+",
        type=int,
        choices=GROUPS,
        default=[1],
        help="query heads per key head",
    )
    add("--length", type=parse_size, default=4096)
    add("--queries", type=parse_size, help="if there are fewer than keys")
    add(
        "--tiles",
        nargs="+",
        metavar="KERNEL=Q,KV,WARPS,STAGES[,SLICES[,ONE_LOOP]]",
        type=_tile,
        default=[],
        help="in place of the package's choice, such as forward=256,64,8,3,2 or dq=64,64,4,3",
    )
    add("--loops", action="store_true", help="show every loop, and its opcodes")
    add("--json", metavar="FILE", type=parse_path, help="also write JSON; - is the standard output")
    add("--against", metavar="FILE", type=parse_path, help="print what changed since this --json")
    add("--dump", metavar="DIR", type=parse_path, help="keep the machine code")
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if something does not compile."""
    options = _parser().parse_args(argv)
    tile_sizes = _tile_sizes(options.tiles) if options.tiles else None
    length = options.length - (RAGGED if "ragged" in options.masks else 0)
    if (options.queries or 1) > length:
        raise UserError(
            f"--length must be at least --queries, and {RAGGED} more for the mask ragged; got "
            f"{options.length}."
        )
    before = _kernels_in(options.against) if options.against else {}
    to_stdout = str(options.json) == "-"
    if options.json and not to_stdout:
        _writable(options.json)
    if options.dump and options.dump.exists() and not options.dump.is_dir():
        raise UserError(f"--dump must be a folder, or a new one; got the file {options.dump}.")
    if sentence := missing():
        raise UserError(sentence)
    report = sys.stderr if to_stdout else sys.stdout

    results: dict[str, dict] = {}
    failed = False
    for target, head_dim, dtype, mask, group in itertools.product(
        options.target, options.head_sizes, options.dtypes, options.masks, options.groups
    ):
        case = " ".join([target, str(head_dim), dtype, mask, *options.features])
        case += f" {group}:1" if group > 1 else ""
        print(f"\n{case}", file=report)
        try:
            program = inspect_attention(
                head_dim,
                passes=options.passes,
                target=target,
                dump=options.dump and options.dump / case.replace(" ", "_"),
                dtype=dtype,
                mask=mask,
                features=options.features,
                group=group,
                length=options.length,
                queries=options.queries,
                tile_sizes=tile_sizes,
            )
        except (
            *(ValueError, NotImplementedError, MemoryError, OverflowError),
            jax.errors.JaxRuntimeError,
        ) as error:
            # Tiles that ask for too much memory, and what the kernels do not serve.
            failed = True
            print(f"does not compile: {error}", file=report)
            continue
        print(*program.lines(every_loop=options.loops), sep="\n", file=report)
        for kernel in program.kernels:
            results[f"{case} {kernel.name}"] = kernel.record()

    if options.json:
        about = {"jax": importlib.metadata.version("jax"), "kernels": results}
        text = json.dumps(about, indent=1) + "\n"
        if to_stdout:
            print(text, end="")
        else:
            options.json.write_text(text)
    if options.against:
        changes = list(_changes(before, results)) or ["nothing changed"]
        print(f"\nSince {options.against}:", *changes, sep="\n", file=report)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
