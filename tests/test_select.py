"""Which implementation serves a call: the choice, the reasons, the one warning.

And what must not be needed to import the package and to run it on a CPU.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import pytest
from described_gpus import described_gpu

import pallas_flash
from pallas_flash import BlockMask, Predicate, Tile, TileSizes, _api, _compat, _select, _vjp
from pallas_flash.mosaic import BackwardTile

# The oldest GPU that is served, the newest, and one that nobody has heard of.
SERVED = {
    "NVIDIA A100-SXM4-80GB": (8, 0),
    "NVIDIA A10G": (8, 6),
    "NVIDIA L4": (8, 9),
    "NVIDIA L40S": (8, 9),
    "NVIDIA GeForce RTX 3090": (8, 6),
    "NVIDIA GeForce RTX 4090": (8, 9),
    "NVIDIA GeForce RTX 5090": (12, 0),
    "NVIDIA H100 80GB HBM3": (9, 0),
    "NVIDIA H200": (9, 0),
    "NVIDIA GH200 480GB": (9, 0),
    "NVIDIA B200": (10, 0),
    "NVIDIA GB300": (10, 3),
    "NVIDIA Z900": None,
    # Workstation names count differently: this one is older than "RTX 40" says.
    "Quadro RTX 4000": None,
}
TOO_OLD = {
    "Tesla P100-PCIE-16GB": "6.0",
    "Tesla V100-SXM2-16GB": "7.0",
    "Tesla T4": "7.5",
    "NVIDIA GeForce RTX 2080 Ti": "7.5",
}

# What the kernels do not serve on any device, and a part of the reason.
LIMITS = {
    "head size": (lambda: {"query": array(8, 264), "key": array(8, 264)}, "a head size of 264"),
    "value size": (lambda: {"value": array(8, 264)}, "a head size of 264"),
}
# What they serve beyond the plain call.
OPTIONS = {
    "largest heads": lambda: dict.fromkeys(("query", "key", "value"), array(8, 256)),
    "bias": lambda: {"bias": jnp.zeros((8, 8))},
    "mask": lambda: {"mask": jnp.ones((8, 8), bool)},
    "mask object": lambda: {"mask": pallas_flash.PrefixLM(jnp.zeros(1, jnp.int32))},
    "soft cap": lambda: {"logits_soft_cap": 3.0},
    "sinks": lambda: {"sinks": jnp.zeros(2)},
    "slopes": lambda: {"alibi_slopes": jnp.zeros(2)},
    "score function": lambda: {"score_fn": lambda s, *at: s / 2},
    "dropout": lambda: {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
}


def array(length=8, size=16, dtype=jnp.float32):
    return jnp.ones((1, length, 2, size), dtype)


def inputs(**changed):
    return dict.fromkeys(("query", "key", "value"), array()) | changed


def explain(**changed):
    return pallas_flash.explain(**inputs(**changed))


def trace(**changed):
    """Traces `attention`, without compiling anything."""
    return jax.eval_shape(lambda x: pallas_flash.attention(**inputs(**changed)) + x, 0.0)


@pytest.fixture(autouse=True)
def no_warning_given_yet(monkeypatch):
    monkeypatch.setattr(_select, "_warned", set())


@pytest.fixture
def no_triton(monkeypatch):
    """A JAX without `jax.experimental.pallas.triton`, whether or not it was imported before."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    with contextlib.suppress(AttributeError):
        monkeypatch.delattr("jax.experimental.pallas.triton")
    _compat.triton.cache_clear()
    yield
    _compat.triton.cache_clear()


@pytest.fixture
def plans(monkeypatch):
    """The implementations that compute something."""
    used = []

    def spy(method):
        def call(plan, *args):
            used.append(plan.implementation)
            return method(plan, *args)

        return call

    monkeypatch.setattr(_vjp.Plan, "forward", spy(_vjp.Plan.forward))
    monkeypatch.setattr(_vjp.Plan, "backward", spy(_vjp.Plan.backward))
    return used


# ------------------------------------------------------------------------------------------------
# The automatic choice.


def test_a_cpu_is_served_by_xla():
    choice = explain()
    assert choice.implementation == "xla"
    assert "need an NVIDIA GPU, and the device is cpu" in choice.refused["triton"]


