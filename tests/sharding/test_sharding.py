"""Meshes: each device computes its batch elements and heads alone, and gathers nothing.

Sequences that devices divide are in test_context_devices.py.

Eight CPUs are simulated, in a process of their own: see eight_devices.py.
"""

import dataclasses
import functools
import re
from contextlib import nullcontext

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases, eight_devices, jaxprs, oracle
from support.described_gpus import described_gpu

from pallas_flash import _mask_objects, _partition, _tangents, _xla, attention
from pallas_flash._dropout import Dropout
from pallas_flash._mask_objects import BlockMask, MaskArray, Predicate, PrefixLM
from pallas_flash._masks import Band, Lengths, Mask, PositionBand, Segments
from pallas_flash._operands import Pairs, Positions
from pallas_flash._partition import auto, shards
from pallas_flash._problem import Problem
from pallas_flash._score_mod import ScoreMod
from pallas_flash._scores import Scores
from pallas_flash.tuning import Tile, TileSizes

AXES = {"batch": 2, "heads": 4}

# Divided by the mesh are B and N only.
B, T, S, N, H, V = 4, 13, 17, 24, 8, 5

TILE_SIZES = TileSizes(forward=Tile(16, 16), dkv=Tile(16, 16), dq=Tile(16, 16))

ROWS = P("batch", None, "heads")
SPECS = {
    "query": ROWS,
    "key": ROWS,
    "value": ROWS,
    "do": ROWS,
    "scale": P(),
    "bias": P(None, "heads"),
    "query_seq_lengths": P("batch"),
    "key_value_seq_lengths": P("batch"),
    "query_offset": P("batch"),
    "segment_ids": P("batch"),
    "query_positions": P("batch"),
    "key_value_positions": P(),
}
FLOATS = ("query", "key", "value", "scale", "bias")


def make_mesh(kind: AxisType, axes=None):
    axes = axes or AXES
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def draw(num_kv_heads: int, *names: str, queries=(B, T, N, H)) -> dict:
    """Arguments by name, query, key, value and the cotangent do among them."""
    random = np.random.default_rng(0)
    shapes = {
        "query": queries,
        "key": (B, S, num_kv_heads, H),
        "value": (B, S, num_kv_heads, V),
        "do": (*queries[:3], V),
        "bias": (1, N, T, S),
    }
    ints = {
        "query_seq_lengths": [T, 0, 5, 9],
        "key_value_seq_lengths": [0, S, 9, 5],
        "query_offset": [1, 0, -3, 7],
    }
    drawn = {}
    for name in ("query", "key", "value", "do", *names):
        if name in shapes:
            drawn[name] = jnp.asarray(random.normal(size=shapes[name]), jnp.float32)
        elif name == "segment_ids":
            ids = (np.sort(random.integers(0, 3, (B, length))) for length in (T, S))
            drawn[name] = tuple(jnp.asarray(x, jnp.int32) for x in ids)
        elif name.endswith("positions"):
            shape = (B, T) if name == "query_positions" else (1, S)
            drawn[name] = jnp.asarray(random.integers(0, S, shape), jnp.int32)
        else:
            drawn[name] = (
                jnp.float32(0.4) if name == "scale" else jnp.asarray(ints[name], jnp.int32)
            )
    return drawn


def call(implementation: str, **options):
    tiles = {"tile_sizes": TILE_SIZES} if implementation == "interpret" else {}
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
    return {
        name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arguments.items()
    }


