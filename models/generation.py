"""Text from a `Decoder`: one token of each text at a time, drawn from the model's logits."""

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32, Key

from models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn; a token must pass every limit.

    Attributes:
        temperature: Divides the logits; 0 always takes the most likely token.
        top_k: Only this many most likely tokens; None is all.
        top_p: Only the most likely tokens that together have this probability; None is all.
        min_p: Only tokens of at least this share of the largest probability; None is all.
        seed: The same seed gives the same tokens.

    Raises:
        ValueError: A value is out of range, or no number.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        number, whole = (int, float, np.number), (int, np.integer)
        t, k = self.temperature, self.top_k
        if not isinstance(t, number) or not 0 <= t < math.inf:
            raise ValueError(f"`temperature` must be a finite number of at least 0; got {t!r}.")
        if k is not None and not (isinstance(k, whole) and k >= 1):
            raise ValueError(f"`top_k` must be an int of at least 1, or None; got {k!r}.")
        for name in ("top_p", "min_p"):
            p = getattr(self, name)
            if p is not None and not (isinstance(p, number) and 0 < p <= 1):
                raise ValueError(f"`{name}` must be above 0 and at most 1, or None; got {p!r}.")
        if not isinstance(self.seed, whole):
            raise ValueError(f"`seed` must be an int; got {self.seed!r}.")


def limited(logits: Float[Array, "B vocab"], sampling: Sampling) -> Float[Array, "B vocab"]:
    """Return the logits over the temperature, with -inf for tokens that must not be drawn."""
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        kept = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0]
        logits = jnp.where(logits < kept[:, -1:], -jnp.inf, logits)
    if sampling.top_p is not None:
        order = jnp.argsort(-logits, axis=-1)
        p = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1))
        # The first token is always kept: no token is more likely.
        kept = jnp.cumsum(p, axis=-1) - p < sampling.top_p
        kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
        logits = jnp.where(kept, logits, -jnp.inf)
    if sampling.min_p is not None:
        least = jnp.max(logits, axis=-1, keepdims=True) + math.log(sampling.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def draw(
    logits: Float[Array, "B vocab"], key: Key[Array, ""], sampling: Sampling
) -> Int32[Array, " B"]:
    """Return a token for each row; a row's random numbers do not depend on the other rows."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(logits)))
    return jax.vmap(jax.random.categorical)(keys, limited(logits, sampling)).astype(jnp.int32)


class Generation:
    """The continuation of several texts; iterate over it for their tokens.

    Each item has the next token of each text, None for a text that has ended. A text ends by a stop
    token, after `count` tokens, or by `end`.

    Texts of different lengths lie side by side, padded at their ends; the cache has a length for
    each. The device computes a step while the host reads the tokens of the step before. Where a
    text has filled the model's context, its last half context is read again, without the beginning.

    Args:
        model: The model.
        prompts: The tokens of each text, at least one.
        count: Most tokens that are added to a text.
        sampling: How a token is drawn.
        stop_tokens: Tokens that end a text.

    Attributes:
        ended: Whether each text has ended.
        compile_seconds: Time to compile the programs; 0 where an equal model's are there.
        prefill: Tokens of the prompts, and the seconds in which they were read.
        decode: Tokens that came after the first of each text, and their seconds.

    Raises:
        ValueError: A prompt is empty or has a number that is no token of the model.
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        count: int,
        sampling: Sampling | None = None,
        *,
        stop_tokens: Sequence[int] = (),
    ):
        _check_prompts(prompts, model.config.vocab_size)
        # A copy of the module, with the same parameters: the cache is not the caller's.
        self._model, self._sampling = nnx.merge(*nnx.split(model)), sampling or Sampling()
        self._texts = [list(prompt) for prompt in prompts]
        self.ended = [False] * len(prompts)
        self._count, self._stop_tokens = count, frozenset(stop_tokens)
        self.compile_seconds = 0.0
        self.prefill = self.decode = 0, 0.0

    def end(self, row: int) -> None:
        """End a text after the tokens that it has."""
        self.ended[row] = True

    def __iter__(self) -> Iterator[list[int | None]]:
        made = 0
        while made < self._count and not all(self.ended):
            for tokens in self._until_full(made):
                made += 1
                yield tokens

    def _until_full(self, made: int) -> Iterator[list[int | None]]:
        """Read the texts into a new cache, and add tokens until one has no room.

        Args:
            made: Tokens that each text has got before.
        """
        context, left = self._model.config.context, self._count - made
        full = max(map(len, self._texts)) >= context
        kept = max(context // 2, 1) if full else context
        given = [text[-kept:] for text in self._texts]
        lengths = np.array([len(text) for text in given], np.int32)
        width = int(lengths.max())
        # The last token that is drawn is not in the cache.
        steps = min(left, context - width + 1)
        padded = np.zeros((len(given), width), np.int32)
        for row, text in zip(padded, given, strict=True):
            row[: len(text)] = text
        # Every cache after the first has the same size, so that its programs compile once.
        self._model.init_cache(len(padded), context if made else width + steps - 1)
        graphdef, *state = nnx.split(self._model, nnx.Cache, ...)
        # Lists, because JAX takes longer to flatten Flax's trees than small models take for a step.
        (cache, cache_tree), (params, params_tree) = map(jax.tree.flatten, state)

        structure = _Structure(graphdef, cache_tree, params_tree)
        read, step = self._compiled(structure, cache, params, padded)

        key = jax.random.key(self._sampling.seed)
        stamp = time.perf_counter()
        token, cache = read(cache, params, padded, lengths, key, np.int32(made))
        for n in range(1, steps + 1):
            before = token
            if n < steps:
                token, cache = step(cache, params, token, key, np.int32(made + n))
            tokens = np.asarray(before)
            seconds, stamp = time.perf_counter() - stamp, time.perf_counter()
            if n == 1:
                self.prefill = _added(self.prefill, int(lengths.sum()), seconds)
            else:
                self.decode = _added(self.decode, self.ended.count(False), seconds)
            yield self._take(tokens)
            if all(self.ended):
                return

    def _take(self, tokens: np.ndarray) -> list[int | None]:
        """Add the tokens to the texts that go on, and return them."""
        taken: list[int | None] = []
        for row, token in enumerate(tokens.tolist()):
            taken.append(None if self.ended[row] else token)
            if not self.ended[row]:
                self._texts[row].append(token)
                self.ended[row] = token in self._stop_tokens
        return taken

    def _compiled(self, structure, cache, params, padded):
        """Return the programs that read the padded texts, and that add a token to each."""
        # On several devices, the next step must find the cache as this step found it.
        places = tuple(x.sharding for x in cache)
        whole = places[0] if self._model.layout is None else self._model.layout.sharding()
        shapes = (
            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays)
            for arrays in (cache, params)
        )
        rule = dataclasses.replace(self._sampling, seed=0)
        start, before = time.perf_counter(), _programs.cache_info().misses
        programs = _programs(structure, rule, (whole, places), *shapes, padded.shape)
        if _programs.cache_info().misses > before:
            self.compile_seconds += time.perf_counter() - start
        return programs


