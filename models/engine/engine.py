"""`Engine`: requests come and go, and each step computes some tokens of all that are there."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.decoder import Decoder
from models.engine.sampling import DRAWN, GREEDY, KINDS, LIMITED, Limits, Sampling, draw
from models.engine.scheduler import Part, Request, Scheduler
from models.generation import Structure, check_tokens, take_apart
from models.tokens import TextStream

CACHE_DTYPES = "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"
# Columns of a step's array of slots, before those of `Limits`: a token to compute, if it is the only
# one and known, else -1; the number of tokens to compute, and of all so far; whether to draw the
# next one; the page of the only token, if it is new, else -1.
TOKEN, NEW, LENGTH, DRAWS, PAGE = range(5)
FIELDS = 5 + len(Limits._fields)
# Sizes of the programs that take prompts, each a quarter of the one before.
SIZES = 3


class Answer:
    """A continuation, which grows while its engine steps.

    Attributes:
        id: The number of the request.
        sample: Number of the continuation among those of the request.
        prompt: The tokens of the prompt.
        tokens: The new tokens.
        log_probabilities: The logarithm of the probability that the model gives to each new token,
            at temperature 1 and without limits.
        end: None while it grows; then "stop" (a stop token or string), "length" (`max_tokens`),
            "full" (the model's context, or all pages) or "cancelled".
    """

    def __init__(self, id: int, sample: int, prompt: Sequence[int], make_stream: Any):
        self.id, self.sample, self.prompt = id, sample, prompt
        self.tokens: list[int] = []
        self.log_probabilities: list[float] = []
        self.end: str | None = None
        self._make_stream, self._decoded = make_stream, 0

    @property
    def text(self) -> str:
        """The new text, without what may yet become a character or a stop string."""
        stream = self._stream
        for token in self.tokens[self._decoded :]:
            stream.add(token)
        self._decoded = len(self.tokens)
        if self.end is not None:
            stream.finish()
        return stream.text

    @property
    def stopped(self) -> bool:
        """Whether the text has a stop string."""
        return bool(self.text or True) and self._stream.stopped

    @functools.cached_property
    def _stream(self) -> TextStream:
        if self._make_stream is None:
            raise ValueError("`text` needs an engine with a tokenizer; got None: read `tokens`.")
        return self._make_stream()

    def __repr__(self) -> str:
        return f"Answer(id={self.id}, sample={self.sample}, {len(self.tokens)} tokens, {self.end})"


@dataclasses.dataclass(eq=False)
class _Text:
    """A continuation and its place in the scheduler."""

    answer: Answer
    request: Request
    sampling: Sampling
    stop_tokens: frozenset[int]


class Engine:
    """Continues the texts of many requests at once.

    Each step computes a token of every text that is being continued, and beside them some tokens of
    new prompts. The device computes a step while the host reads the tokens of the step before.

    Example:
        >>> from flax import nnx
        >>> from models import Decoder
        >>> from models.config import gpt
        >>> from models.engine import Engine, Sampling
        >>> model = Decoder(gpt(features=32, context=64), rngs=nnx.Rngs(0))
        >>> engine = Engine(model, pages=16, page_size=8, max_requests=4, max_tokens_per_step=16)
        >>> answers = engine.run([[1, 2, 3], [4, 5]], Sampling(max_tokens=5))
        >>> [len(answer.tokens) for answer in answers]
        [5, 5]

    Args:
        model: The model. Its parameters are not copied.
        tokenizer: For texts and messages, as in `models.tokens`; None takes tokens alone.
        pages: Number of pages of the cache. Together they have the tokens of all texts that are
            continued at once.
        page_size: Tokens of a page. Texts share whole pages.
        cache_dtype: Type of keys and values: float32, bfloat16, float16, or quantised int8 and
            float8_e4m3fn; None is the activations'.
        max_requests: Most texts that are continued at once; others wait.
        max_tokens_per_step: Most tokens that a step computes, a power of two above `max_requests`.

    Attributes:
        max_length: Most tokens that the model reads of a text: its context, or what all pages hold.
        preemptions: Number of times that a text has lost its pages to older ones. It was read again.

    Raises:
        ValueError: An argument is out of range, or of another kind.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any = None,
        *,
        pages: int,
        page_size: int = 64,
        cache_dtype: str | None = None,
        max_requests: int = 64,
        max_tokens_per_step: int = 2048,
    ):
        if not isinstance(model, Decoder):
            raise ValueError(f"`model` must be a Decoder; got {type(model).__name__}.")
        sizes = dict(pages=pages, page_size=page_size, max_requests=max_requests)
        for name, size in (sizes | dict(max_tokens_per_step=max_tokens_per_step)).items():
            if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
                raise ValueError(f"`{name}` must be an int of at least 1; got {size!r}.")
        if max_tokens_per_step & (max_tokens_per_step - 1) or max_tokens_per_step <= max_requests:
            raise ValueError(
                f"`max_tokens_per_step` must be a power of two above {max_requests}, the most "
                f"requests; got {max_tokens_per_step}."
            )
        if cache_dtype is not None and str(np.dtype(cache_dtype)) not in CACHE_DTYPES:
            raise ValueError(
                f"`cache_dtype` must be None or one of {', '.join(CACHE_DTYPES)}; got {cache_dtype}."
            )
        config = model.config
        self._vocab_size, self._tokenizer = config.vocab_size, tokenizer
        self._page_size, self._rows = page_size, max_requests
        self.max_length = min(config.context, pages * page_size)
        all_slide = bool(config.sliding) and all(config.sliding)
        self._scheduler = Scheduler(
            pages, page_size, max_requests, max_tokens_per_step,
            config.window - 1 if all_slide and config.window else None,
        )  # fmt: skip
        copied = nnx.merge(*nnx.split(model))
        copied.init_pages(pages, page_size, cache_dtype)
        self._structure, cache, self._params = take_apart(copied)
        whole = cache[0].sharding if model.layout is None else model.layout.sharding()
        columns = -(-self.max_length // page_size)
        self._state = (
            cache,
            jnp.zeros(max_requests, jnp.int32, device=whole),
            jnp.zeros((max_requests, columns), jnp.int32, device=whole),
            jnp.zeros((max_requests, self._vocab_size), bool, device=whole),
        )
        places = tuple(x.sharding for x in cache), whole, whole, whole
        # The first step must find the arrays where later steps leave them.
        self._state = jax.device_put(self._state, ([*places[0]], *places[1:]))
        self._places = places, whole
        sizes = [max_tokens_per_step // 4**n for n in range(SIZES)]
        self._sizes = [size for size in reversed(sizes) if size > max_requests]
        # The arrays of a step on the host.
        self._slots = np.zeros((max_requests, FIELDS), np.int32)
        self._slots[:, PAGE] = -1
        self._table = np.zeros((max_requests, columns), np.int32)
        self._texts: dict[int, list[_Text]] = {}
        self._of_request: dict[Request, _Text] = {}
        self._next_id, self._flying, self._changed, self._made = 0, None, [], {}

    # --------------------------------------------------------------------------- what users call

    @property
    def busy(self) -> bool:
        """Whether a text has not ended."""
        return bool(self._texts) or bool(self._changed)

    @property
    def preemptions(self) -> int:
        """Number of times that a text has lost its pages to older ones."""
        return self._scheduler.preemptions

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
    ) -> int:
        """Take a request, and return its number.

        Args:
            prompt: Tokens; or a text to continue, or the messages of a chat (`role` and `content`
                each), which need a tokenizer.
            sampling: How it is continued; None is `Sampling()`.

        Raises:
            ValueError: The prompt is empty, is longer than `max_length`, or has another token than
                the model's; or its text, or the stop strings, come without a tokenizer.
        """
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            kind = f"{type(sampling).__module__}.{type(sampling).__name__}"
            raise ValueError(f"`sampling` must be a models.engine.Sampling; got {kind}.")
        tokens = self._tokens_of(prompt)
        if len(tokens) > self.max_length:
            raise ValueError(
                f"`prompt` must have at most {self.max_length} tokens, as the model's context and "
                f"the pages allow; got {len(tokens)}. Shorten it, or give the engine more pages."
            )
        if sampling.stop and self._tokenizer is None:
            raise ValueError("`stop` needs an engine with a tokenizer; got None: use `stop_tokens`.")
        most = self.max_length + 1
        if sampling.max_tokens is not None:
            most = min(most, len(tokens) + sampling.max_tokens)
        stops = sampling.stop_tokens
        if stops is None:
            stops = () if self._tokenizer is None else self._tokenizer.stop_tokens
        id, self._next_id = self._next_id, self._next_id + 1
        self._texts[id], make = [], None
        if self._tokenizer is not None:
            make = functools.partial(TextStream, self._tokenizer.decode, tokens, sampling.stop)
        for sample in range(sampling.samples):
            # A step must see each token to know which ones the text has.
            request = Request(list(tokens), most, shares=sampling.repetition_penalty == 1)
            text = _Text(Answer(id, sample, tokens, make), request, sampling, frozenset(stops))
            self._of_request[request] = text
            self._texts[id].append(text)
            self._scheduler.add(request)
        return id

    def step(self) -> list[Answer]:
        """Compute a step, and return the answers with a new token or an end.

        They are those of the step before, which the device has computed meanwhile.
        """
        parts = self._scheduler.plan()
        before, self._flying = self._flying, self._launch(parts) if parts else None
        if before is not None:
            self._read(*before)
        changed, self._changed = self._changed, []
        return changed

    def run(
        self,
        prompts: Iterable[Any],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        progress: bool = False,
    ) -> list[Answer]:
        """Return the answers to prompts, in their order, with all samples of a prompt in a row.

        Args:
            prompts: Each as in `submit`.
            sampling: How all are continued, or how each is.
            progress: Whether a bar shows the answers that have ended; it needs the package tqdm.

        Raises:
            ValueError: The engine has other requests, or a request is refused by `submit`.
        """
        if self.busy:
            raise ValueError("`run` needs an engine without requests; call `step` until it has none.")
        prompts = list(prompts)
        each = sampling if isinstance(sampling, list | tuple) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(
                f"`sampling` must be one for all {len(prompts)} prompts, or one for each; got "
                f"{len(each)}."
            )
        try:
            ids = [self.submit(*request) for request in zip(prompts, each, strict=True)]
            answers = [text.answer for id in ids for text in self._texts[id]]
            bar = _bar(len(answers)) if progress else None
            while self.busy:
                ended = sum(answer.end is not None for answer in self.step())
                if bar is not None:
                    bar.update(ended)
            if bar is not None:
                bar.close()
        finally:
            # After an error or an interrupt, nothing is left.
            for id in list(self._texts):
                self.cancel(id)
            self._changed = []
        return answers

    def cancel(self, id: int) -> None:
        """End a request; one that has ended stays as it is.

        Raises:
            ValueError: There was no such request.
        """
        if id not in range(self._next_id):
            raise ValueError(f"`id` must be a number that `submit` has returned; got {id!r}.")
        for text in list(self._texts.get(id, ())):
            self._end(text, "cancelled")
            self._changed.append(text.answer)

    def set_model(self, model: Decoder) -> None:
        """Take the parameters of a model of the same shape, as after a step of training.

        Raises:
            ValueError: The engine has requests, or the model has another shape.
        """
        if self.busy:
            raise ValueError("`set_model` needs an engine without requests; cancel or finish them.")
        params = jax.tree.leaves(nnx.state(model, nnx.Param))
        shapes = [[(x.shape, x.dtype) for x in arrays] for arrays in (params, self._params)]
        if shapes[0] != shapes[1]:
            raise ValueError("`model` must have the parameters' shapes and dtypes of the first one.")
        self._params = params
        self._scheduler.pages.forget()

    def warm_up(self) -> int:
        """Compile all programs that requests may need, and return how many there are."""
        for size in (None, *self._sizes):
            for kind in KINDS:
                if size is None or kind != GREEDY:
                    self._call(size, kind, self._slots.copy(), [])
        jax.block_until_ready(self._state)
        return self.programs

    @property
    def programs(self) -> int:
        """Number of programs that are compiled for this engine's model."""
        return sum(self._program(kind)._cache_size() for kind in KINDS)

    # ------------------------------------------------------------------------------------- a step

    def _tokens_of(self, prompt: Any) -> list[int]:
        """Return the tokens of a prompt."""
        messages = isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping)
        if isinstance(prompt, str) or messages:
            if self._tokenizer is None:
                raise ValueError("`prompt` must be tokens for an engine without a tokenizer.")
            if not messages:
                prompt = self._tokenizer.encode(prompt)
            elif self._tokenizer.chat is None:
                raise ValueError("`prompt` must be no messages; got some without a chat template.")
            else:
                prompt = _encode(self._tokenizer, prompt)
        check_tokens("prompt", prompt, self._vocab_size)
        return [int(token) for token in prompt]

    def _launch(self, parts: list[Part]) -> tuple[list[Part], Any]:
        """Let the device compute the parts; return them, and what it draws."""
        slots, kind = self._slots.copy(), GREEDY
        new = []
        for part in parts:
            request, text = part.request, self._of_request[part.request]
            kind = max(kind, text.sampling.kind)
            row = slots[part.slot]
            if part.admitted:
                row[PAGE + 1 :] = text.sampling.packed(text.answer.sample)
                self._slots[part.slot] = row
            first = 0 if part.admitted else (part.start - 1) // self._page_size + 1
            columns = range(first, -(-(part.start + part.count) // self._page_size))
            for column in columns:
                self._table[part.slot, column] = request.pages[column] or 0
            end = part.start + part.count
            row[:5] = -1, part.count, end, part.draws, -1
            if part.count == 1:
                row[TOKEN] = request.tokens[part.start] if part.start < len(request.tokens) else -1
                if columns:
                    row[PAGE] = request.pages[columns[-1]]
        only_decodes = all(part.count == 1 and not part.admitted for part in parts)
        size = None
        if not only_decodes:
            total = sum(part.count for part in parts)
            size = next(size for size in self._sizes if size >= total)
            for part in sorted(parts, key=lambda part: part.slot):
                end = part.start + part.count
                known = part.request.tokens[part.start : end]
                new += known + [-1 - part.slot] * (part.count - len(known))
        drawn = self._call(size, kind, slots, new)
        drawn.copy_to_host_async()
        return [part for part in parts if part.draws], drawn

    def _call(self, size: int | None, kind: int, slots: np.ndarray, new: list[int]) -> Any:
        """Run a program, and return what it draws."""
        tokens = table = None
        if size is not None:
            kind = max(kind, DRAWN)
            tokens, table = np.zeros(size, np.int32), self._table.copy()
            tokens[: len(new)] = new
        self._state, drawn = self._program(kind)(self._state, self._params, slots, tokens, table)
        return drawn

    def _program(self, kind: int) -> Any:
        """Return the compiled programs of a kind."""
        if kind not in self._made:
            shapes = tuple(x.shape for x in jax.tree.leaves(self._state)), tuple(self._sizes)
            args = self._structure, self._page_size, kind, self._places, shapes
            self._made[kind] = _programs(*args)
        return self._made[kind]

    def _read(self, parts: list[Part], drawn: Any) -> None:
        """Add the tokens that a step has drawn to their texts, and end those that are complete."""
        tokens, log_probabilities = np.asarray(drawn)
        log_probabilities = log_probabilities.view(np.float32)
        for part in parts:
            text = self._of_request.get(part.request)
            if text is None:  # It has ended meanwhile.
                continue
            token, answer = int(tokens[part.slot]), text.answer
            self._scheduler.took(part.request, token)
            answer.tokens.append(token)
            answer.log_probabilities.append(float(log_probabilities[part.slot]))
            self._changed.append(answer)
            if token in text.stop_tokens or (text.sampling.stop and answer.stopped):
                self._end(text, "stop")
            elif len(answer.tokens) == text.sampling.max_tokens:
                self._end(text, "length")
            elif len(part.request.tokens) == part.request.most:
                self._end(text, "full")

    def _end(self, text: _Text, why: str) -> None:
        """End a continuation."""
        answer = text.answer
        answer.end = why
        self._scheduler.end(text.request)
        del self._of_request[text.request]
        self._texts[answer.id].remove(text)
        if not self._texts[answer.id]:
            del self._texts[answer.id]


@functools.lru_cache(maxsize=64)
def _programs(structure: Structure, page_size: int, kind: int, places: Any, shapes: Any):
    """Return `_step`, jitted for arrays of these shapes."""
    del shapes
    (cache, *rest), drawn = places
    step = functools.partial(_step, structure, page_size, kind)
    return jax.jit(step, donate_argnums=0, out_shardings=(([*cache], *rest), drawn))


def _step(structure: Structure, page_size: int, kind: int, state, params, slots, tokens, table):
    """Compute the tokens of a step, and draw those that follow.

    Args:
        structure: The model without its arrays.
        page_size: Tokens of a page.
        kind: What is computed to draw tokens.
        state: The cache; the last token that was drawn for each slot [slots], the pages of each slot
            [slots, columns], and the tokens that its text has [slots, vocab].
        params: The parameters of the model.
        slots: What each slot computes, int32 [slots, FIELDS].
        tokens: The tokens of all slots in a row, int32 [size]; -1 - s is the last one of slot s.
            None, if each slot has one token at most.
        table: The pages of each slot; None, if `slots` has all that are new.

    Returns:
        The state, and int32 [2, slots]: a token for each slot, and the bits of the logarithm of its
        probability.
    """
    cache, last, old_table, seen = state
    count, columns = old_table.shape
    row, new, lengths = jnp.arange(count), slots[:, NEW], slots[:, LENGTH]
    size = None if tokens is None else len(tokens)
    if size is None:
        column = jnp.where(slots[:, PAGE] < 0, columns, jnp.maximum(lengths - 1, 0) // page_size)
        table = old_table.at[row, column].set(slots[:, PAGE], mode="drop")
        slot, exists = row, new > 0
        tokens = jnp.where(slots[:, TOKEN] < 0, last, slots[:, TOKEN])
    else:
        ends = jnp.cumsum(new)
        starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
        slot = jnp.searchsorted(ends, jnp.arange(size), side="right")
        exists = slot < count
        tokens = jnp.where(tokens < 0, last[-1 - tokens], tokens)
    if kind == LIMITED:
        # A text that begins has no token.
        seen = seen & ((lengths > new) | (new == 0))[:, None]
        seen = seen.at[jnp.where(exists, slot, count), tokens].set(True, mode="drop")
    model = structure.model(cache, params)
    if size is None:
        stream = model.stream(tokens[:, None], decode=True, requests=(lengths, table))[:, 0]
    else:
        requests = lengths, table, starts
        stream = model.stream(tokens, decode=True, requests=requests)[jnp.maximum(ends - 1, 0)]
    limits = Limits.unpacked(slots[:, PAGE + 1 :])
    drawn, log_probability = draw(model.logits(stream), limits, lengths, seen, kind)
    last = jnp.where(slots[:, DRAWS] > 0, drawn, last)
    bits = jax.lax.bitcast_convert_type(log_probability, jnp.int32)
    cache = jax.tree.leaves(nnx.state(model, nnx.Cache))
    return (cache, last, table, seen), jnp.stack([drawn, bits])


def _bar(count: int):
    """Return a progress bar."""
    try:
        import tqdm
    except ModuleNotFoundError:
        raise ValueError("`progress` needs the package tqdm: run pip install tqdm.") from None
    return tqdm.tqdm(total=count, unit=" answers")


def _encode(tokenizer: Any, messages: Any) -> list[int]:
    *system, user = messages
    return tokenizer.encode_chat(user["content"], system[0]["content"] if system else None)
