"""Measures errors of outputs and gradients in 16 bits: docs/accuracy.md and docs/key-bias.md.

    python scripts/benchmarks/measure_accuracy.py --json results.jsonl
    python scripts/benchmarks/measure_accuracy.py --length 256 --head-dims 64 --cases causal sinks

An error is the root mean square of the difference to float64, relative to the root mean square of
the exact result. "dense" rounds the weights and the output to 16 bits, and nothing else by itself.
Implementations that are not installed, or do not serve a call, get no number.

Inputs are normal numbers, and others that are hard: keys with a bias in two features, where queries
are divided by it, so that scores keep their size; values of a large mean; cotangents whose sum over
channels is zero, so that they hide this mean.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_flash
from scripts.benchmarks.recording import add_flags, recording
from scripts.command import Parser, command, parse_size

HEADS, GROUPED, BIASES = 4, 2, (0, 2, 10, 50, 200)
# Options that have a gradient. The last two are normal inputs of unusual sizes.
TRAINED = "sinks", "ALiBi", "bias", "score table", "scale"
CASES = (
    *("full", "causal", "window", "documents", "lengths", "grouped heads", "soft cap"),
    *(*TRAINED, "three keys", "wide values"),
)
# Causal, the sequence divided among all devices. Only measured if named, on several devices.
ACROSS_DEVICES = "ring", "gather", "heads"


class Inputs(NamedTuple):
    """The inputs of a problem.

    Attributes:
        key_bias: of two features of all keys.
        value_mean: of all values.
        zero_sum: whether the cotangents sum to zero over channels.
    """

    key_bias: int = 0
    value_mean: int = 0
    zero_sum: bool = False


class Problem(NamedTuple):
    """A call and its inputs."""

    case: str
    head_dim: int
    dtype: str
    inputs: Inputs


def relative(s, b, h, i, j, table):
    """Add a learned number for each head and distance."""
    return s + table[h, jnp.clip(i - j, 0, table.shape[1] - 1)]


def options_of(case: str, length: int, random: np.random.Generator) -> dict[str, Any]:
    """Return the arguments of `attention` for a case that have no gradient."""
    if case in ("full", "three keys", "wide values"):
        return {}
    if case == "lengths":
        end = jnp.array([3 * length // 4], jnp.int32)
        return dict(query_seq_lengths=end, key_value_seq_lengths=end)
    documents = np.sort(random.integers(0, 5, (1, length)), 1)
    return dict(is_causal=True) | {
        "window": dict(local_window_size=(length // 8, 0)),
        "documents": dict(segment_ids=jnp.asarray(documents, jnp.int32)),
        "soft cap": dict(logits_soft_cap=30.0),
    }.get(case, {})


def trained_of(case: str, head_dim: int, length: int, random: np.random.Generator):
    """Return the options that have a gradient, by the name of their argument."""
    normal = random.standard_normal
    return {
        "sinks": lambda: dict(sinks=jnp.asarray(normal(HEADS) + 4, jnp.float32)),
        "ALiBi": lambda: dict(alibi_slopes=jnp.array([0.5, 0.25, 0.1, 0.01], jnp.float32)),
        "bias": lambda: dict(bias=jnp.asarray(normal((1, HEADS, length, length)), "bfloat16")),
        "score table": lambda: dict(table=jnp.asarray(normal((HEADS, 32)), jnp.float32)),
        "scale": lambda: dict(scale=jnp.float32(1 / math.sqrt(head_dim))),
    }.get(case, dict)()


def attend(call, operands, **options):
    """Return the results of a call of q, k, v and trained options, by name."""
    q, k, v, trained = operands
    trained = dict(trained)
    if "table" in trained:
        options["score_mod"] = pallas_flash.ScoreMod(relative, (trained.pop("table"),))
    return call(q, k, v, **trained, **options)


def dense(q, k, v, *, is_causal=False, logits_soft_cap=None, score_mod=None, **options):
    """Return dense attention that rounds the weights and the output to the dtype of q."""
    bias, sinks, slopes = (options.pop(x, None) for x in ("bias", "sinks", "alibi_slopes"))
    scale = options.pop("scale", 1 / math.sqrt(q.shape[-1]))
    if options:
        raise NotImplementedError(f"dense attention has no {sorted(options)}")
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    i, j = jnp.ogrid[: q.shape[1], : k.shape[1]]
    s = scale * jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    s = s if bias is None else s + bias.astype(jnp.float32)
    s = s if slopes is None else s - slopes[:, None, None] * jnp.abs(i - j)
    if score_mod is not None:
        s = relative(s, 0, jnp.arange(s.shape[1])[:, None, None], i, j, *score_mod.operands)
    s = s if logits_soft_cap is None else logits_soft_cap * jnp.tanh(s / logits_soft_cap)
    s = jnp.where(i >= j, s, -jnp.inf) if is_causal else s
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))
        s = jnp.concatenate([s, sink], axis=-1)
    p = jax.nn.softmax(s)[..., : k.shape[1]].astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", p, v, preferred_element_type=jnp.float32).astype(q.dtype)


def implementations(case: str) -> dict[str, Callable]:
    """Return functions of q, k, v and the options."""
    ours: dict[str, dict[str, Any]]
    ours = {name: dict(implementation=name) for name in ("mosaic", "triton", "xla")}
    ours["mosaic, reproducible"] = dict(implementation="mosaic", reproducible=True)
    calls: dict[str, Callable] = {
        f"ours_{name}": functools.partial(pallas_flash.attention, **asked)
        for name, asked in ours.items()
    }
    if case in ACROSS_DEVICES:
        return {name: _across_devices(call, case) for name, call in calls.items()}
    calls["dense"] = dense
    if case in ("full", "causal", "grouped heads", "bias", "scale", "three keys"):
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
        ins = (rows, rows, rows)
        shared = jax.shard_map(part, mesh=mesh, in_specs=ins, out_specs=rows, check_vma=False)
        return shared(q, k, v)

    return attend


def _flash_attention_3(q, k, v, is_causal=False):
    from flash_attn3_jax import flash_mha

    return flash_mha(q, k, v, is_causal=is_causal)


def results_of(call: Callable, operands, do, options) -> dict[str, Any]:
    """Return the output and the gradients, by name."""

    def run(operands, do):
        o, pull = jax.vjp(functools.partial(attend, call, **options), operands)
        dq, dk, dv, trained = pull(do)[0]
        return dict(o=o, dq=dq, dk=dk, dv=dv) | {f"d{name}": x for name, x in trained.items()}

    return {name: np.asarray(x, np.float64) for name, x in jax.jit(run)(operands, do).items()}


def exact(operands, do, options) -> dict[str, Any]:
    """Return `results_of` in float64, by "reference"."""
    call = functools.partial(pallas_flash.attention, implementation="reference")
    with jax.enable_x64(True):
        operands, do = jax.tree.map(lambda x: x.astype(jnp.float64), (operands, do))
        return results_of(call, operands, do, options)


def lines(problem: Problem, *, length: int) -> list[dict[str, Any]]:
    """Return a line for each result of each implementation that serves the call."""
    case, head_dim, dtype, inputs = problem
    random = np.random.default_rng(0)
    kv_heads = GROUPED if case == "grouped heads" else HEADS
    kv_len = 3 if case == "three keys" else length
    value_dim = head_dim
    if case == "wide values":
        head_dim = 8
    q = random.standard_normal((1, length, HEADS, head_dim))
    k = random.standard_normal((1, kv_len, kv_heads, head_dim))
    v = random.standard_normal((1, kv_len, kv_heads, value_dim)) + inputs.value_mean
    do = random.standard_normal((1, length, HEADS, value_dim))
    k[..., :2] += inputs.key_bias
    q[..., :2] /= max(inputs.key_bias, 1)
    if inputs.zero_sum:
        do -= do.mean(axis=-1, keepdims=True)
    q, k, v, do = (jnp.asarray(x, dtype) for x in (q, k, v, do))
    options = options_of(case, length, random)
    operands = q, k, v, trained_of(case, head_dim, length, random)
    truth = exact(operands, do, options)

    def errors(call) -> dict[str, float] | str:
        try:
            got = results_of(call, operands, do, options)
        except Exception as refused:  # Libraries raise errors of their own for such calls.
            return f"{type(refused).__name__}: {refused}"[:200]
        square = {name: ((got[name] - x) ** 2).mean() / (x**2).mean() for name, x in truth.items()}
        if not all(math.isfinite(x) for x in square.values()):
            return "A result is not finite."
        return {name: math.sqrt(x) for name, x in square.items() if x > 0}

    bias, mean, zero_sum = inputs
    sums = ", cotangents that sum to zero" if zero_sum else ""
    about = dict(
        **dict(B=1, T=length, S=kv_len, N=HEADS, K=kv_heads, D=head_dim, V=value_dim),
        shape=f"key bias {bias}, values of mean {mean}{sums}",
        case=case,
        causal=bool(options.get("is_causal")),
        dtype=dtype,
        config=inputs._asdict(),
    )
    records = []
    for name, call in implementations(case).items():
        of_call, outcome = about | {"implementation": name}, errors(call)
        if isinstance(outcome, str):
            records.append(of_call | {"pass": "backward", "unserved": outcome})
            continue
        for result, error in outcome.items():
            side = "forward" if result == "o" else "backward"
            records.append(of_call | {"pass": side, "result": result, "error": error})
    return records


def problems(cases: Sequence[str], head_dims: Sequence[int]) -> Iterator[Problem]:
    """Yield what is measured: no full product."""
    first = head_dims[len(head_dims) // 2]
    biased, hard = Inputs(key_bias=50), [Inputs(0, mean, True) for mean in (4, 20)]
    for case in cases:
        for inputs in (Inputs(), biased, Inputs(50, 4), *hard):
            yield Problem(case, first, "bfloat16", inputs)
    for bias in BIASES:
        if "causal" in cases and bias not in (0, 50):
            yield Problem("causal", first, "bfloat16", Inputs(bias))
    for case in [x for x in ("causal", "sinks") if x in cases]:
        for inputs in (Inputs(), biased, hard[1]):
            for head_dim in head_dims:
                if head_dim != first:
                    yield Problem(case, head_dim, "bfloat16", inputs)
            yield Problem(case, first, "float16", inputs)


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
    add("--jobs", type=parse_size, metavar="INT", default=8, help="processes, which share the GPU")
    add_flags(parser)
    options = parser.parse_args(argv)
    # Processes share the GPU: none may keep memory that it does not use.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    wanted = list(problems(options.cases, options.head_dims))
    measure = functools.partial(lines, length=options.length)
    with contextlib.ExitStack() as stack:
        _, append = stack.enter_context(recording(options.json, options.commit))
        run = map
        if options.jobs > 1:
            # Not threads: one that calls CUDA ends what another one captures into a graph.
            spawn = multiprocessing.get_context("spawn")
            pool = concurrent.futures.ProcessPoolExecutor(options.jobs, spawn)
            run = stack.enter_context(pool).map
        for problem, records in zip(wanted, run(measure, wanted), strict=True):
            errors: dict[str, list[str]] = {}
            for record in records:
                append(record)
                if "error" in record:
                    numbers = errors.setdefault(record["implementation"], [])
                    numbers.append(f"{record['result']} {record['error']:.4f}")
            case, head_dim, dtype, inputs = problem
            print(f"{case}, head dim {head_dim}, {dtype}, {inputs}")
            for name, numbers in errors.items():
                print(f"  {name}: {', '.join(numbers)}", flush=True)


if __name__ == "__main__":
    main()
