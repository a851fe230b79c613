"""Users' functions: every implementation computes what it is said to serve, and no other is chosen.

Lowering is for GPUs that are described and need not exist. Values are those of plain JAX.
"""

import functools
import inspect
import itertools
import re
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases, oracle, ttir
from support.calls import FORM, NEWER
from support.described_gpus import described_gpu, described_mesh

from pallas_flash import ScoreMod, attention, explain
from pallas_flash._execution import lowerable
from pallas_flash.masks import BlockMask, Predicate

GPUS = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
IMPLEMENTATIONS = "interpret", "xla", "reference"
each_gpu = pytest.mark.parametrize("gpu", GPUS)
# The least Pallas on which "mosaic" serves anything.
on_hopper = pytest.mark.skipif(not NEWER, reason="JAX is too old for Mosaic GPU")
LARGE = [jax.ShapeDtypeStruct((2, 8192, 16, 128), jnp.bfloat16)] * 3


@pytest.fixture(autouse=True)
def nothing_remembered():
    lowerable._kept_sentence.cache_clear()


def gradients(q, k, v, **options):
    """The output of a call, and its gradients."""
    o, pull = jax.vjp(functools.partial(attention, **options), q, k, v)
    return o, pull(jnp.cos(o.astype(jnp.float32)).astype(o.dtype))


def lowered(gpu, function=gradients, qkv=LARGE, **options):
    """The explanation of a call for a GPU that is not here, and the program that it lowers to."""
    with described_gpu(gpu), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "pallas_flash.attention falls back")
        call = functools.partial(function, **options)
        text = jax.jit(call).trace(*qkv).lower(lowering_platforms=("cuda",)).as_text()
        return explain(*qkv, **options), text


def passes(gpu, **options):
    """Return the implementations of both passes, by the program, which `explain` must say, too."""
    explanation, text = lowered(gpu, **options)
    forward = explanation.implementation
    backward = re.search(r'"(\w+)" computes the backward', explanation.reason)
    by = forward, backward[1] if backward else forward
    has = {"mosaic": "@mosaic_gpu" in text, "triton": "@__gpu$xla.gpu.triton" in text}
    assert has == {name: name in by for name in has}, (by, has)
    return by


# ------------------------------------------------------------------------------------------------
# The implementation that is chosen.

SCORES = {
    "tanh": (lambda s, *at: s * jnp.tanh(s), "mosaic", "mosaic", "triton", "triton"),
    "soft_sign": (lambda s, *at: jax.nn.soft_sign(s), "mosaic", "triton", "triton", "triton"),
    "mod": (lambda s, *at: jnp.mod(s, 3.0), "triton", "triton", "triton", "triton"),
    "zeros_like": (lambda s, *at: jnp.zeros_like(s), "mosaic", "mosaic", "triton", "triton"),
    "one number": (lambda s, *at: 1.0, "mosaic", "mosaic", "triton", "triton"),
    "of the head": (
        lambda s, b, h, i, j: jnp.broadcast_to(h.astype(s.dtype), s.shape),
        "mosaic",
        "mosaic",
        "triton",
        "triton",
    ),
    "round": (lambda s, *at: s + jnp.round(s), "mosaic", "mosaic", "xla", "xla"),
    "select": (lambda s, *at: jnp.select([s < 0, s < 1], [2 * s, 3 * s], s), *["xla"] * 4),
    "cube root": (lambda s, *at: jnp.cbrt(s), "triton", "triton", "triton", "triton"),
}
PREDICATES = {
    "bands": (lambda b, h, i, j: i - j < h + 3, "mosaic", "triton"),
    "round": (lambda b, h, i, j: jnp.round(i / 7) == jnp.round(j / 7), "mosaic", "xla"),
    "select": (lambda b, h, i, j: jnp.select([h == 0, h == 1], [i >= j, i - j < 4], i <= j),
               "xla", "xla"),
    "one bool": (lambda b, h, i, j: True, "mosaic", "triton"),
}  # fmt: skip


# Values below that are no scores are lowered by `test_calls_lower_on_hopper`, too.
CHOSEN = ["tanh", "soft_sign", "mod", "round", "select"]


@on_hopper
@pytest.mark.parametrize("name", cases.default(CHOSEN, SCORES))
def test_score_mod_chooses_implementation(name):
    score_mod, *by = SCORES[name]
    assert [x for gpu in GPUS for x in passes(gpu, score_mod=score_mod)] == by


@on_hopper
@pytest.mark.parametrize("name", cases.default(["bands", "round", "select"], PREDICATES))
def test_predicate_chooses_implementation(name):
    fn, *by = PREDICATES[name]
    assert [passes(gpu, mask=Predicate(fn))[0] for gpu in GPUS] == by


