"""Meshes: each device computes its batch elements and heads alone, and gathers nothing.

Sequences that devices divide are in test_context_devices.py.

Eight CPUs are simulated, in a process of their own: see eight_devices.py.
"""

import functools
from contextlib import nullcontext

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases, eight_devices, jaxprs, meshes, oracle
from support.compare import assert_close
from support.described_gpus import described_gpu, described_mesh
from support.meshes import KINDS, collectives, put
from support.transform_cases import FLOATS, Sizes, draw_all

from pallas_flash import attention, merge, paged_attention
from pallas_flash._backends import xla
from pallas_flash._execution import partition, tangents
from pallas_flash._execution.partition import auto, shards
from pallas_flash._problem.dropout import Dropout
from pallas_flash._problem.mask_leaves import BlockLeaf, MaskArray, PredicateLeaf, PrefixLeaf
from pallas_flash._problem.masks import Band, Lengths, Mask, PositionBand, SegmentLeaf
from pallas_flash._problem.operands import Pairs, Positions
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.score_mod import ScoreMod
from pallas_flash._problem.scores import Scores
from pallas_flash.flax import apply_rope
from pallas_flash.masks import BlockMask, Predicate, Segments, Tree, arguments_from_cu_seqlens
from pallas_flash.paged import append
from pallas_flash.tuning import Tile, TileSizes

AXES = {"batch": 2, "heads": 4}

# Divided by the mesh are B and N only.
SIZES = Sizes(B=4, T=13, S=17, N=24, H=8, V=5)
B, T, S, N, _, H, V = SIZES

TILE_SIZES = TileSizes(forward=Tile(16, 16), dkv=Tile(16, 16), dq=Tile(16, 16))

ROWS = P("batch", None, "heads")
SPECS = {
    "query": ROWS,
    "key": ROWS,
    "value": ROWS,
    "do": ROWS,
    "scale": P(),
    "bias": P("heads"),
    "query_seq_lengths": P("batch"),
    "key_value_seq_lengths": P("batch"),
    "query_offset": P("batch"),
    "segment_ids": P("batch"),
    "query_positions": P("batch"),
    "key_value_positions": P(),
}


def draw(num_kv_heads: int, *names: str, num_heads: int = N) -> dict:
    """Arguments by name, query, key, value and the cotangent do among them."""
    return draw_all("do", *names, sizes=SIZES._replace(K=num_kv_heads, N=num_heads))


def call(implementation: str, **options):
    tiles = {"config": TILE_SIZES} if implementation == "interpret" else {}
    return functools.partial(attention, implementation=implementation, **(tiles | options))


def gradients(implementation: str, **options):
    """By all floats, and the output, of a dictionary of arguments."""

    def run(arguments):
        rest = {name: x for name, x in arguments.items() if name != "do"}
        floats = {name: x for name, x in rest.items() if name in FLOATS}

        def fn(floats):
            return call(implementation, is_causal=True, **options)(**(rest | floats))

        out, pull = jax.vjp(fn, floats)
        return out, *pull(arguments["do"])

    return run


def place(arguments, mesh, specs=SPECS):
    return {name: put(x, mesh, specs[name]) for name, x in arguments.items()}


def compare(make, implementation, arguments, placed, expected: list[str] | None = None):
    """The program that `make` makes gives what the definition gives, with these collectives."""
    compiled = oracle.compiled(make(implementation)).lower(placed).compile()
    got = compiled(placed)
    want = oracle.compiled(make("reference"))(arguments)
    assert_close(got, want, tolerance=3e-4)
    if expected is not None:
        found = [f"{name} {shape}" for name, shape in collectives(compiled.as_text())]
        assert found == expected, compiled.as_text()
    return got


# ------------------------------------------------------------------------------------------------
# Eight devices
# ------------------------------------------------------------------------------------------------


def make_mesh(kind: str, axes=AXES):
    return meshes.make_mesh(axes, kind)


