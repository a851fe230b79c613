"""The calls for which the kernels for Hopper are chosen, pass by pass, and the reasons given."""

import jax
import jax.numpy as jnp
import pytest
from support.described_gpus import described_gpu
from support.select_fixtures import no_warning_given_yet, without_triton  # noqa: F401  Tests name them by their arguments.

import pallas_flash
from pallas_flash._jax import compat
from pallas_flash._problem.tile_sizes import given_tiles
from pallas_flash._selection import resolve
from pallas_flash.masks import BlockMask, Chunked, Predicate
from pallas_flash.tuning import BackwardTile, Tile, TileSizes


@pytest.fixture
def newer_jax():
    """Plans have tiles of the kernels' modules, which older JAX cannot import."""
    if not compat.has_mosaic_gpu():
        pytest.skip("JAX is too old")


LENGTHS = dict.fromkeys(
    ("query_seq_lengths", "key_value_seq_lengths"), jax.ShapeDtypeStruct((8,), jnp.int32)
)


def on_hopper(
    length=8192,
    head_dim=128,
    value_dim=None,
    tokens=16384,
    kv_heads=None,
    dtype=jnp.bfloat16,
    gpu="NVIDIA H100 80GB HBM3",
    **options,
):
    """`explain` for a call of width 2048."""
    heads = 2048 // head_dim
    q, k, v = (
        jax.ShapeDtypeStruct((tokens // length, length, n, size), dtype)
        for n, size in (
            (heads, head_dim),
            (kv_heads or heads, head_dim),
            (kv_heads or heads, value_dim or head_dim),
        )
    )
    with described_gpu(gpu):
        return pallas_flash.explain(q, k, v, **{"is_causal": True} | options)


def told(x) -> str:
    """The name of a test: the same in every process, without addresses and arrays."""
    if not isinstance(x, dict):
        return str(x)

    def short(value):
        known = isinstance(value, (bool, int, float, str))
        return value if known else getattr(value, "__name__", type(value).__name__)

    return ", ".join(f"{name} {short(value)}" for name, value in x.items())


def soft_sign(s, *at):
    """Its derivative takes a negative power, which Pallas has not in Mosaic GPU."""
    return s / (1 + jnp.abs(s))


IN_DERIVATIVE = "Pallas cannot lower `integer_pow` in the derivative of `score_mod` to Mosaic GPU."


OF_COLOURS = Predicate(
    lambda b, h, q, k, x: x[h] & (x[q] == x[k]) | (q // 3 > k), (jnp.ones(8192, bool),)
)


def blocks(length):
    """Return a full mask of blocks of 128 x 128 pairs."""
    return BlockMask(jnp.ones((1, 1, length // 128, length // 128), bool), 128, 128)


WITH_BIAS = 'A gradient of the bias comes with the backward of "triton": that for Hopper is not'
IN_ORDER = '"triton" computes the backward: the reproducible one for Hopper is not known'
SLOWER = '"triton" computes the backward: the one for Hopper is not known to be faster'


@pytest.mark.parametrize(
    ("options", "backward"),
    [
        (dict(), ""),
        (dict(gpu="NVIDIA H200"), ""),
        (dict(length=2048), ""),
        (dict(is_causal=False), ""),
        (dict(is_causal=False, length=2048), ""),
        (dict(length=512), ""),
        (dict(length=66), ""),
        (dict(length=66, head_dim=64), ""),
        (dict(length=128, head_dim=256, is_causal=False), ""),
        (dict(length=128, key_value_seq_lengths=jnp.ones(128, jnp.int32)), ""),
        (dict(length=256, local_window_size=9), ""),
        (dict(length=256, mask=jnp.ones((256, 256), bool)), ""),
        (dict(length=256, dropout_rate=0.1, dropout_key=jax.random.key(0)), ""),
        (dict(head_dim=80), ""),
        (dict(scale=2.0), ""),
        (dict(scale=jnp.float32(0.1)), ""),
        (dict(sinks=jnp.zeros(16)), ""),
        (dict(logits_soft_cap=3.0, sinks=jnp.zeros(16)), ""),
        (dict(logits_soft_cap=3.0, head_dim=64), ""),
        (dict(alibi_slopes=jnp.ones(8), head_dim=256), ""),
        (dict(dropout_rate=0.1, dropout_key=jax.random.key(0)), ""),
        (dict(dropout_rate=0.1, dropout_key=jax.random.key(0), length=512), ""),
        (dict(key_value_seq_lengths=jnp.ones(2, jnp.int32)), ""),
        (dict(local_window_size=9), ""),
        (dict(query_offset=jnp.int32(3)), ""),
        (dict(segment_ids=jnp.zeros((2, 8192), jnp.int32)), ""),
        (dict(head_dim=64), ""),
        (dict(head_dim=64, is_causal=False, length=2048), ""),
        (dict(head_dim=256), ""),
        (dict(head_dim=256, length=512), ""),
        (dict(head_dim=256, length=2048, is_causal=False), ""),
        (dict(head_dim=192), ""),
        (dict(head_dim=224, length=2048), ""),
        (dict(head_dim=192, value_dim=128), ""),
        (dict(head_dim=128, value_dim=64, reproducible=True), ""),
        (dict(reproducible=True), ""),
        (dict(reproducible=True, length=1024), ""),
        (dict(reproducible=True, head_dim=256), ""),
        (dict(reproducible=True, head_dim=64, logits_soft_cap=3.0), ""),
        (dict(reproducible=True, head_dim=64, mask=blocks(8192)), IN_ORDER),
        (dict(reproducible=False), ""),
        (dict(kv_heads=8), ""),
        (dict(kv_heads=4), ""),
        (dict(kv_heads=1), ""),
        (dict(kv_heads=1, tokens=8192), ""),
        (dict(kv_heads=1, tokens=4096, length=4096), ""),
        (dict(kv_heads=1, head_dim=64), ""),
        (dict(kv_heads=1, head_dim=64, tokens=8192), ""),
        # Few programs of the backward: 64 and 128, 32 and 128.
        (dict(tokens=512, length=512), ""),
        (dict(tokens=1024, length=1024), ""),
        # In clusters as few as were measured.
        (dict(tokens=512, length=512, head_dim=256), ""),
        (dict(tokens=2048, length=2048, head_dim=256), ""),
        (dict(tokens=2048, length=2048, head_dim=192, value_dim=128), ""),
        (dict(tokens=4096, length=4096, head_dim=256, kv_heads=1), ""),
        # Few queries of all heads and examples.
        (dict(tokens=4096, length=2048), ""),
        (dict(tokens=2048, length=2048), ""),
        (dict(tokens=1024, length=1024, is_causal=False), ""),
        (dict(tokens=512, length=512, head_dim=64), SLOWER),
        (dict(tokens=2048, length=2048, reproducible=True), IN_ORDER),
        (dict(dtype=jnp.float16), ""),
        (dict(scale=0.1), ""),
        (LENGTHS | dict(length=2048, head_dim=64), ""),
        (LENGTHS | dict(length=2048, head_dim=64, is_causal=False), ""),
        (dict(local_window_size=9, length=2048, head_dim=64), ""),
        (dict(local_window_size=9, logits_soft_cap=3.0, head_dim=256), ""),
        (dict(segment_ids=jnp.zeros((2, 8192), jnp.int32), head_dim=256), ""),
        (dict(mask=blocks(8192), head_dim=64), ""),
        (dict(bias=jnp.zeros((1, 1, 1, 8192))), WITH_BIAS),
        (dict(mask=OF_COLOURS), ""),
        (dict(mask=Chunked(64) | Chunked(96)), ""),
        (dict(mask=~Chunked(64), length=2048, head_dim=64), ""),
        # Positions that arrays tell.
        (dict(query_positions=jnp.zeros((1, 8192), jnp.int32)), ""),
        (dict(score_mod=lambda s, b, h, q, k: s + (q - k), head_dim=256), ""),
        (dict(segment_ids=jnp.zeros((8, 2048), jnp.int32), length=2048, head_dim=64), ""),
        (dict(mask=blocks(1024), length=1024), ""),
        (dict(bias=jnp.zeros((1, 1, 1, 8192), jnp.bfloat16)), ""),
        (dict(bias=jax.ShapeDtypeStruct((2, 16, 8192, 8192), jnp.bfloat16)), WITH_BIAS),
        (dict(bias=jnp.zeros((1, 1, 1, 8192), jnp.bfloat16), logits_soft_cap=3.0), WITH_BIAS),
        # An explicit implementation is used where it can be.
        (dict(head_dim=64, implementation="mosaic"), ""),
        (dict(length=128, tokens=128, implementation="mosaic"), ""),
        (dict(reproducible=True, implementation="mosaic"), ""),
        (dict(head_dim=32, implementation="mosaic"), ""),
        (dict(head_dim=136, implementation="mosaic"), ""),
        (dict(sinks=jnp.zeros(16), implementation="mosaic"), ""),
        (dict(bias=jnp.zeros((1, 1, 1, 1)), implementation="mosaic"), ""),
        (dict(score_mod=lambda s, *at: s * jnp.tanh(s), implementation="mosaic"), ""),
        (dict(score_mod=soft_sign, implementation="mosaic"), IN_DERIVATIVE),
    ],
    ids=told,
)
def test_the_kernels_for_hopper_serve_what_they_are_faster_at(newer_jax, options, backward):
    choice = on_hopper(**options)
    assert choice.implementation == "mosaic"
    assert backward in choice.reason
    assert ("backward" in choice.reason) == bool(backward)


@pytest.mark.parametrize(
    "options",
    [
        dict(head_dim=512),
        dict(head_dim=512, implementation="mosaic"),
        dict(head_dim=576, value_dim=512, kv_heads=1),
        dict(head_dim=128, value_dim=264, segment_ids=jnp.zeros((2, 8192), jnp.int32)),
        dict(head_dim=512, reproducible=True),
        dict(head_dim=512, bias=jnp.zeros((1, 1, 1, 8192))),
    ],
    ids=told,
)
def test_hopper_serves_the_forward_of_wide_heads(newer_jax, options):
    choice = on_hopper(**options)
    assert choice.implementation == "mosaic"
    assert '"xla" computes the backward: Got a head dim of' in choice.reason
    assert choice.reason.count("xla") == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(head_dim=584), "Got head dims of 584 and 584 (of values), and they serve up to 576"),
        (dict(value_dim=520), "Got head dims of 128 and 520 (of values), and they serve up to 576"),
        (dict(head_dim=512, length=16), "Got a head dim of 512 and 16 queries, and above 256 they"),
        (
            dict(head_dim=512, length=1, logits_soft_cap=5.0),
            "Got a head dim of 512 and one query, and",
        ),
    ],
    ids=told,
)
def test_wide_heads_that_hopper_does_not_serve(newer_jax, options, reason):
    choice = on_hopper(**options)
    assert choice.implementation == "xla"
    assert reason in choice.refused["mosaic"]


def decided(monkeypatch, **faster):
    """From now on these passes, with `_` for spaces, are known to be faster, or not."""

    def rule(call, rules=resolve.faster_by_mosaic):
        name = "backward" if call.backward else "forward"
        name += "_in_order" * call.deterministic + "_with_dbias" * call.dbias
        known = faster.get(name)
        return rules(call) if known is None else known

    monkeypatch.setattr(resolve, "faster_by_mosaic", rule)


def test_each_pass_is_chosen_by_its_own_times(newer_jax, monkeypatch):
    function = dict(score_mod=lambda s, b, h, q, k: s + (q - k), head_dim=64)
    choice = on_hopper(**function)
    assert choice.implementation == "triton"
    assert '"mosaic" computes the backward: it is faster.' in choice.reason
    assert "mosaic" not in on_hopper(implementation="triton", **function).reason
    assert "mosaic" not in on_hopper(gpu="NVIDIA A100-SXM4-80GB", **function).reason
    decided(monkeypatch, backward=False)
    assert "mosaic" not in on_hopper(**function).reason
    choice = on_hopper()
    assert choice.implementation == "mosaic"
    assert SLOWER in choice.reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(length=64), "not known to be faster"),
        (dict(length=66, head_dim=256), "not known to be faster"),
        (dict(length=64, head_dim=64), "not known to be faster"),
        (dict(tokens=1024, length=256, is_causal=False), "not known to be faster"),
        (dict(alibi_slopes=jnp.ones(32), head_dim=64, length=256), "not known to be faster"),
        (dict(tokens=512, length=512, is_causal=False), "not known to be faster"),
        (dict(tokens=512, length=512, head_dim=64, is_causal=False), "not known to be faster"),
        (dict(tokens=4096, length=4096, sinks=jnp.zeros(16)), "not known to be faster"),
        (dict(gpu="NVIDIA A100-SXM4-80GB"), "compute capability 9.0"),
        (dict(gpu="NVIDIA B200"), "compute capability 9.0"),
        (dict(gpu="NVIDIA Z900"), "compute capability 9.0"),
        (dict(dtype=jnp.float32), "Got float32"),
        (dict(head_dim=4), "Got head dims of 4 and 4 (of values), and they serve multiples of 8"),
        (dict(head_dim=32), "not known to be faster"),
        (dict(local_window_size=9, head_dim=256, length=512), "not known to be faster"),
        (
            dict(segment_ids=jnp.zeros((16, 1024), jnp.int32), length=1024, head_dim=64),
            "not known to be faster",
        ),
        (dict(mask=jnp.ones((128, 128), bool), length=128), "not known to be faster"),
        (dict(mask=blocks(2048), length=2048, head_dim=64), "not known to be faster"),
        (dict(bias=jnp.zeros((1, 1, 1, 1024)), length=1024), "not known to be faster"),
        (
            dict(score_mod=lambda s, b, h, q, k: s + (q - k), head_dim=64),
            "not known to be faster",
        ),
        (dict(mask=~Chunked(64), length=1024, head_dim=64), "not known to be faster"),
        (dict(config=TileSizes(forward=Tile(64, 64))), "The call gives tile sizes"),
        (
            dict(score_mod=lambda s, b, h, q, k: jnp.floor(s)),
            "Pallas cannot lower `floor` in `score_mod` to Mosaic GPU.",
        ),
        (
            dict(mask=Predicate(lambda b, h, q, k, x: x[q].astype(bool), (jnp.ones(8192),))),
            "Pallas cannot lower `convert_element_type` in `Predicate` to Mosaic GPU.",
        ),
        (
            dict(mask=Predicate(lambda b, h, q, k, x: x[q] > x[k], (jnp.ones(8192, jnp.int8),))),
            "Pallas cannot lower `gt` in `Predicate` to Mosaic GPU.",
        ),
        (dict(mask=OF_COLOURS, head_dim=64, length=512), "not known to be faster"),
    ],
    ids=told,
)
def test_other_calls_go_on_as_before(newer_jax, options, reason):
    choice = on_hopper(**options)
    assert choice.implementation == "triton"
    assert reason in choice.refused["mosaic"]


