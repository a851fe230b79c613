"""Checks of single arguments. All errors have one form.

`argument` must be this; got that. Do so.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash._jax.one_device import whole
from pallas_flash._problem.operands import readable


def array(name: str, x) -> jax.Array:
    """Return `x` as a JAX array; refuse sequences and strings."""
    x = held(x)
    if isinstance(x, jax.Array):
        return x
    if not is_array(x):
        advice = "Convert it with `jnp.asarray`."
        if isinstance(x, jax.ShapeDtypeStruct):
            advice = "Pass an array, or trace shapes by `jax.eval_shape`."
        elif isinstance(x, jax.Ref):
            advice = "Pass what it holds, `ref[...]`."
        raise TypeError(f"`{name}` must be an array; got {describe(x)}. {advice}")
    try:
        converted = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        # NumPy arrays may hold objects, text or dates, or be masked.
        raise TypeError(
            f"`{name}` must be an array that JAX can hold; got {type(x).__name__} of {x.dtype}. "
            "Convert it to a plain NumPy array of numbers or bools."
        ) from error
    if x.dtype.kind in "iu" and x.dtype != converted.dtype and x.size:
        # JAX would keep the lowest bits.
        limits = jnp.iinfo(converted.dtype)
        if not limits.min <= x.min() <= x.max() <= limits.max:
            raise ValueError(
                f"`{name}` must have numbers that {converted.dtype} holds; got {x.min()} to "
                f"{x.max()}. Give others: clip lengths and positions, and number ids anew."
            )
    return converted


def array_of_dtype(name: str, x, dtype: str) -> jax.Array:
    """Return `x` as an array; raise unless it has this dtype."""
    x = array(name, x)
    if x.dtype != dtype:
        raise TypeError(
            f"`{name}` must be {dtype}; got {x.dtype}. Cast it with `.astype(jnp.{dtype})`."
        )
    return x


def as_dtype(name: str, x) -> np.dtype:
    """Return `x` as a dtype; refuse None and arrays."""
    try:
        if x is not None and not is_array(x):
            return jnp.dtype(x)
    except (TypeError, ValueError):
        # NumPy refuses objects that are not dtypes by either error.
        pass
    raise TypeError(
        f"`{name}` must be a dtype; got {describe(x)}. Pass one such as `jnp.bfloat16`."
    )


def integers(
    name: str,
    x,
    shape: tuple[int, ...],
    letters: str,
    *,
    shared: bool = False,
    each: str | None = None,
) -> jax.Array:
    """Return `x` as an int32 array of this shape.

    Args:
        name: the name of the argument.
        x: its value.
        shape: the shape.
        letters: the shape in letters.
        shared: whether the first axis may be 1.
        each: the thing that a number belongs to; by default a batch element, or a token.
    """
    x = array_of_dtype(name, x, "int32")
    if x.shape != shape and not (shared and x.shape == (1, *shape[1:])):
        each = each or ("batch element" if len(shape) == 1 else "token")
        advice = f"Give one number for each {each}."
        if x.shape == shape[1:] and (shared or shape[0] == 1):
            advice = "Add the batch axis, by `[None]`."
        raise ValueError(
            f"`{name}` must have shape {letters} = {shape}"
            f"{', its first axis possibly 1' * shared}; got {x.shape}. {advice}"
        )
    return x


def broadcastable(name: str, x: jax.Array, scores_shape) -> jax.Array:
    """Return `x` with 4 axes, each of size 1 or the size of the scores."""
    if x.ndim > 4:
        raise ValueError(
            f"`{name}` must have at most 4 axes, [B, N, T, S]; got rank {x.ndim} "
            f"({name}.shape={x.shape}). Drop the extra axes."
        )
    shape = (1,) * (4 - x.ndim) + x.shape
    if any(have not in (1, want) for have, want in zip(shape, scores_shape, strict=True)):
        batch, _, q_len, kv_len = scores_shape
        advice = (
            "Give each axis size 1 or the scores' size; missing axes are added in front, heads are "
            "query heads."
        )
        if x.shape == (batch, kv_len):
            advice = f"Write `{name}[:, None, None]`, if it has a row of keys for each sequence."
        elif x.shape == (batch, q_len, kv_len):
            advice = f"Write `{name}[:, None]`, if all heads share it."
        raise ValueError(
            f"`{name}` must be broadcastable to [B, N, T, S] = {scores_shape}; got "
            f"{name}.shape={x.shape}. {advice}"
        )
    return x.reshape(shape)


def flag(name: str, value) -> bool:
    """Return a Python bool. Arrays are refused, because the value decides what is compiled."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"`{name}` must be True or False; got {describe(value)}. Pass a Python bool, which "
            "under `jax.jit` means a static argument."
        )
    return bool(value)