# Key/value heads, and arguments besides query, key and value.
WITHOUT_MASK = (N, ())
WITH_MASKS = [
    (12, ("query_seq_lengths", "key_value_seq_lengths", "query_offset", "segment_ids")),
    (4, ("query_positions", "key_value_positions")),
]


def check_nothing_is_gathered(kind, implementation="xla", calls=WITH_MASKS):
    mesh = make_mesh(kind)
    for num_kv_heads, names in calls:
        arguments = draw(num_kv_heads, *names)
        out, grads = compare(gradients, implementation, arguments, place(arguments, mesh), [])
        for x in (out, *grads.values()):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, ROWS), 4)


check_nothing_is_gathered_without_a_mask = functools.partial(
    check_nothing_is_gathered, calls=[WITHOUT_MASK]
)
check_nothing_is_gathered_for_kernels = functools.partial(
    check_nothing_is_gathered, implementation="interpret", calls=[WITHOUT_MASK, *WITH_MASKS]
)


def check_a_mesh_that_no_argument_has(kind):
    """JAX does not know it, and the program divides arrays that come whole."""
    mesh, arguments = make_mesh(kind), draw(12)
    divide = jax.lax.with_sharding_constraint if kind == "auto" else jax.sharding.reshard

    def divided(implementation):
        run = gradients(implementation)
        return lambda whole: run({name: divide(x, SPECS[name]) for name, x in whole.items()})

    with jax.set_mesh(mesh):
        compare(divided, "xla", arguments, arguments, [])
        compare(gradients, "interpret", arguments, arguments)


def check_shared_operands_cost_a_sum(kind):
    mesh, arguments = make_mesh(kind), draw(12, "bias")
    # The sum has the 6 heads of one device.
    expected = [f"all-reduce f32[1,6,1,{S}]"]
    compare(gradients, "xla", arguments, place(arguments, mesh), expected)
    arguments = draw(12, "scale")
    compare(gradients, "interpret", arguments, place(arguments, mesh), ["all-reduce f32[]"])


def check_gradient_of_a_shared_bias_is_rounded_once(kind):
    """Devices' shares cancel but for a 64th, in which the rounding of each share would show."""
    mesh = make_mesh(kind, {"batch": 2})
    random = np.random.default_rng(0)
    q, k, do = (random.normal(size=(1, 8, 1, 8)) for _ in range(3))
    x = {"query": q, "key": k, "value": k, "do": do * np.array([1, -63 / 64]).reshape(2, 1, 1, 1)}
    x = {name: jnp.broadcast_to(jnp.asarray(y, jnp.float32), (2, 8, 1, 8)) for name, y in x.items()}
    x["bias"] = jnp.zeros((1, 1, 8, 8), jnp.bfloat16)
    specs = dict.fromkeys(x, P("batch")) | {"bias": P()}
    got, want = (
        np.asarray(jax.jit(gradients(by))(placed)[1]["bias"], np.float32)
        for by, placed in (
            ("xla", place(x, mesh, specs)),
            ("reference", x | {"bias": x["bias"].astype(jnp.float32)}),
        )
    )
    assert np.linalg.norm(got - want) < 2.0**-7 * np.linalg.norm(want)


def check_fewer_key_heads_than_devices(kind, calls=(("interpret", 6), ("xla", 3))):
    """Two or all of a device's query heads share one key/value head."""
    mesh = make_mesh(kind)
    specs = SPECS | dict.fromkeys(("key", "value"), P("batch"))
    for implementation, num_kv_heads in calls:
        arguments = draw(num_kv_heads)
        compare(gradients, implementation, arguments, place(arguments, mesh, specs))


# Several devices share one.
check_far_fewer_key_heads_than_devices = functools.partial(
    check_fewer_key_heads_than_devices, calls=[("xla", 2), ("xla", 1)]
)


