"""Which tokens of which requests the next step computes, and in which pages.

Nothing here knows the model: a request is a list of tokens that grows. In each step

1. each request that decodes gets one token. If there is no page for it, the newest request gives
   its pages back, and computes its tokens again later;
2. what is left of the tokens of a step goes to prompts, the oldest first, in chunks;
3. waiting requests get pages for their whole prompt, in the order of their arrival.

A whole page has a name, the hash of all tokens up to its end. A new request takes the pages that
are there under the names of its tokens. It computes at least its last token, so that no request
writes into a page that another one has. Pages that nobody uses keep their names until they are
needed, the one that was used least recently first.

A step may be planned before the tokens of the step before are known to the host, but not with
tokens that are guessed.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from itertools import cycle, islice

import numpy as np

# Number of tokens that a guess goes by.
GRAM = 3


class Pages:
    """Which pages are used, by how many requests, and under which names others find them."""

    def __init__(self, count: int):
        self._blank = list(range(count))[::-1]
        # Without users, but with a name; the first was used least recently.
        self._kept: dict[int, None] = {}
        self._users = [0] * count
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """The number of pages without users."""
        return len(self._blank) + len(self._kept)

    def take(self) -> int:
        """Return a page for new tokens; one must be free."""
        if self._blank:
            page = self._blank.pop()
        else:
            page = next(iter(self._kept))
            del self._kept[page], self._page_of[self._name_of.pop(page)]
        self._users[page] = 1
        return page

    def share(self, names: Sequence[bytes]) -> list[int]:
        """Return the pages of the first names, as many as are there, with one user more each."""
        found = []
        for name in names:
            if (page := self._page_of.get(name)) is None:
                break
            self._kept.pop(page, None)
            self._users[page] += 1
            found.append(page)
        return found

    def release(self, page: int) -> None:
        """Take one user from a page."""
        self._users[page] -= 1
        if self._users[page] == 0:
            if page in self._name_of:
                self._kept[page] = None
            else:
                self._blank.append(page)

    def name(self, page: int, name: bytes) -> None:
        """Let others find a page, unless they find another one with the same tokens."""
        if name not in self._page_of and page not in self._name_of:
            self._page_of[name], self._name_of[page] = page, name

    def forget(self) -> None:
        """Take the names from all pages, whose numbers are no longer right."""
        self._blank += self._kept
        self._kept, self._page_of, self._name_of = {}, {}, {}


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
        pages: The page of each run of tokens; None where no later token sees it.
        slot: Its row in the arrays of a step; None if it waits.
        named: Number of pages that have their names.
        dropped: Number of pages that no later token sees.
    """

    tokens: list[int]
    most: int
    shares: bool = True
    unread: int = 0
    computed: int = 0
    pages: list[int | None] = dataclasses.field(default_factory=list)
    slot: int | None = None
    named: int = 0
    dropped: int = 0
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
        return [] if first is None else list(islice(cycle(self.tokens[first:]), count))


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
        page_size: Tokens of a page.
        slots: Most requests of a step.
        left: Number of tokens before its own that a token sees; None for all.
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
        page_size: int,
        slots: int,
        left: int | None = None,
        drafts: int = 0,
        guess: Callable[[Request, int], list[int]] = Request.guess,
    ):
        self.pages = Pages(pages)
        self._guess = guess
        self.running: list[Request] = []
        self.waiting: collections.deque[Request] = collections.deque()
        self.preemptions = 0
        self._page_size, self._left, self._drafts = page_size, left, drafts
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
            if request.slot is not None and self._extend(request):
                parts.append(self._part(request, 1))
                left -= 1
        # One at most, because others are admitted only where a step has room for them.
        for request in [x for x in self.running if x.missing > 1]:
            parts.append(self._part(request, min(request.missing, left)))
            left -= parts[-1].count
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
        parts, size = [], self._page_size
        # A request that has just lost its pages may have a token that the host does not know yet.
        while left and self._slots and self.waiting and not self.waiting[0].unread:
            request = self.waiting[0]
            length = len(request.tokens)
            names = request.names(size, (length - 1) // size) if request.shares else []
            shared = self.pages.share(names)
            more = -(-length // size) - len(shared)
            if more > self.pages.free - (self._reserve if self.running else 0):
                self._release(shared)
                break
            request.pages = [*shared, *(self.pages.take() for _ in range(more))]
            request.computed = len(shared) * size
            request.slot = self._slots.pop()
            self.running.append(self.waiting.popleft())
            parts.append(self._part(request, min(request.missing, left), admitted=True))
            left -= parts[-1].count
        return parts

    def _part(self, request: Request, count: int, *, admitted: bool = False) -> Part:
        """Return a part, after which its tokens count as computed."""
        start = request.computed
        request.computed += count
        draws = request.missing == 0
        request.unread += draws
        whole = min(len(request.tokens), request.computed) // self._page_size
        # Requests of the same step may share them: a layer writes all keys before it reads any.
        for number in range(request.named, whole):
            if (page := request.pages[number]) is not None:
                self.pages.name(page, request.names(self._page_size, whole)[number])
        request.named = whole
        assert request.slot is not None
        return Part(request, request.slot, start, count, draws, admitted)

    def _with_draft(self, part: Part) -> Part:
        """Return a part with guessed tokens, as many as there is room for."""
        request, size = part.request, self._page_size
        wanted = min(self._drafts, request.most - len(request.tokens) - 1)
        draft = self._guess(request, wanted) if wanted > 0 else []
        while draft and len(request.pages) * size < request.computed + len(draft):
            if not self.pages.free:
                draft = draft[: len(request.pages) * size - request.computed]
                break
            request.pages.append(self.pages.take())
        request.computed += len(draft)
        request.unread += len(draft)
        return dataclasses.replace(part, count=1 + len(draft), draft=draft)

    def _extend(self, request: Request) -> bool:
        """Make sure that the next token has a page; return whether the request keeps its slot."""
        if request.computed < len(request.pages) * self._page_size:
            return True
        while not self.pages.free:
            newest = self.running[-1]
            self._leave(newest)
            self.waiting.appendleft(newest)
            self.preemptions += 1
            if newest is request:
                return False
        request.pages.append(self.pages.take())
        return True

    def _drop_unseen(self, request: Request) -> None:
        """Release the pages that no later token sees."""
        if self._left is None:
            return
        first = max(request.computed - self._left, 0) // self._page_size
        self._release(request.pages[request.dropped : first])
        for number in range(request.dropped, first):
            request.pages[number] = None
        request.dropped = max(request.dropped, first)

    def _leave(self, request: Request) -> None:
        """Take a request's slot and pages."""
        assert request.slot is not None
        self.running.remove(request)
        self._slots.append(request.slot)
        self._release(request.pages)
        request.pages, request.slot = [], None
        request.computed = request.named = request.dropped = 0

    def _release(self, pages: Sequence[int | None]) -> None:
        # The first pages of a text are wanted again most often, so they are given back last.
        for page in reversed(pages):
            if page is not None:
                self.pages.release(page)
