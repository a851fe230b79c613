"""An evaluator of Pallas kernels: their Triton IR, executed in NumPy with checked memory.

Pallas's interpreter clamps slices and pads blocks, so it says nothing about bounds. `lower` runs
the real lowering for CUDA on a machine without a GPU, and `run` executes the resulting Triton
module program by program. Every active lane of every load and store must lie inside its array in
every dimension, not only inside the allocation. `run` records all reads and writes. `evaluate` runs
a whole JAX function: its kernels through `run`, the operations between them eagerly on the CPU.
`loops` describes the loops of a kernel, for tests of its form.

Undefined values are NaN (the smallest integer, True). These are masked lanes of a load without
`other`, and elements of a result that no program has stored.

The evaluator cannot see anything below the IR (layouts, pipelining, asynchronous hazards,
registers), the error of approximate instructions, or the rounding of tensor cores. A dot multiplies
its operands as they are and sums in float32; TF32 is only an attribute of the operation. The only
races between programs that it sees are two stores to one element.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.lib.triton import dialect as triton_dialect
from jax.extend import core as jax_core
from support.described_gpus import described_gpu

# ---------------------------------------------------------------------------------------------
# Kernels, decoded from the lowered module into plain Python objects
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation. Its values are integers, unique in their kernel."""

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the results
    dtypes: tuple[np.dtype | None, ...]  # of the results; None is a pointer
    attributes: dict[str, Any]
    blocks: tuple[Block, ...]
    location: str


