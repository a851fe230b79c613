"""Exported programs whose sizes are symbolic, called at several: each gives what a call gives.

So does one for several platforms; programs for a GPU that is not here are lowered and exported.
"""

import functools
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from support import cases, oracle
from support.calls import FORM, NEWER
from support.compare import assert_close
from support.described_gpus import described_gpu
from support.strict import strictly
from support.transform_cases import MASKED, POSITIONS, attention_by, draw_all, masked
from support.transform_cases import output_and_gradients as differentiated

from pallas_flash import ScoreMod, attention, explain
from pallas_flash.flax import attention_fn
from pallas_flash.masks import BlockMask, Predicate, PrefixLM, Segments

pytestmark = pytest.mark.usefixtures("ieee_products", "small_tiles")

# ------------------------------------------------------------------------------------------------
# Arguments by name, of any sizes
# ------------------------------------------------------------------------------------------------

# Query heads share key/value heads. Axes of one letter are symbolic, or get the number of a call.
DIMS = {
    "query": "b, t, 4, 8",
    "key": "b, s, 2, 8",
    "value": "b, s, 2, 6",
    "bias": "b, 4, t, s",
    "bias of keys": "4, 1, s",
    "mask": "b, 1, t, s",
    "query_seq_lengths": "b",
    "key_value_seq_lengths": "b",
    "query_offset": "b",
    "query ids": "b, t",
    "key ids": "b, s",
    "query_positions": "b, t",
    "key_value_positions": "1, s",
    "prefix_lengths": "b",
    "table": "t",
    "sinks": "4",
    "alibi_slopes": "4",
    "scale": "",
    "dropout_key": "2",
}
INTS = {name: 12 for name in DIMS if "lengths" in name or "positions" in name}
INTS |= {"query_offset": 4, "query ids": 2, "key ids": 2}
QKV = ("query", "key", "value")
FLOATS = (*QKV, "bias", "bias of keys", "sinks", "scale")


def shape_of(name, sizes):
    dims = [x.strip() for x in DIMS[name].split(",") if x]
    return tuple(int(sizes.get(x, x)) for x in dims)


def draw(names, **sizes):
    random = np.random.default_rng(0)
    arrays = {}
    for name in (*QKV, *names):
        shape = shape_of(name, sizes)
        if name in INTS:
            x = random.integers(0, INTS[name] + 1, shape).astype(np.int32)
        elif name == "mask":
            x = random.random(shape) < 0.7
        elif name == "dropout_key":
            x = np.array([1, 2], np.uint32)
        else:
            x = random.normal(size=shape).astype(np.float32)
        arrays[name] = jnp.asarray(np.sort(x) if name.endswith("ids") else x)
    return arrays


def shapes_of(arrays, symbols):
    """Return shapes whose axes of these letters are symbolic, and others as they are."""
    scope = jax.export.SymbolicScope()

    def shape(name, x):
        dims = [d.strip() for d in DIMS[name].split(",") if d]
        named = [d if d in symbols else str(n) for d, n in zip(dims, x.shape, strict=True)]
        sizes = jax.export.symbolic_shape(",".join(named), scope=scope)
        return jax.ShapeDtypeStruct(sizes, x.dtype)

    return {name: shape(name, x) for name, x in arrays.items()}


def from_table(s, b, h, q_pos, k_pos, table):
    return s * table[q_pos] + table[0]


def every_third(b, h, q_pos, k_pos):
    return (b + h + q_pos + k_pos) % 3 > 0


def call(implementation, arrays, **options):
    """`attention` of arrays as `draw` makes them."""
    arrays = dict(arrays)
    if "bias of keys" in arrays:
        arrays["bias"] = arrays.pop("bias of keys")
    if "prefix_lengths" in arrays:
        arrays["mask"] = PrefixLM(arrays.pop("prefix_lengths"))
    if "table" in arrays:
        options |= dict(score_mod=ScoreMod(from_table, (arrays.pop("table"),)))
    if "query ids" in arrays:
        arrays["segment_ids"] = arrays.pop("query ids"), arrays.pop("key ids")
    return attention_by(implementation)(**arrays, **options, return_lse=True)


def output_and_gradients(implementation, **options):
    """Return a function of arrays; cotangents are the outputs, whose sizes are symbolic."""

    def run(arrays):
        floats = {name: x for name, x in arrays.items() if name in FLOATS}
        (o, lse), pull = jax.vjp(
            lambda floats: call(implementation, arrays | floats, **options), floats
        )
        return o, lse, *pull((jnp.sin(o), jnp.where(jnp.isinf(lse), 0, jnp.cos(lse))))

    return run


def exported(run, arrays, symbols="bts"):
    return jax.export.export(jax.jit(run))(shapes_of(arrays, symbols)).call


# ------------------------------------------------------------------------------------------------
# Served
# ------------------------------------------------------------------------------------------------

