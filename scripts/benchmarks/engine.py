"""Times text for many requests: `models.engine`, `models.generation`, and transformers.

    python scripts/benchmarks/engine.py --model llama-3.2-1b --json FILE
    python scripts/benchmarks/engine.py --model qwen2.5-7b --cache int8 --json FILE
    python scripts/benchmarks/engine.py --model llama-3.2-1b --implementations transformers

Weights are random, in bfloat16, and the most likely token is always taken. There are two cases:

    traffic   --requests prompts of 32 to 4,096 tokens that come at once, with answers of 16 to 512,
              both log-uniform; the other implementations take --slots of them at a time
    decode    --slots texts of 2,048 tokens, with answers of 128 + 2 * --slots, all of which are
              still written long after the last prompt is read

A line of the table is a case of an implementation: new tokens a second, the seconds until a request
has its first token (median, and for nine of ten), and of the case "decode" milliseconds of a step
in which all slots decode (median), how many of them the engine's host works and does not wait for
the device (median), and the share of --bandwidth at which a step reads the weights and the cache.
Programs are compiled before.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

# Before JAX starts: transformers needs memory, too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import Decoder, generation
from models.config import DecoderConfig
from models.engine import Engine, Sampling
from models.engine.engine import CACHE_DTYPES
from models.engine.pages import bytes_of_token
from models.generation import Generation
from models.rope import Rope
from scripts.benchmarks.recording import add_flags, recording
from scripts.benchmarks.run import spread
from scripts.command import Parser, UserError, command, parse_positive, parse_size

PAGE_SIZE = 64
PROMPTS, ANSWERS = (32, 4096), (16, 512)
LENGTH = 2048
# The sizes of config.json.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": dict(
        **dict(vocab_size=128256, features=2048, hidden=8192, num_layers=16, num_heads=32),
        **dict(num_kv_heads=8, head_dim=64, context=131072, rope=Rope(500_000.0), tied=True),
    ),
    "qwen2.5-7b": dict(
        **dict(vocab_size=152064, features=3584, hidden=18944, num_layers=28, num_heads=28),
        **dict(num_kv_heads=4, head_dim=128, context=32768, rope=Rope(1_000_000.0)),
        qkv_bias=True,
    ),
    # For a try without a GPU.
    "tiny": dict(
        **dict(vocab_size=512, features=32, hidden=64, num_layers=2, num_heads=4),
        **dict(num_kv_heads=2, head_dim=8, context=8192, rope=Rope(10_000.0), tied=True),
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--model", choices=MODELS, default="llama-3.2-1b", help="whose shape the model has")
    add("--cases", nargs="+", choices=("traffic", "decode"), default=["traffic", "decode"])
    names = ("engine", "generation", "transformers")
    add("--implementations", nargs="+", choices=names, default=names[:2], help="what is timed")
    add("--requests", type=parse_size, default=256, metavar="N", help="requests of the traffic")
    add("--slots", type=parse_size, default=64, metavar="N", help="texts at once")
    add("--shorter", type=parse_size, default=1, metavar="N", help="divides all lengths, for a try")
    add("--cache", choices=CACHE_DTYPES, help="type of the engine's cache (default: bfloat16)")
    add("--drafts", type=int, default=0, metavar="N", help="tokens that the engine guesses")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    add("--bandwidth", type=parse_positive, default=4.3, metavar="TB/S", help="of the memory")
    add_flags(parser)
    return parser


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests, and how many tokens each gets."""

    name: str
    prompts: list[list[int]]
    answers: list[int]


