"""The table of cases on a real GPU, in every dtype and at lengths of many tiles: `pytest -m gpu`.

Only a card can show hardware rounding (TF32, exp2), asynchronous copies and products, and that no
program writes where another does.
"""

import dataclasses
import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases, key_bias, large_scores, oracle
from support.few_queries import SERVED as FEW_QUERIES
from support.few_queries import with_few
from support.forward_mode import Call, judge_tangents, tangents_of
from support.judge import check_that_nothing_shows, judge, judge_max_logits, measured, program

import pallas_flash
from pallas_flash._backends.triton import tiles as table
from pallas_flash._jax import compat, device
from pallas_flash.tuning import ForwardTile, Tile, TileSizes

pytestmark = pytest.mark.gpu

# (dtype, matrix products): float32 as it comes, in TF32, and as IEEE has it.
NUMBERS = [
    ("bfloat16", None),
    ("float16", None),
    ("float32", None),
    ("float32", "highest"),
]


@pytest.fixture(autouse=True)
def on_a_gpu():
    assert jax.default_backend() == "gpu", "`-m gpu` needs a GPU and a JAX that sees it."


def enough_programs(monkeypatch):
    """From here on, what calls with many programs have, for which these are too small.

    It is no argument: a call of the same shapes and dtype would be traced once.
    """
    monkeypatch.setattr(table, "FEW", {})
    monkeypatch.setattr(table, "ENOUGH_KEYS", 1)


# Only where there is a GPU is the difference known: others have no kernels for Hopper.
needs_hopper = pytest.mark.skipif(
    jax.default_backend() == "gpu"
    and (not compat.has_mosaic_gpu() or device.target().capability != (9, 0)),
    reason="The kernels in Mosaic GPU need a Hopper GPU and JAX 0.11.2.",
)

# The calls that both kinds of kernels are asked for.
by_kernels = pytest.mark.parametrize(
    "implementation", ["triton", pytest.param("mosaic", marks=needs_hopper)]
)


def in_16_bits(implementation):
    """The dtype of a test of float32: the kernels for Hopper serve 16 bits."""
    return "bfloat16" if implementation == "mosaic" else "float32"


# IEEE products are unrolled into single multiplications: in the table's tiles a call takes the
# compiler 9 to 18 s of a core, in these 2 to 4. So few cases have the table's there.
UNROLLED = TileSizes(dkv=Tile(16, 32), dq=Tile(32, 16))
IN_THE_TABLES_TILES = ("full", "everything at once", "large heads")


def check(case, implementation, dtype="bfloat16", *, factor=5, head_dim=None, **extra):
    """The rule of test_accuracy, for a case at lengths of many tiles."""
    case = case.scaled(factor)
    if head_dim is not None:
        case = dataclasses.replace(case, H=head_dim, V=head_dim)
    judge(case, dtype, measured(case, dtype, implementation, **extra))


each_head_dim = pytest.mark.parametrize("head_dim", [64, 128, 256])


@cases.parametrize()
@pytest.mark.parametrize("dtype, precision", NUMBERS, ids=["bf16", "f16", "tf32", "ieee"])
def test_kernels(case, dtype, precision, kernel_case, monkeypatch):
    """The dense computation multiplies the same numbers."""
    if dtype == "float16" or precision:
        enough_programs(monkeypatch)
    tiles = None
    if precision and case.name not in IN_THE_TABLES_TILES:
        tiles = dataclasses.replace(UNROLLED, forward=Tile(32, 16))
    case = case.scaled(5)
    with jax.default_matmul_precision(precision or "default"):
        results = measured(case, dtype, "triton", config=tiles)
    judge(case, dtype, results, tf32=dtype == "float32" and precision is None)


@cases.parametrize(
    names=[
        "full",
        "causal",
        "causal, whole tiles",
        "everything at once",
        "lengths of zero",
        "all features",
    ]
)
@pytest.mark.parametrize(
    ("head_dim", "enough"),
    cases.default(
        [(40, True), (64, False), (128, True), (256, False)],
        list(itertools.product([40, 64, 128, 256], [False, True])),
    ),
)
def test_head_dims(case, head_dim, enough, kernel_case, monkeypatch):
    """Each has tiles of its own in the table, of which calls with enough programs have others.

    `-m 'gpu and extended'` runs the others of these pairs.
    """
    if enough:
        enough_programs(monkeypatch)
    check(case, "triton", factor=5 + enough, head_dim=head_dim)