@pytest.mark.parametrize(("in_blocks", "q_len"), [(False, 64), (True, 64), (False, 2)])
def test_mosaic_and_triton_refuse_in_one_sentence(in_blocks, q_len):
    mask = Predicate(lambda b, h, i, j: jnp.select([h == 0, h == 1], [i >= j, i - j < 4], i <= j))
    if in_blocks:
        mask = BlockMask.from_mask(mask, 64, 64, num_heads=2)
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 64), jnp.bfloat16) for n in (q_len, 64))
    with described_gpu("NVIDIA H200"):
        choice = explain(q, k, k, mask=mask)
        assert choice.implementation == "xla"
        for name in ("mosaic", "triton")[not NEWER :]:
            with pytest.raises(NotImplementedError, match="Pallas cannot lower `") as error:
                explain(q, k, k, mask=mask, implementation=name)
            assert choice.refused[name] in str(error.value)
            assert FORM.fullmatch(str(error.value))


def test_backward_alone_leaves_triton():

    @jax.custom_jvp
    def doubled(s):
        return 2 * s

    doubled.defjvp(lambda s, ds: (2 * s[0], ds[0] * (2 + 0 * lax.erf(s[0]))))
    assert passes("NVIDIA A100", score_mod=lambda s, *at: doubled(s)) == ("triton", "xla")
    reason = explain_of("NVIDIA A100", lambda s, *at: doubled(s)).reason
    assert "Pallas cannot lower `erf` in the derivative of `score_mod` to Triton." in reason


def explain_of(gpu, score_mod, **options):
    with described_gpu(gpu):
        return explain(*LARGE, score_mod=score_mod, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_derivative_is_one_sentence(implementation):
    x = jnp.ones((1, 16, 1, 8))

    @jax.custom_jvp
    def without(s):
        return s

    @without.defjvp
    def _(primals, tangents):
        raise NotImplementedError("there is none")

    options = dict(score_mod=lambda s, *at: without(s), implementation=implementation)
    assert attention(x, x, x, **options).shape == x.shape
    with pytest.raises(NotImplementedError, match="in the score where gradients are") as error:
        gradients(x, x, x, **options)
    assert FORM.fullmatch(str(error.value))


# ------------------------------------------------------------------------------------------------
# How it is found.


@pytest.fixture
def lowerings(monkeypatch):
    """The functions that are lowered alone, as they come."""
    found, lower = [], lowerable._lower

    def spied(function, implementation, device):
        found.append((function.role, implementation))
        lower(function, implementation, device)

    monkeypatch.setattr(lowerable, "_lower", spied)
    return found


def test_each_function_is_lowered_once(lowerings):
    def score_mod(s, b, h, i, j):
        return s - 0.5 * (i - j)

    mask = Predicate(lambda b, h, i, j: i >= j)
    for _ in range(2):
        passes("NVIDIA H200", score_mod=score_mod, mask=mask)
    roles, by = ("score_mod", "derivative", "Predicate"), ("mosaic", "triton")[not NEWER :]
    assert sorted(lowerings) == sorted((role, name) for role in roles for name in by)


@pytest.mark.parametrize("error", [OSError("once"), MemoryError("once"), KeyboardInterrupt("once")])
def test_passing_failure_is_not_remembered(error):
    failures = [error]

    def score_mod(s, *at):
        # Probes run in a thread of their own.
        if failures and threading.current_thread() is not threading.main_thread():
            raise failures.pop()
        return 2 * s

    if isinstance(error, Exception):
        refused = explain_of("NVIDIA A100", score_mod).refused["triton"]
        assert f"({type(error).__name__}: once)" in refused
    else:
        with pytest.raises(KeyboardInterrupt):
            explain_of("NVIDIA A100", score_mod)
    assert explain_of("NVIDIA A100", score_mod).implementation == "triton"


def test_calls_without_functions_lower_nothing(lowerings):
    for gpu in GPUS:
        passes(gpu, is_causal=True, logits_soft_cap=3.0, alibi_slopes=jnp.ones(16))
    assert not lowerings


def test_cpu_lowers_nothing(lowerings):
    x = jnp.ones((1, 16, 1, 8))
    gradients(x, x, x, score_mod=lambda s, *at: s * 2, mask=Predicate(lambda *at: at[2] > at[3]))
    assert not lowerings


def scaled_by_head(s, b, h, i, j, table):
    return s * table[h] + (i - j)


TRANSFORMS = {
    "grad": lambda call: call,
    "checkpoint": jax.checkpoint,
    "vmap": lambda call: jax.vmap(call, in_axes=(1, 1, 1, None), out_axes=1),
    "vmap, named": lambda call: jax.vmap(call, (1, 1, 1, None), 1, axis_name="warpgroup"),
}


@pytest.mark.parametrize(
    ("name", "implementation"),
    cases.default(
        [("checkpoint", None), ("vmap, named", "triton")],
        list(itertools.product(TRANSFORMS, [None, "triton"])),
    ),
)
def test_probe_runs_within_transformations(name, implementation):
    """Under a search for leaks, which the kernels of "mosaic" do not pass."""

    def call(q, k, v, table):
        options = dict(score_mod=ScoreMod(scaled_by_head, (table,)))
        return gradients(q, k, v, **options, implementation=implementation)

    x = jax.ShapeDtypeStruct((2, 2, 512, 4, 64)[name[0] != "v" :], jnp.bfloat16)
    arrays = x, x, x, jax.ShapeDtypeStruct((4,), jnp.float32)
    with described_gpu("NVIDIA A100"), jax.checking_leaks():
        traced = jax.jit(TRANSFORMS[name](call)).trace(*arrays)
        assert "@__gpu$xla.gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, None])
def test_probe_runs_on_meshes_and_in_shard_map(kind):
    """A function is lowered where its operands are shards, and with another origin."""
    mesh = described_mesh({"batch": 2, "heads": 2}, kind or AxisType.Auto)
    spec = P("batch", None, "heads")

    def call(q, k, v, table):
        return gradients(q, k, v, score_mod=ScoreMod(scaled_by_head, (table,)))

    if kind is None:
        specs = dict(in_specs=(spec, spec, spec, P("heads")), out_specs=(spec, (spec,) * 3))
        call = jax.shard_map(call, mesh=mesh, check_vma=False, **specs)
    x = jax.ShapeDtypeStruct((4, 512, 4, 64), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    table = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, P(None)))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(call).trace(x, x, x, table)
        # XLA lowers while it compiles where work is left to the partitioner.
        if kind is AxisType.Auto:
            assert "custom_partitioning" in str(traced.jaxpr)
        else:
            assert "@__gpu$xla.gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


