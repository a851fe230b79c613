"""The largest score of each head where devices share a call: that of all their queries and keys.

Eight CPUs are simulated, in a process of their own: see eight_devices.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import cases, eight_devices
from support.compare import assert_same_bits
from support.judge import judge_max_logits
from support.meshes import make_mesh, put

from pallas_flash import attention
from pallas_flash._execution.context import METHODS
from pallas_flash.masks import balanced_order

AXES = {"batch": 2, "sequence": 2, "heads": 2}
ROWS = P(*AXES)
# Parts without a visible key, sinks, which are no scores, and a separate maximum.
NAMES = "all features", "sinks", "large scores"
# Results by sharded queries that see all keys, and by sharded batch elements and heads alone.
WHOLE_KEYS, NOT_ALONG = "whole keys", "not along"


def sized(name):
    return dataclasses.replace(cases.BY_NAME[name], B=2, T=48, S=48, N=8, K=4, H=16, V=24)


def judged(case, problem, run, mesh, specs):
    """The rule for the largest scores; results that are not asked for stay as they are."""
    qkv, _, options = problem
    options = jax.tree.map(lambda x: put(x, mesh, P()) if isinstance(x, jax.Array) else x, options)
    placed = [put(x, mesh, spec) for x, spec in zip(qkv, specs, strict=True)]
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(run, return_max_logits=True, **options))(*placed)
        o, _ = jax.jit(functools.partial(run, **options))(*placed)
    assert_same_bits(np.asarray(found[0]), np.asarray(o))
    judge_max_logits(case, "float32", jax.device_get(found[2]), problem)


def check(kind, method, name):
    """A named case, with Auto or with Explicit axes."""
    whole_keys, not_along = method == WHOLE_KEYS, method == NOT_ALONG
    rows = P("batch", None, "heads") if not_along else ROWS
    keys = P("batch", None, "heads") if whole_keys else rows
    method = method if method in METHODS else None
    run = functools.partial(
        attention, implementation="xla", return_lse=True, context_parallelism=method
    )
    case = sized(name)
    judged(case, case.problem(), run, make_mesh(AXES, kind), (rows, keys, keys))


def check_manual(method, options):
    """Inside a `shard_map`, whose devices all have the result of all."""
    mesh, rows = make_mesh({"sequence": 4, "other": 1}, "manual"), P(None, "sequence")
    case = sized("large scores")

    def run(q, k, v, *, return_max_logits=False, **others):
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=rows,
            out_specs=(rows, rows, P())[: 2 + return_max_logits],
        )
        def inside(q, k, v):
            return attention(
                *(q, k, v),
                implementation="xla",
                return_lse=True,
                return_max_logits=return_max_logits,
                # An axis of one device divides nothing.
                sequence_axis=("sequence", "other"),
                context_parallelism=method,
                **others,
            )

        return inside(q, k, v)

    qkv, cotangents, _ = case.problem()
    judged(case, (qkv, cotangents, options), run, mesh, (rows,) * 3)


def check_gradient_inside(implementation):
    """Gradients are those without the largest scores, whose maximum over devices has none."""
    mesh, rows = make_mesh({"sequence": 4}, "manual"), P(None, "sequence")
    q, k, v = (put(x, mesh, rows) for x in sized("causal").problem()[0])

    def gradients(asked):
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=rows)
        def inside(q, k, v):
            found = attention(
                *(q, k, v),
                is_causal=True,
                return_lse=True,
                return_max_logits=asked,
                sequence_axis="sequence",
                implementation=implementation,
            )
            return found[0] + (found[2].sum() if asked else 0.0)

        with jax.set_mesh(mesh):
            return jax.jit(jax.grad(lambda *qkv: (inside(*qkv) ** 2).sum(), (0, 1, 2)))(q, k, v)

    # The square brings in the largest scores, as constants.
    shift = attention(q, k, v, is_causal=True, return_max_logits=True)[1].sum()

    def shifted(*qkv):
        return ((attention(*qkv, is_causal=True) + jax.lax.stop_gradient(shift)) ** 2).sum()

    for x, y in zip(gradients(True), jax.grad(shifted, (0, 1, 2))(q, k, v), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3 * float(jnp.abs(y).max()))


def check_balanced_order():
    """Steps of the ring that are a half of the queries, or a half of the keys."""
    order = balanced_order(48, 4)[None]
    options = dict(is_causal=True, query_positions=order, key_value_positions=order)
    case = sized("causal")
    qkv, cotangents, _ = case.problem()
    rows = P(None, "sequence")
    run = functools.partial(
        attention, implementation="xla", return_lse=True, context_parallelism="ring"
    )
    problem = qkv, cotangents, options
    judged(case, problem, run, make_mesh({"sequence": 4}, "auto"), (rows,) * 3)


def run(function, *arguments):
    eight_devices.run(__name__, function, *arguments)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("method", [*METHODS, WHOLE_KEYS, NOT_ALONG])
def test_max_logits_of_all_devices(kind, method, name):
    run("check", kind, method, name)


MANUAL = [dict(scale=8.0, is_causal=True), dict(logits_soft_cap=2.0)]


@pytest.mark.parametrize("options", cases.default(MANUAL[:1], MANUAL), ids=["scale", "soft-cap"])
@pytest.mark.parametrize("method", cases.default(["ring"], METHODS))
def test_max_logits_inside_shard_map(method, options):
    run("check_manual", method, options)


@pytest.mark.parametrize("implementation", cases.default(["xla"], ["xla", "reference"]))
def test_max_logits_are_constants_inside_shard_map(implementation):
    run("check_gradient_inside", implementation)


def test_max_logits_in_balanced_order():
    run("check_balanced_order")