@dataclasses.dataclass(frozen=True)
class Block:
    arguments: tuple[int, ...]
    ops: tuple[Op, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    body: Block
    text: str  # the Triton module, to read when a test fails

    @functools.cached_property
    def definitions(self) -> dict[int, Op]:
        return {value: op for op in walk(self.body) for value in op.results}


def walk(block: Block) -> Iterator[Op]:
    """Yield all operations of the block, also those in nested regions."""
    for op in block.ops:
        yield op
        for inner in op.blocks:
            yield from walk(inner)


_DTYPES = {
    "i1": np.dtype(bool),
    **{f"i{n}": np.dtype(f"int{n}") for n in (8, 16, 32, 64)},
    **{f"ui{n}": np.dtype(f"uint{n}") for n in (8, 16, 32, 64)},
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(jnp.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}


def _shape_and_dtype(mlir_type: ir.Type) -> tuple[tuple[int, ...], np.dtype | None]:
    shape = ()
    if isinstance(mlir_type, ir.RankedTensorType):
        shape, mlir_type = tuple(mlir_type.shape), mlir_type.element_type
    return shape, None if "!tt.ptr" in str(mlir_type) else _DTYPES[str(mlir_type)]


def _attribute(attribute: ir.Attribute) -> Any:
    if isinstance(attribute, ir.DenseI32ArrayAttr):
        return tuple(attribute)
    return getattr(attribute, "value", str(attribute))


class _Decoder:
    """Decoder of a module: it numbers values and turns operations into `Op`s."""

    def __init__(self):
        self._numbers = {}

    def _number(self, value: ir.Value) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def block(self, block: ir.Block) -> Block:
        arguments = tuple(self._number(argument) for argument in block.arguments)
        ops = [self._op(op.operation) for op in block.operations]
        return Block(arguments, tuple(ops))

    def _op(self, op: ir.Operation) -> Op:
        types = [_shape_and_dtype(result.type) for result in op.results]
        names = [a if isinstance(a, str) else a.name for a in op.attributes]
        return Op(
            name=op.name,
            operands=tuple(self._number(operand) for operand in op.operands),
            results=tuple(self._number(result) for result in op.results),
            shapes=tuple(shape for shape, _ in types),
            dtypes=tuple(dtype for _, dtype in types),
            attributes={name: _attribute(op.attributes[name]) for name in names},
            blocks=tuple(self.block(block) for region in op.regions for block in region.blocks),
            location=str(op.location) if op.name in ("tt.load", "tt.store") else "",
        )


_EFFECTS = {"tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.assert", "tt.print", "gpu.barrier"}
_OF_A_PROGRAM = ("tt.load", "tt.get_program_id")
_TERMINATORS = {"tt.return", "tt.reduce.return", "scf.yield", "scf.condition"}


def _without_dead_ops(block: Block) -> Block:
    """Drop unused operations, as Triton does. Pallas loads the old value before each store."""
    used = set()

    def clean(block: Block) -> Block:
        kept = []
        for op in reversed(block.ops):
            if op.blocks or op.name in _EFFECTS | _TERMINATORS or not used.isdisjoint(op.results):
                op = dataclasses.replace(op, blocks=tuple(clean(inner) for inner in op.blocks))
                used.update(op.operands)
                kept.append(op)
        return Block(block.arguments, tuple(reversed(kept)))

    return clean(block)


def _operations(op: ir.Operation) -> Iterator[ir.Operation]:
    for block in (block for region in op.regions for block in region.blocks):
        for inner in block.operations:
            yield inner.operation
            yield from _operations(inner.operation)


def _decode(call: ir.Operation) -> Kernel:
    if len(call.attributes["output_operand_aliases"]):
        raise NotImplementedError("Results that alias operands are not modelled.")
    config = {entry.name: entry.attr for entry in call.attributes["mhlo.backend_config"]}
    context = mlir.JaxIrContext()
    context.append_dialect_registry(mlir.upstream_dialects)
    triton_dialect.register_dialect(context)
    context.load_all_available_dialects()
    with context, ir.Location.unknown():
        module = ir.Module.parse(config["ir"].value_bytes)
        [function] = [op for op in _operations(module.operation) if op.name == "tt.func"]
        body = _Decoder().block(function.regions[0].blocks[0])
        text = str(module)
    shaped = [
        tuple(jax.ShapeDtypeStruct(*_shape_and_dtype(value.type)) for value in values)
        for values in (call.operands, call.results)
    ]
    return Kernel(
        name=config["name"].value,
        grid=tuple(config[f"grid_{axis}"].value for axis in "xyz"),
        num_warps=config["num_warps"].value,
        num_stages=config["num_stages"].value,
        operands=shaped[0],
        results=shaped[1],
        body=_without_dead_ops(body),
        text=text,
    )


@contextlib.contextmanager
def _for_cuda() -> Iterator[None]:
    """Traces and lowers as if on one H200.

    JAX 0.10.2 lowers for CUDA without a described device; later versions ask for its kind, and
    warn that this backend is deprecated.
    """
    with described_gpu("NVIDIA H200"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        yield


def lower(function: Callable, *args) -> list[Kernel]:
    """Return the Triton kernels of `function(*args)` lowered for CUDA, in the module's order."""
    with _for_cuda():
        lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("stablehlo")
    calls = (op for op in _operations(module.operation) if op.name == "stablehlo.custom_call")
    target = "__gpu$xla.gpu.triton"
    return [_decode(op) for op in calls if op.attributes["call_target_name"].value == target]


# ---------------------------------------------------------------------------------------------
# Form
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a kernel, without the operations that do not depend on the iteration.

    The compiler moves such operations in front of the loop, so `Loop` leaves them out.

    Attributes:
        op: `scf.for` or `scf.while`.
        direct: operations of the body itself, which run in each iteration.
        nested: operations in regions inside the body, as the branches of `scf.if`.
        step: the constant step of an `scf.for`, otherwise None.
    """

    op: Op
    direct: tuple[Op, ...]
    nested: tuple[Op, ...]
    step: int | None

    @property
    def pipelinable(self) -> bool:
        """Whether Triton pipelines it: innermost, and its own body loads and multiplies."""
        innermost = not any(op.name in _LOOPS for op in self.direct + self.nested)
        return innermost and self.step == 1 and bool(self.count("tt.load") and self.dots)

    @property
    def dots(self) -> int:
        return self.count("tt.dot")

    def count(self, name: str, *, rank: int = 0, nested: bool = False) -> int:
        """How many operations `name` with a result of at least this rank run in each iteration.

        Operations that may run are counted, too, if `nested`.
        """
        ops = self.direct + self.nested if nested else self.direct
        return sum(op.name == name and max(map(len, op.shapes), default=0) >= rank for op in ops)


_LOOPS = ("scf.for", "scf.while")


def loops(kernel: Kernel) -> list[Loop]:
    """Return the loops of a kernel, outer before inner."""
    found = []
    for op in walk(kernel.body):
        if op.name in _LOOPS:
            ops = list(_varying_ops(op.blocks, set()))
            step = None
            if op.name == "scf.for":
                step = kernel.definitions[op.operands[2]].attributes.get("value")
            direct, nested = (
                tuple(inner for is_direct, inner in ops if is_direct is wanted)
                for wanted in (True, False)
            )
            found.append(Loop(op, direct, nested, step))
    return found


def _varying_ops(
    blocks: Sequence[Block], varying: set[int], direct: bool = True
) -> Iterator[tuple[bool, Op]]:
    """The operations that depend on a loop's arguments, and whether they are its body's own.

    Control flow and effects stay too. A load from a constant address does not vary, because
    nothing stores to the operands of a kernel.
    """
    for block in blocks:
        varying.update(block.arguments)
        for op in block.ops:
            if op.blocks or not op.results or not varying.isdisjoint(op.operands):
                varying.update(op.results)
                yield direct, op
            yield from _varying_ops(op.blocks, varying, False)


def dot_precisions(kernel: Kernel) -> set[str]:
    """Return how the kernel multiplies float32 tiles: "tf32", "tf32x3", "ieee"."""
    names = {int(precision): str(precision) for precision in triton_dialect.InputPrecision}
    dots = (op for op in walk(kernel.body) if op.name == "tt.dot")
    return {names[op.attributes.get("inputPrecision", 0)] for op in dots}


# ---------------------------------------------------------------------------------------------
# Execution
# ---------------------------------------------------------------------------------------------


class Fault(AssertionError):
    """A kernel accessed memory outside one of its arrays, or read what no program had written."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Results of a kernel, and the memory that it touched.

    Attributes:
        kernel: what ran.
        outputs: one array for each result.
        touched: for each operand, which of its elements were read.
        loads: for each operand, how many elements were read, each as often as it was.
        stores: for each result, how often each of its elements was written.
        dots: how many products of tiles were computed.
    """

    kernel: Kernel
    outputs: list[np.ndarray]
    touched: list[np.ndarray]
    loads: list[int]
    stores: list[np.ndarray]
    dots: int


@dataclasses.dataclass(frozen=True)
class _Pointer:
    """Pointers into array number `array`, with their index in each dimension once it is known."""

    array: int
    shape: tuple[int, ...] = ()
    indices: tuple[np.ndarray, ...] | None = None

    def reshaped(self, shape: tuple[int, ...]) -> _Pointer:
        return dataclasses.replace(self, shape=shape)


def _is(op: Op | None, name: str) -> bool:
    return op is not None and op.name == name


def _poison(dtype: np.dtype) -> Any:
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).min if dtype.kind in "iu" else np.nan


def _signless(array: np.ndarray) -> np.ndarray:
    """Triton's integers have no sign, its operations have one."""
    return array.view(f"i{array.itemsize}") if array.dtype.kind == "u" else array


def _unsigned(x: Any) -> Any:
    return x.view(f"u{x.dtype.itemsize}") if x.dtype.kind == "i" else x


def run(kernel: Kernel, inputs: Sequence[Any]) -> Run:
    """Execute all programs of the grid on concrete arrays.

    Raises:
        Fault: an active lane leaves its array in some dimension, or reads a result before it is
            written.
        NotImplementedError: the kernel uses an operation that is not modelled.
    """
    inputs = [np.asarray(x) for x in inputs]
    for x, operand in zip(inputs, kernel.operands, strict=True):
        if (x.shape, x.dtype) != (operand.shape, operand.dtype):
            raise TypeError(f"{kernel.name} takes {operand}; got {x.dtype}{x.shape}.")
    outputs = [np.full(r.shape, _poison(r.dtype), r.dtype) for r in kernel.results]
    # Infinities are the normal case here: exp2(-inf) is how a masked score becomes zero.
    with np.errstate(all="ignore"):
        machine = _Machine(kernel, inputs, outputs)
        for program in itertools.product(*map(range, kernel.grid)):
            machine.run_program(program)
    n = len(inputs)
    return Run(
        kernel, outputs, machine.touched[:n], machine.loads[:n], machine.stores[n:], machine.dots
    )


class _Machine:
    """The memory of one launch, and the values of the program that runs."""

    def __init__(self, kernel: Kernel, inputs: list[np.ndarray], outputs: list[np.ndarray]):
        self.kernel = kernel
        self.num_inputs = len(inputs)
        self.memory = [_signless(x) for x in inputs + outputs]
        self.touched = [np.zeros(x.shape, bool) for x in self.memory]
        self.loads = [0 for _ in self.memory]
        self.stores = [np.zeros(x.shape, np.int32) for x in self.memory]
        self.dots = 0
        self.program = (0, 0, 0)
        # Constants are computed once, the other operations of each block for each program.
        self.values: dict[int, Any] = {}
        self.varying: dict[int, list[tuple[Callable, Op]]] = {}
        self.compute_what_is_constant(kernel.body)
        # Address arithmetic is the same in every program, so it is read once per kernel.
        self.index_values = functools.cache(self._index_values)

    def run_program(self, program: tuple[int, int, int]) -> None:
        self.program = program
        self.block(self.kernel.body, [_Pointer(n) for n in range(len(self.memory))])

    def compute_what_is_constant(self, block: Block) -> None:
        varying = self.varying[id(block)] = []
        for op in block.ops:
            rule = None if op.name in _TERMINATORS else _rule(op)
            constant = op.results and not op.blocks and self.values.keys() >= set(op.operands)
            if constant and not op.name.startswith(_OF_A_PROGRAM):
                self.keep(op, rule(self, op, *(self.values[x] for x in op.operands)))
            else:
                varying.append((rule, op))
            for inner in op.blocks:
                self.compute_what_is_constant(inner)

    def keep(self, op: Op, results: Any) -> None:
        if len(op.results) == 1:
            self.values[op.results[0]] = results
        else:
            self.values.update(zip(op.results, results, strict=True))

    def block(self, block: Block, arguments: Sequence[Any]) -> list[Any]:
        """Run a block, and return the operands of its terminator."""
        values = self.values
        values.update(zip(block.arguments, arguments, strict=True))
        for rule, op in self.varying[id(block)]:
            operands = [values[operand] for operand in op.operands]
            if rule is None:
                return operands
            results = rule(self, op, *operands)
            if op.results:
                self.keep(op, results)
        raise AssertionError("A block of the IR has no terminator.")

    def _index_values(self, offset: int, array: int) -> tuple[int, ...]:
        """The values that hold the index in each dimension of the array.

        Pallas computes an address as `((0 + i * stride_0) + j * stride_1) + ...`, one term for
        each dimension in order. Taking the sum apart gives back the indices, so that each can be
        checked against its own dimension: a row past the end is then seen even where the flat
        address still falls on the next head or the next batch entry.
        """
        definitions, indices = self.kernel.definitions, []
        shape = self.memory[array].shape

        def constant(value: int) -> Any:
            op = definitions.get(value)
            if op is not None and op.name == "tt.splat":
                op = definitions.get(op.operands[0])
            return None if op is None else op.attributes.get("value")

        for dim in reversed(range(len(shape))):
            total = definitions.get(offset)
            product = definitions.get(total.operands[1]) if _is(total, "arith.addi") else None
            stride = math.prod(shape[dim + 1 :])
            if not _is(product, "arith.muli") or constant(product.operands[1]) != stride:
                break
            offset = total.operands[0]
            indices.append(product.operands[0])
        if len(indices) != len(shape) or constant(offset) != 0:
            raise NotImplementedError(
                f"{self.kernel.name} computes an address of an array of shape {shape} in a way "
                f"that is not known here:\n{self.kernel.text}"
            )
        return tuple(reversed(indices))

    def addptr(self, op: Op, pointer: _Pointer, _) -> _Pointer:
        numbers = self.index_values(op.operands[1], pointer.array)
        indices = tuple(self.values[number] for number in numbers)
        return dataclasses.replace(pointer, indices=indices)

    def _active(self, op: Op, pointer: _Pointer, mask: Any) -> tuple[np.ndarray, ...]:
        """Return the indices of active lanes. Raise if one lies outside its dimension."""
        shape = self.memory[pointer.array].shape
        active = tuple(np.asarray(index)[mask] for index in pointer.indices)
        for dim, (index, size) in enumerate(zip(active, shape, strict=True)):
            outside = (index < 0) | (index >= size)
            if outside.any():
                kind, number = "operand", pointer.array
                if number >= self.num_inputs:
                    kind, number = "result", number - self.num_inputs
                raise Fault(
                    f"{op.name} in {self.kernel.name}, program {self.program}: {outside.sum()} of "
                    f"{outside.size} active lanes leave dimension {dim} of {kind} {number}, whose "
                    f"shape is {shape}; their indices span {index.min()} to {index.max()}. "
                    f"{op.location}"
                )
        return active

    def load(self, op: Op, pointer: _Pointer, mask: Any = None, other: Any = None) -> Any:
        [shape], [dtype] = op.shapes, op.dtypes
        mask = np.ones(shape, bool) if mask is None else np.asarray(mask)
        active = self._active(op, pointer, mask)
        if pointer.array >= self.num_inputs and not self.stores[pointer.array][active].all():
            raise Fault(f"{self.kernel.name} reads a result that is not written. {op.location}")
        self.touched[pointer.array][active] = True
        self.loads[pointer.array] += int(mask.sum())
        loaded = np.full(shape, _poison(dtype), dtype) if other is None else np.array(other)
        loaded[mask] = self.memory[pointer.array][active].view(dtype)
        return loaded[()]

    def store(self, op: Op, pointer: _Pointer, value: Any, mask: Any = None) -> tuple[()]:
        mask = np.ones(pointer.shape, bool) if mask is None else np.asarray(mask)
        active = self._active(op, pointer, mask)
        memory = self.memory[pointer.array]
        memory[active] = np.asarray(value)[mask].view(memory.dtype)
        np.add.at(self.stores[pointer.array], active, 1)
        return ()

    def for_loop(self, op: Op, start, stop, step, *carry):
        [body] = op.blocks
        for i in range(start, stop, step):
            carry = self.block(body, [start.dtype.type(i), *carry])
        return carry[0] if len(carry) == 1 else carry

    def while_loop(self, op: Op, *carry):
        before, after = op.blocks
        while True:
            condition, *carry = self.block(before, carry)
            if not condition:
                return carry[0] if len(carry) == 1 else carry
            carry = self.block(after, carry)

    def if_else(self, op: Op, condition):
        branches = op.blocks if condition else op.blocks[1:]
        results = self.block(branches[0], ()) if branches else ()
        return results[0] if len(results) == 1 else results

    def reduce(self, op: Op, *arrays):
        """Halve the axis until one element is left, as the GPU's shuffles do."""
        [combine] = op.blocks
        axis = op.attributes["axis"]
        arrays = [np.moveaxis(x, axis, 0) for x in arrays]
        while len(arrays[0]) > 1:
            half = len(arrays[0]) // 2
            halves = [x[:half] for x in arrays] + [x[half:] for x in arrays]
            arrays = self.block(combine, halves)
        results = [x[0] for x in arrays]
        return results[0] if len(results) == 1 else results


# Each rule takes (machine, op, *operands) and returns the result, or a sequence of several.


def _pure(function: Callable) -> Callable:
    return lambda machine, op, *operands: function(*operands)


def _on_unsigned(function: Callable) -> Callable:
    def rule(machine, op, *operands):
        result = function(*(_unsigned(x) for x in operands))
        return result if result.dtype == bool else _signless(np.asarray(result))[()]

    return rule


def _cast(machine, op: Op, x):
    return x.astype(op.dtypes[0])


def _bitcast(machine, op: Op, x):
    return x if isinstance(x, _Pointer) else x.view(op.dtypes[0])


def _broadcast(machine, op: Op, x):
    [shape] = op.shapes
    return x.reshaped(shape) if isinstance(x, _Pointer) else np.broadcast_to(x, shape)


def _dot(machine, op: Op, a, b, accumulator):
    machine.dots += 1
    return accumulator + a.astype(accumulator.dtype) @ b.astype(accumulator.dtype)


def _divide_toward_zero(x, y):
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


# In the order of the dialect's enumerations.
_INTEGER_COMPARISONS = (
    *(np.equal, np.not_equal),
    *(np.less, np.less_equal, np.greater, np.greater_equal) * 2,
)
_FLOAT_COMPARISONS = {
    1: np.equal,
    2: np.greater,
    3: np.greater_equal,
    4: np.less,
    5: np.less_equal,
    13: np.not_equal,
    14: lambda x, y: np.isnan(x) | np.isnan(y),
}


def _compare_integers(machine, op: Op, x, y):
    predicate = op.attributes["predicate"]
    if predicate >= 6:
        x, y = _unsigned(x), _unsigned(y)
    return _INTEGER_COMPARISONS[predicate](x, y)


def _compare_floats(machine, op: Op, x, y):
    return _FLOAT_COMPARISONS[op.attributes["predicate"]](x, y)


_FUNCTIONS = {
    **{
        function.__name__: function
        for function in (
            *(np.exp, np.exp2, np.expm1, np.log, np.log2, np.log1p, np.sqrt),
            *(np.sin, np.cos, np.tan, np.tanh, np.ceil, np.floor),
        )
    },
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "abs": np.abs,
    "absf": np.abs,
    "absi": np.abs,
    "fabs": np.abs,
    "pow": np.power,
    "powf": np.power,
}


def _libdevice(machine, op: Op, *operands):
    """`__nv_exp2f` is exp2 on float32, `__nv_exp2` on float64."""
    name = op.attributes["symbol"].removeprefix("__nv_")
    function = _FUNCTIONS.get(name) or _FUNCTIONS.get(name.removesuffix("f"))
    if function is None:
        raise NotImplementedError(f"The library function {name!r} is not modelled.")
    return function(*operands)


def _flush(x):
    """The modifier .ftz: subnormal numbers count as zero."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _fused_multiply_add(a, b, c):
    # The product of two float32 is exact in float64.
    return np.float64(a) * np.float64(b) + np.float64(c)


_PTX = {
    "neg": np.negative,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": _fused_multiply_add,
    "selp": lambda x, y, chosen: np.where(chosen, x, y),
    "ex2": np.exp2,
    "rcp": np.reciprocal,
}

# Functions of operands in uint64.
_PTX_OF_INTEGERS = {
    "mul.wide.u32": np.multiply,
    "shr.u64": np.right_shift,
    "cvt.u32.u64": lambda x: x.astype(np.uint32).view(np.int32),
}


def _inline_assembly(machine, op: Op, *operands):
    """Execute straight-line PTX on float32, uint32 and bool, one element per lane."""
    code, constraints = op.attributes["asm_string"], op.attributes["constraints"]
    if op.attributes["packed_element"] != 1:
        raise NotImplementedError(f"Packed assembly is not modelled: {code}")
    num_results = constraints.count("=")
    registers = {f"${num_results + n}": x for n, x in enumerate(operands)}

    def read(text: str):
        if text in registers:
            return registers[text]
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
            return np.uint32(int(match[1], 16)).view(np.float32)
        return np.float32(text)

    for statement in filter(None, map(str.strip, re.split(r"[;{}]", code))):
        opcode, _, arguments = statement.partition(" ")
        if opcode == ".reg":
            continue
        if opcode in _PTX_OF_INTEGERS:
            target, *sources = (argument.strip() for argument in arguments.split(","))
            sources = (
                _unsigned(registers[x]).astype(np.uint64) if x in registers else np.uint64(x)
                for x in sources
            )
            registers[target] = _PTX_OF_INTEGERS[opcode](*sources)
            continue
        name, *modifiers = opcode.split(".")
        if name not in _PTX or modifiers[-1] != "f32":
            raise NotImplementedError(f"This instruction is not modelled: {statement}")
        target, *sources = (argument.strip() for argument in arguments.split(","))
        flush = _flush if "ftz" in modifiers else np.asarray
        result = _PTX[name](*(flush(read(source)) for source in sources))
        registers[target] = flush(np.asarray(result).astype(np.float32))
    results = [np.broadcast_to(registers[f"${n}"], op.shapes[n]) for n in range(num_results)]
    return results[0] if num_results == 1 else results


_RULES: dict[str, Callable] = {
    # Control
    "scf.for": _Machine.for_loop,
    "scf.while": _Machine.while_loop,
    "scf.if": _Machine.if_else,
    "tt.get_program_id": lambda machine, op: np.int32(machine.program[op.attributes["axis"]]),
    # Memory. Atomics are missing on purpose, because their order is not deterministic.
    "tt.addptr": _Machine.addptr,
    "tt.load": _Machine.load,
    "tt.store": _Machine.store,
    # Shapes
    "tt.make_range": lambda machine, op: np.arange(
        op.attributes["start"], op.attributes["end"], dtype=np.int32
    ),
    "tt.splat": _broadcast,
    "tt.broadcast": _broadcast,
    "tt.expand_dims": lambda machine, op, x: np.expand_dims(x, op.attributes["axis"]),
    "tt.reshape": lambda machine, op, x: np.reshape(x, op.shapes[0]),
    "tt.trans": lambda machine, op, x: np.transpose(x, op.attributes["order"]),
    # Tiles
    "tt.dot": _dot,
    "tt.reduce": _Machine.reduce,
    "tt.elementwise_inline_asm": _inline_assembly,
    "tt.extern_elementwise": _libdevice,
    # Integers
    "arith.constant": lambda machine, op: op.dtypes[0].type(op.attributes["value"]),
    "arith.addi": _pure(np.add),
    "arith.subi": _pure(np.subtract),
    "arith.muli": _pure(np.multiply),
    "arith.divsi": _pure(_divide_toward_zero),
    "arith.divui": _on_unsigned(np.floor_divide),
    "arith.remsi": _pure(np.fmod),
    "arith.remui": _on_unsigned(np.remainder),
    "arith.andi": _pure(np.bitwise_and),
    "arith.ori": _pure(np.bitwise_or),
    "arith.xori": _pure(np.bitwise_xor),
    "arith.shli": _pure(np.left_shift),
    "arith.shrsi": _pure(np.right_shift),
    "arith.shrui": _on_unsigned(np.right_shift),
    "arith.maxsi": _pure(np.maximum),
    "arith.minsi": _pure(np.minimum),
    "arith.maxui": _on_unsigned(np.maximum),
    "arith.minui": _on_unsigned(np.minimum),
    "arith.cmpi": _compare_integers,
    # Floating point
    "arith.addf": _pure(np.add),
    "arith.subf": _pure(np.subtract),
    "arith.mulf": _pure(np.multiply),
    "arith.divf": _pure(np.divide),
    "arith.remf": _pure(np.fmod),
    "arith.negf": _pure(np.negative),
    "arith.maxnumf": _pure(np.fmax),
    "arith.minnumf": _pure(np.fmin),
    "arith.maximumf": _pure(np.maximum),
    "arith.minimumf": _pure(np.minimum),
    "arith.cmpf": _compare_floats,
    "arith.select": _pure(lambda condition, x, y: np.where(condition, x, y)[()]),
    **{f"math.{name}": _pure(function) for name, function in _FUNCTIONS.items()},
    # Conversions. numpy rounds to nearest even, as does truncf.
    "arith.truncf": _cast,
    "arith.extf": _cast,
    "tt.fp_to_fp": _cast,
    "arith.sitofp": _cast,
    "arith.uitofp": lambda machine, op, x: _unsigned(x).astype(op.dtypes[0]),
    "arith.fptosi": _cast,
    "arith.fptoui": _cast,
    "arith.trunci": _cast,
    "arith.extsi": _cast,
    "arith.extui": lambda machine, op, x: _unsigned(x).astype(op.dtypes[0]),
    "arith.bitcast": _bitcast,
    "tt.bitcast": _bitcast,
}


def _rule(op: Op) -> Callable:
    if op.name not in _RULES:
        raise NotImplementedError(f"The operation {op.name!r} is not modelled.")
    return _RULES[op.name]


# ---------------------------------------------------------------------------------------------
# Whole functions
# ---------------------------------------------------------------------------------------------


def evaluate(function: Callable, *args, runs: list[Run] | None = None) -> Any:
    """`function(*args)` with each Pallas kernel executed from its Triton IR.

    The function is traced for an abstract GPU. Equations without a kernel inside are evaluated
    eagerly, on the CPU. The `Run` of each kernel is appended to `runs`.
    """
    with _for_cuda():
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    flat = jax.tree.leaves(args)
    outputs = _evaluate_jaxpr(jaxpr, flat, [] if runs is None else runs)
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def _evaluate_jaxpr(closed: Any, args: Sequence[Any], runs: list[Run]) -> list[Any]:
    # A closed jaxpr holds an open one before JAX 0.11, and later there is one class.
    jaxpr = getattr(closed, "jaxpr", closed)
    consts = getattr(closed, "consts", ())
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, jax_core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        results = _evaluate_equation(eqn, [read(atom) for atom in eqn.invars], runs)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _has_kernel(eqn: jax_core.JaxprEqn) -> bool:
    inner = (e for jaxpr in jax_core.jaxprs_in_params(eqn.params) for e in jaxpr.eqns)
    return eqn.primitive.name == "pallas_call" or any(map(_has_kernel, inner))


def _evaluate_equation(eqn: jax_core.JaxprEqn, args: list[Any], runs: list[Run]) -> list[Any]:
    if eqn.primitive.name == "pallas_call":
        [kernel] = lower(functools.partial(eqn.primitive.bind, **eqn.params), *args)
        runs.append(run(kernel, args))
        return [jnp.asarray(output) for output in runs[-1].outputs]
    if not _has_kernel(eqn):
        results = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
        return results if eqn.primitive.multiple_results else [results]
    if eqn.primitive.name == "cond":
        index, *args = args
        return _evaluate_jaxpr(eqn.params["branches"][int(index)], args, runs)
    # The others are calls: jit, remat, custom derivatives, custom batching or partitioning.
    callees = [eqn.params[name] for name in ("jaxpr", "call_jaxpr", "call") if name in eqn.params]
    if len(callees) != 1 or eqn.primitive.name in ("scan", "shard_map"):
        raise NotImplementedError(f"Kernels inside {eqn.primitive.name!r} are not modelled.")
    return _evaluate_jaxpr(callees[0], args, runs)