def collectives(text: str) -> list[str]:
    """The collective operations of a compiled program, with the shapes that they give."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf" = (.*?) ({names})(?:-start)?\(", text)
    return [f"{name} {re.sub(r'{[^}]*}', '', shape)}" for shape, name in found]


def compare(run, want, placed, arguments, expected: list[str] | None = None):
    """The same numbers, by a program with just these collectives."""
    compiled = oracle.compiled(run).lower(placed).compile()
    got = compiled(placed)
    assert_close(got, oracle.compiled(want)(arguments))
    if expected is not None:
        assert collectives(compiled.as_text()) == expected, compiled.as_text()
    return got


def assert_close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 3e-4 * np.linalg.norm(y)


# ------------------------------------------------------------------------------------------------
# Eight devices
# ------------------------------------------------------------------------------------------------

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


# Key/value heads, and arguments besides query, key and value.
WITHOUT_MASK = (N, ())
WITH_MASKS = [
    (12, ("query_seq_lengths", "key_value_seq_lengths", "query_offset", "segment_ids")),
    (4, ("query_positions", "key_value_positions")),
]


def check_nothing_is_gathered(kind, implementation="xla", calls=WITH_MASKS):
    mesh = make_mesh(KINDS[kind])
    for num_kv_heads, names in calls:
        arguments = draw(num_kv_heads, *names)
        placed = place({name: x for name, x in arguments.items() if name != "segment_ids"}, mesh)
        if "segment_ids" in names:
            ids = NamedSharding(mesh, P("batch"))
            placed["segment_ids"] = jax.device_put(arguments["segment_ids"], ids)
        run, want = gradients(implementation), gradients("reference")
        out, grads = compare(run, want, placed, arguments, [])
        for x in (out, *grads.values()):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, ROWS), 4)


def check_nothing_is_gathered_without_a_mask(kind):
    check_nothing_is_gathered(kind, calls=[WITHOUT_MASK])


def check_nothing_is_gathered_for_kernels(kind):
    check_nothing_is_gathered(kind, "interpret", [WITHOUT_MASK, *WITH_MASKS])


def check_shared_operands_cost_a_sum(kind):
    mesh = make_mesh(KINDS[kind])
    arguments = draw(12, "bias")
    # The sum has the 6 heads of one device.
    expected = [f"all-reduce f32[1,6,{T},{S}]"]
    run, want = gradients("xla"), gradients("reference")
    compare(run, want, place(arguments, mesh), arguments, expected)
    for implementation in ("xla", "interpret"):
        arguments = draw(12, "scale")
        run = gradients(implementation)
        compare(run, want, place(arguments, mesh), arguments, ["all-reduce f32[]"])


def check_gradient_of_a_shared_bias_is_rounded_once(kind):
    """Devices' shares cancel but for a 64th, in which the rounding of each share would show."""
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(KINDS[kind],))
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
    mesh = make_mesh(KINDS[kind])
    specs = SPECS | dict.fromkeys(("key", "value"), P("batch"))
    for implementation, num_kv_heads in calls:
        arguments = draw(num_kv_heads)
        run, want = gradients(implementation), gradients("reference")
        compare(run, want, place(arguments, mesh, specs), arguments)


def check_far_fewer_key_heads_than_devices(kind):
    """Several devices share one."""
    check_fewer_key_heads_than_devices(kind, [("xla", 2), ("xla", 1)])


def check_other_meshes(kind):
    """One axis unused, two axes for the batch, heads that do not divide, nothing divided."""
    rows = {
        "unused": P("batch", None, "heads"),
        "two": P(("batch", "more"), None, "heads"),
        "heads": P(None, None, "heads"),
        "nothing": P(),
    }
    mesh = make_mesh(KINDS[kind], {"batch": 2, "more": 2, "heads": 2})
    for name, row in rows.items():
        arguments = draw(12)
        specs = dict.fromkeys(arguments, row)
        for implementation in ("xla", "interpret"):
            # The interpreter runs without shard_map's check, which saves sums over unused axes.
            free = implementation == "xla" or kind == "auto" or name == "two"
            run, want = gradients(implementation), gradients("reference")
            placed = place(arguments, mesh, specs)
            compare(run, want, placed, arguments, [] if free else None)
    three_heads = draw(1, queries=(B, T, 3, H))
    placed = place(three_heads, mesh, dict.fromkeys(three_heads, P("batch")))

    def from_features(arguments):
        query = arguments["query"].reshape(B, T, 3 * H)
        if kind == "auto":
            query = jax.lax.with_sharding_constraint(
                query, NamedSharding(mesh, P("batch", None, "heads"))
            )
        return gradients("xla")(arguments | {"query": query.reshape(B, T, 3, H)})

    compare(from_features, gradients("reference"), placed, three_heads)


