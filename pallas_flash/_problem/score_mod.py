"""The score function that a user passes as `score_mod`, with the arrays that it reads."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_flash._problem.checks import describe, function, operands


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoreMod:
    """A function of scores, and the arrays that it reads.

    The function is traced into the kernels, which take its derivative in the score by `jax.vjp`. A
    function without operands may be passed as `score_mod` by itself.

    Attributes:
        fn: takes scores s in float32, after scale, bias and slopes, the int32 indices b, h, q_pos,
            k_pos, which broadcast to the shape of s, then the operands, and returns scores of the
            same shape and dtype. It may ignore s, and return what broadcasts to its shape. Built
            from elementwise jax.numpy. An operand is read at one index for each of its axes, as in
            `slope[h]` or `table[q_pos, k_pos]`; an index outside is moved to the edge, a negative
            one to 0. An operand without axes is given as its number. Define it once: another
            function object is another program to compile.
        operands: arrays. Floating ones have a gradient, summed in float32 in memory linear in the
            lengths. It is a kernel's if each is read at the head, the batch element, the query or
            the key alone, or at q_pos - k_pos; else it is "xla"'s. See `explain`.

    Example:
        >>> import jax.numpy as jnp, pallas_flash
        >>> def scaled_by_head(s, b, h, q_pos, k_pos, factor):
        ...     return s * factor[h]
        >>> x = jnp.ones((1, 4, 2, 16))
        >>> score_mod = pallas_flash.ScoreMod(scaled_by_head, (jnp.array([0.5, 2.0]),))
        >>> pallas_flash.attention(x, x, x, score_mod=score_mod).shape
        (1, 4, 2, 16)
    """

    fn: Callable = dataclasses.field(metadata=dict(static=True))
    operands: tuple[Any, ...] = ()


def fitted_score_mod(score_mod, dtype) -> ScoreMod | None:
    """Return what a user passes as `score_mod`, checked for scores of a dtype."""
    if score_mod is None:
        return None
    if isinstance(score_mod, ScoreMod):
        arrays = operands("ScoreMod.operands", score_mod.operands, dtype.itemsize)
        function("ScoreMod.fn", score_mod.fn, dtype, arrays)
        return ScoreMod(score_mod.fn, arrays)
    if not callable(score_mod):
        raise TypeError(
            "`score_mod` must be a function of a score and its indices, or a "
            f"pallas_flash.ScoreMod; got {describe(score_mod)}. Write `lambda s, b, h, q_pos, "
            "k_pos: s` with elementwise jax.numpy."
        )
    function("score_mod", score_mod, dtype, ())
    return ScoreMod(score_mod)
