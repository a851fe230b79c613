"""Compiled for an H200 that is not here: no copy of a cache, no spills, loads that overlap."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

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


def attend(key_pages, value_pages, query, requests, scales):
    return pallas_flash.paged_attention(
        query, key_pages, value_pages, *requests, **scales, implementation="triton"
    )


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


@pytest.mark.parametrize("cache", CACHES, ids=lambda x: jnp.dtype(x).name)
def test_pages_are_read_in_place(cache):
    """The kernel gets the arguments themselves, and nothing of their size exists besides."""
    shapes = arguments(64, 64, cache, tokens=REQUESTS)
    program = compiled(attend, shapes)
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
