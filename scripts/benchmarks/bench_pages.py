"""Times `pallas_flash.paged_attention` by its kernels, beside cuDNN on contiguous keys.

    python scripts/benchmarks/bench_pages.py --json results.jsonl        # all cases
    python scripts/benchmarks/bench_pages.py --cases one-32k --page-sizes 16 --head-dims 64 128 256
    python scripts/benchmarks/bench_pages.py --peers mosaic mosaic=2,64,4 triton    # other tiles

A case is a step of a server: requests that decode, drafts to verify, and a chunk of a prompt beside
them. The step has --layers with pages of their own, in random order, and shares what all layers
need. Each peer is first compared with plain JAX in IEEE float32. A peer with a wrong result gets no
time. Then the peers take turns, one measurement each in a round.

A time is device time, the kernels by CUPTI, the median over steps, divided by the layers: "other"
are those that are no attention. TB/s counts the keys and values that queries see, once. cuDNN
cannot read the pages: it has keys that lie side by side, a call each for decoding and the chunk,
and no causal mask, so that its results are not compared.
`mosaic=W,KEYS,STAGES` is "mosaic" with another tile: warpgroups, keys of a block, pipeline stages.
`invariant` is "mosaic" with `batch_invariant=True`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pallas_flash
from pallas_flash.tuning import ForwardTile
from scripts.benchmarks.programs import errors, is_red
from scripts.benchmarks.recording import add_flags, recording
from scripts.benchmarks.run import spread
from scripts.benchmarks.timers import cupti_timer, first_line, host_timer, take_turns
from scripts.command import Parser, UserError, command, parse_size

K = 1024


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of a server.

    Attributes:
        requests: requests of `queries` new tokens each.
        keys: keys of each request; with `ragged` the most, and lengths are drawn evenly from 1 on.
        queries: new tokens of each.
        chunk: new tokens of one more request; 0 for none.
        ragged: as above.
    """

    requests: int
    keys: int
    queries: int = 1
    chunk: int = 0
    ragged: bool = False

    def new(self) -> np.ndarray:
        """Return the new tokens of each request."""
        new = [self.queries] * self.requests + [self.chunk] * bool(self.chunk)
        return np.array(new, np.int32)

    def lengths(self) -> np.ndarray:
        """Return the keys of each request; equal in every run."""
        if not self.ragged:
            return np.full(len(self.new()), self.keys, np.int32)
        return np.random.default_rng(0).integers(1, self.keys, self.requests, np.int32, True)

    def pairs(self) -> int:
        """Return the pairs of a query and a key that it sees."""
        new, lengths = (x.astype(np.int64) for x in (self.new(), self.lengths()))
        return int((new * lengths - new * (new - 1) // 2).sum())


CASES = {
    "64-4k": Case(64, 4 * K),
    "64-ragged-32k": Case(64, 32 * K, ragged=True),
    "one-32k": Case(1, 32 * K),
    "verify-8-64-4k": Case(64, 4 * K, queries=8),
    "verify-8-one-32k": Case(1, 32 * K, queries=8),
    "chunk-512-beside-63-4k": Case(63, 4 * K, chunk=512),
    "chunk-512-alone-4k": Case(0, 4 * K, chunk=512),
    "chunk-512-alone-32k": Case(0, 32 * K, chunk=512),
    # For machines without a GPU.
    "small": Case(2, 64, chunk=20),
}
IMPLEMENTATIONS = "triton", "mosaic", "invariant", "xla"
Sizes = tuple[int, int, int, int]  # N, K, head dim, page size.
PAGES = "key_pages", "value_pages"


def draw(case: Case, sizes: Sizes, dtype: str, layer: int) -> dict[str, Any]:
    """Return the arguments of `paged_attention` of a layer, with pages in random order."""
    (heads, kv_heads, head_dim, size), new, lengths = sizes, case.new(), case.lengths()
    pages, order = -(-lengths // size), np.random.default_rng(1)
    table = np.zeros((len(lengths), pages.max()), np.int32)
    table[np.arange(pages.max()) < pages[:, None]] = order.permutation(int(pages.sum()))
    keys = jax.random.split(jax.random.key(layer), 3)
    shapes = (int(new.sum()), heads, head_dim), *[(int(pages.sum()), size, kv_heads, head_dim)] * 2
    names = "query", *PAGES
    arrays = {
        name: jax.random.normal(key, shape, dtype)
        for name, key, shape in zip(names, keys, shapes, strict=True)
    }
    arrays |= dict(key_value_seq_lengths=jnp.asarray(lengths), page_indices=jnp.asarray(table))
    if case.chunk:
        return arrays | dict(cu_seqlens_q=jnp.asarray(np.cumsum([0, *new]), jnp.int32))
    return arrays | dict(query=arrays["query"].reshape(len(new), -1, heads, head_dim))


def contiguous(arrays: dict[str, Any], case: Case) -> dict[str, Any]:
    """Return queries [R, T, N, H] of decoding and of the chunk, keys, values, and lengths."""
    _, _, heads, width = arrays["key_pages"].shape
    query = arrays["query"].reshape(-1, *arrays["query"].shape[-2:])
    several = case.requests * case.queries
    queries = [
        query[:several].reshape(case.requests, case.queries, *query.shape[1:]),
        query[several:][None],
    ]
    k, v = (
        arrays[x][arrays["page_indices"]].reshape(len(case.new()), -1, heads, width) for x in PAGES
    )
    parts = zip(queries, (slice(case.requests), slice(case.requests, None)), strict=True)
    lengths = arrays["key_value_seq_lengths"]
    return {"calls": [(q, k[at], v[at], lengths[at]) for q, at in parts if q.size]}


def cudnn(*, calls):
    """Return the outputs of cuDNN, without a causal mask."""
    return [
        jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=n, implementation="cudnn")
        for q, k, v, n in calls
    ]


def program(peer: str, case: Case, layers: list[dict[str, Any]]) -> Callable[[], Any]:
    """Return the compiled layers of a peer, without arguments."""
    name, _, numbers = peer.partition("=")
    asked: Any = dict(implementation=name)
    if name == "invariant":
        asked = dict(batch_invariant=True)
    call: Any = functools.partial(pallas_flash.paged_attention, **asked)
    if name == "cudnn":
        call, layers = cudnn, [contiguous(x, case) for x in layers]
    # Lengths and the table are one argument each, of which all layers know that it is the same.
    own = [{n: x for n, x in y.items() if n in (*PAGES, "query", "calls")} for y in layers]
    shared = {n: x for n, x in layers[0].items() if n not in own[0]}
    step = jax.jit(lambda own, shared: [call(**x, **shared) for x in own])
    if not numbers:
        return functools.partial(step.lower(own, shared).compile(), own, shared)
    warpgroups, keys, stages = map(int, numbers.split(","))
    tile = ForwardTile(warpgroups, keys, 0, stages)
    jax.clear_caches()
    with mock.patch("pallas_flash._backends.mosaic.paged.default_tile", lambda p: tile):
        compiled = step.lower(own, shared).compile()
    jax.clear_caches()
    return functools.partial(compiled, own, shared)


def measure(case: Case, sizes: Sizes, options: argparse.Namespace):
    """Yield a peer and its times, or why it has none, or its errors."""
    layers, ready = [draw(case, sizes, options.dtype, n) for n in range(options.layers)], {}
    timer: Any = cupti_timer if jax.default_backend() == "gpu" else host_timer
    wide = {
        n: x.astype(jnp.float32) if x.dtype == options.dtype else x for n, x in layers[-1].items()
    }
    exact = functools.partial(pallas_flash.paged_attention, implementation="xla")
    right = {"o": jax.jit(functools.partial(exact, precision="highest"))(**wide)}
    del wide
    for peer in options.peers:
        try:
            run = program(peer, case, layers)
            *_, result = run()
            wrong = peer != "cudnn" and errors({"o": result.astype(jnp.float32)}, right)
            if wrong and is_red(wrong, options.dtype):
                yield peer, wrong
                continue
            once = timer(run, 2).ms
        except Exception as error:  # Any error of a peer is its reason.
            yield peer, first_line(error)
            continue
        calls = max(2, min(options.iterations, int(30 / once)))
        ready[peer] = functools.partial(timer, run, calls)
    yield from take_turns(options.rounds, ready).items()


def record_of(
    name: str, sizes: Sizes, dtype: str, layers: int, peer: str, times: Any
) -> dict[str, Any]:
    """Return a line of results."""
    case, (heads, kv_heads, head_dim, page_size) = CASES[name], sizes
    name_of_peer, _, tile = peer.partition("=")
    record = {
        **{"shape": f"{name}-{page_size}-{head_dim}", "case": name},
        "implementation": name_of_peer,
        **{"B": len(case.new()), "T": int(case.new().max()), "S": int(case.lengths().max())},
        **{"N": heads, "K": kv_heads, "D": head_dim, "causal": True, "dtype": dtype},
        "pass": "forward",
        "config": {"page_size": page_size, "tile": tile, "layers": layers},
    }
    if not isinstance(times, list):
        return record | {"unserved" if isinstance(times, str) else "red": times}
    ms = spread([x.ms / layers for x in times])
    kernels = {
        kernel: statistics.median(x.kernels.get(kernel, 0.0) for x in times) / layers
        for kernel in times[0].kernels
    }
    seen = int(case.lengths().sum()) * kv_heads * 2 * head_dim * jnp.dtype(dtype).itemsize
    flops = 4 * case.pairs() * heads * head_dim
    rates = {"tb_per_s": seen / ms["median"] / 1e9, "tflops": flops / ms["median"] / 1e9}
    return record | {"ms": ms, "kernels": kernels} | rates


def line(record: dict[str, Any]) -> str:
    """Return a row of the table."""
    config, peer = record["config"], record["implementation"]
    peer += f"={config['tile']}" if config["tile"] else ""
    cells = [record["case"], config["page_size"], record["D"], peer]
    if "ms" in record:
        other = sum(x for name, x in record["kernels"].items() if "pallas_flash" not in name)
        cells += [f"{record['ms']['median']:.4f}", f"{other:.4f}"]
        cells += [f"{record['tb_per_s']:.2f}", f"{record['tflops']:.0f}"]
    else:
        cells += [record.get("unserved", f"wrong: {record.get('red')}"), "", "", ""]
    return f"| {' | '.join(map(str, cells))} |"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    real = [name for name in CASES if name != "small"]
    add("--cases", nargs="+", choices=CASES, default=real, metavar="CASE", help="steps to time")
    add("--page-sizes", nargs="+", type=parse_size, default=[16, 64], help="keys of a page")
    add("--head-dims", nargs="+", type=parse_size, default=[128], help="head dims")
    add("--heads", type=parse_size, metavar="INT", default=32, help="query heads")
    add("--kv-heads", type=parse_size, metavar="INT", default=8, help="key/value heads")
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="dtype of all arrays")
    add("--layers", type=parse_size, metavar="INT", default=4, help="layers of a step")
    peers = ["triton", "mosaic", "cudnn"]
    add("--peers", nargs="+", default=peers, metavar="PEER", help="implementations, and cudnn")
    add("--rounds", type=parse_size, metavar="INT", default=5, help="measurements of each peer")
    add("--iterations", type=parse_size, metavar="INT", default=50, help="most calls of a burst")
    add_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(argv)
    for peer in options.peers:
        name, _, numbers = peer.partition("=")
        if name not in (*IMPLEMENTATIONS, "cudnn") or (numbers and name != "mosaic"):
            raise UserError(
                f"--peers must be among {', '.join(IMPLEMENTATIONS)}, cudnn and mosaic=W,KEYS,"
                f"STAGES; got {peer!r}."
            )
    if options.heads % options.kv_heads:
        raise UserError(
            f"--heads must be a multiple of --kv-heads; got {options.heads} and {options.kv_heads}."
        )
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    start = time.monotonic()
    with recording(options.json, options.commit) as (about, append):
        print(about, flush=True)
        print("| case | page | H | peer | ms | other ms | TB/s | TFLOP/s |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for name, head_dim, size in (
            (c, h, p) for c in options.cases for h in options.head_dims for p in options.page_sizes
        ):
            case, sizes = CASES[name], (options.heads, options.kv_heads, head_dim, size)
            for peer, times in measure(case, sizes, options):
                record = record_of(name, sizes, options.dtype, options.layers, peer, times)
                append(record)
                print(line(record), flush=True)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
