"""The kernels for Hopper on a CPU: their Python, emulated.

The emulator runs copies and products as late as it may, so that a wait too few shows: see
test_mosaic_emulator.py.
"""

import dataclasses
import heapq
import importlib
import inspect
import itertools

import cases
import jax
import jax.export
import jax.numpy as jnp
import mosaic_emulator as emulator
import numpy as np
import oracle
import pytest
import test_large_scores as large_scores
from test_accuracy import judge

import pallas_flash
from pallas_flash import Tile, TileSizes, _compat, _validate
from pallas_flash._scores import FUNCTIONS
from pallas_flash._vjp import Plan, _public_lse
from pallas_flash.mosaic import BackwardTile, DqTile, ForwardTile

# JAX 0.10.2 has not the operations that the kernels use: the others, on which .ci/run tests this
# file too, have.
if not _compat.has_mosaic_gpu():
    pytest.skip("JAX is too old; test_select has what is said then", allow_module_level=True)

from pallas_flash import _mosaic
from pallas_flash._mosaic import backward_dbias, common, work
from pallas_flash._mosaic.options import Bits, Options, shared_arrays
from pallas_flash._mosaic.pairs import Owners
from pallas_flash._mosaic.tiles import forward_tile

NO_FLAGS = dict(want_scale=False, want_bias=False, want_sinks=False)


def checked(qkv, options):
    """The call as the implementations get it."""
    names = list(inspect.signature(_validate.validate).parameters)[3:]
    defaults = inspect.signature(pallas_flash.attention).parameters
    return _validate.validate(
        *qkv, **{name: options.get(name, defaults[name].default) for name in names}
    )


def emulated(problem, in_order=False, sizes=_mosaic.TABLE, **others):
    """The results that `oracle.names` names."""
    qkv, (do, dlse), options = problem
    call = checked(qkv, options)
    wanted = {name: getattr(call, name) is not None for name in oracle.OPERANDS}
    flags = NO_FLAGS | {f"want_{name}": x for name, x in wanted.items()} | dict(in_order=in_order)
    flags |= others
    with emulator.emulated(pytest.MonkeyPatch()), jax.numpy_rank_promotion("raise"):
        o, log_sum = _mosaic.forward(call, sizes)
        gradients = _mosaic.backward(call, o, log_sum, do, dlse, sizes, **flags)
    names = "query", "key", "value", *(name for name, x in wanted.items() if x)
    return [o, _public_lse(log_sum), *(getattr(gradients, name) for name in names)]


def with_heads(case, size, **sizes):
    return dataclasses.replace(case, H=size, V=size, **sizes)


# ------------------------------------------------------------------------------------------------
# Numbers.

# A negative sign goes to the queries before the kernels.
IN_KERNELS = [name for name in cases.HEADS_ON_HOPPER if name != "negative scale"]
# Some of them, for the other tiles that larger heads have.
LARGE = ["full", "causal, first queries see nothing", "one key/value head"]
# Over all that a bias may be broadcast.
AXES_OF_BIAS = ["BNTS", "NTS", "BTS", "TS", "NS", "S", "T", "BT", ""]
# More than one tile of keys and of queries, so that slots are used again.
LONG = cases.Case("long", B=1, T=300, S=400, N=2, K=1, H=64, V=64)
# More tiles of keys than the forward has slots; of fewer queries than keys it would be another one.
MANY_KEYS = dataclasses.replace(LONG, T=601, S=600, N=1)
LONG_CAUSAL = dataclasses.replace(
    LONG, options=lambda random, case: dict(is_causal=True, query_offset=-20)
)


def served(size, names):
    """Cases at a head size, each of which takes seconds."""
    return [
        pytest.param(
            with_heads(cases.BY_NAME[name], size),
            id=f"{name.replace(' ', '-')}-{size}",
            marks=pytest.mark.extended,
        )
        for name in names
    ]


in_order = pytest.mark.parametrize("in_order", [False, True], ids=["one-pass", "in-order"])


@in_order
@pytest.mark.parametrize(
    "case", [LONG, LONG_CAUSAL, MANY_KEYS], ids=["full", "causal", "many-keys"]
)
def test_slots_are_used_again(case, in_order, kernel_case):
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order))


@in_order
def test_heads_of_a_group_in_one_program(monkeypatch, in_order, kernel_case):
    """As where there are many programs: these have a head each."""
    module = importlib.import_module("pallas_flash._mosaic.backward")
    monkeypatch.setattr(module, "_shares", lambda *_: 1)
    judge(LONG_CAUSAL, "bfloat16", emulated(LONG_CAUSAL.problem("bfloat16"), in_order))


@in_order
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_heads_that_do_not_fill_the_last_place_in_the_grid(
    kv_heads, monkeypatch, in_order, kernel_case
):
    """Three key/value heads, or shares of one, of which two have their programs side by side."""
    monkeypatch.setattr(
        importlib.import_module("pallas_flash._mosaic.backward_common"), "SIDE_BY_SIDE", 2
    )
    case = dataclasses.replace(LONG_CAUSAL, T=150, S=150, N=3, K=kv_heads)
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order))