def check_other_meshes(kind):
    """One axis unused, two axes for the batch, heads that do not divide, nothing divided."""
    rows = {
        "unused": P("batch", None, "heads"),
        "two": P(("batch", "more"), None, "heads"),
        "heads": P(None, None, "heads"),
        "nothing": P(),
    }
    mesh = make_mesh(kind, {"batch": 2, "more": 2, "heads": 2})
    for name, row in rows.items():
        arguments = draw(12)
        placed = place(arguments, mesh, dict.fromkeys(arguments, row))
        for implementation in ("xla", "interpret"):
            # The interpreter runs without shard_map's check, which saves sums over unused axes.
            free = implementation == "xla" or kind == "auto" or name == "two"
            compare(gradients, implementation, arguments, placed, [] if free else None)
    three_heads = draw(1, num_heads=3)
    placed = place(three_heads, mesh, dict.fromkeys(three_heads, P("batch")))

    def from_features(implementation):
        if implementation == "reference":
            return gradients(implementation)

        def run(arguments):
            query = arguments["query"].reshape(B, T, 3 * H)
            if kind == "auto":
                query = jax.lax.with_sharding_constraint(
                    query, NamedSharding(mesh, P("batch", None, "heads"))
                )
            return gradients("xla")(arguments | {"query": query.reshape(B, T, 3, H)})

        return run

    compare(from_features, "xla", three_heads, placed)


def check_vmap(kind):
    """Mapped axes lie in front of those that divide; XLA may divide them, too."""
    mesh = make_mesh(kind)
    one = draw(12)
    many = {name: jnp.stack([x, 2 * x]) for name, x in one.items()}
    everything = dict.fromkeys(many, 0)
    some = {"query": 0, "key": None, "value": None, "do": 0}
    spec = P(None, *ROWS)
    for implementation in ("xla", "interpret"):
        for in_axes in (everything, some):
            arguments = {name: one[name] if in_axes[name] is None else many[name] for name in one}
            specs = {name: ROWS if in_axes[name] is None else spec for name in one}
            compare(
                lambda by, in_axes=in_axes: jax.vmap(gradients(by), in_axes=(in_axes,)),
                implementation, arguments, place(arguments, mesh, specs), [],
            )  # fmt: skip
    # Nested, and a scale for each copy.
    outer, inner = {"query": 0, "key": None, "value": None, "scale": 0}, {"value": 0}
    inner = dict.fromkeys(outer) | inner
    arguments = {name: (one if name == "key" else many)[name] for name in ("query", "key", "value")}
    arguments["scale"] = jnp.asarray([0.3, 0.6])

    def nested(implementation):
        def run(arguments):
            def fn(arguments):
                return call(implementation, is_causal=True)(**arguments)

            mapped = jax.vmap(jax.vmap(fn, in_axes=(inner,)), in_axes=(outer,))
            return jax.grad(lambda x: (mapped(x) ** 2).sum())(arguments)

        return run

    specs = SPECS | {"query": spec, "value": spec}
    compare(nested, "xla", arguments, place(arguments, mesh, specs))


def check_a_mapped_axis_is_divided(kind):
    mesh, one = make_mesh(kind), draw(12)
    many = {name: jnp.stack([x, 2 * x]) for name, x in one.items()}
    placed = place(many, mesh, dict.fromkeys(many, P("batch", None, None, "heads")))
    for implementation in ("xla", "interpret"):
        # XLA gathers what it divides around a part in which other axes are manual.
        expected = [] if kind == "auto" else None
        compare(lambda by: jax.vmap(gradients(by)), implementation, many, placed, expected)


def inside(by, mesh, names, check_vma=True):
    """A causal call of a dictionary of arguments in a `shard_map` of the user's."""
    if by == "reference":
        return lambda x: call(by, is_causal=True)(**x)
    return jax.shard_map(
        lambda x: call(by, is_causal=True)(**x),
        mesh=mesh,
        in_specs=({name: SPECS[name] for name in names},),
        out_specs=ROWS,
        check_vma=check_vma,
    )


def gradients_inside(by, mesh, check_vma=True):
    """As `gradients`."""

    def run(arguments):
        rest = {name: x for name, x in arguments.items() if name != "do"}
        floats = {name: x for name, x in rest.items() if name in FLOATS}
        fn = inside(by, mesh, rest, check_vma)
        out, pull = jax.vjp(lambda floats: fn(rest | floats), floats)
        return out, *pull(arguments["do"])

    return run


