"""Gradients of tables that devices share are sums over devices.

Eight CPUs are simulated, in a process of their own: see eight_devices.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import cases, eight_devices
from support.compare import assert_close
from support.meshes import make_mesh, put

from pallas_flash import ScoreMod, attention
from pallas_flash._execution.context import METHODS

B, T, N, K, H = 2, 48, 8, 4, 16
AXES = {"batch": 2, "sequence": 2, "heads": 2}


def score_mod(s, b, h, q, k, colours, by_head, by_distance):
    """Integers, which have no gradient, and indices that shards must count from the whole call."""
    factor = by_head[b, h] * colours[h].astype(s.dtype)
    return s * factor + by_distance[h, q - k + T // 2]


def drawn():
    """Queries, keys, values, their cotangent, and the tables: slopes and two operands."""
    random = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)
    arrays = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]
    tables = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((B, N), (N, T))]
    return arrays, (jnp.linspace(0.01, 0.3, N), *tables)


def call(q, k, v, slopes, *tables, implementation="xla", **options):
    operands = jnp.arange(N, dtype=jnp.int32) % 3 + 1, *tables
    return attention(
        *(q, k, v),
        is_causal=True,
        alibi_slopes=slopes,
        score_mod=ScoreMod(score_mod, operands),
        implementation=implementation,
        **options,
    )


def gradients(run, arrays, tables, number=3):
    """Return the gradients of the first `number` tables: slopes, by head, by distance."""
    q, k, v, do = arrays

    def loss(some, rest, q, k, v, do):
        return (run(q, k, v, *some, *rest) * do).sum()

    return jax.jit(jax.grad(loss))(tables[:number], tables[number:], q, k, v, do)


def check(number, kind, method, spec, implementation="xla"):
    """All tables or some of them have gradients, on Auto or Explicit axes."""
    arrays, tables = drawn()
    mesh = make_mesh(AXES, kind)
    run = functools.partial(call, implementation=implementation, context_parallelism=method)
    want = gradients(functools.partial(call, implementation="reference"), arrays, tables, number)
    with jax.set_mesh(mesh):
        placed = [put(x, mesh, spec) for x in arrays]
        found = gradients(run, placed, put(tables, mesh, P()), number)
    assert_close(jax.device_get(found), want)


def check_manual(method):
    """Inside a `shard_map`, whose transpose sums the gradients of what all devices share."""
    arrays, tables = drawn()
    mesh, rows = make_mesh({"sequence": 4}, "manual"), P(None, "sequence")

    def run(q, k, v, *tables):
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(rows, rows, rows, P()), out_specs=rows
        )
        def inside(q, k, v, tables):
            options = dict(sequence_axis="sequence", context_parallelism=method)
            return call(q, k, v, *tables, **options)

        return inside(q, k, v, tables)

    want = gradients(functools.partial(call, implementation="reference"), arrays, tables)
    with jax.set_mesh(mesh):
        placed = [put(x, mesh, rows) for x in arrays]
        found = gradients(run, placed, put(tables, mesh, P()))
    assert_close(jax.device_get(found), want)


def run(function, *arguments):
    eight_devices.run(__name__, function, *arguments)


numbers = pytest.mark.parametrize("number", [3, 1])


@numbers
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("method", METHODS)
def test_tables_of_a_divided_sequence(kind, method, number):
    run("check", number, kind, method, P(*AXES))


@numbers
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_tables_of_divided_batch_and_heads(kind, implementation, number):
    run("check", number, kind, None, P("batch", None, "heads"), implementation)


@pytest.mark.parametrize("method", cases.default(["ring"], METHODS))
def test_tables_inside_a_shard_map(method):
    run("check_manual", method)
