"""`Engine`: requests come and go, and each step computes some tokens of all that are there."""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import DecoderConfig
from models.decoder import Decoder
from models.engine.program import FIELDS, PAGE, programs
from models.engine.sampling import DRAWN, GREEDY, KINDS, LIMITED, Sampling
from models.engine.scheduler import Part, Request, Scheduler
from models.generation import Structure, check_tokens, take_apart
from models.tokens import TextStream

CACHE_DTYPES = "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"
# Sizes of the programs that take prompts, each a quarter of the one before; the first, in tokens;
# and the only one of a batch-invariant engine.
SIZES, MOST, MOST_INVARIANT = 3, 2048, 128


def bytes_of_token(config: DecoderConfig, cache_dtype: str | None) -> int:
    """Return the bytes of a token's keys and values in all layers, with their scales."""
    size = jnp.dtype(cache_dtype or config.compute_dtype).itemsize
    row = config.head_dim * size + (4 if size == 1 else 0)
    return config.num_layers * 2 * config.num_kv_heads * row


class Answer:
    """A continuation, which grows while its engine steps.

    Attributes:
        id: The number of the request.
        sample: The number of the continuation in its request.
        prompt: The tokens of the prompt.
        tokens: The new tokens.
        log_probabilities: The logarithm of the probability that the model gives to each new token,
            at temperature 1 and without limits.
        end: None while it grows; then "stop" (a stop token or string), "length" (`max_tokens`),
            "full" (`max_length` of the engine) or "cancelled".
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

    def has_stop(self) -> bool:
        """Return whether the text has a stop string."""
        return self.text is not None and self._stream.stopped

    # Made when somebody reads the text.
    @functools.cached_property
    def _stream(self) -> TextStream:
        if self._make_stream is None:
            raise ValueError("`text` needs an engine with a tokenizer: read `tokens`.")
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
    following: Sequence[int] = ()  # the token after each one of a request that is scored

    def end(self, token: int) -> str | None:
        """Return why the text ends with a token; None if it goes on."""
        if token in self.stop_tokens or (self.sampling.stop and self.answer.has_stop()):
            return "stop"
        if len(self.answer.tokens) == self.sampling.max_tokens:
            return "length"
        return "full" if len(self.request.tokens) == self.request.most else None


class Engine:
    """Continues the texts of many requests at once.

    Each step computes a token of every text that is being continued, and beside them some tokens of
    new prompts. The device computes a step while the host reads the tokens of the step before.

    Args:
        model: The model. Its parameters are not copied.
        tokenizer: For texts and messages, as in `models.tokens`; by default, prompts are tokens.
        pages: Number of pages of the cache, for the tokens of all texts that are continued at once.
        page_size: Tokens of a page. Texts share whole pages.
        cache_dtype: Type of keys and values: float32, bfloat16, float16, or quantised int8 and
            float8_e4m3fn; None is the activations'.
        max_requests: Most texts that are continued at once; others wait.
        max_tokens_per_step: Most tokens that a step computes, a power of two above
            `max_requests * (1 + drafts)`; None is 2048, or 128 with `batch_invariant`, or more
            where that is too few.
        max_length: Most tokens that the model reads of a text; None are its context, or all pages.
            By it, the rotary positions of longrope are chosen.
        drafts: Most tokens of a text that a step guesses and checks, beside the one that it knows.
            A guess is what has followed the last three tokens before. The answers stay the same.
            Then a step waits for the tokens of the step before.
        draft: A smaller model of the same tokens, which guesses instead. It draws with the noise of
            the tokens that it guesses, and has pages of its own under the same numbers. Texts with
            a repetition penalty are not guessed.
        batch_invariant: Whether tokens and log-probabilities of a text have the same bits whatever
            the engine computes beside it, see docs/batch-invariance.md. All attention then has this
            option. One program serves every step; it is compiled here.

    Raises:
        ValueError: An argument is out of range, or of another kind.
        NotImplementedError: Device, model or pages are not served with `batch_invariant`.
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
        max_tokens_per_step: int | None = None,
        max_length: int | None = None,
        drafts: int = 0,
        draft: Decoder | None = None,
        batch_invariant: bool = False,
    ):
        models = [model] if draft is None else [model, draft]
        sizes = dict(pages=pages, page_size=page_size, max_requests=max_requests, drafts=drafts)
        sizes |= dict(max_tokens_per_step=max_tokens_per_step, max_length=max_length)
        most = _check(models, sizes, cache_dtype, batch_invariant)
        context = min(part.config.context for part in models)
        max_length = context if max_length is None else max_length
        self._invariant, self._scoring = batch_invariant, False
        self._vocab_size, self._tokenizer = model.config.vocab_size, tokenizer
        self._page_size, self._drafts = page_size, drafts
        self.max_length = min(context, pages * page_size, max_length)
        windows = [x.config.local_window_of(0) if all(x.config.sliding) else None for x in models]
        left = None if None in windows else max(window[0] for window in windows if window)
        guess = Request.guess if draft is None else _unknown
        self._scheduler = Scheduler(pages, page_size, max_requests, left, drafts, guess)
        self._structures: tuple[Structure, ...] = ()
        cache, self._params = [], []
        for part in models:
            copy = nnx.merge(*nnx.split(part))
            for layer in copy.layers:
                layer.attention.batch_invariant = batch_invariant or part.config.batch_invariant
            copy.init_pages(pages, page_size, cache_dtype, length=self.max_length)
            structure, *arrays = take_apart(copy)
            self._structures += (structure,)
            cache += arrays[0]
            # Programs see where arrays are, and whether they must stay there.
            self._params += jax.device_put(arrays[1], [x.sharding for x in arrays[1]])
        # The arrays of a step on the device, and their shardings, which steps keep.
        columns = -(-self.max_length // page_size)
        whole = cache[0].sharding if model.layout is None else model.layout.sharding()
        self._places = [x.sharding for x in cache], whole, whole, whole
        state = (
            cache,
            np.zeros(max_requests, np.int32),
            np.zeros((max_requests, columns), np.int32),
            np.zeros((max_requests, self._vocab_size), bool),
        )
        self._state = jax.device_put(state, self._places)
        # The same on the host.
        self._slots = np.zeros((max_requests, FIELDS), np.int32)
        self._slots[:, PAGE] = -1
        self._table = np.zeros((max_requests, columns), np.int32)
        sizes = [most // 4**n for n in range(1 if batch_invariant else SIZES - bool(drafts))]
        self._sizes = [size for size in reversed(sizes) if size > max_requests]
        self._size_of_drafts = -(-max_requests * (1 + drafts) // 8) * 8
        self._made: dict[tuple[int, int], Any] = {}
        self._texts: dict[int, list[_Text]] = {}
        self._of_request: dict[Request, _Text] = {}
        self._next_id, self._flying = 0, None
        self._changed: list[Answer] = []
        if batch_invariant:
            self.warm_up()

    # ------------------------------------------------------------------------------ for users

    @property
    def busy(self) -> bool:
        """Whether a text has not ended, or its end has not been returned."""
        return bool(self._texts or self._changed)

    @property
    def preemptions(self) -> int:
        """Number of times that a text has lost its pages to older ones, and was read again."""
        return self._scheduler.preemptions

    @property
    def programs(self) -> int:
        """Number of programs that are compiled."""
        return sum(program._cache_size() for program in self._made.values())

    def warm_up(self, sampling: Sampling | None = None) -> int:
        """Compile the programs that requests may need, and return how many there are.

        Args:
            sampling: How all requests are continued, if they are alike; None is in any way.
        """
        for kind in KINDS if sampling is None else (sampling.kind,):
            for size in (None, *self._sizes):
                self._call(size, kind, self._slots.copy(), [])
            if self._drafts:
                self._call(self._size_of_drafts, kind, self._slots.copy(), [], self._drafts)
        jax.block_until_ready(self._state)
        return self.programs

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
    ) -> int:
        """Take a request, and return its number.

        Args:
            prompt: Tokens; or a text to continue, or the messages of a chat (each with `role` and
                `content`), which need a tokenizer.
            sampling: How it is continued; None is `Sampling()`.

        Raises:
            ValueError: The prompt is empty, is longer than `max_length`, or has another token than
                the model's; or its text, or the stop strings, come without a tokenizer.
        """
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            kind = f"{type(sampling).__module__}.{type(sampling).__name__}"
            raise ValueError(f"`sampling` must be a models.engine.Sampling; got {kind}.")
        words, tokens, following = self._tokenizer, self._tokens_of(prompt), []
        if self._scoring:  # The last token counts as drawn.
            tokens, following = tokens[:-1], tokens[1:]
            if not tokens:
                raise ValueError("`texts` must have at least two tokens each; got one.")
        if len(tokens) > self.max_length:
            raise ValueError(
                f"`prompt` must have at most the {self.max_length} tokens that context, pages and "
                f"`max_length` allow; got {len(tokens)}. Shorten it, or give the engine more room."
            )
        if sampling.stop and words is None:
            raise ValueError("`stop` needs an engine with a tokenizer: use `stop_tokens`.")
        most = self.max_length + 1
        if sampling.max_tokens is not None:
            most = min(most, len(tokens) + sampling.max_tokens)
        stops = sampling.stop_tokens
        if stops is None:
            stops = () if words is None else words.stop_tokens
        make = words and functools.partial(TextStream, words.decode, tokens, sampling.stop)
        id, self._next_id = self._next_id, self._next_id + 1
        self._texts[id] = []
        for sample in range(sampling.samples):
            # For a penalty, steps must see all tokens that the text has; and to score them.
            shares = sampling.repetition_penalty == 1 and not following
            request, answer = Request(list(tokens), most, shares), Answer(id, sample, tokens, make)
            text = _Text(answer, request, sampling, frozenset(stops), following)
            self._of_request[request] = text
            self._texts[id].append(text)
            self._scheduler.add(request)
        return id

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

    def step(self) -> list[Answer]:
        """Compute a step, and return the answers with new tokens or an end.

        The tokens are of the step before, which the device has computed meanwhile.
        """
        # Scores need logits of all tokens, so that the smallest program has them.
        most = self._sizes[0 if self._scoring else -1]
        parts, before = self._scheduler.plan(most), self._flying
        try:
            self._flying = self._launch(parts) if parts else None
        except BaseException:  # An interrupt, too: pages must not have names without content.
            self._scheduler.undo(parts)
            raise
        if self._drafts:
            before, self._flying = self._flying, None
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
            progress: Whether a bar counts the answers that have ended; it needs the package tqdm.

        Raises:
            ValueError: The engine has other requests, or a request is refused by `submit`.
        """
        if self.busy:
            raise ValueError("`run` and `score` need an engine without requests; it is `busy`.")
        if isinstance(prompts, str):
            raise ValueError("`prompts` must be a list of prompts; got a text: put it into a list.")
        prompts = list(prompts)
        if sampling is None or isinstance(sampling, Sampling):
            sampling = [sampling or Sampling()] * len(prompts)
        if len(sampling) != len(prompts):
            raise ValueError(
                f"`sampling` must be one for all {len(prompts)} prompts, or one for each; got "
                f"{len(sampling)}."
            )
        try:
            ids = [self.submit(x, how) for x, how in zip(prompts, sampling, strict=True)]
            answers = [text.answer for id in ids for text in self._texts[id]]
            with progress_bar(len(answers), progress) as bar:
                while self.busy:
                    bar.update(sum(answer.end is not None for answer in self.step()))
        finally:
            # After an error or an interrupt, nothing is left.
            for id in list(self._texts):
                self.cancel(id)
            self._changed = []
        return answers

    def score(self, texts: Iterable[Any], *, progress: bool = False) -> list[list[float]]:
        """Return the log-probabilities of all tokens of each text but its first, as in `Answer`.

        Args:
            texts: Each as in `submit`; of an answer, `[*answer.prompt, *answer.tokens]`.
            progress: As in `run`.

        Raises:
            ValueError: As in `run`; or a text has one token.
        """
        self._scoring = True
        try:
            answers = self.run(texts, Sampling(temperature=0, max_tokens=1), progress=progress)
        finally:
            self._scoring = False
        return [answer.log_probabilities for answer in answers]

    def set_model(self, model: Decoder) -> None:
        """Take the parameters of a model of the same shape, as after a step of training.

        Raises:
            ValueError: The engine has requests, or the model has another shape.
        """
        if self.busy:
            raise ValueError("`set_model` needs an engine without requests; it is `busy`.")
        params = jax.tree.leaves(nnx.state(model, nnx.Param))
        old, rest = self._params[: (n := self._structures[0].params.num_leaves)], self._params[n:]
        if [(x.shape, x.dtype) for x in params] != [(x.shape, x.dtype) for x in old]:
            raise ValueError("`model` must have the shapes and dtypes of the engine's model.")
        self._params = [*jax.device_put(params, [x.sharding for x in old]), *rest]
        self._scheduler.pages.forget()

    # --------------------------------------------------------------------------------- a step

    def _tokens_of(self, prompt: Any) -> list[int]:
        """Return the tokens of a prompt."""
        words = self._tokenizer
        chat = isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping)
        if (chat or isinstance(prompt, str)) and words is None:
            raise ValueError("`prompt` must be tokens for an engine without a tokenizer.")
        if chat and words.chat is None:
            raise ValueError("`prompt` must be no messages without a chat template.")
        if chat:
            prompt = words.encode_messages(prompt)
        elif isinstance(prompt, str):
            prompt = words.encode(prompt)
        check_tokens("prompt", prompt, self._vocab_size)
        return [int(token) for token in prompt]

    def _launch(self, parts: list[Part]) -> tuple[list[tuple[Part, int]], Any]:
        """Let the device compute the parts.

        Returns:
            The parts to read, each with the place of its first token in what is drawn; and that.
        """
        slots, kind, size = self._slots.copy(), GREEDY, None
        drafts = self._drafts if any(part.draft for part in parts) else 0
        whole = self._invariant or self._scoring
        tokens, following, read = [], [], []
        for part in sorted(parts, key=lambda part: part.slot):
            request, text, row = part.request, self._of_request[part.request], slots[part.slot]
            kind, end = max(kind, text.sampling.kind), part.start + part.count
            if part.admitted:
                packed = text.sampling.packed(text.answer.sample)
                row[PAGE + 1 :] = self._slots[part.slot, PAGE + 1 :] = packed
            first = 0 if part.admitted else -(-part.start // self._page_size)
            new = request.pages[first : -(-end // self._page_size)]
            self._table[part.slot, first : first + len(new)] = [page or 0 for page in new]
            known = [*request.tokens[part.start : end], *part.draft]
            known += [-1 - part.slot] * (part.count - len(known))
            row[: PAGE + 1] = known[0], part.count, end, part.draws, new[-1] if new else -1
            tokens += known
            following += text.following[part.start : end] or [-1] * part.count
            if part.draws or self._scoring:
                place = len(tokens) - 1 - len(part.draft)
                read.append((part, place if whole or drafts else part.slot))
        if drafts:
            size = self._size_of_drafts
        elif self._scoring or any(part.admitted or part.count > 1 for part in parts):
            size = next(size for size in self._sizes if size >= len(tokens))
        drawn = self._call(size, kind, slots, tokens, drafts, following if whole else None)
        drawn.copy_to_host_async()
        return read, drawn

    def _call(self, size, kind, slots, new: list[int], drafts=0, following: Any = None) -> Any:
        """Run a program, and return what it draws."""
        tokens = table = None
        if self._invariant:
            size, kind, drafts, following = *self._sizes, LIMITED, self._drafts, following or []
        if size is not None:
            kind = kind if drafts else max(kind, DRAWN)
            tokens, table = np.zeros(size, np.int32), self._table.copy()
            tokens[: len(new)] = new
        if following is not None:
            following = np.array(following + [-1] * (self._sizes[0] - len(following)), np.int32)
        if (kind, drafts) not in self._made:
            shapes = [x.shape for x in jax.tree.leaves(self._state)]
            shapes = *shapes, *self._sizes, self._size_of_drafts
            (cache, *rest), how = self._places, (self._page_size, kind, drafts)
            program = programs(self._structures, how, (tuple(cache), *rest), shapes)
            self._made[kind, drafts] = program
        program = self._made[kind, drafts]
        self._state, drawn = program(self._state, self._params, slots, tokens, table, following)
        assert not self._invariant or self.programs == 1
        return drawn

    def _read(self, parts: list[tuple[Part, int]], drawn: Any) -> None:
        """Add the tokens that a step has drawn to their texts, and end those that are complete."""
        tokens, logs, *computed = np.asarray(drawn)
        logs = logs.view(np.float32)
        for part, place in parts:
            if (text := self._of_request.get(part.request)) is None:
                continue  # It has ended meanwhile.
            if text.following:  # It has all of its pages from the start, and keeps them.
                rows = logs[place + 1 - part.count : place + 1 - part.draws]
                text.answer.log_probabilities += rows.tolist()
            end = None
            for number in range(1 + len(part.draft) if part.draws else 0):
                token = int(tokens[place + number])
                text.answer.tokens.append(token)
                text.answer.log_probabilities.append(float(logs[place + number]))
                self._scheduler.took(part.request, token)
                end = text.end(token)
                if end or number == len(part.draft) or computed[0][place + number + 1] != token:
                    break
            self._changed.append(text.answer)
            if end is not None:
                self._end(text, end)
            elif part.draft:
                self._scheduler.took_back(part.request)

    def _end(self, text: _Text, why: str) -> None:
        """End a continuation."""
        answer = text.answer
        answer.end = why
        self._scheduler.end(text.request)
        del self._of_request[text.request]
        self._texts[answer.id].remove(text)
        if not self._texts[answer.id]:
            del self._texts[answer.id]


def _check(
    models: list[Decoder], sizes: dict[str, Any], cache_dtype: str | None, batch_invariant: bool
) -> int:
    """Raise if arguments of an engine do not fit; return the most tokens of a step."""
    for name, part in zip(("model", "draft"), models, strict=False):
        if not isinstance(part, Decoder):
            raise ValueError(f"`{name}` must be a Decoder; got {type(part).__name__}.")
    for name, size in sizes.items():
        least = 0 if name == "drafts" else 1
        if size is None and name in ("max_tokens_per_step", "max_length"):
            continue
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < least:
            raise ValueError(f"`{name}` must be an int of at least {least}; got {size!r}.")
    most, least = sizes["max_tokens_per_step"], sizes["max_requests"] * (1 + sizes["drafts"])
    if most is None:
        most = max(MOST_INVARIANT if batch_invariant else MOST, 1 << least.bit_length())
    if most & (most - 1) or most <= least:
        raise ValueError(
            f"`max_tokens_per_step` must be a power of two above {least}, what all requests "
            f"decode in a step; got {most}."
        )
    if cache_dtype is not None and cache_dtype not in CACHE_DTYPES:
        known = ", ".join(CACHE_DTYPES)
        raise ValueError(f"`cache_dtype` must be None or one of {known}; got {cache_dtype!r}.")
    if models[1:] and not sizes["drafts"]:
        raise ValueError("`drafts` must be at least 1 with a `draft`; got 0.")
    meshes = {part.layout and part.layout.mesh for part in models}
    if len(meshes) > 1:
        raise ValueError("`draft` must be on the devices of `model`; give both one layout.")
    if batch_invariant and (models[1:] or any(mesh and mesh.size > 1 for mesh in meshes)):
        raise ValueError(
            "`batch_invariant` must be False with a `draft`, and on several devices; got True."
        )
    return most


def _unknown(request: Request, count: int) -> list[int]:
    """Stand for the guesses of a draft model, which the host does not know."""
    return [0] * count if request.shares else []


def progress_bar(count: int, shown: bool) -> Any:
    """Return a progress bar of answers."""
    if not shown:
        return contextlib.nullcontext(types.SimpleNamespace(update=lambda count: None))
    try:
        import tqdm
    except ModuleNotFoundError:
        raise ValueError("`progress` needs the package tqdm: run pip install tqdm.") from None
    return tqdm.tqdm(total=count, unit=" answers")
