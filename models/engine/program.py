"""The step of the engine on a device: one jitted function of fixed shapes.

The host gives a row of numbers for each slot, and the tokens that it knows.
Caches, the page table, the last tokens and which tokens a text has stay on the device.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.decoder import Decoder
from models.engine.sampling import LIMITED, Limits, draw
from models.generation import Structure, take_apart

# Columns of a step's array of slots: the token to compute, if it is the only one and known, else
# -1; the number of tokens to compute, and of all so far; whether to draw the next one; `Limits`;
# and the only token's page in each group of layers, if it is new, else -1.
TOKEN, NEW, LENGTH, DRAWS = range(4)
LIMITS, PAGES = slice(4, 4 + len(Limits._fields)), slice(4 + len(Limits._fields), None)


class Device:
    """Models with pages, what is known of each slot, and the programs that compute steps.

    Args:
        models: The model; then the draft model, if there is one. Each has its pages.
        table: The shape of the page table, (groups, slots, columns).
        page_size: Tokens of a page.
        sizes: Sizes of programs.

    Attributes:
        state: As in `step`.
        params: The parameters of all models.
    """

    def __init__(
        self,
        models: Sequence[Decoder],
        table: tuple[int, int, int],
        page_size: int,
        sizes: tuple[int, ...],
    ):
        self._page_size, self._made = page_size, {}
        self._structures, caches, params = zip(*map(take_apart, models), strict=True)
        caches, params = ([*itertools.chain(*arrays)] for arrays in (caches, params))
        # Programs see where arrays are, and whether they must stay there.
        self.params = jax.device_put(params, [x.sharding for x in params])
        layout, vocab_size = models[0].layout, models[0].config.vocab_size
        whole = caches[0].sharding if layout is None else layout.sharding()
        self._places = tuple(x.sharding for x in caches), whole, whole, whole
        last, present = np.zeros(table[1], np.int32), np.zeros((table[1], vocab_size), bool)
        state = tuple(caches), last, np.zeros(table, np.int32), present
        self.state = jax.device_put(state, self._places)
        self._shapes = *(x.shape for x in jax.tree.leaves(state)), *sizes

    @property
    def programs(self) -> int:
        """Number of programs that are compiled."""
        return sum(program._cache_size() for program in self._made.values())

    def set_params(self, model: Decoder) -> None:
        """Take the parameters of a model of the same shape as the first one."""
        params = jax.tree.leaves(nnx.state(model, nnx.Param))
        count = self._structures[0].params.num_leaves
        old, rest = self.params[:count], self.params[count:]
        if [(x.shape, x.dtype) for x in params] != [(x.shape, x.dtype) for x in old]:
            raise ValueError("`model` must have the shapes and dtypes of the engine's model.")
        self.params = [*jax.device_put(params, [x.sharding for x in old]), *rest]

    def compute(self, kind: int, drafts: int, *inputs: Any) -> Any:
        """Compute a step, and return what it draws; the inputs are as in `step`."""
        if (kind, drafts) not in self._made:
            how = self._page_size, kind, drafts
            self._made[kind, drafts] = programs(self._structures, how, self._places, self._shapes)
        self.state, drawn = self._made[kind, drafts](self.state, self.params, *inputs)
        return drawn


# One for each number of slots and pages, so that equal engines compile once.
@functools.lru_cache(maxsize=64)
def programs(
    structures: tuple[Structure, ...], how: tuple[int, int, int], places: Any, shapes: Any
):
    """Return `step`, jitted for arrays of these shapes."""
    del shapes
    run = functools.partial(step, structures, *how)
    return jax.jit(run, donate_argnums=0, out_shardings=(places, places[1]))


def step(
    structures: tuple[Structure, ...], page_size: int, kind: int, drafts: int,
    state: Any, params: Any, slots: Any, tokens: Any, table: Any, following: Any = None,
):  # fmt: skip
    """Compute the tokens of a step, and draw those that follow.

    Args:
        structures: The model without its arrays; then the draft model, if there is one.
        page_size: Tokens of a page.
        kind: What is computed to draw tokens.
        drafts: Most tokens of a slot that are guesses. If there are any, a token is drawn after
            each token, and not after the last one of each slot.
        state: The caches of all models; of each slot the last token that was drawn [slots], the
            pages [groups, slots, columns], and which tokens the text has [slots, vocab].
        params: The parameters of all models.
        slots: What each slot computes, int32 [slots, fields].
        tokens: The tokens of all slots in a row, int32 [size]; -1 - s is the last one of slot s.
            None, if each slot has one token at most.
        table: The pages of each slot; None, if `slots` has all that are new.
        following: The token after each one, which counts as drawn, int32 [size]; -1 to draw it.
            None, if all are drawn.

    Returns:
        The state, and int32 [2, drawn]: the tokens, and the bits of the logarithms of their
        probabilities. There are [size], if there are drafts or `following`; else [slots]. With
        `drafts` a third row has `tokens`, with all guesses.
    """
    caches, last, old_table, present = state
    models = list(_models(structures, caches, params))
    _, count, columns = old_table.shape
    row, new, lengths = jnp.arange(count), slots[:, NEW], slots[:, LENGTH]
    limits, pages, number = Limits.unpacked(slots[:, LIMITS]), slots[:, PAGES].T, row
    ends: Any = None
    if tokens is None:
        column = jnp.where(pages[0] < 0, columns, jnp.maximum(lengths - 1, 0) // page_size)
        table = old_table.at[:, row, column].set(pages, mode="drop")
        slot = jnp.where(new > 0, row, count)
        tokens = jnp.where(slots[:, TOKEN] < 0, last, slots[:, TOKEN])
        inputs, requests = tokens[:, None], (lengths, table)
    else:
        starts = jnp.concatenate([jnp.zeros_like(new[:1]), jnp.cumsum(new)])
        number = jnp.arange(len(tokens))
        slot = jnp.searchsorted(starts[1:], number, side="right", method="compare_all")
        tokens = jnp.where(tokens < 0, last[-1 - tokens], tokens)
        if drafts and models[1:]:
            guesses = _guesses(models[1], drafts, slots, table, limits, present, kind)
            place = number - starts[slot]
            tokens = jnp.where(place > 0, guesses[place - 1, slot], tokens)
        inputs, requests, ends = tokens, (lengths, table, starts), jnp.maximum(starts[1:] - 1, 0)
    if kind == LIMITED:
        # A text that begins has no token.
        present = present & ((lengths > new) | (new == 0))[:, None]
        present = present.at[slot, tokens].set(True, mode="drop")
    # The other one computes the same tokens, so that its pages are right wherever these are.
    stream, *_ = [_stream(model, inputs, requests) for model in models]
    if not drafts and following is None:
        stream = stream[:, 0] if len(requests) == 2 else stream[ends]
    logits = models[0].logits(stream)
    position, of_row, to_draw = lengths, present, logits
    if drafts:
        row = jnp.minimum(slot, count - 1)
        limits, of_row = jax.tree.map(lambda x: x[row], (limits, present))
        position = lengths[row] - (ends[row] - number)
    elif following is not None:
        to_draw = logits[ends]
    drawn = draw(to_draw, limits, position, of_row, kind)
    if not drafts:
        last = jnp.where(slots[:, DRAWS] > 0, drawn, last)
    if following is not None:
        drawn = drawn if drafts else drawn[jnp.minimum(slot, count - 1)]
        drawn = jnp.where(following < 0, drawn, following)
    of_token = jnp.take_along_axis(logits, drawn[:, None], axis=-1)[:, 0]
    log_probability = of_token - jax.nn.logsumexp(logits, axis=-1)
    bits = jax.lax.bitcast_convert_type(log_probability, jnp.int32)
    caches = tuple(x for model in models for x in jax.tree.leaves(nnx.state(model, nnx.Cache)))
    return (caches, last, table, present), jnp.stack([drawn, bits, *[tokens] * bool(drafts)])


def _models(structures: tuple[Structure, ...], caches: Any, params: Any):
    """Yield the models with their parts of these arrays."""
    for structure in structures:
        m, n = structure.cache.num_leaves, structure.params.num_leaves
        yield structure.model(caches[:m], params[:n])
        caches, params = caches[m:], params[n:]


def _stream(model: Decoder, tokens: Any, requests: Any) -> Any:
    """Return the stream of tokens, of which a draft model may lack some."""
    tokens = jnp.minimum(tokens, model.config.vocab_size - 1)
    return model.stream(tokens, decode=True, requests=requests)


def _guesses(
    draft: Decoder, drafts: int, slots: Any, table: Any, limits: Limits, present: Any, kind: int
):
    """Return the tokens that a draft model lets follow each slot's first one, [drafts, slots].

    It draws as the model does, with the same noise, so that most guesses are what that draws where
    the two models give tokens similar probabilities.
    """
    token, new, start = slots[:, TOKEN], slots[:, NEW], slots[:, LENGTH] - slots[:, NEW]
    size, guesses = present.shape[1], []
    for n in range(1, drafts + 1):
        length = jnp.where(new > n, start + n, 0)
        logits = draft.logits(_stream(draft, token[:, None], (length, table))[:, 0])[:, :size]
        missing = size - logits.shape[1]
        logits = jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        token = draw(logits, limits, length, present, kind)
        guesses.append(token)
    return jnp.stack(guesses)
