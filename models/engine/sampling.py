"""How the tokens of a request are drawn, and where it ends."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from models import generation
from models.errors import check_int
from models.generation import HOTTEST, keys_of, limited, tempered

# Steps of three kinds: all requests take the most likely token; nothing limits what is drawn; or
# there are limits and penalties. Each kind serves the requests of the kinds before.
GREEDY, DRAWN, LIMITED = KINDS = range(3)


@dataclasses.dataclass(frozen=True)
class Sampling(generation.Sampling):
    """How a request is continued; a token must pass every limit.

    The noise of a token depends on the seed, on its number in the text and on the number of the
    sample, so that neither other requests nor the size of a step change it.

    Attributes:
        temperature, top_k, top_p, min_p, seed: As in `models.generation.Sampling`.
        max_tokens: Most tokens that are added; None is as many as fit.
        repetition_penalty: Divides the positive logits of tokens that the text has, and multiplies
            the negative ones; 1 changes nothing.
        stop: Strings that end the text, and do not belong to it.
        stop_tokens: Tokens that end the text, and belong to it; None are the tokenizer's.
        samples: Number of continuations.

    Raises:
        ValueError: A value is out of range, or of another kind.
    """

    max_tokens: int | None = 200
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] | None = None
    samples: int = 1

    def __post_init__(self):
        super().__post_init__()
        check_int("max_tokens", self.max_tokens, optional=True)
        check_int("samples", self.samples)
        penalty = self.repetition_penalty
        if not isinstance(penalty, int | float | np.number) or not 0 < penalty < HOTTEST:
            raise ValueError(f"`repetition_penalty` must be a positive number; got {penalty!r}.")
        listed = isinstance(self.stop, Sequence) and not isinstance(self.stop, str)
        if not listed or not all(isinstance(x, str) and x for x in self.stop):
            raise ValueError(f"`stop` must be a list of texts with a character; got {self.stop!r}.")
        tokens = () if self.stop_tokens is None else self.stop_tokens
        listed = isinstance(tokens, Collection)
        if not listed or not all(isinstance(x, int | np.integer) for x in tokens):
            raise ValueError(f"`stop_tokens` must be a list of ints, or None; got {tokens!r}.")

    @property
    def kind(self) -> int:
        """The kind of steps that it needs."""
        limits = self.top_k, self.top_p, self.min_p
        if self.repetition_penalty != 1 or (self.temperature > 0 and limits != (None,) * 3):
            return LIMITED
        return DRAWN if self.temperature > 0 else GREEDY

    def packed(self, sample: int) -> np.ndarray:
        """Return what a step needs to know for a sample, int32."""
        whole = self.seed % 2**32, sample, min(self.top_k or 2**31 - 1, 2**31 - 1)
        real = min(self.temperature, HOTTEST), self.top_p or 1, self.min_p or 0
        real = np.array([*real, self.repetition_penalty], np.float32)
        return np.concatenate([np.array(whole, np.uint32).view(np.int32), real.view(np.int32)])


class Limits(NamedTuple):
    """The `Sampling` of each row, as `Sampling.packed` has it."""

    seed: UInt32[Array, " B"]
    sample: Int32[Array, " B"]
    top_k: Int32[Array, " B"]
    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    penalty: Float[Array, " B"]

    @classmethod
    def unpacked(cls, packed: Int32[Array, "B 7"]) -> "Limits":
        """Return what `packed` stands for."""
        seed, sample, top_k, *real = packed.T
        real = (jax.lax.bitcast_convert_type(x, jnp.float32) for x in real)
        return cls(jax.lax.bitcast_convert_type(seed, jnp.uint32), sample, top_k, *real)


def draw(
    logits: Float[Array, "B vocab"],
    limits: Limits,
    position: Int32[Array, " B"],
    present: Bool[Array, "B vocab"],
    kind: int,
) -> Int32[Array, " B"]:
    """Return a token for each row.

    Args:
        logits: The model's.
        limits: How each row is drawn.
        position: The number of the token in its text.
        present: The tokens that each text has; only LIMITED reads it.
        kind: The largest kind of the rows.
    """
    penal = logits
    if kind == LIMITED:
        penalty = limits.penalty[:, None]
        penal = jnp.where(
            present, jnp.where(logits > 0, logits / penalty, logits * penalty), logits
        )
    tokens = jnp.argmax(penal, axis=-1).astype(jnp.int32)
    if kind > GREEDY:
        seeds = jnp.stack([limits.seed, limits.sample.astype(jnp.uint32)], axis=1)
        left = limited(penal, limits) if kind == LIMITED else tempered(penal, limits.temperature)
        drawn = jax.vmap(jax.random.categorical)(keys_of(seeds, position), left).astype(jnp.int32)
        tokens = jnp.where(limits.temperature > 0, drawn, tokens)
    return tokens
