"""Text from a `Decoder`: one token of each text at a time, drawn from the model's logits."""

import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32, Key, UInt32

from models.decoder import Decoder
from models.errors import check_int

# Temperatures above are all alike. Float32 has this one and its reciprocal as normal numbers.
HOTTEST = 1e37
# Fewest tokens that programs are compiled for, of a prompt and of a cache.
LEAST_WIDTH, LEAST_ROOM = 64, 512


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
        number, t = (int, float, np.number), self.temperature
        if not isinstance(t, number) or not 0 <= t < math.inf:
            raise ValueError(f"`temperature` must be a finite number of at least 0; got {t!r}.")
        check_int("top_k", self.top_k, optional=True)
        for name in ("top_p", "min_p"):
            p = getattr(self, name)
            if p is not None and not (isinstance(p, number) and 0 < p <= 1):
                raise ValueError(f"`{name}` must be above 0 and at most 1, or None; got {p!r}.")
        if not isinstance(self.seed, int | np.integer):
            raise ValueError(f"`seed` must be an int; got {self.seed!r}.")


def likeliest(
    logits: Float[Array, "B vocab"], weights: Float[Array, "B vocab"], most: Any
) -> Bool[Array, "B vocab"]:
    """Return which tokens have less than `most` of the weights before them.

    Tokens before a token have a larger logit, or the same one and a smaller number. Equal logits
    have equal weights. The first token of all is always one of these.

    The smallest such logit is found by bisection of its bits, which takes less time on a GPU than
    to sort a vocabulary.
    """
    most = _of_rows(most, logits)
    size = logits.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(logits + 0, f"int{8 * size}")  # -0 becomes 0
    key = bits ^ ((bits >> 8 * size - 1) & jnp.iinfo(bits.dtype).max)  # in the order of the logits

    def before(bound):
        return jnp.sum(jnp.where(key > bound, weights, 0), axis=-1, keepdims=True)

    def halve(_, ends):
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)
        few = before(middle) < most
        return jnp.where(few, low, middle + 1), jnp.where(few, middle, high)

    ends = jnp.iinfo(key.dtype).min, jnp.iinfo(key.dtype).max
    ends = tuple(jnp.full((len(key), 1), end, key.dtype) for end in ends)
    bound, _ = jax.lax.fori_loop(0, 8 * size, halve, ends)
    equal = jnp.where(key == bound, weights, 0)
    of_equal = (key == bound) & (before(bound) + jnp.cumsum(equal, axis=-1) - equal < most)
    first = jnp.argmax(logits, axis=-1, keepdims=True) == jnp.arange(logits.shape[-1])
    return (key > bound) | of_equal | first


def tempered(
    logits: Float[Array, "B vocab"], temperature: float | Float[Array, " B"]
) -> Float[Array, "B vocab"]:
    """Return the distance of logits to the largest over a temperature of at most `HOTTEST`.

    The largest gives 0, at a temperature of 0, too. Numbers are float32 or wider.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    top = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits == top, 0, (logits - top) / _of_rows(temperature, logits))


def limited(logits: Float[Array, "B vocab"], sampling: Any) -> Float[Array, "B vocab"]:
    """Return the `tempered` logits, with -inf for tokens that must not be drawn.

    `sampling` is a `Sampling`, or has arrays with a value for each row in its place.
    """
    # Tokens are chosen and sorted before a high temperature makes them equal.
    best = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if sampling.top_k is not None:
        best = jnp.where(likeliest(best, jnp.ones_like(best), sampling.top_k), best, -jnp.inf)
    logits = tempered(best, sampling.temperature)
    if sampling.top_p is not None:
        # Tokens may have a probability that rounding loses in the sum of all, which is 1.
        most = jnp.where(jnp.asarray(sampling.top_p) < 1, sampling.top_p, jnp.inf)
        logits = jnp.where(likeliest(best, jax.nn.softmax(logits), most), logits, -jnp.inf)
    if sampling.min_p is not None:
        least = jnp.log(_of_rows(sampling.min_p, logits))
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def _of_rows(value: Any, logits: Float[Array, "B vocab"]) -> Float[Array, "#B #vocab"]:
    """Return a number, or one for each row, to be used with logits."""
    value = value if isinstance(value, Array) else min(float(value), HOTTEST)
    value = jnp.asarray(value, logits.dtype)
    return value[:, None] if value.ndim else value


def draw(
    logits: Float[Array, "B vocab"], key: Key[Array, "*B"], sampling: Sampling
) -> Int32[Array, " B"]:
    """Return a token for each row; its random numbers do not depend on the other rows.

    A single key is folded with the number of the row.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if key.ndim == 0:
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(logits)))
    return jax.vmap(jax.random.categorical)(key, limited(logits, sampling)).astype(jnp.int32)