@needs_hopper
@cases.parametrize(names=cases.SERVED_ON_HOPPER)
def test_kernels_for_hopper(case, kernel_case):
    check(case, "mosaic")


@needs_hopper
@cases.parametrize(names=cases.HEADS_ON_HOPPER)
@pytest.mark.parametrize(
    ("head_dim", "reproducible"),
    [(64, None), (128, None), (256, None), (64, True), (128, True)],
    ids=["64", "128", "256", "64-in-order", "128-in-order"],
)
def test_head_dims_for_hopper(case, head_dim, reproducible, kernel_case):
    check(case, "mosaic", head_dim=head_dim, reproducible=reproducible)


@needs_hopper
@cases.parametrize(names=["full", "one key/value head", "lengths of zero", "all features"])
@pytest.mark.parametrize(
    ("head_dim", "reproducible"),
    cases.default(
        chosen := [(40, True), (72, False), (80, False), (96, True), (112, False)],
        [*chosen, (80, True), (96, False), (112, True)],
    ),
)
def test_narrow_tiles_for_hopper(case, head_dim, reproducible, kernel_case):
    """Rows of operands that are no multiple of 64 numbers lie in tiles of 32 or 16 columns."""
    check(case, "mosaic", head_dim=head_dim, reproducible=reproducible)


@needs_hopper
@cases.parametrize(names=["full", "causal", "lengths", "mask", "bias", "everything at once"])
def test_four_warpgroups_for_hopper(case, kernel_case):
    check(case, "mosaic", head_dim=64, config=TileSizes(ForwardTile(4, 64)))


@needs_hopper
@cases.parametrize(
    names=["full", "causal", "lengths of zero", "documents, causal, long", "sinks", "dropout"]
)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(320, 320), (512, 512), (576, 512)])
def test_wide_heads_for_hopper(case, head_dim, value_dim, kernel_case):
    check(dataclasses.replace(case, H=head_dim, V=value_dim), "mosaic")


@needs_hopper
@pytest.mark.parametrize(("axes", "block_kv"), [("BNTS", 80), ("S", 80), ("TS", 96), ("BNTS", 128)])
def test_bits_of_masks_for_hopper(axes, block_kv, kernel_case):
    """Tiles of keys are whole words of a mask's bits, or begin within one."""
    case = dataclasses.replace(cases.BY_NAME["full"], T=700, S=900, options=cases._mask(axes))
    check(case, "mosaic", factor=1, config=TileSizes(ForwardTile(block_kv=block_kv)))


@needs_hopper
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        *itertools.product(["full", "causal"], [64, 80, 128, 256]),
        *itertools.product(["one key/value head", "large scores"], [128]),
    ],
)
def test_clusters_for_hopper(name, head_dim, kernel_case):
    """In every head and example pairs, of the last of which one program has nothing to do."""
    sizes = dict(T=1900, S=2100, H=head_dim, V=head_dim)
    case = dataclasses.replace(cases.BY_NAME[name], **sizes)
    tiles = TileSizes(ForwardTile(block_kv=64, cluster_size=2))
    check(case, "mosaic", factor=1, config=tiles)


@needs_hopper
@cases.parametrize(names=["full", "causal", "one key/value head", "everything at once", "dropout"])
@each_head_dim
def test_many_work_tiles_for_hopper(case, head_dim, kernel_case, monkeypatch):
    """Few SMs, so that each CTA has several work tiles."""
    # Not every JAX has what it imports.
    from support.mosaic_cases import on_sms

    on_sms(monkeypatch, 3)
    check(case, "mosaic", factor=6, head_dim=head_dim)


@needs_hopper
@cases.parametrize(names=cases.SERVED_ON_HOPPER)
def test_backward_in_clusters_for_hopper(case, kernel_case):
    """Where dk and dv do not fit in the registers of a CTA; tiles of 256 are tested above."""
    check(dataclasses.replace(case, H=192, V=128), "mosaic")


