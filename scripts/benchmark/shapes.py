"""The problems that `bench_attention.py` times: the class `Shape`, and the named shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DIRECTIONS = ("forward", "backward")
TOKENS, WIDTH = 16384, 2048  # B * T and N * D.
K = 1024

# Options beside masks and sizes, one at a time; their arrays are random.
OPTIONS = {
    "soft cap": "50 tanh(s / 50)",
    "sinks": "a logit for each head in the denominator, with its gradient",
    "ALiBi": "a slope for each head",
    "bias": "for each head and pair, in the dtype of the inputs",
    "trained bias": "the same, with its gradient",
    "mask array": "for all heads and examples, of which 9 in 10 are True",
    "dropout": "of one in 10",
}
SOFT_CAP, DROPOUT = 50.0, 0.1
# Separates the option from the rest of a case's name.
WITH = " with "


@dataclasses.dataclass(frozen=True)
class Shape:
    """One problem: letters as in the README.

    Attributes:
        case: The row of the table that it belongs to; a row has all T.
        V: Head dim of the values; None: that of the keys.
        causal: Whether a query sees only keys up to itself.
        window: The number of keys that a query sees, itself the last one; needs `causal`.
        documents: The number of sequences of random lengths that are packed into each row.
        lengths: Whether batch elements have random valid lengths, from T / 4 to T.
        option: A key of `OPTIONS`.
    """

    case: str
    B: int
    T: int
    S: int
    N: int
    K: int
    D: int
    V: int | None = None
    causal: bool = False
    window: int | None = None
    documents: int | None = None
    lengths: bool = False
    option: str | None = None
    dtype: str = "bfloat16"
    passes: tuple[str, ...] = DIRECTIONS

    def __str__(self) -> str:
        asked = {field: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}
        return " ".join(f"{f.name}={x}" for f, x in asked.items() if x != f.default)

    @property
    def name(self) -> str:
        """The case and the length: the length of the keys, if it differs."""
        return f"{self.case.replace(' ', '-')}-{short(self.S)}"

    @property
    def value_dim(self) -> int:
        """Head dim of the values."""
        return self.V or self.D

    @property
    def scale(self) -> float:
        """1 / sqrt(D)."""
        return 1 / math.sqrt(self.D)

    @property
    def scores(self) -> int:
        """The number of scores, allowed or not."""
        return self.B * self.N * self.T * self.S

    @property
    def features(self) -> list[str]:
        """Features that an implementation may lack, for the sentence: it has no ..."""
        asked = {
            "grouped heads": self.N != self.K,
            "head size of its own for values": self.value_dim != self.D,
            "window": self.window is not None,
            "segment ids": self.documents is not None,
            "lengths": self.lengths,
            self.option: self.option is not None,
        }
        return [name for name, is_asked in asked.items() if name and is_asked]

    @property
    def trained(self) -> tuple[str, ...]:
        """The `arrays` that have gradients in the backward."""
        return {"sinks": ("sinks",), "trained bias": ("bias",)}.get(self.option or "", ())

    def segment_ids(self) -> np.ndarray | None:
        """int32 [B, T]; the random cuts are equal in every run."""
        if self.documents is None:
            return None
        random = np.random.default_rng(0)
        cuts = [
            np.sort(random.choice(np.arange(1, self.T), self.documents - 1, replace=False))
            for _ in range(self.B)
        ]
        rows = [np.searchsorted(c, np.arange(self.T), side="right") for c in cuts]
        return np.stack(rows).astype(np.int32)

    def each_length(self) -> np.ndarray | None:
        """int32 [B]: the valid queries and keys of each batch element; equal in every run."""
        if not self.lengths:
            return None
        random = np.random.default_rng(0)
        return random.integers(self.T // 4, self.T, self.B, dtype=np.int32, endpoint=True)

    def arrays(self) -> dict[str, Any]:
        """Return further arguments of the call, by their names in `pallas_flash.attention`."""
        found: dict[str, Any] = {}
        if self.documents is not None:
            found["segment_ids"] = self.segment_ids()
        if self.lengths:
            names = ("query_seq_lengths", "key_value_seq_lengths")
            found |= dict.fromkeys(names, self.each_length())
        return found | _option_arrays(self)

    def first_keys(self) -> np.ndarray | None:
        """int32 [B, T]: the first key that each query sees, where that is not key 0."""
        first = np.zeros((self.B, self.T), np.int32)
        if self.window is not None:
            first = np.maximum(first, np.arange(self.T, dtype=np.int32) - (self.window - 1))
        if self.documents is not None:
            starts = [np.searchsorted(row, row) for row in self.segment_ids()]
            first = np.maximum(first, np.stack(starts).astype(np.int32))
        return first if first.any() else None

    def pairs(self) -> float:
        """Return the number of allowed pairs, over the batch; half of all if merely causal."""
        if self.window is None and self.documents is None:
            pairs = self.B * self.T * self.S
            if self.lengths:
                pairs = float((self.each_length().astype(np.int64) ** 2).sum())
            if self.option == "mask array":
                pairs = self.B * float(self.arrays()["mask"].sum())
            return pairs / (2 if self.causal else 1)
        last = np.arange(self.T)
        first = self.first_keys() if self.causal else None
        if first is None:
            raise NotImplementedError(f"{self.name}: windows and documents are causal here.")
        return float((last - first + 1).sum())

    def flops(self, direction: str) -> float:
        """Return the floating-point operations by which a pass is rated."""
        products = self.pairs() * self.N * 2 * (self.D + self.value_dim)
        return products * {"forward": 1, "backward": 2.5}[direction]

    def bytes(self) -> int:
        """Return the fewest bytes of a forward: it reads q, k and v once, and writes o once."""
        rows = self.T * self.N + self.S * self.K
        width = self.D + self.value_dim
        return self.B * rows * width * jnp.dtype(self.dtype).itemsize


def short(n: int) -> str:
    """Return a short form of a length: 16384 is 16k."""
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


@functools.lru_cache(maxsize=2)  # Large, and shared by all peers.
def _option_arrays(shape: Shape) -> dict[str, Any]:
    key, heads = jax.random.key(0), shape.N
    match shape.option:
        case "sinks":
            return {"sinks": jax.random.normal(key, (heads,), jnp.float32)}
        case "ALiBi":
            return {"alibi_slopes": 2.0 ** (-8 / heads * np.arange(1, heads + 1, dtype=np.float32))}
        case "bias" | "trained bias":
            return {"bias": jax.random.normal(key, (1, heads, shape.T, shape.S), shape.dtype)}
        case "mask array":
            return {"mask": jax.random.bernoulli(key, 0.9, (1, 1, shape.T, shape.S))}
        case "dropout":
            return {"dropout_key": jax.random.key_data(key)}
    return {}


def _setting(case: str, T: int, D: int, *, N: int | None = None, K: int | None = None, **more):
    heads = N or WIDTH // D
    return Shape(case, max(1, TOKENS // T), T, T, heads, K or heads, D, **more)


def _one_example(T: int, D: int, causal: bool, **more):
    case = f"one example {D} {'causal' if causal else 'full'}"
    return Shape(case, 1, T, T, WIDTH // D, WIDTH // D, D, causal=causal, **more)


def _shapes() -> Iterator[Shape]:
    lengths = (16 * K, 8 * K, 4 * K, 2 * K)
    masks = {"causal": True, "full": False}
    for D in (128, 64, 256):
        for mask, causal in masks.items():
            yield from (_setting(f"{D} {mask}", T, D, causal=causal) for T in lengths)
    yield from (_setting("gqa 128 causal", T, 128, N=64, K=8, causal=True) for T in lengths)
    for T in (16 * K, 32 * K):
        yield _setting("window 1024 gqa 64", T, 64, K=4, causal=True, window=1024)
    for T in (32 * K, 64 * K):
        yield _setting("documents 12", T, 128, causal=True, documents=12)
    # Short sequences, of 1000 tokens on average.
    for T in lengths:
        yield _setting("documents of 1000 64", T, 64, causal=True, documents=T // 1000)
    for window in (1024, 256):
        for T in lengths[1:]:
            yield _setting(f"window {window} 64", T, 64, causal=True, window=window)
    for D in (128, 64):
        yield from (_setting(f"short {D} causal", T, D, causal=True) for T in (K, 512))
    # Low occupancy: batch size 1; one of 8 GPUs of 64 heads; there a part of a long prompt.
    for T in (2 * K, K):
        yield Shape("gqa one example", 1, T, T, 32, 8, 128, causal=True)
        for D, causal in itertools.product((64, 128, 256), (False, True)):
            yield _one_example(T, D, causal)
    for D, causal in itertools.product((64, 128, 256), (False, True)):
        yield _one_example(512, D, causal, passes=("forward",))
    for T in (8 * K, 2 * K):
        yield Shape("gqa 8 of 64 heads", 1, T, T, 8, 1, 128, causal=True)
    yield Shape("512 queries gqa 8 of 64 heads", 1, 512, 32 * K, 8, 1, 128, passes=("forward",))
    # 2 GB of keys and values.
    for B, S in ((4, 128 * K), (64, 8 * K)):
        yield Shape("decode gqa 128", B, 1, S, 64, 8, 128, passes=("forward",))
    # Groups that are no power of two.
    for T in (8 * K, 2 * K):
        yield _setting("gqa 28 on 4 of 128 causal", T, 128, N=28, K=4, causal=True)
    for T in (8 * K, 2 * K):
        yield _setting("mqa 71 on 1 of 64 causal", T, 64, N=71, K=1, causal=True)
    for D in (128, 64):
        for mask, causal in masks.items():
            # Lengths that no tile divides, and padding.
            odd = (5000, 3000, 1500, 1000)
            yield from (_setting(f"odd {D} {mask}", T, D, causal=causal) for T in odd)
            for T in (8 * K, 2 * K):
                yield _setting(f"lengths {D} {mask}", T, D, causal=causal, lengths=True)
    for mask, causal in masks.items():
        for D in (40, 72, 80, 96, 112):
            yield _setting(f"{D} {mask}", 4 * K, D, causal=causal)
        for T in lengths[1:]:
            yield _setting(f"192 and 128 {mask}", T, 192, V=128, causal=causal)
    for D in (128, 64):
        for option in OPTIONS:
            yield _setting(f"{D} full{WITH}{option}", 4 * K, D, option=option)
    for option in ("soft cap", "ALiBi", "mask array", "bias"):
        yield _setting(f"256 full{WITH}{option}", 4 * K, 256, option=option)
    yield _setting(f"256 causal{WITH}soft cap", 4 * K, 256, causal=True, option="soft cap")
    yield _setting("float32 64 causal", 4 * K, 64, causal=True, dtype="float32")
    yield _setting("float32 64 full", 4 * K, 64, dtype="float32")
    # For machines without a GPU.
    yield Shape("small", 2, 256, 256, 4, 2, 64, causal=True, dtype="float32")


# The most important shapes come first: --budget leaves out the end.
SHAPES = {shape.name: shape for shape in _shapes()}
