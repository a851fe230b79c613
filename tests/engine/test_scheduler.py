"""The scheduler of `models.engine` alone, beside a device that only remembers tokens."""

import collections
import random

import pytest

from models.config import DecoderConfig
from models.engine.pages import Groups, pages_for
from models.engine.scheduler import Request, Scheduler

SIZE, SLOTS, BUDGET, PAGES = 4, 4, 16, 10
WHOLE = Groups((None,), SIZE, BUDGET)


def next_token(text):
    """Stands for the model, whose texts repeat themselves for a while."""
    return text[-3] if len(text) > 3 and len(text) % 9 else (31 * sum(text[-3:]) + len(text)) % 11


class Device:
    """A simulation that keeps the content of each page, and computes the steps in their order."""

    def __init__(self, groups):
        self.memory, self.texts, self._lefts = {}, {}, groups.lefts

    def compute(self, parts):
        """Write the tokens of all parts, then read what they see; return what is drawn."""
        for part in parts:
            text = self.texts.setdefault(part.request, list(part.request.tokens))
            assert text[: len(part.request.tokens)] == part.request.tokens
            new = (text + part.draft)[part.start : part.start + part.count]
            assert len(new) == part.count > 0
            for n, token in enumerate(new, part.start):
                for group, page in enumerate(part.request.pages[n // SIZE]):
                    self.memory[page, n % SIZE] = group, token
        drawn = []
        for part in parts:
            text, end = self.texts[part.request], part.start + part.count
            for group, left in enumerate(self._lefts):
                first = 0 if left is None else max(part.start - left, 0)
                pages = [row[group] for row in part.request.pages]
                assert {*pages[: first // SIZE]} <= {None}
                found = [self.memory[pages[n // SIZE], n % SIZE] for n in range(first, end)]
                assert found == [(group, token) for token in (text + part.draft)[first:end]]
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
    users = collections.Counter(page for x in requests for row in x.pages for page in row)
    numbers = range(len(pages._users))
    assert [users[page] for page in numbers] == pages._users
    free = [*pages._blank, *pages._kept]
    assert sorted(free) == [page for page in numbers if not users[page]]
    assert {name: page for page, name in pages._name_of.items()} == pages._page_of
    assert set(pages._kept) <= set(pages._name_of)
    slots = [x.slot for x in scheduler.running]
    assert sorted([*slots, *scheduler._slots]) == list(range(SLOTS))
    assert all(x.slot is None and not x.pages for x in scheduler.waiting)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    ("lefts", "count"), [((None,), 10), ((5,), 10), ((None, 5, 5), 30), ((None, None, 0), 26)]
)
def test_pages_through_random_steps(lefts, count, drafts):
    draw, groups = random.Random(0), Groups(lefts, SIZE, BUDGET)
    scheduler, device = Scheduler(count, groups, SLOTS, drafts), Device(groups)
    room = min(groups.longest(count), 60)
    begins = [[draw.randrange(11) for _ in range(25)] for _ in range(3)]
    flying, alive, ended, shared, given, order = [], [], 0, 0, 0, {}
    for step in range(10_400):
        # At the end, nothing new comes.
        if step < 10_000 and draw.random() < 0.3 and len(alive) < 12:
            own = [draw.randrange(11) for _ in range(draw.randrange(15))]
            tokens = draw.choice(begins)[: draw.randrange(1, 26)] + own
            most = min(len(tokens) + draw.randrange(1, 40), room + 1)
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
    assert not alive and scheduler.pages.free == count
    assert ended > 700 and shared > 150 and scheduler.preemptions > 20
    assert (given > 300) == (drafts > 0)


def test_equal_prompts_of_one_step_are_computed_once():
    scheduler = Scheduler(PAGES, WHOLE, SLOTS)
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
    scheduler = Scheduler(PAGES, WHOLE, SLOTS)
    first, second = Request([1] * 9, 10), Request([2] * 9, 10)
    for request in (first, second):
        scheduler.add(request)
    scheduler.plan(BUDGET)
    scheduler.plan(BUDGET)
    scheduler.end(first)
    scheduler.end(second)
    for _ in range(PAGES - 1):  # All that have no name, and three of four that have one.
        scheduler.pages.take()
    there = [[scheduler.pages.has(x, 0) for x in y.names(SIZE, 2)] for y in (first, second)]
    assert there == [[False, False], [True, False]]


def test_prompts_wait_for_decoding_and_for_each_other():
    """A prompt takes what decoding leaves of a step, and the next one what that leaves."""
    scheduler = Scheduler(50, WHOLE, SLOTS)
    requests = [Request([n] * length, 60) for n, length in enumerate((3, 40, 20))]
    scheduler.add(requests[0])
    scheduler.plan(BUDGET)
    for request in requests[1:]:
        scheduler.add(request)
    counts = []
    for _ in range(6):
        counts.append([part.count for part in scheduler.plan(BUDGET)])
    assert counts == [[1, 15], [1, 15], [1, 10, 5], [1, 1, 14], [1, 1, 1], [1, 1, 1]]


# ------------------------------------------------------------------------------- groups of layers


def config_of(kinds, window):
    """The configuration of layers with a window, w, and without, f."""
    names = "vocab_size", "features", "hidden", "num_heads", "num_kv_heads", "head_dim", "context"
    sliding = tuple(kind == "w" for kind in kinds)
    sizes = dict.fromkeys(names, 8) | dict(num_layers=len(kinds), sliding=sliding)
    return DecoderConfig(**sizes, window=window)


@pytest.mark.parametrize(
    ("models", "lefts", "layers"),
    [
        (["fff"], (None,), ["000"]),
        (["www"], (8,), ["000"]),
        (["wfwwwfw"], (None, 8, 8, 8), ["1023102"]),
        (["fffwff"], (None,) * 5 + (8,), ["012534"]),
        (["wfwwwfw", "wfwf"], (None, 8, 8, 8), ["1023102", "1020"]),
        (["www", "ww"], (8,), ["000", "00"]),
        (["wfw", "ff"], (None,), ["000", "00"]),
        (["www", "wf"], (None,), ["000", "00"]),
    ],
)
def test_groups_have_layers_of_one_kind(models, lefts, layers):
    configs = [config_of(kinds, 9 - n) for n, kinds in enumerate(models)]
    groups = Groups.of_models(configs, SIZE, BUDGET)
    assert groups.lefts == lefts
    assert ["".join(map(str, of_model)) for of_model in groups.layers] == layers
    assert groups.size == max(layers[0].count(group) for group in layers[0])
    # The pages that a text needs suffice for it.
    for count in range(len(lefts), 60):
        most = groups.longest(count)
        assert groups.needed(most) <= count
        assert most == 2**31 or groups.needed(most + 1) > count
    pages = pages_for(configs, [50, 7], SIZE, BUDGET) * len(layers[0]) // groups.size
    assert pages >= groups.needed(50) + groups.needed(7)


@pytest.mark.parametrize(
    ("kinds", "window", "length", "count"),
    [
        ("f" * 62, 1024, 8192, 8),
        (("wwwwwf" * 11)[:62], 1024, 8192, 27),
        (("wwwwwf" * 11)[:62], 1024, 32768, 41),
        (("wwwwwf" * 5)[:26], 512, 8192, 36),
        (("wwwwwf" * 5)[:26], 512, 32768, 46),
        ("wf" * 21, 4096, 8192, 10),
        ("wf" * 21, 4096, 32768, 14),
        ("wf" * 12, 128, 8192, 15),
        ("wf" * 12, 128, 32768, 15),
    ],
)
def test_windows_make_room(kinds, window, length, count):
    """The table of docs/serving.md: texts that keep their pages, where 8 would without windows."""
    groups = Groups.of_models([config_of(kinds, window)], 64, 2048)
    pages = -(-8 * length // 64 * len(kinds) // groups.size)
    scheduler = Scheduler(pages, groups, 64)
    for n in range(64):
        scheduler.add(Request([n] * (length - 192), length + 1))
    for _ in range(count * length // 2048 + 400):
        for part in scheduler.plan(2048):
            if part.draws:
                scheduler.took(part.request, 0)
                # A text that is complete computes its last token again.
                if len(part.request.tokens) > length:
                    part.request.tokens.pop()
                    part.request.computed -= 1
    assert (len(scheduler.running), scheduler.preemptions) == (count, 0)
    assert all(len(x.tokens) == length for x in scheduler.running)
