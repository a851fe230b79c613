"""A sequence that devices divide: every method gives what one device gives.

Eight CPUs are simulated, in a process of their own: see eight_devices.py.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases, eight_devices, meshes, oracle
from support.compare import assert_close, assert_same_bits
from support.meshes import make_mesh, put

from pallas_flash import attention
from pallas_flash._backends import xla
from pallas_flash._execution import lowered_once
from pallas_flash._execution.context import choice, gather
from pallas_flash._execution.plan import Plan
from pallas_flash._problem.masks import PositionBand
from pallas_flash.masks import balanced_order
from pallas_flash.tuning import Tile, TileSizes

KINDS = *meshes.KINDS, "manual"
MESHES = {
    "1 x 4": {"sequence": 4},
    "1 x 8": {"sequence": 8},
    "2 x 4": {"batch": 2, "sequence": 4},
    "2 x 2 x 2": {"batch": 2, "sequence": 2, "heads": 2},
}
# "1 x 4" is for the default selection alone, because a ring of eight has more steps to compile. The
# functions that are called inside a `shard_map` are written for one axis.
MESHES_OF_KINDS = [
    *itertools.product(("1 x 8", "2 x 4", "2 x 2 x 2"), ("auto", "explicit")),
    ("1 x 8", "manual"),
]
TILE_SIZES = TileSizes(forward=Tile(16, 16), dkv=Tile(16, 16), dq=Tile(16, 16))

# Shards of 12 tokens are no multiples of anything.
LENGTH = 96
CROSS = dataclasses.replace(cases.BY_NAME["causal"], name="cross", T=96, S=48)
BALANCED = "balanced"
# As "mosaic" is on GPUs, see `_lowered_once.PLATFORMS`.
LOWERED_ONCE = "xla, lowered once"
NAMES = tuple(case.name for case in cases.CASES if case.T > 1 < case.S and "long" not in case.name)


def balanced(devices: int, what: cases.Case) -> cases.Case:
    """Causal in `balanced_order`, with whatever else a case asks for but windows and offsets."""

    def options(random, case):
        order = balanced_order(LENGTH, devices)[None]
        where = dict.fromkeys(("query_positions", "key_value_positions"), order)
        asked = what.options(random, case)
        others = {x: asked[x] for x in asked if x not in ("local_window_size", "query_offset")}
        return others | where | {"is_causal": True}

    return dataclasses.replace(what, name=f"{BALANCED}, {what.name}", options=options)


def sized(name: str, devices: int = 1) -> cases.Case:
    """A named case in a size that the meshes divide."""
    if name.startswith(BALANCED):
        return balanced(devices, sized(name.removeprefix(f"{BALANCED}, ")))
    if name == CROSS.name:
        return dataclasses.replace(CROSS, N=8, K=4, H=16, V=24)
    case = cases.BY_NAME[name]
    few = case.K if case.K in (1, 2) else 4
    return dataclasses.replace(
        case, B=2 * -(-case.B // 2), T=LENGTH, S=LENGTH, N=8, K=few, H=16, V=24
    )


def rows_spec(axes):
    """Return the sharding of arrays [B, T, N, H]."""
    return P(*(name if name in axes else None for name in ("batch", "sequence", "heads")))


def call_of(kind, axes, mesh, operands, rest, **options):
    """The op and its gradients by all floats, as `oracle.differentiate` gives them."""
    call = functools.partial(attention, return_lse=True, **options)
    if kind != "manual":
        return functools.partial(oracle.differentiate, functools.partial(call, **rest))
    tree = operands | rest

    def spec(name, x):
        rank = getattr(x, "ndim", 0)
        if name in ("segment_ids", "query_positions", "key_value_positions"):
            return P(None, "sequence")
        if name in ("bias", "mask") and x is tree[name] and rank == 4 and x.shape[2] > 1:
            return P(None, None, "sequence")
        # Mask objects are those of the whole sequence.
        return P()

    arrays = {
        name: x
        for name, x in tree.items()
        if any(isinstance(y, jax.Array) for y in jax.tree.leaves(x))
    }
    static = {name: x for name, x in tree.items() if name not in arrays}
    specs = {name: jax.tree.map(functools.partial(spec, name), x) for name, x in arrays.items()}
    rows = rows_spec(axes)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, rows, rows, specs), out_specs=(rows, rows)
    )
    def inside(q, k, v, arrays):
        return call(q, k, v, sequence_axis="sequence", **arrays, **static)

    def outside(q, k, v, **operands):
        return inside(q, k, v, arrays | operands)

    return functools.partial(oracle.differentiate, outside)


def check_case(name, method, axes, kind, implementation):
    """As `check`, of a named case; the name may end in "@bfloat16"."""
    name, _, dtype = name.partition("@")
    balanced_ring = name.startswith(BALANCED) and method == "ring"
    with poisoned_positions() if balanced_ring else contextlib.nullcontext():
        check(sized(name, axes["sequence"]), dtype or "float32", method, axes, kind, implementation)


def check(case, dtype, method, axes, kind, implementation, **rule):
    """Output, LSE and gradients, by the rule of test_accuracy.py; twice the same bits."""
    from support.judge import judge

    results = computed(case.problem(dtype), method, axes, kind, implementation)
    judge(case, dtype, results, **rule)


def computed(problem, method, axes, kind, implementation):
    """The results of a problem, which two runs give bit by bit."""
    qkv, cotangents, options = problem
    mesh, rows = make_mesh(axes, kind), rows_spec(axes)
    options = jax.tree.map(lambda x: put(x, mesh, P()) if isinstance(x, jax.Array) else x, options)
    operands, rest = oracle.split(options)
    tiles = {"config": TILE_SIZES} if implementation == "interpret" else {}
    with jax.set_mesh(mesh):
        run = call_of(
            kind, axes, mesh, operands, rest,
            implementation=implementation, context_parallelism=method, **tiles,
        )  # fmt: skip
        placed = put((*qkv, *cotangents), mesh, rows)
        compiled = jax.jit(run).lower(*placed, **operands).compile()
        results, again = ([np.asarray(x) for x in compiled(*placed, **operands)] for _ in "12")
    assert_same_bits(results, again)
    return results


def check_random(first, count, mesh, kind):
    """Problems of test_properties.py, by the methods in turn; a ring where heads do not divide."""
    from support import random_problems

    axes = MESHES[mesh]
    sizes = dict(batch=axes.get("batch", 1), heads=axes.get("heads", 1))
    for number in range(first, first + count):
        case, dtype, _ = random_problems.draw(number, devices=axes["sequence"], **sizes)
        method = choice.METHODS[number % 3]
        if method == "heads" and case.N // sizes["heads"] % axes["sequence"]:
            method = "ring"
        check(case, dtype, method, axes, kind, "xla", worst=random_problems.WORST)


def check_pairs(method):
    """Every argument together with every other and with every method: the rows of this one."""
    from support import pairs_of_settings

    axes = MESHES["2 x 4"]
    settings = pairs_of_settings.SETTINGS | {"method": choice.METHODS}
    for row in pairs_of_settings.covering(settings):
        if choice.METHODS[row.pop("method")] == method:
            case, _ = pairs_of_settings.call_of(row)
            case = dataclasses.replace(case, B=2, T=48, S=48, N=4 * case.N, K=4 * case.K)
            check(
                case, pairs_of_settings.SETTINGS["dtype"][row["dtype"]], method, axes, "auto", "xla"
            )


@contextlib.contextmanager
def poisoned_positions():
    """Within it, steps that compare positions give NaN."""
    with pytest.MonkeyPatch.context() as patch:
        for pass_ in ("_forward_alone", "_backward_alone"):
            right = getattr(Plan, pass_)

            def either(plan, problem, *rows, right=right, **wanted):
                results = right(plan, problem, *rows, **wanted)
                if not any(isinstance(x, PositionBand) for x in problem.mask.leaves):
                    return results
                return jax.tree.map(lambda x: x * jnp.nan, results)

            patch.setattr(Plan, pass_, either)
        jax.clear_caches()
        yield
    jax.clear_caches()


def check_named(names, method, mesh, kind, implementation):
    if implementation == LOWERED_ONCE:
        lowered_once.PLATFORMS, implementation = {"xla": "cpu"}, "xla"
    for name in names.split(";"):
        check_case(name, method, MESHES[mesh], kind, implementation)
    if "xla" in lowered_once.PLATFORMS:
        assert lowered_once._exported.cache_info().hits


# A ring's devices have one center; by the other methods each has whole rows. Lengths leave devices
# without a visible key.
KEY_BIAS = ("lengths", "ring"), ("causal", "ring"), ("sinks", "ring"), ("sinks", "heads")


def check_key_bias(kind, mesh="1 x 8", calls=KEY_BIAS):
    """dq of keys with a common part; no dtype is promoted without being asked."""
    from support.key_bias import BIAS, assert_as_dense

    axes = MESHES[mesh]
    for name, method in calls:
        problem = dataclasses.replace(sized(name), key_bias=BIAS).problem("bfloat16")
        with jax.numpy_dtype_promotion("strict"):
            results = computed(problem, method, axes, kind, "xla")
        assert_as_dense(results, problem)


def check_key_bias_of_few(kind):
    check_key_bias(kind, "1 x 4", KEY_BIAS[:1])


def check_cancelling(kind):
    """Gradients that are nearly cancelling sums of ds, by every method."""
    case = dataclasses.replace(cases.CANCELLING[1], T=LENGTH, S=LENGTH, N=8, K=4, H=16, V=24)
    for method in choice.METHODS:
        check(case, "bfloat16", method, MESHES["1 x 4"], kind, "xla")


def collectives(text: str) -> collections.Counter:
    return collections.Counter(name for name, _ in meshes.collectives(text))


def program(mesh, axes, **options):
    """Compiled forward and backward of [2, 96, 8, 16] on 4 key/value heads."""
    rows = NamedSharding(mesh, rows_spec(axes))
    q, k = (jax.ShapeDtypeStruct((2, LENGTH, n, 16), jnp.float32, sharding=rows) for n in (8, 4))
    call = functools.partial(attention, implementation="xla", **options)

    def run(q, k, v, do):
        o, pull = jax.vjp(call, q, k, v)
        return o, *pull(do)

    return jax.jit(run).lower(q, k, k, q).compile()


def check_collectives(kind):
    """Check that a program has the collectives of its method alone; a window needs neighbours."""
    axes = MESHES["2 x 4"]
    mesh = make_mesh(axes, kind)
    three = 4 - 1

    def check(name, forward, backward, kept=None, **options):
        """Count collectives; XLA for CPUs may keep `kept` of the forward with Explicit axes."""
        text = program(mesh, axes, **options).as_text()
        counts, number = collectives(text), forward + backward
        kept = forward if kept is None else kept
        assert counts[name] in (number, number - kept if kind == "explicit" else number), options
        return text, counts.keys() - {name}

    # k and v in a message, dk and dv in another.
    assert not check("collective-permute", three, 2 * three, context_parallelism="ring")[1]
    assert check("all-gather", 2, 2, context_parallelism="gather")[1] == {"all-to-all"}
    # q, k, v and back o and LSE; q, k, v, o, LSE, do and back dq, dk, dv.
    assert not check("all-to-all", 3 + 2, 6 + 3, kept=3, context_parallelism="heads")[1]
    shard = LENGTH // 4
    window = dict(is_causal=True, local_window_size=(shard, 0), context_parallelism="ring")
    text, rest = check("collective-permute", 1, 2, **window)
    assert not rest
    for sent in re.findall(r"source_target_pairs=({{.*?}})", text):
        pairs = re.findall(r"{(\d+),(\d+)}", sent)
        assert {int(b) - int(a) for a, b in pairs} in ({1}, {-1})
        # The ring does not close: the first device sees nothing of the last one's.
        assert len(pairs) == 2 * three


def normal(*shapes):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


def compare(make, mesh, arguments, placed):
    """The program that `make` makes gives what the definition gives; return its collectives."""
    with jax.set_mesh(mesh):
        compiled = jax.jit(make("xla")).lower(*placed).compile()
        got = compiled(*placed)
    assert_close(got, jax.jit(make("reference"))(*arguments), tolerance=2e-4)
    return collectives(compiled.as_text())


def check_layers(kind):
    """As peers call it: `nnx.MultiHeadAttention`, and our own layer."""
    from flax import nnx

    from pallas_flash.flax import SelfAttention, attention_fn

    mesh, [x] = make_mesh(MESHES["2 x 4"], kind), normal((2, LENGTH, 32))
    # The gradient of a bias of keys is zero but for rounding.
    shared = dict(use_bias=False, rngs=nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(4, 32, decode=False, attention_fn=attention_fn, **shared)
    ours = SelfAttention(32, 4, is_causal=True, rope_theta=10_000.0, **shared)
    for layer in (theirs, ours):
        graph, state = nnx.split(layer)

        def loss(state, x, graph=graph):
            return (nnx.merge(graph, state)(x) ** 2).sum()

        placed = put(state, mesh, P()), put(x, mesh, P("batch", "sequence"))
        found = compare(lambda _, loss=loss: jax.value_and_grad(loss), mesh, (state, x), placed)
        assert found["collective-permute"] or found["all-to-all"] or found["all-gather"]


def check_layers_in_a_shard_map(kind):
    """Positions go on from one device to the next, and masks have columns for all keys."""
    from flax import nnx
    from support.flax_cases import rope_by_hand

    from pallas_flash.flax import SelfAttention, attention_fn

    mesh = make_mesh({"sequence": 4}, kind)
    tokens, rows = P(None, "sequence"), P("sequence", None)
    [x, mask] = normal((2, LENGTH, 32), (LENGTH, LENGTH))
    mask = mask < 0.5

    def layers(**options):
        def call(*args, **kwargs):
            # nnx passes is_causal=False, which would replace a bound one.
            kwargs |= {"is_causal": True, "rope": rope_by_hand} | options
            return attention_fn(*args, **kwargs)

        yield nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), attention_fn=call)
        own = dict(is_causal=True, rope_theta=10_000.0)
        yield SelfAttention(32, 4, **own, rngs=nnx.Rngs(0), **options)

    inside = dict(sequence_axis="sequence", context_parallelism="gather")
    for whole, shared in zip(layers(), layers(**inside), strict=True):
        state = nnx.state(whole)

        def loss(layer, state, x, mask):
            return (nnx.merge(nnx.graphdef(layer), state)(x, mask=mask) ** 2).sum()

        def make(by, whole=whole, shared=shared, loss=loss):
            fn = functools.partial(loss, whole)
            if by == "xla":
                fn = jax.shard_map(
                    lambda *x: jax.lax.psum(loss(shared, *x), "sequence"),
                    mesh=mesh, in_specs=(P(), tokens, rows), out_specs=P(),
                )  # fmt: skip
            return jax.value_and_grad(fn, argnums=(0, 1))

        found = compare(make, mesh, (state, x, mask), (state, x, mask))
        assert found["all-gather"] and not found["collective-permute"]

    shared.init_cache(x.shape)
    decode = functools.partial(shared, decode=True)
    with pytest.raises(ValueError, match="`decode` must be False where devices divide the sequ"):
        jax.shard_map(decode, mesh=mesh, in_specs=tokens, out_specs=tokens)(x)


def check_second_derivatives_and_tangents(kind):
    axes = {"sequence": 4}
    mesh, rows, ids_spec = make_mesh(axes, kind), rows_spec(axes), P(None, "sequence")
    qkv = normal((1, 16, 2, 8), (1, 16, 1, 8), (1, 16, 1, 8))
    ids = jnp.asarray(np.arange(16)[None] // 7, jnp.int32)

    def product(by):
        def call(q, k, v, ids, **options):
            return attention(q, k, v, segment_ids=ids, is_causal=True, implementation=by, **options)

        if by == "xla":
            call = functools.partial(call, context_parallelism="ring")
            if kind == "manual":
                call = jax.shard_map(
                    functools.partial(call, sequence_axis="sequence"),
                    mesh=mesh, in_specs=(rows, rows, rows, ids_spec), out_specs=rows,
                )  # fmt: skip

        def run(*arguments):
            *qkv, ids = arguments
            grad = jax.grad(lambda *qkv: (call(*qkv, ids) ** 2).sum(), argnums=(0, 1, 2))
            return jax.jvp(grad, qkv, qkv)[1], jax.jvp(lambda *qkv: call(*qkv, ids), qkv, qkv)

        return run

    compare(product, mesh, (*qkv, ids), (*put(qkv, mesh, rows), put(ids, mesh, ids_spec)))


def check_vmap(kind):
    mesh = make_mesh({"sequence": 4}, kind)
    qkv = normal(*((3, 1, 16, n, 8) for n in (4, 2, 2)))
    for method in choice.METHODS:

        def mapped(by, method=method):
            call = functools.partial(
                attention, implementation=by, context_parallelism=method, is_causal=True
            )
            return jax.vmap(jax.grad(lambda *qkv: (call(*qkv) ** 2).sum(), (0, 1, 2)))

        compare(mapped, mesh, qkv, put(qkv, mesh, P(None, None, "sequence")))


def check_heads_have_their_own_numbers(kind):
    """A score function is given the number of a head in the whole call, whoever computes it."""
    mesh, [x] = make_mesh({"sequence": 4}, kind), normal((1, 16, 4, 8))

    def make(by):
        options = dict(context_parallelism="heads", score_mod=lower_each_head)
        return lambda x: attention(x, x, x, implementation=by, **options)

    compare(make, mesh, [x], [put(x, mesh, P(None, "sequence"))])


def lower_each_head(s, b, h, q, k):
    return s - 0.3 * jnp.asarray(h * abs(q - k), s.dtype)


def check_queries_alone(kind):
    """Keys that every device has: nothing is sent but sums of their gradients."""
    mesh = make_mesh({"sequence": 4}, kind)
    q, *kv = normal((1, 16, 4, 8), (1, 10, 2, 8), (1, 10, 2, 8))

    def make(by):
        call = functools.partial(attention, implementation=by, is_causal=True)
        return jax.value_and_grad(lambda *x: (call(*x) ** 2).sum(), (0, 1, 2))

    placed = put(q, mesh, P(None, "sequence")), *put(kv, mesh, P())
    assert compare(make, mesh, (q, *kv), placed).keys() == {"all-reduce"}


BAD = {
    "a length that does not divide": (
        dict(T=18, S=18), P(None, "sequence"), P(None, "sequence"),
        r"`query` must have a length that the 4 devices of 'sequence' divide.*got T=18. Pad it to "
        "20, and hide what was added by `query_seq_lengths`",
    ),
    "one query": (
        dict(T=1, S=16), P(), P(None, "sequence"),
        r"`key` must be sharded along its sequence as `query` is, or not at all; got queries "
        r"\(T=1\) over nothing and keys \(S=16\) over 'sequence'.*gather the keys",
    ),
    "few queries": (
        dict(T=4, S=16), P(None, "sequence"), P(None, "sequence"),
        "`query` must have two tokens or more for each of the 4 devices.*got T=4. Decode with",
    ),
    "other axes": (
        dict(T=16, S=16), P(None, "sequence"), P(None, "other"),
        "`key` must be sharded along its sequence as .* over 'sequence' and keys .* over 'other'",
    ),
    "features": (
        dict(T=16, S=16), P(None, None, None, "sequence"), P(),
        "`query` must be sharded by examples, by heads or along its sequence; got its "
        "features sharded over 'sequence'",
    ),
    "heads": (
        dict(T=16, S=16, context_parallelism="heads"), P(None, "sequence"), P(None, "sequence"),
        "`context_parallelism` must be a method that serves the call; got 'heads'. Got 3 query",
    ),
}  # fmt: skip


def check_bad_input(kind):
    mesh = make_mesh({"sequence": 4, "other": 2}, kind)
    error = NotImplementedError if kind == "explicit" else Exception
    for name, (options, rows, keys, sentence) in BAD.items():
        options = dict(options)
        lengths = options.pop("T"), options.pop("S")

        def constrained(x, spec):
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        def run(q, k, rows=rows, keys=keys, options=options):
            q, k = constrained(q, rows), constrained(k, keys)
            return attention(q, k, k, implementation="xla", **options)

        q, k = (jnp.ones((2, length, 3, 8)) for length in lengths)
        if kind == "explicit":
            if name == "a length that does not divide":
                continue
            q, k = put(q, mesh, rows), put(k, mesh, keys)
            run = functools.partial(
                lambda q, k, options: attention(q, k, k, implementation="xla", **options),
                options=options,
            )
        with pytest.raises(error, match=f"(?s){sentence}"):
            jax.jit(run)(q, k)

    # An axis of one device divides nothing.
    mesh = make_mesh({"sequence": 4, "one": 1}, kind)
    [q] = normal((2, 16, 4, 8))

    def make(by):
        return lambda q: attention(q, q, q, implementation=by)

    compare(make, mesh, [q], [put(q, mesh, P(None, "sequence", None, "one"))])


CHECKS = {name.removeprefix("check_"): x for name, x in vars().items() if name.startswith("check_")}


def main(name, *arguments):
    xla.BLOCK_Q, xla.BLOCK_KV, gather.TILE = 16, 16, 8
    CHECKS[name](*arguments)


def run_on_eight_devices(*arguments, alone=False):
    eight_devices.run(__name__, "main", *arguments, alone=alone)


EVERYTHING = "all features"
# Cases by several in a process, method, mesh, kind of axes, implementation.
FIRST = [
    ("balanced, causal", "ring", "2 x 4", "auto", "xla"),
    ("window, causal;positions", "ring", "1 x 4", "manual", "xla"),
    (EVERYTHING, "ring", "2 x 2 x 2", "auto", "xla"),
    ("everything at once", "heads", "2 x 2 x 2", "explicit", "xla"),
    ("bias of keys", "gather", "1 x 4", "manual", "xla"),
]
SOME = ["causal", EVERYTHING, "everything at once", "bias of keys", CROSS.name]


def not_elsewhere(*how):
    """Return the cases of `SOME` that no other row has."""
    here = NAMES if how[1:] == ("2 x 4", "auto", "xla") else ()
    return ";".join(x for x in SOME if x not in here and (x, *how) not in FIRST)


ROUNDED = ";".join(f"{name}@bfloat16" for name in ("full", "bias of queries, in 16 bits"))
IN_ORDER = ";".join(f"balanced, {name}" for name in ("causal", "bias of keys", EVERYTHING))
# Numbers of tokens that follow from their positions, which begin anew on no device.
OF_NUMBERS = "chunked, causal;blocks of chunks;block-causal;neighborhood"
TABLE = [
    *FIRST,
    (f"balanced, {EVERYTHING}", "ring", "2 x 4", "auto", "xla"),
    (IN_ORDER, "ring", "1 x 8", "manual", "xla"),
    (OF_NUMBERS, "ring", "1 x 4", "manual", "xla"),
    (f"causal;{EVERYTHING}", "ring", "2 x 4", "auto", LOWERED_ONCE),
    (IN_ORDER, "ring", "2 x 2 x 2", "explicit", "xla"),
    ("balanced, causal", "ring", "2 x 4", "explicit", "interpret"),
    *((ROUNDED, method, "1 x 8", "auto", "xla") for method in choice.METHODS),
    *(
        (";".join(NAMES[i : i + 8]), method, "2 x 4", "auto", "xla")
        for method in choice.METHODS
        for i in range(0, len(NAMES), 8)
    ),
    *(
        (not_elsewhere(method, mesh, kind, "xla"), method, mesh, kind, "xla")
        for method in choice.METHODS
        for mesh, kind in MESHES_OF_KINDS
    ),
    *(
        (
            f"causal;{EVERYTHING}",
            method,
            "2 x 4" if kind != "manual" else "1 x 8",
            kind,
            "interpret",
        )
        for method in choice.METHODS
        for kind in KINDS
    ),
    ("causal;everything at once", "ring", "2 x 4", "explicit", "reference"),
]


@pytest.mark.parametrize(
    ("names", "method", "mesh", "kind", "implementation"), cases.default(FIRST, TABLE)
)
def test_every_method_equals_one_device(names, method, mesh, kind, implementation):
    # Which passes are exported is changed for good.
    alone = implementation == LOWERED_ONCE
    run_on_eight_devices("named", names, method, mesh, kind, implementation, alone=alone)


def test_every_method_has_every_kind_of_case():
    rows = [(name, *how) for names, *how in TABLE for name in names.split(";")]
    every = itertools.product(SOME, choice.METHODS, MESHES_OF_KINDS)
    assert {(name, method, *mesh, "xla") for name, method, mesh in every} <= {*rows}
    assert len({*rows}) == len(rows)


KINDS_OF = {
    "second_derivatives": tuple(KINDS),
    "layers_in_a_shard_map": ("manual",),
    "key_bias": ("auto", "manual"),
    "key_bias_of_few": ("auto",),
}
OTHERS = [
    (name, kind)
    for name in CHECKS
    if name not in ("named", "case", "random", "pairs")
    for kind in KINDS_OF.get(name, ("auto", "explicit"))
]
FIRST_OTHERS = [
    ("collectives", "auto"),
    ("bad_input", "auto"),
    ("key_bias_of_few", "auto"),
    ("cancelling", "auto"),
    ("heads_have_their_own_numbers", "auto"),
]


@pytest.mark.extended
@pytest.mark.parametrize(("mesh", "kind"), MESHES_OF_KINDS)
def test_random_problems(mesh, kind):
    # Number 102 has the least score of all on every key.
    first = 10 * MESHES_OF_KINDS.index((mesh, kind)) or 102
    run_on_eight_devices("random", first, 6, mesh, kind)


@pytest.mark.extended
@pytest.mark.parametrize("method", choice.METHODS)
def test_pairs_of_settings(method):
    run_on_eight_devices("pairs", method)


@pytest.mark.parametrize(("name", "kind"), cases.default(FIRST_OTHERS, OTHERS))
def test_on_eight_devices(name, kind):
    run_on_eight_devices(name, kind)


def test_method_has_no_effect_on_one_device():
    x = jnp.ones((1, 8, 1, 8))
    np.testing.assert_array_equal(
        attention(x, x, x, context_parallelism="ring"), attention(x, x, x)
    )


def test_eager_and_on_an_axis_of_one_device():
    """Types stay what they are; one device of a sequence may have one token."""
    call = functools.partial(attention, is_causal=True)
    x, rows = jnp.linspace(-1, 1, 24).reshape(1, 3, 2, 4), P(None, "sequence")
    manual, explicit = (make_mesh({"sequence": 1}, kind) for kind in ("manual", "explicit"))

    def inside(q, **options):
        mapped = jax.shard_map(
            functools.partial(call, **options), mesh=manual, in_specs=rows, out_specs=rows
        )
        return mapped(q, x, x)

    for q in (x, x[:, :1]):
        want = call(q, x, x)
        got = inside(q, sequence_axis="sequence", context_parallelism="ring")
        np.testing.assert_array_equal(got, want)
        placed = put((q, x, x), explicit, rows)
        np.testing.assert_array_equal(got := call(*placed), want)
        assert jax.typeof(got) == jax.typeof(placed[0])
    got = jax.jit(functools.partial(call, implementation="reference"))(*placed)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert jax.typeof(got) == jax.typeof(placed[0])
    with pytest.raises(ValueError, match=r"each once.*got \('sequence', 'sequence'\), and there"):
        inside(x, sequence_axis=("sequence", "sequence"))
