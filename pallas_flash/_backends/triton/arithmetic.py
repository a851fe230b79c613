"""Arithmetic of scores in PTX, and in plain JAX for the interpreter.

Exponentials are in base 2: exp(scale * s - m) = exp2(c * s - m_log2) with c = scale * log2(e). An
element takes one multiply-add and one special-function instruction, which flush denormals: XLA
neither contracts a product and a difference nor drops the denormal fix-up of its own exp2.
"""

import jax
import jax.numpy as jnp

from pallas_flash._jax import compat
from pallas_flash._problem import dropout


def _ptx(code: str, *args, register="f", dtype=jnp.float32):
    registers = ("b" if x.dtype == bool else register for x in args)
    [out] = compat.triton().elementwise_inline_asm(
        code,
        args=args,
        constraints=",".join([f"={register}", *registers]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return out


def exp2(x, *, interpret: bool):
    """Return 2 to the power of x, elementwise."""
    return jnp.exp2(x) if interpret else _ptx("ex2.approx.ftz.f32 $0, $1;", x)


def exp2_scaled(s, c, shift, *, interpret: bool):
    """Return 2 to the power of s * c - shift, elementwise."""
    if interpret:
        return jnp.exp2(s * c - shift)
    # The negation folds into the multiply-add.
    return _ptx(
        "{ .reg .f32 t; neg.ftz.f32 t, $3; fma.rn.ftz.f32 t, $1, $2, t; ex2.approx.ftz.f32 "
        "$0, t; }",
        *jnp.broadcast_arrays(s, c, shift),
    )


def exp2_of_difference(s, m, c, shift=None, *, interpret: bool):
    """Return 2 to the power of (s - m) * c - shift, where c is log2(e); s is rounded first."""
    if interpret:
        # The minimum keeps compilers from fusing the difference with a product in s.
        x = (jnp.minimum(s, m) - m) * c
        return jnp.exp2(x if shift is None else x - shift)
    # Roundings are explicit for the same reason; 0f3FB8AA3B is log2(e).
    if shift is None:
        return _ptx(
            "{ .reg .f32 t; sub.rn.ftz.f32 t, $1, $2; mul.rn.ftz.f32 t, t, 0f3FB8AA3B; "
            "ex2.approx.ftz.f32 $0, t; }",
            *jnp.broadcast_arrays(s, m),
        )
    return _ptx(
        "{ .reg .f32 t, u; sub.rn.ftz.f32 t, $1, $2; neg.ftz.f32 u, $3; "
        "fma.rn.ftz.f32 t, t, 0f3FB8AA3B, u; ex2.approx.ftz.f32 $0, t; }",
        *jnp.broadcast_arrays(s, m, shift),
    )


def drop(kept, x, *, interpret: bool):
    """Return `x` where it is kept, else zero, for `x` that is then rounded to 16 bits.

    LLVM would round before a `where`, and then select and pair numbers of 16 bits.
    """
    if kept is None or interpret:
        return dropout.drop(kept, x)
    return _ptx("selp.f32 $0, $1, 0f00000000, $2;", x, kept)


def multiply_wide(x, m: int):
    """Return `dropout.multiply_wide`. The assembler keeps one of the two equal products."""

    def half(shift: str):
        code = f"{{ .reg .u64 t; mul.wide.u32 t, $1, {m}; {shift}cvt.u32.u64 $0, t; }}"
        # Results of inline assembly are signless.
        return _ptx(code, x, register="r", dtype=jnp.int32).astype(jnp.uint32)

    return half("shr.u64 t, t, 32; "), half("")


@jax.custom_jvp
def tanh(x):
    """Return the tanh as 1 - 2 / (1 + exp2(2 log2(e) x)), with an absolute error of about 2^-22.

    A soft cap multiplies that error.
    """
    return _ptx(
        "{ .reg .f32 t; mul.ftz.f32 t, $1, 0f4038AA3B; ex2.approx.ftz.f32 t, t; "
        "add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; "
        "fma.rn.ftz.f32 $0, t, 0fC0000000, 0f3F800000; }",
        x,
    )


@tanh.defjvp
def _(primals, tangents):
    y = tanh(*primals)
    return y, (1 - y * y) * tangents[0]
