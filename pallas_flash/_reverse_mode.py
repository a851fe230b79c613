"""An identity that reverse mode passes, and that forward mode refuses in a sentence.

    in_reverse_mode(x) = x          tangents:  dx -> dx, by a primitive

Transposing that primitive is the identity on cotangents. Computing it raises, because a tangent
that is computed comes from forward mode, which `jax.custom_vjp` has not.
"""

import functools

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def in_reverse_mode(by: str, operands):
    """Return the operands, of which forward mode raises.

    Args:
        by: the implementation, for the message.
        operands: a tree of arrays.
    """
    return operands


@functools.partial(in_reverse_mode.defjvp, symbolic_zeros=True)
def _(by: str, primals, tangents):
    tangents, structure = jax.tree.flatten(tangents[0])
    moved = iter(_to_transpose.bind(*filter(_is_moved, tangents), by=by))
    tangents = [next(moved) if _is_moved(t) else t for t in tangents]
    return primals[0], jax.tree.unflatten(structure, tangents)


def _is_moved(tangent) -> bool:
    return not isinstance(tangent, SymbolicZero)


# One call for all tangents, because transposing it may bring those that are known to be zero.
_to_transpose = Primitive("pallas_flash_reverse_mode")
_to_transpose.multiple_results = True
_to_transpose.def_abstract_eval(lambda *tangents, by: tangents)


@_to_transpose.def_impl
def _forward_mode(*tangents, by: str):
    raise NotImplementedError(
        f"`attention` must be differentiated in reverse mode by {by!r}; got a tangent of its "
        "operands, from `jax.jvp`, `jax.jacfwd` or `jax.linearize`. Use `jax.grad` or `jax.vjp`, "
        'of which forward mode works, or implementation="reference".'
    )


def _batched(tangents, dims, *, by: str):
    return _to_transpose.bind(*tangents, by=by), dims


mlir.register_lowering(_to_transpose, lambda _, *tangents, by: _forward_mode(by=by))
batching.primitive_batchers[_to_transpose] = _batched
ad.deflinear2(_to_transpose, lambda cotangents, *tangents, by: cotangents)