def check_vmap(kind):
    """Mapped axes lie in front of those that divide; XLA may divide them, too."""
    mesh = make_mesh(KINDS[kind])
    one = draw(12)
    many = {name: jnp.stack([x, 2 * x]) for name, x in one.items()}

    def along(in_axes, implementation):
        return jax.vmap(gradients(implementation), in_axes=(in_axes,))

    spec = P(None, *ROWS)
    for implementation in ("xla", "interpret"):
        everything = dict.fromkeys(many, 0)
        want = along(everything, "reference")
        specs = dict.fromkeys(many, spec)
        compare(along(everything, implementation), want, place(many, mesh, specs), many, [])
        some = {"query": 0, "key": None, "value": None, "do": 0}
        arguments = one | {"query": many["query"], "do": many["do"]}
        specs = {name: ROWS if some[name] is None else spec for name in some}
        run, want = along(some, implementation), along(some, "reference")
        compare(run, want, place(arguments, mesh, specs), arguments, [])
    # Nested, and a scale for each copy.
    outer, inner = {"query": 0, "key": None, "value": None, "scale": 0}, {"value": 0}
    inner = dict.fromkeys(outer) | inner
    arguments = one | {
        "query": many["query"],
        "value": many["value"],
        "scale": jnp.asarray([0.3, 0.6]),
    }
    arguments.pop("do")

    def nested(implementation):
        def run(arguments):
            def fn(arguments):
                return call(implementation, is_causal=True)(**arguments)

            mapped = jax.vmap(jax.vmap(fn, in_axes=(inner,)), in_axes=(outer,))
            return jax.grad(lambda x: (mapped(x) ** 2).sum())(arguments)

        return run

    specs = SPECS | {"query": spec, "value": spec}
    compare(nested("xla"), nested("reference"), place(arguments, mesh, specs), arguments)


def check_a_mapped_axis_is_divided(kind):
    mesh, one = make_mesh(KINDS[kind]), draw(12)
    many = {name: jnp.stack([x, 2 * x]) for name, x in one.items()}
    placed = place(many, mesh, dict.fromkeys(many, P("batch", None, None, "heads")))
    for implementation in ("xla", "interpret"):
        run, want = jax.vmap(gradients(implementation)), jax.vmap(gradients("reference"))
        # XLA gathers what it divides around a part in which other axes are manual.
        compare(run, want, placed, many, [] if kind == "auto" else None)


def check_a_shard_map_of_the_user(kind):
    """With JAX's default checks: the gradients of what devices share are summed."""
    names = "scale", "bias", "query_seq_lengths", "key_value_seq_lengths"
    mesh, arguments = make_mesh(KINDS[kind]), draw(12, *names)
    specs = {name: SPECS[name] for name in arguments if name != "do"}
    for implementation in ("xla", "interpret"):
        inside = jax.shard_map(
            lambda x, by=implementation: call(by, is_causal=True)(**x),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=ROWS,
        )

        def run(arguments, inside=inside):
            rest = {name: arguments[name] for name in specs}
            floats = {name: x for name, x in rest.items() if name in FLOATS}
            out, pull = jax.vjp(lambda floats: inside(rest | floats), floats)
            return out, *pull(arguments["do"])

        compare(run, gradients("reference"), place(arguments, mesh), arguments)


def check_indices_are_those_of_the_whole_call(kind, decode=False):
    """User's functions and dropout get the index of the batch element and of the head."""
    mesh, arguments = make_mesh(KINDS[kind]), draw(12)
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
    of_decode = dataclasses.replace(TILE_SIZES, decode=Tile(16, 16))
    calls = [("interpret", of_decode)] if decode else [("xla", None), ("interpret", TILE_SIZES)]
    for implementation, tiles in calls:
        run = gradients(implementation, tile_sizes=tiles, **options)
        want = gradients("reference", **options)
        compare(run, want, place(arguments, mesh), arguments, [])