@in_order
def test_keys_behind_the_ends_have_gradients_of_zero(in_order, kernel_case):
    """Of five tiles none is seen, or one or two, whose programs store several others, or more."""
    lengths = jnp.array([0, 1, 256, 300, 520], jnp.int32)
    sizes = dict(B=len(lengths), T=150, S=600, N=1)
    options = dict(key_value_seq_lengths=lengths)
    case = dataclasses.replace(LONG, **sizes, options=lambda *_: options)
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order))


def with_bias(axes, B=2, **options):
    """A bias that has these axes, of several tiles along queries and keys; some see nothing."""

    def draw(random, case):
        causal = dict(is_causal=True, query_offset=-20)
        return cases._bias(axes, "bfloat16")(random, case) | causal | options

    return dataclasses.replace(LONG, name=f"bias {axes}", B=B, T=150, N=4, K=2, options=draw)


@pytest.mark.parametrize(
    ("axes", "shares"),
    cases.default([("NTS", 1), ("S", 3)], [*itertools.product(AXES_OF_BIAS, (1, 3))]),
)
def test_steps_of_a_bias(axes, shares, monkeypatch, kernel_case):
    """As where there are many programs, with all steps of a tile; and with a share of them."""
    monkeypatch.setattr(backward_dbias, "_shares", lambda programs, steps: min(steps, shares))
    case = with_bias(axes)
    judge_both(case, in_order=True)


def biased(axes="NTS", dtype="bfloat16", options=None, **sizes):
    """A case with this bias, and of each side more than one tile."""

    def draw(random, case):
        drawn = {} if options is None else options(random, case)
        return cases._bias(axes, dtype)(random, case) | drawn

    sizes = dict(B=2, T=300, S=400, N=4, K=2) | sizes
    return dataclasses.replace(LONG, name=f"bias {axes}", options=draw, **sizes)


def fixed(**options):
    return lambda random, case: options


CAUSAL = fixed(is_causal=True, query_offset=-20)
# Of three warpgroups some see neither the first nor the last key tile of their query tile.
WINDOW = fixed(is_causal=True, local_window_size=(70, 0))
OF_LENGTHS = fixed(key_value_seq_lengths=jnp.asarray([390, 130], jnp.int32), is_causal=True)
IN_PAIRS = TileSizes(ForwardTile(2, 96, 1, programs=2))
THREE = TileSizes(ForwardTile(3, 80, 1, 3))
# The case, tiles, and whether there are tiles of the bias; of some one slot for each warpgroup.
BIASED = {
    "heads, causal": (biased(options=CAUSAL), _mosaic.TABLE, True),
    "examples": (biased("BTS", T=120), _mosaic.TABLE, True),
    "examples and heads": (biased("BNTS", T=120, H=128, V=128), _mosaic.TABLE, True),
    "neither": (biased("TS", B=1, S=104), _mosaic.TABLE, True),
    "32 bits": (biased("NTS", "float32", S=396, B=1), _mosaic.TABLE, True),
    "rows of no 16 bytes": (biased(S=404, B=1), _mosaic.TABLE, False),
    "queries": (biased("NT", B=1), _mosaic.TABLE, False),
    "keys": (biased("NS", B=1), _mosaic.TABLE, False),
    "window": (biased(options=WINDOW, B=1), THREE, True),
    "lengths": (biased(options=OF_LENGTHS), _mosaic.TABLE, True),
    "lists": (biased(options=cases._mask("NTS", 0.7), B=1), THREE, True),
    "pairs of programs": (biased(options=CAUSAL, B=1), IN_PAIRS, True),
    "wide heads": (biased(B=1, H=256, V=256, N=2, K=1), _mosaic.TABLE, True),
    "no room": (biased("NTS", "float32", B=1, H=256, V=256, N=2, K=1), _mosaic.TABLE, False),
}
SOME_BIASED = ["heads, causal", "examples and heads", "32 bits", "rows of no 16 bytes", "window",
               "lists", "pairs of programs"]  # fmt: skip


def forward_of(case, sizes=_mosaic.TABLE):
    """The output and the LSE, emulated."""
    qkv, _, options = case.problem("bfloat16")
    with emulator.emulated(pytest.MonkeyPatch()), jax.numpy_rank_promotion("raise"):
        o, log_sum = _mosaic.forward(checked(qkv, options), sizes)
    return [o, _public_lse(log_sum)]


@pytest.mark.parametrize("name", cases.default(SOME_BIASED, list(BIASED)))
def test_tiles_of_a_bias(name, monkeypatch, kernel_case):
    """On one core, where slots are used again; or where a bias has none, what reads it."""
    case, sizes, in_tiles = BIASED[name]
    monkeypatch.setattr(work, "CORES", 2 if sizes is IN_PAIRS else 1)
    monkeypatch.setattr(work, "_worklists", work._worklists.__wrapped__)
    start, found = emulator.launch, []

    def launch(kernel, operands, *, memory, **others):
        found.append(memory["bias_sm"] is not None)
        return start(kernel, operands, memory=memory, **others)

    monkeypatch.setattr(emulator, "launch", launch)
    judge(case, "bfloat16", forward_of(case, sizes), apart=True)
    assert found == [in_tiles]