def at_least(least: int, name: str, x) -> int:
    """Return a Python int that is not smaller than `least`."""
    if not is_int(x) or x < least:
        raise ValueError(
            f"`{name}` must be an int of at least {least}; got {describe(x)}. Pass a Python int: "
            "it cannot be traced."
        )
    return int(x)


def share_to_drop(name: str, x) -> float:
    """Return the rate of a dropout, a Python number, because it is compiled in."""
    if not is_number(x):
        raise TypeError(
            f"`{name}` must be a number; got {describe(x)}. Pass a Python float: it is compiled "
            "in, so it cannot be traced."
        )
    if not 0 <= x < 1:
        raise ValueError(
            f"`{name}` must be at least 0 and less than 1; got {describe(x)}. Pass the share of "
            "probabilities to drop."
        )
    return float(x)


def check_tuple(name: str, arrays) -> None:
    """Raise unless `arrays` is a tuple or a list."""
    if not isinstance(arrays, (tuple, list)):
        raise TypeError(
            f"`{name}` must be a tuple of arrays; got {describe(arrays)}. Write (x,) for one."
        )


def operands(name: str, arrays, itemsize: int = 4) -> tuple[jax.Array, ...]:
    """Return the arrays that a user's function reads, of at most `itemsize` bytes a number.

    Every device has all of them, because the function may read any index.
    """
    check_tuple(name, arrays)
    named = {f"{name}[{i}]": array(f"{name}[{i}]", x) for i, x in enumerate(arrays)}
    for label, x in named.items():
        real = any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer, bool))
        if not real or x.dtype.itemsize > itemsize:
            raise TypeError(
                f"`{label}` must be real numbers or bools of at most {8 * itemsize} bits; got "
                f"{x.dtype}. Cast it with `.astype`."
            )
        if not x.size:
            raise ValueError(
                f"`{label}` must have at least one element; got shape {x.shape}. Drop it "
                "where there is nothing to read."
            )
    return tuple(map(whole, named.values()))


# Shapes of the scores and of the indices b, h, q, k for which a user's function is traced: a tile
# of one head, as in kernels, and all axes, as in plain JAX. All sizes differ. The third axis, of
# query heads that share a key, has size 1, which the function must keep.
TILES = (
    ((2, 3), ((), (1, 1), (2, 1), (1, 3))),
    ((2, 3, 1, 5, 7), ((2, 1, 1, 1, 1), (1, 3, 1, 1, 1), (1, 1, 1, 5, 1), (1, 1, 1, 1, 7))),
)


def function(name: str, fn, dtype, arrays: tuple[jax.Array, ...]) -> None:
    """Check the result of a user's function for each of `TILES`.

    Args:
        name: the name of the argument.
        fn: takes a score if there is a `dtype`, the indices b, h, q_pos, k_pos, and `arrays`.
        dtype: the dtype of scores and of the result; None for a function of indices, whose result
            is a bool.
        arrays: the result of `operands`.
    """
    check_function(name, fn)
    for tile in TILES:
        _on_tile(name, fn, dtype, arrays, *tile)


def check_function(name: str, fn) -> None:
    """Raise unless `fn` is a function that can be compiled in."""
    if not callable(fn):
        raise TypeError(
            f"`{name}` must be a function of the indices b, h, q_pos and k_pos; got "
            f"{describe(fn)}. Write it with elementwise jax.numpy."
        )
    try:
        hash(fn)
    except TypeError as error:
        raise TypeError(
            f"`{name}` must be hashable, because it is compiled in; got {describe(fn)}. Pass a "
            "plain function, and its arrays as operands."
        ) from error


