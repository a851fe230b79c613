"""Measures the error of dq in 16 bits where keys have a common part: docs/key-bias.md.

    python scripts/measure_key_bias.py --json results.jsonl
    python scripts/measure_key_bias.py --length 256 --head-dims 64 --cases causal

Two features of all keys get a bias, and the queries are divided by it there, so that scores keep
their size. An error is the root mean square of the difference to float64, relative to the root mean
square of dq. Implementations that are not installed, or do not serve a call, get no number.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_flash
from scripts.benchmark.recording import add_flags, recording
from scripts.command import Parser, command, parse_size

HEADS, GROUPED, BIASES, MEAN = 4, 2, (0, 2, 10, 50, 200), 4
CASES = (
    *("full", "causal", "window", "documents", "lengths", "grouped heads"),
    *("sinks", "ALiBi", "bias", "soft cap"),
)
# Causal, the sequence divided among all devices. Only measured if named, on several devices.
ACROSS_DEVICES = "ring", "gather", "heads"


def options_of(case: str, length: int, random: np.random.Generator) -> dict[str, Any]:
    """Return the arguments of `attention` for a case."""
    if case in ("full", "lengths"):
        end = jnp.array([3 * length // 4], jnp.int32)
        lengths = dict(query_seq_lengths=end, key_value_seq_lengths=end)
        return lengths if case == "lengths" else {}
    pairs = random.standard_normal((1, HEADS, length, length))
    documents = np.sort(random.integers(0, 5, (1, length)), 1)
    return dict(is_causal=True) | {
        "window": dict(local_window_size=(length // 8, 0)),
        "documents": dict(segment_ids=jnp.asarray(documents, jnp.int32)),
        "sinks": dict(sinks=jnp.asarray(random.standard_normal(HEADS) + 4, jnp.float32)),
        "ALiBi": dict(alibi_slopes=jnp.array([0.5, 0.25, 0.1, 0.01], jnp.float32)),
        "bias": dict(bias=jnp.asarray(pairs, "bfloat16")),
        "soft cap": dict(logits_soft_cap=30.0),
    }.get(case, {})


def implementations(case: str) -> dict[str, Callable]:
    """Return functions of q, k, v and the options."""
    ours = {name: dict(implementation=name) for name in ("mosaic", "triton", "xla")}
    ours["mosaic, reproducible"] = dict(implementation="mosaic", reproducible=True)
    calls: dict[str, Callable] = {
        f"ours_{name}": functools.partial(pallas_flash.attention, **asked)
        for name, asked in ours.items()
    }
    if case in ACROSS_DEVICES:
        return {name: _across_devices(call, case) for name, call in calls.items()}
    if case in ("full", "causal", "grouped heads"):
        for name in ("xla", "cudnn"):
            calls[f"jax_{name}"] = functools.partial(
                jax.nn.dot_product_attention, implementation=name
            )
    if case in ("causal", "grouped heads"):
        # Without a mask the gradients of flash-attn3-jax 0.2.3 are wrong by orders of magnitude.
        calls["flash_attention_3"] = _flash_attention_3
    return calls


def _across_devices(call: Callable, method: str) -> Callable:
    mesh = jax.sharding.Mesh(jax.devices(), ("sequence",))
    rows = jax.sharding.PartitionSpec(None, "sequence")

    def attend(q, k, v, **options):
        part = functools.partial(
            call, sequence_axis="sequence", context_parallelism=method, **options
        )
        specs = dict(mesh=mesh, in_specs=(rows, rows, rows), out_specs=rows)
        return jax.shard_map(part, check_vma=False, **specs)(q, k, v)

    return attend


def _flash_attention_3(q, k, v, is_causal=False):
    from flash_attn3_jax import flash_mha

    return flash_mha(q, k, v, is_causal=is_causal)


def exact(q, k, v, do, options):
    """Return dq in float64, by "reference"."""
    with jax.enable_x64(True):

        def attend(q):
            k64, v64 = (x.astype(jnp.float64) for x in (k, v))
            return pallas_flash.attention(q, k64, v64, implementation="reference", **options)

        _, pull = jax.vjp(attend, q.astype(jnp.float64))
        return np.asarray(pull(do.astype(jnp.float64))[0])


def lines(case, head_dim, dtype, bias, mean, *, length) -> Iterator[dict[str, Any]]:
    """Yield a line for each implementation that serves the call."""
    random = np.random.default_rng(0)
    kv_heads = GROUPED if case == "grouped heads" else HEADS
    q, do = random.standard_normal((2, 1, length, HEADS, head_dim))
    k, v = random.standard_normal((2, 1, length, kv_heads, head_dim))
    k[..., :2] += bias
    q[..., :2] /= max(bias, 1)
    q, k, v, do = (jnp.asarray(x, dtype) for x in (q, k, v + mean, do))
    options = options_of(case, length, random)
    truth = exact(q, k, v, do, options)

    def error(call):
        def dq(q, k, v, do):
            return jax.vjp(lambda q: call(q, k, v, **options), q)[1](do)[0]

        try:
            found = np.asarray(jax.jit(dq)(q, k, v, do), np.float64)
        except Exception as refused:  # Libraries raise errors of their own for such calls.
            return f"{type(refused).__name__}: {refused}"[:200]
        relative = np.sqrt(((found - truth) ** 2).mean() / (truth**2).mean())
        return float(relative) if np.isfinite(relative) else "The gradient is not finite."

    calls = implementations(case)
    # Compilers for GPUs run in parallel with Python.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        errors = dict(zip(calls, pool.map(error, calls.values()), strict=True))
    sizes = dict(B=1, T=length, S=length, N=HEADS, K=kv_heads, D=head_dim, V=None)
    for name, found in errors.items():
        key = "unserved" if isinstance(found, str) else "dq_error"
        yield dict(
            **sizes,
            shape=f"key bias {bias}, values of mean {mean}",
            case=case,
            causal=case not in ("full", "lengths"),
            dtype=dtype,
            implementation=name,
            config=dict(key_bias=bias, value_mean=mean),
            **{"pass": "backward", key: found},
        )


def problems(cases: Sequence[str], head_dims: Sequence[int]) -> Iterator[tuple]:
    """Yield case, head dim, dtype, bias of keys and mean of values: no full product."""
    first = head_dims[len(head_dims) // 2]
    for case in cases:
        yield case, first, "bfloat16", 50, 0
        yield case, first, "bfloat16", 50, MEAN
    for bias in BIASES:
        if "causal" in cases and bias != 50:
            yield "causal", first, "bfloat16", bias, 0
    for head_dim in head_dims:
        for case in [x for x in ("causal", "sinks") if x in cases and head_dim != first]:
            yield case, head_dim, "bfloat16", 50, 0
    if "causal" in cases:
        yield "causal", first, "float16", 50, 0


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--length", type=parse_size, metavar="INT", default=2048, help="tokens")
    add(
        "--head-dims",
        type=parse_size,
        metavar="INT",
        nargs="+",
        default=(64, 128, 256),
        help="head dims",
    )
    add("--cases", nargs="+", choices=CASES + ACROSS_DEVICES, default=CASES, help="kinds of calls")
    add_flags(parser)
    options = parser.parse_args(argv)
    with recording(options.json, options.commit) as (_, append):
        for problem in problems(options.cases, options.head_dims):
            case, head_dim, dtype, bias, mean = problem
            errors = {}
            for record in lines(*problem, length=options.length):
                append(record)
                if "dq_error" in record:
                    errors[record["implementation"]] = record["dq_error"]
            print(
                f"{case}, head dim {head_dim}, {dtype}, key bias {bias}, values of mean {mean}:",
                "  ".join(f"{name} {error:.4f}" for name, error in errors.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
