"""Which implementation serves a call: the choice, the reasons, the one warning.

And what must not be needed to import the package and to run it on a CPU.
"""

import contextlib
import itertools
import os
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from support import children
from support.described_gpus import described_gpu
from support.select_fixtures import no_warning_given_yet, without_triton  # noqa: F401  Tests name them by their arguments.

import pallas_flash
from pallas_flash._execution import limits
from pallas_flash._execution.plan import Plan
from pallas_flash._jax import compat, device
from pallas_flash.tuning import Tile, TileSizes

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

# Calls that the kernels do not serve on any device, and a part of the reason.
LIMITS = {
    "head dim": (lambda: {"query": array(8, 264), "key": array(8, 264)}, "a head dim of 264"),
    "value size": (lambda: {"value": array(8, 264)}, "a head dim of 264"),
}
# Calls that they serve beyond the plain one.
OPTIONS = {
    "largest heads": lambda: dict.fromkeys(("query", "key", "value"), array(8, 256)),
    "bias": lambda: {"bias": jnp.zeros((8, 8))},
    "mask": lambda: {"mask": jnp.ones((8, 8), bool)},
    "mask object": lambda: {"mask": pallas_flash.masks.PrefixLM(jnp.zeros(1, jnp.int32))},
    "soft cap": lambda: {"logits_soft_cap": 3.0},
    "sinks": lambda: {"sinks": jnp.zeros(2)},
    "slopes": lambda: {"alibi_slopes": jnp.zeros(2)},
    "score function": lambda: {"score_mod": lambda s, *at: s / 2},
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


@pytest.fixture
def plans(monkeypatch):
    """The implementations that compute something."""
    used = []

    def spy(method):
        def call(plan, *args):
            used.append(plan.implementation)
            return method(plan, *args)

        return call

    monkeypatch.setattr(Plan, "run_forward", spy(Plan.run_forward))
    monkeypatch.setattr(Plan, "run_backward", spy(Plan.run_backward))
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
        assert device.target().capability == SERVED[gpu]
        assert device.tile_capability("triton") == SERVED[gpu]
        assert device.tile_capability("interpret") is None


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
    assert all(part in refused for part in ("with 7.0.", "float64", "a head dim of 264"))


@pytest.mark.parametrize(
    "default", [lambda: "cpu", lambda: jax.devices("cpu")[0]], ids=["name", "device"]
)
def test_the_default_device_decides(default, monkeypatch):
    with jax.default_device(default()):
        assert device.target() == ("cpu", False, None, True)
        assert explain().implementation == "xla"


class FakeGpu:
    """The attributes that `target` reads of a device that is here."""

    platform, device_kind, compute_capability = "gpu", "NVIDIA H100", "9.0"

    class client:
        platform_version = "PJRT C API\ncuda 13000"


def test_a_device_that_is_here_tells_its_own_capability(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [FakeGpu()])
    assert device.target() == ("NVIDIA H100", True, (9, 0), True)
    monkeypatch.setattr(FakeGpu, "compute_capability", "12.1")
    assert device.target().capability == (12, 1)
    monkeypatch.setattr(FakeGpu.client, "platform_version", "rocm 60300")
    assert device.target() == ("NVIDIA H100", False, None, True)


def test_so_does_one_that_a_mesh_describes(monkeypatch):
    """As inside of `jax.set_mesh`; the table of names lacks many a GPU."""
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [FakeGpu()])
    monkeypatch.setattr(FakeGpu, "device_kind", "NVIDIA RTX A6000")
    monkeypatch.setattr(FakeGpu, "compute_capability", "8.6")
    with described_gpu("NVIDIA RTX A6000"):
        assert device.target() == ("NVIDIA RTX A6000", True, (8, 6), True)
        assert explain().implementation == "triton"
    with described_gpu("NVIDIA H100"):
        assert device.target() == ("NVIDIA H100 (described, not here)", True, (9, 0), False)


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
    assert not compat.has_triton()
    monkeypatch.undo()
    assert compat.has_triton()


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
            ["NVIDIA H200"], [None, *(x for x in limits.IMPLEMENTATIONS if x != "mosaic")]
        ),
        *itertools.product(["Tesla V100", None], [None, "interpret", "xla", "reference"]),
    ],
)
def test_explain_gives_a_reason_for_the_chosen_and_for_each_refused(gpu, asked):
    with described_gpu(gpu) if gpu else contextlib.nullcontext():
        choice = explain(implementation=asked)
    assert asked in (None, choice.implementation)
    assert {choice.implementation, *choice.refused} == set(limits.IMPLEMENTATIONS)
    assert choice.implementation not in choice.refused
    assert bool(choice.tiles) == (choice.implementation in ("triton", "interpret"))
    for reason in choice.refused.values():
        assert reason.endswith(".")
        assert "  " not in reason
    assert str(choice).splitlines() == [
        f"{choice.implementation}: {choice.reason}",
        *(f"  {kernel}: {tile}" for kernel, tile in choice.tiles.items()),
        *(f"  not {name}: {reason}" for name, reason in choice.refused.items()),
    ]


def test_explain_takes_shapes():
    arguments = inputs(
        query_seq_lengths=jnp.ones(1, jnp.int32),
        query_offset=jnp.zeros(1, jnp.int32),
        mask=pallas_flash.masks.PrefixLM(jnp.ones(1, jnp.int32)),
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
    trace(config=sizes)
    with pytest.raises(ValueError, match="`config` must be None where no kernel has tiles"):
        trace(config=sizes, implementation="xla")


# ------------------------------------------------------------------------------------------------
# What importing and running the package must not need.

# One process for all: to start JAX takes longer than the rest.
NEEDS_LITTLE = """
import sys

import pallas_flash
from jax._src import xla_bridge

assert not xla_bridge.backends_are_initialized()
OPTIONAL = ["jax.experimental.pallas", "flax", "optax", "matplotlib"]


def imported():
    return [name for name in OPTIONAL if name in sys.modules]


assert not imported(), imported()


class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(name == m or name.startswith(m + ".") for m in OPTIONAL):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
import jax, jax.numpy as jnp

x = jnp.ones((1, 8, 2, 4))
loss = lambda x: pallas_flash.attention(x, x, x, is_causal=True).sum()
assert jax.grad(loss)(x).shape == x.shape
print(pallas_flash.explain(x, x, x))
assert not imported(), imported()
try:
    import pallas_flash.flax
except ModuleNotFoundError as error:
    assert error.name == "flax" and "run pip install 'pallas-flash[flax]', or" in str(error), error
else:
    raise AssertionError("it was imported without Flax")
del sys.meta_path[0]
pallas_flash.explain(x, x, x, implementation="interpret")
assert imported() == ["jax.experimental.pallas"]
"""


def test_importing_and_computing_on_a_cpu_need_jax_alone():
    """No device is touched by the import; Pallas, Flax and matplotlib may be absent."""
    children.run(
        [sys.executable, "-W", "error", "-c", NEEDS_LITTLE],
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=300,
    )


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
