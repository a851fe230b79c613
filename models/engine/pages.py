"""Pages: which layers have them together, and which texts.

A layer with a window needs few pages of a long text. So layers are divided into groups, each of
layers with a window or of layers without one, and a page has some tokens of one text for the layers
of one group. A group has `size` layers at most. The n-th layers of all groups have one array, and
any group may take any page: no memory is set aside for one kind of layers. A model without two
kinds of layers has one group.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from models.config import DecoderConfig

# Most tokens of a step by default, and with `batch_invariant`.
MOST, MOST_INVARIANT = 2048, 128


def default_step(max_requests: int, drafts: int, batch_invariant: bool) -> int:
    """Return the most tokens of a step by default, for which these are few enough."""
    least = max_requests * (1 + drafts)
    return max(MOST_INVARIANT if batch_invariant else MOST, 1 << least.bit_length())


def bytes_of_token(config: DecoderConfig, cache_dtype: str | None) -> int:
    """Return the bytes of a token's keys and values in all layers, with their scales."""
    size = jnp.dtype(cache_dtype or config.compute_dtype).itemsize
    row = config.head_dim * size + (4 if size == 1 else 0)
    return config.num_layers * 2 * config.num_kv_heads * row


def pages_for(
    configs: Sequence[DecoderConfig], lengths: Iterable[int], page_size: int, most: int
) -> int:
    """Return the `pages` of an engine that suffice for texts of these lengths at once.

    Args:
        configs: The model's and a draft model's.
        lengths: The most tokens of each text.
        page_size: Tokens of a page.
        most: Most tokens of a step.
    """
    groups = Groups.of_models(configs, page_size, most)
    return -(-sum(map(groups.needed, lengths)) * groups.size // configs[0].num_layers)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of the layers of models that have pages under the same numbers.

    Attributes:
        lefts: For each group, the number of tokens before its own that a token sees; None for all.
        page_size: Tokens of a page.
        most: Most tokens of a text that a step computes.
        layers: For each model, the group of each layer.
        size: Most layers of the first model in a group.
    """

    lefts: tuple[int | None, ...]
    page_size: int
    most: int
    layers: tuple[tuple[int, ...], ...] = ()
    size: int = 1

    @classmethod
    def of_models(cls, configs: Sequence[DecoderConfig], page_size: int, most: int) -> "Groups":
        """Return the groups of models; layers are of two kinds if all models have both."""
        kinds = [[x.has_window(n) for n in range(x.num_layers)] for x in configs]
        if any({*of_model} != {*kinds[0]} for of_model in kinds):
            kinds = [[False] * len(of_model) for of_model in kinds]
        counts = kinds[0].count(False), kinds[0].count(True)
        size = min(filter(None, counts))
        whole, windowed = (-(-count // size) for count in counts)
        left = max(x.window or 1 for x in configs) - 1
        layers = []
        for of_model in kinds:
            # In turns, so that groups of a kind have equal numbers.
            turns = [itertools.cycle(range(whole)), itertools.cycle(range(whole, whole + windowed))]
            layers.append(tuple(next(turns[kind]) for kind in of_model))
        lefts = (None,) * whole + (left,) * windowed
        return cls(lefts, page_size, most, tuple(layers), size)

    @property
    def count(self) -> int:
        """The number of groups."""
        return len(self.lefts)

    def unseen(self, tokens: int) -> list[int]:
        """Return for each group the number of first pages that no token after these sees."""
        return [0 if x is None else max(tokens - x, 0) // self.page_size for x in self.lefts]

    def needed(self, tokens: int) -> int:
        """Return the most pages that a text of these tokens has at once."""
        runs = -(-tokens // self.page_size)
        return sum(runs if x is None else min(runs, self._widest(x)) for x in self.lefts)

    def longest(self, pages: int) -> int:
        """Return the most tokens of a text that need no more than these pages; 2**31 if any."""
        of_windows = [self._widest(x) for x in self.lefts if x is not None]
        left, whole = pages - sum(of_windows), self.count - len(of_windows)
        runs = left // whole if whole else 2**31 if left >= 0 else 0
        return min(max(pages // self.count, runs) * self.page_size, 2**31)

    def _widest(self, left: int) -> int:
        """Return the most pages of a step's tokens and those that they see by a window."""
        return (left + self.most + self.page_size - 2) // self.page_size + 1


class Pages:
    """Which pages are used, by how many requests, and under which names others find them.

    A name stands for the tokens of a page and all before them; each group has names of its own.
    """

    def __init__(self, count: int):
        self._blank = list(range(count))[::-1]
        # Without users, but with a name; the first was used least recently.
        self._kept: dict[int, None] = {}
        self._users = [0] * count
        self._page_of: dict[tuple[bytes, int], int] = {}
        self._name_of: dict[int, tuple[bytes, int]] = {}

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

    def has(self, name: bytes, group: int) -> bool:
        """Return whether there is a page with a name."""
        return (name, group) in self._page_of

    def share(self, name: bytes, group: int) -> int:
        """Return the page with a name, with one user more."""
        page = self._page_of[name, group]
        self._kept.pop(page, None)
        self._users[page] += 1
        return page

    def release(self, page: int | None) -> None:
        """Take one user from a page, if there is one."""
        if page is None:
            return
        self._users[page] -= 1
        if self._users[page] == 0:
            if page in self._name_of:
                self._kept[page] = None
            else:
                self._blank.append(page)

    def name(self, page: int, name: bytes, group: int) -> None:
        """Let others find a page, unless they find another one with the same tokens."""
        if (name, group) not in self._page_of and page not in self._name_of:
            self._page_of[name, group], self._name_of[page] = page, (name, group)

    def forget(self) -> None:
        """Take the names from all pages, whose numbers are no longer right."""
        self._blank += self._kept
        self._kept, self._page_of, self._name_of = {}, {}, {}
