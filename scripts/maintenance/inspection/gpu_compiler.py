"""Compiles for a GPU that need not be there by XLA's CUDA compiler, and finds the machine code.

Ahead-of-time compilation needs a description of the GPU (`TARGETS`), and no GPU. This module then
takes the executable apart, because JAX has no interface to the machine code in it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

# Without this setting, the CUDA plugin does not load where libraries that run programs are missing.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
from jax._src import xla_bridge
from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU for XLA's compiler; the properties that all GPUs share are in `_DESCRIPTION`."""

    name: str
    capability: int
    cores: int
    shared_per_core: int
    l2: int
    bandwidth: int
    memory: int
    clock_ghz: float
    fpus_per_core: int = 128

    @property
    def reserved_shared(self) -> int:
        """Return the shared memory that the system reserves in each block: 1 KiB since Hopper."""
        return 1024 if self.capability >= 9 else 0

    def ctas_per_core(self, registers: int, shared: int, threads: int) -> int:
        """Return the CTAs that fit on one SM, by registers, shared memory, threads and slots.

        Warps get registers in units of 256, four warps at a time. Each CTA costs 1 KiB of shared
        memory more than it asks for.
        """
        warps = -(-threads // 128) * 4
        warps_by_registers = 65536 // (-(-registers * 32 // 256) * 256) // 4 * 4
        shared = -(-(shared + 1024) // 128) * 128
        return min(warps_by_registers // warps, self.shared_per_core // shared, 2048 // threads, 32)

    def description(self) -> str:
        """XLA's GpuTargetConfigProto, as text."""
        return _DESCRIPTION % {
            **dataclasses.asdict(self),
            "shared_per_block": self.shared_per_core - 1024,
            # wgmma and tcgen05 belong to the architecture-specific instruction sets.
            "features": "ACCELERATED_FEATURES" if self.capability >= 9 else "NONE",
            "suffix": "a" if self.capability >= 9 else "",
        }


# Numbers of the cards, from XLA's own descriptions.
TARGETS = {
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", 8, 108, 167936, 41943040, 2039 * 10**9, 85100068864, 1.41, 64
    ),
    "h100": Target(
        "NVIDIA H100 80GB HBM3", 9, 132, 233472, 52428800, 3352 * 10**9, 84942979072, 1.98
    ),
    "h200": Target("NVIDIA H200", 9, 132, 233472, 52428800, 4800 * 10**9, 151397597184, 1.98),
    "b200": Target("NVIDIA B200", 10, 148, 233472, 132644864, 7672 * 10**9, 191514411008, 1.965),
}

_DESCRIPTION = """
gpu_device_info {
  name: "%(name)s"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability %(capability)d.0%(suffix)s"
  cuda_compute_capability { major: %(capability)d feature_extension: %(features)s }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  core_count: %(cores)d fpus_per_core: %(fpus_per_core)d clock_rate_ghz: %(clock_ghz)s
  memory_bandwidth: %(bandwidth)d device_memory_size: %(memory)d l2_cache_size: %(l2)d
  shared_memory_per_core: %(shared_per_core)d
  shared_memory_per_block: 49152 shared_memory_per_block_optin: %(shared_per_block)d
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_warp: 32 threads_per_core_limit: 2048 threads_per_block_limit: 1024
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_address_bits: 64
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "%(name)s"
"""


def missing() -> str:
    """Return what to install if the compiler or NVIDIA's tools are absent, else ""."""
    absent = [name for name in ("ptxas", "cuobjdump", "nvdisasm") if _tool(name) is None]
    if not _plugins():
        absent.insert(0, "JAX's CUDA plugin")
    if not absent:
        return ""
    return (
        f"Inspecting kernels needs {', '.join(absent)}, though no GPU: "
        "pip install -e '.[inspect]' from the root of the checkout."
    )


def run_tool(name: str, *arguments: Any) -> str:
    """Return the output of one of NVIDIA's tools."""
    command = [_tool(name) or name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout


def _plugins() -> list[str]:
    files = (path for folder in _folders("jax_plugins") for path in folder.iterdir())
    return sorted(f"jax_plugins.{path.name}" for path in files if path.name.startswith("xla_cuda"))


@functools.cache
def _tool(name: str) -> str | None:
    paths = (path for folder in _folders("nvidia") for path in folder.glob(f"*/bin/{name}"))
    return next(map(str, paths), None) or shutil.which(name)


def _folders(package: str) -> list[pathlib.Path]:
    """Return the folders of a namespace package, which several wheels make up."""
    spec = importlib.util.find_spec(package)
    return [pathlib.Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


@functools.cache
def mesh_of(target: str, devices: int = 1, axis: str = "x") -> jax.sharding.Mesh:
    """Return a mesh of devices of the target, for which one can only compile."""
    if sentence := missing():
        raise RuntimeError(sentence)
    describe = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        topology=f"1x1x{devices}",
        target_config=TARGETS[target].description(),
    )
    try:
        topology = describe()
    except NotImplementedError:
        # JAX ran before the import of this module, and its plugin did not load without cuDNN.
        for plugin in _plugins():
            importlib.import_module(plugin).initialize()
        # JAX tells plugins that load in time how calls are divided among devices; this one is late.
        for callback in xla_bridge._plugin_callbacks:
            callback(c_api=xla_bridge._backend_factories["cuda"].c_api)
        topology = describe()
    return topologies.make_mesh(topology, (devices,), (axis,))


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch of an executable."""

    name: str
    blocks: int
    threads: int
    dynamic_shared: int


@dataclasses.dataclass(frozen=True)
class Call:
    """One `pallas_call` of the traced function, which says more than machine code.

    Attributes:
        name: The name of the kernel.
        blocks: The number of CTAs in the grid.
        stages: `num_stages`.
        tile: Rows and columns of the tile of scores; None without a matrix product.
        flops: Matrix operations in one iteration of the innermost loop; 0 if unknown.
        launch: The launch of a kernel in Mosaic GPU, which XLA does not list.
    """

    name: str
    blocks: int
    stages: int | None
    tile: tuple[int, int] | None
    flops: int
    launch: Launch | None = None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A function compiled for a GPU.

    Attributes:
        calls: The `pallas_call`s of the traced function.
        seconds: Tracing, lowering and compiling, by the clock.
        cpu_seconds: The same as processor time of all threads and of ptxas, which hardly depends on
            the load of the machine.
        peak_bytes: Arguments, results and temporaries.
        launches: The kernels that one call launches, in order.
        cubins: The machine code, as ELF images.
    """

    calls: tuple[Call, ...]
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    launches: tuple[Launch, ...]
    cubins: tuple[bytes, ...]


def compile_for(
    target: str, function: Callable, arguments: tuple, scratch: pathlib.Path
) -> Compiled:
    """Compile `function` for a key of `TARGETS`; `arguments` are pytrees of shapes and dtypes.

    `scratch` is an empty folder, into which XLA writes its launches. Its name is one of the
    compiler's options, so that no cache has the executable.
    """
    mesh = mesh_of(target)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    start = _clocks()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(function).trace(*arguments)
        compiled = traced.lower().compile(compiler_options={"xla_dump_to": str(scratch)})
    seconds, cpu_seconds = (after - before for after, before in zip(_clocks(), start, strict=True))
    memory: Any = compiled.memory_analysis()
    executable: Any = compiled.runtime_executable()
    return Compiled(
        tuple(_pallas_calls(traced.jaxpr.jaxpr)),
        seconds,
        cpu_seconds,
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
        tuple(_launches(scratch)),
        tuple(dict.fromkeys(_cubins(executable.serialize()))),
    )


def _clocks() -> tuple[float, float]:
    """Return time, and processor time including finished child processes."""
    return time.perf_counter(), sum(os.times()[:4])


def _launches(folder: pathlib.Path) -> Iterator[Launch]:
    """Read XLA's list of launches, because a cubin does not know its dynamic shared memory."""
    text = "".join(
        path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.thunk_sequence.txt"))
    )
    pattern = r"(\S+) +grid: \[(.*?)\] +threads: \[(.*?)\] +shared_memory: (\d+)"
    for name, grid, threads, shared in re.findall(pattern, text):
        blocks, threads = (math.prod(map(int, sizes.split(","))) for sizes in (grid, threads))
        yield Launch(name, blocks, threads, int(shared))


def _pallas_calls(jaxpr: Any) -> Iterator[Call]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "mpmd_map":
            yield from _mosaic_calls(eqn)
            continue
        if eqn.primitive.name == "pallas_call":
            kernel = eqn.params["jaxpr"]
            products = list(_products(kernel))
            yield Call(
                name=eqn.params["name"] or "kernel",
                blocks=math.prod(eqn.params["grid_mapping"].grid),
                stages=getattr(eqn.params["compiler_params"], "num_stages", None),
                tile=_scores(products) if products else None,
                flops=sum(map(_flops, _innermost_products(kernel))),
            )
        else:
            for inner in _subjaxprs(eqn):
                yield from _pallas_calls(inner)


def _mosaic_calls(eqn: Any) -> Iterator[Call]:
    """Yield the calls of `pl.kernel` in Mosaic GPU."""
    for mesh, body in zip(eqn.params["meshes"], eqn.params["jaxprs"], strict=True):
        name, blocks = eqn.params["name"], math.prod(mesh.grid)
        shared = sum(map(_bytes, _shared_memory(body)))
        launch = Launch(f"{name}_mosaic_gpu_kernel", blocks, 128 * mesh.num_threads, shared)
        yield Call(name, blocks, None, None, 0, launch)


def _shared_memory(jaxpr: Any) -> Iterator[Any]:
    """Yield the allocations that a kernel's warpgroups share."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "run_scoped" and eqn.params["collective_axes"]:
            yield from (v.aval for v in eqn.params["jaxpr"].invars)


def _bytes(ref: Any) -> int:
    # A barrier has 8 bytes.
    return math.prod(ref.shape) * getattr(ref.dtype, "itemsize", 8)


def _scores(products: list[Any]) -> tuple[int, int]:
    """Return the tile of scores: the first product of an attention kernel, and its other slices."""
    first = products[0]
    slices = sum(
        product.invars[1] is first.invars[1]
        and product.params["dimension_numbers"] == first.params["dimension_numbers"]
        for product in products
    )
    rows, columns = first.outvars[0].aval.shape
    return slices * rows, columns


def _subjaxprs(eqn: Any) -> Iterator[Any]:
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
        value = getattr(value, "jaxpr", value)
        if hasattr(value, "eqns"):
            yield value


def _products(jaxpr: Any) -> Iterator[Any]:
    """Yield all matrix products under `jaxpr`, in program order."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in _subjaxprs(eqn):
            yield from _products(inner)


def _innermost_products(jaxpr: Any) -> list[Any]:
    """Return the matrix products of the first innermost loop that has any."""
    for eqn in jaxpr.eqns:
        for inner in _subjaxprs(eqn):
            products = _innermost_products(inner)
            if not products and eqn.primitive.name in ("while", "scan"):
                products = list(_products(inner))
            if products:
                return products
    return []


def _flops(product: Any) -> int:
    (contracted, _), _ = product.params["dimension_numbers"]
    shape = product.invars[0].aval.shape
    return 2 * math.prod(product.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)


# XLA serialises an executable as a Riegeli file: blocks of 64 KiB that start with 24 bytes of block
# header, and in them chunks that start with 40 bytes of chunk header. A file can hold a file.
_RIEGELI = bytes.fromhex("83af70d10d884a3f")


def _cubins(blob: bytes) -> Iterator[bytes]:
    """Return the ELF images inside a serialised executable."""
    start = blob.find(_RIEGELI)
    if start >= 0:
        for chunk in _chunks(blob[start:]):
            yield from _cubins(chunk)
        return
    for match in re.finditer(rb"\x7fELF\x02\x01", blob):
        image = blob[match.start() :]
        programs, sections = struct.unpack_from("<QQ", image, 32)
        program_size, n_programs, section_size, n_sections = struct.unpack_from("<4H", image, 54)
        # Both tables lie at the end, in either order.
        end = max(programs + program_size * n_programs, sections + section_size * n_sections)
        yield image[:end]


def _chunks(file: bytes) -> Iterator[bytes]:
    """Return the records of each chunk of a Riegeli file, end to end."""
    file = b"".join(file[at + 24 : at + 65536] for at in range(0, len(file), 65536))
    at = 0
    while at + 40 <= len(file):
        size, kind, records = struct.unpack_from("<8xQ8xc7s", file, at)
        data = file[at + 40 : at + 40 + size]
        if len(data) < size or kind not in (b"s", b"m", b"p", b"r"):
            return  # The file has ended; further bytes belong to the message around it.
        if kind == b"r":
            length, begin = _varint(data, 1)  # Skips the sizes of the records.
            yield _decompressed(data[:1], data[begin + length :])
        at += 40 + max(size, int.from_bytes(records, "little"))


def _decompressed(kind: bytes, data: bytes) -> bytes:
    if kind == b"\0":
        return data
    if kind != b"s":
        raise RuntimeError(f"XLA compressed its executable in a new way, {kind!r}.")
    _, begin = _varint(data, 0)  # Skips the size, which snappy repeats.
    return _unsnap(data[begin:])


def _unsnap(data: bytes) -> bytes:
    """Decode a snappy stream: literals, and copies of what was decoded before."""
    size, at = _varint(data, 0)
    out = bytearray()
    while len(out) < size:
        tag, at = data[at], at + 1
        if tag & 3 == 0:
            extra = max(0, (tag >> 2) - 59)
            length = int.from_bytes(data[at : at + extra], "little") if extra else tag >> 2
            at += extra
            out += data[at : at + length + 1]
            at += length + 1
            continue
        if tag & 3 == 1:
            length, offset, at = (tag >> 2 & 7) + 4, (tag >> 5) << 8 | data[at], at + 1
        else:
            width = 2 if tag & 3 == 2 else 4
            length, offset = (tag >> 2) + 1, int.from_bytes(data[at : at + width], "little")
            at += width
        # A copy longer than its distance repeats bytes.
        piece = out[-offset:][:length]
        out += (piece * -(-length // len(piece)))[:length]
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number in base 128, least digit first, and the index of its end."""
    value = shift = 0
    while data[at] >= 128:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
    return value | data[at] << shift, at + 1
