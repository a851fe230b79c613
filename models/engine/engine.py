"""`Engine`: requests come and go, and each step computes some tokens of all that are there."""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from models.decoder import Decoder
from models.engine.pages import Groups, default_step
from models.engine.program import DRAWS, LIMITS, PAGES, TOKEN, Device
from models.engine.sampling import DRAWN, GREEDY, KINDS, LIMITED, Sampling
from models.engine.scheduler import Part, Request, Scheduler
from models.errors import check_int
from models.generation import check_tokens
from models.tokens import TextStream

CACHE_DTYPES = "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"
# Sizes of the programs that take prompts, each a quarter of the one before; the largest.
SIZES, LARGEST = 3, 2**20


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


@dataclasses.dataclass(eq=False, kw_only=True)
class _Text(Request):
    """A continuation."""

    answer: Answer
    sampling: Sampling
    stop_tokens: frozenset[int]
    following: Sequence[int]  # the token after each one of a text that is scored, or none

    def end(self, token: int) -> str | None:
        """Return why the text ends with a token; None if it goes on."""
        if token in self.stop_tokens or (self.sampling.stop and self.answer.has_stop()):
            return "stop"
        if len(self.answer.tokens) == self.sampling.max_tokens:
            return "length"
        return "full" if len(self.tokens) == self.most else None


