"""Times attention on a sequence that devices divide, and on one device with the whole sequence.

    python scripts/benchmarks/bench_scaling.py --tokens 65536 --heads 32 --kv-heads 8
    python scripts/benchmarks/bench_scaling.py --json results.jsonl
    python scripts/benchmarks/bench_scaling.py --tokens 1048576 --only-shared --patience 3

It times each mask and method of context parallelism: the forward, and forward and backward
together, by the host's clock. A time is the median of several calls after two warm-up calls, or
after one where calls take longer than `--patience`. `-balanced` has tokens in `balanced_order`,
under the causal mask. A method is first compared with one device, on a short sequence of the same
heads. A method with a wrong result gets no time. The devices are all that JAX finds here.

The table has a row for each mask and method. "of one" is the time divided by one device's:
1 / devices would be perfect. With --json the times go to a file, too.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import pallas_flash
from scripts.benchmarks.programs import ALLOWED, errors, is_red
from scripts.benchmarks.recording import add_flags, recording
from scripts.benchmarks.run import spread
from scripts.benchmarks.shapes import short
from scripts.command import Parser, UserError, command, parse_size

# Values of `context_parallelism`, with tokens in order or in `balanced_order`.
BALANCED = "-balanced"
METHODS = [x + order for x in ("ring", "gather", "heads") for order in ("", BALANCED)]
MASKS = ("full", "causal")
BOTH = "forward and backward"
PASSES = ("forward", BOTH)
# Tokens of a device in the comparison with one device.
FEW = 256
# Calls that are timed, if they take no longer than --patience.
CALLS = 7


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--tokens", type=parse_size, metavar="INT", default=2**16, help="tokens of the sequence")
    add("--heads", type=parse_size, metavar="INT", default=32, help="query heads")
    add("--kv-heads", type=parse_size, metavar="INT", default=8, help="key/value heads")
    add("--head-dim", type=parse_size, metavar="INT", default=128, help="head dim")
    add("--dtype", choices=ALLOWED, default="bfloat16", help="dtype of q, k and v")
    add("--masks", nargs="+", choices=MASKS, default=MASKS, help="masks to time")
    add("--methods", nargs="+", choices=METHODS, default=METHODS, help="methods to time")
    add("--only-shared", action="store_true", help="do not time one device alone")
    add(
        "--patience",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="call a program no further time after so long",
    )
    add_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    devices = jax.devices()
    if len(devices) < 2 or options.tokens % (2 * len(devices)):
        raise UserError(
            "--tokens must be a multiple of twice the number of devices, of which there must be "
            f"two or more; got {options.tokens} tokens and {len(devices)} devices."
        )
    if options.heads % options.kv_heads:
        raise UserError(
            f"--heads must be a multiple of --kv-heads; got {options.heads} and {options.kv_heads}."
        )
    with recording(options.json, options.commit) as (about, append):
        sizes = f"{options.heads} heads on {options.kv_heads}, head dim {options.head_dim}"
        print(
            f"{len(devices)} x {about['device']}, {options.tokens} tokens, {sizes}, "
            f"{options.dtype}\n\n{'mask':<8}{'method':<17}"
            + "".join(f"{name + ', ms':>25}{'of one':>8}" for name in PASSES),
            flush=True,
        )
        for mask in options.masks:
            for name, records in _measure(options, mask, devices):
                for record in records:
                    append(record)
                print(f"{mask:<8}{name:<17}{_cells(records)}", flush=True)


def _cells(records: list[dict[str, Any]]) -> str:
    """Return the times of a row of the table, or why it has none."""
    first = records[0]
    if "red" in first:
        return "  WRONG, not timed: " + ", ".join(f"{x} {e:.1e}" for x, e in first["red"].items())
    if "unserved" in first:
        return f"  not served: {first['unserved']}"
    times = [(r["ms"]["median"], f"{r['share']:.2f}" if "share" in r else "") for r in records]
    return "".join(f"{ms:>25.3f}{share:>8}" for ms, share in times)


def _measure(options, mask: str, devices) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name and the records of each row: one device alone, then each method."""
    one = jax.make_mesh((1,), ("sequence",), devices=devices[:1], axis_types=(AxisType.Auto,))
    few, causal = FEW * len(devices), mask == "causal"
    problem = {name: getattr(options, name) for name in ("heads", "kv_heads", "head_dim", "dtype")}
    case = f"{options.head_dim} {mask} of one sequence"
    record = {
        "shape": f"{case.replace(' ', '-')}-{short(options.tokens)}",
        "case": case,
        **{"B": 1, "T": options.tokens, "S": options.tokens},
        **{"N": options.heads, "K": options.kv_heads, "D": options.head_dim},
        "causal": causal,
        "dtype": options.dtype,
        "timer": "host",
        "clocks": None,
    }
    alone: dict[str, dict[str, float]] = {}
    if not options.only_shared:
        alone = _times(one, options, causal, problem, {})
        record_alone = record | _served(one, options.tokens, causal, problem, {})
        record_alone["config"] = {"devices": 1}
        yield "one device", [{**record_alone, "pass": x, "ms": ms} for x, ms in alone.items()]
    right = _results(one, few, causal, problem, {})
    mesh = jax.make_mesh((len(devices),), ("sequence",), axis_types=(AxisType.Auto,))
    for name in options.methods:
        method, balanced = name.removesuffix(BALANCED), name.endswith(BALANCED)
        if balanced and not causal:
            continue
        how = {"context_parallelism": method, "balanced": balanced}
        config = {"devices": len(devices), "method": method, "balanced": balanced}
        # This is replaced when the implementation is known.
        line = {**record, "pass": BOTH, "implementation": "ours", "config": config}
        try:
            line |= _served(mesh, options.tokens, causal, problem, how)
            result_errors = errors(_results(mesh, few, causal, problem, how), right)
            if is_red(result_errors, options.dtype):
                yield name, [{**line, "red": result_errors}]
                continue
            times = _times(mesh, options, causal, problem, how)
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
            yield name, [{**line, "unserved": str(error).splitlines()[0][:300]}]
            continue
        shares = {
            x: {"share": ms["median"] / alone[x]["median"]} for x, ms in times.items() if alone
        }
        line["errors"] = result_errors
        yield name, [{**line, "pass": x, "ms": ms, **shares.get(x, {})} for x, ms in times.items()]