@pytest.mark.parametrize("own", [*itertools.product([False, True], repeat=3)])
def test_a_bias_is_found_by_instance_example_and_head(own):
    counts = I, B, N = 3, 2, 4
    array = np.arange(I * B * N).reshape(counts)[*(slice(None if x else 1) for x in own)]
    whole, flat = np.broadcast_to(array, counts), array.reshape(-1, array.shape[2])
    bias = Owners(B, *own)
    for i, b, h in np.ndindex(counts):
        assert flat[bias.at(jnp.int32(i * B + b), h)] == whole[i, b, h]


@pytest.mark.parametrize(
    "case",
    cases.default(
        ["lengths of zero", "bias of all examples", "tiles of a bias"],
        ["lengths of zero", "bias of all examples", "mask of all examples and heads", "bias",
         "bias of keys", "tiles of a bias", "mask with empty tiles",
         "slopes, offset for each example", "all features"],
    ),
)  # fmt: skip
@in_order
def test_instances_have_their_own(case, in_order, monkeypatch, kernel_case):
    """What an axis of `jax.vmap` becomes: the second of two, of which the first is different."""

    def by_instance(function, batch):
        def of_two(x, first):
            return jnp.concatenate([first(x), x])

        def call(shared, *arrays):
            shared = jax.tree.map(lambda x: of_two(x, jnp.zeros_like), shared)
            results = function(shared, *(of_two(x, lambda x: x[::-1]) for x in arrays))
            return jax.tree.map(lambda x: x[len(x) // 2 :], results)

        return call

    monkeypatch.setattr(emulator, "by_instance", by_instance)
    in_tiles = biased(B=2, T=100, S=104, N=2, K=1)
    case = in_tiles if case == "tiles of a bias" else cases.BY_NAME[case]
    judge_both(with_heads(case, 64), in_order)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "size", "causal", "in_order", "shares"),
    [
        (4, 4096, 16, 16, 128, True, False, 1),  # Nothing to share.
        (1, 2**13, 64, 8, 128, True, False, 8),  # A head a program, or so many that
        (1, 4096, 64, 8, 128, True, False, 4),  # they have 8192 queries.
        (8, 2048, 64, 8, 128, True, False, 2),
        (2, 2048, 71, 1, 64, True, False, 17),
        (1, 2**17, 64, 8, 128, True, False, 8),
        (1, 2**17, 64, 8, 128, True, True, 2),  # Whose sums take 2 GiB.
        (1, 4096, 64, 8, 128, False, False, 1),
        (1, 1024, 64, 8, 128, False, False, 5),  # Two programs for each of 132 cores.
    ],
)
def test_shares_of_heads(batch, length, heads, kv_heads, size, causal, in_order, shares):
    module, found = importlib.import_module("pallas_flash._mosaic.backward"), []

    def call(q, k):
        p = checked((q, k, k), dict(is_causal=causal))
        found.append(module._shares(p, length // 128, in_order))

    shapes = ((batch, length, n, size) for n in (heads, kv_heads))
    jax.eval_shape(call, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    assert found == [shares]


# None of them is the table's.
SIZES = [
    TileSizes(ForwardTile(2, 80, 0, 3), dkv=BackwardTile(64, 3), dq=DqTile(2, 128, 3)),
    TileSizes(ForwardTile(3, 112, 2, 2), backward=BackwardTile(128, 3)),
]


@pytest.mark.parametrize("sizes", cases.default(SIZES[:1], SIZES), ids=["two-passes", "one-pass"])
def test_tiles_that_are_asked_for_give_the_same(monkeypatch, sizes, kernel_case):
    start, used = emulator.launch, []

    def launch(kernel, operands, *, static, **others):
        if hasattr(static, "tile"):
            used.append(static.tile)
        return start(kernel, operands, static=static, **others)

    monkeypatch.setattr(emulator, "launch", launch)
    judge(LONG, "bfloat16", emulated(LONG.problem("bfloat16"), sizes.backward is None, sizes))
    assert {*used} == {*vars(sizes).values()} - {None}


def of_pairs(axes, share=0.5):
    """A mask array that has these axes, of several tiles along queries and keys."""
    return dataclasses.replace(
        LONG, name=f"mask {axes}", B=2, T=300, S=250, options=cases._mask(axes, share)
    )


@pytest.mark.parametrize("block_kv", cases.default([80, 96], [64, 80, 96, 112, 128, 176]))
@pytest.mark.parametrize("axes", cases.default(["BNTS"], ["BNTS", "NTS", "BTS", "TS", "S", "T"]))
def test_bits_of_masks(axes, block_kv, kernel_case):
    """Of keys in tiles that are whole words or begin within one, of queries, and of neither."""
    sizes, case = TileSizes(ForwardTile(2, block_kv, 1)), of_pairs(axes)
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), block_kv == 96, sizes))


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize(("length", "block"), [(300, 80), (256, 128), (31, 176)])
def test_bools_are_packed(axis, length, block):
    """32 in a word, the first one lowest, with zeros behind up to the end of the last tile."""
    shape = [1, 3, 2, 5, 7]
    shape[axis + 1] = length
    x = np.random.default_rng(0).random(shape) < 0.5
    packed = Bits.along(axis, work.Tiling(length, block)).of(jnp.asarray(x))
    words = np.moveaxis(np.asarray(packed), axis + 1, -1)
    found = words[..., None] >> np.arange(32, dtype=np.uint32) & 1
    found = found.reshape(*words.shape[:-1], -1)
    assert words.shape[-1] % 4 == 0 and found.shape[-1] >= -(-length // block) * block
    np.testing.assert_array_equal(found[..., :length], np.moveaxis(x, axis + 1, -1))
    assert not found[..., length:].any()


@pytest.mark.parametrize(
    ("options", "near"),
    [
        (dict(alibi_slopes=jnp.ones(4)), True),
        (dict(alibi_slopes=jnp.ones(4), query_offset=2**24 - 19), True),
        (dict(alibi_slopes=jnp.ones(4), query_offset=2**24), False),
        (dict(alibi_slopes=jnp.ones(4), query_offset=jnp.zeros(2, jnp.int32)), False),
        (dict(alibi_slopes=jnp.ones(4), query_positions=jnp.zeros((2, 9), jnp.int32)), False),
    ],
)
def test_distances_are_quick_floats_where_all_are_small(options, near):
    """Those that arrays tell may be anything."""
    q = jnp.zeros((2, 9, 4, 64), jnp.bfloat16)
    problem = checked((q, q, q), options)
    shared = shared_arrays(problem, problem.mask)
    tiling = work.Tiling(9, 64)
    functions = Options.of(problem, shared, tiling, tiling).functions
    assert (functions.to_float is not FUNCTIONS.to_float) == near


@in_order
@pytest.mark.parametrize(
    "case", [*served(64, IN_KERNELS), *served(128, LARGE), *served(256, LARGE)]
)
def test_numbers(case, in_order, kernel_case):
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), in_order))


