"""Arithmetic in PTX, executed in NumPy: for kernels that are emulated it has stand-ins."""

import functools
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from support import ptx_threads

from pallas_flash._jax import compat
from pallas_flash._problem.dropout import Dropout
from scripts.maintenance.inspection import gpu_compiler

if not compat.has_mosaic_gpu():
    pytest.skip("JAX is too old; test_select_hopper has what is said then", allow_module_level=True)

from pallas_flash._backends.mosaic import common, ptx, score_mask

# By the start of an instruction: the results are rounded, not approximate.
INSTRUCTIONS = {
    "ex2": np.exp2,
    "rcp": np.reciprocal,
    "add": np.add,
    "mul": np.multiply,
    "mul.wide.u32": lambda a, b: np.multiply(a, b, dtype=np.uint64),
    "fma": lambda a, b, c: np.float32(np.float64(a) * np.float64(b) + np.float64(c)),
    # A minimum is of the other one where one is NaN, but for that of this name.
    "min": np.fmin,
    "min.ftz.NaN": np.minimum,
}


def execute(text, *arguments, results=1):
    """The results of straight-line PTX for arguments, arrays of 32 bits."""
    registers = {f"${i}": x for i, x in enumerate(arguments, results)}

    def value(name, integers):
        kind = np.uint32 if integers else np.float32
        if name.startswith("0f"):
            return np.uint32(int(name[2:], 16)).view(kind)
        return np.uint32(int(name, 16)) if name.startswith("0x") else registers[name].view(kind)

    for line in text.strip("{} ").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        instruction, *names = re.findall(r"[^\s,{}]+", line)
        if instruction == "mov.b64":
            *halves, whole = names
            for i, name in enumerate(halves):
                registers[name] = (registers[whole] >> np.uint64(32 * i)).astype(np.uint32)
            continue
        integers, parts = instruction.endswith(("s32", "u32")), instruction.split(".")
        function = INSTRUCTIONS.get(".".join(parts[:3])) or INSTRUCTIONS[parts[0]]
        with np.errstate(all="ignore"):
            found = function(*(value(name, integers) for name in names[1:]))
        registers[names[0]] = found if integers else np.asarray(found, np.float32)
    return [registers[f"${i}"] for i in range(results)]


# Neighbours in all pairs.
X = np.array([-np.inf, -1e30, -200, -31, -5, -0.3, 0, 1e-6, 2, 29, 31, 127, 1e30, np.inf, np.nan])
PAIRS = [x.ravel().astype(np.float32) for x in np.meshgrid(X, X)]


def test_neighbours_share_a_reciprocal():
    """1 / (1 + exp2(x)), NaN where either of two neighbours is."""
    for x, found in zip(PAIRS, execute(ptx.LOGISTIC, *PAIRS, results=2), strict=True):
        exact = np.maximum(logistic(x), 2**-30)
        exact = np.where(np.isnan(PAIRS).any(axis=0), np.nan, exact)
        np.testing.assert_allclose(found, exact, rtol=4e-7)


def test_neighbours_that_are_apart():
    [found] = execute(ptx.LOGISTIC_APART, PAIRS[0])
    np.testing.assert_allclose(found, logistic(PAIRS[0]), rtol=4e-7)


def logistic(x):
    with np.errstate(over="ignore", invalid="ignore"):
        return 1 / (1 + np.exp2(x.astype(np.float64)))


def test_tanh():
    x = np.concatenate([np.linspace(-20, 20, 999), X]).astype(np.float32)
    [found] = execute(ptx.TANH, x)
    np.testing.assert_allclose(found, np.tanh(x.astype(np.float64)), rtol=0, atol=2e-7)