def check_a_shard_map_of_the_user(kind, check_vma=True):
    """The gradients of what devices share are summed."""
    names = "scale", "bias", "query_seq_lengths", "key_value_seq_lengths"
    mesh, arguments = make_mesh(kind), draw(12, *names)
    for implementation in ("xla", "interpret"):
        compare(
            lambda by: gradients_inside(by, mesh, check_vma),
            implementation, arguments, place(arguments, mesh),
        )  # fmt: skip


# Without JAX's default checks.
check_an_unchecked_shard_map = functools.partial(check_a_shard_map_of_the_user, check_vma=False)


def check_indices_are_those_of_the_whole_call(kind, calls=(("xla", None),)):
    """User's functions and dropout get the index of the batch element and of the head."""
    mesh, arguments = make_mesh(kind), draw(12)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(B, N)), jnp.float32)

    def by_example_and_head(s, b, h, q, k, x):
        return s * x[b, h]

    def some_heads(b, h, q, k):
        return ((b + h + k) % 3 > 0) | (k == 0)

    options = dict(
        score_mod=ScoreMod(by_example_and_head, (x,)),
        mask=Predicate(some_heads),
        dropout_rate=0.4,
        dropout_key=jax.random.key(2),
    )
    for implementation, tiles in calls:

        def make(by, tiles=tiles):
            return gradients(by, **options, config=None if by == "reference" else tiles)

        compare(make, implementation, arguments, place(arguments, mesh), [])


check_indices_in_kernels = functools.partial(
    check_indices_are_those_of_the_whole_call,
    calls=[("interpret", TILE_SIZES), ("interpret", TileSizes(decode=Tile(16, 16)))],
)


def check_symbolic_sizes(kind):
    """XLA divides what is exported for Auto axes; for Explicit ones JAX does not compile it."""
    mesh, arguments = make_mesh(kind), draw(12)
    placed, scope = place(arguments, mesh), jax.export.SymbolicScope()
    shapes = {}
    for name, x in placed.items():
        length, (*_, heads, size) = "s" if name in ("key", "value") else "t", x.shape
        sizes = jax.export.symbolic_shape(f"2*b, {length}, {heads}, {size}", scope=scope)
        shapes[name] = jax.ShapeDtypeStruct(sizes, x.dtype, sharding=x.sharding)
    run = jax.jit(gradients("xla"))
    if kind == "auto":
        exported = jax.export.export(run)(shapes)
        want = gradients("reference")(arguments)
        assert_close(jax.jit(exported.call)(placed), want, tolerance=3e-4)
    else:
        with pytest.raises(NotImplementedError, match="known sizes under Explicit mesh axes"):
            jax.export.export(run)(shapes)


def check_second_derivatives_and_tangents(kind):
    mesh, arguments = make_mesh(kind), draw(12)
    arguments.pop("do")

    def products(fn):
        def loss(x):
            return (fn(x) ** 2).sum()

        return lambda x: (
            jax.jvp(fn, (x,), (x,)),
            jax.jvp(jax.grad(loss), (x,), (x,))[1],
            jax.grad(lambda x: (jax.grad(loss)(x)["key"] ** 2).sum())(x),
        )

    def reverse(fn):
        return lambda x: products(fn)(x)[2]

    def tangents(fn):
        return lambda x: jax.jvp(fn, (x,), (x,))

    placed = place(arguments, mesh)
    compare(lambda by: products(lambda x: call(by, is_causal=True)(**x)), "xla", arguments, placed)
    compare(lambda by: reverse(inside(by, mesh, arguments)), "xla", arguments, placed)
    # A kernel computes these on each device.
    for make in (lambda by: lambda x: call(by)(**x), lambda by: inside(by, mesh, arguments)):
        compare(lambda by, make=make: tangents(make(by)), "interpret", arguments, placed)