def check_indices_of_few_queries(kind):
    check_indices_are_those_of_the_whole_call(kind, decode=True)


def check_symbolic_sizes(kind):
    """XLA divides what is exported for Auto axes; for Explicit ones JAX does not compile it."""
    mesh, arguments = make_mesh(KINDS[kind]), draw(12)
    placed, scope = place(arguments, mesh), jax.export.SymbolicScope()
    shapes = {}
    for name, x in placed.items():
        length, (*_, heads, size) = "s" if name in ("key", "value") else "t", x.shape
        sizes = jax.export.symbolic_shape(f"2*b, {length}, {heads}, {size}", scope=scope)
        shapes[name] = jax.ShapeDtypeStruct(sizes, x.dtype, sharding=x.sharding)
    run = jax.jit(gradients("xla"))
    if kind == "auto":
        exported = jax.export.export(run)(shapes)
        assert_close(jax.jit(exported.call)(placed), gradients("reference")(arguments))
    else:
        with pytest.raises(NotImplementedError, match="known sizes under Explicit mesh axes"):
            jax.export.export(run)(shapes)


def check_second_derivatives(kind):
    mesh, arguments = make_mesh(KINDS[kind]), draw(12)
    arguments.pop("do")

    def product(implementation):
        def loss(arguments):
            return (call(implementation, is_causal=True)(**arguments) ** 2).sum()

        return lambda x: (
            jax.jvp(jax.grad(loss), (x,), (x,))[1],
            jax.grad(lambda x: (jax.grad(loss)(x)["key"] ** 2).sum())(x),
        )

    compare(product("xla"), product("reference"), place(arguments, mesh), arguments)
    # In a shard_map of the user's, with JAX's checks.
    inside = jax.shard_map(
        lambda x: call("xla", is_causal=True)(**x),
        mesh=mesh,
        in_specs=({name: SPECS[name] for name in arguments},),
        out_specs=ROWS,
    )

    def manual(x):
        return jax.grad(
            lambda x: (jax.grad(lambda x: (inside(x) ** 2).sum())(x)["key"] ** 2).sum()
        )(x)

    compare(manual, lambda x: product("reference")(x)[1], place(arguments, mesh), arguments)


def check_layers_in_a_scan_with_remat(kind):
    mesh = make_mesh(KINDS[kind])
    x = draw(12)["query"]
    placed = jax.device_put(x, NamedSharding(mesh, ROWS))

    def total(implementation):
        def layer(x, factor):
            return x + factor * call(implementation, is_causal=True)(x, x, x), ()

        def run(x):
            return (jax.lax.scan(jax.checkpoint(layer), x, jnp.ones(2))[0] ** 2).sum()

        return jax.grad(run)

    compare(total("interpret"), total("reference"), placed, x, [])


def check_calls_outside_of_jit_and_programs_for_one_device(kind):
    mesh, arguments = make_mesh(KINDS[kind]), draw(12)
    with jax.set_mesh(mesh):
        got = gradients("xla")(place(arguments, mesh))
    assert_close(got, gradients("reference")(arguments))
    # On one of the devices, exported, too, although there are eight.
    run = jax.jit(gradients("interpret"))
    assert_close(run(arguments), gradients("reference")(arguments))
    assert "custom_call_target=" not in run.lower(arguments).compile().as_text()
    exported = jax.export.export(run)(arguments)
    assert "CustomSPMDPartitioning" not in exported.mlir_module()


CHECKS = {name.removeprefix("check_"): x for name, x in vars().items() if name.startswith("check_")}


def main(name, kind):
    _xla.BLOCK_Q, _xla.BLOCK_KV, _tangents.ROWS_AT_ONCE = 8, 16, 5 * B * N
    CHECKS[name](kind)