# Each stands for a way in which the kernels learn of something.
FEATURES = [
    "lengths of zero",
    "documents, causal, long",
    "mask with empty tiles",
    "blocks and predicate",
    "bias of minus infinity",
    "sinks",
    "all features",
]
# What has a backward; a negative scale is one of the queries before the kernels are called.
SERVED = [
    case for case in map(cases.BY_NAME.get, cases.SERVED_ON_HOPPER) if case.name != "negative scale"
]


def judge_both(case, in_order):
    problem = case.problem("bfloat16")
    large = checked(problem[0], problem[2]).large
    judge(case, "bfloat16", emulated(problem, in_order), apart=large)


@in_order
@cases.parametrize(names=FEATURES, others_extended=True, table=SERVED)
def test_numbers_of_features(case, in_order, kernel_case):
    judge_both(case, in_order)


@in_order
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    cases.default(
        chosen := [(40, 72), (128, 64), (192, 128), (8, 256), (256, 256)],
        [*chosen, (40, 40), (80, 80), (96, 96), (112, 48), (64, 128), (16, 112)],
    ),
)
def test_numbers_of_other_head_sizes(head_dim, value_dim, in_order, kernel_case):
    """Slots are used again, and query heads share their sums."""
    case = dataclasses.replace(LONG, T=100, S=150, H=head_dim, V=value_dim)
    judge_both(case, in_order)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_numbers_of_programs_with_many_query_tiles(head_dim, monkeypatch, kernel_case):
    """On a GPU with two cores: a warpgroup has every part of a tile in turn."""
    monkeypatch.setattr(work, "CORES", 2)
    # It remembers lists for all cores.
    monkeypatch.setattr(work, "_worklists", work._worklists.__wrapped__)
    judge_both(with_heads(LONG_CAUSAL, head_dim, T=601), in_order=False)


@pytest.mark.parametrize(
    ("T", "causal", "head_dim", "cores"),
    cases.default(
        chosen := [(601, False, 128, 2), (600, True, 80, 4)],
        [*chosen, (512, False, 64, 132), (700, True, 128, 2), (129, False, 256, 132)],
    ),
)
def test_numbers_of_programs_that_share_keys(T, causal, head_dim, cores, monkeypatch, kernel_case):
    """Of the last pair, one may have nothing to do; of a causal one, the first sees fewer keys."""
    monkeypatch.setattr(work, "CORES", cores)
    monkeypatch.setattr(work, "_worklists", work._worklists.__wrapped__)
    copy, copies = emulator.copy_gmem_to_smem, set()

    def spied(source, destination, barrier, collective_axes=None):
        copies.add((len(destination.array), collective_axes))
        copy(source, destination, barrier, collective_axes)

    monkeypatch.setattr(emulator.plgpu, "copy_gmem_to_smem", spied)
    case = with_heads(LONG_CAUSAL if causal else MANY_KEYS, head_dim, T=T, S=600)
    sizes = TileSizes(ForwardTile(block_kv=96, programs=2))
    judge(case, "bfloat16", emulated(case.problem("bfloat16"), False, sizes))
    assert {axes for rows, axes in copies if rows == 96} == {"member"}