@pytest.mark.parametrize("gpu", SERVED)
def test_a_gpu_is_served_by_the_kernels(gpu):
    with described_gpu(gpu):
        assert explain().implementation == "triton"
        assert _select.target().capability == SERVED[gpu]
        assert _select.tile_capability("triton") == SERVED[gpu]
        assert _select.tile_capability("interpret") is None


@pytest.mark.parametrize("gpu", TOO_OLD)
def test_a_gpu_that_is_too_old_is_served_by_xla(gpu):
    with described_gpu(gpu):
        choice = explain()
    assert choice.implementation == "xla"
    assert f"{gpu} (described, not here) with {TOO_OLD[gpu]}." in choice.refused["triton"]


@pytest.mark.parametrize("platform", ["rocm", "tpu"])
def test_other_accelerators_are_served_by_xla(platform):
    with described_gpu("AMD MI300X", platform):
        assert explain().implementation == "xla"


@pytest.mark.parametrize("arguments", LIMITS)
def test_what_the_kernels_do_not_serve_goes_to_xla(arguments):
    arguments, reason = LIMITS[arguments]
    with described_gpu("NVIDIA H200"):
        choice = explain(**arguments())
    assert choice.implementation == "xla"
    assert reason in choice.refused["triton"]
    assert reason in choice.refused["interpret"]


@pytest.mark.parametrize("arguments", OPTIONS.values(), ids=OPTIONS)
def test_the_kernels_serve_every_option(plans, arguments):
    with described_gpu("NVIDIA H200"):
        assert explain(**arguments()).implementation == "triton"
        assert not fallbacks(lambda: trace(**arguments()))
    assert plans == ["triton"]
    trace(implementation="interpret", **arguments())
    assert plans == ["triton", "interpret"]


def test_float64_goes_to_xla():
    with jax.enable_x64(True), described_gpu("NVIDIA H200"):
        x = array(dtype=jnp.float64)
        choice = explain(query=x, key=x, value=x)
    assert choice.implementation == "xla"
    assert "float64" in choice.refused["triton"]


def test_all_reasons_are_given_at_once():
    with described_gpu("Tesla V100"), jax.enable_x64(True):
        x = array(8, 264, jnp.float64)
        refused = explain(query=x, key=x, value=x).refused["triton"]
    assert all(part in refused for part in ("with 7.0.", "float64", "a head size of 264"))


@pytest.mark.parametrize(
    "default", [lambda: "cpu", lambda: jax.devices("cpu")[0]], ids=["name", "device"]
)
def test_the_default_device_decides(default, monkeypatch):
    with jax.default_device(default()):
        assert _select.target() == ("cpu", False, None, True)
        assert explain().implementation == "xla"


class FakeGpu:
    """What `target` asks of a device that is here."""

    platform, device_kind, compute_capability = "gpu", "NVIDIA H100", "9.0"

    class client:
        platform_version = "PJRT C API\ncuda 13000"


def test_a_device_that_is_here_tells_its_own_capability(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [FakeGpu()])
    assert _select.target() == ("NVIDIA H100", True, (9, 0), True)
    monkeypatch.setattr(FakeGpu, "compute_capability", "12.1")
    assert _select.target().capability == (12, 1)
    monkeypatch.setattr(FakeGpu.client, "platform_version", "rocm 60300")
    assert _select.target() == ("NVIDIA H100", False, None, True)


def test_so_does_one_that_a_mesh_describes(monkeypatch):
    """As inside of `jax.set_mesh`; the table of names lacks many a GPU."""
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [FakeGpu()])
    monkeypatch.setattr(FakeGpu, "device_kind", "NVIDIA RTX A6000")
    monkeypatch.setattr(FakeGpu, "compute_capability", "8.6")
    with described_gpu("NVIDIA RTX A6000"):
        assert _select.target() == ("NVIDIA RTX A6000", True, (8, 6), True)
        assert explain().implementation == "triton"
    with described_gpu("NVIDIA H100"):
        assert _select.target() == ("NVIDIA H100 (described, not here)", True, (9, 0), False)


# ------------------------------------------------------------------------------------------------
# The kernels for Hopper.