class Generation:
    """The continuation of several texts; iterate over it for their tokens.

    Each item has the next token of each text, None for a text that has ended. A text ends by a stop
    token, after `count` tokens, by `end`, or by a full context. Its tokens depend on itself, the
    seed and the number of equal prompts before it; texts beside it change them by rounding at most.

    Texts of different lengths lie side by side, padded at their ends; the cache has a length for
    each. The device computes a step while the host reads the tokens of the step before. Prompts are
    padded to a power of two of tokens, and so is the cache, so that other lengths share programs.

    Args:
        model: The model.
        prompts: The tokens of each text, at least one.
        count: Most tokens that are added to a text.
        sampling: How a token is drawn.
        stop_tokens: Tokens that end a text.
        when_full: What becomes of a text when the model has read as many of its tokens as the
            context has. "stop" ends it; the last token is the one drawn then. "slide" reads again
            its first `keep` tokens and its last ones, half of what the context has beside `keep`.
            A prompt longer than the context begins so, too.
        keep: The first tokens of each text that stay when it slides, such as the system's words.

    Attributes:
        ended: Whether each text has ended.
        full: Whether each text has ended by a full context.
        compile_seconds: Time to compile the programs; 0 where an equal model's are there.
        prefill: Tokens of the prompts, and the seconds in which they were read.
        decode: Tokens that came after the first of each text, and their seconds; where a text
            slides, also the seconds in which it was read again.

    Raises:
        ValueError: A prompt is empty, has a number that is no token of the model, or is longer than
            the context without "slide"; or `when_full` and `keep` do not fit.
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        count: int,
        sampling: Sampling | None = None,
        *,
        stop_tokens: Sequence[int] = (),
        when_full: str = "stop",
        keep: int = 0,
    ):
        context = model.config.context
        _check_prompts(prompts, model.config.vocab_size)
        _check_full(prompts, context, when_full, keep)
        # A copy of the module, with the same parameters: the cache is not the caller's.
        self._model, self._sampling = nnx.merge(*nnx.split(model)), sampling or Sampling()
        self._texts = [list(prompt) for prompt in prompts]
        self._seeds = _seeds(self._sampling.seed, prompts)
        self.ended, self.full = [False] * len(prompts), [False] * len(prompts)
        self._count, self._stop_tokens = count, frozenset(stop_tokens)
        self._slides, self._keep, self._context = when_full == "slide", keep, context
        self.compile_seconds = 0.0
        self.prefill = self.decode = 0, 0.0

    def end(self, row: int) -> None:
        """End a text after the tokens that it has."""
        self.ended[row] = True

    def __iter__(self) -> Iterator[list[int | None]]:
        if self._count < 1 or all(self.ended):
            return
        texts = [self._window(text) for text in self._texts]
        held = np.array([len(text) for text in texts])  # tokens of each text in the cache
        read, compiled = int(held.sum()), self.compile_seconds
        # The last token that is drawn is not in the cache.
        room = _rounded(int(held.max()) + self._count - 1, LEAST_ROOM, self._context)
        batch = _Batch(self._model, self._sampling, self._seeds, room)
        stamp = batch.clock()
        batch.read(texts, 0, 0)
        for n in range(1, self._count + 1):
            drawn, more, going = batch.tokens, n < self._count, ~np.array(self.ended)
            full, going = going & (held == self._context), going & (held < self._context)
            if more and going.any():
                batch.step(n)
                held += going
            tokens = np.asarray(drawn)
            seconds, stamp = batch.clock() - stamp, batch.clock()
            if n == 1:
                self.prefill = _added(self.prefill, read, seconds)
            else:
                self.decode = _added(self.decode, self.ended.count(False), seconds)
            taken = self._take(tokens)
            for row in np.flatnonzero(full & ~np.array(self.ended) & more).tolist():
                if self._slides:
                    text = self._window(self._texts[row])
                    batch.read([text], row, n)
                    held[row] = len(text)
                else:
                    self.full[row] = self.ended[row] = True
            self.compile_seconds = compiled + batch.compile_seconds
            yield taken
            if all(self.ended):
                return

    def _window(self, text: list[int]) -> list[int]:
        """Return the tokens of a text that the model reads."""
        if len(text) <= self._context:
            return text
        newest = max((self._context - self._keep) // 2, 1)
        return text[: self._keep] + text[-newest:]

    def _take(self, tokens: np.ndarray) -> list[int | None]:
        """Add the tokens to the texts that go on, and return them."""
        taken: list[int | None] = []
        for row, token in enumerate(tokens.tolist()):
            taken.append(None if self.ended[row] else token)
            if not self.ended[row]:
                self._texts[row].append(token)
                self.ended[row] = token in self._stop_tokens
        return taken


class _Batch:
    """Texts on the devices: a cache, and the last token of each.

    Args:
        model: The model.
        sampling: How a token is drawn.
        seeds: The numbers of which each text's keys are made, uint32 [texts, numbers].
        room: Tokens of each text in the cache.

    Attributes:
        tokens: The last token that was drawn for each text.
        compile_seconds: Time to compile the programs.
    """

    def __init__(self, model: Decoder, sampling: Sampling, seeds: np.ndarray, room: int):
        model.init_cache(len(seeds), room)
        structure, cache, params = take_apart(model)
        # On several devices, the next step must find the cache as this step found it.
        places = tuple(x.sharding for x in cache)
        whole = places[0] if model.layout is None else model.layout.sharding()
        shapes = (
            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays)
            for arrays in (cache, params)
        )
        self._kind = structure, dataclasses.replace(sampling, seed=0), (whole, places), *shapes
        self._cache, self._params, self._seeds, self._room = cache, params, seeds, room
        self._made, self.compile_seconds = {}, 0.0
        self.tokens: Any = np.zeros(len(seeds), np.int32)
        # Compiled before the first text is read, so that its time has no compiling in it.
        self._program(_step, (seeds, np.int32(0)))

    def clock(self) -> float:
        """Return the time in seconds, without compiling."""
        return time.perf_counter() - self.compile_seconds

    def read(self, texts: Sequence[Sequence[int]], first: int, n: int) -> None:
        """Read texts, which begin with number `first`, anew, and draw token `n` of each."""
        lengths = np.array([len(text) for text in texts], np.int32)
        width = _rounded(int(lengths.max()), LEAST_WIDTH, self._room)
        padded = np.zeros((len(texts), width), np.int32)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = text
        seeds = self._seeds[first : first + len(texts)]
        self._run(_read, padded, lengths, seeds, np.int32(n), np.int32(first))

    def step(self, n: int) -> None:
        """Draw token `n` of each text; where a cache is full, the token means nothing."""
        self._run(_step, self._seeds, np.int32(n))

    def _run(self, function, *inputs):
        program = self._program(function, inputs)
        self.tokens, self._cache = program(self._cache, self._params, self.tokens, *inputs)

    def _program(self, function, inputs):
        """Return the compiled function for inputs of these shapes."""
        key = function, inputs[0].shape
        if key not in self._made:
            start, before = time.perf_counter(), _programs.cache_info().misses
            shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (self.tokens, *inputs))
            self._made[key] = _programs(function, *self._kind, tuple(shapes))
            if _programs.cache_info().misses > before:
                self.compile_seconds += time.perf_counter() - start
        return self._made[key]


class Structure(NamedTuple):
    """A model without its arrays."""

    graphdef: nnx.GraphDef
    cache: Any
    params: Any

    def model(self, cache, params) -> Decoder:
        """Return the model with these arrays."""
        trees = (self.cache, cache), (self.params, params)
        return nnx.merge(self.graphdef, *(jax.tree.unflatten(*x) for x in trees))


def take_apart(model: Decoder) -> tuple[Structure, list[Array], list[Array]]:
    """Return a model without its arrays, the arrays of its cache, and its parameters."""
    graphdef, *state = nnx.split(model, nnx.Cache, ...)
    # Lists, because JAX takes longer to flatten Flax's trees than small models take for a step.
    (cache, cache_tree), (params, params_tree) = map(jax.tree.flatten, state)
    return Structure(graphdef, cache_tree, params_tree), cache, params


# One for each number of texts and each rounded length of prompts and cache.
@functools.lru_cache(maxsize=64)
def _programs(function, structure: Structure, sampling: Sampling, results, cache, params, inputs):
    """Compile `_read` or `_step` for arrays of these shapes."""
    function = functools.partial(function, structure, sampling)
    jitted = jax.jit(function, donate_argnums=0, out_shardings=(results[0], [*results[1]]))
    return jitted.lower([*cache], [*params], *inputs).compile()


def _read(structure, sampling, cache, params, tokens, texts, lengths, seeds, n, first):
    """Read texts, which begin with number `first`; return all tokens with theirs, and the cache."""
    # XLA copies nothing where these are all texts.
    rows = [jax.lax.dynamic_slice_in_dim(x, first, len(texts)) for x in cache]
    # These texts have nothing in the cache yet; only its lengths have one axis.
    empty = [0 * x if x.ndim == 1 else x for x in rows]
    model = structure.model(empty, params)
    stream = model.stream(texts, decode=True, lengths=lengths)
    # The logits of all tokens would be larger than all else.
    last = stream[jnp.arange(len(texts)), lengths - 1]
    drawn = draw(model.logits(last), keys_of(seeds, n), sampling)
    tokens, *cache = (
        jax.lax.dynamic_update_slice_in_dim(x, y, first, axis=0)
        for x, y in zip((tokens, *cache), (drawn, *_cache_of(model)), strict=True)
    )
    return tokens, cache


def _step(structure, sampling, cache, params, tokens, seeds, n):
    """Return the token after one token of each text, and the cache."""
    model = structure.model(cache, params)
    logits = model(tokens[:, None], decode=True)[:, -1]
    return draw(logits, keys_of(seeds, n), sampling), _cache_of(model)


def _cache_of(model: Decoder) -> list[Array]:
    return jax.tree.leaves(nnx.state(model, nnx.Cache))


def keys_of(seeds: UInt32[Array, "B numbers"], n: Int32[Array, "*B"]) -> Key[Array, " B"]:
    """Return the key of token `n` of each text."""

    def key(numbers, n):
        seed, *rest = numbers
        return functools.reduce(jax.random.fold_in, (*rest, n), jax.random.key(seed))

    return jax.vmap(key)(seeds, jnp.broadcast_to(n, len(seeds)))


def _seeds(seed: int, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the numbers of which each text's keys are made, uint32 [texts, 3].

    They are the seed, the prompt's hash, and the number of equal prompts before it, so that a
    text's random numbers depend on no other prompt.
    """
    seeds, seen = [], Counter()
    for prompt in prompts:
        numbers = np.array([len(prompt), *prompt], np.uint32)
        mark = int(np.random.SeedSequence(numbers).generate_state(1)[0])
        seeds.append((seed % 2**32, mark, seen[mark]))
        seen[mark] += 1
    return np.array(seeds, np.uint32)