# Each takes its programs seconds to compile.
FIRST = [
    ("nothing_is_gathered", "auto"),
    ("a_shard_map_of_the_user", "auto"),
    ("a_mapped_axis_is_divided", "explicit"),
    ("shared_operands_cost_a_sum", "auto"),
    ("gradient_of_a_shared_bias_is_rounded_once", "auto"),
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
        assert "custom_partitioning" not in names
        assert not any("vmap" in name for name in names)


# Options of calls with T = 13 queries, and their launches.
FORWARDS = {
    "forward": ({}, ["pallas_flash_forward"]),
    "decode": (
        {"tile_sizes": TileSizes(decode=Tile(16, 16))},
        ["pallas_flash_decode", "pallas_flash_decode_combine"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forward", FORWARDS)
def test_kernels_lower_for_a_mesh_of_gpus(kind, forward):
    """With Auto axes they do when XLA partitions; until then one call stands for each pass."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh(
        tuple(AXES.values()), tuple(AXES), (KINDS[kind],) * 2, abstract_device=device
    )
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, SPECS[name]))
        for name, x in draw(12).items()
    }
    with jax.sharding.use_abstract_mesh(mesh):
        options, kernels = FORWARDS[forward]
        traced = jax.jit(gradients("triton", **options)).trace(shapes)
    eqns = list(jaxprs.equations(traced.jaxpr.jaxpr))
    backward = ["pallas_flash_delta", "pallas_flash_dkv", "pallas_flash_dq"]
    assert jaxprs.kernels(eqns) == [*kernels, *backward]
    if kind == "explicit":
        with jax.sharding.use_abstract_mesh(mesh):
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@__gpu$xla.gpu.triton") == len(kernels) + 3
    else:
        partitioned = [e for e in eqns if e.primitive.name == "custom_partitioning"]
        assert len(partitioned) == 2


@pytest.mark.parametrize("forward", FORWARDS)
def test_kernels_lower_under_mapped_explicit_axis(forward):
    """It is manual neither in the op nor in its gradients: `jax.vmap` has it."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh(
        tuple(AXES.values()), tuple(AXES), (AxisType.Explicit,) * 2, abstract_device=device
    )
    rows = NamedSharding(mesh, P("batch", None, None, "heads"))
    shapes = {
        name: jax.ShapeDtypeStruct((2, *x.shape), x.dtype, sharding=rows)
        for name, x in draw(12).items()
    }
    with jax.sharding.use_abstract_mesh(mesh):
        options, kernels = FORWARDS[forward]
        traced = jax.jit(jax.vmap(gradients("triton", **options))).trace(shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == len(kernels) + 3
    for x in jax.tree.leaves(traced.out_info):
        assert x.sharding.is_equivalent_to(rows, 5)


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
        (Segments(ids, ids), ["bt", "bs"]),
        (_mask_objects.Segments(ids, ids), ["bt", "bs"]),
        (MaskArray(pairs), ["bnta"]),
        (PositionBand(Positions(ids, ids[:1]), None, 0), ["bt", "1s"]),
        (PrefixLM(length, length, Positions(ids)), ["b", "b", "bt"]),
        (Predicate(max, (ids,)), ["11"]),
        (BlockMask(table, 8, 8, table, Segments(ids)), ["bn11", "bn11", "bt"]),
    ]
    qkv = jnp.zeros((B, T, N, H)), jnp.zeros((B, S, 2, H)), jnp.zeros((B, S, 2, V))
    heads = jnp.zeros(N)
    problem = Problem(
        *(*qkv, jnp.zeros(()), jnp.zeros((1, N, T, S)), heads, heads, (ids,)),
        mask=Mask(tuple(leaf for leaf, _ in leaves)),
        rest_of_scores=Scores(offset=length, positions=Positions(ids, ids)),
        dropout=Dropout(jnp.zeros(2, jnp.uint32), rate=0.5),
    )
    letters = _partition.letters(problem)
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
    assert jax.tree.leaves(_partition.letters(problem).mask) == [want]