class Engine:
    """Continues the texts of many requests at once.

    Each step computes a token of every text that is being continued, and beside them some tokens of
    new prompts. The device computes a step while the host reads the tokens of the step before.

    Args:
        model: The model. Its parameters are not copied.
        tokenizer: For texts and messages, as in `models.tokens`; by default, prompts are tokens.
        pages: Memory of the cache, for all texts that are continued at once: each page holds
            `page_size` tokens of all layers. A layer with a window keeps only what the window
            sees, and its memory serves other layers and texts.
        page_size: Tokens of a page. Texts share whole pages.
        cache_dtype: Type of keys and values: float32, bfloat16, float16, or quantised int8 and
            float8_e4m3fn; None is the activations'.
        max_requests: Most texts that are continued at once; others wait.
        max_tokens_per_step: Most tokens that a step computes, a power of two above
            `max_requests * (1 + drafts)`; None is 2048, or 128 with `batch_invariant`, or more
            where that is too few.
        max_length: Most tokens that the model reads of a text; None are its context, or what the
            pages hold. By it, the rotary positions of longrope are chosen.
        drafts: Most tokens of a text that a step guesses and checks, beside the one that it knows.
            A guess is what has followed the last three tokens before. The answers stay the same.
            Then a step waits for the tokens of the step before.
        draft: A smaller model of the same tokens, which guesses instead. It draws with the noise of
            the tokens that it guesses, and has pages of its own under the same numbers. Pages of
            windows are freed if its layers are of the same kinds as the model's: with a window,
            without one, or both. Texts with a repetition penalty are not guessed.
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
        _check_tokenizer(tokenizer)
        sizes = dict(pages=pages, page_size=page_size, max_requests=max_requests, drafts=drafts)
        sizes |= dict(max_tokens_per_step=max_tokens_per_step, max_length=max_length)
        most = _check(models, sizes, cache_dtype, batch_invariant)
        context = min(part.config.context for part in models)
        max_length = context if max_length is None else max_length
        self._invariant, self._scoring = batch_invariant, False
        self._vocab_size, self._tokenizer = model.config.vocab_size, tokenizer
        self._page_size, self._drafts = page_size, drafts
        groups = Groups.of_models([part.config for part in models], page_size, most)
        pages = -(-pages * model.config.num_layers // groups.size)
        self.max_length = min(context, max_length, groups.longest(pages))
        guess = Request.guess if draft is None else _unknown
        self._scheduler = Scheduler(pages, groups, max_requests, drafts, guess)
        table = groups.count, max_requests, -(-self.max_length // page_size)
        self._slots = np.zeros((max_requests, PAGES.start + groups.count), np.int32)
        self._slots[:, PAGES] = -1
        self._table = np.zeros(table, np.int32)
        sizes = [most // 4**n for n in range(1 if batch_invariant else SIZES - bool(drafts))]
        self._sizes = [size for size in reversed(sizes) if size > max_requests]
        self._size_of_drafts = -(-max_requests * (1 + drafts) // 8) * 8
        copies = []
        for part, of_layers in zip(models, groups.layers, strict=True):
            copies.append(copy := nnx.merge(*nnx.split(part)))
            for layer in copy.layers:
                layer.attention.batch_invariant |= batch_invariant
            length = self.max_length
            copy.init_pages(pages, page_size, cache_dtype, length=length, groups=of_layers)
        self._device = Device(copies, table, page_size, (*self._sizes, self._size_of_drafts))
        self._texts: dict[int, list[_Text]] = {}
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
        return self._device.programs

    def warm_up(self, sampling: Sampling | None = None) -> int:
        """Compile the programs that requests may need, and return how many there are.

        Args:
            sampling: How all requests are continued, if they are alike; None is in any way.
        """
        for kind in KINDS if sampling is None else (_checked(sampling).kind,):
            for size in (None, *self._sizes):
                self._call(size, kind, self._slots.copy(), [])
            if self._drafts:
                self._call(self._size_of_drafts, kind, self._slots.copy(), [], self._drafts)
        jax.block_until_ready(self._device.state)
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
        sampling = Sampling() if sampling is None else _checked(sampling)
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
        elif not all(0 <= token < self._vocab_size for token in stops):
            raise ValueError(
                f"`stop_tokens` must be tokens from 0 to {self._vocab_size - 1}; got {[*stops]}."
            )
        make = words and functools.partial(TextStream, words.decode, tokens, sampling.stop)
        id, self._next_id = self._next_id, self._next_id + 1
        # For a penalty, steps must see all tokens that the text has; and to score them.
        shares = sampling.repetition_penalty == 1 and not following
        how: dict[str, Any] = dict(
            sampling=sampling, stop_tokens=frozenset(stops), following=following
        )
        self._texts[id] = [
            _Text([*tokens], most, shares, answer=Answer(id, n, tokens, make), **how)
            for n in range(sampling.samples)
        ]
        for text in self._texts[id]:
            self._scheduler.add(text)
        return id

    def cancel(self, id: int) -> None:
        """End a request; one that has ended stays as it is.

        Raises:
            ValueError: There was no such request.
        """
        if isinstance(id, bool | float) or id not in range(self._next_id):
            raise ValueError(f"`id` must be a number that `submit` has returned; got {id!r}.")
        for text in list(self._texts.get(id, ())):
            self._end(text, "cancelled")
            self._changed.append(text.answer)

    def step(self) -> list[Answer]:
        """Compute a step, and return the answers with new tokens or an end, by request and sample.

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
        return sorted(changed, key=lambda answer: (answer.id, answer.sample))

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
        if not isinstance(prompts, Iterable):
            raise ValueError(f"`prompts` must be a list of prompts; got {prompts!r}.")
        prompts = list(prompts)
        if not isinstance(sampling, Iterable):
            sampling = [Sampling() if sampling is None else _checked(sampling)] * len(prompts)
        sampling = list(sampling)
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
        _check_models([model])
        self._device.set_params(model)
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
            text: Any = part.request
            row = slots[part.slot]
            kind, end = max(kind, text.sampling.kind), part.start + part.count
            if part.admitted:
                packed = text.sampling.packed(text.answer.sample)
                row[LIMITS] = self._slots[part.slot, LIMITS] = packed
            first = 0 if part.admitted else -(-part.start // self._page_size)
            new = text.pages[first : -(-end // self._page_size)]
            for number, pages in enumerate(new, first):
                self._table[:, part.slot, number] = [page or 0 for page in pages]
            known = [*text.tokens[part.start : end], *part.draft]
            known += [-1 - part.slot] * (part.count - len(known))
            row[TOKEN : DRAWS + 1] = known[0], part.count, end, part.draws
            row[PAGES] = new[-1] if new else -1
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
        drawn = self._device.compute(kind, drafts, slots, tokens, table, following)
        assert not self._invariant or self.programs == 1
        return drawn

    def _read(self, parts: list[tuple[Part, int]], drawn: Any) -> None:
        """Add the tokens that a step has drawn to their texts, and end those that are complete."""
        tokens, logs, *computed = np.asarray(drawn)
        logs = logs.view(np.float32)
        for part, place in parts:
            text: Any = part.request
            if text.answer.end is not None:  # meanwhile
                continue
            if text.following:
                rows = logs[place + 1 - part.count : place + 1 - part.draws]
                text.answer.log_probabilities[part.start :] = rows.tolist()
            end = None
            for number in range(1 + len(part.draft) if part.draws else 0):
                token = int(tokens[place + number])
                text.answer.tokens.append(token)
                text.answer.log_probabilities.append(float(logs[place + number]))
                self._scheduler.took(text, token)
                end = text.end(token)
                if end or number == len(part.draft) or computed[0][place + number + 1] != token:
                    break
            self._changed.append(text.answer)
            if end is not None:
                self._end(text, end)
            elif part.draft:
                self._scheduler.took_back(text)

    def _end(self, text: _Text, why: str) -> None:
        """End a continuation."""
        text.answer.end = why
        self._scheduler.end(text)
        texts = self._texts[text.answer.id]
        texts.remove(text)
        if not texts:
            del self._texts[text.answer.id]


def _check(
    models: list[Decoder], sizes: dict[str, Any], cache_dtype: str | None, batch_invariant: bool
) -> int:
    """Raise if arguments of an engine do not fit; return the most tokens of a step."""
    _check_models(models)
    if not isinstance(batch_invariant, bool | np.bool_):
        raise ValueError(f"`batch_invariant` must be True or False; got {batch_invariant!r}.")
    for name, size in sizes.items():
        optional = name in ("max_tokens_per_step", "max_length")
        check_int(name, size, 0 if name == "drafts" else 1, optional=optional)
    most, least = sizes["max_tokens_per_step"], sizes["max_requests"] * (1 + sizes["drafts"])
    if most is None:
        most = default_step(sizes["max_requests"], sizes["drafts"], batch_invariant)
    if most & (most - 1) or not least < most <= LARGEST:
        raise ValueError(
            f"`max_tokens_per_step` must be a power of two above {least}, what all requests "
            f"decode in a step, and at most {LARGEST}; got {most}."
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


def _check_models(models: list[Decoder]) -> None:
    """Raise if a model, or the draft model after it, is none."""
    for name, part in zip(("model", "draft"), models, strict=False):
        if not isinstance(part, Decoder):
            raise ValueError(f"`{name}` must be a Decoder; got {type(part).__name__}.")


def _check_tokenizer(tokenizer: Any) -> None:
    """Raise if a tokenizer is none of `models.tokens`, nor like them."""
    for name in () if tokenizer is None else ("encode", "decode", "stop_tokens"):
        if not hasattr(tokenizer, name):
            raise ValueError(
                f"`tokenizer` must have `{name}`, as in `models.tokens`; got "
                f"{type(tokenizer).__name__}."
            )


def _checked(sampling: Any) -> Sampling:
    """Return a `Sampling`, or raise if it is none."""
    if not isinstance(sampling, Sampling):
        kind = f"{type(sampling).__module__}.{type(sampling).__name__}"
        raise ValueError(f"`sampling` must be a models.engine.Sampling; got {kind}.")
    return sampling


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