@pytest.mark.parametrize(
    ("flags", "reproducible"),
    [
        ("", False),
        ("--xla_gpu_deterministic_ops=true", True),
        ("--a=b --xla_gpu_exclude_nondeterministic_ops", True),
        ("--xla_gpu_deterministic_ops=false --a", False),
        ("--xla_gpu_deterministic_ops_of_another_kind=true", False),
    ],
)
def test_gradients_are_reproducible_where_xlas_are(newer_jax, monkeypatch, flags, reproducible):
    monkeypatch.setenv("XLA_FLAGS", flags)
    decided(monkeypatch, backward_in_order=False)
    assert (IN_ORDER in on_hopper().reason) == reproducible
    assert IN_ORDER not in on_hopper(reproducible=False).reason
    assert IN_ORDER in on_hopper(reproducible=True).reason


def test_an_older_jax_has_no_kernels_for_hopper(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    choice = on_hopper()
    assert choice.implementation == "triton"
    assert "in Mosaic GPU need JAX 0.11.2 or newer" in choice.refused["mosaic"]


def plan_of(**options):
    """Return the plan of a call of `on_hopper`."""
    plans = []

    def spied(*call, right=resolve.resolve):
        plans.append(right(*call))
        return plans[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "resolve", spied)
        on_hopper(**options)
    [plan] = plans
    return plan


def backwards(plan):
    """Return the backward's implementation without and with a gradient of the bias."""
    return plan.backward.implementation, plan.dbias.implementation


BIAS = dict(bias=jnp.zeros((1, 1, 1, 8192), jnp.bfloat16))


@pytest.mark.parametrize(
    ("options", "faster", "by"),
    [
        (BIAS, False, ("mosaic", "triton")),
        (BIAS, True, ("mosaic", "mosaic")),
        (BIAS | dict(reproducible=True), True, ("mosaic", "triton")),
        (BIAS | dict(implementation="mosaic"), False, ("mosaic", "mosaic")),
        (BIAS | dict(implementation="triton"), True, ("triton", "triton")),
        (BIAS | dict(dtype=jnp.float32), True, ("triton", "triton")),
        (BIAS | dict(config=TileSizes(dkv=BackwardTile(64, 2))), False, ("mosaic", "mosaic")),
        (BIAS | dict(config=TileSizes(dq=Tile(64, 64))), True, ("triton", "triton")),
        ({}, False, ("mosaic", "mosaic")),
    ],
    ids=told,
)
def test_the_gradient_of_a_bias_is_chosen_by_its_own_times(
    newer_jax, monkeypatch, options, faster, by
):
    decided(monkeypatch, backward_with_dbias=faster, backward_in_order_with_dbias=False)
    assert backwards(plan_of(**options)) == by
    sentence = "A gradient of the bias" in on_hopper(**options).reason
    assert sentence == (by[0] != by[1])


SLOPES = dict(alibi_slopes=jnp.ones(16))


@pytest.mark.parametrize(
    ("options", "tables", "tangents"),
    [
        (SLOPES, "triton", "triton"),
        (SLOPES | dict(implementation="triton"), "triton", "triton"),
        (SLOPES | dict(implementation="xla"), "xla", "xla"),
        (SLOPES | dict(config=TileSizes(dq=Tile(64, 32))), "triton", "triton"),
        (dict(alibi_slopes=jnp.ones(4), head_dim=512), "xla", "xla"),
    ],
    ids=told,
)
def test_plan_says_who_computes_tables_and_tangents(newer_jax, options, tables, tangents):
    plan = plan_of(**options)
    for x, by in (plan.tables, tables), (plan.tangents, tangents):
        assert x.implementation == by
        assert [*given_tiles(x.tiles)] == ["dq"] * (by == "triton")
        assert x.tiles == options.get("config", x.tiles)
    assert ("table_gradients" in on_hopper(**options).tiles) == (tables == "triton")


def test_a_gradient_of_the_bias_may_take_another_backward(newer_jax, monkeypatch):
    decided(monkeypatch, backward=False)
    assert backwards(plan_of(**BIAS)) == ("triton", "mosaic")
    reason = on_hopper(**BIAS).reason
    assert 'A gradient of the bias comes with the backward of "mosaic": it is faster.' in reason


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(reproducible=True),
        dict(length=128, tokens=128),
        dict(sinks=jnp.zeros(16)),
        dict(bias=jnp.zeros((1, 1, 1, 1))),
    ],
    ids=told,
)
def test_without_triton_hopper_has_its_kernels_still(no_triton, newer_jax, options):
    choice = on_hopper(**options)
    assert choice.implementation == "mosaic"
    assert "backward" not in choice.reason
    assert "has no Triton" in choice.refused["triton"]


def test_without_triton_hopper_decodes(no_triton, newer_jax):
    q, k = (jax.ShapeDtypeStruct((8, n, h, 128), jnp.bfloat16) for n, h in ((1, 32), (4096, 8)))
    lengths = jnp.ones(8, jnp.int32)
    with described_gpu("NVIDIA H200"):
        choice = pallas_flash.explain(q, k, k, key_value_seq_lengths=lengths)
    assert choice.implementation == "mosaic"


def test_without_triton_xla_has_the_backwards_that_hopper_has_not(no_triton, newer_jax):
    choice = on_hopper(score_mod=soft_sign)
    assert choice.implementation == "mosaic"
    assert '"xla" computes the backward' in choice.reason
