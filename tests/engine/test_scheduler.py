"""The scheduler of `models.engine` alone, beside a device that only remembers tokens."""

import collections
import random

import pytest

from models.engine.scheduler import Request, Scheduler

SIZE, SLOTS, BUDGET, PAGES, ROOM = 4, 4, 16, 10, 40


def next_token(text):
    """Stands for the model, whose texts repeat themselves for a while."""
    return text[-3] if len(text) > 3 and len(text) % 9 else (31 * sum(text[-3:]) + len(text)) % 11


class Device:
    """A simulation that keeps the content of each page, and computes the steps in their order."""

    def __init__(self, left):
        self.memory, self.texts, self._left = {}, {}, left

    def compute(self, parts):
        """Write the tokens of all parts, then read what they see; return what is drawn."""
        for part in parts:
            text = self.texts.setdefault(part.request, list(part.request.tokens))
            assert text[: len(part.request.tokens)] == part.request.tokens
            new = (text + part.draft)[part.start : part.start + part.count]
            assert len(new) == part.count > 0
            for n, token in enumerate(new, part.start):
                self.memory[part.request.pages[n // SIZE], n % SIZE] = token
        drawn = []
        for part in parts:
            text, end = self.texts[part.request], part.start + part.count
            first = 0 if self._left is None else max(part.start - self._left, 0)
            # A new request gets all pages, and gives them back afterwards.
            assert part.admitted or {*part.request.pages[: first // SIZE]} <= {None}
            places = [(part.request.pages[n // SIZE], n % SIZE) for n in range(first, end)]
            assert [self.memory[x] for x in places] == (text + part.draft)[first:end]
            if part.draws:
                assert end == len(text + part.draft)
                new = [next_token(text)]
                while part.draft[len(new) - 1 : len(new)] == new[-1:]:
                    new.append(next_token(text + new))
                text += new
                drawn.append((part, new))
        return drawn


def check(scheduler):
    """No page is lost, and each has as many users as it should."""
    pages, requests = scheduler.pages, [*scheduler.running, *scheduler.waiting]
    users = collections.Counter(page for x in requests for page in x.pages if page is not None)
    assert [users[page] for page in range(PAGES)] == pages._users
    free = [*pages._blank, *pages._kept]
    assert sorted(free) == [page for page in range(PAGES) if not users[page]]
    assert {name: page for page, name in pages._name_of.items()} == pages._page_of
    assert set(pages._kept) <= set(pages._name_of)
    slots = [x.slot for x in scheduler.running]
    assert sorted([*slots, *scheduler._slots]) == list(range(SLOTS))
    assert all(x.slot is None and not x.pages for x in scheduler.waiting)


@pytest.mark.parametrize(("left", "drafts"), [(None, 0), (5, 0), (None, 2), (5, 3)])
def test_pages_through_random_steps(left, drafts):
    draw = random.Random(0)
    scheduler, device = Scheduler(PAGES, SIZE, SLOTS, left, drafts), Device(left)
    begins = [[draw.randrange(11) for _ in range(25)] for _ in range(3)]
    flying, alive, ended, shared, given, order = [], [], 0, 0, 0, {}
    for step in range(10_400):
        # At the end, nothing new comes.
        if step < 10_000 and draw.random() < 0.3 and len(alive) < 12:
            own = [draw.randrange(11) for _ in range(draw.randrange(15))]
            tokens = draw.choice(begins)[: draw.randrange(1, 26)] + own
            most = min(len(tokens) + draw.randrange(1, 40), ROOM + 1)
            alive.append(Request(tokens, most, shares=draw.random() < 0.9))
            order[alive[-1]] = len(order)
            scheduler.add(alive[-1])
        if draw.random() < 0.02 and alive:
            scheduler.end(alive.pop(draw.randrange(len(alive))))
        parts = scheduler.plan(BUDGET)
        assert sum(part.count for part in parts) <= BUDGET
        assert len({part.slot for part in parts}) == len(parts)
        shared += sum(part.admitted and part.start > 0 for part in parts)
        check(scheduler)
        # Whoever runs is older than whoever waits.
        numbers = [order[x] for x in (*scheduler.running, *scheduler.waiting)]
        assert numbers == sorted(numbers)
        before, flying = flying, device.compute(parts)
        if drafts:
            before, flying = flying, []
        for part, tokens in before:
            request = part.request
            given += len(tokens) - 1
            for token in tokens if request in alive else ():
                scheduler.took(request, token)
                if len(request.tokens) == request.most or draw.random() < 0.01:
                    alive.remove(request)
                    scheduler.end(request)
                    ended += 1
                    break
            if request in alive and part.draft:
                scheduler.took_back(request)
    assert not alive and scheduler.pages.free == PAGES
    assert ended > 700 and shared > 200 and scheduler.preemptions > 20
    assert (given > 300) == (drafts > 0)


def test_equal_prompts_of_one_step_are_computed_once():
    scheduler = Scheduler(PAGES, SIZE, SLOTS)
    for _ in range(3):
        scheduler.add(Request([5] * 10, 12))
    parts = scheduler.plan(BUDGET)
    assert [(part.start, part.count, part.draws) for part in parts] == [
        (0, 10, True),
        (8, 2, True),
        (8, 2, True),
    ]
    assert scheduler.pages.free == PAGES - 2 - 3


def test_used_pages_are_forgotten_last():
    scheduler = Scheduler(PAGES, SIZE, SLOTS)
    first, second = Request([1] * 9, 10), Request([2] * 9, 10)
    for request in (first, second):
        scheduler.add(request)
    scheduler.plan(BUDGET)
    scheduler.plan(BUDGET)
    scheduler.end(first)
    scheduler.end(second)
    for _ in range(PAGES - 1):  # All that have no name, and three of four that have one.
        scheduler.pages.take()
    assert [len(scheduler.pages.share(x.names(SIZE, 2))) for x in (first, second)] == [0, 1]


def test_prompts_wait_for_decoding_and_for_each_other():
    """A prompt takes what decoding leaves of a step, and the next one what that leaves."""
    scheduler = Scheduler(50, SIZE, SLOTS)
    requests = [Request([n] * length, 60) for n, length in enumerate((3, 40, 20))]
    scheduler.add(requests[0])
    scheduler.plan(BUDGET)
    for request in requests[1:]:
        scheduler.add(request)
    counts = []
    for _ in range(6):
        counts.append([part.count for part in scheduler.plan(BUDGET)])
    assert counts == [[1, 15], [1, 15], [1, 10, 5], [1, 1, 14], [1, 1, 1], [1, 1, 1]]
