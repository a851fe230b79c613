"""The types of calls: pyright reads this file, and nothing runs it."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

import jax

from pallas_flash import Explanation, ScoreMod, attention, explain, merge, tuning
from pallas_flash.masks import Predicate, PrefixLM

Pair = tuple[jax.Array, jax.Array]
Several = tuple[jax.Array, ...]


def fn(*arguments) -> Any:
    return arguments[0]


def results(q: jax.Array, flag: bool):
    assert_type(attention(q, q, q), jax.Array)
    assert_type(attention(q, q, q, is_causal=True, return_lse=False), jax.Array)
    assert_type(attention(q, q, q, return_lse=True), Pair)
    assert_type(attention(q, q, q, return_residual=True, scale=0.5), Pair)
    assert_type(attention(q, q, q, return_lse=flag), jax.Array | Several)
    assert_type(attention(q, q, q, return_max_logits=True), Several)
    assert_type(attention(q, q, q, return_lse=True, return_max_logits=True), Several)
    assert_type(attention(q, q, q, return_lse=flag, return_max_logits=True), Several)
    assert_type(attention(q, q, q, return_max_logits=flag), jax.Array | Several)
    pair = attention(q, q, q, return_lse=True)
    assert_type(merge(pair, pair, pair), Pair)
    merge(*pair)  # pyright: ignore[reportArgumentType]
    _o, _max_logits = attention(q, q, q, return_max_logits=True)
    _o, _lse, _max_logits = attention(q, q, q, return_lse=True, return_max_logits=True)


def arguments(q: jax.Array):
    mask = Predicate(fn, (q,)) & q | ~PrefixLM(q)
    assert_type(attention(q, q, q, q, mask, score_mod=fn), jax.Array)
    assert_type(attention(q, q, q, mask=Predicate(fn), score_mod=ScoreMod(fn, (q,))), jax.Array)
    assert_type(attention(q, q, q, config=tuning.Triton(forward=tuning.Tile(64, 64))), jax.Array)
    attention(q, q, q, is_casual=True)  # pyright: ignore[reportCallIssue]
    attention(q, q, q, score_mod=3)  # pyright: ignore[reportCallIssue, reportArgumentType]
    tuning.Mosaic(forward=tuning.Tile(64, 64))  # pyright: ignore[reportArgumentType]


def explanations(q: jax.Array):
    shape = jax.ShapeDtypeStruct((2, 8, 4, 16), "float32")
    assert_type(
        explain(q, q, q, is_causal=True, return_lse=True, return_max_logits=True), Explanation
    )
    assert_type(explain(shape, shape, shape, shape, segment_ids=shape), Explanation)
