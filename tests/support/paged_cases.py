"""Calls of `paged_attention`: random schedules of pages, and what they must give.

A `Schedule` has the pages of requests in random order. All else in the cache is NaN: pages of no
request, keys past a length, and the rest of the table is no page at all. `want` computes each
request by the oracle in float64.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from support import oracle
from support.judge import ROUNDING

import pallas_flash

ROOM, REQUESTS, TOKENS = 256, 5, 26
NOWHERE = 10**6


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes, dtypes and options of one compiled program."""

    name: str
    page_size: int = 16
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    dtype: str = "float32"
    cache: str | None = None
    per_head: bool = False
    options: tuple = ()

    @property
    def num_pages(self):
        return REQUESTS * -(-ROOM // self.page_size) + 3

    def __str__(self):
        return self.name


CONFIGS = [
    Config("plain"),
    Config("window", options=("local_window_size", "sinks"), dtype="bfloat16"),
    Config("scores", 32, dims=(24, 40), options=("alibi_slopes", "logits_soft_cap")),
    Config("int8", 48, cache="int8", options=("scale",)),
    Config("fp8", 256, cache="float8_e4m3fn", per_head=True, options=("local_window_size",)),
    Config("one-head", 64, heads=(8, 1), dtype="float16", options=("sinks", "alibi_slopes")),
]

OPTIONS = {
    "local_window_size": lambda heads: 37,
    "sinks": lambda heads: np.linspace(-1, 2, heads, dtype=np.float32),
    "alibi_slopes": lambda heads: np.linspace(0.01, 0.3, heads, dtype=np.float32),
    "logits_soft_cap": lambda heads: 3.0,
    "scale": lambda heads: 1.5,
}


@dataclasses.dataclass(frozen=True)
class Schedule:
    config: Config
    lengths: np.ndarray
    new: np.ndarray
    arrays: tuple  # the arguments of `paged_attention`
    keys: list  # of each request, [length, K, H], as the cache has them
    values: list
    scales: dict

    @property
    def options(self):
        return {x: OPTIONS[x](self.config.heads[0]) for x in self.config.options}

    def want(self):
        """The output [tokens, N, V] and the LSE [tokens, N], in float64."""
        q, cu = np.asarray(self.arrays[0], np.float64), self.arrays[5]
        heads, width = q.shape[1], self.config.dims[1]
        o, lse = np.zeros((len(q), heads, width)), np.full((len(q), heads), -np.inf)
        for r, (length, new) in enumerate(zip(self.lengths, self.new, strict=True)):
            if not length or not new:
                continue
            options = self.options
            at, k, v = slice(cu[r], cu[r + 1]), self.keys[r], self.values[r]
            truth = oracle.solve(
                q[None, at],
                k[None],
                v[None],
                is_causal=True,
                query_offset=int(length - new),
                **options,
            )
            o[at], lse[at] = truth.values["o"][0], truth.values["lse"][0]
        return o, lse


def draw(config: Config, seed: int) -> Schedule:
    """A schedule with requests of no keys, of no queries, and of more queries than keys."""
    rng = np.random.default_rng([seed, CONFIGS.index(config) if config in CONFIGS else 99])
    size, (N, K), dims = config.page_size, config.heads, config.dims
    lengths = rng.integers(0, ROOM + 1, REQUESTS) * (rng.random(REQUESTS) > 0.15)
    cuts = np.sort(rng.integers(0, TOKENS + 1, REQUESTS))
    new = np.minimum(np.diff(cuts, prepend=0), rng.choice([1, 4, TOKENS], REQUESTS))
    cu = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    pages = -(-lengths // size)
    order, width = rng.permutation(config.num_pages), -(-ROOM // size)
    table = np.full((REQUESTS, width), rng.choice([-1, NOWHERE]), np.int32)
    dtype = jnp.dtype(config.dtype)
    caches = [np.full((config.num_pages, size, K, n), np.nan, np.float32) for n in dims]
    starts = np.cumsum(pages) - pages
    for r in range(REQUESTS):
        mine = table[r, : pages[r]] = order[starts[r] : starts[r] + pages[r]]
        for cache, n in zip(caches, dims, strict=True):
            x = rng.normal(size=(pages[r] * size, K, n)).astype(dtype).astype(np.float32)
            x[lengths[r] :] = np.nan
            cache[mine] = x.reshape(-1, size, K, n)
    caches, scales = [jnp.asarray(x, dtype) for x in caches], {}
    exact = [np.asarray(x, np.float64) for x in caches]
    if config.cache:
        caches, of_caches, exact = zip(*(_quantised(x, config) for x in caches), strict=True)
        scales = dict(zip(("key_scales", "value_scales"), of_caches, strict=True))
    keys, values = (
        [x[table[r, : pages[r]]].reshape(-1, K, x.shape[-1])[: lengths[r]] for r in range(REQUESTS)]
        for x in exact
    )
    q = jnp.asarray(rng.normal(size=(TOKENS, N, dims[0])), dtype)
    arrays = q, *caches, lengths.astype(np.int32), table, cu
    return Schedule(config, lengths, new, arrays, keys, values, scales)


def _quantised(x, config: Config):
    """The numbers and scales of a cache, with NaN where it has any, and what they stand for."""
    dtype, nowhere = jnp.dtype(config.cache), jnp.isnan(x).any((2, 3))
    numbers, scales = pallas_flash.paged.quantize(
        jnp.nan_to_num(x), dtype, per_head=config.per_head
    )
    exact = dequantised(numbers, scales)
    if dtype != jnp.int8:
        numbers = jnp.where(nowhere[:, :, None, None], jnp.nan, numbers)
    if not config.per_head:
        scales = jnp.where(nowhere[:, None], jnp.nan, scales)
    return numbers.astype(dtype), scales, exact


def dequantised(numbers, scales):
    """The numbers that a quantised cache stands for, in float64."""
    scales = np.asarray(scales, np.float64)
    if scales.ndim > 1:
        scales = scales.swapaxes(-1, -2)
    return np.asarray(numbers.astype(jnp.float32), np.float64) * scales[..., None]


def program(config: Config, implementation: str, traces: list | None = None):
    """The jitted call for all schedules of a configuration; it appends to `traces`."""
    options = {x: OPTIONS[x](config.heads[0]) for x in config.options}
    # TF32 on a GPU would be an error of its own.
    options["precision"] = "highest" if config.dtype == "float32" else None

    def call(arrays, scales):
        if traces is not None:
            traces.append(config)
        return pallas_flash.paged_attention(
            *arrays, return_lse=True, implementation=implementation, **options, **scales
        )

    return jax.jit(call)


def check(schedule: Schedule, results) -> None:
    """Errors are at most those of rounding weights and results, and of sums in float32."""
    (o, lse), (want, want_lse) = (np.asarray(x, np.float64) for x in results), schedule.want()
    # A score is a sum of terms of both signs, which may be several times as large.
    size = np.abs(want_lse[np.isfinite(want_lse)]).max(initial=0)
    of_scores = ROUNDING["float32"] * (10 + 8 * size)
    largest = max([np.abs(x).max() for x in schedule.values if x.size], default=0)
    limit = largest * (2 * ROUNDING[schedule.config.dtype] + of_scores)
    np.testing.assert_allclose(o, want, rtol=0, atol=limit)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=of_scores)
