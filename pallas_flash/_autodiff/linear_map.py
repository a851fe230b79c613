"""A linear map of tangents whose transpose is a function of its own.

    apply(rule, fixed, moved) = rule.tangents(fixed, moved)
    its transpose             = rule.cotangents(fixed, cotangents)

Forward mode computes the map, and reverse mode transposes it. `jax.custom_vjp` has only
the second.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


class Rule(Protocol):
    """A hashable description of a linear map of some arrays to `RESULTS` others."""

    def tangents(self, fixed: list, moved: list) -> list:
        """Return the map of `moved`, in which it is linear, in the dtypes of `fixed[:2]`."""
        ...

    def formula(self, fixed: list, moved: list) -> list:
        """Return `tangents` by operations that JAX differentiates in all arrays."""
        ...

    def cotangents(self, fixed: list, cotangents: list) -> list:
        """Return the transpose, an array for each of `moved`; a cotangent of None is zero."""
        ...


# The number of a map's results. `fixed` begins with arrays of their shapes and dtypes.
RESULTS = 2


def apply(rule: Rule, fixed: list, moved: list) -> list:
    """Return `rule.tangents(fixed, moved)`, of which `rule.cotangents` is the transpose."""
    return _linear.bind(*fixed, *moved, rule=rule, count=len(fixed))


_linear = Primitive("pallas_flash_linear")
_linear.multiple_results = True
_linear.def_abstract_eval(lambda *args, rule, count: list(args[:RESULTS]))


@_linear.def_impl
def _computed(*args, rule: Rule, count: int):
    return rule.tangents(list(args[:count]), list(args[count:]))


def _jvp(primals, tangents, *, rule: Rule, count: int):
    """Return the results and their tangents; the transpose holds while `fixed` does not move."""
    compute = functools.partial(_linear.bind, rule=rule, count=count)
    moves = [not isinstance(t, ad.Zero) for t in tangents]
    if not any(moves[:count]):
        dots = map(ad.instantiate_zeros, tangents[count:])
        return compute(*primals), compute(*primals[:count], *dots)

    def computed(*some):
        given = iter(some)
        args = [next(given) if m else x for m, x in zip(moves, primals, strict=True)]
        return rule.formula(args[:count], args[count:])

    some = tuple(x for m, x in zip(moves, primals, strict=True) if m)
    dots = tuple(t for m, t in zip(moves, tangents, strict=True) if m)
    return compute(*primals), jax.jvp(computed, some, dots)[1]


def _transpose(cotangents, *args, rule: Rule, count: int):
    cotangents = [None if isinstance(ct, ad.Zero) else ct for ct in cotangents]
    if any(map(ad.is_undefined_primal, args[RESULTS:count])):
        raise NotImplementedError(
            "`attention` must be transposed in `value` alone, in which it is linear; got another "
            "array of the linear function. Use `jax.vjp` for its derivative."
        )
    # Where `fixed` begins with the results themselves, they are unknown, and no rule reads them.
    fixed = [
        jnp.zeros(x.aval.shape, x.aval.dtype) if ad.is_undefined_primal(x) else x
        for x in args[:count]
    ]
    return [None] * count + list(rule.cotangents(fixed, cotangents))


@dataclasses.dataclass(frozen=True)
class _Batched:
    """The rule of a `vmap` of a map.

    Attributes:
        rule: of the map.
        dims: the mapped axis of each array that it is not linear in, or None. Elsewhere it is 0.
        options: keywords of the `vmap`.
    """

    rule: Rule
    dims: tuple[int | None, ...]
    options: tuple[tuple[str, Any], ...]

    def tangents(self, fixed, moved):
        return self._mapped(self.rule.tangents)(fixed, moved)

    def formula(self, fixed, moved):
        return self._mapped(self.rule.formula)(fixed, moved)

    def cotangents(self, fixed, cotangents):
        return self._mapped(self.rule.cotangents)(fixed, cotangents)

    def _mapped(self, function):
        return jax.vmap(function, in_axes=(list(self.dims), 0), **dict(self.options))


def _batch(axis, args, dims, *, rule: Rule, count: int):
    if all(dim is None for dim in dims):
        return _linear.bind(*args, rule=rule, count=count), [None] * RESULTS
    args, dims = list(args), list(dims)
    options = dict(axis_size=axis.size, spmd_axis_name=axis.spmd_name)
    # Results and tangents get the mapped axis, so that types say how it is divided.
    at = [*range(RESULTS), *range(count, len(args))]
    whole = jax.vmap(lambda *x: x, in_axes=tuple(dims[i] for i in at), **options)
    wide = [args[i] if dims[i] is not None else _wide(args[i]) for i in at]
    for i, x in zip(at, whole(*wide), strict=True):
        args[i], dims[i] = x.astype(args[i].dtype), 0
    rule = _Batched(rule, tuple(dims[:count]), tuple(options.items()))
    return _linear.bind(*args, rule=rule, count=count), [0] * RESULTS


def _wide(x):
    """Return a tangent so that the transpose of repeating it sums in float32 or wider."""
    return x.astype(np.promote_types(x.dtype, np.float32))


mlir.register_lowering(_linear, mlir.lower_fun(_computed, multiple_results=True))
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.fancy_primitive_batchers[_linear] = _batch


def constant(x, *, transposed: str = ""):
    """Return a result that is constant in what is differentiated; `stop_gradient` has no transpose.

    `transposed` is the error where JAX transposes it; "" if its cotangent is zero.
    """
    return _constant.bind(x, transposed=transposed)


def _transpose_constant(cotangent, x, *, transposed: str):
    if transposed:
        raise NotImplementedError(transposed)
    return [None]


_constant = Primitive("pallas_flash_constant")
_constant.def_impl(lambda x, **_: x)
_constant.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_constant, lambda context, x, **_: [x])
ad.primitive_jvps[_constant] = lambda primals, tangents, **params: (
    _constant.bind(*primals, **params),
    ad.Zero(jax.typeof(primals[0]).to_tangent_aval()),
)
ad.primitive_transposes[_constant] = _transpose_constant
batching.defvectorized(_constant)