def check_layers_in_a_scan_with_remat(kind):
    mesh = make_mesh(kind)
    x = draw(12)["query"]

    def total(implementation):
        def layer(x, factor):
            return x + factor * call(implementation, is_causal=True)(x, x, x), ()

        def run(x):
            return (jax.lax.scan(jax.checkpoint(layer), x, jnp.ones(2))[0] ** 2).sum()

        return jax.grad(run)

    compare(total, "interpret", x, put(x, mesh, ROWS), [])


def check_calls_outside_of_jit_and_programs_for_one_device(kind):
    mesh, arguments = make_mesh(kind), draw(12)
    want = gradients("reference")(arguments)
    with jax.set_mesh(mesh):
        got = gradients("xla")(place(arguments, mesh))
    assert_close(got, want, tolerance=3e-4)
    # On one of the devices, exported, too, although there are eight.
    run = jax.jit(gradients("interpret"))
    assert_close(run(arguments), want, tolerance=3e-4)
    assert "custom_call_target=" not in run.lower(arguments).compile().as_text()
    exported = jax.export.export(run)(arguments)
    assert "CustomSPMDPartitioning" not in exported.mlir_module()


def same_colour(b, h, q, k, colours):
    return colours[b, q] == colours[b, k]


def scaled_by_head(s, b, h, q, k, factor):
    return s * factor[h]


def with_score_mod(x, factor):
    """The output, and the gradients of all queries, keys and values and of an operand."""

    def fn(x, factor):
        score_mod = ScoreMod(scaled_by_head, (factor,))
        return attention(x, x, x, score_mod=score_mod, implementation="xla")

    out, pull = jax.vjp(fn, x, factor)
    return out, *pull(2 * out)


def with_mask(make, **options):
    return lambda x, array: attention(
        x, x, x, mask=make(array), is_causal=True, implementation="xla", **options
    )


def blocks_of(make):
    return lambda array: BlockMask.from_mask(make(array), 8, 8, batch=2, block_q=4, block_kv=4)


def packed(x, ends):
    return attention(x, x, x, implementation="xla", **arguments_from_cu_seqlens(ends, ends, 8, 8))


def appended(pages, scales, new, lengths, table):
    scales = {} if scales is None else {"key_scales": scales, "value_scales": scales}
    return append(pages, pages, new, new, lengths, table, **scales)


def by_definition(query, pages, lengths, table):
    """Tokens that are new in a request lie on several devices, too."""
    return paged_attention(query, pages, pages, lengths, table, implementation="reference")