class _Structure(NamedTuple):
    """A model without its arrays."""

    graphdef: nnx.GraphDef
    cache: Any
    params: Any

    def model(self, cache, params) -> Decoder:
        trees = (self.cache, cache), (self.params, params)
        return nnx.merge(self.graphdef, *(jax.tree.unflatten(*x) for x in trees))


# Texts of other lengths, or another number of them, need other programs.
@functools.lru_cache(maxsize=16)
def _programs(structure: _Structure, sampling: Sampling, results, cache, params, texts):
    """Compile the programs `read` and `step` for arrays of these shapes, and [texts, tokens]."""

    def compiled(function, *shapes):
        function = functools.partial(function, structure, sampling)
        jitted = jax.jit(function, donate_argnums=0, out_shardings=(results[0], [*results[1]]))
        key, n = jax.eval_shape(lambda: jax.random.key(0)), np.int32(0)
        return jitted.lower([*cache], [*params], *shapes, key, n).compile()

    tokens, each = (jax.ShapeDtypeStruct(shape, np.int32) for shape in (texts, texts[:1]))
    return compiled(_read, tokens, each), compiled(_step, each)


def _read(structure, sampling, cache, params, tokens, lengths, key, n):
    """Read the prompts, and return the token after each and the cache."""
    model = structure.model(cache, params)
    stream = model.stream(tokens, decode=True, lengths=lengths)
    # The logits of all tokens would be larger than all else.
    last = stream[jnp.arange(len(tokens)), lengths - 1]
    token = draw(model.logits(last), jax.random.fold_in(key, n), sampling)
    return token, jax.tree.leaves(nnx.state(model, nnx.Cache))


def _step(structure, sampling, cache, params, token, key, n):
    """Return the token after one token of each text, and the cache."""
    model = structure.model(cache, params)
    logits = model(token[:, None], decode=True)[:, -1]
    token = draw(logits, jax.random.fold_in(key, n), sampling)
    return token, jax.tree.leaves(nnx.state(model, nnx.Cache))


def _added(total: tuple[int, float], tokens: int, seconds: float) -> tuple[int, float]:
    return total[0] + tokens, total[1] + seconds


def _check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    if len(prompts) == 0:
        raise ValueError("`prompts` must have at least one text; got none.")
    for number, prompt in enumerate(prompts, 1):
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
            raise ValueError(
                "`prompts` must be a list of ints for each text; got "
                f"{tokens.dtype} {tokens.shape} as text {number}."
            )
        if len(prompt) == 0:
            raise ValueError(f"`prompts` must have a token each; got none in text {number}.")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise ValueError(
                f"`prompts` must have tokens from 0 to {vocab_size - 1}; got "
                f"{min(prompt)} to {max(prompt)} in text {number}."
            )
