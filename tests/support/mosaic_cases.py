"""Problems for the kernels for Hopper, and their results on a CPU: their Python, emulated.

The emulator runs copies and products as late as it may, so that a wait too few shows: see
test_mosaic_emulator.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle
from support import mosaic_emulator as emulator
from support.cases import checked
from support.judge import judge

from pallas_flash._autodiff.vjp import public_rows, splits_output
from pallas_flash._execution.plan import Wanted
from pallas_flash._jax import compat
from pallas_flash._problem.features import features_of
from pallas_flash._problem.tile_sizes import filled

# JAX 0.10.2 has not the operations that the kernels use, and who imports this is skipped there: on
# the others, which have them, .ci/run tests these files, too.
if not compat.has_mosaic_gpu():
    pytest.skip("JAX is too old; test_select_hopper has what is said then", allow_module_level=True)

from pallas_flash._backends import mosaic
from pallas_flash._backends.mosaic import scheduler, tiles
from pallas_flash.tuning import TileSizes

TABLE = TileSizes()  # Every tile from the table.
NO_FLAGS = dict(want_scale=False, want_bias=False, want_sinks=False)


def run_forward(call, sizes=TABLE):
    """The forward with these tiles, and the rest from the table."""
    return mosaic.forward(call, filled(sizes, tiles.default(call, features_of(call))))


TWO_PASSES = "two passes"


def run_backward(call, *arrays, sizes=TABLE, in_order, **flags):
    """The backward with these tiles, and the rest from the table."""
    sizes = filled(sizes, tiles.default(call, features_of(call)))
    if in_order == TWO_PASSES:
        sizes = dataclasses.replace(sizes, backward=None)
    in_order = bool(in_order) or sizes.backward is None
    return mosaic.backward(call, *arrays, sizes, in_order=in_order, **flags)


def emulated(problem, in_order=False, sizes=TABLE, **others):
    """The results that `oracle.names` names."""
    qkv, (do, dlse), options = problem
    call = checked(qkv, options)
    wanted = {name: getattr(call, name) is not None for name in oracle.OPERANDS}
    call = dataclasses.replace(call, split_output=splits_output(call, Wanted(**wanted)))
    flags = NO_FLAGS | {f"want_{name}": x for name, x in wanted.items()} | dict(in_order=in_order)
    flags |= others
    with emulator.emulated(pytest.MonkeyPatch()), jax.numpy_rank_promotion("raise"):
        o, log_sum = run_forward(call, sizes)
        gradients = run_backward(call, o, log_sum, do, dlse, sizes=sizes, **flags)
    names = "query", "key", "value", *(name for name, x in wanted.items() if x)
    o, *_ = jax.tree.leaves(o)
    return [o, *public_rows(log_sum), *(getattr(gradients, name) for name in names)]


def gradient_of_the_scale(problem, in_order):
    qkv, (do, dlse), options = problem
    call = checked(qkv, options | dict(scale=jnp.float32(0.7)))
    call = dataclasses.replace(call, split_output=True)
    flags = NO_FLAGS | dict(want_scale=True, in_order=in_order)
    with emulator.emulated(pytest.MonkeyPatch()):
        o, log_sum = run_forward(call)
        return run_backward(call, o, log_sum, do, dlse, **flags).scale


def on_sms(patch, count):
    """As on a GPU with so many SMs."""
    patch.setattr(scheduler, "NUM_SMS", count)
    # It remembers schedules for other GPUs.
    static_schedule = getattr(scheduler.static_schedule, "__wrapped__", scheduler.static_schedule)
    patch.setattr(scheduler, "static_schedule", static_schedule)


def with_heads(case, size, **sizes):
    return dataclasses.replace(case, H=size, V=size, **sizes)


# More than one tile of keys and of queries, so that slots are used again.
LONG = cases.Case("long", B=1, T=300, S=400, N=2, K=1, H=64, V=64)
# More tiles of keys than the forward has slots; of fewer queries than keys it would be another one.
MANY_KEYS = dataclasses.replace(LONG, T=601, S=600, N=1)
LONG_CAUSAL = dataclasses.replace(
    LONG, options=lambda random, case: dict(is_causal=True, query_offset=-20)
)
BACKWARDS, IDS = [False, True, TWO_PASSES], ["one-pass", "in-order", "two-passes"]
every_backward = pytest.mark.parametrize("in_order", BACKWARDS, ids=IDS)
in_order = pytest.mark.parametrize("in_order", cases.default(BACKWARDS[:2], BACKWARDS), ids=IDS)


def with_bias(axes, B=2, **options):
    """A bias that has these axes, of several tiles along queries and keys; some see nothing."""

    def draw(random, case):
        causal = dict(is_causal=True, query_offset=-20)
        return cases._bias(axes, "bfloat16")(random, case) | causal | options

    return dataclasses.replace(LONG, name=f"bias {axes}", B=B, T=150, N=4, K=2, options=draw)


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
# Some of three warpgroups see neither the first nor the last key tile of their work tile.
WINDOW = fixed(is_causal=True, local_window_size=(70, 0))


def forward_of(case, sizes=TABLE):
    """The output and the LSE, emulated."""
    qkv, _, options = case.problem("bfloat16")
    with emulator.emulated(pytest.MonkeyPatch()), jax.numpy_rank_promotion("raise"):
        o, log_sum = run_forward(checked(qkv, options), sizes)
    return [o, *public_rows(log_sum)]


def judge_both(case, in_order):
    problem = case.problem("bfloat16")
    large = checked(problem[0], problem[2]).large
    judge(case, "bfloat16", emulated(problem, in_order), apart=large)


def documents(random, tiles):
    """The first and the last key tile of each query tile, causal, of documents of any length."""
    ends = np.cumsum(random.exponential(tiles / 8, tiles).astype(int) + 1)
    first = np.searchsorted(ends, np.arange(tiles), side="right")
    return np.concatenate([[0], ends])[first], np.arange(tiles) + 1