X = np.random.default_rng(0).normal(size=(2, 8, 4, 8)).astype(np.float32)
COLOURS = np.int32([[0, 1, 0, 1, 2, 2, 0, 1], [0, 0, 1, 1, 0, 0, 1, 1]])
PARENTS = np.int32([[-1, 0, 0, 1, 1, 2, 5, 5], [-1, 0, 1, 1, 2, 0, 3, 6]])
PAGES, LENGTHS, TABLE = X[[0, 1, 0, 1]], np.int32([3, 12]), np.int32([[0, 1], [2, 3]])
INT8, SCALES = PAGES.astype(np.int8), 1 + PAGES[..., 0].swapaxes(1, 2) ** 2
BATCH, TOKENS, HEAD_AXIS = P("x"), P(None, "x"), P(None, None, "x")
# Functions and their arrays, each with its sharding.
DIVIDED = {
    "operands of scores": (with_score_mod, (X, HEAD_AXIS), (X[0, 0, :, 0], BATCH)),
    "operands of a mask": (
        with_mask(blocks_of(lambda x: Predicate(same_colour, (x,)))),
        *((X, HEAD_AXIS), (COLOURS, TOKENS)),
    ),
    "blocks of an array": (
        with_mask(blocks_of(lambda x: x)),
        *((X, P()), (np.einsum("btnh,bsnh->bts", X, X)[:, None] > 0, BATCH)),
    ),
    "blocks of segments": (
        with_mask(blocks_of(Segments)),
        (X, P()),
        (COLOURS, TOKENS),
    ),
    "tree by batch": (lambda x, a: attention(x, x, x, mask=Tree(a)), (X, BATCH), (PARENTS, BATCH)),
    "tree by token": (lambda x, a: attention(x, x, x, mask=Tree(a)), (X, P()), (PARENTS, TOKENS)),
    "raw key": (
        lambda x, key: attention(x, x, x, dropout_rate=0.4, dropout_key=key),
        *((X, BATCH), (np.uint32([1, 2]), BATCH)),
    ),
    "ends of packed sequences": (packed, (X[:1], HEAD_AXIS), (np.int32([0, 3, 6, 8]), BATCH)),
    "merge": (
        lambda o, lse, o2: merge((o, lse), (o2, 2 * lse)),
        *((X, BATCH), (X[..., 0], HEAD_AXIS), (1 + X, TOKENS)),
    ),
    "rotary positions": (
        lambda x, at: apply_rope(x, at),
        *((X, HEAD_AXIS), (np.int32([range(8)] * 2), TOKENS)),
    ),
    "new tokens by request": (
        appended,
        *((PAGES, P()), (None, P()), (X[:, :2], BATCH), (LENGTHS, P()), (TABLE, P())),
    ),
    "lengths, table and pages": (
        appended,
        *((PAGES, BATCH), (None, P()), (X[:, :2], TOKENS), (LENGTHS, BATCH), (TABLE, TOKENS)),
    ),
    "quantised pages": (
        appended,
        *((INT8, BATCH), (SCALES, TOKENS), (X[:, :2], HEAD_AXIS), (LENGTHS, P()), (TABLE, BATCH)),
    ),
    "paged by definition": (
        by_definition,
        *((X[:, :2], TOKENS), (PAGES, BATCH), (LENGTHS, BATCH), (TABLE, TOKENS)),
    ),
}


def check_arrays_are_divided_anyhow(kind):
    """Each function gives what it gives on one device, and no sentence of JAX."""
    mesh = make_mesh(kind, {"x": 2})
    for name, (function, *arrays) in DIVIDED.items():
        want = jax.jit(function)(*(x for x, _ in arrays))
        with jax.set_mesh(mesh):
            placed = [None if x is None else put(x, mesh, spec) for x, spec in arrays]
            got = jax.jit(function)(*placed)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.allclose(x, y, atol=1e-5), name


CHECKS = {name.removeprefix("check_"): x for name, x in vars().items() if name.startswith("check_")}


def main(name, kind):
    xla.BLOCK_Q, xla.BLOCK_KV, tangents.ROWS_AT_ONCE = 8, 16, 5 * B * N
    CHECKS[name](kind)


# Each takes its programs seconds to compile.
FIRST = [
    ("nothing_is_gathered", "auto"),
    ("a_mesh_that_no_argument_has", "auto"),
    ("a_shard_map_of_the_user", "auto"),
    ("a_mapped_axis_is_divided", "explicit"),
    ("arrays_are_divided_anyhow", "explicit"),
    ("shared_operands_cost_a_sum", "auto"),
    ("gradient_of_a_shared_bias_is_rounded_once", "auto"),
    ("gradient_of_a_shared_bias_is_rounded_once", "explicit"),
    ("fewer_key_heads_than_devices", "explicit"),
    ("indices_are_those_of_the_whole_call", "auto"),
]


@pytest.mark.parametrize(
    ("name", "kind"), cases.default(FIRST, [(name, kind) for name in CHECKS for kind in KINDS])
)
def test_on_eight_devices(name, kind):
    eight_devices.run(__name__, "main", name, kind)


# ------------------------------------------------------------------------------------------------
# One device, and meshes of GPUs that are not here
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["xla", "interpret", "triton"])
def test_one_device_partitions_nothing(implementation):
    described = described_gpu("NVIDIA H200")
    for device in (described,) if implementation == "triton" else (described, nullcontext()):
        with device:
            eqns = jaxprs.trace(gradients(implementation), draw(12))
        names = {eqn.primitive.name for eqn in eqns}
        assert {"dot_general", "pallas_call"} & names
        assert "custom_partitioning" not in names
        assert not any("vmap" in name for name in names)