@on_hopper
def test_functions_in_decoding_lower_on_hopper():
    """In decoding the head is a tile. Operands have each dtype and number of axes."""

    def score_mod(s, b, h, i, j, scalar, table, narrow, flags):
        s = jnp.where(flags[b, j % 7], s * scalar, s)
        return s + table[h, (i - j) % 5] + narrow[j // 3].astype(s.dtype)

    operands = (
        jax.ShapeDtypeStruct((), jnp.float32),
        jax.ShapeDtypeStruct((16, 5), jnp.bfloat16),
        jax.ShapeDtypeStruct((700,), jnp.int8),
        jax.ShapeDtypeStruct((2, 7), jnp.bool_),
    )
    q, k = (jax.ShapeDtypeStruct((2, n, h, 128), jnp.bfloat16) for n, h in ((1, 16), (8192, 2)))

    def call(q, k, *operands):
        options = dict(score_mod=ScoreMod(score_mod, operands), implementation="mosaic")
        return attention(q, k, k, **options)

    with described_gpu("NVIDIA H200"):
        traced = jax.jit(call).trace(q, k, *operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") >= 1


# ------------------------------------------------------------------------------------------------
# Values.

WITHOUT_SCORE = {
    "distance": lambda s, b, h, i, j: (i - j).astype(s.dtype) / 8,
    "of keys": lambda s, b, h, i, j: j.astype(s.dtype) / 8,
    "of heads": lambda s, b, h, i, j: h.astype(s.dtype),
    "float": lambda s, *at: 0.5,
    "int": lambda s, *at: 2,
    "zeros": lambda s, *at: jnp.zeros_like(s),
    "numbers chosen": lambda s, b, h, i, j: jnp.where(i >= j, 0.0, -1.0),
}
HALF = jnp.float32(0.5)
SCALARS = {
    "t": (lambda s, b, h, i, j, t: s * t, (HALF,)),
    "t[()]": (lambda s, b, h, i, j, t: s * t[()], (HALF,)),
    "int": (lambda s, b, h, i, j, t: s * (1 + (i - j > t)), (jnp.int32(3),)),
    "bool": (lambda s, b, h, i, j, t: jnp.where(t, s, 2 * s), (jnp.asarray(True),)),
    "beside a table": (lambda s, b, h, i, j, x, t: s * t + x[h], (jnp.arange(4.0), HALF)),
}
SCALAR_MASKS = {
    "t": (lambda b, h, i, j, t: i - j <= t, (jnp.int32(3),)),
    "t[()]": (lambda b, h, i, j, t: i - j <= t[()], (jnp.int32(3),)),
    "bool": (lambda b, h, i, j, t: (i >= j) | t, (jnp.asarray(False),)),
}
CALLS = {f"score {name}": dict(score_mod=fn) for name, fn in WITHOUT_SCORE.items()}
CALLS |= {
    f"operand {name}": dict(score_mod=ScoreMod(fn, operands))
    for name, (fn, operands) in SCALARS.items()
}
CALLS |= {f"mask {name}": dict(mask=Predicate(*x)) for name, x in SCALAR_MASKS.items()}
SHAPE = 2, 20, 4, 8
QKV = [np.random.default_rng(n).normal(size=SHAPE).astype(np.float32) for n in range(3)]


def dense(q, k, v, score_mod=None, mask=None):
    """Attention in plain JAX, of all axes at once."""
    at = [jnp.arange(n).reshape([-1 if a == i else 1 for a in range(4)])
          for i, n in enumerate((SHAPE[0], SHAPE[2], SHAPE[1], SHAPE[1]))]  # fmt: skip
    s = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / SHAPE[3] ** 0.5
    if score_mod is not None:
        fn, operands = oracle.parts_of(score_mod)
        s = jnp.broadcast_to(jnp.asarray(fn(s, *at, *operands), s.dtype), s.shape)
    if mask is not None:
        s = jnp.where(mask.fn(*at, *mask.operands), s, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v, precision="highest")


@functools.cache
def right(name):
    o, pull = jax.vjp(functools.partial(dense, **CALLS[name]), *QKV)
    return o, pull(jnp.cos(o))


def judge(name, results):
    for got, want in zip(jax.tree.leaves(results), jax.tree.leaves(right(name)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)


# One of each kind of result and of operand; each takes a second to compile or to lower.
KINDS = [
    "score of heads",
    "score int",
    "score zeros",
    "operand t[()]",
    "operand bool",
    "operand beside a table",
    "mask bool",
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", cases.default(KINDS, CALLS))
def test_values_equal_plain_jax(name, implementation, small_tiles):
    judge(name, gradients(*QKV, **CALLS[name], implementation=implementation))


def test_score_mod_is_a_pytree_of_its_operands():
    fn, operands = SCALARS["beside a table"]
    score_mod = ScoreMod(fn, operands)
    programs = []

    @jax.jit
    def call(score_mod):
        programs.append(score_mod.fn)
        return gradients(*QKV, score_mod=score_mod, implementation="xla")

    judge("operand beside a table", call(score_mod))
    doubled = jax.tree.map(lambda x: 2 * x, score_mod)
    assert doubled.fn is fn
    assert not np.allclose(call(doubled)[0], call(score_mod)[0])
    assert programs == [fn]


def test_score_mod_without_operands():
    fn = WITHOUT_SCORE["distance"]
    static = jax.jit(
        functools.partial(attention, implementation="xla"), static_argnames="score_mod"
    )
    results = [static(*QKV, score_mod=x) for x in (fn, ScoreMod(fn), ScoreMod(fn, ()))]
    np.testing.assert_array_equal(*results[:2])
    np.testing.assert_array_equal(*results[1:])
    assert hash(ScoreMod(fn)) == hash(ScoreMod(fn, ()))


@pytest.mark.parametrize("name", CALLS)
def test_triton_values_equal_plain_jax(name, kernel_case):
    call = functools.partial(gradients, **CALLS[name], implementation="triton")
    judge(name, ttir.evaluate(call, *map(jnp.asarray, QKV)))


@on_hopper
@pytest.mark.parametrize("name", cases.default(KINDS, CALLS))
def test_calls_lower_on_hopper(name):
    assert passes("NVIDIA H200", **CALLS[name]) == ("mosaic", "mosaic")


# ------------------------------------------------------------------------------------------------
# Every elementwise operation.

MODULES = {"jnp": jnp, "lax": lax, "nn": jax.nn}


def arguments(kind, arity, s, i, j):
    """Return `arity` numbers of a kind, from a score and indices, of one shape as `lax` asks."""
    shapes = i.shape, j.shape, () if s is None else s.shape
    i, j = (jnp.broadcast_to(x, jnp.broadcast_shapes(*shapes)) for x in (i, j))
    if kind == "int":
        return (i, j + 1, i + j)[:arity]
    return (s, (i - j).astype(s.dtype) / 8, j.astype(s.dtype))[:arity]


def is_elementwise(function, kind, arity) -> bool:
    """Whether it takes such arguments and gives each element what it gives that one alone."""
    s, i = np.float32(np.random.default_rng(0).normal(size=(3, 4))), np.arange(12).reshape(3, 4)
    xs = arguments(kind, arity, jnp.asarray(s), jnp.int32(i % 7), jnp.int32(i % 5))

    def shape(xs):
        out = jax.eval_shape(function, *xs)
        return getattr(out, "shape", None), getattr(getattr(out, "dtype", None), "kind", None)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Some functions drop axes, or do not take as many.
            many, _ = shape([x[None, None, None] for x in xs])
            (whole, of_whole), (one, of_one) = shape(xs), shape([x[0, 0] for x in xs])
            if (
                (many, whole, one) != ((1, 1, 1, *s.shape), s.shape, ())
                or of_whole != of_one
                or of_whole not in "fiub"
            ):
                return False
            each = jax.vmap(jax.vmap(function))(*xs)
            return bool(jnp.array_equal(function(*xs), each, equal_nan=of_whole == "f"))
    except Exception:  # Operations refuse arguments in ways of their own.
        return False


def operations(module):
    """Yield the name, the kind and the number of arguments, and the function of each operation."""
    for name, function in sorted(vars(MODULES[module]).items()):
        # Functions of NumPy do not take traced arrays.
        home = str(getattr(function, "__module__", None) or type(function).__module__)
        if name.startswith("_") or not callable(function) or inspect.isclass(function):
            continue
        for kind in ("float", "int") if home.startswith("jax") else ():
            for arity in (1, 2, 3):
                if is_elementwise(function, kind, arity):
                    yield f"{name} of {arity} {kind}s", kind, arity, function


def as_options(kind, arity, function):
    """A call whose function has this operation: of floats a score's, of ints a mask's."""
    if kind == "int":
        return dict(
            mask=Predicate(
                lambda b, h, i, j: function(*arguments(kind, arity, None, i, j)) > jnp.int32(0)
            )
        )
    return dict(
        score_mod=lambda s, b, h, i, j: function(*arguments(kind, arity, s, i, j)).astype(s.dtype)
    )


def errors_but_ours(run):
    """Return what `run()` raises, unless it is the sentence on a missing derivative."""
    try:
        run()
    except Exception as error:  # Pallas and JAX may raise anything.
        if "must have a derivative" not in str(error) or not FORM.fullmatch(str(error)):
            return f"{type(error).__name__}: {error}"[:400]
    return None


@pytest.mark.extended
@each_gpu
@pytest.mark.parametrize("module", MODULES)
def test_every_operation_lowers_as_explained(module, gpu):
    found, count = {}, 0
    for name, *operation in operations(module):
        options, count = as_options(*operation), count + 1
        if error := errors_but_ours(lambda options=options: passes(gpu, **options)):
            found[name] = error
    assert not found
    assert count > 30


@pytest.mark.extended
@pytest.mark.parametrize("module", MODULES)
def test_every_operation_is_served_everywhere(module):
    found = {}
    for name, *operation in operations(module):
        options = as_options(*operation)

        def run(options=options):
            right = dense(*QKV, **options)
            for implementation in IMPLEMENTATIONS:
                by = dict(implementation=implementation)
                output = attention(*QKV, **options, **by)
                # Where a score is NaN, implementations differ; large ones lose places.
                if np.isfinite(right).all():
                    np.testing.assert_allclose(output, right, rtol=0, atol=1e-3)
                # JAX differentiates the reference, and may say what it cannot.
                if implementation != "reference":
                    jax.eval_shape(functools.partial(gradients, **options, **by), *QKV)

        if error := errors_but_ours(run):
            found[name] = error
    assert not found


# One operation of each module and kind that kernels have, and one that they lack.
QUICK = (
    ("jnp", "round", "float", 1),
    ("jnp", "floor_divide", "int", 2),
    ("jnp", "float_power", "float", 2),
    ("lax", "erf", "float", 1),
    ("lax", "rem", "float", 2),
    ("lax", "clz", "int", 1),
    ("lax", "clamp", "float", 3),
    ("lax", "nextafter", "float", 2),
    ("nn", "relu6", "float", 1),
)


@each_gpu
@pytest.mark.parametrize(("module", "name", "kind", "arity"), QUICK)
def test_an_operation_lowers_as_explained(module, name, kind, arity, gpu):
    function = getattr(MODULES[module], name)
    assert is_elementwise(function, kind, arity)
    options = as_options(kind, arity, function)
    assert errors_but_ours(lambda: passes(gpu, **options)) is None
