"""Compiled for an H200 that is not here: no copy of a cache, no spills, loads that overlap."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import cases

import pallas_flash
from scripts.maintenance.inspection import gpu_compiler
from scripts.maintenance.inspection.kernels import compile_kernels

pytestmark = pytest.mark.skipif(
    bool(gpu_compiler.missing()), reason=gpu_compiler.missing() or "everything is here"
)

REQUESTS, TOKENS, PAGES, N, K = 8, 520, 1024, 8, 2


@pytest.fixture(autouse=True, scope="module")
def compile_as_users_do():
    """Compile with all optimizations. The rest of the suite compiles cheaply."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")


def shaped(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def arguments(head_dim, page_size, cache, *, tokens, dtype=jnp.bfloat16, new=False):
    """Shapes of a call; `new` for `paged.append`, whose new tokens have the heads of keys."""
    pages = shaped(PAGES, page_size, K, head_dim, dtype=cache)
    query = shaped(tokens, K if new else N, head_dim, dtype=dtype)
    scales = {}
    if cache != dtype:
        scale = shaped(PAGES, K, page_size, dtype=jnp.float32)
        scales = {"key_scales": scale, "value_scales": scale}
    requests = shaped(REQUESTS), shaped(REQUESTS, PAGES // 4), shaped(REQUESTS + 1)
    return pages, pages, query, requests, scales


def attend(key_pages, value_pages, query, requests, scales, implementation="triton", **options):
    return pallas_flash.paged_attention(
        *(query, key_pages, value_pages, *requests),
        **scales,
        implementation=implementation,
        **options,
    )


by_mosaic = functools.partial(attend, implementation="mosaic")


def append(key_pages, value_pages, new, requests, scales):
    return pallas_flash.paged.append(key_pages, value_pages, new, new, *requests, **scales)


def compiled(function, shapes, donated=()):
    mesh = gpu_compiler.mesh_of("h200")
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, donate_argnums=donated).lower(*shapes).compile()


def cache_shapes(pages):
    return f"[{','.join(map(str, pages.shape))}]"


CACHES = [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn]


@pytest.mark.parametrize(
    ("cache", "call"),
    [*((x, attend) for x in CACHES), (jnp.bfloat16, by_mosaic)],
    ids=["bfloat16", "int8", "float8", "mosaic"],
)
def test_pages_are_read_in_place(cache, call):
    """The kernel gets the arguments themselves, and nothing of their size exists besides."""
    shapes = arguments(64, 64, cache, tokens=REQUESTS)
    program = compiled(call, shapes)
    text, wanted = program.as_text(), cache_shapes(shapes[0])
    made = [x for x in text.splitlines() if f"{wanted}{{" in x.partition("=")[2].partition("(")[0]]
    assert made and all("parameter(" in x for x in made), made
    cache_bytes = shapes[0].size * shapes[0].dtype.itemsize
    assert program.memory_analysis().temp_size_in_bytes < cache_bytes / 2


@pytest.mark.parametrize("cache", CACHES, ids=lambda x: jnp.dtype(x).name)
def test_appending_writes_new_tokens_alone(cache):
    """Results are the donated arguments, and nothing of their size is made."""
    shapes = arguments(64, 64, cache, tokens=REQUESTS, new=True)
    program = compiled(append, shapes, donated=(0, 1, 4))
    memory = program.memory_analysis()
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves((shapes[:2], shapes[4]))]
    assert memory.alias_size_in_bytes >= sum(sizes)
    assert memory.temp_size_in_bytes < 2**16
    assert " copy(" not in program.as_text()


# Head dim, page size, cache.
KERNELS = [
    *((n, size, jnp.bfloat16) for n in (64, 128, 256) for size in (16, 64)),
    *((n, 64, cache) for n in (64, 128, 256) for cache in CACHES[1:]),
]


@pytest.mark.parametrize("case", KERNELS, ids=lambda x: f"{x[0]}-{x[1]}-{jnp.dtype(x[2]).name}")
def test_kernels_do_not_spill(case):
    """Small row tiles for decoding, and large ones for prompts."""
    head_dim, page_size, cache = case
    shapes = arguments(head_dim, page_size, cache, tokens=TOKENS)
    kernels = [x for x in compile_kernels(attend, *shapes) if x.tile is not None]
    assert [x.tile[0] for x in kernels] == [16, 128 if head_dim == 256 else 64]
    for kernel in kernels:
        print(kernel)
        # Prompts in pages of 8 bits at head dim 256 spill 24 bytes outside of loops.
        assert kernel.loop_spills == 0 and kernel.stack_bytes <= (24 if head_dim == 256 else 0)
    # Two tiles of keys and values are in shared memory: one is loading while another is used.
    few = kernels[0]
    assert few.shared_bytes > 2 * 2 * few.tile[1] * head_dim * jnp.dtype(cache).itemsize
    assert few.ctas_per_core >= 2


def of_hopper(head_dim, page_size, **options):
    """The kernel of a call by "mosaic", and its loops over partial and over full blocks."""
    shapes = arguments(head_dim, page_size, jnp.bfloat16, tokens=TOKENS)
    call = functools.partial(by_mosaic, **options)
    [kernel] = [x for x in compile_kernels(call, *shapes) if x.is_mosaic]
    return kernel, kernel.loops


@pytest.mark.parametrize(
    ("head_dim", "page_size", "option"),
    cases.default(
        [(128, 16, "")],
        [
            *itertools.product((64, 128, 256), (16, 64, 128), [""]),
            *itertools.product((64, 128, 256), (16,), ("window", "cap", "slopes")),
        ],
    ),
)
def test_kernel_for_hopper_does_not_spill(head_dim, page_size, option):
    """Nor does a row depend on which loop computes a block: both have the same arithmetic."""
    options = {
        "": {},
        "window": dict(local_window_size=100, sinks=jnp.ones(N)),
        "cap": dict(logits_soft_cap=30.0),
        "slopes": dict(alibi_slopes=jnp.ones(N)),
    }
    kernel, loops = of_hopper(head_dim, page_size, **options[option])
    assert kernel.stack_bytes == 0 and not kernel.unset and len(loops) == 2
    for loop in loops:
        assert loop.spills == 0 and loop.opcodes["WARPGROUP.DEPBAR"] == 2, loop.order
    full, partial = ({x: loop.opcodes[x] for x in ARITHMETIC} for loop in loops)
    assert full == partial or option == "cap"


ARITHMETIC = "FADD", "FMUL", "FFMA", "FMNMX", "MUFU.EX2"


def test_layers_share_the_schedule():
    """It is made once, and no layer copies more of it than a counter."""

    def two_layers(key_pages, value_pages, query, requests, scales):
        query = by_mosaic(key_pages, value_pages, query, requests, scales)
        return by_mosaic(value_pages, key_pages, query, requests, scales)

    text = compiled(two_layers, arguments(128, 16, jnp.bfloat16, tokens=TOKENS)).as_text()
    entry = text[text.index("ENTRY") :]
    assert len(re.findall(r"\(s32\[1,1\]\S* f32\S* f32\S* f32\S* custom-call\(", entry)) == 2
    assert sorted(re.findall(r"= s32\[\d+,32\]\S* (\S+)\(", entry)) == ["constant", "fusion"]
    assert set(re.findall(r"= s32\[(\S*)\]\S* copy\(", entry)) == {"1,1"}
