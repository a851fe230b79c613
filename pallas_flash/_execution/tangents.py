"""Tangents of the two passes: forward mode, and derivatives of second and higher order.

The kernels compute F: operands -> (o, lse) and its gradients

    B(operands, o, lse, do, dlse) = pullback of F at the operands, applied to (do, dlse)

and have no derivatives themselves. Plain JAX has them: it computes the definition of the op for one
block of queries after the other, and differentiates it in both modes and to any order. A block
keeps its inputs alone, so that the memory of second derivatives is linear in T and in S.

B is always called with o, lse = F(operands). So along a tangent of the operands it changes as the
right side does, which includes the change of o and lse with the operands. Tangents of o and lse are
therefore left out.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash._backends import reference
from pallas_flash._execution import context
from pallas_flash._jax.symbolic import is_symbolic, smaller
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.operands import Pairs, is_pairs
from pallas_flash._problem.problem import Gradients, Problem

# Rows of scores, over all batch elements and heads, that exist at the same time. A block has at
# least one query of each head.
ROWS_AT_ONCE = 4096


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward_tangents(wanted: tuple[str, ...], along, operands, rest: Problem, tangents):
    """Return the tangents of o [B, T, N, V] and of the natural LSE [B, T, N].

    Args:
        wanted: the names of the operands that have a tangent.
        along: how the sequence is divided over Manual mesh axes, if it is.
        operands: the operands that `Problem.split` returned.
        rest: the problem that it returned.
        tangents: of the operands, by name.
    """
    fn, primals = _function_of(wanted, along, operands, rest)
    return jax.jvp(fn, (primals,), (tangents,))[1]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def backward_tangents(
    wanted: tuple[str, ...], names: tuple[str, ...], along, operands, rest, cotangents, tangents
) -> Gradients:
    """Return the tangents of the gradients.

    Args:
        wanted: the names of the operands that have a tangent, as `named_arrays` gives them.
        names: the operands whose gradients have been computed.
        along: how the sequence is divided over Manual mesh axes, if it is.
        operands: the operands that `Problem.split` returned.
        rest: the problem that it returned.
        cotangents: do and dlse, or None for the latter.
        tangents: of the operands, by name, and of the cotangents.
    """

    def gradients(primals, cotangents):
        fn, primals = _function_of(names, along, named_arrays(operands) | primals, rest)
        (_, lse), pull = jax.vjp(fn, primals)
        do, dlse = cotangents
        [grads] = pull((do, jnp.zeros_like(lse) if dlse is None else dlse))
        return grads

    primals = {name: x for name, x in named_arrays(operands).items() if name in wanted}
    grads = jax.jvp(gradients, (primals, cotangents), tangents)[1]
    return Gradients(**dict.fromkeys(Gradients._fields) | _joined(grads, operands))


# The operands of a score function are named one by one, because each may have a derivative or not.
_SCORE_OPERANDS = "score_operands"


def named_arrays(operands: dict) -> dict:
    """Return what `Problem.split` returned, or gradients of it, with a name for each array."""
    arrays = enumerate(operands.get(_SCORE_OPERANDS) or ())
    rest = {name: x for name, x in operands.items() if name != _SCORE_OPERANDS}
    return rest | {f"{_SCORE_OPERANDS} {i}": x for i, x in arrays}


def _joined(named: dict, like: dict) -> dict:
    """Invert `named_arrays`; an operand of the score function without a name is None."""
    fields = {name: x for name, x in named.items() if name in Gradients._fields}
    if len(fields) == len(named):
        return fields
    arrays = (named.get(f"{_SCORE_OPERANDS} {i}") for i in range(len(like[_SCORE_OPERANDS])))
    return fields | {_SCORE_OPERANDS: tuple(arrays)}


def _function_of(names, along, operands, rest: Problem):
    """Return the op as a function of some operands, and these operands, by `named_arrays`."""
    operands = named_arrays(operands)
    count = sum(name.startswith(_SCORE_OPERANDS) for name in operands)
    like = {_SCORE_OPERANDS: (None,) * count}

    def fn(some):
        problem = rest.join(dict.fromkeys(Gradients._fields) | _joined(operands | some, like))
        return _attention(problem if along is None else context.whole_keys(problem, along))

    return fn, {name: operands[name] for name in names}


def _attention(problem: Problem):
    """Compute `_backends.reference.attention` by blocks of queries."""
    p = dataclasses.replace(problem, max_logits=False)
    # A symbolic batch size has no number: the limit then holds for each batch element.
    batch = 1 if is_symbolic(p.batch) else p.batch
    block = max(1, smaller(p.q_len, ROWS_AT_ONCE // (batch * p.num_heads)))
    count = -(-p.q_len // block)
    # The last block is padded with queries that see no key.
    p = dataclasses.replace(p, mask=p.mask.within(q=Tiling(p.q_len, block)))

    # Queries, bias and mask arrays are cut into blocks; other leaves of a mask get positions.
    tree = (p.query, None if p.bias is None else Pairs(p.bias), p.mask)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_pairs)

    def axis_of(x):
        axis = 2 if is_pairs(x) else 1 if x is p.query else None
        return axis if axis and x.shape[axis] != 1 else None

    axes = list(map(axis_of, leaves))
    arrays = [x.array if is_pairs(x) else x for x in leaves]
    blocks = [_split(x, a, count, block) for x, a in zip(arrays, axes, strict=True) if a]

    @jax.checkpoint
    def rows(xs):
        first_query, blocks = xs
        blocks = iter(blocks)
        parts = [next(blocks) if a else x for x, a in zip(arrays, axes, strict=True)]
        parts = [Pairs(y) if is_pairs(x) else y for x, y in zip(leaves, parts, strict=True)]
        query, bias, mask = jax.tree.unflatten(structure, parts)
        bias = None if bias is None else bias.array
        part = dataclasses.replace(p, query=query, bias=bias, mask=mask)
        return reference.attention(part, first_query)

    first_queries = block * jnp.arange(count, dtype=jnp.int32)
    o, lse = lax.map(rows, (first_queries, blocks))
    return _join(o, p.q_len), _join(lse, p.q_len)


def _split(x, axis: int, count: int, block: int):
    """Return the axis in blocks, the blocks in front; the last one is padded with zeros."""
    padding = [(0, count * block - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
    x = jnp.pad(x, padding)
    x = x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _join(x, length: int):
    """Reshape [blocks, B, block, ...] to [B, T, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
