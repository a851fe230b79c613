"""Which tokens of which requests the next step computes, and in which pages.

Nothing here knows the model: a request is a list of tokens that grows. In each step

1. each request gives back the pages that no later token sees;
2. each request that decodes gets one token. If there are no pages for it, the newest request gives
   its pages back, and computes its tokens again later;
3. what is left of the tokens of a step goes to prompts, the oldest first, in chunks;
4. waiting requests begin in the order of their arrival, if there are pages for the whole prompt.

A run of tokens has a page for each group of layers. A whole page has a name, the hash of all tokens
up to its end. A new request takes the pages that are there under the names of its tokens, as far as
all groups have what later tokens see. It computes at least its last token, so that no request
writes into a page that another one has. Pages that nobody uses keep their names until they are
needed, the one that was used least recently first.

A step may be planned before the tokens of the step before are known to the host, but not with
tokens that are guessed.
"""

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from models.engine.pages import Groups, Pages

# Number of tokens that a guess goes by.
GRAM = 3


@dataclasses.dataclass(eq=False)
class Request:
    """A text that grows.

    Attributes:
        tokens: The tokens that the host knows: the prompt, then drawn ones.
        most: Number of tokens at which it ends.
        shares: Whether it takes pages of other requests, and a draft model may guess it.
        unread: Number of tokens that are drawn, or are to be, but that the host does not know yet.
        computed: Number of tokens whose keys and values are in pages, or will be after the steps
            that are planned.
        pages: The pages of each run of tokens, one for each group of layers; None where no later
            token sees it.
        slot: Its row in the arrays of a step; None if it waits.
        named: Number of runs whose pages have their names.
        dropped: For each group, the number of first pages that were given back.
    """

    tokens: list[int]
    most: int
    shares: bool = True
    unread: int = 0
    computed: int = 0
    pages: list[list[int | None]] = dataclasses.field(default_factory=list)
    slot: int | None = None
    named: int = 0
    dropped: list[int] = dataclasses.field(default_factory=list)
    _names: list[bytes] = dataclasses.field(default_factory=list)
    _follows: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    _indexed: int = 0

    @property
    def missing(self) -> int:
        """The number of tokens to compute before the next one can be drawn; 0 if none is wanted."""
        length = len(self.tokens) + self.unread
        return length - self.computed if length < self.most else 0

    def names(self, page_size: int, count: int) -> list[bytes]:
        """Return the names of the first pages, which must be full of known tokens."""
        while len(self._names) < count:
            first = len(self._names) * page_size
            before = self._names[-1] if self._names else b""
            tokens = np.array(self.tokens[first : first + page_size], np.int32).tobytes()
            self._names.append(hashlib.blake2b(before + tokens, digest_size=16).digest())
        return self._names[:count]

    def guess(self, count: int) -> list[int]:
        """Return `count` tokens that would follow as they did the last time, or none."""
        for n in range(max(self._indexed, GRAM), len(self.tokens)):
            self._follows[tuple(self.tokens[n - GRAM : n])] = n
        self._indexed = len(self.tokens)
        first = self._follows.get(tuple(self.tokens[-GRAM:]))
        return (
            []
            if first is None
            else list(itertools.islice(itertools.cycle(self.tokens[first:]), count))
        )


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens of a request that a step computes.

    Attributes:
        request: The request.
        slot: Its row in the arrays of the step.
        start: Number of the first token.
        count: Number of tokens.
        draws: Whether the step draws the token after them.
        admitted: Whether the request has come to this slot in this step.
        draft: The last of the tokens, which are guessed.
    """

    request: Request
    slot: int
    start: int
    count: int
    draws: bool
    admitted: bool
    draft: list[int] = dataclasses.field(default_factory=list)


class Scheduler:
    """Gives slots and pages to requests.

    Args:
        pages: Number of pages.
        groups: The groups of layers.
        slots: Most requests of a step.
        drafts: Most tokens that are guessed for a request in a step.
        guess: Returns at most a number of tokens that may follow a request's.

    Attributes:
        pages: The pages.
        running: Requests with a slot, the oldest first. All of them are older than those that wait.
        waiting: Requests without a slot, the oldest first.
        preemptions: Number of times that a request has lost its pages.
    """

    def __init__(
        self,
        pages: int,
        groups: Groups,
        slots: int,
        drafts: int = 0,
        guess: Callable[[Request, int], list[int]] = Request.guess,
    ):
        self.pages = Pages(pages)
        self._guess = guess
        self.running: list[Request] = []
        self.waiting: collections.deque[Request] = collections.deque()
        self.preemptions = 0
        self._groups, self._page_size, self._drafts = groups, groups.page_size, drafts
        self._slots = list(range(slots))[::-1]
        # Pages that stay free for requests that decode, so that a new one is not sent away at once.
        self._reserve = pages // 100

    def add(self, request: Request) -> None:
        """Let a request wait."""
        self.waiting.append(request)

    def end(self, request: Request) -> None:
        """Take a request out, with its pages and its slot."""
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._leave(request)

    def plan(self, left: int) -> list[Part]:
        """Return what the next step computes: a part of each request at most, of `left` tokens."""
        parts = []
        for request in self.running:
            self._drop_unseen(request)
        # Requests may leave `running` meanwhile.
        for request in [x for x in self.running if x.missing == 1]:
            if request.slot is not None and self._extend(request, 1):
                parts.append(self._part(request, 1))
                left -= 1
        # One at most, the newest, because others begin only where a step has room for them.
        for request in [x for x in self.running if x.missing > 1]:
            count = min(request.missing, left)
            if self._extend(request, count):
                parts.append(self._part(request, count))
                left -= count
        parts += self._admit(left)
        if self._drafts and not any(part.count > 1 or part.admitted for part in parts):
            parts = [self._with_draft(part) for part in parts]
        return parts

    def took(self, request: Request, token: int) -> None:
        """Add a token that a step has drawn."""
        request.unread -= 1
        request.tokens.append(token)

    def took_back(self, request: Request) -> None:
        """Forget the guessed tokens that no step has drawn."""
        request.computed, request.unread = len(request.tokens) - 1, 0

    def undo(self, parts: Sequence[Part]) -> None:
        """Let all requests begin again, because no step has computed these parts."""
        for part in parts:
            part.request.unread -= part.draws + len(part.draft)
        for request in self.running[::-1]:
            self._leave(request)
            self.waiting.appendleft(request)
        self.pages.forget()

    def _admit(self, left: int) -> list[Part]:
        """Return the parts of requests that wait no longer, of at most `left` tokens."""
        parts = []
        # A request that has just lost its pages may have a token that the host does not know yet.
        while left and self._slots and self.waiting and not self.waiting[0].unread:
            request = self.waiting[0]
            self._share(request)
            more = self._groups.needed(len(request.tokens) - request.computed)
            if more > self.pages.free - (self._reserve if self.running else 0):
                self._release(request)
                break
            request.slot = self._slots.pop()
            self.running.append(self.waiting.popleft())
            count = min(request.missing, left)
            self._grow(request, count)
            parts.append(self._part(request, count, admitted=True))
            left -= count
        return parts

    def _share(self, request: Request) -> None:
        """Give a request the pages that are there of its first tokens."""
        size, shared = self._page_size, 0
        count = (len(request.tokens) - 1) // size if request.shares else 0
        names, runs = request.names(size, count), [0] * self._groups.count
        for number, name in enumerate(names, 1):
            runs = [n + 1 if self.pages.has(name, group) else 0 for group, n in enumerate(runs)]
            unseen = self._groups.unseen(number * size)
            if self._groups.lefts[0] is None and not runs[0]:
                break  # All later tokens see it.
            if all(n >= number - first for n, first in zip(runs, unseen, strict=True)):
                shared = number
        request.computed = shared * size
        request.dropped = self._groups.unseen(request.computed)
        request.pages = [
            [
                None if number < first else self.pages.share(name, group)
                for group, first in enumerate(request.dropped)
            ]
            for number, name in enumerate(names[:shared])
        ]

    def _part(self, request: Request, count: int, *, admitted: bool = False) -> Part:
        """Return a part, after which its tokens count as computed."""
        start = request.computed
        request.computed += count
        draws = request.missing == 0
        request.unread += draws
        whole = min(len(request.tokens), request.computed) // self._page_size
        # Requests of the same step may share them: a layer writes all keys before it reads any.
        for number in range(request.named, whole):
            name = request.names(self._page_size, whole)[number]
            for group, page in enumerate(request.pages[number]):
                if page is not None:
                    self.pages.name(page, name, group)
        request.named = whole
        assert request.slot is not None
        return Part(request, request.slot, start, count, draws, admitted)

    def _with_draft(self, part: Part) -> Part:
        """Return a part with guessed tokens, as many as there is room for."""
        request = part.request
        wanted = min(self._drafts, request.most - len(request.tokens) - 1)
        draft = self._guess(request, wanted) if wanted > 0 else []
        if not self._grow(request, len(draft)):
            draft = draft[: len(request.pages) * self._page_size - request.computed]
        request.computed += len(draft)
        request.unread += len(draft)
        return dataclasses.replace(part, count=1 + len(draft), draft=draft)

    def _grow(self, request: Request, count: int) -> bool:
        """Give a request pages for its next tokens; return whether there were enough."""
        while len(request.pages) * self._page_size < request.computed + count:
            if self.pages.free < self._groups.count:
                return False
            request.pages.append([self.pages.take() for _ in range(self._groups.count)])
        return True

    def _extend(self, request: Request, count: int) -> bool:
        """Make sure that the next tokens have pages; return whether the request keeps its slot."""
        while not self._grow(request, count):
            newest = self.running[-1]
            self._leave(newest)
            self.waiting.appendleft(newest)
            self.preemptions += 1
            if newest is request:
                return False
        return True

    def _drop_unseen(self, request: Request) -> None:
        """Release the pages that no later token sees."""
        unseen = self._groups.unseen(request.computed)
        for group, first in enumerate(unseen):
            # The first pages of a text are wanted again most often, so they are given back last.
            for pages in request.pages[request.dropped[group] : first][::-1]:
                self.pages.release(pages[group])
                pages[group] = None
        request.dropped = unseen

    def _leave(self, request: Request) -> None:
        """Take a request's slot and pages."""
        assert request.slot is not None
        self.running.remove(request)
        self._slots.append(request.slot)
        request.slot = None
        self._release(request)

    def _release(self, request: Request) -> None:
        """Take the pages of a request, which begins again."""
        for page in itertools.chain(*request.pages[::-1]):
            self.pages.release(page)
        request.pages, request.computed, request.named = [], 0, 0
