"""A sequence that devices divide: its parts, the choice of a method, the steps of a ring."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases

from pallas_flash import attention, explain
from pallas_flash._backends import reference
from pallas_flash._execution import lowered_once
from pallas_flash._execution.context import choice, gather, parts, ring
from pallas_flash._execution.plan import Plan, Wanted
from pallas_flash._problem.features import kind_of
from pallas_flash._problem.problem import Problem

# ------------------------------------------------------------------------------------------------
# Parts of a problem
# ------------------------------------------------------------------------------------------------


def problem_of(case: cases.Case, **more) -> Problem:
    qkv, _, options = case.problem()
    return cases.checked(qkv, options | more)


@cases.parametrize(names=("prefix", "everything at once", "all features", "blocks and predicate",
                          "score function"), others_extended=True)  # fmt: skip
@pytest.mark.parametrize("known", [True, False], ids=["known", "traced"])
def test_part_is_a_rectangle_of_the_whole(case, known):
    """Masks, scores and dropout, at positions that count from the part's first ones."""
    # Documents are those of the same tokens.
    case = dataclasses.replace(case, T=84, S=84 if "documents" in case.name else 90)
    whole = problem_of(case)

    def pairs(p: Problem):
        # Compiled, but not what is known: operation by operation takes several times as long.
        @jax.jit
        def found():
            at = reference._indices(p, 0)
            seen = jnp.ones((1, 1, 1, 1, 1), bool)
            seen = seen & reference._whole(p, p.mask).allowed(*at) if p.mask else seen
            x = jnp.full((p.batch, p.num_kv_heads, p.groups, p.q_len, p.kv_len), 0.3, jnp.float32)
            scores = reference._whole(p, p.scores).logits(x, *at)
            return seen, scores, True if p.dropout is None else p.dropout.kept(*at)

        seen, scores, kept = found()
        shape = (p.batch, p.num_kv_heads, p.groups, p.q_len, p.kv_len)
        return [np.broadcast_to(x, shape) for x in (seen, np.where(seen, scores, 0), kept)]

    want = pairs(whole)
    q_len, kv_len = whole.q_len // 3, whole.kv_len // 3
    for i, j in ((0, 0), (1, 0), (0, 2), (2, 1)):
        first_q, first_k = i * q_len, j * kv_len
        distance = first_q - first_k
        part = parts.Part(
            parts.Side(jnp.int32(first_q), q_len, first_q),
            parts.Side(jnp.int32(first_k), kv_len, first_k),
            distance if known else jnp.full((case.B,), distance, jnp.int32),
        )
        piece = parts.part_of(whole, part)
        assert (piece.q_len, piece.kv_len) == (q_len, kv_len)
        got = pairs(piece)
        for x, y in zip(got, want, strict=True):
            rows, columns = slice(first_q, first_q + q_len), slice(first_k, first_k + kv_len)
            np.testing.assert_array_equal(x, y[..., rows, columns])
        # `sees` decides whether a step is computed, and must not miss a pair.
        assert piece.mask.sees(q_len, kv_len) or not got[0].any()


# ------------------------------------------------------------------------------------------------
# The choice
# ------------------------------------------------------------------------------------------------