def _rounded(length: int, least: int, most: int) -> int:
    """Return the power of two from `length` on, of at least `least` and at most `most`."""
    return min(max(1 << (length - 1).bit_length(), least), most)


def _added(total: tuple[int, float], tokens: int, seconds: float) -> tuple[int, float]:
    return total[0] + tokens, total[1] + seconds


def _check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    if len(prompts) == 0:
        raise ValueError("`prompts` must have at least one text; got none.")
    for number, prompt in enumerate(prompts, 1):
        check_tokens("prompts", prompt, vocab_size, f" in text {number}")


def check_tokens(name: str, prompt: Sequence[int], vocab_size: int, where: str = "") -> None:
    """Raise if the tokens of an argument are none, or not the model's."""
    try:
        tokens = np.asarray(prompt)
    except ValueError:  # NumPy's, for lists of unequal lengths.
        tokens = np.empty((len(prompt), 0), object)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise ValueError(
            f"`{name}` must be a list of ints for each text; got {tokens.dtype} {tokens.shape}"
            f"{where}."
        )
    if tokens.size == 0:
        raise ValueError(f"`{name}` must have a token in each text; got none{where}.")
    if not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(
            f"`{name}` must have tokens from 0 to {vocab_size - 1}; got {tokens.min()} to "
            f"{tokens.max()}{where}."
        )


def _check_full(prompts: Sequence[Sequence[int]], context: int, when_full: str, keep: int) -> None:
    if when_full not in ("stop", "slide"):
        raise ValueError(f'`when_full` must be "stop" or "slide"; got {when_full!r}.')
    if not isinstance(keep, int | np.integer) or not 0 <= keep < context:
        raise ValueError(
            f"`keep` must be from 0 to {context - 1} tokens, fewer than the context; got {keep!r}."
        )
    if when_full == "slide":
        return
    if keep:
        raise ValueError(f'`keep` must be 0 unless `when_full` is "slide"; got {keep}.')
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) > context:
            raise ValueError(
                f"`prompts` must have at most the {context} tokens of the context; got "
                f'{len(prompt)} in text {number}. Shorten it, or let `when_full` be "slide".'
            )