def make_case(name: str, flags: argparse.Namespace, vocab_size: int) -> Case:
    """Return a case; equal flags give equal requests."""
    rng = np.random.default_rng(0)
    if name == "decode":
        lengths = np.full(flags.slots, LENGTH // flags.shorter)
        answers = np.full(flags.slots, (128 + 2 * flags.slots) // flags.shorter)
    else:
        ends = np.log(np.array([PROMPTS, ANSWERS]) // flags.shorter + 1)
        draws = rng.uniform(ends[:, :1], ends[:, 1:], (2, flags.requests))
        lengths, answers = np.exp(draws).astype(int)
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in lengths]
    return Case(name, prompts, answers.tolist())


@dataclasses.dataclass
class Times:
    """Seconds in all, until each first token, and of each step in which all slots decode.

    Attributes:
        total: Seconds in all.
        first: Seconds until each request has its first token.
        steps: Seconds of each step in which all slots decode.
        host: Seconds of them in which the host does not wait for the device.
    """

    total: float
    first: list[float]
    steps: list[float]
    host: list[float] = dataclasses.field(default_factory=list)


def time_engine(model: Decoder, case: Case, flags: argparse.Namespace) -> Times:
    """Time the engine, which takes all requests at once."""
    total = sorted(len(x) + n for x, n in zip(case.prompts, case.answers, strict=True))
    pages = sum(-(-n // PAGE_SIZE) for n in total[-flags.slots :])
    engine = Engine(
        model,
        pages=pages,
        page_size=PAGE_SIZE,
        cache_dtype=flags.cache,
        max_requests=flags.slots,
        max_tokens_per_step=max(2048, 1 << (2 * flags.slots * (1 + flags.drafts)).bit_length()),
        drafts=flags.drafts,
    )
    engine.warm_up(Sampling(temperature=0))
    before, read = engine.programs, engine._read
    start, first, steps, host, waited = time.perf_counter(), {}, [], [], 0.0

    def wait_and_read(parts, drawn):
        nonlocal waited
        begin = time.perf_counter()
        jax.block_until_ready(drawn)
        waited = time.perf_counter() - begin
        read(parts, drawn)

    engine._read = wait_and_read
    for prompt, count in zip(case.prompts, case.answers, strict=True):
        engine.submit(prompt, Sampling(temperature=0, max_tokens=count))
    while engine.busy:
        begin = time.perf_counter()
        changed = engine.step()
        now = time.perf_counter()
        if len(changed) == flags.slots and all(len(x.tokens) > 2 for x in changed):
            steps.append(now - begin)
            host.append(now - begin - waited)
        for answer in changed:
            first.setdefault(answer.id, now - start)
    assert engine.programs == before, "all programs are compiled before"
    return Times(time.perf_counter() - start, list(first.values()), steps, host)


def batches(case: Case, size: int) -> Iterator[tuple[list[list[int]], list[int]]]:
    """Yield the prompts and counts of batches."""
    for n in range(0, len(case.prompts), size):
        yield case.prompts[n : n + size], case.answers[n : n + size]


def time_generation(model: Decoder, case: Case, flags: argparse.Namespace) -> Times:
    """Time `Generation`: a batch after the other, each as long as its longest answer."""
    greedy = generation.Sampling(temperature=0)
    total, first, steps = 0.0, [], []
    for warm in (True, False):
        for prompts, counts in batches(case, flags.slots):
            # Another count in the same room has the same programs.
            made = Generation(model, prompts, max(counts), greedy)
            start = stamp = time.perf_counter()
            for n, _ in enumerate(made, 1):
                now = time.perf_counter()
                if warm and n == 2:
                    break
                for row in [row for row, count in enumerate(counts) if count == n]:
                    made.end(row)
                first += [total + now - start] * len(prompts) if n == 1 and not warm else []
                steps += [now - stamp] if n > 2 and not warm else []
                stamp = now
            total += 0 if warm else time.perf_counter() - start
    return Times(total, first, steps)


def time_transformers(config: DecoderConfig, case: Case, flags: argparse.Namespace) -> Times:
    """Time `generate` of transformers, with random weights of the same shape."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise UserError(f"--implementations transformers needs {error.name}; got none.") from None
    kind = "Qwen2" if config.qkv_bias else "Llama"
    made = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.features,
        intermediate_size=config.hidden,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context,
        tie_word_embeddings=config.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(getattr(torch, flags.dtype))
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")(made).eval()
    stamps: list[float] = []

    class Clock(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            if device == "cuda":
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())
            return scores

    total, first, steps = 0.0, [], []
    for warm in (True, False):
        for prompts, counts in batches(case, flags.slots):
            width = max(map(len, prompts))
            padded = [[0] * (width - len(x)) + x for x in prompts]
            mask = [[0] * (width - len(x)) + [1] * len(x) for x in prompts]
            stamps.clear()
            start = time.perf_counter()
            model.generate(
                torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=2 if warm else max(counts),
                do_sample=False,
                logits_processor=[Clock()],
            )
            if warm:
                break
            first += [total + stamps[0] - start] * len(prompts)
            steps += np.diff(stamps).tolist()
            total += time.perf_counter() - start
    return Times(total, first, steps)


def bytes_of_step(config: DecoderConfig, case: Case, cache: str | None, params: int) -> float:
    """Return the bytes that a step of the case "decode" reads: weights and cache."""
    size = jnp.dtype(config.compute_dtype).itemsize
    rows = 0 if config.tied else config.vocab_size * config.features
    tokens = sum(len(x) + n / 2 for x, n in zip(case.prompts, case.answers, strict=True))
    return size * (params - rows) + bytes_of_token(config, cache) * tokens


def make_record(flags, config: DecoderConfig, case: Case, name: str, times: Times, params: int):
    """Return the line of a measurement."""
    steps = times.steps if case.name == "decode" else [times.total]
    if not steps:
        raise UserError(
            "--shorter must leave steps in which all --slots decode; got none with "
            f"{flags.shorter}. Use a smaller number."
        )
    record = {
        "shape": f"{flags.model}-{case.name}",
        "case": f"{case.name} of {flags.model}",
        **{"B": len(case.prompts), "T": max(case.answers), "S": max(map(len, case.prompts))},
        **{"N": config.num_heads, "K": config.num_kv_heads, "D": config.head_dim},
        **{"causal": True, "dtype": flags.dtype, "pass": "forward", "timer": "host"},
        "clocks": None,
        "implementation": name,
        "config": {"slots": flags.slots, "cache": flags.cache, "drafts": flags.drafts},
        "ms": spread([1e3 * x for x in steps]),
        "tokens_per_s": sum(case.answers) / times.total,
        "first_token_s": {
            "median": statistics.median(times.first),
            "p90": float(np.quantile(times.first, 0.9)),
        },
    }
    if case.name == "decode":
        cache = flags.cache if name == "engine" else None
        if times.host:
            record["host_ms"] = spread([1e3 * x for x in times.host])
        read = bytes_of_step(config, case, cache, params)
        record["tb_per_s"] = read / statistics.median(steps) / 1e12
        record["share"] = record["tb_per_s"] / flags.bandwidth
    return record


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    flags = _parser().parse_args(argv)
    config = DecoderConfig(**MODELS[flags.model], param_dtype=flags.dtype)
    with recording(flags.json, flags.commit) as (about, append):
        model, params = None, 0
        if {"engine", "generation"} & {*flags.implementations}:
            model = Decoder(config, rngs=nnx.Rngs(0))
        shapes = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
        params = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))
        print(
            f"{about['device']}, {flags.model}, {params / 1e6:,.0f} M parameters, {flags.dtype}\n"
        )
        print(
            f"{'case':<9}{'implementation':<16}{'tokens/s':>10}{'first, s':>10}{'9 of 10':>9}"
            f"{'step, ms':>10}{'host, ms':>10}{'share':>8}",
            flush=True,
        )
        for case in [make_case(x, flags, config.vocab_size) for x in flags.cases]:
            for name in flags.implementations:
                if name == "transformers":
                    times = time_transformers(config, case, flags)
                else:
                    run = time_engine if name == "engine" else time_generation
                    assert model is not None
                    times = run(model, case, flags)
                record = make_record(flags, config, case, name, times, params)
                append(record)
                first, host = record["first_token_s"], record.get("host_ms")
                line = f"{case.name:<9}{name:<16}{record['tokens_per_s']:>10,.0f}"
                line += f"{first['median']:>10.2f}{first['p90']:>9.2f}"
                if case.name == "decode":
                    line += f"{record['ms']['median']:>10.2f}"
                    line += f"{host['median']:>10.2f}" if host else " " * 10
                    line += f"{record['share']:>8.2f}"
                print(line, flush=True)


if __name__ == "__main__":
    main()
