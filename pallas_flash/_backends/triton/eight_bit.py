"""Words of two 8-bit numbers: how the matrix units' operands are made of quantised keys and values.

A tile of 8-bit numbers would be read from shared memory byte by byte, because the matrix units take
two rows of a column side by side. Words of 16 bits are read as bfloat16 is, 16 bytes at a time.
So pages are taken as words of two neighbouring columns, [..., H / 2], and a word is unpacked
into two tiles: even and odd columns. Products sum over columns in any order.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash._jax import compat
from pallas_flash._problem.paged import PagedProblem

# An int8 is its low 7 bits, minus 128 if its sign bit is set. 0x43 above a byte is the bfloat16
# 128 + (low 7 bits); above the sign bit alone it is 128 or 256.
_INT8 = """{{
.reg .b32 w, a, b, minus_one;
mov.b32 minus_one, 0xbf80bf80;
prmt.b32 w, $1, 0x43, {bytes};
and.b32 a, w, 0xff7fff7f;
and.b32 b, w, 0xff80ff80;
fma.rn.bf16x2 $0, b, minus_one, a;
}}"""
# The conversions to float16 and float32 are exact; the direct one has an eighth of their rate.
_FLOAT8_E4M3 = """{{
.reg .b32 w;
.reg .b16 x, y;
.reg .f32 a, b;
prmt.b32 w, $1, 0, {bytes};
cvt.u16.u32 x, w;
cvt.rn.f16x2.e4m3x2 w, x;
mov.b32 {{x, y}}, w;
cvt.f32.f16 a, x;
cvt.f32.f16 b, y;
cvt.rn.bf16x2.f32 $0, b, a;
}}"""
# The bytes of even and of odd columns in two words; 4 is a byte of the second operand.
_BYTES = {_INT8: ("0x4240", "0x4341"), _FLOAT8_E4M3: ("0x4420", "0x4431")}


def parts_of(p: PagedProblem) -> int:
    """Return 2 if the pages of the call are read as words of two columns, else 1."""
    quantised = p.key_scales is not None and p.value_scales is not None
    widths = p.head_dim, p.value_dim
    # A product takes 16 columns or more.
    words = all(n % 2 == 0 and n > 16 for n in widths)
    return 2 if quantised and words and p.dtype == jnp.bfloat16 else 1


def pages_of(p: PagedProblem) -> tuple[jax.Array, jax.Array]:
    """Return the pages as the kernel reads them: 8-bit [..., H] as int16 [..., H / 2], or as is."""
    if parts_of(p) == 1:
        return p.key_pages, p.value_pages
    pairs = (x.reshape(*x.shape[:-1], -1, 2) for x in (p.key_pages, p.value_pages))
    # This moves nothing.
    key_pages, value_pages = (lax.bitcast_convert_type(x, jnp.int16) for x in pairs)
    return key_pages, value_pages


def unpack(words, stored, dtype, *, interpret: bool):
    """Return the even and the odd columns of int16 [keys, H / 2], in `dtype`, bfloat16."""
    if interpret:
        pairs = lax.bitcast_convert_type(words, stored).astype(dtype)
        return pairs[..., 0], pairs[..., 1]
    code = _INT8 if stored == jnp.int8 else _FLOAT8_E4M3
    tiles = [
        compat.triton().elementwise_inline_asm(
            code.format(bytes=chosen),
            args=[words],
            constraints="=r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, dtype)],
        )[0]
        for chosen in _BYTES[code]
    ]
    return tuple(tiles)