# Arguments, and what is no array.
CASES = {
    "full": ((), {}),
    "causal": ((), {"is_causal": True}),
    "causal at an offset": ((), {"is_causal": True, "query_offset": 5}),
    "window": ((), {"local_window_size": (3, 2)}),
    "window as far as integers go": (
        (),
        {"local_window_size": (2**31, 2**31), "query_offset": 2**31},
    ),
    "lengths": (("query_seq_lengths", "key_value_seq_lengths"), {"is_causal": True}),
    "offsets": (("query_offset",), {"is_causal": True}),
    "segments": (("query ids", "key ids"), {"is_causal": True}),
    "positions": (
        ("query_positions", "key_value_positions"),
        {"is_causal": True, "local_window_size": 4},
    ),
    "bias": (("bias",), {"is_causal": True}),
    "bias of keys": (("bias of keys",), {}),
    "mask": (("mask",), {"is_causal": True}),
    "prefix": (("prefix_lengths",), {}),
    "predicate": ((), {"mask": Predicate(every_third)}),
    "score function": (("table",), {}),
    "slopes": (("alibi_slopes",), {"query_offset": 2}),
    "sinks and soft cap": (("sinks",), {"logits_soft_cap": 5.0}),
    "scale": (("scale",), {}),
    "dropout": (("dropout_key",), {"dropout_rate": 0.3}),
}
# Less than a tile, whole tiles, and more of them than the first call has; the default tiles are
# larger.
SIZES = [dict(b=2, t=21, s=35), dict(b=1, t=1, s=1), dict(b=3, t=16, s=64)]
CALLS = [(name, by, "bts") for by in ("xla", "reference") for name in CASES]
CALLS += [("causal", "xla", symbols) for symbols in ("b", "t", "s", "bs")]
IN_DEFAULT = [("lengths", "xla", "bts"), ("bias", "reference", "bts")]


@pytest.mark.parametrize(("name", "implementation", "symbols"), cases.default(IN_DEFAULT, CALLS))
def test_symbolic_sizes_equal_a_call(name, implementation, symbols):
    names, options = CASES[name]
    run = exported(
        output_and_gradients(implementation, **options), draw(names, **SIZES[0]), symbols
    )
    for sizes in SIZES:
        arrays = draw(names, **SIZES[0] | {x: n for x, n in sizes.items() if x in symbols})
        want = oracle.compiled(output_and_gradients("reference", **options))(arrays)
        assert_close(oracle.compiled(run)(arrays), want)


@pytest.mark.parametrize("causal", cases.default([True], [False, True]))
def test_symbolic_sizes_as_of_jax_nn(causal):
    """Queries and keys have one length, in default tiles; auto-selection picks "xla"."""
    heads = {"query": 4, "key": 2, "value": 2}

    def export(function):
        def run(arrays):
            q, k, v = (arrays[name] for name in QKV)
            return function(q, k, v, is_causal=causal)

        b, t = jax.export.symbolic_shape("b, t")
        shapes = {name: jax.ShapeDtypeStruct((b, t, n, 8), "float32") for name, n in heads.items()}
        return jax.export.export(jax.jit(run))(shapes).call

    ours, theirs = export(attention), export(jax.nn.dot_product_attention)
    random = np.random.default_rng(0)
    for b, t in ((2, 20), (1, 300)):
        arrays = {
            name: random.normal(size=(b, t, n, 8)).astype(np.float32) for name, n in heads.items()
        }
        assert_close(ours(arrays), theirs(arrays))


