"""The problems that `bench_attention.py` times: the class `Shape`, and the named shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.masks import BlockMask
from scripts.command import UserError

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
    "mask array": "for the whole batch and all heads, of which 9 in 10 are True",
    "dropout": "of one in 10",
}
SOFT_CAP, DROPOUT = 50.0, 0.1
BLOCK = 128  # Tokens of a block of `Shape.chosen`.
# Flags of the options that a shape given by flags may have.
FLAGS_OF_OPTIONS = {
    **{"soft_cap": "soft cap", "dropout": "dropout", "bias": "bias"},
    **{"sinks": "sinks", "alibi": "ALiBi"},
}
# Separates the option from the rest of a case's name.
WITH = " with "


@dataclasses.dataclass(frozen=True)
class Shape:
    """One problem: letters as in the README.

    Attributes:
        case: The row of the table that it belongs to; a row has all T.
        V: Head dim of the values; None: the keys'.
        causal: Whether a query sees only keys up to itself.
        window: The number of keys that a query sees, itself the last one; needs `causal`.
        documents: The number of sequences of random lengths that are packed into each row.
        lengths: Whether batch elements have random valid lengths, from T / 4 to T.
        option: A key of `OPTIONS`.
        amount: The soft cap or the dropout rate; None: `SOFT_CAP` or `DROPOUT`.
        chosen: The most key blocks that a query block sees, its own one among them and the others
            random for each key head; needs `causal`.
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
    amount: float | None = None
    chosen: int | None = None
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
    def soft_cap(self) -> float | None:
        """The soft cap of the scores."""
        return (self.amount or SOFT_CAP) if self.option == "soft cap" else None

    @property
    def dropout_rate(self) -> float:
        """The rate of dropout, 0 without it."""
        return (self.amount or DROPOUT) if self.option == "dropout" else 0.0

    @property
    def scores(self) -> int:
        """The number of scores, allowed or not."""
        return self.B * self.N * self.T * self.S

    @property
    def features(self) -> list[str]:
        """Features that an implementation may lack, for the sentence: it has no ..."""
        asked = {
            "grouped heads": self.N != self.K,
            "head dim of its own for values": self.value_dim != self.D,
            "window": self.window is not None,
            "segment ids": self.documents is not None,
            "lengths": self.lengths,
            "block-sparse mask": self.chosen is not None,
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
        arrays: dict[str, Any] = {}
        if self.documents is not None:
            arrays["segment_ids"] = self.segment_ids()
        if self.lengths:
            names = ("query_seq_lengths", "key_value_seq_lengths")
            arrays |= dict.fromkeys(names, self.each_length())
        if self.chosen is not None:
            arrays["mask"] = _chosen_blocks(self)
        return arrays | _option_arrays(self)

    def first_keys(self) -> np.ndarray | None:
        """int32 [B, T]: the first key that each query sees, where that is not key 0."""
        first = np.zeros((self.B, self.T), np.int32)
        if self.window is not None:
            first = np.maximum(first, np.arange(self.T, dtype=np.int32) - (self.window - 1))
        if (ids := self.segment_ids()) is not None:
            starts = [np.searchsorted(row, row) for row in ids]
            first = np.maximum(first, np.stack(starts).astype(np.int32))
        return first if first.any() else None

    def pairs(self) -> float:
        """Return the number of allowed pairs, over the batch; half of all if merely causal."""
        lengths, ids = self.each_length(), self.segment_ids()
        valid = np.full(self.B, self.T) if lengths is None else lengths
        if self.window is None and ids is None:
            keys = self.S if lengths is None else lengths.astype(np.int64)
            pairs = float((valid * keys).sum())
            if self.option == "mask array":
                pairs = self.B * float(self.arrays()["mask"].sum())
            if self.chosen is not None:
                # Whole blocks, less half of the own one of each query block.
                blocks = visited_blocks(self.T, self.chosen) - self.T / BLOCK / 2
                return self.B * BLOCK**2 * blocks
            if not self.causal:
                return pairs
            # Query i sees the keys up to i.
            return pairs * (self.T / (2 * self.S) if self.T <= self.S else 1 - self.S / 2 / self.T)
        i = np.arange(self.T)
        if self.causal:
            first = self.first_keys()
            visible = i + 1 if first is None else i + 1 - first
            return float(np.where(i < valid[:, None], visible, 0).sum())
        assert ids is not None  # no row has a window that is not causal
        rows = zip(ids, valid, strict=True)
        return float(sum((np.bincount(row[:n]).astype(np.int64) ** 2).sum() for row, n in rows))

    def flops(self, direction: str) -> float:
        """Return the floating-point operations by which a pass is rated."""
        products = self.pairs() * self.N * 2 * (self.D + self.value_dim)
        return products * {"forward": 1, "backward": 2.5}[direction]

    def bytes(self) -> int:
        """Return the fewest bytes of a forward: it reads q, k and v once, and writes o once."""
        rows = self.T * self.N + self.S * self.K
        width = self.D + self.value_dim
        return self.B * rows * width * jnp.dtype(self.dtype).itemsize


def visited_blocks(tokens: int, chosen: int | None = None) -> int:
    """Return the blocks up to the diagonal, of each query block at most as many as are chosen."""
    return sum(min(i + 1, chosen or i + 1) for i in range(tokens // BLOCK))


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


@functools.lru_cache(maxsize=1)
def _chosen_blocks(shape: Shape) -> BlockMask:
    blocks = shape.T // BLOCK
    scores = jax.random.normal(jax.random.key(0), (1, shape.K, blocks, blocks))
    scores = jnp.where(jnp.eye(blocks, dtype=bool), jnp.inf, scores)
    scores = jnp.where(jnp.tri(blocks, dtype=bool), scores, -jnp.inf)
    scores = jnp.repeat(scores, shape.N // shape.K, axis=1)
    return BlockMask.from_topk(scores, shape.chosen, block_q=BLOCK, block_kv=BLOCK)


_LONG = (16 * K, 8 * K, 4 * K, 2 * K)
_FORWARD = ("forward",)
# (case, numbers of keys, fields). `*` stands for causal and full. A case with the word "causal" is;
# TOKENS, WIDTH and the number of keys give the fields that are absent. The most important shapes
# come first: --budget leaves out the end.
_ROWS: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    *((f"{D} *", _LONG, dict(D=D)) for D in (128, 64, 256)),
    ("gqa 128 causal", _LONG, dict(D=128, N=64, K=8)),
    ("window 1024 gqa 64", (16 * K, 32 * K), dict(D=64, K=4, causal=True, window=1024)),
    ("documents 12", (32 * K, 64 * K), dict(D=128, causal=True, documents=12)),
    # Short sequences, of 1000 tokens on average.
    *(("documents of 1000 64", (T,), dict(D=64, causal=True, documents=T // 1000)) for T in _LONG),
    *((f"window {w} 64", _LONG[1:], dict(D=64, causal=True, window=w)) for w in (1024, 256)),
    *((f"short {D} causal", (K, 512), dict(D=D)) for D in (128, 64)),
    # Low occupancy: batch size 1; one of 8 GPUs of 64 heads; there a part of a long prompt.
    ("gqa one example", (2 * K, K), dict(B=1, N=32, K=8, D=128, causal=True)),
    *((f"one example {D} *", (2 * K, K), dict(B=1, D=D)) for D in (64, 128, 256)),
    *((f"one example {D} *", (512,), dict(B=1, D=D, passes=_FORWARD)) for D in (64, 128, 256)),
    ("gqa 8 of 64 heads", (8 * K, 2 * K), dict(B=1, N=8, K=1, D=128, causal=True)),
    (
        "512 queries gqa 8 of 64 heads",
        (32 * K,),
        dict(B=1, T=512, N=8, K=1, D=128, passes=_FORWARD),
    ),
    # 2 GB of keys and values.
    *(
        ("decode gqa 128", (S,), dict(B=B, T=1, N=64, K=8, D=128, passes=_FORWARD))
        for B, S in ((4, 128 * K), (64, 8 * K))
    ),
    # Groups that are no power of two.
    ("gqa 28 on 4 of 128 causal", (8 * K, 2 * K), dict(D=128, N=28, K=4)),
    ("mqa 71 on 1 of 64 causal", (8 * K, 2 * K), dict(D=64, N=71, K=1)),
    # Lengths that no tile divides, and padding.
    *((f"odd {D} *", (5000, 3000, 1500, 1000), dict(D=D)) for D in (128, 64)),
    *((f"lengths {D} *", (8 * K, 2 * K), dict(D=D, lengths=True)) for D in (128, 64)),
    *((f"{D} *", (4 * K,), dict(D=D)) for D in (40, 72, 80, 96, 112)),
    ("192 and 128 *", _LONG[1:], dict(D=192, V=128)),
    *(
        (f"{D} full{WITH}{option}", (4 * K,), dict(D=D, option=option))
        for D in (128, 64)
        for option in OPTIONS
    ),
    *(
        (f"256 full{WITH}{option}", (4 * K,), dict(D=256, option=option))
        for option in ("soft cap", "ALiBi", "mask array", "bias")
    ),
    (f"256 causal{WITH}soft cap", (4 * K,), dict(D=256, option="soft cap")),
    ("float32 64 *", (4 * K,), dict(D=64, dtype="float32")),
    # Triangle attention: the rows of N x N pairs are the batch.
    *(
        (f"triangle 32{WITH}trained bias", (N,), dict(B=N, N=4, D=32, option="trained bias"))
        for N in (256, 384, 768, K)
    ),
    # Sparse attention that data decides, and the same dense.
    *(
        (f"gqa 16 on 4 of 128 causal{words}", (T,), dict(B=1, D=128, N=16, K=4, chosen=chosen))
        for T in (32 * K, 64 * K, 128 * K)
        for chosen, words in ((None, ""), (16, f"{WITH}16 chosen blocks"))
    ),
    # For machines without a GPU.
    ("small", (256,), dict(B=2, N=4, K=2, D=64, causal=True, dtype="float32")),
]


def _shape(case: str, S: int, fields: dict[str, Any]) -> Shape:
    heads = fields.get("N", WIDTH // fields["D"])
    absent: dict[str, Any]
    absent = dict(T=S, B=max(1, TOKENS // S), N=heads, K=heads, causal="causal" in case.split())
    return Shape(case, S=S, **absent | fields)


SHAPES = {
    shape.name: shape
    for case, lengths, fields in _ROWS
    for mask in (("causal", "full") if "*" in case else ("",))
    for shape in (_shape(case.replace("*", mask), S, fields) for S in lengths)
}


def shape_of(
    *,
    batch: int,
    length: int,
    heads: int,
    head_dim: int,
    dtype: str,
    key_length: int | None = None,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    causal: bool = False,
    window: int | None = None,
    segments: int | None = None,
    lengths: bool = False,
    **options: float,
) -> Shape:
    """Return the shape that flags give; `options` has at most one entry, its flag's name and value.

    Raises:
        UserError: The flags do not fit together.
    """
    kv_heads, keys = kv_heads or heads, key_length or length
    if heads % kv_heads:
        raise UserError(f"--heads must be a multiple of --kv-heads; got {heads} and {kv_heads}.")
    if keys != length and (window or segments or lengths):
        raise UserError(
            "--window, --segments and --lengths must come without --key-length, with as many keys "
            f"as queries; got {length} queries and {keys} keys."
        )
    if (segments or 0) > length:
        raise UserError(f"--segments must be at most --length; got {segments} and {length}.")
    [(option, amount)] = options.items() or [(None, None)]
    causal = causal or window is not None
    words = [
        f"b{batch}",
        f"t{length}" if keys != length else "",
        f"h{heads}" if kv_heads == heads else f"h{heads} on {kv_heads}",
        f"d{head_dim} and {value_dim}" if value_dim else f"d{head_dim}",
        "causal" if causal else "full",
        f"window {window}" if window else "",
        f"{segments} segments" if segments else "",
        "lengths" if lengths else "",
        "" if dtype == "bfloat16" else dtype,
    ]
    case = " ".join(filter(None, words))
    if option is not None:
        option = FLAGS_OF_OPTIONS[option]
        case += WITH + (f"{option} {amount:g}" if amount is not True else option)
    return Shape(
        case,
        *(batch, length, keys, heads, kv_heads, head_dim, value_dim),
        causal=causal,
        window=window,
        documents=segments,
        lengths=lengths,
        option=option,
        amount=None if amount is True else amount,
        dtype=dtype,
        # Decoding has no backward.
        passes=DIRECTIONS if length > 1 else _FORWARD,
    )