def shapes(length, heads=32, kv_heads=8, **options) -> Problem:
    """Return one device's shard of a call on 4 devices."""
    x, y = (jax.ShapeDtypeStruct((1, length, n, 128), jnp.bfloat16) for n in (heads, kv_heads))
    problems = []
    jax.eval_shape(lambda x, y: problems.append(cases.checked((x, y, y), options)), x, y)
    x, y = (jax.ShapeDtypeStruct((1, length // 4, *z.shape[2:]), z.dtype) for z in (x, y))
    return dataclasses.replace(problems[0], query=x, key=y, value=y)


CAUSAL = {"is_causal": True}


@pytest.mark.parametrize(
    ("length", "options", "method", "reason"),
    [
        (2**16, CAUSAL, "heads", "devices have equal work"),
        (2**16, CAUSAL | {"key_value_positions": jnp.zeros((1, 2**16), jnp.int32)}, "ring",
         "positions are taken for `balanced_order`"),
        # A window of a device's keys, and one that is longer.
        (2**16, CAUSAL | {"local_window_size": (2**14, 0)}, "ring", "neighbours alone send"),
        (2**16, CAUSAL | {"local_window_size": (2**14 + 1, 0)}, "heads", "equal work"),
        (2**16, {"local_window_size": (9, 2**15)}, "heads", "equal work"),
        # 4 devices do not divide 30 heads.
        (2**16, CAUSAL | {"heads": 30, "kv_heads": 6}, "gather", "take 201326592 bytes"),
        (2**17, CAUSAL | {"heads": 30, "kv_heads": 6}, "ring", "would take 402653184 bytes"),
        # "heads" sends 36 + 12 heads and the others 4 x 12; then 32 + 16 and 4 x 16.
        (2**16, {"heads": 36, "kv_heads": 12}, "ring", "would take 402653184 bytes"),
        (2**16, {"kv_heads": 16}, "heads", "sends less"),
        (2**11, {"kv_heads": 1}, "gather", "take 1048576 bytes"),
        (2**20, {"kv_heads": 2}, "ring", "would take 1073741824 bytes"),
        # Exactly the limit, and above it.
        (2**16, {}, "gather", "take 268435456 bytes on every device, at most 268435456."),
        (2**16 + 4, {}, "ring", "would take 268451840 bytes on every device, above 268435456."),
    ],
)  # fmt: skip
def test_method_by_rule(length, options, method, reason):
    chosen = choice.choose(shapes(length, **options), 4, None)
    assert chosen.method == method
    assert reason in chosen.reason
    others = [x for x in choice.METHODS if x != method]
    assert sorted(chosen.refused) == sorted(others)
    if "heads" not in options:
        assert {*chosen.refused.values()} == {f"{method!r} comes first for this call."}


def test_unsuitable_method_raises():
    sentence = (
        r"`context_parallelism` must be a method that serves the call; got 'heads'\. Got 6 query "
        "heads, which 4 devices do not divide"
    )
    with pytest.raises(NotImplementedError, match=sentence):
        choice.choose(shapes(64, heads=6, kv_heads=2), 4, "heads")
    with pytest.raises(NotImplementedError, match=r"got 'ring'\. Every device has all keys"):
        choice.choose(shapes(64), 4, "ring", keys=False)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_explain_names_the_method(axis_type):
    mesh = AbstractMesh((4,), ("sequence",), axis_types=(axis_type,))
    rows = NamedSharding(mesh, P(None, "sequence"))
    x, y = (jax.ShapeDtypeStruct((1, 2**14, n, 64), jnp.bfloat16, sharding=rows) for n in (6, 3))
    told = explain(x, y, y, is_causal=True, implementation="xla")
    assert told.context_parallelism.method == "gather"
    assert "not heads: Got 6 query heads, which 4 devices do not divide." in str(told)
    asked = explain(x, y, y, implementation="xla", context_parallelism="gather")
    assert "gather: asked for." in str(asked)
    with pytest.raises(NotImplementedError, match="Got 6 query heads"):
        explain(x, y, y, implementation="xla", context_parallelism="heads")
    where = jax.ShapeDtypeStruct((1, 2**14), jnp.int32, sharding=rows)
    moved = dict(query_positions=where, key_value_positions=where, is_causal=True)
    sentence = "In `balanced_order`, which is seen when it runs, steps are causal or whole, and by"
    assert f"{sentence} 'xla'." in str(explain(x, y, y, implementation="xla", **moved))
    window = explain(x, y, y, implementation="xla", local_window_size=9, **moved)
    assert sentence not in str(window) + str(told)
    whole = jax.ShapeDtypeStruct(x.shape, x.dtype)
    assert explain(whole, whole, whole, implementation="xla").context_parallelism is None


# ------------------------------------------------------------------------------------------------
# Steps of a ring
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def parts_of(monkeypatch):
    """Queries, keys and kinds of mask of what is computed for a causal call of 4 devices."""
    found, right = [], Plan._forward_alone

    def recorded(plan, p):
        found.append((p.q_len, p.kv_len, kind_of(p.mask), bool(jax.tree.leaves(p.mask))))
        return right(plan, p)

    def parts(x, method, where=None, **options):
        def call(x, where):
            places = {} if where is None else dict.fromkeys(_POSITIONS, where)
            return attention(
                x, x, x, is_causal=True, context_parallelism=method, implementation="xla",
                sequence_axis="sequence", **options, **places,
            )  # fmt: skip

        found.clear()
        mesh = AbstractMesh((4,), ("sequence",), axis_types=(AxisType.Auto,))
        spec = P(None, "sequence")
        run = jax.shard_map(call, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        jax.eval_shape(run, x, where)
        return found

    monkeypatch.setattr(Plan, "_forward_alone", recorded)
    return parts


_POSITIONS = "query_positions", "key_value_positions"


def test_balanced_step_needs_no_positions(parts_of):
    """It is causal or whole, with the same work for all; the other calls are for other orders."""
    x, where = jnp.zeros((1, 64, 2, 8)), jnp.zeros((1, 64), jnp.int32)
    by_positions = 16, 16, "another mask", True
    step = [(16, 8, "full", False), (8, 16, "full", False), by_positions]
    assert parts_of(x, "ring", where) == [(16, 16, "causal", False), by_positions, *step * 3]
    # A window compares positions, and so does every mask where a shard has no halves.
    assert parts_of(x, "ring", where, local_window_size=(9, 0)) == [by_positions] * 4
    assert parts_of(x[:, :60], "ring", where[:, :60]) == [(15, 15, "another mask", True)] * 4


def test_ring_stops_where_the_window_does(parts_of):
    """A key further, and the first query of a shard sees the last key of two devices back."""
    x = jnp.zeros((1, 64, 2, 8))
    assert [len(parts_of(x, "ring", local_window_size=(n, 0))) for n in (16, 17, 64)] == [2, 3, 4]


def test_gathered_keys_are_visible(parts_of, monkeypatch):
    """For each device, by a mask that asks for no array."""
    x = jnp.zeros((1, 1024, 2, 8))
    lengths = 256, 512, 768, 1024
    assert parts_of(x, "gather") == [(256, n, "causal", False) for n in lengths]
    window = parts_of(x, "gather", local_window_size=(300, 0))
    assert window == [(256, n, "causal" if n < 512 else "ranges", False) for n in lengths]
    monkeypatch.setattr(gather, "CALLS", 2)
    assert parts_of(x[:, :512], "gather") == [(128, 512, "causal", True)]


def test_blocks_are_passed_on():
    """Also by devices that do not need them, as where queries see later keys alone."""
    random = np.random.default_rng(0)
    for _ in range(50):
        n = int(random.integers(2, 7))
        backs = np.flatnonzero(random.random(n) < 0.7)
        steps = object.__new__(ring.Ring)
        steps.count = n
        steps.steps = [
            ring.Step(int(back), tuple((random.random(n) < 0.4).tolist()), (), 0, 0)
            for back in backs
        ]
        needed = [steps._needed(i) for i in range(len(backs))]
        for i, step in enumerate(steps.steps):
            assert all(need or not used for need, used in zip(needed[i], step.used, strict=True))
            if i:
                hop = step.back - steps.steps[i - 1].back
                assert all(needed[i - 1][(d - hop) % n] or not needed[i][d] for d in range(n))
        if needed:
            assert needed[-1] == list(steps.steps[-1].used)


# ------------------------------------------------------------------------------------------------
# Passes that are lowered once
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def run_once(monkeypatch):
    """Plain JAX as the kernels for Hopper are: each pass is exported, and kept."""
    monkeypatch.setattr(lowered_once, "PLATFORMS", {"xla": "cpu"})
    lowered_once._exported.cache_clear()
    yield Plan.from_implementation("xla")
    lowered_once._exported.cache_clear()


def test_lowered_once_gives_wanted_gradients(run_once):
    """The cache of exported passes knows which gradients a call asks for."""
    p = problem_of(dataclasses.replace(cases.BY_NAME["sinks"], B=1, T=8, S=8))
    o, log_sum = run_once._forward_here(p, again=True)
    rows = p, o, log_sum, jnp.ones_like(o), None
    for wanted in (Wanted(), Wanted(sinks=True), Wanted()):
        got, want = (
            run_once._backward_here(*rows, wanted=wanted, again=again) for again in (True, False)
        )
        assert (got.sinks is not None) == wanted.sinks
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, want)
    assert lowered_once._exported.cache_info().hits == 1


def add_more_in_x64(s, b, h, q, k):
    return s + 0.1 * jnp.finfo(jnp.result_type(float)).bits * (q > k)


def test_lowered_once_for_each_x64_mode(run_once):
    """A user's function may depend on whether JAX is in x64 mode."""
    p = problem_of(
        dataclasses.replace(cases.BY_NAME["full"], B=1, T=8, S=8), score_mod=add_more_in_x64
    )
    for x64 in (False, True):
        with jax.enable_x64(x64):
            got, want = (run_once._forward_here(p, again=again)[0] for again in (True, False))
        np.testing.assert_allclose(got, want, rtol=1e-5)