def test_both_halves_of_a_product():
    x = np.array([0, 1, 0xFFFF, 0x10000, 2**31, 2**32 - 1, 0xD2511F53, 12345678], np.uint32)
    for m in (0xD2511F53, 0xCD9E8D57):
        low, high = execute(ptx.PRODUCT, x, np.full_like(x, m), results=2)
        assert low.tolist() == [n * m % 2**32 for n in x.tolist()]
        assert high.tolist() == [n * m // 2**32 for n in x.tolist()]


@pytest.mark.skipif(bool(gpu_compiler.missing()), reason=gpu_compiler.missing() or "is here")
@pytest.mark.parametrize("aligned", [True, False], ids=["exchanged", "alone"])
def test_what_each_thread_keeps(aligned, monkeypatch, tmp_path):
    """Dropout of a tile whose rows are keys, by the PTX of a warpgroup."""
    b, h, first_query, first_key, shape = 3, 5, 128, 448, (64, 64)
    seed = np.array([0x12345678, 0x1ABCDEF0], np.uint32)

    def kernel(seed, ref, *, static):
        key = [common.plgpu.load(seed.at[i]) for i in range(2)]
        dropout = Dropout(key, rate=0.3, aligned=static)
        options = SimpleNamespace(b=jnp.int32(b), extras=SimpleNamespace(dropout=dropout))
        at = map(jnp.int32, (h, first_query, first_key))
        kept = score_mask.ElementOptions.kept(options, shape, *at, transposed=True)
        ones = common.plgpu.layout_cast(jnp.ones(shape, jnp.float32), ptx.WGMMA)
        ptx.store_fragments(ptx.where(kept, ones, 0.0), ref.at[0])

    found = np.zeros((ptx.groups(shape[1]), *ptx.OF_GROUP), np.float32)
    run_threads(kernel, seed, [found], aligned, monkeypatch, tmp_path)
    rows = ptx.unfold(jnp.asarray(found)[None, None, None])[0, :, 0]
    queries, keys = jnp.arange(64)[None] + first_query, jnp.arange(64)[:, None] + first_key
    wanted = Dropout(jnp.asarray(seed), rate=0.3).kept(b, h, queries, keys)
    np.testing.assert_array_equal(rows, wanted)


def run_threads(kernel, numbers, results, static, monkeypatch, folder):
    """Compile `kernel(numbers, *results, static=static)`, and run the PTX of its warpgroup."""
    call = functools.partial(
        common.launch,
        kernel,
        outputs=[(x.shape, x.dtype) for x in results],
        memory={},
        grid=dict(cta=1),
        warpgroups=1,
        static=static,
    )
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    gpu_compiler.compile_for("h200", lambda x: call((x,)), (numbers,), folder)
    [file] = folder.rglob("*.ptx")
    ptx_threads.execute(file.read_text(), [numbers, *results])


@pytest.mark.skipif(bool(gpu_compiler.missing()), reason=gpu_compiler.missing() or "is here")
@pytest.mark.parametrize("room", [1, 8, 64])
def test_where_each_thread_stores_rows(room, monkeypatch, tmp_path):
    """A tile of 32 and of 16 bits, and a number a row, of which some rows are not stored."""

    def kernel(numbers, *refs, static):
        at = [common.plgpu.load(numbers.at[i]) for i in range(4)]
        row, column = (ptx.positions((64, 16), axis, jnp.int32(0)) for axis in (0, 1))
        x = (row * 16 + column).astype(jnp.float32)
        for stored, ref in zip((x, x.astype(jnp.bfloat16), jnp.max(x, axis=1)), refs, strict=True):
            ptx.store_rows(stored, ref, *at, room=static)

    rows, columns = 64 // room + 2, room + 4
    first, column = 1, 3
    stop, stop_column = first + max(1, 64 // room - 1), column + max(1, room - 1)
    numbers = np.int32([first, stop, column, stop_column])
    x = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    kinds = (16, np.float32), (16, jnp.bfloat16), (1, np.float32)
    found = [np.zeros((rows, columns, n)[: 3 if n > 1 else 2], dtype) for n, dtype in kinds]
    run_threads(kernel, numbers, found, room, monkeypatch, tmp_path)
    for got, stored in zip(found, (x, x.astype(jnp.bfloat16), x.max(axis=1)), strict=True):
        want = np.zeros_like(got)
        for i, j in np.ndindex(64 // room, room):
            if first + i < stop and column + j < stop_column:
                want[first + i, column + j] = stored[i * room + j]
        np.testing.assert_array_equal(got, want)