# Options of calls with T = 13 queries, and their launches.
FORWARDS = {
    "forward": ({}, ["pallas_flash_forward"]),
    "decode": (
        {"config": TileSizes(decode=Tile(16, 16))},
        ["pallas_flash_decode", "pallas_flash_decode_combine"],
    ),
}


def traced_on_gpus(kind, run, arguments, specs=SPECS):
    """The trace of a program for a mesh of GPUs, and how many kernels of Triton it lowers to."""
    mesh = described_mesh(AXES, KINDS[kind])
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, x in arguments.items()
    }

    def launches():
        with jax.sharding.use_abstract_mesh(mesh):
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return text.count("@__gpu$xla.gpu.triton")

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(run(mesh)).trace(shapes)
    return traced, launches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forward", FORWARDS)
def test_kernels_lower_for_a_mesh_of_gpus(kind, forward):
    """Kernels of Auto axes lower when XLA partitions; until then one call stands for each pass."""
    options, kernels = FORWARDS[forward]
    traced, launches = traced_on_gpus(kind, lambda _: gradients("triton", **options), draw(12))
    eqns = list(jaxprs.equations(traced.jaxpr.jaxpr))
    backward = ["pallas_flash_delta", "pallas_flash_dkv", "pallas_flash_dq"]
    assert jaxprs.kernels(eqns) == [*kernels, *backward]
    if kind == "explicit":
        assert launches() == len(kernels) + 3
    else:
        partitioned = [e for e in eqns if e.primitive.name == "custom_partitioning"]
        assert len(partitioned) == 2


def test_explicit_shares_of_16_bits_add_in_float32():
    """The shares of the gradients of a key and a value that all heads share."""
    arguments = {name: x.astype(jnp.bfloat16) for name, x in draw(1).items()}
    specs = SPECS | dict.fromkeys(("key", "value"), P("batch"))
    traced, _ = traced_on_gpus("explicit", lambda _: gradients("xla"), arguments, specs)
    sums = [e for e in jaxprs.equations(traced.jaxpr.jaxpr) if "psum" in e.primitive.name]
    assert [x.aval.dtype for e in sums for x in e.outvars] == [jnp.float32] * 2


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_lower_inside_shard_map(kind, check_vma):
    arguments = draw(12, "scale", "query_seq_lengths", "key_value_seq_lengths")
    _, launches = traced_on_gpus(
        kind, lambda mesh: gradients_inside("triton", mesh, check_vma), arguments
    )
    assert launches() == 4


@pytest.mark.parametrize("forward", FORWARDS)
def test_kernels_lower_under_mapped_explicit_axis(forward):
    """It is manual neither in the op nor in its gradients: `jax.vmap` has it."""
    options, kernels = FORWARDS[forward]
    rows = P("batch", None, None, "heads")
    arguments = {name: jnp.stack([x, x]) for name, x in draw(12).items()}
    traced, launches = traced_on_gpus(
        "explicit", lambda _: jax.vmap(gradients("triton", **options)), arguments,
        dict.fromkeys(arguments, rows),
    )  # fmt: skip
    assert launches() == len(kernels) + 3
    mesh = described_mesh(AXES, AxisType.Explicit)
    for x in jax.tree.leaves(traced.out_info):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, rows), 5)