def with_blocks(implementation):
    """A `BlockMask` has the blocks of the call, however they are counted."""

    def run(arrays):
        ok = jnp.ones((1, 1, -(-arrays["query"].shape[1] // 8), -(-arrays["key"].shape[1] // 8)))
        mask = BlockMask(jnp.tril(ok).astype(bool), 8, 8)
        return attention(**arrays, mask=mask, implementation=implementation)

    return run


def by_flax(_):
    """`attention_fn` takes a mask of pairs, as Flax makes it."""

    def run(arrays):
        q, k, v = (arrays[name] for name in QKV)
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        return attention_fn(q, k, v, mask=arrays["mask"])

    return run


def second_derivative(implementation):
    def loss(arrays):
        return (call(implementation, arrays, is_causal=True)[0] ** 2).sum()

    return jax.grad(lambda x: (jax.grad(loss)(x)["key"] ** 2).sum())


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (with_blocks, ()),
        (by_flax, ("mask",)),
        pytest.param(second_derivative, (), marks=pytest.mark.extended),
    ],
)
def test_symbolic_sizes_of_other_programs(make, names):
    symbolic = exported(make("xla"), draw(names, **SIZES[0]))
    for sizes in SIZES:
        arrays = draw(names, **sizes)
        assert_close(symbolic(arrays), oracle.compiled(make("reference"))(arrays))


@pytest.mark.extended
@pytest.mark.parametrize("x64", [False, True])
def test_symbolic_sizes_under_strict_switches(x64):
    names, options = CASES["lengths"]
    with strictly(x64=x64, leaks=False):
        run = output_and_gradients("xla", **options)
        symbolic = exported(run, draw(names, **SIZES[0]))
        arrays = draw(names, **SIZES[2])
        assert_close(symbolic(arrays), run(arrays))


def test_symbolic_sizes_as_on_a_gpu():
    """The tiles of "xla" there, in a program for here."""
    arrays = draw((), **SIZES[0])
    run = output_and_gradients("xla", is_causal=True)
    with described_gpu("NVIDIA H200"):
        shapes = shapes_of(arrays, "bts")
        got = jax.export.export(jax.jit(run), platforms=["cpu"])(shapes)
    want = oracle.compiled(output_and_gradients("reference", is_causal=True))(arrays)
    assert_close(got.call(arrays), want)


# ------------------------------------------------------------------------------------------------
# Other platforms
# ------------------------------------------------------------------------------------------------


def test_lowering_for_a_gpu_does_not_warn():
    with described_gpu("NVIDIA H200"), warnings.catch_warnings():
        warnings.simplefilter("error")
        run = jax.jit(differentiated(masked("triton")))
        text = run.trace(draw_all(*POSITIONS)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 4


def test_export_for_absent_gpu():
    check = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    arguments = draw_all(*POSITIONS)
    run = jax.jit(differentiated(masked("triton")))
    with described_gpu("NVIDIA H200"):
        exported = jax.export.export(run, platforms=["cuda"], disabled_checks=[check])(arguments)
    assert exported.platforms == ("cuda",)
    assert exported.mlir_module().count("@__gpu$xla.gpu.triton") == 4
    shapes = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    want = jax.eval_shape(differentiated(masked("reference")), arguments)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), want
    )


def test_one_export_for_several_platforms():
    arguments = draw_all(*MASKED)
    run = jax.jit(differentiated(masked("xla")))
    exported = jax.export.export(run, platforms=["cpu", "cuda", "tpu"])(arguments)
    called = oracle.compiled(lambda arguments: exported.call(arguments))(arguments)
    assert_close(called, oracle.compiled(differentiated(masked("reference")))(arguments))


# ------------------------------------------------------------------------------------------------
# Refused
# ------------------------------------------------------------------------------------------------


def refusal(function, arrays, symbols="bts"):
    """The one sentence in which a call is refused."""
    with pytest.raises((NotImplementedError, ValueError, TypeError)) as caught:
        jax.eval_shape(function, shapes_of(arrays, symbols))
    assert FORM.fullmatch(str(caught.value)), caught.value
    return str(caught.value)


# On an older JAX "mosaic" is refused because of that.
KERNELS = ["interpret", "triton", *["mosaic"] * NEWER]


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("symbols", ["b", "t", "s"])
def test_kernels_refuse_symbolic_sizes(implementation, symbols):
    arrays = {name: x.astype(jnp.bfloat16) for name, x in draw((), **SIZES[0]).items()}
    with described_gpu("NVIDIA H200"):
        said = refusal(lambda x: attention(**x, implementation=implementation), arrays, symbols)
        assert f"Got symbolic sizes ({symbols})" in said
        assert said.endswith('Use "xla".')
        explained = explain(**shapes_of(arrays, symbols))
    assert explained.implementation == "xla"
    assert all("symbolic" in explained.refused[x] for x in KERNELS)


def test_kernels_refuse_symbolic_operands():
    def run(arrays):
        q, k, v = (jnp.ones((1, 4, 2, 8)),) * 3
        score_mod = ScoreMod(from_table, (arrays["table"],))
        return attention(q, k, v, implementation="interpret", score_mod=score_mod)

    assert "Got symbolic sizes (t)" in refusal(run, draw(("table",), **SIZES[0]))


def test_sharded_sequence_refuses_symbolic_length():
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec(None, "x")
    for dims, fragment in (("2, 2*t, 4, 8", "known length"), ("b, 16, 4, 8", "known sizes")):
        x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(dims), "float32")
        call = functools.partial(attention, sequence_axis="x")
        with jax.sharding.use_abstract_mesh(mesh):
            inside = jax.shard_map(call, in_specs=(rows, rows, rows), out_specs=rows)
            with pytest.raises(NotImplementedError, match=fragment) as caught:
                jax.eval_shape(jax.jit(inside), x, x, x)
        assert FORM.fullmatch(str(caught.value)), caught.value


def test_functions_of_lengths_refuse_symbolic():
    def blocks(arrays):
        length = arrays["query"].shape[1]
        return BlockMask.from_mask(Segments(arrays["query ids"]), length, length).some

    assert "`q_len` must be an int" in refusal(blocks, draw(("query ids",), **SIZES[0]))