@needs_hopper
@cases.parametrize(names=["causal", "one key/value head", "lengths of zero", "all features"])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype"),
    [(160, 256, "bfloat16"), (64, 256, "bfloat16"), (256, 40, "float16"), (256, 256, "float16")],
)
def test_columns_of_clusters_for_hopper(case, head_dim, value_dim, dtype, kernel_case):
    """The strips of dq that each of four consumers has, and what is sent for float16."""
    check(dataclasses.replace(case, H=head_dim, V=value_dim), "mosaic", dtype)


@needs_hopper
@cases.parametrize(names=["full", "causal", "lengths of zero", "documents", "dropout"])
@each_head_dim
def test_split_queries_for_hopper(case, head_dim, kernel_case, monkeypatch):
    """As of long heads that leave cores idle."""
    splits = importlib.import_module("pallas_flash._backends.mosaic.backward_splits")
    monkeypatch.setattr(splits, "STEPS_OF_SUMMING", 0)
    monkeypatch.setattr(splits, "STEPS_OF_SUMMING_A_TILE", 0)
    check(dataclasses.replace(case, N=case.K), "mosaic", factor=7, head_dim=head_dim)


@needs_hopper
@cases.parametrize(
    names=["full", "large scores", "scores far below zero", "soft cap", "dropout", "all features"]
)
def test_float16_for_hopper(case, kernel_case):
    """Where its range or its rounding is met; what is seen does not depend on it."""
    check(case, "mosaic", "float16", head_dim=128)


@needs_hopper
@cases.parametrize(
    names=[
        "full",
        "causal, offset for each example",
        "lengths of zero",
        "documents in pairs",
        "mask with empty tiles",
        "bias",
        "sinks",
        "all features",
    ],
)
@each_head_dim
def test_decoding_for_hopper(case, head_dim, kernel_case):
    case = dataclasses.replace(with_few(case, 3, H=head_dim, V=head_dim), S=1500)
    check(case, "mosaic", factor=1)


@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_gradients_for_hopper(head_dim, kernel_case):
    """And without that within rounding of float32 sums; what is no sum has the same bits anyway."""
    case = dataclasses.replace(cases.BY_NAME["causal"].scaled(12), H=head_dim, V=head_dim)
    qkv, cotangents, options = case.problem("bfloat16")

    def runs(reproducible):
        run = program("mosaic", options, reproducible=reproducible)
        return [jax.tree.map(np.asarray, run(*qkv, *cotangents)) for _ in range(20)]

    for reproducible in (True, False):
        first, *others = runs(reproducible)
        for other in others:
            for name, a, b in zip(oracle.NAMES, first, other, strict=True):
                # Two heads share a key: of their sums either order has the same bits.
                if reproducible or name != "dq":
                    np.testing.assert_array_equal(a, b, err_msg=name)
                a, b = (x.astype(np.float32) for x in (a, b))
                alive = np.isfinite(a)
                off = np.linalg.norm(a[alive] - b[alive]) / np.linalg.norm(a[alive])
                assert off < 1e-3, name