@pytest.mark.parametrize(
    ("sizes", "options", "programs"),
    [
        ((4096, 4096, 128), {}, 2),
        ((4096, 4096, 128), dict(is_causal=True), 2),
        ((4096, 4096, 128), dict(is_causal=True, logits_soft_cap=30.0), 1),
        ((4096, 4096, 128), dict(local_window_size=(100, 0)), 1),
        ((4096, 4096, 128), dict(is_causal=True, query_offset=jnp.int32(3)), 1),
        ((4096, 4096, 64), {}, 1),  # Three warpgroups.
        ((2048, 2048, 256), {}, 2),
        ((2048, 2048, 128), dict(is_causal=True), 1),
        ((2048 + 256, 4096, 128), {}, 2),
        ((2048 + 128, 4096, 128), {}, 1),  # Whose last pair would be half empty.
        ((8192, 512, 128), {}, 1),
    ],
)
def test_programs_share_keys_where_it_was_measured_to_be_faster(sizes, options, programs):
    T, S, H = sizes
    q, k = (jnp.zeros((1, n, 1, H), jnp.bfloat16) for n in (T, S))
    assert _mosaic.tiles.forward_tile(checked((q, k, k), options)).programs == programs


@in_order
@cases.parametrize(names=["everything at once"], more=["dropout", "large scores"])
def test_another_forward_may_come_before(case, in_order, monkeypatch, kernel_case):
    """That of "triton", as where None takes "mosaic" for the backward alone."""
    triton = Plan("interpret", TileSizes(forward=Tile(32, 32)))
    monkeypatch.setattr(_mosaic, "forward", lambda p, _: triton.forward(p))
    judge_both(dataclasses.replace(case, H=64, V=64), in_order)


def test_the_largest_additive_mask(kernel_case):
    """It is read for queries that do not exist, too, of which the tile has some."""
    pair = "left padding", "max of float32"
    args = large_scores.arguments(70, 70, False, (pair,), "bfloat16")
    large_scores.check(args, emulated(large_scores.problem(*args)))


def gradient_of_the_scale(problem, in_order):
    qkv, (do, dlse), options = problem
    call = checked(qkv, options | dict(scale=jnp.float32(0.7)))
    flags = NO_FLAGS | dict(want_scale=True, in_order=in_order)
    with emulator.emulated(pytest.MonkeyPatch()):
        o, log_sum = _mosaic.forward(call)
        return _mosaic.backward(call, o, log_sum, do, dlse, **flags).scale


@pytest.mark.parametrize("in_order", [False, True], ids=["one-pass", "in-order"])
def test_the_gradient_of_the_scale(in_order):
    problem = cases.BY_NAME["scale"].problem("bfloat16")
    got = gradient_of_the_scale(problem, in_order)
    qkv, (do, dlse), _ = problem

    def blocked(scale):
        """What rounds as the kernels do: the sum is small beside its terms."""
        return pallas_flash.attention(*qkv, scale=scale, return_lse=True, implementation="xla")

    _, pull = jax.vjp(blocked, jnp.float32(0.7))
    [want] = pull((do, dlse))
    np.testing.assert_allclose(got, want, rtol=1e-3)


def test_the_gradient_of_the_scale_is_the_same_in_order():
    """Of 520 queries, whose tiles of 192 end before those of 128 that delta has."""
    problem = dataclasses.replace(LONG, T=520).problem("bfloat16")
    one_pass, in_order = (gradient_of_the_scale(problem, x) for x in (False, True))
    np.testing.assert_allclose(in_order, one_pass, rtol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(8))
def test_random_problems(seed, kernel_case):
    random = np.random.default_rng(seed)
    T, S = (int(x) for x in random.integers(1, 400, 2))
    kv_heads = int(random.integers(1, 3))
    options = dict(is_causal=True, query_offset=int(random.integers(-T, S)))
    case = cases.Case(
        f"random {seed}",
        *(1, T, S, kv_heads * int(random.integers(1, 4)), kv_heads),
        *[int(random.choice([64, 128]))] * 2,
        options=lambda random, case: options if seed % 2 else {},
    )
    dtype = ["bfloat16", "float16"][seed // 2 % 2]
    judge(case, dtype, emulated(case.problem(dtype)))


def documents(random, tiles):
    """The first and the last key tile of each query tile, causal, of documents of any length."""
    ends = np.cumsum(random.exponential(tiles / 8, tiles).astype(int) + 1)
    first = np.searchsorted(ends, np.arange(tiles), side="right")
    return np.concatenate([[0], ends])[first], np.arange(tiles) + 1


def end_of_the_last(lengths, programs):
    """When the last program is done, if who is free takes the next item."""
    free = [0.0] * programs
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + length + 1.5)
    return max(free)


