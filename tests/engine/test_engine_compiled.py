"""A step of `models.engine`, in the programs that XLA compiles for an H200."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import Decoder
from models.config import DecoderConfig
from models.engine import program
from models.engine.pages import MOST, Groups
from models.engine.sampling import GREEDY, LIMITED
from models.generation import take_apart
from models.rope import Rope
from scripts.maintenance.inspection import gpu_compiler

# That compiler is the extra `inspect`: .ci/run installs it for one JAX and runs this file there.
pytestmark = pytest.mark.skipif(
    bool(gpu_compiler.missing()), reason=gpu_compiler.missing() or "everything is here"
)
SLOTS, PAGES, SIZE = 64, 2048, 64


def compiled_step(implementation, layers, size=None, sliding=()):
    """The kernels of a step, and its memory over the keys of a layer.

    It decodes; or it is the step of this size of a batch-invariant engine.
    """
    config = DecoderConfig(
        **dict(vocab_size=512, features=512, hidden=2048, num_layers=layers, num_heads=8),
        **dict(num_kv_heads=4, head_dim=64, context=8192, rope=Rope(10_000.0), tied=True),
        **dict(dtype="bfloat16", param_dtype="bfloat16", implementation=implementation),
        **dict(batch_invariant=size is not None, sliding=sliding, window=1024),
    )
    groups = Groups.of_models([config], SIZE, MOST)

    def make():
        model = Decoder(config, rngs=nnx.Rngs(0))
        model.init_pages(PAGES, SIZE, groups=groups.layers[0])
        return model

    structure, cache, params = take_apart(nnx.eval_shape(make))
    mesh = gpu_compiler.mesh_of("h200")
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=whole)
    last, table = shape((SLOTS,), jnp.int32), shape((groups.count, SLOTS, 128), jnp.int32)
    state = cache, last, table, shape((SLOTS, config.vocab_size), bool)
    slots = shape((SLOTS, program.PAGES.start + groups.count), jnp.int32)
    state, params = jax.tree.map(lambda x: shape(x.shape, x.dtype), (state, params))
    new = None if size is None else shape((size,), jnp.int32)
    inputs = slots, new, None if size is None else table, new
    kind = GREEDY if size is None else LIMITED
    step = functools.partial(program.step, (structure,), SIZE, kind, 0)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(step, donate_argnums=0).trace(state, params, *inputs)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    text = compiled.as_text()
    kernels = r" = .* (fusion|copy|sort|while|custom-call)\((?!.*AllocateBuffer)"
    bytes_of_pages = 2 * np.prod(cache[0].shape)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return len(re.findall(kernels, text[text.index("\nENTRY") :])), temporary / bytes_of_pages


@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
def test_layers_share_the_schedule(implementation):
    """A layer more is 14 kernels more, and no layer copies its pages."""
    two, _ = compiled_step(implementation, 2)
    three, copied = compiled_step(implementation, 3)
    assert three - two <= 14
    assert copied < 0.5


def test_batch_invariant_step_copies_no_pages():
    _, copied = compiled_step("mosaic", 2, size=128)
    assert copied < 0.5


@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
def test_groups_of_layers_share_arrays(implementation):
    """Three layers write one array, one after the other, and none of them copies it."""
    _, copied = compiled_step(implementation, 3, sliding=(True, False, True))
    assert copied < 0.5