def _draw(mesh: Mesh, tokens: int, problem, *, balanced: bool):
    """Return q, k, v, do and the positions of tokens, sharded along the sequence.

    `balanced` gives the same tokens in another order.
    """
    rows = NamedSharding(mesh, PartitionSpec(None, "sequence"))

    @functools.partial(jax.jit, out_shardings=rows)
    def draw():
        order = jnp.arange(tokens, dtype=jnp.int32)
        if balanced:
            order = pallas_flash.masks.balanced_order(tokens, mesh.size)
        heads, few = problem["heads"], problem["kv_heads"]

        def normal(seed, heads):
            keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(order)
            shape = heads, problem["head_dim"]
            return jax.vmap(lambda key: jax.random.normal(key, shape, problem["dtype"]))(keys)[None]

        return *map(normal, range(4), (heads, few, few, heads)), order[None]

    return draw()


def _arguments(causal: bool, how: dict[str, Any], positions) -> dict[str, Any]:
    """Return the arguments of `attention` other than q, k and v."""
    where = {}
    if how.get("balanced"):
        where = dict(query_positions=positions, key_value_positions=positions)
    method = how.get("context_parallelism")
    return dict(is_causal=causal, context_parallelism=method, **where)


def _served(mesh: Mesh, tokens: int, causal: bool, problem, how) -> dict[str, str]:
    """Return the implementation of a call, and the sentence of `explain` on the devices."""
    rows = NamedSharding(mesh, PartitionSpec(None, "sequence"))

    def shape(*last, dtype=problem["dtype"]):
        return jax.ShapeDtypeStruct((1, tokens, *last), dtype, sharding=rows)

    q, k = (shape(problem[name], problem["head_dim"]) for name in ("heads", "kv_heads"))
    arguments = _arguments(causal, how, shape(dtype=jnp.int32))
    explanation = pallas_flash.explain(q, k, k, **arguments)
    method = explanation.context_parallelism
    name = f"ours_{explanation.implementation}"
    return {"implementation": name} | ({"why": method.reason} if method else {})


def _program(causal: bool, how: dict[str, Any], *, backward: bool):
    """Return a function from the result of `_draw` to the output, or to output and gradients."""

    def run(q, k, v, do, positions):
        call = functools.partial(pallas_flash.attention, **_arguments(causal, how, positions))
        if not backward:
            return call(q, k, v)
        o, pull = jax.vjp(call, q, k, v)
        return o, *pull(do)

    return jax.jit(run)


def _results(mesh: Mesh, tokens: int, causal: bool, problem, how) -> dict[str, Any]:
    """Return o, dq, dk and dv in float32 with tokens in order, on one device."""
    balanced = how.get("balanced", False)
    arrays = _draw(mesh, tokens, problem, balanced=balanced)
    with jax.set_mesh(mesh):
        results = _program(causal, how, backward=True)(*arrays)
    home = jnp.argsort(jax.device_get(arrays[-1])[0])
    names = ("o", "dq", "dk", "dv")
    return {
        name: jnp.asarray(jax.device_get(x), jnp.float32)[:, home]
        for name, x in zip(names, results, strict=True)
    }


def _times(mesh: Mesh, options, causal: bool, problem, how) -> dict[str, dict[str, float]]:
    """Return the spread of milliseconds, by the pass."""
    arrays = _draw(mesh, options.tokens, problem, balanced=how.get("balanced", False))

    def measured(program) -> dict[str, float]:
        seconds: list[float] = []
        for _ in range(2 + CALLS):
            start = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            seconds.append(time.perf_counter() - start)
            if sum(seconds[1:]) > options.patience:
                break
        return spread([1e3 * x for x in seconds[2:] or seconds[1:]])

    with jax.set_mesh(mesh):
        return {
            name: measured(_program(causal, how, backward=backward))
            for name, backward in zip(PASSES, (False, True), strict=True)
        }


if __name__ == "__main__":
    main()