def _on_tile(name: str, fn, dtype, arrays, shape: tuple[int, ...], shapes) -> None:
    """Check a user's function for scores of one shape and indices of the other shapes."""
    at = [jax.ShapeDtypeStruct(x, jnp.int32) for x in shapes]
    s = [] if dtype is None else [jax.ShapeDtypeStruct(shape, dtype)]
    trace = jax.make_jaxpr(lambda at, xs: fn(*at, *map(readable, xs)), return_shape=True)
    b, h, q, k = shapes
    try:
        program, out = trace([*s, *at], arrays)
    except Exception as error:  # The user's function runs here, and may raise anything.
        reason = str(error).partition("\n")[0].rstrip(".")
        advice = "Use elementwise jax.numpy, `jnp.where` for `if` and `&` for `and`"
        if not _takes(fn, len(s) + 4 + len(arrays)):
            advice = f"Give it {'s, ' * len(s)}b, h, q_pos, k_pos and a parameter for each operand"
        raise TypeError(
            f"`{name}` must be traceable for indices b of shape {b}, h of {h}, q_pos of {q} "
            f"and k_pos of {k}, followed by {len(arrays)} operands; got {type(error).__name__}: "
            f"{reason}. {advice}."
        ) from error
    if program.consts:
        raise TypeError(
            f"`{name}` must read arrays from its operands; got one that it made or closes over, "
            f"{describe(program.consts[0])}. Pass it as an operand, as "
            "in `ScoreMod(fn, (x,))` or `Predicate(fn, (x,))`."
        )
    if not isinstance(out, jax.ShapeDtypeStruct):
        raise TypeError(
            f"`{name}` must return one array; got {describe(out)}. Write `return` with a value "
            "computed from the indices."
        )
    # A function that reads the score and drops axes, as a sum does, is not elementwise.
    reads = bool(s) and uses(program.jaxpr, 0)
    fits = out.shape == shape or (
        not reads and out.ndim in (0, len(shape)) and broadcasts(out.shape, shape)
    )
    if dtype is None and not (fits and out.dtype == jnp.bool_):
        raise TypeError(
            f"`{name}` must return a bool for each pair of its indices; got {out.dtype} of shape "
            f"{out.shape} for q_pos of {q} and k_pos of {k}. Use elementwise comparisons."
        )
    # A Python number has no dtype of its own.
    number = out.weak_type and out.dtype.kind in "if"
    if dtype is not None and not (fits and (out.dtype == dtype or number)):
        raise TypeError(
            f"`{name}` must return scores of the shape and dtype that it is given; got {out.dtype} "
            f"of shape {out.shape} for {jnp.dtype(dtype).name} of shape {shape}. Cast the result "
            "with `.astype(s.dtype)`, and compute elementwise."
        )


def _takes(fn, count: int) -> bool:
    """Whether a function takes `count` positional arguments, as far as Python knows."""
    try:
        inspect.signature(fn).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        pass
    return True


def uses(program, number: int) -> bool:
    """Whether a jaxpr uses its argument of this number."""
    used = [*program.outvars, *(x for eqn in program.eqns for x in eqn.invars)]
    return any(x is program.invars[number] for x in used)


def broadcasts(shape, to) -> bool:
    """Whether an array of one shape broadcasts to another shape, and not to a larger one."""
    missing = len(to) - len(shape)
    return missing >= 0 and all(n in (1, m) for n, m in zip(shape, to[missing:], strict=True))


def held(x):
    """Return the array that `x` stands for, as variables of Flax do; other things as they are."""
    stands = not is_array(x) and hasattr(type(x), "__jax_array__")
    return x.__jax_array__() if stands else x


def is_array(x) -> bool:
    """Whether `x` is an array of JAX or NumPy, or a NumPy scalar."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def is_int(x) -> bool:
    """Whether `x` is an int of Python or NumPy, and no bool."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def is_number(x) -> bool:
    """Whether `x` is an int or float of Python or NumPy."""
    return is_int(x) or isinstance(x, (float, np.floating))


def describe(x: Any) -> str:
    """Return a description of `x` in a few words."""
    is_ref = isinstance(x, jax.Ref)
    if is_ref or (is_array(x) and not isinstance(x, np.generic)):
        return f"{'a Ref' if is_ref else 'an array'} of {x.dtype} with shape {tuple(x.shape)}"
    text = " ".join(repr(x).split())
    return f"{type(x).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