@pytest.mark.parametrize(
    ("batch", "heads", "side", "tiles", "own_heads", "listed", "late"),
    [
        *((2, 3, 1, 5, False, False, 1.3), (1, 1, 1, 1, False, False, 1.1)),
        *((1, 16, 1, 128, False, False, 1.02), (1, 16, 3, 512, False, False, 1.01)),
        *((3, 30, 4, 9, True, True, 1.15), (2, 6, 2, 700, False, True, 1.01)),
    ],
)
def test_items_of_arrays_come_by_heads_that_share_the_cache(
    batch, heads, side, tiles, own_heads, listed, late
):
    """Longest first, and at the end those of more heads together."""
    random = np.random.default_rng(0)
    start, stop = documents(random, tiles)
    if listed:
        rows = np.stack([0 * start, stop - start, start], axis=-1)
    else:
        rows = np.stack([start, start, stop, stop], axis=-1)
    shape = batch, heads if own_heads else 1, *rows.shape
    table = jnp.asarray(np.broadcast_to(rows, shape), jnp.int32)
    if listed:
        entries = work.lists_for_warpgroups(table, tiles, 1)
    else:
        entries = work.for_warpgroups(table, 1)
    lists = np.asarray(work.longest_first(batch, heads, side, entries))
    assert lists.dtype == np.int32 and lists.shape[1] == work.NUMBERS
    items, programs = lists[1:-1], work.programs_of(lists)
    assert programs == min(work.CORES, len(items))
    assert lists[0, 0] == 1 + programs and lists[-1, 0] < 0
    places = [tuple(x) for x in items[:, :3].tolist()]
    assert sorted(places) == list(itertools.product(*map(range, (batch, heads, tiles))))
    for (b, h, tile), entry in zip(places, items[:, 3:11].tolist(), strict=True):
        row = (b * shape[1] + (h if own_heads else 0)) * tiles + tile
        count = stop[tile] - start[tile]
        assert entry[0] == (row if listed else stop[tile] - 1)
        seen = work.Seen(*entry[work.COMMON :])
        assert entry[work.COUNT] == count and (seen.first, seen.end) == (0, count)
    lengths = (stop - start)[items[:, 2]]
    # As many of `side` as divide the heads; with rows that are sorted together all of a row.
    apart = tiles * heads >= work.TOGETHER and not own_heads
    side = max(n for n in range(1, side + 1) if heads % n == 0)
    last = max(0, len(items) - -(-work.TOGETHER // (tiles * side)) * tiles * side)
    assert (np.diff(lengths[last:]) <= 0).all()
    if apart:
        of_heads = (items[:last, :2] @ [heads, 1]) // side
        assert (np.diff(of_heads) >= 0).all()
        assert ((np.diff(lengths[:last]) <= 0) | (np.diff(of_heads) > 0)).all()
        if last:
            assert len(set(items[: side * 2, 1])) == side
    mean = (lengths + 1.5).sum() / programs
    assert end_of_the_last(lengths, programs) <= late * max(mean, lengths.max() + 1.5)


@pytest.mark.parametrize(("members", "lists"), [(1, 132), (2, 66)])
def test_all_cores_have_a_program(members, lists):
    q = jnp.zeros((2, 4096, 16, 64), jnp.bfloat16)
    p = checked((q, q, q), dict(is_causal=True))
    table = work.table(p.mask, work.Tiling(4096, 64), work.Tiling(4096, 128), "kv", 2, 2)
    entries = work.for_warpgroups(table, 2 * members)
    assert len(work.worklists(p, 2, p.mask, entries, members)) == lists


@cases.parametrize(
    names=["causal", "everything at once", "lengths of zero", "documents", "mask with empty tiles"]
)
def test_each_query_tile_is_an_item_once(case, monkeypatch):
    """Those that see nothing, too: of calls with many tiles, whose lists may depend on arrays."""

    class Launched(Exception):
        pass

    def launch(kernel, operands, *, sums, **_):
        [lists] = sums or operands[-1:]
        raise Launched(lists)

    qkv, _, options = with_heads(case.scaled(6), 64).problem("bfloat16")
    call = checked(qkv, options)
    with emulator.emulated(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(common, "launch", launch)
        with pytest.raises(Launched) as launched:
            _mosaic.forward(call)
    [lists] = map(np.asarray, launched.value.args)
    known = [row[1 : 1 + row[0, 0]] for row in lists] if lists.ndim == 3 else [lists[1:-1]]
    items = sorted(tuple(x) for x in np.concatenate(known)[:, :3].tolist())
    tiles = -(-call.q_len // (64 * forward_tile(call).warpgroups))
    assert items == list(itertools.product(*map(range, (call.batch, call.num_heads, tiles))))


# Short documents and a long one; what no query sees; few items; and one.
TAKEN = {
    "documents": (601, dict(segment_ids=np.repeat(range(5), (9, 30, 2, 500, 60))), True),
    "lengths": (601, dict(query_seq_lengths=[300], key_value_seq_lengths=[200]), False),
    "few": (150, dict(key_value_seq_lengths=[140]), False),
    "one": (60, dict(key_value_seq_lengths=[60]), False),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", TAKEN)
def test_programs_take_each_item_once(name, head_dim, monkeypatch, kernel_case):
    """On a GPU with three cores, of which two are at work at a time: the third may come late."""
    length, arrays, is_causal = TAKEN[name]
    heads = 1 if name == "one" else 2
    arrays = {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()}
    if "segment_ids" in arrays:
        arrays = dict(segment_ids=arrays["segment_ids"][None])
    options = arrays | dict(is_causal=is_causal)
    case = cases.Case(
        f"taken {name}",
        *(1, length, length, heads, heads, head_dim, head_dim),
        options=lambda random, case: options,
    )
    start, count_up = emulator.launch, emulator.fake_ptx["count_up"]
    taken, counts = [], []

    def counted(ref):
        row = count_up(ref)
        taken.append((int(row), int(emulator.here.axes["program"])))
        return row

    def launch(kernel, operands, **others):
        results = start(kernel, operands, **others)
        if kernel.__name__ == "pallas_flash_forward":
            counts.append((others["grid"]["program"], len(results[0]) - 2, int(results[0][0, 0])))
        return results

    monkeypatch.setattr(work, "CORES", 3)
    monkeypatch.setattr(emulator, "launch", launch)
    monkeypatch.setitem(emulator.fake_ptx, "count_up", counted)
    judge(case, "bfloat16", emulated(case.problem("bfloat16")))
    [(programs, items, count)] = counts
    assert programs == min(3, items)
    # Each program counts on, after the first row that is no item, once.
    end = 1 + items + 2 * programs
    assert count == end and sorted(row for row, _ in taken) == list(range(1 + programs, end))
    behind = [program for row, program in taken if row > items]
    assert sorted(behind) == sorted(2 * list(range(programs)))


@pytest.mark.parametrize("warpgroups", [2, 3])
@pytest.mark.parametrize("xp", [np, jnp], ids=["known", "traced"])
def test_warpgroups_compute_what_they_see(warpgroups, xp):
    """All pairs or triples of ranges, the last one of which lacks a tile of queries."""
    ranges = [x for x in itertools.product(range(4), repeat=4) if list(x) == sorted(x)]
    together = list(itertools.product(ranges[:: warpgroups**2], repeat=warpgroups))
    rows = xp.asarray(np.concatenate(together)[None, None, :-1], np.int32)
    entries = work.for_warpgroups(rows, warpgroups)
    assert type(entries) is type(rows)
    rows = [*np.asarray(rows)[0, 0].tolist(), (0, 0, 0, 0)]
    for n, entry in enumerate(np.asarray(entries)[0, 0].tolist()):
        stream = work.stream(entry[: work.COMMON], None)
        order = [int(stream.at(i)) for i in range(stream.count)]
        mine = rows[n * warpgroups :][:warpgroups]
        some = [x for x in mine if x[0] < x[3]]
        first, last = (f((x[i] for x in some), default=0) for f, i in ((min, 0), (max, 3)))
        assert sorted(order) == list(range(first, last))
        each = [entry[i : i + work.OWN] for i in range(work.COMMON, len(entry), work.OWN)]
        for (start, full_start, full_stop, stop), seen in zip(mine, each, strict=True):
            seen = work.Seen(*seen)
            assert sorted(seen) == list(seen)
            assert sorted(order[seen.first : seen.end]) == list(range(start, stop))
            full = range(full_start, full_stop)
            masked = order[seen.first : seen.full] + order[seen.edges : seen.end]
            whole = order[seen.full : seen.edges]
            assert set(whole) <= set(full)
            # What is at the first edge of another one may count as an edge here.
            early = max((x[1] for x in some), default=0)
            assert set(masked) & set(full) <= set(range(early))


def test_full_tiles_rise_where_all_begin_with_the_same_one():
    """As those of other query tiles do; those at the end come before, the last one first."""
    causal = [(0, 0, n, n + 1) for n in range(8, 11)]
    window = [(3, 4, 9, 10)] * 3
    apart = [(n, n + 1, n + 8, n + 9) for n in range(3)]
    rows = np.array([*causal, *window, *apart], np.int32)[None, None]
    orders = []
    for entry in work.for_warpgroups(rows, 3)[0, 0]:
        stream = work.stream(entry[: work.COMMON], None)
        orders.append([int(stream.at(i)) for i in range(stream.count)])
    assert orders[0] == [10, 9, 8, *range(8)]
    assert orders[1] == [9, *range(3, 9)]
    assert orders[2] == list(range(11))[::-1]


# Of three warpgroups some see neither the first nor the last key tile of their query tile.
APART = {
    "window": dict(local_window_size=(70, 0)),
    "documents": dict(segment_ids=jnp.searchsorted(jnp.array([250, 420]), jnp.arange(500))[None]),
}


@pytest.mark.parametrize("options", APART.values(), ids=APART)
def test_warpgroups_pass_by_what_others_see(options, kernel_case, monkeypatch):
    """On one core, where slots are used again."""
    monkeypatch.setattr(work, "CORES", 1)
    monkeypatch.setattr(work, "_worklists", work._worklists.__wrapped__)
    options = options | dict(is_causal=True)
    sizes = dict(B=1, T=500, S=500, N=1, K=1)
    case = dataclasses.replace(with_heads(LONG, 64, **sizes), options=lambda *_: options)
    judge(case, "bfloat16", emulated(case.problem("bfloat16")))


def test_nothing_shows_of_what_no_query_sees(kernel_case):
    case = dataclasses.replace(LONG_CAUSAL, T=100)
    qkv, cotangents, options = case.problem("bfloat16")
    poisoned = cases.poison(case, qkv, cotangents, options)
    # Keys that no query sees, too: those past the last query.
    assert all(np.isnan(np.asarray(x, np.float32)).any() for x in poisoned[0])
    want, got = emulated((qkv, cotangents, options)), emulated((*poisoned, options))
    for name, a, b in zip(oracle.NAMES, want, got, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        # dq is a sum in any order.
        np.testing.assert_allclose(a, b, rtol=1e-2 if name == "dq" else 0, err_msg=name)


# Within a tile, at the end of one, none and all.
ENDS = dict(query_seq_lengths=[200, 128, 300, 70], key_value_seq_lengths=[150, 256, 400, 0])


@in_order
@pytest.mark.parametrize(
    "options",
    cases.default(
        [dict(is_causal=True)], [{}, dict(is_causal=True), dict(local_window_size=(150, 20))]
    ),
    ids=lambda options: next(iter(options), "full"),
)
def test_what_is_behind_lengths_may_hold_anything(options, in_order, kernel_case):
    """Of the tiles in which lengths end, there are copies that end with zeros."""
    judge_poisoned(options, in_order)


def test_what_is_behind_lengths_may_hold_anything_beside_the_gradient_of_the_scale(kernel_case):
    """All sums of dq are read then."""
    judge_poisoned({}, want_scale=True)


def judge_poisoned(options, in_order=False, **others):
    ends = {name: jnp.asarray(x, jnp.int32) for name, x in ENDS.items()}
    case = dataclasses.replace(LONG, B=4, N=1, options=lambda random, case: options | ends)
    qkv, cotangents, options = case.problem("bfloat16")
    poisoned = cases.poison(case, qkv, cotangents, options)
    assert all(np.isnan(np.asarray(x, np.float32)).any() for x in poisoned[0])
    judge(case, "bfloat16", emulated((*poisoned, options), in_order, **others))


def test_what_is_behind_lengths_may_hold_anything_without_a_cotangent_of_the_lse(kernel_case):
    """Then delta leaves its kernel as it is used."""
    ends = {name: jnp.asarray(x, jnp.int32) for name, x in ENDS.items()}
    case = dataclasses.replace(LONG, B=4, N=1, options=lambda random, case: ends)
    qkv, cotangents, options = case.problem("bfloat16")
    poisoned, (poisoned_do, _) = cases.poison(case, qkv, cotangents, options)
    assert np.isnan(np.asarray(poisoned_do, np.float32)).any()
    problems = (qkv, cotangents[0]), (poisoned, poisoned_do)
    want, got = (emulated((qkv, (do, None), options), in_order=True) for qkv, do in problems)
    for name, a, b in zip(oracle.names(options), want, got, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("axes", ["TS", "S"])
def test_nothing_shows_of_a_bias_of_pairs_that_are_not_seen(axes, kernel_case):
    case = with_bias(axes, B=1)
    qkv, cotangents, options = case.problem("bfloat16")
    poisoned = *cases.poison(case, qkv, cotangents, options), cases.poison_bias(case, options)
    assert np.isnan(np.asarray(poisoned[2]["bias"], np.float32)).any()
    want, got = (emulated(problem, True) for problem in ((qkv, cotangents, options), poisoned))
    for name, a, b in zip(oracle.names(options), want, got, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_nothing_shows_of_values_that_no_query_sees(kernel_case):
    """Whether these keys are known by lengths, or by evaluating the mask."""
    for name in ("lengths of zero", "everything at once", "mask with empty tiles"):
        case = cases.BY_NAME[name]
        qkv, cotangents, options = case.problem("bfloat16")
        poisoned, _ = cases.poison(case, qkv, cotangents, options)
        assert np.isnan(np.asarray(poisoned[2], np.float32)).any(), name
        with emulator.emulated(pytest.MonkeyPatch()):
            (want, _), (got, _) = (_mosaic.forward(checked(x, options)) for x in (qkv, poisoned))
        np.testing.assert_array_equal(want, got, err_msg=name)


@in_order
def test_what_no_query_of_a_pair_sees_may_overflow(in_order):
    """The product of a cotangent and a value that its query does not see."""
    case = dataclasses.replace(LONG, T=100, S=100, N=1, options=lambda r, c: dict(is_causal=True))
    (q, k, v), (do, dlse), options = case.problem("bfloat16")
    v, do = v.at[:, 60:].multiply(1e20), do.at[:, :40].multiply(1e20)
    for name, x in zip(
        oracle.NAMES, emulated(((q, k, v), (do, dlse), options), in_order), strict=False
    ):
        assert jnp.isfinite(x).all(), name