def check_max_logits(case, by, dtype="bfloat16", *, factor=5, tiles=None, **sizes):
    """The rule of test_max_logits."""
    case = dataclasses.replace(case.scaled(factor), **sizes)
    problem = qkv, _, options = case.problem(dtype)
    options = dict(return_max_logits=True, implementation=by, config=tiles) | options
    call = functools.partial(pallas_flash.attention, **options)
    _, found = oracle.compiled(call)(*qkv)
    judge_max_logits(case, dtype, found, problem, tf32=dtype == "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@cases.parametrize()
def test_max_logits(case, dtype, kernel_case):
    check_max_logits(case, "triton", dtype)


@needs_hopper
@cases.parametrize(names=cases.SERVED_ON_HOPPER)
def test_max_logits_for_hopper(case, kernel_case):
    check_max_logits(case, "mosaic")


@by_kernels
@cases.parametrize(names=["full", "causal", "large scores", "soft cap", "all features"])
@each_head_dim
def test_max_logits_of_head_dims(case, head_dim, implementation, kernel_case):
    check_max_logits(case, implementation, factor=12, N=2, K=1, H=head_dim, V=head_dim)


@needs_hopper
@cases.parametrize(names=["full", "causal", "large scores", "soft cap", "all features"])
def test_max_logits_of_wide_heads_for_hopper(case, kernel_case):
    check_max_logits(case, "mosaic", factor=12, N=2, K=1, H=576, V=512)


@needs_hopper
@cases.parametrize(names=["full", "causal", "large scores"])
def test_max_logits_of_clusters(case, kernel_case):
    tiles = TileSizes(ForwardTile(block_kv=64, cluster_size=2))
    check_max_logits(case, "mosaic", factor=12, tiles=tiles, H=128, V=128)


@by_kernels
@cases.parametrize(names=["full", "large scores", "sinks", "all features"])
@each_head_dim
def test_max_logits_of_decoding(case, head_dim, implementation, kernel_case):
    case = with_few(case, 3, H=head_dim, V=head_dim)
    check_max_logits(case, implementation, factor=1, S=4400)


def check_tangents(case, by, dtype="bfloat16", *, moved=("query", "key", "value"), **sizes):
    """The rule of test_forward_mode; only queries, keys and values have a kernel."""
    case = dataclasses.replace(case.scaled(5), **sizes)
    call = Call.from_problem(case.problem(dtype))
    call = call.moved(moved) if moved else call
    judge_tangents(call, tangents_of(call, by)[1])


@cases.parametrize()
def test_tangents(case, kernel_case):
    check_tangents(case, "triton")


@needs_hopper
@cases.parametrize(names=["full", "lengths of zero", "everything at once", "dropout", "sinks"])
def test_tangents_for_hopper(case, kernel_case):
    check_tangents(case, "mosaic")


@cases.parametrize(names=["full", "causal", "everything at once", "large scores", "all features"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_tangents_of_head_dims(case, head_dim, kernel_case):
    check_tangents(case, "triton", H=head_dim, V=head_dim)


@cases.parametrize(names=["full", "everything at once", "all features"])
def test_tangents_in_float32(case, ieee_products, kernel_case):
    check_tangents(case, "triton", "float32")


@by_kernels
@cases.parametrize(names=["full", "everything at once", "all features"])
def test_tangents_of_all_operands(case, implementation, kernel_case):
    check_tangents(case, implementation, moved=None)


TALL = TileSizes(Tile(128, 64, 4, 2))


@cases.parametrize(
    names=[
        "full",
        "causal",
        "causal, whole tiles",
        "documents",
        "lengths of zero",
        "one key/value head",
        "everything at once",
        "dropout",
    ]
)
def test_tiles_of_calls_with_many_programs(case, kernel_case):
    check(case, "triton", head_dim=128, config=TALL)


@pytest.mark.parametrize("case", FEW_QUERIES, ids=lambda case: case.name.replace(" ", "-"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_decoding(case, dtype, kernel_case):
    """In 17 parts or fewer."""
    tiles = UNROLLED if dtype == "float32" and case.name not in IN_THE_TABLES_TILES else None
    case = dataclasses.replace(with_few(case, 5), S=4401, H=128, V=128)
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        check(case, "triton", dtype, factor=1, config=tiles)


@cases.parametrize(
    names=["full", "causal", "lengths", "everything at once", "mask with empty tiles"]
)
@each_head_dim
def test_decoding_of_many_heads(case, head_dim, kernel_case):
    """200 of four heads and two examples are more than a tile."""
    case = with_few(case, 200, B=2, N=4, K=2, H=head_dim, V=head_dim)
    check(dataclasses.replace(case, S=1999), "triton", factor=1)


@by_kernels
@cases.parametrize(names=["full", "causal", "everything at once", "all features"])
def test_twenty_runs_give_the_same_bits(case, implementation, kernel_case):
    """A race or an asynchronous product read too early would show here."""
    case = dataclasses.replace(case.scaled(12), H=64, V=64)
    qkv, cotangents, options = case.problem("bfloat16")
    operands, rest = oracle.split(options)
    run = program(implementation, rest, reproducible=True)
    first = jax.tree.map(np.asarray, run(*qkv, *cotangents, **operands))
    for _ in range(20):
        again = run(*qkv, *cotangents, **operands)
        for name, a, b in zip(oracle.names(options), first, again, strict=True):
            np.testing.assert_array_equal(a, np.asarray(b), err_msg=name)


@needs_hopper
@pytest.mark.parametrize(
    ("head_dim", "tile"), [(64, (3, 96, 1)), (64, (3, 112, 1)), (128, (3, 64, 1)), (128, (2, 128))]
)
def test_bias_copies_wait_for_readers(head_dim, tile, kernel_case):
    """Without a fence between read and report each run of the first three was another."""
    tiles = TileSizes(ForwardTile(*tile))
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(x, (2, 4096, 16, head_dim), jnp.bfloat16) for x in keys[:3])
    bias = jax.random.normal(keys[3], (1, 16, 4096, 4096), jnp.bfloat16)
    call = functools.partial(
        pallas_flash.attention, bias=bias, implementation="mosaic", config=tiles
    )
    run, first = jax.jit(call), None
    for _ in range(12):
        o = np.asarray(run(q, k, v).view(jnp.uint16))
        first = o if first is None else first
        np.testing.assert_array_equal(o, first)


@cases.parametrize(
    names=[
        "lengths",
        "causal, first queries see nothing",
        "everything at once",
        "mask with empty tiles",
        "blocks and predicate",
        "all features",
    ]
)
@by_kernels
def test_hidden_tokens_have_no_effect(case, implementation, kernel_case):
    dtype = in_16_bits(implementation)
    check_that_nothing_shows(case.scaled(4), implementation, dtype, reproducible=True)


@by_kernels
def test_nan_shows_where_visible(implementation, kernel_case):
    """Key 101 is NaN, and key 100 is its neighbour: a soft cap has one reciprocal for both."""
    q, k, v = (
        jax.random.normal(x, (1, 200, 2, 64), jnp.bfloat16) for x in map(jax.random.key, range(3))
    )
    call = functools.partial(
        pallas_flash.attention, is_causal=True, logits_soft_cap=5.0, implementation=implementation
    )
    run = jax.jit(call)
    clean, o = (np.asarray(run(q, x, v), np.float32) for x in (k, k.at[:, 101].set(jnp.nan)))
    assert np.isnan(o[:, 101:]).all()
    np.testing.assert_array_equal(o[:, :101], clean[:, :101])


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["examples", "heads"])
@pytest.mark.parametrize("dropout_rate", [0.0, 0.2])
def test_all_gpus_equal_one(spec, axes, dropout_rate):
    """And exchange nothing; up to the order of float32 sums, which few programs decide."""
    n = jax.device_count()
    shapes = [(2 * n, 700, heads * n, 64) for heads in (4, 2, 2, 4)]
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]

    @jax.jit
    def gradients(q, k, v, do):
        options = {"dropout_rate": dropout_rate, "dropout_key": jax.random.key(1)}
        call = functools.partial(pallas_flash.attention, is_causal=True, **options)
        o, pull = jax.vjp(call, q, k, v)
        return o, *pull(do)

    mesh = jax.make_mesh((n,), ("x",), axis_types=(axes,))
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
        program = gradients.lower(*sharded).compile()
        together = program(*sharded)
    text = program.as_text()
    assert "pallas_flash_dkv" in text
    assert not [name for name in ("all-gather", "all-reduce", "all-to-all") if name in text]
    for one, all_of_them in zip(gradients(*arrays), together, strict=True):
        one, all_of_them = (np.asarray(x, np.float32) for x in (one, all_of_them))
        assert np.linalg.norm(one - all_of_them) <= 1e-3 * np.linalg.norm(one)


@pytest.mark.parametrize(
    ("sizes", "together", "dtype", "precision"),
    [
        *(pytest.param((200, 200), False, *x, id=f"alone-{x[0]}-{x[1]}") for x in NUMBERS),
        pytest.param((200, 200), True, "bfloat16", None, id="together"),
        *(pytest.param((3, 600), True, *x, id=f"few-queries-{x[0]}") for x in NUMBERS[::3]),
    ],
)
def test_additive_masks(sizes, together, dtype, precision, kernel_case):
    """Every amount is added in every pattern."""
    args = large_scores.arguments(*sizes, together, tuple(large_scores.ALL), dtype)
    with jax.default_matmul_precision(precision or "default"):
        results = large_scores.results_of("triton", args)
    large_scores.check(args, results, tf32=dtype == "float32" and precision is None)


@needs_hopper
@pytest.mark.parametrize(
    ("sizes", "together"), [((200, 200), False), ((200, 200), True), ((3, 600), True)]
)
def test_additive_masks_for_hopper(sizes, together, kernel_case):
    args = large_scores.arguments(*sizes, together, tuple(large_scores.ALL), "bfloat16")
    large_scores.check(args, large_scores.results_of("mosaic", args))


@by_kernels
@pytest.mark.parametrize("scale", [30.0, 300.0, 1e4, 1e9])
def test_large_scales(scale, implementation, kernel_case):
    with jax.default_matmul_precision("highest"):
        large_scores.check_scale(implementation, scale, in_16_bits(implementation))


# (B, T, N, K, H), options, and parts that can be computed by themselves, with the queries and keys
# of a part that see there all they see in the whole.
LARGE = {
    # More than 2^31 elements of queries; the last 128 positions are beyond.
    "elements": (
        (2, 2**17 + 64, 64, 2, 128),
        dict(local_window_size=(100, 0)),
        [
            (lambda x: x[:1, :384], slice(0, 256)),
            (lambda x: x[:1, -384:], slice(128, 384)),
            (lambda x: x[1:, :384], slice(0, 256)),
            (lambda x: x[1:, -384:], slice(128, 384)),
        ],
    ),
    # More than 2^16 programs along an axis of the grid, if it were one.
    "examples": (
        (70_000, 16, 2, 1, 64),
        dict(is_causal=True),
        [(lambda x: x[np.array([0, 4463, 4464, 65535, 65536, 69_999])], slice(None))],
    ),
    "heads": (
        (1, 40, 66_000, 33_000, 64),
        dict(is_causal=True),
        [(lambda x: heads_of_keys(x, 33_000, [0, 231, 232, 32_767, 32_768, 32_999]), slice(None))],
    ),
}


def heads_of_keys(x, num_kv_heads, chosen):
    """Some key/value heads, or the query heads that share them."""
    B, T, _, H = x.shape
    return x.reshape(B, T, num_kv_heads, -1, H)[:, :, np.array(chosen)].reshape(B, T, -1, H)


@functools.partial(jax.jit, static_argnums=(0, 1))
def noise(seed, shape):
    """Numbers of unit size that differ everywhere, made in place: jax.random needs more memory."""
    x = jnp.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    for axis in range(len(shape)):
        x = x * jnp.uint32(shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    for factor in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * jnp.uint32(factor)
    return ((x >> 8).astype(jnp.float32) * (2 * 3**0.5 / 2**24) - 3**0.5).astype(jnp.bfloat16)


@by_kernels
@pytest.mark.parametrize(("sizes", "options", "parts"), LARGE.values(), ids=LARGE)
def test_sizes_beyond_16_and_32_bits(sizes, options, parts, implementation, kernel_case):
    B, T, N, K, H = sizes
    arrays = [noise(i, (B, T, heads, H)) for i, heads in enumerate((N, K, K, N))]

    def gradients(implementation):
        def run(q, k, v, do):
            call = functools.partial(pallas_flash.attention, implementation=implementation)
            o, pull = jax.vjp(functools.partial(call, **options), q, k, v)
            return o, *pull(do)

        return oracle.compiled(run)

    results, dense = gradients(implementation)(*arrays), gradients("reference")
    for part, judged in parts:
        with jax.default_matmul_precision("highest"):
            exact = dense(*(np.asarray(part(x), np.float32) for x in arrays))
        for name, x, y in zip(("o", "dq", "dk", "dv"), results, exact, strict=True):
            x, y = (np.asarray(z, np.float32)[:, judged] for z in (part(x), y))
            # About twice a rounding to bfloat16; what another position has is off by more than 1.
            assert np.linalg.norm(x - y) <= 0.01 * np.linalg.norm(y), name


def test_kernels_are_the_default():
    x = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    assert pallas_flash.explain(x, x, x).implementation == "triton"


@each_head_dim
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize(
    "name",
    ["full", "causal", "lengths of zero", "sinks", "bias of all examples", "mask of keys", "scale"],
)
@by_kernels
def test_key_bias(implementation, name, reproducible, head_dim, kernel_case):
    """dq is as accurate as dense attention's where keys have a common part."""
    case = dataclasses.replace(
        cases.BY_NAME[name].scaled(5), key_bias=key_bias.BIAS, H=head_dim, V=head_dim
    )
    qkv, cotangents, options = problem = case.problem("bfloat16")
    operands, rest = oracle.split(options)
    run = program(implementation, rest, reproducible=reproducible)
    key_bias.assert_as_dense(run(*qkv, *cotangents, **operands), problem)
