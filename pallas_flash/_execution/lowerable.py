"""Finds out whether Pallas can lower a user's function, by lowering it for one tile.

A list of operations would not do, because Pallas lowers some operations for some arguments alone.
So each new `score_mod`, its derivative and each new `Predicate` are lowered once for each backend,
in a kernel that computes nothing else (`probe.py` of each). This compiles nothing and needs no GPU.
"""

import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash._jax import compat
from pallas_flash._problem import table_gradients
from pallas_flash._problem.mask_leaves import PredicateLeaf
from pallas_flash._problem.masks import Mask
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.scores import Scores

# The language to which an implementation lowers its kernels.
LANGUAGES = {"mosaic": "Mosaic GPU", "triton": "Triton"}

# Functions whose answers stay cached; the cache also keeps whatever they close over.
CACHED_FUNCTIONS = 256


class UserFunction(NamedTuple):
    """A user's function with everything on which its lowering depends.

    Attributes:
        fn: the function.
        operands: shapes of its arrays.
        role: "score_mod", "derivative" (of a score function, in the score), "reads" (of a score
            function, the derivative in what it reads) or "Predicate".
    """

    fn: Any
    operands: tuple[jax.ShapeDtypeStruct, ...]
    role: str

    @property
    def name(self) -> str:
        """The name of the function in error sentences."""
        names = {
            "derivative": "the derivative of `score_mod`",
            "reads": "the derivative of `score_mod` in its operands",
        }
        return names.get(self.role, f"`{self.role}`")

    def problem(self) -> Problem:
        """Return a problem of one tile with this function and no other option."""
        x = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
        mask, scores, arrays = Mask(), Scores(), None
        if self.role == "Predicate":
            mask = Mask((PredicateLeaf(self.fn, self.operands),))
        else:
            scores, arrays = Scores(score_mod=self.fn), self.operands
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        return Problem(x, x, x, scale, None, None, None, arrays, mask, scores)


def limits(problem: Problem, implementation: str) -> list[str]:
    """Return why kernels cannot compute the mask and the scores of a problem; whole sentences."""
    return _sentences(functions_of(problem), implementation)


def derivative_limit(problem: Problem, implementation: str) -> str:
    """Return why kernels cannot compute the derivative of the scores, or ""."""
    roles = (x._replace(role="derivative") for x in functions_of(problem) if x.role == "score_mod")
    return " ".join(_sentences(roles, implementation))


def reads_limit(problem: Problem) -> str:
    """Return why "triton" cannot compute the derivative of the scores in their operands, or ""."""
    roles = (x._replace(role="reads") for x in functions_of(problem) if x.role == "score_mod")
    return " ".join(_sentences(roles, "triton"))


def functions_of(problem: Problem) -> Iterator[UserFunction]:
    """Yield the user's functions of a call."""
    scores = problem.rest_of_scores
    if scores.score_mod is not None:
        yield UserFunction(scores.score_mod, _shapes(problem.score_operands), "score_mod")
    # Blocks may hold predicates.
    for x in jax.tree.leaves(problem.mask, is_leaf=lambda x: isinstance(x, PredicateLeaf)):
        if isinstance(x, PredicateLeaf):
            yield UserFunction(x.fn, _shapes(x.operands), "Predicate")


def _shapes(arrays) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)


def _sentences(functions, implementation: str) -> list[str]:
    sentences = (_sentence(x, implementation, compat.abstract_device()) for x in functions)
    return list(filter(None, sentences))


class _Passing(Exception):
    """A sentence that is not kept: the next call may go well."""


def _sentence(function: UserFunction, implementation: str, device) -> str:
    """Return why kernels cannot compute a function on a described device, or ""."""
    try:
        return _kept_sentence(function, implementation, device)
    except _Passing as sentence:
        return str(sentence)


@functools.lru_cache(CACHED_FUNCTIONS)
def _kept_sentence(function: UserFunction, implementation: str, device) -> str:
    """Return `_sentence`.

    Raises:
        _Passing: if the user's function raised, or there was no memory.
    """
    errors: list[BaseException] = []

    def run():
        try:
            _lower(function, implementation, device)
        except BaseException as error:  # The user's function runs here, and may raise anything.
            errors.append(error)

    # A new thread is outside of every trace, mesh and setting of JAX of the caller.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if not errors:
        return ""
    [error] = errors
    if passing := isinstance(error, _Traced):
        error = error.error
    if not isinstance(error, Exception):
        raise error  # Such as KeyboardInterrupt.
    what = _described(error, function.name)
    sentence = f"Pallas cannot lower {what} to {LANGUAGES[implementation]}."
    if passing or isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        raise _Passing(sentence)
    return sentence


class _Traced(Exception):
    """Holds an error of tracing, where the user's function runs, and before Pallas lowers."""

    def __init__(self, error: BaseException):
        self.error = error


def _lower(function: UserFunction, implementation: str, device) -> None:
    if implementation == "mosaic":
        from pallas_flash._backends.mosaic.probe import compute
    else:
        from pallas_flash._backends.triton.probe import compute
    options: dict[str, Any] = dict(derivative=function.role == "derivative")
    if function.role == "reads":
        options["reads"] = len(table_gradients.reads_of(function.problem().scores))
    run = functools.partial(compute, **options)
    with compat.described_device(device):
        try:
            traced = jax.jit(run).trace(function.problem())
        except BaseException as error:
            raise _Traced(error) from error
        traced.lower(lowering_platforms=("cuda",))


def _described(error: BaseException, name: str) -> str:
    """Return the operation at which lowering failed, or else the error in a few words."""
    if (operation := compat.failing_operation(error)) is not None:
        return f"`{operation}` in {name}"
    reason = str(error).partition("\n")[0].rstrip(".")[:240]
    return f"{name} ({type(error).__name__}: {reason})"