@pytest.fixture
def newer_jax(monkeypatch):
    monkeypatch.setattr(_compat, "has_mosaic_gpu", lambda: True)


LENGTHS = dict.fromkeys(
    ("query_seq_lengths", "key_value_seq_lengths"), jax.ShapeDtypeStruct((8,), jnp.int32)
)


def on_hopper(
    length=8192,
    head_dim=128,
    tokens=16384,
    kv_heads=None,
    dtype=jnp.bfloat16,
    gpu="NVIDIA H100 80GB HBM3",
    **options,
):
    """`explain` for a call of width 2048."""
    heads = 2048 // head_dim
    q, k = (
        jax.ShapeDtypeStruct((tokens // length, length, n, head_dim), dtype)
        for n in (heads, kv_heads or heads)
    )
    with described_gpu(gpu):
        return pallas_flash.explain(q, k, k, **{"is_causal": True} | options)


def told(x) -> str:
    """The name of a test: the same in every process, without addresses and arrays."""
    if not isinstance(x, dict):
        return str(x)

    def short(value):
        known = isinstance(value, (bool, int, float, str))
        return value if known else getattr(value, "__name__", type(value).__name__)

    return ", ".join(f"{name} {short(value)}" for name, value in x.items())


def remainder(s, *at):
    """Its derivative takes an operation that it does not take itself."""
    return jax.lax.rem(0 * s + 1, s)


WITH_BIAS = 'A gradient of the bias comes with the backward of "triton": that for Hopper is not'
IN_ORDER = 'The backward is that of "triton": the reproducible one for Hopper is not known'
SLOWER = 'The backward is that of "triton": the one for Hopper is not known to be faster'


@pytest.mark.parametrize(
    ("options", "backward"),
    [
        (dict(), ""),
        (dict(gpu="NVIDIA H200"), ""),
        (dict(length=2048), ""),
        (dict(is_causal=False), ""),
        (dict(is_causal=False, length=2048), ""),
        (dict(length=512), ""),
        (dict(head_dim=80), ""),
        (dict(scale=2.0), ""),
        (dict(scale=jnp.float32(0.1)), ""),
        (dict(sinks=jnp.zeros(16)), ""),
        (dict(logits_soft_cap=3.0, sinks=jnp.zeros(16)), ""),
        (dict(logits_soft_cap=3.0, head_dim=64), ""),
        (dict(alibi_slopes=jnp.ones(8), head_dim=256), ""),
        (dict(dropout_rate=0.1, dropout_key=jax.random.key(0)), ""),
        (dict(key_value_seq_lengths=jnp.ones(2, jnp.int32)), ""),
        (dict(local_window_size=9), ""),
        (dict(query_offset=jnp.int32(3)), ""),
        (dict(segment_ids=jnp.zeros((2, 8192), jnp.int32)), ""),
        (dict(head_dim=64), ""),
        (dict(head_dim=64, is_causal=False, length=2048), ""),
        (dict(head_dim=256), ""),
        (dict(head_dim=256, length=1024), SLOWER),
        (dict(head_dim=256, length=2048, is_causal=False), ""),
        (dict(head_dim=192), SLOWER),
        (dict(reproducible=True), ""),
        (dict(reproducible=True, length=1024), ""),
        (dict(reproducible=True, head_dim=256), IN_ORDER),
        (dict(reproducible=False), ""),
        (dict(kv_heads=8), ""),
        (dict(kv_heads=4), ""),
        (dict(kv_heads=1), SLOWER),
        (dict(kv_heads=1, head_dim=64), ""),
        (dict(kv_heads=1, head_dim=64, tokens=8192), SLOWER),
        (dict(dtype=jnp.float16), ""),
        (dict(scale=0.1), ""),
        (LENGTHS | dict(length=2048, head_dim=64), ""),
        (LENGTHS | dict(length=2048, head_dim=64, is_causal=False), ""),
        (dict(local_window_size=9, length=2048, head_dim=64), ""),
        (dict(segment_ids=jnp.zeros((8, 2048), jnp.int32), length=2048, head_dim=64), ""),
        # The forward alone is known to be faster.
        (dict(mask=jnp.ones((2048, 2048), bool), length=2048, head_dim=64), SLOWER),
        (dict(bias=jnp.zeros((1, 1, 1, 8192), jnp.bfloat16)), ""),
        (dict(bias=jax.ShapeDtypeStruct((2, 16, 8192, 8192), jnp.bfloat16)), WITH_BIAS),
        (dict(bias=jnp.zeros((1, 1, 1, 8192), jnp.bfloat16), logits_soft_cap=3.0), WITH_BIAS),
        # What is asked for is used where it can be.
        (dict(head_dim=64, implementation="mosaic"), ""),
        (dict(length=128, tokens=128, implementation="mosaic"), ""),
        (dict(reproducible=True, implementation="mosaic"), ""),
        (dict(head_dim=32, implementation="mosaic"), ""),
        (dict(head_dim=136, implementation="mosaic"), ""),
        (dict(sinks=jnp.zeros(16), implementation="mosaic"), ""),
        (dict(bias=jnp.zeros((1, 1, 1, 1)), implementation="mosaic"), ""),
        (dict(score_fn=lambda s, *at: s * jnp.tanh(s), implementation="mosaic"), ""),
        (dict(score_fn=remainder, implementation="mosaic"), "uses floor, which Pallas has not"),
    ],
    ids=told,
)
def test_the_kernels_for_hopper_serve_what_they_are_faster_at(newer_jax, options, backward):
    choice = on_hopper(**options)
    assert choice.implementation == "mosaic"
    assert backward in choice.reason
    assert ("backward" in choice.reason) == bool(backward)


def test_each_pass_is_chosen_by_its_own_times(newer_jax, monkeypatch):
    dropout = dict(dropout_rate=0.1, dropout_key=jax.random.key(0), head_dim=64)
    choice = on_hopper(**dropout)
    assert choice.implementation == "triton"
    assert 'The backward is that of "mosaic": it is faster.' in choice.reason
    assert "mosaic" not in on_hopper(implementation="triton", **dropout).reason
    assert "mosaic" not in on_hopper(gpu="NVIDIA A100-SXM4-80GB", **dropout).reason
    monkeypatch.setitem(_select.FASTER_BY_MOSAIC, "backward", {})
    assert "mosaic" not in on_hopper(**dropout).reason
    choice = on_hopper()
    assert choice.implementation == "mosaic"
    assert SLOWER in choice.reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(length=256), "not known to be faster"),
        (dict(length=256, head_dim=64), "not known to be faster"),
        (dict(tokens=4096, length=2048), "not known to be faster"),
        (dict(gpu="NVIDIA A100-SXM4-80GB"), "compute capability 9.0"),
        (dict(gpu="NVIDIA B200"), "compute capability 9.0"),
        (dict(gpu="NVIDIA Z900"), "compute capability 9.0"),
        (dict(dtype=jnp.float32), "Got float32"),
        (dict(head_dim=4), "Got head sizes of 4 and 4 (of values), and they serve multiples of 8"),
        (dict(head_dim=32), "not known to be faster"),
        (dict(local_window_size=9, head_dim=256), "not known to be faster"),
        (dict(local_window_size=9, logits_soft_cap=3.0, head_dim=256), "not known to be faster"),
        (dict(segment_ids=jnp.zeros((4, 4096), jnp.int32), length=4096), "not known to be faster"),
        (dict(segment_ids=jnp.zeros((2, 8192), jnp.int32), head_dim=256), "not known to be faster"),
        (dict(mask=jnp.ones((1024, 1024), bool), length=1024), "not known to be faster"),
        (dict(mask=BlockMask(jnp.ones((1, 1, 64, 64), bool), 128, 128)), "not known to be faster"),
        (dict(bias=jnp.zeros((1, 1, 1, 8192))), "not known to be faster"),
        (
            dict(dropout_rate=0.1, dropout_key=jax.random.key(0), head_dim=64),
            "not known to be faster",
        ),
        (dict(tile_sizes=TileSizes(forward=Tile(64, 64))), "The call gives tile sizes"),
        (
            dict(score_fn=lambda s, b, h, q, k: jnp.floor(jax.nn.relu(s))),
            "score function uses custom_jvp_call, floor, which Pallas has not in Mosaic GPU.",
        ),
        (
            dict(mask=Predicate(lambda b, h, q, k, x: x[q].astype(bool), (jnp.ones(8192),))),
            "uses astype(bool), which",
        ),
        (
            dict(mask=Predicate(lambda b, h, q, k, x: x[q] > x[k], (jnp.ones(8192, jnp.int8),))),
            "gt in 8 bits, which",
        ),
        (
            dict(
                mask=Predicate(
                    lambda b, h, q, k, x: x[h] & (x[q] == x[k]) | (q // 3 > k),
                    (jnp.ones(8192, bool),),
                )
            ),
            "not known to be faster",
        ),
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
    monkeypatch.setitem(_select.FASTER_BY_MOSAIC, "backward in order", {})
    assert (IN_ORDER in on_hopper().reason) == reproducible
    assert IN_ORDER not in on_hopper(reproducible=False).reason
    assert IN_ORDER in on_hopper(reproducible=True).reason


def test_an_older_jax_has_no_kernels_for_hopper(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    choice = on_hopper()
    assert choice.implementation == "triton"
    assert "in Mosaic GPU need JAX 0.11.2 or newer" in choice.refused["mosaic"]


# Tiles are checked by the kernels' own modules, which an older JAX cannot import.
needs_mosaic = pytest.mark.skipif(not _compat.has_mosaic_gpu(), reason="JAX is too old")


def plan_of(**options):
    """Who computes the backward without and with a gradient of the bias."""
    plans = []

    def spied(self, problem, choice, tiles, plan=_api._Wishes.plan):
        plans.append(plan(self, problem, choice, tiles))
        return plans[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_api._Wishes, "plan", spied)
        on_hopper(**options)
    [plan] = plans
    return plan.backward_by, plan.with_bias_by or plan.backward_by


BIAS = dict(bias=jnp.zeros((1, 1, 1, 8192), jnp.bfloat16))
FASTER = {(128, "causal"): 0, (128, "bias in 16 bits"): 0}


@pytest.mark.parametrize(
    ("options", "table", "by"),
    [
        (BIAS, {}, ("mosaic", "triton")),
        (BIAS, FASTER, ("mosaic", "mosaic")),
        (BIAS, {(128, "causal"): 0}, ("mosaic", "triton")),
        (BIAS | dict(reproducible=True), FASTER, ("mosaic", "triton")),
        (BIAS | dict(implementation="mosaic"), {}, ("mosaic", "mosaic")),
        (BIAS | dict(implementation="triton"), FASTER, ("triton", "triton")),
        (BIAS | dict(dtype=jnp.float32), FASTER, ("triton", "triton")),
        pytest.param(BIAS | dict(tile_sizes=TileSizes(dkv=BackwardTile(64, 2))), {},
                     ("mosaic", "mosaic"), marks=needs_mosaic),
        (BIAS | dict(tile_sizes=TileSizes(dq=Tile(64, 64))), FASTER, ("triton", "triton")),
        ({}, {(128, "causal"): 0}, ("mosaic", "mosaic")),
    ],
    ids=told,
)  # fmt: skip
def test_the_gradient_of_a_bias_is_chosen_by_its_own_times(
    newer_jax, monkeypatch, options, table, by
):
    monkeypatch.setitem(_select.FASTER_BY_MOSAIC, "backward with dbias", table)
    monkeypatch.setitem(_select.FASTER_BY_MOSAIC, "backward in order with dbias", {})
    assert plan_of(**options) == by
    sentence = "A gradient of the bias" in on_hopper(**options).reason
    assert sentence == (by[0] != by[1])


def test_a_gradient_of_the_bias_may_take_another_backward(newer_jax, monkeypatch):
    monkeypatch.setitem(_select.FASTER_BY_MOSAIC, "backward", {})
    assert plan_of(**BIAS) == ("triton", "mosaic")
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
    choice = on_hopper(score_fn=remainder)
    assert choice.implementation == "mosaic"
    assert 'The backward is that of "xla"' in choice.reason


# ------------------------------------------------------------------------------------------------
# A JAX without Triton.


def test_without_triton_a_gpu_is_served_by_xla(no_triton):
    with described_gpu("NVIDIA H200"):
        choice = explain()
    assert choice.implementation == "xla"
    assert f"This JAX ({jax.__version__}) has no Triton" in choice.refused["triton"]


@pytest.mark.parametrize("implementation", ["triton", "interpret"])
def test_without_triton_the_kernels_are_refused_by_name(no_triton, implementation):
    with (
        described_gpu("NVIDIA H200"),
        pytest.raises(NotImplementedError, match=r'has no Triton .* Use "xla"'),
    ):
        trace(implementation=implementation)


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_without_triton_the_others_work_on_a_cpu(no_triton, implementation):
    o = pallas_flash.attention(**inputs(), implementation=implementation)
    assert o.shape == (1, 8, 2, 16)


def test_triton_comes_back(no_triton, monkeypatch):
    assert not _compat.has_triton()
    monkeypatch.undo()
    assert _compat.has_triton()


# ------------------------------------------------------------------------------------------------
# The warning.


def fallbacks(call):
    """The warnings of `call`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return caught


@pytest.mark.parametrize("arguments", LIMITS)
def test_falling_back_on_a_gpu_warns_once(arguments):
    arguments, reason = LIMITS[arguments]
    with described_gpu("NVIDIA H200"):
        [warning] = fallbacks(lambda: trace(**arguments()))
        assert not fallbacks(lambda: trace(**arguments()))
    assert reason in str(warning.message)
    assert str(warning.message).startswith(
        'pallas_flash.attention falls back to the slower "xla": '
    )
    assert warning.filename == __file__


def test_each_reason_has_its_warning():
    with described_gpu("NVIDIA H200"):
        for size in (264, 272):
            arguments = {"value": array(8, size)}
            assert len(fallbacks(lambda arguments=arguments: trace(**arguments))) == 1
            assert not fallbacks(lambda arguments=arguments: trace(**arguments))


def test_an_old_gpu_and_a_jax_without_triton_warn_too(request):
    with described_gpu("Tesla V100"):
        [warning] = fallbacks(trace)
    assert "compute capability 8.0" in str(warning.message)
    request.getfixturevalue("no_triton")
    with described_gpu("NVIDIA H200"):
        [warning] = fallbacks(trace)
    assert "has no Triton" in str(warning.message)


def test_nothing_falls_back_where_there_is_no_nvidia_gpu():
    for arguments, _ in LIMITS.values():
        assert not fallbacks(lambda arguments=arguments: trace(**arguments()))


def test_what_is_asked_for_is_no_fallback():
    with described_gpu("Tesla V100"):
        for implementation in ("xla", "reference", "interpret"):
            assert not fallbacks(
                lambda implementation=implementation: trace(implementation=implementation)
            )


def test_explain_does_not_warn_and_leaves_the_warning_to_the_call():
    with described_gpu("Tesla V100"):
        assert not fallbacks(explain)
        assert len(fallbacks(trace)) == 1


# ------------------------------------------------------------------------------------------------
# Reasons.


@pytest.mark.parametrize(
    ("gpu", "asked"),
    [
        *itertools.product(
            ["NVIDIA H200"], [None, *(x for x in _select.IMPLEMENTATIONS if x != "mosaic")]
        ),
        *itertools.product(["Tesla V100", None], [None, "interpret", "xla", "reference"]),
    ],
)
def test_explain_gives_a_reason_for_the_chosen_and_for_each_refused(gpu, asked):
    with described_gpu(gpu) if gpu else contextlib.nullcontext():
        choice = explain(implementation=asked)
    assert asked in (None, choice.implementation)
    assert {choice.implementation, *choice.refused} == set(_select.IMPLEMENTATIONS)
    assert choice.implementation not in choice.refused
    for reason in choice.refused.values():
        assert reason.endswith(".")
        assert "  " not in reason
    assert str(choice).splitlines() == [
        f"{choice.implementation}: {choice.reason}",
        *(f"  not {name}: {reason}" for name, reason in choice.refused.items()),
    ]


def test_explain_takes_shapes_in_place_of_arrays():
    arguments = inputs(
        query_seq_lengths=jnp.ones(1, jnp.int32),
        query_offset=jnp.zeros(1, jnp.int32),
        mask=pallas_flash.PrefixLM(jnp.ones(1, jnp.int32)),
        bias=jnp.zeros((8, 1)),
        sinks=jnp.zeros(2),
        dropout_key=jax.random.key(0),
    )
    shapes = jax.eval_shape(lambda: arguments)
    for implementation in (None, "interpret"):
        given = dict(implementation=implementation, dropout_rate=0.5)
        want = pallas_flash.explain(**arguments | given)
        assert pallas_flash.explain(**shapes | given) == want
        assert pallas_flash.explain(**arguments | {"query": shapes["query"]} | given) == want
    wrong = shapes | {"key": jax.ShapeDtypeStruct((1, 8, 3, 16), jnp.float32)}
    with pytest.raises(ValueError, match="heads"):
        pallas_flash.explain(**wrong)


def test_explain_computes_nothing(plans):
    explain(implementation="interpret")
    explain()
    assert not plans


# ------------------------------------------------------------------------------------------------
# An explicit choice is used, forward and backward.


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "Tesla V100", None])
@pytest.mark.parametrize("asked", ["xla", "interpret"])
def test_what_is_asked_for_runs(plans, gpu, asked):
    def loss(query):
        return pallas_flash.attention(**inputs(query=query), implementation=asked).sum()

    with described_gpu(gpu) if gpu else contextlib.nullcontext():
        jax.eval_shape(jax.grad(loss), array())
    assert plans == [asked, asked]


def test_the_kernels_run_on_a_gpu_asked_for_or_not(plans):
    with described_gpu("NVIDIA H200"):
        trace(implementation="triton")
        trace()
    assert plans == ["triton", "triton"]


def test_the_reference_runs_no_plan(plans):
    trace(implementation="reference")
    assert plans == []


def test_tile_sizes_are_ignored_only_where_the_choice_is_automatic():
    sizes = TileSizes(forward=Tile(16, 16))
    trace(tile_sizes=sizes)
    with pytest.raises(ValueError, match="`tile_sizes` must be None where no kernel takes them"):
        trace(tile_sizes=sizes, implementation="xla")


# ------------------------------------------------------------------------------------------------
# What importing and running the package must not need.


def run_without(modules: list[str], code: str) -> None:
    """Runs `code` in a process in which these modules cannot be imported."""
    block = f"""
        import sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if any(name == m or name.startswith(m + ".") for m in {modules}):
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Missing())
        """
    subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(block) + textwrap.dedent(code)],
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=300,
    )


def test_neither_triton_nor_flax_nor_an_initialised_device_is_needed_to_import():
    run_without(
        ["jax.experimental.pallas", "flax", "optax"],
        """
        import pallas_flash
        from jax._src import xla_bridge

        assert not xla_bridge.backends_are_initialized()
        """,
    )


def test_pallas_is_not_needed_to_compute_on_a_cpu():
    run_without(
        ["jax.experimental.pallas", "flax", "optax"],
        """
        import jax, jax.numpy as jnp, pallas_flash

        x = jnp.ones((1, 8, 2, 4))
        loss = lambda x: pallas_flash.attention(x, x, x, is_causal=True).sum()
        assert jax.grad(loss)(x).shape == x.shape
        print(pallas_flash.explain(x, x, x))
        """,
    )


def test_nor_is_it_looked_for_there():
    code = """
        import sys
        import jax.numpy as jnp, pallas_flash

        x = jnp.ones((1, 8, 2, 4))
        pallas_flash.attention(x, x, x)
        assert "jax.experimental.pallas" not in sys.modules
        pallas_flash.explain(x, x, x, implementation="interpret")
        assert "jax.experimental.pallas" in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_mask_whose_indices_do_not_fit_is_refused():
    """Between 2^31 elements and 2^32 bytes; below and above, JAX's indices are wide enough."""

    def reason(length, kv_length=None):
        refused = {}

        def call(q, k, mask):
            found = pallas_flash.explain(q, k, k, mask=mask, implementation="xla").refused
            refused.update(found)

        lengths = length, kv_length or length
        q, k = (jax.ShapeDtypeStruct((1, n, 1, 16), jnp.bfloat16) for n in lengths)
        jax.eval_shape(call, q, k, jax.ShapeDtypeStruct(lengths, jnp.bool_))
        return refused["interpret"]

    assert "4294967296 elements" in reason(2**16)
    assert "elements" not in reason(2**15)
    assert "elements" not in reason(2**15, 2**16)
    assert "elements" not in reason(2**17)