def test_grouped_heads_under_mapped_explicit_axis():
    """By "xla", which splits lengths and heads; types ask for more than one device does."""
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Explicit,))
    q, k = jnp.ones((2, 1, 12, 4, 8)), jnp.ones((2, 1, 12, 2, 8))
    mapped = (jax.device_put(x, NamedSharding(mesh, P("batch"))) for x in (q, k, k))
    run = jax.jit(jax.vmap(jax.grad(lambda *x: attention(*x, implementation="xla").sum())))
    assert jax.typeof(run(*mapped)).sharding.spec[0] == "batch"


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "divided"),
    [
        (4, 8, 4, (True, True, True)),
        (3, 8, 4, (False, True, True)),
        (4, 6, 2, (True, False, True)),
        (4, 8, 2, (True, True, False)),
    ],
)
def test_axes_that_do_not_divide_stay_whole(batch, heads, kv_heads, divided):
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES), (AxisType.Auto,) * 2)
    q, k = (jnp.zeros((batch, T, n, H)) for n in (heads, kv_heads))
    problem = Problem(q, k, k, *(None,) * 5, Mask())
    found = shards.shards_of(mesh, {"b": ("batch",), "n": ("heads",)}, problem)
    assert (found.batch == ("batch",), found.heads == ("heads",), found.key_heads) == divided


@pytest.mark.parametrize(
    ("alike", "rule"),
    [
        (False, "m2 b t n x0, m2 b s k x1 -> m2 b t n x2"),
        (True, "m2 b t n x0, m2 b t n x1 -> m2 b t n x2"),
    ],
)
def test_partitioner_rule(alike, rule):
    """One of `jax.vmap`, too; with `alike` queries are as many as keys, and so are heads."""
    axes = ("2btnh", "2bskh"), ("2btnv",)
    assert auto._rule(*axes, one=alike, same_length=alike) == rule


def test_every_array_has_letters():
    """A new field or leaf needs a line in the tables, or sharded calls fail."""
    length, ids = jnp.zeros(B, jnp.int32), jnp.zeros((B, T), jnp.int32)
    pairs, table = Pairs(jnp.ones((B, N, T, S), bool)), jnp.ones((B, N, 2, 3), bool)
    leaves = [
        (Band(0, 0, length), ["b"]),
        (Lengths(length, length), ["b", "b"]),
        (SegmentLeaf(ids, ids), ["bt", "bs"]),
        (MaskArray(pairs), ["bnta"]),
        (PositionBand(Positions(ids, ids[:1]), None, 0), ["bt", "1s"]),
        (PrefixLeaf(length, length, Positions(ids)), ["b", "b", "bt"]),
        (PredicateLeaf(max, (ids,)), ["11"]),
        (BlockLeaf(table, 8, 8, table, Mask((SegmentLeaf(ids),))), ["bn11", "bn11", "bt"]),
    ]
    qkv = jnp.zeros((B, T, N, H)), jnp.zeros((B, S, 2, H)), jnp.zeros((B, S, 2, V))
    heads = jnp.zeros(N)
    problem = Problem(
        *(*qkv, jnp.zeros(()), jnp.zeros((1, N, T, S)), heads, heads, (ids,)),
        mask=Mask(tuple(leaf for leaf, _ in leaves)),
        rest_of_scores=Scores(offset=length, positions=Positions(ids, ids)),
        dropout=Dropout(jnp.zeros(2, jnp.uint32), rate=0.5),
    )
    letters = partition.letters(problem)
    assert [letters.query, letters.key, letters.value] == ["btnh", "bskh", "bskv"]
    assert [letters.scale, letters.bias] == ["", "1nta"]
    assert [letters.sinks, letters.slopes, letters.score_operands] == ["n", "n", ("11",)]
    assert jax.tree.leaves(letters.rest_of_scores) == ["b", "bt", "bs"]
    assert letters.dropout.seed == "1"
    assert jax.tree.leaves(letters.mask) == [axes for _, named in leaves for axes in named]


@pytest.mark.parametrize(("batch", "heads"), [(1, 2), (2, 1)])
def test_axes_of_length_one_are_shared(batch, heads):
    mask = Mask((MaskArray(Pairs(jnp.zeros((batch, heads, 3, 4), bool))),))
    want = "1nta" if batch == 1 else "b1ta"
    problem = Problem(*(jnp.zeros((2,) * 4),) * 3, *(None,) * 5, mask)
    assert jax.tree.leaves(partition.letters(problem).mask) == [want]
